"""The gateway that commands ask: which one, and what its client takes from a server."""

import inspect
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer

from kvpool import cli
from kvpool.cli import base
from kvpool.client.gateway import GatewayClient
from kvpool.errors import (
    ConfigError,
    InvalidRequest,
    NotAuthenticated,
    ProtocolError,
    Unavailable,
)
from kvpool.http_client import ANSWER_BYTES_MAX
from tests.support.waiting import PATIENCE_S


def client_of(url: str, token: str = "t" * 40) -> GatewayClient:
    return GatewayClient(url, "default", {"KVPOOL_GATEWAY_TOKEN": token})


# ---- which one, and with what --------------------------------------------------------------------


def test_a_socket_is_this_machines_daemon(monkeypatch):
    monkeypatch.setenv("KVPOOL_GATEWAY", "https://node-a:7071")
    assert base.gateway(None) == "https://node-a:7071"
    assert base.gateway("/b.sock") == ""
    base.only_here("rm", "/b.sock")
    with pytest.raises(InvalidRequest, match="KVPOOL_GATEWAY is set"):
        base.only_here("rm", None)
    monkeypatch.delenv("KVPOOL_GATEWAY")
    assert base.gateway(None) == ""


@pytest.mark.parametrize(
    "url",
    [
        "node-a:7071",
        "ftp://node-a",
        "https://user:word@node-a",
        "https://node-a/?x=1",
        "https://node-a/#x",
        "https://node-a:port",
        "https://nöde",
        "https://node-a/a b",
        "http://10.0.0.1:7071",
    ],
)
def test_a_url_that_would_give_the_token_away_or_is_none(url):
    with pytest.raises(ConfigError, match="KVPOOL_GATEWAY"):
        client_of(url)


def test_the_token_is_in_the_environment_or_in_a_file(tmp_path):
    for token in ("", "two words", "a\nb"):
        with pytest.raises(ConfigError, match="KVPOOL_GATEWAY_TOKEN") as caught:
            client_of("http://127.0.0.1:1", token)
        assert not token or token not in str(caught.value)
    file = tmp_path / "token"
    file.write_text("of-the-file\n")
    GatewayClient("http://[::1]:1", "default", {"KVPOOL_GATEWAY_TOKEN_FILE": str(file)})
    with pytest.raises(ConfigError, match="both set"):
        GatewayClient(
            "http://127.0.0.1:1",
            "default",
            {"KVPOOL_GATEWAY_TOKEN_FILE": str(file), "KVPOOL_GATEWAY_TOKEN": "t"},
        )


# ---- what a server may answer --------------------------------------------------------------------


@pytest.fixture
def answering() -> Iterator[Callable[..., GatewayClient]]:
    """A client of a server that sends these bytes to each request, and then closes or waits."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        over = threading.Event()
        threads = []

        def serve(answer: bytes, *, waits: bool) -> None:
            try:
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.recv(65536)
                        connection.sendall(answer)
                        if waits:
                            over.wait(PATIENCE_S)
                        # Closed with a request half read, a connection is reset, and the answer may be lost.
                        connection.shutdown(socket.SHUT_WR)
                        while connection.recv(65536):
                            pass
            except OSError:
                pass  # the test is over, or the client has enough

        def begin(answer: bytes, *, waits: bool = False) -> GatewayClient:
            thread = threading.Thread(target=serve, args=(answer,), kwargs={"waits": waits})
            thread.start()
            threads.append(thread)
            return client_of(f"http://127.0.0.1:{server.getsockname()[1]}")

        yield begin
        over.set()
        server.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(PATIENCE_S)


def http_answer(status: int, body: bytes, media: str = "application/json", more: str = "") -> bytes:
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {media}\r\n{more}"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


PROBLEM = "application/problem+json"


@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        (b"\x00\x01garbage\r\n\r\n", ProtocolError, "not a kvpool gateway"),
        (http_answer(200, b"<html>"), ProtocolError, "not a kvpool gateway"),
        (http_answer(200, b"7"), ProtocolError, "not a kvpool gateway"),
        (http_answer(200, b"{}"), ProtocolError, "not a kvpool gateway"),  # it names no request
        (http_answer(500, b"oh", "text/plain"), ProtocolError, "it answered 500"),
        (http_answer(400, b"[]", PROBLEM), ProtocolError, "it answered 400"),
        (
            http_answer(307, b"", more="Location: http://127.0.0.1:1/\r\n"),
            ProtocolError,
            "not followed",
        ),
        (
            http_answer(401, b'{"detail": "d", "code": "unauthorized"}', PROBLEM),
            NotAuthenticated,
            "does not know this token",
        ),
        (
            http_answer(403, b'{"detail": "too small", "code": "forbidden"}', PROBLEM),
            NotAuthenticated,
            r":\d+: too small",
        ),
        (
            http_answer(400, b'{"detail": "wrong", "code": "of-another-time"}', PROBLEM),
            InvalidRequest,
            r":\d+: wrong",
        ),
        (b"", Unavailable, "no gateway answers"),
    ],
)
def test_what_is_no_answer(answering, answer, kind, says):
    with answering(answer) as client, pytest.raises(kind, match=says):
        client.cluster()


def test_an_answer_that_is_too_long(answering):
    client = answering(http_answer(200, b" " * (ANSWER_BYTES_MAX + 1)))
    with client, pytest.raises(ProtocolError, match=f"more than {ANSWER_BYTES_MAX} bytes"):
        client.cluster()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        http_answer(200, b"{}").replace(b"Length: 2", b"Length: 9"),
    ],
    ids=["nothing", "half a head", "half a body"],
)
def test_a_server_that_says_no_more(answering, answer):
    client = answering(answer, waits=True)
    client.TIMEOUT_S = 0.05
    with client, pytest.raises(Unavailable, match=r":\d+ did not answer within 0\.05 s"):
        client.routing.engines()


def test_an_answer_that_is_cut_off(answering):
    client = answering(http_answer(200, b"{}").replace(b"Length: 2", b"Length: 9"))
    with client, pytest.raises(Unavailable, match="in the middle of its answer"):
        client.routing.engines()


# ---- every command is decided --------------------------------------------------------------------

HERE_ONLY = {
    *("demo", "serve", "router", "put", "get", "ls", "rm", "explain", "sim", "doctor", "version"),
    *("certs", "secret", "token", "audit"),
}
"""They concern this machine, or a server that they name themselves."""
ASKS_NOBODY = {("config", "check"), ("plan", "workload")}


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    children = getattr(command, "commands", None)
    if children is None:
        yield path, command
    for name, child in (children or {}).items():
        yield from leaves(child, (*path, name))


def test_each_command_asks_the_gateway_or_concerns_this_machine():
    for name in cli.COMMANDS:
        cli.load(name)
    found = dict(leaves(typer.main.get_command(base.app)))
    assert {path[0] for path in found} == set(cli.COMMANDS)
    assert set(cli.COMMANDS) >= HERE_ONLY and found.keys() >= ASKS_NOBODY
    for path, command in found.items():
        callback = inspect.unwrap(command.callback)
        module = inspect.getsource(inspect.getmodule(callback))
        if path[0] in HERE_ONLY:
            assert "at.client" not in module, path
            assert "client_of(" not in module, path
        elif path not in ASKS_NOBODY:
            asking = "asks(" in module or "client_of(" in module
            assert asking, f"{path}: neither in HERE_ONLY nor asks a gateway"
            assert "daemon_client(" not in module, path
            assert "socket" in {each.name for each in command.params}, path

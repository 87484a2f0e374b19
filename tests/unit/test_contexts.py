"""Contexts: their file, which one a command uses, and what a gateway's client takes from a server."""

import inspect
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import typer
from hypothesis import given, settings

from kvpool import cli
from kvpool.cli import base
from kvpool.cli.render import gateway_http
from kvpool.cli.render.contexts import (
    CONTEXTS_MAX,
    FILE_BYTES_MAX,
    LOCAL,
    Context,
    Contexts,
    changed,
    choose,
    open_gateway,
    path_of,
    read,
    used,
    without,
    write,
)
from kvpool.cli.render.gateway_http import GatewayClient, GatewayUrl
from kvpool.errors import (
    ConfigError,
    InvalidRequest,
    NotAuthenticated,
    ProtocolError,
    Unavailable,
)
from tests.support.waiting import PATIENCE_S

URL = "https://node-a.example.org:7071"
PROD = Context("prod", URL)
TEST = Context("test", "http://127.0.0.1:7071", tenant="red")

# ---- the file ------------------------------------------------------------------------------------

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True).filter(
    lambda name: name != LOCAL
)
texts = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters=[*map(chr, range(32)), "\x7f"]),
    max_size=60,
)
one_context = st.builds(
    Context,
    name=names,
    url=st.just(URL),
    token_file=texts,
    ca=texts,
    tenant=texts,
    insecure_http=st.booleans(),
)


@given(made=st.lists(one_context, max_size=6), data=st.data())
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_what_is_read(tmp_path_factory, made, data):
    path = tmp_path_factory.mktemp("contexts") / "kvpool" / "contexts.toml"
    found = Contexts()
    for each in made:
        found = changed(found, each)
    if made:
        found = used(found, data.draw(st.sampled_from(made)).name)
    write(path, found)
    assert read(path) == found


def test_the_file_and_its_folder_are_this_users(tmp_path):
    path = path_of({"HOME": str(tmp_path)})
    assert path == tmp_path / ".config" / "kvpool" / "contexts.toml"
    assert path_of({"HOME": "/", "XDG_CONFIG_HOME": "/x"}) == Path("/x/kvpool/contexts.toml")
    with pytest.raises(ConfigError, match="HOME"):
        path_of({})
    assert read(path) == Contexts()
    write(path, changed(Contexts(), PROD))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"current = ", "not a valid file of contexts"),
        (b"\xff", "not a valid file of contexts"),
        (b"other = 1", "unknown field"),
        (b'[context."a b"]\nurl = "x"', "not a valid file"),
        (b"[context.a]", "url"),
        (b'[context.a]\nurl = "x"\ntoken = "t"', "unknown field"),
        (b'[context.a]\nurl = "\\u0007"', "not a valid file"),
        (b"#" * (FILE_BYTES_MAX + 1), "bytes"),
        (
            b"".join(b'[context.c%d]\nurl = "x"\n' % n for n in range(CONTEXTS_MAX + 1)),
            "not a valid file",
        ),
    ],
)
def test_what_is_no_file_of_contexts(tmp_path, content, says):
    path = tmp_path / "contexts.toml"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=says):
        read(path)


def test_a_folder_is_no_file_of_contexts(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        read(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot"):
        write(tmp_path / "file" / "contexts.toml", Contexts())


@pytest.mark.parametrize(
    "wrong",
    [
        Context(LOCAL, URL),
        Context("a b", URL),
        Context("", URL),
        Context("x" * 64, URL),
        Context("a", "ftp://node-a"),
        Context("a", "https://user:word@node-a"),
        Context("a", "https://node-a/?x=1"),
        Context("a", "https://node-a:port"),
        Context("a", "https://nöde"),
        Context("a", "http://10.0.0.1:7071"),
        Context("a", URL, token_file="a\nb"),
        Context("a", URL, tenant="x" * 5000),
        Context("a", URL, token_file="a\udcff"),
    ],
)
def test_what_is_no_context(wrong):
    with pytest.raises(ConfigError):
        changed(Contexts(), wrong)


def test_the_current_one_stays():
    found = used(changed(changed(Contexts(), PROD), TEST), "prod")
    with pytest.raises(ConfigError, match="current context"):
        without(found, "prod")
    assert without(found, "test") == used(changed(Contexts(), PROD), "prod")
    with pytest.raises(ConfigError, match="no context 'gone'"):
        without(found, "gone")
    with pytest.raises(ConfigError, match="no context 'gone'"):
        used(found, "gone")
    assert used(found, LOCAL).current == ""


# ---- which one -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "variable", "current", "chosen"),
    [
        ("", "", "", None),
        ("", "", "prod", "prod"),
        ("", "test", "prod", "test"),
        ("prod", "test", "", "prod"),
        (LOCAL, "test", "prod", None),
        ("", LOCAL, "prod", None),
        ("test", "gone", "gone", "test"),
    ],
)
def test_the_option_comes_before_the_variable_and_that_before_the_current_one(
    tmp_path, given, variable, current, chosen
):
    environ = {"HOME": str(tmp_path), "KVPOOL_CONTEXT": variable, "KVPOOL_SOCKET": "/a.sock"}
    every = changed(changed(Contexts(), PROD), TEST)
    write(path_of(environ), Contexts(current, every.context))
    found = choose(given, None, environ)
    assert (None if found is None else found.name) == chosen
    if given in {"", LOCAL}:
        assert choose(given, "/b.sock", environ) is None
    else:
        with pytest.raises(InvalidRequest):
            choose(given, "/b.sock", environ)


def test_a_context_that_is_not_there(tmp_path):
    environ = {"HOME": str(tmp_path)}
    with pytest.raises(ConfigError, match="'gone'"):
        choose("gone", None, environ)
    with pytest.raises(ConfigError, match="'gone'"):
        choose("", None, environ | {"KVPOOL_CONTEXT": "gone"})
    assert choose("", None, {}) is None


def test_a_token_of_the_environment_goes_only_to_a_context_without_one(tmp_path):
    file = tmp_path / "token"
    file.write_text("of-the-file")
    file.chmod(0o600)
    environ = {"KVPOOL_GATEWAY_TOKEN": "of-the-environment"}
    own = Context("own", "http://127.0.0.1:1", str(file))
    assert open_gateway(own, "default", environ)._token == "of-the-file"
    assert open_gateway(TEST, "default", environ)._token == "of-the-environment"
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        open_gateway(own, "default", environ)
    for token in ("", "two words", "a\nb"):
        with pytest.raises(ConfigError, match="has no token") as caught:
            open_gateway(TEST, "default", {"KVPOOL_GATEWAY_TOKEN": token})
        assert not token or token not in str(caught.value)


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
            url = GatewayUrl(f"http://127.0.0.1:{server.getsockname()[1]}")
            return GatewayClient(url, "t" * 40, tenant="default", where="it")

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
        (http_answer(200, b'{"value": "x", "answer": 1}'), ProtocolError, "not a kvpool gateway"),
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
            "it: too small",
        ),
        (
            http_answer(400, b'{"detail": "wrong", "code": "of-another-time"}', PROBLEM),
            InvalidRequest,
            "it: wrong",
        ),
        (b"", Unavailable, "no gateway answers"),
    ],
)
def test_what_is_no_answer(answering, answer, kind, says):
    with answering(answer) as client, pytest.raises(kind, match=says):
        client.cluster()


def test_an_answer_that_is_too_long(answering, monkeypatch):
    monkeypatch.setattr(gateway_http, "ANSWER_BYTES_MAX", 1000)
    client = answering(http_answer(200, b" " * 1001))
    with client, pytest.raises(ProtocolError, match="more than 1000 bytes"):
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
def test_a_server_that_says_no_more(answering, monkeypatch, answer):
    monkeypatch.setattr(gateway_http, "TIMEOUT_S", 0.05)
    client = answering(answer, waits=True)
    with client, pytest.raises(Unavailable, match=r"it did not answer within 0\.05 s"):
        client.engines()


def test_an_answer_that_is_cut_off(answering):
    client = answering(http_answer(200, b"{}").replace(b"Length: 2", b"Length: 9"))
    with client, pytest.raises(Unavailable, match="in the middle of its answer"):
        client.engines()


# ---- every command is decided --------------------------------------------------------------------

ASKS_NOBODY = {("config", "check"), ("plan", "workload")}
"""They say so where a context is given for them."""


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    children = getattr(command, "commands", None)
    if children is None:
        yield path, command
    for name, child in (children or {}).items():
        yield from leaves(child, (*path, name))


def test_each_command_follows_a_context_or_says_that_it_does_not():
    for name in cli.COMMANDS:
        cli.load(name)
    found = dict(leaves(typer.main.get_command(base.app)))
    assert {path[0] for path in found} == set(cli.COMMANDS)
    assert set(cli.COMMANDS) >= base.HERE_ONLY
    assert found.keys() >= ASKS_NOBODY
    for path, command in found.items():
        callback = inspect.unwrap(command.callback)
        source = inspect.getsource(callback)
        module = inspect.getsource(inspect.getmodule(callback))
        if path[0] in base.HERE_ONLY:
            assert "client_of(" not in module, path
        elif path in ASKS_NOBODY:
            assert f'without_context("{" ".join(path)}")' in source, path
        elif path[0] != "context":
            assert "client_of(" in module, f"{path}: neither in HERE_ONLY nor asks `client_of`"
            assert "daemon_client(" not in module, path
            assert "socket" in {each.name for each in command.params}, path

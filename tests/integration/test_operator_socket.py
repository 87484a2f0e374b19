"""Operators apart from tenants: by a socket of their own, or by a token; root is nobody special."""

import os
import socket
import stat
import subprocess
import sys
from contextlib import ExitStack

import pytest

from kvpool.client import Client, OperatorClient
from kvpool.errors import NotAuthenticated, Unavailable
from kvpool.net import operator_socket_of
from kvpool.types import NamespaceRecord
from kvpool.wire import client as client_wire
from kvpool.wire import frame
from kvpool.wire import operator as operator_wire

RECORD = NamespaceRecord.simple("operators", block_bytes=4096, block_tokens=16)
NOBODY = 65534
TOKEN = "a token for operators alone"
AS_NOBODY = """
import os, sys
from kvpool.client import OperatorClient
from kvpool.errors import KvpoolError
os.setgroups([]); os.setgid(65534); os.setuid(65534)
with OperatorClient(sys.argv[1], timeout_s=60.0, connect=True, operator_token=sys.argv[2]) as client:
    client.stats()
    try:
        print(client.cluster()["nodes"] != [])
    except KvpoolError as error:
        print(error.code)
"""
LISTEN = """
import os, socket, sys
sock = socket.socket(socket.AF_UNIX)
sock.bind(sys.argv[1])
os.setgid(65534); os.setuid(65534)
sock.listen()
print("listens", flush=True)
while True:
    sock.accept()[0].recv(1)
"""

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to act as another user")


def said_to(path: str, *, token: str = "", client: str = "raw" * 5) -> object:
    """The answer to an operator's request of this process, which is root or the daemon's user, at a socket."""
    with socket.socket(socket.AF_UNIX) as sock, ExitStack() as stack:
        sock.settimeout(60)
        sock.connect(path)
        hello = client_wire.Hello(
            frame.PROTOCOL_VERSION,
            "default",
            "i",
            client,
            None,
            token,
        )
        sock.sendall(frame.encode(hello, 1))
        _, fds, _, _ = socket.recv_fds(sock, 1 << 16, 2)
        for fd in fds:
            stack.callback(os.close, fd)
        sock.sendall(frame.encode(operator_wire.Settings(), 2))
        reader = frame.FrameReader()
        frames: list[tuple[int, bytes]] = []
        while not frames:
            frames = reader.feed(sock.recv(1 << 20))
        return client_wire.decode_daemon(frames[0][1])


def is_refused(answer: object) -> bool:
    return isinstance(answer, frame.Error) and answer.code == "not_authenticated"


def as_nobody(path: str, token: str = "") -> str:
    command = [sys.executable, "-c", AS_NOBODY, path, token]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_who_opens_the_operators_socket_is_an_operator_and_root_is_nobody_special(start):
    daemon = start("--socket-mode", "666")
    operators = operator_socket_of(daemon.socket)
    assert stat.S_IMODE(os.stat(operators).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(daemon.socket).st_mode) == 0o666
    assert isinstance(said_to(operators), frame.Bytes)
    assert is_refused(said_to(daemon.socket)), "the same process, as a client"
    # One process may be both, and is no operator as a client because it is one elsewhere.
    assert isinstance(said_to(operators), frame.Bytes)
    assert is_refused(said_to(daemon.socket))
    assert is_refused(said_to(daemon.socket, token="guess" * 5))


def test_a_client_and_an_operator_of_one_process_are_two(start):
    daemon = start()
    with (
        Client(daemon.socket, timeout_s=60.0, connect=True) as client,
        OperatorClient(daemon.socket, timeout_s=60.0, connect=True) as operator,
    ):
        ns = client.open(RECORD)
        client.put(ns, [b"k" * 16], [bytes(4096)])
        assert operator.evict(digest=RECORD.digest()) == 1
        assert client.get(ns, [b"k" * 16]) == [None]


@needs_root
def test_another_user_is_no_operator(start, folder):
    os.chmod(folder, 0o755)
    daemon = start("--socket-mode", "666")
    os.chmod(os.path.dirname(daemon.socket), 0o755)
    assert as_nobody(daemon.socket) == "not_authenticated"


@needs_root
def test_with_a_token_its_holder_is_an_operator_by_either_socket(start, folder):
    os.chmod(folder, 0o755)
    daemon = start("--socket-mode", "666", KVPOOL_OPERATOR_TOKEN=TOKEN)
    os.chmod(os.path.dirname(daemon.socket), 0o755)
    operators = operator_socket_of(daemon.socket)
    for path in (operators, daemon.socket):
        assert isinstance(said_to(path, token=TOKEN), frame.Bytes)
        assert is_refused(said_to(path))
        assert is_refused(said_to(path, token=TOKEN[:-1]))
    assert as_nobody(daemon.socket, TOKEN) == "True"
    assert as_nobody(daemon.socket) == "not_authenticated"


def test_the_operators_socket_may_be_elsewhere(start, folder, monkeypatch):
    path = str(folder / "o.sock")
    daemon = start("--operator-socket", path)
    assert not os.path.exists(operator_socket_of(daemon.socket))
    client = OperatorClient(daemon.socket, timeout_s=60.0, connect=True)
    with client, pytest.raises(NotAuthenticated, match="operators' socket"):
        client.cluster()
    monkeypatch.setenv("KVPOOL_OPERATOR_SOCKET", path)
    with OperatorClient(daemon.socket, timeout_s=60.0, connect=True) as client:
        assert client.cluster()["nodes"]
    daemon.stop()
    assert not os.path.exists(path)


@needs_root
def test_a_socket_at_which_somebody_else_listens_is_given_nothing(folder, monkeypatch):
    path = str(folder / "replaced.sock")
    with subprocess.Popen(
        [sys.executable, "-c", LISTEN, path], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "listens\n"
            with pytest.raises(NotAuthenticated, match=f"user {NOBODY} listens"):
                Client(path, timeout_s=5.0, connect=True)
            monkeypatch.setenv("KVPOOL_DAEMON_UID", "0")
            with pytest.raises(NotAuthenticated, match="KVPOOL_DAEMON_UID"):
                Client(path, timeout_s=5.0, connect=True)
            monkeypatch.setenv("KVPOOL_DAEMON_UID", str(NOBODY))
            with pytest.raises(Unavailable):
                Client(path, timeout_s=0.5, connect=True)
        finally:
            process.kill()


@needs_root
def test_only_the_named_user_may_be_the_daemon(start, monkeypatch):
    daemon = start()
    monkeypatch.setenv("KVPOOL_DAEMON_UID", str(NOBODY))
    with pytest.raises(NotAuthenticated):
        Client(daemon.socket, timeout_s=60.0, connect=True)
    monkeypatch.setenv("KVPOOL_DAEMON_UID", "0")
    Client(daemon.socket, timeout_s=60.0, connect=True).close()

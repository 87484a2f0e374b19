"""No tenant can take all of a node's connections, engines or receive buffers, and nobody who has not said Hello can."""

import socket
import threading
from contextlib import ExitStack

import pytest

from kvpool.client import Client, OperatorClient
from kvpool.errors import KvpoolError
from kvpool.types import EngineRecord, NamespaceRecord
from kvpool.wire import client as client_wire
from kvpool.wire import frame
from tests.support.waiting import PATIENCE_S

CONFIG = """
memory = "16MiB"
clients_max = 16
engines_max = 4
[tenants.default]
memory = "8MiB"
announce = true
[tenants.other]
memory = "8MiB"
announce = true
"""
RECORD = NamespaceRecord.simple("shares", block_bytes=4096, block_tokens=16)
OWN = 4  # of 16 connections, each of two tenants


@pytest.fixture
def daemon(start):
    return start(config=CONFIG)


def connected(daemon, tenant):
    """A connection after its Hello; None: it was refused."""
    raw = daemon.raw()
    try:
        answer = raw.hello(tenant=tenant)
    except (BrokenPipeError, ConnectionResetError):
        return None  # refused before it had said anything
    return raw if isinstance(answer, client_wire.Welcome) else None


def test_connections_of_one_tenant_leave_room_for_another(daemon):
    while connected(daemon, "default"):
        pass
    mine = [connected(daemon, "other") for _ in range(OWN)]
    assert all(mine)
    assert connected(daemon, "other") is None, "the common half is taken"
    with daemon.client() as operator:
        assert operator.inspect().connections == 16 + 1, "an operator is let in all the same"


def test_engines_of_one_tenant_leave_room_for_another(daemon):
    def announces(stack, tenant, number):
        client = stack.enter_context(daemon.client(tenant=tenant, connect=True))
        ns = client.open(RECORD)
        try:
            client.engine.announce(ns, EngineRecord(f"http://127.0.0.1:{number}"))
        except KvpoolError:
            return False
        return True

    with ExitStack() as stack:
        done = [announces(stack, "default", 1000 + number) for number in range(4)]
        assert done == [True, True, True, False]
        assert announces(stack, "other", 2000)
        assert not announces(stack, "other", 2001)


def test_unfinished_requests_hold_no_more_than_a_share(daemon, until):
    """A dozen of them once held 16 MiB each, as long as their client liked."""
    half = 8 << 20
    with ExitStack() as stack:
        socks = []
        for _ in range(9):
            raw = connected(daemon, "default")
            assert raw is not None
            raw.sock.settimeout(PATIENCE_S)
            try:
                raw.sock.sendall(frame.HEADER.pack(2 * half, 1) + bytes(half))
                socks.append(raw.sock)
            except (BrokenPipeError, ConnectionResetError):
                pass
            stack.callback(raw.sock.close)
        # The last bytes are on their way still: it hangs up once it has read them.
        until(lambda: sum(not _hung_up(sock) for sock in socks) <= 6, "48 MiB of 64")
        other = connected(daemon, "other")
        assert other is not None
        other.sock.sendall(frame.HEADER.pack(half, 1) + bytes(half - 1))
        assert not _hung_up(other.sock)


def _hung_up(sock: socket.socket) -> bool:
    """Whether the daemon has closed the connection, or said why it will."""
    sock.settimeout(0.5)
    try:
        sock.recv(1 << 16)
        return True
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def test_those_who_say_no_hello_keep_nobody_out(daemon):
    with ExitStack() as stack:
        for _ in range(200):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.settimeout(PATIENCE_S)
            sock.connect(daemon.socket)
        assert connected(daemon, "default")
        assert connected(daemon, "other")


@pytest.mark.parametrize("who", [Client, OperatorClient])
def test_a_tenant_that_floods_leaves_time_for_another(daemon, until, who):
    """Eight connections ask for statistics without pause, and each answer costs the daemon more than the question."""
    ended = threading.Event()
    asked = frame.encode(client_wire.Stats(), 1) * 20

    def flood(raw):
        while not ended.is_set():
            raw.sock.sendall(asked)
            answered = 0
            while answered < 20:
                answered += len(raw.reader.feed(raw.sock.recv(1 << 18)))

    threads = [threading.Thread(target=flood, args=(connected(daemon, "other"),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        with who(daemon.socket, timeout_s=PATIENCE_S) as client:
            ns = client.open(RECORD)

            def waited():
                for number in range(20):
                    key = number.to_bytes(16, "big")
                    client.put(ns, [key], [bytes([number]) * 4096])
                    assert client.get(ns, [key]) == [bytes([number]) * 4096]
                return client.stats().tenant_waits

            until(waited, "the flood has to wait")
    finally:
        ended.set()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)

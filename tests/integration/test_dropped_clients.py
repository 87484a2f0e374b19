"""Clients that were dropped and not closed, and what the daemon frees of them."""

import gc
import os
import subprocess
import sys

import pytest

from kvpool.client import Client
from kvpool.errors import Unavailable
from kvpool.types import NamespaceRecord
from tests.support.client_inside import close_idle, connections_of
from tests.support.waiting import PATIENCE_S, until

RECORD = NamespaceRecord.simple("dropped", block_bytes=4096, block_tokens=16)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def use(socket: str, number: int) -> None:
    """Put with a client of its own, which nobody closes."""
    client = Client(socket, timeout_s=PATIENCE_S)
    assert client.put(client.open(RECORD), [key(number)], b"x" * 4096) == 1


def test_dropped_clients_shut_nobody_out(start):
    daemon = start("--clients-max", "8")
    for number in range(20):
        use(daemon.socket, number)
    gc.collect()
    until(lambda: daemon.stats().clients == 1, "only the client that asks is left")
    assert daemon.space().granted_bytes == 0


def test_clients_without_a_connection_do_not_count(start):
    """Their leases end by themselves; until then they keep nobody out."""
    daemon = start("--clients-max", "8")
    leases = []
    for number in range(20):
        use(daemon.socket, number)
        client = Client(daemon.socket, timeout_s=PATIENCE_S)
        leases.append(client.acquire(client.open(RECORD), [key(number)], lease_s=60.0))
        close_idle(client)
    assert all(lease is not None for lease in leases)
    assert daemon.stats().leases == 20


NEW_PIDS = ("unshare", "--pid", "--fork", "--kill-child")
new_pids = pytest.mark.skipif(
    subprocess.run([*NEW_PIDS, "true"], check=False, capture_output=True).returncode != 0,
    reason="this user may not make pid namespaces",
)


def interrupt_two(client: Client) -> None:
    """Leave two exchanges at a time, as Ctrl-C does."""
    connections = connections_of(client)
    with connections.request() as one, connections.request() as other:
        assert one is not other
        raise KeyboardInterrupt


@new_pids
def test_a_client_of_another_pid_namespace_has_several_connections_and_comes_back(start):
    """As an engine in a container of its own: the daemon sees no number of its process."""
    daemon = start(program=(*NEW_PIDS, sys.executable, "-m"))
    client = Client(daemon.socket, timeout_s=PATIENCE_S)
    namespace = client.open(RECORD)
    assert client.put(namespace, [key(1)], b"x" * 4096) == 1
    with client.acquire(namespace, [key(1)]) as lease:
        with pytest.raises(KeyboardInterrupt):
            interrupt_two(client)
        assert client.match(namespace, [key(1)]) == 1, "it may come back"
        lease.check()
    daemon.process.kill()  # `unshare` takes no other signal; the daemon ends with it


def test_a_refusal_names_the_process_that_has_the_connections(start):
    daemon = start("--clients-max", "4")
    held = [Client(daemon.socket, timeout_s=PATIENCE_S, connect=True) for _ in range(4)]
    own = f"process {os.getpid()} has 4 connections of 4 clients.*raise clients_max"
    with pytest.raises(Unavailable, match=own):
        Client(daemon.socket, timeout_s=PATIENCE_S, connect=True)
    for client in held:
        client.close()

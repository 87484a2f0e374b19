"""A client lets go of a dead daemon's memory, once nothing of it is in use, so that the next daemon finds it free."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from kvpool.client import Client
from kvpool.errors import Unavailable, UnknownReservation
from kvpool.storage.dram import KEEP_FREE_BYTES, PAGE
from kvpool.types import NamespaceRecord
from tests.support.client_inside import knows_no_daemon
from tests.support.waiting import PATIENCE_S

RECORD = NamespaceRecord.simple("memory", block_bytes=4096, block_tokens=16)
KEYS = [bytes([n]) * 16 for n in range(4)]


def held(but: frozenset[int] = frozenset()) -> frozenset[int]:
    """The segments that this process maps, or has a descriptor of, by their inodes. but: without these."""
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "kvpool-segment" in line:
            found.add(int(line.split()[4]))
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if "kvpool-segment" in os.readlink(entry):
                found.add(entry.stat().st_ino)
        except FileNotFoundError:
            pass  # of this very listing
    return frozenset(found - but)


@pytest.fixture
def mine(daemon):
    """A client without requests of its own, and the segments that are not its: others may still let go of theirs."""
    before = held()
    with Client(daemon.socket, timeout_s=PATIENCE_S, connect=True) as client:
        ns = client.open(RECORD)
        client.put(ns, KEYS, np.ones((4, 4096), np.uint8))
        assert len(held(before)) == 1
        yield client, ns, before


def test_an_idle_client_lets_go_when_the_daemon_dies(daemon, mine, until):
    client, ns, before = mine
    incarnation = client.incarnation
    daemon.kill()
    until(lambda: not held(before), "the memory")
    assert client.match(ns, KEYS) == 0
    assert client.incarnation == incarnation, "who answered last"


def test_what_is_in_use_stays_until_it_is_not(daemon, mine, until):
    client, ns, before = mine
    lease = client.acquire(ns, KEYS, lease_s=PATIENCE_S)
    reservation = client.reserve(ns, [b"n" * 16])
    view = lease.slots[0].view(0)
    daemon.kill()
    until(lambda: knows_no_daemon(client), "the death")
    assert bytes(view) == b"\1" * 4096
    assert lease.slots[0].table.any()
    reservation.slots.view(0)[:] = b"\2" * 4096
    with pytest.raises(Unavailable):
        client.commit(reservation)
    lease.release()
    reservation.abort()
    assert held(before)
    del lease, reservation
    assert held(before), "a view is enough"
    assert bytes(view) == b"\1" * 4096
    view.release()
    del view
    until(lambda: not held(before), "the memory")


def test_a_restarted_daemon_is_met_anew(daemon, start, mine, until):
    client, ns, before = mine
    reservation = client.reserve(ns, [b"n" * 16])
    daemon.kill()
    until(lambda: knows_no_daemon(client), "the death")
    start("--socket", daemon.socket, name="second")
    until(lambda: client.put(ns, KEYS, np.ones((4, 4096), np.uint8)) == 4, "the new daemon")
    with pytest.raises(UnknownReservation):
        client.commit(reservation)
    del reservation
    until(lambda: len(held(before)) == 1, "the new memory alone")


def test_the_doctor_says_what_a_starting_daemon_waits_for_and_who_holds_it(
    daemon, start, mine, until, clean_environ, folder
):
    client, ns, _ = mine
    lease = client.acquire(ns, KEYS, lease_s=PATIENCE_S)
    daemon.kill()
    until(lambda: knows_no_daemon(client), "the death")
    # Less than the machine has, and more than is ever free.
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory = f"{total - KEEP_FREE_BYTES - PAGE}"
    second = start(
        *("--socket", daemon.socket, "--memory", memory, "--memory-wait-s", f"{PATIENCE_S}"),
        ready=False,
        name="second",
    )

    def ask(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "kvpool.cli", *words, "--socket", daemon.socket],
            capture_output=True,
            text=True,
            check=False,
            env=clean_environ(folder),
        )

    def found() -> dict[str, str]:
        return {
            finding["topic"]: finding["found"]
            for finding in json.loads(ask("doctor", "--json").stdout)["findings"]
        }

    until(lambda: "starting daemon" in found(), "the daemon's waiting")
    assert f"process {os.getpid()}, 32 MiB" in found()["memory of the last daemon"]
    status = ask("status")
    assert status.returncode == 3
    assert "is starting, and waits for memory" in status.stderr
    until(lambda: f"(process {os.getpid()}, 32 MiB)" in second.stderr, "the log")
    lease.release()
    del lease
    until(lambda: "memory of the last daemon" not in found(), "the memory")
    assert second.stop() == 0
    assert "starting daemon" not in found()


def test_a_closed_client_leaves_no_thread(daemon, until):
    def watchers() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "kvpool-watch"}

    before = watchers()  # of clients before, which may be about to end
    client = Client(daemon.socket, timeout_s=PATIENCE_S, connect=True)
    assert len(watchers() - before) == 1
    client.close()
    until(lambda: not watchers() - before, "the end of its thread")

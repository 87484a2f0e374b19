"""Why a read missed: real daemons, one reason after the other."""

import contextlib
import os
import shutil
import signal
from pathlib import Path

import pytest

from kvpool.errors import InvalidRequest
from kvpool.telemetry.memory_stats import Missed
from kvpool.types import NamespaceRecord
from tests.support.signals import send

NBYTES = 64 << 10
PLAIN = NamespaceRecord.simple("model-a", block_bytes=NBYTES, block_tokens=16)
OTHER = NamespaceRecord(
    {"model": "model-a", "block_tokens": 16, "dtype": "float8"},
    NamespaceRecord.simple("model-a", block_bytes=NBYTES, block_tokens=16).parts,
)


@pytest.fixture
def client_of(start):
    """A client of a new daemon, which is closed before the daemon ends."""
    with contextlib.ExitStack() as stack:

        def begin(*args, **settings):
            return stack.enter_context(start(*args, **settings).client())

        yield begin


def keys(first: int, end: int) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in range(first, end)]


def put(client, ns, first, end):
    return client.put(ns, keys(first, end), [bytes(NBYTES)] * (end - first))


def why(client, ns, first, end):
    return client.routing.why_missing(ns.digest, keys(first, end))


def miss(client, ns, first, end, **settings):
    """Read a prefix that is not all there."""
    lease = client.acquire(ns, keys(first, end), **settings)
    if lease is not None:
        with lease:
            assert lease.blocks < end - first


def counted(client, ns):
    return client.stats().tenants["default"].namespaces[ns.digest.hex()].misses


def test_never_stored_and_counted_once_with_the_blocks_behind_it(client, until):
    ns = client.open(PLAIN)
    put(client, ns, 0, 3)
    found = why(client, ns, 0, 5)
    assert (found["asked"], found["memory_blocks"], found["blocks"]) == (5, 3, 3)
    assert found["missing"]["reason"] == "never_stored"
    assert found["missing"]["key"] == keys(3, 4)[0].hex()
    assert found["last"] is None
    assert found["reach_s"] is None, "nothing was forgotten"
    miss(client, ns, 0, 5)
    client.pull(ns, keys(0, 5), wait_s=0.1)  # the same read, as an engine's
    assert why(client, ns, 0, 5)["last"]["found"] == 3
    until(lambda: counted(client, ns), "it is counted")
    assert counted(client, ns) == {"never_stored": Missed(1, 2)}
    put(client, ns, 3, 5)
    there = why(client, ns, 0, 5)
    assert there["missing"] is None
    assert there["last"]["reason"] == "never_stored", "the last miss is remembered"


def test_evicted_by_a_put_of_another_namespace(client_of):
    client = client_of("--memory", "4MiB", "--policy", "lru")
    ns, other = client.open(PLAIN), client.open(OTHER)
    put(client, ns, 0, 8)
    for first in range(1000, 1128, 8):
        put(client, other, first, first + 8)
    found = why(client, ns, 0, 8)["missing"]
    assert (found["reason"], found["tier"], found["by"]) == ("full", "dram", other.digest.hex())
    assert found["age_s"] >= 0
    assert found["idle_s"] >= 0
    put(client, ns, 0, 8)
    assert why(client, ns, 0, 8)["missing"] is None


def test_expired(client, until):
    ns = client.open(PLAIN, ttl_s=1.0)
    put(client, ns, 0, 2)
    until(lambda: not client.contains(ns, keys(0, 2)).any(), "they expire")
    assert why(client, ns, 0, 2)["missing"]["reason"] == "ttl"


def test_removed_evicted_by_an_operator_and_cleared(client):
    ns = client.open(PLAIN)
    put(client, ns, 0, 3)
    client.remove(ns, keys(0, 1))
    assert why(client, ns, 0, 3)["missing"]["reason"] == "removed"
    client.evict(b"".join(keys(1, 2)), digest=ns.digest)
    assert why(client, ns, 1, 3)["missing"]["reason"] == "operator"
    client.clear(ns.digest)
    assert why(client, ns, 2, 3)["missing"]["reason"] == "epoch"
    put(client, ns, 10, 20)
    assert why(client, ns, 2, 3)["missing"]["reason"] == "epoch", "and when their slots are freed"


def test_in_another_namespace_and_which_fact_differs(client):
    ns, other = client.open(PLAIN), client.open(OTHER)
    put(client, other, 0, 2)
    found = why(client, ns, 0, 2)["missing"]
    assert (found["reason"], found["where"]) == ("other_namespace", other.digest.hex())
    assert found["differs"] == {"dtype": ["float8", None]}
    client.remove(other, keys(0, 2))
    assert why(client, ns, 0, 2)["missing"]["reason"] == "other_namespace", "or was there lately"


def test_on_a_disk_but_nobody_waited_for_it(client_of, folder, until):
    disk = f"{folder / 'disk'}=64MiB"
    client = client_of(
        "--memory", "4MiB", "--policy", "lru", "--ssd", disk, "--ssd-write", "through"
    )
    ns = client.open(PLAIN)
    put(client, ns, 0, 8)
    until(lambda: sum(d.blocks for d in client.stats().tiers.ssd) >= 8, "they are written")
    for first in range(1000, 1128, 8):
        put(client, ns, first, first + 8)
    until(lambda: not client.contains(ns, keys(0, 8)).any())
    miss(client, ns, 0, 8)
    told = why(client, ns, 0, 8)
    assert (told["memory_blocks"], told["blocks"], told["missing"]) == (0, 8, None)
    assert told["last"]["reason"] == "not_asked"
    assert client.pull(ns, keys(0, 8), wait_s=20.0) == 8
    assert why(client, ns, 0, 8)["last"] is None, (
        "the pull was for the same read, which did not miss"
    )


def test_on_a_disk_that_was_lost(start, folder, until):
    daemon = start(
        *("--memory", "4MiB", "--policy", "lru", "--ssd-write", "through"),
        *("--ssd", f"{folder / 'disk'}=64MiB"),
    )
    with daemon.client() as client:
        ns = client.open(PLAIN)
        put(client, ns, 0, 8)
        until(lambda: sum(d.blocks for d in client.stats().tiers.ssd) >= 8, "they are written")
        for first in range(1000, 1128, 8):
            put(client, ns, first, first + 8)
        until(lambda: not client.contains(ns, keys(0, 8)).any())
        assert why(client, ns, 0, 8)["blocks"] == 8
        worker = disk_worker(daemon)
        send(worker, signal.SIGSTOP)  # it writes there
        shutil.rmtree(folder / "disk")
        os.kill(worker, signal.SIGKILL)
        until(lambda: why(client, ns, 0, 8)["blocks"] == 0, "its end is seen")
        found = why(client, ns, 0, 8)["missing"]
        assert (found["reason"], found["where"]) == ("disk_lost", str(folder / "disk"))


def disk_worker(daemon):
    """Its process."""
    for pid in daemon.family():
        command = Path(f"/proc/{pid}/cmdline")
        if command.exists() and b"kvpool.daemon.workers.disk_worker" in command.read_bytes().split(
            b"\0"
        ):
            return pid
    raise AssertionError("no process of a disk")


def test_what_is_not_remembered_is_not_guessed(client_of):
    client = client_of("--departures-max", "4")
    ns = client.open(PLAIN)
    put(client, ns, 0, 10)
    client.remove(ns, keys(0, 10))
    assert why(client, ns, 9, 10)["missing"]["reason"] == "removed"
    found = why(client, ns, 0, 10)
    assert found["missing"]["reason"] == "forgotten"
    assert found["reach_s"] >= 0
    off = client_of("--departures-max", "0", name="off")
    ns = off.open(PLAIN)
    miss(off, ns, 0, 2)
    assert why(off, ns, 0, 2)["missing"]["reason"] == "forgotten"
    assert counted(off, ns) == {}


def test_another_tenant_learns_nothing(client):
    with pytest.raises(InvalidRequest, match="is not open on this node"):
        client.routing.why_missing(bytes(16), keys(0, 1))

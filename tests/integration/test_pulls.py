"""Two daemons: blocks go from one's segment to the other's, whole and right, or not at all."""

import signal
import time
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

from kvpool.client import Client
from kvpool.types import Namespace, NamespaceRecord, PartKind, PartSpec
from tests.support.signals import send
from tests.support.waiting import PATIENCE_S, until

NBYTES = 64 << 10
RECORD = NamespaceRecord.simple("pulled", block_bytes=NBYTES, block_tokens=16)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def block(number: int, nbytes: int = NBYTES) -> bytes:
    return np.random.default_rng(number).bytes(nbytes)


def keys_of(numbers: range) -> list[bytes]:
    return [key(number) for number in numbers]


class Pair:
    """Node A, whose blocks node B pulls."""

    def __init__(self, start, **settings):
        self.a = start("--listen", "tcp://127.0.0.1:0", name="a", **settings)
        self.url = self.a.ready.rsplit("peers at ", 1)[1].strip()
        self.b = start("--peer", self.url, name="b")
        self.at_a: Client = self.a.client(connect=True)
        self.at_b: Client = self.b.client(connect=True)

    def put(self, numbers: range, record: NamespaceRecord = RECORD) -> None:
        blocks = [block(number) for number in numbers]
        assert self.at_a.put(self.at_a.open(record), keys_of(numbers), blocks) == len(blocks)

    @property
    def ns_b(self) -> Namespace:
        return self.at_b.open(RECORD)

    def counter(self, client: Client, name: str) -> int:
        return getattr(client.stats().counters, name)

    def used_at_b(self) -> int:
        return self.at_b.stats().tenants["default"].space.bytes_used


@pytest.fixture
def pair(start) -> Iterator[Pair]:
    both = Pair(start)
    yield both
    both.at_a.close()
    both.at_b.close()


def test_blocks_arrive_whole_and_stay(pair):
    pair.put(range(50))
    assert pair.at_b.match(pair.ns_b, keys_of(range(50))) == 0
    assert pair.at_b.pull(pair.ns_b, keys_of(range(60)), wait_s=PATIENCE_S) == 50
    pair.a.kill()
    got = pair.at_b.get(pair.ns_b, keys_of(range(60)))
    assert got == [block(n) for n in range(50)] + [None] * 10


def test_acquire_waits_for_what_a_peer_has(pair):
    pair.put(range(20))
    assert pair.at_b.acquire(pair.ns_b, keys_of(range(20))) is None
    with pair.at_b.acquire(pair.ns_b, keys_of(range(25)), wait_s=PATIENCE_S) as lease:
        assert lease.blocks == 20
        assert [bytes(lease.slots[0].view(i)) for i in range(20)] == [block(n) for n in range(20)]
        assert lease.valid


def test_only_what_is_missing_travels(pair):
    pair.put(range(20))
    pair.at_b.put(pair.ns_b, keys_of(range(12)), [block(n) for n in range(12)])
    assert pair.at_b.pull(pair.ns_b, keys_of(range(20)), wait_s=PATIENCE_S) == 20
    assert pair.counter(pair.at_b, "pulled_blocks") == 8
    assert pair.at_b.pull(pair.ns_b, keys_of(range(20)), wait_s=PATIENCE_S) == 20
    assert pair.counter(pair.at_b, "pulled_blocks") == 8


def test_all_parts_travel_as_the_hit_rule_needs_them(pair):
    record = NamespaceRecord(
        {"model": "hybrid"}, (PartSpec(NBYTES), PartSpec(8192, PartKind.WINDOW, window_blocks=3))
    )
    at_a, at_b = pair.at_a.open(record), pair.at_b.open(record)
    keys = keys_of(range(10))
    pair.at_a.put(at_a, keys, [block(n) for n in range(10)], part=0)
    assert pair.at_b.pull(at_b, keys, wait_s=PATIENCE_S) == 0, "no window, no use"
    pair.at_a.put(at_a, keys[5:9], [block(n, 8192) for n in range(5, 9)], part=1)
    assert pair.at_b.pull(at_b, keys, wait_s=PATIENCE_S) == 9
    assert pair.at_b.contains(at_b, keys, part=1).tolist() == [False] * 6 + [True] * 3 + [False]
    with pair.at_b.acquire(at_b, keys) as lease:
        window = lease.slots[1]
        assert (lease.blocks, window.first) == (9, 6)
        assert [bytes(window.view(i)) for i in range(3)] == [block(n, 8192) for n in (6, 7, 8)]


def test_a_flipped_byte_reads_as_a_miss_is_counted_and_dropped(pair):
    pair.put(range(8))
    with pair.at_a.acquire(pair.at_a.open(RECORD), keys_of(range(8))) as lease:
        slots = lease.slots[0]
        slots.table[slots.rows[5], 12345] ^= 1
    assert pair.at_b.pull(pair.ns_b, keys_of(range(8)), wait_s=PATIENCE_S) == 5
    got = pair.at_b.get(pair.ns_b, keys_of(range(8)))
    assert got[5] is None
    assert [got[n] for n in (0, 1, 2, 3, 4, 6, 7)] == [block(n) for n in (0, 1, 2, 3, 4, 6, 7)]
    assert pair.counter(pair.at_b, "checksum_mismatches") == 1
    # The owner is told, looks for itself, and drops its broken copy; the others stay.
    until(lambda: not pair.at_a.contains(pair.at_a.open(RECORD), key(5))[0], "the copy is dropped")
    assert pair.counter(pair.at_a, "checksum_mismatches") == 1
    assert pair.at_a.contains(pair.at_a.open(RECORD), keys_of(range(8))).sum() == 7


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_owner_that_dies_or_hangs_is_a_miss_in_time(pair, how):
    pair.put(range(8))
    assert pair.at_b.pull(pair.ns_b, keys_of(range(2)), wait_s=PATIENCE_S) == 2
    used = pair.used_at_b()
    control = psutil.Process(pair.a.pid)
    for process in [control, *control.children()]:
        send(process.pid, how)
    begun = time.monotonic()
    assert pair.at_b.pull(pair.ns_b, keys_of(range(8)), wait_s=2) == 2
    assert time.monotonic() - begun < PATIENCE_S / 2
    until(lambda: pair.at_b.stats().fetch.peers[0].failed >= 1)
    until(lambda: pair.used_at_b() == used, "the slots for what did not come are back")
    assert pair.at_b.get(pair.ns_b, keys_of(range(3)))[:2] == [block(0), block(1)]


def test_daemons_with_different_secrets_do_not_talk(start):
    config = 'cluster_secret = "{}"\n'
    a = start("--listen", "tcp://127.0.0.1:0", name="a", config=config.format("one" * 10))
    url = a.ready.rsplit("peers at ", 1)[1].strip()
    b = start("--peer", url, name="b", config=config.format("two" * 10))
    with a.client(connect=True) as at_a, b.client(connect=True) as at_b:
        at_a.put(at_a.open(RECORD), key(1), [block(1)])
        assert at_b.pull(at_b.open(RECORD), key(1), wait_s=PATIENCE_S) == 0
        assert "secret" in at_b.stats().fetch.peers[0].last_error


def test_a_peer_with_other_sizes_is_a_miss_and_says_so(pair):
    pair.put(range(3))
    other = NamespaceRecord(RECORD.fields, (PartSpec(NBYTES // 2),))
    assert other.digest() == RECORD.digest()
    assert pair.at_b.pull(pair.at_b.open(other), keys_of(range(3)), wait_s=PATIENCE_S) == 0
    assert str(NBYTES) in pair.at_b.stats().fetch.peers[0].last_error


def test_off_loopback_nothing_listens_without_a_secret(start):
    daemon = start("--listen", "tcp://0.0.0.0:0", ready=False)
    assert daemon.wait_end() == 1
    assert "KVPOOL_CLUSTER_SECRET" in daemon.stderr


def test_a_pull_into_a_pool_that_is_held_brings_what_fits(start):
    a = start("--listen", "tcp://127.0.0.1:0", name="a")
    url = a.ready.rsplit("peers at ", 1)[1].strip()
    b = start("--peer", url, "--memory", "4MiB", name="b")
    with a.client(connect=True) as at_a, b.client(connect=True) as at_b:
        numbers = range(100)
        at_a.put(at_a.open(RECORD), keys_of(numbers), [block(n) for n in numbers])
        here = at_b.pull(at_b.open(RECORD), keys_of(numbers), wait_s=PATIENCE_S)
        assert 0 < here < 100
        assert at_b.get(at_b.open(RECORD), keys_of(range(here))) == [block(n) for n in range(here)]

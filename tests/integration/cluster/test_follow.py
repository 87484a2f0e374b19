"""Prompts that are followed: each block comes when it is committed, and whoever is lost is got over."""

import contextlib
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from kvpool.client import Client
from kvpool.errors import KvpoolError, Unavailable
from tests.support.waiting import PATIENCE_S

NBYTES = 32 << 10  # of the blocks that a seat reads


class Following:
    """A `follow` in a thread, with a client of its own; whoever ends it early closes that."""

    def __init__(self, seat, some, wait_s: float = PATIENCE_S, **settings) -> None:
        self.client: Client = seat.node.client(connect=True)
        self.ns = self.client.open(seat.record)
        self.found = None
        self.error = None
        keys = [n.to_bytes(16, "big") for n in some]

        def run() -> None:
            try:
                self.found = self.client.follow(self.ns, keys, wait_s=wait_s, **settings)
            except KvpoolError as error:
                self.error = error

        self.thread = threading.Thread(target=run)
        self.thread.start()

    @property
    def ended(self) -> bool:
        return not self.thread.is_alive()

    def result(self) -> int:
        self.thread.join(2 * PATIENCE_S)
        assert self.ended
        if self.error is not None:
            raise self.error
        assert self.found is not None
        return self.found


@pytest.fixture
def follow():
    """Follows that end with the test."""
    begun = []

    def begin(*args, **settings) -> Following:
        begun.append(Following(*args, **settings))
        return begun[-1]

    yield begin
    for one in begun:
        one.client.close()
        one.thread.join(2 * PATIENCE_S)


def under_way(seat) -> int:
    return seat.stats.prefix_streams.under_way


@pytest.mark.parametrize("source", ["a", "", "c", "nobody"])
def test_each_block_comes_when_it_is_committed(shared, numbers, until, follow, source):
    """Also where the client is wrong about the node, or knows none."""
    a, b, _ = shared.seats()
    some = numbers(24)
    before = b.stats.prefix_streams
    following = follow(b, some, source=source)
    until(lambda: under_way(b) == 1)
    for at, n in enumerate(some):
        assert not following.ended
        a.put([n])
        until(lambda upto=some[: at + 1]: b.here(upto) == len(upto), f"block {at}")
    assert following.result() == len(some)
    assert b.read(some, wait_s=0) == len(some)
    after = b.stats.prefix_streams
    assert after.blocks - before.blocks >= len(some) - 1
    assert (after.ended, after.whole) == (before.ended + 1, before.whole + 1)
    assert after.under_way == 0 and b.stats.leases == 0


def test_what_is_there_already_comes_too_and_from_whom_it_is(shared, numbers, until, follow):
    """The beginning is in other nodes' memory, the end is being computed."""
    a, b, c = shared.seats()
    some = numbers(60)
    c.put(some[:20])
    a.put(some[20:40])
    until(lambda: a.announced and c.announced)
    following = follow(b, some, source="a")
    until(lambda: b.here(some) == 40)
    a.put(some[40:])
    assert following.result() == 60
    assert b.read(some, wait_s=0) == 60


def test_parts_of_hybrid_models_come_as_far_as_the_whole_prompt_needs_them(
    shared, numbers, until, follow, hybrid
):
    a, b, _ = shared.seats(hybrid)
    some = numbers(32)
    following = follow(b, some, source="a")
    until(lambda: under_way(b) == 1)
    for at in range(0, 32, 4):
        assert not following.ended
        a.put(some[at : at + 4])
        until(lambda upto=some[: at + 4]: b.here(upto) == len(upto))
    assert following.result() == 32
    assert b.read(some, wait_s=0) == 32
    keys = [n.to_bytes(16, "big") for n in some]
    window = b.client.contains(b.ns, keys, part=1)
    assert list(window.nonzero()[0]) == [29, 30, 31], "no windows of shorter prefixes"
    assert list(b.client.contains(b.ns, keys, part=3).nonzero()[0]) == [31]


def test_a_prefix_of_a_hybrid_model_when_there_is_no_more(shared, numbers, until, follow, hybrid):
    """Its windows are others than those of the whole prompt; they are fetched when the time is almost up."""
    a, b, _ = shared.seats(hybrid)
    some = numbers(32)
    a.put(some[:16])
    until(lambda: a.announced)
    assert follow(b, some, wait_s=6.0, source="a").result() == 16
    assert b.read(some, wait_s=0) == 16


def test_some_parts_only(shared, numbers, until, follow, hybrid):
    a, b, _ = shared.seats(hybrid)
    some = numbers(8)
    following = follow(b, some, source="a", parts=[0])
    until(lambda: under_way(b) == 1)
    a.put(some)
    assert following.result() == 8
    keys = [n.to_bytes(16, "big") for n in some]
    assert not b.client.contains(b.ns, keys, part=1).any()


def test_what_has_come_by_the_deadline(shared, numbers, until, follow):
    a, b, _ = shared.seats()
    some = numbers(10)
    a.put(some[:4])
    a.put(some[6:])
    until(lambda: a.announced)
    assert follow(b, some, wait_s=4.0).result() == 4
    assert b.read(some, wait_s=0) == 4
    assert b.stats.leases == 0


def test_a_client_that_closes_calls_it_off_on_both_nodes(shared, numbers, until, follow):
    a, b, _ = shared.seats()
    following = follow(b, numbers(10), source="a")
    until(lambda: a.stats.prefix_streams.waiters == 1)
    following.client.close()
    with pytest.raises(Unavailable):
        following.result()
    until(lambda: under_way(b) == 0)
    until(lambda: a.stats.prefix_streams.waiters == 0)


def test_more_follows_than_questions_may_wait(shared, numbers, until, follow):
    a, b, _ = shared.seats()
    prompts = [numbers(3) for _ in range(40)]
    follows = [follow(b, some, source="a") for some in prompts]
    until(lambda: under_way(b) == 40)
    until(lambda: a.stats.prefix_streams.waiters == 32, "as many as one node may have")
    assert b.read(numbers(1), wait_s=0.2) == 0
    for some in prompts:
        a.put(some)
    assert [one.result() for one in follows] == [3] * 40
    until(lambda: a.stats.prefix_streams.waiters == 0)


def test_a_reset_ends_it(shared, numbers, until, follow):
    a, b, _ = shared.seats()
    some = numbers(6)
    following = follow(b, some, source="a")
    a.put(some[:3])
    until(lambda: b.here(some) == 3)
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(a.node.client(connect=True))
        other.reset(other.open(a.record))
        assert following.result() == 0


@pytest.mark.parametrize("source", ["a", ""])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_another_node_that_commits_the_rest(start_cluster, numbers, until, follow, number, source):
    """The node where it was computed is killed or stopped half-way; an engine elsewhere resumes."""
    world = start_cluster(nodes=3, environ={"KVPOOL_MEMBER_TTL_S": "5"})
    a, b, c = world.seats()
    some = numbers(30)
    following = follow(b, some, source=source)
    for n in some[:10]:
        a.put([n])
    until(lambda: b.here(some) == 10)
    node = world.node("a")
    node.kill() if number == signal.SIGKILL else node.signal(number)
    c.put(some[:12])
    for at in range(12, 30, 2):
        assert not following.ended
        c.put(some[at : at + 2])
        until(lambda upto=some[: at + 2]: b.here(upto) == len(upto), f"block {at}")
    assert following.result() == 30
    assert b.read(some, wait_s=0) == 30
    node.signal(signal.SIGCONT)


def test_an_owner_that_restarts_and_goes_on(start_cluster, numbers, until, follow):
    world = start_cluster(nodes=2, environ={"KVPOOL_MEMBER_TTL_S": "5"})
    a, b = world.seats()
    some = numbers(12)
    following = follow(b, some, source="a")
    a.put(some[:6])
    until(lambda: b.here(some) == 6)
    node = world.node("a")
    node.kill()
    node.start()
    again = world.seat("a")
    again.put(some[6:])
    assert following.result() == 12
    assert b.read(some, wait_s=0) == 12


def test_an_owner_that_is_drained_gives_what_it_has(start_cluster, numbers, until, follow):
    world = start_cluster(nodes=2)
    a, b = world.seats()
    some = numbers(10)
    a.put(some[:5])
    lease = a.client.acquire(a.ns, [some[0].to_bytes(16, "big")], lease_s=60)
    following = follow(b, some, source="a")
    until(lambda: a.stats.prefix_streams.waiters == 1)
    b.client.drain("a")
    until(lambda: a.stats.cluster.state == "draining")
    until(lambda: a.stats.prefix_streams.waiters == 0)
    b.put(some[5:])
    assert following.result() == 10
    lease.release()


# ---- ahead of the commit -------------------------------------------------------------------------------

WRITER = """
import sys, time
import numpy as np
from kvpool.client import Client
from kvpool.types import NamespaceRecord
socket, nbytes, *numbers = sys.argv[1:]
client = Client(socket, connect=True)
ns = client.open(NamespaceRecord.simple("cluster", block_bytes=int(nbytes), block_tokens=16))
held = client.reserve(ns, [int(n).to_bytes(16, "big") for n in numbers])
held.slots.table[held.slots.rows, :] = 255
client.written(held, int(nbytes))
print("written", flush=True)
time.sleep(600)
"""


def block(number: int) -> bytes:
    """What a seat expects to read."""
    return np.random.default_rng([0, 0, number]).bytes(NBYTES)


class Writing:
    """Blocks that a seat's engine computes layer by layer."""

    def __init__(self, seat, some) -> None:
        self.seat = seat
        keys = [n.to_bytes(16, "big") for n in some]
        self.held = seat.client.reserve(seat.ns, keys)
        self.data = np.array([np.frombuffer(block(n), np.uint8) for n in some])
        self.at = 0

    def write(self, nbytes: int, data=None) -> None:
        """Up to that byte of each; said to be as it will be."""
        slots = self.held.slots
        part = slice(self.at, nbytes)
        slots.table[slots.rows, part] = (self.data if data is None else data)[:, part]
        self.seat.client.written(self.held, nbytes)
        self.at = nbytes

    def commit(self) -> None:
        assert self.seat.client.commit(self.held) == len(self.data)


def early(seat) -> int:
    return seat.stats.prefix_streams.early_bytes


def no_slot_is_left(seat) -> bool:
    """At a node that only pulls: what was reserved is a block, or was given back."""
    found = seat.stats.counters
    return found.reserved == found.committed + found.aborted + found.duplicates


def test_layers_come_while_the_next_ones_are_computed(shared, numbers, until, follow):
    a, b, _ = shared.seats()
    some = numbers(32)
    before = early(b)
    following = follow(b, some, source="a")
    until(lambda: under_way(b) == 1)
    writing = Writing(a, some)
    for layer in range(1, 4):
        writing.write(layer * NBYTES // 4)
        until(lambda n=layer: early(b) - before == len(some) * n * NBYTES // 4, f"{layer}")
    assert b.here(some) == b.match(some) == b.read(some, wait_s=0.0) == a.here(some) == 0
    assert b.client.locate([n.to_bytes(16, "big") for n in some]) == []
    writing.write(NBYTES)
    writing.commit()
    assert following.result() == len(some)
    assert b.read(some, wait_s=0) == len(some)
    until(lambda: no_slot_is_left(b))
    until(lambda: a.stats.leases == b.stats.leases == 0)


@pytest.mark.parametrize("source", ["a", ""])
def test_what_changes_after_it_was_called_written(shared, numbers, until, follow, source):
    """Is found out by the checksum: nobody reads a block that is half of the one and half of the other."""
    a, b, _ = shared.seats()
    some = numbers(32)
    before = b.stats.prefix_streams
    a.put(some[:1])
    following = follow(b, some, source=source)
    until(lambda: b.here(some) == 1)
    writing = Writing(a, some[1:])
    writing.write(NBYTES // 2, np.zeros_like(writing.data))
    until(lambda: early(b) > before.early_bytes)
    writing.at = 0
    writing.write(NBYTES)
    writing.commit()
    assert following.result() == len(some)
    assert b.read(some, wait_s=0) == len(some)
    after = b.stats.prefix_streams
    assert after.early_wrong - before.early_wrong == len(some) - 1
    assert a.stats.counters.checksum_mismatches == 0
    until(lambda: no_slot_is_left(b))


def test_a_writer_that_is_killed_and_another_one_that_writes_the_same(
    shared, numbers, until, follow
):
    a, b, _ = shared.seats()
    some = numbers(32)
    before = early(b)
    following = follow(b, some, source="a")
    command = [sys.executable, "-c", WRITER, a.node.socket, NBYTES, *some]
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE) as writer:
        assert writer.stdout.readline() == b"written\n"
        until(lambda: early(b) - before == len(some) * NBYTES)
        writer.kill()
    until(lambda: a.stats.counters.dead_holders > 0)
    assert b.here(some) == 0
    writing = Writing(a, some)
    writing.write(NBYTES // 2)
    until(lambda: early(b) - before == len(some) * NBYTES * 3 // 2)
    writing.write(NBYTES)
    writing.commit()
    assert following.result() == len(some)
    assert b.read(some, wait_s=0) == len(some)
    until(lambda: no_slot_is_left(b))


def test_a_follow_that_ends_before_the_commit(shared, numbers, until, follow):
    a, b, _ = shared.seats()
    some = numbers(32)
    before = early(b)
    following = follow(b, some, source="a", wait_s=6.0)
    writing = Writing(a, some)
    writing.write(NBYTES // 2)
    until(lambda: early(b) - before == len(some) * NBYTES // 2)
    assert following.result() == 0
    until(lambda: no_slot_is_left(b))
    writing.write(NBYTES)
    writing.commit()
    until(lambda: a.announced)
    assert b.read(some) == len(some)
    until(lambda: a.stats.leases == 0)


def test_an_owner_that_is_killed_with_half_of_it_written(start_cluster, numbers, until, follow):
    world = start_cluster(nodes=3, environ={"KVPOOL_MEMBER_TTL_S": "5"})
    a, b, c = world.seats()
    some = numbers(32)
    following = follow(b, some, source="a")
    writing = Writing(a, some)
    writing.write(NBYTES // 2)
    until(lambda: early(b) == len(some) * NBYTES // 2)
    world.node("a").kill()
    resumed = Writing(c, some)
    resumed.write(NBYTES)
    resumed.commit()
    assert following.result() == len(some)
    assert b.read(some, wait_s=0) == len(some)
    until(lambda: no_slot_is_left(b))

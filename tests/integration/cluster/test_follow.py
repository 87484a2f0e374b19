"""Prompts that are followed: each block comes when it is committed, and whoever is lost is got over."""

import contextlib
import signal
import threading

import pytest

from kvpool.client import Client
from kvpool.errors import KvpoolError, Unavailable
from tests.support.waiting import PATIENCE_S


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
    # In the last second of its time a busy machine may do nothing.
    until(lambda: follow(b, some, wait_s=6.0, source="a").result() == 16)
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
    until(lambda: follow(b, some, wait_s=4.0).result() == 4, "the machine has come to it in time")
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
        other.namespaces.reset(other.open(a.record))
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

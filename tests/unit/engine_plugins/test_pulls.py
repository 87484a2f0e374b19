"""Asking for pulls: how many at a time, for how long, and not where nobody could answer."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvpool.engine_plugins.vllm.config import PluginConfig
from kvpool.engine_plugins.vllm.scheduler.pulls import OTHERS_S, Pulls
from kvpool.errors import NamespaceMismatch
from kvpool.telemetry.node_stats import NodeStats
from kvpool.types import NamespaceRecord, PartSpec
from tests.support.waiting import PATIENCE_S

RECORD = NamespaceRecord({"m": 1}, (PartSpec(8),))
WAIT_S = 1.0


def keys(number: int, blocks: int = 4) -> bytes:
    return b"".join(bytes([number, i]) * 8 for i in range(blocks))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make(pool: Any, threads: Any, clock: Clock, most: int = 2) -> Pulls:
    config = PluginConfig(pulls_max=most, follows_max=most, pull_wait_s=WAIT_S)
    pulls = Pulls(pool, threads, config, clock)
    pulls.enter(RECORD)
    return pulls


@pytest.fixture
def pulls(pool: Any, threads: Any, clock: Clock) -> Pulls:
    """Of a node with another one, which is known."""
    pool.others = 1
    pulls = make(pool, threads, clock)
    threads.run()
    return pulls


def count_stats(pool: Any) -> list[int]:
    asked = []
    stats = pool.stats

    def count() -> NodeStats:
        asked.append(1)
        return stats()

    pool.stats = count
    return asked


def test_a_node_that_is_alone_asks_for_nothing(pool: Any, threads: Any, clock: Clock) -> None:
    asked = count_stats(pool)
    pulls = make(pool, threads, clock)
    threads.run()
    for number in range(50):
        assert pulls.begin(0, keys(number)) is None
        clock.now += 0.9 * OTHERS_S / 50
    assert len(asked) == 1
    assert pool.pulls == []


def test_a_node_that_gets_company_finds_out(pool: Any, threads: Any, clock: Clock) -> None:
    pulls = make(pool, threads, clock)
    threads.run()
    pool.others = 1
    clock.now += OTHERS_S
    pull = pulls.begin(0, keys(1))
    assert pull is not None
    threads.run()
    assert len(pool.pulls) == 1
    pool.others = 0
    clock.now += OTHERS_S
    assert pulls.begin(0, keys(2)) is not None
    threads.run()
    assert len(pool.pulls) == 1
    assert pulls.begin(0, keys(3)) is None


def test_others_are_not_counted_for_every_pull(pool: Any, threads: Any, clock: Clock) -> None:
    pool.others = 1
    asked = count_stats(pool)
    pulls = make(pool, threads, clock)
    for number in range(10):
        pull = pulls.begin(0, keys(number))
        assert pull is not None
        threads.run()
        assert pulls.ended(pull)
    assert len(asked) == 1
    assert len(pool.pulls) == 10


def test_what_the_engine_reads_on_the_device_needs_not_be_brought(
    pulls: Pulls, pool: Any, threads: Any, pool_types: Any
) -> None:
    pool.device = pool_types.FakeDevice(7)
    names = keys(1)
    with pool.reserve(ns := pool.open(RECORD), names) as reservation:
        pool.commit(reservation)
    pool.lift(ns, 0, names)
    found = [pulls.begin(0, names, life=life) for life in (7, 0)]
    threads.run()
    assert [pulls.blocks(pull) for pull in found if pull] == [4, 0]
    assert pool.lives == [7, 0]


def test_no_more_than_so_many_ask_at_a_time(pulls: Pulls, pool: Any, threads: Any) -> None:
    waiting = [pulls.begin(0, keys(number)) for number in range(5)]
    for _ in range(3):
        assert not any(pulls.ended(pull) for pull in waiting if pull)
        assert len(threads.waiting) == 2
    threads.run()
    # Those that wait for a thread get it as they are asked about, in that order.
    assert [pulls.ended(pull) for pull in waiting if pull] == [True, True, False, False, False]
    assert len(threads.waiting) == 2
    threads.run()
    assert [pulls.ended(pull) for pull in waiting if pull] == [True] * 4 + [False]
    threads.run()
    assert len(pool.pulls) == 5


def test_waiting_for_a_thread_counts(pulls: Pulls, pool: Any, threads: Any, clock: Clock) -> None:
    pulls.begin(0, keys(0))
    pulls.begin(0, keys(1))
    third = pulls.begin(0, keys(2))
    assert third is not None
    clock.now += 0.75
    threads.run()
    assert not pulls.ended(third)
    threads.run()
    assert pool.pulls == [1.0, 1.0, 0.25]
    late = pulls.begin(0, keys(4))
    assert late is not None
    clock.now += WAIT_S
    assert pulls.ended(late)
    assert pulls.blocks(late) is None


def test_pulls_in_vain_are_left_out_for_a_while(pulls: Pulls, threads: Any, clock: Clock) -> None:
    pull = pulls.begin(0, keys(1))
    assert pull is not None
    clock.now += WAIT_S
    assert pulls.note(pull, 0) == WAIT_S
    assert pulls.begin(0, keys(2)) is None
    clock.now += 0.6
    pull = pulls.begin(0, keys(2))
    assert pull is not None
    clock.now += WAIT_S
    threads.run()
    pulls.note(pull, 3)  # late, but not in vain
    assert pulls.begin(0, keys(3)) is not None


def test_a_quick_no_is_not_in_vain(pulls: Pulls, threads: Any, clock: Clock) -> None:
    pull = pulls.begin(0, keys(1))
    assert pull is not None
    clock.now += WAIT_S / 4
    threads.run()
    clock.now += 5  # until a busy engine asks
    assert pulls.ended(pull)
    assert pulls.note(pull, 0) == WAIT_S / 4
    assert pulls.begin(0, keys(2)) is not None


@pytest.mark.parametrize("why", ["away", "refused"])
def test_a_daemon_that_does_not_pull_is_a_miss(
    pool: Any, threads: Any, clock: Clock, why: str
) -> None:
    pool.others = 1
    if why == "refused":

        def refuse(record: NamespaceRecord) -> None:
            raise NamespaceMismatch("other sizes")

        pool.open = refuse
    pulls = make(pool, threads, clock)
    pull = pulls.begin(0, keys(1))
    assert pull is not None
    pool.away = why == "away"
    threads.run()
    assert pulls.ended(pull)
    assert pulls.blocks(pull) == 0


def test_a_broken_invariant_is_not_hidden(pulls: Pulls, pool: Any, threads: Any) -> None:
    def broken(*_: Any, **__: Any) -> int:
        raise AssertionError("broken")

    pool.pull = broken
    pull = pulls.begin(0, keys(1))
    assert pull is not None
    threads.run()
    assert pulls.ended(pull)
    with pytest.raises(AssertionError):
        pulls.blocks(pull)


def test_waiting_ends_when_the_first_answers_and_close_drops_what_waits(
    pool: Any, clock: Clock
) -> None:
    pool.others = 1
    go_on, begun = threading.Event(), threading.Event()
    pull_now = pool.pull

    def slow(*arguments: Any, **options: Any) -> Any:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return pull_now(*arguments, **options)

    pool.pull = slow
    pulls = make(pool, ThreadPoolExecutor(1), clock, most=2)
    first, second = pulls.begin(0, keys(1)), pulls.begin(0, keys(2))
    assert first is not None
    assert second is not None
    assert begun.wait(PATIENCE_S)
    pulls.wait([first, second])  # nothing happens, and it returns
    assert not pulls.ended(first)
    go_on.set()
    while not pulls.ended(first):
        pulls.wait([first])
    pulls.close()
    assert len(pool.pulls) <= 2
    with pytest.raises(RuntimeError):
        pulls.begin(0, keys(3))

"""What the scheduler half asks the pool for, and when."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.engine_plugins.vllm.plan import StepDone, pack
from kvpool.errors import LimitExceeded
from kvpool.types import NamespaceRecord
from tests.unit.engine_plugins.scheduler.harness import TOKENS, Harness, tables

# --- lookups


def test_a_request_is_looked_up_once(harness: Harness) -> None:
    request = harness.request("r", 8)
    harness.store(request.block_hashes[:5])
    answers = {harness.half.matched_tokens(request, 0) for _ in range(20)}
    assert answers == {(5 * TOKENS, True)}
    assert harness.pool.acquires == 1


def test_a_miss_is_remembered_too(harness: Harness) -> None:
    request = harness.request("r", 8)
    for _ in range(20):
        assert harness.half.matched_tokens(request, 0) == (0, False)
    assert harness.pool.acquires == 1


def test_only_what_is_beyond_the_engines_own_hit_counts(harness: Harness) -> None:
    request = harness.request("r", 8)
    harness.store(request.block_hashes[2:5])
    assert harness.half.matched_tokens(request, 2 * TOKENS) == (3 * TOKENS, True)
    # Another request computed a block meanwhile: the same lease covers the rest.
    assert harness.half.matched_tokens(request, 3 * TOKENS) == (2 * TOKENS, True)
    assert harness.half.matched_tokens(request, 6 * TOKENS) == (0, False)
    assert harness.pool.acquires == 1
    # The engine evicted its own blocks: what was asked no longer covers the range.
    harness.store(request.block_hashes[:2])
    assert harness.half.matched_tokens(request, 0) == (5 * TOKENS, True)
    assert harness.pool.acquires == 2
    assert len(harness.pool.leases) == 1


def test_a_lookup_is_repeated_before_its_lease_ends(harness: Harness) -> None:
    request = harness.request("r", 4)
    harness.store(request.block_hashes)
    assert harness.half.matched_tokens(request, 0) == (4 * TOKENS, True)
    harness.now += 5.1
    assert harness.half.matched_tokens(request, 0) == (4 * TOKENS, True)
    assert harness.pool.acquires == 2
    assert len(harness.pool.leases) == 1


@pytest.mark.parametrize("why", ["skip", "consumer", "short"])
def test_no_lookup_where_none_is_of_use(pool: Any, block_pool: Any, why: str) -> None:
    harness = Harness(pool, block_pool, loads=why != "consumer")
    request = harness.request("r", 0 if why == "short" else 4)
    request.skip_reading_prefix_cache = why == "skip"
    assert harness.half.matched_tokens(request, 0) == (0, False)
    assert pool.acquires == 0


def test_short_hits_are_left_alone_when_so_configured(pool: Any, block_pool: Any) -> None:
    harness = Harness(pool, block_pool, min_load_blocks=3)
    request = harness.request("r", 4)
    harness.store(request.block_hashes[:2])
    assert harness.half.matched_tokens(request, 0) == (0, False)


@pytest.mark.parametrize("load_mode", ["sync", "async"])
def test_the_end_of_a_hit_is_computed_for_drafts(
    pool: Any, block_pool: Any, load_mode: str
) -> None:
    harness = Harness(pool, block_pool, draft_blocks=1, load_mode=load_mode)
    request = harness.request("r", 8, extra_tokens=0)
    harness.store(request.block_hashes)
    sync = load_mode == "sync"
    assert harness.half.matched_tokens(request, 0) == (7 * TOKENS, not sync)
    assert harness.half.matched_tokens(request, 6 * TOKENS) == (1 * TOKENS, not sync)
    # The engine has given up the last block of its own hit: the pool has no more than that.
    assert harness.half.matched_tokens(request, 7 * TOKENS) == (0, False)
    assert harness.pool.acquires == 1


def test_a_daemon_that_hangs_is_left_alone_for_a_while(harness: Harness) -> None:
    acquire = harness.pool.acquire

    def slow(*arguments: Any, **options: Any) -> None:
        harness.now += 0.05
        harness.pool.acquires += 1

    harness.pool.acquire = slow
    for number in range(50):
        harness.half.matched_tokens(harness.request(f"{number}", 4), 0)
    assert harness.pool.acquires == 1
    harness.now += 0.6
    harness.half.matched_tokens(harness.request("next", 4), 0)
    assert harness.pool.acquires == 2
    harness.now += 0.6
    harness.half.matched_tokens(harness.request("too early", 4), 0)
    assert harness.pool.acquires == 2
    harness.now += 0.6
    harness.pool.acquire = acquire
    request = harness.request("back", 4)
    harness.store(request.block_hashes)
    assert harness.half.matched_tokens(request, 0) == (4 * TOKENS, True)


def test_a_refused_lookup_is_a_miss(harness: Harness) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise LimitExceeded("too many leases")

    harness.pool.acquire = refuse
    assert harness.half.matched_tokens(harness.request("r", 4), 0) == (0, False)
    assert harness.half.counters.take()["failed_lookups"] == 1


# --- lookups of ranks at several nodes


@pytest.fixture
def spread(pool: Any, block_pool: Any) -> Harness:
    return Harness(pool, block_pool, ranks=2, several_nodes=True, load_mode="async")


def test_ranks_are_asked_and_each_loads_by_its_own_lease(spread: Harness) -> None:
    request = spread.request("r", 4)
    assert spread.half.matched_tokens(request, 0) == (None, False)
    assert spread.half.matched_tokens(request, 0) == (None, False)
    (lookup,) = spread.half.plan_step({}, lambda _: [[]]).lookups
    assert lookup.keys == pack(request.block_hashes)
    spread.half.step_done(StepDone(lookups={lookup.job: [4]}))
    assert spread.half.matched_tokens(request, 0) == (None, False)
    spread.half.step_done(StepDone(lookups={lookup.job: [3]}))
    assert spread.half.matched_tokens(request, 0) == (3 * TOKENS, True)
    assert spread.pool.acquires == 0, "the scheduler's own daemon is not asked"
    spread.half.allocated(request, tables(4), 3 * TOKENS)
    plan = spread.half.plan_step({}, lambda _: [[]])
    (load,) = plan.loads
    assert (load.lookup, load.token) == (lookup.job, "")
    assert plan.released == []
    spread.end(plan, ranks=2)
    assert spread.half.has_work()
    assert spread.half.plan_step({}, lambda _: [[]]).released == [lookup.job]
    assert not spread.half.has_work()


@pytest.mark.parametrize("answers", [[0, 4], [4]])
def test_a_rank_without_the_blocks_is_a_miss(spread: Harness, answers: list[int]) -> None:
    request = spread.request("r", 4)
    spread.half.matched_tokens(request, 0)
    (lookup,) = spread.half.plan_step({}, lambda _: [[]]).lookups
    spread.half.step_done(StepDone(lookups={lookup.job: answers}))
    spread.now += 60
    assert spread.half.matched_tokens(request, 0) == (0, False)
    assert spread.half.matched_tokens(request, 0) == (0, False)
    assert spread.half.plan_step({}, lambda _: [[]]).released == [lookup.job]


def test_what_ranks_lease_is_given_back_when_its_request_ends(spread: Harness) -> None:
    asked, leased = spread.request("a", 4), spread.request("b", 4)
    for request in (asked, leased):
        spread.half.matched_tokens(request, 0)
    lookups = spread.half.plan_step({}, lambda _: [[]]).lookups
    spread.half.step_done(StepDone(lookups={lookups[1].job: [4, 4]}))
    assert spread.half.matched_tokens(leased, 0) == (4 * TOKENS, True)
    for request in (asked, leased):
        spread.half.request_finished(request, [[]], completed=False)
    released = spread.half.plan_step({}, lambda _: [[]]).released
    assert sorted(released) == [lookup.job for lookup in lookups]


def test_blocks_that_the_engine_evicts_while_ranks_are_asked(spread: Harness) -> None:
    request = spread.request("r", 4)
    spread.half.matched_tokens(request, 2 * TOKENS)
    (lookup,) = spread.half.plan_step({}, lambda _: [[]]).lookups
    assert lookup.keys == pack(request.block_hashes[2:])
    spread.half.step_done(StepDone(lookups={lookup.job: [2, 2]}))
    assert spread.half.matched_tokens(request, 0) == (0, False)
    assert spread.half.plan_step({}, lambda _: [[]]).released == [lookup.job]
    # Asked for again, from the beginning.
    assert spread.half.matched_tokens(request, 0) == (None, False)


# --- lookups of very many blocks


class AheadByHand:
    """`Ahead` for more than four blocks, with a thread that does nothing until it is told to."""

    PARTS_AT_ONCE = SLICE_BLOCKS = 4

    def __init__(self, pool: Any, threads: Any) -> None:
        self.pool, self.threads = pool, threads
        self.refuses = False
        self.entered: list[tuple[NamespaceRecord, int]] = []
        self.submitted: list[bytes] = []

    def enter(self, record: NamespaceRecord, generation: int) -> None:
        self.entered.append((record, generation))

    def submit(self, ns: Any, keys: bytes, life: int, trace: str, request: str) -> Any:
        self.submitted.append(keys)
        return self.threads.submit(self._acquire, ns, keys, life)

    def _acquire(self, ns: Any, keys: bytes, life: int) -> Any:
        return False if self.refuses else self.pool.acquire(ns, keys, life=life)

    def close(self) -> None:
        self.threads.run()


@pytest.fixture
def slow(pool: Any, block_pool: Any, threads: Any) -> Harness:
    """One that asks for more than four blocks ahead."""
    return Harness(pool, block_pool, load_mode="async", ahead=AheadByHand(pool, threads))


def test_very_many_blocks_are_asked_for_in_slices_beside_the_steps(slow: Harness) -> None:
    request = slow.request("r", 10)
    slow.store(request.block_hashes[:9])
    submitted = []
    for _ in range(6):
        assert slow.half.matched_tokens(request, 0) == (None, False)
        submitted.append(list(slow.ahead.submitted))
        assert slow.pool.acquires == 0
    whole = pack(request.block_hashes)
    assert submitted == [[], [], [whole], [whole], [whole], [whole]], "ten blocks are three slices"
    slow.ahead.threads.run()
    assert slow.half.matched_tokens(request, 0) == (9 * TOKENS, True)
    assert slow.half.matched_tokens(request, 0) == (9 * TOKENS, True)
    assert slow.pool.acquires == 1
    counted = slow.half.counters.take()
    assert (counted["lookups"], counted["hit_blocks"]) == (1, 9)
    # Few are asked for on the spot.
    few = slow.request("few", 4)
    assert slow.half.matched_tokens(few, 0) == (4 * TOKENS, True)


@pytest.mark.parametrize("how", ["aborted", "reset", "preempted"])
@pytest.mark.parametrize("asked", [1, 2, 9])
def test_an_answer_that_nobody_needs_any_more_is_released(
    slow: Harness, how: str, asked: int
) -> None:
    request = slow.request("r", 10)
    slow.store(request.block_hashes)
    for _ in range(asked):
        slow.half.matched_tokens(request, 0)
    if how == "aborted":
        slow.half.request_finished(request, tables(10), completed=False)
    elif how == "reset":
        assert slow.half.reset()
    else:
        slow.half.allocated(request, tables(10), 0)
    slow.ahead.threads.run()
    assert not slow.pool.leases


@pytest.mark.parametrize("why", ["refused", "late"])
def test_a_request_waits_for_no_answer_without_end(slow: Harness, why: str) -> None:
    request = slow.request("r", 10)
    slow.store(request.block_hashes)
    while not slow.ahead.threads.waiting:
        assert slow.half.matched_tokens(request, 0) == (None, False)
    if why == "late":
        slow.now += 2.0
    else:
        slow.ahead.refuses = True
        slow.ahead.threads.run()
    assert slow.half.matched_tokens(request, 0) == (0, False)
    assert slow.half.counters.take().get("failed_lookups", 0) == (why == "refused")
    slow.ahead.threads.run()
    assert not slow.pool.leases
    # After a late one nothing is asked for a while.
    other = slow.half.matched_tokens(slow.request("other", 10), 0)
    assert other == ((0, False) if why == "late" else (None, False))


def test_what_a_pull_brings_to_very_many_blocks_is_asked_for_ahead_too(
    pool: Any, block_pool: Any, threads: Any
) -> None:
    pool.others = 1
    ahead: Any = AheadByHand(pool, type(threads)())
    clustered = Harness(pool, block_pool, load_mode="async", threads=threads, ahead=ahead)
    request = clustered.request("r", 10)
    clustered.store(request.block_hashes[:3])
    clustered.store_elsewhere(request.block_hashes)
    found: tuple[int | None, bool] = (None, False)
    for _ in range(20):
        found = clustered.half.matched_tokens(request, 0)
        threads.run()
        ahead.threads.run()
    assert found == (10 * TOKENS, True)
    assert clustered.pool.acquires == 2
    assert len(clustered.pool.leases) == 1
    counted = clustered.half.counters.take()
    assert (counted["hit_blocks"], counted["pulled_blocks"], counted["pulls"]) == (10, 7, 1)


# --- the daemon's device memory


@pytest.fixture
def lifted(pool: Any, block_pool: Any, pool_types: Any) -> Harness:
    """A node that holds the blocks 2 to 4 of a request's in device memory only."""
    harness = Harness(pool, block_pool, load_mode="async")
    pool.device = pool_types.FakeDevice(7)
    hashes = harness.request("first", 8).block_hashes
    harness.store(hashes[:5])
    pool.lift(harness.ns, 0, pack(hashes[2:5]))
    return harness


@pytest.mark.parametrize(("life", "blocks"), [(7, 5), (0, 2), (8, 2)])
def test_blocks_on_the_device_are_leased_in_the_ranks_name(
    lifted: Harness, life: int, blocks: int
) -> None:
    lifted.half.use_device(life)
    request = lifted.request("r", 8)
    assert lifted.half.matched_tokens(request, 0) == (blocks * TOKENS, True)
    assert lifted.pool.lives == [life]
    (lease,) = lifted.pool.leases.values()
    assert (lease.device is None) == (life != 7)


@pytest.mark.parametrize("now", [0, 8])
def test_a_lookup_is_repeated_when_a_rank_is_not_attached_any_more(
    lifted: Harness, now: int
) -> None:
    lifted.half.use_device(7)
    request = lifted.request("r", 8)
    assert lifted.half.matched_tokens(request, 0) == (5 * TOKENS, True)
    lifted.half.use_device(now)
    for _ in range(5):
        assert lifted.half.matched_tokens(request, 0) == (2 * TOKENS, True)
    assert lifted.pool.acquires == 2
    (lease,) = lifted.pool.leases.values()
    assert lease.device is None


def test_a_lookup_of_memory_alone_outlives_the_device(lifted: Harness) -> None:
    request = lifted.request("r", 8)
    for life in (7, 0, 8):
        lifted.half.use_device(life)
        assert lifted.half.matched_tokens(request, 0)[1]
        if life == 7:
            lifted.pool.lives.clear()
            request = lifted.request("other", 2)  # its two blocks are in memory
            assert lifted.half.matched_tokens(request, 0) == (2 * TOKENS, True)
    assert lifted.pool.lives == [7]


def test_what_is_on_the_device_is_not_waited_for(
    pool: Any, block_pool: Any, threads: Any, pool_types: Any
) -> None:
    pool.others = 1
    harness = Harness(pool, block_pool, load_mode="async", threads=threads)
    pool.device = pool_types.FakeDevice(7)
    harness.half.use_device(7)
    request = harness.request("r", 8)
    harness.store(request.block_hashes[:5])
    pool.lift(harness.ns, 0, pack(request.block_hashes[:5]))
    harness.store_elsewhere(request.block_hashes[5:7])
    assert harness.half.matched_tokens(request, 0) == (None, False)
    threads.run()
    assert harness.half.matched_tokens(request, 0) == (7 * TOKENS, True)
    assert pool.lives == [7, 7, 7]  # the lookup, the pull, the lookup after it
    whole = harness.request("whole", 5)
    assert harness.half.matched_tokens(whole, 0) == (5 * TOKENS, True)
    assert len(pool.pulls) == 1

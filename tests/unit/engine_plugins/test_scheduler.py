"""The scheduler half: lookups, leases, pins. No engine, no daemon, no clock but the test's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.engine_plugins.vllm import scheduler
from kvpool.engine_plugins.vllm.config import PluginConfig
from kvpool.engine_plugins.vllm.events import Publisher
from kvpool.engine_plugins.vllm.following import SaveReport
from kvpool.engine_plugins.vllm.plan import (
    GroupRule,
    Opening,
    RankReport,
    StepDone,
    StepPlan,
    block_key,
    common_weights,
    pack,
)
from kvpool.engine_plugins.vllm.pulls import Pulls
from kvpool.engine_plugins.vllm.scheduler import STEPS_MAX, Engine, SchedulerHalf
from kvpool.errors import LimitExceeded
from kvpool.types import NamespaceRecord, PartKind, PartSpec, Recompute

TOKENS = 4
PART_BYTES = 64


class Harness:
    """A scheduler half and the engine around it, driven by hand."""

    def __init__(
        self,
        pool: Any,
        block_pool: Any,
        *,
        rules: Iterable[GroupRule] = (GroupRule(0),),
        ranks: int = 1,
        loads: bool = True,
        saves: bool = True,
        answer_states: bool = True,
        stages: int = 1,
        blocks: int | None = None,
        threads: Any = None,
        events: Publisher | None = None,
        several_nodes: bool = False,
        **extra: Any,
    ) -> None:
        self.pool, self.block_pool = pool, block_pool
        self.ahead: Any = None
        self.now = 100.0
        pool.clock = lambda: self.now
        rules = list(rules)
        engine = Engine(
            rules,
            TOKENS,
            blocks or len(block_pool.blocks),
            ranks,
            sync_loads=len(rules) == 1,
            loads=loads,
            saves=saves,
            answer_states=answer_states,
            stages=stages,
            events=events,
        )
        parts = tuple(
            PartSpec(PART_BYTES, rule.kind, rule.window_blocks, rule.stride)
            for _ in range(ranks)
            for rule in rules
        )
        unseen = iter(range(1, 99))
        config = PluginConfig.from_extra(extra)
        pulls = None
        if threads is not None:
            pulls = Pulls(
                pool,
                threads,
                most=config.pulls_max,
                follows_max=config.follows_max,
                wait_s=config.pull_wait_s,
                clock=lambda: self.now,
            )
        self.half = SchedulerHalf(
            pool,
            config,
            engine,
            pulls=pulls,
            new_weights=lambda: f"unseen-{next(unseen)}",
            clock=lambda: self.now,
        )
        self.half.bind_pool(block_pool)
        self.make: Callable[[str], NamespaceRecord] = lambda weights: NamespaceRecord(
            {"weights": weights or "as started"}, parts
        )
        self.half.set_namespace(
            self.make,
            "first",
            groups=[rule.group for _ in range(ranks) for rule in rules],
            rank_bytes=sum(PART_BYTES // rule.stride for rule in rules),
            several_nodes=several_nodes,
        )
        self.ns = pool.open(self.make(""))
        if threads is not None:
            threads.run()

    def store(self, hashes: Iterable[bytes], parts: Iterable[int] = (0,)) -> None:
        for part in parts:
            reservation = self.pool.reserve(self.ns, pack(hashes), part=part)
            reservation.slots.table[reservation.slots.rows] = np.uint8(part + 1)
            self.pool.commit(reservation)

    def store_elsewhere(self, hashes: Iterable[bytes]) -> None:
        self.pool.elsewhere.update((self.ns.digest, block_key(each)) for each in hashes)

    def request(
        self,
        name: str,
        blocks: int,
        *,
        extra_tokens: int = 1,
        first: int = 0,
        params: dict[str, Any] | None = None,
        adapter: Any = None,
    ) -> Any:
        request = SimpleNamespace(
            request_id=name,
            block_hashes=[bytes([first + i]) * 32 for i in range(blocks)],
            num_tokens=blocks * TOKENS + extra_tokens,
            num_prompt_tokens=blocks * TOKENS + extra_tokens,
            num_computed_tokens=0,
            num_preemptions=0,
            shared_prefix_boundary=0,
            skip_reading_prefix_cache=False,
            kv_transfer_params=params,
            trace_headers=None,
            lora_request=adapter,
        )
        self.half.on_new_request(request)
        return request

    def reset(self, weights: str = "first") -> None:
        """Reset, and have the ranks say which weights they have."""
        assert self.half.reset()
        self.half.use_weights(weights)

    def step(
        self,
        request: Any,
        tokens: int,
        tables: list[list[int]],
        states: Sequence[tuple[int, int, int]] = (),
    ) -> StepPlan:
        """A step that computes `tokens` of the request. states: that the engine hands over."""
        plan = self.half.plan_step(
            {request.request_id: tokens}, lambda _: tables, {request.request_id: states}
        )
        request.num_computed_tokens += tokens
        return plan

    def end(self, plan: StepPlan, *, failed: bool = False, ranks: int = 1) -> None:
        """The ranks end all that a plan asked for."""
        loads, saves = [job.job for job in plan.loads], [job.job for job in plan.saves]
        self.half.step_done(
            StepDone(
                loads=dict.fromkeys(loads, ranks),
                saves=dict.fromkeys(saves, ranks),
                failed_loads=set(loads) if failed else set(),
                failed_saves=set(saves) if failed else set(),
            )
        )


@pytest.fixture
def harness(pool: Any, block_pool: Any) -> Harness:
    return Harness(pool, block_pool, load_mode="async")


def tables(blocks: int, first: int = 1) -> list[list[int]]:
    return [list(range(first, first + blocks))]


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


# --- blocks of other nodes


@pytest.fixture
def clustered(pool: Any, block_pool: Any, threads: Any) -> Harness:
    """With one other node; pulls happen when the test lets `threads` run."""
    pool.others = 1
    return Harness(pool, block_pool, load_mode="async", threads=threads, pulls_max=2)


def test_a_request_waits_for_what_others_have(clustered: Harness, threads: Any) -> None:
    request = clustered.request("r", 8)
    clustered.store(request.block_hashes[:2])
    clustered.store_elsewhere(request.block_hashes[2:6])
    for _ in range(5):
        assert clustered.half.matched_tokens(request, 0) == (None, False)
    clustered.now += 0.25
    threads.run()
    for _ in range(5):
        assert clustered.half.matched_tokens(request, 0) == (6 * TOKENS, True)
    assert clustered.pool.pulls == [1.0]
    assert clustered.pool.acquires == 2
    (lease,) = clustered.pool.leases.values()
    assert lease.blocks == 6
    assert clustered.half.counters.take() == {
        "lookups": 1,
        "hit_blocks": 6,
        "pulls": 1,
        "pulled_blocks": 4,
        "pull_wait_seconds": 0.25,
    }


def test_a_pull_that_brings_nothing_costs_no_second_lookup(
    clustered: Harness, threads: Any
) -> None:
    request = clustered.request("r", 8)
    clustered.store(request.block_hashes[:2])
    assert clustered.half.matched_tokens(request, 0) == (None, False)
    threads.run()
    assert clustered.half.matched_tokens(request, 0) == (2 * TOKENS, True)
    assert clustered.pool.acquires == 1


@pytest.mark.parametrize("arrived", [0, 3])
def test_nobody_waits_longer_than_the_limit(clustered: Harness, threads: Any, arrived: int) -> None:
    request = clustered.request("r", 8)
    clustered.store(request.block_hashes[:2])
    assert clustered.half.matched_tokens(request, 0) == (None, False)
    clustered.now += 0.99
    assert clustered.half.matched_tokens(request, 0) == (None, False)
    # The daemon has not answered, but some of it is here.
    clustered.store(request.block_hashes[2 : 2 + arrived])
    clustered.now += 0.01
    for _ in range(5):
        assert clustered.half.matched_tokens(request, 0) == ((2 + arrived) * TOKENS, True)
    assert len(clustered.pool.leases) == 1
    assert clustered.half.counters.take()["late_pulls"] == 1
    # What it says now is nobody's concern.
    threads.run()
    assert clustered.half.matched_tokens(request, 0) == ((2 + arrived) * TOKENS, True)
    assert len(clustered.pool.pulls) == 1


@pytest.mark.parametrize("lacking", [1, 2])
def test_what_is_too_little_to_load_is_not_waited_for(
    pool: Any, block_pool: Any, threads: Any, lacking: int
) -> None:
    pool.others = 1
    harness = Harness(pool, block_pool, threads=threads, load_mode="async", min_load_blocks=2)
    request = harness.request("r", 8)
    harness.store(request.block_hashes[: 8 - lacking])
    answer, _ = harness.half.matched_tokens(request, 0)
    assert (answer is None) == (lacking == 2)


def test_the_block_of_the_last_token_is_not_waited_for(clustered: Harness) -> None:
    request = clustered.request("r", 8, extra_tokens=0)
    clustered.store(request.block_hashes[:7])
    assert clustered.half.matched_tokens(request, 0) == (7 * TOKENS, True)


def test_a_request_waits_once_and_again_after_a_preemption(
    clustered: Harness, threads: Any
) -> None:
    request = clustered.request("r", 8)
    clustered.store(request.block_hashes[:2])
    assert clustered.half.matched_tokens(request, 0) == (None, False)
    threads.run()
    assert clustered.half.matched_tokens(request, 0) == (2 * TOKENS, True)
    clustered.now += 6  # more than half of the lease
    assert clustered.half.matched_tokens(request, 0) == (2 * TOKENS, True)
    request.num_preemptions = 1
    assert clustered.half.matched_tokens(request, 0) == (None, False)
    assert len(clustered.pool.leases) == 1


@pytest.mark.parametrize("how", ["aborted", "reset", "shut out"])
def test_the_result_of_a_pull_that_nobody_wants_any_more_is_dropped(
    clustered: Harness, threads: Any, how: str
) -> None:
    request = clustered.request("r", 8)
    clustered.store(request.block_hashes[:2])
    clustered.store_elsewhere(request.block_hashes)
    assert clustered.half.matched_tokens(request, 0) == (None, False)
    if how == "aborted":
        clustered.half.request_finished(request, [[]], completed=False)
    elif how == "reset":
        assert clustered.half.reset()
    else:
        clustered.half.step_done(StepDone(outdated={1}))
        assert clustered.half.matched_tokens(request, 0) == (0, False)
        clustered.half.allocated(request, tables(8), 0)
    threads.run()
    clustered.half.plan_step({}, lambda _: [[]])
    assert not clustered.pool.leases
    assert not clustered.half.has_work()


def test_a_request_asks_anew_after_a_reset(clustered: Harness, threads: Any) -> None:
    request = clustered.request("r", 8)
    assert clustered.half.matched_tokens(request, 0) == (None, False)
    clustered.reset()
    assert clustered.half.matched_tokens(request, 0) == (None, False)
    threads.run()
    assert clustered.half.matched_tokens(request, 0) == (0, False)
    assert len(clustered.pool.pulls) == 2


def test_a_daemon_that_hangs_in_a_lookup_is_not_asked_to_pull(clustered: Harness) -> None:
    def slow(*arguments: Any, **options: Any) -> None:
        clustered.now += 0.05

    clustered.pool.acquire = slow
    assert clustered.half.matched_tokens(clustered.request("r", 8), 0) == (0, False)


# --- the price of computing


BASE_S, TOKEN_S, PAIR_S = 0.01, 0.0002, 0.000001


def compute(harness: Harness, name: str, chunks: Iterable[int], stages: int = 1) -> list[int]:
    """Let the engine compute a prompt in chunks, each of which takes as long as its model says."""
    request = harness.request(name, 64)
    numbers = []
    for tokens in chunks:
        before = request.num_computed_tokens
        plan = harness.step(request, tokens, tables(64))
        numbers.append(plan.measured)
        attended = tokens * (before + tokens / 2)
        seconds = BASE_S + TOKEN_S * tokens + PAIR_S * attended
        for _ in range(stages if plan.measured else 0):
            harness.half.step_done(StepDone(steps={plan.measured: (seconds / stages, 1)}))
    harness.half.request_finished(request, tables(64), completed=False)
    return numbers


def price_asked_with(harness: Harness, threads: Any, name: str, blocks: int = 8) -> Any:
    request = harness.request(name, blocks, first=100)
    harness.half.matched_tokens(request, 0)
    threads.run()
    return harness.pool.prices[-1]


@pytest.mark.parametrize("stages", [1, 3])
def test_pulls_carry_the_price_of_computing_that_the_engine_was_seen_to_take(
    pool: Any, block_pool: Any, threads: Any, stages: int
) -> None:
    pool.others = 1
    harness = Harness(pool, block_pool, threads=threads, stages=stages)
    assert price_asked_with(harness, threads, "before") is None
    for name in range(12):
        compute(harness, f"r{name}", [32 + name, 100, 64, 10 + 5 * name], stages)
    price = price_asked_with(harness, threads, "after")
    expected = TOKENS * (TOKEN_S + PAIR_S * TOKENS / 2)
    assert price.block_s == pytest.approx(expected, rel=0.1)
    assert price.growth_s == pytest.approx(PAIR_S * TOKENS**2, rel=0.3)
    tally = harness.half.counters.take()
    assert tally["prefill_tokens"] == sum(32 + n + 164 + 10 + 5 * n for n in range(12))
    assert tally["prefill_seconds"] > 0


def test_a_price_is_that_of_the_depth_at_which_the_lookup_begins(
    pool: Any, block_pool: Any, threads: Any
) -> None:
    pool.others = 1
    harness = Harness(pool, block_pool, threads=threads)
    for name in range(12):
        compute(harness, f"r{name}", [32 + name, 100, 64])
    request = harness.request("deep", 40, first=100)
    harness.half.matched_tokens(request, 30 * TOKENS)
    threads.run()
    expected = TOKENS * (TOKEN_S + PAIR_S * (30.5 * TOKENS))
    assert pool.prices[-1].block_s == pytest.approx(expected, rel=0.1)


def test_a_configured_speed_is_taken_and_none_measured(
    pool: Any, block_pool: Any, threads: Any
) -> None:
    pool.others = 1
    harness = Harness(pool, block_pool, threads=threads, prefill_tokens_per_s=500)
    assert compute(harness, "r", [64, 64, 64]) == [0, 0, 0]
    assert price_asked_with(harness, threads, "after") == Recompute(TOKENS / 500)


def test_steps_that_mostly_decode_tell_nothing(pool: Any, block_pool: Any, threads: Any) -> None:
    harness = Harness(pool, block_pool, threads=threads)
    harness.request("prompt", 8)
    answer = harness.request("answer", 2, first=50)
    answer.num_computed_tokens = answer.num_prompt_tokens

    def plan(**scheduled: int) -> int:
        return harness.half.plan_step(scheduled, lambda _: tables(8)).measured

    assert plan(answer=1) == 0
    assert plan(prompt=4, answer=4) == 0
    assert plan(prompt=5, answer=4) == 1
    assert plan(unknown=9, prompt=4) == 0
    assert plan(prompt=4) == 2


def test_steps_that_are_never_heard_of_are_given_up(
    pool: Any, block_pool: Any, threads: Any
) -> None:
    harness = Harness(pool, block_pool, threads=threads)
    request = harness.request("r", 200)
    for _ in range(STEPS_MAX + 5):
        plan = harness.step(request, 1, tables(200))
    assert len(harness.half._steps) == STEPS_MAX
    harness.half.step_done(StepDone(steps={1: (1.0, 1), plan.measured: (1.0, 1)}))
    assert harness.half.counters.take()["prefill_tokens"] == 1


def test_only_steps_in_which_nothing_runs_wait_for_pulls(
    clustered: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = []
    monkeypatch.setattr(Pulls, "wait", lambda _, pulls: waited.append(len(pulls)))
    waiting, running = clustered.request("waits", 8), clustered.request("runs", 1)
    assert clustered.half.matched_tokens(waiting, 0) == (None, False)
    clustered.step(running, 1, tables(1))
    assert waited == []
    clustered.half.plan_step({}, lambda _: [[]])
    assert waited == [1]


@given(
    operations=st.lists(
        st.tuples(
            st.sampled_from(["ask", "thread", "later", "preempt", "abort", "evict"]),
            st.integers(0, 3),
        ),
        max_size=60,
    )
)
def test_whatever_happens_waits_end_and_leases_come_back(
    operations: list[tuple[str, int]], pool_types: Any
) -> None:
    """Four prompts of which the node has a part and another the rest, in any order of events."""
    pool, threads = pool_types.FakePool(rows=64, stride=64), pool_types.ByHand()
    pool.others = 1
    harness = Harness(
        pool,
        pool_types.FakeBlockPool(100),
        load_mode="async",
        threads=threads,
        pulls_max=2,
        lease_s=3,
    )
    requests = {}
    for number in range(4):
        request = requests[number] = harness.request(f"{number}", 6, first=10 * number)
        harness.store(request.block_hashes[:number])
        harness.store_elsewhere(request.block_hashes[number:5])
    begun: dict[int, float] = {}
    for operation, number in operations:
        request = requests.get(number)
        if operation == "thread" and threads.waiting:
            threads.run_one()
        elif operation == "later":
            harness.now += 0.4
        elif operation == "evict":
            pool.rows = {name: row for name, row in pool.rows.items() if row % 4 != number}
        elif request is None:
            continue
        elif operation == "preempt":
            request.num_preemptions += 1
            begun.pop(number, None)
        elif operation == "abort":
            harness.half.request_finished(request, [[]], completed=False)
            del requests[number]
        elif operation == "ask":
            answer, _ = harness.half.matched_tokens(request, 0)
            if answer is None:
                since = begun.setdefault(number, harness.now)
                assert harness.now < since + 1.0
            else:
                lookup = harness.half._requests[request.request_id].lookup
                assert answer == (lookup.lease.blocks * TOKENS if lookup.lease else 0)
        assert len(threads.waiting) <= 2
        assert len(pool.leases) <= len(requests)
    for request in requests.values():
        harness.half.request_finished(request, [[]], completed=False)
    assert not pool.leases


# --- how a load is made


def test_small_hits_are_loaded_before_the_step(pool: Any, block_pool: Any) -> None:
    harness = Harness(pool, block_pool, sync_load_bytes=3 * PART_BYTES)
    small, large = harness.request("s", 3), harness.request("l", 4, first=100)
    harness.store(small.block_hashes)
    harness.store(large.block_hashes)
    assert harness.half.matched_tokens(small, 0) == (3 * TOKENS, False)
    assert harness.half.matched_tokens(large, 0) == (4 * TOKENS, True)


def test_a_synchronous_load_leaves_a_token_to_compute(pool: Any, block_pool: Any) -> None:
    harness = Harness(pool, block_pool)
    request = harness.request("r", 3, extra_tokens=0)
    harness.store(request.block_hashes)
    assert harness.half.matched_tokens(request, 0) == (2 * TOKENS, False)
    only = harness.request("one block", 1, extra_tokens=0)
    assert harness.half.matched_tokens(only, 0) == (0, False)


def test_several_groups_are_always_loaded_beside_steps(pool: Any, block_pool: Any) -> None:
    window = GroupRule(1, kind=PartKind.WINDOW, window_blocks=2)
    harness = Harness(pool, block_pool, rules=[GroupRule(0), window])
    request = harness.request("r", 4)
    harness.store(request.block_hashes, parts=[0])
    harness.store(request.block_hashes[2:], parts=[1])
    assert harness.half.matched_tokens(request, 0) == (4 * TOKENS, True)
    harness.half.allocated(request, [[1, 2, 3, 4], [0, 0, 5, 6]], 4 * TOKENS)
    (job,) = harness.step(request, 0, [[], []]).loads
    assert [group.block_ids for group in job.groups] == [[1, 2, 3, 4], [5, 6]]
    assert [group.first for group in job.groups] == [0, 2]


# --- leases end


def test_a_lease_lives_until_every_rank_ended_the_load(pool: Any, block_pool: Any) -> None:
    harness = Harness(pool, block_pool, ranks=2)
    request = harness.request("r", 4)
    harness.store(request.block_hashes, parts=[0, 1])
    harness.half.matched_tokens(request, 0)
    harness.half.allocated(request, tables(4), 4 * TOKENS)
    plan = harness.step(request, 1, tables(4))
    assert harness.half.has_work()
    harness.end(plan)
    assert len(pool.leases) == 1
    harness.end(plan)
    assert harness.half.has_work()
    harness.half.plan_step({}, lambda _: [[]])
    assert not pool.leases
    assert not harness.half.has_work()


@pytest.mark.parametrize("how", ["finished", "computed", "closed"])
def test_a_lease_that_nobody_loads_from_is_released(harness: Harness, how: str) -> None:
    request = harness.request("r", 4)
    harness.store(request.block_hashes)
    harness.half.matched_tokens(request, 0)
    assert len(harness.pool.leases) == 1
    if how == "finished":
        harness.half.request_finished(request, [[]], completed=False)
    elif how == "computed":
        harness.half.allocated(request, tables(5), 0)
    else:
        harness.half.close()
    assert not harness.pool.leases


def test_a_load_outlives_its_aborted_request(harness: Harness) -> None:
    request = harness.request("r", 4)
    harness.store(request.block_hashes)
    harness.half.matched_tokens(request, 0)
    harness.half.allocated(request, tables(4), 4 * TOKENS)
    plan = harness.half.plan_step({}, lambda _: [[]])
    harness.half.request_finished(request, [[]], completed=False)
    assert len(harness.pool.leases) == 1
    harness.end(plan, failed=True)
    harness.half.plan_step({}, lambda _: [[]])
    assert not harness.pool.leases


# --- failures


def test_a_failed_load_is_not_tried_again_for_that_request(harness: Harness) -> None:
    request = harness.request("r", 6)
    harness.store(request.block_hashes)
    harness.half.matched_tokens(request, 2 * TOKENS)
    harness.half.allocated(request, tables(6), 4 * TOKENS)
    harness.end(harness.step(request, 0, tables(6)), failed=True)
    for _ in range(10):
        assert harness.half.matched_tokens(request, 2 * TOKENS) == (0, False)
    # What lies before the failed range was not part of it.
    assert harness.half.matched_tokens(request, 0) == (2 * TOKENS, True)
    other = harness.request("other", 6)
    assert harness.half.matched_tokens(other, 0) == (6 * TOKENS, True)


def test_blocks_of_a_failed_load_are_saved_once_computed(harness: Harness) -> None:
    request = harness.request("r", 4)
    harness.store(request.block_hashes)
    harness.half.matched_tokens(request, 0)
    harness.half.allocated(request, tables(4), 4 * TOKENS)
    harness.end(harness.step(request, 0, tables(4)), failed=True)
    (save,) = harness.step(request, 4 * TOKENS, tables(4)).saves
    assert save.saves[0].block_ids == [1, 2, 3, 4]


def test_a_failed_synchronous_load_is_acknowledged(pool: Any, block_pool: Any) -> None:
    harness = Harness(pool, block_pool)
    request = harness.request("r", 4)
    harness.store(request.block_hashes)
    harness.half.matched_tokens(request, 0)
    harness.half.allocated(request, tables(5), 4 * TOKENS)
    plan = harness.step(request, 4 * TOKENS + 1, tables(5))
    harness.end(plan, failed=True)
    assert harness.half.plan_step({}, lambda _: [[]]).acknowledged == [plan.loads[0].job]
    assert harness.half.plan_step({}, lambda _: [[]]).acknowledged == []


@pytest.mark.parametrize("aborted", [False, True])
def test_a_failed_synchronous_load_leaves_the_engines_cache(
    pool: Any, block_pool: Any, aborted: bool
) -> None:
    harness = Harness(pool, block_pool)
    request = harness.request("r", 6)
    harness.store(request.block_hashes[:4])
    harness.half.matched_tokens(request, 2 * TOKENS)
    harness.half.allocated(request, [[1, 2, 3, 4, 5, 6]], 2 * TOKENS)
    plan = harness.step(request, 2 * TOKENS + 1, [[1, 2, 3, 4, 5, 6]])
    if aborted:
        harness.half.request_finished(request, tables(6), completed=False)
    harness.end(plan, failed=True)
    # With what was computed on top of what was not there.
    assert block_pool.evicted == {3, 4, 5, 6}


def test_nobody_computes_on_top_of_a_synchronous_load_of_the_same_step(
    pool: Any, block_pool: Any
) -> None:
    harness = Harness(pool, block_pool)
    request, shares = harness.request("r", 6), harness.request("shares", 6)
    other = harness.request("other", 6, first=100)
    harness.store(request.block_hashes[:4])
    harness.half.matched_tokens(request, 2 * TOKENS)
    harness.half.allocated(request, [[1, 2, 3, 4, 5, 6]], 2 * TOKENS)
    # The engine finds in its cache what is still to be loaded.
    for _ in range(3):
        assert harness.half.matched_tokens(shares, 3 * TOKENS) == (None, False)
    # What was there before is there, and so are blocks of another prompt.
    assert harness.half.matched_tokens(shares, 2 * TOKENS) == (2 * TOKENS, False)
    assert harness.half.matched_tokens(other, 6 * TOKENS) == (0, False)
    harness.step(request, 2 * TOKENS + 1, tables(6))
    assert harness.half.matched_tokens(shares, 4 * TOKENS) == (0, False)


@pytest.mark.parametrize(("ranks", "saves"), [(1, 1), (2, 0)])
def test_ranks_save_nothing_in_a_step_of_which_they_do_not_know_the_others_loads(
    pool: Any, block_pool: Any, ranks: int, saves: int
) -> None:
    harness = Harness(pool, block_pool, ranks=ranks)
    request = harness.request("r", 6)
    harness.store(request.block_hashes[:4], parts=range(ranks))
    harness.half.matched_tokens(request, 0)
    harness.half.allocated(request, tables(6), 4 * TOKENS)
    request.num_computed_tokens = 4 * TOKENS
    plan = harness.step(request, TOKENS, tables(6))
    assert plan.loads[0].sync
    assert len(plan.saves) == saves
    harness.end(plan, ranks=ranks)
    # It is made up for in the next one.
    assert len(harness.step(request, 1, tables(6)).saves) == 1 - saves


def test_a_synchronous_load_that_succeeds_stays_in_the_engines_cache(
    pool: Any, block_pool: Any
) -> None:
    harness = Harness(pool, block_pool)
    request = harness.request("r", 4)
    harness.store(request.block_hashes)
    harness.half.matched_tokens(request, 0)
    harness.half.allocated(request, tables(5), 4 * TOKENS)
    harness.end(harness.step(request, 1, tables(5)))
    assert block_pool.evicted == set()


# --- saves


def test_blocks_are_saved_as_they_are_completed(harness: Harness) -> None:
    request = harness.request("r", 4)
    first = harness.step(request, 2 * TOKENS + 3, tables(5))
    assert first.saves[0].saves[0].keys == pack(request.block_hashes[:2])
    assert first.opening == Opening(1, harness.make(""), 0)
    second = harness.step(request, 1, tables(5))
    assert second.opening is None
    assert first.saves[0].generation == second.saves[0].generation == 1
    assert second.saves[0].saves[0].keys == pack(request.block_hashes[2:3])
    assert second.saves[0].saves[0].parent == block_key(request.block_hashes[1])
    assert harness.step(request, 1, tables(5)).saves == []


def test_generated_blocks_are_saved_when_their_hash_exists(harness: Harness) -> None:
    request = harness.request("r", 1, extra_tokens=TOKENS - 1)
    harness.end(harness.step(request, 2 * TOKENS, tables(3)))
    assert harness.step(request, 1, tables(3)).saves == []
    request.block_hashes.append(b"g" * 32)
    (save,) = harness.step(request, 1, tables(3)).saves
    assert save.saves[0].keys == b"g" * 16


def test_no_block_is_offered_twice(harness: Harness) -> None:
    one, two = harness.request("one", 4), harness.request("two", 5)
    harness.end(harness.step(one, 4 * TOKENS, tables(4)))
    (save,) = harness.step(two, 5 * TOKENS, tables(5)).saves
    assert save.saves[0].block_ids == [5]
    harness.now += 61
    three = harness.request("three", 4)
    assert harness.step(three, 4 * TOKENS, tables(4)).saves != []


def test_loaded_blocks_are_not_saved(harness: Harness) -> None:
    request = harness.request("r", 6)
    harness.store(request.block_hashes[:4])
    harness.half.matched_tokens(request, 0)
    harness.half.allocated(request, tables(6), 4 * TOKENS)
    request.num_computed_tokens = 4 * TOKENS
    (save,) = harness.step(request, 2 * TOKENS, tables(6)).saves
    assert save.saves[0].block_ids == [5, 6]


def test_what_the_pool_refused_is_offered_again(harness: Harness) -> None:
    one, two = harness.request("one", 3), harness.request("two", 3)
    harness.end(harness.step(one, 3 * TOKENS, tables(3)), failed=True)
    assert harness.step(two, 3 * TOKENS, tables(3)).saves != []


def test_an_engine_that_only_reads_saves_nothing(pool: Any, block_pool: Any) -> None:
    harness = Harness(pool, block_pool, saves=False)
    assert harness.step(harness.request("r", 4), 4 * TOKENS, tables(4)).saves == []


def test_nothing_happens_before_the_namespace_is_known(pool: Any, block_pool: Any) -> None:
    harness = Harness(pool, block_pool)
    harness.half._namespace = harness.half._make_record = None
    request = harness.request("r", 4)
    assert harness.half.matched_tokens(request, 0) == (0, False)
    plan = harness.step(request, 4 * TOKENS, tables(4))
    assert plan.want_report
    assert plan.saves == []


# --- states

STATES = (GroupRule(0), GroupRule(1, kind=PartKind.WINDOW, window_blocks=1, state=True))


@pytest.fixture
def hybrid(pool: Any, block_pool: Any) -> Harness:
    """With a group of full attention and one of states."""
    return Harness(pool, block_pool, rules=STATES)


def state_saves(plan: StepPlan) -> list[tuple[bytes, list[int]]]:
    return [
        (save.keys, save.block_ids) for job in plan.saves for save in job.saves if save.rule == 1
    ]


def test_only_states_that_the_engine_hands_over_are_saved(hybrid: Harness) -> None:
    request = hybrid.request("r", 6)
    both = [*tables(6), list(range(11, 17))]
    first = hybrid.step(request, 4 * TOKENS, both, [(1, 14, 4 * TOKENS)])
    assert state_saves(first) == [(pack(request.block_hashes[3:4]), [14])]
    assert hybrid.block_pool.pinned == 5
    second = hybrid.step(request, 2 * TOKENS, both)
    assert state_saves(second) == []
    hybrid.end(first)
    hybrid.end(second)
    assert hybrid.block_pool.pinned == 0


def test_a_state_is_saved_though_the_key_was_offered_for_other_groups(hybrid: Harness) -> None:
    """A second prompt parts from the first where the first had no state."""
    both = [*tables(6), [0] * 6]
    hybrid.end(hybrid.step(hybrid.request("one", 6), 6 * TOKENS, both))
    request = hybrid.request("two", 6)
    plan = hybrid.step(request, 3 * TOKENS, both, [(1, 20, 3 * TOKENS)])
    assert state_saves(plan) == [(pack(request.block_hashes[2:3]), [20])]
    hybrid.end(plan)
    third = hybrid.request("three", 6)
    assert state_saves(hybrid.step(third, 3 * TOKENS, both, [(1, 21, 3 * TOKENS)])) == []
    hybrid.now += 61
    assert state_saves(hybrid.step(third, 3 * TOKENS, both, [(1, 21, 3 * TOKENS)])) != []


def test_a_state_that_the_pool_refused_is_offered_again(hybrid: Harness) -> None:
    both = [*tables(2), [0, 20]]
    hand = [(1, 20, 2 * TOKENS)]
    one = hybrid.request("one", 2)
    hybrid.end(hybrid.step(one, 2 * TOKENS, both, hand), failed=True)
    assert set(hybrid.pool.given_up) == set(map(block_key, one.block_hashes))
    assert state_saves(hybrid.step(hybrid.request("two", 2), 2 * TOKENS, both, hand)) != []


def test_the_hit_ends_at_a_state_before_the_last_token(hybrid: Harness) -> None:
    request = hybrid.request("r", 6, extra_tokens=0)
    hybrid.store(request.block_hashes)
    hybrid.store(request.block_hashes[3:4], parts=[1])
    hybrid.store(request.block_hashes[5:], parts=[1])
    assert hybrid.half.matched_tokens(request, 0) == (4 * TOKENS, True)
    assert hybrid.half.matched_tokens(hybrid.request("longer", 6), 0) == (6 * TOKENS, True)


def test_a_state_that_was_loaded_is_not_saved(hybrid: Harness) -> None:
    request = hybrid.request("r", 6)
    hybrid.store(request.block_hashes[:4])
    hybrid.store(request.block_hashes[3:4], parts=[1])
    assert hybrid.half.matched_tokens(request, 0) == (4 * TOKENS, True)
    both = [*tables(6), [0, 0, 0, 14, 0, 16]]
    hybrid.half.allocated(request, both, 4 * TOKENS)
    request.num_computed_tokens = 4 * TOKENS
    # The engine has a state at the end of what was loaded, and one at the end of the prompt.
    plan = hybrid.step(request, 2 * TOKENS, both, [(1, 14, 4 * TOKENS), (1, 16, 6 * TOKENS)])
    (load,) = plan.loads
    assert [group.block_ids for group in load.groups] == [[1, 2, 3, 4], [14]]
    assert state_saves(plan) == [(pack(request.block_hashes[5:6]), [16])]
    # Another prompt parts from it where the pool has no state.
    other = hybrid.step(hybrid.request("other", 2), 2 * TOKENS, both, [(1, 17, 2 * TOKENS)])
    assert state_saves(other) == [(pack(request.block_hashes[1:2]), [17])]


def test_a_state_of_a_failed_load_is_saved_when_it_was_computed(hybrid: Harness) -> None:
    request = hybrid.request("r", 4)
    hybrid.store(request.block_hashes)
    hybrid.store(request.block_hashes[3:], parts=[1])
    hybrid.half.matched_tokens(request, 0)
    both = [*tables(4), [0, 0, 0, 14]]
    hybrid.half.allocated(request, both, 4 * TOKENS)
    hybrid.end(hybrid.half.plan_step({}, lambda _: both), failed=True)
    assert hybrid.half.matched_tokens(request, 0) == (0, False)
    assert state_saves(hybrid.step(request, 4 * TOKENS, both, [(1, 14, 4 * TOKENS)])) != []


def test_states_go_first_and_what_has_no_room_is_counted(pool: Any, block_pool: Any) -> None:
    hybrid = Harness(pool, block_pool, rules=STATES, blocks=20)  # two pins
    request = hybrid.request("r", 6)
    both = [*tables(6), list(range(11, 17))]
    hand = [(1, 10 + at, at * TOKENS) for at in (2, 4, 6)]
    plan = hybrid.step(request, 6 * TOKENS, both, hand)
    assert [keys for keys, _ in state_saves(plan)] == [
        pack(request.block_hashes[at : at + 1]) for at in (1, 3)
    ]
    assert block_pool.pinned == 2
    assert hybrid.half.counters.take()["dropped_saves"] == 1
    assert pool.given_up == [block_key(request.block_hashes[5])]
    hybrid.end(plan)
    # Blocks of attention wait for pins, while the request runs.
    assert hybrid.step(request, 0, both).saves[0].saves[0].block_ids == [1, 2]


@pytest.mark.parametrize("trusted", [True, False])
def test_states_behind_the_prompt_are_saved_where_no_tokens_are_drafted(
    pool: Any, block_pool: Any, trusted: bool
) -> None:
    hybrid = Harness(pool, block_pool, rules=STATES, answer_states=trusted)
    request = hybrid.request("r", 2)
    request.block_hashes.append(b"g" * 32)
    both = [*tables(3), [0, 12, 13]]
    hand = [(1, 12, 2 * TOKENS), (1, 13, 3 * TOKENS)]
    assert len(state_saves(hybrid.step(request, 3 * TOKENS, both, hand))) == 1 + trusted


@pytest.mark.parametrize("why", ["shut out", "unknown request", "no saves"])
def test_no_state_is_saved_where_nothing_is(pool: Any, block_pool: Any, why: str) -> None:
    hybrid = Harness(pool, block_pool, rules=STATES, saves=why != "no saves")
    hybrid.half._shut = why == "shut out"
    plan = hybrid.half.plan_step({}, lambda _: [], {"nobody": [(1, 5, TOKENS)]})
    if why != "unknown request":
        request = hybrid.request("r", 2)
        plan = hybrid.step(request, 2 * TOKENS, [*tables(2), [0, 5]], [(1, 5, 2 * TOKENS)])
    assert plan.saves == []
    assert block_pool.pinned == 0


def test_the_engine_keeps_the_state_where_the_pool_knows_another_prompt(hybrid: Harness) -> None:
    request = hybrid.request("r", 8)
    hybrid.store(request.block_hashes[:6])
    hybrid.store(request.block_hashes[1:2], parts=[1])
    for own in (0, 3 * TOKENS, 0, 7 * TOKENS):  # as the engine sets it before each try
        request.shared_prefix_boundary = own
        assert hybrid.half.matched_tokens(request, 0) == (2 * TOKENS, True)
        assert request.shared_prefix_boundary == max(own, 6 * TOKENS)
    assert hybrid.pool.matches == hybrid.pool.acquires == 1


@pytest.mark.parametrize("why", ["all is found", "nothing is there", "reads only", "away"])
def test_the_engine_is_told_nothing_where_there_is_no_such_prompt(
    pool: Any, block_pool: Any, why: str
) -> None:
    hybrid = Harness(pool, block_pool, rules=STATES, saves=why != "reads only")
    request = hybrid.request("r", 8)
    if why != "nothing is there":
        hybrid.store(request.block_hashes)
    if why == "all is found":
        hybrid.store(request.block_hashes[7:], parts=[1])
    pool.away = why == "away"
    hybrid.half.matched_tokens(request, 0)
    assert request.shared_prefix_boundary == 0


def test_a_refused_question_is_a_miss(hybrid: Harness) -> None:
    def refuse(*arguments: Any, **options: Any) -> int:
        raise LimitExceeded("too much")

    hybrid.pool.match = refuse
    request = hybrid.request("r", 4)
    hybrid.store(request.block_hashes)
    assert hybrid.half.matched_tokens(request, 0) == (0, False)
    assert hybrid.half.counters.take()["failed_lookups"] == 1


def test_a_daemon_that_hangs_is_not_asked_a_second_time(hybrid: Harness) -> None:
    def slow(*arguments: Any, **options: Any) -> None:
        hybrid.now += 0.05

    hybrid.pool.acquire = slow
    hybrid.half.matched_tokens(hybrid.request("r", 4), 0)
    assert hybrid.pool.matches == 0


def test_a_model_of_states_alone(pool: Any, block_pool: Any) -> None:
    alone = Harness(pool, block_pool, rules=[replace(STATES[1], group=0)], load_mode="async")
    request = alone.request("r", 4)
    plan = alone.step(request, 4 * TOKENS, [[0, 0, 0, 9]], [(0, 9, 4 * TOKENS)])
    (job,) = plan.saves
    (save,) = job.saves
    assert (save.keys, save.block_ids) == (pack(request.block_hashes[3:]), [9])
    alone.store(request.block_hashes[3:])
    assert alone.half.matched_tokens(alone.request("again", 4), 0) == (4 * TOKENS, True)


# --- pins


def test_saved_blocks_are_pinned_until_every_rank_has_them(pool: Any, block_pool: Any) -> None:
    harness = Harness(pool, block_pool, ranks=2)
    request = harness.request("r", 4)
    plan = harness.step(request, 4 * TOKENS, tables(4))
    assert block_pool.pinned == 4
    harness.half.request_finished(request, tables(4), completed=True)
    harness.end(plan)
    assert block_pool.pinned == 4
    assert harness.half.has_work()
    harness.end(plan)
    assert block_pool.pinned == 0
    assert not harness.half.has_work()


def test_pins_never_exceed_their_share(pool: Any, block_pool: Any) -> None:
    harness = Harness(pool, block_pool, blocks=50)
    request = harness.request("r", 12)
    plan = harness.step(request, 12 * TOKENS, tables(12))
    assert block_pool.pinned == 5
    assert harness.step(request, 0, tables(12)).saves == []
    # The request still holds its blocks: the rest follows as pins are given back.
    saved = [plan.saves[0].saves[0].block_ids]
    while plan.saves:
        harness.end(plan)
        plan = harness.step(request, 0, tables(12))
        saved += [save.saves[0].block_ids for save in plan.saves]
        assert block_pool.pinned <= 5
    assert saved == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12]]


def test_what_a_finished_request_could_not_pin_is_dropped_and_counted(
    pool: Any, block_pool: Any
) -> None:
    harness = Harness(pool, block_pool, blocks=50)
    request = harness.request("r", 12)
    first = harness.step(request, 12 * TOKENS, tables(12))
    harness.end(first)
    harness.half.request_finished(request, tables(12), completed=True)
    assert block_pool.pinned == 5
    assert harness.half.counters.take()["dropped_saves"] == 2
    harness.end(harness.half.plan_step({}, lambda _: [[]]))
    assert block_pool.pinned == 0


def test_blocks_of_an_aborted_request_are_dropped(pool: Any, block_pool: Any) -> None:
    harness = Harness(pool, block_pool, blocks=50)
    request = harness.request("r", 12)
    harness.end(harness.step(request, 12 * TOKENS, tables(12)))
    harness.half.request_finished(request, tables(12), completed=False)
    assert block_pool.pinned == 0
    assert harness.half.counters.take()["dropped_saves"] == 7


# --- who is told


def test_who_follows_is_told_of_blocks_that_are_not_saved(pool: Any, block_pool: Any) -> None:
    """Those that found no pins, and those whose save failed; an aborted prompt is computed elsewhere."""
    harness = Harness(pool, block_pool, blocks=50)
    one, two, three = (
        harness.request(name, 12, first=at) for name, at in (("1", 0), ("2", 20), ("3", 40))
    )
    plan = harness.step(one, 12 * TOKENS, tables(12))
    assert pool.given_up == []
    harness.half.request_finished(one, tables(12), completed=True)
    assert pool.given_up == [block_key(key) for key in one.block_hashes[5:]]
    pool.given_up.clear()
    harness.end(plan)
    plan = harness.step(two, 2 * TOKENS, tables(12))
    harness.half.request_finished(two, tables(12), completed=False)
    harness.end(plan)
    assert pool.given_up == []
    harness.end(harness.step(three, 3 * TOKENS, tables(12)), failed=True)
    assert pool.given_up == [block_key(key) for key in three.block_hashes[:3]]


def test_generated_blocks_that_are_not_saved_concern_nobody(pool: Any, block_pool: Any) -> None:
    harness = Harness(pool, block_pool, blocks=50)
    request = harness.request("r", 12)
    request.num_prompt_tokens = 5 * TOKENS
    harness.step(request, 12 * TOKENS, tables(12))
    harness.half.request_finished(request, tables(12), completed=True)
    assert harness.half.counters.take()["dropped_saves"] == 7
    assert pool.given_up == []


def test_an_answer_says_what_of_its_prompt_is_saved(pool: Any, block_pool: Any) -> None:
    harness = Harness(pool, block_pool, blocks=50)
    params = {"kvpool": {"report": True}}
    one = harness.request("1", 7, params=params, extra_tokens=3)
    first = harness.step(one, 3 * TOKENS, tables(8))
    harness.half.step_done(
        StepDone(saves={first.saves[0].job: 1}, save_seconds={first.saves[0].job: 0.3})
    )
    second = harness.step(one, 4 * TOKENS + 3, tables(8))
    report = harness.half.request_finished(one, tables(8), completed=True)
    assert report == SaveReport(3 * TOKENS, 4 * TOKENS, pytest.approx(0.6))
    again = harness.request("2", 7, params=params)
    harness.end(second, failed=True)
    harness.step(again, 0, tables(7))
    report = harness.half.request_finished(again, tables(7), completed=True)
    assert report == SaveReport(3 * TOKENS, 0, pytest.approx(0.0))
    large = harness.request("3", 12, first=20, params=params)
    harness.end(harness.step(large, 2 * TOKENS, tables(12)))
    harness.step(large, 10 * TOKENS, tables(12))
    report = harness.half.request_finished(large, tables(12), completed=True)
    assert report == SaveReport(2 * TOKENS, 5 * TOKENS, pytest.approx(0.6))
    silent = harness.request("4", 4, first=40)
    harness.step(silent, 4 * TOKENS, tables(4))
    assert harness.half.request_finished(silent, tables(4), completed=True) is None


def test_an_engine_that_saves_nothing_says_so(pool: Any, block_pool: Any) -> None:
    harness = Harness(pool, block_pool, saves=False)
    request = harness.request("r", 4, params={"kvpool": {"report": True}})
    harness.step(request, 4 * TOKENS, tables(4))
    assert harness.half.request_finished(request, tables(4), completed=True) == SaveReport(
        0, 0, None
    )


# --- lookups of very many blocks


class AheadByHand:
    """`Ahead` with a thread that does nothing until it is told to."""

    def __init__(self, pool: Any, threads: Any) -> None:
        self.pool, self.threads = pool, threads
        self.refuses = False
        self.entered: list[tuple[NamespaceRecord, int]] = []

    def enter(self, record: NamespaceRecord, generation: int) -> None:
        self.entered.append((record, generation))

    def submit(self, ns: Any, keys: bytes, life: int, trace: str) -> Any:
        return self.threads.submit(self._acquire, ns, keys, life)

    def _acquire(self, ns: Any, keys: bytes, life: int) -> Any:
        return False if self.refuses else self.pool.acquire(ns, keys, life=life)

    def close(self) -> None:
        self.threads.run()


@pytest.fixture
def slow(pool: Any, block_pool: Any, threads: Any, monkeypatch: pytest.MonkeyPatch) -> Harness:
    """One that asks for more than four blocks ahead."""
    monkeypatch.setattr(scheduler, "SLICE_BLOCKS", 4)
    monkeypatch.setattr(scheduler, "PARTS_AT_ONCE", 4)
    harness = Harness(pool, block_pool, load_mode="async")
    harness.ahead = AheadByHand(pool, threads)
    harness.half._ahead = harness.ahead
    return harness


def test_very_many_blocks_are_asked_for_in_slices_beside_the_steps(slow: Harness) -> None:
    request = slow.request("r", 10)
    slow.store(request.block_hashes[:9])
    packed = []
    for _ in range(6):
        assert slow.half.matched_tokens(request, 0) == (None, False)
        asking = slow.half._requests["r"].asking
        packed.append(len(asking.keys) // 16)
        assert slow.pool.acquires == 0
    assert packed == [4, 8, 10, 10, 10, 10]
    assert bytes(asking.keys) == pack(request.block_hashes)
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
    clustered: Harness, threads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "SLICE_BLOCKS", 4)
    monkeypatch.setattr(scheduler, "PARTS_AT_ONCE", 4)
    ahead: Any = AheadByHand(clustered.pool, type(threads)())
    clustered.half._ahead = ahead
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


# --- what is quicker to compute


def load(harness: Harness, name: str, blocks: int, seconds: float, *, failed: bool = False) -> Any:
    """A request whose blocks are loaded in that time."""
    request = harness.request(name, blocks)
    assert harness.half.matched_tokens(request, 0) == (blocks * TOKENS, True)
    harness.half.allocated(request, tables(blocks), blocks * TOKENS)
    plan = harness.half.plan_step({}, lambda _: [[]])
    harness.now += seconds
    harness.end(plan, failed=failed)
    harness.half.request_finished(request, tables(blocks), completed=True)
    return request


def test_a_load_that_takes_longer_than_computing_is_not_ordered(pool: Any, block_pool: Any) -> None:
    """A load takes 1 s and 0.1 s a block, computing 0.2 s a block: equal at ten blocks."""
    harness = Harness(pool, block_pool, load_mode="async", prefill_tokens_per_s=TOKENS / 0.2)
    harness.store(hashes(20))
    load(harness, "failed", 20, 9.0, failed=True)
    for number, blocks in enumerate((12, 20, 16)):
        load(harness, f"r{number}", blocks, 1 + 0.1 * blocks)
    short = harness.request("short", 9)
    for _ in range(3):
        assert harness.half.matched_tokens(short, 0) == (0, False)
    assert harness.half.counters.take()["declined_blocks"] == 9
    harness.half.allocated(short, tables(9), 0)
    assert harness.half.matched_tokens(harness.request("long", 11), 0) == (11 * TOKENS, True)
    # It is measured again after a while.
    harness.now += 31
    assert harness.half.matched_tokens(harness.request("later", 9), 0) == (9 * TOKENS, True)


def test_generated_blocks_are_saved_by_choice(pool: Any, block_pool: Any) -> None:
    harness = Harness(pool, block_pool, save_generated=False)
    request = harness.request("r", 2)
    request.block_hashes = hashes(6)
    (save,) = harness.step(request, 5 * TOKENS, tables(6)).saves[0].saves
    assert save.keys == pack(hashes(2))
    harness.half.request_finished(request, tables(6), completed=True)
    assert "dropped_saves" not in harness.half.counters.take()
    assert harness.half.plan_step({}, lambda _: [[]]).saves == []


# --- preemption and reset


def test_a_preempted_request_is_looked_up_anew(harness: Harness) -> None:
    request = harness.request("r", 6)
    assert harness.half.matched_tokens(request, 0) == (0, False)
    plan = harness.step(request, 6 * TOKENS, tables(6))
    harness.store(request.block_hashes)
    harness.end(plan)
    request.num_preemptions, request.num_computed_tokens = 1, 0
    assert harness.half.matched_tokens(request, 0) == (6 * TOKENS, True)
    harness.half.allocated(request, tables(6, first=20), 6 * TOKENS)
    (job,) = harness.half.plan_step({}, lambda _: [[]]).loads
    assert job.groups[0].block_ids == list(range(20, 26))


@pytest.fixture
def idle(harness: Harness) -> Harness:
    """With a stored prompt, after the step that opens the namespace."""
    harness.half.plan_step({}, lambda _: [[]])
    harness.store(hashes(4))
    return harness


def hashes(blocks: int) -> list[bytes]:
    return [bytes([i]) * 32 for i in range(blocks)]


def test_a_reset_with_the_same_weights_keeps_everything(idle: Harness) -> None:
    """As when an engine sleeps."""
    request = idle.request("r", 4)
    assert idle.half.matched_tokens(request, 0) == (4 * TOKENS, True)
    assert idle.half.reset()
    assert not idle.pool.leases
    assert idle.half.matched_tokens(request, 0) == (None, False)
    plan = idle.half.plan_step({}, lambda _: [[]])
    assert plan.reset == 1
    idle.half.use_weights(None)  # not all ranks have said it
    assert idle.half.matched_tokens(request, 0) == (None, False)
    idle.half.use_weights("first")
    assert idle.half.matched_tokens(request, 0) == (4 * TOKENS, True)
    assert idle.half.plan_step({}, lambda _: [[]]).opening == Opening(2, idle.make(""), 0)
    counted = idle.half.counters.take()
    assert counted["resets"] == 1
    assert "new_weights" not in counted


def test_new_weights_lead_to_another_namespace_and_old_ones_back(idle: Harness) -> None:
    request = idle.request("r", 4)
    idle.reset("second")
    assert idle.half.matched_tokens(request, 0) == (0, False)
    plan = idle.step(request, 4 * TOKENS, tables(4))
    assert plan.opening == Opening(2, idle.make("second"), 0)
    assert [save.generation for save in plan.saves] == [2]
    idle.end(plan)
    assert not idle.half.has_work()
    assert idle.half.counters.take()["new_weights"] == 1
    assert idle.pool.closed == [idle.ns.digest]
    assert idle.pool.ttls[idle.ns.digest] == 0
    assert idle.pool.ttls[idle.make("second").digest()] > 0
    # Whoever has the same finds what there is of them.
    idle.ns = idle.pool.open(idle.make("second"))
    idle.store(hashes(4))
    idle.reset("second")
    assert idle.half.matched_tokens(idle.request("s", 4), 0) == (4 * TOKENS, True)
    idle.reset("first")
    assert idle.half.matched_tokens(idle.request("t", 4), 0) == (4 * TOKENS, True)
    assert idle.half.plan_step({}, lambda _: [[]]).opening == Opening(4, idle.make(""), 0)


def test_weights_that_cannot_be_seen_are_shared_with_nobody(
    idle: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("unseen-1", "unseen-2"):
        idle.reset("")
        opening = idle.half.plan_step({}, lambda _: [[]]).opening
        assert opening is not None
        assert opening.record == idle.make(name)
    assert len(caplog.records) == 2


def test_a_namespace_that_is_refused_leaves_the_engine_without_a_pool(
    idle: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise LimitExceeded("too many namespaces")

    monkeypatch.setattr(idle.pool, "open", refuse)
    idle.reset("second")
    request = idle.request("r", 4)
    assert idle.half.matched_tokens(request, 0) == (0, False)
    assert idle.step(request, 4 * TOKENS, tables(4)).saves == []
    assert idle.half.counters.take()["failed_resets"] == 1
    monkeypatch.undo()
    idle.reset("first")
    assert idle.half.matched_tokens(idle.request("s", 4), 0) == (4 * TOKENS, True)


def test_nothing_is_asked_while_nothing_is_to_be_computed(idle: Harness) -> None:
    """A step without requests may be one of an engine that sleeps, with its weights unmapped."""
    assert idle.half.reset()
    assert not idle.half.has_work()
    assert idle.half.plan_step({}, lambda _: [[]]).reset == 0


def test_an_answer_to_an_earlier_question_is_none(idle: Harness) -> None:
    assert idle.half.reset()
    assert idle.half.reset()
    reports = [RankReport(0, "cpu", "L", "", [], {}, weights="w", reset=at) for at in range(3)]
    assert idle.half.last_reset == 2
    assert [common_weights([one], 2) is None for one in reports] == [True, True, False]
    assert common_weights(reports[1:], 2) is None


def test_an_engine_that_only_saves_asks_too(pool: Any, block_pool: Any) -> None:
    harness = Harness(pool, block_pool, loads=False)
    harness.half.plan_step({}, lambda _: [[]])
    assert harness.half.reset()
    request = harness.request("r", 4)
    assert harness.half.matched_tokens(request, 0) == (0, False)
    plan = harness.step(request, 2 * TOKENS, tables(4))
    assert (plan.reset, plan.saves) == (1, [])
    harness.half.use_weights("second")
    (save,) = harness.step(request, 2 * TOKENS, tables(4)).saves[0].saves
    assert save.keys == pack(request.block_hashes)


def test_ranks_open_the_namespace_when_its_weights_are_known(pool: Any, block_pool: Any) -> None:
    pool.silent = True  # the daemon is away
    harness = Harness(pool, block_pool)
    first = harness.half.plan_step({}, lambda _: [[]]).opening
    assert first is not None
    assert first.weights == -1
    assert harness.half.plan_step({}, lambda _: [[]]).opening is None
    pool.silent = False
    assert harness.half.plan_step({}, lambda _: [[]]).opening == Opening(2, harness.make(""), 0)
    assert harness.half.plan_step({}, lambda _: [[]]).opening is None


def test_a_reset_before_the_namespace_is_known_counts(pool: Any, block_pool: Any) -> None:
    harness = Harness(pool, block_pool)
    harness.half._namespace = harness.half._make_record = None
    assert harness.half.reset()
    request = harness.request("r", 4)
    assert harness.half.matched_tokens(request, 0) == (0, False)
    harness.half.set_namespace(harness.make, "first", groups=[0], rank_bytes=PART_BYTES)
    assert harness.half.matched_tokens(request, 0) == (None, False)
    harness.half.use_weights("second")
    opening = harness.half.plan_step({}, lambda _: [[]]).opening
    assert opening is not None
    assert opening.record == harness.make("second")


@pytest.mark.parametrize("why", ["loads", "saves", "runs"])
def test_a_reset_with_old_blocks_in_the_engine_leaves_the_pool_alone(
    idle: Harness, why: str
) -> None:
    request = idle.request("r", 4)
    plan = StepPlan()
    if why == "loads":
        idle.half.matched_tokens(request, 0)
        idle.half.allocated(request, tables(4), 4 * TOKENS)
        plan = idle.half.plan_step({}, lambda _: [[]])
    elif why == "saves":
        plan = idle.step(request, 4 * TOKENS, tables(4))
    else:
        idle.block_pool.touch(idle.block_pool.blocks[1:3])
    assert not idle.half.reset()
    other = idle.request("other", 4)
    assert idle.half.matched_tokens(other, 0) == (0, False)
    assert idle.step(other, 4 * TOKENS, tables(4)).saves == []
    # What ran has ended.
    idle.end(plan)
    if why == "runs":
        idle.block_pool.free_blocks(idle.block_pool.blocks[1:3])
    other.num_computed_tokens = 0
    idle.reset("second")
    assert idle.step(other, 4 * TOKENS, tables(4)).saves != []


def test_a_failed_reset_is_not_undone_by_the_answer_to_the_one_before(idle: Harness) -> None:
    assert idle.half.reset()
    asked = idle.half.last_reset
    request = idle.request("r", 4)
    assert idle.half.matched_tokens(request, 0) == (None, False)
    assert idle.step(request, 2 * TOKENS, tables(4)).reset == asked
    idle.block_pool.touch(idle.block_pool.blocks[1:3])
    assert not idle.half.reset()
    answer = [RankReport(0, "cpu", "L", "", [], {}, weights="first", reset=asked)]
    idle.half.use_weights(common_weights(answer, idle.half.last_reset))
    assert idle.half.matched_tokens(request, 0) == (0, False)
    assert idle.step(request, 2 * TOKENS, tables(4)).saves == []
    idle.block_pool.free_blocks(idle.block_pool.blocks[1:3])
    assert idle.half.reset()
    assert idle.half.matched_tokens(idle.request("s", 4), 0) == (None, False)
    assert idle.half.plan_step({}, lambda _: [[]]).reset == idle.half.last_reset == asked + 2
    idle.half.use_weights("first")
    assert idle.half.matched_tokens(idle.request("t", 4), 0) == (4 * TOKENS, True)


def test_a_reset_that_failed_before_the_namespace_is_known_counts(
    pool: Any, block_pool: Any
) -> None:
    harness = Harness(pool, block_pool)
    harness.half._namespace = harness.half._make_record = None
    block_pool.touch(block_pool.blocks[1:3])
    assert not harness.half.reset()
    harness.half.set_namespace(harness.make, "first", groups=[0], rank_bytes=PART_BYTES)
    request = harness.request("r", 4)
    assert harness.step(request, 4 * TOKENS, tables(4)).saves == []


def test_who_was_shut_out_before_its_reset_is_not_shut_out_after_it(idle: Harness) -> None:
    idle.half.plan_step({}, lambda _: [[]])
    assert idle.half.reset()
    idle.half.step_done(StepDone(outdated={1}))
    request = idle.request("r", 4)
    assert idle.half.matched_tokens(request, 0) == (None, False)
    idle.half.use_weights("first")
    assert idle.half.matched_tokens(request, 0) == (4 * TOKENS, True)


def test_an_engine_shut_out_by_another_leaves_the_pool_alone_until_its_own_reset(
    idle: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    request = idle.request("r", 4)
    idle.half.step_done(StepDone(outdated={0}))
    assert idle.half.matched_tokens(request, 0) == (4 * TOKENS, True)
    for _ in range(3):
        idle.half.step_done(StepDone(outdated={1}))
    assert idle.half.matched_tokens(request, 0) == (0, False)
    idle.half.allocated(request, tables(4), 0)
    assert not idle.pool.leases
    assert idle.step(request, 4 * TOKENS, tables(4)).saves == []
    assert idle.half.counters.take()["shut_out"] == 1
    assert len(caplog.records) == 1
    idle.reset()
    again = idle.request("again", 4)
    idle.store(again.block_hashes)
    assert idle.half.matched_tokens(again, 0) == (4 * TOKENS, True)


def test_nothing_is_asked_for_while_ranks_may_not_copy(idle: Harness) -> None:
    request = idle.request("r", 4)
    idle.half.use_memory(pinned=False)
    assert idle.half.matched_tokens(request, 0) == (0, False)
    assert idle.step(request, 2 * TOKENS, tables(4)).saves == []
    assert not idle.pool.leases
    idle.half.use_memory(pinned=True)
    assert idle.half.matched_tokens(idle.request("s", 4), 0) == (4 * TOKENS, True)


# --- adapters


def keys_in(packed: bytes) -> list[bytes]:
    return [packed[at : at + 16] for at in range(0, len(packed), 16)]


def adapter_of(folder: Path, number: int, content: bytes) -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.bin").write_bytes(content)
    (folder / "adapter_config.json").write_text("{}")
    return SimpleNamespace(lora_int_id=number, lora_name="a", lora_path=str(folder))


def test_blocks_of_an_adapter_are_named_by_its_content(harness: Harness, tmp_path: Path) -> None:
    """Name, path and the engine's hashes are the same."""
    first = adapter_of(tmp_path / "a", 1, b"one")
    saved = harness.request("r", 4, adapter=first)
    plan = harness.step(saved, 4 * TOKENS, tables(4))
    (save,) = plan.saves[0].saves
    assert save.keys != pack(saved.block_hashes)
    assert len(set(keys_in(save.keys)) - set(keys_in(pack(saved.block_hashes)))) == 4
    harness.pool.commit(harness.pool.reserve(harness.ns, save.keys))
    harness.end(plan)
    found = (4 * TOKENS, True)
    same = harness.request("same", 4, adapter=first)
    assert harness.half.matched_tokens(same, 0) == found
    assert harness.half.matched_tokens(harness.request("none", 4), 0) == (0, False)
    for ended in (saved, same):
        harness.half.request_finished(ended, tables(4), completed=False)
    harness.reset()
    second = adapter_of(tmp_path / "a", 2, b"two")
    other = harness.request("other", 4, adapter=second)
    assert harness.half.matched_tokens(other, 0) == (0, False)
    # Loaded again with the first content.
    harness.half.request_finished(other, tables(4), completed=False)
    harness.reset()
    third = adapter_of(tmp_path / "a", 3, b"one")
    assert harness.half.matched_tokens(harness.request("again", 4, adapter=third), 0) == found


def test_blocks_of_an_adapter_whose_files_were_replaced_are_not_shared_until_a_reset(
    harness: Harness, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Loaded again under its name and path, it finds what the engine's own cache has of the files before."""
    first = harness.request("first", 4, adapter=adapter_of(tmp_path / "a", 1, b"one"))
    harness.end(harness.step(first, 2 * TOKENS, tables(4)))
    second = harness.request("second", 4, adapter=adapter_of(tmp_path / "a", 2, b"two"))
    assert "other files" in caplog.text
    assert harness.half.matched_tokens(second, 2 * TOKENS) == (0, False)
    second.num_computed_tokens = 2 * TOKENS
    assert harness.step(second, 2 * TOKENS, tables(4)).saves == []
    harness.half.request_finished(second, tables(4), completed=True)
    # What runs with the one before may find what was computed with this one.
    assert harness.step(first, 2 * TOKENS, tables(4)).saves == []
    harness.half.request_finished(first, tables(4), completed=True)
    assert not harness.half.has_work()
    harness.reset()
    third = harness.request("third", 4, adapter=adapter_of(tmp_path / "a", 3, b"two"))
    assert harness.step(third, 4 * TOKENS, tables(4)).saves != []


def test_a_request_that_waits_during_a_reset_counts_after_it(
    harness: Harness, tmp_path: Path
) -> None:
    """It computes with what the engine had loaded for it."""
    waits = harness.request("waits", 4, adapter=adapter_of(tmp_path / "a", 1, b"one"))
    harness.reset()
    second = harness.request("second", 4, adapter=adapter_of(tmp_path / "a", 2, b"two"))
    assert harness.step(second, 4 * TOKENS, tables(4)).saves == []
    assert harness.step(waits, 4 * TOKENS, tables(4)).saves == []


def test_blocks_of_an_unknown_adapter_are_not_shared(harness: Harness, tmp_path: Path) -> None:
    adapter = adapter_of(tmp_path / "a", 1, b"one")
    adapter.lora_path = str(tmp_path / "not here")
    request = harness.request("r", 4, adapter=adapter)
    harness.store(request.block_hashes)
    assert harness.half.matched_tokens(request, 0) == (0, False)
    assert harness.step(request, 4 * TOKENS, tables(4)).saves == []
    harness.half.request_finished(request, tables(4), completed=True)
    assert "dropped_saves" not in harness.half.counters.take()
    assert not harness.half.has_work()


# --- the engine's own cache


EVENTS = Publisher("tcp://127.0.0.1:1", "tcp://127.0.0.1:2", "kv")


def test_the_daemon_is_told_where_the_engines_events_are(pool: Any, block_pool: Any) -> None:
    rules = (GroupRule(0), GroupRule(2, 1, PartKind.WINDOW, 1))
    harness = Harness(pool, block_pool, rules=rules, ranks=2, events=EVENTS)
    told = (EVENTS.endpoint, EVENTS.replay, EVENTS.topic, [0, 2, 0, 2])
    assert pool.followed == [(harness.ns.digest, *told)]
    harness.reset("second")
    assert pool.followed[1:] == [(pool.open(harness.make("second")).digest, *told)]
    harness.reset("first")
    assert pool.followed[2:] == [(harness.ns.digest, *told)]
    harness.half.close()
    assert pool.followed[3:] == [(harness.ns.digest, "", "", "", [0, 2, 0, 2])]


def test_an_engine_that_is_not_followed_serves_all_the_same(
    pool: Any, block_pool: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pool.away = True
    harness = Harness(pool, block_pool, load_mode="async", events=EVENTS)
    pool.away = False
    assert "the fake cluster is away" in caplog.text
    harness.store([bytes([i]) * 32 for i in range(4)])
    assert harness.half.matched_tokens(harness.request("r", 4), 0) == (4 * TOKENS, True)


def test_nothing_is_told_where_nothing_is_published(harness: Harness) -> None:
    harness.half.close()
    assert harness.pool.followed == []

"""Blocks of other nodes: who waits for them, how long, and at what price."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.engine_plugins.vllm.plan import StepDone
from kvpool.engine_plugins.vllm.scheduler.pulls import Pulls
from kvpool.engine_plugins.vllm.scheduler.speeds import STEPS_MAX
from kvpool.types import Recompute
from tests.unit.engine_plugins.scheduler.harness import TOKENS, Harness, tables

# --- blocks of other nodes


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

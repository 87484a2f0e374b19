"""Loads: which are ordered and how, when their leases end, and what follows a failure."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.engine_plugins.vllm.plan import GroupRule, pack
from kvpool.types import PartKind
from tests.unit.engine_plugins.scheduler.harness import PART_BYTES, TOKENS, Harness, hashes, tables

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

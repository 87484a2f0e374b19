"""Preemption, and resets with the same and with other weights."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.engine_plugins.vllm.plan import (
    Opening,
    RankReport,
    StepDone,
    StepPlan,
    common_weights,
    pack,
)
from kvpool.errors import LimitExceeded
from tests.unit.engine_plugins.scheduler.harness import PART_BYTES, TOKENS, Harness, hashes, tables


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


def test_a_reset_with_the_same_weights_keeps_everything(idle: Harness) -> None:
    """As when an engine sleeps."""
    request = idle.request("r", 4)
    assert idle.half.matched_tokens(request, 0) == (4 * TOKENS, True)
    assert idle.half.reset()
    assert not idle.pool.leases
    assert idle.half.matched_tokens(request, 0) == (None, False)
    plan = idle.half.plan_step({}, lambda _: [[]])
    assert plan.reset == 1
    idle.half.entered.use_weights(None)  # not all ranks have said it
    assert idle.half.matched_tokens(request, 0) == (None, False)
    idle.half.entered.use_weights("first")
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


def test_a_namespace_that_is_refused_leaves_the_engine_without_a_pool(idle: Harness) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise LimitExceeded("too many namespaces")

    takes, idle.pool.open = idle.pool.open, refuse
    idle.reset("second")
    request = idle.request("r", 4)
    assert idle.half.matched_tokens(request, 0) == (0, False)
    assert idle.step(request, 4 * TOKENS, tables(4)).saves == []
    assert idle.half.counters.take()["failed_resets"] == 1
    idle.pool.open = takes
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
    assert idle.half.entered.last_reset == 2
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
    harness.half.entered.use_weights("second")
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
    harness = Harness(pool, block_pool, known=False)
    assert harness.half.reset()
    request = harness.request("r", 4)
    assert harness.half.matched_tokens(request, 0) == (0, False)
    harness.half.set_namespace(harness.make, "first", groups=[0], rank_bytes=PART_BYTES)
    assert harness.half.matched_tokens(request, 0) == (None, False)
    harness.half.entered.use_weights("second")
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


def test_a_reset_while_cached_blocks_are_saved_lets_the_saves_end(idle: Harness) -> None:
    """They are those of the weights of before, and stay in their namespace; who asks for new ones hears nothing of them."""
    request = idle.request("r", 6, first=20)
    idle.block_pool.cache(range(1, 7))
    plan = idle.step(request, 6 * TOKENS, tables(6))
    idle.block_pool.reuse(
        range(1, 7)
    )  # as the reset of the engine's own cache does, which preempts the request
    idle.reset("second")
    request.num_computed_tokens = 0
    later = idle.step(request, 6 * TOKENS, tables(6))
    assert later.reused == [plan.saves[0].job]
    assert [later.saves[0].generation, plan.saves[0].generation] == [2, 1]
    idle.end(plan, failed=True)
    assert idle.pool.given_up == []
    idle.end(later)
    assert not idle.half.has_work()
    assert idle.step(idle.request("s", 6, first=20), 6 * TOKENS, tables(6)).saves == []


def test_a_reset_gives_up_saves_that_no_rank_has_begun(idle: Harness) -> None:
    """The engine may sleep next, and wake with other bytes in their blocks."""
    request = idle.request("r", 6, first=20)
    request.num_computed_tokens = 6 * TOKENS
    idle.half.request_finished(request, tables(6), completed=True)
    idle.reset()
    assert idle.half.counters.take()["dropped_saves"] == 6
    again = idle.request("again", 6, first=20)
    assert idle.block_pool.pinned == 0
    assert idle.step(again, 0, tables(6)).saves == []
    assert idle.step(again, 6 * TOKENS, tables(6)).saves != []


def test_a_failed_reset_is_not_undone_by_the_answer_to_the_one_before(idle: Harness) -> None:
    assert idle.half.reset()
    asked = idle.half.entered.last_reset
    request = idle.request("r", 4)
    assert idle.half.matched_tokens(request, 0) == (None, False)
    assert idle.step(request, 2 * TOKENS, tables(4)).reset == asked
    idle.block_pool.touch(idle.block_pool.blocks[1:3])
    assert not idle.half.reset()
    answer = [RankReport(0, "cpu", "L", "", [], {}, weights="first", reset=asked)]
    idle.half.entered.use_weights(common_weights(answer, idle.half.entered.last_reset))
    assert idle.half.matched_tokens(request, 0) == (0, False)
    assert idle.step(request, 2 * TOKENS, tables(4)).saves == []
    idle.block_pool.free_blocks(idle.block_pool.blocks[1:3])
    assert idle.half.reset()
    assert idle.half.matched_tokens(idle.request("s", 4), 0) == (None, False)
    assert (
        idle.half.plan_step({}, lambda _: [[]]).reset == idle.half.entered.last_reset == asked + 2
    )
    idle.half.entered.use_weights("first")
    assert idle.half.matched_tokens(idle.request("t", 4), 0) == (4 * TOKENS, True)


def test_a_reset_that_failed_before_the_namespace_is_known_counts(
    pool: Any, block_pool: Any
) -> None:
    harness = Harness(pool, block_pool, known=False)
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
    idle.half.entered.use_weights("first")
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

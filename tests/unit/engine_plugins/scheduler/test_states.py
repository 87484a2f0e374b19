"""Saves and hits of groups whose blocks are states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvpool.engine_plugins.vllm.plan import GroupRule, StepDone, StepPlan, block_key, pack
from kvpool.errors import LimitExceeded
from kvpool.types import PartKind
from tests.unit.engine_plugins.scheduler.harness import TOKENS, Harness, tables

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
    if why == "shut out":
        hybrid.half.step_done(StepDone(outdated={1}))
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

"""Whose order may begin: any order of joins and ends, against what was promised."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.daemon.workers.turns import Turn, TurnLimits, Turns
from kvpool.errors import LimitExceeded

LIMITS = TurnLimits(16, 6)
SOURCES = "abcde"  # one more than a quarter of the places


def nothing() -> None:
    pass


@given(
    st.lists(
        st.tuples(st.sampled_from(SOURCES), st.sampled_from(["join", "first", "end", "give up"])),
        max_size=80,
    )
)
def test_limits_hold_and_no_source_is_kept_out_by_others(steps: list[tuple[str, str]]) -> None:
    turns = Turns(LIMITS)
    all_of: dict[str, list[Turn]] = {source: [] for source in SOURCES}
    for source, step in steps:
        if step in {"join", "first"}:
            all_of[source].append(turns.join(source, nothing, first=step == "first"))
        else:
            some = [turn for turn in all_of[source] if turn.begun == (step == "end")]
            if some:
                turns.end(some[0])
                turns.end(some[0])  # does nothing
                all_of[source].remove(some[0])
        running = {one: sum(turn.begun for turn in mine) for one, mine in all_of.items()}
        assert sum(running.values()) <= LIMITS.together
        for one, mine in all_of.items():
            assert turns.running(one) == running[one] <= LIMITS.each
            assert turns.waiting(one) == len(mine) - running[one]
            # Whoever has nothing under way does not wait, whatever the others hold.
            assert running[one] or not mine


@given(st.integers(1, 40))
def test_a_source_alone_has_all_that_one_may_have(orders: int) -> None:
    turns = Turns(TurnLimits(16, 4))
    for _ in range(orders):
        turns.join("a", nothing)
    assert turns.running("a") == min(orders, 4)


def test_hedges_overtake_and_others_come_in_order() -> None:
    turns = Turns(TurnLimits(2, 1))
    came: list[int] = []
    begun = turns.join("a", nothing)
    waiting = [
        turns.join("a", lambda number=number: came.append(number), first=number >= 3)
        for number in range(6)
    ]
    turns.end(waiting[1])
    turns.end(begun)
    for _ in range(5):
        turns.end(next(turn for turn in waiting if turn.begun and not turn.over))
    assert came == [3, 4, 5, 0, 2]
    assert turns.running("a") == turns.waiting("a") == 0


def test_those_with_the_fewest_are_next() -> None:
    turns = Turns(TurnLimits(6, 6))
    for source in "aaaabbbb":
        turns.join(source, nothing)
    assert (turns.running("a"), turns.running("b")) == (3, 1)
    assert all(turns.join(late, nothing).begun for late in "cd"), "places are left for others"


def test_what_does_not_get_its_turn_in_time_says_so_and_leaves_nothing() -> None:
    async def main() -> None:
        turns = Turns(TurnLimits(2, 1))
        async with turns.turn("a", 1.0):
            with pytest.raises(LimitExceeded, match="in progress"):
                async with turns.turn("a", 0.0):
                    raise AssertionError
            assert (turns.running("a"), turns.waiting("a")) == (1, 0)
        assert turns.running("a") == 0

    asyncio.run(main())

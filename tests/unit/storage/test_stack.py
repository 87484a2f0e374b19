"""Rules of the stack: how much is written to a disk, when that begins and ends, what is worth loading."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.storage.stack import (
    BURST_S,
    DAY_S,
    SCARCE,
    Budget,
    Watermarks,
    worth_loading,
)

STEPS = st.lists(st.tuples(st.floats(0, 7200), st.integers(1, 1 << 30)), max_size=60)


@given(st.integers(1, 1 << 42), STEPS)
def test_no_stretch_of_time_is_written_more_in_than_it_brings_and_a_burst(
    bytes_a_day: int, steps: list[tuple[float, int]]
) -> None:
    now, budget = 50.0, Budget(bytes_a_day, 50.0)
    rate = bytes_a_day / DAY_S
    spent: list[tuple[float, int]] = []
    refused = 0
    for pause, nbytes in steps:
        now += pause
        if budget.spend(nbytes, now):
            spent.append((now, nbytes))
        else:
            refused += nbytes
    for first in range(len(spent)):
        total = 0
        for at, nbytes in spent[first:]:
            # A piece goes while anything is left, so the last one may be owed.
            assert total <= rate * (BURST_S + at - spent[first][0]) * (1 + 1e-9) + 1e-6
            total += nbytes
    assert budget.refused_bytes == refused


@given(st.integers(1, 1 << 42), st.integers(1, 1 << 30))
def test_what_is_owed_is_worked_off_and_then_there_is_room_again(
    bytes_a_day: int, nbytes: int
) -> None:
    budget = Budget(bytes_a_day, 0.0)
    assert budget.spend(nbytes, 0.0)
    rate = bytes_a_day / DAY_S
    owed = nbytes - rate * BURST_S
    if owed > 0:
        assert not budget.spend(1, owed / rate * 0.99)
        assert budget.spend(1, owed / rate * 1.01 + 1e-6)


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 1 << 50))))
def test_without_a_limit_all_may_be_written(steps: list[tuple[float, int]]) -> None:
    budget, now = Budget(0, 0.0), 0.0
    for pause, nbytes in steps:
        now += pause
        assert budget.spend(nbytes, now)
        assert not budget.scarce(now)
    assert budget.refused_bytes == 0


def test_a_budget_is_scarce_below_a_share_of_its_burst() -> None:
    burst = 3600 * 1000
    budget = Budget(86400 * 1000, 0.0)
    assert not budget.scarce(0.0)
    budget.spend(int(burst * (1 - SCARCE)), 0.0)
    assert not budget.scarce(0.0)
    budget.spend(1, 0.0)
    assert budget.scarce(0.0)
    assert not budget.scarce(0.01)
    budget.spend(burst, 1.0)
    assert budget.scarce(1.0)
    assert not budget.scarce(1e9)


@given(
    st.floats(0, 1),
    st.floats(0, 1),
    st.lists(st.floats(0, 1), max_size=60),
)
def test_watermarks_go_on_from_below_the_low_one_up_to_the_high_one(
    one: float, other: float, levels: list[float]
) -> None:
    low, high = sorted((one, other))
    marks = Watermarks(low, high)
    going: list[bool] = []
    for level in levels:
        going.append(marks.more(level))
        # The last level that was outside of the two says what is done in between.
        decided = [x < low for x in levels[: len(going)] if x < low or x >= high]
        assert going[-1] == (bool(decided) and decided[-1])


@given(
    st.integers(0, 10_000),
    st.floats(0, 1),
    st.floats(0, 10),
    st.floats(0, 1),
)
def test_all_is_loaded_or_nothing_whichever_is_sooner(
    blocks: int, block_s: float, latency_s: float, recompute_s: float
) -> None:
    chosen = worth_loading(blocks, block_s, latency_s, recompute_s)
    assert chosen in {0, blocks}
    if recompute_s == 0:
        assert chosen == blocks
    elif blocks:
        loaded, computed = latency_s + blocks * block_s, blocks * recompute_s
        assert bool(chosen) == (loaded < computed)


@given(st.floats(0.001, 1), st.floats(0, 10), st.floats(0.001, 1))
def test_what_is_worth_loading_is_so_with_more_blocks_too(
    block_s: float, latency_s: float, recompute_s: float
) -> None:
    worth = [bool(worth_loading(n, block_s, latency_s, recompute_s)) for n in range(1, 200)]
    assert worth == sorted(worth)


@pytest.mark.parametrize("low", [0.1, 0.25])
def test_watermarks_remember_that_they_are_at_it(low: float) -> None:
    marks = Watermarks(low, 0.25, going=True)
    assert marks.more(0.2)
    assert not marks.more(0.25)
    assert marks.more(0.2) == (low > 0.2)

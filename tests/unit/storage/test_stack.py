"""Rules of the stack: how much is written to a disk, when that begins and ends, what is worth loading."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.errors import InvalidRequest
from kvpool.storage.stack import (
    BURST_S,
    DAY_S,
    SCARCE,
    Budget,
    Watermarks,
    worth_keeping,
    worth_loading,
)
from kvpool.types import Recompute

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


LOADS = st.lists(
    st.tuples(st.integers(1, 500), st.floats(0, 100) | st.just(math.inf)), min_size=1, max_size=6
).map(lambda loads: sorted(dict(loads).items()))
PRICES = st.builds(Recompute, st.floats(1e-6, 1), st.floats(0, 1e-2))


def price_of(recompute: Recompute, first: int, end: int) -> float:
    """Block by block."""
    return math.fsum(recompute.block_s + recompute.growth_s * n for n in range(first, end))


@given(LOADS, PRICES, st.integers(0, 20))
def test_the_prompt_is_ready_no_later_than_with_any_other_length(
    loads: list[tuple[int, float]], recompute: Recompute, here: int
) -> None:
    loads = [(here + blocks, seconds) for blocks, seconds in loads]
    last = loads[-1][0]
    ready = {blocks: load_s + price_of(recompute, blocks, last) for blocks, load_s in loads}
    ready[here] = price_of(recompute, here, last)
    chosen = worth_loading(here, loads, recompute)
    assert ready[chosen] <= min(ready.values()) * (1 + 1e-9) + 1e-9
    if chosen != here:
        assert dict(loads)[chosen] < price_of(recompute, here, chosen) * (1 + 1e-9)


@given(
    st.dictionaries(st.integers(1, 500), st.integers(0, 100_000), min_size=1, max_size=6),
    st.integers(1, 1000),
    st.integers(0, 10),
    st.sampled_from([1, 2, 3, 64]),
)
def test_the_slower_the_engine_and_the_faster_the_sources_the_more_is_loaded(
    seconds: dict[int, int], block_s: int, growth_s: int, times: int
) -> None:
    """In whole numbers, which floats hold exactly."""
    loads = [(blocks, float(seconds[blocks])) for blocks in sorted(seconds)]
    chosen = worth_loading(0, loads, Recompute(block_s, growth_s))
    assert worth_loading(0, loads, Recompute(block_s * times, growth_s * times)) >= chosen
    slower = [(blocks, load_s * times) for blocks, load_s in loads]
    assert worth_loading(0, slower, Recompute(block_s, growth_s)) <= chosen


@given(LOADS)
def test_all_is_loaded_where_the_engines_speed_is_not_known(
    loads: list[tuple[int, float]],
) -> None:
    assert worth_loading(0, loads, None) == loads[-1][0]


def test_depth_makes_blocks_dear() -> None:
    """The same load, of blocks that attend to more."""
    recompute = Recompute(0.001, 0.0001)
    assert worth_loading(0, [(100, 0.7)], recompute) == 0
    assert worth_loading(100, [(200, 0.7)], recompute) == 200
    assert worth_loading(100, [(200, 1.8)], recompute) == 100, "what is here costs nothing"


@given(st.sampled_from([0.0, -1.0, math.inf, math.nan]), st.sampled_from([0.0, 1.0]))
def test_what_is_no_price_is_refused(wrong: float, right: float) -> None:
    with pytest.raises(InvalidRequest):
        Recompute(wrong, right)
    if wrong:
        with pytest.raises(InvalidRequest):
            Recompute(1.0, wrong)


@pytest.mark.parametrize("low", [0.1, 0.25])
def test_watermarks_remember_that_they_are_at_it(low: float) -> None:
    marks = Watermarks(low, 0.25, going=True)
    assert marks.more(0.2)
    assert not marks.more(0.25)
    assert marks.more(0.2) == (low > 0.2)


@pytest.mark.parametrize(
    ("put", "used", "kept", "worth"),
    [(5, 5, -1, False), (5, 6, -1, True), (5, 6, 6, False), (5, 7, 6, True), (5, 5, 4, False)],
)
def test_worth_keeping_is_what_was_read_since_it_came_and_since_it_was_kept(
    put: int, used: int, kept: int, worth: bool
) -> None:
    assert worth_keeping(put, used, kept) is worth

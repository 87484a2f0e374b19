"""The cost of loads, learned from loads whose cost is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.engine_plugins.vllm.scheduler.load_cost import KEEP_S, LoadCost
from kvpool.prefill_cost import STEPS_MIN

COUNTS = st.integers(1, 4000)


@given(
    constant=st.floats(1e-4, 0.1),
    block=st.floats(1e-5, 1e-3),
    sizes=st.tuples(COUNTS, COUNTS).filter(lambda two: max(two) > 4 * min(two)),
    between=st.floats(0, 1),
)
def test_a_line_is_found(
    constant: float, block: float, sizes: tuple[int, int], between: float
) -> None:
    cost = LoadCost()
    for at in range(20):
        blocks = sizes[at % 2]
        cost.observe(blocks, constant + block * blocks, at / 100)
    asked = round(min(sizes) + between * (max(sizes) - min(sizes)))
    found = cost.seconds(asked, 0.2)
    # The fit leans a little to proportional costs.
    assert found == pytest.approx(constant + block * asked, rel=0.15)


def test_one_load_that_takes_far_too_long_counts_little() -> None:
    """A kernel is compiled in the first."""
    cost = LoadCost()
    cost.observe(10, 5.0, 0.0)
    for blocks in (10, 100, 50, 20):
        cost.observe(blocks, 0.01 + 0.001 * blocks, 0.0)
    assert cost.seconds(10, 0.0) == pytest.approx(0.02, rel=0.2)


def test_few_or_old_measurements_are_none() -> None:
    cost = LoadCost()
    for at in range(STEPS_MIN):
        assert cost.seconds(1, 0.0) is None
        cost.observe(1, 0.5, float(at))
    assert cost.seconds(1, STEPS_MIN + KEEP_S / 2) == pytest.approx(0.5)
    assert cost.seconds(1, STEPS_MIN + KEEP_S) is None

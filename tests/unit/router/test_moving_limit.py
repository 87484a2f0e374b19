"""A limit that moves ends what takes longer, and nothing else."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvpool.router.http.moving_limit import MovingLimit
from tests.sim.simulation.loop import run_alone

# No sleep ends just when a limit does.
SLEEPS = st.integers(0, 50).map(lambda tenths: tenths / 10)
LIMITS = st.integers(0, 100).map(lambda tenths: tenths / 10 + 0.05) | st.just(math.inf)


def _timed(work: Callable[[], Awaitable[None]]) -> tuple[float, bool]:
    """How long it took, and whether it was too late."""

    found: list[tuple[float, bool]] = []

    async def main() -> None:
        began = asyncio.get_running_loop().time()
        late = False
        try:
            await work()
        except TimeoutError:
            late = True
        found.append((asyncio.get_running_loop().time() - began, late))

    run_alone(main(), steps_max=10_000)
    return found[0]


@given(LIMITS, st.lists(st.tuples(SLEEPS, LIMITS), max_size=8))
def test_it_is_as_a_timeout_that_is_rescheduled(
    first: float, moves: list[tuple[float, float]]
) -> None:
    """Each move: so long after the one before, to so long from then."""

    async def moving() -> None:
        time = asyncio.get_running_loop().time
        async with MovingLimit(time() + first) as limit:
            for after, left in moves:
                await asyncio.sleep(after)
                limit.move(time() + left)
            await asyncio.sleep(100)

    async def rescheduled() -> None:
        time = asyncio.get_running_loop().time
        when = [None if left == math.inf else left for left in (first, *(m[1] for m in moves))]
        async with asyncio.timeout(when[0]) as limit:
            for (after, _), left in zip(moves, when[1:], strict=True):
                await asyncio.sleep(after)
                limit.reschedule(None if left is None else time() + left)
            await asyncio.sleep(100)

    took, late = _timed(rescheduled)
    assert _timed(moving) == (pytest.approx(took), late)


def test_nothing_rings_when_it_has_ended() -> None:
    async def work() -> None:
        async with MovingLimit(asyncio.get_running_loop().time() + 1):
            pass
        await asyncio.sleep(10)

    assert _timed(work) == (10, False)


def test_being_cancelled_is_no_time_out() -> None:
    async def work() -> None:
        async def waits() -> None:
            async with MovingLimit(asyncio.get_running_loop().time() + 5):
                await asyncio.sleep(100)

        task = asyncio.create_task(waits())
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert _timed(work) == (1, False)


@pytest.mark.parametrize("times", [0, 1, 5])
def test_it_is_prolonged_for_as_long_as_it_is_said_when_it_has_come(times: int) -> None:
    left = iter([2.0] * times)

    async def waiting() -> None:
        time = asyncio.get_running_loop().time
        async with MovingLimit(time() + 1.5, lambda: next(left, 0.0)):
            await asyncio.sleep(100)

    assert _timed(waiting) == (1.5 + 2.0 * times, True)

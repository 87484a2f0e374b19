"""How long ago a tick was, beside a list of all of them."""

from bisect import bisect_left

from hypothesis import given
from hypothesis import strategies as st

from kvpool.daemon.core.idle_age import LEVELS, PER_LEVEL, IdleAge
from tests.support.memory import longest

STEPS = st.lists(st.tuples(st.floats(0.5, 100.0), st.integers(0, 50)), min_size=1, max_size=2000)


def noted(steps) -> tuple[IdleAge, list[float], list[int]]:
    ages, times, ticks = IdleAge(), [0.0], [0]
    ages.note(0.0, 0)
    for seconds, more in steps:
        times.append(times[-1] + seconds)
        ticks.append(ticks[-1] + more)
        ages.note(times[-1], ticks[-1])
    return ages, times, ticks


@given(STEPS, st.floats(0, 1))
def test_an_age_is_about_right_however_old(steps, share):
    ages, times, ticks = noted(steps)
    assert longest(ages) <= LEVELS * PER_LEVEL
    now, tick = times[-1], int(share * ticks[-1])
    # The tick was reached between the sample before it and the one after it.
    at = bisect_left(ticks, tick)
    late = now - times[max(0, at)]
    early = now - times[max(0, at - 1)]
    found = ages.age_s(tick, now)
    assert late / 2 - 1e-6 <= found <= early + 1e-6


@given(STEPS, st.floats(0, 20_000))
def test_nothing_younger_is_taken_for_old(steps, seconds):
    ages, times, ticks = noted(steps)
    now = times[-1]
    tick = ages.tick_before(seconds, now)
    if tick >= 0:
        # The last time at which the clock stood there is at least so long ago, or the tick went on at once.
        first = times[bisect_left(ticks, tick)]
        assert now - first >= seconds - 1e-6
    else:
        assert now - times[0] < seconds or len(times) > LEVELS * PER_LEVEL


def test_what_is_newer_than_the_last_sample_is_new():
    ages, times, ticks = noted([(1.0, 5)] * 10)
    assert ages.age_s(ticks[-1] + 1, times[-1]) == 0.0
    assert IdleAge().age_s(3, 10.0) == 0.0
    assert IdleAge().tick_before(3, 10.0) == -1

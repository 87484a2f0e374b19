"""How large puts are copied: found by trying, on simulated machines."""

import itertools
import random
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.client.copy_tuner import (
    LOST_SHARE,
    PROBE_MAX,
    START,
    CopyTuner,
    CopyWays,
    Way,
)

ALONE, BESIDE, SHARED = Way
NBYTES = 32 << 20
HELPS = {ALONE: 7e9, BESIDE: 8e9, SHARED: 12e9}  # bytes a second
HASHES = {
    ALONE: 7e9,
    BESIDE: 9e9,
    SHARED: 8e9,
}  # a second thread is late, and pays as one that hashes
HURTS = {ALONE: 8e9, BESIDE: 5e9, SHARED: 4e9}
ALIKE = {ALONE: 8e9, BESIDE: 8e9, SHARED: 8e9}


def puts(
    tuner: CopyTuner,
    n: int,
    speeds: Mapping[Way, float],
    noise: Callable[[], float] = lambda: 1.0,
) -> list[Way]:
    """The ways of n puts, on a machine with so many bytes a second each."""
    used = []
    for _ in range(n):
        way = tuner.choose()
        tuner.learn(way, NBYTES, NBYTES / speeds[way] * noise())
        used.append(way)
    return used


def changes(ways: list[Way]) -> int:
    return sum(a is not b for a, b in itertools.pairwise(ways))


def usual_ways(
    tuner: CopyTuner, n: int, speeds: Mapping[Way, float], noise: Callable[[], float]
) -> list[Way]:
    found = []
    for _ in range(n):
        puts(tuner, 1, speeds, noise)
        found.append(tuner.usual)
    return found


@pytest.mark.parametrize(
    ("speeds", "settled"),
    [(HELPS, SHARED), (HASHES, BESIDE), (HURTS, ALONE), (ALIKE, ALONE)],
    ids=["helps", "hashes", "hurts", "alike"],
)
def test_it_settles_soon_and_then_tries_seldom(speeds: Mapping[Way, float], settled: Way) -> None:
    tuner = CopyTuner()
    puts(tuner, 40, speeds)
    assert tuner.usual is settled
    used = puts(tuner, 2000, speeds)
    assert tuner.usual is settled
    assert len(used) - used.count(settled) <= 2 * (2000 // PROBE_MAX + 8)


def test_it_follows_a_machine_that_changes() -> None:
    tuner = CopyTuner()
    for speeds, settled in ((HELPS, SHARED), (HURTS, ALONE), (HELPS, SHARED), (HASHES, BESIDE)):
        puts(tuner, 4000, speeds)
        assert tuner.usual is settled


def test_a_machine_that_slows_down_makes_no_way_look_better() -> None:
    tuner = CopyTuner()
    puts(tuner, 100, HELPS)
    for slower in range(1, 300):
        puts(tuner, 3, {way: speed / (1 + slower / 10) for way, speed in HELPS.items()})
        assert tuner.usual is SHARED


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    ("speeds", "settled"), [(HELPS, SHARED), (HURTS, ALONE)], ids=["helps", "hurts"]
)
def test_noise_does_not_make_it_flap(speeds: Mapping[Way, float], settled: Way, seed: int) -> None:
    """A fifth up and down, and one put in fifty that waits for a core three times its own time."""
    rng = random.Random(seed)

    def noise() -> float:
        return rng.lognormvariate(0, 0.2) + (rng.expovariate(1 / 3) if rng.random() < 0.02 else 0)

    tuner = CopyTuner()
    found = usual_ways(tuner, 3000, speeds, noise)
    assert found[-1] is settled
    assert found.count(settled) > 0.8 * len(found)
    assert changes(found) <= 5


@pytest.mark.parametrize("seed", range(10))
def test_where_all_are_alike_noise_changes_it_seldom(seed: int) -> None:
    rng = random.Random(seed)
    found = usual_ways(CopyTuner(), 3000, ALIKE, lambda: rng.lognormvariate(0, 0.2))
    assert changes(found) <= 20


@given(
    st.tuples(*[st.floats(1e8, 1e11)] * 3).map(lambda each: dict(zip(Way, each, strict=True))),
    st.integers(1, 600),
)
def test_trying_costs_little(speeds: Mapping[Way, float], n: int) -> None:
    """Whatever the machine is: the time lost by probes is paid for by the puts before the next ones."""
    tuner = CopyTuner()
    usual_s = lost_s = 0.0
    slowest = {}
    for _ in range(n):
        usual, way = tuner.usual, tuner.choose()
        took = NBYTES / speeds[way]
        tuner.learn(way, NBYTES, took)
        if way is usual:
            usual_s += took
            continue
        late = took - NBYTES / speeds[usual]
        if late > 0:
            lost_s += late
            slowest[usual, way] = late
    # One probe of each way may still be unpaid; each pair of ways once, as the usual one may have changed between.
    assert lost_s <= LOST_SHARE * usual_s + sum(slowest.values()) + 1e-9


@given(
    st.lists(
        st.tuples(st.sampled_from(Way), st.integers(1, 1 << 40), st.floats(-1, 1e9)), max_size=200
    )
)
def test_it_takes_whatever_is_measured(measured: list[tuple[Way, int, float]]) -> None:
    """Clocks that stand still or go back, and puts chosen before the way changed."""
    tuner = CopyTuner()
    for way, nbytes, seconds in measured:
        assert tuner.choose() in Way
        tuner.learn(way, nbytes, seconds)


def test_after_a_long_stop_in_a_probe_it_still_tries() -> None:
    """The machine slept in the middle of a put: that is not what the way costs."""
    tuner = CopyTuner()
    while (way := tuner.choose()) is START:
        tuner.learn(way, NBYTES, NBYTES / HELPS[way])
    tuner.learn(way, NBYTES, 1e6)
    assert way in puts(tuner, 2000, {**HELPS, way: 9e9})


def test_each_size_by_itself() -> None:
    ways = CopyWays()
    for _ in range(100):
        for block_bytes, nbytes, speeds in ((64 << 10, 4 << 20, HURTS), (1 << 20, NBYTES, HELPS)):
            way = ways.choose(block_bytes, nbytes)
            ways.learn(block_bytes, nbytes, way, nbytes / speeds[way])
    small = [ways.choose(64 << 10, (4 << 20) + 1) for _ in range(10)]
    large = [ways.choose(1 << 20, NBYTES + 5) for _ in range(10)]
    assert small.count(ALONE) >= 8
    assert large.count(SHARED) >= 8
    assert ways.choose(4096, NBYTES) is START

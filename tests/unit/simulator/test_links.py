"""Transfers on shared links, against shares worked out by hand and by brute force."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvpool.simulator.events import Timeline
from kvpool.simulator.links import Link, Network


def run(capacities: list[float], transfers: list[tuple[float, float, list[int]]]) -> list[float]:
    """When each (begins, bytes, links) is done."""
    timeline = Timeline()
    network = Network(timeline)
    links = [Link(capacity) for capacity in capacities]
    done = [0.0] * len(transfers)

    def begin(number: int) -> None:
        _, nbytes, over = transfers[number]

        def arrived() -> None:
            done[number] = timeline.now

        network.start(nbytes, [links[link] for link in over], arrived)

    for number, (begins, _, _) in enumerate(transfers):
        timeline.at(begins, begin, number)
    while timeline.next_at < float("inf"):
        timeline.step()
    assert not any(link.transfers for link in links)
    return done


def test_alone_it_goes_as_fast_as_the_slowest_link() -> None:
    assert run([10.0, 5.0], [(1.0, 20.0, [0, 1])]) == [pytest.approx(5.0)]


def test_two_share_and_the_second_speeds_up_when_the_first_is_done() -> None:
    done = run([10.0], [(0.0, 10.0, [0]), (0.0, 30.0, [0])])
    assert done == [pytest.approx(2.0), pytest.approx(4.0)]


def test_only_who_shares_a_link_is_slowed() -> None:
    done = run([10.0, 10.0, 10.0], [(0.0, 10.0, [0, 1]), (0.0, 10.0, [0, 2]), (0.0, 10.0, [2])])
    assert done == [pytest.approx(2.0), pytest.approx(2.0), pytest.approx(2.0)]


PARTS = st.tuples(
    st.integers(0, 20).map(float),
    st.integers(1, 50).map(float),
    st.lists(st.integers(0, 2), min_size=1, max_size=2, unique=True),
)


@settings(max_examples=30, deadline=None)
@given(st.lists(PARTS, min_size=1, max_size=6))
def test_as_small_steps_of_time_have_it(transfers: list[tuple[float, float, list[int]]]) -> None:
    capacities = [4.0, 7.0, 10.0]
    left = [nbytes for _, nbytes, _ in transfers]
    slow = [0.0] * len(transfers)
    now, step = 0.0, 0.02
    while any(bytes_left > 0 for bytes_left in left):
        active = [
            n for n, (begins, _, _) in enumerate(transfers) if begins <= now + 1e-9 and left[n] > 0
        ]
        counts = [sum(link in transfers[n][2] for n in active) for link in range(3)]
        for n in active:
            left[n] -= step * min(capacities[link] / counts[link] for link in transfers[n][2])
            if left[n] <= 0:
                slow[n] = now + step
        now += step
    for fast, exact in zip(slow, run(capacities, transfers), strict=True):
        assert fast == pytest.approx(exact, abs=6 * step)

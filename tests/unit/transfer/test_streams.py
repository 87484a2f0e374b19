"""The number of connections a pull: found by trying, for each peer."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.transfer.stream_tuner import (
    BETTER,
    LADDER,
    PEERS_MAX,
    PROBE_EVERY,
    SPLIT_BYTES,
    START,
    STREAM_BYTES,
    StreamCounts,
    StreamTuner,
)

LARGE = 64 << 20


def pulls(count: StreamTuner, n: int, speed: Callable[[int], float]) -> list[int]:
    """What n large pulls were spread over, with a network that is so fast for each number."""
    used = []
    for _ in range(n):
        streams = count.choose(LARGE, 1000)
        count.learn(streams, LARGE, LARGE / speed(streams))
        used.append(streams)
    return used


@pytest.mark.parametrize(
    ("speed", "settled"),
    [
        (lambda n: 1e9, 1),  # the core or the card is the limit
        (lambda n: 1e9 * min(n, 2), 2),
        (lambda n: 1e9 * min(n, 4), 4),
        (lambda n: 1e8 * n, 8),  # a window's worth a round trip
        (lambda n: 1e9 / n, 1),  # they are in one another's way
        (lambda n: 1e9 * n**0.1, 2),  # too little to go on, too much to go back
    ],
    ids=["flat", "two", "four", "all", "harmful", "little"],
)
def test_it_settles_where_more_gains_nothing(speed: Callable[[int], float], settled: int) -> None:
    count = StreamTuner()
    used = pulls(count, 40 * PROBE_EVERY, speed)
    assert count.usual == settled
    assert used[-PROBE_EVERY:].count(settled) >= PROBE_EVERY - 1


def test_it_follows_a_network_that_changes() -> None:
    count = StreamTuner()
    pulls(count, 40 * PROBE_EVERY, lambda n: 1e8 * n)
    pulls(count, 80 * PROBE_EVERY, lambda n: 1e9)
    assert count.usual == 1
    pulls(count, 80 * PROBE_EVERY, lambda n: 1e8 * n)
    assert count.usual == 8


@given(
    st.lists(
        st.tuples(st.integers(1, 1 << 30), st.integers(1, 4096), st.floats(1e-6, 1e3)), max_size=80
    )
)
def test_each_has_enough_to_do(asked: list[tuple[int, int, float]]) -> None:
    count = StreamTuner()
    for nbytes, blocks, seconds in asked:
        streams = count.choose(nbytes, blocks)
        assert streams in LADDER
        assert streams <= blocks
        assert streams == 1 or streams * STREAM_BYTES <= nbytes
        assert streams == 1 or nbytes >= SPLIT_BYTES
        count.learn(streams, nbytes, seconds)
        assert count.usual in LADDER


def test_a_network_that_slows_down_is_no_reason_for_more() -> None:
    count = StreamTuner()
    pulls(count, 40 * PROBE_EVERY, lambda n: 1e9 * min(n, 2))
    for slower in range(1, 200):
        pulls(count, 2, lambda n, s=slower: 1e9 * min(n, 2) / (1 + s / 10))
        assert count.usual == 2


def test_small_pulls_and_single_samples_say_nothing() -> None:
    count = StreamTuner()
    for _ in range(100):
        count.learn(8, SPLIT_BYTES - 1, 1e-9)
    count.learn(START, LARGE, 1.0)
    count.learn(4, LARGE, 1 / (2 * BETTER))
    assert count.usual == START


def test_each_peer_by_itself_and_not_too_many() -> None:
    counts = StreamCounts()
    for _ in range(40 * PROBE_EVERY):
        for url, speed in (("near", 1e9), ("far", 1e8)):
            streams = counts.choose(url, LARGE, 100)
            counts.learn(url, streams, LARGE, LARGE / (speed * (streams if url == "far" else 1)))
    assert max(counts.choose("near", LARGE, 100) for _ in range(3)) <= 2
    assert max(counts.choose("far", LARGE, 100) for _ in range(3)) == 8
    for number in range(PEERS_MAX):
        counts.choose(str(number), LARGE, 100)
    assert counts.choose("far", LARGE, 100) == START, "forgotten"
    counts.learn("near", 1, LARGE, 1.0)  # forgotten too, in the middle of a pull

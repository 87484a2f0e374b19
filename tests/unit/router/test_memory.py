"""What requests hold together: against a plain sum."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.router.http.memory import SMALL_BYTES, Held, Memory, NoRoom

SIZES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4 * SMALL_BYTES)), max_size=40)


@given(most=st.integers(0, 6 * SMALL_BYTES), steps=SIZES)
def test_no_more_than_there_is_room_for_and_all_of_it_comes_back(
    most: int, steps: list[tuple[int, int]]
) -> None:
    memory = Memory(most)
    holds = [memory.hold() for _ in range(5)]
    sizes = [0] * 5
    for which, size in steps:
        after = [*sizes[:which], size, *sizes[which + 1 :]]
        fits = sum(max(each - SMALL_BYTES, 0) for each in after) <= most
        if fits or size <= sizes[which]:
            holds[which].resize(size)
            sizes = after
        else:
            with pytest.raises(NoRoom, match=str(most)):
                holds[which].resize(size)
        assert [held.size for held in holds] == sizes
        assert memory.held == sum(max(each - SMALL_BYTES, 0) for each in sizes) <= most
    for held in holds:
        with held:
            pass
    assert memory.held == 0


def test_small_requests_are_served_whatever_large_ones_hold() -> None:
    memory = Memory(1000)
    with memory.hold() as large, memory.hold() as small:
        large.add(SMALL_BYTES + 1000)
        for _ in range(SMALL_BYTES):
            small.add(1)
        with pytest.raises(NoRoom):
            small.add(1)
        assert memory.held == 1000
    assert memory.held == 0


def test_what_fails_in_between_is_given_back() -> None:
    memory = Memory(1 << 20)

    def fails(held: Held) -> None:
        with held:
            held.add(SMALL_BYTES + 7)
            raise ValueError("in between")

    with pytest.raises(ValueError, match="in between"):
        fails(memory.hold())
    assert memory.held == 0

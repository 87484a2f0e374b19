"""Orders are cut into requests that hold all of their blocks, in order, and no more than is allowed."""

from array import array
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvpool.transfer.base import Run, cut
from kvpool.wire.worker import PartRows, PullBlocks

PARTS = st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 40)), max_size=5)


def order(parts: list[tuple[int, int]]) -> PullBlocks:
    rows = [
        PartRows(
            number,
            nbytes,
            nbytes,
            b"".join((1000 * number + at).to_bytes(16) for at in range(count)),
            array("I", range(count)).tobytes(),
        )
        for number, (nbytes, count) in enumerate(parts)
    ]
    return PullBlocks("tcp://x:1", "default", b"d" * 16, 0, rows, 1.0)


def size(runs: list[Run]) -> int:
    return sum((run.end - run.first) * run.part.nbytes for run in runs)


@given(parts=PARTS, most=st.integers(1, 200_000), slices=st.integers(1, 8))
def test_requests_hold_all_blocks_in_order(
    parts: list[tuple[int, int]], most: int, slices: int
) -> None:
    wanted = order(parts)
    requests = list(cut(wanted, most, slices))
    runs = [run for request in requests for run in request]
    assert b"".join(run.keys for run in runs) == b"".join(part.keys for part in wanted.parts)
    assert b"".join(run.rows for run in runs) == b"".join(part.rows for part in wanted.parts)
    assert [run.at for run in runs][:1] in ([], [0])
    assert all(b.at == a.at + a.end - a.first for a, b in pairwise(runs))
    for request in requests:
        count = sum(run.end - run.first for run in request)
        assert count >= 1
        assert size(request) <= most or count == 1
        assert len({run.part.part for run in request}) == len(request)


@given(parts=PARTS, slices=st.integers(1, 8))
def test_there_are_no_more_requests_than_wanted_and_none_is_much_larger(
    parts: list[tuple[int, int]], slices: int
) -> None:
    wanted = order(parts)
    requests = list(cut(wanted, 1 << 40, slices))
    assert len(requests) <= slices
    largest = max((nbytes for nbytes, _ in parts), default=0)
    assert all(size(request) < wanted.nbytes / slices + largest + 1 for request in requests)

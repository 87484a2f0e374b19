"""Rows, spans and what is refused."""

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.errors import InvalidRequest
from kvpool.transfer.memory import Memory
from kvpool.wire.frame import NO_ROW

SIZE = 64 * 16


def packed(rows: list[int]) -> bytes:
    return array("I", rows).tobytes()


@pytest.fixture(scope="module")
def memory() -> Memory:
    memory = Memory()
    memory.attach(1, bytearray(random.Random(0).randbytes(SIZE)))
    return memory


@given(rows=st.lists(st.integers(0, 63)), nbytes=st.integers(1, 16))
def test_spans_are_the_blocks_in_order(memory: Memory, rows: list[int], nbytes: int) -> None:
    spans = memory.spans(1, 16, nbytes, packed(rows))
    blocks = memory.blocks(1, 16, nbytes, packed(rows))
    assert b"".join(spans) == b"".join(blocks)
    assert len(blocks) == len(rows)
    assert len(spans) <= len(rows)


def test_neighbours_become_one_span(memory: Memory) -> None:
    assert [len(s) for s in memory.spans(1, 16, 16, packed([3, 4, 5, 9, 10, 10, 0]))] == [
        48,
        32,
        16,
        16,
    ]
    assert memory.spans(1, 16, 16, b"") == []


@pytest.mark.parametrize(
    ("segment", "stride", "nbytes", "rows"),
    [
        (2, 16, 16, [0]),
        (1, 16, 17, [0]),
        (1, 16, 0, [0]),
        (1, 16, -1, [0]),
        (1, 16, 16, [64]),
        (1, 16, 16, [0, NO_ROW]),
        (1, 17, 1, [60]),
    ],
)
def test_what_lies_outside_is_refused(
    memory: Memory, segment: int, stride: int, nbytes: int, rows: list[int]
) -> None:
    with pytest.raises(InvalidRequest):
        memory.check(segment, stride, nbytes, packed(rows))


def test_a_segment_is_attached_once(memory: Memory) -> None:
    with pytest.raises(InvalidRequest, match="attached already"):
        memory.attach(1, bytearray(16))


def test_gaps_are_left_out(memory: Memory) -> None:
    assert memory.present_rows(packed([NO_ROW, 3, NO_ROW, 1])) == (b"\0\1\0\1", packed([3, 1]))
    assert memory.present_rows(packed([2, 1])) == (b"\1\1", packed([2, 1]))
    assert memory.present_rows(b"") == (b"", b"")

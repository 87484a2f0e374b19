"""Gather and scatter between paged KV and slots, on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.engine_plugins.vllm.layout.pages import (
    RUN_BYTES_MIN,
    HostPages,
    chunks,
    spans,
    straight_runs,
)

BLOCKS, ROWS = 16, 24


@dataclass
class Slots:
    table: np.ndarray
    rows: np.ndarray
    nbytes: int


def paged(random: np.random.Generator, sizes: list[int], *, packed: bool) -> list[np.ndarray]:
    """Layers of random KV; packed: all layers of a block side by side, as views with gaps."""
    if packed:
        whole = random.integers(0, 256, (BLOCKS, sum(sizes)), np.uint8)
        return [whole[:, start:stop] for start, stop in spans(sizes)]
    return [random.integers(0, 256, (BLOCKS, size), np.uint8) for size in sizes]


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    slack=st.integers(0, 9),
    blocks=st.lists(st.integers(0, BLOCKS - 1), unique=True, min_size=1),
    straight=st.booleans(),
    chunk_bytes=st.integers(1, 400),
    packed=st.booleans(),
    run_bytes_min=st.sampled_from((1, 80, RUN_BYTES_MIN)),
    seed=st.integers(0, 99),
)
def test_blocks_come_back_as_they_were(
    sizes: list[int],
    slack: int,
    blocks: list[int],
    straight: bool,
    chunk_bytes: int,
    packed: bool,
    run_bytes_min: int,
    seed: int,
) -> None:
    random = np.random.default_rng(seed)
    source = paged(random, sizes, packed=packed)
    nbytes = sum(sizes)
    table = random.integers(0, 256, (ROWS, nbytes + slack), np.uint8)
    before = table.copy()
    rows = random.permutation(ROWS)[: len(blocks)].astype(np.int64)
    if straight:
        blocks, rows = list(range(len(blocks))), np.arange(ROWS - len(blocks), ROWS)
    slots = Slots(table, rows, nbytes)
    index = np.asarray(blocks, np.int64)

    HostPages(source, chunk_bytes, run_bytes_min=run_bytes_min).to_slots(index, slots, rows)
    for row, block in zip(rows, blocks, strict=True):
        expected = np.concatenate([layer[block] for layer in source])
        assert np.array_equal(table[row, :nbytes], expected)
    others = np.setdiff1d(np.arange(ROWS), rows)
    assert np.array_equal(table[others], before[others])
    assert np.array_equal(table[:, nbytes:], before[:, nbytes:])

    target = paged(np.random.default_rng(seed + 1), sizes, packed=packed)
    untouched = [layer.copy() for layer in target]
    HostPages(target, chunk_bytes, run_bytes_min=run_bytes_min).from_slots(slots, rows, index)
    for layer, was, filled in zip(source, untouched, target, strict=True):
        assert np.array_equal(filled[index], layer[index])
        rest = np.setdiff1d(np.arange(BLOCKS), index)
        assert np.array_equal(filled[rest], was[rest])


def test_runs_go_straight_across_when_they_are_long() -> None:
    def straight(source: list[int], target: list[int]) -> list[tuple[int, int, int]] | None:
        return straight_runs(np.asarray(source, np.int64), np.asarray(target, np.int64))

    up = list(range(10))
    assert straight(up, [row + 5 for row in up]) == [(0, 5, 10)]
    assert straight([*up, 20, 21, 22, 23, 24, 25], up + list(range(10, 16))) == [
        (0, 0, 10),
        (20, 10, 6),
    ]
    assert straight(up, up[::-1]) is None
    assert straight(up[:7], up[:7]) is None
    alone = np.array([3, 1]), np.array([7, 9])
    assert straight_runs(*alone, run_min=1) == [(3, 7, 1), (1, 9, 1)]
    assert straight_runs(*alone, run_min=2) is None
    assert straight([], []) is None


def test_slots_of_another_size_are_refused() -> None:
    pages = HostPages([np.zeros((4, 8), np.uint8)])
    slots = Slots(np.zeros((4, 16), np.uint8), np.arange(1), nbytes=16)
    with pytest.raises(AssertionError):
        pages.from_slots(slots, slots.rows, np.zeros(1, np.int64))


@given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 200))
def test_chunks_cover_each_row_once(count: int, row_bytes: int, chunk_bytes: int) -> None:
    rows = [row for chunk in chunks(count, row_bytes, chunk_bytes) for row in range(count)[chunk]]
    assert rows == list(range(count))
    most = max(chunk.stop - chunk.start for chunk in chunks(count, row_bytes, chunk_bytes))
    assert most == 1 or most * row_bytes <= chunk_bytes

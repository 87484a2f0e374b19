"""Byte views of an engine's paged KV, and the copies between them and the pool's slots.

A part (`shards.py`) is, for one block id, its bytes in each of the layers, one layer after the other. Where a rank
holds several parts of a block, its memory is seen as rows of one shard each, so that one copy moves them all. Copies
move many blocks a call: a call a block would take the interpreter lock back once a block, and beside one busy thread
each time costs a switch interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvpool.types import PARTS_MAX

Bytes = NDArray[np.uint8]
Index = NDArray[np.int64]

CHUNK_BYTES = 16 << 20

RUN_BLOCKS_MIN = 8
RUN_BYTES_MIN = 256 << 10
"""Runs of so many blocks, or bytes, on average are copied one by one: each is a call, after which the thread needs
the interpreter again."""


class SlotTable(Protocol):
    """Slots of one size in the pool's segment, as `kvpool.client.Slots` gives them."""

    @property
    def table(self) -> Any:
        """The segment as rows, of which each slot is one: an array."""

    @property
    def nbytes(self) -> int:
        """Bytes used of each row."""


class DeviceSlots(NamedTuple):
    """A `SlotTable` in the daemon's device memory, to be read only. table: a tensor on the engine's device."""

    table: Any
    nbytes: int


class Pages(Protocol):
    """The paged KV of some layers on one rank, in rows. nbytes: of one."""

    nbytes: int

    def to_slots(self, blocks: Index, slots: SlotTable, rows: Index, ready: Any) -> None:
        """Copy the rows `blocks` of the pages into the segment's `rows`; done when it returns.

        ready: an event on the engine's stream to wait for, or None where there are no streams.
        """

    def from_slots(self, slots: SlotTable, rows: Index, blocks: Index, ready: Any) -> None:
        """Copy the `rows` of the segment, or of device memory, into the rows `blocks`; done when it returns.

        ready: the same; behind it nothing of earlier steps touches the blocks.
        """


@dataclass(frozen=True)
class PartPages:
    """Where a rank holds one part of a group's blocks: block b is row `b * across + along` of `pages`.

    part: its number in the group, or in the namespace. Parts that lie in the same pages are copied together.
    """

    part: int
    pages: Pages
    across: int = 1
    along: int = 0

    def rows(self, blocks: Index) -> Index:
        return blocks * self.across + self.along


@dataclass(frozen=True)
class GroupPages:
    """What a rank holds of a cache group, for one thread's use.

    turn, turns: which of the ranks that hold the same it is, and how many they are: they share out the writing.
    """

    parts: Sequence[PartPages]
    turn: int = 0
    turns: int = 1

    @property
    def nbytes(self) -> int:
        """Of a block in its largest part."""
        return max(part.pages.nbytes for part in self.parts)

    def together(self, most: int = PARTS_MAX) -> Iterator[tuple[Pages, list[PartPages]]]:
        """The parts that lie in the same pages, and are of one size: about `most` at a time."""
        for pages, parts in groupby(self.parts, key=lambda part: part.pages):
            left = list(parts)
            while left:
                yield pages, left[: max(1, most)]
                del left[: max(1, most)]


@dataclass(frozen=True)
class ShardRows:
    """A layer's memory as rows of one shard each, in bytes; they may overlap.

    shape, strides: of the rows, which have as many dimensions as they have to; the last is dense. The first row
    begins where the tensor does. across, along: shard s of block b is row `b * across + s * along`.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    across: int
    along: int

    def of(self, tensor: Any) -> Any:
        """The rows of a torch tensor, over the same memory."""
        import torch

        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
            tensor.untyped_storage(),
            tensor.storage_offset() * tensor.element_size(),
            self.shape,
            self.strides,
        )


def shard_rows(
    shape: Sequence[int],
    strides: Sequence[int],
    item_bytes: int,
    *,
    blocks: int,
    shards: int,
    dense_heads: bool = False,
) -> ShardRows:
    """The rows of a layer whose heads are in `shards` shards: heads, then tokens, then content.

    shape, strides: logical (blocks or kernel blocks, heads, tokens, content), in elements, of any physical order.
    dense_heads: what a head has in a kernel block has to lie together, since its tokens cannot be told apart.
    Raises `ValueError` where bytes would not be told apart.
    """
    per_block, rest = divmod(shape[0], blocks)
    if rest or per_block == 0:
        raise ValueError(f"{shape[0]} rows of KV, but {blocks} blocks")
    heads, tokens, content = shape[1:]
    block, head, token, item = strides
    if item != 1 or heads % shards or (dense_heads and token != content):
        raise ValueError(f"{heads} heads in {shards} shards, with strides {tuple(strides)}")
    size = heads // shards
    blocks_apart, shards_apart = block * per_block * item_bytes, head * size * item_bytes
    step = math.gcd(blocks_apart, shards_apart) if shards > 1 else blocks_apart
    across, along = blocks_apart // step, shards_apart // step if shards > 1 else 0
    inner = [
        (size, head * item_bytes),
        (per_block, block * item_bytes),
        (tokens, token * item_bytes),
        (content * item_bytes, 1),
    ]
    lengths, apart = zip(*_merged(inner), strict=True)
    count = (blocks - 1) * across + (shards - 1) * along + 1
    return ShardRows((count, *lengths), (step, *apart), across, along)


def _merged(axes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Axes (length, stride), with those as one that lie densely in one another."""
    merged: list[tuple[int, int]] = []
    for length, stride in axes:
        if merged and merged[-1][1] == length * stride:
            merged[-1] = merged[-1][0] * length, stride
        elif length > 1 or stride == 1:
            merged.append((length, stride))
    return merged


def byte_rows(tensor: Any, num_blocks: int) -> Any:
    """A tensor of paged KV as uint8 rows, one a block, over the same memory.

    The engine's dimension 0 counts blocks or, where kernels use smaller ones, a fixed number of
    kernel blocks a block; either way a block's bytes lie together in every layout but those that
    put heads or layers outside of blocks, which are refused.
    """
    import torch

    per_block, rest = divmod(tensor.shape[0], num_blocks)
    if rest or per_block == 0:
        raise ValueError(f"{tensor.shape[0]} rows of KV, but {num_blocks} blocks")
    size = tensor.element_size()
    page = tensor[0].numel() * size
    span = 1 + sum(
        (length - 1) * stride
        for length, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True)
    )
    if span * size != page or (per_block > 1 and tensor.stride(0) * size != page):
        raise ValueError("the bytes of a block are not contiguous in this KV cache layout")
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        tensor.untyped_storage(),
        tensor.storage_offset() * size,
        (num_blocks, page * per_block),
        (tensor.stride(0) * size * per_block, 1),
    )


class HostPages:
    """Paged KV in host memory. Used by one thread at a time: it owns the scratch memory.

    layers: arrays of rows, (rows, bytes) or with more dimensions as in `ShardRows`.
    step: from a block's row to that of the next.
    """

    def __init__(
        self,
        layers: Sequence[Bytes],
        chunk_bytes: int = CHUNK_BYTES,
        *,
        step: int = 1,
        run_bytes_min: int = RUN_BYTES_MIN,
    ) -> None:
        self._layers = list(layers)
        self._bands = list(_bands(self._layers))
        self._step = step
        self.nbytes = self._bands[-1].stop
        enough = math.ceil(run_bytes_min * len(self._bands) / self.nbytes)
        self._run_min = min(RUN_BLOCKS_MIN, enough)
        self._chunk_bytes = chunk_bytes
        self._scratch: Bytes = np.empty(0, np.uint8)

    def to_slots(self, blocks: Index, slots: SlotTable, rows: Index, ready: Any = None) -> None:
        assert slots.nbytes == self.nbytes
        if (direct := straight_runs(blocks, rows, self._step, self._run_min)) is not None:
            for at, to, count in direct:
                for band in self._bands:
                    target = slots.table[to : to + count, band.start : band.stop]
                    band.shaped(target)[...] = band.run(at, count, self._step)
            return
        for chunk in self._chunks(len(blocks), self.nbytes):
            for band in self._bands:
                piece = self._take(band.rows, band.index(blocks[chunk]))
                slots.table[rows[chunk], band.start : band.stop] = piece.reshape(
                    len(blocks[chunk]), -1
                )

    def from_slots(self, slots: SlotTable, rows: Index, blocks: Index, ready: Any = None) -> None:
        assert slots.nbytes == self.nbytes
        table = np.asarray(slots.table)  # device memory is the host's here, and a tensor
        if (direct := straight_runs(blocks, rows, self._step, self._run_min)) is not None:
            for to, at, count in direct:
                for band in self._bands:
                    source = table[at : at + count, band.start : band.stop]
                    band.run(to, count, self._step)[...] = band.shaped(source)
            return
        for chunk in self._chunks(len(blocks), table.shape[1]):
            whole = self._take(table, rows[chunk])
            for band in self._bands:
                source = band.shaped(whole[:, band.start : band.stop])
                band.rows[band.index(blocks[chunk])] = source.reshape(-1, *band.rows.shape[1:])

    def _take(self, source: Bytes, index: Index) -> Bytes:
        """Rows of `source` in scratch memory that stays warm: fresh memory costs a page fault a
        page, several times the copy itself."""
        if not source.flags.c_contiguous:
            # `take` would first make the whole source contiguous.
            return source[index]
        shape = (len(index), source.shape[1])
        if self._scratch.size < shape[0] * shape[1]:
            self._scratch = np.empty(shape[0] * shape[1], np.uint8)
        out = self._scratch[: shape[0] * shape[1]].reshape(shape)
        return np.take(source, index, axis=0, out=out, mode="clip")

    def _chunks(self, count: int, row_bytes: int) -> Iterator[slice]:
        return chunks(count, row_bytes, self._chunk_bytes)


@dataclass(frozen=True)
class _Band:
    """Layers that lie evenly apart in one stretch of memory: a copy of them all is one call.

    rows: all of their rows. apart: the rows from a layer to the next. stack: (layers, rows of a layer, ...).
    start, stop: their bytes in a slot.
    """

    rows: Bytes
    apart: int
    stack: Bytes
    start: int
    stop: int

    def run(self, first: int, count: int, step: int) -> Bytes:
        """The rows of so many blocks that follow one another: a view (blocks, layers, ...)."""
        return self.stack[:, first : first + count * step : step].swapaxes(0, 1)

    def shaped(self, flat: Bytes) -> Bytes:
        """Dense bytes (blocks, bytes) as (blocks, layers, ...): a view."""
        return flat.reshape(len(flat), len(self.stack), *self.rows.shape[1:])

    def index(self, blocks: Index) -> Index:
        """The blocks' rows in all layers, block by block."""
        return (blocks[:, None] + self.apart * np.arange(len(self.stack))).reshape(-1)


def _bands(layers: Sequence[Bytes]) -> Iterator[_Band]:
    """Layers in their order, as many in one as possible."""
    start = first = 0
    while first < len(layers):
        one = layers[first]
        count, apart = 1, 0
        for before, layer in pairwise(layers[first:]):
            between, rest = divmod(layer.ctypes.data - before.ctypes.data, one.strides[0])
            even = not rest and between > 0 and between == (apart or between)
            if not even or (layer.shape, layer.strides) != (one.shape, one.strides):
                break
            count, apart = count + 1, between
        stop = start + count * math.prod(one.shape[1:])
        rows = as_strided(one, ((count - 1) * apart + len(one), *one.shape[1:]), one.strides)
        stack = as_strided(one, (count, *one.shape), (apart * one.strides[0], *one.strides))
        yield _Band(rows, apart, stack, start, stop)
        first, start = first + count, stop


def straight_runs(
    blocks: Index, rows: Index, step: int = 1, run_min: int = RUN_BLOCKS_MIN
) -> list[tuple[int, int, int]] | None:
    """Runs (block's row, row, count) in which the first goes up by `step` and the second by one; None where they
    are shorter than `run_min` on average.

    A run is copied straight across, once; anything else passes through scratch memory, twice.
    """
    breaks = np.flatnonzero((np.diff(blocks) != step) | (np.diff(rows) != 1)) + 1
    if (len(breaks) + 1) * run_min > len(blocks):
        return None
    starts = [0, *breaks.tolist()]
    ends = [*starts[1:], len(blocks)]
    return [
        (int(blocks[start]), int(rows[start]), end - start)
        for start, end in zip(starts, ends, strict=True)
    ]


def spans(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Start and end of each piece when pieces of these sizes lie one after the other."""
    start = 0
    for size in sizes:
        yield start, start + size
        start += size


def chunks(count: int, row_bytes: int, chunk_bytes: int) -> Iterator[slice]:
    """Cut `count` rows into runs of at most `chunk_bytes`, at least a row each."""
    step = max(1, chunk_bytes // row_bytes)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))

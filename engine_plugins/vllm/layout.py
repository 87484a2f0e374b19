"""Byte views of an engine's paged KV, and the copies between them and the pool's slots.

A part is, for one block id, the bytes of that block in each of the group's layers, one layer after
the other. Copies move many blocks a call: a call a block would take the interpreter lock back once
a block, and beside one busy thread each time costs a switch interval.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Index = NDArray[np.int64]

CHUNK_BYTES = 16 << 20

RUN_BLOCKS_MIN = 8
"""The mean length from which runs are copied one by one: fewer, larger calls are the point."""


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
    """The paged KV of one cache group on one rank."""

    nbytes: int

    def to_slots(self, blocks: Index, slots: SlotTable, rows: Index, ready: Any) -> None:
        """Copy the blocks `blocks` into the segment's `rows`; done when it returns.

        ready: an event on the engine's stream to wait for, or None where there are no streams.
        """

    def from_slots(self, slots: SlotTable, rows: Index, blocks: Index, ready: Any) -> None:
        """Copy the `rows` of the segment, or of device memory, into the blocks `blocks`; done when it returns.

        ready: the same; behind it nothing of earlier steps touches the blocks.
        """


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

    layers: arrays of shape (blocks, bytes of a block in that layer).
    """

    def __init__(self, layers: Sequence[Bytes], chunk_bytes: int = CHUNK_BYTES) -> None:
        self._layers = list(layers)
        self._spans = list(spans([layer.shape[1] for layer in layers]))
        self.nbytes = self._spans[-1][1]
        self._chunk_bytes = chunk_bytes
        self._scratch: Bytes = np.empty(0, np.uint8)

    def to_slots(self, blocks: Index, slots: SlotTable, rows: Index, ready: Any = None) -> None:
        assert slots.nbytes == self.nbytes
        if (direct := straight_runs(blocks, rows)) is not None:
            for at, to, count in direct:
                for layer, (start, stop) in zip(self._layers, self._spans, strict=True):
                    slots.table[to : to + count, start:stop] = layer[at : at + count]
            return
        for chunk in self._chunks(len(blocks), self.nbytes):
            for layer, (start, stop) in zip(self._layers, self._spans, strict=True):
                piece = self._take(layer, blocks[chunk])
                slots.table[rows[chunk], start:stop] = piece

    def from_slots(self, slots: SlotTable, rows: Index, blocks: Index, ready: Any = None) -> None:
        assert slots.nbytes == self.nbytes
        table = np.asarray(slots.table)  # device memory is the host's here, and a tensor
        if (direct := straight_runs(rows, blocks)) is not None:
            for at, to, count in direct:
                for layer, (start, stop) in zip(self._layers, self._spans, strict=True):
                    layer[to : to + count] = table[at : at + count, start:stop]
            return
        for chunk in self._chunks(len(blocks), table.shape[1]):
            whole = self._take(table, rows[chunk])
            for layer, (start, stop) in zip(self._layers, self._spans, strict=True):
                layer[blocks[chunk]] = whole[:, start:stop]

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


def straight_runs(source: Index, target: Index) -> list[tuple[int, int, int]] | None:
    """Runs (source, target, count) in which both go up one by one; None where they are short.

    A run is copied straight across, once; anything else passes through scratch memory, twice.
    """
    breaks = np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1
    if (len(breaks) + 1) * RUN_BLOCKS_MIN > len(source):
        return None
    starts = [0, *breaks.tolist()]
    ends = [*starts[1:], len(source)]
    return [
        (int(source[start]), int(target[start]), end - start)
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

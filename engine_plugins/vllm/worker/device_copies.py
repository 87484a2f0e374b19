"""How blocks are copied between paged KV on an accelerator and rows of a segment: the strategies.

`bench/gpu.py` measures them, beside others that are slower everywhere:

    kernel  one kernel reads and writes the segment over the bus by itself (`device_kernel.py`)
    staged  blocks pass through a staging tensor on the device, gathered and scattered there by one kernel
            a layer, and cross the bus in one copy for each slot, or run of slots that lie together

What lies in the daemon's memory on the same device is read there, and crosses no bus: by the same kernel, or
gathered into the staging tensor by one more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np

from kvpool.engine_plugins.vllm.layout.pages import Index, chunks, spans

WORD = 8
PIN_SLICE = 1 << 30
"""The pool's memory is registered with the driver in slices, which end at multiples of so many bytes."""


class Paged:
    """The layers of one group, as the strategies see them.

    layers: tensors of rows as in `ShardRows`, in units; spans: where each lies in a slot, in
    units. A unit is eight bytes where sizes allow it: indexing kernels move elements, however small.
    """

    def __init__(self, layers: Sequence[Any], chunk_bytes: int) -> None:
        import torch

        sizes = [math.prod(layer.shape[1:]) for layer in layers]
        wide = all(
            length % WORD == 0
            for layer in layers
            for length in (layer.shape[-1], *map(layer.stride, range(len(layer.shape) - 1)))
        )
        self.unit = WORD if wide else 1
        self.dtype = torch.int64 if wide else torch.uint8
        self.layers = [layer.view(self.dtype) for layer in layers]
        self.spans = [(start // self.unit, stop // self.unit) for start, stop in spans(sizes)]
        self.nbytes = sum(sizes)
        self.device = layers[0].device
        self._chunk_bytes = chunk_bytes
        self._staging: Any = None

    def chunks(self, count: int) -> Iterator[slice]:
        """Cut so many blocks into runs that the staging memory has room for."""
        return chunks(count, self.nbytes, self._chunk_bytes)

    def staging(self, rows: int) -> Any:
        """Memory on the device, made on first use so that an engine which never saves pays nothing.

        One stream orders its users, so the next chunk may reuse it at once.
        """
        import torch

        if self._staging is None:
            shape = (max(1, self._chunk_bytes // self.nbytes), self.spans[-1][1])
            self._staging = torch.empty(shape, dtype=self.dtype, device=self.device)
        return self._staging[:rows]

    @cached_property
    def places(self) -> Any:
        """On the device, for each stretch of each layer: a `Place`, as numbers."""
        import torch

        return torch.tensor(self.stretches, dtype=torch.int64).to(self.device)

    @cached_property
    def stretches(self) -> list[Place]:
        """All layers, in the order of a slot."""
        unit_bytes = self.unit
        return [
            Place(
                layer.data_ptr() + offset * unit_bytes, layer.stride(0), at, run, jump, count * run
            )
            for layer, (start, _) in zip(self.layers, self.spans, strict=True)
            for at, (offset, count, jump, run) in _stretches(
                start, layer.shape[1:], layer.stride()[1:]
            )
        ]

    def shaped(self, flat: Any, layer: Any) -> Any:
        """Dense units as the rows of a layer are shaped: a view."""
        return flat.unflatten(1, layer.shape[1:]) if len(layer.shape) > 2 else flat

    def index(self, numbers: Index) -> Any:
        """The same on the device. Copied when this returns: the numbers may go."""
        import torch

        return torch.from_numpy(np.ascontiguousarray(numbers)).to(self.device)


class Place(NamedTuple):
    """Units of a row of a layer that lie in a slot one after the other: pieces of `run`, `jump` from one to the next.

    address: in the layer's first row. stride: from row to row. start: in a slot. units: all of them.
    """

    address: int
    stride: int
    start: int
    run: int
    jump: int
    units: int


def _stretches(
    start: int, lengths: Sequence[int], strides: Sequence[int]
) -> Iterator[tuple[int, tuple[int, int, int, int]]]:
    """Where each stretch of a row begins in a slot, and its offset, pieces, jump and run: the last two axes."""
    run = lengths[-1]
    count, jump = (lengths[-2], strides[-2]) if len(lengths) > 1 else (1, run)
    outer = [range(length) for length in lengths[:-2]]
    for number, index in enumerate(product(*outer)):
        offset = sum(at * stride for at, stride in zip(index, strides, strict=False))
        yield start + number * count * run, (offset, count, jump, run)


Copy = Callable[[Paged, Index, Any, Index], None]
"""Copies between blocks of the layers and as many rows of a segment (a uint8 tensor, pinned or on the device).

On the current stream, without waiting.
"""


def _store_staged(paged: Paged, blocks: Index, segment: Any, rows: Index) -> None:
    index = paged.index(blocks)
    for chunk in paged.chunks(len(blocks)):
        staging = paged.staging(len(blocks[chunk]))
        for layer, (start, stop) in zip(paged.layers, paged.spans, strict=True):
            paged.shaped(staging[:, start:stop], layer)[...] = layer[index[chunk]]
        for device, host in _runs(paged, staging, segment, rows[chunk]):
            host.copy_(device, non_blocking=True)


def _load_staged(paged: Paged, blocks: Index, segment: Any, rows: Index) -> None:
    index = paged.index(blocks)
    for chunk in paged.chunks(len(blocks)):
        staging = paged.staging(len(blocks[chunk]))
        for device, host in _runs(paged, staging, segment, rows[chunk]):
            device.copy_(host, non_blocking=True)
        for layer, (start, stop) in zip(paged.layers, paged.spans, strict=True):
            layer[index[chunk]] = paged.shaped(staging[:, start:stop], layer)


def _runs(paged: Paged, staging: Any, segment: Any, rows: Index) -> Iterator[tuple[Any, Any]]:
    """Staged blocks and their rows, those together that lie together.

    Only where slots have no gaps between them: torch copies what is strided through memory of its own.
    """
    import torch

    staged = staging.view(torch.uint8)
    gaps = segment.shape[1] != paged.nbytes
    breaks = np.arange(1, len(rows)) if gaps else np.flatnonzero(np.diff(rows) != 1) + 1
    edges = [0, *breaks.tolist(), len(rows)]
    for at, end in pairwise(edges):
        row = int(rows[at])
        if gaps:
            yield from _pieces(staged[at], segment[row, : paged.nbytes])
        else:
            host = segment[row : row + end - at]
            yield from _pieces(staged[at:end].view(-1), host.view(-1))


def _pieces(device: Any, host: Any) -> Iterator[tuple[Any, Any]]:
    """Cut where slices meet: the driver refuses a copy of memory that was registered in two."""
    address, size, at = host.data_ptr(), host.numel(), 0
    while at < size:
        end = min(size, at + PIN_SLICE - (address + at) % PIN_SLICE)
        yield device[at:end], host[at:end]
        at = end


def _load_near(paged: Paged, blocks: Index, segment: Any, rows: Index) -> None:
    import torch

    index, source = paged.index(blocks), paged.index(rows)
    units = segment.view(paged.dtype)[:, : paged.spans[-1][1]]
    for chunk in paged.chunks(len(blocks)):
        staging = paged.staging(len(blocks[chunk]))
        torch.index_select(units, 0, source[chunk], out=staging)
        for layer, (start, stop) in zip(paged.layers, paged.spans, strict=True):
            layer[index[chunk]] = paged.shaped(staging[:, start:stop], layer)


class Strategy(NamedTuple):
    """One way to move blocks. near: to load them from rows of memory on the same device."""

    store: Copy
    load: Copy
    near: Copy = _load_near


STAGED = Strategy(_store_staged, _load_staged)

"""Copies between paged KV on an accelerator and the pool's slots, beside the engine's own stream.

How the bytes go is a `Strategy`, and `bench/gpu.py` measures all of them; all write into and read from the
pool's segment itself, which is registered with the driver once so that the copies are DMA:

    each    one copy for each block of each layer
    staged  blocks pass through a staging tensor on the device, gathered and scattered there by one kernel
            a layer, and cross the bus in one copy for each slot, or run of slots that lie together
    batch   the copies of `each`, given to the driver in one call (vLLM's `swap_blocks_batch`)
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from kvpool.engine_plugins.vllm.layout import CHUNK_BYTES, Index, SlotTable, chunks, spans
from kvpool.errors import SegmentError

WORD = 8


class PinnedSegments:
    """The pool's segments as torch tensors, registered with the CUDA driver at first sight.

    Shared by a worker's threads. A segment stays registered until `close`: its mapping lives as
    long as the client does, and registering costs a walk over every page.
    """

    def __init__(self, device: Any) -> None:
        self._register = device.type == "cuda"
        self._lock = threading.Lock()
        self._tensors: dict[tuple[int, int, int], Any] = {}
        self._pinned: dict[int, int] = {}

    def tensor(self, table: Any) -> Any:
        """The rows of `table` as a tensor over the same memory. Raises `SegmentError`."""
        import torch

        address, size = table.ctypes.data, table.nbytes
        key = (address, *table.shape)
        with self._lock:
            if key not in self._tensors:
                if self._register and self._pinned.get(address, 0) < size:
                    self._pin(address, size)
                memory = (ctypes.c_ubyte * size).from_address(address)
                flat = torch.frombuffer(memory, dtype=torch.uint8)
                self._tensors[key] = flat.view(*table.shape)
            return self._tensors[key]

    def _pin(self, address: int, size: int) -> None:
        import torch

        runtime = torch.cuda.cudart()
        if address in self._pinned:
            runtime.cudaHostUnregister(address)
        code = int(runtime.cudaHostRegister(address, size, 0))
        if code:
            raise SegmentError(
                f"the CUDA driver refused to register {size} bytes of the pool's segment "
                f"(cudaHostRegister: {code}): raise the limit on locked memory (ulimit -l)"
            )
        self._pinned[address] = size

    def close(self) -> None:
        """Unregister everything. Call before the client unmaps its segments."""
        import torch

        with self._lock:
            for address in self._pinned:
                torch.cuda.cudart().cudaHostUnregister(address)
            self._pinned.clear()
            self._tensors.clear()


class Paged:
    """The layers of one group, as the strategies see them.

    layers: tensors of shape (blocks, units of a block in that layer); spans: where each lies in a slot, in
    units. A unit is eight bytes where sizes allow it: indexing kernels move elements, however small.
    """

    def __init__(self, layers: Sequence[Any], chunk_bytes: int) -> None:
        import torch

        sizes = [layer.shape[1] for layer in layers]
        wide = all(
            size % WORD == 0 and layer.stride(0) % WORD == 0
            for size, layer in zip(sizes, layers, strict=True)
        )
        self.unit = WORD if wide else 1
        self._dtype = torch.int64 if wide else torch.uint8
        self.layers = [layer.view(self._dtype) for layer in layers]
        self.spans = [(start // self.unit, stop // self.unit) for start, stop in spans(sizes)]
        self.nbytes = sum(sizes)
        self.device = layers[0].device
        self._rows_max = max(1, chunk_bytes // self.nbytes)
        self._staging: Any = None

    def staging(self, rows: int) -> Any:
        """Memory on the device, made on first use so that an engine which never saves pays nothing.

        One stream orders its users, so the next chunk may reuse it at once.
        """
        import torch

        if self._staging is None:
            shape = (self._rows_max, self.spans[-1][1])
            self._staging = torch.empty(shape, dtype=self._dtype, device=self.device)
        return self._staging[:rows]

    def index(self, blocks: Index) -> Any:
        import torch

        return torch.from_numpy(np.ascontiguousarray(blocks)).to(self.device)


Copy = Callable[[Paged, Index, Any, Index], None]
"""Copies between blocks of the layers and as many rows of a segment (a pinned uint8 tensor).

On the current stream, without waiting. The blocks are no more than the staging memory has rows.
"""


class Strategy(NamedTuple):
    """One way to move blocks."""

    store: Copy
    load: Copy


def _store_each(paged: Paged, blocks: Index, segment: Any, rows: Index) -> None:
    for device, host in _pairs(paged, blocks, segment, rows):
        host.copy_(device, non_blocking=True)


def _load_each(paged: Paged, blocks: Index, segment: Any, rows: Index) -> None:
    for device, host in _pairs(paged, blocks, segment, rows):
        device.copy_(host, non_blocking=True)


def _pairs(paged: Paged, blocks: Index, segment: Any, rows: Index) -> Iterator[tuple[Any, Any]]:
    """The bytes of each block in each layer, on the device and in the segment."""
    import torch

    for layer, (start, stop) in zip(paged.layers, paged.spans, strict=True):
        there = slice(start * paged.unit, stop * paged.unit)
        for block, row in zip(blocks.tolist(), rows.tolist(), strict=True):
            yield layer[block].view(torch.uint8), segment[row, there]


def _store_staged(paged: Paged, blocks: Index, segment: Any, rows: Index) -> None:
    index, staging = paged.index(blocks), paged.staging(len(blocks))
    for layer, (start, stop) in zip(paged.layers, paged.spans, strict=True):
        staging[:, start:stop] = layer[index]
    for device, host in _runs(paged, staging, segment, rows):
        host.copy_(device, non_blocking=True)


def _load_staged(paged: Paged, blocks: Index, segment: Any, rows: Index) -> None:
    index, staging = paged.index(blocks), paged.staging(len(blocks))
    for device, host in _runs(paged, staging, segment, rows):
        device.copy_(host, non_blocking=True)
    for layer, (start, stop) in zip(paged.layers, paged.spans, strict=True):
        layer[index] = staging[:, start:stop]


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
            yield staged[at], segment[row, : paged.nbytes]
        else:
            yield staged[at:end], segment[row : row + end - at]


def _store_batch(paged: Paged, blocks: Index, segment: Any, rows: Index) -> None:
    device, host, sizes = _addresses(paged, blocks, segment, rows)
    _driver_batch()(device, host, sizes, False)


def _load_batch(paged: Paged, blocks: Index, segment: Any, rows: Index) -> None:
    device, host, sizes = _addresses(paged, blocks, segment, rows)
    _driver_batch()(host, device, sizes, False)


def _addresses(paged: Paged, blocks: Index, segment: Any, rows: Index) -> tuple[Any, Any, Any]:
    """Where each block of each layer is on the device and in the segment, and its bytes."""
    import torch

    unit = paged.unit
    slots = segment.data_ptr() + rows * segment.stride(0)
    device = [layer.data_ptr() + blocks * (layer.stride(0) * unit) for layer in paged.layers]
    host = [slots + start * unit for start, _ in paged.spans]
    sizes = [np.full(len(blocks), (stop - start) * unit) for start, stop in paged.spans]
    return (
        torch.from_numpy(np.concatenate(device)),
        torch.from_numpy(np.concatenate(host)),
        torch.from_numpy(np.concatenate(sizes)),
    )


def _driver_batch() -> Any:
    """vLLM's operator; it is in its builds for accelerators once `vllm._custom_ops` was imported."""
    import torch

    return torch.ops._C_cache_ops.swap_blocks_batch


EACH = Strategy(_store_each, _load_each)
STAGED = Strategy(_store_staged, _load_staged)
BATCH = Strategy(_store_batch, _load_batch)


class DevicePages:
    """Paged KV of one group in device memory. Used by one thread at a time, which owns the stream.

    layers: uint8 tensors of shape (blocks, bytes of a block in that layer).
    """

    def __init__(
        self,
        layers: Sequence[Any],
        segments: PinnedSegments,
        chunk_bytes: int = CHUNK_BYTES,
        strategy: Strategy = STAGED,
    ) -> None:
        import torch

        self._paged = Paged(layers, chunk_bytes)
        self.nbytes = self._paged.nbytes
        self._module = torch.get_device_module(self._paged.device)
        self._stream = self._module.Stream()
        self._segments = segments
        self._chunk_bytes = chunk_bytes
        self._strategy = strategy

    def to_slots(self, blocks: Index, slots: SlotTable, rows: Index, ready: Any = None) -> None:
        self._copy(self._strategy.store, blocks, slots, rows, ready)

    def from_slots(self, slots: SlotTable, rows: Index, blocks: Index, ready: Any = None) -> None:
        self._copy(self._strategy.load, blocks, slots, rows, ready)

    def _copy(self, copy: Copy, blocks: Index, slots: SlotTable, rows: Index, ready: Any) -> None:
        segment = self._segments.tensor(slots.table)
        with self._module.stream(self._stream):
            if ready is not None:
                ready.wait(self._stream)
            for chunk in chunks(len(blocks), self.nbytes, self._chunk_bytes):
                copy(self._paged, blocks[chunk], segment, rows[chunk])
        self._wait()

    def _wait(self) -> None:
        """Wait for this copy alone, not for the engine's own work on the device."""
        event = self._module.Event()
        event.record(self._stream)
        event.synchronize()

"""Copies between paged KV on an accelerator and the pool's slots, beside the engine's own stream.

Blocks pass through a staging tensor on the device, gathered and scattered there by one kernel a
layer, and cross the bus a slot at a time, straight out of and into the pool's segment, which is
registered with the driver once so that the copies are DMA.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

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


class DevicePages:
    """Paged KV of one group in device memory. Used by one thread at a time, which owns the stream.

    layers: uint8 tensors of shape (blocks, bytes of a block in that layer).
    """

    def __init__(
        self, layers: Sequence[Any], segments: PinnedSegments, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        import torch

        sizes = [layer.shape[1] for layer in layers]
        wide = all(
            size % WORD == 0 and layer.stride(0) % WORD == 0
            for size, layer in zip(sizes, layers, strict=True)
        )
        # Eight bytes a lane: indexing kernels move elements, however small.
        self._dtype = torch.int64 if wide else torch.uint8
        unit = WORD if wide else 1
        self._layers = [layer.view(self._dtype) for layer in layers]
        self._spans = [(start // unit, stop // unit) for start, stop in spans(sizes)]
        self.nbytes = sum(sizes)
        self._device = layers[0].device
        self._module = torch.get_device_module(self._device)
        self._stream = self._module.Stream()
        self._segments = segments
        self._rows_max = max(1, chunk_bytes // self.nbytes)
        self._chunk_bytes = chunk_bytes
        self._staging: Any = None

    def to_slots(self, blocks: Index, slots: SlotTable, rows: Index, ready: Any = None) -> None:
        segment = self._segments.tensor(slots.table)
        with self._module.stream(self._stream):
            if ready is not None:
                ready.wait(self._stream)
            for chunk in chunks(len(blocks), self.nbytes, self._chunk_bytes):
                index = self._index(blocks[chunk])
                staging = self._staged(len(index))
                for layer, (start, stop) in zip(self._layers, self._spans, strict=True):
                    staging[:, start:stop] = layer[index]
                for row, piece in zip(rows[chunk].tolist(), self._bytes(staging), strict=True):
                    segment[row, : self.nbytes].copy_(piece, non_blocking=True)
        self._wait()

    def from_slots(self, slots: SlotTable, rows: Index, blocks: Index, ready: Any = None) -> None:
        segment = self._segments.tensor(slots.table)
        with self._module.stream(self._stream):
            if ready is not None:
                ready.wait(self._stream)
            for chunk in chunks(len(blocks), self.nbytes, self._chunk_bytes):
                index = self._index(blocks[chunk])
                staging = self._staged(len(index))
                for row, piece in zip(rows[chunk].tolist(), self._bytes(staging), strict=True):
                    piece.copy_(segment[row, : self.nbytes], non_blocking=True)
                for layer, (start, stop) in zip(self._layers, self._spans, strict=True):
                    layer[index] = staging[:, start:stop]
        self._wait()

    def _wait(self) -> None:
        """Wait for this copy alone, not for the engine's own work on the device."""
        event = self._module.Event()
        event.record(self._stream)
        event.synchronize()

    def _staged(self, rows: int) -> Any:
        """Staging memory, made on first use so that an engine which never saves pays nothing.

        One stream orders its users, so the next chunk may reuse it at once.
        """
        import torch

        if self._staging is None:
            shape = (self._rows_max, self._spans[-1][1])
            self._staging = torch.empty(shape, dtype=self._dtype, device=self._device)
        return self._staging[:rows]

    def _bytes(self, staging: Any) -> Any:
        import torch

        return staging.view(torch.uint8)

    def _index(self, blocks: Index) -> Any:
        import torch

        return torch.from_numpy(np.ascontiguousarray(blocks)).to(self._device)

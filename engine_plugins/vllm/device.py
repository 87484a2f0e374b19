"""Copies between paged KV on an accelerator and the pool's slots, beside the engine's own stream.

They write into and read from the pool's segment itself, which is registered with the driver once. How the bytes
go is a `Strategy` (`device_copies.py`).
"""

from __future__ import annotations

import ctypes
import importlib.util
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvpool.engine_plugins.vllm.device_copies import STAGED, Copy, Paged, Strategy
from kvpool.engine_plugins.vllm.layout import CHUNK_BYTES, Index, SlotTable
from kvpool.errors import SegmentError
from kvpool.memory.device_stream import finished_stream


class _Mapping:
    """One segment as it is mapped here: all of it, in one array, which is only looked at. users: copies under way."""

    def __init__(self, whole: np.ndarray, gone: Callable[[Any], None]) -> None:
        self.whole = weakref.ref(whole, gone)
        self.address, self.nbytes = whole.ctypes.data, whole.nbytes
        self.users = 0
        self._tensors: dict[tuple[int, ...], Any] = {}

    def tensor(self, table: np.ndarray) -> Any:
        """Rows of it as a tensor over the same memory."""
        import torch

        key = (table.ctypes.data, *table.shape)
        if key not in self._tensors:
            memory = (ctypes.c_ubyte * table.nbytes).from_address(table.ctypes.data)
            flat = torch.frombuffer(memory, dtype=torch.uint8)
            self._tensors[key] = flat.view(*table.shape)
        return self._tensors[key]


class PinnedSegments:
    """The pool's segments as torch tensors, registered with the CUDA driver as a whole at first sight.

    Shared by a worker's threads. Registering costs a walk over every page, so a segment stays registered. A
    daemon that was restarted has another one, often at the very address of the old one: that is given up when
    the last copy in it has ended, since its memory is not free before. Nothing here keeps a segment mapped: when
    the client lets go of a dead daemon's, it is unregistered just before it is unmapped.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._register = device.type == "cuda"
        # Reentrant: a segment may be let go of by any line of any thread, this one's included.
        self._lock = threading.RLock()
        self._mappings: list[_Mapping] = []  # the newest last

    def tensor(self, table: np.ndarray) -> Any:
        """The rows of `table` as a tensor, as long as the table lives and no other segment is used. Raises
        `SegmentError`.
        """
        with self._lock:
            return self._of(table).tensor(table)

    @contextmanager
    def using(self, table: np.ndarray) -> Iterator[Any]:
        """The same, for certain until the end of the block: what was begun in it must have ended."""
        with self._lock:
            mapping = self._of(table)
            mapping.users += 1
        try:
            yield mapping.tensor(table)
        finally:
            with self._lock:
                mapping.users -= 1
                self._give_up_old()

    def _of(self, table: np.ndarray) -> _Mapping:
        # A view's base is the array of the whole: numpy keeps no chains of views.
        whole = table.base if isinstance(table.base, np.ndarray) else table
        for mapping in self._mappings:
            if mapping.whole() is whole:
                return mapping
        if self._register:
            self._pin(whole)
        self._mappings.append(_Mapping(whole, self._gone))
        self._give_up_old()
        return self._mappings[-1]

    def _gone(self, whole: Any) -> None:
        """Nobody refers to this array any more. Its memory is unmapped next."""
        with self._lock:
            for mapping in [mapping for mapping in self._mappings if mapping.whole is whole]:
                self._give_up(mapping)

    def _give_up_old(self) -> None:
        for mapping in self._mappings[:-1]:
            if not mapping.users:
                self._give_up(mapping)

    def _give_up(self, mapping: _Mapping) -> None:
        if mapping in self._mappings:
            self._mappings.remove(mapping)
            self._unpin(mapping.address, mapping.nbytes)

    @staticmethod
    def _pin(whole: np.ndarray) -> None:
        import torch

        address, size = whole.ctypes.data, whole.nbytes
        code = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))
        if code:
            _forget_error()
            raise SegmentError(
                f"the CUDA driver refused to register {size} bytes of the pool's segment "
                f"(cudaHostRegister: {code}): raise the limit on locked memory (ulimit -l)"
            )

    def _unpin(self, address: int, nbytes: int) -> None:
        import torch

        if self._register:
            # Maybe in a thread that has used no device yet, and must not begin with another one.
            with torch.cuda.device(self._device):
                torch.cuda.cudart().cudaHostUnregister(address)

    def close(self) -> None:
        """Unregister everything. Call before the client unmaps its segments."""
        with self._lock:
            for mapping in list(self._mappings):
                self._give_up(mapping)


def _forget_error() -> None:
    """The CUDA runtime shows an error once more to the thread's next kernel, which would fail for it."""
    import torch

    try:
        torch.ones(1, device="cuda")
    except RuntimeError:
        pass  # that was it


def strategy_for(device: Any) -> Strategy:
    """The fastest that can be had: the kernel where there is triton for the device, as with vLLM on CUDA."""
    import torch

    if device.type == "cuda" and torch.version.cuda and importlib.util.find_spec("triton"):
        from kvpool.engine_plugins.vllm.device_kernel import KERNEL

        return KERNEL
    return STAGED


class DevicePages:
    """Paged KV of one group in device memory. Used by one thread at a time, which owns the stream.

    No copy is under way any more when `to_slots` or `from_slots` returns or raises.

    layers: uint8 tensors of rows, as in `ShardRows`. chunk_bytes: of staging memory,
    where the strategy uses some. strategy: None for the best one.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        segments: PinnedSegments,
        chunk_bytes: int = CHUNK_BYTES,
        strategy: Strategy | None = None,
    ) -> None:
        import torch

        self._paged = Paged(layers, chunk_bytes)
        self.nbytes = self._paged.nbytes
        self._module = torch.get_device_module(self._paged.device)
        self._stream = self._module.Stream()
        self._segments = segments
        self._strategy = strategy or strategy_for(self._paged.device)

    def to_slots(self, blocks: Index, slots: SlotTable, rows: Index, ready: Any = None) -> None:
        with self._segments.using(slots.table) as segment:
            self._copy(self._strategy.store, blocks, segment, rows, ready)

    def from_slots(self, slots: SlotTable, rows: Index, blocks: Index, ready: Any = None) -> None:
        if isinstance(slots.table, np.ndarray):
            with self._segments.using(slots.table) as segment:
                self._copy(self._strategy.load, blocks, segment, rows, ready)
        else:
            self._copy(self._strategy.near, blocks, slots.table, rows, ready)

    def _copy(self, copy: Copy, blocks: Index, segment: Any, rows: Index, ready: Any) -> None:
        with finished_stream(self._module, self._stream):
            if ready is not None:
                ready.wait(self._stream)
            copy(self._paged, blocks, segment, rows)

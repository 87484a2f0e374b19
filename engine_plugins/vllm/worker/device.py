"""Copies between paged KV on an accelerator and the pool's slots, beside the engine's own stream.

They write into and read from the pool's segment itself, which is registered with the driver once. How the bytes
go is a `Strategy` (`device_copies.py`).
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvpool.engine_plugins.vllm.layout.pages import CHUNK_BYTES, Index, SlotTable
from kvpool.engine_plugins.vllm.worker.device_copies import PIN_SLICE, STAGED, Copy, Paged, Strategy
from kvpool.errors import SegmentError
from kvpool.memory.device_stream import finished_stream

log = logging.getLogger("kvpool.vllm")


class _Mapping:
    """One segment as it is mapped here: all of it, in one array, which is only looked at. users: copies under way."""

    def __init__(self, whole: np.ndarray, gone: Callable[[Any], None]) -> None:
        self.whole = weakref.ref(whole, gone)
        self.slices: list[int] = []  # addresses of those that are registered
        self.registering: Future[None] | None = None
        self.given_up = False
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

    Shared by a worker's threads. Registering costs a walk over every page, tens of milliseconds a gigabyte: it goes
    slice by slice, in a thread if one is given, and until it has ended nothing is copied. A segment stays registered. A
    daemon that was restarted has another one, often at the very address of the old one: that is given up when
    the last copy in it has ended, since its memory is not free before. Nothing here keeps a segment mapped: when
    the client lets go of a dead daemon's, it is unregistered just before it is unmapped.
    """

    def __init__(self, device: Any, thread: Executor | None = None) -> None:
        self._device = device
        self._thread = thread
        self._refused = False  # that it was is logged
        self._register = device.type == "cuda"
        # Reentrant: a segment may be let go of by any line of any thread, this one's included.
        self._lock = threading.RLock()
        self._mappings: list[_Mapping] = []  # the newest last

    def tensor(self, table: np.ndarray) -> Any:
        """The rows of `table` as a tensor, as long as the table lives and no other segment is used. Raises
        `SegmentError`, also while the segment is being registered.
        """
        with self._lock:
            return self._registered(table).tensor(table)

    def begin(self, table: np.ndarray) -> None:
        """Have the segment of this table registered, if it is not. Raises `SegmentError` only without a thread."""
        with self._lock:
            self._of(table)

    @property
    def ready(self) -> bool:
        """Whether copies may use the newest segment."""
        with self._lock:
            newest = self._mappings[-1].registering if self._mappings else None
            return newest is None or newest.done()

    @contextmanager
    def using(self, table: np.ndarray) -> Iterator[Any]:
        """The same, for certain until the end of the block: what was begun in it must have ended."""
        with self._lock:
            mapping = self._registered(table)
            mapping.users += 1
        try:
            yield mapping.tensor(table)
        finally:
            with self._lock:
                mapping.users -= 1
                self._give_up_old()

    def _registered(self, table: np.ndarray) -> _Mapping:
        mapping = self._of(table)
        if mapping.registering is not None:
            if not mapping.registering.done():
                raise SegmentError("the pool's segment is still being registered with the driver")
            if mapping.registering.exception() is not None:
                self._mappings.remove(mapping)  # the next one tries again
            mapping.registering.result()
        return mapping

    def _of(self, table: np.ndarray) -> _Mapping:
        # A view's base is the array of the whole: numpy keeps no chains of views.
        whole = table.base if isinstance(table.base, np.ndarray) else table
        for mapping in self._mappings:
            if mapping.whole() is whole:
                return mapping
        mapping = _Mapping(whole, self._gone)
        if self._register and self._thread is None:
            self._pin_all(mapping, whole)
        elif self._register and self._thread is not None:
            mapping.registering = self._thread.submit(self._pin_all, mapping, whole)
        self._mappings.append(mapping)
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
        mapping.given_up = True
        if mapping in self._mappings:
            self._mappings.remove(mapping)
        self._unpin_all(mapping)

    def _unpin_all(self, mapping: _Mapping) -> None:
        while mapping.slices:
            self._unpin(mapping.slices.pop())

    def _pin_all(self, mapping: _Mapping, whole: np.ndarray) -> None:
        """Slice by slice: the driver lets nobody else of the process in during each."""
        address = whole.ctypes.data
        end = address + whole.nbytes
        try:
            while address < end and not mapping.given_up:
                size = min(end, address - address % PIN_SLICE + PIN_SLICE) - address
                self._pin(address, size)
                with self._lock:
                    mapping.slices.append(address)
                address += size
        except SegmentError as error:
            mapping.given_up = True
            if not self._refused:
                self._refused = True
                log.warning("the pool is not used until this is mended: %s", error)
            raise
        finally:
            with self._lock:
                if mapping.given_up:
                    self._unpin_all(mapping)

    @staticmethod
    def _pin(address: int, size: int) -> None:
        import torch

        code = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))
        if code:
            _forget_error()
            raise SegmentError(
                f"the CUDA driver refused to register {size} bytes of the pool's segment "
                f"(cudaHostRegister: {code}): raise the limit on locked memory (ulimit -l)"
            )

    def _unpin(self, address: int) -> None:
        import torch

        # Maybe in a thread that has used no device yet, and must not begin with another one.
        with torch.cuda.device(self._device):
            torch.cuda.cudart().cudaHostUnregister(address)

    def close(self) -> None:
        """Unregister everything. Call before the client unmaps its segments. Waits for a slice that is registered."""
        with self._lock:
            for mapping in list(self._mappings):
                self._give_up(mapping)
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)


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
        from kvpool.engine_plugins.vllm.worker.device_kernel import KERNEL

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

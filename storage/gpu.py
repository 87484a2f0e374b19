"""A segment of spare device memory: owned by the daemon's side, mapped by engines of the same host.

Rows of one size in one allocation. An engine on the same device attaches to it and copies to and from its
own cache without leaving the device; for everybody else bytes pass through host memory, gathered on the
device first so that they cross the bus in few large copies.

The owner exports a handle for each engine. On a CUDA device that is what torch makes for sharing tensors
between processes (CUDA IPC); on the CPU device, which serves tests and machines without an accelerator, the
owner's process and descriptor of a sealed memfd. A handle is good for one `attach`, on the same host, while
the owner lives. What else is allocated by the owner's process may share the memory that a CUDA handle opens:
give handles to engines that are trusted with it, and keep nothing else on the device there.

Needs torch, which is imported where a segment is made.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvpool.errors import InvalidRequest, SegmentError
from kvpool.segment import Segment
from kvpool.storage.dram import PAGE, DramSegment

Index = NDArray[np.int64]

STAGING_BYTES = 16 << 20
"""Of device memory, while rows are copied to or from the host."""


class _CudaHandle(msgspec.Struct, tag="cuda", array_like=True):
    """The arguments of torch's `rebuild_cuda_tensor` that are not the same for every segment."""

    rows: int
    stride: int
    device: int
    memory: bytes
    storage_bytes: int
    storage_offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_needed: bool


class _CpuHandle(msgspec.Struct, tag="cpu", array_like=True):
    rows: int
    stride: int
    pid: int
    fd: int
    inode: int  # of the memfd: the number of a closed descriptor is soon another's
    size: int


_handles = msgspec.msgpack.Decoder(_CudaHandle | _CpuHandle)


class DeviceSegment:
    """Rows of device memory. Used by one thread at a time; attached segments have users of their own.

    table: the rows, a uint8 tensor of shape (rows, stride). Not to be used after `close`. Who may write
        which row, and when, is for the daemon's rules to say, as for every segment.
    """

    def __init__(self, table: Any, memory: Segment | None, mapping: mmap.mmap | None) -> None:
        """Use `create` or `attach`."""
        import torch

        self.table = table
        self._memory = memory  # CPU device only, as is the mapping
        self._mapping = mapping
        self._device = table.device
        self._module = torch.get_device_module(self._device)
        self._stream = self._module.Stream()

    @property
    def rows(self) -> int:
        return int(self.table.shape[0])

    @property
    def stride(self) -> int:
        return int(self.table.shape[1])

    @classmethod
    def create(cls, device: str, rows: int, stride: int) -> Self:
        """Allocate on `cuda:N` or `cpu`. The memory is not cleared on CUDA devices.

        Raises `SegmentError` when the device or the memory is not there, `InvalidRequest` for sizes that
        are not positive.
        """
        import torch

        if rows <= 0 or stride <= 0:
            raise InvalidRequest(f"a device segment of {rows} rows of {stride} bytes")
        if torch.device(device).type == "cpu":
            size = -(-rows * stride // PAGE) * PAGE
            return cls._over(DramSegment.create(size), rows, stride)
        try:
            table = torch.empty((rows, stride), dtype=torch.uint8, device=device)
        except (RuntimeError, AssertionError) as error:  # no such device, no CUDA, out of memory
            raise SegmentError(
                f"no room for {rows} rows of {stride} bytes on {device}: {error}"
            ) from error
        return cls(table, None, None)

    @classmethod
    def _over(cls, memory: Segment, rows: int, stride: int) -> Self:
        import torch

        mapping = memory.map()
        flat = torch.frombuffer(mapping, dtype=torch.uint8, count=rows * stride)
        return cls(flat.view(rows, stride), memory, mapping)

    def export(self) -> bytes:
        """A handle for one engine on this host. The owner keeps the memory at least until it detaches."""
        if self._memory is not None:
            return msgspec.msgpack.encode(
                _CpuHandle(
                    *(self.rows, self.stride, os.getpid(), self._memory.fd),
                    *(os.fstat(self._memory.fd).st_ino, self._memory.size),
                )
            )
        device, memory, size, offset, counter, counter_offset, event, needed = (
            self.table.untyped_storage()._share_cuda_()
        )
        return msgspec.msgpack.encode(
            _CudaHandle(
                *(self.rows, self.stride, device, memory, size, offset),
                *(counter, counter_offset, event, needed),
            )
        )

    @classmethod
    def attach(cls, handle: bytes) -> Self:
        """Map another process's segment. Raises `SegmentError` if it is gone or the handle is none."""
        try:
            found = _handles.decode(handle)
        except msgspec.DecodeError as error:
            raise SegmentError(f"this is no handle of a device segment: {error}") from None
        if isinstance(found, _CpuHandle):
            return cls._attach_cpu(found)
        import torch
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        try:
            table = rebuild_cuda_tensor(
                *(torch.Tensor, (found.rows, found.stride), (found.stride, 1), 0),
                *(torch.storage.TypedStorage, torch.uint8, found.device, found.memory),
                *(found.storage_bytes, found.storage_offset, False),
                *(found.counter, found.counter_offset, found.event, found.event_needed),
            )
        except RuntimeError as error:
            raise SegmentError(f"the device segment cannot be opened: {error}") from error
        return cls(table, None, None)

    @classmethod
    def _attach_cpu(cls, found: _CpuHandle) -> Self:
        if found.rows <= 0 or found.stride <= 0 or found.rows * found.stride > found.size:
            raise SegmentError("this is no handle of a device segment: its sizes do not agree")
        try:
            fd = os.open(f"/proc/{found.pid}/fd/{found.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise SegmentError(f"the device segment cannot be opened: {error}") from error
        try:
            if os.fstat(fd).st_ino != found.inode:
                raise SegmentError("the device segment cannot be opened: its owner has closed it")
            memory = Segment.attach(fd, found.size)
        except SegmentError:
            os.close(fd)
            raise
        return cls._over(memory, found.rows, found.stride)

    # ---- host staging --------------------------------------------------------------------------------

    def host_rows(self, count: int) -> Any:
        """Host memory for `count` rows, pinned where the device is not the host: what the copies want."""
        import torch

        pinned = self._device.type != "cpu"
        return torch.empty((count, self.stride), dtype=torch.uint8, pin_memory=pinned)

    def to_host(self, rows: Index, out: Any) -> None:
        """Copy rows into `out`, one after the other; done when it returns.

        out: a contiguous uint8 tensor in host memory of shape (len(rows), stride), best from `host_rows`.
        """
        self._check(rows, out)
        with self._module.stream(self._stream):
            for piece, index in self._pieces(rows):
                out[piece].copy_(self.table.index_select(0, index), non_blocking=True)
        self._wait()

    def from_host(self, source: Any, rows: Index) -> None:
        """Copy `source` into rows, which are all different; done when it returns. Shapes as in `to_host`."""
        self._check(rows, source)
        with self._module.stream(self._stream):
            for piece, index in self._pieces(rows):
                staged = source[piece].to(self._device, non_blocking=True)
                self.table.index_copy_(0, index, staged)
        self._wait()

    def _check(self, rows: Index, host: Any) -> None:
        if tuple(host.shape) != (len(rows), self.stride) or not host.is_contiguous():
            raise InvalidRequest(
                f"{len(rows)} rows of {self.stride} bytes do not fit host memory of shape "
                f"{tuple(host.shape)}"
            )
        if len(rows) and not (rows.min() >= 0 and rows.max() < self.rows):
            raise InvalidRequest(f"a device segment of {self.rows} rows has no such row")

    def _pieces(self, rows: Index) -> Iterator[tuple[slice, Any]]:
        """Runs that the staging memory has room for, with their rows as an index on the device."""
        import torch

        step = max(1, STAGING_BYTES // self.stride)
        index = torch.from_numpy(np.ascontiguousarray(rows)).to(self._device)
        for at in range(0, len(rows), step):
            piece = slice(at, min(at + step, len(rows)))
            yield piece, index[piece]

    def _wait(self) -> None:
        """For these copies alone, not for what others do on the device."""
        event = self._module.Event()
        event.record(self._stream)
        event.synchronize()

    def close(self) -> None:
        """Let go of the memory. Idempotent. Others' mappings stay valid until they close theirs."""
        self.table = None
        self._mapping = None  # unmapped with the last tensor over it
        if self._memory is not None:
            self._memory.close()
            self._memory = None

"""A segment of spare device memory: owned by the daemon, mapped by engines of the same host.

Rows of one size in one allocation. An engine on the same device attaches to it and copies to and from its
own cache without leaving the device; otherwise bytes pass through host memory, row by row, because a
row is contiguous on both sides.

The owner exports a handle for each engine. On a CUDA device that is torch's handle for sharing tensors
between processes (CUDA IPC); on the CPU device, which serves tests and machines without an accelerator, the
owner's process and descriptor of a sealed memfd. A handle is valid for one `attach`, on the same host, while
the owner lives. Other allocations of the owner's process may share the memory that a CUDA handle opens:
give handles only to trusted engines, and keep nothing else on the device there.

Needs torch, which is imported when a segment is made.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvpool.errors import InvalidRequest, SegmentError
from kvpool.memory.device_stream import finished_stream
from kvpool.memory.segment import Segment
from kvpool.storage.dram import PAGE, DramSegment

Index = NDArray[np.int64]

HostRows = NDArray[np.uint8]


class _CudaHandle(msgspec.Struct, tag="cuda", array_like=True):
    """The arguments of torch's `rebuild_cuda_tensor` that are not the same for every segment."""

    rows: int
    stride: int
    device: str  # its UUID: numbers differ between processes
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
    inode: int  # of the memfd: the number of a closed descriptor is reused
    size: int


_handles = msgspec.msgpack.Decoder(_CudaHandle | _CpuHandle)


def register(memory: mmap.mmap) -> None:
    """Register host memory with the CUDA driver, so that the device copies from and to it at full speed.

    Until this process ends. Takes some 40 ms a GiB. Raises `SegmentError`.
    """
    import torch

    address = np.frombuffer(memory, np.uint8).ctypes.data
    code = int(torch.cuda.cudart().cudaHostRegister(address, len(memory), 0))
    if code:
        raise SegmentError(
            f"the CUDA driver refused to register {len(memory)} bytes of host memory "
            f"(cudaHostRegister: {code}): raise the limit on locked memory (ulimit -l)"
        )


def _uuid(device: Any) -> str:
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


def _decoded(handle: bytes) -> _CudaHandle | _CpuHandle:
    try:
        found: _CudaHandle | _CpuHandle = _handles.decode(handle)
    except msgspec.DecodeError as error:
        raise SegmentError(f"not a valid handle of a device segment: {error}") from None
    return found


def _runs(source: Index, target: Index) -> Iterator[tuple[int, int, int]]:
    """Runs (source, target, count) in which both go up one by one."""
    if not len(source):
        return
    breaks = np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1
    for start, end in pairwise([0, *breaks.tolist(), len(source)]):
        yield int(source[start]), int(target[start]), end - start


class DeviceSegment:
    """Rows of device memory. Used by one thread at a time; attached segments have users of their own.

    table: the rows, a uint8 tensor of shape (rows, stride). Not to be used after `close`. The daemon's rules
        decide who may write which row, and when, as for every segment.
    """

    def __init__(self, table: Any, memory: Segment | None, mapping: mmap.mmap | None) -> None:
        """Use `create` or `attach`."""
        import torch

        self.table = table
        self._memory = memory  # CPU device only, as is the mapping
        self._mapping = mapping
        self._device = table.device
        self._module = torch.get_device_module(self._device)
        # For this device: by default it would be for the one that is current in this thread.
        cuda = self._device.type == "cuda"
        self._stream = self._module.Stream(device=self._device) if cuda else self._module.Stream()

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

    def cut(self, stride: int) -> Self:
        """The same memory as rows of another size, for another user: a thread of this process.

        It stays allocated until all of them are closed. Raises `InvalidRequest` if there is no room for a row.
        """
        flat = self.table.view(-1)
        if not 0 < stride <= len(flat):
            raise InvalidRequest(
                f"a device segment of {len(flat)} bytes has no rows of {stride} bytes"
            )
        count = len(flat) // stride
        return type(self)(flat[: count * stride].view(count, stride), None, None)

    def export(self) -> bytes:
        """A handle for one engine on this host. The owner keeps the memory at least until it detaches."""
        if self._memory is not None:
            return msgspec.msgpack.encode(
                _CpuHandle(
                    *(self.rows, self.stride, os.getpid(), self._memory.fd),
                    *(os.fstat(self._memory.fd).st_ino, self._memory.size),
                )
            )
        try:
            number, memory, size, offset, counter, counter_offset, event, needed = (
                self.table.untyped_storage()._share_cuda_()
            )
            device = _uuid(number)
        except RuntimeError as error:  # for example if CUDA IPC is disabled
            raise SegmentError(f"this device memory cannot be shared: {error}") from error
        return msgspec.msgpack.encode(
            _CudaHandle(
                *(self.rows, self.stride, device, memory, size, offset),
                *(counter, counter_offset, event, needed),
            )
        )

    @staticmethod
    def lies_on(handle: bytes, device: Any) -> bool:
        """Whether a handle's segment is on this torch device. Maps nothing, so that no other device is
        touched. Raises `SegmentError` for an invalid handle.
        """
        found = _decoded(handle)
        if isinstance(found, _CpuHandle):
            return bool(device.type == "cpu")
        return bool(device.type == "cuda" and _uuid(device) == found.device)

    @classmethod
    def attach(cls, handle: bytes) -> Self:
        """Map another process's segment. Raises `SegmentError` if it is gone or the handle is invalid."""
        found = _decoded(handle)
        if isinstance(found, _CpuHandle):
            return cls._attach_cpu(found)
        import torch
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        seen = [_uuid(number) for number in range(torch.cuda.device_count())]
        if found.device not in seen:
            raise SegmentError(
                f"the device segment is on device {found.device}, which this process cannot see"
            )
        try:
            table = rebuild_cuda_tensor(
                *(torch.Tensor, (found.rows, found.stride), (found.stride, 1), 0),
                *(torch.storage.TypedStorage, torch.uint8, seen.index(found.device), found.memory),
                *(found.storage_bytes, found.storage_offset, False),
                *(found.counter, found.counter_offset, found.event, found.event_needed),
            )
        except RuntimeError as error:
            raise SegmentError(f"the device segment cannot be opened: {error}") from error
        return cls(table, None, None)

    @classmethod
    def _attach_cpu(cls, found: _CpuHandle) -> Self:
        if found.rows <= 0 or found.stride <= 0 or found.rows * found.stride > found.size:
            raise SegmentError("not a valid handle of a device segment: its sizes disagree")
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

    # ---- to and from the host --------------------------------------------------------------------------

    def to_host(self, rows: Index, table: HostRows, host_rows: Index) -> None:
        """Copy rows into as many rows of `table`, which are all different; done when it returns or raises.

        table: host memory of shape (any, stride), contiguous. Registered memory (`register`) is copied to
        by the device itself.
        """
        host = self._host(rows, table, host_rows)
        with finished_stream(self._module, self._stream):
            for at, to, count in _runs(rows, host_rows):
                host[to : to + count].copy_(self.table[at : at + count], non_blocking=True)

    def from_host(self, table: HostRows, host_rows: Index, rows: Index) -> None:
        """Copy rows of `table` into as many rows; all else as for `to_host`."""
        host = self._host(rows, table, host_rows)
        with finished_stream(self._module, self._stream):
            for at, to, count in _runs(host_rows, rows):
                self.table[to : to + count].copy_(host[at : at + count], non_blocking=True)

    def _host(self, rows: Index, table: HostRows, host_rows: Index) -> Any:
        import torch

        if table.shape[1:] != (self.stride,) or not table.flags.c_contiguous:
            raise InvalidRequest(
                f"rows of {self.stride} bytes do not fit host memory of shape {table.shape}"
            )
        if len(rows) != len(host_rows):
            raise InvalidRequest(
                f"{len(rows)} rows of the device, but {len(host_rows)} of the host"
            )
        for numbers, count in ((rows, self.rows), (host_rows, len(table))):
            if len(numbers) and not (numbers.min() >= 0 and numbers.max() < count):
                raise InvalidRequest(f"a row is not among the {count} rows")
        return torch.from_numpy(table)

    def close(self) -> None:
        """Free the memory. Idempotent. Others' mappings stay valid until they close theirs."""
        self.table = None
        self._mapping = None  # unmapped with the last tensor over it
        if self._memory is not None:
            self._memory.close()
            self._memory = None

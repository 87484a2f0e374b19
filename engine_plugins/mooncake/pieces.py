"""Copies between slots and the memory that callers name by address.

An address is only followed by this process if it lies in a range that was registered (`Memory.register`) and that the
process had mapped for reading and writing then. All other addresses are left to the kernel (`preadv`, `pwritev` on the
segment's memfd), which answers EFAULT for what is not this process's host memory, such as a device's: no copy from a
wild address can end the process.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import math
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kvpool.engine_plugins.mooncake.values import Ints, Lists

Bytes1D = npt.NDArray[np.uint8]
Int1D = npt.NDArray[np.int64]
T = TypeVar("T")

IOV_MAX = 1024
ADDRESSES_END = 1 << 62
"""Beyond all addresses of a process, and sums with sizes are still numbers of 64 bits."""
BUFFER_BYTES_MAX = 1 << 40
UNIT_BYTES_MIN = 512
"""Smaller than this, numpy takes longer a piece than the kernel."""
REGIONS_MAX = 1 << 16

_libc = ctypes.CDLL(None, use_errno=True)
_iovec = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
_preadv, _pwritev = _libc.preadv, _libc.pwritev
_preadv.argtypes = _pwritev.argtypes = list(_iovec)
_preadv.restype = _pwritev.restype = ctypes.c_ssize_t


class BadAddressError(Exception):
    """The memory at an address is not the process's own, or is not there. The object's code is -600."""


class Pieces(Protocol):
    """Caller's memory that holds one object, in order.

    nbytes: of it all. write: into a slot, `nbytes` bytes at `at` of the memfd `fd`, which `slot` is a view of. read: the
    first bytes of a slot, as many as `slot` has, at most `nbytes`. cut: a part of it. write and read raise
    `BadAddressError`.
    """

    nbytes: int

    def write(self, slot: Bytes1D, fd: int, at: int) -> None: ...
    def read(self, slot: Bytes1D, fd: int, at: int) -> None: ...
    def cut(self, start: int, end: int) -> Pieces: ...


class View:
    """One run of memory that this process may follow, as an array."""

    __slots__ = ("bytes", "nbytes")

    def __init__(self, view: Bytes1D) -> None:
        self.bytes = view
        self.nbytes = view.size

    def write(self, slot: Bytes1D, fd: int, at: int) -> None:
        np.copyto(slot, self.bytes)

    def read(self, slot: Bytes1D, fd: int, at: int) -> None:
        np.copyto(self.bytes if slot.size == self.nbytes else self.bytes[: slot.size], slot)

    def cut(self, start: int, end: int) -> View:
        return View(self.bytes[start:end])


@dataclass(slots=True, eq=False)
class Made:
    """An object that is made of what is read: `make` gets its bytes, as a buffer. Not for writing.

    nbytes: it has no more.
    """

    _make: Callable[[Any], Any]
    nbytes: int = BUFFER_BYTES_MAX
    _value: Any = None
    _whole: Bytes1D | None = None

    @property
    def value(self) -> Any:
        """What was made, once all was read."""
        return self._value if self._whole is None else self._make(self._whole.data)

    def write(self, slot: Bytes1D, fd: int, at: int) -> None:
        raise AssertionError("an object that is being read is no source")

    def read(self, slot: Bytes1D, fd: int, at: int) -> None:
        self._value = self._make(slot.data)

    def cut(self, start: int, end: int) -> View:
        """All of it, to be read part by part, in any order."""
        self._whole = np.empty(end - start, np.uint8)
        return View(self._whole)


class Addresses:
    """Runs of memory by their addresses, which the kernel checks and copies."""

    __slots__ = ("_ptrs", "_sizes", "nbytes")

    def __init__(self, ptrs: Int1D, sizes: Int1D) -> None:
        self._ptrs = ptrs
        self._sizes = sizes
        self.nbytes = int(sizes.sum())

    def write(self, slot: Bytes1D, fd: int, at: int) -> None:
        self._copy(_pwritev, fd, at)

    def read(self, slot: Bytes1D, fd: int, at: int) -> None:
        whole = slot.size == self.nbytes
        (self if whole else self.cut(0, slot.size))._copy(_preadv, fd, at)

    def cut(self, start: int, end: int) -> Addresses:
        ends = np.cumsum(self._sizes)
        begins = ends - self._sizes
        low, high = np.maximum(begins, start), np.minimum(ends, end)
        kept = high > low
        return Addresses(self._ptrs[kept] + (low - begins)[kept], (high - low)[kept])

    def _copy(self, call: object, fd: int, at: int) -> None:
        vectors = np.empty((len(self._ptrs), 2), np.uint64)
        vectors[:, 0], vectors[:, 1] = self._ptrs, self._sizes
        first = vectors.ctypes.data
        for start in range(0, len(vectors), IOV_MAX):
            count = min(IOV_MAX, len(vectors) - start)
            want = int(self._sizes[start : start + count].sum())
            done = call(fd, first + 16 * start, count, at)  # type: ignore[operator]
            if done != want:
                number = ctypes.get_errno() if done < 0 else errno.EFAULT
                if number not in {errno.EFAULT, errno.EINVAL}:
                    raise OSError(number, os.strerror(number))
                raise BadAddressError
            at += want


def copied(pieces: Addresses) -> View | None:
    """The bytes as they are now, in memory of their own; None: a bad address."""
    data = np.empty(pieces.nbytes, np.uint8)
    fd = os.memfd_create("kvpool-copied", os.MFD_CLOEXEC)
    try:
        pieces.write(data, fd, 0)
        done = 0
        while done < data.size:  # one call reads 2 GiB at most
            done += os.preadv(fd, [data[done:].data], done)
    except BadAddressError:
        return None
    finally:
        os.close(fd)
    return View(data)


def fill(pieces: Pieces, data: Bytes1D) -> bool:
    """Read bytes of this process, as if they were a slot; False: a bad address."""
    if isinstance(pieces, (Made, View)):
        pieces.read(data, -1, 0)
        return True
    fd = os.memfd_create("kvpool-filling", os.MFD_CLOEXEC)
    try:
        done = 0
        while done < data.size:  # one call writes 2 GiB at most
            done += os.write(fd, data[done:].data)
        pieces.read(data, fd, 0)
    except BadAddressError:
        return False
    finally:
        os.close(fd)
    return True


class Units:
    """Registered runs of memory whose addresses and sizes are multiples of a unit: one numpy call copies them all.

    arena: all registered memory as units. index: of each unit of the object.
    """

    __slots__ = ("_addresses", "_arena", "_index", "nbytes")

    def __init__(self, arena: npt.NDArray[np.void], index: Int1D, addresses: Addresses) -> None:
        self._arena = arena
        self._index = index
        self._addresses = addresses
        self.nbytes = addresses.nbytes

    def write(self, slot: Bytes1D, fd: int, at: int) -> None:
        np.take(self._arena, self._index, out=slot.view(self._arena.dtype), mode="clip")

    def read(self, slot: Bytes1D, fd: int, at: int) -> None:
        if slot.size == self.nbytes:
            self._arena[self._index] = slot.view(self._arena.dtype)
        else:
            self._addresses.read(slot, fd, at)

    def cut(self, start: int, end: int) -> Addresses:
        return self._addresses.cut(start, end)


class _Regions:
    """Registered ranges, sorted; immutable. arena: all bytes from the first to the last of them, whatever lies between."""

    def __init__(self, ranges: dict[int, int]) -> None:
        starts = sorted(ranges)
        self.starts = np.array(starts, np.int64)
        self.ends = np.array([start + ranges[start] for start in starts], np.int64)
        self.base = starts[0] if starts else 0
        span = int(self.ends[-1]) - self.base if starts else 0
        # An array touches no byte until it is indexed, and only checked addresses index it.
        self.arena: Bytes1D = np.empty(0, np.uint8)
        if span:
            whole = (ctypes.c_ubyte * span).from_address(self.base)
            self.arena = np.frombuffer(memoryview(whole), np.uint8)

    def hold(self, ptrs: Int1D, sizes: Int1D) -> bool:
        """Whether each run lies in one of them."""
        if not len(self.starts) or not len(ptrs):
            return False
        if len(ptrs) == 1:  # a microsecond less
            ptr = int(ptrs[0])
            at = int(self.starts.searchsorted(ptr, "right")) - 1
            return at >= 0 and ptr + int(sizes[0]) <= int(self.ends[at])
        at_all = self.starts.searchsorted(ptrs, "right") - 1
        return bool((at_all >= 0).all() and (ptrs + sizes <= self.ends[at_all]).all())


class Memory:
    """The ranges that a caller has registered, and its addresses as `Pieces`. Thread-safe.

    pool_left: bytes that may still be allocated.
    """

    def __init__(self) -> None:
        self._ranges: dict[int, int] = {}
        self._regions = _Regions({})
        self._lock = threading.Lock()
        self._pool: list[Bytes1D] = []
        self.pool_left = 0

    def register(self, ptr: int, size: int) -> bool:
        """False if it is empty, overlaps a registered range, or is not host memory to be read and written."""
        if ptr <= 0 or size <= 0 or ptr + size >= 1 << 63:
            return False
        with self._lock:
            if len(self._ranges) >= REGIONS_MAX or any(
                ptr < start + other and start < ptr + size for start, other in self._ranges.items()
            ):
                return False
            if not _is_host_memory(ptr, size):
                return False
            self._ranges[ptr] = size
            self._regions = _Regions(self._ranges)
            return True

    def unregister(self, ptr: int) -> bool:
        with self._lock:
            if self._ranges.pop(ptr, None) is None:
                return False
            self._regions = _Regions(self._ranges)
            return True

    def allocate(self, size: int) -> int:
        """The address of memory of this process, until this is gone; 0: there is not as much left."""
        with self._lock:
            if not 0 < size <= self.pool_left:
                return 0
            self.pool_left -= size
            self._pool.append(np.zeros(size, np.uint8))
            return int(self._pool[-1].ctypes.data)

    def end_of(self, ptr: int) -> int | None:
        """Of the registered range that an address is in; None: it is in none."""
        if not is_run(ptr, 1):
            return None
        regions = self._regions
        at = int(regions.starts.searchsorted(ptr, "right")) - 1
        end = int(regions.ends[at]) if at >= 0 else 0
        return end if ptr < end else None

    def runs(self, ptrs: Ints, sizes: Ints) -> list[View | Addresses | None]:
        """One run an object, None where it cannot be followed. Empty if there are not as many sizes."""
        if len(ptrs) != len(sizes):
            return []
        valid = list(map(is_run, ptrs, sizes))
        if not all(valid):
            return _of_valid(valid, self.runs, ptrs, sizes)
        starts, lengths = np.array(ptrs, np.int64), np.array(sizes, np.int64)
        regions = self._regions
        if regions.hold(starts, lengths):
            arena, base = regions.arena, regions.base
            return [
                View(arena[ptr - base : ptr - base + size])
                for ptr, size in zip(ptrs, sizes, strict=True)
            ]
        return [Addresses(starts[at : at + 1], lengths[at : at + 1]) for at in range(len(starts))]

    def gathered(self, ptrs: Lists, sizes: Lists) -> Sequence[Pieces | None]:
        """Several runs an object, None where there is none or one cannot be followed. Empty as `runs`."""
        if len(ptrs) != len(sizes):
            return []
        valid = list(map(are_runs, ptrs, sizes))
        if not all(valid):
            return _of_valid(valid, self.gathered, ptrs, sizes)
        counts = [len(some) for some in ptrs]
        total = sum(counts)
        if total == len(counts) and all(count == 1 for count in counts):
            return self.runs([some[0] for some in ptrs], [some[0] for some in sizes])
        starts = np.fromiter((ptr for some in ptrs for ptr in some), np.int64, total)
        lengths = np.fromiter((size for some in sizes for size in some), np.int64, total)
        bounds = [0]
        for count in counts:
            bounds.append(bounds[-1] + count)
        cuts = list(itertools.pairwise(bounds))
        listed: list[Pieces] = [
            Addresses(starts[low:high], lengths[low:high]) for low, high in cuts
        ]
        regions = self._regions
        if not regions.hold(starts, lengths):
            return listed
        offsets = starts - regions.base
        size = int(lengths[0])
        unit = math.gcd(int(np.gcd.reduce(offsets)), size)
        if unit < UNIT_BYTES_MIN or (lengths != size).any():
            return listed
        whole = regions.arena.size // unit * unit
        arena = regions.arena[:whole].view(np.dtype((np.void, unit)))
        index = offsets // unit
        each = size // unit
        if each > 1:
            index = (index[:, None] + np.arange(each)).reshape(-1)
        if int(index.max()) >= len(arena):  # the last run ends beyond the last whole unit
            return listed
        return [
            Units(arena, index[low * each : high * each], addresses)  # type: ignore[arg-type]
            for (low, high), addresses in zip(cuts, listed, strict=True)
        ]


def is_run(ptr: int, size: int) -> bool:
    """Whether there may be such a run of memory."""
    return 0 < ptr < ADDRESSES_END and 0 < size <= BUFFER_BYTES_MAX


def are_runs(ptrs: Ints, sizes: Ints) -> bool:
    """Whether there may be such runs, at least one."""
    return len(ptrs) == len(sizes) > 0 and all(map(is_run, ptrs, sizes))


def _of_valid(
    valid: Sequence[bool], make: Callable[..., Sequence[T]], *columns: Sequence[object]
) -> list[T | None]:
    """What `make` gives for the valid rows of the columns, and None for the others."""
    made = iter(make(*[list(itertools.compress(column, valid)) for column in columns]))
    return [next(made) if good else None for good in valid]


def _is_host_memory(ptr: int, size: int) -> bool:
    """Whether all of it is mapped for reading and writing, by the kernel's list of this process's mappings, and a byte of
    both ends can be read. A device's memory is not: its addresses are reserved without any right.
    """
    at, end = ptr, ptr + size
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        for line in maps:
            span, rights = line.split(" ", 2)[:2]
            low, _, high = span.partition("-")
            first, last = int(low, 16), int(high, 16)
            if last <= at:
                continue
            if first > at or not rights.startswith("rw"):
                return False
            at = last
            if at >= end:
                return _readable(ptr) and _readable(end - 1)
    return False


def _readable(address: int) -> bool:
    fd = os.memfd_create("kvpool-probe", os.MFD_CLOEXEC)
    try:
        vector = np.array([address, 1], np.uint64)
        return bool(_pwritev(fd, vector.ctypes.data, 1, 0) == 1)
    finally:
        os.close(fd)

"""Segments as seen by every process: shared memory, identified by descriptor, mapped.

Tiers create them (`storage/dram.py`).
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
import weakref
from typing import Self

from kvpool.errors import SegmentError

# fcntl.h; not in the type stubs of the fcntl module.
F_ADD_SEALS, F_GET_SEALS = 1033, 1034
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW = 1, 2, 4
SEGMENT_NAME = "kvpool-segment"  # of the memfd, and what the kernel shows in /proc/PID/maps
SEALS = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW
MADV_POPULATE_WRITE = 23  # not in the mmap module; Linux 5.14
FAULT_CHUNK_BYTES = 64 << 20


class Segment:
    """One contiguous region of shared memory.

    The creator owns the descriptor; mappings made from it stay valid after `close`, and the
    memory is freed when the last descriptor and mapping is gone.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size

    @classmethod
    def attach(cls, fd: int, size: int) -> Self:
        """Take over a received descriptor. Raises `SegmentError` unless it is sealed and of that size."""
        actual = os.fstat(fd).st_size
        if actual != size:
            raise SegmentError(f"the segment was announced with {size} bytes but has {actual}")
        try:
            seals = fcntl.fcntl(fd, F_GET_SEALS)
        except OSError as error:
            raise SegmentError(f"the descriptor is not a memory segment: {error}") from None
        if seals & SEALS != SEALS:
            raise SegmentError("the segment is not sealed; it could shrink while it is read")
        return cls(fd, size)

    @property
    def inode(self) -> int:
        """Which segment it is, to the kernel: unlike its descriptor, the same in all processes."""
        return os.fstat(self.fd).st_ino

    def map(self, *, fault_in: bool = False, writable: bool = True) -> mmap.mmap:
        """Map the whole segment, shared. Forked children do not inherit the mapping.

        fault_in: have a thread fault in all pages of a writable mapping, 0.1 to 0.2 s per GiB, so that later copies run
        at full speed. Reads alone fault in many pages at a time.
        writable: False: a write to it ends the process (SIGSEGV), whoever writes.
        """
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        mapping = mmap.mmap(self.fd, self.size, flags=mmap.MAP_SHARED, prot=access)
        # A child that outlived its parent could write into slots after the parent's death freed them.
        mapping.madvise(mmap.MADV_DONTFORK)
        if fault_in and writable:
            threading.Thread(target=_fault_in, args=(weakref.ref(mapping),), daemon=True).start()
        return mapping

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __repr__(self) -> str:
        return f"<Segment fd={self.fd} {self.size >> 20} MiB>"


def _fault_in(reference: weakref.ref[mmap.mmap]) -> None:
    """Enter all pages of a mapping in the page table, as long as somebody else uses the mapping.

    By `ctypes`, since `mmap.madvise` keeps the GIL. Where the kernel cannot, copies fault.
    """
    madvise = ctypes.CDLL(None).madvise
    at = 0
    while (mapping := reference()) is not None and at < len(mapping):
        first = ctypes.c_char.from_buffer(mapping, at)
        nbytes = min(FAULT_CHUNK_BYTES, len(mapping) - at)
        if madvise(ctypes.byref(first), ctypes.c_size_t(nbytes), MADV_POPULATE_WRITE):
            return
        at += nbytes
        del first, mapping

"""Segments as seen by every process: shared memory, identified by descriptor, mapped.

Tiers create them (`storage/dram.py`).
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Self

from kvpool.errors import SegmentError

# fcntl.h; not in the type stubs of the fcntl module.
F_ADD_SEALS, F_GET_SEALS = 1033, 1034
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW = 1, 2, 4
SEGMENT_NAME = "kvpool-segment"  # of the memfd, and what the kernel shows in /proc/PID/maps
SEALS = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW


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

    def map(self, *, populate: bool = False, writable: bool = True) -> mmap.mmap:
        """A shared mapping of the whole segment, not inherited by forked children.

        populate: fault all pages now, so that the first copies run at full speed. writable: False: a write to it ends
        the process (SIGSEGV), whoever writes.
        """
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        mapping = mmap.mmap(self.fd, self.size, flags=flags, prot=access)
        # A child that outlived its parent could write into slots after the parent's death freed them.
        mapping.madvise(mmap.MADV_DONTFORK)
        return mapping

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __repr__(self) -> str:
        return f"<Segment fd={self.fd} {self.size >> 20} MiB>"

"""DRAM segments: sealed, pre-faulted shared memory that engines and transfer workers map by descriptor.

A segment is a memfd: it has no name in any file system, lives as long as a descriptor
or a mapping exists, and is sealed against resizing, so that a truncate cannot make its mappers
fault. `SlabAllocator` (slab.py) decides its layout; this file only owns the memory.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Self

from kvpool.errors import SegmentError
from kvpool.memory.segment import F_ADD_SEALS, SEALS, SEGMENT_NAME, Segment

PAGE = 4096
PREFAULT_CHUNK_BYTES = 64 << 20  # a tenth of a second: how late a stop is obeyed
KEEP_FREE_BYTES = 256 << 20  # memory that must be left to the rest of the machine


def free_memory_bytes() -> int:
    """Memory that can be allocated without swapping: the kernel's estimate, or the rest of the cgroup's limit.

    Raises `SegmentError` if neither can be read.
    """
    try:
        text = Path("/proc/meminfo").read_text()
        free = next(
            int(line.split()[1]) * 1024
            for line in text.splitlines()
            if line.startswith("MemAvailable:")
        )
    except (OSError, StopIteration) as error:
        raise SegmentError(f"cannot read the free memory of this machine: {error}") from None
    return min(free, _cgroup_free_bytes(free))


def _cgroup_free_bytes(otherwise: int) -> int:
    """The remaining memory of the control groups (v2); `otherwise` without a readable limit."""
    try:
        group = Path("/proc/self/cgroup").read_text().strip().rsplit("::", 1)[-1]
    except OSError:
        return otherwise
    root = Path("/sys/fs/cgroup")
    folder = root / group.lstrip("/")
    free = otherwise
    while folder.is_relative_to(root):  # the root group has no limit
        free = min(free, _group_free_bytes(folder, otherwise))
        folder = folder.parent
    return free


def _group_free_bytes(folder: Path, otherwise: int) -> int:
    try:
        limit = (folder / "memory.max").read_text().strip()
        if limit == "max":
            return otherwise
        left = int(limit) - int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return otherwise
    # Cached pages of files count as used, though the kernel drops them on demand: after
    # a model's weights were read they are most of it.
    return max(0, left + _cached_file_bytes(folder))


def _cached_file_bytes(folder: Path) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
        return sum(
            int(line.split()[1])
            for line in lines
            if line.startswith(("inactive_file ", "active_file "))
        )
    except (OSError, ValueError):
        return 0


class DramSegment(Segment):
    """A segment that this process has made."""

    @classmethod
    def create(
        cls,
        size: int,
        *,
        free_bytes: int | None = None,
        taken: Callable[[int], None] = lambda _: None,
    ) -> Self:
        """Allocate, pre-fault and seal `size` bytes, rounded down to whole pages.

        Every page is allocated here: an existing segment never runs out of memory later, when an
        engine writes to it. Huge pages are requested, and used if the host's
        `shmem_enabled` allows them. It takes seconds for each few GiB, without the GIL: a program with a loop calls it
        in a thread.

        taken: is told now and then, in the calling thread, how many bytes are allocated; if it raises, nothing stays
        allocated. Raises `SegmentError` when the memory is not available.
        """
        size -= size % PAGE
        if size <= 0:
            raise SegmentError(f"a segment of {size} bytes: at least one page of {PAGE} is needed")
        free = free_memory_bytes() if free_bytes is None else free_bytes
        if size + KEEP_FREE_BYTES > free:
            raise SegmentError(
                f"a DRAM segment of {size >> 20} MiB does not fit: {free >> 20} MiB of memory are free, of which "
                f"{KEEP_FREE_BYTES >> 20} MiB are left to the machine. Set a smaller size (--memory), or free memory "
                "first."
            )
        fd = os.memfd_create(SEGMENT_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            _ask_for_huge_pages(fd, size)
            _prefault(fd, size, taken)
            fcntl.fcntl(fd, F_ADD_SEALS, SEALS)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG):
                raise SegmentError(
                    f"no room for a DRAM segment of {size >> 20} MiB in the memory file system "
                    f"({os.strerror(error.errno)}). Set a smaller size (--memory), raise the memory limit of this "
                    "process or its container, or stop processes that hold shared memory (such as an engine that "
                    "still maps the segment of an ended daemon)."
                ) from None
            raise
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, size)


def _ask_for_huge_pages(fd: int, size: int) -> None:
    """A hint, before the pages are faulted; the kernel ignores it if the host does not allow it."""
    with mmap.mmap(fd, size, flags=mmap.MAP_SHARED) as mapping:
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            if error.errno != errno.EINVAL:  # kernel built without transparent huge pages
                raise


def _prefault(fd: int, size: int, taken: Callable[[int], None]) -> None:
    """Allocate every page, in chunks."""
    for at in range(0, size, PREFAULT_CHUNK_BYTES):
        chunk = min(PREFAULT_CHUNK_BYTES, size - at)
        os.posix_fallocate(fd, at, chunk)
        taken(at + chunk)

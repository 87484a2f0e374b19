"""The files of an SSD store as the kernel offers them: a small port, and the segment file on top of it.

Tests replace `Disk` to simulate a full, read-only, failing or stalled disk. LMDB does its own input and
output and does not use it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from kvpool.errors import ConfigError, SegmentError
from kvpool.memory.buffers import Bytes1D

PAGE = 4096
HUGE_PAGE = 2 << 20

Direct = bool | Literal["auto"]


class Disk(Protocol):
    """The system calls on the segment file. Every method may raise OSError; all are thread-safe.

    `pread` and `pwrite` may do less than requested, as the system calls may.
    """

    def open(self, path: Path, flags: int) -> int: ...

    def close(self, fd: int) -> None: ...

    def size(self, fd: int) -> int: ...

    def pread(self, fd: int, into: Bytes1D, at: int) -> int: ...

    def pwrite(self, fd: int, data: Bytes1D, at: int) -> int: ...

    def fdatasync(self, fd: int) -> None: ...

    def fallocate(self, fd: int, nbytes: int) -> None: ...

    def truncate(self, fd: int, nbytes: int) -> None: ...

    def drop_pages(self, fd: int, at: int, nbytes: int) -> None: ...


class LinuxDisk:
    """The kernel's own."""

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def pread(self, fd: int, into: Bytes1D, at: int) -> int:
        return os.preadv(fd, [into.data], at)

    def pwrite(self, fd: int, data: Bytes1D, at: int) -> int:
        return os.pwritev(fd, [data.data], at)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def fallocate(self, fd: int, nbytes: int) -> None:
        os.posix_fallocate(fd, 0, nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def drop_pages(self, fd: int, at: int, nbytes: int) -> None:
        os.posix_fadvise(fd, at, nbytes, os.POSIX_FADV_DONTNEED)


@dataclass(eq=False)
class SegmentFile:
    """One preallocated file of `nbytes`, read and written in whole pages. Thread-safe."""

    _disk: Disk
    _fd: int
    nbytes: int
    direct: bool

    @classmethod
    def open(cls, disk: Disk, path: Path, nbytes: int, direct: Direct) -> SegmentFile:
        """Open or create the file, with all its space allocated: no later write can find the disk full.

        direct: bypass the page cache. "auto" means if the file system can, True requires it.
        Raises `SegmentError` when there is no room or the disk refuses, `ConfigError` when `direct`
        is required of a file system that cannot.
        """
        try:
            fd, is_direct = _open(disk, path, direct)
        except OSError as error:
            raise SegmentError(f"cannot open {path}: {os.strerror(error.errno or 0)}") from None
        try:
            size = disk.size(fd)
            if size > nbytes:
                disk.truncate(fd, nbytes)
            if size < nbytes:
                disk.fallocate(fd, nbytes)
            if is_direct and not _direct_works(disk, fd):
                if direct is True:
                    raise _no_direct(path)
                disk.close(fd)
                fd, is_direct = disk.open(path, os.O_RDWR), False
        except OSError as error:
            disk.close(fd)
            raise SegmentError(
                f"no room for {path} of {nbytes >> 20} MiB ({os.strerror(error.errno or 0)}). "
                f"Give the SSD store a smaller size, or free space on its disk."
            ) from None
        except BaseException:
            disk.close(fd)
            raise
        return cls(disk, fd, nbytes, is_direct)

    def read(self, at: int, into: Bytes1D) -> None:
        """Fill `into`. OSError if the disk fails or the file ends before that."""
        self._whole(self._disk.pread, at, into)
        self.drop_pages(at, into.size)

    def write(self, at: int, data: Bytes1D) -> None:
        """Write all of `data`. OSError if the disk fails; any part of it may have been written."""
        self._whole(self._disk.pwrite, at, data)

    def sync(self) -> None:
        """Sync written bytes to stable storage. OSError if not, and then they may never be."""
        self._disk.fdatasync(self._fd)

    def close(self) -> None:
        self._disk.close(self._fd)

    def _whole(self, call: object, at: int, data: Bytes1D) -> None:
        assert callable(call)
        done = 0
        while done < data.size:
            moved = call(self._fd, data[done:], at + done)
            if self.direct:
                moved -= moved % PAGE  # the next call must begin on a page; these bytes go again
            if moved <= 0:
                raise OSError(errno.EIO, "a read or write ended early")
            done += moved

    def drop_pages(self, at: int, nbytes: int) -> None:
        """Without O_DIRECT: have the kernel not cache bytes that were read, or written and synced.

        Blocks are here because they were cold, and the page cache takes memory from DRAM. A
        hint: if it fails it only costs memory.
        """
        if not self.direct:
            with contextlib.suppress(OSError):
                self._disk.drop_pages(self._fd, at, nbytes)


def _open(disk: Disk, path: Path, direct: Direct) -> tuple[int, bool]:
    flags = os.O_RDWR | os.O_CREAT
    if direct is False:
        return disk.open(path, flags), False
    try:
        return disk.open(path, flags | os.O_DIRECT), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    if direct is True:
        raise _no_direct(path)
    return disk.open(path, flags), False


def _direct_works(disk: Disk, fd: int) -> bool:
    """Some file systems accept the flag and refuse the reads."""
    try:
        disk.pread(fd, staging(PAGE, huge=False), 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def _no_direct(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} is on a file system without O_DIRECT; use another disk, or allow buffered access"
    )


def staging(nbytes: int, *, huge: bool = True) -> Bytes1D:
    """Memory of this process for direct reads and writes, aligned, its pages allocated.

    huge: in huge pages if the kernel has them; a disk then sees one piece of memory instead of 256
    a MiB, which was measured to be worth half of its speed.
    """
    # Private: anonymous memory that is shared counts as tmpfs, where huge pages are mostly off.
    mapping = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge:
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            if error.errno != errno.EINVAL:  # kernel built without transparent huge pages
                raise
    memory = np.frombuffer(mapping, dtype=np.uint8)
    start = -memory.ctypes.data % HUGE_PAGE
    aligned = memory[start : start + nbytes]
    aligned[::PAGE] = 0
    return aligned

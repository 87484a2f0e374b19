"""The files of a recording: FILE, and FILE.1, FILE.2 and so on, older with larger numbers.

A line is in a file as a whole or not at all, whatever the disk does, but for the last one after a crash. Only
recordings are moved or overwritten. One thread at a time; every call may wait for the disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from kvpool.errors import ConfigError
from kvpool.folders import write_all
from kvpool.simulator.recordings import MARKER


class RecordFile:
    """See the module. bytes_max: of a file. files_max: kept, the present one included."""

    def __init__(self, path: Path, bytes_max: int, files_max: int) -> None:
        self.path = path
        self._bytes_max = bytes_max
        self._files_max = files_max
        self._fd = -1
        self._size = 0

    def open(self) -> None:
        """Begin a file; one that is there is an older recording, and is moved.

        A process that still writes to that goes on there until it is full. Raises `ConfigError`.
        """
        try:
            self._begin()
        except OSError as error:
            raise ConfigError(f"record: cannot write {self.path}: {error.strerror}") from None

    def write(self, line: bytes) -> bool:
        """Append a line; False: it is longer than a file. Raises `OSError`: nothing of the line stays."""
        full = self._size + len(line) > self._bytes_max
        if len(line) > self._bytes_max:
            return False
        there = os.fstat(self._fd)
        if full or there.st_nlink == 0:  # it was removed
            if not _is_free(self.path, self._fd):
                raise FileExistsError(errno.EEXIST, f"another process has begun {self.path}")
            self._begin()
        elif there.st_size > self._size:
            os.ftruncate(self._fd, self._size)  # a part of a line, by an attempt that has failed
        try:
            write_all(self._fd, line)
        except OSError:
            with contextlib.suppress(OSError):  # then before the next line
                os.ftruncate(self._fd, self._size)
            raise
        self._size += len(line)
        return True

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _begin(self) -> None:
        """Move older files on, and begin an empty one. Without room for that, nothing has changed."""
        made = self.path.with_name(f".{self.path.name}.new")
        made.unlink(missing_ok=True)
        fd = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._move()
            made.replace(self.path)
        except BaseException:
            made.unlink(missing_ok=True)
            os.close(fd)
            raise
        self.close()
        self._fd, self._size = fd, 0

    def _move(self) -> None:
        """Make room for a file at the path. Raises `FileExistsError` if there is something else than recordings."""
        names = [self.path, *(self._older(n) for n in range(1, self._files_max))]
        there = {name: _bytes_of(name) for name in names}
        if not there[self.path]:
            return  # nothing, or an empty file, is replaced
        gap = next((at for at, name in enumerate(names) if there[name] is None), len(names) - 1)
        for at in range(gap, 0, -1):
            names[at - 1].replace(names[at])

    def _older(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")


def _bytes_of(path: Path) -> int | None:
    """The size of a recording; None: nothing is there. Raises `OSError`; `FileExistsError` if it is something else."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or not MARKER.startswith(os.read(fd, len(MARKER))):
            raise FileExistsError(errno.EEXIST, f"{path.name} is there, and is no recording")
        return found.st_size
    finally:
        os.close(fd)


def _is_free(path: Path, fd: int) -> bool:
    """Whether nothing else than the open file is at this path."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except FileNotFoundError:
        return True

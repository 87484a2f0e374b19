"""How readers of another process's memory learn that its owner has died, before the memory can be reused.

The kernel frees a process's device memory while the process exits, and a pidfd signals the exit only afterwards:
in between the memory may already have a new owner. So the owner's main thread holds a robust mutex in a page of
shared memory. The kernel marks it when that thread exits, before it closes any of the process's files, and so
before the driver frees memory allocated through them. A reader that finds the mutex held *after* its copy knows
that the memory still had its owner during the copy.

Readers get a descriptor of the page, which they can map but not write to.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading

from kvpool.errors import SegmentError
from kvpool.memory.segment import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_SHRINK

F_SEAL_FUTURE_WRITE = 0x10  # fcntl.h, since Linux 5.1: new mappings are read-only
_PROCESS_SHARED, _ROBUST = 1, 1  # pthread.h
_OWNER = 0x3FFFFFFF  # of a futex: the holding thread; the kernel clears it when that has died
_ATTRIBUTE_BYTES = 64  # at least a `pthread_mutexattr_t`


class OwnerLiveness:
    """The page of one life, created by the starter of its process, before it serves."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("kvpool-life", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, mmap.PAGESIZE)
            fcntl.fcntl(self.fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
            self._page = mmap.mmap(self.fd, mmap.PAGESIZE)
        except BaseException:
            os.close(self.fd)
            raise

    def end(self) -> None:
        """The process is dead. The kernel has marked that, unless it had no memory left to do so."""
        self._page[:4] = bytes(4)
        self._page.close()
        os.close(self.fd)


def begin(fd: int) -> None:
    """Alive as long as this thread: call it from the main one. Takes over the descriptor.

    Raises `SegmentError` if the kernel does not support it.
    """
    try:
        page = mmap.mmap(fd, mmap.PAGESIZE)
        # Mapped until the end, also during the interpreter's shutdown: the kernel must find the mutex.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(page))
        libc = ctypes.CDLL(None)
        attributes = ctypes.create_string_buffer(_ATTRIBUTE_BYTES)
        mutex = ctypes.byref(ctypes.c_char.from_buffer(page))
        codes = [
            libc.pthread_mutexattr_init(attributes),
            libc.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED),
            libc.pthread_mutexattr_setrobust(attributes, _ROBUST),
            libc.pthread_mutex_init(mutex, attributes),
            libc.pthread_mutex_lock(mutex),
        ]
        if any(codes) or _owner(page) != threading.get_native_id():
            raise SegmentError(f"this C library has no suitable robust mutex: {codes}")
        fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL)
    except OSError as error:
        raise SegmentError(
            f"the kernel rejected the robust list that signals this process's death: {error}"
        ) from error
    finally:
        os.close(fd)


class LifeView:
    """A life, as seen by a reader. Thread-safe. Takes over the descriptor."""

    def __init__(self, fd: int) -> None:
        try:
            self._page = mmap.mmap(fd, mmap.PAGESIZE, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise SegmentError(f"the descriptor is not a liveness page: {error}") from None
        finally:
            os.close(fd)

    @property
    def alive(self) -> bool:
        """Whether the process has owned its memory until now."""
        return _owner(self._page) != 0


def _owner(page: mmap.mmap) -> int:
    return int.from_bytes(page[:4], "little") & _OWNER

"""Waits for the end of a daemon's process, so that a client lets go of its memory.

A dead daemon's segment lives on as long as a client maps it, or has only its descriptor; the next daemon may find
no room for its own meanwhile. A client that makes no request would never notice. Internal to `kvpool.client`.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import weakref
from collections.abc import Callable

from kvpool.errors import LimitExceeded
from kvpool.memory.peer_process import peer_pidfd


class _Bell:
    """Wakes the thread, from any other one, as long as that listens. Thread-safe."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()

    def ring(self) -> None:
        with self._lock:
            if self.fd >= 0:
                os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        with self._lock:
            os.close(self.fd)
            self.fd = -1


class DaemonWatch:
    """Calls `ended` once the process at the other end of `sock` is dead, from a thread of its own, unless it is
    stopped or collected before.

    The thread sleeps in the kernel until then. Where it cannot be had (no descriptor or no thread is left, or the
    process is in a foreign pid namespace and the kernel older than 6.5) `watches` is False, and nothing is called.
    """

    def __init__(self, sock: socket.socket, ended: Callable[[], None]) -> None:
        self.watches = False
        try:
            pidfd = peer_pidfd(sock)
        except (OSError, LimitExceeded):
            return
        if pidfd is None:
            return
        try:
            bell = _Bell()
        except OSError:
            os.close(pidfd)
            return
        thread = threading.Thread(
            target=_watch, args=(pidfd, bell, ended), name="kvpool-watch", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # no thread is left
            os.close(pidfd)
            bell.close()
            return
        self._stop = weakref.finalize(self, bell.ring)
        self._stop.atexit = False  # a forked child that ends must not stop its parent's
        self.watches = True

    def stop(self) -> None:
        """Idempotent."""
        if self.watches:
            self._stop()


def _watch(pidfd: int, bell: _Bell, ended: Callable[[], None]) -> None:
    try:
        both = select.poll()
        both.register(pidfd, select.POLLIN)
        both.register(bell.fd, select.POLLIN)
        stopped = bell.fd in dict(both.poll())
    finally:
        os.close(pidfd)
        bell.close()
    if not stopped:
        ended()

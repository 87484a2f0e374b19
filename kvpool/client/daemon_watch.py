"""Waits for the end of a daemon's process, so that a client lets go of its memory.

A dead daemon's segment lives on as long as a client maps it, or has only its descriptor; the next daemon may find
no room for its own meanwhile. A client that makes no request would never notice. Internal to `kvpool.client`.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable

from kvpool.client.connection import DroppableSocket
from kvpool.errors import LimitExceeded
from kvpool.memory.peer_process import peer_pidfd


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
            ours, theirs = socket.socketpair()
        except OSError:
            os.close(pidfd)
            return
        thread = threading.Thread(
            target=_watch, args=(pidfd, theirs, ended), name="kvpool-watch", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # no thread is left
            os.close(pidfd)
            ours.close()
            theirs.close()
            return
        # Its end ends the thread. A forked child has a copy, whose end does not.
        self._held = DroppableSocket(fileno=ours.detach())
        self.watches = True

    def stop(self) -> None:
        """Idempotent."""
        if self.watches:
            with contextlib.suppress(OSError):  # it has stopped
                self._held.shutdown(socket.SHUT_RDWR)


def _watch(pidfd: int, held: socket.socket, ended: Callable[[], None]) -> None:
    with held:
        both = select.poll()
        both.register(pidfd, select.POLLIN)
        both.register(held, select.POLLIN)
        try:
            stopped = held.fileno() in dict(both.poll())
        finally:
            os.close(pidfd)
    if not stopped:
        ended()

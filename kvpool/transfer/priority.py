"""Priority on this node's links: pulls that are waited for, before background copies."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

PIECE_BYTES = 1 << 20
"""Bytes that a background transfer moves between two checks for urgent ones."""


class Priority:
    """Urgent transfers and background ones of one process. Thread-safe.

    An urgent one costs two acquisitions of a lock. A background one yields between its pieces: while it
    waits it uses no core, no memory bandwidth and, except for the socket's buffers, nothing of the link.

    changed: guards all of it, and is notified when the last urgent one ends.
    """

    PIECE_WAIT_S = 0.1
    """Longest wait of a background transfer before a piece: it proceeds at 10 MB/s under any load,
    so that replicas are made, and a drain ends.
    """

    def __init__(self, changed: threading.Condition | None = None) -> None:
        self._changed = changed or threading.Condition()
        self._urgent = 0
        self._waiting = 0

    @contextmanager
    def urgent(self) -> Iterator[None]:
        """Background transfers yield meanwhile."""
        with self._changed:
            self._urgent += 1
        try:
            yield
        finally:
            with self._changed:
                self._urgent -= 1
                if self._waiting and not self._urgent:
                    self._changed.notify_all()

    def give_way(self, left_s: float) -> None:
        """Called by a background transfer before each piece: wait while there is an urgent one.

        left_s: until its own deadline. No longer than that, nor than `PIECE_WAIT_S`.
        """
        with self._changed:
            if not self._urgent:
                return
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: not self._urgent, min(left_s, self.PIECE_WAIT_S))
            finally:
                self._waiting -= 1

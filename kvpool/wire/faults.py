"""Unexpected errors in answering requests: which of them end a process, and which only a connection.

A request that may change state (any but a `ReadOnly`) ends the process on an unexpected error: the rules may be broken
half-way. One that changes nothing gets an `InternalError`, and its connection ends. Dispatchers of requests call
`Faults.answer` for every exception.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable

from kvpool.errors import InternalError, KvpoolError
from kvpool.wire.client import decode_client
from kvpool.wire.frame import Message, ReadOnly
from kvpool.wire.operator import OnNode
from kvpool.wire.peer import Operate

LOG_S = 60.0  # between two tracebacks of one kind of request

log = logging.getLogger("kvpool.daemon")


class Faults:
    """Counts unexpected errors by request, and logs the traceback of each kind of request once a minute. Thread-safe.

    counted: called with the name of each request that met one.
    """

    def __init__(
        self, clock: Callable[[], float], counted: Callable[[str], None] = lambda _: None
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._clock = clock
        self._counted = counted
        self._lock = threading.Lock()
        self._logged: dict[str, float] = {}  # when, by request

    def answer(self, message: Message, error: Exception) -> KvpoolError:
        """Return what the sender of `message` is told: a `KvpoolError` itself, or an `InternalError` for an unexpected
        error. Raises an unexpected one if the request may change state.
        """
        if isinstance(error, KvpoolError):
            return error
        if isinstance(message, OnNode | Operate):
            message = decode_client(message.request)
        if not isinstance(message, ReadOnly):
            raise error
        name = type(message).__name__
        with self._lock:
            now = self._clock()
            due = now - self._logged.get(name, now - LOG_S) >= LOG_S
            if due:
                self._logged[name] = now
        if due:
            log.error(
                "a %s met an unexpected error. Nothing was changed, and its connection ends. This is a bug of kvpool: "
                "report it with this traceback",
                name,
                exc_info=error,
            )
        self.count(name)
        return InternalError(
            f"an unexpected {type(error).__name__} kept the daemon from answering this {name}. Nothing was changed. This "
            "is a bug of kvpool: report it with the traceback in the daemon's log"
        )

    def count(self, name: str) -> None:
        """Count an unexpected error in answering a request of this name."""
        with self._lock:
            self.counts[name] += 1
        self._counted(name)

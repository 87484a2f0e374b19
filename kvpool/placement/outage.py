"""What a server does not do that it is asked: told once in the log, counted, and shown to operators. No I/O."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvpool.errors import KvpoolError

QUIET_S = 60.0  # between two lines about the same kind of error


class Outage:
    """The failing tasks of one server: it does not answer, or answers with a refusal. Event loop only.

    server: its name in the log. failures: of all tasks, since the start. clock: seconds, monotonic.
    A spell begins with the first task that fails and ends when none does; it is one line of the log for each kind
    of error. Tasks are few, named by the caller.
    """

    def __init__(self, server: str, log: logging.Logger, clock: Callable[[], float]) -> None:
        self.failures = 0
        self._server = server
        self._log = log
        self._clock = clock
        self._failing: dict[str, KvpoolError] = {}
        self._told: set[type[KvpoolError]] = set()  # in this spell
        self._told_at: dict[type[KvpoolError], float] = {}

    @property
    def error(self) -> str:
        """Of the task that failed last; empty while none does."""
        return str(next(reversed(self._failing.values()), ""))

    def failed(self, task: str, error: KvpoolError) -> None:
        """It did not do this."""
        self.failures += 1
        self._failing.pop(task, None)
        self._failing[task] = error.with_traceback(None)
        kind, now = type(error), self._clock()
        if kind in self._told:
            return
        self._told.add(kind)
        if now - self._told_at.get(kind, -QUIET_S) >= QUIET_S:
            self._told_at[kind] = now
            self._log.warning("%s does not do what this node asks: %s", self._server, error)

    def succeeded(self, task: str) -> None:
        """It did this."""
        if not self._failing:
            return
        self._failing.pop(task, None)
        if not self._failing:
            self._told.clear()
            self._log.info("%s does what this node asks again", self._server)

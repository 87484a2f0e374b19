"""Failed logins, counted by who and why until somebody is told: strangers may try thousands a second."""

from __future__ import annotations

import threading
from collections.abc import Callable

TELL_S = 1.0  # from the first one until they are told
SOURCES_MAX = 64  # told apart at a time
OTHERS = "others"
TEXT_CHARACTERS_MAX = 200  # of what strangers say

Failures = list[tuple[str, str, int]]
"""(source, reason, how many), as far as they are told apart."""


class FailedLogins:
    """Collects failed logins. Thread-safe.

    tell: gets them, `TELL_S` after the first of them. later: calls a function after some seconds.
    """

    def __init__(
        self,
        tell: Callable[[Failures], object],
        later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._tell = tell
        self._later = later
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], int] = {}

    def add(self, source: str, reason: str) -> None:
        """source: an address, or what else says where it came from."""
        at = source[:TEXT_CHARACTERS_MAX], reason[:TEXT_CHARACTERS_MAX]
        with self._lock:
            first = not self._counts
            if at not in self._counts and len(self._counts) >= SOURCES_MAX:
                at = OTHERS, ""
            self._counts[at] = self._counts.get(at, 0) + 1
        if first:
            try:
                self._later(TELL_S, self._flush)
            except RuntimeError:  # the machine has no thread left: these are not told
                with self._lock:
                    self._counts = {}

    def _flush(self) -> None:
        with self._lock:
            counts, self._counts = self._counts, {}
        self._tell([(*at, count) for at, count in counts.items()])

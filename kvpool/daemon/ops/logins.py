"""Failed logins of a node: counted, and told as events at a bounded pace. Event loop only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvpool.daemon.ops.event_log import LOGIN_FAILED, EventLog
from kvpool.plain_text import plain
from kvpool.security.failed_logins import Failures
from kvpool.token_bucket import TokenBucket

BURST = 20.0
A_SECOND = 1 / 60
"""More, and strangers would push operators' changes out of the events, and of the audit file."""
TEXT_CHARACTERS_MAX = 200


class Logins:
    """Where they failed: `socket` (clients), `http` (the gateway), `peer`.

    Beyond a burst one event a minute is made; the next one says how many there were in between.
    """

    def __init__(self, events: EventLog, clock: Callable[[], float]) -> None:
        self.failed: Counter[str] = Counter()
        self._events = events
        self._clock = clock
        self._pace = TokenBucket(A_SECOND, BURST, clock())
        self._unsaid = 0

    def fail(self, door: str, source: str, reason: str, count: int = 1) -> None:
        """source: an address, or what else says where it came from."""
        self.failed[door] += count
        now = self._clock()
        if self._pace.left(now) < 1:
            self._unsaid += count
            return
        self._pace.take(1, now)
        unsaid, self._unsaid = self._unsaid, 0
        more = {"unsaid": unsaid} if unsaid else {}
        self._events.note(
            LOGIN_FAILED,
            door=door,
            source=_short(source),
            reason=_short(reason),
            count=count,
            **more,
        )

    def fail_all(self, door: str, failures: Failures) -> None:
        """Those that a worker has collected."""
        for source, reason, count in failures:
            self.fail(door, source, reason, count)


def _short(text: str) -> str:
    return plain(text)[:TEXT_CHARACTERS_MAX]

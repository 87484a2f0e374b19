"""Delays after failures: back-off, and a circuit breaker. No I/O; time and randomness are arguments."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

DOUBLINGS_MAX = 64  # any wait is at its longest by then; a larger power does not fit a float


def backoff_s(first_s: float, longest_s: float, failures: int) -> float:
    """The wait after one more failure than these in a row: doubled each time, up to the longest."""
    return min(first_s * 2.0 ** min(failures, DOUBLINGS_MAX), longest_s)


class Backoff:
    """Consecutive failures, and the time of the next attempt. Not thread-safe.

    first_s, longest_s: of the waits. failures: since the last success. retry_at: by the clock of `failed`; 0
    while nothing has failed since the last success.
    """

    __slots__ = ("failures", "first_s", "longest_s", "retry_at")

    def __init__(self, first_s: float, longest_s: float) -> None:
        self.first_s = first_s
        self.longest_s = longest_s
        self.failures = 0
        self.retry_at = 0.0

    def failed(self, now: float, *, stretch: float = 1.0) -> float:
        """Seconds to wait from now on. stretch: factor on the wait, to spread many simultaneous failures."""
        wait_s = backoff_s(self.first_s, self.longest_s, self.failures) * stretch
        self.failures += 1
        self.retry_at = now + wait_s
        return wait_s

    def succeeded(self) -> None:
        """The next wait is the first one again."""
        self.failures = 0
        self.retry_at = 0.0

    def note(self, now: float, *, failed: bool) -> None:
        """Record how an attempt ended."""
        if failed:
            self.failed(now)
        else:
            self.succeeded()

    def due(self, now: float) -> bool:
        """Whether to try: no failure, or the wait is over."""
        return now >= self.retry_at


class BreakerState(StrEnum):
    """A breaker's state, from the last requests."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass(frozen=True, slots=True)
class BreakerRule:
    """After failures_max failures in a row no requests for backoff_s, twice that the next time, and so on."""

    failures_max: int
    backoff_s: float
    backoff_s_max: float


class Breaker:
    """Whether to send requests to a server, by the results of the last ones. Not thread-safe.

        closed     requests are sent. After `failures_max` failures in a row: open
        open       no requests before `retry_at`. The first one after it makes it half-open
        half-open  a success closes it, a failure opens it again, for longer

    opened: how often it has opened.
    """

    def __init__(self, rule: BreakerRule) -> None:
        self.state = BreakerState.CLOSED
        self._rule = rule
        self._failures = 0
        self._backoff = Backoff(rule.backoff_s, rule.backoff_s_max)
        self.opened = 0

    @property
    def retry_at(self) -> float:
        return self._backoff.retry_at

    def allows(self, now: float) -> bool:
        """Whether to send a request. If so, report its end: while it is half-open, no other is sent."""
        if self.state is BreakerState.OPEN and self._backoff.due(now):
            self.state = BreakerState.HALF_OPEN
            return True
        return self.state is BreakerState.CLOSED

    def succeeded(self) -> None:
        """A request has succeeded."""
        self._failures = 0
        self._backoff.succeeded()
        self.state = BreakerState.CLOSED

    def failed(self, now: float, *, for_certain: bool = False, stretch: float = 1.0) -> None:
        """A request has failed. Ignored if it was sent before the breaker opened.

        for_certain: the next one would fail as well, as with refused credentials. stretch: as for
        `Backoff.failed`.
        """
        if self.state is BreakerState.OPEN:
            return
        self._failures += 1
        half_open = self.state is BreakerState.HALF_OPEN
        if for_certain or half_open or self._failures >= self._rule.failures_max:
            self.state = BreakerState.OPEN
            self._failures = 0
            self.opened += 1
            self._backoff.failed(now, stretch=stretch)

    def abandoned(self) -> None:
        """A request was cancelled by the caller: no information."""
        if self.state is BreakerState.HALF_OPEN:
            self.state = BreakerState.OPEN

"""Whether an engine gets requests, by what became of the last ones. No I/O; the clock is an argument.

    closed     it gets them. After `failures_max` failures in a row, of requests or of probes: open
    open       it gets none for the backoff. Then it is probed: half-open if it is well, else open again
    half-open  it gets them. The first one that succeeds closes, the first one that fails opens

Each opening without a success in between doubles the backoff, up to its bound: no engine is dead for good.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """Of a breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass(frozen=True, slots=True)
class Rule:
    """See above; seconds."""

    failures_max: int
    backoff_s: float
    backoff_s_max: float


class Breaker:
    """Of one engine. It begins open, and due for a probe."""

    def __init__(self, rule: Rule, now: float) -> None:
        self._rule = rule
        self.state = State.OPEN
        self.probe_at = now
        self.openings = 0
        """Since the last success of a request."""
        self._requests_failed = 0
        self._probes_failed = 0

    @property
    def passes(self) -> bool:
        """Whether it gets requests."""
        return self.state is not State.OPEN

    def succeeded(self) -> None:
        """A request has done well."""
        self._requests_failed = 0
        self.openings = 0
        if self.state is State.HALF_OPEN:
            self.state = State.CLOSED

    def failed(self, now: float) -> None:
        """A request has failed, and it was the engine's fault. What was sent before it opened tells nothing."""
        if self.state is State.OPEN:
            return
        self._requests_failed += 1
        if self.state is State.HALF_OPEN or self._requests_failed >= self._rule.failures_max:
            self._open(now)

    def probed(self, well: bool, now: float, every_s: float) -> None:
        """A probe has ended. every_s: until the next one while the engine is well."""
        if not well:
            self._probes_failed += 1
            if self.state is not State.CLOSED or self._probes_failed >= self._rule.failures_max:
                self._open(now)
                return
        else:
            self._probes_failed = 0
            if self.state is State.OPEN:
                # One that was never open is taken at its word.
                self.state = State.HALF_OPEN if self.openings else State.CLOSED
        self.probe_at = now + every_s

    def _open(self, now: float) -> None:
        rule = self._rule
        self.state = State.OPEN
        self._requests_failed = 0
        self.probe_at = now + min(
            rule.backoff_s * 2.0 ** min(self.openings, 64), rule.backoff_s_max
        )
        self.openings += 1

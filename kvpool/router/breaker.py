"""Whether an engine gets requests, by the results of requests and probes. No I/O; the clock is an argument.

A `kvpool.retry.Breaker` that probes end: an open engine gets no requests until a probe succeeds. Then it gets
requests, and the first one's result closes or opens it again. No engine is dropped for good.
"""

from __future__ import annotations

from kvpool.retry import Breaker, BreakerRule, BreakerState


class EngineBreaker(Breaker):
    """For one engine. It starts open, and due for a probe. failures_max applies to consecutive probes, too."""

    def __init__(self, rule: BreakerRule, now: float) -> None:
        super().__init__(rule)
        self.state = BreakerState.OPEN
        self.probe_at = now
        self._probes_failed = 0

    @property
    def passes(self) -> bool:
        """Whether it gets requests."""
        return self.state is not BreakerState.OPEN

    def succeeded(self) -> None:
        """A request has succeeded. Only probes close an open breaker."""
        was = self.state
        super().succeeded()
        if was is BreakerState.OPEN:
            self.state = was

    def probed(self, well: bool, now: float, every_s: float) -> None:
        """A probe has ended. every_s: until the next one while the engine is healthy."""
        if not well:
            self._probes_failed += 1
            if (
                self.state is not BreakerState.CLOSED
                or self._probes_failed >= self._rule.failures_max
            ):
                self.open(now)
                return
        else:
            self._probes_failed = 0
            if self.state is BreakerState.OPEN:
                # The first success closes a new one.
                self.state = BreakerState.HALF_OPEN if self.openings else BreakerState.CLOSED
        self.probe_at = now + every_s

    def open(self, now: float, *, stretch: float = 1.0) -> None:
        super().open(now, stretch=stretch)
        self.probe_at = self.retry_at

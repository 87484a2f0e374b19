"""Whether an engine gets requests, by what became of requests and probes. No I/O; the clock is an argument.

A `kvpool.retry.Breaker` that probes end: an engine that is open gets nothing until one of them is well. Then it gets
requests, and the first of them that ends says whether it closes or opens again. No engine is dead for good.
"""

from __future__ import annotations

from kvpool.retry import Breaker, BreakerRule, BreakerState


class EngineBreaker(Breaker):
    """Of one engine. It begins open, and due for a probe. failures_max goes for probes in a row, too."""

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
        """A request has done well. What is open is closed by probes alone."""
        was = self.state
        super().succeeded()
        if was is BreakerState.OPEN:
            self.state = was

    def probed(self, well: bool, now: float, every_s: float) -> None:
        """A probe has ended. every_s: until the next one while the engine is well."""
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
                # One that was never open is taken at its word.
                self.state = BreakerState.HALF_OPEN if self.openings else BreakerState.CLOSED
        self.probe_at = now + every_s

    def open(self, now: float, *, stretch: float = 1.0) -> None:
        super().open(now, stretch=stretch)
        self.probe_at = self.retry_at

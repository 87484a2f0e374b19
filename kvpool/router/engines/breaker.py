"""Whether an engine gets requests, by the results of requests and probes. No I/O; the clock is an argument.

    closed    requests are sent
    open      no requests before a probe succeeds at `Backoff.retry_at` or later

An engine whose probes fail is dead: calls that wait for it are ended. Failures of requests open the breaker too, and
the engine stays alive: what it has accepted goes on. No engine is dropped for good.
"""

from __future__ import annotations

from collections.abc import Hashable

from kvpool.retry import Backoff, BreakerRule, BreakerState


class EngineBreaker:
    """The breaker of one engine. It starts open, and due for a probe. `failures_max` of the rule counts different
    requests since the last success, and consecutive probes.

    state: closed or open. alive: whether the last probes have succeeded. probe_at: when the next probe is due.
    """

    def __init__(self, rule: BreakerRule, now: float) -> None:
        self.state = BreakerState.OPEN
        self.alive = False
        self.probe_at = now
        self._failures_max = rule.failures_max
        self._backoff = Backoff(rule.backoff_s, rule.backoff_s_max)
        self._failed: set[Hashable] = set()
        self._probes_failed = 0

    @property
    def passes(self) -> bool:
        """Whether it gets requests."""
        return self.state is BreakerState.CLOSED

    def succeeded(self) -> None:
        """A request has succeeded. Only probes close an open breaker."""
        self._failed.clear()
        if self.passes:
            self._backoff.succeeded()

    def failed(self, request: Hashable, now: float) -> None:
        """A request has failed by the engine's fault. request: equal for equal requests.

        Ignored while the breaker is open: the request was sent before.
        """
        if not self.passes:
            return
        self._failed.add(request)
        if len(self._failed) >= self._failures_max:
            self._open(now)
            self.probe_at = min(self.probe_at, self._backoff.retry_at)

    def probed(self, well: bool, now: float, every_s: float) -> None:
        """A probe has ended. every_s: until the next one while the engine is alive."""
        self._probes_failed = 0 if well else self._probes_failed + 1
        if well:
            self.alive = True
            if self._backoff.due(now):
                self.state = BreakerState.CLOSED
        elif not self.alive or self._probes_failed >= self._failures_max:
            self.alive = False
            self._open(now)
            self.probe_at = self._backoff.retry_at
            return
        self.probe_at = now + every_s
        if not self._backoff.due(now):
            self.probe_at = min(self.probe_at, self._backoff.retry_at)

    def _open(self, now: float) -> None:
        self.state = BreakerState.OPEN
        self._failed.clear()
        self._backoff.failed(now)

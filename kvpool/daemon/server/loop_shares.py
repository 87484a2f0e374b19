"""How much of the event loop's time a tenant may use while others need it. Rules only: the clock is an argument."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvpool.token_bucket import TokenBucket

OPERATORS = ""
"""All of them together, as one who needs the loop."""
BURST_S = 0.04
"""A tenant may use so much at once."""
DEBT_S_MAX = 0.25
"""More than this is not held against it."""
RECENT_S = 1.0
"""Who has asked for something within this time needs the loop."""


class LoopShares:
    """A tenant may use half of the time and its part of the other half, which is divided evenly among the tenants.
    Who has used more waits, as long as any other tenant needs the loop; alone, a tenant has all of it.

    tenants: at least two. now: monotonic seconds.
    """

    def __init__(self, tenants: Collection[str]) -> None:
        self._rate = 0.5 + 0.5 / len(tenants)
        self._buckets: dict[str, TokenBucket] = {}  # of seconds
        self._asked: dict[str, float] = {}

    def used(self, tenant: str, now: float, seconds: float) -> None:
        """Some time was used until now. What operators use is not held against them: they may have come to end a flood."""
        if tenant != OPERATORS:
            self._bucket(tenant, now).take(seconds, now)

    def used_together(self, requests: Mapping[str, int], now: float, seconds: float) -> None:
        """Some time was used for requests of several, these many of each."""
        each = seconds / max(1, sum(requests.values()))
        for who, count in requests.items():
            self.used(who, now, each * count)

    def asks(self, who: str, now: float) -> None:
        """Somebody needs the loop: a tenant, or an operator, who is none."""
        self._asked[who] = now

    def wait_s(self, tenant: str, now: float) -> float:
        """The tenant asks for something: how long that has to wait; 0: not at all."""
        self.asks(tenant, now)
        bucket = self._bucket(tenant, now)
        wait_s = bucket.wait_s(0.0, now)
        if not wait_s:
            return 0.0
        if not any(now - at <= RECENT_S for other, at in self._asked.items() if other != tenant):
            bucket.take(bucket.left(now), now)  # what it used alone is not held against it
            return 0.0
        return wait_s

    def _bucket(self, tenant: str, now: float) -> TokenBucket:
        bucket = self._buckets.get(tenant)
        if bucket is None:
            bucket = TokenBucket(self._rate, BURST_S, now, debt=DEBT_S_MAX)
            self._buckets[tenant] = bucket
        return bucket

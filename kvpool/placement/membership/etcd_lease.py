"""The known state of a lease, and the standing that follows. No I/O; times are the caller's clock."""

from __future__ import annotations

from kvpool.placement.membership.base import Standing


class LeaseWatch:
    """When a lease was last confirmed, and whether etcd has been asked since.

    All times are those at which an attempt *began*: etcd counts from when it got the request, which is
    later; and an attempt from before the process was stopped tells nothing about the time after.
    """

    def __init__(self, ttl_s: float, confirmed: float) -> None:
        self._ttl_s = ttl_s
        self._confirmed = confirmed
        self._failed = float("-inf")

    def confirm(self, begun: float) -> None:
        """An attempt that began then was answered: the lease lives."""
        self._confirmed = max(self._confirmed, begun)

    def fail(self, begun: float) -> None:
        """An attempt that began then was not answered."""
        self._failed = max(self._failed, begun)

    def standing(self, now: float) -> Standing:
        """MEMBER, AWAY or UNSURE.

        Attempts to renew end within a quarter of `ttl_s` and follow one another closely. So while etcd is
        unavailable there is always a recent failure, also when the lease's time is over, and when the machine stalls
        once for a third of `ttl_s`: the node continues without a pause. If the last failure is old, no attempt was made:
        the process was stopped.
        """
        if now <= self._confirmed + self._ttl_s:
            return Standing.MEMBER
        if self._confirmed < self._failed and now <= self._failed + self._ttl_s:
            return Standing.AWAY
        return Standing.UNSURE

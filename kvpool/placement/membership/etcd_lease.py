"""The known state of a lease, the standing that follows, and when it is renewed. Times are the caller's clock."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kvpool.errors import KvpoolError
from kvpool.placement.membership.base import Standing

log = logging.getLogger("kvpool.placement")
RETRY_S = 0.5  # between attempts to renew, while they fail


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


async def keep_lease(
    watch: LeaseWatch,
    ttl_s: float,
    now: Callable[[], float],
    renew: Callable[[float], Awaitable[bool]],
    write: Callable[[], Awaitable[None]],
) -> None:
    """Renew a lease until etcd says that it has ended.

    renew: returns whether the lease lives, within so many seconds. write: writes what waits for the lease; one that
    hangs delays no renewal. Either may raise `KvpoolError`.
    """
    while True:
        begun = now()
        try:
            if not await renew(ttl_s / 4):
                return
        except KvpoolError as error:
            watch.fail(begun)
            log.debug("the lease was not renewed: %s", error)
            await asyncio.sleep(RETRY_S)
            continue
        watch.confirm(begun)
        try:
            async with asyncio.timeout(ttl_s / 3):
                await write()
        # A full database renews leases, but accepts no records.
        except (KvpoolError, TimeoutError) as error:
            log.debug("the record was not updated: %s", error)
        await asyncio.sleep(begun + ttl_s / 3 - now())

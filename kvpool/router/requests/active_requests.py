"""The requests of a router that are under way: how many there may be, and the wait for their end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from kvpool.router.config import RouterConfig
from kvpool.router.http.memory import NoRoom
from kvpool.router.records.metrics import Metrics
from kvpool.router.requests.intake import Rejected

DRAINING = "draining"
QUIET_S = 0.5
"""So long without a request, and none is under way: then a router that drains has ended."""


class ActiveRequests:
    """Requests under way. draining: whether no more are accepted, but for those on open connections with `reuse_port`."""

    def __init__(self, config: RouterConfig, metrics: Metrics) -> None:
        self._config = config
        self._metrics = metrics
        self.count = self._admitted = self._reading = 0
        self._empty = asyncio.Event()
        self.draining = False

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count a request, from before anything of it is parsed until it has ended. Raises `Rejected`."""
        if self.draining and not self._config.reuse_port:
            raise Rejected(503, "this router is shutting down", DRAINING, 1.0)
        if self.count >= self._config.requests_max:
            raise self._too_many()
        self._admitted += 1
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1
            if not self.count and self.draining:
                self._empty.set()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count a body while it arrives. Limited like requests in flight. Raises `Rejected`."""
        if self._reading >= self._config.requests_max:
            raise self._too_many()
        self._reading += 1
        try:
            yield
        finally:
            self._reading -= 1

    def _too_many(self) -> Rejected:
        self._metrics.rejections.labels("requests_max").inc()
        return Rejected(429, "too many requests are in flight", "requests_max", 1.0)

    def no_room(self, error: NoRoom) -> Rejected:
        """Return the rejection of a request that needs more memory than is free."""
        self._metrics.rejections.labels("memory").inc()
        return Rejected(429, str(error), "memory", 1.0)

    async def drained(self, within_s: float) -> bool:
        """Stop accepting requests, and wait for those in flight. Returns whether all have ended.

        With `reuse_port` those on open connections are still accepted. Answers say that their connection ends, so
        clients have a moment to ask once more on one that they kept, and be told so.
        """
        self.draining = True
        try:
            async with asyncio.timeout(within_s):
                before = -1
                while self._admitted != before:
                    before = self._admitted
                    self._empty.clear()
                    if self.count:
                        await self._empty.wait()
                    await asyncio.sleep(QUIET_S)
        except TimeoutError:
            return not self.count
        return True

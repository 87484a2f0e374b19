"""Keeps comparing the block hashes of engines with those that the router computes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from kvpool.errors import Unavailable
from kvpool.retry import Backoff
from kvpool.router.engines.hash_check import UNVERIFIED, VERIFIED
from kvpool.router.records.metrics import Metrics
from kvpool.router.upstream.upstream import EngineFailed

log = logging.getLogger("kvpool.router")

VERIFY_S, VERIFY_S_MAX = 1.0, 60.0
"""Pauses between attempts to verify an engine's hashes: the first, and the longest."""


class Verifies(Protocol):
    """The used interface of `EngineCatalog`."""

    async def verify(self, name: str) -> str: ...


class HashVerification:
    """One task for each engine that is alive. Event loop only."""

    def __init__(self, catalog: Verifies, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._catalog = catalog
        self._metrics = metrics
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by engine

    def begin(self, name: str) -> None:
        verify = self._keep_verified(name)
        self._tasks[name] = asyncio.create_task(verify, name=f"verify {name}")

    def end(self, name: str) -> None:
        self._tasks.pop(name).cancel()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_verified(self, name: str) -> None:
        """Compare an engine's hashes until they are verified, and again after they changed; until cancelled.

        The catalog logs the result and acts on it.
        """
        retry = Backoff(VERIFY_S, VERIFY_S_MAX)
        while True:
            try:
                standing = await self._catalog.verify(name)
            except (Unavailable, EngineFailed) as error:
                if not retry.failures:
                    log.warning(
                        "the block hashes of engine %s could not be verified and will be tried again: %s",
                        *(name, error),
                        extra={"engine": name},
                    )
                standing = UNVERIFIED
            self._metrics.engine_cache_known.labels(name).set(standing == VERIFIED)
            if standing == UNVERIFIED:
                await asyncio.sleep(retry.failed(self._clock()))
            else:
                retry.succeeded()
                await asyncio.sleep(VERIFY_S_MAX)

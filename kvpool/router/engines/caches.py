"""The contents of engines' own caches, from their KV events, in the prefix index.

One subscriber follows all engines, and handles gaps, replays and restarts (`placement.kv_events`). Changes of an
engine's blocks are taken from `EngineBlocks.take_changes`, some hundred at a time, so that requests
do not wait. A block of several cache groups counts as held once all required groups hold it.

Event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvpool.errors import ConfigError
from kvpool.placement.kv_events.subscriber import EngineFeed, EngineSource, EventSubscriber
from kvpool.router.upstream.specs import EngineSpec, gpu_holder
from kvpool.scheduler.index import PrefixIndex

log = logging.getLogger("kvpool.router")

ENGINES_MAX = 1024
SLICE_BLOCKS = 128
LAGS = 1024


@dataclass(frozen=True, slots=True)
class _Followed:
    """One engine. need: the groups that must hold a block, as bits. salt: turns its hashes into index keys."""

    source: EngineSource
    holder: str
    namespace: str
    need: int
    salt: int


class Caches:
    """See the module.

    wall: seconds, as in engines' events. on_lag: called with the seconds from an event to the index.
    """

    def __init__(
        self,
        index: PrefixIndex,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
        on_lag: Callable[[float], None],
    ) -> None:
        self._index = index
        self._wall = wall
        self._on_lag = on_lag
        self._followed: dict[str, _Followed] = {}
        self._dirty: dict[str, None] = {}
        self._awake = asyncio.Event()
        self._lags: deque[float] = deque(maxlen=LAGS)
        self._subscriber = EventSubscriber(
            (), clock=clock, changed=self._heard, engines_max=ENGINES_MAX, refused=self._refused
        )

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._subscriber.run())
            tasks.create_task(self._write())

    # ---- engines come and go -----------------------------------------------------------------------

    def follow(self, spec: EngineSpec, salt: int) -> None:
        """Maintain this engine's cache in the index from now on; also for one that has changed.

        The index always has a holder for it: blocks sent to it are expected there. Raises `ConfigError` for
        events that cannot be followed.
        """
        source = None
        need = sum(1 << group for group in spec.groups)
        if spec.events and spec.groups and spec.hashing is not None:
            source = EngineSource(spec.name, spec.events, spec.replay or None, spec.topic)
        known = self._followed.get(spec.name)
        namespace = spec.namespace.hex()
        wanted = (
            None if source is None else _Followed(source, gpu_holder(spec), namespace, need, salt)
        )
        if known is not None and known == wanted:
            return
        self.forget(spec.name)
        self._index.join(gpu_holder(spec), pool=False, namespace=namespace)
        if wanted is not None:
            self._subscriber.add(wanted.source)
            self._followed[spec.name] = wanted

    def forget(self, name: str) -> None:
        """An engine has left. Idempotent."""
        known = self._followed.pop(name, None)
        self._dirty.pop(name, None)
        if known is not None:
            self._subscriber.remove(name)
        self._index.leave(f"gpu:{name}")

    def feed(self, name: str) -> EngineFeed | None:
        """The feed of an engine; None: it is not followed."""
        return self._subscriber.engines.get(name)

    # ---- what they say -----------------------------------------------------------------------------

    def _refused(self, name: str, error: ConfigError) -> None:
        del self._followed[name]
        log.warning(
            "the cache contents of engine %s cannot be read: %s",
            name,
            error,
            extra={"engine": name},
        )

    def _heard(self, name: str) -> None:
        self._dirty[name] = None
        self._awake.set()

    async def _write(self) -> None:
        while True:
            if self._dirty:
                self._take(next(iter(self._dirty)))
                await asyncio.sleep(0)
            else:
                self._awake.clear()
                await self._awake.wait()

    def _take(self, name: str) -> None:
        """Apply some of an engine's changes."""
        followed, feed = self._followed[name], self._subscriber.engines[name]
        changes = feed.blocks.take_changes(SLICE_BLOCKS)
        index, holder, salt = self._index, followed.holder, followed.salt
        if changes.reset:
            index.join(holder, pool=False, namespace=followed.namespace)
        lag = max(0.0, self._wall() - feed.told_at)
        held: list[int] = []
        gone: list[int] = []
        for short, mask in zip(changes.hashes, changes.masks, strict=True):
            (held if mask & followed.need == followed.need else gone).append(short ^ salt)
        index.add(holder, held)
        index.discard(holder, gone)
        if not feed.blocks.has_changes:
            del self._dirty[name]
            if feed.told_at >= 0:
                self._lags.append(lag)
                self._on_lag(lag)

    def stats(self) -> dict[str, Any]:
        """Plain values: the lag from event to index over all engines, and the state of each one's feed."""
        lags = sorted(self._lags)
        return {
            "lag_p50_s": lags[len(lags) // 2] if lags else None,
            "lag_p99_s": lags[len(lags) * 99 // 100] if lags else None,
            "engines": {
                feed.source.name: feed.stats() for feed in self._subscriber.engines.values()
            },
        }

"""Sampled once a second: the age of evicted blocks, and the delay of this process. Event loop only.

The rules know ticks and no time; `Node.idle_age` converts them, fed by `Expiry`. One block of each evicted batch
stands for all of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from kvpool.daemon.core.events import Gone, Handlers, TierInfo
from kvpool.telemetry.histogram import AGES_S, Histogram
from kvpool.telemetry.node_stats import SampledStats

LOOK_S = 1.0
VICTIMS_MAX = 4096  # batches of evicted blocks between two looks; further ones are not sampled


class Sampler:
    """Samples of these tiers."""

    def __init__(self, clock: Callable[[], float], tiers: Iterable[str]) -> None:
        self._clock = clock
        self._stats = SampledStats(evicted_age_s={tier: Histogram(AGES_S) for tier in tiers})
        self._victims: list[tuple[TierInfo, int, int]] = []
        self.handlers: Handlers = {Gone: self._gone}

    def _gone(self, event: Gone) -> None:
        if event.evicted and len(self._victims) < VICTIMS_MAX:
            self._victims.append((event.tier, event.blocks[-1].used, len(event.blocks)))

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            due = self._clock() + LOOK_S
            await asyncio.sleep(LOOK_S)
            now = self._clock()
            self._stats.late_s.add(max(0.0, now - due))
            self.look(now)

    def look(self, now: float) -> None:
        """Record evictions since the last call."""
        victims, self._victims = self._victims, []
        for tier, used, blocks in victims:
            self._stats.evicted_age_s[tier.name].add(tier.ages.age_s(used, now), blocks)

    def stats(self) -> SampledStats:
        """What was sampled so far, of every tier."""
        return self._stats

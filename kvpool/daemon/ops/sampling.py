"""Sampled once a second: the age of evicted blocks, and the delay of this process. Event loop only.

The rules know ticks and no time; `Node.idle_age` converts them, fed by `Expiry`. One block of each evicted batch
stands for all of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from kvpool.daemon.core.node import Node
from kvpool.telemetry.histogram import AGES_S, Histogram
from kvpool.telemetry.node_stats import SampledStats

LOOK_S = 1.0


class Sampler:
    """rules: of all tiers, each with its name; they may change between calls."""

    def __init__(
        self, rules: Callable[[], Iterable[tuple[str, Node]]], clock: Callable[[], float]
    ) -> None:
        self._rules = rules
        self._clock = clock
        self._stats = SampledStats()

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
        for tier, node in self._rules():
            seen = self._stats.evicted_age_s.setdefault(tier, Histogram(AGES_S))
            for used, blocks in node.eviction.take_victims():
                seen.add(node.idle_age.age_s(used, now), blocks)

    def stats(self) -> SampledStats:
        """What was sampled so far, of every tier."""
        for tier, _ in self._rules():
            self._stats.evicted_age_s.setdefault(tier, Histogram(AGES_S))
        return self._stats

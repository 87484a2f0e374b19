"""The last hour: each node's activity, a sample every few seconds, in this process's memory."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable

import msgspec

from kvpool.admin.cluster_view import Answers, Cluster
from kvpool.admin.types import Activity, History, HotList, Sample
from kvpool.errors import KvpoolError
from kvpool.telemetry.node_stats import HotPrefix, NodeStats
from kvpool.telemetry.rates import Counted, count, fills, rates

EVERY_S = 5.0
SAMPLES_MAX = 720  # an hour
NODES_MAX = 256  # in a sample
TENANTS_MAX = 1000


class Sampler:
    """wall: seconds since 1970."""

    def __init__(self, cluster: Cluster, wall: Callable[[], float]) -> None:
        self._cluster = cluster
        self._wall = wall
        self._before: dict[str, Counted] = {}
        self._taken = 0.0
        self._samples: deque[Sample] = deque(maxlen=SAMPLES_MAX)
        self._heat: deque[tuple[float, float, Counter[str]]] = deque(maxlen=SAMPLES_MAX)

    async def run(self) -> None:
        """Until cancelled."""
        clock = self._cluster.clock
        due = clock()
        while True:
            try:
                self.take(await self._cluster.stats(), clock(), self._wall())
            except KvpoolError:
                pass  # nothing is known of this moment
            due = max(due + EVERY_S, clock())
            await asyncio.sleep(due - clock())

    def take(self, answers: Answers[NodeStats], now: float, at_s: float) -> None:
        """Add a sample."""
        nodes, heat, seconds = {}, Counter[str](), 0.0
        counted = {}
        for node, stats in sorted(answers.nodes.items())[:NODES_MAX]:
            new = counted[node] = count(stats)
            old, taken = self._before.get(node), now - self._taken
            done = rates(old, new, taken)
            used = {tier: fill.used_bytes for tier, fill in fills(stats).items()}
            nodes[node] = Activity(**msgspec.structs.asdict(done), tiers=used)
            if old is not None and done.read_bytes_s is not None:
                seconds = max(seconds, taken)
                for tenant, nbytes in list(new.read_bytes_of.items())[:TENANTS_MAX]:
                    heat[tenant] += nbytes - old.read_bytes_of.get(tenant, 0)
        self._before, self._taken = counted, now
        self._samples.append(Sample(round(at_s, 3), nodes))
        self._heat.append((at_s, seconds, heat))

    def history(self, seconds: float) -> History:
        """The samples of the last given seconds."""
        oldest = self._wall() - seconds
        return History(EVERY_S, [sample for sample in self._samples if sample.at_s >= oldest])

    def hot(self, seconds: float, limit: int, sees: Callable[[str], bool]) -> HotList:
        """What each tenant has read a second, the most first."""
        oldest = self._wall() - seconds
        some = [each for each in self._heat if each[0] >= oldest]
        over = sum(each[1] for each in some)
        total = sum((heat for _, _, heat in some), Counter[str]())
        items = [
            HotPrefix(tenant, read_bytes_s=round(nbytes / over, 1))
            for tenant, nbytes in sorted(total.items(), key=lambda item: (-item[1], item[0]))
            if over and sees(tenant)
        ]
        return HotList("tenant", round(over, 3), items[:limit])

"""The last hour: each node's activity, a sample every few seconds, in this process's memory."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvpool.admin.cluster_view import Answers, Cluster
from kvpool.admin.types import History, HotList, Rates, Sample
from kvpool.errors import KvpoolError
from kvpool.telemetry.memory_stats import Traffic
from kvpool.telemetry.node_stats import HotPrefix, NodeStats

EVERY_S = 5.0
SAMPLES_MAX = 720  # an hour
NODES_MAX = 256  # in a sample
TENANTS_MAX = 1000


@dataclass(frozen=True, slots=True)
class Counted:
    """Counters of one node at one moment. reads: blocks asked for and had. tenants: bytes that each has read."""

    at: float
    incarnation: str
    put_bytes: int
    read_bytes: int
    pulled_bytes: int
    had: int
    missed: int
    tiers: dict[str, int]
    tenants: dict[str, int]


class Sampler:
    """wall: seconds since 1970."""

    def __init__(self, cluster: Cluster, wall: Callable[[], float]) -> None:
        self._cluster = cluster
        self._wall = wall
        self._before: dict[str, Counted] = {}
        self._samples: deque[Sample] = deque(maxlen=SAMPLES_MAX)
        self._heat: deque[tuple[float, float, dict[str, float]]] = deque(maxlen=SAMPLES_MAX)

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
        counted = {}
        for node, stats in sorted(answers.by_node.items())[:NODES_MAX]:
            counted[node] = count(stats, now)
        nodes, heat, seconds = {}, dict[str, float](), 0.0
        for node, new in counted.items():
            old = self._before.get(node)
            if old is not None and old.incarnation != new.incarnation:
                old = None
            nodes[node] = rates(old, new)
            if old is not None:
                seconds = max(seconds, new.at - old.at)
                for tenant, nbytes in new.tenants.items():
                    more = nbytes - old.tenants.get(tenant, 0)
                    heat[tenant] = heat.get(tenant, 0.0) + more
        self._before = counted
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
        total: dict[str, float] = {}
        for _, _, heat in some:
            for tenant, nbytes in heat.items():
                total[tenant] = total.get(tenant, 0.0) + nbytes
        items = [
            HotPrefix(tenant, read_bytes_s=round(nbytes / over, 1))
            for tenant, nbytes in sorted(total.items(), key=lambda item: (-item[1], item[0]))
            if over and sees(tenant)
        ]
        return HotList("tenant", round(over, 3), items[:limit])


def count(stats: NodeStats, now: float) -> Counted:
    """What `Inspect` says, as far as it is charted."""
    traffic = {name: tenant.traffic for name, tenant in stats.tenants.items()}
    reads = [each.reads for each in traffic.values()]
    tiers = {"dram": sum(tenant.space.bytes_used for tenant in stats.tenants.values())}
    for tier, places in stats.tiers.places().items():
        if places:
            tiers[tier] = sum(place.used_bytes for place in places)
    return Counted(
        at=now,
        incarnation=stats.incarnation,
        put_bytes=sum(each.put_bytes for each in traffic.values()),
        read_bytes=sum(_read(each) for each in traffic.values()),
        pulled_bytes=stats.counters.pulled_bytes,
        had=sum(each.local + each.fetched for each in reads),
        missed=sum(each.missed for each in reads),
        tiers=tiers,
        tenants={name: _read(each) for name, each in list(traffic.items())[:TENANTS_MAX]},
    )


def _read(traffic: Traffic) -> int:
    return traffic.read_bytes + traffic.device_read_bytes


def rates(old: Counted | None, new: Counted) -> Rates:
    """What was done between the two. old: None: nothing is known."""
    if old is None or new.at <= old.at:
        return Rates(None, None, None, None, new.tiers)
    seconds = new.at - old.at
    had, missed = new.had - old.had, new.missed - old.missed
    return Rates(
        put_bytes_s=round((new.put_bytes - old.put_bytes) / seconds, 1),
        read_bytes_s=round((new.read_bytes - old.read_bytes) / seconds, 1),
        pulled_bytes_s=round((new.pulled_bytes - old.pulled_bytes) / seconds, 1),
        hit_rate=round(had / (had + missed), 4) if had + missed else None,
        tiers=new.tiers,
    )

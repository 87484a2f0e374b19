"""What more memory would give: reuse distances as nodes measure them, and the hit rates that follow. Pure.

A hit rate is a share of the blocks that were asked for. It is that of one memory that evicts the least recently used,
which the pool's policies come near or exceed; blocks that were not put before can hit in no memory, which is the ceiling.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from kvpool.telemetry.memory_stats import Missed
from kvpool.telemetry.node_stats import NodeStats

PER_OCTAVE = 4
TIMES = (0.25, 0.35, 0.5, 0.7, 0.85, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0, 32.0, math.inf)
"""Of the present memory: for these a curve has points."""
_CONFIDENT = 1.96  # standard deviations: 95 %
_TOGETHER = (
    2.0  # a block is read several times: so many followed ones tell as much as one read by itself
)


BUCKET_MAX = PER_OCTAVE * 63

_Weight = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
_Bucket = Annotated[int, msgspec.Meta(ge=0, le=BUCKET_MAX)]


class Reuse(msgspec.Struct):
    """What a node has measured for a tenant; reads of long ago count less.

    asked: blocks that clients asked for. missed: of these, those that they did not get, and would not have declined.
    first: those that nobody had put before. distances: others, by the bucket of their reuse distance. share: of all
    blocks, those that are followed now; samples: hashes of those of them that were put here, 8 bytes each. skipped: came
    too fast to be looked at.
    """

    asked: _Weight = 0.0
    missed: _Weight = 0.0
    first: _Weight = 0.0
    distances: dict[_Bucket, _Weight] = msgspec.field(default_factory=dict)
    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    samples: Annotated[bytes, msgspec.Meta(max_length=1 << 20)] = b""
    skipped: Annotated[int, msgspec.Meta(ge=0)] = 0

    def fade(self, share: float) -> None:
        """All of it counts so much less."""
        self.asked *= share
        self.missed *= share
        self.first *= share
        self.distances = {bucket: share * weight for bucket, weight in self.distances.items()}


class Memory(msgspec.Struct, frozen=True):
    """What one node has for a tenant: bytes of memory and of disks, and what was measured there."""

    node: str
    dram_bytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    ssd_bytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    reuse: Reuse


class Point(msgspec.Struct, frozen=True):
    """times: of the present memory, null: infinitely much. dram_bytes: of all nodes together, null as well."""

    times: float | None
    dram_bytes: int | None
    hit: float


class Curve(msgspec.Struct, frozen=True):
    """The hit rate over memory. hit: as measured now; null: nothing was asked. ceiling: with infinite memory.

    error: of each point, with 95 % confidence, from the number of followed blocks (`samples`). asked: blocks, those of
    long ago less. skipped: not looked at.
    """

    dram_bytes: int
    ssd_bytes: int
    asked: float
    hit: float | None
    ceiling: float
    error: float
    samples: int
    skipped: int
    points: list[Point]

    def at(self, times: float) -> float:
        """The hit rate at one of `TIMES`."""
        wanted = None if math.isinf(times) else times
        return next(point.hit for point in self.points if point.times == wanted)


class MemoryPlan(msgspec.Struct, frozen=True):
    """What more memory would give a tenant, all nodes together."""

    tenant: str
    nodes: int
    """That answered."""
    curve: Curve
    misses: dict[str, Missed]
    """By reason, since the nodes started."""
    unreachable: dict[str, str]
    """Nodes that did not answer, and why."""


class _Steps(NamedTuple):
    """A node's distances in order, and the share of its blocks with at most each."""

    bytes: list[float]
    shares: list[float]


def bucket_of(nbytes: float) -> int:
    """The bucket of a distance: `PER_OCTAVE` for each doubling."""
    return min(BUCKET_MAX, math.ceil(PER_OCTAVE * math.log2(max(1.0, nbytes)) - 1e-9))


def bytes_of(bucket: int) -> float:
    """The largest distance in a bucket."""
    return float(2.0 ** (bucket / PER_OCTAVE))


def curve(memories: Sequence[Memory], times: Sequence[float] = TIMES) -> Curve:
    """The curve of several nodes together.

    Each node is taken to keep what its own clients put and read, in memory of its own that grows with all others': so
    they need not be equal. What was put at several nodes, since none of them had it any more, is found by their samples:
    with more memory it is a hit of the pool, in the proportion of other hits.
    """
    dram = sum(memory.dram_bytes for memory in memories)
    ssd = sum(memory.ssd_bytes for memory in memories)
    asked = sum(memory.reuse.asked for memory in memories)
    first = sum(memory.reuse.first for memory in memories)
    missed = sum(memory.reuse.missed for memory in memories)
    again = _asked_elsewhere([memory.reuse for memory in memories]) * first
    steps = [(memory, _steps(memory.reuse)) for memory in memories]
    inner = sum(reads.shares[-1] * memory.reuse.asked for memory, reads in steps if reads.shares)
    ceiling = min(1.0, (inner + again) / asked) if asked else 0.0
    more = ceiling * asked / inner if inner else 1.0
    points = []
    for each in times:
        if math.isinf(each):
            points.append(Point(None, None, ceiling))
            continue
        hits = sum(
            _share_within(reads, each * memory.dram_bytes + memory.ssd_bytes) * memory.reuse.asked
            for memory, reads in steps
        )
        hit = min(ceiling, more * hits / asked) if asked else 0.0
        points.append(Point(each, int(each * dram), hit))
    samples = sum(len(memory.reuse.samples) // 8 for memory in memories)
    worst = max((point.hit * (1 - point.hit) for point in points), default=0.0)
    return Curve(
        dram_bytes=dram,
        ssd_bytes=ssd,
        asked=asked,
        hit=max(0.0, 1 - missed / asked) if asked else None,
        ceiling=ceiling,
        error=min(1.0, _CONFIDENT * math.sqrt(_TOGETHER * worst / samples)) if samples else 1.0,
        samples=samples,
        skipped=sum(memory.reuse.skipped for memory in memories),
        points=points,
    )


def _steps(reuse: Reuse) -> _Steps:
    """SHARDS' correction included: what the sample has too few or too many of is of the most read blocks."""
    if not reuse.asked:
        return _Steps([], [])
    followed = reuse.first + sum(reuse.distances.values())
    distances = {**reuse.distances}
    distances[0] = distances.get(0, 0.0) + reuse.asked - followed
    buckets = sorted(distances)
    weights = [distances[bucket] for bucket in buckets]
    total = np.clip(np.cumsum(weights) / reuse.asked, 0.0, 1.0)
    return _Steps([bytes_of(bucket) for bucket in buckets], np.maximum.accumulate(total).tolist())


def _share_within(steps: _Steps, nbytes: float) -> float:
    """Of the blocks asked for, those with at most this distance; within a bucket they are taken to be spread evenly."""
    if not steps.shares:
        return 0.0
    at = int(np.searchsorted(steps.bytes, nbytes, side="right"))
    below = steps.shares[at - 1] if at else 0.0
    if at == len(steps.bytes):
        return below
    end = steps.bytes[at]
    begin = end / 2 ** (1 / PER_OCTAVE)
    within = min(1.0, max(0.0, (nbytes - begin) / (end - begin)))
    return below + within * (max(0.0, steps.shares[at]) - below)


def _asked_elsewhere(found: Sequence[Reuse]) -> float:
    """Of the blocks that were new to a node, the share that was not new to all of them together."""
    if len(found) < 2:
        return 0.0
    least = min(each.share for each in found)
    limit = np.uint64(int(least * (1 << 32)))
    odd = np.uint64(0x9E3779B97F4A7C15)
    kept = []
    for each in found:
        idents = np.frombuffer(each.samples[: len(each.samples) // 8 * 8], dtype=np.uint64)
        kept.append(idents[(idents * odd) >> np.uint64(32) < limit])
    total = sum(map(len, kept))
    return 1 - len(np.unique(np.concatenate(kept))) / total if total else 0.0


def misses_of(nodes: Iterable[NodeStats], tenant: str) -> dict[str, Missed]:
    """A tenant's misses by reason, of all its namespaces on these nodes."""
    found: dict[str, Missed] = {}
    for stats in nodes:
        known = stats.tenants.get(tenant)
        for namespace in () if known is None else known.namespaces.values():
            for reason, missed in namespace.misses.items():
                total = found.setdefault(reason, Missed())
                total.requests += missed.requests
                total.blocks += missed.blocks
    return found

"""What a node does in a second, from two looks at its statistics. Pure."""

from __future__ import annotations

import msgspec

from kvpool.telemetry.node_stats import NodeStats


class Counted(msgspec.Struct, frozen=True):
    """What a node has counted since its start."""

    incarnation: str
    put_bytes: int
    read_bytes: int
    pulled_bytes: int
    had_blocks: int
    """Blocks that reads asked for and got."""
    missed_blocks: int
    read_bytes_of: dict[str, int]
    """By tenant."""


class Rates(msgspec.Struct, frozen=True):
    """What a node has done a second since the look before; null: not known."""

    put_bytes_s: float | None = None
    read_bytes_s: float | None = None
    pulled_bytes_s: float | None = None
    hit_rate: float | None = None
    """Of the blocks that reads asked for; null as well where nobody asked."""


class Fill(msgspec.Struct, frozen=True):
    """How full a tier is."""

    used_bytes: int
    size_bytes: int


def count(stats: NodeStats) -> Counted:
    """What a node has counted, all tenants together."""
    traffic = {name: tenant.traffic for name, tenant in stats.tenants.items()}
    reads = [each.reads for each in traffic.values()]
    read = {name: each.read_bytes + each.device_read_bytes for name, each in traffic.items()}
    return Counted(
        incarnation=stats.incarnation,
        put_bytes=sum(each.put_bytes for each in traffic.values()),
        read_bytes=sum(read.values()),
        pulled_bytes=stats.counters.pulled_bytes,
        had_blocks=sum(each.local + each.fetched for each in reads),
        missed_blocks=sum(each.missed for each in reads),
        read_bytes_of=read,
    )


def rates(old: Counted | None, new: Counted, seconds: float) -> Rates:
    """What was done between the two looks. Nothing is known without the first one, and of another life of the node."""
    if old is None or old.incarnation != new.incarnation or seconds <= 0:
        return Rates()
    had, missed = new.had_blocks - old.had_blocks, new.missed_blocks - old.missed_blocks
    return Rates(
        put_bytes_s=round((new.put_bytes - old.put_bytes) / seconds, 1),
        read_bytes_s=round((new.read_bytes - old.read_bytes) / seconds, 1),
        pulled_bytes_s=round((new.pulled_bytes - old.pulled_bytes) / seconds, 1),
        hit_rate=round(had / (had + missed), 4) if had + missed else None,
    )


def fills(stats: NodeStats) -> dict[str, Fill]:
    """How full each tier is, all tenants together."""
    spaces = [tenant.space for tenant in stats.tenants.values()]
    found = {"dram": Fill(sum(s.bytes_used for s in spaces), sum(s.size for s in spaces))}
    for tier, places in stats.tiers.places().items():
        if places:
            sizes = (place.segment_bytes or place.size_bytes for place in places)
            found[tier] = Fill(sum(place.used_bytes for place in places), sum(sizes))
    return found

"""The tiers of a node, as `kvpool status` prints them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.markup import escape
from rich.text import Text

from kvpool.cli.render.text import (
    DIGEST_SHOWN,
    Part,
    Parts,
    Rows,
    count,
    duration,
    size_text,
    used_text,
)
from kvpool.telemetry.memory_stats import EnginesStats, EngineStats, Usage
from kvpool.telemetry.node_stats import NodeStats
from kvpool.telemetry.tier_stats import PlaceStats, SsdStats, TiersStats

SAVED_FROM = 0.99  # of the raw bytes; slots are whole pages, and hide what is less
_STATES = {
    "serving": "green",
    "followed": "green",
    "opening": "yellow",
    "read-only": "yellow",
    "failing": "yellow",
    "silent": "yellow",
    "outdated": "yellow",
    "failed": "red",
}


def places(stats: NodeStats, tenant: str) -> list[tuple[str, PlaceStats]]:
    """The places where this node keeps blocks, by tier, the fastest first. Of memory the tenant's segment."""
    mine, counters = stats.tenants[tenant], stats.counters
    memory = PlaceStats(
        path=f"segment of tenant {tenant}",
        state="serving",
        size_bytes=mine.segment_bytes,
        used_bytes=mine.space.bytes_used,
        blocks=mine.blocks,
        read_bytes=counters.leased_bytes,
        written_bytes=counters.committed_bytes,
        mismatches=counters.checksum_mismatches,
    )
    tiers = stats.tiers
    below: dict[str, Sequence[PlaceStats]] = {
        "device": tiers.device,
        "ssd": tiers.ssd,
        "object": tiers.object,
    }
    return [("dram", memory), *((tier, each) for tier, some in below.items() for each in some)]


def _engine_state(engine: EngineStats) -> str:
    if engine.error:
        return "failed"
    if engine.outdated:
        return "outdated"
    return "followed" if engine.connected else "silent"


def tiers_view(stats: NodeStats, tenant: str) -> Parts:
    """Where this node keeps blocks."""
    yield _tiers(stats, tenant)
    yield Text()
    yield _usage(stats.tenants[tenant].usage, tenant)
    remarks = [
        *_engine_remarks(stats.tenants[tenant].engines),
        *_packing(stats.tiers.ssd),
        *_remarks(stats.tiers),
    ]
    if remarks:
        yield Text()
    yield from remarks


def _tiers(stats: NodeStats, tenant: str) -> Part:
    heads = [
        "tier",
        "where",
        "state",
        *[">used", ">blocks", ">read", ">written", ">damaged", ">errors"],
    ]
    rows: list[list[str | Text]] = []
    for engine in stats.tenants[tenant].engines.followed:
        # Of an engine's own cache only events are known.
        at_least = "" if engine.complete else "at least "
        blocks = f"{at_least}{engine.blocks:,}"
        state = _styled(_engine_state(engine))
        rows.append(["gpu", escape(engine.endpoint), state, "", blocks, "", "", "", ""])
    for tier, place in places(stats, tenant):
        size = getattr(place, "segment_bytes", 0) or place.size_bytes
        row: list[str | Text] = [
            tier,
            escape(place.path),
            _styled(place.state),
            used_text(place.used_bytes, size),
            f"{place.blocks:,}",
            size_text(place.read_bytes),
            size_text(place.written_bytes),
            _trouble(place.mismatches),
            _trouble(place.read_errors + place.write_errors),
        ]
        rows.append(row)
    return Rows("Tiers", heads, rows, wraps={"where"}, below={"where"})


def _styled(state: str) -> Text:
    return Text(state, style=_STATES.get(state, ""))


def _trouble(number: int) -> Text:
    return Text(f"{number:,}", style="yellow" if number else "")


def _usage(usage: Usage, tenant: str) -> Part:
    """What the tenant has of each tier, and its namespaces of that; quotas where there are some."""
    rows: list[list[str]] = []
    for tier, places in (("dram", usage.dram), ("ssd", usage.ssd)):
        for place in places:
            where = escape(place.where)
            used, most = size_text(place.used_bytes), size_text(place.part_bytes)
            rows.append([f"tenant {tenant}", tier, where, used, most])
            for digest, space in sorted(place.namespaces.items()):
                quota = size_text(space.quota_bytes) if space.quota_bytes else ""
                name = f"  namespace {digest[:DIGEST_SHOWN]}"
                rows.append([name, tier, where, size_text(space.held_bytes), quota])
    heads = ["by", "tier", "where", ">used", ">at most"]
    return Rows("Used", heads, rows, wraps={"where"}, below={"where"})


def _warning(text: str) -> Text:
    return Text(text, style="yellow")


def _engine_remarks(engines: EnginesStats) -> Iterator[Text]:
    for engine in engines.followed:
        where = engine.endpoint
        if engine.error:
            yield _warning(engine.error)
        elif engine.outdated:
            yield _warning(f"{where}: its weights are not those of the namespace any more")
        elif engine.age_s is None:
            yield Text(f"{where} has not been heard of yet")
        else:
            yield Text(f"{where} was heard of {duration(engine.age_s)} ago")


def _packing(disks: Iterable[SsdStats]) -> Iterator[Text]:
    """What codecs make of the blocks on each disk."""
    for disk in disks:
        where, raw, stored = disk.path, disk.raw_bytes, disk.stored_bytes
        if disk.packed_blocks or disk.unpacked_blocks or stored < raw * SAVED_FROM:
            yield Text(
                f"{where} holds {size_text(raw)} of blocks in {size_text(stored)} "
                f"({raw / max(stored, 1):.2f} to 1); since its start {disk.packed_blocks:,} were "
                f"written smaller and {disk.unpacked_blocks:,} were not worth it"
            )
        if disk.undecoded_blocks:
            blocks = count(disk.undecoded_blocks, "block")
            yield _warning(f"{where}: {blocks} could not be decoded, counted as damaged")
        if disk.retired_bytes:
            lost = size_text(disk.retired_bytes)
            yield _warning(
                f"{where}: {lost} failed repeatedly and are not used any more: it may be dying"
            )
        if disk.codec_error:
            yield _warning(f"{where}: {disk.codec_error}")


def _remarks(tiers: TiersStats) -> Iterator[Text]:
    """What is out of the ordinary."""
    for place in (*tiers.device, *tiers.ssd, *tiers.object):
        if place.error:
            yield _warning(f"{place.path} is {place.state}: {place.error}")
        elif place in tiers.ssd and place.state == "serving" and not place.direct:
            yield _warning(
                f"{place.path} goes through the page cache, which is slower: its file system knows no O_DIRECT"
            )
        if place.encrypted:
            yield Text(f"{place.path}: blocks are encrypted")
    for store in tiers.object:
        if store.stale_blocks:
            yield Text(f"{count(store.stale_blocks, 'block')} not found in the object named for it")
    for key, what in (
        ("over_budget_blocks", "not written: the day's budget (ssd_bytes_per_day) is used up"),
        (
            "once_used_blocks",
            "not written: the day's budget is short, and they were read by nobody",
        ),
        ("dropped_writes", "gone from memory before they could be written"),
    ):
        if number := getattr(tiers, key):
            yield Text(f"{count(number, 'block')} {what}")

"""What `kvpool tiers` and `kvpool job start scrub` print."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.text import Text

from kvpool.cli.render.text import (
    DIGEST_SHOWN,
    count,
    duration,
    make_console,
    make_table,
    size_text,
    used_text,
)
from kvpool.telemetry.memory_stats import EnginesStats, EngineStats, Usage
from kvpool.telemetry.node_stats import NodeStats
from kvpool.telemetry.tier_stats import PlaceStats, SsdStats, TiersStats

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


SCRUB_BLOCKS = 64  # asked for at a time
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


def tier_rows(stats: NodeStats, tenant: str) -> list[dict[str, Any]]:
    """One row a segment, the fastest tier first; plain values.

    Of an engine's own cache only events are known: how many blocks, or at least how many (`complete`), and
    how long ago it was heard of. `usage`: what the tenant and its namespaces have of memory, or of a disk;
    null while that is not open.
    """
    on_disks = {place.where: place for place in stats.tenants[tenant].usage.ssd}
    mine = stats.tenants[tenant]
    counters = stats.counters
    unknown = dict.fromkeys(
        ("size_bytes", "used_bytes", "read_bytes", "written_bytes", "damaged", "errors")
    )
    rows = [
        {
            "tier": "gpu",
            "where": engine.endpoint,
            "state": _engine_state(engine),
            "error": engine.error,
            **unknown,
            "blocks": engine.blocks,
            "complete": engine.complete,
            "age_s": engine.age_s,
        }
        for engine in mine.engines.followed
    ]
    rows += [
        {
            "tier": "dram",
            "where": f"segment of tenant {tenant}",
            "state": "serving",
            "error": "",
            "size_bytes": mine.segment_bytes,
            "used_bytes": mine.space.bytes_used,
            "blocks": mine.blocks,
            "read_bytes": counters.leased_bytes,
            "written_bytes": counters.committed_bytes,
            "damaged": counters.checksum_mismatches,
            "errors": 0,
            "usage": next(iter(mine.usage.dram), None),
        }
    ]
    rows += [_place_row("device", device, device.segment_bytes) for device in stats.tiers.device]
    rows += [
        _place_row("ssd", disk, disk.segment_bytes)
        | {
            "raw_bytes": disk.raw_bytes,
            "stored_bytes": disk.stored_bytes,
            "packed_blocks": disk.packed_blocks,
            "unpacked_blocks": disk.unpacked_blocks,
            "undecoded_blocks": disk.undecoded_blocks,
            "retired_bytes": disk.retired_bytes,
            "usage": on_disks.get(disk.path),
        }
        for disk in stats.tiers.ssd
    ]
    rows += [_place_row("object", store, 0) for store in stats.tiers.object]
    return rows


def _place_row(tier: str, place: PlaceStats, segment_bytes: int) -> dict[str, Any]:
    return {
        "tier": tier,
        "where": place.path,
        "state": place.state,
        "error": place.error,
        "size_bytes": segment_bytes or place.size_bytes,
        "used_bytes": place.used_bytes,
        "blocks": place.blocks,
        "read_bytes": place.read_bytes,
        "written_bytes": place.written_bytes,
        "damaged": place.mismatches,
        "errors": place.read_errors + place.write_errors,
    }


def _engine_state(engine: EngineStats) -> str:
    if engine.error:
        return "failed"
    if engine.outdated:
        return "outdated"
    return "followed" if engine.connected else "silent"


def show_tiers(stats: NodeStats, tenant: str, console: Console | None = None) -> None:
    """Print where this node keeps blocks."""
    console = console or make_console()
    console.print(_tiers(tier_rows(stats, tenant)))
    console.print()
    console.print(_usage(stats.tenants[tenant].usage, tenant))
    remarks = [
        *_engine_remarks(stats.tenants[tenant].engines),
        *_packing(stats.tiers.ssd),
        *_remarks(stats.tiers),
    ]
    if remarks:
        console.print()
    for line in remarks:
        console.print(line)


def _tiers(rows: list[dict[str, Any]]) -> Table:
    table = make_table(
        "", "tier", "where", "state", ">used", ">blocks", ">read", ">written", ">damaged", ">errors"
    )
    table.columns[1].overflow = "fold"
    for row in rows:
        state = Text(row["state"], style=_STATES[row["state"]])
        if row["tier"] == "gpu":
            at_least = "" if row["complete"] else "at least "
            table.add_row("gpu", escape(row["where"]), state, "", f"{at_least}{row['blocks']:,}")
            continue
        table.add_row(
            row["tier"],
            escape(row["where"]),
            state,
            used_text(row["used_bytes"], row["size_bytes"]),
            f"{row['blocks']:,}",
            size_text(row["read_bytes"]),
            size_text(row["written_bytes"]),
            Text(f"{row['damaged']:,}", style="yellow" if row["damaged"] else ""),
            Text(f"{row['errors']:,}", style="yellow" if row["errors"] else ""),
        )
    return table


def _usage(usage: Usage, tenant: str) -> Table:
    """What the tenant has of each tier, and its namespaces of that; quotas where there are some."""
    table = make_table("Used", "by", "tier", "where", ">used", ">at most")
    for tier, places in (("dram", usage.dram), ("ssd", usage.ssd)):
        for place in places:
            where = escape(place.where)
            used, most = size_text(place.used_bytes), size_text(place.part_bytes)
            table.add_row(f"tenant {tenant}", tier, where, used, most)
            for digest, space in sorted(place.namespaces.items()):
                quota = size_text(space.quota_bytes) if space.quota_bytes else ""
                name = f"  namespace {digest[:DIGEST_SHOWN]}"
                table.add_row(name, tier, where, size_text(space.held_bytes), quota)
    return table


def _engine_remarks(engines: EnginesStats) -> Iterator[Text]:
    if engines.error:
        yield Text(engines.error, style="yellow")
    for engine in engines.followed:
        where, age = engine.endpoint, engine.age_s
        if engine.error:
            yield Text(engine.error, style="yellow")
        elif engine.outdated:
            yield Text(
                f"{where}: its weights are not those of the namespace any more", style="yellow"
            )
        elif age is None:
            yield Text(f"{where} has not been heard of yet")
        else:
            yield Text(f"{where} was heard of {duration(age)} ago")


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
            yield Text(
                f"{where}: {count(disk.undecoded_blocks, 'block')} could not be decoded, "
                f"counted as damaged",
                style="yellow",
            )
        if disk.retired_bytes:
            yield Text(
                f"{where}: {size_text(disk.retired_bytes)} failed repeatedly and are not used any more: it may be dying",
                style="yellow",
            )
        if disk.codec_error:
            yield Text(f"{where}: {disk.codec_error}", style="yellow")


def _remarks(tiers: TiersStats) -> Iterator[Text]:
    """What is out of the ordinary."""
    for device in tiers.device:
        if device.error:
            yield Text(f"{device.path} is {device.state}: {device.error}", style="yellow")
    for disk in tiers.ssd:
        if disk.error:
            yield Text(f"{disk.path} is {disk.state}: {disk.error}", style="yellow")
        elif disk.state == "serving" and not disk.direct:
            yield Text(
                f"{disk.path} goes through the page cache, which is slower: its file system "
                f"knows no O_DIRECT",
                style="yellow",
            )
    for place in (*tiers.ssd, *tiers.object):
        if place.encrypted:
            yield Text(f"{place.path}: blocks are encrypted")
    for store in tiers.object:
        if store.error:
            yield Text(f"{store.path} is {store.state}: {store.error}", style="yellow")
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

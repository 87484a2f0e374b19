"""What `kvpool tiers` and `kvpool scrub` print."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from kvpool.status.text import count, duration, make_console, make_table, size_text, used_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kvpool.client import Client

SCRUB_BLOCKS = 64  # asked for at a time
_STATES = {
    "serving": "green",
    "followed": "green",
    "opening": "yellow",
    "read-only": "yellow",
    "silent": "yellow",
    "outdated": "yellow",
    "failed": "red",
}


def tier_rows(stats: Mapping[str, Any], tenant: str) -> list[dict[str, Any]]:
    """One row a segment, the fastest tier first; plain values.

    Of an engine's own cache only events are known: how many blocks, or at least how many (`complete`), and
    how long ago it was heard of.
    """
    mine = stats["tenants"][tenant]
    counters = stats["counters"]
    unknown = dict.fromkeys(
        ("size_bytes", "used_bytes", "read_bytes", "written_bytes", "damaged", "errors")
    )
    rows = [
        {
            "tier": "gpu",
            "where": engine["endpoint"],
            "state": _engine_state(engine),
            "error": engine["error"],
            **unknown,
            "blocks": engine["blocks"],
            "complete": engine["complete"],
            "age_s": engine["age_s"],
        }
        for engine in stats["engines"]["followed"]
    ]
    rows += [
        {
            "tier": "dram",
            "where": f"segment of tenant {tenant}",
            "state": "serving",
            "error": "",
            "size_bytes": mine["segment_bytes"],
            "used_bytes": mine["space"]["bytes_used"],
            "blocks": mine["blocks"],
            "read_bytes": counters["leased_bytes"],
            "written_bytes": counters["committed_bytes"],
            "damaged": counters["checksum_mismatches"],
            "errors": 0,
        }
    ]
    rows += [
        {
            "tier": "ssd",
            "where": disk["path"],
            "state": disk["state"],
            "error": disk["error"],
            "size_bytes": disk["segment_bytes"] or disk["size_bytes"],
            "used_bytes": disk["used_bytes"],
            "blocks": disk["blocks"],
            "read_bytes": disk["read_bytes"],
            "written_bytes": disk["written_bytes"],
            "damaged": disk["mismatches"],
            "errors": disk["read_errors"] + disk["write_errors"],
        }
        for disk in stats["tiers"]["ssd"]
    ]
    return rows


def _engine_state(engine: Mapping[str, Any]) -> str:
    if engine["error"]:
        return "failed"
    if engine["outdated"]:
        return "outdated"
    return "followed" if engine["connected"] else "silent"


def show_tiers(stats: Mapping[str, Any], tenant: str, console: Console | None = None) -> None:
    """Print where this node keeps blocks."""
    console = console or make_console()
    console.print(_tiers(tier_rows(stats, tenant)))
    for line in (*_engine_remarks(stats["engines"]), *_remarks(stats["tiers"])):
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


def _engine_remarks(engines: Mapping[str, Any]) -> Iterator[Text]:
    if engines["error"]:
        yield Text(engines["error"], style="yellow")
    for engine in engines["followed"]:
        where, age = engine["endpoint"], engine["age_s"]
        if engine["error"]:
            yield Text(engine["error"], style="yellow")
        elif engine["outdated"]:
            yield Text(
                f"{where}: its weights are not those of the namespace any more", style="yellow"
            )
        elif age is None:
            yield Text(f"{where} has not been heard of yet")
        else:
            yield Text(f"{where} was heard of {duration(age)} ago")


def _remarks(tiers: Mapping[str, Any]) -> Iterator[Text]:
    """What is out of the ordinary."""
    for disk in tiers["ssd"]:
        if disk["error"]:
            yield Text(f"{disk['path']} is {disk['state']}: {disk['error']}", style="yellow")
        elif disk["state"] == "serving" and not disk["direct"]:
            yield Text(
                f"{disk['path']} goes through the page cache, which is slower: its file system "
                f"knows no O_DIRECT",
                style="yellow",
            )
    for key, what in (
        ("over_budget_blocks", "not written: the day's budget (ssd_bytes_per_day) is used up"),
        (
            "once_used_blocks",
            "not written: the day's budget is short, and they were read by nobody",
        ),
        ("dropped_writes", "gone from memory before they could be written"),
    ):
        if tiers[key]:
            yield Text(f"{count(tiers[key], 'block')} {what}")


def scrub(client: Client, console: Console | None = None) -> tuple[int, int]:
    """Have all blocks on this node's disks compared with their checksums: (seen, bad).

    Shows a progress bar where there is a terminal.
    """
    total = sum(disk["blocks"] for disk in client.stats()["tiers"]["ssd"])
    seen = bad = 0
    cursor: int | None = 0
    columns = (
        TextColumn("scrubbing"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("blocks"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console or make_console(), transient=True) as progress:
        task = progress.add_task("", total=total)
        while cursor is not None:
            started = time.monotonic()
            step = client.scrub(cursor, SCRUB_BLOCKS)
            seen, bad, cursor = seen + step["seen"], bad + step["bad"], step["cursor"]
            progress.update(task, completed=seen)
            # Engines' reads come first: half of the disk's time is theirs.
            time.sleep(time.monotonic() - started)
    return seen, bad

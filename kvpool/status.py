"""What `kvpool status` prints: one node, seen by one tenant.

`show` takes what `Client.stats` gives. Values that a daemon does not tell are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

FIELDS_SHOWN = 3
FIELD_LENGTH_MAX = 32
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")

# What an operator asks of the counters, and which ones answer. The last column says that trouble is meant.
_COUNTERS: tuple[tuple[str, tuple[tuple[str, str], ...], bool], ...] = (
    (
        "put",
        (("committed", "blocks stored"), ("committed_bytes", ""), ("duplicates", "there already")),
        False,
    ),
    (
        "read",
        (("acquired", "leases"), ("leased_blocks", "blocks"), ("leased_bytes", "")),
        False,
    ),
    ("missed", (("acquire_misses", "reads found nothing"),), False),
    (
        "matched",
        (("match_hits", "of"), ("match_keys", "blocks asked for"), ("match_calls", "calls")),
        False,
    ),
    (
        "made room",
        (
            ("evicted", "blocks evicted"),
            ("evicted_soft_pins", "soft pins among them"),
            ("slabs_reclaimed", "slabs moved to another slot size"),
            ("removed", "blocks removed"),
        ),
        False,
    ),
    (
        "from and to peers",
        (("pulled_blocks", "blocks pulled"), ("pulled_bytes", ""), ("lent_blocks", "blocks lent")),
        False,
    ),
    ("refused, pool full", (("refused_full", "puts"),), True),
    ("leases that ran out", (("leases_expired", ""),), True),
    ("clients that died holding something", (("dead_holders", ""),), True),
    ("checksum mismatches", (("checksum_mismatches", "blocks dropped"),), True),
)


def show(stats: Mapping[str, Any], tenant: str, console: Console | None = None) -> None:
    """Print the state of a node and of one tenant's pool on it."""
    console = console or Console(highlight=False)
    mine = stats["tenants"][tenant]
    console.print(_headline(stats))
    for table in (
        _space(stats, tenant, mine),
        _slots(mine["space"]["classes"]),
        _namespaces(mine["namespaces"]),
        _counters(stats["counters"]),
        _movers(stats["movers"]),
        _peers(stats["peers"]),
    ):
        if table is not None:
            console.print()
            console.print(table)


def _headline(stats: Mapping[str, Any]) -> Text:
    line = Text()
    line.append(f"node {stats['node']}", style="bold")
    line.append(
        f"  incarnation {stats['incarnation']}, up {duration(stats['uptime_s'])}, "
        f"{_count(stats['clients'], 'client')} on {_count(stats['connections'], 'connection')}"
    )
    if stats["refused_connections"]:
        line.append(f", {stats['refused_connections']} connections refused", style="yellow")
    return line


def _space(stats: Mapping[str, Any], tenant: str, mine: Mapping[str, Any]) -> Table:
    space = mine["space"]
    size = mine["segment_bytes"]
    table = _table(f"DRAM of tenant {tenant}", "", ">bytes", ">share", "")
    for name, nbytes, what in (
        ("segment", size, ""),
        ("in slots in use", space["bytes_used"], f"{_count(mine['blocks'], 'block part')} stored"),
        ("not given to any slot size", space["bytes_unassigned"], ""),
        ("granted ahead to writers", mine.get("granted_bytes", 0), ""),
        ("hard pinned", mine["hard_pinned_bytes"], "never evicted"),
        ("soft pinned", mine["soft_pinned_bytes"], "evicted last"),
    ):
        if nbytes or name in {"segment", "in slots in use"}:
            table.add_row(name, size_text(nbytes), f"{nbytes / size:.0%}", what)
    table.add_row("leases", f"{stats['leases']:,}", "", "of all tenants, being read now")
    return table


def _slots(classes: list[Mapping[str, Any]]) -> Table | None:
    if not classes:
        return None
    table = _table(
        "Slots, by size", ">slot", ">in use", ">free", ">bytes in use", ">bytes free", ">lost"
    )
    for one in sorted(classes, key=lambda one: -int(one["bytes_used"])):
        table.add_row(
            size_text(one["stride"]),
            f"{one['slots_used']:,}",
            f"{one['slots_free']:,}",
            size_text(one["bytes_used"]),
            size_text(one["bytes_free"]),
            size_text(one["bytes_lost"]),
        )
    return table


def _namespaces(namespaces: Mapping[str, Mapping[str, Any]]) -> Table | None:
    if not namespaces:
        return None
    table = _table(
        "Namespaces", "digest", "fields", ">blocks", ">parts", ">bytes a block", ">bytes"
    )
    table.columns[1].overflow = "fold"
    held = [
        (sum(n * size for n, size in zip(one["blocks"], one["part_bytes"], strict=True)), name, one)
        for name, one in namespaces.items()
    ]
    for total, digest, one in sorted(held, key=lambda row: (-row[0], row[1])):
        table.add_row(
            digest[:12],
            escape(", ".join(_facts(one["fields"]))),
            f"{max(one['blocks'], default=0):,}",
            f"{len(one['part_bytes']):,}",
            size_text(sum(one["part_bytes"])),
            size_text(total),
        )
    return table


def _facts(fields: Mapping[str, Any]) -> Iterator[str]:
    """The first few facts of a record, those that say most to a reader first."""
    names = sorted(fields, key=lambda name: (name != "model", name != "tp_size", name))
    for name in names[:FIELDS_SHOWN]:
        text = str(fields[name])
        if len(text) > FIELD_LENGTH_MAX:
            text = f"{text[: FIELD_LENGTH_MAX - 1]}…"
        yield f"{name}={text}"
    if len(names) > FIELDS_SHOWN:
        yield f"and {len(names) - FIELDS_SHOWN} more"


def _counters(counters: Mapping[str, int]) -> Table:
    table = _table("Since the start, all tenants", "", "")
    for name, entries, trouble in _COUNTERS:
        if trouble and not any(counters.get(key) for key, _ in entries):
            continue
        words = []
        for at, (key, unit) in enumerate(entries):
            value = counters.get(key, 0)
            if value or at == 0 or key == "match_keys":
                number = size_text(value) if key.endswith("_bytes") else f"{value:,}"
                words.append(f"{number} {unit}".rstrip())
        text = ", ".join(words).replace(" of, ", " of ")
        table.add_row(name, Text(text, style="yellow" if trouble else ""))
    return table


def _movers(movers: list[Mapping[str, Any]]) -> Table:
    table = _table(
        "Movers", ">process", "state", ">orders", ">loans", ">restarts", "peers pull from"
    )
    for one in movers:
        table.add_row(
            str(one["pid"] or ""),
            Text("running") if one["alive"] else Text("down", style="red"),
            str(one["orders"]),
            str(one["loans"]),
            Text(str(one["restarts"]), style="yellow" if one["restarts"] else ""),
            "\n".join(one["listening"]) or "nowhere",
        )
    return table


def _peers(peers: list[Mapping[str, Any]]) -> Table | None:
    if not peers:
        return None
    table = _table(
        "Peers", "url", "state", ">asked", ">failed", ">bad blocks", ">blocks", ">bytes", ">rate"
    )
    table.add_column("last error", overflow="fold")
    for one in peers:
        seconds = one["seconds"]
        table.add_row(
            one["url"],
            Text("reachable") if one["available"] else Text("left alone", style="yellow"),
            f"{one['asked']:,}",
            f"{one['failures']:,}",
            Text(
                f"{one['checksum_mismatches']:,}",
                style="red" if one["checksum_mismatches"] else "",
            ),
            f"{one['blocks']:,}",
            size_text(one["bytes"]),
            f"{size_text(one['bytes'] / seconds)}/s" if seconds else "",
            escape(one["last_error"]),
        )
    return table


def _table(title: str, *columns: str) -> Table:
    """Columns whose name begins with > are numbers."""
    table = Table(
        title=escape(title),
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        show_header=any(columns),
        header_style="dim",
    )
    for name in columns:
        table.add_column(
            name.removeprefix(">"), justify="right" if name.startswith(">") else "left"
        )
    return table


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def size_text(nbytes: float) -> str:
    """Bytes for people: at most four digits, binary units."""
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value /= 1024
        unit += 1
    digits = 0 if unit == 0 or value == int(value) or value >= 100 else 1
    return f"{value:.{digits}f} {_UNITS[unit]}"


def duration(seconds: float) -> str:
    """A time for people, in its two largest units."""
    left = int(seconds)
    if left < 60:
        return f"{left} s"
    units = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))
    words: list[str] = []
    for name, length in units:
        n, left = divmod(left, length)
        if n or words:
            words.append(f"{n} {name}")
    return " ".join(words[:2])

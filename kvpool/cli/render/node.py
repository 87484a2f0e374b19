"""What `kvpool status` prints: one node, seen by one tenant.

`show` takes what `Client.stats` gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
from rich.markup import escape
from rich.text import Text

from kvpool.cli.render.cluster import directory_text, standing_text
from kvpool.cli.render.text import (
    DIGEST_SHOWN,
    count,
    duration,
    facts,
    make_console,
    make_table,
    size_text,
)
from kvpool.cli.render.tiers import show_tiers
from kvpool.telemetry.cluster_stats import NixlStats, PathsStats, PeerStats, WorkerStats
from kvpool.telemetry.memory_stats import NamespaceStats, SlabClass, TenantStats
from kvpool.telemetry.node_stats import NodeStats

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Entries = tuple[tuple[str, tuple[tuple[str, str], ...], bool], ...]
"""What an operator asks, which counters answer, and whether they mean trouble: then 0 is not shown."""

_COUNTERS: Entries = (
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
        "eviction",
        (
            ("evicted", "blocks evicted"),
            ("evicted_secondary", "of them secondary replicas"),
            ("evicted_expendable", "of them left by their sessions"),
            ("evicted_soft_pins", "of them soft-pinned"),
            ("slabs_reclaimed", "slabs reassigned to another slot size"),
            ("removed", "blocks removed"),
        ),
        False,
    ),
    (
        "from and to peers",
        (
            ("pulled_blocks", "blocks pulled"),
            ("pulled_bytes", ""),
            ("lent_blocks", "blocks loaned"),
        ),
        False,
    ),
    ("refused, pool full", (("refused_full", "puts"),), True),
    ("expired leases", (("leases_expired", ""),), True),
    ("clients that died with leases or reservations", (("dead_holders", ""),), True),
    ("checksum mismatches", (("checksum_mismatches", "blocks dropped"),), True),
)

_FETCH: Entries = (
    (
        "directory lookups",
        (("lookups", "total"), ("lookups_remembered", "answered from memory")),
        False,
    ),
    (
        "transfers",
        (
            ("transfers", "in progress"),
            ("no_room", "found no room"),
            ("joined", "block parts already in progress"),
            ("absent", "block parts absent at the source"),
        ),
        False,
    ),
    (
        "hedges of slow peers",
        (
            ("hedges", "block parts requested from a second peer"),
            ("cancelled", "transfers cancelled"),
            ("not_begun", "ended before their turn"),
        ),
        False,
    ),
    (
        "declined, faster to recompute",
        (("declined", "block parts"), ("trials", "trials of their sources")),
        False,
    ),
    ("failed lookups", (("lookups_failed", ""),), True),
    ("failed transfers", (("failed_transfers", ""),), True),
    ("damaged blocks received", (("mismatches", "dropped"),), True),
)

_NIXL: Entries = (
    (
        "pulled by RDMA",
        (("pulls", "pulls"), ("blocks", "blocks"), ("bytes", "")),
        False,
    ),
    (
        "continued over TCP",
        (
            ("failed_over", "pulls"),
            ("failed_over_blocks", "blocks"),
            ("rested", "pulls soon after a failure"),
        ),
        True,
    ),
    ("sent over TCP, which is faster there", (("slower", "pulls"),), True),
)

_REPLICATION: Entries = (
    (
        "offered to other nodes",
        (("offered_blocks", "blocks"), ("accepted_blocks", "accepted"), ("accepted_bytes", "")),
        False,
    ),
    (
        "of these",
        (
            ("replicated_blocks", "for replication"),
            ("forwarded_blocks", "offloaded before eviction"),
        ),
        False,
    ),
    (
        "accepted from other nodes",
        (("taken_blocks", "blocks"), ("refused_offers", "offers refused")),
        False,
    ),
    (
        "missing replicas",
        (("wanted", "blocks now"), ("repairs", "found by repair scans")),
        False,
    ),
    ("found to be the last replica", (("promoted", "block parts"),), True),
    ("replicas given up, backlog full", (("dropped_wishes", "blocks"),), True),
)


NOT_SERVING = frozenset(("unsure", "lost", "out"))
"""How a node may stand in its cluster that others cannot count on; one that does not see etcd serves as before."""


def not_serving(stats: NodeStats) -> str:
    """Why a node does not serve; empty if it does."""
    cluster = stats.cluster
    if cluster.state == "serving" and cluster.standing not in NOT_SERVING:
        return ""
    return (
        f"node {stats.node} does not serve: it is {cluster.state}, standing {cluster.standing}; "
        f"`kvpool nodes` says what that means"
    )


def show(
    stats: NodeStats,
    tenant: str,
    names: Mapping[str, str],
    console: Console | None = None,
) -> None:
    """Print the state of a node and of one tenant's pool on it. `names`: of nodes, by incarnation."""
    console = console or make_console()
    mine = stats.tenants[tenant]
    fetch, replication = stats.fetch, stats.replication
    console.print(_headline(stats))
    for line in _cluster_lines(stats):
        console.print(line)
    for table in (
        _space(stats, tenant, mine),
        _slots(mine.space.classes),
        _namespaces(mine.namespaces),
        _counters("Since the start, all tenants", stats.counters, _COUNTERS),
        _transfer_workers(stats.transfer_workers),
        _nixl(stats.nixl),
        _ways(stats.paths),
        _peers(fetch.peers, names),
        _counters("Other nodes, since the start", fetch, _FETCH) if _any(fetch) else None,
        _counters("Replication, since the start", replication, _REPLICATION)
        if _any(replication)
        else None,
    ):
        if table is not None:
            console.print()
            console.print(table)
    console.print()
    show_tiers(stats, tenant, console)


def _headline(stats: NodeStats) -> Text:
    line = Text()
    line.append(f"node {stats.node}", style="bold")
    line.append(
        f"  incarnation {stats.incarnation}, up {duration(stats.uptime_s)}, "
        f"{count(stats.clients, 'client')} on {count(stats.connections, 'connection')}"
    )
    if stats.refused_connections:
        line.append(f", {stats.refused_connections} connections refused", style="yellow")
    return line


def _cluster_lines(stats: NodeStats) -> Iterator[Text]:
    """Nothing for a node that is alone."""
    cluster = stats.cluster
    warning = standing_text({**msgspec.to_builtins(cluster), "node": stats.node})
    if cluster.others or cluster.directory is not None or warning is not None:
        line = Text(f"cluster {cluster.cluster}", style="bold")
        line.append(f"  {count(cluster.others, 'other node')} to pull from", style="none")
        if cluster.state != "serving":
            line.append(f", this one is {cluster.state}", style="yellow")
        yield line
        yield directory_text(msgspec.to_builtins(cluster))
    if warning is not None:
        yield warning


def _space(stats: NodeStats, tenant: str, mine: TenantStats) -> Table:
    space = mine.space
    size = mine.segment_bytes
    table = make_table(f"DRAM of tenant {tenant}", "", ">bytes", ">share", "")
    for name, nbytes, what in (
        ("segment", size, ""),
        ("in slots in use", space.bytes_used, f"{count(mine.blocks, 'block part')} stored"),
        ("not given to any slot size", space.bytes_unassigned, ""),
        ("granted ahead to writers", mine.granted_bytes, ""),
        ("secondary replicas", mine.secondary_bytes, "evicted first"),
        ("hard pinned", mine.hard_pinned_bytes, "never evicted"),
        ("soft pinned", mine.soft_pinned_bytes, "evicted last"),
    ):
        if nbytes or name in {"segment", "in slots in use"}:
            table.add_row(name, size_text(nbytes), f"{nbytes / size:.0%}", what)
    table.add_row("leases", f"{stats.leases:,}", "", "of all tenants, being read now")
    return table


def _slots(classes: list[SlabClass]) -> Table | None:
    if not classes:
        return None
    table = make_table(
        "Slots, by size", ">slot", ">in use", ">free", ">bytes in use", ">bytes free", ">lost"
    )
    for one in sorted(classes, key=lambda one: -int(one.bytes_used)):
        table.add_row(
            size_text(one.stride),
            f"{one.slots_used:,}",
            f"{one.slots_free:,}",
            size_text(one.bytes_used),
            size_text(one.bytes_free),
            size_text(one.bytes_lost),
        )
    return table


def _namespaces(namespaces: Mapping[str, NamespaceStats]) -> Table | None:
    if not namespaces:
        return None
    table = make_table(
        "Namespaces", "digest", "fields", ">blocks", ">parts", ">bytes a block", ">bytes"
    )
    table.columns[1].overflow = "fold"
    held = [
        (sum(n * size for n, size in zip(one.blocks, one.part_bytes, strict=True)), name, one)
        for name, one in namespaces.items()
    ]
    for total, digest, one in sorted(held, key=lambda row: (-row[0], row[1])):
        table.add_row(
            digest[:DIGEST_SHOWN],
            escape(", ".join(facts(one.fields))),
            f"{max(one.blocks, default=0):,}",
            f"{len(one.part_bytes):,}",
            size_text(sum(one.part_bytes)),
            size_text(total),
        )
    return table


def _any(counters: msgspec.Struct) -> bool:
    return any(type(value) is int and value for value in msgspec.structs.astuple(counters))


def _counters(title: str, counters: msgspec.Struct, entries: Entries) -> Table:
    table = make_table(title, "", "")
    for name, parts, trouble in entries:
        if trouble and not any(getattr(counters, key) for key, _ in parts):
            continue
        words = []
        for at, (key, unit) in enumerate(parts):
            value = getattr(counters, key)
            if value or at == 0 or key == "match_keys":
                number = size_text(value) if key.endswith("bytes") else f"{value:,}"
                noun = unit.removesuffix("s") if (value, unit) == (1, "calls") else unit
                words.append(f"{number} {noun}".rstrip())
        text = ", ".join(words).replace(" of, ", " of ")
        table.add_row(name, Text(text, style="yellow" if trouble else ""))
    return table


def _transfer_workers(workers: Sequence[WorkerStats]) -> Table:
    table = make_table(
        "Transfer workers", ">process", "state", ">orders", ">loans", ">restarts", "peers pull from"
    )
    for one in workers:
        table.add_row(
            str(one.pid or ""),
            Text("running") if one.alive else Text("down", style="red"),
            str(one.orders),
            str(one.loans),
            Text(str(one.restarts), style="yellow" if one.restarts else ""),
            escape("\n".join(one.listening)) or "nowhere",
        )
    return table


def _nixl(nixl: NixlStats | None) -> Table | None:
    """None where this node has no NIXL."""
    if nixl is None:
        return None
    table = _counters("NIXL, since the start", nixl, _NIXL)
    if nixl.last_error:
        table.add_row("last reason", Text(nixl.last_error, style="yellow"))
    return table


def _ways(paths: PathsStats) -> Table | None:
    """Of the peers to which there are several."""
    several = {url: peer for url, peer in sorted(paths.peers.items()) if len(peer.ways) > 1}
    if not several:
        return None
    table = make_table("Ways to peers", "peer", "as a rule", "way", ">pulls", ">bytes", "")
    for url, peer in several.items():
        for at, way in enumerate(peer.ways):
            rests = f"rests for {way.rests_s:.1f} s: {way.reason}" if way.reason else ""
            table.add_row(
                "" if at else escape(url),
                "" if at else peer.usual,
                escape(way.url),
                f"{way.pulls:,}",
                size_text(way.bytes),
                Text(rests, style="yellow"),
            )
    for column in table.columns:
        column.overflow = "fold"
    return table


def _peers(peers: Sequence[PeerStats], names: Mapping[str, str]) -> Table | None:
    asked = [one for one in peers if one.asked]
    if not asked:
        return None
    table = make_table(
        "Peers",
        "node",
        "away",
        "state",
        ">asked",
        ">failed",
        ">slow",
        ">latency",
        ">rate",
        ">bytes",
    )
    table.add_column("last error", overflow="fold")
    named = [(_peer_name(one, names), one) for one in asked]
    for name, one in sorted(named, key=lambda pair: pair[0]):
        table.add_row(
            escape(name),
            one.distance,
            _health(one),
            f"{one.asked:,}",
            f"{one.failed:,}",
            f"{one.slow:,}",
            f"{one.latency_ms:.1f} ms",
            f"{size_text(one.bytes_s)}/s",
            size_text(one.bytes),
            escape(one.last_error),
        )
    return table


def _peer_name(peer: PeerStats, names: Mapping[str, str]) -> str:
    """As the daemon calls it, or the membership; else its incarnation is all that is known."""
    incarnation: str = peer.incarnation
    return peer.node or names.get(incarnation, incarnation)


def _health(peer: PeerStats) -> Text:
    if peer.suspended_s:
        return Text(f"left alone for {peer.suspended_s:.1f} s", style="yellow")
    if peer.suspected:
        return Text("suspected", style="yellow")
    return Text("well", style="green")

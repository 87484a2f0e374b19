"""What `kvpool status` prints: one node, seen by one tenant.

`status_view` takes what `Client.stats` gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
from rich.text import Text

from kvpool.cli.render.cluster import directory_text, standing_text
from kvpool.cli.render.text import (
    DIGEST_SHOWN,
    Column,
    Part,
    Parts,
    count,
    duration,
    facts,
    make_table,
    number_text,
    rows_table,
    size_text,
)
from kvpool.cli.render.tiers import tiers_view
from kvpool.telemetry.cluster_stats import NixlStats, PathsStats, PeerStats, WayStats, WorkerStats
from kvpool.telemetry.memory_stats import NamespaceStats, SlabClass, TenantStats
from kvpool.telemetry.node_stats import NodeStats

Entries = Mapping[str, str]
"""By what an operator asks, the counters that answer, each with what it counts. Bytes say so by their name."""

_COUNTERS = {
    "put": "committed blocks stored, committed_bytes, duplicates there already",
    "read": "acquired leases, leased_blocks blocks, leased_bytes",
    "missed": "acquire_misses reads found nothing",
    "matched": "match_hits of, match_keys blocks asked for, match_calls calls",
    "eviction": "evicted blocks evicted, evicted_secondary of them secondary replicas, "
    "evicted_expendable of them left by their sessions, evicted_soft_pins of them soft-pinned, "
    "slabs_reclaimed slabs reassigned to another slot size, removed blocks removed",
    "from and to peers": "pulled_blocks blocks pulled, pulled_bytes, lent_blocks blocks loaned",
}
_TROUBLES = {
    "refused, pool full": "refused_full puts",
    "expired leases": "leases_expired",
    "clients that died with leases or reservations": "dead_holders",
    "checksum mismatches": "checksum_mismatches blocks dropped",
}
_FETCH = {
    "directory lookups": "lookups total, lookups_remembered answered from memory",
    "transfers": "transfers in progress, no_room found no room, joined block parts already in progress, "
    "absent block parts absent at the source",
    "hedges of slow peers": "hedges block parts requested from a second peer, cancelled transfers cancelled, "
    "not_begun ended before their turn",
    "declined, faster to recompute": "declined block parts, trials trials of their sources",
}
_FETCH_TROUBLES = {
    "failed lookups": "lookups_failed",
    "failed transfers": "failed_transfers",
    "damaged blocks received": "mismatches dropped",
}
_NIXL = {"pulled by RDMA": "pulls pulls, blocks blocks, bytes"}
_NIXL_TROUBLES = {
    "continued over TCP": "failed_over pulls, failed_over_blocks blocks, rested pulls soon after a failure",
    "sent over TCP, which is faster there": "slower pulls",
}
_REPLICATION = {
    "offered to other nodes": "offered_blocks blocks, accepted_blocks accepted, accepted_bytes",
    "of these": "replicated_blocks for replication, forwarded_blocks offloaded before eviction",
    "accepted from other nodes": "taken_blocks blocks, refused_offers offers refused",
    "missing replicas": "wanted blocks now, repairs found by repair scans",
}
_REPLICATION_TROUBLES = {
    "found to be the last replica": "promoted block parts",
    "replicas given up, backlog full": "dropped_wishes blocks",
}


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


def status_view(stats: NodeStats, tenant: str, names: Mapping[str, str]) -> Parts:
    """The state of a node and of one tenant's pool on it. `names`: of nodes, by incarnation."""
    mine = stats.tenants[tenant]
    yield _headline(stats)
    yield from _cluster_lines(stats)
    for table in (
        _space(stats, tenant, mine),
        _slots(mine.space.classes),
        _namespaces(mine.namespaces),
        _counters("Since the start, all tenants", stats.counters, _COUNTERS, _TROUBLES),
        _transfer_workers(stats.transfer_workers),
        _nixl(stats.nixl),
        _ways(stats.paths),
        _peers(stats.fetch.peers, names),
        *(
            _counters(f"{title}, since the start", counters, entries, troubles)
            for title, counters, entries, troubles in (
                ("Other nodes", stats.fetch, _FETCH, _FETCH_TROUBLES),
                ("Replication", stats.replication, _REPLICATION, _REPLICATION_TROUBLES),
            )
            if any(type(value) is int and value for value in msgspec.structs.astuple(counters))
        ),
    ):
        if table is not None:
            yield Text()
            yield table
    yield Text()
    yield from tiers_view(stats, tenant)


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


def _space(stats: NodeStats, tenant: str, mine: TenantStats) -> Part:
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


def _slots(classes: list[SlabClass]) -> Part | None:
    if not classes:
        return None
    columns: dict[str, Column] = {
        ">slot": lambda one: size_text(one.stride),
        "in use": "slots_used",
        "free": "slots_free",
        "bytes in use": "bytes_used",
        "bytes free": "bytes_free",
        "lost": "bytes_lost",
    }
    ordered = sorted(classes, key=lambda one: -int(one.bytes_used))
    return rows_table("Slots, by size", ordered, columns)


def _namespaces(namespaces: Mapping[str, NamespaceStats]) -> Part | None:
    if not namespaces:
        return None
    nbytes = {digest: one.bytes_in_blocks() for digest, one in namespaces.items()}
    columns: dict[str, Column] = {
        "digest": lambda row: row[0][:DIGEST_SHOWN],
        "fields": lambda row: ", ".join(facts(row[1].fields)),
        ">blocks": lambda row: f"{max(row[1].blocks, default=0):,}",
        ">parts": lambda row: f"{len(row[1].part_bytes):,}",
        ">bytes a block": lambda row: size_text(sum(row[1].part_bytes)),
        ">bytes": lambda row: size_text(nbytes[row[0]]),
    }
    largest = sorted(namespaces.items(), key=lambda row: (-nbytes[row[0]], row[0]))
    return rows_table("Namespaces", largest, columns, wraps={"fields"}, below={"fields"})


def _counters(
    title: str, counters: msgspec.Struct, entries: Entries, troubles: Entries, last_error: str = ""
) -> Part:
    """troubles: shown only where something was counted."""
    table = make_table(title, "", "")
    for name, parts in entries.items():
        table.add_row(name, _counted(counters, parts))
    for name, parts in troubles.items():
        if any(getattr(counters, part.split()[0]) for part in parts.split(",")):
            table.add_row(name, Text(_counted(counters, parts), style="yellow"))
    if last_error:
        table.add_row("last reason", Text(last_error, style="yellow"))
    return table


def _counted(counters: msgspec.Struct, parts: str) -> str:
    words: list[str] = []
    for part in parts.split(", "):
        name, _, what = part.partition(" ")
        value = getattr(counters, name)
        if value or not words or name == "match_keys":
            what = what.removesuffix("s") if (value, what) == (1, "calls") else what
            words.append(f"{number_text(name, value)} {what}".rstrip())
    return ", ".join(words).replace(" of, ", " of ")


def _transfer_workers(workers: Sequence[WorkerStats]) -> Part:
    columns: dict[str, Column] = {
        ">process": lambda one: str(one.pid or ""),
        "state": lambda one: Text("running") if one.alive else Text("down", style="red"),
        "orders": "orders",
        "loans": "loans",
        ">restarts": lambda one: Text(str(one.restarts), style="yellow" if one.restarts else ""),
        "peers pull from": lambda one: "\n".join(one.listening) or "nowhere",
    }
    return rows_table("Transfer workers", workers, columns)


def _nixl(nixl: NixlStats | None) -> Part | None:
    """None where this node has no NIXL."""
    if nixl is None:
        return None
    return _counters("NIXL, since the start", nixl, _NIXL, _NIXL_TROUBLES, nixl.last_error)


def _ways(paths: PathsStats) -> Part | None:
    """Of the peers to which there are several."""
    rows = [
        (way, "" if at else url, "" if at else peer.usual)
        for url, peer in sorted(paths.peers.items())
        for at, way in enumerate(peer.ways)
        if len(peer.ways) > 1
    ]
    columns: dict[str, Column] = {
        "peer": lambda row: row[1],
        "as a rule": lambda row: row[2],
        "way": lambda row: row[0].url,
        ">pulls": lambda row: f"{row[0].pulls:,}",
        ">bytes": lambda row: size_text(row[0].bytes),
        "": lambda row: Text(_rests(row[0]), style="yellow"),
    }
    return rows_table("Ways to peers", rows, columns) if rows else None


def _rests(way: WayStats) -> str:
    return f"rests for {way.rests_s:.1f} s: {way.reason}" if way.reason else ""


def _peers(peers: Sequence[PeerStats], names: Mapping[str, str]) -> Part | None:
    asked = sorted((one for one in peers if one.asked), key=lambda one: _peer_name(one, names))
    columns: dict[str, Column] = {
        "node": lambda one: _peer_name(one, names),
        "away": "distance",
        "state": _health,
        "asked": "asked",
        "failed": "failed",
        "slow": "slow",
        ">latency": lambda one: f"{one.latency_ms:.1f} ms",
        ">rate": lambda one: f"{size_text(one.bytes_s)}/s",
        "bytes": "bytes",
    }
    if any(one.last_error for one in asked):
        columns["last error"] = "last_error"
    wraps, spare = {"node", "state", "last error"}, ("away", "bytes")
    return rows_table("Peers", asked, columns, wraps=wraps, spare=spare) if asked else None


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

"""The output of `kvpool nodes`, `kvpool namespaces` and `kvpool blocks locate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rich.text import Text

from kvpool.cli.render.text import (
    DIGEST_SHOWN,
    Column,
    Part,
    Parts,
    cluster_title,
    count,
    duration,
    facts,
    period_text,
    rows_table,
    size_text,
    used_text,
)
from kvpool.wire.answers import Located

INCARNATION_SHOWN = 8
KEYS_SHOWN = 3  # of those that were not found

STATE_STYLES = {"joining": "cyan", "serving": "green", "draining": "yellow", "gone": "dim"}

# What is to be known when this node is not a member; the state tells whether it has left on purpose.
STANDINGS = {
    "away": (
        "etcd does not answer. What was known last holds, and blocks are served as before; nodes that "
        "come or go, clears and drains are not heard of until it is back."
    ),
    "unsure": (
        "it was stopped or asleep for longer than its lease lasts, so others may take it for dead. It "
        "serves no other node until etcd has said whether they do; that takes a few seconds."
    ),
    "lost": (
        "its lease is gone, and others take it for dead. It serves no other node until it has joined "
        "again, as a new incarnation, which it tries all the time."
    ),
    "out": (
        "other nodes neither see it nor pull from it. It is joining or leaving; its log says why it "
        "cannot, if it cannot."
    ),
}
DRAINED = (
    "it was drained and has left. It serves its own clients until it is stopped; "
    "`kvpool drain {node} --cancel` brings it back."
)

Directory = Mapping[str, Any] | None


# ---- nodes -----------------------------------------------------------------------------------------


def nodes_view(cluster: Mapping[str, Any]) -> Parts:
    """What `Client.cluster` gives."""
    nodes = cluster["nodes"]
    versions = sorted({record["version"] for record in nodes})
    alike = len({(record["version"], record["protocol"]) for record in nodes}) == 1
    seen = f"seen by node {cluster['node']}: {count(len(nodes), 'node')}"
    version = [f"version {versions[0]}"] if alike else []
    yield cluster_title(cluster["cluster"], seen, *version)
    if (warning := standing_text(cluster)) is not None:
        yield warning
    if nodes:
        yield Text()
        yield _nodes_table(cluster, versions_differ=not alike)
    if cluster.get("links"):
        yield Text()
        yield links_table(cluster["links"])
    yield Text()
    yield from (*_drain_lines(cluster), *_peer_lines(cluster), directory_text(cluster))


def standing_text(cluster: Mapping[str, Any]) -> Text | None:
    """What it means that this node is not a member; None if it is one."""
    standing, node = cluster["standing"], cluster.get("node", "NODE")
    if standing == "member":
        return None
    drained = standing == "out" and cluster["state"] == "gone"
    meaning = DRAINED.format(node=node) if drained else STANDINGS.get(standing, "")
    text = Text(f"this node is not a member ({standing}): ", style="bold yellow")
    return text.append(meaning, style="yellow")


def _nodes_table(cluster: Mapping[str, Any], *, versions_differ: bool) -> Part:
    nodes = cluster["nodes"]
    tiers = list(dict.fromkeys(tier["name"] for record in nodes for tier in record["tiers"]))
    labelled = any(record["labels"] for record in nodes)
    # Of which tiers some are secondary; each has a column for them beside its own.
    secondary = {
        tier["name"] for record in nodes for tier in record["tiers"] if tier["secondary_bytes"]
    }
    own = cluster["incarnation"]
    protocols = {record["incarnation"]: record["protocol"] for record in nodes}
    columns: dict[str, Column] = {
        "  node": lambda record: (
            Text(f"* {record['node']}", style="bold")
            if record["incarnation"] == own
            else f"  {record['node']}"
        ),
        "state": lambda record: _state(record, wanted=record["node"] in cluster["drains"]),
        "incarnation": lambda record: record["incarnation"][:INCARNATION_SHOWN],
    }
    if labelled:
        columns["labels"] = lambda record: ", ".join(
            f"{k}={v}" for k, v in sorted(record["labels"].items())
        )
    for name in tiers:
        columns[f">{name}"] = partial(_of_tier, name, _used)
        if name in secondary:
            columns[f">{name} secondary"] = partial(_of_tier, name, _secondary)
    if versions_differ:
        columns["version"] = lambda record: _version(record, protocols.get(own))
    columns["address"] = lambda record: (
        ", ".join(transport["url"] for transport in record["transports"]) or "none"
    )
    spare = ("incarnation", *(f"{name} secondary" for name in secondary))
    return rows_table("", nodes, columns, wraps={"labels", "address"}, spare=spare)


def _of_tier(name: str, text: Callable[[Mapping[str, Any]], str], record: Mapping[str, Any]) -> str:
    return "".join(text(tier) for tier in record["tiers"] if tier["name"] == name)


def _used(tier: Mapping[str, Any]) -> str:
    """All that a tier holds: records tell secondary replicas apart from what is in use."""
    return used_text(int(tier["used_bytes"] + tier["secondary_bytes"]), tier["capacity_bytes"])


def _secondary(tier: Mapping[str, Any]) -> str:
    return size_text(tier["secondary_bytes"])


def links_table(links: Sequence[Mapping[str, Any]]) -> Part:
    """What this node expects of pulling from each other one."""
    columns: dict[str, Column] = {
        "node": "node",
        "distance": "distance",
        ">answer": lambda link: f"{link['latency_s'] * 1e3:.1f} ms",
        ">rate": lambda link: f"{size_text(link['bytes_s'])}/s",
        "": lambda link: Text(_assumed(link), style="dim"),
        "by": "path",
    }
    ordered = sorted(links, key=lambda link: str(link["node"]))
    return rows_table("Pulling from others", ordered, columns)


def _assumed(link: Mapping[str, Any]) -> str:
    ages = {"answer": link["latency_age_s"], "rate": link["bytes_age_s"]}
    assumed = [what for what, age in ages.items() if age is None]
    return f"{'both' if len(assumed) > 1 else assumed[0]} assumed" if assumed else ""


def _state(record: Mapping[str, Any], *, wanted: bool) -> Text:
    state, progress = record["state"], record["drain"]
    words = state
    if state == "draining" and progress and progress["blocks_total"]:
        words += f" {min(1.0, progress['blocks'] / progress['blocks_total']):.0%}"
    elif wanted and state != "draining":
        words += ", to drain"
    return Text(words, style=STATE_STYLES.get(state, ""))


def _version(record: Mapping[str, Any], spoken: int | None) -> Text:
    """Nodes of a wire protocol that is too far from this one's are seen, and not pulled from."""
    if spoken is None or record["protocol"] == spoken:
        return Text(record["version"])
    return Text(f"{record['version']}, protocol {record['protocol']}", style="yellow")


def _drain_lines(cluster: Mapping[str, Any]) -> Iterator[Text]:
    here = set()
    for record in cluster["nodes"]:
        here.add(record["node"])
        if record["drain"]:
            yield Text(f"{record['node']} is being drained: {drain_text(record['drain'])}")
    for name in sorted(set(cluster["drains"]) - here):
        yield Text(
            f"{name} is drained and not here; `kvpool drain {name} --cancel` lets it come back",
            style="yellow",
        )


def drain_text(progress: Mapping[str, Any]) -> str:
    """How far a node has come: copying first, then waiting for leases to end."""
    words = [f"{progress['blocks']:,} of {count(progress['blocks_total'], 'block')} looked at"]
    if progress["copied"]:
        words.append(f"{progress['copied']:,} copied, {size_text(progress['copied_bytes'])}")
    if progress["failed"]:
        words.append(f"{progress['failed']:,} that only it has found no other place")
    if progress["left"]:
        words.append(f"{progress['left']:,} stay on its disks, for want of time (ssd_drain_s)")
    if progress["phase"] == "waiting":
        words.append(f"waiting for {count(progress['leases'], 'lease')} to end")
    return ", ".join(words)


def _peer_lines(cluster: Mapping[str, Any]) -> Iterator[Text]:
    if cluster["peers"]:
        yield Text(f"pulls also from {', '.join(cluster['peers'])}, named in its configuration")
    for silent in cluster["silent_peers"]:
        yield Text(f"{silent_text(silent)}; `kvpool doctor` has more", style="yellow")


def silent_text(silent: Mapping[str, Any]) -> str:
    """Of a peer that the configuration names and that does not answer."""
    error = f": {silent['error']}" if silent["error"] else ""
    return f"peer {silent['url']} has not answered for {duration(silent['silent_s'])}{error}"


def directory_text(cluster: Mapping[str, Any]) -> Text:
    """One line: is it there, how far is this node behind in telling it."""
    directory: Directory = cluster["directory"]
    if directory is None:
        return Text("no directory: other nodes are asked one by one what they have")
    line = Text("directory ")
    if directory["connected"]:
        line.append("connected", style="green")
    else:
        line.append("does not answer", style="bold red")
    if cluster["state"] == "gone":
        return line.append(", and is told nothing of what a node holds that has left")
    line.append(f", lag {directory['lag_s']:.1f} s, {directory['queued']:,} queued")
    if directory["repairing"]:
        line.append(f", {directory['repairing']:,} to be announced again")
    if directory["failures"]:
        line.append(f", {count(directory['failures'], 'failure')}", style="yellow")
    return line


# ---- namespaces ------------------------------------------------------------------------------------


def holdings_view(rows: Sequence[Mapping[str, Any]], title: str) -> Parts:
    """What `holdings` gives."""
    columns = {
        "node": "node",
        "blocks in memory": "blocks",
        "bytes": "bytes",
        "on SSD": "ssd_bytes",
    }
    yield rows_table(title, rows, columns)


def settings_text(settings: Mapping[str, Any]) -> str:
    """What a namespace has set, in the words of `kvpool configure`; replicas are shown for all."""
    quotas = ",".join(
        f"{tier}={_quota_text(settings[f'{tier}_quota'])}"
        for tier in ("dram", "ssd")
        if settings[f"{tier}_quota"]
    )
    words = {
        "write": settings["write"],
        "ttl": period_text(settings["ttl_s"]) if settings["ttl_s"] else "",
        "ssd-codec": settings["ssd_codec"],
        "write-remote": settings["write_remote"],
        "quota": quotas,
    }
    return ", ".join(f"{name} {value}" for name, value in words.items() if value)


def _quota_text(quota: float) -> str:
    """Bytes are whole numbers, shares are not."""
    return size_text(quota).replace(" ", "") if isinstance(quota, int) else f"{100 * quota:.3g}%"


def namespaces_view(rows: Sequence[Mapping[str, Any]]) -> Parts:
    """What `namespace_rows` gives."""
    if not rows:
        yield Text("no engine has opened a namespace yet")
        return
    several = len({row["tenant"] for row in rows}) > 1
    disks = any(row["ssd_bytes"] is not None for row in rows)
    tenant: dict[str, Column] = {"tenant": "tenant"} if several else {}
    on_disks: dict[str, Column] = {"on SSD": "ssd_bytes"} if disks else {}
    columns: dict[str, Column] = {
        **tenant,
        "digest": "digest",
        "fields": lambda row: ", ".join(facts(row["fields"])),
        ">epoch": lambda row: (
            str(row["epoch"]) if row["agreed"] else Text(f"{row['epoch']}?", style="yellow")
        ),
        ">replicas": lambda row: str(row["settings"]["replicas"]),
        ">a block": lambda row: size_text(sum(part[0] for part in row["parts"])),
        "blocks": "blocks",
        "bytes": "bytes",
        **on_disks,
        ">hits": lambda row: f"{row['hits'] / row['asked']:.0%}" if row["asked"] else "",
    }
    yield rows_table("", rows, columns, wraps={"fields"}, below={"fields"})
    if changed := [row for row in rows if settings_text(row["settings"])]:
        yield Text()
        texts: dict[str, Column] = {"": lambda row: settings_text(row["settings"])}
        yield rows_table("Settings", changed, {**tenant, "digest": "digest", **texts})
    yield Text()
    where = ", and on SSD those on its disks" if disks else ""
    yield Text(
        f"Blocks and bytes are those in this node's memory{where}; hits: of the blocks that reads asked it for since its "
        "start."
    )
    fenced = [row["digest"][:DIGEST_SHOWN] for row in rows if 0 < row["fence"] == row["epoch"]]
    if fenced:
        yield Text(
            f"fenced at this epoch: {', '.join(fenced)}. Engines that opened it before open it again."
        )
    if not all(row["agreed"] for row in rows):
        yield Text("?: not agreed with the cluster yet; that follows by itself", style="yellow")


# ---- blocks ----------------------------------------------------------------------------------------


def replicas_view(found: Sequence[Located]) -> Parts:
    """What `Client.locate` gives."""
    if not found:
        return
    rows = [(block, replica) for block in found for replica in block.replicas]
    columns: dict[str, Column] = {
        "key": lambda row: row[0].key,
        "namespace": lambda row: row[0].namespace[:DIGEST_SHOWN],
        "node": lambda row: row[1].node,
        "tier": lambda row: row[1].tier,
        ">parts": lambda row: Text(
            f"{row[1].parts} of {row[0].parts}",
            style="" if row[1].parts == row[0].parts else "yellow",
        ),
    }
    yield rows_table("", rows, columns, wraps={"node"})


def not_found(wanted: Sequence[bytes], found: Sequence[Located], directory: Directory) -> str:
    """Which blocks were not found and what that may be due to; empty if all were."""
    there = {block.key for block in found}
    missing = [key.hex() for key in wanted if key.hex() not in there]
    if not missing:
        return ""
    more = f" and {len(missing) - KEYS_SHOWN} more" if len(missing) > KEYS_SHOWN else ""
    hint = "looked for in all namespaces that a node has open"
    if directory is None:
        hint += "; without a directory nodes know only what they hold themselves"
    elif not directory["connected"]:
        hint += "; the directory does not answer"
    return f"not found: {', '.join(missing[:KEYS_SHOWN])}{more} ({hint})"

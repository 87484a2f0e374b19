"""What `kvpool status --all` prints: whether each node is well, and why not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any, Literal

import msgspec
from rich.text import Text

from kvpool.cli.asking import nodes_of
from kvpool.cli.render.cluster import STANDINGS, STATE_STYLES, silent_text
from kvpool.cli.render.text import Column, Parts, cluster_title, count, rows_table
from kvpool.cli.render.top import FIRST_LOOK_S, NODES_MAX, Watch
from kvpool.client.operator import OperatorRequests
from kvpool.telemetry.node_stats import NodeStats

Health = Literal["well", "degraded", "lost"]
STYLES = {"well": "green", "degraded": "yellow", "lost": "bold red"}
SOUND_PLACES = frozenset(("serving", "opening"))


class NodeHealth(msgspec.Struct, frozen=True):
    """degraded: it answers, and something of it does not work. lost: it does not answer. reasons: none where it is well."""

    node: str
    state: str
    health: Health
    reasons: tuple[str, ...] = ()


class ClusterHealth(msgspec.Struct, frozen=True):
    """expected: how many nodes there should be; 0: not told. problem: what is wrong, in a line; empty: all is well."""

    cluster: str
    nodes: tuple[NodeHealth, ...]
    expected: int
    problem: str


def look(client: OperatorRequests, expected: int) -> ClusterHealth:
    """Ask all nodes at once. Raises `KvpoolError` if this node does not answer."""
    with closing(Watch(client)) as watch:
        watch.turn(FIRST_LOOK_S)
    stats = {name: seen.stats for name, seen in watch.seen.items()}
    errors = {name: seen.error for name, seen in watch.seen.items()}
    return judge(watch.cluster, stats, errors, expected)


def judge(
    cluster: Mapping[str, Any],
    stats: Mapping[str, NodeStats | None],
    errors: Mapping[str, str],
    expected: int,
) -> ClusterHealth:
    """cluster: as one node sees it. stats: of the nodes that were asked; None: no answer, of which `errors` tells why."""
    states = {record["node"]: record["state"] for record in cluster["nodes"]}
    found = []
    for name in nodes_of(cluster):
        known = stats.get(name)
        if known is None:
            reason = errors.get(name) or f"not asked: more than {NODES_MAX} nodes"
            found.append(NodeHealth(name, states.get(name, "unknown"), "lost", (reason,)))
        else:
            reasons = tuple(_complaints(known))
            if name == cluster["node"]:  # of others only they know
                reasons += tuple(map(silent_text, cluster.get("silent_peers", ())))
            health: Health = "degraded" if reasons else "well"
            found.append(NodeHealth(name, known.cluster.state, health, reasons))
    bad = [each for each in found if each.health != "well"]
    problems = []
    if bad:
        named = ", ".join(f"{each.node} is {each.health}" for each in bad[:3])
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        are = "is" if len(bad) == 1 else "are"
        problems.append(f"{len(bad)} of {count(len(found), 'node')} {are} not well: {named}{more}")
    if len(found) < expected:
        problems.append(f"{count(len(found), 'node')} where {expected} are expected")
    return ClusterHealth(cluster["cluster"], tuple(found), expected, "; ".join(problems))


def _complaints(stats: NodeStats) -> Iterator[str]:
    cluster = stats.cluster
    if cluster.state != "serving":
        yield f"it is {cluster.state}"
    if cluster.standing != "member":
        meaning = STANDINGS.get(cluster.standing, f"it stands {cluster.standing}")
        yield meaning.partition(". ")[0]
    if cluster.membership_error:
        yield f"etcd: {cluster.membership_error}"
    if cluster.directory is not None and not cluster.directory.connected:
        yield "the directory does not answer"
    if cluster.sweep_error:
        yield f"directory: {cluster.sweep_error}"
    for tier, places in {**stats.tiers.places(), "object": stats.tiers.object}.items():
        for place in places:
            if place.state not in SOUND_PLACES:
                error = f": {place.error}" if place.error else ""
                yield f"{tier} {place.path}: {place.state}{error}"
    if stats.audit is not None and stats.audit.lost:
        yield f"the audit file lacks {count(stats.audit.lost, 'record')}"
    for name, tenant in stats.tenants.items():
        for engine in tenant.engines.followed:
            if engine.error:
                yield f"events of engine {engine.endpoint} of tenant {name}: {engine.error}"


def health_view(found: ClusterHealth) -> Parts:
    """A line for each node."""
    yield cluster_title(found.cluster, count(len(found.nodes), "node"))
    yield Text()
    columns: dict[str, Column] = {
        "node": "node",
        "state": lambda each: Text(each.state, style=STATE_STYLES.get(each.state, "")),
        "health": lambda each: Text(each.health, style=STYLES[each.health]),
        "": lambda each: "; ".join(each.reasons),
    }
    yield rows_table("", found.nodes, columns, wraps={"node", ""})

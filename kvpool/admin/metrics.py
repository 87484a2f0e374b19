"""A daemon's metrics for Prometheus, of all its tenants.

Fields of `kvpool.telemetry.node_stats` declare them. Work and text are bounded by tenants, shown namespaces and shown
peers; blocks are never looked at.
"""

from __future__ import annotations

from collections import Counter

from kvpool.telemetry import metrics
from kvpool.telemetry.metrics import OTHERS, Labels
from kvpool.telemetry.node_stats import NodeStats

NAMESPACES_MAX = 200  # the largest are shown individually, the others of a tenant as one
PEERS_MAX = 256  # those that were asked most are shown individually, the others as one
MODEL_CHARACTERS_MAX = 128
GONE = "gone"


def render(
    stats: NodeStats, *, namespaces_max: int = NAMESPACES_MAX, peers_max: int = PEERS_MAX
) -> bytes:
    """Return all metrics of a node in Prometheus' text format 0.0.4."""
    return metrics.render(stats, Shown(stats, namespaces_max, peers_max))


class Shown:
    """Decides which namespaces and peers have labels of their own."""

    def __init__(self, stats: NodeStats, namespaces_max: int, peers_max: int) -> None:
        held: Counter[tuple[str, str]] = Counter()
        models = {}
        for tenant, books in stats.tenants.items():
            for digest, space in books.namespaces.items():
                on_disks = (disk.namespaces.get(digest) for disk in books.usage.ssd)
                held[tenant, digest] = space.held_bytes + sum(
                    usage.held_bytes for usage in on_disks if usage is not None
                )
                models[tenant, digest] = str(space.fields.get("model", ""))[:MODEL_CHARACTERS_MAX]
        self._known = frozenset(models)
        self._models = {name: models[name] for name, _ in held.most_common(namespaces_max)}
        asked: Counter[str] = Counter()
        for peer in stats.fetch.peers:
            asked[peer.node] += peer.asked
        self._peers = {node: node or GONE for node, _ in asked.most_common(peers_max)}
        self._nodes = {peer.url: peer.node for peer in stats.fetch.peers if peer.url}

    def __call__(self, labels: Labels) -> Labels | None:
        """Return the labels as they are shown, or None if what has them is left out."""
        if "namespace" in labels:
            return self._of_namespace(labels)
        if "source" in labels:
            shown = self._peer(labels["source"])
            return None if shown in (GONE, OTHERS) else labels
        if "peer" in labels:
            shown = self._peer(labels["peer"])
            others = {"path": OTHERS} if shown == OTHERS and "path" in labels else {}
            return {**labels, "peer": shown, **others}
        return labels

    def _of_namespace(self, labels: Labels) -> Labels | None:
        name = labels["tenant"], labels["namespace"]
        if "model" in labels:
            return labels
        if name in self._models:
            return {**labels, "model": self._models[name]}
        return {**labels, "namespace": OTHERS, "model": ""} if name in self._known else None

    def _peer(self, name: str) -> str:
        """Return how a peer is shown. name: of its node, its URL, or as it is shown."""
        node = self._nodes.get(name, name)
        if node == GONE:
            return node
        return self._peers.get("" if "://" in node else node, OTHERS)

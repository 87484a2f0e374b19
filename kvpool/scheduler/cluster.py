"""What the scheduler knows of the whole cluster, independent of a request: hints. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvpool.scheduler.estimates import KindEstimates
from kvpool.scheduler.links import Links


class Traffic:
    """When the links of each node will be free of the ordered pulls: a hint."""

    def __init__(self) -> None:
        self.into: dict[str, float] = {}
        self._out: dict[str, float] = {}

    def add(self, source: str, target: str, seconds: float, now: float) -> None:
        """A pull was ordered that would keep an idle link busy for this long."""
        for busy, node in ((self._out, source), (self.into, target)):
            busy[node] = max(busy.get(node, 0.0), now) + seconds

    def ahead_s(self, source: str, target: str, now: float) -> float:
        """Seconds until a pull ordered now would have the link to itself."""
        busy_until = max(self._out.get(source, 0.0), self.into.get(target, 0.0))
        return max(0.0, busy_until - now)

    def out_s(self, source: str, now: float) -> float:
        return max(0.0, self._out.get(source, 0.0) - now)


@dataclass(slots=True)
class Cluster:
    """What is known of the whole cluster. nodes: of each holder from which others can pull; namespaces: of its blocks,
    where there are several. links: between nodes.
    """

    kinds: Mapping[str, KindEstimates]
    nodes: Mapping[str, str]
    traffic: Traffic
    namespaces: Mapping[str, str] = field(default_factory=dict)
    links: Links = field(default_factory=Links)

    def node_of(self, holder: str, namespace: str) -> str | None:
        """Where engines of a namespace can pull from this holder; None: nowhere."""
        node = self.nodes.get(holder)
        return node if node is not None and self.namespaces.get(holder, "") == namespace else None

"""What the scheduler knows of the cluster as a whole, whatever the request. A hint, like all here. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvpool.scheduler.estimates import KindEstimates


class Traffic:
    """Until when the links of each node are busy with pulls that were ordered. A hint, like all here."""

    def __init__(self) -> None:
        self.into: dict[str, float] = {}
        self._out: dict[str, float] = {}

    def add(self, source: str, target: str, seconds: float, now: float) -> None:
        """A pull was ordered that would keep an idle link busy for so long."""
        for busy, node in ((self._out, source), (self.into, target)):
            busy[node] = max(busy.get(node, 0.0), now) + seconds

    def ahead_s(self, source: str, target: str, now: float) -> float:
        """Until a pull that is ordered now would have the link to itself."""
        busy_until = max(self._out.get(source, 0.0), self.into.get(target, 0.0))
        return max(0.0, busy_until - now)

    def out_s(self, source: str, now: float) -> float:
        return max(0.0, self._out.get(source, 0.0) - now)


@dataclass(slots=True)
class Cluster:
    """What is known of the cluster as a whole. nodes: of each holder that others can pull from."""

    kinds: Mapping[str, KindEstimates]
    nodes: Mapping[str, str]
    traffic: Traffic

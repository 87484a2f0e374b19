"""The rest of a node for tests of its membership alone: memory is all that it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvpool.daemon.cluster.local_node import Holdings
from kvpool.daemon.core.blocks import NamespaceState
from kvpool.daemon.core.node import Node
from kvpool.placement.directory.base import TIERS
from kvpool.placement.records import NamespaceSettings, NodeChange, TierRecord, View
from kvpool.types import EngineRecord


@dataclass
class MemoryOnly:
    """A `LocalNode` that notes what it is told. kept: settings that would outlive the process."""

    node: Node
    repairs: int = 0
    kept: list[NamespaceSettings] = field(default_factory=list)

    def holdings(self) -> Mapping[int, Holdings]:
        return {TIERS["dram"]: self.node.inventory}

    def below(self, namespace: NamespaceState) -> bool:
        return False

    def lower_tiers(self) -> Sequence[TierRecord]:
        return ()

    def engines(self) -> tuple[EngineRecord, ...]:
        return ()

    def path_to(self, url: str) -> str:
        return url

    def namespace_entered(self, namespace: NamespaceState) -> None:
        pass

    def namespace_configured(self, namespace: NamespaceState) -> None:
        pass

    async def keep_epoch(self, namespace: NamespaceState) -> None:
        self.kept.append(namespace.settings)

    def replicas_lacking(self) -> None:
        self.repairs += 1

    def drain_wanted(self, wanted: bool) -> None:
        pass

    def view_changed(self, before: View, after: View, nodes: Sequence[NodeChange]) -> None:
        pass

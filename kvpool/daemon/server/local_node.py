"""Forwards the cluster's calls to each part of this node. Event loop only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvpool.daemon.cluster.draining import Drainer
from kvpool.daemon.cluster.engine_registry import EngineRegistry
from kvpool.daemon.cluster.local_node import Holdings
from kvpool.daemon.cluster.replication import Replication
from kvpool.daemon.core.blocks import NamespaceState
from kvpool.daemon.core.node import Node
from kvpool.daemon.ops.event_log import EventLog, membership_news
from kvpool.daemon.tiers.device_tier import DeviceTier
from kvpool.daemon.tiers.engine_caches import Engines
from kvpool.daemon.tiers.object_tier import ObjectTier
from kvpool.daemon.tiers.ssd_tier import SsdTier
from kvpool.daemon.tiers.tier_rules import TierRules
from kvpool.placement.directory.base import TIERS
from kvpool.placement.records import NodeChange, TierRecord, View, quota_bytes
from kvpool.types import EngineRecord


@dataclass(eq=False, repr=False, slots=True)
class DaemonNode:
    """The `LocalNode` of a daemon."""

    _node: Node
    _ssd: SsdTier
    _objects: ObjectTier
    _device: DeviceTier | None
    _engines: Engines
    _registry: EngineRegistry
    _replication: Replication
    _drainer: Drainer
    _events: EventLog
    _rules: TierRules
    path_to: Callable[[str], str]
    """Returns how a peer is reached, by its URL."""
    _shared: Mapping[int, Holdings]
    """Tiers whose changes others read too."""

    def holdings(self) -> Mapping[int, Holdings]:
        """See `LocalNode`. Engines' caches are announced once the first engine publishes events."""
        found: dict[int, Holdings] = {TIERS["dram"]: self._node.inventory}
        if self._ssd.devices:
            found[TIERS["ssd"]] = self._ssd
        if self._device is not None:
            found[TIERS["device"]] = self._device
        return found | {tier: held for tier, held in self._shared.items() if tier in found}

    def lower_tiers(self) -> Sequence[TierRecord]:
        """See `LocalNode`."""
        found = self._ssd.records() if self._ssd.devices else ()
        return found if self._device is None else (*found, self._device.record())

    def engines(self) -> tuple[EngineRecord, ...]:
        """See `LocalNode`."""
        return self._registry.records()

    def below(self, namespace: NamespaceState) -> bool:
        """See `LocalNode`."""
        return self._rules.below(namespace)

    def namespace_entered(self, namespace: NamespaceState) -> None:
        """See `LocalNode`."""
        if self._ssd.devices:
            self._ssd.enter(namespace)
        if self._device is not None:
            self._device.enter(namespace)
        self._engines.enter(namespace)
        self._objects.enter(namespace)

    def namespace_configured(self, namespace: NamespaceState) -> None:
        """See `LocalNode`. Applies the namespace's quota of its tenant's memory."""
        size = namespace.tenant.allocator.size
        self._node.quotas.set(namespace, quota_bytes(namespace.settings.dram_quota, size))
        self._ssd.limit(namespace)

    async def keep_epoch(self, namespace: NamespaceState) -> None:
        """See `LocalNode`. Disks store it; without disks nothing survives the process."""
        if self._ssd.devices:
            await self._ssd.record(namespace)

    def replicas_lacking(self) -> None:
        """See `LocalNode`."""
        self._replication.repair()

    def drain_wanted(self, wanted: bool) -> None:
        """See `LocalNode`."""
        self._drainer.wanted(wanted)

    def view_changed(self, before: View, after: View, nodes: Sequence[NodeChange]) -> None:
        """See `LocalNode`. Nodes that join and leave are events."""
        for kind, details in membership_news(before, after, nodes):
            self._events.note(kind, **details)

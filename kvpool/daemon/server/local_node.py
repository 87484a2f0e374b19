"""Forwards the cluster's calls to each part of this node. Event loop only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvpool.daemon.cluster.local_node import Holdings
from kvpool.daemon.core.blocks import NamespaceState
from kvpool.daemon.ops.event_log import EventLog, membership_news
from kvpool.daemon.tiers.all_tiers import Tiers
from kvpool.daemon.tiers.engine_caches import Engines
from kvpool.placement.directory.base import TIERS
from kvpool.placement.records import NodeChange, TierRecord, View, quota_bytes
from kvpool.types import EngineRecord


@dataclass(eq=False, repr=False, slots=True)
class DaemonNode:
    """The `LocalNode` of a daemon."""

    _tiers: Tiers
    _caches: Engines
    engines: Callable[[], tuple[EngineRecord, ...]]
    replicas_lacking: Callable[[], None]
    drain_wanted: Callable[[bool], None]
    _events: EventLog
    path_to: Callable[[str], str]
    """Returns how a peer is reached, by its URL."""
    _shared: Mapping[int, Holdings]
    """Tiers whose changes others read too."""

    def holdings(self) -> Mapping[int, Holdings]:
        """See `LocalNode`. Engines' caches are announced once the first engine publishes events."""
        found: dict[int, Holdings] = {TIERS["dram"]: self._tiers.node.inventory}
        if self._tiers.ssd.devices:
            found[TIERS["ssd"]] = self._tiers.ssd
        if self._tiers.device is not None:
            found[TIERS["device"]] = self._tiers.device
        return found | {tier: held for tier, held in self._shared.items() if tier in found}

    def lower_tiers(self) -> Sequence[TierRecord]:
        """See `LocalNode`."""
        found = self._tiers.ssd.records() if self._tiers.ssd.devices else ()
        return found if self._tiers.device is None else (*found, self._tiers.device.record())

    def below(self, namespace: NamespaceState) -> bool:
        """See `LocalNode`."""
        return self._tiers.below(namespace)

    def namespace_entered(self, namespace: NamespaceState) -> None:
        """See `LocalNode`."""
        if self._tiers.ssd.devices:
            self._tiers.ssd.enter(namespace)
        if self._tiers.device is not None:
            self._tiers.device.enter(namespace)
        self._caches.enter(namespace)
        self._tiers.objects.enter(namespace)

    def namespace_configured(self, namespace: NamespaceState) -> None:
        """See `LocalNode`. Applies the namespace's quota of its tenant's memory."""
        size = namespace.tenant.allocator.size
        self._tiers.node.quotas.set(namespace, quota_bytes(namespace.settings.dram_quota, size))
        self._tiers.ssd.limit(namespace)

    async def keep_epoch(self, namespace: NamespaceState) -> None:
        """See `LocalNode`. Disks store it; without disks nothing survives the process."""
        if self._tiers.ssd.devices:
            await self._tiers.ssd.record(namespace)

    def view_changed(self, before: View, after: View, nodes: Sequence[NodeChange]) -> None:
        """See `LocalNode`. Nodes that join and leave are events."""
        for kind, details in membership_news(before, after, nodes):
            self._events.note(kind, **details)

"""All numbers of a node: for its tenants, its operators, and the gateway's metrics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvpool import __version__
from kvpool.daemon.cluster.member import ClusterMember
from kvpool.daemon.cluster.replication import Replication
from kvpool.daemon.core.blocks import Holder, Tenant
from kvpool.daemon.core.node import Node
from kvpool.daemon.features.features import Features
from kvpool.daemon.fetch.fetcher import BlockFetcher
from kvpool.daemon.fetch.prefix_stream import PrefixStreams
from kvpool.daemon.ops.audit_file import AuditFile
from kvpool.daemon.ops.event_publisher import EventPublisher
from kvpool.daemon.ops.logins import Logins
from kvpool.daemon.tiers.device_tier import DeviceTier
from kvpool.daemon.tiers.engine_caches import Engines
from kvpool.daemon.tiers.expiry import Expiry
from kvpool.daemon.tiers.object_tier import ObjectTier
from kvpool.daemon.tiers.ssd_tier import SsdTier
from kvpool.daemon.workers.processes import family
from kvpool.telemetry.cluster_stats import NixlStats, PathsStats, WorkerStats
from kvpool.telemetry.memory_stats import TenantStats
from kvpool.telemetry.node_stats import HotPrefix, NodeStats
from kvpool.wire import client as client_wire
from kvpool.wire import frame


@dataclass(slots=True)
class ConnectionCounts:
    """Clients and connections that there are, connections that were refused, and waits of connections whose tenant
    had used its share of the loop's time.
    """

    clients: int = 0
    connections: int = 0
    refused: int = 0
    waits: int = 0


class TransferStats(Protocol):
    """What the transfer workers say of themselves."""

    def stats(self) -> list[WorkerStats]: ...

    def nixl_stats(self) -> NixlStats | None: ...

    def path_stats(self) -> PathsStats: ...


@dataclass(eq=False)
class StatsGatherer:
    """Gathers the numbers of all parts of a daemon. Event loop only."""

    name: str
    node: Node
    cluster: ClusterMember
    workers: TransferStats
    ssd: SsdTier
    objects: ObjectTier
    device: DeviceTier | None
    fetcher: BlockFetcher
    streams: PrefixStreams
    replication: Replication
    engines: Engines
    publisher: EventPublisher
    expiry: Expiry
    features: Features
    connections: ConnectionCounts
    logins: Logins
    internal_errors: Mapping[str, int]
    audit: AuditFile | None
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._started = self.clock()

    def tenant(self, tenant: Tenant) -> NodeStats:
        """What a tenant may see: itself, and of the node what names no other."""
        return self._of([tenant], [])

    def answer(self, holder: Holder, m: client_wire.Stats) -> frame.Bytes:
        """Answer a client with what its tenant may see."""
        return frame.Bytes(msgspec.json.encode(self.tenant(holder.tenant)))

    def all(self) -> NodeStats:
        """The same of all tenants, and what is read most."""
        found = self._of(self.node.tenants.values(), self.features.hot_prefixes.hottest())
        return msgspec.structs.replace(found, event_streams=self.publisher.stats())

    def _of(self, tenants: Collection[Tenant], hot: list[HotPrefix]) -> NodeStats:
        self.features.accounts.settle()
        # Of others' objects, as answers to two tenants may lie side by side.
        tiers = msgspec.structs.replace(
            self.ssd.stats(),
            object=self.objects.stats(),
            device=[] if self.device is None else [self.device.stats()],
            clean_share={tenant.name: self.ssd.clean_share(tenant) for tenant in tenants},
        )
        return NodeStats(
            node=self.name,
            incarnation=self.node.incarnation,
            version=__version__,
            uptime_s=self.clock() - self._started,
            clients=self.connections.clients,
            connections=self.connections.connections,
            refused_connections=self.connections.refused,
            tenant_waits=self.connections.waits,
            failed_logins=dict(self.logins.failed),
            internal_errors=dict(self.internal_errors),
            subscriptions_ended=dict(self.node.events.ended),
            audit=None if self.audit is None else self.audit.stats(),
            counters=self.node.counters,
            gone=self.node.counters.gone(),
            leases=self.node.leases.count,
            expired=self.expiry.expired,
            tenants={tenant.name: self._tenant(tenant) for tenant in tenants},
            tiers=tiers,
            fetch=self.fetcher.stats(),
            sources=self.fetcher.active,
            prefix_streams=self.streams.stats(),
            replication=self.replication.stats(),
            transfer_workers=self.workers.stats(),
            nixl=self.workers.nixl_stats(),
            paths=self.workers.path_stats(),
            cluster=self.cluster.stats(),
            sampled=self.features.sampler.stats(),
            processes=family(),
            hot=hot,
        )

    def _tenant(self, tenant: Tenant) -> TenantStats:
        stats = self.node.inventory.tenant_stats(tenant)
        stats.usage.ssd = self.ssd.usage(tenant.name)
        stats.engines = self.engines.stats(tenant.name)
        traffic, misses = self.features.traffic, self.features.miss_reasons.misses
        stats.traffic = traffic.of(tenant.name)
        for namespace in tenant.namespaces.values():
            found = stats.namespaces[namespace.base_hex]
            found.reads, found.misses = traffic.reads(namespace), misses.of(namespace)
        return stats

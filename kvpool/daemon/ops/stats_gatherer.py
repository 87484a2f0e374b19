"""All numbers of a node: for its tenants, its operators, and the gateway's metrics."""

from __future__ import annotations

from collections.abc import Callable, Collection
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
from kvpool.wire.faults import Faults


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


class Parts(Protocol):
    """The parts of a daemon that have numbers."""

    node: Node
    cluster: ClusterMember
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
    counts: ConnectionCounts
    logins: Logins
    faults: Faults
    audit: AuditFile | None

    @property
    def transport(self) -> TransferStats: ...


class StatsGatherer:
    """Gathers the numbers of all parts of a daemon, which must have been made by then. Event loop only."""

    def __init__(self, parts: Parts, clock: Callable[[], float]) -> None:
        self._parts = parts
        self._clock = clock
        self._started = clock()

    def tenant(self, tenant: Tenant) -> NodeStats:
        """What a tenant may see: itself, and of the node what names no other."""
        return self._of([tenant], [])

    def answer(self, holder: Holder, _: client_wire.Stats) -> frame.Bytes:
        """Answer a client with what its tenant may see."""
        return frame.Bytes(msgspec.json.encode(self.tenant(holder.tenant)))

    def all(self) -> NodeStats:
        """The same of all tenants, and what is read most."""
        parts = self._parts
        found = self._of(parts.node.tenants.values(), parts.features.hot_prefixes.hottest())
        return msgspec.structs.replace(found, event_streams=parts.publisher.stats())

    def _of(self, tenants: Collection[Tenant], hot: list[HotPrefix]) -> NodeStats:
        parts = self._parts
        parts.features.accounts.settle()
        # Of others' objects, as answers to two tenants may lie side by side.
        tiers = msgspec.structs.replace(
            parts.ssd.stats(),
            object=parts.objects.stats(),
            device=[] if parts.device is None else [parts.device.stats()],
            clean_share={tenant.name: parts.ssd.clean_share(tenant) for tenant in tenants},
        )
        return NodeStats(
            node=parts.cluster.config.node,
            incarnation=parts.node.incarnation,
            version=__version__,
            uptime_s=self._clock() - self._started,
            clients=parts.counts.clients,
            connections=parts.counts.connections,
            refused_connections=parts.counts.refused,
            tenant_waits=parts.counts.waits,
            failed_logins=dict(parts.logins.failed),
            internal_errors=dict(parts.faults.counts),
            subscriptions_ended=dict(parts.node.events.ended),
            audit=None if parts.audit is None else parts.audit.stats(),
            counters=parts.node.counters,
            gone=parts.node.counters.gone(),
            leases=parts.node.leases.count,
            expired=parts.expiry.expired,
            tenants={tenant.name: self._tenant(tenant) for tenant in tenants},
            tiers=tiers,
            fetch=parts.fetcher.stats(),
            sources=parts.fetcher.active,
            prefix_streams=parts.streams.stats(),
            replication=parts.replication.stats(),
            transfer_workers=parts.transport.stats(),
            nixl=parts.transport.nixl_stats(),
            paths=parts.transport.path_stats(),
            cluster=parts.cluster.stats(),
            sampled=parts.features.sampler.stats(),
            processes=family(),
            hot=hot,
        )

    def _tenant(self, tenant: Tenant) -> TenantStats:
        parts = self._parts
        stats = parts.node.inventory.tenant_stats(tenant)
        stats.usage.ssd = parts.ssd.usage(tenant.name)
        stats.engines = parts.engines.stats(tenant.name)
        traffic, misses = parts.features.traffic, parts.features.miss_reasons.misses
        stats.traffic = traffic.of(tenant.name)
        for namespace in tenant.namespaces.values():
            found = stats.namespaces[namespace.base_hex]
            found.reads, found.misses = traffic.reads(namespace), misses.of(namespace)
        return stats

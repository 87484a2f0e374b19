"""All numbers of a node: for its tenants, its operators, and the gateway's metrics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvpool import __version__
from kvpool.daemon.cluster.member import ClusterMember
from kvpool.daemon.cluster.replication import Replication
from kvpool.daemon.core.accounts import Accounts
from kvpool.daemon.core.blocks import Tenant
from kvpool.daemon.core.node import Node
from kvpool.daemon.fetch.fetcher import BlockFetcher
from kvpool.daemon.fetch.prefix_stream import PrefixStreams
from kvpool.daemon.ops.audit_file import AuditFile
from kvpool.daemon.ops.event_publisher import EventPublisher
from kvpool.daemon.ops.hot_prefixes import HotPrefixes
from kvpool.daemon.ops.logins import Logins
from kvpool.daemon.ops.sampling import Sampler
from kvpool.daemon.tiers.device_tier import DeviceTier
from kvpool.daemon.tiers.engine_caches import Engines
from kvpool.daemon.tiers.expiry import Expiry
from kvpool.daemon.tiers.object_tier import ObjectTier
from kvpool.daemon.tiers.ssd_tier import SsdTier
from kvpool.daemon.workers.processes import family
from kvpool.telemetry.cluster_stats import NixlStats, PathsStats, WorkerStats
from kvpool.telemetry.memory_stats import TenantStats
from kvpool.telemetry.node_stats import HotPrefix, NodeStats


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


class StatsGatherer:
    """Gathers the numbers of all parts of a daemon. Event loop only."""

    def __init__(
        self,
        name: str,
        node: Node,
        cluster: ClusterMember,
        workers: TransferStats,
        ssd: SsdTier,
        objects: ObjectTier,
        device: DeviceTier | None,
        fetcher: BlockFetcher,
        streams: PrefixStreams,
        replication: Replication,
        engines: Engines,
        publisher: EventPublisher,
        expiry: Expiry,
        sampler: Sampler,
        hot_prefixes: HotPrefixes,
        connections: ConnectionCounts,
        logins: Logins,
        internal_errors: Mapping[str, int],
        audit: AuditFile | None,
        accounts: Accounts,
        clock: Callable[[], float],
    ) -> None:
        self._name = name
        self._node = node
        self._cluster = cluster
        self._workers = workers
        self._ssd = ssd
        self._objects = objects
        self._device = device
        self._fetcher = fetcher
        self._streams = streams
        self._replication = replication
        self._engines = engines
        self._publisher = publisher
        self._expiry = expiry
        self._sampler = sampler
        self._hot_prefixes = hot_prefixes
        self._connections = connections
        self._logins = logins
        self._internal_errors = internal_errors
        self._audit = audit
        self._accounts = accounts
        self._clock = clock
        self._started = clock()

    def tenant(self, tenant: Tenant) -> NodeStats:
        """What a tenant may see: itself, and of the node what names no other."""
        return self._of([tenant], [])

    def all(self) -> NodeStats:
        """The same of all tenants, and what is read most."""
        found = self._of(self._node.tenants.values(), self._hot_prefixes.hottest())
        return msgspec.structs.replace(found, event_streams=self._publisher.stats())

    def _of(self, tenants: Collection[Tenant], hot: list[HotPrefix]) -> NodeStats:
        self._accounts.settle()
        # Of others' objects, as answers to two tenants may lie side by side.
        tiers = msgspec.structs.replace(
            self._ssd.stats(),
            object=self._objects.stats(),
            device=[] if self._device is None else [self._device.stats()],
            clean_share={tenant.name: self._ssd.clean_share(tenant) for tenant in tenants},
        )
        return NodeStats(
            node=self._name,
            incarnation=self._node.incarnation,
            version=__version__,
            uptime_s=self._clock() - self._started,
            clients=self._connections.clients,
            connections=self._connections.connections,
            refused_connections=self._connections.refused,
            tenant_waits=self._connections.waits,
            failed_logins=dict(self._logins.failed),
            internal_errors=dict(self._internal_errors),
            audit=None if self._audit is None else self._audit.stats(),
            counters=self._node.counters,
            gone=self._node.counters.gone(),
            leases=self._node.leases.count,
            expired=self._expiry.expired,
            tenants={tenant.name: self._tenant(tenant) for tenant in tenants},
            tiers=tiers,
            fetch=self._fetcher.stats(),
            sources=self._fetcher.active,
            prefix_streams=self._streams.stats(),
            replication=self._replication.stats(),
            transfer_workers=self._workers.stats(),
            nixl=self._workers.nixl_stats(),
            paths=self._workers.path_stats(),
            cluster=self._cluster.stats(),
            sampled=self._sampler.stats(),
            processes=family(),
            hot=hot,
        )

    def _tenant(self, tenant: Tenant) -> TenantStats:
        stats = self._node.inventory.tenant_stats(tenant)
        stats.usage.ssd = self._ssd.usage(tenant.name)
        stats.engines = self._engines.stats(tenant.name)
        return stats

"""All numbers of a node as plain values: for its tenants, its operators, and the gateway's metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kvpool import __version__
from kvpool.daemon.cluster.member import ClusterMember
from kvpool.daemon.cluster.replication import Replication
from kvpool.daemon.core.blocks import Tenant
from kvpool.daemon.core.node import Node
from kvpool.daemon.fetch.fetcher import BlockFetcher
from kvpool.daemon.fetch.prefix_stream import PrefixStreams
from kvpool.daemon.ops.hot_prefixes import HotPrefixes
from kvpool.daemon.ops.sampling import Sampler
from kvpool.daemon.tiers.device_tier import DeviceTier
from kvpool.daemon.tiers.engine_caches import Engines
from kvpool.daemon.tiers.expiry import Expiry
from kvpool.daemon.tiers.object_tier import ObjectTier
from kvpool.daemon.tiers.ssd_tier import SsdTier
from kvpool.daemon.workers.processes import family


@dataclass(slots=True)
class ConnectionCounts:
    """Clients and connections that there are, and connections that were refused."""

    clients: int = 0
    connections: int = 0
    refused: int = 0


class WorkerStats(Protocol):
    """What the transfer workers say of themselves."""

    def stats(self) -> list[dict[str, Any]]: ...

    def nixl_stats(self) -> dict[str, Any] | None: ...

    def path_stats(self) -> Mapping[str, Any]: ...


class NodeStats:
    """Gathers the numbers of all parts of a daemon. Event loop only."""

    def __init__(
        self,
        name: str,
        node: Node,
        cluster: ClusterMember,
        workers: WorkerStats,
        ssd: SsdTier,
        objects: ObjectTier,
        device: DeviceTier | None,
        fetcher: BlockFetcher,
        streams: PrefixStreams,
        replication: Replication,
        engines: Engines,
        expiry: Expiry,
        sampler: Sampler,
        hot_prefixes: HotPrefixes,
        connections: ConnectionCounts,
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
        self._expiry = expiry
        self._sampler = sampler
        self._hot_prefixes = hot_prefixes
        self._connections = connections
        self._clock = clock
        self._started = clock()

    def tenant(self, tenant: Tenant) -> dict[str, Any]:
        """What a tenant may see: itself, and of the node what names no other."""
        name = tenant.name
        stats = self._of_node()
        stats["tenants"] = {name: stats["tenants"][name]}
        stats["usage"] = self._usage(tenant)
        stats["engines"] = self._engines.stats(name)
        shares = stats["tiers"]["clean_share"]
        stats["tiers"]["clean_share"] = {name: shares[name]}
        return stats

    def all(self) -> dict[str, Any]:
        """The same of all tenants, `usage` and `engines` by tenant."""
        tenants = self._node.tenants
        return {
            **self._of_node(),
            "usage": {name: self._usage(tenant) for name, tenant in tenants.items()},
            "engines": {name: self._engines.stats(name) for name in tenants},
            "hot": self._hot_prefixes.hottest(),
        }

    def _usage(self, tenant: Tenant) -> dict[str, Any]:
        return {
            "dram": [{"where": "", **self._node.inventory.usage(tenant)}],
            "ssd": self._ssd.usage(tenant.name),
        }

    def _of_node(self) -> dict[str, Any]:
        device = [] if self._device is None else [self._device.stats()]
        return {
            **self._node.inventory.stats(),
            "node": self._name,
            "incarnation": self._node.incarnation,
            "uptime_s": self._clock() - self._started,
            "clients": self._connections.clients,
            "connections": self._connections.connections,
            "refused_connections": self._connections.refused,
            "transfer_workers": self._workers.stats(),
            "nixl": self._workers.nixl_stats(),
            "paths": self._workers.path_stats(),
            "fetch": self._fetcher.stats(),
            "prefix_streams": self._streams.stats(),
            "replication": self._replication.stats(),
            "tiers": {**self._ssd.stats(), "object": self._objects.stats(), "device": device},
            "sources": self._fetcher.active,
            "expired": self._expiry.expired,
            "cluster": self._cluster.summary(),
            "sampled": self._sampler.stats(),
            "processes": family(),
            "version": __version__,
        }

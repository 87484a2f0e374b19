"""A daemon, made of its parts by their constructors: the only place where that happens.

A part knows nothing of parts that are made later. Where events flow the other way, they use a port:
the cluster calls a `LocalNode`, transfer workers ask a `PeerService`; both are passed when their source starts.
"""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from kvpool.config import DaemonConfig
from kvpool.daemon.cluster.draining import Drainer
from kvpool.daemon.cluster.engine_registry import EngineRegistry
from kvpool.daemon.cluster.host_topology import HostTopology
from kvpool.daemon.cluster.joining import open_catalog
from kvpool.daemon.cluster.member import ClusterMember
from kvpool.daemon.cluster.namespaces import Namespaces
from kvpool.daemon.cluster.peer_service import PeerService
from kvpool.daemon.cluster.replication import Replication
from kvpool.daemon.core.blocks import NamespaceState
from kvpool.daemon.core.events import Events, Named, Read
from kvpool.daemon.core.limits import Limits
from kvpool.daemon.core.node import Node
from kvpool.daemon.core.requests import parse_parts
from kvpool.daemon.features.accounts import Accounts
from kvpool.daemon.features.departures import Departures
from kvpool.daemon.features.features import Features
from kvpool.daemon.features.hot_prefixes import HotPrefixes
from kvpool.daemon.features.miss_reasons import MissReasons
from kvpool.daemon.features.sampling import Sampler
from kvpool.daemon.features.traffic import TrafficCounts
from kvpool.daemon.fetch.fetcher import BlockFetcher
from kvpool.daemon.fetch.ports import DISKS_MAX, NOT_NODES, PeerTransport
from kvpool.daemon.fetch.prefix_stream import PrefixStreams
from kvpool.daemon.fetch.probing import Prober
from kvpool.daemon.ops.audit_file import AuditFile
from kvpool.daemon.ops.changes import Changes
from kvpool.daemon.ops.event_log import EventLog
from kvpool.daemon.ops.event_publisher import EventPublisher
from kvpool.daemon.ops.intents import Intents
from kvpool.daemon.ops.jobs import JobCommands, JobRunner, Work
from kvpool.daemon.ops.logins import Logins
from kvpool.daemon.ops.operators import Operators
from kvpool.daemon.ops.peer_requests import OtherNodes
from kvpool.daemon.ops.prefetcher import Prefetcher
from kvpool.daemon.ops.presence import Presences
from kvpool.daemon.ops.receipts import AccountPeriods, ReceiptsFile
from kvpool.daemon.ops.removals import Removals
from kvpool.daemon.ops.reports import BlockReports, Reports
from kvpool.daemon.ops.session_commands import SessionCommands
from kvpool.daemon.ops.session_turns import SessionTurns
from kvpool.daemon.ops.shared_holdings import SharedHoldings
from kvpool.daemon.ops.stats_gatherer import ConnectionCounts, StatsGatherer, TransferStats
from kvpool.daemon.server.connections import ClientConnections
from kvpool.daemon.server.local_node import DaemonNode
from kvpool.daemon.server.loop_shares import LoopShares
from kvpool.daemon.server.reads import Reads
from kvpool.daemon.server.requests import ClientRequests
from kvpool.daemon.server.writes import Writes
from kvpool.daemon.tiers.all_tiers import Tiers
from kvpool.daemon.tiers.device_tier import DeviceTier
from kvpool.daemon.tiers.engine_caches import Engines, zmq_subscribe
from kvpool.daemon.tiers.expiry import Expiry
from kvpool.daemon.tiers.object_tier import ObjectTier
from kvpool.daemon.tiers.ssd_books import TableRecord
from kvpool.daemon.tiers.ssd_tier import SsdTier
from kvpool.daemon.workers.turns import PULLS
from kvpool.errors import KvpoolError
from kvpool.memory.segment import Segment
from kvpool.placement.directory.base import TIERS, Directory
from kvpool.placement.membership.base import Membership
from kvpool.placement.nic_pairs import Route
from kvpool.placement.peers import Peers
from kvpool.placement.records import NodeState, new_incarnation
from kvpool.storage.eviction import DEFAULT_POLICY, Costs, policy_maker
from kvpool.storage.stack import dram_costs, ssd_costs
from kvpool.telemetry.spans import Spans
from kvpool.wire.faults import Faults

log = logging.getLogger("kvpool.daemon")


class Transport(PeerTransport, TransferStats, Protocol):
    """Moves bytes and requests between nodes: `TransferWorkers`, or a simulation of them."""

    @property
    def idle(self) -> bool: ...

    def path_to(self, url: str) -> str: ...


T = TypeVar("T", bound=Transport)


@dataclass(frozen=True, slots=True)
class Clocks:
    """monotonic: seconds. wall, wall_ns: since 1970."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    wall_ns: Callable[[], int] = time.time_ns


def make_rules(
    config: DaemonConfig,
    incarnation: str,
    costs: Costs,
    events: Events | None,
    tier: str,
    *,
    packed: bool = False,
) -> Node:
    """Rules of an empty tier. events, packed: see `Node`."""
    policy = config.policy or DEFAULT_POLICY
    return Node(
        make_policy=policy_maker(policy, costs),
        # The other connections of peers are for pulls.
        limits=Limits(lease_s_max=config.lease_s_max, waiters_max=max(1, config.peers_max // 2)),
        incarnation=incarnation,
        packed=packed,
        events=events,
        tier=tier,
    )


def make_memory_rules(
    config: DaemonConfig,
    incarnation: str,
    events: Events | None = None,
    tier: str = "dram",
) -> Node:
    """Rules of DRAM, or of spare device memory. events: of the daemon's other tiers; None: begin them."""
    return make_rules(config, incarnation, dram_costs(disks=bool(config.ssd)), events, tier)


class Daemon(Generic[T]):
    """Makes all parts of a daemon. Nothing runs yet.

    segments: each tenant's memory. make_transport: given the paths to a peer, by its URL. rng: for tie-breaking
    only. cluster_secrets: the cluster's, those accepted now. encryption: the secrets of the encryption at rest, in use
    now. audit: keeps operators' changes and failed logins; its owner closes it. receipts_file:
    of tenants' accounts.
    """

    def __init__(
        self,
        config: DaemonConfig,
        node: Node,
        membership: Membership,
        directory: Directory | None,
        segments: Mapping[str, Segment],
        make_transport: Callable[[Callable[[str], Route | None]], T],
        topology: HostTopology,
        rng: random.Random,
        clocks: Clocks,
        cluster_secrets: Callable[[], tuple[bytes, ...]] = tuple,
        encryption: Callable[[], list[bytes]] = list,
        audit: AuditFile | None = None,
        receipts_file: ReceiptsFile | None = None,
        next_incarnation: Callable[[], str] = new_incarnation,
    ) -> None:
        self.config = config
        self.node = node
        self.audit = audit
        self._clocks = clocks
        self._clock = clock = clocks.monotonic
        self._peers = Peers(config.labels, rng, apart=NOT_NODES)
        self.cluster = ClusterMember(
            config, node, membership, directory, self._peers, clock, rng, topology, next_incarnation
        )
        self.transport = make_transport(self.cluster.route)
        self.faults = Faults(clock)
        self.spans = Spans(clocks.wall_ns, secrets.token_bytes, on=bool(config.otlp))
        self._make_tiers(membership, cluster_secrets, encryption)
        self._make_movers()
        self._make_features(receipts_file)
        self._make_answers()
        self._make_doors(segments)

    def _make_tiers(
        self,
        membership: Membership,
        cluster_secrets: Callable[[], tuple[bytes, ...]],
        encryption: Callable[[], list[bytes]],
    ) -> None:
        """Make what holds blocks below memory, and beside it."""
        config, node, clock = self.config, self.node, self._clock
        self.ssd = SsdTier(
            config,
            node,
            clock,
            lambda: make_rules(
                *(config, node.incarnation, ssd_costs(), node.events, "ssd"), packed=True
            ),
            partial(adopt_from_disk, node, self.cluster.namespaces),
            encryption,
        )
        catalog = open_catalog(config, clock)
        self.objects = ObjectTier(
            config, node, membership, catalog, clock, cluster_secrets, encryption
        )
        self.device: DeviceTier | None = None
        if config.device is not None:
            self.device = DeviceTier(
                config.device,
                node,
                clock,
                lambda: make_memory_rules(config, node.incarnation, node.events, "device"),
            )
        self.tiers = Tiers(node, self.ssd, self.device, self.objects)
        self.expiry = Expiry(lambda: [tier for _, tier in self.tiers], self.tiers.ttl_s, clock)
        self.engines = Engines(
            config,
            node,
            (node.inventory, self.ssd, *(() if self.device is None else (self.device,))),
            zmq_subscribe(clock) if config.events else None,
            self.cluster.announcing.announce,
        )

    def _make_movers(self) -> None:
        """Make what moves blocks between tiers and nodes."""
        config, node, cluster, clock = self.config, self.node, self.cluster, self._clock
        self.fetcher = BlockFetcher(
            node,
            self.transport,
            cluster,
            self.ssd.sources(DISKS_MAX),
            self.objects,
            self._peers,
            clock,
            self.device,
            PULLS.times(config.transfer_workers),
        )
        self.streams = PrefixStreams(
            node, self.fetcher, self.transport, cluster, clock, config.node
        )
        self.replication = Replication(node, cluster, self.fetcher, self.ssd, self.transport, clock)
        self.drainer = Drainer(node, cluster, self.replication, self.ssd, clock)
        self.prefetcher = Prefetcher(node, self.fetcher, clock)
        self.prober = Prober(self.transport, cluster, self._peers, clock)

    def _make_features(self, receipts_file: ReceiptsFile | None) -> None:
        """Make the features that observe blocks and clients, and have them observe."""
        config, node, clock, wall = self.config, self.node, self._clock, self._clocks.wall
        departures = Departures(config.departures_max, above_disks=bool(config.ssd))
        departures.begin(clock())
        traffic = TrafficCounts()
        disks_bytes = sum(disk.size for disk in config.ssd)
        tiers = {"dram": True, "ssd": config.ssd, "device": config.device}
        self.features = Features(
            traffic,
            Accounts(config.node, node, traffic, clock, wall),
            MissReasons(
                *(config.node, node, departures, self.fetcher, self.cluster),
                [tenant.name for tenant in config.all_tenants()],
                {name: int(share * disks_bytes) for name, share in config.ssd_shares().items()},
                self.ssd.processes.lost_since,
                clock,
            ),
            HotPrefixes(),
            Sampler(clock, [tier for tier, there in tiers.items() if there]),
        )
        self.features.subscribe(node.events)
        node.events.subscribe("fetches", {Read: self.fetcher.was_read})
        node.events.subscribe("engine_caches", {Named: self.engines.saw})
        if self.device is not None:
            node.events.subscribe("device", {Read: self.device.was_read})
        self.receipts = AccountPeriods(self.features.accounts, receipts_file, wall)
        audit = self.audit
        self.journal = EventLog(
            config.node,
            wall,
            None if audit is None else lambda e: audit.write(e.at_s, e.node, e.kind, e.details),
        )
        self.logins = Logins(self.journal, clock)
        self.counts = ConnectionCounts()
        # Only where somebody else reads a tier's changes does it cost anything.
        self._shared: dict[str, SharedHoldings] = {}
        if config.publish_events:
            self._shared = {
                "dram": SharedHoldings(node.inventory),
                "ssd": SharedHoldings(self.ssd),
            }
        self.publisher = EventPublisher(
            config.publish_events,
            config.node,
            config.socket_mode,
            {tier: each.reader() for tier, each in self._shared.items()},
            wall,
        )

    def _make_answers(self) -> None:
        """Make what answers clients and operators."""
        config, node, cluster, clock = self.config, self.node, self.cluster, self._clock
        self.presences = Presences(node, self.fetcher, clock)
        self.removals = Removals(
            *(self.tiers, self.fetcher.transfers, cluster, self.transport, clock),
            has_objects=bool(config.object_store),
        )
        self.sessions = SessionTurns(config.node, node, self.ssd, cluster, self.transport, clock)
        self.intents = Intents(
            self.tiers, self.fetcher, self.prefetcher, self.sessions.known, clock
        )
        others = OtherNodes(config.node, cluster, self.transport)
        jobs = JobRunner(
            config.node,
            Work(
                self.ssd, self.fetcher, self.tiers.by_tier, others.list_blocks, others.evict, clock
            ),
            self.journal,
            clock,
            [tenant.name for tenant in config.all_tenants()],
        )
        self.stats = StatsGatherer(self, clock)
        self.operators = Operators(
            node,
            Changes(config, cluster, self.tiers, self.replication, self.journal, clock),
            others,
            jobs,
            (
                Reports(
                    cluster,
                    self.stats,
                    self.journal,
                    self.features.miss_reasons,
                    self.receipts,
                    self.spans,
                ),
                BlockReports(config.node, cluster, self.tiers, self.fetcher, self.engines, clock),
                SessionCommands(
                    cluster, self.tiers, self.sessions, self.intents, self.journal, clock
                ),
                JobCommands(config.node, cluster, jobs, self.journal),
            ),
        )

    def _make_doors(self, segments: Mapping[str, Segment]) -> None:
        """Make the ways in: for clients, for peers, and for what the membership says."""
        config, node, cluster, clock = self.config, self.node, self.cluster, self._clock
        tenants = [tenant.name for tenant in config.all_tenants()]
        loop_shares = LoopShares(tenants) if len(tenants) > 1 else None
        registry = EngineRegistry(
            config.engines_max, [each.name for each in config.all_tenants() if each.announce]
        )

        def may_free(namespace: NamespaceState) -> bool:
            return not self.tiers.below(namespace) and not cluster.namespaces.pending(namespace)

        self.reads = Reads(node, self.device, self.fetcher, self.streams, clock)
        self.requests = ClientRequests(
            node,
            cluster,
            self.ssd,
            self.fetcher,
            self.engines,
            registry,
            self.presences,
            self.removals,
            self.intents,
            self.operators,
            self.reads,
            Writes(node, cluster, self.ssd, self.replication, clock),
            (self.sessions, self.stats, self.features.accounts),
            may_free,
            self.spans,
            loop_shares,
            self.faults,
            clock,
        )
        self.connections = ClientConnections(
            *(node, self.requests, self.operators, self.engines, registry, self.device),
            *(segments, self.counts, self.logins, loop_shares),
        )
        self.peer_service = PeerService(
            *(node, self.fetcher.lookups, self.fetcher.promote, clock),
            may_serve=cluster.may_serve,
            stale=cluster.announcing.stale,
            take=self.replication.take,
            remove=self.removals.for_other,
            end_session=self.sessions.ended_elsewhere,
            stores=lambda: cluster.state is NodeState.SERVING,
            operate=self.operators.operated,
            spans=self.spans,
            faults=self.faults,
            name=config.node,
            logins_failed=partial(self.logins.fail_all, "peer"),
        )
        self.local = DaemonNode(
            self.tiers,
            self.engines,
            registry.records,
            self.replication.repair,
            self.drainer.wanted,
            self.journal,
            self.transport.path_to,
            {TIERS[tier]: each.reader() for tier, each in self._shared.items()},
        )


async def adopt_from_disk(
    node: Node, namespaces: Namespaces, record: TableRecord
) -> NamespaceState | None:
    """Register a namespace found on a disk; None if its tenant does not exist any more."""
    tenant = node.tenants.get(record.tenant)
    if tenant is None:
        return None
    try:
        specs = parse_parts(record.base, record.fields, record.parts)
        return await namespaces.adopt(
            tenant,
            record.base,
            record.fields,
            specs,
            record.epoch,
            record.generation,
            record.settings,
        )
    except KvpoolError as error:
        log.warning(
            "the blocks of namespace %s on disk are dropped: %s",
            record.base.hex(),
            error,
            extra={"namespace": record.base.hex()},
        )
        return None

"""Composes a daemon's parts, by constructors: the only place where that happens.

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
from kvpool.daemon.server.requests import ClientRequests
from kvpool.daemon.tiers.device_tier import DeviceTier
from kvpool.daemon.tiers.engine_caches import Engines, zmq_subscribe
from kvpool.daemon.tiers.expiry import Expiry
from kvpool.daemon.tiers.object_tier import ObjectTier
from kvpool.daemon.tiers.ssd_books import TableRecord
from kvpool.daemon.tiers.ssd_tier import SsdTier
from kvpool.daemon.tiers.tier_rules import TierRules
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
from kvpool.wire import client as client_wire
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


@dataclass(frozen=True, slots=True)
class Daemon(Generic[T]):
    """The parts of a daemon that take part in its start and stop."""

    node: Node
    cluster: ClusterMember
    transport: T
    peer_service: PeerService
    ssd: SsdTier
    objects: ObjectTier
    device: DeviceTier | None
    engines: Engines
    events: EventPublisher
    fetcher: BlockFetcher
    streams: PrefixStreams
    replication: Replication
    drainer: Drainer
    expiry: Expiry
    sessions: SessionTurns
    receipts: AccountPeriods
    prefetcher: Prefetcher
    intents: Intents
    features: Features
    prober: Prober
    operators: Operators
    requests: ClientRequests
    connections: ClientConnections
    logins: Logins
    local: DaemonNode


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


def compose(
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
) -> Daemon[T]:
    """Make all parts of a daemon. Nothing runs yet.

    segments: each tenant's memory. make_transport: given the paths to a peer, by its URL. rng: for tie-breaking
    only. cluster_secrets: the cluster's, those accepted now. encryption: the secrets of the encryption at rest, in use
    now. audit: keeps operators' changes and failed logins; its owner closes it. receipts_file:
    of tenants' accounts.
    """
    clock = clocks.monotonic
    peers = Peers(config.labels, rng, apart=NOT_NODES)
    cluster = ClusterMember(
        config, node, membership, directory, peers, clock, rng, topology, next_incarnation
    )
    transport = make_transport(cluster.route)

    async def adopt(record: TableRecord) -> NamespaceState | None:
        return await adopt_from_disk(node, cluster.namespaces, record)

    ssd = SsdTier(
        config,
        node,
        clock,
        lambda: make_rules(
            *(config, node.incarnation, ssd_costs(), node.events, "ssd"), packed=True
        ),
        adopt,
        encryption,
    )
    objects = ObjectTier(
        config, node, membership, open_catalog(config, clock), clock, cluster_secrets, encryption
    )
    device: DeviceTier | None = None
    if config.device is not None:
        device = DeviceTier(
            config.device,
            node,
            clock,
            lambda: make_memory_rules(config, node.incarnation, node.events, "device"),
        )
    engines = Engines(
        config,
        node,
        (node.inventory, ssd, *(() if device is None else (device,))),
        zmq_subscribe(clock) if config.events else None,
        cluster.announce,
    )
    fetcher = BlockFetcher(
        node,
        transport,
        cluster,
        ssd.sources(DISKS_MAX),
        objects,
        peers,
        clock,
        device,
        PULLS.times(config.transfer_workers),
    )
    streams = PrefixStreams(node, fetcher, transport, cluster, clock, config.node)
    presences = Presences(node, fetcher, clock)
    removals = Removals(
        *(node, ssd, device, objects, fetcher.transfers, cluster, transport, clock),
        has_objects=bool(config.object_store),
    )
    prefetcher = Prefetcher(node, fetcher, clock)
    sessions = SessionTurns(config.node, node, ssd, cluster, transport, clock)
    replication = Replication(node, cluster, fetcher, ssd, transport, clock)
    drainer = Drainer(node, cluster, replication, ssd, clock)
    registry = EngineRegistry(
        config.engines_max, [each.name for each in config.all_tenants() if each.announce]
    )
    events = EventLog(
        config.node,
        clocks.wall,
        None if audit is None else lambda e: audit.write(e.at_s, e.node, e.kind, e.details),
    )
    logins = Logins(events, clock)
    # Only where somebody else reads a tier's changes does it cost anything.
    held: dict[str, SharedHoldings] = {}
    if config.publish_events:
        held = {"dram": SharedHoldings(node.inventory), "ssd": SharedHoldings(ssd)}
    publisher = EventPublisher(
        config.publish_events,
        config.node,
        config.socket_mode,
        {tier: each.reader() for tier, each in held.items()},
        clocks.wall,
    )
    rules = TierRules(node, ssd, device)
    intents = Intents(node, ssd, rules, fetcher, prefetcher, sessions.known, clock)
    tenants = [tenant.name for tenant in config.all_tenants()]
    loop_shares = LoopShares(tenants) if len(tenants) > 1 else None

    def may_free(namespace: NamespaceState) -> bool:
        return not rules.below(namespace) and not cluster.namespaces.pending(namespace)

    expiry = Expiry(lambda: [tier for _, tier in rules], rules.ttl_s, clock)
    features = make_features(config, node, fetcher, cluster, ssd, clocks)
    receipts = AccountPeriods(features.accounts, receipts_file, clocks.wall)
    node.events.subscribe("fetches", {Read: fetcher.was_read})
    node.events.subscribe("engine_caches", {Named: engines.saw})
    if device is not None:
        node.events.subscribe("device", {Read: device.was_read})
    faults = Faults(clock)
    spans = Spans(clocks.wall_ns, secrets.token_bytes, on=bool(config.otlp))
    counts = ConnectionCounts()
    stats = StatsGatherer(
        config.node,
        node,
        cluster,
        transport,
        ssd,
        objects,
        device,
        fetcher,
        streams,
        replication,
        engines,
        publisher,
        expiry,
        features,
        counts,
        logins,
        faults.counts,
        audit,
        clock,
    )
    others = OtherNodes(config.node, cluster, transport)
    jobs = JobRunner(
        config.node,
        Work(ssd, fetcher, rules.by_tier, others.list_blocks, others.evict, clock),
        events,
        clock,
        tenants,
    )
    operators = Operators(
        node,
        Changes(config, node, cluster, ssd, rules, replication, events, clock),
        others,
        jobs,
        Reports(cluster, stats, events, features.miss_reasons, receipts, spans),
        BlockReports(
            *(config.node, cluster, node, ssd, objects, device, rules, fetcher, engines, clock)
        ),
        SessionCommands(node, cluster, ssd, sessions, intents, events, clock),
        JobCommands(config.node, cluster, jobs, events),
    )
    requests = ClientRequests(
        config,
        node,
        cluster,
        ssd,
        device,
        fetcher,
        streams,
        replication,
        engines,
        registry,
        presences,
        removals,
        sessions,
        intents,
        operators,
        {client_wire.Stats: stats.answer, client_wire.EndRequest: features.accounts.end_request},
        may_free,
        spans,
        loop_shares,
        faults,
        clock,
    )
    return Daemon(
        node=node,
        cluster=cluster,
        transport=transport,
        peer_service=PeerService(
            node,
            fetcher,
            clock,
            may_serve=cluster.may_serve,
            stale=cluster.stale,
            take=replication.take,
            remove=removals.for_other,
            session_ended=sessions.ended_elsewhere,
            stores=lambda: cluster.state is NodeState.SERVING,
            operate=operators.operated,
            spans=spans,
            faults=faults,
            name=config.node,
            logins_failed=partial(logins.fail_all, "peer"),
        ),
        ssd=ssd,
        objects=objects,
        device=device,
        engines=engines,
        events=publisher,
        fetcher=fetcher,
        streams=streams,
        replication=replication,
        drainer=drainer,
        expiry=expiry,
        sessions=sessions,
        receipts=receipts,
        prefetcher=prefetcher,
        intents=intents,
        features=features,
        prober=Prober(transport, cluster, peers, clock),
        operators=operators,
        requests=requests,
        connections=ClientConnections(
            *(node, requests, operators, engines, registry, device, segments, counts, logins),
            loop_shares,
        ),
        logins=logins,
        local=DaemonNode(
            node,
            ssd,
            objects,
            device,
            engines,
            registry,
            replication,
            drainer,
            events,
            rules,
            transport.path_to,
            {TIERS[tier]: each.reader() for tier, each in held.items()},
        ),
    )


def make_features(
    config: DaemonConfig,
    node: Node,
    fetcher: BlockFetcher,
    cluster: ClusterMember,
    ssd: SsdTier,
    clocks: Clocks,
) -> Features:
    """Make the features that observe blocks and clients, and have them observe."""
    clock = clocks.monotonic
    departures = Departures(config.departures_max, above_disks=bool(config.ssd))
    departures.begin(clock())
    traffic = TrafficCounts()
    disks_bytes = sum(disk.size for disk in config.ssd)
    tiers = {"dram": True, "ssd": config.ssd, "device": config.device}
    features = Features(
        traffic,
        Accounts(config.node, node, traffic, clock, clocks.wall),
        MissReasons(
            *(config.node, node, departures, fetcher, cluster),
            [tenant.name for tenant in config.all_tenants()],
            {name: int(share * disks_bytes) for name, share in config.ssd_shares().items()},
            ssd.lost_since,
            clock,
        ),
        HotPrefixes(),
        Sampler(clock, [tier for tier, there in tiers.items() if there]),
    )
    features.subscribe(node.events)
    return features


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

"""This node as a cluster member: it joins, follows the others, announces its blocks, and rejoins.

State that the rules need is kept here for lookup without waiting: which nodes live, which
epochs namespaces are in, whether this node is a member. Event loop only.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from kvpool import __version__
from kvpool.config import DaemonConfig
from kvpool.daemon.cluster.announcing import Announcing
from kvpool.daemon.cluster.host_topology import HostTopology
from kvpool.daemon.cluster.local_node import LocalNode
from kvpool.daemon.cluster.namespaces import Namespaces
from kvpool.daemon.cluster.static_peers import StaticPeers
from kvpool.daemon.cluster.sweep import Sweep
from kvpool.daemon.cluster.unused_namespaces import UnusedNamespaces
from kvpool.daemon.core.node import Node
from kvpool.daemon.fetch.ports import GoneNode, LivingNode
from kvpool.errors import KvpoolError
from kvpool.placement.directory.base import Directory
from kvpool.placement.directory_memory import DeadIncarnations
from kvpool.placement.membership.base import Membership, Standing
from kvpool.placement.nic_pairs import Card, Route, route
from kvpool.placement.peer_estimates import Link
from kvpool.placement.peers import Peers
from kvpool.placement.records import (
    NIXL,
    LinkRecord,
    NodeChange,
    NodeRecord,
    NodeState,
    TierRecord,
    TransportRecord,
    View,
    changed_nodes,
    new_incarnation,
    plain,
)
from kvpool.retry import Backoff
from kvpool.tasks import Tasks
from kvpool.telemetry.cluster_stats import ClusterStats, DrainProgress
from kvpool.wire import frame

log = logging.getLogger("kvpool.daemon")

TICK_S = 1.0
REJOIN_S = (0.1, 5.0)
GONE_MAX = 256  # nodes that have left, and are known by name
SERVED_FROM = frozenset({NodeState.SERVING, NodeState.DRAINING})


@dataclass(eq=False)
class ClusterMember:
    """See the module. `ClusterView` for `BlockFetcher`.

    topology: of this node's machine. peers: measured speeds of the others. rng:
    for tie-breaking only.
    """

    config: DaemonConfig
    node: Node
    membership: Membership
    directory: Directory | None
    peers: Peers
    clock: Callable[[], float]
    rng: random.Random
    topology: HostTopology
    new_incarnation: Callable[[], str] = new_incarnation

    def __post_init__(self) -> None:
        self.incarnation = self.node.incarnation
        self.state = NodeState.SERVING
        self.progress: DrainProgress | None = None
        self.namespaces = Namespaces(self.config, self.node, self.membership)
        self._local: LocalNode  # from `start` on
        self.lost = 0
        self._static = {_stand_in(url): _static_peer(url) for url in self.config.peers}
        self._static_peers = StaticPeers(
            {incarnation: living.url for incarnation, living in self._static.items()}
        )
        self.living: Mapping[bytes, LivingNode] = dict(self._static)
        """The other nodes that can be pulled from, by incarnation."""
        self.gone: OrderedDict[bytes, GoneNode] = OrderedDict()
        """The last nodes that have left, by incarnation."""
        self._by_url: dict[str, NodeRecord] = {}
        self._routes: dict[
            str, tuple[NodeRecord, Route]
        ] = {}  # and the record from which each was made
        self._cards: list[Card] = []
        self._dead = DeadIncarnations()
        self._tasks = Tasks()
        self.announcing = Announcing(
            *(self.directory, self.may_serve, lambda: self.own, self._dead, self.clock, self._tasks)
        )
        self.met = self.announcing.met
        self._followed_as = self.own  # the incarnation under which the view was looked at last
        self.view = View()
        self._transports: tuple[TransportRecord, ...] = ()
        self._links: tuple[LinkRecord, ...] = ()  # as of the last second
        self._drain_wanted = False
        self._rejoining = False
        self._sweep = Sweep(self.directory, self.membership, self._dead, self.clock)
        self._unused = UnusedNamespaces(
            self.config, self.node, self.membership, self.clock, self.rng
        )

    # ---- life ----------------------------------------------------------------------------------------

    async def start(self, urls: Sequence[str], local: LocalNode) -> None:
        """Join. urls: where transfer workers listen, in the order of the configuration. local: the rest of this
        node.

        Raises what the membership raises.
        """
        self._local = local
        self.namespaces.start(local)
        self._describe_ways(urls)
        await self.membership.start()
        self.membership.watch(self._look)
        self.membership.on_lost(self._lose)
        await self.membership.join(self.record())
        self._look()
        self.announcing.start(local.holdings())
        self._tasks.begin(self._run())
        self._tasks.begin(self._tend_namespaces())

    def _describe_ways(self, urls: Sequence[str]) -> None:
        """This node's addresses as announced, and its own network cards."""
        told = self.config.advertise or urls
        rails = self.config.rails or [""] * len(urls)
        transports = []
        for url, shown, rail in zip(urls, told, rails, strict=True):
            nic = self.topology.nic(url)
            numa, net = (-1, "") if nic is None else (nic.numa, nic.net)
            # Behind address translation the card's network is not the one that others see.
            seen = net if urlsplit(shown).hostname == urlsplit(url).hostname else ""
            transports.append(TransportRecord(shown, numa=numa, rail=rail, net=seen))
            if not url.startswith(NIXL):
                address = "" if nic is None else urlsplit(url).hostname or ""
                self._cards.append(Card(address, numa, rail, net))
        self._transports = tuple(transports)

    def follow(self, config: DaemonConfig) -> None:
        """Apply a configuration in which some settings have changed."""
        self.config = config
        self.namespaces.follow(config)

    async def close(self) -> None:
        """Leave, and end all tasks."""
        await self._tasks.end()
        await self.membership.leave()
        await self.membership.close()
        if self.directory is not None:
            await self.directory.close()

    # ---- what others need to know --------------------------------------------------------------------

    @property
    def own(self) -> bytes:
        """This node's incarnation, as in directory entries."""
        return bytes.fromhex(self.incarnation)

    def may_serve(self) -> bool:
        """Whether peers may be served, and blocks announced: see `Standing`."""
        return self.membership.standing(self.clock()) in {Standing.MEMBER, Standing.AWAY}

    # ---- the others ----------------------------------------------------------------------------------

    def _look(self) -> None:
        """The membership has changed. Costs as much as there are changes, and a copy of a dict."""
        before, self.view = self.view, self.membership.view
        nodes = changed_nodes(before, self.view)
        self._local.view_changed(before, self.view, nodes)
        self._follow_nodes(nodes)
        self.namespaces.look(self.view)
        wanted = self.config.node in self.view.drains
        if wanted != self._drain_wanted:
            self._drain_wanted = wanted
            self._local.drain_wanted(wanted)
        # By incarnation: by name, a quick restart would not show. A new node may take replicas.
        if any(_incarnation(old) != _incarnation(new) for old, new in nodes):
            self._local.replicas_lacking()

    def _follow_nodes(self, nodes: Sequence[NodeChange]) -> None:
        """Who has left, then who has come: the latter may be such a node again."""
        left = [old.incarnation_bytes for old, _ in nodes if old is not None]
        came = [new for _, new in nodes if new is not None]
        here = {self.own, *(new.incarnation_bytes for new in came)}
        if self.own != self._followed_as:
            # This node counts as in the view, under one incarnation, unless its former record is still there.
            held = self.view.nodes.get(self.config.node)
            if held is None or held.incarnation_bytes != self._followed_as:
                left.append(self._followed_as)
            self._followed_as = self.own
        for old, _ in nodes:
            if old is not None and old.incarnation_bytes not in here:
                drained = old.state in {NodeState.DRAINING, NodeState.GONE}
                self.gone[old.incarnation_bytes] = GoneNode(old.node, drained)
        while len(self.gone) > GONE_MAX:
            self.gone.popitem(last=False)
        self._dead.left([incarnation for incarnation in left if incarnation not in here])
        self._dead.came(here)
        if not nodes:
            return
        living = dict(self.living)  # a new one: others may still use the last
        for incarnation in left:
            living.pop(incarnation, None)
        for new in came:
            if self._may_be_pulled_from(new):
                living[new.incarnation_bytes] = LivingNode(new, new.url)
        self.living = living
        self._by_url = {
            node.url: node.record
            for incarnation, node in living.items()
            if incarnation not in self._static
        }
        self._routes = {url: known for url, known in self._routes.items() if url in self._by_url}
        for incarnation in left:
            if incarnation not in living:
                self.peers.gone(incarnation)
        for new in came:
            if new.incarnation_bytes in living:
                self.peers.met(
                    new.incarnation_bytes,
                    new.labels,
                    place=(new.node, new.url),
                    same_host=bool(new.host) and new.host == self.topology.host,
                )

    def _may_be_pulled_from(self, record: NodeRecord) -> bool:
        return (
            record.incarnation != self.incarnation
            and record.state in SERVED_FROM
            and frame.spoken(record.protocol, record.protocol_oldest) is not None
            and bool(record.url)
        )

    def route(self, url: str) -> Route | None:
        """All paths to the node with this URL; None: only the URL is known."""
        record = self._by_url.get(url)
        if record is None:
            return None
        known = self._routes.get(url)
        if known is None or _reached_otherwise(known[0], record):
            found = route(
                self._cards,
                self.topology.numa,
                record,
                host=self.topology.host,
                bind_source=self.config.bind_source,
            )
            known = record, found
            self._routes[url] = known
        return known[1]

    def links(self) -> list[Link]:
        """Estimates for pulling from each other node."""
        now = self.clock()
        return [
            self.peers.link(incarnation, living.record.node, now, self._local.path_to(living.url))
            for incarnation, living in self.living.items()
        ]

    # ---- ourselves -----------------------------------------------------------------------------------

    def record(self) -> NodeRecord:
        """This node's record as announced to others."""
        tenants = self.node.tenants.values()
        capacity = sum(tenant.allocator.size for tenant in tenants)
        used = capacity - sum(map(self.node.candidates.spare_bytes, tenants))
        secondary = sum(map(self.node.candidates.secondary_bytes, tenants))
        return NodeRecord(
            self.config.node,
            self.incarnation,
            self.state,
            self._transports,
            (TierRecord("dram", capacity, max(0, used), secondary), *self._local.lower_tiers()),
            dict(self.config.labels),
            __version__,
            frame.PROTOCOL_VERSION,
            self.progress,
            self.topology.host,
            self.topology.numa,
            self._local.engines(),
            frame.PROTOCOL_OLDEST,
            self._links,
        )

    async def tell(self) -> None:
        """Update this node's record. Best effort: repeated every second, and `Membership.outage` has what fails."""
        if self.state is NodeState.GONE:
            return
        self._links = self.peers.links(self.clock(), self._links)
        try:
            await self.membership.update(self.record())
        except KvpoolError as error:
            log.debug("the record of this node was not updated: %s", error)

    async def leave(self) -> None:
        """Stop being a member: the end of a drain."""
        self.state = NodeState.GONE
        self.announcing.act_as(None)
        await self.membership.leave()

    async def come_back(self) -> None:
        """Become a member again, as a new incarnation."""
        self.state, self.progress = NodeState.SERVING, None
        if not self._rejoining:
            await self._rejoin(leave_first=True)

    def _lose(self) -> None:
        """The lease is lost: others consider this node dead. Nothing of the old incarnation is valid any more."""
        self.lost += 1
        log.warning(
            "the membership lease of node %s has ended: joining again",
            self.config.node,
            extra={"node": self.config.node},
        )
        self.announcing.act_as(None)
        if not self._rejoining and self.state is not NodeState.GONE:
            self._tasks.begin(self._rejoin())

    def _is_gone(self) -> bool:
        return self.state is NodeState.GONE

    async def _rejoin(self, *, leave_first: bool = False) -> None:
        """Join as a new incarnation, however long that takes. leave_first: a leave may not have ended."""
        self._rejoining = True
        backoff = Backoff(*REJOIN_S)
        told: set[type[KvpoolError]] = set()
        try:
            if leave_first:
                await self.membership.leave()
            while self.state is not NodeState.GONE:
                self.incarnation = self.new_incarnation()
                try:
                    await self.membership.join(self.record())
                except KvpoolError as error:
                    level = logging.DEBUG if type(error) in told else logging.WARNING
                    told.add(type(error))
                    log.log(
                        level, "joining again failed, and is tried until it succeeds: %s", error
                    )
                    await asyncio.sleep(backoff.failed(self.clock()))
                    continue
                if self._is_gone():  # drained while it joined
                    await self.membership.leave()
                    return
                self.announcing.act_as(self.own)
                self._look()
                return
        finally:
            self._rejoining = False

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = self.clock()
            self._dead.passed(now, connected=self.membership.standing(now) is Standing.MEMBER)
            await self.namespaces.register_late()
            self._static_peers.look(self.peers, now)
            await self.tell()
            await self._sweep.step()

    async def _tend_namespaces(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            await self._unused.step(self._local)

    # ---- the operator's view -------------------------------------------------------------------------

    def stats(self) -> ClusterStats:
        """Values visible to every tenant."""
        return ClusterStats(
            cluster=self.config.cluster,
            standing=self.membership.standing(self.clock()).value,
            state=str(self.state),
            incarnation=self.incarnation,
            others=len(self.living),
            directory=self.announcing.stats(),
            drain=self.progress,
            leases_lost=self.lost,
            swept=self._sweep.dropped,
            namespaces_deleted=self._unused.deleted,
            sweep_failures=self._sweep.outage.failures,
            sweep_error=self._sweep.outage.error,
            membership_failures=self.membership.outage.failures,
            membership_error=self.membership.outage.error,
            undecodable_records=self.membership.undecodable,
        )

    def describe(self) -> dict[str, Any]:
        """Plain values: the cluster as seen by this node."""
        standing = self.membership.standing(self.clock())
        return {
            "cluster": self.config.cluster,
            "node": self.config.node,
            "incarnation": self.incarnation,
            "standing": standing.value,
            "state": str(self.state),
            "joined": bool(self.config.join),
            "nodes": [plain(record) for _, record in sorted(self.view.nodes.items())],
            "peers": [node.url for node in self._static.values()],
            "silent_peers": [silent._asdict() for silent in self._static_peers.silent()],
            "drains": sorted(self.view.drains),
            "namespaces": [plain(entry) for _, entry in sorted(self.view.namespaces.items())],
            "links": [plain(link) for link in self.links()],
            "directory": msgspec.to_builtins(self.announcing.stats()),
            "leases_lost": self.lost,
            "swept": self._sweep.dropped,
            "errors": {
                server: outage.error
                for server, outage in (
                    ("membership", self.membership.outage),
                    ("directory", self._sweep.outage),
                )
                if outage.error
            },
            "undecodable_records": self.membership.undecodable,
        }


def _reached_otherwise(old: NodeRecord, new: NodeRecord) -> bool:
    """Whether the paths to a node may have changed."""
    return (old.incarnation, old.transports, old.numa, old.host) != (
        new.incarnation,
        new.transports,
        new.numa,
        new.host,
    )


def _incarnation(record: NodeRecord | None) -> str:
    return "" if record is None else record.incarnation


def _stand_in(url: str) -> bytes:
    """Placeholder for the incarnation of a peer of which only the address is known."""
    return hashlib.sha256(url.encode()).digest()[:8]


def _static_peer(url: str) -> LivingNode:
    record = NodeRecord(
        url,
        _stand_in(url).hex(),
        NodeState.SERVING,
        (TransportRecord(url),),
        protocol=frame.PROTOCOL_VERSION,
    )
    return LivingNode(record, url)

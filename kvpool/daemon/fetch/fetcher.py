"""Fetches blocks that are not in memory here, for this node's clients.

The path of a fetch, and the module of each step:

1. Locate (`locate.py`): which blocks of the prefix the lower tiers here have; for the rest, the directory (or
   without one, each peer) and the catalog of object storage are asked. The hit rule over all of it gives the
   prefix that is available.
2. Plan (`plan.py`, `load_or_recompute.py`): if the engine states how fast it computes, blocks that it would
   compute sooner than they arrive are left out. Each missing part is assigned to the source that should
   deliver it soonest.
3. Transfer (`delivery.py`, `transfer.py`): several sources work in parallel. A part that is already on its way
   is awaited, not fetched twice. A slow source is hedged. Blocks that a source lacks are remembered
   for a while, and requested from the next one.

All this ends by the caller's deadline, with the blocks that have arrived. Event loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvpool.daemon.core.blocks import NamespaceState, Origin, PartTable
from kvpool.daemon.core.events import Pulled, Read
from kvpool.daemon.core.node import Node
from kvpool.daemon.core.tier import SharedTier
from kvpool.daemon.fetch.choices import Choices
from kvpool.daemon.fetch.delivery import Delivery
from kvpool.daemon.fetch.filling import Filling
from kvpool.daemon.fetch.load_or_recompute import Choice
from kvpool.daemon.fetch.locate import Locator
from kvpool.daemon.fetch.lookups import Lookups
from kvpool.daemon.fetch.plan import (
    Candidates,
    FetchRequest,
    Located,
    lacking,
    merge,
    missing,
    requests_for,
)
from kvpool.daemon.fetch.ports import (
    DEVICE,
    DISKS,
    NOT_NODES,
    ClusterView,
    LocalSource,
    PeerTransport,
)
from kvpool.daemon.fetch.pull_leases import PullLeases
from kvpool.daemon.fetch.transfers import Transfers
from kvpool.daemon.workers.turns import PULLS, TurnLimits, Turns
from kvpool.errors import InvalidRequest
from kvpool.hit_rule import needed
from kvpool.placement.directory.base import TIERS
from kvpool.placement.peer_selection import Candidate
from kvpool.placement.peers import Peers
from kvpool.telemetry.cluster_stats import FetchStats
from kvpool.types import Recompute

ROUNDS_MAX = 8  # shorter and shorter prefixes, if the directory was wrong
SHORTER_SHARE = 0.25  # of the time left for a prefix; for a shorter one that needs other blocks


class BlockFetcher:
    """Fetches blocks from lower tiers, peers and object storage into memory."""

    def __init__(
        self,
        node: Node,
        transport: PeerTransport,
        cluster: ClusterView,
        disks: Sequence[LocalSource],
        objects: SharedTier,
        peers: Peers,
        clock: Callable[[], float],
        device: LocalSource | None = None,
        pulls: TurnLimits = PULLS,
    ) -> None:
        """disks: at most `DISKS_MAX`. pulls: under way at peers."""
        self.node = node
        self.peers = peers
        self._local: dict[bytes, LocalSource] = dict(zip(DISKS, disks, strict=False))
        if device is not None:
            self._local[DEVICE] = device
        self._cluster = cluster
        self._clock = clock
        self._stats = FetchStats()
        self.locator = Locator(
            *(transport, cluster, self._local, objects, peers, clock), self._stats
        )
        self.leases = PullLeases(node, clock)
        filling = Filling(
            *(node, transport, cluster, self._local, objects, self.locator, peers, clock),
            *(self._stats, self.leases),
        )
        self.transfers = Transfers(
            *(node, cluster, filling, self.leases, peers, clock, self._stats),
            *(Turns(pulls), self._local),
        )
        self.delivery = Delivery(node, self.locator, self.transfers, peers, clock)
        self.lookups = Lookups(node, self.locator, self._local, clock)
        self.choices = Choices(self.locator, self.transfers, self._local, peers, clock, self._stats)

    @property
    def active(self) -> bool:
        """Whether there is anything to fetch from."""
        return self.locator.has_sources

    def was_read(self, event: Read) -> None:
        """Count how long a read or pull waited."""
        if event.waited_s is not None:
            self._stats.delivered.waits.add(event.waited_s)

    def stats(self) -> FetchStats:
        """Counters and estimates, with what is known of each source now."""
        peers = self.peers.stats(self._clock())
        for peer in peers:
            incarnation = bytes.fromhex(peer.incarnation)
            if other := self._cluster.living.get(incarnation):
                peer.node, peer.url = other.record.node, other.url
            if incarnation in NOT_NODES:
                peer.node, peer.incarnation = NOT_NODES[incarnation], ""
        self.locator.set_gauges()
        self._stats.transfers, self._stats.peers = len(self.transfers), peers
        return self._stats

    def close(self) -> None:
        """Cancel all transfers. They end on their own, soon."""
        self.transfers.close()

    # ---- for clients ---------------------------------------------------------------------------------

    async def pull(
        self,
        namespace: NamespaceState,
        parts: Sequence[int],
        keys: Sequence[bytes],
        here: int,
        wait_s: float,
        recompute: Recompute | None = None,
        *,
        direct: bool = False,
    ) -> Pulled:
        """Bring the missing blocks of a prefix here, of which `here` blocks are usable already. Ends by `wait_s`.

        recompute: the price of computing the blocks instead; blocks that take longer to load are left out.
        direct: the client reads spare device memory itself, so that blocks there count as here.
        """
        if not wait_s > 0:
            raise InvalidRequest(f"wait_s = {wait_s} is not a valid number of seconds")
        if here == len(keys) or not self.active:
            return Pulled(here)
        deadline = self._clock() + wait_s
        most, some_declined = here, False
        tables = namespace.tables_of(parts)
        located = self.locator.on_this_node(tables, keys)
        asked = not self.locator.elsewhere
        unasked = 0 if asked else len(keys)  # of so many nobody else was asked
        # A shorter prefix may need blocks that a longer one does not (windows), so if one is not available, the
        # missing blocks of the next one are fetched too. Other nodes are asked if this node does not have all,
        # or did not deliver.
        for _ in range(ROUNDS_MAX):
            there, declined = Choice(here, {})
            if located:
                there = self.locator.usable(tables, keys, located)
            if asked or there == len(keys):
                there, declined = self.choices.choose(tables, keys, here, located, recompute)
            doubtful = not asked and self.choices.doubtful(located)
            if (there < len(keys) or doubtful) and not asked:
                asked = True
                unasked = here if doubtful else there
                merge(
                    located,
                    await self.locator.prefix(namespace, tables, keys, unasked, deadline),
                )
                there, declined = self.choices.choose(tables, keys, here, located, recompute)
            if recompute is not None:
                keys = keys[:there]  # decided once: declined blocks are not considered again
                self.choices.decline(declined)
                some_declined = some_declined or bool(declined)
            most = max(most, there)
            if there <= here or self._clock() >= deadline:
                break
            besides = self.lookups.on_device if direct else None
            there = self.choices.fitting(tables, keys[:there], located, besides)
            wanted = partial(missing, tables, keys[:there], located, besides)
            # A disk that hangs does not say so: others are asked where its blocks are when it takes too long.
            until = deadline
            if unasked > here:
                until = min(deadline, self._clock() + self.choices.expected_s(wanted()))
            elif self.choices.shorter_needs_more(tables, keys[:there], here, located):
                # Nor does a peer, and by the deadline there would be nothing: the shorter prefix has time left.
                until -= SHORTER_SHARE * (deadline - self._clock())
            failed = await self._bring_prefix(namespace, tables, keys[:there], wanted, until)
            if not failed:
                break
            here = self.lookups.match(namespace, parts, keys, direct=direct)
            if self._clock() < until or unasked <= here:
                _strike_out(located, failed)
            if unasked > here:  # this node's disks are late, or have just evicted some of it
                merge(
                    located,
                    await self.locator.prefix(namespace, tables, keys[:unasked], here, deadline),
                )
                asked, unasked = True, 0
        return Pulled(most, some_declined, self._clock() >= deadline)

    async def _bring_prefix(
        self,
        namespace: NamespaceState,
        tables: Sequence[PartTable],
        keys: Sequence[bytes],
        wanted: Callable[[], Sequence[FetchRequest]],
        deadline: float,
    ) -> Sequence[FetchRequest]:
        """Bring the missing blocks of a prefix that should be complete here; returns those that did not arrive.

        Its blocks here are leased meanwhile, or the last to arrive would evict the first. Where memory is full of
        such leases, all but those of the oldest request are released, and these begin again behind it.

        wanted: the requests for the blocks that are missing now.
        """
        with self.delivery.queued(namespace) as place:
            while await self.delivery.turn(place, deadline):
                kept: list[str] = []
                try:
                    self.leases.hold({table: needed(table.spec, keys) for table in tables}, kept)
                    failed = await self.delivery.bring_on(
                        place,
                        wanted(),
                        deadline,
                        on_arrival=partial(self.leases.hold, kept=kept),
                    )
                finally:
                    self.leases.let_go(namespace.tenant.name, kept)
                if not place.waiter.yields:
                    return failed
                self.delivery.rooms.yielded(place.waiter)
        return wanted()

    async def pull_each(
        self, namespace: NamespaceState, parts: Sequence[int], keys: Sequence[bytes], wait_s: float
    ) -> None:
        """Bring the available ones of these blocks here, prefix or not. Ends by `wait_s`."""
        if not wait_s > 0:
            raise InvalidRequest(f"wait_s = {wait_s} is not a valid number of seconds")
        deadline = self._clock() + wait_s
        self.node.settle()
        tables = namespace.tables_of(parts)
        located = await self.locator.each(namespace, tables, keys, deadline)
        candidates = Candidates()
        wanted: list[FetchRequest] = []
        for table in tables:
            wanted += requests_for(table, filter(located.__contains__, keys), located, candidates)
        await self.delivery.bring(wanted, deadline)

    # ---- for peers and replication -------------------------------------------------------------------

    async def promote(self, table: PartTable, keys: Sequence[bytes], wait_s: float) -> None:
        """Bring blocks of a table from this node's tiers below memory into it. Ends by `wait_s`."""
        located = self.locator.on_this_node([table], keys)
        wanted = requests_for(table, filter(located.__contains__, keys), located, Candidates())
        if wanted:
            await self.delivery.bring(wanted, self._clock() + wait_s)

    async def take(
        self,
        namespace: NamespaceState,
        tables: Sequence[PartTable],
        keys: Sequence[bytes],
        incarnation: bytes,
        origin: Origin,
        wait_s: float,
    ) -> None:
        """Bring these blocks here from one node, to be kept as `origin` says. Ends by `wait_s`."""
        deadline = self._clock() + wait_s
        only = [Candidate(incarnation, TIERS["dram"])]
        wanted = [FetchRequest(table, lacking(table.blocks, keys), only) for table in tables]
        await self.delivery.bring(wanted, deadline, origin, background=True)

    async def bring_ahead(self, requests: Sequence[FetchRequest], wait_s: float) -> bool:
        """Bring these into memory while nobody waits for them, and in no ordinary block's place; returns whether all came."""
        left = await self.delivery.bring(
            requests, self._clock() + wait_s, background=True, only_spare=True
        )
        return not left


def _strike_out(located: Located, failed: Sequence[FetchRequest]) -> None:
    """No source could deliver these: stop expecting them."""
    for request in failed:
        bit = 1 << request.table.part
        for key in request.keys:
            located[key] = [
                entry._replace(mask=entry.mask & ~bit) for entry in located.get(key, ())
            ]

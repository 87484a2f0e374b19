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

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial

from kvpool.daemon.core.blocks import NamespaceState, Origin, PartTable
from kvpool.daemon.core.events import Pulled, Read
from kvpool.daemon.core.node import Node
from kvpool.daemon.core.tier import SharedTier
from kvpool.daemon.fetch.delivery import SECONDARY, Delivery
from kvpool.daemon.fetch.load_or_recompute import Choice, Sources, choose
from kvpool.daemon.fetch.locate import LOOKUP_SHARE, Locator, merge
from kvpool.daemon.fetch.plan import (
    SLICE_BYTES,
    Candidates,
    FetchRequest,
    Located,
    lacking,
    may_be_had,
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
from kvpool.daemon.fetch.transfer import Transfers
from kvpool.daemon.workers.turns import PULLS, TurnLimits, Turns
from kvpool.errors import InvalidRequest
from kvpool.hit_rule import AnyOf, needed, usable
from kvpool.placement.directory.base import TIERS, Entry
from kvpool.placement.peer_selection import Candidate
from kvpool.placement.peers import HEDGE_TIMES, TRIAL_S, Peers
from kvpool.telemetry.cluster_stats import FetchStats
from kvpool.types import PartKind, Presence, Recompute

ROUNDS_MAX = 8  # shorter and shorter prefixes, if the directory was wrong
SHORTER_SHARE = 0.25  # of the time left for a prefix; for a shorter one that needs other blocks
TRIAL_BYTES = 1 << 20  # loaded to measure a source's speed, or one block if that is more


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
        self.transfers = Transfers(
            node,
            transport,
            cluster,
            self._local,
            objects,
            self.locator,
            peers,
            clock,
            self._stats,
            Turns(pulls),
        )
        self._delivery = Delivery(node, self.locator, self.transfers, peers, clock)

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
                there, declined = self._choose(tables, keys, here, located, recompute)
            doubtful = not asked and self._doubtful(located)
            if (there < len(keys) or doubtful) and not asked:
                asked = True
                unasked = here if doubtful else there
                merge(
                    located,
                    await self.locator.prefix(namespace, tables, keys, unasked, deadline),
                )
                there, declined = self._choose(tables, keys, here, located, recompute)
            if recompute is not None:
                keys = keys[:there]  # decided once: declined blocks are not considered again
                self._decline(declined)
                some_declined = some_declined or bool(declined)
            most = max(most, there)
            if there <= here or self._clock() >= deadline:
                break
            besides = self._on_device if direct else None
            there = self._fitting(tables, keys[:there], located, besides)
            wanted = partial(missing, tables, keys[:there], located, besides)
            # A disk that hangs does not say so: others are asked where its blocks are when it takes too long.
            until = deadline
            if unasked > here:
                until = min(deadline, self._clock() + self.expected_s(wanted()))
            elif self._shorter_needs_more(tables, keys[:there], here, located):
                # Nor does a peer, and by the deadline there would be nothing: the shorter prefix has time left.
                until -= SHORTER_SHARE * (deadline - self._clock())
            failed = await self._bring_prefix(namespace, tables, keys[:there], wanted, until)
            if not failed:
                break
            here = self.match(namespace, parts, keys, direct=direct)
            if self._clock() < until or unasked <= here:
                _strike_out(located, failed)
            if unasked > here:  # this node's disks are late, or have just evicted some of it
                merge(
                    located,
                    await self.locator.prefix(namespace, tables, keys[:unasked], here, deadline),
                )
                asked, unasked = True, 0
        return Pulled(most, some_declined, self._clock() >= deadline)

    def _doubtful(self, located: Located) -> bool:
        """Whether some of these are on a place of this node that has answered nothing since it was slow or failed."""
        doubted = [
            source
            for source in self._local
            if (peer := self.peers.get(source)) is not None and peer.on_probation
        ]
        return bool(doubted) and any(
            entry.incarnation in doubted for entries in located.values() for entry in entries
        )

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
        with self._delivery.queued(namespace) as place:
            while await self._delivery.turn(place, deadline):
                kept: list[str] = []
                try:
                    self.hold({table: needed(table.spec, keys) for table in tables}, kept)
                    failed = await self._delivery.bring_on(
                        place,
                        wanted(),
                        deadline,
                        on_arrival=partial(self.hold, kept=kept),
                    )
                finally:
                    self.let_go(namespace.tenant.name, kept)
                if not place.waiter.yields:
                    return failed
                self._delivery.rooms.yielded(place.waiter)
        return wanted()

    def _fitting(
        self,
        tables: Sequence[PartTable],
        keys: Sequence[bytes],
        located: Located,
        besides: Callable[[PartTable], Container[bytes]] | None,
    ) -> int:
        """How much of a prefix fits into memory at a time: more would not be held until it is whole."""
        namespace = tables[0].namespace
        allocator = namespace.tenant.allocator
        strides = {table.stride for table in tables}
        # Each other size has a slab that is not full.
        most = 1 - (len(strides) - 1) * allocator.slab_bytes / allocator.size
        if namespace.quota:
            most = min(most, namespace.quota / allocator.size)

        def share(blocks: int) -> float:
            taken = 0.0
            for table in tables:
                of_table = needed(table.spec, keys[:blocks])
                if besides is not None:
                    of_table = lacking(besides(table), of_table)
                taken += len(of_table) / allocator.capacity(table.stride)
            return taken

        if share(len(keys)) <= most:
            return len(keys)
        fit = bisect_right(range(1, len(keys) + 1), most, key=share)
        return self.locator.usable(tables, keys[:fit], located)

    def _shorter_needs_more(
        self, tables: Sequence[PartTable], keys: Sequence[bytes], here: int, located: Located
    ) -> bool:
        """Whether the next shorter prefix that is available needs blocks that this one does not, and that are not here."""
        windows = [table for table in tables if table.spec.kind is PartKind.WINDOW]
        if not windows:
            return False
        shorter = self.locator.usable(tables, keys[:-1], located)
        return shorter > here and any(
            key not in table.blocks
            for table in windows
            for key in set(needed(table.spec, keys[:shorter])).difference(needed(table.spec, keys))
        )

    def match(
        self,
        namespace: NamespaceState,
        parts: Sequence[int],
        keys: Sequence[bytes],
        *,
        direct: bool,
    ) -> int:
        """The usable blocks of a prefix in memory, or with `direct` in memory and spare device memory."""
        if not direct:
            return self.node.leases.match(namespace, parts, keys)
        self.node.settle()
        tables = namespace.tables_of(parts)
        held = [AnyOf((table.blocks, *self._local[DEVICE].held(table))) for table in tables]
        return usable([table.spec for table in tables], held, keys)

    def _on_device(self, table: PartTable) -> AnyOf:
        return AnyOf(self._local[DEVICE].held(table))

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
        await self._delivery.bring(wanted, deadline)

    def usable_on_node(
        self, namespace: NamespaceState, parts: Sequence[int], keys: Sequence[bytes]
    ) -> int:
        """The usable blocks of a prefix on this node, in memory or below it."""
        self.node.settle()
        tables = namespace.tables_of(parts)
        return self.locator.usable(tables, keys, self.locator.on_this_node(tables, keys))

    async def presence(self, table: PartTable, keys: Sequence[bytes], wait_s: float) -> bytes:
        """A `Presence` of each key, one byte each. Others are asked for at most `wait_s`."""
        self.node.settle()
        located = self.locator.on_this_node([table], keys)
        missing = [key for key in keys if key not in table.blocks and key not in located]
        if wait_s > 0 and missing and self.locator.elsewhere:
            deadline = self._clock() + wait_s / LOOKUP_SHARE
            elsewhere = await self.locator.each(table.namespace, [table], missing, deadline)
            self.node.settle()
        else:
            elsewhere = {}
        lives, bit = self.locator.lives, 1 << table.part

        def of(key: bytes) -> Presence:
            if key in table.blocks:
                return Presence.MEMORY
            if key in located:
                return Presence.DISK
            having = elsewhere.get(key, ())
            if any(may_be_had(e) and e.mask & bit and lives(e.incarnation) for e in having):
                return Presence.ELSEWHERE
            return Presence.NOWHERE

        return bytes(map(of, keys))

    def on_node(self, table: PartTable, keys: Sequence[bytes]) -> bytes:
        """One byte a key, 1 where the part of the block is on this node, in memory or below it."""
        self.node.settle()
        below = self.locator.on_this_node([table], keys)
        return bytes(key in table.blocks or key in below for key in keys)

    # ---- for peers and replication -------------------------------------------------------------------

    def lies_below(self, table: PartTable, keys: Sequence[bytes]) -> bool:
        """Whether any of these is in a tier below memory here and not in memory."""
        held = [keys_of for tier in self._local.values() for keys_of in tier.held(table)]
        if not held:
            return False
        self.node.settle()
        return any(key not in table.blocks and any(key in each for each in held) for key in keys)

    async def promote(self, table: PartTable, keys: Sequence[bytes], wait_s: float) -> None:
        """Bring blocks of a table from this node's tiers below memory into it. Ends by `wait_s`."""
        located = self.locator.on_this_node([table], keys)
        wanted = requests_for(table, filter(located.__contains__, keys), located, Candidates())
        if wanted:
            await self._delivery.bring(wanted, self._clock() + wait_s)

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
        await self._delivery.bring(wanted, deadline, origin, background=True)

    # ---- ahead of reads ------------------------------------------------------------------------------

    async def locate_prefix(
        self, namespace: NamespaceState, keys: Sequence[bytes], wait_s: float
    ) -> tuple[int, Located]:
        """How many blocks of a prefix could be had here, and where those below memory or elsewhere are. Ends by
        `wait_s`.
        """
        self.node.settle()
        tables = namespace.tables
        located = self.locator.on_this_node(tables, keys)
        there = self.locator.usable(tables, keys, located)
        if there < len(keys) and self.locator.elsewhere:
            deadline = self._clock() + wait_s / LOOKUP_SHARE
            merge(located, await self.locator.prefix(namespace, tables, keys, there, deadline))
            there = self.locator.usable(tables, keys, located)
        return there, located

    @staticmethod
    def lacking(
        namespace: NamespaceState, keys: Sequence[bytes], located: Located
    ) -> list[FetchRequest]:
        """Requests for the blocks of a prefix that are not in memory, part by part."""
        return missing(namespace.tables, keys, located)

    async def bring_ahead(self, requests: Sequence[FetchRequest], wait_s: float) -> bool:
        """Bring these into memory while nobody waits for them, and in no ordinary block's place; returns whether all came."""
        left = await self._delivery.bring(
            requests, self._clock() + wait_s, background=True, only_spare=True
        )
        return not left

    # ---- for prefix streams --------------------------------------------------------------------------

    async def locate(
        self,
        namespace: NamespaceState,
        tables: Sequence[PartTable],
        keys: Sequence[bytes],
        wait_s: float,
    ) -> Located:
        """The sources of these keys: lower tiers, the directory's nodes, object storage. Ends by `wait_s`."""
        self.node.settle()
        return await self.locator.everywhere(namespace, tables, keys, wait_s)

    def plan(
        self, wanted: Mapping[PartTable, Mapping[bytes, Sequence[Entry]]]
    ) -> list[FetchRequest]:
        """Requests for these blocks, given their replicas."""
        candidates = Candidates()
        return [
            request
            for table, located in wanted.items()
            for request in requests_for(table, located, located, candidates)
        ]

    async def bring(
        self, wanted: Sequence[FetchRequest], deadline: float
    ) -> Sequence[FetchRequest]:
        """Transfer these; returns those that did not arrive by the deadline."""
        return await self._delivery.bring(wanted, deadline)

    def expected_s(self, wanted: Sequence[FetchRequest]) -> float:
        """The duration after which something is wrong: see `Peers.hedge_after_s`."""
        nbytes: Counter[bytes] = Counter()
        for request in wanted:
            for candidate in request.candidates[:1]:
                nbytes[candidate.incarnation] += len(request.keys) * request.table.spec.nbytes
        found = [self.peers.hedge_after_s(one, much) for one, much in nbytes.items()]
        return HEDGE_TIMES * max(found, default=0.0)

    def hold(self, blocks: Mapping[PartTable, Sequence[bytes]], kept: list[str]) -> bool:
        """See `Transfers.hold`."""
        return self.transfers.hold(blocks, kept)

    def let_go(self, tenant: str, kept: Sequence[str]) -> None:
        """Release the leases of `hold`."""
        self.transfers.let_go(tenant, kept)

    # ---- load or recompute ---------------------------------------------------------------------------

    def _choose(
        self,
        tables: Sequence[PartTable],
        keys: Sequence[bytes],
        here: int,
        located: Located,
        recompute: Recompute | None,
    ) -> Choice:
        """How much of a prefix to bring here: all that is available, unless computing is sooner."""
        if recompute is None:
            return Choice(self.locator.usable(tables, keys, located), {})
        now = self._clock()
        living = Candidates(self.locator.lives)

        def candidates(
            table: PartTable, key: bytes, entries: Sequence[Entry]
        ) -> Sequence[Candidate]:
            found = living(entries, table.part)
            return self.locator.not_missing_from(table, key, found, now)

        def delivering(table: PartTable, key: bytes) -> list[bytes]:
            transfers = self.transfers.of(table).get(key, ())
            return [transfer.source for transfer in transfers if not transfer.background]

        return choose(
            tables,
            keys,
            here,
            located,
            lambda some: self.locator.usable(tables, some, located),
            Sources(candidates, delivering, self.peers, SLICE_BYTES),
            recompute,
            now,
        )

    def _decline(self, declined: Mapping[bytes, Sequence[tuple[PartTable, bytes]]]) -> None:
        """Count the declined blocks, and start a trial of sources that are due one. Not awaited."""
        now = self._clock()
        for source, parts in declined.items():
            self._stats.declined += len(parts)
            self.peers.declined(source, len(parts))
            if not self.peers.begin_trial(source, now):
                continue
            table = parts[0][0]
            most = max(1, TRIAL_BYTES // table.spec.nbytes)
            keys = [key for other, key in parts[:most] if other is table]
            self._stats.trials += 1
            self.transfers.begin({table: keys}, source, now + TRIAL_S, SECONDARY, background=False)


def _strike_out(located: Located, failed: Sequence[FetchRequest]) -> None:
    """No source could deliver these: stop expecting them."""
    for request in failed:
        bit = 1 << request.table.part
        for key in request.keys:
            located[key] = [
                entry._replace(mask=entry.mask & ~bit) for entry in located.get(key, ())
            ]

"""Replicas of blocks on other nodes: for replication, offloading and drain.

One mechanism for all: a node *offers* blocks, the other one pulls those that it wants and answers which
it has then. Only that may be relied on. It serves

- replication: blocks of which several replicas are wanted, when they are put and when a node was lost. Those only
  on disks come into memory for it, a few at a time;
- idle memory: a node that is about to evict blocks first offers them to one with room (`forward`). Blocks
  that were taken are secondary here from then on, and evicted first;
- draining: a node that leaves offers the blocks that only it has.

Nothing here is in the path of a put or a get: all of it runs beside them, at a bounded rate.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from kvpool.daemon.cluster.member import ClusterMember
from kvpool.daemon.cluster.repair_walk import RepairWalk
from kvpool.daemon.core.blocks import Block, NamespaceState, Origin, Tenant
from kvpool.daemon.core.node import Node
from kvpool.daemon.core.requests import parse_parts
from kvpool.daemon.fetch.fetcher import BlockFetcher
from kvpool.daemon.fetch.ports import LivingNode, PeerTransport
from kvpool.daemon.tiers.ssd_tier import SsdTier
from kvpool.errors import InvalidRequest, KvpoolError, Unavailable
from kvpool.placement.directory.base import Entry
from kvpool.placement.records import NodeState
from kvpool.placement.replica_targets import accept_forward, choose_targets, is_needed, responsible
from kvpool.telemetry.cluster_stats import ReplicationStats
from kvpool.token_bucket import TokenBucket
from kvpool.types import plain_parts, split_keys
from kvpool.waits import wait_for
from kvpool.wire import frame
from kvpool.wire import peer as peer_wire
from kvpool.wire import worker as worker_wire

log = logging.getLogger("kvpool.daemon")

OFFER_S = 10.0  # for a peer to take up an offer; for disks to deliver what is to be offered
OFFER_BYTES = 32 << 20
OFFER_KEYS = 1024
HOPS_MAX = 2  # how often a block is forwarded
WANTED_MAX = 1 << 16  # blocks that wait for further replicas; others are left to the next repair
TRIES_MAX = 5
WALK = 512  # blocks examined in one step of a repair
MEMORY_PARTS = 8  # blocks on disks are read into memory, at most this part of it at a time
REPAIR_EVERY_S = 600.0
FORWARD_EVERY_S = 0.05
PRESSED_S = 0.01
RELIEFS_MAX = 64  # consecutive offers, before other tasks have their turn
IDLE_S = 1.0  # while there is no other node
REFUSED_S = 2.0  # a node without room gets no offers for this long
HEADROOM = 1 / 16  # of a segment: the part that should be free or secondary when puts come
AUDIT_EVERY_S = 1.0
AUDIT_KEYS = 256  # of a tenant; or twice as many as were evicted since the last audit,
AUDIT_KEYS_MAX = 2048  # up to this, which takes the event loop a millisecond or two


@dataclass(eq=False)
class Replication:
    """Offers blocks, and takes up offers. Event loop only."""

    node: Node
    cluster: ClusterMember
    fetcher: BlockFetcher
    tiers: SsdTier
    transport: PeerTransport
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        bandwidth = self.cluster.config.replication_bandwidth
        now = self.clock()
        self._pace_out = TokenBucket(bandwidth, 2 * OFFER_BYTES, now)
        self._pace_in = TokenBucket(bandwidth, 2 * OFFER_BYTES, now)
        # namespace and key → how many replicas, how often it was tried
        self._wanted: dict[tuple[NamespaceState, bytes], tuple[int, int]] = {}
        self._awake = asyncio.Event()
        # Whether any block here asks for more replicas than its namespace.
        self._replicas_known = False
        self._walk = RepairWalk()
        self._walk_at = 0.0  # not before
        self._repair_due = 0.0
        self._refused: dict[tuple[bytes, str], float] = {}
        self._audited_at = 0.0
        self._evicted_secondary = 0  # at the last audit
        self._stats = ReplicationStats()

    def set_bandwidth(self, bytes_s: int) -> None:
        """How much copying may take from now on, in and out each."""
        for pace in (self._pace_in, self._pace_out):
            pace.rate = bytes_s

    def stats(self) -> ReplicationStats:
        """Counters, with what is lacking now."""
        self._stats.wanted = len(self._wanted)
        self._stats.repairing = self._walk.position is not None
        return self._stats

    # ---- offering ------------------------------------------------------------------------------------

    async def offer(
        self,
        target: LivingNode,
        namespace: NamespaceState,
        keys: Sequence[bytes],
        mask: int,
        *,
        reason: str,
        replicas: int = 0,
        hops: int = 0,
        age_s: float = 0.0,
    ) -> list[bytes]:
        """Which of these blocks, of all of whose parts in the mask, the target has afterwards."""
        count = len(namespace.tables)
        offer = peer_wire.Offer(
            node=self.cluster.config.node,
            incarnation=self.cluster.incarnation,
            reason=reason,
            tenant=namespace.tenant.name,
            digest=namespace.base,
            epoch=namespace.epoch,
            fields=namespace.fields,
            parts=plain_parts(namespace.parts),
            keys=b"".join(keys),
            mask=mask.to_bytes(-(-count // 8), "little"),
            replicas=replicas,
            hops=hops,
            age_s=age_s,
            deadline_s=OFFER_S,
            to=target.record.node,
        )
        nbytes = len(keys) * block_bytes(namespace, mask)
        await asyncio.sleep(self._pace_out.take(nbytes, self.clock()))
        self._stats.offered_blocks += len(keys)
        try:
            answer = await self.transport.ask(worker_wire.AskPeer(target.url, offer, OFFER_S))
        except KvpoolError as error:
            log.info(
                "an offer to %s failed: %s",
                target.record.node,
                error,
                extra={"peer": target.record.node},
            )
            return []
        if not isinstance(answer, frame.Bytes) or len(answer.data) != len(keys):
            return []
        accepted = [key for key, taken in zip(keys, answer.data, strict=True) if taken]
        self._stats.accepted_blocks += len(accepted)
        self._stats.accepted_bytes += len(accepted) * block_bytes(namespace, mask)
        return accepted

    def by_offer(
        self, namespace: NamespaceState, keys: Iterable[bytes]
    ) -> list[tuple[int, list[bytes]]]:
        """Blocks that are here, as (mask of their parts, keys), each such as fits into one offer."""
        listed = list(keys)
        _, masks = self.node.inventory.masks(namespace.directory_digest, listed)
        pairs = sorted(zip(masks, listed, strict=False), key=lambda pair: pair[0])
        offers = []
        for mask, group in groupby(pairs, key=lambda pair: pair[0]):
            if not mask:
                continue
            members = [key for _, key in group]
            most = max(1, min(OFFER_KEYS, OFFER_BYTES // block_bytes(namespace, mask)))
            offers += [(mask, members[at : at + most]) for at in range(0, len(members), most)]
        return offers

    def only_below(self, namespace: NamespaceState, keys: Sequence[bytes]) -> list[bytes]:
        """Those of the blocks of which disks hold a part that memory does not."""
        here, below = self._masks(namespace, keys)
        return [key for key, up, down in zip(keys, here, below, strict=True) if down & ~up]

    def _masks(
        self, namespace: NamespaceState, keys: Sequence[bytes]
    ) -> tuple[Sequence[int], Sequence[int]]:
        """The parts of each block in memory, and on disks."""
        nothing = [0] * len(keys)
        _, here = self.node.inventory.masks(namespace.directory_digest, keys)
        _, below = self.tiers.masks(namespace.directory_digest, keys)
        return here or nothing, below or nothing

    @staticmethod
    def at_a_time(namespace: NamespaceState) -> int:
        """How many blocks may come into memory from disks at a time, to be offered."""
        room = min(OFFER_BYTES, namespace.tenant.allocator.size // MEMORY_PARTS)
        if namespace.quota:
            room = min(room, namespace.quota)
        return max(1, room // sum(table.stride for table in namespace.tables))

    # ---- taking --------------------------------------------------------------------------------------

    async def take(self, offer: peer_wire.Offer) -> frame.Bytes:
        """Pull the wanted blocks of an offer; returns which are here then, a byte a key. See
        `kvpool.wire.peer.Offer`.
        """
        keys = split_keys(offer.keys)
        nothing = frame.Bytes(bytes(len(keys)))
        source = self.cluster.living.get(_incarnation(offer.incarnation))
        if source is None or source.record.node != offer.node:
            raise Unavailable(
                f"incarnation {offer.incarnation} of node {offer.node} is not known here yet"
            )
        tenant = self.node.tenants.get(offer.tenant)
        if tenant is None or self.cluster.state is not NodeState.SERVING:
            return nothing
        specs = parse_parts(offer.digest, offer.fields, offer.parts)
        namespace = self.node.namespaces.open(tenant, offer.digest, offer.fields, specs)
        namespace = self.cluster.namespaces.known_epoch(namespace) or namespace
        if namespace.epoch != offer.epoch:
            return nothing
        mask = int.from_bytes(offer.mask, "little")
        if mask >> len(namespace.tables):
            raise InvalidRequest("the offer names parts that its namespace does not have")
        tables = [table for table in namespace.tables if mask >> table.part & 1]
        if not self._wants(tenant, offer, len(keys) * block_bytes(namespace, mask)):
            self._stats.refused_offers += 1
            return nothing
        nbytes = sum(t.stride for t in tables for key in keys if key not in t.blocks)
        wait_s = self._pace_in.take(nbytes, self.clock())
        await asyncio.sleep(wait_s)
        origin = Origin(False, offer.hops, offer.replicas)
        self._replicas_known |= offer.replicas > 1
        left = max(0.0, offer.deadline_s - wait_s)
        await self.fetcher.take(
            namespace, tables, keys, source.record.incarnation_bytes, origin, left
        )
        self.node.settle()
        have = []
        for key in keys:
            found = [block for table in tables if (block := table.blocks.get(key)) is not None]
            whole = len(found) == len(tables) and not namespace.retired
            have.append(whole)
            if whole:  # the offering node relies on them, so they become primary
                self.node.candidates.promote(found)
        self._stats.taken_blocks += sum(have)
        return frame.Bytes(bytes(have))

    def _wants(self, tenant: Tenant, offer: peer_wire.Offer, nbytes: int) -> bool:
        if offer.reason != "forward":
            return nbytes <= tenant.allocator.size // 2
        now = self.clock()
        cold = self.node.candidates.coldest(tenant, 1)
        cold_s = self.node.idle_age.age_s(cold[0].used, now) if cold else 0.0
        return accept_forward(
            int(self.node.candidates.spare_bytes(tenant) - tenant.allocator.size * HEADROOM),
            nbytes,
            offer.age_s,
            cold_s,
            offer.hops,
            HOPS_MAX,
        )

    # ---- replication ---------------------------------------------------------------------------------

    def wish(self, namespace: NamespaceState, keys: Iterable[bytes], replicas: int = 0) -> None:
        """These blocks were put here; they need further replicas if several are wanted."""
        wanted = min(replicas or namespace.settings.replicas, self.cluster.config.replicas_max)
        if wanted < 2:
            return
        self._replicas_known = True
        for key in keys:
            if len(self._wanted) >= WANTED_MAX:
                self._stats.dropped_wishes += 1
                self._repair_due = min(self._repair_due, self.clock() + AUDIT_EVERY_S)
                return
            self._wanted[namespace, key] = (wanted, 0)
        self._awake.set()

    def repair(self) -> None:
        """A node has left, or joined: find blocks that lack replicas, gradually. See `RepairWalk`."""
        if not self._replicas_known and not self.node.namespaces.any_replicas:
            return  # only single replicas are wanted
        if self.cluster.directory is None:
            return  # nobody knows who has what
        self._walk.request()
        self._awake.set()

    async def replicate(self) -> None:
        """Make the wanted replicas. Runs until cancelled."""
        while True:
            await wait_for(self._awake, AUDIT_EVERY_S)
            self._awake.clear()
            now = self.clock()
            if now >= self._repair_due:
                self._repair_due = now + REPAIR_EVERY_S
                self.repair()
            while (
                self._walk.position is not None
                and self.clock() >= self._walk_at
                and len(self._wanted) < WANTED_MAX // 2
            ):
                await self._repair_some()
            failed = False
            while self._wanted and not failed:
                failed = not await self._copy_some()

    async def _repair_some(self) -> None:
        """Examine some of this node's blocks; those that lack replicas, and are this node's to repair, are
        queued. If the directory does not answer, the same ones a little later.
        """
        # Those in memory first, then those on disks.
        cursor, on_disks = divmod(self._walk.begin_step(), 2)
        place = self.tiers if on_disks else self.node.inventory
        groups, following = place.walk(cursor, WALK)
        for digest, keys in groups:
            namespace = self.node.namespaces.by_directory(digest)
            if namespace is None or namespace.retired:
                continue
            worth = self._worth_it(namespace, keys)
            chosen = self._several_wanted(namespace, worth, on_disks=bool(on_disks))
            if not chosen:
                continue
            try:
                located = await self.fetcher.locator.replicas(namespace, list(chosen))
            except Unavailable:
                self._walk_at = self.clock() + AUDIT_EVERY_S
                return
            own = self.cluster.own
            here, below = self._masks(namespace, list(chosen))
            for (key, n), entries, up, down in zip(
                chosen.items(), located, here, below, strict=True
            ):
                holders = _who_holds(entries, up | down if on_disks else up) | {own}
                if is_needed(len(holders) - 1, n):
                    self._promote(namespace, key)
                if len(holders) < n and responsible(holders, key) == own:
                    self._wanted[namespace, key] = (n, 0)
                    self._stats.repairs += 1
        if following is not None:
            self._walk.end_step(2 * following + on_disks)
        else:
            self._walk.end_step(None if on_disks else 1)
        await asyncio.sleep(0)

    def _worth_it(self, namespace: NamespaceState, keys: Sequence[bytes]) -> list[bytes]:
        """Those of the blocks that are not the next to go here, in memory or on disks."""
        return self.tiers.ordinary(namespace, self.node.candidates.ordinary(namespace, keys))

    def _several_wanted(
        self, namespace: NamespaceState, keys: Sequence[bytes], *, on_disks: bool
    ) -> dict[bytes, int]:
        """Those of the blocks of which several replicas are wanted, and how many. on_disks: of those only there."""
        if on_disks:
            # What a put asked for is known in memory only.
            keys = self.only_below(namespace, keys) if namespace.settings.replicas > 1 else []
            return dict.fromkeys(keys, namespace.settings.replicas)
        wanted = self.node.inventory.replicas_wanted(namespace, keys)
        return {key: n for key, n in zip(keys, wanted, strict=True) if n > 1}

    async def _copy_some(self) -> bool:
        """Make replicas of the first queued blocks; returns whether that made progress."""
        (namespace, _), (replicas, tries) = next(iter(self._wanted.items()))
        keys = []
        for (other, key), (wanted, tried) in self._wanted.items():
            if other is not namespace or (wanted, tried) != (replicas, tries):
                break
            keys.append(key)
            if len(keys) == OFFER_KEYS:
                break
        worth = self._worth_it(namespace, keys)
        for key in set(keys).difference(worth):
            del self._wanted[namespace, key]
        keys = worth
        below = self.only_below(namespace, keys)
        if below:
            keys = keys[: self.at_a_time(namespace)]
            below = self.only_below(namespace, keys)
        for key in keys:
            del self._wanted[namespace, key]
        if namespace.retired:
            return True
        if below:
            await self.fetcher.pull_each(namespace, [], below, OFFER_S)
        short = self.only_below(namespace, below)
        here = dict.fromkeys(keys)
        for key in short:
            del here[key]
        for mask, group in self.by_offer(namespace, here):
            short += await self._copy(namespace, mask, group, replicas)
        # They are on a disk too: the next ones should not evict others.
        self.node.candidates.demote(namespace, below)
        if tries + 1 < TRIES_MAX:
            for key in short:
                self._wanted[namespace, key] = (replicas, tries + 1)
        return not short

    async def _copy(
        self, namespace: NamespaceState, mask: int, keys: list[bytes], replicas: int
    ) -> list[bytes]:
        """Offer these blocks to as many nodes as needed; returns the ones that still need replicas."""
        try:
            located = await self.fetcher.locator.replicas(namespace, keys)
        except Unavailable:
            located = [[] for _ in keys]
        holders: dict[bytes, set[bytes]] = {}
        lacking: dict[int, list[bytes]] = {}
        for key, entries in zip(keys, located, strict=True):
            holders[key] = _who_holds(entries, mask) | {self.cluster.own}
            lacking.setdefault(replicas - len(holders[key]), []).append(key)
        short = []
        for missing, group in lacking.items():
            if missing <= 0:
                continue
            everybody = set().union(*(holders[key] for key in group))
            targets = self.targets(everybody, missing, len(group) * block_bytes(namespace, mask))
            answers = await asyncio.gather(
                *(
                    self.offer(target, namespace, group, mask, reason="copy", replicas=replicas)
                    for target in targets
                )
            )
            made = dict.fromkeys(group, 0)
            for accepted in answers:
                for key in accepted:
                    made[key] += 1
            self._stats.replicated_blocks += sum(made.values())
            # With too few nodes, retrying does not help: a repair follows when one joins.
            short += [key for key, n in made.items() if n < min(missing, len(targets))]
        return short

    def targets(
        self, holders: set[bytes], n: int, nbytes: int, but: Collection[bytes] = ()
    ) -> list[LivingNode]:
        """Up to `n` nodes with room for so much that are not among `holders`, nor among `but`."""
        living = self.cluster.living
        records = [node.record for incarnation, node in living.items() if incarnation not in but]
        chosen = choose_targets(
            records, self.cluster.record(), holders, n, nbytes, self.cluster.rng
        )
        return [living[record.incarnation_bytes] for record in chosen]

    # ---- idle memory of others -----------------------------------------------------------------------

    async def forward(self) -> None:
        """Keep some of each segment free, or filled with secondary replicas. Runs until cancelled."""
        pressed = False
        while True:
            pause = PRESSED_S if pressed else FORWARD_EVERY_S
            await asyncio.sleep(pause if self.cluster.living else IDLE_S)
            pressed = False
            now = self.clock()
            if now - self._audited_at >= AUDIT_EVERY_S:
                self._audited_at = now
                await self._audit()
            if self.cluster.config.forward and self.cluster.state is NodeState.SERVING:
                for tenant in list(self.node.tenants.values()):
                    for _ in range(RELIEFS_MAX):
                        if not await self._relieve(tenant):
                            break
                        pressed = True

    async def _relieve(self, tenant: Tenant) -> bool:
        """If a segment is nearly full: offer the next victims to a node with room.

        Returns whether that made progress, so that there may be more to do at once.
        """
        candidates = self.node.candidates
        spare = candidates.spare_bytes(tenant) + candidates.expendable_bytes(tenant)
        lacking = int(tenant.allocator.size * HEADROOM) - spare
        if lacking <= 0 or not self.cluster.living:
            return False
        victims: list[Block] = []
        for block in self.node.candidates.coldest(tenant, OFFER_KEYS):
            if lacking <= 0:
                break
            if block.expendable:
                continue  # not worth another node's memory
            if block.hops < HOPS_MAX and not block.table.namespace.retired:
                victims.append(block)
                lacking -= block.table.stride
        groups: dict[tuple[NamespaceState, int], dict[bytes, int]] = {}
        for block in victims:
            group = groups.setdefault((block.table.namespace, block.hops), {})
            group[block.key] = max(block.used, group.get(block.key, 0))
        taken = 0
        for (namespace, hops), used in groups.items():
            for mask, keys in self.by_offer(namespace, used):
                age_s = self.node.idle_age.age_s(max(used[key] for key in keys), self.clock())
                taken += await self._forward(namespace, mask, keys, hops + 1, age_s)
        return taken > 0

    async def _forward(
        self, namespace: NamespaceState, mask: int, keys: list[bytes], hops: int, age_s: float
    ) -> int:
        """How many of these blocks another node has taken."""
        now, tenant = self.clock(), namespace.tenant.name
        refused = {
            incarnation
            for (incarnation, name), until in self._refused.items()
            if until > now and name == tenant
        }
        nbytes = len(keys) * block_bytes(namespace, mask)
        targets = self.targets({self.cluster.own}, 1, nbytes, but=refused)
        if not targets:
            return 0
        accepted = await self.offer(
            targets[0], namespace, keys, mask, reason="forward", hops=hops, age_s=age_s
        )
        if len(accepted) < len(keys):
            if len(self._refused) > len(self.cluster.living) * len(self.node.tenants):
                self._refused = {key: until for key, until in self._refused.items() if until > now}
            self._refused[targets[0].record.incarnation_bytes, tenant] = now + REFUSED_S
        self._stats.forwarded_blocks += len(accepted)
        self.node.candidates.demote(namespace, accepted)
        return len(accepted)

    async def _audit(self) -> None:
        """Check whether other nodes still keep enough replicas of the secondary ones to be evicted next."""
        evicted = self.node.counters.evicted_secondary
        count = 2 * (evicted - self._evicted_secondary)
        self._evicted_secondary = evicted
        for tenant in list(self.node.tenants.values()):
            groups: dict[NamespaceState, list[Block]] = {}
            coldest = self.node.candidates.coldest_secondary(
                tenant, min(max(AUDIT_KEYS, count), AUDIT_KEYS_MAX)
            )
            for block in coldest:
                groups.setdefault(block.table.namespace, []).append(block)
            for namespace, blocks in groups.items():
                for at in range(0, len(blocks), OFFER_KEYS):
                    if not await self._audit_some(namespace, blocks[at : at + OFFER_KEYS]):
                        return

    async def _audit_some(self, namespace: NamespaceState, blocks: Sequence[Block]) -> bool:
        """False if the directory does not answer."""
        keys = [block.key for block in blocks]
        wanted = self.node.inventory.replicas_wanted(namespace, keys)
        try:
            located = await self.fetcher.locator.replicas(namespace, keys)
        except Unavailable:
            return False
        needed = [
            block
            for block, entries, n in zip(blocks, located, wanted, strict=True)
            if is_needed(len(_who_holds(entries, 1 << block.table.part)), n)
        ]
        self._stats.promoted += len(needed)
        self.node.candidates.promote(needed)
        return True

    def _promote(self, namespace: NamespaceState, key: bytes) -> None:
        """All parts of this block here are needed."""
        found = [table.blocks[key] for table in namespace.tables if key in table.blocks]
        self._stats.promoted += any(block.secondary for block in found)
        self.node.candidates.promote(found)


def block_bytes(namespace: NamespaceState, mask: int) -> int:
    """The bytes of these parts of one block."""
    return sum(table.stride for table in namespace.tables if mask >> table.part & 1)


def _who_holds(entries: Iterable[Entry], mask: int) -> set[bytes]:
    """Incarnations that have all of these parts of a block, in whatever tiers."""
    held: dict[bytes, int] = {}
    for incarnation, _, parts in entries:
        held[incarnation] = held.get(incarnation, 0) | parts
    return {incarnation for incarnation, parts in held.items() if parts & mask == mask}


def _incarnation(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise InvalidRequest("an incarnation is 16 hex digits") from None

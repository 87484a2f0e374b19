"""Transfers under way: each reserves slots, has one source fill them, commits the arrived blocks, and updates
estimates.

A transfer is a task of its own: it outlives its first requester, for others that wait for the same blocks. It
waits for its turn at its source (`kvpool.daemon.workers.turns`) before it takes any slots. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from itertools import compress

from kvpool.daemon.core.blocks import (
    OWN,
    Holder,
    NamespaceState,
    Origin,
    PartTable,
    Reservation,
)
from kvpool.daemon.core.events import Loaded
from kvpool.daemon.core.node import Node
from kvpool.daemon.core.tier import SharedTier
from kvpool.daemon.fetch.locate import Locator
from kvpool.daemon.fetch.ports import (
    NOT_NODES,
    OBJECT,
    PEER,
    TIER_OF,
    ClusterView,
    LocalSource,
    PeerTransport,
    node_name,
)
from kvpool.daemon.fetch.tombstones import Tombstones
from kvpool.daemon.tasks import crash_if_failed
from kvpool.daemon.workers.turns import COPIES, Turn, TurnLimits, Turns
from kvpool.errors import InvalidRequest, KvpoolError, LimitExceeded, PoolFull
from kvpool.placement.peers import Peers
from kvpool.telemetry.cluster_stats import FetchStats
from kvpool.telemetry.memory_stats import Loads
from kvpool.telemetry.spans import CALLED_OFF, READ, TRANSFER, Span, child, working_for
from kvpool.types import CHECKSUM_BYTES, BlockStatus, split_keys
from kvpool.wire import frame
from kvpool.wire import worker as worker_wire

TRANSFER_S = (
    1.0  # the minimum time allowed for a transfer, whoever still waits: others will want it
)
LOADS_MAX = 8  # at a time from one disk, or from object storage: their workers have so many threads
WAITING_MAX = 4096  # transfers that wait for their turn at one source


@dataclass(eq=False, slots=True)
class Transfer:
    """Blocks of one namespace from one source: of several parts, if it is a node.

    blocks: the keys by part, each once. nbytes: asked for. patience_s: for so long it may take, and its source may let it wait without letting others
    go on. since: it was made, or has its turn, which is when it has begun. line: of its source. background: nobody
    waits for it. only_spare: it takes no ordinary block's place. late: it was counted as slow. kept: leases on what has arrived, until those who wait for it have
    noticed. no_room: those for which there was no slot, so that the source was not asked for them: then those that have
    slots are another transfer's, and this one ends. reserved: the slots, by ticket. called_off: it was late,
    and was cancelled for the sake of another source. removed: keys that are not kept, since they were removed after this
    began.
    """

    blocks: Mapping[PartTable, Sequence[bytes]]
    source: bytes
    nbytes: int
    patience_s: float
    since: float
    line: Line
    background: bool = False
    only_spare: bool = False
    late: bool = False
    expected_s: float = 0.0
    begun: bool = False
    kept: list[str] = field(default_factory=list)
    no_room: dict[PartTable, Sequence[bytes]] = field(default_factory=dict)
    reserved: dict[int, Reservation] = field(default_factory=dict)
    called_off: bool = False
    removed: set[bytes] = field(default_factory=set)
    has_turn: asyncio.Event = field(default_factory=asyncio.Event)
    turn: Turn = field(init=False)
    task: asyncio.Task[None] = field(init=False)

    @property
    def namespace(self) -> NamespaceState:
        return next(iter(self.blocks)).namespace

    @property
    def hedge_at(self) -> float:
        """When a second source may be asked for the same blocks."""
        return (self.since if self.begun else max(self.since, self.line.moved_at)) + self.patience_s


@dataclass(eq=False, slots=True)
class Line:
    """The transfers from one source. moved_at: when one of them had its turn, last. count: of them now."""

    turns: Turns
    moved_at: float
    count: int = 0


@dataclass(eq=False)
class Transfers:
    """All transfers of a node. pulls: whose turn it is at peers."""

    _node: Node
    _transport: PeerTransport
    _cluster: ClusterView
    _local: Mapping[bytes, LocalSource]
    _objects: SharedTier
    _locator: Locator
    _peers: Peers
    _clock: Callable[[], float]
    stats: FetchStats
    pulls: InitVar[Turns]

    def __post_init__(self, pulls: Turns) -> None:
        self._of_keys: dict[PartTable, dict[bytes, tuple[Transfer, ...]]] = {}
        self._under_way: dict[Transfer, None] = {}
        self._tickets = 0
        self._pulls, self._copies = pulls, Turns(COPIES)
        self._loads = {
            source: Turns(TurnLimits(4 * LOADS_MAX, LOADS_MAX)) for source in (*self._local, OBJECT)
        }
        self._lines: dict[tuple[bytes, bool], Line] = {}
        self._delivered = self.stats.delivered
        self.tombstones = Tombstones()

    def __len__(self) -> int:
        return len(self._under_way)

    def __iter__(self) -> Iterator[Transfer]:
        return iter(self._under_way)

    def of(self, table: PartTable) -> Mapping[bytes, tuple[Transfer, ...]]:
        """The transfers under way of each block of a table."""
        return self._of_keys.get(table, {})

    def close(self) -> None:
        """Cancel all. They end on their own, soon."""
        for transfer in list(self._under_way):
            transfer.task.cancel()

    def forget(self, digests: Collection[bytes], keys: Sequence[bytes]) -> None:
        """Keep none of these blocks that are under way, in the namespaces of these directory digests."""
        for table, of_keys in self._of_keys.items():
            if table.namespace.directory_digest in digests:
                for key in of_keys.keys() & keys:
                    for transfer in of_keys[key]:
                        transfer.removed.add(key)

    def has_room(self, source: bytes, *, background: bool) -> bool:
        """Whether one more may wait for its turn at a source."""
        return self._turns(source, background).waiting(source) < WAITING_MAX

    def hold(self, blocks: Mapping[PartTable, Sequence[bytes]], kept: list[str]) -> bool:
        """Lease these blocks of a namespace, as far as they are here, until `let_go`; False: there are too many leases.

        kept: the token of the lease is added to it.
        """
        if not blocks:
            return True
        holder = pulls_holder(self._node, next(iter(blocks)).namespace.tenant.name)
        try:
            lease = self._node.leases.acquire_each(holder, blocks, self._clock())
        except LimitExceeded:
            return False  # with very many pulls at a time: without a lease
        if lease is not None:
            kept.append(lease.token)
        return True

    def let_go(self, tenant: str, kept: Sequence[str]) -> None:
        """Release the leases of `hold`."""
        holder = pulls_holder(self._node, tenant)
        for token in kept:
            self._node.leases.release(holder, token)

    def give_up(self, transfers: Iterable[Transfer]) -> None:
        """End the first of these whose source has not answered anything since it was found to be slow."""
        for transfer in transfers:
            peer = self._peers.get(transfer.source)
            if peer is not None and peer.on_probation and not transfer.task.cancelling():
                self._call_off(transfer)
                return

    def call_off_superseded(self, transfers: Iterable[Transfer]) -> None:
        """End those of these whose blocks have all arrived another way."""
        self._node.settle()
        for transfer in transfers:
            if transfer.task.done() or transfer.task.cancelling():
                continue
            if all(all(table.blocks.present(keys)) for table, keys in transfer.blocks.items()):
                transfer.task.cancel()
                self.stats.cancelled += 1

    def make_room(self, transfer: Transfer) -> None:
        """This one found no slots: cancel late ones that hold slots for the same blocks."""
        now = self._clock()
        of_same = dict.fromkeys(
            one
            for table, keys in transfer.no_room.items()
            for key in keys
            for one in self.of(table).get(key, ())
        )
        for other in of_same:
            if other.begun and other.hedge_at <= now and not other.task.cancelling():
                self._call_off(other)

    def _call_off(self, transfer: Transfer) -> None:
        transfer.called_off = True
        transfer.task.cancel()
        self.stats.cancelled += 1

    def begin(
        self,
        wanted: Mapping[PartTable, Sequence[bytes]],
        source: bytes,
        deadline: float,
        origin: Origin,
        *,
        background: bool,
        only_spare: bool = False,
    ) -> None:
        """Start fetching blocks of a namespace from a source, when its turn comes. From a tier here: of one part.

        Transfers of these blocks that have not begun are withdrawn.
        """
        # An engine, or a peer, may have named a key twice.
        blocks = {table: list(dict.fromkeys(keys)) for table, keys in wanted.items()}
        now = self._clock()
        nbytes = sum(len(keys) * table.spec.nbytes for table, keys in blocks.items())
        patience_s = self._peers.hedge_after_s(source, nbytes)
        turns = self._turns(source, background)
        line = self._lines.setdefault((source, background), Line(turns, now))
        line.count += 1
        transfer = Transfer(blocks, source, nbytes, patience_s, now, line, background, only_spare)
        for table, keys in blocks.items():
            transfer.removed |= self.tombstones.among(table.namespace.directory_digest, keys)
        local = source in NOT_NODES
        url = "" if local else self._cluster.living[source].url
        self._under_way[transfer] = None
        hedges = False
        replaced: dict[Transfer, None] = {}
        for table, keys in blocks.items():
            of_keys = self._of_keys.setdefault(table, {})
            if of_keys.keys().isdisjoint(keys):
                of_keys.update(dict.fromkeys(keys, (transfer,)))
                continue
            for key in keys:
                others = of_keys.get(key, ())
                self.stats.hedges += bool(others)
                hedges = hedges or bool(others)
                replaced.update(dict.fromkeys(others))
                of_keys[key] = (*others, transfer)
        for other in replaced:
            if not other.begun:  # this one is asked instead
                other.task.cancel()
        self._peers.queued(source, nbytes)
        came = OWN if local else origin
        if not background:
            came = came._replace(tier=TIER_OF.get(source, PEER))
        transfer.turn = turns.join(source, transfer.has_turn.set, first=hedges)
        transfer.task = asyncio.get_running_loop().create_task(
            self._when_its_turn(transfer, url, deadline, came)
        )
        transfer.task.add_done_callback(lambda task: self._ended(transfer, task))

    def _turns(self, source: bytes, background: bool) -> Turns:
        """Whose limits hold for a source. Copies that nobody waits for keep no thread from others."""
        loads = self._loads.get(source)
        if loads is not None:
            return loads
        return self._copies if background else self._pulls

    async def _when_its_turn(
        self, transfer: Transfer, url: str, deadline: float, origin: Origin
    ) -> None:
        """Wait for its turn, at most until nobody waits for it any more; then it has the rest of the time."""
        if not transfer.turn.begun:
            wait_s = max(deadline - self._clock(), TRANSFER_S)
            try:
                async with asyncio.timeout(wait_s):
                    await transfer.has_turn.wait()
            except TimeoutError:
                return
        now = transfer.since = transfer.line.moved_at = self._clock()
        transfer.begun = True
        self._peers.unqueued(transfer.source, transfer.nbytes)
        seconds = max(deadline - now, TRANSFER_S)
        await self._run(transfer, url, seconds, origin)

    def _ended(self, transfer: Transfer, task: asyncio.Task[None]) -> None:
        self._under_way.pop(transfer, None)
        if transfer.reserved:
            self._free(transfer)  # it may have been cancelled before its first step
        if not transfer.begun:
            self._peers.unqueued(transfer.source, transfer.nbytes)
            self.stats.not_begun += 1
        transfer.line.turns.end(transfer.turn)
        transfer.line.count -= 1
        if not transfer.line.count:
            self._lines.pop((transfer.source, transfer.background), None)
        for table, keys in transfer.blocks.items():
            of_keys = self._of_keys[table]
            for key in keys:
                transfers = of_keys.pop(key)
                if len(transfers) > 1:
                    of_keys[key] = tuple(other for other in transfers if other is not transfer)
            if not of_keys:
                del self._of_keys[table]
        if transfer.kept:  # who waits for this task runs in the next turn of the loop
            loop = asyncio.get_running_loop()
            tenant = transfer.namespace.tenant.name
            loop.call_soon(loop.call_soon, self.let_go, tenant, transfer.kept)
        crash_if_failed(task)

    # ---- one of them ---------------------------------------------------------------------------------

    async def _run(self, transfer: Transfer, url: str, seconds: float, origin: Origin) -> None:
        """Reserve, fill, commit the arrived blocks."""
        holder = pulls_holder(self._node, transfer.namespace.tenant.name)
        pulled = None
        try:
            if not transfer.reserved:  # else it is what another one goes on without
                self._reserve_all(transfer, holder)
                if transfer.reserved and transfer.no_room:
                    self._go_on_without(transfer, url, seconds, origin)
            if transfer.reserved:
                pulled = await self._fill(transfer, holder, url, seconds, origin)
        finally:
            self._free(transfer)
        if pulled is not None:
            self._learn(transfer, pulled)

    def _go_on_without(self, transfer: Transfer, url: str, seconds: float, origin: Origin) -> None:
        """Bring what has slots by a transfer of its own. This one ends, which tells those who wait for the other blocks."""
        rest = Transfer(
            {each.table: each.keys for each in transfer.reserved.values()},
            transfer.source,
            sum(len(each.keys) * each.table.spec.nbytes for each in transfer.reserved.values()),
            transfer.patience_s,
            transfer.since,
            transfer.line,
            transfer.background,
            transfer.only_spare,
            late=transfer.late,
            begun=True,
            removed=transfer.removed,
        )
        rest.reserved, transfer.reserved = transfer.reserved, {}
        # The turn is the rest's, until it ends.
        rest.turn, transfer.turn = transfer.turn, Turn(transfer.source, lambda: None, over=True)
        left: dict[PartTable, Sequence[bytes]] = {}
        for table, keys in transfer.blocks.items():
            of_keys, brought = self._of_keys[table], set(rest.blocks.get(table, ()))
            for key in brought:
                of_keys[key] = tuple(rest if one is transfer else one for one in of_keys[key])
            left[table] = [key for key in keys if key not in brought]
        transfer.blocks = left
        rest.line.count += 1
        self._under_way[rest] = None
        rest.task = asyncio.get_running_loop().create_task(self._run(rest, url, seconds, origin))
        rest.task.add_done_callback(lambda task: self._ended(rest, task))

    def _free(self, transfer: Transfer) -> None:
        """Slots that nothing was committed to. Idempotent."""
        holder = pulls_holder(self._node, transfer.namespace.tenant.name)
        for ticket in transfer.reserved:
            self._node.puts.abort(holder, ticket)
        self._node.settle()

    def _reserve_all(self, transfer: Transfer, holder: Holder) -> None:
        """Reserve slots, as far as there is room. None if the epoch has just ended, or all has arrived meanwhile."""
        for table, keys in transfer.blocks.items():
            self._tickets += 1
            if not self._reserve(transfer, holder, self._tickets, table, keys):
                self._free(transfer)
                transfer.reserved.clear()
                return
            reservation = holder.reservations.get(self._tickets)
            if reservation is not None:
                transfer.reserved[self._tickets] = reservation
        self.stats.no_room += bool(transfer.no_room)

    def _reserve(
        self,
        transfer: Transfer,
        holder: Holder,
        ticket: int,
        table: PartTable,
        keys: Sequence[bytes],
    ) -> bool:
        """Reserve slots for blocks of one part, as far as there is room; False: its epoch has ended."""
        try:
            self._node.puts.reserve(
                *(holder, table.namespace, table.part, ticket, keys),
                only_spare=transfer.only_spare,
            )
        except (PoolFull, LimitExceeded):
            transfer.no_room[table] = keys
            return True
        except InvalidRequest:
            return False
        reservation = holder.reservations.get(ticket)
        if reservation is not None and len(reservation.keys) < len(keys):
            found = set(reservation.keys)
            lacking = [key for key in keys if key not in found and key not in table.blocks]
            if lacking:
                transfer.no_room[table] = lacking
        return True

    async def _fill(
        self,
        transfer: Transfer,
        holder: Holder,
        url: str,
        seconds: float,
        origin: Origin,
    ) -> worker_wire.Pulled | None:
        """Have the slots filled, and commit the arrived blocks; None on failure."""
        node, reserved = self._node, transfer.reserved
        count = sum(len(reservation.keys) for reservation in reserved.values())
        nbytes = sum(len(each.keys) * each.table.spec.nbytes for each in reserved.values())
        now = self._clock()
        transfer.expected_s = self._estimate_s(transfer.source, nbytes, now)
        self._peers.started(transfer.source, nbytes, now)
        span = child(TRANSFER if url else READ)
        try:
            # This returns, raises or is cancelled only when nothing writes to the rows any more, so
            # that unfilled rows can be freed.
            filled = list(reserved.values())
            if span is None:
                pulled = await self._bring(transfer, url, filled, seconds)
            else:
                with working_for(span):
                    pulled = await self._bring_traced(transfer, url, filled, seconds, span)
            arrived: dict[PartTable, Sequence[bytes]] = {}
            for ticket, outcome in zip(reserved, _outcomes(filled, pulled), strict=True):
                reservation, status, checksums = outcome
                table, keys = reservation.table, reservation.keys
                if transfer.removed:
                    status = bytes(
                        BlockStatus.ABSENT if key in transfer.removed else each
                        for key, each in zip(keys, status, strict=True)
                    )
                came = status.count(BlockStatus.PRESENT)
                if came == len(keys):
                    node.puts.commit(holder, ticket, checksums, None, origin)
                    arrived[table] = keys
                elif came:
                    here = [each == BlockStatus.PRESENT for each in status]
                    some = b"".join(compress(split_keys(checksums), here))
                    indices = list(compress(reservation.indices, here))
                    node.puts.commit(holder, ticket, some, indices, origin)
                    arrived[table] = list(compress(keys, here))
            # Lease what has arrived until those who wait for it have had their turn of the loop. Where memory is full,
            # what comes next would evict it first: many prompts at a time took each other's blocks away, and none was
            # ever whole.
            if not transfer.background:
                self.hold(arrived, transfer.kept)
        except KvpoolError as error:
            if span is not None:
                span.end(str(error))
            if isinstance(error, LimitExceeded):  # it was not begun, here: nobody's fault
                self._peers.stopped(transfer.source, nbytes)
            else:
                self._failed(transfer, nbytes, str(error))
            self._count(transfer, Loads(failed=count))
            return None
        except asyncio.CancelledError:
            if span is not None:
                span.end(CALLED_OFF)
            self._peers.stopped(transfer.source, nbytes)
            self._count(transfer, Loads(cancelled=count))
            raise
        return pulled

    async def _bring_traced(
        self,
        transfer: Transfer,
        url: str,
        reserved: Sequence[Reservation],
        seconds: float,
        span: Span,
    ) -> worker_wire.Pulled:
        """As `_bring`, and record the result in the span."""
        tier = TIER_OF.get(transfer.source, PEER)
        asked = sum(len(reservation.keys) for reservation in reserved)
        first = reserved[0].table.part
        span.set(tier=tier, part=first, parts=len(reserved), blocks_asked=asked)
        if url:
            span.set(node=node_name(self._cluster, transfer.source))
        trace = span.traceparent if url else ""
        pulled = await self._bring(transfer, url, reserved, seconds, trace)
        came = pulled.status.count(BlockStatus.PRESENT)
        span.count_above(f"parts_from_{tier}", came)
        span.end(
            pulled.error,
            blocks=came,
            bytes=sum(
                status.count(BlockStatus.PRESENT) * reservation.table.spec.nbytes
                for reservation, status, _ in _outcomes(reserved, pulled)
            ),
            mismatches=pulled.status.count(BlockStatus.MISMATCH),
            absent=pulled.status.count(BlockStatus.ABSENT),
        )
        return pulled

    async def _bring(
        self,
        transfer: Transfer,
        url: str,
        reserved: Sequence[Reservation],
        seconds: float,
        trace: str = "",
    ) -> worker_wire.Pulled:
        """Have reserved rows filled by a peer, or without a URL by a lower tier or object storage."""
        if not url:
            (only,) = reserved
            tier = self._local.get(transfer.source, self._objects)
            return await tier.load(only.table, only.keys, only.rows, seconds)
        namespace = transfer.namespace
        order = worker_wire.PullBlocks(
            url=url,
            tenant=namespace.tenant.name,
            digest=namespace.digest,
            segment=namespace.tenant.segment,
            parts=[
                worker_wire.PartRows(
                    part=table.part,
                    nbytes=table.spec.nbytes,
                    stride=table.stride,
                    keys=b"".join(each.keys),
                    rows=frame.pack_rows(each.rows),
                )
                for each in reserved
                for table in [each.table]
            ],
            deadline_s=seconds,
            background=transfer.background,
            trace=trace,
        )
        return await self._transport.pull(order)

    # ---- what is learned from it ---------------------------------------------------------------------

    def _estimate_s(self, source: bytes, nbytes: int, now: float) -> float:
        """How long this many bytes from a source should take, after those in flight."""
        peer = self._peers.get(source) or self._peers.stranger(source)
        latency_s, per_byte = peer.expected(now)
        return latency_s + (peer.ahead_bytes + nbytes) * per_byte

    def _count(self, transfer: Transfer, loads: Loads) -> None:
        """Count the outcome of a transfer, by source and tenant."""
        tier = TIER_OF.get(transfer.source, PEER)
        self._node.events.emit(Loaded(transfer.namespace, tier, loads))
        if tier == PEER:
            self._delivered.from_peer(node_name(self._cluster, transfer.source), loads)

    def _learn(self, transfer: Transfer, pulled: worker_wire.Pulled) -> None:
        """Count a transfer that has ended on its own, and update its source's estimates."""
        reserved = list(transfer.reserved.values())
        source, now = transfer.source, self._clock()
        count = len(pulled.status)
        came = pulled.status.count(BlockStatus.PRESENT)
        absent = pulled.status.count(BlockStatus.ABSENT)
        mismatches = pulled.status.count(BlockStatus.MISMATCH)
        nbytes = came_bytes = largest = 0
        lacks = {BlockStatus.ABSENT, BlockStatus.MISMATCH}
        for reservation, status, _ in _outcomes(reserved, pulled):
            table, keys = reservation.table, reservation.keys
            each = table.spec.nbytes
            here = status.count(BlockStatus.PRESENT)
            nbytes += len(keys) * each
            came_bytes += here * each
            largest = max(largest, each)
            if here < len(keys):
                for key, of_key in zip(keys, status, strict=True):
                    if of_key in lacks:
                        self._locator.was_missing(table, key, source, now)
        counters = self._node.counters
        counters.pulled_blocks += came
        counters.pulled_bytes += came_bytes
        counters.checksum_mismatches += mismatches
        self.stats.mismatches += mismatches
        self.stats.absent += absent
        failed = count - came - absent - mismatches
        self._count(transfer, Loads(came, absent, mismatches, failed, nbytes=came_bytes))
        tier = TIER_OF.get(source, PEER)
        if came and not transfer.background:
            self._delivered.took(tier, pulled.seconds)
            if came == count:
                self._delivered.foreseen(tier, transfer.expected_s, pulled.seconds)
        if pulled.error:
            # After an error, up to one block's worth of bytes may have arrived in part.
            self._failed(transfer, nbytes, pulled.error, came_bytes + largest, pulled.seconds)
        elif transfer.background:  # its low priority does not measure the source's speed
            self._peers.stopped(source, nbytes)
        else:
            self._peers.finished(source, came_bytes, pulled.seconds, now, asked=nbytes)

    def _failed(
        self, transfer: Transfer, nbytes: int, error: str, at_most: int = 0, seconds: float = 0.0
    ) -> None:
        self.stats.failed_transfers += 1
        if transfer.background:
            self._peers.stopped(transfer.source, nbytes)
            return
        self._peers.failed(
            transfer.source,
            self._clock(),
            error=error,
            asked=nbytes,
            at_most=at_most,
            seconds=seconds,
        )


def _outcomes(
    reserved: Sequence[Reservation], pulled: worker_wire.Pulled
) -> Iterator[tuple[Reservation, bytes, bytes]]:
    """Each reservation with a `BlockStatus` and a checksum of each of its keys."""
    at = 0
    for reservation in reserved:
        end = at + len(reservation.keys)
        checksums = pulled.checksums[at * CHECKSUM_BYTES : end * CHECKSUM_BYTES]
        yield reservation, pulled.status[at:end], checksums
        at = end


def pulls_holder(node: Node, tenant: str) -> Holder:
    """The holder of transfers' reservations and leases. It lives as long as the daemon."""
    return node.holders.own(tenant, "pulls")

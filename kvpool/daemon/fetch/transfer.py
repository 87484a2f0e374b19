"""Transfers under way: each reserves slots, has one source fill them, commits the arrived blocks, and updates
estimates.

A transfer is a task of its own: it outlives its first requester, for others that wait for the same blocks. It
waits for its turn at its source (`kvpool.daemon.workers.turns`) before it takes any slots. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress

from kvpool.daemon.core.blocks import OWN, Holder, Origin, PartTable, Reservation
from kvpool.daemon.core.node import Node
from kvpool.daemon.core.tasks import crash_if_failed
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
from kvpool.daemon.workers.turns import COPIES, Turn, TurnLimits, Turns
from kvpool.errors import InvalidRequest, KvpoolError, LimitExceeded, PoolFull
from kvpool.placement.peers import Peers
from kvpool.telemetry.node_stats import FetchStats, Loads
from kvpool.telemetry.spans import CALLED_OFF, READ, TRANSFER, Span, child, working_for
from kvpool.types import BlockStatus, split_keys
from kvpool.wire import frame
from kvpool.wire import worker as worker_wire

TRANSFER_S = (
    1.0  # the minimum time allowed for a transfer, whoever still waits: others will want it
)
LOADS_MAX = 8  # at a time from one disk, or from object storage: their workers have so many threads
WAITING_MAX = 4096  # transfers that wait for their turn at one source


@dataclass(eq=False, slots=True)
class Transfer:
    """Blocks of one part, from one source.

    nbytes: asked for. patience_s: for so long it may take, and its source may let it wait without letting others
    go on. since: it was made, or has its turn, which is when it has begun. line: of its source. background: nobody
    waits for it. only_spare: it takes no ordinary block's place. late: it was counted as slow. kept: leases on what has arrived, until those who wait for it have
    noticed. no_room: those for which there was no slot, so that the source was not asked. called_off: it was late,
    and was cancelled for the sake of another source.
    """

    table: PartTable
    source: bytes
    keys: Sequence[bytes]
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
    no_room: Sequence[bytes] = ()
    called_off: bool = False
    has_turn: asyncio.Event = field(default_factory=asyncio.Event)
    turn: Turn = field(init=False)
    task: asyncio.Task[None] = field(init=False)

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


class Transfers:
    """All transfers of a node."""

    def __init__(
        self,
        node: Node,
        transport: PeerTransport,
        cluster: ClusterView,
        local: Mapping[bytes, LocalSource],
        objects: SharedTier,
        locator: Locator,
        peers: Peers,
        clock: Callable[[], float],
        stats: FetchStats,
        pulls: Turns,
    ) -> None:
        """pulls: whose turn it is at peers."""
        self._node = node
        self._transport = transport
        self._cluster = cluster
        self._local = local
        self._objects = objects
        self._locator = locator
        self._peers = peers
        self._clock = clock
        self._of_keys: dict[PartTable, dict[bytes, tuple[Transfer, ...]]] = {}
        self._under_way: dict[Transfer, None] = {}
        self._tickets = 0
        self._pulls, self._copies = pulls, Turns(COPIES)
        self._loads = {
            source: Turns(TurnLimits(4 * LOADS_MAX, LOADS_MAX)) for source in (*local, OBJECT)
        }
        self._lines: dict[tuple[bytes, bool], Line] = {}
        self.stats = stats
        self._delivered = stats.delivered

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

    def has_room(self, source: bytes, *, background: bool) -> bool:
        """Whether one more may wait for its turn at a source."""
        return self._turns(source, background).waiting(source) < WAITING_MAX

    def hold(self, table: PartTable, keys: Sequence[bytes], kept: list[str]) -> bool:
        """Lease these blocks as far as they are here until `let_go`; False: there are too many leases.

        kept: the tokens of the leases are added to it.
        """
        namespace = table.namespace
        try:
            lease = self._node.leases.acquire(
                pulls_holder(self._node, namespace.tenant.name),
                namespace,
                [table.part],
                keys,
                None,
                self._clock(),
                scattered=True,
            )
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
            if all(transfer.table.blocks.present(transfer.keys)):
                transfer.task.cancel()
                self.stats.cancelled += 1

    def make_room(self, transfer: Transfer) -> None:
        """This one found no slots: cancel late ones that hold slots for the same blocks."""
        now, under_way = self._clock(), self.of(transfer.table)
        of_same = dict.fromkeys(one for key in transfer.no_room for one in under_way.get(key, ()))
        for other in of_same:
            if other.begun and other.hedge_at <= now and not other.task.cancelling():
                self._call_off(other)

    def _call_off(self, transfer: Transfer) -> None:
        transfer.called_off = True
        transfer.task.cancel()
        self.stats.cancelled += 1

    def begin(
        self,
        table: PartTable,
        source: bytes,
        keys: Sequence[bytes],
        deadline: float,
        origin: Origin,
        *,
        background: bool,
        only_spare: bool = False,
    ) -> None:
        """Start fetching blocks from a source, when its turn comes.

        Transfers of these blocks that have not begun are withdrawn.
        """
        keys = list(dict.fromkeys(keys))  # an engine, or a peer, may have named a key twice
        now = self._clock()
        nbytes = len(keys) * table.spec.nbytes
        patience_s = self._peers.hedge_after_s(source, nbytes)
        turns = self._turns(source, background)
        line = self._lines.setdefault((source, background), Line(turns, now))
        line.count += 1
        transfer = Transfer(
            table, source, keys, nbytes, patience_s, now, line, background, only_spare
        )
        local = source in NOT_NODES
        url = "" if local else self._cluster.living[source].url
        self._under_way[transfer] = None
        hedges = False
        of_keys = self._of_keys.setdefault(table, {})
        if of_keys.keys().isdisjoint(keys):
            of_keys.update(dict.fromkeys(keys, (transfer,)))
        else:
            replaced: dict[Transfer, None] = {}
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
        if not transfer.begun:
            self._peers.unqueued(transfer.source, transfer.nbytes)
            self.stats.not_begun += 1
        transfer.line.turns.end(transfer.turn)
        transfer.line.count -= 1
        if not transfer.line.count:
            self._lines.pop((transfer.source, transfer.background), None)
        of_keys = self._of_keys[transfer.table]
        for key in transfer.keys:
            transfers = of_keys.pop(key)
            if len(transfers) > 1:
                of_keys[key] = tuple(other for other in transfers if other is not transfer)
        if not of_keys:
            del self._of_keys[transfer.table]
        if transfer.kept:  # who waits for this task runs in the next turn of the loop
            loop = asyncio.get_running_loop()
            tenant = transfer.table.namespace.tenant.name
            loop.call_soon(loop.call_soon, self.let_go, tenant, transfer.kept)
        crash_if_failed(task)

    # ---- one of them ---------------------------------------------------------------------------------

    async def _run(self, transfer: Transfer, url: str, seconds: float, origin: Origin) -> None:
        """Reserve, fill, commit the arrived blocks."""
        node, table = self._node, transfer.table
        namespace = table.namespace
        holder = pulls_holder(node, namespace.tenant.name)
        self._tickets += 1
        ticket = self._tickets
        try:
            node.puts.reserve(
                *(holder, namespace, table.part, ticket, transfer.keys),
                only_spare=transfer.only_spare,
            )
        except (PoolFull, LimitExceeded):
            transfer.no_room = transfer.keys
            self.stats.no_room += 1
            return
        except InvalidRequest:
            return  # the epoch has just ended
        reservation = holder.reservations.get(ticket)
        if reservation is None:
            return  # they have arrived meanwhile
        if len(reservation.keys) < len(transfer.keys):
            reserved = set(reservation.keys)
            transfer.no_room = [
                key for key in transfer.keys if key not in reserved and key not in table.blocks
            ]
            self.stats.no_room += bool(transfer.no_room)
        try:
            pulled = await self._fill(transfer, ticket, reservation, url, seconds, origin)
        finally:
            node.puts.abort(holder, ticket)
            node.settle()
        if pulled is not None:
            self._learn(transfer, reservation, pulled)

    async def _fill(
        self,
        transfer: Transfer,
        ticket: int,
        reservation: Reservation,
        url: str,
        seconds: float,
        origin: Origin,
    ) -> worker_wire.Pulled | None:
        """Have the slots filled, and commit the arrived blocks; None on failure."""
        node, keys = self._node, reservation.keys
        holder = pulls_holder(node, transfer.table.namespace.tenant.name)
        nbytes = len(keys) * transfer.table.spec.nbytes
        now = self._clock()
        transfer.expected_s = self._estimate_s(transfer.source, nbytes, now)
        self._peers.started(transfer.source, nbytes, now)
        span = child(TRANSFER if url else READ)
        try:
            # This returns, raises or is cancelled only when nothing writes to the rows any more, so
            # that unfilled rows can be freed.
            if span is None:
                pulled = await self._bring(transfer, url, reservation, seconds)
            else:
                with working_for(span):
                    pulled = await self._bring_traced(transfer, url, reservation, seconds, span)
            if pulled.status.count(BlockStatus.PRESENT) == len(keys):
                node.puts.commit(holder, ticket, pulled.checksums, None, origin)
                self._keep(transfer, keys)
            elif BlockStatus.PRESENT in pulled.status:
                here = [status == BlockStatus.PRESENT for status in pulled.status]
                checksums = b"".join(compress(split_keys(pulled.checksums), here))
                indices = list(compress(reservation.indices, here))
                node.puts.commit(holder, ticket, checksums, indices, origin)
                self._keep(transfer, list(compress(keys, here)))
        except KvpoolError as error:
            if span is not None:
                span.end(str(error))
            if isinstance(error, LimitExceeded):  # it was not begun, here: nobody's fault
                self._peers.stopped(transfer.source, nbytes)
            else:
                self._failed(transfer, nbytes, str(error))
            self._count(transfer, Loads(failed=len(keys)))
            return None
        except asyncio.CancelledError:
            if span is not None:
                span.end(CALLED_OFF)
            self._peers.stopped(transfer.source, nbytes)
            self._count(transfer, Loads(cancelled=len(keys)))
            raise
        return pulled

    def _keep(self, transfer: Transfer, keys: Sequence[bytes]) -> None:
        """Lease what has arrived until those who wait for it have had their turn of the loop.

        Where memory is full, what comes next would evict it first: many prompts at a time took each other's blocks
        away, and none was ever whole.
        """
        if not transfer.background:
            self.hold(transfer.table, keys, transfer.kept)

    async def _bring_traced(
        self, transfer: Transfer, url: str, reservation: Reservation, seconds: float, span: Span
    ) -> worker_wire.Pulled:
        """As `_bring`, and record the result in the span."""
        tier = TIER_OF.get(transfer.source, PEER)
        span.set(tier=tier, part=transfer.table.part, blocks_asked=len(reservation.keys))
        if url:
            span.set(node=node_name(self._cluster, transfer.source))
        trace = span.traceparent if url else ""
        pulled = await self._bring(transfer, url, reservation, seconds, trace)
        came = pulled.status.count(BlockStatus.PRESENT)
        span.count_above(f"parts_from_{tier}", came)
        span.end(
            pulled.error,
            blocks=came,
            bytes=came * transfer.table.spec.nbytes,
            mismatches=pulled.status.count(BlockStatus.MISMATCH),
            absent=pulled.status.count(BlockStatus.ABSENT),
        )
        return pulled

    async def _bring(
        self,
        transfer: Transfer,
        url: str,
        reservation: Reservation,
        seconds: float,
        trace: str = "",
    ) -> worker_wire.Pulled:
        """Have reserved rows filled by a peer, or without a URL by a lower tier or object storage."""
        table = transfer.table
        if not url:
            tier = self._local.get(transfer.source, self._objects)
            return await tier.load(table, reservation.keys, reservation.rows, seconds)
        namespace = table.namespace
        order = worker_wire.PullBlocks(
            url=url,
            tenant=namespace.tenant.name,
            digest=namespace.digest,
            part=table.part,
            nbytes=table.spec.nbytes,
            keys=b"".join(reservation.keys),
            segment=namespace.tenant.segment,
            stride=table.stride,
            rows=frame.pack_rows(reservation.rows),
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
        transfer.table.namespace.tenant.traffic.loads.setdefault(tier, Loads()).add(loads)
        if tier == PEER:
            self._delivered.from_peer(node_name(self._cluster, transfer.source), loads)

    def _learn(
        self, transfer: Transfer, reservation: Reservation, pulled: worker_wire.Pulled
    ) -> None:
        """Count a transfer that has ended on its own, and update its source's estimates."""
        table, source, now = transfer.table, transfer.source, self._clock()
        keys, each = reservation.keys, table.spec.nbytes
        came = pulled.status.count(BlockStatus.PRESENT)
        absent = pulled.status.count(BlockStatus.ABSENT)
        mismatches = pulled.status.count(BlockStatus.MISMATCH)
        if came < len(keys):
            lacks = {BlockStatus.ABSENT, BlockStatus.MISMATCH}
            for key, status in zip(keys, pulled.status, strict=True):
                if status in lacks:
                    self._locator.was_missing(table, key, source, now)
        counters = self._node.counters
        counters.pulled_blocks += came
        counters.pulled_bytes += came * each
        counters.checksum_mismatches += mismatches
        self.stats.mismatches += mismatches
        self.stats.absent += absent
        nbytes = len(keys) * each
        failed = len(keys) - came - absent - mismatches
        self._count(transfer, Loads(came, absent, mismatches, failed, nbytes=came * each))
        tier = TIER_OF.get(source, PEER)
        if came and not transfer.background:
            self._delivered.took(tier, pulled.seconds)
            if came == len(keys):
                self._delivered.foreseen(tier, transfer.expected_s, pulled.seconds)
        if pulled.error:
            # After an error, up to one block's worth of bytes may have arrived in part.
            arrived = (came + 1) * each
            self._failed(transfer, nbytes, pulled.error, arrived, pulled.seconds)
        elif transfer.background:  # its low priority does not measure the source's speed
            self._peers.stopped(source, nbytes)
        else:
            self._peers.finished(source, came * each, pulled.seconds, now, asked=nbytes)

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


def pulls_holder(node: Node, tenant: str) -> Holder:
    """The holder of transfers' reservations and leases. It lives as long as the daemon."""
    return node.holders.own(tenant, "pulls")

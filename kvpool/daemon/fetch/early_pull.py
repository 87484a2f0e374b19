"""Early pull: bytes of blocks are pulled before their commit, while the rest is computed elsewhere.

An owner reports to followers how many bytes are written of blocks that are being put there. Slots are reserved
here for such a batch, and the bytes pulled into them, repeatedly as more is written. At the commit an ordinary
transfer (`transfer.py`) takes the slots over: it pulls the missing bytes, and the checksum of the whole block,
known only from the commit, decides whether they are correct.

So the block is not found here before it is committed there and has been verified. A writer that gives up, dies,
or changes reported bytes costs a transfer: the batch is dropped, and the blocks are pulled in the usual
way. Slots are freed when the batch is dropped and nothing writes to them any more. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvpool.daemon.core.blocks import Holder, PartTable, Reservation
from kvpool.daemon.core.node import Node
from kvpool.daemon.core.tasks import crash_if_failed
from kvpool.daemon.fetch.ports import ClusterView, PeerTransport, node_name
from kvpool.daemon.fetch.pull_orders import pull_order
from kvpool.daemon.workers.turns import Turns
from kvpool.errors import InvalidRequest, KvpoolError, LimitExceeded, PoolFull
from kvpool.placement.peers import Peers
from kvpool.telemetry.node_stats import PrefixStreamStats
from kvpool.telemetry.spans import CALLED_OFF, TRANSFER, Span, current, working_for
from kvpool.types import BlockStatus

PULLS_MAX = 8  # at a time from one owner: other pulls need threads too
PULL_BYTES = 64 << 10  # less than this is postponed
EARLY_BYTES = 32 << 20  # in one pull: it counts only when complete, and others wait meanwhile
PULL_S = 2.0  # a pull is cancelled then, or when it is far slower than expected
REST_S = 0.25  # how long committed blocks wait for a pull of their beginning


@dataclass(eq=False, slots=True)
class Batch:
    """A run of adjacent keys of one reservation at an owner, and the slots for them here. Created by `EarlyPull`
    only.

    number: of the owner's reservation. position: of each key in the local one. have: bytes of each slot that are
    here. told: bytes written there. taken: a transfer has taken some slots over, and no more is pulled here.
    transfers: how many of these transfers are under way. over: the rest is no longer wanted. begun: the pull has
    its turn. span: of the follow that it was made for.
    """

    table: PartTable
    owner: bytes
    number: int
    holder: Holder
    ticket: int
    reservation: Reservation
    position: dict[bytes, int]
    have: int = 0
    told: int = 0
    taken: bool = False
    transfers: int = 0
    over: bool = False
    pull: asyncio.Task[None] | None = None
    begun: bool = False
    span: Span | None = None


class EarlyPull:
    """All batches of a node."""

    def __init__(
        self,
        node: Node,
        transport: PeerTransport,
        cluster: ClusterView,
        peers: Peers,
        clock: Callable[[], float],
        turns: Turns,
    ) -> None:
        self._turns = turns
        self._node = node
        self._transport = transport
        self._cluster = cluster
        self._peers = peers
        self._clock = clock
        self._tickets = 0
        self._batches: dict[
            PartTable, dict[bytes, Batch]
        ] = {}  # by key, while it can be taken over
        # By owner: one that has stopped keeps only its own back.
        self._pulling: dict[bytes, dict[Batch, None]] = {}
        self._waiting: dict[bytes, dict[Batch, None]] = {}
        self.stats = PrefixStreamStats()

    # ---- for follows -----------------------------------------------------------------------------------

    def told(
        self, table: PartTable, owner: bytes, number: int, keys: Sequence[bytes], nbytes: int
    ) -> Batch | None:
        """An owner reports this progress for these blocks, of one reservation. Returns a batch if it is new.

        The caller must `drop` it. keys: not empty, and none is here or on its way.
        """
        known = self._batches.get(table, {})
        for batch in {known[key]: None for key in keys if key in known}:
            if batch.owner != owner:
                if batch.owner not in self._cluster.living:
                    self.drop(batch)
            elif batch.number != number:
                self.drop(batch)  # it was aborted there, and another writer has begun
            elif nbytes > batch.told:
                batch.told = nbytes
                self._begin(batch)
        return self._reserve(table, owner, number, keys, nbytes)

    def _reserve(
        self, table: PartTable, owner: bytes, number: int, keys: Sequence[bytes], nbytes: int
    ) -> Batch | None:
        known = self._batches.get(table, {})
        fresh = [key for key in keys if key not in known]
        if not fresh:
            return None
        node, namespace = self._node, table.namespace
        holder = node.holders.own(namespace.tenant.name, "early pulls")
        self._tickets += 1
        try:
            node.puts.reserve(holder, namespace, table.part, self._tickets, fresh)
        except (PoolFull, LimitExceeded, InvalidRequest):
            return None  # no room, or the epoch has just ended
        reservation = holder.reservations.get(self._tickets)
        if reservation is None:
            return None  # they have arrived meanwhile
        position = {key: at for at, key in enumerate(reservation.keys)}
        batch = Batch(table, owner, number, holder, self._tickets, reservation, position)
        self._batches.setdefault(table, {}).update(dict.fromkeys(position, batch))
        batch.told = nbytes
        batch.span = current()
        self._begin(batch)
        return batch

    def drop(self, batch: Batch) -> None:
        """No more of it is wanted. Transfers that have taken over some of it continue."""
        batch.over = True
        self._forget(batch, batch.position)
        self._wait_no_more(batch)
        if not batch.transfers:
            _cancel(batch.pull)
        self._settle(batch)

    def close(self) -> None:
        """Cancel all pulls. They end on their own, soon."""
        self._waiting.clear()
        for pulling in self._pulling.values():
            for batch in pulling:
                _cancel(batch.pull)

    # ---- for transfers -----------------------------------------------------------------------------------

    def take(self, table: PartTable, keys: Sequence[bytes]) -> dict[Batch, list[bytes]]:
        """The parts of these that have arrived or are arriving. Their slots are the caller's until `landed`, once
        per batch.

        A batch without any bytes is discarded.
        """
        known = self._batches.get(table)
        if not known:
            return {}
        taken: dict[Batch, list[bytes]] = {}
        for key in keys:
            if key in known:
                taken.setdefault(known[key], []).append(key)
        for batch, some in list(taken.items()):
            if not batch.have and (batch.pull is None or not batch.begun):
                self.drop(batch)
                del taken[batch]
                continue
            batch.transfers += 1
            batch.taken = True
            self._wait_no_more(batch)
            self._forget(batch, some)
        return taken

    async def rest(self, batch: Batch, owner: bytes) -> None:
        """Only the transfer that has taken it over may pull into its slots from now on.

        owner: the node that has committed these blocks. A pull from another one is not awaited.
        """
        if batch.owner != owner:
            _cancel(batch.pull)
        while batch.pull is not None:
            ended, _ = await asyncio.wait([batch.pull], timeout=REST_S)
            if not ended:
                _cancel(batch.pull)

    def landed(self, batch: Batch, *, wrong: int) -> None:
        """A transfer has finished with these slots. wrong: blocks whose beginning was different."""
        batch.transfers -= 1
        self.stats.early_wrong += wrong
        if wrong:
            batch.over = True
            self._forget(batch, batch.position)
        self._settle(batch)

    # ---- inside --------------------------------------------------------------------------------------------

    def _forget(self, batch: Batch, keys: Iterable[bytes]) -> None:
        """These can no longer be taken over."""
        known = self._batches.get(batch.table, {})
        for key in keys:
            if known.get(key) is batch:
                del known[key]
        if not known:
            self._batches.pop(batch.table, None)

    def _settle(self, batch: Batch) -> None:
        """Free unneeded slots, once nothing writes to them."""
        if batch.pull is None and not batch.transfers and (batch.over or not self._takeable(batch)):
            batch.over = True
            self._node.puts.abort(batch.holder, batch.ticket)

    def _takeable(self, batch: Batch) -> bool:
        known = self._batches.get(batch.table, {})
        return any(known.get(key) is batch for key in batch.position)

    def _begin(self, batch: Batch) -> None:
        """Pull the written bytes, unless there are few, or too much is under way already."""
        more = (batch.told - batch.have) * len(batch.position)
        if batch.over or batch.taken or batch.pull is not None or more < PULL_BYTES:
            return
        if len(self._pulling.get(batch.owner, ())) >= PULLS_MAX:
            self._waiting.setdefault(batch.owner, {})[batch] = None
            return
        other = self._cluster.living.get(batch.owner)
        if other is None:
            return
        self._pulling.setdefault(batch.owner, {})[batch] = None
        batch.begun = False
        batch.pull = asyncio.get_running_loop().create_task(self._bring(batch, other.url))
        batch.pull.add_done_callback(lambda task: self._ended(batch, task))

    def _ended(self, batch: Batch, task: asyncio.Task[None]) -> None:
        owner = batch.owner
        del self._pulling[owner][batch]
        if not self._pulling[owner]:
            del self._pulling[owner]
        batch.pull = None
        self._settle(batch)
        crash_if_failed(task)
        while owner in self._waiting and len(self._pulling.get(owner, ())) < PULLS_MAX:
            following = next(iter(self._waiting[owner]))
            self._wait_no_more(following)
            self._begin(following)
        self._begin(batch)  # after those that waited for it

    def _wait_no_more(self, batch: Batch) -> None:
        waiting = self._waiting.get(batch.owner)
        if waiting is not None:
            waiting.pop(batch, None)
            if not waiting:
                del self._waiting[batch.owner]

    async def _bring(self, batch: Batch, url: str) -> None:
        """Pull the bytes written so far, or as many as allowed. After a failure, only once more is written."""
        try:
            async with self._turns.turn(batch.owner, PULL_S):
                batch.begun = True
                await self._bring_now(batch, url)
        except LimitExceeded:
            batch.told = batch.have  # it was not its turn: begun again when more is written

    async def _bring_now(self, batch: Batch, url: str) -> None:
        table, reservation, peers = batch.table, batch.reservation, self._peers
        start, told = batch.have, batch.told
        stop = min(told, start + max(1, EARLY_BYTES // len(reservation.keys)))
        nbytes = (stop - start) * len(reservation.keys)
        batch.told = start
        self.stats.early_pulls += 1
        peers.started(batch.owner, nbytes, self._clock())
        span = None if batch.span is None else batch.span.child(TRANSFER)
        try:
            # This returns, raises or is cancelled only when nothing writes to the rows any more.
            order = pull_order(
                table,
                url,
                reservation.keys,
                reservation.rows,
                PULL_S + peers.hedge_after_s(batch.owner, nbytes),
                start=start,
                stop=stop,
                trace="" if span is None else span.traceparent,
            )
            if span is None:
                pulled = await self._transport.pull(order)
            else:
                span.set(
                    node=node_name(self._cluster, batch.owner),
                    part=table.part,
                    blocks_asked=len(reservation.keys),
                    early=1,
                )
                with working_for(span):
                    pulled = await self._transport.pull(order)
        except LimitExceeded as error:
            _end(span, str(error))
            peers.stopped(batch.owner, nbytes)
            return
        except KvpoolError as error:
            _end(span, str(error))
            peers.failed(batch.owner, self._clock(), error=str(error), asked=nbytes)
            return
        except asyncio.CancelledError:
            _end(span, CALLED_OFF)
            peers.stopped(batch.owner, nbytes)
            raise
        came = (stop - start) * pulled.status.count(BlockStatus.PRESENT)
        if span is not None:
            span.end(pulled.error, bytes=came)
        self.stats.early_bytes += came
        self._node.counters.pulled_bytes += came
        now = self._clock()
        if pulled.error:
            peers.failed(batch.owner, now, error=pulled.error, asked=nbytes)
            return
        peers.finished(batch.owner, came, pulled.seconds, now, asked=nbytes)
        if came == nbytes:
            batch.have = stop
            batch.told = max(batch.told, told)


def _end(span: Span | None, error: str) -> None:
    if span is not None:
        span.end(error)


def _cancel(task: asyncio.Task[None] | None) -> None:
    """Once: ending it may take a while."""
    if task is not None and not task.done() and not task.cancelling():
        task.cancel()

"""Transfers under way: each reserves slots, has one source fill them, commits the arrived blocks, and updates
estimates.

A transfer is a task of its own: it outlives its first requester, for others that wait for the same blocks. It
waits for its turn at its source (`kvpool.daemon.workers.turns`) before it takes any slots. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass

from kvpool.daemon.core.blocks import OWN, Holder, Origin, PartTable
from kvpool.daemon.core.node import Node
from kvpool.daemon.fetch.filling import Filling
from kvpool.daemon.fetch.ports import NOT_NODES, OBJECT, PEER, TIER_OF, ClusterView
from kvpool.daemon.fetch.pull_leases import PullLeases
from kvpool.daemon.fetch.tombstones import Tombstones
from kvpool.daemon.fetch.transfer import Line, Transfer
from kvpool.daemon.workers.turns import COPIES, Turn, TurnLimits, Turns
from kvpool.errors import InvalidRequest, LimitExceeded, PoolFull
from kvpool.placement.peers import Peers
from kvpool.tasks import crash_if_failed
from kvpool.telemetry.cluster_stats import FetchStats

TRANSFER_S = (
    1.0  # the minimum time allowed for a transfer, whoever still waits: others will want it
)
LOADS_MAX = 8  # at a time from one disk, or from object storage: their workers have so many threads
WAITING_MAX = 4096  # transfers that wait for their turn at one source


@dataclass(eq=False)
class Transfers:
    """All transfers of a node. pulls: whose turn it is at peers. local: the sources on this node."""

    _node: Node
    _cluster: ClusterView
    _filling: Filling
    _leases: PullLeases
    _peers: Peers
    _clock: Callable[[], float]
    stats: FetchStats
    pulls: InitVar[Turns]
    local: InitVar[Iterable[bytes]]

    def __post_init__(self, pulls: Turns, local: Iterable[bytes]) -> None:
        self._of_keys: dict[PartTable, dict[bytes, tuple[Transfer, ...]]] = {}
        self._under_way: dict[Transfer, None] = {}
        self._tickets = 0
        self._pulls, self._copies = pulls, Turns(COPIES)
        self._loads = {
            source: Turns(TurnLimits(4 * LOADS_MAX, LOADS_MAX)) for source in (*local, OBJECT)
        }
        self._lines: dict[tuple[bytes, bool], Line] = {}
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
            loop.call_soon(loop.call_soon, self._leases.let_go, tenant, transfer.kept)
        crash_if_failed(task)

    # ---- one of them ---------------------------------------------------------------------------------

    async def _run(self, transfer: Transfer, url: str, seconds: float, origin: Origin) -> None:
        """Reserve, fill, commit the arrived blocks."""
        holder = self._leases.holder(transfer.namespace.tenant.name)
        pulled = None
        try:
            if not transfer.reserved:  # else it is what another one goes on without
                self._reserve_all(transfer, holder)
                if transfer.reserved and transfer.no_room:
                    self._go_on_without(transfer, url, seconds, origin)
            if transfer.reserved:
                pulled = await self._filling.fill(transfer, holder, url, seconds, origin)
        finally:
            self._free(transfer)
        if pulled is not None:
            self._filling.learn(transfer, pulled)

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
        holder = self._leases.holder(transfer.namespace.tenant.name)
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

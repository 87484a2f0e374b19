"""Delivers requested blocks: joins transfers under way, hedges slow ones, tries the next source.

A source that takes longer than expected is hedged: the next replica's owner is asked as well, the first to
deliver wins, and the other transfer is cancelled. Blocks that a source lacks are requested from the next one.
Blocks for which there was no slot are requested again when there may be one. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

from kvpool.daemon.core.blocks import NamespaceState, Origin, PartTable
from kvpool.daemon.core.node import Node
from kvpool.daemon.fetch.locate import Locator
from kvpool.daemon.fetch.plan import FetchRequest, assign, lacking, orders
from kvpool.daemon.fetch.ports import NOT_NODES
from kvpool.daemon.fetch.room_queue import RoomQueues, RoomWaiter
from kvpool.daemon.fetch.transfer import Transfer
from kvpool.daemon.fetch.transfers import Transfers
from kvpool.placement.peer_selection import Candidate
from kvpool.placement.peers import Peers

HEDGES_MAX = 2  # transfers of one block at a time
ROOM_S = 0.05  # between looks whether one more may wait for a source

SECONDARY = Origin(secondary=True)


class Place(NamedTuple):
    """Of one who may have to wait for slots. Made by `Delivery.queued` only. called: when it may try, or yields."""

    waiter: RoomWaiter
    called: asyncio.Event


@dataclass(eq=False)
class Delivery:
    """Brings requested blocks here by transfers. Blocks from a peer are secondary: evicted first."""

    _node: Node
    _locator: Locator
    _transfers: Transfers
    _peers: Peers
    _clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._stats = self._transfers.stats
        self.rooms = RoomQueues()

    async def bring(
        self,
        requests: Sequence[FetchRequest],
        deadline: float,
        origin: Origin = SECONDARY,
        *,
        on_arrival: Callable[[Mapping[PartTable, list[bytes]]], object] | None = None,
        background: bool = False,
        only_spare: bool = False,
    ) -> Sequence[FetchRequest]:
        """Until all blocks are here, no source is left, or the deadline has passed; returns the missing ones.

        on_arrival: called with blocks that have arrived while others are awaited. background: no engine waits. Nor
        does such a request wait for slots, if memory is full. only_spare: in the background, it takes no ordinary
        block's place.
        """
        if background or not requests:
            return await self.bring_on(
                None, requests, deadline, origin, on_arrival, only_spare=only_spare
            )
        with self.queued(requests[0].table.namespace) as place:
            while True:
                requests = await self.bring_on(place, requests, deadline, origin, on_arrival)
                if not place.waiter.yields:
                    return requests
                self.rooms.yielded(place.waiter)  # it holds nothing

    @contextmanager
    def queued(self, namespace: NamespaceState) -> Iterator[Place]:
        """A place among those who may have to wait for slots, for `turn` and `bring_on`."""
        called = asyncio.Event()
        waiter = self.rooms.enter(namespace, self._clock(), called.set)
        try:
            yield Place(waiter, called)
        finally:
            self.rooms.leave(waiter)

    async def turn(self, place: Place, deadline: float) -> bool:
        """Wait until slots may be requested for a place; False: the deadline has passed."""
        while (now := self._clock()) < deadline:
            if self.rooms.may_try(place.waiter, now):
                return True
            await self._wait(place, (), deadline, now)
        return False

    async def bring_on(
        self,
        place: Place | None,
        requests: Sequence[FetchRequest],
        deadline: float,
        origin: Origin = SECONDARY,
        on_arrival: Callable[[Mapping[PartTable, list[bytes]]], object] | None = None,
        *,
        only_spare: bool = False,
    ) -> Sequence[FetchRequest]:
        """As `bring`. It also ends when its place `yields`: then release what you hold, and say `rooms.yielded`.

        place: None: in the background, where `only_spare` may be asked for.
        """
        for request in requests:
            under_way = self._transfers.of(request.table)
            if under_way:
                self._stats.joined += sum(map(under_way.__contains__, request.keys))
        while True:
            self._node.settle()
            arrived, requests = _arrivals(requests)
            now = self._clock()
            if not requests or now >= deadline or (place is not None and place.waiter.yields):
                return requests
            if on_arrival is not None and arrived:
                on_arrival(arrived)
            full = False
            if place is None or self.rooms.may_try(place.waiter, now):
                requests, full = self._launch(
                    requests, now, deadline, origin, place is None, only_spare
                )
            transfers = self._awaited(requests)
            if not (transfers or full or (place is not None and place.waiter.waits)):
                return requests
            wake = min([deadline, *(one.hedge_at for one in transfers if one.hedge_at > now)])
            if full:
                wake = min(wake, now + ROOM_S)
            await self._wait(place, [transfer.task for transfer in transfers], wake, now)
            self._transfers.call_off_superseded(transfers)
            if place is not None and (arrived or self._any_comes(transfers)):
                self.rooms.progressed(place.waiter, self._clock())
            for transfer in transfers:
                if transfer.task.done():
                    self._ended(place, requests, transfer)
            has_slots = all(one.begun and not one.no_room for one in transfers)
            if place is not None and place.waiter.tries and has_slots:
                self.rooms.served(place.waiter)

    async def _wait(
        self,
        place: Place | None,
        tasks: Sequence[asyncio.Task[None]],
        until: float,
        now: float,
    ) -> None:
        """Until one of the tasks is done, or the place is woken or due."""
        called: list[asyncio.Task[Any]] = []
        if place is not None and place.waiter.waits:
            place.called.clear()
            called.append(asyncio.get_running_loop().create_task(place.called.wait()))
            due = self.rooms.due(place.waiter, now)
            until = until if due is None else min(until, due)
        try:
            if tasks or called:
                await asyncio.wait(
                    [*tasks, *called],
                    timeout=max(0.0, until - now),
                    return_when=asyncio.FIRST_COMPLETED,
                )
            else:
                await asyncio.sleep(until - now)
        finally:
            for task in called:
                task.cancel()

    def _any_comes(self, transfers: Iterable[Transfer]) -> bool:
        """Whether one of these has slots and is not late."""
        now = self._clock()
        return any(one.begun and not one.task.done() and one.hedge_at > now for one in transfers)

    def _ended(
        self, place: Place | None, requests: Sequence[FetchRequest], transfer: Transfer
    ) -> None:
        """What was not asked of a transfer's source is not tried."""
        if not transfer.begun:
            _not_tried(requests, transfer, transfer.blocks)
        elif transfer.called_off:
            # It may have brought other blocks too, which nobody else has.
            _not_tried(list(filter(self._is_hopeless, requests)), transfer, transfer.blocks)
            if place is not None:
                self.rooms.retry(place.waiter)
        elif transfer.no_room and place is not None:
            self._transfers.make_room(transfer)
            if self.rooms.refused(place.waiter, self._clock()):
                _not_tried(requests, transfer, transfer.no_room)

    def _is_hopeless(self, request: FetchRequest) -> bool:
        """Whether all sources of a request were tried."""
        return not any(
            candidate.incarnation not in request.tried
            and self._locator.lives(candidate.incarnation)
            for candidate in request.candidates
        )

    def _awaited(self, requests: Sequence[FetchRequest]) -> dict[Transfer, None]:
        """The transfers that bring some of these blocks."""
        return dict.fromkeys(
            transfer
            for request in requests
            if (under_way := self._transfers.of(request.table))
            for some in dict.fromkeys(map(under_way.get, request.keys))
            if some is not None
            for transfer in some
        )

    def _launch(
        self,
        requests: Sequence[FetchRequest],
        now: float,
        deadline: float,
        origin: Origin,
        background: bool,
        only_spare: bool,
    ) -> tuple[list[FetchRequest], bool]:
        """Start a transfer for blocks that have none, or only slow ones.

        Returns the same requests, split by the sources asked; and whether too many wait for a source that some
        of them should be asked of: then it is not tried, and may be later.
        """
        waiting: list[FetchRequest] = []
        full = False
        ready: dict[PartTable, list[tuple[FetchRequest, Sequence[Candidate]]]] = {}
        for request in requests:
            for some, transfers in self._by_transfers(request):
                found_askable = self._askable(some, transfers, now, background)
                askable = [
                    candidate
                    for candidate in found_askable
                    if self._transfers.has_room(candidate.incarnation, background=background)
                ]
                full = full or len(askable) < len(found_askable)
                if askable:
                    ready.setdefault(request.table, []).append((some, askable))
                else:
                    waiting.append(some)
        of_source: dict[bytes, list[tuple[PartTable, list[bytes]]]] = {}
        assigned: list[tuple[bytes, int]] = []
        for table, found in ready.items():
            shares, cut = assign(table, found, self._locator.having, self._peers, now)
            for source, keys in shares:
                of_source.setdefault(source, []).append((table, keys))
                # For the next part's assignment: this source has that much more ahead.
                assigned.append((source, len(keys) * table.spec.nbytes))
                self._peers.queued(*assigned[-1])
            waiting += cut
        for source, nbytes in assigned:
            self._peers.unqueued(source, nbytes)
        for source, wanted in of_source.items():
            for blocks in orders(wanted, apart=source in NOT_NODES):
                self._transfers.begin(
                    *(blocks, source, deadline, origin),
                    background=background,
                    only_spare=only_spare,
                )
        return waiting, full

    def _by_transfers(
        self, request: FetchRequest
    ) -> list[tuple[FetchRequest, tuple[Transfer, ...]]]:
        """Split a request into runs of blocks that the same transfers bring, with these transfers."""
        under_way = self._transfers.of(request.table)
        if not under_way or under_way.keys().isdisjoint(request.keys):
            return [(request, ())]
        return [
            (replace(request, keys=list(keys)), transfers)
            for transfers, keys in groupby(request.keys, lambda key: under_way.get(key, ()))
        ]

    def _askable(
        self,
        request: FetchRequest,
        transfers: Sequence[Transfer],
        now: float,
        background: bool,
    ) -> Sequence[Candidate]:
        """The sources that may be asked for these blocks now, beside the transfers that bring them."""
        # A background transfer has the lowest priority: it is not worth waiting for.
        ahead = [one for one in transfers if background or not one.background]
        if any(one.hedge_at > now for one in ahead):
            return ()
        for transfer in ahead:
            # What a transfer waits for its turn is not its source's fault.
            if transfer.begun and not transfer.late:
                transfer.late = True
                self._peers.slow(transfer.source, now)
        asked = request.tried.union(transfer.source for transfer in ahead)
        askable = [
            candidate
            for candidate in request.candidates
            if candidate.incarnation not in asked and self._locator.lives(candidate.incarnation)
        ]
        # A disk that hangs does not say that it has given up.
        under_way = [
            one
            for one in transfers
            if one.begun and not (one.task.cancelling() and one.source in NOT_NODES)
        ]
        if len(under_way) >= HEDGES_MAX:
            if askable and len(ahead) == len(transfers):
                self._transfers.give_up(under_way)
            return ()
        return askable


def _not_tried(
    requests: Sequence[FetchRequest],
    transfer: Transfer,
    blocks: Mapping[PartTable, Sequence[bytes]],
) -> None:
    """A transfer that was withdrawn, or did not get its turn or a slot, has not tried its source."""
    for request in requests:
        asked = request.table in blocks and transfer.source in request.tried
        if asked and not set(blocks[request.table]).isdisjoint(request.keys):
            request.tried -= {transfer.source}


def _arrivals(
    requests: Sequence[FetchRequest],
) -> tuple[dict[PartTable, list[bytes]], list[FetchRequest]]:
    """The arrived blocks of requests, by table, and the missing ones."""
    arrived: dict[PartTable, list[bytes]] = {}
    left: list[FetchRequest] = []
    for request in requests:
        here = request.table.blocks
        if not here.isdisjoint(request.keys):
            came = arrived.setdefault(request.table, [])
            came += filter(here.__contains__, request.keys)
            request.keys = lacking(here, request.keys)
        if request.keys and not request.table.namespace.retired:
            left.append(request)
    return arrived, left

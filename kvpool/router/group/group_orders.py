"""Orders from whoever schedules: the own scheduler, or that of another router, the leader.

Requests stay with the scheduler that accepted them. If its router is lost or retires, they go on with the next one:
their open orders count there as they are, and nothing is computed again.

One event loop, one thread.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Protocol

from kvpool.errors import ProtocolError
from kvpool.router.group.messages import (
    Abandoned,
    Accepted,
    Answered,
    Computed,
    DecodeOrdered,
    Failed,
    Gone,
    Message,
    Ordered,
    Over,
    Refused,
    RequestRow,
    SavesRow,
    Submit,
)
from kvpool.router.group.progress import Progress, go_on
from kvpool.router.group.rows import EngineOf, decode_estimate_of, order_of, request_row
from kvpool.router.orders import EngineGone, Expired, Forgotten, Orders, Recipient
from kvpool.router.records.observations import Measured
from kvpool.scheduler.values import CODES, DecodeOrder, Order, Rejection, Request


class Leader(Protocol):
    """A router that schedules for this one. alive: messages still reach it."""

    @property
    def ident(self) -> str: ...
    @property
    def alive(self) -> bool: ...
    def send(self, message: Message) -> None: ...


@dataclass(slots=True, eq=False)
class _Entry:
    """A request at a leader. accepted: its answer."""

    recipient: Recipient
    leader: Leader
    accepted: asyncio.Future[Rejection | None]
    progress: Progress = field(default_factory=Progress)


class GroupOrders:
    """See the module, and `orders.Ordering`. local: of the own scheduler. engine_of: known engines, and others."""

    def __init__(self, local: Orders, engine_of: EngineOf, clock: Callable[[], float]) -> None:
        self._local = local
        self._engine_of = engine_of
        self._clock = clock
        self._leader: Leader | None = None
        self._entries: dict[Hashable, _Entry] = {}

    @property
    def leader(self) -> Leader | None:
        """None: this router schedules itself."""
        return self._leader

    def follow(self, leader: Leader | None, *, leaving: Leader | None = None) -> None:
        """New requests go there from now on, and those of a leader that is lost, or is leaving."""
        self._leader = leader
        for entry in list(self._entries.values()):
            old = entry.leader
            if old is leader or (old.alive and old is not leaving):
                continue
            if old.alive:
                old.send(Abandoned(_number(entry.recipient.request)))
            self._move(entry)

    def _move(self, entry: _Entry) -> None:
        leader, recipient = self._leader, entry.recipient
        if leader is not None:
            entry.leader = leader
            begun = entry.progress.row() if entry.accepted.done() else None
            leader.send(Submit(self._row(recipient), begun))
            return
        del self._entries[recipient.request.ident]
        if not entry.accepted.done():
            entry.accepted.set_result(self._local.accept(recipient))
            return
        go_on(self._local, recipient, entry.progress)

    def _row(self, recipient: Recipient) -> RequestRow:
        return request_row(recipient.request, recipient.model, self._clock())

    # ---- for requests ------------------------------------------------------------------------------

    async def submit(self, recipient: Recipient) -> Rejection | None:
        leader = self._leader
        if leader is None:
            return await self._local.submit(recipient)
        loop = asyncio.get_running_loop()
        accepted: asyncio.Future[Rejection | None] = loop.create_future()
        entry = _Entry(recipient, leader, accepted)
        self._entries[recipient.request.ident] = entry
        leader.send(Submit(self._row(recipient)))
        async with asyncio.timeout(recipient.request.deadline_s - self._clock()):
            return await accepted

    def remove(self, request: Request) -> None:
        entry = self._entries.pop(request.ident, None)
        if entry is None:
            self._local.remove(request)
        else:
            entry.leader.send(Abandoned(_number(request)))

    def computed(self, order: Order, measured: Measured | None = None) -> None:
        entry = self._entries.get(order.request.ident)
        if entry is None:
            self._local.computed(order, measured)
            return
        entry.progress.computed(order)
        name = order.estimate.engine.name
        number = _number(order.request)
        if measured is None:
            entry.leader.send(Computed(number, name, False, None, False, None, order.number))
        else:
            said = measured.cached_tokens, measured.timed
            saves = None if measured.saves is None else SavesRow(*measured.saves)
            entry.leader.send(Computed(number, name, True, *said, saves, order.number))

    def failed(self, order: Order, *, elsewhere: bool = False) -> None:
        entry = self._entries.get(order.request.ident)
        if entry is None:
            self._local.failed(order, elsewhere=elsewhere)
            return
        name = order.estimate.engine.name
        entry.progress.failed(name)
        entry.leader.send(Failed(_number(order.request), name, False, elsewhere, order.number))

    def decode_failed(self, request: Request, engine: str, *, elsewhere: bool = False) -> None:
        entry = self._entries.get(request.ident)
        if entry is None:
            self._local.decode_failed(request, engine, elsewhere=elsewhere)
            return
        entry.progress.decode_failed(request, engine)
        entry.leader.send(Failed(_number(request), engine, True, elsewhere))

    def answered(self, engine: str, tokens: int, took_s: float) -> None:
        if self._leader is None:
            self._local.answered(engine, tokens, took_s)
        else:
            self._leader.send(Answered(engine, tokens, took_s))

    def abandoned(self, request: Request) -> None:
        if request.ident in self._entries:
            self.remove(request)
        else:
            self._local.abandoned(request)

    # ---- from a leader -----------------------------------------------------------------------------

    def heard(self, leader: Leader, message: Message) -> None:
        """Of requests that are unknown, or with another leader by now, nothing more is heard.

        Raises `ProtocolError`.
        """
        if not isinstance(message, Accepted | Refused | Ordered | DecodeOrdered | Gone | Over):
            raise ProtocolError(f"a leader says {type(message).__name__}")
        entry = self._entries.get(message.ident)
        if entry is None or entry.leader is not leader:
            return
        recipient = entry.recipient
        match message:
            case Accepted():
                if not entry.accepted.done():
                    entry.accepted.set_result(None)
            case Refused():
                del self._entries[message.ident]
                if not entry.accepted.done():
                    entry.accepted.set_result(_rejection(recipient.request, message))
            case Ordered():
                order = order_of(message.order, recipient.request, self._engine_of)
                entry.progress.ordered(order)
                recipient.tell(order)
            case DecodeOrdered():
                decoding = self._decoding(message, recipient.request)
                entry.progress.decode_ordered(decoding)
                recipient.tell(decoding)
            case Gone():
                recipient.settle()
                entry.progress.gone(message.engine)
                recipient.tell(EngineGone(message.engine, message.again))
            case Over():
                recipient.tell(Expired() if message.expired else Forgotten())

    def _decoding(self, message: DecodeOrdered, request: Request) -> DecodeOrder:
        engine_of = self._engine_of
        return DecodeOrder(
            request,
            engine_of(message.engine),
            engine_of(message.computed_by),
            decode_estimate_of(message.estimate, engine_of),
            [decode_estimate_of(each, engine_of) for each in message.decoders],
            message.wait_s,
        )


def _number(request: Request) -> int:
    assert isinstance(request.ident, int), "requests of this router are numbered"
    return request.ident


def _rejection(request: Request, refused: Refused) -> Rejection:
    if refused.code not in CODES:
        raise ProtocolError(f"a request is refused for {refused.code!r:.100}")
    wait_s = math.inf if refused.retry_after_s is None else refused.retry_after_s
    return Rejection(request, refused.reason, wait_s, refused.code)

"""Schedules for one other router: its requests get orders from the own scheduler.

One event loop, one thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvpool.errors import ProtocolError
from kvpool.router.group.messages import (
    Abandoned,
    Accepted,
    Answered,
    Blamed,
    Computed,
    DecodeOrdered,
    Failed,
    Gone,
    Message,
    Ordered,
    Over,
    Prefixes,
    Reaches,
    Refused,
    Served,
    Submit,
)
from kvpool.router.group.progress import go_on, progress_of
from kvpool.router.group.rows import Among, EngineOf, decode_row, order_row, request_of, unpacked
from kvpool.router.orders import EngineGone, Expired, Forgotten, News, Orders
from kvpool.router.records.observations import Measured
from kvpool.scheduler.values import DecodeOrder, Order, Rejection, Request, Saves

REQUESTS_MAX = 1 << 16
Send = Callable[[Message], None]
Told = Callable[[bytes, list[int], Mapping[str, tuple[int, ...]]], None]


@dataclass(slots=True)
class Books:
    """What leading needs of this router. among: engines that serve a model. engine_of: known ones, and others. told: of
    the pool's prefixes. blame: a request of this digest has failed by an engine's fault; praise: it has served one.
    """

    orders: Orders
    among: Among
    engine_of: EngineOf
    told: Told
    blame: Callable[[str, int], None]
    praise: Callable[[str], None]
    clock: Callable[[], float]


@dataclass(slots=True, eq=False)
class _RemoteRequest:
    """A request of the other router: a `Recipient`. open: its orders, each with when it was given."""

    request: Request
    model: str
    number: int
    send: Send
    clock: Callable[[], float]
    ordered: bool = False
    open: list[tuple[Order, float]] = field(default_factory=list)

    def tell(self, news: News) -> None:
        number, send = self.number, self.send
        match news:
            case Order():
                self.open.append((news, self.clock()))
                send(Ordered(number, order_row(news)))
            case DecodeOrder():
                send(
                    DecodeOrdered(
                        number,
                        news.engine.name,
                        news.computed_by.name,
                        decode_row(news.estimate),
                        [decode_row(each) for each in news.decoders],
                        news.wait_s,
                    )
                )
            case EngineGone():
                self.void(news.engine)
                send(Gone(number, news.engine, news.again))
            case Expired():
                send(Over(number, True))
            case Forgotten():
                send(Over(number, False))

    def settle(self) -> None:
        """What has begun elsewhere is reported by its router."""

    def find(self, engine: str, number: int) -> tuple[Order, float] | None:
        """The open order there with this number."""

        def is_meant(order: Order) -> bool:
            return order.number == number and order.estimate.engine.name == engine

        return next((each for each in self.open if is_meant(each[0])), None)

    def void(self, engine: str) -> None:
        self.open = [each for each in self.open if each[0].estimate.engine.name != engine]


class LedRouter:
    """For one follower, until `close`."""

    def __init__(self, ident: str, books: Books, send: Send) -> None:
        self._ident = ident
        self._books = books
        self._send = send
        self._requests: dict[int, _RemoteRequest] = {}
        self._reached: frozenset[str] | None = None  # engines; None: it has not said
        self._closed = False

    def close(self) -> None:
        """It is lost, and its requests with it: they go on elsewhere, or nobody waits for them."""
        self._closed = True
        for remote in self._requests.values():
            self._books.orders.remove(remote.request)
        self._requests.clear()

    def heard(self, message: Message) -> None:
        """Nothing more is heard after `close`. Raises `ProtocolError`."""
        if self._closed:
            return
        match message:
            case Prefixes():
                self._books.told(message.namespace, unpacked(message.keys), message.lengths)
            case Submit():
                self._submit(message)
            case Computed():
                self._computed(message)
            case Failed():
                self._failed(message)
            case Answered():
                self._books.orders.answered(message.engine, message.tokens, message.took_s)
            case Served():
                self._books.praise(message.engine)
            case Blamed():
                self._books.blame(message.engine, message.request)
            case Reaches():
                self._reached = frozenset(message.engines)
            case Abandoned():
                if (remote := self._requests.pop(message.ident, None)) is not None:
                    self._books.orders.remove(remote.request)
            case _:
                raise ProtocolError(f"a follower says {type(message).__name__}")

    def _submit(self, message: Submit) -> None:
        books, row = self._books, message.request
        number, now = row.ident, books.clock()
        if number in self._requests or len(self._requests) >= REQUESTS_MAX:
            raise ProtocolError(f"request {number} is one too many")
        request = request_of(row, (self._ident, number), self._among, now)
        remote = _RemoteRequest(request, row.model, number, self._send, books.clock)
        if message.begun is None:
            rejection = books.orders.accept(remote)
            if rejection is not None:
                self._send(_refused(number, rejection))
                return
            self._send(Accepted(number))
        else:
            progress = progress_of(message.begun, request, books.engine_of)
            # Nobody here knows since when: they teach nothing.
            remote.open = [(order, math.nan) for order in progress.orders]
            go_on(books.orders, remote, progress)
        self._requests[number] = remote

    def _among(self, model: str) -> tuple[frozenset[str], frozenset[str] | None]:
        """Engines that serve it, of those that the other router reaches."""
        kinds, names = self._books.among(model)
        known = self._books.orders.engines.keys()
        if self._reached is None or known <= self._reached:
            return kinds, names
        return kinds, frozenset(known if names is None else names) & self._reached

    def _computed(self, message: Computed) -> None:
        remote = self._requests.get(message.ident)
        found = None if remote is None else remote.find(message.engine, message.order)
        if remote is None or found is None:
            return  # taken back meanwhile
        remote.open.remove(found)
        order, given_at = found
        measured = None
        if message.measured and not math.isnan(given_at):
            row = message.saves
            saves = None if row is None else Saves(row.stored, row.saving, row.saving_s)
            measured = Measured(given_at, message.cached_tokens, message.timed, saves)
        self._books.orders.computed(order, measured)

    def _failed(self, message: Failed) -> None:
        remote = self._requests.get(message.ident)
        if remote is None:
            return
        if message.decodes:
            remote.void(message.engine)
            self._books.orders.decode_failed(
                remote.request, message.engine, elsewhere=message.elsewhere
            )
        elif (found := remote.find(message.engine, message.order)) is not None:
            remote.void(message.engine)
            self._books.orders.failed(found[0], elsewhere=message.elsewhere)


def _refused(number: int, rejection: Rejection) -> Refused:
    wait_s = rejection.retry_after_s
    known_s = max(0.0, wait_s) if math.isfinite(wait_s) else None
    return Refused(number, rejection.reason, rejection.code, known_s)

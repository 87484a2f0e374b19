"""How far a request has come with one scheduler, so that another one can go on with it. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvpool.router.group.messages import BegunRow
from kvpool.router.group.rows import EngineOf, order_of, order_row
from kvpool.router.orders import EngineGone, Orders, Recipient
from kvpool.scheduler.values import Begun, DecodeOrder, Engine, Order, Request


@dataclass(slots=True)
class Progress:
    """orders: open ones, as they were given. Engines are named. See `Begun`."""

    orders: list[Order] = field(default_factory=list)
    done: int = 0
    computed_by: str | None = None
    decode: str | None = None
    follows: bool = False
    failures: int = 0
    avoid: set[str] = field(default_factory=set)

    def ordered(self, order: Order) -> None:
        self.orders.append(order)
        if order.decode is not None and (order.whole or order.follow):
            self.decode, self.follows = order.decode.name, order.follow

    def decode_ordered(self, order: DecodeOrder) -> None:
        self.decode = order.engine.name

    def computed(self, order: Order) -> None:
        """It was carried out, or is no longer needed."""
        left = [other for other in self.orders if other is not order]
        if len(left) == len(self.orders):
            return  # its engine had gone
        self.orders = left
        self.done = order.end
        if order.last:
            self.computed_by, self.follows = order.estimate.engine.name, False

    def failed(self, engine: str) -> None:
        """Its orders there are void."""
        self._void(engine)
        self.failures += 1
        self.avoid.add(engine)

    def decode_failed(self, request: Request, engine: str) -> None:
        """It was sent there for its answer, in vain."""
        if any(order.whole for order in self.orders):
            self.failed(engine)
            return
        self._not_sent()
        self.failures += 1
        self.avoid.add(engine)
        if request.whole:
            self.computed_by, self.done = None, 0

    def gone(self, engine: str) -> None:
        """The engine gets no more requests, whoever is to blame."""
        if any(order.estimate.engine.name == engine for order in self.orders):
            self.failed(engine)
        if self.decode == engine:
            self._not_sent()

    def _void(self, engine: str) -> None:
        void = [order for order in self.orders if order.estimate.engine.name == engine]
        self.orders = [order for order in self.orders if order.estimate.engine.name != engine]
        if any(order.whole for order in void):
            self._not_sent()

    def _not_sent(self) -> None:
        self.decode, self.follows = None, False

    # ---- handing over ------------------------------------------------------------------------------

    def begun(self, engines: Mapping[str, Engine]) -> tuple[Begun, list[str]]:
        """In the engines of the scheduler that goes on with it; and those on which it counted, and that are unknown
        there.
        """
        used = [order.estimate.engine.name for order in self.orders]
        if self.decode is not None:
            used.append(self.decode)
        lost = [name for name in dict.fromkeys(used) if name not in engines]
        for name in lost:
            self.gone(name)
        decode = None if self.decode is None else engines[self.decode]
        # Its blocks are where they are; that engine is named in estimates only.
        by = None if self.computed_by is None else engines.get(self.computed_by, decode)
        orders = [
            replace(
                order,
                estimate=order.estimate._replace(engine=engines[order.estimate.engine.name]),
                decode=decode,
            )
            for order in self.orders
        ]
        done = 0 if by is None and self.computed_by is not None else self.done
        return Begun(
            orders, done, by, decode, self.follows, self.failures, frozenset(self.avoid)
        ), lost

    def row(self) -> BegunRow:
        return BegunRow(
            [order_row(replace(order, candidates=(), decoders=())) for order in self.orders],
            self.done,
            self.computed_by,
            self.decode,
            self.follows,
            self.failures,
            sorted(self.avoid),
        )


def go_on(orders: Orders, recipient: Recipient, progress: Progress) -> None:
    """The own scheduler takes over."""
    begun, lost = progress.begun(orders.engines)
    orders.adopt(recipient, begun)
    for name in lost:
        recipient.tell(EngineGone(name, True))


def progress_of(row: BegunRow, request: Request, engine_of: EngineOf) -> Progress:
    """Of a request at another router."""
    return Progress(
        [order_of(each, request, engine_of) for each in row.orders],
        row.done,
        row.computed_by,
        row.decode,
        row.follows,
        row.failures,
        set(row.avoid),
    )

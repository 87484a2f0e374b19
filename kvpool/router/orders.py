"""Connects the scheduler and the active requests: orders to requests, and their results to the scheduler.

What is measured of an order is learned from before the scheduler hears of it.

The scheduler is polled after events, and when it asked for it. One event loop, one thread.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

from kvpool.router.records.metrics import Metrics
from kvpool.router.records.observations import Measured, Observer
from kvpool.scheduler.scheduler import Scheduler
from kvpool.scheduler.values import Begun, DecodeOrder, Engine, Order, Rejection, Request

POLL_AGAIN_S = 0.1
"""When the scheduler is polled again after an error in it."""


@dataclass(frozen=True, slots=True)
class EngineGone:
    """The engine left the scheduler, which gives other orders (`again`) or not."""

    engine: str
    again: bool


@dataclass(frozen=True, slots=True)
class Expired:
    """The scheduler has forgotten the request: it waited too long."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The scheduler has forgotten the request: it has failed too often, or no remaining engine can serve it."""


News = Order | DecodeOrder | EngineGone | Expired | Forgotten


class Recipient(Protocol):
    """A request with orders from the scheduler. ordered: whether any was given."""

    ordered: bool

    @property
    def request(self) -> Request: ...
    @property
    def model(self) -> str: ...
    def tell(self, news: News) -> None: ...
    def settle(self) -> None: ...


class Ordering(Protocol):
    """Where requests get their orders from. The outcome of everything but `submit` comes as news."""

    async def submit(self, recipient: Recipient) -> Rejection | None:
        """Ask for orders for its request, until `remove`; or why none will come. Raises `TimeoutError` at its deadline:
        another router may be asked, and may not answer.
        """

    def remove(self, request: Request) -> None:
        """Finished or not: unneeded orders may still be under way. Unknown requests are ignored."""

    def computed(self, order: Order, measured: Measured | None = None) -> None:
        """It was carried out; or is no longer needed, and nothing was measured."""

    def failed(self, order: Order, *, elsewhere: bool = False) -> None:
        """It was not carried out. Another order comes, or `Forgotten`. elsewhere: only for another engine."""

    def decode_failed(self, request: Request, engine: str, *, elsewhere: bool = False) -> None:
        """The engine has given no token of the answer. The rest as in `failed`."""

    def answered(self, engine: str, tokens: int, took_s: float) -> None:
        """An answer has ended; so many tokens came in this time, after the first one."""

    def abandoned(self, request: Request) -> None:
        """No orders for it any more."""


@dataclass(eq=False, repr=False)
class Orders:
    """See the module, and `Ordering`. clock: the scheduler's."""

    _scheduler: Scheduler
    _observer: Observer
    _metrics: Metrics
    _clock: Callable[[], float]
    _recipients: dict[Hashable, Recipient] = field(default_factory=dict, init=False)
    _polls: bool = field(default=False, init=False)
    _alarm: asyncio.TimerHandle | None = field(default=None, init=False)
    _alarm_at: float = field(default=math.inf, init=False)

    @property
    def engines(self) -> Mapping[str, Engine]:
        """The scheduler's, by name. Read-only."""
        return self._scheduler.engines

    async def submit(self, recipient: Recipient) -> Rejection | None:
        return self.accept(recipient)

    def accept(self, recipient: Recipient) -> Rejection | None:
        """As `submit`, at once."""
        rejection = self._scheduler.submit(recipient.request, self._clock())
        if rejection is None:
            self._recipients[recipient.request.ident] = recipient
            self.kick()
        return rejection

    def adopt(self, recipient: Recipient, begun: Begun) -> None:
        """Go on with a request of another scheduler, as far as it has come there."""
        self._recipients[recipient.request.ident] = recipient
        self._scheduler.adopt(recipient.request, begun, self._clock())
        self.kick()

    def remove(self, request: Request) -> None:
        if self._recipients.pop(request.ident, None) is not None:
            self.abandoned(request)

    # Results of orders

    def computed(self, order: Order, measured: Measured | None = None) -> None:
        if measured is not None:
            self._observer.computed(order, measured)
        engine = self.engines.get(order.estimate.engine.name)
        if engine is not None:  # otherwise it has left with its orders
            saves = None if measured is None else measured.saves
            self._scheduler.computed(engine, order.request.ident, self._clock(), saves)
            self.kick()

    def failed(self, order: Order, *, elsewhere: bool = False) -> None:
        name, ident = order.estimate.engine.name, order.request.ident
        engine = self.engines.get(name, order.estimate.engine)
        now = self._clock()
        self._again(ident, self._scheduler.failed(engine, ident, now, elsewhere=elsewhere))

    def decode_failed(self, request: Request, engine: str, *, elsewhere: bool = False) -> None:
        now, ident = self._clock(), request.ident
        self._again(ident, self._scheduler.decode_failed(ident, now, elsewhere=elsewhere))

    def _again(self, ident: Hashable, again: bool) -> None:
        self._metrics.retries.inc(again)
        if not again:
            self._recipients[ident].tell(Forgotten())
        self.kick()

    def answered(self, engine: str, tokens: int, took_s: float) -> None:
        if (known := self._scheduler.engines.get(engine)) is not None:
            self._observer.answered(known, tokens, took_s)

    def abandoned(self, request: Request) -> None:
        self._scheduler.abandoned(request.ident, self._clock())
        self.kick()

    # Engines

    def join(self, engine: Engine) -> None:
        """It may get orders from now on."""
        self._scheduler.join(engine, self._clock())
        self.kick()

    def leave(self, name: str) -> None:
        """It gets no more orders; those sent there that have not begun to be answered move elsewhere."""
        for recipient in self._recipients.values():
            recipient.settle()
        left = self._scheduler.leave(name, self._clock())
        for ident in {*left.queued, *left.decoding, *left.given_up}:
            self._recipients[ident].tell(EngineGone(name, ident not in left.given_up))
        self.kick()

    # Polling

    def kick(self) -> None:
        """Poll the scheduler soon, once for all events until then."""
        if not self._polls:
            self._polls = True
            asyncio.get_running_loop().call_soon(self._poll)

    def close(self) -> None:
        """Stop polling."""
        if self._alarm is not None:
            self._alarm.cancel()

    def _poll(self) -> None:
        self._polls = False
        now = self._clock()
        scheduler = self._scheduler
        wake_at = now + POLL_AGAIN_S
        try:
            with ExitStack() as each:  # if one fails, the others are still told
                for ident in scheduler.expired(now):
                    each.callback(self._expired, ident)
                orders = scheduler.poll(now)
                for order in reversed(orders):
                    each.callback(self._ordered, order, now)
                wake_at = scheduler.wake_at()
        finally:
            self._wake(wake_at, now)

    def _expired(self, ident: Hashable) -> None:
        self._recipients[ident].tell(Expired())

    def _ordered(self, order: Order | DecodeOrder, now: float) -> None:
        recipient = self._recipients[order.request.ident]
        recipient.tell(order)
        self._count(order, recipient, now)

    def _wake(self, wake_at: float, now: float) -> None:
        """To ring too early costs less than to set the alarm anew after each request."""
        if wake_at < self._alarm_at:
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm_at = wake_at
            loop = asyncio.get_running_loop()
            self._alarm = loop.call_later(max(wake_at - now, 0.0), self._ring)

    def _ring(self) -> None:
        self._alarm, self._alarm_at = None, math.inf
        self._poll()

    def _count(self, order: Order | DecodeOrder, recipient: Recipient, now: float) -> None:
        metrics = self._metrics
        if isinstance(order, DecodeOrder):
            metrics.engine_calls.labels(order.engine.name, "decode").inc()
            return
        estimate = order.estimate
        operation = "prefill_decode" if order.whole else "prefill"
        metrics.engine_calls.labels(estimate.engine.name, operation).inc()
        if not recipient.ordered:
            recipient.ordered = True
            metrics.queue_seconds.observe(now - order.request.arrived_s)
            keys = len(order.request.keys)
            if keys:
                metrics.cached_tokens.inc(estimate.cached * order.request.tokens / keys)

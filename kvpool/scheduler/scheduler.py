"""The scheduler: takes requests and reports, gives orders. No I/O, no clock.

The caller (the router, or the simulator) says what happens, with the time, and asks what is to be done:

    submit     a request came                       → a rejection, or nothing
    poll       time has passed, or something came   → orders: send this to that engine now
    wake_at    when to poll again if nothing comes
    computed   an engine has done an order          (its first token, if the order was the last one)
    finished   a request has its last token
    abandoned  a request failed or its client left

A policy that `sends_at_once` gets its orders at the next poll. Otherwise requests wait here, in the order
of the queue's rule, until the engine that suits them best is about to be free: what came meanwhile may be
shorter, and may go first. So that a long prompt does not keep an engine from short ones for long, it is
computed in segments: each order is for the prompt up to a token, and what was computed is in the engine's
cache and in the pool for the next one, on whichever engine. `Settings.segment_s` 0 switches that off.

Not thread-safe.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from random import Random

from kvpool.errors import InvalidRequest
from kvpool.scheduler.decode import context_tokens, pick_decode
from kvpool.scheduler.index import Match, PrefixIndex
from kvpool.scheduler.policies import Choice, Policy
from kvpool.scheduler.queue import SIZE_AWARE, QueueRule, RequestQueue, Waiting
from kvpool.scheduler.situation import Cluster, Situation
from kvpool.scheduler.values import Engine, Order, Outlook, Rejection, Request, Role

MATCH_S = 0.05
"""How old a match of a request that waits may be; events are no faster."""
EXPECT_S = 3.0
"""How long after the estimated end of an order its blocks are still expected without an event."""


@dataclass(frozen=True, slots=True)
class Settings:
    """queue: the order of what waits here. segment_s: seconds of prefill that one order is for.

    ahead_s: an engine gets its next order so long before it is free, and earlier by the time that its
    blocks take to load, `prefetch_s` at most. orders_max: that one engine has, of
    those that wait here. look_ahead: requests that are asked about at one poll, at most. queue_max:
    requests that may wait. ttft_slo_s, tpot_slo_s: what is not expected to be met is refused.
    """

    queue: QueueRule = SIZE_AWARE
    segment_s: float = 0.5
    ahead_s: float = 0.005
    prefetch_s: float = 0.5
    orders_max: int = 4
    look_ahead: int = 16
    queue_max: int = 100_000
    ttft_slo_s: float = math.inf
    tpot_slo_s: float = math.inf


@dataclass(slots=True)
class _Sent:
    """An order that was given and is not computed yet."""

    order: Order
    uncached: int
    prefill_s: float


@dataclass(slots=True)
class _Active:
    """A request from its first order on. The reservation stands until it is finished."""

    request: Request
    decode: Engine | None


class Scheduler:
    """engines: all, of any role; fixed for its life. index, cluster: fed by the caller too."""

    def __init__(
        self,
        engines: Sequence[Engine],
        cluster: Cluster,
        index: PrefixIndex,
        policy: Policy,
        rng: Random,
        settings: Settings = Settings(),
    ) -> None:
        self._engines = [e for e in engines if Role.PREFILL in e.role]
        if not self._engines:
            raise InvalidRequest("no engine may compute prompts")
        self._decoders = [e for e in engines if Role.DECODE in e.role]
        self._cluster = cluster
        self._index = index
        self._policy = policy
        self._rng = rng
        self._settings = settings
        self._queue = RequestQueue(settings.queue)
        self._active: dict[Hashable, _Active] = {}
        self._sent: dict[str, OrderedDict[Hashable, _Sent]] = {
            e.name: OrderedDict() for e in engines
        }
        self._news = False  # something came since the last poll
        self._looks_at = math.inf

    @property
    def waiting(self) -> int:
        """Requests that wait here, or of which a part does."""
        return len(self._queue)

    def submit(self, request: Request, now: float) -> Rejection | None:
        """Take a request, or refuse it at once."""
        situation = self._situation(request, now)
        size_s = situation.prefill_s(self._engines[0], situation.match.reach)
        refused = self._never_fits(request) or self._refused(situation, size_s)
        if refused is None:
            self._queue.add(Waiting(request, size_s))
            self._news = True
        return refused

    def poll(self, now: float) -> list[Order]:
        """What is to be sent now."""
        orders: list[Order] = []
        if self._policy.sends_at_once:
            for item in list(self._queue.first(len(self._queue))):
                situation = self._situation(item.request, now)
                choice = self._policy.choose(situation)
                orders.append(self._send(item, choice, situation, self._decoders))
            return orders
        if not self._news and now < self._looks_at:
            return orders
        orders, self._looks_at = self._orders(now)
        self._news = False
        return orders

    def wake_at(self) -> float:
        """When to poll again if nothing happens; infinite where nothing waits."""
        return self._looks_at if self._queue else math.inf

    def computed(self, engine: Engine, ident: Hashable, now: float) -> None:
        """The engine has computed its order for this request. One that was abandoned is passed over."""
        if ident not in self._sent[engine.name]:
            return
        sent = self._take_back(engine, ident, now)
        self._news = True
        keys = sent.order.request.keys
        if engine.tiers:
            self._index.arrived(engine.gpu, engine.tiers[0], keys[sent.order.outlook.cached :])
        if sent.order.last:
            return
        item = self._queue.get(ident)
        item.running = item.match = None

    def finished(self, ident: Hashable) -> None:
        """The request has its last token: its reservation ends. An unknown one is passed over."""
        active = self._active.pop(ident, None)
        if active is None:
            return
        self._news = True
        if active.decode is not None:
            active.decode.decodes -= 1
            active.decode.context_tokens -= context_tokens(active.request)

    def abandoned(self, ident: Hashable, now: float) -> None:
        """The request is no more: its orders failed, or its client left. Unknown ones are passed over."""
        self._queue.remove(ident)
        for engine in self._engines:
            sent = self._sent[engine.name].get(ident)
            if sent is not None:
                self._take_back(engine, ident, now)
                self._index.unexpect(engine.gpu, sent.order.request.keys)
        self.finished(ident)

    def explain(self, request: Request, now: float) -> Choice:
        """What would be chosen for a request, and from what; nothing is changed by asking."""
        return self._policy.choose(self._situation(request, now))

    def _situation(self, request: Request, now: float, match: Match | None = None) -> Situation:
        match = match or self._index.match(request.keys, now)
        return Situation(request, match, self._engines, self._cluster, self._rng, now)

    def _size_s(self, request: Request, done: int) -> float:
        kind = self._cluster.kinds[self._engines[0].kind]
        return kind.prefill.prefill_s(
            min(done, request.tokens - 1), request.tokens, kind.step_tokens
        )

    def _never_fits(self, request: Request) -> Rejection | None:
        largest = max((e.capacity_tokens for e in self._decoders), default=math.inf)
        if context_tokens(request) <= largest:
            return None
        return Rejection(request, "no decode engine is large enough for it", math.inf)

    def _refused(self, situation: Situation, size_s: float) -> Rejection | None:
        settings, request = self._settings, situation.request
        if len(self._queue) >= settings.queue_max:
            wait_s = self._queue.total_s / len(self._engines)
            return Rejection(request, "the queue is full", wait_s)
        if settings.tpot_slo_s < math.inf:
            decode = pick_decode(request, self._decoders, self._cluster.kinds, self._rng)
            if decode is not None and not (decode.fits and decode.tpot_s <= settings.tpot_slo_s):
                why = (
                    "decode engines are full" if not decode.fits else "tokens would come too slowly"
                )
                return Rejection(request, why, request.output_tokens * decode.tpot_s)
        if settings.ttft_slo_s < math.inf:
            soonest_s = min(situation.outlook(engine).ttft_s for engine in self._engines)
            over_s = soonest_s + self._backlog_s(size_s, situation) - settings.ttft_slo_s
            if over_s > 0:
                return Rejection(request, "the first token would come too late", over_s)
        return None

    def _backlog_s(self, size_s: float, situation: Situation) -> float:
        """How long what waits before a request of this size keeps the engines busy."""
        if self._policy.sends_at_once:
            return 0.0
        return self._queue.ahead_s(size_s, situation.request) / len(self._engines)

    def _has_room(self, outlook: Outlook, now: float) -> bool:
        """Whether it is time to give the engine this order: loading it may take as long as it is busy."""
        engine = outlook.engine
        if engine.prefills >= self._settings.orders_max:
            return False
        return engine.free_at - self._early_s(outlook) <= now

    def _early_s(self, outlook: Outlook) -> float:
        """How long before its engine is free an order is given."""
        return self._settings.ahead_s + min(outlook.load_s, self._settings.prefetch_s)

    def _next_free_at(self, now: float) -> float:
        """When the next engine that is busy may get an order, or is about to be free."""
        ahead_s = self._settings.ahead_s
        before = ahead_s, ahead_s + self._settings.prefetch_s
        wakes = (e.free_at - early_s for e in self._engines for early_s in before)
        return min((at for at in wakes if at > now), default=math.inf)

    def _orders(self, now: float) -> tuple[list[Order], float]:
        """What is sent now, and when to look again if nothing happens.

        Each of the first requests in the queue, in order, is sent if its engine has room. Others wait for
        engines that are better for them: these are promised to them, and what comes behind them finds
        these engines busy for as long. Until the blocks of a pending one are there, its engine may still
        do what ends before.

        The first for which no decode engine has the memory keeps one: what is behind it gets no memory
        there, or smaller ones would take for ever what comes free.
        """
        orders: list[Order] = []
        settings = self._settings
        early_s = settings.ahead_s + settings.prefetch_s
        room = {e.name for e in self._engines if e.free_at - early_s <= now}
        promised: dict[str, float] = {}
        gaps: dict[
            str, float
        ] = {}  # until when engines are free for others than who is pending there
        pending: dict[str, float] = {}  # when they have computed what goes there after that
        decoders = self._decoders
        looks_at = math.inf
        for item in list(self._queue.first(settings.look_ahead + len(self._engines))):
            if not room:
                break
            if item.running is not None:
                # It will want to go on where it is. Those before it may come in between.
                engine = item.running
                promised[engine.name] = engine.free_at + item.size_s
                room.discard(engine.name)
                continue
            if not self._reservable(item, decoders):
                if decoders is self._decoders:
                    kept = item.decode = item.decode or self._emptiest(item.request)
                    decoders = [e for e in decoders if e is not kept]
                continue
            if now - item.matched_at > MATCH_S or item.match is None:
                item.match, item.matched_at = self._index.match(item.request.keys, now), now
            situation = self._situation(item.request, now, item.match)
            situation.promised = promised
            choice = self._policy.choose(situation)
            if now + choice.best.ttft_s > gaps.get(choice.best.engine.name, math.inf):
                situation.promised = {**promised, **pending}
                choice = self._policy.choose(situation)
            best = choice.best
            name = best.engine.name
            ends_at = now + best.ttft_s
            if best.pending:
                gaps[name] = min(gaps.get(name, math.inf), now + best.starts_s)
                pending[name] = ends_at
                # No report tells that blocks are there: the index does, soon after they are.
                looks_at = min(looks_at, now + max(best.starts_s - best.load_s, MATCH_S))
            elif ends_at > gaps.get(name, math.inf):
                pending[name] = ends_at
            elif name in room and self._has_room(best, now):
                orders.append(self._send(item, choice, situation, decoders))
                if best.engine.free_at - early_s > now:
                    room.discard(name)
            else:
                early_at = best.engine.free_at - self._early_s(best)
                if early_at > now:
                    looks_at = min(looks_at, early_at)
                promised[name] = ends_at
                room.discard(name)
        return orders, min(looks_at, self._next_free_at(now))

    def _reservable(self, item: Waiting, decoders: Sequence[Engine]) -> bool:
        """Whether one of these engines has the memory, or any holds it already."""
        if not self._decoders or item.request.ident in self._active:
            return True
        needed = context_tokens(item.request)
        return any(e.context_tokens + needed <= e.capacity_tokens for e in decoders)

    def _emptiest(self, request: Request) -> Engine:
        """Of the decode engines that are large enough, the one with the most memory free."""
        needed = context_tokens(request)
        large = [e for e in self._decoders if e.capacity_tokens >= needed]
        return max(large, key=lambda e: e.capacity_tokens - e.context_tokens)

    def _send(
        self, item: Waiting, choice: Choice, situation: Situation, decoders: Sequence[Engine]
    ) -> Order:
        """decoders: those that may be reserved for it, if none is yet."""
        request, best, now = item.request, choice.best, situation.now
        engine = best.engine
        self._queue.remove(request.ident)
        kind = situation.kind(engine)
        start = min(best.cached * kind.block_tokens, request.tokens - 1)
        # Where what was computed of it is gone, the next segment might be as long as that, and so for ever.
        gone = best.cached * kind.block_tokens < item.done
        end = request.tokens if gone else self._segment_end(situation, engine, start)
        last = end == request.tokens
        if not last:
            prefill_s = kind.prefill.prefill_s(start, end, kind.step_tokens)
            best = best._replace(prefill_s=prefill_s)
            rest_s = self._size_s(request, end)
            self._queue.add(Waiting(request, rest_s, end, engine))
        decode = self._reserve(request, decoders)
        order = Order(request, best, end, last, decode, choice.candidates)
        self._sent[engine.name][request.ident] = _Sent(order, end - start, best.prefill_s)
        engine.prefills += 1
        engine.queued_tokens += end - start
        for key in request.keys:
            engine.blocks[key] = engine.blocks.get(key, 0) + 1
        begins = max(engine.free_at, now)
        engine.free_at = begins + best.prefill_s
        self._expect(order, max(begins, now + best.starts_s), kind.block_tokens)
        if best.source is not None:
            pull_s = kind.loads["peer"].seconds(best.pulled * kind.block_bytes)
            self._cluster.traffic.add(best.source, engine.node, pull_s, now)
        self._policy.sent(situation, engine)
        return order

    def _segment_end(self, situation: Situation, engine: Engine, start: int) -> int:
        """Up to which token the next order computes: whole steps and blocks of about `segment_s`."""
        tokens = situation.request.tokens
        segment_s = self._settings.segment_s
        if self._policy.sends_at_once or not segment_s:
            return tokens
        kind = situation.kind(engine)
        step = kind.step_tokens
        one_s = kind.prefill.prefill_s(start, start + step, step)
        length = step * max(1, round(segment_s / one_s))
        block = kind.block_tokens
        end = max((start + length) // block * block, start + block)
        # What would be left is not worth an order of its own.
        return tokens if tokens - end < length / 2 else end

    def _reserve(self, request: Request, decoders: Sequence[Engine]) -> Engine | None:
        active = self._active.get(request.ident)
        if active is None:
            found = pick_decode(request, decoders, self._cluster.kinds, self._rng)
            active = _Active(request, found.engine if found is not None else None)
            self._active[request.ident] = active
            if active.decode is not None:
                active.decode.decodes += 1
                active.decode.context_tokens += context_tokens(request)
        return active.decode

    def _expect(self, order: Order, begins: float, block_tokens: int) -> None:
        """Blocks come one after the other while the order is computed."""
        best = order.outlook
        # Whole blocks only; the last one of a prompt counts as its chain has it.
        end = len(order.request.keys) if order.last else order.end // block_tokens
        count = end - best.cached
        if count <= 0:
            return
        each_s = best.prefill_s / count
        ready = [begins + each_s * number for number in range(1, count + 1)]
        keys = order.request.keys[best.cached : end]
        self._index.expect(best.engine.gpu, keys, ready, ready[-1] + EXPECT_S)

    def _take_back(self, engine: Engine, ident: Hashable, now: float) -> _Sent:
        """An order is no more with its engine."""
        sent = self._sent[engine.name].pop(ident)
        engine.prefills -= 1
        engine.queued_tokens -= sent.uncached
        for key in sent.order.request.keys:
            engine.blocks[key] -= 1
            if not engine.blocks[key]:
                del engine.blocks[key]
        engine.free_at = now + sum(other.prefill_s for other in self._sent[engine.name].values())
        return sent

"""What is sent now: prompts to engines that are about to be free, and requests to decode engines. No I/O, no
clock.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from kvpool.scheduler.decision_context import DecisionContext
from kvpool.scheduler.decode import context_tokens, wait_for_saves_s
from kvpool.scheduler.decodes import Answer, emptiest
from kvpool.scheduler.orders import Sent
from kvpool.scheduler.policies import Choice
from kvpool.scheduler.queue import Waiting
from kvpool.scheduler.state import State
from kvpool.scheduler.values import (
    Among,
    DecodeEstimate,
    DecodeOrder,
    Engine,
    Estimate,
    Order,
    Request,
    Role,
    Saves,
    together,
)

MATCH_S = 0.05
"""Maximum age of a waiting request's match; events are no faster."""
SHARED_STEP = 0.25
"""Prompts of at most this share of a step are computed with others."""
EXPECT_S = 3.0
"""How long after the estimated end of an order its blocks are still expected without an event."""


@dataclass(slots=True)
class _Look:
    """One pass through the queue, and what requests have left to those behind them.

    room: engines that may get an order. promised: when others are free, after the requests that wait for them.
    gaps: until when engines are free for others than the pending request; pending: when they will have computed
    what goes there after that. kept: decode engines whose memory is kept. short: whether a request waits for memory.
    lacking: tokens that found no memory,
    by kind of engine.
    """

    room: set[str]
    promised: dict[str, float] = field(default_factory=dict)
    gaps: dict[str, float] = field(default_factory=dict)
    pending: dict[str, float] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    short: bool = False
    lacking: dict[str, int] = field(default_factory=dict)
    orders: list[Order] = field(default_factory=list)
    looks_at: float = math.inf


class Dispatch:
    """Goes through the queue and gives orders. Not thread-safe."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.lacking: dict[str, int] = {}
        """Tokens that found no memory to decode in at the last pass, by kind of engine."""
        self.exhausted = False
        """Whether after the last pass no engine could get more, and nobody waited for memory: then neither a request
        at the end of the queue nor the end of an answer leads to an order.
        """

    def at_once(self, now: float) -> list[Order]:
        """Send every waiting request to the engine of its choice, free or not."""
        state, orders = self._state, []
        for item in list(state.queue.first(len(state.queue))):
            engines, decoders = state.computing(item.request), state.decoding(item.request)
            if not engines or (state.settings.decodes and not decoders):
                continue
            context = state.decision_context(item.request, now, engines)
            state.with_answer(context, decoders)
            choice = state.policy.choose(context)
            orders.append(self._send(item, choice, context, decoders))
        return orders

    def orders(self, now: float) -> tuple[list[Order], float]:
        """What is sent now, and when to call again if nothing happens.

        For each group of engines, the first requests in the queue are sent, in order, if the chosen engine has
        room. Others wait for engines that are better for them: these are promised to them, and requests behind
        find these engines busy for as long. Until the blocks of a pending request are there, its engine may still
        serve requests that end before.

        The first request without memory on any decode engine keeps one: requests behind it get no memory
        there, or smaller ones would take freed memory forever.
        """
        state, settings = self._state, self._state.settings
        if not state.queue:
            self.lacking, self.exhausted = {}, False
            return [], math.inf
        # Decode-only engines compute requests that must be served whole; the others do not wait for them.
        engines = state.fleet.of(Role.PREFILL) or state.fleet.of(Role.DECODE)
        look = _Look({e.name for e in engines if self._may_have_room(e, now)})
        self.lacking = look.lacking
        for item in self._next(look, settings.look_ahead + len(engines)):
            if not look.room:
                if not state.queue.whole:
                    break
                if not item.request.whole:
                    continue
            if item.running is not None:
                if self._goes_on(item, look, now):
                    continue
                # It will want to continue where it is. Those before it may come in between.
                engine = item.running
                look.promised[engine.name] = engine.free_at + item.size_s
                look.room.discard(engine.name)
                continue
            found = self._with_memory(item, look)
            if found is not None:
                computing, decoders = found
                if now - item.matched_at > MATCH_S or item.match is None:
                    item.match, item.matched_at = state.index.match(item.request.keys, now), now
                context = state.decision_context(item.request, now, computing, item.match)
                state.with_answer(context, decoders)
                self._consider(item, context, decoders, look)
        self.exhausted = not (look.room or look.short or state.queue.whole or state.answers.parked)
        busy = list(state.fleet.engines.values())
        return look.orders, min(look.looks_at, self._next_free_at(busy, now))

    def _next(self, look: _Look, count: int) -> Iterator[Waiting]:
        """Requests in the queue, in order, until so many of a group were looked at and have got no order."""
        queue, seen = self._state.queue, set[Hashable]()
        while True:
            ordered = len(look.orders)
            items = [i for i in queue.first(count + len(seen)) if i.request.ident not in seen]
            for item in items:
                seen.add(item.request.ident)
                yield item
            if len(look.orders) == ordered:
                return
            seen = {ident for ident in seen if ident in queue}

    def _goes_on(self, item: Waiting, look: _Look, now: float) -> bool:
        """Give the engine that computes a segment the next one shortly before its end, so that it does not idle.

        Unless others come in between, or the computed blocks are gone.
        """
        engine, ahead_s = item.running, self._state.settings.ahead_s
        assert engine is not None, "it does not run"
        if engine.name not in look.room or engine.name in look.promised:
            return False
        if engine.free_at - ahead_s > now or engine.prefills >= self._state.settings.orders_max:
            return False
        context = self._state.decision_context(item.request, now, [engine])
        best = context.estimate(engine)
        if best.cached * context.kind(engine).block_tokens < item.done:
            return False
        look.orders.append(self._send(item, Choice(best, (best,)), context, self._free(item, look)))
        if not self._may_have_room(engine, now):
            look.room.discard(engine.name)
        return True

    def _consider(
        self, item: Waiting, context: DecisionContext, decoders: Sequence[Engine], look: _Look
    ) -> None:
        """Send it, or promise it the engine that it waits for."""
        state, now = self._state, context.now
        context.promised = look.promised
        choice = state.policy.choose(context)
        if now + choice.best.ttft_s > look.gaps.get(choice.best.engine.name, math.inf):
            context.promised = {**look.promised, **look.pending}
            choice = state.policy.choose(context)
        best = choice.best
        if best.cost == math.inf:
            look.short = True
            return  # none of these may be paired with an engine that has the memory
        name = best.engine.name
        in_turn = name in look.room or Role.PREFILL not in best.engine.role
        ends_at = now + best.ttft_s
        if best.pending:
            look.gaps[name] = min(look.gaps.get(name, math.inf), now + best.starts_s)
            look.pending[name] = ends_at
            # No report says that blocks are there: the index learns it soon after they are.
            arrive_at = now + max(best.starts_s - best.load_s, MATCH_S)
            look.looks_at = min(look.looks_at, arrive_at)
        elif ends_at > look.gaps.get(name, math.inf):
            look.pending[name] = ends_at
        elif in_turn and self._has_room(best, context):
            look.orders.append(self._send(item, choice, context, decoders))
            if not self._may_have_room(best.engine, now):
                look.room.discard(name)
        else:
            early_at = best.engine.free_at - self._early_s(best)
            if early_at > now:
                look.looks_at = min(look.looks_at, early_at)
            look.promised[name] = ends_at
            look.room.discard(name)

    def decode_orders(self, now: float) -> list[DecodeOrder]:
        """Decode orders for computed prompts for which an engine has room now.

        By priority, then in the order in which their prompts were done. The first that finds no room keeps
        one engine.
        """
        state, orders = self._state, []
        answers = state.answers
        kept: set[str] = set()
        in_vain: dict[Among, int] = {}
        for answer in answers.parked:
            request, computed_by = answer.request, answer.computed_by
            among = request.among
            if in_vain.get(among, 0) >= state.settings.look_ahead:
                continue
            assert computed_by is not None, "its prompt is not computed"
            decoders = state.decoding(request)
            free = [e for e in decoders if e.name not in kept and answers.has_room(answer, e)]
            if not free:
                self._keep(request, decoders, kept)
                in_vain[among] = in_vain.get(among, 0) + 1
                continue
            answers.release(answer)  # its own reservation is not in its way
            context = state.decision_context(request, now, [computed_by])
            saves = answer.saves
            stored = None if saves is None else state.stored(computed_by, saves)
            handover = state.handover(context, free, stored)
            estimates = handover.estimates(computed_by, 0.0, state.rng)
            best = estimates[0]
            engine = best.engine
            answers.reserve(answer, engine)
            answers.send(answer, engine, follows=False)
            self._transfers(computed_by, best, now)
            wait_s = self._wait_s(answer, computed_by, best, context)
            orders.append(DecodeOrder(request, engine, computed_by, best, estimates, wait_s))
        answers.kept = frozenset(kept)
        return orders

    def _wait_s(
        self, answer: Answer, computed_by: Engine, best: DecodeEstimate, context: DecisionContext
    ) -> float:
        """How long the decode engine may wait for what is still being saved of the prompt."""
        engine = best.engine
        if engine is computed_by or not engine.follows_max or not engine.shares(computed_by):
            return 0.0
        kind, request = context.kind(engine), answer.request
        saves = answer.saves
        if saves is None:
            # Engines answer before their last step is saved.
            saves = Saves(request.tokens, min(request.tokens, kind.step_tokens), None)
        get = context.match.lengths.get
        own = get(engine.gpu, 0)
        if not together(engine, computed_by):
            own = max(own, *(get(tier, 0) for tier in engine.tiers))
        return wait_for_saves_s(request, saves, own, best.handover_s, kind)

    def _may_have_room(self, engine: Engine, now: float) -> bool:
        """Whether it may get an order now, if there is a suitable one."""
        settings, state = self._state.settings, self._state
        if engine.prefills >= settings.orders_max:
            return False
        if engine.prefills < engine.steps_at_once or state.orders.room(engine) > 0:
            return True
        return engine.free_at - settings.ahead_s - settings.prefetch_s <= now

    def _has_room(self, estimate: Estimate, context: DecisionContext) -> bool:
        """Whether to send the order now: it is computed in one step with others, or the engine is about to be free.

        Loading its blocks may take as long as the engine is busy. A prompt that fills a step, or nearly so, gains
        nothing there before its turn, and keeps shorter ones waiting that come later.
        """
        engine, kind = estimate.engine, context.kind(estimate.engine)
        if engine.prefills >= self._state.settings.orders_max:
            return False
        if engine.prefills < engine.steps_at_once:
            return True  # one of its stages or ranks has nothing to compute
        tokens = max(1, context.request.tokens - estimate.cached * kind.block_tokens)
        if tokens <= min(self._state.orders.room(engine), SHARED_STEP * kind.step_tokens):
            return True
        return engine.free_at - self._early_s(estimate) <= context.now

    def _early_s(self, estimate: Estimate) -> float:
        """How long before its engine is free an order is sent."""
        settings = self._state.settings
        return settings.ahead_s + min(estimate.load_s, settings.prefetch_s)

    def _next_free_at(self, engines: Sequence[Engine], now: float) -> float:
        """When the next busy engine may get an order, or is about to be free, if requests wait."""
        if not self._state.queue:
            return math.inf
        settings = self._state.settings
        before = settings.ahead_s, settings.ahead_s + settings.prefetch_s
        wakes = (e.free_at - early_s for e in engines for early_s in before)
        return min((at for at in wakes if at > now), default=math.inf)

    def _with_memory(
        self, item: Waiting, look: _Look
    ) -> tuple[Sequence[Engine], Sequence[Engine]] | None:
        """The engines that may compute it, and those that may decode it and have the memory.

        None if there are none now; then it keeps one, if it is the first that lacks memory.
        """
        state, request = self._state, item.request
        engines = state.computing(request)
        if not engines or not state.settings.decodes:
            return (engines, ()) if engines else None
        decoders, free = state.decoding(request), self._free(item, look)
        if request.whole:
            # It decodes where it is computed, so there must be room now.
            needed = context_tokens(request)
            free = _with_room(free, needed)
            if free:
                return free, free
        elif state.answers.reservable(request, free):
            return engines, free
        self._keep(request, decoders, look.kept, item)
        look.short = True
        if decoders:
            kind = decoders[0].kind
            look.lacking[kind] = look.lacking.get(kind, 0) + context_tokens(request)
        return None

    def _free(self, item: Waiting, look: _Look) -> Sequence[Engine]:
        """The engines that may decode it and whose memory is not kept for a request before it."""
        decoders, kept = self._state.decoding(item.request), look.kept
        return [e for e in decoders if e.name not in kept] if kept else decoders

    def _keep(
        self,
        request: Request,
        engines: Sequence[Engine],
        kept: set[str],
        item: Waiting | None = None,
    ) -> None:
        """The first request without memory on any of these keeps one: the emptiest, and always the same."""
        if any(engine.name in kept for engine in engines):
            return
        before = item.decode if item is not None else None
        engine = before if before in engines else emptiest(engines, request)
        if item is not None:
            item.decode = engine
        if engine is not None:
            kept.add(engine.name)

    def _send(
        self, item: Waiting, choice: Choice, context: DecisionContext, decoders: Sequence[Engine]
    ) -> Order:
        """decoders: those where memory may be reserved for it."""
        state, request, best, now = self._state, item.request, choice.best, context.now
        engine = best.engine
        state.queue.remove(request.ident)
        kind = context.kind(engine)
        start = min(best.cached * kind.block_tokens, request.tokens - 1)
        # If its computed blocks are gone, another segment might be as long as the first, and so on forever.
        gone = best.cached * kind.block_tokens < item.done
        end = request.tokens if gone else self._segment_end(context, engine, start)
        last = end == request.tokens
        rest_s = 0.0
        if not last:
            prefill_s = kind.prefill.prefill_s(start, end, kind.step_tokens)
            best = best._replace(prefill_s=prefill_s)
            rest_s = state.size_s(request, end, engine)
            state.queue.add(Waiting(request, rest_s, end, engine))
        answer = state.answers.begin(request)
        estimates = self._reserve(answer, context, best, decoders, last)
        decode = answer.decode
        whole = last and decode is engine and self._may_stay(answer, engine)
        follow_s = None if whole else self._follow_s(answer, context, engine)
        # As late as the missing blocks can still arrive while the rest is computed: a node's follows are few.
        follow = follow_s is not None and rest_s <= follow_s
        if decode is not None and (whole or follow):
            state.answers.send(answer, decode, follows=follow)
        if decode is not None and follow_s is not None and follow:
            state.cluster.traffic.add(engine.node, decode.node, follow_s, now)
        answer.numbered += 1
        order = Order(
            *(request, best, end, last, decode, whole, follow),
            *(choice.candidates, estimates, answer.numbered),
        )
        begins = state.orders.add(self._sent(order, item.done), now)
        # If a prompt continues where it is, the rest is expected since its first segment there.
        later_s = 0.0 if item.running is engine else rest_s
        self._expect(order, max(begins, now + best.starts_s), later_s)
        if best.source is not None and best.link is not None:
            pull_s = best.link.seconds(best.pulled * kind.block_bytes)
            state.cluster.traffic.add(best.source, engine.node, pull_s, now)
        if best.pulled and context.spread:
            reach = context.match.of(engine.namespace).reach
            state.spreading.replicated(request.keys[reach - 1], now)
        state.queue.charge(request.tenant, best.prefill_s, now)
        state.policy.sent(context, engine)
        return order

    def resume(self, order: Order, done: int, now: float) -> None:
        """An order of another scheduler, which its engine computes: it counts from now on. done: of the prompt, before
        it.
        """
        begins = self._state.orders.add(self._sent(order, done), now)
        self._expect(order, begins, 0.0)

    def _sent(self, order: Order, done: int) -> Sent:
        best = order.estimate
        kind = self._state.cluster.kinds[best.engine.kind]
        uncached = order.end - min(best.cached * kind.block_tokens, order.request.tokens - 1)
        work_s = best.prefill_s - kind.prefill.steps_s(uncached, kind.step_tokens)
        return Sent(order, uncached, best.prefill_s, max(0.0, work_s), done)

    def _segment_end(self, context: DecisionContext, engine: Engine, start: int) -> int:
        """The token at which the next order ends: whole steps and blocks of about `segment_s`."""
        state, request = self._state, context.request
        segment_s = state.settings.segment_s
        tokens = request.tokens
        # Without keys it is unknown which blocks were computed.
        parts = request.segments and request.keys and not request.whole
        if state.policy.sends_at_once or not segment_s or not parts:
            return tokens
        kind = context.kind(engine)
        step = kind.step_tokens
        one_s = kind.prefill.prefill_s(start, start + step, step)
        length = step * max(1, round(segment_s / one_s))
        block = kind.block_tokens
        end = max((start + length) // block * block, start + block)
        # The rest would be too short for an order of its own.
        return tokens if tokens - end < length / 2 else end

    def _reserve(
        self,
        answer: Answer,
        context: DecisionContext,
        best: Estimate,
        decoders: Sequence[Engine],
        last: bool,
    ) -> Sequence[DecodeEstimate]:
        """Memory for the answer, at the first order; reconsidered at the last one, if not used.

        Returns the compared engines, if any.
        """
        state = self._state
        held = answer.decode
        if not state.settings.decodes or answer.sent or (held is not None and not last):
            return ()
        if held is not None and held not in decoders:
            decoders = [*decoders, held]
        state.answers.release(answer)
        prefill_s = context.prefill_s(best.engine, best.cached)
        handover = context.handover
        if handover is None or held is not None:
            handover = state.handover(context, decoders)
        estimates = handover.estimates(best.engine, prefill_s, state.rng)
        if estimates:
            state.answers.reserve(answer, estimates[0].engine)
        return estimates

    def _may_stay(self, answer: Answer, engine: Engine) -> bool:
        """Whether it may be decoded where its prompt is computed, without interruption."""
        answers = self._state.answers
        if answer.sent:
            return False
        if answer.request.whole:
            return True
        return engine.name not in answers.kept and answers.has_room(answer, engine)

    def _follow_s(self, answer: Answer, context: DecisionContext, engine: Engine) -> float | None:
        """Seconds to bring the decode engine the blocks it lacks; None if it cannot or need not follow."""
        decode = answer.decode
        if decode is None or not self._state.answers.may_follow(answer, decode):
            return None
        if not decode.shares(engine):
            return None  # nothing can be brought
        kind, get = context.kind(decode), context.match.lengths.get
        own = max(get(holder, 0) for holder in (decode.gpu, *decode.tiers))
        lacks = len(context.request.keys) - own
        if not lacks or together(engine, decode):
            return None  # nothing has to be brought within one node
        links = self._state.cluster.links
        link = links.between(engine.node, decode.node, kind.loads["peer"])
        return link.seconds(lacks * kind.block_bytes)

    def _transfers(self, engine: Engine, estimate: DecodeEstimate, now: float) -> None:
        """The decode engine's missing blocks are on their way between the two nodes."""
        target, traffic = estimate.engine, self._state.cluster.traffic
        if estimate.link is not None:
            block_bytes = self._state.cluster.kinds[target.kind].block_bytes
            seconds = estimate.link.seconds(estimate.lacks * block_bytes)
            traffic.add(engine.node, target.node, seconds, now)

    def _expect(self, order: Order, begins: float, later_s: float) -> None:
        """Blocks are expected one after the other while the order is computed.

        later_s: the time of the rest of the prompt, which is then expected too, so that requests with the
        same prefix need not compute it at the same time; 0: it is expected already.
        """
        best = order.estimate
        end = self._state.blocks_done(order)
        count = end - best.cached
        if count <= 0:
            return
        each_s = best.prefill_s / count
        ready = [begins + each_s * number for number in range(1, count + 1)]
        keys = order.request.keys[best.cached : end]
        index, gpu, nodes = self._state.index, best.engine.gpu, self._state.cluster.nodes
        shared = any(tier in nodes for tier in best.engine.tiers)
        index.expect(gpu, keys, ready, ready[-1] + EXPECT_S, shared=shared)
        rest = order.request.keys[end:]
        if later_s and rest:
            each_s = later_s / len(rest)
            ready = [ready[-1] + each_s * number for number in range(1, len(rest) + 1)]
            index.expect(gpu, rest, ready, ready[-1] + EXPECT_S, later=True, shared=shared)


def _with_room(engines: Sequence[Engine], needed: int) -> Sequence[Engine]:
    """Those with room for so much now; or else those at which only others' requests are in the way."""
    for waits in (False, True):
        found = [
            e
            for e in engines
            if e.has_room(needed, e.context_tokens, e.capacity_tokens, waits=waits)
        ]
        if found:
            return found
    return ()

"""The scheduler: takes requests and reports, gives orders. No I/O, no clock.

The caller (the router, or the simulator) reports events, with the time, and asks what to do:

    submit         a request arrived                    → a rejection, or nothing
    adopt          another scheduler's request, as far as it has come
    poll           time has passed, or something came   → orders: send this to that engine now
    wake_at        when to poll, and to ask what has expired, if nothing comes
    computed       an engine has done an order          (its first token, if the order was the last one)
    failed         it has not, and will not             → whether another order comes
    decode_failed  its decode engine is lost, before a token → whether another order comes
    finished       a request has its last token
    abandoned      a request ended: its client left, or it failed in the middle of its answer
    expired        whose first token would come too late now

    join, leave, drain, undrain, set_role               engines come, go, drain, change their role
    rebalance      about once a second                  → which engine has changed its role, by load

A policy that `sends_at_once` gets its orders at the next poll. Otherwise requests wait here, in the order of the
queue's rule, until the engine that suits them best is about to be free: a request that arrives meanwhile may be
shorter, and may go first. So that a long prompt does not block short ones for long, it is computed in segments:
each order is for the prompt up to a token, and the computed blocks are in the engine's cache and in the pool for
the next one, on any engine. `Settings.segment_s` 0 disables that.

A request is decoded in one of three ways: on the same engine, in the same order (`Order.whole`); on
another one, which gets the request at once and follows the prompt (`Order.follow`); or by a `DecodeOrder`
when the prompt is computed and there is room.

Not thread-safe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from random import Random

from kvpool.scheduler.admission import Admission
from kvpool.scheduler.balance import Balance
from kvpool.scheduler.cluster import Cluster
from kvpool.scheduler.deadlines import Deadlines
from kvpool.scheduler.decodes import Answer, Answers
from kvpool.scheduler.dispatch import Dispatch
from kvpool.scheduler.fleet import Fleet
from kvpool.scheduler.index import PrefixIndex
from kvpool.scheduler.orders import Orders
from kvpool.scheduler.policies import Choice, Policy
from kvpool.scheduler.queue import RequestQueue, Waiting
from kvpool.scheduler.roles import RoleChange
from kvpool.scheduler.settings import Settings
from kvpool.scheduler.spreading import Spreading
from kvpool.scheduler.state import State
from kvpool.scheduler.values import (
    Begun,
    DecodeOrder,
    Engine,
    Left,
    Order,
    Rejection,
    Request,
    Role,
    Saves,
)

__all__ = ["Scheduler", "Settings"]


class Scheduler:
    """engines: present at the start. index, cluster: updated by the caller too."""

    def __init__(
        self,
        engines: Sequence[Engine],
        cluster: Cluster,
        index: PrefixIndex,
        policy: Policy,
        rng: Random,
        settings: Settings = Settings(),  # noqa: B008 - it is frozen
    ) -> None:
        self._state = state = State(
            Fleet(engines),
            cluster,
            index,
            policy,
            rng,
            settings,
            RequestQueue(settings.queue, settings.tenants),
            Orders(cluster.kinds, counts_blocks=policy.counts_blocks),
            Answers(settings.decode),
            Spreading(settings.spread),
        )
        self._settings = settings
        self._admission = Admission(state)
        self._dispatch = Dispatch(state)
        self.balance = Balance(state, self._dispatch)
        self._deadlines = Deadlines()
        self._news = False  # something arrived since the last poll
        self._looks_at = math.inf
        self._state.see_places()

    @property
    def engines(self) -> Mapping[str, Engine]:
        """All that have joined and not left, by name. Read-only."""
        return self._state.fleet.engines

    @property
    def waiting(self) -> int:
        """Requests that wait here, completely or in part."""
        return len(self._state.queue)

    @property
    def parked(self) -> int:
        """Requests whose prompt is computed, and that wait for room to decode."""
        return len(self._state.answers.parked)

    def submit(self, request: Request, now: float) -> Rejection | None:
        """Take a request, or refuse it at once."""
        state = self._state
        engines = state.computing(request)
        refused = self._admission.outright(request, engines)
        if refused is not None:
            return refused
        context = state.decision_context(request, now, engines)
        reach = context.match.of(context.match.widest).reach
        size_s = context.prefill_s(engines[0], context.match.most)
        self.balance.asked(request, size_s, now)
        if reach:
            state.spreading.asked(request.keys[reach - 1], now)
        refused = self._admission.refused(context, size_s)
        if refused is None:
            match = context.match
            last = state.queue.add(Waiting(request, size_s, match=match, matched_at=now))
            self._deadlines.add(request)
            self._news = self._news or request.whole or not (last and self._dispatch.exhausted)
        return refused

    def adopt(self, request: Request, begun: Begun, now: float) -> None:
        """Go on with a request that another scheduler had accepted: it waits, or its orders count from now on.

        It is not refused: if no engine can serve it, it waits for one until its deadline.
        """
        state = self._state
        answer = state.answers.begin(request)
        answer.failures, answer.computed_by = begun.failures, begun.computed_by
        answer.avoid.update(begun.avoid)
        answer.numbered = max((order.number for order in begun.orders), default=0)
        if begun.decode is not None:
            state.answers.reserve(answer, begun.decode)
            state.answers.send(answer, begun.decode, follows=begun.follows)
        done = begun.done
        for order in begun.orders:
            self._dispatch.resume(order, done, now)
            done = order.end
        if begun.orders and not begun.orders[-1].last:
            engine = begun.orders[-1].estimate.engine
            state.queue.add(Waiting(request, state.size_s(request, done, engine), done, engine))
        elif not begun.orders and begun.computed_by is None:
            known = [*state.computing(request), *self.engines.values()]
            size_s = state.size_s(request, done, known[0]) if known else 0.0
            state.queue.add(Waiting(request, size_s, done))
        elif not begun.orders and not answer.sent and self._settings.decodes:
            state.answers.park(answer)
        self._deadlines.add(request)
        self._news = True

    def poll(self, now: float) -> list[Order | DecodeOrder]:
        """The orders to send now."""
        if not self._news and now < self._looks_at:
            return []
        self._news = False
        orders = self._dispatch.decode_orders(now)
        if self._state.policy.sends_at_once:
            return [*orders, *self._dispatch.at_once(now)]
        prompts, self._looks_at = self._dispatch.orders(now)
        return [*orders, *prompts]

    def wake_at(self) -> float:
        """When to poll again if nothing happens; infinite if nothing waits."""
        looks_at = self._looks_at if self._state.queue else math.inf
        return min(looks_at, self._deadlines.next_at)

    def computed(
        self, engine: Engine, ident: Hashable, now: float, saves: Saves | None = None
    ) -> None:
        """The engine has computed its earliest order for this request. An abandoned request is ignored.

        saves: what it says of the prompt's blocks; None: all of them count as saved.
        """
        state = self._state
        sent = state.orders.first(engine, ident)
        if sent is None:
            return
        state.orders.take_back(sent, now, computed=True)
        self._news = True
        order = sent.order
        if engine.tiers:
            # No further: the order behind it may have been given already.
            cached, done = order.estimate.cached, state.blocks_done(order)
            keys = order.request.keys
            stored = done if saves is None else max(cached, min(done, state.stored(engine, saves)))
            state.index.arrived(engine.gpu, engine.tiers[0], keys[cached:stored])
            state.index.not_saved(engine.gpu, keys[stored:done])
        if order.last:
            self._prompt_is_done(order, engine, saves)
        elif not state.orders.of(ident):
            item = state.queue.get(ident)
            item.running = item.match = None
            # Others go before it: the rest is no longer expected there.
            state.index.unexpect(engine.gpu, order.request.keys[state.blocks_done(order) :])

    def failed(
        self, engine: Engine, ident: Hashable, now: float, *, elsewhere: bool = False
    ) -> bool:
        """The engine will not do its orders for this request; returns whether another order comes.

        Computed blocks stay. The engine is avoided for it, if there is another. If no order comes,
        the request is forgotten. One without orders there is ignored: returns whether it is known. elsewhere: no order
        comes unless another engine may do it.
        """
        state = self._state
        mine = [sent for sent in state.orders.of(ident) if sent.order.estimate.engine is engine]
        answer = state.answers.get(ident)
        if not mine or answer is None:
            return answer is not None or ident in state.queue
        if mine[-1].order.whole:
            state.answers.release(answer)
        state.void(mine, now)
        others = state.decoding if mine[-1].order.whole else state.computing
        if not self._again(answer, engine, now, others if elsewhere else None):
            return False
        state.queue.remove(ident)
        request, done = answer.request, mine[0].done
        state.queue.add(Waiting(request, state.size_s(request, done, engine), done))
        return True

    def decode_failed(self, ident: Hashable, now: float, *, elsewhere: bool = False) -> bool:
        """The request has lost its decode engine, before any token.

        Returns whether another `DecodeOrder` comes, or it follows again; if not, the request is forgotten. One
        that was sent nowhere is ignored: returns whether it is known. elsewhere: as in `failed`.
        """
        state = self._state
        answer = state.answers.get(ident)
        if answer is None or answer.decode is None or not answer.sent:
            return answer is not None or ident in state.queue
        engine = answer.decode
        if any(sent.order.whole for sent in state.orders.of(ident)):
            return self.failed(engine, ident, now, elsewhere=elsewhere)
        state.answers.release(answer)
        if not self._again(answer, engine, now, state.decoding if elsewhere else None):
            return False
        if answer.request.whole:
            # It cannot be decoded elsewhere: it starts anew.
            answer.computed_by = None
            size_s = state.size_s(answer.request, 0, engine)
            state.queue.add(Waiting(answer.request, size_s))
        elif answer.computed_by is not None:
            state.answers.park(answer)
        return True

    def finished(self, ident: Hashable) -> None:
        """The request has its last token: its reservation ends. Unknown requests are ignored."""
        self._deadlines.remove(ident)
        if self._state.answers.end(ident) is not None and not self._dispatch.exhausted:
            self._news = True

    def abandoned(self, ident: Hashable, now: float) -> None:
        """The request has ended: its orders failed, or its client left. Unknown requests are ignored."""
        orders = self._state.orders.of(ident)
        if self._state.queue.remove(ident) is not None or orders:
            self._news = True  # an engine may have been promised to it
        self._state.void(orders, now)
        self.finished(ident)

    def expired(self, now: float) -> list[Hashable]:
        """Waiting requests whose deadline has passed. They are forgotten.

        They may have orders for a part of a prompt, and an engine that follows it.
        """
        found = []
        for ident in self._deadlines.over(now):
            if ident in self._state.queue or self._state.answers.waits(ident):
                self.abandoned(ident, now)
                found.append(ident)
        return found

    def join(self, engine: Engine, now: float) -> None:
        """It may get orders from now on. Raises `InvalidRequest` if the name exists."""
        engine.free_at = max(engine.free_at, now)
        self._state.fleet.join(engine)
        self._state.see_places()
        self._news = True

    def leave(self, name: str, now: float) -> Left:
        """It has left, with everything it had. Unknown engines are ignored."""
        left = Left([], [], [])
        engine = self._state.fleet.leave(name)
        if engine is None:
            return left
        self._state.see_places()
        self._news = True
        for ident in dict.fromkeys(s.order.request.ident for s in self._state.orders.on(engine)):
            again = self.failed(engine, ident, now)
            (left.queued if again else left.given_up).append(ident)
        left.decoding.extend(self._state.answers.unreserve(engine))
        for request in self._admission.too_long_without(engine):
            self.abandoned(request.ident, now)
            left.given_up.append(request.ident)
        return left

    def drain(self, name: str, now: float) -> None:
        """It gets nothing new; active requests may finish. Raises `KeyError` if it is unknown."""
        self._state.fleet.rest(name, resting=True)
        self._state.answers.unreserve(self.engines[name])
        self._news = True

    def undrain(self, name: str, now: float) -> None:
        """It is in service again. Raises `KeyError` if it is unknown."""
        self._state.fleet.rest(name, resting=False)
        self._news = True

    def weigh(self, name: str, weight: float) -> None:
        """It gets at most this share of its possible requests, from 0 to 1, if there is another engine.

        Raises `KeyError` if it is unknown.
        """
        self._state.fleet.weigh(name, weight)
        self._news = True

    def used_by_others(self, name: str, tokens: int) -> None:
        """So much of its memory is used by requests that were not sent from here. Raises `KeyError` if it is unknown."""
        engine = self.engines[name]
        self._news = self._news or tokens < engine.others_tokens
        engine.others_tokens = tokens

    def set_role(self, name: str, role: Role, now: float) -> None:
        """Its role for new orders; active requests may finish. Raises `KeyError` if it is unknown."""
        self._state.fleet.set_role(name, role)
        if Role.DECODE not in role:
            self._state.answers.unreserve(self.engines[name])
        self._news = True

    def rebalance(self, now: float) -> RoleChange | None:
        """Change an engine's role, if the load requires it. Call about every second."""
        change = self.balance.change(now)
        if change is not None:
            self.set_role(change.engine.name, change.role, now)
        return change

    def explain(self, request: Request, now: float) -> Choice | Rejection:
        """What would be chosen for a request, and from what; changes nothing."""
        state = self._state
        engines, decoders = state.computing(request), state.decoding(request)
        refused = self._admission.outright(request, engines)
        if refused is not None:
            return refused
        context = state.decision_context(request, now, engines)
        size_s = context.prefill_s(engines[0], context.match.most)
        refused = self._admission.refused(context, size_s)
        if refused is not None:
            return refused
        state.with_answer(context, decoders)
        choice = state.policy.choose(context)
        if not self._settings.decodes:
            return choice
        handover = state.handover(context, decoders)
        best = choice.best
        return replace(choice, decoders=handover.estimates(best.engine, best.prefill_s, state.rng))

    def _prompt_is_done(self, order: Order, engine: Engine, saves: Saves | None) -> None:
        answers = self._state.answers
        answer = answers.get(order.request.ident)
        if answer is None:
            return  # it was followed, and has finished before this report
        answer.computed_by, answer.saves = engine, saves
        if answer.decode is not None:
            answers.followed(answer, answer.decode)
        if self._settings.decodes and not answer.sent:
            answers.park(answer)
            self._deadlines.add(order.request)

    def _again(
        self,
        answer: Answer,
        engine: Engine,
        now: float,
        among: Callable[[Request], Sequence[Engine]] | None,
    ) -> bool:
        """Whether a request that failed there is retried; otherwise it is forgotten.

        among: the engines of which one must be left that has not failed; None: one that has failed may be tried again.
        """
        answer.failures += 1
        answer.avoid.add(engine.name)
        self._news = True
        over = answer.failures > self._settings.retries_max or self._admission.too_long(answer)
        if among is not None and not over:
            over = all(each.name in answer.avoid for each in among(answer.request))
        if over:
            self.abandoned(answer.request.ident, now)
            return False
        self._deadlines.add(answer.request)
        return True

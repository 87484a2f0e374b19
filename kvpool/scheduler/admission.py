"""Which requests are refused, and when they may be retried. No I/O, no clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.scheduler.decision_context import DecisionContext
from kvpool.scheduler.decode import context_tokens, pick_decode
from kvpool.scheduler.decodes import Answer
from kvpool.scheduler.queue import RequestQueue
from kvpool.scheduler.settings import Settings
from kvpool.scheduler.state import State
from kvpool.scheduler.values import Among, Engine, Rejection, Request, Role

NO_ENGINE_S = 5.0
"""Retry-After if no engine is in service."""
FULL_MAX = 2
"""Tenants below their share of a full queue are still accepted, up to this multiple of `queue_max`."""


@dataclass(eq=False, slots=True)
class Admission:
    """Decides which requests are refused, and which ones no engine can hold."""

    _state: State

    def outright(self, request: Request, engines: Sequence[Engine]) -> Rejection | None:
        """Return the rejection of a request for lack of engines. engines: those that may compute it."""
        if not engines:
            return _no_engine(request)
        if not self._state.settings.decodes:
            return None
        decoders = self._state.decoding(request)
        if not decoders:
            return _no_engine(request)
        return refused_by_size(request, decoders)

    def refused(self, context: DecisionContext, size_s: float) -> Rejection | None:
        """Return the rejection of a request for the load of the engines. size_s: of its prompt."""
        state, settings, request = self._state, self._state.settings, context.request
        refused = refused_by_queue(request, state.queue, settings, len(context.engines))
        if refused is not None:
            return refused
        refused = refused_by_decode(request, state.decoding(request), context, settings)
        if refused is not None or min(settings.ttft_slo_s, request.deadline_s) == math.inf:
            return refused
        backlog_s, count = 0.0, len(context.engines)
        if not state.policy.sends_at_once:
            if in_time(context, state.queue.waiting_s(request) / count, settings):
                return None  # as nearly always, and much cheaper to see
            backlog_s = state.queue.ahead_s(size_s, request) / count
        return refused_by_time(context, backlog_s, settings)

    def too_long(self, answer: Answer) -> bool:
        """Return whether no remaining engine can hold it. If no engine remains at all, it waits for one."""
        decoders = self._state.fleet.decoding(answer.request)
        if answer.sent or not decoders or not self._state.settings.decodes:
            return False
        return refused_by_size(answer.request, decoders) is not None

    def too_long_without(self, engine: Engine) -> list[Request]:
        """Return requests not yet sent for decoding that this engine could have held, and no remaining one can."""
        state = self._state
        if not state.settings.decodes or Role.DECODE not in engine.role:
            return []
        unsent = [answer.request for answer in state.answers if not answer.sent]
        unsent += [i.request for i in state.queue if state.answers.get(i.request.ident) is None]
        largest: dict[Among, float] = {}
        found = []
        for request in unsent:
            most = largest.get(request.among)
            if most is None:
                capacities = (e.capacity_tokens for e in state.fleet.decoding(request))
                most = largest[request.among] = max(capacities, default=math.inf)
            if most < context_tokens(request) <= engine.capacity_tokens:
                found.append(request)
        return found


def refused_by_size(request: Request, decoders: Sequence[Engine]) -> Rejection | None:
    """decoders: all engines that could decode it."""
    largest = max(engine.capacity_tokens for engine in decoders)
    if context_tokens(request) <= largest:
        return None
    return Rejection(request, "no decode engine is large enough for it", math.inf, "too_long")


def _no_engine(request: Request) -> Rejection:
    """The rejection of a request that no engine in service can serve."""
    return Rejection(request, "no engine is in service for it", NO_ENGINE_S, "no_engine")


def refused_by_queue(
    request: Request, queue: RequestQueue, settings: Settings, engines: int
) -> Rejection | None:
    """Rejection for a full queue. One tenant cannot fill it for the others."""
    waiting = len(queue)
    if waiting < settings.queue_max:
        return None
    wait_s = queue.waiting_s(request) / engines
    if not set(queue.tenants) <= {request.tenant}:
        if queue.count(request.tenant) >= queue.share(request.tenant) * settings.queue_max:
            why = "the queue is full, and this tenant has its share of it"
            return Rejection(request, why, wait_s, "tenant_share")
        if waiting < FULL_MAX * settings.queue_max:
            return None
    return Rejection(request, "the queue is full", wait_s, "queue_full")


def refused_by_decode(
    request: Request, decoders: Sequence[Engine], context: DecisionContext, settings: Settings
) -> Rejection | None:
    """With an objective for the time per token: no memory, or too many decoding requests."""
    if settings.tpot_slo_s == math.inf:
        return None
    best = pick_decode(request, decoders, context.cluster.kinds, context.now)
    if best is None or (best.fits and best.tpot_s <= settings.tpot_slo_s):
        return None
    if best.fits:
        return Rejection(request, "tokens would come too slowly", best.cost, "tpot")
    return Rejection(request, "decode engines are full", best.cost, "decode_full")


def in_time(context: DecisionContext, backlog_s: float, settings: Settings) -> bool:
    """Whether its first token comes in time even if nothing of its prompt is cached. backlog_s: as below, or more."""
    request, now = context.request, context.now
    first = min(context.engines, key=lambda engine: engine.free_at)
    latest_s = backlog_s + max(0.0, first.free_at - now) + context.prefill_s(first, 0)
    return latest_s <= min(settings.ttft_slo_s, request.deadline_s - now)


def refused_by_time(
    context: DecisionContext, backlog_s: float, settings: Settings
) -> Rejection | None:
    """backlog_s: how long the requests before it keep the engines busy."""
    request = context.request
    soonest_s = backlog_s + min(context.estimate(e).ttft_s for e in context.distinct())
    over_s = soonest_s - (request.deadline_s - context.now)
    if over_s > 0:
        why = "the first token would come after the request's deadline"
        return Rejection(request, why, over_s, "deadline")
    over_s = soonest_s - settings.ttft_slo_s
    if over_s > 0:
        return Rejection(request, "the first token would come too late", over_s, "ttft")
    return None

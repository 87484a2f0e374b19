"""Which requests are refused, and when they may be retried. No I/O, no clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.scheduler.decision_context import DecisionContext
from kvpool.scheduler.decode import context_tokens, pick_decode
from kvpool.scheduler.queue import RequestQueue
from kvpool.scheduler.values import Engine, Rejection, Request

NO_ENGINE_S = 5.0
"""Retry-After if no engine is in service."""
FULL_MAX = 2
"""Tenants below their share of a full queue are still accepted, up to this multiple of `queue_max`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """queue_max: the most waiting requests. ttft_s, tpot_s: objectives; requests that would miss them are
    refused.
    """

    queue_max: int
    ttft_s: float
    tpot_s: float


def refused_by_size(request: Request, decoders: Sequence[Engine]) -> Rejection | None:
    """decoders: all engines that could decode it."""
    largest = max(engine.capacity_tokens for engine in decoders)
    if context_tokens(request) <= largest:
        return None
    return Rejection(request, "no decode engine is large enough for it", math.inf, "too_long")


def no_engine(request: Request) -> Rejection:
    """The rejection of a request that no engine in service can serve."""
    return Rejection(request, "no engine is in service for it", NO_ENGINE_S, "no_engine")


def refused_by_queue(
    request: Request, queue: RequestQueue, limits: Limits, engines: int
) -> Rejection | None:
    """Rejection for a full queue. One tenant cannot fill it for the others."""
    waiting = len(queue)
    if waiting < limits.queue_max:
        return None
    wait_s = queue.waiting_s(request) / engines
    if not set(queue.tenants) <= {request.tenant}:
        if queue.count(request.tenant) >= queue.share(request.tenant) * limits.queue_max:
            why = "the queue is full, and this tenant has its share of it"
            return Rejection(request, why, wait_s, "tenant_share")
        if waiting < FULL_MAX * limits.queue_max:
            return None
    return Rejection(request, "the queue is full", wait_s, "queue_full")


def refused_by_decode(
    request: Request, decoders: Sequence[Engine], context: DecisionContext, limits: Limits
) -> Rejection | None:
    """With an objective for the time per token: no memory, or too many decoding requests."""
    if limits.tpot_s == math.inf:
        return None
    best = pick_decode(request, decoders, context.cluster.kinds, context.now)
    if best is None or (best.fits and best.tpot_s <= limits.tpot_s):
        return None
    if best.fits:
        return Rejection(request, "tokens would come too slowly", best.cost, "tpot")
    return Rejection(request, "decode engines are full", best.cost, "decode_full")


def in_time(context: DecisionContext, backlog_s: float, limits: Limits) -> bool:
    """Whether its first token comes in time even if nothing of its prompt is cached. backlog_s: as below, or more."""
    request, now = context.request, context.now
    first = min(context.engines, key=lambda engine: engine.free_at)
    latest_s = backlog_s + max(0.0, first.free_at - now) + context.prefill_s(first, 0)
    return latest_s <= min(limits.ttft_s, request.deadline_s - now)


def refused_by_time(context: DecisionContext, backlog_s: float, limits: Limits) -> Rejection | None:
    """backlog_s: how long the requests before it keep the engines busy."""
    request = context.request
    soonest_s = backlog_s + min(context.estimate(e).ttft_s for e in context.distinct())
    over_s = soonest_s - (request.deadline_s - context.now)
    if over_s > 0:
        why = "the first token would come after the request's deadline"
        return Rejection(request, why, over_s, "deadline")
    over_s = soonest_s - limits.ttft_s
    if over_s > 0:
        return Rejection(request, "the first token would come too late", over_s, "ttft")
    return None

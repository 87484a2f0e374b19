"""Mooncake's Algorithm 1 (FAST'25)."""

from __future__ import annotations

from kvpool.scheduler.decision_context import DecisionContext
from kvpool.scheduler.policies.base import Choice, Stateless, by_cost, cheapest
from kvpool.scheduler.values import Engine, Estimate

BALANCING_THRESHOLD = 1.0
"""How many times longer the best prefix elsewhere must be before a transfer is planned.

The paper gives no value ("adjusted manually"). 1.0 plans one whenever another node has more: with a pool
much faster than computing, no higher value can pay.
"""


class MooncakeGlobal(Stateless):
    """The engine with the smallest estimated time to first token.

    T = transfer + queue + prefill. A transfer of the part of the best prefix beyond the engine's own is
    planned when best / own exceeds the threshold; then the prefill is the rest. As in
    the paper, the times are added up: nothing overlaps.
    """

    sends_at_once = True

    def __init__(self, threshold: float = BALANCING_THRESHOLD) -> None:
        self._threshold = threshold

    def choose(self, context: DecisionContext) -> Choice:
        return cheapest((self._estimate(context, e) for e in context.engines), context.rng)

    def _estimate(self, context: DecisionContext, engine: Engine) -> Estimate:
        own = context.own(engine)
        best, _ = context.sources(engine.namespace)
        queue_s = max(0.0, engine.free_at - context.now)
        found, source, link = None, None, None
        cached, transfer_s = own, 0.0
        if best > own * self._threshold:
            found = context.source_for(engine, best - own)
        if found is not None:
            source, link, _ = found
            cached = best
            transfer_s = link.seconds((best - own) * context.kind(engine).block_bytes)
        prefill_s = context.prefill_s(engine, cached)
        starts_s = queue_s + transfer_s
        pulled = cached - own
        gpu = context.match.lengths.get(engine.gpu, 0)
        loaded = max(0, cached - gpu)
        ttft_s = starts_s + prefill_s
        return Estimate(
            *(engine, cached, loaded, pulled, source, transfer_s, starts_s, prefill_s, ttft_s),
            link=link,
        )


class MooncakeLocal(Stateless):
    """The same without transfers: only the prefix on the engine's own node counts.

    The engine still loads blocks that it can, so the queue is estimated as for every policy.
    """

    sends_at_once = True

    def choose(self, context: DecisionContext) -> Choice:
        def cost(engine: Engine) -> float:
            queue_s = max(0.0, engine.free_at - context.now)
            return queue_s + context.prefill_s(engine, context.own(engine))

        return by_cost(context, cost)

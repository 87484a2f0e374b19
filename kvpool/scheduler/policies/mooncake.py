"""Mooncake's Algorithm 1 (FAST'25)."""

from __future__ import annotations

from kvpool.scheduler.policies.base import Choice, Stateless, by_cost, cheapest
from kvpool.scheduler.situation import Situation
from kvpool.scheduler.values import Engine, Outlook

BALANCING_THRESHOLD = 1.0
"""How many times longer the best prefix elsewhere must be before a transfer is planned.

The paper gives no value ("adjusted manually"). 1.0 plans one whenever somebody has more: with a pool that
is much faster than computing, no higher value can pay.
"""


class MooncakeGlobal(Stateless):
    """The engine with the smallest estimated time to first token.

    T = transfer + queue + prefill. A transfer of what the best node has beyond one's own prefix is
    planned when best / own exceeds the threshold; then the prefill is what is left after it. As in
    the paper, the times are added up: nothing overlaps.
    """

    sends_at_once = True

    def __init__(self, threshold: float = BALANCING_THRESHOLD) -> None:
        self._threshold = threshold

    def choose(self, situation: Situation) -> Choice:
        return cheapest((self._outlook(situation, e) for e in situation.engines), situation.rng)

    def _outlook(self, situation: Situation, engine: Engine) -> Outlook:
        own = situation.own(engine)
        best = situation.longest
        queue_s = max(0.0, engine.free_at - situation.now)
        source = None
        cached, transfer_s = own, 0.0
        if best > own * self._threshold:
            source = situation.source_for(engine)
        if source is not None:
            kind = situation.kind(engine)
            cached = best
            transfer_s = kind.loads["peer"].seconds((best - own) * kind.block_bytes)
        prefill_s = situation.prefill_s(engine, cached)
        starts_s = queue_s + transfer_s
        pulled = cached - own
        gpu = situation.match.lengths.get(engine.gpu, 0)
        loaded = max(0, cached - gpu)
        ttft_s = starts_s + prefill_s
        return Outlook(
            engine, cached, loaded, pulled, source, transfer_s, starts_s, prefill_s, ttft_s
        )


class MooncakeLocal(Stateless):
    """The same without transfers: only what the engine's own node holds counts.

    The engine loads what it can all the same, so the queue is estimated as for every policy.
    """

    sends_at_once = True

    def choose(self, situation: Situation) -> Choice:
        def cost(engine: Engine) -> float:
            queue_s = max(0.0, engine.free_at - situation.now)
            return queue_s + situation.prefill_s(engine, situation.own(engine))

        return by_cost(situation, cost)

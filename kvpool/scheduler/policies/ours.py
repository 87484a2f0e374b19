"""kvpool's own policy: the earliest first token, over all that the pool and the engines can do."""

from __future__ import annotations

from kvpool.scheduler.decision_context import DecisionContext
from kvpool.scheduler.policies.base import Choice, Stateless, cheapest
from kvpool.scheduler.values import Engine, Estimate

MOVING = 2.0
"""What a second of pulling weighs beside a second of waiting: links and memory are others' too."""


class EarliestToken(Stateless):
    """The engine with the earliest estimated first token; requests wait in the scheduler.

    Loading and queueing overlap, links that are busy count, and blocks that another engine is computing
    are waited for where that is sooner than computing them again. A pull of a prefix that is worth a copy
    counts no more than its time. Where engines differ in how the answer goes on from them, the earliest
    end of the answer is looked for.
    """

    sends_at_once = False

    def choose(self, context: DecisionContext) -> Choice:
        moving = 0.0 if context.spread else MOVING

        def estimate(engine: Engine) -> Estimate:
            found = context.estimate(engine, waiting=True)
            cost = found.cost + context.answer_s(engine, found.prefill_s)
            if found.pulled:
                cost += moving * found.load_s
            return found._replace(cost=cost)

        return cheapest(map(estimate, context.distinct()), context.rng)

"""kvpool's own policy: the earliest first token, using the whole pool and all engines."""

from __future__ import annotations

from kvpool.scheduler.decision_context import DecisionContext
from kvpool.scheduler.policies.base import Choice, Stateless, cheapest
from kvpool.scheduler.values import Engine, Estimate

MOVING = 2.0
"""Weight of a second of pulling relative to a second of waiting: links and memory are shared."""
COMPUTING = 1.0
"""Weight of a second of computing beside the time to the first token, of which it is a part: others wait for it.

Chosen on the first half of the conversation trace. Without it a prompt goes to a free engine that has none of it
rather than wait for one that has: 6 % longer waits where nodes cannot pull, and no difference where they can.
"""


class EarliestToken(Stateless):
    """The engine with the earliest estimated first token; requests wait in the scheduler.

    Loading and queueing overlap, busy links are included, and blocks that another engine is computing
    are awaited if that is sooner than computing them again. A pull of a prefix that should be spread
    counts only its time; what is computed again counts once more. If the place of decoding makes a
    difference between engines, the earliest end of the answer decides.
    """

    sends_at_once = False

    def choose(self, context: DecisionContext) -> Choice:
        moving = 0.0 if context.spread else MOVING

        def estimate(engine: Engine) -> Estimate:
            found = context.estimate(engine, waiting=True)
            cost = found.cost + context.answer_s(engine, found.prefill_s)
            cost += COMPUTING * found.prefill_s
            if found.pulled:
                cost += moving * found.load_s
            return found._replace(cost=cost)

        return cheapest(map(estimate, context.distinct()), context.rng)

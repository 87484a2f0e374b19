"""The port of a policy: which engine computes a request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from kvpool.scheduler.decision_context import DecisionContext
from kvpool.scheduler.values import DecodeEstimate, Engine, Estimate

TIE = 1e-9
"""Costs that differ by less than this share are equal."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The estimate on the chosen engine, and those that it was compared with, itself among them.

    decoders: where the answer may go on then, the best first; policies leave it empty.
    """

    best: Estimate
    candidates: tuple[Estimate, ...]
    decoders: Sequence[DecodeEstimate] = ()


class Policy(Protocol):
    """Chooses among a context's engines. One object serves one scheduler, and may remember.

    sends_at_once: requests go to their engine as they come, and wait there, in order. Otherwise they
    wait in the scheduler until the engine of their choice has room, and are asked for again then.
    counts_blocks: whether it looks at `Engine.blocks`.
    """

    sends_at_once: bool
    counts_blocks: bool

    def choose(self, context: DecisionContext) -> Choice: ...

    def sent(self, context: DecisionContext, engine: Engine) -> None:
        """The request went there."""


class Stateless:
    """For policies that do not care what was sent where."""

    counts_blocks = False

    def sent(self, context: DecisionContext, engine: Engine) -> None:
        return


def cheapest(estimates: Iterable[Estimate], rng: Random) -> Choice:
    """The one with the lowest cost; any of equals."""
    candidates = tuple(estimates)
    least = min(estimate.cost for estimate in candidates)
    limit = least + abs(least) * TIE
    equal = [estimate for estimate in candidates if estimate.cost <= limit]
    return Choice(equal[0] if len(equal) == 1 else rng.choice(equal), candidates)


def by_cost(context: DecisionContext, cost: Callable[[Engine], float]) -> Choice:
    """The engine with the lowest cost, in whatever unit; any of equals. Explained with that cost.

    Only the chosen engine's estimate is worked out: the others stand with their costs.
    """
    bare = [Estimate(e, 0, 0, 0, None, 0.0, 0.0, 0.0, cost(e)) for e in context.engines]
    chosen = cheapest(bare, context.rng)
    best = context.estimate(chosen.best.engine)
    return Choice(best._replace(cost=chosen.best.cost), chosen.candidates)

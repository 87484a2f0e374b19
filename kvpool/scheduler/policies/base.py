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
    """The estimate on the chosen engine, and the compared ones, itself among them.

    decoders: the engines that may decode it then, best first; policies leave it empty.
    """

    best: Estimate
    candidates: tuple[Estimate, ...]
    decoders: Sequence[DecodeEstimate] = ()


class Policy(Protocol):
    """Chooses among a context's engines. One object serves one scheduler, and may keep state.

    sends_at_once: requests go to their engine at once, and wait there, in order. Otherwise they
    wait in the scheduler until the engine of their choice has room, and are decided again then.
    counts_blocks: whether it uses `Engine.blocks`.
    """

    sends_at_once: bool
    counts_blocks: bool

    def choose(self, context: DecisionContext) -> Choice: ...

    def sent(self, context: DecisionContext, engine: Engine) -> None:
        """The request went there."""


class Stateless:
    """For policies that ignore what was sent where."""

    counts_blocks = False

    def sent(self, context: DecisionContext, engine: Engine) -> None:
        return


def cheapest(estimates: Iterable[Estimate], rng: Random) -> Choice:
    """The one with the lowest cost; of equals a random one."""
    candidates = tuple(estimates)
    least = min(estimate.cost for estimate in candidates)
    limit = least + abs(least) * TIE
    equal = [estimate for estimate in candidates if estimate.cost <= limit]
    return Choice(equal[0] if len(equal) == 1 else rng.choice(equal), candidates)


def by_cost(context: DecisionContext, cost: Callable[[Engine], float]) -> Choice:
    """The engine with the lowest cost, in any unit; of equals a random one. Explained with that cost.

    Only the chosen engine's estimate is computed: the others are returned with their costs.
    """
    bare = [Estimate(e, 0, 0, 0, None, 0.0, 0.0, 0.0, cost(e)) for e in context.engines]
    chosen = cheapest(bare, context.rng)
    best = context.estimate(chosen.best.engine)
    return Choice(best._replace(cost=chosen.best.cost), chosen.candidates)

"""The port of a policy: which engine computes a request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from kvpool.scheduler.situation import Situation
from kvpool.scheduler.values import DecodeOutlook, Engine, Outlook

TIE = 1e-9
"""Costs that differ by less than this share are equal."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The outlook on the chosen engine, and those that it was compared with, itself among them.

    decoders: where the answer may go on then, the best first; policies leave it empty.
    """

    best: Outlook
    candidates: tuple[Outlook, ...]
    decoders: Sequence[DecodeOutlook] = ()


class Policy(Protocol):
    """Chooses among a situation's engines. One object serves one scheduler, and may remember.

    sends_at_once: requests go to their engine as they come, and wait there, in order. Otherwise they
    wait in the scheduler until the engine of their choice has room, and are asked for again then.
    counts_blocks: whether it looks at `Engine.blocks`.
    """

    sends_at_once: bool
    counts_blocks: bool

    def choose(self, situation: Situation) -> Choice: ...

    def sent(self, situation: Situation, engine: Engine) -> None:
        """The request went there."""


class Stateless:
    """For policies that do not care what was sent where."""

    counts_blocks = False

    def sent(self, situation: Situation, engine: Engine) -> None:
        return


def cheapest(outlooks: Iterable[Outlook], rng: Random) -> Choice:
    """The one with the lowest cost; any of equals."""
    candidates = tuple(outlooks)
    least = min(outlook.cost for outlook in candidates)
    limit = least + abs(least) * TIE
    equal = [outlook for outlook in candidates if outlook.cost <= limit]
    return Choice(equal[0] if len(equal) == 1 else rng.choice(equal), candidates)


def by_cost(situation: Situation, cost: Callable[[Engine], float]) -> Choice:
    """The engine with the lowest cost, in whatever unit; any of equals. Explained with that cost.

    Only the chosen engine's outlook is worked out: the others stand with their costs.
    """
    bare = [Outlook(e, 0, 0, 0, None, 0.0, 0.0, 0.0, cost(e)) for e in situation.engines]
    chosen = cheapest(bare, situation.rng)
    best = situation.outlook(chosen.best.engine)
    return Choice(best._replace(cost=chosen.best.cost), chosen.candidates)

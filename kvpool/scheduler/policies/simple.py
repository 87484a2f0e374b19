"""Policies that ignore caches."""

from __future__ import annotations

import xxhash

from kvpool.scheduler.decision_context import DecisionContext
from kvpool.scheduler.policies.base import Choice, Stateless, by_cost
from kvpool.scheduler.values import Engine


class RandomChoice(Stateless):
    """A random engine."""

    sends_at_once = True

    def choose(self, context: DecisionContext) -> Choice:
        return by_cost(context, lambda _: 0.0)


class RoundRobin(Stateless):
    """One engine after the other."""

    sends_at_once = True

    def __init__(self) -> None:
        self._next = 0

    def choose(self, context: DecisionContext) -> Choice:
        engines = context.engines
        chosen = engines[self._next % len(engines)]
        self._next += 1
        return by_cost(context, lambda engine: float(engine is not chosen))


class LeastLoaded(Stateless):
    """The engine with the fewest prompt tokens still to compute."""

    sends_at_once = True

    def choose(self, context: DecisionContext) -> Choice:
        return by_cost(context, lambda engine: float(engine.queued_tokens))


class SessionHash(Stateless):
    """Always the same engine for a session, by rendezvous hashing: few sessions move when engines come and go."""

    sends_at_once = True

    def choose(self, context: DecisionContext) -> Choice:
        session = repr(context.request.session)

        def cost(engine: Engine) -> float:
            return -float(xxhash.xxh3_64_intdigest(f"{engine.name}\0{session}".encode()))

        return by_cost(context, cost)

"""The scheduler's state. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from kvpool.scheduler.cluster import Cluster
from kvpool.scheduler.decision_context import DecisionContext
from kvpool.scheduler.decode import Handover
from kvpool.scheduler.decodes import Answers
from kvpool.scheduler.fleet import Fleet
from kvpool.scheduler.index import Match, PrefixIndex
from kvpool.scheduler.orders import Orders, Sent
from kvpool.scheduler.policies import Policy
from kvpool.scheduler.queue import RequestQueue
from kvpool.scheduler.settings import Settings
from kvpool.scheduler.spreading import Spreading
from kvpool.scheduler.values import Engine, Order, Request, Saves


@dataclass(slots=True)
class State:
    """queue: waiting requests. orders: not computed yet. answers: requests from their first order on."""

    fleet: Fleet
    cluster: Cluster
    index: PrefixIndex
    policy: Policy
    rng: Random
    settings: Settings
    queue: RequestQueue
    orders: Orders
    answers: Answers
    spreading: Spreading

    def computing(self, request: Request) -> Sequence[Engine]:
        """The engines that may compute it."""
        if request.whole and self.settings.decodes:
            return self.decoding(request)
        answer = self.answers.get(request.ident)
        return self.fleet.computing(request, answer.avoid if answer is not None else ())

    def decoding(self, request: Request) -> Sequence[Engine]:
        """The engines that may decode it. One that has failed is avoided if another one is large enough."""
        answer = self.answers.get(request.ident)
        if answer is None or not answer.avoid:
            return self.fleet.decoding(request)
        for avoid in (answer.avoid, ()):
            found = self.fleet.decoding(request, avoid)
            if large := [each for each in found if each.capacity_tokens >= answer.needed]:
                return large
        return found

    def decision_context(
        self, request: Request, now: float, engines: Sequence[Engine], match: Match | None = None
    ) -> DecisionContext:
        """engines: those that may compute it, at least one."""
        match = match or self.index.match(request.keys, now)
        return DecisionContext(request, match, engines, self.cluster, self.rng, now)

    def with_answer(self, context: DecisionContext, decoders: Sequence[Engine]) -> None:
        """What a choice needs to know of decoding, and of replicas."""
        request, match = context.request, context.match
        differ = self.fleet.pairs_differ or self.cluster.links.differ
        if self.settings.decodes and (differ or request.whole):
            context.handover = self.handover(context, decoders)
        if reach := match.of(match.widest).reach:
            end, holders = request.keys[reach - 1], len(context.sources(match.widest)[1])
            context.spread = self.spreading.should_spread(end, holders, context.now)

    def handover(
        self, context: DecisionContext, decoders: Sequence[Engine], stored: int | None = None
    ) -> Handover:
        """stored: as `Handover` has it."""
        request, match, rule = context.request, context.match, self.settings.decode
        return Handover(request, match, decoders, self.cluster, rule, context.now, stored)

    def size_s(self, request: Request, done: int, engine: Engine) -> float:
        """Seconds in which an engine like this one computes the rest of its prompt."""
        kind = self.cluster.kinds[engine.kind]
        start = min(done, request.tokens - 1)
        return kind.prefill.prefill_s(start, request.tokens, kind.step_tokens)

    def stored(self, engine: Engine, saves: Saves) -> int:
        """How many of a prompt's blocks are in the pool, or on their way there, by what this engine says."""
        return saves.stored // self.cluster.kinds[engine.kind].block_tokens

    def void(self, orders: Sequence[Sent], now: float) -> None:
        """Remove orders: no more reports of them come."""
        for sent in orders:
            self.orders.take_back(sent, now, computed=False)
            self.index.unexpect(sent.order.estimate.engine.gpu, sent.order.request.keys)

    def see_places(self) -> None:
        """Take note of where the engines are, after one has come or gone."""
        engines = sorted(self.fleet.engines.values(), key=lambda engine: bool(engine.labels))
        self.cluster.links.lie({e.node: e.labels for e in engines if e.node})

    def blocks_done(self, order: Order) -> int:
        """How many blocks of its prompt exist when it is computed.

        Whole ones only; the last one of a prompt counts as in its chain.
        """
        keys = len(order.request.keys)
        if order.last:
            return keys
        # Not all kinds use the block size of its keys.
        block_tokens = self.cluster.kinds[order.estimate.engine.kind].block_tokens
        return min(keys, order.end // block_tokens)

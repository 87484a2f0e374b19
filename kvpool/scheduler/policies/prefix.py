"""Policies of other routers that weigh the prefix against the load."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from kvpool.scheduler.decision_context import DecisionContext
from kvpool.scheduler.policies.base import Choice, Stateless, by_cost
from kvpool.scheduler.values import Engine

REMEMBERED_MAX = 1 << 20
"""Blocks whose engine the approximate policy remembers; the least recent are forgotten."""


class ApproximatePrefix:
    """SGLang's gateway, `cache_aware`, with the defaults of its Python arguments.

    It knows only what it sent where. When requests in flight are imbalanced, max - min > 64 and
    max > 1.5 x min, the engine with the fewest; else, if more than 0.3 of the prompt was sent before, the
    engine that got the longest prefix last; else the one with the fewest.
    """

    sends_at_once = True
    counts_blocks = False

    def __init__(self, *, threshold: float = 0.3, absolute: int = 64, relative: float = 1.5):
        self._threshold = threshold
        self._absolute = absolute
        self._relative = relative
        self._sent: OrderedDict[Hashable, str] = OrderedDict()

    def choose(self, context: DecisionContext) -> Choice:
        loads = [engine.prefills for engine in context.engines]
        most, least = max(loads), min(loads)
        name = None
        if not (most - least > self._absolute and most > self._relative * least):
            matched = 0
            for key in context.request.keys:
                if key not in self._sent:
                    break
                matched += 1
                name = self._sent[key]
            if matched <= self._threshold * len(context.request.keys):
                name = None
        if name in {engine.name for engine in context.engines}:
            return by_cost(context, lambda engine: float(engine.name != name))
        return by_cost(context, lambda engine: float(engine.prefills))

    def sent(self, context: DecisionContext, engine: Engine) -> None:
        for key in context.request.keys:
            self._sent[key] = engine.name
            self._sent.move_to_end(key)
        while len(self._sent) > REMEMBERED_MAX:
            self._sent.popitem(last=False)


class DynamoLinear(Stateless):
    """Dynamo's `kv` router mode with its default weights: blocks to compute + blocks in use.

    cost = max((queued tokens + prompt) / block - credit, 0) + active blocks, with a credit of 1 for
    each block in the engine's cache, 0.75 in its host's memory and 0.25 on its disk. For prefill
    engines active blocks are those of the prompts in flight, this one's among them, each counted
    once, however many prompts share it. Its shared-cache credit is off by default, as here.
    """

    sends_at_once = True
    counts_blocks = True
    credits = (1.0, 0.75, 0.25)

    def choose(self, context: DecisionContext) -> Choice:
        return by_cost(
            context, lambda e: self.adjusted_prefill(context, e) + active_blocks(context, e)
        )

    def adjusted_prefill(self, context: DecisionContext, engine: Engine) -> float:
        lengths = context.match.lengths
        block = context.kind(engine).block_tokens
        raw = (engine.queued_tokens + context.request.tokens) / block
        have = credit = 0.0
        for holder, weight in zip((engine.gpu, *engine.tiers), self.credits, strict=False):
            length = lengths.get(holder, 0)
            if length > have:
                credit += weight * (length - have)
                have = length
        return max(raw - credit, 0.0)


class LMetric(DynamoLinear):
    """Dynamo's `lmetric` policy: the product, so that there is no weight to tune."""

    def choose(self, context: DecisionContext) -> Choice:
        return by_cost(
            context, lambda e: self.adjusted_prefill(context, e) * (active_blocks(context, e) + 1)
        )


def active_blocks(context: DecisionContext, engine: Engine) -> float:
    """Blocks in use on an engine if the request went there."""
    block = context.kind(engine).block_tokens
    new = sum(key not in engine.blocks for key in context.request.keys)
    return len(engine.blocks) + engine.context_tokens / block + new

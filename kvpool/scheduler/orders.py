"""Orders that engines have not computed yet, and their effect on the engines' counts."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from kvpool.scheduler.estimates import KindEstimates
from kvpool.scheduler.values import Engine, Order

_K = TypeVar("_K")


@dataclass(frozen=True, slots=True)
class Sent:
    """An order that is not computed yet. uncached: tokens. prefill_s: seconds to compute these alone; `work_s` of them
    grow with the tokens, the rest is that of steps, which prompts share. done: of the prompt, before it.
    """

    order: Order
    uncached: int
    prefill_s: float
    work_s: float
    done: int


class Orders:
    """Engines compute in steps, each with as many tokens as there is room for: of one prompt or of several. So how long
    an engine is busy follows from all tokens that were sent there.

    kinds: estimates by kind of engine. counts_blocks: whether to maintain `Engine.blocks`, for policies that use it.
    Not thread-safe.
    """

    def __init__(self, kinds: Mapping[str, KindEstimates], *, counts_blocks: bool) -> None:
        self._kinds = kinds
        self._counts_blocks = counts_blocks
        self._of_engine: dict[str, list[Sent]] = {}
        self._of_request: dict[Hashable, list[Sent]] = {}

    def add(self, sent: Sent, now: float) -> float:
        """It was sent to its engine; returns when the engine will start it."""
        order = sent.order
        engine = order.estimate.engine
        self._of_engine.setdefault(engine.name, []).append(sent)
        self._of_request.setdefault(order.request.ident, []).append(sent)
        begins = max(engine.free_at, now)
        if not engine.prefills:
            self._step_begins(engine, now, sent.uncached)
        engine.prefills += 1
        engine.queued_tokens += sent.uncached
        engine.work_s += sent.work_s
        engine.computing.add(sent.prefill_s, now)
        if self._counts_blocks:
            for key in order.request.keys:
                engine.blocks[key] = engine.blocks.get(key, 0) + 1
        engine.free_at = self._ends_at(engine)
        return min(begins, engine.free_at - sent.work_s)

    def of(self, ident: Hashable) -> list[Sent]:
        """All open orders of this request, in the order in which they were given."""
        return list(self._of_request.get(ident, ()))

    def on(self, engine: Engine) -> list[Sent]:
        """All open orders of this engine, in the order in which they were given."""
        return list(self._of_engine.get(engine.name, ()))

    def first(self, engine: Engine, ident: Hashable) -> Sent | None:
        """The engine's earliest order of this request."""
        mine = self._of_request.get(ident, ())
        return next((sent for sent in mine if sent.order.estimate.engine is engine), None)

    def take_back(self, sent: Sent, now: float, *, computed: bool) -> None:
        """Remove it from its engine."""
        request, engine = sent.order.request, sent.order.estimate.engine
        left = _drop(self._of_engine, engine.name, sent)
        _drop(self._of_request, request.ident, sent)
        engine.prefills -= 1
        engine.queued_tokens -= sent.uncached
        if self._counts_blocks:
            blocks = engine.blocks
            for key in request.keys:
                blocks[key] -= 1
                if not blocks[key]:
                    del blocks[key]
        engine.work_s = max(0.0, engine.work_s - sent.work_s) if left else 0.0
        before = engine.free_at
        if computed:
            # The next step has begun, with what there is room for.
            self._step_begins(engine, now, engine.queued_tokens)
        engine.free_at = self._ends_at(engine) if left else now
        if not computed:
            # If another order is void, the current one continues and does not start anew.
            engine.free_at = max(now, min(before, engine.free_at))

    def _step_begins(self, engine: Engine, now: float, tokens: int) -> None:
        engine.step_began = now
        engine.in_step = min(tokens, self.together(engine))

    def together(self, engine: Engine) -> int:
        """How many tokens of prompts the engine computes at a time."""
        return self._kinds[engine.kind].step_tokens * engine.steps_at_once

    def room(self, engine: Engine) -> int:
        """How many more tokens fit the engine's next step."""
        return self.together(engine) - (engine.queued_tokens - engine.in_step)

    def _ends_at(self, engine: Engine) -> float:
        """When all is computed that was sent there: what came during a step is in the next one, or in later ones."""
        steps = 1 + -(-max(0, engine.queued_tokens - engine.in_step) // self.together(engine))
        step_s = self._kinds[engine.kind].prefill.coefficients[0]
        return engine.step_began + steps * step_s + engine.work_s / engine.steps_at_once


def _drop(lists: dict[_K, list[Sent]], key: _K, sent: Sent) -> list[Sent]:
    left = [other for other in lists[key] if other is not sent]
    if left:
        lists[key] = left
    else:
        del lists[key]
    return left

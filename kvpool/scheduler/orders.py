"""Orders that engines have not computed yet, and their effect on the engines' counts."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeVar

from kvpool.scheduler.values import Engine, Order

_K = TypeVar("_K")


@dataclass(frozen=True, slots=True)
class Sent:
    """An order that is not computed yet. uncached: tokens. done: of the prompt, before it."""

    order: Order
    uncached: int
    prefill_s: float
    done: int


class Orders:
    """counts_blocks: whether to maintain `Engine.blocks`, for policies that use it. Not thread-safe."""

    def __init__(self, *, counts_blocks: bool) -> None:
        self._counts_blocks = counts_blocks
        self._of_engine: dict[str, list[Sent]] = {}
        self._of_request: dict[Hashable, list[Sent]] = {}

    def add(self, sent: Sent, now: float) -> float:
        """It was sent to its engine; returns when the engine will start it."""
        order = sent.order
        engine = order.estimate.engine
        self._of_engine.setdefault(engine.name, []).append(sent)
        self._of_request.setdefault(order.request.ident, []).append(sent)
        engine.prefills += 1
        engine.queued_tokens += sent.uncached
        engine.computing.add(sent.prefill_s, now)
        if self._counts_blocks:
            for key in order.request.keys:
                engine.blocks[key] = engine.blocks.get(key, 0) + 1
        begins = max(engine.free_at, now)
        engine.free_at = begins + sent.prefill_s
        return begins

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
        free_at = now + sum(other.prefill_s for other in left)
        # If another order is void, the current one continues and does not start anew.
        engine.free_at = free_at if computed else max(now, min(engine.free_at, free_at))


def _drop(lists: dict[_K, list[Sent]], key: _K, sent: Sent) -> list[Sent]:
    left = [other for other in lists[key] if other is not sent]
    if left:
        lists[key] = left
    else:
        del lists[key]
    return left

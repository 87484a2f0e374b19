"""Notes of one request: in its account, its trace, the metrics, and for its session's next turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kvpool.router.records.explain import Account
from kvpool.router.records.metrics import Metrics
from kvpool.router.requests.calls import Call
from kvpool.router.upstream.specs import EngineSpec
from kvpool.scheduler.values import Order
from kvpool.telemetry.spans import QUEUE, Span

USAGE_S = 1.0
"""The wait for an engine's word on the prompt that it has computed, once all of the answer is there."""


@dataclass(eq=False, repr=False, slots=True)
class RequestNotes:
    """See the module. Times are by `clock`."""

    account: Account
    span: Span | None
    """Of the request, or None if it is not traced."""
    streams: bool
    """Whether the client gets the answer in parts: else the time of its first token is not known."""
    clock: Callable[[], float]
    _metrics: Metrics
    _turn_answered: Callable[[frozenset[str]], None] = lambda _: None
    """Is told when a client has its answer: the nodes of the engines with the plugin that served it."""
    ttft_s: float | None = field(default=None, init=False)
    """Until the first token, or None if that is not known."""
    cached_tokens: int | None = field(default=None, init=False)
    """Of the prompt, as the engine `cached_at` said, which computed its beginning; or None if it did not."""
    cached_at: str = field(default="", init=False)
    answering: Call | None = field(default=None, init=False)
    """The call whose answer the client gets."""
    _nodes: set[str] = field(default_factory=set, init=False)
    _queue: Span | None = field(default=None, init=False)

    def note(self, event: str, **facts: Any) -> None:
        """Note an event in the account."""
        self.account.note(self.clock(), event, **facts)

    def waits(self) -> None:
        """Note that the request waits for an order."""
        if self.span is not None:
            self._queue = self.span.child(QUEUE)

    def waited_in_vain(self) -> None:
        """Note that the request has ended, if no order has come."""
        if self._queue is not None:
            self._queue.end("no order was given")

    def ordered(self, order: Order) -> None:
        """Note an order, and the end of the wait for the first one."""
        self.account.ordered(order, self.clock())
        if self.span is not None and self._queue is not None and not self._queue.ended:
            self._queue.end()
            each = order.request.tokens / max(len(order.request.keys), 1)
            self.span.set(
                cached_tokens_expected=int(order.estimate.cached * each),
                loaded_tokens_expected=int(order.estimate.loaded * each),
            )

    def computed(self, call: Call) -> None:
        """Note that the order of a call was carried out."""
        call.ended_at = self.clock()
        stored = {} if call.saves is None else {"stored_tokens": call.saves.stored}
        self.account.note(call.ended_at, "computed", engine=call.spec.name, **call.tokens, **stored)

    def served(self, spec: EngineSpec) -> None:
        """Note whose node has blocks of the session now."""
        if spec.namespace and spec.node:
            self._nodes.add(spec.node)

    def cached(self, call: Call) -> None:
        """Note what the first engine says that computed a part of the prompt: others find that part cached."""
        if self.cached_tokens is None:
            self.cached_tokens, self.cached_at = call.cached_tokens, call.spec.name

    def begun(self, call: Call) -> None:
        """Note the first part of the answer."""
        call.began_at = self.clock()
        self.account.note(call.began_at, "first token", engine=call.spec.name)
        ttft_s = call.began_at - self.account.arrived_s
        self.answering = call
        if self.streams:
            self.ttft_s = ttft_s
        if self.span is not None:
            self.span.set(engine=call.spec.name, ttft_s=ttft_s)
        self._metrics.time_to_first_token_seconds.observe(ttft_s)

    def answered(self, call: Call, took_s: float) -> None:
        """Note that the client has all of its answer, so long after the first part."""
        self.note("answered", engine=call.spec.name, **call.tokens)
        self.account.outcome = "answered"
        if call.order is not None:
            self.cached(call)
        if call.events > 1:
            self._metrics.time_per_output_token_seconds.observe(took_s / (call.events - 1))
        self.served(call.spec)
        self._turn_answered(frozenset(self._nodes))

    def broken_off(self, call: Call) -> None:
        """Note that the answer has ended with an error event."""
        self.note("failed", engine=call.spec.name, why="an error event")
        self.account.outcome = "broken_off"

    async def prompt_cached(self, call: Call, calls: Iterable[Call]) -> int | None:
        """See `AnswerListener`. An engine that follows may be done before the other's answer is here."""
        if self.cached_tokens is not None:
            return self.cached_tokens
        computing = [c for c in calls if not (c.answers or c.cancelled or c is call)]
        tasks = [c.task for c in computing if c.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=USAGE_S)
        said = [c.cached_tokens for c in computing if c.cached_tokens is not None]
        return said[0] if said else None

"""An engine: continuous batching and chunked prefill, step by step.

Each step has room for `step_tokens`: one for each request that decodes, the rest for prompts, in the order in
which they came, the first one as much as it can use. A step with prompts is simulated by itself; between
these, steps that only decode are simulated in one go, up to the next end or arrival.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice, takewhile
from typing import Protocol

from kvpool.scheduler.estimates import KindEstimates
from kvpool.scheduler.values import Engine, Order
from kvpool.simulator.events import Timeline
from kvpool.simulator.speeds import Speeds

LOOKS_AHEAD = 4
"""Prompts at the front of the queue whose blocks are being loaded; as many are looked up."""


@dataclass(slots=True, eq=False)
class Prefill:
    """A prompt to compute up to `order.end`. done: tokens that are in GPU memory."""

    order: Order
    done: int = 0
    asked: bool = False
    loaded: bool = False
    begun: bool = False


@dataclass(slots=True, eq=False)
class Decode:
    """A request that decodes. ends_at: the engine's step count with its last token."""

    ident: Hashable
    tokens: int  # of its whole context in the end
    output_tokens: int
    ends_at: int = 0


class EngineWorld(Protocol):
    """What an engine tells the cluster that it runs in."""

    def load(self, engine: SimulatedEngine, prefill: Prefill) -> None:
        """Look up what is there of the prompt, and bring it here; `ready` is called then."""

    def cached(self, engine: SimulatedEngine, prefill: Prefill) -> int:
        """How many tokens of the prompt are in the engine's own cache now."""

    def committed(self, engine: SimulatedEngine, keys: Sequence[Hashable], depth: int) -> None:
        """These blocks are computed."""

    def prefilled(self, engine: SimulatedEngine, prefill: Prefill) -> None: ...

    def decoded(self, engine: SimulatedEngine, decode: Decode) -> None: ...


class SimulatedEngine:
    """engine: what the scheduler knows it by."""

    def __init__(
        self,
        engine: Engine,
        speeds: Speeds,
        estimates: KindEstimates,
        timeline: Timeline,
        around: EngineWorld,
    ) -> None:
        self.engine = engine
        self._estimates = estimates
        self._timeline = timeline
        self._around = around
        self._step_tokens = estimates.step_tokens
        self._block_tokens = estimates.block_tokens
        self._step_s, self._token_s, self._attended_s = speeds.coefficients
        decode_s, self._decoded_s, self._context_s = speeds.decode_coefficients
        self._weights_s = max(0.0, decode_s - self._step_s)
        self._prefills: deque[Prefill] = deque()
        self._decodes: list[tuple[int, int, Decode]] = []  # a heap by `ends_at`
        self._waiting: deque[Decode] = deque()  # for memory, or for the next step
        self._reserved = 0
        self._context = 0  # tokens that the decoding requests attend to
        self._steps = 0
        self._count = 0
        self._began_at = 0.0
        self._burst = 0  # how many steps are under way in one go; 0: the engine is idle
        self._chunks: list[tuple[Prefill, int]] = []  # and the prompts in them
        self._version = 0
        self._ending = False
        self.busy_s = 0.0

    def submit(self, prefill: Prefill) -> None:
        """An order came."""
        self._prefills.append(prefill)
        self._ask()

    def ready(self, prefill: Prefill, done: int) -> None:
        """What could be loaded of a prompt is in GPU memory: so many tokens."""
        prefill.done = done
        prefill.loaded = True
        self._wake()

    def decode(self, decode: Decode) -> None:
        """A prompt's KV is here: it decodes as soon as there is memory."""
        self._waiting.append(decode)
        self._wake()

    def waits_s(self, prefill: Prefill) -> float:
        """Until the prompts before this one are computed, as far as estimates tell."""
        estimate = self._estimates.prefill
        before = takewhile(lambda other: other is not prefill, self._prefills)
        return sum(estimate.prefill_s(p.done, p.order.end, self._step_tokens) for p in before)

    def _ask(self) -> None:
        for prefill in islice(self._prefills, LOOKS_AHEAD):
            if not prefill.asked:
                prefill.asked = True
                self._around.load(self, prefill)

    def _wake(self) -> None:
        """There is something new for the next step, which begins when the one that runs has ended."""
        if self._ending:
            return
        if not self._burst:
            self._begin()
        elif self._burst > 1:
            passed = self._timeline.now - self._began_at
            steps = 1
            while steps < self._burst and self._burst_s(steps) < passed:
                steps += 1
            self._schedule(steps, self._burst_s(steps))

    def _burst_s(self, steps: int) -> float:
        """Seconds of so many steps that only decode, with the requests that decode now."""
        batch = len(self._decodes)
        first_s = self._step_s + max(self._weights_s, batch * self._token_s)
        first_s += batch * self._decoded_s
        context = steps * self._context + batch * steps * (steps - 1) / 2
        return steps * first_s + self._context_s * context

    def _schedule(self, steps: int, seconds: float) -> None:
        self._burst = steps
        self._version += 1
        self._timeline.at(self._began_at + seconds, self._end, self._version, seconds)

    def _admit(self) -> None:
        while self._waiting:
            decode = self._waiting[0]
            if self._decodes and self._reserved + decode.tokens > self.engine.capacity_tokens:
                break
            self._waiting.popleft()
            self._reserved += decode.tokens
            self._context += decode.tokens - decode.output_tokens + 1
            self._count += 1
            # Its first token came with the prefill.
            decode.ends_at = self._steps + decode.output_tokens - 1
            heappush(self._decodes, (decode.ends_at, self._count, decode))

    def _begin(self) -> None:
        self._admit()
        self._began_at = self._timeline.now
        room = self._step_tokens - len(self._decodes)
        tokens, attended, deepest = 0, 0.0, 0
        for prefill in self._prefills:
            if room <= 0:
                break
            if prefill.loaded:
                if not prefill.begun:
                    prefill.begun = True
                    prefill.done = max(prefill.done, self._cached(prefill))
                count = min(prefill.order.end - prefill.done, room)
                end = prefill.done + count
                self._chunks.append((prefill, end))
                room -= count
                tokens += count
                attended += count * (prefill.done + end) / 2
                deepest = max(deepest, end)
        if self._chunks:
            seconds = self._mixed_s(tokens, attended)
            if not self._decodes:
                self._estimates.prefill.observe(tokens, attended, deepest, seconds)
            self._schedule(1, seconds)
        elif self._decodes:
            steps = self._decodes[0][0] - self._steps
            self._schedule(steps, self._burst_s(steps))
            batch = len(self._decodes)
            self._estimates.decode.observe(batch, self._context, self._context, self._burst_s(1))

    def _cached(self, prefill: Prefill) -> int:
        """How much of a prompt is here when it begins, or will be after this step.

        A segment of its own that ends in this step counts: engines give blocks their place in the cache
        when they schedule them, so that what comes behind in the same step finds them.
        """
        ident, most = prefill.order.request.ident, prefill.order.end - 1
        ends = [end for other, end in self._chunks if other.order.request.ident == ident]
        return max(self._around.cached(self, prefill), min(max(ends, default=0), most))

    def _mixed_s(self, tokens: int, attended: float) -> float:
        """Seconds of one step with so many tokens of prompts, and whoever decodes."""
        arithmetic_s = (tokens + len(self._decodes)) * self._token_s + attended * self._attended_s
        reading_s = self._context_s * self._context + len(self._decodes) * self._decoded_s
        return self._step_s + max(arithmetic_s, self._weights_s) + reading_s

    def _end(self, version: int, seconds: float) -> None:
        if version != self._version:
            return  # a burst that was cut short
        self.busy_s += seconds
        self._steps += self._burst
        self._context += self._burst * len(self._decodes)
        self._burst = 0
        self._ending = True  # what others are told now may come back here
        chunks, self._chunks = self._chunks, []
        for prefill, end in chunks:
            self._advance(prefill, end)
        while self._decodes and self._decodes[0][0] <= self._steps:
            decode = heappop(self._decodes)[2]
            self._reserved -= decode.tokens
            self._context -= decode.tokens
            self._around.decoded(self, decode)
        self._ask()
        self._ending = False
        self._begin()

    def _advance(self, prefill: Prefill, end: int) -> None:
        request, block = prefill.order.request, self._block_tokens
        first = prefill.done // block
        prefill.done = end
        whole = end == request.tokens
        last = len(request.keys) if whole else end // block
        if last > first:
            self._around.committed(self, request.keys[first:last], first)
        if end == prefill.order.end:
            self._prefills.remove(prefill)
            self._around.prefilled(self, prefill)

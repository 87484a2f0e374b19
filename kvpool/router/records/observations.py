"""Measurements from orders and answers, for the estimates. No I/O.

The router sees an order from its sending to its answer. An engine computes prompts in steps, one after the
other, so the order's own time begins when the previous step was done; orders that are done together were computed
in one step, whose time is that of all their tokens. Computing takes the engine's steps, and loading comes before
them: an order with hardly any of one teaches the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvpool.router.upstream.specs import EngineSpec
from kvpool.scheduler.cluster import Cluster
from kvpool.scheduler.estimates import Error, KindEstimates, LoadEstimate, StepEstimate
from kvpool.scheduler.values import Engine, Estimate, Order, Saves

ASSUMED_PREFILL = (0.01, 1e-4, 2e-9)
ASSUMED_DECODE = (0.02, 2e-4, 1e-8)
"""Seconds a step, a token, and a token attended to, until there are measurements."""
ASSUMED_LOADS = {"dram": (0.002, 5e9), "ssd": (0.005, 1e9), "peer": (0.005, 1e9)}
"""Seconds, and bytes a second."""
BLOCK_TOKENS = 16
TOKEN_BYTES = 128 << 10
"""Of KV, if an engine does not announce it."""
LITTLE, MUCH = 0.1, 0.5
"""Expected shares of loading in an order's time: below, it teaches computing; above, loading."""
SAME_STEP = 0.2
"""Orders that are done within this share of a step's time after the first one were computed in it."""
EVENTS_MIN = 8
"""Minimum tokens of an answer to teach the time per token."""


def assumed(spec: EngineSpec) -> KindEstimates:
    """Assumptions for the first engine of a kind."""
    estimates = KindEstimates(
        StepEstimate(ASSUMED_PREFILL),
        StepEstimate(ASSUMED_DECODE),
        {tier: LoadEstimate(*speed) for tier, speed in ASSUMED_LOADS.items()},
        spec.step_tokens,
        BLOCK_TOKENS,
        BLOCK_TOKENS * TOKEN_BYTES,
    )
    refine(estimates, spec)
    return estimates


def refine(estimates: KindEstimates, spec: EngineSpec) -> None:
    """With the sizes that an engine of the kind announces."""
    estimates.step_tokens = spec.step_tokens
    if spec.hashing is not None:
        estimates.block_tokens = spec.hashing.block_tokens
        estimates.block_bytes = estimates.block_tokens * TOKEN_BYTES
    if spec.block_bytes:
        estimates.block_bytes = spec.block_bytes


@dataclass(frozen=True, slots=True)
class Measured:
    """Of an order that was carried out. sent_at: when it was sent. cached_tokens: of its prompt, as the engine says;
    None: it does not say. timed: its prompt has just been computed; the end of an answer that is not streamed does not
    show when that was. saves: what the engine says of the prompt's blocks; None: it does not say.
    """

    sent_at: float
    cached_tokens: int | None
    timed: bool
    saves: Saves | None = None


class Observer(Protocol):
    """Learns from the durations of calls; see `Observing`."""

    def computed(self, order: Order, measured: Measured) -> None: ...
    def answered(self, engine: Engine, tokens: int, took_s: float) -> None: ...
    def errors(self) -> Mapping[str, Mapping[str, Error]]: ...


@dataclass(slots=True)
class _Step:
    """What an engine computed together. orders: (its estimate, tokens that were cached, its last token) each."""

    kind: KindEstimates
    began_at: float
    ended_at: float
    seen: bool = True
    orders: list[tuple[Estimate, int, int]] = field(default_factory=list)

    def includes(self, now: float) -> bool:
        """Whether what is done now was computed in it."""
        return now - self.ended_at <= SAME_STEP * (self.ended_at - self.began_at)

    def teach(self) -> None:
        """Once."""
        orders, self.orders = self.orders, []
        took_s = self.ended_at - self.began_at
        if orders and self.seen and took_s > 0:
            learn_step(self.kind, orders, took_s)


class Observing:
    """See the module. cluster: whose estimates learn."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._clock = clock
        self._steps: dict[str, _Step] = {}  # by engine: the last one

    def computed(self, order: Order, measured: Measured) -> None:
        """An order is done: its prompt, or part of it, is computed."""
        now = self._clock()
        estimate = order.estimate
        name = estimate.engine.name
        kind = self._cluster.kinds[estimate.engine.kind]
        cached = measured.cached_tokens
        if cached is None:
            cached = estimate.cached * kind.block_tokens
        step = self._steps.get(name)
        if step is None or not step.includes(now):
            if step is not None:
                step.teach()
            began_at = measured.sent_at
            if step is not None:
                began_at = max(began_at, step.ended_at)
            self._steps[name] = step = _Step(kind, began_at, now)
        step.seen = step.seen and measured.timed
        step.orders.append((estimate, cached, order.end))

    def answered(self, engine: Engine, tokens: int, took_s: float) -> None:
        """An answer has ended; so many tokens came in this time, after the first one. engine: its current state, still
        including this answer.
        """
        if engine.decodes and tokens + 1 >= EVENTS_MIN:
            learn_token(self._cluster.kinds[engine.kind], engine, took_s / tokens)

    def errors(self) -> dict[str, dict[str, Error]]:
        """Errors of the estimates, by kind of engine and quantity; for metrics."""
        now = self._clock()
        for step in self._steps.values():
            if not step.includes(now):
                step.teach()
        return {
            name: {
                "prefill": kind.prefill.error,
                "decode": kind.decode.error,
                **{f"load_{tier}": load.error for tier, load in kind.loads.items()},
            }
            for name, kind in self._cluster.kinds.items()
        }


def learned(cluster: Cluster) -> dict[str, Any]:
    """What was learned of each kind of engines, in plain values: for planning.

    error: of estimates, relative. loads: bytes a second by tier, of those that were measured, here or by daemons.
    """
    pulls = {} if cluster.links.bytes_s is None else {"peer": cluster.links.bytes_s}
    return {
        name: {
            "prefill": _plain(kind.prefill),
            "decode": _plain(kind.decode),
            "loads": {
                tier: 1 / load.per_byte_s
                for tier, load in kind.loads.items()
                if load.learned and load.per_byte_s
            }
            | pulls,
            "step_tokens": kind.step_tokens,
            "block_tokens": kind.block_tokens,
            "block_bytes": kind.block_bytes,
        }
        for name, kind in cluster.kinds.items()
    }


def _plain(fit: StepEstimate) -> dict[str, Any]:
    error = fit.error
    return {"coefficients": fit.coefficients, "count": error.count, "error": error.mean}


def learn_step(
    kind: KindEstimates, orders: Sequence[tuple[Estimate, int, int]], took_s: float
) -> None:
    """Tokens `cached` to `end` of prompts were computed, and the estimated blocks loaded, in this time."""
    orders = [(estimate, cached, end) for estimate, cached, end in orders if cached < end]
    tokens = sum(end - cached for _, cached, end in orders)
    if not tokens:
        return
    attended = sum((end - cached) * (cached + end) / 2 for _, cached, end in orders)
    steps = -(-tokens // kind.step_tokens)
    expected_s = sum(
        kind.prefill.prefill_s(cached, end, kind.step_tokens) for _, cached, end in orders
    )
    load_s = max(estimate.load_s for estimate, _, _ in orders)
    share = load_s / (load_s + expected_s)
    if share < LITTLE:
        deepest = max(end for _, _, end in orders)
        kind.prefill.observe(tokens // steps, attended / steps, deepest, took_s / steps)
    elif len(orders) == 1 and share > MUCH and took_s > expected_s:
        ((estimate, _, _),) = orders
        blocks = estimate.pulled or estimate.loaded
        nbytes = blocks * kind.block_bytes
        load = kind.loads["peer"] if estimate.pulled else _own_tier(kind, nbytes, estimate.load_s)
        if estimate.link is not None and estimate.link.age_s is not None:
            # The daemons learn, not the router.
            load.error.note(estimate.link.seconds(nbytes), took_s - expected_s)
        else:
            load.observe(nbytes, 0.0, took_s - expected_s)


def _own_tier(kind: KindEstimates, nbytes: int, load_s: float) -> LoadEstimate:
    """The tier of the own node with this expected time."""
    own = [load for tier, load in kind.loads.items() if tier != "peer"]
    return min(own, key=lambda load: abs(load.seconds(nbytes) - load_s))


def learn_token(kind: KindEstimates, engine: Engine, seconds: float) -> None:
    """A token took this long there, with the other decoding requests."""
    deepest = engine.context_tokens // engine.decodes
    kind.decode.observe(engine.decodes, float(engine.context_tokens), deepest, seconds)

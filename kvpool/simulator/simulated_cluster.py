"""The simulated cluster: nodes with tiers and links, engines, the real scheduler, and the events among them.

A request's way: it arrives → the scheduler orders (at once or later) → the engine has its blocks looked up
when it is among the first in its queue, as the daemon next to it would, in what the pool really holds → they
are loaded and pulled, over links that others use too → its prompt is computed, and each block is put into
the node's memory as it is done → its KV goes to the engine that decodes it.

What is left out: the copy of computed blocks to memory (it overlaps with computing), failures, requests that
are cancelled, and blocks that decoding makes (a trace does not say which these are).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from kvpool.scheduler.cluster import Cluster, Traffic
from kvpool.scheduler.estimates import KindEstimates, LoadEstimate, StepEstimate
from kvpool.scheduler.index import PrefixIndex
from kvpool.scheduler.policies import make_policy
from kvpool.scheduler.queue import FIFO
from kvpool.scheduler.roles import REBALANCE_S
from kvpool.scheduler.scheduler import Scheduler
from kvpool.scheduler.values import DecodeOrder, Engine, Order, Request, Role
from kvpool.simulator.engine import Decode, Prefill, SimulatedEngine
from kvpool.simulator.events import Timeline
from kvpool.simulator.pool import LATENCY_S, Load, Pool
from kvpool.simulator.shape import Shape

KIND = "engine"
ORDER_TOKEN_S = 1e-7
"""To hand over a token of a prompt, with each order for it."""
FOLLOWS_MAX = 64
"""Prompts that a node follows at a time, as daemons do."""
TOLD_S = 5.0
"""How often the scheduler is told what daemons have measured."""


@dataclass(slots=True)
class Outcome:
    """What became of one request. Times are since its arrival; None where it did not get so far."""

    request: Request
    engine: str = ""
    rejected: str = ""
    ttft_s: float | None = None
    done_s: float | None = None
    decoded: bool = False
    orders: int = 0
    hit_blocks: int = 0
    pulled_blocks: int = 0

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token after the first one; None where it was not decoded."""
        tokens = self.request.output_tokens - 1
        if not self.decoded or self.done_s is None or self.ttft_s is None:
            return None
        return (self.done_s - self.ttft_s) / tokens


class NoisyStep(StepEstimate):
    """Estimated prefill times are off by a factor of each prompt length's own."""

    def __init__(self, assumed: tuple[float, float, float], sigma: float) -> None:
        super().__init__(assumed)
        self._sigma = sigma

    def prefill_s(self, start: int, end: int, step_tokens: int) -> float:
        factor = math.exp(self._sigma * Random(end).gauss(0.0, 1.0))
        return factor * super().prefill_s(start, end, step_tokens)


def estimates_of(shape: Shape) -> KindEstimates:
    """Return what is known of the engines at the start."""
    hardware = shape.speeds.hardware
    # What a newcomer would assume: the profile without attention and overhead. The rest is learnt.
    assumed = (0.0, shape.speeds.coefficients[1], 0.0)
    prefill = NoisyStep(assumed, shape.noise) if shape.noise else StepEstimate(assumed)
    return KindEstimates(
        prefill,
        StepEstimate(shape.speeds.decode_coefficients),
        {
            "dram": LoadEstimate(LATENCY_S["dram"], hardware.host_bytes_s),
            "ssd": LoadEstimate(LATENCY_S["ssd"], hardware.ssd_bytes_s),
            "peer": LoadEstimate(LATENCY_S["peer"], shape.bytes_s),
        },
        shape.step_tokens,
        shape.block_tokens,
        shape.block_bytes,
    )


class Simulation:
    """One run. `run` may be called once."""

    def __init__(self, shape: Shape, requests: Sequence[Request]) -> None:
        self._shape = shape
        self._requests = requests
        self.timeline = Timeline()
        self.estimates = estimates_of(shape)
        self.index = PrefixIndex()
        self.pool = Pool(shape, self.timeline, self.index, self.estimates)
        self._engines: dict[str, SimulatedEngine] = {}
        views = self._build()
        pulled_from = {holder: view.node for view in views for holder in view.tiers if shape.shared}
        self._cluster = cluster = Cluster({KIND: self.estimates}, pulled_from, Traffic())
        policy = make_policy(shape.policy)
        self._decodes = shape.decode + shape.mixed > 0
        settings = replace(shape.settings, decodes=self._decodes)
        if shape.queued:
            policy.sends_at_once = False
        if shape.fifo or policy.sends_at_once:
            settings = replace(settings, queue=FIFO, segment_s=0.0)
        self._scheduler = Scheduler(
            views, cluster, self.index, policy, Random(shape.seed), settings
        )
        self._outcomes: dict[Hashable, Outcome] = {}
        self._decode_at: dict[Hashable, Engine | None] = {}
        self._wakes_at = math.inf
        self.finished = 0
        self.role_changes = 0

    def run(self, progress: Callable[[int], None] | None = None) -> list[Outcome]:
        """Simulate until every request has ended. progress: is told now and then how many have."""
        for request in self._requests:
            self.timeline.at(request.arrived_s, self._arrive, request)
        if self._shape.flexible and self._requests:
            self.timeline.at(self._requests[0].arrived_s, self._rebalance)
        if self._shape.measured and self._requests:
            self.timeline.at(self._requests[0].arrived_s, self._tell_links)
        steps = 0
        while self.timeline.next_at < math.inf:
            self.timeline.step()
            self._poll()
            steps += 1
            if progress is not None and steps % 1000 == 0:
                progress(self.finished)
        assert self.finished == len(self._requests), "a request was lost"
        return [self._outcomes[request.ident] for request in self._requests]

    @property
    def busy_s(self) -> dict[str, float]:
        """Of each engine, seconds in which it computed."""
        return {name: engine.busy_s for name, engine in self._engines.items()}

    def _build(self) -> list[Engine]:
        shape = self._shape
        pooled = shape.prefill + shape.mixed + (shape.decode if shape.flexible else 0)
        dram = shape.pool_tokens // shape.block_tokens // pooled
        ssd = shape.ssd_tokens // shape.block_tokens // pooled
        roles = [
            *[("prefill", Role.PREFILL)] * shape.prefill,
            *[("mixed", Role.BOTH)] * shape.mixed,
            *[("decode", Role.DECODE)] * shape.decode,
        ]
        views = []
        for number, (label, role) in enumerate(roles):
            name = f"{label}-{number}"
            computes = Role.PREFILL in role or shape.flexible
            node = self.pool.add(name, dram if computes else 0, ssd if computes else 0)
            tiers = (f"dram:{name}", f"ssd:{name}") if ssd else (f"dram:{name}",)
            gpu = f"gpu:{name}"
            view = Engine(
                name,
                name,
                role,
                KIND,
                gpu,
                tiers,
                shape.speeds.gpu_tokens,
                labels=node.labels,
                follows_max=FOLLOWS_MAX,
                flexible=shape.flexible and role is not Role.BOTH,
            )
            self.index.join(gpu, pool=False)
            for tier in view.tiers:
                self.index.join(tier, pool=shape.shared)
            self._engines[name] = SimulatedEngine(
                view, shape.speeds, self.estimates, self.timeline, self
            )
            views.append(view)
        return views

    def _arrive(self, request: Request) -> None:
        outcome = Outcome(request)
        self._outcomes[request.ident] = outcome
        refused = self._scheduler.submit(request, self.timeline.now)
        if refused is not None:
            outcome.rejected = refused.reason
            self.finished += 1

    def _poll(self) -> None:
        now = self.timeline.now
        for order in self._scheduler.poll(now):
            if isinstance(order, DecodeOrder):
                sent_at = now + self._shape.order_s
                self.timeline.at(sent_at, self._hand_over, order.request, order.engine)
                continue
            outcome = self._outcomes[order.request.ident]
            outcome.orders += 1
            outcome.engine = order.estimate.engine.name
            if order.whole or order.follow:
                self._decode_at[order.request.ident] = order.decode
            sent_at = now + self._shape.order_s + order.end * ORDER_TOKEN_S
            self.timeline.at(sent_at, self._engines[outcome.engine].submit, Prefill(order))
        wake_at = self._scheduler.wake_at()
        if now < wake_at < math.inf and wake_at != self._wakes_at:
            self._wakes_at = wake_at
            self.timeline.at(wake_at, self._wake, wake_at)

    def _wake(self, wake_at: float) -> None:
        """The next poll is what this is for."""
        if self._wakes_at == wake_at:
            self._wakes_at = math.inf

    def _rebalance(self) -> None:
        now = self.timeline.now
        self.role_changes += self._scheduler.rebalance(now) is not None
        if self.finished < len(self._requests):
            self.timeline.at(now + REBALANCE_S, self._rebalance)

    def _tell_links(self) -> None:
        now = self.timeline.now
        told = {name: ("", node.peers.links(now)) for name, node in self.pool.nodes.items()}
        self._cluster.links.told(told)
        if self.finished < len(self._requests):
            self.timeline.at(now + TOLD_S, self._tell_links)

    # What engines say, `EngineWorld`.

    def load(self, engine: SimulatedEngine, prefill: Prefill) -> None:
        node = self.pool.nodes[engine.engine.name]
        order = prefill.order
        keys = order.request.keys
        have = node.gpu.prefix(keys)
        loads = self._worth(engine, prefill, have, self.pool.sources(node, keys, have))
        node.gpu.touch(keys[:have])
        end = loads[-1].end if loads else have
        node.read(keys[:end])
        for load in loads:
            if load.source is not None:
                load.source.read(keys[load.first : load.end])
        outcome = self._outcomes[order.request.ident]
        if not outcome.hit_blocks and outcome.orders == 1:
            outcome.hit_blocks = end
        if not loads:
            engine.ready(prefill, min(have * self._shape.block_tokens, order.end - 1))
            return
        left = [len(loads)]

        def arrived(load: Load) -> None:
            left[0] -= 1
            pulled = load.kind == "peer"
            outcome.pulled_blocks += pulled * (load.end - load.first)
            if load.kind != "dram":
                self.pool.put(node, keys[load.first : load.end], load.first, copy=pulled)
            if not left[0]:
                self.pool.to_gpu(node, keys[have:end], have)
                engine.ready(prefill, min(end * self._shape.block_tokens, order.end - 1))

        for load in loads:
            self.pool.start(load, arrived)

    def cached(self, engine: SimulatedEngine, prefill: Prefill) -> int:
        blocks = self.pool.nodes[engine.engine.name].gpu.prefix(prefill.order.request.keys)
        return min(blocks * self._shape.block_tokens, prefill.order.end - 1)

    def committed(self, engine: SimulatedEngine, keys: Sequence[Hashable], depth: int) -> None:
        node = self.pool.nodes[engine.engine.name]
        self.pool.to_gpu(node, keys, depth)
        self.pool.put(node, keys, depth, copy=False)

    def prefilled(self, engine: SimulatedEngine, prefill: Prefill) -> None:
        order = prefill.order
        outcome = self._outcomes[order.request.ident]
        now = self.timeline.now
        heard_at = now + self._shape.order_s
        self.timeline.at(heard_at, self._reported, engine.engine, order)
        if not order.last:
            return
        request = order.request
        outcome.ttft_s = now - request.arrived_s
        decode = self._decode_at.pop(request.ident, None)
        if decode is not None and request.output_tokens > 1:
            self._hand_over(request, decode)

    def _hand_over(self, request: Request, decode: Engine) -> None:
        """From where its prompt was computed."""
        computed_by = self._outcomes[request.ident].engine
        target = self._engines[decode.name]
        entry = Decode(request.ident, request.tokens + request.output_tokens, request.output_tokens)
        if decode.name == computed_by:
            target.decode(entry)
            return
        source, node = self.pool.nodes[computed_by], self.pool.nodes[decode.name]
        nbytes = request.tokens * self._shape.speeds.model.kv_bytes
        self.pool.send(source, node, nbytes, partial(target.decode, entry))

    def decoded(self, engine: SimulatedEngine, decode: Decode) -> None:
        outcome = self._outcomes[decode.ident]
        outcome.decoded = True
        self._finish(outcome.request)

    def _reported(self, engine: Engine, order: Order) -> None:
        request = order.request
        self._scheduler.computed(engine, request.ident, self.timeline.now)
        if order.last and (not self._decodes or request.output_tokens == 1):
            self._finish(request)

    def _finish(self, request: Request) -> None:
        self._outcomes[request.ident].done_s = self.timeline.now - request.arrived_s
        self._scheduler.finished(request.ident)
        self.finished += 1

    def _worth(
        self, engine: SimulatedEngine, prefill: Prefill, have: int, loads: list[Load]
    ) -> list[Load]:
        """So many of the runs as bring the first token soonest; what is behind them is computed."""
        kind, now = self.estimates, self.timeline.now
        tokens, block = prefill.order.end, kind.block_tokens

        def prefill_s(blocks: int) -> float:
            return kind.prefill.prefill_s(min(blocks * block, tokens - 1), tokens, kind.step_tokens)

        waits = engine.waits_s(prefill)
        best_s, best, load_s = waits + prefill_s(have), 0, 0.0
        for number, load in enumerate(loads, 1):
            ahead = max(link.bytes_ahead(now) for link in load.links)
            # Several sources work at the same time.
            load_s = max(load_s, kind.loads[load.kind].seconds(load.nbytes, ahead))
            ttft_s = max(waits, load_s) + prefill_s(load.end)
            if ttft_s < best_s:
                best_s, best = ttft_s, number
        return loads[:best]

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
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from kvpool.errors import ConfigError
from kvpool.placement.peers import Peers
from kvpool.scheduler.cluster import Cluster, Traffic
from kvpool.scheduler.estimates import KindEstimates, LoadEstimate, StepEstimate
from kvpool.scheduler.index import PrefixIndex
from kvpool.scheduler.policies import DEFAULT_POLICY, make_policy
from kvpool.scheduler.queue import FIFO
from kvpool.scheduler.roles import REBALANCE_S
from kvpool.scheduler.scheduler import Scheduler, Settings
from kvpool.scheduler.values import DecodeOrder, Engine, Order, Request, Role
from kvpool.simulator.engine import Decode, Prefill, SimulatedEngine
from kvpool.simulator.events import Timeline
from kvpool.simulator.links import Link, Network
from kvpool.simulator.node import Tier
from kvpool.simulator.speeds import Speeds
from kvpool.simulator.traces import BLOCK_TOKENS
from kvpool.storage.eviction import Costs

KIND = "engine"
ORDER_TOKEN_S = 1e-7
"""To hand over a token of a prompt, with each order for it."""
LATENCY_S = {"dram": 0.0001, "ssd": 0.0005, "peer": 0.001}
FOLLOWS_MAX = 64
"""Prompts that a node follows at a time, as daemons do."""
TOLD_S = 5.0
"""How often the scheduler is told what daemons have measured."""
SOURCES_MAX = 4
"""From how many nodes one prompt's blocks are pulled, at most."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What is simulated. prefill, decode, mixed: how many engines of each role, each on its own node.

    Without decode or mixed engines, requests end with their first token. flexible: those for prefill and those for
    decode may change sides, after the load. fifo: requests wait in the order of arrival, and are computed whole.
    queued: they wait in the scheduler, as kvpool's do, whichever policy chooses their engine. pool_tokens: memory
    of all nodes that compute prompts, or may, together; ssd_tokens the same of their disks. shared: whether nodes
    can pull from each other. network_bytes_s: instead of the profile's. lag_s: from an event to the scheduler's
    index. slow: bytes a second from one node to another, by their names, where that is less; labels: of nodes. measured: whether daemons
    measure their pulls and the scheduler is told. order_s: from the scheduler to an engine and back, each way, and more for each token that is sent. noise:
    the standard deviation of the logarithm of a factor on estimated prefill times.
    """

    speeds: Speeds
    prefill: int = 16
    decode: int = 0
    mixed: int = 0
    flexible: bool = False
    policy: str = DEFAULT_POLICY
    fifo: bool = False
    queued: bool = False
    settings: Settings = field(default_factory=Settings)
    pool_tokens: int = 50_000_000
    ssd_tokens: int = 0
    eviction: str = "aged"
    shared: bool = True
    network_bytes_s: float = 0.0
    slow: Mapping[tuple[str, str], float] = field(default_factory=dict)
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    measured: bool = False
    step_tokens: int = 2048
    block_tokens: int = BLOCK_TOKENS
    lag_s: float = 0.05
    order_s: float = 0.001
    noise: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.prefill + self.mixed < 1:
            raise ConfigError("a cluster needs an engine that computes prompts")
        if min(self.prefill, self.decode, self.mixed, self.pool_tokens, self.ssd_tokens) < 0:
            raise ConfigError("counts and capacities cannot be negative")
        if min(self.lag_s, self.order_s, self.noise, self.network_bytes_s) < 0:
            raise ConfigError("lag, the time of an order, noise and bandwidth cannot be negative")
        if self.step_tokens < 1:
            raise ConfigError("steps need at least one token")


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


class _Node:
    """A machine: its tiers, its links, the engine on it."""

    def __init__(self, name: str, number: int, shape: Shape, dram: int, ssd: int) -> None:
        self.name = name
        self.bit = 1 << number
        self.incarnation = number.to_bytes(8)
        self.labels = shape.labels.get(name, {})
        self.peers = Peers(self.labels, Random(number))
        hardware = shape.speeds.hardware
        network = shape.network_bytes_s or hardware.network_bytes_s
        block = shape.block_tokens * shape.speeds.model.kv_bytes
        self.out = Link(network)
        self.into = Link(network)
        self.host = Link(hardware.host_bytes_s)
        self.disk = Link(hardware.ssd_bytes_s)
        _, token_s, attended_s = shape.speeds.coefficients
        block_s = shape.block_tokens * token_s
        growth_s = shape.block_tokens**2 * attended_s
        ssd_s = block / hardware.ssd_bytes_s
        dram_costs = Costs(block / hardware.host_bytes_s, ssd_s if ssd else None, block_s, growth_s)
        self.gpu = Tier(shape.speeds.gpu_tokens // shape.block_tokens, "lru")
        self.dram = Tier(dram, shape.eviction, dram_costs)
        self.ssd = Tier(ssd, shape.eviction, Costs(ssd_s, None, block_s, growth_s))

    def local(self, keys: Sequence[Hashable], start: int) -> int:
        """How far the chain goes on from there in its memory or on its disks."""
        dram, ssd = self.dram.held, self.ssd.held
        for position in range(start, len(keys)):
            if keys[position] not in dram and keys[position] not in ssd:
                return position
        return len(keys)

    def read(self, keys: Sequence[Hashable]) -> None:
        """They were read here, each from the fastest tier that has it."""
        self.dram.touch(keys)
        self.ssd.touch([key for key in keys if key not in self.dram.held])


@dataclass(slots=True)
class _Load:
    """One source's part of what is loaded for a prompt: blocks `first` to `end` of its chain.

    source, target: the other node and this one, for pulls.
    """

    first: int
    end: int
    kind: str
    nbytes: int
    links: tuple[Link, ...]
    source: _Node | None = None
    target: _Node | None = None


class Simulation:
    """One run. `run` may be called once."""

    def __init__(self, shape: Shape, requests: Sequence[Request]) -> None:
        self._shape = shape
        self._requests = requests
        self.timeline = Timeline()
        self._network = Network(self.timeline)
        self._index = PrefixIndex()
        self._held: dict[Hashable, int] = {}  # which nodes can be pulled from, as bits
        self._block_bytes = shape.block_tokens * shape.speeds.model.kv_bytes
        self._kind = self._estimates()
        self._nodes: dict[str, _Node] = {}
        self._slow = {pair: Link(bytes_s) for pair, bytes_s in shape.slow.items()}
        self._by_bit: dict[int, _Node] = {}
        self._engines: dict[str, SimulatedEngine] = {}
        views = self._build()
        pulled_from = {holder: view.node for view in views for holder in view.tiers if shape.shared}
        self._cluster = cluster = Cluster({KIND: self._kind}, pulled_from, Traffic())
        policy = make_policy(shape.policy)
        self._decodes = shape.decode + shape.mixed > 0
        settings = replace(shape.settings, decodes=self._decodes)
        if shape.queued:
            policy.sends_at_once = False
        if shape.fifo or policy.sends_at_once:
            settings = replace(settings, queue=FIFO, segment_s=0.0)
        self._scheduler = Scheduler(
            views, cluster, self._index, policy, Random(shape.seed), settings
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

    @property
    def estimates(self) -> KindEstimates:
        return self._kind

    def _estimates(self) -> KindEstimates:
        shape = self._shape
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
                "peer": LoadEstimate(
                    LATENCY_S["peer"], shape.network_bytes_s or hardware.network_bytes_s
                ),
            },
            shape.step_tokens,
            shape.block_tokens,
            self._block_bytes,
        )

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
            node = _Node(name, number, shape, dram if computes else 0, ssd if computes else 0)
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
            self._index.join(gpu, pool=False)
            for tier in view.tiers:
                self._index.join(tier, pool=shape.shared)
            self._nodes[name] = self._by_bit[node.bit] = node
            self._engines[name] = SimulatedEngine(
                view, shape.speeds, self._kind, self.timeline, self
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
        told = {name: ("", node.peers.links(now)) for name, node in self._nodes.items()}
        self._cluster.links.told(told)
        if self.finished < len(self._requests):
            self.timeline.at(now + TOLD_S, self._tell_links)

    def _between(self, source: _Node, target: _Node) -> list[Link]:
        slow = self._slow.get((source.name, target.name))
        return [source.out, target.into, *([] if slow is None else [slow])]

    def _pulled(self, source: _Node, target: _Node, nbytes: int, began_at: float) -> None:
        """The target's daemon has seen how long it took."""
        peers, now = target.peers, self.timeline.now
        if peers.get(source.incarnation) is None:
            peers.met(source.incarnation, source.labels, place=(source.name, ""))
        peers.finished(source.incarnation, nbytes, now - began_at, now)

    # What engines say, `EngineWorld`.

    def load(self, engine: SimulatedEngine, prefill: Prefill) -> None:
        node = self._nodes[engine.engine.name]
        order = prefill.order
        keys = order.request.keys
        have = node.gpu.prefix(keys)
        loads = self._worth(engine, prefill, have, self._sources(node, keys, have))
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

        def arrived(load: _Load) -> None:
            left[0] -= 1
            pulled = load.kind == "peer"
            outcome.pulled_blocks += pulled * (load.end - load.first)
            if load.kind != "dram":
                self._put(node, keys[load.first : load.end], load.first, copy=pulled)
            if not left[0]:
                self._to_gpu(node, keys[have:end], have)
                engine.ready(prefill, min(end * self._shape.block_tokens, order.end - 1))

        for load in loads:
            self._start(load, arrived)

    def cached(self, engine: SimulatedEngine, prefill: Prefill) -> int:
        blocks = self._nodes[engine.engine.name].gpu.prefix(prefill.order.request.keys)
        return min(blocks * self._shape.block_tokens, prefill.order.end - 1)

    def committed(self, engine: SimulatedEngine, keys: Sequence[Hashable], depth: int) -> None:
        node = self._nodes[engine.engine.name]
        self._to_gpu(node, keys, depth)
        self._put(node, keys, depth, copy=False)

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
        source, node, now = self._nodes[computed_by], self._nodes[decode.name], self.timeline.now
        nbytes = request.tokens * self._shape.speeds.model.kv_bytes

        def arrived() -> None:
            self._pulled(source, node, nbytes, now)
            target.decode(entry)

        self._network.start(nbytes, self._between(source, node), arrived)

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

    def _sources(self, node: _Node, keys: Sequence[Hashable], have: int) -> list[_Load]:
        """What could be loaded of the prefix behind `have` blocks, run by run, from whom."""
        loads: list[_Load] = []
        end = node.local(keys, have)
        if end > have:
            loads.append(self._local(node, keys, have, end))
        while self._shape.shared and len(loads) <= SOURCES_MAX and end < len(keys):
            first, holders = end, ~node.bit
            while end < len(keys) and (still := holders & self._held.get(keys[end], 0)):
                holders = still
                end += 1
            if end == first:
                break
            source = self._least_busy(holders)
            nbytes = (end - first) * self._block_bytes
            links = [*self._between(source, node), node.host]
            if any(key not in source.dram.held for key in keys[first:end]):
                links.append(source.disk)
            loads.append(_Load(first, end, "peer", nbytes, tuple(links), source, node))
        return loads

    def _local(self, node: _Node, keys: Sequence[Hashable], first: int, end: int) -> _Load:
        """What this node has itself. What is on disk is slower than the rest, and alone counts then."""
        on_disk = sum(key not in node.dram.held for key in keys[first:end])
        if on_disk:
            nbytes = on_disk * self._block_bytes
            return _Load(first, end, "ssd", nbytes, (node.disk, node.host))
        return _Load(first, end, "dram", (end - first) * self._block_bytes, (node.host,))

    def _least_busy(self, holders: int) -> _Node:
        best: _Node | None = None
        while holders:
            bit = holders & -holders
            holders ^= bit
            node = self._by_bit[bit]
            if best is None or len(node.out.transfers) < len(best.out.transfers):
                best = node
        assert best is not None
        return best

    def _worth(
        self, engine: SimulatedEngine, prefill: Prefill, have: int, loads: list[_Load]
    ) -> list[_Load]:
        """So many of the runs as bring the first token soonest; what is behind them is computed."""
        kind, now = self._kind, self.timeline.now
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

    def _start(self, load: _Load, arrived: Callable[[_Load], None]) -> None:
        now = self.timeline.now
        ahead = max(link.bytes_ahead(now) for link in load.links)

        def done() -> None:
            self._kind.loads[load.kind].observe(load.nbytes, ahead, self.timeline.now - now)
            if load.source is not None and load.target is not None:
                self._pulled(load.source, load.target, load.nbytes, now)
            arrived(load)

        begins = now + LATENCY_S[load.kind]
        self.timeline.at(begins, self._network.start, load.nbytes, load.links, done)

    def _to_gpu(self, node: _Node, keys: Sequence[Hashable], depth: int) -> None:
        new, evicted = node.gpu.put(keys, depth)
        self._tell(f"gpu:{node.name}", new, [key for key, _ in evicted])

    def _put(self, node: _Node, keys: Sequence[Hashable], depth: int, *, copy: bool) -> None:
        new, evicted = node.dram.put(keys, depth, copy=copy)
        self._tell(f"dram:{node.name}", new, [key for key, _ in evicted])
        held = self._held
        for key in new:
            held[key] = held.get(key, 0) | node.bit
        gone = [key for key, _ in evicted]
        if node.ssd.capacity:
            gone = self._demote(node, evicted)
        for key in gone:
            left = held[key] & ~node.bit
            if left:
                held[key] = left
            else:
                del held[key]

    def _demote(self, node: _Node, evicted: list[tuple[Hashable, int]]) -> list[Hashable]:
        """What memory gives up goes to the disks; what is gone from the node then."""
        moved: dict[Hashable, None] = {}  # in order, each once
        for key, depth in reversed(evicted):
            new, out = node.ssd.put([key], depth)
            victims = [victim for victim, _ in out]
            self._tell(f"ssd:{node.name}", new, victims)
            moved.update(dict.fromkeys((key, *victims)))
        return [key for key in moved if key not in node.dram.held and key not in node.ssd.held]

    def _tell(self, holder: str, new: Sequence[Hashable], gone: Sequence[Hashable]) -> None:
        if new or gone:
            at = self.timeline.now + self._shape.lag_s
            self.timeline.at(at, self._hear, holder, new, gone)

    def _hear(self, holder: str, new: Sequence[Hashable], gone: Sequence[Hashable]) -> None:
        self._index.discard(holder, gone)
        self._index.add(holder, new)

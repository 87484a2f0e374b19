"""The input of a policy's choice: a request, its match, the engines, and time estimates.

`DecisionContext.estimate` predicts the request's course on one engine, and is the same for every
policy: policies differ in what they compare. It decides between loading and computing: the prefix may end
where a tier's blocks end; the end with the earliest first token wins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from kvpool.scheduler.cluster import Cluster
from kvpool.scheduler.decode import Handover
from kvpool.scheduler.estimates import KindEstimates
from kvpool.scheduler.index import Match
from kvpool.scheduler.values import Engine, Estimate, Request

SOONER = 0.5
"""How much sooner than computing them again blocks have to be there that another engine is still computing, as a share
of the computing that waiting for them saves: when they come is an estimate of an estimate. Against waits that may be
as much later: 8 to 10 % shorter on shared prefixes and on agents, the same on the conversation trace. Twice as much
is no better, and agents lose 13 %.
"""


@dataclass
class DecisionContext:
    """One request before its decision.

    engines: those that may compute it, at least one. promised: by name, when engines are free that requests
    before this one wait for. handover: where it may be decoded, if that makes a difference between these engines.
    spread: whether a replica of its prefix on one more node is worth making.
    """

    request: Request
    match: Match
    engines: Sequence[Engine]
    cluster: Cluster
    rng: Random
    now: float
    promised: Mapping[str, float] = field(default_factory=dict)
    handover: Handover | None = None
    spread: bool = False
    _prefills: dict[tuple[str, int], float] = field(default_factory=dict)
    _sources: dict[str, tuple[int, Sequence[str]]] = field(default_factory=dict)

    def sources(self, namespace: str) -> tuple[int, Sequence[str]]:
        """The longest part of the prefix that a single node of the pool has for engines of a namespace, and the nodes
        with this much of it.
        """
        known = self._sources.get(namespace)
        if known is None:
            longest, found = 0, dict[str, None]()  # a node's memory and disks are two holders
            for holder, length in self.match.lengths.items():
                node = self.cluster.node_of(holder, namespace)
                if node is not None and length >= longest:
                    if length > longest:
                        longest = length
                        found.clear()
                    found[node] = None
            known = self._sources[namespace] = longest, list(found)
        return known

    def source_for(self, engine: Engine) -> str | None:
        """The node to pull from: among those with the longest prefix, the least busy one."""
        traffic, now = self.cluster.traffic, self.now
        best, best_s = None, math.inf
        for node in self.sources(engine.namespace)[1]:
            if node == engine.node:
                continue
            busy_s = traffic.out_s(node, now)
            if busy_s < best_s:
                best, best_s = node, busy_s
                if not busy_s:
                    break
        return best

    def kind(self, engine: Engine) -> KindEstimates:
        return self.cluster.kinds[engine.kind]

    def prefill_s(self, engine: Engine, cached: int) -> float:
        """Seconds to compute the rest after this many blocks; at least the last token."""
        known = self._prefills.get((engine.kind, cached))
        if known is None:
            kind = self.kind(engine)
            tokens = self.request.tokens
            start = min(cached * kind.block_tokens, tokens - 1)
            known = kind.prefill.prefill_s(start, tokens, kind.step_tokens)
            self._prefills[engine.kind, cached] = known
        return known

    def own(self, engine: Engine) -> int:
        """How much of the prefix the engine and its node hold themselves."""
        get = self.match.lengths.get
        return max(get(holder, 0) for holder in (engine.gpu, *engine.tiers))

    def free_at(self, engine: Engine) -> float:
        return self.promised.get(engine.name, engine.free_at)

    def distinct(self) -> list[Engine]:
        """Engines to compare: of those that differ only in when they are free, the first, or a random free one.

        Engines differ in the part of the prefix that they and their nodes hold. So a decision examines
        only a few engines, however many there are. If the place of decoding matters, the engine that would
        end the answer first is taken, as if everything that can be pulled were there.
        """
        match, handover, now = self.match, self.handover, self.now
        get, promised, busy_until = match.lengths.get, self.promised, self.cluster.traffic.into
        reaches = match.namespaces
        pullable = {name: max(found.reach, found.coming) for name, found in reaches.items()}
        first: dict[tuple[object, ...], tuple[float, list[Engine]]] = {}
        for engine in self.engines:
            starts = promised.get(engine.name, engine.free_at) if promised else engine.free_at
            starts = max(starts, now)
            busy = busy_until.get(engine.node, 0.0)
            whole = pullable.get(engine.namespace, 0)
            if busy > starts and self.own(engine) < whole:
                starts = busy
            if handover is not None:
                starts += handover.cost_s(engine, self.prefill_s(engine, whole))
            group = (engine.kind, engine.namespace, get(engine.gpu), *map(get, engine.tiers))
            found = first.get(group)
            if found is None or starts < found[0]:
                first[group] = starts, [engine]
            elif starts == found[0]:
                found[1].append(engine)
        # Always taking the first free engine would fill its node's memory and leave others' empty.
        choice = self.rng.choice
        return [same[0] if len(same) == 1 else choice(same) for _, same in first.values()]

    def answer_s(self, engine: Engine, prefill_s: float) -> float:
        """Cost after the first token there, as `Handover` computes it; 0 if it is the same for all."""
        return 0.0 if self.handover is None else self.handover.cost_s(engine, prefill_s)

    def estimate(self, engine: Engine, *, waiting: bool = False) -> Estimate:
        """Prediction for the request on this engine; its cost is the time to first token.

        waiting: whether to wait for blocks that another engine is computing, if that is sooner.
        """
        kind, match, now = self.kind(engine), self.match, self.now
        pool = match.of(engine.namespace)
        waits = max(0.0, self.free_at(engine) - now)
        have = gpu = match.lengths.get(engine.gpu, 0)
        prefill_s = self.prefill_s(engine, have)
        best = Estimate(engine, have, 0, 0, None, 0.0, waits, prefill_s, waits + prefill_s)
        load_s = 0.0
        for tier in engine.tiers:
            length = match.lengths.get(tier, 0)
            if length > have:
                load_s += kind.loads[tier_name(tier)].seconds((length - have) * kind.block_bytes)
                have = length
                best = self._better(best, have, have - gpu, 0, None, load_s)
        peer = kind.loads["peer"]
        pools = bool(engine.tiers)  # without tiers there is nothing to pull into
        if pools and pool.reach > have and (source := self.source_for(engine)) is not None:
            pulled = pool.reach - have
            ahead_s = self.cluster.traffic.ahead_s(source, engine.node, now)
            pull_s = load_s + ahead_s + peer.seconds(pulled * kind.block_bytes)
            best = self._better(best, pool.reach, pool.reach - gpu, pulled, source, pull_s)
        if waiting and pools and pool.coming > max(pool.reach, have):
            pulled = pool.coming - have
            pull_s = peer.seconds(pulled * kind.block_bytes) + load_s
            later_s = max(0.0, pool.ready_at - now) + pull_s
            starts_s = max(waits, later_s)
            prefill_s = self.prefill_s(engine, pool.coming)
            ttft_s = starts_s + prefill_s
            if ttft_s + SOONER * (best.prefill_s - prefill_s) < best.cost:
                cached, loaded = pool.coming, pool.coming - gpu
                best = Estimate(
                    engine, cached, loaded, pulled, None, pull_s, starts_s, prefill_s, ttft_s, True
                )
        return best

    def _better(
        self,
        best: Estimate,
        cached: int,
        loaded: int,
        pulled: int,
        source: str | None,
        load_s: float,
    ) -> Estimate:
        """The estimate with the earlier first token."""
        engine = best.engine
        starts_s = max(0.0, self.free_at(engine) - self.now, load_s)
        prefill_s = self.prefill_s(engine, cached)
        ttft_s = starts_s + prefill_s
        if ttft_s >= best.cost:
            return best
        return Estimate(engine, cached, loaded, pulled, source, load_s, starts_s, prefill_s, ttft_s)


def tier_name(holder: str) -> str:
    """`dram` of `dram:node-1`."""
    return holder.partition(":")[0]

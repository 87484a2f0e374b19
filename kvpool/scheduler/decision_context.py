"""The input of a policy's choice: a request, its match, the engines, and time estimates.

`DecisionContext.estimate` predicts the request's course on one engine, and is the same for every
policy: policies differ in what they compare. It decides between loading and computing: the prefix may end
where a tier's blocks end; the end with the earliest first token wins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from random import Random

from kvpool.scheduler.cluster import Cluster
from kvpool.scheduler.decode import Handover
from kvpool.scheduler.estimates import KindEstimates
from kvpool.scheduler.index import Match
from kvpool.scheduler.links import Link
from kvpool.scheduler.values import Engine, Estimate, Request

SOONER = 0.5
"""How much sooner than computing them again blocks have to be there that another engine is still computing, as a share
of the computing that waiting for them saves: when they come is an estimate of an estimate. Against waits that may be
as much later: 8 to 10 % shorter on shared prefixes and on agents, the same on the conversation trace. Twice as much
is no better, and agents lose 13 %.
"""
SOURCES_MAX = 8
"""From how many nodes pulls are compared."""


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
    _free_sources: dict[str, Sequence[str]] = field(default_factory=dict)

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

    def source_for(self, engine: Engine, blocks: int) -> tuple[str, Link, float] | None:
        """The node to pull so many blocks from, the link to it, and the seconds until they are here.

        Among those with the longest prefix, it is the one from which they come first: of the least busy ones, where there
        are many. None: there is none.
        """
        traffic, now, kind = self.cluster.traffic, self.now, self.kind(engine)
        usual, nbytes = kind.loads["peer"], blocks * kind.block_bytes
        best: tuple[str, Link, float] | None = None
        for node in self._least_busy(engine.namespace):
            if node == engine.node:
                continue
            link = self.cluster.links.between(node, engine.node, usual)
            pull_s = traffic.ahead_s(node, engine.node, now) + link.seconds(nbytes)
            if best is None or pull_s < best[2]:
                best = node, link, pull_s
        return best

    def _least_busy(self, namespace: str) -> Sequence[str]:
        """Of the nodes with the longest prefix, the few whose links are free first."""
        known = self._free_sources.get(namespace)
        if known is None:
            _, known = self.sources(namespace)
            # Where links are alike, the first of the least busy is as good as any; the engine's own node is none.
            most = SOURCES_MAX if self.cluster.links.differ else 2
            if len(known) > most:
                traffic, now = self.cluster.traffic, self.now
                known = nsmallest(most, known, key=lambda node: traffic.out_s(node, now))
            self._free_sources[namespace] = known
        return known

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
        end the answer first is taken, as if everything that can be pulled were there; where links differ, when it is.
        """
        match, handover, now = self.match, self.handover, self.now
        get, promised, busy_until = match.lengths.get, self.promised, self.cluster.traffic.into
        reaches = match.namespaces
        pullable = {name: max(found.reach, found.coming) for name, found in reaches.items()}
        first: dict[tuple[object, ...], tuple[float, list[Engine]]] = {}
        differ = self.cluster.links.differ
        for engine in self.engines:
            starts = promised.get(engine.name, engine.free_at) if promised else engine.free_at
            starts = max(starts, now)
            busy = busy_until.get(engine.node, 0.0)
            whole = pullable.get(engine.namespace, 0)
            if differ and engine.tiers:
                starts += self._late_s(engine, whole, starts - now)
            elif busy > starts and self.own(engine) < whole:
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

    def _late_s(self, engine: Engine, whole: int, waits: float) -> float:
        """By how much it begins later than it is free, for pulls; not more than computing that instead takes."""
        own = self.own(engine)
        if own >= whole or (source := self.source_for(engine, whole - own)) is None:
            return 0.0
        again_s = self.prefill_s(engine, own) - self.prefill_s(engine, whole)
        return min(max(0.0, source[2] - waits), again_s)

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
        pools = bool(engine.tiers)  # without tiers there is nothing to pull into
        pulled = pool.reach - have
        if pools and pulled > 0 and (found := self.source_for(engine, pulled)) is not None:
            source, link, pull_s = found
            best = self._better(
                *(best, pool.reach, pool.reach - gpu, pulled, source, load_s + pull_s, link)
            )
        if waiting and pools and pool.coming > max(pool.reach, have):
            pulled = pool.coming - have
            # From wherever it is computed, which is not known here.
            link = self.cluster.links.fastest(engine.node, kind.loads["peer"])
            pull_s = link.seconds(pulled * kind.block_bytes) + load_s
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
        link: Link | None = None,
    ) -> Estimate:
        """The estimate with the earlier first token."""
        engine = best.engine
        starts_s = max(0.0, self.free_at(engine) - self.now, load_s)
        prefill_s = self.prefill_s(engine, cached)
        ttft_s = starts_s + prefill_s
        if ttft_s >= best.cost:
            return best
        return Estimate(
            *(engine, cached, loaded, pulled, source, load_s, starts_s, prefill_s, ttft_s),
            link=link,
        )


def tier_name(holder: str) -> str:
    """`dram` of `dram:node-1`."""
    return holder.partition(":")[0]

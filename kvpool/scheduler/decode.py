"""Which engine decodes a request, and what that costs. No I/O, no clock.

For a prompt that engine p computes, decoding on d costs, in seconds from the end of the prompt to the end of
the answer,

    handover + output tokens x tpot

The hand-over is what d's node lacks of the prompt, as a transfer between the two (labels say how far they are
apart), and what d lacks, out of its node's memory. Where d may follow the prompt, what is transferred while it
is computed is hidden, but for its last step. Where either has no pool, d computes again what it lacks. On p
itself nothing is handed over. tpot is that of d's batch with one more; if d computes prompts too, for the share
of its time in which it does, a token comes only with each step of a prompt:

    tpot' = 1 / (share / (prompt step + contexts) + (1 - share) / tpot)

What decodes on p already is held up by the prompt; each second of that counts a little. So one engine does both
where disaggregation does not pay: short answers, idle engines, slow links.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from random import Random
from typing import NamedTuple

from kvpool.errors import ConfigError
from kvpool.scheduler.estimates import KindEstimates
from kvpool.scheduler.index import Match
from kvpool.scheduler.situation import Cluster
from kvpool.scheduler.topology import Topology, place, together
from kvpool.scheduler.values import DecodeOutlook, Engine, Request, Role

STALL = 0.1
"""What a second counts by which the tokens of another request come later, beside a second of waiting."""
SHOWN = 8
"""Of the engines that were compared, so many are told of."""
EQUAL = 1e-9
"""Costs that differ by less than this share are equal."""


@dataclass(frozen=True, slots=True)
class DecodeRule:
    """ahead: of a decode engine's memory, how much more is promised to prompts that are computed meanwhile,
    into the pool; they are sent there when there is room. follow_below: up to which share of its memory
    prompts are followed for it.
    """

    ahead: float = 0.25
    follow_below: float = 0.9
    topology: Topology = field(default_factory=Topology)

    def __post_init__(self) -> None:
        if not (self.ahead >= 0 and 0 <= self.follow_below <= 1):
            raise ConfigError(f"ahead is not negative, follow_below from 0 to 1: {self}")

    def promises(self, engine: Engine, needed: int) -> bool:
        """Whether so much may be reserved there."""
        if needed > engine.capacity_tokens:
            return False
        return engine.context_tokens + needed <= engine.capacity_tokens * (1 + self.ahead)


def context_tokens(request: Request) -> int:
    """What a decode engine holds of a request in the end, and what is reserved for it."""
    return request.tokens + request.output_tokens


def tpot_s(request: Request, engine: Engine, kind: KindEstimates, now: float) -> float:
    """Seconds a token with this request among what decodes there."""
    return _token_s(request, engine, kind, _step_s(kind), now)


def _step_s(kind: KindEstimates) -> float:
    """Of a whole step of prompts."""
    return kind.prefill.prefill_s(0, kind.step_tokens, kind.step_tokens)


def _token_s(
    request: Request, engine: Engine, kind: KindEstimates, step_s: float, now: float
) -> float:
    whole = engine.context_tokens + request.tokens + request.output_tokens
    alone_s = kind.decode.step_s(engine.decodes + 1, whole)
    if engine.role is Role.DECODE:
        return alone_s
    share = engine.computing.rate(now)
    if engine.free_at > now:
        busy_s = engine.free_at - now
        share = max(share, busy_s / (busy_s + alone_s * request.output_tokens))
    share = min(1.0, share)
    mixed_s = max(alone_s, step_s + alone_s - kind.decode.coefficients[0])
    return alone_s * mixed_s / (share * alone_s + (1 - share) * mixed_s)


class _Base(NamedTuple):
    """What does not depend on who computes the prompt. again_s: to compute what neither the engine nor its node
    has. rank: 0 with room, 1 with a promise of it."""

    engine: Engine
    tpot_s: float
    tokens_s: float
    lacks: int
    transfer_s: float
    tail_s: float
    load_s: float
    again_s: float
    ahead_s: float
    rank: int


_Labels = tuple[tuple[str, str], ...]


class Handover:
    """Where one request may go on. For one decision: all that it knows is of that moment."""

    def __init__(
        self,
        request: Request,
        match: Match,
        decoders: Sequence[Engine],
        cluster: Cluster,
        rule: DecodeRule,
        now: float,
    ) -> None:
        self._topology = rule.topology
        self._whole = request.whole
        self._bases = _bases(request, match, decoders, cluster, rule, now)
        self._near: dict[tuple[str, str], list[_Base]] = {}  # by their nodes
        self._far: dict[_Labels, list[_Base]] = {}  # by the labels of these
        for base in self._bases:
            self._near.setdefault(place(base.engine), []).append(base)
            self._far.setdefault(_labels(base.engine), []).append(base)
        self._known: dict[tuple[_Labels, bool, float], tuple[float, float]] = {}

    def cost_s(self, engine: Engine, prefill_s: float) -> float:
        """Of the best that may be a pair with this one, and what the prompt holds up there.

        Infinite if there is none.
        """
        if self._whole:
            alone = [base for base in self._near.get(place(engine), ()) if base.engine is engine]
            return alone[0].tokens_s + STALL * engine.decodes * prefill_s if alone else math.inf
        labels = _labels(engine)
        pooled = bool(engine.tiers)
        key = labels, pooled, prefill_s
        best = self._known.get(key)
        if best is None:
            best = self._known[key] = self._from_afar(engine, prefill_s)
        for base in self._near.get(place(engine), ()):
            handover_s = _handover_s(base, engine, 0.0, prefill_s, pooled=pooled)
            best = min(best, (base.rank, base.tokens_s + handover_s))
        return best[1] + STALL * engine.decodes * prefill_s

    def outlooks(self, engine: Engine, prefill_s: float, rng: Random) -> list[DecodeOutlook]:
        """Of those that may be a pair with this one, the best few, in order; any of equals is the first.

        A request that is to be served whole has no pairs.
        """
        topology, pooled = self._topology, bool(engine.tiers)
        found: list[tuple[int, float, float, _Base]] = []
        for base in self._bases:
            if topology.require and not topology.allowed(engine, base.engine):
                continue
            if self._whole and base.engine is not engine:
                continue
            factor = topology.factor(engine, base.engine)
            handover_s = _handover_s(base, engine, factor, prefill_s, pooled=pooled)
            found.append((base.rank, handover_s + base.tokens_s, handover_s, base))
        if not found:
            return []
        rank, least, _, _ = min(found, key=_by_cost)
        limit = least * (1 + EQUAL)
        equal = [each for each in found if each[0] == rank and each[1] <= limit]
        chosen = rng.choice(equal) if len(equal) > 1 else equal[0]
        best = [chosen, *(each for each in nsmallest(SHOWN, found, _by_cost) if each is not chosen)]
        return [
            DecodeOutlook(
                base.engine,
                base.tpot_s,
                0 if together(base.engine, engine) else base.lacks,
                handover_s,
                not rank,
                cost,
            )
            for rank, cost, handover_s, base in best[:SHOWN]
        ]

    def _from_afar(self, engine: Engine, prefill_s: float) -> tuple[float, float]:
        """The least rank and cost of all, as if none were on the same node: that costs more, if anything."""
        pooled = bool(engine.tiers)
        best: tuple[float, float] = (math.inf, math.inf)
        for bases in self._far.values():
            first = bases[0].engine
            if not self._topology.allowed_apart(engine, first):
                continue
            factor = self._topology.apart(engine, first)
            least = min(
                (b.rank, b.tokens_s + _handover_s(b, None, factor, prefill_s, pooled=pooled))
                for b in bases
            )
            best = min(best, least)
        return best


def _by_cost(found: tuple[int, float, float, _Base]) -> tuple[int, float]:
    return found[:2]


def _labels(engine: Engine) -> _Labels:
    return tuple(sorted(engine.labels.items())) if engine.labels else ()


def _handover_s(
    base: _Base, engine: Engine | None, factor: float, prefill_s: float, *, pooled: bool
) -> float:
    """factor: of a transfer between the two. engine: who computes the prompt, if that matters. pooled: whether
    its node is in the pool.
    """
    other = base.engine
    if other is engine:
        return 0.0
    if not pooled or not other.tiers:
        return base.again_s
    if not factor or not base.lacks:
        return base.load_s
    transfer_s = base.ahead_s + factor * base.transfer_s
    if other.follows < other.follows_max:
        transfer_s = max(transfer_s - prefill_s, factor * base.tail_s)
    return transfer_s + base.load_s


def _bases(
    request: Request,
    match: Match,
    decoders: Sequence[Engine],
    cluster: Cluster,
    rule: DecodeRule,
    now: float,
) -> list[_Base]:
    needed = context_tokens(request)
    blocks, get = len(request.keys), match.lengths.get
    into, output_tokens = cluster.traffic.into, request.output_tokens
    steps_s = {name: _step_s(cluster.kinds[name]) for name in {e.kind for e in decoders}}
    moves: dict[tuple[str, int, int], tuple[float, float, float, float]] = {}
    found = []
    for engine in decoders:
        name = engine.kind
        kind = cluster.kinds[name]
        if engine.context_tokens + needed <= engine.capacity_tokens:
            rank = 0
        else:
            rank = 1 if rule.promises(engine, needed) else 2
        own = cached = get(engine.gpu, 0)
        for tier in engine.tiers:
            held = get(tier, 0)
            own = max(own, held)
        move = moves.get((name, cached, own))
        if move is None:
            move = moves[name, cached, own] = _move(request, kind, cached, own)
        token_s = _token_s(request, engine, kind, steps_s[name], now)
        ahead_s = into.get(engine.node, 0.0) - now
        found.append(
            _Base(
                engine,
                token_s,
                token_s * output_tokens,
                blocks - own,
                *move,
                ahead_s if ahead_s > 0 else 0.0,
                rank,
            )
        )
    return found


def _move(
    request: Request, kind: KindEstimates, cached: int, own: int
) -> tuple[float, float, float, float]:
    """Seconds to bring what the node lacks, the last step's part of that, and all from memory to the GPU; and to
    compute what the node lacks."""
    peer, dram, size = kind.loads["peer"], kind.loads.get("dram"), kind.block_bytes
    blocks, tokens = len(request.keys), request.tokens
    tail = min(blocks - own, -(-kind.step_tokens // kind.block_tokens))
    load_s = dram.seconds((blocks - cached) * size) if dram is not None else 0.0
    start = min(own * kind.block_tokens, tokens - 1)
    again_s = kind.prefill.prefill_s(start, tokens, kind.step_tokens)
    return peer.seconds((blocks - own) * size), peer.seconds(tail * size), load_s, again_s


def pick_decode(
    request: Request,
    engines: Sequence[Engine],
    kinds: Mapping[str, KindEstimates],
    now: float,
) -> DecodeOutlook | None:
    """The engine that decodes fastest with this request, whatever is where. None without engines.

    One with the memory goes before all that lack it. For admission, which knows of no prompt's place.
    """
    needed = context_tokens(request)
    found: DecodeOutlook | None = None
    for engine in engines:
        token_s = tpot_s(request, engine, kinds[engine.kind], now)
        fits = engine.context_tokens + needed <= engine.capacity_tokens
        if found is None or (not fits, token_s) < (not found.fits, found.tpot_s):
            cost = token_s * request.output_tokens
            found = DecodeOutlook(engine, token_s, 0, 0.0, fits, cost)
    return found

"""Which engine decodes a request, and at what cost. No I/O, no clock.

For a prompt that engine p computes, decoding on d costs, in seconds from the end of the prompt to the end of
the answer,

    handover + output tokens x tpot

The handover is the transfer of the blocks that d's node lacks, by the link of the two (`links`), and the load
of the blocks that d lacks from its node's memory. If d may follow the prompt, transfers overlap with computing,
except for its last step. If either has no pool, d computes again what it lacks. If d is p there is no handover.
tpot is that of d's batch with one more request; if d computes prompts too, then for the share of its time in
which it does, each step of a prompt yields one token:

    tpot' = 1 / (share / (prompt step + contexts) + (1 - share) / tpot)

Computing the prompt delays requests that decode on p; each second of that counts a little. So one engine does
both where disaggregation does not pay: short answers, idle engines, slow links.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from kvpool.errors import ConfigError
from kvpool.scheduler.cluster import Cluster
from kvpool.scheduler.estimates import KindEstimates
from kvpool.scheduler.index import Match
from kvpool.scheduler.links import Link
from kvpool.scheduler.values import (
    DecodeEstimate,
    Engine,
    Place,
    Request,
    Role,
    Saves,
    place,
    together,
)

STALL = 0.1
"""Weight of a second of delay of other requests' tokens, relative to a second of waiting."""
SHOWN = 8
"""How many of the compared engines are reported."""
LATE_SAVE_S = 1.0
"""The longest wait for blocks that are still being saved, beyond their transfer."""
SLOWER_MAX = 4.0
"""This multiple of an estimate, of a handover or of a call, is waited for it at most, beside what is fixed."""
EQUAL = 1e-9
"""Costs that differ by less than this share are equal."""


@dataclass(frozen=True, slots=True)
class DecodeRule:
    """ahead: how much more of a decode engine's memory is promised to prompts that are computed meanwhile,
    into the pool; they are sent there when there is room. follow_below: the share of its memory up to which
    prompts are followed for it.
    """

    ahead: float = 0.25
    follow_below: float = 0.9

    def __post_init__(self) -> None:
        if not (self.ahead >= 0 and 0 <= self.follow_below <= 1):
            raise ConfigError(
                f"ahead must not be negative, follow_below must be from 0 to 1: {self}"
            )

    def promises(self, engine: Engine, needed: int) -> bool:
        """Whether this much may be reserved there."""
        if needed > engine.capacity_tokens:
            return False
        most = engine.capacity_tokens * (1 + self.ahead)
        return engine.has_room(needed, engine.context_tokens, most, waits=True)


def context_tokens(request: Request) -> int:
    """Tokens that a decode engine holds for a request in the end, and that are reserved for it."""
    return request.tokens + request.output_tokens


def tpot_s(request: Request, engine: Engine, kind: KindEstimates, now: float) -> float:
    """Seconds per token with this request in the engine's batch."""
    return _token_s(request, engine, kind, _longer_s(kind), now)


def _longer_s(kind: KindEstimates) -> float:
    """By how much a step of tokens is longer with a whole step of prompts in it."""
    prompts_s = kind.prefill.prefill_s(0, kind.step_tokens, kind.step_tokens)
    return max(0.0, prompts_s - kind.decode.coefficients[0])


def _token_s(
    request: Request, engine: Engine, kind: KindEstimates, longer_s: float, now: float
) -> float:
    held = engine.context_tokens + engine.others_tokens
    whole = held + request.tokens + request.output_tokens
    alone_s = kind.decode.step_s(engine.decodes + 1, whole)
    if engine.role is Role.DECODE:
        return alone_s
    share = engine.computing.rate(now)
    if engine.free_at > now:
        busy_s = engine.free_at - now
        share = max(share, busy_s / (busy_s + alone_s * request.output_tokens))
    share = min(1.0, share)
    mixed_s = alone_s + longer_s
    return alone_s * mixed_s / (share * alone_s + (1 - share) * mixed_s)


def wait_for_saves_s(
    request: Request, saves: Saves, own: int, handover_s: float, kind: KindEstimates
) -> float:
    """How long a decode engine may wait for what is still being saved of a prompt; 0: it does not wait for it.

    own: blocks that it has, or its node. handover_s: estimate. kind: of the decode engine. It waits only if that is
    sooner than computing these blocks, and never for longer than computing all blocks that it lacks would take.
    """

    def compute_s(begin: int) -> float:
        end = min(saves.stored, request.tokens)
        return kind.prefill.prefill_s(begin, end, kind.step_tokens) if begin < end else 0.0

    there = own * kind.block_tokens
    again_s = compute_s(max(saves.stored - saves.saving, there))
    if saves.saving_s is not None and saves.saving_s >= again_s:
        return 0.0
    if not again_s:
        return 0.0
    return min(SLOWER_MAX * handover_s + min(again_s, LATE_SAVE_S), compute_s(there))


class _Move(NamedTuple):
    """transfer_bytes: of the blocks that the node lacks, tail_bytes: the last step's part of that. load_s: all from
    memory to the GPU, and to compute those that are not in the pool. again_s: to compute the blocks that neither the
    engine nor its node has.
    """

    transfer_bytes: int
    tail_bytes: int
    load_s: float
    again_s: float


class _Base(NamedTuple):
    """The part of a cost that does not depend on the prompt's engine. rank: 0 with room, 1 with a promise of it.
    tokens_s: of the whole answer. ahead_s: until the link is free. at: index of the engine.
    """

    rank: int
    tokens_s: float
    engine: Engine
    tpot_s: float
    lacks: int
    move: _Move
    ahead_s: float
    follows: bool
    at: int

    def beside_s(self, engine: Engine) -> float:
        """The handover from an engine at the same place."""
        if self.engine is engine:
            return 0.0
        return self.move.load_s if self.engine.shares(engine) else self.move.again_s

    def handover_s(self, link: Link, prefill_s: float) -> float:
        """From an engine on another node with the same pool; link: from there."""
        move = self.move
        if not self.lacks:
            return move.load_s
        bring_s = self.ahead_s + link.seconds(move.transfer_bytes)
        if self.follows:
            bring_s = max(bring_s - prefill_s, link.seconds(move.tail_bytes))
        return bring_s + move.load_s


class Handover:
    """The possible decode engines of one request. For one decision: a snapshot of that moment.

    stored: how many of the prompt's first blocks are in the pool when it is computed; None: all.

    A decision needs the cost from every engine. Those that decode are looked at in the order of what they would cost by
    the fastest link to each, and only while that is less than the best that was found: one or two, where links are alike.
    """

    def __init__(
        self,
        request: Request,
        match: Match,
        decoders: Sequence[Engine],
        cluster: Cluster,
        rule: DecodeRule,
        now: float,
        stored: int | None = None,
    ) -> None:
        self._cluster = cluster
        self._whole = request.whole
        self._near: dict[Place, list[_Base]] = {}  # by their nodes
        self._all = list(_bases(request, match, decoders, cluster, rule, now, stored))
        for base in self._all:
            self._near.setdefault(place(base.engine), []).append(base)
        self._promising: dict[tuple[str | None, float], list[tuple[int, float, _Base]]] = {}

    def cost_s(self, engine: Engine, prefill_s: float) -> float:
        """Cost of the best decode engine for this prefill engine, plus the delay of requests that decode there.

        Infinite if there is none.
        """
        near = self._near.get(place(engine), ())
        held_up_s = STALL * engine.decodes * prefill_s
        if self._whole:
            alone = (base.tokens_s for base in near if base.engine is engine)
            return next(alone, math.inf) + held_up_s
        rank, cost = self._from_afar(engine, prefill_s)
        for base in near:
            if base.rank <= rank:
                tokens_s = base.tokens_s + base.beside_s(engine)
                if base.rank < rank or tokens_s < cost:
                    rank, cost = base.rank, tokens_s
        return cost + held_up_s

    def estimates(self, engine: Engine, prefill_s: float, rng: Random) -> list[DecodeEstimate]:
        """The best few decode engines for this one, in order; of equals the first, which is random.

        A request that must be served whole has no pairs.
        """
        found: list[tuple[int, float, int, float, _Base]] = []
        near = self._near.get(place(engine), ())
        if self._whole:
            found = [(b.rank, b.tokens_s, 0, 0.0, b) for b in near if b.engine is engine]
        else:
            for base in near:
                handover_s = base.beside_s(engine)
                found.append((base.rank, base.tokens_s + handover_s, base.at, handover_s, base))
            here = place(engine)
            for base in self._all:
                if place(base.engine) != here:
                    handover_s = self._handover_s(base, engine, prefill_s)
                    cost = base.tokens_s + handover_s
                    found.append((base.rank, cost, base.at, handover_s, base))
        if not found:
            return []
        found.sort()  # by rank and cost, then in the given order
        rank, least, *_ = found[0]
        limit = least * (1 + EQUAL)
        equal = 1
        while equal < len(found) and found[equal][0] == rank and found[equal][1] <= limit:
            equal += 1
        chosen = rng.choice(found[:equal]) if equal > 1 else found[0]
        best = [chosen, *(each for each in found[:SHOWN] if each is not chosen)]
        return [
            DecodeEstimate(
                base.engine,
                base.tpot_s,
                0 if together(base.engine, engine) else base.lacks,
                handover_s,
                not rank,
                cost,
                self._link(base, engine),
            )
            for rank, cost, _, handover_s, base in best[:SHOWN]
        ]

    def _link(self, base: _Base, engine: Engine) -> Link | None:
        """By which blocks come from this engine; None: none come."""
        if not base.lacks or together(base.engine, engine) or not base.engine.shares(engine):
            return None
        return self._between(base, engine)

    def _between(self, base: _Base, engine: Engine) -> Link:
        to = base.engine
        usual = self._cluster.kinds[to.kind].loads["peer"]
        return self._cluster.links.between(engine.node, to.node, usual)

    def _from_afar(self, engine: Engine, prefill_s: float) -> tuple[float, float]:
        """The least rank and cost of all, as if none were on the same node: an upper bound."""
        best: tuple[float, float] = (math.inf, math.inf)
        promising = self._at_best(engine, prefill_s)
        if not self._cluster.links.differ:
            return promising[0][:2] if promising else best
        for rank, least, base in promising:
            if (rank, least) >= best:
                break
            cost = base.tokens_s + self._handover_s(base, engine, prefill_s)
            best = min(best, (rank, cost))
        return best

    def _at_best(self, engine: Engine, prefill_s: float) -> Sequence[tuple[int, float, _Base]]:
        """Rank and least cost of each after an engine of this namespace, in this order."""
        key = engine.namespace if engine.tiers else None, prefill_s
        found = self._promising.get(key)
        if found is None:
            kinds, fastest = self._cluster.kinds, self._cluster.links.fastest
            found = []
            for base in self._all:
                to = base.engine
                if to.shares(engine):
                    link = fastest(to.node, kinds[to.kind].loads["peer"])
                    least = base.tokens_s + base.handover_s(link, prefill_s)
                else:
                    least = base.tokens_s + base.move.again_s
                found.append((base.rank, least, base))
            found.sort(key=lambda one: one[:2])
            self._promising[key] = found
        return found

    def _handover_s(self, base: _Base, engine: Engine, prefill_s: float) -> float:
        """From an engine on another node."""
        if not base.engine.shares(engine):
            return base.move.again_s
        return base.handover_s(self._between(base, engine), prefill_s)


def _bases(
    request: Request,
    match: Match,
    decoders: Sequence[Engine],
    cluster: Cluster,
    rule: DecodeRule,
    now: float,
    stored: int | None,
) -> Iterator[_Base]:
    needed, output_tokens = context_tokens(request), request.output_tokens
    blocks, get, into = len(request.keys), match.lengths.get, cluster.traffic.into
    if stored is not None:
        blocks = min(blocks, stored)
    longer_s = {name: _longer_s(cluster.kinds[name]) for name in {e.kind for e in decoders}}
    moves: dict[tuple[str, int, int], _Move] = {}
    for at, engine in enumerate(decoders):
        name = engine.kind
        kind = cluster.kinds[name]
        if engine.has_room(needed, engine.context_tokens, engine.capacity_tokens):
            rank = 0
        else:
            rank = 1 if rule.promises(engine, needed) else 2
        own = cached = get(engine.gpu, 0)
        for tier in engine.tiers:
            held = get(tier, 0)
            own = max(own, held)
        move = moves.get((name, cached, own))
        if move is None:
            reach = max(blocks, own)
            move = moves[name, cached, own] = _move(request, kind, cached, own, reach)
        token_s = _token_s(request, engine, kind, longer_s[name], now)
        ahead_s = into.get(engine.node, 0.0) - now
        yield _Base(
            rank,
            token_s * output_tokens,
            engine,
            token_s,
            max(0, blocks - own),
            move,
            ahead_s if ahead_s > 0 else 0.0,
            engine.follows < engine.follows_max,
            at,
        )


def _move(request: Request, kind: KindEstimates, cached: int, own: int, reach: int) -> _Move:
    """reach: blocks of the prompt that it can have without computing them."""
    dram, size = kind.loads.get("dram"), kind.block_bytes
    tail = min(reach - own, -(-kind.step_tokens // kind.block_tokens))
    load_s = dram.seconds((reach - cached) * size) if dram is not None else 0.0
    if reach < len(request.keys):
        load_s += _compute_s(request, kind, reach)
    again_s = _compute_s(request, kind, own)
    return _Move((reach - own) * size, tail * size, load_s, again_s)


def _compute_s(request: Request, kind: KindEstimates, blocks: int) -> float:
    """Seconds to compute a prompt of which there are so many blocks."""
    start = min(blocks * kind.block_tokens, request.tokens - 1)
    return kind.prefill.prefill_s(start, request.tokens, kind.step_tokens)


def pick_decode(
    request: Request, engines: Sequence[Engine], kinds: Mapping[str, KindEstimates], now: float
) -> DecodeEstimate | None:
    """The engine that decodes fastest with this request, wherever blocks are. None without engines.

    Engines with free memory come before those without. For admission, before the prompt's place is known.
    """
    needed = context_tokens(request)
    found: DecodeEstimate | None = None
    for engine in engines:
        token_s = tpot_s(request, engine, kinds[engine.kind], now)
        fits = engine.has_room(needed, engine.context_tokens, engine.capacity_tokens)
        if found is None or (not fits, token_s) < (not found.fits, found.tpot_s):
            cost = token_s * request.output_tokens
            found = DecodeEstimate(engine, token_s, 0, 0.0, fits, cost)
    return found

"""The choice among peers that have the wanted blocks. No I/O, no clock."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from kvpool.placement.directory.base import TIERS
from kvpool.placement.distance import PRIORS
from kvpool.placement.peer_estimates import PeerHealth, tier_costs
from kvpool.placement.peers import Peers

JITTER = 0.15
"""Peers whose estimates differ by less are used in turns."""


class Candidate(NamedTuple):
    """A source that has a block, according to the directory."""

    incarnation: bytes
    tier: int


class Assignment(NamedTuple):
    """Blocks to pull from one peer, in one request. Indices into the wanted ones, rising."""

    incarnation: bytes
    indices: list[int]


class Forecast(NamedTuple):
    """The time to load some blocks, by measurements.

    seconds: until all are here; infinite if some have no usable source. shares: each source's part, by
        incarnation: indices into what was sought, and into what is wanted of that.
    """

    seconds: float
    shares: dict[bytes, list[tuple[int, int]]]


class _Option:
    """A peer while a plan is made. `rank`: 0 good, 1 last resort, 2 not to be used."""

    __slots__ = ("ends_at", "fixed", "indices", "per_byte", "rank", "stretch")

    def __init__(self, peer: PeerHealth, now: float, stretch: float) -> None:
        latency_s, self.per_byte = peer.expected(now)
        # When its work is done, without further requests, and the overhead of a request.
        self.ends_at = peer.ahead_bytes * self.per_byte
        self.fixed = latency_s
        self.stretch = stretch * PRIORS[peer.distance].reluctance
        self.rank = 2 if peer.suspended(now) else int(peer.suspected(now))
        self.indices: list[int] = []


def plan(
    wanted: Sequence[Sequence[Candidate]],
    nbytes: int,
    peers: Peers,
    now: float,
    *,
    slice_bytes: int = 8 << 20,
) -> list[Assignment]:
    """Assign blocks to sources, so that all are here soonest and the beginning first.

    wanted[i]: the sources of the i-th missing block, in the order of the chain; nbytes: the size of each.
    Goes through the blocks in slices of up to `slice_bytes`, and gives each slice to the source that is
    expected to deliver it first, given all assigned before; so several work in parallel
    if that is faster, and few blocks are not scattered. One assignment a peer, the one with the
    earliest block first.

    Blocks without a source, or only with peers in back-off, are in no assignment. Suspected peers get only
    blocks that no other peer has; so do peers on probation for all but one slice. Changes nothing: call
    `Peers.started` for each request that is really made.
    """
    options: dict[bytes, _Option] = {}
    per_slice = max(1, slice_bytes // nbytes)
    current: Candidate | None = None
    indices: list[int] = []
    left = 0
    having: object = None  # candidates that include `current`: adjacent blocks mostly share theirs
    for index, candidates in enumerate(wanted):
        if left and (candidates is having or current in candidates):
            indices.append(index)
            left -= 1
            continue
        if left and current is not None:  # the slice ended early: correct its booking
            _book(options[current.incarnation], current.tier, -left * nbytes)
            left = 0
        current = _fastest(candidates, options, nbytes * per_slice, peers, now)
        if current is None:
            continue
        having = candidates
        option = options[current.incarnation]
        # Peers of last resort get one block at a time: the next one may have another source.
        take = 1 if option.rank else per_slice
        _book(option, current.tier, take * nbytes)
        option.fixed = 0.0
        indices = option.indices
        indices.append(index)
        left = take - 1
        peer = peers.get(current.incarnation)
        if peer is not None and peer.on_probation:
            option.rank = 1
    planned = [Assignment(inc, option.indices) for inc, option in options.items() if option.indices]
    planned.sort(key=lambda assignment: assignment.indices[0])
    return planned


def _fastest(
    candidates: Sequence[Candidate],
    options: dict[bytes, _Option],
    nbytes: int,
    peers: Peers,
    now: float,
) -> Candidate | None:
    """The candidate that would finish this addition first; None if none may be used."""
    best: Candidate | None = None
    best_rank, best_s = 2, 0.0
    for candidate in candidates:
        incarnation, tier = candidate
        option = options.get(incarnation)
        if option is None:
            peer = peers.get(incarnation) or peers.stranger(incarnation)
            option = _Option(peer, now, 1 + JITTER * peers.rng.random())
            options[incarnation] = option
        rank = option.rank
        if rank > best_rank or rank == 2:
            continue
        first_s, per_byte = tier_costs(tier)
        seconds = option.ends_at + option.fixed + first_s + nbytes * (option.per_byte + per_byte)
        seconds *= option.stretch
        if rank < best_rank or seconds < best_s:
            best, best_rank, best_s = candidate, rank, seconds
    return best


def _book(option: _Option, tier: int, nbytes: int) -> None:
    """A peer has this much more to deliver, or less."""
    first_s, per_byte = tier_costs(tier)
    if nbytes > 0:
        option.ends_at += option.fixed + (first_s if option.fixed else 0.0)
    option.ends_at += nbytes * (option.per_byte + per_byte)


def forecast(
    sought: Sequence[tuple[int, Sequence[Sequence[Candidate]]]],
    awaited: Collection[bytes],
    peers: Peers,
    now: float,
    *,
    slice_bytes: int = 8 << 20,
) -> Forecast:
    """How long it takes to bring all of this, by a `plan` for each part.

    sought: for each part, the size of its blocks and the sources of each missing one. awaited: sources that are
    about to deliver some of them already, as part of what is in flight. Several sources work at the same time,
    each at one request after the other. Changes nothing.
    """
    ends: dict[bytes, float] = {}
    shares: dict[bytes, list[tuple[int, int]]] = {}
    complete = True
    for incarnation in awaited:
        ends[incarnation] = _idle_at(peers, incarnation, now)
    for part, (nbytes, wanted) in enumerate(sought):
        planned = 0
        for incarnation, indices in plan(wanted, nbytes, peers, now, slice_bytes=slice_bytes):
            planned += len(indices)
            shares.setdefault(incarnation, []).extend([(part, index) for index in indices])
            peer = peers.get(incarnation) or peers.stranger(incarnation)
            _, per_byte = peer.expected(now)
            end = ends.get(incarnation) or _idle_at(peers, incarnation, now)
            tiers = Counter(_tier(wanted[index], incarnation) for index in indices)
            for tier, blocks in tiers.items():
                # Object storage is a source of its own: only its measurements count.
                first_s, extra = tier_costs(tier)
                if tier == TIERS["object"] and peer.measured:
                    first_s, extra = 0.0, 0.0 if peer.measured_bytes else extra
                end += first_s + blocks * nbytes * (per_byte + extra)
            ends[incarnation] = end
        complete = complete and planned == len(wanted)
    return Forecast(max(ends.values(), default=0.0) if complete else math.inf, shares)


def _idle_at(peers: Peers, incarnation: bytes, now: float) -> float:
    """Seconds until the first byte of a request to a peer now."""
    peer = peers.get(incarnation) or peers.stranger(incarnation)
    latency_s, per_byte = peer.expected(now)
    return latency_s + peer.ahead_bytes * per_byte


def _tier(candidates: Iterable[Candidate], incarnation: bytes) -> int:
    return next(tier for other, tier in candidates if other == incarnation)

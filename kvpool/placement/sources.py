"""From whom to pull: what is known of the peers, and the choice among them. No I/O, no clock.

The caller tells what it sees (`Peers.started`, `finished`, `failed`, `slow`) and asks whom to pull from
(`plan`) and when to lose patience (`Peers.hedge_after_s`). Times are seconds of one monotonic clock, sizes
are bytes. Event loop only: nothing here is safe to share among threads, and nothing here waits.

A peer is one life of a node, known by its incarnation. A restarted node is trusted anew, and taken for half
as fast or slow as it was: how far it is and over what it is reached has hardly changed. A peer is

    trusted ───failed──▶ suspended: not asked for 0.2 s, doubling to 10 s      ──┐ then on probation: one
       ▲ └─────slow────▶ suspected: asked only where nobody else has the block ──┤ request at a time
       └────────────────────── any request that is answered ◀────────────────────┘

so that what a dead or a stopped peer costs is one request now and then, however many want its blocks.

The other classes remember what the directory cannot say or has said before. All of them are bounded, and
forget the oldest first.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from kvpool.placement.directory import TIERS, Entry
from kvpool.placement.distance import (
    DECAY,
    OLD_S,
    PRIORS,
    Distance,
    Network,
    distance_between,
    kept,
)

BACKOFF_S, BACKOFF_S_MAX = 0.2, 10.0
SUSPECT_S = 3.0
PROBE_S = 5.0
"""A request on probation that has not ended by then is given up for lost: another may be made."""

STALE_S = 30.0
"""After so long without a request, an estimate is half what was measured, half what is assumed."""
SMALL_BYTES = 256 << 10
"""Requests up to this size tell of latency, larger ones of bandwidth."""
BYTES_S_MIN = 1e6

TRIAL_S = OLD_S
"""A source that nothing was loaded from for so long is tried once in a while: see `Peers.begin_trial`."""

HEDGE_TIMES = 4.0
HEDGE_S_MIN, HEDGE_S_MAX = 0.05, 0.3

JITTER = 0.15
"""Peers whose estimates differ by less are taken in turns."""

_NO_EXTRA = (0.0, 0.0)
_TIER_EXTRA = {  # from the fastest to the slowest
    TIERS["gpu"]: _NO_EXTRA,
    TIERS["dram"]: _NO_EXTRA,
    TIERS["device"]: (0.0002, 1 / 10e9),
    TIERS["ssd"]: (0.0005, 1 / 1.5e9),
    TIERS["remote"]: (0.05, 1 / 0.1e9),
}
"""What a tier adds to a pull: seconds to its first byte, seconds a byte."""


_TIER_RANK = {tier: rank for rank, tier in enumerate(_TIER_EXTRA)}


def faster(tier: int, other: int) -> int:
    """The one of two tiers that a source delivers from sooner. Their numbers are in no order."""
    return min(tier, other, key=lambda one: _TIER_RANK.get(one, len(_TIER_RANK)))


class Candidate(NamedTuple):
    """Somebody who has a block, as far as the directory knows."""

    incarnation: bytes
    tier: int


class Assignment(NamedTuple):
    """What to pull from one peer, in one request. Indices into what was wanted, rising."""

    incarnation: bytes
    indices: list[int]


class Forecast(NamedTuple):
    """What loading some blocks would take, as far as measurements tell.

    seconds: until all are here; infinite when nobody can be asked for some. shares: whose they would be, by
        incarnation: indices into what was sought, and into what is wanted of that.
    """

    seconds: float
    shares: dict[bytes, list[tuple[int, int]]]


class Link(msgspec.Struct, frozen=True):
    """What one node expects of pulling from another, for others to read: routers, operators.

    latency_s: to the first byte; bytes_s: after it. latency_age_s, bytes_age_s: since each was measured;
        None: it never was, and is what nodes at this distance are taken for. inflight_bytes: asked of it and
        not answered yet. path: the URL by which it is pulled from, mostly.
    """

    node: str
    incarnation: str
    distance: Distance
    latency_s: float
    bytes_s: float
    latency_age_s: float | None = None
    bytes_age_s: float | None = None
    inflight_bytes: int = 0
    path: str = ""

    def load_s(self, nbytes: int, tier: int = TIERS["dram"]) -> float:
        """How long it takes until so much more has come from that tier of the node's."""
        first_s, per_byte = _TIER_EXTRA.get(tier, _NO_EXTRA)
        waiting = (self.inflight_bytes + nbytes) / self.bytes_s
        return self.latency_s + first_s + waiting + nbytes * per_byte


class PeerHealth:
    """What is known of one peer. Made and changed by `Peers` only.

    inflight_bytes: asked of it from here and not answered. failures: in a row.
    declined: parts of blocks not loaded from it, since computing them is sooner.
    heard_at, loaded_at: when its latency and its bandwidth were measured last; probed_at, tried_at: when that
        was last begun for its own sake.
    place: the node's name and URL; empty: not known.
    suspended_until, suspected_until: in the past when not 0: on probation.
    """

    __slots__ = (
        "asked",
        "bytes_done",
        "declined",
        "distance",
        "failed",
        "failures",
        "heard_at",
        "inflight_bytes",
        "last_error",
        "latency_s",
        "loaded_at",
        "measured_bytes",
        "measured_s",
        "network",
        "place",
        "probe_failures",
        "probe_until",
        "probed_at",
        "probes",
        "running",
        "slow",
        "suspected_until",
        "suspended_until",
        "tried_at",
    )

    def __init__(self, network: Network) -> None:
        self.network = network
        self.distance = Distance.UNKNOWN
        self.place = ("", "")
        self.latency_s = 0.0  # 0: not measured
        self.measured_bytes = 0.0  # of large transfers, older ones weighing less
        self.measured_s = 0.0
        self.inflight_bytes = 0
        self.running = 0
        self.failures = 0
        self.suspended_until = 0.0
        self.suspected_until = 0.0
        self.probe_until = 0.0
        self.heard_at = self.loaded_at = self.probed_at = self.tried_at = -math.inf
        self.asked = self.failed = self.slow = self.bytes_done = self.declined = 0
        self.probes = self.probe_failures = 0
        self.last_error = ""

    def expected(self, now: float) -> tuple[float, float]:
        """Seconds to the first byte, and seconds a byte after it, for one request on an idle peer."""
        latency_s, per_byte = self.network.assumed(self.distance)
        if self.measured_bytes:
            measured = self.measured_s / self.measured_bytes
            per_byte += _trust(now - self.loaded_at) * (measured - per_byte)
        if self.latency_s:
            latency_s += _trust(now - self.heard_at) * (self.latency_s - latency_s)
        return latency_s, min(per_byte, 1 / BYTES_S_MIN)

    def inherit(self, past: PeerHealth) -> None:
        """It is the same node as this one was, in a new life: what was measured is that much older."""
        self.latency_s = past.latency_s
        self.heard_at = past.heard_at - STALE_S
        self.measured_bytes, self.measured_s = past.measured_bytes, past.measured_s
        self.loaded_at = past.loaded_at - STALE_S

    def suspended(self, now: float) -> bool:
        """Whether it may not be asked at all: in back-off, or its one request on probation is under way."""
        if not self.failures:
            return False
        return now < self.suspended_until or now < self.probe_until

    def suspected(self, now: float) -> bool:
        """Whether it may be asked only for what nobody else has."""
        if not self.suspected_until:
            return False
        return now < self.suspected_until or now < self.probe_until

    @property
    def measured(self) -> bool:
        """Whether any request of it has ended well, or told how slow it is at least."""
        return bool(self.latency_s or self.measured_bytes)

    @property
    def on_probation(self) -> bool:
        """Whether it has done nothing well since it failed or was slow."""
        return bool(self.failures or self.suspected_until)

    def measure(self, nbytes: int, seconds: float, now: float, *, alone: bool = False) -> None:
        """A request for so much took so long; 0 when nothing had to be moved, which says nothing.

        alone: what it says, it says of this peer only.

        Transfers count by their bytes, but what is older than `TRIAL_S` for no more than the new one, so that
        a few small ones show that a source has changed.
        """
        if seconds <= 0:
            return
        if nbytes <= SMALL_BYTES or seconds < self.latency_s:
            self.hear(seconds, now, alone=alone)
        if nbytes > SMALL_BYTES:
            first_s = self.latency_s or self.network.assumed(self.distance)[0]
            transfer_s = max(seconds - first_s, seconds / 10)
            keep = kept(self.measured_bytes, now - self.loaded_at, nbytes)
            self.loaded_at = now
            self.measured_bytes = self.measured_bytes * keep + nbytes
            self.measured_s = self.measured_s * keep + transfer_s
            if not alone:
                self.network.measure(self.distance, nbytes, transfer_s, now)

    def hear(self, seconds: float, now: float, *, alone: bool = False) -> None:
        """The first byte of an answer took so long. alone: as for `measure`."""
        # What was measured long ago, or in the node's last life, counts no more than what is seen now.
        keep = DECAY if now - self.heard_at < STALE_S else DECAY / 2
        self.latency_s = self.latency_s * keep + seconds * (1 - keep) if self.latency_s else seconds
        self.heard_at = now
        if not alone:
            self.network.hear(self.distance, seconds)


def _trust(age_s: float) -> float:
    """How much of an estimate is what was measured so long ago; the rest is what is assumed."""
    return STALE_S / (STALE_S + max(0.0, age_s))


class Peers:
    """All peers that this node has pulled from lately, by incarnation.

    labels: of this node. rng: spreads ties, so that a cluster's readers do not all choose the same peer.
    capacity: how many peers are remembered, and how many nodes between two lives. apart: sources that are no nodes: from them nothing is learnt
    about nodes, nor the reverse.

    Every request that `started` ends in exactly one of `finished`, `failed` and `stopped`; an end
    without a start, as after `gone`, is harmless.
    """

    def __init__(
        self,
        labels: Mapping[str, str],
        rng: random.Random,
        *,
        capacity: int = 4096,
        apart: Iterable[bytes] = (),
    ) -> None:
        self._labels = dict(labels)
        self._capacity = capacity
        self._peers: OrderedDict[bytes, PeerHealth] = OrderedDict()
        self._past: OrderedDict[tuple[str, str], PeerHealth] = OrderedDict()
        self._network = Network()
        self._apart = {incarnation: Network() for incarnation in apart}
        self.rng = rng

    def __len__(self) -> int:
        return len(self._peers)

    def get(self, incarnation: bytes) -> PeerHealth | None:
        """To look at, not to change. None: nothing is known."""
        return self._peers.get(incarnation)

    def stranger(self, incarnation: bytes) -> PeerHealth:
        """What is assumed of a source that nothing, or nothing lately, is known of."""
        return PeerHealth(self._apart.get(incarnation, self._network))

    def met(
        self,
        incarnation: bytes,
        labels: Mapping[str, str],
        *,
        place: tuple[str, str] = ("", ""),
        same_host: bool = False,
    ) -> None:
        """A peer's labels are these. Tell again when they change; without them nobody knows how far it is.

        place: the node's name and URL. What was learnt of an incarnation that was there and is `gone` is
            half believed of this one, if it is as far away.
        """
        peer = self._known(incarnation)
        peer.distance = distance_between(self._labels, labels, same_host=same_host)
        if place != peer.place:
            peer.place = place
            past = self._past.pop(place, None)
            if past is not None and past.distance is peer.distance and not peer.measured:
                peer.inherit(past)

    def gone(self, incarnation: bytes) -> None:
        """This incarnation is dead. Idempotent."""
        peer = self._peers.pop(incarnation, None)
        if peer is not None and peer.measured and peer.place[0]:
            self._past[peer.place] = peer
            self._past.move_to_end(peer.place)
            if len(self._past) > self._capacity:
                self._past.popitem(last=False)

    def started(self, incarnation: bytes, nbytes: int, now: float) -> None:
        """A request for so much is on its way to it."""
        peer = self._known(incarnation)
        peer.asked += 1
        peer.running += 1
        peer.inflight_bytes += nbytes
        if peer.on_probation:
            peer.probe_until = now + PROBE_S

    def finished(
        self,
        incarnation: bytes,
        nbytes: int,
        seconds: float,
        now: float,
        *,
        asked: int | None = None,
    ) -> None:
        """It answered: so much arrived in so long. asked: as `started`, when that was something else.

        That it lacked all or some of what was asked is an answer as good as any.
        """
        peer = self._known(incarnation)
        self._ended(peer, nbytes if asked is None else asked)
        peer.bytes_done += nbytes
        peer.failures = 0
        peer.suspended_until = peer.suspected_until = peer.probe_until = 0.0
        peer.measure(nbytes, seconds, now)

    def failed(
        self,
        incarnation: bytes,
        now: float,
        *,
        error: object,
        asked: int | None = None,
        at_most: int = 0,
        seconds: float = 0.0,
    ) -> None:
        """A request for `asked` bytes broke or ran into its deadline. None: one of average size.

        at_most: what had arrived in these seconds, and what may have been half there. It can only make the
            peer slower: one whose transfers all end by their deadline would never be known to be slow.
        What fails while the peer is suspended already was under way before, and tells nothing new.
        """
        peer = self._known(incarnation)
        latency_s, per_byte = peer.expected(now)
        if at_most > SMALL_BYTES and seconds > latency_s + at_most * per_byte:
            peer.measure(at_most, seconds, now, alone=True)
        if asked is None:
            asked = peer.inflight_bytes // max(1, peer.running)
        self._ended(peer, asked)
        peer.failed += 1
        peer.last_error = str(error)
        if now >= peer.suspended_until:
            backoff_s = min(BACKOFF_S * 2.0**peer.failures, BACKOFF_S_MAX)
            peer.failures = min(peer.failures + 1, 16)
            peer.suspended_until = now + backoff_s
            peer.probe_until = 0.0

    def stopped(self, incarnation: bytes, asked: int) -> None:
        """A request was given up by ourselves: somebody else was faster, or nobody wants it any more.

        Says nothing about the peer: when it was too slow, that is for `slow` to say.
        """
        peer = self._known(incarnation)
        self._ended(peer, asked)
        if not peer.running:
            peer.probe_until = 0.0  # nothing is under way any more that could show what it is worth

    def slow(self, incarnation: bytes, now: float) -> None:
        """A request has not been answered by `hedge_after_s`: somebody else is asked too."""
        peer = self._known(incarnation)
        peer.slow += 1
        if now >= peer.suspected_until:
            peer.suspected_until = now + SUSPECT_S
            peer.probe_until = 0.0

    def declined(self, incarnation: bytes, parts: int) -> None:
        """So many parts of blocks were not loaded from it, since they are computed sooner."""
        self._known(incarnation).declined += parts

    def begin_trial(self, incarnation: bytes, now: float) -> bool:
        """Whether a little is to be loaded from it although that is not worth it; if so, it counts as done.

        Else a source that was slow once, or is only thought to be, would never be found to be fast. That is
        so when its bandwidth was not measured for `TRIAL_S`, and no other trial begun.
        """
        peer = self._known(incarnation)
        if (
            now - max(peer.tried_at, peer.loaded_at) < TRIAL_S
            or peer.running
            or peer.suspended(now)
        ):
            return False
        peer.tried_at = now
        return True

    def to_probe(
        self, incarnations: Iterable[bytes], now: float, after_s: float, count: int
    ) -> list[bytes]:
        """Up to so many of these whose latency nobody has measured for `after_s`, the longest ago first.

        Those that are asked something just now tell by themselves, and those in back-off are left alone.
        They count as probed: see `probed` and `probe_failed`.
        """
        due: list[tuple[float, float, bytes, PeerHealth]] = []
        for incarnation in incarnations:
            peer = self._known(incarnation)
            last = max(peer.heard_at, peer.probed_at)
            if now - last >= after_s and not (peer.running or peer.suspended(now)):
                due.append((last, self.rng.random(), incarnation, peer))
        chosen = heapq.nsmallest(count, due, key=lambda one: one[:2])
        for *_, peer in chosen:
            peer.probed_at = now
        return [incarnation for _, _, incarnation, _ in chosen]

    def probed(self, incarnation: bytes, seconds: float, now: float) -> None:
        """A probe was answered after so long. Says nothing of whether its blocks can be had."""
        peer = self._known(incarnation)
        peer.probes += 1
        peer.hear(seconds, now)

    def probe_failed(self, incarnation: bytes) -> None:
        """A probe was not answered. Counted, and no more: whom real requests reach is trusted."""
        self._known(incarnation).probe_failures += 1

    def link(self, incarnation: bytes, node: str, now: float, path: str = "") -> Link:
        """What is expected of pulling from a peer."""
        peer = self._peers.get(incarnation) or self.stranger(incarnation)
        latency_s, per_byte = peer.expected(now)
        return Link(
            node,
            incarnation.hex(),
            peer.distance,
            latency_s,
            1 / per_byte,
            now - peer.heard_at if peer.latency_s else None,
            now - peer.loaded_at if peer.measured_bytes else None,
            peer.inflight_bytes,
            path,
        )

    def distance(self, incarnation: bytes) -> Distance:
        """How far it is, by the labels of both."""
        peer = self._peers.get(incarnation)
        return Distance.UNKNOWN if peer is None else peer.distance

    def hedge_after_s(self, incarnation: bytes, nbytes: int) -> float:
        """How long to wait for this much from it before somebody else is asked as well.

        Four times the expected time, at least 50 ms, at most 300 ms more than the transfer is expected to
        take behind what is in flight already: a peer that is busy is not mistaken for a stopped one. Ask
        before `started`.
        """
        peer = self._peers.get(incarnation) or self.stranger(incarnation)
        latency_s, per_byte = peer.expected(-math.inf)  # as measured, however long ago
        transfer_s = (peer.inflight_bytes + nbytes) * per_byte
        times = HEDGE_TIMES * (latency_s + transfer_s)
        return max(HEDGE_S_MIN, min(times, HEDGE_S_MAX + transfer_s))

    def stats(self, now: float) -> list[dict[str, Any]]:
        """Plain values, one dict a peer."""
        out = []
        for incarnation, peer in self._peers.items():
            latency_s, per_byte = peer.expected(now)
            out.append(
                {
                    "incarnation": incarnation.hex(),
                    "distance": peer.distance.value,
                    "latency_ms": latency_s * 1e3,
                    "bytes_s": 1 / per_byte,
                    "measured": peer.measured,
                    "probes": peer.probes,
                    "probe_failures": peer.probe_failures,
                    "inflight_bytes": peer.inflight_bytes,
                    "running": peer.running,
                    "asked": peer.asked,
                    "failed": peer.failed,
                    "slow": peer.slow,
                    "bytes": peer.bytes_done,
                    "declined": peer.declined,
                    "suspended_s": max(0.0, peer.suspended_until - now),
                    "suspected": bool(peer.suspected_until),
                    "last_error": peer.last_error,
                }
            )
        return out

    def _known(self, incarnation: bytes) -> PeerHealth:
        peer = self._peers.get(incarnation)
        if peer is None:
            peer = self._peers[incarnation] = self.stranger(incarnation)
            if len(self._peers) > self._capacity:
                self._peers.popitem(last=False)
        else:
            self._peers.move_to_end(incarnation)
        return peer

    @staticmethod
    def _ended(peer: PeerHealth, asked: int) -> None:
        peer.running = max(0, peer.running - 1)
        # Whatever callers disagree about, nothing is in flight when nothing runs.
        peer.inflight_bytes = max(0, peer.inflight_bytes - asked) if peer.running else 0


class _Option:
    """A peer while a plan is made. `rank`: 0 fine, 1 last resort, 2 not to be asked."""

    __slots__ = ("ends_at", "fixed", "indices", "per_byte", "rank", "stretch")

    def __init__(self, peer: PeerHealth, now: float, stretch: float) -> None:
        latency_s, self.per_byte = peer.expected(now)
        # When what it has to do is done, if it were given nothing more, and what a request adds to that.
        self.ends_at = peer.inflight_bytes * self.per_byte
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
    """Whom to ask for what, so that all is here soonest and the beginning first.

    wanted[i]: who has the i-th missing block, in the order of the chain; nbytes: the size of each.
    Goes through the blocks in slices of up to `slice_bytes`, and gives each slice to the one who is
    expected to deliver it first, given all that was asked of it before; so several work in parallel
    where that is faster, and few blocks are not scattered. One assignment a peer, the one with the
    earliest block first.

    Blocks that nobody has, or only peers in back-off, are in no assignment. Suspected peers are asked only
    for what nobody else has; so are peers on probation for all but one slice. Changes nothing: tell
    `Peers.started` of each request that is really made.
    """
    options: dict[bytes, _Option] = {}
    per_slice = max(1, slice_bytes // nbytes)
    current: Candidate | None = None
    indices: list[int] = []
    left = 0
    having: object = None  # candidates that `current` is one of: neighbours mostly share theirs
    for index, candidates in enumerate(wanted):
        if left and (candidates is having or current in candidates):
            indices.append(index)
            left -= 1
            continue
        if left and current is not None:  # the slice ended early: take back what it was booked for
            _book(options[current.incarnation], current.tier, -left * nbytes)
            left = 0
        current = _fastest(candidates, options, nbytes * per_slice, peers, now)
        if current is None:
            continue
        having = candidates
        option = options[current.incarnation]
        # Peers of last resort get one block at a time: the next one may be elsewhere too.
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
    """Who of them would be done with so much more first; None if none of them may be asked."""
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
        first_s, per_byte = _TIER_EXTRA.get(tier, _NO_EXTRA)
        seconds = option.ends_at + option.fixed + first_s + nbytes * (option.per_byte + per_byte)
        seconds *= option.stretch
        if rank < best_rank or seconds < best_s:
            best, best_rank, best_s = candidate, rank, seconds
    return best


def _book(option: _Option, tier: int, nbytes: int) -> None:
    """A peer has so much more to deliver, or less."""
    first_s, per_byte = _TIER_EXTRA.get(tier, _NO_EXTRA)
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

    sought: for each part, the size of its blocks and who has each of the missing ones. awaited: who is about
    to deliver more of them already, as part of what is in flight. Several sources work at the same time, each
    at one thing after the other. Changes nothing.
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
                # Object storage is a source of its own: what was measured of it is all there is to it.
                first_s, extra = _TIER_EXTRA.get(tier, _NO_EXTRA)
                if tier == TIERS["remote"] and peer.measured:
                    first_s, extra = 0.0, 0.0 if peer.measured_bytes else extra
                end += first_s + blocks * nbytes * (per_byte + extra)
            ends[incarnation] = end
        complete = complete and planned == len(wanted)
    return Forecast(max(ends.values(), default=0.0) if complete else math.inf, shares)


def _idle_at(peers: Peers, incarnation: bytes, now: float) -> float:
    """In how many seconds the first byte comes of what is asked of a peer now."""
    peer = peers.get(incarnation) or peers.stranger(incarnation)
    latency_s, per_byte = peer.expected(now)
    return latency_s + peer.inflight_bytes * per_byte


def _tier(candidates: Iterable[Candidate], incarnation: bytes) -> int:
    return next(tier for other, tier in candidates if other == incarnation)


class NegativeMemory:
    """Who was found to lack what, or to have it corrupt, though the directory says it is there.

    For the time that a wrong hint takes to be withdrawn. Each call is O(1).
    """

    def __init__(self, capacity: int, ttl_s: float) -> None:
        self._capacity = capacity
        self._ttl_s = ttl_s
        # In the order of their ends, since all last equally long.
        self._until: OrderedDict[tuple[bytes, int, bytes, bytes], float] = OrderedDict()

    def __len__(self) -> int:
        """How many there are, expired ones perhaps included: when 0, there is no need to ask."""
        return len(self._until)

    def add(self, digest: bytes, part: int, key: bytes, incarnation: bytes, now: float) -> None:
        until = self._until
        item = (digest, part, key, incarnation)
        until[item] = now + self._ttl_s
        until.move_to_end(item)
        for _ in range(2):  # two out for one in: what has expired goes, a little at a time
            oldest = next(iter(until))
            if len(until) <= self._capacity and until[oldest] > now:
                break
            del until[oldest]
            if not until:
                break

    def has(self, digest: bytes, part: int, key: bytes, incarnation: bytes, now: float) -> bool:
        return self._until.get((digest, part, key, incarnation), now) > now


class Remembered:
    """The last known entries of keys, for the time when the directory is away.

    capacity: in keys. Entries are kept packed, so that many of them are nothing to the garbage collector.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._packed: OrderedDict[bytes, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._packed)

    def learn(
        self, digest: bytes, keys: Sequence[bytes], entries: Sequence[Sequence[Entry]]
    ) -> None:
        """The directory says this; that nobody has a key is remembered by forgetting it."""
        packed = self._packed
        last: Sequence[Entry] = ()
        form = b""
        for key, known in zip(keys, entries, strict=True):
            name = digest + key
            if not known:
                packed.pop(name, None)
                continue
            if known != last:  # blocks of one prompt mostly lie together: one copy serves them all
                last, form = known, _pack(known)
            packed[name] = form
            packed.move_to_end(name)
        while len(packed) > self._capacity:
            packed.popitem(last=False)

    def recall(self, digest: bytes, keys: Sequence[bytes]) -> list[list[Entry]]:
        """What was known of each key at last; nothing for keys that are not remembered."""
        packed = self._packed
        found: list[list[Entry]] = []
        last = b""
        entries: list[Entry] = []
        for key in keys:
            name = digest + key
            form = packed.get(name)
            if form is None:
                found.append([])
                continue
            packed.move_to_end(name)
            if form != last:
                last, entries = form, _unpack(form)
            found.append(entries.copy())
        return found

    def forget(self, digest: bytes, keys: Iterable[bytes], incarnation: bytes) -> None:
        """This incarnation turned out not to have these."""
        for key in keys:
            form = self._packed.get(digest + key)
            if form is None:
                continue
            rest = [entry for entry in _unpack(form) if entry.incarnation != incarnation]
            if rest:
                self._packed[digest + key] = _pack(rest)
            else:
                del self._packed[digest + key]


def _pack(entries: Iterable[Entry]) -> bytes:
    """One after the other: incarnation 8, tier 1, length of the mask 2, mask."""
    out: list[bytes] = []
    for incarnation, tier, mask in entries:
        size = (mask.bit_length() + 7) // 8
        out += (incarnation, bytes((tier,)), size.to_bytes(2), mask.to_bytes(size))
    return b"".join(out)


def _unpack(form: bytes) -> list[Entry]:
    entries = []
    at = 0
    while at < len(form):
        end = at + 11 + int.from_bytes(form[at + 9 : at + 11])
        entries.append(Entry(form[at : at + 8], form[at + 8], int.from_bytes(form[at + 11 : end])))
        at = end
    return entries


class DeadIncarnations:
    """Which incarnations are dead for certain, so that their entries may be swept.

    Those that were in the view and left it are; so are those that were met in entries and have not come
    into the view for `patience_s` seconds during which the membership answered: a node whose joining we
    could not see is not taken for dead. Nobody in the view ever is. Call `seen` with every view, and
    `passed` every second or so. Bounded by `capacity`: what is left out is met again.
    """

    def __init__(self, *, patience_s: float = 30.0, capacity: int = 4096) -> None:
        self._patience_s = patience_s
        self._capacity = capacity
        self._living: frozenset[bytes] = frozenset()
        self._strange: OrderedDict[bytes, float] = OrderedDict()  # connected time when first met
        self._dead: OrderedDict[bytes, None] = OrderedDict()
        self._connected_s = 0.0
        self._connected_at: float | None = None

    def seen(self, living: Collection[bytes]) -> None:
        """These are in the view now, our own included."""
        now_living = frozenset(living)
        for incarnation in self._living - now_living:
            self._declare(incarnation)
        for incarnation in now_living - self._living:
            self._strange.pop(incarnation, None)
            self._dead.pop(incarnation, None)
        self._living = now_living

    def met(self, incarnations: Iterable[bytes]) -> None:
        """These occur in entries of the directory. Call it with what is not known to live; cheap."""
        for incarnation in incarnations:
            known = incarnation in self._living or incarnation in self._dead
            if known or incarnation in self._strange:
                continue
            self._strange[incarnation] = self._connected_s
            if len(self._strange) > self._capacity:
                self._strange.popitem(last=False)

    def passed(self, now: float, *, connected: bool) -> None:
        """Time has come to `now`; connected: whether the membership answers at present.

        Only the time between two calls that both say so counts.
        """
        if connected and self._connected_at is not None:
            self._connected_s += now - self._connected_at
        self._connected_at = now if connected else None
        while self._strange:
            incarnation, since = next(iter(self._strange.items()))
            if self._connected_s - since < self._patience_s:
                break
            del self._strange[incarnation]
            self._declare(incarnation)

    def swept(self, incarnations: Iterable[bytes]) -> None:
        """The whole directory was swept of these: forget them. If they occur again, they are met again."""
        for incarnation in incarnations:
            self._dead.pop(incarnation, None)

    @property
    def dead(self) -> frozenset[bytes]:
        return frozenset(self._dead)

    def _declare(self, incarnation: bytes) -> None:
        self._dead[incarnation] = None
        if len(self._dead) > self._capacity:
            self._dead.popitem(last=False)

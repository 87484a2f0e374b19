"""What a node expects of pulling from another: learnt from transfers and probes. No I/O, no clock."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec

from kvpool.placement.directory.base import TIERS
from kvpool.placement.distance import DECAY, Distance, Network, kept
from kvpool.retry import Backoff

BACKOFF_S, BACKOFF_S_MAX = 0.2, 10.0
STALE_S = 30.0
"""After so long without a request, an estimate is half what was measured, half what is assumed."""
SMALL_BYTES = 256 << 10
"""Requests up to this size tell of latency, larger ones of bandwidth."""
BYTES_S_MIN = 1e6

_NO_EXTRA = (0.0, 0.0)
_TIER_EXTRA = {  # from the fastest to the slowest
    TIERS["gpu"]: _NO_EXTRA,
    TIERS["dram"]: _NO_EXTRA,
    TIERS["device"]: (0.0002, 1 / 10e9),
    TIERS["ssd"]: (0.0005, 1 / 1.5e9),
    TIERS["object"]: (0.05, 1 / 0.1e9),
}
_TIER_RANK = {tier: rank for rank, tier in enumerate(_TIER_EXTRA)}


def faster(tier: int, other: int) -> int:
    """The one of two tiers that a source delivers from sooner. Their numbers are in no order."""
    return min(tier, other, key=lambda one: _TIER_RANK.get(one, len(_TIER_RANK)))


def tier_costs(tier: int) -> tuple[float, float]:
    """What a tier adds to a pull: seconds to its first byte, seconds a byte."""
    return _TIER_EXTRA.get(tier, _NO_EXTRA)


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
        first_s, per_byte = tier_costs(tier)
        waiting = (self.inflight_bytes + nbytes) / self.bytes_s
        return self.latency_s + first_s + waiting + nbytes * per_byte


@dataclass(eq=False, slots=True)
class PeerHealth:
    """What is known of one peer. Made and changed by `Peers` only.

    inflight_bytes: asked of it from here and not answered; waiting, waiting_bytes: requests that wait here for
        their turn. backoff: after failures in a row.
    declined: parts of blocks not loaded from it, since computing them is sooner.
    heard_at, loaded_at: when its latency and its bandwidth were measured last; probed_at, tried_at: when that
        was last begun for its own sake.
    place: the node's name and URL; empty: not known.
    backoff.retry_at, suspected_until: in the past when not 0: on probation.
    """

    network: Network
    distance: Distance = Distance.UNKNOWN
    place: tuple[str, str] = ("", "")
    latency_s: float = 0.0  # 0: not measured
    measured_bytes: float = 0.0  # of large transfers, older ones weighing less
    measured_s: float = 0.0
    inflight_bytes: int = 0
    waiting_bytes: int = 0
    running: int = 0
    waiting: int = 0
    backoff: Backoff = field(default_factory=lambda: Backoff(BACKOFF_S, BACKOFF_S_MAX))
    suspected_until: float = 0.0
    probe_until: float = 0.0
    heard_at: float = -math.inf
    loaded_at: float = -math.inf
    probed_at: float = -math.inf
    tried_at: float = -math.inf
    asked: int = 0
    failed: int = 0
    slow: int = 0
    bytes_done: int = 0
    declined: int = 0
    probes: int = 0
    probe_failures: int = 0
    last_error: str = ""

    def expected(self, now: float) -> tuple[float, float]:
        """Seconds to the first byte, and seconds a byte after it, for one request on an idle peer."""
        latency_s, per_byte = self.network.assumed(self.distance)
        if self.measured_bytes:
            measured = self.measured_s / self.measured_bytes
            per_byte += _trust(now - self.loaded_at) * (measured - per_byte)
        if self.latency_s:
            latency_s += _trust(now - self.heard_at) * (self.latency_s - latency_s)
        return latency_s, min(per_byte, 1 / BYTES_S_MIN)

    @property
    def ahead_bytes(self) -> int:
        """What a new request finds before it."""
        return self.inflight_bytes + self.waiting_bytes

    def inherit(self, past: PeerHealth) -> None:
        """It is the same node as this one was, in a new life: what was measured is that much older."""
        self.latency_s = past.latency_s
        self.heard_at = past.heard_at - STALE_S
        self.measured_bytes, self.measured_s = past.measured_bytes, past.measured_s
        self.loaded_at = past.loaded_at - STALE_S

    def suspended(self, now: float) -> bool:
        """Whether it may not be asked at all: in back-off, or its one request on probation is under way."""
        if not self.backoff.failures:
            return False
        return not self.backoff.due(now) or now < self.probe_until

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
        return bool(self.backoff.failures or self.suspected_until)

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

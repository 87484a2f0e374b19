"""The distance between nodes, and assumptions about a node before it was measured. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple


class Distance(StrEnum):
    """From one node to another, by the labels in their records. `UNKNOWN`: no labels."""

    HOST = "host"
    RACK = "rack"
    ZONE = "zone"
    UNKNOWN = "unknown"
    FAR = "far"


class Prior(NamedTuple):
    """Assumptions about a node at some distance.

    latency_s: to the first byte of an answer, both daemons' share included. bytes_s: of a large pull.
    reluctance: how many times as fast it must be as one in the same rack to be preferred to it, because
        it uses links that others need, and that may cost money.
    """

    latency_s: float
    bytes_s: float
    reluctance: float


PRIORS = {
    Distance.HOST: Prior(0.0005, 2e9, 1.0),
    Distance.RACK: Prior(0.001, 1e9, 1.0),
    Distance.ZONE: Prior(0.0015, 0.7e9, 1.1),
    Distance.UNKNOWN: Prior(0.002, 0.5e9, 1.1),
    Distance.FAR: Prior(0.003, 0.33e9, 1.3),
}

DECAY = 0.8
"""The factor that a measurement applies to the weight of all earlier ones."""
APART = 1.25
"""What is so many times faster or slower than others at its distance is told apart from them."""
OLD_S = 10.0
"""Older measurements weigh no more than a new one, whatever their sizes."""


def distance_between(
    ours: Mapping[str, str], theirs: Mapping[str, str], *, same_host: bool = False
) -> Distance:
    """By labels: racks are names within a zone, and a cluster may have racks and no zones."""
    if same_host:
        return Distance.HOST
    zone, other_zone = ours.get("zone"), theirs.get("zone")
    if zone and other_zone and zone != other_zone:
        return Distance.FAR
    rack = ours.get("rack")
    if rack and rack == theirs.get("rack") and zone == other_zone:
        return Distance.RACK
    return Distance.ZONE if zone and other_zone else Distance.UNKNOWN


class Typical:
    """The mean measurements of some sources, 0 if there are none."""

    __slots__ = ("latency_s", "measured_at", "measured_bytes", "measured_s")

    def __init__(self) -> None:
        self.latency_s = 0.0
        self.measured_bytes = 0.0
        self.measured_s = 0.0
        self.measured_at = 0.0

    @property
    def per_byte(self) -> float:
        return self.measured_s / self.measured_bytes if self.measured_bytes else 0.0

    def hear(self, latency_s: float) -> None:
        before = self.latency_s
        self.latency_s = before * DECAY + latency_s * (1 - DECAY) if before else latency_s

    def measure(self, nbytes: int, seconds: float, now: float) -> None:
        keep = kept(self.measured_bytes, now - self.measured_at, nbytes)
        self.measured_bytes = self.measured_bytes * keep + nbytes
        self.measured_s = self.measured_s * keep + seconds
        self.measured_at = now


class Network:
    """Assumptions about nodes that were not measured recently, from all that were.

    A node is assumed to be like others at its distance. If none of those was measured, the network is assumed
    to be as much better or worse than the priors there as it is at other distances. A fixed assumption below
    the network's real speed would keep the first measured node the only one.
    """

    def __init__(self) -> None:
        self._at = {distance: Typical() for distance in Distance}
        self._all = Typical()  # in multiples of the priors
        # Starting from the priors: one answer, perhaps a late one, does not speak for all distances.
        self._all.latency_s = 1.0

    def assumed(self, distance: Distance) -> tuple[float, float]:
        """Seconds to the first byte, and seconds a byte after it."""
        typical, prior = self._at[distance], PRIORS[distance]
        latency_s = typical.latency_s or prior.latency_s * self._all.latency_s
        per_byte = typical.per_byte or (self._all.per_byte or 1.0) / prior.bytes_s
        return latency_s, per_byte

    def measured(self) -> list[tuple[Distance, float, float]]:
        """The distances at which bandwidth was measured, over how many bytes, older ones counting less, and when last."""
        return [
            (distance, typical.measured_bytes, typical.measured_at)
            for distance, typical in self._at.items()
            if typical.measured_bytes
        ]

    def hear(self, distance: Distance, latency_s: float) -> None:
        """The first byte of an answer took this long."""
        self._at[distance].hear(latency_s)
        self._all.hear(latency_s / PRIORS[distance].latency_s)

    def measure(self, distance: Distance, nbytes: int, seconds: float, now: float) -> None:
        """This many bytes took this long, after the first one."""
        self._at[distance].measure(nbytes, seconds, now)
        self._all.measure(nbytes, seconds * PRIORS[distance].bytes_s, now)


def kept(measured_bytes: float, age_s: float, nbytes: int) -> float:
    """The factor that a transfer of this size applies to all earlier transfers' weight."""
    if age_s < OLD_S or measured_bytes <= nbytes:
        return DECAY
    return DECAY * nbytes / measured_bytes

"""Distributions of values: counts by bucket, as in Prometheus. No I/O."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
AGES_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0, 86_400.0, 604_800.0)
RATIOS = (0.1, 0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0, 10.0)


class Histogram:
    """Values so far, by the first bound that is not below them. Not thread-safe.

    bounds: ascending; beyond the last one there is one bucket more.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def stats(self) -> dict[str, Any]:
        """Plain values. counts: in each bucket alone. sum: of all values."""
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.total}

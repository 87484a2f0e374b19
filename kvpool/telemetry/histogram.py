"""Distributions of values: counts by bucket, as in Prometheus. No I/O."""

from __future__ import annotations

from bisect import bisect_left

import msgspec

SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
AGES_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0, 86_400.0, 604_800.0)
RATIOS = (0.1, 0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0, 10.0)


class Histogram(msgspec.Struct):
    """Values so far, by the first bound that is not below them. Not thread-safe.

    bounds: ascending; beyond the last one there is one bucket more. counts: in each bucket alone. total: of all
    values; `sum` in JSON.
    """

    bounds: tuple[float, ...] = SECONDS
    counts: list[int] = []
    total: float = msgspec.field(default=0.0, name="sum")

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

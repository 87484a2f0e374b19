"""How long ago a tick was: blocks record ticks, not times. No I/O.

The rules count a tick for each batch that is put or read (`Ledger.tick`). Occasional samples of the tick and the
time give the age of any tick; samples get sparser with age, so that a few dozen cover days.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import numpy.typing as npt

LEVELS = 40
"""Bands of age, each as long as all younger ones together: the first is one sample wide."""
PER_LEVEL = 4  # samples


class IdleAge:
    """Samples of (time, tick), oldest first."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._ticks: list[int] = []

    def note(self, now: float, tick: int) -> None:
        """The tick at this time, which must not be before the last sample."""
        self._times.append(now)
        self._ticks.append(tick)
        if len(self._times) > LEVELS * PER_LEVEL:
            self._thin(now)

    def _thin(self, now: float) -> None:
        """Drop the sample closest to its neighbour relative to its age."""
        times = self._times
        closeness = [
            (times[at + 1] - times[at - 1]) / max(now - times[at], 1e-9)
            for at in range(1, len(times) - 1)
        ]
        at = 1 + closeness.index(min(closeness))
        del self._times[at], self._ticks[at]

    def age_s(self, tick: int, now: float) -> float:
        """The approximate age of this tick; at most that of the first sample."""
        at = bisect_left(self._ticks, tick)
        if at == len(self._ticks):
            return 0.0
        return now - self._times[at]

    def each_age_s(self, ticks: npt.NDArray[np.int64], now: float) -> npt.NDArray[np.float64]:
        """The same of several."""
        times = np.array([*self._times, now])
        return now - times[np.searchsorted(self._ticks, ticks)]

    def tick_before(self, seconds: float, now: float) -> int:
        """Everything with this tick or an earlier one is at least this old. -1: nothing is known to be."""
        at = bisect_left(self._times, now - seconds)
        if at == len(self._times) or self._times[at] > now - seconds:
            at -= 1
        return self._ticks[at] if at >= 0 else -1

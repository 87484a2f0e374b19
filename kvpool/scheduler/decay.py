"""A sum that decays exponentially. No I/O, no clock."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Decaying:
    """Values count e times less after each `window_s`; so the sum is about that of the last window."""

    window_s: float
    _sum: float = 0.0
    _at: float = 0.0

    def add(self, amount: float, now: float) -> None:
        self._sum = self.sum(now) + amount
        self._at = max(self._at, now)

    def sum(self, now: float) -> float:
        if not self._sum:
            return 0.0
        return self._sum * math.exp(min(0.0, self._at - now) / self.window_s)

    def rate(self, now: float) -> float:
        """Per second."""
        return self.sum(now) / self.window_s

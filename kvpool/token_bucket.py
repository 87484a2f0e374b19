"""A token bucket: what may be used comes at a rate, and is saved up to a limit. No I/O; the time is an argument."""

from __future__ import annotations

import math


class TokenBucket:
    """Tokens (bytes, requests, seconds) that come at `rate` a second, up to `most`. Full at first. Not thread-safe.

    debt: how many more than there are can be held against who takes them. A clock that goes back earns nothing.
    rate and most may be changed: from the next call on.
    """

    __slots__ = ("_at", "_debt", "_left", "most", "rate")

    def __init__(self, rate: float, most: float, now: float, debt: float = math.inf) -> None:
        self.rate = rate
        self.most = most
        self._debt = debt
        self._left = most
        self._at = now

    def left(self, now: float) -> float:
        """Return how many there are. Negative: a debt, which is paid first."""
        if now > self._at:
            self._left += (now - self._at) * self.rate
            self._at = now
        self._left = min(self.most, self._left)
        return self._left

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until there are this many."""
        return max(0.0, amount - self.left(now)) / self.rate

    def take(self, amount: float, now: float) -> float:
        """Take this many, though there may be fewer, and return the seconds until the debt is paid."""
        self._left = max(self.left(now) - amount, -self._debt)
        return max(0.0, -self._left) / self.rate

"""Simulated time: what is to happen when."""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Timeline:
    """Calls functions at their times; those of one time in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, when: float, what: Callable[..., None], *arguments: Any) -> None:
        """Call it then; at once if that has passed. There is no taking back."""
        self._count += 1
        heappush(self._heap, (max(when, self.now), self._count, what, arguments))

    @property
    def next_at(self) -> float:
        return self._heap[0][0] if self._heap else math.inf

    def step(self) -> None:
        """Do the next thing."""
        self.now, _, what, arguments = heappop(self._heap)
        what(*arguments)

"""Which requests have missed their deadline. No I/O, no clock."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush

from kvpool.scheduler.values import Request

STALE_MIN = 1024
"""Entries of ended requests are removed when there are this many and they are half of all."""


class Deadlines:
    """Deadlines of active requests. Adding and removing is O(log n). Not thread-safe."""

    def __init__(self) -> None:
        self._at: dict[Hashable, float] = {}
        self._heap: list[tuple[float, int, Hashable]] = []
        self._count = 0

    def add(self, request: Request) -> None:
        """A request that is already present keeps its deadline."""
        if request.deadline_s == self._at.get(request.ident):
            return
        if request.deadline_s < math.inf:
            self._at[request.ident] = request.deadline_s
            self._count += 1
            heappush(self._heap, (request.deadline_s, self._count, request.ident))

    def remove(self, ident: Hashable) -> None:
        """Unknown requests are ignored."""
        self._at.pop(ident, None)
        if len(self._heap) > STALE_MIN + 2 * len(self._at):
            self._heap = [entry for entry in self._heap if self._at.get(entry[2]) == entry[0]]
            heapify(self._heap)

    @property
    def next_at(self) -> float:
        """The next deadline; infinite if there is none."""
        self._sweep()
        return self._heap[0][0] if self._heap else math.inf

    def over(self, now: float) -> Iterator[Hashable]:
        """Requests whose deadline has passed, each returned once and then forgotten."""
        while self.next_at <= now:
            _, _, ident = heappop(self._heap)
            del self._at[ident]
            yield ident

    def _sweep(self) -> None:
        heap = self._heap
        while heap and self._at.get(heap[0][2]) != heap[0][0]:
            heappop(heap)

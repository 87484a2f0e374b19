"""Which requests are too late. No I/O, no clock."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush

from kvpool.scheduler.values import Request

STALE_MIN = 1024
"""Entries of requests that have ended are swept out when there are so many and half of all."""


class Deadlines:
    """Of requests that are under way. Adding and removing is O(log n). Not thread-safe."""

    def __init__(self) -> None:
        self._at: dict[Hashable, float] = {}
        self._heap: list[tuple[float, int, Hashable]] = []
        self._count = 0

    def add(self, request: Request) -> None:
        """One that is there already stays."""
        if request.deadline_s == self._at.get(request.ident):
            return
        if request.deadline_s < math.inf:
            self._at[request.ident] = request.deadline_s
            self._count += 1
            heappush(self._heap, (request.deadline_s, self._count, request.ident))

    def remove(self, ident: Hashable) -> None:
        """An unknown one is passed over."""
        self._at.pop(ident, None)
        if len(self._heap) > STALE_MIN + 2 * len(self._at):
            self._heap = [entry for entry in self._heap if self._at.get(entry[2]) == entry[0]]
            heapify(self._heap)

    @property
    def next_at(self) -> float:
        """When the next one is over; infinite if none is."""
        self._sweep()
        return self._heap[0][0] if self._heap else math.inf

    def over(self, now: float) -> Iterator[Hashable]:
        """Those whose deadline has passed, each once; they are forgotten."""
        while self.next_at <= now:
            _, _, ident = heappop(self._heap)
            del self._at[ident]
            yield ident

    def _sweep(self) -> None:
        heap = self._heap
        while heap and self._at.get(heap[0][2]) != heap[0][0]:
            heappop(heap)

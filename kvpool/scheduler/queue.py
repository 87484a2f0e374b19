"""Requests that wait in the scheduler, in the order in which they are to go. No I/O, no clock.

By size the mean wait would be the shortest possible, and a long prompt might never go. So the order is by

    min(size, cap) + aging x arrival

where size is the seconds that are left to compute, or a share of that for a prompt that was begun. Prompts
above the cap go in the order of their arrival, and nobody is overtaken by what came more than cap / aging
seconds later. Higher priorities go first. Not thread-safe.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from kvpool.errors import ConfigError
from kvpool.scheduler.index import Match
from kvpool.scheduler.values import Engine, Request


@dataclass(frozen=True, slots=True)
class QueueRule:
    """cap_s, aging: see above. begun: what counts of the size of a prompt that was begun, from 0 to 1."""

    cap_s: float
    aging: float
    begun: float

    def __post_init__(self) -> None:
        if not (self.cap_s >= 0 and self.aging > 0 and 0 <= self.begun <= 1):
            raise ConfigError(f"a queue needs cap_s >= 0, aging > 0 and begun from 0 to 1: {self}")

    def key(self, size_s: float, arrived_s: float, *, begun: bool) -> float:
        return min(size_s * (self.begun if begun else 1.0), self.cap_s) + self.aging * arrived_s


FIFO = QueueRule(cap_s=0.0, aging=1.0, begun=1.0)
SIZE_AWARE = QueueRule(cap_s=3.0, aging=0.1, begun=0.25)
"""Chosen on the first half of the conversation trace."""


@dataclass(slots=True)
class Waiting:
    """A request in the queue. done: tokens of its prompt that were computed by its orders so far.

    running: the engine that computes the segment before `done`, while it does: what comes behind keeps
    its place in the queue. match: as the index had it at `matched_at`, for whoever asks again soon.
    decode: the engine that keeps memory for it, once it was the first that lacked any.
    """

    request: Request
    size_s: float
    done: int = 0
    running: Engine | None = None
    match: Match | None = None
    matched_at: float = 0.0
    decode: Engine | None = None


class RequestQueue:
    """Adding and removing is O(log n), and moves n pointers at most."""

    def __init__(self, rule: QueueRule) -> None:
        self._rule = rule
        self._order: list[tuple[int, float, int]] = []
        self._items: dict[int, Waiting] = {}
        self._keys: dict[int, tuple[int, float, int]] = {}
        self._numbers: dict[object, int] = {}
        self._next = 0
        self.total_s = 0.0
        """Seconds of prefill that wait."""

    def __len__(self) -> int:
        return len(self._order)

    def add(self, item: Waiting) -> None:
        """Equal ones go in the order in which they were added."""
        number = self._next
        self._next += 1
        request = item.request
        key = self._rule.key(item.size_s, request.arrived_s, begun=item.done > 0)
        entry = (-request.priority, key, number)
        insort(self._order, entry)
        self._items[number] = item
        self._keys[number] = entry
        self._numbers[request.ident] = number
        self.total_s += item.size_s

    def get(self, ident: object) -> Waiting:
        """The one of this request; a KeyError if it does not wait."""
        return self._items[self._numbers[ident]]

    def remove(self, ident: object) -> Waiting | None:
        """It waits no more; None if it did not."""
        number = self._numbers.pop(ident, None)
        if number is None:
            return None
        entry = self._keys.pop(number)
        del self._order[bisect_left(self._order, entry)]
        item = self._items.pop(number)
        # An empty queue has no rounding errors left.
        self.total_s = self.total_s - item.size_s if self._order else 0.0
        return item

    def first(self, count: int) -> Iterator[Waiting]:
        """The first so many, in order. The queue must not change meanwhile."""
        return (self._items[number] for _, _, number in islice(self._order, count))

    def ahead_s(self, size_s: float, request: Request) -> float:
        """Seconds of prefill that go before a request of this size, among what waits now. O(n)."""
        entry = (-request.priority, self._rule.key(size_s, request.arrived_s, begun=False))
        end = bisect_left(self._order, (*entry, self._next))
        return sum(item.size_s for item in self.first(end))

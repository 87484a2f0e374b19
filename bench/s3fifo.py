"""S3-FIFO, a baseline of eviction: `eviction.py` and a test compare the daemon's policy with it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from kvpool.storage.eviction import Costs
from kvpool.storage.eviction_queue import EvictionQueue, Ghosts


class S3Fifo:
    """S3-FIFO (SOSP'23): a small queue for newcomers, a main one for entries that were read or came back.

    Small has a tenth of the held entries, and reads count to 3. The ghosts are as many as the tier has
    places; only main's places, as in the paper, lose up to half a point on the conversation trace.

    Both queues are FIFOs, so `touch` is the cheapest of all policies. In return a pop first moves
    the entries that were read; earlier touches have paid for that, but one pop after many touches
    can take long. Queues are scanned from their old end, tails of batches first; yet a head can go
    before a tail that was read as often, when the two are in different queues.

    `freq` is the count in its lowest two bits, with _IN_MAIN for an entry of main, so that a lease
    does not send it back, and _KNOWN for one that was held before, whose ghost proves nothing.
    """

    __slots__ = ("_ghosts", "_main", "_small")

    _READS, _IN_MAIN, _KNOWN = 3, 4, 8
    _SMALL_SHARE = 0.1
    _SMALL, _MAIN = 1, 2

    def __init__(self, capacity: int, costs: Costs | None = None) -> None:
        self._small = EvictionQueue()
        self._main = EvictionQueue()
        # Of small; so many that from 0.8 to 1.2 capacities are remembered, one in the mean.
        self._ghosts = Ghosts(-(-capacity * 4 // 5))

    def insert(self, entries: Sequence[Any]) -> None:
        small: list[Any] = []
        main: list[Any] = []
        ghosts = self._ghosts.take([entry.ident for entry in entries])
        for entry in reversed(entries):
            if not entry.freq & self._KNOWN:
                came_back = bool(ghosts) and entry.ident in ghosts
                entry.freq = self._KNOWN | self._IN_MAIN if came_back else self._KNOWN
            if entry.freq & self._IN_MAIN:
                main.append(entry)
                entry.queue = self._MAIN
            else:
                small.append(entry)
                entry.queue = self._SMALL
        self._small.append(small)
        self._main.append(main)

    def touch(self, entries: Sequence[Any]) -> None:
        for entry in entries:
            if entry.freq & 3 != 3:  # _READS, inlined: this is the hottest line
                entry.freq += 1

    def discard(self, entries: Sequence[Any]) -> None:
        self._small.remove([entry for entry in entries if entry.queue == self._SMALL])
        self._main.remove([entry for entry in entries if entry.queue == self._MAIN])
        for entry in entries:
            entry.queue = 0

    def _from_small(self) -> bool:
        small = self._small.length
        return bool(small > self._SMALL_SHARE * (small + self._main.length))

    def pop(self) -> Any:
        small, main = self._small, self._main
        while self._from_small():
            entry = small.pop()
            if entry.freq & self._READS:
                main.append([entry])
                entry.freq = self._KNOWN | self._IN_MAIN
                entry.queue = self._MAIN
            else:
                entry.queue = 0
                self._ghosts.remember([entry.ident])
                return entry
        while main:
            entry = main.pop()
            if entry.freq & self._READS:
                entry.freq -= 1
                main.append([entry])
            else:
                entry.queue = 0
                return entry
        return None

    def take(self, n: int) -> list[Any]:
        return list(islice(iter(self.pop, None), n))

    def __len__(self) -> int:
        return int(self._small.length + self._main.length)

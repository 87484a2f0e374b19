"""How far a tier's order of eviction should depend on reads: tried on a sample of its blocks.

Rungs. An entry has a level: 0 until it is read, then up to `LEVELS - 1`. A rung says by what the ages of each level are
divided before they are compared; the oldest goes. On the first rung that is LRU, on the last about LFU.

Miniatures. A hash picks one block in 2^n. On every rung their reads and puts are replayed in as many places as that
share of the tier has; idents only, no bytes.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

LEVELS = 3
_NEVER = 1 << 40  # while any other is held
RUNGS: tuple[tuple[int, ...], ...] = ((1, 1, 1), (1, 2, 2), (1, _NEVER, _NEVER), (1, 64, 4096))
"""The divisors of each level's ages."""

CORRELATED = 0.1
"""An entry's reads within so many accesses of one another, as a share of what is held, count as one.

A decode node pulls a block once, right after a prefill put it: that says nothing about later requests.
"""

GHOSTS_PER_PLACE = 3
"""Evictions that are remembered: most second uses of a KV block come later than one capacity."""

_HORIZON = 32  # capacities, in accesses: what counts less than a third is older
# As in "so many standard deviations". Leaving LRU needs more: at 4.5, streams of agents leave it by chance.
_SURE, _SURE_OF_LEAVING_LRU = 2.5, 6.0


Batch = tuple[Sequence[int], Sequence[float]]
"""Sampled blocks of a chain that were read or put together, its tail first: idents, and what a miss of each costs."""


class Miniature:
    """The sampled blocks, as one rung would keep them. Each access is O(1)."""

    __slots__ = ("_clock", "_divisors", "_evicted", "_ghosts", "_levels")

    def __init__(self, divisors: Sequence[int]) -> None:
        self._divisors = divisors
        self._levels: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(LEVELS)]
        self._ghosts: OrderedDict[int, int] = OrderedDict()  # the number of each one's eviction
        self._evicted = 0
        self._clock = 0  # accesses

    def replay(self, batch: Batch, places: int) -> float:
        """The seconds that hits saved. places: at most so many are held afterwards."""
        none, once, often = self._levels
        held = len(none) + len(once) + len(often)
        settled = self._clock - CORRELATED * held
        idents, lost_s = batch
        clock = self._clock + len(idents)
        saved_s = 0.0
        lowest = 0  # a head is worth what its tail is
        missed = []
        for ident, cost_s in zip(idents, lost_s, strict=True):
            if stamp := often.pop(ident, 0):
                lowest = 2
            elif stamp := once.pop(ident, 0):
                lowest = 2 if lowest == 2 or stamp < settled else 1
            elif stamp := none.pop(ident, 0):
                lowest = lowest or int(stamp < settled)
            else:
                missed.append(ident)
                continue
            self._levels[lowest][ident] = clock
            saved_s += cost_s
        if missed:
            self._clock = clock - len(missed)
            del missed[:-places]  # a chain longer than that: its head
            self._evict(held + len(missed) - places, GHOSTS_PER_PLACE * places)
            self._put(missed, clock, self._evicted - GHOSTS_PER_PLACE * places)
        self._clock = clock
        return saved_s

    def _put(self, idents: Sequence[int], clock: int, forgotten: int) -> None:
        level = 0
        for ident in idents:
            if self._ghosts.pop(ident, forgotten) > forgotten:
                level = 1
            self._levels[level][ident] = clock

    def _evict(self, count: int, ghosts_max: int) -> None:
        for _ in range(count):
            oldest, found = -math.inf, self._levels[0]
            for level, divisor in zip(self._levels, self._divisors, strict=True):
                if level:
                    age = (self._clock - next(iter(level.values()))) / divisor
                    if age > oldest:
                        oldest, found = age, level
            ident, _ = found.popitem(last=False)
            self._evicted += 1
            self._ghosts[ident] = self._evicted
        while len(self._ghosts) > ghosts_max:
            self._ghosts.popitem(last=False)


class Trial:
    """Which rung keeps most, by miniatures of all of them. Not thread-safe.

    rung: the one to follow. It moves by one, towards a rung that has saved more since the last move, when that is
    unlikely to be chance: when the difference is above so many times (`_SURE`) the root of the sum of its squares. The
    fewer the hits, the less there is to lose by a wrong move, so this is scaled by the root of the share of hits; a
    single difference is never enough.
    """

    TOGETHER = 16
    """Batches that are replayed at a time."""

    __slots__ = ("_ahead_s", "_asked_s", "_miniatures", "_saved_s", "_squares", "_waiting", "rung")

    def __init__(self, rung: int = 0) -> None:
        """rung: to begin with."""
        self.rung = rung
        self._miniatures = [Miniature(divisors) for divisors in RUNGS]
        self._waiting: list[Batch] = []
        self._saved_s = [0.0] * len(RUNGS)
        self._asked_s = 0.0
        self._restart()

    def _restart(self) -> None:
        self._ahead_s = [0.0] * len(RUNGS)  # of the rung that is followed
        self._squares = [0.0] * len(RUNGS)  # of the differences that this is the sum of

    def replay(self, batch: Batch, places: int) -> None:
        """Now or soon: several at a time are faster. See `Miniature.replay`."""
        self._waiting.append(batch)
        if len(self._waiting) == self.TOGETHER:
            saved_s = [
                [each.replay(some, places) for some in self._waiting] for each in self._miniatures
            ]
            for (_, lost_s), by_rung in zip(self._waiting, zip(*saved_s, strict=True), strict=True):
                self._compare(by_rung, sum(lost_s), (1 - 1 / (_HORIZON * places)) ** len(lost_s))
            self._waiting.clear()

    def _compare(self, saved_s: Sequence[float], asked_s: float, fade: float) -> None:
        ours = saved_s[self.rung]
        self._asked_s = self._asked_s * fade + asked_s
        best, most_s = self.rung, 0.0
        for rung, saved in enumerate(saved_s):
            more = saved - ours
            self._saved_s[rung] = self._saved_s[rung] * fade + saved
            self._ahead_s[rung] = ahead_s = self._ahead_s[rung] * fade + more
            self._squares[rung] = self._squares[rung] * fade + more * more
            if more and ahead_s > most_s and self._is_sure(rung):
                best, most_s = rung, ahead_s
        if best != self.rung:
            self.rung += 1 if best > self.rung else -1
            self._restart()

    def _is_sure(self, rung: int) -> bool:
        # Of blocks that cost something, as one did just now.
        hit = self._saved_s[self.rung] / self._asked_s
        sure = _SURE if self.rung else _SURE_OF_LEAVING_LRU
        # Not below 1: that is a single difference.
        return self._ahead_s[rung] ** 2 > max(1.0, sure**2 * hit) * self._squares[rung]

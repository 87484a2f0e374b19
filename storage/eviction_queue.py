"""A queue of entries, and the memory of evicted ones: what eviction policies are made of.

Both are built so that no single operation takes longer when they hold millions: a dictionary or set
of that many is copied from time to time, which takes most of a second.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol


class EntryQueue(Protocol):
    """Entries from the oldest to the youngest. Every operation is O(1) an entry. Not thread-safe.

    An entry is in one queue at most, and whoever calls knows which (`queue` of the entry).

    length: entries; for reading only. `len` takes five times as long, and policies look at it for every block.
    """

    length: int

    def append(self, entries: Sequence[Any]) -> None:
        """Entries of no queue become the youngest, the last of them the very youngest."""

    def put_first(self, entry: Any) -> None:
        """An entry of no queue becomes the oldest."""

    def remove(self, entries: Sequence[Any]) -> None:
        """Take entries out."""

    def renew(self, entries: Sequence[Any]) -> None:
        """Make entries the youngest, the last of them the very youngest.

        They may come from another queue of the same kind: see `give`.
        """

    def give(self, other: Any, count: int) -> None:
        """This many of the entries that the other queue is about to `renew` are of this one."""

    def pop(self) -> Any:
        """Take the oldest entry out; None if there is none."""

    def take(self, n: int) -> list[Any]:
        """Take up to n of the oldest entries out, in order."""

    def peek(self) -> Any:
        """The oldest entry; None if there is none."""

    def oldest(self, n: int) -> list[Any]:
        """The n oldest entries, in order. O(n)."""

    def __len__(self) -> int: ...


class _End:
    """Closes the circle: `newer` is the oldest entry, `older` the youngest."""

    __slots__ = ("newer", "older")

    def __init__(self) -> None:
        self.newer: Any = self
        self.older: Any = self


class EvictionQueue:
    """An `EntryQueue`: a linked list through its entries' `older` and `newer`. Neighbours move together as one."""

    __slots__ = ("_end", "length")

    def __init__(self) -> None:
        self._end = _End()
        self.length = 0

    def __len__(self) -> int:
        return self.length

    def __del__(self) -> None:
        # Entries may be invisible to the collector of cycles, and these links are cycles.
        if not sys.is_finalizing():
            while self.pop() is not None:
                pass

    def append(self, entries: Sequence[Any]) -> None:
        end = self._end
        youngest = end.older
        for entry in entries:
            entry.older = youngest
            youngest.newer = entry
            youngest = entry
        youngest.newer = end
        end.older = youngest
        self.length += len(entries)

    def put_first(self, entry: Any) -> None:
        end = self._end
        oldest = end.newer
        entry.older, entry.newer = end, oldest
        end.newer = oldest.older = entry
        self.length += 1

    def remove(self, entries: Sequence[Any]) -> None:
        for entry in entries:
            older, newer = entry.older, entry.newer
            older.newer = newer
            newer.older = older
            entry.older = entry.newer = None
        self.length -= len(entries)

    def renew(self, entries: Sequence[Any]) -> None:
        end = self._end
        at, count = 0, len(entries)
        while at < count:
            first = last = entries[at]
            at += 1
            while at < count and last.newer is entries[at]:
                last = entries[at]
                at += 1
            newer = last.newer
            if newer is end:
                continue
            older = first.older
            older.newer = newer
            newer.older = older
            youngest = end.older
            youngest.newer = first
            first.older = youngest
            last.newer = end
            end.older = last

    def give(self, other: EvictionQueue, count: int) -> None:
        self.length -= count
        other.length += count

    def pop(self) -> Any:
        end = self._end
        entry = end.newer
        if entry is end:
            return None
        newer = entry.newer
        end.newer = newer
        newer.older = end
        entry.older = entry.newer = None
        self.length -= 1
        return entry

    def take(self, n: int) -> list[Any]:
        found = self.oldest(n)
        if found:
            end = self._end
            newer = found[-1].newer
            end.newer = newer
            newer.older = end
            for entry in found:
                entry.older = entry.newer = None
            self.length -= len(found)
        return found

    def peek(self) -> Any:
        return self._end.newer if self.length else None

    def oldest(self, n: int) -> list[Any]:
        found: list[Any] = []
        entry, end = self._end.newer, self._end
        while entry is not end and len(found) < n:
            found.append(entry)
            entry = entry.newer
        return found


_GENERATIONS = 2  # that a Ghosts has at least, full ones
_GENERATION_MAX = 1 << 17  # idents: a set that grows is copied, in a few milliseconds


class Ghosts:
    """The idents of the last evictions, in generations: the oldest one is forgotten as a whole. Not thread-safe.

    About 70 bytes for each.
    """

    __slots__ = ("_full", "_generations", "_left", "_size")

    def __init__(self, remembered: int) -> None:
        """remembered: evictions; up to half as many more are."""
        self._generations: list[set[int]] = [set()]
        self._left = 0  # evictions until the newest generation is full
        self.resize(remembered)

    def resize(self, remembered: int) -> None:
        """Remember so many from now on; fewer will do so with the next evictions."""
        self._size = max(1, min(-(-remembered // _GENERATIONS), _GENERATION_MAX))
        self._full = -(-remembered // self._size)
        self._left = min(self._left, self._size)

    def remember(self, idents: Sequence[int]) -> None:
        """Entries were evicted, in this order. idents: 64 bits each, spread evenly."""
        if self._left <= 0:
            self._generations.append(set())
            del self._generations[: -self._full - 1]
            self._left = self._size
        self._generations[-1].update(idents)
        self._left -= len(idents)

    def take(self, idents: Sequence[int]) -> set[int]:
        """Those that are known. They are forgotten."""
        known: set[int] = set()
        for generation in self._generations:
            if some := generation.intersection(idents):
                generation.difference_update(some)
                known |= some
        return known

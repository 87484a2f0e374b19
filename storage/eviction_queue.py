"""A queue of entries, and the memory of evicted ones: what eviction policies are made of.

Both are built so that no single operation takes longer when they hold millions: a dictionary of
that many entries is copied from time to time, which takes most of a second.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from kvpool.memory.private_pages import private_pages


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


_NUMBER_BITS = 38
_NUMBERS = (1 << _NUMBER_BITS) - 1
_MARK = (1 << 64) - (1 << _NUMBER_BITS + 1)  # the bits of an ident that are kept
_SMALLEST = 4096  # groups; their memory exists once it is written
_GROUP = 8
_BYTES = [bytes([value]) for value in range(256)]


class Ghosts:
    """The idents of evicted entries of two kinds (0 and 1), with the number of their eviction. Not thread-safe.

    Idents share groups of eight places, which are used in turn; where eight more came, an ident is forgotten. So
    nothing is ever moved or copied at once, 18 bytes are needed for each one to be remembered, one in a hundred is
    forgotten early, and one in 2^22 of the others is mistaken for one of them.
    """

    __slots__ = ("_any", "_groups", "_places", "_tags", "_turns")

    def __init__(self, remembered: int) -> None:
        """remembered: evictions, of both kinds."""
        self._groups = 0
        self.resize(remembered)

    def resize(self, remembered: int) -> None:
        """Remember about so many from now on. A table that must grow begins empty."""
        groups = max(_SMALLEST, 2 * remembered // _GROUP)
        if groups > self._groups:
            self._places = memoryview(private_pages(8 * _GROUP * groups)).cast("Q")
            self._tags = private_pages(_GROUP * groups)  # the lowest byte of each
            self._turns = private_pages(groups)  # the next place of each group
            self._groups = groups
            self._any = False

    def remember(self, idents: Iterable[int], kind: int, number: int) -> None:
        """Entries were evicted. idents: 64 bits each, spread evenly. number: of the first, from 1 on; the
        others follow. Below 2^38.
        """
        places, tags, turns, groups = self._places, self._tags, self._turns, self._groups
        word = kind << _NUMBER_BITS | number
        for ident in idents:
            group = ident % groups
            turn = turns[group]
            turns[group] = (turn + 1) & _GROUP - 1
            at = group * _GROUP + turn
            places[at] = ident & _MARK | word
            tags[at] = ident & 255
            word += 1
        self._any = True

    def take(self, idents: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Of those that are known, by their position: (kind, number) of the last eviction. They are forgotten."""
        found: dict[int, tuple[int, int]] = {}
        if not self._any:
            return found
        find, groups = self._tags.find, self._groups
        for position, ident in enumerate(idents):
            at = ident % groups * _GROUP
            place = find(_BYTES[ident & 255], at, at + _GROUP)
            while place >= 0:
                word = self._places[place]
                if word and word & _MARK == ident & _MARK:
                    self._places[place] = 0
                    found[position] = word >> _NUMBER_BITS & 1, word & _NUMBERS
                    break
                place = find(_BYTES[ident & 255], place + 1, at + _GROUP)
        return found

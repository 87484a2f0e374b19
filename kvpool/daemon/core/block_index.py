"""The blocks of a table by their keys, and the blocks of a size by their rows.

Both grow and shrink by small pieces, so that no single put or eviction takes longer when there are millions of
blocks: Python copies a whole dictionary or list when it grows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

PIECES = 256
CHECKED_TOGETHER = 16  # parts of an overfull piece, when it has its turn
COMPACT_BYTES, COMPACT_SPARE = 60, 4096  # of a piece: an entry, and in all

ROWS_BITS = 12  # of a row's number, within its piece
_ROWS = 1 << ROWS_BITS
FEW = 8  # rows for which a loop is faster than numpy

B = TypeVar("B")


class BlockIndex(Generic[B]):
    """Blocks by their keys, as a dictionary. Not thread-safe.

    The last byte of a key chooses one of 256 dictionaries, once there are too many for one. Keys are hashes, so
    these are equally large; where clients chose keys that fall together, the piece that is too large for it is
    divided by Python's hash of the whole key, which is secret (`_Overfull`).
    """

    __slots__ = ("_check_at", "_emptied", "_length", "_next", "_one", "_pieces", "added")

    DIVIDE_AT = 1 << 15
    """Entries of a piece: copying them takes one to two milliseconds."""
    CHECKED_EVERY = 64
    """Blocks added, for each look whether a piece is too large."""
    COMPACT_TOGETHER = 1 << 11
    """Entries that are copied at a time, each of which touches its block."""

    def __init__(self) -> None:
        self._one: dict[bytes, B] = {}  # all blocks, as long as there are no pieces
        self._pieces: list[_Piece[B]] | None = None
        self._length = 0
        self.added = 0  # blocks in all: equal at two times if none was added between them
        self._emptied = 0  # pieces that `pop_any` has emptied
        self._next = 0  # the piece that was checked last
        self._check_at = self.CHECKED_EVERY  # `added`

    # ---- one block ---------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._length

    def __contains__(self, key: Any) -> bool:
        pieces = self._pieces
        return key in (self._one if pieces is None else pieces[key[-1]])

    def __getitem__(self, key: bytes) -> B:
        pieces = self._pieces
        return (self._one if pieces is None else pieces[key[-1]])[key]

    def get(self, key: bytes) -> B | None:
        """The block of this key; None if it is not here, or the key is empty."""
        pieces = self._pieces
        return (self._one if pieces is None or not key else pieces[key[-1]]).get(key)

    def __delitem__(self, key: bytes) -> None:
        pieces = self._pieces
        del (self._one if pieces is None else pieces[key[-1]])[key]
        self._length -= 1

    def pop_any(self) -> B:
        """Take some block out of an index that is not empty and to which nothing is added any more."""
        pieces: Sequence[_Piece[B]] = self._pieces or [self._one]
        while not (piece := pieces[self._emptied]):
            self._emptied += 1
        self._length -= 1
        # From the end: a dictionary that is emptied from its beginning is searched longer each time.
        return piece.popitem()[1]

    # ---- many --------------------------------------------------------------------------------------

    def add(self, keys: Sequence[bytes], blocks: Sequence[B]) -> None:
        """Add blocks. The keys are not here yet, and differ from one another."""
        pieces = self._pieces
        if pieces is None:
            self._one.update(zip(keys, blocks, strict=True))
        else:
            for key, block in zip(keys, blocks, strict=True):
                pieces[key[-1]][key] = block
        self._length += len(keys)
        self.added += len(keys)
        # Each piece has its turn long before it can have doubled.
        while self.added >= self._check_at:
            self._check_at += self.CHECKED_EVERY
            self._check()

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove the blocks of these keys, all of which are here."""
        pieces = self._pieces
        if pieces is None:
            one = self._one
            for key in keys:
                del one[key]
        else:
            for key in keys:
                del pieces[key[-1]][key]
        self._length -= len(keys)

    def found(self, keys: Sequence[bytes]) -> list[B | None]:
        """The block of each key; None if it is not here."""
        pieces = self._pieces
        if pieces is None:
            return list(map(self._one.get, keys))
        return [pieces[key[-1]].get(key) for key in keys]

    def all_of(self, keys: Sequence[bytes]) -> list[B]:
        """The block of each key, all of which are here."""
        pieces = self._pieces
        if pieces is None:
            return list(map(self._one.__getitem__, keys))
        return [pieces[key[-1]][key] for key in keys]

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key, whether its block is here."""
        pieces = self._pieces
        if pieces is None:
            return list(map(self._one.__contains__, keys))
        return [key in pieces[key[-1]] for key in keys]

    def prefix_length(self, keys: Sequence[bytes]) -> int:
        """How many of the keys are here before the first that is not."""
        pieces = self._pieces
        if pieces is None:
            return len(list(takewhile(self._one.__contains__, keys)))
        for count, key in enumerate(keys):
            if key not in pieces[key[-1]]:
                return count
        return len(keys)

    def isdisjoint(self, keys: Sequence[bytes]) -> bool:
        """Whether none of the keys is here."""
        pieces = self._pieces
        if pieces is None:
            return self._one.keys().isdisjoint(keys)
        for key in keys:  # noqa: SIM110 - this runs for every put, and `all` takes twice as long
            if key in pieces[key[-1]]:
                return False
        return True

    def values(self) -> Iterator[B]:
        """All blocks. The index must not change meanwhile."""
        for piece in self._pieces or [self._one]:
            yield from piece.values()

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._pieces or [self._one]:
            yield from piece

    # ---- pieces ------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Divide what is too large, and copy a piece with much room for nothing: see `_compact`."""
        pieces = self._pieces
        if pieces is None:
            if self._length > self.DIVIDE_AT:
                self._pieces = [{} for _ in range(PIECES)]
                for key, block in self._one.items():
                    self._pieces[key[-1]][key] = block
                self._one = {}
            else:
                self._one = _compact(self._one)
            return
        piece = pieces[self._next]
        if isinstance(piece, _Moving):
            if piece.move(self.COMPACT_TOGETHER):
                return
            pieces[self._next] = piece.new
        at = self._next = (self._next + 1) % PIECES
        piece = pieces[at]
        if isinstance(piece, _Overfull):
            piece.check()
        elif isinstance(piece, dict):
            if len(piece) > self.DIVIDE_AT:
                pieces[at] = _Overfull(piece)
            elif len(piece) > self.COMPACT_TOGETHER and _is_roomy(piece):
                pieces[at] = _Moving(piece)
            else:
                pieces[at] = _compact(piece)


class _Moving(Generic[B]):
    """One piece of an index while its entries are moved to a dictionary with less room: see `_compact`."""

    __slots__ = ("new", "old")

    def __init__(self, old: dict[bytes, B]) -> None:
        self.old = old
        self.new: dict[bytes, B] = {}

    def move(self, count: int) -> bool:
        """So many of those that are left; returns whether there are more."""
        old, new = self.old, self.new
        for _ in range(min(count, len(old))):
            key, block = old.popitem()
            new[key] = block
        return bool(old)

    def __len__(self) -> int:
        return len(self.old) + len(self.new)

    def __contains__(self, key: bytes) -> bool:
        return key in self.new or key in self.old

    def __getitem__(self, key: bytes) -> B:
        return self.new[key] if key in self.new else self.old[key]

    def __setitem__(self, key: bytes, block: B) -> None:
        self.new[key] = block

    def __delitem__(self, key: bytes) -> None:
        del (self.new if key in self.new else self.old)[key]

    def get(self, key: bytes) -> B | None:
        return self.new[key] if key in self.new else self.old.get(key)

    def popitem(self) -> tuple[bytes, B]:
        return (self.new or self.old).popitem()

    def values(self) -> Iterator[B]:
        yield from self.old.values()
        yield from self.new.values()

    def __iter__(self) -> Iterator[bytes]:
        yield from self.old
        yield from self.new


class _Overfull(Generic[B]):
    """One piece of an index, as far as that uses it: a dictionary in parts, by the secret hash of the keys."""

    __slots__ = ("_next", "_parts")

    def __init__(self, items: dict[bytes, B]) -> None:
        self._next = 0  # the part that is checked next
        self._parts: list[dict[bytes, B]] = [{} for _ in range(PIECES)]
        for key, block in items.items():
            self[key] = block

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __contains__(self, key: bytes) -> bool:
        return key in self._parts[hash(key) % PIECES]

    def __getitem__(self, key: bytes) -> B:
        return self._parts[hash(key) % PIECES][key]

    def __setitem__(self, key: bytes, block: B) -> None:
        self._parts[hash(key) % PIECES][key] = block

    def __delitem__(self, key: bytes) -> None:
        del self._parts[hash(key) % PIECES][key]

    def get(self, key: bytes) -> B | None:
        return self._parts[hash(key) % PIECES].get(key)

    def popitem(self) -> tuple[bytes, B]:
        return next(part for part in self._parts if part).popitem()

    def values(self) -> Iterator[B]:
        for part in self._parts:
            yield from part.values()

    def __iter__(self) -> Iterator[bytes]:
        for part in self._parts:
            yield from part

    def check(self) -> None:
        """See `_compact`."""
        parts = self._parts
        for at in range(self._next, self._next + CHECKED_TOGETHER):
            parts[at] = _compact(parts[at])
        self._next = (self._next + CHECKED_TOGETHER) % PIECES


_Piece = dict[bytes, B] | _Overfull[B] | _Moving[B]


def _compact(piece: dict[bytes, B]) -> dict[bytes, B]:
    """A dictionary without the room for nothing that Python leaves in it where others come and go."""
    return {**piece} if _is_roomy(piece) else piece


def _is_roomy(piece: dict[bytes, B]) -> bool:
    return sys.getsizeof(piece) > COMPACT_BYTES * len(piece) + COMPACT_SPARE


class RowIndex(Generic[B]):
    """Blocks by the rows of their slots, as a list that is empty where nothing is. Not thread-safe.

    Its pieces are arrays, because the collector of cycles walks through lists.
    """

    __slots__ = ("_end", "_pieces")

    def __init__(self) -> None:
        self._pieces: dict[int, npt.NDArray[np.object_]] = {}  # by the higher bits
        self._end = 0

    def __len__(self) -> int:
        """One more than the highest row that was ever used."""
        return self._end

    def _piece(self, at: int) -> npt.NDArray[np.object_]:
        piece = self._pieces.get(at)
        if piece is None:
            piece = self._pieces[at] = np.empty(_ROWS, dtype=np.object_)
        return piece

    def put(self, rows: Sequence[int], blocks: Sequence[B]) -> None:
        """Enter blocks at their rows."""
        if len(rows) == 1:  # mostly, where blocks are large
            (row,) = rows
            self._piece(row >> ROWS_BITS)[row & _ROWS - 1] = blocks[0]
            if row >= self._end:
                self._end = row + 1
            return
        if not len(rows):
            return
        low, high = min(rows), max(rows)
        at = low >> ROWS_BITS
        if at == high >> ROWS_BITS and len(rows) > FEW:  # mostly, and faster
            places = np.array(rows) - (at << ROWS_BITS)
            self._piece(at)[places] = np.fromiter(blocks, np.object_, len(blocks))
        else:
            for row, block in zip(rows, blocks, strict=True):
                self._piece(row >> ROWS_BITS)[row & _ROWS - 1] = block
        self._end = max(self._end, high + 1)

    def clear(self, rows: Sequence[int]) -> None:
        """These slots have no blocks any more."""
        pieces = self._pieces
        for row in rows:
            pieces[row >> ROWS_BITS][row & _ROWS - 1] = None

    def empty(self, first: int, end: int) -> None:
        """The slots from `first` up to `end` have no blocks any more."""
        for part in self._parts(first, end):
            part[:] = None

    def between(self, first: int, end: int) -> list[B]:
        """The blocks in rows from `first` up to `end`, in order."""
        return [
            block
            for part in self._parts(first, end)
            for block in part.tolist()
            if block is not None
        ]

    def _parts(self, first: int, end: int) -> Iterator[npt.NDArray[np.object_]]:
        """What there is of the pieces between these rows."""
        end = min(end, self._end)
        while first < end:
            at, low = first >> ROWS_BITS, first & _ROWS - 1
            high = min(_ROWS, low + end - first)
            piece = self._pieces.get(at)
            if piece is not None:
                yield piece[low:high]
            first += high - low

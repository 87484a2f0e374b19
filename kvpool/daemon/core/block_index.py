"""The blocks of a table by their keys, and the blocks of a size by their rows.

Both grow and shrink by small pieces, so that no single put or eviction takes longer when there are millions of
blocks: Python copies a whole dictionary or list when it grows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

SPLIT_AT = 2048  # entries of a piece: copying them takes a fraction of a millisecond
CHECKED_EVERY = 64  # blocks added, for each look whether a piece is too large
COMPACT_BYTES, COMPACT_SPARE = 60, 4096  # of a piece: an entry, and in all
BITS_MAX = 20  # of a key's hash that may choose its piece

ROWS_BITS = 12  # of a row's number, within its piece
_ROWS = 1 << ROWS_BITS
FEW = 8  # rows for which a loop is faster than numpy

B = TypeVar("B")


class BlockIndex(Generic[B]):
    """Blocks by their keys, as a dictionary. Not thread-safe.

    Extendible hashing: the lowest bits of a key's hash choose one of some dictionaries, and one that becomes
    too large is split in two by one more bit. Python's hash of bytes is secret, so clients cannot choose
    keys that fall together.
    """

    __slots__ = ("_bits", "_emptied", "_length", "_mask", "_next", "_pieces", "added")

    def __init__(self) -> None:
        self._pieces: list[dict[bytes, B]] = [{}]  # by the lowest bits of the hash
        self._bits = [0]  # of each place: how many bits its piece has in common
        self._mask = 0
        self._length = 0
        self.added = 0  # blocks in all: equal at two times if none was added between them
        self._emptied = 0  # places whose pieces `pop_any` has emptied
        self._next = 0  # the place that was checked last

    # ---- one block ---------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._length

    def __contains__(self, key: object) -> bool:
        return key in self._pieces[hash(key) & self._mask]

    def __getitem__(self, key: bytes) -> B:
        return self._pieces[hash(key) & self._mask][key]

    def get(self, key: bytes) -> B | None:
        return self._pieces[hash(key) & self._mask].get(key)

    def __delitem__(self, key: bytes) -> None:
        del self._pieces[hash(key) & self._mask][key]
        self._length -= 1

    def pop_any(self) -> B:
        """Take some block out of an index that is not empty and to which nothing is added any more."""
        while not (piece := self._pieces[self._emptied]):
            self._emptied += 1
        self._length -= 1
        # From the end: a dictionary that is emptied from its beginning is searched longer each time.
        return piece.popitem()[1]

    # ---- many --------------------------------------------------------------------------------------

    def add(self, keys: Sequence[bytes], blocks: Sequence[B]) -> None:
        """Add blocks. The keys are not here yet, and differ from one another."""
        pieces, mask = self._pieces, self._mask
        if mask:
            for key, block in zip(keys, blocks, strict=True):
                pieces[hash(key) & mask][key] = block
        else:
            pieces[0].update(zip(keys, blocks, strict=True))
        self._length += len(keys)
        self.added += len(keys)
        # Each place has its turn long before its piece can have doubled.
        for _ in range(1 + len(keys) // CHECKED_EVERY):
            self._next = (self._next + 1) & self._mask
            self._check(self._next)

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove the blocks of these keys, all of which are here."""
        pieces, mask = self._pieces, self._mask
        for key in keys:
            del pieces[hash(key) & mask][key]
        self._length -= len(keys)

    def found(self, keys: Sequence[bytes]) -> list[B | None]:
        """The block of each key; None if it is not here."""
        pieces, mask = self._pieces, self._mask
        if mask:
            return [pieces[hash(key) & mask].get(key) for key in keys]
        return list(map(pieces[0].get, keys))

    def all_of(self, keys: Sequence[bytes]) -> list[B]:
        """The block of each key, all of which are here."""
        pieces, mask = self._pieces, self._mask
        if mask:
            return [pieces[hash(key) & mask][key] for key in keys]
        return list(map(pieces[0].__getitem__, keys))

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key, whether its block is here."""
        pieces, mask = self._pieces, self._mask
        if mask:
            return [key in pieces[hash(key) & mask] for key in keys]
        return list(map(pieces[0].__contains__, keys))

    def prefix_length(self, keys: Sequence[bytes]) -> int:
        """How many of the keys are here before the first that is not."""
        pieces, mask = self._pieces, self._mask
        if not mask:
            return len(list(takewhile(pieces[0].__contains__, keys)))
        for count, key in enumerate(keys):
            if key not in pieces[hash(key) & mask]:
                return count
        return len(keys)

    def isdisjoint(self, keys: Sequence[bytes]) -> bool:
        """Whether none of the keys is here."""
        pieces, mask = self._pieces, self._mask
        if mask:
            return all(key not in pieces[hash(key) & mask] for key in keys)
        return pieces[0].keys().isdisjoint(keys)

    def values(self) -> Iterator[B]:
        """All blocks. The index must not change meanwhile."""
        for piece in self._each():
            yield from piece.values()

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._each():
            yield from piece

    def _each(self) -> Iterator[dict[bytes, B]]:
        for place, (piece, bits) in enumerate(zip(self._pieces, self._bits, strict=True)):
            if place >> bits == 0:  # its first place
                yield piece

    # ---- pieces ------------------------------------------------------------------------------------

    def _check(self, place: int) -> None:
        """Split a piece that is too large; copy one with much room for nothing, as Python leaves it where
        others come and go.
        """
        piece, bits = self._pieces[place], self._bits[place]
        first = place & (1 << bits) - 1
        if len(piece) > SPLIT_AT and bits < BITS_MAX:
            self._split(first, bits)
        elif sys.getsizeof(piece) > COMPACT_BYTES * len(piece) + COMPACT_SPARE:
            copied = {**piece}
            for at in range(first, len(self._pieces), 1 << bits):
                self._pieces[at] = copied

    def _split(self, place: int, bits: int) -> None:
        """Divide the piece whose first place this is by the next bit."""
        if 1 << bits == len(self._pieces):
            self._pieces += self._pieces
            self._bits += self._bits
            self._mask = len(self._pieces) - 1
        bit = 1 << bits
        whole = self._pieces[place]
        moved = {key: block for key, block in whole.items() if hash(key) & bit}
        kept = {key: block for key, block in whole.items() if not hash(key) & bit}
        for at in range(place, len(self._pieces), bit):
            self._pieces[at] = moved if at & bit else kept
            self._bits[at] = bits + 1


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

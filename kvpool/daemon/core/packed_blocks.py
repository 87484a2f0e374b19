"""Blocks in arrays instead of objects: about 70 bytes each, for a tier that holds tens of millions of them.

All that is known of a block stands in columns, by the row of its slot; free rows are zeros:

    row | key | table | parent | depth | used | freq | older | newer | flags
     0  | 16  |   4   |   5    |   3   |  5   |  5   |   4   |   4   |   1    bytes
     1  |

A `PackedBlock` is a view of one row with the attributes of a `Block`, made when somebody asks: the rules and the
eviction policies see no difference. Rows are found by their blocks' keys through a hash table of row numbers
(`PackedIndex`), and form eviction queues by row numbers too (`PackedQueue`).

All columns are memory whose pages exist once they are written, so nothing is ever moved or copied. Only the hash
table grows, by one page at a time. No single operation takes longer when there are more blocks, except for the
search for the blocks of an ended epoch (`PackedTable.pop_any`), which reads four bytes a row.

Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from kvpool.daemon.core.block_index import BlockIndex
from kvpool.daemon.core.blocks import OWN, Block, BlockFacts, Origin, PartTable
from kvpool.errors import LimitExceeded
from kvpool.memory.private_pages import private_pages
from kvpool.types import KEY_BYTES

PLACES_BITS = 9  # of a place's number within its page
FULL = 0.88  # share of all places that is taken when each row has a block
GROW_AT = 0.44  # the same while there may be more pages: a page that is not divided yet has up to twice as much
_HASH_BITS = 40
_HASHES = (1 << _HASH_BITS) - 1
_TAG_BITS = 8
_MIX = 0x9E3779B97F4A7C15  # the parts of a block have one key: their tables' places lie apart
_EMPTY, _DEAD = b"\0", b"\1"
_TAGS = [bytes([max(2, value)]) for value in range(256)]

DEPTH_MAX = (1 << 24) - 1
SCANNED = 1 << 16  # rows in one step of a search for the blocks of a table
QUEUES_MAX = 1 << 16  # eviction queues of one size
_QUEUE, _PIN_AT, _PIN, _USED_AGAIN = 0b111, 3, 0b11000, 0b100000  # in the flags
_GONE = 3  # in place of a pin, as in `Block`


def hash_of(key: bytes) -> int:
    """40 bits of Python's hash, which is secret; never 0."""
    return hash(key) & _HASHES or 1


class OddIntegers:
    """Unsigned integers of five or three bytes, by row."""

    __slots__ = ("_bits", "_high", "_highs", "_low", "_lows", "_mask")

    def __init__(self, rows: int, nbytes: Literal[3, 5]) -> None:
        low: Literal["I", "H"] = "I" if nbytes == 5 else "H"
        self._bits = 8 * (nbytes - 1)
        self._mask = (1 << self._bits) - 1
        self._low = memoryview(private_pages((nbytes - 1) * rows)).cast(low)
        self._high = memoryview(private_pages(rows))
        self._lows = np.frombuffer(self._low, dtype=low)
        self._highs = np.frombuffer(self._high, dtype=np.uint8)

    def __getitem__(self, row: int) -> int:
        return self._high[row] << self._bits | self._low[row]

    def __setitem__(self, row: int, value: int) -> None:
        self._low[row] = value & self._mask
        self._high[row] = value >> self._bits

    def set(self, rows: npt.NDArray[np.int64], values: npt.NDArray[np.int64] | int) -> None:
        """Set those of many rows."""
        self._lows[rows] = values & self._mask
        self._highs[rows] = values >> self._bits


class PackedIndex:
    """The rows of blocks, by the numbers of their tables and their keys.

    A hash chooses a page of 512 places, and one of these. The search begins there, ends at the first place that
    was never taken, and goes from the end of a page to its beginning. A tag of one byte tells most others apart before
    keys are compared. When there are more blocks, one page is divided after the other (linear hashing), until there
    are as many as are needed when each row has a block.
    """

    def __init__(self, columns: PackedBlocks, rows: int, places_bits: int = PLACES_BITS) -> None:
        """rows: of the columns. places_bits: of a page."""
        self._columns = columns
        self._bits = places_bits
        self._page_places = places = 1 << places_bits
        # Pages double from `base` on, and the last doubling ends where there are enough for all rows.
        wanted = max(1, -(-rows // int(FULL * places)))
        doublings = max(0, wanted.bit_length() - 6)
        self._base = -(-wanted // (1 << doublings))
        self._pages_max = self._base << doublings
        self._pages = self._base
        self._level = self._base  # pages before the present doubling
        self._divided = 0  # pages that this doubling has divided
        self._count = 0
        self._tags = private_pages(places * self._pages_max)
        self._rows = memoryview(private_pages(4 * places * self._pages_max)).cast("I")
        self._taken = memoryview(private_pages(2 * self._pages_max)).cast("H")  # places of a page
        # Blocks that found no place in their page: one in ten thousand when all pages are as full as they get.
        self._overfull: dict[tuple[int, bytes], int] = {}

    def __len__(self) -> int:
        return self._count

    def find(self, table: int, key: bytes) -> int:
        """The row of a block; -1: it is not here."""
        place = self._find(table, key)
        if place >= 0:
            return self._rows[place]
        return self._overfull.get((table, key), -1) if self._overfull else -1

    def find_all(self, table: int, keys: Iterable[bytes]) -> list[int]:
        """The same for each key."""
        find = self.find
        return [find(table, key) for key in keys]

    def find_hash(self, table: int, hashed: int) -> int:
        """The row of a block whose key has this `hash_of`; -1: there is none."""
        place = self._search(hashed + table * _MIX & _HASHES, table, hashed, b"")
        return self._rows[place] if place >= 0 else -1

    def add(self, table: int, keys: Iterable[bytes], rows: Iterable[int]) -> None:
        """Add blocks, which are not here yet."""
        for key, row in zip(keys, rows, strict=True):
            self._add(table, key, row)
            self._count += 1
        while (
            self._count > GROW_AT * self._page_places * self._pages
            and self._pages < self._pages_max
        ):
            self._divide()

    def remove(self, table: int, key: bytes) -> int:
        """Take a block out; returns its row. Raises `KeyError`."""
        place = self._find(table, key)
        if place < 0:
            row = self._overfull.pop((table, key))
            self._count -= 1
            return row
        row = self._rows[place]
        self._count -= 1
        after = place + 1
        if not after & self._page_places - 1:
            after -= self._page_places
        if self._tags[after]:
            self._tags[place : place + 1] = _DEAD
        else:  # searches end here
            self._tags[place : place + 1] = _EMPTY
            self._taken[place >> self._bits] -= 1
        return row

    # ---- places ------------------------------------------------------------------------------------

    def _find(self, table: int, key: bytes) -> int:
        hashed = hash_of(key)
        return self._search(hashed + table * _MIX & _HASHES, table, hashed, key)

    def _first_place(self, mixed: int) -> int:
        """Of the page for this hash."""
        bucket = mixed >> _TAG_BITS + self._bits
        page = bucket % self._level
        if page < self._divided:
            page = bucket % (2 * self._level)
        return page << self._bits

    def _search(self, mixed: int, table: int, hashed: int, key: bytes) -> int:
        """The place of a block by its key, or if that is empty by its hash; -1: it has none."""
        first = self._first_place(mixed)
        home = first + (mixed >> _TAG_BITS & self._page_places - 1)
        end = first + self._page_places
        tags, tag, columns = self._tags, _TAGS[mixed & 255], self._columns
        stop = tags.find(_EMPTY, home, end)
        place = tags.find(tag, home, end if stop < 0 else stop)
        wrapped = stop >= 0
        if not wrapped:
            stop = end
        while True:
            while place >= 0:
                row = self._rows[place]
                if columns.table[row] == table:
                    there = columns.key(row)
                    if there == key if key else hash_of(there) == hashed:
                        return place
                place = tags.find(tag, place + 1, stop)
            if wrapped:
                return -1
            wrapped = True
            stop = tags.find(_EMPTY, first, home)
            if stop < 0:
                stop = home
            place = tags.find(tag, first, stop)

    def _add(self, table: int, key: bytes, row: int) -> None:
        mixed = hash_of(key) + table * _MIX & _HASHES
        first = self._first_place(mixed)
        page = first >> self._bits
        if self._taken[page] == self._page_places:
            self._put_again(page)
        home = first + (mixed >> _TAG_BITS & self._page_places - 1)
        for low, high in ((home, first + self._page_places), (first, home)):
            empty = self._tags.find(_EMPTY, low, high)
            place = self._tags.find(_DEAD, low, high if empty < 0 else empty)
            if place < 0:
                place = empty
                if place < 0:
                    continue
                self._taken[page] += 1
            self._tags[place : place + 1] = _TAGS[mixed & 255]
            self._rows[place] = row
            return
        self._overfull[table, key] = row

    def _take_all(self, page: int) -> list[int]:
        """Empty a page; returns the rows that were in it."""
        first, end = page << self._bits, (page + 1) << self._bits
        tags = np.frombuffer(self._tags, dtype=np.uint8, count=end - first, offset=first)
        rows: list[int] = np.frombuffer(self._rows, dtype=np.uint32)[first:end][tags > 1].tolist()
        self._tags[first:end] = bytes(end - first)
        self._taken[page] = 0
        return rows

    def _put_again(self, page: int) -> None:
        """No place of a page is empty: its dead ones become empty. At most once in so many removals."""
        self._add_again(self._take_all(page))

    def _divide(self) -> None:
        """The next page shares its blocks with a new one."""
        rows = self._take_all(self._divided)
        self._divided += 1
        self._pages += 1
        if self._divided == self._level:
            self._level *= 2
            self._divided = 0
        self._add_again(rows)

    def _add_again(self, rows: Sequence[int]) -> None:
        columns = self._columns
        for row in rows:
            self._add(columns.table[row], columns.key(row), row)


class PackedBlocks:
    """The blocks of one size, by the rows of their slots: see the module, and `BlockRecords`.

    table: the number of each row's table and 1; 0: the row is free. tables: those that have rows, by these numbers.
    leases: of the rows that have any. origins: of the rows whose is not `OWN`.
    """

    def __init__(self, rows: int, places_bits: int = PLACES_BITS) -> None:
        if rows + QUEUES_MAX >= 1 << 32:
            raise LimitExceeded(f"{rows} slots of one size are more than can be numbered")
        self.rows = rows
        self._end = 0
        self._keys = private_pages(KEY_BYTES * rows)
        self._key_rows = np.frombuffer(self._keys, dtype=f"V{KEY_BYTES}")
        self.table = memoryview(private_pages(4 * rows)).cast("I")
        self._table_rows = np.frombuffer(self.table, dtype=np.uint32)
        self.depth = OddIntegers(rows, 3)
        self.flags = memoryview(private_pages(rows))
        self._flag_rows = np.frombuffer(self.flags, dtype=np.uint8)
        self.parent, self.used, self.freq = (OddIntegers(rows, 5) for _ in range(3))
        # The ends of queues come after the rows.
        self.older = memoryview(private_pages(4 * (rows + QUEUES_MAX))).cast("I")
        self.newer = memoryview(private_pages(4 * (rows + QUEUES_MAX))).cast("I")
        self._queues = 0
        self.tables: dict[int, PartTable] = {}
        self._rows_of: dict[int, int] = {}  # how many, by the number of their table
        self.leases: dict[int, int] = {}
        self.origins: dict[int, Origin] = {}
        self.index = PackedIndex(self, rows, places_bits)

    def key(self, row: int) -> bytes:
        """Of the block in this row."""
        return self._keys[KEY_BYTES * row : KEY_BYTES * row + KEY_BYTES]

    def block(self, row: int) -> Block:
        """A view of this row."""
        return cast(Block, PackedBlock(self, row))

    def new_queue(self) -> PackedQueue:
        """An empty queue of these blocks. It is never given back: there are as many as policies."""
        if self._queues == QUEUES_MAX:
            raise LimitExceeded(f"{QUEUES_MAX} eviction queues of one size, the limit")
        self._queues += 1
        return PackedQueue(self, self.rows + self._queues - 1)

    def enter(
        self,
        table: PartTable,
        keys: Sequence[bytes],
        rows: Sequence[int],
        parents: Sequence[bytes],
        depths: Iterable[int],
        tick: int,
    ) -> list[Block]:
        """See `BlockRecords`."""
        number = table.number + 1
        index = table.blocks
        assert isinstance(index, PackedTable)
        at = np.array(rows, dtype=np.int64)
        self._key_rows[at] = np.frombuffer(b"".join(keys), dtype=self._key_rows.dtype)
        self._table_rows[at] = number
        self.depth.set(at, np.fromiter(depths, dtype=np.int64, count=len(rows)).clip(max=DEPTH_MAX))
        self._flag_rows[at] = 0
        hashes = [hash_of(parent) if parent else 0 for parent in parents]
        self.parent.set(at, np.array(hashes, dtype=np.int64))
        self.used.set(at, tick)
        self.freq.set(at, 0)
        self.index.add(number, keys, rows)
        self.tables[number] = table
        self._rows_of[number] = self._rows_of.get(number, 0) + len(rows)
        self._end = max(self._end, max(rows) + 1)
        index.entered(self, number, min(rows), len(rows))
        return list(map(self.block, rows))

    # ---- by row ------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._end

    def between(self, first: int, end: int) -> list[Block]:
        """The blocks in rows from `first` up to `end`, in order; those that are `gone` and leased among them."""
        held = np.flatnonzero(self._table_rows[first : min(end, self._end)]) + first
        return list(map(self.block, held.tolist()))

    def rows_of(self, number: int, first: int, end: int) -> list[int]:
        """Between these rows, those of a table's blocks that are not `gone`."""
        end = min(end, self._end)
        at = np.flatnonzero(self._table_rows[first:end] == number)
        here = self._flag_rows[first:end][at] & _PIN != _GONE << _PIN_AT
        found: list[int] = (at[here] + first).tolist()
        return found

    def clear(self, rows: Sequence[int]) -> None:
        """These slots have no blocks any more."""
        for row in rows:
            number = self.table[row]
            self.table[row] = 0
            self._leave(number, 1)
            self.origins.pop(row, None)

    def empty(self, first: int, end: int) -> None:
        """The slots from `first` up to `end` have no blocks any more."""
        numbers, counts = np.unique(self._table_rows[first:end], return_counts=True)
        self._table_rows[first:end] = 0
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            if number:
                self._leave(number, count)
        if self.origins:
            for row in range(first, end):
                self.origins.pop(row, None)

    def _leave(self, number: int, count: int) -> None:
        left = self._rows_of[number] - count
        if left:
            self._rows_of[number] = left
        else:
            del self._rows_of[number], self.tables[number]


class PackedBlock(BlockFacts):
    """What a `Block` is, in a row of `PackedBlocks`. It is valid until its slot is freed.

    `put` is exact until the block is used again; then only that this was later is known. Of `parent` only a hash is
    kept: see `parent_known`.
    """

    __slots__ = ("_in", "row")

    def __init__(self, blocks: PackedBlocks, row: int) -> None:
        self._in = blocks
        self.row = row

    def __eq__(self, other: object) -> bool:
        return type(other) is PackedBlock and other.row == self.row and other._in is self._in

    def __hash__(self) -> int:
        return self.row

    def __repr__(self) -> str:
        return f"PackedBlock(row={self.row}, key={self.key.hex()})"

    @property
    def table(self) -> PartTable:  # type: ignore[override]  # nobody sets it
        return self._in.tables[self._in.table[self.row]]

    @property
    def key(self) -> bytes:  # type: ignore[override]  # nobody sets it
        return self._in.key(self.row)

    @property
    def parent(self) -> bytes:
        """Empty also if it is not `parent_known`."""
        row = self._parent_row()
        return self._in.key(row) if row >= 0 else b""

    @property
    def parent_known(self) -> bool:
        """Whether `parent` is it: there is none, or it has a block in the same table."""
        return not self._in.parent[self.row] or self._parent_row() >= 0

    def _parent_row(self) -> int:
        columns, row = self._in, self.row
        hashed = columns.parent[row]
        return columns.index.find_hash(columns.table[row], hashed) if hashed else -1

    @property
    def depth(self) -> int:
        return self._in.depth[self.row]

    @property
    def put(self) -> int:
        return self.used - (self._in.flags[self.row] & _USED_AGAIN != 0)

    @property
    def used(self) -> int:
        return self._in.used[self.row]

    @used.setter
    def used(self, tick: int) -> None:
        columns, row = self._in, self.row
        if tick > columns.used[row]:
            columns.flags[row] |= _USED_AGAIN
        columns.used[row] = tick

    @property
    def freq(self) -> int:
        value = self._in.freq[self.row]
        return -1 if value == _HASHES else value

    @freq.setter
    def freq(self, value: int) -> None:
        self._in.freq[self.row] = value & _HASHES

    @property
    def queue(self) -> int:
        return self._in.flags[self.row] & _QUEUE

    @queue.setter
    def queue(self, queue: int) -> None:
        flags, row = self._in.flags, self.row
        flags[row] = flags[row] & ~_QUEUE | queue

    @property
    def pin(self) -> int:
        return (self._in.flags[self.row] & _PIN) >> _PIN_AT

    @pin.setter
    def pin(self, pin: int) -> None:
        flags, row = self._in.flags, self.row
        flags[row] = flags[row] & ~_PIN | pin << _PIN_AT

    @property
    def leases(self) -> int:
        return self._in.leases.get(self.row, 0)

    @leases.setter
    def leases(self, count: int) -> None:
        if count:
            self._in.leases[self.row] = count
        else:
            del self._in.leases[self.row]

    @property
    def origin(self) -> Origin:
        return self._in.origins.get(self.row, OWN)

    @origin.setter
    def origin(self, origin: Origin) -> None:
        self._in.origins[self.row] = origin

    def go(self) -> None:
        self.pin = _GONE

    def is_here(self) -> bool:
        columns, row = self._in, self.row
        number = columns.table[row]
        if not number or columns.tables[number].namespace.retired:
            return False
        return columns.index.find(number, columns.key(row)) == row


class PackedTable(BlockIndex[Block]):
    """The blocks of a table, in `PackedBlocks`: see `BlockIndex`."""

    __slots__ = ("_at", "_columns", "_in_step", "_low", "_number")

    def __init__(self) -> None:
        super().__init__()
        self._columns: PackedBlocks | None = None  # with its first block
        self._number = 0
        self._low = 0  # no block was ever in a row before it
        self._at = 0  # for `pop_any`: rows before it have no blocks
        self._in_step: list[int] = []  # rows that it has found, the next one last

    def entered(self, columns: PackedBlocks, number: int, low: int, count: int) -> None:
        """Blocks of this table were entered."""
        self._low = low if self._columns is None else min(low, self._low)
        self._columns, self._number = columns, number
        self._length += count
        self.added += count

    # ---- one block ---------------------------------------------------------------------------------

    def __contains__(self, key: Any) -> bool:
        return self._columns is not None and self._columns.index.find(self._number, key) >= 0

    def __getitem__(self, key: bytes) -> Block:
        block = self.get(key)
        if block is None:
            raise KeyError(key)
        return block

    def get(self, key: bytes) -> Block | None:
        columns = self._columns
        if columns is None or not key:
            return None
        row = columns.index.find(self._number, key)
        return columns.block(row) if row >= 0 else None

    def __delitem__(self, key: bytes) -> None:
        if self._columns is None:
            raise KeyError(key)
        self._columns.index.remove(self._number, key)
        self._length -= 1

    def pop_any(self) -> Block:
        columns = self._columns
        assert columns is not None
        while True:
            while self._in_step:
                row = self._in_step.pop()
                if columns.rows_of(self._number, row, row + 1):
                    block = columns.block(row)
                    del self[block.key]
                    return block
            first = self._at = max(self._at, self._low)
            if first >= len(columns):
                raise AssertionError(f"a table has {self._length} blocks in no row")
            self._at = first + SCANNED
            self._in_step = columns.rows_of(self._number, first, self._at)

    # ---- many --------------------------------------------------------------------------------------

    def add(self, keys: Sequence[bytes], blocks: Sequence[Block]) -> None:
        raise AssertionError("blocks are entered into PackedBlocks")

    def remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            del self[key]

    def _rows(self, keys: Sequence[bytes]) -> list[int]:
        columns = self._columns
        return [-1] * len(keys) if columns is None else columns.index.find_all(self._number, keys)

    def found(self, keys: Sequence[bytes]) -> list[Block | None]:
        columns = self._columns
        if columns is None:
            return [None] * len(keys)
        return [columns.block(row) if row >= 0 else None for row in self._rows(keys)]

    def all_of(self, keys: Sequence[bytes]) -> list[Block]:
        return [self[key] for key in keys]

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        return [row >= 0 for row in self._rows(keys)]

    def prefix_length(self, keys: Sequence[bytes]) -> int:
        return len(list(takewhile(self.__contains__, keys)))

    def isdisjoint(self, keys: Sequence[bytes]) -> bool:
        return not any(key in self for key in keys)

    def values(self) -> Iterator[Block]:
        columns = self._columns
        if columns is not None and self._length:
            for first in range(self._low, len(columns), SCANNED):
                for row in columns.rows_of(self._number, first, first + SCANNED):
                    yield columns.block(row)

    def __iter__(self) -> Iterator[bytes]:
        for block in self.values():
            yield block.key


class PackedQueue:
    """Rows from the oldest to the youngest: see `EvictionQueue`, which it is for `PackedBlocks`.

    A circle through the columns `older` and `newer`, closed by a row of the queue's own that has no block.
    """

    __slots__ = ("_columns", "_end", "length")

    def __init__(self, columns: PackedBlocks, end: int) -> None:
        self._columns = columns
        self._end = end
        columns.older[end] = columns.newer[end] = end
        self.length = 0

    def __len__(self) -> int:
        return self.length

    def append(self, entries: Sequence[Any]) -> None:
        for entry in entries:
            self._link(entry.row)
        self.length += len(entries)

    def put_first(self, entry: Any) -> None:
        older, newer, end, row = self._columns.older, self._columns.newer, self._end, entry.row
        oldest = newer[end]
        older[row], newer[row] = end, oldest
        newer[end] = older[oldest] = row
        self.length += 1

    def remove(self, entries: Sequence[Any]) -> None:
        for entry in entries:
            self._unlink(entry.row)
        self.length -= len(entries)

    def renew(self, entries: Sequence[Any]) -> None:
        for entry in entries:
            self._unlink(entry.row)
            self._link(entry.row)

    def give(self, other: Any, count: int) -> None:
        self.length -= count
        other.length += count

    def pop(self) -> Any:
        found = self.take(1)
        return found[0] if found else None

    def take(self, n: int) -> list[Any]:
        found = self.oldest(n)
        self.remove(found)
        return found

    def peek(self) -> Any:
        return self._columns.block(self._columns.newer[self._end]) if self.length else None

    def oldest(self, n: int) -> list[Any]:
        newer, end, block = self._columns.newer, self._end, self._columns.block
        found: list[Any] = []
        row = newer[end]
        while row != end and len(found) < n:
            found.append(block(row))
            row = newer[row]
        return found

    def _link(self, row: int) -> None:
        """Make it the youngest."""
        older, newer, end = self._columns.older, self._columns.newer, self._end
        youngest = older[end]
        older[row], newer[row] = youngest, end
        newer[youngest] = older[end] = row

    def _unlink(self, row: int) -> None:
        older, newer = self._columns.older, self._columns.newer
        before, after = older[row], newer[row]
        newer[before], older[after] = after, before

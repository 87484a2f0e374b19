"""The eviction order if some namespaces have one of their own.

A namespace with a quota evicts its own coldest block when it is full, which must be found among all
others without a search. So its blocks of a size have an eviction policy of their own. To make room
for others, the next victim is the least recently used of the policies' next victims, one that is expendable before others.

Each list of blocks is of one table, as in `SlotClass`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, merge
from itertools import groupby, islice
from operator import attrgetter
from typing import Any, Protocol

from kvpool.memory.private_pages import private_pages
from kvpool.storage.eviction import Evictable, EvictionPolicy
from kvpool.storage.expendable import ExpendableFirst, is_expendable

_used, _base = attrgetter("used"), attrgetter("base")

ROWS = 1024  # examined together, while victims are looked for
ROWS_PER_MOVE = 4  # or in the time that it takes to move one entry over
SAMPLE = 64  # and four for each victim: the coldest of these go, until all have moved over
_ROW_BITS, _DEPTH_BITS = 40, 24
_USED_MAX = 1 << 62


class Used(Evictable, Protocol):
    """An entry that records its last use. base: the digest by which its namespace is opened. row: of its slot."""

    used: int

    @property
    def base(self) -> bytes: ...

    @property
    def row(self) -> int: ...

    @property
    def secondary(self) -> bool: ...


class Rows(Protocol):
    """Entries by their rows: see `BlockRecords`."""

    def between(self, first: int, end: int) -> Sequence[Any]: ...

    def __len__(self) -> int: ...


class _Moving:
    """A namespace's entries that were here before its policy: they are in the common one until they move over.

    A walk through all rows finds them, in pieces. Entries that are used or inserted meanwhile move over at once, and
    the row is marked. Those found wait in a heap, the youngest first, as numbers, which the collector of cycles
    does not visit.
    """

    __slots__ = ("_base", "_end", "_found", "_moved", "_next", "_rows", "_secondary")

    def __init__(self, base: bytes, rows: Rows, *, secondary: bool) -> None:
        self._base = base
        self._rows = rows
        self._secondary = secondary
        self._next = 0  # the row to examine next
        self._end = len(rows)  # higher ones get entries that are inserted from now on
        self._moved = private_pages(max(1, self._end))  # 1: an entry of this row is in the policy
        self._found: list[int] = []

    def __bool__(self) -> bool:
        """Whether there may be any left."""
        return self._next < self._end or bool(self._found)

    @property
    def examined(self) -> bool:
        """Whether all rows were."""
        return self._next == self._end

    def holds(self, entry: Used) -> bool:
        """Whether this entry has yet to move over."""
        return bool(
            entry.queue
            and entry.base == self._base
            and entry.secondary == self._secondary
            and entry.row < self._end
            and not self._moved[entry.row]
        )

    def take(self, entries: Iterable[Used]) -> list[Used]:
        """Those of these entries that have yet to move over. All of them are in the policy from now on."""
        late: list[Used] = []
        for entry in entries:
            if self.holds(entry):
                late.append(entry)
            if entry.row < self._end:
                self._moved[entry.row] = 1
        return late

    def examine(self, rows: int) -> int:
        """Look for entries in the next rows; returns how many there were."""
        first, end = self._next, min(self._next + rows, self._end)
        if first == end:
            return 0
        for entry in self._rows.between(first, end):
            if self.holds(entry):
                # Of blocks used together, the tail of the chain goes first, as in every policy.
                depth = min(entry.depth, (1 << _DEPTH_BITS) - 1)
                age = (_USED_MAX - entry.used) << _DEPTH_BITS | depth
                heappush(self._found, age << _ROW_BITS | entry.row)
        self._next = end
        return end - first

    def youngest(self, n: int) -> list[Used]:
        """The n youngest of those found, at most: they move over."""
        found: list[Used] = []
        for _ in range(min(n, len(self._found))):
            found += self.take(self._entry(heappop(self._found)))
        return found

    def coldest(self, n: int) -> list[Used]:
        """About the n coldest of those found, at most: they leave. Exact if all are but a few."""
        some: list[tuple[int, Used]] = []
        while self._found and len(some) < 4 * n + SAMPLE:
            number = self._found.pop()  # a leaf, so the rest is still a heap
            some += ((number, entry) for entry in self._entry(number))
        some.sort(key=lambda one: one[0], reverse=True)
        for number, _ in some[n:]:
            heappush(self._found, number)
        return [entry for _, entry in some[:n]]

    def _entry(self, number: int) -> list[Used]:
        """The entry, if it is still one that has yet to move over."""
        row = number & (1 << _ROW_BITS) - 1
        return [entry for entry in self._rows.between(row, row + 1) if self.holds(entry)]


@dataclass(eq=False, repr=False, slots=True)
class QuotaEviction:
    """An `EvictionPolicy`. Not thread-safe. `pop` and `peek` are O(namespaces with a policy of their own).

    common: the policy of all other namespaces. make_policy: given a capacity. rows: of the entries; those that are
    `secondary`, or the others.
    """

    _common: EvictionPolicy
    _make_policy: Callable[[int], EvictionPolicy]
    _rows: Rows
    secondary: bool = False
    _parts: dict[bytes, EvictionPolicy] = field(default_factory=dict, init=False)
    """By the digest that a namespace is opened by."""
    _moving: dict[bytes, _Moving] = field(default_factory=dict, init=False)
    """Those that not all entries have moved over of."""

    def divide(self, base: bytes, capacity: int, *, empty: bool) -> None:
        """Give a namespace a policy of its own, or change its capacity.

        Its entries here, unless it is `empty`, move over when they are used or evicted, and by `move`.
        """
        part = self._parts.get(base)
        if part is not None:
            part.resize(capacity)
            return
        self._parts[base] = self._make_policy(capacity)
        self._parts[base].succeed(self._common)
        if not empty:
            self._moving[base] = _Moving(base, self._rows, secondary=self.secondary)

    def __contains__(self, base: bytes) -> bool:
        """Whether a namespace has a policy of its own."""
        return base in self._parts

    def part(self, base: bytes) -> EvictionPolicy:
        """The separate policy of a namespace, with the blocks moved over so far."""
        return self._parts[base]

    def take_of(self, base: bytes, n: int) -> Sequence[Any]:
        """The next n victims among such a namespace's blocks, removed from the policy.

        Until all have moved over, about the coldest of those found so far, and maybe fewer.
        """
        moving = self._moving.get(base)
        if moving is None:
            return self._parts[base].take(n)
        victims: list[Used] = []
        while not victims and moving:
            moving.examine(ROWS)
            victims = moving.coldest(n)
        self._common.discard(victims)
        if moving:
            return victims
        return [*victims, *self._parts[base].take(n - len(victims))]

    def move(self, base: bytes, n: int) -> int:
        """Move up to n of the older blocks over, once all are found; returns how many were, or could have been."""
        moving = self._moving.get(base)
        if moving is None:
            return 0
        examined = moving.examine(ROWS_PER_MOVE * n)
        left = n - -(-examined // ROWS_PER_MOVE)
        youngest = moving.youngest(left) if moving.examined else []
        if not moving:
            del self._moving[base]
        # The youngest first, each batch before the previous one: so the order is preserved.
        part = self._parts[base]
        self._move_over(youngest, part, part.put_back)
        return n - left + len(youngest)

    def _policy_of(self, blocks: Sequence[Used]) -> EvictionPolicy:
        base = blocks[0].base
        part = self._parts.get(base)
        if part is None:
            return self._common
        moving = self._moving.get(base)
        if moving is not None:
            self._move_over(moving.take(dict.fromkeys(blocks)), part, part.insert)
        return part

    def _move_over(
        self, blocks: list[Used], part: EvictionPolicy, enter: Callable[[list[Used]], None]
    ) -> None:
        """From the common policy into one of a namespace. What is expendable stays so."""
        expendable = [block for block in blocks if is_expendable(block)]
        self._common.discard(blocks)
        enter(blocks)
        if expendable:
            assert isinstance(part, ExpendableFirst), "secondary replicas cannot be expendable"
            part.expend(expendable)

    # ---- the policy ----------------------------------------------------------------------------------

    def insert(self, entries: Sequence[Any]) -> None:
        if entries:
            self._policy_of(entries).insert(entries)

    def put_back(self, entries: Sequence[Any]) -> None:
        if entries:
            self._policy_of(entries).put_back(entries)

    def touch(self, entries: Sequence[Any]) -> None:
        if entries:
            self._policy_of(entries).touch(entries)

    def refresh(self, entries: Sequence[Any]) -> None:
        if entries:
            self._policy_of(entries).refresh(entries)

    def discard(self, entries: Sequence[Any]) -> None:
        for _, some in groupby(entries, key=_base):
            self._policy_of(held := list(some)).discard(held)

    def expend(self, entries: Sequence[Any]) -> int:
        """See `ExpendableFirst.expend`: the policies must be such."""
        policy = self._policy_of(entries)
        assert isinstance(policy, ExpendableFirst), "secondary replicas cannot be expendable"
        return policy.expend(entries)

    @property
    def expendable(self) -> int:
        """Number of expendable entries."""
        policies = (self._common, *self._parts.values())
        return sum(each.expendable for each in policies if isinstance(each, ExpendableFirst))

    def _next(self) -> EvictionPolicy:
        """The policy whose next victim was used longest ago, expendable ones before others; of equals the common one."""
        found, first = self._common, None
        for policy in (self._common, *self._parts.values()):
            block: Any = policy.peek()
            if block is not None:
                order = (not is_expendable(block), block.used)
                if first is None or order < first:
                    found, first = policy, order
        return found

    def pop(self) -> Any:
        return self._next().pop()

    def take(self, n: int) -> list[Any]:
        return list(islice(iter(self.pop, None), n))

    def peek(self) -> Any:
        return self._next().peek()

    def coldest(self, n: int) -> list[Any]:
        found = [policy.coldest(n) for policy in (self._common, *self._parts.values())]
        return list(islice(merge(*found, key=_used), n))

    def resize(self, capacity: int) -> None:
        """Of the common policy: separate ones have capacities of their own."""
        self._common.resize(capacity)

    def succeed(self, other: EvictionPolicy) -> None:
        raise AssertionError("it holds the blocks of all namespaces, and there is no other one")

    def __len__(self) -> int:
        return len(self._common) + sum(map(len, self._parts.values()))

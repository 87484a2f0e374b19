"""The eviction order if some namespaces have one of their own.

A namespace with a quota evicts its own coldest block when it is full, which must be found among all
others without a search. So its blocks of a size have an eviction policy of their own. To make room
for others, the next victim is the least recently used of the policies' next victims.

Each list of blocks is of one table, as in `SlotClass`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from heapq import merge
from itertools import groupby, islice
from operator import attrgetter
from typing import Any, Protocol

from kvpool.storage.eviction import Evictable, EvictionPolicy

_used, _base = attrgetter("used"), attrgetter("base")


class Used(Evictable, Protocol):
    """An entry that records its last use. base: the digest by which its namespace is opened."""

    used: int

    @property
    def base(self) -> bytes: ...


class QuotaEviction:
    """An `EvictionPolicy`. Not thread-safe. `pop` and `peek` are O(namespaces with a policy of their own)."""

    __slots__ = ("_common", "_make_policy", "_moving", "_parts")

    def __init__(
        self, common: EvictionPolicy, make_policy: Callable[[int], EvictionPolicy]
    ) -> None:
        """common: the policy of all other namespaces. make_policy: given a capacity."""
        self._common = common
        self._make_policy = make_policy
        self._parts: dict[bytes, EvictionPolicy] = {}  # by the digest that a namespace is opened by
        # Blocks that were here before and are still in the common policy, least recently used last: they move over
        # a few at a time.
        self._moving: dict[bytes, OrderedDict[Used, None]] = {}

    def divide(self, base: bytes, capacity: int, blocks: Iterable[Used]) -> None:
        """Give a namespace a policy of its own, or change its capacity.

        blocks: its blocks here. O(blocks) to sort them, the first time; they move over
        when they are used or evicted, and by `move`.
        """
        part = self._parts.get(base)
        if part is not None:
            part.resize(capacity)
            return
        self._parts[base] = self._make_policy(capacity)
        # Of blocks used together, the tail of the chain goes first, as in every policy.
        held = [block for block in blocks if block.queue]
        held.sort(key=lambda block: (-block.used, block.depth))
        self._moving[base] = OrderedDict.fromkeys(held)

    def __contains__(self, base: bytes) -> bool:
        """Whether a namespace has a policy of its own."""
        return base in self._parts

    def part(self, base: bytes) -> EvictionPolicy:
        """The separate policy of a namespace, with the blocks moved over so far."""
        return self._parts[base]

    def take_of(self, base: bytes, n: int) -> Sequence[Any]:
        """The next n victims among such a namespace's blocks, removed from the policy."""
        moving = self._moving.get(base)
        if not moving:
            return self._parts[base].take(n)
        victims = [moving.popitem()[0] for _ in range(min(n, len(moving)))]
        self._common.discard(victims)
        return victims

    def move(self, base: bytes, n: int) -> int:
        """Move up to n of the older blocks over; returns how many were examined."""
        moving = self._moving.get(base)
        if moving is None:
            return 0
        youngest = [moving.popitem(last=False)[0] for _ in range(min(n, len(moving)))]
        if not moving:
            del self._moving[base]
        self._common.discard(youngest)
        # The youngest first, each batch before the previous one: so the order is preserved.
        self._parts[base].put_back(youngest)
        return len(youngest)

    def _take(self, blocks: Iterable[Used], moving: OrderedDict[Used, None]) -> list[Used]:
        """Those of the blocks that have not moved over, removed from the common policy."""
        late = [block for block in dict.fromkeys(blocks) if block in moving]
        for block in late:
            del moving[block]
        self._common.discard(late)
        return late

    def _policy_of(self, blocks: Sequence[Used]) -> EvictionPolicy:
        base = blocks[0].base
        part = self._parts.get(base)
        if part is None:
            return self._common
        moving = self._moving.get(base)
        if moving is not None:
            part.insert(self._take(blocks, moving))
        return part

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

    def _next(self) -> EvictionPolicy:
        """The policy whose next victim was used longest ago; of equals the common one."""
        found, used = self._common, None
        for policy in (self._common, *self._parts.values()):
            block: Any = policy.peek()
            if block is not None and (used is None or block.used < used):
                found, used = policy, block.used
        return found

    def pop(self) -> Any:
        block: Any = self._next().pop()
        if block is not None and self._moving and (moving := self._moving.get(block.base)):
            moving.pop(block, None)
        return block

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

    def __len__(self) -> int:
        return len(self._common) + sum(map(len, self._parts.values()))

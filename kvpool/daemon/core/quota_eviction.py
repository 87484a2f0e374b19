"""The order in which blocks leave, where some namespaces have one of their own.

A namespace with a quota gives up its own coldest block when it is full, which has to be found among all
others without a search. So its blocks of a size are in an eviction policy of their own. When room is made
for others, the next victim is the one among the policies' next victims that was used longest ago.

Lists of blocks are of one table each, as in `SlotClass`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from heapq import merge
from itertools import islice
from operator import attrgetter
from typing import Any, Protocol

from kvpool.storage.eviction import Evictable, EvictionPolicy

_used = attrgetter("used")


class Used(Evictable, Protocol):
    """An entry that notes its last use. base: of its namespace, the digest by which that is opened."""

    used: int

    @property
    def base(self) -> bytes: ...


class QuotaEviction:
    """An `EvictionPolicy`. Not thread-safe. `pop` and `peek` are O(namespaces with a policy of their own)."""

    __slots__ = ("_common", "_make_policy", "_moving", "_parts")

    def __init__(
        self, common: EvictionPolicy, make_policy: Callable[[int], EvictionPolicy]
    ) -> None:
        """common: that of all other namespaces. make_policy: given a capacity."""
        self._common = common
        self._make_policy = make_policy
        self._parts: dict[bytes, EvictionPolicy] = {}  # by the digest that a namespace is opened by
        # Blocks that were here before, least recently used last: they change over a few at a time.
        self._moving: dict[bytes, deque[Used]] = {}

    def divide(self, base: bytes, capacity: int, blocks: Iterable[Used]) -> None:
        """A namespace is to have a policy of its own; or it has one, whose capacity is another now.

        blocks: those that it has here. O(blocks) to put them in order, the first time; they change over
        when they are used or evicted, and by `move`.
        """
        part = self._parts.get(base)
        if part is not None:
            part.resize(capacity)
            return
        self._parts[base] = self._make_policy(capacity)
        # Of those that were used together, the tail of the chain goes first, as in every policy.
        self._moving[base] = deque(sorted(blocks, key=lambda block: (-block.used, block.depth)))

    def part(self, base: bytes) -> EvictionPolicy:
        """The policy of a namespace that was divided off, with what has changed over so far."""
        return self._parts[base]

    def pop_of(self, base: bytes) -> Any:
        """The next victim among the blocks of such a namespace, no longer held; None if there is none."""
        moving = self._moving.get(base)
        while moving:
            block = moving.pop()
            if block in self._common:
                self._common.discard(block)
                return block
        return self._parts[base].pop()

    def move(self, base: bytes, n: int) -> int:
        """Have up to n of the blocks that were here before change over; how many were looked at."""
        moving = self._moving.get(base)
        if moving is None:
            return 0
        looked_at = [moving.popleft() for _ in range(min(n, len(moving)))]
        if not moving:
            del self._moving[base]
        # The youngest first, each lot before the last one: so they end in their order.
        self._parts[base].put_back(self._take(looked_at))
        return len(looked_at)

    def _take(self, blocks: Iterable[Used]) -> list[Used]:
        """Those of the blocks that have not changed over, in no policy any more."""
        common = self._common
        late = [block for block in dict.fromkeys(blocks) if block in common]
        for block in late:
            common.discard(block)
        return late

    def _policy_of(self, blocks: Sequence[Used]) -> EvictionPolicy:
        base = blocks[0].base
        part = self._parts.get(base)
        if part is None:
            return self._common
        if base in self._moving:
            part.insert(self._take(blocks))
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

    def discard(self, entry: Any) -> None:
        self._policy_of([entry]).discard(entry)

    def _next(self) -> EvictionPolicy:
        """The one whose next victim was used longest ago; of equal ones the common one."""
        found, used = self._common, None
        for policy in (self._common, *self._parts.values()):
            block: Any = policy.peek()
            if block is not None and (used is None or block.used < used):
                found, used = policy, block.used
        return found

    def pop(self) -> Any:
        return self._next().pop()

    def peek(self) -> Any:
        return self._next().peek()

    def coldest(self, n: int) -> list[Any]:
        found = [policy.coldest(n) for policy in (self._common, *self._parts.values())]
        return list(islice(merge(*found, key=_used), n))

    def resize(self, capacity: int) -> None:
        """Of the common one: parts have capacities of their own."""
        self._common.resize(capacity)

    def __len__(self) -> int:
        return len(self._common) + sum(map(len, self._parts.values()))

    def __contains__(self, entry: Any) -> bool:
        return entry in self._common or any(entry in part for part in self._parts.values())

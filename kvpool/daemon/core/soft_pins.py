"""Soft pins: blocks that are evicted when nothing else can be."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, Protocol, TypeVar

from kvpool.storage.eviction_queue import EntryQueue


class Pinned(Protocol):
    """A block. used: the tick of its last use."""

    used: int

    @property
    def table(self) -> Hashable: ...


B = TypeVar("B", bound=Pinned)


class SoftPins(Generic[B]):
    """The soft pins of one slot class that may be evicted. Not thread-safe.

    They are in no policy, so their links are free: those of each table form a queue, the oldest first, and no step
    takes longer when there are many. Each list of blocks is of one table.
    """

    __slots__ = ("_new_queue", "_queues", "_spare")

    def __init__(self, new_queue: Callable[[], EntryQueue]) -> None:
        """new_queue: for blocks of this class."""
        self._new_queue = new_queue
        self._queues: dict[Hashable, EntryQueue] = {}  # none is empty
        self._spare: list[EntryQueue] = []

    def add(self, blocks: Sequence[B], *, first: bool = False) -> None:
        """They may be evicted if nothing else can. first: before all others of the table."""
        table = blocks[0].table
        queue = self._queues.get(table)
        if queue is None:
            queue = self._queues[table] = self._spare.pop() if self._spare else self._new_queue()
        if first:
            for block in reversed(blocks):
                queue.put_first(block)
        else:
            queue.append(blocks)

    def remove(self, blocks: Sequence[B]) -> None:
        """They are among them, and no longer."""
        table = blocks[0].table
        self._queues[table].remove(blocks)
        self._drop_empty(table)

    def take(self, n: int, table: Hashable | None = None) -> Sequence[B]:
        """Up to n of the oldest of a table, removed. None: of the table whose oldest was used longest ago."""
        if table is None and self._queues:
            table = min(self._queues, key=lambda one: self._queues[one].peek().used)
        queue = None if table is None else self._queues.get(table)
        if table is None or queue is None:
            return []
        blocks = queue.take(n)
        self._drop_empty(table)
        return blocks

    def _drop_empty(self, table: Hashable) -> None:
        queue = self._queues[table]
        if not queue.length:
            del self._queues[table]
            self._spare.append(queue)

    def __len__(self) -> int:
        return sum(queue.length for queue in self._queues.values())

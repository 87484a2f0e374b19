"""Entries that go before all others: a queue in front of an eviction policy. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from kvpool.storage.eviction import EvictionPolicy, MakePolicy, NewQueue
from kvpool.storage.eviction_queue import EvictionQueue

_EXPENDABLE = 4  # in `Evictable.queue`, which policies set to less, and which has three bits


def is_expendable(entry: Any) -> bool:
    """Whether an entry goes before others."""
    return bool(entry.queue == _EXPENDABLE)


class ExpendableFirst:
    """An `EvictionPolicy` that gives up expendable entries first, and then as the policy behind it does.

    Expendable entries go in the order in which they became so. One that is read is an ordinary one again, as young as
    others that are read; so is one that came up as a victim and is put back. The policy behind learns nothing from
    the eviction of expendable entries: it was not its choice.
    """

    __slots__ = ("_expendable", "_policy")

    def __init__(self, policy: EvictionPolicy, new_queue: NewQueue = EvictionQueue) -> None:
        """policy: with queues of the same kind."""
        self._policy = policy
        self._expendable = new_queue()

    def expend(self, entries: Sequence[Any]) -> int:
        """These go before others, in this order, and after those that are expendable already; how many are newly so.

        Entries that are not held are ignored.
        """
        new = _once(entry for entry in entries if entry.queue and entry.queue != _EXPENDABLE)
        if not new:
            return 0
        self._policy.discard(new)
        for entry in new:
            entry.queue = _EXPENDABLE
        self._expendable.append(new)
        return len(new)

    @property
    def expendable(self) -> int:
        """Number of expendable entries."""
        return self._expendable.length

    def insert(self, entries: Sequence[Any]) -> None:
        self._policy.insert(entries)

    def put_back(self, entries: Sequence[Any]) -> None:
        self._policy.put_back(entries)

    def touch(self, entries: Sequence[Any]) -> None:
        if self._expendable.length:
            again = _once(entry for entry in entries if entry.queue == _EXPENDABLE)
            if again:
                self._take_out(again)
                self._policy.touch(again)  # an entry that is not held records the read
                self._policy.insert(again)
        self._policy.touch(entries)

    def refresh(self, entries: Sequence[Any]) -> None:
        self._policy.refresh(self._ordinary(entries))

    def discard(self, entries: Sequence[Any]) -> None:
        if self._expendable.length:
            self._take_out(_once(entry for entry in entries if entry.queue == _EXPENDABLE))
        self._policy.discard(entries)

    def _take_out(self, entries: Sequence[Any]) -> None:
        self._expendable.remove(entries)
        for entry in entries:
            entry.queue = 0

    def _ordinary(self, entries: Sequence[Any]) -> Sequence[Any]:
        if not self._expendable.length:
            return entries
        return [entry for entry in entries if entry.queue != _EXPENDABLE]

    def pop(self) -> Any:
        if self._expendable.length:
            entry = self._expendable.pop()
            entry.queue = 0
            return entry
        return self._policy.pop()

    def take(self, n: int) -> Sequence[Any]:
        if not self._expendable.length:
            return self._policy.take(n)
        entries = self._expendable.take(n)
        for entry in entries:
            entry.queue = 0
        return [*entries, *self._policy.take(n - len(entries))] if len(entries) < n else entries

    def peek(self) -> Any:
        return self._expendable.peek() if self._expendable.length else self._policy.peek()

    def coldest(self, n: int) -> list[Any]:
        found = self._expendable.oldest(n)
        return found + self._policy.coldest(n - len(found)) if len(found) < n else found

    def resize(self, capacity: int) -> None:
        self._policy.resize(capacity)

    def succeed(self, other: EvictionPolicy) -> None:
        assert isinstance(other, ExpendableFirst)
        self._policy.succeed(other._policy)

    def __len__(self) -> int:
        return self._expendable.length + len(self._policy)


def _once(entries: Iterable[Any]) -> list[Any]:
    """Who tells of them may name one twice; a queue may not hold it twice."""
    return list(dict.fromkeys(entries))


class MakeExpendableFirst(Protocol):
    """A fresh policy for a tier of so many entries."""

    def __call__(self, capacity: int, new_queue: NewQueue = ..., /) -> ExpendableFirst: ...


def expendable_first(make_policy: MakePolicy) -> MakeExpendableFirst:
    """Makes such policies, each with one of `make_policy` behind it."""

    def make(capacity: int, new_queue: NewQueue = EvictionQueue, /) -> ExpendableFirst:
        return ExpendableFirst(make_policy(capacity, new_queue), new_queue)

    return make

"""Which leases keep looked-up objects, and for whom. No I/O: leases to be released are handed back.

LMCache locks objects one by one, several times where several requests look one up, and unlocks them so; the pool
leases all that one request found together. A lease ends when the last of its objects is unlocked, or by itself.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

K = TypeVar("K", bound=Hashable)


class Expiring(Protocol):
    """What is known here of a lease."""

    @property
    def valid(self) -> bool: ...


L = TypeVar("L", bound=Expiring)


class Hold(Generic[L]):
    """One lease. layout: of all objects in it. users: locked objects and loads that still need it."""

    __slots__ = ("layout", "lease", "users")

    def __init__(self, lease: L, layout: Hashable, users: int) -> None:
        self.lease = lease
        self.layout = layout
        self.users = users


@dataclass(frozen=True, slots=True)
class Held(Generic[L]):
    """An object under a lease: its slot is number `index` there."""

    hold: Hold[L]
    index: int


class Holds(Generic[K, L]):
    """Thread-safe.

    most: locks kept at a time. An object beyond them is not locked, and is looked for again by its load.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self._held: dict[K, deque[Held[L]]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._count

    def add(self, lease: L, layout: Hashable, found: Sequence[tuple[K, int]]) -> bool:
        """Lock objects, each in a slot of the lease. False: none, or too many locks; the lease remains the caller's."""
        with self._lock:
            if self._count + len(found) > self._most:
                self._forget_ended()
            if not found or self._count + len(found) > self._most:
                return False
            hold = Hold(lease, layout, len(found))
            for key, index in found:
                self._held.setdefault(key, deque()).append(Held(hold, index))
            self._count += len(found)
            return True

    def use(self, key: K, layout: Hashable) -> Held[L] | None:
        """The slot of a locked object, whose lease is kept until `done`; None: there is none of this layout, or it has
        ended. Of several the latest, which lasts longest."""
        with self._lock:
            for held in reversed(self._held.get(key, ())):
                if held.hold.layout == layout and held.hold.lease.valid:
                    held.hold.users += 1
                    return held
            return None

    def done(self, held: Iterable[Held[L]]) -> list[L]:
        """These were read. Leases that are to be released."""
        with self._lock:
            return [each.hold.lease for each in held if self._less(each.hold)]

    def unlock(self, keys: Iterable[K]) -> list[L]:
        """Unlock each object once. Leases that are to be released."""
        released = []
        with self._lock:
            for key in keys:
                waiting = self._held.get(key)
                if waiting is None:
                    continue  # it was not locked, or is forgotten
                held = waiting.popleft()
                self._count -= 1
                if not waiting:
                    del self._held[key]
                if self._less(held.hold):
                    released.append(held.hold.lease)
        return released

    def end(self) -> list[L]:
        """Unlock all. Leases that are to be released; those in use are not among them, but come from `done`."""
        with self._lock:
            every = [held for waiting in self._held.values() for held in waiting]
            self._held.clear()
            self._count = 0
            return [held.hold.lease for held in every if self._less(held.hold)]

    def _less(self, hold: Hold[L]) -> bool:
        hold.users -= 1
        return hold.users == 0

    def _forget_ended(self) -> None:
        """Locks whose leases have ended: of requests that LMCache gave up."""
        for key, waiting in list(self._held.items()):
            kept = deque(held for held in waiting if held.hold.lease.valid)
            self._count -= len(waiting) - len(kept)
            if kept:
                self._held[key] = kept
            else:
                del self._held[key]

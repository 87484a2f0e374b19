"""Requests that wait for blocks to be committed here. No I/O, no clock.

The rules report commits (`Node.commit_waiters`): one set lookup per batch of a namespace that has waiters, one
dictionary lookup per block, and nothing without waiters.

A writer may also report that blocks will not be committed (dropped). Who asks for one within `DROPPED_S` is told so,
and has to look whether it lacks any part here: other ranks commit theirs meanwhile, which do not make up for this one.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvpool.errors import LimitExceeded

DROPPED_S = 1.0  # a node that streams a prompt asks again within that
DROPPED_MAX = 1 << 16  # blocks


@dataclass(eq=False, slots=True)
class CommitWaiter:
    """Waits for any of some blocks. Created and ended by `CommitWaiters` only.

    wake: called with the first commit, and at most once; it must only set a flag.
    """

    who: str | None
    name: bytes
    keys: Sequence[bytes]
    wake: Callable[[], None]
    woken: bool = False


class CommitWaiters:
    """All waiters. Not thread-safe.

    Namespaces are identified by their directory digests, so that it is possible to wait before one is opened
    here. waiters_max, waiters_per_peer_max: waiting peers' requests, in total and per peer.
    """

    def __init__(self, waiters_max: int, waiters_per_peer_max: int) -> None:
        self._most = waiters_max
        self._most_of_one = waiters_per_peer_max
        self._waiting: dict[bytes, dict[bytes, dict[CommitWaiter, None]]] = {}
        self._waiters: dict[CommitWaiter, None] = {}
        self._by_peer: Counter[str] = Counter()
        self._dropped: dict[tuple[bytes, bytes], float] = {}  # until when, the first to end first

    def __bool__(self) -> bool:
        """Whether commits must be reported."""
        return bool(self._waiters)

    def __len__(self) -> int:
        return len(self._waiters)

    def add(
        self,
        who: str | None,
        name: bytes,
        keys: Sequence[bytes],
        wake: Callable[[], None],
    ) -> CommitWaiter:
        """Call `wake` when any part of any of these blocks is committed; until `remove`.

        who: the requesting node; None: this one, which limits its own elsewhere. Raises `LimitExceeded`.
        """
        if who is not None:
            if self._by_peer[who] >= self._most_of_one:
                raise LimitExceeded(
                    f"{self._most_of_one} Await requests of node {who} are waiting here, the limit"
                )
            if self._by_peer.total() >= self._most:
                raise LimitExceeded(
                    f"{self._most} Await requests of peers are waiting here, the limit"
                )
            self._by_peer[who] += 1
        waiter = CommitWaiter(who, name, keys, wake)
        self._waiters[waiter] = None
        waiting = self._waiting.setdefault(name, {})
        for key in keys:
            waiting.setdefault(key, {})[waiter] = None
        return waiter

    def remove(self, waiter: CommitWaiter) -> None:
        """Stop waiting, woken or not. Idempotent."""
        if waiter not in self._waiters:
            return
        del self._waiters[waiter]
        if waiter.who is not None:
            self._by_peer[waiter.who] -= 1
            if not self._by_peer[waiter.who]:
                del self._by_peer[waiter.who]
        # The namespace's entry is removed when no waiter has keys left.
        waiting: dict[bytes, dict[CommitWaiter, None]] = self._waiting.get(waiter.name, {})
        for key in waiter.keys:
            others = waiting.get(key)
            if others is not None:
                others.pop(waiter, None)  # a key may be named twice
                if not others:
                    del waiting[key]
        if not waiting:
            self._waiting.pop(waiter.name, None)

    def came(self, name: bytes, keys: Sequence[bytes]) -> None:
        """Parts of these blocks were committed."""
        for waiter in self._of(name, keys):
            _wake(waiter)

    def drop(self, name: bytes, keys: Sequence[bytes], now: float) -> None:
        """Who was to commit these will not."""
        dropped = self._dropped
        for key in keys:
            dropped.pop((name, key), None)
            dropped[name, key] = now + DROPPED_S
        for oldest in [*itertools.islice(dropped, max(0, len(dropped) - DROPPED_MAX))]:
            del dropped[oldest]
        for waiter in self._of(name, keys):
            _wake(waiter)

    def dropped(self, name: bytes, keys: Sequence[bytes], now: float) -> list[int]:
        """The positions of those that were dropped a moment ago, whether or not they are here by now."""
        self.forget_dropped(now)
        dropped = self._dropped
        return [at for at, key in enumerate(keys) if (name, key) in dropped] if dropped else []

    def forget_dropped(self, now: float) -> None:
        """Those that were dropped longer ago. To be called some time after `drop`."""
        dropped = self._dropped
        while dropped and dropped[oldest := next(iter(dropped))] <= now:
            del dropped[oldest]

    def _of(self, name: bytes, keys: Sequence[bytes]) -> Iterator[CommitWaiter]:
        """The waiters for any of these."""
        waiting = self._waiting.get(name)
        if waiting is None or waiting.keys().isdisjoint(keys):
            return
        for key in keys:
            yield from waiting.get(key, ())

    def end(self, name: bytes) -> None:
        """Nothing of this namespace is committed any more: its epoch has ended."""
        for waiters in self._waiting.get(name, {}).values():
            for waiter in waiters:
                _wake(waiter)

    def end_peers(self) -> None:
        """No new blocks are stored here any more: no peer should wait for one."""
        for waiter in self._waiters:
            if waiter.who is not None:
                _wake(waiter)


def _wake(waiter: CommitWaiter) -> None:
    if not waiter.woken:
        waiter.woken = True
        waiter.wake()

"""Which block part leaves a full tier next: small pure objects, no I/O, no clock, no randomness.

A policy orders the entries that *may* leave. One that must not (a lease, a pin, a transfer) is
removed with `discard`, or found leased at `pop`, and is returned with `insert`. A policy's knowledge
about an entry stays with the entry, in `freq`, so that a lease does not lose it.

Chains. A block is useful only while all blocks before it are there, so the tail of a prefix chain
must go before its head. Callers pass every batch head first, and policies queue it from its end:

* within one batch the tail always goes first, in every policy;
* a later batch of the same chain (chunked prefill, decoded blocks) is queued behind the earlier
  one, so its head part would go first. `refresh` of the ancestors, right after the `insert` of
  their children, restores the order without counting as a read;
* a read must `touch` the whole prefix that it used, never its last blocks only.

Names for the configuration: `aged` (`DEFAULT_POLICY`), `lru`; see `bench/eviction.py`.

Nothing here is thread-safe; the process that decides has one thread.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import islice
from typing import Any, Protocol

from kvpool.errors import ConfigError
from kvpool.storage.eviction_miniature import CORRELATED, GHOSTS_PER_PLACE, LEVELS, RUNGS, Trial
from kvpool.storage.eviction_queue import EntryQueue, EvictionQueue, Ghosts

DEFAULT_POLICY = "aged"

GHOSTS_MAX = 1 << 20
"""Idents that one policy remembers at most, whatever its capacity."""

# Places of a miniature: so many or up to twice that, or a quarter of a small tier.
_SAMPLE, _SHIFT_MIN = 512, 2


@dataclass(frozen=True, slots=True)
class Costs:
    """The cost of a miss of one block in a tier. In seconds, for one size of block.

    load_s: to load it from this tier. below_s: from the tier below, which holds this tier's
    evictions; None if there is none. recompute_s: to compute the first block of a chain.
    recompute_s_per_depth: how much more it is for each block before it (attention).
    """

    load_s: float
    below_s: float | None
    recompute_s: float
    recompute_s_per_depth: float

    def __post_init__(self) -> None:
        if min(self.load_s, self.below_s or 0.0, self.recompute_s_per_depth) < 0:
            raise ConfigError(f"costs cannot be negative: {self}")
        if self.recompute_s <= 0:
            raise ConfigError(f"recomputing a block must take some time: {self}")

    def lost_s(self, depth: int) -> float:
        """The cost of a read of the block at this depth if it was evicted here; never below 0."""
        otherwise = self.recompute_s + depth * self.recompute_s_per_depth
        if self.below_s is not None:
            otherwise = min(otherwise, self.below_s)
        return max(0.0, otherwise - self.load_s)


class Evictable(Protocol):
    """A policy's view of a block part. The policy owns `freq`, `queue`, `older` and `newer`; nobody else writes them.

    The first two are 0 in a new entry. depth: blocks before it in its chain; 0 for the first, or if unknown.
    Read only by a policy that was given costs.
    """

    @property
    def ident(self) -> int:
        """64 bits for (namespace, part, key), spread evenly: it is remembered after the entry is gone."""

    freq: int
    queue: int  # 0: no policy holds the entry
    older: Any
    newer: Any
    depth: int


class EvictionPolicy(Protocol):
    """The order in which entries leave. Every method is O(1) an entry, amortised.

    An entry is in one policy at most. `capacity` is the most entries that the tier can hold;
    it bounds the memory of evicted ones. All other decisions use the held entries.
    """

    def insert(self, entries: Sequence[Evictable]) -> None:
        """Add entries that may be evicted from now on, head of the chain first.

        New entries; or ones that were held before, when the obstacle to their eviction (a lease found at
        `pop`, or the reason of a `discard`) is gone: these continue in their queue, as its
        youngest. Inserting a held entry is an AssertionError.
        """

    def put_back(self, entries: Sequence[Evictable]) -> None:
        """Entries from `pop` that could not go, and may now: the next victims again, the last of them first.

        They were not read meanwhile, and the policy learns nothing. Held entries are an AssertionError.
        """

    def touch(self, entries: Sequence[Evictable]) -> None:
        """They were read, head of the chain first. An entry that is not held records the read."""

    def refresh(self, entries: Sequence[Evictable]) -> None:
        """Requeue as the youngest of their queues, head first, without counting a read.

        For the ancestors of new entries. Entries that are not held are ignored.
        """

    def discard(self, entries: Sequence[Evictable]) -> None:
        """They left otherwise (removed, pinned, leased): no ghosts. Entries that are not held are ignored."""

    def pop(self) -> Evictable | None:
        """The next victim, no longer held; its ident is remembered. None if nothing is held."""

    def take(self, n: int) -> Sequence[Evictable]:
        """The next n victims at once: those of n calls of `pop`, in about that order."""

    def peek(self) -> Evictable | None:
        """The entry that `pop` would return, still held."""

    def coldest(self, n: int) -> list[Evictable]:
        """The next n victims, still held: those of n calls of `pop`, in that order. O(n)."""

    def resize(self, capacity: int) -> None:
        """The tier now holds this many entries. Evicts nothing; ghosts shrink with later pops."""

    def succeed(self, other: EvictionPolicy) -> None:
        """Entries that `other`, one of the same kind, holds or has known will come here, and be as old as they were there.

        To be called of a fresh policy.
        """

    def __len__(self) -> int: ...


NewQueue = Callable[[], EntryQueue]
"""A policy makes its queues by this. They are of one kind, the kind of its entries."""


class MakePolicy(Protocol):
    """A fresh policy for a tier of so many entries."""

    def __call__(self, capacity: int, new_queue: NewQueue = ..., /) -> EvictionPolicy: ...


def make_policy(
    name: str, capacity: int, costs: Costs | None = None, new_queue: NewQueue = EvictionQueue
) -> EvictionPolicy:
    """The policy called `name`, for a tier of `capacity` entries. Raises `ConfigError`.

    Without costs all blocks are worth the same. `lru` ignores them.
    """
    if name not in POLICIES:
        known = ", ".join(sorted(POLICIES))
        raise ConfigError(f"there is no eviction policy {name!r}; known are {known}")
    return POLICIES[name](capacity, costs, new_queue)


def policy_maker(name: str, costs: Costs | None = None) -> MakePolicy:
    """`make_policy` for capacities, and kinds of queues, that come later."""

    def make(capacity: int, new_queue: NewQueue = EvictionQueue, /) -> EvictionPolicy:
        return make_policy(name, capacity, costs, new_queue)

    return make


def _checked(capacity: int) -> int:
    if capacity < 1:
        raise ConfigError(f"an eviction policy needs a capacity of at least 1, not {capacity}")
    return capacity


def _held_already(entry: Evictable) -> AssertionError:
    return AssertionError(f"the eviction policy already holds {entry.ident!r}")


class Lru:
    """Least recently used: the baseline. It does not use `freq`."""

    __slots__ = ("_queue",)

    def __init__(
        self, capacity: int, costs: Costs | None = None, new_queue: NewQueue = EvictionQueue
    ) -> None:
        _checked(capacity)
        self._queue = new_queue()

    def insert(self, entries: Sequence[Any]) -> None:
        for entry in entries:
            if entry.queue:
                raise _held_already(entry)
            entry.queue = 1
        self._queue.append(entries[::-1])

    def put_back(self, entries: Sequence[Any]) -> None:
        for entry in entries:
            if entry.queue:
                raise _held_already(entry)
            entry.queue = 1
            self._queue.put_first(entry)

    def touch(self, entries: Sequence[Any]) -> None:
        self._queue.renew([entry for entry in reversed(entries) if entry.queue])

    refresh = touch

    def discard(self, entries: Sequence[Any]) -> None:
        held = [entry for entry in entries if entry.queue]
        self._queue.remove(held)
        for entry in held:
            entry.queue = 0

    def pop(self) -> Any:
        entry = self._queue.pop()
        if entry is not None:
            entry.queue = 0
        return entry

    def take(self, n: int) -> list[Any]:
        entries = self._queue.take(n)
        for entry in entries:
            entry.queue = 0
        return entries

    def peek(self) -> Any:
        return self._queue.peek()

    def coldest(self, n: int) -> list[Any]:
        return self._queue.oldest(n)

    def resize(self, capacity: int) -> None:
        _checked(capacity)

    def succeed(self, other: EvictionPolicy) -> None:
        """See the protocol: entries know nothing."""

    def __len__(self) -> int:
        return self._queue.length


class Aged:
    """The oldest goes, and what was read again ages more slowly; how much more, a trial on a sample of the blocks finds.

    An entry that came back after its eviction, or was read, has *level* 1, and 2 after another read; reads that follow
    one another closely count as one (`CORRELATED`). Each level is an LRU queue. The next victim is the one of the three
    oldest whose age, divided by a number for its level, is the greatest. There are four rungs of such numbers: LRU
    (all 1); levels 1 and 2 age half as fast; they go only when level 0 is empty; level 2 goes as rarely as in LFU.

    A *trial* replays a sample of all reads and puts on every rung (`eviction_miniature`), and counts the seconds that
    hits saved there: recomputing a block far down a chain takes longer, unless the tier below has it (`Costs`). The
    policy begins as LRU and moves by one rung when another has been ahead for too long to be chance. So where sessions
    go on it stays LRU, and where most blocks are used once they soon leave those alone that are used again.

    `freq` is the time of the last access (in accesses, modulo 2^37: whoever rests longer than that looks young), a bit
    for a sampled entry, and the level; it outlives a lease. Order along chains: a read of a tail reads its head too,
    and a head has at least its tail's level. Of equal ages level 0 goes first.
    """

    __slots__ = (
        "_clock",
        "_costs",
        "_divisors",
        "_ghosts",
        "_places",
        "_queues",
        "_shift",
        "_trial",
    )

    _LEVEL, _SAMPLED, _CLOCK_AT = 3, 4, 3  # in `freq`
    _CLOCK = (1 << 37) - 1

    def __init__(
        self, capacity: int, costs: Costs | None = None, new_queue: NewQueue = EvictionQueue
    ) -> None:
        self._costs = costs
        self._queues = tuple(new_queue() for _ in range(LEVELS))
        self._trial = Trial()
        self._divisors = RUNGS[self._trial.rung]
        self._clock = 0  # accesses
        self._shift = 0
        self._ghosts = Ghosts(1)
        self.resize(capacity)

    def resize(self, capacity: int) -> None:
        self._ghosts.resize(min(GHOSTS_PER_PLACE * _checked(capacity), GHOSTS_MAX))
        self._places = capacity
        shift = max(_SHIFT_MIN, (capacity // _SAMPLE).bit_length() - 1)
        if shift != self._shift:
            self._shift = shift
            self._trial = Trial(self._trial.rung)

    def succeed(self, other: EvictionPolicy) -> None:
        assert isinstance(other, Aged)
        self._clock = other._clock

    def insert(self, entries: Sequence[Any]) -> None:
        self._clock += len(entries)
        now = (self._clock & self._CLOCK) << self._CLOCK_AT
        others = (1 << self._shift) - 1
        newest_last = entries[::-1]
        idents = [entry.ident for entry in newest_last]
        ghosts = self._ghosts.take(idents)
        sampled: list[Any] = []
        levels: tuple[list[Any], ...] = ([], [], [])
        lowest = 0
        for entry, ident in zip(newest_last, idents, strict=True):
            if entry.queue:
                raise _held_already(entry)
            freq = entry.freq
            if not freq:
                if not ident & others:
                    freq = self._SAMPLED
                    sampled.append(entry)
                if ghosts and ident in ghosts:
                    freq |= 1
            level = freq & 3
            lowest = max(lowest, level)
            entry.freq = now | freq & 4 | lowest
            entry.queue = lowest + 1
            levels[lowest].append(entry)
        for queue, some in zip(self._queues, levels, strict=True):
            if some:
                queue.append(some)
        if sampled:
            self._try(sampled, [True] * len(sampled))

    def put_back(self, entries: Sequence[Any]) -> None:
        oldest = (queue.peek() for queue in self._queues)
        age = max((self._age(entry) for entry in oldest if entry is not None), default=0)
        for entry in entries:
            if entry.queue:
                raise _held_already(entry)
            self._ghosts.take([entry.ident])
            # One that was no victim of this policy may be younger than others: it is as old as the oldest now.
            age = max(age, self._age(entry))
            entry.freq = ((self._clock - age) & self._CLOCK) << self._CLOCK_AT | entry.freq & 7
            level = entry.freq & self._LEVEL
            entry.queue = level + 1
            self._queues[level].put_first(entry)

    def _age(self, entry: Any) -> int:
        """Accesses since its last one."""
        return int(self._clock - (entry.freq >> self._CLOCK_AT) & self._CLOCK)

    def touch(self, entries: Sequence[Any]) -> None:
        none, once, often = self._queues
        window = CORRELATED * (none.length + once.length + often.length)
        before, clock = self._clock, self._CLOCK
        self._clock += len(entries)
        now = (self._clock & clock) << self._CLOCK_AT
        sampled: list[Any] = []
        levels: tuple[list[Any], ...] = ([], [], [])
        anew: list[bool] = []  # of those
        risen: dict[tuple[int, int], int] = {}
        lowest, known, settled = 0, -1, False
        fresh, queue, add = 0, 1, levels[0].append
        for entry in reversed(entries):
            freq = entry.freq
            if freq != known:  # neighbours are mostly put and read together
                if not freq:
                    continue
                known = freq
                level = freq & 3
                settled = (before - (freq >> 3) & clock) > window
                if level < 2 and settled:
                    level += 1
                lowest = max(lowest, level)
                fresh, queue, add = now | freq & 4 | lowest, lowest + 1, levels[lowest].append
            entry.freq = fresh
            if held := entry.queue:
                if held != queue:
                    entry.queue = queue
                    risen[held, queue] = risen.get((held, queue), 0) + 1
                add(entry)
            if freq & 4:
                sampled.append(entry)
                anew.append(settled)
        for (left, entered), count in risen.items():
            self._queues[left - 1].give(self._queues[entered - 1], count)
        for each, some in zip(self._queues, levels, strict=True):
            if some:
                each.renew(some)
        if sampled:
            self._try(sampled, anew)

    def _try(self, sampled: list[Any], anew: list[bool]) -> None:
        """They were read or put, a tail first. anew: not right after their last access, so that a hit saves something."""
        others = (1 << self._shift) - 1  # maybe more of them than when an entry was put
        idents: list[int] = []
        lost_s: list[float] = []
        for entry, counts in zip(sampled, anew, strict=True):
            ident = entry.ident
            if not ident & others:
                idents.append(ident)
                cost_s = 1.0 if self._costs is None else self._costs.lost_s(entry.depth)
                lost_s.append(cost_s if counts else 0.0)
        if idents:
            self._trial.replay((idents, lost_s), max(1, self._places >> self._shift))
            self._divisors = RUNGS[self._trial.rung]

    def refresh(self, entries: Sequence[Any]) -> None:
        self._clock += 1  # so that they are younger than their children
        now = (self._clock & self._CLOCK) << self._CLOCK_AT
        levels: tuple[list[Any], ...] = ([], [], [])
        for entry in reversed(entries):
            if entry.queue:
                entry.freq = now | entry.freq & 7
                levels[entry.queue - 1].append(entry)
        for queue, some in zip(self._queues, levels, strict=True):
            queue.renew(some)

    def discard(self, entries: Sequence[Any]) -> None:
        levels: tuple[list[Any], ...] = ([], [], [], [])
        for entry in entries:
            levels[entry.queue].append(entry)
            entry.queue = 0
        for queue, some in zip(self._queues, levels[1:], strict=True):
            if some:
                queue.remove(some)

    def _slowed(self, entry: Any) -> float:
        """Its age, as it is compared."""
        freq = entry.freq
        age: int = self._clock - (freq >> self._CLOCK_AT) & self._CLOCK
        slowed: float = age / self._divisors[freq & self._LEVEL]
        return slowed

    def _next_queue(self) -> int:
        """The queue that the next victim is the oldest of."""
        found, oldest = 0, -1.0
        for at, queue in enumerate(self._queues):
            if queue.length:
                age = self._slowed(queue.peek())
                if age > oldest:
                    found, oldest = at, age
        return found

    def pop(self) -> Any:
        for entry in self.take(1):
            return entry
        return None

    def take(self, n: int) -> list[Any]:
        victims: list[Any] = []
        held = len(self)
        if not held:
            return victims
        self._places = held
        while len(victims) < min(n, held):
            at = self._next_queue()
            victims += self._queues[at].take(self._run(at, n - len(victims)))
        for entry in victims:
            entry.queue = 0
        self._ghosts.remember([entry.ident for entry in victims])
        return victims

    def _run(self, at: int, n: int) -> int:
        """How many of the n oldest of this queue go before the others' oldest. The first does."""
        rival = -1.0
        for other, queue in enumerate(self._queues):
            if other != at and queue.length:
                # Of equal ages the lower level goes.
                rival = max(rival, self._slowed(queue.peek()) + (1e-9 if other < at else 0))
        if n == 1 or rival < 0:
            return n
        oldest = self._queues[at].oldest(n)
        if self._slowed(oldest[-1]) >= rival:
            return n
        return max(1, bisect_right(oldest, -rival, key=lambda entry: -self._slowed(entry)))

    def peek(self) -> Any:
        return self._queues[self._next_queue()].peek()

    def coldest(self, n: int) -> list[Any]:
        oldest = [queue.oldest(n) for queue in self._queues]
        return list(islice(merge(*oldest, key=lambda entry: -self._slowed(entry)), n))

    def __len__(self) -> int:
        none, once, often = self._queues
        return none.length + once.length + often.length


POLICIES: dict[str, Callable[[int, Costs | None, NewQueue], EvictionPolicy]] = {
    "aged": Aged,
    "lru": Lru,
}
"""Every policy by the name that configuration uses."""

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

Names for the configuration: `a2q` (`DEFAULT_POLICY`), `lru`, `s3fifo`; see `bench/eviction.py`.

Nothing here is thread-safe; the process that decides has one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from kvpool.errors import ConfigError
from kvpool.storage.eviction_queue import EntryQueue, EvictionQueue, Ghosts

DEFAULT_POLICY = "a2q"

GHOSTS_MAX = 1 << 20
"""Idents that one policy remembers at most, whatever its capacity: 18 bytes each."""


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
        """The entry that `pop` would return, still held. In `S3Fifo` only the first candidate."""

    def coldest(self, n: int) -> list[Evictable]:
        """The next n victims, still held: those of n calls of `pop`, in that order. O(n).

        In `S3Fifo` about: those that it has yet to find among the n oldest of each queue.
        """

    def resize(self, capacity: int) -> None:
        """The tier now holds this many entries. Evicts nothing; ghosts shrink with later pops."""

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

    Without costs all blocks are worth the same. `lru` and `s3fifo` ignore costs.
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

    def __len__(self) -> int:
        return self._queue.length


class S3Fifo:
    """S3-FIFO (SOSP'23): a small queue for newcomers, a main one for entries that were read or came back.

    Small has a tenth of the held entries, and reads count to 3. The ghosts are as many as the tier has
    places; only main's places, as in the paper, lose up to half a point on the conversation trace.

    Both queues are FIFOs, so `touch` is the cheapest of all policies. In return a pop first moves
    the entries that were read; earlier touches have paid for that, but one pop after many touches
    can take long. Queues are scanned from their old end, tails of batches first; yet a head can go
    before a tail that was read as often, when the two are in different queues.

    `freq` is the count in its lowest two bits, with _IN_MAIN for an entry of main, so that a lease
    does not send it back, and _KNOWN for one that was held before, whose ghost proves nothing.
    """

    __slots__ = ("_evicted", "_ghosts", "_ghosts_max", "_main", "_small")

    _READS, _IN_MAIN, _KNOWN = 3, 4, 8
    _SMALL_SHARE = 0.1
    _SMALL, _MAIN = 1, 2

    def __init__(
        self, capacity: int, costs: Costs | None = None, new_queue: NewQueue = EvictionQueue
    ) -> None:
        self._small = new_queue()
        self._main = new_queue()
        self._evicted = 0  # from small: their numbers
        self._ghosts_max = min(GHOSTS_MAX, _checked(capacity))
        self._ghosts = Ghosts(self._ghosts_max)

    def resize(self, capacity: int) -> None:
        self._ghosts_max = min(GHOSTS_MAX, _checked(capacity))
        self._ghosts.resize(self._ghosts_max)

    def insert(self, entries: Sequence[Any]) -> None:
        small: list[Any] = []
        main: list[Any] = []
        forgotten = self._evicted - self._ghosts_max
        newest_last = entries[::-1]
        ghosts = self._ghosts.take([entry.ident for entry in newest_last])
        for position, entry in enumerate(newest_last):
            if entry.queue:
                raise _held_already(entry)
            if not entry.freq & self._KNOWN:
                came_back = position in ghosts and ghosts[position][1] > forgotten
                entry.freq = self._KNOWN | self._IN_MAIN if came_back else self._KNOWN
            if entry.freq & self._IN_MAIN:
                main.append(entry)
                entry.queue = self._MAIN
            else:
                small.append(entry)
                entry.queue = self._SMALL
        self._small.append(small)
        self._main.append(main)

    def put_back(self, entries: Sequence[Any]) -> None:
        for entry in entries:
            if entry.queue:
                raise _held_already(entry)
            self._ghosts.take([entry.ident])
            entry.queue = self._MAIN if entry.freq & self._IN_MAIN else self._SMALL
            (self._main if entry.queue == self._MAIN else self._small).put_first(entry)

    def touch(self, entries: Sequence[Any]) -> None:
        for entry in entries:
            if entry.freq & 3 != 3:  # _READS, inlined: this is the hottest line
                entry.freq += 1

    def refresh(self, entries: Sequence[Any]) -> None:
        found = entries[::-1]
        self._small.renew([entry for entry in found if entry.queue == self._SMALL])
        self._main.renew([entry for entry in found if entry.queue == self._MAIN])

    def discard(self, entries: Sequence[Any]) -> None:
        self._small.remove([entry for entry in entries if entry.queue == self._SMALL])
        self._main.remove([entry for entry in entries if entry.queue == self._MAIN])
        for entry in entries:
            entry.queue = 0

    def _from_small(self) -> bool:
        small = self._small.length
        return small > self._SMALL_SHARE * (small + self._main.length)

    def pop(self) -> Any:
        small, main = self._small, self._main
        while self._from_small():
            entry = small.pop()
            if entry.freq & self._READS:
                main.append([entry])
                entry.freq = self._KNOWN | self._IN_MAIN
                entry.queue = self._MAIN
            else:
                entry.queue = 0
                self._evicted += 1
                self._ghosts.remember([entry.ident], 0, self._evicted)
                return entry
        while main:
            entry = main.pop()
            if entry.freq & self._READS:
                entry.freq -= 1
                main.append([entry])
            else:
                entry.queue = 0
                return entry
        return None

    def take(self, n: int) -> list[Any]:
        return list(islice(iter(self.pop, None), n))

    def peek(self) -> Any:
        """The entry that `pop` examines first; it is spared if it was read since."""
        return (self._small if self._from_small() else self._main).peek()

    def coldest(self, n: int) -> list[Any]:
        """As `pop` would find them; then those that it would spare, and those behind them."""
        small, main = self._small.oldest(n), self._main.oldest(n)
        small.reverse()
        main.reverse()
        in_small, in_main = self._small.length, self._main.length
        found: list[Any] = []
        spared: list[Any] = []
        while len(found) < n:
            if in_small > self._SMALL_SHARE * (in_small + in_main):
                if not small:
                    break
                entry = small.pop()
                in_small -= 1
                if entry.freq & self._READS:
                    in_main += 1
                    spared.append(entry)
                    continue
            else:
                if not main:
                    break
                entry = main.pop()
                if entry.freq & self._READS:
                    spared.append(entry)
                    continue
                in_main -= 1
            found.append(entry)
        return (found + spared + small[::-1] + main[::-1])[:n]

    def __len__(self) -> int:
        return self._small.length + self._main.length


class Adaptive2Q:
    """2Q with LRU queues, long ghost lists, and a share between the queues that follows the load.

    A newcomer starts on *probation*. It is *proven* by a read, or by coming back after its eviction
    (its ident is among the ghosts). Each queue is an LRU; the victim is the oldest on probation
    while these are more than their share of what is held, else the oldest proven one. So a stream
    of blocks that are used once passes through probation and leaves the proven ones alone.

    *The share.* A comeback soon after an eviction from probation means that probation was too
    short, so its share grows; soon after an eviction of a proven entry, it shrinks. "Soon" is less
    than a fifth of what is held ago, in evictions of that queue: what a somewhat longer queue would
    have kept. (ARC, which counts its whole ghost lists, gets the direction wrong on KV traces.) It
    starts in the middle: with few evictions there is nothing to learn from, and near LRU is best.

    *What it costs.* How far a comeback moves the share goes by the seconds that the eviction has
    lost (`Costs`), in proportion to those of a first block: recomputing a block far down a chain
    takes longer, unless the tier below has it. A comeback that lost nothing moves nothing.

    *Ghosts* of probation reach back three capacities: most second uses of a KV block come later
    than one capacity, and a small tier lives on recognising them.

    *Reads that prove nothing.* A decode node pulls each block once, right after a prefill put it. A
    read before a tenth of what is held was inserted after the entry is taken as part of the same
    request: the entry becomes the youngest again but stays on probation. Without this rule such
    pulls prove everything, and 2Q, like S3-FIFO, falls back to plain LRU.

    `freq` is _PROVEN, or the number of the insertion batch; both outlive a lease. Every operation
    is O(1) in the worst case, not only amortised, dictionary growth apart. Order along chains: a
    read of a tail reads its head too, so in each queue heads stay younger, and a tail is not proven
    without its head; a proven head may only go before a tail on probation that is younger than
    everything else there.
    """

    __slots__ = (
        "_costs",
        "_ghosts",
        "_inserted",
        "_probation",
        "_probation_evicted",
        "_probation_ghosts_max",
        "_proven",
        "_proven_evicted",
        "_proven_ghosts_max",
        "_share",
    )

    # The step was chosen on the first half of the conversation trace, by the mean over nine sizes
    # from 1 k to 40 k blocks. Steps of 4 to 10 are within 0.3 % of one another there, and 0.7 % on
    # the second half; single sizes vary by up to 4 %. 3 is 0.8 % worse on the first half.
    _START = 0.5
    _LOWEST, _HIGHEST = 0.02, 0.9
    _SOON = 0.2
    _STEP, _STEP_MAX = 4, 0.05  # entries a comeback; as a share, which matters when few are held
    _CORRELATED = 0.1

    _PROVEN = -1
    _ON_PROBATION, _AMONG_PROVEN = 1, 2

    def __init__(
        self, capacity: int, costs: Costs | None = None, new_queue: NewQueue = EvictionQueue
    ) -> None:
        self._costs = costs
        self._probation = new_queue()
        self._proven = new_queue()
        # Evictions are numbered from 1, so that 0 can mean "no ghost".
        self._inserted = self._probation_evicted = self._proven_evicted = 0
        self._share = self._START
        self._probation_ghosts_max = self._proven_ghosts_max = 0
        self._ghosts = Ghosts(1)
        self.resize(capacity)

    def resize(self, capacity: int) -> None:
        self._probation_ghosts_max = min(3 * _checked(capacity), GHOSTS_MAX * 3 // 4)
        self._proven_ghosts_max = min(capacity, GHOSTS_MAX // 4)
        self._ghosts.resize(self._probation_ghosts_max + self._proven_ghosts_max)

    def insert(self, entries: Sequence[Any]) -> None:
        on_probation: list[Any] = []
        proven: list[Any] = []
        held = self._probation.length + self._proven.length
        self._inserted += len(entries)
        newest_last = entries[::-1]
        ghosts = self._ghosts.take([entry.ident for entry in newest_last])
        for position, entry in enumerate(newest_last):
            if entry.queue:
                raise _held_already(entry)
            if not entry.freq:
                entry.freq = self._inserted
                if position in ghosts and self._came_back(entry, ghosts[position], held + position):
                    entry.freq = self._PROVEN
            if entry.freq == self._PROVEN:
                proven.append(entry)
                entry.queue = self._AMONG_PROVEN
            else:
                on_probation.append(entry)
                entry.queue = self._ON_PROBATION
        self._probation.append(on_probation)
        if proven:
            self._proven.append(proven)

    def _came_back(self, entry: Any, ghost: tuple[int, int], held: int) -> bool:
        """Whether an entry with this ghost counts as one that came back."""
        among_proven, number = ghost
        if among_proven:
            since, most, direction = self._proven_evicted - number, self._proven_ghosts_max, -1
        else:
            since, most, direction = self._probation_evicted - number, self._probation_ghosts_max, 1
        if since >= most:
            return False
        self._learn(since, direction, entry, held)
        return True

    def put_back(self, entries: Sequence[Any]) -> None:
        for entry in entries:
            if entry.queue:
                raise _held_already(entry)
            self._ghosts.take([entry.ident])
            if entry.freq == self._PROVEN:
                entry.queue = self._AMONG_PROVEN
                self._proven.put_first(entry)
            else:
                entry.queue = self._ON_PROBATION
                self._probation.put_first(entry)

    def _learn(self, evictions_since: int, direction: int, entry: Any, held: int) -> None:
        """An entry came back: would a little more room for its queue have kept it?"""
        if held and evictions_since < self._SOON * held:
            step = min(self._STEP * self._weight(entry) / held, self._STEP_MAX)
            share = self._share + direction * step
            self._share = min(max(share, self._LOWEST), self._HIGHEST)

    def _weight(self, entry: Any) -> float:
        """The cost of its eviction, in units of a first block."""
        if self._costs is None:
            return 1.0
        unit = self._costs.lost_s(0)
        lost = self._costs.lost_s(entry.depth)
        # If first blocks are recomputed as fast as they are loaded, there is no such unit.
        return lost / unit if unit else float(lost > 0)

    def touch(self, entries: Sequence[Any]) -> None:
        # Insertions up to here are too recent for a read to prove anything.
        settled = self._inserted - self._CORRELATED * (self._probation.length + self._proven.length)
        on_probation: list[Any] = []
        proven: list[Any] = []
        newly = 0
        for entry in reversed(entries):
            queue = entry.queue
            if queue == 2:  # _AMONG_PROVEN, inlined: this is the hottest line
                proven.append(entry)
            elif queue:
                if entry.freq < settled:
                    entry.queue = self._AMONG_PROVEN
                    entry.freq = self._PROVEN
                    proven.append(entry)
                    newly += 1
                else:
                    on_probation.append(entry)
            elif 0 < entry.freq < settled:
                entry.freq = self._PROVEN
        if newly:
            self._probation.give(self._proven, newly)
        self._proven.renew(proven)
        self._probation.renew(on_probation)

    def refresh(self, entries: Sequence[Any]) -> None:
        found = entries[::-1]
        self._proven.renew([entry for entry in found if entry.queue == self._AMONG_PROVEN])
        self._probation.renew([entry for entry in found if entry.queue == self._ON_PROBATION])

    def discard(self, entries: Sequence[Any]) -> None:
        # A class's names take time here, and a slab has thousands.
        on_probation, among_proven = self._ON_PROBATION, self._AMONG_PROVEN
        self._probation.remove([entry for entry in entries if entry.queue == on_probation])
        self._proven.remove([entry for entry in entries if entry.queue == among_proven])
        for entry in entries:
            entry.queue = 0

    def _from_probation(self) -> bool:
        probation = self._probation.length
        return probation > self._share * (probation + self._proven.length)

    def _next_queues(self, n: int) -> list[bool]:
        """For each of the next n victims, whether it leaves probation. As `_from_probation`, n times."""
        probation, share = self._probation.length, self._share
        most = probation + self._proven.length
        order = []
        for held in range(most, max(0, most - n), -1):
            from_probation = probation > share * held
            probation -= from_probation
            order.append(from_probation)
        return order

    def pop(self) -> Any:
        if self._from_probation():
            entry = self._probation.pop()
            self._probation_evicted += 1
            self._ghosts.remember([entry.ident], 0, self._probation_evicted)
        elif self._proven.length:
            entry = self._proven.pop()
            self._proven_evicted += 1
            self._ghosts.remember([entry.ident], 1, self._proven_evicted)
        else:
            return None
        entry.queue = 0
        return entry

    def take(self, n: int) -> list[Any]:
        if n == 1:  # a put of one block, and faster
            entry = self.pop()
            return [] if entry is None else [entry]
        order = self._next_queues(n)
        newcomers = sum(order)
        on_probation = self._probation.take(newcomers)
        among_proven = self._proven.take(len(order) - newcomers)
        ghosts = self._ghosts
        if on_probation:
            first = self._probation_evicted + 1
            ghosts.remember([entry.ident for entry in on_probation], 0, first)
            self._probation_evicted += len(on_probation)
        if among_proven:
            first = self._proven_evicted + 1
            ghosts.remember([entry.ident for entry in among_proven], 1, first)
            self._proven_evicted += len(among_proven)
        victims = on_probation + among_proven
        for entry in victims:
            entry.queue = 0
        return victims

    def peek(self) -> Any:
        return (self._probation if self._from_probation() else self._proven).peek()

    def coldest(self, n: int) -> list[Any]:
        order = self._next_queues(n)
        newcomers = sum(order)
        on_probation = iter(self._probation.oldest(newcomers))
        among_proven = iter(self._proven.oldest(len(order) - newcomers))
        return [next(on_probation if newcomer else among_proven) for newcomer in order]

    def __len__(self) -> int:
        return self._probation.length + self._proven.length


POLICIES: dict[str, Callable[[int, Costs | None, NewQueue], EvictionPolicy]] = {
    "a2q": Adaptive2Q,
    "lru": Lru,
    "s3fifo": S3Fifo,
}
"""Every policy by the name that configuration uses."""

"""Who holds which prefix: engines' own caches, and the pool's tiers on each node. No I/O, no clock.

Holders are named by the caller, as `gpu:engine-3` or `dram:node-1`. Each has a bit, and a key maps to
the bits of its holders, so that one walk along a chain finds the longest prefix of every holder
at once: `alive &= mask`, and a holder that drops out has its length. That is O(blocks + holders), whatever the
size of the index: 750 blocks take about 0.1 ms.

A holder's blocks are of one namespace, and are of use only to engines of that one: so what the pool could deliver
is answered for each namespace. Keys are the same in all of them.

Blocks sent to an engine are *expected* there until its events report them: `expect` covers the gap, and
gives the time at which the blocks will be ready, for requests that would rather wait than compute them again.

All of it is a hint. Not thread-safe.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import repeat
from typing import NamedTuple

EXPECTED_MAX = 1 << 20
"""The most expected blocks at a time, except for one call's; the first to expire are dropped."""
FORGET_BATCH = 4096
"""Keys of a removed holder that each change of the index forgets."""
EXPIRE_BATCH = 1024
"""Expired keys that each match forgets; a few more at most."""


@dataclass(eq=False, repr=False, slots=True)
class _Expected:
    """Blocks that an engine is computing. Each set is one object, however long a prompt is.

    bit, namespace: of the engine's cache. ready: when each is there, estimated. until: ignored from then on.
    tier: bit of the tier that holds them for certain, once the engine has answered. later: not ordered
    yet, so they do not count as the engine's; but requests may wait for them. shared: they
    will be in the pool, too. marks: bits of the holders that they count for.
    """

    bit: int
    namespace: str
    keys: Sequence[Hashable]
    ready: Sequence[float]
    until: float
    later: bool
    shared: bool
    tier: int = field(default=0, init=False)
    marks: int = field(init=False)

    def __post_init__(self) -> None:
        self.marks = 0 if self.later else self.bit

    def arrived(self, tier: int) -> None:
        self.tier = tier
        self.marks = tier if self.later else self.bit | tier

    def part(self, keys: Sequence[Hashable]) -> _Expected:
        """A subset of them."""
        at = {key: position for position, key in enumerate(self.keys)}
        ready = [self.ready[at[key]] for key in keys]
        how = {"later": self.later, "shared": self.shared}
        part = _Expected(self.bit, self.namespace, keys, ready, self.until, **how)
        part.arrived(self.tier)
        return part


class Reach(NamedTuple):
    """How much of a prefix the pool could deliver, each block from any node. coming: the same once the blocks being
    computed are there, and `ready_at` when that is.
    """

    reach: int = 0
    coming: int = 0
    ready_at: float = -math.inf


_NOTHING = Reach()


class Match(NamedTuple):
    """What is known of one prompt's prefix, in blocks.

    lengths: of each holder that has any; for engines, including expected blocks. namespaces: those in which anything
    can be delivered, or will be.
    """

    lengths: dict[str, int]
    namespaces: dict[str, Reach]

    def of(self, namespace: str) -> Reach:
        """What engines of this namespace could be delivered."""
        return self.namespaces.get(namespace, _NOTHING)

    @property
    def widest(self) -> str:
        """The namespace in which the pool could deliver most; the one without a name if nothing."""
        return max(self.namespaces, key=lambda name: self.namespaces[name].reach, default="")

    @property
    def most(self) -> int:
        """The longest part that some engine need not compute."""
        return max(self.of(self.widest).reach, *self.lengths.values(), 0)


class _Holder:
    __slots__ = ("bit", "expected", "keys", "name", "namespace")

    def __init__(self, name: str, bit: int, namespace: str) -> None:
        self.name = name
        self.bit = bit
        self.namespace = namespace
        self.keys: set[Hashable] = set()
        self.expected: set[_Expected] = set()  # in this engine's cache, or in this tier


class PrefixIndex:
    """About 250 bytes a key and holder."""

    def __init__(self) -> None:
        self._masks: dict[Hashable, int] = {}
        self._expected: dict[str, dict[Hashable, _Expected]] = {}  # by namespace
        self._expiries: list[tuple[float, int, _Expected]] = []
        self._expiring = 0  # keys in all of these, counted once per set
        self._calls = 0
        self._holders: dict[str, _Holder] = {}
        self._by_bit: dict[int, _Holder] = {}
        self._live = 0  # bits of all holders
        self._pools: dict[str, int] = {}  # by namespace: bits of holders that others can pull from
        self._gone: list[
            _Holder
        ] = []  # their bits are reused only after all their keys are forgotten
        self._free_bits: list[int] = []

    def __len__(self) -> int:
        """How many keys have a holder."""
        return len(self._masks)

    def join(self, name: str, *, pool: bool, namespace: str = "") -> None:
        """Add an empty holder. pool: others can pull from it; an engine's cache is its own.

        An existing holder starts anew: everything that it held is gone at once.
        """
        self.leave(name)
        bit = self._free_bits.pop() if self._free_bits else len(self._by_bit)
        holder = _Holder(name, 1 << bit, namespace)
        self._holders[name] = self._by_bit[holder.bit] = holder
        self._live |= holder.bit
        if pool:
            self._pools[namespace] = self._pools.get(namespace, 0) | holder.bit

    def leave(self, name: str) -> None:
        """Remove a holder. Its keys no longer count, and are forgotten gradually."""
        holder = self._holders.pop(name, None)
        if holder is None:
            return
        self._live &= ~holder.bit
        if pools := self._pools.pop(holder.namespace, 0) & ~holder.bit:
            self._pools[holder.namespace] = pools
        self._gone.append(holder)
        for expected in list(holder.expected):
            self._end(expected)  # blocks sent to it will not come

    def add(self, name: str, keys: Iterable[Hashable]) -> None:
        """The holder has these."""
        self._forget_some()
        holder = self._holders[name]
        bit, masks = holder.bit, self._masks
        get = masks.get
        for key in keys:
            masks[key] = get(key, 0) | bit
            holder.keys.add(key)

    def discard(self, name: str, keys: Iterable[Hashable]) -> None:
        """The holder no longer has these. Unknown ones are ignored."""
        self._forget_some()
        self._drop(self._holders[name], keys)

    def expect(
        self,
        name: str,
        keys: Sequence[Hashable],
        ready: Sequence[float],
        until: float,
        *,
        later: bool = False,
        shared: bool = True,
    ) -> None:
        """The engine with this cache was sent these, and will have each of them at its time.

        later: they will be ordered after the blocks before them are computed. shared: whether the pool gets
        them, too; otherwise nobody else can wait for them. Ignored after `until`: by then its events have
        reported them, or it failed. Nothing is expected of an engine that has left.
        """
        holder = self._holders.get(name)
        if holder is None:
            return
        if keys:
            how = {"later": later, "shared": shared}
            self._keep(_Expected(holder.bit, holder.namespace, keys, ready, until, **how))

    def arrived(self, name: str, tier: str, keys: Iterable[Hashable]) -> None:
        """The engine with this cache has answered: its expected blocks are in that tier, too.

        Events report the same later; until then, or until the expectation ends, this counts. If
        either has left meanwhile, it is ignored.
        """
        holder, tier_holder = self._holders.get(name), self._holders.get(tier)
        if holder is None or tier_holder is None:
            return
        for part in self._expected_of(holder, keys):
            part.arrived(tier_holder.bit)
            tier_holder.expected.add(part)

    def not_saved(self, name: str, keys: Iterable[Hashable]) -> None:
        """The engine with this cache has answered, and its expected blocks will not be in the pool: they count for its
        cache only. If it has left meanwhile, it is ignored.
        """
        holder = self._holders.get(name)
        if holder is not None:
            for part in self._expected_of(holder, keys):
                part.arrived(0)
                part.shared = False

    def _expected_of(self, holder: _Holder, keys: Iterable[Hashable]) -> list[_Expected]:
        """What this engine is expected to have of these, as expectations of nothing else, in no tier."""
        mine: dict[_Expected, list[Hashable]] = {}
        known = self._expected.get(holder.namespace, {})
        for key in keys:
            found = known.get(key)
            if found in holder.expected:
                mine.setdefault(found, []).append(key)
        parts = []
        for expected, some in mine.items():
            part = expected
            if len(some) < len(expected.keys):
                part = expected.part(some)
                self._keep(part)
            if part.tier:
                self._by_bit[part.tier].expected.discard(part)
            parts.append(part)
        return parts

    def unexpect(self, name: str, keys: Iterable[Hashable]) -> None:
        """They will not come from there. Nothing is expected of an engine that has left anyway."""
        holder = self._holders.get(name)
        if holder is None:
            return
        expected = self._expected.get(holder.namespace, {})
        for key in keys:
            if expected.get(key) in holder.expected:
                del expected[key]

    def match(self, keys: Sequence[Hashable], now: float) -> Match:
        """The longest prefix of every holder. O(blocks + holders that have any)."""
        masks = list(map(self._masks.get, keys, repeat(0)))
        coming = self._add_expected(keys, masks, now) if self._expected else {}
        lengths, reach = self._walk(masks)
        found: dict[str, Reach] = {}
        for namespace, length in reach.items():
            there = Reach(length, length)
            if namespace in coming:
                pools = self._pools.get(namespace, 0)
                there = Reach(length, *_coming(keys, masks, coming[namespace], length, pools))
            if there.coming:
                found[namespace] = there
        return Match(lengths, found)

    def _add_expected(
        self, keys: Sequence[Hashable], masks: list[int], now: float
    ) -> dict[str, list[_Expected | None]]:
        """Of each key, what is expected in each namespace. masks: of its holders; those who will have it are added."""
        self._expire(now)
        coming: dict[str, list[_Expected | None]] = {}
        for namespace, known in self._expected.items():
            coming[namespace] = each = list(map(known.get, keys))
            for position, expected in enumerate(each):
                if expected is not None:
                    if expected.until <= now:
                        each[position] = None
                    else:
                        masks[position] |= expected.marks
        return coming

    def _walk(self, masks: Sequence[int]) -> tuple[dict[str, int], dict[str, int]]:
        """How far each holder has all, and in each namespace its pool as a whole."""
        drops: list[tuple[int, int]] = []
        alive = self._live
        pools = self._pools | dict.fromkeys(self._expected.keys() - self._pools, 0)
        reach: dict[str, int] = {}
        end = len(masks)
        last = -1
        for position, mask in enumerate(masks):
            if mask == last:
                continue  # as most are in a long prefix
            last = mask
            for namespace in [name for name, bits in pools.items() if not mask & bits]:
                del pools[namespace]
                reach[namespace] = position
            still = alive & mask
            if still != alive:
                drops.append((alive ^ still, position))
                alive = still
                if not alive and not pools:
                    end = position
                    break
        drops.append((alive, end))
        reach |= dict.fromkeys(pools, len(masks))
        lengths: dict[str, int] = {}
        for bits, length in drops:
            if length:
                self._name(bits, length, lengths)
        return lengths, reach

    def _name(self, mask: int, length: int, lengths: dict[str, int]) -> None:
        while mask:
            bit = mask & -mask
            lengths[self._by_bit[bit].name] = length
            mask ^= bit

    def _drop(self, holder: _Holder, keys: Iterable[Hashable]) -> None:
        had = [key for key in dict.fromkeys(keys) if key in holder.keys]
        holder.keys.difference_update(had)
        self._unmark(holder.bit, had)

    def _unmark(self, bit: int, keys: Iterable[Hashable]) -> None:
        masks = self._masks
        for key in keys:
            left = masks[key] & ~bit
            if left:
                masks[key] = left
            else:
                del masks[key]

    def _keep(self, expected: _Expected) -> None:
        """Register this expectation for each of these keys."""
        known = self._expected.setdefault(expected.namespace, {})
        known.update(dict.fromkeys(expected.keys, expected))
        self._by_bit[expected.bit].expected.add(expected)
        self._calls += 1
        self._expiring += len(expected.keys)
        heappush(self._expiries, (expected.until, self._calls, expected))
        while self._expiring > EXPECTED_MAX and len(self._expiries) > 1:
            self._forget_first()

    def _expire(self, now: float) -> None:
        """Forget expired expectations, some at a time."""
        budget = EXPIRE_BATCH
        while budget > 0 and self._expiries and self._expiries[0][0] <= now:
            budget -= self._forget_first()

    def _forget_first(self) -> int:
        """Drop the first to expire; returns its number of keys."""
        _, _, first = heappop(self._expiries)
        self._end(first)
        count = len(first.keys)
        self._expiring -= count
        expected = self._expected.get(first.namespace, {})
        for key in first.keys:
            if expected.get(key) is first:
                del expected[key]
        if not expected:
            self._expected.pop(first.namespace, None)
        return count

    def _end(self, expected: _Expected) -> None:
        """Stop counting it."""
        expected.until = -math.inf
        for bit in (expected.bit, expected.tier):
            if bit in self._by_bit:
                self._by_bit[bit].expected.discard(expected)

    def _forget_some(self) -> None:
        budget = FORGET_BATCH
        while self._gone and budget:
            holder = self._gone[-1]
            batch = [holder.keys.pop() for _ in range(min(budget, len(holder.keys)))]
            self._unmark(holder.bit, batch)
            budget -= len(batch)
            if holder.keys:
                return
            self._gone.pop()
            del self._by_bit[holder.bit]
            self._free_bits.append(holder.bit.bit_length() - 1)


def _coming(
    keys: Sequence[Hashable],
    masks: Sequence[int],
    coming: Sequence[_Expected | None],
    reach: int,
    pools: int,
) -> tuple[int, float]:
    """How far a prefix will reach, and when. coming: what is expected of each key in the namespace of these pools."""
    ready_at = -math.inf
    before: _Expected | None = None
    at = 0  # of the key in what is expected with it
    for position in range(reach, len(keys)):
        if masks[position] & pools:
            continue
        found = coming[position]
        if found is None or not found.shared:
            return position, ready_at
        at += 1
        if found is not before or at >= len(found.keys) or found.keys[at] != keys[position]:
            before, at = found, found.keys.index(keys[position])
        ready_at = max(ready_at, found.ready[at])
    return len(keys), ready_at

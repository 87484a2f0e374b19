"""Which blocks have left this node's tiers lately, when, and why: a bounded memory, so that a miss can be explained.

Blocks that leave a tier are reported by one event for all of them, which only appends to a list. From there they
are entered into arrays, some thousands at once: a ring in the order of departure, and for each bucket of identities
the last entry, from which earlier ones of the bucket follow. A departure takes 34 bytes and is forgotten when `most` others
came after it.

No I/O, no clock: `pass_time` tells the time, and departures bear the one that was told last.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.daemon.core.events import Gone, Handlers, TierInfo
from kvpool.daemon.core.idle_age import IdleAge
from kvpool.types import KEY_BYTES

ENTERED_TOGETHER = 4096  # blocks: a fraction of a millisecond
STEPS_MAX = 64  # departures of one bucket that are looked through
CAUSES_MAX = 1 << 15  # of different ones, that are told apart
KINDS_MAX = 1024  # that are at hand
_ODD = 0x9E3779B97F4A7C15
_BITS = (1 << 64) - 1


class Cause(NamedTuple):
    """Why blocks left: `reason` is one of `kvpool.telemetry.misses.Reason`, `tier` that from which they went.

    by: the namespace (its digest, in hex) whose put needed the room; empty: no put did. kept: a disk had them too, by
    then.
    """

    reason: str
    tier: str
    by: str = ""
    kept: bool = False


class Departed(NamedTuple):
    """One departure. at: on the clock of `pass_time`. idle_s: how long it was unused by then."""

    cause: Cause
    at: float
    idle_s: float


class Kind(NamedTuple):
    """What departures have in common. cause: its number."""

    space: int
    cause: int
    ages: IdleAge


class Departures:
    """See the module. Not thread-safe.

    most: how many departures are remembered; 0: none. A space is 64 bits for a tenant's namespace, the same in all its
    epochs and in all tiers. above_disks: blocks of memory may be on disks too.
    """

    def __init__(self, most: int, *, above_disks: bool = False) -> None:
        self.most = most
        self._above_disks = above_disks
        self.handlers: Handlers = {Gone: self._gone} if most else {}
        self._last_kinds: dict[tuple[TierInfo, int, str, str, bool], Kind] = {}
        self.count = 0  # in all
        self._now = self._began = 0.0
        self._bits = max(1, (most - 1).bit_length())
        self._causes: dict[Cause, int] = {}
        self._cause_of: list[Cause] = []
        # What was told and is not entered yet: of each call the kind, the keys, packed, and the tick.
        self._kinds: list[Kind] = []
        self._packed: list[bytes] = []
        self._ticks: list[int] = []
        self._waiting = 0  # blocks
        self._idents: npt.NDArray[np.uint64] = np.zeros(most, dtype=np.uint64)
        self._at: npt.NDArray[np.float32] = np.zeros(most, dtype=np.float32)  # since `began`
        self._idle: npt.NDArray[np.float32] = np.zeros(most, dtype=np.float32)
        self._why: npt.NDArray[np.uint16] = np.zeros(most, dtype=np.uint16)
        # By number of the departure, from 1 on; 0: there was none before it in its bucket.
        self._before: npt.NDArray[np.int64] = np.zeros(most, dtype=np.int64)
        self._last: npt.NDArray[np.int64] = np.zeros(1 << self._bits if most else 0, dtype=np.int64)

    @property
    def nbytes(self) -> int:
        """Of its arrays."""
        arrays = (self._idents, self._at, self._idle, self._why, self._before, self._last)
        return sum(each.nbytes for each in arrays)

    def begin(self, now: float) -> None:
        """The time before any departure."""
        self._now = self._began = now

    def pass_time(self, now: float) -> None:
        """It is this late: those that left since the last call did so now."""
        self._now = max(self._now, now)
        self._enter()

    def _gone(self, event: Gone) -> None:
        """Blocks have left a tier."""
        space, used = event.table.namespace.space, event.blocks[-1].used
        if not (event.evicted and self._above_disks and event.tier.name == "dram"):
            self.add(event.tier, space, event.keys, event.reason, used)
            return
        for kept in (False, True):
            some = [block.key for block in event.blocks if (block.written >= 0) is kept]
            if some:
                self.add(event.tier, space, some, event.reason, used, kept=kept)

    def add(
        self,
        tier: TierInfo,
        space: int,
        keys: Sequence[bytes],
        reason: str,
        used: int,
        *,
        kept: bool = False,
    ) -> None:
        """These blocks have left. used: the tick of the last use of one of them. kept: a disk has them."""
        what = (tier, space, reason, tier.room_for, kept)
        kind = self._last_kinds.get(what)
        if kind is None:
            if len(self._last_kinds) >= KINDS_MAX:
                self._last_kinds.clear()
            number = self._number_of(Cause(reason, tier.name, tier.room_for, kept))
            kind = self._last_kinds[what] = Kind(space, number, tier.ages)
        self._kinds.append(kind)
        self._packed.append(b"".join(keys))  # keys that were kept would be in no cache when they go
        self._ticks.append(used)
        self._waiting += len(keys)
        if self._waiting >= ENTERED_TOGETHER:
            self._enter()

    def find(self, space: int, key: bytes) -> Departed | None:
        """The last departure of this block."""
        if not self.most:
            return None
        self._enter_if(key, (space,))
        ident = _ident(space, key)
        number = int(self._last[self._bucket(ident)])
        for _ in range(STEPS_MAX):
            if not number or number <= self.count - self.most:
                break
            row = number % self.most
            if int(self._idents[row]) == ident:
                return Departed(
                    self._cause_of[self._why[row]],
                    self._began + float(self._at[row]),
                    float(self._idle[row]),
                )
            number = int(self._before[row])
        return None

    def first_of(self, spaces: Sequence[int], key: bytes) -> int:
        """The position of a space in which the block has departed; -1: in none is that known. A departure is found if it
        is the last one in its bucket.
        """
        self._enter_if(key, spaces)
        if not self.count or not spaces:
            return -1
        secrets = np.array([_secret(space) for space in spaces], dtype=np.uint64)
        idents = secrets ^ np.uint64(int.from_bytes(key[8:], "little"))
        buckets = (idents * np.uint64(_ODD)) >> np.uint64(64 - self._bits)
        numbers = self._last[buckets]
        known = (self._idents[numbers % self.most] == idents) & (numbers > self.count - self.most)
        at = int(np.argmax(known & (numbers > 0)))
        return at if known[at] and numbers[at] else -1

    def reach_s(self) -> float | None:
        """For how long nothing was forgotten; None: since the node began."""
        if self.count + self._waiting <= self.most or not self.most:
            return None
        self._enter()
        oldest = (self.count + 1) % self.most
        return max(0.0, self._now - self._began - float(self._at[oldest]))

    # ---- the arrays --------------------------------------------------------------------------------

    def _bucket(self, ident: int) -> int:
        return (ident * _ODD & _BITS) >> (64 - self._bits)

    def _enter_if(self, key: bytes, spaces: Sequence[int]) -> None:
        """Enter what was told if this block of one of these spaces is among it: to look is cheaper."""
        for kind, packed in zip(self._kinds, self._packed, strict=True):
            if key in packed and kind.space in spaces:
                self._enter()
                return

    def _enter(self) -> None:
        if not self._packed:
            return
        kinds, self._kinds = self._kinds, []
        packed, self._packed = self._packed, []
        ticks, self._ticks = np.array(self._ticks), []
        total, self._waiting = self._waiting, 0
        counts = [len(each) // KEY_BYTES for each in packed]
        low = np.frombuffer(b"".join(packed), dtype="<u8")[1::2]
        different = set(kinds)
        if len(different) == 1:
            (only,) = different
            idle = np.repeat(only.ages.each_age_s(ticks, self._now), counts)
            idents = np.bitwise_xor(low, np.uint64(_secret(only.space)))
            why = np.full(total, only.cause, dtype=np.uint16)
        else:
            spaces = np.array([_secret(kind.space) for kind in kinds], dtype=np.uint64)
            idents = np.bitwise_xor(low, np.repeat(spaces, counts))
            why = np.repeat(np.array([kind.cause for kind in kinds], dtype=np.uint16), counts)
            each_idle = np.empty(len(kinds))
            for ages in {kind.ages for kind in different}:
                of_tier = np.array([kind.ages is ages for kind in kinds], dtype=np.bool_)
                each_idle[of_tier] = ages.each_age_s(ticks[of_tier], self._now)
            idle = np.repeat(each_idle, counts)
        for at in range(0, total, self.most):  # where there are fewer places than these
            some = slice(at, at + self.most)
            self._enter_some(idents[some], idle[some], why[some])

    def _enter_some(
        self,
        idents: npt.NDArray[np.uint64],
        idle: npt.NDArray[np.float64],
        why: npt.NDArray[np.uint16],
    ) -> None:
        count, most = len(idents), self.most
        first = (self.count + 1) % most
        until_end = min(count, most - first)
        for rows, some in (
            (slice(first, first + until_end), slice(0, until_end)),
            (slice(0, count - until_end), slice(until_end, count)),
        ):
            self._idents[rows] = idents[some]
            self._at[rows] = self._now - self._began
            self._idle[rows] = idle[some]
            self._why[rows] = why[some]
        numbers = np.arange(self.count + 1, self.count + 1 + count, dtype=np.int64)
        buckets = (idents * np.uint64(_ODD)) >> np.uint64(64 - self._bits)
        before = self._last[buckets]
        self._before[first : first + until_end] = before[:until_end]
        self._before[: count - until_end] = before[until_end:]
        self._last[buckets] = numbers
        # Of those that share a bucket, one is the last; the others follow it.
        last = self._last[buckets]
        for at in np.flatnonzero(last != numbers).tolist():
            head = int(last[at]) % most
            self._before[(first + at) % most] = self._before[head]
            self._before[head] = numbers[at]
        self.count += count

    def _number_of(self, cause: Cause) -> int:
        number = self._causes.get(cause)
        if number is None:
            if len(self._causes) >= CAUSES_MAX and cause.by:
                return self._number_of(cause._replace(by=""))
            number = self._causes[cause] = len(self._cause_of)
            self._cause_of.append(cause)
        return number


def _ident(space: int, key: bytes) -> int:
    return int.from_bytes(key[8:], "little") ^ _secret(space)


@lru_cache(maxsize=4096)
def _secret(space: int) -> int:
    """By Python's hash, which is secret: nobody can make a key that looks like another tenant's."""
    return hash(space.to_bytes(8, "little")) & (1 << 64) - 1

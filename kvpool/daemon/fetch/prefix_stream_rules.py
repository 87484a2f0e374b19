"""A prompt's blocks, pulled while an engine elsewhere still computes them: what is missing, whom to ask, when.

The rules of a follow, without I/O; `prefix_stream.py` asks and fetches. Times are seconds of one monotonic clock.

`Chain` knows what a follow needs of a prompt: of each part what the hit rule asks of the whole chain, and
nothing for shorter prefixes. Each part of a block is

    missing ──told of, by an owner or the directory──▶ coming ──committed here──▶ here, and held
       ▲                                                  │
       └───────────────── nobody could deliver it ────────┘

and what is missing is asked for in a window that begins with the first block that is not here, so that what
is under way at a time is bounded by the window.

`Course` knows whom to ask. One node is asked at a time: whoever told of something new last, else the node
that the client named, else the one that has most of the chain by the directory. A node that tells of nothing
new by the end of its question has proved nothing, so the directory is looked at again; while nobody is
proven or named, it is looked at in pauses that grow from 10 to 200 ms. The same pauses follow whatever goes
wrong; a block that comes begins them anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from kvpool.daemon.core.blocks import PartTable
from kvpool.hit_rule import needed, usable
from kvpool.placement.directory.base import Entry
from kvpool.types import PartKind

WINDOW_KEYS = 512  # asked about at a time
PAUSE_S, PAUSE_S_MAX = 0.01, 0.2


class Lacking(NamedTuple):
    """One part of a block that is not here."""

    table: PartTable
    key: bytes


class _All:
    """Has every key."""

    def __contains__(self, key: object) -> bool:
        return True


class Chain:
    """What a follow needs of a prompt, what of it is here, and what is coming. Not thread-safe.

    needed: for each table the keys that the whole chain needs of it, in its order.
    """

    def __init__(self, tables: Sequence[PartTable], keys: Sequence[bytes]) -> None:
        specs = [table.spec for table in tables]
        whole = usable(specs, [_All()] * len(specs), keys)
        self.tables = tables
        self.keys = keys
        self.uneven = any(s.kind is PartKind.WINDOW or s.stride > 1 for s in specs)
        self.needed = [needed(spec, keys[:whole]) for spec in specs]
        self._index = {key: index for index, key in enumerate(keys)}
        self._first = [0] * len(tables)  # of each table's needed keys: all before it are here
        self._here: set[Lacking] = set()  # beyond that
        self._coming: set[Lacking] = set()

    @property
    def nbytes(self) -> int:
        """What its slots take."""
        return sum(
            len(keys) * table.stride for table, keys in zip(self.tables, self.needed, strict=True)
        )

    @property
    def whole(self) -> bool:
        """Whether all that it needs has been here, as `arrived` was last called."""
        return all(first == len(keys) for first, keys in zip(self._first, self.needed, strict=True))

    @property
    def window(self) -> Sequence[bytes]:
        """The keys to ask about: from the first one of which a part is not here. Empty when all are."""
        starts = [
            self._index[keys[first]]
            for first, keys in zip(self._first, self.needed, strict=True)
            if first < len(keys)
        ]
        return self.keys[min(starts) :][:WINDOW_KEYS] if starts else ()

    def arrived(self) -> list[tuple[PartTable, list[bytes]]]:
        """What has come since the last call, by table: of the window, which may have moved. Settle first."""
        found = []
        for number, table in enumerate(self.tables):
            keys, first = self.needed[number], self._first[number]
            new = []
            at = first
            while at < min(len(keys), first + WINDOW_KEYS):
                one = Lacking(table, keys[at])
                if one not in self._here and one.key in table.blocks:
                    new.append(one.key)
                    self._coming.discard(one)
                    self._here.add(one)
                if at == first and one in self._here:
                    self._here.remove(one)
                    first += 1
                at += 1
            self._first[number] = first
            if new:
                found.append((table, new))
        return found

    def known(self, window: Sequence[bytes], parts: int) -> list[int]:
        """For each key of a window the mask of parts that nobody needs to tell of. parts: of the namespace."""
        every = (1 << parts) - 1
        masks = [every] * len(window)
        for one, at in self._missing(window):
            masks[at] &= ~(1 << one.table.part)
        return masks

    def told(self, window: Sequence[bytes], masks: Sequence[int]) -> list[Lacking]:
        """What of this is missing: it is coming from now on. By part, each in the order of the chain."""
        found = [one for one, at in self._missing(window) if masks[at] >> one.table.part & 1]
        self._coming.update(found)
        return found

    def missing(self, window: Sequence[bytes]) -> set[Lacking]:
        """What of a window is neither here nor coming."""
        return {one for one, _ in self._missing(window)}

    def _missing(self, window: Sequence[bytes]) -> list[tuple[Lacking, int]]:
        """What of a window is neither here nor coming, with its place in the window."""
        place = {key: at for at, key in enumerate(window)}
        found = []
        for number, table in enumerate(self.tables):
            keys, first = self.needed[number], self._first[number]
            for key in keys[first : first + len(window)]:
                at = place.get(key)
                if at is None or key in table.blocks:
                    continue
                one = Lacking(table, key)
                if one not in self._coming and one not in self._here:
                    found.append((one, at))
        return found

    def lost(self, some: Collection[Lacking]) -> None:
        """Nobody could deliver these: they are missing again."""
        self._coming.difference_update(some)


class Course:
    """Whom to ask, and when to look at the directory. Not thread-safe."""

    def __init__(self, now: float) -> None:
        self.ask_at = now
        self.look_at = now
        self._proven: bytes | None = None  # who told of something new last
        self._doubted: set[bytes] = set()  # who did not, though asked
        self._furthest: list[bytes] = []  # by the directory: who has the last of what is missing
        self._pause_s = PAUSE_S

    def choose(
        self, named: bytes | None, may_ask: Callable[[bytes], bool], now: float
    ) -> bytes | None:
        """Whom to ask now; None: nobody is known. named: the node that the client named, while it lives."""
        known = [one for one in (self._proven, named, *self._furthest) if one is not None]
        known.sort(key=self._doubted.__contains__)
        whom = next(filter(may_ask, known), None)
        if whom is None or whom in self._doubted or whom not in {self._proven, named}:
            self.look_at = min(self.look_at, now + self._pause_s)
        return whom

    def looked(
        self, window: Sequence[bytes], located: Mapping[bytes, Sequence[Entry]], now: float
    ) -> None:
        """The directory was looked at: who has what of a window, nodes only."""
        last = next((held for key in reversed(window) if (held := located.get(key))), ())
        self._furthest = [entry.incarnation for entry in last]
        self._doubted.difference_update(self._furthest)
        self.look_at = math.inf
        self._lengthen()

    def news(self, incarnation: bytes) -> None:
        """It told of something new."""
        self._proven = incarnation
        self._doubted.discard(incarnation)
        self.look_at = math.inf

    def nothing(self, incarnation: bytes, now: float, *, early: bool) -> None:
        """It told of nothing new. early: before its time was over, so it does not wait."""
        self._doubt(incarnation)
        if early:
            self.trouble(now)
        else:
            self.look_at = min(self.look_at, now)

    def failed(self, incarnation: bytes, now: float) -> None:
        """It did not answer."""
        self._doubt(incarnation)
        self.trouble(now)

    def trouble(self, now: float) -> None:
        """Something was not to be had: look again, and ask again, a little later."""
        self.ask_at = now + self._pause_s
        self.look_at = min(self.look_at, now + self._pause_s)
        self._lengthen()

    def came(self, now: float) -> None:
        """Blocks have come."""
        self._pause_s = PAUSE_S
        self.ask_at = min(self.ask_at, now)

    def _doubt(self, incarnation: bytes) -> None:
        if self._proven == incarnation:
            self._proven = None
        self._doubted.add(incarnation)

    def _lengthen(self) -> None:
        self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)

"""A prompt's blocks, pulled while an engine elsewhere computes them: what is missing, whom to ask, and when.

The rules of a prefix stream, without I/O; `prefix_stream.py` asks and fetches. Times are seconds of one monotonic
clock.

`Chain` knows which blocks a stream needs of a prompt: of each part those that the hit rule requires for the whole
chain, and none for shorter prefixes. Each part of a block is

    missing ──told of, by an owner or the directory──▶ coming ──committed here──▶ here, and held
       ▲                                                  │
       └───────────────── nobody could deliver it ────────┘

and missing parts are requested in a window that begins with the first block that is not here, so that the
blocks under way are bounded by the window.

`Course` knows whom to ask. One node is asked at a time: the last one that reported something new, else the node
that the client named, else the one that has most of the chain by the directory. A node that reports nothing
new by the end of its request has proved nothing, so the directory is asked again; while no node is
proven or named, it is asked in intervals that grow from 10 to 200 ms. The same intervals follow any
failure; an arriving block resets them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from kvpool.daemon.core.blocks import PartTable
from kvpool.hit_rule import needed, usable
from kvpool.placement.directory.base import Entry
from kvpool.types import PartKind

WINDOW_KEYS = 512  # requested at a time
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
    """The blocks that a stream needs of a prompt, those that are here, and those that are coming. Not
    thread-safe.

    needed: for each table the keys that the whole chain needs of it, in its order; up to a block that will not come.
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
        self._end = len(keys)
        self._here: set[Lacking] = set()  # beyond that
        self._coming: set[Lacking] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of its slots."""
        return sum(
            len(keys) * table.stride for table, keys in zip(self.tables, self.needed, strict=True)
        )

    @property
    def ended(self) -> bool:
        """Whether all that is still needed was here at the last call of `arrived`."""
        return all(first >= len(keys) for first, keys in zip(self._first, self.needed, strict=True))

    @property
    def whole(self) -> bool:
        """Whether all blocks that the whole chain needs were here at the last call of `arrived`."""
        return self.ended and self._end == len(self.keys)

    @property
    def window(self) -> Sequence[bytes]:
        """The keys to ask about: from the first one with a missing part. Empty when all are here."""
        starts = [
            self._index[keys[first]]
            for first, keys in zip(self._first, self.needed, strict=True)
            if first < len(keys)
        ]
        return self.keys[min(starts) :][:WINDOW_KEYS] if starts else ()

    def arrived(self) -> list[tuple[PartTable, list[bytes]]]:
        """Blocks that have arrived since the last call, by table: of the window, which may have moved. Settle
        first.
        """
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

    def dropped(self, key: bytes) -> None:
        """Its writer has given it up: if it is missing, nothing is needed from it on."""
        at = self._index[key]
        lacks = any(
            key in keys and key not in table.blocks and Lacking(table, key) not in self._coming
            for table, keys in zip(self.tables, self.needed, strict=True)
        )
        if not lacks:
            return
        self._end = at
        self.needed = [[one for one in keys if self._index[one] < at] for keys in self.needed]

    def known(self, window: Sequence[bytes], parts: int) -> list[int]:
        """For each key of a window the mask of parts that need not be reported. parts: of the namespace."""
        every = (1 << parts) - 1
        masks = [every] * len(window)
        for one, at in self._missing(window):
            masks[at] &= ~(1 << one.table.part)
        return masks

    def told(self, window: Sequence[bytes], masks: Sequence[int]) -> list[Lacking]:
        """The missing ones of these: they are coming from now on. By part, each in the order of the chain."""
        found = [one for one, at in self._missing(window) if masks[at] >> one.table.part & 1]
        self._coming.update(found)
        return found

    def _missing(self, window: Sequence[bytes]) -> list[tuple[Lacking, int]]:
        """The keys of a window that are neither here nor coming, with their positions in the window."""
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
        """No source could deliver these: they are missing again."""
        self._coming.difference_update(some)


class Course:
    """Whom to ask, and when to ask the directory. Not thread-safe."""

    def __init__(self, now: float) -> None:
        self.ask_at = now
        self.look_at = now
        self._proven: bytes | None = None  # the last node that reported something new
        self._doubted: set[bytes] = set()  # nodes that were asked and did not
        self._furthest: list[
            bytes
        ] = []  # by the directory: the nodes that have the last of the missing blocks
        self._pause_s = PAUSE_S

    def choose(
        self, named: bytes | None, may_ask: Callable[[bytes], bool], now: float
    ) -> bytes | None:
        """The node to ask now; None: no node is known. named: the node that the client named, while it lives."""
        known = [one for one in (self._proven, named, *self._furthest) if one is not None]
        known.sort(key=self._doubted.__contains__)
        whom = next(filter(may_ask, known), None)
        if whom is None or whom in self._doubted or whom not in {self._proven, named}:
            self.look_at = min(self.look_at, now + self._pause_s)
        return whom

    def looked(
        self, window: Sequence[bytes], located: Mapping[bytes, Sequence[Entry]], now: float
    ) -> None:
        """The directory's answer: which nodes have which part of a window."""
        last = next((held for key in reversed(window) if (held := located.get(key))), ())
        self._furthest = [entry.incarnation for entry in last]
        self._doubted.difference_update(self._furthest)
        self.look_at = math.inf
        self._lengthen()

    def news(self, incarnation: bytes) -> None:
        """It reported something new."""
        self._proven = incarnation
        self._doubted.discard(incarnation)
        self.look_at = math.inf

    def nothing(self, incarnation: bytes, now: float, *, early: bool) -> None:
        """It reported nothing new. early: before its time was over, so it does not wait."""
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
        """Something was not available: ask the directory and a node again, a little later."""
        self.ask_at = now + self._pause_s
        self.look_at = min(self.look_at, now + self._pause_s)
        self._lengthen()

    def came(self, now: float) -> None:
        """Blocks have arrived."""
        self._pause_s = PAUSE_S
        self.ask_at = min(self.ask_at, now)

    def _doubt(self, incarnation: bytes) -> None:
        if self._proven == incarnation:
            self._proven = None
        self._doubted.add(incarnation)

    def _lengthen(self) -> None:
        self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)

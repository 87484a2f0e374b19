"""Which slabs of a segment belong to which class: see `kvpool.storage.slab`."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from mmap import mmap

import numpy as np

SPANS_TRIED = 1024
COARSENESS = 0.25
"""The acceptable loss of an extent as large as the segment, as a share of the segment."""


@dataclass(eq=False, repr=False, slots=True)
class Extent:
    """The rows of one class, from `first` to `end`, in a run of slabs, from `slab` on.

    An extent needs no list of all its rows, and adjacent ones are given out together.
    """

    owner: StrideClass
    index: int
    slab: int
    slabs: int
    first: int
    end: int
    used: int = 0
    free: list[int] = field(default_factory=list)  # a stack of rows that were handed out before
    fresh: range = range(0)  # rows that never were, used when `free` is empty
    unlisted: bool = False  # `free` is yet to be found in the flags of the class
    kept: bool = False  # a slot in it is retired

    def take(self, n: int) -> list[int]:
        """Up to n of its rows; none: it is exhausted."""
        if self.unlisted:
            self.unlisted = False
            busy = np.frombuffer(self.owner.busy, dtype=np.uint8)[self.first : self.end]
            self.free = (np.flatnonzero(busy == 0)[::-1] + self.first).tolist()
        if self.free:
            rows = self.free[: -n - 1 : -1]
            del self.free[-n:]
            return rows
        rows = list(self.fresh[:n])
        self.fresh = self.fresh[n:]
        return rows


@dataclass(eq=False, repr=False, slots=True)
class StrideClass:
    """The slots of one stride."""

    stride: int
    span: int  # slabs to an extent
    extent_bytes: int
    capacity: int  # slots if it had all extents
    busy: mmap  # a byte a row, 1 if in use
    extents: dict[int, Extent] = field(default_factory=dict)
    open: OrderedDict[Extent, None] = field(default_factory=OrderedDict)
    """Extents that may have free rows; those freed last at the end."""
    slots: int = 0
    used: int = 0
    starved_at: int = -1  # as `Extents.changes` was when it found no extent


class Extents:
    """The extents of all classes of a segment of `size` bytes, and the slabs that no class has."""

    def __init__(self, size: int, slab_bytes: int) -> None:
        self.size = size
        self.slab_bytes = slab_bytes
        self.slabs = -(-size // slab_bytes)  # the last one may be short
        self._by_slab: list[Extent | None] = [None] * self.slabs
        # Popped from the end: low slabs first, so that aligned runs stay free at the other end.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(reversed(range(self.slabs)))
        self.idle: OrderedDict[Extent, None] = OrderedDict()  # no row used; longest idle first
        # Counts events that may make an extent available: a class that found none does
        # not look again before it changes.
        self.changes = 0

    def choose_span(self, stride: int) -> tuple[int, int]:
        """Slabs to an extent, and the slots of a class that has all extents. Milliseconds."""
        best, best_cost, best_capacity = 1, float("inf"), 0
        for span in (*range(1, min(self.slabs, SPANS_TRIED)), self.slabs):
            coarse = COARSENESS * span / self.slabs
            if coarse >= best_cost:
                break
            bytes_ = span * self.slab_bytes
            starts = np.arange(0, self.size, bytes_, dtype=np.int64)
            ends = np.minimum(starts + bytes_, self.size)
            slots = int(np.maximum(ends // stride - -(-starts // stride), 0).sum())
            cost = 1 - slots * stride / self.size + coarse
            if slots and cost < best_cost:
                best, best_cost, best_capacity = span, cost, slots
        return best, best_capacity

    def bounds(self, cls: StrideClass, index: int) -> tuple[int, int]:
        """First and end of the rows that lie wholly inside the extent; none if end <= first."""
        start = index * cls.extent_bytes
        end = min(start + cls.extent_bytes, self.size)
        return -(-start // cls.stride), end // cls.stride

    def _run(self, cls: StrideClass, index: int) -> range:
        return range(index * cls.span, min((index + 1) * cls.span, self.slabs))

    def take(self, cls: StrideClass) -> bool:
        """Give the class one more extent, all fresh. Only while it has no free row."""
        if cls.starved_at == self.changes:
            return False
        index = self._find_single(cls) if cls.span == 1 else self._find_run(cls)
        if index is None:
            cls.starved_at = self.changes
            return False
        for slab in self._run(cls, index):
            held = self._by_slab[slab]
            if held is not None:
                self.dissolve(held)
        first, end = self.bounds(cls, index)
        extent = self._give(cls, index, first, end)
        extent.fresh = range(first, end)
        cls.open[extent] = None
        return True

    def _give(self, cls: StrideClass, index: int, first: int, end: int) -> Extent:
        """A free run of slabs becomes the class's; none of its rows is handed out."""
        run = self._run(cls, index)
        extent = Extent(cls, index, run.start, len(run), first, end)
        for slab in run:
            del self._free[slab]
            self._by_slab[slab] = extent
        cls.extents[index] = extent
        cls.slots += end - first
        self.idle[extent] = None
        return extent

    def _find_single(self, cls: StrideClass) -> int | None:
        """O(1) except for slabs without a whole row of the class, which are few (see `span`)."""
        for slab in reversed(self._free):
            first, end = self.bounds(cls, slab)
            if first < end:
                return slab
        for extent in self.idle:
            for slab in range(extent.slab, extent.slab + extent.slabs):
                first, end = self.bounds(cls, slab)
                if first < end:
                    return slab
        return None

    def _find_run(self, cls: StrideClass) -> int | None:
        """The run that takes the fewest slabs of idle extents, from the far end. At most O(slabs), once an extent."""
        best, most_free = None, -1
        for index in reversed(range(-(-self.slabs // cls.span))):
            first, end = self.bounds(cls, index)
            if first >= end:
                continue
            free = 0
            for slab in self._run(cls, index):
                held = self._by_slab[slab]
                if held is None:
                    free += 1
                elif held.used or held.owner is cls:
                    break
            else:
                if free > most_free:
                    best, most_free = index, free
                    if free == cls.span:
                        break  # none of them is another's
        return best

    def dissolve(self, extent: Extent) -> None:
        cls = extent.owner
        del cls.extents[extent.index]
        del self.idle[extent]
        cls.open.pop(extent, None)
        cls.slots -= extent.end - extent.first
        for slab in range(extent.slab, extent.slab + extent.slabs):
            self._by_slab[slab] = None
            self._free[slab] = None
        self.changes += 1

    def at(self, slab: int) -> Extent | None:
        """The extent that has a slab; None: no class has it."""
        return self._by_slab[slab]

    def of_slab(self, slab: int) -> Extent:
        """The same of a slab that a class has."""
        extent = self._by_slab[slab]
        if extent is None:
            raise AssertionError(f"slab {slab} belongs to no class")
        return extent

    def claim(self, cls: StrideClass, index: int) -> Extent | None:
        """This extent for the class, without fresh rows; None if another class has some of it."""
        first, end = self.bounds(cls, index)
        if first >= end or any(self._by_slab[slab] is not None for slab in self._run(cls, index)):
            return None
        return self._give(cls, index, first, end)

    def busy_in(self, cls: StrideClass, index: int) -> tuple[int, ...]:
        """The extents of others with slots in use where the class could have its extent of this index."""
        if cls.span == 1:
            held = self._by_slab[index]
            if held is None or held.owner is cls or held.kept or not held.used:
                return ()
            first, end = self.bounds(cls, index)
            return (held.slab,) if first < end else ()
        first, end = self.bounds(cls, index)
        if first >= end:
            return ()
        all_held = {self._by_slab[slab]: None for slab in self._run(cls, index)}
        if any(e is not None and (e.owner is cls or e.kept) for e in all_held):
            return ()
        return tuple(e.slab for e in all_held if e is not None and e.used)

    def bytes_in(self, slab: int, slabs: int = 1) -> int:
        """Bytes of the segment in a run of slabs."""
        return min((slab + slabs) * self.slab_bytes, self.size) - slab * self.slab_bytes

    def unassigned(self) -> tuple[int, int]:
        """How many slabs no class has, and their bytes."""
        return len(self._free), sum(map(self.bytes_in, self._free))

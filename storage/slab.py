"""Which slots of one segment are free: bookkeeping only, no memory is touched.

Classes. A block of `nbytes` gets a slot of its class's *stride*: nbytes rounded up to a multiple of
4096, below 4096 to one of 64. Blocks of a model have few lengths, so there are few classes.

    segment  |  slab 0   |  slab 1   |  slab 2   |  slab 3   |    slabs: equal, a power of two
    class A  |a|a|a|a|a|a|           |           |           |    a: rows inside the slab
    class B  |           |           | b | b | b | b | b |   |    b: rows in an extent of 2 slabs

Rows. Every slot begins at `row * stride`: the segment, as an array of rows of one stride, lets a
reader gather a batch with one `numpy.take`. A slot is (stride, row), whatever slab it is in. The
price: a row that would straddle the border of a class's extent is never used.

Extents. A class takes space by the extent, a run of k slabs that begins at a multiple of k. Longer
runs lose fewer rows at their borders (none if k slabs are a multiple of the stride), shorter
ones are easier to get; k is chosen once for the class. So blocks may be larger than slabs, up to
the whole segment, although odd lengths near it take most of it at once. In the API an extent is
identified by its first slab.

Moving space between classes. An extent whose slots are all free stays with its class until another
class needs it, and is then taken at once. When there is none, the caller empties one: `victims`
names the sets of extents that would do, `rows_used` their used rows, and after `free` of those rows
`alloc` succeeds.

Costs. `alloc` and `free` are O(1) a call plus a tenth of a microsecond a row; `victims` is
O(slabs). Not thread-safe: it belongs to the process that decides. A misuse (a double free, a row
that was not handed out) is an AssertionError: continuing would give one slot to two blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvpool.errors import ConfigError, InvalidRequest, LimitExceeded
from kvpool.memory.private_pages import private_pages
from kvpool.telemetry.memory_stats import SlabClass, SpaceStats

PAGE = 4096
SMALL_STEP = 64
CLASSES_MAX = 64
SLABS_MAX = 1 << 16
SPANS_TRIED = 1024
COARSENESS = 0.25
"""The acceptable loss of an extent as large as the segment, as a share of the segment."""
ROUND_UP_MAX = 1.125
"""Beyond CLASSES_MAX a length may use a larger class that is at most this many times its own."""


def natural_stride(nbytes: int) -> int:
    """The stride for blocks of `nbytes` while classes are available."""
    step = PAGE if nbytes >= PAGE else SMALL_STEP
    return -(-nbytes // step) * step


def default_slab_bytes(size: int) -> int:
    """At least 256 slabs of 1 to 16 MiB, but at most 16,384; in segments too small for that, at least 8 slabs.

    Small ones, since a slab that moves to another class is emptied in one step.
    """
    wanted = min(max(size // 256, 1 << 20), 16 << 20)
    wanted = max(PAGE, min(max(wanted, size // 8192), size // 8))
    return 1 << (wanted.bit_length() - 1)


def _ignore(row: int) -> None:
    pass


class _Extent:
    """The rows of one class in a run of slabs.

    free: a stack of rows that were handed out before. fresh: rows that never were, used when it is empty: so an
    extent needs no list of all its rows, and adjacent ones are given out together. unlisted: `free` is yet to be
    found in the flags of the class.
    """

    __slots__ = (
        "end",
        "first",
        "free",
        "fresh",
        "index",
        "kept",
        "owner",
        "slab",
        "slabs",
        "unlisted",
        "used",
    )

    def __init__(self, owner: _Class, index: int, first: int, end: int, slabs: int) -> None:
        self.owner = owner
        self.index = index
        self.slab = index * owner.span
        self.slabs = slabs
        self.first = first
        self.end = end
        self.used = 0
        self.free: list[int] = []
        self.fresh = range(0)
        self.unlisted = False
        self.kept = False

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


class _Class:
    """The slots of one stride. open: its extents that may have free rows; those freed last at the end."""

    __slots__ = (
        "busy",
        "capacity",
        "extent_bytes",
        "extents",
        "open",
        "slots",
        "span",
        "starved_at",
        "stride",
        "used",
    )

    def __init__(self, stride: int, size: int, span: int, extent_bytes: int, capacity: int) -> None:
        self.stride = stride
        self.span = span
        self.extent_bytes = extent_bytes
        self.capacity = capacity
        self.extents: dict[int, _Extent] = {}
        # A byte a row, 1 if in use.
        self.busy = private_pages(size // stride)
        self.open: OrderedDict[_Extent, None] = OrderedDict()
        self.slots = 0
        self.used = 0
        self.starved_at = -1


class SlabAllocator:
    """Slots of a segment of `size` bytes. See the module's docstring for the layout."""

    def __init__(self, size: int, slab_bytes: int | None = None) -> None:
        if slab_bytes is None:
            slab_bytes = default_slab_bytes(size)
        if size < PAGE:
            raise ConfigError(f"a segment needs at least {PAGE} bytes, not {size}")
        if slab_bytes < PAGE or slab_bytes & (slab_bytes - 1):
            raise ConfigError(f"slab_bytes must be a power of two from {PAGE} on, not {slab_bytes}")
        self.size = size
        self.slab_bytes = slab_bytes
        self.slabs = -(-size // slab_bytes)  # the last one may be short
        if self.slabs > SLABS_MAX:
            raise ConfigError(
                f"{size} bytes in slabs of {slab_bytes} are {self.slabs} slabs,"
                f" more than {SLABS_MAX}; make slab_bytes larger"
            )
        self._classes: dict[int, _Class] = {}
        self._by_slab: list[_Extent | None] = [None] * self.slabs
        # Popped from the end: low slabs first, so that aligned runs stay free at the other end.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(reversed(range(self.slabs)))
        self._idle: OrderedDict[_Extent, None] = OrderedDict()  # no row used; longest idle first
        # Counts events that may make an extent available: a class that found none does
        # not look again before it changes.
        self._changes = 0

    # Classes

    def stride_of(self, nbytes: int) -> int:
        """The stride of the class for blocks of `nbytes`; adds the class if it is new.

        When there are CLASSES_MAX already, the smallest class that is at most an eighth larger
        serves, else LimitExceeded. Classes are never dropped, so the answer stays valid.
        """
        stride = natural_stride(nbytes)
        return stride if stride in self._classes else self._new_class(nbytes, stride)

    def _new_class(self, nbytes: int, stride: int) -> int:
        if nbytes < 1:
            raise InvalidRequest(f"a block cannot have {nbytes} bytes")
        if stride > self.size:
            raise InvalidRequest(f"a block of {nbytes} bytes exceeds the segment of {self.size}")
        if len(self._classes) >= CLASSES_MAX:
            larger = [s for s in self._classes if stride < s <= stride * ROUND_UP_MAX]
            if not larger:
                raise LimitExceeded(
                    f"all {CLASSES_MAX} block sizes of the segment are taken, and none of them"
                    f" is a little above {nbytes} bytes; use fewer block sizes on one node"
                )
            return min(larger)
        span, capacity = self._choose_span(stride)
        self._classes[stride] = _Class(stride, self.size, span, span * self.slab_bytes, capacity)
        return stride

    def _choose_span(self, stride: int) -> tuple[int, int]:
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

    def capacity(self, nbytes: int) -> int:
        """Number of slots if the class of `nbytes` had the whole segment."""
        return self._classes[self.stride_of(nbytes)].capacity

    # Slots

    def alloc(self, nbytes: int, n: int) -> list[int]:
        """Up to `n` rows of `stride_of(nbytes)`; fewer when no more are available without evicting.

        Rows freed last come first, in the order in which they were freed.
        """
        cls = self._classes[self.stride_of(nbytes)]
        busy, candidates = cls.busy, cls.open
        taken: list[int] = []
        while (wanted := n - len(taken)) > 0:
            if not candidates and not self._take_extent(cls):
                break
            extent = next(reversed(candidates))
            rows = extent.take(wanted)
            if not rows:  # all of it was claimed
                del candidates[extent]
                continue
            if not extent.used:
                del self._idle[extent]
            extent.used += len(rows)
            for row in rows:
                busy[row] = 1
            taken += rows
            if not extent.free and not extent.fresh:
                del candidates[extent]
        cls.used += len(taken)
        return taken

    def free(self, stride: int, rows: Sequence[int]) -> None:
        """Free slots. Nobody may read or write them from here on."""
        cls = self._classes.get(stride)
        if cls is None:
            raise AssertionError(f"the segment has no class of stride {stride}")
        if not rows:
            return
        if min(rows) < 0 or max(rows) >= len(cls.busy):
            raise AssertionError(f"rows {rows} of stride {stride} are not all in the segment")
        extent_bytes, busy = cls.extent_bytes, cls.busy
        last = -1
        for row in reversed(rows):
            if not busy[row]:
                raise AssertionError(f"row {row} of stride {stride} is free already")
            busy[row] = 0
            index = row * stride // extent_bytes
            if index != last:
                last = index
                extent = cls.extents[index]
                # If its rows are not listed yet, this one will be found by its flag.
                push = _ignore if extent.unlisted else extent.free.append
                cls.open[extent] = None
                cls.open.move_to_end(extent)
            push(row)
            extent.used -= 1
            if not extent.used:
                self._idle[extent] = None
                self._changes += 1
        cls.used -= len(rows)

    def retire(self, stride: int, rows: Iterable[int]) -> None:
        """These slots stay in use for good, and their extents with their class: `victims` leaves them out."""
        for row in rows:
            self._extent(self.slab_of(stride, row)).kept = True

    def reuse(self, stride: int, rows: list[int]) -> list[int]:
        """Slots in use get other contents: what `free` and then `alloc` of as many rows returns."""
        return rows

    @property
    def class_count(self) -> int:
        """Of at most `CLASSES_MAX`."""
        return len(self._classes)

    def claim(self, nbytes: int, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Take exactly these rows, as they were in use before a restart; returns which were available.

        Only before any allocation; when all is claimed, call `claimed`. Claimed rows may
        be freed in between. A row is not available
        if it is taken already, not wholly inside an extent of its class, or in a place that another
        class has claimed: the layout depends on the size of the segment and may have changed with it.
        O(rows), in C, plus a few microseconds an extent.
        """
        cls = self._classes[self.stride_of(nbytes)]
        if any(extent.fresh for extent in cls.open):
            raise AssertionError("rows must be claimed before any is allocated")
        stride, per_extent = cls.stride, cls.extent_bytes
        good = (rows >= 0) & (rows < len(cls.busy))
        indices = np.where(good, rows, 0) * stride // per_extent
        for index in np.unique(indices[good]).tolist():
            here = indices == index
            extent = cls.extents.get(index) or self._claim_extent(cls, index)
            if extent is None:
                good &= ~here
            else:
                good &= ~here | ((rows >= extent.first) & (rows < extent.end))
        busy = np.frombuffer(cls.busy, dtype=np.uint8)
        good[good] = busy[rows[good]] == 0
        _, first = np.unique(rows, return_index=True)
        once = np.zeros(len(rows), dtype=np.bool_)
        once[first] = True
        good &= once
        taken = rows[good]
        busy[taken] = 1
        counts = np.bincount(indices[good], minlength=1)
        for index in np.flatnonzero(counts).tolist():
            extent = cls.extents[index]
            if not extent.used:
                del self._idle[extent]
            extent.used += int(counts[index])
        cls.used += len(taken)
        return good

    def _claim_extent(self, cls: _Class, index: int) -> _Extent | None:
        """This extent for the class, without fresh rows; None if another class has some of it."""
        first, end = self._bounds(cls, index)
        if first >= end or any(self._by_slab[slab] is not None for slab in self._run(cls, index)):
            return None
        return self._give_extent(cls, index, first, end)

    def claimed(self) -> None:
        """All is claimed: the rest of the claimed extents is free."""
        for cls in self._classes.values():
            for extent in cls.extents.values():
                extent.free = []  # what was claimed and freed since is met again
                extent.unlisted = True
                cls.open[extent] = None

    def offset(self, stride: int, row: int) -> int:
        """Where the slot begins in the segment."""
        return row * stride

    # Extents

    def _bounds(self, cls: _Class, index: int) -> tuple[int, int]:
        """First and end of the rows that lie wholly inside the extent; none if end <= first."""
        start = index * cls.extent_bytes
        end = min(start + cls.extent_bytes, self.size)
        return -(-start // cls.stride), end // cls.stride

    def _run(self, cls: _Class, index: int) -> range:
        return range(index * cls.span, min((index + 1) * cls.span, self.slabs))

    def _take_extent(self, cls: _Class) -> bool:
        """Give the class one more extent, all fresh. Only while it has no free row."""
        if cls.starved_at == self._changes:
            return False
        index = self._find_single(cls) if cls.span == 1 else self._find_run(cls)
        if index is None:
            cls.starved_at = self._changes
            return False
        for slab in self._run(cls, index):
            held = self._by_slab[slab]
            if held is not None:
                self._dissolve(held)
        first, end = self._bounds(cls, index)
        extent = self._give_extent(cls, index, first, end)
        extent.fresh = range(first, end)
        cls.open[extent] = None
        return True

    def _give_extent(self, cls: _Class, index: int, first: int, end: int) -> _Extent:
        """A free run of slabs becomes the class's; none of its rows is handed out."""
        run = self._run(cls, index)
        extent = _Extent(cls, index, first, end, len(run))
        for slab in run:
            del self._free[slab]
            self._by_slab[slab] = extent
        cls.extents[index] = extent
        cls.slots += end - first
        self._idle[extent] = None
        return extent

    def _find_single(self, cls: _Class) -> int | None:
        """O(1) except for slabs without a whole row of the class, which are few (see `span`)."""
        for slab in reversed(self._free):
            first, end = self._bounds(cls, slab)
            if first < end:
                return slab
        for extent in self._idle:
            for slab in range(extent.slab, extent.slab + extent.slabs):
                first, end = self._bounds(cls, slab)
                if first < end:
                    return slab
        return None

    def _find_run(self, cls: _Class) -> int | None:
        """The run that takes the fewest slabs of idle extents, from the far end. At most O(slabs), once an extent."""
        best, most_free = None, -1
        for index in reversed(range(-(-self.slabs // cls.span))):
            first, end = self._bounds(cls, index)
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

    def _dissolve(self, extent: _Extent) -> None:
        cls = extent.owner
        del cls.extents[extent.index]
        del self._idle[extent]
        cls.open.pop(extent, None)
        cls.slots -= extent.end - extent.first
        for slab in range(extent.slab, extent.slab + extent.slabs):
            self._by_slab[slab] = None
            self._free[slab] = None
        self._changes += 1

    def _extent(self, slab: int) -> _Extent:
        extent = self._by_slab[slab]
        if extent is None:
            raise AssertionError(f"slab {slab} belongs to no class")
        return extent

    def slab_of(self, stride: int, row: int) -> int:
        """The first slab of the extent that the slot is in."""
        cls = self._classes[stride]
        extent = cls.extents.get(row * stride // cls.extent_bytes)
        if extent is None or not extent.first <= row < extent.end:
            raise AssertionError(f"row {row} of stride {stride} is in no slab of its class")
        return extent.slab

    def owner(self, slab: int) -> int:
        """The stride of the class that has this slab; 0 if none has."""
        extent = self._by_slab[slab]
        return extent.owner.stride if extent is not None else 0

    def rows_in_slab(self, slab: int) -> range:
        """All rows of the extent that the slab is in, used or not."""
        extent = self._extent(slab)
        return range(extent.first, extent.end)

    def used_in_slab(self, slab: int) -> int:
        """How many slots of the extent are in use; 0 also for a slab that no class has."""
        extent = self._by_slab[slab]
        return extent.used if extent is not None else 0

    def rows_used(self, slab: int) -> list[int]:
        """The rows of the extent that are in use, ascending. O(its slots), in C."""
        extent = self._extent(slab)
        busy = np.frombuffer(extent.owner.busy[extent.first : extent.end], dtype=np.uint8)
        rows: list[int] = (np.flatnonzero(busy) + extent.first).tolist()
        return rows

    def victims(self, nbytes: int) -> Iterator[tuple[int, ...]]:
        """Sets of extents to empty so that the class of `nbytes` gets one more: any one of these sets.

        Each is a set of extents of other classes by their first slabs, with slots in use, none of them
        retired. Free the `rows_used` of all of one set, then `alloc`. Choose by the contents of the slots: coldest, and
        none leased. Read it to its end before anything else is called here.
        """
        cls = self._classes[self.stride_of(nbytes)]
        for index in range(-(-self.slabs // cls.span)):
            if busy := self._busy_in(cls, index):
                yield busy

    def victims_with(self, nbytes: int, slab: int) -> tuple[int, ...]:
        """The one of the sets of `victims` that this slab's extent is in; empty: none."""
        cls = self._classes[self.stride_of(nbytes)]
        extent = self._extent(slab)
        for index in range(slab // cls.span, (slab + extent.slabs - 1) // cls.span + 1):
            if busy := self._busy_in(cls, index):
                return busy
        return ()

    def _busy_in(self, cls: _Class, index: int) -> tuple[int, ...]:
        """The extents of others with slots in use where the class could have its extent of this index."""
        if cls.span == 1:
            held = self._by_slab[index]
            if held is None or held.owner is cls or held.kept or not held.used:
                return ()
            first, end = self._bounds(cls, index)
            return (held.slab,) if first < end else ()
        first, end = self._bounds(cls, index)
        if first >= end:
            return ()
        all_held = {self._by_slab[slab]: None for slab in self._run(cls, index)}
        if any(e is not None and (e.owner is cls or e.kept) for e in all_held):
            return ()
        return tuple(e.slab for e in all_held if e is not None and e.used)

    def reclaim_slab(self, slab: int, used: int = 0) -> None:
        """Take an extent from its class at once. `alloc` does it when necessary, if all its slots are free.

        used: slots in use, all of them: nobody may read or write them from here on.
        """
        extent = self._extent(slab)
        if extent.used != used:
            raise AssertionError(f"slab {slab} has {extent.used} slots in use, not {used}")
        if used:
            cls = extent.owner
            np.frombuffer(cls.busy, dtype=np.uint8)[extent.first : extent.end] = 0
            cls.used -= used
            extent.used = 0
            self._idle[extent] = None
        self._dissolve(extent)

    # Accounting

    @property
    def bytes_used(self) -> int:
        """Bytes of the slots that are in use."""
        return sum(cls.used * cls.stride for cls in self._classes.values())

    def available(self, nbytes: int) -> int:
        """Free slots in the extents that the class has, not counting extents it could take."""
        cls = self._classes[self.stride_of(nbytes)]
        return cls.slots - cls.used

    def usage(self) -> list[SlabClass]:
        """One line a class, by stride. O(slabs): for metrics, not for the path of a block."""
        lines = []
        for stride, cls in sorted(self._classes.items()):
            extents = cls.extents.values()
            slots = cls.slots
            space = sum(
                min((e.slab + e.slabs) * self.slab_bytes, self.size) - e.slab * self.slab_bytes
                for e in extents
            )
            lines.append(
                SlabClass(
                    stride=stride,
                    extents=len(extents),
                    slots_used=cls.used,
                    slots_free=slots - cls.used,
                    bytes_used=cls.used * stride,
                    bytes_free=(slots - cls.used) * stride,
                    bytes_lost=space - slots * stride,
                )
            )
        return lines

    def stats(self) -> SpaceStats:
        """The same, with what the segment has in all."""
        return SpaceStats(
            size=self.size,
            slab_bytes=self.slab_bytes,
            slabs=self.slabs,
            slabs_unassigned=len(self._free),
            bytes_unassigned=self.bytes_unassigned,
            bytes_used=self.bytes_used,
            classes=self.usage(),
        )

    @property
    def bytes_unassigned(self) -> int:
        """Bytes of the slabs without a class."""
        return sum(
            min((slab + 1) * self.slab_bytes, self.size) - slab * self.slab_bytes
            for slab in self._free
        )

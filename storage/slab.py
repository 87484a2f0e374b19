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

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvpool.errors import ConfigError, InvalidRequest, LimitExceeded
from kvpool.memory.private_pages import private_pages
from kvpool.storage.extents import Extents, StrideClass
from kvpool.telemetry.memory_stats import SlabClass, SpaceStats

PAGE = 4096
SMALL_STEP = 64
CLASSES_MAX = 64
SLABS_MAX = 1 << 16
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
        slabs = -(-size // slab_bytes)
        if slabs > SLABS_MAX:
            raise ConfigError(
                f"{size} bytes in slabs of {slab_bytes} are {slabs} slabs,"
                f" more than {SLABS_MAX}; make slab_bytes larger"
            )
        self._classes: dict[int, StrideClass] = {}
        self._extents = Extents(size, slab_bytes)

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
        span, capacity = self._extents.choose_span(stride)
        busy = private_pages(self.size // stride)
        extent_bytes = span * self.slab_bytes
        self._classes[stride] = StrideClass(stride, span, extent_bytes, capacity, busy)
        return stride

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
            if not candidates and not self._extents.take(cls):
                break
            extent = next(reversed(candidates))
            rows = extent.take(wanted)
            if not rows:  # all of it was claimed
                del candidates[extent]
                continue
            if not extent.used:
                del self._extents.idle[extent]
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
                self._extents.idle[extent] = None
                self._extents.changes += 1
        cls.used -= len(rows)

    def retire(self, stride: int, rows: Iterable[int]) -> None:
        """These slots stay in use for good, and their extents with their class: `victims` leaves them out."""
        for row in rows:
            self._extents.of_slab(self.slab_of(stride, row)).kept = True

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
            extent = cls.extents.get(index) or self._extents.claim(cls, index)
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
                del self._extents.idle[extent]
            extent.used += int(counts[index])
        cls.used += len(taken)
        return good

    def claimed(self) -> None:
        """All is claimed: the rest of the claimed extents is free."""
        for cls in self._classes.values():
            for extent in cls.extents.values():
                extent.free = []  # what was claimed and freed since is met again
                extent.unlisted = True
                cls.open[extent] = None

    def slab_of(self, stride: int, row: int) -> int:
        """The first slab of the extent that the slot is in."""
        cls = self._classes[stride]
        extent = cls.extents.get(row * stride // cls.extent_bytes)
        if extent is None or not extent.first <= row < extent.end:
            raise AssertionError(f"row {row} of stride {stride} is in no slab of its class")
        return extent.slab

    def owner(self, slab: int) -> int:
        """The stride of the class that has this slab; 0 if none has."""
        extent = self._extents.at(slab)
        return extent.owner.stride if extent is not None else 0

    def rows_in_slab(self, slab: int) -> range:
        """All rows of the extent that the slab is in, used or not."""
        extent = self._extents.of_slab(slab)
        return range(extent.first, extent.end)

    def used_in_slab(self, slab: int) -> int:
        """How many slots of the extent are in use; 0 also for a slab that no class has."""
        extent = self._extents.at(slab)
        return extent.used if extent is not None else 0

    def rows_used(self, slab: int) -> list[int]:
        """The rows of the extent that are in use, ascending. O(its slots), in C."""
        extent = self._extents.of_slab(slab)
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
        for index in range(-(-self._extents.slabs // cls.span)):
            if busy := self._extents.busy_in(cls, index):
                yield busy

    def victims_with(self, nbytes: int, slab: int) -> tuple[int, ...]:
        """The one of the sets of `victims` that this slab's extent is in; empty: none."""
        cls = self._classes[self.stride_of(nbytes)]
        extent = self._extents.of_slab(slab)
        for index in range(slab // cls.span, (slab + extent.slabs - 1) // cls.span + 1):
            if busy := self._extents.busy_in(cls, index):
                return busy
        return ()

    def reclaim_slab(self, slab: int, used: int = 0) -> None:
        """Take an extent from its class at once. `alloc` does it when necessary, if all its slots are free.

        used: slots in use, all of them: nobody may read or write them from here on.
        """
        extent = self._extents.of_slab(slab)
        if extent.used != used:
            raise AssertionError(f"slab {slab} has {extent.used} slots in use, not {used}")
        if used:
            cls = extent.owner
            np.frombuffer(cls.busy, dtype=np.uint8)[extent.first : extent.end] = 0
            cls.used -= used
            extent.used = 0
            self._extents.idle[extent] = None
        self._extents.dissolve(extent)

    # Accounting

    @property
    def bytes_used(self) -> int:
        """Bytes of the slots that are in use."""
        return sum(cls.used * cls.stride for cls in self._classes.values())

    def stats(self) -> SpaceStats:
        """The space of the segment, and of each class, by stride. O(slabs): for metrics, not for the path of a block."""
        classes = []
        for stride, cls in sorted(self._classes.items()):
            free = cls.slots - cls.used
            space = sum(self._extents.bytes_in(e.slab, e.slabs) for e in cls.extents.values())
            classes.append(
                SlabClass(
                    stride=stride,
                    extents=len(cls.extents),
                    slots_used=cls.used,
                    slots_free=free,
                    bytes_used=cls.used * stride,
                    bytes_free=free * stride,
                    bytes_lost=space - cls.slots * stride,
                )
            )
        slabs, nbytes = self._extents.unassigned()
        return SpaceStats(
            size=self.size,
            slab_bytes=self.slab_bytes,
            slabs=self._extents.slabs,
            slabs_unassigned=slabs,
            bytes_unassigned=nbytes,
            bytes_used=self.bytes_used,
            classes=classes,
        )

"""The slab allocator against a plain model of a segment: which bytes belong to whom."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpool.errors import ConfigError, InvalidRequest, LimitExceeded
from kvpool.storage.slab import CLASSES_MAX, SlabAllocator, default_slab_bytes, natural_stride

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
STRIDES = (64, 192, 4 * KIB, 12 * KIB, 16 * KIB, 20 * KIB, 100 * KIB)


class Machine(RuleBasedStateMachine):
    """Slots as byte ranges in a dictionary; nothing of slabs but what the allocator says."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 300 * KIB + 100  # the last slab is short, and so is its last page
        self.slab = SlabAllocator(self.size, slab_bytes=32 * KIB)
        self.used: dict[tuple[int, int], None] = {}

    def take(self, stride: int, n: int) -> list[int]:
        rows = self.slab.alloc(stride, n)
        assert len(rows) <= n
        assert len(set(rows)) == len(rows)
        for row in rows:
            assert (stride, row) not in self.used
            assert row >= 0 and (row + 1) * stride <= self.size
            self.used[(stride, row)] = None
        return rows

    @rule(stride=st.sampled_from(STRIDES), n=st.integers(0, 70))
    def alloc(self, stride: int, n: int) -> None:
        free = sum(one.slots_free for one in self.slab.stats().classes if one.stride == stride)
        rows = self.take(stride, n)
        assert len(rows) >= min(n, free)

    @rule(stride=st.sampled_from(STRIDES), data=st.data())
    def free_some(self, stride: int, data: st.DataObject) -> None:
        mine = [row for s, row in self.used if s == stride]
        if mine:
            rows = data.draw(st.lists(st.sampled_from(mine), unique=True, max_size=40))
            self.slab.free(stride, rows)
            for row in rows:
                del self.used[(stride, row)]

    @rule(stride=st.sampled_from(STRIDES))
    def free_all(self, stride: int) -> None:
        rows = [row for s, row in self.used if s == stride]
        self.slab.stride_of(stride)
        self.slab.free(stride, rows)
        for row in rows:
            del self.used[(stride, row)]

    @rule(stride=st.sampled_from(STRIDES), data=st.data())
    def empty_a_victim_for(self, stride: int, data: st.DataObject) -> None:
        """What the node does when its class has nothing: empty one set, and it must succeed."""
        self.take(stride, 10_000)
        sets = list(self.slab.victims(stride))
        if not sets:
            return
        for slab in data.draw(st.sampled_from(sets)):
            owner = self.slab.owner(slab)
            assert owner not in (0, stride)
            rows = self.slab.rows_used(slab)
            assert len(rows) == self.slab.used_in_slab(slab) > 0
            self.slab.free(owner, rows)
            for row in rows:
                del self.used[(owner, row)]
        assert self.take(stride, 1)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def double_free(self, data: st.DataObject) -> None:
        stride, row = data.draw(st.sampled_from(sorted(self.used)))
        self.slab.free(stride, [row])
        del self.used[(stride, row)]
        with pytest.raises(AssertionError):
            self.slab.free(stride, [row])

    @rule()
    def reclaim_what_is_empty(self) -> None:
        for slab in range(self.slab.stats().slabs):
            if self.slab.owner(slab) and not self.slab.used_in_slab(slab):
                self.slab.reclaim_slab(slab)
                assert self.slab.owner(slab) == 0

    @invariant()
    def nothing_overlaps(self) -> None:
        ranges = sorted((row * stride, (row + 1) * stride) for stride, row in self.used)
        for (_, end), (start, _) in pairwise(ranges):
            assert end <= start

    @invariant()
    def every_slot_is_in_a_slab_of_its_class(self) -> None:
        by_slab: dict[int, list[int]] = {}
        for stride, row in self.used:
            slab = self.slab.slab_of(stride, row)
            assert self.slab.owner(slab) == stride
            assert row in self.slab.rows_in_slab(slab)
            by_slab.setdefault(slab, []).append(row)
        for slab, rows in by_slab.items():
            assert self.slab.rows_used(slab) == sorted(rows)
            assert self.slab.used_in_slab(slab) == len(rows)

    @invariant()
    def bytes_are_conserved(self) -> None:
        space = self.slab.stats()
        usage = space.classes
        held = sum(line.bytes_used + line.bytes_free + line.bytes_lost for line in usage)
        assert held + space.bytes_unassigned == self.size
        assert all(line.bytes_lost >= 0 and line.slots_free >= 0 for line in usage)
        assert self.slab.bytes_used == sum(stride for stride, _ in self.used)
        assert self.slab.bytes_used == sum(line.bytes_used for line in usage)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    ("nbytes", "stride"),
    [(1, 64), (64, 64), (65, 128), (4095, 4096), (4096, 4096), (4097, 8192), (MIB + 1, MIB + 4096)],
)
def test_stride_by_length(nbytes: int, stride: int) -> None:
    assert natural_stride(nbytes) == stride
    assert SlabAllocator(8 * MIB).stride_of(nbytes) == stride


@pytest.mark.parametrize(
    ("size", "slab_bytes"),
    [
        (4 * KIB, 4 * KIB),
        (64 * KIB, 8 * KIB),
        (MIB, 128 * KIB),
        (8 * MIB, MIB),
        (GIB, 4 * MIB),
        (64 * GIB, 16 * MIB),
        (1000 * GIB, 64 * MIB),
    ],
)
def test_default_slab_bytes(size: int, slab_bytes: int) -> None:
    assert default_slab_bytes(size) == slab_bytes
    assert SlabAllocator(size).slab_bytes == slab_bytes


@given(nbytes=st.integers(1, 64 * MIB), size=st.integers(GIB, 3 * GIB))
@settings(max_examples=60, deadline=None)
def test_blocks_of_any_length_use_most_of_a_large_segment(nbytes: int, size: int) -> None:
    slab = SlabAllocator(size)
    stride = slab.stride_of(nbytes)
    promised = slab.capacity(nbytes)
    assert promised * stride >= size * 3 // 4
    if promised < 5_000:
        rows = slab.alloc(nbytes, promised + 1)
        assert len(rows) == promised
        assert all((row + 1) * stride <= size for row in rows)


def test_a_block_as_large_as_the_segment_works() -> None:
    slab = SlabAllocator(8 * MIB)
    assert slab.alloc(8 * MIB, 2) == [0]


def test_first_rows_are_neighbours_and_freed_ones_come_back_first() -> None:
    slab = SlabAllocator(8 * MIB)
    assert slab.alloc(4 * KIB, 8) == list(range(8))
    slab.free(4 * KIB, [5, 2, 6])
    assert slab.alloc(4 * KIB, 2) == [5, 2]
    assert slab.alloc(4 * KIB, 3) == [6, 8, 9]


def test_an_emptied_slab_serves_another_class_only_when_it_is_needed() -> None:
    slab = SlabAllocator(4 * MIB, slab_bytes=MIB)
    rows = slab.alloc(4 * KIB, 1024)
    assert len(rows) == 1024
    assert slab.alloc(64 * KIB, 1) == []
    slab.free(4 * KIB, [row for row in rows if slab.slab_of(4 * KIB, row) == 2])
    assert slab.owner(2) == 4 * KIB, "it stays while nobody else asks"
    assert len(slab.alloc(64 * KIB, 100)) == 16
    assert slab.owner(2) == 64 * KIB


def test_large_blocks_take_runs_of_slabs_and_give_them_back() -> None:
    slab = SlabAllocator(4 * MIB, slab_bytes=256 * KIB)
    small = slab.alloc(4 * KIB, 65)  # two slabs
    large = slab.alloc(MIB, 9)
    assert large == [3, 2, 1], "aligned, so the quarter with the small blocks is not whole"
    assert list(slab.victims(MIB)) == [(0, 1)]
    assert slab.rows_in_slab(4) == slab.rows_in_slab(7) == range(1, 2)
    slab.free(4 * KIB, small)
    assert slab.alloc(MIB, 1) == [0]
    slab.free(MIB, [2])
    assert slab.alloc(4 * KIB, 1) == [2 * 256]


def test_extents_with_retired_slots_are_no_victims() -> None:
    slab = SlabAllocator(4 * MIB, slab_bytes=256 * KIB)
    small = slab.alloc(4 * KIB, 1024)
    assert list(slab.victims(MIB)) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]
    slab.retire(4 * KIB, [small[5 * 64 + 1]])
    assert list(slab.victims(MIB)) == [(0, 1, 2, 3), (8, 9, 10, 11), (12, 13, 14, 15)]
    assert slab.victims_with(MIB, 4) == ()
    assert list(slab.victims(64 * KIB)) == [(at,) for at in range(16) if at != 5]
    assert slab.victims_with(64 * KIB, 4) == (4,)


def test_what_is_freed_between_two_claims_is_free_once() -> None:
    slab = SlabAllocator(8 * MIB)
    assert slab.claim(4 * KIB, np.array([1, 3, 5])).all()
    slab.free(4 * KIB, [3])
    assert slab.claim(4 * KIB, np.array([3, 4])).all(), "nobody else has had it"
    slab.free(4 * KIB, [5, 4])
    slab.claimed()
    rows = slab.alloc(4 * KIB, 2046)
    assert sorted([*rows, 1, 3]) == list(range(2048))
    assert slab.alloc(4 * KIB, 1) == []


def test_misuse_is_loud() -> None:
    slab = SlabAllocator(8 * MIB)
    rows = slab.alloc(4 * KIB, 3)
    with pytest.raises(AssertionError, match="no class"):
        slab.free(8 * KIB, [0])
    with pytest.raises(AssertionError, match="free already"):
        slab.free(4 * KIB, [100])
    with pytest.raises(AssertionError, match="free already"):
        slab.free(4 * KIB, [2000])
    with pytest.raises(AssertionError, match="not all in the segment"):
        slab.free(4 * KIB, [2048])
    with pytest.raises(AssertionError, match="not all in the segment"):
        slab.free(4 * KIB, [-1])
    with pytest.raises(AssertionError, match="free already"):
        slab.free(4 * KIB, [rows[0], rows[0]])
    with pytest.raises(AssertionError, match="in use"):
        slab.reclaim_slab(0)
    with pytest.raises(AssertionError, match="no class"):
        slab.reclaim_slab(5)
    with pytest.raises(AssertionError, match="in no slab"):
        slab.slab_of(4 * KIB, 2000)


def test_lengths_that_cannot_work_are_refused() -> None:
    slab = SlabAllocator(MIB)
    with pytest.raises(InvalidRequest, match="exceeds the segment"):
        slab.alloc(MIB + 1, 1)
    with pytest.raises(InvalidRequest, match="0 bytes"):
        slab.alloc(0, 1)
    with pytest.raises(ConfigError, match="power of two"):
        SlabAllocator(MIB, slab_bytes=100_000)
    with pytest.raises(ConfigError, match="at least"):
        SlabAllocator(100)
    with pytest.raises(ConfigError, match="larger"):
        SlabAllocator(1 << 40, slab_bytes=4096)


def test_after_the_last_class_lengths_share_or_are_refused() -> None:
    slab = SlabAllocator(16 * GIB, slab_bytes=4 * MIB)
    strides = [4 * KIB * (10 + 2 * i) for i in range(CLASSES_MAX)]
    for stride in strides:
        assert len(slab.alloc(stride, 1)) == 1
    assert slab.stride_of(strides[5] - 4 * KIB) == strides[5], "a little larger will do"
    with pytest.raises(LimitExceeded, match="block sizes"):
        slab.stride_of(4 * KIB)
    rows = slab.alloc(strides[5] - 4 * KIB, 3)
    assert len(rows) == 3
    slab.free(strides[5], rows)


def test_costs_do_not_depend_on_the_size_of_the_segment() -> None:
    """Rows of a slab are not listed one by one: 64 of them in 1 TiB cost no more than elsewhere."""
    slab = SlabAllocator(1 << 40)
    began = time.process_time()
    rows = slab.alloc(64, 64)
    slab.free(64, rows)
    assert time.process_time() - began < 1.0


def test_stats_tell_of_each_class() -> None:
    slab = SlabAllocator(8 * MIB)
    slab.alloc(12 * KIB, 2)
    stats = slab.stats()
    assert stats.bytes_used == 24 * KIB
    (line,) = stats.classes
    assert line.stride == 12 * KIB
    assert line.slots_used == 2
    assert line.bytes_lost == MIB - (MIB // (12 * KIB)) * 12 * KIB

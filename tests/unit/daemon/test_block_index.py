"""The indices of blocks against plain dictionaries and lists."""

from __future__ import annotations

import hashlib
import itertools
import random
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.daemon.core import block_index
from kvpool.daemon.core.block_index import BlockIndex, RowIndex

STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "drop"]), st.sets(st.integers(0, 300), max_size=40)),
    max_size=40,
)


def key(number: int) -> bytes:
    return b"%016d" % number


@pytest.mark.parametrize("moved_together", [1, 3, 1000])
@pytest.mark.parametrize("divide_at", [4, 32, 1000])
@settings(deadline=None)
@given(steps=STEPS, asked=st.lists(st.integers(0, 300), max_size=30))
def test_an_index_is_a_dictionary(
    divide_at: int, moved_together: int, steps: list[tuple[str, set[int]]], asked: list[int]
) -> None:
    class Index(BlockIndex[int]):
        DIVIDE_AT = divide_at
        CHECKED_EVERY = 1
        COMPACT_TOGETHER = moved_together

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_index, "COMPACT_BYTES", 0)  # each piece is moved at its turn
        patch.setattr(block_index, "COMPACT_SPARE", 0)
        index = Index()
        model: dict[bytes, int] = {}
        for step, numbers in steps:
            if step == "add":
                new = [key(number) for number in numbers if key(number) not in model]
                values = [int(one) for one in new]
                index.add(new, values)
                model.update(zip(new, values, strict=True))
            else:
                for number in numbers:
                    if key(number) in model:
                        del index[key(number)]
                        del model[key(number)]
            assert len(index) == len(model)
        keys = [key(number) for number in asked]
        here = [one in model for one in keys]
        assert index.present(keys) == [one in index for one in keys] == here
        assert index.found(keys) == [index.get(one) for one in keys] == list(map(model.get, keys))
        assert index.isdisjoint(keys) is not any(here)
        assert index.prefix_length(keys) == len(list(itertools.takewhile(bool, here)))
        those = [one for one in keys if one in model]
        assert index.all_of(those) == [index[one] for one in those] == [model[k] for k in those]
        assert sorted(index.values()) == sorted(model.values())
        assert sorted(index) == sorted(model)
        with pytest.raises(KeyError):
            del index[b"absent"]
        assert sorted(index.pop_any() for _ in range(len(model))) == sorted(model.values())
        assert len(index) == 0


def scattered(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()[:16]


def chosen(number: int) -> bytes:
    """A key from somebody who wants all of them in one piece."""
    return scattered(number)[:15] + b"\0"


@pytest.mark.parametrize("key_of", [scattered, chosen])
def test_no_put_copies_many_blocks(key_of: Callable[[int], bytes]) -> None:
    """Python copies a dictionary that grows: nobody waits for more than this many blocks."""

    class Index(BlockIndex[int]):
        DIVIDE_AT = 1 << 12
        CHECKED_EVERY = 8

    index = Index()
    rng = random.Random(3)
    resident: list[bytes] = []
    copied = 0
    tracemalloc.start()
    try:
        for start in range(0, 60_000, 64):
            new = [key_of(number) for number in range(start, start + 64)]
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            index.add(new, range(start, start + 64))
            copied = max(copied, tracemalloc.get_traced_memory()[1] - before)
            resident += new
            if len(resident) > 40_000:
                for _ in range(64):
                    at = rng.randrange(len(resident))
                    resident[at], resident[-1] = resident[-1], resident[at]
                    del index[resident.pop()]
    finally:
        tracemalloc.stop()
    assert copied < 100 * Index.DIVIDE_AT, "of all blocks a dictionary takes 1.3 MB"
    assert len(index) == len(resident)
    assert all(index.present(resident))


def test_room_for_nothing_is_given_back_a_little_at_a_time() -> None:
    """Copying an entry touches its block, which is in no cache: nobody waits for many of them."""

    class Index(BlockIndex[int]):
        DIVIDE_AT = 100
        COMPACT_TOGETHER = 500

    numbers = list(range(20_000))
    large = [chosen(number) for number in numbers]
    stays, staying = large[:4000], set(large[:4000])
    left = [len(stays)]

    def in_order() -> list[bytes]:
        return [key for key in index if key in staying]

    tracemalloc.start()
    try:
        index = Index()
        index.add([scattered(number) for number in range(128)], range(128))
        Index.DIVIDE_AT = 1 << 20
        index.add(large, numbers)
        index.remove(large[4000:])
        roomy, _ = tracemalloc.get_traced_memory()
        at_first = in_order()
        for first in range(1 << 20, (1 << 20) + (1 << 15), 64):
            new = [scattered(number) for number in range(first, first + 64)]
            index.add(new, range(64))
            index.remove(new)
            # An entry that was moved has another place among all.
            pairs = enumerate(zip(in_order(), at_first, strict=True))
            left.append(next((at for at, (one, other) in pairs if one != other), len(stays)))
            assert index.found(stays) == numbers[:4000]
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < roomy / 2
    moved = [before - after for before, after in itertools.pairwise(left)]
    assert 0 < max(moved) <= Index.COMPACT_TOGETHER
    assert left[-1] == 0
    assert index.found(large) == [*numbers[:4000], *[None] * 16_000]


def test_an_empty_key_is_nowhere() -> None:
    index: BlockIndex[int] = BlockIndex()
    assert index.get(b"") is None
    index.add([scattered(n) for n in range(40_000)], range(40_000))
    assert index.get(b"") is None


@given(
    steps=st.lists(
        st.tuples(st.booleans(), st.sets(st.integers(0, 20_000), min_size=1, max_size=20)),
        max_size=20,
    ),
    ends=st.lists(st.tuples(st.integers(0, 20_100), st.integers(0, 20_100)), max_size=8),
)
def test_rows_are_a_list(steps: list[tuple[bool, set[int]]], ends: list[tuple[int, int]]) -> None:
    rows: RowIndex[int] = RowIndex()
    model: dict[int, int] = {}
    highest = -1
    for put, chosen in steps:
        if put:
            rows.put(sorted(chosen), sorted(chosen))
            model.update((row, row) for row in chosen)
            highest = max(highest, *chosen)
        else:
            for row in chosen & model.keys():
                rows.clear([row])
                del model[row]
    assert len(rows) == highest + 1
    for first, end in [*ends, (0, 30_000)]:
        assert rows.between(first, end) == [row for row in sorted(model) if first <= row < end]

"""What an engine is said to hold, and the keys behind it: against plain models."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.placement.kv_events.engine_blocks import (
    CERTAIN_RUN_MIN,
    GROUPS_MAX,
    Changes,
    EngineBlocks,
    SeenKeys,
    short_hash,
)
from kvpool.types import PartKind, PartSpec

GROUPS = [0, 1]
KEYS = [hashlib.sha256(bytes([i])).digest()[16:] for i in range(12)]
FULL = PartSpec(nbytes=1)
WINDOW = PartSpec(nbytes=1, kind=PartKind.WINDOW, window_blocks=2)

hashes = st.lists(st.integers(0, len(KEYS) - 1), min_size=1, max_size=4, unique=True)
events = st.lists(
    st.one_of(
        st.tuples(st.just("stored"), st.sampled_from(GROUPS), hashes),
        st.tuples(st.just("removed"), st.sampled_from(GROUPS), hashes),
        st.tuples(st.just("cleared"), st.just(0), st.just([])),
        st.tuples(st.just("taken"), st.integers(1, 3), st.just([])),
    ),
    max_size=40,
)


class Reader:
    """Does what `Changes` says."""

    def __init__(self) -> None:
        self.masks: dict[int, int] = {}

    def take(self, changes: Changes) -> None:
        if changes.reset:
            self.masks.clear()
        for each, mask in zip(changes.hashes, changes.masks, strict=True):
            self.masks[each] = mask
            if not mask:
                del self.masks[each]


def plain_prefix(held: dict[int, set[bytes]], keys: list[bytes]) -> int:
    """By the definition: group 0 needs all blocks, group 1 the last two."""
    return max(
        n
        for n in range(len(keys) + 1)
        if set(keys[:n]) <= held[0] and set(keys[max(0, n - 2) : n]) <= held[1]
    )


def test_short_hashes_are_the_low_bits_of_the_engines() -> None:
    for seed in range(100):
        whole = hashlib.sha256(bytes([seed])).digest()
        engines = int.from_bytes(whole, "big") & ((1 << 64) - 1)
        assert short_hash(whole[16:]) == short_hash(whole) == engines


@given(events)
def test_it_holds_what_an_engine_holds(program: list[tuple[str, int, list[int]]]) -> None:
    """An engine that holds copies, and tells of each of them."""
    blocks, reader = EngineBlocks(), Reader()
    blocks.clear(complete=True)
    copies: Counter[tuple[int, bytes]] = Counter()
    for kind, group, numbers in program:
        keys = [KEYS[number] for number in numbers]
        if kind == "stored":
            copies.update((group, key) for key in keys)
            blocks.stored(group, [short_hash(key) for key in keys])
        elif kind == "removed":
            there = [key for key in keys if copies[group, key]]
            copies.subtract((group, key) for key in there)
            blocks.removed(group, [short_hash(key) for key in there])
        elif kind == "cleared":
            copies.clear()
            blocks.clear(complete=True)
        else:
            reader.take(blocks.take_changes(group))
        held = {g: {key for key in KEYS if copies[g, key]} for g in GROUPS}
        assert len(blocks) == sum(map(len, held.values()))
        assert blocks.masks(KEYS) == [sum(1 << g for g in GROUPS if key in held[g]) for key in KEYS]
        assert blocks.usable({0: FULL, 1: WINDOW}, KEYS) == plain_prefix(held, KEYS)
    while blocks.has_changes:
        changes = blocks.take_changes(2)
        assert len(changes.hashes) <= 2
        reader.take(changes)
    expected = {short_hash(k): m for k, m in zip(KEYS, blocks.masks(KEYS), strict=True) if m}
    assert reader.masks == expected
    assert blocks.complete


def test_a_group_that_was_never_heard_of_holds_nothing() -> None:
    blocks = EngineBlocks()
    blocks.stored(0, [short_hash(KEYS[0])])
    assert blocks.usable({0: FULL}, KEYS) == 1
    assert blocks.usable({0: FULL, 1: FULL}, KEYS) == 0


def test_longer_blocks_are_asked_for_by_the_key_of_their_end() -> None:
    blocks = EngineBlocks()
    blocks.stored(0, [short_hash(KEYS[1]), short_hash(KEYS[3])])
    assert blocks.usable({0: PartSpec(nbytes=1, stride=2)}, KEYS) == 4


def test_removals_of_what_is_not_known_change_nothing() -> None:
    blocks = EngineBlocks()
    blocks.removed(3, [1, 2])
    assert len(blocks) == 0
    assert not blocks.has_changes


def test_what_was_missed_is_taken_for_gone_after_many_removals_that_were_known() -> None:
    blocks = EngineBlocks()
    blocks.clear(complete=False)
    blocks.stored(0, range(CERTAIN_RUN_MIN + 10))
    blocks.removed(0, range(CERTAIN_RUN_MIN - 1))
    assert not blocks.complete
    blocks.removed(0, [1 << 40])
    blocks.removed(0, range(CERTAIN_RUN_MIN - 1, CERTAIN_RUN_MIN + 1))
    assert not blocks.complete  # the row was broken
    blocks.stored(0, range(1000, 1000 + CERTAIN_RUN_MIN))
    blocks.removed(0, range(1000, 1000 + CERTAIN_RUN_MIN - 2))
    assert blocks.complete


def test_many_removals_are_not_enough_where_more_is_held() -> None:
    blocks = EngineBlocks()
    blocks.clear(complete=False)
    blocks.stored(0, range(10 * CERTAIN_RUN_MIN))
    blocks.removed(0, range(4 * CERTAIN_RUN_MIN))
    assert not blocks.complete
    blocks.removed(0, range(4 * CERTAIN_RUN_MIN, 5 * CERTAIN_RUN_MIN))
    assert blocks.complete


def test_there_is_a_limit_of_blocks() -> None:
    blocks = EngineBlocks(blocks_max=3)
    blocks.clear(complete=True)
    blocks.stored(0, [1, 2])
    blocks.stored(1, [1, 5])
    assert (len(blocks), blocks.refused, blocks.complete) == (3, 1, False)
    blocks.stored(0, [1])  # one more copy needs no room
    assert blocks.refused == 1
    blocks.removed(1, [1])
    blocks.stored(1, [5])
    assert len(blocks) == 3


@pytest.mark.parametrize("group", [-1, GROUPS_MAX])
def test_there_is_a_limit_of_groups(group: int) -> None:
    blocks = EngineBlocks()
    blocks.clear(complete=True)
    blocks.stored(group, [1, 2])
    assert (len(blocks), blocks.refused, blocks.complete) == (0, 2, False)


def test_changes_that_nobody_takes_do_not_pile_up() -> None:
    blocks, reader = EngineBlocks(blocks_max=4), Reader()
    blocks.stored(0, [1, 2])
    reader.take(blocks.take_changes(10))
    blocks.removed(0, [1])
    for each in range(100, 200):
        blocks.stored(0, [each])
        blocks.removed(0, [each])
    changes = blocks.take_changes(1000)
    assert changes.reset
    assert len(changes.hashes) <= 2 * 4 + 1
    reader.take(changes)
    assert reader.masks == {2: 1}


@given(st.lists(st.lists(st.sampled_from(KEYS), max_size=5), max_size=20), st.integers(1, 14))
def test_seen_keys_are_those_seen_last(batches: list[list[bytes]], limit: int) -> None:
    seen = SeenKeys(limit)
    added: list[bytes] = []  # in the order of being remembered
    for keys in batches:
        expected = [key for i, key in enumerate(keys) if key not in added + keys[:i]]
        new = seen.add(b"".join(keys))
        assert list(new.items()) == [(short_hash(key), key) for key in expected]
        added = (added + expected)[-limit:]
        assert len(seen) == len(added)
        found = list(seen.keys_of(map(short_hash, KEYS)))
        assert found == [key if key in added else None for key in KEYS]


def test_of_two_keys_with_one_short_hash_one_is_remembered() -> None:
    one, other = b"a" * 8 + b"x" * 8, b"b" * 8 + b"x" * 8
    seen = SeenKeys(10)
    assert seen.add(one) == {short_hash(one): one}
    assert seen.add(other + other) == {}
    assert list(seen.keys_of([short_hash(other)])) == [one]

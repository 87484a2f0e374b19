"""Expendable entries against lists: they go first, in their order, and the policy behind sees the rest."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.storage.eviction import POLICIES, policy_maker
from kvpool.storage.expendable import expendable_first
from tests.unit.storage.test_eviction import Entry, drain, entries

BLOCKS = 12


class Model:
    """Over LRU. Both lists: the next victim first."""

    def __init__(self) -> None:
        self.expendable: list[int] = []
        self.ordinary: list[int] = []

    @property
    def order(self) -> list[int]:
        return self.expendable + self.ordinary

    def insert(self, blocks: list[int]) -> None:
        self.ordinary += reversed([block for block in blocks if block not in self.order])

    def put_back(self, blocks: list[int]) -> None:
        for block in blocks:
            if block not in self.order:
                self.ordinary.insert(0, block)

    def touch(self, blocks: list[int]) -> None:
        held = [block for block in blocks if block in self.order]
        self.discard(blocks)
        self.ordinary += reversed(held)

    def refresh(self, blocks: list[int]) -> None:
        held = [block for block in blocks if block in self.ordinary]
        self.ordinary = [block for block in self.ordinary if block not in blocks]
        self.ordinary += reversed(held)

    def discard(self, blocks: list[int]) -> None:
        self.expendable = [block for block in self.expendable if block not in blocks]
        self.ordinary = [block for block in self.ordinary if block not in blocks]

    def expend(self, blocks: list[int]) -> None:
        self.expendable += [block for block in blocks if block in self.ordinary]
        self.ordinary = [block for block in self.ordinary if block not in blocks]

    def take(self, n: int) -> list[int]:
        gone = self.order[:n]
        self.discard(gone)
        return gone


some = st.lists(st.integers(0, BLOCKS - 1), unique=True, min_size=1, max_size=6)
doing = st.sampled_from(["insert", "put_back", "touch", "refresh", "discard", "expend"])
steps = st.lists(st.tuples(doing, some) | st.tuples(st.just("take"), st.integers(0, 5)))


@given(steps)
@settings(max_examples=300)
def test_against_lists(done: list[tuple[str, Any]]) -> None:
    policy, model = expendable_first(policy_maker("lru"))(BLOCKS), Model()
    all_of = entries(*range(BLOCKS))
    for what, which in done:
        if what == "take":
            assert [entry.block for entry in policy.take(which)] == model.take(which)
        else:
            chosen = [all_of[block] for block in which]
            if what in ("insert", "put_back"):
                chosen = [entry for entry in chosen if not entry.queue]
            getattr(policy, what)(chosen)
            getattr(model, what)(which)
        assert len(policy) == len(model.order)
        assert policy.expendable == len(model.expendable)
        assert [entry.block for entry in policy.coldest(5)] == model.order[:5]
        assert _block(policy.peek()) == next(iter(model.order), None)
    assert drain(policy) == model.order


def _block(entry: Entry | None) -> int | None:
    return None if entry is None else entry.block


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_has_back_what_was_read(name: str) -> None:
    policy = expendable_first(policy_maker(name))(BLOCKS)
    kept = entries(*range(6))
    policy.insert(kept)
    assert policy.expend(kept[3:]) == 3
    policy.touch(kept[4:5])
    assert policy.expendable == 2
    assert [entry.block for entry in policy.take(2)] == [3, 5], (
        "in the order in which they became so"
    )
    assert sorted(drain(policy)) == [0, 1, 2, 4]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_entries_that_are_named_twice_are_there_once(name: str) -> None:
    policy = expendable_first(policy_maker(name))(BLOCKS)
    kept = entries(*range(4))
    policy.insert(kept)
    assert policy.expend([kept[2], kept[3], kept[2]]) == 2
    policy.touch([kept[2], kept[2]])
    policy.discard([kept[3], kept[3]])
    assert policy.expendable == 0
    assert sorted(drain(policy)) == [0, 1, 2]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_without_expendable_entries_nothing_is_different(name: str) -> None:
    plain: Any = policy_maker(name)(BLOCKS)
    first = expendable_first(policy_maker(name))(BLOCKS)
    for policy in (plain, first):
        held = entries(*range(BLOCKS))
        policy.insert(held)
        policy.touch(held[:4])
        policy.refresh(held[6:8])
        policy.discard(held[8:9])
    assert [entry.block for entry in first.coldest(4)] == [e.block for e in plain.coldest(4)]
    assert drain(first) == drain(plain)

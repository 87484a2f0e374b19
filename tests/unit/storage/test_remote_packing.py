"""Blocks that wait for a pack, against a plain list of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.errors import InvalidRequest
from kvpool.storage.remote_packing import Packer

steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from("ab"), st.integers(1, 60)),
        st.tuples(st.just("pass"), st.just(""), st.integers(0, 7)),
    ),
    max_size=60,
)


@given(steps)
def test_every_block_leaves_once_in_time_and_in_order(todo: list[tuple[str, str, int]]) -> None:
    packer: Packer[str, int] = Packer(pack_bytes=100, age_s=5.0, bytes_max=150)
    waiting: list[tuple[str, int, int, float]] = []  # table, item, bytes, when
    now = 0.0

    def leaves(table: str, items: list[int]) -> None:
        mine = [entry for entry in waiting if entry[0] == table]
        assert items == [entry[1] for entry in mine]
        waiting[:] = [entry for entry in waiting if entry[0] != table]

    for number, (what, table, amount) in enumerate(todo):
        if what == "pass":
            now += amount
            for found, items in packer.due(now):
                assert min(entry[3] for entry in waiting if entry[0] == found) <= now - 5.0
                leaves(found, items)
            assert all(entry[3] > now - 5.0 for entry in waiting)
        else:
            full = sum(entry[2] for entry in waiting) + amount > 150
            packed = packer.add(table, number, amount, now)
            assert (packed is None) == full
            if packed is not None:
                waiting.append((table, number, amount, now))
                enough = sum(entry[2] for entry in waiting if entry[0] == table) >= 100
                assert bool(packed) == enough
                if packed:
                    leaves(table, packed)
        assert packer.bytes_waiting == sum(entry[2] for entry in waiting)
        oldest = min((entry[3] for entry in waiting), default=None)
        assert packer.due_at() == (None if oldest is None else oldest + 5.0)


def test_what_waits_holds_at_least_a_pack() -> None:
    with pytest.raises(InvalidRequest):
        Packer(pack_bytes=100, age_s=1.0, bytes_max=99)

"""Blocks that are there again after a restart, against a plain model: byte ranges in a dictionary."""

from __future__ import annotations

from array import array
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.daemon.core.blocks import NamespaceState
from kvpool.daemon.core.limits import Limits
from kvpool.daemon.core.node import Node
from kvpool.errors import PoolFull
from kvpool.storage.eviction import policy_maker
from kvpool.types import PartSpec, split_keys
from kvpool.wire.frame import NO_ROW

PAGE = 4096
PARTS = (PartSpec(PAGE), PartSpec(3 * PAGE), PartSpec(5 * PAGE))


class Life:
    """One life of the rules over a segment."""

    def __init__(self, pages: int) -> None:
        self.size = pages * PAGE
        self.node = Node(
            make_policy=policy_maker("lru"),
            limits=Limits(reserved_share_per_holder=1.0),
        )
        self.tenant = self.node.add_tenant("red", 0, self.size)
        self.holder = self.node.holders.add("red", "")
        self.namespace: NamespaceState = self.node.namespaces.open(
            self.tenant, bytes(16), b"{}", PARTS
        )
        self.tickets = 0

    def put(self, part: int, numbers: list[int]) -> list[int]:
        """The rows that these got; fewer than numbers, or none, when there is no room."""
        self.tickets += 1
        packed = b"".join(number.to_bytes(16, "big") for number in numbers)
        try:
            _, rows = self.node.puts.reserve(
                self.holder, self.namespace, part, self.tickets, split_keys(packed)
            )
        except PoolFull:
            return []
        if self.tickets not in self.holder.reservations:
            return []
        taken = [row for row in array("I", rows) if row != NO_ROW]
        self.node.puts.commit(self.holder, self.tickets, bytes(16 * len(taken)))
        self.node.settle()
        return taken

    def blocks(self) -> dict[tuple[int, bytes], int]:
        """(part, key) → row"""
        self.node.settle()
        return {
            (table.part, block.key): block.row
            for table in self.namespace.tables
            for block in table.blocks.values()
        }

    def check(self) -> None:
        """No two blocks share a byte, all lie inside, and what is in use is what they take."""
        stride = [table.stride for table in self.namespace.tables]
        held = [
            (row * stride[part], (row + 1) * stride[part])
            for (part, _), row in self.blocks().items()
        ]
        for (_, end), (start, _) in pairwise(sorted(held)):
            assert end <= start
        assert all(start >= 0 and end <= self.size for start, end in held)
        assert self.tenant.allocator.bytes_used == sum(end - start for start, end in held)

    def restore(self, entries: dict[tuple[int, bytes], int], chunk: int) -> set[tuple[int, bytes]]:
        restored: set[tuple[int, bytes]] = set()
        for part in range(len(PARTS)):
            mine = [(key, row) for (p, key), row in entries.items() if p == part]
            for at in range(0, len(mine), chunk):
                some = mine[at : at + chunk]
                keys = [key for key, _ in some]
                rows = np.array([row for _, row in some], dtype=np.int64)
                sums = [bytes(16)] * len(some)
                good = self.node.puts.restore(
                    self.namespace, part, keys, [b""] * len(some), range(len(some)), rows, sums
                )
                restored |= {(part, key) for key, fine in zip(keys, good, strict=True) if fine}
        self.node.puts.restored()
        return restored


PUTS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.lists(st.integers(0, 60), min_size=1, max_size=12, unique=True),
        st.booleans(),
    ),
    max_size=25,
)


def live(life: Life, puts: list[tuple[int, list[int], bool]]) -> None:
    for part, numbers, remove in puts:
        if remove:
            packed = b"".join(number.to_bytes(16, "big") for number in numbers)
            life.node.removal.remove(life.namespace, split_keys(packed))
        else:
            life.put(part, numbers)
        life.check()


@given(st.integers(16, 96), PUTS, PUTS, st.sampled_from((1, 3, 1000)))
@settings(deadline=None)
def test_a_life_goes_on_where_the_last_one_ended(
    pages: int,
    before: list[tuple[int, list[int], bool]],
    after: list[tuple[int, list[int], bool]],
    chunk: int,
) -> None:
    first = Life(pages)
    live(first, before)
    second = Life(pages)
    restored = second.restore(first.blocks(), chunk)
    assert restored == set(first.blocks())
    assert second.blocks() == first.blocks()
    second.check()
    live(second, after)


@given(st.integers(16, 96), st.integers(16, 96), PUTS, PUTS)
@settings(deadline=None)
def test_a_segment_of_another_size_keeps_what_has_its_place(
    pages: int,
    later: int,
    before: list[tuple[int, list[int], bool]],
    after: list[tuple[int, list[int], bool]],
) -> None:
    first = Life(pages)
    live(first, before)
    second = Life(later)
    restored = second.restore(first.blocks(), 4)
    kept = second.blocks()
    assert set(kept) == restored
    assert all(first.blocks()[name] == row for name, row in kept.items())
    second.check()
    live(second, after)


@given(
    st.integers(16, 64),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(-3, 80)), max_size=40),
    PUTS,
)
@settings(deadline=None)
def test_entries_that_cannot_all_be_true_never_share_a_byte(
    pages: int, wild: list[tuple[int, int, int]], after: list[tuple[int, list[int], bool]]
) -> None:
    life = Life(pages)
    claimed = []
    for part, number, row in wild:
        keys = [number.to_bytes(16, "big")]
        good = life.node.puts.restore(
            life.namespace, part, keys, [b""], [0], np.array([row]), [bytes(16)]
        )
        if good[0]:
            claimed.append((part, keys[0], row))
    life.node.puts.restored()
    assert life.blocks() == {(part, key): row for part, key, row in claimed}
    life.check()
    live(life, after)


@given(st.integers(16, 96), PUTS)
@settings(deadline=None)
def test_all_that_is_left_free_can_be_had(
    pages: int, before: list[tuple[int, list[int], bool]]
) -> None:
    """As many of one size as in the life that did not end, without anything being given up for them."""
    first = Life(pages)
    live(first, before)
    second = Life(pages)
    second.restore(first.blocks(), 1000)
    for part, table in enumerate(second.namespace.tables):
        nbytes = PARTS[part].nbytes
        rows = second.tenant.allocator.alloc(nbytes, 1000)
        others = first.tenant.allocator.alloc(nbytes, 1000)
        assert len(rows) >= len(others)
        second.tenant.allocator.free(table.stride, rows)
        first.tenant.allocator.free(table.stride, others)


def test_of_one_key_the_last_counts_in_a_call_and_the_first_between_calls() -> None:
    life = Life(16)
    name = bytes(15) + b"a"
    rows = np.array([3, 5])
    good = life.node.puts.restore(
        life.namespace, 0, [name, name], [b"", b""], [0, 1], rows, [bytes(16)] * 2
    )
    assert good.tolist() == [False, True]
    again = life.node.puts.restore(
        life.namespace, 0, [name], [b""], [0], np.array([6]), [bytes(16)]
    )
    assert again.tolist() == [False]
    life.node.puts.restored()
    assert life.blocks() == {(0, name): 5}
    assert life.namespace.tables[0].blocks[name].depth == 1
    life.check()

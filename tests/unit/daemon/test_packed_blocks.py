"""Packed blocks against plain dictionaries, lists and `Block` objects.

The rules of a node are run with blocks of both kinds elsewhere (`test_node.py`, `test_node_machine.py`).
"""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.daemon.core import packed_blocks
from kvpool.daemon.core.blocks import Block, NamespaceState, Origin, PartTable
from kvpool.daemon.core.node import Node
from kvpool.daemon.core.packed_blocks import PackedBlock, PackedBlocks, PackedTable
from kvpool.storage.eviction import POLICIES, policy_maker
from kvpool.storage.eviction_queue import EvictionQueue
from kvpool.types import PartSpec

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "drop"]),
        st.integers(0, 1),
        st.sets(st.integers(0, 300), max_size=60),
    ),
    max_size=30,
)


def key(number: int) -> bytes:
    return b"%016d" % number


def some_tables() -> list[PartTable]:
    node = Node(make_policy=policy_maker("lru"), packed=True)
    tenant = node.add_tenant("red", 0, 1 << 20)
    parts = (PartSpec(64), PartSpec(64))
    namespace: NamespaceState = node.namespaces.open(tenant, b"n" * 16, b"{}", parts)
    return namespace.tables


def enter(
    columns: PackedBlocks,
    table: PartTable,
    keys: Sequence[bytes],
    rows: Sequence[int],
    tick: int = 1,
) -> list[Block]:
    return columns.enter(table, keys, rows, [b"", *keys[:-1]], range(len(keys)), tick)


@pytest.mark.parametrize("places_bits", [2, 5, 10])
@settings(deadline=None)
@given(steps=STEPS, asked=st.lists(st.integers(0, 300), max_size=30))
def test_a_table_is_a_dictionary(
    places_bits: int, steps: list[tuple[str, int, set[int]]], asked: list[int]
) -> None:
    # Pages of four places have overfull ones.
    tables = some_tables()
    columns = PackedBlocks(640, places_bits)
    free = list(range(640))
    models: list[dict[bytes, int]] = [{}, {}]
    for step, at, numbers in steps:
        table, model = tables[at], models[at]
        if step == "add":
            new = [key(number) for number in sorted(numbers) if key(number) not in model]
            rows = [free.pop(random.Random(len(free)).randrange(len(free))) for _ in new]
            if new:
                assert [block.key for block in enter(columns, table, new, rows)] == new
            model.update(zip(new, rows, strict=True))
        else:
            for number in numbers & set(range(0, 301, 2)) | {max(numbers, default=0)}:
                row = model.pop(key(number), -1)
                if row >= 0:
                    assert table.blocks[key(number)].row == row
                    del table.blocks[key(number)]
                    columns.clear([row])
                    free.append(row)
        assert len(table.blocks) == len(model)
        assert len(columns.index) == sum(map(len, models))
    keys = [key(number) for number in asked]
    for table, model in zip(tables, models, strict=True):
        index = table.blocks
        here = [one in model for one in keys]
        assert index.present(keys) == [one in index for one in keys] == here
        assert [b and b.row for b in index.found(keys)] == list(map(model.get, keys))
        assert index.isdisjoint(keys) is not any(here)
        assert index.prefix_length(keys) == next(
            (n for n, yes in enumerate(here) if not yes), len(keys)
        )
        those = [one for one in keys if one in model]
        assert [block.row for block in index.all_of(those)] == [model[one] for one in those]
        assert sorted(block.row for block in index.values()) == sorted(model.values())
        assert sorted(index) == sorted(model)
        with pytest.raises(KeyError):
            del index[b"absent" + bytes(10)]
    held = {row: key for model in models for key, row in model.items()}
    assert {block.row: block.key for block in columns.between(0, 640)} == held
    for table, model in zip(tables, models, strict=True):
        gone = []
        for _ in range(len(model)):
            block = table.blocks.pop_any()
            gone.append(block.row)
            columns.clear([block.row])
        assert sorted(gone) == sorted(model.values())
        assert not table.blocks
    assert not columns.tables and not columns.between(0, 640)


def test_pages_are_divided_one_at_a_time_up_to_what_all_rows_need() -> None:
    rows = 60_000
    (table, _) = some_tables()
    columns = PackedBlocks(rows)
    index = columns.index
    page = 1 << packed_blocks.PLACES_BITS
    pages = []
    for first in range(0, rows, 500):
        keys = [random.Random(number).randbytes(16) for number in range(first, first + 500)]
        enter(columns, table, keys, range(first, first + 500))
        pages.append(index._pages)
    places = page * index._pages_max
    assert pages[-1] == index._pages_max
    assert rows / places == pytest.approx(packed_blocks.FULL, rel=0.1)
    assert max(b - a for a, b in itertools.pairwise(pages)) <= 500 / (0.44 * page) + 1
    assert len(index._overfull) < rows / 1000
    assert len(index) == len(table.blocks) == rows


def test_places_are_used_again_in_steady_churn() -> None:
    (table, _) = some_tables()
    columns = PackedBlocks(2000, 6)
    chance = random.Random(1)
    keys = [chance.randbytes(16) for _ in range(2000)]
    enter(columns, table, keys, range(2000))
    pages = columns.index._pages
    for _ in range(30):
        for row in chance.sample(range(2000), 500):
            table.blocks.remove([keys[row]])
            columns.clear([row])
            keys[row] = chance.randbytes(16)
            enter(columns, table, [keys[row]], [row])
    assert columns.index._pages == pages
    assert [block.row for block in table.blocks.all_of(keys)] == list(range(2000))
    assert table.blocks.isdisjoint([chance.randbytes(16) for _ in range(2000)])


def test_a_page_that_is_full_of_others_is_searched_to_its_end_and_no_further(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is chosen to fall together is found all the same, and so is what comes after it."""
    monkeypatch.setattr(packed_blocks, "hash_of", lambda _: 77)
    (table, other) = some_tables()
    columns = PackedBlocks(64, 3)
    keys = [key(number) for number in range(20)]
    enter(columns, table, keys, range(20))
    enter(columns, other, keys[:2], range(20, 22))
    assert [block.row for block in table.blocks.all_of(keys)] == list(range(20))
    assert [block.row for block in other.blocks.all_of(keys[:2])] == [20, 21]
    table.blocks.remove(keys[::2])
    assert table.blocks.present(keys) == [False, True] * 10
    assert other.blocks.present(keys) == [True, True] + [False] * 18


def test_a_view_has_all_that_a_block_has() -> None:
    ours = {name for name, _ in inspect.getmembers(PackedBlock) if not name.startswith("_")}
    theirs = {name for name, _ in inspect.getmembers(Block) if not name.startswith("_")}
    # Of blocks in memory: what lower tiers have of them, or are to think of them.
    written_elsewhere = {"written", "kept", "left"}
    linked_elsewhere = {"older", "newer"}  # the columns of `PackedQueue`
    assert theirs - ours == written_elsewhere | linked_elsewhere


def test_what_is_set_is_read() -> None:
    (table, other) = some_tables()
    columns = PackedBlocks(8)
    (first, second) = enter(columns, table, [key(1), key(2)], [3, 5], tick=1 << 33)
    assert (first.table, first.key, first.row, first.depth) == (table, key(1), 3, 0)
    assert (second.depth, second.put, second.used, second.freq, second.queue) == (
        *(1, 1 << 33, 1 << 33),
        *(0, 0),
    )
    assert (first.leases, first.pin, first.origin) == (0, 0, Origin())
    second.freq, second.queue, second.pin, second.leases = -1, 2, 1, 3
    second.used = (1 << 33) + 7
    second.origin = Origin(secondary=True, hops=2, replicas=3)
    assert (second.freq, second.queue, second.pin, second.leases) == (-1, 2, 1, 3)
    assert second.used > second.put > first.put - 1
    assert (second.secondary, second.hops, second.replicas) == (True, 2, 3)
    second.freq = 1 << 35
    assert second.freq == 1 << 35
    again = table.blocks[key(2)]
    assert again == second and hash(again) == hash(second) and again != first
    assert (again.used, again.pin) == (second.used, 1)
    second.leases = 0
    del table.blocks[key(2)]
    assert not second.is_here()
    columns.clear([5])
    enter(columns, other, [key(9)], [5])
    (there,) = columns.between(5, 6)
    assert (there.table, there.pin, there.queue, there.leases, there.freq) == (other, 0, 0, 0, 0)
    assert there.used == there.put == 1 and there.origin == Origin()
    (deep,) = columns.enter(other, [key(10)], [6], [key(9)], [1 << 30], 1)
    assert deep.depth == packed_blocks.DEPTH_MAX
    # As the same block has it in every process.
    assert there.ident == Block(other, key(9), 0, b"", 0, 0, 0).ident


def test_a_parent_is_known_while_it_is_in_the_table() -> None:
    (table, other) = some_tables()
    columns = PackedBlocks(8)
    enter(columns, table, [key(2)], [0])
    columns.enter(table, [key(3)], [1], [key(2)], [1], 1)
    columns.enter(other, [key(4)], [2], [key(3)], [2], 1)
    first, child, elsewhere = columns.between(0, 3)
    assert first.parent_known and first.parent == b""
    assert child.parent_known and child.parent == key(2)
    assert not elsewhere.parent_known and elsewhere.parent == b""
    del table.blocks[key(2)]
    columns.clear([0])
    assert not child.parent_known and child.parent == b""
    # It may come after its child: the cold end of a chain is written to a disk first.
    enter(columns, table, [key(2)], [4])
    assert child.parent_known and child.parent == key(2)


def test_blocks_that_are_gone_are_not_among_those_of_the_table() -> None:
    (table, _) = some_tables()
    columns = PackedBlocks(8)
    blocks = enter(columns, table, [key(1), key(2)], [0, 1])
    blocks[0].leases = 1
    del table.blocks[key(1)]
    blocks[0].go()
    assert [block.key for block in table.blocks.values()] == [key(2)]
    assert [block.key for block in columns.between(0, 8)] == [key(1), key(2)]
    assert table.blocks.pop_any().key == key(2)
    assert not table.blocks
    columns.clear([1])
    assert blocks[0].table is table and blocks[0].key == key(1)  # until its slot is freed
    blocks[0].leases = 0
    columns.clear([0])
    assert not columns.tables


def test_the_ends_of_a_search_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_blocks, "SCANNED", 4)
    (table, other) = some_tables()
    columns = PackedBlocks(64)
    enter(columns, other, [key(50)], [1])
    enter(columns, table, [key(1), key(2), key(3)], [4, 5, 40])
    first = table.blocks.pop_any()
    columns.clear([first.row])
    table.blocks.remove([key(1) if first.key == key(2) else key(2)])  # evicted meanwhile
    columns.clear([4 if first.row == 5 else 5])
    assert table.blocks.pop_any().key == key(3)
    with pytest.raises(AssertionError):
        table.blocks.pop_any()


class _Entry:
    def __init__(self, row: int) -> None:
        self.row = row
        self.older: Any = None
        self.newer: Any = None


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["append", "first", "remove", "renew", "pop", "take", "give"]),
        st.integers(0, 1),
        st.lists(st.integers(0, 19), unique=True, min_size=1, max_size=6),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(operations=OPERATIONS)
def test_a_queue_of_rows_is_a_queue_of_entries(
    operations: list[tuple[str, int, list[int]]],
) -> None:
    columns = PackedBlocks(20)
    packed = [columns.new_queue(), columns.new_queue()]
    linked = [EvictionQueue(), EvictionQueue()]
    blocks = [columns.block(row) for row in range(20)]
    entries = [_Entry(row) for row in range(20)]
    held: dict[int, int] = {}  # which queue
    for operation, at, rows in operations:
        ours, theirs = packed[at], linked[at]
        mine = [row for row in rows if held.get(row) == at]
        free = [row for row in rows if row not in held]
        foreign = [row for row in rows if held.get(row, at) != at]
        match operation:
            case "append":
                ours.append([blocks[row] for row in free])
                theirs.append([entries[row] for row in free])
                held.update(dict.fromkeys(free, at))
            case "first":
                for row in free:
                    ours.put_first(blocks[row])
                    theirs.put_first(entries[row])
                    held[row] = at
            case "remove":
                ours.remove([blocks[row] for row in mine])
                theirs.remove([entries[row] for row in mine])
                for row in mine:
                    del held[row]
            case "renew":
                ours.renew([blocks[row] for row in mine])
                theirs.renew([entries[row] for row in mine])
            case "give":
                packed[1 - at].give(ours, len(foreign))
                linked[1 - at].give(theirs, len(foreign))
                ours.renew([blocks[row] for row in foreign])
                theirs.renew([entries[row] for row in foreign])
                held.update(dict.fromkeys(foreign, at))
            case "pop":
                one, other = ours.pop(), theirs.pop()
                assert (one and one.row) == (other and other.row)
                if one is not None:
                    del held[one.row]
            case "take":
                found = [block.row for block in ours.take(len(rows))]
                assert found == [entry.row for entry in theirs.take(len(rows))]
                for row in found:
                    del held[row]
        for one, other in zip(packed, linked, strict=True):
            assert len(one) == one.length == len(other)
            assert [b.row for b in one.oldest(99)] == [e.row for e in other.oldest(99)]
            first, second = one.peek(), other.peek()
            assert (first and first.row) == (second and second.row)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_policy_evicts_the_same_blocks(policy: str) -> None:
    """A pool under a load that knows many keys, with blocks of both kinds."""
    evicted = []
    for packed in (False, True):
        node = Node(make_policy=policy_maker(policy), packed=packed)
        node.inventory.follow_changes()
        tenant = node.add_tenant("red", 0, 256 << 10)
        namespace = node.namespaces.open(tenant, b"n" * 16, b"{}", (PartSpec(4096),))
        holder = node.holders.add("red", "engine")
        chance = random.Random(3)
        here = []
        for ticket in range(1, 1500):
            first = int(chance.paretovariate(0.6)) % 400 * 4
            keys = [key(first + number) for number in range(chance.randint(1, 4))]
            lease = node.leases.acquire(holder, namespace, [], keys, 1.0, 0.0)
            if lease is not None:
                node.leases.release(holder, lease.token)
            node.puts.reserve(holder, namespace, 0, ticket, keys)
            if ticket in holder.reservations:
                rows = holder.reservations[ticket].rows
                node.puts.commit(holder, ticket, bytes(16 * len(rows)))
            here.append(node.inventory.masks(namespace.directory_digest, keys))
            if not ticket % 100:
                found, _ = node.inventory.walk(0, 1000)
                here.append((0, sorted(number for _, some in found for number in map(int, some))))
        evicted.append(here)
    assert evicted[0] == evicted[1]


def test_packed_tables_are_empty_before_their_first_block() -> None:
    index = PackedTable()
    assert not index and key(1) not in index and index.get(key(1)) is None
    assert list(index) == list(index.values()) == []
    assert index.found([key(1)]) == [None] and index.present([key(1)]) == [False]
    assert index.prefix_length([key(1)]) == 0 and index.isdisjoint([key(1)])
    with pytest.raises(KeyError):
        index[key(1)]

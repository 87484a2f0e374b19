"""One disk whose blocks are packed: which slots they get, what is found again, and how it adds up."""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.daemon.core.blocks import Block, NamespaceState
from kvpool.daemon.core.limits import Limits
from kvpool.daemon.core.node import Node
from kvpool.daemon.tiers.ssd_books import TableRecord
from kvpool.daemon.tiers.ssd_device import SsdDevice
from kvpool.daemon.tiers.tier_state import TierState
from kvpool.errors import ConfigError, KvpoolError, LimitExceeded, Unavailable
from kvpool.placement.records import NamespaceSettings
from kvpool.storage.codecs import BLOSC2
from kvpool.storage.eviction import policy_maker
from kvpool.types import BlockStatus, PartSpec, split_keys
from kvpool.wire import worker as worker_wire
from tests.sim.simulation.loop import run_alone
from tests.support.scripted_disk import ScriptedDisk, slots_of

PAGE = 4096
NBYTES = 8 * PAGE - 100  # slots of 1 to 8 pages
FIELDS = b"{}"
BASE = hashlib.sha256(FIELDS).digest()[:16]
GOOD, BAD = 1, 2
PACKED, PLAIN = NamespaceSettings(ssd_codec="blosc2"), NamespaceSettings()


run = partial(run_alone, steps_max=400_000)


def make_node(*, packed: bool = False) -> Node:
    return Node(
        make_policy=policy_maker("lru"),
        limits=Limits(soft_pin_share=1.0, hard_pin_share=1.0),
        packed=packed,
    )


make_slots = partial(make_node, packed=True)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def checksum(number: int) -> bytes:
    return (number + 1000).to_bytes(16, "big")


class Bench:
    """Memory with blocks of eight pages that are called by numbers, and a device of so many pages."""

    def __init__(self, *, pages: int = 64, parts: Sequence[PartSpec] = (PartSpec(NBYTES),)) -> None:
        self.pages = pages
        self.now = 100.0
        self.node = make_node()
        self.tenant = self.node.add_tenant("red", 0, 2048 * PAGE, 8 * PAGE)
        self.holder = self.node.holders.add("red", "engine")
        self.namespace = self.node.namespaces.open(self.tenant, BASE, FIELDS, parts)
        self.namespace.settings = PACKED
        self.tickets = 0
        self.device = self.new_device()
        self.disk = ScriptedDisk(pages * PAGE)

    def new_device(self) -> SsdDevice:
        return SsdDevice("/disk", self.pages * PAGE, {"red": 1.0}, make_slots, lambda: self.now)

    async def adopt(self, _: TableRecord) -> NamespaceState | None:
        return self.node.namespaces.living(self.namespace)

    async def open(self) -> None:
        await self.device.restore(self.disk, self.adopt)

    async def restart(self) -> None:
        """The whole node begins another life; the disk is as the last one left it."""
        self.disk = self.disk.next_life()
        self.device = self.new_device()
        await self.open()

    def put(self, numbers: Iterable[int], part: int = 0) -> list[Block]:
        self.tickets += 1
        numbers = list(numbers)
        packed = b"".join(map(key, numbers))
        self.node.puts.reserve(self.holder, self.namespace, part, self.tickets, split_keys(packed))
        reserved = self.holder.reservations.get(self.tickets)
        if reserved is not None:
            new = [numbers[index] for index in reserved.indices]
            self.node.puts.commit(self.holder, self.tickets, b"".join(map(checksum, new)))
        self.node.settle()
        return [self.namespace.tables[part].blocks[key(number)] for number in numbers]

    async def write(self, sizes: dict[int, int], part: int = 0) -> int:
        """Blocks by numbers, and how many bytes a pack makes of each."""
        self.disk.sizes.append(list(sizes.values()))
        blocks = self.put(sizes, part)
        disk = self.disk
        try:
            return await self.device.write(self.namespace.tables[part], blocks, 0)
        finally:
            disk.sizes.clear()

    async def read(self, numbers: Iterable[int]) -> worker_wire.Pulled:
        keys = [key(number) for number in numbers]
        rows = array("I", range(len(keys))).tobytes()
        return await self.device.read(self.namespace.tables[0], keys, 0, rows, 1.0)

    def here(self, part: int = 0) -> set[int]:
        self.device.rules.settle()
        tables = self.device.holding(self.namespace.tables[part])
        found = [int.from_bytes(k, "big") for table in tables for k in table.blocks]
        assert len(found) == len(set(found)), "a block is in two places"
        return set(found)

    def pages_of(self) -> dict[int, tuple[int, int]]:
        """By block, where its slot begins and how long it is, in pages, as the rules have it."""
        self.device.rules.settle()
        return {
            int.from_bytes(block.key, "big"): (
                block.row * table.stride // PAGE,
                table.stride // PAGE,
            )
            for table in self.device.holding(self.namespace.tables[0])
            for block in table.blocks.values()
        }

    def check(self) -> None:
        """Rules and index say the same, no two slots share a page, and the sums are right."""
        node = self.device.rules
        taken: set[int] = set()
        offsets: dict[int, bytes] = {}
        used = 0
        for namespace in node.tenants["red"].namespaces.values():
            for table in namespace.tables:
                for block in table.blocks.values():
                    first = block.row * table.stride // PAGE
                    pages = set(range(first, first + table.stride // PAGE))
                    assert taken.isdisjoint(pages) and max(pages) < self.pages
                    taken |= pages
                    used += table.stride
                    offsets[first * PAGE] = block.key
        assert offsets == {at: entry["key"].tobytes() for at, entry in self.disk.entries.items()}
        stats = self.device.stats()
        assert stats.used_bytes == stats.stored_bytes == used
        assert (
            not node.leases.count and not self.device.counted.writing_bytes and not self.disk.packs
        )


# ---- down and up ---------------------------------------------------------------------------------------


def test_each_block_gets_the_slot_that_it_fits_and_is_found_again() -> None:
    async def main() -> None:
        bench = Bench(pages=512)
        await bench.open()
        sizes = {1: 1, 2: PAGE, 3: PAGE + 1, 4: NBYTES, 5: 7 * PAGE, 6: 5 * PAGE}
        assert await bench.write(sizes) == 6
        lengths = {number: pages for number, (_, pages) in bench.pages_of().items()}
        assert lengths == {1: 1, 2: 1, 3: 2, 4: 8, 5: 7, 6: 5}
        bench.check()
        packed, whole = bench.disk.of_kind("write")
        assert len(packed.keys) == 5 * 16 and packed.pack and not whole.pack
        rows = memoryview(packed.rows).cast("I").tolist()
        assert sorted(rows) == [0, 1, 2, 4, 5]  # of the pack
        assert whole.keys == key(4)
        counters = bench.device.counted
        assert (counters.packed_blocks, counters.unpacked_blocks) == (5, 1)
        before = bench.pages_of()
        await bench.restart()
        assert bench.pages_of() == before
        bench.check()
        stats = bench.device.stats()
        assert stats.raw_bytes == 6 * NBYTES
        assert stats.stored_bytes == (1 + 1 + 2 + 8 + 7 + 5) * PAGE
        pulled = await bench.read([5, 9, 4, 1])
        assert pulled.status == bytes([1, 0, 1, 1])
        assert pulled.checksums == checksum(5) + bytes(16) + checksum(4) + checksum(1)
        order = bench.disk.of_kind("read")[0]
        assert memoryview(order.lengths).cast("I").tolist() == [7 * PAGE, 8 * PAGE, PAGE]
        assert [at // PAGE for at in slots_of(order.slots)] == [before[n][0] for n in (5, 4, 1)]
        assert memoryview(order.rows).cast("I").tolist() == [0, 2, 3]
        assert bench.device.counted.read_bytes == 16 * PAGE
        bench.check()

    run(main())


def test_where_nothing_is_packed_orders_say_nothing_of_it() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.open()
        assert await bench.write({1: NBYTES, 2: NBYTES}) == 2
        await bench.read([1, 2])
        assert bench.disk.of_kind("read")[0].lengths == b""
        await bench.write({3: PAGE})
        await bench.read([1, 2])
        assert bench.disk.of_kind("read")[1].lengths == b""
        await bench.read([3, 1])
        assert len(bench.disk.of_kind("read")[2].lengths) == 8
        bench.namespace.settings = PLAIN
        await bench.write({4: PAGE})
        assert len(bench.disk.of_kind("pack")) == 2
        assert bench.pages_of()[4][1] == 8
        bench.check()

    run(main())


def test_blocks_as_short_as_slots_get_are_not_packed() -> None:
    async def main() -> None:
        bench = Bench(parts=(PartSpec(PAGE), PartSpec(PAGE + 1)))
        await bench.open()
        assert await bench.write({1: 1}) == 1
        assert not bench.disk.of_kind("pack")
        assert await bench.write({1: 1}, part=1) == 1
        assert len(bench.disk.of_kind("pack")) == 1
        bench.check()

    run(main())


def test_a_block_that_is_here_is_not_written_in_another_length() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.open()
        await bench.write({1: PAGE, 2: NBYTES})
        orders = len(bench.disk.of_kind("write"))
        bench.namespace.settings = PLAIN
        blocks = bench.put([1, 2])
        assert await bench.device.write(bench.namespace.tables[0], blocks, 0) == 2
        bench.namespace.settings = PACKED
        bench.disk.sizes.append([2 * PAGE])
        assert await bench.device.write(bench.namespace.tables[0], bench.put([2, 1]), 0) == 2
        assert len(bench.disk.of_kind("write")) == orders
        assert bench.here() == {1, 2}
        bench.check()

    run(main())


def test_the_directory_hears_of_parts_whatever_their_slots() -> None:
    async def main() -> None:
        bench = Bench(parts=(PartSpec(NBYTES), PartSpec(4 * PAGE), PartSpec(100)))
        await bench.open()
        await bench.write({1: PAGE, 2: 2 * PAGE, 3: NBYTES})
        await bench.write({2: PAGE, 3: 2 * PAGE}, part=1)
        await bench.write({3: 100, 4: 100}, part=2)
        keys = [key(number) for number in range(1, 6)]
        digest = bench.namespace.directory_digest
        assert bench.device.masks(digest, keys) == (3, [0b001, 0b011, 0b111, 0b100, 0])
        assert bench.device.masks(b"?" * 16, keys) == (0, [])
        assert (bench.here(0), bench.here(1), bench.here(2)) == ({1, 2, 3}, {2, 3}, {3, 4})
        groups, more = bench.device.rules.inventory.walk(0, 1000)
        assert more is None
        assert sorted(k for _, keys in groups for k in keys) == [key(n) for n in (1, 2, 3, 4)]
        found = await bench.device.pin(bench.namespace, key(2) + key(3), "hard")
        assert found == {key(2), key(3)}
        await bench.restart()
        assert bench.device.masks(digest, keys)[1] == [0b001, 0b011, 0b111, 0b100, 0]
        bench.check()
        state = bench.device.state_of(bench.namespace)
        assert bench.device.rules.removal.remove(state, keys) == {key(n) for n in (1, 2, 3, 4)}
        await bench.device.tidy()
        assert not bench.disk.entries
        bench.check()

    run(main())


def test_packed_blocks_take_the_place_of_whole_ones_and_the_other_way_round() -> None:
    async def main() -> None:
        bench = Bench(pages=64)
        await bench.open()
        for settings_, size, first in ((PLAIN, NBYTES, 0), (PACKED, PAGE, 100), (PLAIN, 0, 200)):
            bench.namespace.settings = settings_
            for number in range(first, first + 64):
                assert await bench.write({number: size}) == 1
                assert number in bench.here()
            bench.check()
        assert sum(number >= 200 for number in bench.here()) >= 6

    run(main())


def test_pins_and_scrubs_of_packed_blocks() -> None:
    async def main() -> None:
        bench = Bench(pages=16)
        await bench.open()
        blocks = bench.put([1])
        bench.node.pins.pin(bench.namespace, split_keys(key(1)), "hard")
        bench.disk.sizes.append([3 * PAGE])
        await bench.device.write(bench.namespace.tables[0], blocks, 0)
        await bench.restart()
        for number in range(10, 30):
            await bench.write({number: 2 * PAGE})
        assert 1 in bench.here()
        bench.check()
        before = len(bench.here())
        bench.disk.statuses["scrub"] = deque([bytes([BlockStatus.MISMATCH])])
        # One order a table: that of the three pages was made first, at the restore.
        seen, bad, more = await bench.device.scrub(0, 1000)
        assert (seen, bad, more) == (before, 1, None)
        lengths = {bytes(order.lengths[:4]) for order in bench.disk.of_kind("scrub")}
        assert lengths == {np.uint32(n * PAGE).tobytes() for n in (2, 3)}
        assert bench.device.counted.undecoded_blocks == 1
        assert bench.device.counted.mismatches == 1
        await bench.device.tidy()
        bench.check()

    run(main())


def test_what_does_not_decode_is_a_mismatch_of_its_own_kind() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.open()
        await bench.write({1: PAGE, 2: NBYTES, 3: PAGE})
        bench.disk.statuses["read"] = deque(
            [bytes([BlockStatus.MISMATCH, BlockStatus.MISMATCH, BlockStatus.PRESENT])]
        )
        pulled = await bench.read([1, 2, 3])
        assert pulled.status == bytes([2, 2, 1])
        assert bench.here() == {3}
        counters = bench.device.counted
        assert (counters.mismatches, counters.undecoded_blocks) == (2, 1)
        await bench.device.tidy()
        bench.check()

    run(main())


def test_how_much_blocks_will_take_is_told_by_those_that_are_here() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.open()
        table = bench.namespace.tables[0]
        assert bench.device.takes(table, 3) == 3 * 8 * PAGE
        await bench.write({1: 2 * PAGE, 2: 2 * PAGE, 3: 2 * PAGE, 4: 6 * PAGE})
        assert bench.device.takes(table, 8) == 8 * 3 * PAGE
        bench.namespace.settings = PLAIN
        assert bench.device.takes(table, 8) == 8 * 8 * PAGE

    run(main())


# ---- what goes wrong -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "codec"), [(0, BLOSC2), (7 * PAGE + 1, BLOSC2), (1 << 31, BLOSC2), (PAGE, 9)]
)
def test_entries_that_cannot_be_read_are_forgotten(stored: int, codec: int) -> None:
    async def main() -> None:
        bench = Bench()
        await bench.open()
        await bench.write({1: PAGE, 2: PAGE, 3: NBYTES})
        (entry,) = [e for e in bench.disk.entries.values() if e["key"].tobytes() == key(1)]
        entry["stored"], entry["codec"] = stored, codec
        await bench.restart()
        assert bench.here() == {2, 3}
        assert bench.device.counted.dropped_at_restore == 1
        bench.check()

    run(main())


def test_a_process_without_the_codec_writes_blocks_as_they_are_and_says_so() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.open()
        await bench.write({1: PAGE, 2: NBYTES})
        bench.disk = bench.disk.next_life()
        bench.disk.ready.codecs.clear()
        bench.device = bench.new_device()
        await bench.open()
        assert bench.here() == {2}  # the other one could not be read
        assert not bench.device.stats().codec_error
        assert await bench.write({3: PAGE}) == 1
        assert bench.pages_of()[3][1] == 8
        assert "pip install blosc2" in bench.device.stats().codec_error
        assert not bench.disk.of_kind("pack")
        bench.check()

    run(main())


def test_a_codec_that_turns_out_not_to_work_is_tried_once() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.open()
        bench.disk.failures["pack"] = deque([ConfigError("it cannot be imported")])
        assert await bench.write({1: PAGE, 2: PAGE}) == 2
        assert await bench.write({3: PAGE}) == 1
        assert len(bench.disk.of_kind("pack")) == 1
        assert {pages for _, pages in bench.pages_of().values()} == {8}
        assert bench.device.state is TierState.SERVING
        assert "it cannot be imported" in bench.device.stats().codec_error
        bench.check()
        await bench.restart()  # it may have been installed
        assert await bench.write({4: PAGE}) == 1
        assert bench.pages_of()[4][1] == 1
        assert not bench.device.stats().codec_error

    run(main())


@pytest.mark.parametrize("kind", ["pack", "write"])
@pytest.mark.parametrize("error", [LimitExceeded("too many"), Unavailable("ended")])
def test_an_order_that_fails_leaves_no_pack_and_no_slot(kind: str, error: KvpoolError) -> None:
    async def main() -> None:
        bench = Bench()
        await bench.open()
        bench.disk.failures[kind] = deque([error])
        await bench.write({1: PAGE, 2: 2 * PAGE})
        assert not bench.here() and bench.device.state is TierState.READ_ONLY
        assert not bench.device.used_bytes
        bench.check()
        bench.now += 2.0
        assert await bench.write({1: PAGE, 2: 2 * PAGE}) == 2
        bench.check()

    run(main())


def test_only_what_the_disk_says_is_safe_is_found() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.open()
        bench.disk.statuses["write"] = deque(
            [
                bytes(
                    [
                        BlockStatus.PRESENT,
                        BlockStatus.MISMATCH,
                        BlockStatus.MISMATCH,
                        BlockStatus.PRESENT,
                    ]
                )
            ]
        )
        assert await bench.write({1: PAGE, 2: PAGE, 3: 2 * PAGE, 4: 2 * PAGE}) == 2
        assert bench.here() == {1, 4}
        assert bench.device.counted.packed_blocks == bench.device.counted.written_blocks == 2
        assert bench.device.counted.write_errors == 2
        await bench.device.tidy()
        bench.check()

    run(main())


@pytest.mark.parametrize("kind", ["pack", "write"])
@pytest.mark.parametrize("what", ["death", "reset", "cancel"])
def test_what_ends_meanwhile_is_not_written(kind: str, what: str) -> None:
    async def main() -> None:
        bench = Bench()
        await bench.open()
        await bench.write({9: PAGE})
        disk = bench.disk
        disk.held.add(kind)
        writing = asyncio.create_task(bench.write({1: PAGE, 2: NBYTES, 3: PAGE}))
        await asyncio.sleep(0.1)
        if what == "death":
            after = disk.next_life()
            bench.device.ended("killed")
            bench.disk = after
            await bench.open()  # before the order has heard of it
        elif what == "reset":
            bench.namespace = bench.node.namespaces.set_epoch(bench.namespace, 1, 0)
            bench.device.enter(bench.namespace)
        else:
            writing.cancel()
        disk.go_on()
        done = await asyncio.gather(writing, return_exceptions=True)
        assert what == "cancel" or done == [2 if (kind, what) == ("write", "reset") else 0]
        assert bench.here() == (set() if what == "reset" else {9})
        assert bench.device.state is TierState.SERVING
        assert not disk.packs
        bench.device.rules.ended_epochs.reclaim(1000)
        await bench.device.tidy()
        bench.check()
        bench.namespace.settings = PACKED
        assert await bench.write({5: PAGE}) == 1
        bench.check()

    run(main())


def test_where_all_lengths_are_taken_blocks_are_written_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        bench = Bench()
        await bench.open()
        await bench.write({1: NBYTES})

        def refuse(*_: object) -> None:
            raise LimitExceeded("64 classes")

        monkeypatch.setattr(type(bench.device.rules.namespaces), "add_table", refuse)
        assert await bench.write({2: PAGE, 3: PAGE}) == 2
        assert {pages for _, pages in bench.pages_of().values()} == {8}
        bench.check()

    run(main())


# ---- anything ------------------------------------------------------------------------------------------

SIZES = st.sampled_from([1, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE, 6 * PAGE, 7 * PAGE, NBYTES])
STEPS = st.one_of(
    st.tuples(st.just("write"), st.dictionaries(st.integers(0, 40), SIZES, min_size=1, max_size=5)),
    st.tuples(st.just("codec"), st.booleans()),
    st.tuples(st.just("read"), st.lists(st.integers(0, 40), max_size=6, unique=True)),
    st.tuples(st.just("remove"), st.lists(st.integers(0, 40), max_size=4, unique=True)),
    st.tuples(st.just("restart"), st.none()),
)


@settings(max_examples=80, deadline=None)
@given(pages=st.integers(8, 80), steps=st.lists(STEPS, min_size=3, max_size=30))
def test_whatever_is_written_the_books_are_right(pages: int, steps: list[tuple[str, Any]]) -> None:
    async def main() -> None:
        bench = Bench(pages=pages)
        await bench.open()
        for what, value in steps:
            before = bench.here()
            if what == "write":
                sizes = [size for number, size in value.items() if number not in before]
                bench.disk.sizes.append(sizes)
                await bench.device.write(bench.namespace.tables[0], bench.put(value), 0)
                bench.disk.sizes.clear()
                assert bench.here() - before <= value.keys()
            elif what == "codec":
                bench.namespace.settings = PACKED if value else PLAIN
            elif what == "read":
                pulled = await bench.read(value)
                assert [s == 1 for s in pulled.status] == [number in before for number in value]
            elif what == "remove":
                namespace = bench.device.state_of(bench.namespace)
                if namespace is not None:
                    bench.device.rules.removal.remove(namespace, list(map(key, value)))
                    assert bench.here() == before - set(value)
            else:
                await bench.device.tidy()
                await bench.restart()
                assert bench.here() == before
            await bench.device.tidy()
            bench.check()

    run(main())

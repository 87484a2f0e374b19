"""One disk of a node: what is found there again, what is written, read, forgotten, and given up on."""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

import msgspec
import numpy as np
import pytest

from kvpool.daemon.core import inventory
from kvpool.daemon.core.blocks import Block, NamespaceState
from kvpool.daemon.core.limits import Limits
from kvpool.daemon.core.node import Node
from kvpool.daemon.tiers.ssd_books import TableRecord
from kvpool.daemon.tiers.ssd_device import SsdDevice
from kvpool.daemon.tiers.tier_state import TierState
from kvpool.errors import KvpoolError, LimitExceeded, Unavailable
from kvpool.placement.records import NamespaceSettings
from kvpool.storage.eviction import policy_maker
from kvpool.storage.ssd.index import ENTRY
from kvpool.types import BlockStatus, PartSpec, split_keys
from kvpool.wire import storage as storage_wire
from kvpool.wire import worker as worker_wire
from tests.sim.simulation.loop import run_alone
from tests.support.scripted_disk import ScriptedDisk, slots_of

PAGE = 4096
FIELDS = b"{}"
BASE = hashlib.sha256(FIELDS).digest()[:16]
ABSENT, PRESENT, MISMATCH, LATE = range(4)


run = partial(run_alone, steps_max=200_000)


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
    """Memory with blocks that are called by numbers, and a device."""

    def __init__(self, *, slots: int = 8, parts: tuple[PartSpec, ...] = (PartSpec(1000),)) -> None:
        self.now = 100.0
        self.slots = slots
        self.node = make_node()
        self.tenant = self.node.add_tenant("red", 0, max(64, slots) * PAGE, PAGE)
        self.holder = self.node.holders.add("red", "engine")
        self.namespace = self.node.namespaces.open(self.tenant, BASE, FIELDS, parts)
        self.tickets = 0
        self.changed: list[tuple[NamespaceState, list[bytes]]] = []
        self.device = self.new_device()
        self.disk = ScriptedDisk(slots * PAGE)

    def new_device(self, make: Callable[[], Node] = make_slots) -> SsdDevice:
        return SsdDevice("/disk", self.slots * PAGE, {"red": 1.0}, make, lambda: self.now)

    async def adopt(self, record: TableRecord) -> NamespaceState | None:
        return self.node.namespaces.living(self.namespace) if record.tenant == "red" else None

    async def open(self, disk: ScriptedDisk | None = None) -> None:
        self.disk = disk or self.disk
        await self.device.restore(self.disk, self.adopt)

    async def restart(self, disk: ScriptedDisk | None = None) -> None:
        """The whole node begins another life; the disk is as the last one left it."""
        self.device = self.new_device()
        await self.open(disk or self.disk.next_life())

    def reset(self) -> None:
        self.namespace = self.node.namespaces.set_epoch(self.namespace, self.namespace.epoch + 1, 0)
        self.device.enter(self.namespace)

    def put(self, numbers: Iterable[int], part: int = 0) -> list[Block]:
        numbers = list(numbers)
        self.tickets += 1
        packed = b"".join(map(key, numbers))
        self.node.puts.reserve(self.holder, self.namespace, part, self.tickets, split_keys(packed))
        sums = b"".join(map(checksum, numbers))
        self.node.puts.commit(self.holder, self.tickets, sums)
        self.node.settle()
        blocks = self.namespace.tables[part].blocks
        return [blocks[key(number)] for number in numbers]

    async def write(self, numbers: Iterable[int], part: int = 0) -> int:
        blocks = self.put(numbers, part)
        return await self.device.write(self.namespace.tables[part], blocks, 0)

    async def read(self, numbers: Iterable[int]) -> worker_wire.Pulled:
        keys = [key(number) for number in numbers]
        rows = array("I", range(len(keys))).tobytes()
        return await self.device.read(self.namespace.tables[0], keys, 0, rows, 1.0)

    async def begin_read(self, numbers: Iterable[int]) -> asyncio.Task[worker_wire.Pulled]:
        """A read that its disk holds until `disk.go_on`."""
        self.disk.held.add("read")
        reading = asyncio.create_task(self.read(numbers))
        await self.disk.waits("read")
        return reading

    def here(self, part: int = 0) -> set[int]:
        self.device.rules.settle()
        table = self.device.table(self.namespace.tables[part])
        return set() if table is None else {int.from_bytes(k, "big") for k in table.blocks}

    def indexed(self) -> set[int]:
        return {int.from_bytes(e["key"].tobytes(), "big") for e in self.disk.entries.values()}

    def agrees(self) -> bool:
        """Whether nothing is in use but the blocks, and the index knows of these and no others."""
        node = self.device.rules
        blocks = {
            block.row * table.stride: (block.key, block.pin)
            for namespace in node.tenants["red"].namespaces.values()
            for table in namespace.tables
            for block in table.blocks.values()
        }
        known = {
            offset: (e["key"].tobytes(), int(e["pin"])) for offset, e in self.disk.entries.items()
        }
        return (
            blocks == known
            and self.device.used_bytes == len(blocks) * PAGE
            and not node.leases.count
            and not self.device.counted.writing_bytes
        )


# ---- restore -----------------------------------------------------------------------------------------


def test_what_was_written_is_found_again() -> None:
    async def main() -> None:
        bench = Bench(parts=(PartSpec(1000), PartSpec(3000)))
        await bench.open()
        assert await bench.write(range(3)) == 3
        assert await bench.write(range(2, 5), part=1) == 3
        await bench.restart()
        assert (bench.here(0), bench.here(1)) == ({0, 1, 2}, {2, 3, 4})
        assert bench.device.state is TierState.SERVING
        assert bench.device.counted.restored_blocks == 6
        assert bench.agrees()
        pulled = await bench.read([1, 4])
        assert pulled.status == bytes([BlockStatus.PRESENT, BlockStatus.ABSENT])
        assert pulled.checksums[:16] == checksum(1)
        # What is written now goes elsewhere.
        assert await bench.write([7, 8]) == 2
        assert bench.agrees()

    run(main())


def test_nothing_of_an_older_epoch_or_a_foreign_tenant_is_restored() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.open()
        await bench.write([1, 2])
        bench.reset()
        await bench.write([2, 3])
        foreign = TableRecord("blue", BASE, FIELDS, [(1000, "full", 0, 1)], 0, 0, 0)
        number = await bench.disk.add_table(msgspec.msgpack.encode(foreign))
        entry = np.zeros(1, ENTRY)[0]
        entry["offset"], entry["table"], entry["nbytes"] = 7 * PAGE, number, 1000
        bench.disk.entries[7 * PAGE] = entry
        await bench.restart()
        assert bench.here() == bench.indexed() == {2, 3}
        assert bench.device.counted.dropped_at_restore >= 1
        assert bench.agrees()
        assert len(bench.disk.tables) == 1  # of the living epoch
        kinds = [kind for kind, _ in bench.disk.orders]
        assert kinds.index("forget") < kinds.index("drop_tables")

    run(main())


def test_entries_that_cannot_be_are_forgotten_and_of_one_key_the_last_counts() -> None:
    async def main() -> None:
        bench = Bench(slots=8)
        await bench.open()
        await bench.write([1])
        (good,) = bench.disk.entries.values()

        def add(offset: int, number: int, nbytes: int = 1000) -> None:
            entry = good.copy()
            entry["offset"], entry["nbytes"] = offset, nbytes
            entry["generation"] = 100 + number
            entry["key"] = np.frombuffer(key(number), np.uint8)
            bench.disk.entries[offset] = entry

        add(6 * PAGE + 512, 2)  # not where a slot begins
        add(8 * PAGE, 3)  # behind the end
        add(3 * PAGE, 4, nbytes=999)  # of another length
        add(4 * PAGE, 1)  # the same block once more, later
        add(5 * PAGE, 5)
        first = int(good["offset"])
        await bench.restart(bench.disk.next_life())
        assert bench.here() == {1, 5}
        assert set(bench.disk.entries) == {4 * PAGE, 5 * PAGE}
        assert first not in bench.disk.entries
        assert bench.agrees()
        assert await bench.write(range(10, 16)) == 6  # all the others are free
        assert bench.agrees()

    run(main())


def test_a_smaller_segment_keeps_what_still_has_its_place() -> None:
    async def main() -> None:
        bench = Bench(slots=8)
        await bench.open()
        await bench.write(range(8))
        slot_of = {
            int.from_bytes(e["key"].tobytes(), "big"): o for o, e in bench.disk.entries.items()
        }
        await bench.restart(bench.disk.next_life(5 * PAGE))
        assert bench.here() == {number for number, offset in slot_of.items() if offset < 5 * PAGE}
        assert bench.agrees()

    run(main())


def test_a_part_that_is_too_small_for_a_slot_is_none() -> None:
    async def main() -> None:
        bench = Bench()
        shares = {"blue": 1e-9, "red": 1 - 1e-9}
        bench.device = SsdDevice("/disk", 8 * PAGE, shares, make_slots, lambda: bench.now)
        await bench.open()
        assert bench.device.state is TierState.SERVING
        assert await bench.write([1]) == 1
        assert list(bench.device.rules.tenants) == ["red"]

    run(main())


def test_an_index_that_takes_no_changes_at_the_start_does_not_keep_a_disk_closed() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.open()
        await bench.write([1])
        bench.reset()
        disk = bench.disk.next_life()
        disk.failures["forget"] = deque([Unavailable("full")])
        await bench.restart(disk)
        assert bench.device.state is TierState.SERVING
        assert not disk.of_kind("drop_tables")
        await bench.device.tidy()
        assert len(disk.of_kind("forget")) == 2  # asked once more

    run(main())


class TwoScans(ScriptedDisk):
    """Its index is read in two goes, and something happens in between."""

    between: Callable[[], object]

    async def scan(self, count: int) -> storage_wire.Scanned:
        self.scans = getattr(self, "scans", 0) + 1
        entries = list(self.entries.values())
        if self.scans == 2:
            self.between()
        found = [entries[:2], entries[2:], []][self.scans - 1]
        return storage_wire.Scanned(np.array(found, ENTRY).tobytes())


def test_what_goes_while_the_index_is_read_gives_its_slot_back_once() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.open()
        await bench.write(range(4))
        disk = TwoScans(8 * PAGE, 1 << 20, bench.disk.tables.items(), bench.disk.entries.values())

        def drop() -> None:
            table = bench.device.table(bench.namespace.tables[0])
            assert table is not None
            bench.device.rules.removal.drop_corrupt(table.namespace, 0, key(1))

        disk.between = drop
        await bench.restart(disk)
        assert bench.here() == {0, 2, 3}
        assert await bench.write(range(10, 15)) == 5
        assert bench.here() == {0, 2, 3, *range(10, 15)}
        assert bench.agrees()

    run(main())


def test_a_codec_that_turns_out_not_to_work_reads_and_packs_nothing() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.open()
        await bench.write(range(4))

        class Broken(ScriptedDisk):
            async def scan(self, count: int) -> storage_wire.Scanned:
                scanned = await super().scan(count)
                return storage_wire.Scanned(
                    scanned.entries, "it does not work" if scanned.entries else ""
                )

        disk = Broken(8 * PAGE, 1 << 20, bench.disk.tables.items(), bench.disk.entries.values())
        for entry in disk.entries.values():
            entry["codec"] = int(entry["key"][-1] == 2)
        await bench.restart(disk)
        assert bench.here() == {0, 1, 3}
        assert "it does not work" in bench.device.stats().codec_error
        assert bench.agrees()

    run(main())


def test_a_process_that_ends_during_the_restore_leaves_a_failed_device() -> None:
    async def main() -> None:
        bench = Bench()
        bench.disk.held.add("scan")
        task = asyncio.create_task(bench.device.restore(bench.disk, bench.adopt))
        await bench.disk.waits("scan")
        assert bench.device.state is TierState.OPENING
        assert not bench.device.may_write()
        bench.disk.die()
        bench.device.ended("killed")
        with pytest.raises(Unavailable):
            await task
        assert bench.device.state is TierState.FAILED
        assert await bench.write([1]) == 0

    run(main())


def test_the_end_of_a_process_is_a_change_of_all_its_blocks() -> None:
    def following() -> Node:
        node = make_node()
        node.inventory.follow_changes()
        return node

    async def main() -> None:
        bench = Bench()
        bench.device = bench.new_device(following)
        await bench.open()
        await bench.write([1, 2])
        bench.device.rules.inventory.take_changes()
        await bench.write([3])  # not told yet
        bench.device.ended("killed")
        told = {k for _, keys in bench.device.rules.inventory.take_changes() for k in keys}
        assert told == {key(1), key(2), key(3)}

    run(main())


def test_the_blocks_of_ended_processes_are_told_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many there are, and though the next one ends before all are told."""
    monkeypatch.setattr(inventory, "ENDED_ROWS", 4)
    called: list[int] = []

    def following() -> Node:
        node = make_slots()
        node.inventory.follow_changes(lambda: called.append(1))
        return node

    def take() -> list[bytes]:
        called.clear()
        return [k for _, keys in bench.device.rules.inventory.take_changes() for k in keys]

    async def main() -> None:
        await bench.open()
        await bench.write(range(1, 11))
        every = sorted(take())
        assert len(every) == 10
        bench.device.ended("killed")
        assert called
        some = take()
        assert len(some) == 4 and called, "there is more"
        await bench.open(bench.disk.next_life())
        bench.device.ended("killed")
        told = some
        while called:
            told += (more := take())
            assert len(more) <= 10 + 4  # those that were restored and not told yet are told at once
        assert sorted(told) == sorted(3 * every), "those that went, that came again, and that went"
        assert take() == []

    bench = Bench(slots=16)
    bench.device = bench.new_device(following)
    run(main())


# ---- write -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad", [BlockStatus.FAILED, BlockStatus.NO_SPACE, BlockStatus.MISMATCH, BlockStatus.LATE]
)
def test_only_what_the_disk_says_is_safe_is_found(bad: int) -> None:
    async def main() -> None:
        bench = Bench()
        await bench.open()
        bench.disk.statuses["write"] = deque(
            [bytes([BlockStatus.PRESENT, bad, BlockStatus.PRESENT])]
        )
        assert await bench.write([1, 2, 3]) == 2
        assert bench.here() == {1, 3}
        assert bench.device.counted.written_blocks == 2
        assert bench.device.counted.write_errors == 1
        await bench.device.tidy()
        assert bench.agrees()

    run(main())


def test_a_disk_that_fails_is_left_alone_for_longer_and_longer_until_it_takes_writes() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.open()
        device, disk = bench.device, bench.disk
        disk.statuses["write"] = deque([bytes([BlockStatus.FAILED])] * 3)
        pauses = []
        for number in range(3):
            assert device.may_write()
            assert await bench.write([number]) == 0
            assert device.state is TierState.READ_ONLY
            began = bench.now
            while not device.may_write():
                bench.now += 0.25
            pauses.append(bench.now - began)
        assert pauses == [1.0, 2.0, 4.0]
        orders = len(disk.of_kind("write"))
        assert await bench.write([5]) == 1
        assert device.state is TierState.SERVING
        assert device.error == ""
        assert len(disk.of_kind("write")) == orders + 1
        disk.statuses["write"] = deque([bytes([BlockStatus.FAILED])])
        await bench.write([6])
        bench.now += 1.0
        assert device.may_write()  # it began with the shortest pause again

    run(main())


def test_writes_that_fail_together_are_one_failure() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.open()
        device, disk = bench.device, bench.disk
        disk.statuses["write"] = deque([bytes([BlockStatus.FAILED])] * 6)
        pauses = []
        for first in (0, 3):
            disk.held.add("write")
            writes = [asyncio.create_task(bench.write([first + at])) for at in range(3)]
            await disk.waits("write", 3)
            disk.go_on()
            assert await asyncio.gather(*writes) == [0] * 3
            began = bench.now
            while not device.may_write():
                bench.now += 0.25
            pauses.append(bench.now - began)
        assert pauses == [1.0, 2.0]
        assert device.counted.write_errors == 6

    run(main())


def test_nothing_is_ordered_while_a_disk_is_left_alone() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.open()
        bench.disk.statuses["write"] = deque([bytes([BlockStatus.FAILED])])
        await bench.write([1])
        assert await bench.write([2]) == 0
        assert len(bench.disk.of_kind("write")) == 1
        assert (await bench.read([1])).status == bytes([BlockStatus.ABSENT])

    run(main())


def test_where_all_slots_are_being_read_nothing_is_written() -> None:
    async def main() -> None:
        bench = Bench(slots=2)
        await bench.open()
        await bench.write([1, 2])
        bench.disk.held.add("read")
        reading = asyncio.create_task(bench.read([1, 2]))
        await bench.disk.waits("read")
        assert await bench.write([3]) == 0
        assert len(bench.disk.of_kind("write")) == 1
        assert bench.device.state is TierState.SERVING  # nothing is wrong with the disk
        bench.disk.go_on()
        assert (await reading).status == bytes([BlockStatus.PRESENT, BlockStatus.PRESENT])
        assert await bench.write([4]) == 1
        assert bench.agrees()

    run(main())


@pytest.mark.parametrize("how", ["read", "scrub"])
@pytest.mark.parametrize("status", [BlockStatus.PRESENT, BlockStatus.MISMATCH, BlockStatus.FAILED])
def test_what_is_removed_while_it_is_read_loses_its_slot_afterwards(
    how: str, status: BlockStatus
) -> None:
    async def main() -> None:
        bench = Bench()
        await bench.open()
        await bench.write([1, 2, 3])
        bench.disk.held.add(how)
        bench.disk.statuses[how] = deque([bytes([status, status, BlockStatus.PRESENT])])
        work = bench.read([1, 2, 3]) if how == "read" else bench.device.scrub(0, 10)
        task = asyncio.ensure_future(work)
        await bench.disk.waits(how)
        own = bench.device.table(bench.namespace.tables[0])
        assert own is not None
        bench.device.rules.removal.remove(own.namespace, split_keys(key(1) + key(3)))
        bench.disk.go_on()
        found = await task
        good = status is BlockStatus.PRESENT
        assert bench.here() == ({2} if good else set())
        if isinstance(found, worker_wire.Pulled):
            assert found.status[2] == BlockStatus.PRESENT
        else:
            assert found[:2] == (3, 0 if good else 2)
        await bench.device.tidy()
        assert bench.agrees()
        assert bench.device.rules.inventory.block_count() == len(bench.here())

    run(main())


def test_what_is_removed_while_it_is_written_is_not_found_again() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.open()
        blocks = bench.put([1, 2, 3])
        bench.node.leases.hold(bench.holder, blocks)  # as who has blocks written does
        bench.disk.held.add("write")
        writing = asyncio.create_task(bench.device.write(bench.namespace.tables[0], blocks, 0))
        await bench.disk.waits("write")
        bench.node.removal.remove(bench.namespace, split_keys(key(2)))
        bench.disk.go_on()
        assert await writing == 2
        assert bench.here() == {1, 3}
        await bench.device.tidy()
        assert bench.agrees()

    run(main())


def test_room_is_made_and_the_order_says_what_to_forget() -> None:
    async def main() -> None:
        bench = Bench(slots=3)
        await bench.open()
        await bench.write([1, 2, 3])
        slots = {
            int.from_bytes(e["key"].tobytes(), "big"): o for o, e in bench.disk.entries.items()
        }
        await bench.write([4])
        order = bench.disk.of_kind("write")[-1]
        assert slots_of(order.forget) == slots_of(order.slots) == [slots[3]]  # a chain's end
        assert bench.here() == bench.indexed() == {1, 2, 4}
        assert bench.agrees()

    run(main())


def test_the_index_is_never_asked_for_more_entries_than_it_has_room_for() -> None:
    async def main() -> None:
        bench = Bench(slots=8)
        await bench.open(ScriptedDisk(8 * PAGE, entries_max=3))
        for number in range(0, 12, 2):
            await bench.write([number, number + 1])
            assert len(bench.disk.entries) <= 3
        assert {10, 11} <= bench.here()

    run(main())


def test_an_epoch_that_ends_during_a_write_takes_its_blocks_with_it() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.open()
        bench.disk.held.add("write")
        writing = asyncio.create_task(bench.write([1, 2]))
        await bench.disk.waits("write")
        assert not bench.here()  # not before it is safe
        bench.reset()
        bench.disk.go_on()
        await writing
        assert not bench.here()
        await bench.device.tidy()
        assert not bench.disk.entries
        assert bench.agrees()

    run(main())


def test_a_process_that_dies_during_a_write_leaves_nothing_in_the_next_ones_books() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.open()
        await bench.write([9])
        bench.disk.held.add("write")
        writing = asyncio.create_task(bench.write([1, 2]))
        await bench.disk.waits("write")
        before, after = bench.disk, bench.disk.next_life()
        bench.device.ended("killed")
        await bench.open(after)  # before the order has heard of it
        written = bench.device.counted.written_blocks
        before.go_on()  # the answer was on its way
        assert await writing == 0
        assert bench.here() == {9}
        assert bench.device.counted.written_blocks == written
        assert bench.device.state is TierState.SERVING
        assert not after.of_kind("write")
        assert bench.agrees()

    run(main())


def test_a_life_that_ends_while_a_table_is_made_known_has_nothing_written_by_it() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.open()
        before = bench.disk
        before.held.add("add_table")
        writing = asyncio.create_task(bench.write([1]))
        await before.waits("add_table")
        after = before.next_life()
        bench.device.ended("killed")
        await bench.open(after)
        before.go_on()
        assert await writing == 0
        assert not before.of_kind("write")
        assert not after.of_kind("write")
        assert bench.device.state is TierState.SERVING

    run(main())


def test_pins_beyond_the_quota_of_a_disk_do_not_undo_the_write() -> None:
    def strict() -> Node:
        return Node(
            make_policy=policy_maker("lru"),
            limits=Limits(hard_pin_share=0.25),
        )

    async def main() -> None:
        bench = Bench(slots=4)
        bench.device = bench.new_device(strict)
        await bench.open()
        await bench.write([5, 6, 7, 8])
        blocks = bench.put([1, 2, 3])
        packed = b"".join(block.key for block in blocks)
        bench.node.pins.pin(bench.namespace, split_keys(packed), "hard")
        assert await bench.device.write(bench.namespace.tables[0], blocks, 0) == 3
        assert bench.device.state is TierState.SERVING
        await bench.device.tidy()
        assert {1, 2, 3} <= bench.indexed()
        assert bench.agrees()

    run(main())


def test_pins_outlive_the_node() -> None:
    async def main() -> None:
        bench = Bench(slots=3)
        await bench.open()
        blocks = bench.put([1])
        bench.node.pins.pin(bench.namespace, split_keys(key(1)), "hard")
        assert await bench.device.write(bench.namespace.tables[0], blocks, 0) == 1
        await bench.restart()
        for number in range(10, 16):
            await bench.write([number])
        assert 1 in bench.here()

    run(main())


def test_a_pin_outlives_the_node_for_the_parts_that_have_it() -> None:
    """A part that came after the pin has none, in the index as in memory."""

    async def main() -> None:
        bench = Bench(parts=(PartSpec(1000), PartSpec(1000)))
        await bench.open()
        await bench.write([9])  # so that part 0 is restored first
        await bench.write([1], part=1)
        await bench.device.pin(bench.namespace, key(1), "soft")
        await bench.write([1], part=0)
        assert bench.agrees()
        await bench.restart()
        assert bench.agrees()

    run(main())


# ---- what is to be forgotten ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["write", "forget"])
def test_deletions_of_an_order_that_was_not_sent_go_with_the_next(kind: str) -> None:
    async def main() -> None:
        bench = Bench(slots=4)
        await bench.open()
        await bench.write([1, 2])
        bench.device.rules.removal.remove(
            bench.device.state_of(bench.namespace), split_keys(key(1) + key(2))
        )
        gone = set(bench.disk.entries)
        sent, keep = [], bench.disk.drop

        def not_sent(packed: bytes) -> None:
            sent.append(packed)

        bench.disk.drop = not_sent  # type: ignore[method-assign]
        bench.disk.failures[kind] = deque([LimitExceeded("256 orders are in progress")])
        if kind == "write":
            assert await bench.write([3]) == 0
            bench.now += 1.0
        else:
            with pytest.raises(KvpoolError):
                await bench.device.tidy()
        bench.disk.drop = keep
        assert set(slots_of(sent[0])) == gone
        await bench.device.tidy()
        assert not bench.disk.entries
        assert bench.agrees()

    run(main())


def test_deletions_that_an_index_refused_are_its_own_and_it_is_asked_once_more() -> None:
    async def main() -> None:
        bench = Bench(slots=1)
        await bench.open()
        await bench.write([1])
        bench.device.rules.removal.remove(
            bench.device.state_of(bench.namespace), split_keys(key(1))
        )
        bench.disk.held.add("forget")
        bench.disk.failures["forget"] = deque([Unavailable("no deletions today")])
        tidying = asyncio.create_task(bench.device.tidy())
        await bench.disk.waits("forget")
        assert await bench.write([2]) == 1  # into the same slot
        bench.disk.go_on()
        with pytest.raises(Unavailable):
            await tidying
        await bench.device.tidy()
        assert [slots_of(order.slots) for order in bench.disk.of_kind("forget")] == [[0], []]
        assert bench.indexed() == {2}
        await bench.device.tidy()
        assert len(bench.disk.of_kind("forget")) == 2
        assert bench.agrees()

    run(main())


# ---- read ----------------------------------------------------------------------------------------------


def test_what_is_broken_is_found_no_more_and_what_came_late_is() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.open()
        await bench.write([1, 2, 3, 4])
        bench.disk.statuses["read"] = deque(
            [
                bytes(
                    [
                        BlockStatus.PRESENT,
                        BlockStatus.MISMATCH,
                        BlockStatus.FAILED,
                        BlockStatus.LATE,
                    ]
                )
            ]
        )
        pulled = await bench.read([1, 2, 9, 3, 4])
        assert pulled.status == bytes(
            [
                BlockStatus.PRESENT,
                BlockStatus.MISMATCH,
                BlockStatus.ABSENT,
                BlockStatus.ABSENT,
                BlockStatus.LATE,
            ]
        )
        assert bench.here() == {1, 4}
        counters = bench.device.counted
        assert (counters.mismatches, counters.read_errors, counters.read_blocks) == (
            1,
            1,
            1,
        )
        await bench.device.tidy()
        assert bench.indexed() == {1, 4}
        assert bench.agrees()

    run(main())


def test_rows_and_checksums_go_with_their_blocks() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.open()
        await bench.write([1, 2, 3])
        await bench.read([3, 8, 1])
        order = bench.disk.of_kind("read")[0]
        slots = {
            int.from_bytes(e["key"].tobytes(), "big"): o for o, e in bench.disk.entries.items()
        }
        assert slots_of(order.slots) == [slots[3], slots[1]]
        assert order.checksums == checksum(3) + checksum(1)
        assert array("I", order.rows).tolist() == [0, 2]

    run(main())


def test_a_read_that_ends_with_its_process_frees_the_slots_of_its_own_life_only() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.open()
        await bench.write([1])
        before = bench.disk
        before.held.add("read")
        reading = asyncio.create_task(bench.read([1]))
        await before.waits("read")
        assert bench.device.rules.leases.count == 1
        bench.device.ended("killed")
        await bench.open(before.next_life())
        before.statuses["read"] = deque([bytes([BlockStatus.MISMATCH])])
        before.go_on()
        assert (await reading).status == bytes([BlockStatus.MISMATCH])
        assert bench.here() == {1}  # it may be whole now
        assert bench.agrees()

    run(main())


def test_a_read_that_is_called_off_ends_its_lease() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.open()
        await bench.write([1])
        reading = await bench.begin_read([1])
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert bench.agrees()

    run(main())


def test_scrub_finds_and_drops_what_is_broken() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.open()
        await bench.write([1, 2, 3])
        bench.disk.statuses["scrub"] = deque(
            [bytes([BlockStatus.PRESENT, BlockStatus.MISMATCH, BlockStatus.PRESENT])]
        )
        seen, bad, more = await bench.device.scrub(0, 100)
        assert (seen, bad, more) == (3, 1, None)
        assert len(bench.here()) == 2
        await bench.device.tidy()
        assert bench.agrees()

    run(main())


# ---- places that fail again and again -----------------------------------------------------------------


@pytest.mark.parametrize("how", ["read", "write"])
def test_a_place_that_fails_again_is_not_used_any_more(how: str) -> None:
    async def main() -> None:
        bench = Bench(slots=256)
        await bench.open()
        for number in range(2):
            assert bench.device.counted.retired_bytes == 0, "once is an accident"
            bench.now += 100.0  # a disk that failed is tried again
            if how == "write":
                bench.disk.statuses["write"] = deque([bytes([BlockStatus.FAILED])])
            await bench.write([number])
            if how == "read":
                bench.disk.statuses["read"] = deque([bytes([BlockStatus.MISMATCH])])
                await bench.read([number])
        assert bench.device.counted.retired_bytes == PAGE
        assert bench.device.used_bytes == PAGE, "as if it were reserved for ever"
        bench.now += 100.0
        assert await bench.write(range(10, 20)) == 10
        assert bench.device.counted.retired_bytes == PAGE
        assert len(bench.here()) == 10

    run(main())


def test_a_disk_that_fails_everywhere_keeps_its_places() -> None:
    async def main() -> None:
        bench = Bench(slots=256)
        await bench.open()
        for turn in range(3):
            numbers = range(64 * turn, 64 * turn + 64)
            assert await bench.write(numbers) == 64
            bench.disk.statuses["read"] = deque([bytes([BlockStatus.MISMATCH]) * 64])
            await bench.read(numbers)
        assert 0 < bench.device.counted.retired_bytes <= 256 * PAGE // 32

    run(main())


async def retire_a_place(bench: Bench) -> None:
    for number in range(2):
        bench.now += 100.0
        await bench.write([number])
        bench.disk.statuses["read"] = deque([bytes([BlockStatus.MISMATCH])])
        await bench.read([number])
    bench.now += 100.0
    assert bench.device.counted.retired_bytes == PAGE


def test_a_slab_with_a_retired_place_is_not_emptied_for_another_size() -> None:
    async def main() -> None:
        bench = Bench(slots=256, parts=(PartSpec(1000), PartSpec(5000)))
        await bench.open()
        await retire_a_place(bench)
        bench.disk.held.add("write")
        first = asyncio.create_task(bench.write(range(5000, 5112), part=1))  # all other slabs
        await bench.disk.waits("write")
        assert await bench.write([6000], part=1) == 0
        bench.disk.go_on()
        assert await first == 112
        assert bench.device.counted.retired_bytes == PAGE

    run(main())


def test_a_retired_place_is_counted_once_and_its_neighbours_stay() -> None:
    async def main() -> None:
        bench = Bench(slots=256, parts=(PartSpec(1000), PartSpec(5000)))
        await bench.open()
        await retire_a_place(bench)
        assert await bench.write(range(1000, 1255)) == 255
        # All slabs but that of the retired place have blocks that must stay.
        pinned = b"".join(map(key, range(1040, 1255)))
        await bench.device.pin(bench.namespace, pinned, "hard")
        assert await bench.write([6000], part=1) == 0
        assert bench.device.counted.retired_bytes == PAGE
        assert len(bench.here()) == 255

    run(main())


# ---- epochs --------------------------------------------------------------------------------------------


def test_an_epoch_is_recorded_once_and_known_to_the_next_life() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.open()
        await bench.write([1])
        bench.reset()
        await bench.device.record(bench.namespace)
        await bench.device.record(bench.namespace)
        assert len(bench.disk.of_kind("add_table")) == 2  # one an epoch
        assert not bench.here()
        met = []

        async def adopt(record: TableRecord) -> NamespaceState | None:
            met.append(record.epoch)
            return await bench.adopt(record)

        bench.device = bench.new_device()
        await bench.device.restore(bench.disk.next_life(), adopt)
        assert met == [1, 0]  # the last one first, lest an old one be taken for the present

    run(main())


def test_tables_of_ended_epochs_go_when_their_blocks_are_gone() -> None:
    """The index has room for few tables, and a namespace may be reset every minute."""

    async def main() -> None:
        bench = Bench(parts=(PartSpec(1000), PartSpec(2000)))
        await bench.open()
        for epoch in range(5):
            await bench.write([epoch])
            await bench.write([epoch], part=1)
            bench.reset()
        bench.device.rules.ended_epochs.reclaim(1 << 20)
        await bench.device.tidy()
        (left,) = bench.disk.tables.values()
        record = msgspec.msgpack.decode(left, type=TableRecord)
        assert (record.epoch, record.part) == (4, 0), "which epoch it was in is not forgotten"
        await bench.write([7])
        await bench.device.tidy()
        (left,) = bench.disk.tables.values()
        assert msgspec.msgpack.decode(left, type=TableRecord).epoch == 5
        assert bench.here() == {7}
        await bench.restart()
        assert bench.here() == {7} and bench.agrees()

    run(main())


def test_a_table_stays_while_it_is_written_to_and_while_the_index_refuses() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.open()
        await bench.write([1])
        bench.disk.held.add("write")
        writing = asyncio.create_task(bench.write([2]))
        await bench.disk.waits("write")
        bench.reset()
        await bench.device.record(bench.namespace)
        await bench.device.tidy()
        assert len(bench.disk.tables) == 2, "its first block is still there"
        bench.device.rules.ended_epochs.reclaim(1 << 20)
        await bench.device.tidy()
        assert len(bench.disk.tables) == 2, "its second one is on its way"
        bench.disk.go_on()
        await writing
        bench.disk.failures["drop_tables"] = deque([Unavailable("it is busy")])
        with pytest.raises(Unavailable):
            await bench.device.tidy()
        assert len(bench.disk.tables) == 2
        await bench.device.tidy()
        assert len(bench.disk.tables) == 1

    run(main())


def test_a_table_stays_while_a_removed_block_of_it_is_read() -> None:
    """Its slot is given up, and its entry forgotten, when the read has ended."""

    async def main() -> None:
        bench = Bench()
        await bench.open()
        await bench.write([1])
        reading = await bench.begin_read([1])
        bench.reset()
        await bench.write([2])
        bench.device.rules.ended_epochs.reclaim(1 << 20)
        await bench.device.tidy()
        assert len(bench.disk.tables) == 2
        bench.disk.go_on()
        await reading
        await bench.device.tidy()
        assert len(bench.disk.tables) == 1
        assert bench.here() == bench.indexed() == {2}

    run(main())


def test_settings_that_change_are_renewed_in_the_index() -> None:
    """For those who are told by nobody else; with the blocks, whose tables keep their numbers."""

    async def main() -> None:
        bench = Bench(parts=(PartSpec(1000), PartSpec(2000)))
        await bench.open()
        await bench.write([1])
        await bench.write([2], part=1)
        for settings in (NamespaceSettings(write="none"), NamespaceSettings(ttl_s=60.0)):
            bench.namespace.settings = settings
            await bench.device.record(bench.namespace)
            await bench.device.record(bench.namespace)
        assert len(bench.disk.of_kind("add_table")) == 2 + 2 * 2
        met: list[NamespaceSettings] = []

        async def adopt(record: TableRecord) -> NamespaceState | None:
            met.append(record.settings)
            return await bench.adopt(record)

        bench.device = bench.new_device()
        bench.disk = bench.disk.next_life()
        await bench.device.restore(bench.disk, adopt)
        assert met == [NamespaceSettings(ttl_s=60.0)] * 2
        assert bench.here() == {1} and bench.here(1) == {2}
        # What nobody asked to be recorded goes with the next write.
        bench.namespace.settings = NamespaceSettings(replicas=2)
        await bench.write([3])
        assert len(bench.disk.of_kind("add_table")) == 1
        await bench.write([4])
        assert len(bench.disk.of_kind("add_table")) == 1

    run(main())


def test_a_table_gets_one_number_whoever_asks_for_it() -> None:
    """Also when its settings change while it is being made known, or its index is being read."""

    async def main() -> None:
        bench = Bench()
        await bench.open()
        bench.disk.held.add("add_table")
        first = asyncio.create_task(bench.write([1]))
        await bench.disk.waits("add_table")
        bench.namespace.settings = NamespaceSettings(ttl_s=60.0)
        second = asyncio.create_task(bench.write([2]))
        await asyncio.sleep(0.1)
        bench.disk.go_on()
        assert (await first, await second) == (1, 1)
        assert len(bench.disk.tables) == 1

        async def adopt(record: TableRecord) -> NamespaceState | None:
            bench.namespace.settings = NamespaceSettings(ttl_s=5.0)
            await bench.device.record(bench.namespace)
            return await bench.adopt(record)

        bench.device = bench.new_device()
        bench.disk = bench.disk.next_life()
        await bench.device.restore(bench.disk, adopt)
        assert bench.here() == {1, 2}
        said = msgspec.msgpack.decode(bench.disk.tables[max(bench.disk.tables)], type=TableRecord)
        assert said.settings == NamespaceSettings(ttl_s=5.0), "what is met first at the next start"
        bench.namespace.settings = NamespaceSettings(ttl_s=7.0)
        assert await bench.write([3]) == 1
        said = msgspec.msgpack.decode(bench.disk.tables[max(bench.disk.tables)], type=TableRecord)
        assert said.settings == NamespaceSettings(ttl_s=7.0)

    run(main())


def test_an_epoch_that_cannot_be_recorded_is_an_error_of_the_reset() -> None:
    async def main() -> None:
        bench = Bench()
        bench.device.ended("the folder has gone")
        with pytest.raises(Unavailable, match="the folder has gone"):
            await bench.device.record(bench.namespace)

    run(main())


def test_a_freed_namespace_leaves_the_index_and_comes_back() -> None:
    """With the same record, so with the same number, as long as the old one is not dropped."""

    async def main() -> None:
        def rules() -> Node:
            limits = Limits(namespaces_per_tenant=1)
            return Node(make_policy=policy_maker("lru"), limits=limits, packed=True)

        bench = Bench(parts=(PartSpec(1000), PartSpec(1000)))
        bench.device = bench.new_device(rules)
        await bench.open()
        tables, blocks = bench.namespace.tables, [bench.put([1, 2], part) for part in (0, 1)]
        for part in (0, 1):
            assert await bench.device.write(tables[part], blocks[part], 0) == 2
        other = bench.node.namespaces.open(bench.tenant, b"o" * 16, b"{}", [PartSpec(500)])
        assert bench.device.open(other) is None, "it has no place yet"

        epochs = dict(bench.tenant.epochs)

        def memory_has(namespace: NamespaceState) -> None:
            bench.tenant.epochs = {namespace.base: epochs[namespace.base]}

        def empty() -> set[bytes]:
            state = bench.device.state_of(bench.namespace)
            assert state is not None
            return bench.device.rules.removal.remove(state, [key(1), key(2)])

        assert empty() == {key(1), key(2)}
        assert bench.device.open(other) is None, "memory has the empty one still"
        memory_has(other)
        assert bench.device.open(other) is not None
        assert bench.device.state_of(bench.namespace) is None
        await bench.device.tidy()
        assert bench.disk.tables == {}
        memory_has(bench.namespace)
        assert await bench.device.write(tables[0], blocks[0], 0) == 2
        assert bench.device.state_of(other) is None, "now that was freed"
        assert len(bench.disk.tables) == 1
        # Freed and opened again before the index has forgotten it.
        assert len(empty()) == 2
        memory_has(other)
        assert bench.device.open(other) is not None
        memory_has(bench.namespace)
        assert await bench.device.write(tables[0], blocks[0], 0) == 2
        await bench.device.tidy()
        await bench.restart()
        assert bench.here() == {1, 2}

    run(main())

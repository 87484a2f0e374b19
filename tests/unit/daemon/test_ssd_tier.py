"""The tiers below memory: what is written when and where, and what the disks of a node hold together."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Iterable
from functools import partial

import pytest

from kvpool.config import DaemonConfig, DiskConfig
from kvpool.daemon.core.blocks import NamespaceState
from kvpool.daemon.core.node import Node
from kvpool.daemon.ops.jobs import _Chains
from kvpool.daemon.tiers import ssd_demote
from kvpool.daemon.tiers.ssd_books import TableRecord
from kvpool.daemon.tiers.ssd_device import SsdDevice
from kvpool.daemon.tiers.ssd_tier import SsdTier
from kvpool.errors import PoolFull, Unavailable
from kvpool.placement.records import NamespaceSettings
from kvpool.storage.eviction import policy_maker
from kvpool.telemetry.memory_stats import NamespaceUsage
from kvpool.types import BlockStatus, PartSpec, split_keys
from kvpool.wire import frame
from kvpool.wire import storage as storage_wire
from kvpool.wire import worker as worker_wire
from tests.sim.simulation.loop import run_alone
from tests.support.scripted_disk import ScriptedDisk

PAGE = 4096
FIELDS = b"{}"
BASE = hashlib.sha256(FIELDS).digest()[:16]
DAY_S = 86_400
ABSENT, PRESENT, MISMATCH, LATE = range(4)


run = partial(run_alone, steps_max=500_000)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def make_node(*, packed: bool = False) -> Node:
    return Node(make_policy=policy_maker("lru"), packed=packed)


make_slots = partial(make_node, packed=True)


class Bench:
    """Memory of so many blocks of one page, and disks of so many slots."""

    def __init__(
        self,
        *disks: int,
        memory: int = 64,
        write: str = "back",
        bytes_a_day: int = 0,
        parts: tuple[PartSpec, ...] = (PartSpec(PAGE),),
    ) -> None:
        self.loop = asyncio.get_running_loop()
        config = DaemonConfig(
            socket="/kvpool.sock",
            ssd=tuple(DiskConfig(f"/{n}", slots * PAGE) for n, slots in enumerate(disks)),
            ssd_write=write,
            ssd_bytes_per_day=bytes_a_day,
        )
        self.node = make_node()
        self.tenant = self.node.add_tenant("default", 0, memory * PAGE, PAGE)
        self.holder = self.node.holders.add("default", "engine")
        self.namespace = self.node.namespaces.open(self.tenant, BASE, FIELDS, parts)
        self.tiers = SsdTier(config, self.node, self.loop.time, make_slots, self.adopt)
        self.disks = [ScriptedDisk(slots * PAGE) for slots in disks]
        self.tickets = 0

    async def adopt(self, _: TableRecord) -> NamespaceState | None:
        return self.node.namespaces.living(self.namespace)

    async def begin(self) -> None:
        for device, disk in zip(self.tiers.devices, self.disks, strict=True):
            await device.restore(disk, self.adopt)
        self.tiers.begin()

    def put(self, numbers: Iterable[int], part: int = 0, *, tell: bool = True) -> None:
        numbers = list(numbers)
        self.tickets += 1
        packed = b"".join(map(key, numbers))
        self.node.puts.reserve(self.holder, self.namespace, part, self.tickets, split_keys(packed))
        count = len(self.holder.reservations[self.tickets].rows)
        self.node.puts.commit(self.holder, self.tickets, bytes(16 * count))
        if tell:
            self.tiers.stored(self.namespace, part, lambda: split_keys(packed))

    def in_memory(self) -> set[int]:
        self.node.settle()
        return {int.from_bytes(k, "big") for k in self.namespace.tables[0].blocks}

    def on_disk(self, device: SsdDevice | None = None, part: int = 0) -> set[int]:
        found: set[int] = set()
        for one in self.tiers.devices if device is None else [device]:
            table = one.table(self.namespace.tables[part])
            if table is not None:
                found |= {int.from_bytes(k, "big") for k in table.blocks}
        return found

    def written(self) -> list[int]:
        """All blocks that any disk was ordered to write, in order."""
        return [
            int.from_bytes(k, "big")
            for disk in self.disks
            for order in disk.of_kind("write")
            for k in split_keys(order.keys)
        ]


# ---- written through -----------------------------------------------------------------------------------


def test_what_is_put_is_written_once() -> None:
    async def main() -> None:
        bench = Bench(32, write="through")
        await bench.begin()
        bench.put(range(6))
        bench.put(range(3, 9))
        await asyncio.sleep(1)
        assert bench.on_disk() == set(range(9))
        assert sorted(bench.written()) == list(range(9))
        assert not bench.node.leases.count

    run(main())


def limit(monkeypatch: pytest.MonkeyPatch, name: str, blocks: int) -> None:
    """Blocks of one order to a disk, or that wait to be written, at most."""
    monkeypatch.setattr(ssd_demote, name, blocks)


def test_the_queue_is_bounded_and_says_what_it_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, "QUEUE_MAX", 5)

    async def main() -> None:
        bench = Bench(32, write="through")
        await bench.begin()
        bench.put(range(8))
        assert bench.tiers.stats().queued_writes == 5
        await asyncio.sleep(1)
        assert bench.on_disk() == set(range(5))
        assert bench.tiers.counted.dropped_writes == 3

    run(main())


def test_a_put_waits_for_no_disk_and_orders_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, "BATCH_BLOCKS", 2)

    async def main() -> None:
        bench = Bench(64, write="through")
        await bench.begin()
        disk = bench.disks[0]
        disk.held.add("write")
        bench.put(range(40))
        await asyncio.sleep(1)
        assert len(disk.of_kind("write")) == ssd_demote.WRITES_MAX
        # Only what is being written has to stay in memory.
        assert bench.node.leases.count == ssd_demote.WRITES_MAX
        disk.go_on()
        await asyncio.sleep(1)
        assert bench.on_disk() == set(range(40))
        assert not bench.node.leases.count

    run(main())


def test_what_memory_gave_up_before_its_turn_is_counted() -> None:
    async def main() -> None:
        bench = Bench(64, write="through")
        await bench.begin()
        bench.put(range(4))
        bench.node.removal.remove(bench.namespace, split_keys(key(1) + key(2)))
        await asyncio.sleep(1)
        assert bench.on_disk() == {0, 3}
        assert bench.tiers.counted.dropped_writes == 2

    run(main())


def test_what_was_put_before_a_disk_serves_is_written_then() -> None:
    async def main() -> None:
        bench = Bench(32, write="through")
        bench.tiers.begin()
        bench.put(range(4))
        await asyncio.sleep(3)
        assert not bench.written()
        await bench.tiers.devices[0].restore(bench.disks[0], bench.adopt)
        await asyncio.sleep(3)
        assert bench.on_disk() == set(range(4))

    run(main())


def test_none_is_none() -> None:
    async def main() -> None:
        bench = Bench(32, memory=8, write="none")
        await bench.begin()
        for number in range(20):
            bench.put([number])
            await asyncio.sleep(0.1)
        assert not bench.written()

    run(main())


# ---- written ahead -------------------------------------------------------------------------------------


def test_nothing_is_written_while_there_is_room_in_memory() -> None:
    async def main() -> None:
        bench = Bench(64, memory=64)
        await bench.begin()
        bench.put(range(40))
        await asyncio.sleep(2)
        assert not bench.written()

    run(main())


def test_at_a_pace_that_the_disk_sustains_nothing_is_lost() -> None:
    async def main() -> None:
        bench = Bench(1000, memory=64)
        await bench.begin()
        for number in range(400):
            bench.put([number])
            await asyncio.sleep(0.02)
            assert bench.in_memory() | bench.on_disk() == set(range(number + 1))
        written = bench.written()
        assert len(written) == len(set(written))
        # It is the cold end that is written, not all that comes.
        assert len(written) < 400 - 32

    run(main())


def test_what_a_quota_pushes_out_of_a_roomy_memory_was_written_before() -> None:
    async def main() -> None:
        bench = Bench(1000, memory=640)
        await bench.begin()
        bench.node.quotas.set(bench.namespace, 64 * PAGE)
        for number in range(400):
            bench.put([number])
            await asyncio.sleep(0.02)
            assert bench.in_memory() | bench.on_disk() == set(range(number + 1))
        assert len(bench.in_memory()) == 64
        written = bench.written()
        assert len(written) == len(set(written)) < 400 - 32

    run(main())


@pytest.mark.parametrize("late", [False, True])
def test_a_quota_is_spread_over_disks_by_size(late: bool) -> None:
    """late: blocks are there when it is set, and go in the background."""

    async def main() -> None:
        bench = Bench(300, 100, memory=256, write="through")
        await bench.begin()

        def limit() -> None:
            bench.namespace.settings = NamespaceSettings(ssd_quota=40 * PAGE)
            bench.tiers.limit(bench.namespace)

        if not late:
            limit()
        for number in range(200):
            bench.put([number])
            await asyncio.sleep(0.02)
        if late:
            assert len(bench.on_disk()) == 200
            limit()
            await asyncio.sleep(3.0)
        large, small = bench.tiers.devices
        assert (len(bench.on_disk(large)), len(bench.on_disk(small))) == (30, 10)
        usage = bench.tiers.usage("default")
        assert [place.where for place in usage] == ["/0", "/1"]
        assert [place.namespaces[BASE.hex()] for place in usage] == [
            NamespaceUsage(n * PAGE, n * PAGE) for n in (30, 10)
        ]
        bench.namespace.settings = NamespaceSettings(ssd_quota=0.5)
        bench.tiers.limit(bench.namespace)
        halves = [place.namespaces[BASE.hex()] for place in bench.tiers.usage("default")]
        assert [half.quota_bytes for half in halves] == [150 * PAGE, 50 * PAGE]

    run(main())


def test_what_a_full_disk_gives_up_is_not_written_again_and_again() -> None:
    async def main() -> None:
        bench = Bench(4, memory=64)  # the cold end is larger than the disk
        await bench.begin()
        bench.put(range(64))
        await asyncio.sleep(20)
        written = bench.written()
        assert len(written) == len(set(written)) <= 16
        # What is used again since is worth it again.
        lost = sorted(set(written) - bench.on_disk())
        holder, token = bench.holder, []
        for number in (*range(64), *lost):
            lease = bench.node.leases.acquire(
                holder, bench.namespace, (), split_keys(key(number)), 10.0, 0.0
            )
            assert lease is not None
            token.append(lease.token)
        for one in token:
            bench.node.leases.release(holder, one)
        bench.tiers._demotion.memory_filled()
        await asyncio.sleep(20)
        assert len(bench.written()) > len(written)

    run(main())


def test_readers_and_puts_find_room_while_the_cold_end_is_written() -> None:
    async def main() -> None:
        bench = Bench(1000, memory=32)
        await bench.begin()
        bench.disks[0].held.add("write")
        refused = 0
        for number in range(200):
            try:
                bench.put([number])
            except PoolFull:
                refused += 1
            await asyncio.sleep(0.01)
        assert not refused
        assert bench.disks[0].of_kind("write")

    run(main())


def test_a_disk_that_dies_in_the_middle_leaves_no_lease_and_nothing_under_way() -> None:
    async def main() -> None:
        bench = Bench(64, write="through")
        await bench.begin()
        bench.disks[0].held.add("write")
        bench.put(range(4))
        await asyncio.sleep(1)
        assert bench.node.leases.count
        bench.disks[0].die()
        bench.tiers.devices[0].ended("killed")
        await asyncio.sleep(1)
        assert not bench.node.leases.count
        assert not bench.tiers._demotion.under_way
        assert not bench.tiers.serving
        after = bench.disks[0].next_life()
        await bench.tiers.devices[0].restore(after, bench.adopt)
        bench.put(range(10, 12))
        await asyncio.sleep(2)
        assert {10, 11} <= bench.on_disk()

    run(main())


# ---- how much ------------------------------------------------------------------------------------------


def test_a_day_of_writes_takes_no_more_than_its_budget() -> None:
    async def main() -> None:
        pages_an_hour = 100
        bench = Bench(1000, memory=2000, write="through", bytes_a_day=24 * pages_an_hour * PAGE)
        await bench.begin()
        for number in range(600):
            bench.put([number])
            await asyncio.sleep(6)
        hours = 600 * 6 / 3600
        assert len(bench.written()) <= pages_an_hour * (1 + hours) + 1
        assert len(bench.written()) >= pages_an_hour * 0.75
        counters = bench.tiers.counted
        assert counters.over_budget_blocks + counters.once_used_blocks > 0
        assert len(
            bench.written()
        ) + counters.over_budget_blocks + counters.once_used_blocks == len(set(range(600)))

    run(main())


def test_when_the_budget_is_short_what_was_used_again_is_written() -> None:
    async def main() -> None:
        bench = Bench(1000, memory=500, write="through", bytes_a_day=24 * 100 * PAGE)
        await bench.begin()
        bench.put(range(80))
        await asyncio.sleep(1)
        before = set(bench.written())
        bench.put(range(100, 104), tell=False)
        lease = bench.node.leases.acquire(
            bench.holder, bench.namespace, (), split_keys(key(102)), 10.0, 0.0
        )
        assert lease is not None
        bench.node.leases.release(bench.holder, lease.token)
        bench.tiers.stored(bench.namespace, 0, lambda: [key(n) for n in range(100, 104)])
        await asyncio.sleep(1)
        assert set(bench.written()) - before == {102}
        assert bench.tiers.counted.once_used_blocks == 3

    run(main())


def test_when_the_budget_is_short_what_nobody_is_to_continue_is_not_written() -> None:
    async def main() -> None:
        bench = Bench(1000, memory=500, write="through", bytes_a_day=24 * 100 * PAGE)
        await bench.begin()
        bench.put(range(80))
        await asyncio.sleep(1)
        before = set(bench.written())
        bench.put(range(100, 104), tell=False)
        keys = [key(n) for n in range(100, 104)]
        lease = bench.node.leases.acquire(bench.holder, bench.namespace, (), keys, 10.0, 0.0)
        assert lease is not None
        bench.node.leases.release(bench.holder, lease.token)
        bench.node.candidates.expend(bench.namespace, keys[:3])
        bench.tiers.stored(bench.namespace, 0, lambda: keys)
        await asyncio.sleep(1)
        assert set(bench.written()) - before == {103}
        assert bench.tiers.counted.once_used_blocks == 3

    run(main())


# ---- several disks -------------------------------------------------------------------------------------


def test_each_disk_gets_its_share_by_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, "BATCH_BLOCKS", 1)

    async def main() -> None:
        bench = Bench(100, 300, memory=256, write="through")
        await bench.begin()
        bench.put(range(200))
        await asyncio.sleep(5)
        first, second = (len(bench.on_disk(device)) for device in bench.tiers.devices)
        assert first + second == 200
        assert abs(first - 50) <= ssd_demote.WRITES_MAX

    run(main())


def test_a_disk_that_hangs_leaves_its_share_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows yet that it hangs: its orders do not end, and keep none from the other disk."""
    limit(monkeypatch, "BATCH_BLOCKS", 1)

    async def main() -> None:
        bench = Bench(300, 300, memory=256, write="through")
        await bench.begin()
        hung = bench.disks[0]
        hung.held.add("write")
        bench.put(range(200))
        await asyncio.sleep(60)
        assert len(hung.of_kind("write")) == ssd_demote.WRITES_MAX
        stored = bench.on_disk(bench.tiers.devices[1])
        assert len(stored) == 200 - ssd_demote.WRITES_MAX
        # When it goes on it gets its share again.
        hung.go_on()
        bench.put(range(200, 240))
        await asyncio.sleep(60)
        assert bench.on_disk() == set(range(240))
        assert len(bench.on_disk(bench.tiers.devices[0])) > 2 * ssd_demote.WRITES_MAX
        assert not bench.node.leases.count

    run(main())


def test_a_disk_that_fails_leaves_its_share_to_the_others() -> None:
    async def main() -> None:
        bench = Bench(100, 100, write="through")
        await bench.begin()
        bench.disks[0].statuses["write"] = deque([bytes([BlockStatus.FAILED])] * 3)
        for number in range(10):
            bench.put([number])
            await asyncio.sleep(0.2)
        assert len(bench.on_disk()) >= 8
        assert bench.tiers.devices[1].counted.written_blocks >= 8

    run(main())


def test_masks_walk_and_held_are_of_all_disks_together(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, "BATCH_BLOCKS", 1)

    async def main() -> None:
        bench = Bench(50, 50, write="through", parts=(PartSpec(PAGE), PartSpec(2 * PAGE)))
        await bench.begin()
        bench.put(range(6))
        bench.put(range(3, 9), part=1)
        await asyncio.sleep(3)
        tiers, namespace = bench.tiers, bench.namespace
        keys = [key(number) for number in range(10)]
        want = [(n < 6) + 2 * (3 <= n < 9) for n in range(10)]
        assert all(bench.on_disk(device) for device in tiers.devices)
        assert tiers.masks(namespace.directory_digest, keys) == (2, want)
        assert tiers.masks(bytes(16), keys) == (0, [])
        met: set[bytes] = set()
        cursor: int | None = 0
        steps = 0
        while cursor is not None:
            groups, cursor = tiers.walk(cursor, 2)
            met |= {
                k for digest, found in groups for k in found if digest == namespace.directory_digest
            }
            steps += 1
        assert met == set(keys[:9])
        assert steps > 2
        for part, numbers in ((0, range(6)), (1, range(3, 9))):
            held = tiers.held(namespace.tables[part])
            assert {n for n in range(10) if any(key(n) in each for each in held)} == set(numbers)

    run(main())


def test_changes_of_all_disks_are_told_also_by_those_that_come_later() -> None:
    async def main() -> None:
        bench = Bench(50, 50, write="through")
        called: list[int] = []
        bench.tiers.follow_changes(lambda: called.append(1))
        await bench.begin()
        bench.put(range(4))
        await asyncio.sleep(2)
        assert called
        told = {k for _, keys in bench.tiers.take_changes() for k in keys}
        assert told == {key(n) for n in range(4)}
        called.clear()
        for device in bench.tiers.devices:
            device.ended("killed")
        assert called
        assert {k for _, keys in bench.tiers.take_changes() for k in keys} == told

    run(main())


# ---- up ------------------------------------------------------------------------------------------------


async def _on_two(bench: Bench) -> tuple[list[bytes], list[bytes]]:
    await bench.begin()
    for number in range(6):
        bench.put([number])
        await asyncio.sleep(0.5)
    first, second = (
        [key(number) for number in sorted(bench.on_disk(device))] for device in bench.tiers.devices
    )
    assert first
    assert second
    return first, second


def test_a_read_is_put_together_from_all_disks_in_the_order_that_was_asked() -> None:
    async def main() -> None:
        bench = Bench(50, 50, write="through")
        first, second = await _on_two(bench)
        bench.disks[1].statuses["read"] = deque([bytes([BlockStatus.MISMATCH] * len(second))])
        keys = [key(number) for number in (5, 0, 77, 3, 1, 2, 4)]
        pulled = await bench.tiers.load(bench.namespace.tables[0], keys, range(10, 17), 1.0)
        want = [
            BlockStatus.PRESENT
            if k in first
            else BlockStatus.MISMATCH
            if k in second
            else BlockStatus.ABSENT
            for k in keys
        ]
        assert list(pulled.status) == want
        for disk, mine in zip(bench.disks, (first, second), strict=True):
            (order,) = disk.of_kind("read")
            rows = frame.pack_rows([10 + at for at, k in enumerate(keys) if k in mine])
            assert order.rows == rows

    run(main())


def test_a_disk_that_dies_during_a_read_does_not_take_what_others_brought() -> None:
    async def main() -> None:
        bench = Bench(50, 50, write="through")
        first, second = await _on_two(bench)
        bench.disks[1].held.add("read")
        table, keys = bench.namespace.tables[0], [*first, *second]
        reading = asyncio.create_task(bench.tiers.load(table, keys, range(6), 1.0))
        await asyncio.sleep(0.1)
        bench.disks[1].die()
        pulled = await reading
        assert pulled.error
        assert list(pulled.status) == [BlockStatus.PRESENT] * len(first) + [
            BlockStatus.ABSENT
        ] * len(second)

    run(main())


def test_a_read_that_is_called_off_ends_when_no_disk_writes_to_its_rows_any_more() -> None:
    """As a process that has been told answers some time later."""

    class Slow(ScriptedDisk):
        async def read(self, order: storage_wire.ReadBlocks) -> worker_wire.Pulled:
            try:
                return await super().read(order)
            except asyncio.CancelledError:
                await asyncio.sleep(2)
                ended.append(asyncio.get_running_loop().time())
                raise

    ended: list[float] = []

    async def main() -> None:
        bench = Bench(50, 50, write="through")
        bench.disks = [Slow(50 * PAGE), Slow(50 * PAGE)]
        first, second = await _on_two(bench)
        for disk in bench.disks:
            disk.held.add("read")
        table, keys = bench.namespace.tables[0], [*first, *second]
        reading = asyncio.create_task(bench.tiers.load(table, keys, range(6), 1.0))
        await asyncio.sleep(0.1)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert len(ended) == 2

    run(main())


# ---- tidy ----------------------------------------------------------------------------------------------


def test_what_went_is_forgotten_by_and_by_and_epochs_give_their_slots_back() -> None:
    async def main() -> None:
        bench = Bench(50, write="through")
        await bench.begin()
        bench.put(range(10))
        await asyncio.sleep(2)
        assert bench.tiers.remove(bench.namespace, key(1) + key(99)) == {key(1)}
        await asyncio.sleep(2)
        (disk,), (device,) = bench.disks, bench.tiers.devices
        assert len(disk.entries) == 9
        bench.namespace = bench.node.namespaces.set_epoch(bench.namespace, 1, 0)
        bench.tiers.enter(bench.namespace)
        assert not bench.on_disk()
        await asyncio.sleep(2)
        assert not disk.entries
        assert not device.used_bytes

    run(main())


# ---- chains --------------------------------------------------------------------------------------------


def test_a_chain_goes_on_where_its_beginning_is_in_memory_only() -> None:
    """The rules of a disk know a parent only if it is there too; the index knows each."""

    async def main() -> None:
        bench = Bench(32, write="through")
        await bench.begin()
        bench.put(range(6))
        bench.put([20, 21])
        await asyncio.sleep(1)
        (device,) = bench.tiers.devices
        table = device.table(bench.namespace.tables[0])
        assert table is not None
        device.rules.removal.remove(table.namespace, [key(0), key(1), key(2)])
        blocks = [table.blocks[key(number)] for number in (3, 4, 20)]
        assert [block.parent_known for block in blocks] == [False, True, True]
        assert await bench.tiers.parents(blocks) == [key(2), key(3), b""]
        memory = [bench.namespace.tables[0].blocks[key(number)] for number in (3, 0)]
        assert await bench.tiers.parents(memory) == [key(2), b""]
        nodes = [bench.node, device.rules]
        chains = _Chains([key(1)], nodes, {bench.namespace.directory_digest}, bench.tiers.parents)
        found = await chains.those_of(list(table.blocks.values()))
        assert {block.key for block in found} == {key(3), key(4), key(5)}
        bench.disks[0].die()
        with pytest.raises(Unavailable):
            await bench.tiers.parents(blocks[:1])

    run(main())


def test_a_block_that_leaves_while_its_parent_is_asked_for_is_not_mistaken_for_the_next_one() -> (
    None
):
    async def main() -> None:
        bench = Bench(32, write="through")
        await bench.begin()
        bench.put(range(1, 5))
        await asyncio.sleep(1)
        (device,) = bench.tiers.devices
        table = device.table(bench.namespace.tables[0])
        assert table is not None
        device.rules.removal.remove(table.namespace, [key(1)])
        bench.disks[0].held.add("entries")
        chains = _Chains(
            [key(1)], [device.rules], {bench.namespace.directory_digest}, bench.tiers.parents
        )
        asked = asyncio.ensure_future(chains.those_of([table.blocks[key(2)], table.blocks[key(3)]]))
        await bench.disks[0].waits("entries")
        device.rules.removal.remove(table.namespace, [key(3)])
        bench.disks[0].go_on()
        assert [block.key for block in await asked] == [key(2)]

    run(main())

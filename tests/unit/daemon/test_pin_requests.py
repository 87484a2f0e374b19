"""Pins of one request: in memory and on all disks or nowhere, and never many in one step of the event loop."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, deque
from collections.abc import Iterable
from functools import partial

import pytest

from kvpool.config import DaemonConfig, DiskConfig
from kvpool.daemon.core.blocks import PIN_HARD, PIN_NONE, PIN_SOFT, NamespaceState
from kvpool.daemon.core.limits import Limits
from kvpool.daemon.core.node import Node
from kvpool.daemon.core.pins import Pins, levels
from kvpool.daemon.ops import pins as pin_requests
from kvpool.daemon.ops.pins import pin_in_all_tiers
from kvpool.daemon.tiers.ssd_books import TableRecord
from kvpool.daemon.tiers.ssd_tier import SsdTier
from kvpool.errors import LimitExceeded, Unavailable
from kvpool.storage.eviction import policy_maker
from kvpool.types import PartSpec, split_keys
from tests.sim.simulation.loop import run_alone
from tests.support.scripted_disk import ScriptedDisk

PAGE = 4096
FIELDS = b"{}"
BASE = hashlib.sha256(FIELDS).digest()[:16]
BLOCKS = 40
run = partial(run_alone, steps_max=500_000)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def keys(numbers: Iterable[int]) -> bytes:
    return b"".join(map(key, numbers))


class Bench:
    """Memory and two disks. Blocks 0 to 39 are in memory; the even ones also on the first disk, which 40 to 49 are
    on too; every third one on the second disk.
    """

    def __init__(self, *, memory_share: float = 1.0, disk_share: float = 1.0) -> None:
        config = DaemonConfig(
            socket="/kvpool.sock",
            ssd=tuple(DiskConfig(f"/{n}", 100 * PAGE) for n in range(2)),
        )

        def rules(share: float, *, packed: bool) -> Node:
            limits = Limits(soft_pin_share=1.0, hard_pin_share=share)
            return Node(make_policy=policy_maker("lru"), limits=limits, packed=packed)

        self.node = rules(memory_share, packed=False)
        self.tenant = self.node.add_tenant("default", 0, 100 * PAGE, PAGE)
        self.holder = self.node.holders.add("default", "engine")
        self.namespace = self.node.namespaces.open(self.tenant, BASE, FIELDS, [PartSpec(PAGE)])
        loop = asyncio.get_running_loop()
        self.tiers = SsdTier(
            config, self.node, loop.time, lambda: rules(disk_share, packed=True), self.adopt
        )
        self.disks = [ScriptedDisk(100 * PAGE) for _ in range(2)]
        self.tickets = 0

    async def adopt(self, _: TableRecord) -> NamespaceState | None:
        return self.node.namespaces.living(self.namespace)

    async def begin(self) -> None:
        for device, disk in zip(self.tiers.devices, self.disks, strict=True):
            await device.restore(disk, self.adopt)
        self.put(range(BLOCKS + 10))
        table = self.namespace.tables[0]
        on = [[*range(0, BLOCKS, 2), *range(BLOCKS, BLOCKS + 10)], range(0, BLOCKS, 3)]
        for device, numbers in zip(self.tiers.devices, on, strict=True):
            await device.write(table, [table.blocks[key(number)] for number in numbers], 0)
        self.node.removal.remove(self.namespace, split_keys(keys(range(BLOCKS, BLOCKS + 10))))

    def put(self, numbers: Iterable[int]) -> None:
        self.tickets += 1
        packed = split_keys(keys(numbers))
        self.node.puts.reserve(self.holder, self.namespace, 0, self.tickets, packed)
        self.node.puts.commit(self.holder, self.tickets, bytes(16 * len(packed)))
        self.node.settle()

    async def pin(self, numbers: Iterable[int], kind: str) -> int:
        return await pin_in_all_tiers(self.node, self.tiers, [self.namespace], keys(numbers), kind)

    def levels(self) -> list[dict[int, int]]:
        """In memory and on each disk: number of the block → how it is pinned."""
        found = []
        for node in [self.node, *(device.rules for device in self.tiers.devices)]:
            node.settle()
            (state,) = node.tenants["default"].namespaces.values()
            blocks = state.tables[0].blocks
            found.append({int.from_bytes(block.key, "big"): block.pin for block in blocks.values()})
        return found

    def indexed(self) -> list[dict[int, int]]:
        """What each disk's index says."""
        return [
            {
                int.from_bytes(e["key"].tobytes(), "big"): int(e["pin"])
                for e in disk.entries.values()
            }
            for disk in self.disks
        ]

    def pinned_bytes(self) -> list[tuple[int, int]]:
        """What quotas are compared with: (soft, hard) of each tier."""
        tables = [self.namespace.tables[0]]
        for device in self.tiers.devices:
            (state,) = device.rules.tenants["default"].namespaces.values()
            tables.append(state.tables[0])
        return [(table.soft_bytes, table.hard_bytes) for table in tables]

    def agrees(self) -> bool:
        """Indexes and quotas say the same as the blocks."""
        levels = self.levels()
        of = [Counter(tier.values()) for tier in levels]
        return levels[1:] == self.indexed() and self.pinned_bytes() == [
            (PAGE * one[PIN_SOFT], PAGE * one[PIN_HARD]) for one in of
        ]


@pytest.fixture(autouse=True)
def few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pin_requests, "PINNED_TOGETHER", 4)


def test_blocks_are_counted_once_wherever_they_are() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.begin()
        assert await bench.pin([*range(50), *range(50), 99], "soft") == 50
        assert all(set(tier.values()) == {PIN_SOFT} for tier in bench.levels())
        assert bench.agrees()
        assert await bench.pin(range(30, 60), "none") == 20
        assert await bench.pin([], "hard") == 0
        assert bench.agrees()

    run(main())


def test_others_are_served_while_many_are_pinned() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.begin()
        for disk in bench.disks:
            disk.orders.clear()
        together: list[int] = []
        seen = 0

        async def watch() -> None:
            nonlocal seen
            while True:
                now = sum(level == PIN_HARD for level in bench.levels()[0].values())
                together.append(now - seen)
                seen = now
                await asyncio.sleep(0)

        watcher = asyncio.create_task(watch())
        assert await bench.pin(range(BLOCKS), "hard") == BLOCKS
        watcher.cancel()
        assert max(together) == 4
        for disk in bench.disks:
            assert max(len(order.slots) // 8 for order in disk.of_kind("pin")) <= 4

    run(main())


@pytest.mark.parametrize("shares", [{"memory_share": 0.3}, {"disk_share": 0.2}])
def test_what_a_quota_refuses_late_is_undone_everywhere(shares: dict[str, float]) -> None:
    async def main() -> None:
        bench = Bench(**shares)
        await bench.begin()
        await bench.pin(range(5, 15), "soft")
        await bench.pin([2, 3, 4], "hard")
        before = bench.levels()
        with pytest.raises(LimitExceeded, match="the quota is"):
            await bench.pin(range(BLOCKS + 10), "hard")
        assert bench.levels() == before
        assert bench.agrees()

    run(main())


def test_a_disk_that_fails_does_not_leave_half_a_request_in_memory() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.begin()
        before = bench.levels()
        bench.disks[0].failures["pin"] = deque([Unavailable("it hangs")])
        with pytest.raises(Unavailable):
            await bench.pin(range(BLOCKS), "hard")
        assert bench.levels() == before
        assert bench.agrees()

    run(main())


def test_what_went_or_came_meanwhile_is_as_it_would_be_without_the_request() -> None:
    """A block that was removed and put again has no pin to be put back."""

    async def main() -> None:
        bench = Bench(memory_share=0.3)
        await bench.begin()
        await bench.pin([0, 1], "soft")
        bench.disks[1].held.add("pin")
        request = asyncio.create_task(bench.pin(range(BLOCKS), "hard"))
        await bench.disks[1].waits("pin")
        bench.node.removal.remove(bench.namespace, split_keys(keys([1, 3])))
        bench.disks[1].go_on()
        with pytest.raises(LimitExceeded):
            await request
        memory = bench.levels()[0]
        assert {number for number, level in memory.items() if level != PIN_NONE} == {0}
        assert memory.keys() == set(range(BLOCKS)) - {1, 3}
        assert bench.agrees()

    run(main())


def test_the_next_life_of_a_disk_is_not_told_of_the_last_ones_blocks() -> None:
    async def main() -> None:
        bench = Bench(memory_share=0.3)
        await bench.begin()
        bench.disks[1].held.add("pin")
        request = asyncio.create_task(bench.pin(range(BLOCKS), "hard"))
        await bench.disks[1].waits("pin")
        device, after = bench.tiers.devices[0], bench.disks[0].next_life()
        device.ended("killed")
        bench.disks[0] = after
        await device.restore(after, bench.adopt)
        as_restored = bench.levels()[1]
        bench.disks[1].go_on()
        with pytest.raises(LimitExceeded):
            await request
        now = bench.levels()[1]
        # The first blocks' pins had reached the index before; that life's are not asked for again.
        assert {number: now[number] for number in range(4) if number in now} == {
            number: as_restored[number] for number in range(4) if number in as_restored
        }
        assert bench.agrees()

    run(main())


def test_pins_that_are_put_back_need_no_room_in_a_quota() -> None:
    async def main() -> None:
        bench = Bench(memory_share=0.1)
        await bench.begin()
        pins: Pins = bench.node.pins
        ten = split_keys(keys(range(10)))
        pins.pin(bench.namespace, ten, "hard")
        before = levels(pins.check(bench.namespace, ten, "none"))
        pins.pin(bench.namespace, ten, "none")
        pins.pin(bench.namespace, split_keys(keys(range(10, 20))), "hard")
        pins.put_back(before)
        assert sum(level == PIN_HARD for level in bench.levels()[0].values()) == 20
        assert bench.agrees()

    run(main())


# ---- blocks that go before others --------------------------------------------------------------------


def test_what_nobody_is_to_continue_goes_first_on_a_disk_too_once_it_is_written() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.begin()
        device, table = bench.tiers.devices[0], bench.namespace.tables[0]
        (tenant,) = device.rules.tenants.values()
        odd = [key(number) for number in range(1, 21, 2)]
        candidates = bench.node.candidates
        candidates.expend(bench.namespace, odd[:4], left=True)  # a session has left them
        candidates.expend(bench.namespace, odd[4:6])  # it has given them up for a while
        candidates.expend(bench.namespace, odd[6:8], left=True)
        read = bench.node.leases.acquire(
            bench.holder, bench.namespace, (0,), odd[6:8], 1.0, 0.0, scattered=True
        )
        assert read is not None
        bench.node.leases.release(bench.holder, read.token)
        await device.write(table, [table.blocks[each] for each in odd], 0)
        assert device.rules.candidates.expendable(tenant) == 4
        (state,) = tenant.namespaces.values()
        assert device.rules.candidates.ordinary(state, odd) == odd[4:]
        assert bench.tiers.ordinary(bench.namespace, odd) == odd[4:]

    run(main())


def test_what_is_kept_for_a_time_is_not_pinned_on_a_disk() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.begin()
        device, table = bench.tiers.devices[0], bench.namespace.tables[0]
        odd = [key(number) for number in range(1, 9, 2)]
        bench.node.keeps.keep(bench.namespace, odd, 1.0)
        bench.node.pins.pin(bench.namespace, odd[:1], "hard")
        bench.node.keeps.forget(bench.namespace, odd[:1])
        await device.write(table, [table.blocks[each] for each in odd], 0)
        assert bench.levels()[0][3] == PIN_SOFT
        assert {n: bench.levels()[1][n] for n in (1, 3, 5, 7)} == {1: PIN_HARD, 3: 0, 5: 0, 7: 0}
        assert bench.agrees()

    run(main())


def test_a_refused_request_leaves_what_was_kept_as_it_was() -> None:
    async def main() -> None:
        bench = Bench(disk_share=6 / 100)
        await bench.begin()
        bench.node.keeps.keep(bench.namespace, [key(1), key(3)], 9.0)
        with pytest.raises(LimitExceeded):
            await bench.pin([1, 3, *range(0, 40, 2)], "hard")
        assert bench.levels()[0][1] == bench.levels()[0][3] == PIN_SOFT
        while bench.node.keeps.end_some(9.0):
            pass
        assert set(bench.levels()[0].values()) == {PIN_NONE}
        assert bench.agrees()

    run(main())

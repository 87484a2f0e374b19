"""The tier of device memory: what is copied up and when, and what becomes of it when something ends meanwhile."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from array import array
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.config import DaemonConfig, DeviceConfig
from kvpool.daemon.core.blocks import Lease
from kvpool.daemon.core.events import Read, Stage
from kvpool.daemon.core.limits import Limits
from kvpool.daemon.core.node import Node
from kvpool.daemon.server.answers import describe_lease
from kvpool.daemon.server.server import Server
from kvpool.daemon.tiers import device_books, device_tier
from kvpool.daemon.tiers.device_promote import QUEUED_MAX
from kvpool.daemon.tiers.device_tier import DeviceTier
from kvpool.errors import ConfigError, InvalidRequest, LimitExceeded, Unavailable
from kvpool.storage.eviction import policy_maker
from kvpool.types import PartSpec, split_keys
from kvpool.wire import frame
from kvpool.wire import worker as worker_wire
from tests.sim.simulation.loop import run_alone

STRIDE = 64 << 10
FIELDS = b"{}"
BASE = hashlib.sha256(FIELDS).digest()[:16]
ABSENT, PRESENT, MISMATCH, LATE = range(4)
LIVES = itertools.count(1)


run = partial(run_alone, steps_max=200_000)


def make_node(limits: Limits | None = None) -> Node:
    return Node(make_policy=policy_maker("lru"), limits=limits or Limits())


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def packed(numbers: Iterable[int]) -> bytes:
    return b"".join(map(key, numbers))


def numbers_of(rows: bytes) -> list[int]:
    return array("I", rows).tolist()


class ScriptedDevice:
    """Device memory whose rows hold the numbers of blocks, by the rows of memory that they came from."""

    def __init__(self, memory: dict[int, int]) -> None:
        self.life = next(LIVES)
        self.memory = memory
        self.rows: dict[int, int] = {}
        self.orders = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.spoilt: set[int] = set()

    async def _turn(self) -> None:
        self.orders += 1
        await self.gate.wait()
        if self.error is not None:
            raise self.error

    async def promote(self, order: worker_wire.PromoteBlocks) -> None:
        rows, targets = numbers_of(order.rows), numbers_of(order.device_rows)
        held = [self.memory[row] for row in rows]
        await self._turn()
        assert held == [self.memory[row] for row in rows], "memory was written under a copy"
        self.rows |= dict(zip(targets, held, strict=True))

    async def export(self, segment: int) -> bytes:
        raise NotImplementedError

    @property
    def life_fd(self) -> int:
        raise NotImplementedError

    async def demote(self, order: worker_wire.DemoteBlocks) -> worker_wire.Pulled:
        sources = numbers_of(order.device_rows)
        await self._turn()
        status = bytearray()
        for at, (row, source) in enumerate(zip(numbers_of(order.rows), sources, strict=True)):
            number = self.rows[source]
            assert order.checksums[at * 16 : at * 16 + 16] == key(number + 1000)
            status.append(MISMATCH if number in self.spoilt else PRESENT)
            self.memory[row] = number
        return worker_wire.Pulled(bytes(status), b"", 0.01)


class Bench:
    """Memory for so many blocks, and a device for so many more."""

    def __init__(self, memory: int = 64, device: int = 32, limits: Limits | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self.node = make_node(limits)
        self.tenant = self.node.add_tenant("default", 0, memory * STRIDE, STRIDE)
        self.holder = self.node.holders.add("default", "engine")
        self.namespace = self.node.namespaces.open(self.tenant, BASE, FIELDS, [PartSpec(STRIDE)])
        config = DeviceConfig("cpu", device * STRIDE)
        self.tier = DeviceTier(config, self.node, self.loop.time, make_node)
        self.memory: dict[int, int] = {}
        self.tickets = 0
        self.tier.divide()
        self.tier.begin()
        self.device = self.new_life()

    def new_life(self) -> ScriptedDevice:
        self.device = ScriptedDevice(self.memory)
        self.tier.began(self.device)
        return self.device

    @property
    def table(self) -> Any:
        return self.namespace.tables[0]

    def put(self, numbers: Iterable[int]) -> None:
        numbers = list(numbers)
        self.tickets += 1
        _, rows = self.node.puts.reserve(
            self.holder, self.namespace, 0, self.tickets, split_keys(packed(numbers))
        )
        self.memory |= dict(zip(numbers_of(rows), numbers, strict=True))
        sums = b"".join(key(number + 1000) for number in numbers)
        self.node.puts.commit(self.holder, self.tickets, sums)
        self.node.settle()

    def read(self, numbers: Iterable[int]) -> None:
        """As an engine does."""
        lease = self.node.leases.acquire(
            self.holder,
            self.namespace,
            [0],
            split_keys(packed(numbers)),
            1.0,
            self.loop.time(),
            scattered=True,
        )
        assert lease is not None
        self.tier.was_read(Read(self.namespace, [0], b"", [], 0, 0, Stage.HERE, None, lease))
        self.node.leases.release(self.holder, lease.token)

    def lease(self, numbers: Iterable[int], lease_s: float = 1.0) -> Lease | None:
        """Of an engine that reads the device by itself."""
        now = self.loop.time()
        return self.tier.acquire(
            self.holder, self.namespace, [], split_keys(packed(numbers)), lease_s, now
        )

    def read_where_it_is(self, lease: Lease) -> list[int]:
        """The numbers of its blocks, by the rows that its holder is told."""
        (part,) = describe_lease(lease, lease.parts, self.loop.time(), None).parts
        rows = numbers_of(part.rows)
        above = numbers_of(part.device_rows) or [frame.NO_ROW] * len(rows)
        assert all(
            (a == frame.NO_ROW) != (b == frame.NO_ROW) for a, b in zip(rows, above, strict=True)
        )
        return [
            self.memory[row] if row != frame.NO_ROW else self.device.rows[there]
            for row, there in zip(rows, above, strict=True)
        ]

    async def settle(self) -> None:
        """Until all has been done that can be."""
        await asyncio.sleep(0.5)

    def here(self) -> set[int]:
        self.tier.rules.settle()
        groups: list[Any] = list(self.tier.held(self.table))
        return {int.from_bytes(key, "big") for held in groups for key in held}

    async def bring(self, numbers: Iterable[int]) -> bytes:
        """Read back into memory; the status of each."""
        numbers = list(numbers)
        self.tickets += 1
        self.node.puts.reserve(
            self.holder, self.namespace, 0, self.tickets, split_keys(packed(numbers))
        )
        reservation = self.holder.reservations[self.tickets]
        try:
            pulled = await self.tier.load(self.table, reservation.keys, reservation.rows, 1.0)
        finally:
            self.node.puts.abort(self.holder, self.tickets)
        return pulled.status

    async def close(self) -> None:
        await self.tier.close()


@pytest.fixture(autouse=True)
def small_grain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_books, "GRAIN", STRIDE)


def test_what_is_read_goes_up_and_comes_back() -> None:
    async def work() -> None:
        bench = Bench()
        bench.put(range(20))
        bench.read(range(5, 15))
        await bench.settle()
        assert bench.here() == set(range(5, 15))
        bench.node.removal.give_up(bench.namespace, [key(n) for n in range(20)])
        assert await bench.bring(range(3, 9)) == bytes([ABSENT] * 2 + [PRESENT] * 4)
        bench.put([50])  # settled slots are used again
        await bench.close()

    run(work())


def test_a_copy_is_made_once() -> None:
    async def work() -> None:
        bench = Bench()
        bench.put(range(4))
        for _ in range(5):
            bench.read(range(4))
            await bench.settle()
        assert bench.tier.counted.written_blocks == 4
        await bench.close()

    run(work())


def test_what_is_being_copied_is_not_evicted_and_puts_go_on() -> None:
    async def work() -> None:
        bench = Bench(memory=64)
        bench.put(range(64))
        bench.device.gate.clear()
        bench.read(range(64))
        await bench.settle()
        assert bench.device.orders == 1, "one order at a time"
        for at in range(100, 400, 10):
            bench.put(range(at, at + 10))  # the copy under way asserts that its rows are left alone
        held = {int.from_bytes(k, "big") for k in bench.table.blocks} & set(range(64))
        assert 0 < len(held) <= 2, "what is held at a time is a small share"
        bench.device.gate.set()
        await bench.settle()
        assert bench.here() == held
        bench.put(range(400, 464))
        assert not held & {int.from_bytes(k, "big") for k in bench.table.blocks}, (
            "not held any more"
        )
        await bench.close()

    run(work())


def test_the_queue_is_bounded() -> None:
    reads = QUEUED_MAX // 10

    async def work() -> None:
        bench = Bench()
        bench.put(range(30))
        bench.device.gate.clear()
        bench.read(range(1))
        await bench.settle()
        for _ in range(reads + 3):
            bench.read(range(10))
        assert bench.tier.stats().queued_blocks == 10 * reads
        assert bench.tier.counted.not_queued_blocks == 30
        bench.device.gate.set()
        await bench.settle()
        assert bench.tier.stats().queued_blocks == 0
        assert bench.here() == set(range(10))
        await bench.close()

    run(work())


def test_a_device_that_dies_under_a_copy() -> None:
    async def work() -> None:
        bench = Bench()
        bench.put(range(8))
        bench.device.gate.clear()
        bench.read(range(8))
        await bench.settle()
        bench.device.error = Unavailable("dead")
        bench.tier.ended("dead")
        assert bench.here() == set()
        assert not bench.tier.serving
        bench.device.gate.set()
        await bench.settle()
        assert bench.here() == set()
        bench.new_life()
        bench.read(range(8))
        await bench.settle()
        assert bench.here() == set(range(8))
        await bench.close()

    run(work())


def test_what_is_removed_while_it_is_copied_does_not_come_back() -> None:
    async def work() -> None:
        bench = Bench()
        bench.put(range(8))
        bench.device.gate.clear()
        bench.read(range(8))
        await bench.settle()
        bench.node.removal.remove(bench.namespace, [key(n) for n in range(3)])
        bench.device.gate.set()
        await bench.settle()
        assert bench.here() == set(range(3, 8))
        await bench.close()

    run(work())


def test_a_copy_that_fails_gives_its_slots_back() -> None:
    async def work() -> None:
        bench = Bench(device=8)
        bench.put(range(16))
        bench.device.error = Unavailable("not now")
        for _ in range(5):
            bench.read(range(8))
            await bench.settle()
        assert bench.tier.used_bytes == 0
        assert bench.tier.counted.write_errors == bench.device.orders > 0
        bench.device.error = None
        bench.read(range(8, 16))
        await bench.settle()
        assert bench.here() == set(range(8, 16))
        await bench.close()

    run(work())


def test_a_device_that_dies_under_a_read() -> None:
    async def work() -> None:
        bench = Bench()
        bench.put(range(8))
        bench.read(range(8))
        await bench.settle()
        bench.node.removal.give_up(bench.namespace, [key(n) for n in range(8)])
        bench.device.gate.clear()
        reading = asyncio.ensure_future(bench.bring(range(8)))
        await bench.settle()
        bench.device.error = Unavailable("dead")
        bench.tier.ended("dead")
        bench.new_life()
        bench.device.gate.set()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert await bench.bring(range(8)) == bytes(8)
        await bench.close()

    run(work())


def test_what_is_damaged_is_found_no_more() -> None:
    async def work() -> None:
        bench = Bench()
        bench.put(range(6))
        bench.read(range(6))
        await bench.settle()
        bench.node.removal.give_up(bench.namespace, [key(n) for n in range(6)])
        bench.device.spoilt = {2, 4}
        assert await bench.bring(range(6)) == bytes([1, 1, 2, 1, 2, 1])
        assert bench.here() == {0, 1, 3, 5}
        assert bench.tier.counted.mismatches == 2
        await bench.close()

    run(work())


def test_what_is_being_read_is_not_overwritten() -> None:
    async def work() -> None:
        bench = Bench(memory=256, device=8)
        bench.put(range(100))
        bench.read(range(8))
        await bench.settle()
        bench.node.removal.give_up(bench.namespace, [key(n) for n in range(8)])
        bench.device.gate.clear()
        reading = asyncio.ensure_future(bench.bring(range(8)))
        await asyncio.sleep(0)
        bench.read(range(50, 58))
        await bench.settle()
        bench.device.gate.set()
        # The scripted device asserts that the rows hold what they did when the read was ordered.
        assert await reading == bytes([PRESENT] * 8)
        bench.read(range(60, 68))
        await bench.settle()
        assert bench.here() & set(range(60, 68))
        await bench.close()

    run(work())


def test_an_ended_epoch_is_not_found_and_its_slots_come_back() -> None:
    async def work() -> None:
        bench = Bench()
        bench.put(range(8))
        bench.read(range(8))
        await bench.settle()
        bench.put(range(8, 16))
        bench.device.gate.clear()
        bench.read(range(8, 16))
        await bench.settle()
        bench.namespace = bench.node.namespaces.set_epoch(bench.namespace, 1, 0)
        bench.tier.enter(bench.namespace)
        bench.device.gate.set()
        await asyncio.sleep(device_tier.TIDY_EVERY_S + 0.1)
        assert bench.here() == set()
        assert bench.tier.used_bytes == 0
        bench.put(range(3))
        bench.read(range(3))
        await bench.settle()
        assert bench.here() == set(range(3))
        await bench.close()

    run(work())


def test_changes_are_told_through_lives_of_the_process() -> None:
    async def work() -> None:
        bench = Bench()
        told: list[int] = []
        bench.tier.follow_changes(lambda: told.append(1))
        bench.put(range(4))
        bench.read(range(4))
        await bench.settle()

        def taken() -> set[bytes]:
            return {each for _, keys in bench.tier.take_changes() for each in keys}

        assert taken() == {key(n) for n in range(4)}
        digest = bench.namespace.directory_digest
        assert bench.tier.masks(digest, [key(1), key(9)]) == (1, [1, 0])
        bench.tier.ended("dead")
        assert taken() == {key(n) for n in range(4)}, "they have gone"
        assert bench.tier.masks(digest, [key(1)]) == (0, [])
        bench.new_life()
        bench.read(range(2))
        await bench.settle()
        assert taken() == {key(n) for n in range(2)}
        await bench.close()

    run(work())


def test_tenants_have_parts_by_their_memory() -> None:
    async def work() -> None:
        bench = Bench(memory=48, device=32)
        bench.node.add_tenant("red", 1, 16 * STRIDE, STRIDE)
        bench.tier.divide()
        bench.new_life()
        sizes = {name: t.allocator.size for name, t in bench.tier.rules.tenants.items()}
        assert sizes == {"default": 24 * STRIDE, "red": 8 * STRIDE}
        assert bench.tier.record().capacity_bytes == 32 * STRIDE
        await bench.close()

    run(work())


def test_without_torch_a_daemon_says_so_before_it_takes_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_tier, "find_spec", lambda name: None)
    config = DaemonConfig(socket="/nowhere/k.sock", device=DeviceConfig("cpu", 4 << 20))
    with pytest.raises(ConfigError, match="needs torch"):
        Server(config)


def test_memory_that_is_full_refuses_and_nothing_is_lost() -> None:
    """A device whose every slot is leased copies nothing up, and says so by doing nothing."""

    async def work() -> None:
        bench = Bench(memory=256, device=4)
        bench.put(range(20))
        bench.read(range(4))
        await bench.settle()
        bench.node.removal.give_up(bench.namespace, [key(n) for n in range(4)])
        bench.device.gate.clear()
        reading = asyncio.ensure_future(bench.bring(range(4)))
        await asyncio.sleep(0)
        orders = bench.device.orders
        bench.read(range(10, 14))
        await bench.settle()
        assert bench.device.orders == orders
        bench.device.gate.set()
        assert await reading == bytes([PRESENT] * 4)
        assert bench.here() == set(range(4))
        await bench.close()

    run(work())


@settings(max_examples=40, deadline=None)
@given(
    promoted=st.sets(st.integers(0, 11)),
    kept=st.sets(st.integers(0, 11)),
    asked=st.integers(1, 12),
)
def test_a_lease_is_on_what_memory_and_device_have_together(
    promoted: set[int], kept: set[int], asked: int
) -> None:
    async def work() -> None:
        bench = Bench()
        bench.put(range(12))
        if promoted:
            bench.read(sorted(promoted))
        await bench.settle()
        assert bench.here() == promoted
        bench.node.removal.give_up(bench.namespace, [key(n) for n in range(12) if n not in kept])
        expected = []
        for number in range(asked):
            if number not in promoted | kept:
                break
            expected.append(number)
        lease = bench.lease(range(asked))
        if not expected:
            assert lease is None
        else:
            assert lease is not None
            assert lease.blocks == len(expected)
            assert bench.read_where_it_is(lease) == expected
            bench.node.leases.release(bench.holder, lease.token)
        assert bench.node.leases.count == bench.tier.rules.leases.count == 0
        await bench.close()

    run(work())


@pytest.mark.parametrize("end", ["release", "expiry", "death"])
def test_what_is_leased_on_the_device_stays_until_the_lease_ends(end: str) -> None:
    async def work() -> None:
        bench = Bench(device=16)
        bench.put(range(16))
        bench.read(range(16))
        await bench.settle()
        bench.node.removal.give_up(bench.namespace, [key(n) for n in range(16)])
        lease = bench.lease(range(8))
        assert lease is not None
        rows = bench.read_where_it_is(lease)
        await turn_over(bench, range(100, 132))
        assert bench.read_where_it_is(lease) == rows == list(range(8))
        assert bench.here() >= set(range(8))
        match end:
            case "release":
                bench.node.leases.release(bench.holder, lease.token)
            case "expiry":
                bench.node.leases.expire(bench.loop.time() + 2.0)
            case "death":
                bench.node.holders.died(bench.holder)
                bench.holder = bench.node.holders.add("default", "another")
        assert bench.tier.rules.leases.count == 0
        await turn_over(bench, range(200, 232))
        assert bench.here().isdisjoint(range(8))
        assert bench.tier.counted.leased_blocks == 8
        assert bench.tier.counted.leased_bytes == 8 * STRIDE
        await bench.close()

    run(work())


async def turn_over(bench: Bench, numbers: range) -> None:
    """Have so many be read, a few at a time."""
    for at in range(numbers.start, numbers.stop, 4):
        bench.put(range(at, at + 4))
        bench.read(range(at, at + 4))
        await bench.settle()


def test_a_lease_outlives_the_life_that_it_is_on() -> None:
    async def work() -> None:
        bench = Bench()
        bench.put(range(8))
        bench.read(range(8))
        await bench.settle()
        bench.node.removal.give_up(bench.namespace, [key(n) for n in range(8)])
        lease = bench.lease(range(8))
        assert lease is not None
        assert lease.beside is not None
        first = bench.tier.life
        assert lease.beside.life == first
        bench.tier.ended("its process ended")
        assert bench.tier.life == 0
        bench.new_life()
        assert bench.tier.life not in {0, first}
        assert bench.lease(range(8)) is None
        bench.node.leases.release(bench.holder, lease.token)  # of rules that bind nobody any more
        assert bench.node.leases.count == bench.tier.rules.leases.count == 0
        await bench.close()

    run(work())


def test_when_memory_refuses_a_lease_nothing_is_held_on_the_device() -> None:
    async def work() -> None:
        bench = Bench(limits=Limits(leases_per_holder=1))
        bench.put(range(4))
        bench.read(range(4))
        await bench.settle()
        with pytest.raises(InvalidRequest):
            bench.lease(range(4), lease_s=0.0)
        assert bench.tier.rules.leases.count == 0
        bench.lease(range(4))
        assert bench.tier.rules.leases.count == 1
        with pytest.raises(LimitExceeded):
            bench.lease(range(4))
        assert bench.tier.rules.leases.count == 1
        await bench.close()

    run(work())

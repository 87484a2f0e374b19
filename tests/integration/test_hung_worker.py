"""A worker that hangs in the kernel: killed, it does not end. What it may write to is not used again before it has.

A stopped process stands for one in state D: it is stopped, and the kill is kept from it until the test lets it come.
"""

from __future__ import annotations

import asyncio
import signal
from array import array
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from kvpool.config import DaemonConfig, DiskConfig
from kvpool.daemon.core.blocks import NamespaceState
from kvpool.daemon.core.node import Node
from kvpool.daemon.tiers import ssd_processes
from kvpool.daemon.tiers.ssd_books import TableRecord
from kvpool.daemon.tiers.ssd_tier import SsdTier
from kvpool.daemon.workers.disk_proxy import DiskWorkerProxy
from kvpool.daemon.workers.supervisor import QUARANTINED_MAX, WorkerSupervisor
from kvpool.errors import Unavailable
from kvpool.storage.dram import DramSegment
from kvpool.storage.eviction import policy_maker
from kvpool.types import PartSpec
from kvpool.wire import storage as storage_wire
from kvpool.wire import worker as worker_wire
from tests.support.signals import send
from tests.support.waiting import PATIENCE_S, until_async

PAGE = 4096


class HangingDisk(DiskWorkerProxy):
    """Once it hangs, a kill waits until `let_die`."""

    GRACE_S = KILL_S = STOP_S = 0.2  # nobody waits long
    hangs = False

    def hang(self) -> None:
        self.hangs = True
        send(self.pid, signal.SIGSTOP)

    def _send_kill(self) -> None:
        if not self.hangs:
            super()._send_kill()

    def let_die(self) -> None:
        self.hangs = False
        super()._send_kill()


class Independent(HangingDisk):
    """One of a kind that others may run beside."""

    alone = False


class World:
    """A disk's folder and a segment for it. errors: why the worker was said to have ended."""

    def __init__(self, folder: Path) -> None:
        self.segment = DramSegment.create(1 << 20)
        self.folder = folder
        self.lives: list[HangingDisk] = []
        self.errors: list[str] = []

    def make(self, kind: type[HangingDisk] = HangingDisk) -> HangingDisk:
        # Those that may run beside others have a folder each.
        path = self.folder / (f"ssd-{len(self.lives)}" if kind is Independent else "ssd")
        self.lives.append(kind(DiskConfig(str(path), 16 << 20), {0: self.segment}))
        return self.lives[-1]

    def supervised(self, kind: type[HangingDisk] = HangingDisk) -> WorkerSupervisor[HangingDisk]:
        return WorkerSupervisor(lambda: self.make(kind), ended=self.errors.append)


@asynccontextmanager
async def world_in(folder: Path) -> AsyncIterator[World]:
    world = World(folder)
    try:
        yield world
    finally:
        for life in world.lives:
            life.let_die()
        await asyncio.gather(*(life.died() for life in world.lives))
        world.segment.close()


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await test

    uvloop.run(bounded())


def read(seconds: float = 0.0) -> storage_wire.ReadBlocks:
    rows = array("I", [1]).tobytes()
    return storage_wire.ReadBlocks(
        PAGE, bytes(16), array("Q", [0]).tobytes(), 0, PAGE, rows, seconds
    )


FORGET = storage_wire.ForgetSlots(array("Q", [0]).tobytes(), 0.0)


def test_what_it_may_write_to_stays_reserved_until_it_has_ended(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world_in(tmp_path) as world:
            disk = world.make()
            await disk.start()
            disk.hang()
            filling = asyncio.create_task(disk.read(read()))
            other = asyncio.create_task(disk.forget(FORGET))
            with pytest.raises(Unavailable, match="does not end"):
                await other
            assert disk.quarantined
            assert not disk.alive
            with pytest.raises(Unavailable, match="does not end"):
                await disk.read(read())
            filling.cancel()  # does not free its rows either
            await disk.left()
            assert not filling.done()
            disk.let_die()
            with pytest.raises(asyncio.CancelledError):
                await filling
            assert not disk.quarantined

    run(scenario())


def test_no_other_one_is_started_before_it_has_ended(tmp_path: Path) -> None:
    """It may still write to the disk."""

    async def scenario() -> None:
        async with world_in(tmp_path) as world:
            supervisor = world.supervised()
            await supervisor.insist("a disk")
            first = world.lives[0]
            first.hang()
            filling = asyncio.create_task(first.read(read()))
            await until_async(lambda: bool(world.errors))
            assert "does not end" in world.errors[0]
            assert (supervisor.hangs, supervisor.quarantined, supervisor.alive) == (1, 1, False)
            assert not filling.done()
            assert world.lives == [first]
            first.let_die()
            await until_async(lambda: supervisor.alive)
            assert filling.done()
            assert (len(world.lives), supervisor.quarantined) == (2, 0)
            await supervisor.stop()

    run(scenario())


def test_others_of_its_kind_are_started_but_not_ever_more(tmp_path: Path) -> None:
    most = QUARANTINED_MAX

    async def scenario() -> None:
        async with world_in(tmp_path) as world:
            supervisor = world.supervised(Independent)
            await supervisor.start()
            filling = []
            for count in range(1, most + 1):
                await until_async(lambda count=count: len(world.lives) == count)
                await until_async(lambda: supervisor.alive)
                world.lives[-1].hang()
                filling.append(asyncio.create_task(world.lives[-1].read(read())))
                await until_async(lambda count=count: supervisor.hangs == count)
            assert supervisor.quarantined == most
            world.lives[0].let_die()
            await until_async(lambda: supervisor.alive)
            assert (len(world.lives), supervisor.quarantined) == (most + 1, most - 1)
            assert [task.done() for task in filling] == [True, *[False] * (most - 1)]
            for life in world.lives[1:most]:
                life.let_die()
            await supervisor.stop()
            await asyncio.gather(*filling, return_exceptions=True)

    run(scenario())


def test_a_daemon_that_stops_does_not_wait_for_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world_in(tmp_path) as world:
            supervisor = world.supervised()
            await supervisor.start()
            world.lives[0].hang()
            filling = asyncio.create_task(world.lives[0].read(read(60.0)))
            await asyncio.sleep(0)
            await supervisor.stop()
            with pytest.raises(Unavailable):
                await filling
            assert world.lives[0].quarantined

    run(scenario())


def test_a_tier_is_closed_while_its_disk_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a write and a read under way, neither of which ends."""

    async def scenario() -> None:
        async with world_in(tmp_path) as world:
            monkeypatch.setattr(ssd_processes, "DiskWorkerProxy", lambda *_: world.make())
            node = Node(make_policy=policy_maker("lru"))
            tenant = node.add_tenant("default", 0, 1 << 20)
            parts = (PartSpec(PAGE),)
            namespace = node.namespaces.open(tenant, b"n" * 16, b"{}", parts)
            holder = node.holders.add("default", "engine")

            def put(number: int) -> None:
                key = number.to_bytes(16, "big")
                node.puts.reserve(holder, namespace, 0, number, [key])
                node.puts.commit(holder, number, bytes(16))
                tier.stored(namespace, 0, lambda: [key])

            async def adopt(_: TableRecord) -> NamespaceState:
                return namespace

            config = DaemonConfig(
                socket="unused",
                ssd=(DiskConfig(str(tmp_path / "ssd"), 16 << 20),),
                ssd_write="through",
            )
            clock = asyncio.get_running_loop().time
            tier = SsdTier(
                config,
                node,
                clock,
                lambda: Node(make_policy=policy_maker("lru"), packed=True),
                adopt,
            )
            await tier.start({0: world.segment})
            tier.begin()
            (device,) = tier.devices
            put(1)
            await until_async(lambda: device.counted.written_blocks == 1)
            world.lives[0].hang()
            put(2)
            await until_async(lambda: device.counted.writing_bytes > 0)
            table = namespace.tables[0]
            reading = asyncio.create_task(tier.load(table, [(1).to_bytes(16, "big")], [9], 60.0))
            await until_async(lambda: world.lives[0].busy == 2)
            await tier.close()
            assert (await reading).error
            assert world.lives[0].quarantined

    run(scenario())


def test_one_that_hangs_while_it_starts_is_not_joined_by_others(tmp_path: Path) -> None:
    class Stuck(HangingDisk):
        async def _prepare(self) -> None:
            if len(world.lives) == 1:
                self.hang()
                await self._ask(worker_wire.AttachSegment(0, 0), 0.0)
            await super()._prepare()

    world: World

    async def scenario() -> None:
        nonlocal world
        async with world_in(tmp_path) as world:
            supervisor = world.supervised(Stuck)
            supervisor.INSIST_S = 0.01
            insisting = asyncio.create_task(supervisor.insist("a disk"))
            await until_async(lambda: bool(world.errors))
            assert "does not end" in world.errors[0]
            assert len(world.lives) == 1
            world.lives[0].let_die()
            await insisting
            assert (len(world.lives), supervisor.alive) == (2, True)
            await supervisor.stop()

    run(scenario())

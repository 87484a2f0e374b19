"""A source that hangs costs only what it alone has: many readers at a time, and sources that stop answering."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Self

import pytest

from kvpool.daemon.core.blocks import PartTable
from kvpool.daemon.core.limits import Limits
from kvpool.daemon.core.node import Node
from kvpool.daemon.fetch import transfers
from kvpool.daemon.fetch.fetcher import BlockFetcher
from kvpool.daemon.fetch.ports import DISKS, NOT_NODES, LivingNode
from kvpool.daemon.workers import disk_worker, object_worker
from kvpool.daemon.workers.turns import PULLS, TurnLimits
from kvpool.errors import LimitExceeded, Unavailable
from kvpool.placement.directory.base import TIERS, Entry
from kvpool.placement.peers import Peers
from kvpool.storage.eviction import policy_maker
from kvpool.types import BlockStatus, PartKind, PartSpec
from kvpool.wire import frame
from kvpool.wire import peer as peer_wire
from kvpool.wire import worker as worker_wire
from tests.contract.suites.memory_tier import SharedMemoryTier
from tests.sim.simulation.loop import run_alone

NBYTES = 4096
SERVICE_S = 0.004  # a healthy source's time for one order
PROMPTS, PARTS, BLOCKS = 64, 8, 4
WAIT_S = 4.0

run = partial(run_alone, steps_max=4_000_000)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Disk:
    """One of the node's disks. A stopped one's orders do not end, however often they are cancelled."""

    def __init__(self, world: World, number: int, keys: set[bytes]) -> None:
        self.world, self.keys = world, keys
        self.source = DISKS[number]
        self.serving = True

    def held(self, table: PartTable) -> list[set[bytes]]:
        return [self.keys]

    async def load(
        self, table: PartTable, keys: Sequence[bytes], rows: Sequence[int], seconds: float
    ) -> worker_wire.Pulled:
        stopped = self.source in self.world.stopped
        return await self.world.deliver(self.source, len(keys), seconds, unkillable=stopped)


class World:
    """A node among peers that all have every block. Event loop of virtual time.

    peers: their names. stopped: those that answer nothing any more. most: orders under way at a time, by source.
    blocks: that fit into memory. parts: a mask of those that a peer has, where not all; lacks: one that it has not of
    one block. slow: its time for one order. unknown: keys that no peer has.
    """

    def __init__(
        self,
        *peers: str,
        disks: Mapping[int, set[bytes]] | None = None,
        blocks: int = 8192,
        pulls: TurnLimits = PULLS,
        specs: tuple[PartSpec, ...] = (PartSpec(NBYTES),) * PARTS,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.node = Node(make_policy=policy_maker("lru"), limits=Limits())
        self.tenant_blocks = blocks
        tenant = self.node.add_tenant("red", 0, self.tenant_blocks * NBYTES, NBYTES)
        self.namespace = self.node.namespaces.open(tenant, b"n" * 16, b"{}", specs)
        self.stopped: set[bytes] = set()
        self.parts: dict[bytes, int] = {}
        self.lacks: dict[tuple[bytes, bytes], int] = {}
        self.slow: dict[bytes, float] = {}
        self.unknown: set[bytes] = set()
        self.emptied: set[bytes] = set()
        self.under_way: Counter[bytes] = Counter()
        self.most: Counter[bytes] = Counter()
        self.most_of_peers = 0
        self.refused: set[bytes] = set()
        self.dead = asyncio.Event()  # the processes of hung disks, at last
        self.living: Mapping[bytes, LivingNode] = {
            name.encode(): LivingNode(node_record(name), name) for name in peers
        }
        self.peers = Peers({}, random.Random(7), apart=NOT_NODES)
        self.directory: Any = self
        found: Any = self
        self.fetcher = BlockFetcher(
            self.node,
            found,
            found,
            [Disk(self, number, keys) for number, keys in (disks or {}).items()],
            SharedMemoryTier({}, 0),
            self.peers,
            self.loop.time,
            pulls=pulls,
        )

    async def locate(self, digest: bytes, parts: int, keys: Sequence[bytes]) -> list[list[Entry]]:
        every = (1 << parts) - 1
        return [
            [
                Entry(
                    peer,
                    TIERS["dram"],
                    self.parts.get(peer, every) & ~self.lacks.get((peer, key), 0),
                )
                for peer in self.living
                if key not in self.unknown
            ]
            for key in keys
        ]

    def met(self, *_: object) -> None:
        raise AssertionError("all live")

    async def ask(self, order: worker_wire.AskPeer) -> frame.Done:
        assert isinstance(order.question, peer_wire.Ask)
        await asyncio.sleep(order.deadline_s if order.url.encode() in self.stopped else SERVICE_S)
        if order.url.encode() in self.stopped:
            raise Unavailable("the peer did not answer")
        return frame.Done(len(order.question.keys) // 16)

    async def pull(self, order: worker_wire.PullBlocks) -> worker_wire.Pulled:
        return await self.deliver(order.url.encode(), order.count, order.deadline_s)

    async def deliver(
        self, source: bytes, blocks: int, seconds: float, *, unkillable: bool = False
    ) -> worker_wire.Pulled:
        if source in self.refused:
            raise LimitExceeded("too much is under way here")
        self.under_way[source] += 1
        self.most[source] = max(self.most[source], self.under_way[source])
        running = sum(count for one, count in self.under_way.items() if one in self.living)
        self.most_of_peers = max(self.most_of_peers, running)
        began = self.loop.time()
        try:
            while unkillable and not self.dead.is_set():
                try:
                    await self.dead.wait()
                except asyncio.CancelledError:
                    pass
            if unkillable:
                raise Unavailable("its process has ended")
            late = source in self.stopped
            await asyncio.sleep(seconds if late else self.slow.get(source, SERVICE_S))
        finally:
            self.under_way[source] -= 1
        took = self.loop.time() - began
        status = BlockStatus.LATE if late else BlockStatus.PRESENT
        if source in self.emptied:
            status = BlockStatus.ABSENT
        error = f"the peer did not answer within {seconds} s" if late else ""
        return worker_wire.Pulled(bytes([status]) * blocks, bytes(16 * blocks), took, error)

    async def prompt(self, number: int, wait_s: float = WAIT_S) -> tuple[int, float]:
        """How many blocks of a prompt are here, and after how long."""
        keys = [key(number * BLOCKS + at) for at in range(BLOCKS)]
        began = self.loop.time()
        await self.fetcher.pull(self.namespace, [], keys, 0, wait_s)
        took = self.loop.time() - began
        return self.node.leases.match(self.namespace, [], keys), took

    async def read(self, number: int, read_s: float) -> int:
        """As `prompt`, and its blocks stay leased for a while."""
        found, _ = await self.prompt(number)
        keys = [key(number * BLOCKS + at) for at in range(found)]
        if found:
            reader = self.node.holders.own("red", f"reader {number}")
            parts = range(PARTS)
            lease = self.node.leases.acquire(
                reader, self.namespace, parts, keys, None, self.loop.time()
            )
            assert lease is not None
            await asyncio.sleep(read_s)
            self.node.leases.release(reader, lease.token)
        return found

    async def prompts(self, numbers: range) -> tuple[set[int], float]:
        """The numbers of blocks that prompts got, all at a time; and the longest time."""
        found = await asyncio.gather(*map(self.prompt, numbers))
        return {blocks for blocks, _ in found}, max(took for _, took in found)

    def blamed(self, name: bytes) -> tuple[int, int]:
        peer = self.peers.get(name)
        return (0, 0) if peer is None else (peer.failed, peer.slow)


class Puts:
    """A client that puts new blocks at each turn of the loop, as fast as it goes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._client = world.node.holders.own("red", "a client")
        self.stored = 0

    def __enter__(self) -> Self:
        self._task = self._world.loop.create_task(self._put_on())
        return self

    def __exit__(self, *_: object) -> None:
        self._task.cancel()

    def store(self, count: int) -> None:
        """So many blocks, of part 0."""
        node, keys = self._world.node, [key((1 << 32) + self.stored + at) for at in range(count)]
        node.puts.reserve(self._client, self._world.namespace, 0, self.stored, keys)
        node.puts.commit(self._client, self.stored, bytes(16 * count))
        self.stored += count

    async def _put_on(self) -> None:
        while True:
            self.store(8)
            await asyncio.sleep(0 if self.stored % 256 else SERVICE_S / 4)


def node_record(name: str) -> Any:
    return SimpleNamespace(protocol=frame.PROTOCOL_VERSION, node=name)


async def two_more_batches_are_whole(world: World) -> None:
    """Every prompt gets all of its blocks, and soon."""
    for batch in (1, 2):
        numbers = range(batch * PROMPTS, (batch + 1) * PROMPTS)
        found, longest = await world.prompts(numbers)
        assert found == {BLOCKS}
        assert longest < 1.0


def test_one_stopped_peer_costs_no_block_and_no_blame() -> None:
    async def main() -> None:
        world = World("a.......", "b.......")
        assert (await world.prompts(range(PROMPTS)))[0] == {BLOCKS}
        world.stopped = {b"a......."}
        await two_more_batches_are_whole(world)
        assert world.blamed(b"b.......") == (0, 0)
        assert world.blamed(b"a.......")[1] > 0
        assert max(world.most.values()) <= PULLS.each
        assert world.most_of_peers <= PULLS.together

    run(main())


def test_a_shorter_prefix_with_a_window_of_its_own_is_fetched_beside_a_stopped_peer() -> None:
    """All of a prompt is to be had only with a block of a peer that has stopped, all but the last one without it."""

    async def main() -> None:
        window = PartSpec(NBYTES, PartKind.WINDOW, window_blocks=2)
        world = World("healthy.", "stopped.", specs=(PartSpec(NBYTES), window))
        world.lacks = {(b"healthy.", key(BLOCKS - 1)): 0b10}
        world.stopped = {b"stopped."}
        found, took = await world.prompt(0)
        assert found == BLOCKS - 1
        assert took <= WAIT_S

    run(main())


def test_what_many_prompts_fetch_is_not_evicted_by_puts_before_they_have_it() -> None:
    """Memory is full, so what has just come from a peer would be the first to go, ahead of who waits for it."""

    async def main() -> None:
        world = World("healthy.")
        with Puts(world) as puts:
            puts.store(world.tenant_blocks)  # memory is full
            found, _ = await world.prompts(range(PROMPTS))
        assert found == {BLOCKS}
        assert puts.stored > world.tenant_blocks

    run(main())


@pytest.mark.parametrize("taken", [6, 12, 20])
def test_blocks_without_slots_do_not_wait_for_those_that_have_some(taken: int) -> None:
    """A peer takes a second an order; a client gives slots back 50 ms after the prompt has found too few."""

    async def main() -> None:
        world = World("a.......", blocks=BLOCKS * PARTS + BLOCKS)
        world.slow = {b"a.......": 1.0}
        client = world.node.holders.own("red", "client")
        keys = [key(1000 + number) for number in range(taken)]
        world.node.puts.reserve(client, world.namespace, 0, 1, keys)
        prompt = asyncio.create_task(world.prompt(0, 10.0))
        await asyncio.sleep(0.05)
        world.node.puts.abort(client, 1)
        began = world.loop.time()
        await world.fetcher.pull_each(
            world.namespace, [PARTS - 1], [key(at) for at in range(BLOCKS)], 10.0
        )
        assert world.loop.time() - began < 1.1, "what joins them does not either"
        found, took = await prompt
        assert (found, took < 1.2) == (BLOCKS, True)
        assert not world.node.holders.own("red", "pulls").reservations

    run(main())


def test_a_transfer_that_is_cancelled_before_it_fills_its_slots_frees_them() -> None:
    """Some of its blocks find no slot, so that the others become a transfer of their own; and all end at once."""

    async def main() -> None:
        world = World("a.......", blocks=BLOCKS * PARTS + BLOCKS)
        world.slow = {b"a.......": 1.0}
        client = world.node.holders.own("red", "client")
        taken = [key(1000 + number) for number in range(12)]
        world.node.puts.reserve(client, world.namespace, 0, 1, taken)
        prompt = asyncio.create_task(world.prompt(0, 10.0))
        pulls = world.node.holders.own("red", "pulls")
        for _ in range(100):
            await asyncio.sleep(0)
            if pulls.reservations:
                break
        assert pulls.reservations
        world.fetcher.close()  # before the next turn of the loop
        await prompt
        assert not pulls.reservations
        assert not pulls.reserved_bytes
        assert len(world.fetcher.transfers) == 0

    run(main())


def test_a_peer_that_stops_costs_no_block_beside_clients_that_put_and_read() -> None:
    """Memory is full, and some of it leased: what chaos does to a node whose clients do not rest at a death."""

    async def main() -> None:
        world = World("a.......", "b.......", blocks=2 * PROMPTS * BLOCKS * PARTS)
        with Puts(world) as puts:
            puts.store(world.tenant_blocks)
            await world.prompts(range(PROMPTS))
            others = asyncio.gather(*(world.read(1000 + number, 0.3) for number in range(20)))
            world.stopped = {b"a......."}
            await two_more_batches_are_whole(world)
        assert set(await others) == {BLOCKS}

    run(main())


@pytest.mark.parametrize("stopped", [2, 5, 20])
def test_many_stopped_peers_leave_threads_for_the_one_that_answers(stopped: int) -> None:
    """Each prompt asks them all at last, if it must; meanwhile what is asked of the healthy one comes at once."""

    async def main() -> None:
        names = [f"stop{number:04}" for number in range(stopped)]
        world = World("healthy.", *names)
        world.stopped = {name.encode() for name in names}
        found, longest = await world.prompts(range(PROMPTS))
        assert found == {BLOCKS}
        assert longest < WAIT_S / 2
        assert world.blamed(b"healthy.") == (0, 0)
        assert world.most_of_peers < PULLS.together, "a thread is always left"

    run(main())


def test_one_healthy_peer_has_as_many_threads_as_ever() -> None:
    async def main() -> None:
        world = World("healthy.")
        found, longest = await world.prompts(range(PROMPTS))
        assert found == {BLOCKS}
        assert world.most[b"healthy."] == PULLS.each == 16
        assert longest < PROMPTS * PARTS * SERVICE_S / PULLS.each * 1.5
        assert world.blamed(b"healthy.") == (0, 0)
        assert world.fetcher.stats().hedges == 0

    run(main())


def test_a_hung_disk_costs_only_what_it_alone_has() -> None:
    """More readers than any limit, of a disk whose orders do not end; then what others have is read as ever."""

    async def check(world: World) -> None:
        found = await asyncio.gather(*(world.prompt(number, 0.2) for number in range(400)))
        assert {blocks for blocks, _ in found} == {0}
        assert world.under_way[DISKS[0]] == transfers.LOADS_MAX, "only these never end"
        blocks, took = await world.prompt(10_000)
        assert (blocks, took < 0.5) == (BLOCKS, True), "the other disk"
        world.living = {b"healthy.": LivingNode(node_record("h"), "healthy.")}
        blocks, took = await world.prompt(20_000)
        assert (blocks, took < 0.5) == (BLOCKS, True), "what only a peer has"
        blocks, took = await world.prompt(7)
        assert (blocks, took < 1.0) == (BLOCKS, True), "what the disk has too"
        await asyncio.sleep(WAIT_S)  # those that waited for their turn have given up
        assert len(world.fetcher.transfers) == transfers.LOADS_MAX
        assert world.fetcher.stats().not_begun > 0

    async def main() -> None:
        on_hung = {key(number) for number in range(400 * BLOCKS)}
        on_other = {key(10_000 * BLOCKS + at) for at in range(BLOCKS)}
        world = World(disks={0: on_hung, 1: on_other})
        world.stopped = {DISKS[0]}
        try:
            await check(world)
        finally:
            world.dead.set()
        await asyncio.gather(*(one.task for one in world.fetcher.transfers))
        assert not world.fetcher.transfers
        assert world.node.tenants["red"].allocator.bytes_used == 3 * BLOCKS * PARTS * NBYTES

    run(main())


def test_what_only_a_slow_disk_has_is_awaited_although_peers_are_asked_for_the_rest() -> None:
    """The disk's order is called off for the blocks that peers have too, and begins again for the others."""

    async def main() -> None:
        world = World("a.......", "b.......", disks={0: {key(at) for at in range(BLOCKS)}})
        world.unknown = {key(0)}
        world.slow = dict.fromkeys((DISKS[0], b"a.......", b"b......."), 0.4)
        blocks, took = await world.prompt(0)
        assert blocks == BLOCKS
        assert took < WAIT_S / 2

    run(main())


def test_without_a_directory_a_stopped_peer_is_not_waited_for() -> None:
    async def main() -> None:
        world = World("a.......", "b.......", "c.......")
        world.directory = None
        await world.prompts(range(PROMPTS))
        world.stopped = {b"a......."}
        await two_more_batches_are_whole(world)
        assert world.blamed(b"b.......") == world.blamed(b"c.......") == (0, 0)

    run(main())


def test_the_first_readers_of_a_disk_that_hangs_are_served_by_a_peer() -> None:
    async def main() -> None:
        world = World("healthy.", disks={0: {key(number) for number in range(2 * BLOCKS)}})
        world.stopped = {DISKS[0]}
        try:
            assert {blocks for blocks, _ in [await world.prompt(0), await world.prompt(1)]} == {
                BLOCKS
            }
        finally:
            world.dead.set()
        await asyncio.gather(*(one.task for one in world.fetcher.transfers))

    run(main())


def test_the_beginning_of_a_prompt_on_a_disk_that_hangs_comes_from_a_peer() -> None:
    """Peers are asked for the rest, which nobody has; and for the beginning when the disk takes too long."""

    async def main() -> None:
        world = World("healthy.", disks={0: {key(0), key(1)}})
        world.unknown = {key(2), key(3)}
        world.stopped = {DISKS[0]}
        try:
            found, took = await world.prompt(0)
            assert found == 2
            assert took < 1.0
        finally:
            world.dead.set()
        await asyncio.gather(*(one.task for one in world.fetcher.transfers))

    run(main())


def test_what_a_disk_has_just_evicted_comes_from_a_peer() -> None:
    """Peers were asked for the rest only, which nobody has."""

    async def main() -> None:
        world = World("healthy.", disks={0: {key(0), key(1)}})
        world.unknown = {key(2), key(3)}
        world.emptied = {DISKS[0]}
        found, took = await world.prompt(0)
        assert found == 2
        assert took < 1.0

    run(main())


def test_a_source_is_not_tried_while_too_many_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait until there is room: what was not asked has not failed."""
    monkeypatch.setattr(transfers, "WAITING_MAX", 4)

    async def main() -> None:
        world = World("healthy.")
        found, _ = await world.prompts(range(PROMPTS))
        assert found == {BLOCKS}

    run(main())


def test_an_order_that_is_refused_here_is_not_held_against_the_peer() -> None:
    async def main() -> None:
        world = World("healthy.")
        world.refused = {b"healthy."}
        assert (await world.prompt(1))[0] == 0
        assert world.blamed(b"healthy.") == (0, 0)
        world.refused.clear()
        assert (await world.prompt(1))[0] == BLOCKS

    run(main())


def test_no_more_is_loaded_at_a_time_than_there_are_threads_for() -> None:
    assert transfers.LOADS_MAX == disk_worker.READ_JOBS == object_worker.READ_JOBS


def test_a_prompt_that_fills_memory_is_got_from_another_peer_than_the_stopped_one() -> None:
    """What the stopped one should bring holds the slots that the other's needs."""

    async def main() -> None:
        world = World("a.......", "b.......", blocks=BLOCKS * PARTS)
        assert (await world.prompt(0))[0] == BLOCKS
        for number, stopped in enumerate((b"a.......", b"b......."), 1):
            world.stopped = {stopped}
            blocks, took = await world.prompt(number)
            assert (blocks, took < 1.0) == (BLOCKS, True)

    run(main())


@pytest.mark.parametrize("fit", [PROMPTS // 2, 10, 2])
def test_prompts_that_do_not_fit_into_memory_together_wait_for_one_another(fit: int) -> None:
    async def main() -> None:
        world = World("healthy.", blocks=fit * BLOCKS * PARTS)
        found = await asyncio.gather(*(world.read(number, 0.005) for number in range(PROMPTS)))
        assert Counter(found) == {BLOCKS: PROMPTS}

    run(main())


def test_prompts_that_hold_half_of_themselves_each_let_the_oldest_have_the_rest() -> None:
    """The half that comes one part at a time finds memory full of other prompts' first halves."""

    async def main() -> None:
        world = World(
            "fast....", "slow....", blocks=3 * BLOCKS * PARTS // 2, pulls=TurnLimits(8, 1)
        )
        world.parts = {b"fast....": 0x0F, b"slow....": 0xF0}
        world.slow = {b"slow....": 0.05}
        found = await asyncio.gather(*(world.read(number, 0.005) for number in range(8)))
        assert found == [BLOCKS] * 8

    run(main())


def test_a_prompt_that_never_fits_into_memory_ends_with_what_fits() -> None:
    async def main() -> None:
        world = World("healthy.", blocks=(BLOCKS - 1) * PARTS)
        blocks, took = await world.prompt(0)
        assert took < WAIT_S / 2
        assert blocks > 0
        assert not world.fetcher.transfers

    run(main())

"""A block removed from all nodes stays away, however many readers fetch it from node to node meanwhile."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.daemon.cluster.peer_service import PeerService
from kvpool.daemon.core.limits import Limits
from kvpool.daemon.core.node import Node
from kvpool.daemon.fetch.fetcher import BlockFetcher
from kvpool.daemon.fetch.ports import NOT_NODES, LivingNode
from kvpool.daemon.fetch.tombstones import BLOCKS_MAX, Tombstones
from kvpool.daemon.ops.removals import Removals
from kvpool.daemon.tiers.all_tiers import Tiers
from kvpool.errors import ClusterUnavailable, LimitExceeded, Unavailable
from kvpool.placement.directory.base import TIERS, Entry
from kvpool.placement.peers import Peers
from kvpool.storage.eviction import policy_maker
from kvpool.types import BlockStatus, PartSpec, split_keys
from kvpool.wire import frame
from kvpool.wire import peer as peer_wire
from kvpool.wire import worker as worker_wire
from tests.contract.suites.memory_tier import SharedMemoryTier
from tests.sim.simulation.loop import run_alone

NBYTES = 4096
KEY, OTHER = b"k" * 16, b"o" * 16
DIGEST = b"n" * 16
SLOW_S = 0.2  # the longest way of a message

run = partial(run_alone, steps_max=4_000_000)


def incarnation(name: str) -> bytes:
    return name.encode().ljust(8)


def record_of(name: str) -> Any:
    return SimpleNamespace(protocol=frame.PROTOCOL_VERSION, node=name)


class Disk:
    """One with both blocks, from which a load takes a while."""

    serving = True

    def held(self, table: Any) -> list[set[bytes]]:
        return [{KEY, OTHER}]

    async def load(self, table: Any, keys: Sequence[bytes], *_: object) -> worker_wire.Pulled:
        await asyncio.sleep(SLOW_S)
        return worker_wire.Pulled(
            bytes([BlockStatus.PRESENT]) * len(keys), bytes(16 * len(keys)), SLOW_S
        )


class Member:
    """A node of a `World`, whose directory always tells the truth of memory."""

    def __init__(self, world: World, name: str, *disks: Disk) -> None:
        self.world, self.name = world, name
        self.deaf = False
        self.node = Node(make_policy=policy_maker("lru"), limits=Limits())
        tenant = self.node.add_tenant("red", 0, 64 * NBYTES, NBYTES)
        self.namespace = self.node.namespaces.open(tenant, DIGEST, b"{}", (PartSpec(NBYTES),))
        self.directory = self
        peers = Peers({}, random.Random(7), apart=NOT_NODES)
        clock = asyncio.get_running_loop().time
        view: Any = self
        objects = SharedMemoryTier({}, 0)
        self.fetcher = BlockFetcher(self.node, view, view, list(disks), objects, peers, clock)
        ssd: Any = SimpleNamespace(remove=lambda *_: set())
        shared: Any = objects
        self.removals = Removals(
            *(Tiers(self.node, ssd, None, shared), self.fetcher.transfers, view, view, clock),
            has_objects=False,
        )
        self.service = PeerService(
            *(self.node, self.fetcher.lookups, self.fetcher.promote, clock),
            remove=self.removals.for_other,
            name=name,
        )

    @property
    def living(self) -> dict[bytes, LivingNode]:
        return {
            incarnation(name): LivingNode(record_of(name), f"tcp://{name}")
            for name in self.world.members
            if name != self.name
        }

    async def locate(self, digest: bytes, parts: int, keys: Sequence[bytes]) -> list[list[Entry]]:
        found = self.world.members.values()
        return [
            [
                Entry(incarnation(m.name), TIERS["dram"], 1)
                for m in found
                if m.has(key) and m is not self
            ]
            for key in keys
        ]

    def met(self, *_: object) -> None:
        raise AssertionError("all live")

    async def pull(self, order: worker_wire.PullBlocks) -> worker_wire.Pulled:
        owner = self.world.members[order.url.removeprefix("tcp://")]
        await self.world.way()
        keys = split_keys(order.parts[0].keys)
        there = [BlockStatus.PRESENT if owner.has(key) else BlockStatus.ABSENT for key in keys]
        await self.world.way()
        return worker_wire.Pulled(bytes(there), bytes(16 * len(keys)), SLOW_S)

    async def ask(self, order: worker_wire.AskPeer) -> frame.Bytes:
        other = self.world.members[order.url.removeprefix("tcp://")]
        assert isinstance(order.question, peer_wire.Discard)
        await self.world.way()
        if other.deaf:
            raise Unavailable("the peer did not answer")
        answer = await other.service.discarded(order.question)
        await self.world.way()
        return answer

    def has(self, key: bytes) -> bool:
        self.node.settle()
        return key in self.namespace.table(0).blocks

    def put(self, *keys: bytes) -> None:
        writer = self.node.holders.own("red", "writer")
        self.node.puts.reserve(writer, self.namespace, 0, 1, list(keys))
        self.node.puts.commit(writer, 1, bytes(16 * len(keys)))

    async def read(self, *keys: bytes) -> None:
        await self.fetcher.pull_each(self.namespace, [0], list(keys), 1.0)

    async def remove(self, *keys: bytes, others_s: float = 5.0) -> bool:
        found = await self.removals.everywhere([self.namespace], b"".join(keys), others_s)
        return bool(found)


class World:
    """Nodes that know each other, in virtual time."""

    def __init__(self, names: str, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.members: dict[str, Member] = {}
        for name in names:
            self.members[name] = Member(self, name)

    async def way(self) -> None:
        await asyncio.sleep(self.rng.uniform(0, SLOW_S))

    async def read_on(self, member: Member, until: float) -> None:
        """Read at one node, again and again; what is there is dropped sometimes, to be fetched again."""
        loop = asyncio.get_running_loop()
        while loop.time() < until:
            await asyncio.sleep(self.rng.uniform(0, SLOW_S / 4))
            if not member.has(KEY):
                await member.read(KEY)


@pytest.mark.parametrize("names", ["ab", "abc", "abcde"])
@pytest.mark.parametrize("seed", range(20))
def test_readers_on_all_nodes_do_not_bring_a_removed_block_back(names: str, seed: int) -> None:
    async def main() -> None:
        world = World(names, seed)
        world.members[world.rng.choice(names)].put(KEY, OTHER)
        loop = asyncio.get_running_loop()
        asker = world.members["a"]
        readers = [
            asyncio.ensure_future(world.read_on(member, loop.time() + 4))
            for member in world.members.values()
        ]
        await asyncio.sleep(world.rng.uniform(0, 1))
        assert await asker.remove(KEY)
        await asyncio.gather(*readers)
        assert not any(member.has(KEY) for member in world.members.values())
        assert any(member.has(OTHER) for member in world.members.values())
        # And what is put under the key afterwards is found at once, everywhere.
        asker.put(KEY)
        for member in world.members.values():
            await member.read(KEY)
            assert member.has(KEY)

    run(main())


def test_a_removal_on_one_node_stops_what_a_peer_or_a_disk_is_sending() -> None:
    async def main() -> None:
        world = World("b")
        world.members["b"].put(KEY, OTHER)
        for disks in ((), (Disk(),)):
            a = world.members["a"] = Member(world, "a", *disks)
            reading = asyncio.ensure_future(a.read(KEY, OTHER))
            await asyncio.sleep(0.001)
            assert len(a.fetcher.transfers) == 1
            a.removals.now([a.namespace], KEY)
            reading.cancel()
            await asyncio.sleep(2)
            assert not a.has(KEY)
            assert a.has(OTHER)
            assert a.namespace.table(0).reserved == 0

    run(main())


def test_a_node_that_misses_the_end_of_a_removal_takes_its_tombstone_down_by_itself() -> None:
    async def main() -> None:
        world = World("abc")
        a, b, c = world.members.values()
        c.put(KEY)
        c.deaf = True
        with pytest.raises(ClusterUnavailable, match=r"1 of 2 other nodes .*\(c\)"):
            await a.remove(KEY, others_s=3.0)
        await b.read(KEY)
        assert not b.has(KEY), "it might be what was to be removed"
        await asyncio.sleep(3)
        await b.read(KEY)
        assert b.has(KEY)

    run(main())


def test_tombstones_are_bounded_and_counted_by_block() -> None:
    standing = Tombstones()
    keys = [number.to_bytes(16, "big") for number in range(BLOCKS_MAX // 4)]
    tokens = [bytes([number]) for number in range(4)]
    for token in tokens:
        standing.put_up(token, [DIGEST], keys)
    standing.put_up(tokens[0], [DIGEST], keys)
    with pytest.raises(LimitExceeded, match="being removed"):
        standing.put_up(b"more", [DIGEST], [KEY])
    for token in (*tokens, tokens[0], b"unknown"):
        assert standing.among(DIGEST, [keys[3], KEY]) == {keys[3]}
        standing.take_down(token)
        if token == tokens[-1]:
            break
    assert standing.among(DIGEST, keys[:9]) == set()
    standing.put_up(b"more", [DIGEST], [KEY])
    assert standing.among(DIGEST, [KEY]) == {KEY}
    assert standing.among(b"another namespace", [KEY]) == set()

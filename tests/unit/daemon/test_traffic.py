"""What becomes of what other nodes were said to have is counted, for the tenant and for the peer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvpool.daemon.core.limits import Limits
from kvpool.daemon.core.node import Node
from kvpool.daemon.features.traffic import TrafficCounts
from kvpool.daemon.fetch.fetcher import BlockFetcher
from kvpool.daemon.fetch.ports import LivingNode
from kvpool.errors import Unavailable
from kvpool.placement.directory.base import TIERS, Entry
from kvpool.placement.peers import Peers
from kvpool.storage.eviction import policy_maker
from kvpool.telemetry.histogram import RATIOS
from kvpool.types import BlockStatus, PartSpec, split_keys
from kvpool.wire import worker as worker_wire
from tests.contract.suites.memory_tier import MemoryTier, SharedMemoryTier

NBYTES = 4096
OWNER = b"owner..."
WAIT_S = 20.0


class World:
    """A node whose directory says that one peer has all that anybody asks for. answer: what that peer sends."""

    def __init__(self, answer: Callable[[int], worker_wire.Pulled]) -> None:
        self.answer = answer
        self.now = 100.0
        self.node = Node(make_policy=policy_maker("lru"), limits=Limits())
        self.traffic = TrafficCounts()
        self.node.events.subscribe("traffic", self.traffic.handlers)
        self.tenant = self.node.add_tenant("red", 0, 64 * NBYTES, 4 * NBYTES)
        self.namespace = self.node.namespaces.open(
            self.tenant, b"n" * 16, b"{}", (PartSpec(NBYTES),)
        )
        record: Any = SimpleNamespace(node="b")
        self.living: Mapping[bytes, LivingNode] = {OWNER: LivingNode(record, "tcp://b")}
        self.directory: Any = self
        self.peers = Peers({}, random.Random(5))
        here: Any = self
        nothing, objects = MemoryTier({}, 0), SharedMemoryTier({}, 0)
        self.fetcher = BlockFetcher(
            self.node, here, here, [nothing], objects, self.peers, lambda: self.now
        )

    async def locate(self, digest: bytes, parts: int, keys: Sequence[bytes]) -> list[list[Entry]]:
        return [[Entry(OWNER, TIERS["dram"], 1)] for _ in keys]

    async def pull(self, order: worker_wire.PullBlocks) -> worker_wire.Pulled:
        await asyncio.sleep(0)
        return self.answer(order.count)

    def read(self, count: int) -> None:
        keys = b"".join(number.to_bytes(16, "big") for number in range(count))

        async def main() -> None:
            await self.fetcher.pull_each(self.namespace, [0], split_keys(keys), WAIT_S)

        asyncio.run(main())

    def loads(self) -> dict[str, int]:
        """The tenant's, which are the peer's as well."""
        tenant = self.traffic.of("red").loads["peer"]
        assert self.fetcher.stats().delivered.peers == {"b": tenant}
        return {name: count for name, count in msgspec.structs.asdict(tenant).items() if count}


def answers(
    *status: int, seconds: float = 0.5, error: str = ""
) -> Callable[[int], worker_wire.Pulled]:
    def answer(count: int) -> worker_wire.Pulled:
        assert count == len(status)
        return worker_wire.Pulled(bytes(status), bytes(16 * count), seconds, error)

    return answer


def test_each_block_has_one_outcome() -> None:
    world = World(
        answers(
            BlockStatus.PRESENT,
            BlockStatus.ABSENT,
            BlockStatus.ABSENT,
            BlockStatus.MISMATCH,
            BlockStatus.LATE,
            BlockStatus.PRESENT,
            error="broken off",
        )
    )
    world.read(6)
    assert world.loads() == {
        "loaded": 2,
        "absent": 2,
        "mismatched": 1,
        "failed": 1,
        "nbytes": 2 * NBYTES,
    }


def test_a_transfer_that_raises_has_failed() -> None:
    def fail(count: int) -> worker_wire.Pulled:
        raise Unavailable("no transfer worker runs")

    world = World(fail)
    world.read(5)
    assert world.loads() == {"failed": 5}
    delivered = world.fetcher.stats().delivered
    assert delivered.seconds == delivered.ratios == {}


def test_what_was_called_off_is_told_from_what_failed() -> None:
    world = World(lambda count: answers(*[BlockStatus.PRESENT] * count)(count))

    async def main() -> None:
        begun, forever = asyncio.Event(), asyncio.Event()

        async def hang(order: worker_wire.PullBlocks) -> worker_wire.Pulled:
            begun.set()
            await forever.wait()
            raise AssertionError

        world.pull = hang
        keys = bytes(16) + b"1" * 16
        read = asyncio.ensure_future(
            world.fetcher.pull_each(world.namespace, [0], split_keys(keys), WAIT_S)
        )
        await begun.wait()
        world.fetcher.close()
        await asyncio.gather(read, return_exceptions=True)

    asyncio.run(main())
    assert world.loads() == {"cancelled": 2}


@pytest.mark.parametrize("times", [0.5, 1.0, 3.0])
def test_what_was_expected_is_compared_with_what_was_seen(times: float) -> None:
    world = World(answers(*[BlockStatus.PRESENT] * 8))
    latency_s, per_byte = world.peers.stranger(OWNER).expected(world.now)
    expected_s = latency_s + 8 * NBYTES * per_byte
    world.answer = answers(*[BlockStatus.PRESENT] * 8, seconds=times * expected_s)
    world.read(8)
    delivered = world.fetcher.stats().delivered
    assert delivered.expected_s["peer"] == pytest.approx(expected_s)
    assert delivered.seen_s["peer"] == pytest.approx(times * expected_s)
    ratios = delivered.ratios["peer"]
    (bucket,) = [index for index, count in enumerate(ratios.counts) if count]
    assert RATIOS[bucket - 1] * 0.999 <= times <= RATIOS[bucket] * 1.001


def test_half_a_transfer_says_nothing_of_the_estimate() -> None:
    world = World(answers(BlockStatus.PRESENT, BlockStatus.ABSENT))
    world.read(2)
    delivered = world.fetcher.stats().delivered
    assert delivered.ratios == {}
    assert sum(delivered.seconds["peer"].counts) == 1

"""What is loaded and what is left to the engine to compute: a node between sources of known speeds."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.daemon.core.blocks import OWN, PartTable
from kvpool.daemon.core.limits import Limits
from kvpool.daemon.core.node import Node
from kvpool.daemon.fetch.choices import TRIAL_BYTES
from kvpool.daemon.fetch.fetcher import BlockFetcher
from kvpool.daemon.fetch.ports import DISKS, LivingNode
from kvpool.placement.directory.base import TIERS, Entry
from kvpool.placement.peers import TRIAL_S, Peers
from kvpool.storage.eviction import policy_maker
from kvpool.types import BlockStatus, PartKind, PartSpec, Recompute, split_keys
from kvpool.wire import worker as worker_wire
from tests.contract.suites.memory_tier import SharedMemoryTier
from tests.support.virtual_time import virtually

MIB = 1 << 20
LOCAL = DISKS[0]
NBYTES = 256 << 10
ROWS = 512
FAST, SLOW, OTHER = (bytes([letter]) * 8 for letter in b"FSO")
WAIT_S = 20.0
FULL = (PartSpec(NBYTES),)


def packed(numbers: Iterable[int]) -> bytes:
    return b"".join(number.to_bytes(16, "big") for number in numbers)


class World:
    """A node, and sources that deliver at once and say that it took as long as their speed makes it.

    bytes_s: of each source. asked: what was asked of whom, in order. held_back: sources that do not answer until
    `let_go`.
    """

    def __init__(self, parts: tuple[PartSpec, ...] = FULL) -> None:
        self.now = 100.0
        self.moved = asyncio.Event()  # a source was asked
        self.node = Node(make_policy=policy_maker("lru"), limits=Limits())
        tenant = self.node.add_tenant("red", 0, ROWS * NBYTES, 4 * NBYTES)
        self.namespace = self.node.namespaces.open(tenant, b"n" * 16, b"{}", parts)
        self.holder = self.node.holders.add("red", "engine")
        self.bytes_s: dict[bytes, float] = {}
        self.entries: dict[bytes, list[Entry]] = {}
        self.on_disk: set[bytes] = set()
        self.asked: list[tuple[bytes, int]] = []
        self.limit_s = math.inf  # for one transfer
        self.lookups = 0
        self.held_back: set[bytes] = set()
        self.gate = asyncio.Event()
        self.living: Mapping[bytes, LivingNode] = {}
        self.directory: Any = self
        self.peers = Peers({}, random.Random(5))
        lower: Any = self
        self.fetcher = BlockFetcher(
            *(self.node, PeerTransport(self), self, [lower], SharedMemoryTier({}, 0)),
            *(self.peers, lambda: self.now),
        )

    # ---- what there is

    def source(self, incarnation: bytes, bytes_s: float, numbers: Iterable[int]) -> None:
        """A peer that has these blocks, all parts of them."""
        self.bytes_s[incarnation] = bytes_s
        record: Any = SimpleNamespace(node=incarnation.decode())
        self.living = {**self.living, incarnation: LivingNode(record, incarnation.decode())}
        mask = (1 << len(self.namespace.tables)) - 1
        for number in numbers:
            entry = Entry(incarnation, TIERS["dram"], mask)
            self.entries.setdefault(packed([number]), []).append(entry)

    def disk(self, bytes_s: float, numbers: Iterable[int]) -> None:
        self.bytes_s[LOCAL] = bytes_s
        self.on_disk.update(packed([number]) for number in numbers)

    def put(self, numbers: Sequence[int]) -> None:
        for part in range(len(self.namespace.tables)):
            self.node.puts.reserve(
                self.holder, self.namespace, part, 1, split_keys(packed(numbers))
            )
            self.node.puts.commit(self.holder, 1, bytes(16) * len(numbers))

    def measure(self, *incarnations: bytes) -> None:
        """So that the node knows how fast they are."""
        for incarnation in incarnations:
            for nbytes in (1000, 64 * MIB):
                seconds = 0.0001 + nbytes / self.bytes_s[incarnation]
                self.peers.started(incarnation, nbytes, self.now)
                self.peers.finished(incarnation, nbytes, seconds, self.now)

    # ---- what happens

    async def pull(self, end: int, recompute: Recompute | None = None) -> int:
        keys = packed(range(end))
        here = self.node.leases.match(self.namespace, [], split_keys(keys))
        await self.fetcher.pull(self.namespace, [], split_keys(keys), here, WAIT_S, recompute)
        return self.node.leases.match(self.namespace, [], split_keys(keys))

    async def settle(self) -> None:
        """Until all transfers have ended."""
        await asyncio.gather(*[transfer.task for transfer in self.fetcher.transfers])

    def loaded(self, incarnation: bytes) -> int:
        return sum(blocks for who, blocks in self.asked if who == incarnation)

    def declined(self, incarnation: bytes) -> int:
        peer = self.peers.get(incarnation)
        return 0 if peer is None else peer.declined

    # ---- the ports of `BlockFetcher`

    serving = True

    def held(self, table: PartTable) -> list[set[bytes]]:
        return [self.on_disk] if self.on_disk else []

    async def load(
        self, table: PartTable, keys: Sequence[bytes], rows: Sequence[int], seconds: float
    ) -> worker_wire.Pulled:
        return await self._deliver(LOCAL, len(keys), len(keys) * table.spec.nbytes)

    async def pull_blocks(self, order: worker_wire.PullBlocks) -> worker_wire.Pulled:
        return await self._deliver(order.url.encode(), order.count, order.nbytes)

    async def locate(self, digest: bytes, parts: int, keys: Sequence[bytes]) -> list[list[Entry]]:
        self.lookups += 1
        return [self.entries.get(key, []) for key in keys]

    async def _deliver(self, source: bytes, blocks: int, nbytes: int) -> worker_wire.Pulled:
        """nbytes: of all blocks."""
        self.asked.append((source, blocks))
        self.moved.set()
        if source in self.held_back:
            await self.gate.wait()
        seconds = 0.0001 + nbytes / self.bytes_s[source]
        came, error = blocks, ""
        if seconds > self.limit_s:
            came = int(self.limit_s * self.bytes_s[source] / nbytes * blocks)
            seconds, error = self.limit_s, "not in time"
        status = bytes([BlockStatus.PRESENT]) * came + bytes([BlockStatus.LATE]) * (blocks - came)
        return worker_wire.Pulled(status, bytes(16) * blocks, seconds, error)


class PeerTransport:
    """Its `pull` is the peers'; the world's own is the client's."""

    def __init__(self, world: World) -> None:
        self.pull = world.pull_blocks


def price(bytes_s: float, nbytes: int = NBYTES) -> Recompute:
    """Of an engine that computes blocks as fast as a source of that speed delivers them."""
    return Recompute(nbytes / bytes_s)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    virtually(main)


def make_world(parts: tuple[PartSpec, ...] = FULL) -> World:
    return World(parts)


ENGINES = {"faster": (price(100 * MIB), 0), "slower": (price(1 * MIB), 40)}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("where", [SLOW, LOCAL])
def test_a_source_is_used_where_it_is_faster_than_the_engine(engine: str, where: bytes) -> None:
    recompute, expected = ENGINES[engine]

    async def main() -> None:
        world = make_world()
        if where == LOCAL:
            world.disk(10 * MIB, range(40))
        else:
            world.source(SLOW, 10 * MIB, range(40))
        world.measure(where)
        assert await world.pull(40, recompute) == expected
        assert world.loaded(where) == expected
        assert world.declined(where) == 40 - expected == world.fetcher.stats().declined

    run(main)


def test_all_is_loaded_for_an_engine_of_unknown_speed() -> None:
    async def main() -> None:
        world = make_world()
        world.source(SLOW, 1.0, range(40))
        world.measure(SLOW)
        assert await world.pull(40) == 40
        assert world.fetcher.stats().declined == 0

    run(main)


def test_an_engine_that_is_faster_is_answered_while_nothing_comes() -> None:
    async def main() -> None:
        world = make_world()
        world.source(SLOW, 10 * MIB, range(40))
        world.measure(SLOW)
        world.held_back = {SLOW}
        world.put(range(12))
        world.now += TRIAL_S  # there even is a trial
        assert await world.pull(40, price(100 * MIB)) == 12
        assert world.declined(SLOW) == 28
        world.gate.set()
        await world.settle()

    run(main)


def test_loading_ends_where_the_sources_get_slower_than_the_engine() -> None:
    async def main() -> None:
        world = make_world()
        world.put(range(5))
        world.source(FAST, 1000 * MIB, range(25))
        world.source(SLOW, 10 * MIB, range(25, 60))
        world.measure(FAST, SLOW)
        assert await world.pull(60, price(100 * MIB)) == 25
        assert (world.loaded(FAST), world.loaded(SLOW)) == (20, 0)
        assert (world.declined(FAST), world.declined(SLOW)) == (0, 35)

    run(main)


def test_a_slow_part_in_the_middle_is_loaded_for_the_sake_of_what_is_behind_it() -> None:
    async def main() -> None:
        world = make_world()
        world.source(SLOW, 10 * MIB, range(4))
        world.source(FAST, 10_000 * MIB, range(4, 100))
        world.measure(FAST, SLOW)
        assert await world.pull(100, price(100 * MIB)) == 100

    run(main)


def test_deep_blocks_are_loaded_from_where_shallow_ones_are_not() -> None:
    async def main() -> None:
        world = make_world()
        world.source(SLOW, 10 * MIB, range(100))
        world.measure(SLOW)
        each_s = NBYTES / (10 * MIB)
        assert await world.pull(20, Recompute(each_s / 2, each_s / 60)) == 0
        assert await world.pull(100, Recompute(each_s / 2, each_s / 60)) == 100

    run(main)


def test_peers_are_asked_where_the_disk_is_slower_than_the_engine() -> None:
    async def main() -> None:
        world = make_world()
        world.disk(10 * MIB, range(40))
        world.source(FAST, 1000 * MIB, range(40))
        world.measure(LOCAL, FAST)
        assert await world.pull(40, price(100 * MIB)) == 40
        assert (world.loaded(LOCAL), world.loaded(FAST)) == (0, 40)
        assert world.fetcher.stats().declined == 0

    run(main)


def test_what_a_source_has_to_deliver_first_counts() -> None:
    async def main() -> None:
        world = make_world()
        world.source(FAST, 1000 * MIB, range(40))
        world.measure(FAST)
        world.peers.started(FAST, 1000 * MIB, world.now)
        assert await world.pull(40, price(100 * MIB)) == 0
        world.peers.stopped(FAST, 1000 * MIB)
        assert await world.pull(40, price(100 * MIB)) == 40

    run(main)


def test_what_is_on_its_way_for_somebody_else_is_waited_for_and_not_fetched_twice() -> None:
    async def main() -> None:
        world = make_world()
        world.source(SLOW, 50 * MIB, range(40))
        world.measure(SLOW)
        world.held_back = {SLOW}
        first = asyncio.create_task(world.pull(40))
        await world.moved.wait()
        # Alone it would take 0.2 s for all; behind what it does already, twice as long.
        second = asyncio.create_task(world.pull(40, price(40 * MIB)))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not second.done()
        world.gate.set()
        assert (await first, await second) == (40, 40)
        assert world.loaded(SLOW) == 40

    run(main)


def test_blocks_that_nobody_can_be_asked_for_are_not_counted_on() -> None:
    async def main() -> None:
        world = make_world()
        world.source(FAST, 1000 * MIB, range(20))
        world.source(OTHER, 1000 * MIB, range(20, 40))
        world.measure(FAST, OTHER)
        world.peers.failed(OTHER, world.now, error="it hangs")
        assert await world.pull(40, price(100 * MIB)) == 20
        assert world.declined(OTHER) == 0

    run(main)


def test_a_window_is_weighed_against_the_whole_prefix_that_it_stands_for() -> None:
    """Of the part with a window only the end is loaded, and all blocks before it need not be computed."""
    parts = (PartSpec(64), PartSpec(NBYTES, PartKind.WINDOW, window_blocks=4))

    async def main() -> None:
        world = make_world(parts)
        world.source(SLOW, 10 * MIB, range(100))
        world.measure(SLOW)
        # 4 blocks of 25 ms, for 100 of 2 ms.
        assert await world.pull(100, Recompute(0.002)) == 100
        assert world.loaded(SLOW) == 104
        assert await world.pull(100, Recompute(0.0001)) == 100, "it is here now"

    run(main)


# ---- trials --------------------------------------------------------------------------------------------


def test_a_source_that_got_faster_is_found_out() -> None:
    async def main() -> None:
        world = make_world()
        world.source(SLOW, 10 * MIB, range(300))
        world.measure(SLOW)
        engine = price(100 * MIB)
        assert await world.pull(300, engine) == 0
        assert not world.asked, "it was measured a moment ago"
        world.bytes_s[SLOW] = 10_000 * MIB
        loaded = 0
        for _ in range(8):
            world.now += TRIAL_S
            before = len(world.asked)
            loaded = await world.pull(300, engine)
            if loaded == 300:
                break
            await world.settle()
            tried = world.asked[before:]
            assert [blocks * NBYTES for _, blocks in tried] == [TRIAL_BYTES]
        assert loaded == 300
        assert 1 < world.fetcher.stats().trials < 8

    run(main)


def test_there_is_one_trial_at_a_time() -> None:
    async def main() -> None:
        world = make_world()
        world.source(SLOW, 10 * MIB, range(300))
        world.measure(SLOW)
        world.held_back = {SLOW}
        for _ in range(5):
            world.now += TRIAL_S
            assert await world.pull(300, price(100 * MIB)) == 0
            await world.moved.wait()
        assert world.fetcher.stats().trials == len(world.asked) == 1
        world.gate.set()
        await world.settle()

    run(main)


def test_a_source_that_stays_slow_costs_a_trial_now_and_then() -> None:
    async def main() -> None:
        world = make_world()
        world.source(SLOW, 10 * MIB, range(300))
        world.measure(SLOW)
        for _ in range(100):
            world.now += TRIAL_S / 10
            await world.pull(300, price(100 * MIB))
            await world.settle()
        assert 8 <= world.fetcher.stats().trials <= 10
        assert world.loaded(SLOW) * NBYTES <= 10 * TRIAL_BYTES

    run(main)


def test_a_source_that_is_only_thought_to_be_slow_is_tried() -> None:
    async def main() -> None:
        world = make_world()
        world.source(FAST, 100_000 * MIB, range(40))
        engine = price(5_000 * MIB)
        assert await world.pull(40, engine) == 0, "no peer is thought to be as fast as that"
        await world.settle()
        assert world.loaded(FAST) * NBYTES == TRIAL_BYTES

    run(main)


def test_blocks_larger_than_a_trial_are_tried_one_at_a_time() -> None:
    async def main() -> None:
        world = make_world((PartSpec(4 * NBYTES),))
        world.source(SLOW, 10 * MIB, range(40))
        world.put(range(3))
        assert TRIAL_BYTES <= 4 * NBYTES
        await world.pull(40, price(10_000 * MIB, 4 * NBYTES))
        await world.settle()
        assert world.asked == [(SLOW, 1)]

    run(main)


def test_a_source_whose_transfers_never_end_in_time_is_known_to_be_slow() -> None:
    async def main() -> None:
        world = make_world()
        world.source(SLOW, 1 * MIB, range(40))
        world.limit_s = 1.0
        assert await world.pull(40, price(100 * MIB)) == 4
        assert world.loaded(SLOW) == 40, "it was thought to be fast"
        peer = world.peers.get(SLOW)
        assert peer is not None
        _, per_byte = peer.expected(world.now)
        assert 1 / per_byte < 1.3 * MIB
        world.now += 1  # the failure is forgiven, the speed is not
        assert await world.pull(40, price(100 * MIB)) == 4
        assert (world.loaded(SLOW), world.declined(SLOW)) == (40, 36)

    run(main)


def test_what_comes_in_the_background_is_nothing_to_wait_for() -> None:
    """Nor is its source one that cannot be asked: nobody else may have it."""

    async def main() -> None:
        world = make_world()
        world.source(FAST, 1e9, range(4))
        world.held_back.add(FAST)
        keys = [packed([number]) for number in range(4)]
        copying = asyncio.create_task(
            world.fetcher.take(world.namespace, world.namespace.tables, keys, FAST, OWN, WAIT_S)
        )
        await world.moved.wait()
        world.held_back.clear()
        assert await world.pull(4) == 4
        assert world.asked == [(FAST, 4), (FAST, 4)]
        world.gate.set()
        await copying

    run(main)

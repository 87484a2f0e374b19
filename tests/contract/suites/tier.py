"""Requirements of every tier, as tests: for kvpool's and for other distributions'.

    class TestMine(TierContract):
        durable = True

        async def open(self, memory: Memory, folder: Path) -> AnyTier:
            tier = MyTier(memory.node, memory.segment, folder, CAPACITY_BYTES)
            await tier.start()
            return tier

The bytes are compared with a dict that the test fills itself, never with the tier's or its checksums' answers.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import uvloop
from xxhash import xxh3_128_digest

from kvpool.daemon.core.blocks import Block, NamespaceState, PartTable
from kvpool.daemon.core.node import Node
from kvpool.daemon.core.tier import LocalTier, SharedTier
from kvpool.errors import KvpoolError
from kvpool.memory.segment import Segment
from kvpool.storage import base
from kvpool.storage.dram import DramSegment
from kvpool.storage.eviction import policy_maker
from kvpool.types import BlockStatus, NamespaceRecord, PartSpec

CAPACITY_BYTES = 4 << 20
"""Capacity of the tiers under test, about: blocks stored at a time fit, and `MANY` blocks do not."""
MEMORY_BYTES = 16 << 20
PARTS = (PartSpec(64 << 10), PartSpec(20_000))  # one of whole pages, one not
MANY = 160
PATIENCE_S = 120.0  # a tier's process may have to import torch on a busy machine
LOAD_S = 10.0
ABSENT, PRESENT = BlockStatus.ABSENT, BlockStatus.PRESENT
MISMATCH, FAILED, NO_SPACE, LATE = (
    BlockStatus.MISMATCH,
    BlockStatus.FAILED,
    BlockStatus.NO_SPACE,
    BlockStatus.LATE,
)

AnyTier = LocalTier | SharedTier


def key(number: int) -> bytes:
    """A block key."""
    return number.to_bytes(16, "big")


def keys_of(numbers: Iterable[int]) -> list[bytes]:
    """One key for each number."""
    return [key(number) for number in numbers]


def block_of(number: int, part: int) -> bytes:
    """The bytes of a block, as different from others as real ones."""
    return np.random.default_rng((number, part)).bytes(PARTS[part].nbytes)


class Memory:
    """The memory of a node, with blocks identified by numbers: tiers store from and load to it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.segment: Segment = DramSegment.create(MEMORY_BYTES)
        self.bytes = memoryview(self.segment.map())
        self.node = make_node()
        self.tenant = self.node.add_tenant("default", 0, MEMORY_BYTES)
        self.holder = self.node.holders.add("default", "engine")
        record = NamespaceRecord.simple("contract", block_bytes=PARTS[0].nbytes, block_tokens=16)
        self.namespace = self.node.namespaces.open(
            self.tenant, record.digest(), record.canonical(), PARTS
        )
        self._tickets = itertools.count(1)

    @property
    def segments(self) -> dict[int, Segment]:
        """As passed to workers."""
        return {0: self.segment}

    def close(self) -> None:
        self.segment.close()

    def table(self, part: int = 0) -> PartTable:
        return self.namespace.tables[part]

    def put(self, numbers: Iterable[int], part: int = 0, *, damaged: bool = False) -> list[Block]:
        """Put these blocks into memory. damaged: with bytes that do not match their checksums."""
        numbers = list(numbers)
        ticket, table = next(self._tickets), self.table(part)
        self.node.puts.reserve(self.holder, self.namespace, part, ticket, list(keys_of(numbers)))
        reservation = self.holder.reservations.get(ticket)
        if reservation is not None:
            chosen = [numbers[index] for index in reservation.indices]
            assert len(chosen) == len(reservation.rows), "memory has room for what tests put"
            for number, row in zip(chosen, reservation.rows, strict=True):
                self._slot(table, row)[:] = block_of(number + 1000 * damaged, part)
            sums = b"".join([xxh3_128_digest(block_of(number, part)) for number in chosen])
            self.node.puts.commit(self.holder, ticket, sums)
        self.node.settle()
        return [table.blocks[key(number)] for number in numbers]

    def remove(self, numbers: Iterable[int]) -> None:
        """As operators and clients do, before they remove them from tiers."""
        self.node.removal.remove(self.namespace, list(keys_of(numbers)))

    def reset(self) -> NamespaceState:
        """A new epoch begins."""
        self.namespace = self.node.namespaces.set_epoch(self.namespace, self.namespace.epoch + 1, 0)
        return self.namespace

    async def load(
        self, tier: AnyTier, numbers: Iterable[int], part: int = 0, *, seconds: float = LOAD_S
    ) -> dict[int, BlockStatus]:
        """Load blocks that are not in memory into its slots, and verify them there; returns the status of each."""
        numbers = list(numbers)
        ticket, table, holder = next(self._tickets), self.table(part), self.holder
        self.node.puts.reserve(holder, self.namespace, part, ticket, list(keys_of(numbers)))
        reservation = holder.reservations[ticket]
        assert len(reservation.rows) == len(numbers), "none of them is in memory"
        for row in reservation.rows:
            self._slot(table, row)[:] = bytes(table.spec.nbytes)
        try:
            answer = await tier.load(table, keys_of(numbers), list(reservation.rows), seconds)
            said = dict(zip(numbers, map(BlockStatus, answer.status), strict=True))
            for at, (number, row) in enumerate(zip(numbers, reservation.rows, strict=True)):
                if said[number] is PRESENT:
                    data = block_of(number, part)
                    assert self._slot(table, row) == data, f"block {number} is wrong"
                    assert answer.checksums[16 * at :][:16] == xxh3_128_digest(data)
        finally:
            self.node.puts.abort(holder, ticket)
        return said

    def has_no_leases(self) -> bool:
        """Whether no block is held in its slot."""
        blocks = [block for table in self.namespace.tables for block in table.blocks.values()]
        return not self.node.leases.count and not any(block.leases for block in blocks)

    def _slot(self, table: PartTable, row: int) -> memoryview:
        start = row * table.stride
        return self.bytes[start : start + table.spec.nbytes]


def make_node(*, packed: bool = False) -> Node:
    """Empty rules, as tiers of slots need them. packed: see `Node`."""
    return Node(make_policy=policy_maker("lru"), packed=packed)


async def remove(tier: AnyTier, memory: Memory, numbers: Iterable[int]) -> int:
    """Remove blocks everywhere; returns how many were in the tier."""
    numbers = list(numbers)
    memory.remove(numbers)
    packed = b"".join(keys_of(numbers))
    if isinstance(tier, base.SharedTier):
        return len(await tier.remove(memory.namespace, packed))
    return len(tier.remove(memory.namespace, packed))


async def masks_of(tier: AnyTier, memory: Memory, numbers: Iterable[int]) -> dict[int, int]:
    """Which parts of blocks the tier reports, without blocks of which it has none."""
    numbers = list(numbers)
    keys = keys_of(numbers)
    if isinstance(tier, base.SharedTier):
        found = await tier.where(memory.namespace, memory.namespace.tables, keys)
        return {number: found[key(number)] for number in numbers if key(number) in found}
    _, masks = tier.masks(memory.namespace.directory_digest, keys)
    held = {table.part: tier.held(table) for table in memory.namespace.tables}
    for number, mask in zip(numbers, masks, strict=bool(masks)):
        for part, sets in held.items():
            assert any(key(number) in one for one in sets) == bool(mask >> part & 1)
    return {number: mask for number, mask in zip(numbers, masks, strict=False) if mask}


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Poll until it holds."""
    async with asyncio.timeout(PATIENCE_S):
        for _ in itertools.count():
            if await condition():
                return
            await asyncio.sleep(0.01)


Test = Callable[[AnyTier, Memory], Awaitable[None]]


class TierContract:
    """Inherit, and implement `open`. durable: its contents survive reopening."""

    durable = False

    async def open(self, memory: Memory, folder: Path) -> AnyTier:
        """A tier that accepts writes, of about `CAPACITY_BYTES`, with an earlier one's contents of this folder."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    @asynccontextmanager
    async def opened(self, memory: Memory) -> AsyncIterator[AnyTier]:
        tier = await self.open(memory, self.folder)
        try:
            yield tier
        finally:
            await tier.close()

    def run(self, test: Test) -> None:
        """Run a test on a new tier, on the daemon's event loop. Nothing may be held at the end."""

        async def main() -> None:
            memory = Memory(asyncio.get_running_loop().time)
            try:
                async with self.opened(memory) as tier:
                    await test(tier, memory)
                assert memory.has_no_leases()
            finally:
                memory.close()

        uvloop.run(main())

    async def store(
        self, tier: AnyTier, memory: Memory, numbers: Iterable[int], part: int = 0
    ) -> None:
        """Store blocks, and remove them from memory."""
        blocks = memory.put(numbers, part)
        assert await tier.store(blocks) == bytes([PRESENT]) * len(blocks)
        memory.remove(numbers)

    # ---- what is stored is loaded -------------------------------------------------------------------

    def test_an_empty_tier_has_nothing(self) -> None:
        async def test(tier: AnyTier, memory: Memory) -> None:
            assert tier.serving
            assert await tier.store([]) == b""
            assert await memory.load(tier, range(3)) == dict.fromkeys(range(3), ABSENT)
            assert await masks_of(tier, memory, range(3)) == {}
            assert await remove(tier, memory, range(3)) == 0
            assert tier.occupancy()[1:] == (0, 0)
            assert tier.occupancy().capacity_bytes > 0

        self.run(test)

    def test_what_was_stored_is_loaded_and_the_rest_is_absent(self) -> None:
        async def test(tier: AnyTier, memory: Memory) -> None:
            await self.store(tier, memory, range(8))
            asked = [9, 3, 0, 11, 7]
            expected = {n: PRESENT if n < 8 else ABSENT for n in asked}
            assert await memory.load(tier, asked) == expected
            assert await memory.load(tier, asked) == expected, "loading takes nothing away"
            assert await memory.load(tier, asked, part=1) == dict.fromkeys(asked, ABSENT)

        self.run(test)

    def test_parts_are_stored_by_themselves(self) -> None:
        async def test(tier: AnyTier, memory: Memory) -> None:
            blocks = memory.put(range(6)) + memory.put(range(3, 9), part=1)
            assert set(await tier.store(blocks)) == {PRESENT}
            memory.remove(range(9))
            masks = {n: (n < 6) | (n >= 3) << 1 for n in range(9)}
            assert await masks_of(tier, memory, range(12)) == masks
            for part in (0, 1):
                said = await memory.load(tier, range(9), part)
                assert said == {n: PRESENT if masks[n] >> part & 1 else ABSENT for n in range(9)}
            assert await remove(tier, memory, [0, 4, 8, 20]) == 3
            expected = {n: mask for n, mask in masks.items() if n % 4}
            assert await masks_of(tier, memory, range(9)) == expected

        self.run(test)

    def test_storing_again_what_is_there(self) -> None:
        async def test(tier: AnyTier, memory: Memory) -> None:
            await self.store(tier, memory, range(4))
            blocks = memory.put(range(6))
            assert await tier.store(blocks) == bytes([PRESENT]) * 6
            memory.remove(range(6))
            assert await memory.load(tier, range(6)) == dict.fromkeys(range(6), PRESENT)

        self.run(test)

    def test_what_memory_gave_up_before_is_not_stored(self) -> None:
        async def test(tier: AnyTier, memory: Memory) -> None:
            blocks = memory.put(range(4))
            memory.remove([1, 2])
            memory.put([2])  # another block with this key
            assert await tier.store(blocks) == bytes([PRESENT, ABSENT, ABSENT, PRESENT])
            memory.remove(range(4))
            assert await masks_of(tier, memory, range(4)) == {0: 1, 3: 1}

        self.run(test)

    def test_bytes_that_are_not_the_block_are_a_mismatch_once(self) -> None:
        async def test(tier: AnyTier, memory: Memory) -> None:
            bad = memory.put([1, 3], damaged=True)
            await tier.store(bad + memory.put([0, 2]))
            memory.remove(range(4))
            expected = {0: PRESENT, 1: MISMATCH, 2: PRESENT, 3: MISMATCH}
            said = await memory.load(tier, range(4))
            assert said == expected

            async def forgotten() -> bool:
                return await masks_of(tier, memory, range(4)) == {0: 1, 2: 1}

            await until(forgotten)
            await self.store(tier, memory, [1])
            assert await memory.load(tier, [1]) == {1: PRESENT}, "the right bytes take its place"

        self.run(test)

    def test_a_namespace_in_a_new_epoch_has_nothing(self) -> None:
        async def test(tier: AnyTier, memory: Memory) -> None:
            await self.store(tier, memory, range(4))
            tier.enter(memory.reset())
            assert await masks_of(tier, memory, range(4)) == {}
            assert await memory.load(tier, range(4)) == dict.fromkeys(range(4), ABSENT)
            await self.store(tier, memory, range(2, 6))
            expected = {n: PRESENT if n >= 2 else ABSENT for n in range(6)}
            assert await memory.load(tier, range(6)) == expected

        self.run(test)

    # ---- room ---------------------------------------------------------------------------------------

    def test_a_full_tier_loses_whole_blocks_and_says_so(self) -> None:
        async def test(tier: AnyTier, memory: Memory) -> None:
            for at in range(0, MANY, 8):
                some = range(at, at + 8)
                statuses = await tier.store(memory.put(some))
                assert set(statuses) <= {PRESENT, NO_SPACE}
                memory.remove(some)
            capacity, used, _ = tier.occupancy()
            assert used <= capacity
            said: dict[int, BlockStatus] = {}
            for at in range(0, MANY, 16):
                said |= await memory.load(tier, range(at, at + 16))
            assert set(said.values()) == {PRESENT, ABSENT}
            kept = [number for number, status in said.items() if status is PRESENT]
            assert MANY // 8 <= len(kept) <= capacity // PARTS[0].nbytes
            assert list(await masks_of(tier, memory, range(MANY))) == kept

        self.run(test)

    def test_what_is_removed_leaves_nothing_behind(self) -> None:
        async def test(tier: AnyTier, memory: Memory) -> None:
            for _ in range(4):  # more than fits, in all
                await self.store(tier, memory, range(24))
                await self.store(tier, memory, range(24), part=1)
                assert await remove(tier, memory, range(24)) == 24

            async def empty() -> bool:
                return tier.occupancy()[1:] == (0, 0)

            await until(empty)

        self.run(test)

    def test_a_walk_meets_what_is_there(self) -> None:
        async def test(tier: AnyTier, memory: Memory) -> None:
            if not isinstance(tier, base.LocalTier):
                return
            await self.store(tier, memory, range(20))
            met: set[bytes] = set()
            cursor: int | None = 0
            while cursor is not None:
                groups, cursor = tier.walk(cursor, 3)
                assert all(digest == memory.namespace.directory_digest for digest, _ in groups)
                met.update(*[keys for _, keys in groups])
            assert met == set(keys_of(range(20)))

        self.run(test)

    # ---- several at a time --------------------------------------------------------------------------

    def test_a_removal_while_it_is_stored_is_the_last_word(self) -> None:
        async def test(tier: AnyTier, memory: Memory) -> None:
            for turns in range(6):
                blocks = memory.put(range(8))
                storing = asyncio.ensure_future(tier.store(blocks))
                for _ in range(turns):
                    await asyncio.sleep(0)
                await remove(tier, memory, range(4))
                statuses = await storing
                assert statuses[4:] == bytes([PRESENT]) * 4
                assert set(statuses[:4]) <= {ABSENT, PRESENT}
                assert await memory.load(tier, range(4)) == dict.fromkeys(range(4), ABSENT)
                await remove(tier, memory, range(8))

        self.run(test)

    def test_two_that_store_the_same(self) -> None:
        async def test(tier: AnyTier, memory: Memory) -> None:
            blocks = memory.put(range(8))
            one, other = await asyncio.gather(tier.store(blocks), tier.store(blocks[::-1]))
            assert one == other == bytes([PRESENT]) * 8, (list(one), list(other))
            memory.remove(range(8))
            assert await memory.load(tier, range(8)) == dict.fromkeys(range(8), PRESENT)
            assert await remove(tier, memory, range(8)) == 8

        self.run(test)

    def test_loads_beside_stores_and_removals_are_right_or_nothing(self) -> None:
        """Every load verifies its bytes; at the end the tier and its books agree."""

        async def test(tier: AnyTier, memory: Memory) -> None:
            rng = random.Random(5)
            numbers = range(12)
            here = memory.put(
                range(100, 112)
            )  # concurrently, the same ones are stored all the time

            async def store_and_remove() -> None:
                for _ in range(10):
                    some = rng.sample(numbers, 4)
                    await tier.store(memory.put(some))
                    memory.remove(some)
                    if rng.random() < 0.5:
                        await remove(tier, memory, some[:2])

            async def load() -> None:
                for _ in range(10):
                    some = rng.sample(range(200, 206), 3)
                    said = await memory.load(tier, some)
                    assert said == {n: PRESENT if n < 203 else ABSENT for n in some}

            await self.store(tier, memory, range(200, 203))
            await asyncio.gather(store_and_remove(), load(), load(), tier.store(here))
            memory.remove(range(112))

            async def agree() -> bool:
                masks = await masks_of(tier, memory, numbers)
                said = await memory.load(tier, numbers)
                assert set(said.values()) <= {PRESENT, ABSENT}
                return said == {n: PRESENT if n in masks else ABSENT for n in numbers}

            await until(agree)  # what shares an object with removed blocks may go a moment later

        self.run(test)

    # ---- its end ------------------------------------------------------------------------------------

    def test_a_load_that_is_called_off_touches_nothing_any_more(self) -> None:
        async def test(tier: AnyTier, memory: Memory) -> None:
            await self.store(tier, memory, range(16))
            for turns in range(4):
                loading = asyncio.ensure_future(memory.load(tier, range(16)))
                for _ in range(turns):
                    await asyncio.sleep(0)
                loading.cancel()
                await asyncio.gather(loading, return_exceptions=True)
                blocks = memory.put(range(300, 316))  # into the slots that were given back
                for block in blocks:
                    number = int.from_bytes(block.key, "big")
                    assert memory._slot(block.table, block.row) == block_of(number, 0)
                memory.remove(range(300, 316))
            assert await memory.load(tier, range(16)) == dict.fromkeys(range(16), PRESENT)

        self.run(test)

    def test_operations_during_a_close_end(self) -> None:
        async def test(tier: AnyTier, memory: Memory) -> None:
            await self.store(tier, memory, range(16))
            blocks = memory.put(range(20, 36))
            work: list[Awaitable[object]] = [
                memory.load(tier, range(8)),
                tier.store(blocks),
                memory.load(tier, range(8, 16)),
            ]
            running = [asyncio.ensure_future(one) for one in work]
            await asyncio.sleep(0)
            async with asyncio.timeout(PATIENCE_S):
                await tier.close()
                for ended in await asyncio.gather(*running, return_exceptions=True):
                    if isinstance(ended, BaseException):
                        assert isinstance(ended, KvpoolError), repr(ended)
            assert memory.has_no_leases()
            assert not memory.holder.reservations

        self.run(test)

    def test_a_closed_tier_says_so(self) -> None:
        async def test(tier: AnyTier, memory: Memory) -> None:
            await self.store(tier, memory, range(4))
            await tier.close()
            await tier.close()
            assert not tier.serving
            blocks = memory.put(range(8, 10))
            assert set(await tier.store(blocks)) == {FAILED}
            try:
                said = await memory.load(tier, range(4))
            except KvpoolError:
                pass
            else:
                assert set(said.values()) <= {ABSENT, FAILED, LATE}

        self.run(test)

    def test_what_a_durable_tier_holds_is_there_again(self) -> None:
        if not self.durable:
            pytest.skip("it is not durable")

        async def test(tier: AnyTier, memory: Memory) -> None:
            await self.store(tier, memory, range(12))
            await self.store(tier, memory, range(4, 8), part=1)
            await tier.close()
            expected = {n: 1 | (4 <= n < 8) << 1 for n in range(12)}
            async with self.opened(memory) as again:

                async def found() -> bool:
                    return await masks_of(again, memory, range(14)) == expected

                await until(found)
                for part in (0, 1):
                    load = partial(memory.load, again, range(12), part)
                    masks = {n: expected.get(n, 0) >> part & 1 for n in range(12)}
                    assert await load() == {n: PRESENT if m else ABSENT for n, m in masks.items()}

        self.run(test)

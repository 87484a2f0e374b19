"""Orders to write blocks of memory to another tier: their size, and the leases that keep the blocks in memory
meanwhile.

Event loop only.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from dataclasses import InitVar, dataclass
from functools import partial
from typing import NamedTuple

from kvpool.daemon.core.blocks import Block, Holder, PartTable, by_table
from kvpool.daemon.core.ended_epochs import GARBAGE_BLOCKS
from kvpool.daemon.core.node import Node
from kvpool.tasks import Tasks
from kvpool.types import BlockStatus

EMPTY_KEY = bytes(16)
SLICE_ROWS = 2048  # of memory that are examined in one go beside requests
LAST_USED_MAX = 1 << 16  # blocks in one search for the most recently used
STORED_TOGETHER = 4096
LOOK_S = 0.5  # between looks whether an order may begin, when none ends


class WriteLimits(NamedTuple):
    """Limits of concurrent writes.

    orders: under way, to each place. blocks, bytes: in one order. memory_share: of a tenant's segment, in all orders
    together: blocks being written cannot be evicted, and puts need room. places: how many there are.
    """

    orders: int
    blocks: int
    bytes: int
    memory_share: float
    places: int = 1


class Order(NamedTuple):
    """Blocks of one table, and the write of those still in memory. place: where to, such as a disk."""

    blocks: Sequence[Block]
    write: Callable[[Sequence[Block]], Awaitable[None]]
    place: Hashable = None


@dataclass(eq=False)
class WriteOrders:
    """The orders to write that one tier has under way. Each place has its own limit: one that hangs keeps no order
    from another.

    holder: names the holder that keeps the blocks in memory. may_begin: whether any place takes one more order;
    None: there is one place, and it does below its limit.
    """

    _node: Node
    _tasks: Tasks
    _holder: str
    limits: WriteLimits
    may_begin: InitVar[Callable[[], bool] | None] = None

    def __post_init__(self, may_begin: Callable[[], bool] | None) -> None:
        self._may_begin = may_begin or partial(self.has_room, None)
        self._orders: Counter[Hashable] = Counter()
        self._under_way: set[tuple[PartTable, bytes]] = set()
        self._finished = asyncio.Event()

    def __contains__(self, block: Block) -> bool:
        """Whether it is on its way."""
        return (block.table, block.key) in self._under_way

    def __len__(self) -> int:
        """Blocks on their way."""
        return len(self._under_way)

    def has_room(self, place: Hashable) -> bool:
        """Whether one more order may begin there."""
        return self._orders[place] < self.limits.orders

    def together(self, table: PartTable) -> int:
        """Blocks of a table that go into one order."""
        most = self.limits
        share = int(table.namespace.tenant.allocator.size * most.memory_share)
        share //= most.orders * most.places
        return max(1, min(most.blocks, min(most.bytes, share) // table.stride))

    def batches(self, blocks: Iterable[Block]) -> list[list[Block]]:
        """Blocks by table, in groups of one order's size."""
        batches = []
        for table, found in by_table(blocks).items():
            most = self.together(table)
            batches += [found[at : at + most] for at in range(0, len(found), most)]
        return batches

    async def begin(self, choose: Callable[[], Order | None]) -> bool:
        """Wait until another order may begin, then start the one that `choose` returns; returns whether there was
        one. It must be for a place that has room.
        """
        while not self._may_begin():
            try:
                async with asyncio.timeout(LOOK_S):  # a place may have come or gone meanwhile
                    await self._finished.wait()
            except TimeoutError:
                pass
        order = choose()
        if order is None:
            return False
        self._orders[order.place] += 1
        table = order.blocks[0].table
        holder = self._node.holders.own(table.namespace.tenant.name, self._holder)
        lease = self._node.leases.hold(holder, order.blocks)
        _, held = lease.parts[table.part]
        self._under_way.update((table, block.key) for block in held)
        task = self._tasks.begin(_written(order.write, held))
        task.add_done_callback(partial(self._ended, order.place, holder, lease.token, table, held))
        return True

    def _ended(
        self,
        place: Hashable,
        holder: Holder,
        token: str,
        table: PartTable,
        held: Sequence[Block],
        _: object,
    ) -> None:
        self._under_way.difference_update((table, block.key) for block in held)
        self._node.leases.release(holder, token)
        self._orders[place] -= 1
        self._finished.set()
        self._finished = asyncio.Event()

    async def store(
        self, blocks: Sequence[Block], choose: Callable[[Sequence[Block]], Order | None]
    ) -> None:
        """Write blocks, and wait until none of them is on its way, including those already under way."""
        for batch in self.batches(blocks):
            await self.begin(partial(choose, batch))
        while any(block in self for block in blocks):
            await self._finished.wait()


async def _written(
    write: Callable[[Sequence[Block]], Awaitable[None]], held: Sequence[Block]
) -> None:
    if held:
        await write(held)


async def last_used_first(
    node: Node, wanted: Callable[[Block], bool], most: int = LAST_USED_MAX
) -> list[Block]:
    """The wanted blocks in memory, at most so many, yielding to other tasks on the way."""
    best: list[tuple[int, int, Block]] = []
    cursor: int | None = 0
    number = 0
    while cursor is not None:
        blocks, cursor = node.inventory.parts(cursor, SLICE_ROWS)
        for block in filter(wanted, blocks):
            number += 1
            entry = block.used, -number, block
            if len(best) < most:
                heapq.heappush(best, entry)
            elif entry > best[0]:
                heapq.heapreplace(best, entry)
        await asyncio.sleep(0)
    return [block for _, _, block in sorted(best, reverse=True) if block.is_here()]


async def write_last_used(
    node: Node,
    wanted: Callable[[Block], bool],
    store: Callable[[Sequence[Block]], Awaitable[bytes]],
) -> None:
    """Store the wanted blocks, roughly the most recently used first, until no more of them can be stored."""
    stored = True
    while stored and (found := await last_used_first(node, wanted)):
        stored = False
        for at in range(0, len(found), STORED_TOGETHER):
            statuses = await store(found[at : at + STORED_TOGETHER])
            stored |= BlockStatus.PRESENT in statuses


async def give_garbage_back(rules: Node) -> None:
    """Free the slots of ended epochs, yielding to other tasks."""
    while rules.ended_epochs:
        rules.ended_epochs.reclaim(GARBAGE_BLOCKS)
        await asyncio.sleep(0)

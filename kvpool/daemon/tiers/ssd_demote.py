"""Which blocks are written from memory to this node's disks, and when.

Blocks get to SSD in the background, from a bounded queue (namespaces that write through), and from the cold end
of memory ahead of their eviction (those that write back). A put waits for neither.

Event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass
from functools import partial

from kvpool.config import DaemonConfig
from kvpool.daemon.core.blocks import Block, NamespaceState, PartTable, Tenant
from kvpool.daemon.core.candidates import Place
from kvpool.daemon.core.node import Node
from kvpool.daemon.tiers.ssd_device import SsdDevice, device_of
from kvpool.daemon.tiers.tier_state import TierState
from kvpool.daemon.tiers.write_orders import Order, WriteLimits, WriteOrders, write_last_used
from kvpool.storage.stack import Budget, Watermarks, WriteMode
from kvpool.tasks import Tasks
from kvpool.telemetry.tier_stats import TiersStats
from kvpool.types import BlockStatus

log = logging.getLogger("kvpool.daemon")

QUEUE_MAX = 1 << 16  # blocks that were put and should be written through
BATCH_BLOCKS, BATCH_BYTES = 256, 16 << 20  # in one order
WRITES_MAX = 4  # orders to write at a time, to one disk
HELD_SHARE = 1 / 8  # of a segment, in all orders
CLEAN_LOW, CLEAN_HIGH = 1 / 8, 1 / 4  # of a segment: its cold end that should be on disk already
LOOK_BLOCKS = 4096  # of the cold end, in one look
SAMPLE_BLOCKS = 512  # of them, for statistics
MOVED_SHARE = 1 / 32  # of a segment, put since the last look: time for another
CLEAN_EVERY_S, PRESSED_S = 0.05, 0.005
STUCK_S = 1.0  # a disk that ends none of its orders for so long is passed over
CLOSED_S = 1.0  # between checks whether a disk accepts writes


@dataclass(eq=False)
class SsdDemotion:
    """Writes blocks to this node's disks."""

    _config: DaemonConfig
    node: Node
    _clock: Callable[[], float]
    devices: Sequence[SsdDevice]
    tasks: InitVar[Tasks]

    def __post_init__(self, tasks: Tasks) -> None:
        self._queue: OrderedDict[tuple[PartTable, bytes], None] = OrderedDict()
        self._awake = asyncio.Event()
        self._put = asyncio.Event()
        limits = WriteLimits(
            WRITES_MAX, BATCH_BLOCKS, BATCH_BYTES, HELD_SHARE, places=max(1, len(self.devices))
        )
        self._orders = WriteOrders(self.node, tasks, "writes", limits, self._may_begin)
        self._moved_at: dict[SsdDevice, float] = {}  # when an order to it began or ended, last
        self._pressed = False
        self._watermarks: dict[tuple[str, Place], Watermarks] = {}
        self.budget = Budget(self._config.ssd_bytes_per_day, self._clock())
        self.counted = TiersStats()

    @property
    def queued(self) -> int:
        """Blocks that wait to be written through."""
        return len(self._queue)

    @property
    def under_way(self) -> int:
        """Blocks that are being written."""
        return len(self._orders)

    def disk_opened(self) -> None:
        """Waiting blocks may be writable now."""
        self._awake.set()

    def memory_filled(self) -> None:
        """New blocks in memory bring others closer to eviction; these must be written first."""
        self._put.set()

    def mode(self, namespace: NamespaceState) -> WriteMode:
        """When blocks of a namespace are written."""
        return WriteMode(namespace.settings.write or self._config.ssd_write)

    def stored(
        self, namespace: NamespaceState, part: int, keys: Callable[[], Iterable[bytes]]
    ) -> None:
        """These were put into memory. Never waits; blocks are skipped when the queue is full."""
        if not self.devices:
            return
        self._put.set()
        if self.mode(namespace) is not WriteMode.THROUGH:
            return
        table = namespace.tables[part]
        queue = self._queue
        for key in keys():
            if len(queue) >= QUEUE_MAX:
                self.counted.dropped_writes += 1
            else:
                queue[table, key] = None
        self._awake.set()

    async def write_through(self) -> None:
        while True:
            await self._awake.wait()
            self._awake.clear()
            while self._queue:
                if self._may_write():
                    await self._orders.begin(lambda: self._choose(self._next_batch()))
                else:
                    await asyncio.sleep(PRESSED_S if self.opening() else CLOSED_S)

    def opening(self) -> bool:
        return any(device.state is TierState.OPENING for device in self.devices)

    def _next_batch(self) -> list[Block]:
        """Blocks of one table from the front of the queue that are still there."""
        self.node.settle()
        table: PartTable | None = None
        blocks: list[Block] = []
        while self._queue:
            key: bytes
            first, key = next(iter(self._queue))
            if table is not None and (
                first is not table or len(blocks) == self._orders.together(table)
            ):
                break
            table = first
            del self._queue[first, key]
            block = first.blocks.get(key)
            if block is None:
                self.counted.dropped_writes += 1
            else:
                blocks.append(block)
        return blocks

    def _is_dirty(self, block: Block) -> bool:
        """Whether it should be on a disk, and is on none, nor on the way to one."""
        # A block that was on a disk since its last use, and is gone, was evicted there as worth too little.
        if block.written == block.used or block in self._orders:
            return False
        table = block.table
        if device_of(self.devices, table, block.key) is not None:
            block.written = block.used
            return False
        return self.mode(table.namespace) is not WriteMode.NONE

    def _choose(self, blocks: Sequence[Block]) -> Order | None:
        """The blocks of one table to write now, and the disk."""
        now = self._clock()
        # Other tasks may have begun to write some of them meanwhile.
        blocks = [block for block in blocks if self._is_dirty(block)]
        if self.budget.scarce(now):
            used_again = [b for b in blocks if b.used > b.put and not b.expendable]
            self.counted.once_used_blocks += len(blocks) - len(used_again)
            blocks = used_again
        device = self._emptiest()
        if not blocks or device is None:
            return None
        table = blocks[0].table
        if not self.budget.spend(device.takes(table, len(blocks)), now):
            self.counted.over_budget_blocks += len(blocks)
            return None
        return Order(blocks, partial(self._write, device), device)

    async def _write(self, device: SsdDevice, blocks: Sequence[Block]) -> None:
        table = blocks[0].table
        used = [block.used for block in blocks]
        self._moved_at[device] = self._clock()
        try:
            await device.write(table, blocks, table.namespace.tenant.segment)
        finally:
            self._moved_at[device] = self._clock()
        held = [own.blocks for own in device.holding(table)]
        for block, tick in zip(blocks, used, strict=True):
            if any(block.key in keys for keys in held):
                block.written = tick

    async def store(self, blocks: Sequence[Block]) -> bytes:
        """See `Tier`. Blocks beyond the daily budget get NO_SPACE."""
        await self._orders.store(blocks, self._choose)
        return bytes([self._stored(block) for block in blocks])

    def _stored(self, block: Block) -> BlockStatus:
        if device_of(self.devices, block.table, block.key) is not None:
            return BlockStatus.PRESENT
        if block.table.blocks.get(block.key) is not block:
            return BlockStatus.ABSENT
        return BlockStatus.NO_SPACE if self._may_write() else BlockStatus.FAILED

    def _may_write(self) -> bool:
        return any(device.may_write() for device in self.devices)

    def _may_begin(self) -> bool:
        """Whether the next order may begin at its disk, or there is none for it."""
        device = self._emptiest()
        return device is None or self._orders.has_room(device)

    def _is_stuck(self, device: SsdDevice) -> bool:
        """Whether it has enough to do, and has done none of it for a while."""
        if self._orders.has_room(device):
            return False
        return self._clock() - self._moved_at.get(device, 0.0) >= STUCK_S

    def _emptiest(self) -> SsdDevice | None:
        """The disk to write to next: each gets its share by its size, but for one that hangs."""
        able = [device for device in self.devices if device.may_write()]
        able = [device for device in able if not self._is_stuck(device)] or able
        return min(
            able,
            key=lambda s: (s.counted.written_bytes + s.counted.writing_bytes) / s.size,
            default=None,
        )

    async def write_ahead(self) -> None:
        """Have the cold end of each segment on disk before it is evicted."""
        while True:
            if not self._pressed:
                await self._put.wait()
            self._put.clear()
            await self._cold_end_has_moved()
            self._pressed = False
            for tenant in list(self.node.tenants.values()):
                self._pressed |= await self._clean(tenant)
                await asyncio.sleep(0)

    async def _cold_end_has_moved(self) -> None:
        """Wait until puts since the last look may have used up half of what was seen, at most `CLEAN_EVERY_S`.

        A look takes as long as it has blocks: it must not follow each put.
        """
        put = self.node.counters
        blocks, nbytes = put.committed, put.committed_bytes
        sizes = [tenant.allocator.size for tenant in self.node.tenants.values()]
        moved = min(sizes, default=0) * MOVED_SHARE
        end = self._clock() + CLEAN_EVERY_S
        while True:
            await asyncio.sleep(PRESSED_S)
            if (
                put.committed - blocks >= LOOK_BLOCKS // 2
                or put.committed_bytes - nbytes >= moved
                or self._clock() >= end
            ):
                return

    async def _clean(self, tenant: Tenant) -> bool:
        """Write some of a segment's next victims, if too few are written; returns whether any were."""
        if not self._may_write():
            return False
        dirty: dict[Block, None] = {}
        for place, free, victims, held in self.node.candidates.next_victims(
            tenant, LOOK_BLOCKS, CLEAN_HIGH
        ):
            window = victims[: max(1, int(held * (CLEAN_HIGH - free)))]
            unclean = [at for at, block in enumerate(window) if self._is_dirty(block)]
            marks = self._watermarks.setdefault(
                (tenant.name, place), Watermarks(CLEAN_LOW, CLEAN_HIGH)
            )
            # Clean blocks behind a dirty one are no help: that one is evicted first.
            clean = unclean[0] if unclean else len(window)
            if marks.more(free + clean / held):
                dirty.update(dict.fromkeys(window[at] for at in unclean))
        begun = False
        for batch in self._orders.batches(dirty):
            begun |= await self._orders.begin(partial(self._choose, batch))
        return begun

    def clean_share(self, tenant: Tenant) -> float:
        """For a segment: the free part, and what can be evicted before a block that is on no disk, up to the target."""
        share = 1 - tenant.allocator.bytes_used / tenant.allocator.size
        for place, _, victims, held in self.node.candidates.next_victims(tenant, LOOK_BLOCKS):
            if place.base:
                continue  # among all of its size already
            window = victims[: max(1, int(held * CLEAN_HIGH))]
            some = window[:: 1 + len(window) // SAMPLE_BLOCKS]
            on_disk = (device_of(self.devices, b.table, b.key) is not None for b in some)
            clean = next((at for at, here in enumerate(on_disk) if not here), len(some))
            share += clean / len(some) * len(window) / held
        return min(share, CLEAN_HIGH)

    async def flush(self, seconds: float) -> None:
        """Write blocks that are in memory and on no disk, the most recently used first. Ends by `seconds`."""
        if not self.devices or seconds <= 0:
            return
        try:
            async with asyncio.timeout(seconds):
                await write_last_used(self.node, self._is_dirty, self.store)
        except TimeoutError:
            log.warning("some blocks in memory were not written to disk within %g s", seconds)

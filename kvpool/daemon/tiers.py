"""The tiers below memory on this node: what is written down when, and what is here of a block.

Blocks get to SSD in the background, from a bounded queue (namespaces that write through), and from the cold
end of memory ahead of their eviction (those that write back). A put waits for neither. What memory gives up
is then still here, and `remote.py` fetches it as it fetches from other nodes: this node's disks are one
more source, with its own speed.

Event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from typing import Any

from kvpool import wire
from kvpool.config import DaemonConfig, DiskConfig
from kvpool.daemon.blocks import Block, Holder, NamespaceState, PartTable, Tenant
from kvpool.daemon.disks import DiskProcess
from kvpool.daemon.node import Node, Place
from kvpool.daemon.shelf import EMPTY_KEY, Shelf, ShelfState, TableRecord
from kvpool.daemon.tasks import Tasks, crash_if_failed
from kvpool.daemon.workers import Keeper
from kvpool.errors import KvpoolError, Unavailable
from kvpool.placement.records import TierRecord
from kvpool.segment import Segment
from kvpool.storage.stack import Budget, Watermarks, WriteMode
from kvpool.types import split_keys

log = logging.getLogger("kvpool.daemon")

QUEUE_MAX = 1 << 16  # blocks that were put and are to be written through
BATCH_BLOCKS, BATCH_BYTES = 256, 16 << 20  # in one order
WRITES_MAX = 4  # orders to write at a time, of all disks
HELD_SHARE = 1 / 8  # of a segment: what is being written cannot be evicted, and puts need room
CLEAN_LOW, CLEAN_HIGH = 1 / 8, 1 / 4  # of a segment: its cold end that is to be on disk already
LOOK_BLOCKS = 4096  # of the cold end, in one look
CLEAN_EVERY_S, PRESSED_S = 0.05, 0.005
TIDY_EVERY_S = 1.0
GARBAGE_BLOCKS = 500  # of ended epochs, given back in one go
START_WAIT_S = 5.0  # for disks, before the node says that it is ready
WALK_CURSORS = 1 << 56  # for one shelf


class Tiers:
    """See the module. The `Held` of the announcer of tier ssd.

    adopt: makes a namespace known that an index remembers; see `Shelf.restore`.
    """

    def __init__(
        self,
        config: DaemonConfig,
        node: Node,
        clock: Callable[[], float],
        make_rules: Callable[[], Node],
        adopt: Callable[[TableRecord], Awaitable[NamespaceState | None]],
    ) -> None:
        self.node = node
        self._config = config
        self._clock = clock
        self._adopt = adopt
        self._make_rules = make_rules
        self._keepers: list[Keeper[DiskProcess]] = []
        self._tasks = Tasks()
        self._queue: OrderedDict[tuple[PartTable, bytes], None] = OrderedDict()
        self._awake = asyncio.Event()
        self._put = asyncio.Event()
        self._opened = asyncio.Event()
        self._writes = asyncio.Semaphore(WRITES_MAX)
        self._under_way: set[tuple[PartTable, bytes]] = set()
        self._pressed = False
        self._watermarks: dict[tuple[str, Place], Watermarks] = {}
        self._notify: Callable[[], object] = lambda: None
        self._following = False
        self.budget = Budget(config.ssd_bytes_per_day, clock())
        shares, total = config.ssd_shares(), sum(disk.size for disk in config.ssd)
        self.shelves = [
            Shelf(
                *(disk.path, disk.size, shares, self._make_shelf_rules, clock),
                weight=disk.size / total,
            )
            for disk in config.ssd
        ]
        self.counters = {
            "dropped_writes": 0,  # not queued, or not there any more when their turn came
            "over_budget_blocks": 0,
            "once_used_blocks": 0,  # not written, since the budget is short and nobody read them again
        }

    def _make_shelf_rules(self) -> Node:
        node = self._make_rules()
        if self._following:
            node.follow_changes(self._notify)
        return node

    # ---- life --------------------------------------------------------------------------------------

    async def start(self, segments: dict[int, Segment]) -> None:
        """Start all disks and take up what they hold; goes on with that when it takes long.

        A disk that cannot be opened is told, and tried again now and then.
        """
        for shelf, disk in zip(self.shelves, self._config.ssd, strict=True):
            self._tasks.begin(self._run_disk(shelf, disk, segments))
        try:
            async with asyncio.timeout(START_WAIT_S):
                while self._opening():
                    await self._opened.wait()
                    self._opened.clear()
        except TimeoutError:
            log.warning("a disk takes long to open: what is on it is found by and by")

    async def _run_disk(self, shelf: Shelf, disk: DiskConfig, segments: dict[int, Segment]) -> None:
        """Keep a disk's process running, and its shelf filled."""
        restoring: set[asyncio.Task[None]] = set()

        def began(process: DiskProcess) -> None:
            task = asyncio.get_running_loop().create_task(self._restore(shelf, process))
            restoring.add(task)
            task.add_done_callback(restoring.discard)
            task.add_done_callback(crash_if_failed)

        def ended(error: str) -> None:
            shelf.ended(error)
            self._opened.set()

        keeper = Keeper(lambda: DiskProcess(disk, segments), began, ended, None)
        self._keepers.append(keeper)
        await keeper.insist(f"the disk at {disk.path}")

    async def _restore(self, shelf: Shelf, process: DiskProcess) -> None:
        try:
            await shelf.restore(process, self._adopt)
        except Unavailable:
            return  # it has died again
        log.info("the disk at %s holds %d blocks", shelf.path, shelf.node.block_count())
        self._awake.set()
        self._opened.set()

    def begin(self) -> None:
        """Begin what is done beside the requests."""
        if self.shelves:
            for work in (self._write_through(), self._write_ahead(), self._tidy()):
                self._tasks.begin(work)

    async def close(self) -> None:
        """End all processes. Idempotent."""
        await self._tasks.end()
        await asyncio.gather(*[keeper.stop() for keeper in self._keepers])
        self._keepers.clear()

    def enter(self, namespace: NamespaceState) -> None:
        """See `Shelf.enter`."""
        for shelf in self.shelves:
            shelf.enter(namespace)

    def limit(self, namespace: NamespaceState) -> None:
        """See `Shelf.limit`."""
        for shelf in self.shelves:
            shelf.limit(namespace)

    async def record(self, namespace: NamespaceState) -> None:
        """See `Shelf.record`."""
        for shelf in self.shelves:
            await shelf.record(namespace)

    # ---- what is here ------------------------------------------------------------------------------

    @property
    def any(self) -> bool:
        """Whether there is anything below memory."""
        return any(shelf.state is not ShelfState.FAILED for shelf in self.shelves)

    def shelf_of(self, table: PartTable, key: bytes) -> Shelf | None:
        """The disk that a block of a table in memory is on."""
        for shelf in self.shelves:
            if any(key in own.blocks for own in shelf.holding(table)):
                return shelf
        return None

    def held(self, table: PartTable) -> list[Container[bytes]]:
        """The keys of a table in memory that are on disks. What was written a moment ago may lack."""
        held: list[Container[bytes]] = []
        for shelf in self.shelves:
            held += [own.blocks for own in shelf.holding(table) if own.blocks]
        return held

    async def read(
        self, table: PartTable, keys: Sequence[bytes], rows: Sequence[int], seconds: float
    ) -> wire.Pulled:
        """Read blocks into reserved rows of their table in memory: as `Movers.pull`.

        When this ends, however it does, nothing writes to the rows any more.
        """
        status, checksums = bytearray(len(keys)), [EMPTY_KEY] * len(keys)
        by_shelf: dict[Shelf, list[int]] = {}
        for index, key in enumerate(keys):
            shelf = self.shelf_of(table, key)
            if shelf is not None:
                by_shelf.setdefault(shelf, []).append(index)
        segment = table.namespace.tenant.segment
        started = self._clock()
        reads = [
            shelf.read(
                table,
                [keys[index] for index in at],
                segment,
                wire.pack_rows([rows[index] for index in at]),
                seconds,
            )
            for shelf, at in by_shelf.items()
        ]
        error = ""
        self._put.set()  # what is read makes others give way, which are to be written first
        # When this is cancelled, so is each of them, and it ends when all have: the rows are left alone then.
        found = await asyncio.gather(*reads, return_exceptions=True)
        for at, pulled in zip(by_shelf.values(), found, strict=True):
            if isinstance(pulled, wire.Pulled):
                error = pulled.error or error
                sums = split_keys(pulled.checksums)
                for index, one, checksum in zip(at, pulled.status, sums, strict=True):
                    status[index], checksums[index] = one, checksum
            elif isinstance(pulled, KvpoolError):
                error = str(pulled)
            else:
                raise pulled
        return wire.Pulled(bytes(status), b"".join(checksums), self._clock() - started, error)

    # ---- for the directory -------------------------------------------------------------------------

    def follow_changes(self, changed: Callable[[], object]) -> None:
        """See `Node.follow_changes`."""
        self._notify, self._following = changed, True
        for shelf in self.shelves:
            shelf.node.follow_changes(changed)

    def take_changes(self) -> list[tuple[NamespaceState, Sequence[bytes]]]:
        """See `Node.take_changes`; the namespaces are the shelves' own."""
        return [change for shelf in self.shelves for change in shelf.node.take_changes()]

    def masks(self, digest: bytes, keys: Sequence[bytes]) -> tuple[int, list[int]]:
        """See `Node.masks`: what is on any disk."""
        parts, masks = 0, [0] * len(keys)
        for shelf in self.shelves:
            here, found = shelf.masks(digest, keys)
            if here:
                parts = here
                masks = [mask | more for mask, more in zip(masks, found, strict=True)]
        return parts, masks if parts else []

    def walk(self, cursor: int, count: int) -> tuple[list[tuple[bytes, list[bytes]]], int | None]:
        """See `Node.walk`: one disk after the other."""
        number, at = divmod(cursor, WALK_CURSORS)
        if number >= len(self.shelves):
            return [], None
        groups, more = self.shelves[number].node.walk(at, count)
        if more is not None:
            return groups, number * WALK_CURSORS + more
        number += 1
        return groups, number * WALK_CURSORS if number < len(self.shelves) else None

    # ---- down: what was put --------------------------------------------------------------------------

    def mode(self, namespace: NamespaceState) -> WriteMode:
        """When blocks of a namespace are written."""
        return WriteMode(namespace.settings.write or self._config.ssd_write)

    def stored(
        self, namespace: NamespaceState, part: int, keys: Callable[[], Iterable[bytes]]
    ) -> None:
        """These were put into memory. Never waits; what finds the queue full is not written through."""
        if not self.shelves:
            return
        self._put.set()
        if self.mode(namespace) is not WriteMode.THROUGH:
            return
        table = namespace.tables[part]
        queue = self._queue
        for key in keys():
            if len(queue) >= QUEUE_MAX:
                self.counters["dropped_writes"] += 1
            else:
                queue[table, key] = None
        self._awake.set()

    async def _write_through(self) -> None:
        while True:
            await self._awake.wait()
            self._awake.clear()
            while self._queue:
                if not any(shelf.may_write() for shelf in self.shelves):
                    await asyncio.sleep(PRESSED_S if self._opening() else TIDY_EVERY_S)
                    continue
                await self._writes.acquire()
                if not self._begin(self._next_batch()):
                    self._writes.release()

    def _opening(self) -> bool:
        return any(shelf.state is ShelfState.OPENING for shelf in self.shelves)

    def _next_batch(self) -> list[Block]:
        """Blocks of one table from the front of the queue that are still there."""
        self.node.settle()
        table: PartTable | None = None
        blocks: list[Block] = []
        while self._queue:
            key: bytes
            first, key = next(iter(self._queue))
            if table is not None and (first is not table or len(blocks) == _together(table)):
                break
            table = first
            del self._queue[first, key]
            block = first.blocks.get(key)
            if block is None:
                self.counters["dropped_writes"] += 1
            else:
                blocks.append(block)
        return blocks

    def _is_dirty(self, block: Block) -> bool:
        """Whether it is to be on a disk, and is on none, nor on the way to one."""
        table = block.table
        # What was written since its last use, and is gone, was given up by the disk as worth too little.
        return (
            (table, block.key) not in self._under_way
            and block.written != block.used
            and self.shelf_of(table, block.key) is None
            and self.mode(table.namespace) is not WriteMode.NONE
        )

    def _begin(self, blocks: list[Block]) -> bool:
        """Write blocks of one table in the background, with a permit of `_writes`; whether that began."""
        now = self._clock()
        # Others may have begun to write some of them while the permit was waited for.
        blocks = [block for block in blocks if self._is_dirty(block)]
        if self.budget.scarce(now):
            used_again = [block for block in blocks if block.used > block.put]
            self.counters["once_used_blocks"] += len(blocks) - len(used_again)
            blocks = used_again
        shelf = self._emptiest()
        if not blocks or shelf is None:
            return False
        table = blocks[0].table
        if not self.budget.spend(shelf.takes(table, len(blocks)), now):
            self.counters["over_budget_blocks"] += len(blocks)
            return False
        lease = self.node.hold(self._holder(table.namespace.tenant.name), blocks)
        _, held = lease.parts[table.part]
        self._under_way.update((table, block.key) for block in held)
        self._tasks.begin(self._write(shelf, table, held, lease.token))
        return True

    async def _write(
        self, shelf: Shelf, table: PartTable, blocks: Sequence[Block], token: str
    ) -> None:
        tenant = table.namespace.tenant
        try:
            used = [block.used for block in blocks]
            await shelf.write(table, blocks, tenant.segment)
            held = [own.blocks for own in shelf.holding(table)]
            for block, tick in zip(blocks, used, strict=True):
                if any(block.key in keys for keys in held):
                    block.written = tick
        finally:
            self._under_way.difference_update((table, block.key) for block in blocks)
            self.node.release(self._holder(tenant.name), token)
            self._writes.release()

    def _emptiest(self) -> Shelf | None:
        """The disk to write to next: each gets its share by its size."""
        able = [shelf for shelf in self.shelves if shelf.may_write()]
        return min(able, key=lambda s: (s.written_bytes + s.writing_bytes) / s.size, default=None)

    def _holder(self, tenant: str) -> Holder:
        return self.node.own_holder(tenant, "writes")

    # ---- down: what memory gives up next ---------------------------------------------------------------

    async def _write_ahead(self) -> None:
        """Have the cold end of each segment on disk before it is evicted."""
        while True:
            try:
                async with asyncio.timeout(CLEAN_EVERY_S if self._pressed else None):
                    await self._put.wait()
            except TimeoutError:
                pass
            self._put.clear()
            self._pressed = False
            for tenant in list(self.node.tenants.values()):
                self._pressed |= await self._clean(tenant)
            await asyncio.sleep(PRESSED_S)

    async def _clean(self, tenant: Tenant) -> bool:
        """Write some of what a segment gives up next, if too little of it is written; whether it was."""
        if not any(shelf.may_write() for shelf in self.shelves):
            return False
        dirty: dict[Block, None] = {}
        for place, free, victims, held in self.node.next_victims(tenant, LOOK_BLOCKS, CLEAN_HIGH):
            window = victims[: max(1, int(held * (CLEAN_HIGH - free)))]
            unclean = [block for block in window if self._is_dirty(block)]
            marks = self._watermarks.setdefault(
                (tenant.name, place), Watermarks(CLEAN_LOW, CLEAN_HIGH)
            )
            if marks.more(free + (len(window) - len(unclean)) / held):
                dirty.update(dict.fromkeys(unclean))
        begun = False
        for batch in _batches(list(dirty)):
            await self._writes.acquire()
            if self._begin(batch):
                begun = True
            else:
                self._writes.release()
        return begun

    def _clean_share(self, tenant: Tenant) -> float:
        """Of a segment: what is free, and the cold end that is on disk, up to what is aimed at."""
        share = 1 - tenant.allocator.bytes_used / tenant.allocator.size
        for place, _, victims, held in self.node.next_victims(tenant, LOOK_BLOCKS):
            if place.base:
                continue  # among all of its size already
            window = victims[: max(1, int(held * CLEAN_HIGH))]
            clean = sum(self.shelf_of(block.table, block.key) is not None for block in window)
            share += clean / held
        return min(share, CLEAN_HIGH)

    async def flush(self, seconds: float) -> None:
        """Write what is in memory and on no disk, what was used last first. Ends by `seconds`."""
        if not self.shelves or seconds <= 0:
            return
        dirty = self.node.last_used_first(self._is_dirty)
        try:
            async with asyncio.timeout(seconds):
                for at in range(0, len(dirty), LOOK_BLOCKS):
                    for batch in _batches(dirty[at : at + LOOK_BLOCKS]):
                        await self._writes.acquire()
                        if not self._begin(batch):
                            self._writes.release()
                for _ in range(WRITES_MAX):
                    await self._writes.acquire()
        except TimeoutError:
            log.warning("not all that was in memory could be written in %g s", seconds)

    async def _tidy(self) -> None:
        """Give slots of ended epochs back, and have the indexes forget what went."""
        while True:
            await asyncio.sleep(TIDY_EVERY_S)
            for shelf in self.shelves:
                while shelf.node.has_garbage:
                    shelf.node.reclaim_garbage(GARBAGE_BLOCKS)
                    await asyncio.sleep(0)
                if shelf.state is ShelfState.OPENING:
                    continue  # it drops tables when all that was in them is forgotten, and knows by itself
                too_much = True
                while too_much:
                    too_much = shelf.node.tend_quotas(GARBAGE_BLOCKS)
                    await asyncio.sleep(0)
                try:
                    await shelf.tidy()
                except KvpoolError:
                    pass  # it is tried again, or the disk's next life begins without them

    # ---- the operator's view -----------------------------------------------------------------------

    def remove(self, namespace: NamespaceState, packed: bytes) -> int:
        """Forget blocks, all their parts, on all disks; how many there were."""
        gone = 0
        for shelf in self.shelves:
            space = shelf.node.by_directory(namespace.directory_digest)
            if space is not None:
                gone += shelf.node.remove(space, packed)
        return gone

    def rules(self) -> list[Node]:
        """Those of each disk's slots."""
        return [shelf.node for shelf in self.shelves]

    def check_pin(self, namespace: NamespaceState, packed: bytes, kind: str) -> None:
        """Raises what `pin` would raise."""
        for shelf in self.shelves:
            space = shelf.space(namespace)
            if space is not None:
                shelf.node.check_pin(space, packed, kind)

    async def pin(self, namespace: NamespaceState, packed: bytes, kind: str) -> set[bytes]:
        """See `Shelf.pin`."""
        found: set[bytes] = set()
        for shelf in self.shelves:
            found |= await shelf.pin(namespace, packed, kind)
        return found

    async def scrub(self, cursor: int, count: int) -> tuple[int, int, int | None]:
        """See `Shelf.scrub`: one disk after the other."""
        number, at = divmod(cursor, WALK_CURSORS)
        if number >= len(self.shelves):
            return 0, 0, None
        seen, bad, more = await self.shelves[number].scrub(at, count)
        if more is not None:
            return seen, bad, number * WALK_CURSORS + more
        number += 1
        return seen, bad, number * WALK_CURSORS if number < len(self.shelves) else None

    def records(self) -> list[TierRecord]:
        """The tiers as others are told of them."""
        size = sum(shelf.segment_bytes for shelf in self.shelves)
        return [TierRecord("ssd", size, sum(shelf.used_bytes for shelf in self.shelves))]

    def usage(self, tenant: str) -> list[dict[str, Any]]:
        """What a tenant has of each disk: see `Node.usage`; nothing while a disk is not open."""
        found = [(shelf.path, shelf.node, shelf.node.tenants.get(tenant)) for shelf in self.shelves]
        return [
            {"where": path, **node.usage(part)} for path, node, part in found if part is not None
        ]

    def stats(self) -> dict[str, Any]:
        """Plain values."""
        return {
            **self.counters,
            "queued_writes": len(self._queue),
            "clean_share": {
                tenant.name: self._clean_share(tenant) for tenant in self.node.tenants.values()
            },
            "budget_bytes_per_day": self.budget.bytes_a_day,
            "budget_left_bytes": self.budget.left_bytes(self._clock()),
            "budget_refused_bytes": self.budget.refused_bytes,
            "ssd": [shelf.stats() for shelf in self.shelves],
        }


def _together(table: PartTable) -> int:
    """Blocks of a table that go into one order."""
    held = int(table.namespace.tenant.allocator.size * HELD_SHARE) // WRITES_MAX
    return max(1, min(BATCH_BLOCKS, min(BATCH_BYTES, held) // table.stride))


def _batches(blocks: Sequence[Block]) -> list[list[Block]]:
    """Blocks by table, so many together as go into one order."""
    by_table: dict[PartTable, list[Block]] = {}
    for block in blocks:
        by_table.setdefault(block.table, []).append(block)
    batches = []
    for table, found in by_table.items():
        most = _together(table)
        batches += [found[at : at + most] for at in range(0, len(found), most)]
    return batches

"""Which blocks are written to object storage and when, and removal of entries.

A block is written if memory is about to evict it and it was read again after its put. Every block that was ever
read again is in memory after its last use, whichever tier it came from, so none is missed; and a put or an
eviction never waits for it.

Event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from kvpool.daemon.core.blocks import (
    Block,
    NamespaceState,
    PartTable,
    Tenant,
    by_table,
    checksums_of,
)
from kvpool.daemon.tiers.object_books import ENTRY_S, LOCATION_BYTES, ObjectBooks, PackRecord
from kvpool.daemon.tiers.write_orders import (
    EMPTY_KEY,
    Order,
    WriteLimits,
    WriteOrders,
    write_last_used,
)
from kvpool.daemon.workers.object_proxy import ObjectStorage
from kvpool.errors import KvpoolError, Unavailable
from kvpool.placement.catalog.base import PACK
from kvpool.placement.directory.base import BATCH_MAX
from kvpool.storage.object.packing import in_chains
from kvpool.storage.stack import WriteMode, worth_keeping
from kvpool.types import BlockStatus, split_keys
from kvpool.wire import frame
from kvpool.wire import storage as storage_wire

log = logging.getLogger("kvpool.daemon")

PACK_BYTES = 16 << 20  # in one order, and about the size of an object
WRITES_MAX = 2  # orders to write at a time
HELD_SHARE = 1 / 16  # of a segment, in all orders
COLD_SHARE = 1 / 4  # of a segment: its cold end, of which blocks worth it are written
LOOK_BLOCKS = 4096  # of the cold end, in one look
LOOK_S = 0.5
AGE_S = 10.0  # how long blocks wait for others to share an object with
PUT_S = 60.0  # for one order to write
FORGET_S = 60.0


class ObjectWriter:
    """Writes to object storage."""

    def __init__(self, books: ObjectBooks) -> None:
        self._books = books
        limits = WriteLimits(WRITES_MAX, BATCH_MAX, PACK_BYTES, HELD_SHARE)
        self._orders = WriteOrders(books.node, books.tasks, "objects", limits)
        self._forgets = asyncio.Lock()
        self._since: dict[PartTable, float] = {}

    @property
    def under_way(self) -> int:
        """Blocks that are being written."""
        return len(self._orders)

    def mode(self, namespace: NamespaceState) -> WriteMode:
        """Whether blocks of a namespace are written here: `BACK` or `NONE`."""
        return WriteMode(namespace.settings.write_object or WriteMode.BACK)

    def _is_worthy(self, block: Block) -> bool:
        table = block.table
        return (
            block not in self._orders
            and not block.secondary  # the node that keeps it writes it
            and worth_keeping(block.put, block.used, block.kept)
            and self.mode(table.namespace) is not WriteMode.NONE
        )

    async def run(self) -> None:
        """Write memory's next victims to object storage before their eviction, if they are worth it."""
        while True:
            await asyncio.sleep(LOOK_S)
            if not self._books.may_write():
                continue
            now = self._books.clock()
            found: dict[PartTable, list[Block]] = {}
            for tenant in self._books.node.tenants.values():
                for block in self._cold(tenant):
                    found.setdefault(block.table, []).append(block)
            self._since = {table: self._since.get(table, now) for table in found}
            for table, blocks in found.items():
                most = self._orders.together(table)
                if len(blocks) >= most or now - self._since[table] >= AGE_S:
                    del self._since[table]
                    for batch in self._orders.batches(_chained(blocks)):
                        await self._orders.begin(partial(self._choose, self._is_worthy, batch))

    def _cold(self, tenant: Tenant) -> list[Block]:
        """The blocks worth writing at the cold end of a segment."""
        found: dict[Block, None] = {}  # if a namespace has a quota, its blocks may be visited twice
        for _, free, victims, held in self._books.node.candidates.next_victims(
            tenant, LOOK_BLOCKS, COLD_SHARE
        ):
            window = victims[: max(1, int(held * (COLD_SHARE - free)))]
            found.update(dict.fromkeys(filter(self._is_worthy, window)))
        return list(found)

    async def store(self, blocks: Sequence[Block]) -> bytes:
        """See `Tier`. Blocks in the catalog are not written again."""
        said: dict[Block, int] = {}

        def choose(batch: Sequence[Block]) -> Order | None:
            return self._choose(lambda block: block not in self._orders, batch, said)

        await self._orders.store(_chained(blocks), choose)
        for batch in self._orders.batches([block for block in blocks if block not in said]):
            await self._not_there(batch[0].table, batch, said)  # other nodes may have written it
        return bytes([self._stored(block, said) for block in blocks])

    @staticmethod
    def _stored(block: Block, said: Mapping[Block, int]) -> int:
        gone = block.table.blocks.get(block.key) is not block
        return BlockStatus.ABSENT if gone else said.get(block, BlockStatus.FAILED)

    def _choose(
        self,
        wanted: Callable[[Block], bool],
        blocks: Sequence[Block],
        said: dict[Block, int] | None = None,
    ) -> Order | None:
        """The blocks of one table to write now. said: receives the status of each."""
        table = blocks[0].table
        # They may be gone, or written, meanwhile.
        blocks = [b for b in blocks if table.blocks.get(b.key) is b and wanted(b)]
        storage = self._books.storage
        if not blocks or storage is None or not self._books.may_write():
            return None
        return Order(blocks, partial(self._put, storage, {} if said is None else said))

    async def _put(
        self, storage: ObjectStorage, said: dict[Block, int], blocks: Sequence[Block]
    ) -> None:
        table = blocks[0].table
        try:
            lacking = await self._not_there(table, blocks, said)
            if lacking:
                ticks = [block.used for block in lacking]
                kept = await storage.put(_order(table, lacking))
                said |= zip(lacking, kept.status, strict=True)
                await self._note_put(table, lacking, ticks, kept)
        except KvpoolError as error:
            if self._books.storage is storage:
                self._books.failed(str(error))

    async def _not_there(
        self, table: PartTable, blocks: Sequence[Block], said: dict[Block, int]
    ) -> list[Block]:
        """Those that the catalog does not have; none if it does not answer: they are checked again later."""
        ticks = [block.used for block in blocks]
        keys = [block.key for block in blocks]
        try:
            found = await self._books.find(table.namespace.directory_digest, table.part, keys)
        except Unavailable:
            self._books.counted.lookups_failed += 1
            return []
        lacking = []
        for block, tick, location in zip(blocks, ticks, found, strict=True):
            if location is None:
                lacking.append(block)
            else:
                block.kept = tick
                said[block] = BlockStatus.PRESENT
                self._books.counted.known_blocks += 1
        return lacking

    async def _note_put(
        self,
        table: PartTable,
        blocks: Sequence[Block],
        ticks: Sequence[int],
        kept: storage_wire.ObjectsPut,
    ) -> None:
        """Record written blocks in the catalog, and remove those of deleted packs."""
        namespace = table.namespace
        # Blocks removed meanwhile must not be found again.
        done = [
            at
            for at, status in enumerate(kept.status)
            if status == BlockStatus.PRESENT and not blocks[at].gone
        ]
        for at, status in enumerate(kept.status):
            if status in {BlockStatus.PRESENT, BlockStatus.NO_SPACE}:
                blocks[at].kept = ticks[at]
        self._books.counted.written_blocks += len(done)
        self._books.counted.written_bytes += len(done) * table.spec.nbytes
        self._books.counted.no_space_blocks += kept.status.count(BlockStatus.NO_SPACE)
        failed = kept.status.count(BlockStatus.FAILED)
        self._books.counted.write_errors += failed
        if failed:
            self._books.failed(f"{failed} blocks could not be written")
        elif done:
            self._books.answered()
        await self._made_way(kept)
        keys = [blocks[at].key for at in done]
        size = LOCATION_BYTES
        locations = b"".join([kept.locations[at * size : (at + 1) * size] for at in done])
        try:
            ttl_s = min(ENTRY_S, namespace.settings.ttl_s or ENTRY_S)
            await self._books.enlist(namespace.directory_digest, table.part, keys, locations, ttl_s)
            gone = [at for at in done if blocks[at].gone]
            if gone:
                packs = [kept.locations[at * size : (at + 1) * size][PACK] for at in gone]
                gone_keys = [blocks[at].key for at in gone]
                await self._books.unlist(namespace.directory_digest, table.part, gone_keys, packs)
        except Unavailable:
            self._books.counted.unlisted_blocks += len(keys)
            self._books.stocked = False  # they are listed when this node scans its own again

    async def _made_way(self, kept: storage_wire.ObjectsPut) -> None:
        """Remove the entries of deleted packs."""
        self._books.counted.dropped_packs += len(kept.dropped)
        for digest, part, pack, packed in kept.dropped:
            gone = split_keys(packed)
            await self._books.unlist(digest, part, gone, [pack] * len(gone))

    async def remove(self, namespace: NamespaceState, packed: bytes) -> set[bytes]:
        """See `SharedTier`. Their bytes are deleted when few other blocks in their objects are wanted."""
        digest, keys = namespace.directory_digest, split_keys(packed)
        gone: set[bytes] = set()
        for table in namespace.tables:
            found = await self._books.find(digest, table.part, keys, any_kind=True)
            there = {key: at for key, at in zip(keys, found, strict=True) if at is not None}
            if not there:
                continue
            gone |= there.keys()
            packs = [location[PACK] for location in there.values()]
            await self._books.drop(digest, table.part, list(there), packs)
            order = storage_wire.ForgetBlocks(
                digest, table.part, b"".join(there.values()), FORGET_S
            )
            self._books.tasks.begin(self._forget(order))
        return gone

    async def _forget(self, order: storage_wire.ForgetBlocks) -> None:
        storage = self._books.storage
        if storage is not None:
            try:
                async with self._forgets:
                    await self._made_way(await storage.forget(order))
            except KvpoolError as error:
                if self._books.storage is storage:
                    self._books.failed(str(error))

    async def flush(self, seconds: float) -> None:
        """Write the blocks worth it of all in memory, roughly the most recently used first. Ends by `seconds`."""
        if not self._books.may_write() or seconds <= 0:
            return
        try:
            async with asyncio.timeout(seconds):
                await write_last_used(self._books.node, self._is_worthy, self.store)
        except TimeoutError:
            log.warning("some blocks were not written to object storage within %g s", seconds)


def _chained(blocks: Sequence[Block]) -> list[Block]:
    """Blocks by table, in an order in which chains lie together."""
    chained: list[Block] = []
    for found in by_table(blocks).values():
        order = in_chains([block.key for block in found], [block.parent for block in found])
        chained += [found[at] for at in order]
    return chained


def _order(table: PartTable, blocks: Sequence[Block]) -> storage_wire.PutObjects:
    namespace = table.namespace
    record = PackRecord(
        namespace.tenant.name, namespace.base, namespace.epoch, namespace.settings.ttl_s
    )
    return storage_wire.PutObjects(
        digest=namespace.directory_digest,
        part=table.part,
        record=msgspec.msgpack.encode(record),
        nbytes=table.spec.nbytes,
        keys=b"".join([block.key for block in blocks]),
        parents=b"".join([block.parent or EMPTY_KEY for block in blocks]),
        depths=array("I", [block.depth for block in blocks]).tobytes(),
        checksums=checksums_of(blocks),
        segment=namespace.tenant.segment,
        stride=table.stride,
        rows=frame.pack_rows([block.row for block in blocks]),
        deadline_s=PUT_S,
    )

"""Reads blocks from a disk to memory, and verifies blocks in place.

Event loop only.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from kvpool.daemon.core.blocks import Block, Lease, PartTable, checksums_of
from kvpool.daemon.core.node import Node
from kvpool.daemon.tiers.slot_books import leased, pulled_none, pulled_some
from kvpool.daemon.tiers.ssd_books import SsdBooks
from kvpool.daemon.tiers.write_orders import EMPTY_KEY
from kvpool.errors import Unavailable
from kvpool.storage.ssd.index import ENTRY
from kvpool.types import BlockStatus, split_keys
from kvpool.wire import frame
from kvpool.wire import storage as storage_wire
from kvpool.wire import worker as worker_wire

SCRUB_S = 60.0
ENTRIES_S = 5.0
# A block that could not be read is dropped.
_AS_PULLED = bytes.maketrans(bytes([BlockStatus.FAILED]), bytes([BlockStatus.ABSENT]))


class SsdReader:
    """Reads from a disk, by its books."""

    def __init__(self, books: SsdBooks) -> None:
        self._books = books

    async def read(
        self, table: PartTable, keys: Sequence[bytes], segment: int, rows: bytes, seconds: float
    ) -> worker_wire.Pulled:
        """Read blocks of a table in memory into its reserved rows: as `TransferWorkers.pull`.

        When this ends, however it does, nothing writes to the rows any more. Blocks that do not match their
        checksum, or cannot be read, are dropped here.
        """
        node, own = self._books.rules, self._books.table(table)
        if own is None:
            return pulled_none(len(keys))
        leases = [
            lease
            for one in self._books.all_tables(own)
            if one.blocks and (lease := self._books.lease(one, keys)) is not None
        ]
        if not leases:
            return pulled_none(len(keys))
        at, blocks = leased(leases, keys)
        numbers = array("I", rows)
        packed = checksums_of(blocks)
        named, place = self._books.names(own, [block.key for block in blocks])
        try:
            pulled = await self._books.living_disk().read(
                storage_wire.ReadBlocks(
                    nbytes=table.spec.nbytes,
                    checksums=packed,
                    slots=self._books.slots(blocks),
                    segment=segment,
                    stride=table.stride,
                    rows=frame.pack_rows([numbers[index] for index in at]),
                    deadline_s=seconds,
                    lengths=self._books.lengths(blocks),
                    keys=named,
                    place=place,
                )
            )
            came = [
                block
                for block, one in zip(blocks, pulled.status, strict=True)
                if one == BlockStatus.PRESENT
            ]
            self._books.counted.read_blocks += len(came)
            self._books.counted.read_bytes += sum(block.table.spec.nbytes for block in came)
            self._books.drop_bad(node, blocks, pulled.status)
        finally:  # what was evicted meanwhile loses its slot with the lease
            for lease in leases:
                self._books.release(node, own, lease)
        statuses = pulled.status.translate(_AS_PULLED)
        return pulled_some(len(keys), at, packed, statuses, pulled)

    async def parents(self, blocks: Sequence[Block]) -> list[bytes]:
        """The parents of these blocks of one tenant, from the index; empty where there is none, or no such block.

        Raises `Unavailable`.
        """
        slots = self._books.slots(blocks)
        keys = [block.key for block in blocks]  # they may leave their slots meanwhile
        order = storage_wire.ReadEntries(slots, ENTRIES_S)
        packed = (await self._books.living_disk().entries_of(order)).entries
        entries = np.frombuffer(packed, dtype=ENTRY)
        found = {
            (offset, key): parent
            for offset, key, parent in zip(
                entries["offset"].tolist(),
                split_keys(entries["key"].tobytes()),
                split_keys(entries["parent"].tobytes()),
                strict=True,
            )
            if parent != EMPTY_KEY
        }
        return [
            found.get((slot, key), b"") for slot, key in zip(array("Q", slots), keys, strict=True)
        ]

    async def scrub(self, cursor: int, count: int) -> tuple[int, int, int | None]:
        """Compare about `count` blocks from a cursor on with their checksums: (seen, bad, next cursor).

        Bad ones are dropped. Raises `Unavailable` when the process ends meanwhile.
        """
        node = self._books.rules
        groups, more = node.inventory.walk(cursor, count)
        seen = bad = 0
        for digest, keys in groups:
            state = node.namespaces.by_directory(digest)
            for own in [] if state is None else state.tables:
                if self._books.rules is not node:
                    raise Unavailable(
                        f"the disk at {self._books.path} is {self._books.state}: {self._books.error}"
                    )
                lease = self._books.lease(own, keys)
                if lease is not None:
                    bad += await self._scrub_some(node, own, lease)
                    seen += lease.blocks
        self._books.counted.scrubbed_blocks += seen
        return seen, bad, more

    async def _scrub_some(self, node: Node, own: PartTable, lease: Lease) -> int:
        _, blocks = lease.parts[own.part]
        named, place = self._books.names(own, [block.key for block in blocks])
        try:
            written = await self._books.living_disk().scrub(
                storage_wire.ScrubBlocks(
                    nbytes=self._books.nbytes[own],
                    checksums=checksums_of(blocks),
                    slots=self._books.slots(blocks),
                    deadline_s=SCRUB_S,
                    lengths=self._books.lengths(blocks),
                    keys=named,
                    place=place,
                )
            )
            return self._books.drop_bad(node, blocks, written.status)
        finally:
            self._books.release(node, own, lease)

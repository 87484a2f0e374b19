"""Lookups of blocks in object storage, and reads into memory.

Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvpool.daemon.core.blocks import NamespaceState, PartTable
from kvpool.daemon.tiers.object_books import ObjectBooks
from kvpool.daemon.tiers.write_orders import EMPTY_KEY
from kvpool.daemon.workers.object_proxy import ObjectStorage
from kvpool.errors import Unavailable
from kvpool.placement.catalog.base import PACK
from kvpool.placement.directory.base import BATCH_MAX
from kvpool.storage.object.packs import LOCATION
from kvpool.types import CHECKSUM_BYTES, BlockStatus
from kvpool.wire import frame
from kvpool.wire import storage as storage_wire
from kvpool.wire import worker as worker_wire

READS_MAX = 8  # to read: as many as the process has threads for

_FIELDS = LOCATION.fields
assert _FIELDS is not None
_CHECKSUM = slice(_FIELDS["checksum"][1], _FIELDS["checksum"][1] + CHECKSUM_BYTES)


class ObjectReader:
    """Reads from object storage."""

    def __init__(self, books: ObjectBooks) -> None:
        self._books = books
        self._reads = asyncio.Semaphore(READS_MAX)

    async def where(
        self,
        namespace: NamespaceState,
        tables: Sequence[PartTable],
        keys: Sequence[bytes],
        *,
        prefix: bool = False,
    ) -> dict[bytes, int]:
        """See `SharedTier`."""
        masks: dict[bytes, int] = {}
        if self._books.storage is None:
            return masks
        for at in range(0, len(keys), BATCH_MAX):
            some = keys[at : at + BATCH_MAX]
            found = await asyncio.gather(
                *[
                    self._books.find(namespace.directory_digest, table.part, some)
                    for table in tables
                ]
            )
            for table, locations in zip(tables, found, strict=True):
                for key, location in zip(some, locations, strict=True):
                    if location is not None:
                        masks[key] = masks.get(key, 0) | 1 << table.part
            last = some[-1]
            if prefix and last not in masks and not any(last in table.blocks for table in tables):
                break
        return masks

    async def load(
        self, table: PartTable, keys: Sequence[bytes], rows: Sequence[int], seconds: float
    ) -> worker_wire.Pulled:
        """See `Tier`."""
        storage, namespace = self._books.storage, table.namespace
        if storage is None:
            raise Unavailable(f"object storage is {self._books.state}: {self._books.error}")
        digest, started = namespace.directory_digest, self._books.clock()
        try:
            # The process would not answer before the deadline while requests wait for its threads.
            async with asyncio.timeout(seconds):
                await self._reads.acquire()
        except TimeoutError:
            late = bytes([BlockStatus.FAILED]) * len(keys)
            return worker_wire.Pulled(
                late, b"".join([EMPTY_KEY] * len(keys)), seconds, "not begun in time"
            )
        try:
            return await self._read(storage, table, keys, rows, digest, started, seconds)
        finally:
            self._reads.release()

    async def _read(
        self,
        storage: ObjectStorage,
        table: PartTable,
        keys: Sequence[bytes],
        rows: Sequence[int],
        digest: bytes,
        started: float,
        seconds: float,
    ) -> worker_wire.Pulled:
        namespace = table.namespace
        status, checksums = bytearray(len(keys)), [EMPTY_KEY] * len(keys)
        found = await self._books.find(digest, table.part, keys)
        at = [index for index, location in enumerate(found) if location is not None]
        if not at:
            return worker_wire.Pulled(
                bytes(status), b"".join(checksums), self._books.clock() - started
            )
        locations = [location for location in found if location is not None]
        pulled = await storage.get(
            storage_wire.GetObjects(
                digest=digest,
                part=table.part,
                nbytes=table.spec.nbytes,
                keys=b"".join([keys[index] for index in at]),
                locations=b"".join(locations),
                segment=namespace.tenant.segment,
                stride=table.stride,
                rows=frame.pack_rows([rows[index] for index in at]),
                deadline_s=max(0.0, seconds - (self._books.clock() - started)),
            )
        )
        stale: list[tuple[bytes, bytes]] = []
        for index, location, said in zip(at, locations, pulled.status, strict=True):
            status[index] = said
            if said == BlockStatus.PRESENT:
                checksums[index] = location[_CHECKSUM]
            elif said != BlockStatus.FAILED:
                stale.append((keys[index], location[PACK]))
        self._count_read(pulled, table.spec.nbytes)
        if stale:
            gone, packs = zip(*stale, strict=True)
            self._books.tasks.begin(self._books.unlist(digest, table.part, gone, packs))
        if pulled.error:
            self._books.failed(pulled.error)
        else:
            self._books.answered()
        seconds_taken = self._books.clock() - started
        return worker_wire.Pulled(bytes(status), b"".join(checksums), seconds_taken, pulled.error)

    def _count_read(self, pulled: worker_wire.Pulled, nbytes: int) -> None:
        came = pulled.status.count(BlockStatus.PRESENT)
        self._books.counted.read_blocks += came
        self._books.counted.read_bytes += came * nbytes
        self._books.counted.stale_blocks += pulled.status.count(BlockStatus.ABSENT)
        self._books.counted.mismatches += pulled.status.count(BlockStatus.MISMATCH)
        self._books.counted.read_errors += pulled.status.count(BlockStatus.FAILED)

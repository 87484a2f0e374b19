"""Lists the objects of this node and others, and deletes those of ended epochs.

Event loop only.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from kvpool.daemon.core.blocks import NamespaceState, directory_digest
from kvpool.daemon.tiers.object_books import ENTRY_S, ObjectBooks, PackRecord
from kvpool.daemon.tiers.tier_state import ObjectTierState
from kvpool.daemon.workers.object_proxy import ObjectStorage
from kvpool.decoding import MsgpackDecoder
from kvpool.errors import KvpoolError, ProtocolError, Unavailable
from kvpool.placement.records import epoch_digest
from kvpool.types import PARTS_MAX, split_keys
from kvpool.wire import storage as storage_wire

TEND_S = 2.0
LISTEN_S = 1.0
CHECK_S, LIST_S, DROP_S = 10.0, 600.0, 60.0
SCAN_S, SCAN_ALONE_S = 86_400.0, 600.0  # between scans; if others use a separate catalog
SCAN_PAUSE_S = 60.0  # at least, even if the catalog is lost repeatedly
GARBAGE_MAX = 1024  # ended epochs whose objects are to be deleted
SCAN_CHORE = "store"

_decode_record = MsgpackDecoder[PackRecord](PackRecord, "the record of a pack")


class ObjectScan:
    """Scans and cleans object storage."""

    def __init__(self, books: ObjectBooks) -> None:
        self._books = books
        self._garbage: OrderedDict[bytes, None] = OrderedDict()
        self._scan_at = 0.0

    @property
    def garbage(self) -> int:
        """Ended epochs whose objects are to be deleted."""
        return len(self._garbage)

    def enter(self, namespace: NamespaceState) -> None:
        """A namespace is in a new epoch: objects of the former ones are garbage."""
        for former in namespace.tenant.epochs[namespace.base][:-1]:
            self._throw_away(former.directory_digest)

    def _throw_away(self, digest: bytes) -> None:
        if self._books.config.object_store and len(self._garbage) < GARBAGE_MAX:
            self._garbage[digest] = None

    async def tend(self) -> None:
        """Keep checking availability, listing objects, and deleting garbage."""
        while True:
            storage = self._books.storage
            if storage is not None and self._books.retry.due(self._books.clock()):
                try:
                    if self._books.state is not ObjectTierState.SERVING:
                        await storage.check(storage_wire.CheckObjects(CHECK_S))
                        self._books.answered()
                    await self._take_stock(storage)
                    await self._collect(storage)
                except KvpoolError as error:
                    if self._books.storage is storage:
                        self._books.failed(str(error))
            await asyncio.sleep(TEND_S)

    async def _take_stock(self, storage: ObjectStorage) -> None:
        """List this node's own objects once per life, and all of them when the catalog lacks some."""
        everything = await self._must_scan()
        if self._books.stocked and not everything:
            return
        first = True
        while True:
            started = self._books.clock()
            packs = (
                await storage.packs(storage_wire.ListPacks(first, not everything, LIST_S))
            ).packs
            if self._books.storage is not storage or not packs:
                break
            try:
                for pack in packs:
                    await self._enter(*pack)
            except Unavailable:
                self._books.counted.lookups_failed += 1  # of the catalog; renewed when it answers
                return
            first = False
            # Half of its time is for other requests.
            await asyncio.sleep(self._books.clock() - started)
        self._books.stocked = self._books.storage is storage
        if everything and self._books.stocked:
            self._scan_at = self._books.clock() + SCAN_PAUSE_S
            seen_by_all = self._books.catalog.shared or not self._books.config.join
            try:
                await self._books.catalog.completed(SCAN_S if seen_by_all else SCAN_ALONE_S)
            except Unavailable:
                self._books.counted.lookups_failed += 1

    async def _must_scan(self) -> bool:
        if self._books.clock() < self._scan_at:
            return False
        try:
            if await self._books.catalog.complete():
                return False
            return not self._books.catalog.shared or await self._books.membership.lead(SCAN_CHORE)
        except Unavailable:
            return False

    async def _enter(
        self, digest: bytes, part: int, data: bytes, age_s: float, packed: bytes, locations: bytes
    ) -> None:
        """A pack, or a piece of one, was found: record it, unless its epoch is over. Raises `Unavailable`."""
        try:
            record = _decode_record(data)
        except ProtocolError:
            return  # of another version
        if not 0 <= record.epoch < 1 << 64:
            return
        named = directory_digest(record.tenant, epoch_digest(record.base, record.epoch))
        if digest != named or part >= PARTS_MAX:
            return
        view = self._books.membership.view
        known = view.namespaces.get((record.tenant, record.base.hex()))
        if (view.clock.first_epoch if known is None else known.epoch) > record.epoch:
            self._throw_away(digest)
            return
        wished_s = record.ttl_s if known is None else known.settings.ttl_s
        left_s = min(ENTRY_S, wished_s - age_s if wished_s else ENTRY_S)
        if left_s > 0:
            await self._books.enlist(digest, part, split_keys(packed), locations, left_s)

    async def _collect(self, storage: ObjectStorage) -> None:
        """Delete objects of ended epochs: each node its own, and one of them all."""
        for digest in list(self._garbage):
            try:
                leads = await self._books.membership.lead(SCAN_CHORE)
            except Unavailable:
                leads = False
            await storage.drop(storage_wire.DropPacks(digest, not leads, DROP_S))
            self._garbage.pop(digest, None)

    async def listen(self) -> None:
        """Fetch the process's statistics."""
        while True:
            storage = self._books.storage
            if storage is not None:
                try:
                    usage = await storage.usage()
                except KvpoolError:
                    usage = storage_wire.ObjectUsage()
                if self._books.storage is storage:
                    self._books.tell_usage(usage)
            await asyncio.sleep(LISTEN_S)

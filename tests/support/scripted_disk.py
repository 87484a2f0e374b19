"""A `Disk` in memory that does what a test tells it: waits, fails, or answers with other statuses."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from kvpool.errors import KvpoolError, Unavailable
from kvpool.storage.codecs import BLOSC2, Blosc2
from kvpool.storage.ssd.index import ENTRY
from kvpool.types import BlockStatus, split_keys
from kvpool.wire import storage as storage_wire
from kvpool.wire import worker as worker_wire
from tests.support.waiting import PATIENCE_S


class ScriptedDisk:
    """One life of a disk process. Event loop only; no bytes are moved.

    entries, tables: what its index holds; give them to the next life. orders: all that came, by kind, in
    their order. held: kinds of orders that wait until `go_on`. failures: by kind, raised instead of the
    next answers. statuses: by kind, of the next answers. sizes: what the blocks of the next packs become.
    packs: those that it keeps.
    """

    def __init__(
        self,
        segment_bytes: int,
        entries_max: int = 1 << 20,
        tables: Iterable[tuple[int, bytes]] = (),
        entries: Iterable[np.void] = (),
    ) -> None:
        self.tables = dict(tables)
        self.entries = {int(entry["offset"]): entry for entry in entries}
        records = list(self.tables.items())
        self.ready = storage_wire.DiskReady(
            segment_bytes, entries_max, False, records, [Blosc2.name]
        )
        self.orders: list[tuple[str, Any]] = []
        self.held: set[str] = set()
        self.failures: dict[str, deque[KvpoolError]] = {}
        self.statuses: dict[str, deque[bytes]] = {}
        self.sizes: deque[list[int]] = deque()
        self.packs: dict[int, list[int]] = {}
        self._free = asyncio.Event()
        self._waiting: Counter[str] = Counter()
        self._came = asyncio.Event()
        self._dead = False
        self._scanned = False
        self._generation = max((int(e["generation"]) for e in self.entries.values()), default=0)

    def next_life(self, segment_bytes: int | None = None) -> ScriptedDisk:
        """Another process on what this one has left."""
        size = self.ready.segment_bytes if segment_bytes is None else segment_bytes
        return ScriptedDisk(
            size, self.ready.entries_max, self.tables.items(), self.entries.values()
        )

    def of_kind(self, kind: str) -> list[Any]:
        return [order for name, order in self.orders if name == kind]

    async def waits(self, kind: str, count: int = 1) -> None:
        """Returns when so many orders of this kind, one of those that are held, wait."""
        async with asyncio.timeout(PATIENCE_S):
            while self._waiting[kind] < count:
                self._came.clear()
                await self._came.wait()

    def go_on(self) -> None:
        """Nothing waits any more."""
        self.held.clear()
        self._waiting.clear()
        self._free.set()

    def die(self) -> None:
        """Whoever waits is told, and all who come."""
        self._dead = True
        self.go_on()

    async def _come(self, kind: str, order: Any) -> None:
        self.orders.append((kind, order))
        while kind in self.held and not self._dead:
            self._waiting[kind] += 1
            self._came.set()
            self._free.clear()
            await self._free.wait()
        if self._dead:
            raise Unavailable("the disk process ended")
        if failures := self.failures.get(kind):
            raise failures.popleft()

    def _status(self, kind: str, n: int) -> bytes:
        scripted = self.statuses.get(kind)
        status = scripted.popleft() if scripted else bytes([BlockStatus.PRESENT]) * n
        assert len(status) == n
        return status

    # ---- the port ------------------------------------------------------------------------------------

    async def scan(self, count: int) -> storage_wire.Scanned:
        await self._come("scan", count)
        found = [] if self._scanned else list(self.entries.values())
        self._scanned = True
        return storage_wire.Scanned(np.array(found, ENTRY).tobytes())

    async def add_table(self, record: bytes, table: int = 0) -> int:
        await self._come("add_table", record)
        known = {data: number for number, data in self.tables.items()}
        number = table or known.get(record, max(self.tables, default=0) + 1)
        self.tables[number] = record
        return number

    async def drop_tables(self, tables: list[int]) -> None:
        await self._come("drop_tables", tables)
        left = {int(entry["table"]) for entry in self.entries.values()}
        assert left.isdisjoint(tables), "entries without a table"
        for number in tables:
            del self.tables[number]

    async def pack(self, order: storage_wire.PackBlocks) -> storage_wire.Packed:
        await self._come("pack", order)
        assert order.pack not in self.packs, "a number is used twice"
        n = len(order.rows) // 4
        sizes = self.sizes.popleft() if self.sizes else [order.nbytes] * n
        assert len(sizes) == n
        self.packs[order.pack] = sizes
        return storage_wire.Packed(array("I", sizes).tobytes(), 0.0)

    def drop_pack(self, pack: int) -> None:
        self.packs.pop(pack, None)

    async def write(self, order: storage_wire.WriteBlocks) -> storage_wire.Written:
        self.drop(order.forget)
        await self._come("write", order)
        slots = slots_of(order.slots)
        status = self._status("write", len(slots))
        names = ("key", "parent", "checksum")
        columns = [split_keys(packed) for packed in (order.keys, order.parents, order.checksums)]
        for at, (slot, one) in enumerate(zip(slots, status, strict=True)):
            assert slot not in self.entries, "a slot is written over an entry"
            if one == BlockStatus.PRESENT:
                self._generation += 1
                entry = np.zeros(1, ENTRY)[0]
                entry["offset"], entry["generation"] = slot, self._generation
                entry["table"], entry["nbytes"] = order.table, order.nbytes
                entry["depth"] = memoryview(order.depths).cast("I")[at]
                if order.pack:
                    row = memoryview(order.rows).cast("I")[at]
                    entry["stored"], entry["codec"] = self.packs[order.pack][row], BLOSC2
                for name, column in zip(names, columns, strict=True):
                    entry[name] = np.frombuffer(column[at], np.uint8)
                self.entries[slot] = entry
        return storage_wire.Written(status, 0.0)

    async def read(self, order: storage_wire.ReadBlocks) -> worker_wire.Pulled:
        await self._come("read", order)
        return worker_wire.Pulled(self._status("read", len(order.slots) // 8), b"", 0.0)

    async def entries_of(self, order: storage_wire.ReadEntries) -> storage_wire.Scanned:
        await self._come("entries", order)
        found = [self.entries[slot] for slot in slots_of(order.slots) if slot in self.entries]
        return storage_wire.Scanned(b"".join(entry.tobytes() for entry in found))

    async def forget(self, order: storage_wire.ForgetSlots) -> None:
        self.drop(order.slots)
        await self._come("forget", order)

    async def pin(self, order: storage_wire.PinSlots) -> None:
        await self._come("pin", order)
        for slot in slots_of(order.slots):
            self.entries[slot]["pin"] = order.level

    async def scrub(self, order: storage_wire.ScrubBlocks) -> storage_wire.Written:
        await self._come("scrub", order)
        return storage_wire.Written(self._status("scrub", len(order.slots) // 8), 0.0)

    async def stats(self) -> bytes:
        await self._come("stats", None)
        return b"{}"

    def drop(self, packed: bytes) -> None:
        for slot in slots_of(packed):
            self.entries.pop(slot, None)


def slots_of(packed: bytes) -> list[int]:
    """Slots as they come in orders."""
    return list(memoryview(packed).cast("Q"))

"""A disk worker has started: restores the contents of its index.

Event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any

import numpy as np

from kvpool.daemon.core.blocks import PIN_KINDS, NamespaceState, PartTable
from kvpool.daemon.tiers.ssd_books import Slots, SsdBooks, TableRecord
from kvpool.daemon.tiers.ssd_index import SsdIndexUpdates
from kvpool.daemon.tiers.tier_state import TierState
from kvpool.daemon.tiers.write_orders import EMPTY_KEY
from kvpool.daemon.workers.disk_proxy import Disk
from kvpool.decoding import MsgpackDecoder
from kvpool.errors import KvpoolError, LimitExceeded, ProtocolError, Unavailable
from kvpool.storage.codecs import BLOSC2, RAW, Blosc2, slot_classes
from kvpool.storage.slab import PAGE
from kvpool.storage.ssd.index import ENTRY
from kvpool.types import plain_parts, split_keys

log = logging.getLogger("kvpool.daemon")

SCAN_ENTRIES = 4096  # restored at a time, a few milliseconds

_decode_table = MsgpackDecoder[TableRecord](TableRecord, "a table of a disk")


class SsdRestorer:
    """Fills the books of a disk."""

    def __init__(self, books: SsdBooks, index: SsdIndexUpdates) -> None:
        self._books = books
        self._index = index

    async def restore(
        self, disk: Disk, adopt: Callable[[TableRecord], Awaitable[NamespaceState | None]]
    ) -> None:
        """Restore the index of a new life of the process.

        adopt: the namespace of a table in memory, in its present epoch; None if there is no such tenant.
        Blocks are found as soon as they are restored; nothing is written before all are.
        Raises `Unavailable` when the process ends meanwhile.
        """
        self._books.forget_all()
        self._books.disk, self._books.seal_bytes = disk, disk.ready.seal_bytes
        self._books.codecs, self._books.codec_error = disk.ready.codecs, ""
        self._books.state, self._books.error = TierState.OPENING, ""
        base = 0
        for tenant, share in sorted(self._books.shares.items()):
            size = int(disk.ready.segment_bytes * share) // PAGE * PAGE
            if not size:
                log.warning(
                    "tenant %s has no room on the disk at %s",
                    tenant,
                    self._books.path,
                    extra={"disk": self._books.path, "tenant": tenant},
                )
                continue
            allocator = Slots(base, size, self._books.given_up, self._books.bad)
            self._books.rules.add_tenant(tenant, 0, size, allocator=allocator)
            self._books.bases[tenant] = base
            self._books.holders[tenant] = self._books.rules.holders.add(tenant, "", "disk")
            base += size
        tables: dict[int, PartTable] = {}
        dead = []
        records = []
        for number, data in disk.ready.tables:
            try:
                records.append((number, _decode_table(data)))
            except ProtocolError as error:
                self._books.log.warning(
                    "the disk at %s has a table of another version: %s", self._books.path, error
                )
                dead.append(number)
        # So that the last epoch comes first, and of one epoch its last record.
        records.sort(key=lambda numbered: (-numbered[1].epoch, -numbered[0]))
        for number, record in records:
            namespace = await adopt(record)
            if self._books.disk is not disk:
                raise Unavailable("the disk worker has ended meanwhile")
            table = self._restored_table(record, namespace)
            if table is None:
                dead.append(number)
            else:
                tables[number] = table
                # Does not replace its last record, which may have come meanwhile.
                self._books.numbers.setdefault(table, (number, record.settings))
        while (scanned := await disk.scan(SCAN_ENTRIES)).entries:
            if scanned.codec_error:
                self._books.no_codec(scanned.codec_error)
            self._restore_some(np.frombuffer(scanned.entries, dtype=ENTRY), tables)
            await asyncio.sleep(0)
        self._books.rules.puts.restored()
        try:
            await self._index.tidy()
            if dead:
                await disk.drop_tables(dead)
        except KvpoolError as error:
            if self._books.disk is not disk:
                raise
            # Only forgotten slots are overwritten, and dead entries are seen again at the next start.
            self._books.log.warning(
                "the index of the disk at %s cannot be updated: %s", self._books.path, error
            )
        self._books.state = TierState.SERVING

    def _restored_table(
        self, record: TableRecord, namespace: NamespaceState | None
    ) -> PartTable | None:
        if (
            namespace is None
            or namespace.epoch != record.epoch
            or plain_parts(namespace.parts) != [tuple(part) for part in record.parts]
        ):
            return None
        state = self._books.open(namespace)
        return None if state is None else state.tables[record.part]

    def _restore_some(self, entries: np.ndarray[Any, Any], tables: Mapping[int, PartTable]) -> None:
        """Turn entries of the index into blocks; the others are forgotten."""
        good = np.zeros(len(entries), dtype=np.bool_)
        for number in np.unique(entries["table"]).tolist():
            table = tables.get(number)
            if table is None or table.namespace.retired:  # its epoch may have ended meanwhile
                continue
            numbered = np.flatnonzero(entries["table"] == number)
            for own, at in self._by_slot(table, entries[numbered]):
                self._restore_table(own, entries, numbered[at], good)
        self._books.given_up.extend(entries["offset"][~good].tolist())
        self._books.counted.restored_blocks += int(good.sum())
        self._books.counted.dropped_at_restore += int((~good).sum())

    def _by_slot(
        self, table: PartTable, part: np.ndarray[Any, Any]
    ) -> Iterator[tuple[PartTable, np.ndarray[Any, Any]]]:
        """The table of each of a part's entries; unreadable ones have none."""
        yield table, np.flatnonzero(part["codec"] == RAW)
        classes = np.array(slot_classes(self._books.nbytes[table]))
        stored = part["stored"].astype(np.int64)
        known = (part["codec"] == BLOSC2) & (Blosc2.name in self._books.codecs)
        packed = np.flatnonzero(known & (stored > 0) & (stored <= classes[:-1].max(initial=0)))
        lengths = classes[np.searchsorted(classes, stored[packed])]
        for length in np.unique(lengths).tolist():
            own = self._books.of_length(table, length)
            if own is not None:
                yield own, packed[lengths == length]

    def _restore_table(
        self,
        table: PartTable,
        entries: np.ndarray[Any, Any],
        chosen: np.ndarray[Any, Any],
        good: np.ndarray[Any, Any],
    ) -> None:
        """The entries of one table; `good` receives the restored ones."""
        chosen = chosen[np.argsort(entries["generation"][chosen], kind="stable")]
        part = entries[chosen]
        offsets = part["offset"].astype(np.int64) - self._books.bases[table.namespace.tenant.name]
        rows = offsets // table.stride
        rows[(offsets < 0) | (offsets % table.stride != 0)] = -1
        rows[part["nbytes"] != self._books.nbytes[table]] = -1
        parents = [
            b"" if parent == EMPTY_KEY else parent
            for parent in split_keys(part["parent"].tobytes())
        ]
        keys = split_keys(part["key"].tobytes())
        good[chosen] = self._books.rules.puts.restore(
            table.namespace,
            table.part,
            keys,
            parents,
            part["depth"].tolist(),
            rows,
            split_keys(part["checksum"].tobytes()),
        )
        for kind in ("soft", "hard"):
            pinned = part["pin"] == PIN_KINDS[kind]
            if pinned.any():
                self._pin_again(table, list(compress(keys, pinned)), kind)

    def _pin_again(self, table: PartTable, keys: Sequence[bytes], kind: str) -> None:
        """Of this part alone: the block's others may have been dropped and written again, without the pin."""
        try:
            self._books.rules.pins.pin(table.namespace, keys, kind, [table])
        except LimitExceeded as error:
            self._books.log.warning(
                "some pins on the disk at %s were lost: %s", self._books.path, error
            )

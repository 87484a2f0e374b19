"""Writes blocks from memory to a disk.

Event loop only.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from kvpool.daemon.core.blocks import (
    PIN_KINDS,
    Block,
    Holder,
    NamespaceState,
    Origin,
    PartTable,
    checksums_of,
)
from kvpool.daemon.core.node import Node
from kvpool.daemon.tiers.ssd_books import SsdBooks
from kvpool.daemon.tiers.ssd_index import SsdIndexUpdates
from kvpool.daemon.tiers.tier_state import TierState
from kvpool.daemon.tiers.write_orders import EMPTY_KEY
from kvpool.daemon.workers.disk_proxy import Disk
from kvpool.errors import ConfigError, InvalidRequest, KvpoolError, LimitExceeded, PoolFull
from kvpool.retry import Backoff
from kvpool.storage.codecs import slot_bytes, slot_classes
from kvpool.types import BlockStatus
from kvpool.wire import frame
from kvpool.wire import storage as storage_wire

log = logging.getLogger("kvpool.daemon")

WRITE_S = 30.0
PACK_S = 30.0
RETRY_S = (1.0, 60.0)  # between attempts to write to a failing disk


class _Part(NamedTuple):
    """Blocks to be stored in one table. rows: where they are now, in memory or in a pack."""

    own: PartTable
    blocks: Sequence[Block]
    rows: Sequence[int]


class _Write(NamedTuple):
    """Such blocks with their slots reserved. slots: rows of the table."""

    own: PartTable
    blocks: Sequence[Block]
    rows: Sequence[int]
    ticket: int
    slots: Sequence[int]

    @property
    def nbytes(self) -> int:
        return len(self.blocks) * self.own.stride


class SsdWriter:
    """Writes to a disk, and updates its books."""

    def __init__(self, books: SsdBooks, index: SsdIndexUpdates) -> None:
        self._books = books
        self._index = index
        self._packs = 0
        self._tickets = 0
        self._retry = Backoff(*RETRY_S)
        self._writing_blocks = 0

    def may_write(self) -> bool:
        """Whether writes are worth trying now."""
        if self._books.state is TierState.READ_ONLY:
            return self._retry.due(self._books.clock())
        return self._books.state is TierState.SERVING

    async def write(self, table: PartTable, blocks: Sequence[Block], segment: int) -> int:
        """Store these blocks of one table in memory, leased by the caller; returns how many are here now.

        Room is made by evicting this disk's victims. Returns when they are safe; never raises except
        when cancelled.
        """
        node = self._books.rules
        state = self._books.open(table.namespace)
        if state is None or not self.may_write():
            return 0
        own = state.tables[table.part]
        try:
            number = await self._index.number(own, table.namespace)
        except KvpoolError as error:
            self._failed(str(error))
            return 0
        if self._books.rules is not node or state.retired:
            return 0
        packs = self._packs_for(table)
        missing = blocks
        for other in self._books.all_tables(own) if packs else self._books.all_tables(own)[1:]:
            missing = [block for block in missing if block.key not in other.blocks]
        here = len(blocks) - len(missing)
        if not missing:
            return here
        if packs:
            return here + await self._write_packed(table, own, number, missing, segment)
        part = _Part(own, missing, [block.row for block in missing])
        return here + await self._store(node, table, number, [part], segment)

    def _packs_for(self, table: PartTable) -> bool:
        """Whether blocks of a table in memory should be packed, and can be."""
        codec = table.namespace.settings.ssd_codec
        if len(slot_classes(table.spec.nbytes)) == 1:
            return False  # as short as slots get
        if codec and codec not in self._books.codecs and not self._books.codec_error:
            self._books.cannot_pack(
                f"the codec {codec} cannot be used: install it (pip install {codec})"
            )
        return codec in self._books.codecs

    async def _write_packed(
        self,
        table: PartTable,
        own: PartTable,
        number: int,
        blocks: Sequence[Block],
        segment: int,
    ) -> int:
        """As `write`: compressed blocks go to shorter slots, and the others uncompressed."""
        node, disk = self._books.rules, self._books.living_disk()
        self._packs += 1
        pack = self._packs
        done = 0
        try:
            whole, shorter = await self._pack(disk, pack, table, own, blocks, segment)
            if shorter:
                done = await self._store(node, table, number, shorter, segment, pack)
        except KvpoolError as error:
            if self._books.rules is node:
                self._failed(str(error))
            return 0
        finally:
            disk.drop_pack(pack)
        if whole:
            part = _Part(own, whole, [block.row for block in whole])
            written = await self._store(node, table, number, [part], segment)
            self._books.counted.unpacked_blocks += written
            done += written
        return done

    async def _pack(
        self,
        disk: Disk,
        pack: int,
        table: PartTable,
        own: PartTable,
        blocks: Sequence[Block],
        segment: int,
    ) -> tuple[list[Block], list[_Part]]:
        """The blocks to write uncompressed, and those in the pack, by their tables."""
        nbytes = len(blocks) * own.stride
        self._books.counted.writing_bytes += nbytes
        try:
            packed = await disk.pack(
                storage_wire.PackBlocks(
                    pack=pack,
                    nbytes=table.spec.nbytes,
                    segment=segment,
                    stride=table.stride,
                    rows=frame.pack_rows([block.row for block in blocks]),
                    deadline_s=PACK_S,
                )
            )
        except ConfigError as error:
            if self._books.disk is disk:
                self._books.codecs = ()
                self._books.cannot_pack(str(error))
            return list(blocks), []
        finally:
            self._books.counted.writing_bytes -= nbytes
        whole: list[Block] = []
        by_length: dict[int, list[int]] = {}
        if self._books.disk is disk and not own.namespace.retired:
            for row, stored in enumerate(array("I", packed.stored)):
                if stored < table.spec.nbytes:
                    by_length.setdefault(slot_bytes(stored, table.spec.nbytes), []).append(row)
                else:
                    whole.append(blocks[row])
        shorter: list[_Part] = []
        for length, rows in by_length.items():
            other = self._books.of_length(own, length)
            if other is None:
                whole += [blocks[row] for row in rows]
            else:
                shorter.append(_Part(other, [blocks[row] for row in rows], rows))
        return whole, shorter

    async def _store(
        self,
        node: Node,
        table: PartTable,
        number: int,
        parts: Sequence[_Part],
        segment: int,
        pack: int = 0,
    ) -> int:
        """Give blocks slots, and write them in one order; returns how many are here now.

        node: whose slots they are for; if it has ended, nothing is written.
        """
        state = parts[0].own.namespace
        if self._books.rules is not node or state.retired:
            return 0
        holder = self._books.holders[state.tenant.name]
        self._make_entries(sum(len(part.blocks) for part in parts))
        writes, here = self._reserve(node, holder, parts)
        if not writes:
            return here
        forget = self._books.take_given_up()
        nbytes = sum(write.nbytes for write in writes)
        chosen = [block for write in writes for block in write.blocks]
        self._books.counted.writing_bytes += nbytes
        self._writing_blocks += len(chosen)
        try:
            written = await self._books.living_disk().write(
                storage_wire.WriteBlocks(
                    table=number,
                    nbytes=table.spec.nbytes,
                    keys=b"".join([block.key for block in chosen]),
                    parents=b"".join([block.parent or EMPTY_KEY for block in chosen]),
                    depths=array("I", [block.depth for block in chosen]).tobytes(),
                    checksums=checksums_of(chosen),
                    slots=b"".join([self._books.offsets(w.own, w.slots) for w in writes]),
                    segment=segment,
                    stride=table.stride,
                    rows=frame.pack_rows([row for write in writes for row in write.rows]),
                    forget=forget,
                    deadline_s=WRITE_S,
                    pack=pack,
                    place=self._books.names(parts[0].own, [])[1],
                )
            )
            done = self._wrote(node, holder, writes, written)
        except KvpoolError as error:
            if self._books.rules is node:
                if isinstance(error, LimitExceeded):
                    # Not sent; a sent order stays with the process.
                    self._books.given_up.frombytes(forget)
                self._failed(str(error))
            return 0
        finally:
            self._books.counted.writing_bytes -= nbytes
            self._writing_blocks -= len(chosen)
            if self._books.rules is node:
                for write in writes:
                    node.puts.abort(holder, write.ticket)
        for kind in ("soft", "hard"):
            kept = table.namespace.kept  # for a time, and in memory only
            pinned = [b.key for b in chosen if b.pin == PIN_KINDS[kind] and b.key not in kept]
            if pinned and self._books.rules is node:
                await self._pin_too(table.namespace, pinned, kind)
        return here + done

    def _reserve(
        self, node: Node, holder: Holder, parts: Sequence[_Part]
    ) -> tuple[list[_Write], int]:
        """Slots for as many of the blocks as there is room for, and how many are here already."""
        writes: list[_Write] = []
        here = 0
        for own, blocks, rows in parts:
            self._tickets += 1
            keys = [block.key for block in blocks]
            try:
                node.puts.reserve(holder, own.namespace, own.part, self._tickets, keys)
            except (PoolFull, LimitExceeded, InvalidRequest):
                continue
            reservation = holder.reservations.get(self._tickets)
            if reservation is None:
                here += len(blocks)
                continue
            chosen = [blocks[index] for index in reservation.indices]
            reservation.parents = [block.parent for block in chosen]
            at = [rows[index] for index in reservation.indices]
            writes.append(_Write(own, chosen, at, self._tickets, reservation.rows))
        return writes, here

    async def _pin_too(self, namespace: NamespaceState, keys: Sequence[bytes], kind: str) -> None:
        """Pin here the blocks that are pinned in memory, as far as the quota of this disk allows."""
        try:
            await self._index.pin(namespace, b"".join(keys), kind)
        except KvpoolError as error:
            self._books.log.warning(
                "some pins were not stored on the disk at %s: %s", self._books.path, error
            )

    def _wrote(
        self, node: Node, holder: Holder, writes: Sequence[_Write], written: storage_wire.Written
    ) -> int:
        """Commit written blocks; returns how many."""
        if self._books.rules is not node:
            return 0
        total = failed = at = 0
        for write in writes:
            own, chosen = write.own, write.blocks
            reservation = holder.reservations[write.ticket]
            statuses = written.status[at : at + len(chosen)]
            at += len(chosen)
            stored = int(BlockStatus.PRESENT)
            good = [index for index, status in enumerate(statuses) if status == stored]
            failed += len(chosen) - len(good)
            base = self._books.bases[own.namespace.tenant.name]
            for row, status in zip(write.slots, statuses, strict=True):
                if status == BlockStatus.FAILED:
                    self._books.bad.failed(base + row * own.stride)
            # Blocks removed meanwhile must not be found again.
            done = [index for index in good if not chosen[index].gone]
            indices = [reservation.indices[index] for index in done]
            checksums = checksums_of([chosen[index] for index in done])
            if done:
                depths = [chosen[index].depth for index in done]
                node.puts.commit(holder, write.ticket, checksums, indices, Origin(depths=depths))
            self._books.counted.written_bytes += len(done) * own.stride
            self._books.counted.packed_blocks += len(done) * self._books.is_shorter(own)
            total += len(done)
            left = [block.key for n in done if (block := chosen[n]).left == block.used]
            if left:
                node.settle()
                node.candidates.expend(own.namespace, left)
        node.settle()
        self._books.counted.written_blocks += total
        if failed:
            self._books.refused = True
            self._books.counted.write_errors += failed
            self._failed(f"{failed} blocks could not be written")
        elif self._books.state is TierState.READ_ONLY:
            self._books.state, self._books.error = TierState.SERVING, ""
            self._retry.succeeded()
            self._books.log.warning("writes to the disk at %s succeed again", self._books.path)
        return total

    def _failed(self, error: str) -> None:
        """A write failed: do not write to the disk for a while."""
        now = self._books.clock()
        if self._books.state is TierState.READ_ONLY and not self._retry.due(now):
            return  # it began before the first one failed: the wait is as long however many there were
        if self._books.state is TierState.SERVING:
            self._books.log.error("writes to the disk at %s fail: %s", self._books.path, error)
            self._retry.succeeded()
        if self._books.state in {TierState.SERVING, TierState.READ_ONLY}:
            self._books.state, self._books.error = TierState.READ_ONLY, error
            self._retry.failed(now)

    def _make_entries(self, n: int) -> None:
        """Make room in the index for this many more: small blocks can fill it before the segment."""
        known = self._books.rules.inventory.block_count() + self._writing_blocks
        surplus = known + n - self._books.living_disk().ready.entries_max
        if surplus > 0:
            self._books.rules.eviction.evict_coldest(surplus)

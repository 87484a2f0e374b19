"""Copies from memory to the device: blocks that this node's engines read again, from a bounded queue.

Event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from functools import partial

from kvpool.daemon.core.blocks import Block, NamespaceState, Origin, checksums_of
from kvpool.daemon.core.events import Read
from kvpool.daemon.core.node import Node
from kvpool.daemon.tiers.device_books import DeviceBooks
from kvpool.daemon.tiers.tier_state import TierState
from kvpool.daemon.tiers.write_orders import Order, WriteLimits, WriteOrders
from kvpool.daemon.workers.device_proxy import Device
from kvpool.errors import InvalidRequest, KvpoolError, LimitExceeded, PoolFull, StaleEpoch
from kvpool.tasks import Tasks
from kvpool.types import BlockStatus
from kvpool.wire import frame
from kvpool.wire import worker as worker_wire

log = logging.getLogger("kvpool.daemon")

QUEUED_MAX = 1 << 16  # blocks that were read and may be copied to the device
ORDER_BLOCKS, ORDER_BYTES = 256, 16 << 20  # in one order
HELD_SHARE = 1 / 32  # of a segment, in one order
PROMOTE_S = 30.0


class DevicePromotion:
    """Copies to the device, and updates its books."""

    def __init__(self, books: DeviceBooks, tasks: Tasks) -> None:
        self._books = books
        self._queue: deque[Sequence[Block]] = deque()
        self._queued = 0
        self._awake = asyncio.Event()
        self._tickets = 0
        limits = WriteLimits(1, ORDER_BLOCKS, ORDER_BYTES, HELD_SHARE)
        self._orders = WriteOrders(books.node, tasks, "promotions", limits)

    @property
    def queued(self) -> int:
        """Blocks in the queue."""
        return self._queued

    def was_read(self, event: Read) -> None:
        """Queue blocks that an engine of this node reads. Blocks are skipped when the queue is full."""
        if self._books.state is not TierState.SERVING or event.lease is None:
            return
        for _, blocks in event.lease.parts.values():
            if self._queued + len(blocks) > QUEUED_MAX:
                self._books.counted.not_queued_blocks += len(blocks)
            elif blocks:
                self._queue.append(blocks)
                self._queued += len(blocks)
        self._awake.set()

    async def run(self) -> None:
        while True:
            await self._awake.wait()
            self._awake.clear()
            while self._queue:
                blocks = self._queue.popleft()
                self._queued -= len(blocks)
                await self._orders.store(blocks, self._choose)
                await asyncio.sleep(0)

    async def store(self, blocks: Sequence[Block]) -> bytes:
        """See `Tier`."""
        await self._orders.store(blocks, self._choose)
        return bytes([self._stored(block) for block in blocks])

    def _stored(self, block: Block) -> BlockStatus:
        if block.key in self._books.promoted(block.table):
            return BlockStatus.PRESENT
        if block.table.blocks.get(block.key) is not block:
            return BlockStatus.ABSENT
        return BlockStatus.NO_SPACE if self._books.serving else BlockStatus.FAILED

    def _choose(self, blocks: Sequence[Block]) -> Order | None:
        """Blocks of one table, if they can be here."""
        table = blocks[0].table
        state, process = self._books.open(table.namespace), self._books.process
        if state is None or process is None or state.tables[table.part].stride != table.stride:
            return None
        return Order(blocks, partial(self._promote, process, self._books.rules, state))

    async def _promote(
        self, process: Device, rules: Node, state: NamespaceState, held: Sequence[Block]
    ) -> None:
        """Copy missing blocks to the device; those that are there count as used."""
        if rules is not self._books.rules:
            return
        table, holder = held[0].table, self._books.holders[state.tenant.name]
        self._tickets += 1
        ticket = self._tickets
        try:
            keys = [block.key for block in held]
            try:
                rules.puts.reserve(holder, state, table.part, ticket, keys)
            except (PoolFull, LimitExceeded, StaleEpoch, InvalidRequest):
                return  # no room, or the epoch has just ended
            reservation = holder.reservations.get(ticket)
            if reservation is None:
                return
            chosen = [held[index] for index in reservation.indices]
            reservation.parents = [block.parent for block in chosen]
            await process.promote(
                worker_wire.PromoteBlocks(
                    table.namespace.tenant.segment,
                    table.stride,
                    frame.pack_rows([block.row for block in chosen]),
                    frame.pack_rows(reservation.rows),
                    PROMOTE_S,
                )
            )
            # Blocks removed meanwhile must not be found again.
            kept = [
                (index, block)
                for index, block in zip(reservation.indices, chosen, strict=True)
                if not block.gone
            ]
            if kept:
                new = rules.puts.commit(
                    holder,
                    ticket,
                    checksums_of([block for _, block in kept]),
                    [index for index, _ in kept],
                    Origin(depths=[block.depth for _, block in kept]),
                )
                rules.settle()
                self._books.counted.written_blocks += new
                self._books.counted.written_bytes += new * table.stride
        except KvpoolError as error:
            self._books.counted.write_errors += 1
            log.warning("blocks were not copied to %s: %s", self._books.config.device, error)
        finally:
            rules.puts.abort(holder, ticket)

"""Slots of a node's blocks: candidates for eviction, and freed slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvpool.daemon.core.blocks import (
    PIN_NONE,
    PIN_SOFT,
    Block,
    BlockRecords,
    PartTable,
    SlotClass,
    Tenant,
    by_table,
)
from kvpool.daemon.core.change_feed import ChangeFeed
from kvpool.daemon.core.ledger import Ledger
from kvpool.storage.eviction import MakePolicy
from kvpool.storage.expendable import expendable_first
from kvpool.telemetry.misses import Reason


class Slots:
    """The slots of all tenants' blocks. Not thread-safe.

    classes: of all tenants, oldest first; never shorter. releases: counts events that may allow a slab to be
    freed that could not be freed before.
    """

    def __init__(
        self,
        make_policy: MakePolicy,
        new_records: Callable[[int], BlockRecords],
        ledger: Ledger,
        changes: ChangeFeed,
    ) -> None:
        """make_policy: for a class with so many slots. new_records: for its blocks, with so many rows."""
        self.make_policy = expendable_first(make_policy)
        self._new_records = new_records
        self._ledger = ledger
        self._changes = changes
        self.classes: list[SlotClass] = []
        self.releases = 0

    def class_of(self, tenant: Tenant, stride: int) -> SlotClass:
        """The tenant's slots of this stride; created if there are none yet."""
        slot_class = tenant.classes.get(stride)
        if slot_class is None:
            allocator = tenant.allocator
            rows = allocator.size // stride
            by_row = self._new_records(rows)
            policy = self.make_policy(allocator.capacity(stride), by_row.new_queue)
            slot_class = SlotClass(stride, rows, policy, by_row)
            tenant.classes[stride] = slot_class
            self.classes.append(slot_class)
        return slot_class

    def put_in(self, blocks: Sequence[Block], *, first: bool = False) -> None:
        """Make blocks of one table candidates for eviction, according to their pins. first: the next ones."""
        self._ledger.settle()
        plain = [block for block in blocks if block.pin == PIN_NONE]
        if plain:
            slot_class = plain[0].table.slots
            (slot_class.put_back if first else slot_class.insert)(plain)
        if len(plain) != len(blocks):
            soft = [block for block in blocks if block.pin == PIN_SOFT]
            if soft:
                soft[0].table.slots.soft.add(soft, first=first)

    def take_out(self, block: Block) -> None:
        """The reverse: remove a block from candidates, pins and quota."""
        self.releases += 1
        self._ledger.settle()
        table = block.table
        tenant = table.namespace.tenant
        slot_class = table.slots
        if slot_class.parked.pop(block, -1) >= 0:
            pass  # it is nowhere else
        elif block.pin == PIN_NONE:
            slot_class.discard(block)
        elif block.pin == PIN_SOFT:
            slot_class.soft.remove([block])
        if block.pin != PIN_NONE:
            if block.pin == PIN_SOFT:
                table.soft_bytes -= table.stride
            else:
                table.hard_bytes -= table.stride
            tenant.count_pin(block, -1)
            block.pin = PIN_NONE

    def take_all_out(self, blocks: Sequence[Block]) -> None:
        """The same for blocks of one table."""
        self.releases += 1
        self._ledger.settle()
        for block in blocks[0].table.slots.discard_all(blocks):
            self.take_out(block)

    def drop(self, block: Block, reason: Reason) -> None:
        """Remove a block from its table, and drop it."""
        del block.table.blocks[block.key]
        self.part_with(block, reason)

    def drop_all(self, blocks: Iterable[Block], reason: Reason) -> None:
        """Drop each: the same, announced and freed together."""
        self.releases += 1
        self._ledger.settle()
        for table, some in by_table(blocks).items():
            tenant = table.namespace.tenant
            slot_class = tenant.classes[table.stride]
            rows = []
            keys = [block.key for block in some]
            table.blocks.remove(keys)
            self._changes.gone(table, keys, some, reason)
            self.take_all_out(some)
            for block in some:
                if block.leases:
                    block.go()
                    table.going += 1
                else:
                    rows.append(block.row)
            slot_class.by_row.clear(rows)
            tenant.allocator.free(table.stride, rows)

    def part_with(self, block: Block, reason: Reason) -> None:
        """It is in no table any more. Its slot is freed now, or when its last lease ends."""
        self._changes.gone(block.table, (block.key,), (block,), reason)
        self.take_out(block)
        if block.leases:
            block.go()
            block.table.going += 1
        else:
            self.free(block)

    def free(self, block: Block) -> None:
        table = block.table
        tenant = table.namespace.tenant
        tenant.classes[table.stride].by_row.clear([block.row])
        tenant.allocator.free(table.stride, [block.row])

    def free_reserved(self, table: PartTable, rows: Sequence[int]) -> None:
        """Nobody writes to these slots any more, and they are no blocks."""
        table.namespace.tenant.allocator.free(table.stride, rows)
        self.releases += 1

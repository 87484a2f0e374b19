"""What the index of a disk is told beside the blocks that are written: which tables there are, which slots were freed,
and how blocks are pinned.

Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from kvpool.daemon.core.blocks import PIN_KINDS, Block, NamespaceState, PartTable
from kvpool.daemon.core.node import Node
from kvpool.daemon.core.pins import PinsBefore, levels
from kvpool.daemon.tiers.ssd_books import SsdBooks, TableRecord
from kvpool.daemon.tiers.tier_state import TierState
from kvpool.errors import KvpoolError, LimitExceeded, Unavailable
from kvpool.placement.records import DEFAULT_SETTINGS
from kvpool.types import plain_parts, split_keys
from kvpool.wire import storage as storage_wire

FORGET_S = 30.0  # for the index to take deletions


class SsdIndexUpdates:
    """Updates the index of a disk, by its books."""

    def __init__(self, books: SsdBooks) -> None:
        self._books = books
        self._numbering = asyncio.Lock()

    async def tidy(self) -> None:
        """Have the index forget slots freed since the last write, and the tables of ended epochs whose blocks are all
        gone. Raises `Unavailable`.
        """
        # Their slots are among those to be forgotten now, or were before.
        ended = self._ended_tables()
        # Some deletions may have gone with writes that are still under way.
        if self._books.given_up or self._books.refused or ended:
            await self._forget_given_up()
        if ended and self._books.state is not TierState.OPENING:
            await self._drop_tables(ended)

    def _ended_tables(self) -> list[PartTable]:
        """Tables in the index that nothing refers to any more.

        One of a namespace's last recorded epoch stays, unless that is the first: a node without a membership service
        learns from it which epoch it was in.
        """
        last: dict[tuple[str, bytes], tuple[int, int]] = {}
        for table in self._books.numbers:
            of = table.namespace
            epoch = of.epoch, -table.part
            last[of.tenant.name, of.base] = max(epoch, last.get((of.tenant.name, of.base), epoch))
        return [
            table
            for table in self._books.numbers
            if table.namespace.retired
            and not any(
                t.blocks or t.garbage or t.reserved or t.going
                for t in self._books.all_tables(table)
            )
            and (
                not table.namespace.epoch
                or last[table.namespace.tenant.name, table.namespace.base]
                != (table.namespace.epoch, -table.part)
            )
        ]

    async def _drop_tables(self, tables: Sequence[PartTable]) -> None:
        """The index has room for few: one that is reset every minute would fill it within hours."""
        node = self._books.rules
        async with self._numbering:
            # A namespace that was freed and opened again has the same record, and so the same number.
            used = {
                number
                for table, (number, _) in self._books.numbers.items()
                if not table.namespace.retired
            }
            numbers = {
                self._books.numbers[table][0] for table in tables if table in self._books.numbers
            } - used
            if numbers:
                await self._books.living_disk().drop_tables(sorted(numbers))
            if self._books.rules is node:
                for table in tables:
                    self._books.numbers.pop(table, None)
                    self._books.shorter.pop(table, None)

    async def _forget_given_up(self) -> None:
        node, slots = self._books.rules, self._books.take_given_up()
        try:
            await self._books.living_disk().forget(storage_wire.ForgetSlots(slots, FORGET_S))
        except LimitExceeded:
            # It was not sent. Orders that were sent stay with the process, and an index that fails is retried:
            # sending them again could delete entries of blocks written into such a slot meanwhile.
            if self._books.rules is node:
                self._books.given_up.frombytes(slots)
            raise
        except KvpoolError:
            if self._books.rules is node:
                self._books.refused = True
            raise
        if self._books.rules is node:
            self._books.refused = False

    async def record(self, namespace: NamespaceState) -> None:
        """Record a namespace's epoch in the index: for nodes without a membership service.

        Raises `Unavailable` if that cannot be made durable: a later life of this node might take old
        blocks for new ones.
        """
        state = self._books.open(namespace)
        if state is None:
            if self._books.state is TierState.FAILED:
                raise Unavailable(
                    f"the disk at {self._books.path} cannot record the change ({self._books.error}). Remove it from the "
                    "configuration, or empty its folder"
                )
            return  # it is too large for this disk, or its epoch is over already
        for table in state.tables:
            if table.part == 0 or table in self._books.numbers:
                await self.number(table, namespace)

    async def number(self, table: PartTable, namespace: NamespaceState) -> int:
        """The index's number of a table; registered first, with its settings, if necessary."""
        number, recorded = self._books.numbers.get(table, (0, DEFAULT_SETTINGS))
        if number and recorded == namespace.settings:
            return number
        async with self._numbering:  # or two calls would each register a number
            number, recorded = self._books.numbers.get(table, (0, DEFAULT_SETTINGS))
            if number and recorded == namespace.settings:
                return number
            settings = namespace.settings
            record = TableRecord(
                namespace.tenant.name,
                namespace.base,
                namespace.fields,
                plain_parts(namespace.parts),
                table.part,
                namespace.epoch,
                namespace.generation,
                settings,
            )
            numbers = self._books.numbers
            number = await self._books.living_disk().add_table(
                msgspec.msgpack.encode(record), number
            )
            numbers[table] = number, settings
        return number

    async def pin(self, namespace: NamespaceState, packed: bytes, kind: str) -> set[bytes]:
        """Pin these blocks, across restarts too: see `Pins.pin`; returns the keys."""
        state = self._books.state_of(namespace)
        if state is None:
            return set()
        keys = split_keys(packed)
        changed = self._books.rules.pins.check(state, keys, kind)
        found = self._books.rules.pins.pin(state, keys, kind)
        await self._keep_pins(changed, PIN_KINDS[kind])
        return found

    def check_pin(self, namespace: NamespaceState, packed: bytes, kind: str) -> PinsBefore:
        """What `pin` would change, as it is pinned now. Raises what `pin` would raise of quotas."""
        state = self._books.state_of(namespace)
        return (
            {}
            if state is None
            else levels(self._books.rules.pins.check(state, split_keys(packed), kind))
        )

    async def put_back(self, node: Node, before: PinsBefore) -> None:
        """See `Pins.put_back`; `node`: whose blocks they are. Raises `KvpoolError` if the disk cannot keep it."""
        if self._books.rules is not node:
            return  # its next life has begun with what the index says
        node.pins.put_back(before)
        for (table, level), keys in before.items():
            here = [block for block in table.blocks.found(keys) if block is not None]
            await self._keep_pins(here, level)

    async def _keep_pins(self, blocks: Sequence[Block], level: int) -> None:
        """Across restarts too."""
        if not blocks:
            return
        node = self._books.rules
        try:
            await self._books.living_disk().pin(
                storage_wire.PinSlots(self._books.slots(blocks), level, FORGET_S)
            )
        except KvpoolError:
            if self._books.rules is node:
                self._books.refused = True
            raise

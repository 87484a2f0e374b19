"""Puts and reads that are not booked yet.

An answer needs a decision, not its bookkeeping: that is recorded here, and done after the answers are
sent (`settle`). Code that depends on it settles first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpool.daemon.core.blocks import OWN, Block, Origin, PartTable, SlotClass
from kvpool.daemon.core.change_feed import ChangeFeed

_PUT, _READ, _LEASED = range(3)  # the kind of a note
ANCESTORS_PER_BLOCK = 32  # refreshed in the policy when a block is put after them


@dataclass(eq=False, repr=False, slots=True)
class Ledger:
    """Notes of puts and reads, and the tick counter. Not thread-safe.

    tick: counts puts and reads: the clock of `Block.used`.
    """

    _changes: ChangeFeed
    _pending: list[tuple[int, PartTable, Any]] = field(default_factory=list, init=False)
    tick: int = field(default=0, init=False)

    # ---- notes -------------------------------------------------------------------------------------

    def put(
        self,
        table: PartTable,
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        rows: Sequence[int],
        checksums: bytes,
        origin: Origin,
    ) -> None:
        """Blocks are here from now on: see `enter`."""
        self.tick += 1
        self._pending.append((_PUT, table, (keys, parents, rows, checksums, self.tick, origin)))

    def read(self, blocks: Sequence[Block]) -> None:
        """Blocks of one table were requested."""
        self.tick += 1
        self._pending.append((_READ, blocks[0].table, (blocks, self.tick)))

    def leased(self, blocks: Sequence[Block]) -> None:
        """Blocks of one table are under one more lease, in the present tick."""
        self._pending.append((_LEASED, blocks[0].table, (blocks, self.tick)))

    # ---- the books ---------------------------------------------------------------------------------

    def settle(self) -> bool:
        """Book all recorded puts and reads; returns whether there were any."""
        pending = self._pending
        if not pending:
            return False
        self._pending = []
        for kind, table, what in pending:
            slot_class = table.namespace.tenant.classes[table.stride]
            if kind == _PUT:
                self.enter(slot_class, table, *what)
                continue
            blocks, tick = what
            if kind == _LEASED:
                for block in blocks:
                    block.leases += 1
                    block.used = tick
            else:
                for block in blocks:
                    block.used = tick
            slot_class.touch(blocks)
        return True

    def enter(
        self,
        slot_class: SlotClass,
        table: PartTable,
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        rows: Sequence[int],
        checksums: bytes,
        tick: int,
        origin: Origin,
    ) -> None:
        """Enter new blocks into their table."""
        depths = origin.depths or self._depths(table, keys, parents)
        table.slots = slot_class
        new = slot_class.by_row.enter(table, keys, rows, parents, depths, tick)
        slot_class.checksums.set(rows, checksums)
        if origin[:3] == OWN[:3]:
            slot_class.policy.insert(new)
        else:
            kept = origin._replace(depths=(), tier="")
            for block in new:
                block.origin = kept
            slot_class.insert(new)
        self._refresh_ancestors(slot_class, new)
        self._changes.came(table, keys, new, origin)

    @staticmethod
    def _depths(table: PartTable, keys: Sequence[bytes], parents: Sequence[bytes]) -> Iterable[int]:
        """How many blocks precede each in its chain, as far as they are here."""
        known = table.blocks.get
        before = known(parents[0]) if parents[0] else None
        first = 0 if before is None else before.depth + 1
        # A batch is mostly one chain, which Python compares quickly: these are the same objects.
        if len(keys) == 1 or tuple(parents[1:]) == tuple(keys[:-1]):
            return range(first, first + len(keys))
        depths: dict[bytes, int] = {}
        for key, parent in zip(keys, parents, strict=True):
            before = known(parent)
            depths[key] = depths.get(parent, -1 if before is None else before.depth) + 1
        return depths.values()

    @staticmethod
    def _refresh_ancestors(slot_class: SlotClass, blocks: Sequence[Block]) -> None:
        """Requeue the ancestors of these blocks behind them, or they would be evicted first.

        A prefill in chunks puts the head of a chain long before its tail. As many ancestors as keep
        the cost of a put proportional to its blocks.
        """
        table = blocks[0].table.blocks
        found: list[Block] = []
        parent = blocks[0].parent
        most = ANCESTORS_PER_BLOCK * len(blocks)
        while parent and len(found) < most and (block := table.get(parent)) is not None:
            found.append(block)
            parent = block.parent
        if found:
            found.reverse()
            slot_class.refresh(found)

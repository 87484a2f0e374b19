"""Blocks of ended epochs: already misses, and their slots are freed a few at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvpool.daemon.core.block_index import BlockIndex
from kvpool.daemon.core.blocks import NamespaceState, PartTable, Tenant
from kvpool.daemon.core.change_feed import ChangeFeed
from kvpool.daemon.core.slots import Slots
from kvpool.telemetry.memory_stats import Counters
from kvpool.telemetry.misses import Reason

RECLAIMED_PER_PUT = 1024  # blocks: about 4 ms
GARBAGE_BLOCKS = 128  # freed in one go beside requests: about a millisecond


@dataclass(eq=False, repr=False, slots=True)
class EndedEpochs:
    """Tables of ended epochs that still have blocks. Not thread-safe."""

    _slots: Slots
    _changes: ChangeFeed
    _counters: Counters
    _tables: dict[PartTable, None] = field(default_factory=dict, init=False)

    def __bool__(self) -> bool:
        """Whether slots of ended epochs are left to free."""
        return bool(self._tables)

    def add(self, tables: Iterable[PartTable]) -> None:
        """The epoch of these has ended: their blocks are no longer found."""
        self._counters.epochs_ended += 1
        for table in tables:
            self._changes.ended(table)
            table.garbage, table.blocks = table.blocks, BlockIndex()
            if table.garbage:
                self._tables[table] = None

    def tables_of(self, namespace: NamespaceState) -> list[PartTable]:
        """The tables of a namespace's earlier epochs."""
        return [
            table
            for table in self._tables
            if table.namespace.tenant is namespace.tenant and table.namespace.base == namespace.base
        ]

    def reclaim(self, n: int, tenant: Tenant | None = None, stride: int = 0) -> int:
        """Free up to n blocks of ended epochs, of one tenant or all; returns how many. O(n + tables).

        Those of the given stride come first. Leased slots are freed when their lease ends.
        """
        gone = 0
        for table in sorted(self._tables, key=lambda table: table.stride != stride):
            if tenant is not None and table.namespace.tenant is not tenant:
                continue
            while table.garbage and gone < n:
                self._slots.part_with(table.garbage.pop_any(), Reason.EPOCH)
                gone += 1
            if table.garbage:
                break
            table.garbage = BlockIndex()  # the emptied one keeps its memory
            del self._tables[table]
        self._counters.reclaimed_blocks += gone
        return gone

"""Blocks that are taken out because a client, an operator or a rule says so."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.daemon.core.blocks import PIN_HARD, PIN_NONE, NamespaceState
from kvpool.daemon.core.counters import Counters
from kvpool.daemon.core.ledger import Ledger
from kvpool.daemon.core.slots import Slots


class Removal:
    """Takes blocks out. Not thread-safe."""

    def __init__(self, ledger: Ledger, slots: Slots, counters: Counters) -> None:
        self._ledger = ledger
        self._slots = slots
        self._counters = counters

    def remove(self, namespace: NamespaceState, keys: Sequence[bytes]) -> int:
        """Forget blocks, all their parts. Readers that hold leases finish; the count of blocks gone."""
        self._ledger.settle()
        gone = parts = 0
        for key in keys:
            hit = False
            for table in namespace.tables:
                block = table.blocks.get(key)
                if block is not None:
                    self._slots.drop(block)
                    parts += 1
                    hit = True
            gone += hit
        self._counters.removed += gone
        self._counters.removed_parts += parts
        return gone

    def give_up(self, namespace: NamespaceState, keys: Sequence[bytes]) -> int:
        """An operator wants these blocks gone; how many were there.

        What is pinned hard stays; what is leased goes with its last lease.
        """
        self._ledger.settle()
        keys = list(dict.fromkeys(keys))
        going = [
            block
            for table in namespace.tables
            for block in map(table.blocks.get, keys)
            if block is not None and block.pin != PIN_HARD
        ]
        self._slots.drop_all(going)
        gone = len({block.key for block in going})
        self._counters.given_up_parts += len(going)
        self._counters.removed += gone
        return gone

    def drop_unused(self, namespace: NamespaceState, keys: Sequence[bytes], tick: int) -> int:
        """Drop those that nobody has used since this tick, uses under way and pins apart; how many parts."""
        self._ledger.settle()
        keys = list(dict.fromkeys(keys))
        unused = [
            block
            for table in namespace.tables
            for key in keys
            if (block := table.blocks.get(key)) is not None
            and block.used <= tick
            and not block.leases
            and block.pin == PIN_NONE
        ]
        self._slots.drop_all(unused)
        self._counters.unused_parts += len(unused)
        return len(unused)

    def drop_corrupt(self, namespace: NamespaceState, part: int, key: bytes) -> None:
        """A copy of this block failed its checksum: it is not to be found again."""
        self._ledger.settle()
        self._counters.checksum_mismatches += 1
        block = namespace.table(part).blocks.get(key)
        if block is not None:
            self._slots.drop(block)
            self._counters.corrupt_parts += 1

"""Blocks that are removed because a client, an operator or a rule says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvpool.daemon.core.blocks import PIN_HARD, PIN_NONE, Block, NamespaceState
from kvpool.daemon.core.ledger import Ledger
from kvpool.daemon.core.slots import Slots
from kvpool.telemetry.memory_stats import Counters
from kvpool.telemetry.misses import Reason


@dataclass(eq=False, repr=False, slots=True)
class Removal:
    """Removes blocks. Not thread-safe."""

    _ledger: Ledger
    _slots: Slots
    _counters: Counters

    def remove(self, namespace: NamespaceState, keys: Sequence[bytes]) -> set[bytes]:
        """Remove blocks, all their parts. Readers with leases finish; returns the keys of those that were here."""
        going = self._drop(namespace, keys, Reason.REMOVED, lambda _: True)
        gone = {block.key for block in going}
        self._counters.removed += len(gone)
        self._counters.removed_parts += len(going)
        return gone

    def give_up(self, namespace: NamespaceState, keys: Sequence[bytes]) -> int:
        """Remove blocks for an operator; returns how many were there.

        Hard pins stay; leased blocks are freed with their last lease.
        """
        going = self._drop(namespace, keys, Reason.OPERATOR, lambda block: block.pin != PIN_HARD)
        gone = len({block.key for block in going})
        self._counters.given_up_parts += len(going)
        self._counters.removed += gone
        return gone

    def drop_unused(self, namespace: NamespaceState, keys: Sequence[bytes], tick: int) -> int:
        """Drop blocks not used since this tick, except pinned and leased ones; returns the number of parts."""
        unused = self._drop(
            namespace,
            keys,
            Reason.TTL,
            lambda block: block.used <= tick and not block.leases and block.pin == PIN_NONE,
        )
        self._counters.unused_parts += len(unused)
        return len(unused)

    def _drop(
        self,
        namespace: NamespaceState,
        keys: Sequence[bytes],
        reason: Reason,
        goes: Callable[[Block], bool],
    ) -> list[Block]:
        """All parts that are here of these blocks and that go; returns them."""
        self._ledger.settle()
        keys = list(dict.fromkeys(keys))
        going = [
            block
            for table in namespace.tables
            for block in table.blocks.found(keys)
            if block is not None and goes(block)
        ]
        self._slots.drop_all(going, reason)
        return going

    def drop_corrupt(self, namespace: NamespaceState, part: int, key: bytes) -> None:
        """A replica of this block failed its checksum: it must not be found again."""
        self._ledger.settle()
        self._counters.checksum_mismatches += 1
        block = namespace.table(part).blocks.get(key)
        if block is not None:
            self._slots.drop(block, Reason.CORRUPT)
            self._counters.corrupt_parts += 1

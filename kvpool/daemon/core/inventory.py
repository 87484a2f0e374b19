"""What is here, for announcing, walking, and display to operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvpool.daemon.core.blocks import Block, NamespaceState, SlotClass, Tenant
from kvpool.daemon.core.candidates import Candidates
from kvpool.daemon.core.change_feed import Change, ChangeFeed
from kvpool.daemon.core.ledger import Ledger
from kvpool.daemon.core.namespaces import Namespaces
from kvpool.daemon.core.slots import Slots
from kvpool.decoding import decode_json
from kvpool.telemetry.memory_stats import (
    NamespaceStats,
    NamespaceUsage,
    PlaceUsage,
    TenantStats,
    Usage,
)

_WALK_ROWS = 1 << 40  # more than a class can have
ENDED_ROWS = 4096  # of a node that has ended, in one go


@dataclass(eq=False, repr=False, slots=True)
class Inventory:
    """Answers about the blocks that are here. Not thread-safe."""

    _tenants: Mapping[str, Tenant]
    _namespaces: Namespaces
    _candidates: Candidates
    _ledger: Ledger
    _slots: Slots
    _changes: ChangeFeed
    _ended: list[_Ended] = field(default_factory=list, init=False)
    """What is still to be reported of nodes that this one replaces."""

    # ---- what the announcer hears -------------------------------------------------------------------

    def follow_changes(self, changed: Callable[[], object] = lambda: None) -> None:
        """Record changes from now on: see `ChangeFeed.follow`, and `take_changes`."""
        self._changes.follow(changed)

    def take_changes(self) -> list[Change]:
        """Blocks that were stored or are gone since the last call; some of them several times.

        More may be there at once: `changed` is called again then.
        """
        self._ledger.settle()
        changes = self._changes.take()
        if self._ended:
            ended = self._ended[-1]
            if (some := ended.next(ENDED_ROWS)) is None:
                self._ended.pop()
            else:
                changes = [*changes, *some]
            if self._ended:
                self._changes.notify()
        return changes

    def tell_of_end(self, former: Inventory) -> None:
        """The node that this one replaces has ended: its blocks and changes are announced from here, a few with each
        call of `take_changes`.
        """
        if not self._changes.followed:
            return
        former._ledger.settle()
        for namespace, keys in former._changes.take():
            self._changes.tell(namespace, keys)
        self._ended += [*former._ended, _Ended(former._slots.classes)]
        self._changes.notify()

    def masks(self, digest: bytes, keys: Sequence[bytes]) -> tuple[int, list[int]]:
        """A namespace's number of parts, and for each key the mask of the parts that are here.

        digest: its directory digest. (0, []) if it is unknown or has ended.
        """
        self._ledger.settle()
        namespace = self._namespaces.by_directory(digest)
        if namespace is None:
            return 0, []
        first, *others = namespace.tables
        masks = list(map(int, first.blocks.present(keys)))
        for table in others:
            bit = 1 << table.part
            here = table.blocks
            if here:
                masks = [
                    m | bit if has else m for m, has in zip(masks, here.present(keys), strict=True)
                ]
        return len(namespace.tables), masks

    def walk(self, cursor: int, count: int) -> tuple[list[tuple[bytes, list[bytes]]], int | None]:
        """About `count` blocks from a cursor on (0: from the start), by directory digest.

        Also returns the next cursor, None at the end. The walk goes by slots, and a block of several
        parts is visited at its first one. So each block is visited whose parts do not change
        during the walk; `take_changes` reports the others.
        """
        blocks, after = self.scan(cursor, count)
        found: dict[NamespaceState, list[bytes]] = {}
        for block in blocks:
            found.setdefault(block.table.namespace, []).append(block.key)
        return [(namespace.directory_digest, keys) for namespace, keys in found.items()], after

    def scan(
        self, cursor: int, count: int, tenant: Tenant | None = None
    ) -> tuple[list[Block], int | None]:
        """The first parts of the blocks that `walk` visits.

        tenant: only this one's, so that cursors reveal nothing of others. At most `count` slots are
        examined, for any cursor: it may be made up.
        """
        blocks, after = self.parts(cursor, count, tenant)
        return [block for block in blocks if _is_first_part(block)], after

    def parts(
        self, cursor: int, count: int, tenant: Tenant | None = None
    ) -> tuple[list[Block], int | None]:
        """As `scan`, but all parts of the blocks."""
        self._ledger.settle()
        classes = self._slots.classes if tenant is None else list(tenant.classes.values())
        number, row = divmod(cursor, _WALK_ROWS)
        found: list[Block] = []
        left = count
        while number < len(classes):
            by_row = classes[number].by_row
            row = min(row, len(by_row))
            end = min(len(by_row), row + left)
            found += [block for block in by_row.between(row, end) if block.is_here()]
            left -= end - row
            if end < len(by_row):
                row = end
                break
            number, row = number + 1, 0
        more = number < len(classes)
        return found, number * _WALK_ROWS + row if more else None

    @staticmethod
    def rows_of(tenant: Tenant) -> int:
        """End position of a scan of a tenant's blocks."""
        return sum(len(slot_class.by_row) for slot_class in tenant.classes.values())

    # ---- counts and choices -------------------------------------------------------------------------

    def block_count(self) -> int:
        """Number of parts of blocks here."""
        self._ledger.settle()
        return sum(
            len(table.blocks)
            for tenant in self._tenants.values()
            for namespace in tenant.namespaces.values()
            for table in namespace.tables
        )

    def replicas_wanted(self, namespace: NamespaceState, keys: Sequence[bytes]) -> list[int]:
        """The wanted number of replicas of each block in the cluster; 0 if it is not here."""
        self._ledger.settle()
        wanted = []
        for key in keys:
            block = next((b for t in namespace.tables if (b := t.blocks.get(key))), None)
            wanted.append(0 if block is None else block.replicas or namespace.settings.replicas)
        return wanted

    def select_by_value(
        self, namespace: NamespaceState, keys: Sequence[bytes], worth: bool
    ) -> list[bytes]:
        """Those of the blocks that were read again after their put, or those that were not."""
        self._ledger.settle()
        chosen = []
        for key in keys:
            found = [block for table in namespace.tables if (block := table.blocks.get(key))]
            if found and any(block.used > block.put for block in found) == worth:
                chosen.append(key)
        return chosen

    # ---- the operator's view ------------------------------------------------------------------------

    def tenant_stats(self, tenant: Tenant) -> TenantStats:
        """What a tenant has in memory. What features count, `engines` and the usage of disks are others' to set."""
        self._ledger.settle()
        return TenantStats(
            segment_bytes=tenant.allocator.size,
            blocks=sum(
                len(table.blocks)
                for namespace in tenant.namespaces.values()
                for table in namespace.tables
            ),
            secondary_bytes=self._candidates.secondary_bytes(tenant),
            granted_bytes=tenant.granted_bytes,
            hard_pinned_bytes=tenant.hard_bytes,
            soft_pinned_bytes=tenant.soft_bytes,
            space=tenant.allocator.stats(),
            namespaces={
                namespace.base.hex(): NamespaceStats(
                    fields=decode_json(namespace.fields, dict[str, Any], "a namespace's fields"),
                    epoch=namespace.epoch,
                    settings=msgspec.to_builtins(namespace.settings),
                    held_bytes=namespace.held_bytes,
                    quota_bytes=namespace.quota,
                    blocks=[len(table.blocks) for table in namespace.tables],
                    part_bytes=[spec.nbytes for spec in namespace.parts],
                )
                for namespace in tenant.namespaces.values()
            },
            usage=Usage(dram=[self.usage(tenant)]),
        )

    def usage(self, tenant: Tenant, where: str = "") -> PlaceUsage:
        """What a tenant and each of its namespaces have of this tier."""
        self._ledger.settle()
        return PlaceUsage(
            where=where,
            part_bytes=tenant.allocator.size,
            used_bytes=tenant.allocator.bytes_used,
            namespaces={
                namespace.base.hex(): NamespaceUsage(
                    held_bytes=namespace.held_bytes, quota_bytes=namespace.quota
                )
                for namespace in tenant.namespaces.values()
            },
        )


class _Ended:
    """The blocks of a node that has ended, by the rows of their slots. It frees those that were told."""

    def __init__(self, classes: list[SlotClass]) -> None:
        self._classes = classes
        self._row = 0

    def next(self, rows: int) -> list[Change] | None:
        """Those in up to so many further rows; None: that was all."""
        while self._classes:
            by_row = self._classes[-1].by_row
            if self._row < len(by_row):
                blocks = by_row.between(self._row, self._row + rows)
                self._row += rows
                found: dict[NamespaceState, list[bytes]] = {}
                for block in blocks:
                    found.setdefault(block.table.namespace, []).append(block.key)
                return list(found.items())
            self._classes.pop()
            self._row = 0
        return None


def _is_first_part(block: Block) -> bool:
    table, key = block.table, block.key
    tables = table.namespace.tables
    return not table.part or not any(key in other.blocks for other in tables[: table.part])

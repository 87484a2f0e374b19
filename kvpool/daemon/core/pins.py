"""Pins: blocks that are evicted last, or never."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.daemon.core.blocks import (
    PIN_HARD,
    PIN_KINDS,
    PIN_NONE,
    Block,
    NamespaceState,
    PartTable,
    by_table,
)
from kvpool.daemon.core.ledger import Ledger
from kvpool.daemon.core.limits import Limits
from kvpool.daemon.core.slots import Slots
from kvpool.errors import InvalidRequest, LimitExceeded

PinsBefore = dict[tuple[PartTable, int], list[bytes]]
"""How blocks were pinned: (table, level) → keys."""


def levels(blocks: Sequence[Block]) -> PinsBefore:
    """How these are pinned."""
    found: PinsBefore = {}
    for block in blocks:
        found.setdefault((block.table, block.pin), []).append(block.key)
    return found


class Pins:
    """Pins and unpins blocks. Not thread-safe."""

    def __init__(self, limits: Limits, ledger: Ledger, slots: Slots) -> None:
        self._limits = limits
        self._ledger = ledger
        self._slots = slots

    def pin(
        self,
        namespace: NamespaceState,
        keys: Sequence[bytes],
        kind: str,
        tables: Sequence[PartTable] | None = None,
    ) -> set[bytes]:
        """Pin (soft: evict last; hard: never) or unpin these blocks; returns which keys are here.

        tables: of the namespace, those of the parts that are meant; None: all.
        Raises `LimitExceeded`, and changes nothing, if that exceeds the tenant's pin
        quota, or the same share of the namespace's quota.
        """
        tables = namespace.tables if tables is None else tables
        self._change(self.check(namespace, keys, kind, tables), PIN_KINDS[kind])
        return {key for table in tables for key in keys if key in table.blocks}

    def put_back(self, before: PinsBefore) -> None:
        """Undo `pin`, for blocks that are still here. No quota is asked: these pins were within it."""
        self._ledger.settle()
        for (table, level), keys in before.items():
            here = (block for block in table.blocks.found(keys) if block is not None)
            self._change([block for block in here if block.pin != level], level)

    def _change(self, changed: Sequence[Block], level: int) -> None:
        for table, blocks in by_table(changed).items():
            self._slots.take_all_out(blocks)
            if level != PIN_NONE:
                for block in blocks:
                    block.pin = level
                    table.namespace.tenant.count_pin(block, 1)
                if level == PIN_HARD:
                    table.hard_bytes += table.stride * len(blocks)
                else:
                    table.soft_bytes += table.stride * len(blocks)
            self._slots.put_in(blocks)

    def check(
        self,
        namespace: NamespaceState,
        keys: Sequence[bytes],
        kind: str,
        tables: Sequence[PartTable] | None = None,
    ) -> list[Block]:
        """The blocks that `pin` would change. Raises the same errors."""
        if kind not in PIN_KINDS:
            raise InvalidRequest(f"a pin must be soft, hard or none, not {kind!r}")
        self._ledger.settle()
        level = PIN_KINDS[kind]
        tenant = namespace.tenant
        changed = [
            block
            for key in dict.fromkeys(keys)
            for table in (namespace.tables if tables is None else tables)
            if (block := table.blocks.get(key)) is not None and block.pin != level
        ]
        if level != PIN_NONE:
            hard = level == PIN_HARD
            share = self._limits.hard_pin_share if hard else self._limits.soft_pin_share
            asked = sum(block.table.stride for block in changed)
            bounds = [
                (f"tenant {tenant.name!r}", tenant.allocator.size, tenant.namespaces.values()),
                (f"namespace {namespace.base.hex()}", namespace.quota, [namespace]),
            ]
            for whose, size, theirs in bounds:
                pins = [
                    t.hard_bytes if hard else t.soft_bytes for one in theirs for t in one.tables
                ]
                would, quota = sum(pins) + asked, int(size * share)
                if size and asked and would > quota:
                    raise LimitExceeded(
                        f"{kind} pins of {whose} would hold {would >> 20} MiB; the quota is {quota >> 20} MiB"
                    )
        return changed

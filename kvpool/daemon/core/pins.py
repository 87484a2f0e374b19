"""Pins: blocks that are evicted last, or never."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


class Taken(NamedTuple):
    """Bytes of quotas that are given away and not pinned yet: in a namespace, and in its tenant's others."""

    here: int = 0
    elsewhere: int = 0


NOTHING_TAKEN = Taken()


class Fit(NamedTuple):
    """How many blocks are within a limit, and the bytes that they take of it. room: what it leaves, if that is too little."""

    blocks: int
    nbytes: int
    room: int | None = None


def levels(blocks: Sequence[Block]) -> PinsBefore:
    """How these are pinned."""
    found: PinsBefore = {}
    for block in blocks:
        found.setdefault((block.table, block.pin), []).append(block.key)
    return found


@dataclass(eq=False, repr=False, slots=True)
class Pins:
    """Pins and unpins blocks. Not thread-safe."""

    _limits: Limits
    _ledger: Ledger
    _slots: Slots

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
        changed = [
            block
            for key in dict.fromkeys(keys)
            for table in (namespace.tables if tables is None else tables)
            if (block := table.blocks.get(key)) is not None and block.pin != level
        ]
        if level != PIN_NONE:
            asked = sum(block.table.stride for block in changed)
            for whose, held, quota in self._bounds(namespace, level):
                if asked and held + asked > quota:
                    raise LimitExceeded(
                        f"{kind} pins of {whose} would hold {(held + asked) >> 20} MiB; the quota is {quota >> 20} MiB"
                    )
        return changed

    def fit(
        self,
        namespace: NamespaceState,
        keys: Sequence[bytes],
        kind: str,
        taken: Taken = NOTHING_TAKEN,
    ) -> Fit:
        """How many of these blocks, from the first on, `pin` takes. taken: by others before them."""
        self._ledger.settle()
        level = PIN_KINDS[kind]
        room = math.inf
        if level != PIN_NONE:
            whole, *own = (quota - held for _, held, quota in self._bounds(namespace, level))
            room = min(whole - taken.elsewhere, *own) if own else whole - taken.elsewhere
            room = max(0, room - taken.here)
        nbytes = 0
        for at, key in enumerate(keys):
            more = 0
            for table in namespace.tables:
                block = table.blocks.get(key)
                if block is not None and block.pin != level:
                    more += table.stride
            if nbytes + more > room:
                return Fit(at, nbytes, int(room))
            nbytes += more
        return Fit(len(keys), nbytes)

    def _bounds(self, namespace: NamespaceState, level: int) -> Iterator[tuple[str, int, int]]:
        """Whose pins are limited, how many bytes they hold, and how many they may: the tenant, and maybe the namespace."""
        hard, tenant = level == PIN_HARD, namespace.tenant
        share = self._limits.hard_pin_share if hard else self._limits.soft_pin_share
        whole = tenant.hard_bytes if hard else tenant.soft_bytes
        yield f"tenant {tenant.name!r}", whole, int(tenant.allocator.size * share)
        if namespace.quota:
            own = sum(t.hard_bytes if hard else t.soft_bytes for t in namespace.tables)
            yield f"namespace {namespace.base.hex()}", own, int(namespace.quota * share)

"""Evicts blocks: a policy's next victims, a size's coldest, or the oldest soft pins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

from kvpool.daemon.core.blocks import Block, PartTable, SlotClass, Tenant
from kvpool.daemon.core.change_feed import ChangeFeed
from kvpool.daemon.core.ledger import Ledger
from kvpool.daemon.core.quota_eviction import QuotaEviction
from kvpool.telemetry.memory_stats import Counters
from kvpool.telemetry.misses import Reason

EVICT_TOGETHER = 64  # of one size, before choosing again the size with the coldest


@dataclass(eq=False, repr=False, slots=True)
class Eviction:
    """Evicts blocks, in the order of their policies. Not thread-safe."""

    _tenants: Mapping[str, Tenant]
    _ledger: Ledger
    _changes: ChangeFeed
    _counters: Counters

    def evict(
        self,
        tenant: Tenant,
        slot_class: SlotClass,
        take: Callable[[int], Sequence[Any]],
        n: int,
        reason: Reason = Reason.FULL,
    ) -> int:
        """Evict up to n of a policy's next victims; returns how many. Leased ones are set aside.

        take: see `EvictionPolicy.take`.
        """
        rows = self._evict(tenant, slot_class, take, n, reason)
        tenant.allocator.free(slot_class.stride, rows)
        return len(rows)

    def replace(
        self,
        tenant: Tenant,
        slot_class: SlotClass,
        take: Callable[[int], Sequence[Any]],
        n: int,
        reason: Reason = Reason.FULL,
    ) -> tuple[int, list[int]]:
        """The same, with their slots reserved at once for others: how many were evicted, and these rows."""
        rows = self._evict(tenant, slot_class, take, n, reason)
        return len(rows), tenant.allocator.reuse(slot_class.stride, rows)

    def _evict(
        self,
        tenant: Tenant,
        slot_class: SlotClass,
        take: Callable[[int], Sequence[Any]],
        n: int,
        reason: Reason,
    ) -> list[int]:
        """Evict up to n victims; returns their rows, which are the caller's."""
        rows: list[int] = []
        while len(rows) < n and (victims := take(n - len(rows))):
            going = []
            for block in victims:
                if block.leases:
                    slot_class.parked[block] = block.used
                else:
                    going.append(block)
                    rows.append(block.row)
            self.forget(going, reason)
        tenant.evicted += len(rows)
        self._counters.evicted += len(rows)
        if rows:
            slot_class.by_row.clear(rows)
        return rows

    def forget(self, blocks: Sequence[Block], reason: Reason = Reason.FULL) -> None:
        """These are no longer found, and that is announced. Their slots stay the caller's."""
        for table, group in groupby(blocks, attrgetter("table")):
            some = list(group)
            keys = [block.key for block in some]
            table.forget(keys)
            why = Reason.EPOCH if table.namespace.retired else reason
            self._changes.gone(table, keys, some, why, evicted=True)

    def evict_part(
        self, tenant: Tenant, slot_class: SlotClass, order: QuotaEviction, base: bytes, n: int
    ) -> int:
        """The same for a namespace with a quota, from one of the class's orders."""
        evicted = self.evict(tenant, slot_class, partial(order.take_of, base), n, Reason.QUOTA)
        if order is slot_class.secondary:
            self._counters.evicted_secondary += evicted
        return evicted

    def evict_soft(
        self, tenant: Tenant, slot_class: SlotClass, table: PartTable | None, n: int
    ) -> int:
        """Evict up to n of the oldest soft pins, of a table or of all; returns how many. Leased ones are set aside."""
        rows: list[int] = []
        while len(rows) < n and (oldest := slot_class.soft.take(n - len(rows), table)):
            going = []
            for block in oldest:
                if block.leases:
                    slot_class.parked[block] = block.used
                    continue
                going.append(block)
                rows.append(block.row)
                block.table.soft_bytes -= block.table.stride
                tenant.count_pin(block, -1)
                self._counters.evicted_secondary += block.secondary
            self.forget(going)
        tenant.evicted += len(rows)
        self._counters.evicted += len(rows)
        self._counters.evicted_soft_pins += len(rows)
        if rows:
            slot_class.by_row.clear(rows)
            tenant.allocator.free(slot_class.stride, rows)
        return len(rows)

    def evict_coldest(self, n: int) -> int:
        """Evict up to n blocks, the coldest of all tenants and sizes first; returns how many."""
        self._ledger.settle()
        gone = 0
        while gone < n:
            coldest: list[tuple[int, int, Tenant, SlotClass]] = []
            for tenant in self._tenants.values():
                for stride, slot_class in tenant.classes.items():
                    block: Any = slot_class.policy.peek()
                    if block is not None:
                        coldest.append((block.used, stride, tenant, slot_class))
            if not coldest:
                break
            _, _, tenant, slot_class = min(coldest, key=lambda each: each[:2])
            gone += self.evict(
                tenant, slot_class, slot_class.policy.take, min(n - gone, EVICT_TOGETHER)
            )
        return gone

    def evict_least(self, tenant: Tenant, n: int) -> tuple[int, int]:
        """Evict up to n of a tenant's blocks, as if their room was needed; returns how many, and their bytes."""
        self._ledger.settle()
        gone = nbytes = 0
        for slot_class in tenant.classes.values():
            for policy in (slot_class.secondary, slot_class.policy):
                went = self.evict(tenant, slot_class, policy.take, n - gone, Reason.OPERATOR)
                gone += went
                nbytes += went * slot_class.stride
                if gone == n:
                    return gone, nbytes
        return gone, nbytes

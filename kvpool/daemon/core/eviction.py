"""Evicts blocks: a policy's next victims, a size's coldest, or the oldest soft pins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from kvpool.daemon.core.blocks import Block, PartTable, SlotClass, Tenant
from kvpool.daemon.core.byte_seconds import TierByteSeconds
from kvpool.daemon.core.change_feed import ChangeFeed
from kvpool.daemon.core.departures import TierDepartures
from kvpool.daemon.core.ledger import Ledger
from kvpool.daemon.core.quota_eviction import QuotaEviction
from kvpool.telemetry.memory_stats import Counters
from kvpool.telemetry.misses import Reason

EVICT_TOGETHER = 64  # of one size, before choosing again the size with the coldest
VICTIMS_MAX = 4096  # batches of evicted blocks whose age was not requested yet


class Eviction:
    """Evicts blocks, in the order of their policies. Not thread-safe."""

    def __init__(
        self,
        tenants: Mapping[str, Tenant],
        ledger: Ledger,
        changes: ChangeFeed,
        departures: TierDepartures,
        counters: Counters,
        byte_seconds: TierByteSeconds,
    ) -> None:
        self._tenants = tenants
        self._ledger = ledger
        self._changes = changes
        self._departures = departures
        self._counters = counters
        self._byte_seconds = byte_seconds
        self._victims: list[tuple[int, int]] = []  # see `take_victims`

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
        last_use = 0
        while len(rows) < n and (victims := take(n - len(rows))):
            going = []
            for block in victims:
                if block.leases:
                    slot_class.parked[block] = block.used
                else:
                    going.append(block)
                    rows.append(block.row)
                    last_use = block.used
            self.forget(going, reason)
        tenant.evicted += len(rows)
        self._counters.evicted += len(rows)
        if rows:
            slot_class.by_row.clear(rows)
            if len(self._victims) < VICTIMS_MAX:
                self._victims.append((last_use, len(rows)))
        return rows

    def forget(self, blocks: Sequence[Block], reason: Reason = Reason.FULL) -> None:
        """These are no longer found, and that is announced. Their slots stay the caller's."""
        at = 0
        departures = self._departures
        while at < len(blocks):
            first, table = at, blocks[at].table
            keys = []
            while at < len(blocks) and blocks[at].table is table:
                keys.append(blocks[at].key)
                at += 1
            table.forget(keys)
            if arrivals := table.namespace.tenant.arrivals:
                for block in blocks[first:at]:
                    arrivals.pop(block, None)
            if not table.namespace.retired:  # otherwise they were not counted any more
                self._byte_seconds.changed(table, -len(keys))
            self._changes.tell(table.namespace, keys)
            why = Reason.EPOCH if table.namespace.retired else reason
            space, used = table.namespace.space, blocks[at - 1].used
            if not departures.above_disks:
                departures.tell(space, keys, why, used)
                continue
            for kept in (False, True):
                some = [b.key for b in blocks[first:at] if (b.written >= 0) is kept]
                departures.tell(space, some, why, used, kept=kept)

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

    def take_victims(self) -> list[tuple[int, int]]:
        """Batches evicted since the last call: the last use of one of their blocks, as a tick, and their size.

        A sample: it lacks evictions beyond `VICTIMS_MAX`, with a slab, and of soft pins.
        """
        victims, self._victims = self._victims, []
        return victims

"""Room for puts: rows of free slots, and evictions if there are too few."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpool.daemon.core.blocks import (
    PIN_HARD,
    PIN_NONE,
    PIN_SOFT,
    Block,
    PartTable,
    SlotClass,
    Tenant,
)
from kvpool.daemon.core.ended_epochs import RECLAIMED_PER_PUT, EndedEpochs
from kvpool.daemon.core.events import TierInfo
from kvpool.daemon.core.eviction import Eviction
from kvpool.daemon.core.ledger import Ledger
from kvpool.daemon.core.limits import Limits
from kvpool.daemon.core.quotas import Quotas
from kvpool.daemon.core.slots import Slots
from kvpool.storage.slab import SlabAllocator
from kvpool.telemetry.memory_stats import Counters
from kvpool.telemetry.misses import Reason


@dataclass(eq=False, repr=False, slots=True)
class Reclaimer:
    """Finds slots for puts. Not thread-safe."""

    _limits: Limits
    _ledger: Ledger
    _slots: Slots
    _ended: EndedEpochs
    _eviction: Eviction
    _quotas: Quotas
    _tier: TierInfo
    _counters: Counters
    _ended_left: int = field(default=0, init=False)
    """Blocks of ended epochs that the current put may still free."""
    _kept: list[Block] = field(default_factory=list, init=False)
    """Blocks that the current put keeps: see `allocate`."""

    def allocate(
        self,
        tenant: Tenant,
        table: PartTable,
        n: int,
        keys: Sequence[bytes] = (),
        here: Sequence[Block] = (),
        *,
        only_spare: bool = False,
    ) -> list[int]:
        """Up to n rows, reclaiming as many as are missing. only_spare: no ordinary block is evicted for them.

        keys: of the whole put; here: those of them that are here already. A prefix is useful as a whole, so its
        own blocks, of this part and of others, go last: only if there is not one row without them.
        """
        slot_class = self._slots.class_of(tenant, table.stride)
        quota = table.namespace.quota
        if quota and only_spare:
            n = min(n, max(0, quota - table.namespace.held_bytes) // table.stride)
        rows = [] if quota else tenant.allocator.alloc(table.stride, n)
        if len(rows) == n:
            return rows
        self._kept = [*here, *self._other_parts(table, keys)]
        for block in self._kept:
            block.leases += 1
        self._fill(tenant, table, slot_class, n, rows, only_spare=only_spare)
        kept, self._kept = self._kept, []
        for block in kept:
            block.leases -= 1
            if not block.leases and block.table.slots.parked.pop(block, -1) >= 0:
                self._slots.put_in([block])
        if kept and not rows and not only_spare:
            self._fill(tenant, table, slot_class, n, rows)
        return rows

    @staticmethod
    def _other_parts(table: PartTable, keys: Sequence[bytes]) -> Iterator[Block]:
        """The blocks of these keys that are here of other parts than the table's, and those between them."""
        for other in table.namespace.tables:
            if other is table or other.blocks.isdisjoint(keys):
                continue
            between = max(0, table.spec.stride - other.spec.stride)
            for last in keys:
                key, left = last, between + 1
                while left and (block := other.blocks.get(key)) is not None:
                    yield block
                    key, left = block.parent, left - 1

    def _fill(
        self,
        tenant: Tenant,
        table: PartTable,
        slot_class: SlotClass,
        n: int,
        rows: list[int],
        *,
        only_spare: bool = False,
    ) -> None:
        """Add rows up to n of them, reclaiming as many as are missing."""
        self._tier.room_for = table.namespace.base_hex
        if table.namespace.quota:
            n = self._quotas.within(table, n)
        # Freeing a slab of another size may need many evictions: the rest is done between puts.
        self._ended_left = RECLAIMED_PER_PUT + 4 * n
        while len(rows) < n:
            rows += tenant.allocator.alloc(table.stride, n - len(rows))
            if len(rows) < n and not (
                self._reclaim_spare(tenant, slot_class, n - len(rows), rows)
                or (not only_spare and self._reclaim(tenant, slot_class, n - len(rows), rows))
            ):
                break
        self._tier.room_for = ""

    def _reclaim_spare(
        self, tenant: Tenant, slot_class: SlotClass, n: int, rows: list[int]
    ) -> bool:
        """The first steps of `_reclaim`, which take nothing that others would miss: blocks of ended epochs, as many as
        one put can afford; this class's secondary replicas; its expendable blocks.
        """
        self._ledger.settle()
        if self._ended and self._ended_left > 0:
            gone = self._ended.reclaim(n, tenant, slot_class.stride)
            self._ended_left -= gone
            if gone:
                return True
        if len(slot_class.secondary):
            evicted, reused = self._eviction.replace(
                tenant, slot_class, slot_class.secondary.take, n
            )
            if evicted:
                self._counters.evicted_secondary += evicted
                rows += reused
                return True
        policy = slot_class.policy
        if policy.expendable:

            def take(count: int) -> Sequence[Any]:
                """Those that are held make no way for ordinary ones."""
                expendable = min(count, policy.expendable)
                return policy.take(expendable) if expendable else ()

            evicted, reused = self._eviction.replace(tenant, slot_class, take, n, Reason.SUPERSEDED)
            self._counters.evicted_expendable += evicted
            if evicted:
                rows += reused
                return True
        return False

    def _reclaim(self, tenant: Tenant, slot_class: SlotClass, n: int, rows: list[int]) -> bool:
        """Make room for up to n slots of the class, at least one; False if nothing can be evicted.

        rows: gets those that are reserved already; the others are free.

        In order, after `_reclaim_spare`: a slab of another class that is much colder; this class's own victims; a slab of
        another class whatever its age; this class's soft pins; a slab of another class, soft pins included.
        """
        several = len(tenant.classes) > 1
        if several and self._steal_colder_slab(tenant, slot_class):
            return True
        evicted, reused = self._eviction.replace(tenant, slot_class, slot_class.policy.take, n)
        if evicted:
            rows += reused
            return True
        if several and self._steal_any_slab(tenant, slot_class, spare_soft_pins=True):
            return True
        if self._eviction.evict_soft(tenant, slot_class, None, n):
            return True
        if several and self._steal_any_slab(tenant, slot_class, spare_soft_pins=False):
            return True
        return bool(self._ended and self._ended.reclaim(n, tenant, slot_class.stride))

    # ---- slabs of other sizes -----------------------------------------------------------------------

    def _steal_colder_slab(self, tenant: Tenant, slot_class: SlotClass) -> bool:
        """Empty a slab of another class, if that class's next victim is much colder than this class's.

        "Much" is twice as long unused, so that two classes do not take the same slab from each other in turns.
        If this class has no victim of its own, any age will do, and the coldest goes first.
        """
        own: Any = slot_class.policy.peek()
        age = -1 if own is None else self._ledger.tick - own.used
        donors: list[tuple[int, SlotClass]] = []
        for other in tenant.classes.values():
            if other is not slot_class:
                coldest: Any = other.secondary.peek() or other.policy.peek()
                if coldest is not None and self._ledger.tick - coldest.used > 2 * age + 1:
                    donors.append((coldest.used, other))
        donors.sort(key=lambda donor: donor[0])
        return any(self._empty_coldest_slab(tenant, donor, slot_class) for _, donor in donors)

    def _empty_coldest_slab(self, tenant: Tenant, donor: SlotClass, taker: SlotClass) -> bool:
        """Give the taker a slab with one of the donor's next victims and without leased or pinned blocks."""
        allocator = tenant.allocator
        tried: set[int] = set()
        tries = self._limits.steal_tries
        cold: Any
        for cold in donor.secondary.coldest(tries) or donor.policy.coldest(tries):
            slab = allocator.slab_of(donor.stride, cold.row)
            if slab in tried or not self._can_go(tenant, slab):
                tried.add(slab)
                continue
            tried.add(slab)
            run = allocator.victims_with(taker.stride, slab)
            if run and all(self._can_go(tenant, s) for s in run if s != slab):
                self._empty_run(tenant, run)
                return True
        return False

    def _can_go(self, tenant: Tenant, slab: int) -> bool:
        """Whether all used slots of a slab are blocks without leases and pins."""
        allocator = tenant.allocator
        held = self._held_in(tenant.classes[allocator.owner(slab)], allocator, slab)
        return len(held) == allocator.used_in_slab(slab) and not any(
            block.leases or block.pin != PIN_NONE for block in held
        )

    def _steal_any_slab(
        self, tenant: Tenant, slot_class: SlotClass, *, spare_soft_pins: bool
    ) -> bool:
        """Empty some slab of another class that is not held. Costs O(leased blocks + slabs).

        Not retried before anything was released: puts into a fully held pool fail quickly.
        """
        if slot_class.stuck_at.get(spare_soft_pins) == self._slots.releases:
            return False
        allocator = tenant.allocator
        busy = {allocator.slab_of(block.table.stride, block.row) for block in self._kept}
        for holder in tenant.holders.values():
            for reservation in holder.reservations.values():
                stride = reservation.table.stride
                busy.update(allocator.slab_of(stride, row) for row in reservation.open_rows)
            for stride, granted in holder.granted.items():
                busy.update(allocator.slab_of(stride, row) for row in granted)
            for lease in holder.leases.values():
                for _, blocks in lease.parts.values():
                    for block in blocks:
                        busy.add(allocator.slab_of(block.table.stride, block.row))
        busy.update(tenant.pinned[PIN_HARD])
        if spare_soft_pins:
            busy.update(tenant.pinned[PIN_SOFT])
        for run in allocator.victims(slot_class.stride):
            if busy.isdisjoint(run):
                self._empty_run(tenant, run)
                return True
        if not self._kept:  # with the put's own blocks it may go on
            slot_class.stuck_at[spare_soft_pins] = self._slots.releases
        return False

    def _empty_run(self, tenant: Tenant, run: Iterable[int]) -> None:
        """Empty the slabs that together make room for one extent of another class."""
        for slab in run:
            self._empty_slab(tenant, tenant.classes[tenant.allocator.owner(slab)], slab)

    @staticmethod
    def _held_in(donor: SlotClass, allocator: SlabAllocator, slab: int) -> list[Block]:
        rows = allocator.rows_in_slab(slab)
        return donor.by_row.between(rows.start, rows.stop)

    def _empty_slab(self, tenant: Tenant, donor: SlotClass, slab: int) -> None:
        """Evict all blocks of a slab, none of which is leased or reserved, and free it for any class."""
        allocator = tenant.allocator
        held = self._held_in(donor, allocator, slab)
        self._counters.evicted_secondary += sum(block.secondary for block in held)
        self._slots.releases += 1
        for block in donor.discard_all(held):
            self._counters.evicted_soft_pins += block.pin == PIN_SOFT
            self._slots.take_out(block)
        self._eviction.forget(held)
        rows = allocator.rows_in_slab(slab)
        donor.by_row.empty(rows.start, rows.stop)
        allocator.reclaim_slab(slab, len(held))
        self._counters.evicted += len(held)
        tenant.evicted += len(held)
        self._counters.slabs_reclaimed += 1

"""What lies where in a node's segments, and who goes when there is no room.

The half of the rules that knows of slots: `Node` adds the events. The journal is here too: an answer
needs a decision, not its bookkeeping, which is done when the answers are on their way (`settle`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

from kvpool.daemon.ages import Ages
from kvpool.daemon.awaited import Awaited
from kvpool.daemon.blocks import (
    PIN_HARD,
    PIN_NONE,
    PIN_SOFT,
    Block,
    Counters,
    Limits,
    NamespaceState,
    PartTable,
    SlotClass,
    Tenant,
)
from kvpool.daemon.divided import Divided
from kvpool.storage.eviction import EvictionPolicy
from kvpool.storage.slab import SlabAllocator
from kvpool.types import split_keys

PUT, READ, LEASED = range(3)  # what the journal tells of
GARBAGE_PER_PUT = 1024  # blocks of ended epochs: about 4 ms
QUOTA_PER_PUT = 1024  # blocks beyond its own, where a namespace holds more than its quota
ANCESTORS_PER_BLOCK = 32  # refreshed in the policy when a block is put behind them
VICTIMS_MAX = 4096  # batches of evicted blocks whose age nobody has asked for yet


class Origin(NamedTuple):
    """What is known of new blocks beside their bytes: fields of `Block`."""

    secondary: bool = False
    hops: int = 0
    copies: int = 0
    depths: Sequence[int] = ()


OWN = Origin()


class Space:
    """Slots, candidates for eviction, and the journal of a node. Not thread-safe."""

    def __init__(self, make_policy: Callable[[int], EvictionPolicy], limits: Limits) -> None:
        self.limits = limits
        self.counters = Counters()
        self._make_policy = make_policy
        self._tick = 0
        self._changes = 0  # counts what may let a slab go that could not go before
        self._journal: list[tuple[int, PartTable, Any]] = []
        self._changed: list[tuple[NamespaceState, Sequence[bytes]]] | None = None
        self._notify: Callable[[], object] = lambda: None
        self.awaited = Awaited(limits.waiters_max, limits.waiters_per_peer_max)
        self.ages = Ages()  # of ticks; whoever has a clock notes them
        self._classes: list[SlotClass] = []  # of all tenants, oldest first; never shorter
        self._garbage_left = 0  # blocks of ended epochs that the put under way may give back still
        self._garbage: dict[PartTable, None] = {}  # tables with blocks of an ended epoch
        self._quotas: dict[NamespaceState, None] = {}  # living namespaces that have one
        self._victims: list[tuple[int, int]] = []  # see `take_victims`

    # ---- the journal -------------------------------------------------------------------------------

    def settle(self) -> bool:
        """Catch up with the books on what was put and read; whether there was anything.

        An answer needs a decision, not its bookkeeping: that is written to a journal, and done here
        when the answers are on their way. Whatever depends on it settles first by itself.
        """
        journal = self._journal
        if not journal:
            return False
        self._journal = []
        for kind, table, what in journal:
            slot_class = table.namespace.tenant.classes[table.stride]
            if kind == PUT:
                self._enter(slot_class, table, *what)
                continue
            blocks, tick = what
            if kind == LEASED:
                for block in blocks:
                    block.leases += 1
                    block.used = tick
            else:
                for block in blocks:
                    block.used = tick
            slot_class.touch(blocks)
        return True

    def _enter(
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
        """New blocks into their table. Built by C loops: this runs for all that is ever put."""
        sums = split_keys(checksums)
        ticks = repeat(tick)
        depths = origin.depths or self._depths(table, keys, parents)
        new = list(map(Block, repeat(table), keys, rows, sums, parents, depths, ticks, ticks))
        table.blocks.update(zip(keys, new, strict=True))
        by_row = slot_class.by_row
        for row, block in zip(rows, new, strict=True):
            by_row[row] = block
        if origin[:3] == OWN[:3]:
            slot_class.policy.insert(new)
        else:
            for block in new:
                block.secondary, block.hops, block.copies = origin[:3]
            slot_class.insert(new)
        self._refresh_ancestors(slot_class, new)
        self._tell(table.namespace, keys)
        if self.awaited:
            self.awaited.came(table.namespace.directory_digest, keys)

    @staticmethod
    def _depths(table: PartTable, keys: Sequence[bytes], parents: Sequence[bytes]) -> Iterable[int]:
        """How many blocks come before each in its chain, as far as they are here."""
        known = table.blocks.get
        before = known(parents[0])
        first = 0 if before is None else before.depth + 1
        # Mostly a batch is one chain, which Python sees quickly: these are the same objects.
        if len(keys) == 1 or tuple(parents[1:]) == tuple(keys[:-1]):
            return range(first, first + len(keys))
        depths: dict[bytes, int] = {}
        for key, parent in zip(keys, parents, strict=True):
            before = known(parent)
            depths[key] = depths.get(parent, -1 if before is None else before.depth) + 1
        return depths.values()

    def _tell(self, namespace: NamespaceState, keys: Sequence[bytes]) -> None:
        """What is here of these blocks has changed."""
        changed = self._changed
        if changed is not None:
            if not changed:
                self._notify()
            changed.append((namespace, keys))

    @staticmethod
    def _refresh_ancestors(slot_class: SlotClass, blocks: Sequence[Block]) -> None:
        """Queue what precedes these in their chain behind them again, or it would be evicted first.

        A prefill in chunks puts the head of a chain long before its tail. So many ancestors as keep
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

    # ---- slots and candidates ---------------------------------------------------------------------

    def _put_in(self, blocks: Sequence[Block], *, first: bool = False) -> None:
        """Make blocks of one table candidates for eviction, as their pins say. first: the next ones."""
        self.settle()
        plain = [block for block in blocks if block.pin == PIN_NONE]
        if plain:
            table = plain[0].table
            slot_class = table.namespace.tenant.classes[table.stride]
            (slot_class.put_back if first else slot_class.insert)(plain)
        if len(plain) != len(blocks):
            for block in reversed(blocks) if first else blocks:
                if block.pin == PIN_SOFT:
                    classes = block.table.namespace.tenant.classes
                    classes[block.table.stride].add_soft(block, first=first)

    def _take_out(self, block: Block) -> None:
        """The reverse: no candidate any more, no pin, in no quota."""
        self._changes += 1
        self.settle()
        table = block.table
        tenant = table.namespace.tenant
        if block.parked >= 0:
            block.parked = -1
        elif block.pin == PIN_NONE:
            tenant.classes[table.stride].discard(block)
        elif block.pin == PIN_SOFT:
            tenant.classes[table.stride].drop_soft(block)
        if block.pin == PIN_SOFT:
            table.soft_bytes -= table.stride
        elif block.pin == PIN_HARD:
            del tenant.hard[block]
            table.hard_bytes -= table.stride
        block.pin = PIN_NONE

    def _drop(self, block: Block) -> None:
        """Take a block out of its table, and part with it."""
        del block.table.blocks[block.key]
        self._part_with(block)

    def _drop_all(self, blocks: Iterable[Block]) -> None:
        """Drop each: the same, told of and freed together."""
        self._changes += 1
        self.settle()
        by_table: dict[PartTable, list[Block]] = {}
        for block in blocks:
            by_table.setdefault(block.table, []).append(block)
        for table, some in by_table.items():
            tenant = table.namespace.tenant
            slot_class = tenant.classes[table.stride]
            rows = []
            for block in some:
                del table.blocks[block.key]
                if block.pin == PIN_NONE and block.parked < 0:
                    slot_class.discard(block)
                else:
                    self._take_out(block)
                if block.leases:
                    block.gone = True
                else:
                    slot_class.by_row[block.row] = None
                    rows.append(block.row)
            tenant.allocator.free(table.stride, rows)
            self._tell(table.namespace, [block.key for block in some])

    def _part_with(self, block: Block) -> None:
        """It is in no table any more. Its slot is free now, or when its last lease ends."""
        self._tell(block.table.namespace, (block.key,))
        self._take_out(block)
        if block.leases:
            block.gone = True
        else:
            self._free(block)

    def _free(self, block: Block) -> None:
        table = block.table
        tenant = table.namespace.tenant
        tenant.classes[table.stride].by_row[block.row] = None
        tenant.allocator.free(table.stride, [block.row])

    def _allocate(self, tenant: Tenant, table: PartTable, n: int) -> list[int]:
        """Up to n rows, reclaiming as many as are missing."""
        allocator = tenant.allocator
        stride = table.stride
        if n and table.namespace.quota:
            n = self._within_quota(table, n)
        slot_class = self._class_of(tenant, stride)
        rows = allocator.alloc(stride, n)
        # Of other sizes, very many may have to go before a slab is free: the rest is done beside the puts.
        self._garbage_left = GARBAGE_PER_PUT + 4 * n
        while len(rows) < n and self._reclaim(tenant, slot_class, n - len(rows)):
            rows += allocator.alloc(stride, n - len(rows))
        if rows:
            slot_class.reach(max(rows))
        return rows

    def _class_of(self, tenant: Tenant, stride: int) -> SlotClass:
        """The tenant's slots of this stride; made if there are none yet."""
        slot_class = tenant.classes.get(stride)
        if slot_class is None:
            policy = self._make_policy(tenant.allocator.capacity(stride))
            slot_class = tenant.classes[stride] = SlotClass(stride, policy)
            self._classes.append(slot_class)
        return slot_class

    def _reclaim(self, tenant: Tenant, slot_class: SlotClass, n: int) -> bool:
        """Make room for up to n slots of the class, at least one; False when nothing can go.

        In order: what is left of ended epochs, as much as one put can afford; this class's copies that others keep; a slab of
        another class that is much colder; this class's own victims; a slab of another class whatever
        its age; this class's soft pins; a slab of another class, soft pins included.
        """
        self.settle()
        if self._garbage and self._garbage_left > 0:
            gone = self.reclaim_garbage(n, tenant, slot_class.stride)
            self._garbage_left -= gone
            if gone:
                return True
        evicted = self._evict(tenant, slot_class, slot_class.secondary.pop, n)
        if evicted:
            self.counters.evicted_secondary += evicted
            return True
        several = len(tenant.classes) > 1
        if several and self._steal_colder_slab(tenant, slot_class):
            return True
        if self._evict(tenant, slot_class, slot_class.policy.pop, n):
            return True
        if several and self._steal_any_slab(tenant, slot_class, spare_soft_pins=True):
            return True
        if self._evict_soft(tenant, slot_class, slot_class.soft, n):
            return True
        if several and self._steal_any_slab(tenant, slot_class, spare_soft_pins=False):
            return True
        return bool(self._garbage and self.reclaim_garbage(n, tenant, slot_class.stride))

    def _evict_soft(
        self, tenant: Tenant, slot_class: SlotClass, soft: OrderedDict[Block, None], n: int
    ) -> int:
        """Up to n of the oldest soft pins, freed; how many. Leased ones are set aside."""
        rows: list[int] = []
        while len(rows) < n and soft:
            block = next(iter(soft))
            slot_class.drop_soft(block)
            if block.leases:
                block.parked = block.used
                continue
            table = block.table
            table.soft_bytes -= table.stride
            table.forget(block)
            self._tell(table.namespace, (block.key,))
            slot_class.by_row[block.row] = None
            rows.append(block.row)
            self.counters.evicted_secondary += block.secondary
        self.counters.evicted += len(rows)
        self.counters.evicted_soft_pins += len(rows)
        if rows:
            tenant.allocator.free(slot_class.stride, rows)
        return len(rows)

    # ---- quotas ------------------------------------------------------------------------------------

    def set_quota(self, namespace: NamespaceState, nbytes: int) -> None:
        """Bytes that a namespace may hold here from now on; 0: as many as its tenant.

        What is too much goes bit by bit: with its puts, and by `tend_quotas`.
        """
        if nbytes == namespace.quota:
            return
        self.settle()
        namespace.quota = nbytes
        if not nbytes:
            self._quotas.pop(namespace, None)
            return
        self._quotas[namespace] = None
        self._divide(namespace, namespace.tables)

    def _divide(self, namespace: NamespaceState, tables: Iterable[PartTable]) -> None:
        """Have orders of its own for these tables of a namespace with a quota, and its ended epochs."""
        ended = [
            table
            for table in self._garbage
            if table.namespace.tenant is namespace.tenant and table.namespace.base == namespace.base
        ]
        blocks: dict[int, list[Block]] = {}
        for table in (*ended, *tables):
            held = blocks.setdefault(table.stride, [])
            held += table.garbage.values()
            held += table.blocks.values()
        for stride, held in blocks.items():
            slot_class = self._class_of(namespace.tenant, stride)
            capacity = max(1, namespace.quota // stride)
            slot_class.divide(namespace.base, capacity, held, self._make_policy)

    def tend_quotas(self, n: int) -> bool:
        """Do up to n blocks' worth of what quotas ask for; whether there may be more to do at once.

        Needed after quotas were set, and where leases, pins or a restart have left too much.
        """
        self.settle()
        left = n
        for namespace in self._quotas:
            for table in namespace.tables:
                for order in namespace.tenant.classes[table.stride].orders:
                    left -= order.move(namespace.base, left) if left > 0 else 0
            over = namespace.held_bytes - namespace.quota
            if over > 0 and left > 0:
                self._reclaim_ended(namespace)
                left -= self._evict_own(namespace, over, left)
            if left <= 0:
                return True
        return False

    def _within_quota(self, table: PartTable, n: int) -> int:
        """How many new slots of a table its namespace may have, up to n. Its own coldest make room.

        Where more than its quota is left even so, as when that was lowered, or where what went was left of an
        ended epoch, which is in no quota, it gets no more than went.
        """
        self.settle()
        namespace, stride = table.namespace, table.stride
        held = namespace.held_bytes
        over = held + n * stride - namespace.quota
        if over <= 0:
            return n
        self._reclaim_ended(namespace)
        allocator = namespace.tenant.allocator
        used = allocator.bytes_used
        # As many as one put can afford, but at least as many bytes as it asks for.
        smallest = min(other.stride for other in namespace.tables)
        most = max(n + QUOTA_PER_PUT, n * stride // smallest)
        self._evict_own(namespace, over, most, table)
        room = namespace.quota - namespace.held_bytes
        return min(n, max(room, used - allocator.bytes_used) // stride)

    def _reclaim_ended(self, namespace: NamespaceState) -> None:
        if self._garbage:
            stride = namespace.tables[0].stride
            self.reclaim_garbage(GARBAGE_PER_PUT, namespace.tenant, stride)

    def _evict_own(
        self, namespace: NamespaceState, nbytes: int, most: int, first: PartTable | None = None
    ) -> int:
        """Evict about so many bytes of a namespace, by at most so many blocks; how many went.

        Those of `first` go before others, since their slots are what is needed. Copies that others keep go
        before what its own policy says, and soft pins at last.
        """
        tenant, classes = namespace.tenant, namespace.tenant.classes
        tables = sorted(namespace.tables, key=lambda table: table is not first)
        ways: list[tuple[int, Callable[[int], int]]] = [
            (stride, partial(self._evict_part, tenant, classes[stride], order, namespace.base))
            for stride in dict.fromkeys(table.stride for table in tables)
            for order in classes[stride].orders
        ]
        ways += [
            (table.stride, partial(self._evict_soft, tenant, classes[table.stride], table.soft))
            for table in tables
        ]
        goal = namespace.held_bytes - nbytes
        gone = 0
        for stride, evict in ways:
            # Several times where there is still something of an ended epoch, which comes first.
            while gone < most and (over := namespace.held_bytes - goal) > 0:
                evicted = evict(min(most - gone, -(-over // stride)))
                gone += evicted
                if not evicted:
                    break
        self._changes += gone > 0  # slots of other sizes are free now
        self.counters.evicted_by_quota += gone
        return gone

    def _evict_part(
        self, tenant: Tenant, slot_class: SlotClass, order: Divided, base: bytes, n: int
    ) -> int:
        evicted = self._evict(tenant, slot_class, partial(order.pop_of, base), n)
        if order is slot_class.secondary:
            self.counters.evicted_secondary += evicted
        return evicted

    def _evict(self, tenant: Tenant, slot_class: SlotClass, pop: Callable[[], Any], n: int) -> int:
        """Up to n of a policy's next victims, freed; how many. Leased ones are set aside."""
        rows: list[int] = []
        by_row = slot_class.by_row
        changed = self._changed
        told = bool(changed)
        while len(rows) < n:
            block: Any = pop()
            if block is None:
                break
            if block.leases:
                block.parked = block.used
                continue
            table = block.table
            table.forget(block)
            if changed is not None:
                changed.append((table.namespace, (block.key,)))
            row = block.row
            by_row[row] = None
            rows.append(row)
        if changed and not told:
            self._notify()
        self.counters.evicted += len(rows)
        if rows:
            tenant.allocator.free(slot_class.stride, rows)
            if block is not None and len(self._victims) < VICTIMS_MAX:
                self._victims.append((block.used, len(rows)))
        return len(rows)

    def take_victims(self) -> list[tuple[int, int]]:
        """Batches that were evicted since the last call: the last use of one of them, as a tick, and how many.

        A sample: what went beyond `VICTIMS_MAX`, with its slab, or as a soft pin is not in it.
        """
        victims, self._victims = self._victims, []
        return victims

    @property
    def has_garbage(self) -> bool:
        """Whether there are slots of ended epochs to be given back."""
        return bool(self._garbage)

    def reclaim_garbage(self, n: int, tenant: Tenant | None = None, stride: int = 0) -> int:
        """Free up to n blocks of ended epochs, of one tenant or all; how many went. O(n + tables).

        Those of one stride come first. Slots that are still leased come back with their lease.
        """
        gone = 0
        for table in sorted(self._garbage, key=lambda table: table.stride != stride):
            if tenant is not None and table.namespace.tenant is not tenant:
                continue
            while table.garbage and gone < n:
                # From the end: a dict that is emptied from its beginning is searched longer each time.
                self._part_with(table.garbage.popitem()[1])
                gone += 1
            if table.garbage:
                break
            table.garbage = {}  # the emptied one keeps its memory
            del self._garbage[table]
        self.counters.reclaimed_blocks += gone
        return gone

    def _steal_colder_slab(self, tenant: Tenant, slot_class: SlotClass) -> bool:
        """Empty a slab of another class, if that class's next victim is much colder than our own.

        "Much" is twice as long unused, lest two classes take the same slab from each other in turns.
        Where we have no victim of our own, any age will do, and the coldest goes first.
        """
        own: Any = slot_class.policy.peek()
        age = -1 if own is None else self._tick - own.used
        donors: list[tuple[int, SlotClass]] = []
        for other in tenant.classes.values():
            if other is not slot_class:
                coldest: Any = other.secondary.peek() or other.policy.peek()
                if coldest is not None and self._tick - coldest.used > 2 * age + 1:
                    donors.append((coldest.used, other))
        donors.sort(key=lambda donor: donor[0])
        return any(self._empty_coldest_slab(tenant, donor, slot_class) for _, donor in donors)

    def _empty_coldest_slab(self, tenant: Tenant, donor: SlotClass, taker: SlotClass) -> bool:
        """Give the taker a slab with one of the donor's next victims and nothing that must stay."""
        allocator = tenant.allocator
        tried: set[int] = set()
        tries = self.limits.steal_tries
        cold: Any
        for cold in donor.secondary.coldest(tries) or donor.policy.coldest(tries):
            slab = allocator.slab_of(donor.stride, cold.row)
            if slab in tried or not self._can_go(tenant, slab):
                tried.add(slab)
                continue
            tried.add(slab)
            for run in allocator.victims(taker.stride):
                if slab in run and all(self._can_go(tenant, s) for s in run if s != slab):
                    self._empty_run(tenant, run)
                    return True
        return False

    def _can_go(self, tenant: Tenant, slab: int) -> bool:
        """Whether all that is in use of a slab are blocks without leases and pins."""
        allocator = tenant.allocator
        held = self._held_in(tenant.classes[allocator.owner(slab)], allocator, slab)
        return len(held) == allocator.used_in_slab(slab) and not any(
            block.leases or block.pin != PIN_NONE for block in held
        )

    def _steal_any_slab(
        self, tenant: Tenant, slot_class: SlotClass, *, spare_soft_pins: bool
    ) -> bool:
        """Empty some slab of another class that nothing holds. Costs O(leased blocks + slabs).

        Not tried again before anything was released: puts into a pool that is held fail quickly.
        """
        if slot_class.stuck_at.get(spare_soft_pins) == self._changes:
            return False
        allocator = tenant.allocator
        busy: set[int] = set()
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
                for reservation in lease.reading:
                    stride = reservation.table.stride
                    busy.update(allocator.slab_of(stride, row) for row in reservation.orphans)
        kept: list[Iterable[Block]] = [tenant.hard]
        if spare_soft_pins:
            kept += [other.soft for other in tenant.classes.values()]
        for pinned in kept:
            busy.update(allocator.slab_of(block.table.stride, block.row) for block in pinned)
        for run in allocator.victims(slot_class.stride):
            if busy.isdisjoint(run):
                self._empty_run(tenant, run)
                return True
        slot_class.stuck_at[spare_soft_pins] = self._changes
        return False

    def _empty_run(self, tenant: Tenant, run: Iterable[int]) -> None:
        """Empty the slabs that together make room for one extent of another class."""
        for slab in run:
            self._empty_slab(tenant, tenant.classes[tenant.allocator.owner(slab)], slab)

    @staticmethod
    def _held_in(donor: SlotClass, allocator: SlabAllocator, slab: int) -> list[Block]:
        by_row = donor.by_row
        rows = allocator.rows_in_slab(slab)
        return [
            block
            for row in range(rows.start, min(rows.stop, len(by_row)))
            if (block := by_row[row]) is not None
        ]

    def _empty_slab(self, tenant: Tenant, donor: SlotClass, slab: int) -> None:
        """Evict all blocks of a slab, none of which is leased or reserved, and free it for any class."""
        allocator = tenant.allocator
        held = self._held_in(donor, allocator, slab)
        self.counters.evicted_soft_pins += sum(block.pin == PIN_SOFT for block in held)
        self.counters.evicted_secondary += sum(block.secondary for block in held)
        for block in held:
            block.table.forget(block)
            self._tell(block.table.namespace, (block.key,))
            self._take_out(block)
            donor.by_row[block.row] = None
        allocator.free(donor.stride, [block.row for block in held])
        allocator.reclaim_slab(slab)
        self.counters.evicted += len(held)
        self.counters.slabs_reclaimed += 1

"""The rules of one node: what may happen to a block. No I/O, no clock, no randomness.

Every method is one event: it checks, changes the state, and returns what its caller must tell or do.
Times are seconds of a monotonic clock, given by the caller. One thread only.

A slot is in one of five states, and these are all ways between them:

    free ──reserve──▶ reserved ──commit──▶ committed ──acquire──▶ leased
                         │                   │    ▲                 │
                         │ abort, death      │    └── last lease ───┤
                         ▼                   │        ends          │ removed while leased
                        free ◀───evicted─────┘                      ▼
                         ▲                                       evicting
                         └──────────── last lease ends ─────────────┘

Slots may also be *granted*: reserved without keys, so that a small put costs its writer one exchange with
the daemon instead of two. A granted slot is a reserved one in all else.

A block is found (match, contains, acquire) from commit until it is evicted or removed, and never in
any other state. Three rules carry the promises:

1. A reserved slot is written by its reserver, whenever it likes. So it comes back only when that one
   aborts, commits, or is dead as a process: never by a deadline, never because a socket closed.
2. A leased slot is read by its holders, until they release, until its deadline (readers check the clock
   after their copy), or until they are dead as processes.
3. Space for a put is reclaimed in the put: the eviction policy of the slot class gives one victim after
   the other, each in O(1). Blocks under a lease that come up as victims are set aside and return to the
   policy with their last lease, so each lease costs at most one such step: as the youngest, or, where
   they were only held in place meanwhile, as the next victims.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvpool.daemon.blocks import (
    PIN_HARD,
    PIN_KINDS,
    PIN_NONE,
    PIN_SOFT,
    Block,
    Counters,
    Holder,
    Lease,
    Limits,
    NamespaceState,
    PartTable,
    Reservation,
    SlotClass,
    Tenant,
)
from kvpool.daemon.space import LEASED, OWN, PUT, READ, Origin, Space
from kvpool.errors import (
    InvalidRequest,
    LimitExceeded,
    NamespaceMismatch,
    PoolFull,
    StaleEpoch,
    UnknownReservation,
)
from kvpool.placement.prefix import first_needed, needed, usable
from kvpool.storage.eviction import EvictionPolicy
from kvpool.storage.slab import SlabAllocator
from kvpool.types import CHECKSUM_BYTES, KEY_BYTES, PartSpec, split_keys
from kvpool.wire import NO_ROW

_WALK_ROWS = 1 << 40  # more than a class can have
EVICT_TOGETHER = 64  # of one size, before another look at which size has the coldest
EPOCHS_KEPT = 64  # ended epochs of a namespace that are remembered by name


class Place(NamedTuple):
    """Where it is decided what goes next. base: of a namespace that has a quota; empty: all others."""

    stride: int
    base: bytes = b""


class Cold(NamedTuple):
    """Blocks that go next at a place, in that order. free: the share of its space. held: its blocks."""

    place: Place
    free: float
    blocks: list[Block]
    held: int


class Writing(NamedTuple):
    """Neighbours among some keys that are being written: of one reservation, and how far.

    number: of the reservation. keys: how many. nbytes: of each slot, from its beginning.
    """

    number: int
    part: int
    first: int
    keys: int
    nbytes: int


class Node(Space):
    """All blocks of one daemon. Not thread-safe: the control process's event loop calls it."""

    def __init__(
        self,
        *,
        make_policy: Callable[[int], EvictionPolicy],
        limits: Limits | None = None,
        incarnation: str = "0",
    ) -> None:
        """make_policy: given the slots of a class, a fresh eviction policy for it."""
        super().__init__(make_policy, limits or Limits())
        self.incarnation = incarnation
        self.tenants: dict[str, Tenant] = {}
        self._own_holders: dict[tuple[str, str], Holder] = {}
        self._by_directory: dict[bytes, NamespaceState] = {}
        self._outdated: dict[tuple[str, bytes], NamespaceState] = {}  # for clients with old weights
        self._namespaces: list[NamespaceState] = []
        self._tables = 0
        self._leases: dict[str, Lease] = {}
        self._lease_count = 0
        self._writings = 0
        self._deadlines: list[tuple[float, str]] = []

    # ---- tenants, namespaces, holders ------------------------------------------------------------

    def add_tenant(
        self,
        name: str,
        segment: int,
        size: int,
        slab_bytes: int | None = None,
        allocator: SlabAllocator | None = None,
    ) -> Tenant:
        """Give a tenant its segment. The bytes are the caller's business.

        allocator: of the segment, where its owner wants to know more than the rules tell.
        """
        if name in self.tenants:
            raise InvalidRequest(f"tenant {name!r} has a segment already")
        tenant = Tenant(name, segment, allocator or SlabAllocator(size, slab_bytes=slab_bytes))
        self.tenants[name] = tenant
        return tenant

    def add_holder(self, tenant: str, instance: str, name: str = "") -> Holder:
        """Somebody who may reserve and lease. Call `holder_died` when its process is dead."""
        if tenant not in self.tenants:
            raise InvalidRequest(f"there is no tenant {tenant!r} on this node")
        holder = Holder(self.tenants[tenant], instance, name)
        holder.tenant.holders[id(holder)] = holder
        return holder

    def own_holder(self, tenant: str, name: str) -> Holder:
        """A part of this daemon that reserves and leases, as `name` says; made when it is first asked for."""
        holder = self._own_holders.get((tenant, name))
        if holder is None:
            holder = self._own_holders[tenant, name] = self.add_holder(tenant, "", name)
        return holder

    def open_namespace(
        self, tenant: Tenant, digest: bytes, fields: bytes, parts: Sequence[PartSpec]
    ) -> NamespaceState:
        """The namespace with these fields in its present epoch, made if new. digest: of the fields.

        Its number is good for this incarnation. Raises `NamespaceMismatch` if it is known with other
        parts.
        """
        epochs = tenant.epochs.get(digest)
        if epochs:
            known = epochs[-1]
            if known.parts != tuple(parts):
                raise NamespaceMismatch(mismatch(known.parts, tuple(parts), digest))
            return known
        if len(tenant.epochs) >= self.limits.namespaces_per_tenant:
            raise LimitExceeded(
                f"tenant {tenant.name!r} has {len(tenant.epochs)} namespaces, the limit"
            )
        for spec in parts:
            tenant.allocator.stride_of(
                spec.nbytes
            )  # refuses what does not fit, before anything changes
        return self._begin_epoch(self._state(tenant, digest, fields, parts, 0, 0))

    def _state(
        self,
        tenant: Tenant,
        base: bytes,
        fields: bytes,
        parts: Sequence[PartSpec],
        epoch: int,
        generation: int,
    ) -> NamespaceState:
        """A state with a number and empty tables, which nobody finds yet."""
        number = len(self._namespaces)
        namespace = NamespaceState(tenant, base, fields, parts, number, epoch, generation)
        for part, spec in enumerate(parts):
            stride = tenant.allocator.stride_of(spec.nbytes)
            namespace.tables.append(PartTable(namespace, part, spec, self._tables, stride))
            self._tables += 1
        self._namespaces.append(namespace)
        return namespace

    def add_table(self, namespace: NamespaceState, spec: PartSpec) -> PartTable:
        """One more table of a namespace in this epoch, behind those of its parts.

        For owners who keep blocks of a part in slots of several lengths: which table a block is in is
        their business. Raises `LimitExceeded` when the segment has no class for its slots.
        """
        stride = namespace.tenant.allocator.stride_of(spec.nbytes)
        table = PartTable(namespace, len(namespace.tables), spec, self._tables, stride)
        self._tables += 1
        namespace.tables.append(table)
        if namespace.quota:
            self._divide(namespace, [table])
        return table

    def _begin_epoch(self, namespace: NamespaceState) -> NamespaceState:
        tenant = namespace.tenant
        tenant.epochs.setdefault(namespace.base, []).append(namespace)
        tenant.namespaces[namespace.digest] = namespace
        self._by_directory[namespace.directory_digest] = namespace
        return namespace

    def as_opened(self, namespace: NamespaceState, generation: int) -> NamespaceState:
        """The state for a client whose weights are of this generation: the living one, or one that is out.

        For those who opened the namespace before this daemon started. Ahead of us they cannot be: learn
        of the new generation first (`set_epoch`).
        """
        living = self.living(namespace)
        if generation >= living.generation:
            return living
        out = self._outdated.get((living.tenant.name, living.base))
        if out is None:
            out = self._state(living.tenant, living.base, living.fields, living.parts, 0, -1)
            out.retired = True
            self._outdated[living.tenant.name, living.base] = out
        return out

    def set_epoch(
        self, namespace: NamespaceState, epoch: int, fence: int, generation: int | None = None
    ) -> NamespaceState:
        """A namespace is in this epoch now, in the whole cluster; the living state of it.

        generation: of the weights; unless given, a fence that is new to us counts as one more.

        All blocks of older epochs are misses from here on; their slots come back by and by
        (`reclaim_garbage`), and those under a lease when that ends. Their pins are in no quota any more.
        Reservations that are open are dropped at their commit. Clients that opened it in an epoch below
        `fence` find nothing and store nothing until they open it again; others go on in the new epoch.
        Epochs do not go back.
        """
        self.settle()
        tenant, base = namespace.tenant, namespace.base
        epochs = tenant.epochs[base]
        living = epochs[-1]
        if generation is None:
            generation = living.generation + (fence > tenant.fences.get(base, 0))
        tenant.fences[base] = max(fence, tenant.fences.get(base, 0))
        if epoch <= living.epoch:
            return living
        living.retired = True
        del tenant.namespaces[living.digest]
        for table in living.tables:
            table.garbage, table.blocks = table.blocks, {}
            if table.garbage:
                self._garbage[table] = None
        self.counters.epochs_ended += 1
        self.awaited.end(living.directory_digest)
        if len(epochs) > EPOCHS_KEPT:
            self._by_directory.pop(epochs.pop(0).directory_digest, None)
        generation = max(generation, living.generation)
        new = self._begin_epoch(
            self._state(tenant, base, living.fields, living.parts, epoch, generation)
        )
        new.settings, new.quota = living.settings, living.quota
        if living in self._quotas:
            del self._quotas[living]
            self._quotas[new] = None
        return new

    def living(self, namespace: NamespaceState) -> NamespaceState:
        """The same namespace in its present epoch."""
        return namespace.tenant.epochs[namespace.base][-1]

    def namespace(self, tenant: Tenant, number: int) -> NamespaceState:
        """The namespace with this number, for its own tenant only.

        When its epoch has ended, this is the one after it, unless a fence is in between.
        """
        if 0 <= number < len(self._namespaces):
            found = self._namespaces[number]
            if found.tenant is tenant:
                if found.retired and not found.fenced:
                    return self.living(found)
                return found
        raise InvalidRequest(
            f"namespace number {number} is not open here; open the namespace first"
        )

    # ---- put: reserve, commit, abort -----------------------------------------------------------

    def reserve(
        self,
        holder: Holder,
        namespace: NamespaceState,
        part: int,
        ticket: int,
        packed: bytes,
        parent: bytes = b"",
    ) -> tuple[int, bytes]:
        """Slots for those of the keys that are not here: (stride, rows as u32, `NO_ROW` if present).

        parent: the key before the first one in the prefix chain, if known.
        Rows cover a prefix of the keys: fewer than asked when leases, reservations or hard pins hold
        the rest of the space. Raises `PoolFull` when there is not even one.
        """
        self.settle()
        table = self._table(namespace, part)
        keys = split_keys(packed)
        _check_parent(parent)
        _check_alive(holder)
        _check_epoch(namespace)
        if not keys:
            raise InvalidRequest("a reservation of no keys")
        if ticket in holder.reservations:
            raise InvalidRequest(f"ticket {ticket} is in use; choose a new one per reservation")
        stride = table.stride
        blocks = table.blocks
        wanted: Sequence[int]
        if blocks.keys().isdisjoint(keys):
            wanted = range(len(keys))
        else:
            self._touch([block for key in keys if (block := blocks.get(key))])
            wanted = [i for i, key in enumerate(keys) if key not in blocks]
            if not wanted:
                return stride, array("I", [NO_ROW]).tobytes() * len(keys)
        bound = int(holder.tenant.allocator.size * self.limits.reserved_share_per_holder)
        # At least one, lest a block larger than the share could never be put.
        fit = max(not holder.reserved_bytes, (bound - holder.reserved_bytes) // stride)
        rows = self._allocate(holder.tenant, table, min(len(wanted), fit))
        if not rows:
            self.counters.refused_full += 1
            if fit == 0:
                raise LimitExceeded(
                    f"{holder.reserved_bytes >> 20} MiB are reserved and not committed by this "
                    f"client, the limit is {bound >> 20} MiB: commit or abort first"
                )
            where = f"tenant {holder.tenant.name!r}"
            if namespace.quota and namespace.held_bytes + stride > namespace.quota:
                where = f"a namespace whose quota here is {namespace.quota >> 20} MiB"
            raise PoolFull(
                f"no slot of {stride} bytes can be reclaimed for {where}: "
                f"leases, reservations and hard pins hold them all"
            )
        if len(rows) == len(keys):
            packed_rows = array("I", rows).tobytes()
            reserved = Reservation(table, wanted, keys, (parent, *keys[:-1]), rows)
        else:
            covered = len(keys) if len(rows) == len(wanted) else wanted[len(rows)]
            out = array("I", [NO_ROW]) * covered
            wanted = wanted[: len(rows)]
            for index, row in zip(wanted, rows, strict=True):
                out[index] = row
            packed_rows = out.tobytes()
            chain = (parent, *keys)
            parents = [chain[index] for index in wanted]
            reserved = Reservation(table, wanted, [keys[index] for index in wanted], parents, rows)
        holder.reservations[ticket] = reserved
        holder.reserved_bytes += stride * len(rows)
        table.reserved += len(rows)
        self.counters.reserved += len(rows)
        return stride, packed_rows

    def commit(
        self,
        holder: Holder,
        ticket: int,
        checksums: bytes,
        indices: Sequence[int] | None = None,
        origin: Origin = OWN,
    ) -> int:
        """Make reserved slots readable; the count of blocks that are new.

        checksums: 16 bytes for each row of the reservation, in order (with `indices`, for each of
        these). A block that somebody else committed meanwhile is kept; this copy's slot comes back. So
        do all slots when the namespace's epoch has ended meanwhile.
        Raises `UnknownReservation`, and changes nothing, for what this holder has not reserved.
        """
        self.settle()
        reservation = holder.reservations.get(ticket)
        if reservation is None:
            raise UnknownReservation(
                f"reservation {ticket} is not open: never made by this client, or settled before"
            )
        table = reservation.table
        keys: Sequence[bytes] = reservation.keys
        parents: Sequence[bytes] = reservation.parents
        rows: Sequence[int] = reservation.rows
        if indices is None and reservation.left is not None:
            indices = list(reservation.left)
        if indices is not None:
            at = reservation.positions(indices, ticket)
            keys = [reservation.keys[position] for position in at]
            parents = [reservation.parents[position] for position in at]
            rows = [reservation.rows[position] for position in at]
        if len(checksums) != CHECKSUM_BYTES * len(rows):
            raise InvalidRequest(
                f"{len(checksums)} bytes of checksums for {len(rows)} blocks: 16 each"
            )
        holder.reserved_bytes -= table.stride * len(rows)
        table.reserved -= len(rows)
        if indices is None or reservation.left is None or len(indices) == len(reservation.left):
            del holder.reservations[ticket]
        else:
            for index in indices:
                del reservation.left[index]
        self._stop_telling(reservation, keys, rows)
        if table.namespace.retired:
            self._free_reserved(reservation, rows)
            self.counters.aborted += len(rows)
            return 0
        if not table.blocks.keys().isdisjoint(keys) or len(set(keys)) != len(keys):
            keys, parents, rows, checksums, surplus = self._only_new(
                table, keys, parents, rows, checksums
            )
            origin = origin._replace(depths=())
            self._free_reserved(reservation, surplus)
        self._publish(table, keys, parents, rows, checksums, origin)
        if reservation.readers and keys:
            self.settle()
            blocks = [table.blocks[key] for key in keys]
            for lease in reservation.readers.values():
                _read_on(lease, table, blocks)
        return len(rows)

    def _publish(
        self,
        table: PartTable,
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        rows: Sequence[int],
        checksums: bytes,
        origin: Origin,
    ) -> None:
        """Slots that are whole become blocks, at the latest when anybody looks: see `settle`.

        The keys are new and differ from one another.
        """
        self._changes += 1
        if keys:
            self._tick += 1
            self._journal.append((PUT, table, (keys, parents, rows, checksums, self._tick, origin)))
            self.counters.committed += len(keys)
            self.counters.committed_bytes += len(keys) * table.spec.nbytes

    def abort(self, holder: Holder, ticket: int) -> None:
        """Give reserved slots back unwritten. The caller promises that nobody writes to them any more."""
        reservation = holder.reservations.pop(ticket, None)
        if reservation is None:
            return
        table = reservation.table
        rows = reservation.open_rows
        self._stop_telling(reservation, reservation.keys, reservation.rows)
        self._free_reserved(reservation, rows)
        holder.reserved_bytes -= table.stride * len(rows)
        table.reserved -= len(rows)
        self.counters.aborted += len(rows)

    def _free_reserved(self, reservation: Reservation, rows: Sequence[int]) -> None:
        """Nobody writes to these slots any more, and they are no blocks. They are free once no peer reads them."""
        if reservation.readers:
            reservation.orphans += rows
            return
        table = reservation.table
        table.namespace.tenant.allocator.free(table.stride, rows)
        self._changes += 1

    # ---- what peers read before the commit ------------------------------------------------------

    def written(self, holder: Holder, ticket: int, nbytes: int) -> None:
        """The first `nbytes` of each slot of a reservation are as they will be committed, and stay so.

        Says nothing of one that was settled before: such words may come late. Raises `InvalidRequest`.
        """
        reservation = holder.reservations.get(ticket)
        if reservation is None:
            return
        table = reservation.table
        if not 0 < nbytes <= table.spec.nbytes:
            raise InvalidRequest(f"{nbytes} bytes are written of a part of {table.spec.nbytes}")
        if nbytes <= reservation.written or table.namespace.retired:
            return
        if not reservation.number:
            self._writings += 1
            reservation.number = self._writings
        reservation.written = nbytes
        keys = reservation.keys
        positions = range(len(keys)) if reservation.left is None else reservation.left.values()
        for position in positions:
            row = reservation.rows[position]
            table.writing.setdefault(keys[position], (reservation, row))
        if self.awaited:
            self.awaited.wrote(table.namespace.directory_digest, keys)

    @staticmethod
    def _stop_telling(reservation: Reservation, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """These are settled: what peers get of them from now on is blocks, or nothing."""
        if not reservation.written:
            return
        writing = reservation.table.writing
        for key, row in zip(keys, rows, strict=True):
            if writing.get(key) == (reservation, row):
                del writing[key]

    def being_written(self, digest: bytes, keys: Sequence[bytes]) -> list[Writing]:
        """What of these keys is being written, and said to be: runs of neighbours of one reservation.

        digest: the namespace's directory digest.
        """
        namespace = self._by_directory.get(digest)
        found: list[Writing] = []
        for table in [] if namespace is None else namespace.tables:
            if not table.writing:
                continue
            last: Reservation | None = None
            first = 0
            for at, entry in enumerate((*map(table.writing.get, keys), None)):
                reservation = None if entry is None else entry[0]
                if reservation is last:
                    continue
                if last is not None:
                    run = Writing(last.number, table.part, first, at - first, last.written)
                    found.append(run)
                last, first = reservation, at
        return found

    def lend_written(
        self, holder: Holder, table: PartTable, keys: Sequence[bytes], stop: int
    ) -> tuple[str, dict[bytes, int]]:
        """Have the slots in which at least `stop` bytes of these keys are written stay until `release`.

        (token, rows); no token and no rows where there are none. Whatever becomes of the reservations, nobody
        else writes to these slots before.
        """
        rows: dict[bytes, int] = {}
        reading: dict[int, Reservation] = {}
        for key in keys:
            found = table.writing.get(key)
            if found is not None and found[0].written >= stop:
                reservation, rows[key] = found
                reading[reservation.number] = reservation
        if not rows:
            return "", rows
        _check_alive(holder)
        self._check_lease_count(holder)
        lease = self._new_lease(holder, len(rows))
        lease.reading = list(reading.values())
        for reservation in lease.reading:
            reservation.readers[lease.token] = lease
        return lease.token, rows

    # ---- put in one exchange: grant, store ------------------------------------------------------

    def grant(self, holder: Holder, namespace: NamespaceState, part: int, count: int) -> list[int]:
        """Up to `count` rows for parts of this size, without keys. None where the quota is used up."""
        table = self._table(namespace, part)
        _check_alive(holder)
        _check_epoch(namespace)
        tenant, stride = holder.tenant, table.stride
        room = min(
            self.limits.grant_bytes_per_holder - holder.granted_bytes,
            int(tenant.allocator.size * self.limits.grant_share) - tenant.granted_bytes,
        )
        if namespace.quota:  # its own blocks make room for what may never be used
            share = int(namespace.quota * self.limits.grant_share)
            room = min(room, share - holder.granted_bytes)
        rows = self._allocate(tenant, table, max(0, min(count, room // stride)))
        self._granted(holder, stride, len(rows))
        holder.granted.setdefault(stride, set()).update(rows)
        return rows

    def store(
        self,
        holder: Holder,
        namespace: NamespaceState,
        part: int,
        rows: Sequence[int],
        packed: bytes,
        checksums: bytes,
        parent: bytes = b"",
        origin: Origin = OWN,
    ) -> tuple[int, list[int]]:
        """Make granted slots readable under these keys: (blocks that are new, rows still granted).

        Raises `UnknownReservation`, and changes nothing, for rows that are not granted to this holder.
        """
        self.settle()
        table = self._table(namespace, part)
        keys: Sequence[bytes] = split_keys(packed)
        _check_parent(parent)
        _check_epoch(namespace)
        if not len(keys) == len(rows) or len(checksums) != CHECKSUM_BYTES * len(rows):
            raise InvalidRequest(
                f"{len(rows)} rows, {len(keys)} keys and {len(checksums)} bytes of checksums do not match"
            )
        granted = holder.granted.get(table.stride, set())
        if not granted.issuperset(rows) or len(set(rows)) != len(rows):
            raise UnknownReservation(
                "a slot that is not granted to this client, or was used before, is to be stored"
            )
        unused: list[int] = []
        parents: Sequence[bytes] = (parent, *keys[:-1])
        blocks = table.blocks
        if not blocks.keys().isdisjoint(keys) or len(set(keys)) != len(keys):
            keys, parents, rows, checksums, unused = self._only_new(
                table, keys, parents, rows, checksums
            )
            origin = origin._replace(depths=())
        if namespace.quota:
            self._within_quota(table, len(keys))  # granted slots are in no namespace's quota before
        granted.difference_update(rows)
        self._granted(holder, table.stride, -len(rows))
        self._publish(table, keys, parents, rows, checksums, origin)
        return len(rows), unused

    def _only_new(
        self,
        table: PartTable,
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        rows: Sequence[int],
        checksums: bytes,
    ) -> tuple[Sequence[bytes], Sequence[bytes], Sequence[int], bytes, list[int]]:
        """The same without blocks that are here or named twice, and the rows that are left over."""
        blocks = table.blocks
        here = [block for key in keys if (block := blocks.get(key))]
        if here:
            self._touch(here)
        first: dict[bytes, int] = {}
        for index, key in enumerate(keys):
            if key not in blocks:
                first.setdefault(key, index)
        chosen = list(first.values())
        self.counters.duplicates += len(keys) - len(chosen)
        sums = split_keys(checksums)
        unused = set(range(len(keys))).difference(chosen)
        return (
            list(first),
            [parents[index] for index in chosen],
            [rows[index] for index in chosen],
            b"".join([sums[index] for index in chosen]),
            [rows[index] for index in sorted(unused)],
        )

    def give_back(self, holder: Holder, stride: int, rows: Sequence[int]) -> None:
        """Granted slots that nobody writes to any more. Those that were stored meanwhile stay so."""
        granted = holder.granted.get(stride, set())
        back = list(granted.intersection(rows))
        if back:
            granted.difference_update(back)
            self._granted(holder, stride, -len(back))
            holder.tenant.allocator.free(stride, back)
            self._changes += 1

    def give_all_back(self, holder: Holder) -> None:
        """All slots granted to a holder, also those it has not heard of: nobody writes to them."""
        holder.ready.clear()
        for stride, rows in holder.granted.items():
            self.give_back(holder, stride, list(rows))

    def _granted(self, holder: Holder, stride: int, count: int) -> None:
        holder.granted_bytes += stride * count
        holder.tenant.granted_bytes += stride * count

    # ---- after a restart ---------------------------------------------------------------------------

    def restore(
        self,
        namespace: NamespaceState,
        part: int,
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        depths: Sequence[int],
        rows: npt.NDArray[np.int64],
        checksums: Sequence[bytes],
    ) -> npt.NDArray[np.bool_]:
        """Blocks that were in these rows before a restart are there again; which of them.

        Those whose rows cannot be had (see `SlabAllocator.claim`), or whose keys are here already, are not;
        of those with one key the last one is. Nothing may have been allocated yet; when all is restored,
        call `restored`.
        """
        table = self._table(namespace, part)
        tenant, stride = namespace.tenant, table.stride
        new = {key: index for index, key in enumerate(keys) if key not in table.blocks}
        chosen = np.fromiter(new.values(), dtype=np.int64, count=len(new))
        had = tenant.allocator.claim(stride, rows[chosen])
        good = np.zeros(len(keys), dtype=np.bool_)
        good[chosen[had]] = True
        if good.any():
            slot_class = self._class_of(tenant, stride)
            taken = rows[good].tolist()
            slot_class.reach(max(taken))
            self._tick += 1
            self._enter(
                slot_class,
                table,
                list(compress(keys, good)),
                list(compress(parents, good)),
                taken,
                b"".join(compress(checksums, good)),
                self._tick,
                Origin(depths=list(compress(depths, good))),
            )
        return good

    def restored(self) -> None:
        """All that was there before a restart is known: what is left is free."""
        for tenant in self.tenants.values():
            tenant.allocator.claimed()

    # ---- get: match, acquire, join, release ----------------------------------------------------

    def match(self, namespace: NamespaceState, parts: Sequence[int], packed: bytes) -> int:
        """How many blocks of the prefix an engine could use, by the hit rules of `parts` (empty: all)."""
        self.settle()
        keys = split_keys(packed)
        n = self._usable(self.tables_of(namespace, parts), keys)
        counters = self.counters
        counters.match_calls += 1
        counters.match_keys += len(keys)
        counters.match_hits += n
        return n

    def contains(self, namespace: NamespaceState, part: int, packed: bytes) -> bytes:
        """One byte a key, 1 where the part of the block is here."""
        self.settle()
        return bytes(map(self._table(namespace, part).blocks.__contains__, split_keys(packed)))

    def acquire(
        self,
        holder: Holder,
        namespace: NamespaceState,
        parts: Sequence[int],
        packed: bytes,
        lease_s: float | None,
        now: float,
        *,
        scattered: bool = False,
    ) -> Lease | None:
        """Lease the longest usable prefix, or with `scattered` each key that is here (one part only).

        lease_s: capped at the node's limit; None is for the node's own movers only. With `scattered`
        the lease's `blocks` counts the keys and absent ones are no slots: see `scattered_rows`.
        """
        self.settle()
        tables = self.tables_of(namespace, parts)
        keys = split_keys(packed)
        _check_alive(holder)
        self._check_lease_count(holder)
        seconds = None if lease_s is None else self.lease_seconds(lease_s)
        held: dict[int, tuple[int, list[Block]]] = {}
        if scattered:
            if len(tables) != 1:
                raise InvalidRequest("a scattered acquire is for one part")
            get = tables[0].blocks.get
            found = [block for key in keys if (block := get(key))]
            n = len(found)
            held[tables[0].part] = (0, found)
        else:
            n = self._usable(tables, keys)
            for table in tables:
                spec = table.spec
                first = first_needed(spec, n) - spec.stride + 1
                blocks = table.blocks
                held[table.part] = (first, [blocks[key] for key in needed(spec, keys[:n])])
        if n == 0:
            self.counters.acquire_misses += 1
            return None
        return self._lease(holder, namespace.tenant, held, n, seconds, now)

    def lease(
        self,
        holder: Holder,
        held: Mapping[int, tuple[int, list[Block]]],
        n: int,
        lease_s: float | None,
        now: float,
    ) -> Lease:
        """Lease what is here of a usable prefix of n blocks, some of which are elsewhere.

        held: part → first block index, and blocks of it that are here by settled books. All else as for `acquire`.
        """
        _check_alive(holder)
        self._check_lease_count(holder)
        seconds = None if lease_s is None else self.lease_seconds(lease_s)
        return self._lease(holder, holder.tenant, dict(held), n, seconds, now)

    def _lease(
        self,
        holder: Holder,
        tenant: Tenant,
        held: dict[int, tuple[int, list[Block]]],
        n: int,
        seconds: float | None,
        now: float,
    ) -> Lease:
        counters = self.counters
        self._tick += 1
        tick = self._tick
        for _, slots in held.values():
            if not slots:
                continue
            table = slots[0].table
            self._journal.append((LEASED, table, (slots, tick)))
            counters.leased_blocks += len(slots)
            counters.leased_bytes += len(slots) * table.spec.nbytes
        counters.acquired += 1
        self._lease_count += 1
        token = f"{self.incarnation}.{self._lease_count}"
        deadline = None
        if seconds is not None:
            deadline = now + seconds
            heapq.heappush(self._deadlines, (deadline, token))
        lease = Lease(token, tenant, holder.instance, deadline, n, held)
        self._leases[token] = lease
        self._hold(lease, holder)
        return lease

    def hold(self, holder: Holder, blocks: Sequence[Block]) -> Lease:
        """Keep blocks of one table in their slots until `release`: a lease that is no use of them."""
        self.settle()
        _check_alive(holder)
        table = blocks[0].table
        held = [block for block in blocks if _is_here(block)]
        lease = self._new_lease(holder, len(held))
        _read_on(lease, table, held)
        return lease

    def _new_lease(self, holder: Holder, blocks: int) -> Lease:
        """One that is no use of anything, until its holder releases it."""
        self._lease_count += 1
        token = f"{self.incarnation}.{self._lease_count}"
        lease = Lease(token, holder.tenant, holder.instance, None, blocks, {}, is_use=False)
        self._leases[token] = lease
        self._hold(lease, holder)
        return lease

    def lease_seconds(self, asked: float) -> float:
        """What a lease of `asked` seconds is granted."""
        if not asked > 0:
            raise InvalidRequest(f"a lease of {asked} seconds")
        return min(asked, self.limits.lease_s_max)

    def join(self, holder: Holder, token: str, now: float) -> Lease | None:
        """Become a holder of a living lease of one's own instance; None if there is none such."""
        lease = self._leases.get(token)
        if (
            lease is None
            or lease.tenant is not holder.tenant
            or lease.instance != holder.instance
            or id(holder) not in holder.tenant.holders
            or (lease.deadline is not None and lease.deadline <= now)
        ):
            return None
        if token not in holder.leases:
            self._check_lease_count(holder)
        self._hold(lease, holder)
        return lease

    def _check_lease_count(self, holder: Holder) -> None:
        if len(holder.leases) >= self.limits.leases_per_holder:
            raise LimitExceeded(
                f"this client holds {len(holder.leases)} leases, the limit: release some"
            )

    def release(self, holder: Holder, token: str) -> None:
        """Undo one acquire or join. The slots are free to go when the last holder has released."""
        lease = holder.leases.get(token)
        if lease is None:
            return
        lease.holds[id(holder)] -= 1
        if lease.holds[id(holder)] == 0:
            self._leave(holder, lease)

    def expire(self, now: float) -> float | None:
        """End the leases whose deadline has passed; when the next one comes up, if there is any."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now:
            _, token = heapq.heappop(deadlines)
            lease = self._leases.get(token)
            if lease is not None:
                for holder in lease.holders.values():
                    del holder.leases[token]
                lease.holders.clear()
                self._end_lease(lease)
                self.counters.leases_expired += 1
        # Released leases stay in the heap until their time comes; when they are most of it, sweep them.
        if len(deadlines) > 64 and len(deadlines) > 4 * len(self._leases):
            alive = [entry for entry in deadlines if entry[1] in self._leases]
            heapq.heapify(alive)
            self._deadlines = deadlines = alive
        return deadlines[0][0] if deadlines else None

    def holder_died(self, holder: Holder) -> None:
        """It is closed or its process is dead: nothing reads or writes through it any more."""
        if holder.tenant.holders.pop(id(holder), None) is None:
            return
        self.counters.dead_holders += not holder.idle
        for ticket in list(holder.reservations):
            self.abort(holder, ticket)
        for lease in list(holder.leases.values()):
            self._leave(holder, lease)
        self.give_all_back(holder)

    # ---- remove, pin -----------------------------------------------------------------------------

    def remove(self, namespace: NamespaceState, packed: bytes) -> int:
        """Forget blocks, all their parts. Readers that hold leases finish; the count of blocks gone."""
        self.settle()
        gone = parts = 0
        for key in split_keys(packed):
            hit = False
            for table in namespace.tables:
                block = table.blocks.get(key)
                if block is not None:
                    self._drop(block)
                    parts += 1
                    hit = True
            gone += hit
        self.counters.removed += gone
        self.counters.removed_parts += parts
        return gone

    def evict(self, n: int) -> int:
        """Give up to n blocks up, the coldest of all tenants and sizes first; how many went."""
        self.settle()
        gone = 0
        while gone < n:
            coldest: list[tuple[int, int, Tenant, SlotClass]] = []
            for tenant in self.tenants.values():
                for stride, slot_class in tenant.classes.items():
                    block: Any = slot_class.policy.peek()
                    if block is not None:
                        coldest.append((block.used, stride, tenant, slot_class))
            if not coldest:
                break
            _, _, tenant, slot_class = min(coldest, key=lambda each: each[:2])
            gone += self._evict(
                tenant, slot_class, slot_class.policy.pop, min(n - gone, EVICT_TOGETHER)
            )
        return gone

    def evict_least(self, tenant: Tenant, n: int) -> tuple[int, int]:
        """Give up to n of a tenant's blocks up, as if their room was needed; how many went, and their bytes."""
        self.settle()
        gone = nbytes = 0
        for slot_class in tenant.classes.values():
            for policy in (slot_class.secondary, slot_class.policy):
                went = self._evict(tenant, slot_class, policy.pop, n - gone)
                gone += went
                nbytes += went * slot_class.stride
                if gone == n:
                    return gone, nbytes
        return gone, nbytes

    def give_up(self, namespace: NamespaceState, keys: Sequence[bytes]) -> int:
        """An operator wants these blocks gone; how many were there.

        What is pinned hard stays; what is leased goes with its last lease.
        """
        self.settle()
        keys = list(dict.fromkeys(keys))
        going = [
            block
            for table in namespace.tables
            for block in map(table.blocks.get, keys)
            if block is not None and block.pin != PIN_HARD
        ]
        self._drop_all(going)
        gone = len({block.key for block in going})
        self.counters.given_up_parts += len(going)
        self.counters.removed += gone
        return gone

    def drop_unused(self, namespace: NamespaceState, keys: Sequence[bytes], tick: int) -> int:
        """Drop those that nobody has used since this tick, uses under way and pins apart; how many parts."""
        self.settle()
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
        self._drop_all(unused)
        self.counters.unused_parts += len(unused)
        return len(unused)

    def drop_corrupt(self, namespace: NamespaceState, part: int, key: bytes) -> None:
        """A copy of this block failed its checksum: it is not to be found again."""
        self.settle()
        self.counters.checksum_mismatches += 1
        block = self._table(namespace, part).blocks.get(key)
        if block is not None:
            self._drop(block)
            self.counters.corrupt_parts += 1

    def pin(self, namespace: NamespaceState, packed: bytes, kind: str) -> set[bytes]:
        """Pin (soft: evict last; hard: never) or unpin what is here of these blocks; which keys are.

        Raises `LimitExceeded`, and changes nothing, when that is more than the share that the tenant may
        pin, or the same share of the namespace's quota.
        """
        changed = self.check_pin(namespace, packed, kind)
        level = PIN_KINDS[kind]
        tenant = namespace.tenant
        for block in changed:
            self._take_out(block)
            block.pin = level
            if level == PIN_HARD:
                tenant.hard[block] = None
                block.table.hard_bytes += block.table.stride
            elif level == PIN_SOFT:
                block.table.soft_bytes += block.table.stride
            self._put_in([block])
        keys = split_keys(packed)
        return {key for table in namespace.tables for key in keys if key in table.blocks}

    def check_pin(self, namespace: NamespaceState, packed: bytes, kind: str) -> list[Block]:
        """The blocks that `pin` would change. Raises as it does."""
        if kind not in PIN_KINDS:
            raise InvalidRequest(f"a pin is soft, hard or none, not {kind!r}")
        self.settle()
        level = PIN_KINDS[kind]
        keys = dict.fromkeys(split_keys(packed))
        tenant = namespace.tenant
        changed = [
            block
            for key in keys
            for table in namespace.tables
            if (block := table.blocks.get(key)) is not None and block.pin != level
        ]
        if level != PIN_NONE:
            hard = level == PIN_HARD
            share = self.limits.hard_pin_share if hard else self.limits.soft_pin_share
            asked = sum(block.table.stride for block in changed)
            bounds = [
                (f"tenant {tenant.name!r}", tenant.allocator.size, tenant.namespaces.values()),
                (f"namespace {namespace.base.hex()}", namespace.quota, [namespace]),
            ]
            for whose, size, spaces in bounds:
                pins = [t.hard_bytes if hard else t.soft_bytes for s in spaces for t in s.tables]
                would, quota = sum(pins) + asked, int(size * share)
                if size and asked and would > quota:
                    raise LimitExceeded(
                        f"{kind} pins of {whose} would hold {would >> 20} MiB; "
                        f"the quota is {quota >> 20} MiB"
                    )
        return changed

    # ---- copies elsewhere, and what the directory is told -------------------------------------------

    def demote(self, namespace: NamespaceState, packed: bytes) -> int:
        """Others hold these blocks and keep them: our copies go first. How many parts were demoted.

        They go in the order given, before what is demoted or read later.
        """
        self.settle()
        keys = dict.fromkeys(split_keys(packed))
        chosen = [
            block
            for table in namespace.tables
            for key in keys
            if (block := table.blocks.get(key)) and not block.secondary
        ]
        self._reclassify(chosen, True)
        return len(chosen)

    def promote(self, blocks: Iterable[Block]) -> None:
        """Ours turned out to be the last copies of these. They go in the order given, after others.

        Nothing happens to those that have gone: the caller may have had to ask somebody first.
        """
        self.settle()
        self._reclassify([block for block in blocks if block.secondary and _is_here(block)], False)

    def _reclassify(self, blocks: Sequence[Block], secondary: bool) -> None:
        for block in blocks:
            table = block.table
            slot_class = table.namespace.tenant.classes[table.stride]
            candidate = block.pin == PIN_NONE and block.parked < 0
            if candidate:
                slot_class.discard(block)
            block.secondary = secondary
            if candidate:
                slot_class.insert([block])

    def coldest(self, tenant: Tenant, n: int) -> list[Block]:
        """About n blocks that would be evicted next after the secondary ones, coldest first."""
        self.settle()
        found: list[Any] = []
        for slot_class in tenant.classes.values():
            found += slot_class.policy.coldest(n)
        return _evictable(found)[:n]

    def last_used_first(self, wanted: Callable[[Block], bool]) -> list[Block]:
        """All blocks here that are wanted. O(blocks): for a node that stops."""
        self.settle()
        found = [
            block
            for tenant in self.tenants.values()
            for namespace in tenant.namespaces.values()
            for table in namespace.tables
            for block in table.blocks.values()
            if wanted(block)
        ]
        found.sort(key=lambda block: -block.used)
        return found

    def next_victims(self, tenant: Tenant, n: int, enough: float = 1.0) -> list[Cold]:
        """What is given up next, where that is decided: per stride, and per namespace with a quota.

        About n blocks each, where a smaller share than `enough` is free. Those under a lease, and those that
        others keep, are not among them.
        """
        self.settle()
        size = tenant.allocator.size
        free = 1 - tenant.allocator.bytes_used / size
        places = [
            (Place(stride), free, slot_class.policy)
            for stride, slot_class in tenant.classes.items()
        ]
        for space in self._quotas:
            if space.tenant is tenant:
                left = max(0.0, 1 - space.held_bytes / space.quota)
                for stride in dict.fromkeys(table.stride for table in space.tables):
                    _, order = tenant.classes[stride].orders
                    places.append((Place(stride, space.base), left, order.part(space.base)))
        found = []
        for place, share, policy in places:
            if share > enough:
                continue
            coldest: list[Any] = policy.coldest(n)
            victims = [block for block in coldest if not block.leases and _is_here(block)]
            if victims:
                found.append(Cold(place, share, victims, len(policy)))
        return found

    def coldest_secondary(self, tenant: Tenant, n: int) -> list[Block]:
        """The same of copies that others were said to keep."""
        self.settle()
        found: list[Any] = []
        for slot_class in tenant.classes.values():
            found += slot_class.secondary.coldest(n)
        return _evictable(found)[:n]

    def spare_bytes(self, tenant: Tenant) -> int:
        """What is free, or can go without anything being lost to the cluster."""
        return tenant.allocator.size - tenant.allocator.bytes_used + self.secondary_bytes(tenant)

    def secondary_bytes(self, tenant: Tenant) -> int:
        """What can go without anything being lost to the cluster, as far as this node knows."""
        self.settle()
        return sum(len(c.secondary) * c.stride for c in tenant.classes.values())

    @property
    def tick(self) -> int:
        """Counts puts and reads: the clock by which `Block.used` tells how long ago something was."""
        return self._tick

    @property
    def lease_count(self) -> int:
        return len(self._leases)

    def follow_changes(self, changed: Callable[[], object] = lambda: None) -> None:
        """Take note of changes from now on: see `take_changes`.

        changed: called when there are some to be taken, once until they are. It only makes a note.
        """
        self._notify = changed
        if self._changed is None:
            self._changed = []

    def tell_of_end(self, former: Node) -> None:
        """Rules that these are in place of have ended: what they held, or had to tell, is told here."""
        for namespace, keys in former.take_changes():
            self._tell(namespace, keys)
        for tenant in former.tenants.values():
            for epochs in tenant.epochs.values():
                for namespace in epochs:
                    for table in namespace.tables:
                        for blocks in (table.blocks, table.garbage):
                            if blocks:
                                self._tell(namespace, list(blocks))

    def take_changes(self) -> list[tuple[NamespaceState, Sequence[bytes]]]:
        """Blocks that were stored or have gone since the last call; some of them several times."""
        self.settle()
        changed = self._changed or []
        if changed:
            self._changed = []
        return changed

    def masks(self, digest: bytes, keys: Sequence[bytes]) -> tuple[int, list[int]]:
        """How many parts a namespace has, and for each key the mask of those that are here.

        digest: its directory digest. (0, []) when it is not known, or not any more.
        """
        self.settle()
        namespace = self._by_directory.get(digest)
        if namespace is None:
            return 0, []
        first, *others = namespace.tables
        masks = list(map(int, map(first.blocks.__contains__, keys)))
        for table in others:
            bit = 1 << table.part
            here = table.blocks
            if here:
                masks = [m | bit if key in here else m for m, key in zip(masks, keys, strict=True)]
        return len(namespace.tables), masks

    @property
    def any_replicas(self) -> bool:
        """Whether there is a namespace of whose blocks several copies are wanted."""
        return any(
            namespace.settings.replicas > 1
            for tenant in self.tenants.values()
            for namespace in tenant.namespaces.values()
        )

    def by_directory(self, digest: bytes) -> NamespaceState | None:
        """The namespace with this directory digest; an ended epoch too, for a while."""
        return self._by_directory.get(digest)

    def block_count(self) -> int:
        """Parts of blocks that are here."""
        self.settle()
        return sum(
            len(table.blocks)
            for tenant in self.tenants.values()
            for namespace in tenant.namespaces.values()
            for table in namespace.tables
        )

    def copies_wanted(self, namespace: NamespaceState, keys: Sequence[bytes]) -> list[int]:
        """How many copies of each block are wanted in the cluster; 0 where it is not here."""
        self.settle()
        wanted = []
        for key in keys:
            block = next((b for t in namespace.tables if (b := t.blocks.get(key))), None)
            wanted.append(0 if block is None else block.copies or namespace.settings.replicas)
        return wanted

    def select_by_worth(
        self, namespace: NamespaceState, keys: Sequence[bytes], worth: bool
    ) -> list[bytes]:
        """Those of the blocks that were read again since they were put, or those that were not."""
        self.settle()
        chosen = []
        for key in keys:
            found = [block for table in namespace.tables if (block := table.blocks.get(key))]
            if found and any(block.used > block.put for block in found) == worth:
                chosen.append(key)
        return chosen

    def walk(self, cursor: int, count: int) -> tuple[list[tuple[bytes, list[bytes]]], int | None]:
        """About `count` blocks from a cursor on (0: from the start), by directory digest.

        With them comes the next cursor, None at the end. The walk goes by slots, and a block of several
        parts is taken where its first one is. So each block is met of which no part comes or goes
        during the walk; of the others `take_changes` tells.
        """
        blocks, after = self.scan(cursor, count)
        found: dict[NamespaceState, list[bytes]] = {}
        for block in blocks:
            found.setdefault(block.table.namespace, []).append(block.key)
        return [(namespace.directory_digest, keys) for namespace, keys in found.items()], after

    def scan(
        self, cursor: int, count: int, tenant: Tenant | None = None
    ) -> tuple[list[Block], int | None]:
        """The first parts of the blocks that `walk` finds.

        tenant: of this one only, so that its cursors tell nothing of others. No more than `count` slots are looked
        at, whatever the cursor: it may be made up.
        """
        self.settle()
        classes = self._classes if tenant is None else list(tenant.classes.values())
        number, row = divmod(cursor, _WALK_ROWS)
        found: list[Block] = []
        left = count
        while number < len(classes):
            by_row = classes[number].by_row
            row = min(row, len(by_row))
            end = min(len(by_row), row + left)
            found += [
                block
                for block in by_row[row:end]
                if block is not None and _is_here(block) and _is_first_part(block)
            ]
            left -= end - row
            if end < len(by_row):
                row = end
                break
            number, row = number + 1, 0
        more = number < len(classes)
        return found, number * _WALK_ROWS + row if more else None

    @staticmethod
    def rows_of(tenant: Tenant) -> int:
        """How far a scan of a tenant's blocks goes."""
        return sum(len(slot_class.by_row) for slot_class in tenant.classes.values())

    # ---- the operator's view -----------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Plain values: counters, and per tenant space, leases and namespaces."""
        self.settle()
        return {
            "counters": {name: getattr(self.counters, name) for name in Counters.__slots__},
            "leases": len(self._leases),
            "gone": self.gone(),
            "tenants": {
                tenant.name: {
                    "segment_bytes": tenant.allocator.size,
                    "blocks": sum(
                        len(table.blocks)
                        for namespace in tenant.namespaces.values()
                        for table in namespace.tables
                    ),
                    "secondary_bytes": self.secondary_bytes(tenant),
                    "granted_bytes": tenant.granted_bytes,
                    "hard_pinned_bytes": tenant.hard_bytes,
                    "soft_pinned_bytes": tenant.soft_bytes,
                    "traffic": tenant.traffic.stats(),
                    "space": tenant.allocator.stats(),
                    "namespaces": {
                        namespace.base.hex(): {
                            "fields": msgspec.json.decode(namespace.fields),
                            "epoch": namespace.epoch,
                            "settings": msgspec.to_builtins(namespace.settings),
                            "held_bytes": namespace.held_bytes,
                            "quota_bytes": namespace.quota,
                            "blocks": [len(table.blocks) for table in namespace.tables],
                            "part_bytes": [spec.nbytes for spec in namespace.parts],
                        }
                        for namespace in tenant.namespaces.values()
                    },
                }
                for tenant in self.tenants.values()
            },
        }

    def gone(self) -> dict[str, int]:
        """Parts of blocks that are not here any more, by why."""
        counters = self.counters
        return {
            "full": counters.evicted - counters.evicted_by_quota,
            "quota": counters.evicted_by_quota,
            "ttl": counters.unused_parts,
            "operator": counters.given_up_parts,
            "removed": counters.removed_parts,
            "corrupt": counters.corrupt_parts,
            "epoch": counters.reclaimed_blocks,
        }

    def usage(self, tenant: Tenant) -> dict[str, Any]:
        """What a tenant and each of its namespaces have of this tier; plain values, quota 0 for none."""
        self.settle()
        return {
            "part_bytes": tenant.allocator.size,
            "used_bytes": tenant.allocator.bytes_used,
            "namespaces": {
                namespace.base.hex(): {
                    "held_bytes": namespace.held_bytes,
                    "quota_bytes": namespace.quota,
                }
                for namespace in tenant.namespaces.values()
            },
        }

    # ---- inside ------------------------------------------------------------------------------------

    def _table(self, namespace: NamespaceState, part: int) -> PartTable:
        if not 0 <= part < len(namespace.tables):
            raise InvalidRequest(
                f"part {part}: this namespace has parts 0 to {len(namespace.tables) - 1}"
            )
        return namespace.tables[part]

    def tables_of(self, namespace: NamespaceState, parts: Sequence[int]) -> list[PartTable]:
        """Those of some parts, or of all. Raises `InvalidRequest`."""
        if not parts:
            return namespace.tables
        if len(set(parts)) != len(parts):
            raise InvalidRequest("a part is named twice")
        return [self._table(namespace, part) for part in parts]

    @staticmethod
    def _usable(tables: Sequence[PartTable], keys: Sequence[bytes]) -> int:
        """The longest prefix, in blocks, of which every part has what its rule asks for."""
        if len(tables) == 1:
            return usable((tables[0].spec,), (tables[0].blocks,), keys)
        return usable([table.spec for table in tables], [table.blocks for table in tables], keys)

    def _touch(self, blocks: Iterable[Block]) -> None:
        """Blocks of one table were asked for."""
        self._tick += 1
        held = list(blocks)
        self._journal.append((READ, held[0].table, (held, self._tick)))

    def _hold(self, lease: Lease, holder: Holder) -> None:
        lease.holders[id(holder)] = holder
        lease.holds[id(holder)] = lease.holds.get(id(holder), 0) + 1
        holder.leases[lease.token] = lease

    def _leave(self, holder: Holder, lease: Lease) -> None:
        del holder.leases[lease.token]
        del lease.holders[id(holder)]
        del lease.holds[id(holder)]  # the id may be another's later
        if not lease.holders:
            self._end_lease(lease)

    def _end_lease(self, lease: Lease) -> None:
        self.settle()
        del self._leases[lease.token]
        self._changes += 1
        if lease.beside is not None:
            lease.beside.end()
        for reservation in lease.reading:
            del reservation.readers[lease.token]
            if reservation.orphans and not reservation.readers:
                rows, reservation.orphans = reservation.orphans, []
                self._free_reserved(reservation, rows)
        for _, blocks in lease.parts.values():
            back: list[Block] = []
            unused: list[Block] = []
            for block in blocks:
                block.leases -= 1
                if block.leases == 0:
                    if block.gone:
                        self._free(block)
                    elif block.parked >= 0:
                        was_used = lease.is_use or block.used > block.parked
                        (back if was_used else unused).append(block)
                        block.parked = -1
            if back:
                self._put_in(back)
            if unused:
                self._put_in(unused, first=True)


def _read_on(lease: Lease, table: PartTable, blocks: Sequence[Block]) -> None:
    """These blocks stay in their slots until the lease ends."""
    for block in blocks:
        block.leases += 1
    _, held = lease.parts.setdefault(table.part, (0, []))
    held += blocks


def _is_here(block: Block) -> bool:
    """Whether it is found: not evicted, removed or of an ended epoch."""
    return block.table.blocks.get(block.key) is block


def _evictable(blocks: Iterable[Block]) -> list[Block]:
    """Those that could go now and are worth something, the least recently used first."""
    free = [block for block in blocks if not block.leases and _is_here(block)]
    free.sort(key=lambda block: block.used)
    return free


def _is_first_part(block: Block) -> bool:
    table, key = block.table, block.key
    tables = table.namespace.tables
    return not table.part or not any(key in other.blocks for other in tables[: table.part])


def _check_alive(holder: Holder) -> None:
    """What a dead holder took, as by a request that waited while it died, would never come back."""
    if id(holder) not in holder.tenant.holders:
        raise InvalidRequest("this client is closed or its process is dead: connect again")


def _check_epoch(namespace: NamespaceState) -> None:
    if namespace.retired:
        raise StaleEpoch(
            f"namespace {namespace.base.hex()} was reset after this client opened it in epoch "
            f"{namespace.epoch}: open it again once the weights are the new ones"
        )


def _check_parent(parent: bytes) -> None:
    if parent and len(parent) != KEY_BYTES:
        raise InvalidRequest(f"a parent key of {len(parent)} bytes: {KEY_BYTES}, or none")


def mismatch(known: tuple[PartSpec, ...], asked: tuple[PartSpec, ...], digest: bytes) -> str:
    name = digest.hex()
    advice = "Put what makes them differ into the namespace's fields"
    if len(known) != len(asked):
        return f"namespace {name} has {len(known)} parts here, not {len(asked)}. {advice}"
    part = next(i for i, pair in enumerate(zip(known, asked, strict=True)) if pair[0] != pair[1])
    return (
        f"part {part} of namespace {name} is {known[part].nbytes} bytes "
        f"({known[part].kind}) here, not {asked[part].nbytes} ({asked[part].kind}). {advice}"
    )

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
   policy with their last lease, so each lease costs at most one such step.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat, takewhile
from typing import Any

import msgspec

from kvpool.errors import (
    InvalidRequest,
    LimitExceeded,
    NamespaceMismatch,
    PoolFull,
    UnknownReservation,
)
from kvpool.storage.eviction import EvictionPolicy
from kvpool.storage.slab import SlabAllocator
from kvpool.types import CHECKSUM_BYTES, KEY_BYTES, PartKind, PartSpec, split_keys
from kvpool.wire import NO_ROW

_PUT, _READ, _LEASED = range(3)  # what the journal tells of

PIN_NONE, PIN_SOFT, PIN_HARD = 0, 1, 2
ANCESTORS_PER_BLOCK = 32  # refreshed in the policy when a block is put behind them
PIN_KINDS = {"none": PIN_NONE, "soft": PIN_SOFT, "hard": PIN_HARD}


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what one holder or tenant may take. Shares are of the tenant's segment."""

    lease_s_max: float = 60.0
    leases_per_holder: int = 4096
    reserved_share_per_holder: float = 1.0
    hard_pin_share: float = 0.25
    soft_pin_share: float = 0.5
    namespaces_per_tenant: int = 1024
    grant_bytes_per_holder: int = 64 << 20
    grant_share: float = 1 / 16  # of the segment, all holders together
    steal_tries: int = 8  # cold blocks looked at to find a slab that can be emptied


class Block(msgspec.Struct, gc=False, eq=False):
    """One committed part of a block. Compared by identity.

    `gc=False`: there may be millions, and the cyclic collector must not walk them; nothing here
    points back to a block except tables that drop it explicitly.
    """

    table: PartTable
    key: bytes
    row: int
    checksum: bytes
    parent: bytes  # the key before it in the prefix chain, or empty
    used: int  # the node's tick at its last use
    # The eviction policy's, and nobody else's:
    freq: int = 0
    queue: int = 0
    # The node's:
    leases: int = 0
    pin: int = PIN_NONE
    parked: bool = False  # came up as a victim while leased: in no policy
    gone: bool = False  # removed while leased: not in its table any more ("evicting")

    @property
    def ident(self) -> bytes:
        """What the policy's ghost list remembers of it."""
        return self.key + self.table.tag


class PartTable:
    """The committed blocks of one part of one namespace."""

    __slots__ = ("blocks", "namespace", "part", "spec", "stride", "tag")

    def __init__(
        self, namespace: NamespaceState, part: int, spec: PartSpec, number: int, stride: int
    ) -> None:
        self.namespace = namespace
        self.part = part
        self.spec = spec
        self.tag = number.to_bytes(4, "little")  # unique among the node's tables
        self.stride = stride
        self.blocks: dict[bytes, Block] = {}


class NamespaceState:
    """A namespace as this node knows it."""

    __slots__ = ("digest", "fields", "number", "parts", "tables", "tenant")

    def __init__(
        self, tenant: Tenant, digest: bytes, fields: bytes, parts: Sequence[PartSpec], number: int
    ) -> None:
        self.tenant = tenant
        self.digest = digest
        self.fields = fields
        self.parts = tuple(parts)
        self.number = number
        self.tables: list[PartTable] = []


class SlotClass:
    """All slots of one stride in a tenant's segment."""

    __slots__ = ("by_row", "policy", "soft", "stride", "stuck_at")

    def __init__(self, stride: int, policy: EvictionPolicy) -> None:
        self.stride = stride
        self.policy = policy
        self.soft: OrderedDict[Block, None] = OrderedDict()  # soft pins, oldest first
        self.stuck_at: dict[bool, int] = {}  # `Node._changes` when no other class could give a slab
        self.by_row: list[Block | None] = []  # needed to empty a slab without a scan of all blocks


class Tenant:
    """A tenant: its segment, what lies in it, and what it may pin. No tenant sees another's."""

    __slots__ = (
        "allocator",
        "classes",
        "granted_bytes",
        "hard",
        "hard_bytes",
        "holders",
        "name",
        "namespaces",
        "segment",
        "soft_bytes",
    )

    def __init__(self, name: str, segment: int, allocator: SlabAllocator) -> None:
        self.name = name
        self.segment = segment
        self.allocator = allocator
        self.classes: dict[int, SlotClass] = {}
        self.namespaces: dict[bytes, NamespaceState] = {}
        self.holders: dict[int, Holder] = {}  # by id()
        self.hard: dict[Block, None] = {}  # hard pins, of all classes
        self.hard_bytes = 0
        self.granted_bytes = 0
        self.soft_bytes = 0


@dataclass(eq=False, slots=True)
class Holder:
    """Who reserves and leases: one client in one process. The server watches the process.

    instance: the engine instance that its leases belong to; processes of one instance join them.
    """

    tenant: Tenant
    instance: str
    name: str = ""
    reservations: dict[int, Reservation] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    reserved_bytes: int = 0
    granted: dict[int, set[int]] = field(default_factory=dict)  # stride → rows without keys
    granted_bytes: int = 0
    ready: dict[int, list[int]] = field(default_factory=dict)  # granted, and not told of yet

    @property
    def idle(self) -> bool:
        """Whether it holds nothing."""
        return not self.reservations and not self.leases and not self.granted_bytes


@dataclass(eq=False, slots=True)
class Reservation:
    """Slots that a holder writes and has not settled: sequences of one length, in chain order."""

    table: PartTable
    indices: Sequence[int]  # which of the keys asked for
    keys: Sequence[bytes]
    parents: Sequence[bytes]  # of each key, the one before it in the prefix chain
    rows: list[int]
    left: dict[int, int] | None = None  # key index → position, once some of it is settled

    @property
    def open_rows(self) -> list[int]:
        """The rows that are not settled."""
        if self.left is None:
            return self.rows
        return [self.rows[position] for position in self.left.values()]

    def positions(self, indices: Sequence[int], ticket: int) -> list[int]:
        """Where these key indices are in the sequences. Raises `UnknownReservation`."""
        if self.left is None:
            self.left = {index: position for position, index in enumerate(self.indices)}
        found = [self.left.get(index, -1) for index in indices]
        if -1 in found:
            index = indices[found.index(-1)]
            raise UnknownReservation(f"key {index} of reservation {ticket} has no open slot")
        if len(set(found)) != len(found):
            raise UnknownReservation(f"a key of reservation {ticket} is committed twice")
        return found


@dataclass(eq=False, slots=True)
class Lease:
    """A right to read. It lives while it has holders, and not past its deadline."""

    token: str
    tenant: Tenant
    instance: str
    deadline: float | None  # None: until it is returned (movers, whose death is watched)
    blocks: int
    parts: dict[int, tuple[int, list[Block]]]  # part → (first block index, its slots in order)
    holders: dict[int, Holder] = field(default_factory=dict)  # by id()
    holds: dict[int, int] = field(default_factory=dict)  # how often each has joined


@dataclass(slots=True)
class Counters:
    """Totals since the daemon started."""

    reserved: int = 0
    committed: int = 0
    committed_bytes: int = 0
    duplicates: int = 0
    aborted: int = 0
    acquired: int = 0
    acquire_misses: int = 0
    leased_blocks: int = 0
    leased_bytes: int = 0
    leases_expired: int = 0
    evicted: int = 0
    evicted_soft_pins: int = 0  # of these
    slabs_reclaimed: int = 0
    removed: int = 0
    refused_full: int = 0
    match_calls: int = 0
    match_keys: int = 0
    match_hits: int = 0
    dead_holders: int = 0  # of those that held something
    checksum_mismatches: int = 0
    pulled_blocks: int = 0
    pulled_bytes: int = 0
    lent_blocks: int = 0


class Node:
    """All blocks of one daemon. Not thread-safe: the control process's event loop calls it."""

    def __init__(
        self,
        *,
        make_policy: Callable[[int], EvictionPolicy],
        limits: Limits | None = None,
        incarnation: str = "0",
    ) -> None:
        """make_policy: given the slots of a class, a fresh eviction policy for it."""
        self.limits = limits or Limits()
        self.incarnation = incarnation
        self.tenants: dict[str, Tenant] = {}
        self.counters = Counters()
        self._make_policy = make_policy
        self._namespaces: list[NamespaceState] = []
        self._tables = 0
        self._leases: dict[str, Lease] = {}
        self._lease_count = 0
        self._deadlines: list[tuple[float, str]] = []
        self._tick = 0
        self._changes = 0  # counts what may let a slab go that could not go before
        self._journal: list[tuple[int, PartTable, Any]] = []

    # ---- tenants, namespaces, holders ------------------------------------------------------------

    def add_tenant(
        self, name: str, segment: int, size: int, slab_bytes: int | None = None
    ) -> Tenant:
        """Give a tenant its segment. The bytes are the caller's business."""
        if name in self.tenants:
            raise InvalidRequest(f"tenant {name!r} has a segment already")
        tenant = Tenant(name, segment, SlabAllocator(size, slab_bytes=slab_bytes))
        self.tenants[name] = tenant
        return tenant

    def add_holder(self, tenant: str, instance: str, name: str = "") -> Holder:
        """Somebody who may reserve and lease. Call `holder_died` when its process is dead."""
        if tenant not in self.tenants:
            raise InvalidRequest(f"there is no tenant {tenant!r} on this node")
        holder = Holder(self.tenants[tenant], instance, name)
        holder.tenant.holders[id(holder)] = holder
        return holder

    def open_namespace(
        self, tenant: Tenant, digest: bytes, fields: bytes, parts: Sequence[PartSpec]
    ) -> NamespaceState:
        """The namespace with this digest, made if new. Its number is good for this incarnation.

        Raises `NamespaceMismatch` if it is known with other parts.
        """
        known = tenant.namespaces.get(digest)
        if known is not None:
            if known.parts != tuple(parts):
                raise NamespaceMismatch(_mismatch(known.parts, tuple(parts), digest))
            return known
        if len(tenant.namespaces) >= self.limits.namespaces_per_tenant:
            raise LimitExceeded(
                f"tenant {tenant.name!r} has {len(tenant.namespaces)} namespaces, the limit"
            )
        strides = [tenant.allocator.stride_of(spec.nbytes) for spec in parts]
        namespace = NamespaceState(tenant, digest, fields, parts, len(self._namespaces))
        for part, (spec, stride) in enumerate(zip(parts, strides, strict=True)):
            namespace.tables.append(PartTable(namespace, part, spec, self._tables, stride))
            self._tables += 1
        tenant.namespaces[digest] = namespace
        self._namespaces.append(namespace)
        return namespace

    def namespace(self, tenant: Tenant, number: int) -> NamespaceState:
        """The namespace with this number, for its own tenant only."""
        if 0 <= number < len(self._namespaces):
            found = self._namespaces[number]
            if found.tenant is tenant:
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
            raise PoolFull(
                f"no slot of {stride} bytes can be reclaimed for tenant {holder.tenant.name!r}: "
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
        self.counters.reserved += len(rows)
        return stride, packed_rows

    def commit(
        self, holder: Holder, ticket: int, checksums: bytes, indices: Sequence[int] | None = None
    ) -> int:
        """Make reserved slots readable; the count of blocks that are new.

        checksums: 16 bytes for each row of the reservation, in order (with `indices`, for each of
        these). A block that somebody else committed meanwhile is kept; this copy's slot comes back.
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
        if indices is None or reservation.left is None or len(indices) == len(reservation.left):
            del holder.reservations[ticket]
        else:
            for index in indices:
                del reservation.left[index]
        if not table.blocks.keys().isdisjoint(keys) or len(set(keys)) != len(keys):
            keys, parents, rows, checksums, surplus = self._only_new(
                table, keys, parents, rows, checksums
            )
            table.namespace.tenant.allocator.free(table.stride, surplus)
        self._publish(table, keys, parents, rows, checksums)
        return len(rows)

    def _publish(
        self,
        table: PartTable,
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        rows: Sequence[int],
        checksums: bytes,
    ) -> None:
        """Slots that are whole become blocks, at the latest when anybody looks: see `settle`.

        The keys are new and differ from one another.
        """
        self._changes += 1
        if keys:
            self._tick += 1
            self._journal.append((_PUT, table, (keys, parents, rows, checksums, self._tick)))
            self.counters.committed += len(keys)
            self.counters.committed_bytes += len(keys) * table.spec.nbytes

    def abort(self, holder: Holder, ticket: int) -> None:
        """Give reserved slots back unwritten. The caller promises that nobody writes to them any more."""
        reservation = holder.reservations.pop(ticket, None)
        if reservation is None:
            return
        table = reservation.table
        rows = reservation.open_rows
        table.namespace.tenant.allocator.free(table.stride, rows)
        self._changes += 1
        holder.reserved_bytes -= table.stride * len(rows)
        self.counters.aborted += len(rows)

    # ---- put in one exchange: grant, store ------------------------------------------------------

    def grant(self, holder: Holder, namespace: NamespaceState, part: int, count: int) -> list[int]:
        """Up to `count` rows for parts of this size, without keys. None where the quota is used up."""
        table = self._table(namespace, part)
        _check_alive(holder)
        tenant, stride = holder.tenant, table.stride
        room = min(
            self.limits.grant_bytes_per_holder - holder.granted_bytes,
            int(tenant.allocator.size * self.limits.grant_share) - tenant.granted_bytes,
        )
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
    ) -> tuple[int, list[int]]:
        """Make granted slots readable under these keys: (blocks that are new, rows still granted).

        Raises `UnknownReservation`, and changes nothing, for rows that are not granted to this holder.
        """
        self.settle()
        table = self._table(namespace, part)
        keys: Sequence[bytes] = split_keys(packed)
        _check_parent(parent)
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
        granted.difference_update(rows)
        self._granted(holder, table.stride, -len(rows))
        self._publish(table, keys, parents, rows, checksums)
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

    # ---- get: match, acquire, join, release ----------------------------------------------------

    def match(self, namespace: NamespaceState, parts: Sequence[int], packed: bytes) -> int:
        """How many blocks of the prefix an engine could use, by the hit rules of `parts` (empty: all)."""
        self.settle()
        keys = split_keys(packed)
        n = self._usable(self._tables_of(namespace, parts), keys)
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
        tables = self._tables_of(namespace, parts)
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
                step = spec.stride
                chain = keys[step - 1 : n : step] if step > 1 else keys[:n]
                first = 0
                if spec.kind is PartKind.WINDOW and len(chain) > spec.window_blocks:
                    first = (len(chain) - spec.window_blocks) * step
                    chain = chain[-spec.window_blocks :]
                blocks = table.blocks
                held[table.part] = (first, [blocks[key] for key in chain])
        counters = self.counters
        if n == 0:
            counters.acquire_misses += 1
            return None
        self._tick += 1
        tick = self._tick
        for table in tables:
            slots = held[table.part][1]
            self._journal.append((_LEASED, table, (slots, tick)))
            counters.leased_blocks += len(slots)
            counters.leased_bytes += len(slots) * table.spec.nbytes
        counters.acquired += 1
        self._lease_count += 1
        token = f"{self.incarnation}.{self._lease_count}"
        deadline = None
        if seconds is not None:
            deadline = now + seconds
            heapq.heappush(self._deadlines, (deadline, token))
        lease = Lease(token, namespace.tenant, holder.instance, deadline, n, held)
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
            if kind == _PUT:
                self._enter(slot_class, table, *what)
                continue
            blocks, tick = what
            if kind == _LEASED:
                for block in blocks:
                    block.leases += 1
                    block.used = tick
            else:
                for block in blocks:
                    block.used = tick
            slot_class.policy.touch(blocks)
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
    ) -> None:
        """New blocks into their table. Built by C loops: this runs for all that is ever put."""
        sums = split_keys(checksums)
        new = list(map(Block, repeat(table), keys, rows, sums, parents, repeat(tick)))
        table.blocks.update(zip(keys, new, strict=True))
        by_row = slot_class.by_row
        for block in new:
            by_row[block.row] = block
        slot_class.policy.insert(new)
        self._refresh_ancestors(slot_class, new)

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
            slot_class.policy.refresh(found)

    # ---- remove, pin -----------------------------------------------------------------------------

    def remove(self, namespace: NamespaceState, packed: bytes) -> int:
        """Forget blocks, all their parts. Readers that hold leases finish; the count of blocks gone."""
        self.settle()
        gone = 0
        for key in split_keys(packed):
            hit = False
            for table in namespace.tables:
                block = table.blocks.get(key)
                if block is not None:
                    self._drop(block)
                    hit = True
            gone += hit
        self.counters.removed += gone
        return gone

    def drop_corrupt(self, namespace: NamespaceState, part: int, key: bytes) -> None:
        """A copy of this block failed its checksum: it is not to be found again."""
        self.settle()
        self.counters.checksum_mismatches += 1
        block = self._table(namespace, part).blocks.get(key)
        if block is not None:
            self._drop(block)

    def pin(self, namespace: NamespaceState, packed: bytes, kind: str) -> int:
        """Pin (soft: evict last; hard: never) or unpin what is here of these blocks; how many keys.

        Raises `LimitExceeded`, and changes nothing, when the tenant's quota does not cover it.
        """
        if kind not in PIN_KINDS:
            raise InvalidRequest(f"a pin is soft, hard or none, not {kind!r}")
        self.settle()
        level = PIN_KINDS[kind]
        keys = split_keys(packed)
        tenant = namespace.tenant
        chosen: dict[Block, None] = {}
        found = 0
        for key in keys:
            hit = False
            for table in namespace.tables:
                block = table.blocks.get(key)
                if block is not None:
                    chosen[block] = None
                    hit = True
            found += hit
        changed = [block for block in chosen if block.pin != level]
        if level != PIN_NONE:
            share = self.limits.hard_pin_share if level == PIN_HARD else self.limits.soft_pin_share
            quota = int(tenant.allocator.size * share)
            held = tenant.hard_bytes if level == PIN_HARD else tenant.soft_bytes
            asked = sum(block.table.stride for block in changed)
            if held + asked > quota:
                raise LimitExceeded(
                    f"{kind} pins of tenant {tenant.name!r} would hold {(held + asked) >> 20} MiB; "
                    f"the quota is {quota >> 20} MiB"
                )
        for block in changed:
            self._take_out(block)
            block.pin = level
            if level == PIN_HARD:
                tenant.hard[block] = None
                tenant.hard_bytes += block.table.stride
            elif level == PIN_SOFT:
                tenant.soft_bytes += block.table.stride
            self._put_in([block])
        return found

    # ---- the operator's view -----------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Plain values: counters, and per tenant space, leases and namespaces."""
        self.settle()
        return {
            "counters": {name: getattr(self.counters, name) for name in Counters.__slots__},
            "leases": len(self._leases),
            "tenants": {
                tenant.name: {
                    "segment_bytes": tenant.allocator.size,
                    "blocks": sum(
                        len(table.blocks)
                        for namespace in tenant.namespaces.values()
                        for table in namespace.tables
                    ),
                    "granted_bytes": tenant.granted_bytes,
                    "hard_pinned_bytes": tenant.hard_bytes,
                    "soft_pinned_bytes": tenant.soft_bytes,
                    "space": tenant.allocator.stats(),
                    "namespaces": {
                        namespace.digest.hex(): {
                            "fields": msgspec.json.decode(namespace.fields),
                            "blocks": [len(table.blocks) for table in namespace.tables],
                            "part_bytes": [spec.nbytes for spec in namespace.parts],
                        }
                        for namespace in tenant.namespaces.values()
                    },
                }
                for tenant in self.tenants.values()
            },
        }

    # ---- inside ------------------------------------------------------------------------------------

    def _table(self, namespace: NamespaceState, part: int) -> PartTable:
        if not 0 <= part < len(namespace.tables):
            raise InvalidRequest(
                f"part {part}: this namespace has parts 0 to {len(namespace.tables) - 1}"
            )
        return namespace.tables[part]

    def _tables_of(self, namespace: NamespaceState, parts: Sequence[int]) -> list[PartTable]:
        if not parts:
            return namespace.tables
        if len(set(parts)) != len(parts):
            raise InvalidRequest("a part is named twice")
        return [self._table(namespace, part) for part in parts]

    @staticmethod
    def _usable(tables: Sequence[PartTable], keys: Sequence[bytes]) -> int:
        """The longest prefix, in blocks, of which every part has what its rule asks for."""
        n = len(keys)
        windows = []
        for table in tables:
            spec = table.spec
            if spec.kind is PartKind.WINDOW:
                windows.append(table)
            elif spec.stride == 1:
                n = len(list(takewhile(table.blocks.__contains__, keys[:n])))
            else:
                step = spec.stride
                chain = keys[step - 1 : n : step]
                n = step * len(list(takewhile(table.blocks.__contains__, chain)))
        if not windows and all(table.spec.stride == 1 for table in tables):
            return n
        # A prefix of n blocks is usable when n is a multiple of every stride and, for each window
        # part, the run of present slots that ends at n is as long as its window (or as the prefix).
        runs = [_runs(table, keys[:n]) for table in windows]
        while n > 0:
            best = n
            for table in tables:
                best -= best % table.spec.stride
            for table, run in zip(windows, runs, strict=True):
                slots = best // table.spec.stride
                if slots and run[slots - 1] < min(table.spec.window_blocks, slots):
                    best -= 1
                    break
            if best == n:
                return n
            n = best
        return 0

    def _touch(self, blocks: Iterable[Block]) -> None:
        """Blocks of one table were asked for."""
        self._tick += 1
        held = list(blocks)
        self._journal.append((_READ, held[0].table, (held, self._tick)))

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
        for _, blocks in lease.parts.values():
            back: list[Block] = []
            for block in blocks:
                block.leases -= 1
                if block.leases == 0:
                    if block.gone:
                        self._free(block)
                    elif block.parked:
                        block.parked = False
                        back.append(block)
            if back:
                self._put_in(back)

    def _put_in(self, blocks: Sequence[Block]) -> None:
        """Make blocks of one table candidates for eviction, as their pins say."""
        self.settle()
        plain = [block for block in blocks if block.pin == PIN_NONE]
        if plain:
            table = plain[0].table
            table.namespace.tenant.classes[table.stride].policy.insert(plain)
        if len(plain) != len(blocks):
            for block in blocks:
                if block.pin == PIN_SOFT:
                    tenant = block.table.namespace.tenant
                    tenant.classes[block.table.stride].soft[block] = None

    def _take_out(self, block: Block) -> None:
        """The reverse: no candidate any more, no pin, in no quota."""
        self._changes += 1
        self.settle()
        table = block.table
        tenant = table.namespace.tenant
        if block.parked:
            block.parked = False
        elif block.pin == PIN_NONE:
            tenant.classes[table.stride].policy.discard(block)
        elif block.pin == PIN_SOFT:
            del tenant.classes[table.stride].soft[block]
        if block.pin == PIN_SOFT:
            tenant.soft_bytes -= table.stride
        elif block.pin == PIN_HARD:
            del tenant.hard[block]
            tenant.hard_bytes -= table.stride
        block.pin = PIN_NONE

    def _drop(self, block: Block) -> None:
        """Take a block out of its table; its slot is free now, or when its last lease ends."""
        del block.table.blocks[block.key]
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
        slot_class = tenant.classes.get(stride)
        if slot_class is None:
            slot_class = SlotClass(stride, self._make_policy(allocator.capacity(stride)))
            tenant.classes[stride] = slot_class
        rows = allocator.alloc(stride, n)
        while len(rows) < n and self._reclaim(tenant, slot_class, n - len(rows)):
            rows += allocator.alloc(stride, n - len(rows))
        by_row = slot_class.by_row
        if rows:
            highest = max(rows)
            if highest >= len(by_row):
                by_row.extend([None] * (highest + 1 - len(by_row)))
        return rows

    def _reclaim(self, tenant: Tenant, slot_class: SlotClass, n: int) -> bool:
        """Make room for up to n slots of the class, at least one; False when nothing can go.

        In order: a slab of another class that is much colder; this class's own victims; a slab of
        another class whatever its age; this class's soft pins; a slab of another class, soft pins
        included.
        """
        self.settle()
        several = len(tenant.classes) > 1
        if several and self._steal_colder_slab(tenant, slot_class):
            return True
        rows: list[int] = []
        by_row = slot_class.by_row
        pop = slot_class.policy.pop
        while len(rows) < n:
            block: Any = pop()
            if block is None:
                break
            if block.leases:
                block.parked = True
                continue
            del block.table.blocks[block.key]
            row = block.row
            by_row[row] = None
            rows.append(row)
        self.counters.evicted += len(rows)
        if rows:
            tenant.allocator.free(slot_class.stride, rows)
            return True
        if several and self._steal_any_slab(tenant, slot_class, spare_soft_pins=True):
            return True
        soft = slot_class.soft
        while len(rows) < n and soft:
            block, _ = soft.popitem(last=False)
            if block.leases:
                block.parked = True
                continue
            tenant.soft_bytes -= slot_class.stride
            del block.table.blocks[block.key]
            by_row[block.row] = None
            rows.append(block.row)
        self.counters.evicted += len(rows)
        self.counters.evicted_soft_pins += len(rows)
        if rows:
            tenant.allocator.free(slot_class.stride, rows)
            return True
        return several and self._steal_any_slab(tenant, slot_class, spare_soft_pins=False)

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
                coldest: Any = other.policy.peek()
                if coldest is not None and self._tick - coldest.used > 2 * age + 1:
                    donors.append((coldest.used, other))
        donors.sort(key=lambda donor: donor[0])
        return any(self._empty_coldest_slab(tenant, donor, slot_class) for _, donor in donors)

    def _empty_coldest_slab(self, tenant: Tenant, donor: SlotClass, taker: SlotClass) -> bool:
        """Give the taker a slab with one of the donor's next victims and nothing that must stay."""
        allocator = tenant.allocator
        tried: set[int] = set()
        cold: Any
        for cold in donor.policy.coldest(self.limits.steal_tries):
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
        for block in held:
            del block.table.blocks[block.key]
            self._take_out(block)
            donor.by_row[block.row] = None
        allocator.free(donor.stride, [block.row for block in held])
        allocator.reclaim_slab(slab)
        self.counters.evicted += len(held)
        self.counters.slabs_reclaimed += 1


def _check_alive(holder: Holder) -> None:
    """What a dead holder took, as by a request that waited while it died, would never come back."""
    if id(holder) not in holder.tenant.holders:
        raise InvalidRequest("this client is closed or its process is dead: connect again")


def _check_parent(parent: bytes) -> None:
    if parent and len(parent) != KEY_BYTES:
        raise InvalidRequest(f"a parent key of {len(parent)} bytes: {KEY_BYTES}, or none")


def _runs(table: PartTable, keys: Sequence[bytes]) -> list[int]:
    """For each slot of the chain, how many present ones end there."""
    run, runs = 0, []
    step = table.spec.stride
    for key in keys[step - 1 :: step]:
        run = run + 1 if key in table.blocks else 0
        runs.append(run)
    return runs


def _mismatch(known: tuple[PartSpec, ...], asked: tuple[PartSpec, ...], digest: bytes) -> str:
    name = digest.hex()
    advice = "Put what makes them differ into the namespace's fields"
    if len(known) != len(asked):
        return f"namespace {name} has {len(known)} parts here, not {len(asked)}. {advice}"
    part = next(i for i, pair in enumerate(zip(known, asked, strict=True)) if pair[0] != pair[1])
    return (
        f"part {part} of namespace {name} is {known[part].nbytes} bytes "
        f"({known[part].kind}) here, not {asked[part].nbytes} ({asked[part].kind}). {advice}"
    )

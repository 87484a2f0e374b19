"""A node's state: blocks, tables, classes, tenants, holders, leases. Data, no rules."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, repeat
from typing import Any, NamedTuple, Protocol

import msgspec
from xxhash import xxh3_64_intdigest

from kvpool.daemon.core.block_index import BlockIndex, RowIndex
from kvpool.daemon.core.checksums import Checksums
from kvpool.daemon.core.quota_eviction import QuotaEviction
from kvpool.daemon.core.soft_pins import SoftPins
from kvpool.errors import InvalidRequest, StaleEpoch, UnknownReservation
from kvpool.placement.records import DEFAULT_SETTINGS, NamespaceSettings, epoch_digest
from kvpool.storage.eviction import EvictionPolicy, Lru
from kvpool.storage.eviction_queue import EntryQueue, EvictionQueue
from kvpool.storage.expendable import ExpendableFirst, MakeExpendableFirst, is_expendable
from kvpool.storage.slab import SlabAllocator
from kvpool.types import PartSpec

PIN_NONE, PIN_SOFT, PIN_HARD = 0, 1, 2
_GONE = 3  # in place of a pin
PIN_KINDS = {"none": PIN_NONE, "soft": PIN_SOFT, "hard": PIN_HARD}


class Origin(NamedTuple):
    """Properties of new blocks apart from their bytes: see `Block`.

    depths: of each; empty: they follow from the parents. tier: that they came from, for somebody who waits; empty:
    none.
    """

    secondary: bool = False
    hops: int = 0
    replicas: int = 0
    depths: Sequence[int] = ()
    tier: str = ""


OWN = Origin()
Requests = Sequence[tuple[str, int]]
"""Labels of requests, each with how many of some keys, in their order, belong to it."""


class BlockFacts:
    """What follows from the fields of a block, wherever these are kept: see `Block`, and `PackedBlock`."""

    __slots__ = ()

    table: PartTable
    key: bytes
    row: int
    origin: Origin
    pin: int

    @property
    def ident(self) -> int:
        """See `Evictable`. The same in every process, unlike Python's own hash."""
        return xxh3_64_intdigest(self.key, self.table.number)

    @property
    def checksum(self) -> bytes:
        """Of its bytes. For several blocks `checksums_of` is faster."""
        return self.table.slots.checksums.get([self.row])

    @property
    def secondary(self) -> bool:
        """Other nodes keep a replica: this one goes first."""
        return self.origin.secondary

    @property
    def hops(self) -> int:
        """How often it was forwarded to a node with room."""
        return self.origin.hops

    @property
    def replicas(self) -> int:
        """Wanted in the cluster; 0: the namespace's setting."""
        return self.origin.replicas

    @property
    def gone(self) -> bool:
        """Removed while leased: no longer in its table ("evicting")."""
        return self.pin == _GONE

    @property
    def expendable(self) -> bool:
        """It goes before others, until it is read."""
        return is_expendable(self)

    @property
    def base(self) -> bytes:
        """The digest by which its namespace is opened; identifies blocks with a quota of their own."""
        return self.table.namespace.base


class Block(BlockFacts, msgspec.Struct, gc=False, eq=False):
    """One committed part of a block. Compared by identity.

    `gc=False`: there may be millions, and the cyclic collector must not walk them; nothing here
    points back to a block except tables that drop it explicitly.
    """

    table: PartTable
    key: bytes
    row: int
    parent: bytes  # the key before it in the prefix chain, or empty
    depth: int  # blocks before it in its chain, counting those that were here when it arrived
    put: int  # the node's tick at that time
    used: int  # the same at its last use
    # Used only by the eviction policy:
    freq: int = 0
    queue: int = 0
    older: Any = None
    newer: Any = None
    # Used only by the node:
    leases: int = 0
    origin: Origin = OWN
    written: int = -1  # `used` when it was last written to a disk
    kept: int = -1  # `used` when it was last found in object storage, or written there
    left: int = -1  # `used` when nobody was to continue it any more
    pin: int = PIN_NONE

    @property
    def parent_known(self) -> bool:
        """Where blocks are packed, `parent` may be missing: see `PackedBlock`."""
        return True

    def go(self) -> None:
        """It is `gone` from now on; it has no pin, and is in no policy."""
        self.pin = _GONE

    def is_here(self) -> bool:
        """Whether it can be found: not evicted, removed or of an ended epoch."""
        return self.table.blocks.get(self.key) is self


@dataclass(eq=False, repr=False, slots=True)
class PartTable:
    """The committed blocks of one part of one namespace."""

    namespace: NamespaceState
    part: int
    spec: PartSpec
    number: int
    """Unique among the node's tables."""
    stride: int
    blocks: BlockIndex[Block]
    garbage: BlockIndex[Block] = field(default_factory=BlockIndex, init=False)
    """The former `blocks` of an ended epoch: they cannot be found, and are not freed yet."""
    slots: SlotClass = field(init=False)
    """The slots of its stride; set with its first block."""
    hard_bytes: int = field(default=0, init=False)
    """Bytes of `blocks` and `garbage` under a hard pin."""
    soft_bytes: int = field(default=0, init=False)
    """The same under a soft pin."""
    reserved: int = field(default=0, init=False)
    """Slots that are reserved for keys of this table and not settled."""
    going: int = field(default=0, init=False)
    """Slots of removed blocks that are still leased."""

    def forget(self, keys: Sequence[bytes]) -> None:
        """Take blocks out, whether their epoch has ended or not."""
        (self.garbage if self.namespace.retired else self.blocks).remove(keys)


@dataclass(eq=False, repr=False, slots=True)
class NamespaceState:
    """A namespace in one epoch, as this node knows it."""

    tenant: Tenant
    base: bytes
    """The digest of its fields, by which clients open it."""
    fields: bytes
    parts: tuple[PartSpec, ...]
    number: int
    epoch: int = 0
    generation: int = 0
    """The generation of the weights that its blocks were computed with, counted by the cluster."""
    base_hex: str = field(init=False)
    space: int = field(init=False)
    """64 bits for the tenant and the base, the same in every tier."""
    digest: bytes = field(init=False)
    """The digest of this epoch, by which peers know it."""
    directory_digest: bytes = field(init=False)
    """A digest that includes the tenant, because the directory is shared."""
    settings: NamespaceSettings = field(default=DEFAULT_SETTINGS, init=False)
    """The cluster's settings, within this node's limits."""
    quota: int = field(default=0, init=False)
    """Bytes that it may hold in this tier, or 0 for the tenant's limit."""
    kept: dict[bytes, float] = field(default_factory=dict, init=False)
    """Blocks that are kept for a time, with its end: see `Keeps`."""
    retired: bool = field(default=False, init=False)
    """Its epoch has ended."""
    tables: list[PartTable] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.base_hex = self.base.hex()
        self.space = int.from_bytes(directory_digest(self.tenant.name, self.base)[:8])
        self.digest = epoch_digest(self.base, self.epoch)
        self.directory_digest = directory_digest(self.tenant.name, self.digest)

    @property
    def fenced(self) -> bool:
        """Whether its clients must reopen it before they can store blocks."""
        return self.epoch < self.tenant.fences.get(self.base, 0)

    def check_epoch(self) -> None:
        """Raises `StaleEpoch` if its epoch has ended for those who opened it."""
        if self.retired:
            raise StaleEpoch(
                f"namespace {self.base.hex()} was reset after this client opened it in epoch {self.epoch}: open it "
                "again once the new weights are loaded"
            )

    def table(self, part: int) -> PartTable:
        """The table of a part. Raises `InvalidRequest`."""
        if not 0 <= part < len(self.tables):
            raise InvalidRequest(
                f"there is no part {part}: this namespace has parts 0 to {len(self.tables) - 1}"
            )
        return self.tables[part]

    def tables_of(self, parts: Sequence[int]) -> list[PartTable]:
        """The tables of some parts, or of all. Raises `InvalidRequest`."""
        if not parts:
            return self.tables
        if len(set(parts)) != len(parts):
            raise InvalidRequest("a part is named twice")
        return [self.table(part) for part in parts]

    @property
    def held_bytes(self) -> int:
        """Bytes of its blocks' slots, and of slots reserved for further blocks."""
        return sum((len(table.blocks) + table.reserved) * table.stride for table in self.tables)


class BlockRecords(Protocol):
    """The blocks of one size by the rows of their slots, which is needed to empty a slab without a scan of all."""

    def enter(
        self,
        table: PartTable,
        keys: Sequence[bytes],
        rows: Sequence[int],
        parents: Sequence[bytes],
        depths: Iterable[int],
        tick: int,
    ) -> list[Block]:
        """Make new blocks, and enter them here and in their table. Their keys differ, and are not in it yet."""

    def new_queue(self) -> EntryQueue:
        """An empty eviction queue for these blocks."""

    def clear(self, rows: Sequence[int]) -> None:
        """These slots have no blocks any more."""

    def empty(self, first: int, end: int) -> None:
        """The slots from `first` up to `end` have no blocks any more."""

    def between(self, first: int, end: int) -> list[Block]:
        """The blocks in rows from `first` up to `end`, in order."""

    def __len__(self) -> int:
        """One more than the highest row that was ever used."""


class BlockObjects(RowIndex[Block]):
    """`BlockRecords` for memory: an object each, which is fast and takes 320 bytes."""

    __slots__ = ()

    new_queue = EvictionQueue

    def enter(
        self,
        table: PartTable,
        keys: Sequence[bytes],
        rows: Sequence[int],
        parents: Sequence[bytes],
        depths: Iterable[int],
        tick: int,
    ) -> list[Block]:
        """See `BlockRecords`. Uses C loops: it runs for every put."""
        ticks = repeat(tick)
        new = list(map(Block, repeat(table), keys, rows, parents, depths, ticks, ticks))
        table.blocks.add(keys, new)
        self.put(rows, new)
        return new


class SlotClass:
    """All slots of one stride in a tenant's segment, and their eviction order.

    Secondary replicas go first, the least recently used before the rest (`secondary`); then expendable blocks and
    the policy's other victims; soft pins last. Each list of blocks is of one table.
    """

    __slots__ = (
        "by_row",
        "checksums",
        "parked",
        "policy",
        "secondary",
        "soft",
        "stride",
        "stuck_at",
    )

    def __init__(
        self, stride: int, rows: int, policy: ExpendableFirst, by_row: BlockRecords
    ) -> None:
        """policy: with queues of `by_row`."""
        self.stride = stride
        self.policy: ExpendableFirst | QuotaEviction = policy
        # Its capacity bounds nothing.
        self.secondary: EvictionPolicy = Lru(1, new_queue=by_row.new_queue)
        self.soft: SoftPins[Block] = SoftPins(by_row.new_queue)
        # Those that came up as victims while leased, and are in no policy: their `used` at that time.
        self.parked: dict[Block, int] = {}
        self.stuck_at: dict[
            bool, int
        ] = {}  # `Slots.releases` when no other class could give a slab
        self.by_row = by_row
        self.checksums = Checksums(rows)

    def divide(
        self, base: bytes, capacity: int, make_policy: MakeExpendableFirst, *, empty: bool
    ) -> None:
        """Give a namespace its own eviction order: see `QuotaEviction.divide`."""
        if not isinstance(self.policy, QuotaEviction):
            rows, new_queue = self.by_row, self.by_row.new_queue
            self.policy = QuotaEviction(
                self.policy, lambda size: make_policy(size, new_queue), rows
            )
            lru = partial(Lru, new_queue=new_queue)
            self.secondary = QuotaEviction(self.secondary, lru, rows, secondary=True)
        for policy in self.orders:
            policy.divide(base, capacity, empty=empty)

    @property
    def orders(self) -> tuple[QuotaEviction, ...]:
        """Separate eviction orders, in the order in which they give up blocks; empty if there are none."""
        if isinstance(self.policy, QuotaEviction) and isinstance(self.secondary, QuotaEviction):
            return self.secondary, self.policy
        return ()

    def insert(self, blocks: Sequence[Block]) -> None:
        """Make blocks without a pin candidates."""
        second = [block for block in blocks if block.secondary]
        if not second:
            self.policy.insert(blocks)
            return
        self.secondary.insert(second)
        if len(second) < len(blocks):
            self.policy.insert([block for block in blocks if not block.secondary])

    def put_back(self, blocks: Sequence[Block]) -> None:
        """Unpinned blocks that could not be evicted when it was their turn: see `EvictionPolicy.put_back`."""
        second = [block for block in blocks if block.secondary]
        if second:
            self.secondary.put_back(second)
            blocks = [block for block in blocks if not block.secondary]
        self.policy.put_back(blocks)

    def touch(self, blocks: Sequence[Block]) -> None:
        """The blocks were read."""
        if len(self.secondary):
            second = [block for block in blocks if block.secondary]
            if second:
                self.secondary.touch(second)
                blocks = [block for block in blocks if not block.secondary]
        self.policy.touch(blocks)

    def refresh(self, blocks: Sequence[Block]) -> None:
        """They precede others in a chain: see `EvictionPolicy.refresh`."""
        if len(self.secondary):
            self.secondary.refresh([block for block in blocks if block.secondary])
            blocks = [block for block in blocks if not block.secondary]
        self.policy.refresh(blocks)

    def expend(self, blocks: Sequence[Block]) -> int:
        """Those of these that are candidates, and not secondary, go before others; how many are newly so. See `ExpendableFirst`."""
        chosen = [block for block in blocks if not block.secondary and self.is_candidate(block)]
        return self.policy.expend(chosen) if chosen else 0

    def discard(self, block: Block) -> None:
        """No longer a candidate."""
        (self.secondary if block.secondary else self.policy).discard([block])

    def discard_all(self, blocks: Sequence[Block]) -> list[Block]:
        """None of these is a candidate any more; returns those that were none before."""
        parked = self.parked
        was = [block for block in blocks if block.pin == PIN_NONE]
        if parked:
            was = [block for block in was if block not in parked]
        others = [] if len(was) == len(blocks) else [b for b in blocks if not self.is_candidate(b)]
        if len(self.secondary):
            self.secondary.discard([block for block in was if block.secondary])
            was = [block for block in was if not block.secondary]
        self.policy.discard(was)
        return others

    def is_candidate(self, block: Block) -> bool:
        """Whether a policy holds it, rather than a pin or a lease."""
        return block.pin == PIN_NONE and block not in self.parked


@dataclass(eq=False, repr=False, slots=True)
class Tenant:
    """A tenant: its segment, its blocks, and its pin quotas. No tenant sees another's."""

    name: str
    segment: int
    allocator: SlabAllocator
    classes: dict[int, SlotClass] = field(default_factory=dict, init=False)
    namespaces: dict[bytes, NamespaceState] = field(default_factory=dict, init=False)
    """Living namespaces, by digest."""
    epochs: dict[bytes, list[NamespaceState]] = field(default_factory=dict, init=False)
    """All epochs by base, the living one last."""
    fences: dict[bytes, int] = field(default_factory=dict, init=False)
    """Epochs by base: namespaces opened in an epoch below it are fenced out."""
    holders: dict[int, Holder] = field(default_factory=dict, init=False)
    """Holders by `id()`."""
    pinned: dict[int, Counter[int]] = field(
        default_factory=lambda: {PIN_HARD: Counter(), PIN_SOFT: Counter()}, init=False
    )
    """How many blocks under each kind of pin are in a slab, of the slabs that have any."""
    granted_bytes: int = field(default=0, init=False)
    evicted: int = field(default=0, init=False)
    """Blocks that made way for others."""

    def count_pin(self, block: Block, change: int) -> None:
        """A block has got, or lost, its pin."""
        counts = self.pinned[block.pin]
        slab = self.allocator.slab_of(block.table.stride, block.row)
        counts[slab] += change
        if not counts[slab]:
            del counts[slab]

    @property
    def hard_bytes(self) -> int:
        """Bytes of its quota held by hard pins: ended epochs do not count."""
        return sum(table.hard_bytes for one in self.namespaces.values() for table in one.tables)

    @property
    def soft_bytes(self) -> int:
        """The same of soft pins."""
        return sum(table.soft_bytes for one in self.namespaces.values() for table in one.tables)


@dataclass(eq=False, slots=True)
class Holder:
    """A holder of reservations and leases: one client in one process. The server watches the process.

    instance: the engine instance that its leases belong to; processes of one instance join them.
    """

    tenant: Tenant
    instance: str
    name: str = ""
    operator: bool = False  # may inspect and change more than its tenant's own
    uid: int = -1  # the user of the process, from the kernel; -1: not checked
    reservations: dict[int, Reservation] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    reserved_bytes: int = 0
    granted: dict[int, set[int]] = field(default_factory=dict)  # stride → rows without keys
    granted_bytes: int = 0
    ready: dict[int, list[int]] = field(default_factory=dict)  # granted, and not reported yet

    def check_alive(self) -> None:
        """Raises if the holder is dead: what a dead holder took, in a request that was waiting meanwhile, would
        never be freed.
        """
        if id(self) not in self.tenant.holders:
            raise InvalidRequest("this client is closed or its process is dead: connect again")

    @property
    def idle(self) -> bool:
        """Whether it holds nothing."""
        return not self.reservations and not self.leases and not self.granted_bytes


@dataclass(eq=False, slots=True)
class Reservation:
    """Slots that a holder writes and has not settled: sequences of one length, in chain order."""

    table: PartTable
    indices: Sequence[int]  # which of the requested keys
    keys: Sequence[bytes]
    parents: Sequence[bytes]  # of each key, the one before it in the prefix chain
    rows: list[int]
    left: dict[int, int] | None = None  # key index → position, once some are settled
    requests: Requests = ()  # on whose behalf, in the order of the requested keys
    new: Sequence[int] | None = None  # which of the blocks of its last commit were new; None: all
    added: int = -1  # `BlockIndex.added` of the table when these keys were not there, and differed from one another

    @property
    def open_rows(self) -> list[int]:
        """The rows that are not settled."""
        if self.left is None:
            return self.rows
        return [self.rows[position] for position in self.left.values()]

    @property
    def new_indices(self) -> Sequence[int]:
        """Which of the requested keys became new blocks with the last commit."""
        return self.indices if self.new is None else [self.indices[at] for at in self.new]

    def positions(self, indices: Sequence[int], ticket: int) -> list[int]:
        """Positions of these key indices in the sequences. Raises `UnknownReservation`."""
        if self.left is None:
            self.left = {index: position for position, index in enumerate(self.indices)}
        found = [self.left.get(index, -1) for index in indices]
        if -1 in found:
            index = indices[found.index(-1)]
            raise UnknownReservation(f"key {index} of reservation {ticket} has no reserved slot")
        if len(set(found)) != len(found):
            raise UnknownReservation(f"a key of reservation {ticket} is committed twice")
        return found


@dataclass(eq=False, slots=True)
class Beside:
    """A lease's slots in spare device memory.

    life: of the process that owns it. parts: part → its slots there, in block order, None for those that the
    lease has in memory. end: gives them back; called once. nbytes: of those slots.
    """

    life: int
    parts: dict[int, list[Block | None]]
    end: Callable[[], None]
    nbytes: int = 0


@dataclass(eq=False, slots=True)
class Lease:
    """A right to read. It lives while it has holders, and not past its deadline."""

    token: str
    tenant: Tenant
    instance: str
    deadline: float | None  # None: until it is returned (transfer workers, whose death is watched)
    blocks: int
    parts: dict[int, tuple[int, list[Block]]]  # part → (first block index, its slots in order)
    is_use: bool = True  # otherwise they only stay in place: see `Leases.hold`
    holders: dict[int, Holder] = field(default_factory=dict)  # by id()
    holds: dict[int, int] = field(default_factory=dict)  # how often each has joined
    beside: Beside | None = None
    request: str = ""  # on whose behalf
    unread: bool = False  # it is for those who join it: read with the first of them

    def read_on(self, table: PartTable, blocks: Sequence[Block]) -> None:
        """These blocks stay in their slots until it ends."""
        for block in blocks:
            block.leases += 1
        _, held = self.parts.setdefault(table.part, (0, []))
        held += blocks


def by_table(blocks: Iterable[Block]) -> dict[PartTable, list[Block]]:
    """The blocks of each table, in their order."""
    found: dict[PartTable, list[Block]] = {}
    for block in blocks:
        found.setdefault(block.table, []).append(block)
    return found


def checksums_of(blocks: Sequence[Block]) -> bytes:
    """The checksums of blocks, packed in their order."""
    return b"".join(
        slots.checksums.get([block.row for block in some])
        for slots, some in groupby(blocks, key=lambda block: block.table.slots)
    )


def directory_digest(tenant: str, digest: bytes) -> bytes:
    """The name of a namespace in the directory: tenants do not see each other's blocks."""
    return hashlib.sha256(tenant.encode() + b"\0" + digest).digest()[:16]

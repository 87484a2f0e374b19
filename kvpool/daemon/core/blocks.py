"""What a node keeps its books on: blocks, tables, classes, tenants, holders, leases. Data, no rules."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from kvpool.daemon.core.quota_eviction import QuotaEviction
from kvpool.daemon.telemetry.traffic import Traffic
from kvpool.errors import InvalidRequest, StaleEpoch, UnknownReservation
from kvpool.placement.records import DEFAULT_SETTINGS, epoch_digest
from kvpool.storage.eviction import EvictionPolicy, Lru
from kvpool.storage.slab import SlabAllocator
from kvpool.types import PartSpec

PIN_NONE, PIN_SOFT, PIN_HARD = 0, 1, 2
PIN_KINDS = {"none": PIN_NONE, "soft": PIN_SOFT, "hard": PIN_HARD}


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
    depth: int  # blocks before it in its chain, as far as they were here when it came
    put: int  # the node's tick then
    used: int  # the same at its last use
    # The eviction policy's, and nobody else's:
    freq: int = 0
    queue: int = 0
    # The node's:
    leases: int = 0
    secondary: bool = False  # others hold a copy that they keep: this one goes first
    hops: int = 0  # how often it was handed on to a node with room
    written: int = -1  # `used` when it was last written to a disk
    kept: int = -1  # `used` when it was last found in object storage, or written there
    replicas: int = 0  # wanted in the cluster; 0: as its namespace says
    pin: int = PIN_NONE
    parked: int = -1  # came up as a victim while leased, and is in no policy: `used` at that time
    gone: bool = False  # removed while leased: not in its table any more ("evicting")

    @property
    def ident(self) -> bytes:
        """What the policy's ghost list remembers of it."""
        return self.key + self.table.tag

    @property
    def base(self) -> bytes:
        """By what its namespace is opened: blocks with a quota of their own are known by that."""
        return self.table.namespace.base

    def is_here(self) -> bool:
        """Whether it is found: not evicted, removed or of an ended epoch."""
        return self.table.blocks.get(self.key) is self


class Origin(NamedTuple):
    """What is known of new blocks beside their bytes: fields of `Block`."""

    secondary: bool = False
    hops: int = 0
    replicas: int = 0
    depths: Sequence[int] = ()


OWN = Origin()


class PartTable:
    """The committed blocks of one part of one namespace.

    garbage: what was in `blocks` when the namespace's epoch ended: found by nobody, and not yet freed.
    hard_bytes, soft_bytes: of both, under a pin.
    soft: soft pins among them that may go, oldest first.
    reserved: slots that are reserved for keys of this table and not settled.
    writing: of these, those that peers may read the beginning of, with their rows.
    """

    __slots__ = (
        "blocks",
        "garbage",
        "hard_bytes",
        "namespace",
        "part",
        "reserved",
        "soft",
        "soft_bytes",
        "spec",
        "stride",
        "tag",
        "writing",
    )

    def __init__(
        self, namespace: NamespaceState, part: int, spec: PartSpec, number: int, stride: int
    ) -> None:
        self.namespace = namespace
        self.part = part
        self.spec = spec
        self.tag = number.to_bytes(4, "little")  # unique among the node's tables
        self.stride = stride
        self.blocks: dict[bytes, Block] = {}
        self.garbage: dict[bytes, Block] = {}
        self.hard_bytes = 0
        self.soft_bytes = 0
        self.soft: OrderedDict[Block, None] = OrderedDict()
        self.reserved = 0
        self.writing: dict[bytes, tuple[Reservation, int]] = {}

    def forget(self, block: Block) -> None:
        """Take a block out, whether its epoch has ended or not."""
        del (self.garbage if self.namespace.retired else self.blocks)[block.key]


class NamespaceState:
    """A namespace in one epoch, as this node knows it.

    base: the digest of its fields, by which clients open it. digest: that of this epoch, by which peers
    know it. directory_digest: with the tenant in it, since the directory is everybody's.
    generation: of the weights that its blocks were computed with, counted by the cluster.
    settings: as the cluster has agreed on them, within this node's limits.
    quota: bytes that it may hold in this tier; 0: as many as its tenant.
    retired: its epoch has ended.
    """

    __slots__ = (
        "base",
        "digest",
        "directory_digest",
        "epoch",
        "fields",
        "generation",
        "number",
        "parts",
        "quota",
        "retired",
        "settings",
        "tables",
        "tenant",
    )

    def __init__(
        self,
        tenant: Tenant,
        base: bytes,
        fields: bytes,
        parts: Sequence[PartSpec],
        number: int,
        epoch: int = 0,
        generation: int = 0,
    ) -> None:
        self.tenant = tenant
        self.base = base
        self.epoch = epoch
        self.generation = generation
        self.digest = epoch_digest(base, epoch)
        self.directory_digest = directory_digest(tenant.name, self.digest)
        self.fields = fields
        self.parts = tuple(parts)
        self.number = number
        self.settings = DEFAULT_SETTINGS
        self.quota = 0
        self.retired = False
        self.tables: list[PartTable] = []

    @property
    def fenced(self) -> bool:
        """Whether what its clients compute is not to be stored any more, until they open it again."""
        return self.epoch < self.tenant.fences.get(self.base, 0)

    def check_epoch(self) -> None:
        """Raises `StaleEpoch` when its epoch has ended for those who opened it."""
        if self.retired:
            raise StaleEpoch(
                f"namespace {self.base.hex()} was reset after this client opened it in epoch "
                f"{self.epoch}: open it again once the weights are the new ones"
            )

    def table(self, part: int) -> PartTable:
        """The table of a part. Raises `InvalidRequest`."""
        if not 0 <= part < len(self.tables):
            raise InvalidRequest(
                f"part {part}: this namespace has parts 0 to {len(self.tables) - 1}"
            )
        return self.tables[part]

    def tables_of(self, parts: Sequence[int]) -> list[PartTable]:
        """Those of some parts, or of all. Raises `InvalidRequest`."""
        if not parts:
            return self.tables
        if len(set(parts)) != len(parts):
            raise InvalidRequest("a part is named twice")
        return [self.table(part) for part in parts]

    @property
    def held_bytes(self) -> int:
        """Bytes of the slots that its blocks have, and of those that are reserved for more of them."""
        return sum((len(table.blocks) + table.reserved) * table.stride for table in self.tables)


class SlotClass:
    """All slots of one stride in a tenant's segment, and the order in which they are given up.

    Copies that others keep go first, the least recently used before the rest (`secondary`); then
    what the policy says; soft pins at last. Lists of blocks are of one table each.
    """

    __slots__ = ("by_row", "policy", "secondary", "soft", "stride", "stuck_at")

    def __init__(self, stride: int, policy: EvictionPolicy) -> None:
        self.stride = stride
        self.policy = policy
        self.secondary: EvictionPolicy = Lru(1)  # its capacity bounds nothing
        self.soft: OrderedDict[Block, None] = OrderedDict()  # soft pins, oldest first
        self.stuck_at: dict[
            bool, int
        ] = {}  # `Slots.releases` when no other class could give a slab
        self.by_row: list[Block | None] = []  # needed to empty a slab without a scan of all blocks

    def reach(self, row: int) -> None:
        """Rows up to this one are about to be used."""
        by_row = self.by_row
        if row >= len(by_row):
            by_row.extend([None] * (row + 1 - len(by_row)))

    def divide(
        self,
        base: bytes,
        capacity: int,
        blocks: Sequence[Block],
        make_policy: Callable[[int], EvictionPolicy],
    ) -> None:
        """Have orders of its own for a namespace that holds these blocks: see `QuotaEviction.divide`."""
        if not isinstance(self.policy, QuotaEviction):
            self.policy = QuotaEviction(self.policy, make_policy)
            self.secondary = QuotaEviction(self.secondary, Lru)
        for policy in self.orders:
            copies = policy is self.secondary
            policy.divide(base, capacity, [one for one in blocks if one.secondary is copies])

    @property
    def orders(self) -> tuple[QuotaEviction, ...]:
        """What was divided, in the order in which they give blocks up; none if nothing was."""
        if isinstance(self.policy, QuotaEviction) and isinstance(self.secondary, QuotaEviction):
            return self.secondary, self.policy
        return ()

    def add_soft(self, block: Block, *, first: bool = False) -> None:
        """A soft pin that may go if all else has gone. first: before all other soft pins."""
        for soft in (self.soft, block.table.soft):
            soft[block] = None
            if first:
                soft.move_to_end(block, last=False)

    def drop_soft(self, block: Block) -> None:
        """It may not go any more, or has gone."""
        del self.soft[block]
        del block.table.soft[block]

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
        """Those without a pin that could not go when it was their turn: see `EvictionPolicy.put_back`."""
        second = [block for block in blocks if block.secondary]
        if second:
            self.secondary.put_back(second)
            blocks = [block for block in blocks if not block.secondary]
        self.policy.put_back(blocks)

    def touch(self, blocks: Sequence[Block]) -> None:
        """They were read."""
        if len(self.secondary):
            second = [block for block in blocks if block.secondary]
            if second:
                self.secondary.touch(second)
                blocks = [block for block in blocks if not block.secondary]
        self.policy.touch(blocks)

    def refresh(self, blocks: Sequence[Block]) -> None:
        """They come before others in a chain: see `EvictionPolicy.refresh`."""
        if len(self.secondary):
            self.secondary.refresh([block for block in blocks if block.secondary])
            blocks = [block for block in blocks if not block.secondary]
        self.policy.refresh(blocks)

    def discard(self, block: Block) -> None:
        """No candidate any more."""
        (self.secondary if block.secondary else self.policy).discard(block)


class Tenant:
    """A tenant: its segment, what lies in it, and what it may pin. No tenant sees another's."""

    __slots__ = (
        "allocator",
        "classes",
        "epochs",
        "fences",
        "granted_bytes",
        "hard",
        "holders",
        "name",
        "namespaces",
        "segment",
        "traffic",
    )

    def __init__(self, name: str, segment: int, allocator: SlabAllocator) -> None:
        self.name = name
        self.segment = segment
        self.allocator = allocator
        self.classes: dict[int, SlotClass] = {}
        self.namespaces: dict[bytes, NamespaceState] = {}  # living ones, by digest
        self.epochs: dict[bytes, list[NamespaceState]] = {}  # by base, the living one last
        self.fences: dict[bytes, int] = {}  # by base: what was opened in an epoch below it is out
        self.holders: dict[int, Holder] = {}  # by id()
        self.hard: dict[Block, None] = {}  # hard pins, of all classes
        self.granted_bytes = 0
        self.traffic = Traffic()

    @property
    def hard_bytes(self) -> int:
        """What hard pins hold of its quota: those of ended epochs are in none."""
        return sum(table.hard_bytes for one in self.namespaces.values() for table in one.tables)

    @property
    def soft_bytes(self) -> int:
        """The same of soft pins."""
        return sum(table.soft_bytes for one in self.namespaces.values() for table in one.tables)


@dataclass(eq=False, slots=True)
class Holder:
    """Who reserves and leases: one client in one process. The server watches the process.

    instance: the engine instance that its leases belong to; processes of one instance join them.
    """

    tenant: Tenant
    instance: str
    name: str = ""
    operator: bool = False  # may inspect and change what is not its tenant's own
    uid: int = -1  # whose process it is, by the kernel's word; -1: nobody asked
    reservations: dict[int, Reservation] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    reserved_bytes: int = 0
    granted: dict[int, set[int]] = field(default_factory=dict)  # stride → rows without keys
    granted_bytes: int = 0
    ready: dict[int, list[int]] = field(default_factory=dict)  # granted, and not told of yet

    def check_alive(self) -> None:
        """What a dead holder took, as by a request that waited while it died, would never come back."""
        if id(self) not in self.tenant.holders:
            raise InvalidRequest("this client is closed or its process is dead: connect again")

    @property
    def idle(self) -> bool:
        """Whether it holds nothing."""
        return not self.reservations and not self.leases and not self.granted_bytes


@dataclass(eq=False, slots=True)
class Reservation:
    """Slots that a holder writes and has not settled: sequences of one length, in chain order.

    written: bytes of each slot that are as they will be committed, as its holder promises; 0: none, or it says
    nothing of that. number: given with the first such word, unique on the node.
    readers: leases of peers that read what is written. orphans: rows that came back meanwhile, and are free when
    the last of these ends.
    """

    table: PartTable
    indices: Sequence[int]  # which of the keys asked for
    keys: Sequence[bytes]
    parents: Sequence[bytes]  # of each key, the one before it in the prefix chain
    rows: list[int]
    left: dict[int, int] | None = None  # key index → position, once some of it is settled
    written: int = 0
    number: int = 0
    readers: dict[str, Lease] = field(default_factory=dict)  # by token
    orphans: list[int] = field(default_factory=list)

    @property
    def open_rows(self) -> list[int]:
        """The rows that are not settled."""
        if self.left is None:
            return self.rows
        return [self.rows[position] for position in self.left.values()]

    def stop_telling(self, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """These are settled: what peers get of them from now on is blocks, or nothing."""
        if not self.written:
            return
        writing = self.table.writing
        for key, row in zip(keys, rows, strict=True):
            if writing.get(key) == (self, row):
                del writing[key]

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
class Beside:
    """What a lease has of spare device memory.

    life: of the process that owns it. parts: part → its slots there, in block order, None for those that the
    lease has in memory. end: gives them back; called once. nbytes: of those slots.
    """

    life: int
    parts: dict[int, list[Block | None]]
    end: Callable[[], None]
    nbytes: int = 0


@dataclass(eq=False, slots=True)
class Lease:
    """A right to read. It lives while it has holders, and not past its deadline.

    reading: reservations that it has slots of: what they become is read on, or nobody's until it ends.
    """

    token: str
    tenant: Tenant
    instance: str
    deadline: float | None  # None: until it is returned (transfer workers, whose death is watched)
    blocks: int
    parts: dict[int, tuple[int, list[Block]]]  # part → (first block index, its slots in order)
    is_use: bool = True  # else they only stay where they are: see `Leases.hold`
    holders: dict[int, Holder] = field(default_factory=dict)  # by id()
    holds: dict[int, int] = field(default_factory=dict)  # how often each has joined
    beside: Beside | None = None
    reading: Sequence[Reservation] = ()

    def read_on(self, table: PartTable, blocks: Sequence[Block]) -> None:
        """These blocks stay in their slots until it ends."""
        for block in blocks:
            block.leases += 1
        _, held = self.parts.setdefault(table.part, (0, []))
        held += blocks


def directory_digest(tenant: str, digest: bytes) -> bytes:
    """By what the directory knows a namespace: tenants do not see each other's blocks."""
    return hashlib.sha256(tenant.encode() + b"\0" + digest).digest()[:16]

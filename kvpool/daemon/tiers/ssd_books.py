"""The books of one disk of this node: which block is in which of its slots.

The rules of the slots are those of memory: a `Node` of its own, whose segment is the file, whose leases
are reads under way, and whose reservations are writes under way. The difference is that its slots survive
the process. So a freed slot is *forgotten* in the index before anything else is written to it
(each order to write carries the slots to forget first), and a new life of the disk worker begins with
its index (`ssd_restore`).

Compressed blocks are in shorter slots, of a few lengths. To the rules each length is a
table of its own beside that of the part, made when it is first needed; a block is in one of them. The size of
a compressed block is known after packing, so it is packed first and gets its slot afterwards.

Event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvpool.daemon.core.blocks import PIN_KINDS, Block, Holder, Lease, NamespaceState, PartTable
from kvpool.daemon.core.node import Node
from kvpool.daemon.core.pins import PinsBefore, levels
from kvpool.daemon.tiers.tier_state import TierState
from kvpool.daemon.workers.disk_proxy import Disk
from kvpool.errors import (
    InvalidRequest,
    KvpoolError,
    LimitExceeded,
    Unavailable,
)
from kvpool.placement.records import DEFAULT_SETTINGS, NamespaceSettings, quota_bytes
from kvpool.storage.at_rest import place_name
from kvpool.storage.slab import CLASSES_MAX, PAGE, SlabAllocator
from kvpool.telemetry.tier_stats import SsdStats
from kvpool.types import BlockStatus, PartSpec, plain_parts, split_keys
from kvpool.wire import storage as storage_wire

log = logging.getLogger("kvpool.daemon")

FORGET_S = 30.0  # for the index to take deletions
FAILURES_MAX = 2  # of one place, after which it is not used any more
FAILURES_KEPT = 4096  # places whose failures are remembered
RETIRED_SHARE = 32  # at most one of so many bytes is retired


class TableRecord(msgspec.Struct, array_like=True, frozen=True):
    """A table's record in the index, by which a later life of this node recognises it."""

    tenant: str
    base: bytes
    fields: bytes
    parts: list[tuple[int, str, int, int]]
    part: int
    epoch: int
    generation: int
    settings: NamespaceSettings = DEFAULT_SETTINGS


class BadPlaces:
    """Places of a disk that failed repeatedly: a sector that cannot keep what is written there fails every block.

    Known for the life of the daemon: after a restart a place has to fail again. If too much fails, the disk is at
    fault, and not its places; none is retired any more.
    """

    def __init__(self, size: int, counted: SsdStats) -> None:
        self._failures: OrderedDict[int, int] = OrderedDict()  # by offset; the last ones
        self._bytes_max = size // RETIRED_SHARE
        self._counted = counted
        self.offsets: set[int] = set()  # to retire when their blocks are gone

    def failed(self, offset: int) -> None:
        """What was written there was not read back, or could not be written."""
        count = self._failures.pop(offset, 0) + 1
        self._failures[offset] = count
        if count >= FAILURES_MAX:
            self.offsets.add(offset)
        if len(self._failures) > FAILURES_KEPT:
            gone, _ = self._failures.popitem(last=False)
            self.offsets.discard(gone)

    def retire(self, offset: int, nbytes: int) -> bool:
        """Whether this place, whose block is gone, is to have no other one."""
        if offset not in self.offsets or self._counted.retired_bytes + nbytes > self._bytes_max:
            return False
        self._counted.retired_bytes += nbytes
        log.warning(
            "a slot of %d bytes at %d of the disk at %s failed %d times and is not used any more",
            nbytes,
            offset,
            self._counted.path,
            FAILURES_MAX,
            extra={"disk": self._counted.path},
        )
        return True


class Slots(SlabAllocator):
    """An allocator that reports freed places, and keeps bad ones."""

    def __init__(self, base: int, size: int, given_up: array[int], bad: BadPlaces) -> None:
        super().__init__(size)
        self._base = base
        self._given_up = given_up
        self._bad = bad
        self.retired_bytes = 0

    def free(self, stride: int, rows: Sequence[int]) -> None:
        base = self._base
        self._given_up.extend([base + row * stride for row in rows])
        if self._bad.offsets:
            # A retired one stays in use, as if it were reserved for ever.
            gone = {row for row in rows if self._bad.retire(base + row * stride, stride)}
            self.retired_bytes += len(gone) * stride
            self.retire(stride, gone)
            rows = [row for row in rows if row not in gone]
        super().free(stride, rows)

    def reuse(self, stride: int, rows: list[int]) -> list[int]:
        self.free(stride, rows)
        return self.alloc(stride, len(rows))

    def reclaim_slab(self, slab: int, used: int = 0) -> None:
        if used:
            self.free(self.owner(slab), self.rows_used(slab))
        if not self.used_in_slab(slab):  # otherwise a place in it is retired now
            super().reclaim_slab(slab)


@dataclass(eq=False)
class SsdBooks:
    """See the module. State shared by restore, writes and reads.

    shares: of the segment for each tenant; laid out in the order of their names.
    weight: the part of all disks' bytes that this one has, and so of a namespace's quota.
    make_node: rules for its slots, without tenants.
    """

    path: str
    size: int
    shares: Mapping[str, float]
    make_node: Callable[[], Node]
    clock: Callable[[], float]
    weight: float = 1.0

    def __post_init__(self) -> None:
        self.state = TierState.OPENING
        self.error = ""
        self.node = self.make_node()
        self.disk: Disk | None = None
        self.given_up: array[int] = array("Q")
        self.refused = False  # an index may postpone deletions until it is asked again
        self.bases: dict[str, int] = {}
        self.holders: dict[str, Holder] = {}
        # As the index knows them.
        self.numbers: dict[PartTable, tuple[int, NamespaceSettings]] = {}
        self._numbering = asyncio.Lock()
        self._too_large: set[bytes] = set()  # namespaces that cannot be here, already logged
        self.seal_bytes = 0  # by how much a block in a slot is longer, if it is encrypted
        self.nbytes: dict[PartTable, int] = {}  # of a block; its slot is whole pages
        self.parts: dict[PartTable, int] = {}  # of a block, in tables of shorter slots too
        self.shorter: dict[PartTable, dict[int, PartTable]] = {}  # by length, beside a part's own
        self.codecs: Sequence[str] = ()  # that the process can use
        self.codec_error = ""  # why blocks are not packed although a namespace has a codec
        self.counted = SsdStats(path=self.path, size_bytes=self.size)
        self.bad = BadPlaces(self.size, self.counted)

    def forget_all(self) -> None:
        self.disk = None
        former, self.node = self.node, self.make_node()
        former.end()
        self.node.inventory.tell_of_end(former.inventory)
        self.given_up = array("Q")
        self.refused = False
        self.counted.retired_bytes = 0  # the next life begins with all slots
        self.bases, self.holders, self.numbers = {}, {}, {}
        self.nbytes, self.parts = {}, {}
        self.shorter = {}

    async def tidy(self) -> None:
        """Have the index forget slots freed since the last write, and the tables of ended epochs whose blocks are all
        gone. Raises `Unavailable`.
        """
        ended = (
            self._ended_tables()
        )  # whose slots are among those to be forgotten now, or were before
        # Some deletions may have gone with writes that are still under way.
        if self.given_up or self.refused or ended:
            await self._forget_given_up()
        if ended and self.state is not TierState.OPENING:
            await self._drop_tables(ended)

    def _ended_tables(self) -> list[PartTable]:
        """Tables in the index that nothing refers to any more.

        One of a namespace's last recorded epoch stays, unless that is the first: a node without a membership service
        learns from it which epoch it was in.
        """
        last: dict[tuple[str, bytes], tuple[int, int]] = {}
        for table in self.numbers:
            of = table.namespace
            epoch = of.epoch, -table.part
            last[of.tenant.name, of.base] = max(epoch, last.get((of.tenant.name, of.base), epoch))
        return [
            table
            for table in self.numbers
            if table.namespace.retired
            and not any(
                t.blocks or t.garbage or t.reserved or t.going for t in self.all_tables(table)
            )
            and (
                not table.namespace.epoch
                or last[table.namespace.tenant.name, table.namespace.base]
                != (table.namespace.epoch, -table.part)
            )
        ]

    async def _drop_tables(self, tables: Sequence[PartTable]) -> None:
        """The index has room for few: one that is reset every minute would fill it within hours."""
        node = self.node
        async with self._numbering:
            # A namespace that was freed and opened again has the same record, and so the same number.
            used = {
                number for table, (number, _) in self.numbers.items() if not table.namespace.retired
            }
            numbers = {self.numbers[table][0] for table in tables if table in self.numbers} - used
            if numbers:
                await self.living_disk().drop_tables(sorted(numbers))
            if self.node is node:
                for table in tables:
                    self.numbers.pop(table, None)
                    self.shorter.pop(table, None)

    async def _forget_given_up(self) -> None:
        node, slots = self.node, self.take_given_up()
        try:
            await self.living_disk().forget(storage_wire.ForgetSlots(slots, FORGET_S))
        except LimitExceeded:
            # It was not sent. Orders that were sent stay with the process, and an index that fails is retried:
            # sending them again could delete entries of blocks written into such a slot meanwhile.
            if self.node is node:
                self.given_up.frombytes(slots)
            raise
        except KvpoolError:
            if self.node is node:
                self.refused = True
            raise
        if self.node is node:
            self.refused = False

    def take_given_up(self) -> bytes:
        slots = self.given_up.tobytes()
        del self.given_up[:]
        return slots

    def living_disk(self) -> Disk:
        if self.disk is None:
            raise Unavailable(f"the disk at {self.path} is {self.state}: {self.error}")
        return self.disk

    def open(self, namespace: NamespaceState) -> NamespaceState | None:
        """The rules' own state of a namespace; None if a part of it is too large for its segment."""
        known = self.node.namespaces.by_directory(namespace.directory_digest)
        if known is not None:
            return None if known.retired else known
        tenant = self.node.tenants.get(namespace.tenant.name)
        if tenant is None or namespace.retired:
            return None
        try:
            specs = [
                PartSpec(-(-(spec.nbytes + self.seal_bytes) // PAGE) * PAGE)
                for spec in namespace.parts
            ]
            state = self.node.namespaces.open(
                *(tenant, namespace.base, namespace.fields, specs),
                # What memory has freed.
                may_free=lambda old: old.base not in namespace.tenant.epochs,
            )
        except (InvalidRequest, LimitExceeded) as error:
            if namespace.base not in self._too_large:
                self._too_large.add(namespace.base)
                log.warning(
                    "blocks of namespace %s are not written to the disk at %s: %s",
                    namespace.base.hex(),
                    self.path,
                    error,
                    extra={"namespace": namespace.base.hex(), "disk": self.path},
                )
            return None
        state = self.node.namespaces.set_epoch(state, namespace.epoch, 0, namespace.generation)
        if state.epoch != namespace.epoch:
            return None
        self.measure(state, namespace)
        self.limit(namespace)
        return state

    def limit(self, namespace: NamespaceState) -> None:
        """Apply a namespace's quota here."""
        state = self.state_of(namespace)
        if state is not None:
            size = state.tenant.allocator.size
            quota = namespace.settings.ssd_quota
            self.node.quotas.set(state, quota_bytes(quota, size, self.weight))

    def measure(self, state: NamespaceState, namespace: NamespaceState) -> None:
        """Register the block length of a namespace: its slots are whole pages."""
        for table, spec in zip(state.tables, namespace.parts, strict=True):
            self.nbytes[table], self.parts[table] = spec.nbytes, table.part

    def state_of(self, namespace: NamespaceState) -> NamespaceState | None:
        """The state here of a namespace in memory; None: nothing is here."""
        state = self.node.namespaces.by_directory(namespace.directory_digest)
        return None if state is None or state.retired else state

    def table(self, table: PartTable) -> PartTable | None:
        """The state here of a table in memory."""
        state = self.state_of(table.namespace)
        return None if state is None else state.tables[table.part]

    def holding(self, table: PartTable) -> list[PartTable]:
        """All tables here that may hold blocks of a table in memory."""
        own = self.table(table)
        return [] if own is None else self.all_tables(own)

    def all_tables(self, own: PartTable) -> list[PartTable]:
        """A part's own table, and those of its shorter slots."""
        shorter = self.shorter.get(own)
        return [own] if shorter is None else [own, *shorter.values()]

    def of_length(self, own: PartTable, length: int) -> PartTable | None:
        """The table for blocks of a part that need slots of this length; None: no such slots are available.

        Other namespaces need classes too, so there are no new lengths when half of them are taken.
        """
        shorter = self.shorter.setdefault(own, {})
        table = shorter.get(length)
        if table is None:
            classes = own.namespace.tenant.allocator.class_count
            if self.state is not TierState.OPENING and classes >= CLASSES_MAX // 2:
                return None
            try:
                table = self.node.namespaces.add_table(own.namespace, PartSpec(length))
            except LimitExceeded:
                return None
            shorter[length] = table
            self.nbytes[table], self.parts[table] = self.nbytes[own], self.parts[own]
        return table

    def masks(self, digest: bytes, keys: Sequence[bytes]) -> tuple[int, list[int]]:
        """See `Inventory.masks`: of the parts as memory has them."""
        count, masks = self.node.inventory.masks(digest, keys)
        state = self.node.namespaces.by_directory(digest)
        if state is None or count == len(state.parts):
            return count, masks
        for own in state.tables[: len(state.parts)]:
            bit, others = 1 << own.part, sum(1 << t.part for t in self.all_tables(own)[1:])
            masks = [mask & ~others | bit if mask & others else mask for mask in masks]
        return len(state.parts), masks

    def takes(self, table: PartTable, n: int) -> int:
        """About how many bytes this many blocks of a table in memory will take here."""
        if table.namespace.settings.ssd_codec in self.codecs:
            there = [(own.stride, len(own.blocks)) for own in self.holding(table)]
            blocks = sum(count for _, count in there)
            if blocks:
                return n * sum(stride * count for stride, count in there) // blocks
        return n * table.stride

    def enter(self, namespace: NamespaceState) -> None:
        """A namespace is in a new epoch: its older blocks here are misses."""
        tenant = self.node.tenants.get(namespace.tenant.name)
        epochs = None if tenant is None else tenant.epochs.get(namespace.base)
        if epochs is not None:
            living = self.node.namespaces.set_epoch(
                epochs[-1], namespace.epoch, 0, namespace.generation
            )
            self.measure(living, namespace)

    async def record(self, namespace: NamespaceState) -> None:
        """Record a namespace's epoch in the index: for nodes without a membership service.

        Raises `Unavailable` if that cannot be made durable: a later life of this node might take old
        blocks for new ones.
        """
        state = self.open(namespace)
        if state is None:
            if self.state is TierState.FAILED:
                raise Unavailable(
                    f"the disk at {self.path} cannot record the change ({self.error}). Remove it from the "
                    "configuration, or empty its folder"
                )
            return  # it is too large for this disk, or its epoch is over already
        for table in state.tables:
            if table.part == 0 or table in self.numbers:
                await self.number(table, namespace)

    async def number(self, table: PartTable, namespace: NamespaceState) -> int:
        """The index's number of a table; registered first, with its settings, if necessary."""
        number, recorded = self.numbers.get(table, (0, DEFAULT_SETTINGS))
        if number and recorded == namespace.settings:
            return number
        async with self._numbering:  # or two calls would each register a number
            number, recorded = self.numbers.get(table, (0, DEFAULT_SETTINGS))
            if number and recorded == namespace.settings:
                return number
            settings = namespace.settings
            record = TableRecord(
                namespace.tenant.name,
                namespace.base,
                namespace.fields,
                plain_parts(namespace.parts),
                table.part,
                namespace.epoch,
                namespace.generation,
                settings,
            )
            numbers = self.numbers
            number = await self.living_disk().add_table(msgspec.msgpack.encode(record), number)
            numbers[table] = number, settings
        return number

    def is_shorter(self, own: PartTable) -> bool:
        """Whether a table's slots hold packed blocks."""
        return own.part >= len(own.namespace.parts)

    def _place(self, block: Block) -> int:
        """Where a block lies in the file."""
        return self.bases[block.table.namespace.tenant.name] + block.row * block.table.stride

    def slots(self, blocks: Sequence[Block]) -> bytes:
        """Where blocks of one tenant lie in the file, as orders carry it."""
        base = self.bases[blocks[0].table.namespace.tenant.name]
        return array("Q", [base + block.row * block.table.stride for block in blocks]).tobytes()

    def offsets(self, own: PartTable, rows: Sequence[int]) -> bytes:
        """The same of rows of a table."""
        base = self.bases[own.namespace.tenant.name]
        return array("Q", [base + row * own.stride for row in rows]).tobytes()

    def lengths(self, blocks: Sequence[Block]) -> bytes:
        """The lengths of their slots, as in orders: empty if all are as long as a whole block."""
        if not any(self.is_shorter(table) for table in {block.table for block in blocks}):
            return b""
        return array("I", [block.table.spec.nbytes for block in blocks]).tobytes()

    def names(self, own: PartTable, keys: Sequence[bytes]) -> tuple[bytes, bytes]:
        """By which encrypted blocks of a table are known: `keys` and `place` of orders."""
        if not self.seal_bytes:
            return b"", b""
        return b"".join(keys), place_name(own.namespace.directory_digest, self.parts[own])

    def lease(self, own: PartTable, keys: Sequence[bytes]) -> Lease | None:
        """Keep those of the blocks that are here in their slots, until `_release`."""
        return self.node.leases.acquire(
            self.holders[own.namespace.tenant.name],
            own.namespace,
            [own.part],
            keys,
            None,
            self.clock(),
            scattered=True,
        )

    def release(self, node: Node, own: PartTable, lease: Lease) -> None:
        """node: of the lease; nothing to release if its life has ended."""
        if self.node is node:
            node.leases.release(self.holders[own.namespace.tenant.name], lease.token)

    def drop_bad(self, node: Node, blocks: Sequence[Block], status: bytes) -> int:
        """Drop blocks that do not match their checksum, or cannot be read; returns how many.

        Those whose secret has ended are dropped too, and are nobody's fault.
        """
        ended = [b for b, s in zip(blocks, status, strict=True) if s == BlockStatus.ABSENT]
        if self.node is node:
            for block in ended:
                node.removal.remove(block.table.namespace, [block.key])
        bad = [
            block
            for block, s in zip(blocks, status, strict=True)
            if s in {BlockStatus.MISMATCH, BlockStatus.FAILED}
        ]
        mismatches = status.count(BlockStatus.MISMATCH)
        self.counted.mismatches += mismatches
        self.counted.read_errors += len(bad) - mismatches
        for block, one in zip(blocks, status, strict=True):
            self.counted.undecoded_blocks += one == BlockStatus.MISMATCH and self.is_shorter(
                block.table
            )
        if self.node is node:
            for block in bad:
                self.bad.failed(self._place(block))
                node.removal.drop_corrupt(block.table.namespace, block.table.part, block.key)
        return len(bad)

    def no_codec(self, error: str) -> None:
        """This life of the process lacks a codec that it was expected to have."""
        if self.codecs:
            self.codecs = ()
            self.cannot_pack(error)

    def cannot_pack(self, error: str) -> None:
        self.codec_error = f"blocks are written as they are: {error}"
        log.warning("the disk at %s: %s", self.path, self.codec_error, extra={"disk": self.path})

    async def pin(self, namespace: NamespaceState, packed: bytes, kind: str) -> set[bytes]:
        """Pin these blocks, across restarts too: see `Pins.pin`; returns the keys."""
        state = self.state_of(namespace)
        if state is None:
            return set()
        keys = split_keys(packed)
        changed = self.node.pins.check(state, keys, kind)
        found = self.node.pins.pin(state, keys, kind)
        await self._keep_pins(changed, PIN_KINDS[kind])
        return found

    def check_pin(self, namespace: NamespaceState, packed: bytes, kind: str) -> PinsBefore:
        """What `pin` would change, as it is pinned now. Raises what `pin` would raise of quotas."""
        state = self.state_of(namespace)
        return (
            {} if state is None else levels(self.node.pins.check(state, split_keys(packed), kind))
        )

    async def put_back(self, node: Node, before: PinsBefore) -> None:
        """See `Pins.put_back`; `node`: whose blocks they are. Raises `KvpoolError` if the disk cannot keep it."""
        if self.node is not node:
            return  # its next life has begun with what the index says
        node.pins.put_back(before)
        for (table, level), keys in before.items():
            here = [block for block in table.blocks.found(keys) if block is not None]
            await self._keep_pins(here, level)

    async def _keep_pins(self, blocks: Sequence[Block], level: int) -> None:
        """Across restarts too."""
        if not blocks:
            return
        node = self.node
        try:
            await self.living_disk().pin(storage_wire.PinSlots(self.slots(blocks), level, FORGET_S))
        except KvpoolError:
            if self.node is node:
                self.refused = True
            raise

    @property
    def segment_bytes(self) -> int:
        """Bytes of slots; 0 while the process does not run."""
        return 0 if self.disk is None else self.disk.ready.segment_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots that are in use."""
        return sum(tenant.allocator.bytes_used for tenant in self.node.tenants.values())

    def sizes(self) -> tuple[int, int]:
        """Bytes of all blocks here as they are read, and of their slots."""
        tables = [
            table
            for tenant in self.node.tenants.values()
            for state in tenant.namespaces.values()
            for table in state.tables
        ]
        return (
            sum(len(table.blocks) * self.nbytes[table] for table in tables),
            sum(len(table.blocks) * table.stride for table in tables),
        )

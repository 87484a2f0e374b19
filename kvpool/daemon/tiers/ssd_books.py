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

import logging
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvpool.daemon.core.blocks import Block, NamespaceState, PartTable
from kvpool.daemon.core.node import Node
from kvpool.daemon.tiers.slot_books import SlotBooks
from kvpool.daemon.tiers.tier_state import TierState
from kvpool.daemon.workers.disk_proxy import Disk
from kvpool.errors import InvalidRequest, LimitExceeded, Unavailable
from kvpool.placement.records import DEFAULT_SETTINGS, NamespaceSettings, quota_bytes
from kvpool.storage.at_rest import place_name
from kvpool.storage.slab import CLASSES_MAX, PAGE, SlabAllocator
from kvpool.telemetry.tier_stats import SsdStats
from kvpool.types import BlockStatus, PartSpec

log = logging.getLogger("kvpool.daemon")

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
class SsdBooks(SlotBooks):
    """See the module. State shared by restore, writes and reads.

    shares: of the segment for each tenant; laid out in the order of their names.
    weight: the part of all disks' bytes that this one has, and so of a namespace's quota.
    make_rules: rules for its slots, without tenants.
    """

    path: str
    size: int
    shares: Mapping[str, float]
    make_rules: Callable[[], Node]
    clock: Callable[[], float]
    weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.log = logging.LoggerAdapter(log, {"disk": self.path})
        self.disk: Disk | None = None
        self.given_up: array[int] = array("Q")
        self.refused = False  # an index may postpone deletions until it is asked again
        self.bases: dict[str, int] = {}
        # As the index knows them.
        self.numbers: dict[PartTable, tuple[int, NamespaceSettings]] = {}
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
        self.renew()
        self.given_up = array("Q")
        self.refused = False
        self.counted.retired_bytes = 0  # the next life begins with all slots
        self.bases, self.numbers = {}, {}
        self.nbytes, self.parts = {}, {}
        self.shorter = {}

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
        try:
            specs = [
                PartSpec(-(-(spec.nbytes + self.seal_bytes) // PAGE) * PAGE)
                for spec in namespace.parts
            ]
            state = self.open_state(namespace, specs)
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
        if state is not None and state.tables[0] not in self.nbytes:
            self.measure(state, namespace)
            self.limit(namespace)
        return state

    def limit(self, namespace: NamespaceState) -> None:
        """Apply a namespace's quota here."""
        state = self.state_of(namespace)
        if state is not None:
            size = state.tenant.allocator.size
            quota = namespace.settings.ssd_quota
            self.rules.quotas.set(state, quota_bytes(quota, size, self.weight))

    def measure(self, state: NamespaceState, namespace: NamespaceState) -> None:
        """Register the block length of a namespace: its slots are whole pages."""
        for table, spec in zip(state.tables, namespace.parts, strict=True):
            self.nbytes[table], self.parts[table] = spec.nbytes, table.part

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
                table = self.rules.namespaces.add_table(own.namespace, PartSpec(length))
            except LimitExceeded:
                return None
            shorter[length] = table
            self.nbytes[table], self.parts[table] = self.nbytes[own], self.parts[own]
        return table

    def masks(self, digest: bytes, keys: Sequence[bytes]) -> tuple[int, list[int]]:
        """See `Inventory.masks`: of the parts as memory has them."""
        count, masks = self.rules.inventory.masks(digest, keys)
        state = self.rules.namespaces.by_directory(digest)
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
        """See `SlotBooks.enter`."""
        super().enter(namespace)
        living = self.state_of(namespace)
        if living is not None:
            self.measure(living, namespace)

    def is_shorter(self, own: PartTable) -> bool:
        """Whether a table's slots hold packed blocks."""
        return own.part >= len(own.namespace.parts)

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

    def drop_bad(self, node: Node, blocks: Sequence[Block], status: bytes) -> int:
        """Drop blocks that do not match their checksum, or cannot be read; returns how many.

        Those whose secret has ended are dropped too, and are nobody's fault.
        """
        ended = [b for b, s in zip(blocks, status, strict=True) if s == BlockStatus.ABSENT]
        if self.rules is node:
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
        if self.rules is node:
            for block in bad:
                base = self.bases[block.table.namespace.tenant.name]
                self.bad.failed(base + block.row * block.table.stride)
                node.removal.drop_corrupt(block.table.namespace, block.table.part, block.key)
        return len(bad)

    def no_codec(self, error: str) -> None:
        """This life of the process lacks a codec that it was expected to have."""
        if self.codecs:
            self.codecs = ()
            self.cannot_pack(error)

    def cannot_pack(self, error: str) -> None:
        self.codec_error = f"blocks are written as they are: {error}"
        self.log.warning("the disk at %s: %s", self.path, self.codec_error)

    @property
    def segment_bytes(self) -> int:
        """Bytes of slots; 0 while the process does not run."""
        return 0 if self.disk is None else self.disk.ready.segment_bytes

    def sizes(self) -> tuple[int, int]:
        """Bytes of all blocks here as they are read, and of their slots."""
        tables = [
            table
            for tenant in self.rules.tenants.values()
            for state in tenant.namespaces.values()
            for table in state.tables
        ]
        return (
            sum(len(table.blocks) * self.nbytes[table] for table in tables),
            sum(len(table.blocks) * table.stride for table in tables),
        )

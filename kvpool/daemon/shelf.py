"""One disk of this node: which block lies in which of its slots, and how blocks get there and back.

The rules of the slots are those of memory: a `Node` of its own, whose segment is the file, whose leases
are reads under way, and whose reservations are writes under way. What differs is that its slots outlive
the process. So a slot that was given up is *forgotten* in the index before anything else is written to it
(each order to write carries what to forget first), and a new life of the disk process begins with what
its index holds (`restore`).

Blocks that a codec has made smaller lie in shorter slots, of a few lengths. To the rules each length is a
table of its own beside that of the part, made when it is first needed; a block is in one of them. How small
a block gets is known when it has been packed, so it is packed first and gets its slot afterwards.

Event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import compress
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvpool import wire
from kvpool.daemon.blocks import PIN_KINDS, Block, Holder, Lease, NamespaceState, PartTable
from kvpool.daemon.disks import Disk
from kvpool.daemon.node import Node
from kvpool.daemon.space import Origin
from kvpool.errors import (
    ConfigError,
    InvalidRequest,
    KvpoolError,
    LimitExceeded,
    PoolFull,
    Unavailable,
)
from kvpool.placement.records import DEFAULT_SETTINGS, NamespaceSettings, quota_bytes
from kvpool.storage.codecs import BLOSC2, RAW, Blosc2, slot_bytes, slot_classes
from kvpool.storage.slab import CLASSES_MAX, PAGE, SlabAllocator
from kvpool.storage.ssd_index import ENTRY
from kvpool.types import PartSpec, plain_parts, split_keys

log = logging.getLogger("kvpool.daemon")

SCAN_ENTRIES = 4096  # restored at a time, a few milliseconds
FORGET_S = 30.0  # for the index to take deletions
WRITE_S = 30.0
PACK_S = 30.0
SCRUB_S = 60.0
RETRY_S = (1.0, 60.0)  # between attempts to write to a disk that failed to
ABSENT, PRESENT, MISMATCH, LATE = range(4)  # `Pulled.status`
NOT_BEGUN, GOOD, BAD, IO_ERROR = range(4)  # what a disk says of a block
_AS_PULLED = bytes.maketrans(bytes((NOT_BEGUN, IO_ERROR)), bytes((LATE, ABSENT)))
EMPTY_KEY = bytes(16)


class ShelfState(StrEnum):
    """What a disk is good for at the moment."""

    OPENING = "opening"  # its index is being read
    SERVING = "serving"
    READ_ONLY = "read-only"  # writes fail; tried again now and then
    FAILED = "failed"  # its process does not run


class TableRecord(msgspec.Struct, array_like=True, frozen=True):
    """What the index keeps of a table, so that a later life of this node knows it again."""

    tenant: str
    base: bytes
    fields: bytes
    parts: list[tuple[int, str, int, int]]
    part: int
    epoch: int
    generation: int
    settings: NamespaceSettings = DEFAULT_SETTINGS


class _Slots(SlabAllocator):
    """An allocator that tells which places were given up."""

    def __init__(self, base: int, size: int, given_up: array[int]) -> None:
        super().__init__(size)
        self._base = base
        self._given_up = given_up

    def free(self, stride: int, rows: Sequence[int]) -> None:
        super().free(stride, rows)
        base = self._base
        self._given_up.extend([base + row * stride for row in rows])


class _Part(NamedTuple):
    """Blocks that are to lie in one table. rows: where they are now, in memory or in a pack."""

    own: PartTable
    blocks: Sequence[Block]
    rows: Sequence[int]


class _Write(NamedTuple):
    """Such blocks with their slots reserved. slots: rows of the table."""

    own: PartTable
    blocks: Sequence[Block]
    rows: Sequence[int]
    ticket: int
    slots: Sequence[int]

    @property
    def nbytes(self) -> int:
        return len(self.blocks) * self.own.stride


class Shelf:
    """See the module. `tiers.py` decides what is put here.

    shares: of the segment for each tenant; in the order of their names, they lie one after the other.
    weight: the part of all disks' bytes that this one has, and so of a namespace's quota.
    make_node: rules for its slots, without tenants.
    """

    def __init__(
        self,
        path: str,
        size: int,
        shares: Mapping[str, float],
        make_node: Callable[[], Node],
        clock: Callable[[], float],
        *,
        weight: float = 1.0,
    ) -> None:
        self.path = path
        self.size = size
        self.state = ShelfState.OPENING
        self.error = ""
        self.node = make_node()
        self._make_node = make_node
        self._shares = dict(sorted(shares.items()))
        self._clock = clock
        self._weight = weight
        self._disk: Disk | None = None
        self._given_up: array[int] = array("Q")
        self._refused = False  # an index may keep what it was to forget until it is asked once more
        self._bases: dict[str, int] = {}
        self._holders: dict[str, Holder] = {}
        # As the index knows them.
        self._numbers: dict[PartTable, tuple[int, NamespaceSettings]] = {}
        self._numbering = asyncio.Lock()
        self._too_large: set[bytes] = set()  # namespaces that cannot be here, and were told of
        self._nbytes: dict[PartTable, int] = {}  # of a block; its slot is whole pages
        self._shorter: dict[PartTable, dict[int, PartTable]] = {}  # by length, beside a part's own
        self._codecs: Sequence[str] = ()  # that the process can use
        self.codec_error = ""  # why nothing is packed though a namespace has a codec
        self._packs = 0
        self._tickets = 0
        self._retry_at = 0.0
        self._retry_s = RETRY_S[0]
        self.written_bytes = 0
        self.writing_bytes = 0
        self._writing_blocks = 0
        self.counters = {
            "written_blocks": 0,
            "read_blocks": 0,
            "read_bytes": 0,
            "write_errors": 0,
            "read_errors": 0,
            "mismatches": 0,
            "restored_blocks": 0,
            "dropped_at_restore": 0,
            "scrubbed_blocks": 0,
            "packed_blocks": 0,  # of those written
            "unpacked_blocks": 0,  # written as they are though their namespace has a codec
            "undecoded_blocks": 0,  # of the mismatches: did not become again what was packed
        }

    # ---- lives of the process ----------------------------------------------------------------------

    async def restore(
        self, disk: Disk, adopt: Callable[[TableRecord], Awaitable[NamespaceState | None]]
    ) -> None:
        """Take up what the index of a new life of the process holds.

        adopt: the namespace of a table in memory, in its present epoch; None if there is no such tenant.
        Blocks are found as soon as they are restored; nothing is written before all are.
        Raises `Unavailable` when the process ends meanwhile.
        """
        self._forget_all()
        self._disk = disk
        self._codecs, self.codec_error = disk.ready.codecs, ""
        self.state, self.error = ShelfState.OPENING, ""
        base = 0
        for tenant, share in self._shares.items():
            size = int(disk.ready.segment_bytes * share) // PAGE * PAGE
            if not size:
                log.warning("tenant %s has no room on the disk at %s", tenant, self.path)
                continue
            allocator = _Slots(base, size, self._given_up)
            self.node.add_tenant(tenant, 0, size, allocator=allocator)
            self._bases[tenant] = base
            self._holders[tenant] = self.node.add_holder(tenant, "", "disk")
            base += size
        tables: dict[int, PartTable] = {}
        dead = []
        records = []
        for number, data in disk.ready.tables:
            try:
                records.append((number, msgspec.msgpack.decode(data, type=TableRecord)))
            except msgspec.DecodeError as error:
                log.warning("the disk at %s holds a table of another version: %s", self.path, error)
                dead.append(number)
        # So that the last epoch is met first, and of one epoch what was said of it last.
        records.sort(key=lambda numbered: (-numbered[1].epoch, -numbered[0]))
        for number, record in records:
            namespace = await adopt(record)
            if self._disk is not disk:
                raise Unavailable("the disk process has ended meanwhile")
            table = self._restored_table(record, namespace)
            if table is None:
                dead.append(number)
            else:
                tables[number] = table
                # Not over what was said of it last, which may have come meanwhile.
                self._numbers.setdefault(table, (number, record.settings))
        while (scanned := await disk.scan(SCAN_ENTRIES)).entries:
            if scanned.codec_error:
                self._no_codec(scanned.codec_error)
            self._restore_some(np.frombuffer(scanned.entries, dtype=ENTRY), tables)
            await asyncio.sleep(0)
        self.node.restored()
        try:
            await self.tidy()
            if dead:
                await disk.drop_tables(dead)
        except KvpoolError as error:
            if self._disk is not disk:
                raise
            # Nothing is written over what it has not forgotten, and what is dead is met at the next start.
            log.warning("the index of the disk at %s takes no changes: %s", self.path, error)
        self.state = ShelfState.SERVING

    def _restored_table(
        self, record: TableRecord, namespace: NamespaceState | None
    ) -> PartTable | None:
        if (
            namespace is None
            or namespace.epoch != record.epoch
            or plain_parts(namespace.parts) != [tuple(part) for part in record.parts]
        ):
            return None
        space = self._open(namespace)
        return None if space is None else space.tables[record.part]

    def _restore_some(self, entries: np.ndarray[Any, Any], tables: Mapping[int, PartTable]) -> None:
        """Entries of the index become blocks; those that cannot are forgotten."""
        good = np.zeros(len(entries), dtype=np.bool_)
        for number in np.unique(entries["table"]).tolist():
            table = tables.get(number)
            if table is None or table.namespace.retired:  # its epoch may have ended meanwhile
                continue
            numbered = np.flatnonzero(entries["table"] == number)
            for own, at in self._by_slot(table, entries[numbered]):
                self._restore_table(own, entries, numbered[at], good)
        self._given_up.extend(entries["offset"][~good].tolist())
        self.counters["restored_blocks"] += int(good.sum())
        self.counters["dropped_at_restore"] += int((~good).sum())

    def _by_slot(
        self, table: PartTable, part: np.ndarray[Any, Any]
    ) -> Iterator[tuple[PartTable, np.ndarray[Any, Any]]]:
        """Which of a part's entries belong to which table; those that cannot be read belong to none."""
        yield table, np.flatnonzero(part["codec"] == RAW)
        classes = np.array(slot_classes(self._nbytes[table]))
        stored = part["stored"].astype(np.int64)
        known = (part["codec"] == BLOSC2) & (Blosc2.name in self._codecs)
        packed = np.flatnonzero(known & (stored > 0) & (stored <= classes[:-1].max(initial=0)))
        lengths = classes[np.searchsorted(classes, stored[packed])]
        for length in np.unique(lengths).tolist():
            own = self._of_length(table, length)
            if own is not None:
                yield own, packed[lengths == length]

    def _restore_table(
        self,
        table: PartTable,
        entries: np.ndarray[Any, Any],
        chosen: np.ndarray[Any, Any],
        good: np.ndarray[Any, Any],
    ) -> None:
        """Those of the entries that are of one table; `good` takes which of them are there again."""
        chosen = chosen[np.argsort(entries["generation"][chosen], kind="stable")]
        part = entries[chosen]
        offsets = part["offset"].astype(np.int64) - self._bases[table.namespace.tenant.name]
        rows = offsets // table.stride
        rows[(offsets < 0) | (offsets % table.stride != 0)] = -1
        rows[part["nbytes"] != self._nbytes[table]] = -1
        parents = [
            b"" if parent == EMPTY_KEY else parent
            for parent in split_keys(part["parent"].tobytes())
        ]
        keys = split_keys(part["key"].tobytes())
        good[chosen] = self.node.restore(
            table.namespace,
            table.part,
            keys,
            parents,
            part["depth"].tolist(),
            rows,
            split_keys(part["checksum"].tobytes()),
        )
        for kind in ("soft", "hard"):
            pinned = part["pin"] == PIN_KINDS[kind]
            if pinned.any():
                self._pin_again(table.namespace, list(compress(keys, pinned)), kind)

    def _pin_again(self, space: NamespaceState, keys: Sequence[bytes], kind: str) -> None:
        try:
            self.node.pin(space, b"".join(keys), kind)
        except LimitExceeded as error:
            log.warning("not all pins on the disk at %s are kept: %s", self.path, error)

    def ended(self, error: str) -> None:
        """The process is dead, or cannot be started: nothing is here, until it is restored."""
        self._forget_all()
        self.state, self.error = ShelfState.FAILED, error

    def _forget_all(self) -> None:
        self._disk = None
        former, self.node = self.node, self._make_node()
        self.node.tell_of_end(former)
        self._given_up = array("Q")
        self._refused = False
        self._bases, self._holders, self._numbers, self._nbytes = {}, {}, {}, {}
        self._shorter = {}

    # ---- namespaces --------------------------------------------------------------------------------

    def _open(self, namespace: NamespaceState) -> NamespaceState | None:
        """The rules' own state of a namespace; None where a part of it is too large for its segment."""
        known = self.node.by_directory(namespace.directory_digest)
        if known is not None:
            return None if known.retired else known
        tenant = self.node.tenants.get(namespace.tenant.name)
        if tenant is None or namespace.retired:
            return None
        specs = [PartSpec(-(-spec.nbytes // PAGE) * PAGE) for spec in namespace.parts]
        try:
            state = self.node.open_namespace(tenant, namespace.base, namespace.fields, specs)
        except (InvalidRequest, LimitExceeded) as error:
            if namespace.base not in self._too_large:
                self._too_large.add(namespace.base)
                log.warning(
                    "no block of namespace %s is written to the disk at %s: %s",
                    namespace.base.hex(),
                    self.path,
                    error,
                )
            return None
        state = self.node.set_epoch(state, namespace.epoch, 0, namespace.generation)
        if state.epoch != namespace.epoch:
            return None
        self._measure(state, namespace)
        self.limit(namespace)
        return state

    def limit(self, namespace: NamespaceState) -> None:
        """Have a namespace in memory keep to what it may hold here."""
        space = self.space(namespace)
        if space is not None:
            size = space.tenant.allocator.size
            quota = namespace.settings.ssd_quota
            self.node.set_quota(space, quota_bytes(quota, size, self._weight))

    def _measure(self, state: NamespaceState, namespace: NamespaceState) -> None:
        """Know how long the blocks of a namespace are: its slots are whole pages."""
        for table, spec in zip(state.tables, namespace.parts, strict=True):
            self._nbytes[table] = spec.nbytes

    def table(self, table: PartTable) -> PartTable | None:
        """What is here of a table in memory."""
        space = self.space(table.namespace)
        return None if space is None else space.tables[table.part]

    def holding(self, table: PartTable) -> list[PartTable]:
        """All tables here in which blocks of a table in memory may be."""
        own = self.table(table)
        return [] if own is None else self._all(own)

    def _all(self, own: PartTable) -> list[PartTable]:
        """A part's own table, and those of its shorter slots."""
        shorter = self._shorter.get(own)
        return [own] if shorter is None else [own, *shorter.values()]

    def _of_length(self, own: PartTable, length: int) -> PartTable | None:
        """Where blocks of a part lie that need slots of this length; None: such slots cannot be had.

        Other namespaces need classes too, so there are no new lengths when half of them are taken.
        """
        shorter = self._shorter.setdefault(own, {})
        table = shorter.get(length)
        if table is None:
            classes = own.namespace.tenant.allocator.class_count
            if self.state is not ShelfState.OPENING and classes >= CLASSES_MAX // 2:
                return None
            try:
                table = self.node.add_table(own.namespace, PartSpec(length))
            except LimitExceeded:
                return None
            shorter[length] = table
            self._nbytes[table] = self._nbytes[own]
        return table

    def masks(self, digest: bytes, keys: Sequence[bytes]) -> tuple[int, list[int]]:
        """See `Node.masks`: of the parts as memory has them."""
        count, masks = self.node.masks(digest, keys)
        space = self.node.by_directory(digest)
        if space is None or count == len(space.parts):
            return count, masks
        for own in space.tables[: len(space.parts)]:
            bit, others = 1 << own.part, sum(1 << t.part for t in self._all(own)[1:])
            masks = [mask & ~others | bit if mask & others else mask for mask in masks]
        return len(space.parts), masks

    def takes(self, table: PartTable, n: int) -> int:
        """About how many bytes so many blocks of a table in memory will take here."""
        if table.namespace.settings.ssd_codec in self._codecs:
            there = [(own.stride, len(own.blocks)) for own in self.holding(table)]
            blocks = sum(count for _, count in there)
            if blocks:
                return n * sum(stride * count for stride, count in there) // blocks
        return n * table.stride

    def enter(self, namespace: NamespaceState) -> None:
        """A namespace is in a new epoch: what was here of it is found no more."""
        tenant = self.node.tenants.get(namespace.tenant.name)
        epochs = None if tenant is None else tenant.epochs.get(namespace.base)
        if epochs is not None:
            living = self.node.set_epoch(epochs[-1], namespace.epoch, 0, namespace.generation)
            self._measure(living, namespace)

    async def record(self, namespace: NamespaceState) -> None:
        """Have the index know which epoch a namespace is in: for nodes that nobody else tells.

        Raises `Unavailable` when that cannot be made durable: a later life of this node might take old
        blocks for new ones.
        """
        space = self._open(namespace)
        if space is None:
            if self.state is ShelfState.FAILED:
                raise Unavailable(
                    f"the disk at {self.path} cannot be told of the change ({self.error}). Take it out "
                    f"of the configuration, or empty its folder"
                )
            return  # it is too large for this disk, or its epoch is over already
        for table in space.tables:
            if table.part == 0 or table in self._numbers:
                await self._number(table, namespace)

    async def _number(self, table: PartTable, namespace: NamespaceState) -> int:
        """What the index calls a table of ours; made known to it first, if it is not, with its settings."""
        number, recorded = self._numbers.get(table, (0, DEFAULT_SETTINGS))
        if number and recorded == namespace.settings:
            return number
        async with self._numbering:  # or two would give it a number each
            number, recorded = self._numbers.get(table, (0, DEFAULT_SETTINGS))
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
            numbers = self._numbers
            number = await self._living_disk().add_table(msgspec.msgpack.encode(record), number)
            numbers[table] = number, settings
        return number

    def _living_disk(self) -> Disk:
        if self._disk is None:
            raise Unavailable(f"the disk at {self.path} is {self.state}: {self.error}")
        return self._disk

    # ---- down ----------------------------------------------------------------------------------------

    def may_write(self) -> bool:
        """Whether writes are worth trying now."""
        if self.state is ShelfState.READ_ONLY:
            return self._clock() >= self._retry_at
        return self.state is ShelfState.SERVING

    async def write(self, table: PartTable, blocks: Sequence[Block], segment: int) -> int:
        """Store these blocks of one table in memory, leased by the caller; how many are here now.

        Room is made by what this disk's rules give up first. Returns when they are safe; never raises but
        when cancelled.
        """
        node = self.node
        space = self._open(table.namespace)
        if space is None or not self.may_write():
            return 0
        own = space.tables[table.part]
        try:
            number = await self._number(own, table.namespace)
        except KvpoolError as error:
            self._failed(str(error))
            return 0
        if self.node is not node or space.retired:
            return 0
        packs = self._packs_for(table)
        missing = blocks
        for other in self._all(own) if packs else self._all(own)[1:]:
            missing = [block for block in missing if block.key not in other.blocks]
        here = len(blocks) - len(missing)
        if not missing:
            return here
        if packs:
            return here + await self._write_packed(table, own, number, missing, segment)
        part = _Part(own, missing, [block.row for block in missing])
        return here + await self._store(node, table, number, [part], segment)

    def _packs_for(self, table: PartTable) -> bool:
        """Whether blocks of a table in memory are to be packed, and can be."""
        codec = table.namespace.settings.ssd_codec
        if len(slot_classes(table.spec.nbytes)) == 1:
            return False  # as short as slots get
        if codec and codec not in self._codecs and not self.codec_error:
            self._cannot_pack(f"the codec {codec} cannot be used: install it (pip install {codec})")
        return codec in self._codecs

    def _no_codec(self, error: str) -> None:
        """What this life of the process was thought to be able to pack and read, it cannot."""
        if self._codecs:
            self._codecs = ()
            self._cannot_pack(error)

    def _cannot_pack(self, error: str) -> None:
        self.codec_error = f"blocks are written as they are: {error}"
        log.warning("the disk at %s: %s", self.path, self.codec_error)

    async def _write_packed(
        self,
        table: PartTable,
        own: PartTable,
        number: int,
        blocks: Sequence[Block],
        segment: int,
    ) -> int:
        """As `write`: what a codec makes smaller goes to shorter slots, and the rest as it is."""
        node, disk = self.node, self._living_disk()
        self._packs += 1
        pack = self._packs
        done = 0
        try:
            whole, shorter = await self._pack(disk, pack, table, own, blocks, segment)
            if shorter:
                done = await self._store(node, table, number, shorter, segment, pack)
        except KvpoolError as error:
            if self.node is node:
                self._failed(str(error))
            return 0
        finally:
            disk.drop_pack(pack)
        if whole:
            part = _Part(own, whole, [block.row for block in whole])
            written = await self._store(node, table, number, [part], segment)
            self.counters["unpacked_blocks"] += written
            done += written
        return done

    async def _pack(
        self,
        disk: Disk,
        pack: int,
        table: PartTable,
        own: PartTable,
        blocks: Sequence[Block],
        segment: int,
    ) -> tuple[list[Block], list[_Part]]:
        """What is to be written as it is, and what lies in the pack, by the tables that it is for."""
        nbytes = len(blocks) * own.stride
        self.writing_bytes += nbytes
        try:
            packed = await disk.pack(
                wire.PackBlocks(
                    pack=pack,
                    nbytes=table.spec.nbytes,
                    segment=segment,
                    stride=table.stride,
                    rows=wire.pack_rows([block.row for block in blocks]),
                    deadline_s=PACK_S,
                )
            )
        except ConfigError as error:
            if self._disk is disk:
                self._codecs = ()
                self._cannot_pack(str(error))
            return list(blocks), []
        finally:
            self.writing_bytes -= nbytes
        whole: list[Block] = []
        by_length: dict[int, list[int]] = {}
        if self._disk is disk and not own.namespace.retired:
            for row, stored in enumerate(array("I", packed.stored)):
                if stored < table.spec.nbytes:
                    by_length.setdefault(slot_bytes(stored, table.spec.nbytes), []).append(row)
                else:
                    whole.append(blocks[row])
        shorter: list[_Part] = []
        for length, rows in by_length.items():
            other = self._of_length(own, length)
            if other is None:
                whole += [blocks[row] for row in rows]
            else:
                shorter.append(_Part(other, [blocks[row] for row in rows], rows))
        return whole, shorter

    async def _store(
        self,
        node: Node,
        table: PartTable,
        number: int,
        parts: Sequence[_Part],
        segment: int,
        pack: int = 0,
    ) -> int:
        """Give blocks slots, and have them written there in one order; how many are here now.

        node: whose slots they are for; when it has ended, nothing is written.
        """
        space = parts[0].own.namespace
        if self.node is not node or space.retired:
            return 0
        holder = self._holders[space.tenant.name]
        self._make_entries(sum(len(part.blocks) for part in parts))
        writes, here = self._reserve(node, holder, parts)
        if not writes:
            return here
        forget = self._take_given_up()
        nbytes = sum(write.nbytes for write in writes)
        chosen = [block for write in writes for block in write.blocks]
        self.writing_bytes += nbytes
        self._writing_blocks += len(chosen)
        try:
            written = await self._living_disk().write(
                wire.WriteBlocks(
                    table=number,
                    nbytes=table.spec.nbytes,
                    keys=b"".join([block.key for block in chosen]),
                    parents=b"".join([block.parent or EMPTY_KEY for block in chosen]),
                    depths=array("I", [block.depth for block in chosen]).tobytes(),
                    checksums=b"".join([block.checksum for block in chosen]),
                    slots=b"".join([self._offsets(w.own, w.slots) for w in writes]),
                    segment=segment,
                    stride=table.stride,
                    rows=wire.pack_rows([row for write in writes for row in write.rows]),
                    forget=forget,
                    deadline_s=WRITE_S,
                    pack=pack,
                )
            )
            done = self._wrote(node, holder, writes, written)
        except KvpoolError as error:
            if self.node is node:
                if isinstance(error, LimitExceeded):
                    self._given_up.frombytes(forget)  # not sent; what is, the process keeps
                self._failed(str(error))
            return 0
        finally:
            self.writing_bytes -= nbytes
            self._writing_blocks -= len(chosen)
            if self.node is node:
                for write in writes:
                    node.abort(holder, write.ticket)
        for kind in ("soft", "hard"):
            pinned = [block.key for block in chosen if block.pin == PIN_KINDS[kind]]
            if pinned and self.node is node:
                await self._pin_too(table.namespace, pinned, kind)
        return here + done

    def _reserve(
        self, node: Node, holder: Holder, parts: Sequence[_Part]
    ) -> tuple[list[_Write], int]:
        """Slots for as many of the blocks as there is room for, and how many are here already."""
        writes: list[_Write] = []
        here = 0
        for own, blocks, rows in parts:
            self._tickets += 1
            packed = b"".join([block.key for block in blocks])
            try:
                node.reserve(holder, own.namespace, own.part, self._tickets, packed)
            except (PoolFull, LimitExceeded, InvalidRequest):
                continue
            reservation = holder.reservations.get(self._tickets)
            if reservation is None:
                here += len(blocks)
                continue
            chosen = [blocks[index] for index in reservation.indices]
            reservation.parents = [block.parent for block in chosen]
            at = [rows[index] for index in reservation.indices]
            writes.append(_Write(own, chosen, at, self._tickets, reservation.rows))
        return writes, here

    async def _pin_too(self, namespace: NamespaceState, keys: Sequence[bytes], kind: str) -> None:
        """What is pinned in memory is pinned here, as far as the quota of this disk goes."""
        try:
            await self.pin(namespace, b"".join(keys), kind)
        except KvpoolError as error:
            log.warning("not all pins are kept on the disk at %s: %s", self.path, error)

    def _wrote(
        self, node: Node, holder: Holder, writes: Sequence[_Write], written: wire.Written
    ) -> int:
        """Make what was written findable; how much that is."""
        if self.node is not node:
            return 0
        total = failed = at = 0
        for write in writes:
            own, chosen = write.own, write.blocks
            reservation = holder.reservations[write.ticket]
            statuses = written.status[at : at + len(chosen)]
            at += len(chosen)
            good = [index for index, status in enumerate(statuses) if status == GOOD]
            failed += len(chosen) - len(good)
            # What was removed meanwhile is not to be found again.
            done = [index for index in good if not chosen[index].gone]
            indices = [reservation.indices[index] for index in done]
            checksums = b"".join([chosen[index].checksum for index in done])
            if done:
                depths = [chosen[index].depth for index in done]
                node.commit(holder, write.ticket, checksums, indices, Origin(depths=depths))
            self.written_bytes += len(done) * own.stride
            self.counters["packed_blocks"] += len(done) * self._is_shorter(own)
            total += len(done)
        node.settle()
        self.counters["written_blocks"] += total
        if failed:
            self._refused = True
            self.counters["write_errors"] += failed
            self._failed(f"{failed} blocks could not be written")
        elif self.state is ShelfState.READ_ONLY:
            self.state, self.error, self._retry_s = ShelfState.SERVING, "", RETRY_S[0]
            log.warning("the disk at %s takes writes again", self.path)
        return total

    def _is_shorter(self, own: PartTable) -> bool:
        """Whether what lies in a table's slots is packed."""
        return own.part >= len(own.namespace.parts)

    def _failed(self, error: str) -> None:
        """A write failed: leave the disk alone for a while."""
        if self.state is ShelfState.SERVING:
            log.error("the disk at %s takes no writes: %s", self.path, error)
            self._retry_s = RETRY_S[0]
        if self.state in {ShelfState.SERVING, ShelfState.READ_ONLY}:
            self.state, self.error = ShelfState.READ_ONLY, error
            self._retry_at = self._clock() + self._retry_s
            self._retry_s = min(2 * self._retry_s, RETRY_S[1])

    def _make_entries(self, n: int) -> None:
        """Have the index room for so many more: small blocks can fill it before the segment."""
        known = self.node.block_count() + self._writing_blocks
        surplus = known + n - self._living_disk().ready.entries_max
        if surplus > 0:
            self.node.evict(surplus)

    # ---- up ------------------------------------------------------------------------------------------

    async def read(
        self, table: PartTable, keys: Sequence[bytes], segment: int, rows: bytes, seconds: float
    ) -> wire.Pulled:
        """Read blocks of a table in memory into its reserved rows: as `Movers.pull`.

        When this ends, however it does, nothing writes to the rows any more. What does not match its
        checksum, or cannot be read, is not found here again.
        """
        status, checksums = bytearray(len(keys)), [EMPTY_KEY] * len(keys)
        node, own = self.node, self.table(table)
        if own is None:
            return wire.Pulled(bytes(status), b"".join(checksums), 0.0)
        leases = [
            lease
            for one in self._all(own)
            if one.blocks and (lease := self._lease(one, keys)) is not None
        ]
        if not leases:
            return wire.Pulled(bytes(status), b"".join(checksums), 0.0)
        found = {
            block.key: block
            for lease in leases
            for _, held in lease.parts.values()
            for block in held
        }
        at = [index for index, key in enumerate(keys) if key in found]
        blocks = [found[keys[index]] for index in at]
        numbers = array("I", rows)
        try:
            pulled = await self._living_disk().read(
                wire.ReadBlocks(
                    nbytes=table.spec.nbytes,
                    checksums=b"".join([block.checksum for block in blocks]),
                    slots=self._slots(blocks),
                    segment=segment,
                    stride=table.stride,
                    rows=wire.pack_rows([numbers[index] for index in at]),
                    deadline_s=seconds,
                    lengths=self._lengths(blocks),
                )
            )
        finally:
            for lease in leases:
                self._release(node, own, lease)
        for index, found_status in zip(at, pulled.status.translate(_AS_PULLED), strict=True):
            status[index] = found_status
            if found_status == PRESENT:
                checksums[index] = found[keys[index]].checksum
        came = [block for block, one in zip(blocks, pulled.status, strict=True) if one == GOOD]
        self.counters["read_blocks"] += len(came)
        self.counters["read_bytes"] += sum(block.table.spec.nbytes for block in came)
        self._drop_bad(node, blocks, pulled.status)
        return wire.Pulled(bytes(status), b"".join(checksums), pulled.seconds, pulled.error)

    def _lease(self, own: PartTable, keys: Sequence[bytes]) -> Lease | None:
        """Keep those of the blocks that are here in their slots, until `_release`."""
        return self.node.acquire(
            self._holders[own.namespace.tenant.name],
            own.namespace,
            [own.part],
            b"".join(keys),
            None,
            self._clock(),
            scattered=True,
        )

    def _release(self, node: Node, own: PartTable, lease: Lease) -> None:
        """node: whose lease it is; of an ended life there is nothing to be released."""
        if self.node is node:
            node.release(self._holders[own.namespace.tenant.name], lease.token)

    def _slots(self, blocks: Sequence[Block]) -> bytes:
        """Where blocks of one tenant lie in the file, as orders carry it."""
        base = self._bases[blocks[0].table.namespace.tenant.name]
        return array("Q", [base + block.row * block.table.stride for block in blocks]).tobytes()

    def _offsets(self, own: PartTable, rows: Sequence[int]) -> bytes:
        """The same of rows of a table."""
        base = self._bases[own.namespace.tenant.name]
        return array("Q", [base + row * own.stride for row in rows]).tobytes()

    def _lengths(self, blocks: Sequence[Block]) -> bytes:
        """How long their slots are, as orders carry it: nothing where all are as long as a whole block."""
        if not any(self._is_shorter(table) for table in {block.table for block in blocks}):
            return b""
        return array("I", [block.table.spec.nbytes for block in blocks]).tobytes()

    def _drop_bad(self, node: Node, blocks: Sequence[Block], status: bytes) -> int:
        """What does not match its checksum, or cannot be read, is found here no more; how many."""
        bad = [block for block, s in zip(blocks, status, strict=True) if s in {BAD, IO_ERROR}]
        mismatches = status.count(BAD)
        self.counters["mismatches"] += mismatches
        self.counters["read_errors"] += len(bad) - mismatches
        for block, one in zip(blocks, status, strict=True):
            self.counters["undecoded_blocks"] += one == BAD and self._is_shorter(block.table)
        if self.node is node:
            for block in bad:
                node.drop_corrupt(block.table.namespace, block.table.part, block.key)
        return len(bad)

    # ---- pins ----------------------------------------------------------------------------------------

    def space(self, namespace: NamespaceState) -> NamespaceState | None:
        """What is here of a namespace in memory; None: nothing."""
        space = self.node.by_directory(namespace.directory_digest)
        return None if space is None or space.retired else space

    async def pin(self, namespace: NamespaceState, packed: bytes, kind: str) -> set[bytes]:
        """Pin what is here of these blocks, for later lives too: see `Node.pin`; the keys."""
        space = self.space(namespace)
        if space is None:
            return set()
        changed = self.node.check_pin(space, packed, kind)
        found = self.node.pin(space, packed, kind)
        base = self._bases[space.tenant.name]
        slots = array("Q", [base + block.row * block.table.stride for block in changed])
        if slots:
            await self._living_disk().pin(wire.PinSlots(slots.tobytes(), PIN_KINDS[kind], FORGET_S))
        return found

    # ---- what nobody waits for ---------------------------------------------------------------------

    def _take_given_up(self) -> bytes:
        slots = self._given_up.tobytes()
        del self._given_up[:]
        return slots

    async def tidy(self) -> None:
        """Have the index forget what was given up since the last write. Raises `Unavailable`."""
        if not self._given_up and not self._refused:
            return
        node, slots = self.node, self._take_given_up()
        try:
            await self._living_disk().forget(wire.ForgetSlots(slots, FORGET_S))
        except LimitExceeded:
            # It was not sent. What was, the process keeps, and an index that refuses is asked again: to
            # send that once more could hit what was written into such a slot meanwhile.
            if self.node is node:
                self._given_up.frombytes(slots)
            raise
        except KvpoolError:
            if self.node is node:
                self._refused = True
            raise
        if self.node is node:
            self._refused = False

    async def scrub(self, cursor: int, count: int) -> tuple[int, int, int | None]:
        """Compare about `count` blocks from a cursor on with their checksums: (seen, bad, next cursor).

        Bad ones are dropped. Raises `Unavailable` when the process ends meanwhile.
        """
        node = self.node
        groups, more = node.walk(cursor, count)
        seen = bad = 0
        for digest, keys in groups:
            space = node.by_directory(digest)
            for own in [] if space is None else space.tables:
                if self.node is not node:
                    raise Unavailable(f"the disk at {self.path} is {self.state}: {self.error}")
                lease = self._lease(own, keys)
                if lease is not None:
                    bad += await self._scrub_some(node, own, lease)
                    seen += lease.blocks
        self.counters["scrubbed_blocks"] += seen
        return seen, bad, more

    async def _scrub_some(self, node: Node, own: PartTable, lease: Lease) -> int:
        _, blocks = lease.parts[own.part]
        try:
            written = await self._living_disk().scrub(
                wire.ScrubBlocks(
                    nbytes=self._nbytes[own],
                    checksums=b"".join([block.checksum for block in blocks]),
                    slots=self._slots(blocks),
                    deadline_s=SCRUB_S,
                    lengths=self._lengths(blocks),
                )
            )
        finally:
            self._release(node, own, lease)
        return self._drop_bad(node, blocks, written.status)

    # ---- the operator's view -----------------------------------------------------------------------

    @property
    def segment_bytes(self) -> int:
        """What slots can take; 0 while the process does not run."""
        return 0 if self._disk is None else self._disk.ready.segment_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots that are in use."""
        return sum(tenant.allocator.bytes_used for tenant in self.node.tenants.values())

    def _sizes(self) -> tuple[int, int]:
        """Bytes of all blocks here as they are read, and of the slots that they lie in."""
        tables = [
            table
            for tenant in self.node.tenants.values()
            for space in tenant.namespaces.values()
            for table in space.tables
        ]
        return (
            sum(len(table.blocks) * self._nbytes[table] for table in tables),
            sum(len(table.blocks) * table.stride for table in tables),
        )

    def stats(self) -> dict[str, Any]:
        """Plain values."""
        disk = self._disk
        raw_bytes, stored_bytes = self._sizes()
        return {
            "path": self.path,
            "state": str(self.state),
            "error": self.error,
            "size_bytes": self.size,
            "segment_bytes": self.segment_bytes,
            "entries_max": 0 if disk is None else disk.ready.entries_max,
            "direct": disk is not None and disk.ready.direct,
            "used_bytes": self.used_bytes,
            "blocks": self.node.block_count(),
            "raw_bytes": raw_bytes,
            "stored_bytes": stored_bytes,
            "codec_error": self.codec_error,
            "writing_bytes": self.writing_bytes,
            "written_bytes": self.written_bytes,
            "gone": self.node.gone(),
            **self.counters,
        }

"""The object tier's store: blocks in objects of S3, GCS, Azure or a folder, cold and shared by all nodes.

    with ObjectStore.open("s3://bucket/prefix", node=node, limits=limits) as store:
        store.put(batch, timeout_s=30).locations       # for the catalog, where other nodes find them
        store.get(batch, timeout_s=2)                  # into rows of a segment, verified

The format of objects is in `packs`, the choice of deletions in `usage`, the handling of
failures in `requests`. This module composes them and moves the bytes.

All methods block, for no longer than their `timeout_s`, apart from a little copying and hashing. They are for
any number of threads; `close` is called once, when no other call is running. A method never raises for
failures of single blocks: each gets a status.

Durability is the store's. A folder's objects are whole or absent after the death of the
process, while the death of the machine may damage recent writes, which their checksums then show.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import xxhash

from kvpool.errors import ConfigError, InvalidRequest, ProtocolError
from kvpool.storage.at_rest import EncryptionSecrets, ObjectSealer, block_name, place_name
from kvpool.storage.object.client import Fault, Listed, ObjectClient, ObstoreClient, StoreFault
from kvpool.storage.object.packs import (
    ENTRY,
    LOCATION,
    NODE_BYTES,
    PACK_BLOCKS_MAX,
    PACK_BYTES_MAX,
    PACK_ID_BYTES,
    TRAILER_BYTES,
    Array,
    Bytes1D,
    Bytes2D,
    ObjectTable,
    OtherKindError,
    PackName,
    PackTable,
    build,
    columns,
    pack_size,
    parse_tail,
    prefix,
    tail_bytes,
    usable,
)
from kvpool.storage.object.ranges import Range, plan
from kvpool.storage.object.requests import Clock, Job, ObjectLimits, Requests
from kvpool.storage.object.usage import DroppedPack, ObjectUsage, UsageStats
from kvpool.types import KEY_BYTES, PART_BYTES_MAX, BlockStatus

TAIL_GUESS_BYTES = 64 << 10
"""Bytes of a pack's end that are read at first; the tables of most packs are shorter."""
OTHER_KIND_S = 7 * 86_400.0
"""Own packs that cannot be decrypted, or are not encrypted though they should be, are deleted when they are so old."""
NOTHING: Mapping[str, Any] = MappingProxyType({})

Statuses = npt.NDArray[np.uint8]
Rows = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class PutBatch:
    """Blocks of one table, in the order of their chain where they have one.

    keys, parents, checksums: packed, 16 bytes a block; checksums are the xxh3-128 of the blocks' bytes.
    depths: uint32, blocks before each in its chain. The blocks are the first `nbytes` of `rows` of
    `source`, which nobody changes until the call returns.
    """

    table: ObjectTable
    nbytes: int
    keys: bytes
    parents: bytes
    depths: npt.NDArray[np.uint32]
    checksums: bytes
    source: Bytes2D
    rows: Rows

    def __post_init__(self) -> None:
        _check_rows(self.nbytes, self.source, self.rows)
        for packed in (self.keys, self.parents, self.checksums):
            if len(columns(packed)) != len(self.rows):
                raise InvalidRequest("there must be one key, parent and checksum per row")
        if self.depths.shape != self.rows.shape:
            raise InvalidRequest("there must be one depth per row")


@dataclass(frozen=True, slots=True)
class PutResult:
    """statuses: a block each, `BlockStatus.PRESENT`, `BlockStatus.FAILED` or `BlockStatus.NO_SPACE`. locations:
    of dtype `LOCATION`, valid where the status is `BlockStatus.PRESENT`. dropped: packs deleted to make room,
    whatever the result.
    """

    statuses: Statuses
    locations: Array
    dropped: list[DroppedPack]


@dataclass(frozen=True, slots=True)
class GetBatch:
    """Blocks of one namespace and part. locations: of dtype `LOCATION`, from the catalog. They go to the
    first `nbytes` of the rows of `destination`, which are the call's alone until it returns. keys: packed.
    """

    digest: bytes
    part: int
    nbytes: int
    keys: bytes
    locations: Array
    destination: Bytes2D
    rows: Rows

    def __post_init__(self) -> None:
        ObjectTable(self.digest, self.part)
        _check_rows(self.nbytes, self.destination, self.rows)
        if self.locations.dtype != LOCATION or self.locations.shape != self.rows.shape:
            raise InvalidRequest("there must be one location per row")
        if len(columns(self.keys)) != len(self.rows):
            raise InvalidRequest("there must be one key per row")
        if len(np.unique(self.rows)) != len(self.rows):
            raise InvalidRequest("two blocks cannot be read into one row")
        if not self.destination.flags.writeable:
            raise InvalidRequest("the destination is read-only")


@dataclass(slots=True)
class ObjectStoreStats:
    """Counts since the store was opened. faults: attempts that ended in each `Fault`, by its name in
    lower case. suspended_s: how much longer the store is suspended, 0 if it is not.
    """

    blocks_put: int = 0
    blocks_got: int = 0
    bytes_put: int = 0
    bytes_got: int = 0
    mismatches: int = 0
    packs_unreadable: int = 0
    attempts: int = 0
    faults: Mapping[str, int] = field(default_factory=dict)
    suspensions: int = 0
    suspended_s: float = 0.0
    last_fault: str = ""


@dataclass(eq=False)
class ObjectStore:
    """See the module.

    node: 8 bytes that name this node and stay the same over its restarts: packs with them are its own to
        delete. clock: monotonic, for deadlines; wall: seconds since 1970, for the order of eviction.
        token: n random bytes, never the same again.
    encryption: encrypt the blocks; then no others are read.
    """

    _objects: ObjectClient
    _: KW_ONLY
    node: bytes
    limits: ObjectLimits
    clock: Clock = time.monotonic
    wall: Clock = time.time
    rng: InitVar[random.Random | None] = None
    token: Callable[[int], bytes] = secrets.token_bytes
    encryption: InitVar[EncryptionSecrets | None] = None

    def __post_init__(
        self, rng: random.Random | None, encryption: EncryptionSecrets | None
    ) -> None:
        if len(self.node) != NODE_BYTES:
            raise InvalidRequest(f"a node is named by {NODE_BYTES} bytes")
        self._sealer = None if encryption is None else ObjectSealer(encryption)
        self._lock = threading.Lock()  # of the books and the counts
        self._making_room = threading.Lock()
        self._books = ObjectUsage(self.limits.bytes_max, self.limits.dead_share_max)
        self._counts = ObjectStoreStats()
        self._requests = Requests(self.limits, self.clock, rng or random.Random())

    @classmethod
    def open(
        cls,
        url: str,
        *,
        node: bytes,
        limits: ObjectLimits,
        options: Mapping[str, Any] = NOTHING,
        client_options: Mapping[str, Any] = NOTHING,
        instance_credentials: bool = False,
        encryption: EncryptionSecrets | None = None,
    ) -> ObjectStore:
        """A store at s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or file:///folder.

        options: of obstore's store, e.g. `endpoint`, `region`, `access_key_id`; its usual
            environment variables apply too. client_options: of obstore's HTTP client, e.g. `allow_http`,
            `root_certificate`.
        instance_credentials: without other credentials, use the metadata service of the cloud.

        Sends nothing: `check` tests whether the store can be used. Raises `ConfigError`.
        """
        objects = ObstoreClient.from_url(
            url,
            options=options,
            client_options=client_options,
            instance_credentials=instance_credentials,
            # Deadlines are kept by `Requests`; obstore's own, of half a minute, would interfere.
            attempt_s=limits.attempt_s + PACK_BYTES_MAX / limits.bytes_s_min,
            connect_s=limits.connect_s,
        )
        return cls(objects, node=node, limits=limits, encryption=encryption)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread. Packs that still had to be deleted are found by a later scan."""
        self._requests.close()

    def check(self, *, timeout_s: float) -> None:
        """Lists the store once.

        Raises `ConfigError` if it refuses, `Unavailable` if it fails or does not answer.
        """
        listing = _Listing(self._objects, prefix())
        try:
            self._requests.one(listing.page, self.clock() + timeout_s)
        except StoreFault as fault:
            if fault.fault in (Fault.DENIED, Fault.REFUSED):
                raise ConfigError(
                    f"the object tier cannot be used: {fault}. Check its URL, region and credentials"
                ) from None
            raise

    def put(
        self,
        batch: PutBatch,
        *,
        timeout_s: float,
        stopped: Callable[[], bool] | None = None,
    ) -> PutResult:
        """Writes blocks as packs of about `pack_bytes`. Blocks with status `BlockStatus.PRESENT` are durable.

        stopped: as of `get`. Packs being written then are deleted later, if they exist.
        """
        deadline = self.clock() + timeout_s
        n = len(batch.rows)
        result = PutResult(np.full(n, BlockStatus.FAILED, np.uint8), np.zeros(n, LOCATION), [])
        unsettled: dict[bytes, PackName] = {}
        try:
            jobs = self._packs_to_put(batch, result, unsettled, deadline)
            for (which, table), fault in self._requests.run(
                jobs, deadline, self.limits.uploads, stopped
            ):
                name = unsettled.pop(table.name.pack)
                if fault is None:
                    self._put_done(table, batch.nbytes)
                    result.statuses[which] = BlockStatus.PRESENT
                    result.locations[which] = table.locations()
                else:
                    self._put_failed(name, sent=fault.fault.retryable)
        finally:
            for name in unsettled.values():
                self._put_failed(name, sent=True)
        return result

    def get(
        self,
        batch: GetBatch,
        *,
        timeout_s: float,
        stopped: Callable[[], bool] | None = None,
    ) -> Statuses:
        """Reads blocks into their rows and verifies them: a status a block, the first blocks first.

        stopped: whether the blocks are no longer wanted; then it soon ends, with `BlockStatus.FAILED` for missing
        ones.
        """
        deadline = self.clock() + timeout_s
        statuses = np.full(len(batch.rows), BlockStatus.FAILED, np.uint8)
        fits = usable(batch.locations, batch.nbytes, sealed=self._sealer is not None)
        statuses[~fits] = BlockStatus.MISMATCH
        ranges = plan(
            batch.locations,
            np.flatnonzero(fits).tolist(),
            range_bytes=self.limits.range_bytes,
            gap_bytes=self.limits.gap_bytes,
        )
        reading = _Reading(batch, statuses, self._sealer)
        jobs = (
            (
                one,
                partial(self._objects.get, _path(batch, one), one.start, one.end),
                one.end - one.start,
            )
            for one in ranges
        )
        for one, found in self._requests.run(jobs, deadline, self.limits.reads, stopped):
            reading.take(one, found)
        self._count_get(batch, statuses)
        return statuses

    def forget(
        self, digest: bytes, part: int, locations: Array, *, timeout_s: float
    ) -> list[DroppedPack]:
        """These blocks are no longer wanted.

        Counts for packs that this node wrote or found by a scan to be its own; it deletes those in which
        few or no blocks are alive, and returns them with their live blocks. Packs that
        cannot be deleted in time are deleted by a later call.
        """
        with self._lock:
            dropped = self._books.forget(digest, part, locations)
        self.sweep(timeout_s=timeout_s)
        return dropped

    def clear(self, digest: bytes, *, timeout_s: float) -> int:
        """Deletes every pack of a namespace, whichever node wrote it; returns their number.

        For a namespace that is no longer used. Raises `Unavailable` if some could not be deleted.
        """
        deadline = self.clock() + timeout_s
        with self._lock:
            self._books.clear(digest)
        n = 0
        for page in self._pages(prefix(digest), deadline):
            n += len(self._delete([name for name, _ in page], deadline, all_of_them=True))
        return n

    def drop(self, digest: bytes, *, timeout_s: float) -> None:
        """Deletes this node's known packs of a namespace that is no longer used.

        Packs that cannot be deleted in time are deleted by a later call.
        """
        with self._lock:
            self._books.clear(digest)
        self.sweep(timeout_s=timeout_s)

    def sweep(self, *, timeout_s: float) -> bool:
        """Deletes packs that earlier calls could not. Returns whether none is left."""
        with self._lock:
            names = self._books.doomed()
        if names:
            self._delete(names, self.clock() + timeout_s)
        with self._lock:
            return not self._books.doomed()

    def scan(
        self,
        digest: bytes | None = None,
        part: int | None = None,
        *,
        timeout_s: float,
        own: bool = False,
    ) -> Iterator[PackTable]:
        """Existing packs, of all nodes, one by one, in no order: read from their tables alone.

        own: only this node's. All are listed then as well, but few of them read.
        Unknown packs of this node become known, so that their space counts. Damaged
        ones of its own are deleted by the next `sweep`; others' are left out. Packs that come or go
        meanwhile may or may not be included. Raises `Unavailable` when it cannot be completed in time.
        """
        if digest is not None:
            ObjectTable(digest, part or 0)
        deadline = self.clock() + timeout_s
        for page in self._pages(prefix(digest, part), deadline):
            jobs = (
                ((name, listed), partial(self._read_tail, name, listed.size), TAIL_GUESS_BYTES)
                for name, listed in page
                if not own or name.node == self.node
            )
            for (name, listed), tail in self._requests.run(jobs, deadline, self.limits.reads):
                if isinstance(tail, StoreFault):
                    if tail.fault is Fault.MISSING:
                        continue
                    raise tail
                table = self._enter(name, listed, tail)
                if table is not None:
                    yield table
        # If the time had run out in between, the end of the listing would not have been seen.
        with self._lock:
            self._books.settle()

    def usage(self) -> UsageStats:
        """Of this node's packs, as far as known: complete after a scan of everything."""
        with self._lock:
            return self._books.usage()

    def stats(self) -> ObjectStoreStats:
        requests = self._requests
        with self._lock:
            return replace(
                self._counts,
                attempts=requests.attempts,
                faults={fault.name.lower(): n for fault, n in requests.faults.items()},
                suspensions=requests.suspensions,
                suspended_s=requests.suspended_s,
                last_fault=requests.last_fault,
            )

    def _packs_to_put(
        self,
        batch: PutBatch,
        result: PutResult,
        unsettled: dict[bytes, PackName],
        deadline: float,
    ) -> Iterator[Job[tuple[slice, PackTable], None]]:
        """Uploads, built one by one as they are drawn. unsettled: gets those that have a reservation."""
        table, nbytes = batch.table, batch.nbytes
        entries = np.zeros(len(batch.rows), ENTRY)
        entries["key"] = columns(batch.keys)
        entries["parent"] = columns(batch.parents)
        entries["checksum"] = columns(batch.checksums)
        entries["depth"] = batch.depths
        step = min(max(1, self.limits.pack_bytes // nbytes), PACK_BLOCKS_MAX)
        sealed = self._sealer is not None
        for first in range(0, len(entries), step):
            if self._requests.suspended_s:
                return  # nothing is deleted to make room for packs that will not be sent
            which = slice(first, first + step)
            mine = entries[which]
            pack = self.node + self.token(PACK_ID_BYTES - NODE_BYTES)
            size = pack_size(nbytes, len(mine), table.record, sealed=sealed)
            if not self._make_room(pack, size, result.dropped, deadline):
                result.statuses[which] = BlockStatus.NO_SPACE
                continue
            name = PackName(table.digest, table.part, pack)
            unsettled[pack] = name
            done, body = build(
                *(name, table.record, nbytes, mine, batch.source, batch.rows[which]),
                self._sealer,
            )
            yield (which, done), partial(self._objects.put, name.path, body), size

    def _make_room(
        self, pack: bytes, size: int, dropped: list[DroppedPack], deadline: float
    ) -> bool:
        """Reserves, and deletes packs to make room. One at a time, so that nobody counts on space that
        is still being freed for another.
        """
        if not self._making_room.acquire(timeout=max(0.0, deadline - self.clock())):
            return False
        try:
            with self._lock:
                going = self._books.reserve(pack, size)
                if going is None:
                    return False
                dropped += going
                fits = self._books.fits
            if not fits:
                self.sweep(timeout_s=deadline - self.clock())
                with self._lock:
                    fits = self._books.fits
                    if not fits:
                        self._books.unreserve(pack)
            return fits
        finally:
            self._making_room.release()

    def _put_done(self, table: PackTable, nbytes: int) -> None:
        with self._lock:
            self._books.written(table, self.wall())
            self._counts.blocks_put += len(table.entries)
            self._counts.bytes_put += len(table.entries) * nbytes

    def _put_failed(self, name: PackName, *, sent: bool) -> None:
        with self._lock:
            if sent:
                self._books.unsure(name)
            else:
                self._books.unreserve(name.pack)

    def _count_get(self, batch: GetBatch, statuses: Statuses) -> None:
        packs = batch.locations["pack"]
        got = int((statuses == BlockStatus.PRESENT).sum())
        with self._lock:
            self._counts.blocks_got += got
            self._counts.bytes_got += got * batch.nbytes
            self._counts.mismatches += int((statuses == BlockStatus.MISMATCH).sum())
            self._books.touch(_distinct(packs[statuses == BlockStatus.PRESENT]), self.wall())
            for pack in _distinct(packs[statuses == BlockStatus.ABSENT]):
                self._books.lost(pack)

    def _delete(
        self, names: Collection[PackName], deadline: float, *, all_of_them: bool = False
    ) -> list[PackName]:
        """The deleted packs. all_of_them: raises the error if there are fewer."""
        jobs = ((name, partial(self._objects.delete, name.path), 0) for name in names)
        gone: list[PackName] = []
        wrong: StoreFault | None = None
        for name, fault in self._requests.run(jobs, deadline, self.limits.reads):
            if fault is not None:
                wrong = fault
                continue
            gone.append(name)
            with self._lock:
                self._books.deleted(name.pack)
        if all_of_them and len(gone) < len(names):
            raise wrong or StoreFault(Fault.LATE)
        return gone

    def _pages(self, folder: str, deadline: float) -> Iterator[list[tuple[PackName, Listed]]]:
        """The packs in a folder, each once. Other objects are ignored."""
        listing = _Listing(self._objects, folder)
        seen: set[tuple[bytes, int, bytes]] = set()
        while (page := self._requests.one(listing.page, deadline)) is not None:
            fresh = []
            for listed in page:
                name = PackName.parse(listed.path)
                if name is None or (name.digest, name.part, name.pack) in seen:
                    continue
                seen.add((name.digest, name.part, name.pack))
                fresh.append((name, listed))
            yield fresh

    async def _read_tail(self, name: PackName, size: int) -> bytes | None:
        """The end of a pack from its record on; None if it is not a pack, empty if it is of the other kind."""
        at = max(0, size - TAIL_GUESS_BYTES)
        if not size:
            return None
        tail = (await self._objects.get(name.path, at, size)).tobytes()
        try:
            needed = tail_bytes(name, tail[-TRAILER_BYTES:], size, sealed=self._sealer is not None)
        except OtherKindError:
            return b""
        except ProtocolError:
            return None
        if needed > len(tail):
            tail = (await self._objects.get(name.path, size - needed, size)).tobytes()
        return tail[-needed:]

    def _enter(self, name: PackName, listed: Listed, tail: bytes | None) -> PackTable | None:
        """A scanned pack, unless it is unreadable or about to be deleted."""
        own = name.node == self.node
        try:
            if tail is None:
                raise ProtocolError(f"{name.path} is not a pack")
            if not tail:
                raise OtherKindError(f"{name.path} is of the other kind")
            table = parse_tail(name, tail, listed.size, self._sealer)
        except ProtocolError as error:
            young = self.wall() - listed.modified < OTHER_KIND_S
            with self._lock:
                self._counts.packs_unreadable += 1
                # The secret may be wrong by mistake.
                if own and not (young and isinstance(error, OtherKindError)):
                    self._books.condemn(name, listed.size)
            return None
        if own:
            with self._lock:
                if not self._books.adopt(table, listed.size, listed.modified):
                    return None
        return replace(table, written_at=listed.modified)


class _Listing:
    """A listing that a retry restarts: pages may come twice then. For the loop's thread."""

    def __init__(self, objects: ObjectClient, folder: str) -> None:
        self._objects = objects
        self._folder = folder
        self._pages: AsyncIterator[list[Listed]] | None = None

    async def page(self) -> list[Listed] | None:
        """The next page, None at the end."""
        pages = self._pages or self._objects.pages(self._folder)
        self._pages = None  # in pieces, should this fail
        page = await anext(pages, None)
        self._pages = pages
        return page


class _Reading:
    """The results for the blocks of a batch."""

    def __init__(self, batch: GetBatch, statuses: Statuses, sealer: ObjectSealer | None) -> None:
        self._batch = batch
        self._statuses = statuses
        self._sealer = sealer
        self._place = place_name(batch.digest, batch.part)
        self._left = batch.locations["stored"].astype(np.int64)
        self._checksums = batch.locations["checksum"]
        self._pieces: dict[int, Bytes1D] = {}  # encrypted blocks that come in several ranges

    def take(self, one: Range, found: Bytes1D | StoreFault) -> None:
        """A range arrived, or failed."""
        if isinstance(found, StoreFault) or len(found) != one.end - one.start:
            status = _status(found.fault) if isinstance(found, StoreFault) else BlockStatus.MISMATCH
            for piece in one.pieces:
                self._statuses[piece.block] = status
            return
        batch = self._batch
        for index, at, inside, length in one.pieces:
            data = found[at : at + length]
            if self._sealer is not None:
                self._take_sealed(self._sealer, index, inside, data)
                continue
            row = batch.destination[batch.rows[index]]
            if length == batch.nbytes:
                # Verified before it is copied: the row of a wrong block is not touched.
                if self._right(index, data):
                    np.copyto(row[:length], data)
                    self._statuses[index] = BlockStatus.PRESENT
                else:
                    self._statuses[index] = BlockStatus.MISMATCH
                continue
            np.copyto(row[inside : inside + length], data)
            self._left[index] -= length
            if not self._left[index]:
                right = self._right(index, row[: batch.nbytes])
                self._statuses[index] = BlockStatus.PRESENT if right else BlockStatus.MISMATCH

    def _take_sealed(self, sealer: ObjectSealer, index: int, inside: int, data: Bytes1D) -> None:
        """Bytes of an encrypted block, from `inside` on: nothing of it is taken before all is there."""
        batch, where = self._batch, self._batch.locations[index]
        self._left[index] -= data.size
        if data.size < where["stored"]:
            whole = self._pieces.setdefault(index, np.empty(int(where["stored"]), np.uint8))
            np.copyto(whole[inside : inside + data.size], data)
            if self._left[index]:
                return
            data = self._pieces.pop(index)
        name = PackName(batch.digest, batch.part, where["pack"].tobytes())
        key = batch.keys[KEY_BYTES * index : KEY_BYTES * (index + 1)]
        called = block_name(self._place, key, bytes(where["checksum"]), batch.nbytes)
        out = batch.destination[batch.rows[index], : batch.nbytes]
        right = sealer.open(name.path, int(where["offset"]), data, called, out)
        right = right and self._right(index, out)
        self._statuses[index] = BlockStatus.PRESENT if right else BlockStatus.MISMATCH

    def _right(self, index: int, data: Bytes1D) -> bool:
        return xxhash.xxh3_128_digest(data.data) == bytes(self._checksums[index])


def _status(fault: Fault) -> int:
    if fault is Fault.MISSING:
        return BlockStatus.ABSENT
    return BlockStatus.MISMATCH if fault is Fault.RANGE else BlockStatus.FAILED


def _path(batch: GetBatch, one: Range) -> str:
    return PackName(batch.digest, batch.part, one.pack).path


def _distinct(packs: Array) -> list[bytes]:
    return [pack.tobytes() for pack in np.unique(packs)]


def _check_rows(nbytes: int, rows2d: Bytes2D, rows: Rows) -> None:
    if not 0 < nbytes <= PART_BYTES_MAX:
        raise InvalidRequest(f"a block of {nbytes} bytes: sizes are 1 to {PART_BYTES_MAX} bytes")
    if rows2d.dtype != np.uint8 or rows2d.ndim != 2 or rows2d.shape[1] < nbytes:
        raise InvalidRequest("blocks must be in a 2-D array of bytes with rows at least as long")
    if rows.ndim != 1 or rows.dtype != np.intp:
        raise InvalidRequest("rows must be an array of indices (intp)")
    if len(rows) and (rows.min() < 0 or rows.max() >= len(rows2d)):
        raise InvalidRequest("a row is outside of the array")

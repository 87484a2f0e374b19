"""The SSD store: block parts in slots of one file, found again after a crash.

One `SsdStore` owns one directory and a number of bytes of its disk:

    segment          the slots, preallocated; read and written past the page cache where possible
    index/data.mdb   which slot holds what (index.py)
    lock             one process at a time

    sealed           an empty file: the blocks are encrypted (at_rest.py)

It decides nothing. Its caller chooses slots and evictions;
the store keeps the order in which these become durable (commit.py), and moves the bytes
(staging.py, files.py). It trusts no byte that it reads: the checksum of the raw
bytes of the block, given with the write, decides.

A block may be lost by a crash or a failing disk; it is a cache. It is never wrong.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvpool.errors import AlreadyRunning, ConfigError, InvalidRequest, SegmentError, Unavailable
from kvpool.folders import sync_folder
from kvpool.memory.buffers import Rows2D
from kvpool.storage import codecs
from kvpool.storage.at_rest import SEAL_BYTES, BlockSealer, EncryptionSecrets
from kvpool.storage.ssd.commit import Committer, Statuses
from kvpool.storage.ssd.files import PAGE, Direct, Disk, LinuxDisk, SegmentFile
from kvpool.storage.ssd.index import ENTRY, FORGET, Entries, SsdIndex, map_bytes_for, open_index
from kvpool.storage.ssd.jobs import (
    Job,
    Lengths,
    Offsets,
    ReadBatch,
    Reader,
    RowNumbers,
    WriteBatch,
    Writer,
    adjacent,
    slot_bytes,
)
from kvpool.storage.ssd.staging import StagingThreads
from kvpool.types import BlockStatus

__all__ = [
    "ENTRY",
    "ReadBatch",
    "SsdStore",
    "SsdStoreStats",
    "WriteBatch",
    "slot_bytes",
]

log = logging.getLogger(__name__)

SIZE_MIN = 4 << 20
BATCH_MAX = 1 << 16
STAGING_BYTES = 4 << 20
JOB_BYTES = 1 << 20
JOB_BYTES_MIN = 256 << 10
THREADS_MAX = 64


@dataclass(frozen=True, slots=True)
class SsdStoreStats:
    """Counts since `open`, in blocks unless the name says otherwise. Bytes are those of the disk.

    index_lost: the index was damaged and the store began empty. index_errors: failed
    transactions; if they continue, writes fail until the store is opened again. entries_dropped: invalid
    records.
    """

    segment_bytes: int
    direct: bool
    entries: int
    entries_max: int
    index_pages: int
    index_lost: bool
    sync_errors: int
    index_errors: int
    entries_dropped: int = 0
    blocks_written: int = 0
    bytes_written: int = 0
    blocks_read: int = 0
    bytes_read: int = 0
    write_errors: int = 0
    read_errors: int = 0
    mismatches: int = 0


class SsdStore:
    """See the module's docstring. Methods block and are thread-safe; `forget` and `pin` do not block.

    Calls wait for the disk as long as it takes; see `StagingThreads`.
    """

    def __init__(
        self,
        segment: SegmentFile,
        index: SsdIndex,
        lock_fd: int,
        threads: int,
        sealer: BlockSealer | None,
    ) -> None:
        """Use `open`."""
        self.seal_bytes = 0 if sealer is None else SEAL_BYTES
        self._sealer = sealer
        self.segment_bytes = segment.nbytes
        self.entries_max = index.entries_max
        self.direct = segment.direct
        self.store_id = index.header.store_id
        self._segment = segment
        self._index = index
        self.tables, self.add_table = index.tables, index.add_table
        self.renew_table, self.drop_tables = index.renew_table, index.drop_tables
        self._lock_fd = lock_fd
        self._crew = StagingThreads(threads, STAGING_BYTES)
        self._committer = Committer(segment, index)
        self._calls = threading.Condition()
        self._running = 0
        self._closed = False
        self._counts: Counter[str] = Counter()

    @classmethod
    def open(
        cls,
        path: Path | str,
        size: int,
        *,
        direct: Direct = "auto",
        threads: int = 8,
        disk: Disk | None = None,
        encryption: EncryptionSecrets | None = None,
    ) -> SsdStore:
        """Open or create the store in the directory `path`, in `size` bytes of its disk at most.

        A store of another size is grown or shrunk; blocks beyond the new end are dropped.
        direct: O_DIRECT. "auto": if the file system can; True: or `ConfigError`.
        threads: concurrent requests to the disk; each takes 4 MiB of memory.
        encryption: encrypt the blocks. A store that was not encrypted, or is not to be any more, starts empty.

        Raises `AlreadyRunning`, `ConfigError` (size, format of another version), `SegmentError`
        (no room, no permission, a failing disk).
        """
        folder = Path(path)
        if size < SIZE_MIN:
            raise ConfigError(f"an SSD store needs at least {SIZE_MIN} bytes, not {size}")
        if not 1 <= threads <= THREADS_MAX:
            raise ConfigError(f"an SSD store must have 1 to {THREADS_MAX} threads, not {threads}")
        map_bytes = map_bytes_for(size)
        segment_bytes = (size - map_bytes - _small_files_bytes(size)) // PAGE * PAGE
        lock_fd = _lock(folder)
        try:
            _mark_sealed(folder, encryption is not None)
            if not (
                folder / "segment"
            ).exists():  # otherwise an index would describe bytes that are gone
                (folder / "index" / "data.mdb").unlink(missing_ok=True)
            index = open_index(
                folder / "index",
                map_bytes=map_bytes,
                segment_bytes=segment_bytes,
                new_id=secrets.token_bytes(16),
            )
            try:
                segment = SegmentFile.open(
                    LinuxDisk() if disk is None else disk, folder / "segment", segment_bytes, direct
                )
                sync_folder(folder)
                if index.header.segment_bytes != segment_bytes:
                    index.set_segment_bytes(segment_bytes)
            except BaseException:
                index.close()
                raise
        except BaseException:
            os.close(lock_fd)
            raise
        sealer = None if encryption is None else BlockSealer(encryption, index.header.store_id)
        return cls(segment, index, lock_fd, threads, sealer)

    def close(self) -> None:
        """Wait for calls under way, make queued operations durable, and close. Idempotent."""
        with self._calls:
            if self._closed:
                return
            self._closed = True
            while self._running:
                self._calls.wait()
        self._crew.close()
        self._committer.close()
        self._index.close()
        self._segment.close()
        os.close(self._lock_fd)

    # Contents

    def entries(self, chunk: int = 50_000) -> Iterator[Entries]:
        """All entries as arrays of dtype `ENTRY`, up to `chunk` each, in the order of their offsets.

        Invalid records are left out, counted, and forgotten, and those of blocks that no key in use can decrypt.
        Meant for the start: later chunks may or may not include concurrent changes.
        """
        numbers = [0] if self._sealer is None else self._sealer.known_numbers()
        for entries in self._index.chunks(chunk):
            sound = self._index.sound(entries) & np.isin(entries["seal"], numbers)
            if sound.all():
                yield entries
                continue
            self._count(entries_dropped=len(entries) - int(sound.sum()))
            self._committer.queue(entries["offset"][~sound].tolist(), FORGET)
            yield entries[sound]

    def entries_at(self, offsets: Offsets | Sequence[int]) -> Entries:
        """The valid records of these slots; the others are left out. Raises `SegmentError`."""
        with self._call():
            entries = self._index.at(_plain(offsets))
            return entries[self._index.sound(entries)]

    def stats(self) -> SsdStoreStats:
        with self._calls:
            counts = dict(self._counts)
        return SsdStoreStats(
            segment_bytes=self.segment_bytes,
            direct=self.direct,
            entries=self._index.count(),
            entries_max=self.entries_max,
            index_pages=self._index.pages(),
            index_lost=self._index.lost,
            sync_errors=self._committer.sync_errors,
            index_errors=self._committer.index_errors,
            **counts,
        )

    # Changes

    def forget(self, offsets: Offsets | Sequence[int]) -> int:
        """Queue the deletion of these slots' entries, and return at once: a number for `write`.

        From one thread at a time, in the order of the decisions. A write of such a slot that is
        under way leaves no entry; one that was not yet begun does, so a slot must not be forgotten
        between the two.
        """
        return self._committer.queue(_plain(offsets), FORGET)

    def pin(self, offsets: Offsets | Sequence[int], level: int) -> int:
        """Queue a change of the pin level (0 to 255) of these entries; as `forget`."""
        if not 0 <= level <= 255:
            raise InvalidRequest(f"a pin level must be 0 to 255, not {level}")
        return self._committer.queue(_plain(offsets), level)

    def wait(self, after: int) -> bool:
        """Until operations queued by `forget` or `pin` up to this number are durable; False if they failed."""
        with self._call():
            return self._committer.wait(after)

    def write(self, batch: WriteBatch, after: int = 0) -> Statuses:
        """Store blocks durably: u8[n] of `BlockStatus`: PRESENT; FAILED, the medium cannot keep it there; or NO_SPACE.

        after: returned by `forget` when the slots were last freed; their old entries are gone
            before the first byte is written. 0: they never had any.

        Blocks that are not PRESENT have no entry after a restart, unless the disk fails without reporting
        it; then their checksum shows it. The source must not change during the call.
        """
        seal, lengths = np.uint32(self.seal_bytes), None
        if batch.stored is not None:
            lengths = _slot_lengths(batch.stored + seal, batch.nbytes)
        slots = self._checked(batch.nbytes, batch.offsets, batch.source, batch.rows, lengths)
        n = len(slots)
        if not self._index.has_table(batch.table):
            raise InvalidRequest(f"the SSD store has no table {batch.table}")
        entries = np.zeros(n, ENTRY)
        entries["offset"] = slots
        entries["table"] = batch.table
        entries["nbytes"], entries["stored"] = batch.nbytes, batch.nbytes + self.seal_bytes
        if batch.stored is not None:
            entries["stored"], entries["codec"] = batch.stored + seal, batch.codec
        if self._sealer is not None:
            entries["seal"] = self._sealer.key_number()
        entries["key"], entries["parent"] = batch.keys, batch.parents
        entries["checksum"], entries["depth"] = batch.checksums, batch.depths
        entries["pin"] = batch.pins
        with self._call():
            if not self._committer.wait(after):
                self._count(write_errors=n)
                return np.full(n, BlockStatus.NO_SPACE, np.uint8)
            pending = self._committer.begin(entries)
            writer = Writer(self._segment, batch, pending.statuses, self._sealer)
            try:
                self._crew.run(self._jobs(slots, batch.nbytes, lengths), writer)
            except BaseException:
                pending.statuses[:] = BlockStatus.FAILED
                raise
            finally:
                self._committer.commit(pending)
        statuses = pending.statuses
        for slot, blocks in self._by_length(slots, batch.nbytes, lengths):
            placed = np.sort(slots[blocks])
            for first, end in adjacent(placed, slot):
                self._segment.drop_pages(int(placed[first]), (end - first) * slot)
        done = statuses == BlockStatus.PRESENT
        self._count(
            blocks_written=int(done.sum()),
            bytes_written=int(entries["stored"][done].sum(dtype=np.int64)),
            write_errors=n - int(done.sum()),
        )
        return statuses

    def read(self, batch: ReadBatch) -> Statuses:
        """Fetch blocks: u8[n] of `BlockStatus`: PRESENT (read, and the checksum is right), MISMATCH, FAILED, or ABSENT
        (no secret in use decrypts it).

        Rows of blocks that are not PRESENT hold garbage afterwards. The index is not consulted.
        """
        lengths = batch.lengths
        slots = self._checked(batch.nbytes, batch.offsets, batch.destination, batch.rows, lengths)
        statuses = np.full(len(slots), BlockStatus.LATE, np.uint8)
        with self._call():
            reader = Reader(self._segment, batch, statuses, self._sealer)
            self._crew.run(self._jobs(slots, batch.nbytes, lengths), reader)
        self._count_read(statuses, batch)
        return statuses

    def scrub(self, batch: ReadBatch, pause: Callable[[], None]) -> Statuses:
        """Verify blocks without a destination, as `read`, one request at a time.

        pause: called between any two requests; it waits as long as the load requires, and may raise
            to end the scrub.
        """
        slots = self._checked(batch.nbytes, batch.offsets, None, None, batch.lengths)
        statuses = np.full(len(slots), BlockStatus.LATE, np.uint8)
        reader = Reader(self._segment, batch, statuses, self._sealer)
        for number, job in enumerate(self._jobs(slots, batch.nbytes, batch.lengths)):
            if number:
                pause()
            with self._call():
                self._crew.run([job], reader)
        self._count_read(statuses, batch)
        return statuses

    def slot_bytes(self, nbytes: int) -> int:
        """The slot size for an uncompressed block of `nbytes`: whole pages."""
        return slot_bytes(nbytes + self.seal_bytes)

    def _by_length(self, slots: Offsets, nbytes: int, lengths: Lengths | None) -> Iterator[Job]:
        """The blocks by the lengths of their slots."""
        if lengths is None:
            yield self.slot_bytes(nbytes), np.arange(len(slots))
            return
        for length in np.unique(lengths).tolist():
            yield length, np.flatnonzero(lengths == length)

    def _count_read(self, statuses: Statuses, batch: ReadBatch) -> None:
        done = statuses == BlockStatus.PRESENT
        count = int(done.sum())
        moved = count * batch.nbytes
        if batch.lengths is not None:
            moved = int(np.minimum(batch.lengths[done], batch.nbytes).sum())
        self._count(
            blocks_read=count,
            bytes_read=moved,
            read_errors=int((statuses == BlockStatus.FAILED).sum()),
            mismatches=int((statuses == BlockStatus.MISMATCH).sum()),
        )

    def _count(self, **counts: int) -> None:
        with self._calls:
            self._counts.update(counts)

    @contextmanager
    def _call(self) -> Iterator[None]:
        """`close` waits for calls in here."""
        with self._calls:
            if self._closed:
                raise Unavailable("the SSD store is closed")
            self._running += 1
        try:
            yield
        finally:
            with self._calls:
                self._running -= 1
                self._calls.notify_all()

    def _checked(
        self,
        nbytes: int,
        offsets: Offsets,
        table: Rows2D | None,
        rows: RowNumbers | None,
        lengths: Lengths | None,
    ) -> Offsets:
        """The offsets, after checking that no other slot's bytes are touched."""
        slots = np.ascontiguousarray(offsets, dtype=np.uint64)
        n = len(slots)
        if n > BATCH_MAX:
            raise InvalidRequest(f"{n} blocks in one batch; at most {BATCH_MAX} are allowed")
        if nbytes < 1:
            raise InvalidRequest(f"a block cannot have {nbytes} bytes")
        whole = self.slot_bytes(nbytes)
        if lengths is not None and (
            len(lengths) != n
            or (n and not PAGE <= int(lengths.min()) <= int(lengths.max()) <= whole)
            or np.any(lengths % PAGE)
        ):
            raise InvalidRequest(
                f"{n} slots of blocks of {nbytes} bytes need as many lengths, in whole pages up to {whole}"
            )
        ends = slots + (np.uint64(whole) if lengths is None else lengths.astype(np.uint64))
        # Their ends could wrap around if they began beyond the segment.
        if n and (
            np.any(slots % PAGE)
            or np.any(slots >= np.uint64(self.segment_bytes))
            or int(ends.max()) > self.segment_bytes
        ):
            raise InvalidRequest(
                f"slots of {whole} bytes must begin at multiples of {PAGE} and end within the {self.segment_bytes} "
                "bytes of the segment"
            )
        if table is not None:
            if rows is None or len(rows) != n:
                raise InvalidRequest(f"{n} slots need as many row numbers")
            if nbytes > table.shape[1]:
                raise InvalidRequest(
                    f"blocks of {nbytes} bytes do not fit rows of {table.shape[1]}"
                )
            if n and not 0 <= int(rows.min()) <= int(rows.max()) < len(table):
                raise InvalidRequest(f"row numbers beyond the {len(table)} rows")
        return slots

    def _jobs(self, slots: Offsets, nbytes: int, lengths: Lengths | None) -> list[Job]:
        """Blocks with slots of one length, in the order of their places: each is one worker's next job.

        Adjacent blocks, up to STAGING_BYTES, are one request. Others are grouped only up
        to JOB_BYTES: small enough to be in the processor's cache when they are verified and copied.
        A small batch is split further, so that all workers have something to do.
        """
        jobs: list[Job] = []
        for slot, blocks in self._by_length(slots, nbytes, lengths):
            share = max(JOB_BYTES_MIN, len(blocks) * slot // self._crew.threads)
            run_max = max(1, min(STAGING_BYTES, share) // slot)
            job_max = max(1, min(JOB_BYTES, share) // slot)
            order = blocks[np.argsort(slots[blocks])]
            spans: list[tuple[int, int]] = []
            for first, end in adjacent(slots[order], slot):
                for at in range(first, end, run_max):
                    stop = min(at + run_max, end)
                    if spans and stop - spans[-1][0] <= job_max:
                        spans[-1] = (spans[-1][0], stop)
                    else:
                        spans.append((at, stop))
            jobs += [(slot, order[at:stop]) for at, stop in spans]
        return jobs


def _slot_lengths(stored: npt.NDArray[np.uint32], nbytes: int) -> Lengths:
    """The slot lengths of coded blocks: shorter than whole ones, which identifies them."""
    shorter = codecs.slot_classes(nbytes)[:-1]
    if len(stored) and not (shorter and 1 <= int(stored.min()) <= int(stored.max()) <= shorter[-1]):
        raise InvalidRequest(f"a coded block of {nbytes} bytes must fit a shorter slot")
    return np.array([codecs.slot_bytes(one, nbytes) for one in stored.tolist()], np.int64)


def _plain(offsets: Offsets | Sequence[int]) -> Sequence[int]:
    return offsets.tolist() if isinstance(offsets, np.ndarray) else offsets


def _small_files_bytes(size: int) -> int:
    """The space that the directory, and the file system's own records of the segment, may take in addition.

    Slots that are written in random order split the file into extents, at 12 bytes or more each.
    """
    return (256 << 10) + size // 256


def _mark_sealed(folder: Path, sealed: bool) -> None:
    """Note whether the store in a folder is encrypted; one that was made otherwise is removed."""
    mark, segment = folder / "sealed", folder / "segment"
    try:
        if mark.exists() != sealed:
            if segment.exists():
                log.warning(
                    "the blocks of the SSD store %s %s encrypted until now: it starts empty",
                    folder,
                    "were not" if sealed else "were",
                )
                segment.unlink()  # its index goes with it, when it is opened
            if sealed:
                mark.touch(mode=0o600)
            else:
                mark.unlink()
    except OSError as error:
        raise SegmentError(
            f"the SSD store {folder} cannot be opened: {os.strerror(error.errno or 0)}"
        ) from None


def _lock(folder: Path) -> int:
    try:
        # Its parent is not created: a mistyped path, or a disk that is not mounted, would fill another file system.
        folder.mkdir(exist_ok=True)
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        raise SegmentError(
            f"the SSD store {folder} cannot be opened: there is no folder {folder.parent}. Mount the disk, create the "
            "folder, or correct the path"
        ) from None
    except OSError as error:
        raise SegmentError(
            f"the SSD store {folder} cannot be opened: {os.strerror(error.errno or 0)}"
        ) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise AlreadyRunning(
            f"another process serves the SSD store {folder}; stop it, or choose another directory"
        ) from None
    return fd

"""The index of an SSD store: the contents of slots, in LMDB. Loaded whole at the start, then only written.

One file, `data.mdb`, of a fixed size that is allocated in full when it is created. Three databases in it:

    entries   slot offset (u64, integer key) → the record of `ENTRY`, 88 bytes
    tables    id (u32, integer key) → bytes of the caller
    meta      name → bytes: b"kvpool" the header, b"user:…" the caller's items

Adjacent slots share leaf pages, so a batch that fills a stretch of the segment changes few pages.
LMDB protects its pages against crashes, not against bit flips; each record therefore has a
check of its own, which ties a key to the checksum of its block's bytes. All other values
are preceded by a seal, their xxh3-64.

The file is always created under another name and renamed, so an existing one is complete.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TypeAlias

import lmdb
import lmdb.verify
import numpy as np
import numpy.typing as npt
import xxhash

from kvpool.errors import ConfigError, InvalidRequest, LimitExceeded, SegmentError
from kvpool.folders import sync_folder
from kvpool.types import RECORD_BYTES_MAX

log = logging.getLogger(__name__)

FORMAT = 1
PAGE = 4096

MAP_SHARE = 64
MAP_BYTES_MIN = 1 << 20
ENTRY_BYTES = 256
"""Bytes of the map per entry. Measured under churn at random slots: 195 bytes of live pages
(half to two thirds full), 240 with the pages that consecutive transactions leave behind.
"""

OPERATIONS_MAX = 4096
SEAL_BYTES = 8

ENTRY = np.dtype(
    [
        ("offset", "<u8"),  # of the slot, in the segment
        ("generation", "<u8"),  # counts entries, over restarts: larger is later
        ("key", "u1", (16,)),
        ("parent", "u1", (16,)),
        ("checksum", "u1", (16,)),  # xxh3-128 of the `nbytes` raw bytes
        ("table", "<u4"),
        ("nbytes", "<u4"),
        ("stored", "<u4"),  # bytes in the slot; less than nbytes under a codec
        ("depth", "<u4"),
        ("codec", "u1"),  # 0: none
        ("pin", "u1"),
        ("seal", "<u2"),  # 0: not encrypted; else a number for the key
        ("check", "<u4"),  # of all the others
    ]
)

Transaction: TypeAlias = "lmdb.Transaction[bytes]"
Entries = npt.NDArray[np.void]
FORGET = -1
Operations = Mapping[int, int]
"""Slot offset → pin level, or FORGET."""
NO_ENTRIES: Entries = np.zeros(0, ENTRY)
_Ops = Sequence[tuple[int, int]]

_WORDS = ENTRY.itemsize // 8
_FOLD = 0x9E3779B97F4A7C15
# Odd factors, so that every change of one word changes the sum.
_FACTORS = np.array([pow(_FOLD, n, 1 << 64) for n in range(1, _WORDS + 1)], dtype=np.uint64)
_HEADER = struct.Struct("<IQQI16s")  # format, size of the segment, next generation, next table, id
_ENTRIES, _TABLES, _META = b"entries", b"tables", b"meta"
_HEADER_NAME = b"kvpool"


def check_of(entries: Entries) -> npt.NDArray[np.uint32]:
    """The check of each record, over all other fields."""
    plain = np.ascontiguousarray(entries).copy()
    plain["check"] = 0
    words = plain.view(np.uint64).reshape(len(plain), _WORDS)
    mixed = (words * _FACTORS).sum(axis=1, dtype=np.uint64)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(_FOLD)
    checks: npt.NDArray[np.uint32] = (mixed >> np.uint64(32)).astype(np.uint32)
    return checks


def map_bytes_for(size: int) -> int:
    """The share of a store of `size` bytes that its index gets, in whole pages."""
    return max(MAP_BYTES_MIN, size // MAP_SHARE // PAGE * PAGE)


def entries_max_for(map_bytes: int) -> int:
    """Entries that fit whatever the order in which they come and go.

    The rest of the map is for tables, small items and the pages of the transaction at work.
    """
    return map_bytes * 5 // 8 // ENTRY_BYTES


@dataclass(frozen=True, slots=True)
class Header:
    """Of an index."""

    segment_bytes: int
    generation: int  # of the next entry
    table: int  # the next id. None is used twice: a stray entry must not find an unrelated table
    store_id: bytes

    def pack(self) -> bytes:
        fields = (self.segment_bytes, self.generation, self.table, self.store_id)
        return _seal(_HEADER.pack(FORMAT, *fields))

    @classmethod
    def unpack(cls, value: bytes | None) -> Header:
        """Raises `ConfigError` for another format, `_DamagedError` for invalid contents."""
        data = None if value is None else _unseal(value)
        if data is None:
            raise _DamagedError("it has no header")
        version = int.from_bytes(data[:4], "little")
        if version != FORMAT:
            raise ConfigError(
                f"the SSD store has format {version}; this version of kvpool supports {FORMAT}. Run the version that "
                "created it, or remove its directory: only cached blocks are lost"
            )
        if len(data) != _HEADER.size:
            raise _DamagedError("its header has a wrong length")
        return cls(*_HEADER.unpack(data)[1:])


def _seal(data: bytes) -> bytes:
    return xxhash.xxh3_64_digest(data) + data


def _unseal(value: bytes) -> bytes | None:
    """The sealed value; None if it is damaged."""
    data = value[SEAL_BYTES:]
    return data if value[:SEAL_BYTES] == xxhash.xxh3_64_digest(data) else None


class _DamagedError(Exception):
    """The index cannot be used and may be replaced."""


class IndexFullError(LimitExceeded):
    """The map has no free page for a transaction. The transaction was not done at all."""


class IndexIOError(SegmentError):
    """LMDB could not write its file. Nothing of the transaction may be relied on."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """added: how many of the entries, from the first. got_through: all operations are durable."""

    added: int
    got_through: bool = True
    full: bool = False
    failed: bool = False


class SsdIndex:
    """See the module's docstring. Thread-safe: one transaction at a time, under one lock.

    So LMDB's own lock file and reader table, which exist for other processes, are not needed.
    """

    def __init__(self, folder: Path, env: lmdb.Environment, map_bytes: int, header: Header) -> None:
        """Use `open_index`."""
        self.lost = False  # the previous index was damaged, and is gone
        self.map_bytes = map_bytes
        self.entries_max = entries_max_for(map_bytes)
        self.tables_bytes_max = map_bytes // 8
        # A page that a transaction changes is written elsewhere, and its old place is free two
        # transactions later: their changed pages must fit the share of the map that is kept for it.
        self.operations_max = min(OPERATIONS_MAX, max(8, map_bytes // PAGE // 16))
        self._folder = folder
        self.header = header
        self._lock = threading.Lock()
        # Why a transaction failed: LMDB may refuse all that follow until its file is opened again.
        self._failed: lmdb.Error | None = None
        self._attach(env)
        with env.begin(db=self._table_db) as txn:
            plain = {int.from_bytes(key, "little"): _unseal(value) for key, value in txn.cursor()}
        self._tables = {table: record for table, record in plain.items() if record is not None}
        self._ids = {record: table for table, record in self._tables.items()}

    def _attach(self, env: lmdb.Environment, *, create: bool = True) -> None:
        self._env = env
        self._entries = env.open_db(_ENTRIES, integerkey=True, create=create)
        self._table_db = env.open_db(_TABLES, integerkey=True, create=create)
        self._meta = env.open_db(_META, create=create)

    def _ready(self) -> lmdb.Environment:
        """What transactions are begun on; the lock is held. Raises `lmdb.Error`."""
        if self._failed is not None:
            self._open_again()
        return self._env

    def _open_again(self) -> None:
        """For reading alone where it cannot be written yet."""
        path = self._folder / "data.mdb"
        self._env.close()
        still: lmdb.Error | None = None
        try:
            env = _environment(path, self.map_bytes)
        except lmdb.Error as error:
            still = error
            env = _environment(path, self.map_bytes, readonly=True)
        self._attach(env, create=False)
        try:
            self.header = _header_of(env, self._meta)  # what has failed may be there all the same
        except _DamagedError as error:
            raise lmdb.CorruptedError(str(error)) from None
        self._failed = still

    def close(self) -> None:
        """Idempotent. No calls may follow."""
        with self._lock:
            self._env.close()
            _loading(self._folder).unlink(missing_ok=True)

    def count(self) -> int:
        """Entries in it."""
        with self._lock, self._ready().begin() as txn:
            return txn.stat(self._entries)["entries"]

    def pages(self) -> int:
        """Pages of the map that were ever used."""
        with self._lock:
            return self._ready().info()["last_pgno"] + 1

    # Entries

    def chunks(self, chunk: int) -> Iterator[Entries]:
        """All records, in the order of their slots, unchecked.

        One short transaction a chunk: a long one would keep every page that changes meanwhile.
        If the file turns out to be damaged, an empty index replaces it.
        """
        key: bytes | None = b""
        while key is not None:
            with self._lock:
                try:
                    entries, key = self._chunk(key, chunk)
                except lmdb.Error as error:
                    if self._failed is not None:  # to write: the file is not known to be damaged
                        raise _refused(error) from None
                    self._start_over(str(error))
                    return
            yield entries
        _loading(self._folder).unlink(missing_ok=True)

    def _chunk(self, start: bytes, chunk: int) -> tuple[Entries, bytes | None]:
        """The records from the key `start` on, and the key of the one after them."""
        env = self._ready()
        with env.begin(db=self._entries) as txn:
            cursor = txn.cursor()
            if not (cursor.set_range(start) if start else cursor.first()):
                return NO_ENTRIES, None
            values = list(islice(cursor.iternext(keys=False, values=True), chunk))
            following = cursor.key() if len(values) == chunk and cursor.next() else None
        if set(map(len, values)) != {ENTRY.itemsize}:
            values = [value for value in values if len(value) == ENTRY.itemsize]
        data = b"".join(values)
        return np.frombuffer(data, dtype=ENTRY), following

    def at(self, offsets: Iterable[int]) -> Entries:
        """The records of these slots, unchecked; slots without one are left out. Raises `SegmentError`."""
        with self._lock:
            try:
                with self._env.begin(db=self._entries) as txn:
                    values = [txn.get(offset.to_bytes(8, "little")) for offset in offsets]
            except lmdb.Error as error:
                raise _cannot(self._folder, str(error)) from error
        whole = [value for value in values if value and len(value) == ENTRY.itemsize]
        return np.frombuffer(b"".join(whole), dtype=ENTRY)

    def _start_over(self, reason: str) -> None:
        """Replace a damaged file by one without entries. The lock is held."""
        _warn_of_loss(self._folder, reason)
        self._env.close()
        _make(self._folder, self.map_bytes, self.header, tables=self._tables)
        self._attach(_environment(self._folder / "data.mdb", self.map_bytes))
        self.lost = True

    def commit(self, operations: Operations, entries: Entries) -> Outcome:
        """Forget entries and change pins, then add or replace records; durably.

        Sets `generation` and `check` of `entries`. One transaction if that is small enough, else
        several, operations first; the first that fails ends it.
        """
        ops, most = sorted(operations.items()), self.operations_max
        if len(ops) + len(entries) <= most:
            steps = [(ops, entries)]
        else:
            steps = [(ops[at : at + most], NO_ENTRIES) for at in range(0, len(ops), most)]
            steps += [([], entries[at : at + most]) for at in range(0, len(entries), most)]
        added = 0
        for some, part in steps:
            try:
                done = self._step(some, part)
            except IndexFullError:
                return Outcome(added, not some, full=True)
            except IndexIOError as error:
                log.warning("%s", error)
                return Outcome(added, not some, failed=True)
            added += done
            if done < len(part):
                return Outcome(added, full=True)
        return Outcome(added)

    def _step(self, operations: _Ops, entries: Entries) -> int:
        try:
            return self._transact(operations, entries)
        except IndexFullError:
            # Deletions free space and must succeed: alone, and in pieces that need fewer pages.
            if operations and len(entries):
                self._step(operations, NO_ENTRIES)
                return self._step([], entries)
            if len(operations) > 1:
                half = len(operations) // 2
                self._step(operations[:half], NO_ENTRIES)
                return self._step(operations[half:], NO_ENTRIES)
            raise

    def _transact(self, operations: _Ops, entries: Entries) -> int:
        with self._lock:
            with self._writing() as txn:
                for offset, level in operations:
                    key = offset.to_bytes(8, "little")
                    if level == FORGET:
                        txn.delete(key, db=self._entries)
                    elif (value := txn.get(key, db=self._entries)) is not None:
                        entry = np.frombuffer(value, dtype=ENTRY).copy()
                        entry["pin"] = level
                        entry["check"] = check_of(entry)
                        txn.put(key, entry.tobytes(), db=self._entries)
                # Replaced ones are counted twice: too few near the limit, never too many.
                room = max(0, self.entries_max - txn.stat(self._entries)["entries"])
                part = entries[:room]
                header = replace(self.header, generation=self.header.generation + len(part))
                if len(part):
                    part["generation"] = np.arange(
                        self.header.generation, header.generation, dtype=np.uint64
                    )
                    part["check"] = check_of(part)
                    txn.put(_HEADER_NAME, header.pack(), db=self._meta)
                    _put_all(txn, self._entries, part[np.argsort(part["offset"])])
            self.header = header
        return len(part)

    def sound(self, entries: Entries) -> npt.NDArray[np.bool_]:
        """Which records are valid: whole, inside the segment, of an existing table."""
        end = entries["offset"] + entries["stored"]
        with self._lock:
            known = np.fromiter(self._tables, dtype=np.uint32, count=len(self._tables))
        fits = (entries["offset"] % PAGE == 0) & (end <= self.header.segment_bytes)
        sound: npt.NDArray[np.bool_] = (
            fits & (check_of(entries) == entries["check"]) & np.isin(entries["table"], known)
        )
        return sound

    def fill(self, tables: Mapping[int, bytes], old: Iterable[Entries]) -> None:
        """Give a new index its header, and the fitting contents of another. It is not in use yet."""
        held = 0
        with self._writing() as txn:
            txn.put(_HEADER_NAME, self.header.pack(), db=self._meta)
            for table, record in sorted(tables.items()):
                held += _pages_bytes(record)
                if held <= self.tables_bytes_max:
                    txn.put(table.to_bytes(4, "little"), _seal(record), db=self._table_db)
                    self._tables[table] = record
        room = self.entries_max
        for entries in old:
            kept = entries[self.sound(entries)][:room]
            room -= len(kept)
            with self._writing() as txn:
                _put_all(txn, self._entries, kept)

    # Tables and small items

    def tables(self) -> dict[int, bytes]:
        """id → record."""
        with self._lock:
            return dict(self._tables)

    def has_table(self, table: int) -> bool:
        with self._lock:
            return table in self._tables

    def add_table(self, record: bytes) -> int:
        """The id of a record of up to 64 KiB; added durably if no equal one is there.

        Raises `LimitExceeded` when the index has no room for more tables, `SegmentError` when the disk refuses.
        """
        with self._lock:
            if (known := self._ids.get(record)) is not None:
                return known
            self._check_table(record, b"")
            table = self.header.table
            header = replace(self.header, table=table + 1)
            with self._writing() as txn:
                txn.put(_HEADER_NAME, header.pack(), db=self._meta)
                txn.put(table.to_bytes(4, "little"), _seal(record), db=self._table_db)
            self.header = header
            self._tables[table] = record
            self._ids[record] = table
            return table

    def _check_table(self, record: bytes, instead: bytes) -> None:
        """Check the room for a record, replacing another. Raises `LimitExceeded`."""
        held = sum(map(_pages_bytes, self._tables.values()))
        if instead:
            held -= _pages_bytes(instead)
        if len(record) > RECORD_BYTES_MAX or held + _pages_bytes(record) > self.tables_bytes_max:
            raise LimitExceeded(
                f"the index of the SSD store holds at most {self.tables_bytes_max} bytes of tables, each of "
                f"{RECORD_BYTES_MAX} at most; drop tables, or increase the size of the store"
            )

    def renew_table(self, table: int, record: bytes) -> None:
        """Replace the record of a table durably; its entries stay. Raises as `add_table`.

        A table that already has this record gets the previous one of this: no two have the same. Raises
        `InvalidRequest` for an unknown table.
        """
        with self._lock:
            former = self._tables.get(table)
            if former is None:
                raise InvalidRequest(f"the SSD store has no table {table}")
            other = self._ids.get(record)
            if other == table:
                return
            changed = {table: record}
            if other is None:
                self._check_table(record, former)
                del self._ids[former]
            else:
                changed[other] = former
            with self._writing() as txn:
                for number, data in changed.items():
                    txn.put(number.to_bytes(4, "little"), _seal(data), db=self._table_db)
            self._tables.update(changed)
            self._ids.update({data: number for number, data in changed.items()})

    def drop_tables(self, ids: Sequence[int]) -> None:
        """Drop records durably; unknown ids are ignored. An id is never used again.

        Entries of a dropped table are left out by the next `chunks` of sound ones; forget them first.
        """
        with self._lock:
            with self._writing() as txn:
                for table in ids:
                    txn.delete(table.to_bytes(4, "little"), db=self._table_db)
            for table in ids:
                if (record := self._tables.pop(table, None)) is not None:
                    del self._ids[record]

    def set_segment_bytes(self, nbytes: int) -> None:
        with self._lock:
            header = replace(self.header, segment_bytes=nbytes)
            with self._writing() as txn:
                txn.put(_HEADER_NAME, header.pack(), db=self._meta)
            self.header = header

    @contextmanager
    def _writing(self) -> Iterator[Transaction]:
        """One durable transaction; the lock is held. All of it happens, or nothing."""
        try:
            env = self._ready()
            if self._failed is not None:
                raise self._failed.with_traceback(None)
            with env.begin(write=True) as txn:
                yield txn
        except lmdb.MapFullError:
            raise IndexFullError("the index of the SSD store is full") from None
        except lmdb.Error as error:
            self._failed = error
            raise _refused(error) from None


# ---- opening ------------------------------------------------------------------------------------------


def open_index(folder: Path, *, map_bytes: int, segment_bytes: int, new_id: bytes) -> SsdIndex:
    """The index in `folder`, created, grown or shrunk as needed; `lost`: it had to be replaced.

    new_id: 16 bytes that name the store, if it is new.
    Raises `ConfigError` for the index of another format, `SegmentError` when the disk has no room or
    refuses. Nobody else may use the folder meanwhile.
    """
    path = folder / "data.mdb"
    fresh = Header(segment_bytes, generation=1, table=1, store_id=new_id)
    lost = False
    try:
        folder.mkdir(exist_ok=True)
        if not path.exists():
            _make(folder, map_bytes, fresh)
        try:
            index = _open(folder, map_bytes)
        except _DamagedError as error:
            _warn_of_loss(folder, str(error))
            _make(folder, map_bytes, fresh)
            index, lost = _open(folder, map_bytes), True
        if index.header.segment_bytes > segment_bytes or index.map_bytes > map_bytes:
            header, tables = replace(index.header, segment_bytes=segment_bytes), index.tables()
            _make(folder, map_bytes, header, tables, index.chunks(OPERATIONS_MAX))
            index.close()
            index = _open(folder, map_bytes)
    except OSError as error:
        raise _cannot(path, os.strerror(error.errno or 0)) from None
    index.lost = lost
    return index


def _refused(error: lmdb.Error) -> IndexIOError:
    return IndexIOError(f"the index of the SSD store: {error}")


def _header_of(env: lmdb.Environment, meta: lmdb._Database) -> Header:
    with env.begin(db=meta) as txn:
        return Header.unpack(txn.get(_HEADER_NAME))


def _loading(folder: Path) -> Path:
    """The mark of an index that is being read for the first time since it was opened."""
    return folder / "loading"


def _warn_of_loss(folder: Path, reason: str) -> None:
    log.warning("the index %s of an SSD store is damaged (%s): it starts empty", folder, reason)


def _cannot(path: Path, reason: str) -> SegmentError:
    return SegmentError(f"the index {path} of the SSD store cannot be opened: {reason}")


def _environment(
    path: Path, map_bytes: int, *, sync: bool = True, readonly: bool = False
) -> lmdb.Environment:
    return lmdb.open(
        str(path),
        map_size=map_bytes,
        subdir=False,
        lock=False,
        max_dbs=3,
        mode=0o600,
        sync=sync,
        readonly=readonly,
    )


def _open(folder: Path, map_bytes: int) -> SsdIndex:
    path, loading = folder / "data.mdb", _loading(folder)
    size = path.stat().st_size
    # LMDB trusts its file, and a damaged page can end the process. A process that died while it read the
    # index has left this mark; then the slow verifier, which trusts nothing, checks it first.
    if loading.exists():
        try:
            problems = lmdb.verify.verify(str(path), subdir=False)
        except lmdb.verify.VerifyError as error:
            raise _DamagedError(str(error)) from None
        if problems:
            raise _DamagedError(problems[0])
    loading.touch(mode=0o600)
    if size < map_bytes:
        _allocate(path, map_bytes)
    try:
        env = _environment(path, max(map_bytes, size))
    except (lmdb.DiskError, lmdb.ReadonlyError, lmdb.MemoryError) as error:
        raise _cannot(path, str(error)) from None
    except lmdb.Error as error:
        raise _DamagedError(str(error)) from None
    try:
        used = (env.info()["last_pgno"] + 1) * PAGE
        if used > size:
            raise _DamagedError("its file is truncated")
        _read_ahead(path, used)
        header = _header_of(env, env.open_db(_META, create=False))
        return SsdIndex(folder, env, max(map_bytes, size), header)
    except lmdb.Error as error:
        env.close()
        raise _DamagedError(str(error)) from None
    except BaseException:
        env.close()
        raise


def _make(
    folder: Path,
    map_bytes: int,
    header: Header,
    tables: Mapping[int, bytes] | None = None,
    entries: Iterable[Entries] = (),
) -> None:
    """Write an index with these contents, and replace the old one. Durable, and all or nothing."""
    new = folder / "new.mdb"
    new.unlink(missing_ok=True)
    try:
        with _environment(new, map_bytes, sync=False) as env:
            index = SsdIndex(folder, env, map_bytes, header)
            index.fill(tables or {}, entries)
            env.sync(True)
    except lmdb.Error as error:
        raise _cannot(new, str(error)) from None
    _allocate(new, map_bytes)
    new.rename(folder / "data.mdb")
    for place in (folder, folder.parent):
        sync_folder(place)


def _allocate(path: Path, nbytes: int) -> None:
    """Allocate all the space now: then a full disk cannot stop a transaction, and a commit changes no size."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        os.fsync(fd)
    finally:
        os.close(fd)


def _read_ahead(path: Path, nbytes: int) -> None:
    """Have the kernel read all of it in large pieces; page faults would read it one by one."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, nbytes, os.POSIX_FADV_WILLNEED)
    finally:
        os.close(fd)


def _put_all(txn: Transaction, db: lmdb._Database, entries: Entries) -> None:
    """Put records that are in the order of their offsets."""
    keys, values = np.ascontiguousarray(entries["offset"]).tobytes(), entries.tobytes()
    width = ENTRY.itemsize
    items = [
        (keys[8 * n : 8 * n + 8], values[width * n : width * (n + 1)]) for n in range(len(entries))
    ]
    txn.cursor(db).putmulti(items)


def _pages_bytes(record: bytes) -> int:
    """Approximate bytes of the map for a table's record."""
    return -(-(len(record) + 16) // PAGE) * PAGE if len(record) > PAGE // 2 else len(record) + 32

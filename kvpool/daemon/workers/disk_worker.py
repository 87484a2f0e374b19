"""A disk worker: it owns the folder of one disk (`kvpool.storage.ssd.store`), and maps the daemon's segments.

It decides nothing: its control process chooses the slots. A `WorkerProcess`
of its own for each disk, so that one that hangs in the kernel delays only its own readers, who have
deadlines.

Threads: the main one reads the control channel and keeps the order of deletions; a few wait for the store,
separate ones for reads and writes, so that no engine's read waits behind a queue of background writes. Packing
(`kvpool.storage.ssd.pack`) is done in those that write; packed blocks wait here for their slots.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.daemon.workers.worker_main import Jobs, WorkerProcess, run_worker
from kvpool.errors import ConfigError, InvalidRequest, LimitExceeded, Unavailable
from kvpool.storage.at_rest import EncryptionSecrets
from kvpool.storage.codecs import BLOSC2, RAW, Blosc2
from kvpool.storage.ssd.index import Entries
from kvpool.storage.ssd.pack import Packed, pack, slot_contents
from kvpool.storage.ssd.store import ReadBatch, SsdStore, WriteBatch
from kvpool.transfer.base import Deadline, Stop
from kvpool.types import CHECKSUM_BYTES, BlockStatus
from kvpool.wire import frame
from kvpool.wire import storage as storage_wire
from kvpool.wire import worker as worker_wire

READ_JOBS, WRITE_JOBS = 8, 4
PACKS_MAX = 2 * WRITE_JOBS  # kept at a time: control orders at most as many as concurrent writes


class DiskWorker(WorkerProcess):
    """The process."""

    kind = "disk"
    decode = storage_wire.decode_disk

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._secrets = EncryptionSecrets()
        reads = Jobs("kvpool-read", READ_JOBS, self.control)
        self._writes = Jobs("kvpool-write", WRITE_JOBS, self.control)
        self.orders = {
            storage_wire.ReadEntries: (reads, self._entries_at),
            storage_wire.ReadBlocks: (reads, self._read),
            storage_wire.PackBlocks: (self._writes, self._pack),
            storage_wire.ScrubBlocks: (self._writes, self._scrub),
        }
        self.questions |= {
            storage_wire.DiskStart: self._begin,
            storage_wire.ScanDisk: self._next_entries,
            storage_wire.AddTable: self._add_table,
            storage_wire.DropTables: self._drop_tables,
        }
        self.notes |= {
            storage_wire.DropPack: self._drop_pack,
            storage_wire.ChangeSecrets: lambda order: self._secrets.change(order.secrets),
        }
        self.stoppable = (reads,)
        self._store: SsdStore  # from `DiskStart` on, the first message
        self._scan: Iterator[Entries] | None = None
        self._forgotten = 0
        self._packs: dict[int, Packed] = {}
        self._packs_lock = threading.Lock()

    def handle(self, request: int, message: Any) -> None:
        """Note deletions and pins in the main thread, in their order; a thread waits for the index to accept them."""
        match message:
            case storage_wire.WriteBlocks():
                self._forget(message.forget)
                work = partial(self._write, message, self._forgotten)
            case storage_wire.ForgetSlots():
                self._forget(message.slots)
                work = partial(self._wait, self._forgotten)
            case storage_wire.PinSlots():
                slots = np.frombuffer(message.slots, dtype=np.uint64)
                self._forgotten = self._store.pin(slots, message.level)
                work = partial(self._wait, self._forgotten)
            case _:
                super().handle(request, message)
                return
        self._writes.add(request, message.deadline_s, work)

    def _begin(self, start: storage_wire.DiskStart) -> frame.Message:
        self._secrets = EncryptionSecrets(start.secrets)
        store = self._store = SsdStore.open(
            start.path,
            start.size,
            threads=start.threads,
            encryption=self._secrets if start.secrets else None,
        )
        # Imported only when needed: it takes 30 MiB.
        codecs = [Blosc2.name] if find_spec("blosc2") else []
        tables = list(store.tables().items())
        return storage_wire.DiskReady(
            *(store.segment_bytes, store.entries_max, store.direct, tables, codecs),
            store.seal_bytes,
        )

    def _next_entries(self, order: storage_wire.ScanDisk) -> frame.Message:
        if self._scan is None:
            self._scan = self._store.entries(order.count)
        found = next(self._scan, None)
        if found is None:
            return storage_wire.Scanned(b"")
        error = ""
        if (found["codec"] == BLOSC2).any():
            try:
                Blosc2()  # now, not in the first read: importing takes half a second
            except ConfigError as refused:
                error = str(refused)
        return storage_wire.Scanned(found.tobytes(), error)

    def _entries_at(self, order: storage_wire.ReadEntries, *_: object) -> frame.Message:
        slots = np.frombuffer(order.slots, dtype=np.uint64)
        return storage_wire.Scanned(self._store.entries_at(slots).tobytes())

    def _drop_tables(self, order: storage_wire.DropTables) -> frame.Message:
        self._store.drop_tables(order.tables)
        return frame.Done()

    def _add_table(self, order: storage_wire.AddTable) -> frame.Message:
        if order.table:
            self._store.renew_table(order.table, order.record)
            return frame.Done(order.table)
        return frame.Done(self._store.add_table(order.record))

    def _forget(self, slots: bytes) -> None:
        if slots:
            self._forgotten = self._store.forget(np.frombuffer(slots, dtype=np.uint64))

    def _wait(self, after: int, *_: object) -> frame.Message:
        if not self._store.wait(after):
            raise Unavailable("the index of the disk did not accept the changes")
        return frame.Done()

    def _drop_pack(self, order: storage_wire.DropPack) -> None:
        with self._packs_lock:
            self._packs.pop(order.pack, None)

    def _pack(self, order: storage_wire.PackBlocks, *_: object) -> frame.Message:
        started = time.monotonic()
        with self._packs_lock:
            if len(self._packs) >= PACKS_MAX:
                raise LimitExceeded(f"{PACKS_MAX} packs are waiting to be written, the limit")
        packed = pack(
            self.memory.table(order.segment, order.stride), _rows(order.rows), order.nbytes
        )
        with self._packs_lock:
            self._packs[order.pack] = packed
        stored = slot_contents(packed.stored, order.nbytes, self._store.seal_bytes)
        return storage_wire.Packed(stored.tobytes(), time.monotonic() - started)

    def _packed(self, number: int) -> Packed:
        with self._packs_lock:
            packed = self._packs.get(number)
        if packed is None:
            raise InvalidRequest(f"there is no pack {number}")
        return packed

    def _write(self, order: storage_wire.WriteBlocks, after: int, *_: object) -> frame.Message:
        started = time.monotonic()
        n, rows = len(order.keys) // 16, _rows(order.rows)
        packed = self._packed(order.pack) if order.pack else None
        if packed is None:
            source = self.memory.table(order.segment, order.stride)
        else:
            source = packed.rows
        status = self._store.write(
            WriteBatch(
                table=order.table,
                nbytes=order.nbytes,
                offsets=np.frombuffer(order.slots, dtype=np.uint64),
                keys=_digests(order.keys),
                parents=_digests(order.parents),
                depths=np.frombuffer(order.depths, dtype=np.uint32),
                pins=np.zeros(n, dtype=np.uint8),
                checksums=_digests(order.checksums),
                source=source,
                rows=rows,
                stored=None if packed is None else packed.stored[rows],
                codec=RAW if packed is None else BLOSC2,
                place=order.place,
            ),
            after,
        )
        return storage_wire.Written(status.tobytes(), time.monotonic() - started)

    def _read(
        self, order: storage_wire.ReadBlocks, stop: Stop, deadline: Deadline
    ) -> frame.Message:
        started = time.monotonic()
        if stop.is_set or time.monotonic() >= deadline.at:
            return worker_wire.Pulled(
                bytes([BlockStatus.LATE]) * (len(order.slots) // 8), b"", 0.0, "not begun in time"
            )
        status = self._store.read(
            ReadBatch(
                nbytes=order.nbytes,
                offsets=np.frombuffer(order.slots, dtype=np.uint64),
                checksums=_digests(order.checksums),
                destination=self.memory.table(order.segment, order.stride),
                rows=_rows(order.rows),
                lengths=_lengths(order.lengths),
                codec=Blosc2() if order.lengths else None,
                keys=_digests(order.keys) if order.keys else None,
                place=order.place,
            )
        )
        return worker_wire.Pulled(status.tobytes(), b"", time.monotonic() - started)

    def _scrub(self, order: storage_wire.ScrubBlocks, *_: object) -> frame.Message:
        started = time.monotonic()
        status = self._store.read(
            ReadBatch(
                nbytes=order.nbytes,
                offsets=np.frombuffer(order.slots, dtype=np.uint64),
                checksums=_digests(order.checksums),
                lengths=_lengths(order.lengths),
                codec=Blosc2() if order.lengths else None,
                keys=_digests(order.keys) if order.keys else None,
                place=order.place,
            )
        )
        return storage_wire.Written(status.tobytes(), time.monotonic() - started)


def _digests(packed: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(packed, dtype=np.uint8).reshape(-1, CHECKSUM_BYTES)


def _rows(packed: bytes) -> npt.NDArray[np.int64]:
    return np.frombuffer(packed, dtype=np.uint32).astype(np.int64)


def _lengths(packed: bytes) -> npt.NDArray[np.int64] | None:
    return _rows(packed) if packed else None


if __name__ == "__main__":
    run_worker(DiskWorker)

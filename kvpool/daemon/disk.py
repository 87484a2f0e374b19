"""A disk process: it owns the folder of one disk (`kvpool.storage.ssd`), and maps the daemon's segments.

It decides nothing: its control process says what goes to which slot, and what is given up. A `WorkerProcess`
of its own for each disk, so that one that hangs in the kernel delays nobody but its own readers, who have
deadlines.

Threads: the main one reads the control channel and keeps the order of what is forgotten; a few wait for the
store, apart for reads and writes, so that no engine's read waits behind a queue of background writes. Packing
(`kvpool.storage.ssd_pack`) is done in those that write; what is packed waits here for its slots.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec

import msgspec
import numpy as np
import numpy.typing as npt

from kvpool import wire
from kvpool.daemon.worker import Jobs, WorkerProcess, run_worker
from kvpool.errors import ConfigError, InvalidRequest, LimitExceeded, ProtocolError, Unavailable
from kvpool.storage.codecs import BLOSC2, RAW, Blosc2
from kvpool.storage.ssd import DONE, IO_ERROR, MISMATCH, ReadBatch, SsdStore, WriteBatch
from kvpool.storage.ssd_index import Entries
from kvpool.storage.ssd_pack import Packed, pack
from kvpool.transfer.base import Deadline, Stop
from kvpool.types import CHECKSUM_BYTES

READ_JOBS, WRITE_JOBS = 8, 4
PACKS_MAX = 2 * WRITE_JOBS  # kept at a time: control orders no more than it may write at a time


class DiskWorker(WorkerProcess):
    """The process."""

    decode = wire.decode_disk

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._reads = Jobs("kvpool-read", READ_JOBS, self.control)
        self._writes = Jobs("kvpool-write", WRITE_JOBS, self.control)
        self._open: SsdStore | None = None
        self._scan: Iterator[Entries] | None = None
        self._forgotten = 0
        self._packs: dict[int, Packed] = {}
        self._packs_lock = threading.Lock()

    @property
    def _store(self) -> SsdStore:
        if self._open is None:
            raise InvalidRequest("a disk was used before its DiskStart")
        return self._open

    def handle(self, request: int, message: wire.Message) -> None:
        match message:
            case wire.AttachSegment():
                self.answer(request, lambda: self.attach(message))
            case wire.DiskStart():
                self.answer(request, lambda: self._begin(message))
            case wire.ScanDisk():
                self.answer(request, lambda: self._next_entries(message))
            case wire.AddTable():
                self.answer(request, lambda: self._know(message))
            case wire.DropTables():
                self.answer(request, lambda: self._drop(message))
            case wire.PackBlocks() | wire.DropPack():
                self._handle_pack(request, message)
            case wire.WriteBlocks():
                self._forget(message.forget)
                after = self._forgotten
                self._writes.add(
                    request, message.deadline_s, lambda *_: self._write(message, after)
                )
            case wire.ForgetSlots():
                self._forget(message.slots)
                after = self._forgotten
                self._writes.add(request, message.deadline_s, lambda *_: self._wait(after))
            case wire.PinSlots():
                slots = np.frombuffer(message.slots, dtype=np.uint64)
                after = self._forgotten = self._store.pin(slots, message.level)
                self._writes.add(request, message.deadline_s, lambda *_: self._wait(after))
            case wire.ReadBlocks():
                self._reads.add(
                    request,
                    message.deadline_s,
                    lambda stop, deadline: self._read(message, stop, deadline),
                )
            case wire.ScrubBlocks():
                self._writes.add(request, message.deadline_s, lambda *_: self._scrub(message))
            case wire.DiskStats():
                self.answer(request, self._describe)
            case wire.StopOrder():
                self._reads.stop(message.request)
            case _:
                raise ProtocolError(f"a {type(message).__name__} is not for a disk")

    def _handle_pack(self, request: int, message: wire.PackBlocks | wire.DropPack) -> None:
        if isinstance(message, wire.PackBlocks):
            self._writes.add(request, message.deadline_s, lambda *_: self._pack(message))
        else:
            with self._packs_lock:
                self._packs.pop(message.pack, None)

    def _begin(self, start: wire.DiskStart) -> wire.Message:
        store = self._open = SsdStore.open(start.path, start.size, threads=start.threads)
        # Not imported before it is needed: it takes 30 MiB.
        codecs = [Blosc2.name] if find_spec("blosc2") else []
        tables = list(store.tables().items())
        return wire.DiskReady(store.segment_bytes, store.entries_max, store.direct, tables, codecs)

    def _next_entries(self, order: wire.ScanDisk) -> wire.Message:
        if self._scan is None:
            self._scan = self._store.entries(order.count)
        found = next(self._scan, None)
        if found is None:
            return wire.Scanned(b"")
        error = ""
        if (found["codec"] == BLOSC2).any():
            try:
                Blosc2()  # now, and not in the first read: it takes half a second to import
            except ConfigError as refused:
                error = str(refused)
        return wire.Scanned(found.tobytes(), error)

    def _know(self, order: wire.AddTable) -> wire.Message:
        if order.table:
            self._store.renew_table(order.table, order.record)
            return wire.Done(order.table)
        return wire.Done(self._store.add_table(order.record))

    def _drop(self, order: wire.DropTables) -> wire.Message:
        self._store.drop_tables(order.tables)
        return wire.Done()

    def _forget(self, slots: bytes) -> None:
        if slots:
            self._forgotten = self._store.forget(np.frombuffer(slots, dtype=np.uint64))

    def _wait(self, after: int) -> wire.Message:
        if not self._store.wait(after):
            raise Unavailable("the index of the disk takes no changes")
        return wire.Done()

    def _pack(self, order: wire.PackBlocks) -> wire.Message:
        started = time.monotonic()
        with self._packs_lock:
            if len(self._packs) >= PACKS_MAX:
                raise LimitExceeded(f"{PACKS_MAX} packs wait to be written")
        packed = pack(
            self.memory.table(order.segment, order.stride), _rows(order.rows), order.nbytes
        )
        with self._packs_lock:
            self._packs[order.pack] = packed
        return wire.Packed(packed.stored.tobytes(), time.monotonic() - started)

    def _packed(self, number: int) -> Packed:
        with self._packs_lock:
            packed = self._packs.get(number)
        if packed is None:
            raise InvalidRequest(f"there is no pack {number}")
        return packed

    def _write(self, order: wire.WriteBlocks, after: int) -> wire.Message:
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
            ),
            after,
        )
        return wire.Written(status.tobytes(), time.monotonic() - started)

    def _read(self, order: wire.ReadBlocks, stop: Stop, deadline: Deadline) -> wire.Message:
        started = time.monotonic()
        if stop.is_set or time.monotonic() >= deadline.at:
            return wire.Pulled(bytes(len(order.slots) // 8), b"", 0.0, "not begun in time")
        status = self._store.read(
            ReadBatch(
                nbytes=order.nbytes,
                offsets=np.frombuffer(order.slots, dtype=np.uint64),
                checksums=_digests(order.checksums),
                destination=self.memory.table(order.segment, order.stride),
                rows=_rows(order.rows),
                lengths=_lengths(order.lengths),
                codec=Blosc2() if order.lengths else None,
            )
        )
        return wire.Pulled(status.tobytes(), b"", time.monotonic() - started)

    def _scrub(self, order: wire.ScrubBlocks) -> wire.Message:
        started = time.monotonic()
        status = self._store.read(
            ReadBatch(
                nbytes=order.nbytes,
                offsets=np.frombuffer(order.slots, dtype=np.uint64),
                checksums=_digests(order.checksums),
                lengths=_lengths(order.lengths),
                codec=Blosc2() if order.lengths else None,
            )
        )
        return wire.Written(status.tobytes(), time.monotonic() - started)

    def _describe(self) -> wire.Message:
        return wire.Bytes(msgspec.json.encode(self._store.stats()))


def _digests(packed: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(packed, dtype=np.uint8).reshape(-1, CHECKSUM_BYTES)


def _rows(packed: bytes) -> npt.NDArray[np.int64]:
    return np.frombuffer(packed, dtype=np.uint32).astype(np.int64)


def _lengths(packed: bytes) -> npt.NDArray[np.int64] | None:
    return _rows(packed) if packed else None


assert (DONE, MISMATCH, IO_ERROR) == (1, 2, 3), "the wire says what these mean"

if __name__ == "__main__":
    run_worker(DiskWorker)

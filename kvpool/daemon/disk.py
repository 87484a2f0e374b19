"""A disk process: it owns the folder of one disk (`kvpool.storage.ssd`), and maps the daemon's segments.

It decides nothing: its control process says what goes to which slot, and what is given up. A `WorkerProcess`
of its own for each disk, so that one that hangs in the kernel delays nobody but its own readers, who have
deadlines.

Threads: the main one reads the control channel and keeps the order of what is forgotten; a few wait for the
store, apart for reads and writes, so that no engine's read waits behind a queue of background writes.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from kvpool import wire
from kvpool.daemon.worker import Jobs, WorkerProcess, run_worker
from kvpool.errors import InvalidRequest, ProtocolError, Unavailable
from kvpool.storage.ssd import DONE, IO_ERROR, MISMATCH, ReadBatch, SsdStore, WriteBatch
from kvpool.storage.ssd_index import Entries
from kvpool.transfer.base import Deadline, Stop
from kvpool.types import CHECKSUM_BYTES

READ_JOBS, WRITE_JOBS = 8, 4


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
                self.answer(request, lambda: wire.Done(self._store.add_table(message.record)))
            case wire.DropTables():
                self.answer(request, lambda: self._drop(message))
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

    def _begin(self, start: wire.DiskStart) -> wire.Message:
        store = self._open = SsdStore.open(start.path, start.size, threads=start.threads)
        return wire.DiskReady(
            store.segment_bytes, store.entries_max, store.direct, list(store.tables().items())
        )

    def _next_entries(self, order: wire.ScanDisk) -> wire.Message:
        if self._scan is None:
            self._scan = self._store.entries(order.count)
        found = next(self._scan, None)
        return wire.Scanned(b"" if found is None else found.tobytes())

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

    def _write(self, order: wire.WriteBlocks, after: int) -> wire.Message:
        started = time.monotonic()
        n = len(order.keys) // 16
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
                source=self.memory.table(order.segment, order.stride),
                rows=_rows(order.rows),
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
            )
        )
        return wire.Written(status.tobytes(), time.monotonic() - started)

    def _describe(self) -> wire.Message:
        return wire.Bytes(msgspec.json.encode(self._store.stats()))


def _digests(packed: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(packed, dtype=np.uint8).reshape(-1, CHECKSUM_BYTES)


def _rows(packed: bytes) -> npt.NDArray[np.int64]:
    return np.frombuffer(packed, dtype=np.uint32).astype(np.int64)


assert (DONE, MISMATCH, IO_ERROR) == (1, 2, 3), "the wire says what these mean"

if __name__ == "__main__":
    run_worker(DiskWorker)

"""The object worker: it talks to object storage (`kvpool.storage.object.store`), and maps the daemon's segments.

It decides nothing: its control process orders reads and writes of rows. A
`WorkerProcess` of its own, so that neither a hanging store nor the hashing of its bytes delays
anything but the requests that wait for it, which have deadlines.

Threads: the main one reads the control channel; a few wait for the store, separate ones for reads, for writes and
for the rest.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from kvpool.daemon.workers.worker_main import Jobs, WorkerProcess, run_worker
from kvpool.placement.catalog.base import PACK
from kvpool.storage.at_rest import EncryptionSecrets
from kvpool.storage.object.packs import (
    LOCATION,
    ObjectTable,
    PackTable,
    decode_locations,
    encode_locations,
)
from kvpool.storage.object.requests import ObjectLimits
from kvpool.storage.object.store import GetBatch, ObjectStore, PutBatch
from kvpool.storage.object.usage import DroppedPack
from kvpool.transfer.base import Deadline, Stop
from kvpool.types import BlockStatus
from kvpool.wire import frame
from kvpool.wire import storage as storage_wire
from kvpool.wire import worker as worker_wire

READ_JOBS, WRITE_JOBS = 8, 2
OTHER_JOBS = 4  # a list, a sweep, an availability check, and a spare one: none waits for another
LISTED_ENTRIES = 4096  # in one answer: some hundred KiB
SCAN_S = 86_400.0  # for all of a scan; each of its steps has a deadline of its own

Piece = tuple[bytes, int, bytes, float, bytes, bytes]


class ObjectWorker(WorkerProcess):
    """The process."""

    kind = "object"
    decode = storage_wire.decode_object

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._secrets = EncryptionSecrets()
        reads = Jobs("kvpool-read", READ_JOBS, self.control)
        writes = Jobs("kvpool-write", WRITE_JOBS, self.control)
        others = Jobs("kvpool-other", OTHER_JOBS, self.control)
        self.orders = {
            storage_wire.GetObjects: (reads, self._get),
            storage_wire.PutObjects: (writes, self._put),
            storage_wire.CheckObjects: (others, self._check),
            storage_wire.ListPacks: (others, self._list),
            storage_wire.DropPacks: (others, self._drop),
            storage_wire.ForgetBlocks: (others, self._forget),
        }
        self.questions |= {
            storage_wire.ObjectStart: self._begin,
            storage_wire.ObjectStats: self._describe,
        }
        self.notes[storage_wire.ChangeSecrets] = lambda order: self._secrets.change(order.secrets)
        self.stoppable = (reads, writes)
        self._store: ObjectStore  # from `ObjectStart` on, the first message
        self._pieces: Iterator[Piece] = iter(())

    def _begin(self, start: storage_wire.ObjectStart) -> frame.Message:
        self._secrets = EncryptionSecrets(start.secrets)
        self._store = ObjectStore.open(
            start.url,
            node=start.node,
            limits=ObjectLimits(bytes_max=start.bytes_max),
            instance_credentials=start.instance_credentials,
            encryption=self._secrets if start.secrets else None,
        )
        return frame.Done()

    def _check(
        self, _order: storage_wire.CheckObjects, _stop: Stop, deadline: Deadline
    ) -> frame.Message:
        self._store.check(timeout_s=deadline.left())
        return frame.Done()

    def _get(self, order: storage_wire.GetObjects, stop: Stop, deadline: Deadline) -> frame.Message:
        started = time.monotonic()
        locations = decode_locations(order.locations)
        if stop.is_set or started >= deadline.at:
            return worker_wire.Pulled(
                bytes((BlockStatus.FAILED,)) * len(locations), b"", 0.0, "not begun in time"
            )
        batch = GetBatch(
            digest=order.digest,
            part=order.part,
            nbytes=order.nbytes,
            keys=order.keys,
            locations=locations,
            destination=self.memory.table(order.segment, order.stride),
            rows=_rows(order.rows),
        )
        statuses = self._store.get(
            batch, timeout_s=deadline.left(), stopped=lambda: stop.is_set
        ).tobytes()
        error = ""
        if BlockStatus.FAILED in statuses:
            error = self._store.stats().last_fault or "object storage did not answer in time"
        return worker_wire.Pulled(statuses, b"", time.monotonic() - started, error)

    def _put(self, order: storage_wire.PutObjects, stop: Stop, deadline: Deadline) -> frame.Message:
        batch = PutBatch(
            table=ObjectTable(order.digest, order.part, order.record),
            nbytes=order.nbytes,
            keys=order.keys,
            parents=order.parents,
            depths=np.frombuffer(order.depths, dtype=np.uint32),
            checksums=order.checksums,
            source=self.memory.table(order.segment, order.stride),
            rows=_rows(order.rows),
        )
        result = self._store.put(batch, timeout_s=deadline.left(), stopped=lambda: stop.is_set)
        return storage_wire.ObjectsPut(
            result.statuses.tobytes(), encode_locations(result.locations), _plain(result.dropped)
        )

    def _forget(
        self, order: storage_wire.ForgetBlocks, _stop: Stop, deadline: Deadline
    ) -> frame.Message:
        locations = decode_locations(order.locations)
        dropped = self._store.forget(order.digest, order.part, locations, timeout_s=deadline.left())
        return storage_wire.ObjectsPut(b"", b"", _plain(dropped))

    def _list(self, order: storage_wire.ListPacks, *_: object) -> frame.Message:
        if order.first:
            self._pieces = _pieces(self._store.scan(timeout_s=SCAN_S, own=order.own))
        packs: list[Piece] = []
        entries = 0
        for piece in self._pieces:
            packs.append(piece)
            entries += len(piece[4]) // 16
            if entries >= LISTED_ENTRIES:
                break
        return storage_wire.PackList(packs)

    def _drop(
        self, order: storage_wire.DropPacks, _stop: Stop, deadline: Deadline
    ) -> frame.Message:
        if order.own:
            self._store.drop(order.digest, timeout_s=deadline.left())
        else:
            self._store.clear(order.digest, timeout_s=deadline.left())
        return frame.Done()

    def _describe(self, _: storage_wire.ObjectStats) -> frame.Message:
        stats, usage = self._store.stats(), self._store.usage()
        found = storage_wire.ObjectUsage(
            *(usage.packs, usage.blocks, usage.bytes),
            *(stats.attempts, dict(stats.faults), stats.suspended_s),
        )
        return frame.Bytes(msgspec.json.encode(found))


def _pieces(tables: Iterator[PackTable]) -> Iterator[Piece]:
    """The results of a scan, in pieces that fit into answers."""
    for table in tables:
        age_s = max(0.0, time.time() - table.written_at)
        keys, locations = table.entries["key"], table.locations()
        for at in range(0, len(keys), LISTED_ENTRIES):
            yield (
                table.name.digest,
                table.name.part,
                table.record,
                age_s,
                keys[at : at + LISTED_ENTRIES].tobytes(),
                encode_locations(locations[at : at + LISTED_ENTRIES]),
            )


def _plain(dropped: list[DroppedPack]) -> list[tuple[bytes, int, bytes, bytes]]:
    return [(pack.name.digest, pack.name.part, pack.name.pack, pack.keys) for pack in dropped]


def _rows(packed: bytes) -> npt.NDArray[np.intp]:
    return np.frombuffer(packed, dtype=np.uint32).astype(np.intp)


assert LOCATION.fields is not None
assert LOCATION.fields["pack"][1] == PACK.start, "the catalog says where an object is named"

if __name__ == "__main__":
    run_worker(ObjectWorker)

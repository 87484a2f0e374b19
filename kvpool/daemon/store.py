"""The store process: it talks to object storage (`kvpool.storage.remote`), and maps the daemon's segments.

It decides nothing: its control process says what is written and what is read into which rows. A
`WorkerProcess` of its own, so that neither a store that hangs nor the hashing of what comes from it delays
anybody but those who wait for it, who have deadlines.

Threads: the main one reads the control channel; a few wait for the store, apart for reads, for writes and
for the rest.
"""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from kvpool import wire
from kvpool.daemon.worker import Jobs, WorkerProcess, run_worker
from kvpool.errors import InvalidRequest, ProtocolError
from kvpool.placement.catalog import PACK
from kvpool.storage.remote import (
    DONE,
    FAILED,
    MISMATCH,
    MISSING,
    GetBatch,
    PutBatch,
    RemoteStore,
)
from kvpool.storage.remote_books import DroppedPack
from kvpool.storage.remote_packs import (
    LOCATION,
    PackTable,
    RemoteTable,
    decode_locations,
    encode_locations,
)
from kvpool.storage.remote_requests import RemoteLimits
from kvpool.transfer.base import Deadline, Stop

READ_JOBS, WRITE_JOBS = 8, 2
OTHER_JOBS = (
    4  # a list, a sweep, a look whether it answers, and a spare one: none waits for another
)
LISTED_ENTRIES = 4096  # in one answer: some hundred KiB
SCAN_S = 86_400.0  # for all of a scan; each of its steps has a deadline of its own

Piece = tuple[bytes, int, bytes, float, bytes, bytes]


class StoreWorker(WorkerProcess):
    """The process."""

    decode = wire.decode_store

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._reads = Jobs("kvpool-read", READ_JOBS, self.control)
        self._writes = Jobs("kvpool-write", WRITE_JOBS, self.control)
        self._others = Jobs("kvpool-other", OTHER_JOBS, self.control)
        self._open: RemoteStore | None = None
        self._pieces: Iterator[Piece] = iter(())

    @property
    def _store(self) -> RemoteStore:
        if self._open is None:
            raise InvalidRequest("a store was used before its StoreStart")
        return self._open

    def handle(self, request: int, message: wire.Message) -> None:
        match message:
            case wire.AttachSegment():
                self.answer(request, lambda: self.attach(message))
            case wire.StoreStart():
                self.answer(request, lambda: self._begin(message))
            case wire.LoadBlocks():
                self._reads.add(
                    request,
                    message.deadline_s,
                    lambda stop, deadline: self._load(message, stop, deadline),
                )
            case wire.KeepBlocks():
                self._writes.add(
                    request,
                    message.deadline_s,
                    lambda stop, deadline: self._keep(message, stop, deadline),
                )
            case wire.CheckStore():
                self._others.add(
                    request, message.deadline_s, lambda _, deadline: self._check(deadline)
                )
            case wire.ListPacks():
                self._others.add(request, message.deadline_s, lambda *_: self._list(message))
            case wire.DropPacks():
                self._others.add(
                    request, message.deadline_s, lambda _, deadline: self._drop(message, deadline)
                )
            case wire.ForgetBlocks():
                self._others.add(
                    request, message.deadline_s, lambda _, deadline: self._forget(message, deadline)
                )
            case wire.StoreStats():
                self.answer(request, self._describe)
            case wire.StopOrder():
                self._reads.stop(message.request)
                self._writes.stop(message.request)
            case _:
                raise ProtocolError(f"a {type(message).__name__} is not for a store")

    def _begin(self, start: wire.StoreStart) -> wire.Message:
        self._open = RemoteStore.open(
            start.url,
            node=start.node,
            limits=RemoteLimits(bytes_max=start.bytes_max),
            instance_credentials=start.instance_credentials,
        )
        return wire.Done()

    def _check(self, deadline: Deadline) -> wire.Message:
        self._store.check(timeout_s=deadline.left())
        return wire.Done()

    def _load(self, order: wire.LoadBlocks, stop: Stop, deadline: Deadline) -> wire.Message:
        started = time.monotonic()
        locations = decode_locations(order.locations)
        if stop.is_set or started >= deadline.at:
            return wire.Pulled(bytes((FAILED,)) * len(locations), b"", 0.0, "not begun in time")
        batch = GetBatch(
            digest=order.digest,
            part=order.part,
            nbytes=order.nbytes,
            locations=locations,
            destination=self.memory.table(order.segment, order.stride),
            rows=_rows(order.rows),
        )
        statuses = self._store.get(
            batch, timeout_s=deadline.left(), stopped=lambda: stop.is_set
        ).tobytes()
        error = ""
        if FAILED in statuses:
            error = self._store.stats().last_fault or "the store did not answer in time"
        return wire.Pulled(statuses, b"", time.monotonic() - started, error)

    def _keep(self, order: wire.KeepBlocks, stop: Stop, deadline: Deadline) -> wire.Message:
        batch = PutBatch(
            table=RemoteTable(order.digest, order.part, order.record),
            nbytes=order.nbytes,
            keys=order.keys,
            parents=order.parents,
            depths=np.frombuffer(order.depths, dtype=np.uint32),
            checksums=order.checksums,
            source=self.memory.table(order.segment, order.stride),
            rows=_rows(order.rows),
        )
        result = self._store.put(batch, timeout_s=deadline.left(), stopped=lambda: stop.is_set)
        return wire.Kept(
            result.statuses.tobytes(), encode_locations(result.locations), _plain(result.dropped)
        )

    def _forget(self, order: wire.ForgetBlocks, deadline: Deadline) -> wire.Message:
        locations = decode_locations(order.locations)
        dropped = self._store.forget(order.digest, order.part, locations, timeout_s=deadline.left())
        return wire.Kept(b"", b"", _plain(dropped))

    def _list(self, order: wire.ListPacks) -> wire.Message:
        if order.first:
            self._pieces = _pieces(self._store.scan(timeout_s=SCAN_S, own=order.own))
        packs: list[Piece] = []
        entries = 0
        for piece in self._pieces:
            packs.append(piece)
            entries += len(piece[4]) // 16
            if entries >= LISTED_ENTRIES:
                break
        return wire.PackList(packs)

    def _drop(self, order: wire.DropPacks, deadline: Deadline) -> wire.Message:
        if order.own:
            self._store.drop(order.digest, timeout_s=deadline.left())
        else:
            self._store.clear(order.digest, timeout_s=deadline.left())
        return wire.Done()

    def _describe(self) -> wire.Message:
        stats, usage = self._store.stats(), self._store.usage()
        described = {
            **dataclasses.asdict(stats),
            "packs": usage.packs,
            "blocks": usage.blocks,
            "used_bytes": usage.bytes,
        }
        return wire.Bytes(msgspec.json.encode(described))


def _pieces(tables: Iterator[PackTable]) -> Iterator[Piece]:
    """What a scan finds, in pieces that fit into answers."""
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


assert (MISSING, DONE, MISMATCH, FAILED) == (0, 1, 2, 3), "the wire says what these mean"
assert LOCATION.fields is not None
assert LOCATION.fields["pack"][1] == PACK.start, "the catalog says where an object is named"

if __name__ == "__main__":
    run_worker(StoreWorker)

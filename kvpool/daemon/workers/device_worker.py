"""A device worker: it owns spare memory of one GPU (`kvpool.storage.device`), and maps the daemon's segments.

It decides nothing: its control process orders copies from row to row. Each tenant's part is an
allocation of its own.

Threads: the main one reads the control channel; a few copy, separate ones for each direction. Each has streams of
its own. An error of the device is not answered: the process ends, and its memory with it.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import xxhash

from kvpool.daemon.workers.worker_main import Jobs, WorkerProcess, run_worker
from kvpool.errors import InvalidRequest, ProtocolError
from kvpool.memory import owner_liveness
from kvpool.storage.device import DeviceSegment, register
from kvpool.transfer.base import Deadline, Stop
from kvpool.types import BlockStatus
from kvpool.wire import frame
from kvpool.wire import worker as worker_wire

PROMOTE_JOBS, DEMOTE_JOBS = 1, 4
PIECE_BYTES = 16 << 20

Rows = npt.NDArray[np.int64]


class DeviceWorker(WorkerProcess):
    """The process."""

    kind = "device"
    decode = worker_wire.decode_device

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        promotions = Jobs("kvpool-promote", PROMOTE_JOBS, self.control)
        demotions = Jobs("kvpool-demote", DEMOTE_JOBS, self.control)
        self.orders = {
            worker_wire.PromoteBlocks: (promotions, self._promote),
            worker_wire.DemoteBlocks: (demotions, self._demote),
        }
        self.questions |= {
            worker_wire.DeviceStart: self._begin,
            worker_wire.ExportSegment: self._export,
        }
        self.stoppable = (demotions,)
        self._segments: list[DeviceSegment | None] = []
        self._mine = threading.local()

    def _begin(self, start: worker_wire.DeviceStart) -> frame.Message:
        if not self._fds:
            raise ProtocolError("a DeviceStart arrived without its descriptor")
        owner_liveness.begin(self._fds.popleft())  # before there is anything to lose
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            os.environ.pop(name, None)  # each part must be an allocation of its own
        for size in start.sizes:
            self._segments.append(DeviceSegment.create(start.device, 1, size) if size else None)
        if start.device != "cpu":
            for mapping in self._mappings:
                register(mapping)
        return frame.Done()

    def _table(self, segment: int, stride: int) -> DeviceSegment:
        """The rows of one size beside a segment, for the calling thread."""
        cuts: dict[tuple[int, int], DeviceSegment] = vars(self._mine).setdefault("cuts", {})
        table = cuts.get((segment, stride))
        if table is None:
            table = cuts[segment, stride] = self._whole(segment).cut(stride)
        return table

    def _whole(self, segment: int) -> DeviceSegment:
        whole = self._segments[segment] if segment < len(self._segments) else None
        if whole is None:
            raise InvalidRequest(f"there is no device memory beside segment {segment}")
        return whole

    def _export(self, order: worker_wire.ExportSegment) -> frame.Message:
        return frame.Bytes(self._whole(order.segment).export())

    def _promote(self, order: worker_wire.PromoteBlocks, *_: object) -> frame.Message:
        host = self.memory.table(order.segment, order.stride)
        device = self._table(order.segment, order.stride)
        device.from_host(host, _rows(order.rows), _rows(order.device_rows))
        return frame.Done()

    def _demote(
        self, order: worker_wire.DemoteBlocks, stop: Stop, deadline: Deadline
    ) -> frame.Message:
        started = time.monotonic()
        host = self.memory.table(order.segment, order.stride)
        device = self._table(order.segment, order.stride)
        rows, sources = _rows(order.rows), _rows(order.device_rows)
        status = bytearray([BlockStatus.LATE]) * len(rows)
        for piece in _pieces(len(rows), order.stride):
            if stop.is_set or time.monotonic() >= deadline.at:
                break
            device.to_host(sources[piece], host, rows[piece])
            for at in range(piece.start, piece.stop):
                wanted = order.checksums[at * 16 : at * 16 + 16]
                found = xxhash.xxh3_128_digest(host[rows[at], : order.nbytes].data)
                status[at] = BlockStatus.PRESENT if found == wanted else BlockStatus.MISMATCH
        error = "not done in time" if BlockStatus.LATE in status else ""
        return worker_wire.Pulled(bytes(status), b"", time.monotonic() - started, error)


def _pieces(count: int, stride: int) -> Iterator[slice]:
    """Copied between two checks of the clock."""
    step = max(1, PIECE_BYTES // stride)
    for at in range(0, count, step):
        yield slice(at, min(at + step, count))


def _rows(packed: bytes) -> Rows:
    return np.frombuffer(packed, dtype=np.uint32).astype(np.int64)


if __name__ == "__main__":
    run_worker(DeviceWorker)

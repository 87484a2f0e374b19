"""A client's slots in the segment, the leases to read and the reservations to write them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import xxhash

from kvpool.client.connection import Connection, DaemonState
from kvpool.client.connections import Connections
from kvpool.client.leftovers import Ticket
from kvpool.errors import LeaseLost, Unavailable
from kvpool.memory.buffers import Rows2D, row_checksums
from kvpool.types import CHECKSUM_BYTES
from kvpool.wire import client as client_wire
from kvpool.wire.frame import NO_ROW

if TYPE_CHECKING:
    from kvpool.client.device_memory import DeviceMemory

Indices = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Slots:
    """n slots of one part in the segment.

    part: the part number.
    first: index, among the requested keys, of the first block these slots belong to: above 0 for
        window parts. With a stride of s in the namespace, slot i belongs to block
        `first + (i + 1) * s - 1`.
    nbytes: bytes used of each slot. stride: bytes from one row of the segment to the next.
    rows: int64, one a slot; slot i starts at byte `rows[i] * stride` of the segment.
    checksums: u8 (n, 16), xxh3-128 of the slots in the segment, for a lease that asked for them; else None.
    device_rows: None, or if some of the slots are in device memory, one a slot: the row of
        `device_table`, and `frame.NO_ROW` for those that are in the segment. Each slot is in one of both.

    Valid for reading and writing while their lease or reservation lasts.
    """

    _daemon: DaemonState
    part: int
    first: int
    nbytes: int
    stride: int
    rows: Indices
    device_rows: Indices | None = None
    _device: DeviceMemory | None = None
    checksums: Rows2D | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def table(self) -> Rows2D:
        """The whole segment, shape (rows, stride), uint8, C-contiguous: `table[rows]` are the slots."""
        return self._daemon.table(self.stride)

    @property
    def device_table(self) -> Any:
        """The device memory, a uint8 tensor of shape (rows, stride): `device_table[device_rows]`."""
        assert self._device is not None, "these slots are in the segment, or others are attached"
        return self._device.table(self.stride)

    @property
    def fd(self) -> int:
        """The segment's memfd, for `os.preadv` and `os.pwritev` at `offsets`. Do not close it."""
        return self._daemon.segment.fd

    @property
    def offsets(self) -> Indices:
        """Where each slot begins, in bytes from the start of the segment."""
        return self.rows * self.stride

    def view(self, index: int) -> memoryview:
        """The bytes of one slot."""
        return self.table[int(self.rows[index]), : self.nbytes].data

    def expected(self) -> Rows2D:
        """The checksums. Raises as `wrong`."""
        if self.checksums is None:
            raise Unavailable(
                "the lease has no checksums: acquire it with a namespace opened with verify=True"
            )
        return self.checksums

    def wrong(self) -> Indices:
        """Which slots in the segment do not have the bytes that were committed.

        Raises `Unavailable` if the lease has no checksums: it was not asked for them.
        """
        table, nbytes = self.table, self.nbytes
        here = np.flatnonzero(self.rows != NO_ROW)
        return differing(
            here,
            lambda index: xxhash.xxh3_128_digest(table[int(self.rows[index]), :nbytes].data),
            self.expected(),
        )

    def __repr__(self) -> str:
        return f"<Slots part={self.part} first={self.first} n={len(self)} nbytes={self.nbytes}>"


def differing(indices: Indices, digest_of: Callable[[int], bytes], expected: Rows2D) -> Indices:
    """Those of the indices that do not have the expected checksum."""
    found = [index for index in indices.tolist() if digest_of(index) != expected[index].tobytes()]
    return np.array(found, np.int64)


@dataclass(slots=True, eq=False)
class Lease:
    """The right to read the slots of a prefix until `deadline`. Release it when done, or use `with`.

    token: hand it to other processes of the same engine instance; they `Client.join`.
    blocks: how many blocks of the prefix may be used.
    deadline: `time.monotonic()` of this process after which the slots may be reused.
    slots: by part number.
    device: the device memory that some of the slots are in, or None.
    life: of that memory, even if only other processes are attached to it; 0: all slots are in the segment.
    """

    _connections: Connections
    token: str
    blocks: int
    deadline: float
    slots: dict[int, Slots]
    device: DeviceMemory | None = None
    life: int = 0

    @property
    def valid(self) -> bool:
        """Whether the bytes may still be read: before the deadline, and the device memory's owner lives."""
        owned = self.device is None or self.device.alive
        return owned and time.monotonic() < self.deadline

    def check(self) -> None:
        """Call after the copy is complete (on a GPU: after its event). Raises `LeaseLost` if too late.

        Also if the process that owned the device memory of some of the slots has died.
        """
        if self.device is not None and not self.device.alive:
            raise LeaseLost(
                f"the device memory of lease {self.token} was lost when its process ended: discard the data and "
                "recompute"
            )
        late = time.monotonic() - self.deadline
        if late >= 0:
            raise LeaseLost(
                f"lease {self.token} ended {late:.3f} s before its reader finished: discard the data and recompute"
            )

    def report(self, part: int, wrong: Indices) -> None:
        """Have the daemon drop blocks whose slots are wrong (`Slots.wrong`): they are read from elsewhere next time, or
        computed. Never raises.
        """
        if not len(wrong):
            return
        rows = self.slots[part].rows[wrong].astype(np.uint32).tobytes()
        try:
            with self._connections.request() as connection:
                connection.tell(client_wire.CorruptSlots(self.token, part, rows))
        except Unavailable:
            pass

    def release(self) -> None:
        """Stop reading. Never raises: a lease whose release is lost ends at its deadline. Idempotent."""
        if not self.token:
            return
        token, self.token = self.token, ""
        try:
            with self._connections.request() as connection:
                connection.tell(client_wire.Release([token]))
        except Unavailable:
            pass

    def release_later(self) -> None:
        """As `release`, together with the client's next request: for readers that make the next one soon."""
        if self.token:
            token, self.token = self.token, ""
            self._connections.leftovers.finished.append(token)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return (
            f"<Lease {self.token} {self.blocks} blocks, {self.deadline - time.monotonic():.1f} s>"
        )


def lease_of(
    connections: Connections,
    connection: Connection,
    answer: client_wire.Leased,
    sent: float,
    device: DeviceMemory | None,
    life: int = 0,
) -> Lease | None:
    """The daemon's lease; None: nothing.

    sent: `time.monotonic()` before the request: `answer.lease_s` counts from its receipt, so this is safe. life:
    device memory whose slots the caller may get without reading them itself.
    """
    if not answer.token:
        return None
    if not answer.life:
        device = None
    elif answer.life != (life if device is None else device.life):
        connection.tell(client_wire.Release([answer.token]))
        return None
    slots = {
        part.part: Slots(
            connection.daemon,
            part.part,
            part.first,
            part.nbytes,
            part.stride,
            _rows(part.rows),
            _rows(part.device_rows) if part.device_rows else None,
            device,
            _checksums(part.checksums) if part.checksums else None,
        )
        for part in answer.parts
    }
    deadline = sent + answer.lease_s
    return Lease(connections, answer.token, answer.blocks, deadline, slots, device, answer.life)


def _checksums(packed: bytes) -> Rows2D:
    return np.frombuffer(packed, dtype=np.uint8).reshape(-1, CHECKSUM_BYTES)


def _rows(packed: bytes) -> Indices:
    return np.frombuffer(packed, dtype=np.uint32).astype(np.int64)


@dataclass(slots=True, eq=False)
class Reservation:
    """Slots to be written, then committed. With `with`, an uncommitted reservation is aborted at the end.

    slots: one for each block that the caller has to write. Before they are asked for, a dropped reservation is aborted.
    missing: their indices among the requested keys.
    refused: how many of the last keys got no slot, because leases or hard pins hold the space.
    """

    _connections: Connections
    daemon: DaemonState
    ticket: Ticket
    _slots: Slots
    missing: Indices
    refused: int
    _settled: bool = field(default=False, init=False)

    @property
    def slots(self) -> Slots:
        """One for each block to write; from now on a dropped reservation is not aborted by itself."""
        self._connections.leftovers.seen(self.ticket)
        return self._slots

    def checksums(self) -> bytes:
        """Of the bytes in the slots now."""
        return row_checksums(self._slots.table, self._slots.rows, self._slots.nbytes)

    def settled(self) -> None:
        """Nothing is left to commit or to abort."""
        self._settled = True
        self._connections.leftovers.seen(self.ticket)

    def abandon(self) -> None:
        """Have the daemon abort what it may not have committed, with the next request."""
        self._connections.leftovers.abandon(self.ticket)
        self.settled()

    def abort(self) -> None:
        """Give slots back unwritten. Never raises; no effect after a commit."""
        if self._settled:
            return
        self.abandon()
        try:
            with self._connections.request():
                pass  # the next user of a connection reports the orphans first
        except Unavailable:
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def __repr__(self) -> str:
        return f"<Reservation {self.ticket.number} of {len(self.missing)} slots>"

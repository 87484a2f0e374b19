"""Storing blocks: reservations, and small puts in one exchange with the daemon."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpool.client.connection import Connection, Stash, refused
from kvpool.client.copying import CopyIn, part_bytes
from kvpool.client.namespaces import Requests
from kvpool.client.slots import Reservation, Slots
from kvpool.errors import InvalidRequest, KvpoolError, UnknownReservation
from kvpool.memory.buffers import Source
from kvpool.types import KEY_BYTES, NO_PARENT, Namespace
from kvpool.wire import client as client_wire
from kvpool.wire import frame

ONE_EXCHANGE_BYTES = 32 << 20  # puts up to this size copy first and ask afterwards


def chained(packed: bytes, parent: bytes | None) -> bytes:
    """Return the key before each of these, which are one chain. parent: before the first one, or None if there is none."""
    return (parent or NO_PARENT) + packed[:-KEY_BYTES]


class Reservations:
    """Asks for slots and commits them. Thread-safe."""

    def __init__(self, requests: Requests) -> None:
        self._connections = requests.connections
        self._namespaces = requests.namespaces

    def check(self) -> None:
        """Raise `InvalidRequest` in a client that may not write."""
        if self._connections.read_only:
            raise InvalidRequest(
                "this client has mapped the pool's memory read-only: it writes no blocks"
            )

    def reserve(
        self,
        connection: Connection,
        ns: Namespace,
        parts: Sequence[int],
        packed: bytes,
        parents: bytes,
        requests: Sequence[tuple[str, int]] = (),
        patience_bytes: int = 0,
    ) -> list[Reservation]:
        """Return one a part. parents: of each key. patience_bytes: of a concurrent copy."""
        daemon, timeout_s = connection.daemon, self._connections.timeout_s
        tickets = [self._connections.leftovers.ticket(daemon.incarnation) for _ in parts]

        def ask(number: int) -> Any:
            numbers = [ticket.number for ticket in tickets]
            message = client_wire.Reserve(
                *(number, list(parts), numbers, packed, parents, list(requests))
            )
            try:
                sent = connection.send(message, timeout_s)
                if patience_bytes:
                    connection.be_patient(patience_bytes)
                return connection.receive(sent, timeout_s)
            except BaseException as error:
                if not refused(error):  # the daemon may have reserved
                    for ticket in tickets:
                        self._connections.leftovers.abandon(ticket)
                raise

        answer = self._namespaces.with_number(connection, ns, ask)
        count = len(packed) // KEY_BYTES
        reservations = []
        for part, ticket, stride, packed_rows in zip(
            parts, tickets, answer.strides, answer.rows, strict=True
        ):
            rows = np.frombuffer(packed_rows, dtype=np.uint32)
            refused_count = count - len(rows)
            if rows.max(initial=0) == frame.NO_ROW:
                missing = np.flatnonzero(rows != frame.NO_ROW)
                rows = rows[missing]
            else:
                missing = np.arange(len(rows))
            slots = Slots(daemon, part, 0, part_bytes(ns, part), stride, rows.astype(np.int64))
            reservation = Reservation(
                self._connections, daemon, ticket, slots, missing, refused_count
            )
            if not len(missing):
                reservation.settled()
            reservations.append(reservation)
        return reservations

    def commit(
        self,
        connection: Connection,
        reservations: Sequence[Reservation],
        checksums: list[bytes],
        replicas: int,
    ) -> list[int]:
        """Return how many blocks of each are new. Raises `UnknownReservation` if the daemon does not know one of them:
        the others are committed.
        """
        if any(connection.daemon is not reservation.daemon for reservation in reservations):
            for reservation in reservations:
                reservation.settled()
            raise UnknownReservation(
                "the daemon that granted these slots has ended; put the blocks again"
            )
        tickets = [reservation.ticket.number for reservation in reservations]
        message = client_wire.Commit(tickets, checksums, replicas)
        try:
            stored = list(connection.ask(message, self._connections.timeout_s).stored)
        except BaseException as error:
            if not refused(error):
                # They may have been committed or not: the abort that follows settles it.
                for reservation in reservations:
                    reservation.abandon()
            raise
        for reservation in reservations:
            reservation.settled()
        if -1 in stored:
            raise UnknownReservation(
                f"{stored.count(-1)} of {len(stored)} reservations are not open: put their blocks again"
            )
        return stored


@dataclass(slots=True)
class _Put:
    """Blocks to be stored, of one part. request: on whose behalf."""

    ns: Namespace
    packed: bytes
    source: Source
    part: int
    parents: bytes
    replicas: int
    request: str


class Puts:
    """Stores blocks, also in one exchange: copied into slots that were granted earlier, which then get their keys.
    Thread-safe.

    An exchange costs as much as copying megabytes. So this copies without asking which blocks are
    present; a present block costs only its copy.
    """

    def __init__(self, requests: Requests, reservations: Reservations) -> None:
        self._connections = requests.connections
        self._namespaces = requests.namespaces
        self._reservations = reservations
        self._copy_in = CopyIn()

    def put(
        self,
        ns: Namespace,
        packed: bytes,
        blocks: Any,
        part: int,
        parents: bytes,
        replicas: int,
        request: str,
    ) -> tuple[int, int]:
        """How many blocks are new, and how many of the last ones found no space. Raises `PoolFull` if none did."""
        self._reservations.check()
        source = Source(blocks, len(packed) // KEY_BYTES, part_bytes(ns, part))
        if not source.n:
            return 0, 0
        put = _Put(ns, packed, source, part, parents, replicas, request)
        stored = self._put_granted(put)
        return self._put_reserved(put) if stored is None else (stored, 0)

    def _put_reserved(self, put: _Put) -> tuple[int, int]:
        """Ask first which blocks are present."""
        source = put.source
        with self._connections.request() as connection:
            requests = [(put.request, source.n)] if put.request else []
            (reservation,) = self._reservations.reserve(
                connection, put.ns, [put.part], put.packed, put.parents, requests, source.total
            )
            stored = 0
            if len(reservation.missing):
                with reservation:
                    slots = reservation.slots
                    checksums = self._copy_in(
                        source, reservation.missing, slots.table, slots.rows, slots.fd
                    )
                    connection.be_patient(source.total)
                    (stored,) = self._reservations.commit(
                        connection, [reservation], [checksums], put.replicas
                    )
            stash = connection.daemon.stashes.get((put.ns.digest, put.part))
            if stash is not None:
                stash.ask_first = len(reservation.missing) < source.n
        return stored, reservation.refused

    def _put_granted(self, put: _Put) -> int | None:
        """How many blocks are new; None: they have to be reserved, or the daemon has granted too few slots."""
        if put.source.total > ONE_EXCHANGE_BYTES:
            return None
        daemon = self._connections.daemon
        stash = None if daemon is None else daemon.stashes.get((put.ns.digest, put.part))
        if stash is not None and (stash.ask_first or put.source.n >= stash.most):
            return None
        with self._connections.request() as connection:
            grants = connection.daemon.grants
            use = grants.begin()
            if use is None:
                return None
            try:
                if use.settles:
                    connection.ask(client_wire.GiveBack(0, b""), self._connections.timeout_s)
                    for known in list(connection.daemon.stashes.values()):
                        known.take(len(known))
                    grants.settled(use)
                stored = self._namespaces.with_number(
                    connection, put.ns, lambda number: self._store(connection, number, put)
                )
            except BaseException as error:
                grants.end(use, doubtful=not refused(error))
                raise
            grants.end(use)
            return stored

    def _store(self, connection: Connection, number: int, put: _Put) -> int | None:
        n, name, timeout_s = put.source.n, (put.ns.digest, put.part), self._connections.timeout_s
        stash = connection.daemon.stashes.get(name)
        rows = stash.take(n) if stash is not None else []
        if len(rows) < n:
            answer = connection.ask(client_wire.Grant(number, put.part, n - len(rows)), timeout_s)
            if stash is None:
                stash = connection.daemon.stashes.setdefault(name, Stash(answer.stride))
            stash.add(answer.rows)
            rows += stash.take(n - len(rows))
            if len(rows) < n:
                stash.most = n
                connection.tell(client_wire.GiveBack(stash.stride, frame.pack_rows(rows)))
                return None
        assert stash is not None
        try:
            checksums = self._copy_in(
                put.source,
                np.arange(n),
                connection.daemon.table(stash.stride),
                np.array(rows, dtype=np.int64),
                connection.daemon.segment.fd,
            )
            fields = frame.pack_rows(rows), put.packed, checksums, n
            connection.be_patient(put.source.total)
            answer = connection.ask(
                client_wire.Store(
                    number, put.part, *fields, put.parents, put.replicas, put.request
                ),
                timeout_s,
            )
        except KvpoolError as error:
            if refused(error):
                stash.put_back(rows)
            raise
        stash.ask_first = bool(answer.unused)
        stash.add(answer.unused)
        stash.add(answer.fresh)
        if len(stash) > 2 * n:
            spare = frame.pack_rows(stash.take(len(stash) - 2 * n))
            connection.tell(client_wire.GiveBack(stash.stride, spare))
        return int(answer.new)

"""Storing blocks: reservations, and small puts in one exchange with the daemon."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvpool.client.connection import Connection, DaemonState, Stash, refused
from kvpool.client.connections import Connections, Ticket
from kvpool.client.copying import CopyIn, part_bytes
from kvpool.client.namespaces import OpenNamespaces
from kvpool.client.slots import Reservation, Slots
from kvpool.errors import KvpoolError, UnknownReservation
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

    def __init__(self, connections: Connections, namespaces: OpenNamespaces) -> None:
        self._connections = connections
        self._namespaces = namespaces

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
        tickets = [self._connections.ticket(daemon.incarnation) for _ in parts]

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
                        self._connections.abandon(ticket)
                raise

        answer = self._namespaces.with_number(connection, ns, ask)
        count = len(packed) // KEY_BYTES
        return [
            self._reservation(daemon, ns, part, ticket, count, stride, rows)
            for part, ticket, stride, rows in zip(
                parts, tickets, answer.strides, answer.rows, strict=True
            )
        ]

    def _reservation(
        self,
        daemon: DaemonState,
        ns: Namespace,
        part: int,
        ticket: Ticket,
        count: int,
        stride: int,
        packed_rows: bytes,
    ) -> Reservation:
        rows = np.frombuffer(packed_rows, dtype=np.uint32)
        refused = count - len(rows)
        if rows.max(initial=0) == frame.NO_ROW:
            missing = np.flatnonzero(rows != frame.NO_ROW)
            rows = rows[missing]
        else:
            missing = np.arange(len(rows))
        slots = Slots(daemon, part, 0, part_bytes(ns, part), stride, rows.astype(np.int64))
        reservation = Reservation(self._connections, daemon, ticket, slots, missing, refused)
        if not len(missing):
            reservation.settled()
        return reservation

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
        if any(connection.daemon is not reservation._daemon for reservation in reservations):
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


class GrantedPuts:
    """Puts in one exchange: blocks are copied into slots granted earlier, which then get their keys. Thread-safe.

    An exchange costs as much as copying megabytes. So this copies without asking which blocks are
    present; a present block costs only its copy.
    """

    def __init__(
        self, connections: Connections, namespaces: OpenNamespaces, copy_in: CopyIn
    ) -> None:
        self._connections = connections
        self._namespaces = namespaces
        self._copy_in = copy_in

    def fits(self, ns: Namespace, part: int, source: Source) -> bool:
        """Whether to copy a put of these blocks before asking the daemon which are present."""
        if source.total > ONE_EXCHANGE_BYTES:
            return False
        daemon = self._connections.daemon
        stash = None if daemon is None else daemon.stashes.get((ns.digest, part))
        return stash is None or (not stash.ask_first and source.n < stash.most)

    def put(
        self,
        ns: Namespace,
        packed: bytes,
        source: Source,
        part: int,
        parents: bytes,
        replicas: int,
        request: str,
    ) -> int | None:
        """How many blocks are new; None if the daemon grants too few slots."""
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
                    connection,
                    ns,
                    lambda number: self._store(
                        *(connection, number, ns, packed, source, part, parents, replicas, request)
                    ),
                )
            except BaseException as error:
                grants.end(use, doubtful=not refused(error))
                raise
            grants.end(use)
            return stored

    def _store(
        self,
        connection: Connection,
        number: int,
        ns: Namespace,
        packed: bytes,
        source: Source,
        part: int,
        parents: bytes,
        replicas: int,
        request: str,
    ) -> int | None:
        n = source.n
        stash = connection.daemon.stashes.get((ns.digest, part))
        rows = stash.take(n) if stash is not None else []
        if len(rows) < n:
            answer = connection.ask(
                client_wire.Grant(number, part, n - len(rows)), self._connections.timeout_s
            )
            if stash is None:
                stash = Stash(answer.stride)
                stash = connection.daemon.stashes.setdefault((ns.digest, part), stash)
            stash.add(answer.rows)
            rows += stash.take(n - len(rows))
            if len(rows) < n:
                stash.most = n
                connection.tell(client_wire.GiveBack(stash.stride, frame.pack_rows(rows)))
                return None
        assert stash is not None
        try:
            checksums = self._copy_in(
                source,
                np.arange(n),
                connection.daemon.table(stash.stride),
                np.array(rows, dtype=np.int64),
                connection.daemon.segment.fd,
            )
            packed_rows = frame.pack_rows(rows)
            connection.be_patient(source.total)
            answer = connection.ask(
                client_wire.Store(
                    *(number, part, packed_rows, packed, checksums, n, parents, replicas, request)
                ),
                self._connections.timeout_s,
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

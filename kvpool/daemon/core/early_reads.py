"""Peers' reads of blocks before their commit: the final beginning of reserved slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvpool.daemon.core.blocks import Holder, PartTable, Reservation
from kvpool.daemon.core.commit_waiters import CommitWaiters
from kvpool.daemon.core.leases import Leases
from kvpool.daemon.core.namespaces import Namespaces
from kvpool.errors import InvalidRequest


class Writing(NamedTuple):
    """A run of adjacent keys that are being written, of one reservation.

    number: of the reservation. keys: how many. nbytes: written of each slot, from its beginning.
    """

    number: int
    part: int
    first: int
    keys: int
    nbytes: int


class EarlyReads:
    """Blocks being written, and their readers. Not thread-safe."""

    def __init__(
        self, namespaces: Namespaces, leases: Leases, commit_waiters: CommitWaiters
    ) -> None:
        self._namespaces = namespaces
        self._leases = leases
        self._commit_waiters = commit_waiters
        self._numbered = 0

    def written(self, holder: Holder, ticket: int, nbytes: int) -> None:
        """The first `nbytes` of each slot of a reservation are final.

        Ignored for a reservation that is settled: reports may come late. Raises `InvalidRequest`.
        """
        reservation = holder.reservations.get(ticket)
        if reservation is None:
            return
        table = reservation.table
        if not 0 < nbytes <= table.spec.nbytes:
            raise InvalidRequest(
                f"{nbytes} bytes reported as written, but the part has {table.spec.nbytes}"
            )
        if nbytes <= reservation.written or table.namespace.retired:
            return
        if not reservation.number:
            self._numbered += 1
            reservation.number = self._numbered
        reservation.written = nbytes
        keys = reservation.keys
        positions = range(len(keys)) if reservation.left is None else reservation.left.values()
        for position in positions:
            row = reservation.rows[position]
            table.writing.setdefault(keys[position], (reservation, row))
        if self._commit_waiters:
            self._commit_waiters.wrote(table.namespace.directory_digest, keys)

    def being_written(self, digest: bytes, keys: Sequence[bytes]) -> list[Writing]:
        """The reported progress of these keys: runs of adjacent keys of one reservation.

        digest: the namespace's directory digest.
        """
        namespace = self._namespaces.by_directory(digest)
        found: list[Writing] = []
        for table in [] if namespace is None else namespace.tables:
            if not table.writing:
                continue
            last: Reservation | None = None
            first = 0
            for at, entry in enumerate((*map(table.writing.get, keys), None)):
                reservation = None if entry is None else entry[0]
                if reservation is last:
                    continue
                if last is not None:
                    run = Writing(last.number, table.part, first, at - first, last.written)
                    found.append(run)
                last, first = reservation, at
        return found

    def lease(
        self, holder: Holder, table: PartTable, keys: Sequence[bytes], stop: int
    ) -> tuple[str, dict[bytes, int]]:
        """Keep slots in which at least `stop` bytes of these keys are written until `release`.

        (token, rows); no token and no rows if there are none. Whatever happens to the reservations, nobody
        else writes to these slots before.
        """
        rows: dict[bytes, int] = {}
        reading: dict[int, Reservation] = {}
        for key in keys:
            found = table.writing.get(key)
            if found is not None and found[0].written >= stop:
                reservation, rows[key] = found
                reading[reservation.number] = reservation
        if not rows:
            return "", rows
        holder.check_alive()
        self._leases.check_count(holder)
        lease = self._leases.new(holder, len(rows))
        lease.reading = list(reading.values())
        for reservation in lease.reading:
            reservation.readers[lease.token] = lease
        return lease.token, rows

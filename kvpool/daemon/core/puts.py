"""Puts: reserve slots for new blocks, commit or abort them; and restore blocks after a restart."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
import numpy.typing as npt

from kvpool.daemon.core.blocks import (
    OWN,
    Block,
    Holder,
    NamespaceState,
    Origin,
    PartTable,
    Reservation,
    Tenant,
)
from kvpool.daemon.core.ledger import Ledger
from kvpool.daemon.core.limits import Limits
from kvpool.daemon.core.reclaimer import Reclaimer
from kvpool.daemon.core.slots import Slots
from kvpool.errors import InvalidRequest, LimitExceeded, PoolFull, UnknownReservation
from kvpool.telemetry.memory_stats import Counters
from kvpool.types import CHECKSUM_BYTES, KEY_BYTES, split_keys
from kvpool.wire.frame import NO_ROW


@dataclass(eq=False, repr=False, slots=True)
class Puts:
    """Reservations and their outcome. Not thread-safe."""

    _tenants: Mapping[str, Tenant]
    _limits: Limits
    _ledger: Ledger
    _slots: Slots
    _reclaimer: Reclaimer
    _counters: Counters

    def reserve(
        self,
        holder: Holder,
        namespace: NamespaceState,
        part: int,
        ticket: int,
        keys: Sequence[bytes],
        parent: bytes = b"",
        parents: Sequence[bytes] = (),
        *,
        only_spare: bool = False,
    ) -> tuple[int, bytes]:
        """Slots for the keys that are not here: (stride, rows as u32, `NO_ROW` if present).

        parent: the key before the first one in the prefix chain, if known. parents: of each key, if they are of
        several chains. Keys and parents are kept: the caller must not change them. Rows cover a prefix of the keys:
        fewer than requested if leases, reservations or hard pins hold the rest of the space. Raises `PoolFull` if there
        is not even one. only_spare: no ordinary block is evicted for them, only secondary and expendable ones.
        """
        self._ledger.settle()
        table = namespace.table(part)
        check_parent(parent)
        holder.check_alive()
        namespace.check_epoch()
        if not keys:
            raise InvalidRequest("a reservation needs at least one key")
        if ticket in holder.reservations:
            raise InvalidRequest(
                f"ticket {ticket} is in use; choose a new one for each reservation"
            )
        stride = table.stride
        blocks = table.blocks
        wanted: Sequence[int] = range(len(keys))
        here: list[Block] = []
        if not blocks.isdisjoint(keys):
            found = blocks.found(keys)
            here = [block for block in found if block is not None]
            self._ledger.read(here)
            wanted = [i for i, block in enumerate(found) if block is None]
            if not wanted:
                return stride, array("I", [NO_ROW]).tobytes() * len(keys)
        bound = int(holder.tenant.allocator.size * self._limits.reserved_share_per_holder)
        # At least one, or a block larger than the share could never be put.
        fit = max(not holder.reserved_bytes, (bound - holder.reserved_bytes) // stride)
        rows = self._reclaimer.allocate(
            holder.tenant, table, min(len(wanted), fit), keys, here, only_spare=only_spare
        )
        if not rows:
            if fit == 0:
                raise LimitExceeded(
                    f"this client has {holder.reserved_bytes >> 20} MiB reserved and not committed, the limit is "
                    f"{bound >> 20} MiB: commit or abort first"
                )
            where = f"tenant {holder.tenant.name!r}"
            if namespace.quota and namespace.held_bytes + stride > namespace.quota:
                where = f"a namespace whose quota here is {namespace.quota >> 20} MiB"
            raise PoolFull(
                f"no slot of {stride} bytes can be reclaimed for {where}: "
                f"leases, reservations and hard pins hold them all"
            )
        if len(rows) == len(keys):
            packed_rows = array("I", rows).tobytes()
            reserved = Reservation(table, wanted, keys, parents or (parent, *keys[:-1]), rows)
        else:
            covered = len(keys) if len(rows) == len(wanted) else wanted[len(rows)]
            out = array("I", [NO_ROW]) * covered
            wanted = wanted[: len(rows)]
            for index, row in zip(wanted, rows, strict=True):
                out[index] = row
            packed_rows = out.tobytes()
            before = parents or (parent, *keys)
            reserved = Reservation(
                table,
                wanted,
                [keys[index] for index in wanted],
                [before[index] for index in wanted],
                rows,
            )
        if len(rows) == 1 or len(set(reserved.keys)) == len(rows):
            reserved.added = blocks.added
        holder.reservations[ticket] = reserved
        holder.reserved_bytes += stride * len(rows)
        table.reserved += len(rows)
        self._counters.reserved += len(rows)
        return stride, packed_rows

    def commit(
        self,
        holder: Holder,
        ticket: int,
        checksums: bytes,
        indices: Sequence[int] | None = None,
        origin: Origin = OWN,
    ) -> int:
        """Make reserved slots readable; returns the number of new blocks.

        checksums: 16 bytes for each row of the reservation, in order (with `indices`, for each of
        these). A block that another client committed meanwhile is kept; this slot is freed. So
        are all slots if the namespace's epoch has ended meanwhile. `Reservation.new` tells which are new.
        Raises `UnknownReservation`, and changes nothing, for slots that this holder has not reserved.
        """
        self._ledger.settle()
        reservation = holder.reservations.get(ticket)
        if reservation is None:
            raise UnknownReservation(
                f"reservation {ticket} is not open: this client never made it, or it was committed or aborted before"
            )
        table = reservation.table
        reservation.new = None
        keys: Sequence[bytes] = reservation.keys
        parents: Sequence[bytes] = reservation.parents
        rows: Sequence[int] = reservation.rows
        if indices is None and reservation.left is not None:
            indices = list(reservation.left)
        if indices is not None:
            at = reservation.positions(indices, ticket)
            keys = [reservation.keys[position] for position in at]
            parents = [reservation.parents[position] for position in at]
            rows = [reservation.rows[position] for position in at]
        if len(checksums) != CHECKSUM_BYTES * len(rows):
            raise InvalidRequest(
                f"{len(checksums)} bytes of checksums for {len(rows)} blocks: 16 bytes each are required"
            )
        holder.reserved_bytes -= table.stride * len(rows)
        table.reserved -= len(rows)
        if indices is None or reservation.left is None or len(indices) == len(reservation.left):
            del holder.reservations[ticket]
        else:
            for index in indices:
                del reservation.left[index]
        if table.namespace.retired:
            self._slots.free_reserved(table, rows)
            self._counters.aborted += len(rows)
            return 0
        if reservation.added != table.blocks.added and (
            len(set(keys)) != len(keys) or not table.blocks.isdisjoint(keys)
        ):
            keys, parents, rows, checksums, surplus, reservation.new = self.only_new(
                table, keys, parents, rows, checksums
            )
            origin = origin._replace(depths=())
            self._slots.free_reserved(table, surplus)
        self.publish(table, keys, parents, rows, checksums, origin)
        return len(rows)

    def publish(
        self,
        table: PartTable,
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        rows: Sequence[int],
        checksums: bytes,
        origin: Origin,
    ) -> None:
        """Complete slots become blocks, at the latest before the next lookup: see `settle`.

        The keys are new and differ from one another.
        """
        self._slots.releases += 1
        if keys:
            self._ledger.put(table, keys, parents, rows, checksums, origin)
            self._counters.committed += len(keys)
            self._counters.committed_bytes += len(keys) * table.spec.nbytes

    def only_new(
        self,
        table: PartTable,
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        rows: Sequence[int],
        checksums: bytes,
    ) -> tuple[Sequence[bytes], Sequence[bytes], Sequence[int], bytes, list[int], list[int]]:
        """The same without blocks that are here or named twice, the rows that are left over, and the places of the
        rest among these keys.
        """
        blocks = table.blocks
        here = [block for block in blocks.found(keys) if block is not None]
        if here:
            self._ledger.read(here)
        first: dict[bytes, int] = {}
        for index, key in enumerate(keys):
            if key not in blocks:
                first.setdefault(key, index)
        chosen = list(first.values())
        self._counters.duplicates += len(keys) - len(chosen)
        sums = split_keys(checksums)
        unused = set(range(len(keys))).difference(chosen)
        return (
            list(first),
            [parents[index] for index in chosen],
            [rows[index] for index in chosen],
            b"".join([sums[index] for index in chosen]),
            [rows[index] for index in sorted(unused)],
            chosen,
        )

    def abort(self, holder: Holder, ticket: int) -> None:
        """Free reserved slots unwritten. The caller promises that nobody writes to them any more."""
        reservation = holder.reservations.pop(ticket, None)
        if reservation is None:
            return
        table = reservation.table
        rows = reservation.open_rows
        self._slots.free_reserved(table, rows)
        holder.reserved_bytes -= table.stride * len(rows)
        table.reserved -= len(rows)
        self._counters.aborted += len(rows)

    # ---- after a restart -----------------------------------------------------------------------------

    def restore(
        self,
        namespace: NamespaceState,
        part: int,
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        depths: Sequence[int],
        rows: npt.NDArray[np.int64],
        checksums: Sequence[bytes],
    ) -> npt.NDArray[np.bool_]:
        """Restore blocks that were in these rows before a restart; returns which of them.

        Not restored: those whose rows are not available (see `SlabAllocator.claim`), or whose keys are here
        already; of those with one key the last one is. Must precede all allocations; when all is restored, call
        `restored`.
        """
        table = namespace.table(part)
        tenant, stride = namespace.tenant, table.stride
        new = {key: index for index, key in enumerate(keys) if key not in table.blocks}
        chosen = np.fromiter(new.values(), dtype=np.int64, count=len(new))
        had = tenant.allocator.claim(stride, rows[chosen])
        good = np.zeros(len(keys), dtype=np.bool_)
        good[chosen[had]] = True
        if good.any():
            slot_class = self._slots.class_of(tenant, stride)
            taken = rows[good].tolist()
            self._ledger.tick += 1
            self._ledger.enter(
                slot_class,
                table,
                list(compress(keys, good)),
                list(compress(parents, good)),
                taken,
                b"".join(compress(checksums, good)),
                self._ledger.tick,
                Origin(depths=list(compress(depths, good))),
            )
        return good

    def restored(self) -> None:
        """All blocks from before a restart are known: the rest is free."""
        for tenant in self._tenants.values():
            tenant.allocator.claimed()


def check_parent(parent: bytes) -> None:
    """Raises `InvalidRequest` unless it is a key or empty."""
    if parent and len(parent) != KEY_BYTES:
        raise InvalidRequest(
            f"a parent key must have {KEY_BYTES} bytes or be empty, not {len(parent)} bytes"
        )

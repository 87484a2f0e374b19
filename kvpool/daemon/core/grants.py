"""Puts in one exchange: slots granted in advance, and blocks stored in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.daemon.core.blocks import OWN, Holder, NamespaceState, Origin
from kvpool.daemon.core.ledger import Ledger
from kvpool.daemon.core.limits import Limits
from kvpool.daemon.core.puts import Puts
from kvpool.daemon.core.quotas import Quotas
from kvpool.daemon.core.reclaimer import Reclaimer
from kvpool.daemon.core.slots import Slots
from kvpool.errors import InvalidRequest, UnknownReservation
from kvpool.types import CHECKSUM_BYTES


@dataclass(eq=False, repr=False, slots=True)
class Grants:
    """Slots granted to holders in advance, without keys. Not thread-safe."""

    _limits: Limits
    _ledger: Ledger
    _slots: Slots
    _quotas: Quotas
    _reclaimer: Reclaimer
    _puts: Puts

    def grant(self, holder: Holder, namespace: NamespaceState, part: int, count: int) -> list[int]:
        """Up to `count` rows for parts of this size, without keys. None if the quota is used up."""
        table = namespace.table(part)
        holder.check_alive()
        namespace.check_epoch()
        tenant, stride = holder.tenant, table.stride
        room = min(
            self._limits.grant_bytes_per_holder - holder.granted_bytes,
            int(tenant.allocator.size * self._limits.grant_share) - tenant.granted_bytes,
        )
        if namespace.quota:  # its own blocks would make room for slots that may never be used
            share = int(namespace.quota * self._limits.grant_share)
            room = min(room, share - holder.granted_bytes)
        rows = self._reclaimer.allocate(tenant, table, max(0, min(count, room // stride)))
        self._granted(holder, stride, len(rows))
        holder.granted.setdefault(stride, set()).update(rows)
        return rows

    def store(
        self,
        holder: Holder,
        namespace: NamespaceState,
        part: int,
        rows: Sequence[int],
        keys: Sequence[bytes],
        checksums: bytes,
        parents: Sequence[bytes] = (),
        origin: Origin = OWN,
    ) -> tuple[int, list[int]]:
        """Make granted slots readable under these keys: (new blocks, rows still granted).

        parents: as for `Puts.reserve`.

        Raises `UnknownReservation`, and changes nothing, for rows that are not granted to this holder.
        """
        self._ledger.settle()
        table = namespace.table(part)
        namespace.check_epoch()
        if not len(keys) == len(rows) or len(checksums) != CHECKSUM_BYTES * len(rows):
            raise InvalidRequest(
                f"{len(rows)} rows, {len(keys)} keys and {len(checksums)} bytes of checksums do not match"
            )
        granted = holder.granted.get(table.stride, set())
        if not granted.issuperset(rows) or len(set(rows)) != len(rows):
            raise UnknownReservation(
                "the request stores into a slot that is not granted to this client, or was used before"
            )
        unused: list[int] = []
        parents = parents or (b"", *keys[:-1])
        blocks = table.blocks
        if not blocks.isdisjoint(keys) or len(set(keys)) != len(keys):
            keys, parents, rows, checksums, unused, _ = self._puts.only_new(
                table, keys, parents, rows, checksums
            )
            origin = origin._replace(depths=())
        if namespace.quota:
            # Granted slots do not count in a namespace's quota before.
            self._quotas.within(table, len(keys))
        granted.difference_update(rows)
        self._granted(holder, table.stride, -len(rows))
        self._puts.publish(table, keys, parents, rows, checksums, origin)
        return len(rows), unused

    def give_back(self, holder: Holder, stride: int, rows: Sequence[int]) -> None:
        """Granted slots that nobody writes to any more. Those stored meanwhile are kept."""
        granted = holder.granted.get(stride, set())
        back = list(granted.intersection(rows))
        if back:
            granted.difference_update(back)
            self._granted(holder, stride, -len(back))
            holder.tenant.allocator.free(stride, back)
            self._slots.releases += 1

    def give_all_back(self, holder: Holder) -> None:
        """All slots granted to a holder, including unreceived grants: nobody writes to them."""
        holder.ready.clear()
        for stride, rows in holder.granted.items():
            self.give_back(holder, stride, list(rows))

    def _granted(self, holder: Holder, stride: int, count: int) -> None:
        holder.granted_bytes += stride * count
        holder.tenant.granted_bytes += stride * count

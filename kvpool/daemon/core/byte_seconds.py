"""How long how many bytes were kept, of each namespace and tier: bytes times seconds, exactly.

A sum is brought up to date at each change of what it is of, which costs a look at the clock and three additions for a
batch of blocks, however many there are. What counts are committed blocks that can be found, with the whole of their
slots: ended epochs, reservations and grants do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from kvpool.daemon.core.blocks import ByteSum, NamespaceState, PartTable, Tenant

SPARE_SUMS_MAX = 1024  # of namespaces that have nothing, before those are dropped


class ByteSeconds:
    """The sums of all tiers of a daemon. Not thread-safe.

    clock: monotonic; set by whoever composes the daemon, before there are blocks.
    """

    def __init__(self) -> None:
        self.clock: Callable[[], float] = lambda: 0.0
        self._sums: dict[tuple[str, str, str], ByteSum] = {}

    def of(self, tier: str, namespace: NamespaceState) -> ByteSum:
        name = (tier, namespace.tenant.name, namespace.base_hex)
        found = self._sums.get(name)
        if found is None:
            found = self._sums[name] = ByteSum(self.clock(), namespace.fields)
        return found

    def take(self) -> Iterator[tuple[str, str, str, bytes, float]]:
        """Tier, tenant, namespace, its fields, and what has come since the last call, where there is any."""
        now = self.clock()
        spare = []
        for name, each in self._sums.items():
            each.change(0, now)
            if each.byte_s > each.taken:
                yield (*name, each.fields, each.byte_s - each.taken)
                each.taken = each.byte_s
            elif not each.nbytes:
                spare.append(name)
        if len(spare) > SPARE_SUMS_MAX:
            for name in spare:
                self._sums.pop(name).ended = True


class TierByteSeconds:
    """What one tier's rules, or those of one of its disks, tell of."""

    __slots__ = ("_all", "_tier")

    def __init__(self, sums: ByteSeconds, tier: str) -> None:
        self._all = sums
        self._tier = tier

    def changed(self, table: PartTable, blocks: int) -> None:
        """So many blocks have come to a table, or have left it (below 0)."""
        namespace = table.namespace
        known = namespace.byte_seconds
        if known is None or known.ended:
            known = namespace.byte_seconds = self._all.of(self._tier, namespace)
        known.change(blocks * table.stride, self._all.clock())

    def end(self, tenants: Mapping[str, Tenant]) -> None:
        """All blocks of these rules are gone at once: a disk failed, or a device's process died."""
        for tenant in tenants.values():
            for namespace in tenant.namespaces.values():
                for table in namespace.tables:
                    self.changed(table, -len(table.blocks))

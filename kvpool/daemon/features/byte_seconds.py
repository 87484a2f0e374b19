"""How long how many bytes were kept, of each namespace and tier: bytes times seconds, exactly.

A sum is brought up to date at each change of what it is of, which costs a look at the clock and three additions for a
batch of blocks, however many there are. What counts are committed blocks that can be found, with the whole of their
slots: ended epochs, reservations and grants do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvpool.daemon.core.blocks import PartTable
from kvpool.daemon.core.events import Came, Ended, Gone, TierInfo

SPARE_SUMS_MAX = 1024  # of namespaces that have nothing, before those are dropped


class ByteSum:
    """Bytes times seconds of one namespace in one tier."""

    __slots__ = ("at", "byte_s", "name", "nbytes", "taken")

    def __init__(self, now: float, name: tuple[str, str, str, bytes]) -> None:
        self.name = name
        self.nbytes = 0
        self.at = now
        self.byte_s = 0.0
        self.taken = 0.0  # `byte_s` when it was taken last

    def change(self, nbytes: int, now: float) -> None:
        """Count so many bytes more, or fewer, from now on."""
        self.byte_s += self.nbytes * (now - self.at)
        self.at = now
        self.nbytes += nbytes


class ByteSeconds:
    """The sums of all tiers of a daemon. Not thread-safe. clock: monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sums: dict[tuple[str, int], ByteSum] = {}

    def came(self, event: Came) -> None:
        """Blocks have come to a table."""
        self._changed(event.tier, event.table, len(event.blocks))

    def gone(self, event: Gone) -> None:
        """Blocks have left a table. Those of an ended epoch were not counted any more."""
        if not event.table.namespace.retired:
            self._changed(event.tier, event.table, -len(event.blocks))

    def ended(self, event: Ended) -> None:
        """All blocks of a table are gone at once."""
        self._changed(event.tier, event.table, -len(event.table.blocks))

    def _changed(self, tier: TierInfo, table: PartTable, blocks: int) -> None:
        namespace = table.namespace
        at = (tier.name, namespace.space)
        now = self._clock()
        found = self._sums.get(at)
        if found is None:
            name = (tier.name, namespace.tenant.name, namespace.base_hex, namespace.fields)
            found = self._sums[at] = ByteSum(now, name)
        found.change(blocks * table.stride, now)

    def take(self) -> Iterator[tuple[str, str, str, bytes, float]]:
        """Tier, tenant, namespace, its fields, and what has come since the last call, where there is any."""
        now = self._clock()
        spare = []
        for at, each in self._sums.items():
            each.change(0, now)
            if each.byte_s > each.taken:
                yield (*each.name, each.byte_s - each.taken)
                each.taken = each.byte_s
            elif not each.nbytes:
                spare.append(at)
        if len(spare) > SPARE_SUMS_MAX:
            for at in spare:
                del self._sums[at]

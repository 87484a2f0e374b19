"""When blocks that are on their way to the remote tier have waited long enough to fill a pack. No I/O.

Packs are worth their requests when they are large, and blocks come a few at a time. So they wait here,
by table, until there are enough for a pack or the oldest has waited `age_s`. Only names wait: their
bytes stay where they are, held by the caller, until `RemoteStore.put` has returned.

Not thread-safe.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvpool.errors import InvalidRequest

TableT = TypeVar("TableT", bound=Hashable)
ItemT = TypeVar("ItemT")


@dataclass(slots=True)
class _Open(Generic[ItemT]):
    since: float
    nbytes: int = 0
    items: list[ItemT] = field(default_factory=list)


class Packer(Generic[TableT, ItemT]):
    """See the module. pack_bytes: what is enough; bytes_max: of all that may wait at a time."""

    def __init__(self, *, pack_bytes: int, age_s: float, bytes_max: int) -> None:
        if not 0 < pack_bytes <= bytes_max:
            raise InvalidRequest("a pack has at least a byte, and what waits holds at least a pack")
        self._pack_bytes = pack_bytes
        self._age_s = age_s
        self._bytes_max = bytes_max
        self._open: OrderedDict[TableT, _Open[ItemT]] = OrderedDict()  # the oldest first
        self.bytes_waiting = 0

    def add(self, table: TableT, item: ItemT, nbytes: int, now: float) -> list[ItemT] | None:
        """One more block. Returns what is to be written now as one pack, in the order of its coming.

        None when too much waits already: the block was not taken.
        """
        if self.bytes_waiting + nbytes > self._bytes_max:
            return None
        pack = self._open.get(table)
        if pack is None:
            pack = self._open[table] = _Open(now)
        pack.items.append(item)
        pack.nbytes += nbytes
        self.bytes_waiting += nbytes
        return self._close(table) if pack.nbytes >= self._pack_bytes else []

    def due_at(self) -> float | None:
        """When the oldest will have waited long enough; None when nothing waits."""
        for pack in self._open.values():
            return pack.since + self._age_s
        return None

    def due(self, now: float) -> list[tuple[TableT, list[ItemT]]]:
        """What has waited long enough, each a pack to be written now."""
        found = []
        while (due_at := self.due_at()) is not None and due_at <= now:
            table = next(iter(self._open))
            found.append((table, self._close(table)))
        return found

    def _close(self, table: TableT) -> list[ItemT]:
        pack = self._open.pop(table)
        self.bytes_waiting -= pack.nbytes
        return pack.items

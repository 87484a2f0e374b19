"""This node's usage of the object tier: sizes, live blocks, and the order of deletion. No I/O.

A pack lives as a whole. It is deleted when no block in it is alive, when more than `dead_share_max` of its
bytes are dead, or when it is the coldest and space is needed; its live blocks are then reported
as dropped. Nothing is rewritten: the tier is a cold cache, and a dropped block costs a recomputation,
compaction costs a read and a write of the whole. So dead bytes are at most `dead_share_max` of all.

Coldest is read or written longest ago, as far as this node knows; for packs found by a
scan, the time of writing is known.

A pack that is to be deleted is *doomed*: its blocks are forgotten at once, its bytes count until the
store has confirmed. Not thread-safe: `ObjectStore` holds its lock. All but `settle` and `clear` is O(1)
a pack, or a logarithm a block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool.storage.object.packs import Array, PackName, PackTable


@dataclass(frozen=True, slots=True)
class DroppedPack:
    """A pack that is gone, or will be: withdraw these blocks from the directory.

    keys: of the blocks that were alive in it, packed.
    """

    name: PackName
    keys: bytes


@dataclass(frozen=True, slots=True)
class UsageStats:
    """Packs of this node."""

    packs: int
    blocks: int
    bytes: int
    """Of all packs that exist: never above `bytes_max`, unless a scan found more."""
    bytes_dead: int
    """Of these, without live blocks."""
    bytes_doomed: int
    """Of these, waiting to be deleted."""
    bytes_reserved: int
    """Of packs that are being written, or wait until there is room."""
    bytes_max: int


class _Pack:
    __slots__ = (
        "alive",
        "dead_bytes",
        "keys",
        "left",
        "name",
        "offsets",
        "size",
        "stored",
        "used_at",
    )

    def __init__(self, table: PackTable, size: int, used_at: float) -> None:
        entries = table.entries
        self.name = table.name
        self.size = size
        self.used_at = used_at
        self.keys = np.array(entries["key"])
        self.offsets = entries["offset"].astype(np.int64)
        self.stored = entries["stored"].astype(np.int64)
        self.alive = np.ones(len(entries), np.bool_)
        self.left = len(entries)
        self.dead_bytes = 0

    def dropped(self) -> DroppedPack:
        return DroppedPack(self.name, self.keys[self.alive].tobytes())


class ObjectUsage:
    """See the module."""

    def __init__(self, bytes_max: int, dead_share_max: float) -> None:
        self._bytes_max = bytes_max
        self._dead_share_max = dead_share_max
        self._packs: OrderedDict[bytes, _Pack] = OrderedDict()  # the coldest first
        self._reserved: dict[bytes, int] = {}
        self._doomed: dict[bytes, tuple[PackName, int]] = {}
        self._bytes = 0
        self._dead = 0
        self._blocks = 0
        self._reserved_bytes = 0
        self._doomed_bytes = 0

    def usage(self) -> UsageStats:
        return UsageStats(
            packs=len(self._packs),
            blocks=self._blocks,
            bytes=self._bytes + self._doomed_bytes,
            bytes_dead=self._dead,
            bytes_doomed=self._doomed_bytes,
            bytes_reserved=self._reserved_bytes,
            bytes_max=self._bytes_max,
        )

    def reserve(self, pack: bytes, size: int) -> list[DroppedPack] | None:
        """Reserve room for a new pack; None if it can never fit.

        The coldest packs are doomed for it. The room is there once `fits` returns True.
        """
        if size > self._bytes_max:
            return None
        dropped = []
        while self._bytes + self._reserved_bytes + size > self._bytes_max and self._packs:
            dropped.append(self._doom(next(iter(self._packs.values()))))
        self._reserved[pack] = size
        self._reserved_bytes += size
        return dropped

    @property
    def fits(self) -> bool:
        """Whether existing, doomed and reserved packs together are within the limit."""
        return self._bytes + self._reserved_bytes + self._doomed_bytes <= self._bytes_max

    def unreserve(self, pack: bytes) -> None:
        """It was certainly not written."""
        self._reserved_bytes -= self._reserved.pop(pack)

    def written(self, table: PackTable, now: float) -> None:
        """A reserved pack was written."""
        size = self._reserved.pop(table.name.pack)
        self._reserved_bytes -= size
        self._add(_Pack(table, size, now))

    def unsure(self, name: PackName) -> None:
        """A reserved pack may exist or still appear: it must be deleted."""
        size = self._reserved.pop(name.pack)
        self._reserved_bytes -= size
        self._doomed[name.pack] = (name, size)
        self._doomed_bytes += size

    def adopt(self, table: PackTable, size: int, used_at: float) -> bool:
        """A scan found a pack of this node. False: it is being written or to be deleted, so ignore it."""
        pack = table.name.pack
        if pack in self._reserved or pack in self._doomed:
            return False
        if pack not in self._packs:
            self._add(_Pack(table, size, used_at))
        return True

    def condemn(self, name: PackName, size: int) -> None:
        """A scan found an unreadable object of this node: it must be deleted."""
        known = self._packs.get(name.pack)
        if known is not None:
            self._remove(known)
        if name.pack not in self._reserved and name.pack not in self._doomed:
            self._doomed[name.pack] = (name, size)
            self._doomed_bytes += size

    def settle(self) -> None:
        """After a scan: puts the packs in the order of their last use."""
        order = sorted(self._packs.values(), key=lambda pack: pack.used_at)
        self._packs = OrderedDict((pack.name.pack, pack) for pack in order)

    def touch(self, packs: Iterable[bytes], now: float) -> None:
        """They were read."""
        for pack in packs:
            known = self._packs.get(pack)
            if known is not None:
                known.used_at = now
                self._packs.move_to_end(pack)

    def lost(self, pack: bytes) -> None:
        """The store does not have it: it was deleted elsewhere."""
        known = self._packs.get(pack)
        if known is not None:
            self._remove(known)

    def forget(self, digest: bytes, part: int, locations: Array) -> list[DroppedPack]:
        """These blocks are no longer wanted. Returns packs that are doomed thereby.

        Blocks of other nodes, and those that were forgotten before, change nothing.
        """
        dropped = []
        for raw in np.unique(locations["pack"]):
            known = self._packs.get(raw.tobytes())
            if known is None or (known.name.digest, known.name.part) != (digest, part):
                continue
            offsets = locations["offset"][locations["pack"] == raw].astype(np.int64)
            self._mark_dead(known, offsets)
            if not known.left or known.dead_bytes > self._dead_share_max * known.stored.sum():
                dropped.append(self._doom(known))
        return dropped

    def clear(self, digest: bytes) -> list[DroppedPack]:
        """Dooms every pack of a namespace. O(packs)."""
        own = [pack for pack in self._packs.values() if pack.name.digest == digest]
        return [self._doom(pack) for pack in own]

    def doomed(self) -> list[PackName]:
        """Packs to delete now."""
        return [name for name, _ in self._doomed.values()]

    def deleted(self, pack: bytes) -> None:
        """The store confirmed its deletion."""
        found = self._doomed.pop(pack, None)
        if found is not None:
            self._doomed_bytes -= found[1]

    def _mark_dead(self, pack: _Pack, offsets: npt.NDArray[np.int64]) -> None:
        at = np.unique(np.searchsorted(pack.offsets, offsets))
        at = at[at < len(pack.offsets)]
        at = at[np.isin(pack.offsets[at], offsets) & pack.alive[at]]
        pack.alive[at] = False
        dead = int(pack.stored[at].sum())
        pack.left -= len(at)
        pack.dead_bytes += dead
        self._blocks -= len(at)
        self._dead += dead

    def _add(self, pack: _Pack) -> None:
        self._packs[pack.name.pack] = pack
        self._bytes += pack.size
        self._blocks += pack.left

    def _remove(self, pack: _Pack) -> None:
        del self._packs[pack.name.pack]
        self._bytes -= pack.size
        self._dead -= pack.dead_bytes
        self._blocks -= pack.left

    def _doom(self, pack: _Pack) -> DroppedPack:
        self._remove(pack)
        self._doomed[pack.name.pack] = (pack.name, pack.size)
        self._doomed_bytes += pack.size
        return pack.dropped()

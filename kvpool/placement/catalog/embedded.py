"""The catalog in this process: for a node without shared catalog, and for tests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvpool.placement.catalog.base import LOCATION_BYTES, PACK, check_columns, check_part, check_ttl

BLOCKS_MAX = 4 << 20


class EmbeddedCatalog:
    """See `Catalog`. Takes about 250 bytes a block.

    clock: monotonic. blocks_max: beyond it, new entries replace the oldest.
    """

    shared = False

    def __init__(self, clock: Callable[[], float], *, blocks_max: int = BLOCKS_MAX) -> None:
        self._clock = clock
        self._blocks_max = blocks_max
        self._entries: OrderedDict[bytes, tuple[bytes, float]] = OrderedDict()
        self._complete_until = 0.0

    @property
    def blocks(self) -> int:
        """Number of entries, including expired ones that were not looked up since."""
        return len(self._entries)

    async def find(self, digest: bytes, part: int, keys: Sequence[bytes]) -> list[bytes | None]:
        """See `Catalog`."""
        check_part(digest, part, keys)
        now = self._clock()
        return [self._living(_name(digest, part, key), now) for key in keys]

    def _living(self, name: bytes, now: float) -> bytes | None:
        found = self._entries.get(name)
        if found is None:
            return None
        location, until = found
        if until > now:
            return location
        del self._entries[name]
        return None

    async def add(
        self,
        digest: bytes,
        part: int,
        keys: Sequence[bytes],
        locations: Sequence[bytes],
        ttl_s: float,
    ) -> None:
        """See `Catalog`."""
        check_part(digest, part, keys)
        check_columns(keys, locations, LOCATION_BYTES)
        check_ttl(ttl_s)
        until = self._clock() + ttl_s
        for key, location in zip(keys, locations, strict=True):
            name = _name(digest, part, key)
            self._entries[name] = (location, until)
            self._entries.move_to_end(name)
        while len(self._entries) > self._blocks_max:
            self._entries.popitem(last=False)

    async def drop(
        self, digest: bytes, part: int, keys: Sequence[bytes], packs: Sequence[bytes]
    ) -> None:
        """See `Catalog`."""
        check_part(digest, part, keys)
        check_columns(keys, packs, PACK.stop - PACK.start)
        for key, pack in zip(keys, packs, strict=True):
            name = _name(digest, part, key)
            found = self._entries.get(name)
            if found is not None and found[0][PACK] == pack:
                del self._entries[name]

    async def complete(self) -> bool:
        """See `Catalog`."""
        return self._clock() < self._complete_until

    async def completed(self, ttl_s: float) -> None:
        """See `Catalog`."""
        check_ttl(ttl_s)
        self._complete_until = self._clock() + ttl_s

    def lose(self) -> None:
        """Forget everything: simulates a lost server."""
        self._entries.clear()
        self._complete_until = 0.0

    async def close(self) -> None:
        """See `Catalog`. Its contents stay: others may share this object."""


def _name(digest: bytes, part: int, key: bytes) -> bytes:
    return digest + part.to_bytes(2, "little") + key

"""The catalog on Redis, beside the directory: the same servers, the same groups of keys.

Contents, for a cluster called `prod`:

    {kvpool1:prod:07}:s<digest 16><part 2, little-endian><block key 16>    a location, 66 bytes; expires
    {kvpool1:prod:07}:scanned                                              of group 7, `completed`; expires

Every value expires, so nothing needs to be swept. It has connections of its own: a directory lookup never queues
behind its writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvpool.placement.catalog.base import LOCATION_BYTES, PACK, check_columns, check_part, check_ttl
from kvpool.placement.key_groups import TAGS
from kvpool.placement.redis.batches import LOCATE_KEYS, PUBLISH_KEYS, Batches, Piece, error_of, good
from kvpool.placement.redis.connection import Command
from kvpool.placement.redis.settings import RedisSettings
from kvpool.placement.redis.shards import READING, WRITING, Shards, slot_of

# ARGV: time to live in ms, locations.
ADD = b"""
local size = #ARGV[2] / #KEYS
for i, key in ipairs(KEYS) do
  redis.call('SET', key, string.sub(ARGV[2], (i - 1) * size + 1, i * size), 'PX', ARGV[1])
end
return #KEYS
"""

# ARGV: names of objects, position of the object's name in a location (first and last byte, from 1).
DROP = b"""
local values, gone, sub = redis.call('MGET', unpack(KEYS)), {}, string.sub
local first, last = tonumber(ARGV[2]), tonumber(ARGV[3])
local size = last - first + 1
for i, key in ipairs(KEYS) do
  local pack = sub(ARGV[1], (i - 1) * size + 1, i * size)
  if values[i] and sub(values[i], first, last) == pack then gone[#gone + 1] = key end
end
if #gone > 0 then redis.call('DEL', unpack(gone)) end
return #gone
"""


class RedisCatalog:
    """See `Catalog`. On a running event loop.

    cluster: the name, part of every key. timeout_s: of reads; write_timeout_s: of writes.
    """

    shared = True

    def __init__(
        self,
        settings: RedisSettings,
        *,
        cluster: str,
        timeout_s: float = 0.5,
        write_timeout_s: float = 5.0,
    ) -> None:
        """Raises `ConfigError` for TLS files that cannot be used."""
        self._timeout_s = timeout_s
        self._write_timeout_s = write_timeout_s
        tags = [f"kvpool1:{cluster}:{tag:02d}".encode() for tag in range(TAGS)]
        self._starts = [b"{%b}:s" % tag for tag in tags]
        self._scanned = [b"{%b}:scanned" % tag for tag in tags]
        self._shards = Shards(settings, [slot_of(tag) for tag in tags], timeout_s)
        self._batches = Batches(self._shards)

    async def find(self, digest: bytes, part: int, keys: Sequence[bytes]) -> list[bytes | None]:
        """See `Catalog`. If some shards of a Redis Cluster are unavailable, their blocks read as absent."""
        check_part(digest, part, keys)
        found: list[bytes | None] = [None] * len(keys)
        if not keys:
            return found
        names = self._names(digest, part, keys)
        pieces = self._batches.cut(keys, LOCATE_KEYS)
        await self._batches.run(
            pieces, lambda piece: ("MGET", *piece.pick(names)), READING, self._timeout_s
        )
        answered = list(good(pieces))
        if not answered:
            raise error_of(pieces)
        for piece in answered:
            for at, value in piece.pairs():
                if value is not None and len(value) == LOCATION_BYTES:
                    found[at] = value
            await asyncio.sleep(0)  # yield to other tasks
        return found

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
        names, ttl_ms = self._names(digest, part, keys), max(1, round(ttl_s * 1000))

        def command(piece: Piece) -> Command:
            chosen = piece.pick(names)
            return ("EVAL", ADD, len(chosen), *chosen, ttl_ms, b"".join(piece.pick(locations)))

        pieces = self._batches.cut(keys, PUBLISH_KEYS)
        if pieces:
            await self._batches.all(pieces, command, WRITING, self._write_timeout_s)

    async def drop(
        self, digest: bytes, part: int, keys: Sequence[bytes], packs: Sequence[bytes]
    ) -> None:
        """See `Catalog`."""
        check_part(digest, part, keys)
        check_columns(keys, packs, PACK.stop - PACK.start)
        names = self._names(digest, part, keys)

        def command(piece: Piece) -> Command:
            chosen = piece.pick(names)
            packed = b"".join(piece.pick(packs))
            return ("EVAL", DROP, len(chosen), *chosen, packed, PACK.start + 1, PACK.stop)

        pieces = self._batches.cut(keys, PUBLISH_KEYS)
        if pieces:
            await self._batches.all(pieces, command, WRITING, self._write_timeout_s)

    async def complete(self) -> bool:
        """See `Catalog`."""
        pieces = self._groups()
        await self._batches.all(
            pieces, lambda piece: ("MGET", *piece.pick(self._scanned)), READING, self._timeout_s
        )
        return all(value is not None for piece in pieces for _, value in piece.pairs())

    async def completed(self, ttl_s: float) -> None:
        """See `Catalog`."""
        check_ttl(ttl_s)
        ttl_ms = max(1, round(ttl_s * 1000))

        def command(piece: Piece) -> Command:
            chosen = piece.pick(self._scanned)
            return ("EVAL", ADD, len(chosen), *chosen, ttl_ms, b"1" * len(chosen))

        await self._batches.all(self._groups(), command, WRITING, self._write_timeout_s)

    def _groups(self) -> list[Piece]:
        """All groups, as a batch."""
        if self._shards.in_one:
            return [Piece(0, range(TAGS))]
        return [Piece(tag, [tag]) for tag in range(TAGS)]

    def _names(self, digest: bytes, part: int, keys: Sequence[bytes]) -> list[bytes]:
        table = digest + part.to_bytes(2, "little")
        starts = [start + table for start in self._starts]
        return [starts[key[-1] % TAGS] + key for key in keys]

    async def close(self) -> None:
        """See `Catalog`."""
        await self._shards.close()

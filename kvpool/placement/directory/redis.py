"""The directory on Redis: one server, a primary behind Sentinels, or a Cluster. Soft state.

Contents, for a cluster called `prod`:

    {kvpool1:prod:07}:b<digest 16><block key 16>   the entries of one block of group 7
    {kvpool1:prod:07}:mark                         8 random bytes: the group's mark

    value of a block:  mask bytes w (2, little-endian) | entry | entry | …   the oldest entry first
    entry:             incarnation (8) | tier (1) | mask of parts (w, little-endian)

All keys of a group are in one slot of a Redis Cluster, so one command can have them all; outside of a
cluster one command can have the keys of all groups. Entries are changed by scripts, so that several nodes may
change a block's at the same time. Values never expire. A malformed value reads as no
entries, is counted, and is replaced by the next publish.

Redis needs no persistence. With `maxmemory` it should evict nothing (`noeviction`) or the least recently
used: an evicted block is a hint lost without a new mark. Clusters should run with
`cluster-require-full-coverage no`, so that the loss of one shard affects only its own keys.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import struct
from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import Any

from kvpool.errors import ConfigError, Unavailable
from kvpool.placement.directory.base import BATCH_MAX, Entry, Swept
from kvpool.placement.directory.checks import (
    ENTRIES_MAX,
    TIER_BYTES,
    check_incarnations,
    check_keys,
    check_publication,
    last_of_each,
)
from kvpool.placement.key_groups import TAGS, tag_of
from kvpool.placement.records import INCARNATION_BYTES
from kvpool.placement.redis.batches import (
    LOCATE_KEYS,
    PUBLISH_KEYS,
    Batches,
    Piece,
    error_of,
    good,
    parts_of,
)
from kvpool.placement.redis.connection import Command, Refused, pack, refuse_errors
from kvpool.placement.redis.settings import RedisSettings
from kvpool.placement.redis.shards import READING, WRITING, Server, Shards, slot_of
from kvpool.types import DIGEST_BYTES, KEY_BYTES

log = logging.getLogger("kvpool.placement")

MARK_BYTES = 8
_CLUSTER_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HEAD_BYTES = 2
_OWNER_BYTES = INCARNATION_BYTES + 1

# ARGV: head of the values, incarnation and tier, masks, how many entries a block may have.
# One MGET and MSET take half the work of a GET and SET for each key.
PUBLISH = b"""
local head, owner, masks, most = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local width = #masks / #KEYS
local size, none, sub = #owner + width, string.rep('\\0', width), string.sub
local values, sets, gone = redis.call('MGET', unpack(KEYS)), {}, {}
for i, key in ipairs(KEYS) do
  local old, mask = values[i], sub(masks, (i - 1) * width + 1, i * width)
  local new = old or head
  if sub(new, 1, #head) ~= head or (#new - #head) % size ~= 0 then new = head end
  local at = #head + 1
  while at <= #new and sub(new, at, at + #owner - 1) ~= owner do at = at + size end
  local entry = mask ~= none and owner .. mask or ''
  new = sub(new, 1, at - 1) .. entry .. sub(new, at + size)
  if #new > #head + most * size then new = head .. sub(new, #head + size + 1) end
  if #new == #head then
    if old then gone[#gone + 1] = key end
  elseif new ~= old then
    sets[#sets + 1] = key
    sets[#sets + 1] = new
  end
end
if #sets > 0 then redis.call('MSET', unpack(sets)) end
if #gone > 0 then redis.call('DEL', unpack(gone)) end
return #KEYS
"""

# ARGV: dead incarnations, those found in these blocks only. Returns how many entries were removed.
SWEEP = b"""
local dead, sub, dropped = {}, string.sub, 0
for at = 1, #ARGV[1], 8 do dead[sub(ARGV[1], at, at + 7)] = true end
local values, sets, gone = redis.call('MGET', unpack(KEYS)), {}, {}
for i, key in ipairs(KEYS) do
  local old = values[i]
  if old and #old > 2 then
    local size = 9 + string.byte(old, 1) + 256 * string.byte(old, 2)
    if (#old - 2) % size == 0 then
      local kept = {sub(old, 1, 2)}
      for at = 3, #old, size do
        if dead[sub(old, at, at + 7)] then dropped = dropped + 1
        else kept[#kept + 1] = sub(old, at, at + size - 1) end
      end
      local new = table.concat(kept)
      if #kept == 1 then gone[#gone + 1] = key
      elseif new ~= old then
        sets[#sets + 1] = key
        sets[#sets + 1] = new
      end
    end
  end
end
if #sets > 0 then redis.call('MSET', unpack(sets)) end
if #gone > 0 then redis.call('DEL', unpack(gone)) end
return dropped
"""


async def open_directory(
    settings: RedisSettings,
    *,
    cluster: str,
    timeout_s: float = 0.5,
    publish_timeout_s: float = 5.0,
) -> RedisDirectory:
    """A directory, after the first contact with its Redis.

    An unreachable Redis is not an error: calls raise `Unavailable` until it answers. Raises
    `NotAuthenticated` or `ConfigError` if it answers, but can never do what is needed.
    """
    directory = RedisDirectory(
        settings, cluster=cluster, timeout_s=timeout_s, publish_timeout_s=publish_timeout_s
    )
    try:
        await directory.check()
    except Unavailable as error:
        log.warning("the directory is unavailable, kvpool continues without it: %s", error)
    except BaseException:
        await directory.close()
        raise
    return directory


@dataclass(eq=False)
class RedisDirectory:
    """See `Directory`. Create it with `open_directory`, on a running event loop.

    cluster: the name, part of every key: several clusters may share a Redis.
    timeout_s: of a locate, of marks, and of one step of a sweep. publish_timeout_s: of a publish,
        whose batches queue behind those of all nodes when Redis comes back empty.
    corrupt: malformed values. partial: lookups that some shard did not answer; its
        blocks read as absent. `counters`: of connections.
    Raises `ConfigError` for an invalid cluster name, or TLS files that cannot be used.
    """

    settings: RedisSettings
    _: KW_ONLY
    cluster: str
    timeout_s: float = 0.5
    publish_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        if not _CLUSTER_NAME.fullmatch(self.cluster):
            raise ConfigError(
                f"cluster {self.cluster!r}: the name must be 1 to 64 letters, digits, dots, dashes or underscores, "
                "because it is part of the keys in Redis"
            )
        self.corrupt = 0
        self.partial = 0
        self._loop = asyncio.get_running_loop()
        tags = [f"kvpool1:{self.cluster}:{tag:02d}".encode() for tag in range(TAGS)]
        self._blocks = [b"{%b}:b" % tag for tag in tags]
        self._mark_keys = [b"{%b}:mark" % tag for tag in tags]
        self._pattern = b"{kvpool1:%b:*}:b*" % self.cluster.encode()
        self._shards = Shards(self.settings, [slot_of(tag) for tag in tags], self.timeout_s)
        self._batches = Batches(self._shards)

    @property
    def stats(self) -> dict[str, int]:
        """Counts of failures so far, by name."""
        counters = self._shards.counters
        return {
            "corrupt": self.corrupt,
            "partial": self.partial,
            "connects": counters.connects,
            "failures": counters.failures,
            "retries": counters.retries,
            "renewals": counters.renewals,
        }

    async def check(self) -> None:
        """Test all required commands. Raises `NotAuthenticated`, `ConfigError` or `Unavailable`."""
        try:
            await self.marks()
            nobody, nothing = bytes(INCARNATION_BYTES), bytes(KEY_BYTES)
            await self.publish(bytes(DIGEST_BYTES), 1, nobody, 0, [nothing], [0])  # writes nothing
        except Refused as error:
            verdict = error.verdict(cluster=not self._shards.in_one)
            raise (verdict or error) from None

    async def locate(self, digest: bytes, parts: int, keys: Sequence[bytes]) -> list[list[Entry]]:
        """See `Directory`. Raises `InvalidRequest` for invalid arguments.

        If some shards of a cluster are unavailable, their blocks read as absent, and `partial` counts.
        """
        check_keys(digest, parts, keys)
        if not keys:
            return []
        starts = [start + digest for start in self._blocks]

        def command(piece: Piece) -> Command:
            return ("MGET", *[starts[key[-1] % TAGS] + key for key in piece.pick(keys)])

        pieces = self._batches.cut(keys, LOCATE_KEYS)
        await self._batches.run(pieces, command, READING, self.timeout_s)
        failed = [piece for piece in pieces if piece.error is not None]
        if failed:
            if len(failed) == len(pieces):
                raise error_of(failed)
            self.partial += 1
        found: list[list[Entry]] = [[] for _ in keys]
        unbroken = 0
        for piece in pieces:
            if piece.error is None:
                self._read(piece, parts, found)
                unbroken += len(piece.positions)
            if unbroken >= LOCATE_KEYS:  # yield to other tasks
                await asyncio.sleep(0)
                unbroken = 0
        return found

    def _read(self, piece: Piece, parts: int, found: list[list[Entry]]) -> None:
        """The entries of one reply. Many values are equal, so each is decoded once."""
        known: dict[bytes, tuple[list[Entry], bool]] = {}
        for at, value in piece.pairs():
            if value is None:
                continue
            if value not in known:
                known[value] = _entries(value, parts)
            entries, sound = known[value]
            found[at] = entries.copy()
            self.corrupt += not sound

    async def publish(
        self,
        digest: bytes,
        parts: int,
        incarnation: bytes,
        tier: int,
        keys: Sequence[bytes],
        masks: Sequence[int],
    ) -> None:
        """See `Directory`. Raises `InvalidRequest` for invalid arguments.

        Reachable shards have their part even if this raises `Unavailable` for another.
        """
        check_publication(digest, parts, incarnation, tier, keys, masks)
        if not keys:
            return
        keys, masks = last_of_each(keys, masks)
        starts = [start + digest for start in self._blocks]
        width = _mask_bytes(parts)
        head = width.to_bytes(_HEAD_BYTES, "little")
        owner = incarnation + bytes((tier,))

        def command(piece: Piece) -> Command:
            names = [starts[key[-1] % TAGS] + key for key in piece.pick(keys)]
            packed = b"".join([mask.to_bytes(width, "little") for mask in piece.pick(masks)])
            return ("EVAL", PUBLISH, len(names), *names, head, owner, packed, ENTRIES_MAX)

        await self._batches.all(
            self._batches.cut(keys, PUBLISH_KEYS), command, WRITING, self.publish_timeout_s
        )

    async def marks(self) -> Sequence[bytes | None]:
        """See `Directory`. A mark also changes with the server's process: after a failover or a
        restart from a file, the last publications may be missing.
        """
        pieces = self._mark_pieces(range(TAGS))

        def get(piece: Piece) -> Command:
            return ("MGET", *piece.pick(self._mark_keys))

        await self._batches.run(pieces, get, READING, self.timeout_s)
        if all(piece.error is not None for piece in pieces):
            raise error_of(pieces)
        missing = [tag for piece in good(pieces) for tag, mark in piece.pairs() if not mark]
        if missing:
            new = [Piece(tag, [tag]) for tag in missing]

            def make(piece: Piece) -> Command:
                return ("SET", self._mark_keys[piece.tag], secrets.token_bytes(MARK_BYTES), "NX")

            await self._batches.run(new, make, WRITING, self.timeout_s)
            again = self._mark_pieces(missing)
            await self._batches.run(again, get, READING, self.timeout_s)
            pieces += again
        marks: list[bytes | None] = [None] * TAGS
        for piece in good(pieces):
            for tag, mark in piece.pairs():
                if mark:
                    marks[tag] = piece.run_id + mark
        return marks

    def _mark_pieces(self, tags: Sequence[int]) -> list[Piece]:
        if self._shards.in_one:
            return [Piece(tags[0], tags)]
        return [Piece(tag, [tag]) for tag in tags]

    async def sweep(self, dead: Collection[bytes], cursor: bytes, count: int) -> Swept:
        """See `Directory`. One server after the other.

        Values are read and compared here, and only those with an entry of the dead go through a script: so a sweep
        costs Redis a lookup, however many are dead. Raises `InvalidRequest` for invalid arguments.
        """
        check_incarnations(dead)
        gone = frozenset(dead)
        deadline = self._loop.time() + self.timeout_s
        servers = await self._shards.servers(deadline)
        where, _, at = cursor.partition(b" ")
        left, dropped, seen = min(max(count, 1), BATCH_MAX), 0, 0
        met: set[bytes] = set()
        # A server that has gone meanwhile: continue with the next one.
        rest = [server for server in servers if server.where.encode() >= where]
        for server in rest:
            position = at if server.where.encode() == where else b"0"
            while True:
                if left <= 0:
                    cursor = b"%b %b" % (server.where.encode(), position)
                    return Swept(cursor, dropped, frozenset(met), seen)
                step = min(left, PUBLISH_KEYS)
                deadline = self._loop.time() + self.timeout_s
                position, names = await self._scan(server, position, step, deadline)
                entries = await self._owners(server, names, deadline)
                for owners in entries.values():
                    met.update(owners)
                    seen += len(owners)
                dropped += await self._drop(server, entries, gone, deadline)
                left -= max(step, len(names))
                if position == b"0":
                    break
        return Swept(b"", dropped, frozenset(met), seen)

    async def _scan(
        self, server: Server, position: bytes, count: int, deadline: float
    ) -> tuple[bytes, list[bytes]]:
        """The names of blocks from there on, and the next position."""
        command: Command = ("SCAN", position, "MATCH", self._pattern, "COUNT", count)
        (reply,) = await self._ask(server, [command], WRITING, deadline)
        match reply:
            case [bytes(position), [*found]]:
                return position, [name for name in found if self._tag(name) is not None]
        raise Refused(server.where, "GARBAGE instead of the answer to SCAN")

    def _tag(self, name: bytes) -> int | None:
        """The group of a block, by its name in Redis; None if the name is foreign."""
        tag = tag_of(name[-KEY_BYTES:])
        start = self._blocks[tag]
        ours = name.startswith(start) and len(name) == len(start) + DIGEST_BYTES + KEY_BYTES
        return tag if ours else None

    async def _owners(
        self, server: Server, names: list[bytes], deadline: float
    ) -> dict[bytes, tuple[bytes, ...]]:
        """Whose entries each of these blocks has. Many values are equal, so each is decoded once."""
        parts = self._in_commands(names)
        if not parts:
            return {}
        replies = await self._ask(server, [("MGET", *part) for part in parts], WRITING, deadline)
        known: dict[bytes, tuple[bytes, ...]] = {}
        found: dict[bytes, tuple[bytes, ...]] = {}
        for part, reply in zip(parts, replies, strict=True):
            if not isinstance(reply, list) or len(reply) != len(part):
                raise Refused(server.where, "GARBAGE instead of values")
            for name, value in zip(part, reply, strict=True):
                if isinstance(value, bytes):
                    if value not in known:
                        known[value] = _owners_in(value)
                    found[name] = known[value]
        return found

    async def _drop(
        self,
        server: Server,
        entries: dict[bytes, tuple[bytes, ...]],
        dead: frozenset[bytes],
        deadline: float,
    ) -> int:
        """Remove entries of the dead from the blocks that have some; returns how many."""
        hit = [name for name, owners in entries.items() if not dead.isdisjoint(owners)]
        commands: list[Command] = []
        for part in self._in_commands(hit):
            here = dead.intersection(owner for name in part for owner in entries[name])
            commands.append(("EVAL", SWEEP, len(part), *part, b"".join(here)))
        if not commands:
            return 0
        dropped = 0
        for reply in await self._ask(server, commands, WRITING, deadline):
            if not isinstance(reply, int):
                raise Refused(server.where, "GARBAGE instead of the answer to a sweep")
            dropped += reply
        return dropped

    def _in_commands(self, names: list[bytes]) -> list[Sequence[bytes]]:
        """Names of blocks of one server, as many together as a command may have."""
        groups = [names]
        if not self._shards.in_one:
            by_tag: dict[int | None, list[bytes]] = {}
            for name in names:
                by_tag.setdefault(self._tag(name), []).append(name)
            groups = list(by_tag.values())
        return [part for group in groups for part in parts_of(group, PUBLISH_KEYS)]

    async def _ask(
        self, server: Server, commands: Sequence[Command], lane: int, deadline: float
    ) -> list[Any]:
        """The replies of one server, all of which must be good."""
        try:
            replies = await server.ask(lane, pack(commands), len(commands), deadline)
            refuse_errors(server.where, replies)
        except Unavailable:
            self._shards.doubt()
            raise
        return replies

    async def close(self) -> None:
        """See `Directory`."""
        await self._shards.close()


def _mask_bytes(parts: int) -> int:
    return -(-parts // 8)


@lru_cache(maxsize=512)
def _entry_format(width: int) -> struct.Struct:
    return struct.Struct(f"{INCARNATION_BYTES}sB{width}s")


def _entries(value: bytes, parts: int) -> tuple[list[Entry], bool]:
    """The valid entries in a value, and whether all of it is valid."""
    width = _mask_bytes(parts)
    head, body = value[:_HEAD_BYTES], value[_HEAD_BYTES:]
    if head != width.to_bytes(_HEAD_BYTES, "little") or len(body) % (_OWNER_BYTES + width):
        return [], False
    entries = [
        Entry(incarnation, tier, int.from_bytes(mask, "little"))
        for incarnation, tier, mask in _entry_format(width).iter_unpack(body)
    ]
    good = [e for e in entries if e.tier in TIER_BYTES and 0 < e.mask < 1 << parts]
    return good, len(good) == len(entries) > 0


def _owners_in(value: bytes) -> tuple[bytes, ...]:
    """Whose entries a value has, of whichever namespace; none of a malformed one."""
    size = _OWNER_BYTES + int.from_bytes(value[:_HEAD_BYTES], "little")
    if len(value) < _HEAD_BYTES or (len(value) - _HEAD_BYTES) % size:
        return ()
    return tuple(value[at : at + INCARNATION_BYTES] for at in range(_HEAD_BYTES, len(value), size))

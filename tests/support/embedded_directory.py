"""A directory in this process, for tests and simulations of many nodes.

It fulfils the contract of `directory/base.py`, marks included; nodes of a simulated cluster share one object.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Sequence

from kvpool.errors import InvalidRequest
from kvpool.placement.directory.base import BATCH_MAX, Entry, Swept
from kvpool.placement.directory.checks import (
    ENTRIES_MAX,
    check_incarnations,
    check_keys,
    check_publication,
)
from kvpool.placement.key_groups import TAGS, tag_of

MARK_BYTES = 8
BLOCKS_MAX = 4 << 20

# Blocks are in buckets, so that a sweep can continue from its cursor, and a full directory finds an
# old block, without examining all the others. With a million blocks a bucket holds some 250.
_BUCKETS_A_TAG = 64
_BUCKETS = TAGS * _BUCKETS_A_TAG

_Bucket = dict[bytes, tuple[Entry, ...]]  # digest and key: entries, the oldest first


class EmbeddedDirectory:
    """See `Directory`. Takes about 250 bytes a block.

    blocks_max: the limit, spread over 4,096 buckets and rounded up to a multiple of that. A block
        beyond it replaces the oldest one of its bucket: a hint is lost,
        without a new mark. rng: makes the marks; seed it for reproducible runs.
    """

    def __init__(self, *, blocks_max: int = BLOCKS_MAX, rng: random.Random | None = None) -> None:
        self._rng = random.SystemRandom() if rng is None else rng
        self._bucket_max = max(1, -(-blocks_max // _BUCKETS))
        self._buckets: list[_Bucket] = [{} for _ in range(_BUCKETS)]
        self._marks = [self._rng.randbytes(MARK_BYTES) for _ in range(TAGS)]

    @property
    def blocks(self) -> int:
        """How many blocks have an entry. Walks the buckets: for tests and status pages."""
        return sum(map(len, self._buckets))

    async def locate(self, digest: bytes, parts: int, keys: Sequence[bytes]) -> list[list[Entry]]:
        """See `Directory`. Raises `InvalidRequest` for what can never work."""
        check_keys(digest, parts, keys)
        return [list(self._bucket(key).get(digest + key, ())) for key in keys]

    async def publish(
        self,
        digest: bytes,
        parts: int,
        incarnation: bytes,
        tier: int,
        keys: Sequence[bytes],
        masks: Sequence[int],
    ) -> None:
        """See `Directory`. Raises `InvalidRequest` for what can never work."""
        check_publication(digest, parts, incarnation, tier, keys, masks)
        shared: dict[int, tuple[Entry, ...]] = {}  # most blocks of a batch have one mask, one entry
        for key, mask in zip(keys, masks, strict=True):
            mine = shared.get(mask)
            if mine is None:
                mine = shared[mask] = (Entry(incarnation, tier, mask),) if mask else ()
            self._set(self._bucket(key), digest + key, incarnation, tier, mine)

    def _set(
        self, bucket: _Bucket, name: bytes, incarnation: bytes, tier: int, mine: tuple[Entry, ...]
    ) -> None:
        old = bucket.get(name, ())
        owners = [entry[:2] for entry in old]
        if (incarnation, tier) in owners:
            at = owners.index((incarnation, tier))
            new = old[:at] + mine + old[at + 1 :]
        else:
            new = old + mine
        if not new:
            bucket.pop(name, None)
            return
        bucket[name] = new[-ENTRIES_MAX:]
        if len(bucket) > self._bucket_max:
            del bucket[next(iter(bucket))]

    async def marks(self) -> Sequence[bytes | None]:
        """See `Directory`."""
        return tuple(self._marks)

    async def sweep(self, dead: Collection[bytes], cursor: bytes, count: int) -> Swept:
        """See `Directory`. Examines whole buckets, and at most a batch of blocks.

        Raises `InvalidRequest` for a foreign cursor.
        """
        check_incarnations(dead)
        at = int.from_bytes(cursor, "big")
        if at >= _BUCKETS:
            raise InvalidRequest("this cursor is not from a sweep of an embedded directory")
        gone = frozenset(dead)
        count = min(count, BATCH_MAX)
        seen = dropped = examined = 0
        met: set[bytes] = set()
        while at < _BUCKETS and seen < count:
            bucket = self._buckets[at]
            seen += len(bucket)
            examined += sum(map(len, bucket.values()))
            met.update(entry.incarnation for entries in bucket.values() for entry in entries)
            dropped += _drop(bucket, gone)
            at += 1
        cursor = b"" if at == _BUCKETS else at.to_bytes(2, "big")
        return Swept(cursor, dropped, frozenset(met), examined)

    def lose(self, tags: Iterable[int] | None = None) -> None:
        """Empty these groups, or all, and change their marks: simulates a lost server."""
        for tag in range(TAGS) if tags is None else tags:
            for bucket in self._buckets[tag * _BUCKETS_A_TAG : (tag + 1) * _BUCKETS_A_TAG]:
                bucket.clear()
            self._marks[tag] = self._rng.randbytes(MARK_BYTES)

    async def close(self) -> None:
        """See `Directory`. Its contents stay: others may share this object."""

    def _bucket(self, key: bytes) -> _Bucket:
        return self._buckets[tag_of(key) * _BUCKETS_A_TAG + key[0] % _BUCKETS_A_TAG]


def _drop(bucket: _Bucket, dead: frozenset[bytes]) -> int:
    """Remove the entries of these incarnations from a bucket; returns their number."""
    hit = [name for name, entries in bucket.items() if any(e.incarnation in dead for e in entries)]
    dropped = 0
    for name in hit:
        kept = tuple(entry for entry in bucket[name] if entry.incarnation not in dead)
        dropped += len(bucket[name]) - len(kept)
        if kept:
            bucket[name] = kept
        else:
            del bucket[name]
    return dropped

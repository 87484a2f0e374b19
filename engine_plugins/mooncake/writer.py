"""Storing, replacing and removing objects.

A new version (`ObjectWriter.replace`) removes the old block or head from all nodes and stores a new one. So a reader
gets one version or the other, whole, or nothing in between; a node that does not answer meanwhile may go on giving the
old one, and the writer is told (`UNAVAILABLE`).

Two puts of a key at a time may each find nothing, and store a block and a head. So a new version, like a removal, asks
nobody where the key is: it removes it from all namespaces, on all nodes.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvpool.engine_plugins.mooncake import codes
from kvpool.engine_plugins.mooncake.blocks import Blocks, How
from kvpool.engine_plugins.mooncake.heads import Chunks, Heads, Limits
from kvpool.engine_plugins.mooncake.labels import (
    INLINE_BYTES_MAX,
    Head,
    chunked_block,
    inline_block,
    view,
    whole_label,
)
from kvpool.engine_plugins.mooncake.pieces import Addresses, Pieces, copied
from kvpool.engine_plugins.mooncake.spaces import EXACT_BYTES_MAX, Space, Spaces
from kvpool.errors import KvpoolError

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Put:
    """One call. found: a code for each key. old: the heads that are stored under the keys, by their places, of new
    versions; what has the keys is then removed first, from wherever it is. None: nothing is removed.
    """

    keys: Sequence[bytes]
    objects: Sequence[Pieces]
    how: How
    found: list[int]
    old: dict[int, Head] | None = None


@dataclass(frozen=True, eq=False)
class ObjectWriter:
    """Thread-safe. Nothing here raises for what the pool does: keys get the codes of `mooncake.store`."""

    _spaces: Spaces
    _blocks: Blocks
    _heads: Heads
    _chunks: Chunks
    _limits: Limits

    def put(self, keys: Sequence[bytes], objects: Sequence[Pieces], how: How) -> list[int]:
        """Store objects; `OK` for each that is stored then, by this put or before, else a code."""
        one = _Put(keys, objects, how, [codes.OK] * len(keys))
        try:
            where, _ = self._spaces.find(self._spaces.packed(keys))
            missing = [at for at, space in enumerate(where) if space is None]
            if missing and self._blocks.away:
                return [codes.UNAVAILABLE] * len(keys)
            in_heads = [at for at, space in enumerate(where) if space and not space.size]
            if in_heads:
                self._put_again(one, in_heads)
            self._put_missing(one, missing)
        except KvpoolError as error:
            logger.warning("a put of %d objects failed: %s", len(keys), error)
            return [codes.code_of(error)] * len(keys)
        return one.found

    def _put_again(self, one: _Put, some: list[int]) -> None:
        """Objects whose key has a head already: those of which chunks were evicted are stored anew."""
        heads = self._heads.find([one.keys[at] for at in some])
        old = {
            at: head
            for at, head, whole in zip(some, heads, self._chunks.whole(heads), strict=True)
            if head is not None and not whole
        }
        if old:
            unique = {one.keys[at]: at for at in reversed(old)}
            again = _Put(one.keys, one.objects, one.how, one.found, old)
            self._put_heads(again, self._spaces.for_heads(), list(unique.values()))

    def replace(self, keys: Sequence[bytes], objects: Sequence[Pieces], how: How) -> list[int]:
        """Store objects in place of those of the same keys; `OK`, or a code."""
        safe = list(objects)
        one = _Put(keys, safe, how, [codes.OK] * len(keys))
        try:
            last = {key: at for at, key in enumerate(keys)}  # of equal keys the last one counts
            good = []
            for at in last.values():
                pieces = _safe(objects[at])
                if pieces is None:
                    one.found[at] = codes.INVALID
                else:
                    safe[at] = pieces
                    good.append(at)
            one.old = self._heads.near(keys)
            self._put_missing(one, good)
        except KvpoolError as error:
            logger.warning("an upsert of %d objects failed: %s", len(keys), error)
            return [self._blocks.code_of(error)] * len(keys)
        return [one.found[last[key]] for key in keys]

    def _put_missing(self, one: _Put, missing: list[int]) -> None:
        groups: dict[int, list[int]] = {}
        first: dict[bytes, int] = {}
        again: list[int] = []
        for at in missing:
            if first.setdefault(one.keys[at], at) == at:
                groups.setdefault(one.objects[at].nbytes, []).append(at)
            else:
                again.append(at)
        in_heads: list[int] = []
        for size, some in groups.items():
            space = self._spaces.space_for(size, len(some))
            if space.size:
                self._remove_old(one, some)
                keys, objects = one.keys, one.objects
                blocks = {at: [objects[at], view(whole_label(keys[at], size))] for at in some}
                self._store(one, space, blocks)
            else:
                in_heads += some
        if in_heads:
            self._put_heads(one, self._spaces.for_heads(), in_heads)
        for at in again:
            one.found[at] = one.found[first[one.keys[at]]]

    def _put_heads(self, one: _Put, space: Space, some: list[int]) -> None:
        """What they take the place of is removed once their chunks are stored."""
        blocks: dict[int, list[Pieces]] = {}
        chunked: dict[int, Head] = {}
        for at in some:
            pieces = one.objects[at]
            if pieces.nbytes <= INLINE_BYTES_MAX:
                blocks[at] = inline_block(one.keys[at], pieces)
                continue
            one.found[at], head = self._chunks.put(pieces, one.how)
            if one.found[at] == codes.OK:
                chunked[at] = head
                blocks[at] = chunked_block(one.keys[at], head)
        if not blocks:
            return
        try:
            self._remove_old(one, blocks)
        except KvpoolError:
            self._chunks.drop(chunked.values())
            raise
        self._store(one, space, blocks)
        self._chunks.drop(head for at, head in chunked.items() if one.found[at] != codes.OK)

    def _remove_old(self, one: _Put, some: Collection[int]) -> None:
        """What the keys at some places have, for a new version. Raises `KvpoolError`."""
        if one.old is not None:
            self._remove(
                [one.keys[at] for at in some], [one.old[at] for at in some if at in one.old]
            )

    def _store(self, one: _Put, space: Space, blocks: dict[int, list[Pieces]]) -> None:
        """Store a block for each of some keys. Raises `KvpoolError`."""
        packed = self._spaces.packed([one.keys[at] for at in blocks])
        stored = self._blocks.store(space.ns, packed, list(blocks.values()), one.how)
        for at, code in zip(blocks, stored, strict=True):
            one.found[at] = code

    def remove(self, keys: Sequence[bytes]) -> list[int]:
        """From all nodes; `OK`, `NOT_FOUND`, or `UNAVAILABLE` where a node may have kept it."""
        if not keys:
            return []
        try:
            gone = self._remove(keys, self._heads.near(keys).values())
        except KvpoolError as error:
            logger.warning("a removal of %d objects failed: %s", len(keys), error)
            return [self._blocks.code_of(error)] * len(keys)
        missing = codes.UNAVAILABLE if self._blocks.away else codes.NOT_FOUND
        return [codes.OK if one else missing for one in gone]

    def _remove(self, keys: Sequence[bytes], old: Collection[Head]) -> bytes:
        """From all namespaces, on all nodes; one byte a key, 1 where there was a block. Raises `KvpoolError` if a node
        did not answer.

        old: the heads under some of the keys, whose chunks are dropped.
        """
        gone = self._spaces.remove(self._spaces.packed(keys), self._limits.others_s)
        if old:
            self._chunks.drop(old)
        return gone


def _safe(pieces: Pieces) -> Pieces | None:
    """The same, of memory that is there: nothing is removed for an object that cannot be read. None: it is not there.

    Large objects are stored in chunks before the old one is removed, so that they need not be copied first.
    """
    if not isinstance(pieces, Addresses) or pieces.nbytes > EXACT_BYTES_MAX:
        return pieces
    return copied(pieces)

"""Heads of objects, and the chunks that the large ones are in.

Chunks are stored before their head, under a name that was drawn for this version of the object: a head never leads to
other bytes than those that were put with it.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvpool.client import NO_ROW, Client, Presence
from kvpool.engine_plugins.mooncake import codes
from kvpool.engine_plugins.mooncake.blocks import Blocks, How, reading
from kvpool.engine_plugins.mooncake.catalog import LOOKUP_S
from kvpool.engine_plugins.mooncake.labels import (
    CHUNK_BYTES,
    HEAD_BYTES,
    KEYS_MAX,
    LABEL_BYTES,
    NAME_BYTES,
    Head,
    head_of,
    view,
    zeros,
)
from kvpool.engine_plugins.mooncake.pieces import BadAddressError, Pieces
from kvpool.engine_plugins.mooncake.spaces import Spaces
from kvpool.errors import KvpoolError

logger = logging.getLogger(__name__)

UNASKED_BYTES = 64 << 20
"""Before the chunks of larger objects are stored, the daemon is asked how much it can hold."""
DROPPED_MAX = 32
DROPPED_BYTES_MAX = 32 << 20


@dataclass
class Limits:
    """May be changed at any time. read_s: how long a read waits for blocks that are on disks or other nodes. others_s: how long a removal waits for
    other nodes.
    """

    read_s: float = 5.0
    others_s: float = 2.0


@dataclass(frozen=True, eq=False)
class Heads:
    """Thread-safe."""

    _spaces: Spaces
    _blocks: Blocks
    _limits: Limits

    def find(self, keys: Sequence[bytes]) -> list[Head | None]:
        """Those that are in memory here, or come in time."""
        found = self._within(keys, 0.0)
        return self._within(keys, self._limits.read_s) if None in found else found

    def near(self, keys: Sequence[bytes]) -> dict[int, Head]:
        """Those that are near, by the keys' places; others are not waited for."""
        found = enumerate(self._within(keys, LOOKUP_S))
        return {at: head for at, head in found if head is not None}

    def _within(self, keys: Sequence[bytes], wait_s: float) -> list[Head | None]:
        nothing: list[Head | None] = [None] * len(keys)
        space = self._spaces.heads
        if space is None or not keys:
            return nothing
        lease = self._blocks.acquire(space.ns, self._spaces.packed(keys), wait_s)
        if lease is None:
            return nothing
        with reading(lease):
            slots = lease.slots[0]
            table = slots.table
            blocks = [
                b"" if row == NO_ROW else table[row, :HEAD_BYTES].tobytes()
                for row in slots.rows.tolist()
            ]
            if not lease.valid:
                return nothing
        return [head_of(key, block) for key, block in zip(keys, blocks, strict=True)]


class Chunks:
    """Thread-safe."""

    def __init__(self, client: Client, spaces: Spaces, blocks: Blocks, limits: Limits) -> None:
        self._client = client
        self._spaces = spaces
        self._blocks = blocks
        self._limits = limits
        self._lock = threading.Lock()
        self._dropped: list[Head] = []

    def whole(self, heads: Sequence[Head | None]) -> list[bool]:
        """For each head, whether it is there and all its chunks are."""
        whole = [head is not None for head in heads]
        wanted: dict[int, list[tuple[int, bytes]]] = {}
        for at, head in enumerate(heads):
            for rung, chunks in head.chunks().items() if head is not None else ():
                wanted.setdefault(rung, []).extend((at, chunk.key) for chunk in chunks)
        for rung, listed in wanted.items():
            ns = self._spaces.chunks(rung)
            for first in range(0, len(listed), KEYS_MAX):
                some = listed[first : first + KEYS_MAX]
                packed = b"".join([key for _, key in some])
                there = self._client.present(ns, packed, wait_s=LOOKUP_S)
                for (at, _), near in zip(some, there.tolist(), strict=True):
                    whole[at] &= near != Presence.NOWHERE
        return whole

    def read(self, head: Head, pieces: Pieces) -> int:
        """How many bytes, or a code."""
        several = head.length > CHUNK_BYTES
        if several:
            pieces = pieces.cut(0, head.length)
        for rung, chunks in head.chunks().items():
            packed = b"".join([chunk.key for chunk in chunks])
            lease = self._blocks.acquire(self._spaces.chunks(rung), packed, self._limits.read_s)
            if lease is None:
                return codes.NOT_FOUND
            with reading(lease):
                slots = lease.slots[0]
                table, fd, stride = slots.table, slots.fd, slots.stride
                for chunk, row in zip(chunks, slots.rows.tolist(), strict=True):
                    label = head.label_of(chunk)
                    if row == NO_ROW or table[row, rung : rung + LABEL_BYTES].tobytes() != label:
                        return codes.NOT_FOUND
                    part = pieces.cut(chunk.start, chunk.end) if several else pieces
                    try:
                        part.read(table[row, : chunk.end - chunk.start], fd, row * stride)
                    except BadAddressError:
                        return codes.INVALID
                if not lease.valid:
                    return codes.LEASE_LOST
        return head.length

    def put(self, pieces: Pieces, how: How) -> tuple[int, Head]:
        """A code, and a head for the chunks, which are stored if that is `OK`. Raises `KvpoolError`."""
        head = Head(pieces.nbytes, None, secrets.token_bytes(NAME_BYTES), how.pin == "hard")
        if head.length > UNASKED_BYTES and head.length > self._held_at_most():
            return codes.NO_SPACE, head
        for rung, chunks in head.chunks().items():
            blocks: list[list[Pieces]] = []
            for chunk in chunks:
                size = chunk.end - chunk.start
                part = pieces.cut(chunk.start, chunk.end) if size < head.length else pieces
                blocks.append([part, zeros(rung - size), view(head.label_of(chunk))])
            packed = b"".join([chunk.key for chunk in chunks])
            stored = self._blocks.store(self._spaces.chunks(rung), packed, blocks, how)
            failed = next((code for code in stored if code != codes.OK), None)
            if failed is not None:
                self.drop([head])
                return failed, head
        return codes.OK, head

    def _held_at_most(self) -> int:
        """Bytes of this node's memory and disks that the tenant may use. Raises `KvpoolError`."""
        usage = self._client.stats().tenants[self._client.tenant].usage
        return sum(place.part_bytes for place in usage.dram + usage.ssd)

    def drop(self, heads: Iterable[Head]) -> None:
        """Chunks that no head leads to any more: removed together, or evicted if this process ends before. Those with hard
        pins would stay for ever: they are removed at once, on all nodes.
        """
        with self._lock:
            self._dropped += [head for head in heads if head.inline is None]
            kept = any(head.kept for head in self._dropped)
            if (
                not kept
                and len(self._dropped) < DROPPED_MAX
                and sum(head.length for head in self._dropped) < DROPPED_BYTES_MAX
            ):
                return
            dropped, self._dropped = self._dropped, []
        keys: dict[int, list[bytes]] = {}
        for head in dropped:
            for rung, chunks in head.chunks().items():
                keys.setdefault(rung, []).extend(chunk.key for chunk in chunks)
        for rung, listed in keys.items():
            try:
                others_s = self._limits.others_s if kept else 0.0
                self._client.remove(self._spaces.chunks(rung), b"".join(listed), others_s=others_s)
            except KvpoolError as error:
                logger.info("chunks of removed objects stay until they are evicted: %s", error)

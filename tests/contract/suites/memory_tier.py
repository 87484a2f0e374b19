"""Tiers that keep blocks in a dict: the ports of `kvpool.storage.base` as runnable documentation.

For tests that need any tier. Nothing is written in the background: blocks get there
by `store`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from xxhash import xxh3_128_digest

from kvpool.daemon.core.blocks import Block, NamespaceState, PartTable
from kvpool.errors import Unavailable
from kvpool.storage.base import Occupancy
from kvpool.types import BlockStatus, split_keys
from kvpool.wire import worker as worker_wire


class _Kept(NamedTuple):
    number: int  # of the write
    data: bytes
    checksum: bytes


class _DictTier:
    """Common to both kinds.

    segments: the bytes of each tenant's memory, by number. capacity_bytes: beyond it the oldest are evicted.
    """

    def __init__(self, segments: Mapping[int, memoryview], capacity_bytes: int) -> None:
        self.serving = True
        self._segments = segments
        self._capacity = capacity_bytes
        self._parts: dict[bytes, int] = {}  # of each namespace, by directory digest
        self._kept: dict[tuple[bytes, int], dict[bytes, _Kept]] = {}
        self._writes = 0

    async def store(self, blocks: Sequence[Block]) -> bytes:
        """See `Tier`."""
        return bytes([self._store(block) for block in blocks])

    def _store(self, block: Block) -> BlockStatus:
        table = block.table
        if not self.serving:
            return BlockStatus.FAILED
        if table.blocks.get(block.key) is not block:
            return BlockStatus.ABSENT
        kept = self._of(table)
        if block.key not in kept:
            nbytes = table.spec.nbytes
            if nbytes > self._capacity:
                return BlockStatus.NO_SPACE
            while self.occupancy().used_bytes + nbytes > self._capacity:
                self._drop_oldest()
            data = bytes(self._slot(table, block.row))
            self._writes += 1
            kept[block.key] = _Kept(self._writes, data, block.checksum)
        return BlockStatus.PRESENT

    async def load(
        self, table: PartTable, keys: Sequence[bytes], rows: Sequence[int], seconds: float
    ) -> worker_wire.Pulled:
        """See `Tier`."""
        if not self.serving:
            raise Unavailable("the tier is closed")
        kept = self._of(table)
        status, checksums = bytearray(len(keys)), [bytes(16)] * len(keys)
        for at, (key, row) in enumerate(zip(keys, rows, strict=True)):
            found = kept.get(key)
            if found is None:
                continue
            if xxh3_128_digest(found.data) == found.checksum:
                self._slot(table, row)[:] = found.data
                status[at], checksums[at] = BlockStatus.PRESENT, found.checksum
            else:
                del kept[key]
                status[at] = BlockStatus.MISMATCH
        return worker_wire.Pulled(bytes(status), b"".join(checksums), 0.0)

    def enter(self, namespace: NamespaceState) -> None:
        """See `Tier`."""
        for former in namespace.tenant.epochs[namespace.base][:-1]:
            for part in range(len(former.parts)):
                self._kept.pop((former.directory_digest, part), None)

    def occupancy(self) -> Occupancy:
        """See `Tier`."""
        kept = [one for part in self._kept.values() for one in part.values()]
        return Occupancy(self._capacity, sum(len(one.data) for one in kept), len(kept))

    async def close(self) -> None:
        """See `Tier`."""
        self.serving = False

    def _of(self, table: PartTable) -> dict[bytes, _Kept]:
        namespace = table.namespace
        self._parts[namespace.directory_digest] = len(namespace.parts)
        return self._kept.setdefault((namespace.directory_digest, table.part), {})

    def _slot(self, table: PartTable, row: int) -> memoryview:
        start = row * table.stride
        return self._segments[table.namespace.tenant.segment][start : start + table.spec.nbytes]

    def _drop_oldest(self) -> None:
        _, part, key = min(
            (kept.number, part, key)
            for part, found in self._kept.items()
            for key, kept in found.items()
        )
        del self._kept[part][key]

    def _masks(self, digest: bytes, keys: Sequence[bytes]) -> list[int]:
        parts = [(part, self._kept.get((digest, part), {})) for part in range(self._parts[digest])]
        return [sum(1 << part for part, kept in parts if key in kept) for key in keys]

    def _remove(self, namespace: NamespaceState, packed: bytes) -> set[bytes]:
        gone: set[bytes] = set()
        for part in range(len(namespace.parts)):
            kept = self._kept.get((namespace.directory_digest, part), {})
            gone |= {key for key in split_keys(packed) if kept.pop(key, None) is not None}
        return gone


class MemoryTier(_DictTier):
    """A `LocalTier`."""

    def held(self, table: PartTable) -> list[Container[bytes]]:
        """See `LocalTier`."""
        kept = self._of(table)
        return [kept] if kept else []

    def masks(self, digest: bytes, keys: Sequence[bytes]) -> tuple[int, list[int]]:
        """See `LocalTier`."""
        if digest not in self._parts:
            return 0, []
        return self._parts[digest], self._masks(digest, keys)

    def walk(self, cursor: int, count: int) -> tuple[list[tuple[bytes, list[bytes]]], int | None]:
        """See `LocalTier`: in the order in which they were stored."""
        found = sorted(
            (one.number, digest, key)
            for (digest, _), kept in self._kept.items()
            for key, one in kept.items()
            if one.number > cursor
        )
        groups: dict[bytes, list[bytes]] = {}
        for _, digest, key in found[:count]:
            groups.setdefault(digest, []).append(key)
        return list(groups.items()), found[count - 1][0] if len(found) > count else None

    def remove(self, namespace: NamespaceState, packed: bytes) -> set[bytes]:
        """See `LocalTier`."""
        return self._remove(namespace, packed)


class SharedMemoryTier(_DictTier):
    """A `SharedTier`."""

    async def where(
        self,
        namespace: NamespaceState,
        tables: Sequence[PartTable],
        keys: Sequence[bytes],
        *,
        prefix: bool = False,
    ) -> dict[bytes, int]:
        """See `SharedTier`."""
        asked = sum(1 << table.part for table in tables)
        digest = namespace.directory_digest
        if digest not in self._parts:
            return {}
        masks = zip(keys, self._masks(digest, keys), strict=True)
        return {key: mask & asked for key, mask in masks if mask & asked}

    async def remove(self, namespace: NamespaceState, packed: bytes) -> set[bytes]:
        """See `SharedTier`."""
        return self._remove(namespace, packed)

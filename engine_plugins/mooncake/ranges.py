"""Objects that are read or written in ranges, also by several calls: in sessions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import xxhash

from kvpool.engine_plugins.mooncake import codes
from kvpool.engine_plugins.mooncake.batches import Batches, encoded
from kvpool.engine_plugins.mooncake.pieces import (
    Addresses,
    Bytes1D,
    Memory,
    View,
    are_runs,
    copied,
    fill,
)
from kvpool.engine_plugins.mooncake.values import (
    BufferHandle,
    Config,
    Ints,
    Keys,
    Lists,
    ReplicateConfig,
    all_of,
    as_config,
)

SESSIONS_MAX = 65_536
SESSION_BYTES_MAX = 4 << 30


@dataclass
class _Reading:
    """An object that is read in pieces. checksum: of the version of which the first piece was, then."""

    size: int
    checksum: bytes = b""


@dataclass
class _Writing:
    """An object that is written in pieces before it is put."""

    data: bytearray
    config: ReplicateConfig


@dataclass(frozen=True, eq=False)
class Ranges:
    """Ranges of objects, read through copies of them. Thread-safe."""

    _memory: Memory
    _batches: Batches

    def of_objects(
        self, buffer_ptr: int, keys: Keys, dst_offsets: Lists, src_offsets: Lists, sizes: Lists
    ) -> list[list[int]]:
        """Ranges of several objects into one buffer: for each object and range its bytes, or a code."""
        if not len(keys) == len(dst_offsets) == len(src_offsets) == len(sizes):
            return [[codes.INVALID] for _ in keys]
        end = self._memory.end_of(buffer_ptr)
        found = []
        for key, to, at, size in zip(keys, dst_offsets, src_offsets, sizes, strict=True):
            if not len(to) == len(at) == len(size):
                found.append([codes.INVALID] * max(len(to), len(at), len(size)))
                continue
            found.append(self.of_object(key, [buffer_ptr + offset for offset in to], at, size, end))
        return found

    def of_object(
        self,
        key: str,
        ptrs: Ints,
        offsets: Ints,
        sizes: Ints,
        end: int | None = None,
        is_right: Callable[[Bytes1D], bool] | None = None,
    ) -> list[int]:
        """Ranges of one object to addresses: for each its bytes, or a code.

        end: of the memory that all must be in. is_right: whether the object is the expected version.
        """
        [data] = self._batches.read_new([key], BufferHandle)
        whole = np.frombuffer(data or b"", np.uint8)
        if data is None or (is_right is not None and not is_right(whole)):
            return all_of(codes.NOT_FOUND, sizes)
        return [
            codes.INVALID
            if end is not None and ptr + size > end
            else self._copy_out(whole, ptr, offset, size)
            for ptr, offset, size in zip(ptrs, offsets, sizes, strict=True)
        ]

    def _copy_out(self, whole: Bytes1D, ptr: int, offset: int, size: int) -> int:
        if offset < 0 or offset + size > whole.size:
            return codes.INVALID
        [piece] = self._memory.runs([ptr], [size])
        if piece is None or not fill(piece, whole[offset : offset + size]):
            return codes.INVALID
        return size


class ReadSessions:
    """Thread-safe."""

    def __init__(self, batches: Batches, ranges: Ranges) -> None:
        self._batches = batches
        self._ranges = ranges
        self._lock = threading.Lock()
        self._open: dict[str, _Reading] = {}

    def start(self, keys: Keys) -> list[int]:
        """`OK` for each object that is there and may now be read in ranges, or a code."""
        found = self._batches.sizes(keys)
        if found is None:
            return all_of(codes.UNAVAILABLE, keys)
        started = []
        with self._lock:
            for key, (size, _) in zip(keys, found, strict=True):
                if size < 0:
                    started.append(codes.NOT_FOUND)
                elif len(self._open) >= SESSIONS_MAX and key not in self._open:
                    started.append(codes.NO_SPACE)
                else:
                    self._open[key] = _Reading(size)
                    started.append(codes.OK)
        return started

    def end(self, keys: Keys) -> None:
        """Those of these that there are."""
        with self._lock:
            for key in keys:
                self._open.pop(key, None)

    def end_all(self) -> None:
        """End all sessions."""
        self._open.clear()

    def read(self, key: str, ptrs: Ints, sizes: Ints, offsets: Ints) -> int:
        """Ranges of an object: its bytes in all, or a code."""
        session = self._open.get(key)
        if session is None or not _are_ranges(ptrs, sizes, offsets, session.size):
            return codes.INVALID
        got = self._ranges.of_object(
            key, ptrs, offsets, sizes, is_right=lambda data: self._is_same(session, data)
        )
        return sum(got) if min(got) > 0 else min(got)

    def _is_same(self, session: _Reading, data: Bytes1D) -> bool:
        """Whether it is the version that the session has read of, or its first one."""
        if data.size != session.size:
            return False
        checksum = xxhash.xxh3_128_digest(data.data)
        with self._lock:
            session.checksum = session.checksum or checksum
            return session.checksum == checksum


class WriteSessions:
    """Thread-safe."""

    def __init__(self, batches: Batches, memory: Memory) -> None:
        self._batches = batches
        self._memory = memory
        self._lock = threading.Lock()
        self._open: dict[str, _Writing] = {}
        self._bytes = 0

    def start(self, keys: Keys, sizes: Ints, config: Config) -> list[int]:
        """`OK` for each object that may now be written in ranges, or a code."""
        chosen = as_config(config, len(keys))
        if len(keys) != len(sizes) or chosen is None:
            return all_of(codes.INVALID, keys)
        there = self._batches.exist(keys)
        return [
            self._start(key, size, chosen, exists)
            for key, size, exists in zip(keys, sizes, there, strict=True)
        ]

    def _start(self, key: str, size: int, config: ReplicateConfig, exists: int) -> int:
        if exists < 0:
            return codes.UNAVAILABLE
        if not encoded(key) or size <= 0:
            return codes.INVALID
        with self._lock:
            if exists or key in self._open:
                return codes.EXISTS
            if len(self._open) >= SESSIONS_MAX or self._bytes + size > SESSION_BYTES_MAX:
                return codes.NO_SPACE
            self._open[key] = _Writing(bytearray(size), config)
            self._bytes += size
        return codes.OK

    def write(self, key: str, ptrs: Ints, sizes: Ints, offsets: Ints) -> int:
        """Ranges of an object: its bytes in all, or a code."""
        session = self._open.get(key)
        if session is None or not _are_ranges(ptrs, sizes, offsets, len(session.data)):
            return codes.INVALID
        whole = np.frombuffer(session.data, np.uint8)
        for ptr, size, offset in zip(ptrs, sizes, offsets, strict=True):
            [piece] = self._memory.runs([ptr], [size])
            data = copied(piece) if isinstance(piece, Addresses) else piece
            if data is None:
                return codes.INVALID
            np.copyto(whole[offset : offset + size], data.bytes)
        return sum(sizes)

    def end(self, keys: Keys) -> list[int]:
        """Store what was written: `OK`, or a code. Bytes that were not written are zero."""
        return [self._store(key) for key in keys]

    def _store(self, key: str) -> int:
        session = self._take(key)
        if session is None:
            return codes.INVALID
        data = View(np.frombuffer(session.data, np.uint8))
        return self._batches.put([key], [data], session.config)[0]

    def revoke(self, keys: Keys) -> list[int]:
        """Store nothing: `OK`, or a code."""
        return [codes.INVALID if self._take(key) is None else codes.OK for key in keys]

    def end_all(self) -> None:
        """Store nothing of all sessions."""
        with self._lock:
            self._open.clear()
            self._bytes = 0

    def _take(self, key: str) -> _Writing | None:
        with self._lock:
            session = self._open.pop(key, None)
            if session is not None:
                self._bytes -= len(session.data)
        return session


def _are_ranges(ptrs: Ints, sizes: Ints, offsets: Ints, length: int) -> bool:
    """Whether they are runs of memory, and ranges of an object of this length."""
    return (
        len(ptrs) == len(offsets)
        and are_runs(ptrs, sizes)
        and all(
            offset >= 0 and offset + size <= length
            for offset, size in zip(offsets, sizes, strict=True)
        )
    )

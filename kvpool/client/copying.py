"""Copies between the caller's buffers and slots."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.client.slots import Indices, Slots, differing
from kvpool.errors import InvalidRequest
from kvpool.memory.buffers import (
    Rows2D,
    Source,
    as_bytes,
    pieces_digest,
    read_pieces,
    read_rows,
)
from kvpool.types import Namespace
from kvpool.wire.frame import NO_ROW

_BYTES = np.dtype(np.uint8)
HASH_IN_THREAD_BYTES = 2 << 20  # below this, the handover costs more than it saves


class CopyIn:
    """Copies blocks into slots and computes their checksums concurrently. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hasher: ThreadPoolExecutor | None = None

    def close(self) -> None:
        if self._hasher is not None:
            self._hasher.shutdown(wait=False)

    def __call__(
        self, source: Source, indices: Indices, table: Rows2D, rows: Indices, fd: int
    ) -> bytes:
        """Copy the chosen blocks into rows of the segment; returns their checksums.

        For many bytes a second thread computes them concurrently: copying and hashing both release
        the GIL. When this returns or raises, nobody reads the caller's buffers any more.
        """
        chosen = indices.tolist()
        if len(chosen) * source.nbytes < HASH_IN_THREAD_BYTES:
            source.write(indices, table, rows, fd)
            return source.checksums(chosen)
        going = [True]  # emptied when the checksums are not needed any more
        wanted = itertools.takewhile(lambda _: going, chosen)
        hashing = self._hash_thread().submit(source.checksums, wanted)
        try:
            source.write(indices, table, rows, fd)
            return hashing.result()
        finally:
            if not hashing.done():
                going.clear()
                wait((hashing,))

    def _hash_thread(self) -> ThreadPoolExecutor:
        hasher = self._hasher
        if hasher is None:
            with self._lock:
                if self._hasher is None:
                    self._hasher = ThreadPoolExecutor(1, "kvpool-checksum")
                hasher = self._hasher
        return hasher


def copy_out(slots: Slots, targets: Any, here: npt.NDArray[np.bool_], *, complete: bool) -> None:
    """Copy slots to their destinations (`targets_of`), within the lease; `here` tells which were present.

    complete: all of them are, as the lease says: looking for those that are not takes longer than a small copy.
    """
    if complete:
        here.fill(True)
    else:
        np.not_equal(slots.rows, NO_ROW, out=here)
    if isinstance(targets, list):
        table, fd, stride = slots.table, slots.fd, slots.stride
        for index in np.flatnonzero(here).tolist():
            pieces, row = targets[index], int(slots.rows[index])
            if len(pieces) == 1:
                np.copyto(pieces[0], table[row, : slots.nbytes])
            else:
                read_pieces(fd, row * stride, pieces)
    elif complete:
        read_rows(slots.table, slots.rows, targets)
    else:
        found = np.flatnonzero(here)
        targets[found] = slots.table[slots.rows[found], : slots.nbytes]


def wrong_blocks(slots: Slots, targets: Any, here: npt.NDArray[np.bool_]) -> Indices:
    """Which of the copied slots are not what was committed, by the copies. Raises as `Slots.wrong`."""

    def digest_of(index: int) -> bytes:
        copied = targets[index]
        return pieces_digest(copied if isinstance(targets, list) else [copied])

    return differing(np.flatnonzero(here), digest_of, slots.expected())


def part_bytes(ns: Namespace, part: int) -> int:
    """The bytes of a part of a block. Raises `InvalidRequest`."""
    if not 0 <= part < len(ns.parts):
        raise InvalidRequest(
            f"there is no part {part}: this namespace has parts 0 to {len(ns.parts) - 1}"
        )
    return ns.parts[part].nbytes


def targets_of(out: Any, n: int, nbytes: int) -> Any:
    """Destinations: rows of one array, or for each block a list of flat arrays. Raises `InvalidRequest`."""
    if isinstance(out, (list, tuple)):
        scattered = [
            [as_bytes(piece, writable=True) for piece in item]
            if isinstance(item, (list, tuple))
            else [as_bytes(item, writable=True)]
            for item in out
        ]
        if len(scattered) != n or any(
            sum(piece.size for piece in pieces) != nbytes for pieces in scattered
        ):
            raise InvalidRequest(
                f"the destination must be {n} buffers of {nbytes} bytes, or as many lists of buffers that have "
                "these bytes together"
            )
        return scattered
    if type(out) is np.ndarray and out.dtype is _BYTES and out.shape == (n, nbytes):
        flags = out.flags
        if flags.c_contiguous and flags.writeable:
            return out  # it is what would be made of it
    flat = as_bytes(out, writable=True)
    if flat.size != n * nbytes:
        raise InvalidRequest(
            f"the destination has {flat.size} bytes, but {n} blocks of {nbytes} bytes are to be "
            "copied"
        )
    return flat.reshape(n, nbytes)

"""Compresses blocks before they are written to an SSD store, in memory of their own.

A slot can only be chosen when the compressed length is known, so packing and writing are two
steps. Between them the packed bytes wait in the memory of the process that owns the disk.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.memory.buffers import Bytes1D, Rows2D
from kvpool.storage.codecs import Blosc2, slot_classes

SAMPLE_BYTES = 64 << 10
ITEM_BYTES_TRIED = (2, 1, 4)
"""Sizes of KV elements, the usual one first."""


class Packed(NamedTuple):
    """rows: u8[n, nbytes]; block i is the first `stored[i]` bytes of row i; the rest is undefined.

    stored: u32[n]. Equal to the block's length: not worth compressing, and unchanged there.
    """

    rows: Rows2D
    stored: npt.NDArray[np.uint32]


def pack(source: Rows2D, rows: npt.NDArray[np.int64], nbytes: int) -> Packed:
    """Encode the first `nbytes` of some rows, at least one. In the calling thread, mostly without the GIL.

    The source must not change meanwhile. Takes as much memory as the blocks have.
    Raises `ConfigError` if the blosc2 package cannot be imported.
    """
    codec = Blosc2(_item_bytes(source[rows[0], : min(nbytes, SAMPLE_BYTES)]))
    out = np.empty((len(rows), nbytes), np.uint8)
    stored = np.empty(len(rows), np.uint32)
    for at, row in enumerate(rows.tolist()):
        stored[at] = codec.encode(source[row, :nbytes], out[at]).stored
    return Packed(out, stored)


def slot_contents(
    stored: npt.NDArray[np.uint32], nbytes: int, seal_bytes: int
) -> npt.NDArray[np.uint32]:
    """The bytes that blocks of `nbytes`, packed to `stored`, take in their slots; `nbytes`: not worth it.

    seal_bytes: by how much encryption makes them longer.
    """
    *_, shorter, _ = (0, *slot_classes(nbytes))
    sealed: npt.NDArray[np.uint32] = stored + np.uint32(seal_bytes)
    return np.where(sealed <= shorter, sealed, np.uint32(nbytes))


def _item_bytes(sample: Bytes1D) -> int:
    """The element size that compresses a sample best: namespaces need not state theirs."""
    out = np.empty_like(sample)
    return min(ITEM_BYTES_TRIED, key=lambda size: Blosc2(size).encode(sample, out).stored)

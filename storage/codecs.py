"""Lossless codecs for parts at rest: the encoding of a block's bytes in a slow tier.

A codec belongs to a tier, not to a namespace: decoding returns the original bytes, so engines whose
tiers encode differently still share blocks. Each stored block records its codec, so a
setting may change while old blocks stay readable.

Every block may be stored raw, and is if encoding would not give a shorter slot: then `stored`
is `nbytes` and the codec is `RAW`. Lengths of slots come in at most eight classes a part, so that
an allocator with one class a length has few of them:

    nbytes of a part   |-------|-------|-------|-------|-------|-------|-------|-------|
    slot of a block    1/8 .. 8/8 of nbytes, each rounded up to whole pages

The format of blosc2:

    offset  0        8          40
            | check  | header   | streams of zstd, one for each byte of the elements ...
            | xxh3-64 of the rest, little-endian
                     | blosc2's chunk header: versions, sizes, filters

The check comes first because the decoder is C that parses a disk's bytes: damaged bytes
are refused before it sees them. It does not replace the checksum of the raw bytes, which the
caller still verifies.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import NamedTuple, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvpool.errors import ConfigError

Bytes = NDArray[np.uint8]

PAGE = 4096
SLOT_CLASSES = 8

RAW = 0
BLOSC2 = 1

ITEM_BYTES = (1, 2, 4, 8)
CHECK_BYTES = 8
HEADER_BYTES = 32
LEVEL = 1


class Encoded(NamedTuple):
    """The contents of a slot: the bytes used of it, and the id of the codec that `decode` needs."""

    stored: int
    codec: int


class Codec(Protocol):
    """Encodes and decodes one part of a block at a time. Any number of threads may call at once.

    name: as a setting names it.
    id: as the index of a tier stores it, one byte; never given to another codec.
    """

    name: str
    id: int

    def encode(self, raw: Bytes, out: Bytes) -> Encoded:
        """Write `raw`, encoded or unchanged, to the beginning of `out`.

        raw: the part's bytes, contiguous, at least one.
        out: writable, contiguous, at least as long as `raw`; bytes after `stored` are undefined.
        Neither is kept.
        """

    def length(self, slot: Bytes) -> int:
        """How many bytes were stored at the beginning of `slot`, by their own header: up to its size, or 0.

        0: not this codec's format. `decode` verifies the header.
        """

    def decode(self, stored: Bytes, out: Bytes) -> bool:
        """Fill `out` from bytes stored by this codec. False: `stored` is invalid.

        stored: exactly the bytes that were stored. out: writable, contiguous, of the raw length.
        On False `out` holds anything. True does not promise that the bytes are right: the caller
        verifies their checksum.
        """


class Raw:
    """Stores parts as they are."""

    name = "none"
    id = RAW

    def encode(self, raw: Bytes, out: Bytes) -> Encoded:
        np.copyto(out[: raw.size], raw)
        return Encoded(raw.size, RAW)

    def length(self, slot: Bytes) -> int:
        return slot.size

    def decode(self, stored: Bytes, out: Bytes) -> bool:
        if stored.size != out.size:
            return False
        np.copyto(out, stored)
        return True


class Blosc2:
    """The bytes of a part's elements sorted by significance, then zstd.

    Sign and exponent bytes of KV repeat and mantissas do not, so it pays to separate them.
    Releases the GIL while it works, and works in the calling thread alone. Encoding allocates as much
    as the part once, decoding nothing.

    item_bytes: size of an element of the KV's dtype. A wrong one costs ratio, never bytes. Blocks
        can be decoded by an instance with any other.
    """

    name = "blosc2"
    id = BLOSC2
    BLOCK_BYTES_MAX = 1 << 20
    """One block a MiB: larger ones leave the cache, smaller ones compress and decode worse."""

    def __init__(self, item_bytes: int = 1) -> None:
        """Raises `ConfigError` if the blosc2 package is not installed."""
        if item_bytes not in ITEM_BYTES:
            raise ConfigError(f"elements of {item_bytes} bytes: only 1, 2, 4 and 8 are supported")
        try:
            import blosc2
        except ImportError as error:
            raise ConfigError(
                f"the codec blosc2 needs a package that cannot be imported ({error}): install it (pip install "
                "blosc2), or use the codec none"
            ) from None
        # For the whole process, and off by default: a transfer worker's other threads must continue meanwhile.
        blosc2.set_releasegil(True)
        self._compress = blosc2.compress2
        self._decompress = blosc2.decompress2
        self._parameters = {
            "codec": blosc2.Codec.ZSTD,
            "clevel": LEVEL,
            "filters": [blosc2.Filter.SHUFFLE],
            "splitmode": blosc2.SplitMode.ALWAYS_SPLIT,
            "nthreads": 1,
        }
        self._item_bytes = item_bytes

    def encode(self, raw: Bytes, out: Bytes) -> Encoded:
        nbytes = raw.size
        *_, smaller, _ = (0, *slot_classes(nbytes))
        if smaller:
            chunk = self._compress(
                raw,
                blocksize=min(nbytes, self.BLOCK_BYTES_MAX),
                # blosc2 3.3.5 loses bytes after the last whole element of a block.
                typesize=gcd(self._item_bytes, nbytes),
                **self._parameters,
            )
            stored = CHECK_BYTES + len(chunk)
            if stored <= smaller:
                np.copyto(out[CHECK_BYTES:stored], np.frombuffer(chunk, np.uint8))
                out[:CHECK_BYTES].view("<u8")[0] = xxhash.xxh3_64_intdigest(chunk)
                return Encoded(stored, BLOSC2)
        np.copyto(out[:nbytes], raw)
        return Encoded(nbytes, RAW)

    def length(self, slot: Bytes) -> int:
        if slot.size < CHECK_BYTES + HEADER_BYTES:
            return 0
        stored = CHECK_BYTES + int(slot[CHECK_BYTES + 12 : CHECK_BYTES + 16].view("<i4")[0])
        return stored if CHECK_BYTES + HEADER_BYTES <= stored <= slot.size else 0

    def decode(self, stored: Bytes, out: Bytes) -> bool:
        assert out.flags.writeable  # blosc2 does not check
        chunk = stored[CHECK_BYTES:]
        if chunk.size < HEADER_BYTES:
            return False
        if stored[:CHECK_BYTES].tobytes() != xxhash.xxh3_64_intdigest(chunk.data).to_bytes(
            CHECK_BYTES, "little"
        ):
            return False
        # blosc2 trusts the header for how much it may write.
        raw_bytes, _, chunk_bytes = np.frombuffer(chunk[4:16], "<i4").tolist()
        if raw_bytes != out.size or chunk_bytes != chunk.size:
            return False
        try:
            self._decompress(chunk, dst=out, nthreads=1)
        except (RuntimeError, ValueError):
            return False
        return True


def slot_bytes(stored: int, nbytes: int) -> int:
    """The slot for `stored` bytes of a part of `nbytes`: the smallest class that holds them.

    1 <= stored <= nbytes.
    """
    assert 1 <= stored <= nbytes, (stored, nbytes)
    return next(length for length in slot_classes(nbytes) if length >= stored)


@lru_cache(maxsize=1024)
def slot_classes(nbytes: int) -> tuple[int, ...]:
    """Every length of slot that a part of `nbytes` can have, ascending: at most eight.

    They are the eighths of `nbytes`, each rounded up to whole pages.
    """
    step = SLOT_CLASSES * PAGE
    return tuple(
        sorted({-(-nbytes * eighths // step) * PAGE for eighths in range(1, SLOT_CLASSES + 1)})
    )

"""What the blocks of objects are made of.

    object of a usual size     block = its bytes | label
    other objects              head  = label | the bytes, if they fit; else the chunks' name
                               chunk = bytes | zeros up to the rung | label

A *label* has the whole key (or, if it is long, its SHA-256) and the length. It is compared by every read, so that two
keys with one hash are a miss and never each other's bytes. A chunk's label has its name and number.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash

from kvpool.engine_plugins.mooncake.pieces import Bytes1D, Pieces, View

LABEL_BYTES = 256
HEAD_BYTES = 1024
INLINE_BYTES_MAX = HEAD_BYTES - LABEL_BYTES
CHUNK_BYTES = 1 << 20
KEYS_MAX = 65_536
"""In one request."""
OBJECT_BYTES_MAX = KEYS_MAX * CHUNK_BYTES
"""All its chunks are stored, and leased, by one request."""
NAME_BYTES = 16
LADDER_FACTOR = 1.25
LADDER_FIRST = 1024

_HEAD = struct.Struct(
    "<4sBBHQ"
)  # magic, kind, whether the key is a digest, its length, the object's length
_MAGIC = b"kvpM"
_WHOLE, _INLINE, _CHUNKED, _CHUNK = range(4)
_KEY_BYTES_MAX = LABEL_BYTES - _HEAD.size
_ZEROS = np.zeros(CHUNK_BYTES, np.uint8)


def _ladder() -> list[int]:
    rungs = [LADDER_FIRST]
    while rungs[-1] < CHUNK_BYTES:
        rungs.append(min(-(-int(rungs[-1] * LADDER_FACTOR) // 64) * 64, CHUNK_BYTES))
    return rungs


LADDER = _ladder()
"""Sizes of chunks' blocks, their labels left out."""


def rung_for(nbytes: int) -> int:
    """The smallest rung of the ladder that takes a chunk."""
    return next(rung for rung in LADDER if rung >= nbytes)


@dataclass(frozen=True)
class Owner:
    """What a label says of an object. hashed: its key is longer than a label holds, and `key` the SHA-256 of it."""

    key: bytes
    hashed: bool
    length: int


class Chunk(NamedTuple):
    """start, end: of its bytes in the object. key: the pool's."""

    number: int
    start: int
    end: int
    key: bytes


@dataclass
class Head:
    """What a head says of an object. inline: the bytes of a small one; else name: of the chunks. kept: whether these have
    hard pins.
    """

    length: int
    inline: Bytes1D | None
    name: bytes = b""
    kept: bool = False

    def chunks(self) -> dict[int, list[Chunk]]:
        """The chunks of each size of blocks, by the rung: at most two of them."""
        found: dict[int, list[Chunk]] = {}
        if self.inline is None:
            for number, start in enumerate(range(0, self.length, CHUNK_BYTES)):
                end = min(start + CHUNK_BYTES, self.length)
                key = xxhash.xxh3_128_digest(self.name, number)
                found.setdefault(rung_for(end - start), []).append(Chunk(number, start, end, key))
        return found

    def label_of(self, chunk: Chunk) -> bytes:
        """The label of one of the chunks."""
        named = self.name + chunk.number.to_bytes(8, "little")
        return _label(_CHUNK, named, chunk.end - chunk.start)


def _label(kind: int, key: bytes, length: int) -> bytes:
    long = len(key) > _KEY_BYTES_MAX
    if long:
        key = hashlib.sha256(key).digest()
    return _HEAD.pack(_MAGIC, kind, long, len(key), length) + key.ljust(_KEY_BYTES_MAX, b"\0")


def whole_label(key: bytes, length: int) -> bytes:
    """The label behind the bytes of an object of a usual size."""
    return _label(_WHOLE, key, length)


def view(data: bytes) -> View:
    """Bytes of this process, to be written."""
    return View(np.frombuffer(data, np.uint8))


def zeros(nbytes: int) -> View:
    """So many zeros, to be written."""
    return View(_ZEROS[:nbytes])


def inline_block(key: bytes, pieces: Pieces) -> list[Pieces]:
    """The head of a small object, with its bytes."""
    size = pieces.nbytes
    return [view(_label(_INLINE, key, size)), pieces, zeros(INLINE_BYTES_MAX - size)]


def chunked_block(key: bytes, head: Head) -> list[Pieces]:
    """The head of an object in chunks."""
    start = _label(_CHUNKED, key, head.length) + head.name + bytes([head.kept])
    return [view(start), zeros(HEAD_BYTES - len(start))]


def owner_of(label: bytes) -> Owner | None:
    """None: it is none, or a chunk's."""
    magic, kind, hashed, key_bytes, length = _HEAD.unpack_from(label)
    if magic != _MAGIC or kind == _CHUNK or key_bytes > _KEY_BYTES_MAX:
        return None
    return Owner(label[_HEAD.size : _HEAD.size + key_bytes], bool(hashed), length)


def head_of(key: bytes, block: bytes) -> Head | None:
    """None: it is not there, or another key's."""
    if len(block) < HEAD_BYTES:
        return None
    magic, kind, _, _, length = _HEAD.unpack_from(block)
    if magic != _MAGIC or block[:LABEL_BYTES] != _label(kind, key, length):
        return None
    body = block[LABEL_BYTES:]
    if kind == _INLINE and length <= INLINE_BYTES_MAX:
        return Head(length, np.frombuffer(body[:length], np.uint8))
    if kind == _CHUNKED and length <= OBJECT_BYTES_MAX:
        return Head(length, None, body[:NAME_BYTES], bool(body[NAME_BYTES]))
    return None

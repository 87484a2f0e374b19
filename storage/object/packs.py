"""The format of the object tier: objects that hold blocks, and locations of blocks.

    <prefix>/kvpool/1/<namespace digest, hex>/<part>/<pack id, hex>      one object, never changed

    | block 0 | block 1 | … | namespace record | table: one entry a block | trailer |

A *pack* holds blocks of one namespace and part. Its id is the 8 bytes of the node that wrote it and 8
random ones, so nodes need not coordinate before they write. Two nodes may write the same block: the
bytes are the same, and either copy serves.

The part after the blocks is enough to rebuild everything from a listing and one ranged read a pack. The
trailer has a fixed size and comes last; its checksum covers the record, the table and itself, and it
repeats the pack's name, so neither a damaged nor a misplaced object passes. The blocks have their own
checksums, in the table and in the locations.

A *location* is the catalog's value for a block: 50 bytes, little-endian, versioned. Namespace and part are
known at a lookup, and are not in it.

All here is pure and thread-safe.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvpool.errors import InvalidRequest, ProtocolError
from kvpool.types import (
    CHECKSUM_BYTES,
    KEY_BYTES,
    PART_BYTES_MAX,
    PARTS_MAX,
    RECORD_BYTES_MAX,
    split_keys,
)

PACK_FORMAT = 1
LOCATION_FORMAT = 1
NODE_BYTES = 8
PACK_ID_BYTES = 16
DIGEST_BYTES = 16
CODEC_NONE = 0
PACK_BLOCKS_MAX = 1 << 16
PACK_BYTES_MAX = 2 << 30
"""No block of a pack ends beyond this: room for one of the largest, or for many small ones."""

ROOT = f"kvpool/{PACK_FORMAT}"

LOCATION = np.dtype(
    [
        ("version", "<u1"),
        ("codec", "<u1"),
        ("pack", "V16"),
        ("offset", "<u8"),
        ("stored", "<u4"),
        ("nbytes", "<u4"),
        ("checksum", "V16"),
    ]
)
"""stored: bytes in the pack. nbytes, checksum (xxh3-128): of the block as engines know it."""

ENTRY = np.dtype(
    [
        ("key", "V16"),
        ("parent", "V16"),
        ("checksum", "V16"),
        ("offset", "<u8"),
        ("stored", "<u4"),
        ("nbytes", "<u4"),
        ("depth", "<u4"),
        ("codec", "<u1"),
    ]
)
"""One block in the table of a pack. parent: the key before it in its prefix chain; depth: how many are."""

_TRAILER = struct.Struct("<IIIIQ16s16s16s8s")
_MAGIC = b"kvpoolpk"
_CHECKSUM_AT = _TRAILER.size - len(_MAGIC) - CHECKSUM_BYTES
TRAILER_BYTES = _TRAILER.size

_PATH = re.compile(rf"(?:.*/)?{ROOT}/([0-9a-f]{{32}})/(0|[1-9][0-9]{{0,3}})/([0-9a-f]{{32}})")

Array = npt.NDArray[Any]
Bytes1D = npt.NDArray[np.uint8]
Bytes2D = npt.NDArray[np.uint8]
"""One row a block, rows at least as long as a block: a segment or a piece of one."""


@dataclass(frozen=True, slots=True)
class ObjectTable:
    """Common to the blocks of a pack.

    digest: of the namespace, 16 bytes. record: the caller's record of the namespace,
        opaque here, at most 64 KiB.
    """

    digest: bytes
    part: int
    record: bytes = b""

    def __post_init__(self) -> None:
        if len(self.digest) != DIGEST_BYTES:
            raise InvalidRequest(f"a namespace digest is {DIGEST_BYTES} bytes")
        if not 0 <= self.part < PARTS_MAX:
            raise InvalidRequest(f"part {self.part}: parts are 0 to {PARTS_MAX - 1}")
        if len(self.record) > RECORD_BYTES_MAX:
            raise InvalidRequest(f"a namespace's record is at most {RECORD_BYTES_MAX} bytes")


@dataclass(frozen=True, slots=True)
class PackName:
    """The place of a pack."""

    digest: bytes
    part: int
    pack: bytes

    @property
    def path(self) -> str:
        return f"{ROOT}/{self.digest.hex()}/{self.part}/{self.pack.hex()}"

    @property
    def node(self) -> bytes:
        """The node that wrote it."""
        return self.pack[:NODE_BYTES]

    @classmethod
    def parse(cls, path: str) -> PackName | None:
        """None for an object that is not a pack, or of another version."""
        match = _PATH.fullmatch(path)
        if match is None:
            return None
        part = int(match[2])
        return cls(bytes.fromhex(match[1]), part, bytes.fromhex(match[3]))


@dataclass(frozen=True, slots=True)
class PackTable:
    """The contents of one pack. entries: of dtype `ENTRY`, by offset, never overlapping.

    written_at: seconds since 1970, from a listing; else 0.
    """

    name: PackName
    record: bytes
    entries: Array
    written_at: float = 0.0

    @property
    def keys(self) -> bytes:
        """Packed, in the order of the entries."""
        return self.entries["key"].tobytes()

    def locations(self) -> Array:
        """One `LOCATION` an entry."""
        found = np.empty(len(self.entries), LOCATION)
        found["version"] = LOCATION_FORMAT
        found["pack"] = np.void(self.name.pack)
        for field in ("codec", "offset", "stored", "nbytes", "checksum"):
            found[field] = self.entries[field]
        return found


def prefix(digest: bytes | None = None, part: int | None = None) -> str:
    """The folder of the packs of a part, of a namespace or of all."""
    if digest is None:
        return ROOT
    return f"{ROOT}/{digest.hex()}" + ("" if part is None else f"/{part}")


def encode_locations(locations: Array) -> bytes:
    """In the catalog's form, one after the other."""
    assert locations.dtype == LOCATION
    return locations.tobytes()


def decode_locations(packed: bytes) -> Array:
    """The inverse. Does not validate them: `ObjectStore.get` does.

    Raises `InvalidRequest` unless the length is a multiple of a location's.
    """
    if len(packed) % LOCATION.itemsize:
        raise InvalidRequest(
            f"{len(packed)} bytes of locations: each has {LOCATION.itemsize} of them"
        )
    return np.frombuffer(packed, LOCATION)


def usable(locations: Array, nbytes: int) -> npt.NDArray[np.bool_]:
    """Which of them may name a block of `nbytes`, in a known version and codec."""
    fits: npt.NDArray[np.bool_] = (
        (locations["version"] == LOCATION_FORMAT)
        & (locations["codec"] == CODEC_NONE)
        & (locations["nbytes"] == nbytes)
        & (locations["stored"] == nbytes)
        & (locations["offset"] <= PACK_BYTES_MAX - nbytes)
    )
    return fits


def pack_size(nbytes: int, blocks: int, record: bytes) -> int:
    """The bytes of an object with so many blocks."""
    return blocks * (nbytes + ENTRY.itemsize) + len(record) + TRAILER_BYTES


def build(
    name: PackName,
    record: bytes,
    nbytes: int,
    entries: Array,
    source: Bytes2D,
    rows: npt.NDArray[np.intp],
) -> tuple[PackTable, Bytes1D]:
    """A pack's table and its bytes, 1-D. Blocks are copied from the first `nbytes` of the rows.

    entries: of dtype `ENTRY` with keys, parents, checksums and depths set; the rest is set here.
    """
    n = len(entries)
    entries["offset"] = np.arange(n, dtype=np.uint64) * nbytes
    entries["stored"] = entries["nbytes"] = nbytes
    entries["codec"] = CODEC_NONE
    data = n * nbytes
    body = np.empty(pack_size(nbytes, n, record), np.uint8)
    # One call that releases the GIL. The rows were checked, so "clip" only avoids a copy.
    np.take(source[:, :nbytes], rows, axis=0, out=body[:data].reshape(n, nbytes), mode="clip")
    tail = record + entries.tobytes()
    head = _TRAILER.pack(
        PACK_FORMAT,
        n,
        len(record),
        name.part,
        data,
        name.digest,
        name.pack,
        bytes(CHECKSUM_BYTES),
        _MAGIC,
    )[:_CHECKSUM_AT]
    tail += head
    tail += xxhash.xxh3_128_digest(tail) + _MAGIC
    body[data:] = np.frombuffer(tail, np.uint8)
    return PackTable(name, record, entries), body


def tail_bytes(name: PackName, end: bytes, size: int) -> int:
    """How many of a pack's last bytes `parse_tail` needs, from its last `TRAILER_BYTES`.

    size: of the object. Raises `ProtocolError` unless it is a pack of this name.
    """
    if len(end) != TRAILER_BYTES:
        raise ProtocolError(f"{name.path}: not a pack: shorter than a trailer")
    version, count, record, part, data, digest, pack, _, magic = _TRAILER.unpack(end)
    if magic != _MAGIC or version != PACK_FORMAT:
        raise ProtocolError(f"{name.path}: not a pack of format {PACK_FORMAT}")
    if (digest, part, pack) != (name.digest, name.part, name.pack):
        raise ProtocolError(f"{name.path}: its contents were written under another name")
    if not 0 < count <= PACK_BLOCKS_MAX or record > RECORD_BYTES_MAX or data > PACK_BYTES_MAX:
        raise ProtocolError(f"{name.path}: its sizes exceed the format's limits")
    tail: int = record + count * ENTRY.itemsize + TRAILER_BYTES
    if data + tail != size:
        raise ProtocolError(f"{name.path}: {size} bytes, but its trailer says {data + tail}")
    return tail


def parse_tail(name: PackName, tail: bytes, size: int) -> PackTable:
    """The table of a pack from its last `tail_bytes`. size: of the object.

    Raises `ProtocolError` if it is damaged or not a pack of this name.
    """
    if tail_bytes(name, tail[-TRAILER_BYTES:], size) != len(tail):
        raise ProtocolError(f"{name.path}: its table is truncated")
    covered = len(tail) - TRAILER_BYTES + _CHECKSUM_AT
    fields = _TRAILER.unpack(tail[-TRAILER_BYTES:])
    if xxhash.xxh3_128_digest(tail[:covered]) != fields[7]:
        raise ProtocolError(f"{name.path}: the checksum of its table is wrong")
    record_bytes, data = fields[2], fields[4]
    entries = np.frombuffer(tail[record_bytes:-TRAILER_BYTES], ENTRY)
    ends = entries["offset"] + entries["stored"]
    if (
        (ends[:-1] > entries["offset"][1:]).any()
        or (ends < entries["offset"]).any()
        or ends[-1] > data
        or (entries["nbytes"] > PART_BYTES_MAX).any()
    ):
        raise ProtocolError(f"{name.path}: its blocks overlap or exceed it")
    return PackTable(name, tail[:record_bytes], entries)


def columns(packed: bytes) -> Array:
    """Packed keys or checksums as an array of 16-byte values."""
    split_keys(packed)  # refuses odd lengths
    return np.frombuffer(packed, f"V{KEY_BYTES}")

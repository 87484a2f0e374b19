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

With encryption (`kvpool.storage.at_rest`) each block is 16 bytes longer, by its tag, and so are record and table
together; the trailer stays readable. A reader with secrets takes no object without them, and the other way round.

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
from kvpool.storage.at_rest import TAG_BYTES, ObjectSealer, block_name, place_name
from kvpool.types import (
    CHECKSUM_BYTES,
    KEY_BYTES,
    PART_BYTES_MAX,
    PARTS_MAX,
    RECORD_BYTES_MAX,
    check_digest,
    split_keys,
)

PACK_FORMAT = 1
PACK_FORMAT_SEALED = 2
LOCATION_FORMAT = 1
NODE_BYTES = 8
PACK_ID_BYTES = 16
CODEC_NONE = 0
CODEC_SEALED = 1
PACK_BLOCKS_MAX = 1 << 16
PACK_BYTES_MAX = 2 << 30
"""No block of a pack ends beyond this: room for one of the largest, or for many small ones."""


class OtherKindError(ProtocolError):
    """A pack that is encrypted where none should be, or is not, or that no secret in use decrypts."""


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
        check_digest(self.digest)
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


def is_encrypted(location: bytes) -> bool:
    """Whether the block at this location, in the catalog's form, is encrypted."""
    return location[1] == CODEC_SEALED


def usable(locations: Array, nbytes: int, *, sealed: bool = False) -> npt.NDArray[np.bool_]:
    """Which of them may name a block of `nbytes`, in a known version and codec. sealed: encrypted."""
    stored = nbytes + (TAG_BYTES if sealed else 0)
    fits: npt.NDArray[np.bool_] = (
        (locations["version"] == LOCATION_FORMAT)
        & (locations["codec"] == (CODEC_SEALED if sealed else CODEC_NONE))
        & (locations["nbytes"] == nbytes)
        & (locations["stored"] == stored)
        & (locations["offset"] <= PACK_BYTES_MAX - stored)
    )
    return fits


def pack_size(nbytes: int, blocks: int, record: bytes, *, sealed: bool = False) -> int:
    """The bytes of an object with so many blocks."""
    size = blocks * (nbytes + ENTRY.itemsize) + len(record) + TRAILER_BYTES
    return size + (blocks + 1) * TAG_BYTES if sealed else size


def build(
    name: PackName,
    record: bytes,
    nbytes: int,
    entries: Array,
    source: Bytes2D,
    rows: npt.NDArray[np.intp],
    sealer: ObjectSealer | None = None,
) -> tuple[PackTable, Bytes1D]:
    """A pack's table and its bytes, 1-D. Blocks are copied from the first `nbytes` of the rows, or encrypted.

    entries: of dtype `ENTRY` with keys, parents, checksums and depths set; the rest is set here.
    """
    n = len(entries)
    stored = nbytes + (0 if sealer is None else TAG_BYTES)
    entries["offset"] = np.arange(n, dtype=np.uint64) * stored
    entries["stored"], entries["nbytes"] = stored, nbytes
    entries["codec"] = CODEC_NONE if sealer is None else CODEC_SEALED
    data = n * stored
    body = np.empty(pack_size(nbytes, n, record, sealed=sealer is not None), np.uint8)
    blocks = body[:data].reshape(n, stored)
    if sealer is None:
        # One call that releases the GIL. The rows were checked, so "clip" only avoids a copy.
        np.take(source[:, :nbytes], rows, axis=0, out=blocks, mode="clip")
    else:
        place = place_name(name.digest, name.part)
        for at, (entry, row) in enumerate(zip(entries, rows.tolist(), strict=True)):
            called = block_name(place, bytes(entry["key"]), bytes(entry["checksum"]), nbytes)
            sealer.seal(name.path, at * stored, source[row, :nbytes], called, blocks[at])
    tail = record + entries.tobytes()
    version = PACK_FORMAT if sealer is None else PACK_FORMAT_SEALED
    sizes = _sizes(version, n, len(record), data)
    if sealer is not None:
        tail = sealer.seal_table(name.path, tail, sizes)
    head = _TRAILER.pack(
        version,
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


def _sizes(version: int, count: int, record: int, data: int) -> bytes:
    """What is authenticated with an encrypted table."""
    return struct.pack("<IIIQ", version, count, record, data)


def tail_bytes(name: PackName, end: bytes, size: int, *, sealed: bool = False) -> int:
    """How many of a pack's last bytes `parse_tail` needs, from its last `TRAILER_BYTES`.

    size: of the object. Raises `ProtocolError` unless it is a pack of this name.
    """
    if len(end) != TRAILER_BYTES:
        raise ProtocolError(f"{name.path}: not a pack: shorter than a trailer")
    version, count, record, part, data, digest, pack, _, magic = _TRAILER.unpack(end)
    expected = PACK_FORMAT_SEALED if sealed else PACK_FORMAT
    if magic == _MAGIC and version in {PACK_FORMAT, PACK_FORMAT_SEALED} and version != expected:
        raise OtherKindError(f"{name.path}: it is {'not ' if sealed else ''}encrypted")
    if magic != _MAGIC or version != expected:
        raise ProtocolError(f"{name.path}: not a pack of format {expected}")
    if (digest, part, pack) != (name.digest, name.part, name.pack):
        raise ProtocolError(f"{name.path}: its contents were written under another name")
    if not 0 < count <= PACK_BLOCKS_MAX or record > RECORD_BYTES_MAX or data > PACK_BYTES_MAX:
        raise ProtocolError(f"{name.path}: its sizes exceed the format's limits")
    tail: int = record + count * ENTRY.itemsize + (TAG_BYTES if sealed else 0) + TRAILER_BYTES
    if data + tail != size:
        raise ProtocolError(f"{name.path}: {size} bytes, but its trailer says {data + tail}")
    return tail


def parse_tail(
    name: PackName, tail: bytes, size: int, sealer: ObjectSealer | None = None
) -> PackTable:
    """The table of a pack from its last `tail_bytes`. size: of the object.

    Raises `ProtocolError` if it is damaged or not a pack of this name, or no secret in use decrypts it.
    """
    if tail_bytes(name, tail[-TRAILER_BYTES:], size, sealed=sealer is not None) != len(tail):
        raise ProtocolError(f"{name.path}: its table is truncated")
    covered = len(tail) - TRAILER_BYTES + _CHECKSUM_AT
    fields = _TRAILER.unpack(tail[-TRAILER_BYTES:])
    if xxhash.xxh3_128_digest(tail[:covered]) != fields[7]:
        raise ProtocolError(f"{name.path}: the checksum of its table is wrong")
    version, count, record_bytes, _, data, *_ = fields
    table: bytes | None = tail[:-TRAILER_BYTES]
    if sealer is not None:
        sizes = _sizes(version, count, record_bytes, data)
        table = sealer.open_table(name.path, tail[:-TRAILER_BYTES], sizes)
        if table is None:
            raise OtherKindError(f"{name.path}: no secret in use decrypts its table")
    assert table is not None
    entries = np.frombuffer(table[record_bytes:], ENTRY)
    ends = entries["offset"] + entries["stored"]
    if (
        (ends[:-1] > entries["offset"][1:]).any()
        or (ends < entries["offset"]).any()
        or ends[-1] > data
        or (entries["nbytes"] > PART_BYTES_MAX).any()
    ):
        raise ProtocolError(f"{name.path}: its blocks overlap or exceed it")
    return PackTable(name, table[:record_bytes], entries)


def columns(packed: bytes) -> Array:
    """Packed keys or checksums as an array of 16-byte values."""
    split_keys(packed)  # refuses odd lengths
    return np.frombuffer(packed, f"V{KEY_BYTES}")

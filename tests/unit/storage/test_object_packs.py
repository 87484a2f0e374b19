"""The form of packs and locations: pinned, round trips, and nothing damaged that passes."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.errors import InvalidRequest, ProtocolError
from kvpool.storage.object.packs import (
    ENTRY,
    LOCATION,
    PACK_BYTES_MAX,
    TRAILER_BYTES,
    ObjectTable,
    PackName,
    PackTable,
    build,
    columns,
    decode_locations,
    encode_locations,
    pack_size,
    parse_tail,
    prefix,
    tail_bytes,
    usable,
)

NAME = PackName(digest=bytes(range(16)), part=7, pack=b"the node" + b"12345678")
RECORD = b"what the namespace is"


def made(n: int = 3, nbytes: int = 100) -> tuple[PackTable, bytes, np.ndarray]:
    source = np.random.default_rng(n).integers(0, 256, (n + 2, nbytes + 5), dtype=np.uint8)
    rows = np.arange(n, dtype=np.intp)[::-1].copy()
    entries = np.zeros(n, ENTRY)
    entries["key"] = columns(b"".join(b"key %012d" % i for i in range(n)))
    entries["parent"] = columns(b"".join(b"par %012d" % i for i in range(n)))
    sums = [xxhash.xxh3_128_digest(source[row, :nbytes].tobytes()) for row in rows]
    entries["checksum"] = columns(b"".join(sums))
    entries["depth"] = np.arange(n) + 5
    table, body = build(NAME, RECORD, nbytes, entries, source, rows)
    return table, body.tobytes(), source


def test_a_location_is_these_fifty_bytes() -> None:
    fields = (1, 0, NAME.pack, 123456789012, 4096, 4096, b"c" * 16)
    packed = struct.pack("<BB16sQII16s", *fields)
    location = decode_locations(packed)[0]
    assert len(packed) == LOCATION.itemsize == 50
    assert [location[name] for name in ("version", "codec", "offset", "stored", "nbytes")] == [
        1,
        0,
        123456789012,
        4096,
        4096,
    ]
    assert location["pack"].tobytes() == NAME.pack
    assert location["checksum"].tobytes() == b"c" * 16
    assert encode_locations(decode_locations(packed * 3)) == packed * 3


@pytest.mark.parametrize("length", [1, 49, 51, 149])
def test_locations_come_whole(length: int) -> None:
    with pytest.raises(InvalidRequest, match="locations"):
        decode_locations(bytes(length))


@given(st.binary(max_size=400))
def test_any_bytes_of_the_right_length_are_judged_not_trusted(raw: bytes) -> None:
    locations = decode_locations(raw[: len(raw) // 50 * 50])
    for location, fits in zip(locations, usable(locations, 64), strict=True):
        version, codec, _, offset, stored, nbytes, _ = struct.unpack(
            "<BB16sQII16s", location.tobytes()
        )
        right = version == 1 and codec == 0 and stored == nbytes == 64
        assert fits == (right and offset + stored <= PACK_BYTES_MAX)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 2),
        ("codec", 1),
        ("stored", 99),
        ("nbytes", 101),
        ("offset", PACK_BYTES_MAX),
        ("offset", (1 << 64) - 1),
    ],
)
def test_a_location_of_something_else_is_told(field: str, value: int) -> None:
    locations = made()[0].locations()
    assert usable(locations, 100).all()
    locations[1][field] = value
    assert usable(locations, 100).tolist() == [True, False, True]


def test_a_pack_holds_the_blocks_where_its_table_says() -> None:
    table, body, source = made(n=5, nbytes=33)
    assert len(body) == pack_size(33, 5, RECORD)
    for i, entry in enumerate(table.entries):
        at = int(entry["offset"])
        assert body[at : at + 33] == source[4 - i, :33].tobytes()
    needed = tail_bytes(NAME, body[-TRAILER_BYTES:], len(body))
    parsed = parse_tail(NAME, body[-needed:], len(body))
    assert parsed.record == RECORD
    assert parsed.entries.tobytes() == table.entries.tobytes()
    assert parsed.keys == b"".join(b"key %012d" % i for i in range(5))
    assert parsed.entries["depth"].tolist() == [5, 6, 7, 8, 9]
    assert parsed.locations().tobytes() == table.locations().tobytes()


def parse(name: PackName, body: bytes) -> PackTable:
    needed = tail_bytes(name, body[-TRAILER_BYTES:], len(body))
    return parse_tail(name, body[-needed:], len(body))


def test_no_damaged_byte_of_a_table_passes() -> None:
    _table, body, _ = made()
    data = 3 * 100
    parse(NAME, body)
    for at in range(data, len(body)):
        for bit in (1, 128):
            damaged = bytearray(body)
            damaged[at] ^= bit
            with pytest.raises(ProtocolError):
                parse(NAME, bytes(damaged))


def test_no_shortened_or_lengthened_pack_passes() -> None:
    body = made()[1]
    for length in range(len(body)):
        with pytest.raises(ProtocolError):
            parse(NAME, body[:length])
    with pytest.raises(ProtocolError):
        parse(NAME, b"x" + body)


@given(st.binary(max_size=300), st.integers(0, 1 << 40))
def test_noise_is_no_pack(noise: bytes, size: int) -> None:
    with pytest.raises(ProtocolError):
        parse_tail(NAME, noise, size)
    with pytest.raises(ProtocolError):
        tail_bytes(NAME, noise[-TRAILER_BYTES:], size)


@given(
    st.tuples(*[st.integers(0, (1 << 32) - 1)] * 3, st.integers(0, (1 << 64) - 1)),
    st.integers(0, 1 << 70),
)
def test_a_trailer_that_lies_is_refused(numbers: tuple[int, int, int, int], size: int) -> None:
    count, record, part, data = numbers
    end = struct.pack(
        "<IIIIQ16s16s16s8s",
        1,
        count,
        record,
        part,
        data,
        NAME.digest,
        NAME.pack,
        bytes(16),
        b"kvpoolpk",
    )
    with pytest.raises(ProtocolError):
        parse_tail(NAME, end, size)


def test_overlapping_blocks_are_refused() -> None:
    source = np.zeros((2, 64), np.uint8)
    _, body = build(NAME, b"", 64, np.zeros(2, ENTRY), source, np.array([0, 1], dtype=np.intp))
    tail = bytearray(body[128:].tobytes())
    struct.pack_into("<Q", tail, ENTRY.itemsize + 48, 10)  # the second block's offset
    covered = len(tail) - 24
    struct.pack_into("16s", tail, covered, xxhash.xxh3_128_digest(bytes(tail[:covered])))
    with pytest.raises(ProtocolError, match="overlap"):
        parse_tail(NAME, bytes(tail), len(body))


@pytest.mark.parametrize(
    "other",
    [
        PackName(bytes(16), NAME.part, NAME.pack),
        PackName(NAME.digest, 8, NAME.pack),
        PackName(NAME.digest, NAME.part, b"x" * 16),
    ],
)
def test_a_pack_under_another_name_is_refused(other: PackName) -> None:
    with pytest.raises(ProtocolError, match="another name"):
        parse(other, made()[1])


def test_paths() -> None:
    path = f"kvpool/1/{NAME.digest.hex()}/7/{NAME.pack.hex()}"
    assert NAME.path == path
    assert PackName.parse(path) == NAME
    assert PackName.parse("some/prefix/" + path) == NAME
    assert NAME.node == b"the node"
    assert path.startswith(prefix(NAME.digest, 7) + "/")
    assert path.startswith(prefix(NAME.digest) + "/")
    assert path.startswith(prefix() + "/")
    for other in (
        path + "0",
        path[:-1],
        path.replace("kvpool/1", "kvpool/2"),
        path.replace("/7/", "/07/"),
        path.replace("/7/", "/12345/"),
        path + "/more",
        "",
    ):
        assert PackName.parse(other) is None


@pytest.mark.parametrize(
    ("digest", "part", "record"),
    [
        (b"short", 0, b""),
        (bytes(16), -1, b""),
        (bytes(16), 4096, b""),
        (bytes(16), 0, bytes(65537)),
    ],
)
def test_tables_have_limits(digest: bytes, part: int, record: bytes) -> None:
    with pytest.raises(InvalidRequest):
        ObjectTable(digest, part, record)


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(1, 300))
def test_every_size_of_a_pack_comes_back(n: int, nbytes: int) -> None:
    table, body, _ = made(n, nbytes)
    assert parse(NAME, body).entries.tobytes() == table.entries.tobytes()

"""Keys, parts, namespace records."""

import hashlib
import json

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvpool.errors import InvalidRequest
from kvpool.types import (
    PART_BYTES_MAX,
    PARTS_MAX,
    RECORD_BYTES_MAX,
    NamespaceRecord,
    PartKind,
    PartSpec,
    pack_keys,
)


@settings(deadline=None)
@given(st.lists(st.binary(min_size=16, max_size=16)))
def test_keys_are_packed_in_order(keys):
    packed = b"".join(keys)
    for form in (keys, tuple(keys), iter(keys), packed, bytearray(packed), memoryview(packed)):
        assert pack_keys(form) == packed


@pytest.mark.parametrize("size", [0, 1, 15, 17, 32])
def test_each_key_has_16_bytes(size):
    with pytest.raises(InvalidRequest, match=str(size)):
        pack_keys([bytes(16), bytes(size)])


@pytest.mark.parametrize("size", [1, 15, 17, 31])
def test_packed_keys_are_a_multiple(size):
    with pytest.raises(InvalidRequest, match=str(size)):
        pack_keys(bytes(size))


@pytest.mark.parametrize(
    "spec",
    [
        {"nbytes": 0},
        {"nbytes": -1},
        {"nbytes": PART_BYTES_MAX + 1},
        {"nbytes": 1, "stride": 0},
        {"nbytes": 1, "window_blocks": 1},
        {"nbytes": 1, "kind": PartKind.WINDOW},
        {"nbytes": 1, "kind": PartKind.WINDOW, "window_blocks": -1},
    ],
)
def test_parts_that_make_no_sense(spec):
    with pytest.raises(InvalidRequest):
        PartSpec(**spec)


def test_a_namespace_has_parts():
    with pytest.raises(InvalidRequest):
        NamespaceRecord({}, ())
    with pytest.raises(InvalidRequest):
        NamespaceRecord({}, (PartSpec(1),) * (PARTS_MAX + 1))


def test_the_digest_is_that_of_the_canonical_fields():
    record = NamespaceRecord({"b": 1, "a": [1, {"y": None, "x": "é"}]}, (PartSpec(1),))
    assert record.digest() == hashlib.sha256(record.canonical()).digest()[:16]
    assert json.loads(record.canonical()) == {"format_version": 1, **record.fields}
    turned = NamespaceRecord({"a": [1, {"x": "é", "y": None}], "b": 1}, (PartSpec(1),))
    assert turned.digest() == record.digest()


fields = st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=8), max_size=5)


@settings(deadline=None)
@given(fields, fields)
def test_digests_differ_when_facts_do(one, two):
    records = [NamespaceRecord(each, (PartSpec(1),)) for each in (one, two)]
    body = [{"format_version": 1, **each} for each in (one, two)]
    assert (records[0].digest() == records[1].digest()) == (body[0] == body[1])


def test_parts_are_no_part_of_the_digest():
    one, two = (NamespaceRecord({"a": 1}, (PartSpec(size),)) for size in (1, 2))
    assert one.digest() == two.digest()


@pytest.mark.parametrize("value", [b"bytes", {1, 2}, object(), float("nan"), float("inf")])
def test_fields_are_plain_json(value):
    with pytest.raises(InvalidRequest, match="JSON"):
        NamespaceRecord({"a": value}, (PartSpec(1),))


def test_records_have_a_size():
    with pytest.raises(InvalidRequest, match=str(RECORD_BYTES_MAX)):
        NamespaceRecord({"a": "x" * RECORD_BYTES_MAX}, (PartSpec(1),))


def test_simple_records():
    record = NamespaceRecord.simple("m", block_bytes=64, block_tokens=16)
    assert record.parts == (PartSpec(64),)
    assert record.fields == {"model": "m", "block_tokens": 16}

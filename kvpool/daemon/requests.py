"""What clients and peers say, checked at the edge: afterwards it is what it says it is."""

from __future__ import annotations

import hashlib
from array import array

import msgspec

from kvpool import wire
from kvpool.errors import InvalidRequest
from kvpool.placement.records import DEFAULT_SETTINGS, NamespaceSettings, SettingsChange
from kvpool.types import PARTS_MAX, RECORD_BYTES_MAX, PartKind, PartSpec

FIELDS_DEPTH_MAX = 32  # nesting of a namespace's record


def rows(packed: bytes) -> array[int]:
    """Row numbers or indices, u32 each."""
    if len(packed) % 4:
        raise InvalidRequest("rows and indices are packed as 4 bytes each")
    return array("I", packed)


def parse_parts(
    digest: bytes, fields: bytes, parts: list[tuple[int, str, int, int]]
) -> list[PartSpec]:
    """Check what a client says of a namespace. Raises `InvalidRequest`."""
    if len(fields) > RECORD_BYTES_MAX or not 0 < len(parts) <= PARTS_MAX:
        raise InvalidRequest(
            f"a namespace has at most {RECORD_BYTES_MAX} bytes of fields and 1 to {PARTS_MAX} parts"
        )
    if hashlib.sha256(fields).digest()[:16] != digest:
        raise InvalidRequest("the namespace's digest is not that of its fields")
    try:
        decoded = msgspec.json.decode(fields)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"a namespace's fields are not JSON: {error}") from None
    if not isinstance(decoded, dict) or _deeper(decoded, FIELDS_DEPTH_MAX):
        raise InvalidRequest(
            f"a namespace's fields are a JSON object, nested at most {FIELDS_DEPTH_MAX} deep"
        )
    specs = []
    for nbytes, kind, window, stride in parts:
        if kind not in list(PartKind):
            raise InvalidRequest(f"a part's kind is one of {[str(k) for k in PartKind]}: {kind!r}")
        specs.append(PartSpec(nbytes, PartKind(kind), window, stride))
    return specs


def parse_wish(m: wire.OpenNamespace) -> NamespaceSettings:
    """The settings that a client wants of a namespace that is new. Raises `InvalidRequest`."""
    wish = SettingsChange(m.copies or None, m.write, m.ttl_s, m.ssd_codec)
    return wish.checked().apply(DEFAULT_SETTINGS)


def parse_change(m: wire.Configure) -> SettingsChange:
    """What an operator wants changed. Raises `InvalidRequest`."""
    change = SettingsChange(m.replicas, m.write, m.ttl_s, m.ssd_codec)
    if change.empty:
        raise InvalidRequest("no setting is named that is to be changed")
    return change.checked()


def _deeper(value: object, levels: int) -> bool:
    """Whether a JSON value is nested deeper than that: others must be able to walk it."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return False
    return levels == 0 or any(_deeper(item, levels - 1) for item in value)

"""Masks of parts, packed as in messages: for each block bit p of byte p // 8, all of one length."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.errors import InvalidRequest
from kvpool.types import KEY_BYTES, PARTS_MAX


def width_for(parts: int) -> int:
    """Bytes of a mask of this many parts."""
    return -(-parts // 8)


def width_of(keys: bytes, packed: bytes) -> int:
    """Bytes of each mask, one per key. Raises `InvalidRequest`."""
    count, rest = divmod(len(keys), KEY_BYTES)
    width, uneven = divmod(len(packed), max(1, count))
    if rest or uneven or not count or not 0 < width <= width_for(PARTS_MAX):
        raise InvalidRequest(
            f"{len(packed)} bytes of masks for {len(keys)} bytes of keys: there must be one mask per key"
        )
    return width


def pack_masks(masks: Sequence[int], width: int) -> bytes:
    """Masks one after the other, `width` bytes each, little-endian."""
    if width == 1:
        return bytes(masks)
    return b"".join([mask.to_bytes(width, "little") for mask in masks])


def unpack_masks(packed: bytes, width: int) -> list[int]:
    """The masks packed by `pack_masks`."""
    if width == 1:
        return list(packed)
    return [
        int.from_bytes(packed[at : at + width], "little") for at in range(0, len(packed), width)
    ]

"""What the gateway reads of a node's numbers, as the node answers `wire.Inspect`.

They come from other daemons, which may be of another version, or out of order: they are checked before anything is
made of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvpool.admin.types import HotPrefix, SlabClass
from kvpool.errors import ProtocolError
from kvpool.placement.records import NamespaceSettings

Stats = Mapping[str, Any]


def check(stats: Stats) -> None:
    """Raises `ProtocolError`."""
    try:
        known = msgspec.convert(stats, _Node)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"its statistics are of another version: {error}") from None
    if unknown := known.tenants.keys() - known.usage.keys():
        raise ProtocolError(f"its numbers are not whole: no usage of tenant {min(unknown)!r}")


class _Reads(msgspec.Struct):
    local: int
    fetched: int
    missed: int


class _Traffic(msgspec.Struct):
    put_bytes: int
    read_bytes: int
    device_read_bytes: int
    reads: _Reads


class _Space(msgspec.Struct):
    size: int
    bytes_used: int
    slab_bytes: int
    slabs: int
    slabs_unassigned: int
    classes: list[SlabClass]


class _Namespace(msgspec.Struct):
    fields: dict[str, Any]
    epoch: int
    settings: NamespaceSettings
    held_bytes: int
    quota_bytes: int
    blocks: list[int]
    part_bytes: list[int]


class _Tenant(msgspec.Struct):
    segment_bytes: int
    blocks: int
    hard_pinned_bytes: int
    soft_pinned_bytes: int
    traffic: _Traffic
    space: _Space
    namespaces: dict[str, _Namespace]


class _Disk(msgspec.Struct):
    part_bytes: int
    used_bytes: int


class _Usage(msgspec.Struct):
    ssd: list[_Disk]


class _Part(msgspec.Struct):
    used_bytes: int = 0


class _Tiers(msgspec.Struct):
    ssd: list[_Part] = []
    device: list[_Part] = []


class _Counters(msgspec.Struct):
    pulled_bytes: int


class _Node(msgspec.Struct):
    """hot: a node of an older version does not count them."""

    incarnation: str
    counters: _Counters
    tenants: dict[str, _Tenant]
    usage: dict[str, _Usage]
    tiers: _Tiers
    hot: list[HotPrefix] = []

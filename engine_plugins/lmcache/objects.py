"""LMCache's objects in the pool's terms: block keys and namespaces. Pure.

An object's block key is a digest of all fields of its `ObjectKey` but the model's name; its namespace says the model
and the object's layout. So one request reaches the objects of all ranks, object groups and salts that have the same
layout, and the number of namespaces does not grow with them. Objects of another layout, which LMCache's keys do not
tell apart (another dtype of the same model), are in another namespace: they are never mistaken for each other.

Takes LMCache's objects without importing LMCache, so that it is tested without it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvpool.errors import InvalidRequest
from kvpool.types import KEY_BYTES, PART_BYTES_MAX, NamespaceRecord, PartSpec

MAPPING_VERSION = 1
"""Changes with the block keys or bytes that this package makes of the same objects."""

_PLACE = struct.Struct("<QIH")  # kv_rank, object_group_id, and how long the salt is
LAYOUTS_MAX = 8


@dataclass(frozen=True, slots=True)
class Layout:
    """What must agree of two objects, besides their keys.

    nbytes: of an object. tensors: dtype and shape of each tensor in it, in their order.
    """

    nbytes: int
    tensors: str


def block_keys(keys: Iterable[Any]) -> list[bytes]:
    """The block key of each `ObjectKey`, within the namespaces of its model.

    Raises `InvalidRequest` for ranks and groups beyond 64 and 32 bits.
    """
    bases: dict[tuple[int, int, str], Any] = {}
    made = []
    for key in keys:
        place = (key.kv_rank, key.object_group_id, key.cache_salt)
        base = bases.get(place)
        if base is None:
            salt = key.cache_salt.encode("utf-8", "surrogatepass")
            try:
                packed = _PLACE.pack(key.kv_rank, key.object_group_id, len(salt))
            except struct.error as error:
                raise InvalidRequest(f"{key!r} cannot be named in the pool: {error}") from None
            base = bases[place] = hashlib.blake2b(packed + salt, digest_size=KEY_BYTES)
        digest = base.copy()
        digest.update(key.chunk_hash)
        made.append(digest.digest())
    return made


def layout_of(memory_object: Any) -> Layout:
    """Of one of LMCache's `MemoryObj`."""
    meta = memory_object.metadata
    if meta.shapes is not None and meta.dtypes is not None:
        return _layout(memory_object.get_size(), tuple(meta.shapes), tuple(meta.dtypes))
    return _layout(memory_object.get_size(), (meta.shape,), (meta.dtype,))


def layout_of_group(description: Any) -> Layout | None:
    """Of a `MemoryLayoutDesc`; None for one that says nothing."""
    shapes, dtypes = tuple(description.shapes), tuple(description.dtypes)
    nbytes = sum(
        shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    return _layout(nbytes, shapes, dtypes) if nbytes else None


@lru_cache(maxsize=256)
def _layout(nbytes: int, shapes: tuple[Any, ...], dtypes: tuple[Any, ...]) -> Layout:
    tensors = [
        f"{str(dtype).removeprefix('torch.')}[{','.join(str(int(size)) for size in shape)}]"
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    return Layout(nbytes, " ".join(tensors))


def record_of(model: str, layout: Layout, epoch: str) -> NamespaceRecord:
    """The namespace of a model's objects of one layout. Raises `InvalidRequest`."""
    if not 0 < layout.nbytes <= PART_BYTES_MAX:
        raise InvalidRequest(
            f"an object of {model} has {layout.nbytes} bytes, and the pool takes 1 to {PART_BYTES_MAX}: give LMCache "
            "another chunk size"
        )
    return NamespaceRecord(
        fields={
            "engine": "lmcache",
            "mapping": MAPPING_VERSION,
            "model": model,
            "epoch": epoch,
            "object": layout.tensors,
            "object_bytes": layout.nbytes,
        },
        parts=(PartSpec(nbytes=layout.nbytes),),
    )


class KnownLayouts:
    """Layouts of the objects that this server has stored or loaded, of each model and object group.

    A lookup is told the layout of objects in LMCache's memory. What comes here differs where LMCache converts objects
    before it stores them (`serde`), and is not told to lookups: it is learnt. Not thread-safe.
    """

    def __init__(self, most: int = LAYOUTS_MAX) -> None:
        self._most = most
        self._known: dict[tuple[str, int], dict[Layout, None]] = {}

    def add(self, model: str, group: int, layout: Layout) -> None:
        """It counts as the latest one; the oldest beyond `most` is forgotten."""
        known = self._known.setdefault((model, group), {})
        known.pop(layout, None)
        known[layout] = None
        if len(known) > self._most:
            del known[next(iter(known))]

    def candidates(self, model: str, group: int, told: Layout | None) -> Sequence[Layout]:
        """Where to look for an object: the layout that LMCache tells, alone once objects of it have been seen."""
        known = self._known.get((model, group), {})
        if told is None:
            return list(reversed(known))
        return [told] if told in known else [told, *reversed(known)]

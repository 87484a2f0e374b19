"""Which sizes of objects have a namespace, kept in the pool itself, where all processes find it.

The catalog is a set that only grows. A size is written into it as the presence of `DEPTH` blocks, one for each of its
digits and those before it, so that two nodes that add sizes at a time cannot overwrite each other's. Who has added one
puts *marks* into all namespaces: block k of a namespace says that there are at least k. A process that knows of k asks
for marks k and k + 1 beside the keys of a lookup or a removal, and looks into the catalog when the first is missing or
the second is there: so it hears of a new namespace with its first miss, and removes from it too. Marks are lost like
other blocks, the later ones after the earlier ones: then the first is missing. Besides, a process that misses looks
into the catalog every `LOOK_S`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from kvpool.client import Client
from kvpool.errors import LimitExceeded, PoolFull
from kvpool.types import KEY_BYTES, Namespace, NamespaceRecord, PartSpec

LAYOUT = 1
"""Of the blocks. Processes with another one do not see each other's objects."""
LOOK_S = 1.0
LOOKUP_S = 0.05
"""How long a lookup waits for what other nodes know."""
DEPTH = 4

_DIGIT_BITS = 6
_CATALOG_BYTES = 64


class Catalog:
    """The catalog of one tenant of the facade. Thread-safe.

    ns: of its blocks. verify: the namespaces are opened so that reads are compared with checksums.
    """

    def __init__(self, client: Client, tenant_id: str, *, verify: bool) -> None:
        self._client = client
        self._tenant_id = tenant_id
        self._verify = verify
        self.ns = self.open("catalog", _CATALOG_BYTES)

    def open(self, kind: str, nbytes: int) -> Namespace:
        """The namespace of one kind and size of blocks."""
        return self._client.open(self.record(kind, nbytes), verify=self._verify)

    def record(self, kind: str, nbytes: int) -> NamespaceRecord:
        """What distinguishes that namespace from others."""
        return NamespaceRecord(
            fields={
                "facade": "mooncake",
                "layout": LAYOUT,
                "tenant_id": self._tenant_id,
                "blocks": kind,
                "block_bytes": nbytes,
            },
            parts=(PartSpec(nbytes=nbytes),),
        )

    def sizes(self) -> list[int]:
        """Those that were entered, as far as they are found in time."""
        prefixes = [0]
        for level in range(DEPTH):
            digits = range(1 << _DIGIT_BITS)
            codes = [prefix << _DIGIT_BITS | digit for prefix in prefixes for digit in digits]
            keys = b"".join([_catalog_key(level, code) for code in codes])
            found = self._client.present(self.ns, keys, wait_s=LOOKUP_S)
            prefixes = [codes[at] for at in np.flatnonzero(found).tolist()]
        return prefixes

    def enter(self, size: int) -> None:
        """Raises `KvpoolError`."""
        self._put_zeros(self.ns, size_keys(size), _CATALOG_BYTES)

    def put_marks(self, namespaces: Sequence[Namespace]) -> None:
        """Say in each of all namespaces how many there are. Raises `KvpoolError`."""
        marks = marks_of(1, len(namespaces) + 1)
        for ns in namespaces:
            self._put_zeros(ns, marks, ns.parts[0].nbytes)

    def _put_zeros(self, ns: Namespace, keys: bytes, nbytes: int) -> None:
        block = np.zeros(nbytes, np.uint8)
        if not self._client.put_each(ns, keys, [block] * (len(keys) // KEY_BYTES)).all():
            raise PoolFull("there is no space for the entry of another size of objects")
        try:
            self._client.pin(ns, keys, "soft")
        except LimitExceeded:
            pass  # they are lost sooner


def marks_of(first: int, end: int) -> bytes:
    """The keys of these marks."""
    digest = xxhash.xxh3_128_digest
    return b"".join([digest(b"kvpool mooncake mark", count) for count in range(first, end)])


def size_keys(size: int) -> bytes:
    """The keys of the blocks that say that a size has a namespace."""
    levels = range(DEPTH)
    return b"".join([_catalog_key(at, size >> _DIGIT_BITS * (DEPTH - 1 - at)) for at in levels])


def _catalog_key(level: int, code: int) -> bytes:
    return xxhash.xxh3_128_digest(b"kvpool mooncake size", level << 32 | code)

"""The namespaces that hold a tenant's objects, and how processes find out which there are.

    exact      objects of one size, each a block of that size and its label: one namespace for each of the first
               `EXACT_MAX` sizes that come often. KV pages have one or two sizes
    heads      all other objects: a block each, with the object itself if it is small, else with the name of its chunks
    chunks     their bytes, in blocks of a ladder of sizes
    catalog    which sizes have a namespace

An object is looked for in all exact namespaces and among the heads, by one request.

The catalog is a set that only grows. A size is written into it as the presence of `DEPTH` blocks, one for each of its
digits and those before it, so that two nodes that add sizes at a time cannot overwrite each other's. Who has added one
puts *marks* into all namespaces: block k of a namespace says that there are at least k. A process that knows of k asks
for marks k and k + 1 beside the keys of a lookup or a removal, and looks into the catalog when the first is missing or
the second is there: so it hears of a new namespace with its first miss, and removes from it too. Marks are lost like
other blocks, the later ones after the earlier ones: then the first is missing. Besides, a process that misses looks
into the catalog every `LOOK_S`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import or_

import numpy as np
import numpy.typing as npt
import xxhash

from kvpool.client import Client
from kvpool.errors import KvpoolError, LimitExceeded, PoolFull
from kvpool.types import KEY_BYTES, Namespace, NamespaceRecord, PartSpec

logger = logging.getLogger(__name__)

LAYOUT = 1
"""Of the blocks. Processes with another one do not see each other's objects."""
LABEL_BYTES = 256
HEAD_BYTES = 1024
INLINE_BYTES_MAX = HEAD_BYTES - LABEL_BYTES
EXACT_MAX = 4
EXACT_BYTES_MAX = 4 << 20
OFTEN = 4
"""A size that one process has put so often, or twice in one call, comes often."""
CHUNK_BYTES = 1 << 20
LADDER_FACTOR = 1.25
LADDER_FIRST = 1024
SIZES_COUNTED_MAX = 4096
LOOK_S = 1.0
LOOKUP_S = 0.05
"""How long a lookup waits for what other nodes know."""
SPACES_TOGETHER = 7
"""Namespaces in one request, which has a limit of keys in all of them together."""

_DIGIT_BITS, DEPTH = 6, 4
_HEADS = 0  # the catalog's number for the heads
_CATALOG_BYTES = 64


def _ladder() -> list[int]:
    rungs = [LADDER_FIRST]
    while rungs[-1] < CHUNK_BYTES:
        rungs.append(min(-(-int(rungs[-1] * LADDER_FACTOR) // 64) * 64, CHUNK_BYTES))
    return rungs


LADDER = _ladder()
"""Sizes of chunks' blocks, their labels left out."""


class Space:
    """A namespace that is looked into by an object's key.

    size: of its objects, or 0 for heads. known_at: the incarnation of the daemon that has it in the catalog from here.
    """

    __slots__ = ("known_at", "ns", "size")

    def __init__(self, ns: Namespace, size: int) -> None:
        self.ns = ns
        self.size = size
        self.known_at = ""


class Spaces:
    """The namespaces of one tenant of the facade, as far as this process knows. Thread-safe.

    verify: the namespaces are opened so that reads are compared with checksums. now: seconds, monotonic.
    """

    def __init__(
        self,
        client: Client,
        tenant_id: str,
        *,
        verify: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._verify = verify
        self._tenant_id = tenant_id
        self._now = now
        self._lock = threading.Lock()
        self._catalog = self._open("catalog", _CATALOG_BYTES)
        self._chunks: dict[int, Namespace] = {}
        self._seen: Counter[int] = Counter()
        self._looked_at = -LOOK_S
        self._marks = _mark(0) + _mark(1)
        self.exact: dict[int, Space] = {}
        self.heads: Space | None = None
        self.all: list[Space] = []
        """That where something was found last comes first. Replaced, never changed."""

    def _open(self, kind: str, nbytes: int) -> Namespace:
        return self._client.open(self._record(kind, nbytes), verify=self._verify)

    def _record(self, kind: str, nbytes: int) -> NamespaceRecord:
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

    def chunks(self, rung: int) -> Namespace:
        """For chunks of one rung of the ladder."""
        with self._lock:
            ns = self._chunks.get(rung)
            if ns is None:
                ns = self._chunks[rung] = self._open("chunks", rung + LABEL_BYTES)
        return ns

    @property
    def first(self) -> Space | None:
        """The namespace where something was found last."""
        return self.all[0] if self.all else None

    def holding_bytes(self, digests: Collection[str]) -> list[Namespace]:
        """Of all that may hold bytes of objects; digests: of the namespaces that there are, in hex."""
        rungs = [
            rung
            for rung in LADDER
            if self._record("chunks", rung + LABEL_BYTES).digest().hex() in digests
        ]
        return [space.ns for space in self.all] + [self.chunks(rung) for rung in rungs]

    # ---- lookups -------------------------------------------------------------------------------------

    def present(self, ns: Namespace, packed: bytes) -> npt.NDArray[np.uint8]:
        """Return what `Client.present` does."""
        return self._client.present(ns, packed, wait_s=LOOKUP_S)

    def find(self, packed: bytes) -> tuple[list[Space | None], bytes]:
        """For each key the namespace that has it, and how near its nearest replica is (`Presence`)."""
        spaces = self.all[:SPACES_TOGETHER]
        if not spaces:
            return self._find_on(packed, [], [], b"")
        rows, marks = self._present_in(spaces, packed)
        if 0 not in rows[0]:
            return [spaces[0]] * len(rows[0]), rows[0]
        return self._find_on(packed, spaces, rows, marks)

    def _find_on(
        self, packed: bytes, spaces: Sequence[Space], rows: Sequence[bytes], marks: bytes
    ) -> tuple[list[Space | None], bytes]:
        """With what the first request has found in these namespaces, if there was one."""
        n = len(packed) // KEY_BYTES
        where: list[Space | None] = [None] * n
        nearest = bytearray(n)
        left: Sequence[int] = range(n)
        asked = {space.size for space in spaces}
        looked = False
        while left:
            if spaces:
                having = [number for number, row in enumerate(rows) if row.count(0) < len(row)]
                for number in having:
                    for at, near in zip(left, rows[number], strict=True):
                        if near > nearest[at]:
                            where[at], nearest[at] = spaces[number], near
                if having:
                    self._first(spaces[having[0]])
                    left = [at for at in left if not nearest[at]]
                if left:
                    self._heed(marks)
            elif looked or not self._look_due():
                break
            else:
                looked = True
                self.look()
            spaces = self._unasked(asked)
            if spaces and left:
                rows, marks = self._present_in(spaces, _chosen(packed, left))
        return where, bytes(nearest)

    def _unasked(self, asked: set[int]) -> list[Space]:
        """Some of the namespaces whose sizes were not asked for yet, which they are then."""
        spaces = [space for space in self.all if space.size not in asked][:SPACES_TOGETHER]
        asked.update([space.size for space in spaces])
        return spaces

    def _present_in(self, spaces: Sequence[Space], packed: bytes) -> tuple[list[bytes], bytes]:
        """Of the keys in each namespace, and of the marks."""
        namespaces = [space.ns for space in spaces]
        return self._client.present_in(
            namespaces, packed, first=True, beside=self._marks, wait_s=LOOKUP_S
        )

    def _first(self, space: Space) -> None:
        """Something was found in this one."""
        if self.all[0] is not space:
            with self._lock:
                self.all = [space, *(other for other in self.all if other is not space)]

    def remove(self, packed: bytes, others_s: float) -> bytes:
        """Remove keys from all namespaces, those included that others have added, on all nodes within `others_s`.

        One byte a key, 1 where there was a block. Raises `KvpoolError`: if a node did not answer, it may keep some.
        """
        if not self.all:
            self.look()
        gone = bytes(len(packed) // KEY_BYTES)
        spaces = self.all[:SPACES_TOGETHER]
        asked: set[int] = set()
        while spaces:
            found, marks = self._client.remove_each(
                [space.ns for space in spaces], packed, beside=self._marks, others_s=others_s
            )
            self._heed(marks)
            if len(self.all) == len(spaces):
                return found  # by one request, mostly
            gone = bytes(map(or_, gone, found))
            asked.update([space.size for space in spaces])
            spaces = self._unasked(asked)
        return gone

    def _heed(self, marks: bytes) -> None:
        """What a request found of this process's last mark and the next one."""
        last, further = marks
        if not last or further:
            self.look()
        if not last and self._client.available:
            try:
                self.put_marks()
            except KvpoolError as error:
                logger.info("the marks of %d namespaces are lost: %s", len(self.all), error)

    def _look_due(self) -> bool:
        return not self.all or self._now() - self._looked_at >= LOOK_S

    def look(self) -> None:
        """Read the catalog, and learn of the namespaces that this process did not know.

        What this process knows and the catalog has lost is entered anew.
        """
        prefixes = [0]
        for level in range(DEPTH):
            digits = range(1 << _DIGIT_BITS)
            codes = [prefix << _DIGIT_BITS | digit for prefix in prefixes for digit in digits]
            keys = b"".join([_catalog_key(level, code) for code in codes])
            found = self.present(self._catalog, keys)
            prefixes = [codes[at] for at in np.flatnonzero(found).tolist()]
        self._learn(prefixes)
        self._looked_at = self._now()
        listed = set(prefixes)
        lost = [space for space in self.all if space.size not in listed]
        if not lost or not self._client.available:
            return
        try:
            for space in lost:
                self._enter(space)
            self.put_marks()
        except KvpoolError as error:
            logger.info("%d sizes are missing from the catalog: %s", len(lost), error)

    def _learn(self, sizes: Iterable[int]) -> None:
        """All at once: another thread finds all of them, or none."""
        with self._lock:
            known = {space.size for space in self.all}
            new = [self._space(size) for size in sizes if size not in known]
            if new:
                self.exact = {**self.exact, **{space.size: space for space in new if space.size}}
                self.heads = next((space for space in new if not space.size), self.heads)
                self.all = [*self.all, *new]
                self._marks = _mark(len(self.all)) + _mark(len(self.all) + 1)

    def _space(self, size: int) -> Space:
        if size == _HEADS:
            return Space(self._open("heads", HEAD_BYTES), size)
        return Space(self._open("exact", size + LABEL_BYTES), size)

    # ---- for puts ------------------------------------------------------------------------------------

    def space_for(self, size: int, count: int) -> Space:
        """Where to put `count` objects of this size; the catalog has it. Raises `KvpoolError`."""
        space = self.exact.get(size)
        try:
            if space is None and self._often(size, count) and len(self.exact) < EXACT_MAX:
                space = self._add(size)
            if space is not None:
                self._make_known(space)
                return space
        except PoolFull:
            pass  # of this size no more fit for now; heads and chunks may
        return self.for_heads()

    def for_heads(self) -> Space:
        """The catalog has it. Raises `KvpoolError`."""
        space = self.heads or self._add(_HEADS)
        self._make_known(space)
        return space

    def _often(self, size: int, count: int) -> bool:
        if not INLINE_BYTES_MAX < size <= EXACT_BYTES_MAX:
            return False
        with self._lock:
            if len(self._seen) > SIZES_COUNTED_MAX:
                self._seen.clear()
            self._seen[size] += count
            return count > 1 or self._seen[size] >= OFTEN

    def _add(self, size: int) -> Space:
        self.look()  # others may have added some
        self._learn([size])
        return next(space for space in self.all if space.size == size)

    def _make_known(self, space: Space) -> None:
        """Enter the namespace into the catalog from this node, once in each life of the daemon; later, `look` does.

        Raises `KvpoolError`.
        """
        if space.known_at and space.known_at == self._client.incarnation:
            return
        self._enter(space)
        self.look()  # of two that enter one each at a time, the later sees both
        self.put_marks()
        space.known_at = self._client.incarnation

    def _enter(self, space: Space) -> None:
        """Raises `KvpoolError`."""
        keys = b"".join(
            [
                _catalog_key(level, space.size >> _DIGIT_BITS * (DEPTH - 1 - level))
                for level in range(DEPTH)
            ]
        )
        self._put_zeros(self._catalog, keys, _CATALOG_BYTES)

    def put_marks(self) -> None:
        """Raises `KvpoolError`."""
        spaces = self.all
        marks = b"".join([_mark(count) for count in range(1, len(spaces) + 1)])
        for space in spaces:
            self._put_zeros(space.ns, marks, (space.size or HEAD_BYTES - LABEL_BYTES) + LABEL_BYTES)

    def _put_zeros(self, ns: Namespace, keys: bytes, nbytes: int) -> None:
        block = np.zeros(nbytes, np.uint8)
        if not self._client.put_each(ns, keys, [block] * (len(keys) // KEY_BYTES)).all():
            raise PoolFull("there is no space for the entry of another size of objects")
        try:
            self._client.pin(ns, keys, "soft")
        except LimitExceeded:
            pass  # they are lost sooner

    def marks_in(self, space: Space) -> int:
        """How many of its blocks are marks."""
        marks = b"".join([_mark(count) for count in range(1, len(self.all) + 1)])
        return int(np.count_nonzero(self._client.contains(space.ns, marks))) if marks else 0


def _chosen(packed: bytes, indices: Sequence[int]) -> bytes:
    return b"".join([packed[KEY_BYTES * at : KEY_BYTES * at + KEY_BYTES] for at in indices])


def _mark(count: int) -> bytes:
    return xxhash.xxh3_128_digest(b"kvpool mooncake mark", count)


def _catalog_key(level: int, code: int) -> bytes:
    return xxhash.xxh3_128_digest(b"kvpool mooncake size", level << 32 | code)


def rung_for(nbytes: int) -> int:
    """The smallest rung of the ladder that takes a chunk."""
    return next(rung for rung in LADDER if rung >= nbytes)


__all__ = [
    "CHUNK_BYTES",
    "EXACT_BYTES_MAX",
    "HEAD_BYTES",
    "INLINE_BYTES_MAX",
    "LABEL_BYTES",
    "LADDER",
    "LOOKUP_S",
    "KvpoolError",
    "Space",
    "Spaces",
    "rung_for",
]

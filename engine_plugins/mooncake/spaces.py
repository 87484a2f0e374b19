"""The namespaces that hold a tenant's objects, and how processes find out which there are.

    exact      objects of one size, each a block of that size and its label: one namespace for each of the first
               `EXACT_MAX` sizes that come often. KV pages have one or two sizes
    heads      all other objects: a block each, with the object itself if it is small, else with the name of its chunks
    chunks     their bytes, in blocks of a ladder of sizes
    catalog    which sizes have a namespace: see `catalog.py`

An object is looked for in all exact namespaces and among the heads, by one request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import or_

import numpy as np
import xxhash

from kvpool.client import Client
from kvpool.engine_plugins.mooncake.catalog import LOOK_S, LOOKUP_S, Catalog, marks_of
from kvpool.engine_plugins.mooncake.labels import HEAD_BYTES, INLINE_BYTES_MAX, LABEL_BYTES, LADDER
from kvpool.errors import KvpoolError, PoolFull
from kvpool.types import KEY_BYTES, Namespace

logger = logging.getLogger(__name__)

EXACT_MAX = 4
EXACT_BYTES_MAX = 4 << 20
OFTEN = 4
"""A size that one process has put so often, or twice in one call, comes often."""
SIZES_COUNTED_MAX = 4096
SPACES_TOGETHER = 7
"""Namespaces in one request, which has a limit of keys in all of them together."""

_HEADS = 0  # the catalog's number for the heads


@dataclass(slots=True, eq=False)
class Space:
    """A namespace that is looked into by an object's key.

    size: of its objects, or 0 for heads. known_at: the incarnation of the daemon that has it in the catalog from here.
    """

    ns: Namespace
    size: int
    known_at: str = ""


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
        self._seed = xxhash.xxh3_64_intdigest(tenant_id.encode())
        self._now = now
        self._lock = threading.Lock()
        self.catalog = Catalog(client, tenant_id, verify=verify)
        self._chunks: dict[int, Namespace] = {}
        self._seen: Counter[int] = Counter()
        self._looked_at = -LOOK_S
        self._marks = marks_of(0, 2)
        self.exact: dict[int, Space] = {}
        self.heads: Space | None = None
        self.all: list[Space] = []
        """That where something was found last comes first. Replaced, never changed."""

    def packed(self, keys: Iterable[bytes]) -> bytes:
        """The pool's keys of objects, for all namespaces."""
        digest, seed = xxhash.xxh3_128_digest, self._seed
        return b"".join([digest(key, seed) for key in keys])

    def chunks(self, rung: int) -> Namespace:
        """For chunks of one rung of the ladder."""
        with self._lock:
            ns = self._chunks.get(rung)
            if ns is None:
                ns = self._chunks[rung] = self.catalog.open("chunks", rung + LABEL_BYTES)
        return ns

    def holding_bytes(self, digests: Collection[str]) -> list[Namespace]:
        """Of all that may hold bytes of objects; digests: of the namespaces that there are, in hex."""
        record = self.catalog.record
        rungs = [
            rung
            for rung in LADDER
            if record("chunks", rung + LABEL_BYTES).digest().hex() in digests
        ]
        return [space.ns for space in self.all] + [self.chunks(rung) for rung in rungs]

    # ---- lookups -------------------------------------------------------------------------------------

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
            elif looked or (self.all and self._now() - self._looked_at < LOOK_S):
                break
            else:
                looked = True
                self.look()
            spaces = self._unasked(asked)
            if spaces and left:
                rows, marks = self._present_in(spaces, chosen(packed, left))
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
            self._enter_lost([])

    def look(self) -> None:
        """Read the catalog, and learn of the namespaces that this process did not know.

        What this process knows and the catalog has lost is entered anew.
        """
        sizes = self.catalog.sizes()
        self._learn(sizes)
        self._looked_at = self._now()
        lost = {space.size for space in self.all}.difference(sizes)
        if lost and self._client.available:
            self._enter_lost(lost)

    def _enter_lost(self, sizes: Collection[int]) -> None:
        """Enter them into the catalog, and the marks of all namespaces."""
        try:
            for size in sizes:
                self.catalog.enter(size)
            self.put_marks()
        except KvpoolError as error:
            logger.info("the catalog lacks %d sizes, or marks of them: %s", len(sizes), error)

    def _learn(self, sizes: Iterable[int]) -> None:
        """All at once: another thread finds all of them, or none."""
        with self._lock:
            known = {space.size for space in self.all}
            new = [self._space(size) for size in sizes if size not in known]
            if new:
                self.exact = {**self.exact, **{space.size: space for space in new if space.size}}
                self.heads = next((space for space in new if not space.size), self.heads)
                self.all = [*self.all, *new]
                self._marks = marks_of(len(self.all), len(self.all) + 2)

    def _space(self, size: int) -> Space:
        if size == _HEADS:
            return Space(self.catalog.open("heads", HEAD_BYTES), size)
        return Space(self.catalog.open("exact", size + LABEL_BYTES), size)

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
        self.catalog.enter(space.size)
        self.look()  # of two that enter one each at a time, the later sees both
        self.put_marks()
        space.known_at = self._client.incarnation

    def put_marks(self) -> None:
        """Raises `KvpoolError`."""
        self.catalog.put_marks([space.ns for space in self.all])

    def marks_in(self, space: Space) -> int:
        """How many of its blocks are marks."""
        marks = marks_of(1, len(self.all) + 1)
        return int(np.count_nonzero(self._client.contains(space.ns, marks)))


def chosen(packed: bytes, indices: Iterable[int]) -> bytes:
    """Some of the keys."""
    return b"".join([packed[KEY_BYTES * at : KEY_BYTES * at + KEY_BYTES] for at in indices])

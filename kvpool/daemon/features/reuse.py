"""How often blocks are asked for again, after how much else: from a sample, while the node runs. No I/O, no clock.

Asked for again after other blocks of so many bytes in all (its reuse distance), a block is still there in a memory of
at least that size that evicts the least recently used. So the distances of all reads give the hit rate of any amount
of memory. They are measured as SHARDS does (Waldspurger et al., FAST'15): only blocks whose hash is below a threshold
are followed, and what lies between two reads of one is counted among those. The threshold falls where more than
`SAMPLES_MAX` are followed, or where following them would take too much time.

Only a block that was put is there for a read; a read of another one can hit in no memory. A block that was had although
nobody put it here came from another node, or was on a disk when the daemon started: such a read counts as one that the
present memory just allows.

Reads and puts only append their keys to a list; the rest is done later, a little at a time (`turns`). Of the blocks of
one call the first is the youngest, as in eviction: a prefix is of use without its end, and not the other way round.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.daemon.core.blocks import NamespaceState
from kvpool.telemetry.hit_curve import Reuse, bucket_of
from kvpool.types import KEY_BYTES, PartKind

SAMPLES_MAX = 4096
SAMPLES_MIN = 512  # are followed whatever that takes
WORK_MAX = 2000  # followed reads of blocks in one pass of `turns`: ten milliseconds
TOGETHER = 100  # of these in a turn
CALLS_TOGETHER = 256  # reads and puts whose blocks are looked through in a turn
PENDING_MAX = 1 << 16  # keys between two passes: two milliseconds, and 1 MiB
HALF_S = 6 * 3600.0  # after so long a read counts half
FORGET_S = 86_400.0  # a block that was not asked for so long is a new one
AGE_EVERY_S = 60.0
KEPT_SHARE = 7 / 8  # of the followed blocks, when there are too many
_ODD = np.uint64(0x9E3779B97F4A7C15)
_ALL = 1 << 32
_READ, _HAD, _CAME, _PUT = range(4)


class _Chosen(NamedTuple):
    """Followed blocks of reads and puts. hashes: of 32 bits. kinds: of the calls; of blocks that reads had, `_HAD`."""

    idents: npt.NDArray[np.uint64]
    hashes: npt.NDArray[np.uint32]
    sizes: npt.NDArray[np.float64]
    kinds: npt.NDArray[np.int64]

    def only(self, these: Any) -> _Chosen:
        """These rows."""
        return _Chosen(self.idents[these], self.hashes[these], self.sizes[these], self.kinds[these])


class ReuseCurve:
    """See the module. Not thread-safe."""

    def __init__(self, samples_max: int = SAMPLES_MAX, *, work_max: int = WORK_MAX) -> None:
        self._samples_max = samples_max
        self._work_max = work_max
        self._threshold = _ALL  # of hashes of 32 bits; the sampled share of all blocks
        self.present_bytes = 0.0  # of memory and disks that there are
        self._pending: list[tuple[int, NamespaceState, bytes | Sequence[bytes], int]] = []
        self._pending_keys = 0
        self._places: dict[int, int] = {}  # of each followed block, the youngest last
        self._next = 0
        room = 2 * samples_max
        # Of the block at each place; 0 bytes where there is none.
        self._sizes: npt.NDArray[np.float64] = np.zeros(room)
        self._times: npt.NDArray[np.float64] = np.zeros(room)
        self._idents: npt.NDArray[np.uint64] = np.zeros(room, dtype=np.uint64)
        self._hashes: npt.NDArray[np.uint32] = np.zeros(room, dtype=np.uint32)
        self._own: npt.NDArray[np.bool_] = np.zeros(room, dtype=np.bool_)  # put here
        self._aged: float | None = None
        self.found = Reuse()

    def asked(self, namespace: NamespaceState, packed: bytes, found: int) -> None:
        """A client asked for these blocks, in the order of their chain, and the first `found` were there. What is given is
        kept for a moment, here and below: the caller must not change it.
        """
        self._note(_READ, namespace, packed, len(packed) // KEY_BYTES, found)

    def came(self, namespace: NamespaceState, keys: Sequence[bytes]) -> None:
        """Of the last read of these blocks, which did not find them: they were had after all, from elsewhere."""
        self._note(_CAME, namespace, keys, len(keys), 0)

    def put(self, namespace: NamespaceState, keys: bytes | Sequence[bytes]) -> None:
        """A client has stored these blocks."""
        count = len(keys) // KEY_BYTES if isinstance(keys, bytes) else len(keys)
        self._note(_PUT, namespace, keys, count, 0)

    def _note(
        self,
        kind: int,
        namespace: NamespaceState,
        keys: bytes | Sequence[bytes],
        count: int,
        found: int,
    ) -> None:
        if self._pending_keys + count > PENDING_MAX:
            self.found.skipped += count
            return
        self._pending.append((kind, namespace, keys, found))
        self._pending_keys += count

    def missed(self, blocks: int) -> None:
        """So many of the blocks that were asked for were not had."""
        self.found.missed += blocks

    # ---- afterwards --------------------------------------------------------------------------------

    def turns(self, now: float) -> Iterator[None]:
        """Follow what was asked since the last pass, and yield now and then, for others to run."""
        self._age(now)
        pending, self._pending, self._pending_keys = self._pending, [], 0
        if not pending:
            return
        pieces = []
        for at in range(0, len(pending), CALLS_TOGETHER):
            pieces.append(self._select(pending[at : at + CALLS_TOGETHER]))
            yield
        chosen = _Chosen(*map(np.concatenate, zip(*pieces, strict=True)))
        if len(chosen.idents) > self._work_max and len(self._places) >= SAMPLES_MIN:
            kept_share = max(self._work_max / len(chosen.idents), SAMPLES_MIN / len(self._places))
            self._lower(int(self._threshold * kept_share))
            kept = chosen.hashes < self._threshold
            chosen = chosen.only(kept)
        if len(chosen.idents) > 2 * self._work_max:
            # Few blocks, very often: the rest is more of the same.
            chosen = chosen.only(slice(self._work_max))
        rows = zip(*(column.tolist() for column in chosen), strict=True)
        for turn, (ident, hashed, size, kind) in enumerate(rows, 1):
            if hashed < self._threshold:
                self._follow(ident, hashed, size, kind, now)
            if turn % TOGETHER == 0:
                yield

    def _select(
        self, pending: list[tuple[int, NamespaceState, bytes | Sequence[bytes], int]]
    ) -> _Chosen:
        """The followed blocks of these calls in their order, of each the last block first."""
        kinds, spaces, keys, founds = zip(*pending, strict=True)
        packed = [each if isinstance(each, bytes) else b"".join(each) for each in keys]
        counts = np.array([len(each) // KEY_BYTES for each in packed])
        low = np.frombuffer(b"".join(packed), dtype="<u8")[1::2]
        kind = np.array(kinds)
        self.found.asked += int(counts[kind == _READ].sum())
        ends = np.cumsum(counts)
        begins = ends - counts
        calls = np.repeat(np.arange(len(pending)), counts)
        idents = low ^ np.array([each.space for each in spaces], dtype=np.uint64)[calls]
        hashes = ((idents * _ODD) >> np.uint64(32)).astype(np.uint32)
        chosen = np.flatnonzero(hashes < self._threshold)
        of = calls[chosen]
        order = np.argsort(begins[of] + ends[of] - chosen, kind="stable")
        chosen, of = chosen[order], of[order]
        nbytes = {each: _block_bytes(each) for each in set(spaces)}
        sizes = np.array([nbytes[each] for each in spaces])
        had = (kind[of] == _READ) & (chosen - begins[of] < np.array(founds)[of])
        return _Chosen(idents[chosen], hashes[chosen], sizes[of], np.where(had, _HAD, kind[of]))

    def _follow(self, ident: int, hashed: int, size: float, kind: int, now: float) -> None:
        weight = _ALL / self._threshold
        found = self.found
        place = self._places.pop(ident, None)
        if place is not None:
            if kind in {_READ, _HAD}:
                between = float(self._sizes[place + 1 : self._next].sum())
                self._count(bucket_of(between * weight + size), weight)
            own = bool(self._own[place]) or kind == _PUT
            self._sizes[place] = 0.0
        elif kind == _READ:
            found.first += weight
            return
        else:
            if kind != _PUT:
                self._count(max(0, bucket_of(self.present_bytes) - 1), weight)
            if kind == _CAME:
                found.first = max(0.0, found.first - weight)
            own = kind == _PUT
            if len(self._places) >= self._samples_max:
                followed = self._hashes[list(self._places.values())]
                self._lower(int(np.quantile(followed, KEPT_SHARE)))
                if hashed >= self._threshold:
                    return
        if self._next == len(self._sizes):
            self._pack()
        place = self._next
        self._next += 1
        self._places[ident] = place
        self._sizes[place], self._times[place], self._own[place] = size, now, own
        self._idents[place], self._hashes[place] = ident, hashed

    def _count(self, bucket: int, weight: float) -> None:
        distances = self.found.distances
        distances[bucket] = distances.get(bucket, 0.0) + weight

    def _pack(self) -> None:
        """Take out the places that are empty."""
        kept = np.fromiter(self._places.values(), dtype=np.int64, count=len(self._places))
        columns = (self._sizes, self._times, self._idents, self._hashes, self._own)
        for column in columns:
            column[: len(kept)] = column[kept]
        self._sizes[len(kept) :] = 0.0
        self._places = dict(zip(self._places, range(len(kept)), strict=True))
        self._next = len(kept)

    def _lower(self, threshold: int) -> None:
        """Follow fewer from now on."""
        self._threshold = max(1, threshold)
        self._keep(self._hashes < self._threshold)

    def _keep(self, kept: npt.NDArray[np.bool_]) -> None:
        """Follow only those at these places any more."""
        for ident in [ident for ident, place in self._places.items() if not kept[place]]:
            self._sizes[self._places.pop(ident)] = 0.0

    def _age(self, now: float) -> None:
        """What was long ago counts less, and is forgotten."""
        if self._aged is None:
            self._aged = now
        passed = now - self._aged
        if passed < AGE_EVERY_S:
            return
        self._aged = now
        self.found.fade(0.5 ** (passed / HALF_S))
        self._keep(self._times >= now - FORGET_S)

    def reuse(self) -> Reuse:
        """What is known by now. The caller must not change it."""
        self.found.share = self._threshold / _ALL
        places = list(self._places.values())
        self.found.samples = self._idents[places][self._own[places]].tobytes()
        return self.found


def _block_bytes(namespace: NamespaceState) -> float:
    """Of a block in memory; parts with windows are not needed of most blocks."""
    whole = [table for table in namespace.tables if table.spec.kind is PartKind.FULL]
    return math.fsum(table.stride / table.spec.stride for table in whole or namespace.tables)

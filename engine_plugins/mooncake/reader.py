"""Finding and reading objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvpool.client import NO_ROW
from kvpool.engine_plugins.mooncake import codes
from kvpool.engine_plugins.mooncake.blocks import Blocks, reading
from kvpool.engine_plugins.mooncake.heads import Chunks, Heads, Limits
from kvpool.engine_plugins.mooncake.labels import LABEL_BYTES, Owner, owner_of, whole_label
from kvpool.engine_plugins.mooncake.pieces import BadAddressError, Pieces, fill
from kvpool.engine_plugins.mooncake.spaces import Space, Spaces, chosen
from kvpool.types import KEY_BYTES


@dataclass(slots=True)
class _Read:
    """One call. found: for each key how many bytes, or a code."""

    keys: Sequence[bytes]
    targets: Sequence[Pieces]
    packed: bytes
    found: list[int]


@dataclass(eq=False)
class ObjectReader:
    """Thread-safe. Nothing here raises for what the pool does."""

    _spaces: Spaces
    _blocks: Blocks
    _heads: Heads
    _chunks: Chunks
    _limits: Limits
    _missing: bool = field(default=False, init=False)
    """Whether the last read found nothing."""

    def exist(self, keys: Sequence[bytes]) -> list[bool] | None:
        """For each key, whether it could be read; None: the daemon does not answer."""
        where, nearest = self._spaces.find(self._spaces.packed(keys))
        if 0 not in nearest and self._spaces.heads is None:
            return [True] * len(keys)
        found = [space is not None for space in where]
        in_heads = [at for at, space in enumerate(where) if space is not None and not space.size]
        if in_heads:
            whole = self._chunks.whole(self._heads.find([keys[at] for at in in_heads]))
            for at, is_whole in zip(in_heads, whole, strict=True):
                found[at] = is_whole
        if not all(found) and self._blocks.away:
            return None
        return found

    def sizes(self, keys: Sequence[bytes]) -> list[tuple[int, int]] | None:
        """For each key the object's length, or -1, and its `Presence`; None: the daemon does not answer."""
        where, nearest = self._spaces.find(self._spaces.packed(keys))
        found = [
            (-1, 0) if space is None else (space.size, near)
            for space, near in zip(where, nearest, strict=True)
        ]
        in_heads = [at for at, (size, _) in enumerate(found) if size == 0]
        if in_heads:
            heads = self._heads.find([keys[at] for at in in_heads])
            for at, head, whole in zip(in_heads, heads, self._chunks.whole(heads), strict=True):
                found[at] = (-1, 0) if head is None or not whole else (head.length, found[at][1])
        if any(size < 0 for size, _ in found) and self._blocks.away:
            return None
        return found

    def owners(self, space: Space, packed: bytes, wait_s: float = 0.0) -> list[Owner | None]:
        """For each block of a namespace the object that it holds, or leads to; None: it is not here, or holds none.

        wait_s: for blocks that are not in memory here. They are not compared with checksums if the namespace is not
        opened so.
        """
        found: list[Owner | None] = [None] * (len(packed) // KEY_BYTES)
        lease = self._blocks.acquire(space.ns, packed, wait_s)
        if lease is None:
            return found
        with reading(lease):
            slots = lease.slots[0]
            table, start = slots.table, space.size
            for at, row in enumerate(slots.rows.tolist()):
                if row != NO_ROW:
                    found[at] = owner_of(table[row, start : start + LABEL_BYTES].tobytes())
            return found if lease.valid else [None] * len(found)

    def read(self, keys: Sequence[bytes], targets: Sequence[Pieces]) -> list[int]:
        """Read objects; for each key how many bytes, or a code, which is `INVALID` where the target is smaller.

        A target is best as large as the object: where that is not so, it costs time.
        """
        n = len(keys)
        one = _Read(keys, targets, self._spaces.packed(keys), [codes.NOT_FOUND] * n)
        left = list(range(n))
        exact, spaces = self._spaces.exact, self._spaces.all
        groups: dict[int, list[int]] = {}
        # After a read that found nothing, ask before reading: nothing again is then one request.
        for at in () if self._missing else left:
            size = targets[at].nbytes
            if size not in exact:
                size = spaces[0].size if spaces else 0
            if size:
                groups.setdefault(size, []).append(at)
        for size, some in groups.items():
            self._read_exact(one, exact[size], some, 0.0)
        left = [at for at in left if one.found[at] == codes.NOT_FOUND]
        if not left:
            return one.found
        # Not here under that size: elsewhere, of another size, or nowhere.
        where, _ = self._spaces.find(chosen(one.packed, left))
        elsewhere: dict[int, list[int]] = {}
        for at, space in zip(left, where, strict=True):
            if space is not None:
                elsewhere.setdefault(space.size, []).append(at)
        for size, some in elsewhere.items():
            if size:
                self._read_exact(one, self._spaces.exact[size], some, self._limits.read_s)
            else:
                self._read_heads(one, some)
        self._missing = not elsewhere and len(left) == n
        if self._blocks.away:
            return [codes.UNAVAILABLE if code == codes.NOT_FOUND else code for code in one.found]
        return one.found

    def _read_exact(self, one: _Read, space: Space, some: list[int], wait_s: float) -> None:
        packed = one.packed if len(some) == len(one.keys) else chosen(one.packed, some)
        lease = self._blocks.acquire(space.ns, packed, wait_s)
        if lease is None:
            return
        size, found = space.size, one.found
        done: list[int] = []
        with reading(lease):
            slots = lease.slots[0]
            table, fd, stride = slots.table, slots.fd, slots.stride
            rows = slots.rows
            labels = [whole_label(one.keys[at], size) for at in some]
            if len(some) == 1:
                row = int(rows[0])
                if row == NO_ROW or table[row, size : size + LABEL_BYTES].tobytes() != labels[0]:
                    return
                good = [0]
            else:
                here = np.flatnonzero(rows != NO_ROW)
                wanted = np.frombuffer(b"".join(labels), np.uint8).reshape(-1, LABEL_BYTES)
                same = table[rows[here], size : size + LABEL_BYTES] == wanted[here]
                good = here[same.all(axis=1)].tolist()
            listed = rows.tolist()
            for number in good:
                at, row = some[number], listed[number]
                if one.targets[at].nbytes < size:
                    found[at] = codes.INVALID
                    continue
                try:
                    one.targets[at].read(table[row, :size], fd, row * stride)
                except BadAddressError:
                    found[at] = codes.INVALID
                else:
                    found[at] = size
                    done.append(at)
            if not lease.valid:
                for at in done:
                    found[at] = codes.LEASE_LOST

    def _read_heads(self, one: _Read, some: list[int]) -> None:
        heads = self._heads.find([one.keys[at] for at in some])
        for at, head in zip(some, heads, strict=True):
            target = one.targets[at]
            if head is None:
                continue
            if target.nbytes < head.length:
                one.found[at] = codes.INVALID
            elif head.inline is None:
                one.found[at] = self._chunks.read(head, target)
            else:
                one.found[at] = head.length if fill(target, head.inline) else codes.INVALID

"""Tombstones: blocks that are being removed from the whole cluster, so that no read under way brings one back.

While nodes remove a block one after the other, a reader on the first could fetch it from the last: it would be there
again, and stay. A block that was on its way to a node, or set out while its tombstone stood there, is not kept.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvpool.errors import LimitExceeded

BLOCKS_MAX = 1 << 20  # under the tombstones of one node


class Tombstones:
    """Tombstones of one node, each by the token of who put it up. No I/O. Event loop only."""

    def __init__(self) -> None:
        self._standing: dict[bytes, tuple[frozenset[bytes], frozenset[bytes]]] = {}
        self._blocks = 0

    def put_up(self, token: bytes, digests: Collection[bytes], keys: Sequence[bytes]) -> None:
        """Put a tombstone on these keys, in all namespaces of these directory digests, until `take_down`.

        Raises `LimitExceeded`.
        """
        self.take_down(token)
        if self._blocks + len(keys) > BLOCKS_MAX:
            raise LimitExceeded(
                f"{self._blocks} blocks are being removed from the cluster already; the limit is {BLOCKS_MAX}: try again"
            )
        self._standing[token] = frozenset(digests), frozenset(keys)
        self._blocks += len(self._standing[token][1])

    def take_down(self, token: bytes) -> None:
        """Take a tombstone down. Idempotent."""
        _, keys = self._standing.pop(token, (frozenset(), frozenset()))
        self._blocks -= len(keys)

    def among(self, digest: bytes, keys: Collection[bytes]) -> set[bytes]:
        """Return which of these keys have a tombstone, in the namespace of this directory digest."""
        found: set[bytes] = set()
        for digests, buried in self._standing.values():
            if digest in digests:
                found |= buried.intersection(keys)
        return found

"""The directory port: which nodes hold which blocks. A hint; the owner is the truth.

Contract, for every backend (`tests.contract.suites.directory` tests it):

- An entry says: in this namespace (its digest in its epoch), this incarnation holds these parts of this
  block in this tier. `publish` replaces entries as a whole, and a mask of 0 removes them; repeating a call
  has no effect, and calls for different blocks or incarnations may come in any order.
- Entries do not expire, and are not removed when a node dies: readers ignore incarnations
  that are not known to live, and have them swept gradually (`sweep`).
- All may be lost at any time. Each key belongs to one of `tags` groups (`key_groups.tag_of`), and each group has
  a mark that is lost with it: a node that published a key under another mark than the present one publishes
  it again.

One event loop; no method blocks it for longer than the work on one batch takes. Every wait has a
deadline, and ends with `Unavailable`; a failed publish may have been done in part.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

TIERS = {"gpu": 0, "dram": 1, "ssd": 2, "object": 3, "device": 4}
"""Tier names to the byte in entries.

gpu: in an engine's own cache; cannot be pulled. device: in a node's spare device memory, to be
pulled as from any tier below memory.
"""

BATCH_MAX = 4096
"""Keys in one call."""


class Entry(NamedTuple):
    """One replica, as known to the directory."""

    incarnation: bytes  # 8
    tier: int
    mask: int  # bit p: part p is there


class Swept(NamedTuple):
    """One step of a sweep. cursor: where the next one begins; empty: the end."""

    cursor: bytes
    dropped: int  # entries
    met: frozenset[bytes]  # incarnations that have, or had, entries there
    seen: int  # entries, with the dropped ones


class Directory(Protocol):
    """See the module."""

    async def locate(self, digest: bytes, parts: int, keys: Sequence[bytes]) -> list[list[Entry]]:
        """The entries of each key, in the order of the keys; of dead incarnations too.

        digest: of the namespace in its epoch. parts: how many the namespace has.
        """

    async def publish(
        self,
        digest: bytes,
        parts: int,
        incarnation: bytes,
        tier: int,
        keys: Sequence[bytes],
        masks: Sequence[int],
    ) -> None:
        """Set this incarnation's parts of these blocks in this tier; a mask of 0 withdraws."""

    async def marks(self) -> Sequence[bytes | None]:
        """The present mark of each group, by tag; a group without one gets one.

        None for a group whose shard does not answer; raises `Unavailable` when none does. Cheap enough
        for every second.
        """

    async def sweep(self, dead: Collection[bytes], cursor: bytes, count: int) -> Swept:
        """Examine about `count` blocks from `cursor` on (empty: from the start), and drop the entries of
        these incarnations.
        """

    async def close(self) -> None:
        """Idempotent."""

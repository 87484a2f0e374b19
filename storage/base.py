"""The port of a tier: a place that keeps replicas of blocks beside the memory that engines read and write.

`tests.contract.suites.tier` is its suite; `tests.contract.suites.memory_tier` the smallest implementation.

Memory itself is not behind the port. Blocks are *stored* from slots of memory and
*loaded* into slots of memory, and memory's own rules choose the slots.

A tier stores parts. It gets memory's own objects, of which this module uses only the names: a `Namespace` is in
one epoch, a `Table` has the blocks of one part of it, a `Block` is in one table. In the daemon they are
`NamespaceState`, `PartTable` and `Block` (`kvpool.daemon.core.tier`).

Event loop only: no method may be called from another thread, and those that are not coroutines return at once.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

from kvpool.wire import worker as worker_wire

Namespace_contra = TypeVar("Namespace_contra", contravariant=True)
Table_contra = TypeVar("Table_contra", contravariant=True)
Block_contra = TypeVar("Block_contra", contravariant=True)


class Occupancy(NamedTuple):
    """Usage of a tier, in bytes of slots and in blocks of one part; as known here."""

    capacity_bytes: int
    used_bytes: int
    blocks: int


class Tier(Protocol[Namespace_contra, Table_contra, Block_contra]):
    """Common to all tiers."""

    @property
    def serving(self) -> bool:
        """Whether blocks may be found and loaded here now. It may change at any time."""
        ...

    async def store(self, blocks: Sequence[Block_contra]) -> bytes:
        """Store blocks that are in memory; returns a `BlockStatus` each.

        PRESENT: it is here, perhaps already before. NO_SPACE: it is not, because others are worth more. FAILED:
        the tier takes no writes now. ABSENT: memory had evicted it before its turn, or while it was stored.

        The tier keeps the blocks in their slots of memory as long as it reads these, a bounded share of memory at
        a time. Cancelling it ends the wait, not stores that have begun. Raises nothing else.
        """
        ...

    async def load(
        self, table: Table_contra, keys: Sequence[bytes], rows: Sequence[int], seconds: float
    ) -> worker_wire.Pulled:
        """Load blocks of one table into slots of it in memory, which the caller has reserved: its rows.

        The answer has a `BlockStatus` and a checksum for each, in the order of the keys. PRESENT: the bytes are
        in the slot, and match the checksum that they were stored with. ABSENT: it is not here. MISMATCH: it did
        not match; it is not found here again. FAILED and LATE: nothing is known. Unless it is PRESENT the slot
        holds anything.

        seconds: blocks not loaded by then are LATE. However this ends, nothing touches the slots any more. Raises
        `Unavailable` when the tier ends or does not serve.
        """
        ...

    def enter(self, namespace: Namespace_contra) -> None:
        """The namespace is in a new epoch: blocks of its former ones are misses."""
        ...

    def occupancy(self) -> Occupancy:
        """Its usage."""
        ...

    async def close(self) -> None:
        """End all tasks. Calls under way end first, with partial results, or with `Unavailable`. Idempotent."""
        ...


@runtime_checkable
class LocalTier(
    Tier[Namespace_contra, Table_contra, Block_contra],
    Protocol[Namespace_contra, Table_contra, Block_contra],
):
    """A tier of this node alone: the daemon's own books list its blocks."""

    def held(self, table: Table_contra) -> Sequence[Container[bytes]]:
        """Sets of keys whose union is the blocks of a table here. They are the tier's own, and change."""
        ...

    def masks(self, digest: bytes, keys: Sequence[bytes]) -> tuple[int, list[int]]:
        """The number of parts of a namespace, by its directory digest, and the mask of parts here for each key.

        (0, []) if nothing of the namespace was ever here.
        """
        ...

    def walk(self, cursor: int, count: int) -> tuple[list[tuple[bytes, list[bytes]]], int | None]:
        """About `count` blocks from a cursor on (at first 0), grouped by directory digest; the next cursor.

        None: the end. Every block that is here throughout a whole walk is visited.
        """
        ...

    def remove(self, namespace: Namespace_contra, packed: bytes) -> set[bytes]:
        """Remove blocks, all their parts; returns the keys of those that were here. packed: of all.

        Loads under way finish. Memory removes them first: a block being stored is then not found here either. Not
        durable: blocks removed just before the tier's end may be there when it is opened again.
        """
        ...


@runtime_checkable
class SharedTier(
    Tier[Namespace_contra, Table_contra, Block_contra],
    Protocol[Namespace_contra, Table_contra, Block_contra],
):
    """A tier of the whole cluster: lookups are requests, which may fail."""

    async def where(
        self,
        namespace: Namespace_contra,
        tables: Sequence[Table_contra],
        keys: Sequence[bytes],
        *,
        prefix: bool = False,
    ) -> Mapping[bytes, int]:
        """Which of these parts of these keys are here, as masks; keys without any are left out.

        prefix: the keys are a prefix chain; the lookup stops where it ends. Raises `Unavailable`.
        """
        ...

    async def remove(self, namespace: Namespace_contra, packed: bytes) -> set[bytes]:
        """As `LocalTier.remove`. Raises `Unavailable`: then they may still be found."""
        ...

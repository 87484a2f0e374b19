"""A tier's changes for several readers: a tier itself remembers them for one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvpool.daemon.cluster.local_node import Holdings
from kvpool.daemon.core.blocks import NamespaceState

Change = tuple[NamespaceState, Sequence[bytes]]


class SharedHoldings:
    """Event loop only. Each reader takes what has changed since its own last call."""

    def __init__(self, held: Holdings) -> None:
        self._held = held
        self._readers: list[Reader] = []

    def reader(self) -> Reader:
        return Reader(self, self._held)

    def follow(self, reader: Reader) -> None:
        """Remember changes for this reader too, from now on."""
        if not self._readers:
            self._held.follow_changes(self._changed)
        self._readers.append(reader)

    def pass_on(self) -> None:
        """Give all readers what has changed."""
        changes = self._held.take_changes()
        for reader in self._readers:
            reader.changes += changes

    def _changed(self) -> None:
        for reader in self._readers:
            reader.notify()


class Reader:
    """`Holdings` for one reader. changes: that it has not taken, as far as they were passed on."""

    def __init__(self, shared: SharedHoldings, held: Holdings) -> None:
        self._shared = shared
        self._held = held
        self.notify: Callable[[], object] = lambda: None
        self.changes: list[Change] = []

    def follow_changes(self, changed: Callable[[], object]) -> None:
        """See `Inventory.follow_changes`."""
        self.notify = changed
        self._shared.follow(self)

    def take_changes(self) -> list[Change]:
        """See `Inventory.take_changes`."""
        self._shared.pass_on()
        changes, self.changes = self.changes, []
        return changes

    def masks(self, digest: bytes, keys: Sequence[bytes]) -> tuple[int, list[int]]:
        """See `Inventory.masks`."""
        return self._held.masks(digest, keys)

    def walk(self, cursor: int, count: int) -> tuple[list[tuple[bytes, list[bytes]]], int | None]:
        """See `Inventory.walk`."""
        return self._held.walk(cursor, count)

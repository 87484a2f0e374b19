"""Tells the announcer of a tier's blocks which keys have changed, but not how.

A change is a namespace and keys of it: blocks that were stored, or are gone. It is only recorded here; the reader
asks for the current state (`Inventory.masks`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvpool.daemon.core.blocks import NamespaceState

Change = tuple[NamespaceState, Sequence[bytes]]


class ChangeFeed:
    """Changes that were not taken yet; recorded only after `follow`. Not thread-safe."""

    def __init__(self) -> None:
        self._changed: list[Change] = []
        self._notify: Callable[[], object] = lambda: None
        self.followed = False

    def follow(self, changed: Callable[[], object]) -> None:
        """Record changes from now on.

        changed: called when there are new changes, once until they are taken. It must only set a flag.
        """
        self._notify = changed
        self.followed = True

    def tell(self, namespace: NamespaceState, keys: Sequence[bytes]) -> None:
        """The replicas of these blocks here have changed."""
        if self.followed:
            if not self._changed:
                self._notify()
            self._changed.append((namespace, keys))

    def notify(self) -> None:
        """There is something to take, apart from changes that were told."""
        if self.followed and not self._changed:
            self._notify()

    def take(self) -> list[Change]:
        """Changes since the last call; some blocks several times."""
        changed = self._changed
        if changed:
            self._changed = []
        return changed

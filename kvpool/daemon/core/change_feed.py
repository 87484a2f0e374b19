"""What is told to whoever announces the blocks of a tier: that something has changed, not what.

A change is a namespace and keys of it: blocks that were stored, or have gone. It is only noted here; who takes
it asks what is here now (`Inventory.masks`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvpool.daemon.core.blocks import NamespaceState

Change = tuple[NamespaceState, Sequence[bytes]]


class ChangeFeed:
    """Changes that were not taken yet; none are kept before somebody follows. Not thread-safe."""

    def __init__(self) -> None:
        self._changed: list[Change] = []
        self._notify: Callable[[], object] = lambda: None
        self.followed = False

    def follow(self, changed: Callable[[], object]) -> None:
        """Keep changes from now on.

        changed: called when there are some to be taken, once until they are. It only makes a note.
        """
        self._notify = changed
        self.followed = True

    def tell(self, namespace: NamespaceState, keys: Sequence[bytes]) -> None:
        """What is here of these blocks has changed."""
        if self.followed:
            if not self._changed:
                self._notify()
            self._changed.append((namespace, keys))

    def tell_all(self, changes: Sequence[Change]) -> None:
        """The same of several, for those who looked whether anybody follows."""
        if changes:
            if not self._changed:
                self._notify()
            self._changed += changes

    def take(self) -> list[Change]:
        """Those since the last call; some blocks several times."""
        changed = self._changed
        if changed:
            self._changed = []
        return changed

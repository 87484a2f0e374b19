"""Reports what happens to a tier's blocks: to the announcer which keys have changed, and to subscribers how.

For the announcer a change is a namespace and keys of it: blocks that were stored, or are gone. A change is only
recorded here; the reader asks for the current state (`Inventory.masks`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvpool.daemon.core.blocks import Block, NamespaceState, Origin, PartTable
from kvpool.daemon.core.commit_waiters import CommitWaiters
from kvpool.daemon.core.events import Came, Ended, Events, Freed, Gone, TierInfo
from kvpool.telemetry.misses import Reason

Change = tuple[NamespaceState, Sequence[bytes]]


@dataclass(eq=False, repr=False, slots=True)
class ChangeFeed:
    """Changes that were not taken yet; recorded only after `follow`. Not thread-safe."""

    tier: TierInfo
    _events: Events
    _commit_waiters: CommitWaiters
    _changed: list[Change] = field(default_factory=list, init=False)
    _notify: Callable[[], object] = field(default_factory=lambda: lambda: None, init=False)
    followed: bool = field(default=False, init=False)

    # ---- what the rules report ----------------------------------------------------------------------

    def came(
        self, table: PartTable, keys: Sequence[bytes], blocks: Sequence[Block], origin: Origin
    ) -> None:
        """These blocks can be found from now on."""
        self.tell(table.namespace, keys)
        if self._commit_waiters:
            self._commit_waiters.came(table.namespace.directory_digest, keys)
        self._events.emit(Came(self.tier, table, blocks, origin))

    def gone(
        self,
        table: PartTable,
        keys: Sequence[bytes],
        blocks: Sequence[Block],
        reason: Reason,
        *,
        evicted: bool = False,
    ) -> None:
        """These blocks cannot be found any more. evicted: as in `Gone`."""
        self.tell(table.namespace, keys)
        self._events.emit(Gone(self.tier, table, blocks, keys, reason, evicted))

    def ended(self, table: PartTable) -> None:
        """No block of this table can be found any more. The announcer learns that elsewhere."""
        if table.blocks:
            self._events.emit(Ended(self.tier, table))

    def waits_end(self, namespace: NamespaceState) -> None:
        """No block is committed to this namespace any more."""
        self._commit_waiters.end(namespace.directory_digest)

    def freed(self, namespace: NamespaceState) -> None:
        """A namespace is forgotten."""
        self.waits_end(namespace)
        self._events.emit(Freed(self.tier, namespace))

    # ---- for the announcer --------------------------------------------------------------------------

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

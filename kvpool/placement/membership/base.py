"""The membership port: which nodes live, and the namespaces with their epochs.

Contract, for every backend (`tests.contract.suites.membership` tests it):

- `view` is the last known state of the cluster, and never goes back: while the backend is
  unreachable, it stays as it was, and no node expires.
- A record that was joined is seen by all others until its node leaves, or has been silent for the
  lease's time (`ttl_s`) while the backend was up.
- A lost lease is never silently renewed: `standing` says LOST and `lost` is called, and the
  node joins as a new incarnation.
- All writes are idempotent: they may be retried, and done twice, with the same result.

- From `join` on, a backend that refuses what it is asked (a revoked role, a rotated password, no room) is as one
  that does not answer: `Unavailable`, which says what to do. `outage` has it as long as it lasts.
- A record that cannot be read is left out of the view, said once in the log, and counted (`undecodable`).

One event loop; no method blocks it. Every wait has a deadline, and ends with `Unavailable`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Protocol

from kvpool.placement.outage import Outage
from kvpool.placement.records import NamespaceEntry, NodeRecord, SettingsChange, View


class Standing(Enum):
    """Whether this node may act as a member, at a given moment.

    MEMBER: its lease was confirmed less than `ttl_s` ago.
    AWAY: it was not, and the backend was asked within the last `ttl_s` and did not answer: the last view
        is valid, continue.
    UNSURE: it was not, and the backend was not asked for so long (the process was stopped): neither serve peers
        nor publish, until it is known. Ends by itself within a few seconds.
    LOST: the backend reports that the lease is gone: join again as a new incarnation.
    OUT: not joined, or left.
    """

    MEMBER = "member"
    AWAY = "away"
    UNSURE = "unsure"
    LOST = "lost"
    OUT = "out"


class Membership(Protocol):
    """See the module. Watchers are called on the event loop, after `view` has changed, with no argument."""

    @property
    def view(self) -> View: ...

    @property
    def outage(self) -> Outage:
        """What the backend does not do that it is asked."""

    @property
    def undecodable(self) -> int:
        """How often a record was read that is left out of the view."""

    async def start(self) -> None:
        """Read the cluster's state and follow it from there on.

        Raises `ConfigError` (wrong cluster, secret or version; the message says which), `NotAuthenticated`,
        or `Unavailable` if the backend is unreachable within its start-up time.
        """

    def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` after every change of `view`. May be called several times for one."""

    def on_lost(self, lost: Callable[[], None]) -> None:
        """Call `lost` when the lease of the joined record turns out to be gone."""

    async def join(self, record: NodeRecord) -> None:
        """Become a member: bind the record to a lease and keep that alive.

        Waits for a record of the same name whose owner is dead, but whose lease still lasts; one that advertises
        one of this node's URLs is replaced at once, because this node holds that address. Not while joined: leave
        first, or lose the lease. Raises `ConfigError` when another living node has this name, and `Unavailable`.
        """

    async def update(self, record: NodeRecord) -> None:
        """Replace the joined record by one of the same node and incarnation. No-op when it is equal.

        Raises `Unavailable`, also when the lease is gone.
        """

    async def leave(self) -> None:
        """Remove the record and end the lease. Idempotent; best effort while the backend is unavailable."""

    def standing(self, now: float) -> Standing: ...

    async def register(self, entry: NamespaceEntry) -> NamespaceEntry:
        """Register a namespace, if it is new, and return the cluster's epoch and settings for it.

        A new one begins in the first epoch of the view's `clock` at least. Raises `NamespaceMismatch` when it is known
        with other parts, and `Unavailable`.
        """

    async def use(self, tenant: str, digest: str) -> NamespaceEntry:
        """Note that a namespace is used at this hour of the view's `clock`; returns the entry. Raises as `bump_epoch`."""

    async def delete_unused(self, tenant: str, digest: str, used: int) -> bool:
        """Delete a namespace, unless it was used after that hour; returns whether it is deleted.

        In the same moment the cluster's `clock` moves to a later first epoch and generation than it had. Raises
        `Unavailable`.
        """

    async def count_hour(self, hours: int) -> None:
        """Add an hour to the cluster's `clock`, if it stands at so many. Raises `Unavailable`."""

    async def bump_epoch(
        self, tenant: str, digest: str, expected: int, *, fence: bool
    ) -> NamespaceEntry:
        """Start a new epoch, if the present one is `expected`; returns the entry afterwards.

        So repeating the call is harmless, and of two concurrent resets one applies. `fence`: clients of older
        epochs must open the namespace again. Raises `InvalidRequest` if it is not known, and `Unavailable`.
        """

    async def configure(self, tenant: str, digest: str, change: SettingsChange) -> NamespaceEntry:
        """Change settings of a namespace; returns the entry afterwards. Raises as `bump_epoch`.

        Two concurrent changes both apply if they concern different settings.
        """

    async def set_drain(self, node: str, wanted: bool) -> None:
        """An operator wants a node drained, or no longer. Raises `Unavailable`."""

    async def lead(self, chore: str) -> bool:
        """Whether this member leads a cluster-wide chore; tries to become its leader.

        Ask again every few seconds: leadership ends with the lease. False when not a member, and while the
        backend does not answer.
        """

    async def close(self) -> None:
        """Stop following, end the lease if `leave` was not called, free everything. Idempotent."""

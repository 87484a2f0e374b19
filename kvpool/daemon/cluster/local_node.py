"""What the cluster tells, and asks of, the rest of its node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvpool.daemon.core.blocks import NamespaceState
from kvpool.placement.directory.announcement_queue import Held
from kvpool.placement.records import TierRecord, View
from kvpool.types import EngineRecord


class Holdings(Held, Protocol):
    """What a tier of this node holds, for its announcer, and what has changed; see `Inventory` for the methods."""

    def follow_changes(self, changed: Callable[[], object]) -> None: ...

    def take_changes(self) -> list[tuple[NamespaceState, Sequence[bytes]]]: ...


class LocalNode(Protocol):
    """The rest of this node, as its membership sees it. Called on the event loop; quick, but for `keep_epoch`."""

    def holdings(self) -> Mapping[int, Holdings]:
        """What there is to announce when the node joins, by tier."""

    def lower_tiers(self) -> Sequence[TierRecord]:
        """The tiers below memory, as other nodes are told."""

    def engines(self) -> tuple[EngineRecord, ...]:
        """The engines that announced themselves here."""

    def path_to(self, url: str) -> str:
        """The way by which the node at a URL is pulled from at present."""

    def namespace_entered(self, namespace: NamespaceState) -> None:
        """A namespace is in a new epoch, and this is its state."""

    def namespace_configured(self, namespace: NamespaceState) -> None:
        """The settings of a namespace have changed."""

    async def keep_epoch(self, namespace: NamespaceState) -> None:
        """Make an epoch and its settings outlive this process, where no membership does."""

    def replicas_lacking(self) -> None:
        """Blocks may lack replicas: a node has gone or come, or more are wanted."""

    def drain_wanted(self, wanted: bool) -> None:
        """An operator wants this node drained, or not any more."""

    def view_changed(self, before: View, after: View) -> None:
        """The membership has news."""

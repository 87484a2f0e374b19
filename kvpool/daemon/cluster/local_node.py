"""The interface between the cluster and the rest of its node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvpool.daemon.core.blocks import NamespaceState
from kvpool.placement.directory.announcement_queue import Held
from kvpool.placement.records import NodeChange, TierRecord, View
from kvpool.types import EngineRecord


class Holdings(Held, Protocol):
    """The blocks of a tier, for its announcer, and their changes; see `Inventory` for the methods."""

    def follow_changes(self, changed: Callable[[], object]) -> None: ...

    def take_changes(self) -> list[tuple[NamespaceState, Sequence[bytes]]]: ...


class LocalNode(Protocol):
    """The rest of this node, as its membership sees it. Called on the event loop; quick, except `keep_epoch`."""

    def holdings(self) -> Mapping[int, Holdings]:
        """The tiers to announce when the node joins."""

    def lower_tiers(self) -> Sequence[TierRecord]:
        """The tiers below memory, as announced to other nodes."""

    def engines(self) -> tuple[EngineRecord, ...]:
        """The engines that announced themselves here."""

    def path_to(self, url: str) -> str:
        """The transport by which the node at a URL is currently pulled from."""

    def below(self, namespace: NamespaceState) -> bool:
        """Whether a tier below memory has blocks of a namespace, in any epoch."""

    def namespace_entered(self, namespace: NamespaceState) -> None:
        """A namespace is in a new epoch, with this state."""

    def namespace_configured(self, namespace: NamespaceState) -> None:
        """The settings of a namespace have changed."""

    async def keep_epoch(self, namespace: NamespaceState) -> None:
        """Make an epoch and its settings survive this process, if there is no membership service."""

    def replicas_lacking(self) -> None:
        """Blocks may lack replicas: a node has left or joined, or more are wanted."""

    def drain_wanted(self, wanted: bool) -> None:
        """An operator wants this node drained, or cancels that."""

    def view_changed(self, before: View, after: View, nodes: Sequence[NodeChange]) -> None:
        """The membership has changed. nodes: the records that have."""

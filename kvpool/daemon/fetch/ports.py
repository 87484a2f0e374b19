"""What fetching needs of the rest of the daemon: the cluster and the transport to peers. Its tiers are in
`kvpool.daemon.core.tier`.

Sources are named by bytes: peers by their incarnations, and other sources by the names here, none of which has
the length of an incarnation.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple, Protocol

from kvpool.daemon.core.blocks import NamespaceState, PartTable
from kvpool.placement.directory.base import Directory, Entry
from kvpool.placement.records import NodeRecord
from kvpool.wire import frame
from kvpool.wire import worker as worker_wire

DISKS_MAX = 32
DISKS = tuple(b"kvp-disk-%02d" % number for number in range(DISKS_MAX))
"""This node's disks, in the order of its configuration: each is a source of its own."""
DEVICE = b"kvp-device"  # its spare device memory
OBJECT = b"kvp-store"  # object storage
NOT_NODES = {
    DISKS[0]: "ssd of this node",
    **{disk: f"ssd {number} of this node" for number, disk in enumerate(DISKS[1:], start=2)},
    DEVICE: "device of this node",
    OBJECT: "object storage",
}
TIER_OF = {**dict.fromkeys(DISKS, "ssd"), DEVICE: "device", OBJECT: "object"}
PEER = "peer"  # the tier of blocks on other nodes
GONE = "gone"  # the node of a source that is no longer a member


class LivingNode(NamedTuple):
    """A living node, and its address."""

    record: NodeRecord
    url: str


class LocalSource(Protocol):
    """A place of this node below memory that blocks are loaded from: see `kvpool.storage.base.LocalTier`."""

    @property
    def serving(self) -> bool: ...

    def held(self, table: PartTable) -> Sequence[Container[bytes]]: ...

    async def load(
        self, table: PartTable, keys: Sequence[bytes], rows: Sequence[int], seconds: float
    ) -> worker_wire.Pulled: ...


class PeerTransport(Protocol):
    """Moves blocks and requests between nodes: the transfer workers."""

    async def pull(self, order: worker_wire.PullBlocks) -> worker_wire.Pulled: ...

    async def ask(self, order: worker_wire.AskPeer) -> frame.Done | frame.Bytes: ...


class GoneNode(NamedTuple):
    """A node that has left. drained: it was to leave, and had copied its blocks."""

    node: str
    drained: bool


class ClusterView(Protocol):
    """A node's view of its cluster."""

    @property
    def living(self) -> Mapping[bytes, LivingNode]:
        """The other nodes that may be pulled from, by incarnation."""

    @property
    def gone(self) -> Mapping[bytes, GoneNode]:
        """Nodes that were in the cluster, by incarnation; only the last ones."""

    @property
    def directory(self) -> Directory | None: ...

    def met(self, namespace: NamespaceState, keys: Sequence[bytes], entry: Entry) -> None:
        """The directory has this entry for these keys, but no living node has its incarnation."""


def node_name(cluster: ClusterView, incarnation: bytes) -> str:
    """The name of a peer, for spans and counters."""
    other = cluster.living.get(incarnation)
    return GONE if other is None else other.record.node

"""What fetching needs of the rest of the daemon: the cluster and the way to peers. Its tiers are in
`kvpool.daemon.core.tier`.

Sources are named by bytes: peers by their incarnations, and what is no node by the names here, none of which has
the length of an incarnation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from kvpool.daemon.core.blocks import NamespaceState
from kvpool.placement.directory.base import Directory, Entry
from kvpool.placement.records import NodeRecord
from kvpool.wire import frame
from kvpool.wire import worker as worker_wire

LOCAL = b"kvp-disk"  # this node's disks
DEVICE = b"kvp-device"  # its spare device memory
OBJECT = b"kvp-store"  # object storage
NOT_NODES = {LOCAL: "ssd of this node", DEVICE: "device of this node", OBJECT: "object storage"}
TIER_OF = {LOCAL: "ssd", DEVICE: "device", OBJECT: "object"}
PEER = "peer"  # the tier of all that other nodes have
GONE = "gone"  # the node of a source that is no member any more


class LivingNode(NamedTuple):
    """A node that lives, and where to reach it."""

    record: NodeRecord
    url: str


class PeerTransport(Protocol):
    """Moves blocks and questions between nodes: the transfer workers."""

    async def pull(self, order: worker_wire.PullBlocks) -> worker_wire.Pulled: ...

    async def ask(self, order: worker_wire.AskPeer) -> frame.Done | frame.Bytes: ...


class ClusterView(Protocol):
    """What a node knows of its cluster."""

    @property
    def living(self) -> Mapping[bytes, LivingNode]:
        """The other nodes that may be pulled from, by incarnation."""

    @property
    def directory(self) -> Directory | None: ...

    def met(self, namespace: NamespaceState, keys: Sequence[bytes], entry: Entry) -> None:
        """The directory has this entry for these keys, and no living node has its incarnation."""


def node_name(cluster: ClusterView, incarnation: bytes) -> str:
    """The name of a peer, for spans and counters."""
    other = cluster.living.get(incarnation)
    return GONE if other is None else other.record.node

"""Blocks that a client wants removed: from all tiers of this node, and from other nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvpool.daemon.core.blocks import NamespaceState
from kvpool.daemon.core.node import Node
from kvpool.daemon.fetch.ports import ClusterView, LivingNode, PeerTransport
from kvpool.daemon.tiers.device_tier import DeviceTier
from kvpool.daemon.tiers.object_tier import ObjectTier
from kvpool.daemon.tiers.ssd_tier import SsdTier
from kvpool.errors import ClusterUnavailable, KvpoolError
from kvpool.types import KEY_BYTES, split_keys
from kvpool.wire import frame
from kvpool.wire import peer as peer_wire
from kvpool.wire import worker as worker_wire

DISCARD_SINCE = 10  # the protocol of the first version whose nodes remove blocks for others
TOGETHER = 512  # so many blocks take the event loop a millisecond or two
ASKED_AT_ONCE = 16
NAMED_MAX = 8  # nodes in an error


class Removals:
    """Event loop only."""

    def __init__(
        self,
        node: Node,
        ssd: SsdTier,
        device: DeviceTier | None,
        objects: ObjectTier,
        cluster: ClusterView,
        transport: PeerTransport,
        clock: Callable[[], float],
    ) -> None:
        self._node = node
        self._ssd = ssd
        self._device = device
        self._objects = objects
        self._cluster = cluster
        self._transport = transport
        self._clock = clock

    def now(self, namespace: NamespaceState, packed: bytes) -> int:
        """Remove up to `TOGETHER` blocks from this node's tiers; how many were there."""
        gone = max(
            self._node.removal.remove(namespace, split_keys(packed)),
            self._ssd.remove(namespace, packed),
        )
        return gone if self._device is None else max(gone, self._device.remove(namespace, packed))

    async def here(self, namespace: NamespaceState, packed: bytes) -> int:
        """Remove blocks from this node's tiers, a few at a time, and others are served in between."""
        step = TOGETHER * KEY_BYTES
        gone = 0
        for at in range(0, len(packed), step):
            gone += self.now(namespace, packed[at : at + step])
            await asyncio.sleep(0)
        return gone

    @property
    def others(self) -> bool:
        """Whether there are other nodes now to ask."""
        return bool(self._cluster.living)

    async def from_objects(self, namespace: NamespaceState, packed: bytes) -> int:
        """Remove blocks from object storage. Raises `KvpoolError` if it does not answer."""
        return await self._objects.remove(namespace, packed)

    async def from_others(self, namespace: NamespaceState, packed: bytes, wait_s: float) -> int:
        """Have all other living nodes remove blocks; the most that one of them had. Ends by `wait_s`.

        All, and not those that the directory names, which may be wrong: an older copy must not come back. Raises
        `ClusterUnavailable` if some did not do it.
        """
        deadline = self._clock() + wait_s
        turns = asyncio.Semaphore(ASKED_AT_ONCE)
        failed: list[str] = []

        async def ask(other: LivingNode) -> int:
            async with turns:
                left_s = deadline - self._clock()
                if left_s <= 0 or other.record.protocol < DISCARD_SINCE:
                    failed.append(other.record.node)
                    return 0
                # Without a membership a peer is known by its address only.
                meant = "" if other.record.node == other.url else other.record.node
                order = peer_wire.Discard(
                    namespace.tenant.name, namespace.digest, packed, left_s, meant
                )
                try:
                    answer = await self._transport.ask(
                        worker_wire.AskPeer(other.url, order, left_s)
                    )
                except KvpoolError:
                    failed.append(other.record.node)
                    return 0
                return answer.value if isinstance(answer, frame.Done) else 0

        found = await asyncio.gather(*map(ask, list(self._cluster.living.values())))
        if failed:
            named = ", ".join(sorted(failed)[:NAMED_MAX])
            raise ClusterUnavailable(
                f"{len(failed)} of {len(found)} other nodes have not removed the blocks ({named}), which may come back "
                "from there: repeat the request"
            )
        return max(found, default=0)

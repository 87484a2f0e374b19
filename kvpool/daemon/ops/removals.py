"""Blocks that a client wants removed: from all tiers of this node, and from other nodes.

The same keys may be of several namespaces; the answers are the keys that any of them had. What is on its way here
meanwhile does not stay: see `kvpool.daemon.fetch.tombstones`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import compress

from kvpool.daemon.core.blocks import NamespaceState, directory_digest
from kvpool.daemon.fetch.ports import ClusterView, LivingNode, PeerTransport
from kvpool.daemon.fetch.transfers import Transfers
from kvpool.daemon.ops.commands import asking_others
from kvpool.daemon.tiers.all_tiers import Tiers
from kvpool.errors import ClusterUnavailable, KvpoolError
from kvpool.types import KEY_BYTES, split_keys
from kvpool.wire import frame
from kvpool.wire import peer as peer_wire
from kvpool.wire import worker as worker_wire

TOGETHER = 512  # so many blocks take the event loop a millisecond or two
ASKED_AT_ONCE = 16
NAMED_MAX = 8  # nodes in an error
STANDING_S_MAX = 600.0  # a tombstone for another node, whatever its deadline


@dataclass(eq=False)
class Removals:
    """Event loop only."""

    tiers: Tiers
    transfers: Transfers
    cluster: ClusterView
    transport: PeerTransport
    clock: Callable[[], float]
    _: KW_ONLY
    has_objects: bool
    """Whether this node is to use object storage, reachable or not."""

    def now(self, namespaces: Sequence[NamespaceState], packed: bytes) -> set[bytes]:
        """Remove up to `TOGETHER` blocks from this node's tiers; which were there."""
        gone: set[bytes] = set()
        keys = split_keys(packed)
        self.transfers.forget(_digests(namespaces), keys)
        for namespace in namespaces:
            gone |= self.tiers.node.removal.remove(namespace, keys)
            gone |= self.tiers.ssd.remove(namespace, packed)
            if self.tiers.device is not None:
                gone |= self.tiers.device.remove(namespace, packed)
        return gone

    async def _here(self, namespaces: Sequence[NamespaceState], packed: bytes) -> set[bytes]:
        """Remove blocks from this node's tiers, a few at a time, and others are served in between."""
        step = TOGETHER * KEY_BYTES
        gone: set[bytes] = set()
        for namespace in namespaces:
            for at in range(0, len(packed), step):
                gone |= self.now([namespace], packed[at : at + step])
                await asyncio.sleep(0)
        return gone

    async def for_other(
        self, namespaces: Sequence[NamespaceState], order: peer_wire.Discard
    ) -> set[bytes]:
        """Remove blocks of one tenant for a client of another node; which were here.

        namespaces: those of the order that are known here. Raises `LimitExceeded`.
        """
        tombstones, token = self.transfers.tombstones, order.tombstone
        if token and order.keys:
            digests = [directory_digest(order.tenant, digest) for digest in order.digests]
            tombstones.put_up(token, digests, split_keys(order.keys))
            loop = asyncio.get_running_loop()
            loop.call_later(min(order.deadline_s, STANDING_S_MAX), tombstones.take_down, token)
        elif token:
            tombstones.take_down(token)
        return await self._here(namespaces, order.keys)

    def at_once(self, namespaces: Sequence[NamespaceState], packed: bytes, others_s: float) -> bool:
        """Whether `now` does all that `everywhere` would."""
        few = len(packed) * len(namespaces) <= TOGETHER * KEY_BYTES
        beyond = self.has_objects or (others_s > 0 and bool(self.cluster.living))
        return few and not beyond

    async def everywhere(
        self, namespaces: Sequence[NamespaceState], packed: bytes, others_s: float
    ) -> set[bytes]:
        """Remove blocks of one tenant from this node, then from object storage, and from all other nodes within
        `others_s`; 0: not from those. Which were there. Raises `ClusterUnavailable` if others did not do it, and
        `LimitExceeded`.
        """
        token = secrets.token_bytes(peer_wire.TOMBSTONE_BYTES)
        self.transfers.tombstones.put_up(token, _digests(namespaces), split_keys(packed))
        try:
            gone = await self._here(namespaces, packed)
            with asking_others():
                if self.has_objects:
                    for namespace in namespaces:
                        gone |= await self.tiers.objects.remove(namespace, packed)
                if others_s > 0:
                    gone |= await self._from_others(namespaces, packed, others_s, token)
        finally:
            self.transfers.tombstones.take_down(token)
        return gone

    async def _from_others(
        self, namespaces: Sequence[NamespaceState], packed: bytes, wait_s: float, token: bytes
    ) -> set[bytes]:
        """Have all other living nodes remove blocks of one tenant; which were on any of them. Ends by `wait_s`.

        All, and not those that the directory names, which may be wrong: an older copy must not come back. Raises
        `ClusterUnavailable` if some did not do it.
        """
        deadline = self.clock() + wait_s
        others = list(self.cluster.living.values())
        if len(others) == 1:
            token = b""  # none that it could fetch from: what stands on this node's own is enough
        tenant, digests = namespaces[0].tenant.name, [each.digest for each in namespaces]
        turns = asyncio.Semaphore(ASKED_AT_ONCE)

        async def ask(other: LivingNode, keys: bytes) -> bytes | None:
            async with turns:
                left_s = deadline - self.clock()
                if left_s <= 0:
                    return None
                # Without a membership a peer is known by its address only.
                meant = "" if other.record.node == other.url else other.record.node
                order = peer_wire.Discard(tenant, digests, keys, left_s, meant, token)
                try:
                    answer = await self.transport.ask(worker_wire.AskPeer(other.url, order, left_s))
                except KvpoolError:
                    return None
                return answer.data if isinstance(answer, frame.Bytes) else b""

        answers = await asyncio.gather(*(ask(other, packed) for other in others))
        failed = [
            each.record.node for each, answer in zip(others, answers, strict=True) if answer is None
        ]
        if failed:
            named = ", ".join(sorted(failed)[:NAMED_MAX])
            raise ClusterUnavailable(
                f"{len(failed)} of {len(others)} other nodes have not removed the blocks ({named}), which may come back "
                "from there: repeat the request"
            )
        if token:  # one that does not answer takes it down by itself
            await asyncio.gather(*(ask(other, b"") for other in others))
        keys = split_keys(packed)
        return {key for answer in answers if answer for key in compress(keys, answer)}


def _digests(namespaces: Iterable[NamespaceState]) -> list[bytes]:
    return [namespace.directory_digest for namespace in namespaces]

"""Leaving on purpose: nothing new is placed here, blocks that only this node has are copied, leases end, it
leaves.

Blocks in memory go first. Those only on disks come into memory for it, a little at a time, and for a
limited time: a disk may hold more than others have room for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from kvpool.daemon.cluster.member import ClusterMember
from kvpool.daemon.cluster.replication import Replication, block_bytes
from kvpool.daemon.core.blocks import NamespaceState
from kvpool.daemon.core.node import Node
from kvpool.daemon.tiers.ssd_tier import SsdTier
from kvpool.errors import Unavailable
from kvpool.placement.records import NodeState
from kvpool.tasks import crash_if_failed
from kvpool.telemetry.cluster_stats import DrainProgress

log = logging.getLogger("kvpool.daemon")

WALK = 512
TELL_EVERY_S = 0.5
LOOKUP_TRIES = (
    20  # with a directory that does not answer, half a second each; then all count as sole replicas
)
RETRY_S = 0.5
READ_S = 30.0  # for blocks on disks, as many as are read into memory at a time
LAST_LEASES_S = 30.0  # for this node's own leases, such as those on blocks being written
DONE_SEEN_S = 3.0  # who follows the drain polls it, and must see its end, on a busy machine too


@dataclass(eq=False)
class Drainer:
    """Drains this node on an operator's request, and cancels that. Event loop only."""

    node: Node
    cluster: ClusterMember
    replication: Replication
    tiers: SsdTier
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._told_at = 0.0
        self._task: asyncio.Task[None] | None = None

    def wanted(self, drain: bool) -> None:
        """The operator's current wish."""
        before = self._task
        if before is not None:
            before.cancel()
        work = self._drain if drain else self._come_back
        self._task = asyncio.get_running_loop().create_task(self._after(before, work))
        self._task.add_done_callback(crash_if_failed)

    async def _after(
        self, before: asyncio.Task[None] | None, work: Callable[[], Awaitable[None]]
    ) -> None:
        if before is not None:
            await asyncio.gather(before, return_exceptions=True)
        await work()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _drain(self) -> None:
        cluster, node = self.cluster, self.node
        log.warning("node %s is draining", cluster.config.node, extra={"node": cluster.config.node})
        cluster.state = NodeState.DRAINING
        node.commit_waiters.end_peers()  # nothing new is stored here
        total = sum(rules.inventory.block_count() for rules in (node, *self.tiers.rules()))
        await self._progress(DrainProgress(blocks_total=total), force=True)
        # Blocks read more than once go first, in case there is not room for all.
        for worth in (True, False):
            cursor: int | None = 0
            while cursor is not None:
                groups, cursor = node.inventory.walk(cursor, WALK)
                for digest, keys in groups:
                    namespace = node.namespaces.by_directory(digest)
                    if namespace is not None and not namespace.retired:
                        chosen = node.inventory.select_by_value(namespace, keys, worth)
                        await self._save(namespace, chosen)
        await self._save_disks()
        progress = cluster.progress or DrainProgress()
        # Engines here may continue to lease: wait at most for the longest lease.
        patience_s = cluster.config.lease_s_max + LAST_LEASES_S
        until = self.clock() + patience_s
        while node.leases.count and self.clock() < until:
            progress = _with(progress, phase="waiting", leases=node.leases.count)
            await self._progress(progress)
            await asyncio.sleep(0.05)
        await self._progress(_with(progress, phase="done", leases=0), force=True)
        await asyncio.sleep(DONE_SEEN_S)
        log.warning(
            "node %s is drained and leaves the cluster",
            cluster.config.node,
            extra={"node": cluster.config.node},
        )
        await cluster.leave()

    async def _save(self, namespace: NamespaceState, keys: list[bytes]) -> None:
        """Copy those of the blocks in memory elsewhere that no other node has."""
        await self._offer(namespace, await self._sole(namespace, keys))
        await self._count(blocks=len(keys))

    async def _save_disks(self) -> None:
        """The same for blocks only on disks, until its time is up."""
        node, deadline = self.node, self.clock() + self.cluster.config.ssd_drain_s
        cursor: int | None = 0
        while cursor is not None:
            groups, cursor = self.tiers.walk(cursor, WALK)
            for digest, keys in groups:
                namespace = node.namespaces.by_directory(digest)
                saved = left = 0
                if namespace is not None and not namespace.retired:
                    below = self.replication.only_below(namespace, keys)
                    saved = await self._save_some(namespace, below, deadline)
                    left = len(below) - saved
                await self._count(blocks=len(keys) - left, left=left)

    async def _save_some(
        self, namespace: NamespaceState, keys: list[bytes], deadline: float
    ) -> int:
        """Copy those elsewhere that no other node has, a few at a time through memory; returns how many were
        handled.

        Less than all only if the time is up.
        """
        most = self.replication.at_a_time(namespace)
        for at in range(0, len(keys), most):
            seconds = min(READ_S, deadline - self.clock())
            if seconds <= 0:
                return at
            sole = await self._sole(namespace, keys[at : at + most])
            if sole:
                await self.replication.fetcher.pull_each(namespace, [], sole, seconds)
                offered, accepted = await self._offer(namespace, sole)
                # The others could not be read, or are gone again.
                await self._count(failed=len(sole) - offered)
                # They need not stay here, so that the next ones do not evict sole replicas.
                self.node.candidates.demote(namespace, accepted)
        return len(keys)

    async def _offer(self, namespace: NamespaceState, keys: list[bytes]) -> tuple[int, list[bytes]]:
        """Have others take those of the blocks that are in memory: returns how many these are, and which were
        taken.
        """
        taken: dict[bytes, None] = {}
        offered = 0
        for mask, group in self.replication.by_offer(namespace, keys):
            left = group
            offered += len(group)
            size = block_bytes(namespace, mask)
            others = len(self.cluster.living)
            for target in self.replication.targets({self.cluster.own}, others, len(group) * size):
                accepted = await self.replication.offer(
                    target, namespace, left, mask, reason="drain"
                )
                taken.update(dict.fromkeys(accepted))
                await self._count(copied=len(accepted), copied_bytes=len(accepted) * size)
                left = [key for key in left if key not in taken]
                if not left:
                    break
        await self._count(failed=offered - len(taken))
        return offered, list(taken)

    async def _count(self, **more: int) -> None:
        """Update the reported progress."""
        progress = self.cluster.progress or DrainProgress()
        sums = {name: getattr(progress, name) + count for name, count in more.items()}
        await self._progress(_with(progress, **sums))

    async def _sole(self, namespace: NamespaceState, keys: list[bytes]) -> list[bytes]:
        if not keys:
            return []
        for _ in range(LOOKUP_TRIES):
            try:
                located = await self.replication.fetcher.locator.replicas(namespace, keys)
            except Unavailable:
                if self.cluster.directory is None:
                    break
                await asyncio.sleep(RETRY_S)
                continue
            stays = {
                incarnation
                for incarnation, other in self.cluster.living.items()
                if other.record.state is NodeState.SERVING
            }
            return [
                key
                for key, entries in zip(keys, located, strict=True)
                if not any(entry.incarnation in stays for entry in entries)
            ]
        return keys

    async def _progress(self, progress: DrainProgress, *, force: bool = False) -> None:
        self.cluster.progress = progress
        now = self.clock()
        if force or now - self._told_at >= TELL_EVERY_S:
            self._told_at = now
            await self.cluster.tell()

    async def _come_back(self) -> None:
        cluster = self.cluster
        log.warning(
            "the drain of node %s is cancelled",
            cluster.config.node,
            extra={"node": cluster.config.node},
        )
        if cluster.state is NodeState.GONE:
            await cluster.come_back()
        else:
            cluster.state, cluster.progress = NodeState.SERVING, None
            await cluster.tell()


def _with(progress: DrainProgress, **changes: object) -> DrainProgress:
    return msgspec.structs.replace(progress, **changes)

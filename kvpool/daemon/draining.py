"""Leaving on purpose: nothing new is placed here, what only this node has is copied, leases end, it leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from kvpool.daemon.blocks import NamespaceState
from kvpool.daemon.cluster import Cluster
from kvpool.daemon.copies import Copies, block_bytes
from kvpool.daemon.node import Node
from kvpool.daemon.remote import Living
from kvpool.daemon.tasks import crash_if_failed
from kvpool.errors import Unavailable
from kvpool.placement.records import DrainProgress, NodeState
from kvpool.placement.targets import choose_targets

log = logging.getLogger("kvpool.daemon")

WALK = 512
TELL_EVERY_S = 0.5
LOOKUP_TRIES = (
    20  # with a directory that does not answer, half a second each; then all counts as sole
)
RETRY_S = 0.5
DONE_SEEN_S = 1.0  # whoever follows the drain looks now and then, and is to see how it ended


class Drainer:
    """Drains this node when an operator wants it, and takes that back. Event loop only."""

    def __init__(
        self, node: Node, cluster: Cluster, copies: Copies, clock: Callable[[], float]
    ) -> None:
        self.node = node
        self.cluster = cluster
        self._copies = copies
        self._clock = clock
        self._told_at = 0.0
        self._task: asyncio.Task[None] | None = None

    def wanted(self, drain: bool) -> None:
        """What the operator wants now."""
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
        log.warning("node %s is being drained", cluster.config.node)
        cluster.state = NodeState.DRAINING
        total = node.block_count()
        await self._progress(DrainProgress(blocks_total=total), force=True)
        # What was read more than once goes first, in case not all finds room.
        for worth in (True, False):
            cursor: int | None = 0
            while cursor is not None:
                groups, cursor = node.walk(cursor, WALK)
                for digest, keys in groups:
                    namespace = node.by_directory(digest)
                    if namespace is not None and not namespace.retired:
                        chosen = node.select_by_worth(namespace, keys, worth)
                        await self._save(namespace, chosen)
        progress = cluster.progress or DrainProgress()
        while node.lease_count:
            progress = _with(progress, phase="waiting", leases=node.lease_count)
            await self._progress(progress)
            await asyncio.sleep(0.05)
        await self._progress(_with(progress, phase="done", leases=0), force=True)
        await asyncio.sleep(DONE_SEEN_S)
        log.warning("node %s is drained and leaves its cluster", cluster.config.node)
        await cluster.leave()

    async def _save(self, namespace: NamespaceState, keys: list[bytes]) -> None:
        """Copy those of the blocks elsewhere that no other node has."""
        progress = self.cluster.progress or DrainProgress()
        sole = await self._sole(namespace, keys)
        copied = failed = nbytes = 0
        for mask, group in self._copies.by_offer(namespace, sole):
            left = group
            size = block_bytes(namespace, mask)
            for target in self._targets(len(group) * size):
                accepted = await self._copies.offer(target, namespace, left, mask, reason="drain")
                copied += len(accepted)
                nbytes += len(accepted) * size
                taken = set(accepted)
                left = [key for key in left if key not in taken]
                if not left:
                    break
            failed += len(left)
        await self._progress(
            _with(
                progress,
                blocks=progress.blocks + len(keys),
                copied=progress.copied + copied,
                copied_bytes=progress.copied_bytes + nbytes,
                failed=progress.failed + failed,
            )
        )

    async def _sole(self, namespace: NamespaceState, keys: list[bytes]) -> list[bytes]:
        if not keys:
            return []
        for _ in range(LOOKUP_TRIES):
            try:
                located = await self._copies.remote.locate(namespace, keys)
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

    def _targets(self, nbytes: int) -> list[Living]:
        living = self.cluster.living
        chosen = choose_targets(
            [other.record for other in living.values()],
            self.cluster.record(),
            {self.cluster.own},
            len(living),
            nbytes,
            self.cluster.rng,
        )
        return [living[record.incarnation_bytes] for record in chosen]

    async def _progress(self, progress: DrainProgress, *, force: bool = False) -> None:
        self.cluster.progress = progress
        now = self._clock()
        if force or now - self._told_at >= TELL_EVERY_S:
            self._told_at = now
            await self.cluster.tell()

    async def _come_back(self) -> None:
        cluster = self.cluster
        log.warning("node %s is no longer drained", cluster.config.node)
        if cluster.state is NodeState.GONE:
            await cluster.come_back()
        else:
            cluster.state, cluster.progress = NodeState.SERVING, None
            await cluster.tell()


def _with(progress: DrainProgress, **changes: object) -> DrainProgress:
    return msgspec.structs.replace(progress, **changes)

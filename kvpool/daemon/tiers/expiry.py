"""Drops blocks that were not used for their namespace's time to live (`ttl_s`).

Nothing extra is recorded when a block is used. For each namespace with a time to
live, a few samples map ticks to times; from time to time its blocks are examined, a few at a
time. So a block is dropped between `ttl_s` and about a tenth more after its last use, in each tier separately:
a read from memory does not count as a use of the replica on disk. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kvpool.daemon.core.blocks import NamespaceState, Tenant
from kvpool.daemon.core.node import Node

LOOK_S = 1.0
SAMPLES = 16  # in a time to live
BLOCKS_S = 50_000  # examined in a second, on average
TOGETHER = 200  # in one go: about a tenth of a millisecond


class Watch:
    """A namespace's recent ticks, and the time of its next pass."""

    __slots__ = ("due", "samples")

    def __init__(self, now: float) -> None:
        self.due = now
        self.samples: deque[tuple[float, int]] = deque()

    def note(self, now: float, tick: int, ttl_s: float) -> int | None:
        """The tick up to which a use is too old; None while none can be."""
        samples = self.samples
        samples.append((now, tick))
        while len(samples) > 1 and samples[1][0] <= now - ttl_s:
            samples.popleft()
        at, old = samples[0]
        return old if at <= now - ttl_s else None


@dataclass(eq=False)
class Expiry:
    """See the module. nodes: the rules of all tiers. ttl_s: of a namespace, seconds; 0: no expiry."""

    _nodes: Callable[[], Iterable[Node]]
    _ttl_s: Callable[[NamespaceState], float]
    _clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._watches: dict[NamespaceState, Watch] = {}
        self.expired = 0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            watches: dict[NamespaceState, Watch] = {}
            for node in self._nodes():
                node.idle_age.note(self._clock(), node.ledger.tick)
                for tenant in list(node.tenants.values()):
                    now, due = self._clock(), {}
                    for namespace in tenant.namespaces.values():
                        if (ttl_s := self._ttl_s(namespace)) > 0:
                            watch = self._watches.get(namespace) or Watch(now)
                            watches[namespace] = watch
                            if now >= watch.due:
                                due[namespace] = watch.note(now, node.ledger.tick, ttl_s)
                                watch.due = now + ttl_s / SAMPLES
                    old = {namespace: tick for namespace, tick in due.items() if tick is not None}
                    seen = await self._look(node, tenant, old) if old else 0
                    for namespace in old:
                        watch = watches[namespace]
                        watch.due = max(watch.due, now + seen / BLOCKS_S)
            self._watches = watches

    async def _look(self, node: Node, tenant: Tenant, old: Mapping[NamespaceState, int]) -> int:
        """Drop blocks last used before each namespace's tick; returns how many blocks were examined."""
        seen = 0
        cursor: int | None = 0
        while cursor is not None:
            blocks, cursor = node.inventory.scan(cursor, TOGETHER, tenant)
            seen += len(blocks)
            unused: dict[NamespaceState, list[bytes]] = {}
            for block in blocks:
                namespace = block.table.namespace
                if namespace in old:
                    unused.setdefault(namespace, []).append(block.key)
            for namespace, keys in unused.items():
                self.expired += node.removal.drop_unused(namespace, keys, old[namespace])
            await asyncio.sleep(0)
        return seen

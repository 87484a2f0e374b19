"""Blocks that were not used for as long as their namespace says (`ttl_s`) are dropped.

Nothing is noted when a block is used but the tick that is noted anyway. For each namespace with a time to
live, a few samples say which tick it was how long ago; now and then its blocks are looked at, a few at a
time. So a block goes between `ttl_s` and about a tenth more after its last use, in each tier by itself:
a read from memory is no use of the copy on disk. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from kvpool.daemon.blocks import NamespaceState
from kvpool.daemon.node import Node

LOOK_S = 1.0
SAMPLES = 16  # in a time to live
BLOCKS_S = 50_000  # looked at in a second, on average
TOGETHER = 1000  # in one go: about half a millisecond


class Watch:
    """A namespace's ticks of late, and when its blocks are looked at next."""

    __slots__ = ("due", "samples")

    def __init__(self, now: float) -> None:
        self.due = now
        self.samples: deque[tuple[float, int]] = deque()

    def note(self, now: float, tick: int, ttl_s: float) -> int | None:
        """The tick up to which a use is too long ago; None while nothing can be."""
        samples = self.samples
        samples.append((now, tick))
        while len(samples) > 1 and samples[1][0] <= now - ttl_s:
            samples.popleft()
        at, old = samples[0]
        return old if at <= now - ttl_s else None


class Expiry:
    """See the module. nodes: the rules of all tiers. ttl_s: of a namespace, seconds; 0: for ever."""

    def __init__(
        self,
        nodes: Callable[[], Iterable[Node]],
        ttl_s: Callable[[NamespaceState], float],
        clock: Callable[[], float],
    ) -> None:
        self._nodes = nodes
        self._ttl_s = ttl_s
        self._clock = clock
        self._watches: dict[NamespaceState, Watch] = {}
        self.expired = 0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            watches: dict[NamespaceState, Watch] = {}
            for node in self._nodes():
                node.ages.note(self._clock(), node.tick)
                for tenant in node.tenants.values():
                    for namespace in list(tenant.namespaces.values()):
                        if self._ttl_s(namespace) > 0:
                            watch = self._watches.get(namespace) or Watch(self._clock())
                            watches[namespace] = watch
                            await self._look(node, namespace, watch)
            self._watches = watches

    async def _look(self, node: Node, namespace: NamespaceState, watch: Watch) -> None:
        now, ttl_s = self._clock(), self._ttl_s(namespace)
        if now < watch.due:
            return
        old = watch.note(now, node.tick, ttl_s)
        keys = [] if old is None else node.keys(namespace)
        watch.due = now + max(ttl_s / SAMPLES, len(keys) / BLOCKS_S)
        for at in range(0, len(keys), TOGETHER):
            assert old is not None
            self.expired += node.drop_unused(namespace, keys[at : at + TOGETHER], old)
            await asyncio.sleep(0)

"""Members of which there is nothing but a record: they come, go, and come back as others, many at a time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvpool.placement.directory.base import TIERS
from kvpool.placement.records import INCARNATION_BYTES, NodeRecord, NodeState, TransportRecord
from kvpool.wire import frame
from tests.support.embedded_directory import EmbeddedDirectory

if TYPE_CHECKING:
    from tests.sim.simulation.world import World

CHURN_S = 0.4
SHARE = 0.1  # of the members, each time
TOLD_OF = 5  # of these, of how many the directory says that they had blocks


def entries_of(directory: EmbeddedDirectory) -> Iterator[tuple[bytes, Any]]:
    """The directory's blocks, by name, each with its entries."""
    for bucket in directory._buckets:
        yield from bucket.items()


class Members:
    """See the module. They have no memory, so nobody offers them anything, and refuse connections."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = random.Random(f"{world.seed}/members")
        self._lives: dict[str, str] = {}  # by name: the incarnation
        self._gone: set[bytes] = set()
        self._churning: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._lives)

    def come(self) -> None:
        """All of them, at once; from then on they come and go until `settle`."""
        if not self._world.plan.members:
            return
        for number in range(self._world.plan.members):
            self._lives[f"m{number}"] = self._rng.randbytes(INCARNATION_BYTES).hex()
        self._write()
        self._churning = self._world.spawn(self._churn())

    def settle(self) -> None:
        """Nobody comes and goes any more."""
        if self._churning is not None:
            self._churning.cancel()

    def _write(self) -> None:
        others = {
            name: record
            for name, record in self._world.cluster.view.nodes.items()
            if not name.startswith("m")
        }
        mine = {
            name: NodeRecord(
                name,
                incarnation,
                NodeState.SERVING,
                (TransportRecord(f"sim://{name}"),),
                protocol=frame.PROTOCOL_VERSION,
                protocol_oldest=frame.PROTOCOL_OLDEST,
            )
            for name, incarnation in self._lives.items()
        }
        self._world.cluster._set(nodes={**others, **mine})

    async def _churn(self) -> None:
        while True:
            await asyncio.sleep(CHURN_S * self._rng.uniform(0.5, 1.5))
            count = max(1, int(len(self._lives) * SHARE))
            # Now and then a rack of them is away for good.
            for_good = self._rng.random() < 0.3 and len(self._lives) > self._world.plan.members // 2
            chosen = self._rng.sample(list(self._lives), count)
            for name in chosen[:TOLD_OF]:
                await self._had_blocks(bytes.fromhex(self._lives[name]))
            for name in chosen:
                self._gone.add(bytes.fromhex(self._lives.pop(name)))
                if not for_good:
                    self._lives[name] = self._rng.randbytes(INCARNATION_BYTES).hex()
            self._world.count("members that were gone", count)
            self._write()

    async def _had_blocks(self, incarnation: bytes) -> None:
        """The directory says so of one that is about to go."""
        world, rng = self._world, self._rng
        digests = sorted(
            state.directory_digest
            for life in world.lives()
            for namespace in world.namespaces
            for state in namespace.states(life.server.node)
        )
        if world.directory is not None and digests:
            keys = rng.choice(world.chains)
            parts = len(world.plan.parts)
            await world.directory.publish(
                rng.choice(digests), parts, incarnation, TIERS["dram"], keys, [1] * len(keys)
            )
            world.count("entries of members that went", len(keys))

    def remembered(self) -> str:
        """Whether the directory still has entries of those that have gone."""
        if self._world.directory is None or not self._gone:
            return ""
        for name, entries in entries_of(self._world.directory):
            if any(incarnation in self._gone for incarnation, _, _ in entries):
                return f"the directory has an entry of the dead for {name[16:20].hex()}"
        return ""

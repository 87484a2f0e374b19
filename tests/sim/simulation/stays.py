"""What goes wrong for good, and what has to go on beside it.

Until it is over the healthy nodes must find what healthy nodes hold, and keep what is put; nobody waits for ever.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvpool.errors import KvpoolError
from tests.sim.simulation.memory import Violation
from tests.sim.simulation.namespaces import TOLD_S
from tests.sim.simulation.nodes import Life

if TYPE_CHECKING:
    from tests.sim.simulation.namespaces import SimulatedNamespace
    from tests.sim.simulation.world import World

OPERATIONS = 12
PAUSES_S = (0.0, 3.0)  # before each look: at once, and when what waited at first has given up
FIND_S = 3.0  # for a prefix of which a healthy node has each block


class WhatStays:
    """One fault of a world in which all else is well."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = random.Random(f"{world.seed}/stays")
        self._ill: Life | None = None  # nothing is asked of it
        self._readers = 0
        self._end: Callable[[], object]

    async def live_through(self) -> None:
        """Begin it, look at what goes on, and end it."""
        world = self._world
        getattr(self, f"_{world.plan.stays}")()
        world.beside_what_stays = True
        world.note(f"for good: {world.plan.stays}")
        world.count(f"what stayed: {world.plan.stays}")
        for pause_s in PAUSES_S:
            await asyncio.sleep(pause_s)
            await self._find()
        await self._work()
        await world.until(self._waiting)
        await self._put()
        await asyncio.sleep(2 * TOLD_S)
        await self._find()
        world.note("it is over")
        self._end()
        world.beside_what_stays = False

    # ---- what it is ------------------------------------------------------------------------------------

    def _stopped(self) -> None:
        """A node stands still, with its workers."""
        life = self._ill = self._rng.choice(self._world.lives())
        life.node.pause(workers=True)
        self._end = life.node.resume

    def _mute(self) -> None:
        """A node is a member, accepts, and never answers a peer."""
        life = self._ill = self._rng.choice(self._world.lives())
        mute, name = self._world.network.mute, life.node.name
        mute.add(name)
        self._end = lambda: mute.discard(name)

    def _disk(self) -> None:
        """A disk does nothing more, and its process cannot be ended."""
        media = [one for node in self._world.nodes.values() for one in node.disk_media]
        if not media:
            self._end = lambda: None
            return
        chosen = self._rng.choice(media)
        chosen.moving.clear()
        self._end = chosen.moving.set

    def _membership(self) -> None:
        self._world.cluster.go_away()
        self._end = self._world.cluster.come_back

    def _directory(self) -> None:
        self._world.directory_away = True

        def end() -> None:
            self._world.directory_away = False

        self._end = end

    # ---- what goes on ----------------------------------------------------------------------------------

    def _healthy(self) -> list[Life]:
        return [life for life in self._world.lives() if life is not self._ill]

    async def _find(self) -> None:
        """What healthy nodes hold is found from each of them."""
        plan, world = self._world.plan, self._world
        for life in self._healthy():
            for namespace in self._world.namespaces:
                await world.until(partial(world.leased_by_others, life))
                chains = namespace.chains
                # All at a time where there is room; but of a peer on probation one at a time asks for something.
                if not (plan.roomy or namespace.modest) or self._doubts(life):
                    chains = [self._rng.choice(self._elsewhere(life, namespace) or chains)]
                found = [world.spawn(self._find_one(life, namespace, chain)) for chain in chains]
                await asyncio.gather(*found)

    def _doubts(self, life: Life) -> bool:
        """Whether another healthy node has done nothing well for this one since it failed it."""
        daemon = life.server.daemon
        found = [
            daemon.fetcher.peers.get(other.server.daemon.cluster.own)
            for other in self._healthy()
            if other is not life
        ]
        return any(peer is not None and peer.on_probation for peer in found)

    def _elsewhere(self, life: Life, namespace: SimulatedNamespace) -> list[Sequence[bytes]]:
        """The prompts of which other healthy nodes have more in memory than this one."""
        world, others = self._world, self._healthy()
        return [
            chain
            for chain in namespace.chains
            if world.findable(life, namespace, chain, others)
            > namespace.usable(chain, world.parts_at(namespace, [life]))
        ]

    async def _find_one(
        self, life: Life, namespace: SimulatedNamespace, chain: Sequence[bytes]
    ) -> None:
        world = self._world
        among = [life] if world.directory_away else self._healthy()
        before = world.findable(life, namespace, chain, among)
        # Each of another instance: many that join each other's leases would never come to an end.
        self._readers += 1
        client = world.new_client(life.node, namespace, f"reader {self._readers} beside what stays")
        found = 0

        async def read() -> None:
            nonlocal found
            found = await client.get(chain, FIND_S, 0.2)

        await world.in_domain(client.domain, read())
        after = world.findable(life, namespace, chain, among)
        if found < min(before, after):
            raise Violation(
                f"{life.name} finds {found} blocks of a prefix of which healthy nodes had {before} and "
                f"have {after}"
            )
        world.count("prefixes found beside what stays", found)

    async def _work(self) -> None:
        """Clients of healthy nodes do what they always do: each call ends in its time."""
        world = self._world
        nodes = [life.node for life in self._healthy()]
        clients = [client for client in world.clients if client.node in nodes and not client.dead]
        for _ in range(OPERATIONS):
            await asyncio.sleep(self._rng.expovariate(10))
            client = self._rng.choice(clients)
            world.spawn_client(client, world.draw_work(client))
        await world.all_answered()
        for client in clients:
            client.die()

    def _waiting(self) -> str:
        """Whatever is under way at a healthy node, though nobody wants it any more."""
        for life in self._healthy():
            daemon = life.server.daemon
            if daemon.fetcher.stats().transfers and self._world.plan.stays != "disk":
                return f"{life.name} has transfers under way"
            if daemon.streams.stats().under_way:
                return f"{life.name} has follows of nobody"
            for namespace in self._world.namespaces:
                if namespace.epoch_known_to(life) != namespace.epoch():
                    return f"{life.name} has not heard of an epoch of {namespace.name}"
            node = life.server.node
            node.settle()
            if node.leases.count:
                return f"{life.name} has {node.leases.count} leases of nobody"
        return ""

    async def _put(self) -> None:
        """A put succeeds while something can be evicted."""
        world, plan = self._world, self._world.plan
        if plan.pin or plan.quota:
            return
        for life in self._healthy():
            for namespace in world.namespaces:
                if namespace.epoch() >= 0:
                    await self._put_one(life, namespace)

    async def _put_one(self, life: Life, namespace: SimulatedNamespace) -> None:
        world = self._world
        keys = self._rng.choice(namespace.chains)[:2]
        client = world.new_client(life.node, namespace, f"{life.node.name} writer")
        client.steady = True
        found, error = 0, ""

        async def put() -> None:
            nonlocal found, error
            try:
                await client.put(keys, b"", 0)
                found = await client.get(keys, 0.0, 0.2)
            except KvpoolError as refused:
                error = repr(refused)

        await world.in_domain(client.domain, put())
        if found < len(keys):
            raise Violation(
                f"{life.name} keeps {found} blocks of {len(keys)} that were put: {error}"
            )
        world.count("blocks put beside what stays", found)

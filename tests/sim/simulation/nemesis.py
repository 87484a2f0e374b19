"""Who makes things go wrong, and has them go right again after a while."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from tests.sim.simulation.disks import DurableMedia
from tests.sim.simulation.nodes import SimulatedNode

if TYPE_CHECKING:
    from tests.sim.simulation.world import World

TTL_S = 1.0  # of a membership lease


class Nemesis:
    """Picks a node and a misfortune, again and again, as the plan's weights say.

    A method is a misfortune: it is given the node, and for how many seconds it lasts.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = random.Random(f"{world.seed}/nemesis")
        self._nodes = list(world.nodes.values())

    async def work(self) -> None:
        rng, plan = self._rng, self._world.plan
        kinds, weights = list(plan.actions), list(plan.actions.values())
        while True:
            await asyncio.sleep(rng.expovariate(1 / plan.fault_gap_s))
            kind = rng.choices(kinds, weights)[0]
            seconds = rng.choice((0.1, 0.5, 2.0, 4.0)) * rng.uniform(0.5, 1.5)
            getattr(self, kind)(rng.choice(self._nodes), seconds)

    def crash(self, node: SimulatedNode, seconds: float) -> None:
        node.crash(vanish=self._rng.random() < 0.5)
        self._world.later(seconds, node.restart)

    def stop(self, node: SimulatedNode, seconds: float) -> None:
        async def stop_and_start() -> None:
            if node.life is not None and node.life.paused_at is None:
                await node.stop()
                await asyncio.sleep(seconds)
                node.restart()

        self._world.spawn(stop_and_start())

    def pause(self, node: SimulatedNode, seconds: float) -> None:
        node.pause(workers=self._rng.random() < 0.5)
        self._world.later(seconds, node.resume)

    def worker(self, node: SimulatedNode, _seconds: float) -> None:
        if node.life is not None and node.life.started:
            self._world.note(f"the transfer worker of {node.life.name} dies")
            node.life.carrier.restart()

    def cut(self, node: SimulatedNode, seconds: float) -> None:
        """Two nodes do not reach each other, and all others both."""
        other = self._rng.choice(self._nodes)
        if node is not other:
            cuts, pair = self._world.network.cuts, frozenset((node.name, other.name))
            self._world.note(f"{node.name} and {other.name} are cut apart")
            cuts.add(pair)
            self._world.later(seconds, lambda: cuts.discard(pair))

    def mute(self, node: SimulatedNode, seconds: float) -> None:
        mute, name = self._world.network.mute, node.name
        self._world.note(f"{name} answers nobody")
        mute.add(name)
        self._world.later(seconds, lambda: mute.discard(name))

    def alone(self, node: SimulatedNode, seconds: float) -> None:
        """Cut off from the membership, not from its peers; for long enough it counts as dead."""
        cluster, name = self._world.cluster, node.name
        self._world.note(f"{name} does not reach the membership")
        cluster.go_away(name)
        if seconds > TTL_S:
            self._world.later(TTL_S, lambda: cluster.expire(name))
        self._world.later(seconds, lambda: cluster.come_back(name))

    def away(self, _node: SimulatedNode, seconds: float) -> None:
        self._world.note("the membership is away")
        self._world.cluster.go_away()
        self._world.later(seconds, self._world.cluster.come_back)

    def expire(self, node: SimulatedNode, _seconds: float) -> None:
        self._world.note(f"the lease of {node.name} ends")
        self._world.cluster.expire(node.name)

    def no_directory(self, _node: SimulatedNode, seconds: float) -> None:
        world = self._world
        world.note("the directory is away")
        world.directory_away = True
        world.later(seconds, lambda: setattr(world, "directory_away", False))

    def lose(self, _node: SimulatedNode, _seconds: float) -> None:
        self._world.lose(self._rng.choice((None, range(0, 64, 3))))

    # ---- disks ---------------------------------------------------------------------------------------

    def disk_dies(self, node: SimulatedNode, seconds: float) -> None:
        """Its process is killed, at once or at work."""
        if self._rng.random() < 0.5:
            self._trouble(node, seconds, "doomed")
        elif node.life is not None and node.life.drives:
            self._rng.choice(node.life.drives).die("killed")

    def disk_slow(self, node: SimulatedNode, seconds: float) -> None:
        self._trouble(node, seconds, "slow")

    def disk_refuses(self, node: SimulatedNode, seconds: float) -> None:
        """Some writes fail."""
        self._trouble(node, seconds, "refuses")

    def disk_keeps(self, node: SimulatedNode, seconds: float) -> None:
        """Its index takes neither deletions nor tables at times."""
        self._trouble(node, seconds, "keeps")

    def disk_unreadable(self, node: SimulatedNode, seconds: float) -> None:
        """Some reads fail."""
        self._trouble(node, seconds, "unreadable")

    def disk_closed(self, node: SimulatedNode, seconds: float) -> None:
        """Its process ends, and no other one can open it."""
        self._trouble(node, seconds, "closed")
        if node.life is not None:
            for drive in node.life.drives:
                if "closed" in drive.media.troubles:
                    drive.die("its disk has gone")

    def disk_stalls(self, node: SimulatedNode, seconds: float) -> None:
        """It does nothing, for longer than orders may take at times."""
        media = self._media(node)
        if media is not None:
            self._world.note(f"a disk of {node.name} stalls")
            media.moving.clear()
            self._world.later(seconds, media.moving.set)

    def disk_flips(self, node: SimulatedNode, _seconds: float) -> None:
        """Bits turn in what lies there."""
        media = self._media(node)
        if media is not None and media.entries:
            entries = media.entries
            for offset in self._rng.sample(list(entries), -(-len(entries) // 3)):
                at = offset + self._rng.randrange(entries[offset].nbytes)
                media.surface.data[at] ^= 1 << self._rng.randrange(8)
                self._world.count("bits flipped on disks")

    def disk_loses(self, node: SimulatedNode, seconds: float) -> None:
        """Some writes are answered and never made: what was there before stays."""
        self._trouble(node, seconds, "loses")

    def disk_misdirects(self, node: SimulatedNode, seconds: float) -> None:
        """Some writes go to another place than they should."""
        self._trouble(node, seconds, "misdirects")

    def disk_spoils(self, node: SimulatedNode, _seconds: float) -> None:
        """A page of it keeps nothing until all faults end."""
        media = self._media(node)
        if media is not None:
            media.bad_pages.add(self._rng.randrange(media.size // media.page))
            self._world.count("pages of disks spoilt")

    def disk_empty(self, node: SimulatedNode, seconds: float) -> None:
        """The machine is replaced by one with new disks."""
        node.crash()
        node.empty_disks()
        self._world.later(seconds, node.restart)

    def _media(self, node: SimulatedNode) -> DurableMedia | None:
        return self._rng.choice(node.disk_media) if node.disk_media else None

    def _trouble(self, node: SimulatedNode, seconds: float, trouble: str) -> None:
        media = self._media(node)
        if media is not None:
            self._world.note(f"a disk of {node.name} is in trouble: {trouble}")
            media.troubles.add(trouble)
            self._world.later(seconds, lambda: media.troubles.discard(trouble))

    def drain(self, node: SimulatedNode, seconds: float) -> None:
        world = self._world
        asker = self._rng.choice(world.clients)
        world.spawn_client(asker, asker.drain(node.name, wanted=True))
        if self._rng.random() < 0.8:
            world.later(
                seconds, lambda: world.spawn_client(asker, asker.drain(node.name, wanted=False))
            )

"""Probes: who is asked, what becomes of the answer, and that they end."""

from __future__ import annotations

import asyncio
import itertools
import random
from types import SimpleNamespace

import pytest

from kvpool.daemon.fetch.ports import LivingNode
from kvpool.daemon.fetch.probing import PROBE_S, PROBES_MAX, Prober
from kvpool.errors import NamespaceMismatch, Unavailable
from kvpool.placement.peers import Peers
from kvpool.placement.records import NodeRecord
from kvpool.wire import frame
from kvpool.wire import worker as worker_wire


class World:
    """Peers that answer after some time, or not."""

    def __init__(self, count: int) -> None:
        self.now = 100.0
        self.names = [bytes([number]) * 8 for number in range(1, count + 1)]
        self.living = {
            name: LivingNode(NodeRecord(f"n{name[0]}", name.hex()), f"tcp://n:{name[0]}")
            for name in self.names
        }
        self.peers = Peers({}, random.Random(1))
        self.asked: list[worker_wire.AskPeer] = []
        self.errors: dict[str, Exception] = {}
        self.takes_s = 0.002
        self.idle = True
        self.prober = Prober(self, self, self.peers, lambda: self.now)

    async def pull(self, order: worker_wire.PullBlocks) -> worker_wire.Pulled:
        raise AssertionError("a probe moves no blocks")

    async def ask(self, order: worker_wire.AskPeer) -> frame.Done:
        self.asked.append(order)
        self.now += self.takes_s
        if error := self.errors.get(order.url):
            raise error
        return frame.Done(0)

    def round(self, unheard_s: float = 10.0) -> list[str]:
        self.asked.clear()
        asyncio.run(self.prober.round(unheard_s))
        return [order.url for order in self.asked]


def test_all_are_asked_in_turn_a_few_at_a_time_and_then_left_alone() -> None:
    world = World(2 * PROBES_MAX + 3)
    first, second, third, fourth = (world.round() for _ in range(4))
    assert len(first) == len(second) == PROBES_MAX
    assert sorted(first + second + third) == sorted(node.url for node in world.living.values())
    assert fourth == []
    assert {order.deadline_s for order in world.asked} <= {PROBE_S}
    world.now += 10
    assert set(world.round()) <= set(first + second)


def test_an_answer_is_a_latency() -> None:
    world = World(1)
    for _ in range(20):
        world.round(unheard_s=0.0)
    link = world.peers.link(world.names[0], "n1", world.now)
    assert link.latency_s == pytest.approx(0.002, rel=0.05)
    assert link.latency_age_s == pytest.approx(0.0)


@pytest.mark.parametrize("error", [Unavailable("late"), NamespaceMismatch("not here")])
def test_none_is_only_counted(error: Exception) -> None:
    world = World(2)
    world.errors["tcp://n:1"] = error
    world.round()
    said = {one.incarnation: one for one in world.peers.stats(world.now)}
    assert said[world.names[0].hex()].probe_failures == 1
    assert said[world.names[0].hex()].suspended_s == 0
    assert said[world.names[1].hex()].probes == 1
    assert world.round() == [], "no sooner than the others"


def test_while_there_is_something_to_do_nobody_is_asked() -> None:
    world = World(2)
    world.idle = False
    assert world.round() == []
    world.idle = True
    assert len(world.round()) == 2
    assert all(order.background for order in world.asked), "a late answer blames no way"


def test_a_node_alone_asks_nobody() -> None:
    assert World(0).round() == []


def test_it_goes_on_until_it_is_ended_and_not_at_all_if_it_is_not_to() -> None:
    async def run() -> None:
        world = World(1)
        await world.prober.run(0.0)
        assert not world.asked
        done = asyncio.Event()
        ticks = itertools.count()  # time passes whenever somebody looks

        async def ask(order: worker_wire.AskPeer) -> frame.Done:
            world.asked.append(order)
            if len(world.asked) == 3:
                done.set()
            return frame.Done(0)

        carrier = SimpleNamespace(ask=ask, pull=world.pull, idle=True)
        prober = Prober(carrier, world, world.peers, lambda: float(next(ticks)))
        task = asyncio.create_task(prober.run(1e-3))
        await done.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())

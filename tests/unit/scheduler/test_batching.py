"""Engines compute several short prompts in one step: how many are sent there, and how long that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from kvpool.scheduler.cluster import Cluster, Traffic
from kvpool.scheduler.estimates import KindEstimates, LoadEstimate, StepEstimate
from kvpool.scheduler.index import PrefixIndex
from kvpool.scheduler.policies import make_policy
from kvpool.scheduler.queue import FIFO
from kvpool.scheduler.scheduler import Scheduler, Settings
from kvpool.scheduler.values import Engine, Request, Role

STEP = 64
STEP_S, TOKEN_S = 0.5, 0.01
PLAIN = Settings(queue=FIFO, segment_s=0.0, decodes=False)


class World:
    """Engines of one kind, all idle."""

    def __init__(self, count: int = 1, *, at_once: int = 1, settings: Settings = PLAIN) -> None:
        index = PrefixIndex()
        self.engines = []
        for number in range(count):
            name = f"{number}"
            index.join(f"gpu:{name}", pool=False)
            self.engines.append(
                Engine(name, name, Role.PREFILL, "k", f"gpu:{name}", (), 0, steps_at_once=at_once)
            )
        steps = StepEstimate((STEP_S, TOKEN_S, 0.0)), StepEstimate((0.01, 0.001, 0.0))
        kinds = {"k": KindEstimates(*steps, {"peer": LoadEstimate(0.0, 1e9)}, STEP, 16, 1000)}
        cluster = Cluster(kinds, {}, Traffic())
        policy = make_policy("kvpool")
        self.scheduler = Scheduler(self.engines, cluster, index, policy, Random(0), settings)
        self.idents = 0

    def ask(self, tokens: int, count: int = 1, now: float = 0.0) -> None:
        for _ in range(count):
            request = Request(self.idents, (), tokens, 1, now)
            self.idents += 1
            assert self.scheduler.submit(request, now) is None

    def sent(self, now: float = 0.0) -> list[object]:
        return [order.request.ident for order in self.scheduler.poll(now)]

    def computed(self, idents: Sequence[object], now: float) -> None:
        for ident in idents:
            self.scheduler.computed(self.engines[0], ident, now)


def test_short_prompts_fill_the_step_after_the_one_that_has_begun() -> None:
    world = World()
    world.ask(8, count=40)
    assert world.sent() == list(range(9))  # one has begun alone, eight fit the next step
    assert world.sent() == []
    world.computed([0], 0.6)
    assert world.sent(0.6) == list(range(9, 17))
    world.computed(range(1, 9), 1.7)
    assert world.sent(1.7) == list(range(17, 25))


def test_prompts_that_are_not_short_come_one_after_the_other() -> None:
    world = World()
    world.ask(40, count=3)
    assert world.sent() == [0]
    world.ask(8)
    assert world.sent() == []  # the order of the queue holds
    world.computed([0], 0.9)
    assert world.sent(0.9) == [1]


def test_an_engine_with_several_stages_or_ranks_gets_as_many_prompts() -> None:
    world = World(at_once=4)
    world.ask(200, count=6)
    assert world.sent() == [0, 1, 2, 3]
    world.computed([2], 1.0)
    assert world.sent(1.0) == [4]


def test_all_that_wait_are_looked_at_while_there_is_room() -> None:
    world = World(3, settings=replace(PLAIN, look_ahead=2, orders_max=20))
    world.ask(1, count=100)
    assert set(world.sent()) == set(range(60))
    assert [engine.prefills for engine in world.engines] == [20, 20, 20]


def test_steps_are_shared_and_their_tokens_are_not() -> None:
    world = World()
    (engine,) = world.engines
    world.ask(8, count=9)
    world.sent()
    two_steps = 2 * STEP_S + 9 * 8 * TOKEN_S
    assert engine.free_at == pytest.approx(two_steps)
    assert (engine.in_step, engine.queued_tokens) == (8, 72)
    world.computed([0], 0.6)
    assert engine.free_at == pytest.approx(0.6 + STEP_S + 64 * TOKEN_S)
    world.scheduler.abandoned(3, 0.7)
    assert engine.free_at == pytest.approx(0.6 + STEP_S + 56 * TOKEN_S)
    world.computed([1, 2, 4, 5, 6, 7, 8], 1.8)
    assert engine.free_at == 1.8
    assert (engine.queued_tokens, engine.work_s) == (0, 0.0)

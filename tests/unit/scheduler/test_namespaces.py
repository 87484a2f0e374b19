"""Engines of another namespace (other ranks, types, codecs, models) share nothing, and nobody believes they do."""

from __future__ import annotations

from random import Random

import pytest

from kvpool.scheduler.cluster import Cluster, Traffic
from kvpool.scheduler.decision_context import DecisionContext
from kvpool.scheduler.estimates import KindEstimates, LoadEstimate, StepEstimate
from kvpool.scheduler.index import PrefixIndex
from kvpool.scheduler.policies import make_policy
from kvpool.scheduler.scheduler import Scheduler, Settings
from kvpool.scheduler.values import Engine, Order, Request, Role

KEYS = list(range(500))
REQUEST = Request(1, KEYS, 16 * len(KEYS), 200, 0.0)
TP4, TP8 = "tp4", "tp8"
PREFILL_S = 0.01 + 16 * len(KEYS) * 1e-4


class World:
    """An engine a node, each of the given namespace and role."""

    def __init__(self, **engines: tuple[str, Role]) -> None:
        self.index = PrefixIndex()
        self.engines: dict[str, Engine] = {}
        nodes, namespaces = {}, {}
        for name, (namespace, role) in engines.items():
            gpu, dram = f"gpu:{name}", f"dram:{name}/{namespace}"
            self.engines[name] = engine = Engine(
                name, name, role, "k", gpu, (dram,), 1 << 20, follows_max=8, namespace=namespace
            )
            nodes[dram], namespaces[dram] = engine.node, namespace
            self.index.join(gpu, pool=False, namespace=namespace)
            self.index.join(dram, pool=True, namespace=namespace)
        loads = {"dram": LoadEstimate(0.0, 1e11), "peer": LoadEstimate(0.001, 2.5e10)}
        steps = StepEstimate((0.01, 1e-4, 0.0)), StepEstimate((0.01, 1e-4, 0.0))
        kinds = {"k": KindEstimates(*steps, loads, 1 << 20, 16, 1 << 20)}
        self.cluster = Cluster(kinds, nodes, Traffic(), namespaces)

    def has(self, name: str) -> None:
        """All blocks of the prompt are in the memory of this engine's node."""
        self.index.add(self.engines[name].tiers[0], KEYS)

    def context(self, *names: str, now: float = 0.0) -> DecisionContext:
        engines = [self.engines[name] for name in names]
        match = self.index.match(KEYS, now)
        return DecisionContext(REQUEST, match, engines, self.cluster, Random(0), now)

    def order(self, seed: int = 0) -> Order:
        engines, policy = tuple(self.engines.values()), make_policy("kvpool")
        settings = Settings(segment_s=0.0)
        scheduler = Scheduler(engines, self.cluster, self.index, policy, Random(seed), settings)
        assert scheduler.submit(REQUEST, 0.0) is None
        (order,) = scheduler.poll(0.0)
        assert isinstance(order, Order)
        return order


@pytest.mark.parametrize("namespace", [TP4, TP8])
def test_blocks_of_another_namespace_are_not_pulled(namespace: str) -> None:
    world = World(a=(TP8, Role.BOTH), b=(namespace, Role.BOTH))
    world.has("a")
    found = world.context("b").estimate(world.engines["b"])
    if namespace == TP8:
        assert (found.cached, found.source) == (len(KEYS), "a")
        assert found.ttft_s < PREFILL_S / 2
    else:
        assert (found.cached, found.pulled, found.source) == (0, 0, None)
        assert found.ttft_s == pytest.approx(PREFILL_S)


def test_nobody_waits_for_what_is_computed_in_another_namespace() -> None:
    world = World(a=(TP8, Role.BOTH), b=(TP4, Role.BOTH), c=(TP8, Role.BOTH))
    ready = [0.01] * len(KEYS)
    world.index.expect("gpu:a", KEYS, ready, 10.0)
    world.index.expect("gpu:b", KEYS, [0.5] * len(KEYS), 10.0)
    there = world.context("c").estimate(world.engines["c"], waiting=True)
    assert there.pending and there.starts_s < 0.1
    for name in ("a", "b"):
        assert world.index.match(KEYS, 0.0).lengths[f"gpu:{name}"] == len(KEYS)
    world.index.unexpect("gpu:a", KEYS)
    alone = world.context("c").estimate(world.engines["c"], waiting=True)
    assert not alone.pending and alone.ttft_s == pytest.approx(PREFILL_S)


def test_the_source_is_of_the_same_namespace_though_another_has_more() -> None:
    world = World(a=(TP8, Role.BOTH), b=(TP4, Role.BOTH), c=(TP4, Role.BOTH))
    world.has("a")
    world.index.add(world.engines["b"].tiers[0], KEYS[:100])
    context = world.context("c")
    assert context.sources(TP8) == (len(KEYS), ["a"])
    assert context.sources(TP4) == (100, ["b"])
    assert context.estimate(world.engines["c"]).source == "b"


def test_a_decode_engine_of_another_namespace_does_not_follow() -> None:
    world = World(p=(TP8, Role.PREFILL), d=(TP4, Role.DECODE))
    order = world.order()
    assert (order.decode, order.follow) == (world.engines["d"], False)
    (estimate,) = order.decoders
    assert estimate.handover_s == pytest.approx(PREFILL_S), "it computes the prompt again"


@pytest.mark.parametrize("seed", range(8))
def test_pairs_of_one_namespace_go_before_others(seed: int) -> None:
    world = World(p4=(TP4, Role.PREFILL), p8=(TP8, Role.PREFILL), d=(TP8, Role.DECODE))
    order = world.order(seed)
    assert order.estimate.engine is world.engines["p8"]
    assert order.follow

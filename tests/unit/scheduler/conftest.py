"""A small cluster for the tests of single rules: engines by name, and time in the test's hands."""

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from types import MappingProxyType
from typing import Any

import pytest

from kvpool.scheduler.cluster import Cluster, Traffic
from kvpool.scheduler.estimates import KindEstimates, LoadEstimate, StepEstimate
from kvpool.scheduler.index import PrefixIndex
from kvpool.scheduler.policies import make_policy
from kvpool.scheduler.queue import FIFO
from kvpool.scheduler.scheduler import Scheduler, Settings
from kvpool.scheduler.values import DecodeOrder, Engine, Order, Request, Role

BLOCK, STEP, BLOCK_BYTES = 16, 64, 1000
TOKEN_S = 0.01
TPOT_S, TPOT_MORE_S = 0.01, 0.001
PLAIN = Settings(queue=FIFO, segment_s=0.0)


class Rules:
    """engines: role by name; a name `a@n` lies on node n, others each on their own.

    A block has 16 tokens, a step 64; a prompt takes 0.01 s a token, an answer 0.01 s a token, and 0.001 s more
    for each request that decodes there.
    """

    def __init__(
        self,
        engines: dict[str, Role],
        settings: Settings = PLAIN,
        *,
        policy: str = "kvpool",
        pull_s: float = 0.001,
        capacity: int = 1000,
        places: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
        **engine: Any,
    ) -> None:
        """pull_s: a block. places: labels of engines, by their names."""
        loads = {
            "dram": LoadEstimate(0.0, 1e12),
            "peer": LoadEstimate(0.0, BLOCK_BYTES / pull_s),
        }
        steps = StepEstimate((0.0, TOKEN_S, 0.0)), StepEstimate((TPOT_S, TPOT_MORE_S, 0.0))
        kinds = {name: KindEstimates(*steps, loads, STEP, BLOCK, BLOCK_BYTES) for name in "kl"}
        self.index = PrefixIndex()
        self.nodes: dict[str, str] = {}
        self.cluster = Cluster(kinds, self.nodes, Traffic())
        self.engines = {
            name.partition("@")[0]: self.engine(
                name, role, capacity, labels=places.get(name, {}), **engine
            )
            for name, role in engines.items()
        }
        self.scheduler = Scheduler(
            list(self.engines.values()),
            self.cluster,
            self.index,
            make_policy(policy),
            Random(0),
            settings,
        )
        self.count = 0

    def engine(
        self, name: str, role: Role, capacity: int = 1000, *, pooled: bool = True, **more: Any
    ) -> Engine:
        """pooled: whether it is on a node with a pool, or on none that is known."""
        name, _, node = name.partition("@")
        node = node or name
        gpu, dram = f"gpu:{name}", f"dram:{node}"
        self.index.join(gpu, pool=False)
        if not pooled:
            return Engine(
                name, "", role, **{"kind": "k", **more}, gpu=gpu, tiers=(), capacity_tokens=capacity
            )
        if dram not in self.nodes:
            self.index.join(dram, pool=True)
            self.nodes[dram] = node
        more = {"kind": "k", **more}
        return Engine(name, node, role, gpu=gpu, tiers=(dram,), capacity_tokens=capacity, **more)

    def submit(self, tokens: int = 100, now: float = 0.0, **more: Any) -> int:
        """Its ident; it must be taken."""
        request = self.request(tokens, now, **more)
        assert self.scheduler.submit(request, now) is None
        return self.count

    def request(self, tokens: int = 100, now: float = 0.0, **more: Any) -> Request:
        self.count += 1
        keys = [(self.count, number) for number in range(-(-tokens // BLOCK))]
        return replace(Request(self.count, keys, tokens, 10, now), **more)

    def poll(self, now: float = 0.0) -> list[tuple[Any, ...]]:
        """(ident, engine, how it goes on) of each order."""
        return [shown(order) for order in self.scheduler.poll(now)]

    def computed(self, name: str, ident: int, now: float) -> None:
        self.scheduler.computed(self.engines[name], ident, now)


def shown(order: Order | DecodeOrder) -> tuple[Any, ...]:
    ident = order.request.ident
    if isinstance(order, DecodeOrder):
        return ident, order.engine.name, "decode"
    how = "whole" if order.whole else "follow" if order.follow else "" if order.last else "part"
    return ident, order.estimate.engine.name, how


@pytest.fixture
def make() -> type[Rules]:
    """Makes such a cluster."""
    return Rules

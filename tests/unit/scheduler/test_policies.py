"""What each policy chooses, from its formula worked out by hand."""

from random import Random
from typing import Any

import pytest

from kvpool.errors import ConfigError
from kvpool.scheduler.cluster import Cluster, Traffic
from kvpool.scheduler.decision_context import DecisionContext
from kvpool.scheduler.estimates import KindEstimates, LoadEstimate, StepEstimate
from kvpool.scheduler.index import PrefixIndex
from kvpool.scheduler.policies import POLICIES, Policy, make_policy
from kvpool.scheduler.policies.prefix import ApproximatePrefix
from kvpool.scheduler.values import Engine, Request, Role

BLOCK = 100
BLOCK_BYTES = 1_000_000
COMPUTE_S = 0.1  # a block
PULL_S, LOAD_S = 0.02, 0.01


class World:
    """Engines a, b and c, each on its node, and what they hold."""

    def __init__(self, *, pull_s: float = PULL_S) -> None:
        self.index = PrefixIndex()
        self.engines: dict[str, Engine] = {}
        for name in "abc":
            gpu, dram = f"gpu:{name}", f"dram:{name}"
            self.engines[name] = Engine(name, name, Role.PREFILL, "k", gpu, (dram,), 1 << 20)
            self.index.join(gpu, pool=False)
            self.index.join(dram, pool=True)
        loads = {
            "dram": LoadEstimate(0.0, BLOCK_BYTES / LOAD_S),
            "peer": LoadEstimate(0.0, BLOCK_BYTES / pull_s),
        }
        step = StepEstimate((0.0, COMPUTE_S / BLOCK, 0.0))
        kinds = {"k": KindEstimates(step, step, loads, 2048, BLOCK, BLOCK_BYTES)}
        nodes = {f"dram:{name}": name for name in self.engines}
        self.cluster = Cluster(kinds, nodes, Traffic())

    def hold(self, name: str, blocks: int, tier: str = "dram") -> None:
        self.index.add(f"{tier}:{name}", range(blocks))

    def decision_context(
        self, blocks: int = 10, *, now: float = 0.0, session: object = None
    ) -> DecisionContext:
        request = Request("r", range(blocks), blocks * BLOCK, 10, now, session=session)
        match = self.index.match(request.keys, now)
        engines = list(self.engines.values())
        return DecisionContext(request, match, engines, self.cluster, Random(1), now)

    def chosen(self, policy: str | Policy, **asked: Any) -> str:
        found = make_policy(policy) if isinstance(policy, str) else policy
        return found.choose(self.decision_context(**asked)).best.engine.name


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_chooses_one_of_the_engines_and_explains(name: str) -> None:
    world = World()
    world.hold("b", 4)
    policy = make_policy(name)
    context = world.decision_context()
    choice = policy.choose(context)
    assert choice.best.engine in context.engines
    assert choice.best.engine.name in [o.engine.name for o in choice.candidates]
    assert choice.best.cost == min(o.cost for o in choice.candidates)
    policy.sent(context, choice.best.engine)


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="round-robin"):
        make_policy("best")


def test_round_robin_takes_turns_and_a_session_stays() -> None:
    world = World()
    policy = make_policy("round-robin")
    assert [world.chosen(policy) for _ in range(4)] == ["a", "b", "c", "a"]
    by_session = [{world.chosen("session-hash", session=s) for _ in range(3)} for s in range(30)]
    assert all(len(engines) == 1 for engines in by_session)
    assert set().union(*by_session) == {"a", "b", "c"}


def test_a_session_moves_only_if_its_engine_goes() -> None:
    world = World()
    before = {s: world.chosen("session-hash", session=s) for s in range(50)}
    del world.engines["b"]
    after = {s: world.chosen("session-hash", session=s) for s in range(50)}
    assert all(after[s] == before[s] for s in before if before[s] != "b")


def test_least_loaded_counts_tokens() -> None:
    world = World()
    world.engines["a"].queued_tokens = 300
    world.engines["b"].queued_tokens = 100
    world.engines["c"].queued_tokens = 200
    assert world.chosen("least-loaded") == "b"


def test_approximate_prefix_goes_by_what_it_sent_unless_imbalanced() -> None:
    world = World()
    policy = ApproximatePrefix()
    world.engines["a"].prefills = 1  # b and c have fewer
    policy.sent(world.decision_context(4), world.engines["a"])
    assert world.chosen(policy, blocks=10) == "a"  # 4 of 10 are more than 0.3
    assert world.chosen(policy, blocks=14) != "a"  # 4 of 14 are less
    world.engines["a"].prefills = 65
    assert world.chosen(policy, blocks=10) != "a"  # 65 - 0 > 64, and 65 > 1.5 x 0


def test_dynamo_adds_blocks_to_compute_and_blocks_in_use() -> None:
    world = World()
    world.hold("a", 6, "gpu")  # credit 6: 10 - 6 + 10 = 14
    world.hold("b", 6)  # credit 0.75 x 6: 5.5 + 10 = 15.5
    assert world.chosen("dynamo") == "a"
    world.engines["a"].queued_tokens = 200  # 2 blocks more: 16
    assert world.chosen("dynamo") == "b"
    costs = {
        o.engine.name: o.cost
        for o in make_policy("dynamo").choose(world.decision_context()).candidates
    }
    assert costs == {"a": 16.0, "b": 15.5, "c": 20.0}


def test_blocks_that_are_in_use_already_are_not_counted_again() -> None:
    world = World()
    world.engines["a"].blocks = dict.fromkeys(range(6), 2)  # 6 + 10 - 6 in use
    world.engines["b"].blocks = dict.fromkeys(range(20, 24), 1)  # 4 + 10
    found = make_policy("dynamo").choose(world.decision_context())
    assert {o.engine.name: o.cost for o in found.candidates} == {"a": 20.0, "b": 24.0, "c": 20.0}


def test_lmetric_multiplies() -> None:
    world = World()
    world.hold("a", 8, "gpu")
    world.engines["a"].blocks = dict.fromkeys(range(100, 130), 1)
    found = make_policy("lmetric").choose(world.decision_context())
    assert {o.engine.name: o.cost for o in found.candidates} == {"a": 82.0, "b": 110.0, "c": 110.0}


def test_mooncake_adds_up_queue_transfer_and_prefill() -> None:
    world = World()
    world.hold("a", 6)
    world.engines["a"].free_at = 0.5
    found = make_policy("mooncake-global").choose(world.decision_context())
    costs = {o.engine.name: pytest.approx(o.cost) for o in found.candidates}
    assert costs == {"a": 0.5 + 0.4, "b": 6 * PULL_S + 0.4, "c": 6 * PULL_S + 0.4}
    assert found.best.source == "a"
    local = make_policy("mooncake-local").choose(world.decision_context())
    costs = {o.engine.name: pytest.approx(o.cost) for o in local.candidates}
    assert costs == {"a": 0.9, "b": 1.0, "c": 1.0}
    world.engines["a"].free_at = 10.0
    elsewhere = make_policy("mooncake-local").choose(world.decision_context()).best
    # It was not chosen for that, but the pool delivers all the same.
    assert (elsewhere.pulled, elsewhere.prefill_s) == (6, pytest.approx(0.4))


def test_ours_pulls_while_it_queues() -> None:
    world = World()
    world.hold("a", 6)
    estimate = world.decision_context().estimate(world.engines["b"])
    assert (estimate.cached, estimate.pulled, estimate.source) == (6, 6, "a")
    assert estimate.ttft_s == pytest.approx(6 * PULL_S + 0.4)
    world.engines["b"].free_at = 1.0
    assert world.decision_context().estimate(world.engines["b"]).ttft_s == pytest.approx(1.4)


def test_what_loads_slower_than_it_computes_is_computed() -> None:
    world = World(pull_s=0.15)
    world.hold("a", 6)
    estimate = world.decision_context().estimate(world.engines["b"])
    assert (estimate.cached, estimate.pulled) == (0, 0)
    assert estimate.ttft_s == pytest.approx(1.0)
    world.engines["b"].free_at = 2.0  # there is time to load meanwhile
    assert world.decision_context().estimate(world.engines["b"]).cached == 6


def test_a_busy_link_counts_and_another_source_is_taken() -> None:
    world = World()
    world.hold("a", 6)
    world.cluster.traffic.add("a", "c", 5.0, 0.0)
    assert world.decision_context().estimate(world.engines["b"]).pulled == 0
    world.hold("c", 6)
    world.cluster.traffic.add("c", "a", 0.01, 0.0)
    assert world.decision_context().estimate(world.engines["b"]).source == "c"


def test_blocks_that_are_being_computed_are_waited_for_where_that_is_sooner() -> None:
    world = World()
    world.index.expect("gpu:a", range(8), [0.025 * n for n in range(1, 9)], 10.0)
    world.engines["a"].free_at = 5.0
    context = world.decision_context()
    waiting = context.estimate(world.engines["b"], waiting=True)
    assert waiting.pending
    assert waiting.ttft_s == pytest.approx(0.2 + 8 * PULL_S + 0.2)
    world.index.expect("gpu:a", range(8), [3.0] * 8, 10.0)
    assert not world.decision_context().estimate(world.engines["b"], waiting=True).pending


def test_what_somebody_computes_already_is_waited_for_if_that_is_clearly_sooner() -> None:
    world = World()
    # Computing all takes 1 s. Waiting and pulling takes 0.36 s from the time that 8 blocks are there, which
    # are 0.8 s of work: it has to be sooner by half of that.
    for ready_at, pending in ((0.2, True), (0.3, False)):
        world.index.expect("gpu:a", range(8), [ready_at] * 8, 10.0)
        found = world.decision_context().estimate(world.engines["b"], waiting=True)
        assert found.pending == pending
    world.index.expect("gpu:a", range(8), [0.2] * 8, 10.0)
    assert not world.decision_context().estimate(world.engines["b"]).pending


def test_nobody_pulls_from_its_own_node() -> None:
    world = World()
    world.hold("a", 2)
    world.hold("b", 8)
    world.index.discard("dram:b", [0])  # an odd one: what it has is no prefix
    world.hold("c", 2)
    context = world.decision_context()
    assert {context.source_for(engine, 1)[0] for engine in context.engines} <= {"a", "c"}
    assert context.source_for(world.engines["a"], 1)[0] == "c"
    assert context.source_for(world.engines["c"], 1)[0] == "a"


def test_a_busy_link_is_nothing_to_a_prompt_that_pulls_nothing() -> None:
    world = World()
    world.engines["a"].free_at, world.engines["c"].free_at = 0.2, 0.3
    world.cluster.traffic.add("a", "b", 5.0, 0.0)
    assert world.chosen("kvpool") == "b"
    world.hold("a", 6)
    world.hold("b", 6)
    world.hold("c", 6)
    assert world.chosen("kvpool") == "b"


def test_engines_that_are_alike_are_looked_at_once() -> None:
    world = World()
    world.hold("a", 6)
    world.engines["b"].free_at = 0.2
    assert [e.name for e in world.decision_context().distinct()] == ["a", "c"]
    world.engines["b"].free_at = 0.0
    context = world.decision_context()
    taken = {engine.name for _ in range(50) for engine in context.distinct()}
    assert taken == {"a", "b", "c"}  # b and c by turns, or one node's memory would be full first
    assert len(context.distinct()) == 2
    world.engines["b"].free_at = 0.2
    alone = make_policy("kvpool").choose(world.decision_context())
    every = [
        world.decision_context().estimate(e, waiting=True).ttft_s for e in world.engines.values()
    ]
    assert alone.best.ttft_s == pytest.approx(min(every))

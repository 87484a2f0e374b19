"""What orders and answers teach, beside an engine whose speed is known."""

import random
from types import SimpleNamespace

import pytest

from kvpool.placement.records import LinkRecord
from kvpool.router.hashing import HashSpec
from kvpool.router.records.observations import Measured, Observing, assumed, learned
from kvpool.router.requests.calls import Call
from kvpool.router.upstream.specs import spec_of
from kvpool.scheduler.cluster import Cluster, Traffic
from kvpool.scheduler.values import Engine, Estimate, Role

SPEC = spec_of(
    "http://h:1",
    announced=None,
    table={"block_tokens": 16, "step_tokens": 1000, "block_bytes": 4096},
)
A, B, C = 0.02, 5e-5, 1e-8  # seconds a step, a token, a token attended to


def computing_s(cached, end):
    tokens = end - cached
    return A * -(-tokens // 1000) + B * tokens + C * tokens * (cached + end) / 2


class World:
    def __init__(self):
        self.now = 0.0
        self.kind = assumed(SPEC)
        self.engine = Engine("e", "n", Role.BOTH, "k", "gpu:e", ("dram:n",), 1 << 20)
        self.observing = Observing(Cluster({"k": self.kind}, {}, Traffic()), lambda: self.now)

    def order(
        self, cached, end, sent_at, *, known=True, load_s=0.0, loaded=0, pulled=0, stream=None
    ):
        estimate = Estimate(self.engine, cached // 16, loaded, pulled, None, load_s, 0.0, 0.0, 0.0)
        order = SimpleNamespace(estimate=estimate, end=end)
        measured = Measured(sent_at, cached if known else None, stream is not False)
        self.observing.computed(order, measured)


def test_sizes_are_those_that_the_engine_tells():
    kind = assumed(SPEC)
    assert SPEC.hashing == HashSpec(16, "sha256_cbor", SPEC.hashing.none_hash)
    assert (kind.block_tokens, kind.block_bytes, kind.step_tokens) == (16, 4096, 1000)


@pytest.mark.parametrize("known", [True, False])
def test_prompts_teach_how_fast_an_engine_is(known):
    """They queue in the engine: each one's own time begins when the one before it is done."""
    world, rng = World(), random.Random(1)
    for _ in range(400):
        burst, sent_at = rng.randrange(1, 4), world.now
        for _ in range(burst):
            cached = 16 * rng.randrange(0, 200)
            end = cached + rng.randrange(1, 6000)
            world.now += computing_s(cached, end)
            world.order(cached, end, sent_at, known=known)
        world.now += rng.random()
    for cached, end in ((0, 500), (0, 6000), (2000, 8000)):
        assert world.kind.prefill.prefill_s(cached, end, 1000) == pytest.approx(
            computing_s(cached, end), rel=0.1
        )
    assert world.kind.prefill.error.mean < 0.1


def test_prompts_that_are_computed_together_teach_as_one_step():
    """Their answers come one right after the other: what the first one took is the time of all."""
    world, rng = World(), random.Random(3)
    for _ in range(300):
        sent_at = world.now
        ends = [rng.randrange(1, 200) for _ in range(rng.randrange(1, 6))]
        world.now += A + sum(B * end + C * end * end / 2 for end in ends)
        for end in ends:
            world.order(0, end, sent_at)
            world.now += 1e-4
        world.now += rng.random()
    for end in (10, 300, 900):
        assert world.kind.prefill.prefill_s(0, end, 1000) == pytest.approx(
            computing_s(0, end), rel=0.05
        )


def test_what_is_loaded_teaches_how_fast_that_is():
    world = World()
    for _ in range(100):
        expected = world.kind.loads["peer"].seconds(1000 * 4096)
        sent_at = world.now
        world.now += 0.5 + world.kind.prefill.prefill_s(16000, 16010, 1000)
        world.order(16000, 16010, sent_at, load_s=max(expected, 0.2), loaded=1000, pulled=1000)
    world.now += 1.0
    world.observing.errors()  # what is over is taught
    cluster = Cluster({"k": world.kind}, {}, Traffic())
    kinds = learned(cluster)
    assert kinds["k"]["loads"] == {"peer": pytest.approx(1000 * 4096 / 0.5, rel=0.05)}
    assert kinds["k"]["prefill"]["coefficients"] == world.kind.prefill.coefficients
    cluster.links.told({"a": ("", [LinkRecord("rack", 0.001, 7e9, 32.0, 1)])})
    assert learned(cluster)["k"]["loads"] == {"peer": pytest.approx(7e9)}, "daemons know better"
    assert world.kind.loads["peer"].seconds(1000 * 4096) == pytest.approx(0.5, rel=0.05)
    assert world.kind.prefill.error.count == 0


def test_what_teaches_nothing():
    world = World()
    world.now = 1.0
    world.order(100, 100, 0.0)  # nothing was computed
    world.order(0, 1000, 0.5, stream=False)  # its end says nothing of its prompt's
    world.now = 2.0
    world.order(0, 1000, 1.5, load_s=0.05, loaded=10)  # neither one nor the other
    world.now = 5.0
    assert all(error.count == 0 for error in world.observing.errors()["k"].values())
    world.order(0, 1000, 4.5, stream=True)
    world.now = 6.0
    assert world.observing.errors()["k"]["prefill"].count == 1


def test_answers_teach_how_long_a_token_takes():
    world, rng = World(), random.Random(2)
    for _ in range(300):
        world.engine.decodes = rng.randrange(1, 64)
        world.engine.context_tokens = world.engine.decodes * rng.randrange(100, 4000)
        each_s = A + 1e-4 * world.engine.decodes + 2e-8 * world.engine.context_tokens
        world.observing.answered(world.engine, 99, 99 * each_s)
    assert world.kind.decode.step_s(32, 64000) == pytest.approx(A + 32e-4 + 64e3 * 2e-8, rel=0.1)


@pytest.mark.parametrize("said", [True, "100", 0, -3, 1.5, None, [9]])
def test_usage_that_is_no_number_of_tokens(said):
    """What was seen counts instead."""
    call = Call(SPEC, None, True, 0.0, 1.0, events=50, usage={"completion_tokens": said})
    assert call.answer_tokens == 50


def test_short_answers_and_engines_without_any_teach_nothing():
    world = World()
    world.observing.answered(world.engine, 50, 1.0)
    world.engine.decodes = 1
    world.observing.answered(world.engine, 1, 1.0)
    assert world.kind.decode.error.count == 0

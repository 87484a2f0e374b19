"""The fit of an engine's prefill speed: against engines whose speed is known."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.prefill_cost import REACH, STEPS_MIN, PrefillFit, StepWork
from kvpool.types import Recompute

TOKENS = 32  # of a block


class Engine:
    """Computes steps in the time that its model says; decodes cost something of their own."""

    def __init__(self, base_s: float, token_s: float, pair_s: float, decode_s: float = 0.0) -> None:
        self.base_s, self.token_s, self.pair_s = base_s, token_s, pair_s
        self.decode_s = decode_s
        self.fit = PrefillFit()

    def step(self, chunks: Iterable[tuple[int, int]], *, decodes: int = 0, factor: float = 1.0):
        """One step of chunks (context, tokens) of prompts, and of requests that decode a token each."""
        chunks = list(chunks)
        prompts = sum(tokens for _, tokens in chunks)
        # By token, and not by the formula that the scheduler half uses.
        attended = sum(
            context + index + 0.5 for context, tokens in chunks for index in range(tokens)
        )
        seconds = self.base_s + self.token_s * (prompts + decodes) + self.pair_s * attended
        seconds += self.decode_s * decodes
        deepest = max(context + tokens for context, tokens in chunks)
        self.fit.observe(StepWork(prompts + decodes, attended, deepest), seconds * factor)

    def price(self, start: int) -> float:
        """Of the block that begins at a token, on top of a step that is made anyway."""
        attended = sum(start + index + 0.5 for index in range(TOKENS))
        return self.token_s * TOKENS + self.pair_s * attended


def work(
    rng: random.Random, engine: Engine, steps: int, noise: float = 0.0, decodes: int = 0
) -> None:
    """Prompts of all lengths in chunks of up to 512 tokens."""
    done = 0
    while done < steps:
        length, context = rng.randrange(20, 3000), 0
        while context < length and done < steps:
            tokens = min(512, length - context)
            factor = max(0.3, rng.gauss(1, noise))
            engine.step([(context, tokens)], decodes=rng.randrange(decodes + 1), factor=factor)
            context += tokens
            done += 1


def engine_of(token_s: float, base_share: float, depth_share: float) -> Engine:
    """Shares: of what a whole chunk's tokens take, at a depth of 0 and of 3,000."""
    return Engine(base_share * 512 * token_s, token_s, depth_share * token_s / 3000)


speeds = st.builds(engine_of, st.floats(1e-6, 1e-3), st.floats(0, 0.5), st.floats(0, 1))


@given(speeds, st.integers(0, 2**32), st.integers(0, 2500))
@settings(deadline=None)
def test_the_price_of_a_block_is_found(engine: Engine, seed: int, start: int) -> None:
    work(random.Random(seed), engine, 120)
    found = engine.fit.recompute(start, TOKENS, 10)
    assert found is not None
    assert found.block_s == pytest.approx(engine.price(start), rel=0.12)
    total = sum(engine.price(start + n * TOKENS) for n in range(10))
    assert found.seconds(0, 10) == pytest.approx(total, rel=0.12)


@given(
    st.lists(
        st.tuples(st.integers(1, 4096), st.integers(0, 10**6), st.floats(0, 1e4)),
        min_size=STEPS_MIN,
        max_size=30,
    ),
    st.integers(0, 10**6),
    st.integers(1, 5000),
)
def test_no_price_is_negative_or_infinite_and_deeper_blocks_cost_no_less(
    steps: list[tuple[int, int, float]], start: int, blocks: int
) -> None:
    fit = PrefillFit()
    for tokens, context, seconds in steps:
        fit.observe(StepWork(tokens, tokens * (context + tokens / 2), context + tokens), seconds)
    assert min(fit.coefficients) >= 0
    found = fit.recompute(start, TOKENS, blocks)  # a `Recompute` takes nothing else
    if found is not None:
        assert found.seconds(0, blocks) > 0


def test_nothing_is_said_at_first() -> None:
    engine = Engine(0.01, 1e-4, 0)
    for _ in range(STEPS_MIN):
        assert engine.fit.recompute(0, TOKENS, 1) is None
        engine.step([(0, 100)])
    assert engine.fit.recompute(0, TOKENS, 1) is not None


def relative(engine: Engine, start: int) -> float:
    found = engine.fit.recompute(start, TOKENS, 1)
    assert found is not None
    return found.block_s / engine.price(start)


@pytest.mark.parametrize("seed", range(20))
def test_a_first_step_that_compiles_is_forgotten_at_once(seed: int) -> None:
    engine = Engine(0.005, 1e-4, 1e-8)
    engine.step([(0, 512)], factor=300)
    work(random.Random(seed), engine, 10)
    assert relative(engine, 256) == pytest.approx(1, rel=0.2)


@pytest.mark.parametrize("seed", range(20))
def test_steps_that_scatter_and_stalls_among_them(seed: int) -> None:
    engine = Engine(0.005, 1e-4, 1e-8)
    rng = random.Random(seed)
    for _ in range(8):
        work(rng, engine, 20, noise=0.1)
        engine.step([(0, 256)], factor=50)
    work(rng, engine, 20, noise=0.1)
    for start in (0, 2048):
        assert relative(engine, start) == pytest.approx(1, rel=0.3)


@pytest.mark.parametrize("seed", range(20))
def test_decodes_beside_the_prompts_do_not_make_prompts_dear(seed: int) -> None:
    """What they cost is the engine's anyway: at most a part of it is taken for the prompts'."""
    engine = Engine(0.005, 1e-4, 1e-8, decode_s=2e-4)
    work(random.Random(seed), engine, 150, decodes=64)
    for start in (0, 2048):
        assert relative(engine, start) == pytest.approx(1, rel=0.3)


def test_an_engine_that_gets_slower_is_followed() -> None:
    engine, rng = Engine(0.005, 1e-4, 1e-8), random.Random(3)
    work(rng, engine, 200)
    engine.base_s, engine.token_s, engine.pair_s = 0.015, 3e-4, 3e-8
    work(rng, engine, 150)
    assert relative(engine, 512) == pytest.approx(1, rel=0.25)


def test_steps_that_are_all_alike_count_by_the_token() -> None:
    """They cannot be told apart into base and tokens; a prompt of several such steps costs all of them."""
    engine = Engine(0.01, 1e-4, 0)
    for _ in range(50):
        engine.step([(0, 512)])
    found = engine.fit.recompute(0, TOKENS, 16)
    assert found is not None
    assert found.seconds(0, 16) == pytest.approx(0.01 + 512e-4, rel=0.05)


def test_far_beyond_what_was_seen_the_price_stays_what_it_is_there() -> None:
    engine = Engine(0.005, 1e-4, 1e-7)
    work(random.Random(1), engine, 100)
    deepest = 3000 * REACH
    found = engine.fit.recompute(200_000, TOKENS, 100)
    assert found is not None
    assert found.growth_s == 0
    assert found.block_s <= engine.price(int(deepest)) * 1.2


@given(st.integers(0, 100), st.integers(0, 100), st.integers(0, 100))
def test_a_price_of_many_blocks_is_that_of_one_after_the_other(
    first: int, more: int, growth: int
) -> None:
    price = Recompute(3.0, float(growth))
    one_by_one = sum(3.0 + growth * index for index in range(first, first + more))
    assert price.seconds(first, first + more) == one_by_one


@pytest.mark.parametrize("seed", range(10))
def test_steps_that_are_nearly_alike_and_scatter_are_not_read_into(seed: int) -> None:
    engine, rng = Engine(0.005, 1e-4, 0), random.Random(seed)
    for _ in range(60):
        engine.step([(0, rng.randrange(500, 512))], factor=rng.gauss(1, 0.1))
    found = engine.fit.recompute(0, TOKENS, 16)
    assert found is not None
    assert found.seconds(0, 16) == pytest.approx(0.005 + 512e-4, rel=0.25)


def test_the_price_of_a_whole_prompt_is_that_of_one_step_over_it_without_its_base() -> None:
    engine = Engine(0.005, 1e-6, 1e-6)
    work(random.Random(5), engine, 60)
    _, b, c = engine.fit.coefficients
    found = engine.fit.recompute(0, TOKENS, 4)
    assert found is not None
    tokens = 4 * TOKENS
    assert found.seconds(0, 4) == pytest.approx(b * tokens + c * tokens**2 / 2)

"""The engine, against one that is simulated a step at a time."""

from collections.abc import Hashable, Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvpool.scheduler.estimates import KindEstimates, StepEstimate
from kvpool.scheduler.values import Engine, Estimate, Order, Request, Role
from kvpool.simulator.bound import service_s
from kvpool.simulator.engine import Decode, Prefill, SimulatedEngine
from kvpool.simulator.events import Timeline
from kvpool.simulator.speeds import Speeds, load_hardware, load_model

SPEEDS = Speeds(load_hardware("a800x8"), load_model("llama-3-70b"))
STEP, BLOCK = 2048, 512


class Around:
    """Loads nothing, and notes what the engine says."""

    def __init__(self, cached: int = 0) -> None:
        self.timeline = Timeline()
        view = Engine("e", "e", Role.BOTH, "k", "gpu:e", (), 100_000)
        step = StepEstimate(SPEEDS.coefficients)
        kind = KindEstimates(step, StepEstimate(SPEEDS.decode_coefficients), {}, STEP, BLOCK, 1)
        self.engine = SimulatedEngine(view, SPEEDS, kind, self.timeline, self)
        self.tokens = cached
        self.blocks: list[tuple[int, float]] = []
        self.prefilled_at: dict[Hashable, float] = {}
        self.decoded_at: dict[Hashable, float] = {}

    def load(self, engine: SimulatedEngine, prefill: Prefill) -> None:
        engine.ready(prefill, 0)

    def cached(self, engine: SimulatedEngine, prefill: Prefill) -> int:
        return self.tokens

    def committed(self, engine: SimulatedEngine, keys: Sequence[Hashable], depth: int) -> None:
        self.blocks += [(depth + number, self.timeline.now) for number in range(len(keys))]

    def prefilled(self, engine: SimulatedEngine, prefill: Prefill) -> None:
        self.prefilled_at[prefill.order.request.ident] = self.timeline.now

    def decoded(self, engine: SimulatedEngine, decode: Decode) -> None:
        self.decoded_at[decode.ident] = self.timeline.now

    def prompt(self, ident: int, tokens: int, at: float = 0.0, end: int = 0) -> None:
        request = Request(ident, range(-(-tokens // BLOCK)), tokens, 10, at)
        estimate = Estimate(self.engine.engine, 0, 0, 0, None, 0.0, 0.0, 0.0, 0.0)
        order = Order(request, estimate, end or tokens, not end, None)
        self.timeline.at(at, self.engine.submit, Prefill(order))

    def answer(self, ident: int, tokens: int, output_tokens: int, at: float) -> None:
        whole = tokens + output_tokens
        self.timeline.at(at, self.engine.decode, Decode(ident, whole, output_tokens))

    def run(self) -> None:
        while self.timeline.next_at < float("inf"):
            self.timeline.step()


@pytest.mark.parametrize("tokens", [1, 511, 512, 2048, 2049, 30_000])
def test_a_prompt_alone_takes_its_service_time_and_its_blocks_come_one_by_one(tokens: int) -> None:
    around = Around()
    around.prompt(1, tokens)
    around.run()
    expected = service_s(SPEEDS, tokens, 0, STEP)
    assert around.prefilled_at[1] == pytest.approx(expected)
    assert [depth for depth, _ in around.blocks] == list(range(-(-tokens // BLOCK)))
    assert len({when for _, when in around.blocks}) == -(-tokens // STEP)
    assert around.engine.busy_s == pytest.approx(expected)


def test_what_came_into_the_cache_meanwhile_is_not_computed() -> None:
    around = Around(cached=8192)
    around.prompt(1, 10_000)
    around.run()
    assert around.prefilled_at[1] == pytest.approx(service_s(SPEEDS, 10_000, 16, STEP))


def test_a_segment_ends_where_it_is_told_to() -> None:
    around = Around()
    around.prompt(1, 10_000, end=4096)
    around.run()
    assert around.prefilled_at[1] == pytest.approx(service_s(SPEEDS, 4096, 0, STEP))
    assert [depth for depth, _ in around.blocks] == list(range(8))


def test_prompts_are_computed_in_order_and_share_a_step() -> None:
    around = Around()
    around.prompt(1, 10_000)
    around.prompt(2, 100, at=0.001)
    around.prompt(3, 3000, at=0.002)
    around.run()
    # 10,000 leaves 240 of its last step to the second; the third begins in it, too.
    assert around.prefilled_at[1] == around.prefilled_at[2] < around.prefilled_at[3]


def by_steps(answers: list[tuple[int, int, float]]) -> dict[int, float]:
    """When each (tokens, output tokens, arrival) has its last token, one step at a time."""
    fixed_s, _, context_s = SPEEDS.decode_coefficients
    fixed_s = SPEEDS.hardware.step_s + max(0.0, fixed_s - SPEEDS.hardware.step_s)
    token_s = SPEEDS.coefficients[1]
    weights_s = fixed_s - SPEEDS.hardware.step_s
    waiting = sorted(range(len(answers)), key=lambda n: answers[n][2])
    active: dict[int, int] = {}  # tokens that are there
    done: dict[int, float] = {}
    now = 0.0
    while waiting or active:
        while waiting and answers[waiting[0]][2] <= now:
            number = waiting.pop(0)
            active[number] = answers[number][0] + 1
        if not active:
            now = answers[waiting[0]][2]
            continue
        arithmetic_s = len(active) * token_s
        now += SPEEDS.hardware.step_s + max(weights_s, arithmetic_s)
        now += context_s * sum(active.values())
        for number in list(active):
            active[number] += 1
            if active[number] == answers[number][0] + answers[number][1]:
                del active[number]
                done[number] = now
    return done


ANSWERS = st.lists(
    st.tuples(st.integers(1, 4000), st.integers(2, 60), st.integers(0, 200).map(lambda n: n / 97)),
    min_size=1,
    max_size=8,
    unique_by=lambda answer: answer[2],  # of two at once the first begins alone
)


@settings(max_examples=40, deadline=None)
@given(ANSWERS)
def test_decoding_in_one_go_is_decoding_step_by_step(
    answers: list[tuple[int, int, float]],
) -> None:
    around = Around()
    for number, (tokens, output_tokens, at) in enumerate(answers):
        around.answer(number, tokens, output_tokens, at)
    around.run()
    assert around.decoded_at == {n: pytest.approx(at) for n, at in by_steps(answers).items()}


def test_answers_wait_for_memory_and_prompts_slow_them_down() -> None:
    alone = Around()
    alone.answer(1, 1000, 100, 0.0)
    alone.run()
    both = Around()
    both.answer(1, 1000, 100, 0.0)
    both.prompt(2, 20_000, at=0.01)
    both.run()
    assert both.decoded_at[1] > 1.5 * alone.decoded_at[1]
    full = Around()
    full.answer(1, 60_000, 50, 0.0)
    full.answer(2, 60_000, 50, 0.0)
    full.run()
    assert full.decoded_at[2] > 1.9 * full.decoded_at[1]


@pytest.mark.parametrize("end", [1536, 2048, 4096])
def test_a_segment_that_came_before_its_predecessor_was_done_computes_only_its_own(
    end: int,
) -> None:
    class Remembering(Around):
        def cached(self, engine: SimulatedEngine, prefill: Prefill) -> int:
            mine = max(0, len(self.blocks) - 1)
            return BLOCK * mine * (prefill.order.request.ident == 1)

    around = Remembering()
    around.prompt(0, 1)  # a step, in which the others come
    around.prompt(1, 9000, at=0.001, end=end)
    around.prompt(1, 9000, at=0.001)
    around.run()
    assert [depth for depth, _ in around.blocks[1:]] == list(range(18))
    started = around.prefilled_at[0]
    steps = -(-end // STEP) + -(-(9000 - end) // STEP)
    whole = service_s(SPEEDS, 9000, 0, STEP)
    assert whole * 0.999 <= around.prefilled_at[1] - started < whole + steps * 0.02

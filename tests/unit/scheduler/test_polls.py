"""Polls that are spared since nothing can come of them: a thorough scheduler gives the same orders."""

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvpool.scheduler.decode import DecodeRule
from kvpool.scheduler.dispatch import Dispatch
from kvpool.scheduler.queue import FIFO, SIZE_AWARE
from kvpool.scheduler.scheduler import Settings
from kvpool.scheduler.values import Role
from tests.unit.scheduler.conftest import Rules

P, D, BOTH = Role.PREFILL, Role.DECODE, Role.BOTH
CLUSTERS = ({"b": BOTH}, {"p": P, "d": D}, {"p": P, "d": D, "e": D})
SIZES = (5, 10, 60, 150, 300)

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.sampled_from(SIZES), st.sampled_from((1, 50, 200))),
        st.tuples(st.just("computed"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("finished"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("abandoned"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("wait"), st.integers(0, 9), st.just(0)),
    ),
    max_size=60,
)


class Thorough(Dispatch):
    """Never says that nothing can come of a look."""

    @property
    def exhausted(self) -> bool:
        return False

    @exhausted.setter
    def exhausted(self, value: bool) -> None:
        pass


class Counted(Dispatch):
    """Counts the looks at waiting requests."""

    looks = 0

    def _consider(self, *found: Any) -> None:
        self.looks += 1
        super()._consider(*found)


def dispatch_of(rules: Rules) -> Any:
    """What looks for requests that can be ordered."""
    return rules.scheduler._dispatch


class Twins:
    """The same happens to both; what one orders the other orders, too."""

    def __init__(self, engines: dict[str, Role], settings: Settings) -> None:
        self.rules = [Rules(engines, settings, capacity=500) for _ in range(2)]
        dispatch_of(self.rules[1]).__class__ = Thorough
        self.now = 0.0
        self.open: list[tuple[str, int]] = []
        self.answering: list[int] = []
        self.known: list[int] = []

    def both(self, work: Callable[[Rules], Any]) -> Any:
        first, second = map(work, self.rules)
        assert first == second
        return first

    def poll(self) -> None:
        for ident, name, how in self.both(lambda rules: rules.poll(self.now)):
            if how != "decode":
                self.open.append((name, ident))
            if how in ("decode", "whole", "follow"):
                self.answering.append(ident)

    def step(self, what: str, number: int, more: int) -> None:
        now = self.now
        if what == "submit":
            tokens = number
            self.known.append(
                self.both(lambda rules: rules.submit(tokens, now, output_tokens=more))
            )
        elif what == "computed" and number < len(self.open):
            name, ident = self.open.pop(number)
            self.both(lambda rules: rules.computed(name, ident, now))
        elif what == "finished" and number < len(self.answering):
            ended = self.answering[number]
            if all(ident != ended for _, ident in self.open):
                del self.answering[number]
                self.both(lambda rules: rules.scheduler.finished(ended))
        elif what == "abandoned" and number < len(self.known):
            gone = self.known.pop(number)
            self.open = [entry for entry in self.open if entry[1] != gone]
            self.answering = [ident for ident in self.answering if ident != gone]
            self.both(lambda rules: rules.scheduler.abandoned(gone, now))
        elif what == "wait":
            self.now += 0.1 * number
        self.poll()


@pytest.mark.parametrize("queue", [FIFO, SIZE_AWARE])
@given(engines=st.sampled_from(CLUSTERS), steps=STEPS)
def test_no_order_is_missed(
    queue: Any, engines: dict[str, Role], steps: list[tuple[str, int, int]]
) -> None:
    twins = Twins(engines, Settings(queue=queue, segment_s=0.5, decode=DecodeRule(ahead=0.5)))
    for step in steps:
        twins.step(*step)


def test_requests_at_the_end_of_the_queue_are_not_looked_at_again_and_again() -> None:
    rules = Rules({"b": BOTH}, Settings(queue=FIFO, segment_s=0.0), capacity=10_000)
    dispatch = dispatch_of(rules)
    dispatch.__class__ = Counted
    for _ in range(100):
        rules.submit(100)
        rules.poll()
    assert 0 < dispatch.looks < 5


def test_who_waited_behind_one_that_left_goes_at_once() -> None:
    rules = Rules({"b": BOTH}, Settings(queue=FIFO, segment_s=0.0), capacity=10_000)
    rules.submit(60)
    large, small = rules.submit(60), rules.submit(5)
    assert rules.poll() == [(1, "b", "whole")]  # the step has no room for the large one
    assert rules.poll() == []
    rules.scheduler.abandoned(large, 0.01)
    assert rules.poll(0.01) == [(small, "b", "whole")]


def test_memory_that_an_answer_leaves_is_for_a_computed_prompt_at_once() -> None:
    settings = Settings(queue=FIFO, segment_s=0.0, decode=DecodeRule(ahead=0.5))
    rules = Rules({"p": P, "d": D}, settings, capacity=500)
    for number, tokens in enumerate((250, 250)):
        ident, now = rules.submit(tokens, output_tokens=50), 3.0 * number
        assert rules.poll(now) == [(ident, "p", "")]
        rules.computed("p", ident, now + 2.5)
        # The second one is computed and finds no memory.
        assert rules.poll(now + 2.5) == ([] if number else [(ident, "d", "decode")])
    running, _ = (rules.submit(60, 6.0, output_tokens=10) for _ in range(2))
    assert rules.poll(6.0) == [(running, "p", "")]
    assert rules.poll(6.0) == []
    rules.scheduler.finished(1)
    assert rules.poll(6.0) == [(2, "d", "decode")]

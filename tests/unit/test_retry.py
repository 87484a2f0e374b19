"""Back-off doubles up to its bound; a breaker opens, tries one request, and never gives up for good."""

import random

import hypothesis.strategies as st
from hypothesis import given

from kvpool.retry import Backoff, Breaker, BreakerRule, BreakerState, backoff_s

RULE = BreakerRule(failures_max=3, backoff_s=1.0, backoff_s_max=30.0)


def test_waits_double_up_to_the_longest() -> None:
    backoff = Backoff(0.1, 1.0)
    assert backoff.due(0.0)
    assert [backoff.failed(5.0) for _ in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert not backoff.due(5.9) and backoff.due(6.0)
    backoff.succeeded()
    assert backoff.due(0.0) and backoff.failed(7.0) == 0.1


def test_a_wait_may_be_stretched_and_any_number_of_failures_has_one() -> None:
    assert Backoff(1.0, 2.0).failed(0.0, stretch=0.5) == 0.5
    assert backoff_s(0.1, 10.0, 1 << 40) == 10.0


def test_failures_in_a_row_open_it_and_then_one_request_tries() -> None:
    breaker = Breaker(RULE)
    for _ in range(5):
        breaker.failed(0.0)
        breaker.failed(0.0)
        breaker.succeeded()
    for _ in range(3):
        assert breaker.allows(1.0)
        breaker.failed(1.0)
    assert not breaker.allows(1.9)
    assert breaker.allows(2.0) and not breaker.allows(2.0)
    breaker.abandoned()
    assert breaker.allows(2.0)
    breaker.failed(2.0)
    assert breaker.retry_at == 4.0 and breaker.opened == 2
    breaker.failed(3.0)  # it was sent before
    assert breaker.retry_at == 4.0 and breaker.allows(4.0)
    breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED


def test_what_fails_for_certain_opens_it_at_once() -> None:
    breaker = Breaker(RULE)
    breaker.failed(0.0, for_certain=True)
    assert breaker.state is BreakerState.OPEN


@given(st.lists(st.tuples(st.sampled_from(["ask", "failed", "succeeded"]), st.floats(0, 10))))
def test_whatever_happens_it_is_tried_again(events: list[tuple[str, float]]) -> None:
    breaker = Breaker(RULE)
    now, asking = 0.0, False
    for event, after_s in events:
        now += after_s
        if event == "ask":
            asking = breaker.allows(now) or asking
        elif event == "failed":
            breaker.failed(now)
        else:
            breaker.succeeded()
        assert breaker.retry_at <= now + RULE.backoff_s_max
    breaker.abandoned()
    assert breaker.allows(max(now, breaker.retry_at))


steps = st.lists(
    st.tuples(st.sampled_from(["ask", "wait"]), st.booleans(), st.integers(1, 40)), max_size=80
)


@given(steps, st.integers(0, 1 << 30))
def test_waits_grow_within_bounds_and_end_by_one_success(
    todo: list[tuple[str, bool, int]], seed: int
) -> None:
    breaker, rng = Breaker(BreakerRule(3, 4.0, 16.0)), random.Random(seed)
    now, failures, openings = 0.0, 0, 0
    for what, works, amount in todo:
        if what == "wait":
            now += amount
            continue
        open_now = now < breaker.retry_at
        assert breaker.allows(now) is not open_now
        if open_now:
            continue
        if openings:
            assert not breaker.allows(now), "only one request tries"
        if works:
            breaker.succeeded()
            failures = openings = 0
            assert breaker.retry_at <= now
            continue
        breaker.failed(now, stretch=rng.uniform(0.5, 1.0))
        failures += 1
        if openings or failures >= 3:
            most = min(4.0 * 2**openings, 16.0)
            openings += 1
            assert most / 2 <= breaker.retry_at - now <= most
        else:
            assert breaker.retry_at <= now


def test_a_late_success_closes_it_and_the_next_failures_open_it_again() -> None:
    breaker = Breaker(BreakerRule(2, 100.0, 100.0))
    for _ in range(2):
        breaker.failed(0.0)
    assert not breaker.allows(1.0)
    breaker.succeeded()  # it was under way before
    assert breaker.allows(2.0)
    for _ in range(2):
        breaker.failed(2.0)
    assert not breaker.allows(3.0)


def test_years_of_failures_are_survived() -> None:
    breaker, now = Breaker(BreakerRule(1, 1.0, 60.0)), 0.0
    for _ in range(5000):
        assert breaker.allows(now)
        breaker.failed(now)
        assert now < breaker.retry_at <= now + 60.0
        now += 60.0


def test_a_note_of_an_attempt_fails_or_succeeds() -> None:
    backoff = Backoff(0.5, 30.0)
    backoff.note(10.0, failed=True)
    assert not backoff.due(10.25) and backoff.due(10.5)
    backoff.note(10.25, failed=False)
    assert backoff.due(10.25)

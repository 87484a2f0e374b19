"""A breaker opens by failed probes and by failures of different requests; only a probe closes it."""

import hypothesis.strategies as st
from hypothesis import given

from kvpool.retry import BreakerRule
from kvpool.router.engines.breaker import EngineBreaker

RULE = BreakerRule(failures_max=3, backoff_s=1.0, backoff_s_max=30.0)


def closed() -> EngineBreaker:
    breaker = EngineBreaker(RULE, 0.0)
    breaker.probed(True, 0.0, 2.0)
    assert breaker.passes and breaker.alive
    return breaker


def opened(now: float = 1.0) -> EngineBreaker:
    """By requests."""
    breaker = closed()
    for request in range(3):
        breaker.failed(request, now)
    assert not breaker.passes
    return breaker


def test_a_new_one_waits_for_its_first_probe_which_is_due() -> None:
    breaker = EngineBreaker(RULE, 5.0)
    assert not breaker.passes and not breaker.alive and breaker.probe_at == 5.0


def test_failures_of_different_requests_open_it_unless_one_succeeds() -> None:
    breaker = closed()
    for request in range(10):
        breaker.failed(2 * request, 1.0)
        breaker.failed(2 * request + 1, 1.0)
        breaker.succeeded()
    assert breaker.passes
    for request in range(3):
        assert breaker.passes
        breaker.failed(request, 1.0)
    assert not breaker.passes and breaker.probe_at == 2.0


def test_a_request_that_is_repeated_does_not_open_it() -> None:
    breaker = closed()
    for _ in range(100):
        breaker.failed("the same", 1.0)
        breaker.failed("another one", 1.0)
    assert breaker.passes


def test_good_probes_do_not_excuse_failed_requests() -> None:
    breaker = closed()
    for request in range(3):
        breaker.probed(True, 1.0, 2.0)
        breaker.failed(request, 1.0)
    assert not breaker.passes


def test_an_engine_whose_requests_fail_is_alive_until_its_probes_fail() -> None:
    breaker = opened()
    assert breaker.alive
    for _ in range(2):
        breaker.probed(False, 1.5, 2.0)
        assert breaker.alive
    breaker.probed(False, 1.5, 2.0)
    assert not breaker.alive


def test_only_a_probe_closes_it_and_not_before_its_pause_is_over() -> None:
    breaker = opened(1.0)
    breaker.succeeded()
    breaker.probed(True, 1.5, 2.0)
    assert not breaker.passes and breaker.probe_at == 2.0
    breaker.probed(True, 2.0, 2.0)
    assert breaker.passes and breaker.probe_at == 4.0
    breaker.failed("one more", 2.5)
    assert breaker.passes, "no request is its trial"


def test_it_is_not_probed_without_end_when_its_pause_is_over() -> None:
    breaker = opened(1.0)
    breaker.probed(False, 5.0, 2.0)
    assert breaker.probe_at == 7.0


def test_probes_that_fail_open_it() -> None:
    breaker = closed()
    breaker.probed(False, 2.0, 2.0)
    breaker.probed(False, 4.0, 2.0)
    assert breaker.passes and breaker.alive and breaker.probe_at == 6.0
    breaker.probed(False, 6.0, 2.0)
    assert not breaker.passes and not breaker.alive and breaker.probe_at == 7.0
    breaker.probed(True, 7.0, 2.0)
    assert breaker.passes and breaker.alive


def test_a_good_probe_begins_the_count_of_probes_anew() -> None:
    breaker = closed()
    for _ in range(5):
        breaker.probed(False, 0.0, 2.0)
        breaker.probed(False, 0.0, 2.0)
        breaker.probed(True, 0.0, 2.0)
    assert breaker.passes


def test_the_backoff_doubles_up_to_its_bound_and_a_success_ends_that() -> None:
    breaker = opened(0.0)
    now, waits = 0.0, []
    for _ in range(3):
        breaker.probed(False, now, 2.0)
    for _ in range(8):
        waits.append(breaker.probe_at - now)
        now = breaker.probe_at
        breaker.probed(False, now, 2.0)
    assert waits == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0]
    now = breaker.probe_at
    breaker.probed(True, now, 2.0)
    breaker.succeeded()
    for request in range(3):
        breaker.failed(request, now)
    assert breaker.probe_at - now == 1.0


def test_who_fails_again_without_a_success_pauses_for_longer() -> None:
    breaker, now, waits = opened(0.0), 0.0, []
    for _ in range(4):
        waits.append(breaker.probe_at - now)
        now = breaker.probe_at
        breaker.probed(True, now, 50.0)
        for request in range(3):
            breaker.failed(request, now)
    assert waits == [1.0, 2.0, 4.0, 8.0]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["failed", "succeeded", "well", "ill"]),
            st.floats(0, 10),
            st.integers(0, 4),
        )
    )
)
def test_whatever_happens_it_is_probed_again_and_then_gets_requests(
    events: list[tuple[str, float, int]],
) -> None:
    breaker = EngineBreaker(RULE, 0.0)
    now = 0.0
    for event, after_s, request in events:
        now += after_s
        passed = breaker.passes
        if event == "failed":
            breaker.failed(request, now)
        elif event == "succeeded":
            breaker.succeeded()
            assert breaker.passes == passed
        else:
            breaker.probed(event == "well", now, 2.0)
        assert breaker.alive or not breaker.passes
        assert breaker.probe_at <= now + RULE.backoff_s_max
    for _ in range(2):
        now = max(now, breaker.probe_at)
        breaker.probed(True, now, 50.0)
    assert breaker.passes


def test_what_was_sent_before_it_opened_tells_nothing() -> None:
    breaker = opened(0.0)
    for request in range(3, 6):
        breaker.failed(request, 0.5)
    assert breaker.probe_at == 1.0


def test_failed_requests_do_not_excuse_failed_probes() -> None:
    breaker = closed()
    for _ in range(3):
        breaker.probed(False, 0.0, 2.0)
        breaker.failed("one", 0.0)
        breaker.succeeded()
    assert not breaker.alive


def test_an_engine_may_be_away_for_a_long_time() -> None:
    breaker = EngineBreaker(RULE, 0.0)
    for _ in range(5000):
        breaker.probed(False, 0.0, 2.0)
    assert breaker.probe_at == 30.0

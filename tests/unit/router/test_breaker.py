"""A breaker opens after failures in a row, tries again later and later, and never gives up."""

import hypothesis.strategies as st
from hypothesis import given

from kvpool.retry import BreakerRule, BreakerState
from kvpool.router.breaker import EngineBreaker

RULE = BreakerRule(failures_max=3, backoff_s=1.0, backoff_s_max=30.0)


def closed() -> EngineBreaker:
    breaker = EngineBreaker(RULE, 0.0)
    breaker.probed(True, 0.0, 2.0)
    assert breaker.state is BreakerState.CLOSED
    return breaker


def test_a_new_one_waits_for_its_first_probe_which_is_due() -> None:
    breaker = EngineBreaker(RULE, 5.0)
    assert not breaker.passes and breaker.probe_at == 5.0


def test_failures_in_a_row_open_it_and_others_do_not() -> None:
    breaker = closed()
    for _ in range(10):
        breaker.failed(1.0)
        breaker.failed(1.0)
        breaker.succeeded()
    assert breaker.passes
    for _ in range(3):
        breaker.failed(1.0)
    assert breaker.state is BreakerState.OPEN and breaker.probe_at == 2.0


def test_good_probes_do_not_excuse_failed_requests() -> None:
    breaker = closed()
    for _ in range(3):
        breaker.failed(1.0)
        breaker.probed(True, 1.0, 2.0)
    # The third failure opened it, and the probe after it only half opens.
    assert breaker.state is BreakerState.HALF_OPEN


def test_half_open_one_failure_is_enough_and_one_success_too() -> None:
    for good, state in ((True, BreakerState.CLOSED), (False, BreakerState.OPEN)):
        breaker = closed()
        for _ in range(3):
            breaker.failed(0.0)
        breaker.probed(True, 1.0, 2.0)
        assert breaker.passes
        if good:
            breaker.succeeded()
        else:
            breaker.failed(2.0)
        assert breaker.state is state


def test_probes_that_fail_open_it() -> None:
    breaker = closed()
    breaker.probed(False, 2.0, 2.0)
    breaker.probed(False, 4.0, 2.0)
    assert breaker.passes and breaker.probe_at == 6.0
    breaker.probed(False, 6.0, 2.0)
    assert not breaker.passes and breaker.probe_at == 7.0


def test_a_good_probe_begins_the_count_of_probes_anew() -> None:
    breaker = closed()
    for _ in range(5):
        breaker.probed(False, 0.0, 2.0)
        breaker.probed(False, 0.0, 2.0)
        breaker.probed(True, 0.0, 2.0)
    assert breaker.state is BreakerState.CLOSED


def test_the_backoff_doubles_up_to_its_bound_and_a_success_ends_that() -> None:
    breaker = closed()
    now = 0.0
    waits = []
    for _ in range(3):
        breaker.failed(now)
    for _ in range(8):
        waits.append(breaker.probe_at - now)
        now = breaker.probe_at
        breaker.probed(False, now, 2.0)
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    breaker.probed(True, now, 2.0)
    breaker.succeeded()
    for _ in range(3):
        breaker.failed(now)
    assert breaker.probe_at - now == 1.0


@given(
    st.lists(st.tuples(st.sampled_from(["failed", "succeeded", "well", "ill"]), st.floats(0, 10)))
)
def test_whatever_happens_it_is_probed_again_and_then_gets_requests(
    events: list[tuple[str, float]],
) -> None:
    breaker = EngineBreaker(RULE, 0.0)
    now = 0.0
    for event, after_s in events:
        now += after_s
        before = breaker.state
        if event == "failed":
            breaker.failed(now)
            assert before is not BreakerState.HALF_OPEN or breaker.state is BreakerState.OPEN
        elif event == "succeeded":
            breaker.succeeded()
            # Only a probe ends what is open.
            assert (before is BreakerState.OPEN) == (breaker.state is BreakerState.OPEN)
        else:
            breaker.probed(event == "well", now, 2.0)
        assert breaker.probe_at <= now + RULE.backoff_s_max
    breaker.probed(True, max(now, breaker.probe_at), 2.0)
    assert breaker.passes


def test_what_was_sent_before_it_opened_tells_nothing() -> None:
    breaker = closed()
    for _ in range(3):
        breaker.failed(0.0)
    breaker.failed(0.5)
    assert breaker.probe_at == 1.0


def test_half_open_a_failed_request_doubles_the_backoff_too() -> None:
    breaker = closed()
    now, waits = 0.0, []
    for _ in range(3):
        breaker.failed(now)
    for _ in range(4):
        waits.append(breaker.probe_at - now)
        now = breaker.probe_at
        breaker.probed(True, now, 2.0)
        breaker.failed(now)
    assert waits == [1.0, 2.0, 4.0, 8.0]


def test_failed_requests_do_not_excuse_failed_probes() -> None:
    breaker = closed()
    for _ in range(3):
        breaker.probed(False, 0.0, 2.0)
        breaker.failed(0.0)
        breaker.succeeded()
    assert not breaker.passes


def test_an_engine_may_be_away_for_a_long_time() -> None:
    breaker = EngineBreaker(RULE, 0.0)
    for _ in range(5000):
        breaker.probed(False, 0.0, 2.0)
    assert breaker.probe_at == 30.0

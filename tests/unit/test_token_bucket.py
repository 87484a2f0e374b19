"""Token buckets: rates, bursts, debts, and clocks that go back."""

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvpool.token_bucket import TokenBucket


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 3)), min_size=1, max_size=40),
    st.floats(10, 1e4),
    st.floats(1, 1e4),
)
def test_who_waits_as_told_never_exceeds_the_bucket(
    sends: list[tuple[int, float]], rate: float, burst: float
) -> None:
    bucket = TokenBucket(rate, burst, -math.inf)
    now = 100.0
    sent: list[tuple[float, int]] = []
    for nbytes, idle_s in sends:
        now += idle_s
        now += bucket.take(nbytes, now)
        sent.append((now, nbytes))
    # In no stretch of time is there more than a burst and what the rate allows. What is sent at the
    # beginning of a stretch was paid for before it.
    for i in range(len(sent)):
        for j in range(i, len(sent)):
            total = sum(nbytes for _, nbytes in sent[i + 1 : j + 1])
            assert total <= burst + rate * (sent[j][0] - sent[i][0]) + 1e-3


def test_after_a_pause_a_burst_goes_at_once_and_no_more() -> None:
    bucket = TokenBucket(1000, 500, -math.inf)
    assert bucket.take(500, 0.0) == 0.0
    assert bucket.take(100, 0.0) == pytest.approx(0.1)
    assert bucket.take(0, 1000.0) == 0.0
    assert bucket.take(500, 1000.0) == 0.0
    assert bucket.take(2000, 1000.0) == pytest.approx(2.0)


def test_a_clock_that_goes_back_earns_nothing() -> None:
    bucket = TokenBucket(1000, 500, -math.inf)
    bucket.take(500, 10.0)
    assert bucket.take(0, 5.0) == 0.0
    assert bucket.take(500, 10.0) == pytest.approx(0.5)


def test_a_debt_has_a_limit() -> None:
    bucket = TokenBucket(2, 10, 0.0, debt=4)
    assert bucket.take(1000, 0.0) == 2.0
    assert bucket.left(0.0) == -4
    assert bucket.wait_s(1, 0.0) == 2.5
    assert bucket.wait_s(1, 2.5) == 0.0
    assert bucket.left(100.0) == 10

"""The order of what waits, against sorting, and that nobody starves."""

import math
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvpool.errors import ConfigError
from kvpool.scheduler.queue import FIFO, SIZE_AWARE, QueueRule, RequestQueue, Waiting
from kvpool.scheduler.values import Request

SIZES = st.floats(0.01, 50.0)
ITEMS = st.lists(st.tuples(SIZES, st.floats(0.0, 100.0), st.integers(0, 2)), max_size=30)


def waiting(ident: int, size_s: float, arrived_s: float = 0.0, priority: int = 0) -> Waiting:
    return Waiting(Request(ident, (), 1, 1, arrived_s, priority=priority), size_s)


@given(ITEMS, st.lists(st.integers(0, 29), max_size=10))
def test_order_is_that_of_sorting(
    items: list[tuple[float, float, int]], removed: list[int]
) -> None:
    rule = QueueRule(knee_s=5.0, aging=0.2, begun=0.5)
    queue = RequestQueue(rule)
    for ident, (size_s, arrived_s, priority) in enumerate(items):
        queue.add(waiting(ident, size_s, arrived_s, priority))
    for ident in removed:
        queue.remove(ident)
    left = [number for number in range(len(items)) if number not in removed]
    left.sort(
        key=lambda n: (-items[n][2], 5.0 * math.log(1 + items[n][0] / 5.0) + 0.2 * items[n][1])
    )
    assert [item.request.ident for item in queue.first(100)] == left
    assert len(queue) == len(left)
    asked = Request(99, (), 1, 1, 0.0)
    assert queue.waiting_s(asked) == pytest.approx(sum(items[n][0] for n in left))


@given(st.lists(SIZES, min_size=1, max_size=20))
def test_fifo_is_by_arrival(sizes: list[float]) -> None:
    queue = RequestQueue(FIFO)
    for ident, size_s in enumerate(sizes):
        queue.add(waiting(ident, size_s, float(ident)))
    assert [item.request.ident for item in queue.first(100)] == list(range(len(sizes)))


@given(SIZES, SIZES, st.booleans())
def test_nobody_is_overtaken_for_long(large: float, small: float, begun: bool) -> None:
    rule = SIZE_AWARE
    # A second of size costs a few tens of seconds at most, however large a prompt is.
    limit_s = math.log(1 + large) / 0.05
    assert limit_s <= 20 * large
    first = rule.key(large, 0.0, begun=False)
    later = rule.key(small, limit_s + 0.001, begun=begun)
    assert first < later


def test_the_shorter_goes_first_and_what_was_begun_before_its_equals() -> None:
    queue = RequestQueue(SIZE_AWARE)
    queue.add(waiting(1, 2.0))
    queue.add(waiting(2, 0.5))
    begun = waiting(3, 1.0)
    begun.done = 512
    queue.add(begun)
    assert [item.request.ident for item in queue.first(3)] == [3, 2, 1]


def test_what_goes_ahead_is_counted() -> None:
    queue = RequestQueue(SIZE_AWARE)
    for ident, size_s in enumerate((0.5, 1.0, 2.0)):
        queue.add(waiting(ident, size_s))
    assert queue.ahead_s(1.5, Request(9, (), 1, 1, 0.0)) == 1.5
    assert queue.ahead_s(1.5, Request(9, (), 1, 1, 0.0, priority=1)) == 0.0


KINDS = st.sampled_from([None, "k", "l", "kl"])
NAMES = st.sampled_from([None, "1", "12"])


@given(st.lists(st.tuples(SIZES, KINDS, NAMES, st.sampled_from("ab")), max_size=30))
def test_what_others_serve_is_not_in_the_way(
    items: list[tuple[float, str | None, str | None, str]],
) -> None:
    queue = RequestQueue(SIZE_AWARE)
    requests = []
    for ident, (size_s, kinds, names, tenant) in enumerate(items):
        request = Request(
            ident,
            (),
            1,
            1,
            0.0,
            tenant=tenant,
            kinds=None if kinds is None else frozenset(kinds),
            engines=None if names is None else frozenset(names),
        )
        requests.append(request)
        queue.add(Waiting(request, size_s))
    expected, counts = [], Counter[tuple[str | None, str | None]]()
    for ident in sorted(range(len(items)), key=lambda n: (math.log1p(items[n][0]), n)):
        counts[items[ident][1:3]] += 1
        if counts[items[ident][1:3]] <= 2:
            expected.append(ident)
    assert [item.request.ident for item in queue.first(2)] == expected
    asked = Request(99, (), 1, 1, 0.0, kinds=frozenset("k"), engines=frozenset("2"))
    met = [n for n in range(len(items)) if items[n][1] != "l" and items[n][2] != "1"]
    assert queue.waiting_s(asked) == pytest.approx(sum(items[n][0] for n in met))
    ahead_s = sum(items[n][0] for n in met if items[n][0] <= 9.0)
    assert queue.ahead_s(9.0, asked) == pytest.approx(ahead_s)


@pytest.mark.parametrize("wrong", [(-1, 0.1, 0.5), (1, 0, 0.5), (1, 0.1, 1.5)])
def test_wrong_rules_are_refused(wrong: tuple[float, float, float]) -> None:
    with pytest.raises(ConfigError):
        QueueRule(*wrong)

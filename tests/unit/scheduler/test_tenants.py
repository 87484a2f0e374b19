"""Tenants share the engines by their weights, nobody starves, and one alone notices nothing."""

from collections import Counter, defaultdict
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvpool.errors import ConfigError
from kvpool.scheduler.queue import FIFO, SIZE_AWARE, RequestQueue, Waiting
from kvpool.scheduler.tenants import Charges, TenantRule
from kvpool.scheduler.values import Request
from tests.support.memory import longest


def waiting(ident: int, tenant: str, size_s: float = 1.0, arrived_s: float = 0.0) -> Waiting:
    return Waiting(Request(ident, (), 1, 1, arrived_s, tenant=tenant), size_s)


def served(queue: RequestQueue, seconds: float, now: float = 0.0) -> Counter[str]:
    """Seconds of each tenant, when one engine does what is first, one after the other."""
    found: Counter[str] = Counter()
    while seconds > 0 and len(queue):
        item = next(queue.first(1))
        queue.remove(item.request.ident)
        tenant = item.request.tenant
        queue.charge(tenant, item.size_s, now)
        found[tenant] += round(item.size_s)
        now, seconds = now + item.size_s, seconds - item.size_s
    return found


def test_tenants_share_by_their_weights() -> None:
    rule = TenantRule({"b": 3.0}, window_s=60.0, slack_s=0.1)
    queue = RequestQueue(FIFO, rule)
    for ident in range(600):
        queue.add(waiting(ident, "abc"[ident // 200]))  # all of a come first
    found = served(queue, 200.0)
    assert found["b"] / found["a"] == pytest.approx(3.0, rel=0.15)
    assert found["c"] / found["a"] == pytest.approx(1.0, rel=0.15)


def test_who_comes_late_does_not_wait_for_a_flood_of_another() -> None:
    queue = RequestQueue(FIFO, TenantRule(slack_s=2.0))
    for ident in range(100):
        queue.add(waiting(ident, "flood"))
    assert served(queue, 50.0) == {"flood": 50}
    queue.add(waiting(1000, "late", arrived_s=50.0))
    assert served(queue, 6.0, 50.0)["late"] == 1


def test_what_nobody_else_wanted_is_not_held_against_a_tenant() -> None:
    queue = RequestQueue(FIFO, TenantRule(slack_s=2.0))
    for ident in range(100):
        queue.add(waiting(ident, "first"))
    served(queue, 80.0)
    for ident in range(100, 200):
        queue.add(waiting(ident, "second", arrived_s=80.0))
    assert served(queue, 20.0, 80.0)["first"] >= 9


def test_within_their_shares_the_order_is_that_of_the_rule() -> None:
    queue = RequestQueue(SIZE_AWARE, TenantRule(slack_s=5.0))
    for ident, (tenant, size_s) in enumerate((("a", 2.0), ("b", 1.0), ("a", 0.5), ("b", 3.0))):
        queue.add(waiting(ident, tenant, size_s))
    queue.charge("a", 4.0, 0.0)
    assert [item.request.ident for item in queue.first(4)] == [2, 1, 0, 3]
    queue.charge("a", 8.0, 0.0)  # 6 seconds above the mean
    assert [item.request.ident for item in queue.first(4)] == [1, 3, 2, 0]
    assert queue.ahead_s(0.1, Request(9, (), 1, 1, 0.0, tenant="a")) == 4.0
    assert queue.ahead_s(2.0, Request(9, (), 1, 1, 0.0, tenant="b")) == 1.0


ITEMS = st.lists(
    st.tuples(st.floats(0.01, 30.0), st.floats(0.0, 50.0), st.integers(0, 2)), max_size=25
)


@given(ITEMS)
def test_with_one_tenant_nothing_changes(items: list[tuple[float, float, int]]) -> None:
    queues = RequestQueue(SIZE_AWARE), RequestQueue(SIZE_AWARE, TenantRule(slack_s=0.0))
    orders = []
    for queue, tenant in zip(queues, ("", "a"), strict=True):
        for ident, (size_s, arrived_s, priority) in enumerate(items):
            request = Request(ident, (), 1, 1, arrived_s, priority=priority, tenant=tenant)
            queue.add(Waiting(request, size_s))
        order = []
        while len(queue):
            item = next(queue.first(1))
            queue.remove(item.request.ident)
            queue.charge(tenant, item.size_s, 0.0)
            order.append(item.request.ident)
        orders.append(order)
    assert orders[0] == orders[1]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.1, 20.0)), min_size=1, max_size=60),
    st.floats(0.01, 3.0),
    st.floats(5.0, 60.0),
)
def test_nobody_stays_behind_for_longer_than_others_take_to_catch_up(
    past: list[tuple[str, float]], slack_s: float, window_s: float
) -> None:
    """Against sums that are kept whole: what each used, each second worth less by the time since."""
    charges = Charges(TenantRule(slack_s=slack_s, window_s=window_s))
    now = 0.0
    used: dict[str, float] = defaultdict(float)
    for tenant, seconds in past:
        now += seconds
        for name in used:
            used[name] *= 2.718281828459045 ** (-seconds / window_s)
        used[tenant] += seconds
        charges.add(tenant, seconds, now)
    behind = charges.behind("abc")
    mean = sum(used.values()) / 3
    for name in "abc":
        assert charges.used_s(name) == pytest.approx(used[name], rel=1e-6, abs=1e-9)
        if abs(used[name] - mean - slack_s) > 1e-6:
            assert (name in behind) == (used[name] > mean + slack_s)
    # Whoever is behind is so no more when those before it have had as much.
    for name in behind:
        for other in set("abc") - {name}:
            charges.add(other, max(0.0, charges.used_s(name) - charges.used_s(other)), now)
        assert name not in charges.behind("abc")


def test_a_long_silence_is_no_trouble() -> None:
    charges = Charges(TenantRule(window_s=1.0))
    charges.add("a", 5.0, 0.0)
    charges.add("b", 5.0, 1e7)
    assert charges.used_s("a") == 0.0
    assert charges.used_s("b") == 5.0


def test_tenants_that_are_gone_are_forgotten() -> None:
    charges = Charges(TenantRule(window_s=1.0))
    for number in range(5000):
        charges.add(f"{number}", 1.0, float(number))
    assert longest(charges) <= 1024


def test_order_is_that_of_sorting_with_tenants() -> None:
    rng = Random(3)
    queue = RequestQueue(FIFO)
    items = [waiting(n, rng.choice("abcd"), rng.random(), rng.random()) for n in range(200)]
    for item in items:
        queue.add(item)
    for item in items[::3]:
        queue.remove(item.request.ident)
    left = [item for number, item in enumerate(items) if number % 3]
    left.sort(key=lambda item: item.request.arrived_s)
    assert list(queue.first(1000)) == left
    assert queue.count("a") == sum(item.request.tenant == "a" for item in left)


@pytest.mark.parametrize("wrong", [{"weights": {"a": 0.0}}, {"window_s": 0.0}, {"slack_s": -1.0}])
def test_wrong_rules_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        TenantRule(**wrong)

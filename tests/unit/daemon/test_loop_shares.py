"""How the event loop's time is divided among tenants."""

from __future__ import annotations

import random
from copy import deepcopy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.daemon.server.loop_shares import BURST_S, DEBT_S_MAX, OPERATORS, RECENT_S, LoopShares

EVERY_S = 0.05  # between two requests of a tenant that is not greedy


class Loop:
    """An event loop in virtual time: requests take so long, and of greedy tenants there is always another one."""

    def __init__(
        self, costs: dict[str, float], greedy: set[str], modest: set[str], seed: int
    ) -> None:
        self.now = 100.0
        self.shares = LoopShares(list(costs))
        self.spent = dict.fromkeys(costs, 0.0)
        self.longest_s = 0.0  # that a modest tenant's request waited
        self._costs = costs
        self._greedy = sorted(greedy)
        self._dice = random.Random(seed)
        self._came = dict.fromkeys(sorted(modest), 100.0)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            here = [*self._greedy, *(name for name, at in self._came.items() if at <= self.now)]
            ready = [name for name in here if not self.shares.wait_s(name, self.now)]
            if not ready:
                self.now += 1e-4
                continue
            name = self._dice.choice(ready)
            if name in self._came:
                self.longest_s = max(self.longest_s, self.now - self._came[name])
                self._came[name] = self.now + EVERY_S
            self.now += self._costs[name]
            self.spent[name] += self._costs[name]
            self.shares.used(name, self.now, self._costs[name])


def test_a_tenant_that_is_alone_waits_for_nobody() -> None:
    loop = Loop({"a": 1e-3, "b": 1e-3}, {"a"}, set(), 1)
    loop.run(2.0)
    assert loop.spent["a"] == pytest.approx(2.0, rel=0.01)


@settings(max_examples=25)
@given(st.integers(2, 5), st.sampled_from([2e-4, 3e-2, 6e-2, 0.11, 0.2]), st.integers(0, 100))
def test_a_flood_leaves_time_for_the_others(tenants: int, cost: float, seed: int) -> None:
    """However much of it is in one piece: that was on the loop and could not be cut."""
    names = [f"t{number}" for number in range(tenants)]
    costs = dict.fromkeys(names, 2e-4) | {names[0]: cost}
    loop = Loop(costs, {names[0]}, set(names[1:]), seed)
    loop.run(4.0)
    share = 0.5 + 0.5 / tenants
    assert loop.spent[names[0]] <= 4.0 * share + BURST_S + 2 * cost
    assert all(loop.spent[name] >= 4.0 / (EVERY_S + 5 * cost + 0.01) * 2e-4 for name in names[1:])


def test_two_floods_get_the_same() -> None:
    loop = Loop({"a": 5e-4, "b": 1e-4}, {"a", "b"}, set(), 3)
    loop.run(4.0)
    assert loop.spent["a"] <= 4.0 * 0.75 + 0.1
    assert loop.spent["b"] >= 4.0 * 0.2


def test_what_was_used_alone_is_not_held_against_a_tenant() -> None:
    shares, now = LoopShares("ab"), 5.0
    for _ in range(1000):
        assert shares.wait_s("a", now) == 0.0
        now += 0.01
        shares.used("a", now, 0.01)
    assert shares.wait_s("b", now) == 0.0
    assert shares.wait_s("a", now) <= 0.02


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 0.2), st.floats(0, 9.0)), max_size=60)
)
def test_waits_end(steps: list[tuple[str, float, float]]) -> None:
    shares, now = LoopShares("ab"), 5.0
    for tenant, pause, seconds in steps:
        now += pause
        shares.used(tenant, now, seconds)
        for each in "ab":
            wait = shares.wait_s(each, now)
            assert 0.0 <= wait <= DEBT_S_MAX / 0.75 + 1e-9
            later = deepcopy(shares)
            assert later.wait_s(each, now + wait + 1e-6) == 0.0
    assert shares.wait_s("a", now + RECENT_S + 1.0) == 0.0


def test_what_is_done_for_several_is_held_against_each_by_its_requests() -> None:
    together, apart = LoopShares("ab"), LoopShares("ab")
    together.used_together({"a": 3, "b": 1, OPERATORS: 4}, 5.0, 0.8)
    apart.used("a", 5.0, 0.3)
    apart.used("b", 5.0, 0.1)
    for shares in (together, apart):
        shares.asks(OPERATORS, 5.0)
    for tenant in "ab":
        assert together.wait_s(tenant, 5.0) == pytest.approx(apart.wait_s(tenant, 5.0))
    together.used_together({}, 5.0, 1.0)
    together.used(OPERATORS, 5.0, 9.0)
    assert together.wait_s(OPERATORS, 5.0) == 0.0

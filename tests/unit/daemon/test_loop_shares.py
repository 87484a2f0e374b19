"""How the event loop's time is divided among tenants."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.daemon.core.loop_shares import WINDOW_S, LoopShares


class Loop:
    """An event loop in virtual time: each tenant's requests take so long, and as many wait as it likes."""

    def __init__(self, costs: dict[str, float], greedy: set[str], seed: int) -> None:
        self.now = 100.0
        self.shares = LoopShares(list(costs))
        self.spent = dict.fromkeys(costs, 0.0)
        self.longest_s = dict.fromkeys(costs, 0.0)
        self._costs = costs
        self._greedy = greedy
        self._dice = random.Random(seed)
        self._came = dict.fromkeys(set(costs) - greedy, 100.0)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            ready = [name for name in self._greedy if not self.shares.wait_s(name, self.now)]
            ready += [name for name, at in self._came.items() if at <= self.now]
            ready = [name for name in ready if not self.shares.wait_s(name, self.now)]
            if not ready:
                self.now += 1e-4
                continue
            name = self._dice.choice(ready)
            if name in self._came:
                self.longest_s[name] = max(self.longest_s[name], self.now - self._came[name])
                self._came[name] = self.now + 0.01  # a request each hundredth of a second
            cost = self._costs[name]
            self.now += cost
            self.spent[name] += cost
            self.shares.used(name, self.now, cost)


def test_a_tenant_that_is_alone_waits_for_nobody() -> None:
    loop = Loop({"a": 1e-3, "b": 1e-3}, {"a"}, 1)
    loop._came.clear()
    loop.run(2.0)
    assert loop.spent["a"] == pytest.approx(2.0, rel=0.01)


@given(st.integers(2, 5), st.integers(0, 100))
def test_a_flood_leaves_time_for_the_others(tenants: int, seed: int) -> None:
    names = [f"t{number}" for number in range(tenants)]
    loop = Loop(dict.fromkeys(names, 2e-4), {names[0]}, seed)
    loop.run(2.0)
    share = 0.5 + 0.5 / tenants
    assert loop.spent[names[0]] <= 2.0 * share + 0.1
    for name in names[1:]:
        assert loop.spent[name] > 0.01, "each gets what it asks for"


def test_two_floods_get_the_same() -> None:
    loop = Loop({"a": 5e-4, "b": 1e-4}, {"a", "b"}, 3)
    loop.run(4.0)
    assert loop.spent["a"] <= 4.0 * 0.75 + 0.1
    assert loop.spent["b"] >= 4.0 * 0.2


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 0.2), st.floats(0, 0.1)), max_size=60)
)
def test_waits_end_with_the_window(steps: list[tuple[str, float, float]]) -> None:
    shares, now = LoopShares("ab"), 5.0
    for tenant, pause, seconds in steps:
        now += pause
        shares.used(tenant, now, seconds)
        for each in "ab":
            wait = shares.wait_s(each, now)
            assert 0.0 <= wait <= WINDOW_S
            later = LoopShares("ab")
            later.__dict__.update(shares.__dict__)  # a look ahead turns the window
            assert later.wait_s(each, now + wait + 1e-9) == 0.0 or wait == 0.0

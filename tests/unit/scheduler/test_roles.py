"""Engines change sides after the load: by the rule worked out by hand, and in the long run."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvpool.errors import ConfigError
from kvpool.scheduler.queue import FIFO
from kvpool.scheduler.roles import Loads, RoleRule, Smoothed, role_change
from kvpool.scheduler.scheduler import Settings
from kvpool.scheduler.values import Engine, Order, Role

Make = Callable[..., Any]
P, D, BOTH = Role.PREFILL, Role.DECODE, Role.BOTH
RULE = RoleRule(gain=0.15, busy=0.5)


def engines(prefill: int, decode: int, flexible: bool = True) -> list[Engine]:
    roles = [P] * prefill + [D] * decode
    return [
        Engine(
            f"{n}",
            f"{n}",
            role,
            "k",
            "",
            (),
            1000,
            flexible=flexible,
            free_at=10.0 - n,
            context_tokens=n,
        )
        for n, role in enumerate(roles)
    ]


@pytest.mark.parametrize(
    ("prefill", "decode", "loads", "to"),
    [
        (4, 4, Loads(0.2, 0.9), D),  # 0.27 and 0.72
        (4, 4, Loads(0.9, 0.2), P),
        (4, 4, Loads(0.6, 0.9), None),  # 0.8 and 0.72: gains too little
        (4, 4, Loads(0.1, 0.45), None),  # nobody is busy
        (1, 4, Loads(0.1, 0.9), None),  # the last one stays
        (2, 4, Loads(0.1, 0.9), D),
        (2, 1, Loads(1.5, 0.1), None),
    ],
)
def test_the_larger_load_must_fall_clearly(
    prefill: int, decode: int, loads: Loads, to: Role | None
) -> None:
    found = role_change(engines(prefill, decode), loads, RULE)
    assert (found.role if found is not None else None) is to


def test_the_one_whose_work_ends_soonest() -> None:
    found = role_change(engines(3, 3), Loads(0.1, 0.9), RULE)
    assert found is not None
    assert found.engine.name == "2"
    found = role_change(engines(3, 3), Loads(0.9, 0.1), RULE)
    assert found is not None
    assert found.engine.name == "3"


def test_only_who_may_change_does() -> None:
    assert role_change(engines(4, 4, flexible=False), Loads(0.1, 0.9), RULE) is None
    some = engines(4, 4)
    some[3].flexible = False
    some[2].role = BOTH
    found = role_change(some, Loads(0.1, 0.9), RULE)
    assert found is not None
    assert found.engine.name == "1"


@given(st.integers(1, 8), st.integers(1, 8), st.floats(0, 3), st.floats(0, 3))
def test_a_change_helps_and_is_not_taken_back(
    p: int, d: int, prefill: float, decode: float
) -> None:
    some = engines(p, d)
    found = role_change(some, Loads(prefill, decode), RULE)
    if found is None:
        return
    work, kept = prefill * p, decode * d
    p, d = (p - 1, d + 1) if found.role is D else (p + 1, d - 1)
    assert min(p, d) >= 1
    after = Loads(work / p, kept / d)
    assert max(after) <= max(prefill, decode) * (1 - RULE.gain) * (1 + 1e-9)
    found.engine.role = found.role
    back = role_change(some, after, RULE)
    assert back is None or back.role is found.role


def test_a_value_is_smoothed() -> None:
    value = Smoothed(10.0)
    assert value.sample(1.0, 5.0) == 1.0
    assert value.sample(0.0, 15.0) == pytest.approx(0.3679, abs=1e-4)


def drive(rules: Any, seconds: int, tokens: int, output_tokens: int, every_s: float) -> list[Any]:
    """A stream of requests, each computed and decoded as its estimates say; the changes on the way."""
    changes, ends = [], vars(rules).setdefault("ends", [])
    start = rules.now = getattr(rules, "now", 0.0)
    due = start
    while rules.now < start + seconds:
        rules.now += 0.1
        now = rules.now
        while due <= now:
            rules.submit(tokens, now, output_tokens=output_tokens)
            due += every_s
        for order in rules.scheduler.poll(now):
            ident = order.request.ident
            if isinstance(order, Order):
                engine = order.estimate.engine
                ends.append((engine.free_at, "computed", engine, ident))
            else:
                ends.append((now + order.request.output_tokens * 0.02, "finished", None, ident))
        for end in sorted((e for e in ends if e[0] <= now), key=lambda e: e[0]):
            ends.remove(end)
            if end[1] == "computed":
                rules.scheduler.computed(end[2], end[3], now)
            else:
                rules.scheduler.finished(end[3])
        change = rules.scheduler.rebalance(now)
        if change is not None:
            changes.append((now, change))
    return changes


def test_the_ratio_follows_the_load_and_settles(make: Make) -> None:
    rule = RoleRule(dwell_s=20.0, smooth_s=5.0)
    settings = replace(Settings(queue=FIFO, segment_s=0.0), roles=rule)
    roles = {"a": P, "b": P, "c": P, "d": D, "e": D, "f": D}
    rules = make(roles, settings, capacity=8000, flexible=True)

    def counts() -> tuple[int, int]:
        sides = [engine.role for engine in rules.engines.values()]
        return sides.count(P), sides.count(D)

    # 0.5 s to compute, 20 s to decode, 1.6 a second: that asks for 0.8 engines, and for the memory of 4.2.
    long_answers = drive(rules, 150, 50, 1000, 0.625)
    assert [change.role for _, change in long_answers] == [D, D]
    assert counts() == (1, 5)
    # 4 s to compute, and hardly anything to decode: each second asks for 4 engines.
    long_prompts = drive(rules, 250, 400, 5, 1.0)
    assert {change.role for _, change in long_prompts} == {P}
    assert counts() == (5, 1)
    times = [at for at, _ in (*long_answers, *long_prompts)]
    assert all(later - at >= rule.dwell_s for at, later in pairwise(times))
    assert times[0] >= rule.dwell_s


def test_how_many_engines_a_load_requires(make: Make) -> None:
    """Whether there are as many or not."""
    rule = RoleRule(smooth_s=20.0)
    settings = replace(Settings(queue=FIFO, segment_s=0.0), roles=rule)
    for engines in (
        {"a": P, "b": D, "c": D},
        {name: P if name in "abcde" else D for name in "abcdefghi"},
    ):
        rules = make(engines, settings, capacity=8000)
        # 0.5 s to compute, and 20 s to decode with 1,050 tokens, 0.4 a second.
        drive(rules, 200, 50, 1000, 2.5)
        (found,) = rules.scheduler.balance.required(rules.now).values()
        assert found.prefill == pytest.approx(0.2, rel=0.1)
        assert 8 * 1050 / 8000 <= found.decode <= 9 * 1050 / 8000


def test_what_waits_requires_engines_too(make: Make) -> None:
    rule = RoleRule(smooth_s=20.0)
    rules = make({"a": P, "b": D}, replace(Settings(queue=FIFO, segment_s=0.0), roles=rule))
    for _ in range(40):
        rules.submit(100, 0.0)
    rules.scheduler.poll(0.0)
    (before,) = rules.scheduler.balance.required(0.0).values()
    (later,) = rules.scheduler.balance.required(1000.0).values()
    # 40 s of work that arrived within 20 s, of which most waits; in the end only what waits counts.
    assert before.prefill == pytest.approx(4.0, rel=0.1)
    assert later.prefill == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize("wrong", [{"gain": 0.0}, {"gain": 1.0}, {"smooth_s": 0.0}, {"busy": -1}])
def test_wrong_rules_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        RoleRule(**wrong)

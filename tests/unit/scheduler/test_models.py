"""Several models behind one scheduler: one's queue is not another's, and adapters are on some engines only."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvpool.scheduler.decode import DecodeRule
from kvpool.scheduler.queue import FIFO
from kvpool.scheduler.scheduler import Settings
from kvpool.scheduler.values import Among, Role

Make = Callable[..., Any]
P, D, BOTH = Role.PREFILL, Role.DECODE, Role.BOTH
PLAIN = Settings(queue=FIFO, segment_s=0.0)
K, L = frozenset("k"), frozenset("l")


def two(make: Make, settings: Settings = PLAIN) -> Any:
    """p and d of one kind, r and s of another."""
    rules = make({"p": P, "d": D}, settings)
    for name, role in (("r", P), ("s", D)):
        engine = rules.engine(name, role, kind="l")
        rules.engines[name] = engine
        rules.scheduler.join(engine, 0.0)
    return rules


@pytest.mark.parametrize("tenant", ["", "other"])
def test_a_long_queue_is_no_other_models(make: Make, tenant: str) -> None:
    rules = two(make)
    first = rules.submit(kinds=K)
    for _ in range(40):
        rules.submit(kinds=K)
    other = rules.submit(kinds=L, tenant=tenant)
    assert sorted(rules.poll()) == [(first, "p", ""), (other, "r", "")]


def test_who_is_parked_is_not_in_another_models_way(make: Make) -> None:
    rules = two(make, replace(PLAIN, decode=DecodeRule(1.0), look_ahead=1))
    running, large = rules.submit(600, kinds=K), rules.submit(500, kinds=K)
    rules.poll()
    rules.computed("p", running, 6.0)
    other = rules.submit(100, 6.0, kinds=L)
    assert (running, "d", "decode") in rules.poll(6.0)
    rules.computed("p", large, 11.0)
    rules.computed("r", other, 11.0)
    assert rules.poll(11.0) == [(other, "s", "decode")]


def test_nobody_is_refused_for_another_models_queue(make: Make) -> None:
    rules = two(make, replace(PLAIN, queue_max=6))
    for _ in range(6):
        rules.submit(300, kinds=K)
    rules.scheduler.poll(0.0)
    rules.submit(100, kinds=L, deadline_s=1.5)
    found = rules.scheduler.submit(rules.request(100, kinds=L), 0.0)
    assert (found.code, found.retry_after_s) == ("queue_full", pytest.approx(1.0))
    found = rules.scheduler.submit(rules.request(100, kinds=K), 0.0)
    assert (found.code, found.retry_after_s) == ("queue_full", pytest.approx(15.0))


def test_only_those_that_are_named_serve_it(make: Make) -> None:
    rules = make({"a": BOTH, "b": BOTH, "c": BOTH})
    named = {"kinds": K, "engines": frozenset("b")}
    found = []
    for _ in range(5):
        rules.submit(**named)
    for now in range(5):
        found += rules.poll(float(now))
        rules.computed("b", now + 1, now + 1.0)
    assert [name for _, name, _ in found] == ["b"] * 5
    assert rules.poll(5.0) == []
    assert rules.submit(now=5.0, kinds=K)
    ((_, name, _),) = rules.poll(5.0)
    assert name in "abc"
    nobody = rules.request(kinds=K, engines=frozenset("x"))
    assert rules.scheduler.submit(nobody, 6.0).code == "no_engine"
    rules.scheduler.join(rules.engine("x", BOTH), 6.0)
    assert rules.scheduler.submit(nobody, 6.0) is None
    assert {name for _, name, _ in rules.poll(6.0)} == {"x"}


def test_who_waits_for_named_engines_is_in_nobody_elses_way(make: Make) -> None:
    rules = make({"a": BOTH, "b": BOTH})
    for _ in range(40):
        rules.submit(kinds=K, engines=frozenset("b"))
    other = rules.submit(kinds=K)
    assert sorted(name for _, name, _ in rules.poll()) == ["a", "b"]
    assert rules.scheduler.waiting == 39
    assert rules.scheduler.engines["a"].prefills == 1
    assert other


@pytest.mark.parametrize(
    ("one", "other", "meet"),
    [
        (Among(), Among(K, frozenset("a")), True),
        (Among(K), Among(L), False),
        (Among(K), Among(frozenset("kl")), True),
        (Among(K, frozenset("a")), Among(K, frozenset("b")), False),
        (Among(K, frozenset("ab")), Among(K, frozenset("b")), True),
        (Among(K, frozenset("a")), Among(K), True),
    ],
)
def test_whether_the_same_engine_can_serve_both(one: Among, other: Among, meet: bool) -> None:
    assert one.meets(other) == other.meets(one) == meet

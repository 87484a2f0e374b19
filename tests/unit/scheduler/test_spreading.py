"""A prefix that many ask for is copied to more nodes, a few at a time, and its one node is not run over."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from kvpool.errors import ConfigError
from kvpool.scheduler.decision_context import DecisionContext
from kvpool.scheduler.queue import FIFO
from kvpool.scheduler.scheduler import Settings
from kvpool.scheduler.spreading import Spreading, SpreadRule
from kvpool.scheduler.values import Order, Role

Make = Callable[..., Any]
RULE = SpreadRule(per_replica=4.0, replicas_max=3, window_s=10.0)
PREFIX = [("shared", number) for number in range(60)]


def test_worth_a_replica_is_what_is_asked_for_more_often_than_its_replicas_serve() -> None:
    spreading = Spreading(RULE)
    for _ in range(4):
        spreading.asked("end", 0.0)
    assert not spreading.should_spread("end", 1, 0.0)
    spreading.asked("end", 0.0)
    assert spreading.should_spread("end", 1, 0.0)
    assert not spreading.should_spread("end", 2, 0.0)
    assert not spreading.should_spread("end", 1, 20.0)  # that was long ago
    assert not spreading.should_spread("other", 1, 0.0)


def test_replicas_in_a_window_have_a_limit() -> None:
    spreading = Spreading(RULE)
    for _ in range(1000):
        spreading.asked("end", 0.0)
    replicas = 0
    while spreading.should_spread("end", 1 + replicas, 0.0):
        spreading.replicated("end", 0.0)
        replicas += 1
    assert replicas == RULE.replicas_max
    assert spreading.should_spread("end", 1 + replicas, 5.0)


def test_no_more_prefixes_are_kept_in_mind_than_may_be() -> None:
    spreading = Spreading(replace(RULE, known_max=2))
    for _ in range(5):
        for end in "aab":
            spreading.asked(end, 0.0)
    spreading.asked("c", 0.0)
    assert not spreading.should_spread("a", 1, 0.0)
    assert spreading.should_spread("b", 1, 0.0)


def burst(make: Make, rule: SpreadRule, requests: int = 12) -> tuple[Counter[str], set[str], Any]:
    """A burst of short questions behind one long prefix: prompts of each engine, nodes that pulled it.

    The prefix lies on one node; to pull it takes 0.6 s, a question 0.32 s.
    """
    settings = Settings(queue=FIFO, segment_s=0.0, spread=rule, decodes=False)
    names = "abcdefgh"
    rules = make(dict.fromkeys(names, Role.PREFILL), settings, pull_s=0.01)
    rules.index.add("dram:a", PREFIX)
    for number in range(requests):
        keys = [*PREFIX, (number, 0), (number, 1)]
        rules.submit(16 * len(keys), keys=keys)
    went, pulled, now = Counter[str](), set(), 0.0
    out: list[tuple[float, Order]] = []
    while rules.scheduler.waiting or out:
        for order in rules.scheduler.poll(now):
            engine = order.estimate.engine
            went[engine.name] += 1
            if order.estimate.pulled:
                pulled.add(engine.name)
            out.append((engine.free_at, order))
        now += 0.01
        for entry in [each for each in out if each[0] <= now]:
            out.remove(entry)
            engine = entry[1].estimate.engine
            for holder in (engine.gpu, *engine.tiers):
                rules.index.add(holder, entry[1].request.keys)
            rules.scheduler.computed(engine, entry[1].request.ident, now)
    assert sum(went.values()) == requests
    return went, pulled, now


def test_a_burst_is_spread_and_the_prefix_is_copied(make: Make) -> None:
    few, many = replace(RULE, replicas_max=0), replace(RULE, replicas_max=6)
    (alone, _, alone_s), (went, pulled, took_s) = burst(make, few), burst(make, RULE)
    assert len(pulled) == RULE.replicas_max
    assert "a" not in pulled
    assert max(went.values()) <= max(alone.values()) / 2
    assert took_s < 0.6 * alone_s
    assert len(burst(make, many)[1]) == 4  # more would not pay: 12 requests, 4 for a copy


def test_a_node_that_has_it_twice_is_one(make: Make) -> None:
    rules = make({"a": Role.PREFILL, "b": Role.PREFILL})
    rules.index.join("ssd:a", pool=True)
    rules.nodes["ssd:a"] = "a"
    for holder in ("dram:a", "ssd:a", "dram:b"):
        rules.index.add(holder, PREFIX)
    request = rules.request(16 * len(PREFIX), keys=PREFIX)
    match = rules.index.match(PREFIX, 0.0)
    engines = list(rules.engines.values())
    context = DecisionContext(request, match, engines, rules.cluster, Random(0), 0.0)
    assert context.sources("") == (len(PREFIX), ["a", "b"])


def test_what_few_ask_for_stays_where_it_is(make: Make) -> None:
    _, pulled, _ = burst(make, RULE, requests=3)
    assert not pulled


@pytest.mark.parametrize("wrong", [{"per_replica": 0}, {"replicas_max": -1}, {"known_max": 0}])
def test_wrong_rules_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        SpreadRule(**wrong)

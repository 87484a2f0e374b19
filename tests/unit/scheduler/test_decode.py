"""Where an answer goes on: the formula worked out by hand, and what it comes to."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from kvpool.errors import ConfigError
from kvpool.placement.records import LinkRecord
from kvpool.scheduler.decode import (
    LATE_SAVE_S,
    SLOWER_MAX,
    STALL,
    DecodeRule,
    Handover,
    tpot_s,
    wait_for_saves_s,
)
from kvpool.scheduler.queue import FIFO
from kvpool.scheduler.scheduler import Settings
from kvpool.scheduler.values import DecodeEstimate, Request, Role, Saves

Make = Callable[..., Any]
P, D, BOTH = Role.PREFILL, Role.DECODE, Role.BOTH
PLAIN = Settings(queue=FIFO, segment_s=0.0)
RULE = DecodeRule()
PULL_S = 0.1  # a block
BLOCK, TOKEN_S = 16, 0.01
BLOCK_BYTES = 1000
ALONE_S = 0.011  # a token, with nobody beside


def estimates(
    rules: Any, request: Request, name: str, rule: DecodeRule = RULE, prefill_s: float = 0.0
) -> dict[str, DecodeEstimate]:
    """Of each engine that may decode what this one computes, the best first."""
    match = rules.index.match(request.keys, 0.0)
    decoders = [e for e in rules.engines.values() if D in e.role]
    handover = Handover(request, match, decoders, rules.cluster, rule, 0.0)
    engine = rules.engines[name]
    found = handover.estimates(engine, prefill_s, Random(0))
    if found:
        stalled_s = STALL * engine.decodes * prefill_s
        assert handover.cost_s(engine, prefill_s) == pytest.approx(found[0].cost + stalled_s)
    return {estimate.engine.name: estimate for estimate in found}


def test_what_is_lacking_costs_its_transfer(make: Make) -> None:
    rules = make({"p": P, "d": D, "e": D, "f": D}, pull_s=PULL_S)
    request = rules.request(160)
    rules.index.add("gpu:d", request.keys[:4])
    rules.index.add("dram:e", request.keys[:7])
    found = estimates(rules, request, "p")
    assert list(found) == ["e", "d", "f"]
    assert {name: o.lacks for name, o in found.items()} == {"e": 3, "d": 6, "f": 10}
    for estimate in found.values():
        assert estimate.handover_s == pytest.approx(estimate.lacks * PULL_S, rel=1e-3)
        assert estimate.cost == pytest.approx(estimate.handover_s + 10 * ALONE_S)


def test_what_was_not_saved_is_computed_again_by_others(make: Make) -> None:
    rules = make({"a@n": BOTH, "b@n": BOTH, "d": D, "e": D}, pull_s=PULL_S)
    request = rules.request(160)
    rules.index.add("dram:e", request.keys[:7])
    match = rules.index.match(request.keys, 0.0)
    decoders = list(rules.engines.values())
    for stored in (10, 8, 5, 0):
        handover = Handover(request, match, decoders, rules.cluster, RULE, 0.0, stored)
        engine = rules.engines["a"]
        found = {e.engine.name: e for e in handover.estimates(engine, 0.0, Random(0))}
        expected = {
            "a": 0.0,
            "b": (10 - stored) * BLOCK * TOKEN_S,
            "d": stored * PULL_S + (10 - stored) * BLOCK * TOKEN_S,
            "e": max(0, stored - 7) * PULL_S + (10 - max(stored, 7)) * BLOCK * TOKEN_S,
        }
        for name, handover_s in expected.items():
            assert found[name].handover_s == pytest.approx(handover_s, abs=1e-6), (stored, name)
        assert found["d"].lacks == stored
        assert found["e"].lacks == max(0, stored - 7)


@pytest.mark.parametrize(
    ("saves", "own", "handover_s", "wait_s"),
    [
        # All is there; it was not said how long the rest takes; that is sooner than computing it, or not.
        (Saves(160, 0, 0.0), 0, 0.1, 0.0),
        (Saves(160, 64, None), 0, 0.1, SLOWER_MAX * 0.1 + 0.64),
        (Saves(160, 64, 0.63), 0, 0.1, SLOWER_MAX * 0.1 + 0.64),
        (Saves(160, 64, 0.65), 0, 0.1, 0.0),
        # It has a part of that, or all; it need not compute what was not saved.
        (Saves(160, 64, 0.1), 8, 0.05, 0.32),
        (Saves(160, 64, 0.1), 10, 0.0, 0.0),
        (Saves(64, 32, 0.1), 0, 0.01, SLOWER_MAX * 0.01 + 0.32),
        (Saves(0, 0, None), 0, 0.0, 0.0),
        # Never longer than all of it takes to compute, and not for long where a transfer hangs.
        (Saves(160, 64, 0.1), 0, 9.0, 1.6),
        (Saves(160, 160, 0.1), 0, 0.01, SLOWER_MAX * 0.01 + LATE_SAVE_S),
    ],
)
def test_what_is_being_saved_is_waited_for_where_that_is_sooner(
    make: Make, saves: Saves, own: int, handover_s: float, wait_s: float
) -> None:
    rules = make({"d": D})
    kind = rules.cluster.kinds["k"]
    found = wait_for_saves_s(rules.request(160), saves, own, handover_s, kind)
    assert found == pytest.approx(wait_s)


def test_who_follows_hides_all_but_the_last_step(make: Make) -> None:
    rules = make({"p": P, "d": D}, pull_s=PULL_S, follows_max=1)
    request = rules.request(160)
    for prefill_s, seen_s in ((0.0, 1.0), (0.25, 0.75), (0.9, 0.4), (9.0, 0.4)):
        found = estimates(rules, request, "p", prefill_s=prefill_s)["d"]
        assert found.handover_s == pytest.approx(seen_s, rel=1e-3)  # 4 blocks a step
    rules.engines["d"].follows = 1
    assert estimates(rules, request, "p", prefill_s=9.0)["d"].handover_s == pytest.approx(
        1.0, rel=1e-3
    )


def test_a_busy_link_counts(make: Make) -> None:
    rules = make({"p": P, "d": D, "e": D}, pull_s=PULL_S)
    rules.cluster.traffic.add("x", "d", 0.3, 0.0)
    found = estimates(rules, rules.request(160), "p")
    assert found["d"].handover_s - found["e"].handover_s == pytest.approx(0.3)


def test_one_that_decodes_fewer_is_faster(make: Make) -> None:
    rules = make({"p": P, "d": D, "e": D}, pull_s=0.0001)
    rules.engines["d"].decodes = 20
    found = estimates(rules, rules.request(), "p")
    assert list(found) == ["e", "d"]
    assert found["d"].tpot_s == pytest.approx(0.01 + 21 * 0.001)


def test_memory_comes_before_speed_and_a_promise_before_none(make: Make) -> None:
    rules = make({"p": P, "d": D, "e": D, "f": D}, capacity=1000)
    rules.engines["d"].context_tokens = 1200
    rules.engines["e"].context_tokens = 950
    rules.engines["f"].decodes = 50
    found = estimates(rules, rules.request(), "p")
    assert list(found) == ["f", "e", "d"]
    assert [o.fits for o in found.values()] == [True, False, False]


def test_any_of_equals(make: Make) -> None:
    rules = make({"p": P, "d": D, "e": D, "f": D})
    request = rules.request()
    match = rules.index.match(request.keys, 0.0)
    decoders = [rules.engines[name] for name in "def"]
    rng = Random(0)
    first = {
        Handover(request, match, decoders, rules.cluster, DecodeRule(), 0.0)
        .estimates(rules.engines["p"], 0.0, rng)[0]
        .engine.name
        for _ in range(50)
    }
    assert first == {"d", "e", "f"}


def test_an_engine_that_computes_prompts_decodes_slower_by_its_share(make: Make) -> None:
    rules = make({"b": BOTH, "d": D})
    request, kind = rules.request(), rules.cluster.kinds["k"]
    both, only = rules.engines["b"], rules.engines["d"]
    assert tpot_s(request, both, kind, 0.0) == pytest.approx(ALONE_S)
    step_s = 0.64 + ALONE_S - 0.01
    both.free_at = 10 * ALONE_S  # as long as the answer takes: half the time
    expected = 1 / (0.5 / step_s + 0.5 / ALONE_S)
    assert tpot_s(request, both, kind, 0.0) == pytest.approx(expected)
    both.free_at = 0.0
    both.computing.add(0.25 * 30.0, 0.0)
    expected = 1 / (0.25 / step_s + 0.75 / ALONE_S)
    assert tpot_s(request, both, kind, 0.0) == pytest.approx(expected)
    both.computing.add(300.0, 0.0)
    assert tpot_s(request, both, kind, 0.0) == pytest.approx(step_s)
    only.free_at = 5.0
    assert tpot_s(request, only, kind, 0.0) == pytest.approx(ALONE_S)


@pytest.mark.parametrize(
    ("pull_s", "output_tokens", "busy", "where"),
    [
        (PULL_S, 10, 0.0, "b"),  # nothing to hand over
        (PULL_S, 10, 0.5, "b"),  # slower tokens, but few
        (PULL_S, 400, 0.5, "d"),  # many slow tokens
        (0.0001, 10, 0.5, "d"),  # the link is fast
    ],
)
def test_one_engine_for_both_where_that_pays(
    make: Make, pull_s: float, output_tokens: int, busy: float, where: str
) -> None:
    rules = make({"b": BOTH, "d": D}, pull_s=pull_s)
    rules.engines["b"].computing.add(busy * 30.0, 0.0)
    ident = rules.submit(160, output_tokens=output_tokens)
    (order,) = rules.scheduler.poll(0.0)
    assert order.request.ident == ident
    assert order.decode is rules.engines[where]
    assert order.whole == (where == "b")


def test_short_answers_go_to_who_does_both_and_long_ones_are_handed_over(make: Make) -> None:
    for output_tokens, alone in ((5, True), (600, False)):
        rules = make({"p": P, "b": BOTH, "d": D}, pull_s=PULL_S)
        rules.engines["b"].computing.add(0.9 * 30.0, 0.0)
        rules.submit(160, output_tokens=output_tokens)
        ((_, name, how),) = rules.poll()
        assert ((name, how) == ("b", "whole")) == alone


def test_a_prompt_goes_where_it_holds_up_fewer(make: Make) -> None:
    rules = make({"a": BOTH, "b": BOTH, "d": D}, pull_s=1e-6)
    rules.engines["a"].decodes = 30
    rules.submit(160)
    ((_, name, _),) = rules.poll()
    assert name == "b"


def test_until_paths_are_measured_the_nearest_decodes(make: Make) -> None:
    near = {"zone": "1", "rack": "a"}
    places = {"p": near, "d": near, "e": {"zone": "1", "rack": "b"}, "f": {"zone": "2"}}
    roles = {"p": P, "d": D, "e": D, "f": D, "g": D, "h@p": D}
    rules = make(roles, pull_s=PULL_S, places=places)
    found = estimates(rules, rules.request(160), "p")
    factors = {name: o.handover_s / (10 * PULL_S) for name, o in found.items()}
    assert factors == pytest.approx({"h": 0, "d": 0.5, "e": 0.71, "g": 1, "f": 1.52}, abs=1e-2)
    assert list(found) == ["h", "d", "e", "g", "f"]
    assert found["h"].link is None
    assert {o.link.known for name, o in found.items() if name != "h"} == {"assumed"}


def test_measured_paths_decide_whatever_labels_say(make: Make) -> None:
    near = {"zone": "1", "rack": "a"}
    places = {"p": near, "q": near, "d": near, "e": {"zone": "2"}}
    rules = make({"p": P, "q": P, "d": D, "e": D}, pull_s=PULL_S, places=places)
    slow = LinkRecord("rack", 0.0, BLOCK_BYTES / (8 * PULL_S), 32.0, 1 << 30, "p")
    fast = LinkRecord("far", 0.0, BLOCK_BYTES / (2 * PULL_S), 32.0, 1 << 30)
    usual = LinkRecord("rack", 0.0, BLOCK_BYTES / PULL_S, 32.0, 1 << 30)
    rules.cluster.links.told({"d": ("", [usual, slow]), "e": ("", [fast])})
    request = rules.request(160)
    found = estimates(rules, request, "p")
    assert {name: o.handover_s for name, o in found.items()} == pytest.approx({"e": 2.0, "d": 8.0})
    assert found["d"].link.known == "measured by d"
    assert found["e"].link.known == "measured by all of nodes in different zones"
    assert list(estimates(rules, request, "q")) == ["d", "e"], "q's way to d is a usual one"
    # The prompt is computed where its answer costs least, and the link is busy for as long as was measured.
    rules.submit(160)
    (order,) = rules.scheduler.poll(0.0)
    assert (order.estimate.engine.name, order.decode.name) == ("q", "d")


@pytest.mark.parametrize("wrong", [{"ahead": -0.1}, {"follow_below": 1.1}])
def test_wrong_rules_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        DecodeRule(**wrong)

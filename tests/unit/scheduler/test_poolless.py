"""Engines without a pool, and prompts whose blocks nobody knows."""

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from kvpool.scheduler.decode import DecodeRule, Handover
from kvpool.scheduler.fleet import Fleet
from kvpool.scheduler.queue import FIFO
from kvpool.scheduler.scheduler import Settings
from kvpool.scheduler.values import DecodeEstimate, Order, Role, together

Make = Callable[..., Any]
P, D, BOTH = Role.PREFILL, Role.DECODE, Role.BOTH
BLOCK, STEP, TOKEN_S = 16, 64, 0.01
PLAIN = Settings(queue=FIFO, segment_s=0.0)
PARTS = replace(PLAIN, segment_s=2 * STEP * TOKEN_S)


def estimates(rules: Any, request: Any, name: str) -> dict[str, DecodeEstimate]:
    match = rules.index.match(request.keys, 0.0)
    decoders = [e for e in rules.engines.values() if D in e.role]
    handover = Handover(request, match, decoders, rules.cluster, DecodeRule(), 0.0)
    found = handover.estimates(rules.engines[name], 0.0, Random(0))
    assert handover.cost_s(rules.engines[name], 0.0) == pytest.approx(found[0].cost)
    return {estimate.engine.name: estimate for estimate in found}


def test_a_prompt_without_keys_is_computed_in_one(make: Make) -> None:
    for pooled in (True, False):
        rules = make({"p": P, "d": D}, PARTS, pooled=pooled)
        ident = rules.submit(900, keys=())
        assert rules.poll() == [(ident, "p", "")]
        rules.computed("p", ident, 9.0)
        assert rules.poll(9.0) == [(ident, "d", "decode")]


@pytest.mark.parametrize("keys", [1, 4, 8, 9, 28, 57])
def test_a_prompt_with_fewer_keys_than_blocks_is_served(make: Make, keys: int) -> None:
    rules = make({"p": P}, replace(PARTS, decodes=False))
    ident = rules.submit(900, keys=[(1, number) for number in range(keys)])
    now, last = 0.0, False
    for _ in range(20):
        for order in rules.scheduler.poll(now):
            assert isinstance(order, Order)
            now, last = rules.engines["p"].free_at, order.last
            rules.index.add("gpu:p", order.request.keys[: order.end // BLOCK])
            rules.computed("p", ident, now)
    assert last
    assert rules.scheduler.waiting == 0


def test_two_without_a_node_are_not_on_the_same(make: Make) -> None:
    rules = make({"a": BOTH, "b": BOTH}, pooled=False)
    a, b = rules.engines["a"], rules.engines["b"]
    assert (together(a, b), together(a, a)) == (False, True)


def test_without_a_pool_between_them_it_is_computed_again(make: Make) -> None:
    rules = make({"a": BOTH, "b": BOTH}, pooled=False)
    rules.engines["c"] = rules.engine("c", BOTH)
    request = rules.request(160)
    rules.index.add("gpu:a", request.keys)
    for name in "abc":
        found = estimates(rules, request, name)
        handovers = {other: estimate.handover_s for other, estimate in found.items()}
        whole_s, last_s = 160 * TOKEN_S, TOKEN_S
        expected = {"a": last_s, "b": whole_s, "c": whole_s, name: 0.0}
        assert handovers == pytest.approx(expected)
    # What has no keys is brought by nobody either.
    assert estimates(rules, rules.request(160, keys=()), "a")["b"].handover_s == pytest.approx(1.6)


def test_a_long_prompt_stays_where_it_was_computed(make: Make) -> None:
    rules = make({"a": BOTH, "b": BOTH}, pooled=False)
    rules.engines["b"].free_at = 30.0
    rules.engines["a"].decodes = 5  # so that tokens come sooner from the other
    ident = rules.submit(500)
    assert rules.poll() == [(ident, "a", "whole")]


def test_whether_it_matters_who_computes_a_prompt(make: Make) -> None:
    rules = make({})
    near, far = [rules.engine(name, P) for name in "pq"]
    alone, lonely = [rules.engine(name, P, pooled=False) for name in "rs"]
    decode, none = rules.engine("d", D), rules.engine("e", D, pooled=False)
    both = rules.engine("b", BOTH, pooled=False)
    for engines, differ in (
        ((near, far, decode), False),
        ((near, alone, decode), True),
        ((alone, lonely, none), False),
        ((near, far, none), False),
        ((alone, both), True),
    ):
        assert Fleet(engines).pairs_differ == differ


def test_nothing_is_pulled_to_where_there_is_no_pool(make: Make) -> None:
    rules = make({"a": P}, replace(PLAIN, decodes=False))
    rules.scheduler.join(rules.engine("b", P, pooled=False), 0.0)
    request = rules.request(320)
    rules.index.add("dram:a", request.keys)
    rules.engines["a"].free_at = 9.0
    assert rules.scheduler.submit(request, 0.0) is None
    (order,) = rules.scheduler.poll(0.0)
    assert (order.estimate.engine.name, order.estimate.pulled) == ("b", 0)
    assert order.estimate.prefill_s == pytest.approx(3.2)


@pytest.mark.parametrize(("computes", "comes"), [(False, False), (False, True), (True, False)])
def test_without_a_pool_on_both_sides_nobody_waits(make: Make, computes: bool, comes: bool) -> None:
    rules = make({"a": P}, replace(PLAIN, decodes=False), pooled=computes)
    keys = [(0, number) for number in range(20)]
    rules.submit(320, keys=keys)
    ((_, first, _),) = rules.poll()
    rules.engines["a"].free_at = 12.0  # so that the other has it much sooner
    rules.scheduler.join(rules.engine("b", P, pooled=comes), 3.0)
    rules.submit(320, 3.0, keys=keys)
    ((_, second, _),) = rules.poll(3.0)
    assert (first, second) == ("a", "b")

"""What becomes of a request: how its answer goes on, and what happens when something is lost."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvpool.errors import InvalidRequest
from kvpool.scheduler.deadlines import Deadlines
from kvpool.scheduler.decode import DecodeRule
from kvpool.scheduler.queue import FIFO
from kvpool.scheduler.scheduler import Settings
from kvpool.scheduler.values import DecodeOrder, Order, Rejection, Request, Role, Saves
from tests.support.memory import longest

Make = Callable[..., Any]
P, D = Role.PREFILL, Role.DECODE
BLOCK, STEP, TOKEN_S = 16, 64, 0.01
PLAIN = Settings(queue=FIFO, segment_s=0.0)
PARTS = replace(PLAIN, segment_s=2 * STEP * TOKEN_S)


def test_a_prompt_is_followed_and_no_other_order_comes(make: Make) -> None:
    rules = make({"p": P, "d": D}, follows_max=1)
    first, second = rules.submit(), rules.submit()
    assert rules.poll() == [(first, "p", "follow")]
    assert (rules.engines["d"].follows, rules.engines["d"].held_tokens) == (1, 110)
    rules.computed("p", first, 1.0)
    assert rules.engines["d"].follows == 0
    assert rules.poll(1.0) == [(second, "p", "follow")]
    rules.scheduler.finished(first)
    assert rules.engines["d"].held_tokens == 110


def test_more_than_follows_max_are_sent_when_their_prompts_are_there(make: Make) -> None:
    rules = make({"p": P, "q": P, "d": D}, follows_max=1)
    first, second = rules.submit(), rules.submit()
    assert sorted(how for _, _, how in rules.poll()) == ["", "follow"]
    for name in "pq":
        for ident in (first, second):
            rules.computed(name, ident, 1.0)
    ((_, engine, how),) = rules.poll(1.0)
    assert (engine, how) == ("d", "decode")


def test_what_an_engine_did_not_save_is_forgotten_when_it_says_so(make: Make) -> None:
    """Nobody waits for it or would pull it; who decodes waits for the rest only while it is being saved."""
    rules = make({"p": P, "q": P, "d": D}, follows_max=1)
    rules.engines["d"].follows = 1
    ident = rules.submit(160)
    (order,) = rules.scheduler.poll(0.0)
    keys, name = order.request.keys, order.estimate.engine.name
    assert rules.index.match(keys, 0.5).of("").coming == 10
    rules.scheduler.computed(rules.engines[name], ident, 1.0, Saves(6 * BLOCK, 2 * BLOCK, 0.01))
    found = rules.index.match(keys, 1.0)
    assert found.lengths == {f"gpu:{name}": 10, f"dram:{name}": 6}
    assert found.of("")[:2] == (6, 6)
    (decoding,) = rules.scheduler.poll(1.0)
    assert isinstance(decoding, DecodeOrder)
    estimate = decoding.estimate
    assert estimate.lacks == 6
    assert estimate.handover_s == pytest.approx(6 * 0.001 + 4 * BLOCK * TOKEN_S)
    assert 2 * BLOCK * TOKEN_S < decoding.wait_s <= 6 * BLOCK * TOKEN_S


@pytest.mark.parametrize(
    ("engines", "more"),
    [
        ({"p": P, "d": D}, {"follows_max": 0}),
        ({"p": P, "d": D}, {"follows_max": 1, "pooled": False}),
    ],
)
def test_who_cannot_follow_waits_for_nothing(
    make: Make, engines: dict[str, Role], more: dict[str, Any]
) -> None:
    rules = make(engines, **more)
    rules.engines["d"].follows = 1
    ident = rules.submit(160)
    rules.poll()
    rules.computed("p", ident, 1.0)
    (decoding,) = rules.scheduler.poll(1.0)
    assert (decoding.engine.name, decoding.wait_s) == ("d", 0.0)


def test_without_a_report_the_last_step_is_being_saved(make: Make) -> None:
    for pull_s in (0.001, 0.5):
        rules = make({"p": P, "d": D}, follows_max=1, pull_s=pull_s)
        rules.engines["d"].follows = 1
        ident = rules.submit(160)
        rules.poll()
        rules.computed("p", ident, 1.0)
        (decoding,) = rules.scheduler.poll(1.0)
        wait_s = 4 * decoding.estimate.handover_s + STEP * TOKEN_S
        assert decoding.wait_s == pytest.approx(min(wait_s, 160 * TOKEN_S))


def test_a_long_prompt_is_followed_as_late_as_the_rest_still_comes_in_time(make: Make) -> None:
    # There are 4 orders, and 32 blocks to pull.
    for pull_s, followed_from in ((0.001, 4), (0.05, 3)):
        rules = make({"p": P, "d": D}, PARTS, pull_s=pull_s, follows_max=1)
        ident = rules.submit(8 * STEP)
        hows, now = [], 0.0
        while not hows or not hows[-1].last:
            for order in rules.scheduler.poll(now):
                assert isinstance(order, Order)
                hows.append(order)
            now += 2 * STEP * TOKEN_S
            rules.index.add("dram:p", hows[-1].request.keys[: hows[-1].end // BLOCK])
            rules.computed("p", ident, now)
        assert [order.follow for order in hows].index(True) + 1 == followed_from
        assert sum(order.follow for order in hows) == 1


def test_a_decode_engine_that_is_nearly_full_gets_it_later(make: Make) -> None:
    rules = make({"p": P, "d": D}, follows_max=9, capacity=1000)
    first = rules.submit(840)
    assert rules.poll() == [(first, "p", "follow")]
    second = rules.submit(100, 8.4)
    rules.computed("p", first, 8.4)
    assert rules.poll(8.4) == [(second, "p", "")]  # 850 + 110 are more than 0.9 of 1000
    third = rules.submit(100, 9.4)
    rules.computed("p", second, 9.4)
    # There is room for the second, and a promise for the third, which is more than there is room for.
    assert rules.poll(9.4) == [(second, "d", "decode"), (third, "p", "")]
    rules.computed("p", third, 10.4)
    assert rules.poll(10.4) == []
    assert rules.scheduler.parked == 1
    rules.scheduler.finished(second)
    assert rules.poll(11.0) == [(third, "d", "decode")]


def test_no_more_is_promised_than_the_rule_says(make: Make) -> None:
    for ahead, begun in ((0.0, 1), (0.15, 2), (1.0, 3)):
        rules = make({"p": P, "q": P, "r": P, "d": D}, replace(PLAIN, decode=DecodeRule(ahead)))
        for _ in range(3):
            rules.submit(500)
        assert len(rules.poll()) == begun


def test_of_those_that_wait_for_memory_smaller_ones_do_not_overtake_the_first(make: Make) -> None:
    rules = make({"p": P, "q": P, "r": P, "d": D}, replace(PLAIN, decode=DecodeRule(1.0)))
    running, large, small = rules.submit(600), rules.submit(500), rules.submit(100)
    orders = rules.poll()
    for ident, name, _ in orders:
        rules.computed(name, ident, 6.0)
    assert rules.poll(6.0) == [(running, "d", "decode")]
    assert rules.engines["d"].held_tokens == 610  # 110 would fit, 510 would not
    rules.scheduler.finished(running)
    assert rules.poll(7.0) == [(large, "d", "decode"), (small, "d", "decode")]


def test_who_waits_for_memory_goes_wherever_there_is_some(make: Make) -> None:
    rules = make({"p": P, "q": P, "d": D, "e": D}, replace(PLAIN, decode=DecodeRule(1.0)))
    idents = [rules.submit(tokens) for tokens in (900, 900)]
    sent = {}
    for ident, name, _ in rules.poll():
        rules.computed(name, ident, 9.0)
    sent = {ident: engine for ident, engine, _ in rules.poll(9.0)}
    assert set(sent.values()) == {"d", "e"}
    third = rules.submit(500, 9.0)
    ((_, name, _),) = rules.poll(9.0)
    rules.computed(name, third, 14.0)
    reserved = next(e.name for e in rules.engines.values() if e.decodes == 2)
    other = next(ident for ident in idents if sent[ident] != reserved)
    rules.scheduler.finished(other)
    assert rules.poll(14.0) == [(third, sent[other], "decode")]


def test_what_must_be_whole_goes_to_who_decodes_with_room(make: Make) -> None:
    rules = make({"p": P, "d": D}, PARTS)
    filling = rules.submit(500)
    rules.poll()
    whole = rules.submit(600, whole=True)
    assert all(ident == filling for ident, _, _ in rules.poll())  # 510 + 610 are too many
    rules.scheduler.abandoned(filling, 1.0)
    assert rules.poll(1.0) == [(whole, "d", "whole")]
    rules.computed("d", whole, 7.0)
    assert rules.poll(7.0) == []
    assert rules.engines["d"].held_tokens == 610
    rules.scheduler.finished(whole)
    assert rules.scheduler.engines["d"].idle


def test_what_has_no_segments_is_computed_in_one(make: Make) -> None:
    rules = make({"p": P, "d": D}, PARTS)
    ident = rules.submit(1000 - 10, segments=False)
    assert rules.poll() == [(ident, "p", "")]


def test_a_failed_order_is_given_elsewhere_and_then_given_up(make: Make) -> None:
    rules = make({"p": P, "q": P, "d": D}, replace(PLAIN, retries_max=2))
    ident = rules.submit()
    ((_, first, _),) = rules.poll()
    assert rules.scheduler.failed(rules.engines[first], ident, 0.1)
    ((_, second, _),) = rules.poll(0.1)
    assert second != first
    assert rules.scheduler.failed(rules.engines[second], ident, 0.2)
    ((_, third, _),) = rules.poll(0.2)  # all are to be avoided, so none is
    assert not rules.scheduler.failed(rules.engines[third], ident, 0.3)
    assert rules.poll(0.3) == []
    assert rules.scheduler.engines["d"].idle
    assert not rules.scheduler.failed(rules.engines[third], ident, 0.4)


@pytest.mark.parametrize(("engines", "again"), [("pq", True), ("p", False)])
def test_what_is_to_be_done_elsewhere_is_given_to_another_engine_or_to_none(
    make: Make, engines: str, again: bool
) -> None:
    rules = make({**dict.fromkeys(engines, P), "d": D})
    ident = rules.submit()
    ((_, first, _),) = rules.poll()
    assert rules.scheduler.failed(rules.engines[first], ident, 0.1, elsewhere=True) is again
    assert [name for _, name, _ in rules.poll(0.1)] == [n for n in engines if n != first]
    assert rules.scheduler.engines[first].idle


@pytest.mark.parametrize(("engines", "again"), [("de", True), ("d", False)])
@pytest.mark.parametrize("whole", [False, True])
def test_an_answer_is_asked_of_another_engine_or_of_none(
    make: Make, engines: str, again: bool, whole: bool
) -> None:
    rules = make({"p": P, **dict.fromkeys(engines, D)})
    ident = rules.submit(whole=whole)
    ((_, first, _),) = rules.poll()
    if not whole:
        rules.computed("p", ident, 1.0)
        ((_, first, _),) = rules.poll(1.0)
    assert rules.scheduler.decode_failed(ident, 1.1, elsewhere=True) is again
    assert [name for _, name, _ in rules.poll(1.1)] == [n for n in engines if n != first]


@pytest.mark.parametrize("elsewhere", [True, False])
def test_an_engine_that_is_too_small_is_no_other_one(make: Make, elsewhere: bool) -> None:
    rules = make({"p": P, "d": D, "e": D})
    rules.engines["e"].capacity_tokens = 500
    ident = rules.submit(700)
    rules.poll()
    rules.computed("p", ident, 7.0)
    assert rules.poll(7.0) == [(ident, "d", "decode")]
    assert rules.scheduler.decode_failed(ident, 8.0, elsewhere=elsewhere) is not elsewhere
    assert rules.poll(8.0) == ([] if elsewhere else [(ident, "d", "decode")])


def test_what_was_computed_before_a_failure_is_not_computed_again(make: Make) -> None:
    rules = make({"p": P, "q": P}, replace(PARTS, decodes=False))
    ident = rules.submit(400)
    (first,) = rules.scheduler.poll(0.0)
    assert isinstance(first, Order)
    engine = first.estimate.engine
    rules.index.add(engine.tiers[0], first.request.keys[: first.end // BLOCK])
    rules.computed(engine.name, ident, 1.28)
    (second,) = rules.scheduler.poll(1.28)
    assert isinstance(second, Order)
    assert rules.scheduler.failed(second.estimate.engine, ident, 1.5)
    (again,) = rules.scheduler.poll(1.5)
    assert isinstance(again, Order)
    assert again.estimate.cached * BLOCK == first.end
    assert not again.last  # nothing is gone, so that it is no reason to compute the rest in one
    assert again.estimate.engine is not second.estimate.engine


def test_an_engine_that_leaves_gives_back_what_it_had(make: Make) -> None:
    rules = make({"p": P, "q": P, "d": D, "e": D}, follows_max=9)
    first, second = rules.submit(), rules.submit()
    orders = rules.scheduler.poll(0.0)
    ((prefill, decode),) = [
        (o.estimate.engine.name, o.decode.name)
        for o in orders
        if isinstance(o, Order) and o.decode is not None and o.request.ident == first
    ]
    left = rules.scheduler.leave(prefill, 0.5)
    assert (left.queued, left.given_up, left.decoding) == ([first], [], [])
    left = rules.scheduler.leave(decode, 0.5)
    assert (left.queued, left.given_up, left.decoding) == ([], [], [first])
    assert rules.scheduler.decode_failed(first, 0.5)
    other = "q" if prefill == "p" else "p"
    rules.computed(other, second, 1.0)
    assert rules.poll(1.0) == [(first, other, "follow")]
    assert rules.scheduler.leave(prefill, 2.0) == ([], [], [])


def test_an_engine_that_dies_of_a_prompt_is_not_followed_by_all_others(make: Make) -> None:
    names = "abcde"
    rules = make({**dict.fromkeys(names, P), "d": D}, replace(PLAIN, retries_max=2))
    ident = rules.submit()
    for lost in range(3):
        ((_, name, _),) = rules.poll(float(lost))
        left = rules.scheduler.leave(name, float(lost))
        assert (left.given_up if lost == 2 else left.queued) == [ident]
    assert rules.poll(3.0) == []


def test_a_lost_decode_engine_is_replaced_before_the_first_token(make: Make) -> None:
    rules = make({"p": P, "d": D, "e": D}, replace(PLAIN, retries_max=1))
    ident = rules.submit()
    rules.poll()
    rules.computed("p", ident, 1.0)
    ((_, first, _),) = rules.poll(1.0)
    assert rules.scheduler.decode_failed(ident, 1.1)
    ((_, second, how),) = rules.poll(1.1)
    assert (how, {first, second}) == ("decode", {"d", "e"})
    assert not rules.scheduler.decode_failed(ident, 1.2)
    assert rules.scheduler.engines["d"].idle
    assert rules.scheduler.engines["e"].idle
    assert not rules.scheduler.decode_failed(ident, 1.3)


def test_a_draining_engine_ends_what_it_has_and_gets_nothing_new(make: Make) -> None:
    rules = make({"p": P, "q": P, "d": D, "e": D})
    first = rules.submit()
    ((_, name, _),) = rules.poll()
    reserved = next(n for n in "de" if rules.engines[n].decodes)
    rules.scheduler.drain(name, 0.1)
    rules.scheduler.drain(reserved, 0.1)
    assert not rules.scheduler.engines[name].idle
    assert rules.scheduler.engines[reserved].idle  # nothing was sent there yet
    other, spare = "pq".replace(name, ""), "de".replace(reserved, "")
    second = rules.submit()
    assert rules.poll(0.1) == [(second, other, "")]
    rules.computed(name, first, 1.0)
    assert rules.scheduler.engines[name].idle
    assert rules.poll(1.0) == [(first, spare, "decode")]
    rules.scheduler.undrain(name, 1.0)
    third = rules.submit(now=1.0)
    assert rules.poll(1.0) == [(third, name, "")]


def test_without_an_engine_of_its_kind_a_request_waits_for_one(make: Make) -> None:
    rules = make({"p": P, "d": D})
    ident = rules.submit(kinds=frozenset("k"))
    rules.scheduler.leave("p", 0.0)
    assert rules.poll() == []
    rules.scheduler.join(rules.engine("l", P, kind="l"), 1.0)
    assert rules.poll(1.0) == []
    rules.scheduler.join(rules.engine("k", P), 2.0)
    assert rules.poll(2.0) == [(ident, "k", "")]


def test_a_role_changes_and_nothing_is_lost(make: Make) -> None:
    rules = make({"p": P, "q": P, "d": D})
    idents = [rules.submit(), rules.submit()]
    assert {name for _, name, _ in rules.poll()} == {"p", "q"}
    rules.scheduler.set_role("q", D, 0.5)
    third = rules.submit(now=0.5)
    for ident in idents:
        rules.computed("p", ident, 1.0)
        rules.computed("q", ident, 1.0)
    found = rules.poll(1.0)
    assert {name for ident, name, how in found if how == "decode"} == {"d", "q"}
    assert (third, "p", "") in found


def test_who_waits_past_its_deadline_is_forgotten_and_who_is_computed_is_not(make: Make) -> None:
    rules = make({"p": P, "d": D})
    first = rules.submit(deadline_s=2.0)
    second, third = rules.submit(deadline_s=2.5), rules.submit(deadline_s=9.0)
    assert rules.poll() == [(first, "p", "")]
    assert rules.scheduler.expired(1.9) == []
    assert rules.scheduler.expired(3.0) == [second]
    assert rules.scheduler.wake_at() <= 9.0
    rules.computed("p", first, 3.0)
    assert rules.scheduler.expired(3.0) == [first]  # it is parked, and would come too late
    assert rules.poll(3.0) == [(third, "p", "")]
    assert rules.scheduler.expired(1e9) == []


def test_what_no_engine_left_can_hold_is_given_up(make: Make) -> None:
    rules = make({"p": P, "d": D, "e": D}, replace(PLAIN, decode=DecodeRule(1.0)))
    rules.engines["e"].capacity_tokens = 500
    parked, running = rules.submit(700), rules.submit(400)
    assert rules.poll() == [(parked, "p", "")]
    rules.engines["d"].held_tokens += 900  # nothing goes there
    rules.computed("p", parked, 7.0)
    large, small = rules.submit(700, 7.0), rules.submit(100, 7.0)
    assert rules.poll(7.0) == [(running, "p", "")]
    assert rules.scheduler.parked == 1
    left = rules.scheduler.leave("d", 8.0)
    assert (left.queued, sorted(left.given_up), left.decoding) == ([], [parked, large], [])
    assert rules.scheduler.parked == 0
    rules.computed("p", running, 11.0)
    assert rules.poll(11.0) == [(running, "e", "decode"), (small, "p", "")]


def test_what_was_decoded_where_alone_there_was_room_is_given_up(make: Make) -> None:
    rules = make({"p": P, "d": D, "e": D})
    rules.engines["e"].capacity_tokens = 500
    ident = rules.submit(700)
    rules.poll()
    rules.computed("p", ident, 7.0)
    assert rules.poll(7.0) == [(ident, "d", "decode")]
    assert rules.scheduler.leave("d", 8.0).decoding == [ident]
    assert not rules.scheduler.decode_failed(ident, 8.0)
    assert rules.scheduler.parked == 0


def test_what_is_computed_goes_on_where_another_order_is_void(make: Make) -> None:
    rules = make({"p": P}, replace(PLAIN, decodes=False, ahead_s=0.5))
    rules.submit(400)
    rules.poll()
    second = rules.submit(100, 3.6)
    assert rules.poll(3.6) == [(second, "p", "")]
    rules.scheduler.abandoned(second, 3.6)
    assert rules.engines["p"].free_at <= 5.0
    rules.scheduler.abandoned(1, 3.7)
    assert rules.engines["p"].free_at == 3.7


def test_a_deadline_is_kept_once() -> None:
    deadlines = Deadlines()
    request = Request(1, (), 1, 1, 0.0, deadline_s=5.0)
    for _ in range(3):
        deadlines.add(request)
    assert longest(deadlines) == 1
    deadlines.remove(1)
    deadlines.add(request)
    assert list(deadlines.over(4.9)) == []
    assert list(deadlines.over(5.0)) == [1]
    deadlines.add(request)
    assert deadlines.next_at == 5.0


def test_an_engine_joins_once(make: Make) -> None:
    rules = make({"p": P})
    with pytest.raises(InvalidRequest, match="p already"):
        rules.scheduler.join(rules.engines["p"], 0.0)


def test_explaining_says_where_the_answer_would_go_on_or_why_not(make: Make) -> None:
    rules = make({"p": P, "d": D, "e": D})
    rules.engines["d"].decodes = 3
    found = rules.scheduler.explain(rules.request(), 0.0)
    assert not isinstance(found, Rejection)
    assert [estimate.engine.name for estimate in found.decoders] == ["e", "d"]
    refused = rules.scheduler.explain(rules.request(5000), 0.0)
    assert isinstance(refused, Rejection)
    assert refused.code == "too_long"
    assert rules.scheduler.waiting == 0


def test_settings_say_that_nothing_decodes_here(make: Make) -> None:
    rules = make({"p": P}, Settings(segment_s=0.0, decodes=False))
    ident = rules.submit()
    assert rules.poll() == [(ident, "p", "")]
    rules.computed("p", ident, 1.0)
    assert rules.poll(1.0) == []
    rules.scheduler.finished(ident)


def test_what_is_kept_for_who_is_parked_is_not_taken_by_who_follows(make: Make) -> None:
    settings = replace(PLAIN, decode=DecodeRule(1.0))
    rules = make({"p": P, "q": P, "d": D}, settings, follows_max=9)
    running, large = rules.submit(600), rules.submit(500)
    for ident, name, _ in rules.poll():
        rules.computed(name, ident, 6.0)
    assert rules.scheduler.parked == 1
    small = rules.submit(100, 6.0)
    assert [(ident, how) for ident, _, how in rules.poll(6.0)] == [(small, "")]
    rules.scheduler.finished(running)
    assert rules.poll(6.5) == [(large, "d", "decode")]


def test_its_own_reservation_is_not_in_its_way(make: Make) -> None:
    rules = make({"p": P, "d": D, "e": D})
    rules.engines["e"].decodes = 5
    ident = rules.submit(500)
    rules.poll()
    assert rules.engines["d"].context_tokens == 510
    rules.computed("p", ident, 5.0)
    assert rules.poll(5.0) == [(ident, "d", "decode")]


def test_what_must_be_whole_is_served_while_engines_for_prompts_are_busy(make: Make) -> None:
    rules = make({"p": P, "d": D})
    first = rules.submit(100)
    assert rules.poll() == [(first, "p", "")]
    rules.submit(100)
    whole = rules.submit(100, 0.6, whole=True)
    assert (whole, "d", "whole") in rules.poll(0.6)

"""What is saved, what is pinned until it is, and who is told."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.engine_plugins.vllm.events import Publisher
from kvpool.engine_plugins.vllm.following import SaveReport
from kvpool.engine_plugins.vllm.plan import GroupRule, Opening, StepDone, block_key, pack
from kvpool.types import PartKind
from tests.unit.engine_plugins.scheduler.harness import TOKENS, Harness, tables

# --- saves


def test_blocks_are_saved_as_they_are_completed(harness: Harness) -> None:
    request = harness.request("r", 4)
    first = harness.step(request, 2 * TOKENS + 3, tables(5))
    assert first.saves[0].saves[0].keys == pack(request.block_hashes[:2])
    assert first.opening == Opening(1, harness.make(""), 0)
    second = harness.step(request, 1, tables(5))
    assert second.opening is None
    assert first.saves[0].generation == second.saves[0].generation == 1
    assert second.saves[0].saves[0].keys == pack(request.block_hashes[2:3])
    assert second.saves[0].saves[0].parent == block_key(request.block_hashes[1])
    assert harness.step(request, 1, tables(5)).saves == []


def test_generated_blocks_are_saved_when_their_hash_exists(harness: Harness) -> None:
    request = harness.request("r", 1, extra_tokens=TOKENS - 1)
    harness.end(harness.step(request, 2 * TOKENS, tables(3)))
    assert harness.step(request, 1, tables(3)).saves == []
    request.block_hashes.append(b"g" * 32)
    (save,) = harness.step(request, 1, tables(3)).saves
    assert save.saves[0].keys == b"g" * 16


def test_no_block_is_offered_twice(harness: Harness) -> None:
    one, two = harness.request("one", 4), harness.request("two", 5)
    harness.end(harness.step(one, 4 * TOKENS, tables(4)))
    (save,) = harness.step(two, 5 * TOKENS, tables(5)).saves
    assert save.saves[0].block_ids == [5]
    harness.now += 61
    three = harness.request("three", 4)
    assert harness.step(three, 4 * TOKENS, tables(4)).saves != []


def test_loaded_blocks_are_not_saved(harness: Harness) -> None:
    request = harness.request("r", 6)
    harness.store(request.block_hashes[:4])
    harness.half.matched_tokens(request, 0)
    harness.half.allocated(request, tables(6), 4 * TOKENS)
    request.num_computed_tokens = 4 * TOKENS
    (save,) = harness.step(request, 2 * TOKENS, tables(6)).saves
    assert save.saves[0].block_ids == [5, 6]


def test_what_the_pool_refused_is_offered_again(harness: Harness) -> None:
    one, two = harness.request("one", 3), harness.request("two", 3)
    harness.end(harness.step(one, 3 * TOKENS, tables(3)), failed=True)
    assert harness.step(two, 3 * TOKENS, tables(3)).saves != []


def test_an_engine_that_only_reads_saves_nothing(pool: Any, block_pool: Any) -> None:
    harness = Harness(pool, block_pool, saves=False)
    assert harness.step(harness.request("r", 4), 4 * TOKENS, tables(4)).saves == []


def test_nothing_happens_before_the_namespace_is_known(pool: Any, block_pool: Any) -> None:
    harness = Harness(pool, block_pool, known=False)
    request = harness.request("r", 4)
    assert harness.half.matched_tokens(request, 0) == (0, False)
    plan = harness.step(request, 4 * TOKENS, tables(4))
    assert plan.want_report
    assert plan.saves == []


# --- pins


def test_saved_blocks_are_pinned_until_every_rank_has_them(pool: Any, block_pool: Any) -> None:
    harness = Harness(pool, block_pool, ranks=2)
    request, _ = harness.request("r", 4), harness.request("runs on", 4, first=9)
    plan = harness.step(request, 4 * TOKENS, tables(4))
    assert block_pool.pinned == 4
    harness.half.request_finished(request, tables(4), completed=True)
    harness.end(plan)
    assert block_pool.pinned == 4
    assert harness.half.has_work()
    harness.end(plan)
    assert block_pool.pinned == 0
    assert not harness.half.has_work()


def test_pins_never_exceed_their_share(pool: Any, block_pool: Any) -> None:
    harness = Harness(pool, block_pool, blocks=50)
    request = harness.request("r", 12)
    plan = harness.step(request, 12 * TOKENS, tables(12))
    assert block_pool.pinned == 5
    assert harness.step(request, 0, tables(12)).saves == []
    # The request still holds its blocks: the rest follows as pins are given back.
    saved = [plan.saves[0].saves[0].block_ids]
    while plan.saves:
        harness.end(plan)
        plan = harness.step(request, 0, tables(12))
        saved += [save.saves[0].block_ids for save in plan.saves]
        assert block_pool.pinned <= 5
    assert saved == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12]]


def test_what_a_finished_request_could_not_pin_is_dropped_and_counted(
    pool: Any, block_pool: Any
) -> None:
    harness = Harness(pool, block_pool, blocks=50)
    request, _ = harness.request("r", 12), harness.request("runs on", 4, first=20)
    first = harness.step(request, 12 * TOKENS, tables(12))
    harness.end(first)
    harness.half.request_finished(request, tables(12), completed=True)
    assert block_pool.pinned == 5
    assert harness.half.counters.take()["dropped_saves"] == 2
    harness.end(harness.half.plan_step({}, lambda _: [[]]))
    assert block_pool.pinned == 0


def test_blocks_of_an_aborted_request_are_dropped(pool: Any, block_pool: Any) -> None:
    harness = Harness(pool, block_pool, blocks=50)
    request = harness.request("r", 12)
    harness.end(harness.step(request, 12 * TOKENS, tables(12)))
    harness.half.request_finished(request, tables(12), completed=False)
    assert block_pool.pinned == 0
    assert harness.half.counters.take()["dropped_saves"] == 7


def test_an_engine_without_requests_holds_nothing(harness: Harness, block_pool: Any) -> None:
    """Nobody steps until the next request comes. The save goes on, and its blocks are held again then."""
    request = harness.request("r", 4)
    plan = harness.step(request, 4 * TOKENS, tables(4))
    assert block_pool.pinned == 4
    harness.half.request_finished(request, tables(4), completed=True)
    assert block_pool.pinned == 0
    assert harness.half.has_work()
    harness.request("next", 4, first=9)
    assert block_pool.pinned == 4
    harness.end(plan)
    assert block_pool.pinned == 0
    assert not harness.half.has_work()


def test_ranks_hear_of_saves_whose_blocks_are_used_again(harness: Harness, block_pool: Any) -> None:
    block_pool.cache(range(1, 9))
    one, two = harness.request("1", 4), harness.request("2", 4, first=9)
    first, second = (
        harness.step(request, 4 * TOKENS, tables(4, first=at)).saves[0].job
        for request, at in ((one, 1), (two, 5))
    )
    assert block_pool.pinned == 0
    block_pool.reuse([6])
    assert harness.step(one, 0, tables(4)).reused == [second]
    harness.half.step_done(StepDone(saves={second: 1}))
    block_pool.reuse([3, 7])
    assert harness.step(one, 0, tables(4)).reused == [first]
    assert harness.step(one, 0, tables(4)).reused == []


def test_a_save_that_no_rank_has_begun_is_given_up_for_its_blocks(
    harness: Harness, block_pool: Any
) -> None:
    """The end of a prompt whose last tokens were not known in time. It is saved when it is computed again."""
    block_pool.cache(range(1, 5))
    request = harness.request("r", 4)
    (begun,) = harness.step(request, 2 * TOKENS, tables(4)).saves
    request.num_computed_tokens = 4 * TOKENS
    harness.half.request_finished(request, tables(4), completed=True)
    block_pool.reuse([4])
    plan = harness.half.plan_step({}, lambda _: [[]])
    assert (plan.saves, plan.reused) == ([], [])
    assert harness.half.counters.take()["dropped_saves"] == 2
    assert harness.pool.given_up == [block_key(key) for key in request.block_hashes[2:]]
    harness.half.step_done(StepDone(saves={begun.job: 1}))
    assert not harness.half.has_work()
    (save,) = harness.step(harness.request("again", 4), 4 * TOKENS, tables(4)).saves
    assert save.saves[0].keys == pack(request.block_hashes[2:])


# --- who is told


def test_who_follows_is_told_of_blocks_that_are_not_saved(pool: Any, block_pool: Any) -> None:
    """Those that found no pins, and those whose save failed; an aborted prompt is computed elsewhere."""
    harness = Harness(pool, block_pool, blocks=50)
    one, two, three = (
        harness.request(name, 12, first=at) for name, at in (("1", 0), ("2", 20), ("3", 40))
    )
    plan = harness.step(one, 12 * TOKENS, tables(12))
    assert pool.given_up == []
    harness.half.request_finished(one, tables(12), completed=True)
    assert pool.given_up == [block_key(key) for key in one.block_hashes[5:]]
    pool.given_up.clear()
    harness.end(plan)
    plan = harness.step(two, 2 * TOKENS, tables(12))
    harness.half.request_finished(two, tables(12), completed=False)
    harness.end(plan)
    assert pool.given_up == []
    harness.end(harness.step(three, 3 * TOKENS, tables(12)), failed=True)
    assert pool.given_up == [block_key(key) for key in three.block_hashes[:3]]


def test_generated_blocks_that_are_not_saved_concern_nobody(pool: Any, block_pool: Any) -> None:
    harness = Harness(pool, block_pool, blocks=50)
    request = harness.request("r", 12)
    request.num_prompt_tokens = 5 * TOKENS
    harness.step(request, 12 * TOKENS, tables(12))
    harness.half.request_finished(request, tables(12), completed=True)
    assert harness.half.counters.take()["dropped_saves"] == 7
    assert pool.given_up == []


def test_an_answer_says_what_of_its_prompt_is_saved(pool: Any, block_pool: Any) -> None:
    harness = Harness(pool, block_pool, blocks=50)
    params = {"kvpool": {"report": True}}
    one = harness.request("1", 7, params=params, extra_tokens=3)
    first = harness.step(one, 3 * TOKENS, tables(8))
    harness.half.step_done(
        StepDone(saves={first.saves[0].job: 1}, save_seconds={first.saves[0].job: 0.3})
    )
    second = harness.step(one, 4 * TOKENS + 3, tables(8))
    report = harness.half.request_finished(one, tables(8), completed=True)
    assert report == SaveReport(3 * TOKENS, 4 * TOKENS, pytest.approx(0.6))
    again = harness.request("2", 7, params=params)
    harness.end(second, failed=True)
    harness.step(again, 0, tables(7))
    report = harness.half.request_finished(again, tables(7), completed=True)
    assert report == SaveReport(3 * TOKENS, 0, pytest.approx(0.0))
    large = harness.request("3", 12, first=20, params=params)
    harness.end(harness.step(large, 2 * TOKENS, tables(12)))
    harness.step(large, 10 * TOKENS, tables(12))
    report = harness.half.request_finished(large, tables(12), completed=True)
    assert report == SaveReport(2 * TOKENS, 5 * TOKENS, pytest.approx(0.6))
    silent = harness.request("4", 4, first=40)
    harness.step(silent, 4 * TOKENS, tables(4))
    assert harness.half.request_finished(silent, tables(4), completed=True) is None


def test_an_engine_that_saves_nothing_says_so(pool: Any, block_pool: Any) -> None:
    harness = Harness(pool, block_pool, saves=False)
    request = harness.request("r", 4, params={"kvpool": {"report": True}})
    harness.step(request, 4 * TOKENS, tables(4))
    assert harness.half.request_finished(request, tables(4), completed=True) == SaveReport(
        0, 0, None
    )


# --- the engine's own cache


EVENTS = Publisher("tcp://127.0.0.1:1", "tcp://127.0.0.1:2", "kv")


def test_the_daemon_is_told_where_the_engines_events_are(pool: Any, block_pool: Any) -> None:
    rules = (GroupRule(0), GroupRule(2, 1, PartKind.WINDOW, 1))
    harness = Harness(pool, block_pool, rules=rules, ranks=2, events=EVENTS)
    told = (EVENTS.endpoint, EVENTS.replay, EVENTS.topic, [0, 2, 0, 2])
    assert pool.followed == [(harness.ns.digest, *told)]
    harness.reset("second")
    assert pool.followed[1:] == [(pool.open(harness.make("second")).digest, *told)]
    harness.reset("first")
    assert pool.followed[2:] == [(harness.ns.digest, *told)]
    harness.half.close()
    assert pool.followed[3:] == [(harness.ns.digest, "", "", "", [0, 2, 0, 2])]


def test_an_engine_that_is_not_followed_serves_all_the_same(
    pool: Any, block_pool: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pool.away = True
    harness = Harness(pool, block_pool, load_mode="async", events=EVENTS)
    pool.away = False
    assert "the fake cluster is away" in caplog.text
    harness.store([bytes([i]) * 32 for i in range(4)])
    assert harness.half.matched_tokens(harness.request("r", 4), 0) == (4 * TOKENS, True)


def test_nothing_is_told_where_nothing_is_published(harness: Harness) -> None:
    harness.half.close()
    assert harness.pool.followed == []

"""Requests whose prompt another engine computes: what they may say, and how they wait for it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvpool.engine_plugins.vllm.config import PluginConfig
from kvpool.engine_plugins.vllm.following import (
    FOLLOW_S_MAX,
    Following,
    following,
    wants_report,
)
from kvpool.engine_plugins.vllm.scheduler.pulls import FOLLOW_TURN_S, GIVES_UP_S, Pull, Pulls
from kvpool.errors import InvalidRequest, LimitExceeded
from kvpool.types import NamespaceRecord, PartSpec
from tests.unit.engine_plugins.scheduler.harness import TOKENS, Harness

RECORD = NamespaceRecord({"m": 1}, (PartSpec(8),))
WAIT_S = 1.0
PARAMS = {"kvpool": {"follow_s": 30.0, "source": "a"}}


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (None, None),
        ({}, None),
        ({"do_remote_decode": True}, None),
        ({"kvpool": None}, None),
        ({"kvpool": {"follow_s": 2}}, Following(2.0)),
        (PARAMS, Following(30.0, "a")),
        ({"kvpool": {"follow_s": 2, "source": "a", "computed": True}}, Following(2.0, "a", True)),
        ({"kvpool": {"follow_s": 2, "source": "a", "form": [1]}}, Following(2.0, "a")),
        ({"kvpool": {"follow_s": 2, "report": True}}, Following(2.0)),
        ({"kvpool": {"report": True}}, None),
        ({"kvpool": {"report": True, "form": "a"}}, None),
        ({"kvpool": {"follow_s": FOLLOW_S_MAX}}, Following(FOLLOW_S_MAX)),
    ],
)
def test_what_a_request_may_say(params: Any, said: Following | None) -> None:
    assert following(params) == said


@pytest.mark.parametrize(
    "given",
    [
        *({}, [], "follow", 3, {"follow_s": 0}, {"follow_s": -1}, {"follow_s": "2"}),
        *({"follow_s": FOLLOW_S_MAX + 1}, {"follow_s": float("nan")}, {"follow_s": True}),
        *({"follow_s": 1, "source": 3}, {"follow_s": 1, "source": "x" * 257}),
        *({"form": "a"}, {"report": 1}, {"report": "yes"}, {"report": False}),
        *({"follow_s": 1, "source": 3, "form": "a"}, {"follow_s": 1, "computed": "yes"}),
    ],
)
def test_what_is_not_understood_is_refused(given: Any) -> None:
    with pytest.raises(InvalidRequest, match="kvpool"):
        following({"kvpool": given})


@pytest.mark.parametrize(
    ("params", "wants"),
    [
        *((None, False), ({}, False), ({"kvpool": None}, False), ({"kvpool": {}}, False)),
        *(({"kvpool": {"report": True}}, True), ({"kvpool": {"report": True, "form": 1}}, True)),
        *(({"kvpool": {"follow_s": 2}}, False), ({"kvpool": {"report": False}}, False)),
        *(({"kvpool": {"report": 1}}, False), ({"kvpool": ["report"]}, False)),
    ],
)
def test_who_wants_to_know_what_was_saved(params: Any, wants: bool) -> None:
    assert wants_report(params) is wants


@pytest.fixture
def harness(pool: Any, block_pool: Any, threads: Any) -> Harness:
    """With one other node; what is asked of it happens when the test lets `threads` run."""
    pool.others = 1
    return Harness(pool, block_pool, load_mode="async", threads=threads, follows_max=1)


def test_a_request_waits_for_the_prompt_that_is_being_computed(
    harness: Harness, threads: Any
) -> None:
    request = harness.request("r", 8, params=PARAMS)
    harness.store(request.block_hashes[:2])
    assert harness.half.matched_tokens(request, 0) == (None, False)
    harness.now += 20.0  # far longer than other requests wait
    assert harness.half.matched_tokens(request, 0) == (None, False)
    harness.store_elsewhere(request.block_hashes[2:])
    threads.run()
    assert harness.half.matched_tokens(request, 0) == (8 * TOKENS, True)
    assert harness.pool.follows == [(FOLLOW_TURN_S, "a")]
    assert harness.pool.pulls == []
    counted = harness.half.counters.take()
    assert (counted["pulls"], counted["follows"], counted["pulled_blocks"]) == (1, 1, 6)


def test_nobody_waits_longer_than_the_request_says(harness: Harness, threads: Any) -> None:
    request = harness.request("r", 8, params=PARAMS)
    assert harness.half.matched_tokens(request, 0) == (None, False)
    harness.store(request.block_hashes[:3])
    harness.now += 30.0
    assert harness.half.matched_tokens(request, 0) == (3 * TOKENS, True)
    # And the next requests are pulled for: a prefill that died says nothing of other nodes.
    other = harness.request("s", 8, first=50)
    assert harness.half.matched_tokens(other, 0) == (None, False)


def test_a_node_that_is_alone_follows_what_it_computes_itself(
    pool: Any, block_pool: Any, threads: Any
) -> None:
    harness = Harness(pool, block_pool, load_mode="async", threads=threads)
    request = harness.request("r", 8, params=PARAMS)
    assert harness.half.matched_tokens(request, 0) == (None, False)
    harness.store(request.block_hashes)
    threads.run()
    assert harness.half.matched_tokens(request, 0) == (8 * TOKENS, True)


def test_followers_keep_nobody_from_pulling(harness: Harness, threads: Any) -> None:
    first = harness.request("r", 8, params=PARAMS)
    second = harness.request("s", 8, first=20, params=PARAMS)
    third = harness.request("t", 8, first=40)
    for request in (first, second, third):
        assert harness.half.matched_tokens(request, 0) == (None, False)
    harness.store_elsewhere(first.block_hashes + second.block_hashes + third.block_hashes)
    threads.run()
    assert len(harness.pool.follows) == 1, "one at a time"
    assert harness.half.matched_tokens(third, 0) == (8 * TOKENS, True)
    assert harness.half.matched_tokens(second, 0) == (None, False)
    threads.run()
    assert len(harness.pool.follows) == 2
    assert harness.half.matched_tokens(second, 0) == (8 * TOKENS, True)


def test_a_computed_prompt_is_not_kept_waiting_by_others_that_are_being_computed(
    harness: Harness, threads: Any
) -> None:
    """It would be computed again, since its own wait is short."""
    computed = {"kvpool": {"follow_s": 0.5, "source": "a", "computed": True}}
    first = harness.request("r", 8, params=PARAMS)
    second = harness.request("s", 8, first=20, params=computed)
    for request in (first, second):
        assert harness.half.matched_tokens(request, 0) == (None, False)
    harness.store_elsewhere(second.block_hashes)
    threads.run()
    assert [source for _, source in harness.pool.follows] == ["a", "a"]
    assert harness.half.matched_tokens(second, 0) == (8 * TOKENS, True)


def test_a_request_that_begins_anew_is_not_waited_for_again(harness: Harness, threads: Any) -> None:
    request = harness.request("r", 8, params=PARAMS)
    assert harness.half.matched_tokens(request, 0) == (None, False)
    harness.store_elsewhere(request.block_hashes[:4])
    threads.run()
    assert harness.half.matched_tokens(request, 0) == (4 * TOKENS, True)
    request.num_preemptions += 1
    assert harness.half.matched_tokens(request, 0) == (None, False)
    threads.run()
    assert len(harness.pool.follows) == len(harness.pool.pulls) == 1


def test_what_is_not_understood_is_counted_and_the_request_served(
    harness: Harness, threads: Any
) -> None:
    request = harness.request("r", 8, params={"kvpool": {"follow": True}})
    assert harness.half.matched_tokens(request, 0) == (None, False)
    threads.run()
    assert harness.half.matched_tokens(request, 0) == (0, False)
    assert harness.pool.follows == []
    assert harness.half.counters.take()["bad_requests"] == 1


@pytest.mark.parametrize("how", ["aborted", "reset"])
def test_nothing_is_followed_for_a_request_that_has_gone(
    harness: Harness, threads: Any, how: str
) -> None:
    request = harness.request("r", 8, params=PARAMS)
    assert harness.half.matched_tokens(request, 0) == (None, False)
    if how == "aborted":
        harness.half.request_finished(request, [[]], completed=False)
    else:
        harness.half.reset()
    threads.run()
    assert harness.pool.follows == []


def turns(
    pool: Any, takes_s: float, refuses: bool = False, drop_at: int = 0
) -> tuple[int, list[float]]:
    """A prompt of four blocks, of which two come, at a daemon that follows for `takes_s` at a time.

    drop_at: the turn in which the request ends.
    """
    now = [100.0]
    asked: list[float] = []
    begun: list[Pull] = []

    def follow(ns: Any, keys: bytes, *, wait_s: float, source: str, trace: str) -> int:
        asked.append(wait_s)
        now[0] += takes_s
        if refuses:
            raise LimitExceeded("it follows too many already")
        if len(asked) == drop_at:
            begun[0].dropped = True
        return 2

    pool.follow = follow
    with ThreadPoolExecutor(1) as thread:
        config = PluginConfig(pulls_max=1, follows_max=1, pull_wait_s=WAIT_S)
        pulls = Pulls(pool, thread, config, lambda: now[0])
        pulls.enter(RECORD)
        gate = threading.Event()
        thread.submit(gate.wait)
        pull = pulls.begin(0, bytes(64), following=Following(10.0))
        assert pull is not None
        begun.append(pull)
        gate.set()
        assert pull.future is not None
        return pull.future.result(), asked


def test_a_daemon_is_asked_again_for_as_long_as_the_request_waits(pool: Any) -> None:
    assert turns(pool, 4.0) == (2, [FOLLOW_TURN_S, FOLLOW_TURN_S, 2.0])
    assert turns(pool, 4.0, drop_at=1) == (2, [FOLLOW_TURN_S])


def test_a_daemon_that_gives_up_at_once_is_not_asked_again(pool: Any) -> None:
    assert turns(pool, GIVES_UP_S / 2) == (2, [FOLLOW_TURN_S])
    assert turns(pool, 0.0, refuses=True) == (0, [FOLLOW_TURN_S])

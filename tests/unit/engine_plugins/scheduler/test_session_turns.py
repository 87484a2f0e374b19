"""Turns of sessions: what requests may say, and which blocks daemons hear of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.engine_plugins.vllm.plan import block_key
from kvpool.engine_plugins.vllm.scheduler.session_turns import (
    NAME_MAX,
    SessionTurn,
    session_turn,
)
from kvpool.errors import InvalidRequest
from tests.unit.engine_plugins.scheduler.harness import TOKENS, Harness, hashes, tables

PARAMS = {"kvpool_session": {"id": "s"}}
NOTHING = {"agent": "", "ended": False, "shared": False}


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (None, None),
        ({"kvpool": {"report": True}}, None),
        ({"kvpool_session": None}, None),
        (PARAMS, SessionTurn("s")),
        (
            {
                "kvpool_session": {
                    "id": "s",
                    "agent": "a",
                    "end": True,
                    "more": [1],
                }
            },
            SessionTurn("s", "a", end=True),
        ),
    ],
)
def test_what_a_request_may_say(params: Any, said: SessionTurn | None) -> None:
    assert session_turn(params) == said


@pytest.mark.parametrize(
    "given",
    [
        *({}, [], "s", 3, {"id": ""}, {"id": 3}, {"id": "x" * (NAME_MAX + 1)}, {"id": "a\nb"}),
        *({"id": "s", "agent": 1}, {"id": "s", "agent": "\0"}, {"id": "s", "end": "yes"}),
    ],
)
def test_what_is_not_understood_is_refused_and_costs_the_request_nothing(
    given: Any, pool: Any, block_pool: Any
) -> None:
    with pytest.raises(InvalidRequest, match="kvpool_session"):
        session_turn({"kvpool_session": given})
    harness = Harness(pool, block_pool, load_mode="async")
    served(harness, {"kvpool_session": given})
    assert pool.turns == []
    assert harness.half.counters.take()["bad_requests"] == 1


def served(
    harness: Harness,
    params: Any,
    *,
    blocks: int = 3,
    answer: int = 0,
    completed: bool = True,
    adapter: Any = None,
    name: str = "r",
) -> Any:
    """A request, from its arrival to its end; `answer`: whole blocks of it."""
    request = harness.request(name, blocks, params=params, adapter=adapter)
    table = tables(blocks + answer + 1)
    harness.half.matched_tokens(request, 0)
    harness.half.allocated(request, table, 0)
    harness.end(harness.step(request, request.num_tokens, table))
    for _ in range(answer):
        at = len(request.block_hashes)
        request.block_hashes.append(bytes([at]) * 32)
        request.num_tokens += TOKENS
        harness.end(harness.step(request, TOKENS, table))
    harness.half.request_finished(request, table, completed=completed)
    return request


def keys(blocks: int) -> list[bytes]:
    return [*map(block_key, hashes(blocks))]


def test_the_daemon_hears_of_prompt_and_answer_once(harness: Harness, pool: Any) -> None:
    served(harness, PARAMS, blocks=3, answer=2)
    assert pool.turns == [("s", keys(5), NOTHING)]


def test_the_daemon_hears_all_that_was_said(harness: Harness, pool: Any) -> None:
    said = {"id": "s", "agent": "a", "end": True}
    served(harness, {"kvpool_session": said})
    ((session, _, told),) = pool.turns
    assert (session, told) == (
        "s",
        {"agent": "a", "ended": True, "shared": False},
    )


def test_without_a_session_nothing_is_told(harness: Harness, pool: Any) -> None:
    served(harness, None)
    served(harness, {"kvpool": {"report": True}}, name="other")
    assert pool.turns == []


def test_the_daemon_hears_the_end_of_each_request_that_the_pool_served(
    harness: Harness, pool: Any
) -> None:
    served(harness, PARAMS, name="turn")
    assert pool.ended == [("turn", "s")]
    served(harness, None, name="again")
    served(harness, None, name="nothing", blocks=0)
    assert pool.ended == [("turn", "s")], "the pool gave these nothing, and took nothing of them"


def test_an_aborted_request_is_no_turn(harness: Harness, pool: Any) -> None:
    served(harness, PARAMS, completed=False)
    assert pool.turns == []


def test_a_prompt_without_a_whole_block_is_no_turn(harness: Harness, pool: Any) -> None:
    served(harness, PARAMS, blocks=0)
    assert pool.turns == []


def test_an_engine_that_saves_nothing_tells_of_what_it_used(pool: Any, block_pool: Any) -> None:
    harness = Harness(pool, block_pool, load_mode="async", saves=False)
    served(harness, PARAMS)
    assert pool.turns == [("s", keys(3), NOTHING)]


def test_only_prompts_are_told_of_where_answers_are_not_saved(pool: Any, block_pool: Any) -> None:
    harness = Harness(pool, block_pool, load_mode="async", save_generated=False)
    served(harness, PARAMS, blocks=2, answer=2)
    assert pool.turns == [("s", keys(2), NOTHING)]


def test_adapters_are_strands_of_their_own(harness: Harness, pool: Any) -> None:
    plain, one, other = SessionTurn("s", "a"), b"\1" * 16, b"\2" * 16
    strands = {plain.strand(b""), plain.strand(one), plain.strand(other)}
    assert len(strands) == 3
    assert plain.strand(b"") == "a"
    assert len(SessionTurn("s", "a" * NAME_MAX).strand(one)) <= NAME_MAX


def test_an_engine_in_doubt_of_its_weights_tells_nothing(harness: Harness, pool: Any) -> None:
    assert harness.half.reset()
    request = SimpleNamespace(**vars(harness.request("r", 2, params=PARAMS)))
    request.num_computed_tokens = 2 * TOKENS
    harness.half.request_finished(request, tables(2), completed=True)
    assert pool.turns == []

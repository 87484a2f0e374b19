"""What requests say of their sessions: every place, its precedence, and values that are of no use."""

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvpool.router.http.session_hints import (
    CACHE_CONTROLS_MAX,
    HEADERS,
    KEEP_MAX_S,
    NAME_MAX,
    TENANT_MAX,
    SessionHint,
    hint_of,
    session_name,
)

NAMES = ("kvpool_session", "metadata", "nvext", "agent_context", "agent_hints", "cache_control")
FIELDS = (
    *("prefix_id", "trajectory_id", "prompt_cache_key", "ttl", "type", "messages", "system"),
    *("tools", "content"),
)
PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        ["tool", "person", "1h", "5m", "true", "30", "-1", "x" * 1000, "\ud800", "\0"]
    )
)
JSON = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(NAMES + FIELDS), inner, max_size=6)
    ),
    max_leaves=20,
)
BODIES = st.dictionaries(st.sampled_from(NAMES + FIELDS), JSON, max_size=8)
HEADER_SETS = st.dictionaries(st.sampled_from(HEADERS), st.text(max_size=300), max_size=4)


@given(HEADER_SETS, BODIES, JSON)
def test_whatever_is_said_gives_a_hint_within_its_limits(
    headers: dict[str, str], body: dict[str, Any], own: Any
) -> None:
    hint = hint_of(headers, body, own)
    for name in (hint.session, hint.agent):
        assert len(name) <= NAME_MAX
        assert name.isprintable()
    assert isinstance(hint.ended, bool)
    assert hint.keep_s is None or 0 < hint.keep_s <= KEEP_MAX_S
    assert hint.bad >= 0
    if not hint.session:
        assert hint == SessionHint(keep_s=hint.keep_s, bad=hint.bad)


PLACES: list[tuple[dict[str, str], dict[str, Any], Any]] = [
    ({}, {}, {"id": "own"}),
    ({"x-session-id": "header"}, {}, None),
    ({"x-dynamo-session-id": "dynamo"}, {}, None),
    ({"x-claude-code-session-id": "claude"}, {}, None),
    ({"session-id": "codex"}, {}, None),
    ({}, {"nvext": {"agent_context": {"session_id": "context"}}}, None),
    ({}, {"metadata": {"session_id": "metadata"}}, None),
    ({}, {"nvext": {"agent_hints": {"prefix_id": "prefix"}}}, None),
    ({}, {"session_id": "field"}, None),
    ({}, {"prompt_cache_key": "key"}, None),
]
SAID = [
    *("own", "header", "dynamo", "claude", "codex", "context", "metadata", "prefix", "field", "key")
]


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    both = {**one}
    for name, value in other.items():
        known = both.get(name)
        both[name] = merged(known, value) if isinstance(known, dict) else value
    return both


@pytest.mark.parametrize("first", range(len(PLACES)))
def test_the_first_place_with_a_name_counts(first: int) -> None:
    headers: dict[str, str] = {}
    body: dict[str, Any] = {}
    own: Any = None
    for place in PLACES[first:]:
        headers |= place[0]
        body = merged(body, place[1])
        own = own or place[2]
    hint = hint_of(headers, body, own)
    assert hint.session == SAID[first]
    assert hint.bad == 0


def test_a_key_of_a_prompt_cache_may_be_shared_and_other_names_are_not_unless_they_say_so() -> None:
    assert hint_of({}, {"prompt_cache_key": "k"}).params() == {"id": "k", "shared": True}
    assert hint_of({"x-session-id": "s"}, {"prompt_cache_key": "k"}).params() == {"id": "s"}
    assert hint_of({}, {}, {"id": "s", "shared": True}).params() == {"id": "s", "shared": True}


def test_a_bad_name_is_counted_and_the_next_place_counts() -> None:
    body = {"metadata": {"session_id": 7}, "prompt_cache_key": "key"}
    hint = hint_of({"x-session-id": "x" * (NAME_MAX + 1)}, body, {"id": "a\nb"})
    assert hint == SessionHint("key", bad=3, shared=True)


@pytest.mark.parametrize(
    ("headers", "body", "own", "said"),
    [
        ({}, {}, {"agent": "a"}, {"agent": "a"}),
        ({"x-claude-code-agent-id": "a"}, {}, None, {"agent": "a"}),
        ({}, {"nvext": {"agent_context": {"trajectory_id": "a"}}}, None, {"agent": "a"}),
        ({}, {"metadata": {"agent_id": "a"}}, None, {"agent": "a"}),
        ({}, {}, {"end": True}, {"ended": True}),
        ({"x-dynamo-session-final": "True"}, {}, None, {"ended": True}),
        ({}, {"metadata": {"session_end": "true"}}, None, {"ended": True}),
        ({"x-dynamo-session-final": "true"}, {}, {"end": False}, {"ended": False}),
        ({}, {"metadata": {"session_end": "perhaps"}}, None, {"bad": 1}),
        ({}, {"metadata": "text"}, None, {"bad": 1}),
    ],
)
def test_other_fields(
    headers: dict[str, str], body: dict[str, Any], own: Any, said: dict[str, Any]
) -> None:
    assert hint_of({"x-session-id": "s", **headers}, body, own) == SessionHint("s", **said)


EPHEMERAL = {"type": "ephemeral"}


@pytest.mark.parametrize(
    ("body", "keep_s", "bad"),
    [
        ({}, None, 0),
        ({"cache_control": EPHEMERAL}, 300.0, 0),
        ({"nvext": {"cache_control": {**EPHEMERAL, "ttl": "90s"}}}, 90.0, 0),
        ({"system": [{"text": "t", "cache_control": {**EPHEMERAL, "ttl": "1h"}}]}, 3600.0, 0),
        ({"tools": [{"name": "t", "cache_control": {**EPHEMERAL, "ttl": "5m"}}]}, 300.0, 0),
        (
            {
                "messages": [
                    {"content": [{"cache_control": {**EPHEMERAL, "ttl": "1h"}}, {}]},
                    {"content": "text", "cache_control": EPHEMERAL},
                ]
            },
            3600.0,
            0,
        ),
        ({"cache_control": {**EPHEMERAL, "ttl": 600}}, 600.0, 0),
        ({"cache_control": {**EPHEMERAL, "ttl": "forever"}}, None, 1),
        ({"cache_control": {**EPHEMERAL, "ttl": -5}}, None, 1),
        ({"cache_control": "ephemeral"}, None, 1),
    ],
)
def test_the_longest_ttl_counts(body: dict[str, Any], keep_s: float | None, bad: int) -> None:
    assert hint_of({"x-session-id": "s"}, body) == SessionHint("s", keep_s=keep_s, bad=bad)


def test_a_body_with_very_many_blocks_is_not_read_to_its_end() -> None:
    bad = {"cache_control": 1}
    hint = hint_of({}, {"messages": [bad] * (2 * CACHE_CONTROLS_MAX)})
    assert hint.bad < CACHE_CONTROLS_MAX


def test_what_an_engine_is_told() -> None:
    assert SessionHint("s").params() == {"id": "s"}
    full = SessionHint("s", "a", ended=True, keep_s=300.0, bad=3)
    assert full.params() == {"id": "s", "agent": "a", "end": True}


TENANTS = st.text(min_size=1, max_size=2 * TENANT_MAX)
SESSIONS = st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=NAME_MAX)


@given(TENANTS, SESSIONS, TENANTS, SESSIONS)
def test_no_two_tenants_have_a_session_in_common(
    one: str, its: str, other: str, others: str
) -> None:
    names = session_name(one, its), session_name(other, others)
    assert (names[0] == names[1]) == ((one, its) == (other, others))
    for name in names:
        assert len(name) <= 256
        assert name.isprintable()


def test_tenants_whose_names_could_be_mistaken() -> None:
    assert session_name("a", "b/c") == "a/b/c"
    assert session_name("a/b", "c") != "a/b/c"
    assert session_name("", "c") == "c"

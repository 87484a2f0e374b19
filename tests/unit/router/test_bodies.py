"""What is read of a body: never more than it says, and nothing that comes over HTTP breaks it."""

import json
import tracemalloc
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from kvpool.router.http.bodies import (
    BadRequest,
    Body,
    Kind,
    error_body,
    limited,
    parse,
    parsed_bytes,
    prompt_only,
    segment,
    with_field,
    with_params,
)

MODELS = ("tiny", "tiny-lora")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [
        "model", "prompt", "messages", "stream", "max_tokens", "max_completion_tokens", "n", "best_of",
        "echo", "suffix", "logprobs", "prompt_logprobs", "priority", "user", "tools", "tool_choice",
        "stream_options", "cache_salt", "kv_transfer_params", "response_format", "session_id",
    ]
)  # fmt: skip


def read(value: dict[str, Any], kind: Kind = Kind.COMPLETIONS) -> Body:
    return parse(kind, json.dumps({"model": "tiny", **value}).encode(), MODELS)


def chat(*contents: object, **value: Any) -> Body:
    messages = [{"role": "user", "content": content} for content in contents]
    return read({"messages": messages, **value}, Kind.CHAT)


def read_or_refused(kind: Kind, raw: bytes) -> Body | BadRequest:
    try:
        return parse(kind, raw, MODELS)
    except BadRequest as error:
        return error


@given(st.binary(max_size=200), st.sampled_from(Kind))
def test_any_bytes_are_read_or_refused(raw: bytes, kind: Kind) -> None:
    found = read_or_refused(kind, raw)
    if isinstance(found, BadRequest):
        assert json.loads(error_body(found.status, str(found), found.type, found.param))
    else:
        assert found.model in MODELS


@given(st.dictionaries(FIELDS, JSON, max_size=8), st.sampled_from(Kind))
def test_any_object_is_read_or_refused(value: dict[str, Any], kind: Kind) -> None:
    raw = json.dumps({"model": "tiny", **value}).encode()
    body = read_or_refused(kind, raw)
    if isinstance(body, BadRequest):
        return
    assert body.raw == raw
    assert body.tokens_guess > 0
    assert body.output_tokens is None or body.output_tokens >= 0
    hash(body.session)
    # What is made of it is JSON, too, and for the same model.
    assert json.loads(prompt_only(body))["max_tokens"] == 1
    assert json.loads(segment(body, [1, 2]))["model"] == body.model
    more = with_field(body, "kv_transfer_params", {"kvpool": {"follow_s": 1.0}})
    assert json.loads(more) == {
        **json.loads(raw),
        "kv_transfer_params": {"kvpool": {"follow_s": 1.0}},
    }


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\xff\xfe",
        b'{"a":"\xff"}',
        b"{}x",
    ],
)
def test_what_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(Kind.CHAT, raw, MODELS)
    assert caught.value.status == 400


def test_a_model_that_nobody_serves_is_not_found() -> None:
    with pytest.raises(BadRequest) as caught:
        parse(Kind.CHAT, b'{"model": "other"}', MODELS)
    assert (caught.value.status, caught.value.type, caught.value.param) == (
        404,
        "NotFoundError",
        "model",
    )


@pytest.mark.parametrize("model", [["tiny"], {"a": 1}, 7, True])
def test_a_model_that_is_no_text_is_not_found(model: object) -> None:
    with pytest.raises(BadRequest):
        parse(Kind.CHAT, json.dumps({"model": model}).encode(), MODELS)


def test_without_a_model_the_only_one_is_meant() -> None:
    assert parse(Kind.COMPLETIONS, b'{"prompt": "x"}', ["tiny"]).model == "tiny"
    with pytest.raises(BadRequest):
        parse(Kind.COMPLETIONS, b'{"prompt": "x"}', MODELS)


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": ["one", "two"]},
        {"prompt": ["one"]},
        {"prompt": [[1, 2], [3]]},
        {"prompt": []},
        {"prompt": [1, True]},
        {},
        {"prompt": "x", "echo": True},
        {"prompt": "x", "suffix": "y"},
        {"prompt": "x", "prompt_logprobs": 0},
        {"prompt": "x", "truncate_prompt_tokens": 5},
        {"prompt": "x", "use_beam_search": True},
        {"prompt": "x", "prompt_embeds": "AAAA"},
        {"prompt": "x", "kv_transfer_params": {"do_remote_decode": True}},
    ],
)
def test_what_one_engine_must_serve(value: dict[str, Any]) -> None:
    assert read(value).whole


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": "x"},
        {"prompt": [1, 2, 3]},
        {"prompt": "x", "n": 3, "logprobs": 5},
        {"prompt": "x", "echo": False, "suffix": None, "best_of": 2},
    ],
)
def test_what_may_be_computed_ahead(value: dict[str, Any]) -> None:
    body = read(value)
    assert not body.whole and body.segments


def test_images_are_computed_by_their_own_body() -> None:
    image = [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    body = chat(image)
    assert not body.whole and not body.segments
    assert chat("hello", [{"type": "text", "text": "?"}]).segments


@pytest.mark.parametrize(
    "value",
    [
        {"reasoning_effort": "low"},
        {"tools": [], "tool_choice": "required"},
        {"documents": [{"text": "x"}]},
        {"response_format": {"type": "json_object"}},
    ],
)
def test_what_templates_may_see_is_computed_by_its_own_body(value: dict[str, Any]) -> None:
    assert not chat("hello", **value).segments


def test_tools_that_the_model_may_choose_are_tokens_like_others() -> None:
    body = chat("hello", tools=[{"type": "function"}], tool_choice="auto")
    assert body.segments and not body.whole


@pytest.mark.parametrize(
    ("value", "tokens"),
    [
        ({}, 16),
        ({"n": 3}, 48),
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 7}, 7),
        ({"max_tokens": 5, "n": 3}, 15),
        ({"max_tokens": 5, "n": 2, "best_of": 4}, 20),
        ({"max_tokens": "5"}, None),
        ({"max_tokens": -1}, None),
        ({"max_tokens": True}, None),
        ({"max_tokens": 5, "n": 10**9}, 5 * 1024),
    ],
)
def test_how_many_tokens_are_asked_for(value: dict[str, Any], tokens: int | None) -> None:
    assert read({"prompt": "x", **value}).output_tokens == tokens
    assert chat("x").output_tokens is None


def test_priorities_are_the_other_way_round_than_in_vllm() -> None:
    assert read({"prompt": "x", "priority": -3}).priority == 3
    assert read({"prompt": "x"}).priority is None


def test_an_engine_is_told_no_higher_priority_than_the_sender_may_ask_for() -> None:
    for asked, most, told in ((-9, 3, -3), (-3, 3, -3), (4, 3, 4), (-1, 0, 0), (None, 0, None)):
        body = limited(read({"prompt": "x", "priority": asked, "user": "u"}), most)
        sent = json.loads(body.raw)
        assert sent.get("priority") == body.value.get("priority") == told
        assert sent["user"] == "u"
        assert body.priority == (None if told is None else -told)
    for wrong in ("-9", -9.0, True):
        with pytest.raises(BadRequest, match="priority"):
            limited(read({"prompt": "x", "priority": wrong}), 100)


def test_a_conversation_is_known_by_how_it_begins_or_by_what_it_is_called() -> None:
    first = chat("system", "question")
    assert chat("system", "question", "answer", "next").session == first.session
    assert chat("system", "other").session != first.session
    assert chat("a", user="me").session == chat("b", user="me").session == "me"


def test_a_segment_is_in_the_cache_that_the_body_names() -> None:
    body = read({"prompt": "x", "cache_salt": "s", "priority": 2, "temperature": 0.7, "n": 3})
    assert json.loads(segment(body, [4, 5])) == {
        "model": "tiny",
        "prompt": [4, 5],
        "max_tokens": 1,
        "temperature": 0,
        "stream": False,
        "cache_salt": "s",
        "priority": 2,
    }


def test_the_prompt_alone_asks_for_one_token_and_no_stream() -> None:
    body = chat(
        "hello",
        stream=True,
        stream_options={"include_usage": True},
        return_token_ids=True,
        max_completion_tokens=9,
        n=2,
    )
    value = json.loads(prompt_only(body))
    assert value == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "stream": False,
        "max_tokens": 1,
        "n": 1,
    }


@pytest.mark.parametrize(
    ("own", "sent"),
    [
        ({"do_remote_decode": True}, {"do_remote_decode": True, "kvpool": {"a": 1}}),
        ({"kvpool": {"follow_s": 9}, "x": [2]}, {"kvpool": {"a": 1}, "x": [2]}),
        (None, {"kvpool": {"a": 1}}),
        ("x", {"kvpool": {"a": 1}}),
    ],
)
def test_a_clients_own_transfer_parameters_stay_beside_the_routers(own: Any, sent: Any) -> None:
    body = chat("hello", kv_transfer_params=own)
    params = {"kvpool": {"a": 1}}
    assert json.loads(prompt_only(body, params))["kv_transfer_params"] == sent
    whole = {**json.loads(body.raw), "kv_transfer_params": sent}
    assert json.loads(with_params(body, params)) == whole


@pytest.mark.parametrize(
    ("own", "rest", "whole"),
    [
        ({"kvpool_session": {"id": "s"}}, None, False),
        ({"kvpool_session": None}, None, False),
        ({"kvpool_session": {"id": "s"}, "x": [2]}, {"x": [2]}, True),
    ],
)
def test_what_it_says_of_its_session_is_taken_out(own: Any, rest: Any, whole: bool) -> None:
    body = chat("hello", kv_transfer_params=own)
    assert body.own_hint == own["kvpool_session"]
    assert body.whole is whole
    assert body.value["kv_transfer_params"] == json.loads(body.raw)["kv_transfer_params"] == rest
    told = {"kvpool_session": {"id": "t/s"}}
    sent = json.loads(with_params(body, told))
    assert sent["kv_transfer_params"] == {**(rest or {}), **told}
    assert {**sent, "kv_transfer_params": rest} == json.loads(body.raw)


def test_several_prompts_are_no_turn_of_a_session() -> None:
    def is_turn(kind: Kind, value: dict[str, Any]) -> bool:
        return parse(kind, json.dumps(value).encode(), ["tiny"]).is_turn

    assert is_turn(Kind.COMPLETIONS, {"prompt": "one"})
    assert is_turn(Kind.COMPLETIONS, {"prompt": [1, 2]})
    assert not is_turn(Kind.COMPLETIONS, {"prompt": ["one", "two"]})
    assert is_turn(Kind.MESSAGES, {"messages": []})
    assert not is_turn(Kind.EMBEDDINGS, {"input": "one"})


def test_a_field_is_added_without_touching_the_rest() -> None:
    raw = b'{"model": "tiny" ,"prompt":"\\u00e9}", "seed": 1e2}\n '
    body = parse(Kind.COMPLETIONS, raw, MODELS)
    assert (
        with_field(body, "x", 1) == b'{"model": "tiny" ,"prompt":"\\u00e9}", "seed": 1e2,"x":1}\n '
    )
    empty = parse(Kind.COMPLETIONS, b"{}", ["tiny"])
    assert with_field(empty, "x", [1]) == b'{"x":[1]}'


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": "word " * 100_000},
        {"prompt": [n * 7 % 30_000 for n in range(50_000)]},
        {"prompt": [[] for _ in range(50_000)]},
        {"prompt": [{"": n} for n in range(50_000)]},
        {"prompt": [[n, str(n)] for n in range(50_000)]},
        {"messages": [{"role": "user", "content": str(n)} for n in range(10_000)]},
    ],
)
def test_what_a_parsed_body_takes_is_known_before(value: dict[str, Any]) -> None:
    """By the allocator's own count."""
    raw = msgspec.json.encode(value)
    tracemalloc.start()
    try:
        kept = msgspec.json.decode(raw)
        took, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept
    assert took <= parsed_bytes(raw) + 10_000
    assert parsed_bytes(raw) <= 5 * took + len(raw), "and not far from it"

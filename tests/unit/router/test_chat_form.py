"""Chats that are made of messages and responses, by what vLLM makes of them; real engines compare tokens elsewhere."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.router.prompts.chat_form import of_messages, of_responses
from kvpool.router.prompts.tokens import question

CALL = {"id": "t", "type": "function", "function": {"name": "f", "arguments": '{"a": "ü"}'}}
CALL_ASCII = {**CALL, "function": {"name": "f", "arguments": '{"a": "\\u00fc"}'}}
SCHEMA = {"type": "object"}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": SCHEMA, "strict": None},
}
TEXT = {"type": "text", "text": "x"}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://a/b.png"}}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    ("body", "chat"),
    [
        ({"messages": [user("a")]}, {"messages": [user("a")]}),
        ({"messages": [user([TEXT])]}, {"messages": [user("x")]}),
        ({"messages": [user([TEXT, TEXT])]}, {"messages": [user([TEXT, TEXT])]}),
        (
            {"system": "s", "messages": [user("a")]},
            {"messages": [{"role": "system", "content": "s"}, user("a")]},
        ),
        (
            {
                "system": [{"type": "text", "text": "x-anthropic-billing-header: 5"}, TEXT, TEXT],
                "messages": [user("a")],
            },
            {"messages": [{"role": "system", "content": "xx"}, user("a")]},
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "hm"},
                            TEXT,
                            {"type": "tool_use", "id": "t", "name": "f", "input": {"a": "ü"}},
                        ],
                    },
                    user(
                        [{"type": "tool_result", "tool_use_id": "t", "content": [TEXT, TEXT]}, TEXT]
                    ),
                ]
            },
            {
                "messages": [
                    {
                        "role": "assistant",
                        "reasoning": "hm",
                        "tool_calls": [CALL_ASCII],
                        "content": "x",
                    },
                    {"role": "tool", "tool_call_id": "t", "content": "x\nx"},
                    user("x"),
                ]
            },
        ),
        (
            {
                "messages": [user("a")],
                "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
                "thinking": {"type": "disabled"},
            },
            {"messages": [user("a")], "tools": [TOOL], "reasoning_effort": "none"},
        ),
        ({"messages": [user([IMAGE])]}, None),
        ({"messages": [user([{"type": "tool_result", "content": [IMAGE]}])]}, None),
        ({"messages": [user([{"type": "new"}])]}, None),
        ({"messages": 5}, None),
        ({}, None),
    ],
)
def test_of_messages(body: dict[str, Any], chat: dict[str, Any] | None) -> None:
    assert of_messages(body) == chat


@pytest.mark.parametrize(
    ("body", "chat"),
    [
        ({"input": "a"}, {"messages": [user("a")]}),
        (
            {"input": "a", "instructions": "i", "reasoning": {"effort": "low"}},
            {
                "messages": [{"role": "system", "content": "i"}, user("a")],
                "reasoning_effort": "low",
            },
        ),
        (
            {"input": [user([{"type": "input_text", "text": "x"}])]},
            {"messages": [user([TEXT])]},
        ),
        (
            {
                "input": [
                    user("a"),
                    {"type": "reasoning", "summary": [], "content": [{"text": "hm"}]},
                    {"type": "message", "role": "assistant", "content": [{"text": "x"}]},
                    {
                        "type": "function_call",
                        "call_id": "t",
                        "name": "f",
                        "arguments": '{"a": "ü"}',
                    },
                    {"type": "function_call_output", "call_id": "t", "output": "o"},
                ],
                "tools": [
                    {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA}
                ],
            },
            {
                "messages": [
                    user("a"),
                    {
                        "role": "assistant",
                        "reasoning": "hm",
                        "content": "x",
                        "tool_calls": [CALL],
                    },
                    {"role": "tool", "tool_call_id": "t", "content": "o"},
                ],
                "tools": [TOOL],
            },
        ),
        ({"input": "a", "previous_response_id": "resp_1"}, None),
        ({"input": "a", "tools": [{"type": "web_search"}]}, None),
        ({"input": [user([{"type": "input_image", "image_url": "x"}])]}, None),
        (
            {"input": [{"role": "assistant", "content": "x", "status": "incomplete"}]},
            None,
        ),
        ({"input": [{"role": "assistant", "content": []}]}, None),
        ({"input": 5}, None),
        ({}, None),
    ],
)
def test_of_responses(body: dict[str, Any], chat: dict[str, Any] | None) -> None:
    assert of_responses(body) == chat


def test_their_prompts_are_asked_for_like_those_of_chats() -> None:
    asked = question({"messages": [user("a")], "thinking": {"type": "disabled"}}, "messages")
    kwargs = {"reasoning_effort": "none", "enable_thinking": False}
    assert asked == {"messages": [user("a")], "chat_template_kwargs": kwargs}
    assert question({"input": "a"}, "responses") == {"messages": [user("a")]}
    assert question({"input": 5}, "responses") is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "type",
                    "role",
                    "content",
                    "text",
                    "input",
                    "messages",
                    "tools",
                    "system",
                    "thinking",
                ]
            )
            | st.text(max_size=2),
            inner | st.sampled_from(["text", "message", "user", "assistant", "reasoning"]),
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "messages",
                "input",
                "system",
                "tools",
                "thinking",
                "output_config",
                "reasoning",
                "instructions",
            ]
        ),
        JSON,
    )
)
def test_any_object_is_a_chat_or_none(body: dict[str, Any]) -> None:
    for chat in (of_messages(body), of_responses(body)):
        assert chat is None or isinstance(chat["messages"], list)

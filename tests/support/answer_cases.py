"""The requests of the comparison: each API with what its clients use, and much that is wrong.

Nothing is drawn: temperature 0, or a seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.support.answers import Case

MODEL, ADAPTER, EMBEDDING = "tiny", "tiny-adapter", "tiny-embedding"
SECOND = "tiny-second"
"""Another name of the model."""

TEXT = "A prompt that is longer than two blocks of an engine, so that there is something to cache."
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 4}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Of a city.", "parameters": WEATHER},
}
NAMED = {"type": "function", "function": {"name": "weather"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}
ASKED = [{"role": "system", "content": TEXT}, {"role": "user", "content": "And then?"}]
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Bonn"}'},
}
SEVERAL = [
    *ASKED,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
]
PARTS = [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]
IMAGE = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "What is this?"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        ],
    }
]

POOLING_PATHS = (
    *("/v1/embeddings", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
    *("/classify", "/pooling"),
)

OWN_WORDS = "the router's own words"
NO_ALIASES = "the router does not list aliases"
AMBIGUOUS = "with several models, one has to be named"
ANY_TYPE = "the router takes any content type"
ALWAYS_ONE_FORM = "all errors of the router have one form"
ANTHROPICS = "in the form that all other errors have here, Anthropic's"
NAMES_IT = "the router says which parameter it is"
ALL_ENGINES = "of all engines, without `root` and `permission`"
ITS_OWN_HEALTH = "the router's own health"
ONE_ENGINES = "the load of one engine says nothing of the others"
OTHER_ENGINE = "the router knows no other engine for it"

_MESSAGE, _TYPE, _PARAM = "body.error.message", "body.error.type", "body.error.param"
NO_HEADERS = dict.fromkeys(("header vary", "header x-request-id"), "")
"""Of the engine, in an answer that is the router's own. Said once, on the page."""
UNKNOWN = {_MESSAGE: NO_ALIASES, **NO_HEADERS}
UNKNOWN_POOLING = {_PARAM: NAMES_IT, **NO_HEADERS}
MALFORMED = {_MESSAGE: OWN_WORDS, _TYPE: OWN_WORDS, _PARAM: OWN_WORDS, **NO_HEADERS}


def all_cases() -> list[Case]:
    return [
        *completions(),
        *chats(),
        *responses(),
        *messages(),
        *poolings(),
        *tokens(),
        *others(),
    ]


def of_embeddings(case: Case) -> bool:
    """Whether it is for the engine of embeddings: by its model, or if that is wrong by its path."""
    model = case.body.get("model") if isinstance(case.body, dict) else None
    if model in (MODEL, SECOND, ADAPTER):
        return False
    return model == EMBEDDING or case.path in POOLING_PATHS


def _of(path: str, whole: dict[str, Any], *cases: tuple[Any, ...]) -> Iterator[Case]:
    """Cases of a path: a name, the fields beside those of `whole`, and maybe what differs. None: left out."""
    for name, more, *rest in cases:
        body = more
        if isinstance(more, dict):
            body = {key: item for key, item in {**whole, **more}.items() if item is not None}
        yield Case(name, path, body, differs=rest[0] if rest else {})


def _wrong(path: str, good: dict[str, Any], aliases: dict[str, str] = UNKNOWN) -> Iterator[Case]:
    """What is wrong in any API."""
    yield from _of(
        path,
        good,
        ("a model that nobody serves", {"model": "nobody"}, aliases),
        ("an unknown field", {"no_such_field": {"a": 1}}),
    )


def _malformed(path: str, differs: dict[str, str] = MALFORMED) -> Iterator[Case]:
    yield from _of(
        path,
        {},
        ("broken JSON", b'{"model": "tiny", ', differs),
        ("no object", b"[1, 2]", differs),
        ("nothing", b"", differs),
    )


def completions() -> Iterator[Case]:
    path = "/v1/completions"
    good: dict[str, Any] = {"model": MODEL, "prompt": TEXT, "max_tokens": 6, "temperature": 0}
    stream = {"stream": True}
    with_usage = {"stream": True, "stream_options": {"include_usage": True}}
    yield from _of(
        path,
        good,
        ("one text", {}),
        ("streamed", stream),
        ("streamed, with usage", with_usage),
        (
            "streamed, with usage in each event",
            {
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            },
        ),
        ("token ids as the prompt", {"prompt": list(range(3, 80))}),
        ("several texts", {"prompt": [TEXT, "Another."]}),
        ("several lists of token ids, streamed", {"prompt": [[5, 6], [7, 8, 9]], **stream}),
        ("`n` of 2", {"n": 2, "temperature": 1, "seed": 7}),
        ("`n` of 2, streamed", {"n": 2, "temperature": 1, "seed": 7, **with_usage}),
        ("`logprobs`", {"logprobs": 3}),
        ("`logprobs`, streamed", {"logprobs": 1, **stream}),
        ("`echo`", {"echo": True}),
        ("`echo` with `logprobs`", {"echo": True, "logprobs": 1, "max_tokens": 1}),
        ("`echo` alone", {"echo": True, "max_tokens": 0}),
        ("`prompt_logprobs`", {"prompt_logprobs": 1}),
        ("`stop`", {"stop": ["e", "a"], "max_tokens": 40}),
        ("`stop_token_ids`, included", {"stop_token_ids": [7], "include_stop_str_in_output": True}),
        ("`logit_bias`", {"logit_bias": {"70": 100}}),
        ("`seed`", {"seed": 3, "temperature": 1}),
        ("`min_tokens` and `ignore_eos`", {"min_tokens": 6, "ignore_eos": True}),
        ("`return_token_ids`", {"return_token_ids": True}),
        ("`return_token_ids`, streamed", {"return_token_ids": True, **stream}),
        ("beam search", {"use_beam_search": True, "n": 2}),
        ("`truncate_prompt_tokens`", {"truncate_prompt_tokens": 9}),
        ("`add_special_tokens`", {"add_special_tokens": False}),
        ("`cache_salt`", {"cache_salt": "salt"}),
        ("a session", {"prompt_cache_key": "chat", "metadata": {"session_end": "true"}}),
        ("a guided choice", {"structured_outputs": {"choice": ["yes", "no"]}}),
        ("a guided regular expression", {"structured_outputs": {"regex": "[a-c]{3}"}}),
        ("JSON by a schema", {"response_format": SCHEMA, "max_tokens": 24}),
        ("an adapter", {"model": ADAPTER}),
        ("another name of the model", {"model": SECOND}),
        ("no `max_tokens`", {"max_tokens": None, "ignore_eos": True}),
        ("an empty text", {"prompt": ""}),
        ("an empty list", {"prompt": []}),
        ("no prompt", {"prompt": None}),
        ("a number as the prompt", {"prompt": 5}),
        ("token ids that are none", {"prompt": [-1, 2]}),
        ("token ids beyond the vocabulary", {"prompt": [100000]}),
        ("a prompt that is too long", {"prompt": [5] * 5000}),
        ("more tokens than the model has room for", {"max_tokens": 100000}),
        ("`max_tokens` below 0", {"max_tokens": -1}),
        ("`max_tokens` that is text", {"max_tokens": "many"}),
        ("`temperature` below 0", {"temperature": -1}),
        ("`top_p` of 2", {"top_p": 2}),
        ("`n` of 0", {"n": 0}),
        ("`logprobs` of 1000", {"logprobs": 1000}),
        ("`logprobs` below 0", {"logprobs": -5}),
        ("`stop` that is a number", {"stop": 5}),
        ("`stream` that is text", {"stream": "perhaps"}),
        ("`stream_options` without `stream`", {"stream_options": {"include_usage": True}}),
        ("`suffix`", {"suffix": "end"}),
        ("`best_of`", {"best_of": 2}),
        ("`priority` of an engine without priorities", {"priority": 3}),
        ("`cache_salt` that is empty", {"cache_salt": ""}),
        ("a wrong schema", {"response_format": {"type": "json_schema"}}),
        ("a wrong regular expression", {"structured_outputs": {"regex": "("}}),
        ("`kv_transfer_params` that are text", {"kv_transfer_params": "x"}),
        ("an embedding model", {"model": EMBEDDING}),
    )
    yield from _wrong(path, good)
    yield from _of(
        *(path, good),
        (
            "no model",
            {"model": None},
            {**dict.fromkeys(("status", "body*"), AMBIGUOUS), **NO_HEADERS},
        ),
    )
    yield from _malformed(path)


def chats() -> Iterator[Case]:
    path = "/v1/chat/completions"
    good: dict[str, Any] = {"model": MODEL, "messages": ASKED, "max_tokens": 6, "temperature": 0}
    stream = {"stream": True}
    with_usage = {"stream": True, "stream_options": {"include_usage": True}}
    long = {"max_tokens": 90}
    yield from _of(
        path,
        good,
        ("a conversation", {}),
        ("streamed", stream),
        ("streamed, with usage", with_usage),
        ("`n` of 2", {"n": 2, "temperature": 1, "seed": 7}),
        ("`n` of 2, streamed", {"n": 2, "temperature": 1, "seed": 7, **with_usage}),
        ("`logprobs`", {"logprobs": True, "top_logprobs": 2}),
        ("`logprobs`, streamed", {"logprobs": True, **stream}),
        ("`prompt_logprobs`", {"prompt_logprobs": 1}),
        ("`echo`", {"echo": True}),
        ("`max_completion_tokens`", {"max_tokens": None, "max_completion_tokens": 3}),
        ("`stop`", {"stop": "e", "max_tokens": 40}),
        ("text in parts", {"messages": PARTS}),
        ("tools", {"tools": [TOOL]}),
        ("tools, streamed", {"tools": [TOOL], **with_usage}),
        ("`tool_choice` `none`", {"tools": [TOOL], "tool_choice": "none"}),
        ("`tool_choice` `required`", {"tools": [TOOL], "tool_choice": "required", **long}),
        ("`tool_choice` by name", {"tools": [TOOL], "tool_choice": NAMED, **long}),
        (
            "`tool_choice` by name, streamed",
            {"tools": [TOOL], "tool_choice": NAMED, **long, **with_usage},
        ),
        ("answers of tools", {"messages": SEVERAL, "tools": [TOOL]}),
        ("JSON by a schema", {"response_format": SCHEMA, **long}),
        ("JSON by a schema, streamed", {"response_format": SCHEMA, **long, **stream}),
        ("any JSON", {"response_format": {"type": "json_object"}}),
        ("a guided choice", {"structured_outputs": {"choice": ["yes", "no"]}}),
        ("`reasoning_effort`", {"reasoning_effort": "low"}),
        ("`chat_template_kwargs`", {"chat_template_kwargs": {"enable_thinking": False}}),
        (
            "an answer that is continued",
            {
                "messages": [*ASKED, {"role": "assistant", "content": "Then"}],
                "continue_final_message": True,
                "add_generation_prompt": False,
            },
        ),
        ("`return_token_ids`", {"return_token_ids": True}),
        ("`user`", {"user": "somebody"}),
        ("a session", {"metadata": {"session_id": "chat", "pause": "tool"}}),
        (
            "a session, streamed",
            {"kv_transfer_params": {"kvpool_session": {"id": "chat"}}, **stream},
        ),
        ("an adapter", {"model": ADAPTER}),
        ("an adapter, streamed", {"model": ADAPTER, **stream}),
        ("no `max_tokens`, stopped by a token", {"max_tokens": None, "stop": ["e", " ", "a", "o"]}),
        ("no messages", {"messages": None}),
        ("an empty list of messages", {"messages": []}),
        ("messages that are text", {"messages": "hello"}),
        ("a message that is a number", {"messages": [5]}),
        ("a message without a role", {"messages": [{"content": "x"}]}),
        ("a role that does not exist", {"messages": [{"role": "nobody", "content": "x"}]}),
        ("content that is a number", {"messages": [{"role": "user", "content": 5}]}),
        (
            "a part of an unknown type",
            {"messages": [{"role": "user", "content": [{"type": "no"}]}]},
        ),
        ("an image for a model of text", {"messages": IMAGE}),
        ("`tool_choice` without tools", {"tool_choice": "required"}),
        (
            "`tool_choice` of an unknown tool",
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "no"}}},
        ),
        ("tools that are text", {"tools": "weather"}),
        ("`top_logprobs` without `logprobs`", {"top_logprobs": 2}),
        ("`top_logprobs` below 0", {"logprobs": True, "top_logprobs": -2}),
        ("`temperature` that is text", {"temperature": "hot"}),
        ("`n` of 0", {"n": 0}),
        ("`stream_options` without `stream`", {"stream_options": {"include_usage": True}}),
        ("a wrong schema", {"response_format": {"type": "json_schema", "json_schema": 5}}),
        ("a format that does not exist", {"response_format": {"type": "poem"}}),
        ("a template of the client's", {"chat_template": "{{ messages }}"}),
        ("too long", {"messages": [{"role": "user", "content": "x" * 5000}]}),
        ("an embedding model", {"model": EMBEDDING}),
    )
    yield from _wrong(path, good)
    yield from _malformed(path)


def responses() -> Iterator[Case]:
    path = "/v1/responses"
    good: dict[str, Any] = {
        "model": MODEL,
        "input": TEXT,
        "max_output_tokens": 6,
        "temperature": 0,
    }
    tool = {"type": "function", "name": "weather", "parameters": WEATHER}
    asked = [
        {"role": "user", "content": [{"type": "input_text", "text": TEXT}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    ]
    yield from _of(
        path,
        good,
        ("one text", {}),
        ("streamed", {"stream": True}),
        ("a session", {"metadata": {"session_id": "chat", "pause": "tool"}}),
        ("`instructions`", {"instructions": "Be brief."}),
        ("items", {"input": asked, "tools": [tool]}),
        ("tools, streamed", {"tools": [tool], "stream": True}),
        (
            "`tool_choice` `required`",
            {"tools": [tool], "tool_choice": "required", "max_output_tokens": 90},
        ),
        (
            "JSON by a schema",
            {
                "text": {"format": {"type": "json_schema", "name": "w", "schema": WEATHER}},
                "max_output_tokens": 90,
            },
        ),
        ("`top_logprobs`", {"top_logprobs": 1, "include": ["message.output_text.logprobs"]}),
        ("`metadata`", {"metadata": {"a": "b"}}),
        ("`store` of false", {"store": False}),
        ("an adapter", {"model": ADAPTER}),
        ("no input", {"input": None}),
        ("input that is a number", {"input": 5}),
        ("an item of an unknown type", {"input": [{"type": "no"}]}),
        ("`previous_response_id` of nothing", {"previous_response_id": "resp_nothing"}),
        ("`background` without `store`", {"background": True, "store": False}),
        ("`temperature` below 0", {"temperature": -1}),
        ("too long", {"input": "x" * 5000}),
    )
    yield from _wrong(path, good)
    yield from _malformed(path)


def messages() -> Iterator[Case]:
    path = "/v1/messages"
    user = [{"role": "user", "content": TEXT}]
    good: dict[str, Any] = {
        "model": MODEL,
        "messages": user,
        "max_tokens": 6,
        "temperature": 0,
    }
    tool = {"name": "weather", "description": "Of a city.", "input_schema": WEATHER}
    several = [
        *user,
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bonn"}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "rain"}],
        },
    ]
    unknown = UNKNOWN
    malformed = {"body.type": ANTHROPICS, **MALFORMED, "body.error.code": ANTHROPICS}
    yield from _of(
        path,
        good,
        ("a conversation", {}),
        ("streamed", {"stream": True}),
        ("a session", {"metadata": {"session_id": "chat"}}),
        ("`system`", {"system": "Be brief."}),
        ("`system` in parts", {"system": [{"type": "text", "text": "Be brief."}]}),
        ("tools", {"tools": [tool]}),
        (
            "`tool_choice` `any`",
            {"tools": [tool], "tool_choice": {"type": "any"}, "max_tokens": 90},
        ),
        (
            "`tool_choice` by name, streamed",
            {
                "tools": [tool],
                "tool_choice": {"type": "tool", "name": "weather"},
                "max_tokens": 90,
                "stream": True,
            },
        ),
        ("answers of tools", {"messages": several, "tools": [tool]}),
        ("`stop_sequences`", {"stop_sequences": ["e"], "max_tokens": 40}),
        ("`thinking`", {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
        ("an adapter", {"model": ADAPTER}),
        ("no `max_tokens`", {"max_tokens": None}),
        ("no messages", {"messages": None}),
        ("a role that does not exist", {"messages": [{"role": "nobody", "content": "x"}]}),
        ("`max_tokens` of 0", {"max_tokens": 0}),
        ("`temperature` below 0", {"temperature": -1}),
        ("too long", {"messages": [{"role": "user", "content": "x" * 5000}]}),
    )
    yield from _wrong(path, good, unknown)
    yield from _malformed(path, malformed)
    path = "/v1/messages/count_tokens"
    yield from _of(
        path,
        {"model": MODEL, "messages": user},
        ("a conversation", {}),
        ("`system` and tools", {"system": "Be brief.", "tools": [tool]}),
        ("no messages", {"messages": None}),
        ("a model that nobody serves", {"model": "nobody"}, unknown),
    )


def poolings() -> Iterator[Case]:
    good: dict[str, Any] = {"model": EMBEDDING, "input": TEXT}
    yield from _of(
        "/v1/embeddings",
        good,
        ("one text", {}),
        ("several texts", {"input": [TEXT, "Another."]}),
        ("token ids", {"input": [5, 6, 7]}),
        ("several lists of token ids", {"input": [[5, 6], [7]]}),
        ("base64", {"encoding_format": "base64"}),
        ("bytes", {"encoding_format": "bytes"}),
        ("bytes without their description", {"encoding_format": "bytes_only"}),
        ("a conversation", {"input": None, "messages": ASKED}),
        ("`dimensions`", {"dimensions": 16}),
        ("`truncate_prompt_tokens`", {"truncate_prompt_tokens": 5}),
        ("no input", {"input": None}),
        ("an empty list", {"input": []}),
        ("too long", {"input": "x" * 5000}),
        ("a format that does not exist", {"encoding_format": "poem"}),
        ("a model that generates", {"model": MODEL}),
    )
    yield from _wrong("/v1/embeddings", good, UNKNOWN_POOLING)
    yield from _malformed("/v1/embeddings")
    scored = {"model": EMBEDDING, "queries": "rain", "documents": ["sun", "rain"]}
    for path in ("/score", "/v1/score"):
        yield from _of(
            path,
            scored,
            ("two texts", {}),
            (
                "`text_1` and `text_2`",
                {"queries": None, "documents": None, "text_1": "a", "text_2": "b"},
            ),
            ("no documents", {"documents": None}),
        )
    ranked = {"model": EMBEDDING, "query": "rain", "documents": ["sun", "rain", "snow"]}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        yield from _of(
            path,
            ranked,
            ("documents", {}),
            ("`top_n`", {"top_n": 2}),
            ("no query", {"query": None}),
            ("a model that nobody serves", {"model": "nobody"}, UNKNOWN_POOLING),
        )
    yield from _of("/classify", good, ("a model that does not classify", {}))
    yield from _of(
        "/pooling",
        good,
        ("one text", {"task": "embed"}),
        ("of tokens", {"task": "token_embed", "input": [5, 6]}),
        ("no task", {}),
        ("a task that does not exist", {"task": "poem"}),
    )


def tokens() -> Iterator[Case]:
    yield from _of(
        "/tokenize",
        {"model": MODEL},
        ("one text", {"prompt": TEXT}),
        ("a conversation", {"messages": ASKED}),
        ("with the tokens' texts", {"prompt": "abc", "return_token_strs": True}),
        ("nothing", {}),
        ("a model that nobody serves", {"model": "nobody", "prompt": "x"}, UNKNOWN),
    )
    yield from _malformed("/tokenize")
    yield from _of(
        "/detokenize",
        {"model": MODEL},
        ("token ids", {"tokens": [70, 71, 72]}),
        ("no token ids", {"tokens": ["x"]}),
    )


def others() -> Iterator[Case]:
    yield Case("any", "/version", method="GET")
    own = {"body*": ITS_OWN_HEALTH, "header content-type": ITS_OWN_HEALTH, **NO_HEADERS}
    yield Case("any", "/health", method="GET", differs=own)
    listed = {"body.data*": ALL_ENGINES, **NO_HEADERS}
    yield Case("all", "/v1/models", method="GET", differs=listed)
    one_form = {"body*": ALWAYS_ONE_FORM, **NO_HEADERS}
    yield Case("any", "/no/such/path", method="GET", differs=one_form)
    yield Case("any", "/v1/completions", method="GET", differs=one_form)
    good = {"model": MODEL, "prompt": "x", "max_tokens": 1, "temperature": 0}
    yield Case(
        "a body that is not said to be JSON",
        "/v1/completions",
        good,
        headers={"Content-Type": "text/plain"},
        differs=dict.fromkeys(("status", "body*"), ANY_TYPE),
    )
    yield Case("an id of the client's", "/v1/completions", good, headers={"X-Request-Id": "mine"})
    yield Case(
        "a report of the engine's load",
        "/v1/completions",
        good,
        headers={"endpoint-load-metrics-format": "JSON"},
        differs={"header endpoint-load-metrics": ONE_ENGINES},
    )

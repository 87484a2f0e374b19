"""What clients may ask of the stub engine, and how it refuses: vLLM's words, as far as others look at them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.stub_engine.tokens import VOCABULARY, chat_tokens, text_of, tokens_of

COMPLETION_TOKENS = 16
"""Of an answer to a completion that does not say how many; one to a chat goes on to ANSWER_TOKENS."""
ANSWER_TOKENS = 256
"""After so many tokens an answer ends by itself."""


class Refused(Exception):
    """An answer in place of the wanted one, as vLLM's `ErrorResponse`."""

    def __init__(
        self,
        message: str,
        kind: str = "BadRequestError",
        status: int = 400,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(message, kind, status, param)


def error_body(message: str, kind: str, status: int, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


@dataclass(frozen=True, slots=True)
class Prompt:
    """images: name, first token and length of each."""

    tokens: list[int]
    images: list[tuple[str, int, int]]


@dataclass(frozen=True, slots=True)
class Asked:
    """A completion or a chat. choices: answers to each prompt. stop: texts that end an answer."""

    chat: bool
    model: str
    prompts: list[Prompt]
    max_tokens: int
    choices: int
    stream: bool
    usage: bool
    echo: bool
    logprobs: bool
    stop: list[str]
    ignore_eos: bool
    salt: str | None
    transfer: Mapping[str, Any] | None


def read_object(raw: bytes, content_type: str) -> dict[str, Any]:
    """Raises `Refused`."""
    if content_type.split(";", maxsplit=1)[0].strip().lower() != "application/json":
        raise Refused("Unsupported Media Type: Only 'application/json' is allowed", "Bad Request")
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise Refused(f"[{{'type': 'json_invalid', 'msg': '{error}'}}]", "Bad Request") from None
    if not isinstance(body, dict):
        raise Refused("Input should be a valid dictionary", "Bad Request")
    return body


class Reader:
    """Takes fields of a body, of the right type. Raises `Refused`."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body

    def take(self, name: str, kind: type | tuple[type, ...], default: Any) -> Any:
        value = self._body.get(name)
        if value is None:
            return default
        # JSON's true is Python's 1.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise Refused(f"Input should be a valid {name}", "Bad Request", param=name)
        return value


def asked_of(body: Mapping[str, Any], *, chat: bool, model: str, max_len: int) -> Asked:
    """model: the one that is meant where the body names none. Raises `Refused`."""
    reader = Reader(body)
    if (reader.take("temperature", (int, float), 1.0)) < 0:
        value = body["temperature"]
        raise Refused(f"temperature must be non-negative, got {value}.", param="temperature")
    prompts = [chat_prompt(body)] if chat else completion_prompts(body)
    longest = max(len(prompt.tokens) for prompt in prompts)
    default = max_len - longest if chat else COMPLETION_TOKENS
    most = reader.take("max_tokens", int, reader.take("max_completion_tokens", int, default))
    echo = reader.take("echo", bool, False)
    if (most < 0 or (most == 0 and not echo)) and longest < max_len:
        raise Refused(f"max_tokens must be at least 1, got {most}.", param="max_tokens")
    if longest >= max_len or longest + most > max_len:
        raise Refused(
            f"This model's maximum context length is {max_len} tokens. However, you requested {most} "
            f"output tokens and your prompt contains {longest} input tokens, for a total of "
            f"{longest + most} tokens. Please reduce the length of the input prompt or the number of "
            "requested output tokens.",
            param="input_tokens",
        )
    choices = reader.take("n", int, 1)
    if choices < 1:
        raise Refused(f"n must be at least 1, got {choices}.", param="n")
    stop = reader.take("stop", (str, list), [])
    options = reader.take("stream_options", dict, {})
    return Asked(
        chat=chat,
        model=reader.take("model", str, model),
        prompts=prompts,
        max_tokens=most,
        choices=choices,
        stream=reader.take("stream", bool, False),
        usage=bool(options.get("include_usage")),
        echo=echo,
        logprobs=body.get("logprobs") not in (None, False),
        stop=[stop] if isinstance(stop, str) else stop,
        ignore_eos=reader.take("ignore_eos", bool, False),
        salt=reader.take("cache_salt", str, None),
        transfer=reader.take("kv_transfer_params", dict, None),
    )


def completion_prompts(body: Mapping[str, Any]) -> list[Prompt]:
    """One, or several: texts or lists of tokens. Raises `Refused`."""
    given = body.get("prompt")
    special = body.get("add_special_tokens", True)
    several = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
    prompts = []
    for each in given if several and given is not None else [given]:
        if isinstance(each, str):
            tokens = tokens_of(each, special=special)
        elif isinstance(each, list) and each and all(type(token) is int for token in each):
            tokens = each
        else:
            raise Refused(
                "Either prompt or prompt_embeds must be provided and non-empty.", param="prompt"
            )
        wrong = [token for token in tokens if not 0 <= token < VOCABULARY]
        if wrong:
            raise Refused(f"Token id {max(wrong)} is out of vocabulary", param="prompt")
        prompts.append(Prompt(tokens, []))
    return prompts


def chat_prompt(body: Mapping[str, Any]) -> Prompt:
    """Raises `Refused`."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise Refused("Field required: messages", "Bad Request", param="messages")
    final = bool(body.get("continue_final_message"))
    begin = bool(body.get("add_generation_prompt", True))
    if final and body.get("add_generation_prompt"):
        raise Refused(
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
        )
    try:
        tokens, images = chat_tokens(
            messages,
            tools=body.get("tools") or (),
            add_generation_prompt=begin,
            continue_final_message=final,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Refused(str(error), param="messages") from None
    return Prompt(tokens, images)


def piece(
    asked: Asked, number: int, tokens: list[int], finish: str | None, prompt: str = ""
) -> dict[str, Any]:
    """What one choice says in one message of a stream, or in all. prompt: echoed before it."""
    text = text_of(tokens)
    choice: dict[str, Any] = {"index": number}
    scores: dict[str, Any] | None = None
    words = [text_of([token]) for token in tokens]
    if asked.logprobs and asked.chat:
        scores = {
            "content": [
                {"token": word, "logprob": -0.5, "bytes": list(word.encode()), "top_logprobs": []}
                for word in words
            ]
        }
    elif asked.logprobs:
        scores = {
            "text_offset": list(range(len(prompt), len(prompt) + len(words))),
            "token_logprobs": [-0.5] * len(words),
            "tokens": words,
            "top_logprobs": [{word: -0.5} for word in words],
        }
    if not asked.chat:
        choice["text"] = prompt + text
    elif asked.stream:
        choice["delta"] = {"content": text}
    else:
        choice["message"] = {
            "role": "assistant",
            "content": text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        }
    return choice | {
        "logprobs": scores,
        "finish_reason": finish,
        "stop_reason": None,
        "token_ids": None,
    }

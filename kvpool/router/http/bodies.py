"""Parses request bodies, as far as the router needs. No I/O.

Nothing is corrected here: well-formed JSON for a known model is forwarded unchanged, so that
the engine's own errors reach the client. One field is taken out: what `kv_transfer_params` says of the request's
session (`session_hints.py`), which engines with the plugin are told anew. Bodies that the router does not understand
are served whole by one engine, which is always right.

A request may be served in three ways:

    in segments     the prompt's tokens are computed by prefill orders, and the client's body goes to decode
    by its own body the prompt is computed by the client's own body with one token to generate: if its
                    tokens alone are not sufficient (images, templates that see more than the tokenise endpoint)
    whole           one engine serves prompt and answer: if blocks from elsewhere do not help (`echo` with
                    logprobs), there are several prompts, the client addresses the pool itself, or the path is
                    one whose prompts the router does not know (`Kind`)
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import msgspec
import xxhash

from kvpool.decoding import JsonDecoder
from kvpool.errors import KvpoolError, ProtocolError

BYTES_A_TOKEN = 4
"""Characters per token of text, if its tokens are unknown: a guess."""
CHOICES_MAX = 1024
COMPLETION_TOKENS = 16
"""The token limit of a completion without one, as in OpenAI's API. A chat has no limit."""


class Kind(StrEnum):
    """By the path. Prompts of the first two may be computed ahead; the others are served whole."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"
    COUNT_TOKENS = "/v1/messages/count_tokens"
    EMBEDDINGS = "/v1/embeddings"
    SCORE = "/score"
    SCORE_V1 = "/v1/score"
    RERANK = "/rerank"
    RERANK_V1 = "/v1/rerank"
    RERANK_V2 = "/v2/rerank"
    CLASSIFY = "/classify"
    POOLING = "/pooling"
    TRANSCRIPTIONS = "/v1/audio/transcriptions"
    TRANSLATIONS = "/v1/audio/translations"

    @property
    def has_tokens(self) -> bool:
        """Whether a prompt may be computed ahead, by its tokens."""
        return self in (Kind.COMPLETIONS, Kind.CHAT)

    @property
    def prompts(self) -> str:
        """How the router learns the prompt's tokens, `tokens.question`; empty: it does not."""
        return _PROMPTS.get(self, "")

    @property
    def generates(self) -> bool:
        """Whether the answer is generated, token by token."""
        return self.has_tokens or self.is_form or self in (Kind.RESPONSES, Kind.MESSAGES)

    @property
    def is_form(self) -> bool:
        """Whether a body is a form with a file, not an object: `forms.py`."""
        return self in (Kind.TRANSCRIPTIONS, Kind.TRANSLATIONS)


_PROMPTS = {
    Kind.COMPLETIONS: "completions",
    Kind.CHAT: "chat",
    Kind.RESPONSES: "responses",
    Kind.MESSAGES: "messages",
}


class BadRequest(KvpoolError):
    """A request that the router answers itself, in the format of vLLM's errors.

    status: of HTTP. type: vLLM's name for it. param: the invalid field, if there is one.
    """

    code = "bad_request"

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "BadRequestError",  # noqa: A002  (the field's name in the answer)
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.param = param


@dataclass(frozen=True, slots=True)
class Body:
    """A body that may go to an engine.

    raw: as received; value: the same, parsed. tokens_guess: of the prompt, by its size. output_tokens: the
    most that it requests, over all its choices; None: not given. priority: higher ones go first;
    None: not given. several: there are several prompts. own_hint: the `kvpool_session` of its `kv_transfer_params`.
    content_type: as an engine is to read it.
    """

    kind: Kind
    raw: bytes
    value: Mapping[str, Any]
    model: str
    whole: bool
    segments: bool
    tokens_guess: int
    output_tokens: int | None
    priority: int | None
    session: Hashable
    several: bool = False
    own_hint: object = None
    content_type: str = "application/json"

    @property
    def is_turn(self) -> bool:
        """Whether it can be a turn of a session, which an engine can be told in the body."""
        return self.kind.generates and not self.kind.is_form and not self.several

    @property
    def streams(self) -> bool:
        """Whether the answer should be streamed."""
        return self.value.get("stream") is True


OBJECT_BYTES, ARRAY_BYTES, ITEM_BYTES = 240, 80, 48
"""Of memory, for what begins with {, with [, and for what follows a comma: a number, or a text without its characters."""


def parsed_bytes(raw: bytes) -> int:
    """The memory that a body takes once it is parsed, at most: many times its own size if it has many small values.

    Braces and commas in texts are counted, too.
    """
    return (
        len(raw)
        + OBJECT_BYTES * raw.count(b"{")
        + ARRAY_BYTES * raw.count(b"[")
        + ITEM_BYTES * raw.count(b",")
    )


WHOLE_IF_SET = frozenset(
    (
        "ec_transfer_params",
        "kv_transfer_params",
        "mm_payload",
        "prompt_embeds",
        "prompt_logprobs",
        "routed_experts_prompt_start",
        "suffix",
        "truncate_prompt_tokens",
        "use_beam_search",
    )
)
SEEN_BY_TEMPLATES = frozenset(
    ("documents", "media_io_kwargs", "mm_processor_kwargs", "reasoning_effort", "response_format")
)
"""Of chats: inputs of a template that `/tokenize` does not get."""


_OF_ANSWERS = frozenset(
    ("best_of", "max_completion_tokens", "min_tokens", "return_token_ids", "stream_options")
)
"""Fields about the answer that would only make a prompt's computation larger."""


_TRANSFER = "kv_transfer_params"
SESSION = "kvpool_session"
"""In `kv_transfer_params`: what is known of the request's session."""

_decode_body = JsonDecoder[Any](Any, "JSON")


def parse(kind: Kind, raw: bytes, models: Sequence[str]) -> Body:
    """Parse a body. models: those that engines serve; a body without one means the only one.

    Raises `BadRequest`.
    """
    try:
        value = _decode_body(raw)
    except ProtocolError as error:
        raise BadRequest(400, f"the body is {error}") from None
    if not isinstance(value, dict):
        raise BadRequest(400, "the body is not a JSON object")
    own_hint = None
    transfer = value.get(_TRANSFER)
    if isinstance(transfer, dict) and SESSION in transfer:
        own_hint = transfer[SESSION]
        rest = {key: item for key, item in transfer.items() if key != SESSION} or None
        raw = _with_field(raw, _TRANSFER, rest)
        value = {**value, _TRANSFER: rest}
    completion = kind is Kind.COMPLETIONS
    several = completion and _several(value.get("prompt"))
    by_tokens = kind.has_tokens and (completion or not _beyond_tokens(value))
    return Body(
        kind=kind,
        raw=raw,
        value=value,
        model=model_of(value, models),
        whole=not kind.has_tokens
        or several
        or bool(value.get("echo"))
        or _any_set(value, WHOLE_IF_SET),
        segments=by_tokens,
        tokens_guess=_tokens_guess(value, raw, completion and not several),
        output_tokens=_output_tokens(kind, value),
        priority=_priority(value),
        session=_session(kind, value),
        several=several,
        own_hint=own_hint,
    )


def limited(body: Body, priority_max: int) -> Body:
    """The body with a priority that its sender may request, as the engine expects it. Raises `BadRequest`."""
    if body.priority is None:
        if body.value.get("priority") is not None:
            # An engine might parse it as a number beyond the limit.
            raise BadRequest(400, "priority is not a whole number", param="priority")
        return body
    if body.priority <= priority_max:
        return body
    allowed = -priority_max
    value, raw = {**body.value, "priority": allowed}, with_field(body, "priority", allowed)
    return replace(body, value=value, raw=raw, priority=priority_max)


def with_field(body: Body, key: str, value: object) -> bytes:
    """The body with one more field; all else byte for byte. Of duplicate names the last one counts."""
    return _with_field(body.raw, key, value, empty=not body.value)


def _with_field(raw: bytes, key: str, value: object, *, empty: bool = False) -> bytes:
    end = raw.rindex(b"}")
    comma = b"" if empty else b","
    field = msgspec.json.encode(key) + b":" + msgspec.json.encode(value)
    return raw[:end] + comma + field + raw[end:]


def prompt_only(body: Body, params: Mapping[str, object] | None = None) -> bytes:
    """The body with one token to generate and no stream: its prompt is computed as for the answer.

    params: for the engine's KV connector, beside those of the body.
    """
    value = {key: item for key, item in body.value.items() if key not in _OF_ANSWERS}
    value |= {"max_tokens": 1, "n": 1, "stream": False}
    if params is not None:
        value[_TRANSFER] = _with_params(body, params)
    return msgspec.json.encode(value)


def with_params(body: Body, params: Mapping[str, object]) -> bytes:
    """The body with these for the engine's KV connector, beside its own; all else byte for byte."""
    return with_field(body, _TRANSFER, _with_params(body, params))


def _with_params(body: Body, params: Mapping[str, object]) -> Mapping[str, object]:
    own = body.value.get(_TRANSFER)
    return {**own, **params} if isinstance(own, dict) else params


def segment(body: Body, tokens: Sequence[int], params: Mapping[str, object] | None = None) -> bytes:
    """A completion that computes these tokens of a prompt, with the same cache salt and adapter as the body.

    params: for the engine's KV connector.
    """
    value: dict[str, object] = {
        "model": body.model,
        "prompt": tokens,
        "max_tokens": 1,
        "temperature": 0,
        "stream": False,
    }
    for key in ("cache_salt", "priority"):
        if body.value.get(key) is not None:
            value[key] = body.value[key]
    if params is not None:
        value[_TRANSFER] = params
    return msgspec.json.encode(value)


def error_body(
    status: int,
    message: str,
    type: str,  # noqa: A002
    param: str | None = None,
    kind: Kind | None = None,
) -> bytes:
    """In the format of vLLM's errors at this path."""
    if kind in (Kind.MESSAGES, Kind.COUNT_TOKENS):
        return msgspec.json.encode({"type": "error", "error": {"type": type, "message": message}})
    error = {"message": message, "type": type, "param": param, "code": status}
    return msgspec.json.encode({"error": error})


def _any_set(value: Mapping[str, Any], names: frozenset[str]) -> bool:
    given = (value[name] for name in value.keys() & names)
    return any(each is not None and each is not False for each in given)


def model_of(value: Mapping[str, Any], models: Sequence[str]) -> str:
    """The model that a body asks for. Raises `BadRequest`."""
    model = value.get("model")
    if model is None and len(models) == 1:
        return models[0]
    if model is None:
        raise BadRequest(
            400, f"name a model, one of: {', '.join(models) or 'none yet'}", param="model"
        )
    if model not in models:
        shown = str(model)[:128]
        raise BadRequest(
            404, f"The model `{shown}` does not exist.", type="NotFoundError", param="model"
        )
    return str(model)


def _several(prompt: object) -> bool:
    """Whether this is anything but one prompt: one text, or one list of tokens."""
    if isinstance(prompt, str):
        return False
    if not isinstance(prompt, list) or not prompt:
        return True
    return set(map(type, prompt)) != {int}


def _beyond_tokens(value: Mapping[str, Any]) -> bool:
    """Whether a chat's prompt depends on more than `/tokenize` gets."""
    if _any_set(value, SEEN_BY_TEMPLATES) or value.get("tool_choice") not in (None, "auto"):
        return True
    messages = value.get("messages")
    if not isinstance(messages, list):
        return True
    return not all(isinstance(message, dict) and _is_text(message) for message in messages)


def _is_text(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    if not isinstance(content, list):
        return True
    return all(isinstance(part, dict) and part.get("type") == "text" for part in content)


def _tokens_guess(value: Mapping[str, Any], raw: bytes, one_prompt: bool) -> int:
    prompt = value.get("prompt")
    if one_prompt and isinstance(prompt, list):
        return len(prompt)
    return len(raw) // BYTES_A_TOKEN + 1


def _whole_number(value: object) -> int | None:
    """A real int; other values are left to the engine."""
    return value if type(value) is int else None


def _output_tokens(kind: Kind, value: Mapping[str, Any]) -> int | None:
    if not kind.generates:
        return 1
    most = _whole_number(value.get("max_completion_tokens"))
    if kind is Kind.RESPONSES:
        most = _whole_number(value.get("max_output_tokens"))
    elif most is None:
        most = _whole_number(value.get("max_tokens"))
    if most is None and kind is Kind.COMPLETIONS and value.get("max_tokens") is None:
        most = COMPLETION_TOKENS
    if most is None or most < 0:
        return None
    choices = max(_whole_number(value.get("n")) or 1, _whole_number(value.get("best_of")) or 1, 1)
    return most * min(choices, CHOICES_MAX)


def _priority(value: Mapping[str, Any]) -> int | None:
    """vLLM's is the other way round: there the lowest number goes first."""
    priority = _whole_number(value.get("priority"))
    return None if priority is None else -priority


def _session(kind: Kind, value: Mapping[str, Any]) -> Hashable:
    """Identifies a conversation: by the client's id, or by its beginning."""
    for name in ("session_id", "user"):
        said = value.get(name)
        if isinstance(said, str) and said:
            return said
    if kind is Kind.CHAT and isinstance(messages := value.get("messages"), list):
        return xxhash.xxh3_64_intdigest(msgspec.json.encode(messages[:2]))
    if kind is Kind.MESSAGES and isinstance(messages := value.get("messages"), list):
        begins = [value.get("system"), messages[:1]]
        return xxhash.xxh3_64_intdigest(msgspec.json.encode(begins))
    return None

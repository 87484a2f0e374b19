"""Prompts as tokens, from the router's own tokenizer of the model or an engine's `/tokenize`, and cached.

All fields that affect the prompt are sent along, so that the tokens are those which
the engine will compute; if they differ, blocks are not found, and nothing worse.

One event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

from kvpool.decoding import JsonDecoder
from kvpool.errors import KvpoolError, ProtocolError, Unavailable
from kvpool.router.prompts.chat_form import of_messages, of_responses
from kvpool.router.prompts.own_tokenizers import CHAT, OwnTokenizers
from kvpool.router.upstream.engine_calls import bearer, post_json
from kvpool.router.upstream.evidence import another_may_differ

if TYPE_CHECKING:
    import aiohttp

CACHE_TOKENS_MAX = 1 << 21
"""Tokens of cached prompts, some 36 bytes each; a prompt costs `PROMPT_TOKENS` more."""
PROMPT_TOKENS = 8
ANSWER_BYTES_MAX = 32 << 20
CHAT_FORMS = {"messages": of_messages, "responses": of_responses}
"""Of the kinds of prompts that an engine makes a chat of."""
_CHAT_FIELDS = (
    "add_generation_prompt",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "messages",
    "tools",
)


class TokenizeRefused(KvpoolError):
    """The engine rejects this prompt. status, body, content_type: its answer."""

    code = "tokenize_refused"

    def __init__(self, status: int, body: bytes, content_type: str) -> None:
        super().__init__(f"the engine does not tokenise this prompt: {status} {body[:200]!r}")
        self.status = status
        self.body = body
        self.content_type = content_type


class UnknownModel(KvpoolError):
    """No engine serves this model."""

    code = "unknown_model"


class _Answer(msgspec.Struct):
    tokens: list[int]


class _Refusal(msgspec.Struct):
    """OpenAI's API's error formats, now and formerly; not a server's 404 page."""

    error: Any = None
    message: Any = None


_decode_answer = JsonDecoder[_Answer](_Answer, "an answer of /tokenize")
_decode_refusal = JsonDecoder[_Refusal](_Refusal, "a refusal")
_encode = msgspec.json.Encoder(order="sorted").encode


def question(body: Mapping[str, Any], kind: str) -> dict[str, Any] | Sequence[int] | None:
    """The `/tokenize` request for a prompt, without the model; or its tokens, if it has them.

    None: it is not a single text, or depends on more than can be sent.
    """
    if body.get("truncate_prompt_tokens") is not None or body.get("prompt_embeds") is not None:
        return None
    if kind == CHAT:
        return _chat_question(body)
    if (form := CHAT_FORMS.get(kind)) is not None:
        chat = form(body)
        return None if chat is None else _chat_question(chat)
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        whole = bool(prompt) and all(type(token) is int and token >= 0 for token in prompt)
        return prompt if whole else None
    if not isinstance(prompt, str):
        return None
    asked = {"prompt": prompt}
    if body.get("add_special_tokens") is not None:
        asked["add_special_tokens"] = body["add_special_tokens"]
    return asked


def _chat_question(body: Mapping[str, Any]) -> dict[str, Any] | None:
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(map(_is_text, messages)):
        return None
    asked = {name: body[name] for name in _CHAT_FIELDS if body.get(name) is not None}
    # The engine passes these to the template, and reads them from nowhere else when tokenising.
    more = {
        name: body[name] for name in ("documents", "reasoning_effort") if body.get(name) is not None
    }
    given = asked.get("chat_template_kwargs", {})
    if more and isinstance(given, dict):
        if "reasoning_effort" in more:
            more["enable_thinking"] = more["reasoning_effort"] != "none"
        asked["chat_template_kwargs"] = {**more, **given}
    return asked


def _is_text(message: object) -> bool:
    """Whether a message has no images or other media."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return True
    return all(
        isinstance(part, str) or (isinstance(part, dict) and part.get("type") == "text")
        for part in content
    )


@dataclass(frozen=True, slots=True)
class _Call:
    """To an engine. asked: what is asked; data: the same, encoded."""

    url: str
    asked: Mapping[str, Any]
    data: bytes
    deadline_s: float
    api_key: str


@dataclass(eq=False, repr=False, slots=True)
class Tokenizer:
    """Asks engines, and caches recent answers.

    own: of the models whose prompts need no engine; None: there are none. hits: prompts that were cached. misses:
    the others; own_count: of these, without a call to an engine.
    """

    _session: aiohttp.ClientSession
    _own: OwnTokenizers | None = None
    _most: int = CACHE_TOKENS_MAX
    _known: dict[bytes, list[int]] = field(default_factory=dict, init=False)
    """The most recent is at the end."""
    _size: int = field(default=0, init=False)
    _comparison: asyncio.Task[None] | None = field(default=None, init=False)
    hits: int = field(default=0, init=False)
    misses: int = field(default=0, init=False)
    own_count: int = field(default=0, init=False)

    async def tokenize(
        self,
        url: str,
        asked: Mapping[str, Any],
        *,
        deadline_s: float,
        api_key: str = "",
        scope: str = "",
    ) -> list[int] | None:
        """The tokens for `question`, with the model's name; None: this engine cannot tokenise it.

        url: of the engine that is asked if need be. scope: requests of two scopes share no cached answer, so that neither learns by its time
        what the other has asked. The list must not be changed. Raises `TokenizeRefused`, and `Unavailable` for
        an engine that fails or does not answer in time.
        """
        data = _encode(asked)
        key = xxhash.xxh3_128_digest(data + b"\0" + scope.encode(errors="surrogatepass"))
        known = self._known.pop(key, None)
        if known is not None:
            self._known[key] = known
            self.hits += 1
            return known
        self.misses += 1
        tokens = await self._find(_Call(url, asked, data, deadline_s, api_key))
        if tokens is not None and key not in self._known and _cost(tokens) <= self._most:
            self._known[key] = tokens
            self._size += _cost(tokens)
            while self._size > self._most:
                self._size -= _cost(self._known.pop(next(iter(self._known))))
        return tokens

    async def _find(self, call: _Call) -> list[int] | None:
        """Here, if that can be relied on."""
        own = self._own
        ours = None if own is None else await own.encode(call.asked, call.deadline_s)
        if own is None or ours is None:
            return await self._ask(call)
        if own.proven(call.asked):
            self.own_count += 1
            if own.samples() and not self.comparing:
                self._comparison = asyncio.create_task(self._compare(own, call, ours))
            return ours
        theirs = await self._ask(call)
        if theirs is not None:
            self._compared(own.compare(call.asked, ours, theirs))
        return theirs

    async def _compare(self, own: OwnTokenizers, call: _Call, ours: list[int]) -> None:
        """One at a time; nobody waits for it."""
        try:
            theirs = await self._ask(call)
        except (Unavailable, TokenizeRefused):
            return
        if theirs is not None:
            self._compared(own.compare(call.asked, ours, theirs))

    @property
    def comparing(self) -> bool:
        """Whether a prompt is being compared that nobody waits for."""
        return self._comparison is not None and not self._comparison.done()

    def _compared(self, equal: bool) -> None:
        if not equal:
            self._known.clear()
            self._size = 0

    async def close(self) -> None:
        """End what runs here."""
        if (comparison := self._comparison) is not None:
            comparison.cancel()
            await asyncio.gather(comparison, return_exceptions=True)
        if self._own is not None:
            self._own.close()

    async def _ask(self, call: _Call) -> list[int] | None:
        url = call.url
        answer, body = await post_json(
            self._session,
            f"{url}/tokenize",
            call.data,
            headers=bearer(call.api_key),
            within_s=call.deadline_s,
            limit=ANSWER_BYTES_MAX,
            otherwise=f"{url} does not tokenise",
        )
        if answer.status == 200:
            return tokens_of(url, body)
        if another_may_differ(answer.status):
            raise Unavailable(f"{url} cannot tokenise: {answer.status}")
        if not _is_refusal(body):
            return None
        raise TokenizeRefused(answer.status, body, answer.content_type)


def _cost(tokens: Sequence[int]) -> int:
    return len(tokens) + PROMPT_TOKENS


def tokens_of(url: str, body: bytes) -> list[int]:
    """The answer of an engine's `/tokenize`. Raises `Unavailable`."""
    try:
        return _decode_answer(body).tokens
    except ProtocolError:
        raise Unavailable(f"{url} answered /tokenize without tokens") from None


def _is_refusal(body: bytes) -> bool:
    try:
        found = _decode_refusal(body)
    except ProtocolError:
        return False
    return found.error is not None or found.message is not None

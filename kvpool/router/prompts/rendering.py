"""Prompts as an engine renders them: their tokens, and where which media are, by the engine's own identifiers.

vLLM has `/v1/chat/completions/render` and the like with `--enable-scale-out`. It prepares media once more for it, so only
prompts are rendered whose tokens cannot be had otherwise: those with images, audio or video, and what is no plain chat.

One event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from kvpool.decoding import JsonDecoder
from kvpool.errors import ProtocolError, Unavailable
from kvpool.router.hashing import Item
from kvpool.router.upstream.engine_calls import bearer, post_json
from kvpool.router.upstream.evidence import another_may_differ

if TYPE_CHECKING:
    import aiohttp

PATHS = {
    "chat": "/v1/chat/completions/render",
    "messages": "/v1/messages/render",
    "responses": "/v1/responses/render",
}
"""By the kinds of prompts of `tokens.question`."""
ANSWER_BYTES_MAX = 32 << 20
ASK_AGAIN_S = 60.0
"""An engine that does not render may be started anew, so that it does."""
_NOT_OFFERED = frozenset((403, 404, 405, 501))


class _Place(msgspec.Struct):
    offset: int
    length: int


class _Features(msgspec.Struct):
    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[_Place]]


class _Rendered(msgspec.Struct):
    token_ids: list[int]
    features: _Features | None = None


_decode = JsonDecoder[_Rendered](_Rendered, "a rendered prompt")


class Renderer:
    """Asks engines."""

    def __init__(
        self, session: aiohttp.ClientSession, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._session = session
        self._clock = clock
        self._not_before: dict[str, float] = {}  # by URL, of engines that do not render
        self.renders = 0

    def renders_at(self, url: str) -> bool:
        """Whether the engine may be asked."""
        until = self._not_before.get(url)
        if until is not None and self._clock() >= until:
            del self._not_before[url]
            until = None
        return until is None

    async def render(
        self, url: str, kind: str, body: Mapping[str, Any], *, deadline_s: float, api_key: str = ""
    ) -> tuple[Sequence[int], Sequence[Item]] | None:
        """A prompt's tokens, and its media in the order of their places. None: this engine does not render it.

        Raises `Unavailable` for an engine that fails or does not answer in time.
        """
        asked = {key: value for key, value in body.items() if key != "stream_options"}
        data = msgspec.json.encode({**asked, "stream": False, "mm_payload": "none"})
        answer, said = await post_json(
            self._session,
            url + PATHS[kind],
            data,
            headers=bearer(api_key),
            within_s=deadline_s,
            limit=ANSWER_BYTES_MAX,
            otherwise=f"{url} does not render",
        )
        if answer.status in _NOT_OFFERED:
            self._not_before[url] = self._clock() + ASK_AGAIN_S
            return None
        if answer.status != 200:
            if another_may_differ(answer.status):
                raise Unavailable(f"{url} cannot render: {answer.status}")
            return None  # the engine that serves it says what is wrong
        self.renders += 1
        try:
            found = _decode(said)
        except ProtocolError:
            raise Unavailable(f"{url} rendered a prompt without tokens") from None
        return found.token_ids, _items(found)


def _items(rendered: _Rendered) -> list[Item]:
    features = rendered.features
    if features is None:
        return []
    items = [
        Item(identifier, place.offset, place.length)
        for kind, identifiers in features.mm_hashes.items()
        for identifier, place in zip(
            identifiers, features.mm_placeholders.get(kind, ()), strict=False
        )
    ]
    inside = [item for item in items if 0 <= item.offset <= len(rendered.token_ids)]
    return sorted(inside, key=lambda item: item.offset)

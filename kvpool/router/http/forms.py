"""Reads forms with files, as far as the router needs: the audio APIs' `model`, `stream`. They are forwarded as they came."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import BodyPartReader, MultipartReader
from aiohttp.base_protocol import BaseProtocol
from aiohttp.streams import StreamReader

from kvpool.router.http.bodies import BadRequest, Body, Kind, model_of

PARTS_MAX = 64
TEXT_BYTES_MAX = 1 << 16
"""Of one field that is no file."""
AUDIO_TOKENS = 1500
"""Of an audio: as many as Whisper makes of its first 30 seconds. Nobody knows without decoding it."""
_TRUE = frozenset(("1", "on", "true", "yes"))


async def parse_form(kind: Kind, raw: bytes, content_type: str, models: tuple[str, ...]) -> Body:
    """A form that may go to an engine. content_type: with the boundary. Raises `BadRequest`."""
    value: dict[str, Any] = dict(await _texts(raw, content_type))
    value["stream"] = value.get("stream", "").lower() in _TRUE
    return Body(
        kind=kind,
        raw=raw,
        value=value,
        model=model_of(value, models),
        whole=True,
        segments=False,
        tokens_guess=AUDIO_TOKENS,
        output_tokens=None,
        priority=None,
        session=None,
        content_type=content_type,
    )


async def _texts(raw: bytes, content_type: str) -> dict[str, str]:
    """The fields that are no files, by name; of duplicates the last one."""
    if not content_type.lower().startswith("multipart/form-data"):
        raise BadRequest(400, "the body is not a form: Content-Type is not multipart/form-data")
    loop = asyncio.get_running_loop()
    # All is there already: the limit is that of a reader which would pause a connection.
    stream = StreamReader(BaseProtocol(loop), len(raw) + 1, loop=loop)
    stream.feed_data(raw)
    stream.feed_eof()
    found: dict[str, str] = {}
    try:
        reader = MultipartReader({"Content-Type": content_type}, stream)
        for _ in range(PARTS_MAX):
            part = await reader.next()
            if part is None:
                return found
            if not isinstance(part, BodyPartReader):
                raise BadRequest(400, "a form within a form is not taken")
            if part.filename is None and part.name is not None:
                found[part.name] = await _text(part)
            else:
                await part.release()
    except (ValueError, AssertionError) as error:
        raise BadRequest(400, f"the body is not a form: {error}") from None
    raise BadRequest(400, f"the form has more than {PARTS_MAX} fields")


async def _text(part: BodyPartReader) -> str:
    found = bytearray()
    while not part.at_eof():
        found += await part.read_chunk()
        if len(found) > TEXT_BYTES_MAX:
            raise BadRequest(400, "a field of the form is too long")
    return found.decode()

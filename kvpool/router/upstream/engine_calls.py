"""The router's own small requests to an engine: bounded, answered whole."""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp

from kvpool.errors import Unavailable


def bearer(key: str) -> dict[str, str]:
    """The header with an engine's API key; none for an engine without one."""
    return {"Authorization": f"Bearer {key}"} if key else {}


async def post_json(
    session: aiohttp.ClientSession,
    url: str,
    data: bytes,
    *,
    headers: Mapping[str, str],
    within_s: float,
    limit: int,
    otherwise: str,
) -> tuple[aiohttp.ClientResponse, bytes]:
    """The answer to a JSON request, whatever its status, and its body, of at most this many bytes.

    Raises `Unavailable` with `otherwise` and the reason if there is none in time.
    """
    try:
        async with session.post(
            url,
            data=data,
            headers={"Content-Type": "application/json", **headers},
            timeout=aiohttp.ClientTimeout(total=within_s),
            allow_redirects=False,
        ) as answer:
            return answer, await read(answer, limit)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise Unavailable(f"{otherwise}: {type(error).__name__} {error}".rstrip()) from None


async def read(answer: aiohttp.ClientResponse, limit: int) -> bytes:
    """An answer's body. Raises `aiohttp.ClientPayloadError` if it exceeds the limit."""
    body = bytearray()
    async for piece in answer.content.iter_any():
        body += piece
        if len(body) > limit:
            raise aiohttp.ClientPayloadError(f"an answer of more than {limit} bytes")
    return bytes(body)

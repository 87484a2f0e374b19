"""Compares block hashes computed here with an engine's, by having it compute a prompt.

The prompt is short and has a salt of its own, so that its blocks are not cached yet. Its hashes must appear in
the engine's events.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from kvpool.errors import Unavailable
from kvpool.placement.kv_events.engine_blocks import short_hash
from kvpool.placement.kv_events.subscriber import EngineFeed
from kvpool.router.hashing import HashSpec, chain
from kvpool.router.prompts.tokens import ANSWER_BYTES_MAX, tokens_of
from kvpool.router.upstream.engine_calls import post_json
from kvpool.router.upstream.specs import EngineSpec

if TYPE_CHECKING:
    import aiohttp

VERIFIED, MISMATCH, UNVERIFIED = "verified", "mismatch", "unverified"

TRIES = 2
BLOCKS = 2
ANSWER_S = 30.0
"""An engine that was just started may have to compile something first."""
EVENTS_S = 5.0
"""Time from its answer until its events must arrive."""
CONNECT_S = 5.0
POLL_S = 0.02


async def verify(
    spec: EngineSpec,
    hashing: HashSpec,
    feed: EngineFeed,
    *,
    session: aiohttp.ClientSession,
    clock: Callable[[], float],
    headers: dict[str, str],
) -> str:
    """Return `VERIFIED`, `MISMATCH`, or `UNVERIFIED` if the engine's events are not received.

    Only events prove a mismatch: the engine has told of something since, and not of these blocks. Silence proves
    nothing. Raises `Unavailable` if the engine fails.
    """
    if not await _until(lambda: feed.connected, CONNECT_S, clock):
        return UNVERIFIED
    told_at = feed.told_at
    for _ in range(TRIES):
        tokens = await _tokens(spec, hashing.block_tokens, session, headers)
        salt = secrets.token_hex(16)
        hashes = [short_hash(each) for each in chain(hashing, tokens, salt=salt)]
        body = {"model": spec.model, "prompt": tokens, "max_tokens": 1, "cache_salt": salt}
        await _post(spec, "/v1/completions", body, session, headers)

        def seen(hashes: list[int] = hashes) -> bool:
            return all(feed.blocks.holds(group, hashes) for group in spec.groups)

        if await _until(seen, EVENTS_S, clock):
            return VERIFIED
    return MISMATCH if feed.connected and feed.told_at > told_at else UNVERIFIED


async def _tokens(
    spec: EngineSpec, block: int, session: aiohttp.ClientSession, headers: dict[str, str]
) -> list[int]:
    """A prompt of two blocks and one token, or one block and one token if it accepts no more; tokens that it
    knows.
    """
    words = " ".join(secrets.token_hex(4) for _ in range(BLOCKS * block + 1))
    answer = await _post(
        spec, "/tokenize", {"model": spec.model, "prompt": words}, session, headers
    )
    found = tokens_of(spec.url, answer)
    blocks = BLOCKS if not spec.max_len or BLOCKS * block + 2 <= spec.max_len else 1
    if len(found) <= blocks * block:
        raise Unavailable(
            f"engine {spec.name} makes too few tokens of the test text to verify its hashes"
        )
    return found[: blocks * block + 1]


async def _post(
    spec: EngineSpec,
    path: str,
    body: dict[str, object],
    session: aiohttp.ClientSession,
    headers: dict[str, str],
) -> bytes:
    answer, found = await post_json(
        session,
        spec.url + path,
        msgspec.json.encode(body),
        headers=headers,
        within_s=ANSWER_S,
        limit=ANSWER_BYTES_MAX,
        otherwise=f"engine {spec.name} does not answer {path}",
    )
    if answer.status != 200:
        raise Unavailable(
            f"engine {spec.name} answered {path} with {answer.status}: {found[:200]!r}"
        )
    return found


async def _until(condition: Callable[[], bool], seconds: float, clock: Callable[[], float]) -> bool:
    deadline = clock() + seconds
    while not condition():
        if clock() > deadline:
            return False
        await asyncio.sleep(POLL_S)
    return True

"""An OpenAI-compatible engine that only simulates computing: it waits as long as a prefill would take.

All else is real: its HTTP, the hashes of its blocks, their bytes, and how it writes them to the pool and reads them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
import numpy as np
from aiohttp import web

from kvpool.client import Client
from kvpool.decoding import JsonDecoder
from kvpool.errors import InternalError, KvpoolError
from kvpool.router.hashing import HashSpec, chain, none_hash
from kvpool.types import KEY_BYTES, EngineRecord, NamespaceRecord

MODEL = "simulated-1b"
BLOCK_TOKENS = 32
BLOCK_BYTES = 1 << 20
"""As of a model of 1B parameters: 16 layers of 8 KV heads of 64 values of 2 bytes, a key and a value per token."""
PREFILL_TOKENS_PER_S = 2500.0
BLOCKS_MAX = 128
"""Blocks of the longest prompt that an engine takes."""
CAPACITY_TOKENS = 1 << 20
STEP_TOKENS = 8192

_ALGORITHM = "sha256_cbor"
_HASHING = HashSpec(BLOCK_TOKENS, _ALGORITHM, none_hash(_ALGORITHM))


class _Completion(msgspec.Struct):
    """The fields of a request that the engine reads. prompt: tokens."""

    prompt: list[int]


_decode_completion = JsonDecoder[_Completion](_Completion, "a completion")


class Answer(msgspec.Struct, frozen=True):
    """How an engine came by the blocks of a prompt, as counts of tokens."""

    computed: int
    from_own_cache: int
    from_pool: int


class SimulatedEngine:
    """One engine, which keeps the blocks of all prompts that it has seen. Event loop only.

    socket: of the daemon whose pool it uses.
    """

    def __init__(self, socket: str) -> None:
        self._client = Client(socket)
        self._own: set[bytes] = set()
        self._kv = np.zeros((BLOCKS_MAX, BLOCK_BYTES), dtype=np.uint8)
        self._computing = asyncio.Lock()  # an engine computes one prompt after the other

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        """Serve on a free port of loopback, and announce the engine to routers. Yields the URL."""
        self._ns = await asyncio.to_thread(
            self._client.open,
            NamespaceRecord.simple(MODEL, block_bytes=BLOCK_BYTES, block_tokens=BLOCK_TOKENS),
        )
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._complete),
            ]
        )
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0]
            url = f"http://{host}:{port}"
            await asyncio.to_thread(self._client.engine.announce, self._ns, _record(url))
            yield url
        finally:
            await runner.cleanup()
            await asyncio.to_thread(self._client.close)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _complete(self, request: web.Request) -> web.Response:
        body = _decode_completion(await request.read())
        try:
            async with self._computing:
                answer = await self._prefill(body.prompt)
        except KvpoolError as error:
            return web.json_response({"error": {"message": str(error)}}, status=503)
        said = {
            "object": "text_completion",
            "model": MODEL,
            "choices": [{"index": 0, "text": "ok", "finish_reason": "stop"}],
            "kvpool_demo": answer,
        }
        text = b"data: " + msgspec.json.encode(said) + b"\n\ndata: [DONE]\n\n"
        return web.Response(body=text, content_type="text/event-stream")

    async def _prefill(self, tokens: Sequence[int]) -> Answer:
        """Take the longest prefix that is there, compute the rest, and write that to the pool.

        The last token is always computed, as by any engine: its output is the first token of the answer.
        """
        keys = [each[-KEY_BYTES:] for each in chain(_HASHING, tokens[:-1])]
        own = _prefix(keys, self._own)
        pulled = await asyncio.to_thread(self._read, keys[own:])
        held = own + pulled
        computed = len(tokens) - held * BLOCK_TOKENS
        await asyncio.sleep(computed / PREFILL_TOKENS_PER_S)
        if new := keys[held:]:
            parent = keys[held - 1] if held else None
            blocks = [_computed(key) for key in new]
            await asyncio.to_thread(self._client.put, self._ns, new, blocks, parent=parent)
        self._own.update(keys)
        return Answer(computed, own * BLOCK_TOKENS, pulled * BLOCK_TOKENS)

    def _read(self, keys: Sequence[bytes]) -> int:
        """Read blocks out of the pool; return how many of them are there, in a row. Raises `InternalError`."""
        if not keys:
            return 0
        kv = self._kv[: len(keys)]
        here = self._client.get_into(self._ns, keys, kv)
        count = len(keys) if here.all() else int(here.argmin())
        words = kv[:count].view(np.uint64).reshape(count, BLOCK_BYTES // KEY_BYTES, KEY_BYTES // 8)
        expected = np.frombuffer(b"".join(keys[:count]), np.uint64).reshape(
            count, 1, KEY_BYTES // 8
        )
        if not (words == expected).all():
            raise InternalError("a block is not what the other engine has computed")
        return count


def _prefix(keys: Sequence[bytes], held: set[bytes]) -> int:
    return next((at for at, key in enumerate(keys) if key not in held), len(keys))


def _computed(key: bytes) -> bytes:
    """Return the bytes of a block. They follow from its key, so that a reader can tell a wrong block."""
    return key * (BLOCK_BYTES // KEY_BYTES)


def _record(url: str) -> EngineRecord:
    return EngineRecord(
        url,
        model=MODEL,
        hash_algorithm=_ALGORITHM,
        none_hash=_HASHING.none_hash.hex(),
        block_tokens=BLOCK_TOKENS,
        block_bytes=BLOCK_BYTES,
        capacity_tokens=CAPACITY_TOKENS,
        step_tokens=STEP_TOKENS,
    )

"""What is asked of engines that render prompts, and what is made of their answers."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvpool.errors import Unavailable
from kvpool.router.engines.engine_catalog import Served
from kvpool.router.hashing import HashSpec, Item, chain, none_hash
from kvpool.router.prompts.rendering import ASK_AGAIN_S, PATHS, Renderer
from kvpool.router.prompts.tokens import Tokenizer
from kvpool.router.requests.prompts import Prompts
from kvpool.router.upstream.specs import EngineSpec

BODY = {"model": "m", "messages": [{"role": "user"}], "stream": True, "stream_options": {"a": 1}}
FEATURES = {
    "mm_hashes": {"image": ["i1", "i2"], "audio": ["a1"]},
    "mm_placeholders": {
        "image": [{"offset": 9, "length": 5}, {"offset": 30, "length": 1}],
        "audio": [{"offset": 2, "length": 3}],
    },
    "kwargs_data": None,
    "mm_metadata": None,
}
TOKENS = list(range(40))


class Engine:
    def __init__(self, status: int, said: Any) -> None:
        self.status = status
        self.said = said
        self.seen: list[tuple[str, Any, str]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        key = request.headers.get("Authorization", "")
        self.seen.append((request.path, await request.json(), key))
        return web.json_response(self.said, status=self.status)


def run(engine: Engine, test: Callable[[str, Renderer, list[float]], Awaitable[None]]) -> None:
    async def main() -> None:
        app = web.Application()
        app.add_routes([web.post("/{path:.*}", engine.answer)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        now = [100.0]
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            async with aiohttp.ClientSession() as session:
                await test(url, Renderer(session, lambda: now[0]), now)
        finally:
            await runner.cleanup()

    asyncio.run(main())


@pytest.mark.parametrize("kind", PATHS)
def test_media_come_in_the_order_of_their_places(kind: str) -> None:
    engine = Engine(200, {"token_ids": TOKENS, "features": FEATURES, "sampling_params": {}})

    async def test(url: str, renderer: Renderer, _now: list[float]) -> None:
        found = await renderer.render(url, kind, BODY, deadline_s=20, api_key="key")
        assert found == (TOKENS, [Item("a1", 2, 3), Item("i1", 9, 5), Item("i2", 30, 1)])
        ((path, asked, key),) = engine.seen
        assert (path, key) == (PATHS[kind], "Bearer key")
        assert asked == {
            "model": "m",
            "messages": [{"role": "user"}],
            "stream": False,
            "mm_payload": "none",  # what they are, not what they consist of
        }

    run(engine, test)


def test_blocks_with_media_are_hashed_by_their_identifiers() -> None:
    content = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    body = {"model": "m", "messages": [{"role": "user", "content": content}], "cache_salt": "s"}
    hashing = HashSpec(16, "sha256_cbor", none_hash("sha256_cbor"))

    async def test(url: str, renderer: Renderer, _now: list[float]) -> None:
        spec = EngineSpec(url=url, model="m", hashing=hashing)
        catalog: Any = SimpleNamespace(
            engines={},
            serving=lambda _: Served([spec], frozenset(("k",)), spec),
            answers=lambda _: True,
        )
        pools: Any = None
        async with aiohttp.ClientSession() as session:
            prompts = Prompts(catalog, None, Tokenizer(session), Renderer(session), pools)
            prompt = await prompts.prompt(body, "chat")
        items = [Item("a1", 2, 3), Item("i1", 9, 5), Item("i2", 30, 1)]
        assert prompt.hashes == chain(hashing, TOKENS, salt="s", multimodal=items)
        assert len(prompt.keys) == 2 and prompt.hashes != chain(hashing, TOKENS, salt="s")

    run(Engine(200, {"token_ids": TOKENS, "features": FEATURES}), test)


def test_without_media_there_are_tokens_alone() -> None:
    async def test(url: str, renderer: Renderer, _now: list[float]) -> None:
        assert await renderer.render(url, "chat", BODY, deadline_s=20) == (TOKENS, [])

    run(Engine(200, {"token_ids": TOKENS, "features": None}), test)


@pytest.mark.parametrize("status", [403, 404, 405, 501])
def test_an_engine_that_does_not_render_is_not_asked_for_a_while(status: int) -> None:
    async def test(url: str, renderer: Renderer, now: list[float]) -> None:
        assert renderer.renders_at(url)
        assert await renderer.render(url, "chat", BODY, deadline_s=20) is None
        assert not renderer.renders_at(url) and renderer.renders_at("http://another")
        now[0] += ASK_AGAIN_S
        assert renderer.renders_at(url)

    run(Engine(status, {"detail": "Not Found"}), test)


def test_a_prompt_that_is_refused_is_left_to_the_engine_that_serves_it() -> None:
    async def test(url: str, renderer: Renderer, _now: list[float]) -> None:
        assert await renderer.render(url, "chat", BODY, deadline_s=20) is None
        assert renderer.renders_at(url)

    run(Engine(400, {"error": {"message": "no"}}), test)


@pytest.mark.parametrize(
    ("status", "said"),
    [(500, {}), (401, {}), (429, {}), (200, {}), (200, {"token_ids": ["x"]}), (200, [])],
)
def test_failures(status: int, said: Any) -> None:
    async def test(url: str, renderer: Renderer, _now: list[float]) -> None:
        with pytest.raises(Unavailable):
            await renderer.render(url, "chat", BODY, deadline_s=20)

    run(Engine(status, said), test)

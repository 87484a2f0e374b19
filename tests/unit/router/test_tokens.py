"""What is asked of an engine's tokeniser, and what is made of its answers."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvpool.errors import Unavailable
from kvpool.router.prompts.own_tokenizers import FIRST, OwnTokenizers
from kvpool.router.prompts.tokens import PROMPT_TOKENS, Tokenizer, TokenizeRefused, question
from tests.support.waiting import until_async

TEXT = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("body", "asked"),
    [
        ({"prompt": "a", "max_tokens": 5}, {"prompt": "a"}),
        (
            {"prompt": "a", "add_special_tokens": False},
            {"prompt": "a", "add_special_tokens": False},
        ),
        ({"prompt": [1, 2, 3]}, [1, 2, 3]),
        ({"prompt": []}, None),
        ({"prompt": [[1], [2]]}, None),
        ({"prompt": ["a", "b"]}, None),
        ({"prompt": [1, True]}, None),
        ({"prompt": [1, -1]}, None),
        ({"prompt": "a", "truncate_prompt_tokens": 3}, None),
        ({"prompt": "a", "prompt_embeds": "x"}, None),
        ({}, None),
    ],
)
def test_of_completions(body, asked):
    assert question(body, "completions") == asked


@pytest.mark.parametrize(
    ("body", "asked"),
    [
        ({"messages": TEXT, "temperature": 0}, {"messages": TEXT}),
        (
            {"messages": TEXT, "tools": [{"type": "function"}], "chat_template_kwargs": {"a": 1}},
            {"messages": TEXT, "tools": [{"type": "function"}], "chat_template_kwargs": {"a": 1}},
        ),
        (
            {"messages": TEXT, "reasoning_effort": "low", "documents": [{"t": 1}]},
            {
                "messages": TEXT,
                "chat_template_kwargs": {
                    "documents": [{"t": 1}],
                    "reasoning_effort": "low",
                    "enable_thinking": True,
                },
            },
        ),
        (
            {
                "messages": TEXT,
                "reasoning_effort": "none",
                "chat_template_kwargs": {"enable_thinking": True},
            },
            {
                "messages": TEXT,
                "chat_template_kwargs": {"reasoning_effort": "none", "enable_thinking": True},
            },
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, ...),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
        ({"messages": "hello"}, None),
        ({"messages": TEXT, "truncate_prompt_tokens": 3}, None),
    ],
)
def test_of_chats(body, asked):
    assert question(body, "chat") == (body if asked is ... else asked)


class Engine:
    """Answers as it is told; counts."""

    def __init__(self):
        self.asked = []
        self.answer: Any = {"tokens": [1, 2, 3]}
        self.status: int | None = 200
        self.headers = []

    async def tokenize(self, request):
        self.headers.append(request.headers.get("Authorization"))
        self.asked.append(await request.json())
        if self.status is None:
            await asyncio.sleep(30)
        text = self.answer if isinstance(self.answer, str) else json.dumps(self.answer)
        return web.Response(status=self.status, text=text, content_type="application/json")

    def play(self, test):
        async def run():
            app = web.Application()
            app.router.add_post("/tokenize", self.tokenize)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0]
            try:
                async with aiohttp.ClientSession() as session:
                    await test(f"http://{host}:{port}", session)
            finally:
                await runner.cleanup()

        asyncio.run(run())


def test_what_was_asked_before_is_remembered():
    engine = Engine()

    async def test(url, session):
        tokenizer = Tokenizer(session, None, 6 + 2 * PROMPT_TOKENS)

        async def tokens(text, **more):
            asked = {"model": "m", "prompt": text, **more}
            return await tokenizer.tokenize(url, asked, deadline_s=10, api_key="k")

        assert await tokens("a") == [1, 2, 3]
        engine.answer = {"tokens": [4]}
        assert await tokens("a") == [1, 2, 3]
        assert await tokens("a", add_special_tokens=False) == [4]
        assert (tokenizer.hits, tokenizer.misses) == (1, 2)
        engine.answer = {"tokens": [5, 5, 5]}
        assert await tokens("b") == [5, 5, 5]  # "a" is the oldest, and makes room
        engine.answer = {"tokens": [7] * 23}
        assert await tokens("a") == [7] * 23  # too long to be remembered
        assert await tokens("b") == [5, 5, 5]
        assert engine.headers == ["Bearer k"] * 4

    engine.play(test)


def test_prompts_without_tokens_take_room_too():
    engine = Engine()
    engine.answer = {"tokens": []}

    async def test(url, session):
        tokenizer = Tokenizer(session, None, 2 * PROMPT_TOKENS)
        for text in ("a", "b", "c", "a"):
            assert await tokenizer.tokenize(url, {"prompt": text}, deadline_s=10) == []
        assert (tokenizer.hits, tokenizer.misses) == (0, 4)

    engine.play(test)


class Words:
    """A tokenizer that can tell the tokens of some texts."""

    def __init__(self, tokens):
        self.tokens = tokens

    def encode(self, asked):
        tokens = self.tokens.get(asked["prompt"])
        return None if tokens is None else list(tokens)


def own_of(tokens, random=lambda: 1.0):
    return OwnTokenizers({"m": Words(tokens)}, random)


async def tokens_of(tokenizer, url, text, scope=""):
    asked = {"model": "m", "prompt": text}
    return await tokenizer.tokenize(url, asked, deadline_s=60, scope=scope)


def test_proven_tokenizers_ask_no_engine():
    engine = Engine()

    async def test(url, session):
        texts = [str(number) for number in range(FIRST + 2)]
        own = own_of(dict.fromkeys(texts, (1, 2, 3)))
        tokenizer = Tokenizer(session, own)
        for text in texts:
            assert await tokens_of(tokenizer, url, text) == [1, 2, 3]
        assert [each["prompt"] for each in engine.asked] == texts[:FIRST]
        assert (tokenizer.misses, tokenizer.own_count) == (FIRST + 2, 2)
        assert await tokens_of(tokenizer, url, texts[0]) == [1, 2, 3]
        assert (tokenizer.hits, tokenizer.own_count) == (1, 2)
        # What it cannot tell is asked for.
        assert await tokens_of(tokenizer, url, "unknown") == [1, 2, 3]
        assert engine.asked[-1]["prompt"] == "unknown"
        await tokenizer.close()

    engine.play(test)


def test_unproven_tokenizers_are_not_used():
    engine = Engine()

    async def test(url, session):
        own = own_of({"a": [1, 2, 4], "b": [1, 2, 3]})
        tokenizer = Tokenizer(session, own)
        assert await tokens_of(tokenizer, url, "a") == [1, 2, 3], "the engine's"
        engine.status, engine.answer = 400, {"error": {"message": "no"}}
        with pytest.raises(TokenizeRefused):
            await tokens_of(tokenizer, url, "b")
        await tokenizer.close()

    engine.play(test)


def test_a_difference_that_is_found_late_takes_back_all_that_is_remembered():
    engine = Engine()

    async def test(url, session):
        draws = iter([1.0, 0.0, 0.0])
        texts = [str(number) for number in range(FIRST)]
        own = own_of({**dict.fromkeys(texts, (1, 2, 3)), "a": [7], "b": [8]}, lambda: next(draws))
        tokenizer = Tokenizer(session, own)
        for text in texts:
            await tokens_of(tokenizer, url, text)
        assert await tokens_of(tokenizer, url, "a") == [7], "wrong, and not looked at"
        assert await tokens_of(tokenizer, url, "b") == [8], "nobody waits for the comparison"
        await until_async(lambda: not own.proven({"model": "m", "prompt": ""}))
        assert engine.asked[-1]["prompt"] == "b"
        for text in ("a", "b"):
            assert await tokens_of(tokenizer, url, text) == [1, 2, 3]
        await tokenizer.close()

    engine.play(test)


def test_a_comparison_that_fails_says_nothing():
    engine = Engine()

    async def test(url, session):
        texts = [str(number) for number in range(FIRST + 3)]
        own = own_of(dict.fromkeys(texts, (1, 2, 3)), lambda: 0.0)
        tokenizer = Tokenizer(session, own)
        for text in texts[:FIRST]:
            await tokens_of(tokenizer, url, text)
        for number, status in enumerate((500, 404)):
            engine.status, asked = status, len(engine.asked)
            assert await tokens_of(tokenizer, url, texts[FIRST + number]) == [1, 2, 3]
            await until_async(lambda: not tokenizer.comparing)
            assert len(engine.asked) == asked + 1
        engine.status = None  # it hangs
        assert await tokens_of(tokenizer, url, texts[-1]) == [1, 2, 3]
        await tokenizer.close()
        assert own.proven({"model": "m", "prompt": ""}) and not tokenizer.comparing

    engine.play(test)


def test_refusals_are_the_engines_own():
    engine = Engine()

    async def test(url, session):
        tokenizer = Tokenizer(session)
        engine.status, engine.answer = 400, {"error": {"message": "no"}}
        with pytest.raises(TokenizeRefused) as caught:
            await tokenizer.tokenize(url, {"prompt": "a"}, deadline_s=10)
        assert caught.value.status == 400
        assert json.loads(caught.value.body) == engine.answer
        # A server that has no such page.
        engine.status, engine.answer = 404, {"detail": "Not Found"}
        assert await tokenizer.tokenize(url, {"prompt": "a"}, deadline_s=10) is None
        engine.answer = "<html>"
        assert await tokenizer.tokenize(url, {"prompt": "a"}, deadline_s=10) is None

    engine.play(test)


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (500, {"error": "x"}),
        (503, ""),
        (401, {"error": "Unauthorized"}),
        (200, "tokens"),
        (200, {"tokens": "x"}),
        (None, {}),
    ],
)
def test_failures(status, answer):
    engine = Engine()
    engine.status, engine.answer = status, answer

    async def test(url, session):
        deadline_s = 0.05 if status is None else 10
        with pytest.raises(Unavailable):
            await Tokenizer(session).tokenize(url, {"prompt": "a"}, deadline_s=deadline_s)

    engine.play(test)


def test_nobody_there():
    async def test():
        async with aiohttp.ClientSession() as session:
            with pytest.raises(Unavailable):
                await Tokenizer(session).tokenize(
                    "http://127.0.0.1:9", {"prompt": "a"}, deadline_s=5
                )

    asyncio.run(test())

"""When the router's own tokens count, and when the engines' do."""

import asyncio
import logging
import threading

import pytest

from kvpool.errors import InvalidRequest, Unavailable
from kvpool.router.prompts.own_tokenizers import FIRST, PENDING_MAX, SHARE, OwnTokenizers

COMPLETION = {"model": "m", "prompt": "secret words"}
CHAT = {"model": "m", "messages": []}


class Encodes:
    """As it is told."""

    def __init__(self, tokens=(1, 2), wait=None):
        self.tokens = tokens
        self.wait = wait

    def encode(self, asked):
        if self.wait is not None:
            self.wait.wait(60)
        if isinstance(self.tokens, Exception):
            raise self.tokens
        return None if self.tokens is None else list(self.tokens)


def own(encodes=None, random=lambda: 1.0):
    told = []
    found = OwnTokenizers({"m": encodes or Encodes()}, random, lambda *news: told.append(news))
    return found, told


def test_first_prompts_are_compared_then_a_share():
    draws = iter((0.0, SHARE, SHARE * 0.99))
    tokenizers, told = own(random=lambda: next(draws))
    assert told == [("m", "completions", False), ("m", "chat", False)]
    del told[:]
    for _ in range(FIRST):
        assert not tokenizers.proven(COMPLETION)
        assert tokenizers.compare(COMPLETION, [1, 2], [1, 2])
    assert tokenizers.proven(COMPLETION) and told == [("m", "completions", True)]
    assert not tokenizers.proven(CHAT), "its template is another thing"
    assert [tokenizers.samples() for _ in range(3)] == [True, False, True]
    tokenizers.close()


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ([5, 6, 7], [5, 9, 7], "number 1 is 6 instead of 9"),
        ([5, 6], [5, 6, 7], "number 2 is none instead of 7"),
        ([5, 6], [5], "number 1 is 6 instead of none"),
    ],
)
@pytest.mark.parametrize("before", [0, FIRST])
def test_one_difference_is_enough(caplog, before, ours, theirs, said):
    async def test():
        tokenizers, told = own()
        for _ in range(before):
            assert tokenizers.compare(COMPLETION, ours, ours)
        assert await tokenizers.encode(COMPLETION, 60) == [1, 2]
        assert not tokenizers.compare(COMPLETION, ours, theirs)
        assert not tokenizers.proven(COMPLETION)
        assert told[-1] == ("m", "completions", False)
        assert await tokenizers.encode(COMPLETION, 60) is None
        assert await tokenizers.encode(CHAT, 60) == [1, 2], "chats are judged by themselves"
        # Others that were under way say nothing more.
        assert not tokenizers.compare(COMPLETION, ours, ours)
        assert not tokenizers.compare(COMPLETION, ours, theirs)
        assert not tokenizers.proven(COMPLETION)
        tokenizers.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(test())
    [record] = caplog.records
    assert said in record.getMessage() and "model m" in record.getMessage()
    assert "secret" not in record.getMessage()


def test_what_is_left_to_engines():
    async def test():
        for cannot in (None, InvalidRequest("x")):
            tokenizers, _ = own(Encodes(cannot))
            assert await tokenizers.encode(COMPLETION, 60) is None
            assert await tokenizers.encode(COMPLETION | {"model": "other"}, 60) is None
            tokenizers.close()

    asyncio.run(test())


def test_no_more_wait_than_there_is_room():
    async def test():
        wait = threading.Event()
        tokenizers, _ = own(Encodes(wait=wait))
        waiting = [
            asyncio.create_task(tokenizers.encode(COMPLETION, 60)) for _ in range(PENDING_MAX)
        ]
        await asyncio.sleep(0)
        try:
            assert await tokenizers.encode(COMPLETION, 60) is None
            waiting[-1].cancel()
            assert isinstance(
                (await asyncio.gather(waiting[-1], return_exceptions=True))[0],
                asyncio.CancelledError,
            )
            with pytest.raises(Unavailable):
                await tokenizers.encode(COMPLETION, 0.001)
        finally:
            wait.set()
        assert await asyncio.gather(*waiting[:-1]) == [[1, 2]] * (PENDING_MAX - 1)
        assert await tokenizers.encode(COMPLETION, 60) == [1, 2]
        tokenizers.close()

    asyncio.run(test())

"""Requests that do not come through the router use engines' memory, too: engines say so, and the router counts it."""

from __future__ import annotations

import asyncio

from tests.integration.router.conftest import World
from tests.support.stub_engine import Speed

CAPACITY = 4096


async def others(world: World, name: str) -> int:
    (tokens,) = [
        row["others_tokens"]
        for row in (await world.get("/engines"))["engines"]
        if row["name"] == name
    ]
    return int(tokens)


async def test_an_engine_that_is_full_of_others_gets_nothing_while_there_is_another(
    world: World,
) -> None:
    # A step in which anything decodes takes for ever there.
    slow = {"speed": Speed(decode_s=1000.0)}
    full = await world.engine("a", capacity_tokens=CAPACITY, max_len=CAPACITY, **slow)
    free = await world.engine("b", capacity_tokens=CAPACITY, max_len=CAPACITY)
    for table in world.tables:
        table["capacity_tokens"] = CAPACITY
    await world.router()
    await world.until(lambda: _none(world), "the router's own question is none of theirs")
    body = {"model": "stub", "prompt": world.prompt(99, 3000), "max_tokens": 800}
    body["ignore_eos"] = True

    async def direct() -> None:
        async with world.session.post(f"{full.url}/v1/completions", json=body) as answer:
            await answer.read()

    task = asyncio.create_task(direct())
    try:
        await world.until(lambda: _at_least(world, 3700), "the router knows what others use")
        before = len(world.asked(full))
        for number in range(8):
            prompt = world.prompt(number, 600)
            answer = await world.complete(prompt, max_tokens=8)
            assert answer.text == world.right(prompt, 8)
        assert len(world.asked(full)) == before
        assert len(world.asked(free)) == 8
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await world.until(lambda: _none(world), "they have gone")


async def _at_least(world: World, tokens: int) -> bool:
    return await others(world, "a") >= tokens


async def _none(world: World) -> bool:
    return not await others(world, "a")

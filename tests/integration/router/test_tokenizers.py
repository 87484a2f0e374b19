"""A router that tokenises prompts itself, before engines that agree with it, and that do not."""

import json

from kvpool.router.prompts.own_tokenizers import FIRST
from tests.integration.router.conftest import MODEL, World
from tests.support.stub_engine.files import TEMPLATE, write_files
from tests.support.stub_engine.tokens import tokens_of

COMPLETIONS, CHAT = "completions", "chat"


async def tokenized(world: World) -> list[str]:
    """What the engine was asked to tokenise since its hashes were verified: the kinds of prompts."""
    state = await world.state("a")
    return [CHAT if "messages" in each else COMPLETIONS for each in state["tokenized"]]


async def used(world: World) -> dict[str, str]:
    text = await world.get("/metrics")
    begin = f'kvpool_router_own_tokenizer{{model="{MODEL}",prompt="'
    lines = [line.removeprefix(begin) for line in text.splitlines() if line.startswith(begin)]
    return {line.split('"')[0]: line.split()[-1] for line in lines}


def text_of(number: int) -> str:
    """Of some blocks."""
    return f"{number} of the <|user|> many 漢字 prompts " * 4


async def ask(world: World, kind: str, numbers: range) -> None:
    """Different prompts, and right answers to them."""
    for number in numbers:
        text = text_of(number)
        if kind == CHAT:
            answer, right = await world.chat(text, max_tokens=4), world.right_chat(text, 4)
        else:
            answer, right = await world.complete(text, max_tokens=4), world.right(text, 4)
        assert answer.text == right


async def test_the_engine_is_asked_for_the_first_prompts_only(world: World) -> None:
    await world.engine("a")
    folder = write_files(world.folder / "model")
    await world.router(models={MODEL: {"tokenizer": str(folder)}})
    before = len(await tokenized(world))
    for kind in (COMPLETIONS, CHAT):
        await ask(world, kind, range(FIRST))
    assert (await tokenized(world))[before:] == [COMPLETIONS] * FIRST + [CHAT] * FIRST
    assert await used(world) == {COMPLETIONS: "1.0", CHAT: "1.0"}
    for kind in (COMPLETIONS, CHAT):
        await ask(world, kind, range(FIRST, FIRST + 8))
    knowledge = (await world.get("/engines"))["knowledge"]
    assert knowledge["tokenized_here"] == 16 and knowledge["tokenized"] == 2 * FIRST + 16
    # A hundredth of them is compared, too; that all were would be an accident without end.
    assert len(await tokenized(world)) - before < 2 * FIRST + 16
    # Its tokens are the engine's: the blocks of a prompt are found again.
    await ask(world, COMPLETIONS, range(1000, 1001))
    body = json.dumps({"model": MODEL, "prompt": text_of(1000)}).encode()

    async def cached() -> bool:
        would = (await world.call("POST", "/explain", body)).body
        return bool(would["expected"]["cached_blocks"] == len(tokens_of(text_of(1000))) // 16)

    await world.until(cached, "the engine's events have arrived")


async def test_another_template_leaves_chats_to_the_engine(world: World) -> None:
    await world.engine("a")
    folder = write_files(world.folder / "model", template="{{ messages[0].content }}" + TEMPLATE)
    router = await world.router(models={MODEL: {"tokenizer": str(folder)}})
    before = len(await tokenized(world))
    for kind in (COMPLETIONS, CHAT):
        await ask(world, kind, range(FIRST + 4))
    asked = (await tokenized(world))[before:]
    assert asked.count(CHAT) == FIRST + 4
    assert FIRST <= asked.count(COMPLETIONS) < FIRST + 4
    assert await used(world) == {COMPLETIONS: "1.0", CHAT: "0.0"}
    assert router.said.count("is not the engines'") == 1 and "many" not in router.said


async def test_a_tokenizer_that_is_not_the_engines_is_not_used(world: World) -> None:
    await world.engine("a")
    folder = write_files(world.folder / "model", begins=False)
    await world.router(models={MODEL: {"tokenizer": str(folder)}})
    before = len(await tokenized(world))
    await ask(world, COMPLETIONS, range(FIRST + 4))
    assert (await tokenized(world))[before:] == [COMPLETIONS] * (FIRST + 4)
    assert (await used(world))[COMPLETIONS] == "0.0"


async def test_files_that_are_not_there_are_named(world: World) -> None:
    nowhere = world.folder / "nowhere"
    said = await world.refused_router(models={MODEL: {"tokenizer": str(nowhere)}})
    assert said.startswith("kvpool: ") and f"{nowhere}/tokenizer.json" in said
    assert said.count("\n") == 1

"""The stub engine itself: what others rely on when they test against it."""

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvpool.placement.kv_events.engine_blocks import EngineBlocks
from kvpool.placement.kv_events.subscriber import EngineSource, EventSubscriber
from kvpool.router.hashing import DEFAULT_SEED, HashSpec, chain, none_hash
from tests.support.stub_engine import Settings, Speed, StubEngine
from tests.support.stub_engine.core import Core, Job
from tests.support.stub_engine.tokens import chat_tokens, text_of, tokens_of

SLOW = Speed(prefill_tokens_s=2000, decode_s=0.01, step_tokens=64)
SPEC = HashSpec(16, "sha256_cbor", none_hash("sha256_cbor", DEFAULT_SEED))


async def direct(world: Any, name: str = "a", **settings: Any) -> StubEngine:
    """An engine, and the world's client turned to it."""
    engine: StubEngine = await world.engine(name, **settings)
    world.url = engine.url
    return engine


@pytest.mark.parametrize("text", ["", "plain", "<|user|>hi<|end|>", "zwei Wörter 🙂", "<|user|"])
def test_a_text_is_what_its_tokens_say(text: str) -> None:
    assert text_of(tokens_of(text, special=False)) == text


def test_a_chats_next_turn_begins_with_its_last_one() -> None:
    turn = [{"role": "user", "content": "hello"}]
    first, _ = chat_tokens(turn)
    second, _ = chat_tokens([*turn, {"role": "assistant", "content": "yes"}, *turn])
    assert second[: len(first)] == first


async def test_an_answer_follows_from_the_prompt_streamed_or_not(world: Any) -> None:
    await direct(world)
    whole = await world.complete("a prompt", max_tokens=9)
    streamed = await world.complete("a prompt", max_tokens=9, stream=True)
    by_ids = await world.complete(tokens_of("a prompt"), max_tokens=9)
    other = await world.complete("another prompt", max_tokens=9)
    assert whole.text == streamed.text == by_ids.text == world.right("a prompt", 9)
    assert other.text == world.right("another prompt", 9) != whole.text
    assert streamed.done and len(streamed.messages) == 9
    assert streamed.messages[-1]["choices"][0]["finish_reason"] == "length"


async def test_chats_begin_with_a_role_and_may_end_with_usage(world: Any) -> None:
    await direct(world)
    options = {"include_usage": True}
    said = await world.chat("hello", max_tokens=4, stream=True, stream_options=options)
    assert said.messages[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert said.text == world.right_chat("hello", 4)
    assert said.messages[-1]["choices"] == []
    assert said.messages[-1]["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"model": "other"}, 404),
        ({"temperature": -1}, 400),
        ({"max_tokens": 0}, 400),
        ({"max_tokens": "many"}, 400),
        ({"prompt": []}, 400),
        ({"prompt": [1 << 20]}, 400),
        ({"prompt": list(range(2000)), "max_tokens": 100}, 400),
    ],
)
async def test_what_vllm_refuses_is_refused(world: Any, body: Any, status: int) -> None:
    await direct(world, max_len=2048)
    refused = await world.complete("x", **body)
    assert refused.status == status == refused.body["error"]["code"]
    assert set(refused.body["error"]) == {"message", "type", "param", "code"}


async def test_what_was_computed_is_found_again_up_to_the_last_token(world: Any) -> None:
    engine = await direct(world)
    prompt = world.prompt(1, 64)
    await world.complete(prompt, max_tokens=1)
    again = await world.complete(prompt, max_tokens=1)
    longer = await world.complete([*prompt, 5], max_tokens=1)
    assert again.body["usage"]["prompt_tokens_details"] == {"cached_tokens": 48}
    assert longer.body["usage"]["prompt_tokens_details"] == {"cached_tokens": 64}
    assert set(chain(SPEC, prompt)) == {each for each in chain(SPEC, prompt) if each in engine.core}


async def test_engines_share_a_pool_and_follow_what_is_computed(world: Any) -> None:
    await direct(world, "b")
    prefill = await direct(world, "a", speed=SLOW)
    prompt = world.prompt(1, 640)
    params = {"kvpool": {"follow_s": 20.0, "source": "node-a"}}
    computing = asyncio.create_task(world.complete(prompt, max_tokens=1))
    await world.until(lambda: _running(prefill), "the prompt is begun")
    world.url = world.url_of("b")
    followed = await world.complete(prompt, max_tokens=4, kv_transfer_params=params)
    await computing
    assert followed.text == world.right(prompt, 4)
    assert followed.body["usage"]["prompt_tokens_details"] == {"cached_tokens": 624}
    state = await world.state("b")
    assert state["loaded_tokens"] == 624
    assert state["cached_tokens"] == 0


async def _running(engine: StubEngine) -> bool:
    return bool(engine.core.running)


async def test_steps_take_their_time_and_serve_all_that_runs(world: Any) -> None:
    engine = await direct(world, speed=SLOW)
    clock = asyncio.get_running_loop().time
    began = clock()
    await world.all(*(world.complete(world.prompt(n, 64), max_tokens=5) for n in range(4)))
    assert clock() - began >= 256 / 2000 + 4 * 0.01  # never sooner
    assert engine.core.generated_tokens == 20


async def test_a_client_that_leaves_is_noticed(world: Any) -> None:
    engine = await direct(world, speed=SLOW)
    body = {"model": "stub", "prompt": "x", "max_tokens": 200, "stream": True}
    async with world.opened("/v1/completions", body) as response:
        await response.content.readline()
    await world.until(lambda: _count(engine, "aborted"), "the engine aborts")
    assert not engine.core.running
    assert engine.core.generated_tokens < 200


async def _count(engine: StubEngine, outcome: str) -> int:
    return engine.counts().get(outcome, 0)


def job(number: int, tokens: int, answer: int = 1) -> Job:
    prompt = [number] * tokens
    hashes = chain(SPEC, prompt + [0] * answer)
    return Job(prompt, [0] * answer, hashes, lambda _: None)


def run(core: Core) -> None:
    while (step := core.begin(0.0)) is not None:
        core.end(step)


def test_what_was_used_last_is_kept() -> None:
    core = Core(Speed(), 16, capacity_blocks=12, pool=None)
    for number in (1, 2, 1, 3):
        core.add(job(number, 80))
        run(core)
    first, second = ([each in core for each in job(n, 80).hashes] for n in (1, 2))
    assert all(first)
    assert not all(second)
    assert core.blocks <= 12


def test_what_does_not_fit_beside_others_waits_for_them() -> None:
    core = Core(Speed(), 16, capacity_blocks=12, pool=None)
    jobs = [job(number, 80, 4) for number in range(3)]
    for each in jobs:
        core.add(each)
    core.begin(0.0)
    assert core.running == jobs[:2]
    core.abort(jobs[0])
    core.begin(0.0)
    assert core.running == jobs[1:]


async def test_events_tell_what_the_cache_holds_whatever_happens(world: Any) -> None:
    engine = await direct(world, capacity_tokens=1024, max_len=1024)
    settings = engine.settings
    clock = asyncio.get_running_loop().time
    source = EngineSource("a", settings.events, settings.replay)
    subscriber = EventSubscriber([source], clock=clock, changed=lambda _: None)
    following = asyncio.create_task(subscriber.run())

    def agree() -> bool:
        blocks: EngineBlocks = subscriber.engines["a"].blocks
        held = [chain(SPEC, world.prompt(n, 320)) for n in range(9)]
        told = [[bool(mask) for mask in blocks.masks(each)] for each in held]
        return told == [[key in engine.core for key in each] for each in held]

    async def agreed() -> bool:
        return bool(subscriber.engines) and subscriber.engines["a"].connected and agree()

    try:
        for number in range(9):
            if number == 4:
                await world.call("POST", "/stub/gap", b'{"forgotten": false}')
            if number == 7:
                await world.call("POST", "/reset_prefix_cache")
            await world.complete(world.prompt(number, 320), max_tokens=1)
            if number != 4:  # the next events show that some were lost
                await world.until(agreed, f"after prompt {number}")
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following


async def test_events_are_written_as_vllm_writes_them(world: Any) -> None:
    engine = await direct(world)
    context = zmq.asyncio.Context()
    sub = context.socket(zmq.SUB)
    sub.subscribe(b"")
    sub.connect(engine.settings.events)
    prompt = world.prompt(1, 40)
    try:
        number = 0
        while not await sub.poll(100):  # the subscription takes a moment to arrive
            number += 1
            await world.complete([number, *prompt], max_tokens=1)
        topic, seq, payload = await sub.recv_multipart()
    finally:
        context.destroy(linger=0)
    _, events, rank = msgspec.msgpack.decode(payload)
    tokens = [number, *prompt]
    hashes = chain(SPEC, tokens)
    stored = [each for each in events if each["type"] == "BlockStored"]
    assert (topic, len(seq), rank) == (b"", 8, 0)
    assert [h for each in stored for h in each["block_hashes"]] == [
        int.from_bytes(each[-8:], "big") for each in hashes
    ]
    assert stored[0]["parent_block_hash"] is None
    assert [t for each in stored for t in each["token_ids"]] == tokens[:32]


@pytest.mark.parametrize("kind", ["error", "cut", "hang"])
@pytest.mark.parametrize("after", [0, 3])
async def test_faults_happen_when_and_as_often_as_told(world: Any, kind: str, after: int) -> None:
    engine = await direct(world)
    await world.fault("a", {"kind": kind, "after_tokens": after, "times": 1})
    body = {"model": "stub", "prompt": "x", "max_tokens": 8, "stream": True}
    if kind == "hang":
        asking = asyncio.create_task(world.ask("/v1/completions", body))
        await world.until(lambda: _taken(engine), "it has come there")
        await world.until(lambda: _generated(engine, after), "so much is answered")
        assert not (await asyncio.wait([asking], timeout=0.5))[0]
        asking.cancel()
        seen = await world.until(lambda: _count(engine, "aborted")) if after else 1
        assert seen == 1
    elif kind == "cut" and not after:
        with pytest.raises(Exception, match="disconnected"):
            await world.ask("/v1/completions", body)
    else:
        said = await world.ask("/v1/completions", body)
        assert (said.status == 500) == (kind == "error" and not after)
        assert len(said.messages) == (after and after + (kind == "error"))
        assert bool(said.broken) == (kind == "cut")
    again = await world.ask("/v1/completions", body)
    assert again.text == world.right("x", 8)
    assert again.done


async def _taken(engine: StubEngine) -> bool:
    """Whether a request has got the only fault."""
    ((_, left),) = engine.faults.left
    return not left


async def _generated(engine: StubEngine, tokens: int) -> bool:
    return engine.core.generated_tokens >= tokens


async def test_a_process_can_be_started_and_killed(world: Any) -> None:
    process = await world.process("p", "--max-len", "512")
    world.url = world.url_of("p")
    assert (await world.complete("hello", max_tokens=3)).text == world.right("hello", 3)
    await world.fault("p", {"kind": "die", "after_tokens": 2})
    said = await world.complete("hello", max_tokens=3, stream=True)
    assert said.broken
    assert await process.ended() == -9


async def test_keys_salts_and_adapters_are_asked_for(world: Any) -> None:
    engine = await direct(world, api_key="secret-of-the-engine", loras=("fine",))
    assert (await world.complete("x")).status == 401
    world.token = "secret-of-the-engine"
    prompt = world.prompt(1, 33)
    plain = await world.complete(prompt, max_tokens=5)
    tuned = await world.complete(prompt, max_tokens=5, model="fine")
    salted = await world.complete(prompt, max_tokens=5, cache_salt="mine")
    assert plain.text == salted.text != tuned.text
    assert engine.core.cached_tokens == 0
    salt = chain(SPEC, prompt, salt="mine")
    assert all(each in engine.core for each in salt)
    assert salt != chain(SPEC, prompt)


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(Exception, match="longest"):
        replace(Settings(), capacity_tokens=100)

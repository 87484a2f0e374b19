"""Requests through the router: right answers, from the right engine, with all that belongs to them."""

import asyncio
import json
from collections import Counter
from typing import Any

import pytest

from kvpool.router.hashing import DEFAULT_SEED, HashSpec, chain, none_hash
from tests.support.stub_engine import Speed

SLOW = Speed(prefill_tokens_s=4000, decode_s=0.005, step_tokens=128)
SPEC = HashSpec(16, "sha256_cbor", none_hash("sha256_cbor", DEFAULT_SEED))
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.mark.parametrize("roles", [("both", "both"), ("prefill", "decode")])
async def test_answers_are_those_of_the_engines(world: Any, roles: tuple[str, str]) -> None:
    for name, role in zip("ab", roles, strict=True):
        await world.engine(name, role=role)
    await world.router()
    for stream in (False, True):
        for number in range(2):
            prompt = world.prompt(number, 100 + 450 * number)
            said = await world.complete(prompt, max_tokens=7, stream=stream)
            assert (said.status, said.text) == (200, world.right(prompt, 7))
        text = "a question " * 30
        assert (await world.complete(text, max_tokens=5, stream=stream)).text == world.right(
            text, 5
        )
        said = await world.chat(text, max_tokens=5, stream=stream)
        assert said.text == world.right_chat(text, 5)
        assert said.done == stream


async def test_bodies_pass_through_as_they_are(world: Any) -> None:
    """Whatever an engine makes of a body is what the client gets, but for what names the answer."""
    engine = await world.engine()
    await world.router()
    image = {"type": "image_url", "image_url": {"url": "http://pictures/1"}}
    tools = [{"type": "function", "function": {"name": "look"}}]
    prompts = {"model": "stub", "prompt": ["one", "two"], "n": 2, "max_tokens": 4}
    chat = {"model": "stub", "max_tokens": 4}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("completions", {"model": "stub", "prompt": "p " * 40, "max_tokens": 4, "n": 3}),
        ("completions", {"model": "stub", "prompt": "p", "max_tokens": 4, "echo": True}),
        ("completions", {"model": "stub", "prompt": "p", "max_tokens": 4, "logprobs": 1}),
        ("completions", {"model": "stub", "prompt": "p", "max_tokens": 99, "stop": "e"}),
        ("completions", {"prompt": [[1, 2], [3, 4]], "model": "stub", "max_tokens": 4}),
        ("completions", prompts),
        ("chat/completions", {**chat, "messages": [{"role": "user", "content": [image]}]}),
        (
            "chat/completions",
            {**chat, "messages": [{"role": "system", "content": "s"}], "tools": tools},
        ),
        (
            "chat/completions",
            {
                **chat,
                "messages": [{"role": "assistant", "content": "and so"}],
                "continue_final_message": True,
                "add_generation_prompt": False,
            },
        ),
    ]

    def plain(answer: Any) -> Any:
        messages = answer.messages or [answer.body]
        kept = [
            {k: v for k, v in each.items() if k not in ("id", "created", "usage")}
            for each in messages
        ]
        if answer.messages:  # of several choices, each in its own order
            kept.sort(key=lambda message: message["choices"][0]["index"])
        return answer.status, kept, answer.done

    through = world.url
    for path, body in bodies:
        for stream in (False, True):
            both = []
            for url in (through, engine.url):
                world.url = url
                both.append(plain(await world.ask(f"/v1/{path}", {**body, "stream": stream})))
            assert both[0] == both[1]
            assert both[0][0] == 200


async def test_the_decode_engine_loads_what_the_prefill_engine_computed(world: Any) -> None:
    await world.engine("p", role="prefill", speed=SLOW)
    await world.engine("d", role="decode", speed=SLOW)
    await world.router()
    prompt = world.prompt(1, 1000)
    said = await world.complete(prompt, max_tokens=6, stream=True)
    assert said.text == world.right(prompt, 6)
    prefill, decode = await world.state("p"), await world.state("d")
    assert decode["loaded_tokens"] == 992  # all full blocks but for the last token
    assert [each["emitted"] for each in of_clients(decode)] == [6]
    assert sum(each["prompt_tokens"] - each["cached"] for each in of_clients(prefill)) == 1000
    assert all(each["body"]["max_tokens"] == 1 for each in of_clients(prefill))


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_computed_for_a_request_is_not_called_cached(
    world: Any, stream: bool
) -> None:
    """The decode engine loads all of it, as if it had been there before."""
    await world.engine("p", role="prefill", speed=SLOW)
    await world.engine("d", role="decode", speed=SLOW)
    await world.router()
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    prompt = world.prompt(1, 1000)

    async def cached(asked: list[int]) -> int:
        said = await world.complete(asked, max_tokens=6, **options)
        body = said.messages[-1] if stream else said.body
        assert body["usage"]["prompt_tokens"] == len(asked)
        return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert await cached(prompt) == 0
    before = of_clients(await world.state("p"))
    longer = [*prompt[:640], *world.prompt(2, 360)]
    said = await cached(longer)
    computed = of_clients(await world.state("p"))[len(before) :]
    assert said == len(longer) - sum(each["prompt_tokens"] - each["cached"] for each in computed)
    assert said >= 640, "it had computed that for the request before"


def of_clients(state: Any) -> list[Any]:
    """Requests that an engine saw, but for the router's own questions."""
    return [each for each in state["requests"] if each["request_id"]]


async def test_requests_go_where_their_blocks_are(world: Any) -> None:
    engines = {name: await world.engine(name, pool=None, speed=SLOW) for name in "abc"}
    await world.router()
    first = {}
    for number in range(6):
        said = await world.complete(world.prompt(number, 480), max_tokens=1)
        first[number] = said.text
    homes = {
        number: [
            name
            for name, engine in engines.items()
            if chain(SPEC, world.prompt(number, 480))[0] in engine.core
        ]
        for number in first
    }
    assert all(len(home) == 1 for home in homes.values())
    for number in first:
        prompt = world.prompt(number, 480)
        await world.until(lambda p=prompt: _knows(world, p, 29), "the events are heard")
        said = await world.complete([*prompt, 7], max_tokens=1)
        assert said.body["usage"]["prompt_tokens_details"]["cached_tokens"] == 480


async def _knows(world: Any, prompt: list[int], blocks: int) -> bool:
    """Whether the router would find so many blocks of it."""
    body = json.dumps({"model": "stub", "prompt": prompt, "max_tokens": 1}).encode()
    found = await world.call("POST", "/explain", body)
    assert found.status == 200, found.body
    return bool(found.body["expected"]["cached_blocks"] >= blocks)


async def test_many_at_once_are_all_answered(world: Any) -> None:
    for name, role in (("a", "both"), ("b", "both"), ("p", "prefill"), ("d", "decode")):
        await world.engine(name, role=role, speed=SLOW)
    await world.router()
    prompts = [world.prompt(number % 7, 200 + 16 * number) for number in range(40)]
    answers = await world.all(
        *(world.complete(p, max_tokens=5, stream=n % 2 == 0) for n, p in enumerate(prompts))
    )
    assert [a.text for a in answers] == [world.right(p, 5) for p in prompts]
    overtaken, again = Counter[str](), Counter[str]()
    for answer in answers:
        told = await world.get("/explain/" + answer.headers["x-kvpool-request-id"])
        steps = [step["what"] for step in told["steps"]]
        (order,) = [step for step in told["steps"] if step["what"] == "order"]
        if order["follow"] and "computed" not in steps:
            overtaken[order["engine"]] += 1
        # On a busy machine, who followed may not have begun in time, and was asked again.
        again.update(step["engine"] for step in told["steps"] if step["what"] == "follow ended")
    for name in "abpd":
        state = await world.state(name)
        assert state["running"] == state["waiting"] == 0
        # Otherwise a prefill is called off only when whoever followed has answered before its own end was heard.
        assert set(state["counts"]) <= {"finished", "aborted"}
        assert state["counts"].get("aborted", 0) <= overtaken[name] + again[name]


async def test_one_id_and_one_trace_go_all_the_way(world: Any) -> None:
    prefill = await world.engine("p", role="prefill")
    decode = await world.engine("d", role="decode")
    await world.router()
    sent = {"x-request-id": "mine-1", "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
    said = await world.complete(world.prompt(1, 200), max_tokens=2, headers=sent)
    assert said.headers["x-kvpool-request-id"] == "mine-1"
    seen = [*world.asked(prefill), *world.asked(decode)]
    assert len(seen) >= 2
    assert {each.request_id for each in seen} == {"mine-1"}
    parents = [each.traceparent.split("-") for each in seen]
    assert {parent[1] for parent in parents} == {TRACE}
    assert {parent[2] for parent in parents} == {"00f067aa0ba902b7"}

    bare = await world.complete("without any", max_tokens=2)
    made = bare.headers["x-kvpool-request-id"]
    assert len(made) >= 16
    assert world.asked(decode)[-1].request_id == made
    assert world.asked(decode)[-1].traceparent.split("-")[1] != TRACE


async def test_a_past_request_and_a_possible_one_are_explained(world: Any) -> None:
    prefill = await world.engine("p", role="prefill", speed=SLOW)
    decode = await world.engine("d", role="decode")
    await world.router()
    prompt = world.prompt(1, 320)
    await world.complete(prompt, max_tokens=2, headers={"x-request-id": "asked-about"})
    told = await world.get("/explain/asked-about")
    assert told["outcome"] == "answered"
    orders = [step for step in told["steps"] if step["what"] == "order"]
    assert [each["engine"] for each in orders[0]["candidates"]] == ["p"]
    assert orders[-1]["up_to_token"] == 320
    assert orders[-1]["decode"] == "d"

    before = len(world.asked(prefill)), len(world.asked(decode))
    body = json.dumps({"model": "stub", "prompt": world.prompt(2, 320)}).encode()
    dry = await world.call("POST", "/explain", body)
    assert dry.body["engine"] == "p"
    assert dry.body["prompt_tokens"] == 320
    assert (len(world.asked(prefill)), len(world.asked(decode))) == before
    assert (await world.call("GET", "/explain/never-seen")).status == 404


async def test_models_tokens_health_and_metrics(world: Any) -> None:
    engine = await world.engine(loras=("fine",))
    await world.router()
    await world.until(lambda: _has_models(world, {"stub", "fine"}), "the models are known")
    through = world.url
    asked = b'{"model": "stub", "prompt": "some text"}'
    tokens = await world.call("POST", "/tokenize", asked)
    world.url = engine.url
    assert (await world.call("POST", "/tokenize", asked)).body == tokens.body
    world.url = through
    assert (await world.call("GET", "/health")).status == 200
    tuned = await world.complete("x", model="fine", max_tokens=4)
    world.url = engine.url
    assert tuned.text == (await world.complete("x", model="fine", max_tokens=4)).text
    world.url = through
    metrics = await world.get("/metrics")
    assert 'kvpool_router_requests_total{outcome="answered"} 1.0' in metrics


async def _has_models(world: Any, names: set[str]) -> bool:
    listed = await world.get("/v1/models")
    return {each["id"] for each in listed["data"]} == names


async def test_salts_part_requests_and_stay_with_them(world: Any) -> None:
    engine = await world.engine(speed=SLOW)
    await world.router()
    prompt = world.prompt(1, 160)
    for salt in ("one", "two", "one"):
        said = await world.complete(prompt, max_tokens=2, cache_salt=salt)
        assert said.text == world.right(prompt, 2)
    hashes = chain(SPEC, prompt, salt="two")
    assert all(each in engine.core for each in hashes)
    assert chain(SPEC, prompt)[0] not in engine.core


async def test_priority_goes_first_when_there_is_a_queue(world: Any) -> None:
    engine = await world.engine(speed=SLOW)
    await world.router()
    done: list[str] = []
    engine.hold(1)

    async def ask(name: str, number: int, priority: int) -> None:
        prompt = world.prompt(number, 1200)
        headers = {"x-kvpool-priority": str(priority)}
        # Streamed: the beginning of another answer is only presumed, after some time.
        await world.complete(prompt, max_tokens=1, stream=True, headers=headers)
        done.append(name)

    first = [asyncio.create_task(ask("first", n, 0)) for n in range(3)]
    await world.until(lambda: _waits(world, 1), "some wait")
    rest = [asyncio.create_task(ask("low", 10 + n, 0)) for n in range(3)]
    await world.until(lambda: _waits(world, 4), "the low ones wait")
    high = asyncio.create_task(ask("high", 20, 10))
    await world.until(lambda: _waits(world, 5), "and so does the high one")
    engine.hold(None)
    await asyncio.gather(high, *first, *rest)
    assert done.index("high") < max(place for place, name in enumerate(done) if name == "low")


async def _waits(world: Any, least: int) -> bool:
    for line in (await world.get("/metrics")).splitlines():
        if line.startswith("kvpool_router_requests_waiting "):
            return float(line.split()[1]) >= least
    return False

"""Engines, routers and clients that fail: every accepted request ends with a right answer or a clear error."""

import asyncio
import itertools
import json
import signal
import socket
import struct
from typing import Any

import pytest

from kvpool.router.hashing import DEFAULT_SEED, HashSpec, chain, none_hash
from tests.support.servers.etcd import free_port
from tests.support.stub_engine import Speed
from tests.support.stub_engine.core import Pool
from tests.support.stub_engine.faults import Fault

SPEC = HashSpec(16, "sha256_cbor", none_hash("sha256_cbor", DEFAULT_SEED))
SLOW = Speed(prefill_tokens_s=4000, decode_s=0.005, step_tokens=128)
SLOW_FLAGS = ("--prefill-tokens-s", "4000", "--decode-s", "0.005", "--step-tokens", "128")
LEFT = "aborted"
PAUSE_S = 10.0


async def idle(*engines: Any) -> bool:
    return not any(each.core.running or each.core.waiting for each in engines)


async def counted(engine: Any, outcome: str) -> int:
    return engine.counts().get(outcome, 0)


async def begun(world: Any, name: str, tokens: int = 1) -> bool:
    """Whether an engine has computed so much of the request that it works on now."""
    running = [
        each for each in (await world.state(name))["requests"] if each["outcome"] == "running"
    ]
    return any(each["computed"] >= tokens for each in running)


async def engines(world: Any) -> dict[str, Any]:
    return {each["name"]: each for each in (await world.get("/engines"))["engines"]}


async def cached_blocks(world: Any, prompt: list[int]) -> int:
    """Of a prompt, as the router believes."""
    body = json.dumps({"model": "stub", "prompt": prompt, "max_tokens": 1}).encode()
    found = await world.call("POST", "/explain", body)
    assert found.status == 200, found.body
    return int(found.body["expected"]["cached_blocks"])


async def knows(world: Any, prompt: list[int], blocks: int) -> bool:
    return await cached_blocks(world, prompt) == blocks


@pytest.mark.parametrize("path", ["/v1/models", "/tokenize", "/v1/completions"])
async def test_an_engine_whose_first_answers_fail_is_verified_all_the_same(
    world: Any, path: str
) -> None:
    engine = await world.engine("a")
    engine.faults.set([Fault("error", times=2, path=path, status=503)])
    await world.router(verified=True)
    assert (await world.complete("next", max_tokens=3)).text == world.right("next", 3)


@pytest.mark.parametrize("kind", ["error", "cut", "hang"])
@pytest.mark.parametrize("stream", [False, True])
async def test_who_fails_before_the_answer_is_replaced(world: Any, kind: str, stream: bool) -> None:
    """One that hangs is found by its probes."""
    await world.engine("a")
    await world.engine("b")
    # The one that is well may be late, too: on a machine that stands still.
    hangs = {"probe_timeout_s": 2.0, "retries_max": 16} if kind == "hang" else {}
    await world.router(failures_max=2, **hangs)
    probes = [{"kind": kind, "path": "/health"}] if kind == "hang" else []
    await world.fault("a", {"kind": kind}, *probes)
    prompts = [world.prompt(number, 100) for number in range(6)]
    answers = [await world.complete(p, max_tokens=5, stream=stream) for p in prompts]
    assert [a.text for a in answers] == [world.right(p, 5) for p in prompts]
    assert all(a.status == 200 and a.done == stream for a in answers)


@pytest.mark.parametrize(("kind", "status"), [("error", 500), ("cut", 502), ("hang", 504)])
async def test_when_nobody_can_answer_the_client_is_told(
    world: Any, kind: str, status: int
) -> None:
    """And whoever comes next is served at once."""
    engine = await world.engine()
    await world.router(retries_max=1, failures_max=1)
    await world.fault("a", {"kind": kind, "path": "/v1/completions"})
    failed = await world.complete("x", max_tokens=5, headers={"x-kvpool-deadline-s": "2"})
    assert failed.status == status
    assert failed.body["error"]["message"]
    await world.until(lambda: idle(engine))
    await world.fault("a")
    said = await world.complete("again", max_tokens=3)
    assert (said.status, said.text) == (200, world.right("again", 3))


async def test_one_client_whose_request_engines_answer_with_an_error_stops_nobody(
    world: Any,
) -> None:
    for name in "abc":
        await world.engine(name)
    await world.router(failures_max=1, backoff_s=PAUSE_S, backoff_s_max=PAUSE_S)
    for name in "abc":
        await world.fault(name, {"kind": "error", "status": 503, "path": "/v1/chat/"})
    for number in range(10):
        bad = await world.chat("bad", max_tokens=2)
        assert (bad.status, bad.body["error"]["message"]) == (503, "the stub was told to fail")
        prompt = world.prompt(number, 50)
        assert (await world.complete(prompt, max_tokens=2)).text == world.right(prompt, 2)
    assert not any([await out(world, name) for name in "abc"])


async def test_a_slow_answer_is_waited_for_as_long_as_its_engine_is_well(world: Any) -> None:
    await world.engine("a")
    await world.engine("b")
    await world.router(stall_s=0.1)
    for name in "ab":
        await world.hold(name, 1)
    prompts = [world.prompt(number, 100) for number in range(4)]
    asking = [
        asyncio.create_task(world.complete(p, max_tokens=5, stream=bool(number % 2)))
        for number, p in enumerate(prompts)
    ]
    await world.until(lambda: begun(world, "a"), "it computes")
    late = await world.complete("x", max_tokens=2, headers={"x-kvpool-deadline-s": "2"})
    assert late.status == 504
    for name in "ab":
        await world.hold(name, None)
    answers = await asyncio.gather(*asking)
    assert [each.text for each in answers] == [world.right(p, 5) for p in prompts]
    asked = sum(len(world.asked(world.engines[name])) for name in "ab")
    assert asked <= len(prompts) + 1, "none was begun anew"


@pytest.mark.parametrize("kind", ["error", "cut", "end", "hang"])
async def test_what_breaks_in_the_middle_of_a_stream_ends_with_an_error(
    world: Any, kind: str
) -> None:
    engine = await world.engine()
    hangs = {"stall_s": 3.0, "probe_timeout_s": 1.0, "failures_max": 2} if kind == "hang" else {}
    await world.router(**hangs)
    probes = [{"kind": kind, "path": "/health"}] if kind == "hang" else []
    await world.fault("a", {"kind": kind, "after_tokens": 3, "times": 1}, *probes)
    said = await world.complete("x", max_tokens=20, stream=True)
    await world.fault("a")
    await world.until(lambda: back(world, "a"))
    assert said.status == 200
    assert said.text == world.right("x", 20)[:3]
    assert len(said.errors) == 1
    assert said.errors[0]["message"]
    # Never a silent end. What an engine itself says of its failure, and how it ends, goes as it is.
    assert said.done == (kind == "error")
    await world.until(lambda: idle(engine), "the engine is told to stop")
    assert (await world.complete("x", max_tokens=20)).text == world.right("x", 20)


async def test_an_answer_that_is_not_streamed_is_whole_or_computed_again(world: Any) -> None:
    await world.engine("a")
    await world.engine("b")
    await world.router()
    await world.fault("a", {"kind": "cut", "after_tokens": 3, "times": 1})
    await world.fault("b", {"kind": "cut", "after_tokens": 3, "times": 1})
    said = await world.complete("x", max_tokens=20)
    assert said.text == world.right("x", 20)


@pytest.mark.parametrize(("kind", "path"), [("error", "/health"), ("cut", "/v1/")])
async def test_an_engine_that_fails_gets_nothing_until_it_is_well(
    world: Any, kind: str, path: str
) -> None:
    """It fails probes, or it is well by its own account and loses requests that another one serves."""
    engine = await world.engine("a")
    await world.engine("b")
    await world.router(failures_max=2, backoff_s=PAUSE_S, backoff_s_max=PAUSE_S)
    await world.fault("a", {"kind": kind, "path": path})
    numbers = itertools.count()
    clock = asyncio.get_running_loop().time
    passed_at = clock()

    async def asked_until_out() -> bool:
        nonlocal passed_at
        prompt = world.prompt(next(numbers), 50)
        assert (await world.complete(prompt, max_tokens=2)).text == world.right(prompt, 2)
        asked_at = clock()
        if await out(world, "a"):
            return True
        passed_at = asked_at
        return False

    while True:
        await world.until(asked_until_out, "it is left out")
        before = len(world.asked(engine))
        for _ in range(6):
            prompt = world.prompt(next(numbers), 50)
            assert (await world.complete(prompt, max_tokens=2)).status == 200
        # One that is well by its own account gets a request after the pause: on a slow machine that may be over.
        if path == "/health" or clock() < passed_at + PAUSE_S:
            break
    assert len(world.asked(engine)) == before
    await world.fault("a")
    await world.until(lambda: back(world, "a"), "it comes back")


async def out(world: Any, name: str) -> bool:
    return (await engines(world))[name]["breaker"] == "open"


async def back(world: Any, name: str) -> bool:
    return (await engines(world))[name]["breaker"] != "open"


async def test_a_prefill_engine_killed_in_mid_prompt_is_replaced(world: Any) -> None:
    """The other one goes on from the blocks that were committed."""
    processes = {n: await world.process(n, *SLOW_FLAGS, role="prefill") for n in ("p", "q")}
    await world.engine("d", role="decode", speed=SLOW)
    await world.router()
    for name in processes:
        await world.hold(name, 1000)
    prompt = world.prompt(1, 4000)
    asking = asyncio.create_task(world.complete(prompt, max_tokens=5))

    async def who() -> str:
        return "".join([name for name in processes if await begun(world, name, 1000)])

    first = await world.until(who, "one is in the middle")
    processes[first].kill()
    committed = Pool(world.pool).prefix(chain(SPEC, prompt))
    (other,) = set(processes) - {first}
    await world.hold(other, None)
    said = await asking
    assert said.text == world.right(prompt, 5)
    assert (await world.state(other))["loaded_tokens"] >= 16 * committed > 900


async def test_a_decode_engine_killed_before_its_first_token_is_replaced(world: Any) -> None:
    await world.engine("p", role="prefill")
    processes = {n: await world.process(n, *SLOW_FLAGS, role="decode") for n in ("d", "e")}
    await world.router()
    await world.fault("d", {"kind": "die", "path": "/v1/comp"})
    prompts = [world.prompt(number, 300) for number in range(8)]
    said = await world.all(*(world.complete(p, max_tokens=5, stream=True) for p in prompts))
    assert [each.text for each in said] == [world.right(p, 5) for p in prompts]
    assert all(each.done for each in said)
    assert await processes["d"].ended() == -signal.SIGKILL


async def test_a_decode_engine_killed_in_mid_stream_is_an_error_and_no_silence(world: Any) -> None:
    await world.engine("p", role="prefill")
    process = await world.process("d", *SLOW_FLAGS, role="decode")
    await world.router()
    await world.fault("d", {"kind": "die", "after_tokens": 4})
    prompt = world.prompt(1, 300)
    said = await world.complete(prompt, max_tokens=50, stream=True)
    assert await process.ended() == -signal.SIGKILL
    assert said.status == 200
    assert world.right(prompt, 50).startswith(said.text)
    assert len(said.errors) == 1
    assert not said.done


async def test_a_stopped_engine_delays_and_breaks_nothing(world: Any) -> None:
    """SIGSTOP: connections stay, nothing comes."""
    process = await world.process("a", *SLOW_FLAGS)
    await world.process("b", *SLOW_FLAGS)
    await world.router(probe_timeout_s=1.0)
    await world.hold("a", 1)
    prompts = [world.prompt(number, 400) for number in range(8)]
    asking = [asyncio.create_task(world.complete(p, max_tokens=5)) for p in prompts]
    await world.until(lambda: begun(world, "a"), "it has begun something")
    process.signal(signal.SIGSTOP)
    answers = await asyncio.gather(*asking)
    assert [a.text for a in answers] == [world.right(p, 5) for p in prompts]
    process.signal(signal.SIGCONT)
    await world.hold("a", None)
    await world.until(lambda: back(world, "a"), "it is used again")


async def test_an_engine_that_begins_anew_has_an_empty_cache(world: Any) -> None:
    port = str(free_port())
    process = await world.process("a", *SLOW_FLAGS, "--port", port)
    await world.router()
    prompt = world.prompt(1, 325)
    await world.complete(prompt, max_tokens=1)
    await world.until(lambda: knows(world, prompt, 20), "its events are heard")
    process.kill()
    world.pool = world.folder / "empty-pool"
    world.pool.mkdir()
    world.tables.clear()
    await world.process("a", *SLOW_FLAGS, "--port", port)
    await world.until(lambda: well_without(world, prompt), "the router knows that it has nothing")
    assert (await world.complete(prompt, max_tokens=5)).text == world.right(prompt, 5)
    await world.until(lambda: knows(world, prompt, 20), "its new events are heard")


async def well_without(world: Any, prompt: list[int]) -> bool:
    body = json.dumps({"model": "stub", "prompt": prompt, "max_tokens": 1}).encode()
    found = await world.call("POST", "/explain", body)
    return bool(found.status == 200 and found.body.get("expected", {}).get("cached_blocks") == 0)


@pytest.mark.parametrize("forgotten", [False, True])
async def test_events_that_are_lost_are_asked_for_or_their_loss_is_known(
    world: Any, forgotten: bool
) -> None:
    await world.engine(capacity_tokens=2048, max_len=2048)
    await world.router()
    first, second, third = (world.prompt(number, 805) for number in range(3))
    through = world.url
    await world.complete(first, max_tokens=1)
    await world.until(lambda: knows(world, first, 50), "the first is heard of")
    world.url = world.url_of("a")
    await world.call("POST", "/stub/gap", json.dumps({"forgotten": forgotten}).encode())
    # Not through the router, who would expect it there. Their events are lost: the first's end, too.
    await world.complete(second, max_tokens=1)
    await world.complete(third, max_tokens=1)
    world.url = through
    held = {number: await held_blocks(world, p) for number, p in enumerate((first, second, third))}
    assert held[2] == 50
    for number, prompt in enumerate((first, second, third)):
        # A replay brings what was lost. Without it, the router knows that it knows less, never more.
        if not forgotten:
            await world.until(lambda p=prompt, n=number: knows(world, p, held[n]), f"of {number}")
        else:
            await world.until(lambda p=prompt, n=number: at_most(world, p, held[n]), f"of {number}")
    await world.until(lambda: knows(world, third, 50), "what came after the gap")


async def held_blocks(world: Any, prompt: list[int]) -> int:
    """Of a prompt, as the engine itself would use them."""
    engine = world.engines["a"]
    hashes = chain(SPEC, prompt)
    held = [each in engine.core for each in hashes]
    return held.index(False) if False in held else len(held)


async def at_most(world: Any, prompt: list[int], blocks: int) -> bool:
    return await cached_blocks(world, prompt) <= blocks


async def test_a_router_that_begins_anew_knows_what_engines_hold(world: Any) -> None:
    for name in "ab":
        await world.engine(name, speed=SLOW)
    listen = f"127.0.0.1:{free_port()}"
    router = await world.router(listen=listen)
    prompts = [world.prompt(number, 325) for number in range(4)]
    await world.all(*(world.complete(p, max_tokens=1) for p in prompts))
    router.kill()
    await world.router(listen=listen)
    served = asyncio.create_task(world.complete("meanwhile", max_tokens=3))
    for prompt in prompts:
        await world.until(lambda p=prompt: knows(world, p, 20), "the index is rebuilt")
    assert (await served).text == world.right("meanwhile", 3)


@pytest.mark.parametrize("when", ["queue", "prefill", "decode", "stream"])
async def test_a_client_that_leaves_ends_its_request_everywhere(world: Any, when: str) -> None:
    prefill = await world.engine("p", role="prefill", speed=SLOW)
    decode = await world.engine("d", role="decode", speed=SLOW)
    await world.router()
    # They are in the middle for as long as it takes until they are told.
    prefill.hold(1 if when == "queue" else 200)
    if when in ("queue", "prefill"):
        prompt = world.prompt(1, 8000)
        ahead = world.complete(world.prompt(2, 8000), max_tokens=1) if when == "queue" else None
        before = asyncio.create_task(ahead) if ahead is not None else None
        if before is not None:
            await world.until(lambda: begun(world, "p"), "the first is computed")
        asking = asyncio.create_task(world.complete(prompt, max_tokens=5))
        if before is None:
            await world.until(lambda: begun(world, "p", 200), "the prompt is computed")
        else:
            await world.until(lambda: in_flight(world, 2), "the second one is there")
            before.cancel()
        asking.cancel()
        await world.until(lambda: counted(prefill, LEFT), "the prefill engine is told")
    else:
        prefill.hold(None)
        decode.hold(310)
        body = {"model": "stub", "prompt": world.prompt(1, 300), "max_tokens": 3000}
        body |= {"stream": when == "stream", "ignore_eos": True}
        if when == "stream":
            async with world.opened("/v1/completions", body) as response:
                await response.content.readline()
        else:
            asking = asyncio.create_task(world.ask("/v1/completions", body))
            await world.until(lambda: begun(world, "d", 310), "the answer is computed")
            asking.cancel()
        await world.until(lambda: counted(decode, LEFT), "the decode engine is told")
    await world.until(lambda: idle(prefill, decode), "nothing is left")
    await world.until(lambda: in_flight(world, 0), "nor in the router")
    for engine in (prefill, decode):
        engine.hold(None)
    assert prefill.core.prompt_tokens + decode.core.generated_tokens < 20_000
    assert (await world.complete("next", max_tokens=3)).text == world.right("next", 3)


async def in_flight(world: Any, count: int) -> bool:
    lines = (await world.get("/metrics")).splitlines()
    found = next(line for line in lines if line.startswith("kvpool_router_active_requests "))
    return float(found.split()[1]) == count


async def test_a_client_that_does_not_read_holds_up_nobody_and_is_given_up(world: Any) -> None:
    engine = await world.engine(max_len=1 << 16, speed=Speed(decode_s=0.0))
    await world.router(client_stall_s=1.0)
    host, port = world.url.removeprefix("http://").split(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, (host, int(port)))
    body = {"model": "stub", "prompt": "x", "max_tokens": 60_000, "stream": True, "logprobs": 1}
    data = json.dumps(body | {"ignore_eos": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    await loop.sock_sendall(sock, head.encode() + data)
    with sock:
        await world.until(lambda: working(engine), "it has begun")
        for number in range(3):
            said = await world.complete(world.prompt(number, 50), max_tokens=5)
            assert said.text == world.right(world.prompt(number, 50), 5)
        await world.until(lambda: counted(engine, LEFT), "it is given up")
        await world.until(lambda: in_flight(world, 0), "in the router, too")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def working(engine: Any) -> bool:
    return bool(engine.core.generated_tokens)


async def test_draining_an_engine_loses_no_request(world: Any) -> None:
    for name in "ab":
        await world.engine(name, speed=SLOW)
    await world.router()
    prompts = [world.prompt(number, 400) for number in range(16)]
    asking = [asyncio.create_task(world.complete(p, max_tokens=20, stream=True)) for p in prompts]
    await world.until(lambda: begun(world, "a"), "it has begun something")
    assert (await world.call("POST", "/engines/a/drain")).status in (200, 202)
    # What is on its way there counts too, and what ends between these two lines does twice.
    there = (await engines(world))["a"]
    its_own = there["prefills"] + there["decodes"] + world.engines["a"].counts()["finished"]
    later = [asyncio.create_task(world.complete(p, max_tokens=3)) for p in prompts[:6]]
    answers = await asyncio.gather(*asking, *later)
    assert [a.text for a in answers[:16]] == [world.right(p, 20) for p in prompts]
    assert [a.text for a in answers[16:]] == [world.right(p, 3) for p in prompts[:6]]
    await world.until(lambda: drained(world, "a"), "it is empty")
    # What it had may have gone on there; nothing new began.
    drained_after = len(world.asked(world.engines["a"]))
    assert drained_after <= its_own
    assert set(world.engines["a"].counts()) == {"finished"}
    assert (await world.call("DELETE", "/engines/a/drain")).status == 200
    await world.all(*(world.complete(world.prompt(50 + n, 400), max_tokens=2) for n in range(8)))
    assert len(world.asked(world.engines["a"])) > drained_after


async def drained(world: Any, name: str) -> bool:
    return bool((await engines(world))[name]["state"] == "drained")


async def test_a_router_that_is_told_to_end_finishes_what_it_has(world: Any) -> None:
    engine = await world.engine(speed=SLOW)
    router = await world.router()
    engine.hold(1)
    prompts = [world.prompt(number, 800) for number in range(4)]
    asking = [asyncio.create_task(world.complete(p, max_tokens=20, stream=True)) for p in prompts]
    await world.until(lambda: in_flight(world, 4), "they are under way")
    router.signal(signal.SIGTERM)
    engine.hold(None)
    answers = await asyncio.gather(*asking)
    assert [a.text for a in answers] == [world.right(p, 20) for p in prompts]
    assert all(a.done for a in answers)
    assert await router.ended() == 0


async def test_roles_follow_the_load_and_no_request_is_lost(world: Any) -> None:
    """What is asked for is mostly answers: an engine for prompts becomes one for them."""
    for name, role in (("p", "prefill"), ("f", "prefill"), ("d", "decode")):
        await world.engine(name, role=role, speed=SLOW, capacity_tokens=4096, max_len=4096)
        world.tables[-1] |= {"flexible": True, "capacity_tokens": 4096}
    await world.router(role_dwell_s=1.0, role_smooth_s=0.5)
    prompts = [world.prompt(number, 64) for number in range(60)]
    asking = [
        asyncio.create_task(world.complete(p, max_tokens=200, ignore_eos=True)) for p in prompts
    ]
    await world.until(lambda: has_role(world, "pf", "decode"), "one of the two has changed")
    answers = await asyncio.gather(*asking)
    assert [a.text for a in answers] == [world.right(p, 200) for p in prompts]
    assert await has_role(world, "pf", "prefill"), "never the last one"


async def has_role(world: Any, names: str, role: str) -> bool:
    shown = await engines(world)
    return any(shown[name]["role"] == role for name in names)

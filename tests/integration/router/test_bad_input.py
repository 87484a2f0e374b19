"""What clients must not send, and who must not ask: each gets a clear answer, and no engine is troubled."""

import asyncio
import json
from pathlib import Path
from typing import Any

from tests.support.stub_engine import Speed

SLOW = Speed(prefill_tokens_s=4000, decode_s=0.005, step_tokens=128)
TOKEN = "a-token-of-more-than-16-characters"
COMPLETIONS = "/v1/completions"


def of(**body: Any) -> bytes:
    return json.dumps({"model": "stub", "prompt": "x"} | body).encode()


async def test_what_is_no_request_is_refused_and_reaches_no_engine(world: Any) -> None:
    engine = await world.engine()
    await world.router()
    for path in (COMPLETIONS, "/v1/chat/completions"):
        for data in (
            b"",
            b"{",
            b'{"model": "stub"',
            b"\xff\xfe",
            b'{"a":"\xff"}',
            b"[1]",
            b'"x"',
            b"null",
            b"{}{}",
        ):
            refused = await world.call("POST", path, data)
            assert refused.status == 400, (path, data)
            assert refused.body["error"]["code"] == 400
            assert refused.body["error"]["message"]
        deep = b'{"model": "stub", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
        assert (await world.call("POST", path, deep)).status == 400
    assert not world.asked(engine)
    assert (await world.call("GET", COMPLETIONS)).status == 405
    assert (await world.call("POST", "/v1/nothing", b"{}")).status == 404
    assert (await world.complete("still here", max_tokens=3)).text == world.right("still here", 3)


async def test_an_unknown_model_is_not_found(world: Any) -> None:
    engine = await world.engine()
    await world.router()
    for path in ("completions", "chat/completions"):
        refused = await world.call("POST", f"/v1/{path}", of(model="other"))
        assert refused.status == 404
        assert refused.body["error"]["type"] == "NotFoundError"
        assert "other" in refused.body["error"]["message"]
    assert not world.asked(engine)


async def test_a_body_may_be_so_large_and_no_larger(world: Any) -> None:
    engine = await world.engine()
    await world.router(body_bytes_max=100_000)
    assert (await world.complete("x" * 20_000, max_tokens=2)).status == 200
    before = len(world.asked(engine))
    large = of(prompt="x" * 100_000)
    assert (await world.call("POST", COMPLETIONS, large)).status == 413

    async def pieces() -> Any:  # without a length
        for at in range(0, len(large), 10_000):
            yield large[at : at + 10_000]

    async with world.session.post(world.url + COMPLETIONS, data=pieces()) as response:
        assert response.status == 413
    assert len(world.asked(engine)) == before
    # A length that is a lie, and a body that never comes: the router serves others meanwhile.
    host, port = world.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n\r\n{"
    )
    await writer.drain()
    assert (await world.complete("others", max_tokens=2)).status == 200
    writer.close()


async def test_the_engines_own_refusals_pass_through(world: Any) -> None:
    engine = await world.engine(max_len=2048)
    await world.router()
    through = world.url
    bodies: list[dict[str, Any]] = [
        {"temperature": -1},
        {"max_tokens": 0},
        {"max_tokens": -7},
        {"max_tokens": "many"},
        {"n": 0},
        {"n": "two"},
        {"prompt": 7},
        {"prompt": []},
        {"prompt": ""} | {"max_tokens": 5000},
        {"prompt": [1, -1]},
        {"prompt": [1, 10**30]},
        {"prompt": [1, 50_000]},
        {"prompt": ["a", 7]},
        {"prompt": {"text": "x"}},
        {"stop": 7},
        {"stream": "yes"},
        {"stream_options": 3},
    ]
    # Prompts longer than the model: as text and as tokens.
    bodies += [{"prompt": "x" * 3000}, {"prompt": [5] * 3000}, {"prompt": [5] * 2040}]
    for body in bodies:
        both = []
        for url in (through, engine.url):
            world.url = url
            said = await world.complete("x", **body)
            both.append((said.status, said.body))
        assert both[0] == both[1], body
        assert both[0][0] == 400, body
    world.url = through
    chats: list[dict[str, Any]] = [
        {"messages": 3},
        {"messages": [{"role": "nobody", "content": "x"}]},
        {},
    ]
    for chat in chats:
        for url in (through, engine.url):
            world.url = url
            assert (await world.ask("/v1/chat/completions", {"model": "stub"} | chat)).status == 400
    world.url = through
    assert (await world.complete("and on", max_tokens=3)).text == world.right("and on", 3)


async def test_headers_that_make_no_sense(world: Any) -> None:
    engine = await world.engine()
    await world.router()
    said = await world.complete(
        "x", max_tokens=1, headers={"traceparent": "00-nonsense", "x-request-id": "a b\tc"}
    )
    assert said.status == 200
    assert " " not in said.headers["x-kvpool-request-id"]
    assert len(world.asked(engine)[-1].traceparent.split("-")[1]) == 32
    for name, value in (
        ("x-kvpool-deadline-s", "soon"),
        ("x-kvpool-deadline-s", "-1"),
        ("x-kvpool-deadline-s", "nan"),
        ("x-kvpool-priority", "very"),
    ):
        said = await world.complete("x", max_tokens=1, headers={name: value})
        assert said.status == 400, (name, value)
        assert name in said.body["error"]["message"].lower()


async def test_a_page_in_a_browser_may_not_ask(world: Any) -> None:
    """It could reach loopback, too."""
    engine = await world.engine()
    await world.router()
    refused = await world.complete("x", headers={"origin": "http://somewhere.example"})
    assert refused.status == 403
    assert not world.asked(engine)


async def test_off_loopback_nobody_asks_without_a_token(world: Any) -> None:
    await world.engine()
    refused = await world.refused_router(listen="0.0.0.0:0")
    assert "token" in refused
    assert "Traceback" not in refused
    short = await world.refused_router(listen="0.0.0.0:0", environ={"KVPOOL_ROUTER_TOKEN": "short"})
    assert "16 characters" in short
    assert "short" not in short.replace("shorter", "")

    clear = await world.refused_router(listen="0.0.0.0:0", environ={"KVPOOL_ROUTER_TOKEN": TOKEN})
    assert "encrypted in transit" in clear
    router = await world.router(
        listen="0.0.0.0:0", plaintext=True, environ={"KVPOOL_ROUTER_TOKEN": TOKEN}
    )
    for given in ("", "another-token-of-16-characters", TOKEN[:-1]):
        world.token = given
        for method, path in (
            ("POST", COMPLETIONS),
            ("GET", "/v1/models"),
            ("GET", "/engines"),
            ("GET", "/metrics"),
            ("GET", "/explain/x"),
        ):
            answered = await world.call(method, path, of() if method == "POST" else None)
            assert answered.status == 401, (given, path)
    world.token = TOKEN
    assert (await world.complete("x", max_tokens=3)).text == world.right("x", 3)
    assert TOKEN not in router.said


async def test_tenants_ask_for_answers_and_nothing_else(world: Any, folder: Path) -> None:
    await world.engine()
    path = folder / "tenant-token"
    path.write_text("token-of-the-first-tenant")
    path.chmod(0o644)
    config = {"tenants": {"first": {"token_file": str(path)}}, "listen": "127.0.0.1:0"}
    environ = {"KVPOOL_ROUTER_TOKEN": TOKEN}
    assert "chmod 600" in await world.refused_router(environ=environ, **config)
    path.chmod(0o600)
    await world.router(environ=environ, **config)
    world.token = "token-of-the-first-tenant"
    assert (await world.complete("x", max_tokens=3)).status == 200
    assert (await world.call("POST", "/engines/a/drain")).status in (401, 403)
    world.token = TOKEN
    assert (await world.call("GET", "/engines")).status == 200


async def test_an_engines_key_goes_to_the_engine_and_nowhere_else(world: Any) -> None:
    engine = await world.engine(api_key="key-of-the-engine")
    router = await world.router(environ={"KVPOOL_ENGINE_API_KEY": "key-of-the-engine"})
    said = await world.complete("x", max_tokens=3)
    assert said.text == world.right("x", 3)
    assert world.asked(engine)
    shown = json.dumps([await world.get("/engines"), await world.get("/metrics")])
    assert "key-of-the-engine" not in shown + router.said


async def test_a_deadline_ends_a_request_wherever_it_is(world: Any) -> None:
    engine = await world.engine(speed=SLOW)
    await world.router()
    soon = {"x-kvpool-deadline-s": "0.4"}
    long = world.prompt(1, 8000)
    late = await world.complete(long, max_tokens=1, headers=soon)
    assert late.status in (429, 504)
    assert late.body["error"]["message"]
    for seconds in (4, 8, 16, 32):
        later = {"x-kvpool-deadline-s": str(seconds)}
        cut = await world.complete(
            "x", max_tokens=30_000, stream=True, ignore_eos=True, headers=later
        )
        if (
            cut.status == 200
        ):  # it has begun by then, which on a machine that stands still takes seconds
            break
    assert cut.status == 200
    assert cut.errors
    assert not cut.done
    await world.until(lambda: _idle(engine), "the engine stops")
    assert engine.core.generated_tokens < 30_000


async def _idle(engine: Any) -> bool:
    return not engine.core.running and not engine.core.waiting


async def test_when_all_engines_are_busy_who_comes_is_told_so(world: Any) -> None:
    engine = await world.engine(speed=SLOW)
    await world.router(requests_max=2)
    answers = await world.all(
        *(world.complete(world.prompt(n, 1600), max_tokens=1) for n in range(12))
    )
    served = [a for a in answers if a.status == 200]
    refused = [a for a in answers if a.status != 200]
    assert served
    assert refused
    for each in refused:
        assert each.status == 429
        assert int(each.headers["retry-after"]) >= 1
        assert each.body["error"]["message"]
    assert len(world.asked(engine)) >= len(served)
    assert (await world.complete("later", max_tokens=3)).text == world.right("later", 3)


async def test_what_cannot_meet_the_objective_is_refused_with_a_reason(world: Any) -> None:
    await world.engine(speed=SLOW)
    await world.router(ttft_slo_s=0.5)
    for _ in range(3):  # the estimates learn how slow it is
        await world.complete(world.prompt(_, 800), max_tokens=1)
    answers = await world.all(
        *(world.complete(world.prompt(10 + n, 1600), max_tokens=1) for n in range(12))
    )
    refused = [a for a in answers if a.status == 429]
    assert refused
    assert all("first token" in a.body["error"]["message"] for a in refused)
    assert all(int(a.headers["retry-after"]) >= 1 for a in refused)


async def test_without_room_to_decode_requests_wait_or_are_refused(world: Any) -> None:
    """They wait, unless an objective says that they must not."""
    await world.engine("p", role="prefill")
    await world.engine("d", role="decode", speed=SLOW, capacity_tokens=1024, max_len=1024)
    world.tables[-1]["capacity_tokens"] = 1024
    prompts = [world.prompt(number, 400) for number in range(6)]  # two at a time
    await world.router()
    answers = await world.all(*(world.complete(p, max_tokens=20) for p in prompts))
    assert [a.text for a in answers] == [world.right(p, 20) for p in prompts]

    await world.router(tpot_slo_s=60.0)
    world.engines["d"].hold(1)
    first = [asyncio.create_task(world.complete(p, max_tokens=100)) for p in prompts[:2]]
    await world.until(lambda: _decodes(world, 2), "there is no more room")
    refused = await world.complete(prompts[2], max_tokens=100)
    assert refused.status == 429
    assert refused.body["error"]["type"] == "decode_full"
    assert int(refused.headers["retry-after"]) >= 1
    world.engines["d"].hold(None)
    answers = await asyncio.gather(*first)
    assert [a.text for a in answers] == [world.right(p, 100) for p in prompts[:2]]


async def _decodes(world: Any, count: int) -> bool:
    engines = {each["name"]: each for each in (await world.get("/engines"))["engines"]}
    return bool(engines["d"]["decodes"] == count)


async def test_without_any_engine_requests_are_turned_away_clearly(world: Any) -> None:
    await world.engine()
    world.tables[0]["url"] = "http://127.0.0.1:9"  # nobody is there
    await world.router(verified=False)
    refused = await world.complete("x")
    assert refused.status == 503
    assert refused.body["error"]["message"]
    assert (await world.call("GET", "/health")).status == 503
    assert world.routers[-1].process.poll() is None

"""HTTP as clients see it, over a real connection; the engines behind it are scripted."""

import asyncio
import gc
import json
import socket
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvpool.router.api import REQUEST_ID, Api, Guard
from kvpool.router.config import RouterConfig, Secrets, TenantTable
from kvpool.router.http.bodies import Kind, parse
from kvpool.router.http.isolation import Isolation
from kvpool.router.requests.active_request import ActiveRequest
from kvpool.router.upstream.specs import EngineSpec
from kvpool.types import Intent
from tests.support.scripted_engines import EVENTS, MODEL, Bench, ScriptedIntents, answer_to, engine
from tests.support.waiting import PATIENCE_S, until_async

OPERATOR, ALICE, BOB = "operator-operator", "alice-alice-alice", "bob-bob-bob-bob-bob"
STREAM = {"model": MODEL, "prompt": "a question of some length", "stream": True}
WHOLE = {"model": MODEL, "prompt": "a question of some length"}
OPEN = Secrets("", {}, {})
CLOSED = Secrets(OPERATOR, {ALICE: "alice", BOB: "bob"}, {})


class Site:
    """A router at a port. call: a request, and what came of it: status, headers, body."""

    def __init__(
        self, bench: Bench, session: aiohttp.ClientSession, url: str, server: web.Server
    ) -> None:
        self.server = server
        self.bench = bench
        self.session = session
        self.url = url

    async def call(
        self, path: str, body: object = None, *, method: str = "", token: str = "", **headers: str
    ) -> tuple[int, Any, bytes]:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if token:
            sent["Authorization"] = f"Bearer {token}"
        method = method or ("GET" if data is None else "POST")
        async with self.session.request(method, self.url + path, data=data, headers=sent) as answer:
            return answer.status, answer.headers, await answer.read()


def run(
    work: Callable[[Site], Awaitable[None]],
    *specs: EngineSpec,
    secrets: Secrets = OPEN,
    intents: ScriptedIntents | None = None,
    isolation: Isolation | None = None,
    **config: Any,
) -> None:
    settings = RouterConfig(**{"deadline_s": 20.0, "probe_s": 50.0, **config})

    async def main() -> None:
        async with Bench(specs, settings, intents=intents, isolation=isolation) as bench:
            api = Api(
                settings,
                Guard(secrets),
                bench.serving,
                bench.roster,
                bench.group,
                bench.metrics,
                dict,
                7,
                lambda _: None,
            )
            runner = web.AppRunner(api.application(), handler_cancellation=True, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            port = runner.addresses[0][1]
            try:
                async with aiohttp.ClientSession() as session:
                    assert runner.server is not None
                    await work(Site(bench, session, f"http://127.0.0.1:{port}", runner.server))
            finally:
                await runner.cleanup()
            assert not bench.left()

    asyncio.run(main())


def error_of(body: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_answers_pass_byte_for_byte() -> None:
    async def work(site: Site) -> None:
        for body in (STREAM, WHOLE):
            status, headers, data = await site.call("/v1/completions", body, x_request_id="me")
            assert (status, data) == (200, answer_to(body))
            assert headers[REQUEST_ID] == "me"
            assert headers["X-Request-Id"] == "of the engine"
            own = {name for name in headers if name.lower().startswith("x-kvpool")}
            assert own == {REQUEST_ID}
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}
        status, headers, data = await site.call("/v1/chat/completions", chat)
        assert data == answer_to(chat)
        assert headers["Content-Type"].startswith("text/event-stream")
        assert site.bench.upstream.seen[-1].path == "/v1/chat/completions"

    run(work, engine("a"))


@pytest.mark.parametrize(
    "kind", [kind for kind in Kind if not kind.has_tokens and not kind.is_form]
)
def test_other_paths_of_engines_are_served_whole(kind: Kind) -> None:
    async def work(site: Site) -> None:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "input": "y"}
        for streamed in (False, True) if kind.generates else (False,):
            sent = {**body, "stream": streamed}
            status, _, data = await site.call(kind.value, sent)
            assert (status, data) == (200, answer_to(sent, kind.value))
            seen = site.bench.upstream.seen[-1]
            assert (seen.path, json.loads(seen.raw)) == (kind.value, sent)

    run(work, engine("a"), engine("b"))


BOUNDARY = "multipart/form-data; boundary=edge"


def form(*fields: tuple[str, bytes], file: bytes = b"\r\n--not the edge\x00\xff\r\n") -> bytes:
    """A form as clients send it, the file in the middle."""
    head = b'--edge\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
    texts = [head % (name.encode(), text) for name, text in fields]
    begins = b'--edge\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n'
    whole = begins + b"Content-Type: audio/wav\r\n\r\n" + file + b"\r\n"
    return b"".join([*texts[:1], whole, *texts[1:], b"--edge--\r\n"])


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind.is_form])
def test_a_form_is_forwarded_as_it_came_to_an_engine_of_its_model(kind: Kind) -> None:
    async def work(site: Site) -> None:
        for streamed in (b"false", b"true"):
            body = form(("stream", streamed), ("model", MODEL.encode()), file=bytes(200_000))
            status, _, data = await site.call(kind.value, body, Content_Type=BOUNDARY)
            assert (status, data) == (200, answer_to({}))
            seen = site.bench.upstream.seen[-1]
            assert (seen.path, seen.raw) == (kind.value, body)
            assert seen.headers["Content-Type"] == BOUNDARY
            assert not site.bench.upstream.seen[:-1] or seen.engine

    run(work, engine("a"), engine("b"), body_bytes_max=1 << 20)


@pytest.mark.parametrize(
    ("body", "content_type", "status"),
    [
        (form(("model", b"nobody")), BOUNDARY, 404),
        (form(("model", b"\xff")), BOUNDARY, 400),
        (form(("model", b"x" * (1 << 17))), BOUNDARY, 400),
        (form(*[("a", b"b")] * 100), BOUNDARY, 400),
        (form(("model", MODEL.encode()))[:-30], BOUNDARY, 400),
        (form(("model", MODEL.encode())), "multipart/form-data", 400),
        (form(("model", MODEL.encode())), "multipart/mixed; boundary=edge", 400),
        (b'{"model": "tiny"}', "application/json", 400),
        (b"", BOUNDARY, 400),
        (form(("model", MODEL.encode()), file=bytes(1 << 19)), BOUNDARY, 413),
    ],
)
def test_what_is_no_form_is_refused_here(body: bytes, content_type: str, status: int) -> None:
    async def work(site: Site) -> None:
        path = Kind.TRANSCRIPTIONS.value
        found, _, data = await site.call(path, body, Content_Type=content_type)
        assert found == status and error_of(data)["code"] == status
        assert not site.bench.upstream.seen

    run(work, engine("a"), body_bytes_max=1 << 18)


def test_errors_of_messages_are_in_their_own_form() -> None:
    async def work(site: Site) -> None:
        body = {"model": MODEL, "messages": [], "max_tokens": 9, "stream": True}
        status, _, data = await site.call("/v1/messages", {**body, "model": "nobody"})
        assert status == 404
        said = json.loads(data)
        assert said["type"] == "error" and said["error"]["type"] == "NotFoundError"
        site.bench.upstream.faults["a"] = deque(["unfinished"])
        status, _, data = await site.call("/v1/messages", body)
        *events, last = data.removesuffix(b"\n\n").split(b"\n\n")
        assert status == 200 and len(events) == EVENTS
        name, said = last.split(b"\n")
        assert name == b"event: error"
        assert json.loads(said.removeprefix(b"data: "))["error"]["type"] == "engine_failed"

    run(work, engine("a"))


def test_small_requests_are_forwarded() -> None:
    async def work(site: Site) -> None:
        for path in ("/tokenize", "/detokenize"):
            status, _, data = await site.call(path, WHOLE)
            assert (status, data) == (200, answer_to(WHOLE))
            assert site.bench.upstream.seen[-1].path == path
        assert (await site.call("/version"))[0] == 200
        seen = site.bench.upstream.seen[-1]
        assert (seen.path, seen.raw) == ("/version", b"")

    run(work, engine("a"))


def test_a_token_may_come_as_clients_of_messages_send_it() -> None:
    async def work(site: Site) -> None:
        for key, status in ((ALICE, 200), ("wrong", 401)):
            assert (await site.call("/v1/completions", WHOLE, x_api_key=key))[0] == status
        found = await site.call("/v1/completions", WHOLE, token="wrong", x_api_key=ALICE)
        assert found[0] == 401, "what is said twice is not a second guess"

    run(work, engine("a"), secrets=CLOSED)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[1]", 400),
        (b"", 400),
        (b"\xff", 400),
        (b'{"model": "tiny", "prompt": "\xff"}', 400),
        (b'{"model": "nobody"}', 404),
        (b'{"model": "tiny", "prompt": "' + b"x" * 5000 + b'"}', 413),
    ],
)
def test_bad_bodies_are_refused_here(body: bytes, status: int) -> None:
    async def work(site: Site) -> None:
        found, headers, data = await site.call("/v1/completions", body)
        assert found == status and error_of(data)["code"] == status
        assert headers[REQUEST_ID]
        assert not site.bench.upstream.seen
        # The connection, or another one, is good for the next request.
        assert (await site.call("/v1/completions", WHOLE))[0] == 200

    run(work, engine("a"), body_bytes_max=4096)


def test_a_body_without_a_length_is_bounded_too() -> None:
    async def work(site: Site) -> None:
        async def pieces() -> Any:
            for _ in range(10):
                yield b"x" * 1000

        async with site.session.post(f"{site.url}/v1/completions", data=pieces()) as answer:
            assert answer.status == 413

    run(work, engine("a"), body_bytes_max=4096)


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async def work(site: Site) -> None:
        host, port = site.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{"
        )
        assert b" 408 " in await reader.readline()
        writer.close()

    run(work, engine("a"), client_stall_s=0.05)


@pytest.mark.parametrize(
    ("header", "body"),
    [
        (b"Content-Encoding: gzip\r\nContent-Length: 9", b"no gzip!!"),
        (b"Transfer-Encoding: chunked", b"no chunk\r\n"),
        (b"Content-Encoding: deflate\r\nTransfer-Encoding: chunked", b"3\r\nno!\r\n0\r\n\r\n"),
    ],
)
def test_a_body_that_is_not_what_its_headers_say(header: bytes, body: bytes) -> None:
    async def work(site: Site) -> None:
        host, port = site.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + header + b"\r\n\r\n" + body
        )
        assert b" 400 " in await reader.readline()
        writer.close()

    run(work, engine("a"))


def test_bodies_that_come_are_counted_too() -> None:
    async def work(site: Site) -> None:
        host, port = site.url.removeprefix("http://").split(":")
        body = json.dumps(WHOLE).encode()
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body[:-1])
        found = []

        async def refused() -> None:
            while not found:
                status, _, data = await site.call("/tokenize", WHOLE)
                if status == 429:
                    found.append(error_of(data)["type"])

        await asyncio.wait_for(refused(), PATIENCE_S)
        assert found == ["requests_max"]
        writer.write(body[-1:])
        assert b" 200 " in await reader.readline()
        writer.close()
        assert (await site.call("/v1/completions", WHOLE))[0] == 200

    run(work, engine("a"), requests_max=1)


def test_who_does_not_read_an_answer_loses_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(site: Site) -> None:
        monkeypatch.setattr(site.bench.metrics, "text", lambda: bytes(64 << 20))
        host, port = site.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await until_async(lambda: bool(site.server.connections))
            await until_async(lambda: not site.server.connections)

    run(work, engine("a"), client_stall_s=0.05)


def test_a_client_that_hangs_up_leaves_nothing_for_the_collector() -> None:
    left: list[weakref.ref[ActiveRequest]] = []

    async def work(site: Site) -> None:
        site.bench.upstream.hold["a"] = asyncio.Event()
        task = asyncio.create_task(site.call("/v1/completions", STREAM))
        await until_async(lambda: bool(site.bench.upstream.open))
        left.extend(weakref.ref(one) for one in gc.get_objects() if isinstance(one, ActiveRequest))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until_async(lambda: left[0]() is None)

    gc.collect()
    gc.disable()
    try:
        run(work, engine("a"))
    finally:
        gc.enable()


def test_what_the_engine_says_of_a_request_is_what_the_client_hears() -> None:
    async def work(site: Site) -> None:
        site.bench.upstream.faults["a"] = deque(["refuse"])
        status, headers, data = await site.call("/v1/completions", {**STREAM, "temperature": -1})
        assert (status, data) == (400, b'{"error":"no"}')
        assert headers["Content-Type"] == "application/json"

    run(work, engine("a"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x_kvpool_deadline_s", "soon"),
        ("x_kvpool_deadline_s", "-1"),
        ("x_kvpool_deadline_s", "nan"),
        ("x_kvpool_deadline_s", "inf"),
        ("x_kvpool_priority", "1.5"),
        ("x_kvpool_priority", "9" * 5000),
    ],
)
def test_headers_that_say_nothing_sensible(name: str, value: str) -> None:
    async def work(site: Site) -> None:
        status, _, data = await site.call("/v1/completions", WHOLE, **{name: value})
        assert status == 400 and error_of(data)["param"] == name.replace("_", "-")

    run(work, engine("a"))


def test_the_deadline_of_a_header_ends_a_request() -> None:
    async def work(site: Site) -> None:
        site.bench.upstream.faults["a"] = deque(["hang"])
        status, _, data = await site.call("/v1/completions", WHOLE, x_kvpool_deadline_s="0.05")
        assert status == 504 and error_of(data)["type"] == "deadline"

    run(work, engine("a"))


def test_without_engines_the_reason_is_said() -> None:
    async def work(site: Site) -> None:
        status, headers, data = await site.call("/v1/completions", WHOLE)
        assert status == 503 and error_of(data)["type"] == "no_engine"
        assert int(headers["Retry-After"]) >= 1
        assert (await site.call("/health"))[0] == 503

    run(work)


def test_too_many_at_once_are_told_when_to_come_again() -> None:
    async def work(site: Site) -> None:
        site.bench.upstream.hold["a"] = asyncio.Event()
        first = asyncio.create_task(site.call("/v1/completions", WHOLE))
        await until_async(lambda: bool(site.bench.upstream.open))
        status, headers, data = await site.call("/v1/completions", WHOLE)
        assert status == 429 and error_of(data)["type"] == "requests_max"
        assert int(headers["Retry-After"]) >= 1
        site.bench.upstream.hold["a"].set()
        assert (await first)[0] == 200

    run(work, engine("a"), requests_max=1)


def test_a_client_that_hangs_up_is_forgotten_on_every_engine() -> None:
    async def work(site: Site) -> None:
        site.bench.upstream.hold["a"] = asyncio.Event()
        task = asyncio.create_task(site.call("/v1/completions", STREAM, x_request_id="me"))
        await until_async(lambda: bool(site.bench.upstream.open))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until_async(lambda: not site.bench.left())
        account = site.bench.serving.accounts.get("me")
        await until_async(lambda: account is not None and account.outcome == "client_left")

    run(work, engine("a"))


def test_a_client_that_hangs_up_in_the_middle_too() -> None:
    async def work(site: Site) -> None:
        site.bench.upstream.faults["a"] = deque(["stall"])
        async with site.session.post(f"{site.url}/v1/completions", json=STREAM) as answer:
            await answer.content.readany()
            assert site.bench.upstream.open
        await until_async(lambda: not site.bench.left())

    run(work, engine("a"))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/tokenize"),
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
        ("GET", "/engines"),
        ("POST", "/engines/a/drain"),
        ("DELETE", "/engines/a/drain"),
        ("GET", "/explain/me"),
        ("POST", "/explain"),
        ("POST", "/intents"),
        ("GET", "/nowhere"),
    ],
)
@pytest.mark.parametrize("token", ["", "wrong-wrong-wrong", OPERATOR + "x", "\xff\xfe"])
def test_nobody_gets_in_without_a_token(method: str, path: str, token: str) -> None:
    async def work(site: Site) -> None:
        status, headers, data = await site.call(path, b"{}", method=method, token=token)
        assert status == 401 and error_of(data)["code"] == 401
        assert headers["WWW-Authenticate"] == "Bearer"
        assert not site.bench.upstream.seen

    run(work, engine("a"), secrets=CLOSED)


def test_tenants_serve_requests_and_operators_all() -> None:
    tenants = {name: TenantTable(token_file=name) for name in ("alice", "bob")}

    async def work(site: Site) -> None:
        status, _, _ = await site.call("/v1/completions", WHOLE, token=ALICE, x_request_id="hers")
        assert status == 200
        account = site.bench.serving.accounts.get("hers")
        assert account is not None and account.tenant == "alice"
        assert (await site.call("/explain/hers", token=ALICE))[0] == 200
        assert (await site.call("/explain/hers", token=BOB))[0] == 404
        assert (await site.call("/explain/hers", token=OPERATOR))[0] == 200
        # Clients choose the ids: another's request of the same one takes nothing away.
        await site.call("/v1/completions", WHOLE, token=BOB, x_request_id="hers")
        for token, tenant in ((ALICE, "alice"), (BOB, "bob"), (OPERATOR, "bob")):
            _, _, data = await site.call("/explain/hers", token=token)
            assert json.loads(data)["tenant"] == tenant
        for method, path in (
            ("GET", "/metrics"),
            ("GET", "/engines"),
            ("POST", "/engines/a/drain"),
            ("DELETE", "/engines/a/drain"),
        ):
            assert (await site.call(path, method=method, token=ALICE))[0] == 403
            assert (await site.call(path, method=method, token=OPERATOR))[0] == 200
        assert (await site.call("/explain", WHOLE, token=ALICE))[0] == 403
        assert (await site.call("/explain", WHOLE, token=OPERATOR))[0] == 200
        assert (await site.call("/health"))[0] == 200, "probes have no token"

    run(work, engine("a"), secrets=CLOSED, tenants=tenants)


def test_tenants_may_want_what_their_table_lists_and_operators_anything() -> None:
    tenants = {
        "alice": TenantTable(token_file="x", intents=(Intent.PIN, Intent.KEEP)),
        "bob": TenantTable(token_file="y"),
    }
    intents, isolation = ScriptedIntents({"a": "node-a"}), Isolation(b"secret", {})

    def salt(tenant: str) -> Any:
        raw = json.dumps(WHOLE).encode()
        return isolation.salted(parse(Kind.COMPLETIONS, raw, [MODEL]), tenant).value["cache_salt"]

    async def work(site: Site) -> None:
        async def ask(token: str, tenant: str = "", **said: Any) -> int:
            headers = {"x_kvpool_tenant": tenant} if tenant else {}
            status, _, data = await site.call(
                "/intents", {"request": WHOLE, **said}, token=token, **headers
            )
            if status != 200:
                assert error_of(data)["message"]
            return status

        for intent in Intent:
            for_s = 1.0 if intent is Intent.KEEP else 0.0
            may = intent in {Intent.PIN, Intent.KEEP}
            assert await ask(ALICE, intent=intent, for_s=for_s) == (200 if may else 403)
            assert await ask(BOB, intent=intent, for_s=for_s) == 403
            assert await ask(OPERATOR, intent=intent, for_s=for_s) == 200
        salts = [body.value["cache_salt"] for body, *_ in intents.told]
        assert sorted(salts) == sorted([salt("alice")] * 2 + [salt("")] * len(Intent))
        assert len({salt("alice"), salt("bob"), salt("")}) == 3
        intents.told.clear()

        # Also only to look, since that tells what others have sent.
        assert await ask(BOB, intent="pin", dry_run=True) == 403
        assert await ask(ALICE, intent="pin", hard=True) == 403
        assert await ask(ALICE, intent="pin", hard=True, dry_run=True) == 403
        assert not intents.told
        # Nobody but an operator names a tenant.
        assert await ask(ALICE, "bob", intent="pin") == 200
        assert await ask(OPERATOR, "bob", intent="pin", hard=True) == 200
        assert await ask(OPERATOR, intent="pin", hard=True) == 200
        found = [(body.value["cache_salt"], wanted.hard) for body, wanted, _ in intents.told]
        assert found == [(salt("alice"), False), (salt("bob"), True), (salt(""), True)]

    run(
        work,
        engine("a"),
        secrets=CLOSED,
        tenants=tenants,
        intents=intents,
        isolation=isolation,
    )


def test_a_tenant_whose_table_has_left_may_nothing() -> None:
    intents = ScriptedIntents({})

    async def work(site: Site) -> None:
        said = {"intent": "drop", "request": WHOLE}
        assert (await site.call("/intents", said, token=ALICE))[0] == 403
        assert not intents.told

    run(work, engine("a"), secrets=CLOSED, intents=intents)


def test_an_intent_says_what_kind_of_request_its_prompt_is_of() -> None:
    intents = ScriptedIntents({})
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}

    async def work(site: Site) -> None:
        for request, path, kind in (
            (WHOLE, "", Kind.COMPLETIONS),
            (chat, "", Kind.CHAT),
            ({**WHOLE, "messages": None}, "", Kind.COMPLETIONS),
            (chat, "/v1/messages", Kind.MESSAGES),
            (chat, "/v1/chat/completions", Kind.CHAT),
        ):
            said = {"intent": "drop", "request": request, "path": path, "nodes": ["n.1"]}
            status, _, data = await site.call("/intents", said)
            assert status == 200, data
            body, wanted, _ = intents.told.pop()
            assert body.kind is kind and wanted.nodes == ("n.1",)
            assert json.loads(body.raw) == request
        for path in ("/v1/embeddings", "/v1/audio/transcriptions", "/intents", "v1/messages"):
            said = {"intent": "drop", "request": chat, "path": path}
            status, _, data = await site.call("/intents", said)
            assert status == 400 and error_of(data)["param"] == "path"

    run(work, engine("a"), intents=intents)


def test_a_tenants_priority_is_bounded() -> None:
    tenants = {
        "alice": TenantTable(token_file="x", priority_max=3),
        "bob": TenantTable(token_file="y"),
    }

    async def work(site: Site) -> None:
        for token, found in ((ALICE, 3), (BOB, 0), (OPERATOR, 50)):
            await site.call(
                "/v1/completions", WHOLE, token=token, x_request_id="me", x_kvpool_priority="50"
            )
            _, _, data = await site.call("/explain/me", token=OPERATOR)
            assert json.loads(data)["priority"] == found

    run(work, engine("a"), secrets=CLOSED, tenants=tenants)


def test_without_a_token_a_browsers_page_may_not_ask() -> None:
    async def work(site: Site) -> None:
        page = "http://evil.example"
        for path in ("/v1/completions", "/engines/a/drain"):
            assert (await site.call(path, WHOLE, Origin=page))[0] == 403
        for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::2]:80", "::"):
            assert (await site.call("/engines", Host=host))[0] == 403
        for host in ("localhost", "localhost:80", "127.0.0.1:80", "[::1]:80", "[::1]"):
            assert (await site.call("/engines", Host=host))[0] == 200
        assert not site.bench.upstream.seen

    run(work, engine("a"))


def test_engines_are_shown_and_drained() -> None:
    async def work(site: Site) -> None:
        _, _, data = await site.call("/engines")
        assert [row["state"] for row in json.loads(data)["engines"]] == ["serving", "serving"]
        _, _, data = await site.call("/engines/a/drain", method="POST")
        assert [row["state"] for row in json.loads(data)["engines"]] == ["drained", "serving"]
        await site.call("/v1/completions", WHOLE)
        assert site.bench.upstream.seen[-1].engine == "b"
        _, _, data = await site.call("/engines/a/drain", method="DELETE")
        assert [row["state"] for row in json.loads(data)["engines"]] == ["serving", "serving"]
        _, _, data = await site.call("/engines/a/weight", {"weight": 0}, method="PUT")
        assert [row["weight"] for row in json.loads(data)["engines"]] == [0.0, 1.0]
        for number in range(10):
            await site.call("/v1/completions", {**WHOLE, "prompt": f"another {number}"})
            assert site.bench.upstream.seen[-1].engine == "b"
        for body in ({"weight": 1.5}, {"weight": "x"}, {"share": 1}, []):
            status, _, data = await site.call("/engines/a/weight", body, method="PUT")
            assert status == 400 and error_of(data)["code"] == 400
        status, _, data = await site.call("/engines/nobody/drain", method="POST")
        assert status == 404 and error_of(data)["code"] == 404

    run(work, engine("a"), engine("b"))


def test_models_and_tokenize_and_metrics() -> None:
    async def work(site: Site) -> None:
        _, _, data = await site.call("/v1/models")
        (row,) = json.loads(data)["data"]
        assert (row["id"], row["max_model_len"], row["created"]) == (MODEL, 100, 7)
        status, _, data = await site.call("/tokenize", WHOLE)
        assert (status, data) == (200, answer_to(WHOLE))
        await site.call("/v1/completions", WHOLE)
        _, headers, data = await site.call("/metrics")
        assert headers["Content-Type"].startswith("text/plain")
        assert b'kvpool_router_requests_total{outcome="answered"} 1.0' in data
        assert b'kvpool_router_engine_breaker{engine="a",state="closed"} 1.0' in data
        required = {
            line.split('role="')[1].partition('"')[0]: float(line.split()[-1])
            for line in data.decode().splitlines()
            if line.startswith("kvpool_router_engines_required{")
        }
        assert required["prefill"] > 0 == required["decode"]

    run(work, engine("a", max_len=100))


def test_a_request_is_explained_and_so_is_one_that_is_not_sent() -> None:
    async def work(site: Site) -> None:
        await site.call("/v1/completions", STREAM, x_request_id="me")
        _, _, data = await site.call("/explain/me")
        found = json.loads(data)
        steps = [step["what"] for step in found["steps"]]
        assert steps == ["order", "first token", "computed", "answered", "answered"]
        assert found["steps"][0]["candidates"][0]["engine"] == "a"
        assert found["outcome"] == "answered"
        status, _, _ = await site.call("/explain/other")
        assert status == 404
        before = len(site.bench.upstream.seen)
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
        for body in (STREAM, chat):
            status, _, data = await site.call("/explain", body)
            assert status == 200 and json.loads(data)["engine"] == "a"
        assert len(site.bench.upstream.seen) == before

    run(work, engine("a"))


def test_paths_and_methods_that_are_not_there() -> None:
    async def work(site: Site) -> None:
        status, _, data = await site.call("/nowhere")
        assert status == 404 and error_of(data)["type"] == "NotFoundError"
        status, headers, data = await site.call("/v1/completions")
        assert status == 405 and headers["Allow"] == "POST" and error_of(data)["code"] == 405

    run(work, engine("a"))

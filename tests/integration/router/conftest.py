"""The router as a process of its own, before stub engines in the test's loop or in processes.

Tests here are coroutines; a `world` is entered before one runs, and left with all that it started.
"""

import asyncio
import contextlib
import inspect
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import aiohttp
import pytest

from kvpool.router.config import SETTINGS
from tests.support import patient_router
from tests.support.raw_engine import RawEngine, Script, answer_rightly
from tests.support.signals import send
from tests.support.stub_engine import Settings, StubEngine
from tests.support.stub_engine.serving import Seen
from tests.support.stub_engine.tokens import answer, chat_tokens, text_of, tokens_of
from tests.support.waiting import PATIENCE_S

TEST_S = 240.0
MODEL = "stub"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run tests that are coroutines, within a time."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    values = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}

    async def run() -> None:
        async with asyncio.timeout(TEST_S), contextlib.AsyncExitStack() as stack:
            for value in values.values():
                if isinstance(value, World):
                    await stack.enter_async_context(value)
            await test(**values)

    asyncio.run(run())
    return True


class Process:
    """A program whose first line says where it is. Ended with its world, whatever state it is in."""

    def __init__(self, log: Path, *command: str, **environ: str) -> None:
        self.log = log
        with log.open("ab") as stderr:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **environ},
            )

    async def first_line(self) -> str:
        return await asyncio.to_thread(self._first_line)

    def _first_line(self) -> str:
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], PATIENCE_S)
        return self.process.stdout.readline().decode() if readable else ""

    @property
    def said(self) -> str:
        return self.log.read_text()

    def signal(self, number: int) -> None:
        if self.process.poll() is None:
            send(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait(PATIENCE_S)

    async def ended(self) -> int:
        return await asyncio.to_thread(self.process.wait, PATIENCE_S)

    def end(self) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


@dataclass(frozen=True)
class Answer:
    """What came: of a stream its messages, in order, and whether it was ended as it should be.

    broken: what the connection was broken with; None: it was not.
    """

    status: int
    headers: Any
    body: Any
    messages: list[Any]
    done: bool
    broken: str | None

    @property
    def text(self) -> str:
        """Of the first choice."""
        if not self.messages:
            choice = self.body["choices"][0]
            return choice["text"] if "text" in choice else choice["message"]["content"]
        choices = [c for m in self.messages for c in m.get("choices", ()) if c["index"] == 0]
        return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)

    @property
    def errors(self) -> list[Any]:
        """Of a stream: the messages that are errors."""
        return [message["error"] for message in self.messages if "error" in message]


class World:
    """Engines, a router before them, and a client of the router. In one event loop."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pool = folder / "pool"
        self.pool.mkdir()
        self.tables: list[dict[str, Any]] = []
        self.url = ""
        self.token = ""
        self._stack = contextlib.AsyncExitStack()
        self.engines: dict[str, StubEngine] = {}
        self.routers: list[Process] = []

    async def __aenter__(self) -> Self:
        self.session = await self._stack.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TEST_S))
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    # ---- engines and router ----------------------------------------------------------------------------

    async def engine(self, name: str = "a", *, role: str = "both", **settings: Any) -> StubEngine:
        """An engine in this loop, on a node of its own, for the router that is started next."""
        engine = await self.start(name, **settings)
        self._configure(name, engine.url, role)
        return engine

    async def start(self, name: str, **settings: Any) -> StubEngine:
        """An engine that the router is not told of, such as one that begins anew."""
        where = self._events(name)
        made = StubEngine(Settings(**(where | {"pool": self.pool} | settings)))
        self.engines[name] = await self._stack.enter_async_context(made)
        return self.engines[name]

    async def raw(self, name: str, script: Script = answer_rightly) -> RawEngine:
        """An engine whose answers are told byte for byte. It publishes no events."""
        engine = await self._stack.enter_async_context(RawEngine(script))
        self.tables.append({"name": name, "url": engine.url})
        return engine

    async def process(self, name: str, *flags: str, role: str = "both") -> Process:
        """An engine in a process of its own, which can be killed. Its `place` is its URL."""
        where = self._events(name)
        command = (sys.executable, "-m", "tests.support.stub_engine", *flags)
        places = (
            "--events",
            where["events"],
            "--replay",
            where["replay"],
            "--pool",
            str(self.pool),
        )
        process = Process(self.folder / f"{name}.log", *command, *places)
        self._stack.callback(process.end)
        line = await process.first_line()
        assert line, process.said
        self._configure(name, json.loads(line)["url"], role)
        return process

    def _events(self, name: str) -> dict[str, str]:
        return {key: f"ipc://{self.folder}/{name}.{key}" for key in ("events", "replay")}

    def _configure(self, name: str, url: str, role: str) -> None:
        table: dict[str, Any] = {
            "name": name,
            "url": url,
            "role": role,
            "node": f"node-{name}",
            "groups": [0],
        }
        table |= self._events(name) | {"hash": "sha256_cbor", "block_tokens": 16}
        table |= {"follows_max": 4, "block_bytes": 1024, "namespace": "00" * 16}
        self.tables.append(table)

    def url_of(self, name: str) -> str:
        found: str = next(table["url"] for table in self.tables if table["name"] == name)
        return found

    async def router(
        self,
        *,
        environ: dict[str, str] | None = None,
        verified: bool = True,
        prefix: tuple[str, ...] = (),
        **config: Any,
    ) -> Process:
        """A router before the engines of this world, with short pauses; `config` goes first.

        prefix: of its command, such as what limits it.

        verified: wait until it has compared its block hashes with all engines', so that it asks them nothing more.
        """
        process = self._begin_router(environ or {}, config, prefix)
        line = await process.first_line()
        assert " ready: router at " in line, (line, process.said)
        self.url = line.split("router at ")[1].split(",")[0].split()[0]
        self.url = self.url.replace("0.0.0.0", "127.0.0.1")
        self.token = (environ or {}).get("KVPOOL_ROUTER_TOKEN", "")
        if verified:
            await self.until(self._verified, "the engines' hashes are verified")
        return process

    async def _verified(self) -> bool:
        known = (await self.get("/engines"))["knowledge"]["engines"]
        return {each["hashes"] for each in known.values()} == {"verified"}

    async def refused_router(self, *, environ: dict[str, str] | None = None, **config: Any) -> str:
        """What a router says that does not begin."""
        process = self._begin_router(environ or {}, config)
        assert await process.ended() != 0
        return process.said

    def _begin_router(
        self, environ: dict[str, str], config: dict[str, Any], prefix: tuple[str, ...] = ()
    ) -> Process:
        settings: dict[str, Any] = {
            "listen": "127.0.0.1:0",
            "daemon": False,
            "probe_s": 0.1,
            # Who tests such a limit says so: this process may stand still, and with it its engines.
            "probe_timeout_s": PATIENCE_S,
            "connect_s": PATIENCE_S,
            "stall_s": PATIENCE_S,
            "backoff_s": 0.2,
            "backoff_s_max": 0.5,
        } | config
        constants = {name: settings.pop(name) for name in [*settings] if name not in SETTINGS}
        environ = {patient_router.CONSTANTS: json.dumps(constants), **environ}
        number = len(self.routers)
        path = self.folder / f"router-{number}.toml"
        tables = {kind: settings.pop(kind, {}) for kind in ("tenants", "models")}
        lines = [f"{key} = {_toml(value)}" for key, value in settings.items()]
        for kind, named in tables.items():
            for name, table in named.items():
                lines += [f"[{kind}.{name}]", *(f"{k} = {_toml(v)}" for k, v in table.items())]
        for table in self.tables:
            lines += ["[[engines]]", *(f"{key} = {_toml(value)}" for key, value in table.items())]
        path.write_text("\n".join(lines))
        program = (sys.executable, "-m", "tests.support.patient_router", "router")
        command = (*prefix, *program, "--config", str(path))
        process = Process(self.folder / f"router-{number}.log", *command, **environ)
        self._stack.callback(process.end)
        self.routers.append(process)
        return process

    # ---- asking ------------------------------------------------------------------------------------

    async def get(self, path: str, **headers: str) -> Any:
        """JSON, or text where it is none."""
        async with self.session.get(self.url + path, headers=self._headers(headers)) as response:
            text = await response.text()
            try:
                return json.loads(text)
            except ValueError:
                return text

    async def call(
        self, method: str, path: str, data: bytes | None = None, **headers: str
    ) -> Answer:
        """Any request. Header names have - for _."""
        headers = {"content-type": "application/json"} | self._headers(headers)
        async with self.session.request(
            method, self.url + path, data=data, headers=headers
        ) as response:
            text = await response.text()
            body = json.loads(text) if text[:1] in ("{", "[") else text
            return Answer(response.status, response.headers, body, [], False, None)

    async def complete(
        self, prompt: Any, /, *, headers: dict[str, str] | None = None, **body: Any
    ) -> Answer:
        """A completion; `stream=True`: read to its end."""
        body = {"model": MODEL, "prompt": prompt} | body
        return await self.ask("/v1/completions", body, headers)

    async def chat(
        self, text: str, *, headers: dict[str, str] | None = None, **body: Any
    ) -> Answer:
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}]} | body
        return await self.ask("/v1/chat/completions", body, headers)

    async def ask(
        self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> Answer:
        async with self.opened(path, body, headers) as response:
            if not response.content_type.startswith("text/event-stream"):
                return Answer(
                    response.status, response.headers, await response.json(), [], False, None
                )
            messages: list[Any] = []
            done, broken = False, None
            try:
                async for line in response.content:
                    said = line.removeprefix(b"data: ").strip()
                    if said == b"[DONE]":
                        done = True
                    elif line.startswith(b"data: "):
                        messages.append(json.loads(said))
            except aiohttp.ClientError as error:
                broken = repr(error)
            return Answer(response.status, response.headers, None, messages, done, broken)

    @contextlib.asynccontextmanager
    async def opened(
        self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer as it begins; leaving early closes the connection."""
        async with self.session.post(
            self.url + path, json=body, headers=self._headers(headers or {})
        ) as response:
            yield response

    def _headers(self, headers: dict[str, str]) -> dict[str, str]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return {"authorization": f"Bearer {self.token}"} | named if self.token else named

    async def state(self, name: str) -> Any:
        """What an engine says of itself, in this process or another."""
        async with self.session.get(f"{self.url_of(name)}/stub/state") as response:
            return await response.json()

    async def fault(self, name: str, *faults: dict[str, Any]) -> None:
        async with self.session.post(
            f"{self.url_of(name)}/stub/faults", json=list(faults)
        ) as response:
            assert response.status == 200

    async def hold(self, name: str, computed: int | None) -> None:
        """Have an engine stop where a request has so many tokens computed, or go on: for as long as a test looks."""
        async with self.session.post(
            f"{self.url_of(name)}/stub/hold", json={"computed": computed}
        ) as response:
            assert response.status == 200

    async def until(
        self, condition: Callable[[], Awaitable[Any]], what: str = "", seconds: float = PATIENCE_S
    ) -> Any:
        """Ask until the answer is true, and return that."""
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            found = await condition()
            if found:
                return found
            if asyncio.get_running_loop().time() > deadline:
                raise AssertionError(f"not within {seconds} s: {what or condition}")
            await asyncio.sleep(0.01)

    @staticmethod
    async def all(*coroutines: Coroutine[Any, Any, Answer]) -> list[Answer]:
        return list(await asyncio.gather(*coroutines))

    @staticmethod
    def asked(engine: StubEngine) -> list[Seen]:
        """What requests through the router came to; its own questions name no request."""
        return [seen for seen in engine.seen if seen.request_id]

    # ---- the oracle --------------------------------------------------------------------------------

    @staticmethod
    def right(prompt: str | list[int], count: int) -> str:
        """What every engine answers to a prompt."""
        tokens = tokens_of(prompt) if isinstance(prompt, str) else prompt
        return text_of(answer(tokens, count))

    @staticmethod
    def right_chat(text: str, count: int) -> str:
        tokens, _ = chat_tokens([{"role": "user", "content": text}])
        return text_of(answer(tokens, count))

    @staticmethod
    def prompt(number: int, tokens: int) -> list[int]:
        """A prompt that shares no block with that of another number."""
        return [1 + (number * 7919 + at * 31 + number * at) % 31_000 for at in range(tokens)]


def _toml(value: Any) -> str:
    return json.dumps(value)  # of strings, numbers, truth values and lists it is TOML


@pytest.fixture
def world(folder: Path) -> World:
    return World(folder)

"""Runs the demo: starts a daemon, a router and two simulated engines, asks questions, and measures first tokens."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from random import Random

import aiohttp
import msgspec

from kvpool.decoding import JsonDecoder
from kvpool.demo.engine import MODEL, Answer, SimulatedEngine
from kvpool.errors import Unavailable
from kvpool.router.upstream.engine_calls import post_json

ENGINES = 2
DOCUMENTS = 3
DOCUMENT_TOKENS, QUESTION_TOKENS = 2048, 33
MEMORY = "512MiB"
START_S = 60.0
END_S = 10.0
ANSWER_S = 60.0

Say = Callable[[str], None]


class Round(msgspec.Struct, frozen=True):
    """One question about each document. first_token_s: of each question. The counts are tokens, summed."""

    name: str
    first_token_s: list[float]
    computed: int
    from_own_cache: int
    from_pool: int


class _Choice(msgspec.Struct):
    kvpool_demo: Answer


_decode_choice = JsonDecoder[_Choice](_Choice, "an answer")


async def play(say: Say) -> list[Round]:
    """Ask about the same documents in four rounds. say: called with each step before it begins.

    Raises `Unavailable` if a process does not start or a question is not answered.
    """
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-")))
        socket = str(folder / "d.sock")
        say(f"starting a daemon with {MEMORY} of memory, a router, and {ENGINES} simulated engines")
        await stack.enter_async_context(
            _process(folder / "daemon.log", "serve", "--socket", socket, "--memory", MEMORY)
        )
        first, second = [
            await stack.enter_async_context(SimulatedEngine(socket).serve()) for _ in range(ENGINES)
        ]
        ready = await stack.enter_async_context(
            _process(folder / "router.log", "router", "--socket", socket, "--listen", "127.0.0.1:0")
        )
        router = ready.partition("router at ")[2].partition(",")[0]
        http = await stack.enter_async_context(aiohttp.ClientSession())
        await _until_routed(http, router)
        random = Random(7)
        documents = [_tokens(random, DOCUMENT_TOKENS) for _ in range(DOCUMENTS)]
        rounds = []
        for url, name, why in (
            (first, "computed", "engine 1 has seen none of them and computes them"),
            (second, "from the pool", "engine 2 reads what engine 1 has computed"),
            (second, "engine's own cache", "engine 2 once more"),
            (router, "by the router", "the router chooses an engine for each"),
        ):
            say(f"asking about {DOCUMENTS} documents of {DOCUMENT_TOKENS:,} tokens: {why}")
            questions = [each + _tokens(random, QUESTION_TOKENS) for each in documents]
            rounds.append(await _ask_each(http, url, name, questions))
        return rounds


def _tokens(random: Random, count: int) -> list[int]:
    return [random.randrange(32_000) for _ in range(count)]


async def _ask_each(
    http: aiohttp.ClientSession, url: str, name: str, questions: Sequence[Sequence[int]]
) -> Round:
    place = f"{url}/v1/completions"
    times, answers = [], []
    for each in questions:
        body = msgspec.json.encode(
            {"model": MODEL, "prompt": each, "max_tokens": 1, "stream": True}
        )
        begun = time.perf_counter()
        response, text = await post_json(
            http, place, body, headers={}, within_s=ANSWER_S, limit=1 << 20, otherwise=place
        )
        times.append(time.perf_counter() - begun)
        if response.status != 200:
            raise Unavailable(f"{place} answers {response.status}: {text!r}")
        answers.append(_decode_choice(text.partition(b"\n")[0].removeprefix(b"data: ")).kvpool_demo)
    counts = (sum(getattr(each, field) for each in answers) for field in Answer.__struct_fields__)
    return Round(name, times, *counts)


async def _until_routed(http: aiohttp.ClientSession, router: str) -> None:
    """Wait until the router sends requests to all engines. Raises `Unavailable`."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        async with http.get(f"{router}/engines") as response:
            found = (await response.json())["engines"]
        if sum(each["state"] == "serving" for each in found) == ENGINES:
            return
        await asyncio.sleep(0.05)
    raise Unavailable(f"the router does not reach the engines: {found}")


@asynccontextmanager
async def _process(log: Path, *command: str) -> AsyncIterator[str]:
    """Run a command of kvpool. Yields the line that says that it is ready; ends the process afterwards.

    log: the file of its standard error. Raises `Unavailable` with what that says, if it does not get ready.
    """
    mine = {name: value for name, value in os.environ.items() if not name.startswith("KVPOOL_")}
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvpool.cli", *command),
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env=mine,
            start_new_session=True,  # Ctrl-C ends this process, which ends the command
        )
    assert process.stdout is not None
    try:
        line = b""
        with suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                line = await process.stdout.readline()
        if not line:
            said = await asyncio.to_thread(log.read_text, errors="replace")
            raise Unavailable(f"kvpool {command[0]} does not start, and says: {said.strip()}")
        yield line.decode()
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(END_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()

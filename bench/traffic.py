"""What the router does to traffic as most servers see it: short prompts, many at once.

`short`: two stub engines that compute in steps as engines do (50,000 tokens a second, 4 ms a step), each in a process
of its own, behind a router in its own: with the default policy, with `round-robin`, and without a router, in turns.
Prompts of 128 tokens and answers of 16, so many at a time; streamed or not. All of it shares this machine's cores,
clients too: what counts is the ratio of two policies of one router.

`cpu`: CPU of the router's process for a request of 1,000 tokens that is answered with two, and for each event more,
before an engine for which nothing takes time.

    .venv/bin/python bench/traffic.py [--quick] [--json FILE] [--only short|cpu]

Checks: short_prompts_rps_vs_best, router_cpu_ms_1k, router_cpu_us_event.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from harness import Report, median, parse_arguments, run_module, started

DIRECT, BASELINE, OURS = "direct", "round-robin", "kvpool"
ENGINES = 2
TOKENS, ANSWER_TOKENS = 128, 16
TURNS, TURNS_QUICK = 5, 2
REQUESTS, REQUESTS_QUICK = 1024, 512
LONG_TOKENS = 1000
CPU_REQUESTS, CPU_REQUESTS_QUICK, CPU_TOGETHER = 400, 120, 8
EVENTS = 102
CLOCK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Work:
    """So many requests at a time, each of other words."""

    name: str
    together: int
    streamed: bool


WORKS = (Work("256 at once, streamed", 256, True), Work("64 at once, not streamed", 64, False))


def main() -> int:
    report, arguments = parse_arguments(__doc__ or "")
    if arguments.only in "short":
        asyncio.run(short(report))
    if arguments.only in "cpu":
        asyncio.run(cpu(report))
    return report.finish()


# ---- short prompts -------------------------------------------------------------------------------------


async def short(report: Report) -> None:
    turns = TURNS_QUICK if report.quick else TURNS
    count = REQUESTS_QUICK if report.quick else REQUESTS
    worst = 1e9
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-bench-")))
        engines = [
            await asyncio.to_thread(engine, stack, "--decode-s", "0.004") for _ in range(ENGINES)
        ]
        ways: dict[str, Sequence[str]] = {DIRECT: engines}
        for policy in (BASELINE, OURS):
            url, _ = await asyncio.to_thread(router, stack, folder, engines, policy)
            ways[policy] = [url]
        async with open_session() as session:
            for work in WORKS:
                rates: dict[str, list[float]] = {way: [] for way in ways}
                firsts: dict[str, list[float]] = {way: [] for way in ways}
                for turn in range(-1, turns):  # one to get warm
                    names = list(ways) if turn % 2 else list(reversed(ways))
                    for way in names:
                        prefix = f"{work.name} {turn} {way}"
                        rate, first = await many(session, ways[way], work, count, prefix)
                        if turn >= 0:
                            rates[way].append(rate)
                            firsts[way].append(first)
                for way in ways:
                    report.row(
                        work.name, way=way, rps=median(rates[way]), ttft_ms=median(firsts[way])
                    )
                worst = min(worst, median(rates[OURS]) / median(rates[BASELINE]))
    report.check("short_prompts_rps_vs_best", worst, at_least=0.98)


async def many(
    session: aiohttp.ClientSession, urls: Sequence[str], work: Work, count: int, prefix: str
) -> tuple[float, float]:
    """Requests a second, and the mean time to the first byte of an answer in milliseconds."""
    clock = asyncio.get_running_loop().time
    places = iter(range(count))
    firsts: list[float] = []

    async def one_after_the_other() -> None:
        for place in places:
            text = prompt(f"{prefix} {place} ", TOKENS)
            url = urls[place % len(urls)]
            firsts.append(await ask(session, url, text, ANSWER_TOKENS, streamed=work.streamed))

    began = clock()
    await asyncio.gather(*(one_after_the_other() for _ in range(work.together)))
    return count / (clock() - began), 1e3 * sum(firsts) / len(firsts)


# ---- CPU -----------------------------------------------------------------------------------------------


async def cpu(report: Report) -> None:
    """Two answers' worth of events more or fewer, and nothing else, tell what an event costs."""
    count = CPU_REQUESTS_QUICK if report.quick else CPU_REQUESTS
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-bench-")))
        free = ("--prefill-tokens-s", "inf", "--decode-s", "0")
        url = await asyncio.to_thread(engine, stack, *free)
        before, pid = await asyncio.to_thread(router, stack, folder, [url], OURS)
        async with open_session() as session:
            await requests_s(session, before, pid, count // 4, 2, "warm")
            few, more = [], []
            for turn in range(3):
                few.append(await requests_s(session, before, pid, count, 2, f"few {turn}"))
                more.append(await requests_s(session, before, pid, count, EVENTS, f"more {turn}"))
    each_s = median(few)
    event_s = (median(more) - each_s) / (EVENTS - 2)
    report.row("CPU of the router", request_ms=1e3 * each_s, event_us=1e6 * event_s)
    report.check("router_cpu_ms_1k", 1e3 * each_s, at_most=1.0)
    report.check("router_cpu_us_event", 1e6 * event_s, at_most=10.0)


async def requests_s(
    session: aiohttp.ClientSession, url: str, pid: int, count: int, answer: int, prefix: str
) -> float:
    """Seconds of CPU of this process for each of so many requests."""
    places = iter(range(count))

    async def one_after_the_other() -> None:
        for place in places:
            text = prompt(f"{prefix} {place} ", LONG_TOKENS)
            await ask(session, url, text, answer, streamed=True)

    before = cpu_s(pid)
    await asyncio.gather(*(one_after_the_other() for _ in range(CPU_TOGETHER)))
    return (cpu_s(pid) - before) / count


def cpu_s(pid: int) -> float:
    """Of a process so far, in user and kernel mode (proc(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * CLOCK_S


# ---- both ----------------------------------------------------------------------------------------------


def prompt(begins: str, tokens: int) -> str:
    """Of the stub engine, a letter is a token."""
    return (begins + "words of a conversation " * tokens)[:tokens]


def open_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


async def ask(
    session: aiohttp.ClientSession, url: str, text: str, answer: int, *, streamed: bool
) -> float:
    """Seconds to the first byte of the answer."""
    clock = asyncio.get_running_loop().time
    body: dict[str, Any] = {"model": "stub", "messages": [{"role": "user", "content": text}]}
    body |= {"max_tokens": answer, "stream": streamed}
    sent = clock()
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        said = await response.content.readany()
        first_s = clock() - sent
        said += await response.read()
        if response.status != 200 or (streamed and not said.endswith(b"[DONE]\n\n")):
            raise SystemExit(f"{url} answered {response.status}, and not as it should")
    return first_s


def engine(stack: ExitStack, *flags: str) -> str:
    """A stub engine: its URL."""
    found: str = json.loads(run_module(stack, "tests.support.stub_engine", *flags))["url"]
    return found


def router(stack: ExitStack, folder: Path, engines: Sequence[str], policy: str) -> tuple[str, int]:
    """A router before these engines: its URL and its process."""
    path = folder / f"{policy}.toml"
    lines = ['listen = "127.0.0.1:0"', "daemon = false", f'policy = "{policy}"']
    for number, url in enumerate(engines):
        lines += ["[[engines]]", f'url = "{url}"', f'node = "{number}"']
    path.write_text("\n".join(lines) + "\n")
    said, pid = started(stack, "kvpool.cli", "router", "--config", str(path))
    return said.split("router at ")[1].split(",")[0].strip(), pid


if __name__ == "__main__":
    sys.exit(main())

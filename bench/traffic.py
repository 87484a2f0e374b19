"""What the router does to traffic as most servers see it: short prompts, many at once.

`short`: two stub engines that compute in steps as engines do (50,000 tokens a second, 4 ms a step), each in a process
of its own, behind a router in its own: with the default policy, with `round-robin`, and without a router, in turns.
Prompts of 128 tokens and answers of 16, so many at a time; streamed or not. All of it shares this machine's cores,
clients too: what counts is the ratio of two policies of one router.

`shapes`: the simulator, four engines (of P/D two and two) at a load of 0.8 with work of several shapes. Each policy has
kvpool's queue, so that only the engine of a request differs. Judged is the default policy's mean time to first token
beside the best policy's, in the worst shape.

`namespaces`: a scheduler with engines of two namespaces: orders that count on blocks of the other one are wrong.

`group`: sessions over four engines, whose turns go to one router, and to three that schedule as one, in turns: mean
time to the first token. Then the leader of the three is killed with SIGKILL in the middle and started again:
decisions that knew no block of a session's earlier turns are blind. Each of its clients asks the next router.

`cpu`: CPU of the router's process for a request of 1,000 tokens that is answered with two, and for each event more,
before an engine for which nothing takes time.

    .venv/bin/python bench/traffic.py [--quick] [--json FILE] [--only short|shapes|namespaces|group|cpu]

Checks: short_prompts_rps_vs_best, worst_shape_vs_best, namespaces_wrong, router_cpu_ms_1k, router_cpu_us_event, three_routers_vs_one, blind_decisions_share,
leader_killed_longest_s.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
from harness import Report, median, parse_arguments, run_module, started
from sim import RUNS, task

from kvpool.scheduler.cluster import Cluster, Traffic
from kvpool.scheduler.estimates import KindEstimates, LoadEstimate, StepEstimate
from kvpool.scheduler.index import PrefixIndex
from kvpool.scheduler.policies import POLICIES, make_policy
from kvpool.scheduler.scheduler import Scheduler
from kvpool.scheduler.values import Engine, Order, Request, Role
from kvpool.simulator.shape import Shape
from kvpool.simulator.speeds import Speeds, load_hardware, load_model
from kvpool.simulator.traces import BLOCK_TOKENS, Entry, generate

DIRECT, BASELINE, OURS = "direct", "round-robin", "kvpool"
ENGINES = 2
TOKENS, ANSWER_TOKENS = 128, 16
TURNS, TURNS_QUICK = 5, 2
REQUESTS, REQUESTS_QUICK = 1024, 512
LONG_TOKENS = 1000
CPU_REQUESTS, CPU_REQUESTS_QUICK, CPU_TOGETHER = 400, 120, 8
EVENTS = 102
SHAPE_SEEDS, SHAPE_REQUESTS, SHAPE_REQUESTS_QUICK = 3, 1200, 300
SHAPE_LOAD, SHAPE_POOL_TOKENS = 0.8, 8_000_000
RIVALS = tuple(f"{name}/queued" for name in POLICIES if name not in {OURS, "random"})
RIVALS_QUICK = ("mooncake-global/queued", "dynamo/queued", "least-loaded/queued")
SESSIONS, SESSIONS_QUICK, TURNS_EACH = 48, 24, 6
FIRST_TOKENS, MORE_TOKENS, THINK_S, SESSION_GAP_S = 800, 400, 0.3, 0.08
SESSION_ENGINES, ROUTERS = 4, 3
NAMESPACE_DECISIONS = 400
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
    if arguments.only in "shapes":
        shapes(report)
    if arguments.only in "namespaces":
        namespaces(report)
    if arguments.only in "group":
        asyncio.run(group(report))
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


# ---- shapes of work, simulated ---------------------------------------------------------------------------


def shapes(report: Report) -> None:
    count = SHAPE_REQUESTS_QUICK if report.quick else SHAPE_REQUESTS
    rivals = RIVALS_QUICK if report.quick else RIVALS
    seeds = range(1 if report.quick else SHAPE_SEEDS)
    speeds = Speeds(load_hardware("a800x8"), load_model("llama-3-70b"))
    four = Shape(speeds, prefill=4, pool_tokens=SHAPE_POOL_TOKENS)
    worst = 0.0
    with RUNS:
        for name, entries in works(count).items():
            split = name == "P/D"
            shape = replace(four, prefill=2, decode=2) if split else four
            todo = [
                (entries, replace(shape, seed=seed), SHAPE_LOAD, policy)
                for policy in (OURS, *rivals)
                for seed in seeds
            ]
            found: dict[str, float] = dict.fromkeys((OURS, *rivals), 0.0)
            for (*_, policy), run in zip(todo, RUNS.map(task, todo), strict=True):
                found[policy] += 1e3 * run["ttft_s"]["mean"] / len(seeds)
            report.row(name, **found)
            worst = max(worst, found[OURS] / min(found.values()))
    report.check("worst_shape_vs_best", worst, at_most=1.02)


def works(count: int) -> dict[str, list[Entry]]:
    """So much work of each shape."""
    rng = Random(1)
    return {
        "short": unshared(rng, 4 * count, [200]),
        "long": unshared(rng, count, [16_000]),
        "mixed": unshared(rng, 2 * count, [300, 300, 300, 300, 16_000]),
        "shared prefixes": generate("shared-prefixes", count, 1),
        "sessions": generate("multi-turn", count, 1),
        "agents": generate("agent", count, 1),
        "P/D": generate("multi-turn", count, 2),
    }


def unshared(rng: Random, count: int, tokens: Sequence[int]) -> list[Entry]:
    """Prompts that have nothing in common, of about these lengths."""
    entries: list[Entry] = []
    when, key = 0.0, 0
    for _ in range(count):
        when += rng.expovariate(4.0)
        length = max(1, round(rng.choice(tokens) * rng.expovariate(1.0)))
        end = key - (-length // BLOCK_TOKENS)
        entries.append(Entry(when, length, 100, tuple(range(key, end))))
        key = end
    return entries


def namespaces(report: Report) -> None:
    """Two engines of each namespace; one namespace has every prompt, and an engine of the other one is asked first."""
    wrong = 0
    for number in range(NAMESPACE_DECISIONS):
        index = PrefixIndex()
        engines = []
        for name in ("a0", "a1", "b0", "b1"):
            tier, space = f"dram:{name}", name[0]
            index.join(f"gpu:{name}", pool=False, namespace=space)
            index.join(tier, pool=True, namespace=space)
            engines.append(
                Engine(
                    name, name, Role.BOTH, space, f"gpu:{name}", (tier,), 1 << 20, namespace=space
                )
            )
        loads = {tier: LoadEstimate(1e-4, 1e11) for tier in ("dram", "peer")}
        steps = StepEstimate((0.004, 1e-4, 1e-9))
        kinds = {space: KindEstimates(steps, steps, loads, 2048, 16, 16 << 10) for space in "ab"}
        nodes = {engine.tiers[0]: engine.node for engine in engines}
        spaces = {engine.tiers[0]: engine.namespace for engine in engines}
        keys = list(range(100))
        index.add(f"dram:a{number % 2}", keys)
        cluster = Cluster(kinds, nodes, Traffic(), spaces)
        scheduler = Scheduler(engines, cluster, index, make_policy(OURS), Random(number))
        among = frozenset("b") if number % 4 else None
        scheduler.submit(Request(number, keys, 1600, 10, 0.0, kinds=among), 0.0)
        for order in scheduler.poll(0.0):
            if isinstance(order, Order) and order.estimate.engine.namespace == "b":
                wrong += order.estimate.cached > 0
    report.row("namespaces", decisions=NAMESPACE_DECISIONS, wrong=wrong)
    report.check("namespaces_wrong", float(wrong), at_most=0)


# ---- several routers -----------------------------------------------------------------------------------


@dataclass
class Turn:
    """One answer. ttft_s: with the time of an earlier try at a router that died."""

    url: str
    ident: str
    number: int
    ttft_s: float


async def group(report: Report) -> None:
    turns = 1 if report.quick else TURNS
    count = SESSIONS_QUICK if report.quick else SESSIONS
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-bench-")))
        tables = [
            await asyncio.to_thread(engine_table, stack, folder, n) for n in range(SESSION_ENGINES)
        ]
        one = await asyncio.to_thread(router_of, stack, folder, tables, free_port(), [])
        ports = [free_port() for _ in range(ROUTERS)]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        several = [
            await asyncio.to_thread(router_of, stack, folder, tables, port, urls) for port in ports
        ]
        ways = {"one router": [one[0]], "three routers": [url for url, _ in several]}
        means: dict[str, list[float]] = {way: [] for way in ways}
        async with open_session() as session:
            for turn in range(-1, turns):  # one to get warm
                for way in list(ways) if turn % 2 else list(reversed(ways)):
                    found = await sessions(session, ways[way], count, f"{turn} {way}")
                    if turn >= 0:
                        means[way].append(sum(each.ttft_s for each in found) / len(found))
            for way in ways:
                report.row(way, ttft_ms=1e3 * median(means[way]))
            ratio = median(means["three routers"]) / median(means["one router"])

            async def kill() -> None:
                await asyncio.sleep(count * SESSION_GAP_S)
                os.kill(several[0][1], signal.SIGKILL)
                await asyncio.to_thread(router_of, stack, folder, tables, ports[0], urls)

            killing = asyncio.create_task(kill())
            found = await sessions(session, urls, count, "killed")
            await killing
            blind = [await is_blind(session, each) for each in found if each.number]
        report.row(
            "the leader is killed",
            decisions=len(blind),
            ttft_ms=1e3 * sum(each.ttft_s for each in found) / len(found),
            longest_s=max(each.ttft_s for each in found),
        )
    report.check("three_routers_vs_one", ratio, at_most=1.02)
    report.check("blind_decisions_share", sum(blind) / len(blind), at_most=0.005)
    report.check("leader_killed_longest_s", max(each.ttft_s for each in found), at_most=1.5)


async def sessions(
    session: aiohttp.ClientSession, urls: Sequence[str], count: int, prefix: str
) -> list[Turn]:
    """Conversations, each turn of which goes to the next router."""
    found: list[Turn] = []

    async def one(number: int) -> None:
        await asyncio.sleep(number * SESSION_GAP_S)
        for turn in range(TURNS_EACH):
            text = prompt(f"{prefix} {number} ", FIRST_TOKENS + turn * MORE_TOKENS)
            ident = f"{prefix.replace(' ', '-')}-{number}-{turn}"
            at = number + turn
            spent_s = 0.0
            for trial in range(len(urls)):
                url = urls[(at + trial) % len(urls)]
                began = asyncio.get_running_loop().time()
                try:
                    ttft_s = await ask(
                        session, url, text, ANSWER_TOKENS, streamed=True, ident=ident
                    )
                except (aiohttp.ClientError, OSError):
                    spent_s += asyncio.get_running_loop().time() - began
                    continue
                found.append(Turn(url, ident, turn, spent_s + ttft_s))
                break
            else:
                raise SystemExit("no router answers")
            await asyncio.sleep(THINK_S)

    await asyncio.gather(*(one(number) for number in range(count)))
    return found


async def is_blind(session: aiohttp.ClientSession, turn: Turn) -> bool:
    """Whether its first order was given without a block of the turns before, which some engine has."""
    async with session.get(f"{turn.url}/explain/{turn.ident}") as response:
        if response.status == 404:  # of the router that was killed after it had answered
            return False
        steps = (await response.json())["steps"]
    order = next((step for step in steps if step["what"] == "order"), None)
    return order is None or not any(each["cached_blocks"] for each in order["candidates"])


def engine_table(stack: ExitStack, folder: Path, number: int) -> dict[str, Any]:
    """A stub engine with KV events, as the router's configuration has it."""
    places = {name: f"ipc://{folder}/{number}.{name}" for name in ("events", "replay")}
    flags = [text for name, value in places.items() for text in (f"--{name}", value)]
    url = engine(stack, "--prefill-tokens-s", "8000", "--decode-s", "0.004", *flags)
    return {"name": f"{number}", "url": url, "node": f"{number}", "groups": [0], **places} | {
        "hash": "sha256_cbor",
        "block_tokens": 16,
    }


def router_of(
    stack: ExitStack,
    folder: Path,
    tables: Sequence[dict[str, Any]],
    port: int,
    others: Sequence[str],
) -> tuple[str, int]:
    """A router at this port: its URL and its process."""
    path = folder / f"{port}.toml"
    lines = [f'listen = "127.0.0.1:{port}"', "daemon = false", f"routers = {json.dumps(others)}"]
    for table in tables:
        lines += ["[[engines]]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    path.write_text("\n".join(lines) + "\n")
    said, pid = started(stack, "kvpool.cli", "router", "--config", str(path))
    return said.split("router at ")[1].split(",")[0].strip(), pid


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


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
    session: aiohttp.ClientSession,
    url: str,
    text: str,
    answer: int,
    *,
    streamed: bool,
    ident: str = "",
) -> float:
    """Seconds to the first byte of the answer. ident: of the request; empty: the router names it."""
    clock = asyncio.get_running_loop().time
    body: dict[str, Any] = {"model": "stub", "messages": [{"role": "user", "content": text}]}
    body |= {"max_tokens": answer, "stream": streamed}
    sent = clock()
    headers = {"x-request-id": ident} if ident else None
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
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

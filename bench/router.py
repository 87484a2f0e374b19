"""What the router costs: a decision, a request's way through it, and how late it hears of blocks.

`decision`: a request is submitted and polled for until its first order, by the scheduler as the router has it:
64 engines, 1 M blocks in the index, prompts of 12 k tokens in blocks of 16 whose parts lie on different nodes,
64 other requests under way. Hashing such a prompt is shown apart, and so is reading its JSON.

`overhead`: a real `kvpool router` before a stub engine in a process of its own for which nothing takes time.
50 requests a second, a second through the router and a second past it by turns; chats of 1,000 tokens, each
another one, so that the engine's tokeniser is asked each time. Measured is the time to the first token.

`event to index`: 16 engines publish 20 batches a second each, of 16 blocks, to `EngineCatalog`. For every seventh
batch a clock runs from before it is sent until its last block is found in the index, asked every millisecond.

    .venv/bin/python bench/router.py [--quick] [--json FILE] [--only decision|overhead|event]

Checks: decision_p99_ms, overhead_p50_ms, event_to_index_p99_ms.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
from harness import Report, median, parse_arguments, percentile, run_module

from kvpool.placement.kv_events.engine_blocks import short_hash
from kvpool.router.engines.engine_catalog import EngineCatalog
from kvpool.router.engines.pool_view import PoolViews
from kvpool.router.hashing import DEFAULT_SEED, HashSpec, chain, none_hash
from kvpool.router.prompts.rendering import Renderer
from kvpool.router.prompts.tokens import Tokenizer
from kvpool.router.requests.prompts import Prompts
from kvpool.router.upstream.upstream import open_session
from kvpool.scheduler.cluster import Cluster, Traffic
from kvpool.scheduler.estimates import KindEstimates, LoadEstimate, StepEstimate
from kvpool.scheduler.index import PrefixIndex
from kvpool.scheduler.policies import DEFAULT_POLICY, make_policy
from kvpool.scheduler.scheduler import Scheduler
from kvpool.scheduler.values import DecodeOrder, Engine, Order, Request, Role
from tests.support.stub_engine import Settings, StubEngine

ENGINES, BLOCKS, BLOCK_TOKENS, PROMPT_TOKENS = 64, 1_000_000, 16, 12_000
PROMPT_BLOCKS, RUN_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS, 250
UNDER_WAY = 64
LOOP = 3_000_000
PLAIN, COLD, URGENT = "cached in part", "cold", "with a deadline"
DECISIONS, DECISIONS_QUICK = 20_000, 2_000
HASHES = 200
SPEC = HashSpec(BLOCK_TOKENS, "sha256_cbor", none_hash("sha256_cbor", DEFAULT_SEED))
RATE, TURN_S, TURNS, TURNS_QUICK = 50, 1.0, 60, 16
DEADLINE_S = 600.0
TEXT_TOKENS, ANSWER_TOKENS = 1000, 8
EVENT_ENGINES, EVENT_BLOCKS, EVENT_RATE, EVENT_ASKED = 16, 16, 20, 7
EVENT_ROUNDS, EVENT_ROUNDS_QUICK = 600, 200
EVENT_SETTLE_S, EVENT_POLL_S, EVENT_LOST_S = 1.0, 0.001, 10.0


def main() -> int:
    report, arguments = parse_arguments(__doc__ or "")
    if arguments.only in "decision":
        hashing(report)
        decisions(report)
    if arguments.only in "overhead":
        asyncio.run(overhead(report))
    if arguments.only in "event":
        events(report)
    return report.finish()


# ---- decisions -----------------------------------------------------------------------------------------


def hashing(report: Report) -> None:
    """What is done with a prompt before it can be decided, each by itself."""
    prompts = [[(n * 7919 + at * 31) % 128_000 for at in range(PROMPT_TOKENS)] for n in range(8)]
    bodies = [json.dumps({"prompt": prompt}) for prompt in prompts]
    for prompt in prompts:
        chain(SPEC, prompt)
    hashed, read = [], []
    for number in range(HASHES):
        began = time.perf_counter()
        hashes = chain(SPEC, prompts[number % 8])
        _ = [short_hash(each) for each in hashes]
        hashed.append(1e3 * (time.perf_counter() - began))
        began = time.perf_counter()
        json.loads(bodies[number % 8])
        read.append(1e3 * (time.perf_counter() - began))
    report.row("hash a prompt", tokens=PROMPT_TOKENS, p50_ms=median(hashed), p99_ms=p99(hashed))
    report.row("read a prompt's JSON", tokens=PROMPT_TOKENS, p50_ms=median(read))


def decisions(report: Report) -> None:
    rounds = DECISIONS_QUICK if report.quick else DECISIONS
    worst = 0.0
    # A machine's Python may be several times slower than another's, or than its own on another day.
    began = time.perf_counter()
    for _ in range(LOOP):
        pass
    report.row("an empty loop of Python", million_s=1e-6 * LOOP / (time.perf_counter() - began))
    for label, prefill, kind in (
        ("all do both", ENGINES, PLAIN),
        ("48 prefill, 16 decode", 48, PLAIN),
        ("all do both", ENGINES, COLD),
        ("all do both", ENGINES, URGENT),
    ):
        taken, cpu = decide(prefill, rounds, kind)
        figures = {"p50_ms": median(taken), "p99_ms": p99(taken), "cpu_p99_ms": p99(cpu)}
        report.row(
            "decision",
            engines=label,
            prompts=kind,
            blocks=BLOCKS,
            prompt_blocks=PROMPT_BLOCKS,
            **figures,
        )
        worst = max(worst, figures["p99_ms"])
    report.check("decision_p99_ms", worst, at_most=1.0)


def decide(prefill: int, rounds: int, prompts: str = PLAIN) -> tuple[list[float], list[float]]:
    """Milliseconds of each decision, by the clock and of this thread.

    prefill: how many of the engines are for prompts; all: each does both. prompts: of which nodes have parts, or
    nobody any (cold), or that have a deadline.
    """
    both = prefill == ENGINES
    index = PrefixIndex()
    engines = []
    for number in range(ENGINES):
        role = Role.BOTH if both else Role.PREFILL if number < prefill else Role.DECODE
        name = f"node-{number}"
        engines.append(
            Engine(name, name, role, "engine", f"gpu:{name}", (f"dram:{name}",), 1 << 22)
        )
        index.join(f"gpu:{name}", pool=False)
        index.join(f"dram:{name}", pool=True)
        index.add(f"dram:{name}", held_by(number))
    loads = {"dram": LoadEstimate(1e-4, 2e11), "peer": LoadEstimate(1e-3, 9e10)}
    steps = StepEstimate((0.004, 1e-4, 1e-9)), StepEstimate((0.02, 1e-4, 1e-9))
    kinds = {"engine": KindEstimates(*steps, loads, 2048, BLOCK_TOKENS, BLOCK_TOKENS * 327_680)}
    cluster = Cluster(kinds, {e.tiers[0]: e.node for e in engines}, Traffic())
    rng = Random(0)
    scheduler = Scheduler(engines, cluster, index, make_policy(DEFAULT_POLICY), rng)
    # As the router does: no collection walks over what stays.
    gc.collect()
    gc.freeze()
    taken, cpu = [], []
    now = 0.0
    under_way: list[int] = []
    for number in range(rounds + UNDER_WAY):
        keys = []
        if prompts is COLD:
            keys = list(range(number * PROMPT_BLOCKS, (number + 1) * PROMPT_BLOCKS))
        while len(keys) < PROMPT_BLOCKS:
            blocks = held_by(rng.randrange(ENGINES))
            at = rng.randrange(len(blocks) // RUN_BLOCKS) * RUN_BLOCKS
            keys += blocks[at : at + RUN_BLOCKS]
        if number % 2 and prompts is not COLD:  # engines' own caches differ, too
            index.add(engines[rng.randrange(ENGINES)].gpu, keys[:200])
        deadline_s = now + DEADLINE_S if prompts is URGENT else math.inf
        request = Request(number, keys, PROMPT_TOKENS, 300, now, deadline_s=deadline_s)
        began, began_cpu = time.perf_counter(), time.thread_time()
        refused = scheduler.submit(request, now)
        orders = scheduler.poll(now)
        cpu.append(1e3 * (time.thread_time() - began_cpu))
        taken.append(1e3 * (time.perf_counter() - began))
        if refused is not None or not any(order.request is request for order in orders):
            raise SystemExit(f"the request was not ordered at once: {refused}")
        now = compute(scheduler, orders, now)
        under_way.append(number)
        if len(under_way) > UNDER_WAY:
            scheduler.finished(under_way.pop(0))
    gc.unfreeze()
    return taken[UNDER_WAY:], cpu[UNDER_WAY:]


def compute(scheduler: Scheduler, orders: list[Order | DecodeOrder], now: float) -> float:
    """Time passes until what was ordered, and what comes of it, is computed."""
    while orders:
        for order in orders:
            if isinstance(order, Order):
                estimate = order.estimate
                now = max(now, estimate.engine.free_at)
                scheduler.computed(estimate.engine, order.request.ident, now)
        orders = scheduler.poll(now)
    return now


def held_by(node: int) -> range:
    """The blocks in a node's memory, by what events call them: numbers, as the router's index has them."""
    each = BLOCKS // ENGINES
    return range((1 << 40) + node * each, (1 << 40) + (node + 1) * each)


def p99(values: list[float]) -> float:
    return percentile(values, 0.99)


# ---- the way through -------------------------------------------------------------------------------------


async def overhead(report: Report) -> None:
    """By turns, each with a fresh second of requests at fixed times."""
    turns = TURNS_QUICK if report.quick else TURNS
    taken: dict[str, list[float]] = {"direct": [], "router": []}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-bench-")))
        engine, router = await asyncio.to_thread(start, stack, folder)
        async with aiohttp.ClientSession() as session:
            await turn(session, engine, -1)
            await turn(session, router, -2)
            for number in range(turns):
                way = ("direct", "router", "router", "direct")[number % 4]
                url = engine if way == "direct" else router
                taken[way] += await turn(session, url, number)
    for way, times in taken.items():
        report.row(way, requests=len(times), ttft_p50_ms=median(times), ttft_p99_ms=p99(times))
    difference = median(taken["router"]) - median(taken["direct"])
    report.row("router - direct", p99_ms=p99(taken["router"]) - p99(taken["direct"]))
    report.check("overhead_p50_ms", difference, at_most=3.0)


async def turn(session: aiohttp.ClientSession, url: str, number: int) -> list[float]:
    """Milliseconds to the first token of each request."""
    clock = asyncio.get_running_loop().time
    began = clock()

    async def one(place: int) -> float:
        await asyncio.sleep(began + place / RATE - clock())
        text = f"{number}.{place} " + "words of a conversation " * (TEXT_TOKENS // 24)
        body = {
            "model": "stub",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": ANSWER_TOKENS,
            "stream": True,
        }
        sent = clock()
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            await response.content.readline()
            first = clock()
            if response.status != 200 or not (await response.read()).endswith(b"[DONE]\n\n"):
                raise SystemExit(f"{url} answered {response.status}, and not as it should")
        return 1e3 * (first - sent)

    return list(await asyncio.gather(*(one(place) for place in range(int(RATE * TURN_S)))))


def start(stack: ExitStack, folder: Path) -> tuple[str, str]:
    """A stub engine and a router before it: their URLs."""
    events, replay = (f"ipc://{folder}/{name}" for name in ("events", "replay"))
    free = ("--prefill-tokens-s", "inf", "--decode-s", "0")
    place = run_module(
        stack,
        "tests.support.stub_engine",
        *free,
        *("--events", events, "--replay", replay),
    )
    engine: str = json.loads(place)["url"]
    path = folder / "router.toml"
    path.write_text(
        'listen = "127.0.0.1:0"\ndaemon = false\n[[engines]]\n'
        f'url = "{engine}"\nnode = "a"\nevents = "{events}"\nreplay = "{replay}"\n'
        'groups = [0]\nhash = "sha256_cbor"\nblock_tokens = 16\n'
    )
    said = run_module(stack, "kvpool.cli", "router", "--config", str(path))
    return engine, said.split("router at ")[1].split(",")[0].strip()


# ---- events --------------------------------------------------------------------------------------------


def events(report: Report) -> None:
    """The publishers have a process of their own, and say when they send which prompt's blocks."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    rounds = EVENT_ROUNDS_QUICK if report.quick else EVENT_ROUNDS
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder:
        process = context.Process(target=publish, args=(folder, theirs, rounds), daemon=True)
        process.start()
        try:
            found, told = asyncio.run(listen(folder, ours))
        finally:
            process.kill()
            process.join()
    row = {"p50_ms": median(found), "p99_ms": p99(found), "max_ms": max(found)}
    report.row("event to index", engines=EVENT_ENGINES, asked=len(found), **row)
    report.row("as the router tells it", p50_ms=median(told), p99_ms=p99(told))
    report.check("event_to_index_p99_ms", row["p99_ms"], at_most=50.0)


def event_prompt(number: int) -> list[int]:
    return [(number * 7919 + at * 31) % 30_000 for at in range(EVENT_BLOCKS * BLOCK_TOKENS)]


def event_sockets(folder: str, number: int) -> dict[str, Any]:
    return {name: f"ipc://{folder}/{number}.{name}" for name in ("events", "replay")}


def publish(folder: str, pipe: Connection, rounds: int) -> None:
    """Engines, and once each is known their events, each batch told of before it is sent."""
    asyncio.run(_publish(folder, pipe, rounds))


async def _publish(folder: str, pipe: Connection, rounds: int) -> None:
    clock = asyncio.get_running_loop().time
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(StubEngine(Settings(**event_sockets(folder, number))))
            for number in range(EVENT_ENGINES)
        ]
        pipe.send([engine.url for engine in engines])
        await asyncio.to_thread(pipe.recv)
        began = clock()
        total = rounds * EVENT_ENGINES
        for number in range(total):
            await asyncio.sleep(began + number / (EVENT_RATE * EVENT_ENGINES) - clock())
            hashes = [short_hash(each) for each in chain(SPEC, event_prompt(number))]
            stored = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None}
            if number % EVENT_ASKED == 0:
                pipe.send((number, time.monotonic()))
            engines[number % EVENT_ENGINES].publish([stored | {"medium": "GPU", "group_idx": 0}])
        pipe.send(None)
        await asyncio.to_thread(pipe.recv)


async def listen(folder: str, pipe: Connection) -> tuple[list[float], list[float]]:
    """Milliseconds until the last block of each batch is in the index, and what `EngineCatalog` says of it."""
    urls = await asyncio.to_thread(pipe.recv)
    tables = [
        {"url": url, "name": f"e{number}", "groups": (0,), "hash": "sha256_cbor"}
        | {"block_tokens": BLOCK_TOKENS, **event_sockets(folder, number)}
        for number, url in enumerate(urls)
    ]
    index, told, found = PrefixIndex(), [], []
    async with open_session() as session:
        nodes: dict[str, str] = {}
        pools = PoolViews(index, nodes, {})
        catalog = EngineCatalog(
            engines=tables,
            daemon=None,
            session=session,
            index=index,
            pools=pools,
            cluster=Cluster({}, nodes, Traffic()),
            joined=lambda _: None,
            left=lambda _: None,
            changed=lambda _: None,
            on_lag=lambda lag_s: told.append(1e3 * lag_s),
        )
        prompts = Prompts(catalog, None, Tokenizer(session), Renderer(session), pools)
        await catalog.start()
        try:
            await asyncio.sleep(EVENT_SETTLE_S)
            pipe.send("begin")
            waiting: dict[int, tuple[float, Sequence[int]]] = {}
            over = False
            while waiting or not over:
                while not over and pipe.poll():
                    said = pipe.recv()
                    over = said is None
                    if said is not None:
                        number, sent = said
                        body = {"model": "stub", "prompt": event_prompt(number)}
                        waiting[number] = sent, (await prompts.prompt(body, "completions")).keys
                for number, (sent, keys) in list(waiting.items()):
                    now = time.monotonic()
                    if EVENT_BLOCKS in index.match(keys, now).lengths.values():
                        found.append(1e3 * (now - sent))
                        del waiting[number]
                    elif now - sent > EVENT_LOST_S:
                        raise SystemExit("an event did not reach the index")
                await asyncio.sleep(EVENT_POLL_S)
            pipe.send("end")
        finally:
            await catalog.close()
    return found, told


if __name__ == "__main__":
    sys.exit(main())

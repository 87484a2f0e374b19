"""Can a tenant learn from times what another has asked, and what does it cost to prevent that?

`timing`: a router before a stub engine with a prefix cache (50,000 tokens a second). For each trial a new prompt;
by a coin the victim sends it first; then the attacker, another tenant, sends the same and measures the time to its
answer of one token. AUC: how often a prompt that the victim had sent was answered faster than one that it had not
(ties half): 0.5 is a guess, 1 is certainty. With isolation and without, trials in turns.

`trace`: blocks found in a cache by the requests of a trace of conversations that begin alike, with all tenants in one
region and with each alone; a conversation belongs to a tenant. Unbounded, and least recently used blocks evicted.

    python bench/isolation.py [--quick] [--json FILE] [--only timing|trace]

The trace is not part of the repository: without it that part is not run.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections import OrderedDict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
from harness import Report, median, parse_arguments, run_module

from kvpool.simulator.traces import read_trace

TRACE = Path(__file__).resolve().parents[1] / "../shared/traces/conversation_trace.jsonl"
# The standard deviation of the AUC of guessing is 0.29 / sqrt(trials / 4): 0.018, and 0.053 in the quick run.
TRIALS, TRIALS_QUICK = 1000, 120
LIMIT, LIMIT_QUICK = 0.55, 0.65
WARMUP = 20
PROMPT_WORDS = 400
TENANTS = ("victim", "attacker")
TRACE_TENANTS = (2, 8, 32)
CACHE_BLOCKS = 20_000  # of the bounded cache: about a tenth of the trace's


def main() -> int:
    report, arguments = parse_arguments(__doc__ or "")
    if arguments.only in "timing":
        asyncio.run(timing(report))
    if arguments.only in "trace":
        trace(report)
    return report.finish()


# ---- timing --------------------------------------------------------------------------------------------


async def timing(report: Report) -> None:
    trials = TRIALS_QUICK if report.quick else TRIALS
    print(f"{trials} prompts of {PROMPT_WORDS} words, of which the victim has sent half")
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        engine = json.loads(run_module(stack, "tests.support.stub_engine"))["url"]
        urls = {
            isolate: router(stack, folder, engine, isolate=isolate) for isolate in (False, True)
        }
        times: dict[bool, dict[bool, list[float]]] = {
            isolate: {True: [], False: []} for isolate in urls
        }
        dice = random.Random(1)
        async with aiohttp.ClientSession() as session:
            for number in range(WARMUP + trials):
                for isolate, url in urls.items():
                    sent = dice.random() < 0.5
                    prompt = " ".join(f"w{dice.getrandbits(40):x}" for _ in range(PROMPT_WORDS))
                    await ask(session, url, "victim", prompt if sent else f"other {prompt}")
                    took = await ask(session, url, "attacker", prompt)
                    if number >= WARMUP:
                        times[isolate][sent].append(took)
    for isolate, found in times.items():
        value = auc(found[True], found[False])
        report.row(
            "isolated" if isolate else "shared",
            auc=value,
            sent_ms=1e3 * median(found[True]),
            not_sent_ms=1e3 * median(found[False]),
        )
        if isolate:
            limit = LIMIT_QUICK if report.quick else LIMIT
            report.check("isolation_auc", max(value, 1 - value), at_most=limit)


def auc(fast: list[float], slow: list[float]) -> float:
    """The Mann-Whitney statistic over its maximum: how often one of `fast` is below one of `slow`."""
    wins = sum((one < other) + 0.5 * (one == other) for one in fast for other in slow)
    return wins / (len(fast) * len(slow))


async def ask(session: aiohttp.ClientSession, url: str, tenant: str, prompt: str) -> float:
    body = {"model": "stub", "prompt": prompt, "max_tokens": 1}
    headers = {"authorization": f"Bearer {token_of(tenant)}"}
    began = time.perf_counter()
    async with session.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
        await answer.read()
        assert answer.status == 200, answer.status
    return time.perf_counter() - began


def token_of(tenant: str) -> str:
    return f"token-of-the-tenant-{tenant}"


def router(stack: ExitStack, folder: Path, engine: str, *, isolate: bool) -> str:
    """The URL of a router before the engine."""
    lines = ['listen = "127.0.0.1:0"', "daemon = false"]
    if isolate:
        secret = written(folder / "isolate.secret", "secret-of-the-isolation")
        lines += ["isolate = true", f'isolate_secret_file = "{secret}"']
    for tenant in TENANTS:
        token = written(folder / f"{tenant}.token", token_of(tenant))
        lines += [f"[tenants.{tenant}]", f'token_file = "{token}"']
    lines += ["[[engines]]", f'url = "{engine}"', 'hash = "sha256_cbor"', "block_tokens = 16"]
    config = written(folder / f"router-{isolate}.toml", "\n".join(lines))
    line = run_module(stack, "kvpool.cli", "router", "--config", str(config))
    return line.split("router at ")[1].split(",")[0].split()[0]


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


# ---- trace ---------------------------------------------------------------------------------------------


def trace(report: Report) -> None:
    if not TRACE.exists():
        report.not_run("isolation_hits_lost", f"{TRACE.name} is not here", at_most=0.05)
        return
    chains: list[Any] = [entry.keys for entry in read_trace(TRACE)]
    if report.quick:
        chains = chains[:4000]
    print(f"{len(chains)} requests of {TRACE.name}")
    worst = 0.0
    for most in (None, CACHE_BLOCKS):
        shared = hits(chains, 1, most)
        for tenants in TRACE_TENANTS:
            lost = 1 - hits(chains, tenants, most) / shared
            worst = max(worst, lost)
            report.row(
                "hits lost",
                tenants=tenants,
                cache_blocks=most or "unbounded",
                shared_blocks=shared,
                lost=lost,
            )
    report.check("isolation_hits_lost", worst, at_most=0.05)


def hits(chains: list[Any], tenants: int, most: int | None) -> int:
    """Blocks that are found, of all prefixes. A conversation, by its second block, is one of so many tenants'."""
    cache: OrderedDict[tuple[int, int], None] = OrderedDict()
    found = 0
    for chain in chains:
        tenant = hash(chain[1] if len(chain) > 1 else chain[0]) % tenants
        matching = True
        for key in chain:
            at = tenant, key
            matching = matching and at in cache
            found += matching
            cache[at] = None
            cache.move_to_end(at)
        while most is not None and len(cache) > most:
            cache.popitem(last=False)
    return found


if __name__ == "__main__":
    sys.exit(main())

"""What do session hints give real engines? Agents' sessions, through a router, to two vLLM engines and a small pool.

Twenty sessions of the file of agents' sessions (`agent_sessions.py`) go, a turn when its time has come, through
`kvpool router` to two real vLLM servers on the CPU, beside one daemon. Both engines' own prefix caches and the pool
are much smaller than what the sessions use. Rounds take turns, hinted, bare, bare, hinted:

    hints     each turn says its session and its agent, and the last one that it is the last
    no hint   nothing of that

Scaled: `MERGED` blocks of the file are one block of an engine, and a second of the run is 25 of the file's, or what
`--speedup` says. Times of the daemon itself are not scaled, such as the two seconds for which the blocks of a session
that has ended are left alone: the faster a run, the less hints give. A block's tokens are made of its hash, so what
shared a prefix then shares it here. The clock of the run stands still while `TOGETHER` turns are being answered, or the
same agent's turn before: a slow machine changes the order of turns no more than a fast one. Before each round the pool
is emptied, and the prompts of a round have a `cache_salt` of their own, so that none finds what another one has left.

*Hit*: prompt tokens that were not computed, of all (`cached_tokens` of the answers): they were in the engines' own
caches, or in the pool. *Pool*: those that came from there. *Could hit*: that an earlier turn of the round had. Each
answer is compared, token by token, with what an engine without a pool says to the same prompt: all must be equal. The
engines compute in float32, where no prompt has near ties.

    python bench/agents_live.py [--quick] [--json FILE] [--sessions FILE] [--speedup X] [--longest-s SECONDS]
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

from agent_sessions import Arrival, Session, arrivals, default_path, read_sessions
from demo import wait_until_routed
from engines import (
    ANSWER_S,
    BLOCK_TOKENS,
    Answer,
    ApiServer,
    Broken,
    EngineProcess,
    ask,
    daemon,
    end_on_sigterm,
    router,
    tiny_model,
)
from harness import Report
from rich.console import Console
from rich.table import Table
from tiny_models import VOCABULARY, prompt

from kvpool.client import OperatorClient

SESSIONS = 20
ACTIVE = 16
SEED = 1
MERGED = 32  # 2,048 tokens of the file are a block
TOGETHER = 2
QUICK_S = 1000.0  # of the file's time
TURNS_LEAST, TURNS_MOST = 10, 40
PROMPT_BLOCKS_MAX = 62
TAIL_TOKENS, ANSWER_TOKENS = 6, 4
MODEL_TOKENS = 2048
ENGINE_BLOCKS = 72
POOL_BLOCKS = 160
BLOCK_BYTES = 128 << 10  # of four layers with two heads of 64, in float32
TOOL_S = 60.0
ROUNDS, ROUNDS_QUICK = ("hints", "no hint", "no hint", "hints"), ("no hint", "hints")
SETTINGS: dict[str, Any] = {"lookup_timeout_s": 5.0, "prefill_tokens_per_s": 1.0}
"""So short a prompt is sooner computed than loaded, sometimes; and a busy machine makes no miss of a lookup."""


@dataclass(frozen=True)
class Asked:
    """A turn's prompt, and what it gave."""

    prompt: tuple[int, ...]
    answer: Answer


@dataclass
class Round:
    """All turns under one way. loaded_tokens: of prompts, from the pool."""

    way: str
    turns: list[Asked] = field(default_factory=list)
    loaded_tokens: int = 0
    took_s: float = 0.0
    expended: int = 0
    evicted: int = 0
    evicted_expendable: int = 0
    wrong: int = 0

    @property
    def tokens(self) -> int:
        return sum(len(turn.prompt) for turn in self.turns)

    @property
    def cached_tokens(self) -> int:
        return sum(turn.answer.cached_tokens for turn in self.turns)

    def ttfts_ms(self) -> list[float]:
        return sorted(turn.answer.ttft_ms for turn in self.turns)


def choose(path: Path, longest_s: float) -> list[Session]:
    """The first `SESSIONS` of the file that fit."""
    found = [
        session
        for session in read_sessions(path, MERGED)
        if TURNS_LEAST <= len(session.turns) <= TURNS_MOST
        and session.duration_s <= longest_s
        and max(len(turn.blocks) for turn in session.turns) <= PROMPT_BLOCKS_MAX
    ]
    if len(found) < SESSIONS:
        raise SystemExit(f"{path} has {len(found)} sessions that fit, not {SESSIONS}")
    return found[:SESSIONS]


def block_tokens(block: int) -> list[int]:
    return prompt(block, BLOCK_TOKENS)


def prompt_of(arrival: Arrival) -> tuple[int, ...]:
    """Equal hashes are equal tokens. The rest of a block is the turn's own."""
    tail = Random(f"{arrival.session} {arrival.turn.agent} {arrival.turn.at_s}")
    tokens = [token for block in arrival.turn.blocks for token in block_tokens(block)]
    return (*tokens, *(tail.randrange(3, VOCABULARY) for _ in range(TAIL_TOKENS)))


def hint(arrival: Arrival, name: str) -> dict[str, Any]:
    told: dict[str, Any] = {"id": name, "agent": arrival.turn.agent}
    if arrival.pause_s is None:
        told["end"] = True
    return told


def could_hit(stream: Sequence[Arrival]) -> float:
    """The share of all prompt tokens that an earlier turn had."""
    seen: set[int] = set()
    had = tokens = 0
    for arrival in stream:
        blocks = arrival.turn.blocks
        had += BLOCK_TOKENS * next(
            (at for at, b in enumerate(blocks) if b not in seen), len(blocks)
        )
        tokens += BLOCK_TOKENS * len(blocks) + TAIL_TOKENS
        seen.update(blocks)
    return had / tokens


def play(url: str, way: str, salt: str, stream: Sequence[Arrival], speedup: float) -> Round:
    """All turns at their times, by a clock that stands still while `TOGETHER` of them, or the agent's last, are answered."""
    played = Round(way)
    lock, free = threading.Lock(), threading.Semaphore(TOGETHER)
    last: dict[tuple[int, str], Future[None]] = {}
    began, stood_s = time.monotonic(), 0.0

    def turn(arrival: Arrival) -> None:
        asked = prompt_of(arrival)
        more: dict[str, Any] = {"cache_salt": salt}
        if way == "hints":
            name = f"{salt}-{arrival.session}"
            more["kv_transfer_params"] = {"kvpool_session": hint(arrival, name)}
        try:
            answer = ask(url, asked, ANSWER_TOKENS, more)
        finally:
            free.release()
        with lock:
            played.turns.append(Asked(asked, answer))

    with ThreadPoolExecutor(TOGETHER) as threads:
        for arrival in stream:
            time.sleep(max(0.0, began + stood_s + arrival.at_s / speedup - time.monotonic()))
            stands = time.monotonic()
            strand = arrival.session, arrival.turn.agent
            if strand in last:
                last[strand].result()
            free.acquire()
            stood_s += time.monotonic() - stands
            last[strand] = threads.submit(turn, arrival)
        for each in last.values():
            each.result()
    played.took_s = time.monotonic() - began
    return played


def loaded_tokens(engines: Sequence[ApiServer]) -> int:
    """Prompt tokens that the engines have loaded from the pool so far."""
    found = 0
    for engine in engines:
        with urllib.request.urlopen(f"{engine.url}/metrics", timeout=ANSWER_S) as response:
            text = response.read().decode()
        values = re.findall(
            r'^vllm:prompt_tokens_by_source_total\{.*"external_kv_transfer".*\} (\S+)$',
            text,
            re.MULTILINE,
        )
        found += sum(int(float(value)) for value in values)
    return found


def run(
    folder: Path,
    ways: Sequence[str],
    stream: Sequence[Arrival],
    speedup: float,
    console: Console,
) -> list[Round]:
    model = tiny_model()
    rounds = []
    with ExitStack() as stack:
        console.print("starting a daemon, two engines and a router ...")
        socket_path = stack.enter_context(daemon(folder, memory=str(POOL_BLOCKS * BLOCK_BYTES)))
        flags = [
            *("--dtype", "float32", "--max-model-len", str(MODEL_TOKENS)),
            *("--num-gpu-blocks-override", str(ENGINE_BLOCKS)),
        ]
        engines = [
            stack.enter_context(
                ApiServer(name, model, folder, socket_path, "both", *flags, **SETTINGS)
            )
            for name in ("engine-a", "engine-b")
        ]
        for engine in engines:
            engine.wait_ready()
        url = stack.enter_context(router(folder, "router", socket_path))
        wait_until_routed(url, len(engines))
        operator = stack.enter_context(OperatorClient(socket_path, connect=True))
        for engine in engines:
            ask(engine.url, prompt(0, MODEL_TOKENS // 2), ANSWER_TOKENS)
        for number, way in enumerate(ways):
            operator.evict(tier="dram")
            before, counted = loaded_tokens(engines), operator.stats().counters
            played = play(url, way, f"round-{number}", stream, speedup)
            after = operator.stats().counters
            played.loaded_tokens = loaded_tokens(engines) - before
            for name in ("expended", "evicted", "evicted_expendable"):
                setattr(played, name, getattr(after, name) - getattr(counted, name))
            console.print(
                f"round {number + 1} of {len(ways)}, {way}: {played.took_s:.0f} s, "
                f"{played.cached_tokens / played.tokens:.1%} hit"
            )
            rounds.append(played)
    return rounds


def judge(folder: Path, rounds: Sequence[Round], console: Console) -> None:
    """Ask an engine without a pool the same, each prompt once."""
    console.print("asking an engine without a pool the same prompts ...")
    options = {"dtype": "float32", "max_model_len": MODEL_TOKENS}
    right: dict[tuple[int, ...], list[int]] = {}
    with EngineProcess("alone", tiny_model(), folder, engine=options) as engine:
        engine.wait_ready()
        for played in rounds:
            for turn in played.turns:
                if turn.prompt not in right:
                    right[turn.prompt] = engine.ask(turn.prompt, ANSWER_TOKENS).tokens
                played.wrong += turn.answer.tokens != right[turn.prompt]


def quantile(values: Sequence[float], share: float) -> float:
    """values: sorted."""
    return values[min(len(values) - 1, ceil(share * len(values)) - 1)]


def together(rounds: Sequence[Round], way: str) -> dict[str, Any]:
    """All rounds of one way."""
    some = [played for played in rounds if played.way == way]
    tokens = sum(played.tokens for played in some)
    times = sorted(ms for played in some for ms in played.ttfts_ms())
    return {
        "rounds": len(some),
        "requests": sum(len(played.turns) for played in some),
        "prompt_tokens": tokens,
        "cached_tokens": sum(played.cached_tokens for played in some),
        "hit_rate": sum(played.cached_tokens for played in some) / tokens,
        "hit_rates": [played.cached_tokens / played.tokens for played in some],
        "pool_rate": sum(played.loaded_tokens for played in some) / tokens,
        "ttft_mean_ms": mean(times),
        "ttft_p99_ms": quantile(times, 0.99),
        "expended": sum(played.expended for played in some),
        "evicted": sum(played.evicted for played in some),
        "evicted_expendable": sum(played.evicted_expendable for played in some),
        "wrong": sum(played.wrong for played in some),
        "took_s": [played.took_s for played in some],
    }


def show(console: Console, rows: Mapping[str, Mapping[str, Any]], could: float) -> None:
    table = Table(title=f"Of all prompt tokens; at most {could:.1%} could hit")
    headings = ("", "hit", "pool", "cached", "TTFT, ms", "p99, ms", "answers")
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for way, row in rows.items():
        table.add_row(
            way,
            *(f"{row[rate]:.1%}" for rate in ("hit_rate", "pool_rate")),
            f"{row['cached_tokens']:,}",
            *(f"{row[ms]:.0f}" for ms in ("ttft_mean_ms", "ttft_p99_ms")),
            f"{row['wrong']} WRONG" if row["wrong"] else f"{row['requests']} right",
        )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="half of the time, one round each")
    parser.add_argument("--json", metavar="FILE", help="write rows and checks there")
    parser.add_argument("--sessions", type=Path, default=default_path(), metavar="FILE")
    parser.add_argument("--speedup", type=float, default=25.0, metavar="X")
    parser.add_argument(
        "--longest-s", type=float, default=1800.0, metavar="SECONDS", help="of a session"
    )
    options = parser.parse_args()
    if not options.sessions.is_file():
        raise SystemExit(
            f"there are no sessions at {options.sessions}; name a file with --sessions"
        )
    end_on_sigterm()
    console = Console()
    chosen = choose(options.sessions, options.longest_s)
    stream = arrivals(chosen, ACTIVE, SEED)
    if options.quick:
        stream = [arrival for arrival in stream if arrival.at_s <= QUICK_S]
    ways = ROUNDS_QUICK if options.quick else ROUNDS
    unique = sum(session.unique for session in chosen)
    console.print(
        f"{SESSIONS} sessions, {len(stream)} turns, {unique} blocks; pool {POOL_BLOCKS}, "
        f"engines 2 x {ENGINE_BLOCKS}; {stream[-1].at_s / options.speedup:.0f} s a round"
    )
    try:
        with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder:
            rounds = run(Path(folder), ways, stream, options.speedup, console)
            judge(Path(folder), rounds, console)
    except Broken as error:
        print(f"bench failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    could = could_hit(stream)
    rows = {way: together(rounds, way) for way in ("no hint", "hints")}
    show(console, rows, could)
    out = Report(options.quick, options.json)
    for way, row in rows.items():
        out.rows.append({"name": way, **row, "could": could})
    bare, hinted = rows["no hint"], rows["hints"]
    out.check("agents_live_hits", hinted["hit_rate"] / bare["hit_rate"], at_least=1.0)
    out.check("agents_live_ttft", hinted["ttft_mean_ms"] / bare["ttft_mean_ms"], at_most=1.0)
    out.check("agents_live_wrong", float(bare["wrong"] + hinted["wrong"]), at_most=0.0)
    out.finish()
    return 1 if bare["wrong"] + hinted["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())

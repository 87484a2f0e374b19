"""Prompts are computed by two engines and answered by a third one, behind a router: `make demo`.

Real vLLM servers on the CPU with a tiny random-weight model, two nodes with a real etcd and Redis:

    node a    a prefill engine, and the router
    node b    a prefill engine and a decode engine

First without the router. The engine of node a answers each prompt cold, and again (its own prefix cache).
Then the daemon of node a is restarted, so that what it held in memory is on its disk only, and the decode
engine, which has seen none of them, answers with blocks that node b pulls from there.

Then sessions of several turns with a common system prompt go through the router, under one policy after
the other, each time other prompts: what is computed twice, and what that costs.

Prints times to the first token, and leaves `.demo/report.json`. Exits 0 only when all answers are right and
all whole blocks came over from the disk of node a. An answer may differ from a token on that was a near tie.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engines import (
    ANSWER_S,
    BLOCK_TOKENS,
    PARTS,
    ROOT,
    Answer,
    ApiServer,
    Broken,
    ask,
    blocks_of,
    counter,
    end_on_sigterm,
    measure,
    read_from_disk,
    router,
    tiny_model,
    wait_for_blocks,
    wait_until_announced,
)
from rich.console import Console
from rich.table import Table
from tiny_models import prompt

from tests.support.local_cluster import LocalCluster, LocalNode
from tests.support.saying import saying

PROMPT_TOKENS = (1990, 2000, 2010)
PULL_WAIT_S = 10.0
"""Longer than an engine waits by default: the demo shows the way, also on a machine that is busy."""
NEW_TOKENS = 32
WARM_SEED = 1000

POLICIES = ("random", "round-robin", "kvpool")
SYSTEM_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 1024, 160, 16
SESSIONS, TURNS, AT_A_TIME = 6, 3, 2


@dataclass(frozen=True)
class Row:
    """One prompt, three times. crossed: blocks that node b pulled for the third; from_disk: that node a read."""

    prompt_tokens: int
    cold: Answer
    local: Answer
    pool: Answer
    crossed: int
    from_disk: int

    @property
    def tokens_equal(self) -> bool:
        return self.cold.same(self.local) and self.cold.same(self.pool)

    @property
    def from_pool(self) -> bool:
        """All whole blocks of the prompt, but for a token that must be computed, from the other node's disk."""
        blocks = (self.prompt_tokens - 1) // BLOCK_TOKENS
        return (
            self.pool.cached_tokens >= blocks * BLOCK_TOKENS
            and min(self.crossed, self.from_disk) >= blocks
        )


@dataclass(frozen=True)
class Played:
    """All sessions under one policy. computed_share: tokens that engines computed, of those that were sent."""

    policy: str
    requests: int
    ttft_mean_ms: float
    ttft_median_ms: float
    ttft_most_ms: float
    computed_share: float
    wrong: int


def main() -> int:
    end_on_sigterm()
    console = Console()
    try:
        with tempfile.TemporaryDirectory(prefix="kvpool-demo-") as folder:
            rows, played = run(Path(folder))
    except Broken as error:
        console.print(f"[red]demo failed:[/] {error}", highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; nothing is left running")
        return 130
    show_gain(console, rows)
    show(console, rows)
    show_policies(console, played)
    report(rows, played)
    passed = all(row.tokens_equal and row.from_pool for row in rows)
    if not passed:
        console.print("[red]tokens differ, or blocks did not come from the other node's disk[/]")
    wrong = sum(each.wrong for each in played)
    if wrong:
        console.print(
            f"[red]{wrong} answers through the router are not what an engine says alone[/]"
        )
    return 0 if passed and not wrong else 1


def run(folder: Path) -> tuple[list[Row], list[Played]]:
    with ExitStack() as stack:
        model = tiny_model()
        cluster = LocalCluster(folder, nodes=2, memory="512MiB", ssd="1GiB")
        with saying("starting two nodes with etcd and Redis"):
            a, b = stack.enter_context(cluster).nodes
        # On a busy machine, computing so short a prompt may be sooner than bringing it: then it would be computed.
        loading: dict[str, Any] = {"pull_wait_s": PULL_WAIT_S, "prefill_tokens_per_s": 1.0}
        engines = [
            stack.enter_context(ApiServer(name, model, folder, node.socket, role, **loading))
            for name, node, role in (
                ("prefill-a", a, "prefill"),
                ("prefill-b", b, "prefill"),
                ("decode-b", b, "decode"),
            )
        ]
        with saying("starting three vLLM engines"):
            for engine in engines:
                engine.wait_ready()
        rows = cold_local_pool(engines, a, b)
        played = []
        for number, policy in enumerate(POLICIES):
            what = f"{SESSIONS} sessions of {TURNS} turns through the router, policy {policy}"
            with (
                saying(what),
                router(folder, f"router-{policy}", a.socket, "--policy", policy) as url,
            ):
                wait_until_routed(url, len(engines))
                played.append(play(url, policy, number, engines))
        return rows, played


# ---- one prompt at a time, without the router ---------------------------------------------------------


def cold_local_pool(engines: Sequence[ApiServer], a: LocalNode, b: LocalNode) -> list[Row]:
    first, _, last = engines
    prompts = [prompt(seed, tokens) for seed, tokens in enumerate(PROMPT_TOKENS)]
    warm = prompt(WARM_SEED, max(PROMPT_TOKENS))
    with saying(f"asking the engine of node a {len(prompts)} prompts, twice each"):
        ask(first.url, warm, NEW_TOKENS)
        cold = [measure(first.url, each, NEW_TOKENS) for each in prompts]
        local = [measure(first.url, each, NEW_TOKENS) for each in prompts]
        stored = sum(blocks_of(len(each), NEW_TOKENS) for each in [warm, *prompts])
        wait_for_blocks(a.socket, stored)
    with saying("restarting the daemon of node a: what it had in memory is on its disk only"):
        a.restart()
        wait_until_announced(a.socket)
    with saying("asking the engine of node b, which has seen none of the prompts"):
        ask(last.url, prompt(WARM_SEED + 1, max(PROMPT_TOKENS)), NEW_TOKENS)
        return from_the_pool(prompts, cold, local, last, a, b)


def from_the_pool(
    prompts: Sequence[list[int]],
    cold: Sequence[Answer],
    local: Sequence[Answer],
    last: ApiServer,
    a: LocalNode,
    b: LocalNode,
) -> list[Row]:
    rows = []
    for each, computed, cached in zip(prompts, cold, local, strict=True):
        before = counter(b.socket, "pulled_blocks"), read_from_disk(a.socket)
        pool = measure(last.url, each, NEW_TOKENS)
        crossed = (counter(b.socket, "pulled_blocks") - before[0]) // PARTS
        rows.append(
            Row(
                len(each),
                computed,
                cached,
                pool,
                crossed,
                (read_from_disk(a.socket) - before[1]) // PARTS,
            )
        )
    return rows


# ---- sessions through the router -----------------------------------------------------------------------


def wait_until_routed(url: str, count: int) -> None:
    """Wait until the router sends requests to so many engines."""
    deadline = time.monotonic() + ANSWER_S
    while True:
        with urllib.request.urlopen(f"{url}/engines", timeout=ANSWER_S) as response:
            engines = json.load(response)["engines"]
        if sum(engine["state"] == "serving" for engine in engines) == count:
            return
        if time.monotonic() > deadline:
            raise Broken(f"the router does not reach its engines: {engines}")
        time.sleep(0.1)


def play(url: str, policy: str, number: int, engines: Sequence[ApiServer]) -> Played:
    system = prompt(100 + number, SYSTEM_TOKENS)

    def session(at: int) -> list[tuple[list[int], Answer]]:
        said = list(system)
        turns = []
        for turn in range(TURNS):
            said += prompt(10_000 * (number + 1) + 100 * at + turn, TURN_TOKENS)
            answer = ask(url, said, ANSWER_TOKENS)
            turns.append((list(said), answer))
            said += answer.tokens
        return turns

    computed = sum(engine.computed_tokens() for engine in engines)
    with ThreadPoolExecutor(AT_A_TIME) as threads:
        turns = [turn for played in threads.map(session, range(SESSIONS)) for turn in played]
    computed = sum(engine.computed_tokens() for engine in engines) - computed
    wrong = sum(not ask(engines[1].url, said, ANSWER_TOKENS).same(answer) for said, answer in turns)
    times = [answer.ttft_ms for _, answer in turns]
    sent = sum(len(said) for said, _ in turns)
    return Played(
        policy,
        len(turns),
        statistics.mean(times),
        statistics.median(times),
        max(times),
        computed / sent,
        wrong,
    )


# ---- what is shown -------------------------------------------------------------------------------------


def show(console: Console, rows: list[Row]) -> None:
    table = Table(title="Time to first token; blocks pulled, and read from the other node's disk")
    for heading in ("prompt", "engine", "TTFT", "cached", "pulled", "disk", "tokens"):
        table.add_column(heading, justify="left" if heading == "engine" else "right", no_wrap=True)
    for row in rows:
        for name in ("cold", "local", "pool"):
            answer: Answer = getattr(row, name)
            table.add_row(
                f"{row.prompt_tokens}" if name == "cold" else "",
                RUNS[name],
                f"{answer.ttft_ms:.1f} ms",
                str(answer.cached_tokens),
                str(row.crossed) if name == "pool" else "",
                str(row.from_disk) if name == "pool" else "",
                "equal" if row.cold.same(answer) else "DIFFER",
                end_section=name == "pool",
            )
    console.print(table)
    console.print(
        "TTFT: time to the first token. cached: tokens of the prompt that were not computed. pulled: blocks that node b "
        "took from node a. disk: blocks that node a read from its disk for that. tokens: whether the answer is the same "
        "as the cold one.\n"
    )


def show_gain(console: Console, rows: list[Row]) -> None:
    cold = statistics.median(row.cold.ttft_ms for row in rows)
    pool = statistics.median(row.pool.ttft_ms for row in rows)
    console.print(
        f"[bold]{cold / pool:.1f} times faster than computing:[/] the first token came after {pool:.0f} ms with blocks "
        f"from the other node's disk, and after {cold:.0f} ms without.\n"
        "To go on in this environment: source .venv-vllm/bin/activate, then docs/quickstart.md.",
        highlight=False,
    )


RUNS = {
    "cold": "prefill-a, cold",
    "local": "prefill-a, own cache",
    "pool": "decode-b, pool",
}


def show_policies(console: Console, played: list[Played]) -> None:
    title = (
        f"{SESSIONS} sessions of {TURNS} turns, {AT_A_TIME} at a time, through the router: "
        "time to first token"
    )
    table = Table(title=title)
    for heading in ("policy", "mean", "median", "longest", "tokens computed", "answers"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for each in played:
        table.add_row(
            each.policy,
            *(f"{ms:.0f} ms" for ms in (each.ttft_mean_ms, each.ttft_median_ms, each.ttft_most_ms)),
            f"{each.computed_share:.0%}",
            f"{each.wrong} WRONG" if each.wrong else f"{each.requests} right",
        )
    console.print(table)
    console.print(
        "tokens computed: what engines computed, of what was sent. answers: compared with what one engine says alone.\n"
    )


def report(rows: list[Row], played: list[Played]) -> None:
    out = ROOT / ".demo" / "report.json"
    out.parent.mkdir(exist_ok=True)
    body = {
        "tokens_equal": all(row.tokens_equal for row in rows),
        "cold_ttft_ms": statistics.median(row.cold.ttft_ms for row in rows),
        "local_hit_ttft_ms": statistics.median(row.local.ttft_ms for row in rows),
        "pool_ttft_ms": statistics.median(row.pool.ttft_ms for row in rows),
        "pool_hit_tokens": statistics.median(row.pool.cached_tokens for row in rows),
        "prompt_tokens": statistics.median(row.prompt_tokens for row in rows),
        "nodes": 2,
        "pulled_blocks": sum(row.crossed for row in rows),
        "blocks_from_disk": sum(row.from_disk for row in rows),
        "router": [asdict(each) for each in played],
    }
    out.write_text(json.dumps(body, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())

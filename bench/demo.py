"""One engine prefills and writes into the pool, a fresh one on another node pulls and decodes: `make demo`.

Between the two, the daemon of the first node is restarted: what the second engine gets was on its disk.

Real vLLM on the CPU with a tiny random-weight model; two daemons with a real etcd and Redis. Engine 1, on
node a, answers each prompt cold and again (its own prefix cache); engine 2, a fresh process on node b
warmed by an unrelated prompt, answers with blocks that node b pulls from node a. Prints the times to the
first token side by side and leaves `.demo/report.json`. Exits 0 only when all tokens are equal and all
whole blocks came over, from the disk of node a.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from engines import (
    BLOCK_TOKENS,
    ROOT,
    Answer,
    Broken,
    EngineProcess,
    blocks_of,
    counter,
    end_on_sigterm,
    kvpool_transfer,
    read_from_disk,
    tiny_model,
    wait_for_blocks,
    wait_until_announced,
)
from rich.console import Console
from rich.table import Table
from tiny_models import prompt

from kvpool.testing.local import LocalCluster

PROMPT_TOKENS = (1990, 2000, 2010)
PULL_WAIT_S = 10.0
"""Longer than an engine waits by default: the demo shows the way, also on a machine that is busy."""
NEW_TOKENS = 32
WARM_SEED = 1000


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
        return self.cold.tokens == self.local.tokens == self.pool.tokens

    @property
    def from_pool(self) -> bool:
        """All whole blocks of the prompt, but for a token that must be computed, from the other node's disk."""
        blocks = (self.prompt_tokens - 1) // BLOCK_TOKENS
        return (
            self.pool.cached_tokens >= blocks * BLOCK_TOKENS
            and min(self.crossed, self.from_disk) >= blocks
        )


def main() -> int:
    end_on_sigterm()
    console = Console()
    try:
        with tempfile.TemporaryDirectory(prefix="kvpool-demo-") as folder:
            rows = run(Path(folder), console)
    except Broken as error:
        console.print(f"[red]demo failed:[/] {error}", highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; nothing is left running")
        return 130
    show(console, rows)
    passed = all(row.tokens_equal and row.from_pool for row in rows)
    report(rows)
    if not passed:
        console.print("[red]tokens differ, or blocks did not come from the other node's disk[/]")
    return 0 if passed else 1


def run(folder: Path, console: Console) -> list[Row]:
    with ExitStack() as stack:
        console.print("starting two nodes with etcd and Redis, and engine 1 on node a ...")
        model = tiny_model()
        cluster = LocalCluster(folder, nodes=2, memory="512MiB", ssd="1GiB")
        a, b = stack.enter_context(cluster).nodes
        prompts = [prompt(seed, tokens) for seed, tokens in enumerate(PROMPT_TOKENS)]
        warm = prompt(WARM_SEED, max(PROMPT_TOKENS))
        with EngineProcess("engine-1", model, folder, kvpool_transfer(a.socket)) as engine:
            engine.wait_ready()
            engine.ask(warm, NEW_TOKENS)
            cold = [engine.measure(each, NEW_TOKENS) for each in prompts]
            local = [engine.measure(each, NEW_TOKENS) for each in prompts]
            wait_for_blocks(
                a.socket, sum(blocks_of(len(each), NEW_TOKENS) for each in [warm, *prompts])
            )
        console.print(
            "engine 1 has ended; restarting the daemon of node a, whose memory goes with it ..."
        )
        a.restart()
        wait_until_announced(a.socket)
        console.print("starting engine 2 on node b, which has seen no prompt ...")
        # On a busy machine, computing so short a prompt may be sooner than bringing it: then it would be computed.
        transfer = kvpool_transfer(b.socket, pull_wait_s=PULL_WAIT_S, prefill_tokens_per_s=1.0)
        with EngineProcess("engine-2", model, folder, transfer) as engine:
            engine.wait_ready()
            engine.ask(prompt(WARM_SEED + 1, max(PROMPT_TOKENS)), NEW_TOKENS)
            pool, crossed, from_disk = [], [], []
            for each in prompts:
                before = counter(b.socket, "pulled_blocks"), read_from_disk(a.socket)
                pool.append(engine.measure(each, NEW_TOKENS))
                crossed.append(counter(b.socket, "pulled_blocks") - before[0])
                from_disk.append(read_from_disk(a.socket) - before[1])
    lengths = [len(each) for each in prompts]
    columns = (lengths, cold, local, pool, crossed, from_disk)
    return [Row(*each) for each in zip(*columns, strict=True)]


def show(console: Console, rows: list[Row]) -> None:
    table = Table(title="Time to first token: cold, own prefix cache, disk of the other node")
    for heading in ("prompt", "engine", "node", "TTFT", "cached", "pulled", "from disk", "tokens"):
        table.add_column(heading, justify="left" if heading in ("engine", "node") else "right")
    for row in rows:
        for name in ("cold", "local", "pool"):
            answer: Answer = getattr(row, name)
            table.add_row(
                f"{row.prompt_tokens}" if name == "cold" else "",
                *RUNS[name],
                f"{answer.ttft_ms:.1f} ms",
                str(answer.cached_tokens),
                f"{row.crossed} blocks" if name == "pool" else "",
                f"{row.from_disk} blocks" if name == "pool" else "",
                "equal" if answer.tokens == row.cold.tokens else "DIFFER",
                end_section=name == "pool",
            )
    console.print(table)


RUNS = {
    "cold": ("1, cold", "a"),
    "local": ("1, own cache", "a"),
    "pool": ("2, pool", "b from a"),
}


def report(rows: list[Row]) -> None:
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
    }
    out.write_text(json.dumps(body, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())

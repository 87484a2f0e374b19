"""One engine prefills and writes into the pool, a fresh one pulls from it and decodes: `make demo`.

Real vLLM on the CPU with a tiny random-weight model. Engine 1 answers each prompt cold and again (its
own prefix cache); engine 2, a fresh process warmed by an unrelated prompt, answers from the pool. Prints
the times to the first token side by side and leaves `.demo/report.json`. Exits 0 only when all tokens
are equal and the blocks came from the pool.
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
    daemon,
    end_on_sigterm,
    kvpool_transfer,
    tiny_model,
    wait_for_blocks,
)
from rich.console import Console
from rich.table import Table
from tiny_models import prompt

PROMPT_TOKENS = (1990, 2000, 2010)
NEW_TOKENS = 32
WARM_SEED = 1000


@dataclass(frozen=True)
class Row:
    """One prompt, three times."""

    prompt_tokens: int
    cold: Answer
    local: Answer
    pool: Answer

    @property
    def tokens_equal(self) -> bool:
        return self.cold.tokens == self.local.tokens == self.pool.tokens

    @property
    def from_pool(self) -> bool:
        """All whole blocks of the prompt, but for a token that must be computed."""
        return self.pool.cached_tokens >= (self.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


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
        console.print("[red]tokens differ, or blocks did not come from the pool[/]")
    return 0 if passed else 1


def run(folder: Path, console: Console) -> list[Row]:
    with ExitStack() as stack:
        console.print("starting the daemon and engine 1 ...")
        model = tiny_model()
        socket_path = stack.enter_context(daemon(folder))
        transfer = kvpool_transfer(socket_path)
        prompts = [prompt(seed, tokens) for seed, tokens in enumerate(PROMPT_TOKENS)]
        warm = prompt(WARM_SEED, max(PROMPT_TOKENS))
        with EngineProcess("engine-1", model, folder, transfer) as engine:
            engine.wait_ready()
            engine.ask(warm, NEW_TOKENS)
            cold = [engine.measure(each, NEW_TOKENS) for each in prompts]
            local = [engine.measure(each, NEW_TOKENS) for each in prompts]
            wait_for_blocks(
                socket_path, sum(blocks_of(len(each), NEW_TOKENS) for each in [warm, *prompts])
            )
        console.print("engine 1 has ended; starting engine 2, which has never seen the prompts ...")
        with EngineProcess("engine-2", model, folder, transfer) as engine:
            engine.wait_ready()
            engine.ask(prompt(WARM_SEED + 1, max(PROMPT_TOKENS)), NEW_TOKENS)
            pool = [engine.measure(each, NEW_TOKENS) for each in prompts]
    lengths = [len(each) for each in prompts]
    return [Row(*each) for each in zip(lengths, cold, local, pool, strict=True)]


def show(console: Console, rows: list[Row]) -> None:
    table = Table(title="Time to first token: cold, own prefix cache, from the pool")
    for heading in ("prompt", "run", "TTFT", "cached tokens", "tokens equal"):
        table.add_column(heading, justify="right" if heading != "run" else "left")
    for row in rows:
        for name in ("cold", "local", "pool"):
            answer: Answer = getattr(row, name)
            table.add_row(
                f"{row.prompt_tokens}" if name == "cold" else "",
                RUNS[name],
                f"{answer.ttft_ms:.1f} ms",
                str(answer.cached_tokens),
                "yes" if answer.tokens == row.cold.tokens else "NO",
                end_section=name == "pool",
            )
    console.print(table)


RUNS = {
    "cold": "engine 1, cold",
    "local": "engine 1, own prefix cache",
    "pool": "engine 2, fresh, from the pool",
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
    }
    out.write_text(json.dumps(body, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())

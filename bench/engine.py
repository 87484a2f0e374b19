"""How long until the first token: computed, from the engine's own cache, from the pool, from the peer?

Real vLLM on the CPU, 2,000-token prompts, engine cores in processes of their own. Four engines live at
once: two with kvpool and two with the peer (vLLM's in-tree MooncakeStoreConnector over its TCP
transport). Of each pair the first computes and saves, the second is fresh (warmed by an unrelated prompt
of that length) and loads each prompt once. The engines take turns, in alternating order; medians.

    .venv/bin/python bench/engine.py [--quick] [--json FILE]

Checks: pool_vs_local_ttft, pool_vs_cold_ttft, pool_vs_peer_ttft. Tokens must be equal in every row.
Exits 1 when a check fails or a row's tokens differ. Where the peer's wheel is missing its check is left
out, and a row says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines import (
    BLOCK_TOKENS,
    PEER_TRANSFER,
    Answer,
    Broken,
    EngineProcess,
    blocks_of,
    daemon,
    end_on_sigterm,
    kvpool_transfer,
    peer_store,
    tiny_model,
    wait_for_blocks,
)
from tiny_models import prompt

PROMPT_TOKENS, NEW_TOKENS = 2000, 8
ROUNDS, ROUNDS_QUICK = 20, 8
PROMPTS_A_TURN = 2
SPIN_S = 1.2
"""A vLLM worker spins for a second after its last step, on the core that the others need too."""

WARM_SEED = 1000
WRITERS = {"cold": "kvpool-writer", "peer_cold": "peer-writer"}
READERS = {"local": "kvpool-writer", "pool": "kvpool-reader", "peer": "peer-reader"}
BOUNDS = {"pool_vs_local_ttft": 1.3, "pool_vs_cold_ttft": 0.2, "pool_vs_peer_ttft": 0.6}


@dataclass
class Measured:
    """Answers by row, in the order of the prompts."""

    answers: dict[str, list[Answer]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def add(self, row: str, answer: Answer) -> None:
        self.answers.setdefault(row, []).append(answer)

    def ttft_ms(self, row: str) -> float:
        return statistics.median(answer.ttft_ms for answer in self.answers[row])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds; ends within 180 s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and checks here")
    arguments = parser.parse_args()
    end_on_sigterm()
    try:
        with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder:
            measured = run(Path(folder), ROUNDS_QUICK if arguments.quick else ROUNDS)
    except Broken as error:
        print(f"bench failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    rows, checks = rows_of(measured), checks_of(measured)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"rows": rows, "checks": checks}, indent=2) + "\n")
    return show(rows, checks)


def run(folder: Path, rounds: int) -> Measured:
    measured = Measured()
    model = tiny_model()
    prompts = [prompt(seed, PROMPT_TOKENS) for seed in range(rounds)]
    with ExitStack() as stack:
        socket_path = stack.enter_context(daemon(folder))
        transfer = kvpool_transfer(socket_path)

        def start(name: str, transfer: dict[str, Any], **environment: Any) -> EngineProcess:
            engine = EngineProcess(name, model, folder, transfer, **environment)
            return stack.enter_context(engine)

        engines = {name: start(name, transfer) for name in ("kvpool-writer", "kvpool-reader")}
        try:
            peer_environment = stack.enter_context(peer_store(folder))
        except Broken as error:
            measured.missing["peer"] = str(error)
        else:
            for name in ("peer-writer", "peer-reader"):
                engines[name] = start(name, PEER_TRANSFER, **peer_environment)
        warm_up(engines)
        take_turns(WRITERS, engines, prompts, measured)
        # Both engines' warm-up prompts are in the pool too.
        wait_for_blocks(socket_path, (rounds + 2) * blocks_of(PROMPT_TOKENS, NEW_TOKENS))
        take_turns(READERS, engines, prompts, measured)
        for engine in engines.values():
            engine.finish()
    return measured


def warm_up(engines: dict[str, EngineProcess]) -> None:
    for engine in engines.values():
        engine.wait_ready()
    for number, engine in enumerate(engines.values()):
        engine.ask(prompt(WARM_SEED + number, PROMPT_TOKENS), NEW_TOKENS)


def take_turns(
    rows: dict[str, str],
    engines: dict[str, EngineProcess],
    prompts: list[list[int]],
    measured: Measured,
) -> None:
    """Each row's engine answers a few prompts, then the next row's the same; who begins changes."""
    turns = [(row, engines[name]) for row, name in rows.items() if name in engines]
    for number, start in enumerate(range(0, len(prompts), PROMPTS_A_TURN)):
        first = number % len(turns)
        for row, engine in turns[first:] + turns[:first]:
            time.sleep(SPIN_S)
            for asked in prompts[start : start + PROMPTS_A_TURN]:
                measured.add(row, engine.measure(asked, NEW_TOKENS))


def rows_of(measured: Measured) -> list[dict[str, Any]]:
    expected = [answer.tokens for answer in measured.answers["cold"]]
    rows: list[dict[str, Any]] = []
    for name, answers in measured.answers.items():
        times = sorted(answer.ttft_ms for answer in answers)
        rows.append(
            {
                "name": name,
                "ttft_ms": round(statistics.median(times), 3),
                "ttft_ms_min": round(times[0], 3),
                "ttft_ms_max": round(times[-1], 3),
                "cached_tokens": statistics.median(answer.cached_tokens for answer in answers),
                "rounds": len(answers),
                "tokens_equal": [answer.tokens for answer in answers] == expected,
            }
        )
    rows += [{"name": name, "left_out": why} for name, why in measured.missing.items()]
    return rows


def checks_of(measured: Measured) -> list[dict[str, Any]]:
    pool = measured.ttft_ms("pool")
    found: dict[str, Callable[[], float]] = {
        "pool_vs_local_ttft": lambda: pool / measured.ttft_ms("local"),
        "pool_vs_cold_ttft": lambda: pool / measured.ttft_ms("cold"),
    }
    if "peer" in measured.answers:
        found["pool_vs_peer_ttft"] = lambda: pool / measured.ttft_ms("peer")
    return [
        {"name": name, "value": round(value(), 4), "at_most": BOUNDS[name]}
        for name, value in found.items()
    ]


def show(rows: list[dict[str, Any]], checks: list[dict[str, Any]]) -> int:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("row", "TTFT median", "min", "max", "cached", "tokens equal")
    for row in rows:
        if "left_out" in row:
            console.print(f"{row['name']} is left out: {row['left_out']}", highlight=False)
            continue
        times = [f"{row[key]:.1f} ms" for key in ("ttft_ms", "ttft_ms_min", "ttft_ms_max")]
        equal = "yes" if row["tokens_equal"] else "NO"
        table.add_row(row["name"], *times, f"{row['cached_tokens']:.0f}", equal)
    console.print(table)
    passed = all(row.get("tokens_equal", True) and hit(row) for row in rows)
    for check in checks:
        good = check["value"] <= check["at_most"]
        passed &= good
        mark = "ok  " if good else "FAIL"
        console.print(f"{mark} {check['name']} {check['value']:.3f} (at most {check['at_most']})")
    return 0 if passed else 1


def hit(row: dict[str, Any]) -> bool:
    """Whether the row's blocks came from where its name says."""
    if row["name"] not in ("local", "pool", "peer") or "left_out" in row:
        return True
    return bool(row["cached_tokens"] >= (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS)


if __name__ == "__main__":
    sys.exit(main())

"""A real vLLM on one GPU, with its defaults there: how long until the first token, and what do saves cost?

    python bench/gpu_engine.py [--quick] [--json FILE]

Run it with an interpreter that has vLLM for CUDA and kvpool; it needs no network. Async scheduling, the
second model runner and CUDA graphs are vLLM's to choose: a row tells what it chose. The model has the sizes
of half an 8B model and random weights, made on the GPU, whose output depends on the KV of the whole prompt.

Three engines share the GPU: a writer and a reader with kvpool, and one without. Prompts are computed by the
writer (`cold`), answered again from its own cache (`local`), and by the reader from the pool (`pool`), in
turns. Then the writer and the engine without kvpool compute batches of new prompts, in turns: what all the
saves beside the forward passes cost. Last, both generate: what it costs to save generated blocks.

`--small` runs the tiny model of the other benches instead, also on a CPU: for the path, not for numbers.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from engines import (
    BLOCK_TOKENS,
    Answer,
    EngineProcess,
    blocks_of,
    counter,
    daemon,
    end_on_sigterm,
    kvpool_transfer,
    wait_for_blocks,
)
from harness import Report, median, parse_arguments
from tiny_models import make, make_half_8b, prompt

BOUNDS = {"gpu_pool_vs_cold_ttft": 0.3, "gpu_saves_vs_none": 1.02, "gpu_generated_vs_none": 1.02}


@dataclass(frozen=True)
class Scale:
    """What is asked of which model. kv_bytes: of each engine; memory: the pool's. parts: of a block, one a KV head."""

    prompt_tokens: tuple[int, ...]
    prompts: int
    batch: int
    batch_tokens: int
    rounds: int
    kv_bytes: int
    memory: str
    parts: int
    generated: int = 256
    answers: int = 8
    max_tokens: int = 20480

    def quick(self) -> Scale:
        return Scale(
            self.prompt_tokens,
            min(self.prompts, 4),
            self.batch,
            self.batch_tokens,
            min(self.rounds, 3),
            self.kv_bytes,
            self.memory,
            self.parts,
            generated=min(self.generated, 128),
            max_tokens=self.max_tokens,
        )


GPU = Scale((1024, 4096, 16384), 8, 8, 8192, 9, 8 << 30, "20GiB", 8)
SMALL = Scale((256, 2048), 2, 4, 512, 3, 128 << 20, "512MiB", 2, 32, max_tokens=4096)


def main() -> int:
    report, arguments = parse_arguments(__doc__, small="the tiny model, on whatever is here")
    end_on_sigterm()
    scale = SMALL if arguments.small else GPU
    if report.quick:
        scale = scale.quick()
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder:
        model = Path(folder) / "model"
        if arguments.small:
            make("llama", model)
        else:
            make_half_8b(model)
        run(report, Path(folder), model, scale)
    return report.finish()


def run(report: Report, folder: Path, model: Path, scale: Scale) -> None:
    with ExitStack() as stack:
        socket_path = stack.enter_context(daemon(folder, scale.memory))
        start = partial(
            EngineProcess,
            model=model,
            folder=folder,
            kv_bytes=scale.kv_bytes,
            step_tokens=8192,
            engine={
                "enforce_eager": False,
                "max_model_len": scale.max_tokens,
                "gpu_memory_utilization": 0.25,  # asked for at the start, whatever `kv_cache_memory_bytes` says
                # Fewer graphs than by default: they take most of the start.
                "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]},
            },
            python=Path(sys.executable),
        )
        transfer = kvpool_transfer(socket_path)
        engines = {}
        for name, given in (("writer", transfer), ("reader", transfer), ("alone", None)):
            engines[name] = stack.enter_context(start(name, transfer=given))
        for name, engine in engines.items():
            report.row(f"engine {name}", **engine.wait_ready())
        writer, reader, alone = engines.values()
        for number, engine in enumerate(engines.values()):
            for tokens in scale.prompt_tokens:
                engine.ask(prompt(1000 + number, tokens), 8)
        first_tokens(report, socket_path, writer, reader, scale)
        beside_saves(report, writer, alone, scale)
        for engine in engines.values():
            engine.finish()


def first_tokens(
    report: Report, socket_path: str, writer: EngineProcess, reader: EngineProcess, scale: Scale
) -> None:
    """The time to the first token: computed, from the engine's own cache, from the pool."""
    failed, ttft = 0, dict[str, float]()
    for tokens in scale.prompt_tokens:
        answers: dict[str, list[Answer]] = {"cold": [], "local": [], "pool": []}
        for number in range(scale.prompts):
            asked = prompt(tokens + number, tokens)
            before = counter(socket_path, "committed") // scale.parts
            answers["cold"].append(writer.measure(asked, 8))
            wait_for_blocks(socket_path, before + blocks_of(tokens, 8), scale.parts)
            turns = [("local", writer), ("pool", reader)]
            for name, engine in turns if number % 2 else turns[::-1]:
                answers[name].append(engine.measure(asked, 8))
        ttft = {name: median([one.ttft_ms for one in all_]) for name, all_ in answers.items()}
        cached = {
            name: statistics.median(one.cached_tokens for one in all_)
            for name, all_ in answers.items()
        }
        report.row(
            f"ttft {tokens} tokens",
            **{f"{name}_ms": round(ms, 2) for name, ms in ttft.items()},
            longest_pool_ms=round(max(one.ttft_ms for one in answers["pool"]), 2),
            local_cached=cached["local"],
            pool_cached=cached["pool"],
        )
        whole = (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        # How many tokens are left to compute after a hit decides with what kernels that is done, and so which way near
        # ties fall: what is loaded is right if either the writer's cold or its cached answer is the same.
        wrong = sum(
            pool.tokens not in (cold.tokens, local.tokens)
            for cold, local, pool in zip(*answers.values(), strict=True)
        )
        missed = sum(one.cached_tokens < whole for one in answers["pool"])
        report.row(f"tokens of {tokens}", wrong=wrong, missed=missed)
        failed += wrong + missed
    # Of the longest prompts.
    report.check(
        "gpu_pool_vs_cold_ttft",
        ttft["pool"] / ttft["cold"],
        at_most=BOUNDS["gpu_pool_vs_cold_ttft"],
    )
    report.check("gpu_wrong_or_missed", failed, at_most=0)


def beside_saves(report: Report, writer: EngineProcess, alone: EngineProcess, scale: Scale) -> None:
    """The same new prompts at the engine that saves them and at the one without kvpool, in turns."""
    for check, tokens, max_tokens, count in (
        ("gpu_saves_vs_none", scale.batch_tokens, 1, scale.batch),
        ("gpu_generated_vs_none", 2 * BLOCK_TOKENS, scale.generated, scale.answers),
    ):
        times: dict[str, list[float]] = {"writer": [], "alone": []}
        for round_ in range(scale.rounds + 1):
            first = 10_000 + 100 * round_ + max_tokens
            asked: Sequence[list[int]] = [prompt(first + one, tokens) for one in range(count)]
            turns: list[tuple[str, Any]] = [("writer", writer), ("alone", alone)]
            for name, engine in turns if round_ % 2 else turns[::-1]:
                took = engine.ask_all(asked, max_tokens)
                if round_:  # the first one warms up
                    times[name].append(took)
        ratio = median(times["writer"]) / median(times["alone"])
        report.row(
            f"{count} x {tokens} + {max_tokens}",
            saving_ms=round(median(times["writer"]), 2),
            without_ms=round(median(times["alone"]), 2),
            longest_saving_ms=round(max(times["writer"]), 2),
            ratio=round(ratio, 4),
        )
        report.check(check, ratio, at_most=BOUNDS[check])


if __name__ == "__main__":
    sys.exit(main())

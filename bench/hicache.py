"""How long until SGLang's first token: computed, from its own caches, from the pool, from its other storage backends?

Real SGLang on the CPU, 4,000-token prompts, HiCache with storage. For each backend (kvpool, SGLang's `file` and
`mooncake`, over TCP) one engine computes and saves, and ends; then a fresh one (warmed by an unrelated prompt of that
length) loads each prompt once. The engines of all backends take turns, in alternating order; medians. Own caches are
those of kvpool's fresh engine: the device's right after a load, the host's once others have driven it from there.

    .venv/bin/python bench/hicache.py [--quick] [--json FILE]

Checks: sglang_pool_vs_local_ttft (of the host cache), sglang_pool_vs_file_ttft. Tokens must be equal in every row, and
come from where it says. Where the peer's wheel is missing its row says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines import (
    ANSWER_S,
    ROOT,
    START_S,
    Broken,
    Child,
    counter,
    daemon,
    end_on_sigterm,
    peer_store,
    tiny_model,
)
from harness import Report, median, parse_arguments
from tiny_models import prompt

PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
PAGE = 64
PROMPT_TOKENS, NEW_TOKENS, WAKE_TOKENS = 4000, 8, 16
ROUNDS, ROUNDS_QUICK = 20, 8
DEVICE_TOKENS = 2 * PROMPT_TOKENS + 1000
"""Two prompts: the third drives the first from the device into host memory."""
HOST_RATIO = 10
STORED_S = 60.0
WARM_SEED = 1000
PAGES = PROMPT_TOKENS // PAGE
HIT = (PROMPT_TOKENS - 1) // PAGE * PAGE
OBJECTS = {"kvpool": 1, "file": 1, "mooncake": 2}
"""Of a page."""


@dataclass
class Answer:
    ttft_ms: float
    cached_tokens: int
    sources: dict[str, Any]
    tokens: list[int]


@dataclass
class Backend:
    """How engines are given a backend, and how many objects it holds."""

    options: dict[str, Any]
    environment: dict[str, str]
    count: Callable[[], int]


class Engine:
    def __init__(self, name: str, folder: Path, model: Path, backend: Backend) -> None:
        arguments = {
            "model_path": str(model),
            "device": "cpu",
            "dtype": "float32",
            "random_seed": 0,
            "skip_tokenizer_init": True,
            "attention_backend": "torch_native",
            "disable_overlap_schedule": True,
            "disable_cuda_graph": True,
            "max_total_tokens": DEVICE_TOKENS,
            "max_running_requests": 2,
            "page_size": PAGE,
            "log_level": "warning",
            "enable_hierarchical_cache": True,
            "hicache_ratio": float(HOST_RATIO),
            "hicache_io_backend": "direct",
            "hicache_mem_layout": "page_first_direct",
            "hicache_write_policy": "write_through",
            "hicache_storage_prefetch_policy": "wait_complete",
        }
        environment = {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(ROOT / "tests/support/sglang_cpu"),
            "PYTHONDONTWRITEBYTECODE": "",
            **backend.environment,
        }
        command = [
            *(str(PYTHON), "-P", str(ROOT / "bench/hicache_process.py")),
            json.dumps(arguments | backend.options),
        ]
        self.child = Child(name, command, folder, **environment)

    def wait_ready(self) -> None:
        self.child.line(START_S)

    def ask(self, tokens: list[int], max_tokens: int = NEW_TOKENS) -> Answer:
        self.child.tell(json.dumps({"prompt": tokens, "max_tokens": max_tokens}))
        return Answer(**json.loads(self.child.line(ANSWER_S)))

    def measure(self, tokens: list[int]) -> Answer:
        """`ask`, awake: right after a prompt too short for any cache."""
        self.ask(tokens[-WAKE_TOKENS:], 2)
        return self.ask(tokens)


@dataclass
class Measured:
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def add(self, row: str, answer: Answer) -> None:
        self.answers.setdefault(row, []).append(answer)

    def ttft_ms(self, row: str) -> float:
        return median(answer.ttft_ms for answer in self.answers[row])


def main() -> int:
    report, _ = parse_arguments(__doc__ or "")
    end_on_sigterm()
    try:
        with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder:
            measured = run(Path(folder), ROUNDS_QUICK if report.quick else ROUNDS)
    except Broken as error:
        print(f"bench failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    right = rows(report, measured)
    pool = measured.ttft_ms("pool")
    report.check("sglang_pool_vs_local_ttft", pool / measured.ttft_ms("host"), at_most=1.3)
    report.check("sglang_pool_vs_file_ttft", pool / measured.ttft_ms("file"), at_most=0.8)
    return report.finish() or (0 if right else 1)


def run(folder: Path, rounds: int) -> Measured:
    measured = Measured()
    model = tiny_model(python=PYTHON)
    prompts = [prompt(seed, PROMPT_TOKENS) for seed in range(rounds)]
    with ExitStack() as stack:
        backends = {
            "kvpool": stack.enter_context(kvpool(folder)),
            "file": stack.enter_context(files(folder)),
        }
        try:
            backends["mooncake"] = stack.enter_context(mooncake(folder))
        except Broken as error:
            measured.missing["mooncake"] = str(error)
        with engines(folder, model, backends, "writer") as writers:
            for number, asked in enumerate(prompts):
                for name in turns(list(writers), number):
                    answer = writers[name].measure(asked)
                    if name == "kvpool":
                        measured.add("cold", answer)
            for name, backend in backends.items():
                wait_for(backend, rounds * PAGES * OBJECTS[name])
        with engines(folder, model, backends, "reader") as readers:
            for number, asked in enumerate(prompts):
                for name in turns(list(readers), number):
                    measured.add("pool" if name == "kvpool" else name, readers[name].measure(asked))
                measured.add("device", readers["kvpool"].measure(asked))
            for asked in prompts:
                measured.add("host", readers["kvpool"].measure(asked))
    return measured


def turns(names: list[str], number: int) -> list[str]:
    first = number % len(names)
    return names[first:] + names[:first]


@contextmanager
def engines(
    folder: Path, model: Path, backends: dict[str, Backend], role: str
) -> Iterator[dict[str, Engine]]:
    """One for each backend, warm. They start side by side."""
    started: dict[str, Engine] = {}
    try:
        for name, backend in backends.items():
            started[name] = Engine(f"{name}-{role}", folder, model, backend)
        for engine in started.values():
            engine.wait_ready()
        for number, engine in enumerate(started.values()):
            seed = WARM_SEED + number + (100 if role == "reader" else 0)
            engine.ask(prompt(seed, PROMPT_TOKENS))
        yield started
    finally:
        for engine in started.values():
            engine.child.end_input()
        for engine in started.values():
            engine.child.stop()


@contextmanager
def kvpool(folder: Path) -> Iterator[Backend]:
    config = {
        "backend_name": "kvpool",
        "module_path": "kvpool.engine_plugins.sglang",
        "class_name": "KvpoolHiCache",
        "interface_v1": 1,
        "prefetch_threshold": PAGE,
    }
    with daemon(folder, "1GiB") as socket:
        options = {
            "hicache_storage_backend": "dynamic",
            "hicache_storage_backend_extra_config": json.dumps(config | {"socket": socket}),
        }
        yield Backend(options, {}, lambda: counter(socket, "committed"))


@contextmanager
def files(folder: Path) -> Iterator[Backend]:
    place = folder / "files"
    place.mkdir()
    options = {
        "hicache_storage_backend": "file",
        "hicache_storage_backend_extra_config": json.dumps({"prefetch_threshold": PAGE}),
    }
    environment = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(place)}
    yield Backend(options, environment, lambda: len(list(place.glob("*.bin"))))


@contextmanager
def mooncake(folder: Path) -> Iterator[Backend]:
    options = {
        "hicache_storage_backend": "mooncake",
        "hicache_storage_backend_extra_config": json.dumps({"prefetch_threshold": PAGE}),
    }
    with peer_store(folder, 1 << 30, python=PYTHON) as environment:
        port = environment["MOONCAKE_MASTER_METRICS_PORT"]

        def keys() -> int:
            url = f"http://127.0.0.1:{port}/metrics"
            with contextlib.closing(urllib.request.urlopen(url, timeout=ANSWER_S)) as response:
                found = re.search(
                    rb"^master_key_count(?:\{\})? (\d+)", response.read(), re.MULTILINE
                )
            return int(found[1]) if found else 0

        yield Backend(options, environment, keys)


def wait_for(backend: Backend, objects: int) -> None:
    deadline = time.monotonic() + STORED_S
    while (held := backend.count()) < objects:
        if time.monotonic() > deadline:
            raise Broken(f"{held} of {objects} objects are stored after {STORED_S:g} s")
        time.sleep(0.05)


def rows(report: Report, measured: Measured) -> bool:
    """Print them. Whether all answers are right, and come from where they should."""
    expected = [answer.tokens for answer in measured.answers["cold"]]
    wanted = {"cold": None, "device": "device", "host": "host"}
    right = True
    for name, answers in measured.answers.items():
        times = sorted(answer.ttft_ms for answer in answers)
        source = wanted.get(name, "storage")
        equal = [answer.tokens for answer in answers] == expected
        from_there = source is None or all(
            answer.sources.get(source, 0) >= HIT for answer in answers
        )
        report.row(
            name,
            ttft_ms=median(times),
            ttft_ms_min=times[0],
            ttft_ms_max=times[-1],
            cached_tokens=median(answer.cached_tokens for answer in answers),
            rounds=len(answers),
            tokens_equal=equal,
            from_there=from_there,
        )
        right &= equal and from_there
    for name, why in measured.missing.items():
        report.row(name, left_out=why)
    return right


if __name__ == "__main__":
    os.environ.pop("SGLANG_USE_CPU_ENGINE", None)
    sys.exit(main())

"""LMCache's own bench of L2 adapters over kvpool, beside the adapters that LMCache has: files and Redis.

    .venv/bin/python bench/lmcache_l2.py [--quick] [--json FILE] [--only SIZE]

Each measurement is a process of `lmcache bench l2`, in .venv-lmcache (`make lmcache-venv`), which also compares what
it loads with what it stored. kvpool: one daemon. fs: files in memory (/dev/shm), so that no disk is measured; fs_native:
the same by its threads in C++. redis: one server on this machine, through LMCache's client in C++. By turns, in other
orders; times are medians of a round's, then of the turns. Its Mooncake adapter is not in the wheel.

memcpy: as many bytes from one buffer into another, object by object, in this process: the limit of a load.

Checks: load_SIZE_vs_fs, store_SIZE_vs_fs: against the better one of the two for files.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from harness import REPO, daemon, in_turns, median, parse_arguments

sys.path.insert(0, str(REPO))
from tests.support.servers.redis import Redis

PYTHON = REPO / ".venv-lmcache" / "bin" / "python"
KIB, MIB = 1 << 10, 1 << 20
SIZES = {"64k": (64 * KIB, 64), "1m": (MIB, 32), "8m": (8 * MIB, 16)}
QUICK = ("64k", "1m")
ROUNDS, ROUNDS_QUICK = 20, 8
TURNS, TURNS_QUICK = 4, 2
MEMORY = "3GiB"
TIMEOUT_S = 300.0
COPIED_BYTES = 256 << 20
LOAD_VS_FS, STORE_VS_FS = 1.5, 2.0
OPERATIONS = ("store", "lookup", "load")


def measure(adapter: dict[str, Any], size: int, count: int, rounds: int) -> dict[str, float]:
    """Milliseconds of a round of each operation. Ends the bench if anything was not stored, found and right."""
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder:
        out = Path(folder) / "out.json"
        done = subprocess.run(
            [
                *(str(PYTHON), "-m", "lmcache.cli.main", "bench", "l2", "--no-skip-verify"),
                *("--l2-adapter", json.dumps(adapter), "--num-keys", str(count)),
                *("--data-size-kb", str(size // KIB), "--rounds", str(rounds)),
                *("--lookup-max-hit-rate", "1.0", "--format", "json", "--output", str(out)),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1", "LMCACHE_TRACK_USAGE": "false"},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            raise SystemExit(
                f"lmcache bench l2 over {adapter['type']}:\n{done.stdout}{done.stderr}"
            )
        found = json.loads(out.read_text())["metrics"].values()
    times = {}
    for one in found:
        if "operation" in one:
            missed = one["total_keys"] - one["total_success"]
            if missed:
                raise SystemExit(f"{adapter['type']}: {missed} keys missed by {one['operation']}")
            times[one["operation"].lower()] = float(one["duration_p50_ms"])
    return times


def copies(size: int, count: int) -> float:
    """Milliseconds for copying so many objects, out of more memory than caches hold."""
    several = max(1, COPIED_BYTES // (size * count))
    source = np.ones((several, count, size), np.uint8)
    target = np.zeros((several, count, size), np.uint8)
    turns = itertools.cycle(range(several))

    def copy() -> None:
        at = next(turns)
        for index in range(count):
            np.copyto(target[at, index], source[at, index])

    return 1000 * median(in_turns(20, copy, warmup=several)[0])


def adapters(stack: ExitStack, folder: Path) -> dict[str, dict[str, Any]]:
    """What LMCache is told of each."""
    serving = stack.enter_context(daemon(folder, "bench", MEMORY))
    redis = stack.enter_context(Redis(folder / "redis", options=("maxmemory 3gb", 'save ""')))
    files = Path(tempfile.mkdtemp(prefix="kvpool-bench-", dir="/dev/shm"))
    stack.callback(shutil.rmtree, files)
    return {
        "kvpool": {
            "type": "plugin",
            "module_path": "kvpool.engine_plugins.lmcache",
            "class_name": "KvpoolL2Adapter",
            "adapter_params": {"socket": serving.socket},
        },
        "fs": {"type": "fs", "base_path": str(files / "fs")},
        "fs_native": {"type": "fs_native", "base_path": str(files / "native")},
        "redis": {"type": "resp", "host": "127.0.0.1", "port": redis.port},
    }


def main() -> int:
    report, arguments = parse_arguments(str(__doc__))
    if not PYTHON.exists():
        raise SystemExit("there is no .venv-lmcache: run `make lmcache-venv`")
    rounds = ROUNDS_QUICK if report.quick else ROUNDS
    turns = TURNS_QUICK if report.quick else TURNS
    for name, (size, count) in SIZES.items():
        if arguments.only not in name or (report.quick and name not in QUICK):
            continue
        print(f"{name} x {count}")
        taken: dict[str, list[dict[str, float]]] = {}
        for turn in range(turns):
            # Fresh ones each time: the bench has the same keys in all its runs, and what is stored is not stored again.
            with ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-")))
                told = list(adapters(stack, folder).items())
                for label, adapter in told if turn % 2 == 0 else reversed(told):
                    taken.setdefault(label, []).append(measure(adapter, size, count, rounds))
        ms = {
            label: {one: median([each[one] for each in found]) for one in OPERATIONS}
            for label, found in taken.items()
        }
        limit = copies(size, count)
        total = size * count / 1e6
        report.row(f"{name} memcpy", load_mb_s=total / limit * 1000, load_ms=limit)
        for label, one in ms.items():
            report.row(
                f"{name} {label}",
                store_mb_s=total / one["store"] * 1000,
                load_mb_s=total / one["load"] * 1000,
                lookup_ms=one["lookup"],
                load_of_memcpy=limit / one["load"],
            )
        best = {one: min(ms["fs"][one], ms["fs_native"][one]) for one in OPERATIONS}
        report.check(f"load_{name}_vs_fs", best["load"] / ms["kvpool"]["load"], at_least=LOAD_VS_FS)
        report.check(
            f"store_{name}_vs_fs", best["store"] / ms["kvpool"]["store"], at_least=STORE_VS_FS
        )
    return report.finish()


if __name__ == "__main__":
    raise SystemExit(main())

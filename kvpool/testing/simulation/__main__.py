"""Replay one seed with all its events, or try many: `python -m kvpool.testing.simulation SEED [END]`."""

from __future__ import annotations

import sys
import time
from collections import Counter

from kvpool.testing.simulation.world import run_seed


def main(arguments: list[str]) -> int:
    if not 1 <= len(arguments) <= 2 or not all(a.isdigit() for a in arguments):
        print(__doc__)
        return 2
    first = int(arguments[0])
    if len(arguments) == 1:
        result = run_seed(first, tell=print)
        print(result)
        for name, count in sorted(result.counts.items()):
            print(f"{count:8} {name}")
        return bool(result.failure)
    failed = 0
    total: Counter[str] = Counter()
    started = time.perf_counter()
    for seed in range(first, int(arguments[1])):
        result = run_seed(seed)
        total.update(result.counts)
        if result.failure:
            failed += 1
            print(f"{seed}: {result.failure}")
    seconds = time.perf_counter() - started
    for name, count in sorted(total.items()):
        print(f"{count:8} {name}")
    print(f"{failed} seeds failed; {seconds / max(1, int(arguments[1]) - first) * 1e3:.1f} ms a seed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

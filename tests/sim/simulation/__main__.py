"""Replay one seed with all its events, or try many: `python -m tests.sim.simulation SEED [END]`."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping

from tests.sim.simulation.world import run_seed


def main(arguments: list[str]) -> int:
    if not 1 <= len(arguments) <= 2 or not all(argument.isdigit() for argument in arguments):
        _say(__doc__ or "")
        return 2
    if len(arguments) == 1:
        result = run_seed(int(arguments[0]), tell=_say)
        _say(str(result))
        _tell_counts(result.counts)
        return bool(result.failure)
    return _many(range(int(arguments[0]), int(arguments[1])))


def _many(seeds: range) -> int:
    failed = 0
    counts: Counter[str] = Counter()
    started = time.process_time()
    for seed in seeds:
        result = run_seed(seed)
        counts.update(result.counts)
        if result.failure:
            failed += 1
            _say(f"{seed}: {result.failure}")
    _tell_counts(counts)
    each_ms = (time.process_time() - started) / max(1, len(seeds)) * 1e3
    _say(f"{failed} of {len(seeds)} seeds failed; {each_ms:.1f} ms of CPU a seed")
    return bool(failed)


def _tell_counts(counts: Mapping[str, int]) -> None:
    for name, count in sorted(counts.items()):
        _say(f"{count:8} {name}")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

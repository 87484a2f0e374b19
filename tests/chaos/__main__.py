"""`make chaos`: run seeds, check their histories, and say what violates a rule."""

from __future__ import annotations

import argparse
import json
import secrets
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from tests import preloaded
from tests.chaos import checker, plan
from tests.chaos.history import Record, read
from tests.chaos.run import Size, run

SHOWN_MAX = 40


def main(arguments: list[str]) -> int:
    """0: all rules hold; 1: one is violated."""
    usual = Size()
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 31))
    parser.add_argument("--seconds", type=float, default=usual.seconds)
    parser.add_argument("--nodes", type=int, default=usual.nodes)
    parser.add_argument("--processes", type=int, default=usual.processes, help="of clients, a node")
    parser.add_argument("--threads", type=int, default=usual.threads, help="clients in each")
    parser.add_argument(
        "--kinds", default=",".join(plan.BY_NAME), help="of faults that may happen, by name"
    )
    parser.add_argument("--json", type=Path, help="write what was found here too")
    parser.add_argument(
        "--keep", type=Path, help="keep history and logs here; else only of a failure"
    )
    parser.add_argument("--check", type=Path, help="check the history in this folder; run nothing")
    given = parser.parse_args(arguments)
    if given.check:
        return _judge(read(given.check.glob("*.jsonl")), given.json, {})
    size = Size(given.seconds, given.nodes, given.processes, given.threads)
    names = [name for name in given.kinds.split(",") if name]
    if unknown := set(names) - set(plan.BY_NAME):
        parser.error(f"there is no fault {', '.join(sorted(unknown))}")
    kinds = [plan.BY_NAME[name] for name in names]
    settings = {"seed": given.seed, **asdict(size)}
    _say(" ".join(f"{name} {value}" for name, value in settings.items()))
    folder = Path(tempfile.mkdtemp(prefix="kvpool-chaos-"))
    kept = True
    try:
        failed = _judge(run(folder, given.seed, size, _say, kinds), given.json, settings)
        kept = bool(failed) or given.keep is not None
    finally:
        if kept:
            found = given.keep or Path(tempfile.mkdtemp(prefix="kvpool-chaos-kept-"))
            _keep(folder, found)
            _say(f"history and logs: {found}; again: --seed {given.seed}")
        shutil.rmtree(folder)
    return failed


def _judge(records: list[Record], json_path: Path | None, settings: dict[str, float]) -> int:
    violations = checker.check(records)
    begun = records[0].at if records else 0.0
    found = {
        "settings": settings,
        "summary": checker.summary(records),
        "violations": [
            asdict(violation) | {"at": violation.at - begun} for violation in violations
        ],
    }
    if json_path is not None:
        json_path.write_text(json.dumps(found, indent=2) + "\n")
    for name, counts in checker.summary(records).items():
        _say(f"{name}: " + ", ".join(f"{what} {count}" for what, count in counts.items()))
    for violation in violations[:SHOWN_MAX]:
        _say(f"{violation.at - begun:7.2f} s  {violation.rule}: {violation.what}")
    _say(f"{len(violations)} violations")
    return int(bool(violations))


def _keep(folder: Path, kept: Path) -> None:
    kept.mkdir(parents=True, exist_ok=True)
    for path in [*folder.glob("*.jsonl"), *folder.glob("*.log")]:
        shutil.copy(path, kept)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    preloaded.install()
    sys.exit(main(sys.argv[1:]))

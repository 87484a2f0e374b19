"""What the benches share: how they are called, what they write, how they time.

Every number is measured beside its limit or its peer, in the same run, in turns, warm; quoted are
medians, and ratios of medians. `--quick` takes fewer rounds, never another method.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
START_S = 120.0
END_S = 60.0
SECRET = "a secret for these benches only"


@dataclass
class Report:
    """Rows (anything worth reading) and checks (a value and its bound), printed and written as JSON."""

    quick: bool
    json_path: str | None
    rows: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)

    def row(self, name: str, **values: Any) -> None:
        shown = "  ".join(f"{key}={_short(value)}" for key, value in values.items())
        print(f"  {name:<28} {shown}", flush=True)
        self.rows.append({"name": name, **values})

    def check(
        self,
        name: str,
        value: float,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> None:
        bound = {"at_least": at_least} if at_least is not None else {"at_most": at_most}
        self.checks.append({"name": name, "value": value, **bound})

    def not_run(
        self,
        name: str,
        why: str,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> None:
        """A check without a value: what it compares with is not here. Never quietly left out."""
        bound = {"at_least": at_least} if at_least is not None else {"at_most": at_most}
        self.checks.append({"name": name, "value": None, **bound, "not_run": why})

    def finish(self) -> int:
        """Print the checks, write the file; the exit status: 0, since a missed bound is a finding."""
        print("\nchecks")
        for check in self.checks:
            low, high = check.get("at_least"), check.get("at_most")
            bound = f">= {low}" if low is not None else f"<= {high}"
            if check["value"] is None:
                print(f"  NOT RUN {check['name']:<21} {bound}: {check['not_run']}")
                continue
            met = check["value"] >= low if low is not None else check["value"] <= high
            print(
                f"  {'ok  ' if met else 'MISS'} {check['name']:<24} {check['value']:.4g}  {bound}"
            )
        if self.json_path:
            document = {"rows": self.rows, "checks": self.checks}
            path = Path(self.json_path)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(document, indent=2) + "\n")
        return 0


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def parse_arguments(description: str, **switches: str) -> tuple[Report, argparse.Namespace]:
    """switches: more flags of this bench, and what each is for."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer rounds; ends within a minute")
    parser.add_argument("--json", metavar="FILE", help="write rows and checks here")
    parser.add_argument("--only", default="", help="run only the parts with this in their name")
    for name, help_ in switches.items():
        parser.add_argument(f"--{name}", action="store_true", help=help_)
    arguments = parser.parse_args()
    return Report(arguments.quick, arguments.json), arguments


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def in_turns(rounds: int, *works: Callable[[], Any], warmup: int = 3) -> list[list[float]]:
    """Seconds of each work in each round; every other round in reverse order."""
    times: list[list[float]] = [[] for _ in works]
    for number in range(warmup + rounds):
        order = range(len(works)) if number % 2 == 0 else range(len(works) - 1, -1, -1)
        for index in order:
            taken = seconds(works[index])
            if number >= warmup:
                times[index].append(taken)
    return times


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


median = statistics.median


@dataclass
class Daemon:
    """A `kvpool serve` of this checkout."""

    socket: str
    process: subprocess.Popen[str]
    url: str

    @property
    def pids(self) -> list[int]:
        """The control process and its transfer workers."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [pid, *map(int, children)]


def run_module(stack: contextlib.ExitStack, module: str, *arguments: str) -> str:
    """Start a module; its first line. It ends with the bench."""
    return started(stack, module, *arguments)[0]


def started(stack: contextlib.ExitStack, module: str, *arguments: str) -> tuple[str, int]:
    """The same, and the number of its process."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True, cwd=REPO
    )
    stack.callback(_end, process)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"{module} did not start")
    return line, process.pid


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def daemon(
    folder: Path,
    name: str,
    memory: str,
    *flags: str,
    variables: Mapping[str, str] | None = None,
) -> Iterator[Daemon]:
    """Start one, wait until it is ready, stop it in the end.

    variables: of the environment, besides this process's.
    """
    socket_path = str(folder / f"{name}.sock")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVPOOL_")}
    environment |= {"KVPOOL_CLUSTER_SECRET": SECRET, **(variables or {})}
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "kvpool.cli", "serve"),
            *("--socket", socket_path, "--memory", memory, "--node", name),
            *flags,
        ],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPO,
        env=environment,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if "ready" not in line:
            raise SystemExit(f"the daemon {name} did not start: {line.strip() or process.wait()}")
        url = line.rsplit("peers at ", 1)[1].strip() if "peers at " in line else ""
        yield Daemon(socket_path, process, url)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()

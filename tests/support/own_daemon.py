"""A daemon for tests of engines, whose environments have no more of the tests' packages than they need."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvpool.client import OperatorClient
from kvpool.telemetry.memory_stats import Counters

ANSWER_S = 30.0  # engines that start beside it may take all cores for seconds


@dataclass
class Daemon:
    """A `kvpool serve` process of its own."""

    socket: str
    process: subprocess.Popen[str]
    client: OperatorClient

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def counters(self) -> Counters:
        return self.client.stats().counters

    def leases(self) -> int:
        return int(self.client.stats().leases)


@contextmanager
def run_daemon(
    folder: Path, memory: str = "128MiB", socket: str | None = None, more: Sequence[str] = ()
) -> Iterator[Daemon]:
    """more: arguments of `kvpool serve`."""
    path = socket or str(folder / "s")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "kvpool.cli", "serve", "--socket", path),
            *("--memory", memory, "--data-dir", str(folder / "data"), *more),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert "ready" in process.stdout.readline()
        with OperatorClient(path, timeout_s=ANSWER_S, connect=True) as client:
            yield Daemon(path, process, client)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()

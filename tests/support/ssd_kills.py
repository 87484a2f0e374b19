"""An SSD store whose process is killed again and again, and what it said held against what is there."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from kvpool.storage.ssd.store import SsdStore
from tests.support.ssd_load import Findings, inspect

VERSIONS_A_ROUND = 1_000_000
BATCHES_MAX = 100_000  # far more than a round lets it do


class KilledStore:
    """One directory, used by one load process after the other. Not thread-safe."""

    def __init__(
        self,
        folder: Path,
        size: int,
        nbytes: int,
        seed: int,
        *,
        threads: int = 3,
        packed: bool = False,
    ) -> None:
        self._folder = folder
        self._size = size
        self._nbytes = nbytes
        self._threads = threads
        self._packed = packed
        self._dice = random.Random(seed)
        self._durable: dict[int, int] = {}
        self._rounds = 0
        self.acknowledged = 0

    def round(self, lines_max: int) -> Findings:
        """Start a load, kill it after a random number of lines up to `lines_max`, and look."""
        self._rounds += 1
        numbers = [
            *(self._size, self._nbytes, self._rounds * VERSIONS_A_ROUND),
            *(BATCHES_MAX, self._threads, int(self._packed)),
        ]
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.support.ssd_load"),
                *(str(self._folder), *map(str, numbers)),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        with process, process.stdout:
            try:
                for _ in range(self._dice.randint(1, lines_max)):
                    self._hear(process.stdout.readline())
            finally:
                process.kill()
            self._hear_all(process.stdout)
        store = SsdStore.open(self._folder, self._size, threads=2)
        try:
            found = inspect(store, self._nbytes, self._durable)
            assert not store.stats().index_lost, "a kill has damaged the index"
        finally:
            store.close()
        self._durable = dict(found.held)
        return found

    def _hear_all(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._hear(line)

    def _hear(self, line: str) -> None:
        assert line, "the load ended by itself"
        self.acknowledged += line.startswith("A")
        hear(line, self._durable)


def hear(line: str, durable: dict[int, int]) -> None:
    """What a line of the load says must be there from now on, or need not any more."""
    match line.split():
        case ["F", offset]:
            durable.pop(int(offset), None)
        case ["A", offset, version]:
            durable[int(offset)] = int(version)
        case _:
            raise AssertionError(f"the load said {line!r}")

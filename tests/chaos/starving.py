"""How long processes were ready to run and had no core, by the kernel's count and by a thread that wakes up late."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

PERIOD_S = 0.02
TOLD_S = 0.25
"""A sample is written so often."""


def thread_s() -> float:
    """Of the calling thread, since it began."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def tasks_s(pid: int) -> dict[int, float]:
    """Of each thread of a process, since it began; empty once the process has ended."""
    found: dict[int, float] = {}
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except FileNotFoundError:
        return found
    for task in tasks:
        try:
            found[int(task.name)] = int((task / "schedstat").read_text().split()[1]) / 1e9
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread has ended meanwhile
    return found


class Lateness:
    """A thread of this process that sleeps and adds up how late it wakes up: for want of a core, or of Python's lock.

        with Lateness(tell):  # tell(seconds since the beginning), now and then

    Time for which the process is stopped is lateness too.
    """

    def __init__(self, tell: Callable[[float], None]) -> None:
        self._tell = tell
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos-lateness")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        total_s = told_at = 0.0
        while True:
            asleep = time.monotonic()
            over = self._over.wait(PERIOD_S)
            now = time.monotonic()
            total_s += max(0.0, now - asleep - PERIOD_S)
            if over or now - told_at >= TOLD_S:
                self._tell(total_s)
                told_at = now
            if over:
                return

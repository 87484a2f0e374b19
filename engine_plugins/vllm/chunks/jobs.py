"""Jobs on a few threads, for a caller that never waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Jobs(Generic[Result]):
    """For one thread, which submits jobs and collects their results.

    most: how many jobs wait or run at a time.
    """

    def __init__(self, threads: int, most: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(threads, name)
        self._most = most
        self._running: dict[int, Future[tuple[Result, float]]] = {}

    def submit(self, job: int, work: Callable[[], Result]) -> bool:
        """Begin a job once a thread is free; False: too many wait, and it is none."""
        if len(self._running) >= self._most:
            return False
        self._running[job] = self._threads.submit(_timed, work)
        return True

    def finished(self) -> list[tuple[int, Result | None, float]]:
        """Jobs that have ended since the last call, their results and seconds. None: it was given up before it began."""
        ended = [(job, future) for job, future in self._running.items() if future.done()]
        found: list[tuple[int, Result | None, float]] = []
        for job, future in ended:
            del self._running[job]
            found.append((job, None, 0.0) if future.cancelled() else (job, *future.result()))
        return found

    def drain(self) -> None:
        """Give up jobs that have not begun, and wait for the others."""
        for future in self._running.values():
            future.cancel()
        wait(self._running.values())

    def close(self) -> None:
        """The same, and nothing can be submitted any more."""
        self._threads.shutdown(wait=True, cancel_futures=True)


def _timed(work: Callable[[], Result]) -> tuple[Result, float]:
    begun = time.monotonic()
    result = work()
    return result, time.monotonic() - begun

"""A few threads that are reused. (`concurrent.futures` costs a transfer worker 3 MB to import.)"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ThreadPool:
    """Runs jobs in at most `threads_max` threads, started when needed. Thread-safe.

    A job must not raise: an exception is a broken invariant and goes to `threading.excepthook`.
    """

    def __init__(self, name: str, threads_max: int) -> None:
        self._name = name
        self._threads_max = threads_max
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._unfinished = 0  # jobs that run or wait

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job as soon as a thread is free."""
        with self._lock:
            self._add(job)

    def try_now(self, job: Callable[[], None]) -> bool:
        """Run a job if it need not wait for another one; returns whether it runs."""
        with self._lock:
            if self._unfinished >= self._threads_max:
                return False
            self._add(job)
            return True

    @contextmanager
    def helping(self, job: Callable[[], None], most: int) -> Iterator[int]:
        """Run a job in up to `most` threads that are free now, beside what the `with` does; gives their number.

        When it ends, all of them have.
        """
        done: queue.SimpleQueue[None] = queue.SimpleQueue()

        def help_out() -> None:
            job()
            done.put(None)

        helpers = sum(self.try_now(help_out) for _ in range(most))
        try:
            yield helpers
        finally:
            for _ in range(helpers):
                done.get()

    def _add(self, job: Callable[[], None]) -> None:
        self._unfinished += 1
        if self._threads < min(self._unfinished, self._threads_max):
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
            self._threads += 1
        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            with self._lock:
                self._unfinished -= 1

    def close(self) -> None:
        """Let the threads end when submitted jobs are done. No more jobs may follow."""
        with self._lock:
            for _ in range(self._threads):
                self._jobs.put(None)

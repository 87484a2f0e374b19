"""Bounded threads that carry out tasks, and their results until they are fetched."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

R = TypeVar("R")

RESULTS_MAX = 65_536
"""Results kept until they are fetched; LMCache does not fetch those of requests that it gave up."""


class Notifier(Protocol):
    """What is told of results: LMCache's `EventNotifier`."""

    def notify(self) -> None:
        """Wake up who waits for results. Does not wait itself."""


@dataclass(frozen=True, slots=True)
class _Task:
    """number: of its result; None: nobody wants it. otherwise: the result if the work is not done."""

    number: int | None
    work: Callable[[], Any]
    otherwise: Any


class Tasks(Generic[R]):
    """Tasks of one kind. Thread-safe.

    Each gets a result: that of its work or, where this is not done (too many tasks wait, the threads have ended, the
    work has raised), the one given for this case. Work raises only what is a mistake in the program: that ends its
    thread, visibly.

    waiting_max: the most tasks that wait for a thread. notifier: told after each result.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        waiting_max: int,
        notifier: Notifier,
        results_max: int = RESULTS_MAX,
    ) -> None:
        self._waiting_max = waiting_max
        self._notifier = notifier
        self._results_max = results_max
        self._waiting: deque[_Task] = deque()
        self._results: dict[int, R] = {}
        # Taken as a lock: an exception in an engine's thread may leave a condition's own `with` locked.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._next = 0
        self._alive = threads
        self._closing = False
        self.refused = 0
        self._threads = [
            threading.Thread(target=self._run, name=f"kvpool-{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        """Whether all its threads run."""
        return self._alive == len(self._threads)

    @property
    def closing(self) -> bool:
        """Whether long work is to end early."""
        return self._closing

    def __len__(self) -> int:
        """Tasks that wait for a thread."""
        return len(self._waiting)

    def submit(self, work: Callable[[], R], otherwise: R) -> int:
        """The task's number. otherwise: its result if the work is not done. Does not wait."""
        with self._lock:
            number = self._next
            self._next += 1
            self._put(_Task(number, work, otherwise))
            return number

    def submit_aside(self, work: Callable[[], object]) -> None:
        """Work whose result nobody wants, and which may be left undone where too much is to be done."""
        with self._lock:
            self._put(_Task(None, work, None))

    def take(self, number: int) -> R | None:
        """The result of a task, once; None: there is none yet, or none any more."""
        with self._lock:
            return self._results.pop(number, None)

    def take_all(self) -> dict[int, R]:
        """The results of all tasks that have ended, by their numbers."""
        with self._lock:
            taken, self._results = self._results, {}
            return taken

    def stop(self) -> None:
        """Drop what waits, and have long work end early. Does not wait."""
        with self._lock:
            self._closing = True
            self._waiting.clear()
            self._changed.notify_all()

    def close(self) -> None:
        """As `stop`; returns once no work is being done, so that what it uses may go. Idempotent."""
        self.stop()
        for thread in self._threads:
            thread.join()

    def _put(self, task: _Task) -> None:
        if self._closing or not self._alive or len(self._waiting) >= self._waiting_max:
            self.refused += 1
            self._end(task, task.otherwise)
        else:
            self._waiting.append(task)
            self._changed.notify()

    def _run(self) -> None:
        try:
            while (task := self._take_task()) is not None:
                result = task.otherwise
                try:
                    result = task.work()
                finally:
                    with self._lock:
                        self._end(task, result)
        finally:
            with self._lock:
                self._alive -= 1
                while not self._alive and self._waiting:
                    task = self._waiting.popleft()
                    self._end(task, task.otherwise)

    def _take_task(self) -> _Task | None:
        with self._lock:
            while not self._waiting and not self._closing:
                self._changed.wait()
            return None if self._closing else self._waiting.popleft()

    def _end(self, task: _Task, result: R) -> None:
        if task.number is None or self._closing:
            return
        self._results[task.number] = result
        if len(self._results) > self._results_max:
            del self._results[next(iter(self._results))]
        self._notifier.notify()

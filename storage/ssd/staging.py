"""The threads that carry bytes between rows and the segment file, each with a staging buffer of its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kvpool.errors import Unavailable
from kvpool.memory.buffers import Bytes1D
from kvpool.storage.ssd.files import staging

Work = Callable[[Any, Bytes1D], None]


class _Call:
    __slots__ = ("broken", "done", "jobs", "left", "work")

    def __init__(self, jobs: Sequence[Any], work: Work) -> None:
        self.jobs = deque(jobs)
        self.work = work
        self.left = len(jobs)
        self.broken = False
        self.done = threading.Event()


class StagingThreads:
    """`threads` workers. Calls take turns job by job, so that a long one does not delay a short one.

    The staging buffers bound the bytes in flight; calls only wait for a worker. Waits last
    as long as the disk takes: returning earlier would leave a worker behind that still writes
    into a slot, or a row, that was reused. Kernels end stuck requests by
    themselves (tens of seconds), with an error.
    """

    def __init__(self, threads: int, staging_bytes: int) -> None:
        self.threads = threads
        self.staging_bytes = staging_bytes
        self._calls: deque[_Call] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._workers = [
            threading.Thread(target=self._work, name=f"kvpool-ssd-{n}", daemon=True)
            for n in range(threads)
        ]
        for worker in self._workers:
            worker.start()

    def run(self, jobs: Sequence[Any], work: Work) -> None:
        """Do `work(job, staging)` for every job, in any order, and return when all are done.

        `work` must not raise: an exception is a broken invariant. Raises `Unavailable` once closed.
        """
        if not jobs:
            return
        call = _Call(jobs, work)
        with self._changed:
            if self._closed:
                raise Unavailable("the SSD store is closed")
            self._calls.append(call)
            self._changed.notify(len(jobs))
        call.done.wait()
        assert not call.broken, "a worker of the SSD store ended; its exception was reported"

    def close(self) -> None:
        """Let the workers end when all calls are done."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for worker in self._workers:
            worker.join()

    def _work(self) -> None:
        buffer = staging(self.staging_bytes)
        while True:
            with self._changed:
                while not self._calls:
                    if self._closed:
                        return
                    self._changed.wait()
                call = self._calls.popleft()
                job = call.jobs.popleft()
                if call.jobs:
                    self._calls.append(call)
            broken = True
            try:
                call.work(job, buffer)
                broken = False
            finally:
                with self._changed:
                    call.left -= 1
                    call.broken |= broken
                    # A broken call ends at once: its caller must fail, not wait forever.
                    if broken or not call.left:
                        call.done.set()

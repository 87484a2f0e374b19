"""Background tasks with an owner, whose failure ends the process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


def crash_if_failed(task: asyncio.Task[Any]) -> None:
    """A done callback: passes a task's error to the loop's handler, which ends the process.

    Expected errors are handled inside; any other one may mean that the rules are broken.
    """
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error


class Tasks:
    """Tasks that run until they end, or until `end`. Event loop only."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start this task."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        crash_if_failed(task)

    def __len__(self) -> int:
        return len(self._running)

    def cancel(self) -> None:
        """Cancel all of them."""
        for task in list(self._running):
            task.cancel()

    async def end(self) -> None:
        """Cancel all of them, and wait for their end."""
        self.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

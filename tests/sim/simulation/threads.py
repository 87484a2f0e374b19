"""A worker's threads: each has one order at a time, and what finds none waits in a queue, as in `worker_main.Jobs`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Threads:
    """So many orders at a time, first come, first served."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.busy = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def free(self) -> int:
        return self.count - self.busy

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Have a thread. An order that is cancelled before it has one ends at once."""
        if not self.free:
            mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(mine)
            try:
                await mine
            except asyncio.CancelledError:
                if mine.done() and not mine.cancelled():
                    self._next()  # it was this one's turn just then
                raise
        else:
            self.busy += 1
        try:
            yield
        finally:
            self._next()

    def _next(self) -> None:
        """A thread is free: the oldest that waits takes it over."""
        while self._waiting:
            one = self._waiting.popleft()
            if not one.done():
                one.set_result(None)
                return
        self.busy -= 1

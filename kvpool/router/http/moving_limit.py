"""A time limit that moves with each event of a stream, for the price of a comparison."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from types import TracebackType
from typing import Self


class MovingLimit:
    """As `asyncio.timeout_at`: the body of `async with` is cancelled at this time, and `TimeoutError` is raised.

    `asyncio.timeout` sets the loop's timer anew whenever it is moved, which costs more than forwarding an event. Here
    the timer stays where it is when the limit moves away from it, and is set anew when it rings too early.
    """

    __slots__ = ("_at", "_loop", "_prolonged_s", "_rings_at", "_timeout", "_timer")

    def __init__(self, at: float, prolonged_s: Callable[[], float] = lambda: 0.0) -> None:
        """at: by the running loop's clock; infinity: no limit. prolonged_s: asked when the limit has come, for how long to
        go on; 0: not at all.
        """
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at = math.inf
        self._at = at
        self._prolonged_s = prolonged_s

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self.move(self._at)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self._timeout.__aexit__(kind, error, traceback)

    def move(self, at: float) -> None:
        """The limit is this time from now on. Inside `async with` only."""
        self._at = at
        if at < self._rings_at:
            self._set(at)

    def _set(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._rings_at = at
        self._timer = None if at == math.inf else self._loop.call_at(at, self._ring)

    def _ring(self) -> None:
        self._timer = None
        now = self._loop.time()
        if now >= self._at and (more_s := self._prolonged_s()):
            self._at = now + more_s
        if now < self._at:
            self._set(self._at)
        else:
            self._timeout.reschedule(now)

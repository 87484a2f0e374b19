"""An event loop of asyncio whose time jumps where others would wait: for what is told by its clock alone.

No limit of time is exceeded because the machine stood still. Nothing may wait for threads, or for other processes.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from typing import Any

TICK_S = 1e-9


class JumpingSelector(selectors.DefaultSelector):
    """Where others would wait, time jumps."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "everybody waits for somebody else"
        # Timers go off up to a nanosecond early. Who looks at the clock then and waits for the rest would do so
        # for ever on a clock that stands still.
        self.now += max(TICK_S, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.jumping = JumpingSelector()
        super().__init__(self.jumping)

    def time(self) -> float:
        return self.jumping.now


def virtually(main: Callable[[], Awaitable[None]]) -> None:
    """Run it, for a day of such time at most."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:

        async def bounded() -> None:
            async with asyncio.timeout(100_000):
                await main()

        runner.run(bounded())

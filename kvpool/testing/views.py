"""What the suites of `directory.py` and `catalog.py` have in common: tests that look at one thing from two ends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Generic, TypeVar

import uvloop

Port = TypeVar("Port")


class TwoViews(Generic[Port]):
    """Inherit, and say how to open one."""

    def views(self) -> AbstractAsyncContextManager[tuple[Port, Port]]:
        """Two ends of an empty one, closed at the end. They may be the same object."""
        raise NotImplementedError

    async def lose(self, view: Port, /) -> None:
        """Have it lose everything."""
        raise NotImplementedError

    def run(self, test: Callable[[Port, Port], Awaitable[None]]) -> None:
        """Run a test on fresh views, on the event loop that the daemon uses."""

        async def main() -> None:
            async with self.views() as (one, other):
                await test(one, other)

        uvloop.run(main())

"""Common to the suites of `directory.py` and `catalog.py`: tests with two views of one object."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Generic, TypeVar

import uvloop

Port = TypeVar("Port")


class TwoViews(Generic[Port]):
    """Inherit, and implement `views`."""

    def views(self) -> AbstractAsyncContextManager[tuple[Port, Port]]:
        """Two views of an empty one, closed at the end. They may be the same object."""
        raise NotImplementedError

    async def lose(self, view: Port, /) -> None:
        """Make it lose everything."""
        raise NotImplementedError

    def run(self, test: Callable[[Port, Port], Awaitable[None]]) -> None:
        """Run a test on new views, on the daemon's event loop."""

        async def main() -> None:
            async with self.views() as (one, other):
                await test(one, other)

        uvloop.run(main())

"""When those who watch a membership are told of its views.

Event loop only.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from kvpool.placement.membership.etcd_mirror import Mirror

TELL_S = 0.1  # between two views, while others' changes come faster


class EtcdViews:
    """See the module. Between two calls the view stays as it was told."""

    def __init__(self, mirror: Mirror, clock: Callable[[], float]) -> None:
        self.view = mirror.view
        self._mirror = mirror
        self._clock = clock
        self._watchers: list[Callable[[], None]] = []
        self._tick: asyncio.TimerHandle | None = None
        self._telling: asyncio.TimerHandle | None = None
        self._told_at = -math.inf  # by the loop's clock
        self._closed = False

    def watch(self, changed: Callable[[], None]) -> None:
        """See `Membership.watch`."""
        self._watchers.append(changed)

    def heard(self, changed: bool) -> None:
        """A change came over the watch: tell it at once, or, of nodes only, with those that follow closely."""
        self._set_tick()
        loop = asyncio.get_running_loop()
        if not changed or self._closed:
            return
        if self._mirror.urgent or loop.time() >= self._told_at + TELL_S:
            self._tell()
        elif self._telling is None:
            self._telling = loop.call_at(self._told_at + TELL_S, self._tell)

    def told(self, changed: bool) -> None:
        """A change of this node's own, or of everything. Whoever made it finds it in the view at once."""
        self._set_tick()
        if changed or self._telling is not None:
            self._tell()

    def _tell(self) -> None:
        """Publish the present view."""
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        self._told_at = asyncio.get_running_loop().time()
        self.view = self._mirror.view
        for watcher in self._watchers:
            watcher()

    def _set_tick(self) -> None:
        """Set the timer for the next change that comes by itself."""
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None
        at = self._mirror.next_tick
        if at is not None and not self._closed:
            delay = max(0.0, at - self._clock())
            self._tick = asyncio.get_running_loop().call_later(
                delay, lambda: self.told(self._mirror.tick(self._clock()))
            )

    def close(self) -> None:
        """Tell nothing more that comes by itself."""
        self._closed = True
        for timer in (self._tick, self._telling):
            if timer is not None:
                timer.cancel()

"""State shared by the tasks of an announcer: their incarnation, and their wake-ups. Event loop only."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from kvpool.errors import Unavailable
from kvpool.placement.directory.announcement_queue import Group

log = logging.getLogger("kvpool.placement")

WARN_S = 10.0  # between two log lines about a failing directory


class Lane:
    """The groups that share one call at a time, so that no key is in two."""

    def __init__(self, groups: list[Group]) -> None:
        self.groups = groups
        self.wake = asyncio.Event()
        self.first = 0  # the group to take from first
        self.changes_sent = 0  # batches, since the last one of repairs


class AnnouncerState:
    """See the module.

    incarnation: None: be silent. lives: how often it was set: a walk for an earlier one ends. connected: whether
    the directory's last call succeeded. failures: failed calls, since the start.
    """

    def __init__(self, lanes: Sequence[Lane], clock: Callable[[], float]) -> None:
        self.clock = clock
        self.lanes = lanes
        self.incarnation: bytes | None = None
        self.lives = 0
        self.connected = False
        self.failures = 0
        self.has_room = asyncio.Event()  # for repairs
        self.try_blocked = asyncio.Event()
        self.walk = asyncio.Event()
        self.look = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()
        self._warned_at: float | None = None

    def act_as(self, incarnation: bytes | None) -> None:
        """Another incarnation begins, or none."""
        self.lives += 1
        self.incarnation = incarnation
        self.wake_lanes()
        for event in (self.try_blocked, self.walk, self.look, self.has_room):
            event.set()

    def wake_lanes(self) -> None:
        for lane in self.lanes:
            lane.wake.set()

    async def step(self) -> None:
        """Call before work that takes a part of a millisecond: one such step per turn of the event loop."""
        async with self._one_at_a_time:
            await asyncio.sleep(0)

    def failed(self, error: Unavailable) -> None:
        """The directory did not answer."""
        now = self.clock()
        if self._warned_at is None or now - self._warned_at > WARN_S:
            self._warned_at = now
            log.warning("the directory rejected published changes: %s", error)
        self.connected = False
        self.failures += 1

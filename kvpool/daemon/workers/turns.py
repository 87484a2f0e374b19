"""Whose order may begin: orders to one source wait for one another, and for those to other sources hardly ever.

A source that has stopped answers nothing, and keeps the threads of its orders. So a source may have as many
orders under way as there are free threads left, and no more than its own limit. A quarter of all threads is kept
out of that count, for sources that have no order under way: as many stopped sources as there are threads in that
quarter hold nobody up.

What waits costs no thread, and its time counts against nobody. No I/O, no clock; event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from kvpool.errors import LimitExceeded


class TurnLimits(NamedTuple):
    """together: orders under way, of all sources. each: of one source."""

    together: int
    each: int

    def times(self, workers: int) -> TurnLimits:
        """For so many workers."""
        return TurnLimits(self.together * workers, self.each * workers)


KEPT_SHARE = 4  # one in so many threads is for sources without an order under way
PULLS = TurnLimits(64, 16)
COPIES = TurnLimits(16, 4)  # pulls in the background
QUESTIONS = TurnLimits(64, 16)
WAITS = TurnLimits(128, 48)  # questions that wait at the peer for news


@dataclass(eq=False, slots=True)
class Turn:
    """One order's. Made by `Turns.join`, but for one that is over from the start. begun: it may begin, or has; over: it has ended."""

    source: Hashable
    wake: Callable[[], object]
    begun: bool = False
    over: bool = False


@dataclass(eq=False, slots=True)
class _Line:
    """The orders to one source: how many run, and those that wait; hedges are first."""

    running: int = 0
    first: dict[Turn, None] = field(default_factory=dict)
    others: dict[Turn, None] = field(default_factory=dict)


class Turns:
    """See the module."""

    def __init__(self, limits: TurnLimits) -> None:
        self.limits = limits
        self._running = 0
        self._lines: dict[Hashable, _Line] = {}
        self._waiting: dict[Hashable, _Line] = {}  # of these; who had a turn last is last

    def waiting(self, source: Hashable) -> int:
        """How many orders to a source have not had their turn."""
        line = self._lines.get(source)
        return 0 if line is None else len(line.first) + len(line.others)

    def running(self, source: Hashable) -> int:
        """How many orders to a source are under way."""
        line = self._lines.get(source)
        return 0 if line is None else line.running

    def join(self, source: Hashable, wake: Callable[[], object], *, first: bool = False) -> Turn:
        """Wait for a turn, which must be ended by `end`. It may begin at once.

        wake: called when it begins; must not raise, nor call this object. first: before all that are not.
        """
        turn = Turn(source, wake)
        line = self._lines.setdefault(source, _Line())
        (line.first if first else line.others)[turn] = None
        self._waiting.setdefault(source, line)
        self._go_on()
        return turn

    def end(self, turn: Turn) -> None:
        """Its order has ended, or is not wanted any more. Idempotent."""
        if turn.over:
            return
        turn.over = True
        line = self._lines[turn.source]
        if turn.begun:
            line.running -= 1
            self._running -= 1
        else:
            line.first.pop(turn, None)
            line.others.pop(turn, None)
        if not (line.first or line.others):
            self._waiting.pop(turn.source, None)
            if not line.running:
                del self._lines[turn.source]
        self._go_on()

    def _go_on(self) -> None:
        while self._waiting:
            source, line = min(self._waiting.items(), key=lambda one: one[1].running)
            # Of those that wait it has the fewest: if it may not begin, nobody may.
            if not self._may_begin(line.running):
                return
            turn = next(iter(line.first or line.others))
            (line.first or line.others).pop(turn)
            line.running += 1
            self._running += 1
            del self._waiting[source]
            if line.first or line.others:
                self._waiting[source] = line
            turn.begun = True
            turn.wake()

    def _may_begin(self, running: int) -> bool:
        """Whether a source with so many orders under way may have one more."""
        free = self.limits.together - self._running
        if not running:
            return free > 0
        return running < min(self.limits.each, free - self.limits.together // KEPT_SHARE)

    @asynccontextmanager
    async def turn(self, source: Hashable, seconds: float) -> AsyncIterator[None]:
        """Wait for a turn, and have it meanwhile. Raises `LimitExceeded` if it does not come in time."""
        begun = asyncio.Event()
        turn = self.join(source, begun.set)
        try:
            try:
                async with asyncio.timeout(seconds):
                    await begun.wait()
            except TimeoutError:
                raise LimitExceeded(
                    f"{self.running(source)} orders to one source are in progress, and none ended within "
                    f"{seconds:g} s"
                ) from None
            yield
        finally:
            self.end(turn)

"""Drops entries of dead incarnations from the directory that nobody looks up any more. Event loop only."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvpool.errors import KvpoolError, Unavailable
from kvpool.placement.directory.base import BATCH_MAX, Directory
from kvpool.placement.directory.checks import DEAD_MAX
from kvpool.placement.directory_memory import DeadIncarnations
from kvpool.placement.membership.base import Membership
from kvpool.placement.outage import Outage

log = logging.getLogger("kvpool.daemon")

SURVEY_KEYS = 200  # checked in one step while no node is known to be dead
SWEEP_KEYS = 2000  # the same, while some are, but few of the entries seen were theirs
SWEEP_KEYS_MAX = 40_000  # and many were: 4 % of a Redis' time
MANY_DEAD = 0.1  # this share of the entries
STEP_S_MAX = 0.5  # of one step: a slow directory is swept slowly
SWEEP_CHORE = "sweep"


class SweepPass:
    """Passes over the directory, one after the other, and whom each is for. No I/O.

    A pass is for the incarnations that were dead when it began, as many as one call takes; the others wait for the
    next one. Who dies meanwhile is swept from there on, if there is room, and stays dead for the next pass.
    """

    def __init__(self, dead: DeadIncarnations) -> None:
        self.cursor = b""
        self._dead = dead
        self._begun_with: dict[bytes, None] = {}

    def step(self) -> list[bytes]:
        """Whose entries to drop from `cursor` on."""
        dead = self._dead
        if not self.cursor:
            self._begun_with = dict.fromkeys(dead.oldest(DEAD_MAX))
        # One that came back is spared, and its entries are not all gone.
        back = [incarnation for incarnation in self._begun_with if dead.lives(incarnation)]
        for incarnation in back:
            del self._begun_with[incarnation]
        wanted = list(self._begun_with)
        if room := DEAD_MAX - len(wanted):
            later = (one for one in dead.oldest(len(dead)) if one not in self._begun_with)
            wanted += [one for one, _ in zip(later, range(room), strict=False)]
        return wanted

    def done(self, cursor: bytes) -> None:
        """The step was made; cursor: where the next one begins; empty: this was the last one."""
        self.cursor = cursor
        if not cursor:
            self._dead.swept(self._begun_with)


@dataclass(eq=False)
class Sweep:
    """Sweeps, a step at a time, while this node leads that chore of its cluster.

    It repeats its passes, slowly while no node is known to be dead: entries of forgotten incarnations are
    found that way; and the faster, the larger the share of dead entries that it meets. dropped: entries, since the start.
    """

    directory: Directory | None
    membership: Membership
    dead: DeadIncarnations
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self.dropped = 0
        self.outage = Outage("the directory's sweep", log, self.clock)
        self._pass = SweepPass(self.dead)
        self._share_dead = 0.0

    async def step(self) -> None:
        """Call it about every second. A directory that fails or refuses is asked again in the next step."""
        if self.directory is None or not await self._leads():
            return
        began = self.clock()
        left = sweep_keys(self._share_dead) if self.dead else SURVEY_KEYS
        seen = dropped = 0
        while left > 0 and self.clock() - began < STEP_S_MAX:
            dead = self._pass.step()
            try:
                swept = await self.directory.sweep(dead, self._pass.cursor, min(left, BATCH_MAX))
            except KvpoolError as error:
                self.outage.failed("sweep", error)
                if not isinstance(error, Unavailable):
                    self._pass.cursor = b""  # that one would be refused again
                return
            self.outage.succeeded("sweep")
            left -= BATCH_MAX
            seen += swept.seen
            dropped += swept.dropped
            self.dropped += swept.dropped
            self.dead.met(swept.met)
            self._pass.done(swept.cursor)
            if not swept.cursor:
                break  # a small directory is not passed over many times a second
        # It falls slowly: the dead are not spread evenly over a directory.
        self._share_dead = max(dropped / max(seen, 1), self._share_dead / 2)

    async def _leads(self) -> bool:
        try:
            return await self.membership.lead(SWEEP_CHORE)
        except KvpoolError as error:
            log.debug("whether this node is to sweep is not known: %s", error)
            return False


def sweep_keys(share_dead: float) -> int:
    """How many blocks one step checks, by the share of dead entries met lately. Pure."""
    return SWEEP_KEYS + int((SWEEP_KEYS_MAX - SWEEP_KEYS) * min(1.0, share_dead / MANY_DEAD))

"""Finds held blocks that the directory lacks: walks through them when there is a reason to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from kvpool.errors import Unavailable
from kvpool.placement.directory.announcement_queue import AnnouncementQueue, Group, Keys
from kvpool.placement.directory.announcer_state import AnnouncerState, wait_for
from kvpool.placement.directory.base import Directory
from kvpool.placement.key_groups import TAGS

WALK_KEYS = 1024
REPAIRS_MAX = 16 << 10  # found by a walk and not sent: the walk waits
REFRESH_KEYS_S = 20_000  # the rate of a routine walk


class Repairs:
    """Queues repairs in `queue`; the announcer sends them. `watch_marks` and `reannounce` run until cancelled.

    check_s: how often to check whether the directory has lost data. refresh_s: between two routine
    walks. walking: a walk is under way; rounds: completed walks.
    """

    def __init__(
        self,
        directory: Directory,
        queue: AnnouncementQueue,
        state: AnnouncerState,
        *,
        check_s: float,
        refresh_s: float,
    ) -> None:
        self.walking = False
        self.rounds = 0
        self._directory = directory
        self._queue = queue
        self._state = state
        self._check_s = check_s
        self._refresh_s = refresh_s
        self._trash: list[Keys] = []

    def throw_away(self, keys: Iterable[Keys]) -> None:
        """Free them a few at a time: a million keys take a while."""
        self._trash += keys

    async def watch_marks(self) -> None:
        """Detect that the directory has lost data."""
        while True:
            self._state.look.clear()
            if self._state.incarnation is None:
                await self._state.look.wait()
                continue
            try:
                marks = await self._directory.marks()
            except Unavailable as error:
                self._state.failed(error)
            else:
                self._compare(marks)
            await wait_for(self._state.look, self._check_s)

    def _compare(self, marks: Sequence[bytes | None]) -> None:
        if not self._state.connected:
            self._state.connected = None not in marks
            for group, mark in zip(self._queue.groups, marks, strict=True):
                if mark is not None:  # it is back: no need to wait any longer
                    group.backoff.retry_at = 0.0
            self._state.try_blocked.set()
        for group, mark in zip(self._queue.groups, marks, strict=True):
            if mark is not None and group.mark != mark:
                group.mark = mark
                group.stale = True
                self._state.walk.set()

    async def reannounce(self) -> None:
        """Walk through held blocks, when there is a reason."""
        refresh_at = self._state.clock() + self._refresh_s
        while True:
            self._state.walk.clear()
            while self._trash:
                self._trash.pop()
                await self._state.step()  # a million keys take a while to be freed
            if self._state.incarnation is None:
                await self._state.walk.wait()
                continue
            self._queue.clear_overflow()
            groups = self._to_walk()
            paced = not groups and self._state.clock() >= refresh_at
            if not groups and not paced:
                await wait_for(self._state.walk, refresh_at - self._state.clock())
                continue
            whole = paced or len(groups) == TAGS
            self.walking = True
            try:
                done = await self._walk_through(
                    self._queue.groups if paced else groups, paced=paced
                )
            finally:
                self.walking = False
            if done and whole:
                refresh_at = self._state.clock() + self._refresh_s

    def _to_walk(self) -> list[Group]:
        """Groups with a reason to be walked and a chance of success.

        Groups without a known mark wait: a loss before the first reading would go unnoticed.
        """
        return [g for g in self._queue.groups if g.stale and g.mark is not None and not g.blocked]

    async def _walk_through(self, groups: Sequence[Group], *, paced: bool) -> bool:
        """Queue all held blocks of these groups; False if that became futile."""
        life = self._state.lives
        for group in groups:
            group.stale = False
        cursor: int | None = 0
        while cursor is not None:
            found, cursor = self._queue.walk(cursor, WALK_KEYS)
            for digest, keys in found:
                self._queue.repair(digest, keys, groups)
            met = sum(len(keys) for _, keys in found)
            await self._make_way(met / REFRESH_KEYS_S if paced else 0.0)
            if self._state.lives != life or (paced and self._to_walk()):
                return False
        for group in groups:
            if group.recount:
                group.recount = False
                await self._recount(group)
        self.rounds += 1
        return True

    async def _recount(self, group: Group) -> None:
        """Queue published keys of a group that are no longer here."""
        for digest, published in list(group.published.items()):
            keys = list(published)
            for at in range(0, len(keys), WALK_KEYS):
                piece = self._queue.missing(digest, keys[at : at + WALK_KEYS])
                if group.given_up:
                    group.stale = group.recount = True
                    return
                if piece:
                    self._queue.add_repairs(group, digest, piece)
                life = self._state.lives
                await self._make_way(0.0)
                if self._state.lives != life:
                    return

    async def _make_way(self, pause: float) -> None:
        """Let the lanes send, and wait until few repairs are left, not counting groups that are given up."""
        self._state.wake_lanes()
        life = self._state.lives
        if pause:
            await asyncio.sleep(pause)
        await self._state.step()
        while self._state.lives == life:
            self._state.has_room.clear()
            if self._queue.repairs_waiting < REPAIRS_MAX:
                return
            await self._state.has_room.wait()

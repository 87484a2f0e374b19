"""Finds held blocks that the directory lacks: walks through them when there is a reason to.

A reason is a new incarnation, an overflow, or another mark. For losses that leave no mark, such as what Redis evicts, a
few blocks after the others are looked up, and published again if they are missing: slowly while none is,
and the faster the more are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass

from kvpool.errors import Unavailable
from kvpool.placement.directory.announcement_queue import AnnouncementQueue, Group
from kvpool.placement.directory.announcer_state import AnnouncerState
from kvpool.placement.directory.base import BATCH_MAX, Directory
from kvpool.placement.key_groups import tag_of
from kvpool.waits import wait_for

WALK_KEYS = 1024
REPAIRS_MAX = 16 << 10  # found by a walk and not sent: the walk waits
VERIFY_KEYS_S = 100  # looked up while nothing is missing: 1,000 nodes take 4 % of one Redis' time
REFRESH_KEYS_S = 20_000  # the same, while many are missing
MANY_MISSING = 0.01  # this share of what was looked up
LOOKING_SHARE = 0.1  # of the time: so that all nodes together slow down with a slow directory


@dataclass(eq=False)
class Repairs:
    """Queues repairs in `queue`; the announcer sends them. `watch_marks` and `reannounce` run until cancelled.

    check_s: how often to check whether the directory has lost data. refresh_s: from the begin of one
    verification of all blocks to the next, at least. walking: a walk is under way; rounds: completed walks and
    verifications.
    """

    directory: Directory
    queue: AnnouncementQueue
    state: AnnouncerState
    _: KW_ONLY
    check_s: float
    refresh_s: float
    tier: int

    def __post_init__(self) -> None:
        self.walking = False
        self.rounds = 0
        self._trash: list[object] = []
        self._silent: set[Group] = set()  # their shard did not answer: what it has is not known
        self._cursor = 0  # of the verification
        self._began_at = 0.0
        self._share_missing = 0.0

    def throw_away(self, queued: Iterable[object]) -> None:
        """Free these one at a time: a million keys take a while."""
        self._trash += queued

    async def watch_marks(self) -> None:
        """Detect that the directory has lost data."""
        while True:
            self.state.look.clear()
            if self.state.incarnation is None:
                await self.state.look.wait()
                continue
            try:
                marks = await self.directory.marks()
            except Unavailable as error:
                self.state.failed(error)
            else:
                self._compare(marks)
            await wait_for(self.state.look, self.check_s)

    def _compare(self, marks: Sequence[bytes | None]) -> None:
        groups = self.queue.groups
        self._silent = {group for group, mark in zip(groups, marks, strict=True) if mark is None}
        if not self.state.connected:
            self.state.connected = None not in marks
            for group, mark in zip(self.queue.groups, marks, strict=True):
                if mark is not None:  # it is back: no need to wait any longer
                    group.backoff.retry_at = 0.0
            self.state.try_blocked.set()
        for group, mark in zip(self.queue.groups, marks, strict=True):
            if mark is not None and group.mark != mark:
                group.mark = mark
                group.stale = True
                self.state.walk.set()

    async def reannounce(self) -> None:
        """Walk through held blocks, when there is a reason."""
        verify_at = self.state.clock() + self.refresh_s
        while True:
            self.state.walk.clear()
            while self._trash:
                self._trash.pop()
                await self.state.step()
            if self.state.incarnation is None:
                await self.state.walk.wait()
                continue
            self.queue.clear_overflow()
            if groups := self._to_walk():
                self.walking = True
                try:
                    await self._walk_through(groups)
                finally:
                    self.walking = False
            elif self.state.clock() >= verify_at:
                verify_at = await self._verify()
            else:
                await wait_for(self.state.walk, verify_at - self.state.clock())

    def _to_walk(self) -> list[Group]:
        """Groups with a reason to be walked and a chance of success.

        Groups without a known mark wait: a loss before the first reading would go unnoticed.
        """
        return [g for g in self.queue.groups if g.stale and g.mark is not None and not g.blocked]

    async def _verify(self) -> float:
        """Look up the next blocks, queue those that are missing, and say when to do it again."""
        began, life = self.state.clock(), self.state.lives
        incarnation = self.state.incarnation
        assert incarnation is not None
        if self._cursor == 0:
            self._began_at = began
        found, cursor = self.queue.held.walk(self._cursor, WALK_KEYS)
        looked_up = missing = 0
        for digest, keys in found:
            try:
                wrong = await self._wrong(incarnation, digest, keys)
            except Unavailable as error:
                self.state.failed(error)
                return self.state.clock() + WALK_KEYS / VERIFY_KEYS_S
            if self.state.lives != life:
                return self.state.clock()
            looked_up += len(keys)
            missing += len(wrong)
            self.queue.repair(digest, wrong, self.queue.groups)
        ended = self.state.clock()
        # It falls slowly, because what is lost together need not be walked in one piece.
        self._share_missing = max(missing / max(looked_up, 1), self._share_missing / 2)
        await self._make_way()
        if cursor is None:
            self._cursor = 0
            self.rounds += 1
            return max(ended, self._began_at + self.refresh_s)
        self._cursor = cursor
        pause_s = looked_up / verify_rate(self._share_missing)
        return ended + max(pause_s, (ended - began) * (1 / LOOKING_SHARE - 1))

    async def _wrong(self, incarnation: bytes, digest: bytes, keys: list[bytes]) -> list[bytes]:
        """Which of these held blocks the directory has not, or not as they are. Raises `Unavailable`."""
        parts, _ = self.queue.held.masks(digest, [])
        if not parts:
            return []  # the namespace has just gone
        wrong: list[bytes] = []
        for at in range(0, len(keys), BATCH_MAX):
            some = keys[at : at + BATCH_MAX]
            listed = await self.directory.locate(digest, parts, some)
            _, masks = self.queue.held.masks(digest, some)
            for key, entries, mask in zip(some, listed, masks, strict=False):
                known = (e.mask for e in entries if e[:2] == (incarnation, self.tier))
                silent = self.queue.groups[tag_of(key)] in self._silent
                if mask and next(known, 0) != mask and not silent:
                    wrong.append(key)
        return self.queue.settled(digest, wrong)

    async def _walk_through(self, groups: Sequence[Group]) -> None:
        """Queue all held blocks of these groups, unless that becomes futile."""
        life = self.state.lives
        for group in groups:
            group.stale = False
        cursor: int | None = 0
        while cursor is not None:
            found, cursor = self.queue.held.walk(cursor, WALK_KEYS)
            for digest, keys in found:
                self.queue.repair(digest, keys, groups)
            await self._make_way()
            if self.state.lives != life:
                return
        self.rounds += 1

    async def _make_way(self) -> None:
        """Let the lanes send, and wait until few repairs are left, not counting groups that are given up."""
        self.state.wake_lanes()
        life = self.state.lives
        await self.state.step()
        while self.state.lives == life:
            self.state.has_room.clear()
            if self.queue.repairs_waiting < REPAIRS_MAX:
                return
            await self.state.has_room.wait()


def verify_rate(share_missing: float) -> float:
    """Blocks to look up in a second, by the share of them that was missing lately. Pure."""
    return VERIFY_KEYS_S + (REFRESH_KEYS_S - VERIFY_KEYS_S) * min(1.0, share_missing / MANY_MISSING)

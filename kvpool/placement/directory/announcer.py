"""Announces this node's blocks to the directory, whatever fails.

Level-triggered. The queue holds keys, not changes: at a key's turn, the rules are asked for its
state *now*, and that is published. So a key that came and went in between is one key in the queue,
a repeated call does no harm, and no order among the changes of one key can be wrong, because a key
is in one call at a time and a change during that call queues it once more.

Three things are sent, in this order of precedence:

    changes    blocks that were put or evicted (`changed`), within milliseconds while the directory answers
    repairs    held blocks, found by a walk: all of them when this node has a new incarnation or
               the queue has overflowed, a group of keys when its mark in the directory has changed (its
               server was emptied), and those that are missing when they are looked up: a few after the others,
               and more of them the more are missing, for losses that leave no mark
    retracts   other nodes' entries that turned out to be wrong; dropped when they cannot be sent

Groups of keys (`tag_of`) fail separately. A call has keys of several groups, so when it fails, all of
them are *blocked*: each is tried alone with a few keys, with growing back-off, until one call succeeds. So a
failed shard does not delay other shards' changes for long. A blocked group's repairs are not kept: it is
walked again when it is free.

What was announced is not remembered: that would take more memory than the blocks' own records.

Limits: `queue_max` changes, and `later_max` more in a compact form (see `AnnouncementQueue`); `LANES + TRIALS`
calls under way, of `batch` keys; a few batches of repairs. No step blocks the event loop for longer than the rules and the directory
take for one batch. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from kvpool.errors import Unavailable
from kvpool.placement.directory.announcement_queue import AnnouncementQueue, Batch, Group, Held
from kvpool.placement.directory.announcer_state import AnnouncerState, Lane
from kvpool.placement.directory.base import BATCH_MAX, TIERS, Directory
from kvpool.placement.directory.repairs import Repairs
from kvpool.telemetry.cluster_stats import AnnouncerStats
from kvpool.waits import wait_for

LANES = 4  # calls under way for groups that work
TRIALS = 2  # and for blocked ones
TRIAL_KEYS = 128
LINGER_S = 0.002  # changes that come together are sent together
CHANGES_IN_A_ROW = 8  # batches, while there are repairs to be sent too
RETRACTS_MAX = 64 << 10


class Announcer:
    """See the module. Silent until `act_as`; does nothing while `run` does not run.

    clock: seconds, as monotonic as the event loop's. queue_max, later_max, batch: in keys. check_s: how often to
    check whether the directory has lost data. refresh_s: between two verifications of all blocks, at least.
    """

    def __init__(
        self,
        directory: Directory,
        held: Held,
        *,
        clock: Callable[[], float],
        queue_max: int = 1 << 18,
        later_max: int = 1 << 22,
        batch: int = 1024,
        tier: int = TIERS["dram"],
        check_s: float = 1.0,
        refresh_s: float = 600.0,
    ) -> None:
        assert 0 < batch <= BATCH_MAX
        self._directory = directory
        self._batch = batch
        self._tier = tier
        self._queue = AnnouncementQueue(held, queue_max, later_max)
        groups = self._queue.groups
        self._state = AnnouncerState([Lane(groups[first::LANES]) for first in range(LANES)], clock)
        self._repairs = Repairs(
            directory,
            self._queue,
            self._state,
            check_s=check_s,
            refresh_s=refresh_s,
            tier=tier,
        )
        self._last_incarnation: bytes | None = None
        self._retracts: dict[tuple[bytes, int, bytes, int], dict[bytes, None]] = {}
        self._retracting = 0
        self._running = False
        self._has_arrived = asyncio.Event()
        self._has_retracts = asyncio.Event()
        self._published = 0
        self._withdrawn = 0
        self._retracted = 0
        self._retracts_dropped = 0

    # ---- told by the rules' caller -------------------------------------------------------------------

    def changed(self, digest: bytes, keys: Iterable[bytes]) -> None:
        """These blocks have changed: put, evicted, dropped; or an entry of this node was seen to be wrong.

        Call it after the fact. O(keys), a copy of them, and never blocks.
        """
        self._queue.changed(digest, tuple(keys), self._state.clock())
        self._has_arrived.set()

    def retract(
        self, digest: bytes, parts: int, incarnation: bytes, tier: int, keys: Iterable[bytes]
    ) -> None:
        """A hint was wrong: this incarnation does not have these in this tier. Withdraw its entries.

        Best effort: dropped while the queue for them is full, while the directory is unavailable, and while this
        node is silent. If its owner publishes one at the same moment, that entry may be lost until it
        is looked up.
        """
        if incarnation == self._state.incarnation and tier == self._tier:
            self.changed(digest, keys)
            return
        queue = self._retracts.setdefault((digest, parts, incarnation, tier), {})
        for key in keys:
            if self._retracting >= RETRACTS_MAX:
                self._retracts_dropped += 1
            elif key not in queue:
                queue[key] = None
                self._retracting += 1
        self._has_retracts.set()

    def act_as(self, incarnation: bytes | None) -> None:
        """Start, or restart, under this incarnation: everything is announced again. None: be silent.

        Calls under way end under the previous one. An incarnation that was replaced
        is not used again.
        """
        if incarnation is not None:
            new = incarnation != self._last_incarnation
            self._repairs.throw_away(self._queue.announce_anew(forget=new))
            self._last_incarnation = incarnation
        self._state.act_as(incarnation)

    def stats(self) -> AnnouncerStats:
        """How much is published, and how much is not yet."""
        state, repairs = self._state, self._repairs
        stats = self._queue.stats(state.clock(), walking=repairs.walking)
        stats.connected = state.connected
        stats.published, stats.withdrawn = self._published, self._withdrawn
        stats.retracted, stats.retracts_dropped = self._retracted, self._retracts_dropped
        stats.failures, stats.rounds = state.failures, repairs.rounds
        return stats

    async def run(self) -> None:
        """Until cancelled. Unsent keys stay queued; it may run again."""
        assert not self._running, "one at a time"
        self._running = True
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._sort())
                for lane in self._state.lanes:
                    tasks.create_task(self._send_lane(lane))
                for _ in range(TRIALS):
                    tasks.create_task(self._send_trials())
                tasks.create_task(self._send_retracts())
                tasks.create_task(self._repairs.watch_marks())
                tasks.create_task(self._repairs.reannounce())
        finally:
            self._running = False

    # ---- changes: from the queue to their groups -----------------------------------------------------

    async def _sort(self) -> None:
        while True:
            await self._has_arrived.wait()
            self._has_arrived.clear()
            await asyncio.sleep(LINGER_S)
            self._state.wake_lanes()  # changes that did not find room are in their groups at once
            while self._queue.arrived:
                await self._state.step()
                self._queue.sort()
                self._state.wake_lanes()

    # ---- sending -------------------------------------------------------------------------------------

    async def _send_lane(self, lane: Lane) -> None:
        while True:
            lane.wake.clear()
            await self._state.step()
            batch = self._next_of(lane)
            if batch is None:
                await lane.wake.wait()
                continue
            if not await self._send(batch):
                for group, _ in batch.shares:
                    self._block(group)
            self._state.has_room.set()

    def _next_of(self, lane: Lane) -> Batch | None:
        """Changes before repairs, but some repairs in any case."""
        if self._state.incarnation is None:
            return None
        groups = lane.groups[lane.first :] + lane.groups[: lane.first]
        groups = [group for group in groups if not group.blocked]
        lane.first = (lane.first + 1) % len(lane.groups)
        urgent_first = lane.changes_sent < CHANGES_IN_A_ROW
        for urgent in (urgent_first, not urgent_first):
            batch = self._queue.take(groups, urgent, self._batch)
            if batch is not None:
                lane.changes_sent = lane.changes_sent + 1 if urgent else 0
                return batch
        lane.changes_sent = 0
        return None

    async def _send(self, batch: Batch) -> bool:
        """Publish the current state of a batch's keys; put them back and return False on failure."""
        incarnation = self._state.incarnation
        assert incarnation is not None
        if self._queue.overflowed:
            self._state.walk.set()  # there may be room now
        parts, keys, masks = self._queue.ask(batch)
        if not keys:
            return True
        sent = False
        self._queue.under_way.append(batch)
        try:
            await self._directory.publish(batch.digest, parts, incarnation, self._tier, keys, masks)
            sent = True
        except Unavailable as error:
            self._state.failed(error)
        finally:
            self._queue.under_way.remove(batch)
            if not sent:
                self._queue.put_back(batch)
        if sent:
            self._state.connected = True
            self._published += len(keys) - batch.withdrawn
            self._withdrawn += batch.withdrawn
        return sent

    # ---- failures ------------------------------------------------------------------------------------

    def _block(self, group: Group) -> None:
        """To be tried alone, after a while."""
        group.backoff.failed(self._state.clock())
        self._state.try_blocked.set()
        self._state.has_room.set()  # a walk need not wait for a group that is given up

    def _free(self, group: Group) -> None:
        group.backoff.succeeded()
        self._state.wake_lanes()
        if group.stale:
            self._state.walk.set()

    async def _send_trials(self) -> None:
        """Try blocked groups, one at a time, each when its back-off is over."""
        while True:
            self._state.try_blocked.clear()
            waiting = [group for group in self._queue.groups if group.blocked and not group.trying]
            if self._state.incarnation is None or not waiting:
                await self._state.try_blocked.wait()
                continue
            group = min(waiting, key=lambda group: group.backoff.retry_at)
            pause = group.backoff.retry_at - self._state.clock()
            if pause > 0:
                await wait_for(self._state.try_blocked, pause)
                continue
            group.trying = True
            try:
                await self._state.step()
                await self._send_trial(group)
            finally:
                group.trying = False

    async def _send_trial(self, group: Group) -> None:
        """A few keys of one group. A group without keys to send is unblocked: a failure shows with the next ones."""
        if self._state.incarnation is None:
            return
        for urgent in (True, False):
            batch = self._queue.take([group], urgent, min(TRIAL_KEYS, self._batch))
            if batch is not None:
                if not await self._send(batch):
                    self._block(group)
                    return
                break
        self._free(group)

    # ---- retracts ------------------------------------------------------------------------------------

    async def _send_retracts(self) -> None:
        while True:
            await self._has_retracts.wait()
            self._has_retracts.clear()
            await asyncio.sleep(LINGER_S)
            while self._retracts:
                await self._state.step()
                await self._send_retract()

    async def _send_retract(self) -> None:
        name = next(iter(self._retracts))
        queue = self._retracts[name]
        keys = [queue.popitem()[0] for _ in range(min(len(queue), self._batch))]
        if not queue:
            del self._retracts[name]
        self._retracting -= len(keys)
        digest, parts, incarnation, tier = name
        if not keys or self._state.incarnation is None:
            self._retracts_dropped += len(keys)
            return
        try:
            await self._directory.publish(digest, parts, incarnation, tier, keys, [0] * len(keys))
        except Unavailable as error:
            self._state.failed(error)
            self._retracts_dropped += len(keys)
        else:
            self._retracted += len(keys)

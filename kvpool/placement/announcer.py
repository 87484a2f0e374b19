"""Tells the directory what this node holds, whatever happens to either.

Level-triggered. What is queued are keys, not changes: when a key's turn comes, the rules are asked what is
here of it *now*, and that is published. So a key that came and went in between is one key in the queue,
a call that is repeated does no harm, and no order among the changes of one key can be wrong, since a key
is in one call at a time and a change during that call queues it once more.

Three things are sent, in this order of precedence:

    changes    what was put or evicted (`changed`), within milliseconds while the directory answers
    repairs    what is held, found by walking through it: all of it when this node has a new incarnation or
               the queue has overflowed, a group of keys when its mark in the directory has changed (its
               server was emptied), and everything slowly now and then, for losses that leave no mark
    retracts   other nodes' entries that turned out to be wrong; dropped when they cannot be sent

Groups of keys (`tag_of`) fail separately. A call takes keys of several groups, so when it fails, all of
them are *blocked*: each is tried alone with a few keys, ever less often, until one call succeeds. So a
shard that is down delays nobody else's changes for long. A blocked group's repairs are not kept: it is
walked again when it is free.

For each group the keys that the directory may have from us are remembered (some 40 bytes a key): a key that
was never announced needs no withdrawal, and what was evicted while the queue overflowed can be found.

Limits: `queue_max` changes, beyond which all is walked again; `LANES + TRIALS` calls under way, of `batch`
keys; a few batches of repairs. No step holds the event loop for longer than the rules and the directory
take for one batch. Event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, Protocol

from kvpool.errors import Unavailable
from kvpool.placement.directory import BATCH_MAX, TAGS, TIERS, Directory, tag_of

log = logging.getLogger("kvpool.placement")

LANES = 4  # calls under way for groups that are well
TRIALS = 2  # and for blocked ones
TRIAL_KEYS = 128
LINGER_S = 0.002  # changes that come together are sent together
BACKOFF_S, BACKOFF_S_MAX = 0.1, 2.0
SORT_KEYS = 1024  # at a time, before other tasks have their turn
WALK_KEYS = 1024
REPAIRS_MAX = 16 << 10  # found by a walk and not sent: the walk waits
REFRESH_KEYS_S = 20_000  # the pace of a walk that nothing asked for
CHANGES_IN_A_ROW = 8  # batches, while there are repairs to be sent too
RETRACTS_MAX = 64 << 10
WARN_S = 10.0  # between two lines in the log about a directory that fails
NAMESPACES_MAX = (
    4096  # whose number of parts is remembered, to withdraw their blocks when they are gone
)

_Keys = dict[bytes, set[bytes]]  # by digest


class Held(Protocol):
    """The node's rules, asked on the event loop; quick."""

    def masks(self, digest: bytes, keys: Sequence[bytes]) -> tuple[int, list[int]]:
        """The parts of the namespace, and the mask of what is here now for each key, 0: nothing.

        (0, []) if the namespace is not known any more.
        """
        ...

    def walk(self, cursor: int, count: int) -> tuple[list[tuple[bytes, list[bytes]]], int | None]:
        """About `count` held blocks from a cursor on (at first 0), grouped by digest; the next cursor.

        None: all were met. Every block that is held throughout a whole walk is met, or `changed` tells of
        it meanwhile.
        """
        ...


class _Group:
    """The keys of one tag. `delay`: of the last back-off, 0 if it is not blocked."""

    __slots__ = (
        "changes",
        "delay",
        "mark",
        "published",
        "recount",
        "repairing",
        "repairs",
        "retry_at",
        "since",
        "stale",
        "trying",
    )

    def __init__(self) -> None:
        self.changes: _Keys = {}
        self.since: float | None = None  # not later than the oldest of the changes
        self.repairs: _Keys = {}
        self.repairing = 0  # how many
        self.published: _Keys = {}  # the directory has no others from us
        self.mark: bytes | None = None  # under which it is announced; None: nobody has looked
        self.stale = False  # to be walked
        self.recount = False  # and what was published to be compared with what is held
        self.delay = 0.0
        self.retry_at = 0.0
        self.trying = False

    @property
    def given_up(self) -> bool:
        """Blocked, and not only because of the company it was in."""
        return self.delay > BACKOFF_S


class _Lane:
    """The groups that share one call at a time, so that no key is in two."""

    def __init__(self, groups: list[_Group]) -> None:
        self.groups = groups
        self.wake = asyncio.Event()
        self.first = 0  # whose turn it is to be taken from first
        self.changes_sent = 0  # batches, since the last one of repairs


@dataclass(slots=True, eq=False)
class _Batch:
    """Keys of one namespace that are, or are about to be, under way."""

    digest: bytes
    urgent: bool
    since: float | None = None
    shares: list[tuple[_Group, list[bytes]]] = field(default_factory=list)
    size: int = 0
    withdrawn: list[bytes] = field(default_factory=list)


class Announcer:
    """See the module. Silent until `act_as`; does nothing while `run` does not run.

    clock: seconds, as monotonic as the event loop's. queue_max, batch: in keys. check_s: how often to look
    whether the directory has lost something. refresh_s: between two walks that nothing asked for.
    """

    def __init__(
        self,
        directory: Directory,
        held: Held,
        *,
        clock: Callable[[], float],
        queue_max: int = 1 << 20,
        batch: int = 1024,
        tier: int = TIERS["dram"],
        check_s: float = 1.0,
        refresh_s: float = 600.0,
    ) -> None:
        assert 0 < batch <= BATCH_MAX
        self._directory = directory
        self._held = held
        self._clock = clock
        self._queue_max = queue_max
        self._batch = batch
        self._tier = tier
        self._check_s = check_s
        self._refresh_s = refresh_s

        self._incarnation: bytes | None = None
        self._last_incarnation: bytes | None = None
        self._lives = 0  # how often `act_as` was called: a walk for an earlier life ends
        self._groups = [_Group() for _ in range(TAGS)]
        self._lanes = [_Lane(self._groups[first::LANES]) for first in range(LANES)]
        self._arrived: deque[tuple[float, bytes, tuple[bytes, ...]]] = deque()
        self._queued = 0  # changes: arrived, or in a group; not those under way
        self._overflowed = False
        self._sending: list[_Batch] = []
        self._parts: OrderedDict[bytes, int] = OrderedDict()
        self._retracts: dict[tuple[bytes, int, bytes, int], dict[bytes, None]] = {}
        self._retracting = 0
        self._trash: list[_Keys] = []
        self._running = False
        self._walking = False

        self._one_at_a_time = asyncio.Lock()
        self._has_arrived = asyncio.Event()
        self._has_retracts = asyncio.Event()
        self._has_room = asyncio.Event()  # for repairs
        self._try = asyncio.Event()
        self._walk = asyncio.Event()
        self._look = asyncio.Event()

        self._connected = False
        self._warned_at: float | None = None
        self._published = 0
        self._withdrawn = 0
        self._retracted = 0
        self._retracts_dropped = 0
        self._failures = 0
        self._overflows = 0
        self._rounds = 0

    # ---- told by the rules' caller -------------------------------------------------------------------

    def changed(self, digest: bytes, keys: Iterable[bytes]) -> None:
        """Something became of these blocks: put, evicted, dropped. Call it after the fact.

        O(keys), a copy of them, and never blocks. Beyond the queue's limit they are not queued, and all
        that is held, and all that was announced, is looked at again as soon as there is room.
        """
        listed = tuple(keys)
        if self._queued + len(listed) > self._queue_max:
            self._overflowed = True
            self._overflows += 1
            self._walk.set()
            return
        self._arrived.append((self._clock(), digest, listed))
        self._queued += len(listed)
        self._has_arrived.set()

    def doubt(self, digest: bytes, keys: Iterable[bytes]) -> None:
        """The directory was seen to say something of us about these that is not so. See `changed`.

        Unlike after `changed`, what is not here is withdrawn even if nothing is known to be there: a call
        that timed out may have been carried out later than the withdrawal that followed it.
        """
        listed = tuple(keys)
        for key in listed:
            self._groups[tag_of(key)].published.setdefault(digest, set()).add(key)
        self.changed(digest, listed)

    def retract(
        self, digest: bytes, parts: int, incarnation: bytes, tier: int, keys: Iterable[bytes]
    ) -> None:
        """A hint was wrong: this incarnation does not have these in this tier. Withdraw its entries.

        Best effort: dropped while the queue for them is full, while the directory is away, and while this
        node is silent. Its owner may publish one again at the same moment and lose that to us, until its
        next refresh.
        """
        if incarnation == self._incarnation and tier == self._tier:
            self.doubt(digest, keys)
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
        """Begin, or begin again, under this incarnation: all is announced anew. None: be silent.

        What is under way at this moment still ends under the former one. An incarnation that was given up
        for another one is not taken again.
        """
        self._lives += 1
        self._incarnation = incarnation
        if incarnation is not None:
            for group in self._groups:
                group.stale = True
                if incarnation != self._last_incarnation:
                    self._trash.append(group.published)
                    group.published = {}
                    group.recount = False
            if incarnation != self._last_incarnation:
                self._overflowed = False  # nothing is out there yet that might be wrong
            self._last_incarnation = incarnation
        for lane in self._lanes:
            lane.wake.set()
        for event in (self._try, self._walk, self._look, self._has_room):
            event.set()

    def stats(self) -> dict[str, Any]:
        """Plain values. lag_s: age of the oldest change that is not published, in seconds.

        repairing: keys found by a walk and not sent. announced: keys that the directory may have from us.
        settled: nothing is left to do, as far as is known.
        """
        under_way = [batch for batch in self._sending if batch.urgent]
        times = [group.since for group in self._groups if group.since is not None]
        times += [batch.since for batch in under_way if batch.since is not None]
        if self._arrived:
            times.append(self._arrived[0][0])
        queued = self._queued + sum(batch.size for batch in under_way)
        repairing = sum(group.repairing for group in self._groups)
        repairing += sum(batch.size for batch in self._sending if not batch.urgent)
        stale = sum(group.stale for group in self._groups)
        return {
            "connected": self._connected,
            "settled": not (queued or repairing or stale or self._walking or self._overflowed),
            "queued": queued,
            "lag_s": max(0.0, self._clock() - min(times)) if times else 0.0,
            "repairing": repairing,
            "stale_groups": stale,
            "blocked_groups": sum(group.delay > 0 for group in self._groups),
            "announced": sum(len(keys) for g in self._groups for keys in g.published.values()),
            "published": self._published,
            "withdrawn": self._withdrawn,
            "retracted": self._retracted,
            "retracts_dropped": self._retracts_dropped,
            "failures": self._failures,
            "overflows": self._overflows,
            "rounds": self._rounds,
        }

    async def run(self) -> None:
        """Until cancelled. What was not sent then stays queued; it may run again."""
        assert not self._running, "one at a time"
        self._running = True
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._sort())
                for lane in self._lanes:
                    tasks.create_task(self._send_lane(lane))
                for _ in range(TRIALS):
                    tasks.create_task(self._send_trials())
                tasks.create_task(self._send_retracts())
                tasks.create_task(self._watch_marks())
                tasks.create_task(self._reannounce())
        finally:
            self._running = False

    async def _step(self) -> None:
        """Before anything that takes a part of a millisecond: one of these in each turn of the event loop."""
        async with self._one_at_a_time:
            await asyncio.sleep(0)

    # ---- changes: from the queue to their groups -----------------------------------------------------

    async def _sort(self) -> None:
        while True:
            await self._has_arrived.wait()
            self._has_arrived.clear()
            await asyncio.sleep(LINGER_S)
            while self._arrived:
                await self._step()
                self._sort_some()
                for lane in self._lanes:
                    lane.wake.set()

    def _sort_some(self) -> None:
        room = SORT_KEYS
        while self._arrived and room > 0:
            since, digest, keys = self._arrived.popleft()
            if len(keys) > room:
                self._arrived.appendleft((since, digest, keys[room:]))
                keys = keys[:room]
            room -= len(keys)
            self._queued += self._add_changes(digest, keys, since) - len(keys)

    def _add_changes(self, digest: bytes, keys: Iterable[bytes], since: float | None) -> int:
        """How many of them were not queued yet."""
        groups = self._groups
        fresh = 0
        for key in keys:
            group = groups[tag_of(key)]
            queue = group.changes.get(digest)
            if queue is None:
                queue = group.changes[digest] = set()
                if group.since is None:
                    group.since = since
            if key not in queue:
                queue.add(key)
                fresh += 1
        return fresh

    # ---- sending -------------------------------------------------------------------------------------

    async def _send_lane(self, lane: _Lane) -> None:
        while True:
            lane.wake.clear()
            await self._step()
            batch = self._next_of(lane)
            if batch is None:
                await lane.wake.wait()
                continue
            if not await self._send(batch):
                for group, _ in batch.shares:
                    self._block(group)
            self._has_room.set()

    def _next_of(self, lane: _Lane) -> _Batch | None:
        """Changes before repairs, but some repairs in any case."""
        if self._incarnation is None:
            return None
        groups = lane.groups[lane.first :] + lane.groups[: lane.first]
        groups = [group for group in groups if not group.delay]
        lane.first = (lane.first + 1) % len(lane.groups)
        urgent_first = lane.changes_sent < CHANGES_IN_A_ROW
        for urgent in (urgent_first, not urgent_first):
            batch = self._take(groups, urgent, self._batch)
            if batch is not None:
                lane.changes_sent = lane.changes_sent + 1 if urgent else 0
                return batch
        lane.changes_sent = 0
        return None

    def _take(self, groups: Iterable[_Group], urgent: bool, limit: int) -> _Batch | None:
        """Up to `limit` keys of one namespace out of these groups; None if there are none."""
        batch: _Batch | None = None
        for group in groups:
            queues = group.changes if urgent else group.repairs
            if not queues:
                continue
            if batch is None:
                batch = _Batch(next(iter(queues)), urgent)
            queue = queues.get(batch.digest)
            if queue is None:
                continue
            room = limit - batch.size
            if len(queue) <= room:
                share = list(queue)
                del queues[batch.digest]
            else:
                share = [queue.pop() for _ in range(room)]
                queues[batch.digest] = queues.pop(batch.digest)  # behind the other namespaces
            batch.shares.append((group, share))
            batch.size += len(share)
            if urgent:
                self._queued -= len(share)
                if group.since is not None and (batch.since is None or group.since < batch.since):
                    batch.since = group.since
                if not queues:
                    group.since = None
            else:
                group.repairing -= len(share)
            if batch.size == limit:
                break
        return batch

    async def _send(self, batch: _Batch) -> bool:
        """Publish what is here now of a batch's keys; put them back and return False if that failed."""
        incarnation = self._incarnation
        assert incarnation is not None
        if self._overflowed:
            self._walk.set()  # there may be room now
        parts, keys, masks = self._ask(batch)
        if not keys:
            return True
        sent = False
        self._sending.append(batch)
        try:
            await self._directory.publish(batch.digest, parts, incarnation, self._tier, keys, masks)
            sent = True
        except Unavailable as error:
            self._failed(error)
        finally:
            self._sending.remove(batch)
            if not sent:
                self._put_back(batch)
        if sent:
            self._connected = True
            self._published += len(keys) - len(batch.withdrawn)
            self._withdrawn += len(batch.withdrawn)
            self._forget_withdrawn(batch)
        return sent

    def _ask(self, batch: _Batch) -> tuple[int, list[bytes], list[int]]:
        """What to publish of a batch: parts, keys, masks. Notes what the directory may have then."""
        digest = batch.digest
        asked = [key for _, share in batch.shares for key in share]
        parts, masks = self._held.masks(digest, asked)
        if parts:
            self._note_parts(digest, parts)
        else:
            parts = self._parts.get(digest, 0)
            masks = [0] * len(asked)
            if not parts:
                return 0, [], []  # never announced
        keys: list[bytes] = []
        at = 0
        for group, share in batch.shares:
            theirs = masks[at : at + len(share)]
            at += len(share)
            here = list(compress(share, theirs)) if 0 in theirs else share
            known = group.published.get(digest)
            if len(here) < len(share) and known:
                batch.withdrawn += [
                    key
                    for key, mask in zip(share, theirs, strict=True)
                    if not mask and key in known
                ]
            if here:
                keys += here
                if known is None:
                    known = group.published[digest] = set()
                known.update(here)
        keys += batch.withdrawn
        return parts, keys, [mask for mask in masks if mask] + [0] * len(batch.withdrawn)

    def _note_parts(self, digest: bytes, parts: int) -> None:
        self._parts[digest] = parts
        self._parts.move_to_end(digest)
        if len(self._parts) > NAMESPACES_MAX:
            self._parts.popitem(last=False)

    def _forget_withdrawn(self, batch: _Batch) -> None:
        """The directory does not have these from us any more."""
        for key in batch.withdrawn:
            published = self._groups[tag_of(key)].published
            known = published.get(batch.digest)
            if known is not None:
                known.discard(key)
                if not known:
                    del published[batch.digest]

    def _put_back(self, batch: _Batch) -> None:
        batch.withdrawn.clear()
        for group, share in batch.shares:
            if batch.urgent:
                if group.since is None or (batch.since is not None and batch.since < group.since):
                    group.since = batch.since
                self._queued += self._add_changes(batch.digest, share, batch.since)
            else:
                self._add_repairs(group, batch.digest, share)

    # ---- failures ------------------------------------------------------------------------------------

    def _failed(self, error: Unavailable) -> None:
        now = self._clock()
        if self._warned_at is None or now - self._warned_at > WARN_S:
            self._warned_at = now
            log.warning("the directory does not take what is published: %s", error)
        self._connected = False
        self._failures += 1

    def _block(self, group: _Group) -> None:
        """To be tried alone, after a while."""
        group.delay = min(max(BACKOFF_S, 2 * group.delay), BACKOFF_S_MAX)
        group.retry_at = self._clock() + group.delay
        self._try.set()
        self._has_room.set()  # a walk that waits for a group that is given up need not

    def _free(self, group: _Group) -> None:
        group.delay = 0.0
        for lane in self._lanes:
            lane.wake.set()
        if group.stale:
            self._walk.set()

    async def _send_trials(self) -> None:
        """Try blocked groups, one at a time, each when its time has come."""
        while True:
            self._try.clear()
            waiting = [group for group in self._groups if group.delay and not group.trying]
            if self._incarnation is None or not waiting:
                await self._try.wait()
                continue
            group = min(waiting, key=lambda group: group.retry_at)
            pause = group.retry_at - self._clock()
            if pause > 0:
                await _wait(self._try, pause)
                continue
            group.trying = True
            try:
                await self._step()
                await self._send_trial(group)
            finally:
                group.trying = False

    async def _send_trial(self, group: _Group) -> None:
        """A few keys of one group. One with nothing to send is free: it costs nothing to find out later."""
        if self._incarnation is None:
            return
        for urgent in (True, False):
            batch = self._take([group], urgent, min(TRIAL_KEYS, self._batch))
            if batch is not None:
                if not await self._send(batch):
                    self._block(group)
                    return
                break
        self._free(group)

    # ---- repairs -------------------------------------------------------------------------------------

    async def _watch_marks(self) -> None:
        """Find out that the directory has lost something."""
        while True:
            self._look.clear()
            if self._incarnation is None:
                await self._look.wait()
                continue
            try:
                marks = await self._directory.marks()
            except Unavailable as error:
                self._failed(error)
            else:
                self._compare(marks)
            await _wait(self._look, self._check_s)

    def _compare(self, marks: Sequence[bytes | None]) -> None:
        if not self._connected:
            self._connected = None not in marks
            for group, mark in zip(self._groups, marks, strict=True):
                if mark is not None:  # it is back: no need to wait any longer
                    group.retry_at = 0.0
            self._try.set()
        for group, mark in zip(self._groups, marks, strict=True):
            if mark is not None and group.mark != mark:
                group.mark = mark
                group.stale = True
                self._walk.set()

    async def _reannounce(self) -> None:
        """Walk through what is held, when there is a reason."""
        refresh_at = self._clock() + self._refresh_s
        while True:
            self._walk.clear()
            while self._trash:
                self._trash.pop()
                await self._step()  # a million keys take a while to be freed
            if self._incarnation is None:
                await self._walk.wait()
                continue
            self._look_at_overflow()
            groups = self._to_walk()
            paced = not groups and self._clock() >= refresh_at
            if not groups and not paced:
                await _wait(self._walk, refresh_at - self._clock())
                continue
            whole = paced or len(groups) == TAGS
            self._walking = True
            try:
                done = await self._walk_through(self._groups if paced else groups, paced=paced)
            finally:
                self._walking = False
            if done and whole:
                refresh_at = self._clock() + self._refresh_s

    def _look_at_overflow(self) -> None:
        """Changes were not queued: find what is here and not announced, and the reverse.

        Not before half the queue is free, lest a node that changes faster than it can tell walks all day.
        """
        if self._overflowed and self._queued <= self._queue_max // 2:
            self._overflowed = False
            for group in self._groups:
                group.stale = group.recount = True

    def _to_walk(self) -> list[_Group]:
        """Groups with a reason to be walked and a chance of success.

        Those whose mark nobody has seen yet wait: a loss before the first look would go unnoticed.
        """
        return [g for g in self._groups if g.stale and g.mark is not None and not g.delay]

    async def _walk_through(self, groups: Sequence[_Group], *, paced: bool) -> bool:
        """Queue all that is held of these groups; False if something made that futile."""
        life = self._lives
        for group in groups:
            group.stale = False
        cursor: int | None = 0
        while cursor is not None:
            found, cursor = self._held.walk(cursor, WALK_KEYS)
            for digest, keys in found:
                self._repair(digest, keys, groups)
            met = sum(len(keys) for _, keys in found)
            await self._make_way(met / REFRESH_KEYS_S if paced else 0.0)
            if self._lives != life or (paced and self._to_walk()):
                return False
        for group in groups:
            if group.recount:
                group.recount = False
                await self._recount(group)
        self._rounds += 1
        return True

    def _repair(self, digest: bytes, keys: Iterable[bytes], wanted: Sequence[_Group]) -> None:
        """Queue those of the keys that are of these groups."""
        groups = self._groups
        if len(wanted) == TAGS:
            split: dict[_Group, list[bytes]] = {}
            for key in keys:
                split.setdefault(groups[tag_of(key)], []).append(key)
        else:
            split = {group: [] for group in wanted}
            for key in keys:
                share = split.get(groups[tag_of(key)])
                if share is not None:
                    share.append(key)
        for group, share in split.items():
            if group.given_up:
                group.stale = True  # again, when it is free
            elif share:
                self._add_repairs(group, digest, share)

    @staticmethod
    def _add_repairs(group: _Group, digest: bytes, keys: Iterable[bytes]) -> None:
        queue = group.repairs.setdefault(digest, set())
        before = len(queue)
        queue.update(keys)
        group.repairing += len(queue) - before

    async def _recount(self, group: _Group) -> None:
        """Queue what was published of a group and is not here any more."""
        for digest, published in list(group.published.items()):
            keys = list(published)
            for at in range(0, len(keys), WALK_KEYS):
                piece = keys[at : at + WALK_KEYS]
                parts, masks = self._held.masks(digest, piece)
                if parts:
                    piece = [key for key, mask in zip(piece, masks, strict=True) if not mask]
                if group.given_up:
                    group.stale = group.recount = True
                    return
                if piece:
                    self._add_repairs(group, digest, piece)
                life = self._lives
                await self._make_way(0.0)
                if self._lives != life:
                    return

    async def _make_way(self, pause: float) -> None:
        """Let the lanes send, and wait until few repairs are left; those of given up groups aside."""
        for lane in self._lanes:
            lane.wake.set()
        life = self._lives
        if pause:
            await asyncio.sleep(pause)
        await self._step()
        while self._lives == life:
            self._has_room.clear()
            waiting = sum(group.repairing for group in self._groups if not group.given_up)
            if waiting < REPAIRS_MAX:
                return
            await self._has_room.wait()

    # ---- retracts ------------------------------------------------------------------------------------

    async def _send_retracts(self) -> None:
        while True:
            await self._has_retracts.wait()
            self._has_retracts.clear()
            await asyncio.sleep(LINGER_S)
            while self._retracts:
                await self._step()
                await self._send_retract()

    async def _send_retract(self) -> None:
        name = next(iter(self._retracts))
        queue = self._retracts[name]
        keys = [queue.popitem()[0] for _ in range(min(len(queue), self._batch))]
        if not queue:
            del self._retracts[name]
        self._retracting -= len(keys)
        digest, parts, incarnation, tier = name
        if not keys or self._incarnation is None:
            self._retracts_dropped += len(keys)
            return
        try:
            await self._directory.publish(digest, parts, incarnation, tier, keys, [0] * len(keys))
        except Unavailable as error:
            self._failed(error)
            self._retracts_dropped += len(keys)
        else:
            self._retracted += len(keys)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Until it is set, for so long at most."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass

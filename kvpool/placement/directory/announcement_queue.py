"""Announcements to the directory: keys by group, changed or found by a walk. No I/O, no clock, no tasks."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Protocol

from kvpool.placement.key_groups import TAGS, tag_of
from kvpool.retry import Backoff
from kvpool.telemetry.node_stats import AnnouncerStats

BACKOFF_S, BACKOFF_S_MAX = 0.1, 2.0
SORT_KEYS = 1024  # at a time, before other tasks have their turn
NAMESPACES_MAX = 4096  # namespaces whose number of parts is remembered, to withdraw their blocks when they are gone

Keys = dict[bytes, set[bytes]]  # by digest


class Held(Protocol):
    """The node's rules, called on the event loop; quick."""

    def masks(self, digest: bytes, keys: Sequence[bytes]) -> tuple[int, list[int]]:
        """The parts of the namespace, and for each key the mask of the parts that are here now, 0: none.

        (0, []) if the namespace is no longer known.
        """
        ...

    def walk(self, cursor: int, count: int) -> tuple[list[tuple[bytes, list[bytes]]], int | None]:
        """About `count` held blocks from a cursor on (at first 0), grouped by digest; the next cursor.

        None: the end. Every block that is held throughout a whole walk is visited, or `changed` reports
        it meanwhile.
        """
        ...


class Group:
    """The keys of one tag. backoff: it is blocked, and tried alone after that."""

    __slots__ = (
        "backoff",
        "changes",
        "mark",
        "published",
        "recount",
        "repairing",
        "repairs",
        "since",
        "stale",
        "trying",
    )

    def __init__(self) -> None:
        self.changes: Keys = {}
        self.since: float | None = None  # not later than the oldest of the changes
        self.repairs: Keys = {}
        self.repairing = 0  # how many
        self.published: Keys = {}  # the directory has no others from this node
        self.mark: bytes | None = None  # under which it is announced; None: not read yet
        self.stale = False  # to be walked
        self.recount = False  # and published keys to be compared with held ones
        self.backoff = Backoff(BACKOFF_S, BACKOFF_S_MAX)
        self.trying = False

    @property
    def given_up(self) -> bool:
        """Blocked because of a failure of its own."""
        return self.backoff.failures > 1

    @property
    def blocked(self) -> bool:
        """To be tried alone."""
        return self.backoff.failures > 0


@dataclass(slots=True, eq=False)
class Batch:
    """Keys of one namespace that are, or are about to be, under way."""

    digest: bytes
    urgent: bool
    since: float | None = None
    shares: list[tuple[Group, list[bytes]]] = field(default_factory=list)
    size: int = 0
    withdrawn: list[bytes] = field(default_factory=list)


class AnnouncementQueue:
    """The groups of keys, with the queue of each and the keys that the directory may have from this node.

    held: asked for the current state at a key's turn. queue_max: changes, in keys. overflowed: changes were not
    queued since the last `clear_overflow`.
    """

    def __init__(self, held: Held, queue_max: int) -> None:
        self.groups = [Group() for _ in range(TAGS)]
        self.queued = 0  # changes: arrived, or in a group; not those under way
        self.overflowed = False
        self.overflows = 0
        self._held = held
        self._queue_max = queue_max
        self._arrived: deque[tuple[float, bytes, tuple[bytes, ...]]] = deque()
        self._parts: OrderedDict[bytes, int] = OrderedDict()

    @property
    def arrived(self) -> bool:
        """Whether `sort` has anything to do."""
        return bool(self._arrived)

    def changed(self, digest: bytes, keys: tuple[bytes, ...], now: float) -> bool:
        """Queue them; False: no room."""
        if self.queued + len(keys) > self._queue_max:
            self.overflowed = True
            self.overflows += 1
            return False
        self._arrived.append((now, digest, keys))
        self.queued += len(keys)
        return True

    def doubt(self, digest: bytes, keys: Iterable[bytes]) -> None:
        """The directory may have these from this node, announced or not."""
        for key in keys:
            self.groups[tag_of(key)].published.setdefault(digest, set()).add(key)

    def clear_overflow(self) -> bool:
        """Whether to start recovering overflowed changes now: half the queue is free.

        Not before, or a node that changes faster than it can announce would walk all the time.
        """
        if not self.overflowed or self.queued > self._queue_max // 2:
            return False
        self.overflowed = False
        for group in self.groups:
            group.stale = group.recount = True
        return True

    def announce_anew(self, *, forget: bool) -> list[Keys]:
        """Everything is to be walked. forget: nothing was announced; returns the previous record, to be freed."""
        forgotten: list[Keys] = []
        for group in self.groups:
            group.stale = True
            if forget:
                forgotten.append(group.published)
                group.published = {}
                group.recount = False
        if forget:
            self.overflowed = False  # nothing wrong can have been published yet
        return forgotten

    def sort(self) -> None:
        """Move some of the arrived changes into their groups."""
        room = SORT_KEYS
        while self._arrived and room > 0:
            since, digest, keys = self._arrived.popleft()
            if len(keys) > room:
                self._arrived.appendleft((since, digest, keys[room:]))
                keys = keys[:room]
            room -= len(keys)
            self.queued += self._add_changes(digest, keys, since) - len(keys)

    def _add_changes(self, digest: bytes, keys: Iterable[bytes], since: float | None) -> int:
        """How many of them were not queued yet."""
        groups = self.groups
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

    def take(self, groups: Iterable[Group], urgent: bool, limit: int) -> Batch | None:
        """Up to `limit` keys of one namespace out of these groups; None if there are none."""
        batch: Batch | None = None
        for group in groups:
            queues = group.changes if urgent else group.repairs
            if not queues:
                continue
            if batch is None:
                batch = Batch(next(iter(queues)), urgent)
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
                self.queued -= len(share)
                if group.since is not None and (batch.since is None or group.since < batch.since):
                    batch.since = group.since
                if not queues:
                    group.since = None
            else:
                group.repairing -= len(share)
            if batch.size == limit:
                break
        return batch

    def ask(self, batch: Batch) -> tuple[int, list[bytes], list[int]]:
        """The values to publish for a batch: parts, keys, masks. Records which keys the directory may have then."""
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

    def forget_withdrawn(self, batch: Batch) -> None:
        """The directory no longer has these from this node."""
        for key in batch.withdrawn:
            published = self.groups[tag_of(key)].published
            known = published.get(batch.digest)
            if known is not None:
                known.discard(key)
                if not known:
                    del published[batch.digest]

    def put_back(self, batch: Batch) -> None:
        """It was not sent."""
        batch.withdrawn.clear()
        for group, share in batch.shares:
            if batch.urgent:
                if group.since is None or (batch.since is not None and batch.since < group.since):
                    group.since = batch.since
                self.queued += self._add_changes(batch.digest, share, batch.since)
            else:
                self.add_repairs(group, batch.digest, share)

    @staticmethod
    def add_repairs(group: Group, digest: bytes, keys: Iterable[bytes]) -> None:
        """Queue the keys found by a walk."""
        queue = group.repairs.setdefault(digest, set())
        before = len(queue)
        queue.update(keys)
        group.repairing += len(queue) - before

    def repair(self, digest: bytes, keys: Iterable[bytes], wanted: Sequence[Group]) -> None:
        """Queue those of the keys that are of these groups."""
        groups = self.groups
        if len(wanted) == TAGS:
            split: dict[Group, list[bytes]] = {}
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
                self.add_repairs(group, digest, share)

    def masks(self, digest: bytes, keys: Sequence[bytes]) -> tuple[int, list[int]]:
        """See `Held.masks`."""
        return self._held.masks(digest, keys)

    def waits(self, digest: bytes, key: bytes) -> bool:
        """Whether it is still to be published, or was never."""
        group = self.groups[tag_of(key)]
        queued = key in group.changes.get(digest, ()) or key in group.repairs.get(digest, ())
        return queued or key not in group.published.get(digest, ())

    def missing(self, digest: bytes, keys: Sequence[bytes]) -> list[bytes]:
        """Which of them are not here."""
        parts, masks = self._held.masks(digest, keys)
        if not parts:
            return list(keys)
        return [key for key, mask in zip(keys, masks, strict=True) if not mask]

    def walk(self, cursor: int, count: int) -> tuple[list[tuple[bytes, list[bytes]]], int | None]:
        """See `Held.walk`."""
        return self._held.walk(cursor, count)

    @property
    def repairs_waiting(self) -> int:
        """Keys found by a walk that can be sent soon: without those of groups that are given up."""
        return sum(group.repairing for group in self.groups if not group.given_up)

    def stats(self, now: float, under_way: Iterable[Batch], *, walking: bool) -> AnnouncerStats:
        """What is queued. under_way: taken, and neither sent nor put back."""
        batches = list(under_way)
        urgent = [batch for batch in batches if batch.urgent]
        times = [group.since for group in self.groups if group.since is not None]
        times += [batch.since for batch in urgent if batch.since is not None]
        if self._arrived:
            times.append(self._arrived[0][0])
        queued = self.queued + sum(batch.size for batch in urgent)
        repairing = sum(group.repairing for group in self.groups)
        repairing += sum(batch.size for batch in batches if not batch.urgent)
        stale = sum(group.stale for group in self.groups)
        return AnnouncerStats(
            settled=not (queued or repairing or stale or walking or self.overflowed),
            queued=queued,
            lag_s=max(0.0, now - min(times)) if times else 0.0,
            repairing=repairing,
            stale_groups=stale,
            blocked_groups=sum(group.blocked for group in self.groups),
            announced=sum(len(keys) for g in self.groups for keys in g.published.values()),
            overflows=self.overflows,
        )

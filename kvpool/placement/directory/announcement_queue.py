"""Announcements to the directory: keys by group, changed or found by a walk. No I/O, no clock, no tasks.

Nothing is remembered of what was announced: an absent key is withdrawn whenever its turn comes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvpool.placement.key_groups import TAGS, tag_of
from kvpool.retry import Backoff
from kvpool.telemetry.cluster_stats import AnnouncerStats
from kvpool.types import DIGEST_BYTES, KEY_BYTES

BACKOFF_S, BACKOFF_S_MAX = 0.1, 2.0
SORT_KEYS = 1024  # at a time, before other tasks have their turn
ARRIVED_SEEN = 16 << 10  # arrived keys among which one is looked for
RECORD_BYTES = DIGEST_BYTES + KEY_BYTES
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


@dataclass(eq=False, slots=True)
class Group:
    """The keys of one tag. backoff: it is blocked, and tried alone after that."""

    changes: Keys = field(default_factory=dict)
    changed: int = 0  # how many
    later: bytearray = field(default_factory=bytearray)
    """Changes that found no room there, a digest and a key each."""
    overflowed: bool = False  # nor there
    since: float | None = None  # not later than the oldest of the changes
    repairs: Keys = field(default_factory=dict)
    repairing: int = 0  # how many
    mark: bytes | None = None  # under which it is announced; None: not read yet
    stale: bool = False  # to be walked
    backoff: Backoff = field(default_factory=lambda: Backoff(BACKOFF_S, BACKOFF_S_MAX))
    trying: bool = False

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
    withdrawn: int = 0


class AnnouncementQueue:
    """The groups of keys, and the queue of each.

    held: asked for the current state at a key's turn. queue_max: changes, in keys, of all groups; each has its
    share, so that those that cannot be sent leave the others room. later_max: the same for changes beyond that, which
    take 32 bytes each. Those beyond both are dropped: all held blocks of the group are walked when there is room
    again, and the directory's entries of evicted ones are withdrawn when somebody meets them.
    """

    def __init__(self, held: Held, queue_max: int, later_max: int) -> None:
        self.groups = [Group() for _ in range(TAGS)]
        self.under_way: list[Batch] = []  # taken, and neither sent nor put back
        self.overflows = 0
        self.held = held
        self._queue_max = queue_max
        self._group_max = max(1, queue_max // TAGS)
        self._later_max = max(1, later_max // TAGS) * RECORD_BYTES
        self._arrived: deque[tuple[float, bytes, tuple[bytes, ...]]] = deque()
        self._arriving = 0  # keys
        self._parts: OrderedDict[bytes, int] = OrderedDict()

    @property
    def arrived(self) -> bool:
        """Whether `sort` has anything to do."""
        return bool(self._arrived)

    @property
    def overflowed(self) -> bool:
        """Whether changes were dropped, and there was no room since."""
        return any(group.overflowed for group in self.groups)

    def changed(self, digest: bytes, keys: tuple[bytes, ...], now: float) -> None:
        """Queue them."""
        if self._arriving + len(keys) > self._queue_max:
            self._add_changes(digest, keys, now)
            return
        self._arrived.append((now, digest, keys))
        self._arriving += len(keys)

    def clear_overflow(self) -> None:
        """Groups that dropped changes are to be walked, once half of their room is free.

        Not before, or a node that changes faster than it can announce would walk all the time.
        """
        for group in self.groups:
            if group.overflowed and len(group.later) <= self._later_max // 2:
                group.overflowed = False
                group.stale = True

    def announce_anew(self, *, forget: bool) -> list[object]:
        """Everything is to be walked. forget: nothing was announced; returns what was queued, to be freed."""
        forgotten: list[object] = []
        for group in self.groups:
            group.stale = True
            if forget:
                forgotten += group.changes, group.repairs
                group.changes, group.changed, group.later = {}, 0, bytearray()
                group.repairs, group.repairing = {}, 0
                group.since, group.overflowed = None, False
        if forget:
            arrived = list(self._arrived)
            forgotten += (arrived[at : at + SORT_KEYS] for at in range(0, len(arrived), SORT_KEYS))
            self._arrived.clear()
            self._arriving = 0
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
            self._arriving -= len(keys)
            self._add_changes(digest, keys, since)

    def _add_changes(self, digest: bytes, keys: Iterable[bytes], since: float | None) -> None:
        groups, most = self.groups, self._group_max
        for key in keys:
            group = groups[tag_of(key)]
            queue = group.changes.get(digest)
            if queue is not None and key in queue:
                continue
            if group.since is None:
                group.since = since
            if group.changed >= most:
                self._add_later(group, digest + key)
                continue
            if queue is None:
                queue = group.changes[digest] = set()
            queue.add(key)
            group.changed += 1

    def _add_later(self, group: Group, record: bytes) -> None:
        if len(group.later) < self._later_max:
            group.later += record
        elif not group.overflowed:
            group.overflowed = True
            self.overflows += 1

    def _take_later(self, group: Group) -> None:
        """Some of the later changes are due now."""
        end = min(SORT_KEYS, self._group_max) * RECORD_BYTES
        records = bytes(group.later[:end])
        del group.later[:end]
        for at in range(0, len(records), RECORD_BYTES):
            digest, key = (
                records[at : at + DIGEST_BYTES],
                records[at + DIGEST_BYTES : at + RECORD_BYTES],
            )
            queue = group.changes.setdefault(digest, set())
            group.changed += key not in queue
            queue.add(key)

    def take(self, groups: Iterable[Group], urgent: bool, limit: int) -> Batch | None:
        """Up to `limit` keys of one namespace out of these groups; None if there are none."""
        batch: Batch | None = None
        for group in groups:
            if urgent and group.later and not group.changes:
                self._take_later(group)
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
                group.changed -= len(share)
                if group.since is not None and (batch.since is None or group.since < batch.since):
                    batch.since = group.since
                if not queues and not group.later:
                    group.since = None
            else:
                group.repairing -= len(share)
            if batch.size == limit:
                break
        return batch

    def ask(self, batch: Batch) -> tuple[int, list[bytes], list[int]]:
        """The values to publish for a batch: parts, keys, masks."""
        digest = batch.digest
        asked = [key for _, share in batch.shares for key in share]
        parts, masks = self.held.masks(digest, asked)
        if parts:
            self._note_parts(digest, parts)
        else:
            parts = self._parts.get(digest, 0)
            masks = [0] * len(asked)
            if not parts:
                return 0, [], []  # never announced
        batch.withdrawn = masks.count(0)
        return parts, asked, masks

    def _note_parts(self, digest: bytes, parts: int) -> None:
        self._parts[digest] = parts
        self._parts.move_to_end(digest)
        if len(self._parts) > NAMESPACES_MAX:
            self._parts.popitem(last=False)

    def put_back(self, batch: Batch) -> None:
        """It was not sent."""
        for group, share in batch.shares:
            if batch.urgent:
                if group.since is None or (batch.since is not None and batch.since < group.since):
                    group.since = batch.since
                self._add_changes(batch.digest, share, batch.since)
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

    def settled(self, digest: bytes, keys: Sequence[bytes]) -> list[bytes]:
        """Those of the keys of which the directory was told the current state, if that can be seen quickly."""
        if not keys or self._arriving > ARRIVED_SEEN:
            return []
        shares = [s for b in self.under_way if b.digest == digest for _, s in b.shares]
        shares += [list(some) for _, of, some in self._arrived if of == digest]
        unsettled = {key for share in shares for key in share}
        return [key for key in keys if key not in unsettled and not self._queued(digest, key)]

    def _queued(self, digest: bytes, key: bytes) -> bool:
        group = self.groups[tag_of(key)]
        return bool(
            group.later
            or key in group.changes.get(digest, ())
            or key in group.repairs.get(digest, ())
        )

    @property
    def repairs_waiting(self) -> int:
        """Keys found by a walk that can be sent soon: without those of groups that are given up."""
        return sum(group.repairing for group in self.groups if not group.given_up)

    def stats(self, now: float, *, walking: bool) -> AnnouncerStats:
        """How much is queued."""
        urgent = [batch for batch in self.under_way if batch.urgent]
        times = [group.since for group in self.groups if group.since is not None]
        times += [batch.since for batch in urgent if batch.since is not None]
        if self._arrived:
            times.append(self._arrived[0][0])
        queued = self._arriving + sum(batch.size for batch in urgent)
        queued += sum(g.changed + len(g.later) // RECORD_BYTES for g in self.groups)
        repairing = sum(group.repairing for group in self.groups)
        repairing += sum(batch.size for batch in self.under_way if not batch.urgent)
        stale = sum(group.stale for group in self.groups)
        return AnnouncerStats(
            settled=not (queued or repairing or stale or walking or self.overflowed),
            queued=queued,
            lag_s=max(0.0, now - min(times)) if times else 0.0,
            repairing=repairing,
            stale_groups=stale,
            blocked_groups=sum(group.blocked for group in self.groups),
            overflows=self.overflows,
        )

"""Membership on etcd: node records bound to leases, one watch, and the cluster's shared records.

Keys and their contents: `etcd_mirror.py`. A node has two keys under one lease, its name and its
incarnation, created in one transaction that requires both to be absent; so neither is ever held twice.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial
from typing import Any

import msgspec

from kvpool.errors import KvpoolError, Unavailable
from kvpool.placement.etcd import rpc_pb2 as rpc
from kvpool.placement.etcd.client import (
    EtcdClient,
    LeaseGone,
    absent,
    bound_to,
    delete,
    found,
    put,
    read,
    unchanged,
)
from kvpool.placement.etcd.settings import EtcdSettings
from kvpool.placement.etcd.watch import Follower
from kvpool.placement.membership.admission import check_config, check_parts, config_of, stale
from kvpool.placement.membership.base import Standing
from kvpool.placement.membership.etcd_lease import LeaseWatch, keep_lease
from kvpool.placement.membership.etcd_mirror import Mirror, Paths
from kvpool.placement.membership.etcd_records import SharedRecords, refusals_as_unavailable
from kvpool.placement.membership.etcd_rules import clash, hold_s, replaceable, spread_s
from kvpool.placement.membership.etcd_views import EtcdViews
from kvpool.placement.records import (
    ClusterConfig,
    NamespaceEntry,
    NodeRecord,
    NodeState,
    View,
    encode_record,
)
from kvpool.tasks import Tasks

log = logging.getLogger("kvpool.placement")

TTL_S = 5.0
CLASH_S = 3.0  # longer than its lease, for the record of a dead owner to go
CLASH_PAUSE_S = 0.3
GRACE_S = 3.0  # longer than a lease, for nodes to return after an outage of etcd
SAVE_PAUSE_S = 60.0  # after records could not be restored
NO_LEASE = 0


@dataclass(slots=True)
class _Member:
    """A life of this node: from `join` until it leaves, or its lease is lost.

    wanted: the record to be written, written: the last written, at `written_at`. revision: of the join.
    """

    lease: int
    watch: LeaseWatch
    revision: int
    written: NodeRecord
    wanted: NodeRecord
    written_at: float
    keeper: asyncio.Task[None] | None = None


def suspended_s() -> float:
    """For how long this machine was suspended since it was started: Linux's monotonic clock leaves that out."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)


@dataclass(eq=False)
class EtcdMembership:
    """See `kvpool.placement.membership.base.Membership`; times of `standing` are those of `clock`.

    suspended: seconds for which the machine was suspended. etcd counts them, and `clock` need not: a node that was
    asleep must not take its lease for a living one.
    secrets: of the cluster, the newest first; only proofs of them are stored. protocol: the supported wire protocol.
    ttl_s: how long a silent node lives; etcd takes whole seconds, at least 2.
    Close it even if `start` has failed.
    """

    START_S = 10.0
    LEAVE_S = 2.0
    """For each of the two steps of leaving."""

    settings: InitVar[EtcdSettings]
    cluster: InitVar[str]
    _: KW_ONLY
    secrets: Callable[[], tuple[bytes, ...]] = tuple
    protocol: int = 0
    ttl_s: float = TTL_S
    clock: Callable[[], float] = time.monotonic
    suspended: Callable[[], float] = suspended_s

    def __post_init__(self, settings: EtcdSettings, cluster: str) -> None:
        self._paths = Paths(cluster)
        self._client = EtcdClient(settings, clock=self.clock)
        self._follower = Follower(self._client, self._paths.root, self)
        self._mirror = Mirror(self._paths)
        self.outage = self._client.outage
        self._views = EtcdViews(self._mirror, self.clock)
        self.watch = self._views.watch
        self._own_config: Callable[[], ClusterConfig] = lambda: config_of(cluster, self.secrets())
        self._shared = SharedRecords(
            self._client, self._mirror, self._paths, self._own_config, self._views.told
        )
        self.use = self._shared.use
        self.delete_unused = self._shared.delete_unused
        self.count_hour = self._shared.count_hour
        self.bump_epoch = self._shared.bump_epoch
        self.configure = self._shared.configure
        self.set_drain = self._shared.set_drain
        self._member: _Member | None = None
        self._absent = Standing.OUT  # the standing while there is no `_member`
        self._joined_before = False
        # While this node writes its record: its key, and revision and lease of its last state in the watch.
        self._joining: bytes | None = None
        self._seen = (0, NO_LEASE)
        self._heard_at: float | None = None
        self._write_lock = asyncio.Lock()
        self._lost_watchers: list[Callable[[], None]] = []
        self._tasks = Tasks()
        self._saving = False
        self._save_at = -math.inf  # not before, after a failure

    # ---- the view -------------------------------------------------------------------------------------

    @property
    def view(self) -> View:
        """As it was told last."""
        return self._views.view

    @property
    def undecodable(self) -> int:
        return self._mirror.undecodable

    @property
    def connected(self) -> bool:
        """Whether etcd was heard of recently."""
        return self._heard_at is not None and self.clock() - self._heard_at <= self.ttl_s / 2

    def stats(self) -> dict[str, Any]:
        """For status pages; plain values."""
        return {
            "endpoint": self._client.endpoint,
            "connected": self.connected,
            "revision": self._follower.revision,
            "streams": self._follower.streams,
            "resets": self._follower.resets,
            "undecodable": self._mirror.undecodable,
        }

    async def start(self) -> None:
        await self._follower.read(self.START_S)
        await self._shared.agree(self.START_S)
        check_config(self._shared.config, self._own_config(), self.protocol)
        self._tasks.begin(self._follower.run())

    def on_lost(self, lost: Callable[[], None]) -> None:
        self._lost_watchers.append(lost)

    # ---- what the watch says (`Sink`) -----------------------------------------------------------------

    def heard(self) -> None:
        """After a silence in which leases may have ended, nodes get the time to return."""
        now = self.clock()
        if self._heard_at is not None and not self.connected:
            self._mirror.forgive(now + self.ttl_s + GRACE_S)
        self._heard_at = now

    def reset(self, kvs: list[Any], revision: int) -> None:
        self._views.told(self._mirror.reset(kvs, revision, self.clock()))
        if self._joining is not None:
            leases = [kv.lease for kv in kvs if kv.key == self._joining]
            self._seen = revision, leases[0] if leases else NO_LEASE
        member = self._member
        if member is not None and revision >= member.revision:
            own = self._paths.node(member.written.node)
            if not any(kv.key == own and kv.lease == member.lease for kv in kvs):
                self._lose(member, "its record is not in etcd any more")
        self._save_at = -math.inf
        self._save_if_lost(
            config_lost=self.view.config is not None and not self._mirror.config_seen
        )

    def _save_if_lost(self, *, config_lost: bool = False) -> None:
        lost = self._mirror.incomplete or config_lost
        if lost and not self._saving and self.clock() >= self._save_at:
            self._saving = True
            self._tasks.begin(self._save_again())

    def changed(self, events: list[Any], revision: int) -> None:
        self._views.heard(self._mirror.changed(events, revision, self.clock()))
        self._save_if_lost()
        for event in events:
            if event.kv.key == self._joining:
                gone = event.type == rpc.Event.DELETE
                self._seen = event.kv.mod_revision, NO_LEASE if gone else event.kv.lease
        member = self._member
        if member is None:
            return
        own = self._paths.node(member.written.node)
        for event in events:
            kv = event.kv
            if kv.key != own or kv.mod_revision <= member.revision:
                continue
            if event.type == rpc.Event.DELETE:
                self._lose(member, "its record was deleted")
                return
            if kv.lease != member.lease:
                self._lose(member, "another daemon has taken its name")
                return

    async def _save_again(self) -> None:
        """Etcd has lost its data: restore the cluster's epochs from this node."""
        log.warning("etcd lacks records of this cluster as they were: they are restored")
        try:
            await self._shared.save_again()
        except KvpoolError as error:
            self._save_at = self.clock() + SAVE_PAUSE_S
            log.warning("not all records could be restored, which is tried again: %s", error)
        finally:
            self._saving = False

    # ---- this node ------------------------------------------------------------------------------------

    async def join(self, record: NodeRecord) -> None:
        assert self._member is None, "leave first"
        config = self.view.config
        assert config is not None, "start first"
        check_config(config, self._own_config(), self.protocol)
        begun = self.clock() + self.suspended()
        with refusals_as_unavailable():
            lease = await self._client.grant(max(1, math.ceil(self.ttl_s)))
        self._joining, self._seen = self._paths.node(record.node), (0, NO_LEASE)
        try:
            with refusals_as_unavailable():
                revision = await self._enter(record, lease)
        except KvpoolError:
            await self._revoke(lease)
            raise
        finally:
            self._joining = None
        member = _Member(
            lease=lease,
            watch=LeaseWatch(self.ttl_s, begun),
            revision=revision,
            written=record,
            wanted=record,
            written_at=self.clock(),
        )
        self._member = member
        ended = [] if self._joined_before else [self._paths.drain(record.node)]
        self._joined_before = True
        member.keeper = self._tasks.begin(self._keep(member))
        node = {self._paths.node(record.node): encode_record(record)}
        self._views.told(self._mirror.wrote(revision, node, ended))
        # The watch may have been faster than the answer.
        seen_at, holder = self._seen
        if seen_at > revision and holder != lease:
            self._lose(member, "another daemon has taken its name")

    async def _enter(self, record: NodeRecord, lease: int) -> int:
        """Write the node's keys; returns the revision. Waits only for a dead owner's lease."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.ttl_s + CLASH_S
        node = self._paths.node(record.node)
        incarnation = self._paths.incarnation(record.incarnation)
        writes = [
            put(node, encode_record(record), lease),
            put(incarnation, record.node.encode(), lease),
        ]
        if not self._joined_before:  # a restart ends a drain; a lease that was lost does not
            writes.append(delete(self._paths.drain(record.node)))
        while True:
            answer = await self._client.txn(
                [absent(node), absent(incarnation)],
                writes,
                [read(node), read(incarnation)],
                f"joining as {record.node!r}",
            )
            if answer.succeeded:
                return int(answer.header.revision)
            holder, user = found(answer, 0), found(answer, 1)
            if holder is not None and holder.lease == lease:
                return int(holder.mod_revision)  # an earlier try, whose answer was lost
            if holder is not None and (old := replaceable(holder, user, record)) is not None:
                compares = [
                    unchanged(node, holder.mod_revision),
                    unchanged(incarnation, 0 if user is None else user.mod_revision),
                ]
                more = []
                if old.incarnation != record.incarnation:
                    more.append(delete(self._paths.incarnation(old.incarnation)))
                answer = await self._client.txn(
                    compares, writes + more, [], f"taking over the record of {record.node!r}"
                )
                if answer.succeeded:
                    return int(answer.header.revision)
            if loop.time() >= deadline:
                raise clash(record, holder, user)
            await asyncio.sleep(CLASH_PAUSE_S)
            if not await self._client.keep_alive(lease):
                raise Unavailable(f"joining as {record.node!r}: the lease ended meanwhile")

    async def _keep(self, member: _Member) -> None:
        async def write() -> None:
            await self._write(member)
            await self._shared.renew_proof()

        await keep_lease(
            member.watch,
            self.ttl_s,
            lambda: self.clock() + self.suspended(),
            partial(self._client.keep_alive, member.lease),
            write,
        )
        self._lose(member, "etcd says that its lease has ended")

    def _lose(self, member: _Member, why: str) -> None:
        if member is not self._member:
            return
        self._member, self._absent = None, Standing.LOST
        if member.keeper is not None and member.keeper is not asyncio.current_task():
            member.keeper.cancel()
        log.warning(
            "node %s is no longer a member (incarnation %s): %s",
            member.written.node,
            member.written.incarnation,
            why,
            extra={"node": member.written.node},
        )
        for lost in self._lost_watchers:
            lost()

    async def update(self, record: NodeRecord) -> None:
        member = self._member
        if member is None:
            raise Unavailable(f"node {record.node!r} is not a member: there is no record to update")
        old = member.written
        assert (record.node, record.incarnation) == (old.node, old.incarnation), "join instead"
        member.wanted = record
        with refusals_as_unavailable():
            await self._write(member)

    async def _write(self, member: _Member) -> None:
        """Write the wanted record, unless it differs too little to be urgent."""
        async with self._write_lock:
            record = member.wanted
            hold = hold_s(member.written, record)
            if hold:
                hold = max(hold, spread_s(self.view.nodes.values(), record))
            if self.clock() < member.written_at + hold:
                return
            try:
                await self._put(member, record, f"updating the record of {record.node!r}")
            except LeaseGone:
                self._lose(member, "etcd has neither its lease nor its record")
                raise

    async def _put(
        self, member: _Member, record: NodeRecord, what: str, deadline_s: float | None = None
    ) -> None:
        """Write a member's record. Raises `LeaseGone` if it is not this member's any more."""
        key, value = self._paths.node(record.node), encode_record(record)
        answer = await self._client.txn(
            [bound_to(key, member.lease)], [put(key, value, member.lease)], [], what, deadline_s
        )
        if not answer.succeeded:
            raise LeaseGone(f"the record of {record.node!r} belongs to another incarnation")
        member.written, member.written_at = record, self.clock()
        self._views.told(self._mirror.wrote(answer.header.revision, {key: value}))

    async def leave(self) -> None:
        member = self._member
        self._absent = Standing.OUT
        if member is None:
            return
        self._member = None
        if member.keeper is not None:
            member.keeper.cancel()
        record = msgspec.structs.replace(member.written, state=NodeState.GONE)
        try:
            # First, so that the end of the lease is not taken for a node that may return.
            await self._put(member, record, "leaving", self.LEAVE_S)
        except KvpoolError as error:
            log.info(
                "etcd was not notified that node %s leaves: %s",
                record.node,
                error,
                extra={"node": record.node},
            )
        await self._revoke(member.lease)

    async def _revoke(self, lease: int) -> None:
        try:
            await self._client.revoke(lease, self.LEAVE_S)
        except KvpoolError as error:
            log.info("a lease could not be revoked, and lasts %g s longer: %s", self.ttl_s, error)

    def standing(self, now: float) -> Standing:
        member = self._member
        return self._absent if member is None else member.watch.standing(now + self.suspended())

    async def lead(self, chore: str) -> bool:
        member = self._member
        if member is None or self.standing(self.clock()) is not Standing.MEMBER:
            return False
        leader = self._mirror.chores.get(chore)
        if leader is not None:
            return leader == member.lease
        key = self._paths.chore(chore)
        name = member.written.node.encode()
        try:
            answer = await self._client.txn(
                [absent(key)], [put(key, name, member.lease)], [read(key)], f"the chore {chore!r}"
            )
        except KvpoolError as error:
            log.debug("no leader for the task %s: %s", chore, error)
            return False
        if answer.succeeded:
            return member is self._member
        kv = found(answer, 0)
        return kv is not None and kv.lease == member.lease and member is self._member

    # ---- what all share -------------------------------------------------------------------------------

    async def register(self, entry: NamespaceEntry) -> NamespaceEntry:
        known = self.view.namespaces.get((entry.tenant, entry.digest))
        if known is not None and not self.connected:
            stored = known  # while etcd is unavailable, known values stay
        else:
            try:
                stored = await self._shared.create_or_read(entry)
                if stale(stored, self.view.clock):
                    stored = await self._shared.use_or_create(entry)
            except Unavailable:
                if known is None:
                    raise
                stored = known
        check_parts(stored, entry)
        return stored

    # ---- the end --------------------------------------------------------------------------------------

    async def close(self) -> None:
        self._views.close()
        await self.leave()
        await self._tasks.end()
        await self._client.close()

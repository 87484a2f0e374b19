"""Handlers of clients' requests: one method a message. Event loop only."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import msgspec

from kvpool.config import DaemonConfig
from kvpool.daemon.cluster.engine_registry import EngineRegistry, describe
from kvpool.daemon.cluster.member import ClusterMember
from kvpool.daemon.cluster.replication import Replication
from kvpool.daemon.core.accounts import (
    DRAINING,
    Accounts,
    PartRefused,
    check_request,
    of_kept,
    why_refused,
)
from kvpool.daemon.core.blocks import OWN, Holder, NamespaceState, Origin, PartTable, Requests
from kvpool.daemon.core.commit_waiters import DROPPED_S
from kvpool.daemon.core.misses import Stage
from kvpool.daemon.core.node import Node
from kvpool.daemon.core.requests import check_counts, parse_parts, parse_wish, rows
from kvpool.daemon.fetch.fetcher import BlockFetcher, Pulled
from kvpool.daemon.fetch.prefix_stream import PrefixStreams
from kvpool.daemon.ops.commands import KEYS_BYTES_MAX, asking_others
from kvpool.daemon.ops.hot_prefixes import HotPrefixes
from kvpool.daemon.ops.intents import Intents, parse_wanted
from kvpool.daemon.ops.miss_reasons import MissReasons
from kvpool.daemon.ops.operators import Operators
from kvpool.daemon.ops.pins import pin_in_all_tiers
from kvpool.daemon.ops.prefixes import prefixes
from kvpool.daemon.ops.presence import Presences
from kvpool.daemon.ops.removals import Removals
from kvpool.daemon.ops.session_turns import SessionTurns
from kvpool.daemon.ops.stats_gatherer import StatsGatherer
from kvpool.daemon.server.answers import describe_lease
from kvpool.daemon.server.loop_shares import LoopShares
from kvpool.daemon.server.tracing import TRACED, traced
from kvpool.daemon.tiers.device_tier import DeviceTier
from kvpool.daemon.tiers.engine_caches import Engines
from kvpool.daemon.tiers.object_tier import ObjectTier
from kvpool.daemon.tiers.ssd_tier import SsdTier
from kvpool.errors import (
    InvalidRequest,
    KvpoolError,
    LimitExceeded,
    PoolFull,
    ProtocolError,
    UnknownReservation,
)
from kvpool.placement.records import NamespaceSettings, NodeState
from kvpool.telemetry.spans import Spans
from kvpool.types import KEY_BYTES, NO_PARENT, Recompute, split_keys
from kvpool.wire import client as client_wire
from kvpool.wire import frame
from kvpool.wire import operator as operator_wire
from kvpool.wire.faults import Faults

EXPIRY_TICK_S = 0.02  # leases end at most this much after their deadline
LABELS_MAX = 4096  # of requests, in one that reserves: each may be a receipt
BESIDE_S = 0.05  # the longest wait of a removal for what others know of the keys beside it
_INDIFFERENT_TO_RELEASES = {
    client_wire.Acquire,
    client_wire.Match,
    client_wire.Present,
    client_wire.Join,
    client_wire.Release,
}
log = logging.getLogger("kvpool.daemon")

_NOTHING_LEASED = client_wire.Leased("", 0, 0.0, [])


class ClientRequests:
    """Answers requests. Work that need not precede the answer is done soon after it: see `settle_soon`."""

    def __init__(
        self,
        config: DaemonConfig,
        node: Node,
        cluster: ClusterMember,
        ssd: SsdTier,
        objects: ObjectTier,
        device: DeviceTier | None,
        fetcher: BlockFetcher,
        streams: PrefixStreams,
        replication: Replication,
        engines: Engines,
        registry: EngineRegistry,
        presences: Presences,
        removals: Removals,
        sessions: SessionTurns,
        intents: Intents,
        operators: Operators,
        stats: StatsGatherer,
        hot_prefixes: HotPrefixes,
        miss_reasons: MissReasons,
        accounts: Accounts,
        may_free: Callable[[NamespaceState], bool],
        spans: Spans,
        loop_shares: LoopShares | None,
        faults: Faults,
        clock: Callable[[], float],
    ) -> None:
        """may_free: whether nothing but memory and clients could need a namespace. loop_shares: as for
        `ClientConnections`. faults: takes the unexpected errors of requests from whoever calls `handle`.
        """
        self.faults = faults
        self._loop_shares = loop_shares
        self._may_free = may_free
        self._config = config
        self._node = node
        self._cluster = cluster
        self._ssd = ssd
        self._objects = objects
        self._device = device
        self._fetcher = fetcher
        self._streams = streams
        self._replication = replication
        self._engines = engines
        self._registry = registry
        self._presences = presences
        self._removals = removals
        self._sessions = sessions
        self._intents = intents
        self._operators = operators
        self._stats_of = stats
        self._hot_prefixes = hot_prefixes
        self._miss_reasons = miss_reasons
        self._accounts = accounts
        self._clock = clock
        self._expiry: asyncio.TimerHandle | None = None
        self._expiry_due = math.inf
        self._settling = False
        self._settled_for: Counter[str] = Counter()  # requests since then, by whose they are
        self._released: list[tuple[Holder, str]] = []
        self._asked_grants: list[tuple[Holder, NamespaceState, int, int]] = []
        self._handlers: dict[type, Callable[[Holder, Any], Any]] = {
            client_wire.OpenNamespace: self._open_namespace,
            client_wire.Reserve: self._reserve,
            client_wire.Commit: self._commit,
            client_wire.Abort: self._abort,
            client_wire.Acquire: self._acquire,
            client_wire.Join: self._join,
            client_wire.CorruptSlots: self._corrupt_slots,
            client_wire.Release: self._release,
            client_wire.Match: self._match,
            client_wire.Remove: self._remove,
            client_wire.Pin: self._pin,
            client_wire.Stats: self._stats,
            client_wire.Pull: self._pull,
            client_wire.Grant: self._grant,
            client_wire.Store: self._store,
            client_wire.GiveBack: self._give_back,
            client_wire.Reset: self._reset,
            client_wire.FollowEvents: self._follow_events,
            client_wire.Follow: self._follow,
            client_wire.Dropped: self._dropped,
            client_wire.CloseNamespace: self._close_namespace,
            client_wire.AnnounceEngine: self._announce_engine,
            client_wire.Engines: self._describe_engines,
            client_wire.Prefixes: self._prefixes,
            client_wire.WhyMissing: self._why_missing,
            client_wire.Present: self._present,
            client_wire.ClearNamespace: self._clear,
            client_wire.SessionTurn: self._session_turn,
            client_wire.EndSessionOn: self._end_session,
            client_wire.EndRequest: self._end_request,
            client_wire.Intend: self._intend,
        }
        for kind in operators.requests:
            self._handlers[kind] = operators.bare
        self._handlers[operator_wire.OnNode] = operators.on_node
        if spans.on:
            for kind, name in TRACED.items():
                self._handlers[kind] = traced(spans, name, self._handlers[kind])

    def close(self) -> None:
        """Stop checking leases."""
        if self._expiry is not None:
            self._expiry.cancel()

    def handle(self, holder: Holder, message: frame.Message) -> Any:
        """Return the answer to one request, or a coroutine that returns it. Raises `KvpoolError`, and unexpected errors,
        which are for `faults`.
        """
        handler = self._handlers.get(type(message))
        if handler is None:
            raise ProtocolError(
                f"a {type(message).__name__} is only allowed at the start of a connection"
            )
        if self._released and type(message) not in _INDIFFERENT_TO_RELEASES:
            self._release_now()
        return handler(holder, message)

    def _namespace(self, holder: Holder, number: int, keys: bytes) -> NamespaceState:
        if len(keys) > KEYS_BYTES_MAX:
            raise LimitExceeded(
                f"{len(keys) // 16} keys in one request; the limit is {frame.KEYS_MAX}"
            )
        namespace = self._node.namespaces.by_number(holder.tenant, number)
        self._engines.saw(namespace, keys)
        return namespace

    def _namespaces(
        self, holder: Holder, numbers: Sequence[int], keys: bytes, beside: bytes
    ) -> list[NamespaceState]:
        """Of a request for the same keys in each of them, and for further ones in the first. One that is unknown
        refuses the whole request.
        """
        check_counts(len(numbers), keys, beside)
        return [self._namespace(holder, number, keys) for number in numbers]

    def _opened(self, holder: Holder, number: int) -> NamespaceState:
        """One that stays in use: this client may be a new one to the daemon, after all its connections had closed."""
        namespace = self._node.namespaces.by_number(holder.tenant, number)
        self._node.namespaces.opened(holder, namespace)
        return namespace

    def _open_namespace(
        self, holder: Holder, m: client_wire.OpenNamespace
    ) -> Coroutine[Any, Any, client_wire.Opened]:
        specs, wish = parse_parts(m.digest, m.fields, m.parts), parse_wish(m)
        namespace = self._node.namespaces.open(
            holder.tenant, m.digest, m.fields, specs, may_free=self._may_free
        )
        self._node.namespaces.opened(holder, namespace)
        return self._agree(namespace, wish, m.generation)

    async def _agree(
        self, namespace: NamespaceState, wish: NamespaceSettings, generation: int
    ) -> client_wire.Opened:
        if self._config.join:
            known = await self._cluster.namespaces.register(namespace, wish)
        else:
            known = await self._cluster.namespaces.fill_in(namespace, wish)
        return await self._cluster.namespaces.opened(known, generation)

    def _check_open(self) -> None:
        if self._cluster.state is not NodeState.SERVING:
            raise PoolFull(
                f"node {self._config.node} is {self._cluster.state}: it stores no new blocks. "
                f"`kvpool drain {self._config.node} --cancel` cancels that"
            )

    def _check_stores(
        self, namespace: NamespaceState, parts: Sequence[int], count: int, requests: Requests
    ) -> None:
        """As `_check_open`, for so many blocks of each part."""
        try:
            self._check_open()
        except PoolFull:
            draining = [PartRefused(part, DRAINING) for part in parts]
            self._accounts.refused(namespace, draining, count, requests)
            raise

    def _slots_for(
        self,
        holder: Holder,
        ticket: int,
        requests: Requests,
        reserve: Callable[[], tuple[int, bytes]],
    ) -> tuple[int, bytes]:
        try:
            try:
                stride, found = reserve()
            except PoolFull:
                # Leases may have ended since the clock was last read.
                self._node.leases.expire(self._clock())
                stride, found = reserve()
        except KvpoolError as error:
            if isinstance(error, (PoolFull, LimitExceeded)):
                self._node.counters.refused_full += 1
            raise
        if requests and (reservation := holder.reservations.get(ticket)) is not None:
            reservation.requests = requests
        return stride, found

    def _refused(
        self,
        namespace: NamespaceState,
        part: int,
        count: int,
        requests: Requests,
        error: KvpoolError,
    ) -> None:
        """None of so many blocks of one part is taken."""
        self._accounts.refused(namespace, [_part_refused(namespace, part, error)], count, requests)

    def _reserve(self, holder: Holder, m: client_wire.Reserve) -> client_wire.Reserved:
        """Without space for a part, its rows are missing; without any for all parts, or with any other error, nothing is
        reserved.
        """
        namespace = self._namespace(holder, m.ns, m.keys)
        keys = split_keys(m.keys)
        before = _parents(m.parents, m.keys, keys)
        if len(m.tickets) != len(m.parts):
            raise InvalidRequest(
                f"{len(m.parts)} parts with {len(m.tickets)} tickets: one each is required"
            )
        if len(keys) * len(m.parts) > frame.KEYS_MAX:
            raise LimitExceeded(
                f"{len(keys)} keys in {len(m.parts)} parts in one request; the limit is {frame.KEYS_MAX} together"
            )
        requests = _requests(m.requests, len(keys))
        self._check_stores(namespace, m.parts, len(keys), requests)
        answer = client_wire.Reserved([], [])
        refused: list[PartRefused] = []
        full: KvpoolError | None = None
        most = 0  # of the keys, that some part takes
        puts = self._node.puts
        for part, ticket in zip(m.parts, m.tickets, strict=True):
            reserve = partial(puts.reserve, holder, namespace, part, ticket, keys, parents=before)
            why: KvpoolError | None = None
            try:
                stride, found = self._slots_for(holder, ticket, requests, reserve)
            except (PoolFull, LimitExceeded) as error:
                stride, found, why = namespace.table(part).stride, b"", error
                full = full or error
            except KvpoolError as error:
                for reserved in m.tickets[: len(answer.rows)]:
                    puts.abort(holder, reserved)
                all_parts = [_part_refused(namespace, each, error) for each in m.parts]
                self._accounts.refused(namespace, all_parts, len(keys), requests)
                raise
            taken = len(found) // 4
            most = max(most, taken)
            if taken < len(keys):
                refused.append(_part_refused(namespace, part, why, taken))
            answer.strides.append(stride)
            answer.rows.append(found)
        if refused:
            self._accounts.refused(namespace, refused, len(keys), requests, most)
        if full is not None and not most:
            raise full
        return answer

    def _commit(self, holder: Holder, m: client_wire.Commit) -> client_wire.Committed:
        """Each by itself, in order: one that was settled before is told, and keeps none of the others."""
        if len(m.tickets) != len(m.checksums):
            raise InvalidRequest(
                f"{len(m.tickets)} tickets with {len(m.checksums)} checksums: one each is required"
            )
        stored = []
        for ticket, checksums in zip(m.tickets, m.checksums, strict=True):
            try:
                stored.append(self._stored(holder, ticket, checksums, m.replicas))
            except UnknownReservation:
                stored.append(-1)
        return client_wire.Committed(stored)

    def _stored(self, holder: Holder, ticket: int, checksums: bytes, replicas: int) -> int:
        """Commit a reservation, and have its blocks copied to where they are wanted. How many are new."""
        origin = Origin(replicas=replicas) if replicas else OWN
        reservation = holder.reservations.get(ticket)
        committed: Sequence[int] = ()  # which of the requested keys, where somebody wants to know
        if reservation is not None and reservation.requests:
            committed = reservation.indices
        stored = self._node.puts.commit(holder, ticket, checksums, origin=origin)
        if stored and reservation is not None:
            requests: Requests = ()
            if committed:
                if reservation.new is not None:  # others stored the rest of them
                    committed = [committed[at] for at in reservation.new]
                requests = of_kept(reservation.requests, sorted(committed))
            namespace, part = reservation.table.namespace, reservation.table.part
            self._count_put(reservation.table, stored, requests)
            self._miss_reasons.put(reservation.table, reservation.keys)
            self._replication.wish(namespace, reservation.keys, replicas)
            self._ssd.stored(namespace, part, lambda: reservation.keys)
        return stored

    def _count_put(self, table: PartTable, new: int, requests: Requests) -> None:
        """A client has put this many new blocks."""
        traffic = table.namespace.tenant.traffic
        traffic.put_parts += new
        traffic.put_bytes += new * table.spec.nbytes
        self._accounts.written(table, new, requests)

    def _grant(self, holder: Holder, m: client_wire.Grant) -> client_wire.Granted:
        namespace = self._node.namespaces.by_number(holder.tenant, m.ns)
        count = max(0, min(m.count, frame.KEYS_MAX))
        self._check_stores(namespace, [m.part], count, ())
        try:
            granted = self._grant_prepared(holder, namespace, m.part, count)
        except KvpoolError as error:
            self._refused(namespace, m.part, count, (), error)
            raise
        return client_wire.Granted(namespace.tables[m.part].stride, frame.pack_rows(granted))

    def _grant_prepared(
        self, holder: Holder, namespace: NamespaceState, part: int, count: int
    ) -> list[int]:
        """As `Grants.grant`; rows prepared for its next answer come first: they count against its limit already."""
        stride = namespace.table(part).stride
        granted = holder.granted.get(stride, set())
        prepared = [row for row in holder.ready.get(stride, ()) if row in granted]
        rows = prepared[:count]
        if len(rows) < count:
            rows += self._node.grants.grant(holder, namespace, part, count - len(rows))
        if stride in holder.ready:
            holder.ready[stride] = prepared[count:]
        return rows

    def _store(self, holder: Holder, m: client_wire.Store) -> client_wire.Stored:
        namespace = self._namespace(holder, m.ns, m.keys)
        origin = Origin(replicas=m.replicas) if m.replicas else OWN
        keys = split_keys(m.keys)
        requests = [(check_request(m.request), len(keys))] if m.request else ()
        self._check_stores(namespace, [m.part], len(keys), requests)
        try:
            new, unused = self._node.grants.store(
                holder,
                namespace,
                m.part,
                rows(m.rows),
                keys,
                m.checksums,
                _parents(m.parents, m.keys, keys),
                origin,
            )
        except KvpoolError as error:
            self._refused(namespace, m.part, len(keys), requests, error)
            raise
        if new and (m.replicas or namespace.settings.replicas) > 1:
            self._replication.wish(namespace, split_keys(m.keys), m.replicas)
        if new:
            self._count_put(namespace.tables[m.part], new, requests)
            self._miss_reasons.put(namespace.tables[m.part], m.keys)
            self._ssd.stored(namespace, m.part, lambda: split_keys(m.keys))
        fresh: list[int] = []
        if m.count > 0:
            # Work prepared after the last answer; this one's is done after this answer. What had no room then, within
            # the holder's limit, may have it now that its rows are stored: to be asked for them takes longer.
            stride, count = namespace.tables[m.part].stride, min(m.count, frame.KEYS_MAX)
            prepared = holder.ready.get(stride)
            if prepared is not None:
                most = max(count, len(prepared))
                fresh = self._grant_prepared(holder, namespace, m.part, most)
            self._asked_grants.append((holder, namespace, m.part, count))
        return client_wire.Stored(new, frame.pack_rows(unused), frame.pack_rows(fresh))

    def _give_back(self, holder: Holder, m: client_wire.GiveBack) -> frame.Done:
        if m.stride:
            self._node.grants.give_back(holder, m.stride, rows(m.rows))
        else:
            self._node.grants.give_all_back(holder)
        return frame.Done()

    def _abort(self, holder: Holder, m: client_wire.Abort) -> frame.Done:
        for ticket in m.tickets:
            self._node.puts.abort(holder, ticket)
        return frame.Done(len(m.tickets))

    def _acquire(
        self, holder: Holder, m: client_wire.Acquire
    ) -> client_wire.Leased | Coroutine[Any, Any, client_wire.Leased]:
        namespace = self._namespace(holder, m.ns, m.keys)
        asked_at = self._clock()
        if m.scattered and (m.life or len(m.parts) != 1):
            raise InvalidRequest(
                "a scattered acquire must name exactly one part, and cannot use device memory"
            )
        if m.request:
            check_request(m.request)
        keys = split_keys(m.keys)
        if m.wait_s > 0 and self._fetcher.active:
            here = self._here(namespace, m, keys)
            if here < len(keys):
                return self._acquire_with_pull(holder, namespace, m, keys, asked_at, here)
        return self._acquire_now(holder, namespace, m, keys, asked_at)

    def _here(
        self, namespace: NamespaceState, m: client_wire.Acquire, keys: Sequence[bytes]
    ) -> int:
        """How many of the requested blocks are where their reader reads them."""
        if m.scattered:
            return self._node.leases.contains(namespace, m.parts[0], keys).count(1)
        direct = self._direct(m) is not None
        return self._fetcher.match(namespace, m.parts, keys, direct=direct)

    def _direct(self, m: client_wire.Acquire | client_wire.Pull) -> DeviceTier | None:
        """The spare device memory, if the client is attached to it."""
        device = self._device
        return device if device is not None and m.life and m.life == device.life else None

    def _acquire_now(
        self,
        holder: Holder,
        namespace: NamespaceState,
        m: client_wire.Acquire,
        keys: Sequence[bytes],
        asked_at: float,
        here: int = frame.KEYS_MAX,
        pulled: Pulled | None = None,
    ) -> client_wire.Leased:
        """here: the most blocks that could have been leased without waiting. pulled: what a wait for others was for."""
        now = self._clock()
        counters, before = self._node.counters, self._node.counters.leased_bytes
        direct = self._direct(m)
        if direct is not None:
            lease = direct.acquire(holder, namespace, m.parts, keys, m.lease_s, now)
        else:
            lease = self._node.leases.acquire(
                holder,
                namespace,
                m.parts,
                keys,
                m.lease_s,
                now,
                scattered=m.scattered,
            )
        traffic = holder.tenant.traffic
        found = 0 if lease is None else lease.blocks
        traffic.reads.add(len(keys), found, here)
        namespace.reads.add(len(keys), found, here)
        if m.scattered:
            self._miss_reasons.read_each(namespace, m.parts[0], m.keys, keys, found)
        else:
            stage = Stage.AGAIN if m.wait_s > 0 else Stage.HERE
            self._miss_reasons.read(namespace, m.parts, m.keys, keys, found, stage, pulled)
        if lease is None:
            return _NOTHING_LEASED
        traffic.read_bytes += counters.leased_bytes - before
        if lease.beside is not None:
            traffic.device_read_bytes += lease.beside.nbytes
        lease.request, lease.unread = m.request, m.for_others
        if not m.for_others:
            self._accounts.read(lease)
        if lease.deadline is not None:
            self._expire_by(lease.deadline, now)
        if self._device is not None:
            self._device.was_read(lease)
        if not m.scattered:
            self._hot_prefixes.read(namespace, m.keys, lease.blocks)
        return describe_lease(
            *(lease, lease.parts, asked_at, keys if m.scattered else None), checksums=m.verify
        )

    async def _acquire_with_pull(
        self,
        holder: Holder,
        namespace: NamespaceState,
        m: client_wire.Acquire,
        keys: Sequence[bytes],
        asked_at: float,
        here: int,
    ) -> client_wire.Leased:
        wait_s = min(m.wait_s, self._config.lease_s_max)
        pulled = None
        if m.scattered:
            await self._fetcher.pull_each(namespace, m.parts, keys, wait_s)
        else:
            pulled = await self._fetcher.pull(
                namespace,
                m.parts,
                keys,
                here,
                wait_s,
                _recompute(m),
                direct=self._direct(m) is not None,
            )
        self._fetcher.waited(self._clock() - asked_at)
        return self._acquire_now(holder, namespace, m, keys, asked_at, here, pulled)

    def _join(self, holder: Holder, m: client_wire.Join) -> client_wire.Leased:
        if len(set(m.parts)) != len(m.parts):
            raise InvalidRequest("a part is named twice")
        now = self._clock()
        lease = self._node.leases.join(holder, m.token, now)
        if lease is None:
            return _NOTHING_LEASED
        try:
            answer = describe_lease(lease, m.parts or lease.parts, now, None, checksums=m.verify)
        except InvalidRequest:
            self._node.leases.release(holder, m.token)
            raise
        if lease.unread:
            lease.unread = False
            self._accounts.read(lease)
        return answer

    def _corrupt_slots(self, holder: Holder, m: client_wire.CorruptSlots) -> frame.Done:
        """A client's word is enough: it may remove its tenant's blocks anyway."""
        lease = holder.leases.get(m.token)
        if lease is None or m.part not in lease.parts:
            return frame.Done(0)
        wanted = set(rows(m.rows))
        _, blocks = lease.parts[m.part]
        found = [block for block in blocks if block.row in wanted and not block.gone]
        for block in found:
            self._node.removal.drop_corrupt(block.table.namespace, m.part, block.key)
        if found:
            log.warning(
                "client %s of tenant %s found %d blocks in memory that do not match their checksums: dropped",
                holder.name,
                holder.tenant.name,
                len(found),
            )
        return frame.Done(len(found))

    def _release(self, holder: Holder, m: client_wire.Release) -> frame.Done:
        # Not waited for: done when the answers of this round are written.
        self._released += [(holder, token) for token in m.tokens]
        return frame.Done(len(m.tokens))

    def _release_now(self) -> None:
        released, self._released = self._released, []
        for holder, token in released:
            self._node.leases.release(holder, token)

    def _match(self, holder: Holder, m: client_wire.Match) -> frame.Done:
        keys = split_keys(m.keys)
        found = self._node.leases.match(self._namespace(holder, m.ns, m.keys), m.parts, keys)
        matches = holder.tenant.traffic.matches  # not by `add`: this is the hottest request
        matches.requests += 1
        matches.local += found
        matches.missed += len(keys) - found
        return frame.Done(found)

    def _present(
        self, holder: Holder, m: client_wire.Present
    ) -> frame.Bytes | Coroutine[Any, Any, frame.Bytes]:
        check_counts(len(m.namespaces), m.keys, m.beside)
        namespaces = [self._namespace(holder, m.namespaces[0], m.keys)]
        if m.first and len(m.namespaces) > 1:
            # Mostly the first one has all, and the others are not looked at.
            found = self._presences.all_in_memory(namespaces[0], m.part, m.keys, m.beside)
            if found is not None:
                here, besides = found
                return frame.Bytes(here + bytes(len(here) * (len(m.namespaces) - 1)) + besides)
        namespaces += [self._namespace(holder, number, m.keys) for number in m.namespaces[1:]]
        answer = self._presences.in_memory(
            namespaces, m.part, m.keys, first=m.first, beside=m.beside
        )
        wait_s = m.wait_s
        if answer.whole or wait_s is None:
            return frame.Bytes(answer.data)
        return self._present_below(namespaces, m, wait_s)

    async def _present_below(
        self, namespaces: Sequence[NamespaceState], m: client_wire.Present, wait_s: float
    ) -> frame.Bytes:
        wait_s = min(max(0.0, wait_s), self._config.lease_s_max)
        found = await self._presences.in_each(
            namespaces, m.part, m.keys, wait_s, first=m.first, beside=m.beside
        )
        return frame.Bytes(found)

    def _remove(
        self, holder: Holder, m: client_wire.Remove
    ) -> frame.Bytes | Coroutine[Any, Any, frame.Bytes]:
        namespaces = self._namespaces(holder, m.namespaces, m.keys, m.beside)
        below = m.beside and self._fetcher.active  # where the keys beside are may take a while
        if below or not self._removals.at_once(namespaces, m.keys, m.others_s):
            return self._remove_in_turns(namespaces, m)
        besides = self._presences.in_memory(namespaces[:1], 0, m.beside).data
        return frame.Bytes(_flags(m.keys, self._removals.now(namespaces, m.keys)) + besides)

    async def _remove_in_turns(
        self, namespaces: Sequence[NamespaceState], m: client_wire.Remove
    ) -> frame.Bytes:
        others_s = min(max(0.0, m.others_s), self._config.lease_s_max)
        deadline = self._clock() + min(others_s, BESIDE_S)
        looking = asyncio.ensure_future(
            self._presences.below(namespaces[0].table(0), split_keys(m.beside), deadline)
        )
        try:
            gone = await self._removals.everywhere(namespaces, m.keys, others_s)
            return frame.Bytes(_flags(m.keys, gone) + await looking)
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)

    async def _pin(self, holder: Holder, m: client_wire.Pin) -> frame.Done:
        namespaces = [self._namespace(holder, m.ns, m.keys)]
        return frame.Done(await pin_in_all_tiers(self._node, self._ssd, namespaces, m.keys, m.kind))

    def _stats(self, holder: Holder, m: client_wire.Stats) -> frame.Bytes:
        return frame.Bytes(msgspec.json.encode(self._stats_of.tenant(holder.tenant)))

    async def _pull(self, holder: Holder, m: client_wire.Pull) -> frame.Done:
        namespace = self._namespace(holder, m.ns, m.keys)
        wait_s = min(m.wait_s, self._config.lease_s_max)
        direct = self._direct(m) is not None
        keys = split_keys(m.keys)
        here = self._fetcher.match(namespace, [], keys, direct=direct)
        asked_at = self._clock()
        pulled = await self._fetcher.pull(
            namespace, [], keys, here, wait_s, _recompute(m), direct=direct
        )
        found = self._fetcher.match(namespace, [], keys, direct=direct)
        holder.tenant.traffic.pulls.add(len(keys), found, here)
        self._miss_reasons.read(namespace, [], m.keys, keys, found, Stage.PULLED, pulled)
        self._fetcher.waited(self._clock() - asked_at)
        return frame.Done(found)

    async def _follow(self, holder: Holder, m: client_wire.Follow) -> frame.Done:
        namespace = self._namespace(holder, m.ns, m.keys)
        wait_s = min(m.wait_s, self._config.lease_s_max)
        keys = split_keys(m.keys)
        return frame.Done(await self._streams.follow(namespace, m.parts, keys, wait_s, m.source))

    def _dropped(self, holder: Holder, m: client_wire.Dropped) -> frame.Done:
        namespace = self._namespace(holder, m.ns, m.keys)
        waiters = self._node.commit_waiters
        waiters.drop(namespace.directory_digest, split_keys(m.keys), self._clock())
        loop = asyncio.get_running_loop()
        loop.call_later(2 * DROPPED_S, lambda: waiters.forget_dropped(self._clock()))
        return frame.Done()

    def _session_turn(self, holder: Holder, m: client_wire.SessionTurn) -> frame.Done:
        namespace = self._namespace(holder, m.ns, m.keys)
        split_keys(m.keys)  # whole ones
        return frame.Done(int(self._sessions.turn(holder.tenant, namespace, m)))

    def _end_session(self, holder: Holder, m: client_wire.EndSessionOn) -> frame.Done:
        self._sessions.end_on(holder.tenant, m.session, m.nodes)
        return frame.Done()

    def _end_request(self, holder: Holder, m: client_wire.EndRequest) -> frame.Done:
        namespace = self._node.namespaces.by_number(holder.tenant, m.ns)
        check_request(m.session)
        return frame.Done(int(self._accounts.ended(namespace, m.request, m.session)))

    async def _intend(self, holder: Holder, m: client_wire.Intend) -> Any:
        if m.digest:
            return await self._operators.intend(holder, m)
        namespace = self._namespace(holder, m.ns, m.keys)
        wanted = parse_wanted(m.intent, hard=m.hard, for_s=m.for_s, dry_run=m.dry_run)
        answer = await self._intents.answer(holder.tenant, namespace, m.keys, m.session, wanted)
        return frame.Bytes(msgspec.json.encode(answer))

    def _close_namespace(self, holder: Holder, m: client_wire.CloseNamespace) -> frame.Done:
        namespace = self._node.namespaces.by_number(holder.tenant, m.ns)
        self._node.namespaces.closed(holder, namespace)
        return frame.Done()

    def _follow_events(self, holder: Holder, m: client_wire.FollowEvents) -> frame.Done:
        namespace = self._opened(holder, m.ns)
        return frame.Done(int(self._engines.follow(holder, namespace, m)))

    def _announce_engine(self, holder: Holder, m: client_wire.AnnounceEngine) -> frame.Done:
        namespace = self._opened(holder, m.ns)
        self._registry.announce(holder, namespace, m.engine)
        return frame.Done(int(m.engine is not None))

    def _describe_engines(self, holder: Holder, m: client_wire.Engines) -> frame.Bytes:
        nodes, here = self._cluster.view.nodes.values(), self._cluster.record()
        return frame.Bytes(msgspec.json.encode(describe(nodes, here, holder.tenant.name)))

    async def _prefixes(self, holder: Holder, m: client_wire.Prefixes) -> frame.Bytes:
        if len(m.keys) > KEYS_BYTES_MAX:
            raise LimitExceeded(f"at most {frame.KEYS_MAX} keys per lookup")
        keys = split_keys(m.keys)
        found = await prefixes(self._cluster, holder.tenant, m.digest, keys, m.wait_s)
        return frame.Bytes(msgspec.json.encode(found))

    async def _why_missing(self, holder: Holder, m: client_wire.WhyMissing) -> Any:
        return await self._operators.why_missing(holder, m)

    async def _reset(self, holder: Holder, m: client_wire.Reset) -> client_wire.Opened:
        namespace = self._opened(holder, m.ns)
        with asking_others():
            return await self._cluster.namespaces.reset(namespace, m.generation)

    async def _clear(self, holder: Holder, m: client_wire.ClearNamespace) -> frame.Done:
        namespace = self._opened(holder, m.ns)
        by = f"client {holder.name}"
        return frame.Done(
            await self._operators.clear(holder.tenant, by, namespace.base, fence=False)
        )

    # ---- what nobody waits for -----------------------------------------------------------------------

    def settle_soon(self, who: str, requests: int) -> None:
        """Update the policies once the answers of this round are written. who: made so many requests in it."""
        if self._loop_shares is not None:
            self._settled_for[who] += requests
        if not self._settling:
            self._settling = True
            asyncio.get_running_loop().call_soon(self._settle)

    def _settle(self) -> None:
        self._settling = False
        if self._loop_shares is None:
            self._settle_all()
            return
        began = time.monotonic()
        self._settle_all()
        now = time.monotonic()
        self._loop_shares.used_together(self._settled_for, now, now - began)
        self._settled_for.clear()

    def _settle_all(self) -> None:
        self._release_now()
        self._node.settle()
        asked, self._asked_grants = self._asked_grants, []
        for holder, namespace, part, count in asked:
            stride = namespace.tables[part].stride
            alive = id(holder) in holder.tenant.holders and not namespace.retired
            if alive and not holder.ready.get(stride):
                holder.ready[stride] = self._node.grants.grant(holder, namespace, part, count)

    def _expire_by(self, due: float, now: float) -> None:
        """Check leases when this one's deadline has come."""
        if due < self._expiry_due:
            if self._expiry is not None:
                self._expiry.cancel()
            self._expiry_due = due
            self._expiry = asyncio.get_running_loop().call_later(
                max(EXPIRY_TICK_S, due - now), self._expire
            )

    def _expire(self) -> None:
        self._expiry, self._expiry_due = None, math.inf
        now = self._clock()
        due = self._node.leases.expire(now)
        if due is not None:
            self._expire_by(due, now)


def _requests(told: Sequence[tuple[str, int]], keys: int) -> Requests:
    """Whose so many keys are. Raises `InvalidRequest`."""
    if len(told) > LABELS_MAX:
        raise LimitExceeded(f"{len(told)} labels of requests; the limit is {LABELS_MAX} together")
    left = keys
    for label, count in told:
        check_request(label)
        left -= count
        if count < 1 or left < 0:
            raise InvalidRequest(
                f"request {label!r:.100} has {count} of {keys} keys: each has at least one, and all together no more "
                "than there are"
            )
    return told


def _part_refused(
    namespace: NamespaceState, part: int, error: KvpoolError | None, taken: int = 0
) -> PartRefused:
    stride = namespace.tables[part].stride if 0 <= part < len(namespace.tables) else 0
    return PartRefused(part, why_refused(error, namespace, stride), taken)


def _parents(packed: bytes, packed_keys: bytes, keys: Sequence[bytes]) -> Sequence[bytes]:
    """Return the key before each, empty where there is none. Raises `InvalidRequest`."""
    parents: Sequence[bytes] = split_keys(packed)
    if len(parents) != len(keys):
        raise InvalidRequest(f"{len(keys)} keys with {len(parents)} parents: one each is required")
    if packed[KEY_BYTES:] == packed_keys[:-KEY_BYTES]:
        # One chain. The same objects are kept as keys and as parents, which saves memory.
        parents = [*parents[:1], *keys[:-1]]
    return tuple([b"" if parent == NO_PARENT else parent for parent in parents])


def _flags(packed: bytes, chosen: set[bytes]) -> bytes:
    """One byte a key, 1 for those that were chosen."""
    return bytes([key in chosen for key in split_keys(packed)])


def _recompute(m: client_wire.Acquire | client_wire.Pull) -> Recompute | None:
    """Raises `InvalidRequest` for invalid prices."""
    return None if m.recompute is None else Recompute(*m.recompute)

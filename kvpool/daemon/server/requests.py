"""Handlers of clients' requests: one method a message. Event loop only."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from kvpool.config import DaemonConfig
from kvpool.daemon.cluster.engine_registry import EngineRegistry, describe
from kvpool.daemon.cluster.member import ClusterMember
from kvpool.daemon.cluster.replication import Replication
from kvpool.daemon.core.blocks import OWN, Holder, NamespaceState, Origin, Requests
from kvpool.daemon.core.commit_waiters import DROPPED_S
from kvpool.daemon.core.events import (
    Event,
    Joined,
    Matched,
    Named,
    PartRefused,
    Pulled,
    Put,
    Read,
    Refused,
    Stage,
    why_refused,
)
from kvpool.daemon.core.node import Node
from kvpool.daemon.core.requests import (
    check_counts,
    check_request,
    parse_parts,
    parse_wish,
    rows,
)
from kvpool.daemon.fetch.fetcher import BlockFetcher
from kvpool.daemon.fetch.prefix_stream import PrefixStreams
from kvpool.daemon.ops.commands import KEYS_BYTES_MAX, asking_others
from kvpool.daemon.ops.intents import Intents, parse_wanted
from kvpool.daemon.ops.operators import Operators
from kvpool.daemon.ops.pins import pin_in_all_tiers
from kvpool.daemon.ops.prefixes import prefixes
from kvpool.daemon.ops.presence import Presences
from kvpool.daemon.ops.removals import Removals
from kvpool.daemon.ops.session_turns import SessionTurns
from kvpool.daemon.server.answers import describe_lease
from kvpool.daemon.server.loop_shares import LoopShares
from kvpool.daemon.server.tracing import TRACED, traced
from kvpool.daemon.tiers.device_tier import DeviceTier
from kvpool.daemon.tiers.engine_caches import Engines
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


@dataclass(eq=False, repr=False, slots=True)
class ClientRequests:
    """Answers requests. Work that need not precede the answer is done soon after it: see `settle_soon`."""

    _config: DaemonConfig
    _node: Node
    _cluster: ClusterMember
    _ssd: SsdTier
    _device: DeviceTier | None
    _fetcher: BlockFetcher
    _streams: PrefixStreams
    _replication: Replication
    _engines: Engines
    _registry: EngineRegistry
    _presences: Presences
    _removals: Removals
    _sessions: SessionTurns
    _intents: Intents
    _operators: Operators
    _answers: Mapping[type, Callable[[Holder, Any], Any]]
    """Answers to further requests, by parts that no other request needs."""
    _may_free: Callable[[NamespaceState], bool]
    """Whether nothing but memory and clients could need a namespace."""
    _spans: Spans
    _loop_shares: LoopShares | None
    """As for `ClientConnections`."""
    faults: Faults
    """Takes the unexpected errors of requests from the caller of `handle`."""
    _clock: Callable[[], float]
    _expiry: asyncio.TimerHandle | None = field(default=None, init=False)
    _expiry_due: float = field(default=math.inf, init=False)
    _settling: bool = field(default=False, init=False)
    _settled_for: Counter[str] = field(default_factory=Counter, init=False)
    """Requests since the last settling, by tenant."""
    _released: list[tuple[Holder, str]] = field(default_factory=list, init=False)
    _asked_grants: list[tuple[Holder, NamespaceState, int, int]] = field(
        default_factory=list, init=False
    )
    _handlers: dict[type, Callable[[Holder, Any], Any]] = field(init=False)
    _emit: Callable[[Event], None] = field(init=False)

    def __post_init__(self) -> None:
        self._emit = self._node.events.emit
        self._handlers = {
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
            client_wire.Intend: self._intend,
            **self._answers,
        }
        self._handlers |= dict.fromkeys(self._operators.requests, self._operators.bare)
        self._handlers[operator_wire.OnNode] = self._operators.on_node
        if self._spans.on:
            for kind, name in TRACED.items():
                self._handlers[kind] = traced(self._spans, name, self._handlers[kind])

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
        self._emit(Named(namespace, keys))
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
            draining = [PartRefused(part, "draining") for part in parts]
            self._emit(Refused(namespace, draining, count, requests))
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
        refused = [_part_refused(namespace, part, error)]
        self._emit(Refused(namespace, refused, count, requests))

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
                self._emit(Refused(namespace, all_parts, len(keys), requests))
                raise
            taken = len(found) // 4
            most = max(most, taken)
            if taken < len(keys):
                refused.append(_part_refused(namespace, part, why, taken))
            answer.strides.append(stride)
            answer.rows.append(found)
        if refused:
            self._emit(Refused(namespace, refused, len(keys), requests, most))
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
        stored = self._node.puts.commit(holder, ticket, checksums, origin=origin)
        if stored and reservation is not None:
            table, keys = reservation.table, reservation.keys
            namespace, requests = table.namespace, reservation.requests
            self._emit(Put(table, keys, stored, requests, reservation.new_indices))
            self._replication.wish(namespace, keys, replicas)
            self._ssd.stored(namespace, table.part, lambda: keys)
        return stored

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
            self._emit(Put(namespace.tables[m.part], m.keys, new, requests))
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
        waited_s: float | None = None,
    ) -> client_wire.Leased:
        """here: the most blocks that could have been leased without waiting. pulled: what a wait for others was for."""
        now = self._clock()
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
        if lease is not None:
            lease.request, lease.unread = m.request, m.for_others
        found = 0 if lease is None else lease.blocks
        stage = Stage.AGAIN if m.wait_s > 0 else Stage.HERE
        asked = (namespace, m.parts, m.keys, keys)
        self._emit(Read(*asked, found, here, stage, pulled, lease, m.scattered, waited_s))
        if lease is None:
            return _NOTHING_LEASED
        if lease.deadline is not None:
            self._expire_by(lease.deadline, now)
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
        waited_s = self._clock() - asked_at
        return self._acquire_now(holder, namespace, m, keys, asked_at, here, pulled, waited_s)

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
            self._emit(Joined(lease))
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
        namespace = self._namespace(holder, m.ns, m.keys)
        found = self._node.leases.match(namespace, m.parts, keys)
        self._emit(Matched(namespace, len(keys), found))
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
        waited_s = self._clock() - asked_at
        asked = (namespace, (), m.keys, keys)
        self._emit(Read(*asked, found, here, Stage.PULLED, pulled, waited_s=waited_s))
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

"""Handlers of clients' requests to write blocks. Event loop only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvpool.daemon.cluster.member import ClusterMember
from kvpool.daemon.cluster.replication import Replication
from kvpool.daemon.core.blocks import OWN, Holder, NamespaceState, Origin, Requests
from kvpool.daemon.core.events import PartRefused, Put, Refused, why_refused
from kvpool.daemon.core.node import Node
from kvpool.daemon.core.requests import check_request, rows
from kvpool.daemon.ops.commands import namespace_for
from kvpool.daemon.tiers.ssd_tier import SsdTier
from kvpool.errors import InvalidRequest, KvpoolError, LimitExceeded, PoolFull, UnknownReservation
from kvpool.placement.records import NodeState
from kvpool.types import KEY_BYTES, NO_PARENT, split_keys
from kvpool.wire import client as client_wire
from kvpool.wire import frame

LABELS_MAX = 4096  # of requests, in one that reserves: each may be a receipt


@dataclass(eq=False, repr=False, slots=True)
class Writes:
    """Reserves, stores and commits blocks, or grants slots for them."""

    _node: Node
    _cluster: ClusterMember
    _ssd: SsdTier
    _replication: Replication
    _clock: Callable[[], float]
    wanted: list[tuple[Holder, NamespaceState, int, int]] = field(default_factory=list, init=False)
    """Holders for which slots are to be granted ahead, with the part and the number of slots."""

    def grant_ahead(self) -> None:
        """Grant the slots that holders will want next."""
        wanted, self.wanted = self.wanted, []
        for holder, namespace, part, count in wanted:
            stride = namespace.tables[part].stride
            alive = id(holder) in holder.tenant.holders and not namespace.retired
            if alive and not holder.ready.get(stride):
                holder.ready[stride] = self._node.grants.grant(holder, namespace, part, count)

    def _reserve(self, holder: Holder, m: client_wire.Reserve) -> client_wire.Reserved:
        """Without space for a part, its rows are missing; without any for all parts, or with any other error, nothing is
        reserved.
        """
        namespace = namespace_for(self._node, holder, m.ns, m.keys)
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
                self._node.events.emit(Refused(namespace, all_parts, len(keys), requests))
                raise
            taken = len(found) // 4
            most = max(most, taken)
            if taken < len(keys):
                refused.append(_part_refused(namespace, part, why, taken))
            answer.strides.append(stride)
            answer.rows.append(found)
        if refused:
            self._node.events.emit(Refused(namespace, refused, len(keys), requests, most))
        if full is not None and not most:
            raise full
        return answer

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
        self._node.events.emit(Refused(namespace, refused, count, requests))

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
            self._node.events.emit(Put(table, keys, stored, requests, reservation.new_indices))
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
        namespace = namespace_for(self._node, holder, m.ns, m.keys)
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
            self._node.events.emit(Put(namespace.tables[m.part], m.keys, new, requests))
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
            self.wanted.append((holder, namespace, m.part, count))
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

    def _check_stores(
        self, namespace: NamespaceState, parts: Sequence[int], count: int, requests: Requests
    ) -> None:
        """Raises `PoolFull` where this node takes no new blocks. count: of each part."""
        if self._cluster.state is not NodeState.SERVING:
            draining = [PartRefused(part, "draining") for part in parts]
            self._node.events.emit(Refused(namespace, draining, count, requests))
            node = self._cluster.config.node
            raise PoolFull(
                f"node {node} is {self._cluster.state}: it stores no new blocks. "
                f"`kvpool drain {node} --cancel` cancels that"
            )

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
        except (PoolFull, LimitExceeded):
            self._node.counters.refused_full += 1
            raise
        if requests and (reservation := holder.reservations.get(ticket)) is not None:
            reservation.requests = requests
        return stride, found


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

"""This node's blocks on loan to others: their transfer workers ask this node's, which ask here.

Event loop only. Bytes go from segment to segment through the transfer workers; this module only decides.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain
from typing import Any, Protocol

from kvpool.daemon.core.blocks import (
    Block,
    Holder,
    Lease,
    NamespaceState,
    PartTable,
    checksums_of,
    directory_digest,
)
from kvpool.daemon.core.masks import pack_masks, unpack_masks, width_of
from kvpool.daemon.core.node import Node
from kvpool.daemon.core.requests import check_counts
from kvpool.errors import (
    Declined,
    InvalidRequest,
    KvpoolError,
    LimitExceeded,
    NamespaceMismatch,
    Unavailable,
)
from kvpool.security.failed_logins import Failures
from kvpool.telemetry.spans import CALLED_OFF, LEND, Span, Spans, working_for
from kvpool.types import KEY_BYTES, split_keys
from kvpool.wire import frame
from kvpool.wire import peer as peer_wire
from kvpool.wire import worker as worker_wire
from kvpool.wire.faults import Faults

LEND_WAIT_SHARE = 0.5  # of a peer's time: longest wait for this node's disks
AWAIT_KEYS_MAX = 1024  # in one `Await`
AWAIT_S_MAX = 10.0  # time for its answer


class Below(Protocol):
    """Looks up blocks in all tiers here: `Lookups`."""

    def usable_on_node(
        self, namespace: NamespaceState, parts: Sequence[int], keys: Sequence[bytes]
    ) -> int: ...

    def lies_below(self, table: PartTable, keys: Sequence[bytes]) -> bool: ...

    def on_node(self, table: PartTable, keys: Sequence[bytes]) -> bytes: ...


Promote = Callable[[PartTable, Sequence[bytes], float], Awaitable[None]]
Remove = Callable[[Sequence[NamespaceState], peer_wire.Discard], Awaitable[set[bytes]]]


@dataclass(eq=False)
class PeerService:
    """Answers peers: the `Rules` of the transfer workers.

    promote: brings blocks of the tiers below into memory. may_serve: whether this node is known to be a member; otherwise peers are refused. stale: called with blocks
    that a peer wanted and that are not here: the directory may be wrong. take: handles an `Offer`. remove: removes
    blocks from all tiers of this node. end_session: handles ends of sessions. stores: whether new blocks are accepted. operate: handles requests of operators
    of other nodes. spans: collects those of traced loans. faults: takes
    unexpected errors. name: this node's; what is meant for another one is declined.
    logins_failed: is told of peers that could not prove who they are.
    """

    node: Node
    below: Below
    promote: Promote
    clock: Callable[[], float]
    _: KW_ONLY
    may_serve: Callable[[], bool] = lambda: True
    stale: Callable[[NamespaceState, list[bytes]], None] = lambda *_: None
    take: Callable[[peer_wire.Offer], Awaitable[frame.Bytes]] | None = None
    remove: Remove | None = None
    end_session: Callable[[peer_wire.SessionEnded], bool] | None = None
    stores: Callable[[], bool] = lambda: True
    operate: Callable[[peer_wire.Operate], Awaitable[frame.Bytes]] | None = None
    spans: Spans | None = None
    faults: Faults = field(default_factory=lambda: Faults(time.monotonic))
    name: str = ""
    logins_failed: Callable[[Failures], None] = lambda _: None
    _traced: dict[str, Span] = field(default_factory=dict, init=False)  # of loans, by token

    def asked(self, question: peer_wire.Ask) -> frame.Done:
        """How many blocks of the prefix a peer could pull from here."""
        self._check_standing()
        namespace = self._known(question.tenant, question.digest)
        if namespace is None:
            return frame.Done(0)
        if not all(0 <= part < len(namespace.tables) for part in question.parts):
            raise InvalidRequest(
                f"parts {question.parts[:8]} do not match the parts of this node's namespace"
            )
        return frame.Done(
            self.below.usable_on_node(namespace, question.parts, split_keys(question.keys))
        )

    def holds(self, question: peer_wire.Holds) -> frame.Bytes:
        """Which of these blocks a peer could pull from here, one byte a key."""
        self._check_standing()
        keys = split_keys(question.keys)
        namespace = self._known(question.tenant, question.digest)
        if namespace is None:
            return frame.Bytes(bytes(len(keys)))
        if not 0 <= question.part < len(namespace.tables):
            raise InvalidRequest(f"part {question.part} does not exist in this node's namespace")
        return frame.Bytes(self.below.on_node(namespace.tables[question.part], keys))

    async def discarded(self, order: peer_wire.Discard) -> frame.Bytes:
        """Remove blocks from all tiers here: a client of another node wants it. One byte a key, 1 where there was one."""
        self._check_standing()
        self._check_meant(order.to)
        if self.remove is None:
            raise Unavailable("this node removes nothing for others: it is not in a cluster")
        check_counts(len(order.digests), order.keys)
        known = [self._known(order.tenant, digest) for digest in order.digests]
        found = [namespace for namespace in known if namespace is not None]
        gone = await self.remove(found, order)
        return frame.Bytes(bytes([key in gone for key in split_keys(order.keys)]))

    def session_ended(self, news: peer_wire.SessionEnded) -> frame.Done:
        """End a session, as a client of another node reports."""
        self._check_standing()
        self._check_meant(news.to)
        if self.end_session is None:
            raise Unavailable("this node is told nothing of sessions: it is not in a cluster")
        return frame.Done(int(self.end_session(news)))

    async def offered(self, offer: peer_wire.Offer) -> frame.Bytes:
        """A peer asks this node to keep replicas of its blocks."""
        self._check_standing()
        self._check_meant(offer.to)
        if self.take is None:
            raise Unavailable("this node accepts no offers: it is not in a cluster")
        return await self.take(offer)

    async def operated(self, order: peer_wire.Operate) -> frame.Bytes:
        """A request of another node's operator."""
        self._check_meant(order.to)
        if self.operate is None:
            raise Unavailable("this node accepts no orders: it is not in a cluster")
        return await self.operate(order)

    def _check_meant(self, node: str) -> None:
        """Raises `Declined` for what was meant for another node: addresses are given to others, or were confused."""
        if node not in {"", self.name}:
            raise Declined(f"this is node {self.name}, not {node:.63}")

    async def answer_later(self, question: peer_wire.Await) -> frame.Bytes:
        """Which of these blocks are in memory, once there are more than the peer knows, or its time is over.

        And the first one that will not be committed. A namespace need not be known here yet. Raises `LimitExceeded` when
        too many wait.
        """
        self._check_standing()
        keys, width = split_keys(question.keys), width_of(question.keys, question.known)
        if len(keys) > AWAIT_KEYS_MAX:
            raise LimitExceeded(f"at most {AWAIT_KEYS_MAX} blocks per Await request")
        known = unpack_masks(question.known, width)
        name = directory_digest(question.tenant, question.digest)

        def here() -> tuple[int, list[int]]:
            """The mask of all parts, without the padding of the packed ones, and for each key that of those here."""
            parts, masks = self.node.inventory.masks(name, keys)
            every = (1 << min(parts, 8 * width)) - 1
            return every, [mask & every for mask in masks] or [0] * len(keys)

        def dropped(every: int, masks: Sequence[int]) -> int:
            for at in self.node.commit_waiters.dropped(name, keys, self.clock()):
                if every & ~(masks[at] | known[at]):
                    return at
            return len(keys)

        def ended() -> bool:
            namespace = self.node.namespaces.by_directory(name)
            return not self.stores() or (namespace is not None and namespace.retired)

        wait_s = min(question.wait_s, AWAIT_S_MAX) if question.wait_s > 0 else 0.0
        deadline = self.clock() + wait_s
        while True:
            every, masks = here()
            first = dropped(every, masks)
            late = self.clock() >= deadline
            if _news(masks, known) or first < len(keys) or late or ended():
                break
            await self._one_more(question.node, name, keys, deadline)
            self._check_standing()
        return frame.Bytes(pack_masks(masks, width) + peer_wire.FIRST_DROPPED.pack(first))

    async def _one_more(
        self, peer: str, name: bytes, keys: Sequence[bytes], deadline: float
    ) -> None:
        """Until some part of any of these is committed or dropped, or the deadline."""
        came = asyncio.Event()
        waiter = self.node.commit_waiters.add(peer, name, keys, came.set)
        try:
            async with asyncio.timeout(deadline - self.clock()):
                await came.wait()
        except TimeoutError:
            pass
        finally:
            self.node.commit_waiters.remove(waiter)

    def open_loan(
        self, request: worker_wire.OpenLoan
    ) -> worker_wire.Loan | Coroutine[Any, Any, worker_wire.Loan]:
        """Lease the wanted blocks that are here to a transfer worker, until `give_back`.

        A coroutine if some of them must be brought into memory first.
        """
        if request.trace and self.spans is not None:
            span = self.spans.begin(request.trace, LEND)
            if span is not None:
                return self._lend_traced(request, span)
        return self._lend(request)

    async def _lend_traced(self, request: worker_wire.OpenLoan, span: Span) -> worker_wire.Loan:
        """The span lasts as long as the loan: until the bytes are sent."""
        asked = [len(part.keys) // KEY_BYTES for part in request.parts]
        span.set(
            tenant=request.tenant,
            part=min((part.part for part in request.parts), default=0),
            parts=len(asked),
            blocks_asked=sum(asked),
        )
        try:
            with working_for(span):
                lent = self._lend(request)
                if not isinstance(lent, worker_wire.Loan):
                    lent = await lent
        except KvpoolError as error:
            span.end(str(error))
            raise
        except asyncio.CancelledError:
            span.end(CALLED_OFF)
            raise
        rows, blocks, nbytes, at = array("I", lent.rows), 0, 0, 0
        for part, count in zip(request.parts, asked, strict=True):
            here = count - rows[at : at + count].count(frame.NO_ROW)
            at, blocks, nbytes = at + count, blocks + here, nbytes + here * part.nbytes
        span.set(blocks=blocks, bytes=nbytes)
        if lent.token:
            self._traced[lent.token] = span
        else:
            span.end()
        return lent

    def _lend(
        self, request: worker_wire.OpenLoan
    ) -> worker_wire.Loan | Coroutine[Any, Any, worker_wire.Loan]:
        self._check_standing()
        wanted = self._wanted(request)
        below = [each for each in wanted.items() if self.below.lies_below(*each)]
        return self._bring_and_lend(request, below) if below else self._lend_now(request, wanted)

    async def _bring_and_lend(
        self,
        request: worker_wire.OpenLoan,
        below: Sequence[tuple[PartTable, Sequence[bytes]]],
    ) -> worker_wire.Loan:
        wait_s = request.deadline_s * LEND_WAIT_SHARE
        await asyncio.gather(*[self.promote(table, keys, wait_s) for table, keys in below])
        self._check_standing()
        return self._lend_now(request, self._wanted(request))

    def _wanted(self, request: worker_wire.OpenLoan) -> dict[PartTable, Sequence[bytes]]:
        """The blocks of a request by part; none if its namespace is not known here. Raises for parts that are not those
        of this node.
        """
        wanted: dict[PartTable, Sequence[bytes]] = {}
        namespace = self._known(request.tenant, request.digest)
        if namespace is None:
            return wanted
        for part in request.parts:
            if not 0 <= part.part < len(namespace.tables):
                raise InvalidRequest(f"part {part.part} does not exist in this node's namespace")
            table = namespace.tables[part.part]
            if table.spec.nbytes != part.nbytes:
                raise NamespaceMismatch(
                    f"part {part.part} of namespace {request.digest.hex()} has {table.spec.nbytes} bytes on node "
                    f"{self.node.incarnation}, but the peer requests {part.nbytes}"
                )
            wanted[table] = split_keys(part.keys)
        return wanted

    def _lend_now(
        self, request: worker_wire.OpenLoan, wanted: Mapping[PartTable, Sequence[bytes]]
    ) -> worker_wire.Loan:
        count = sum(len(part.keys) for part in request.parts) // KEY_BYTES
        rows = array("I", [frame.NO_ROW]) * count
        nothing = worker_wire.Loan("", 0, [1] * len(request.parts), rows.tobytes(), b"")
        if not wanted:
            return nothing
        namespace = next(iter(wanted)).namespace
        holder = self._holder(namespace.tenant.name)
        lease = self.node.leases.acquire_each(holder, wanted, self.clock())
        if lease is None:
            self.stale(namespace, list(dict.fromkeys(chain.from_iterable(wanted.values()))))
            return nothing
        try:
            return self._loan(lease, namespace, wanted, rows)
        except BaseException:
            self.node.leases.release(holder, lease.token)  # nobody is told of it
            raise

    def _loan(
        self,
        lease: Lease,
        namespace: NamespaceState,
        wanted: Mapping[PartTable, Sequence[bytes]],
        rows: array[int],
    ) -> worker_wire.Loan:
        """Describe a lease of those of the wanted blocks that are here. rows: of one `NO_ROW` for each wanted block."""
        present: list[Block] = []
        missing: list[bytes] = []
        at = 0
        for table, keys in wanted.items():
            _, blocks = lease.parts[table.part]
            if len(blocks) == len(keys):  # in the order of the keys
                rows[at : at + len(keys)] = array("I", [block.row for block in blocks])
                present += blocks
            else:
                found = {block.key: block for block in blocks}
                for index, key in enumerate(keys, at):
                    block = found.get(key)
                    if block is not None:
                        rows[index] = block.row
                        present.append(block)
                    else:
                        missing.append(key)
            at += len(keys)
            self.node.counters.lent_blocks += len(blocks)
            self.node.counters.lent_bytes += len(blocks) * table.spec.nbytes
        if missing:
            self.stale(namespace, list(dict.fromkeys(missing)))
        return worker_wire.Loan(
            lease.token,
            namespace.tenant.segment,
            [table.stride for table in wanted],
            rows.tobytes(),
            checksums_of(present),
        )

    def give_back(self, token: str) -> None:
        """A transfer worker has finished with a loan, or is dead."""
        if self._traced and token in self._traced:
            self._traced.pop(token).end()
        for holder in map(self._holder, self.node.tenants):
            if token in holder.leases:
                self.node.leases.release(holder, token)
                return

    def corrupt(self, report: peer_wire.Corrupt) -> None:
        """A peer found that bytes from here do not match their checksum: drop that replica."""
        namespace = self._known(report.tenant, report.digest)
        if namespace is not None:
            for key in split_keys(report.keys):
                self.node.removal.drop_corrupt(namespace, report.part, key)

    def _check_standing(self) -> None:
        if not self.may_serve():
            raise Unavailable(
                "this node does not know whether it is still a member of its cluster: ask another node"
            )

    def _holder(self, tenant: str) -> Holder:
        """The holder of loans. One per transfer worker, so that a dead worker's loans can be given back."""
        return self.node.holders.own(tenant, "loans")

    def _known(self, tenant: str, digest: bytes) -> NamespaceState | None:
        found = self.node.tenants.get(tenant)
        return None if found is None else found.namespaces.get(digest)


def _news(masks: Sequence[int], known: Sequence[int]) -> bool:
    return any(mask & ~stated for mask, stated in zip(masks, known, strict=True))

"""What this node lends to others: their movers ask ours, and ours ask here.

Event loop only. Bytes go from segment to segment through the movers; here is only what may go.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from kvpool import wire
from kvpool.daemon.blocks import Holder, NamespaceState, PartTable, directory_digest
from kvpool.daemon.masks import pack_masks, unpack_masks, width_of
from kvpool.daemon.node import Node, Writing
from kvpool.daemon.tracing import CALLED_OFF
from kvpool.errors import (
    InvalidRequest,
    KvpoolError,
    LimitExceeded,
    NamespaceMismatch,
    Unavailable,
)
from kvpool.spans import LEND, Span, Spans, working_for
from kvpool.types import CHECKSUM_BYTES, KEY_BYTES, split_keys

LEND_WAIT_SHARE = 0.5  # of the time a peer has: longest wait for this node's disks
AWAIT_KEYS_MAX = 1024  # in one question of what is committed here
AWAIT_S_MAX = 10.0  # for its answer
WRITTEN_EVERY_S = 0.01  # a question is not answered sooner only because more is written
WRITTEN_BYTES = 256 << 10  # nor because of less than this, in all of what was asked about
WRITINGS_MAX = 1024  # runs of blocks that are being written, in an answer


class Below(Protocol):
    """What is here of a prefix in all tiers, and how it gets into memory: `Remote`."""

    def reach(self, namespace: NamespaceState, parts: Sequence[int], packed: bytes) -> int: ...

    async def fetch_up(self, table: PartTable, keys: Sequence[bytes], wait_s: float) -> None: ...

    def lies_below(self, table: PartTable, keys: Sequence[bytes]) -> bool: ...


class Lender:
    """Answers peers: the `Rules` of the movers.

    may_serve: whether this node is a member, as far as it can know; peers are refused while it is not.
    stale: told of blocks that a peer wanted and that are not here: the directory may say otherwise.
    take: what to do about an `Offer`. stores: whether anything new may come. operate: does what operators of other
    nodes want. spans: takes those of loans that are traced.
    """

    def __init__(
        self,
        node: Node,
        below: Below,
        clock: Callable[[], float],
        *,
        may_serve: Callable[[], bool] = lambda: True,
        stale: Callable[[NamespaceState, list[bytes]], None] = lambda *_: None,
        take: Callable[[wire.Offer], Awaitable[wire.Bytes]] | None = None,
        stores: Callable[[], bool] = lambda: True,
        operate: Callable[[wire.Operate], Awaitable[wire.Bytes]] | None = None,
        spans: Spans | None = None,
    ) -> None:
        self.node = node
        self._below = below
        self._clock = clock
        self._may_serve = may_serve
        self._stale = stale
        self._take = take
        self._stores = stores
        self._operate = operate
        self._spans = spans
        self._traced: dict[str, Span] = {}  # of loans, by token

    def asked(self, question: wire.Ask) -> wire.Done:
        """How many blocks of the prefix a peer could pull from here."""
        self._check_standing()
        namespace = self._known(question.tenant, question.digest)
        if namespace is None:
            return wire.Done(0)
        if not all(0 <= part < len(namespace.tables) for part in question.parts):
            raise InvalidRequest(f"parts {question.parts[:8]}: this node's namespace has others")
        return wire.Done(self._below.reach(namespace, question.parts, question.keys))

    async def offered(self, offer: wire.Offer) -> wire.Bytes:
        """A peer would like blocks of its own kept here."""
        self._check_standing()
        if self._take is None:
            raise Unavailable("this node takes no offers: it is in no cluster")
        return await self._take(offer)

    async def operated(self, order: wire.Operate) -> wire.Bytes:
        """An operator of another node wants something done here."""
        if self._operate is None:
            raise Unavailable("this node takes no orders: it is in no cluster")
        return await self._operate(order)

    async def awaited(self, question: wire.Await) -> wire.Bytes:
        """What is in memory of these blocks, once that is more than the peer knows, or when it is late.

        With `heard` also what is being written of them, once that is enough more to be worth a transfer. A
        namespace need not be known here yet. Raises `LimitExceeded` when too many wait.
        """
        self._check_standing()
        keys, width = split_keys(question.keys), width_of(question.keys, question.known)
        if len(keys) > AWAIT_KEYS_MAX:
            raise LimitExceeded(f"at most {AWAIT_KEYS_MAX} blocks are waited for in one question")
        known = unpack_masks(question.known, width)
        name = directory_digest(question.tenant, question.digest)
        every = (1 << 8 * width) - 1
        heard = None if question.heard is None else unpack_heard(question.heard)

        def here() -> list[int]:
            _, masks = self.node.masks(name, keys)
            return [mask & every for mask in masks] or [0] * len(keys)

        def ended() -> bool:
            namespace = self.node.by_directory(name)
            return not self._stores() or (namespace is not None and namespace.retired)

        wait_s = min(question.wait_s, AWAIT_S_MAX) if question.wait_s > 0 else 0.0
        began = self._clock()
        deadline = began + wait_s
        soonest = began if heard is None else min(deadline, began + WRITTEN_EVERY_S)
        while True:
            masks, written = here(), [] if heard is None else self.node.being_written(name, keys)
            now = self._clock()
            if _news(masks, known) or now >= deadline or ended():
                break
            if now < soonest:
                await self._one_more(question.node, name, keys, soonest, early=False)
            elif heard is not None and _more_written(written, heard):
                break
            else:
                early = heard is not None
                await self._one_more(question.node, name, keys, deadline, early=early)
            self._check_standing()
        runs = [wire.BEING_WRITTEN.pack(*run) for run in written[:WRITINGS_MAX]]
        return wire.Bytes(pack_masks(masks, width) + b"".join(runs))

    async def _one_more(
        self, peer: str, name: bytes, keys: Sequence[bytes], deadline: float, *, early: bool
    ) -> None:
        """Until some part of any of these is committed, with `early` more of it written, or the deadline."""
        came = asyncio.Event()
        waiter = self.node.awaited.add(peer, name, keys, came.set, early=early)
        try:
            async with asyncio.timeout(deadline - self._clock()):
                await came.wait()
        except TimeoutError:
            pass
        finally:
            self.node.awaited.remove(waiter)

    def lend(self, request: wire.Lend) -> wire.Lent | Coroutine[Any, Any, wire.Lent]:
        """Lease what is here of the wanted blocks to a mover, until `give_back`.

        A coroutine where some of them have to be brought into memory first.
        """
        if request.trace and self._spans is not None:
            span = self._spans.begin(request.trace, LEND)
            if span is not None:
                return self._lend_traced(request, span)
        return self._lend(request)

    async def _lend_traced(self, request: wire.Lend, span: Span) -> wire.Lent:
        """The span lasts as long as the loan: until the bytes are on their way."""
        span.set(
            tenant=request.tenant,
            part=request.part,
            blocks_asked=len(request.keys) // KEY_BYTES,
        )
        try:
            with working_for(span):
                lent = self._lend(request)
                if not isinstance(lent, wire.Lent):
                    lent = await lent
        except KvpoolError as error:
            span.end(str(error))
            raise
        except asyncio.CancelledError:
            span.end(CALLED_OFF)
            raise
        blocks = len(lent.rows) // 4 - array("I", lent.rows).count(wire.NO_ROW)
        span.set(blocks=blocks, bytes=blocks * request.nbytes)
        if lent.token:
            self._traced[lent.token] = span
        else:
            span.end()
        return lent

    def _lend(self, request: wire.Lend) -> wire.Lent | Coroutine[Any, Any, wire.Lent]:
        self._check_standing()
        namespace = self._known(request.tenant, request.digest)
        if not request.stop and namespace is not None and 0 <= request.part < len(namespace.tables):
            table, keys = namespace.tables[request.part], split_keys(request.keys)
            if self._below.lies_below(table, keys):
                return self._bring_and_lend(request, table, keys)
        return self._lend_now(request)

    async def _bring_and_lend(
        self, request: wire.Lend, table: PartTable, keys: Sequence[bytes]
    ) -> wire.Lent:
        await self._below.fetch_up(table, keys, request.deadline_s * LEND_WAIT_SHARE)
        self._check_standing()
        return self._lend_now(request)

    def _lend_now(self, request: wire.Lend) -> wire.Lent:
        absent = array("I", [wire.NO_ROW]) * (len(request.keys) // KEY_BYTES)
        nothing = wire.Lent("", 0, 1, absent.tobytes(), b"")
        namespace = self._known(request.tenant, request.digest)
        if namespace is None:
            return nothing
        if not 0 <= request.part < len(namespace.tables):
            raise InvalidRequest(f"part {request.part}: this node's namespace has none such")
        table = namespace.tables[request.part]
        if table.spec.nbytes != request.nbytes:
            raise NamespaceMismatch(
                f"part {request.part} of namespace {request.digest.hex()} has {table.spec.nbytes} "
                f"bytes on node {self.node.incarnation}, the peer asks for {request.nbytes}"
            )
        tenant = namespace.tenant
        holder = self._holder(tenant.name)
        keys = split_keys(request.keys)
        if request.stop:
            token, written = self.node.lend_written(holder, table, keys, request.stop)
            if not token:
                return nothing
            rows = array("I", [written.get(key, wire.NO_ROW) for key in keys])
            sums = bytes(CHECKSUM_BYTES * sum(key in written for key in keys))
            return wire.Lent(token, tenant.segment, table.stride, rows.tobytes(), sums)
        lease = self.node.acquire(
            holder, namespace, [request.part], request.keys, None, self._clock(), scattered=True
        )
        if lease is None:
            self._stale(namespace, list(keys))
            return nothing
        _, blocks = lease.parts[request.part]
        found = {block.key: block for block in blocks}
        rows = absent
        checksums = []
        missing = []
        for index, key in enumerate(keys):
            block = found.get(key)
            if block is not None:
                rows[index] = block.row
                checksums.append(block.checksum)
            else:
                missing.append(key)
        if missing:
            self._stale(namespace, missing)
        self.node.counters.lent_blocks += len(blocks)
        self.node.counters.lent_bytes += len(blocks) * table.spec.nbytes
        return wire.Lent(
            lease.token, tenant.segment, table.stride, rows.tobytes(), b"".join(checksums)
        )

    def give_back(self, token: str) -> None:
        """A mover has finished with a loan, or is dead."""
        if self._traced and token in self._traced:
            self._traced.pop(token).end()
        for holder in map(self._holder, self.node.tenants):
            if token in holder.leases:
                self.node.release(holder, token)
                return

    def corrupt(self, report: wire.Corrupt) -> None:
        """A peer found that bytes of ours do not match their checksum: drop that copy."""
        namespace = self._known(report.tenant, report.digest)
        if namespace is not None:
            for key in split_keys(report.keys):
                self.node.drop_corrupt(namespace, report.part, key)

    def _check_standing(self) -> None:
        if not self._may_serve():
            raise Unavailable(
                "this node does not know whether it is a member of its cluster still: ask another one"
            )

    def _holder(self, tenant: str) -> Holder:
        """Who lends. One for all movers: a dead mover's loans are given back one by one."""
        return self.node.own_holder(tenant, "loans")

    def _known(self, tenant: str, digest: bytes) -> NamespaceState | None:
        found = self.node.tenants.get(tenant)
        return None if found is None else found.namespaces.get(digest)


def unpack_heard(packed: bytes) -> dict[int, int]:
    """Of which reservations a peer was told how many bytes are written. Raises `InvalidRequest`."""
    if len(packed) > WRITINGS_MAX * wire.HEARD.size or len(packed) % wire.HEARD.size:
        raise InvalidRequest(f"{len(packed)} bytes of what an asker has heard")
    return dict(wire.HEARD.iter_unpack(packed))


def _more_written(written: Sequence[Writing], heard: Mapping[int, int]) -> bool:
    """Whether a peer that has heard so much would like to hear this."""
    if not heard.keys() <= {run.number for run in written}:
        return True  # one that it has heard of was given up
    more = sum(run.keys * max(0, run.nbytes - heard.get(run.number, 0)) for run in written)
    return more >= WRITTEN_BYTES


def _news(masks: Sequence[int], known: Sequence[int]) -> bool:
    return any(mask & ~stated for mask, stated in zip(masks, known, strict=True))

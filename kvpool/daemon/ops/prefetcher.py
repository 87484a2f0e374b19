"""Brings blocks into memory before they are wanted, from this node's disks, other nodes or object storage.

`Intents` orders these transfers. Nobody waits for them: they come after all others, a few prompts at a time, piece by
piece from the beginning of each prompt on. They take free slots, and those of secondary and expendable blocks; where
there are no more they end, and evict nothing else.

Event loop only.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from kvpool.daemon.core.blocks import NamespaceState, PartTable
from kvpool.daemon.core.node import Node
from kvpool.daemon.fetch.fetcher import BlockFetcher
from kvpool.daemon.fetch.plan import FetchRequest, missing
from kvpool.tasks import Tasks
from kvpool.types import KEY_BYTES, Outcome, split_keys
from kvpool.waits import wait_for

TOGETHER = 2  # prompts
QUEUE_MAX = 256  # prompts of a tenant
SLICE_BYTES = 8 << 20
SLICE_S = 10.0  # for so much
LOOKUP_S = 0.5  # for the answers of others
RECALLED_TOGETHER = 256  # blocks, which take the event loop about a millisecond
JUDGE_S = 1.0  # between two looks at what came before
USED_WITHIN_S = 60.0  # what is not read by then was wasted
BROUGHT_MAX = 1 << 18  # parts of which it is not known yet whether they are used


@dataclass(eq=False, slots=True)
class _Order:
    """A prompt's blocks, packed."""

    namespace: NamespaceState
    keys: bytes
    nbytes: int

    @property
    def name(self) -> tuple[NamespaceState, bytes]:
        return _name(self.namespace, self.keys)


@dataclass(eq=False, slots=True)
class _Brought:
    """What has come for an order. judge_at: when it is asked at the latest what was used."""

    judge_at: float
    parts: list[tuple[PartTable, list[bytes]]] = field(default_factory=list)
    count: int = 0


@dataclass(eq=False)
class Prefetcher:
    """See the module."""

    node: Node
    fetcher: BlockFetcher
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._queues: OrderedDict[str, deque[_Order]] = OrderedDict()  # by tenant; none is empty
        self._known: dict[tuple[NamespaceState, bytes], _Order] = {}  # see `_name`
        self._bytes: dict[str, int] = {}  # of the orders of each tenant
        self._under_way = 0
        self._awake = asyncio.Event()
        self._brought: OrderedDict[_Brought, None] = OrderedDict()
        self._brought_count = 0

    def waiting_bytes(self, tenant: str) -> int:
        """Bytes that orders for a tenant will still take."""
        return self._bytes.get(tenant, 0)

    def foreseen(self, namespace: NamespaceState, keys: bytes) -> Outcome:
        """What `order` would answer."""
        if _name(namespace, keys) in self._known:
            return Outcome.DEFERRED
        queue = self._queues.get(namespace.tenant.name, ())
        if len(queue) >= QUEUE_MAX:
            return Outcome.REFUSED
        return Outcome.ACCEPTED if self._under_way < TOGETHER and not queue else Outcome.DEFERRED

    def order(self, namespace: NamespaceState, keys: bytes, nbytes: int) -> Outcome:
        """Bring a prompt's missing blocks, `nbytes` together: accepted, if it begins at once, or deferred, or refused
        where too many wait. keys: packed.
        """
        foreseen = self.foreseen(namespace, keys)
        order = _Order(namespace, keys, nbytes)
        if foreseen is not Outcome.REFUSED and order.name not in self._known:
            self._known[order.name] = order
            tenant = namespace.tenant.name
            self._queues.setdefault(tenant, deque()).append(order)
            self._bytes[tenant] = self._bytes.get(tenant, 0) + nbytes
            self._awake.set()
        return foreseen

    async def run(self) -> None:
        """Until cancelled."""
        tasks = Tasks()
        try:
            while True:
                await wait_for(self._awake, JUDGE_S if self._brought else None)
                self._awake.clear()
                self._judge_due()
                while self._queues and self._under_way < TOGETHER:
                    self._under_way += 1
                    tasks.begin(self._carry_out(self._next()))
        finally:
            await tasks.end()

    def _next(self) -> _Order:
        """Tenants take turns."""
        tenant, queue = next(iter(self._queues.items()))
        order = queue.popleft()
        if queue:
            self._queues.move_to_end(tenant)
        else:
            del self._queues[tenant]
        return order

    async def _carry_out(self, order: _Order) -> None:
        try:
            await self._bring(order)
        finally:
            tenant = order.namespace.tenant.name
            left = self._bytes.get(tenant, 0) - order.nbytes
            if left:
                self._bytes[tenant] = left
            else:  # others may wait, of no bytes
                self._bytes.pop(tenant, None)
            del self._known[order.name]
            self._under_way -= 1
            self._awake.set()

    async def _bring(self, order: _Order) -> None:
        namespace = order.namespace
        if namespace.retired:
            return
        asked = split_keys(order.keys)
        for at in range(0, len(asked), RECALLED_TOGETHER):
            self.node.candidates.recall(namespace, asked[at : at + RECALLED_TOGETHER])
            await asyncio.sleep(0)
        there, located = await self.fetcher.lookups.locate_prefix(namespace, asked, LOOKUP_S)
        if not there:
            return
        keys = asked[:there]
        requests = missing(namespace.tables, keys, located)
        brought = _Brought(0.0)
        for some in _slices(namespace, keys, requests):
            if not await self._bring_slice(some, brought):
                break
        if brought.count:
            brought.judge_at = self.clock() + USED_WITHIN_S
            self._brought[brought] = None
            self._brought_count += brought.count
            while self._brought_count > BROUGHT_MAX:
                self._judge(next(iter(self._brought)))

    async def _bring_slice(self, requests: Sequence[FetchRequest], brought: _Brought) -> bool:
        """Whether all of it has come."""
        self.node.settle()
        asked = [
            (request.table, [key for key in request.keys if key not in request.table.blocks])
            for request in requests
        ]
        whole = await self.fetcher.bring_ahead(requests, SLICE_S)
        self.node.settle()
        nbytes = 0
        counters = self.node.counters
        for table, keys in asked:
            came = [key for key in keys if key in table.blocks]
            if came:
                brought.parts.append((table, came))
                brought.count += len(came)
                counters.prefetched += len(came)
                nbytes += len(came) * table.spec.nbytes
        counters.prefetched_bytes += nbytes
        return whole

    # ---- what it was good for ------------------------------------------------------------------------

    def _judge_due(self) -> None:
        """See `USED_WITHIN_S`."""
        while self._brought and (first := next(iter(self._brought))).judge_at <= self.clock():
            self._judge(first)

    def _judge(self, brought: _Brought) -> None:
        del self._brought[brought]
        self._brought_count -= brought.count
        self.node.settle()
        used = sum(
            block is not None and block.used > block.put
            for table, keys in brought.parts
            for block in table.blocks.found(keys)
        )
        self.node.counters.prefetches_used += used
        self.node.counters.prefetches_wasted += brought.count - used


def _name(namespace: NamespaceState, keys: bytes) -> tuple[NamespaceState, bytes]:
    """Keys are chained hashes: the last one stands for all."""
    return namespace, keys[-KEY_BYTES:]


def _slices(
    namespace: NamespaceState, keys: Sequence[bytes], requests: Sequence[FetchRequest]
) -> Iterator[list[FetchRequest]]:
    """The requests for a prompt's blocks piece by piece, all parts of its first blocks first."""
    step = max(1, SLICE_BYTES // sum(table.spec.nbytes for table in namespace.tables))
    number = {key: at // step for at, key in enumerate(keys)}
    slices: dict[int, list[FetchRequest]] = {}
    for request in requests:
        for at, some in groupby(request.keys, key=number.__getitem__):
            piece = FetchRequest(request.table, list(some), request.candidates)
            slices.setdefault(at, []).append(piece)
    for at in sorted(slices):
        yield slices[at]

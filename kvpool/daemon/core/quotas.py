"""Quotas of namespaces: a namespace above its quota gives up its own coldest blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from kvpool.daemon.core.blocks import NamespaceState, PartTable
from kvpool.daemon.core.ended_epochs import RECLAIMED_PER_PUT, EndedEpochs
from kvpool.daemon.core.eviction import Eviction
from kvpool.daemon.core.ledger import Ledger
from kvpool.daemon.core.slots import Slots
from kvpool.telemetry.memory_stats import Counters

QUOTA_PER_PUT = 1024  # blocks evicted per put, while a namespace exceeds its quota


@dataclass(eq=False, repr=False, slots=True)
class Quotas:
    """Namespaces with a quota, and the evictions it causes. Not thread-safe.

    namespaces: living ones that have a quota.
    """

    _ledger: Ledger
    _slots: Slots
    _ended: EndedEpochs
    _eviction: Eviction
    _counters: Counters
    namespaces: dict[NamespaceState, None] = field(default_factory=dict, init=False)

    def set(self, namespace: NamespaceState, nbytes: int) -> None:
        """Bytes that a namespace may hold from now on; 0: the tenant's limit.

        The excess is evicted gradually: with its puts, and by `tend`.
        """
        if nbytes == namespace.quota:
            return
        self._ledger.settle()
        namespace.quota = nbytes
        if not nbytes:
            self.namespaces.pop(namespace, None)
            return
        self.namespaces[namespace] = None
        self.divide(namespace, namespace.tables)

    def divide(self, namespace: NamespaceState, tables: Iterable[PartTable]) -> None:
        """Give these tables of a namespace with a quota, and its ended epochs, separate eviction orders."""
        by_stride: dict[int, list[PartTable]] = {}
        for table in (*self._ended.tables_of(namespace), *tables):
            by_stride.setdefault(table.stride, []).append(table)
        for stride, those in by_stride.items():
            slot_class = self._slots.class_of(namespace.tenant, stride)
            capacity = max(1, namespace.quota // stride)
            empty = not any(table.blocks or table.garbage for table in those)
            slot_class.divide(namespace.base, capacity, self._slots.make_policy, empty=empty)

    def pass_on(self, old: NamespaceState, new: NamespaceState) -> None:
        """A namespace enters a new epoch: the quota carries over."""
        new.quota = old.quota
        if old in self.namespaces:
            del self.namespaces[old]
            self.namespaces[new] = None

    def tend(self, n: int) -> bool:
        """Evict up to n blocks above quotas; returns whether more may be left.

        Needed after quotas were set, and if leases, pins or a restart have left an excess.
        """
        self._ledger.settle()
        left = n
        for namespace in self.namespaces:
            for table in namespace.tables:
                for order in namespace.tenant.classes[table.stride].orders:
                    left -= order.move(namespace.base, left) if left > 0 else 0
            over = namespace.held_bytes - namespace.quota
            if over > 0 and left > 0:
                self._reclaim_ended(namespace)
                left -= self._evict_own(namespace, over, left)
            if left <= 0:
                return True
        return False

    def within(self, table: PartTable, n: int) -> int:
        """How many new slots of a table its namespace may have, up to n. Its own coldest blocks make room.

        If it still exceeds its quota, for example after that was lowered, or because the evicted blocks were of
        an ended epoch, which does not count, it gets no more than were evicted.
        """
        self._ledger.settle()
        namespace, stride = table.namespace, table.stride
        held = namespace.held_bytes
        over = held + n * stride - namespace.quota
        if over <= 0:
            return n
        self._reclaim_ended(namespace)
        allocator = namespace.tenant.allocator
        used = allocator.bytes_used
        # As many as one put can afford, but at least as many bytes as it asks for.
        smallest = min(other.stride for other in namespace.tables)
        most = max(n + QUOTA_PER_PUT, n * stride // smallest)
        self._evict_own(namespace, over, most, table)
        room = namespace.quota - namespace.held_bytes
        return min(n, max(room, used - allocator.bytes_used) // stride)

    def _reclaim_ended(self, namespace: NamespaceState) -> None:
        if self._ended:
            stride = namespace.tables[0].stride
            self._ended.reclaim(RECLAIMED_PER_PUT, namespace.tenant, stride)

    def _evict_own(
        self, namespace: NamespaceState, nbytes: int, most: int, first: PartTable | None = None
    ) -> int:
        """Evict about this many bytes of a namespace, but at most this many blocks; returns how many.

        Those of `first` go before others, because their slots are needed. Secondary replicas go
        before its own policy's victims, and soft pins last.
        """
        tenant, classes = namespace.tenant, namespace.tenant.classes
        tables = sorted(namespace.tables, key=lambda table: table is not first)
        ways: list[tuple[int, Callable[[int], int]]] = [
            (
                stride,
                partial(self._eviction.evict_part, tenant, classes[stride], order, namespace.base),
            )
            for stride in dict.fromkeys(table.stride for table in tables)
            for order in classes[stride].orders
        ]
        ways += [
            (
                table.stride,
                partial(self._eviction.evict_soft, tenant, classes[table.stride], table),
            )
            for table in tables
        ]
        goal = namespace.held_bytes - nbytes
        gone = 0
        for stride, evict in ways:
            # Repeated while blocks of an ended epoch are left, which come first.
            while gone < most and (over := namespace.held_bytes - goal) > 0:
                evicted = evict(min(most - gone, -(-over // stride)))
                gone += evicted
                if not evicted:
                    break
        self._slots.releases += gone > 0  # slots of other sizes are free now
        self._counters.evicted_by_quota += gone
        return gone

"""Which blocks go next, for those who write them elsewhere before, and which copies may go before others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kvpool.daemon.core.blocks import PIN_NONE, Block, NamespaceState, Tenant
from kvpool.daemon.core.ledger import Ledger
from kvpool.daemon.core.quotas import Quotas


class Place(NamedTuple):
    """Where it is decided what goes next. base: of a namespace that has a quota; empty: all others."""

    stride: int
    base: bytes = b""


class Cold(NamedTuple):
    """Blocks that go next at a place, in that order. free: the share of its namespace. held: its blocks."""

    place: Place
    free: float
    blocks: list[Block]
    held: int


class Candidates:
    """Blocks that may be evicted, in order. Not thread-safe."""

    def __init__(self, tenants: Mapping[str, Tenant], ledger: Ledger, quotas: Quotas) -> None:
        self._tenants = tenants
        self._ledger = ledger
        self._quotas = quotas

    def next_victims(self, tenant: Tenant, n: int, enough: float = 1.0) -> list[Cold]:
        """What is given up next, where that is decided: per stride, and per namespace with a quota.

        About n blocks each, where a smaller share than `enough` is free. Those under a lease, and those that
        others keep, are not among them.
        """
        self._ledger.settle()
        size = tenant.allocator.size
        free = 1 - tenant.allocator.bytes_used / size
        places = [
            (Place(stride), free, slot_class.policy)
            for stride, slot_class in tenant.classes.items()
        ]
        for namespace in self._quotas.namespaces:
            if namespace.tenant is tenant:
                left = max(0.0, 1 - namespace.held_bytes / namespace.quota)
                for stride in dict.fromkeys(table.stride for table in namespace.tables):
                    _, order = tenant.classes[stride].orders
                    places.append((Place(stride, namespace.base), left, order.part(namespace.base)))
        found = []
        for place, share, policy in places:
            if share > enough:
                continue
            coldest: list[Any] = policy.coldest(n)
            victims = [block for block in coldest if not block.leases and block.is_here()]
            if victims:
                found.append(Cold(place, share, victims, len(policy)))
        return found

    def coldest(self, tenant: Tenant, n: int) -> list[Block]:
        """About n blocks that would be evicted next after the secondary ones, coldest first."""
        self._ledger.settle()
        found: list[Any] = []
        for slot_class in tenant.classes.values():
            found += slot_class.policy.coldest(n)
        return _evictable(found)[:n]

    def coldest_secondary(self, tenant: Tenant, n: int) -> list[Block]:
        """The same of copies that others were said to keep."""
        self._ledger.settle()
        found: list[Any] = []
        for slot_class in tenant.classes.values():
            found += slot_class.secondary.coldest(n)
        return _evictable(found)[:n]

    def last_used_first(self, wanted: Callable[[Block], bool]) -> list[Block]:
        """All blocks here that are wanted. O(blocks): for a node that stops."""
        self._ledger.settle()
        found = [
            block
            for tenant in self._tenants.values()
            for namespace in tenant.namespaces.values()
            for table in namespace.tables
            for block in table.blocks.values()
            if wanted(block)
        ]
        found.sort(key=lambda block: -block.used)
        return found

    def spare_bytes(self, tenant: Tenant) -> int:
        """What is free, or can go without anything being lost to the cluster."""
        return tenant.allocator.size - tenant.allocator.bytes_used + self.secondary_bytes(tenant)

    def secondary_bytes(self, tenant: Tenant) -> int:
        """What can go without anything being lost to the cluster, as far as this node knows."""
        self._ledger.settle()
        return sum(len(c.secondary) * c.stride for c in tenant.classes.values())

    # ---- primary and secondary ----------------------------------------------------------------------

    def demote(self, namespace: NamespaceState, keys: Sequence[bytes]) -> int:
        """Others hold these blocks and keep them: our copies go first. How many parts were demoted.

        They go in the order given, before what is demoted or read later.
        """
        self._ledger.settle()
        chosen = [
            block
            for table in namespace.tables
            for key in dict.fromkeys(keys)
            if (block := table.blocks.get(key)) and not block.secondary
        ]
        self._reclassify(chosen, True)
        return len(chosen)

    def promote(self, blocks: Iterable[Block]) -> None:
        """Ours turned out to be the last copies of these. They go in the order given, after others.

        Nothing happens to those that have gone: the caller may have had to ask somebody first.
        """
        self._ledger.settle()
        self._reclassify([block for block in blocks if block.secondary and block.is_here()], False)

    def _reclassify(self, blocks: Sequence[Block], secondary: bool) -> None:
        for block in blocks:
            table = block.table
            slot_class = table.namespace.tenant.classes[table.stride]
            candidate = block.pin == PIN_NONE and block.parked < 0
            if candidate:
                slot_class.discard(block)
            block.secondary = secondary
            if candidate:
                slot_class.insert([block])


def _evictable(blocks: Iterable[Block]) -> list[Block]:
    """Those that could go now and are worth something, the least recently used first."""
    free = [block for block in blocks if not block.leases and block.is_here()]
    free.sort(key=lambda block: block.used)
    return free

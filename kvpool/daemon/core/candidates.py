"""Which blocks are evicted next, for the tiers that write them before, and which replicas may become secondary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvpool.daemon.core.blocks import Block, NamespaceState, Tenant
from kvpool.daemon.core.ledger import Ledger
from kvpool.daemon.core.quotas import Quotas
from kvpool.storage.eviction import EvictionPolicy


class Place(NamedTuple):
    """An eviction order. base: of a namespace that has a quota; empty: all others."""

    stride: int
    base: bytes = b""


class Cold(NamedTuple):
    """Blocks that are evicted next in an order. free: the namespace's free share. held: its blocks."""

    place: Place
    free: float
    blocks: list[Block]
    held: int


@dataclass(eq=False, repr=False, slots=True)
class Candidates:
    """Blocks that may be evicted, in order. Not thread-safe."""

    _tenants: Mapping[str, Tenant]
    _ledger: Ledger
    _quotas: Quotas

    def next_victims(self, tenant: Tenant, n: int, enough: float = 1.0) -> list[Cold]:
        """The next victims in each eviction order: per stride, and per namespace with a quota.

        About n blocks each, in orders whose free share is below `enough`. Leased blocks and secondary replicas
        are not among them.
        """
        self._ledger.settle()
        size = tenant.allocator.size
        free = 1 - tenant.allocator.bytes_used / size
        places: list[tuple[Place, float, EvictionPolicy]] = [
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
            victims = [
                block for block in coldest if not block.leases and not block.table.namespace.retired
            ]
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
        """The same for secondary replicas."""
        self._ledger.settle()
        found: list[Any] = []
        for slot_class in tenant.classes.values():
            found += slot_class.secondary.coldest(n)
        return _evictable(found)[:n]

    def spare_bytes(self, tenant: Tenant) -> int:
        """Bytes that are free, or can be evicted without loss to the cluster."""
        return tenant.allocator.size - tenant.allocator.bytes_used + self.secondary_bytes(tenant)

    def secondary_bytes(self, tenant: Tenant) -> int:
        """Bytes that can be evicted without loss to the cluster, as far as this node knows."""
        self._ledger.settle()
        return sum(len(c.secondary) * c.stride for c in tenant.classes.values())

    # ---- primary and secondary ----------------------------------------------------------------------

    def demote(self, namespace: NamespaceState, keys: Sequence[bytes]) -> int:
        """Other nodes keep these blocks: this node's replicas become secondary. Returns how many parts did.

        They go in the given order, before blocks that become secondary or are read later.
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

    # ---- expendable ---------------------------------------------------------------------------------

    def expend(
        self,
        namespace: NamespaceState,
        keys: Sequence[bytes],
        last_used: int | None = None,
        *,
        left: bool = False,
    ) -> int:
        """These blocks go before others, in the given order, until they are read; how many parts are newly so.

        last_used: a tick; blocks that were used after it are ignored; None: none is for that. left: nobody is to continue
        them, so that they are expendable on disks too, if they are written there. Leased blocks, secondary replicas and
        pinned ones are ignored.
        """
        self._ledger.settle()
        keys = list(dict.fromkeys(keys))
        count = 0
        for table in namespace.tables:
            found = [
                block
                for block in table.blocks.found(keys)
                if block is not None and not block.leases
            ]
            if last_used is not None:
                found = [block for block in found if block.used <= last_used]
            if found:
                count += found[0].table.slots.expend(found)
                if left:
                    for block in found:
                        block.left = block.used
        return count

    def recall(self, namespace: NamespaceState, keys: Sequence[bytes]) -> None:
        """Those of these blocks that are expendable are ordinary again, as if they were read."""
        self._ledger.settle()
        keys = list(dict.fromkeys(keys))
        for table in namespace.tables:
            found = [b for b in table.blocks.found(keys) if b is not None and b.expendable]
            if found:
                table.slots.touch(found)

    def ordinary(self, namespace: NamespaceState, keys: Sequence[bytes]) -> list[bytes]:
        """These without blocks of which a part here is expendable."""
        if not self.expendable(namespace.tenant):
            return list(keys)
        gone = {
            block.key
            for table in namespace.tables
            for block in table.blocks.found(keys)
            if block is not None and block.expendable
        }
        return [key for key in keys if key not in gone]

    def expendable(self, tenant: Tenant) -> int:
        """Number of parts of blocks that are expendable."""
        return sum(slot_class.policy.expendable for slot_class in tenant.classes.values())

    def expendable_bytes(self, tenant: Tenant) -> int:
        """Bytes of their slots."""
        self._ledger.settle()
        return sum(each.policy.expendable * each.stride for each in tenant.classes.values())

    def room_bytes(self, namespace: NamespaceState) -> int:
        """About how many bytes a namespace can have without the eviction of an ordinary block."""
        tenant = namespace.tenant
        room = self.spare_bytes(tenant) + self.expendable_bytes(tenant)
        if namespace.quota:
            room = min(room, namespace.quota - namespace.held_bytes)
        return max(0, room)

    def promote(self, blocks: Iterable[Block]) -> None:
        """This node's replicas of these turned out to be the last ones. They go in the given order, after others.

        Blocks that are gone are ignored: the caller may have waited for an answer.
        """
        self._ledger.settle()
        self._reclassify([block for block in blocks if block.secondary and block.is_here()], False)

    def _reclassify(self, blocks: Sequence[Block], secondary: bool) -> None:
        for block in blocks:
            table = block.table
            slot_class = table.namespace.tenant.classes[table.stride]
            candidate = slot_class.is_candidate(block)
            if candidate:
                slot_class.discard(block)
            block.origin = block.origin._replace(secondary=secondary)
            if candidate:
                slot_class.insert([block])


def _evictable(blocks: Iterable[Block]) -> list[Block]:
    """Evictable blocks with some value, the least recently used first."""
    free = [block for block in blocks if not block.leases and block.is_here()]
    free.sort(key=lambda block: block.used)
    return free

"""Lookups of blocks on this node and elsewhere, which bring nothing. Event loop only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvpool.daemon.core.blocks import NamespaceState, PartTable
from kvpool.daemon.core.node import Node
from kvpool.daemon.fetch.locate import LOOKUP_SHARE, Locator
from kvpool.daemon.fetch.plan import Located, may_be_had, merge
from kvpool.daemon.fetch.ports import DEVICE, LocalSource
from kvpool.hit_rule import AnyOf, usable
from kvpool.types import Presence


@dataclass(eq=False)
class Lookups:
    """See the module. local: the tiers below memory on this node, by the name of each as a source."""

    _node: Node
    _locator: Locator
    _local: Mapping[bytes, LocalSource]
    _clock: Callable[[], float]

    def match(
        self,
        namespace: NamespaceState,
        parts: Sequence[int],
        keys: Sequence[bytes],
        *,
        direct: bool,
    ) -> int:
        """The usable blocks of a prefix in memory, or with `direct` in memory and spare device memory."""
        if not direct:
            return self._node.leases.match(namespace, parts, keys)
        self._node.settle()
        tables = namespace.tables_of(parts)
        held = [AnyOf((table.blocks, *self._local[DEVICE].held(table))) for table in tables]
        return usable([table.spec for table in tables], held, keys)

    def on_device(self, table: PartTable) -> AnyOf:
        """The keys of a table in spare device memory."""
        return AnyOf(self._local[DEVICE].held(table))

    def usable_on_node(
        self, namespace: NamespaceState, parts: Sequence[int], keys: Sequence[bytes]
    ) -> int:
        """The usable blocks of a prefix on this node, in memory or below it."""
        self._node.settle()
        tables = namespace.tables_of(parts)
        return self._locator.usable(tables, keys, self._locator.on_this_node(tables, keys))

    def on_node(self, table: PartTable, keys: Sequence[bytes]) -> bytes:
        """One byte a key, 1 where the part of the block is on this node, in memory or below it."""
        self._node.settle()
        below = self._locator.on_this_node([table], keys)
        return bytes(key in table.blocks or key in below for key in keys)

    def lies_below(self, table: PartTable, keys: Sequence[bytes]) -> bool:
        """Whether any of these is in a tier below memory here and not in memory."""
        held = [keys_of for tier in self._local.values() for keys_of in tier.held(table)]
        if not held:
            return False
        self._node.settle()
        return any(key not in table.blocks and any(key in each for each in held) for key in keys)

    async def presence(self, table: PartTable, keys: Sequence[bytes], wait_s: float) -> bytes:
        """A `Presence` of each key, one byte each. Others are asked for at most `wait_s`."""
        self._node.settle()
        located = self._locator.on_this_node([table], keys)
        missing = [key for key in keys if key not in table.blocks and key not in located]
        if wait_s > 0 and missing and self._locator.elsewhere:
            deadline = self._clock() + wait_s / LOOKUP_SHARE
            elsewhere = await self._locator.each(table.namespace, [table], missing, deadline)
            self._node.settle()
        else:
            elsewhere = {}
        lives, bit = self._locator.lives, 1 << table.part

        def of(key: bytes) -> Presence:
            if key in table.blocks:
                return Presence.MEMORY
            if key in located:
                return Presence.DISK
            having = elsewhere.get(key, ())
            if any(may_be_had(e) and e.mask & bit and lives(e.incarnation) for e in having):
                return Presence.ELSEWHERE
            return Presence.NOWHERE

        return bytes(map(of, keys))

    async def locate_prefix(
        self, namespace: NamespaceState, keys: Sequence[bytes], wait_s: float
    ) -> tuple[int, Located]:
        """How many blocks of a prefix could be had here, and where those below memory or elsewhere are. Ends by
        `wait_s`.
        """
        self._node.settle()
        tables = namespace.tables
        located = self._locator.on_this_node(tables, keys)
        there = self._locator.usable(tables, keys, located)
        if there < len(keys) and self._locator.elsewhere:
            deadline = self._clock() + wait_s / LOOKUP_SHARE
            merge(located, await self._locator.prefix(namespace, tables, keys, there, deadline))
            there = self._locator.usable(tables, keys, located)
        return there, located

    async def locate(
        self,
        namespace: NamespaceState,
        tables: Sequence[PartTable],
        keys: Sequence[bytes],
        wait_s: float,
    ) -> Located:
        """The sources of these keys: lower tiers, the directory's nodes, object storage. Ends by `wait_s`."""
        self._node.settle()
        return await self._locator.everywhere(namespace, tables, keys, wait_s)

"""The rules of the slots of all tiers on a node, for code that handles every tier. Event loop only."""

from __future__ import annotations

from collections.abc import Iterator

from kvpool.daemon.core.blocks import NamespaceState
from kvpool.daemon.core.node import Node
from kvpool.daemon.tiers.device_tier import DeviceTier
from kvpool.daemon.tiers.ssd_tier import SsdTier


class TierRules:
    """One `Node` for memory, one for each disk, one for spare device memory. The set of disks may change."""

    def __init__(self, node: Node, ssd: SsdTier, device: DeviceTier | None) -> None:
        self._node = node
        self._ssd = ssd
        self._device = device

    def by_tier(self) -> dict[str, list[Node]]:
        """The rules of each tier, memory first. A node without disks has an empty list for `ssd`."""
        found = {"dram": [self._node], "ssd": self._ssd.rules()}
        if self._device is not None:
            found["device"] = [self._device.rules]
        return found

    def __iter__(self) -> Iterator[tuple[str, Node]]:
        """Each with the name of its tier."""
        for tier, rules in self.by_tier().items():
            for each in rules:
                yield tier, each

    def below(self, namespace: NamespaceState) -> bool:
        """Whether a tier below memory has blocks of a namespace, in any epoch."""
        name, base = namespace.tenant.name, namespace.base
        return any(
            rules.namespaces.holds(tenant, base)
            for _, rules in self
            if rules is not self._node and (tenant := rules.tenants.get(name)) is not None
        )

    def ttl_s(self, namespace: NamespaceState) -> float:
        """The time to live of unused blocks, in seconds; for any tier's state of a namespace."""
        known = self._node.namespaces.by_directory(namespace.directory_digest)
        return 0.0 if known is None else known.settings.ttl_s

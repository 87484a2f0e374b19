"""All tiers of a node, for code that handles every tier. Event loop only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvpool.daemon.core.blocks import NamespaceState
from kvpool.daemon.core.node import Node
from kvpool.daemon.tiers.device_tier import DeviceTier
from kvpool.daemon.tiers.object_tier import ObjectTier
from kvpool.daemon.tiers.ssd_tier import SsdTier


@dataclass(frozen=True, eq=False, slots=True)
class Tiers:
    """The tiers, and the rules of their slots: one `Node` for memory, one for each disk, one for spare device memory.

    The set of disks may change.
    """

    node: Node
    """The rules of memory."""
    ssd: SsdTier
    device: DeviceTier | None
    objects: ObjectTier

    def by_tier(self) -> dict[str, list[Node]]:
        """The rules of each tier, memory first. A node without disks has an empty list for `ssd`."""
        found = {"dram": [self.node], "ssd": self.ssd.rules()}
        if self.device is not None:
            found["device"] = [self.device.rules]
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
            if rules is not self.node and (tenant := rules.tenants.get(name)) is not None
        )

    def ttl_s(self, namespace: NamespaceState) -> float:
        """The time to live of unused blocks, in seconds; for any tier's state of a namespace."""
        known = self.node.namespaces.by_directory(namespace.directory_digest)
        return 0.0 if known is None else known.settings.ttl_s

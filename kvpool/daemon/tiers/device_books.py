"""The books of spare device memory: the contents of its slots, in this life of the owning process.

The rules of its slots are those of memory: a `Node` of its own. All of it ends with the process that owns the
memory, so a new life begins empty.

Event loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from kvpool.config import DeviceConfig
from kvpool.daemon.core.block_index import BlockIndex
from kvpool.daemon.core.blocks import Block, NamespaceState, PartTable
from kvpool.daemon.core.node import Node
from kvpool.daemon.tiers.slot_books import SlotBooks
from kvpool.daemon.tiers.tier_state import TierState
from kvpool.daemon.workers.device_proxy import Device
from kvpool.errors import ConfigError, InvalidRequest, LimitExceeded
from kvpool.storage.base import Occupancy
from kvpool.telemetry.tier_stats import DeviceStats
from kvpool.types import PartSpec

GRAIN = 2 << 20  # parts of tenants are whole numbers of it
PART_MIN = 20 << 20
"""The smallest part on a CUDA device. Torch cuts smaller ones from shared allocations, and a client that
gets a part can reach all of its allocation.
"""


@dataclass(eq=False)
class DeviceBooks(SlotBooks):
    """See the module. make_rules: rules of an empty tier."""

    config: DeviceConfig
    node: Node
    clock: Callable[[], float]
    make_rules: Callable[[], Node]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sizes: dict[str, int] = {}  # of each tenant's part
        self.process: Device | None = None
        self.counted = DeviceStats()

    def divide(self) -> None:
        """Give tenants parts in proportion to their memory."""
        tenants = self.node.tenants.values()
        total = sum(tenant.allocator.size for tenant in tenants)
        for tenant in tenants:
            share = tenant.allocator.size / total
            size = int(self.config.size * share) // GRAIN * GRAIN
            if size < PART_MIN and self.config.device != "cpu":
                size = 0
            self.sizes[tenant.name] = size
        if not any(self.sizes.values()):
            raise ConfigError(
                f"device: {self.config.size} bytes of {self.config.device} give no tenant a part of at least "
                f"{PART_MIN >> 20} MiB: increase the size, or remove the setting"
            )

    def began(self, process: Device) -> None:
        """A new life of the process serves; its memory is empty."""
        self._end_life()
        for name, size in self.sizes.items():
            if size:
                self.rules.add_tenant(name, self.node.tenants[name].segment, size)
                self.holders[name] = self.rules.holders.add(name, "", "device")
        self.process = process
        self.state, self.error = TierState.SERVING, ""

    def ended(self, error: str) -> None:
        """The process is dead, or cannot be started: the tier is empty."""
        self._end_life()
        self.state, self.error = TierState.FAILED, error

    def _end_life(self) -> None:
        self.process = None
        self.renew()

    def open(self, namespace: NamespaceState) -> NamespaceState | None:
        """The rules' own state of a namespace; None if its blocks cannot be here."""
        try:
            return self.open_state(
                namespace, [PartSpec(table.stride) for table in namespace.tables]
            )
        except (InvalidRequest, LimitExceeded):
            return None

    def promoted(self, table: PartTable) -> BlockIndex[Block]:
        """The keys here of a table in memory, after `settle`."""
        own = self.table(table)
        return own.blocks if own is not None and own.stride == table.stride else BlockIndex()

    @property
    def serving(self) -> bool:
        """See `Tier`."""
        return self.state is TierState.SERVING

    def held(self, table: PartTable) -> list[Container[bytes]]:
        """See `LocalTier`."""
        own = self.table(table)
        return [own.blocks] if own is not None and own.blocks else []

    def take_changes(self) -> list[tuple[NamespaceState, Sequence[bytes]]]:
        """See `Inventory.take_changes`; the namespaces are this tier's own."""
        return self.rules.inventory.take_changes()

    def masks(self, digest: bytes, keys: Sequence[bytes]) -> tuple[int, list[int]]:
        """See `Inventory.masks`."""
        return self.rules.inventory.masks(digest, keys)

    def walk(self, cursor: int, count: int) -> tuple[list[tuple[bytes, list[bytes]]], int | None]:
        """See `Inventory.walk`."""
        return self.rules.inventory.walk(cursor, count)

    def occupancy(self) -> Occupancy:
        """See `Tier`."""
        return Occupancy(
            sum(self.sizes.values()), self.used_bytes, self.rules.inventory.block_count()
        )

    @property
    def life(self) -> int:
        """The life of the serving process; 0: none."""
        return 0 if self.process is None else self.process.life

"""This node's disks as one tier: lookups of blocks on them, and reads back to memory.

Blocks evicted from memory are still here (`ssd_demote`), and the fetcher fetches them as it fetches from other
nodes: each disk is one more source, with its own speed and its own failures.

Event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from kvpool.config import DaemonConfig
from kvpool.daemon.core.blocks import Block, NamespaceState, Tenant
from kvpool.daemon.core.ended_epochs import GARBAGE_BLOCKS
from kvpool.daemon.core.node import Node
from kvpool.daemon.tiers.ssd_books import TableRecord
from kvpool.daemon.tiers.ssd_demote import SsdDemotion
from kvpool.daemon.tiers.ssd_device import SsdDevice
from kvpool.daemon.tiers.ssd_processes import SsdProcesses
from kvpool.daemon.tiers.ssd_source import SsdSource
from kvpool.daemon.tiers.tier_state import TierState
from kvpool.daemon.tiers.write_orders import give_garbage_back
from kvpool.errors import KvpoolError
from kvpool.placement.records import TierRecord
from kvpool.storage.base import Occupancy
from kvpool.tasks import Tasks
from kvpool.telemetry.memory_stats import PlaceUsage
from kvpool.telemetry.tier_stats import TiersStats

log = logging.getLogger("kvpool.daemon")

TIDY_EVERY_S = 1.0
WALK_CURSORS = 1 << 56  # for one device


@dataclass(eq=False)
class SsdTier:
    """A `LocalTier`; see the module.

    adopt: registers a namespace found in an index; see `SsdDevice.restore`.
    """

    _config: DaemonConfig
    node: Node
    _clock: Callable[[], float]
    _make_rules: Callable[[], Node]
    _adopt: Callable[[TableRecord], Awaitable[NamespaceState | None]]
    _encryption: Callable[[], list[bytes]] = list

    def __post_init__(self) -> None:
        config = self._config
        shares, total = config.ssd_shares(), sum(disk.size for disk in config.ssd)
        self.devices = [
            SsdDevice(
                *(disk.path, disk.size, shares, self._make_rules, self._clock),
                weight=disk.size / total,
            )
            for disk in config.ssd
        ]
        self._tasks = Tasks()
        demotion = self._demotion = SsdDemotion(
            config, self.node, self._clock, self.devices, self._tasks
        )
        self.mode, self.stored, self.store = demotion.mode, demotion.stored, demotion.store
        self.flush, self.budget, self.counted = demotion.flush, demotion.budget, demotion.counted
        self.clean_share = demotion.clean_share
        processes = self.processes = SsdProcesses(
            *(self.devices, config.ssd, self._adopt, self._encryption),
            *(demotion.disk_opened, self._tasks),
        )
        self.start, self.use_secrets = processes.start, processes.use_secrets
        self._source = SsdSource(self.devices, self._clock, demotion.memory_filled)
        self.held, self.load = self._source.held, self._source.load

    @property
    def serving(self) -> bool:
        """See `Tier`."""
        return self._source.serving

    def begin(self) -> None:
        """Start the background tasks."""
        if self.devices:
            demotion = self._demotion
            for work in (demotion.write_through(), demotion.write_ahead(), self._tidy()):
                self._tasks.begin(work)

    async def close(self) -> None:
        """See `Tier`."""
        await self._tasks.end()
        await self.processes.stop()

    def enter(self, namespace: NamespaceState) -> None:
        """See `SsdDevice.enter`."""
        for device in self.devices:
            device.enter(namespace)

    def limit(self, namespace: NamespaceState) -> None:
        """See `SsdDevice.limit`."""
        for device in self.devices:
            device.limit(namespace)

    async def record(self, namespace: NamespaceState) -> None:
        """See `SsdDevice.record`."""
        for device in self.devices:
            await device.record(namespace)

    def sources(self, count_max: int) -> list[SsdSource]:
        """Each disk; with more than so many, some together."""
        count = min(count_max, len(self.devices))
        filled = self._demotion.memory_filled
        return [
            SsdSource(self.devices[number::count_max], self._clock, filled)
            for number in range(count)
        ]

    def follow_changes(self, changed: Callable[[], object]) -> None:
        """See `Inventory.follow_changes`."""
        for device in self.devices:
            device.follow_changes(changed)

    def take_changes(self) -> list[tuple[NamespaceState, Sequence[bytes]]]:
        """See `Inventory.take_changes`; the namespaces are the devices' own."""
        return [
            change for device in self.devices for change in device.rules.inventory.take_changes()
        ]

    def masks(self, digest: bytes, keys: Sequence[bytes]) -> tuple[int, list[int]]:
        """See `Inventory.masks`: what is on any disk."""
        parts, masks = 0, [0] * len(keys)
        for device in self.devices:
            here, found = device.masks(digest, keys)
            if here:
                parts = here
                masks = [mask | more for mask, more in zip(masks, found, strict=True)]
        return parts, masks if parts else []

    def walk(self, cursor: int, count: int) -> tuple[list[tuple[bytes, list[bytes]]], int | None]:
        """See `Inventory.walk`: one disk after the other."""
        number, at = divmod(cursor, WALK_CURSORS)
        if number >= len(self.devices):
            return [], None
        groups, more = self.devices[number].rules.inventory.walk(at, count)
        return groups, self._onward(number, more)

    def _onward(self, number: int, more: int | None) -> int | None:
        """The cursor of all disks after one of this disk; None: that was the last one."""
        if more is None:
            number, more = number + 1, 0
        return number * WALK_CURSORS + more if number < len(self.devices) else None

    async def _tidy(self) -> None:
        """Free slots of ended epochs, and have the indexes forget them."""
        while True:
            await asyncio.sleep(TIDY_EVERY_S)
            for device in self.devices:
                await give_garbage_back(device.rules)
                if device.state is TierState.OPENING:
                    continue  # the index drops tables on its own when all their entries are forgotten
                too_much = True
                while too_much:
                    too_much = device.rules.quotas.tend(GARBAGE_BLOCKS)
                    await asyncio.sleep(0)
                try:
                    await device.tidy()
                except KvpoolError:
                    pass  # it is retried, or the disk's next life begins without them

    def remove(self, namespace: NamespaceState, packed: bytes) -> set[bytes]:
        """See `LocalTier`: on all disks."""
        gone: set[bytes] = set()
        for device in self.devices:
            gone |= device.remove(namespace, packed)
        return gone

    def expend(self, namespace: NamespaceState, keys: Sequence[bytes]) -> None:
        """These blocks go before others, in this order, until they are read."""
        digest = namespace.directory_digest
        for device in self.devices:
            state = device.rules.namespaces.by_directory(digest)
            if state is not None:
                device.rules.candidates.expend(state, keys)

    def ordinary(self, namespace: NamespaceState, keys: list[bytes]) -> list[bytes]:
        """See `Candidates.ordinary`."""
        digest = namespace.directory_digest
        for device in self.devices:
            state = device.rules.namespaces.by_directory(digest)
            if state is not None:
                keys = device.rules.candidates.ordinary(state, keys)
        return keys

    def rules(self) -> list[Node]:
        """Those of each disk's slots."""
        return [device.rules for device in self.devices]

    async def pin(self, namespace: NamespaceState, packed: bytes, kind: str) -> set[bytes]:
        """See `SsdDevice.pin`."""
        found: set[bytes] = set()
        for device in self.devices:
            found |= await device.pin(namespace, packed, kind)
        return found

    async def scrub(self, cursor: int, count: int) -> tuple[int, int, int | None]:
        """See `SsdDevice.scrub`: one disk after the other."""
        number, at = divmod(cursor, WALK_CURSORS)
        if number >= len(self.devices):
            return 0, 0, None
        seen, bad, more = await self.devices[number].scrub(at, count)
        return seen, bad, self._onward(number, more)

    async def parents(self, blocks: Iterable[Block]) -> list[bytes]:
        """The key before each block in its chain, in memory or on a disk; empty: it is the first one, or not known.

        For a block on a disk the index is asked, if the block before it is not on that disk. Raises `Unavailable`.
        """
        found: dict[Block, bytes] = {}
        unknown: dict[tuple[SsdDevice, Tenant], list[Block]] = {}
        for block in blocks:
            found[block] = block.parent
            if not block.parent_known:
                tenant = block.table.namespace.tenant
                for device in self.devices:
                    if device.rules.tenants.get(tenant.name) is tenant:
                        unknown.setdefault((device, tenant), []).append(block)
        for (device, _), some in unknown.items():
            found.update(zip(some, await device.parents(some), strict=True))
        return list(found.values())

    def occupancy(self) -> Occupancy:
        """See `Tier`: of all disks."""
        return Occupancy(
            sum(device.segment_bytes for device in self.devices),
            sum(device.used_bytes for device in self.devices),
            sum(device.rules.inventory.block_count() for device in self.devices),
        )

    def records(self) -> list[TierRecord]:
        """The tiers as announced to others."""
        size, used, _ = self.occupancy()
        return [TierRecord("ssd", size, used)]

    def usage(self, tenant: str) -> list[PlaceUsage]:
        """A tenant's usage of each disk: see `Inventory.usage`; empty while a disk is not open."""
        found = [
            (device.path, device.rules, device.rules.tenants.get(tenant)) for device in self.devices
        ]
        return [node.inventory.usage(part, path) for path, node, part in found if part is not None]

    def stats(self) -> TiersStats:
        """Counters, with how much is queued, and may be written, now. `object`, `device` and `clean_share` are others' to set."""
        stats, budget = self.counted, self.budget
        stats.queued_writes = self._demotion.queued
        stats.budget_bytes_per_day = budget.bytes_a_day
        stats.budget_left_bytes = budget.left_bytes(self._clock())
        stats.budget_refused_bytes = budget.refused_bytes
        self.processes.count_hangs()
        stats.ssd = [device.stats() for device in self.devices]
        return stats

"""This node's disks as one tier: lookups of blocks on them, and reads back to memory.

Blocks evicted from memory are still here (`ssd_demote`), and the fetcher fetches them as it fetches from other
nodes: each disk is one more source, with its own speed and its own failures.

Event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from dataclasses import dataclass

from kvpool.config import DaemonConfig, DiskConfig
from kvpool.daemon.core.blocks import Block, NamespaceState, PartTable, Tenant
from kvpool.daemon.core.ended_epochs import GARBAGE_BLOCKS
from kvpool.daemon.core.node import Node
from kvpool.daemon.tasks import Tasks, crash_if_failed
from kvpool.daemon.tiers.ssd_books import TableRecord
from kvpool.daemon.tiers.ssd_demote import SsdDemotion
from kvpool.daemon.tiers.ssd_device import SsdDevice, device_of
from kvpool.daemon.tiers.tier_state import TierState
from kvpool.daemon.tiers.write_orders import (
    EMPTY_KEY,
    give_garbage_back,
)
from kvpool.daemon.workers.disk_proxy import DiskWorkerProxy
from kvpool.daemon.workers.supervisor import WorkerSupervisor
from kvpool.errors import KvpoolError, Unavailable
from kvpool.memory.segment import Segment
from kvpool.placement.records import TierRecord
from kvpool.storage.base import Occupancy
from kvpool.telemetry.memory_stats import PlaceUsage
from kvpool.telemetry.tier_stats import TiersStats
from kvpool.types import split_keys
from kvpool.wire import frame
from kvpool.wire import worker as worker_wire

log = logging.getLogger("kvpool.daemon")

TIDY_EVERY_S = 1.0
START_WAIT_S = 5.0  # for disks, before the node reports that it is ready
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
        self._workers: dict[SsdDevice, DiskWorkerProxy] = {}  # the last life of each
        self._supervisors: dict[SsdDevice, WorkerSupervisor[DiskWorkerProxy]] = {}
        self._tasks = Tasks()
        self._opened = asyncio.Event()
        self._notify: Callable[[], object] = lambda: None
        self._following = False
        shares, total = self._config.ssd_shares(), sum(disk.size for disk in self._config.ssd)
        self.devices = [
            SsdDevice(
                *(disk.path, disk.size, shares, self._make_device_rules, self._clock),
                weight=disk.size / total,
            )
            for disk in self._config.ssd
        ]
        demotion = self._demotion = SsdDemotion(
            self._config, self.node, self._clock, self.devices, self._tasks
        )
        self.mode, self.stored, self.store = demotion.mode, demotion.stored, demotion.store
        self.flush, self.budget, self.counted = demotion.flush, demotion.budget, demotion.counted
        self.clean_share = demotion.clean_share

    def _make_device_rules(self) -> Node:
        node = self._make_rules()
        if self._following:
            node.inventory.follow_changes(self._notify)
        return node

    async def start(self, segments: dict[int, Segment]) -> None:
        """Start all disks and restore their contents; continues in the background when it takes long.

        A disk that cannot be opened is logged, and retried periodically.
        """
        for device, disk in zip(self.devices, self._config.ssd, strict=True):
            self._tasks.begin(self._run_disk(device, disk, segments))
        try:
            async with asyncio.timeout(START_WAIT_S):
                while self._demotion.opening():
                    await self._opened.wait()
                    self._opened.clear()
        except TimeoutError:
            log.warning(
                "a disk takes long to open: its blocks become available while its index is read"
            )

    async def _run_disk(
        self, device: SsdDevice, disk: DiskConfig, segments: dict[int, Segment]
    ) -> None:
        """Keep a disk's process running, and its device filled."""
        restoring: set[asyncio.Task[None]] = set()

        def began(process: DiskWorkerProxy) -> None:
            self._workers[device] = process
            process.use_secrets()
            task = asyncio.get_running_loop().create_task(self._restore(device, process))
            restoring.add(task)
            task.add_done_callback(restoring.discard)
            task.add_done_callback(crash_if_failed)

        def ended(error: str) -> None:
            device.ended(error)
            self._opened.set()

        supervisor = WorkerSupervisor(
            lambda: DiskWorkerProxy(disk, segments, self._encryption), began, ended
        )
        self._supervisors[device] = supervisor
        await supervisor.insist(f"the disk at {disk.path}")

    async def _restore(self, device: SsdDevice, process: DiskWorkerProxy) -> None:
        try:
            await device.restore(process, self._adopt)
        except Unavailable:
            return  # it has died again
        log.info(
            "the disk at %s holds %d blocks",
            device.path,
            device.node.inventory.block_count(),
            extra={"disk": device.path},
        )
        self._demotion.disk_opened()
        self._opened.set()

    def begin(self) -> None:
        """Start the background tasks."""
        if self.devices:
            demotion = self._demotion
            for work in (demotion.write_through(), demotion.write_ahead(), self._tidy()):
                self._tasks.begin(work)

    async def close(self) -> None:
        """See `Tier`."""
        await self._tasks.end()
        await asyncio.gather(*[supervisor.stop() for supervisor in self._supervisors.values()])
        self._supervisors.clear()
        for device in self.devices:
            device.ended("it is closed")

    def use_secrets(self) -> None:
        """The secrets of the encryption at rest have changed."""
        for process in self._workers.values():
            process.use_secrets()

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

    @property
    def serving(self) -> bool:
        """See `Tier`."""
        return _any_serves(self.devices)

    def held(self, table: PartTable) -> list[Container[bytes]]:
        """See `LocalTier`. Very recently written blocks may be missing."""
        return _held_by(self.devices, table)

    async def load(
        self, table: PartTable, keys: Sequence[bytes], rows: Sequence[int], seconds: float
    ) -> worker_wire.Pulled:
        """See `Tier`: from all disks at the same time."""
        return await self.load_from(self.devices, table, keys, rows, seconds)

    def sources(self, count_max: int) -> list[SsdSource]:
        """Each disk; with more than so many, some together."""
        count = min(count_max, len(self.devices))
        return [SsdSource(self, self.devices[number::count_max]) for number in range(count)]

    async def load_from(
        self,
        devices: Sequence[SsdDevice],
        table: PartTable,
        keys: Sequence[bytes],
        rows: Sequence[int],
        seconds: float,
    ) -> worker_wire.Pulled:
        """As `load`, from these disks."""
        status, checksums = bytearray(len(keys)), [EMPTY_KEY] * len(keys)
        by_device: dict[SsdDevice, list[int]] = {}
        for index, key in enumerate(keys):
            device = device_of(devices, table, key)
            if device is not None:
                by_device.setdefault(device, []).append(index)
        segment = table.namespace.tenant.segment
        started = self._clock()
        reads = [
            device.read(
                table,
                [keys[index] for index in at],
                segment,
                frame.pack_rows([rows[index] for index in at]),
                seconds,
            )
            for device, at in by_device.items()
        ]
        error = ""
        self._demotion.memory_filled()
        # When this is cancelled, so is each of them, and it ends when all have: then nothing writes to the
        # rows.
        found = await asyncio.gather(*reads, return_exceptions=True)
        for at, pulled in zip(by_device.values(), found, strict=True):
            if isinstance(pulled, worker_wire.Pulled):
                error = pulled.error or error
                sums = split_keys(pulled.checksums)
                for index, one, checksum in zip(at, pulled.status, sums, strict=True):
                    status[index], checksums[index] = one, checksum
            elif isinstance(pulled, KvpoolError):
                error = str(pulled)
            else:
                raise pulled
        return worker_wire.Pulled(
            bytes(status), b"".join(checksums), self._clock() - started, error
        )

    def follow_changes(self, changed: Callable[[], object]) -> None:
        """See `Inventory.follow_changes`."""
        self._notify, self._following = changed, True
        for device in self.devices:
            device.node.inventory.follow_changes(changed)

    def take_changes(self) -> list[tuple[NamespaceState, Sequence[bytes]]]:
        """See `Inventory.take_changes`; the namespaces are the devices' own."""
        return [
            change for device in self.devices for change in device.node.inventory.take_changes()
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
        groups, more = self.devices[number].node.inventory.walk(at, count)
        if more is not None:
            return groups, number * WALK_CURSORS + more
        number += 1
        return groups, number * WALK_CURSORS if number < len(self.devices) else None

    async def _tidy(self) -> None:
        """Free slots of ended epochs, and have the indexes forget them."""
        while True:
            await asyncio.sleep(TIDY_EVERY_S)
            for device in self.devices:
                await give_garbage_back(device.node)
                if device.state is TierState.OPENING:
                    continue  # the index drops tables on its own when all their entries are forgotten
                too_much = True
                while too_much:
                    too_much = device.node.quotas.tend(GARBAGE_BLOCKS)
                    await asyncio.sleep(0)
                try:
                    await device.tidy()
                except KvpoolError:
                    pass  # it is retried, or the disk's next life begins without them

    def remove(self, namespace: NamespaceState, packed: bytes) -> set[bytes]:
        """See `LocalTier`: on all disks."""
        gone: set[bytes] = set()
        for device in self.devices:
            state = device.node.namespaces.by_directory(namespace.directory_digest)
            if state is not None:
                gone |= device.node.removal.remove(state, split_keys(packed))
        return gone

    def expend(self, namespace: NamespaceState, keys: Sequence[bytes]) -> None:
        """These blocks go before others, in this order, until they are read."""
        digest = namespace.directory_digest
        for device in self.devices:
            state = device.node.namespaces.by_directory(digest)
            if state is not None:
                device.node.candidates.expend(state, keys)

    def ordinary(self, namespace: NamespaceState, keys: list[bytes]) -> list[bytes]:
        """See `Candidates.ordinary`."""
        digest = namespace.directory_digest
        for device in self.devices:
            state = device.node.namespaces.by_directory(digest)
            if state is not None:
                keys = device.node.candidates.ordinary(state, keys)
        return keys

    def rules(self) -> list[Node]:
        """Those of each disk's slots."""
        return [device.node for device in self.devices]

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
        if more is not None:
            return seen, bad, number * WALK_CURSORS + more
        number += 1
        return seen, bad, number * WALK_CURSORS if number < len(self.devices) else None

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
                    if device.node.tenants.get(tenant.name) is tenant:
                        unknown.setdefault((device, tenant), []).append(block)
        for (device, _), some in unknown.items():
            found.update(zip(some, await device.parents(some), strict=True))
        return list(found.values())

    def occupancy(self) -> Occupancy:
        """See `Tier`: of all disks."""
        return Occupancy(
            sum(device.segment_bytes for device in self.devices),
            sum(device.used_bytes for device in self.devices),
            sum(device.node.inventory.block_count() for device in self.devices),
        )

    def lost_since(self, at: float) -> str:
        """The folder of a disk whose process has ended since then, so that blocks may be lost; empty: of none."""
        lost = (d.path for d in self.devices if d.lost_at is not None and d.lost_at >= at)
        return next(lost, "")

    def records(self) -> list[TierRecord]:
        """The tiers as announced to others."""
        size, used, _ = self.occupancy()
        return [TierRecord("ssd", size, used)]

    def usage(self, tenant: str) -> list[PlaceUsage]:
        """A tenant's usage of each disk: see `Inventory.usage`; empty while a disk is not open."""
        found = [
            (device.path, device.node, device.node.tenants.get(tenant)) for device in self.devices
        ]
        return [node.inventory.usage(part, path) for path, node, part in found if part is not None]

    def stats(self) -> TiersStats:
        """Counters, with how much is queued, and may be written, now. `object`, `device` and `clean_share` are others' to set."""
        stats, budget = self.counted, self.budget
        stats.queued_writes = self._demotion.queued
        stats.budget_bytes_per_day = budget.bytes_a_day
        stats.budget_left_bytes = budget.left_bytes(self._clock())
        stats.budget_refused_bytes = budget.refused_bytes
        for device, supervisor in self._supervisors.items():
            device.counted.hangs = supervisor.hangs
        stats.ssd = [device.stats() for device in self.devices]
        return stats


class SsdSource:
    """One disk, as a source of its own: what another one does is nothing to its readers."""

    def __init__(self, tier: SsdTier, devices: Sequence[SsdDevice]) -> None:
        self._tier = tier
        self._devices = devices

    @property
    def serving(self) -> bool:
        """See `Tier`."""
        return _any_serves(self._devices)

    def held(self, table: PartTable) -> list[Container[bytes]]:
        """See `SsdTier.held`."""
        return _held_by(self._devices, table)

    async def load(
        self, table: PartTable, keys: Sequence[bytes], rows: Sequence[int], seconds: float
    ) -> worker_wire.Pulled:
        """See `Tier`."""
        return await self._tier.load_from(self._devices, table, keys, rows, seconds)


def _any_serves(devices: Sequence[SsdDevice]) -> bool:
    return any(device.state is not TierState.FAILED for device in devices)


def _held_by(devices: Sequence[SsdDevice], table: PartTable) -> list[Container[bytes]]:
    held: list[Container[bytes]] = []
    for device in devices:
        held += [own.blocks for own in device.holding(table) if own.blocks]
    return held

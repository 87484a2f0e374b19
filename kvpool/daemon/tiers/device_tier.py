"""A tier of spare device memory on this node.

Blocks that this node's engines read again are copied to it in the background, from a bounded queue. Memory may
then evict its replica as any other. Clients that have attached to the device read there directly, by leases on
both (`DeviceTier.acquire`). For others, and for peers, blocks only on the device come back through memory: the
fetcher fetches them as it fetches from disks.

The rules of its slots are those of memory: a `Node` of its own. All of it ends with the process that owns the
memory, so a new life begins empty.

Event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from kvpool.daemon.core.blocks import (
    Beside,
    Block,
    Holder,
    Lease,
    NamespaceState,
    PartTable,
    Tenant,
    checksums_of,
)
from kvpool.daemon.tiers.device_books import DeviceBooks
from kvpool.daemon.tiers.device_promote import DevicePromotion
from kvpool.daemon.tiers.slot_books import leased, pulled_none, pulled_some
from kvpool.daemon.tiers.write_orders import give_garbage_back
from kvpool.daemon.workers.device_proxy import DeviceWorkerProxy
from kvpool.daemon.workers.supervisor import WorkerSupervisor
from kvpool.errors import ConfigError, KvpoolError, LimitExceeded
from kvpool.hit_rule import AnyOf, first_needed, needed, usable
from kvpool.memory.segment import Segment
from kvpool.placement.records import TierRecord
from kvpool.tasks import Tasks
from kvpool.telemetry.tier_stats import DeviceStats
from kvpool.types import BlockStatus
from kvpool.wire import frame
from kvpool.wire import worker as worker_wire

log = logging.getLogger("kvpool.daemon")

TIDY_EVERY_S = 1.0


def check_environment() -> None:
    """Raises `ConfigError` if there can be no such tier."""
    if find_spec("torch") is None:
        raise ConfigError("device: device memory needs torch in the daemon's environment")


class DeviceTier(DeviceBooks):
    """A `LocalTier`; see the module, and `DeviceBooks`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._supervisor: WorkerSupervisor[DeviceWorkerProxy] | None = None
        self._tasks = Tasks()
        promotion = self._promotion = DevicePromotion(self, self._tasks)
        self.was_read, self.store = promotion.was_read, promotion.store

    def start(self, segments: Mapping[int, Segment]) -> None:
        """Start the process. The node serves meanwhile, and also if the process cannot be started.

        segments: of the tenants, by number.
        """
        self.divide()
        sizes = {tenant.segment: self.sizes[name] for name, tenant in self.node.tenants.items()}
        order = worker_wire.DeviceStart(
            self.config.device, [sizes[number] for number in sorted(sizes)]
        )
        self._tasks.begin(self._run(order, segments))
        self.begin()

    def begin(self) -> None:
        """Start the background tasks."""
        self._tasks.begin(self._promotion.run())
        self._tasks.begin(self._tidy())

    async def _run(self, order: worker_wire.DeviceStart, segments: Mapping[int, Segment]) -> None:
        supervisor = WorkerSupervisor(
            lambda: DeviceWorkerProxy(order, segments), self.began, self.ended
        )
        self._supervisor = supervisor
        await supervisor.insist(f"memory of {self.config.device}")

    async def close(self) -> None:
        """See `Tier`."""
        await self._tasks.end()
        if self._supervisor is not None:
            await self._supervisor.stop()
        self.ended("it is closed")

    async def _tidy(self) -> None:
        """Free slots of ended epochs."""
        while True:
            await asyncio.sleep(TIDY_EVERY_S)
            await give_garbage_back(self.rules)

    async def export(self, tenant: Tenant) -> tuple[bytes, int, int] | None:
        """A handle of the tenant's part, its life, and the descriptor that signals that life's end.

        The descriptor is the tier's, and valid until the event loop continues. None if there is nothing to attach
        to.
        """
        process = self.process
        if process is None or not self.sizes.get(tenant.name):
            return None
        try:
            handle = await process.export(tenant.segment)
            life_fd = process.life_fd
        except KvpoolError as error:
            log.warning(
                "a client did not get access to the memory of %s: %s", self.config.device, error
            )
            return None
        return (handle, process.life, life_fd) if process is self.process else None

    def acquire(
        self,
        holder: Holder,
        namespace: NamespaceState,
        parts: Sequence[int],
        keys: Sequence[bytes],
        lease_s: float,
        now: float,
    ) -> Lease | None:
        """As `Leases.acquire` of memory, for a client that reads the device itself: a lease on both.

        Blocks on the device are leased there, even if they are in memory as well. The device lease
        ends with the memory lease, however that ends.
        """
        rules, node, life = self.rules, self.node, self.life
        node.settle()
        rules.settle()
        tables = namespace.tables_of(parts)
        promoted = [self.promoted(table) for table in tables]
        specs = [table.spec for table in tables]
        held = [AnyOf((table.blocks, above)) for table, above in zip(tables, promoted, strict=True)]
        n = usable(specs, held, keys)
        here: dict[int, list[Block | None]] = {}
        below: dict[int, tuple[int, list[Block]]] = {}
        chosen: dict[int, tuple[int, list[Block]]] = {}
        for table, above in zip(tables, promoted, strict=True):
            part, wanted = table.part, needed(table.spec, keys[:n])
            first = first_needed(table.spec, n) - table.spec.stride + 1
            here[part] = [above.get(key) for key in wanted]
            chosen[part] = first, [block for block in here[part] if block is not None]
            below[part] = first, [table.blocks[key] for key in wanted if key not in above]
        if not any(blocks for _, blocks in chosen.values()):
            return node.leases.acquire(holder, namespace, parts, keys, lease_s, now)
        own = self.holders[namespace.tenant.name]
        try:
            direct = rules.leases.lease(own, chosen, n, None, now)
        except LimitExceeded:  # with very many readers of the device: memory only
            return node.leases.acquire(holder, namespace, parts, keys, lease_s, now)
        try:
            lease = node.leases.lease(holder, below, n, lease_s, now)
        except KvpoolError:
            rules.leases.release(own, direct.token)
            raise
        nbytes = sum(block.table.spec.nbytes for _, blocks in chosen.values() for block in blocks)
        lease.beside = Beside(life, here, lambda: rules.leases.release(own, direct.token), nbytes)
        self.counted.leased_blocks += sum(len(blocks) for _, blocks in chosen.values())
        self.counted.leased_bytes += nbytes
        return lease

    async def load(
        self, table: PartTable, keys: Sequence[bytes], rows: Sequence[int], seconds: float
    ) -> worker_wire.Pulled:
        """See `Tier`."""
        rules, process, own = self.rules, self.process, self.table(table)
        lease = None if own is None or process is None else self.lease(own, keys)
        if own is None or process is None or lease is None:
            return pulled_none(len(keys))
        at, blocks = leased([lease], keys)
        packed = checksums_of(blocks)
        try:
            pulled = await process.demote(
                worker_wire.DemoteBlocks(
                    segment=table.namespace.tenant.segment,
                    stride=table.stride,
                    nbytes=table.spec.nbytes,
                    rows=frame.pack_rows([rows[index] for index in at]),
                    device_rows=array("I", [block.row for block in blocks]).tobytes(),
                    checksums=packed,
                    deadline_s=seconds,
                )
            )
        except KvpoolError:
            self.counted.read_errors += 1
            raise
        finally:
            self.release(rules, own, lease)
        for block, one in zip(blocks, pulled.status, strict=True):
            if one == BlockStatus.MISMATCH:
                rules.removal.drop_corrupt(own.namespace, own.part, block.key)
        came = pulled.status.count(BlockStatus.PRESENT)
        self.counted.read_blocks += came
        self.counted.read_bytes += came * table.spec.nbytes
        self.counted.mismatches += pulled.status.count(BlockStatus.MISMATCH)
        return pulled_some(len(keys), at, packed, pulled.status, pulled)

    def record(self) -> TierRecord:
        """The tier as announced to others."""
        size, used, _ = self.occupancy()
        return TierRecord("device", size, used)

    def stats(self) -> DeviceStats:
        """Counters, with how it is now."""
        stats = self.counted
        stats.path, stats.size_bytes = self.config.device, self.config.size
        stats.state, stats.error = str(self.state), self.error
        stats.segment_bytes, stats.used_bytes = sum(self.sizes.values()), self.used_bytes
        stats.blocks = self.rules.inventory.block_count()
        stats.queued_blocks = self._promotion.queued
        stats.gone = self.rules.counters.gone()
        return stats

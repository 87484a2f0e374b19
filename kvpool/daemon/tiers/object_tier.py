"""Object storage, below all other tiers.

It is cold, and shared by the nodes of a cluster: all nodes find a node's objects by the catalog, even after it
has died. The fetcher fetches from it as from another node.

Event loop only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from kvpool.config import DaemonConfig
from kvpool.daemon.tiers.object_books import ObjectBooks
from kvpool.daemon.tiers.object_read import ObjectReader
from kvpool.daemon.tiers.object_scan import ObjectScan
from kvpool.daemon.tiers.object_write import ObjectWriter
from kvpool.daemon.tiers.tier_state import ObjectTierState
from kvpool.daemon.workers.object_proxy import ObjectStorage, ObjectWorkerProxy
from kvpool.daemon.workers.supervisor import WorkerSupervisor
from kvpool.memory.segment import Segment
from kvpool.storage.base import Occupancy
from kvpool.telemetry.tier_stats import ObjectStats
from kvpool.wire import storage as storage_wire


class ObjectTier(ObjectBooks):
    """A `SharedTier`; see the module. Without a URL in the configuration it is empty, and does nothing.

    catalog: owned by the tier from now on. secrets: the cluster's, those accepted now. encryption: the secrets of the
    encryption at rest.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._supervisor: WorkerSupervisor[ObjectWorkerProxy] | None = None
        self._worker: ObjectWorkerProxy | None = None  # the last life
        reader, writer, scan = ObjectReader(self), ObjectWriter(self), ObjectScan(self)
        self._writer, self._scan = writer, scan
        self.where, self.load = reader.where, reader.load
        self.mode, self.store, self.remove = writer.mode, writer.store, writer.remove
        self.flush, self.enter = writer.flush, scan.enter

    async def start(self, segments: Mapping[int, Segment]) -> None:
        """Start the process. Raises `ConfigError` for settings that can never work.

        Object storage that does not answer is logged, and retried periodically.
        """
        config = self.config
        if not config.object_store:
            return
        order = storage_wire.ObjectStart(
            folder_url(config),
            hashlib.sha256(f"{config.cluster}\0{config.node}".encode()).digest()[:8],
            config.object_bytes_max,
            config.object_instance_credentials,
        )

        def began(process: ObjectWorkerProxy) -> None:
            self._worker = process
            process.use_secrets()
            self.serve(process)

        supervisor = WorkerSupervisor(
            lambda: ObjectWorkerProxy(order, segments, self.encryption), began, self.ended
        )
        self._supervisor = supervisor
        await supervisor.start()
        self.begin()

    def use_secrets(self) -> None:
        """The secrets of the encryption at rest have changed."""
        if self._worker is not None:
            self._worker.use_secrets()

    def begin(self) -> None:
        """Start the background tasks."""
        for work in (self._writer.run(), self._scan.tend(), self._scan.listen()):
            self.tasks.begin(work)

    def serve(self, storage: ObjectStorage) -> None:
        """A new life of the process serves."""
        self.storage, self.stocked = storage, False
        self.forget_usage()
        self.state, self.error = ObjectTierState.OPENING, ""
        self.retry.retry_at = 0.0

    async def close(self) -> None:
        """See `Tier`."""
        await self.tasks.end()
        if self._supervisor is not None:
            await self._supervisor.stop()
            self._supervisor = None
        self.ended("it is closed")
        await self.catalog.close()

    def occupancy(self) -> Occupancy:
        """See `Tier`: of this node's own objects, a second ago."""
        stats = self.counted
        return Occupancy(self.config.object_bytes_max, stats.used_bytes, stats.blocks)

    def stats(self) -> list[ObjectStats]:
        """Counters, with how it is now; empty without object storage."""
        stats = self.counted
        stats.state, stats.error, stats.stocked = str(self.state), self.error, self.stocked
        stats.encrypted = bool(self.encryption())
        stats.garbage, stats.writing_blocks = self._scan.garbage, self._writer.under_way
        stats.restarts = 0 if self._supervisor is None else self._supervisor.restarts
        return [stats] if self.config.object_store else []


def folder_url(config: DaemonConfig) -> str:
    """The folder of the objects: nodes share one only if they agree about the epochs of namespaces."""
    folder = f"cluster/{config.cluster}" if config.join else f"node/{config.cluster}/{config.node}"
    return f"{config.object_store.rstrip('/')}/{folder}"

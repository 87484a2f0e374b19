"""The processes of this node's disks: each is kept running, and its contents restored when it has started.

Event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from kvpool.config import DiskConfig
from kvpool.daemon.core.blocks import NamespaceState
from kvpool.daemon.tiers.ssd_books import TableRecord
from kvpool.daemon.tiers.ssd_device import SsdDevice
from kvpool.daemon.tiers.tier_state import TierState
from kvpool.daemon.workers.disk_proxy import Disk, DiskWorkerProxy
from kvpool.daemon.workers.supervisor import WorkerSupervisor
from kvpool.errors import Unavailable
from kvpool.memory.segment import Segment
from kvpool.tasks import Tasks, crash_if_failed

log = logging.getLogger("kvpool.daemon")

START_WAIT_S = 5.0  # for disks, before the node reports that it is ready


@dataclass(eq=False)
class SsdProcesses:
    """See the module.

    disks: the configuration of each device. adopt: registers a namespace found in an index; see `SsdDevice.restore`.
    encryption: the secrets in use now. opened: called when a disk has been restored.
    """

    devices: Sequence[SsdDevice]
    _disks: Sequence[DiskConfig]
    _adopt: Callable[[TableRecord], Awaitable[NamespaceState | None]]
    _encryption: Callable[[], list[bytes]]
    _tell_opened: Callable[[], object]
    _tasks: Tasks

    def __post_init__(self) -> None:
        self._workers: dict[SsdDevice, DiskWorkerProxy] = {}  # the last life of each
        self._supervisors: dict[SsdDevice, WorkerSupervisor[DiskWorkerProxy]] = {}
        self._opened = asyncio.Event()

    async def start(self, segments: dict[int, Segment]) -> None:
        """Start all disks and restore their contents; continues in the background when it takes long.

        A disk that cannot be opened is logged, and retried periodically.
        """
        for device, disk in zip(self.devices, self._disks, strict=True):
            self._tasks.begin(self._run_disk(device, disk, segments))
        try:
            async with asyncio.timeout(START_WAIT_S):
                while any(device.state is TierState.OPENING for device in self.devices):
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
            task = asyncio.get_running_loop().create_task(self.restore(device, process))
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

    async def restore(self, device: SsdDevice, process: Disk) -> None:
        """Fill a device from the index of a new life of its process."""
        try:
            await device.restore(process, self._adopt)
        except Unavailable:
            return  # it has died again
        blocks = device.rules.inventory.block_count()
        device.log.info("the disk at %s holds %d blocks", device.path, blocks)
        self._tell_opened()
        self._opened.set()

    async def stop(self) -> None:
        """End all of them."""
        await asyncio.gather(*[supervisor.stop() for supervisor in self._supervisors.values()])
        self._supervisors.clear()
        for device in self.devices:
            device.ended("it is closed")

    def use_secrets(self) -> None:
        """The secrets of the encryption at rest have changed."""
        for process in self._workers.values():
            process.use_secrets()

    def count_hangs(self) -> None:
        """Note how often each had to be ended because it did not answer."""
        for device, supervisor in self._supervisors.items():
            device.counted.hangs = supervisor.hangs

    def lost_since(self, at: float) -> str:
        """The folder of a disk whose process has ended since then, so that blocks may be lost; empty: of none."""
        lost = (d.path for d in self.devices if d.lost_at is not None and d.lost_at >= at)
        return next(lost, "")

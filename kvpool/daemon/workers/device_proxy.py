"""The control process's side of spare device memory: orders to its process.

Event loop only. See `device_worker.py` for the process itself, and `tiers/device_tier.py` for the rules.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Protocol

from kvpool.daemon.workers.supervisor import Worker
from kvpool.errors import Unavailable
from kvpool.memory.owner_liveness import OwnerLiveness
from kvpool.memory.segment import Segment
from kvpool.wire import frame
from kvpool.wire import worker as worker_wire

EXPORT_S = 1.0


class Device(Protocol):
    """One life of a device worker, as the tier uses it. All raise `Unavailable` once it has ended.

    An order returns, raises or is cancelled only when nothing touches its rows any more, on either side.

    life: identifies this life; random, so that it is unique among daemons. life_fd: signals its
    end (`kvpool.memory.owner_liveness`); not to be closed.
    """

    life: int

    @property
    def life_fd(self) -> int: ...

    async def promote(self, order: worker_wire.PromoteBlocks) -> None: ...

    async def demote(self, order: worker_wire.DemoteBlocks) -> worker_wire.Pulled: ...

    async def export(self, segment: int) -> bytes: ...


class DeviceWorkerProxy(Worker):
    """The real one."""

    module = "kvpool.daemon.workers.device_worker"
    kind = "device"
    decode = worker_wire.decode_device
    fills = (worker_wire.DemoteBlocks,)
    start_s = 300.0  # it loads torch: over a minute from a cold disk, or beside busy processes

    def __init__(self, start: worker_wire.DeviceStart, segments: Mapping[int, Segment]) -> None:
        super().__init__(segments)
        self._begin = start
        self.life = secrets.randbits(62) | 1  # not 0, and a `Count` of the wire
        self._page: OwnerLiveness | None = None

    async def _prepare(self) -> None:
        try:
            page = self._page = OwnerLiveness()
        except OSError as error:
            raise Unavailable(
                f"the page that signals this process's death cannot be created: {error.strerror}"
            ) from None
        await self._ask(self._begin, self.start_s, page.fd)

    def on_worker_exit(self) -> None:
        """Waiting orders fail; readers of its memory are notified."""
        if self._page is not None:
            self._page.end()
            self._page = None

    @property
    def life_fd(self) -> int:
        if self._page is None:
            raise Unavailable("the device process has ended")
        return self._page.fd

    async def export(self, segment: int) -> bytes:
        order = worker_wire.ExportSegment(segment)
        return (await self.expect(frame.Bytes, order, EXPORT_S)).data

    async def promote(self, order: worker_wire.PromoteBlocks) -> None:
        await self.order(order, order.deadline_s)

    async def demote(self, order: worker_wire.DemoteBlocks) -> worker_wire.Pulled:
        return await self.expect(worker_wire.Pulled, order, order.deadline_s)

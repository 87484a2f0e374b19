"""The control process's side of a disk: orders to its process.

Event loop only. A disk worker owns the files of one folder; see `disk_worker.py` for the process itself, and
`tiers/ssd_device.py` for the rules of its contents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from kvpool.config import DiskConfig
from kvpool.daemon.workers.supervisor import START_S, Worker
from kvpool.memory.segment import Segment
from kvpool.wire import frame
from kvpool.wire import storage as storage_wire
from kvpool.wire import worker as worker_wire

OPEN_S = 600.0  # a file system without `fallocate` writes the whole segment once


class Disk(Protocol):
    """One life of a disk worker, as `tiers/ssd_device.py` uses it. All raise `Unavailable` once it has ended.

    An order returns, raises or is cancelled only when nothing touches its rows and slots any more. A process that was
    killed and does not end takes no more orders: its reads end with it, its writes before it, and the next life
    begins after it.
    """

    ready: storage_wire.DiskReady

    async def scan(self, count: int) -> storage_wire.Scanned: ...

    async def entries_of(self, order: storage_wire.ReadEntries) -> storage_wire.Scanned: ...

    async def add_table(self, record: bytes, table: int = 0) -> int: ...

    async def drop_tables(self, tables: list[int]) -> None: ...

    async def pack(self, order: storage_wire.PackBlocks) -> storage_wire.Packed: ...

    def drop_pack(self, pack: int) -> None: ...

    async def write(self, order: storage_wire.WriteBlocks) -> storage_wire.Written: ...

    async def read(self, order: storage_wire.ReadBlocks) -> worker_wire.Pulled: ...

    async def forget(self, order: storage_wire.ForgetSlots) -> None: ...

    async def pin(self, order: storage_wire.PinSlots) -> None: ...

    async def scrub(self, order: storage_wire.ScrubBlocks) -> storage_wire.Written: ...


class DiskWorkerProxy(Worker):
    """The real one."""

    module = "kvpool.daemon.workers.disk_worker"
    kind = "disk"
    decode = storage_wire.decode_disk
    fills = (storage_wire.ReadBlocks,)

    def __init__(
        self,
        config: DiskConfig,
        segments: Mapping[int, Segment],
        encryption: Callable[[], list[bytes]] = list,
    ) -> None:
        super().__init__(segments)
        self._config = config
        self._encryption = encryption
        self.ready: storage_wire.DiskReady

    async def _prepare(self) -> None:
        config = self._config
        self.ready = await self._ask(
            storage_wire.DiskStart(config.path, config.size, config.threads, self._encryption()),
            OPEN_S,
        )
        self.use_secrets()  # they may have changed meanwhile

    def use_secrets(self) -> None:
        """Have the process use the present secrets of the encryption at rest."""
        if secrets := self._encryption():
            self.tell(storage_wire.ChangeSecrets(secrets))

    async def scan(self, count: int) -> storage_wire.Scanned:
        return await self.expect(storage_wire.Scanned, storage_wire.ScanDisk(count), START_S)

    async def entries_of(self, order: storage_wire.ReadEntries) -> storage_wire.Scanned:
        return await self.expect(storage_wire.Scanned, order, order.deadline_s)

    async def add_table(self, record: bytes, table: int = 0) -> int:
        done = await self.expect(frame.Done, storage_wire.AddTable(record, table), START_S)
        return int(done.value)

    async def drop_tables(self, tables: list[int]) -> None:
        await self.expect(frame.Done, storage_wire.DropTables(tables), START_S)

    async def pack(self, order: storage_wire.PackBlocks) -> storage_wire.Packed:
        return await self.expect(storage_wire.Packed, order, order.deadline_s)

    def drop_pack(self, pack: int) -> None:
        self.tell(storage_wire.DropPack(pack))

    async def write(self, order: storage_wire.WriteBlocks) -> storage_wire.Written:
        return await self.expect(storage_wire.Written, order, order.deadline_s)

    async def read(self, order: storage_wire.ReadBlocks) -> worker_wire.Pulled:
        return await self.expect(worker_wire.Pulled, order, order.deadline_s)

    async def forget(self, order: storage_wire.ForgetSlots) -> None:
        await self.expect(frame.Done, order, order.deadline_s)

    async def pin(self, order: storage_wire.PinSlots) -> None:
        await self.expect(frame.Done, order, order.deadline_s)

    async def scrub(self, order: storage_wire.ScrubBlocks) -> storage_wire.Written:
        return await self.expect(storage_wire.Written, order, order.deadline_s)

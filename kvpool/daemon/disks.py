"""The control process's side of a disk: the orders that its process takes.

Event loop only. A disk process owns the files of one folder; see `disk.py` for the process itself, and
`shelf.py` for the rules about what lies there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar

from kvpool import wire
from kvpool.config import DiskConfig
from kvpool.daemon.workers import START_S, Worker
from kvpool.segment import Segment

OPEN_S = 600.0  # a file system without `fallocate` writes the whole segment once

M = TypeVar("M", bound=wire.Message)


class Disk(Protocol):
    """One life of a disk process, as `shelf.py` uses it. All raise `Unavailable` once it has ended.

    An order returns, raises or is cancelled only when nothing touches its rows and slots any more.
    """

    ready: wire.DiskReady

    async def scan(self, count: int) -> wire.Scanned: ...

    async def add_table(self, record: bytes, table: int = 0) -> int: ...

    async def drop_tables(self, tables: list[int]) -> None: ...

    async def pack(self, order: wire.PackBlocks) -> wire.Packed: ...

    def drop_pack(self, pack: int) -> None: ...

    async def write(self, order: wire.WriteBlocks) -> wire.Written: ...

    async def read(self, order: wire.ReadBlocks) -> wire.Pulled: ...

    async def forget(self, order: wire.ForgetSlots) -> None: ...

    async def pin(self, order: wire.PinSlots) -> None: ...

    async def scrub(self, order: wire.ScrubBlocks) -> wire.Written: ...

    async def stats(self) -> bytes: ...


class DiskProcess(Worker):
    """The real one."""

    module = "kvpool.daemon.disk"
    kind = "disk"
    decode = wire.decode_disk

    def __init__(self, config: DiskConfig, segments: Mapping[int, Segment]) -> None:
        super().__init__()
        self._config = config
        self._segments = segments
        self.ready: wire.DiskReady

    async def _prepare(self) -> None:
        config = self._config
        for segment_id, segment in self._segments.items():
            await self.attach(segment_id, segment)
        self.ready = await self._ask(
            wire.DiskStart(config.path, config.size, config.threads), OPEN_S
        )

    def _bury(self) -> None:
        """Whoever waits for an order hears of it."""

    async def scan(self, count: int) -> wire.Scanned:
        return await self._expect(wire.Scanned, wire.ScanDisk(count), START_S)

    async def add_table(self, record: bytes, table: int = 0) -> int:
        done = await self._expect(wire.Done, wire.AddTable(record, table), START_S)
        return int(done.value)

    async def drop_tables(self, tables: list[int]) -> None:
        await self._expect(wire.Done, wire.DropTables(tables), START_S)

    async def pack(self, order: wire.PackBlocks) -> wire.Packed:
        return await self._expect(wire.Packed, order, order.deadline_s)

    def drop_pack(self, pack: int) -> None:
        self.tell(wire.DropPack(pack))

    async def write(self, order: wire.WriteBlocks) -> wire.Written:
        return await self._expect(wire.Written, order, order.deadline_s)

    async def read(self, order: wire.ReadBlocks) -> wire.Pulled:
        return await self._expect(wire.Pulled, order, order.deadline_s)

    async def forget(self, order: wire.ForgetSlots) -> None:
        await self._expect(wire.Done, order, order.deadline_s)

    async def pin(self, order: wire.PinSlots) -> None:
        await self._expect(wire.Done, order, order.deadline_s)

    async def scrub(self, order: wire.ScrubBlocks) -> wire.Written:
        return await self._expect(wire.Written, order, order.deadline_s)

    async def stats(self) -> bytes:
        answer = await self._expect(wire.Bytes, wire.DiskStats(START_S), START_S)
        return bytes(answer.data)

    async def _expect(self, kind: type[M], message: wire.Message, deadline_s: float) -> M:
        answer = await self.order(message, deadline_s)
        assert isinstance(answer, kind), f"a {type(message).__name__} was answered with {answer!r}"
        return answer

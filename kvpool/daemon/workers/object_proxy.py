"""The control process's side of object storage: orders to its process.

Event loop only. See `object_worker.py` for the process itself, and `tiers/object_tier.py` for the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from kvpool.daemon.workers.supervisor import START_S, Worker
from kvpool.decoding import decode_json
from kvpool.memory.segment import Segment
from kvpool.wire import frame
from kvpool.wire import storage as storage_wire
from kvpool.wire import worker as worker_wire


class ObjectStorage(Protocol):
    """One life of an object worker, as `tiers/object_tier.py` uses it. All raise `Unavailable` once it has ended.

    An order returns, raises or is cancelled only when nothing writes to its rows any more.
    """

    async def check(self, order: storage_wire.CheckObjects) -> None: ...

    async def put(self, order: storage_wire.PutObjects) -> storage_wire.ObjectsPut: ...

    async def get(self, order: storage_wire.GetObjects) -> worker_wire.Pulled: ...

    async def packs(self, order: storage_wire.ListPacks) -> storage_wire.PackList: ...

    async def drop(self, order: storage_wire.DropPacks) -> None: ...

    async def forget(self, order: storage_wire.ForgetBlocks) -> storage_wire.ObjectsPut: ...

    async def usage(self) -> storage_wire.ObjectUsage: ...


class ObjectWorkerProxy(Worker):
    """The real one."""

    module = "kvpool.daemon.workers.object_worker"
    kind = "object"
    decode = storage_wire.decode_object
    fills = (storage_wire.GetObjects,)
    alone = False

    def __init__(
        self,
        start: storage_wire.ObjectStart,
        segments: Mapping[int, Segment],
        encryption: Callable[[], list[bytes]] = list,
    ) -> None:
        super().__init__(segments)
        self._begin = start
        self._encryption = encryption

    async def _prepare(self) -> None:
        await self._ask(msgspec.structs.replace(self._begin, secrets=self._encryption()), START_S)
        self.use_secrets()  # they may have changed meanwhile

    def use_secrets(self) -> None:
        """Have the process use the present secrets of the encryption at rest."""
        if secrets := self._encryption():
            self.tell(storage_wire.ChangeSecrets(secrets))

    async def check(self, order: storage_wire.CheckObjects) -> None:
        await self.expect(frame.Done, order, order.deadline_s)

    async def put(self, order: storage_wire.PutObjects) -> storage_wire.ObjectsPut:
        return await self.expect(storage_wire.ObjectsPut, order, order.deadline_s)

    async def get(self, order: storage_wire.GetObjects) -> worker_wire.Pulled:
        return await self.expect(worker_wire.Pulled, order, order.deadline_s)

    async def packs(self, order: storage_wire.ListPacks) -> storage_wire.PackList:
        return await self.expect(storage_wire.PackList, order, order.deadline_s)

    async def drop(self, order: storage_wire.DropPacks) -> None:
        await self.expect(frame.Done, order, order.deadline_s)

    async def forget(self, order: storage_wire.ForgetBlocks) -> storage_wire.ObjectsPut:
        return await self.expect(storage_wire.ObjectsPut, order, order.deadline_s)

    async def usage(self) -> storage_wire.ObjectUsage:
        answer = await self.expect(frame.Bytes, storage_wire.ObjectStats(START_S), START_S)
        return decode_json(answer.data, storage_wire.ObjectUsage, "an object tier's usage")

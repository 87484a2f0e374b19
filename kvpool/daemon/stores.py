"""The control process's side of object storage: the orders that its process takes.

Event loop only. See `store.py` for the process itself, and `store_tier.py` for the rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar

from kvpool import wire
from kvpool.daemon.workers import START_S, Worker
from kvpool.segment import Segment

M = TypeVar("M", bound=wire.Message)


class Store(Protocol):
    """One life of a store process, as `store_tier.py` uses it. All raise `Unavailable` once it has ended.

    An order returns, raises or is cancelled only when nothing touches its rows any more.
    """

    async def check(self, order: wire.CheckStore) -> None: ...

    async def keep(self, order: wire.KeepBlocks) -> wire.Kept: ...

    async def load(self, order: wire.LoadBlocks) -> wire.Pulled: ...

    async def packs(self, order: wire.ListPacks) -> wire.PackList: ...

    async def drop(self, order: wire.DropPacks) -> None: ...

    async def forget(self, order: wire.ForgetBlocks) -> wire.Kept: ...

    async def stats(self) -> bytes: ...


class StoreProcess(Worker):
    """The real one."""

    module = "kvpool.daemon.store"
    kind = "store"
    decode = wire.decode_store

    def __init__(self, start: wire.StoreStart, segments: Mapping[int, Segment]) -> None:
        super().__init__()
        self._begin = start
        self._segments = segments

    async def _prepare(self) -> None:
        for segment_id, segment in self._segments.items():
            await self.attach(segment_id, segment)
        await self._ask(self._begin, START_S)

    def _bury(self) -> None:
        """Whoever waits for an order hears of it."""

    async def check(self, order: wire.CheckStore) -> None:
        await self._expect(wire.Done, order, order.deadline_s)

    async def keep(self, order: wire.KeepBlocks) -> wire.Kept:
        return await self._expect(wire.Kept, order, order.deadline_s)

    async def load(self, order: wire.LoadBlocks) -> wire.Pulled:
        return await self._expect(wire.Pulled, order, order.deadline_s)

    async def packs(self, order: wire.ListPacks) -> wire.PackList:
        return await self._expect(wire.PackList, order, order.deadline_s)

    async def drop(self, order: wire.DropPacks) -> None:
        await self._expect(wire.Done, order, order.deadline_s)

    async def forget(self, order: wire.ForgetBlocks) -> wire.Kept:
        return await self._expect(wire.Kept, order, order.deadline_s)

    async def stats(self) -> bytes:
        answer = await self._expect(wire.Bytes, wire.StoreStats(START_S), START_S)
        return bytes(answer.data)

    async def _expect(self, kind: type[M], message: wire.Message, deadline_s: float) -> M:
        answer = await self.order(message, deadline_s)
        assert isinstance(answer, kind), f"a {type(message).__name__} was answered with {answer!r}"
        return answer

"""Device memory in a numpy array of this process: the bytes move as in a device process, without torch."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping

import numpy as np
from xxhash import xxh3_128_digest

from kvpool.errors import InvalidRequest, Unavailable
from kvpool.types import BlockStatus
from kvpool.wire import worker as worker_wire

_lives = itertools.count(1)


class NumpyDevice:
    """A `Device`. memory: the tenants' segments; sizes: of the parts beside them."""

    def __init__(self, memory: Mapping[int, memoryview], sizes: Mapping[int, int]) -> None:
        self.life = next(_lives)
        self._memory = memory
        self._parts = {number: np.zeros(size, np.uint8) for number, size in sizes.items()}
        self._dead = False

    @property
    def life_fd(self) -> int:
        raise Unavailable("nothing tells of its end")

    async def export(self, segment: int) -> bytes:
        raise InvalidRequest("nobody else can reach this memory")

    async def promote(self, order: worker_wire.PromoteBlocks) -> None:
        host, device = self._rows(order.segment, order.stride)
        await self._turn()
        device[_numbers(order.device_rows)] = host[_numbers(order.rows)]

    async def demote(self, order: worker_wire.DemoteBlocks) -> worker_wire.Pulled:
        host, device = self._rows(order.segment, order.stride)
        await self._turn()
        status = bytearray()
        rows, sources = _numbers(order.rows), _numbers(order.device_rows)
        for at, (row, source) in enumerate(zip(rows, sources, strict=True)):
            host[row] = device[source]
            found = xxh3_128_digest(host[row, : order.nbytes].tobytes())
            right = found == order.checksums[16 * at :][:16]
            status.append(BlockStatus.PRESENT if right else BlockStatus.MISMATCH)
        return worker_wire.Pulled(bytes(status), b"", 0.0)

    def die(self) -> None:
        """Orders under way fail, and all that come."""
        self._dead = True

    async def _turn(self) -> None:
        await asyncio.sleep(0.001)
        if self._dead:
            raise Unavailable("the device process ended")

    def _rows(self, segment: int, stride: int) -> tuple[np.ndarray, np.ndarray]:
        def cut(memory: np.ndarray) -> np.ndarray:
            count = len(memory) // stride
            return memory[: count * stride].reshape(count, stride)

        return cut(np.frombuffer(self._memory[segment], np.uint8)), cut(self._parts[segment])


def _numbers(packed: bytes) -> list[int]:
    return np.frombuffer(packed, np.uint32).astype(np.int64).tolist()

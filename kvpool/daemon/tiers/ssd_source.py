"""Disks as one source of blocks: lookups of blocks on them, and reads back to memory.

Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from kvpool.daemon.core.blocks import PartTable
from kvpool.daemon.tiers.ssd_device import SsdDevice, device_of
from kvpool.daemon.tiers.tier_state import TierState
from kvpool.daemon.tiers.write_orders import EMPTY_KEY
from kvpool.errors import KvpoolError
from kvpool.types import split_keys
from kvpool.wire import frame
from kvpool.wire import worker as worker_wire


@dataclass(eq=False)
class SsdSource:
    """See the module. What another disk does is nothing to the readers of these. filled: blocks come into memory."""

    devices: Sequence[SsdDevice]
    _clock: Callable[[], float]
    _filled: Callable[[], object]

    @property
    def serving(self) -> bool:
        """See `Tier`."""
        return any(device.state is not TierState.FAILED for device in self.devices)

    def held(self, table: PartTable) -> list[Container[bytes]]:
        """See `LocalTier`. Very recently written blocks may be missing."""
        held: list[Container[bytes]] = []
        for device in self.devices:
            held += [own.blocks for own in device.holding(table) if own.blocks]
        return held

    async def load(
        self, table: PartTable, keys: Sequence[bytes], rows: Sequence[int], seconds: float
    ) -> worker_wire.Pulled:
        """See `Tier`: from all of them at the same time."""
        status, checksums = bytearray(len(keys)), [EMPTY_KEY] * len(keys)
        by_device: dict[SsdDevice, list[int]] = {}
        for index, key in enumerate(keys):
            device = device_of(self.devices, table, key)
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
        self._filled()
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

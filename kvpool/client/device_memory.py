"""The daemon's spare device memory, as seen by a client on the same host and device.

Needs torch.
"""

from __future__ import annotations

import threading
from typing import Any

from kvpool.client.connections import Connections
from kvpool.errors import InvalidRequest, SegmentError
from kvpool.memory.owner_liveness import LifeView
from kvpool.storage.device import DeviceSegment


def attach(connections: Connections, on: Any) -> DeviceMemory | None:
    """Map the daemon's spare device memory; see `Client.attach_device`."""
    if connections.read_only:
        raise InvalidRequest(
            "a read-only client does not map device memory: it could not be kept from writing there"
        )
    found = connections.attach_device()
    if found is None:
        return None
    welcome, view = found
    try:
        return DeviceMemory(welcome.device, welcome.life, view, on)
    except SegmentError:
        if view.alive:
            raise
        return None  # its process has died meanwhile, and the memory with it


class DeviceMemory:
    """A tenant's part of the daemon's device memory, mapped (`Client.attach_device`). Thread-safe.

    life: of the process that owns it. Bytes read from it are invalid if that ended
    meanwhile: `Lease.check` raises then.
    """

    def __init__(self, handle: bytes, life: int, view: LifeView, on: Any = None) -> None:
        """Raises `SegmentError` if the memory cannot be mapped, or is not on the torch device `on`."""
        if on is not None and not DeviceSegment.lies_on(handle, on):
            raise SegmentError(f"the daemon's device memory is not on {on}")
        self.life = life
        self._view = view
        self._segment: DeviceSegment | None = DeviceSegment.attach(handle)
        self._tables: dict[int, Any] = {}
        self._lock = threading.Lock()

    @property
    def alive(self) -> bool:
        """Whether its owner has lived until now, and the memory is mapped."""
        return self._segment is not None and self._view.alive

    @property
    def device(self) -> Any:
        """Its torch device, by this process's numbers."""
        return self._whole.table.device

    @property
    def _whole(self) -> DeviceSegment:
        assert self._segment is not None, "device memory was used after `close`"
        return self._segment

    def table(self, stride: int) -> Any:
        """All of it as rows of `stride` bytes: a uint8 tensor, to be read only."""
        with self._lock:
            table = self._tables.get(stride)
            if table is None:
                table = self._tables[stride] = self._whole.cut(stride).table
            return table

    def close(self) -> None:
        """Unmap it, once nobody uses its tables. Idempotent."""
        with self._lock:
            self._tables.clear()
            if self._segment is not None:
                self._segment.close()
                self._segment = None

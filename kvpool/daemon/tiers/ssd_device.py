"""One disk of this node. See `ssd_books` for its contents.

Event loop only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvpool.daemon.core.blocks import PartTable
from kvpool.daemon.core.node import Node
from kvpool.daemon.tiers.ssd_books import SsdBooks
from kvpool.daemon.tiers.ssd_read import SsdReader
from kvpool.daemon.tiers.ssd_restore import SsdRestorer
from kvpool.daemon.tiers.ssd_write import SsdWriter
from kvpool.daemon.tiers.tier_state import TierState

log = logging.getLogger("kvpool.daemon")


class SsdDevice(SsdBooks):
    """The books of a disk, and its operations; see `SsdBooks`. `ssd_tier.py` decides which blocks are put here."""

    def __init__(
        self,
        path: str,
        size: int,
        shares: Mapping[str, float],
        make_node: Callable[[], Node],
        clock: Callable[[], float],
        *,
        weight: float = 1.0,
    ) -> None:
        super().__init__(path, size, shares, make_node, clock, weight=weight)
        restorer, writer, reader = SsdRestorer(self), SsdWriter(self), SsdReader(self)
        self.restore = restorer.restore
        self.may_write, self.write = writer.may_write, writer.write
        self.read, self.scrub = reader.read, reader.scrub

    def ended(self, error: str) -> None:
        """The process is dead, or cannot be started: empty until it is restored."""
        self.forget_all()
        self.state, self.error = TierState.FAILED, error

    def stats(self) -> dict[str, Any]:
        """Plain values."""
        disk = self.disk
        raw_bytes, stored_bytes = self.sizes()
        return {
            "path": self.path,
            "state": str(self.state),
            "error": self.error,
            "size_bytes": self.size,
            "segment_bytes": self.segment_bytes,
            "entries_max": 0 if disk is None else disk.ready.entries_max,
            "direct": disk is not None and disk.ready.direct,
            "used_bytes": self.used_bytes,
            "blocks": self.node.inventory.block_count(),
            "raw_bytes": raw_bytes,
            "stored_bytes": stored_bytes,
            "codec_error": self.codec_error,
            "writing_bytes": self.writing_bytes,
            "written_bytes": self.written_bytes,
            "gone": self.node.counters.gone(),
            **self.counters,
        }


def device_of(devices: Sequence[SsdDevice], table: PartTable, key: bytes) -> SsdDevice | None:
    """The disk that a block of a table in memory is on."""
    for device in devices:
        if any(key in own.blocks for own in device.holding(table)):
            return device
    return None

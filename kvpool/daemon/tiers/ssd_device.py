"""One disk of this node. See `ssd_books` for its contents.

Event loop only.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.daemon.core.blocks import PartTable
from kvpool.daemon.tiers.ssd_books import SsdBooks
from kvpool.daemon.tiers.ssd_index import SsdIndexUpdates
from kvpool.daemon.tiers.ssd_read import SsdReader
from kvpool.daemon.tiers.ssd_restore import SsdRestorer
from kvpool.daemon.tiers.ssd_write import SsdWriter
from kvpool.daemon.tiers.tier_state import TierState
from kvpool.telemetry.tier_stats import SsdStats


class SsdDevice(SsdBooks):
    """The books of a disk, and its operations; see `SsdBooks`. `ssd_tier.py` decides which blocks are put here."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.lost_at: float | None = None  # when its process ended last
        index, reader = SsdIndexUpdates(self), SsdReader(self)
        restorer, writer = SsdRestorer(self, index), SsdWriter(self, index)
        self.tidy, self.record = index.tidy, index.record
        self.pin, self.check_pin, self.put_back = index.pin, index.check_pin, index.put_back
        self.restore = restorer.restore
        self.may_write, self.write = writer.may_write, writer.write
        self.read, self.scrub, self.parents = reader.read, reader.scrub, reader.parents

    def ended(self, error: str) -> None:
        """The process is dead, or cannot be started: empty until it is restored."""
        self.forget_all()
        self.state, self.error = TierState.FAILED, error
        self.lost_at = self.clock()

    def stats(self) -> SsdStats:
        """Counters, with how it is now."""
        stats, disk = self.counted, self.disk
        stats.state, stats.error, stats.codec_error = str(self.state), self.error, self.codec_error
        stats.segment_bytes, stats.used_bytes = self.segment_bytes, self.used_bytes
        stats.entries_max = 0 if disk is None else disk.ready.entries_max
        stats.direct = disk is not None and disk.ready.direct
        stats.encrypted = self.seal_bytes > 0
        stats.blocks = self.rules.inventory.block_count()
        stats.raw_bytes, stats.stored_bytes = self.sizes()
        stats.gone = self.rules.counters.gone()
        return stats


def device_of(devices: Sequence[SsdDevice], table: PartTable, key: bytes) -> SsdDevice | None:
    """The disk that a block of a table in memory is on."""
    for device in devices:
        if any(key in own.blocks for own in device.holding(table)):
            return device
    return None

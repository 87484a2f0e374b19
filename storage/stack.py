"""The stack of tiers: when a block is written to a lower tier, and when it is worth loading. No I/O, no clock.

Rules only; `kvpool/daemon/tiers/ssd_tier.py` applies them. Times are seconds of a monotonic clock, sizes are
bytes.

A block is put into DRAM. Its namespace decides how it gets to SSD (`WriteMode`):

    through   written right after the put
    back      written when it is among the blocks that DRAM evicts next
    none      never

In no mode does a put wait for the disk. Blocks that DRAM evicts before they were written are lost to this node,
so blocks are written ahead of their eviction: `Watermarks` decides when that starts and stops.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from kvpool.storage.eviction import Costs
from kvpool.token_bucket import TokenBucket
from kvpool.types import Recompute

DRAM_S, SSD_S = 0.0067, 0.028
PREFILL_S, PREFILL_S_PER_DEPTH = 0.058, 0.00055
"""Seconds to load a block from a tier, or to compute it; of these only the ratios matter.

512 tokens of LLaMA-3-70B (160 MiB) on a server with 8 A800: one PCIe 4.0 x16 link (25 GB/s), two NVMe
disks (6 GB/s), prefill at half of 8 x 312 TFLOPS. See `bench/eviction.py`, which judges with them.
"""

DAY_S = 86_400.0
BURST_S = 3_600.0
"""The unspent budget of this time may be used at once."""
SCARCE = 0.25
"""Share of a budget's burst below which only blocks that were read again are written."""


class WriteMode(StrEnum):
    """When blocks of a namespace are written to SSD."""

    BACK = "back"
    THROUGH = "through"
    NONE = "none"


def dram_costs(*, disks: bool) -> Costs:
    """The cost of an eviction from memory, with disks below it or without."""
    return Costs(DRAM_S, SSD_S if disks else None, PREFILL_S, PREFILL_S_PER_DEPTH)


def ssd_costs() -> Costs:
    """The cost of an eviction from SSD."""
    return Costs(SSD_S, None, PREFILL_S, PREFILL_S_PER_DEPTH)


def worth_keeping(put: int, used: int, kept: int) -> bool:
    """Whether a block that memory evicts next is worth a place in object storage, shared by all nodes.

    put, used: the node's ticks of its put and its last read; kept: `used` when it was last known
    to be there, or -1. Requests and bytes cost money there, and most blocks are never read again: only
    blocks read again after their put are written, and reconsidered only once they have been read again.
    """
    return used > put and used != kept


class Budget:
    """The write budget of a disk, to limit wear.

    A bucket that fills evenly through the day. Not thread-safe.
    """

    def __init__(self, bytes_a_day: int, now: float) -> None:
        """bytes_a_day: 0 for no limit."""
        self.bytes_a_day = bytes_a_day
        rate = bytes_a_day / DAY_S
        self._bucket = TokenBucket(rate, rate * BURST_S, now)
        self.refused_bytes = 0

    def change(self, bytes_a_day: int, now: float) -> None:
        """From now on; the unspent amount is kept, if it fits."""
        self._bucket.left(now)
        self.bytes_a_day = bytes_a_day
        self._bucket.rate = bytes_a_day / DAY_S
        self._bucket.most = self._bucket.rate * BURST_S

    def left_bytes(self, now: float) -> int:
        """Bytes that may be written now; 0 without a limit."""
        return max(0, int(self._bucket.left(now)))

    def scarce(self, now: float) -> bool:
        """Whether only blocks that were read again should be written."""
        return bool(self.bytes_a_day) and self._bucket.left(now) < SCARCE * self._bucket.most

    def spend(self, nbytes: int, now: float) -> bool:
        """Whether this much may be written now; if so, it is taken off.

        A piece larger than the remaining budget is allowed while any is left, and worked off afterwards.
        """
        if not self.bytes_a_day:
            return True
        if self._bucket.left(now) <= 0:
            self.refused_bytes += nbytes
            return False
        self._bucket.take(nbytes, now)
        return True


@dataclass(slots=True)
class Watermarks:
    """Start below `low`, stop at `high`: shares of a segment. Remembers its state."""

    low: float
    high: float
    going: bool = False

    def more(self, level: float) -> bool:
        """Whether to continue, at this level."""
        if level < self.low:
            self.going = True
        elif level >= self.high:
            self.going = False
        return self.going


def worth_loading(
    here: int, loads: Iterable[tuple[int, float]], recompute: Recompute | None
) -> int:
    """The best length of a prefix, `here` blocks of which are in memory, so that the whole prompt is ready
    soonest.

    loads: (blocks of the prefix, seconds to load its missing ones), the longest last. recompute: the price
    of computing a prefix's blocks; None: not known, then the longest. The rest is computed, after
    the load; so the best one saves most over computing all. That is `here` if none saves anything.
    """
    if recompute is None:
        return max((blocks for blocks, _ in loads), default=here)
    best, most_s = here, 0.0
    for blocks, load_s in loads:
        saved_s = recompute.seconds(here, blocks) - load_s
        if saved_s > most_s:
            best, most_s = blocks, saved_s
    return best

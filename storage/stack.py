"""The stack of tiers: when a block is written down, and when it is worth fetching up. No I/O, no clock.

Rules only; `kvpool/daemon/tiers/ssd_tier.py` acts on them. Times are seconds of a monotonic clock, sizes are bytes.

A block is put into DRAM. How it gets to SSD is for its namespace to say (`WriteMode`):

    through   written as soon as it was put
    back      written when it is among the blocks that DRAM gives up next
    none      never

In no mode does a put wait for the disk. What DRAM gives up before it was written is lost to this node, so
blocks are written ahead of their eviction: `Watermarks` says when that begins and when it is enough.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from kvpool.storage.eviction import Costs
from kvpool.types import Recompute

DRAM_S, SSD_S = 0.0067, 0.028
PREFILL_S, PREFILL_S_PER_DEPTH = 0.058, 0.00055
"""Seconds to load a block from a tier, or to compute it; of these only the ratios matter.

512 tokens of LLaMA-3-70B (160 MiB) on a server with 8 A800: one PCIe 4.0 x16 link (25 GB/s), two NVMe
disks (6 GB/s), prefill at half of 8 x 312 TFLOPS. See `bench/eviction.py`, which judges with them.
"""

DAY_S = 86_400.0
BURST_S = 3_600.0
"""What was not written for so long may be written at once."""
SCARCE = 0.25
"""Share of a budget's burst below which only blocks that were used again are written."""


class WriteMode(StrEnum):
    """When blocks of a namespace are written to SSD."""

    BACK = "back"
    THROUGH = "through"
    NONE = "none"


def dram_costs(*, disks: bool) -> Costs:
    """What an eviction from memory costs, with disks below it or without."""
    return Costs(DRAM_S, SSD_S if disks else None, PREFILL_S, PREFILL_S_PER_DEPTH)


def ssd_costs() -> Costs:
    """What an eviction from SSD costs."""
    return Costs(SSD_S, None, PREFILL_S, PREFILL_S_PER_DEPTH)


def worth_keeping(put: int, used: int, kept: int) -> bool:
    """Whether a block that memory gives up next is worth a place in object storage, shared by all nodes.

    put, used: the node's ticks when it came and when it was last read; kept: `used` when it was last known
    to be there, or -1. Requests and bytes cost money there, and most blocks are never read again: only what
    was, since it came, is written, and looked at anew only once it has been read again.
    """
    return used > put and used != kept


class Budget:
    """How much may be written to a disk, for the sake of its life.

    A bucket that fills evenly through the day. Not thread-safe.
    """

    def __init__(self, bytes_a_day: int, now: float) -> None:
        """bytes_a_day: 0 for no limit."""
        self.bytes_a_day = bytes_a_day
        self._rate = bytes_a_day / DAY_S
        self._most = self._rate * BURST_S
        self._left = self._most
        self._at = now
        self.refused_bytes = 0

    def change(self, bytes_a_day: int, now: float) -> None:
        """From now on; what was not spent so far, and fits, may still be."""
        self._fill(now)
        self.bytes_a_day = bytes_a_day
        self._rate = bytes_a_day / DAY_S
        self._most = self._rate * BURST_S
        self._left = min(self._left, self._most)

    def _fill(self, now: float) -> None:
        self._left = min(self._most, self._left + (now - self._at) * self._rate)
        self._at = now

    def left_bytes(self, now: float) -> int:
        """What may be written now; 0 where there is no limit."""
        self._fill(now)
        return max(0, int(self._left))

    def scarce(self, now: float) -> bool:
        """Whether only what was used again should be written."""
        self._fill(now)
        return bool(self.bytes_a_day) and self._left < SCARCE * self._most

    def spend(self, nbytes: int, now: float) -> bool:
        """Whether so much may be written now; if so, it is taken off.

        A piece larger than what is left goes while anything is left, and is worked off afterwards.
        """
        if not self.bytes_a_day:
            return True
        self._fill(now)
        if self._left <= 0:
            self.refused_bytes += nbytes
            return False
        self._left -= nbytes
        return True


@dataclass(slots=True)
class Watermarks:
    """Begin below `low`, go on up to `high`: shares of a segment. Keeps whether it is at it."""

    low: float
    high: float
    going: bool = False

    def more(self, level: float) -> bool:
        """Whether to go on, now that the level is this."""
        if level < self.low:
            self.going = True
        elif level >= self.high:
            self.going = False
        return self.going


def worth_loading(
    here: int, loads: Iterable[tuple[int, float]], recompute: Recompute | None
) -> int:
    """How long a prefix is to be, `here` blocks of which are in memory, so that the whole prompt is ready soonest.

    loads: (blocks of the prefix, seconds to load what is missing of them), the longest last. recompute: the price
    of a prefix's blocks, computed; None: not known, then the longest. What is not loaded is computed, after
    the load; so the best one saves most over computing all. That is `here` where none saves anything.
    """
    if recompute is None:
        return max((blocks for blocks, _ in loads), default=here)
    best, most_s = here, 0.0
    for blocks, load_s in loads:
        saved_s = recompute.seconds(here, blocks) - load_s
        if saved_s > most_s:
            best, most_s = blocks, saved_s
    return best

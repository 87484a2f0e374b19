"""A node's counters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals since the daemon started."""

    reserved: int = 0
    committed: int = 0
    committed_bytes: int = 0
    duplicates: int = 0
    aborted: int = 0
    acquired: int = 0
    acquire_misses: int = 0
    leased_blocks: int = 0
    leased_bytes: int = 0
    leases_expired: int = 0
    evicted: int = 0
    evicted_by_quota: int = 0  # of these: because their namespace exceeded its quota
    evicted_soft_pins: int = 0  # of these
    evicted_secondary: int = 0  # of these: secondary replicas
    slabs_reclaimed: int = 0
    removed: int = 0
    refused_full: int = 0
    match_calls: int = 0
    match_keys: int = 0
    match_hits: int = 0
    dead_holders: int = 0  # of those that held something
    checksum_mismatches: int = 0
    pulled_blocks: int = 0
    pulled_bytes: int = 0
    lent_blocks: int = 0
    lent_bytes: int = 0
    epochs_ended: int = 0
    reclaimed_blocks: int = 0  # of ended epochs
    # Parts of blocks:
    removed_parts: int = 0  # by clients
    given_up_parts: int = 0  # by operators
    unused_parts: int = 0  # unused for longer than their namespace's time to live
    corrupt_parts: int = 0

    def gone(self) -> dict[str, int]:
        """Parts of blocks that are no longer here, by reason."""
        return {
            "full": self.evicted - self.evicted_by_quota,
            "quota": self.evicted_by_quota,
            "ttl": self.unused_parts,
            "operator": self.given_up_parts,
            "removed": self.removed_parts,
            "corrupt": self.corrupt_parts,
            "epoch": self.reclaimed_blocks,
        }

"""The tiers of a node: what fields of `NodeStats` say of them. See `kvpool.telemetry.node_stats`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from kvpool.telemetry.metrics import Label, counter, each, gauge, one_of

PLACE_STATES = ("opening", "serving", "read-only", "failing", "failed")

DRAM: Mapping[str, str | None] = {"location": "", "tier": "dram", "tenant": None}

TIER_CAPACITY = gauge(
    "tier_capacity_bytes",
    help="Capacity of a tier in bytes. The location is a directory, a device or an object store URL, and empty for "
    "memory.",
)

TIER_USED = gauge("tier_used_bytes", help="Bytes of slots in use in a tier.")

TIER_PARTS = gauge("tier_parts", help="Parts of blocks in a tier.")

TIER_ERRORS = counter("tier_errors", help="Failed reads and writes of a tier.")

CHECKSUM_MISMATCHES = counter(
    "checksum_mismatches",
    help="Parts of blocks dropped because of a wrong checksum. Tier `dram` includes parts received from peers.",
)

DROPPED_PARTS = counter(
    "dropped_parts",
    "reason",
    help="Parts of blocks dropped from a tier, by reason: no room (`full`), over quota (`quota`), unused for too long "
    "(`ttl`), removed by an operator (`operator`) or a client (`removed`), damaged (`corrupt`), or of an older epoch "
    "(`epoch`).",
)

WRITES_DROPPED = counter(
    "writes_dropped",
    help="Parts of blocks not written to an SSD, by reason: the queue was full (`queue`), the daily budget was used up "
    "(`budget`), or the budget was short and the part was never read (`unread`).",
)


class PlaceStats(msgspec.Struct):
    """A place below memory. path: a directory, a device or a URL. blocks: parts of blocks, here as in all names below.

    encrypted: its blocks are encrypted at rest.
    """

    path: Annotated[str, Label("location")] = ""
    state: Annotated[str, gauge("tier_state", "state", read=one_of(*PLACE_STATES))] = ""
    """1 for the current state of an SSD, a device or an object store, 0 for the other states."""
    error: str = ""
    size_bytes: int = 0
    used_bytes: Annotated[int, TIER_USED] = 0
    blocks: Annotated[int, TIER_PARTS] = 0
    written_blocks: Annotated[int, counter("tier_written_parts")] = 0
    """Parts of blocks written to a tier."""
    written_bytes: Annotated[int, counter("tier_written_bytes")] = 0
    """Bytes written to a tier."""
    read_blocks: Annotated[int, counter("tier_read_parts")] = 0
    """Parts of blocks read from a tier."""
    read_bytes: Annotated[int, counter("tier_read_bytes")] = 0
    """Bytes read from a tier."""
    mismatches: Annotated[int, CHECKSUM_MISMATCHES] = 0
    read_errors: Annotated[int, TIER_ERRORS.at(operation="read")] = 0
    write_errors: Annotated[int, TIER_ERRORS.at(operation="write")] = 0
    encrypted: bool = False


class SsdStats(PlaceStats):
    """An SSD. segment_bytes: of its slots; 0 while it is not open. entries_max: of its index."""

    hangs: Annotated[int, counter("tier_quarantined")] = 0
    """How often the process of an SSD was killed and did not end, because the disk hangs."""
    segment_bytes: Annotated[int, TIER_CAPACITY] = 0
    entries_max: int = 0
    direct: bool = False
    raw_bytes: int = 0
    stored_bytes: int = 0
    codec_error: str = ""
    writing_bytes: Annotated[int, gauge("writing_bytes")] = 0
    """Bytes being written to an SSD."""
    gone: Annotated[dict[str, int], DROPPED_PARTS] = {}
    restored_blocks: int = 0
    dropped_at_restore: int = 0
    scrubbed_blocks: Annotated[int, counter("scrubbed_parts")] = 0
    """Parts of blocks read from an SSD only to verify their checksum."""
    packed_blocks: int = 0  # of those written
    unpacked_blocks: int = 0  # written uncompressed although their namespace has a codec
    undecoded_blocks: int = 0  # of the mismatches: could not be unpacked to the original bytes
    retired_bytes: int = 0  # of slots that failed repeatedly and are not used any more


class DeviceStats(PlaceStats):
    """Spare device memory. segment_bytes: of its slots."""

    segment_bytes: Annotated[int, TIER_CAPACITY] = 0
    queued_blocks: Annotated[int, gauge("device_write_queue_parts")] = 0
    """Parts of blocks that wait to be written to spare device memory."""
    not_queued_blocks: int = 0
    leased_blocks: int = 0
    leased_bytes: int = 0
    gone: Annotated[dict[str, int], DROPPED_PARTS] = {}


class ObjectStats(PlaceStats):
    """Object storage. used_bytes, blocks, packs: of this node's own objects, a second ago.

    stocked: objects of former lives of this node are known. garbage: ended epochs whose objects are still there.
    attempts, faults, suspended_s: of requests to the store.
    """

    size_bytes: Annotated[int, TIER_CAPACITY] = 0
    packs: int = 0
    stocked: bool = False
    garbage: int = 0
    writing_blocks: int = 0
    restarts: int = 0
    attempts: int = 0
    faults: dict[str, int] = {}
    suspended_s: float = 0.0
    known_blocks: int = 0  # not written, because they were there already
    stale_blocks: int = 0  # whose object was gone
    no_space_blocks: int = 0
    unlisted_blocks: int = 0  # written, while the catalog did not answer
    lookups_failed: int = 0
    dropped_packs: int = 0


class TiersStats(msgspec.Struct):
    """The tiers below memory. clean_share: by tenant, the part of its memory that is free or on SSD, of the target."""

    dropped_writes: Annotated[int, WRITES_DROPPED.at(reason="queue")] = 0
    over_budget_blocks: Annotated[int, WRITES_DROPPED.at(reason="budget")] = 0
    once_used_blocks: Annotated[int, WRITES_DROPPED.at(reason="unread")] = 0
    queued_writes: Annotated[int, gauge("write_queue_parts")] = 0
    """Parts of blocks that wait to be written to SSDs."""
    clean_share: Annotated[dict[str, float], gauge("clean_share_ratio", "tenant")] = {}
    """Share of a tenant's memory that is free or already on SSD, as a fraction of the target. At 0 evictions lose
    blocks."""
    budget_bytes_per_day: Annotated[int, gauge("write_budget_bytes_per_day")] = 0
    """Bytes that may be written to all SSDs per day (setting `ssd_bytes_per_day`). 0: no limit."""
    budget_left_bytes: Annotated[float, gauge("write_budget_left_bytes")] = 0.0
    """Bytes that may be written to SSDs now. The budget refills evenly, up to one hour's share."""
    budget_refused_bytes: int = 0
    ssd: Annotated[list[SsdStats], each(tier="ssd")] = []
    object: Annotated[list[ObjectStats], each(tier="object")] = []
    device: Annotated[list[DeviceStats], each(tier="device")] = []

    def places(self) -> dict[str, Sequence[SsdStats | DeviceStats]]:
        """The places on this node, by tier."""
        return {"ssd": self.ssd, "device": self.device}

"""Memory of a node and of its tenants, and what clients read and put. See `kvpool.telemetry.node_stats`."""

from __future__ import annotations

from operator import attrgetter
from typing import Annotated, Any

import msgspec

from kvpool.telemetry.metrics import counter, each, fields_of, gauge
from kvpool.telemetry.receipts import Booked
from kvpool.telemetry.tier_stats import (
    CHECKSUM_MISMATCHES,
    DRAM,
    TIER_CAPACITY,
    TIER_PARTS,
    TIER_USED,
)

OUTCOMES = ("loaded", "absent", "mismatched", "failed", "cancelled")

RESULTS = ("local", "fetched", "missed")

LOAD_PARTS = counter(
    "load_parts",
    "outcome",
    help="Parts of blocks requested from a lower tier or a peer, by outcome. `loaded` arrived whole, `absent` was a "
    "wrong hint, `mismatched` had a wrong checksum, `cancelled` was not needed any more.",
    read=fields_of(*OUTCOMES),
)

LOAD_BYTES = counter(
    "load_bytes", help="Bytes loaded into memory, by source tier.", read=attrgetter("nbytes")
)

PREFETCH_OUTCOMES = counter(
    "prefetch_outcomes",
    help="Prefetched parts, by what became of them: read when they were wanted (`used`), or not (`wasted`).",
)

READ_BYTES = counter(
    "read_bytes", help="Bytes leased to clients, by tier: memory or spare device memory."
)

TENANT_PINNED = gauge(
    "tenant_pinned_bytes", help="Bytes of a tenant's memory held by pins, by kind."
)

NAMESPACE_HELD = gauge(
    "namespace_held_bytes",
    help="Bytes of slots that a namespace holds. Only the 200 largest are shown individually.",
)


class Counters(msgspec.Struct):
    """What happened to blocks in memory."""

    reserved: int = 0
    committed: int = 0
    committed_bytes: int = 0
    duplicates: Annotated[int, counter("put_duplicate_parts")] = 0
    """Parts of blocks that clients put although they were present."""
    aborted: int = 0
    acquired: Annotated[int, counter("leases_granted")] = 0
    """Leases granted, loans to peers and to transfer workers included."""
    acquire_misses: int = 0
    leased_blocks: int = 0
    leased_bytes: int = 0
    leases_expired: Annotated[int, counter("leases_expired")] = 0
    """Leases that expired before their release."""
    evicted: int = 0
    evicted_by_quota: int = 0  # of these: because their namespace exceeded its quota
    evicted_soft_pins: Annotated[int, counter("evicted_soft_pinned_parts")] = 0
    """Soft-pinned parts of blocks evicted from memory."""
    evicted_secondary: Annotated[int, counter("evicted_secondary_parts")] = 0
    """Parts of blocks evicted from memory that other nodes hold too."""
    evicted_expendable: Annotated[int, counter("evicted_expendable_parts")] = 0
    """Parts of blocks evicted from memory before others, because their session had left them or will pause for long."""
    expended: Annotated[int, counter("expended_parts")] = 0
    """Parts of blocks that became expendable: evicted before others unless they are read again."""
    sessions_forgotten: Annotated[int, counter("sessions_forgotten")] = 0
    """Sessions forgotten because there were too many, the longest inactive first."""
    session_news_lost: Annotated[int, counter("session_news_lost")] = 0
    """Hints on sessions that were not passed on to their node: too many at a time, or it did not answer."""
    prefetched: Annotated[int, counter("prefetched_parts")] = 0
    """Parts of blocks brought into memory before they were wanted, by intents."""
    prefetched_bytes: Annotated[int, counter("prefetched_bytes")] = 0
    """Bytes of these parts."""
    prefetches_used: Annotated[int, PREFETCH_OUTCOMES.at(outcome="used")] = 0
    prefetches_wasted: Annotated[int, PREFETCH_OUTCOMES.at(outcome="wasted")] = 0
    intents: Annotated[dict[str, int], counter("intents", "outcome")] = {}
    """Intents for blocks of a prompt or a session, by the answer: `accepted`, `clipped`, `deferred`, `refused`, `missing`."""
    slabs_reclaimed: Annotated[int, counter("slabs_reclaimed")] = 0
    """Memory slabs reassigned to slots of another size."""
    removed: int = 0
    refused_full: Annotated[int, counter("puts_refused")] = 0
    """Puts refused for lack of slots: leases, reservations and hard pins hold them all."""
    match_calls: int = 0
    match_keys: int = 0
    match_hits: int = 0
    dead_holders: Annotated[int, counter("clients_died")] = 0
    """Clients whose process ended while they held leases or reservations."""
    checksum_mismatches: Annotated[int, CHECKSUM_MISMATCHES.at(**DRAM)] = 0
    pulled_blocks: int = 0
    pulled_bytes: int = 0
    lent_blocks: Annotated[int, counter("loaned_parts")] = 0
    """Parts of blocks sent to peers under a loan."""
    lent_bytes: Annotated[int, counter("loaned_bytes")] = 0
    """Bytes sent to peers under a loan."""
    epochs_ended: int = 0
    reclaimed_blocks: int = 0  # of ended epochs
    # Parts of blocks:
    removed_parts: int = 0  # by clients
    given_up_parts: int = 0  # by operators
    unused_parts: int = 0  # unused for longer than their namespace's time to live
    corrupt_parts: int = 0

    def gone(self) -> dict[str, int]:
        """Parts of blocks that are not here any more, by reason."""
        return {
            "full": self.evicted - self.evicted_by_quota,
            "quota": self.evicted_by_quota,
            "ttl": self.unused_parts,
            "operator": self.given_up_parts,
            "removed": self.removed_parts,
            "corrupt": self.corrupt_parts,
            "epoch": self.reclaimed_blocks,
        }


class SlabClass(msgspec.Struct, frozen=True):
    """Slots of one size, `stride` bytes each. bytes_lost: of its slabs, too little for a slot."""

    stride: int = 0
    extents: int = 0
    slots_used: int = 0
    slots_free: int = 0
    bytes_used: int = 0
    bytes_free: int = 0
    bytes_lost: int = 0


class SpaceStats(msgspec.Struct):
    """How a segment is divided. slabs_unassigned, bytes_unassigned: not given to any slot size."""

    size: int = 0
    slab_bytes: int = 0
    slabs: int = 0
    slabs_unassigned: int = 0
    bytes_unassigned: int = 0
    bytes_used: Annotated[int, gauge("tenant_used_bytes"), TIER_USED.at(**DRAM)] = 0
    """Bytes of slots in use in a tenant's memory."""
    classes: list[SlabClass] = []


class Asked(msgspec.Struct):
    """Blocks that clients asked for in so many requests.

    local: could be used at once. fetched: after a wait for other tiers and nodes. missed: could not be used.
    """

    requests: int = 0
    local: int = 0
    fetched: int = 0
    missed: int = 0

    def add(self, asked: int, got: int, here: int) -> None:
        """Count a request for `asked` blocks that `got` some, `here` of them without its wait."""
        fetched = max(0, got - here)
        self.requests += 1
        self.local += got - fetched
        self.fetched += fetched
        self.missed += asked - got


class Loads(msgspec.Struct):
    """Parts of blocks that a source was asked for, by outcome.

    nbytes: of those loaded. absent: no longer at the source. mismatched: wrong checksum. cancelled:
    a hedge was faster, or nothing waited for them any longer.
    """

    loaded: int = 0
    absent: int = 0
    mismatched: int = 0
    failed: int = 0
    cancelled: int = 0
    nbytes: int = 0

    def add(self, other: Loads) -> None:
        self.loaded += other.loaded
        self.absent += other.absent
        self.mismatched += other.mismatched
        self.failed += other.failed
        self.cancelled += other.cancelled
        self.nbytes += other.nbytes


class Traffic(msgspec.Struct):
    """What the clients of one tenant put, asked for and got; counted once a request or transfer, never once a block.

    matches, reads, pulls: the requests of these names. loads: into memory, by the tier they came from. account: what
    the tenant's account says; leases that nobody reads are not in it.
    """

    put_parts: Annotated[int, counter("put_parts")] = 0
    """New parts of blocks that clients committed."""
    put_bytes: Annotated[int, counter("put_bytes")] = 0
    """Bytes of new parts that clients committed."""
    matches: Annotated[
        Asked, counter("match_blocks", "result", read=fields_of("local", "missed"))
    ] = msgspec.field(default_factory=Asked)
    """Blocks that clients asked for with `match`: present in this node's memory (`local`) or not (`missed`)."""
    reads: Annotated[
        Asked,
        counter("reads", help="Reads of prefixes (`acquire`).", read=attrgetter("requests")),
        counter("read_blocks", "result", read=fields_of(*RESULTS)),
    ] = msgspec.field(default_factory=Asked)
    """Blocks that reads requested: leased immediately (`local`), fetched from other tiers or nodes (`fetched`), or not
    available (`missed`). The hit rate is the share that was not missed."""
    pulls: Annotated[Asked, counter("pull_blocks", "result", read=fields_of(*RESULTS))] = (
        msgspec.field(default_factory=Asked)
    )
    """Blocks that clients requested before their read (`pull`), by result as in `kvpool_read_blocks_total`."""
    read_bytes: Annotated[int, READ_BYTES.at(tier="dram")] = 0
    device_read_bytes: Annotated[int, READ_BYTES.at(tier="device")] = 0
    loads: Annotated[dict[str, Loads], each("tier", metrics=(LOAD_PARTS, LOAD_BYTES))] = {}
    account: Booked = msgspec.field(default_factory=Booked)


class Missed(msgspec.Struct):
    """Reads that ended before all blocks that they asked for, and those blocks."""

    requests: Annotated[int, counter("missed_reads")] = 0
    """Reads that ended before all blocks that they asked for, by why the first missing one was not there
    ([reasons](operations.md#why-was-it-a-miss)). The questions of an engine about one prompt count once, ten seconds
    later."""
    blocks: Annotated[int, counter("missed_blocks")] = 0
    """The blocks that these reads did not get."""


class NamespaceStats(msgspec.Struct):
    """A namespace in memory. blocks, part_bytes: of each part. settings: as in etcd.

    reads: what its clients asked for and got since the node was started. misses: by reason, one of
    `kvpool.telemetry.misses.Reason`.
    """

    fields: dict[str, Any] = {}
    epoch: Annotated[int, gauge("namespace_epoch", single="namespace")] = 0
    """Current epoch of a namespace. A reset or clear starts a new one."""
    settings: dict[str, Any] = {}
    held_bytes: Annotated[int, NAMESPACE_HELD.at(tier="dram")] = 0
    quota_bytes: Annotated[int, gauge("namespace_quota_bytes", single="namespace")] = 0
    """Memory quota of a namespace, in bytes. 0: limited only by its tenant."""
    blocks: Annotated[
        list[int], gauge("namespace_blocks", read=lambda parts: max(parts, default=0))
    ] = []
    """Blocks of a namespace in memory."""
    part_bytes: list[int] = []
    reads: Asked = msgspec.field(default_factory=Asked)
    misses: Annotated[dict[str, Missed], each("reason")] = {}

    def bytes_in_blocks(self) -> int:
        """Return the bytes of all parts that are in memory."""
        return sum(n * nbytes for n, nbytes in zip(self.blocks, self.part_bytes, strict=True))


class NamespaceUsage(msgspec.Struct):
    """What a namespace has of a place. quota_bytes: 0 for none."""

    held_bytes: Annotated[int, NAMESPACE_HELD] = 0
    quota_bytes: int = 0


class PlaceUsage(msgspec.Struct):
    """What a tenant has of memory or a disk. where: its directory; empty for memory. part_bytes: what it may use."""

    where: str = ""
    part_bytes: int = 0
    used_bytes: int = 0
    namespaces: Annotated[dict[str, NamespaceUsage], each("namespace", "model")] = {}


class Usage(msgspec.Struct):
    """What a tenant has of each tier. A disk that is not open is left out."""

    dram: list[PlaceUsage] = []
    ssd: Annotated[list[PlaceUsage], each(tier="ssd")] = []


class EngineStats(msgspec.Struct):
    """An engine's own cache, as its KV events tell. age_s: since the last event. outdated: of an ended epoch."""

    endpoint: str = ""
    namespace: str = ""
    outdated: bool = False
    error: str = ""
    connected: bool = False
    age_s: float | None = None
    blocks: int = 0
    complete: bool = False
    gaps: int = 0
    unreadable: int = 0
    refused_blocks: int = 0


def _by_connection(engines: list[EngineStats]) -> dict[str, int]:
    connected = sum(engine.connected for engine in engines)
    return {"connected": connected, "not_connected": len(engines) - connected}


class EnginesStats(msgspec.Struct):
    """The engines of a tenant that announce KV events. known_blocks: those whose key is known."""

    seen_keys: int = 0
    known_blocks: int = 0
    dropped_keys: int = 0
    followed: Annotated[list[EngineStats], gauge("engines", "state", read=_by_connection)] = []
    """Engines whose KV events the daemon subscribes to, by connection state."""


class TenantStats(msgspec.Struct):
    """A tenant's memory, with what it has of each tier. namespaces: by digest, in hex."""

    segment_bytes: Annotated[int, gauge("tenant_capacity_bytes"), TIER_CAPACITY.at(**DRAM)] = 0
    """Memory of a tenant, in bytes."""
    blocks: Annotated[int, TIER_PARTS.at(**DRAM)] = 0
    secondary_bytes: Annotated[int, gauge("tenant_secondary_bytes")] = 0
    """Bytes of secondary replicas in a tenant's memory: other nodes hold these blocks too."""
    granted_bytes: int = 0
    hard_pinned_bytes: Annotated[int, TENANT_PINNED.at(kind="hard")] = 0
    soft_pinned_bytes: Annotated[int, TENANT_PINNED.at(kind="soft")] = 0
    traffic: Traffic = msgspec.field(default_factory=Traffic)
    space: SpaceStats = msgspec.field(default_factory=SpaceStats)
    namespaces: Annotated[
        dict[str, NamespaceStats], gauge("namespaces", read=len), each("namespace", "model")
    ] = {}
    """Known namespaces."""
    usage: Usage = msgspec.field(default_factory=Usage)
    engines: EnginesStats = msgspec.field(default_factory=EnginesStats)

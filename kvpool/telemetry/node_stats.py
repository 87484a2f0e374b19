"""The numbers of a node, as one typed tree: its parts count in it, clients and operators are sent it as JSON.

Totals are counted since the daemon started. A part of the daemon owns its branch, adds to the totals as things
happen, and sets the gauges (numbers that fall too) when it is asked. `kvpool.admin.metrics` says each one in words.
What a node of another version does not send reads as 0 or empty; what only it knows is left out.

Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvpool.decoding import JsonDecoder
from kvpool.telemetry.histogram import RATIOS, Histogram
from kvpool.telemetry.receipts import Booked

PEERS_MAX = 256  # that are counted by name
OTHERS = "others"


class Branch(msgspec.Struct):
    """Base of all branches."""


# ---- memory -----------------------------------------------------------------------------------------------


class Counters(Branch):
    """What happened to blocks in memory."""

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
    evicted_expendable: int = 0  # of these: blocks that their sessions had left
    expended: int = 0  # parts of blocks that became expendable
    sessions_forgotten: int = 0  # because there were too many
    session_news_lost: int = 0  # that this node was to pass on to others
    prefetched: int = 0  # parts of blocks brought into memory before they were wanted
    prefetched_bytes: int = 0
    prefetches_used: int = 0  # of these parts: read afterwards
    prefetches_wasted: int = 0  # not read when their session was back, or had not come
    intents: dict[str, int] = {}  # by their outcome
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


class SpaceStats(Branch):
    """How a segment is divided. slabs_unassigned, bytes_unassigned: not given to any slot size."""

    size: int = 0
    slab_bytes: int = 0
    slabs: int = 0
    slabs_unassigned: int = 0
    bytes_unassigned: int = 0
    bytes_used: int = 0
    classes: list[SlabClass] = []


class Asked(Branch):
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


class Loads(Branch):
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


class Traffic(Branch):
    """What the clients of one tenant put, asked for and got; counted once a request or transfer, never once a block.

    put_parts, put_bytes: new ones. matches, reads, pulls: the requests of these names. read_bytes: leased to clients
    in memory; device_read_bytes: in spare device memory. loads: into memory, by the tier they came from. account: what
    the tenant's account says; leases that nobody reads are not in it.
    """

    put_parts: int = 0
    put_bytes: int = 0
    matches: Asked = msgspec.field(default_factory=Asked)
    reads: Asked = msgspec.field(default_factory=Asked)
    pulls: Asked = msgspec.field(default_factory=Asked)
    read_bytes: int = 0
    device_read_bytes: int = 0
    loads: dict[str, Loads] = {}
    account: Booked = msgspec.field(default_factory=Booked)


class Missed(Branch):
    """Reads that ended before all blocks that they asked for, and those blocks."""

    requests: int = 0
    blocks: int = 0


class NamespaceStats(Branch):
    """A namespace in memory. blocks, part_bytes: of each part. quota_bytes: 0 for none. settings: as in etcd.

    reads: what its clients asked for and got since the node was started. misses: by reason, one of
    `kvpool.telemetry.misses.Reason`.
    """

    fields: dict[str, Any] = {}
    epoch: int = 0
    settings: dict[str, Any] = {}
    held_bytes: int = 0
    quota_bytes: int = 0
    blocks: list[int] = []
    part_bytes: list[int] = []
    reads: Asked = msgspec.field(default_factory=Asked)
    misses: dict[str, Missed] = {}


class NamespaceUsage(Branch):
    """What a namespace has of a place. quota_bytes: 0 for none."""

    held_bytes: int = 0
    quota_bytes: int = 0


class PlaceUsage(Branch):
    """What a tenant has of memory or a disk. where: its directory; empty for memory. part_bytes: what it may use."""

    where: str = ""
    part_bytes: int = 0
    used_bytes: int = 0
    namespaces: dict[str, NamespaceUsage] = {}


class Usage(Branch):
    """What a tenant has of each tier. A disk that is not open is left out."""

    dram: list[PlaceUsage] = []
    ssd: list[PlaceUsage] = []


class EngineStats(Branch):
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


class EnginesStats(Branch):
    """The engines of a tenant that announce KV events. known_blocks: those whose key is known."""

    error: str = ""
    seen_keys: int = 0
    known_blocks: int = 0
    dropped_keys: int = 0
    followed: list[EngineStats] = []


class EventStreamStats(Branch):
    """A stream of KV events that the node publishes. blocks: those that its readers know of."""

    blocks: int = 0
    batches: int = 0
    replays: int = 0


class TenantStats(Branch):
    """A tenant's memory, with what it has of each tier. namespaces: by digest, in hex."""

    segment_bytes: int = 0
    blocks: int = 0
    secondary_bytes: int = 0
    granted_bytes: int = 0
    hard_pinned_bytes: int = 0
    soft_pinned_bytes: int = 0
    traffic: Traffic = msgspec.field(default_factory=Traffic)
    space: SpaceStats = msgspec.field(default_factory=SpaceStats)
    namespaces: dict[str, NamespaceStats] = {}
    usage: Usage = msgspec.field(default_factory=Usage)
    engines: EnginesStats = msgspec.field(default_factory=EnginesStats)


class HotPrefix(msgspec.Struct, frozen=True):
    """Of a prefix: `namespace`, the `key` of its last block, its `blocks`, and about how often it was `reads` in the last
    ten minutes or twenty. Of a tenant: bytes that it has read a second."""

    tenant: str = ""
    namespace: str = ""
    key: str = ""
    blocks: int = 0
    reads: float = 0.0
    read_bytes_s: float = 0.0


# ---- other tiers ------------------------------------------------------------------------------------------


class PlaceStats(Branch):
    """A place below memory. path: a directory, a device or a URL. blocks: parts of blocks, here as in all names below.

    encrypted: its blocks are encrypted at rest.
    """

    path: str = ""
    state: str = ""
    error: str = ""
    size_bytes: int = 0
    used_bytes: int = 0
    blocks: int = 0
    written_blocks: int = 0
    written_bytes: int = 0
    read_blocks: int = 0
    read_bytes: int = 0
    mismatches: int = 0
    read_errors: int = 0
    write_errors: int = 0
    encrypted: bool = False


class SsdStats(PlaceStats):
    """An SSD. segment_bytes: of its slots; 0 while it is not open. entries_max: of its index.

    hangs: how often its process was killed and did not end.
    """

    hangs: int = 0
    segment_bytes: int = 0
    entries_max: int = 0
    direct: bool = False
    raw_bytes: int = 0
    stored_bytes: int = 0
    codec_error: str = ""
    writing_bytes: int = 0
    gone: dict[str, int] = {}
    restored_blocks: int = 0
    dropped_at_restore: int = 0
    scrubbed_blocks: int = 0
    packed_blocks: int = 0  # of those written
    unpacked_blocks: int = 0  # written uncompressed although their namespace has a codec
    undecoded_blocks: int = 0  # of the mismatches: could not be unpacked to the original bytes
    retired_bytes: int = 0  # of slots that failed repeatedly and are not used any more


class DeviceStats(PlaceStats):
    """Spare device memory. segment_bytes: of its slots."""

    segment_bytes: int = 0
    queued_blocks: int = 0
    not_queued_blocks: int = 0
    leased_blocks: int = 0
    leased_bytes: int = 0
    gone: dict[str, int] = {}


class ObjectStats(PlaceStats):
    """Object storage. used_bytes, blocks, packs: of this node's own objects, a second ago.

    stocked: objects of former lives of this node are known. garbage: ended epochs whose objects are still there.
    attempts, faults, suspended_s: of requests to the store.
    """

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


class TiersStats(Branch):
    """The tiers below memory. clean_share: by tenant, the part of its memory that is free or on SSD, of the target."""

    dropped_writes: int = 0  # not queued, or gone when their turn came
    over_budget_blocks: int = 0
    once_used_blocks: int = 0  # not written: the budget is short, and they were not read again
    queued_writes: int = 0
    clean_share: dict[str, float] = {}
    budget_bytes_per_day: int = 0
    budget_left_bytes: float = 0.0
    budget_refused_bytes: int = 0
    ssd: list[SsdStats] = []
    object: list[ObjectStats] = []
    device: list[DeviceStats] = []

    def places(self) -> dict[str, Sequence[SsdStats | DeviceStats]]:
        """The places on this node, by tier."""
        return {"ssd": self.ssd, "device": self.device}


# ---- other nodes ------------------------------------------------------------------------------------------


class PeerStats(Branch):
    """A source of blocks, as fetches know it: a peer, or another tier here (then without incarnation)."""

    incarnation: str = ""
    distance: str = ""
    latency_ms: float = 0.0
    bytes_s: float = 0.0
    measured: bool = False
    probes: int = 0
    probe_failures: int = 0
    inflight_bytes: int = 0
    running: int = 0
    waiting: int = 0  # for a turn, here
    asked: int = 0
    failed: int = 0
    slow: int = 0
    bytes: int = 0
    declined: int = 0
    suspended_s: float = 0.0
    suspected: bool = False
    last_error: str = ""
    node: str = ""
    url: str = ""


class DeliveredStats(Branch):
    """What other tiers and nodes delivered: by peer; and by tier how fast, and against what was estimated.

    waits: seconds that reads and pulls waited.
    """

    peers: dict[str, Loads] = {}
    seconds: dict[str, Histogram] = {}
    ratios: dict[str, Histogram] = {}
    expected_s: dict[str, float] = {}
    seen_s: dict[str, float] = {}
    waits: Histogram = msgspec.field(default_factory=Histogram)

    def from_peer(self, node: str, loads: Loads) -> None:
        """A transfer from another node ended. The nodes that were asked longest ago are counted together."""
        known = self.peers.pop(node, None)
        if known is None:
            known = Loads()
            while len(self.peers) >= PEERS_MAX:
                oldest = next(name for name in self.peers if name != OTHERS)
                gone = self.peers.pop(oldest)
                self.peers.setdefault(OTHERS, Loads()).add(gone)
        self.peers[node] = known
        known.add(loads)

    def took(self, tier: str, seconds: float) -> None:
        """Count the time of a transfer that loaded something."""
        self.seconds.setdefault(tier, Histogram()).add(seconds)

    def foreseen(self, tier: str, expected_s: float, seen_s: float) -> None:
        """Count the expected and the actual time of a transfer that loaded all that it was to load."""
        if expected_s > 0 and seen_s > 0:
            self.ratios.setdefault(tier, Histogram(RATIOS)).add(seen_s / expected_s)
            self.expected_s[tier] = self.expected_s.get(tier, 0.0) + expected_s
            self.seen_s[tier] = self.seen_s.get(tier, 0.0) + seen_s


class FetchStats(Branch):
    """Fetches. transfers, negative, remembered, peers: now."""

    lookups: int = 0
    lookups_failed: int = 0
    lookups_remembered: int = 0
    joined: int = 0  # parts already on their way for another request
    hedges: int = 0  # parts that a second source was asked for as well
    not_begun: int = 0  # transfers that ended before their turn came
    no_room: int = 0  # transfers that found no slots for some of their blocks
    cancelled: int = 0  # transfers that lost against a hedge
    absent: int = 0
    mismatches: int = 0
    failed_transfers: int = 0
    declined: int = 0  # parts that are computed sooner than they would arrive
    trials: int = 0  # transfers nevertheless made to measure their source's speed
    transfers: int = 0
    negative: int = 0
    remembered: int = 0
    peers: list[PeerStats] = []
    delivered: DeliveredStats = msgspec.field(default_factory=DeliveredStats)


class PrefixStreamStats(Branch):
    """Prefix streams. lag_s: from the notice of a commit to the arrival of its blocks, a moving average.

    waiters: questions that wait here, of peers' streams and our own.
    """

    ended: int = 0
    whole: int = 0  # of these: all wanted blocks arrived in time
    blocks: int = 0  # parts of blocks that arrived in streams
    questions: int = 0
    questions_failed: int = 0
    lookups: int = 0
    not_held: int = 0  # streams that were too large to be held until they end
    under_way: int = 0
    waiters: int = 0
    lag_s: float = 0.0


class ReplicationStats(Branch):
    """Replication and offloading. wanted: blocks with too few replicas now."""

    offered_blocks: int = 0
    accepted_blocks: int = 0
    accepted_bytes: int = 0
    taken_blocks: int = 0
    refused_offers: int = 0
    forwarded_blocks: int = 0
    replicated_blocks: int = 0
    repairs: int = 0
    dropped_wishes: int = 0
    promoted: int = 0
    wanted: int = 0
    repairing: bool = False


class WorkerStats(Branch):
    """A transfer worker. quarantined: processes that were killed and have not ended: they hang in the kernel."""

    pid: int | None = None
    alive: bool = False
    restarts: int = 0
    orders: int = 0
    loans: int = 0
    listening: list[str] = []
    quarantined: int = 0


class NixlStats(Branch):
    """Pulls over NIXL. rested: pulls that went over TCP soon after a failure; slower: since NIXL is slower there."""

    pulls: int = 0
    blocks: int = 0
    bytes: int = 0
    failed_over: int = 0
    failed_over_blocks: int = 0
    rested: int = 0
    slower: int = 0
    resting: dict[str, str] = {}
    last_error: str = ""


class AnnouncerStats(Branch):
    """What the directory is told. lag_s: age of the oldest change that is not published, in seconds.

    repairing: keys found by a walk and not sent. overflows: how often the changes of a group of keys found no room.
    settled: nothing is left to do, as far as is known.
    """

    connected: bool = False
    settled: bool = False
    queued: int = 0
    lag_s: float = 0.0
    repairing: int = 0
    stale_groups: int = 0
    blocked_groups: int = 0
    overflows: int = 0
    published: int = 0
    withdrawn: int = 0
    retracted: int = 0
    retracts_dropped: int = 0
    failures: int = 0
    rounds: int = 0


class ClusterStats(Branch):
    """How a node stands in its cluster. others: nodes to fetch from. directory: None without one.

    drain: a `DrainProgress`, None without a drain. swept: entries of dead nodes that it dropped from the directory;
    sweep_failures: steps that the directory did not do. namespaces_deleted: from the cluster, by this node, because
    nobody used them. membership_failures: what etcd did not do. The errors: as long as that lasts. undecodable_records:
    in etcd, each time that one was read.
    """

    cluster: str = ""
    standing: str = ""
    state: str = ""
    incarnation: str = ""
    others: int = 0
    directory: AnnouncerStats | None = None
    drain: dict[str, Any] | None = None
    leases_lost: int = 0
    swept: int = 0
    namespaces_deleted: int = 0
    sweep_failures: int = 0
    sweep_error: str = ""
    membership_failures: int = 0
    membership_error: str = ""
    undecodable_records: int = 0


# ---- the process ------------------------------------------------------------------------------------------


class ProcessStats(Branch):
    """A process of the daemon. resident_bytes: with shared segments; private_bytes: without."""

    kind: str = ""
    pid: int = 0
    cpu_s: float = 0.0
    resident_bytes: int = 0
    private_bytes: int = 0


class SampledStats(Branch):
    """evicted_age_s: by tier, since the last use. late_s: how late the control process woke up."""

    evicted_age_s: dict[str, Histogram] = {}
    late_s: Histogram = msgspec.field(default_factory=Histogram)


class WayStats(Branch):
    """A way to a peer. rests_s: seconds for which it is not used; reason: why."""

    url: str = ""
    transport: str = ""
    pulls: int = 0
    bytes: int = 0
    rests_s: float = 0.0
    reason: str = ""


class PeerWays(Branch):
    """The ways to a peer. usual: the transport that is used as a rule. seconds: of pulls, by transport."""

    usual: str = ""
    bytes_s: float = 0.0
    seconds: dict[str, Histogram] = {}
    others: dict[str, dict[str, float | None]] = {}
    ways: list[WayStats] = []


class PathsStats(Branch):
    """The ways to peers, by the URL of each. changed_card: transfers that went on over another network card."""

    changed_card: int = 0
    peers: dict[str, PeerWays] = {}


class AuditStats(Branch):
    """The audit file: records that are durable, and that the disk did not take in time. errors: of writes."""

    written: int = 0
    lost: int = 0
    errors: int = 0


class NodeStats(Branch):
    """A node. tenants: by name. sources: whether there is anything to fetch from. hot: operators only, as are
    event_streams, by name.

    failed_logins: by where: `socket` (clients), `http` (the gateway), `peer`. internal_errors: requests that met an
    unexpected error and changed nothing, by their message's name. http_dropped: connections that the gateway which shows
    this closed because all places were taken.
    """

    node: str = ""
    incarnation: str = ""
    version: str = ""
    uptime_s: float = 0.0
    clients: int = 0
    connections: int = 0
    refused_connections: int = 0
    http_dropped: int = 0
    tenant_waits: int = 0  # of connections whose tenant had used its share of the loop's time
    failed_logins: dict[str, int] = {}
    internal_errors: dict[str, int] = {}
    audit: AuditStats | None = None
    counters: Counters = msgspec.field(default_factory=Counters)
    gone: dict[str, int] = {}
    leases: int = 0
    expired: int = 0
    tenants: dict[str, TenantStats] = {}
    tiers: TiersStats = msgspec.field(default_factory=TiersStats)
    fetch: FetchStats = msgspec.field(default_factory=FetchStats)
    sources: bool = False
    prefix_streams: PrefixStreamStats = msgspec.field(default_factory=PrefixStreamStats)
    replication: ReplicationStats = msgspec.field(default_factory=ReplicationStats)
    transfer_workers: list[WorkerStats] = []
    nixl: NixlStats | None = None
    paths: PathsStats = msgspec.field(default_factory=PathsStats)
    cluster: ClusterStats = msgspec.field(default_factory=ClusterStats)
    sampled: SampledStats = msgspec.field(default_factory=SampledStats)
    processes: list[ProcessStats] = []
    hot: list[HotPrefix] = []
    event_streams: dict[str, EventStreamStats] = {}


_decode = JsonDecoder[NodeStats](NodeStats, "the statistics of a node")


def decode(data: bytes) -> NodeStats:
    """From JSON. Raises `ProtocolError` if it is invalid."""
    return _decode(data)

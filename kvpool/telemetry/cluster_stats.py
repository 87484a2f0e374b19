"""A node among others: transfers, replication, membership and directory. See `kvpool.telemetry.node_stats`."""

from __future__ import annotations

from operator import attrgetter
from typing import Annotated

import msgspec

from kvpool.telemetry.histogram import RATIOS, Histogram
from kvpool.telemetry.memory_stats import OUTCOMES, Loads
from kvpool.telemetry.metrics import (
    OTHERS,
    Label,
    counter,
    each,
    fields_of,
    gauge,
    histogram,
    one_of,
)

PEERS_MAX = 256  # that are counted by name

STANDINGS = ("member", "away", "unsure", "lost", "out")

NODE_STATES = ("joining", "serving", "draining", "gone")

DRAIN_PHASES = ("copying", "waiting", "done")

PEER_PULL_PARTS = counter(
    "peer_pull_parts",
    "outcome",
    help="Parts of blocks requested from a peer, by outcome as in `kvpool_load_parts_total`.",
    read=fields_of(*OUTCOMES),
)

PEER_PULL_BYTES = counter(
    "peer_pull_bytes", help="Bytes received from a peer.", read=attrgetter("nbytes")
)

REPLICATION_ACCEPTED = counter(
    "replication_accepted_blocks",
    help="Blocks that other nodes accepted: wanted replicas (`replication`) or blocks about to be evicted here "
    "(`offload`).",
)

ANNOUNCER_CHANGES = counter(
    "announcer_changes", help="Changes published to the directory, by kind."
)

DRAIN_BLOCKS = gauge(
    "drain_blocks",
    help="Blocks of a drain: in all (`total`), examined (`seen`), copied to other nodes (`copied`), accepted by no node "
    "(`failed`), only on SSD when the time was up (`left`).",
)


class PeerStats(msgspec.Struct):
    """A source of blocks, as fetches know it: a peer, or another tier here (then without incarnation)."""

    incarnation: str = ""
    distance: str = ""
    latency_ms: Annotated[float, gauge("source_latency_seconds", read=lambda ms: ms * 1e-3)] = 0.0
    """Estimated time to the first byte from the source, in seconds. A source is a peer or a tier of this node."""
    bytes_s: Annotated[float, gauge("source_bytes_per_second")] = 0.0
    """Estimated throughput of the source, in bytes per second."""
    measured: bool = False
    probes: int = 0
    probe_failures: int = 0
    inflight_bytes: Annotated[int, gauge("source_inflight_bytes")] = 0
    """Bytes requested from the source and not received yet."""
    running: int = 0
    waiting: Annotated[int, gauge("source_waiting_transfers")] = 0
    """Transfers that wait for their turn at the source."""
    asked: int = 0
    failed: int = 0
    slow: int = 0
    bytes: int = 0
    declined: int = 0
    suspended_s: Annotated[float, gauge("source_suspended", read=bool)] = 0.0
    """1 while the source is not used because it has failed."""
    suspected: bool = False
    last_error: str = ""
    node: Annotated[str, Label("source")] = ""
    url: str = ""


class DeliveredStats(msgspec.Struct):
    """What other tiers and nodes delivered: by peer; and by tier how fast, and against what was estimated."""

    peers: Annotated[
        dict[str, Loads], each("peer", metrics=(PEER_PULL_PARTS, PEER_PULL_BYTES))
    ] = {}
    seconds: Annotated[dict[str, Histogram], histogram("load_seconds", "tier")] = {}
    """Duration of transfers into memory that loaded at least one part, in seconds, by source tier."""
    ratios: Annotated[dict[str, Histogram], histogram("load_estimate_ratio", "tier")] = {}
    """Actual duration of a transfer divided by its estimate. Below 1 the estimate was too high."""
    expected_s: Annotated[dict[str, float], counter("load_estimated_seconds", "tier")] = {}
    """Sum of the estimated durations of transfers, in seconds."""
    seen_s: Annotated[dict[str, float], counter("load_actual_seconds", "tier")] = {}
    """Sum of the actual durations of the same transfers, in seconds."""
    waits: Annotated[Histogram, histogram("fetch_wait_seconds")] = msgspec.field(
        default_factory=Histogram
    )
    """Time that reads and pulls waited for other tiers and nodes, in seconds."""

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


class FetchStats(msgspec.Struct):
    """Fetches. transfers, negative, remembered, peers: now."""

    lookups: Annotated[int, counter("lookups")] = 0
    """Lookups of a prefix in the directory."""
    lookups_failed: Annotated[int, counter("lookups_failed")] = 0
    """Lookups in the directory or the catalog that failed or timed out."""
    lookups_remembered: Annotated[int, counter("lookups_remembered")] = 0
    """Failed lookups answered from remembered locations."""
    joined: Annotated[int, counter("coalesced_parts")] = 0
    """Parts of blocks requested again while their transfer was in progress."""
    hedges: Annotated[int, counter("hedged_parts")] = 0
    """Parts of blocks requested from a second source because the first was slow."""
    not_begun: Annotated[int, counter("transfers_withdrawn")] = 0
    """Transfers that ended before their turn at their source: another source was asked, or nobody waited any more."""
    no_room: Annotated[int, counter("transfers_refused")] = 0
    """Transfers that found no slots for some of their blocks: memory was full of what cannot be evicted."""
    cancelled: int = 0  # transfers that lost against a hedge
    absent: Annotated[int, counter("stale_parts")] = 0
    """Parts of blocks that a source did not hold although the directory listed them."""
    mismatches: int = 0
    failed_transfers: Annotated[int, counter("transfers_failed")] = 0
    """Failed transfers."""
    declined: Annotated[int, counter("declined_parts")] = 0
    """Parts of blocks left to the engine because computing them is faster than loading them."""
    trials: Annotated[int, counter("trials")] = 0
    """Small transfers that measured a source although loading was declined."""
    transfers: Annotated[int, gauge("transfers")] = 0
    """Transfers in progress from other tiers and nodes."""
    negative: Annotated[int, gauge("negative_parts")] = 0
    """Parts of blocks remembered as absent. Entries expire after two seconds."""
    remembered: int = 0
    peers: Annotated[list[PeerStats], each()] = []
    delivered: DeliveredStats = msgspec.field(default_factory=DeliveredStats)


class PrefixStreamStats(msgspec.Struct):
    """Prefix streams. waiters: questions that wait here, of peers' streams and our own."""

    ended: Annotated[int, counter("prefix_streams_ended")] = 0
    """Prefix streams that ended."""
    whole: Annotated[int, counter("prefix_streams_complete")] = 0
    """Prefix streams that ended with all their blocks."""
    blocks: Annotated[int, counter("prefix_stream_parts")] = 0
    """Parts of blocks fetched by prefix streams."""
    questions: int = 0
    questions_failed: int = 0
    lookups: int = 0
    not_held: int = 0  # streams that were too large to be held until they end
    under_way: Annotated[int, gauge("prefix_streams")] = 0
    """Prefix streams in progress."""
    waiters: int = 0
    lag_s: Annotated[float, gauge("prefix_stream_lag_seconds")] = 0.0
    """Moving average of the time from the notice of a commit to the arrival of its blocks, in seconds."""


class ReplicationStats(msgspec.Struct):
    """Replication and offloading."""

    offered_blocks: Annotated[int, counter("replication_offered_blocks")] = 0
    """Blocks offered to other nodes, accepted or not."""
    accepted_blocks: int = 0
    accepted_bytes: Annotated[int, counter("replication_accepted_bytes")] = 0
    """Bytes of blocks that other nodes accepted."""
    taken_blocks: Annotated[int, counter("replication_received_blocks")] = 0
    """Blocks accepted from other nodes."""
    refused_offers: int = 0
    forwarded_blocks: Annotated[int, REPLICATION_ACCEPTED.at(reason="offload")] = 0
    replicated_blocks: Annotated[int, REPLICATION_ACCEPTED.at(reason="replication")] = 0
    repairs: int = 0
    dropped_wishes: Annotated[int, counter("replication_dropped")] = 0
    """Wanted replicas given up because the backlog was full."""
    promoted: int = 0
    wanted: Annotated[int, gauge("replication_backlog_blocks")] = 0
    """Blocks with fewer replicas than wanted."""
    repairing: Annotated[bool, gauge("replication_repairing")] = False
    """1 while a repair scans all blocks for missing replicas."""


class WorkerStats(msgspec.Struct):
    """A transfer worker."""

    pid: int | None = None
    alive: bool = False
    restarts: Annotated[int, counter("transfer_worker_restarts")] = 0
    """Restarts of transfer workers."""
    orders: Annotated[int, gauge("transfer_worker_orders")] = 0
    """Orders in progress in transfer workers."""
    loans: Annotated[int, gauge("transfer_worker_loans")] = 0
    """Loans to peers held by transfer workers."""
    listening: list[str] = []
    quarantined: Annotated[int, gauge("transfer_workers_quarantined")] = 0
    """Transfer workers that were killed and have not ended. What they may write to stays reserved."""


class NixlStats(msgspec.Struct):
    """Pulls over NIXL. rested: pulls that went over TCP soon after a failure; slower: since NIXL is slower there."""

    pulls: int = 0
    blocks: int = 0
    bytes: int = 0
    failed_over: Annotated[int, counter("nixl_failovers")] = 0
    """Transfers that continued over TCP after RDMA failed."""
    failed_over_blocks: int = 0
    rested: int = 0
    slower: int = 0
    resting: dict[str, str] = {}
    last_error: str = ""


class WayStats(msgspec.Struct):
    """A way to a peer. rests_s: seconds for which it is not used; reason: why."""

    url: Annotated[str, Label("path")] = ""
    transport: Annotated[str, Label("transport")] = ""
    pulls: Annotated[int, counter("path_pulls")] = 0
    """Pulls over a path to a peer: a transport and the address of a network card."""
    bytes: Annotated[int, counter("path_bytes")] = 0
    """Bytes received over a path."""
    rests_s: Annotated[float, gauge("path_suspended", read=bool)] = 0.0
    """1 while a path is not used because it has failed."""
    reason: str = ""


class PeerWays(msgspec.Struct):
    """The ways to a peer. usual: the transport that is used as a rule."""

    usual: str = ""
    bytes_s: float = 0.0
    seconds: Annotated[dict[str, Histogram], histogram("peer_pull_seconds", "transport")] = {}
    """Duration of pulls from a peer, in seconds, by transport."""
    others: dict[str, dict[str, float | None]] = {}
    ways: Annotated[list[WayStats], each()] = []


class PathsStats(msgspec.Struct):
    """The ways to peers, by the URL of each."""

    changed_card: Annotated[int, counter("path_failovers")] = 0
    """Transfers that continued over another network card."""
    peers: Annotated[dict[str, PeerWays], each("peer")] = {}


class AnnouncerStats(msgspec.Struct):
    """What the directory is told.

    repairing: keys found by a walk and not sent. settled: nothing is left to do, as far as is known.
    """

    connected: Annotated[bool, gauge("directory_connected")] = False
    """1 while the directory (Redis) answers. Absent without a directory."""
    settled: bool = False
    queued: Annotated[int, gauge("announcer_queue_blocks")] = 0
    """Changes not yet published to the directory."""
    lag_s: Annotated[float, gauge("announcer_lag_seconds")] = 0.0
    """Age of the oldest unpublished change, in seconds."""
    repairing: int = 0
    stale_groups: int = 0
    blocked_groups: int = 0
    overflows: Annotated[int, counter("announcer_overflows")] = 0
    """How often the changes of a group of blocks found no room in the queue. The group is scanned when there is."""
    published: Annotated[int, ANNOUNCER_CHANGES.at(kind="published")] = 0
    withdrawn: Annotated[int, ANNOUNCER_CHANGES.at(kind="withdrawn")] = 0
    retracted: Annotated[int, ANNOUNCER_CHANGES.at(kind="retracted")] = 0
    retracts_dropped: int = 0
    failures: Annotated[int, counter("announcer_failures")] = 0
    """Failed publications."""
    rounds: int = 0


class DrainProgress(msgspec.Struct, frozen=True):
    """The progress of a draining node. `phase`: copying, waiting (for leases), done."""

    phase: Annotated[str, gauge("drain_phase", "phase", read=one_of(*DRAIN_PHASES))] = "copying"
    """1 for the current phase of a drain, 0 for the others. Absent without a drain."""
    blocks: Annotated[int, DRAIN_BLOCKS.at(progress="seen")] = 0  # handled so far
    blocks_total: Annotated[int, DRAIN_BLOCKS.at(progress="total")] = 0
    copied: Annotated[int, DRAIN_BLOCKS.at(progress="copied")] = 0
    copied_bytes: Annotated[int, gauge("drain_copied_bytes")] = 0
    """Bytes that a drain copied to other nodes."""
    failed: Annotated[int, DRAIN_BLOCKS.at(progress="failed")] = 0
    left: Annotated[int, DRAIN_BLOCKS.at(progress="left")] = 0
    leases: int = 0


class ClusterStats(msgspec.Struct):
    """How a node stands in its cluster. directory: None without one. drain: None without a drain.

    swept: entries of dead nodes that it dropped from the directory. The errors: as long as that lasts.
    """

    cluster: str = ""
    standing: Annotated[str, gauge("membership_standing", "standing", read=one_of(*STANDINGS))] = ""
    """1 for this node's current standing in the cluster, 0 for the others."""
    state: Annotated[str, gauge("node_state", "state", read=one_of(*NODE_STATES))] = ""
    """1 for the current state of this node, 0 for the others."""
    incarnation: str = ""
    others: Annotated[int, gauge("cluster_peers")] = 0
    """Other nodes that this node may fetch from."""
    directory: AnnouncerStats | None = None
    drain: DrainProgress | None = None
    leases_lost: Annotated[int, counter("membership_leases_lost")] = 0
    """Membership leases lost."""
    swept: int = 0
    namespaces_deleted: Annotated[int, counter("membership_namespaces_deleted")] = 0
    """Namespaces that this node deleted from the cluster because nobody had used them for long."""
    sweep_failures: Annotated[int, counter("directory_sweep_failures")] = 0
    """Steps of a sweep that the directory did not answer, or refused."""
    sweep_error: str = ""
    membership_failures: Annotated[int, counter("membership_failures")] = 0
    """Requests that etcd did not answer, or refused. kvpool doctor shows the reason."""
    membership_error: str = ""
    undecodable_records: Annotated[int, counter("membership_records_dropped")] = 0
    """Records read from etcd that are left out because they cannot be read."""

    @property
    def connected(self) -> Annotated[bool, gauge("membership_connected")]:
        """1 while etcd confirms this node's membership."""
        return self.standing == "member"

"""The numbers of a node, as one typed tree: its parts count in it, clients and operators are sent it as JSON.

Totals are counted since the daemon started. A part of the daemon owns its branch, adds to the totals as things
happen, and sets the gauges (numbers that fall too) when it is asked. Fields declare the metrics that they are exported
as: see `kvpool.telemetry.metrics`; `kvpool.admin.metrics` exports them, and `docs/metrics.md` is made of them. What a
node of another version does not send reads as 0 or empty; what only it knows is left out.

Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from kvpool.decoding import JsonDecoder
from kvpool.telemetry.cluster_stats import (
    ClusterStats,
    FetchStats,
    NixlStats,
    PathsStats,
    PrefixStreamStats,
    ReplicationStats,
    WorkerStats,
)
from kvpool.telemetry.histogram import Histogram
from kvpool.telemetry.memory_stats import Counters, TenantStats
from kvpool.telemetry.metrics import Label, counter, each, gauge, histogram
from kvpool.telemetry.tier_stats import DRAM, DROPPED_PARTS, TiersStats


class HotPrefix(msgspec.Struct, frozen=True):
    """Of a prefix: `namespace`, the `key` of its last block, its `blocks`, and about how often it was `reads` in the last
    ten minutes or twenty. Of a tenant: bytes that it has read a second."""

    tenant: str = ""
    namespace: str = ""
    key: str = ""
    blocks: int = 0
    reads: float = 0.0
    read_bytes_s: float = 0.0


class EventStreamStats(msgspec.Struct):
    """A stream of KV events that the node publishes."""

    blocks: Annotated[int, gauge("published_blocks")] = 0
    """Blocks that readers of a stream of KV events know of."""
    batches: Annotated[int, counter("published_batches")] = 0
    """Batches of a stream of KV events."""
    replays: Annotated[int, counter("published_replays")] = 0
    """Replays of a stream of KV events, as its readers have asked for."""


class ProcessStats(msgspec.Struct):
    """A process of the daemon."""

    kind: Annotated[str, Label("process")] = ""
    pid: int = 0
    cpu_s: Annotated[float, counter("process_cpu_seconds")] = 0.0
    """CPU time of the daemon's processes, in seconds."""
    resident_bytes: Annotated[int, gauge("process_resident_bytes")] = 0
    """Resident memory of the daemon's processes, in bytes, shared segments included."""
    private_bytes: Annotated[int, gauge("process_private_bytes")] = 0
    """Private memory of the daemon's processes, in bytes, shared segments excluded."""


class SampledStats(msgspec.Struct):
    """What is sampled once a second."""

    evicted_age_s: Annotated[
        dict[str, Histogram], histogram("evicted_idle_age_seconds", "tier")
    ] = {}
    """Idle age of evicted blocks, in seconds. One block is sampled from each batch."""
    late_s: Annotated[Histogram, histogram("event_loop_lag_seconds")] = msgspec.field(
        default_factory=Histogram
    )
    """Delay of a timer in the control process, in seconds, sampled once a second. High values mean overload."""


class AuditStats(msgspec.Struct):
    """The audit file."""

    written: Annotated[int, counter("audit_records")] = 0
    """Records that the audit file has, since the start."""
    lost: Annotated[int, counter("audit_lost_records")] = 0
    """Records that the audit file did not take in time."""
    errors: Annotated[int, counter("audit_errors")] = 0
    """Writes to the audit file that failed."""


class NodeStats(msgspec.Struct):
    """A node. tenants: by name. sources: whether there is anything to fetch from. hot: operators only, as are
    event_streams, by name.
    """

    node: str = ""
    incarnation: str = ""
    version: str = ""
    uptime_s: Annotated[float, gauge("uptime_seconds")] = 0.0
    """Seconds since the daemon started."""
    clients: Annotated[int, gauge("clients")] = 0
    """Connected clients."""
    connections: Annotated[int, gauge("connections")] = 0
    """Open connections of clients."""
    refused_connections: Annotated[int, counter("connections_refused")] = 0
    """Connections refused: too many, a wrong token, or a handshake timeout."""
    http_dropped: Annotated[int, counter("http_connections_dropped")] = 0
    """Connections that the HTTP gateway closed because all places were taken, idle ones first."""
    tenant_waits: Annotated[int, counter("tenant_waits")] = 0
    """Waits of connections whose tenant had used its share of the daemon's time, while others needed it."""
    failed_logins: Annotated[dict[str, int], counter("failed_logins", "door")] = {}
    """Failed logins: clients at the socket, users of the HTTP gateway (http), and peers."""
    internal_errors: Annotated[dict[str, int], counter("internal_errors", "request")] = {}
    """Requests that met an unexpected error and changed nothing: each ended its connection. A bug: the log has it."""
    subscriptions_ended: Annotated[dict[str, int], counter("subscriptions_ended", "feature")] = {}
    """Features that met an unexpected error and observe nothing more until the daemon restarts. A bug: the log has it."""
    audit: AuditStats | None = None
    counters: Counters = msgspec.field(default_factory=Counters)
    gone: Annotated[dict[str, int], DROPPED_PARTS.at(**DRAM)] = {}
    leases: Annotated[int, gauge("leases")] = 0
    """Open leases."""
    expired: int = 0
    tenants: Annotated[dict[str, TenantStats], each("tenant")] = {}
    tiers: TiersStats = msgspec.field(default_factory=TiersStats)
    fetch: FetchStats = msgspec.field(default_factory=FetchStats)
    sources: bool = False
    prefix_streams: PrefixStreamStats = msgspec.field(default_factory=PrefixStreamStats)
    replication: ReplicationStats = msgspec.field(default_factory=ReplicationStats)
    transfer_workers: Annotated[list[WorkerStats], each()] = []
    nixl: NixlStats | None = None
    paths: PathsStats = msgspec.field(default_factory=PathsStats)
    cluster: ClusterStats = msgspec.field(default_factory=ClusterStats)
    sampled: SampledStats = msgspec.field(default_factory=SampledStats)
    processes: Annotated[list[ProcessStats], each()] = []
    hot: list[HotPrefix] = []
    event_streams: Annotated[dict[str, EventStreamStats], each("stream")] = {}

    @property
    def build(
        self,
    ) -> Annotated[Mapping[Any, int], gauge("build_info", "node", "version", "cluster")]:
        """Always 1. The labels name the node, its version and its cluster."""
        return {(self.node, self.version, self.cluster.cluster): 1}


_decode = JsonDecoder[NodeStats](NodeStats, "the statistics of a node")


def decode(data: bytes) -> NodeStats:
    """From JSON. Raises `ProtocolError` if it is invalid."""
    return _decode(data)

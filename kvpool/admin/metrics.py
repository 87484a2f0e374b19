"""A daemon's numbers for Prometheus: the table of all of them, and the text. Pure: data in, bytes out.

`render` takes what the request `Inspect` answers: the stats of one daemon, of all its tenants. Every metric is one
entry of `METRICS`: its name, type, labels, what it says, and where in the stats it is read. Work and text are
bounded by tenants, shown namespaces and shown peers; blocks are never looked at.

`docs/metrics.md` is made of the same table, by `scripts/document_metrics.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache, partial
from itertools import accumulate, chain
from typing import Any

from kvpool.telemetry.histogram import Histogram
from kvpool.telemetry.node_stats import (
    Missed,
    NamespaceStats,
    NodeStats,
    PeerWays,
    TenantStats,
)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
NAMESPACES_MAX = 200  # the largest are shown by themselves, the others of a tenant as one
PEERS_MAX = 256  # those that were asked most are shown by themselves, the others as one
OTHERS = "others"
MODEL_CHARACTERS_MAX = 128

Sample = tuple[tuple[str, ...], Any]
"""Values of the labels, and a number or a `Histogram`."""


class Kind(StrEnum):
    """What Prometheus calls the type."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class At:
    """Reads all values at a path in a `NodeStats`: names, with dots between them.

    `*` stands for every entry of a mapping, whose name becomes the next label; `[NAME]` for every element of a list,
    whose NAME does (`[]`: no label). Where None is on the way there is nothing to be read. labels: follow these, the same for all.
    states: the value is one of these words; each becomes a label, with 1 for the one that it is and else 0.
    """

    path: str
    labels: tuple[str, ...] = ()
    states: tuple[str, ...] = ()

    def __call__(self, view: View) -> Iterator[Sample]:
        for found, value in _walk(view.stats, self.path.split("."), ()):
            if self.states:
                for state in self.states:
                    yield (*found, state, *self.labels), state == value
            else:
                yield (*found, *self.labels), value


Source = Callable[["View"], Iterable[Sample]]


@dataclass(frozen=True, slots=True)
class Metric:
    """One entry of the table. what: a sentence, for whoever reads the number. A sample that several sources give,
    or one gives several times, is their sum."""

    name: str
    kind: Kind
    help_text: str
    sources: tuple[Source, ...]
    labels: tuple[str, ...] = ()

    def samples(self, view: View) -> dict[tuple[str, ...], Any]:
        """What the sources give."""
        found: dict[tuple[str, ...], Any] = {}
        for labels, value in chain.from_iterable(source(view) for source in self.sources):
            known = found.get(labels)
            if known is None:
                found[labels] = value
            elif self.kind is Kind.HISTOGRAM:
                found[labels] = _merged(known, value)
            else:
                found[labels] = known + value
        return found


class View:
    """Stats, and what of them is shown by itself."""

    def __init__(self, stats: NodeStats, namespaces_max: int, peers_max: int) -> None:
        self.stats = stats
        self._namespaces_max = namespaces_max
        self._peers_max = peers_max
        self._spaces: list[tuple[tuple[str, str, str], Mapping[str, Any]]] | None = None
        self._peers: dict[str, str] | None = None

    def spaces(self) -> list[tuple[tuple[str, str, str], Mapping[str, Any]]]:
        """(tenant, digest, model), and what there is of each: the largest, the others of a tenant as one."""
        if self._spaces is None:
            self._spaces = _spaces(self.stats, self._namespaces_max)
        return self._spaces

    def peer(self, name: str) -> str:
        """As what a peer is shown, by its name."""
        if self._peers is None:
            asked: dict[str, int] = {}
            for one in self.stats.fetch.peers:
                asked[one.node] = asked.get(one.node, 0) + one.asked
            most = sorted(asked, key=lambda node: -asked[node])[: self._peers_max]
            self._peers = {node: node or "gone" for node in most}
        return self._peers.get(name, OTHERS)


def _get(value: Any, name: str) -> Any:
    return value[name] if isinstance(value, Mapping) else getattr(value, name)


def _walk(value: Any, steps: Sequence[str], found: tuple[str, ...]) -> Iterator[Sample]:
    for at, step in enumerate(steps):
        if value is None:
            return
        if step == "*":
            for name, each in value.items():
                yield from _walk(each, steps[at + 1 :], (*found, name))
            return
        if step.startswith("["):
            for each in value:
                label = (str(_get(each, step[1:-1])),) if step != "[]" else ()
                yield from _walk(each, steps[at + 1 :], (*found, *label))
            return
        value = _get(value, step)
    if value is not None:
        yield found, value


def _merged(one: Histogram, other: Histogram) -> Histogram:
    if one.bounds != other.bounds:
        raise ValueError("histograms of one metric have other bounds")
    counts = [a + b for a, b in zip(one.counts, other.counts, strict=True)]
    return Histogram(one.bounds, counts, one.total + other.total)


# ---- samples that are computed ----------------------------------------------------------------------------


def _build(view: View) -> Iterator[Sample]:
    stats = view.stats
    yield (stats.node, stats.version, stats.cluster.cluster), 1


def _dram(read: Callable[[TenantStats], int], view: View) -> Iterator[Sample]:
    """Of all tenants' segments together."""
    yield ("", "dram"), sum(map(read, view.stats.tenants.values()))


def _gone_below(view: View) -> Iterator[Sample]:
    for tier, places in view.stats.tiers.places().items():
        for place in places:
            for reason, count in place.gone.items():
                yield (reason, place.path, tier), count


def _spaces(stats: NodeStats, most: int) -> list[tuple[tuple[str, str, str], Mapping[str, Any]]]:
    found: list[tuple[int, str, str, NamespaceStats, int]] = []
    for tenant, books in stats.tenants.items():
        disks = [disk.namespaces for disk in books.usage.ssd]
        for digest, space in books.namespaces.items():
            on_disks = sum([disk[digest].held_bytes for disk in disks if digest in disk])
            found.append((space.held_bytes + on_disks, tenant, digest, space, on_disks))
    found.sort(key=lambda one: -one[0])
    shown: list[tuple[tuple[str, str, str], Mapping[str, Any]]] = []
    for _, tenant, digest, space, on_disks in found[:most]:
        model = str(space.fields.get("model", ""))[:MODEL_CHARACTERS_MAX]
        entry = {
            "dram": space.held_bytes,
            "ssd": on_disks,
            "quota": space.quota_bytes,
            "blocks": max(space.blocks, default=0),
            "epoch": space.epoch,
            "misses": space.misses,
        }
        shown.append(((tenant, digest, model), entry))
    rest: dict[str, dict[str, Any]] = {}
    for _, tenant, _, space, on_disks in found[most:]:
        total = rest.setdefault(tenant, {"dram": 0, "ssd": 0, "blocks": 0, "misses": {}})
        total["dram"] += space.held_bytes
        total["ssd"] += on_disks
        total["blocks"] += max(space.blocks, default=0)
        for reason, missed in space.misses.items():
            known = total["misses"].setdefault(reason, Missed())
            known.requests += missed.requests
            known.blocks += missed.blocks
    return shown + [((tenant, OTHERS, ""), total) for tenant, total in rest.items()]


def _space(name: str, view: View, *labels: str) -> Iterator[Sample]:
    for space, entry in view.spaces():
        if name in entry:
            yield (*space, *labels), entry[name]


def _misses(name: str) -> Source:
    def read(view: View) -> Iterator[Sample]:
        for space, entry in view.spaces():
            for reason, missed in entry["misses"].items():
                yield (*space, reason), getattr(missed, name)

    return read


def _space_in(tier: str) -> Source:
    return lambda view: _space(tier, view, tier)


def _peers(name: str, times: float, view: View) -> Iterator[Sample]:
    """Gauges of other nodes, and of other tiers here, of which no two have the same name but for those gone."""
    for one in view.stats.fetch.peers:
        shown = view.peer(one.node)
        if one.node and shown != OTHERS:
            yield (shown,), getattr(one, name) * times


def _suspended(view: View) -> Iterator[Sample]:
    for labels, seconds in _peers("suspended_s", 1.0, view):
        yield labels, seconds > 0


def _delivered(outcome: str) -> Source:
    def read(view: View) -> Iterator[Sample]:
        for name, loads in view.stats.fetch.delivered.peers.items():
            shown = name if name == "gone" else view.peer(name)
            yield (shown, outcome), getattr(loads, outcome)

    return read


def _delivered_bytes(view: View) -> Iterator[Sample]:
    for (name, _), nbytes in _delivered("nbytes")(view):
        yield (name,), nbytes


def _named_paths(view: View) -> Iterator[tuple[str, PeerWays]]:
    """The ways to each peer, by its name."""
    names = {one.url: one.node for one in view.stats.fetch.peers if one.url}
    for url, ways in view.stats.paths.peers.items():
        yield view.peer(names.get(url, "")), ways


def _pull_seconds(view: View) -> Iterator[Sample]:
    for peer, ways in _named_paths(view):
        for transport, seconds in ways.seconds.items():
            yield (peer, transport), seconds


def _ways(name: str, view: View) -> Iterator[Sample]:
    for peer, ways in _named_paths(view):
        for way in ways.ways:
            url = OTHERS if peer == OTHERS else way.url
            yield (peer, way.transport, url), getattr(way, name)


def _resting(view: View) -> Iterator[Sample]:
    for labels, seconds in _ways("rests_s", view):
        yield labels, seconds > 0


def _engine_count(view: View) -> Iterator[Sample]:
    for tenant, books in view.stats.tenants.items():
        followed = books.engines.followed
        connected = sum(engine.connected for engine in followed)
        yield (tenant, "connected"), connected
        yield (tenant, "not_connected"), len(followed) - connected


def _event_streams(name: str, view: View) -> Iterator[Sample]:
    for stream, stats in view.stats.event_streams.items():
        yield (stream,), getattr(stats, name)


def _namespace_count(view: View) -> Iterator[Sample]:
    for tenant, books in view.stats.tenants.items():
        yield (tenant,), len(books.namespaces)


def _connected(view: View) -> Iterator[Sample]:
    """Whether the membership answers: a node that is alone has one that always does."""
    yield (), view.stats.cluster.standing == "member"


# ---- the table -------------------------------------------------------------------------------------------

STANDINGS = ("member", "away", "unsure", "lost", "out")
NODE_STATES = ("joining", "serving", "draining", "gone")
DISK_STATES = ("opening", "serving", "read-only", "failed")
STORE_STATES = ("opening", "serving", "failing", "failed")
DRAIN_PHASES = ("copying", "waiting", "done")
OUTCOMES = ("loaded", "absent", "mismatched", "failed", "cancelled")
RESULTS = ("local", "fetched", "missed")


def _counter(
    name: str, help_text: str, *sources: Source | str, labels: tuple[str, ...] = ()
) -> Metric:
    return _metric(f"{name}_total", Kind.COUNTER, help_text, sources, labels)


def _gauge(
    name: str, help_text: str, *sources: Source | str, labels: tuple[str, ...] = ()
) -> Metric:
    return _metric(name, Kind.GAUGE, help_text, sources, labels)


def _histogram(
    name: str, help_text: str, *sources: Source | str, labels: tuple[str, ...] = ()
) -> Metric:
    return _metric(name, Kind.HISTOGRAM, help_text, sources, labels)


def _metric(
    name: str, kind: Kind, help_text: str, sources: Sequence[Source | str], labels: tuple[str, ...]
) -> Metric:
    read = tuple(At(source) if isinstance(source, str) else source for source in sources)
    return Metric(f"kvpool_{name}", kind, help_text, read, labels)


def _each(path: str, names: Iterable[str]) -> tuple[At, ...]:
    """Values that lie beside each other, each with its name as its last label."""
    return tuple(At(f"{path}.{name}", (name,)) for name in names)


def _disks(name: str, *, tiers: Sequence[str] = ("ssd", "device", "object")) -> tuple[At, ...]:
    """The same of every place below memory."""
    return tuple(At(f"tiers.{tier}.[path].{name}", (tier,)) for tier in tiers)


_PLACE = ("location", "tier")
_REPLICATION = (("replicated", "replication"), ("forwarded", "offload"))

METRICS: tuple[Metric, ...] = (
    # The node.
    _gauge(
        "build_info",
        "Always 1. The labels name the node, its version and its cluster.",
        _build,
        labels=("node", "version", "cluster"),
    ),
    _gauge("uptime_seconds", "Seconds since the daemon started.", "uptime_s"),
    _gauge("clients", "Connected clients.", "clients"),
    _gauge("connections", "Open connections of clients.", "connections"),
    _counter(
        "connections_refused",
        "Connections refused: too many, a wrong token, or a handshake timeout.",
        "refused_connections",
    ),
    _counter(
        "http_connections_dropped",
        "Connections that the HTTP gateway closed because all places were taken, idle ones first.",
        "http_dropped",
    ),
    _counter(
        "tenant_waits",
        "Waits of connections whose tenant had used its share of the daemon's time, while others needed it.",
        "tenant_waits",
    ),
    _counter(
        "failed_logins",
        "Failed logins: clients at the socket, users of the HTTP gateway (http), and peers.",
        "failed_logins.*",
        labels=("door",),
    ),
    _counter(
        "internal_errors",
        "Requests that met an unexpected error and changed nothing: each ended its connection. A bug: the log has it.",
        "internal_errors.*",
        labels=("request",),
    ),
    _counter("audit_records", "Records that the audit file has, since the start.", "audit.written"),
    _counter(
        "audit_lost_records", "Records that the audit file did not take in time.", "audit.lost"
    ),
    _counter("audit_errors", "Writes to the audit file that failed.", "audit.errors"),
    _counter(
        "clients_died",
        "Clients whose process ended while they held leases or reservations.",
        "counters.dead_holders",
    ),
    _counter(
        "process_cpu_seconds",
        "CPU time of the daemon's processes, in seconds.",
        "processes.[kind].cpu_s",
        labels=("process",),
    ),
    _gauge(
        "process_resident_bytes",
        "Resident memory of the daemon's processes, in bytes, shared segments included.",
        "processes.[kind].resident_bytes",
        labels=("process",),
    ),
    _gauge(
        "process_private_bytes",
        "Private memory of the daemon's processes, in bytes, shared segments excluded.",
        "processes.[kind].private_bytes",
        labels=("process",),
    ),
    _histogram(
        "event_loop_lag_seconds",
        "Delay of a timer in the control process, in seconds, sampled once a second. High values mean overload.",
        "sampled.late_s",
    ),
    _counter(
        "transfer_worker_restarts", "Restarts of transfer workers.", "transfer_workers.[].restarts"
    ),
    _gauge(
        "transfer_worker_orders",
        "Orders in progress in transfer workers.",
        "transfer_workers.[].orders",
    ),
    _gauge(
        "transfer_worker_loans",
        "Loans to peers held by transfer workers.",
        "transfer_workers.[].loans",
    ),
    _gauge(
        "transfer_workers_quarantined",
        "Transfer workers that were killed and have not ended. What they may write to stays reserved.",
        "transfer_workers.[].quarantined",
    ),
    # What clients put and read.
    _counter(
        "put_parts",
        "New parts of blocks that clients committed.",
        "tenants.*.traffic.put_parts",
        labels=("tenant",),
    ),
    _counter(
        "put_bytes",
        "Bytes of new parts that clients committed.",
        "tenants.*.traffic.put_bytes",
        labels=("tenant",),
    ),
    _counter(
        "put_duplicate_parts",
        "Parts of blocks that clients put although they were present.",
        "counters.duplicates",
    ),
    _counter(
        "puts_refused",
        "Puts refused for lack of slots: leases, reservations and hard pins hold them all.",
        "counters.refused_full",
    ),
    _counter(
        "reads",
        "Reads of prefixes (`acquire`).",
        "tenants.*.traffic.reads.requests",
        labels=("tenant",),
    ),
    _counter(
        "read_blocks",
        "Blocks that reads requested: leased immediately (`local`), fetched from other tiers or nodes (`fetched`), "
        "or not available (`missed`). The hit rate is the share that was not missed.",
        *_each("tenants.*.traffic.reads", RESULTS),
        labels=("tenant", "result"),
    ),
    _counter(
        "pull_blocks",
        "Blocks that clients requested before their read (`pull`), by result as in `kvpool_read_blocks_total`.",
        *_each("tenants.*.traffic.pulls", RESULTS),
        labels=("tenant", "result"),
    ),
    _counter(
        "match_blocks",
        "Blocks that clients asked for with `match`: present in this node's memory (`local`) or not (`missed`).",
        *_each("tenants.*.traffic.matches", ("local", "missed")),
        labels=("tenant", "result"),
    ),
    _counter(
        "read_bytes",
        "Bytes leased to clients, by tier: memory or spare device memory.",
        At("tenants.*.traffic.read_bytes", ("dram",)),
        At("tenants.*.traffic.device_read_bytes", ("device",)),
        labels=("tenant", "tier"),
    ),
    # Tenants' accounts.
    _counter(
        "account_read_tokens",
        "Tokens whose blocks clients read, by the tier that these came from; leases that nobody read are not in it.",
        "tenants.*.traffic.account.reads.*.tokens",
        labels=("tenant", "tier"),
    ),
    _counter(
        "account_read_bytes",
        "Bytes of the blocks that clients read, by the tier that these came from.",
        "tenants.*.traffic.account.reads.*.nbytes",
        labels=("tenant", "tier"),
    ),
    _counter(
        "account_written_tokens",
        "Tokens of the new blocks that clients committed.",
        "tenants.*.traffic.account.written.tokens",
        labels=("tenant",),
    ),
    _counter(
        "account_refused_parts",
        "Parts of blocks that clients were to put and that were not taken, by reason.",
        "tenants.*.traffic.account.refused.*.parts",
        labels=("tenant", "reason"),
    ),
    _counter(
        "account_kept_byte_seconds",
        "Bytes that blocks have taken, times the seconds for which they did, by tier.",
        "tenants.*.traffic.account.kept_byte_s.*",
        labels=("tenant", "tier"),
    ),
    _counter(
        "load_parts",
        "Parts of blocks requested from a lower tier or a peer, by outcome. `loaded` arrived whole, `absent` was a "
        "wrong hint, `mismatched` had a wrong checksum, `cancelled` was not needed any more.",
        *_each("tenants.*.traffic.loads.*", OUTCOMES),
        labels=("tenant", "tier", "outcome"),
    ),
    _counter(
        "load_bytes",
        "Bytes loaded into memory, by source tier.",
        "tenants.*.traffic.loads.*.nbytes",
        labels=("tenant", "tier"),
    ),
    _histogram(
        "load_seconds",
        "Duration of transfers into memory that loaded at least one part, in seconds, by source tier.",
        "fetch.delivered.seconds.*",
        labels=("tier",),
    ),
    _histogram(
        "fetch_wait_seconds",
        "Time that reads and pulls waited for other tiers and nodes, in seconds.",
        "fetch.delivered.waits",
    ),
    _gauge("leases", "Open leases.", "leases"),
    _counter(
        "leases_granted",
        "Leases granted, loans to peers and to transfer workers included.",
        "counters.acquired",
    ),
    _counter(
        "leases_expired", "Leases that expired before their release.", "counters.leases_expired"
    ),
    # Load or recompute.
    _histogram(
        "load_estimate_ratio",
        "Actual duration of a transfer divided by its estimate. Below 1 the estimate was too high.",
        "fetch.delivered.ratios.*",
        labels=("tier",),
    ),
    _counter(
        "load_estimated_seconds",
        "Sum of the estimated durations of transfers, in seconds.",
        "fetch.delivered.expected_s.*",
        labels=("tier",),
    ),
    _counter(
        "load_actual_seconds",
        "Sum of the actual durations of the same transfers, in seconds.",
        "fetch.delivered.seen_s.*",
        labels=("tier",),
    ),
    _counter(
        "declined_parts",
        "Parts of blocks left to the engine because computing them is faster than loading them.",
        "fetch.declined",
    ),
    _counter(
        "trials",
        "Small transfers that measured a source although loading was declined.",
        "fetch.trials",
    ),
    # Tiers.
    _gauge(
        "tier_capacity_bytes",
        "Capacity of a tier in bytes. The location is a directory, a device or an object store URL, and empty for memory.",
        partial(_dram, lambda tenant: tenant.segment_bytes),
        *_disks("segment_bytes", tiers=("ssd", "device")),
        *_disks("size_bytes", tiers=("object",)),
        labels=_PLACE,
    ),
    _gauge(
        "tier_used_bytes",
        "Bytes of slots in use in a tier.",
        partial(_dram, lambda tenant: tenant.space.bytes_used),
        *_disks("used_bytes"),
        labels=_PLACE,
    ),
    _gauge(
        "tier_parts",
        "Parts of blocks in a tier.",
        partial(_dram, lambda tenant: tenant.blocks),
        *_disks("blocks"),
        labels=_PLACE,
    ),
    _gauge(
        "tier_state",
        "1 for the current state of an SSD, a device or an object store, 0 for the other states.",
        *(
            At(f"tiers.{tier}.[path].state", (tier,), states)
            for tier, states in (
                ("ssd", DISK_STATES),
                ("device", DISK_STATES),
                ("object", STORE_STATES),
            )
        ),
        labels=("location", "state", "tier"),
    ),
    _counter(
        "tier_written_parts",
        "Parts of blocks written to a tier.",
        *_disks("written_blocks"),
        labels=_PLACE,
    ),
    _counter(
        "tier_written_bytes", "Bytes written to a tier.", *_disks("written_bytes"), labels=_PLACE
    ),
    _counter(
        "tier_read_parts",
        "Parts of blocks read from a tier.",
        *_disks("read_blocks"),
        labels=_PLACE,
    ),
    _counter("tier_read_bytes", "Bytes read from a tier.", *_disks("read_bytes"), labels=_PLACE),
    _counter(
        "tier_errors",
        "Failed reads and writes of a tier.",
        *(
            At(f"tiers.{tier}.[path].{operation}_errors", (tier, operation))
            for tier in ("ssd", "device", "object")
            for operation in ("read", "write")
        ),
        labels=("location", "tier", "operation"),
    ),
    _counter(
        "tier_quarantined",
        "How often the process of an SSD was killed and did not end, because the disk hangs.",
        *_disks("hangs", tiers=("ssd",)),
        labels=_PLACE,
    ),
    _counter(
        "checksum_mismatches",
        "Parts of blocks dropped because of a wrong checksum. Tier `dram` includes parts received from peers.",
        At("counters.checksum_mismatches", ("", "dram")),
        *_disks("mismatches"),
        labels=_PLACE,
    ),
    _counter(
        "scrubbed_parts",
        "Parts of blocks read from an SSD only to verify their checksum.",
        *_disks("scrubbed_blocks", tiers=("ssd",)),
        labels=_PLACE,
    ),
    _counter(
        "dropped_parts",
        "Parts of blocks dropped from a tier, by reason: no room (`full`), over quota (`quota`), unused for too long "
        "(`ttl`), removed by an operator (`operator`) or a client (`removed`), damaged (`corrupt`), or of an older epoch "
        "(`epoch`).",
        At("gone.*", ("", "dram")),
        _gone_below,
        labels=("reason", "location", "tier"),
    ),
    _counter(
        "evicted_secondary_parts",
        "Parts of blocks evicted from memory that other nodes hold too.",
        "counters.evicted_secondary",
    ),
    _counter(
        "evicted_expendable_parts",
        "Parts of blocks evicted from memory before others, because their session had left them or will pause for long.",
        "counters.evicted_expendable",
    ),
    _counter(
        "expended_parts",
        "Parts of blocks that became expendable: evicted before others unless they are read again.",
        "counters.expended",
    ),
    _counter(
        "sessions_forgotten",
        "Sessions forgotten because there were too many, the longest inactive first.",
        "counters.sessions_forgotten",
    ),
    _counter(
        "session_news_lost",
        "Hints on sessions that were not passed on to their node: too many at a time, or it did not answer.",
        "counters.session_news_lost",
    ),
    _counter(
        "prefetched_parts",
        "Parts of blocks brought into memory before they were wanted: for sessions that were expected back, or by intents.",
        "counters.prefetched",
    ),
    _counter("prefetched_bytes", "Bytes of these parts.", "counters.prefetched_bytes"),
    _counter(
        "prefetch_outcomes",
        "Prefetched parts, by what became of them: read when they were wanted (`used`), or not (`wasted`).",
        At("counters.prefetches_used", ("used",)),
        At("counters.prefetches_wasted", ("wasted",)),
        labels=("outcome",),
    ),
    _counter(
        "intents",
        "Intents for blocks of a prompt or a session, by the answer: `accepted`, `clipped`, `deferred`, `refused`, `missing`.",
        At("counters.intents.*"),
        labels=("outcome",),
    ),
    _counter(
        "evicted_soft_pinned_parts",
        "Soft-pinned parts of blocks evicted from memory.",
        "counters.evicted_soft_pins",
    ),
    _counter(
        "slabs_reclaimed",
        "Memory slabs reassigned to slots of another size.",
        "counters.slabs_reclaimed",
    ),
    _histogram(
        "evicted_idle_age_seconds",
        "Idle age of evicted blocks, in seconds. One block is sampled from each batch.",
        "sampled.evicted_age_s.*",
        labels=("tier",),
    ),
    _gauge(
        "write_queue_parts",
        "Parts of blocks that wait to be written to SSDs.",
        "tiers.queued_writes",
    ),
    _gauge(
        "device_write_queue_parts",
        "Parts of blocks that wait to be written to spare device memory.",
        *_disks("queued_blocks", tiers=("device",)),
        labels=_PLACE,
    ),
    _gauge(
        "writing_bytes",
        "Bytes being written to an SSD.",
        *_disks("writing_bytes", tiers=("ssd",)),
        labels=_PLACE,
    ),
    _counter(
        "writes_dropped",
        "Parts of blocks not written to an SSD, by reason: the queue was full (`queue`), the daily budget was used up "
        "(`budget`), or the budget was short and the part was never read (`unread`).",
        At("tiers.dropped_writes", ("queue",)),
        At("tiers.over_budget_blocks", ("budget",)),
        At("tiers.once_used_blocks", ("unread",)),
        labels=("reason",),
    ),
    _gauge(
        "clean_share_ratio",
        "Share of a tenant's memory that is free or already on SSD, as a fraction of the target. At 0 evictions lose "
        "blocks.",
        "tiers.clean_share.*",
        labels=("tenant",),
    ),
    _gauge(
        "write_budget_bytes_per_day",
        "Bytes that may be written to all SSDs per day (setting `ssd_bytes_per_day`). 0: no limit.",
        "tiers.budget_bytes_per_day",
    ),
    _gauge(
        "write_budget_left_bytes",
        "Bytes that may be written to SSDs now. The budget refills evenly, up to one hour's share.",
        "tiers.budget_left_bytes",
    ),
    # Tenants and namespaces.
    _gauge(
        "tenant_capacity_bytes",
        "Memory of a tenant, in bytes.",
        "tenants.*.segment_bytes",
        labels=("tenant",),
    ),
    _gauge(
        "tenant_used_bytes",
        "Bytes of slots in use in a tenant's memory.",
        "tenants.*.space.bytes_used",
        labels=("tenant",),
    ),
    _gauge(
        "tenant_pinned_bytes",
        "Bytes of a tenant's memory held by pins, by kind.",
        At("tenants.*.hard_pinned_bytes", ("hard",)),
        At("tenants.*.soft_pinned_bytes", ("soft",)),
        labels=("tenant", "kind"),
    ),
    _gauge(
        "tenant_secondary_bytes",
        "Bytes of secondary replicas in a tenant's memory: other nodes hold these blocks too.",
        "tenants.*.secondary_bytes",
        labels=("tenant",),
    ),
    _gauge("namespaces", "Known namespaces.", _namespace_count, labels=("tenant",)),
    _gauge(
        "namespace_held_bytes",
        f"Bytes of slots that a namespace holds. Only the {NAMESPACES_MAX} largest are shown individually.",
        _space_in("dram"),
        _space_in("ssd"),
        labels=("tenant", "namespace", "model", "tier"),
    ),
    _gauge(
        "namespace_quota_bytes",
        "Memory quota of a namespace, in bytes. 0: limited only by its tenant.",
        partial(_space, "quota"),
        labels=("tenant", "namespace", "model"),
    ),
    _gauge(
        "namespace_blocks",
        "Blocks of a namespace in memory.",
        partial(_space, "blocks"),
        labels=("tenant", "namespace", "model"),
    ),
    _gauge(
        "namespace_epoch",
        "Current epoch of a namespace. A reset or clear starts a new one.",
        partial(_space, "epoch"),
        labels=("tenant", "namespace", "model"),
    ),
    _counter(
        "missed_reads",
        "Reads that ended before all blocks that they asked for, by why the first missing one was not there "
        "([reasons](operations.md#why-was-it-a-miss)). The questions of an engine about one prompt count once, ten "
        "seconds later.",
        _misses("requests"),
        labels=("tenant", "namespace", "model", "reason"),
    ),
    _counter(
        "missed_blocks",
        "The blocks that these reads did not get.",
        _misses("blocks"),
        labels=("tenant", "namespace", "model", "reason"),
    ),
    # Peers.
    _counter(
        "peer_pull_parts",
        "Parts of blocks requested from a peer, by outcome as in `kvpool_load_parts_total`.",
        *(_delivered(outcome) for outcome in OUTCOMES),
        labels=("peer", "outcome"),
    ),
    _counter("peer_pull_bytes", "Bytes received from a peer.", _delivered_bytes, labels=("peer",)),
    _histogram(
        "peer_pull_seconds",
        "Duration of pulls from a peer, in seconds, by transport.",
        _pull_seconds,
        labels=("peer", "transport"),
    ),
    _counter(
        "path_pulls",
        "Pulls over a path to a peer: a transport and the address of a network card.",
        partial(_ways, "pulls"),
        labels=("peer", "transport", "path"),
    ),
    _counter(
        "path_bytes",
        "Bytes received over a path.",
        partial(_ways, "bytes"),
        labels=("peer", "transport", "path"),
    ),
    _gauge(
        "path_suspended",
        "1 while a path is not used because it has failed.",
        _resting,
        labels=("peer", "transport", "path"),
    ),
    _counter(
        "path_failovers",
        "Transfers that continued over another network card.",
        "paths.changed_card",
    ),
    _counter(
        "nixl_failovers",
        "Transfers that continued over TCP after RDMA failed.",
        "nixl.failed_over",
    ),
    _gauge(
        "source_latency_seconds",
        "Estimated time to the first byte from the source, in seconds. A source is a peer or a tier of this node.",
        partial(_peers, "latency_ms", 1e-3),
        labels=("source",),
    ),
    _gauge(
        "source_bytes_per_second",
        "Estimated throughput of the source, in bytes per second.",
        partial(_peers, "bytes_s", 1),
        labels=("source",),
    ),
    _gauge(
        "source_inflight_bytes",
        "Bytes requested from the source and not received yet.",
        partial(_peers, "inflight_bytes", 1),
        labels=("source",),
    ),
    _gauge(
        "source_suspended",
        "1 while the source is not used because it has failed.",
        _suspended,
        labels=("source",),
    ),
    _gauge(
        "source_waiting_transfers",
        "Transfers that wait for their turn at the source.",
        partial(_peers, "waiting", 1),
        labels=("source",),
    ),
    _gauge("transfers", "Transfers in progress from other tiers and nodes.", "fetch.transfers"),
    _counter(
        "transfers_withdrawn",
        "Transfers that ended before their turn at their source: another source was asked, or nobody waited any more.",
        "fetch.not_begun",
    ),
    _counter(
        "transfers_refused",
        "Transfers that found no slots for some of their blocks: memory was full of what cannot be evicted.",
        "fetch.no_room",
    ),
    _counter("transfers_failed", "Failed transfers.", "fetch.failed_transfers"),
    _counter(
        "hedged_parts",
        "Parts of blocks requested from a second source because the first was slow.",
        "fetch.hedges",
    ),
    _counter(
        "coalesced_parts",
        "Parts of blocks requested again while their transfer was in progress.",
        "fetch.joined",
    ),
    _counter("lookups", "Lookups of a prefix in the directory.", "fetch.lookups"),
    _counter(
        "lookups_failed",
        "Lookups in the directory or the catalog that failed or timed out.",
        "fetch.lookups_failed",
    ),
    _counter(
        "lookups_remembered",
        "Failed lookups answered from remembered locations.",
        "fetch.lookups_remembered",
    ),
    _counter(
        "stale_parts",
        "Parts of blocks that a source did not hold although the directory listed them.",
        "fetch.absent",
    ),
    _gauge(
        "negative_parts",
        "Parts of blocks remembered as absent. Entries expire after two seconds.",
        "fetch.negative",
    ),
    _counter("loaned_parts", "Parts of blocks sent to peers under a loan.", "counters.lent_blocks"),
    _counter("loaned_bytes", "Bytes sent to peers under a loan.", "counters.lent_bytes"),
    # Replication, prefix streams, engines.
    _gauge(
        "replication_backlog_blocks",
        "Blocks with fewer replicas than wanted.",
        "replication.wanted",
    ),
    _gauge(
        "replication_repairing",
        "1 while a repair scans all blocks for missing replicas.",
        "replication.repairing",
    ),
    _counter(
        "replication_offered_blocks",
        "Blocks offered to other nodes, accepted or not.",
        "replication.offered_blocks",
    ),
    _counter(
        "replication_accepted_blocks",
        "Blocks that other nodes accepted: wanted replicas (`replication`) or blocks about to be evicted here "
        "(`offload`).",
        *(At(f"replication.{name}_blocks", (reason,)) for name, reason in _REPLICATION),
        labels=("reason",),
    ),
    _counter(
        "replication_accepted_bytes",
        "Bytes of blocks that other nodes accepted.",
        "replication.accepted_bytes",
    ),
    _counter(
        "replication_received_blocks",
        "Blocks accepted from other nodes.",
        "replication.taken_blocks",
    ),
    _counter(
        "replication_dropped",
        "Wanted replicas given up because the backlog was full.",
        "replication.dropped_wishes",
    ),
    _gauge("prefix_streams", "Prefix streams in progress.", "prefix_streams.under_way"),
    _counter("prefix_streams_ended", "Prefix streams that ended.", "prefix_streams.ended"),
    _counter(
        "prefix_streams_complete",
        "Prefix streams that ended with all their blocks.",
        "prefix_streams.whole",
    ),
    _counter(
        "prefix_stream_parts",
        "Parts of blocks fetched by prefix streams.",
        "prefix_streams.blocks",
    ),
    _gauge(
        "prefix_stream_lag_seconds",
        "Moving average of the time from the notice of a commit to the arrival of its blocks, in seconds.",
        "prefix_streams.lag_s",
    ),
    _gauge(
        "engines",
        "Engines whose KV events the daemon subscribes to, by connection state.",
        _engine_count,
        labels=("tenant", "state"),
    ),
    _gauge(
        "published_blocks",
        "Blocks that readers of a stream of KV events know of.",
        partial(_event_streams, "blocks"),
        labels=("stream",),
    ),
    _counter(
        "published_batches",
        "Batches of a stream of KV events.",
        partial(_event_streams, "batches"),
        labels=("stream",),
    ),
    _counter(
        "published_replays",
        "Replays of a stream of KV events, as its readers have asked for.",
        partial(_event_streams, "replays"),
        labels=("stream",),
    ),
    # The cluster.
    _gauge(
        "membership_standing",
        "1 for this node's current standing in the cluster, 0 for the others.",
        At("cluster.standing", states=STANDINGS),
        labels=("standing",),
    ),
    _gauge("membership_connected", "1 while etcd confirms this node's membership.", _connected),
    _counter("membership_leases_lost", "Membership leases lost.", "cluster.leases_lost"),
    _counter(
        "membership_namespaces_deleted",
        "Namespaces that this node deleted from the cluster because nobody had used them for long.",
        "cluster.namespaces_deleted",
    ),
    _counter(
        "membership_failures",
        "Requests that etcd did not answer, or refused. kvpool doctor shows the reason.",
        "cluster.membership_failures",
    ),
    _counter(
        "membership_records_dropped",
        "Records read from etcd that are left out because they cannot be read.",
        "cluster.undecodable_records",
    ),
    _counter(
        "directory_sweep_failures",
        "Steps of a sweep that the directory did not answer, or refused.",
        "cluster.sweep_failures",
    ),
    _gauge(
        "node_state",
        "1 for the current state of this node, 0 for the others.",
        At("cluster.state", states=NODE_STATES),
        labels=("state",),
    ),
    _gauge("cluster_peers", "Other nodes that this node may fetch from.", "cluster.others"),
    _gauge(
        "directory_connected",
        "1 while the directory (Redis) answers. Absent without a directory.",
        "cluster.directory.connected",
    ),
    _gauge(
        "announcer_queue_blocks",
        "Changes not yet published to the directory.",
        "cluster.directory.queued",
    ),
    _gauge(
        "announcer_lag_seconds",
        "Age of the oldest unpublished change, in seconds.",
        "cluster.directory.lag_s",
    ),
    _counter(
        "announcer_changes",
        "Changes published to the directory, by kind.",
        *_each("cluster.directory", ("published", "withdrawn", "retracted")),
        labels=("kind",),
    ),
    _counter("announcer_failures", "Failed publications.", "cluster.directory.failures"),
    _counter(
        "announcer_overflows",
        "How often the changes of a group of blocks found no room in the queue. The group is scanned when there is.",
        "cluster.directory.overflows",
    ),
    _gauge(
        "drain_phase",
        "1 for the current phase of a drain, 0 for the others. Absent without a drain.",
        At("cluster.drain.phase", states=DRAIN_PHASES),
        labels=("phase",),
    ),
    _gauge(
        "drain_blocks",
        "Blocks of a drain: in all (`total`), examined (`seen`), copied to other nodes (`copied`), accepted by no node "
        "(`failed`), only on SSD when the time was up (`left`).",
        At("cluster.drain.blocks_total", ("total",)),
        At("cluster.drain.blocks", ("seen",)),
        *_each("cluster.drain", ("copied", "failed", "left")),
        labels=("progress",),
    ),
    _gauge(
        "drain_copied_bytes",
        "Bytes that a drain copied to other nodes.",
        "cluster.drain.copied_bytes",
    ),
)

# ---- the text --------------------------------------------------------------------------------------------


def render(
    stats: NodeStats, *, namespaces_max: int = NAMESPACES_MAX, peers_max: int = PEERS_MAX
) -> bytes:
    """All metrics in Prometheus' text format 0.0.4. stats: what `Inspect` answers, decoded."""
    view = View(stats, namespaces_max, peers_max)
    lines: list[str] = []
    for metric in METRICS:
        if samples := metric.samples(view):
            _head(metric, lines)
            _body(metric, samples, lines)
    return "".join(lines).encode()


def _head(metric: Metric, lines: list[str]) -> None:
    text = metric.help_text.replace("\\", r"\\").replace("\n", r"\n")
    lines.append(f"# HELP {metric.name} {text}\n# TYPE {metric.name} {metric.kind}\n")


def _body(metric: Metric, samples: Mapping[tuple[str, ...], Any], lines: list[str]) -> None:
    name = metric.name
    for values, value in samples.items():
        labels = ",".join(
            f'{label}="{_escaped(one)}"' for label, one in zip(metric.labels, values, strict=True)
        )
        if metric.kind is not Kind.HISTOGRAM:
            lines.append(
                f"{name}{{{labels}}} {_number(value)}\n" if labels else f"{name} {_number(value)}\n"
            )
            continue
        before = f"{labels}," if labels else ""
        at_end = f"{{{labels}}}" if labels else ""
        ends = [_number(bound) for bound in value.bounds] + ["+Inf"]
        counts = list(accumulate(value.counts))
        lines += [
            f'{name}_bucket{{{before}le="{end}"}} {count}\n'
            for end, count in zip(ends, counts, strict=True)
        ]
        lines.append(
            f"{name}_sum{at_end} {_number(value.total)}\n{name}_count{at_end} {counts[-1]}\n"
        )


@lru_cache(maxsize=4096)
def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return str(int(value)) if isinstance(value, int) else repr(float(value))


# ---- the document ----------------------------------------------------------------------------------------


def rows() -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """Name, type, labels and sentence of every metric, as `docs/metrics.md` has them."""
    for metric in METRICS:
        yield metric.name, metric.kind.value, metric.labels, metric.help_text

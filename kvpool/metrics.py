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

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
NAMESPACES_MAX = 200  # the largest are shown by themselves, the others of a tenant as one
PEERS_MAX = 256  # those that were asked most are shown by themselves, the others as one
OTHERS = "others"
MODEL_CHARACTERS_MAX = 128

Stats = Mapping[str, Any]
Sample = tuple[tuple[str, ...], Any]
"""Values of the labels, and a number; of a histogram what `Histogram.stats` gives."""


class Kind(StrEnum):
    """What Prometheus calls the type."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Missing(KeyError):
    """A path leads nowhere: the stats are another version's."""


@dataclass(frozen=True, slots=True)
class At:
    """Reads all values at a path: names, with dots between them.

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
    what: str
    sources: tuple[Source, ...]
    labels: tuple[str, ...] = ()

    def samples(self, view: View) -> dict[tuple[str, ...], Any]:
        """Raises `Missing`."""
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

    def __init__(self, stats: Stats, namespaces_max: int, peers_max: int) -> None:
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
            for one in _at(self.stats, "remote", "peers"):
                asked[one["node"]] = asked.get(one["node"], 0) + one["asked"]
            most = sorted(asked, key=lambda node: -asked[node])[: self._peers_max]
            self._peers = {node: node or "gone" for node in most}
        return self._peers.get(name, OTHERS)


def _at(value: Any, *steps: str) -> Any:
    for step in steps:
        try:
            value = value[step]
        except KeyError:
            raise Missing(".".join(steps)) from None
    return value


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
                label = (str(_at(each, step[1:-1])),) if step != "[]" else ()
                yield from _walk(each, steps[at + 1 :], (*found, *label))
            return
        value = _at(value, step)
    if value is not None:
        yield found, value


def _merged(one: Stats, other: Stats) -> Stats:
    if one["bounds"] != other["bounds"]:
        raise ValueError("histograms of one metric have other bounds")
    counts = [a + b for a, b in zip(one["counts"], other["counts"], strict=True)]
    return {"bounds": one["bounds"], "counts": counts, "sum": one["sum"] + other["sum"]}


# ---- what is not simply there ----------------------------------------------------------------------------


def _build(view: View) -> Iterator[Sample]:
    stats = view.stats
    yield (_at(stats, "node"), _at(stats, "version"), _at(stats, "cluster", "cluster")), 1


def _dram(name: str, view: View) -> Iterator[Sample]:
    """Of all tenants' segments together."""
    tenants = _at(view.stats, "tenants").values()
    yield ("", "dram"), sum(_at(one, *name.split(".")) for one in tenants)


def _gone_below(view: View) -> Iterator[Sample]:
    for tier in ("ssd", "device"):
        for place in _at(view.stats, "tiers", tier):
            for reason, count in _at(place, "gone").items():
                yield (reason, place["path"], tier), count


def _spaces(stats: Stats, most: int) -> list[tuple[tuple[str, str, str], Mapping[str, Any]]]:
    found: list[tuple[int, str, str, Mapping[str, Any], int]] = []
    usage = _at(stats, "usage")
    for tenant, books in _at(stats, "tenants").items():
        disks = [disk["namespaces"] for disk in _at(usage, tenant, "ssd")]
        for digest, space in _at(books, "namespaces").items():
            on_disks = sum([disk[digest]["held_bytes"] for disk in disks if digest in disk])
            found.append((space["held_bytes"] + on_disks, tenant, digest, space, on_disks))
    found.sort(key=lambda one: -one[0])
    shown: list[tuple[tuple[str, str, str], Mapping[str, Any]]] = []
    for _, tenant, digest, space, on_disks in found[:most]:
        model = str(space["fields"].get("model", ""))[:MODEL_CHARACTERS_MAX]
        entry = {
            "dram": space["held_bytes"],
            "ssd": on_disks,
            "quota": space["quota_bytes"],
            "blocks": max(space["blocks"], default=0),
            "epoch": space["epoch"],
        }
        shown.append(((tenant, digest, model), entry))
    rest: dict[str, dict[str, int]] = {}
    for _, tenant, _, space, on_disks in found[most:]:
        total = rest.setdefault(tenant, {"dram": 0, "ssd": 0, "blocks": 0})
        total["dram"] += space["held_bytes"]
        total["ssd"] += on_disks
        total["blocks"] += max(space["blocks"], default=0)
    return shown + [((tenant, OTHERS, ""), total) for tenant, total in rest.items()]


def _space(name: str, view: View, *labels: str) -> Iterator[Sample]:
    for space, entry in view.spaces():
        if name in entry:
            yield (*space, *labels), entry[name]


def _space_in(tier: str) -> Source:
    return lambda view: _space(tier, view, tier)


def _peers(name: str, times: float, view: View) -> Iterator[Sample]:
    """Gauges of other nodes, and of other tiers here, of which no two have the same name but for those gone."""
    for one in _at(view.stats, "remote", "peers"):
        shown = view.peer(one["node"])
        if one["node"] and shown != OTHERS:
            yield (shown,), _at(one, name) * times


def _suspended(view: View) -> Iterator[Sample]:
    for labels, seconds in _peers("suspended_s", 1.0, view):
        yield labels, seconds > 0


def _delivered(outcome: str) -> Source:
    def read(view: View) -> Iterator[Sample]:
        for name, loads in _at(view.stats, "remote", "delivered", "peers").items():
            shown = name if name == "gone" else view.peer(name)
            yield (shown, outcome), _at(loads, outcome)

    return read


def _delivered_bytes(view: View) -> Iterator[Sample]:
    for (name, _), nbytes in _delivered("nbytes")(view):
        yield (name,), nbytes


def _named_paths(view: View) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The ways to each peer, by its name."""
    names = {one["url"]: one["node"] for one in _at(view.stats, "remote", "peers") if one["url"]}
    for url, ways in _at(view.stats, "paths", "peers").items():
        yield view.peer(names.get(url, "")), ways


def _pull_seconds(view: View) -> Iterator[Sample]:
    for peer, ways in _named_paths(view):
        for transport, seconds in _at(ways, "seconds").items():
            yield (peer, transport), seconds


def _ways(name: str, view: View) -> Iterator[Sample]:
    for peer, ways in _named_paths(view):
        for way in ways["ways"]:
            url = OTHERS if peer == OTHERS else way["url"]
            yield (peer, _at(way, "transport"), url), _at(way, name)


def _resting(view: View) -> Iterator[Sample]:
    for labels, seconds in _ways("rests_s", view):
        yield labels, seconds > 0


def _engine_count(view: View) -> Iterator[Sample]:
    for tenant, engines in _at(view.stats, "engines").items():
        connected = sum(bool(engine["connected"]) for engine in engines["followed"])
        yield (tenant, "connected"), connected
        yield (tenant, "not_connected"), len(engines["followed"]) - connected


def _namespace_count(view: View) -> Iterator[Sample]:
    for tenant, books in _at(view.stats, "tenants").items():
        yield (tenant,), len(_at(books, "namespaces"))


def _connected(view: View) -> Iterator[Sample]:
    """Whether the membership answers: a node that is alone has one that always does."""
    standing = _at(view.stats, "cluster", "standing")
    yield (), standing == "member"


# ---- the table -------------------------------------------------------------------------------------------

STANDINGS = ("member", "away", "unsure", "lost", "out")
NODE_STATES = ("joining", "serving", "draining", "gone")
DISK_STATES = ("opening", "serving", "read-only", "failed")
STORE_STATES = ("opening", "serving", "failing", "failed")
DRAIN_PHASES = ("copying", "waiting", "done")
OUTCOMES = ("came", "absent", "mismatched", "failed", "called_off")
RESULTS = ("here", "brought", "missed")


def _counter(name: str, what: str, *sources: Source | str, labels: tuple[str, ...] = ()) -> Metric:
    return _metric(f"{name}_total", Kind.COUNTER, what, sources, labels)


def _gauge(name: str, what: str, *sources: Source | str, labels: tuple[str, ...] = ()) -> Metric:
    return _metric(name, Kind.GAUGE, what, sources, labels)


def _histogram(
    name: str, what: str, *sources: Source | str, labels: tuple[str, ...] = ()
) -> Metric:
    return _metric(name, Kind.HISTOGRAM, what, sources, labels)


def _metric(
    name: str, kind: Kind, what: str, sources: Sequence[Source | str], labels: tuple[str, ...]
) -> Metric:
    read = tuple(At(source) if isinstance(source, str) else source for source in sources)
    return Metric(f"kvpool_{name}", kind, what, read, labels)


def _each(path: str, names: Iterable[str]) -> tuple[At, ...]:
    """Values that lie beside each other, each with its name as its last label."""
    return tuple(At(f"{path}.{name}", (name,)) for name in names)


def _disks(name: str, *, tiers: Sequence[str] = ("ssd", "device", "remote")) -> tuple[At, ...]:
    """The same of every place below memory."""
    return tuple(At(f"tiers.{tier}.[path].{name}", (tier,)) for tier in tiers)


_PLACE = ("where", "tier")

METRICS: tuple[Metric, ...] = (
    # The node.
    _gauge(
        "build_info", "1; its labels say what runs.", _build, labels=("node", "version", "cluster")
    ),
    _gauge("uptime_seconds", "Since the daemon started.", "uptime_s"),
    _gauge("clients", "Clients that are known.", "clients"),
    _gauge("connections", "Open connections of clients.", "connections"),
    _counter(
        "connections_refused",
        "Connections that were not taken: too many, a wrong token, or no answer.",
        "refused_connections",
    ),
    _counter(
        "clients_died",
        "Clients whose process ended while they held something.",
        "counters.dead_holders",
    ),
    _counter(
        "process_cpu_seconds",
        "CPU time of the daemon's processes, by what they do.",
        "processes.[kind].cpu_s",
        labels=("process",),
    ),
    _gauge(
        "process_resident_bytes",
        "Memory of the daemon's processes, with the segments that they share.",
        "processes.[kind].resident_bytes",
        labels=("process",),
    ),
    _gauge(
        "process_private_bytes",
        "The same without what is shared.",
        "processes.[kind].private_bytes",
        labels=("process",),
    ),
    _histogram(
        "late_seconds",
        "How late the control process came to what was due, once a second: long when it is overloaded.",
        "sampled.late_s",
    ),
    _counter(
        "mover_restarts",
        "Mover processes, which carry blocks between nodes, that had to be started again.",
        "movers.[].restarts",
    ),
    _gauge("mover_orders", "Orders that movers work on.", "movers.[].orders"),
    _gauge("mover_loans", "Loans to peers that movers hold.", "movers.[].loans"),
    # What clients put and read.
    _counter(
        "put_parts",
        "Parts of blocks that clients have put and that were new.",
        "tenants.*.traffic.put_parts",
        labels=("tenant",),
    ),
    _counter("put_bytes", "Bytes of these.", "tenants.*.traffic.put_bytes", labels=("tenant",)),
    _counter(
        "put_duplicate_parts",
        "Parts of blocks that were put and were there already.",
        "counters.duplicates",
    ),
    _counter(
        "puts_refused",
        "Puts that got no slot: leases, reservations and hard pins held them all.",
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
        "Blocks that reads asked for: leased at once (`here`), after a wait for other tiers and nodes "
        "(`brought`), or not at all (`missed`). The hit rate is what was not missed.",
        *_each("tenants.*.traffic.reads", RESULTS),
        labels=("tenant", "result"),
    ),
    _counter(
        "pull_blocks",
        "The same of blocks that engines asked to have brought ahead of their read (`pull`).",
        *_each("tenants.*.traffic.pulls", RESULTS),
        labels=("tenant", "result"),
    ),
    _counter(
        "match_blocks",
        "Blocks that clients asked after (`match`): whether this node's memory was said to have them.",
        At("tenants.*.traffic.matches.here", ("here",)),
        At("tenants.*.traffic.matches.missed", ("missed",)),
        labels=("tenant", "result"),
    ),
    _counter(
        "read_bytes",
        "Bytes leased to clients, in memory or in spare device memory.",
        At("tenants.*.traffic.read_bytes", ("dram",)),
        At("tenants.*.traffic.device_read_bytes", ("device",)),
        labels=("tenant", "tier"),
    ),
    _counter(
        "load_parts",
        "Parts of blocks that a tier below memory or a peer was said to have, and was asked for, by what became of "
        "it: all outcomes together are claimed, `came` is served, `absent` a hint that was wrong.",
        *_each("tenants.*.traffic.loads.*", OUTCOMES),
        labels=("tenant", "tier", "outcome"),
    ),
    _counter(
        "load_bytes",
        "Bytes that were brought into memory, by the tier they came from.",
        "tenants.*.traffic.loads.*.nbytes",
        labels=("tenant", "tier"),
    ),
    _histogram(
        "load_seconds",
        "How long a transfer into memory took that brought something, by the tier it came from.",
        "remote.delivered.seconds.*",
        labels=("tier",),
    ),
    _histogram(
        "wait_seconds",
        "How long reads and pulls waited for other tiers and nodes.",
        "remote.delivered.waits",
    ),
    _gauge("leases", "Leases that live.", "leases"),
    _counter(
        "leases_granted", "Leases so far, loans to peers and movers included.", "counters.acquired"
    ),
    _counter("leases_expired", "Leases that were not released in time.", "counters.leases_expired"),
    # Load or recompute.
    _histogram(
        "load_estimate_ratio",
        "Seconds that a transfer took, as a multiple of what was expected: 1 is right, less was too cautious.",
        "remote.delivered.ratios.*",
        labels=("tier",),
    ),
    _counter(
        "load_expected_seconds",
        "Sum of what these transfers were expected to take.",
        "remote.delivered.expected_s.*",
        labels=("tier",),
    ),
    _counter(
        "load_seen_seconds",
        "Sum of what they took.",
        "remote.delivered.seen_s.*",
        labels=("tier",),
    ),
    _counter(
        "declined_parts",
        "Parts of blocks that were left to the engine, which computes them sooner.",
        "remote.declined",
    ),
    _counter("trials", "Transfers all the same, to learn how fast a source is.", "remote.trials"),
    # Tiers.
    _gauge(
        "tier_capacity_bytes",
        "What a tier can hold, by where it is: a folder, a device, an object store; memory is nowhere else.",
        partial(_dram, "segment_bytes"),
        *_disks("segment_bytes", tiers=("ssd", "device")),
        *_disks("size_bytes", tiers=("remote",)),
        labels=_PLACE,
    ),
    _gauge(
        "tier_used_bytes",
        "What is in use of it, in slots.",
        partial(_dram, "space.bytes_used"),
        *_disks("used_bytes"),
        labels=_PLACE,
    ),
    _gauge(
        "tier_parts",
        "Parts of blocks that it holds.",
        partial(_dram, "blocks"),
        *_disks("blocks"),
        labels=_PLACE,
    ),
    _gauge(
        "tier_state",
        "1 for the state that a disk, a device or an object store is in.",
        *(
            At(f"tiers.{tier}.[path].state", (tier,), states)
            for tier, states in (
                ("ssd", DISK_STATES),
                ("device", DISK_STATES),
                ("remote", STORE_STATES),
            )
        ),
        labels=("where", "state", "tier"),
    ),
    _counter(
        "tier_written_parts",
        "Parts of blocks written there.",
        *_disks("written_blocks"),
        labels=_PLACE,
    ),
    _counter("tier_written_bytes", "Bytes written there.", *_disks("written_bytes"), labels=_PLACE),
    _counter(
        "tier_read_parts", "Parts of blocks read there.", *_disks("read_blocks"), labels=_PLACE
    ),
    _counter("tier_read_bytes", "Bytes read there.", *_disks("read_bytes"), labels=_PLACE),
    _counter(
        "tier_errors",
        "Reads and writes there that failed.",
        *(
            At(f"tiers.{tier}.[path].{what}_errors", (tier, what))
            for tier in ("ssd", "device", "remote")
            for what in ("read", "write")
        ),
        labels=("where", "tier", "what"),
    ),
    _counter(
        "checksum_mismatches",
        "Parts of blocks whose bytes did not match their checksum, and were dropped. In memory: those from peers too.",
        At("counters.checksum_mismatches", ("", "dram")),
        *_disks("mismatches"),
        labels=_PLACE,
    ),
    _counter(
        "scrubbed_parts",
        "Parts of blocks that were read on disks only to see whether they are right.",
        *_disks("scrubbed_blocks", tiers=("ssd",)),
        labels=_PLACE,
    ),
    _counter(
        "gone_parts",
        "Parts of blocks that a tier has given up: for want of room (`full`, `quota`), unused for too long (`ttl`), "
        "by an `operator` or a client (`removed`), `corrupt`, or of an ended `epoch`.",
        At("gone.*", ("", "dram")),
        _gone_below,
        labels=("reason", "where", "tier"),
    ),
    _counter(
        "evicted_copies",
        "Parts of blocks evicted from memory that other nodes keep too.",
        "counters.evicted_secondary",
    ),
    _counter(
        "evicted_soft_pins",
        "Parts of blocks evicted from memory though pinned softly.",
        "counters.evicted_soft_pins",
    ),
    _counter(
        "slabs_reclaimed",
        "Slabs of memory that went to slots of another size.",
        "counters.slabs_reclaimed",
    ),
    _histogram(
        "evicted_age_seconds",
        "How long ago what was evicted had been used last; one block of each batch stands for all of it.",
        "sampled.evicted_age_s.*",
        labels=("tier",),
    ),
    _gauge(
        "write_queue_blocks",
        "Parts of blocks that wait to be written to disks as they were put.",
        "tiers.queued_writes",
    ),
    _gauge(
        "device_queue_blocks",
        "Parts of blocks that wait to be written to spare device memory.",
        *_disks("queued_blocks", tiers=("device",)),
        labels=_PLACE,
    ),
    _gauge(
        "writing_bytes",
        "Bytes that are being written to a disk.",
        *_disks("writing_bytes", tiers=("ssd",)),
        labels=_PLACE,
    ),
    _counter(
        "writes_dropped",
        "Parts of blocks that were not written to a disk: the queue was full (`queue`), the day's bytes were used up "
        "(`budget`), or scarce and nobody had read them again (`unread`).",
        At("tiers.dropped_writes", ("queue",)),
        At("tiers.over_budget_blocks", ("budget",)),
        At("tiers.once_used_blocks", ("unread",)),
        labels=("reason",),
    ),
    _gauge(
        "clean_share_ratio",
        "Of a tenant's memory: what is free or on a disk already, up to what is aimed at. 0: evictions lose blocks.",
        "tiers.clean_share.*",
        labels=("tenant",),
    ),
    _gauge(
        "write_budget_bytes_per_day",
        "What may be written to all disks in a day (`ssd_bytes_per_day`); 0: no limit.",
        "tiers.budget_bytes_per_day",
    ),
    _gauge(
        "write_budget_left_bytes",
        "What of it may be written now; it fills evenly, up to an hour's share.",
        "tiers.budget_left_bytes",
    ),
    # Tenants and namespaces.
    _gauge(
        "tenant_capacity_bytes", "A tenant's memory.", "tenants.*.segment_bytes", labels=("tenant",)
    ),
    _gauge(
        "tenant_used_bytes",
        "What is in use of it, in slots.",
        "tenants.*.space.bytes_used",
        labels=("tenant",),
    ),
    _gauge(
        "tenant_pinned_bytes",
        "What pins hold of it.",
        At("tenants.*.hard_pinned_bytes", ("hard",)),
        At("tenants.*.soft_pinned_bytes", ("soft",)),
        labels=("tenant", "kind"),
    ),
    _gauge(
        "tenant_copies_bytes",
        "What can go without loss, since other nodes keep it.",
        "tenants.*.secondary_bytes",
        labels=("tenant",),
    ),
    _gauge("namespaces", "Namespaces that are known.", _namespace_count, labels=("tenant",)),
    _gauge(
        "namespace_held_bytes",
        f"What a namespace holds, in slots. The {NAMESPACES_MAX} largest of a node are shown.",
        _space_in("dram"),
        _space_in("ssd"),
        labels=("tenant", "namespace", "model", "tier"),
    ),
    _gauge(
        "namespace_quota_bytes",
        "What it may hold in memory; 0: as much as its tenant.",
        partial(_space, "quota"),
        labels=("tenant", "namespace", "model"),
    ),
    _gauge(
        "namespace_blocks",
        "Blocks that it has in memory.",
        partial(_space, "blocks"),
        labels=("tenant", "namespace", "model"),
    ),
    _gauge(
        "namespace_epoch",
        "The epoch that it is in; a reset begins a new one.",
        partial(_space, "epoch"),
        labels=("tenant", "namespace", "model"),
    ),
    # Other nodes.
    _counter(
        "pull_parts",
        "Parts of blocks that were asked of a peer, by what became of it.",
        *(_delivered(outcome) for outcome in OUTCOMES),
        labels=("peer", "outcome"),
    ),
    _counter("pull_bytes", "Bytes that a peer has delivered.", _delivered_bytes, labels=("peer",)),
    _histogram(
        "pull_seconds",
        "How long a peer took to deliver, by the transport.",
        _pull_seconds,
        labels=("peer", "transport"),
    ),
    _counter(
        "path_pulls",
        "Transfers by one path to a peer: the transport, and the address of the network card.",
        partial(_ways, "pulls"),
        labels=("peer", "transport", "path"),
    ),
    _counter(
        "path_bytes",
        "Bytes that came by it.",
        partial(_ways, "bytes"),
        labels=("peer", "transport", "path"),
    ),
    _gauge(
        "path_resting",
        "1 while it is left alone since it has failed.",
        _resting,
        labels=("peer", "transport", "path"),
    ),
    _counter(
        "paths_changed", "Transfers that went on over another network card.", "paths.changed_card"
    ),
    _counter(
        "nixl_failed_over",
        "Transfers that went on over TCP since RDMA had failed.",
        "nixl.failed_over",
    ),
    _gauge(
        "source_latency_seconds",
        "Expected to the first byte from a peer, or a tier of this node.",
        partial(_peers, "latency_ms", 1e-3),
        labels=("source",),
    ),
    _gauge(
        "source_bytes_per_second",
        "Expected after it.",
        partial(_peers, "bytes_s", 1),
        labels=("source",),
    ),
    _gauge(
        "source_inflight_bytes",
        "Asked of it and not here yet.",
        partial(_peers, "inflight_bytes", 1),
        labels=("source",),
    ),
    _gauge(
        "source_suspended",
        "1 while it is not asked, since it has failed.",
        _suspended,
        labels=("source",),
    ),
    _gauge("transfers", "Transfers under way, from other tiers and nodes.", "remote.transfers"),
    _counter("transfers_failed", "Transfers that failed.", "remote.failed_transfers"),
    _counter(
        "rival_parts",
        "Parts of blocks that a second source was asked for, since the first one was slow.",
        "remote.rivals",
    ),
    _counter(
        "joined_parts",
        "Parts of blocks that were on their way for somebody else already.",
        "remote.joined",
    ),
    _counter("lookups", "Questions to the directory of who has a prefix.", "remote.lookups"),
    _counter(
        "lookups_failed",
        "Lookups of the directory and the catalog without an answer in time.",
        "remote.lookups_failed",
    ),
    _counter(
        "lookups_remembered",
        "Of these, answered by what was known before.",
        "remote.lookups_remembered",
    ),
    _counter(
        "stale_parts",
        "Parts of blocks that somebody was said to have, and had no more when asked.",
        "remote.absent",
    ),
    _gauge(
        "negative_parts",
        "Parts of blocks that are remembered for two seconds not to be where the directory says.",
        "remote.negative",
    ),
    _counter("lent_parts", "Parts of blocks lent to peers.", "counters.lent_blocks"),
    _counter("lent_bytes", "Bytes of these.", "counters.lent_bytes"),
    # Copies, follows, engines.
    _gauge(
        "copies_wanted", "Blocks that lack copies: the backlog of replication.", "copies.wanted"
    ),
    _gauge(
        "copies_repairing",
        "1 while all blocks are looked through for lacking copies.",
        "copies.repairing",
    ),
    _counter(
        "copies_offered_blocks",
        "Blocks offered to other nodes: taken up or not.",
        "copies.offered_blocks",
    ),
    _counter(
        "copies_made_blocks",
        "Blocks that other nodes have taken: as wanted copies, or instead of their eviction here.",
        At("copies.replicated_blocks", ("replicated",)),
        At("copies.forwarded_blocks", ("forwarded",)),
        labels=("why",),
    ),
    _counter("copies_bytes", "Bytes that other nodes have taken.", "copies.accepted_bytes"),
    _counter("copies_taken_blocks", "Blocks taken from other nodes.", "copies.taken_blocks"),
    _counter(
        "copies_dropped", "Wishes for copies that were given up: too many.", "copies.dropped_wishes"
    ),
    _gauge(
        "follows",
        "Prompts that are followed while they are computed elsewhere.",
        "follows.under_way",
    ),
    _counter("follows_ended", "Follows that have ended.", "follows.ended"),
    _counter("follows_whole", "Of these, those that got all in time.", "follows.whole"),
    _counter(
        "follow_parts", "Parts of blocks that came while they were followed.", "follows.blocks"
    ),
    _gauge(
        "follow_lag_seconds",
        "From when it is known that blocks are committed to when they are here, lately.",
        "follows.lag_s",
    ),
    _gauge(
        "engines",
        "Engines whose KV events are followed.",
        _engine_count,
        labels=("tenant", "state"),
    ),
    # The cluster.
    _gauge(
        "membership_standing",
        "1 for what this node is to its cluster.",
        At("cluster.standing", states=STANDINGS),
        labels=("standing",),
    ),
    _gauge("membership_connected", "1 while the membership (etcd) confirms this node.", _connected),
    _counter("membership_lost", "Times that the lease was lost.", "cluster.leases_lost"),
    _gauge(
        "node_state",
        "1 for the state of this node.",
        At("cluster.state", states=NODE_STATES),
        labels=("state",),
    ),
    _gauge("cluster_others", "Other nodes that may be pulled from.", "cluster.others"),
    _gauge(
        "directory_connected",
        "1 while the directory (Redis) answers; not there without one.",
        "cluster.directory.connected",
    ),
    _gauge(
        "announcer_queue_blocks",
        "Changes that the directory was not told of yet.",
        "cluster.directory.queued",
    ),
    _gauge("announcer_lag_seconds", "Age of the oldest of these.", "cluster.directory.lag_s"),
    _gauge(
        "announcer_blocks",
        "Blocks that the directory may have from this node.",
        "cluster.directory.announced",
    ),
    _counter(
        "announcer_changes",
        "Changes that the directory was told of.",
        At("cluster.directory.published", ("published",)),
        At("cluster.directory.withdrawn", ("withdrawn",)),
        At("cluster.directory.retracted", ("retracted",)),
        labels=("what",),
    ),
    _counter("announcer_failures", "Publications that failed.", "cluster.directory.failures"),
    _counter(
        "announcer_overflows",
        "Times that the queue was full, so that all is looked through.",
        "cluster.directory.overflows",
    ),
    _gauge(
        "drain_phase",
        "1 for how far a drain has come; not there while there is none.",
        At("cluster.drain.phase", states=DRAIN_PHASES),
        labels=("phase",),
    ),
    _gauge(
        "drain_blocks",
        "Blocks of a drain: in all (`total`), looked at (`seen`), copied, that nobody took (`failed`), only on disks "
        "when the time was up (`left`).",
        At("cluster.drain.blocks_total", ("total",)),
        At("cluster.drain.blocks", ("seen",)),
        *_each("cluster.drain", ("copied", "failed", "left")),
        labels=("what",),
    ),
    _gauge("drain_copied_bytes", "Bytes that a drain has copied.", "cluster.drain.copied_bytes"),
)

MISSING = Metric(
    "kvpool_metrics_missing",
    Kind.GAUGE,
    "Entries of this table that the daemon does not tell: it is of another version.",
    (),
)


# ---- the text --------------------------------------------------------------------------------------------


def render(
    stats: Stats, *, namespaces_max: int = NAMESPACES_MAX, peers_max: int = PEERS_MAX
) -> bytes:
    """All metrics in Prometheus' text format 0.0.4. stats: what `Inspect` answers, decoded.

    What the stats do not have, as of a daemon of another version, is left out and counted.
    """
    view = View(stats, namespaces_max, peers_max)
    lines: list[str] = []
    missing = 0
    for metric in METRICS:
        try:
            samples = metric.samples(view)
        except Missing:
            missing += 1
            continue
        if samples:
            _head(metric, lines)
            _body(metric, samples, lines)
    _head(MISSING, lines)
    lines.append(f"{MISSING.name} {missing}\n")
    return "".join(lines).encode()


def _head(metric: Metric, lines: list[str]) -> None:
    what = metric.what.replace("\\", r"\\").replace("\n", r"\n")
    lines.append(f"# HELP {metric.name} {what}\n# TYPE {metric.name} {metric.kind}\n")


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
        ends = [_number(bound) for bound in value["bounds"]] + ["+Inf"]
        counts = list(accumulate(value["counts"]))
        lines += [
            f'{name}_bucket{{{before}le="{end}"}} {count}\n'
            for end, count in zip(ends, counts, strict=True)
        ]
        lines.append(
            f"{name}_sum{at_end} {_number(value['sum'])}\n{name}_count{at_end} {counts[-1]}\n"
        )


@lru_cache(maxsize=4096)
def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return str(int(value)) if isinstance(value, int) else repr(float(value))


# ---- the document ----------------------------------------------------------------------------------------


def rows() -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """Name, type, labels and sentence of every metric, as `docs/metrics.md` has them."""
    for metric in (*METRICS, MISSING):
        yield metric.name, metric.kind.value, metric.labels, metric.what

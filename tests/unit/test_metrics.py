"""The text for Prometheus, read back by Prometheus' own parser."""

import random
import re
import runpy
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kvpool.admin.metrics import render
from kvpool.config import DeviceConfig
from kvpool.daemon.core.events import Events, Gone, TierInfo
from kvpool.daemon.core.idle_age import IdleAge
from kvpool.daemon.core.node import Node
from kvpool.daemon.features.sampling import Sampler
from kvpool.daemon.tiers.device_tier import DeviceTier
from kvpool.daemon.tiers.tier_state import ObjectTierState, TierState
from kvpool.daemon.workers.paths import Paths
from kvpool.placement.membership.base import Standing
from kvpool.placement.records import NodeState
from kvpool.storage.eviction import policy_maker
from kvpool.telemetry import metrics
from kvpool.telemetry.cluster_stats import (
    DRAIN_PHASES,
    NODE_STATES,
    PEERS_MAX,
    STANDINGS,
    DeliveredStats,
    DrainProgress,
)
from kvpool.telemetry.histogram import Histogram
from kvpool.telemetry.memory_stats import OUTCOMES, Asked, Loads, Traffic
from kvpool.telemetry.metrics import OTHERS, Kind, Label, counter, each, families, gauge
from kvpool.telemetry.misses import Reason
from kvpool.telemetry.node_stats import NodeStats
from kvpool.telemetry.tier_stats import PLACE_STATES
from tests.support.stats import node_stats

AWKWARD = 'a "quoted" back\\slash\nand a second line'

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parsed(text: bytes) -> Samples:
    """Every sample, by name and labels; none comes twice."""
    found: Samples = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            where = (sample.name, frozenset(sample.labels.items()))
            assert where not in found, f"{where} comes twice"
            found[where] = sample.value
    return found


def at(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"kvpool_{name}", frozenset(labels.items())]


def histogram(*values: float) -> Histogram:
    made = Histogram((0.5, 1.0, 2.0))
    for value in values:
        made.add(value)
    return made


def space(held: int, model: str = "llama") -> dict[str, Any]:
    return {
        "fields": {"model": model},
        "epoch": 3,
        "held_bytes": held,
        "quota_bytes": 0,
        "blocks": [held // 4, held // 8],
    }


def peer(node: str, url: str, asked: int = 1) -> dict[str, Any]:
    return {
        "node": node,
        "url": url,
        "asked": asked,
        "latency_ms": 2.0,
        "bytes_s": 1e9,
        "inflight_bytes": asked,
        "suspended_s": 0.5 if asked == 7 else 0.0,
    }


def tenant(namespaces: dict[str, Any], traffic: Traffic | None = None) -> dict[str, Any]:
    return {
        "segment_bytes": 1000,
        "blocks": 10,
        "hard_pinned_bytes": 1,
        "soft_pinned_bytes": 2,
        "secondary_bytes": 3,
        "granted_bytes": 0,
        "space": {"bytes_used": 400},
        "traffic": traffic or Traffic(),
        "namespaces": namespaces,
    }


def disk(path: str, **values: Any) -> dict[str, Any]:
    return {"path": path, "state": "serving", **values}


def stats(**values: Any) -> NodeStats:
    """Of a node with one tenant, as `Inspect` answers."""
    made: dict[str, Any] = {
        "node": "n1",
        "version": "9.9",
        "uptime_s": 1.5,
        "clients": 1,
        "connections": 2,
        "refused_connections": 3,
        "leases": 4,
        "gone": {"full": 5, "ttl": 6},
        "processes": [
            {"kind": "control", "cpu_s": 1.5, "resident_bytes": 10, "private_bytes": 5},
            {"kind": "transfer_worker", "cpu_s": 2.0, "resident_bytes": 20, "private_bytes": 6},
            {"kind": "transfer_worker", "cpu_s": 0.25, "resident_bytes": 30, "private_bytes": 7},
        ],
        "sampled": {"late_s": histogram(0.1), "evicted_age_s": {"dram": histogram(1.0, 7.0)}},
        "transfer_workers": [{"restarts": 1, "orders": 2, "loans": 3}, {"restarts": 4, "orders": 0, "loans": 0}],
        "tenants": {"red": tenant({"aa" * 16: space(80)})},
        "tiers": {"clean_share": {"red": 0.25}},
        "cluster": {
            "cluster": "c",
            "standing": "away",
            "state": "draining",
            "others": 1,
        },
    }  # fmt: skip
    return node_stats(**{**made, **values})


def test_every_metric_is_well_named_and_says_what_it_is() -> None:
    for metric in families(NodeStats).values():
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
        assert metric.name.replace("_", "").isalnum() and metric.name == metric.name.lower()
        assert not metric.name.endswith(("_bucket", "_sum", "_count", "_created", "_info_total"))
        assert metric.help.endswith(".") and "|" not in metric.help
        assert "le" not in metric.labels and len(set(metric.labels)) == len(metric.labels)


class Shelf(msgspec.Struct):
    place: Annotated[str, Label("place")] = ""
    books: Annotated[int, gauge("books")] = 0
    """Books on a
    shelf."""
    lent: Annotated[dict[str, int], counter("lent", "month")] = {}
    """Loans."""
    page: Annotated[int, gauge("page", single="room")] = 0
    """The open page."""

    @property
    def full(self) -> Annotated[bool, gauge("full")]:
        """1 while a shelf is full."""
        return self.books > 8


class Library(msgspec.Struct):
    rooms: Annotated[dict[str, Shelf], gauge("rooms", read=len), each("room", floor="1")] = {}
    """Rooms."""
    hidden: list[Shelf] = []


def test_labels_come_from_the_way_to_a_field() -> None:
    declared = {name: (one.kind, one.labels, one.help) for name, one in families(Library).items()}
    way = ("floor", "room", "place")
    assert declared["kvpool_books"] == (Kind.GAUGE, way, "Books on a shelf.")
    assert declared["kvpool_lent_total"] == (Kind.COUNTER, (*way, "month"), "Loans.")
    assert declared["kvpool_full"] == (Kind.GAUGE, way, "1 while a shelf is full.")
    assert declared["kvpool_rooms"] == (Kind.GAUGE, (), "Rooms.")


def test_samples_of_equal_labels_are_added_and_single_ones_left_out() -> None:
    library = Library(
        {
            "a": Shelf("x", 9, {"may": 1}, page=3),
            "b": Shelf("x", 2, {"may": 2, "june": 3}, page=4),
            "c": Shelf("x", 3, {"june": 4}, page=5),
            "d": Shelf("x", 1),
        },
        hidden=[Shelf("y", 99)],
    )

    def narrow(labels: metrics.Labels) -> metrics.Labels | None:
        room = labels.get("room")
        if room == "d":
            return None
        return labels if room in (None, "a") else {**labels, "room": OTHERS}

    samples = parsed(metrics.render(library, narrow))
    a, others = ({"floor": "1", "room": room, "place": "x"} for room in ("a", OTHERS))
    assert at(samples, "rooms") == 4
    assert at(samples, "books", **a) == 9
    assert at(samples, "books", **others) == 5
    assert at(samples, "lent_total", **others, month="june") == 7
    assert at(samples, "full", **a) == 1 and at(samples, "full", **others) == 0
    assert [value for (name, _), value in samples.items() if name == "kvpool_page"] == [3]


class Twice(msgspec.Struct):
    one: Annotated[int, gauge("twice")] = 0
    """A number."""
    other: Annotated[int, gauge("twice")] = 0
    """Another number."""


def test_one_name_is_declared_in_one_way() -> None:
    with pytest.raises(ValueError, match="kvpool_twice is declared in two ways"):
        families(Twice)


def test_the_states_are_those_that_there_are() -> None:
    assert {standing.value for standing in Standing} == set(STANDINGS)
    assert set(map(str, NodeState)) == set(NODE_STATES)
    assert {*map(str, TierState), *map(str, ObjectTierState)} == set(PLACE_STATES)
    assert DRAIN_PHASES == ("copying", "waiting", "done")
    assert set(OUTCOMES) == set(Loads.__struct_fields__) - {"nbytes"}


def test_the_parser_reads_what_was_written() -> None:
    traffic = Traffic(put_parts=7, put_bytes=700, device_read_bytes=12)
    traffic.reads.add(10, 6, 4)
    traffic.read_bytes = 11
    traffic.loads["ssd"] = Loads(loaded=2, absent=1, nbytes=64)
    given_stats = stats(
        tenants={
            AWKWARD: tenant({"aa" * 16: space(80, AWKWARD)}, traffic)
            | {
                "usage": {"ssd": [{"namespaces": {"aa" * 16: {"held_bytes": 24}}}]},
                "engines": {"followed": [{"connected": True}, {"connected": False}]},
            }
        }
    )
    samples = parsed(render(given_stats))
    assert at(samples, "put_parts_total", tenant=AWKWARD) == 7
    assert at(samples, "read_blocks_total", tenant=AWKWARD, result="local") == 4
    assert at(samples, "read_blocks_total", tenant=AWKWARD, result="fetched") == 2
    assert at(samples, "read_blocks_total", tenant=AWKWARD, result="missed") == 4
    assert at(samples, "read_bytes_total", tenant=AWKWARD, tier="dram") == 11
    assert at(samples, "read_bytes_total", tenant=AWKWARD, tier="device") == 12
    loads = {"tenant": AWKWARD, "tier": "ssd"}
    assert at(samples, "load_parts_total", **loads, outcome="loaded") == 2
    assert at(samples, "load_parts_total", **loads, outcome="absent") == 1
    assert at(samples, "load_bytes_total", **loads) == 64
    named = {"tenant": AWKWARD, "namespace": "aa" * 16, "model": AWKWARD}
    assert at(samples, "namespace_held_bytes", **named, tier="dram") == 80
    assert at(samples, "namespace_held_bytes", **named, tier="ssd") == 24
    assert at(samples, "namespace_blocks", **named) == 20
    assert at(samples, "process_cpu_seconds_total", process="transfer_worker") == 2.25
    assert at(samples, "transfer_worker_restarts_total") == 5
    assert at(samples, "dropped_parts_total", reason="ttl", location="", tier="dram") == 6
    assert at(samples, "engines", tenant=AWKWARD, state="not_connected") == 1


def test_a_state_is_one_among_all() -> None:
    samples = parsed(render(stats()))
    for standing in STANDINGS:
        assert at(samples, "membership_standing", standing=standing) == (standing == "away")
    assert at(samples, "membership_connected") == 0
    assert at(samples, "node_state", state="draining") == 1


def test_what_is_not_there_has_no_samples() -> None:
    """Without a directory, a drain and RDMA there is nothing to say of them."""
    text = render(stats()).decode()
    for name in ("directory_connected", "announcer_lag", "drain_phase", "nixl", "tier_state"):
        assert f"kvpool_{name}" not in text
    directory = {"connected": True, "lag_s": 0.5}
    full = stats(cluster={"directory": directory}, nixl={"failed_over": 8})
    samples = parsed(render(full))
    assert at(samples, "directory_connected") == 1
    assert at(samples, "announcer_lag_seconds") == 0.5
    assert at(samples, "nixl_failovers_total") == 8


def test_histograms_are_cumulative() -> None:
    seconds = {"ssd": histogram(0.5, 0.6, 1.5, 99.0)}
    samples = parsed(render(stats(fetch={"delivered": {"seconds": seconds}})))
    found = [
        at(samples, "load_seconds_bucket", tier="ssd", le=le)
        for le in ("0.5", "1.0", "2.0", "+Inf")
    ]
    assert found == [1, 2, 3, 4]
    assert at(samples, "load_seconds_count", tier="ssd") == 4
    assert at(samples, "load_seconds_sum", tier="ssd") == pytest.approx(101.6)


def test_the_largest_namespaces_are_shown_and_the_rest_together() -> None:
    spaces = {f"{number:032x}": space(number) for number in range(1, 51)}
    samples = parsed(render(stats(tenants={"red": tenant(spaces)}), namespaces_max=20))
    held = {
        dict(labels)["namespace"]: value
        for (name, labels), value in samples.items()
        if name == "kvpool_namespace_held_bytes" and dict(labels)["tier"] == "dram"
    }
    assert len(held) == 21
    assert {f"{number:032x}" for number in range(31, 51)} | {"others"} == set(held)
    assert held["others"] == sum(range(1, 31))
    assert at(samples, "namespaces", tenant="red") == 50
    epochs = [labels for name, labels in samples if name == "kvpool_namespace_epoch"]
    assert len(epochs) == 20, "an epoch of several is none"


def test_peers_are_shown_by_name_and_the_rest_together() -> None:
    delivered = DeliveredStats()
    paths = {}
    for number in range(10):
        delivered.from_peer(f"n{number}", Loads(loaded=number, nbytes=100 * number))
        ways = [
            {
                "url": f"tcp://{number}",
                "transport": "tcp",
                "pulls": number,
                "bytes": 5,
                "rests_s": 0.0,
            }
        ]
        paths[f"tcp://{number}"] = {"ways": ways, "seconds": {"tcp": histogram(1.0)}}
    delivered.from_peer("gone", Loads(loaded=40, nbytes=1))
    peers = [peer(f"n{number}", f"tcp://{number}", asked=number) for number in range(10)]
    given_stats = stats(
        fetch={"peers": peers, "delivered": delivered},
        paths={"changed_card": 0, "peers": paths},
    )
    samples = parsed(render(given_stats, peers_max=4))
    came = {
        dict(labels)["peer"]: value
        for (name, labels), value in samples.items()
        if name == "kvpool_peer_pull_parts_total" and dict(labels)["outcome"] == "loaded"
    }
    assert came == {"n6": 6, "n7": 7, "n8": 8, "n9": 9, "gone": 40, OTHERS: sum(range(6))}
    assert at(samples, "peer_pull_seconds_count", peer=OTHERS, transport="tcp") == 6
    assert at(samples, "path_pulls_total", peer=OTHERS, transport="tcp", path=OTHERS) == 15
    assert at(samples, "path_pulls_total", peer="n9", transport="tcp", path="tcp://9") == 9
    assert at(samples, "source_latency_seconds", source="n9") == 0.002
    assert at(samples, "source_suspended", source="n7") == 1
    assert at(samples, "source_suspended", source="n9") == 0


def test_places_of_all_tiers_stand_beside_each_other() -> None:
    tiers = {
        "ssd": [disk("/a", segment_bytes=7, gone={"full": 9}), disk("/b", state="read-only")],
        "device": [disk("cuda:0", segment_bytes=8)],
        "object": [disk("s3://x", size_bytes=9, state="failing")],
    }
    samples = parsed(render(stats(tiers=tiers)))
    capacity = {
        (dict(labels)["tier"], dict(labels)["location"]): value
        for (name, labels), value in samples.items()
        if name == "kvpool_tier_capacity_bytes"
    }
    assert capacity == {
        ("dram", ""): 1000,
        ("ssd", "/a"): 7,
        ("ssd", "/b"): 0,
        ("device", "cuda:0"): 8,
        ("object", "s3://x"): 9,
    }
    assert at(samples, "tier_state", location="/b", tier="ssd", state="read-only") == 1
    assert at(samples, "tier_state", location="s3://x", tier="object", state="failing") == 1
    assert at(samples, "dropped_parts_total", reason="full", location="/a", tier="ssd") == 9


def test_what_few_nodes_have_is_read_where_it_is_told() -> None:
    """Spare device memory, RDMA and a drain: by what their owners say, without them."""
    rules = Node(make_policy=policy_maker("lru"))
    device = DeviceTier(DeviceConfig("cpu", 1 << 20), rules, lambda: 0.0, lambda: rules)
    never: Any = None
    nixl = Paths({}, never, lambda _: None, lambda: 0.0, random.Random(1)).nixl_stats()
    progress = DrainProgress(blocks=3, blocks_total=9, copied=2, failed=1, left=4, copied_bytes=77)
    told = stats(tiers={"device": [device.stats()]}, nixl=nixl, cluster={"drain": progress})
    samples = parsed(render(told))
    assert at(samples, "device_write_queue_parts", location="cpu", tier="device") == 0
    assert at(samples, "tier_state", location="cpu", tier="device", state="opening") == 1
    assert at(samples, "nixl_failovers_total") == 0
    assert at(samples, "drain_phase", phase="copying") == 1
    drained = {"total": 9, "seen": 3, "copied": 2, "failed": 1, "left": 4}
    for what, blocks in drained.items():
        assert at(samples, "drain_blocks", progress=what) == blocks
    assert at(samples, "drain_copied_bytes") == 77


# ---- what the daemon counts with ---------------------------------------------------------------------


@given(st.lists(st.floats(0, 1e6), max_size=50), st.sets(st.floats(0.01, 1e5), min_size=1))
def test_a_histogram_counts_what_is_not_above_each_bound(
    values: list[float], ends: set[float]
) -> None:
    bounds = tuple(sorted(ends))
    made = Histogram(bounds)
    for value in values:
        made.add(value)
    counts = made.counts
    for index, bound in enumerate(bounds):
        assert sum(counts[: index + 1]) == sum(value <= bound for value in values)
    assert sum(counts) == len(values)
    assert made.total == pytest.approx(sum(values))


def test_what_was_asked_for_is_local_fetched_or_missed() -> None:
    asked = Asked()
    asked.add(10, 10, 10)
    asked.add(10, 4, 1)
    asked.add(5, 2, 4)  # some of what was here has gone while the rest was waited for
    assert asked == Asked(requests=3, local=13, fetched=3, missed=9)


def test_peers_beyond_the_bound_are_counted_together() -> None:
    delivered = DeliveredStats()
    for number in range(PEERS_MAX + 10):
        delivered.from_peer("always", Loads(loaded=1))
        delivered.from_peer(f"n{number}", Loads(loaded=1))
    peers = delivered.peers
    assert len(peers) <= PEERS_MAX + 1
    assert peers["always"].loaded == PEERS_MAX + 10
    assert sum(loads.loaded for loads in peers.values()) == 2 * (PEERS_MAX + 10)
    assert peers[OTHERS].loaded >= 10


def test_the_age_of_one_stands_for_its_batch() -> None:
    ages = IdleAge()
    for second in range(10):
        ages.note(float(second), second)
    events, sampler, table = Events(), Sampler(lambda: 0.0, ["dram"]), Mock()
    events.subscribe("sampler", sampler.handlers)
    tier = TierInfo("dram", ages)
    for used, blocks, evicted in ((3, 100, True), (9, 7, True), (5, 50, False)):
        gone = [Mock(used=used)] * blocks
        events.emit(Gone(tier, table, gone, [], Reason.FULL, evicted))
    sampler.look(10.0)
    sampler.look(11.0)
    seen = sampler.stats().evicted_age_s["dram"]
    assert seen.bounds[:3] == (1.0, 5.0, 15.0)
    assert seen.counts[:3] == [7, 0, 100]
    assert seen.total == 100 * 7 + 7 * 1


def test_alerts_and_dashboards_name_metrics_that_there_are(repo_root: Path) -> None:
    script = runpy.run_path(str(repo_root / "scripts" / "reference.py"))
    rows = [*script["daemon_rows"](), *script["router_rows"]()]
    known = {name for name, *_ in rows}
    histograms = {name for name, kind, *_ in rows if kind == "histogram"}
    known |= {f"{name}_{end}" for name in histograms for end in ("bucket", "sum", "count")}
    files = [
        *(repo_root / "deploy" / "prometheus").rglob("*.y*ml"),
        *(repo_root / "deploy" / "grafana").rglob("*.json"),
        repo_root / "docs" / "metrics.md",
    ]
    named = {
        name
        for path in files
        for name in re.findall(r"\bkvpool_[a-z0-9_]*[a-z]\b", path.read_text())
    }
    assert named and not named - known

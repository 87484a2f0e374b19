"""The command line: what it prints, what it returns, and that errors are one line."""

import inspect
import io
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import hypothesis.strategies as st
import msgspec
import pytest
import typer
from hypothesis import given
from rich.console import Console
from typer.testing import CliRunner

from kvpool import __version__, cli
from kvpool.cli import base, serving, verbs
from kvpool.cli.render.cluster import (
    namespace_rows,
    not_found,
    show_namespaces,
    show_nodes,
    show_replicas,
)
from kvpool.cli.render.drain import PATIENCE_S, Ended, Lines, carry_out, follow, verdict
from kvpool.cli.render.naming import block_key, full_digest, known_digests, period, quotas
from kvpool.cli.render.node import _COUNTERS, show
from kvpool.cli.render.text import duration, period_text, size_text, used_text
from kvpool.client import OperatorClient
from kvpool.config import SETTINGS, DaemonConfig, DeviceConfig, DiskConfig, settings_of
from kvpool.daemon.server.server import Started
from kvpool.errors import (
    ClusterUnavailable,
    ConfigError,
    InvalidRequest,
    KvpoolError,
    NotAuthenticated,
    Unavailable,
)
from kvpool.placement.records import DEFAULT_SETTINGS
from kvpool.telemetry.node_stats import Counters, decode
from tests.support.stats import node_stats

DIRECTORY = {
    "connected": True,
    "queued": 12,
    "lag_s": 0.25,
    "repairing": 0,
    "failures": 0,
}

DEFAULTS = msgspec.to_builtins(DEFAULT_SETTINGS)

STATS: dict[str, Any] = {
    "node": "host-7",
    "incarnation": "abc123",
    "uptime_s": 90_061.5,
    "clients": 1,
    "connections": 12,
    "refused_connections": 0,
    "leases": 3,
    "counters": {"committed": 1500, "committed_bytes": 3 << 29, "match_keys": 10, "match_hits": 7},
    "tenants": {
        "red": {
            "segment_bytes": 4 << 30,
            "blocks": 1400,
            "hard_pinned_bytes": 1 << 20,
            "soft_pinned_bytes": 0,
            "granted_bytes": 0,
            "secondary_bytes": 0,
            "space": {
                "size": 4 << 30,
                "slab_bytes": 16 << 20,
                "slabs": 256,
                "slabs_unassigned": 64,
                "bytes_unassigned": 1 << 30,
                "bytes_used": 3 << 29,
                "classes": [
                    {
                        "stride": 1 << 20,
                        "extents": 192,
                        "slots_used": 1400,
                        "slots_free": 1672,
                        "bytes_used": 1400 << 20,
                        "bytes_free": 1672 << 20,
                        "bytes_lost": 0,
                    }
                ],
            },
            "namespaces": {
                "0123456789abcdef0123456789abcdef": {
                    "fields": {"model": "llama [8b]", "tp_size": 2, "dtype": "bf16", "seed": "0"},
                    "epoch": 2,
                    "settings": DEFAULTS,
                    "blocks": [700, 700],
                    "part_bytes": [1 << 20, 1 << 20],
                }
            },
        }
    },
    "transfer_workers": [
        {
            "pid": 77,
            "alive": True,
            "restarts": 0,
            "orders": 1,
            "loans": 2,
            "listening": ["tcp://a:1"],
        },
        {"pid": None, "alive": False, "restarts": 3, "orders": 0, "loans": 0, "listening": []},
    ],
    "fetch": {
        "lookups": 30,
        "lookups_failed": 0,
        "lookups_remembered": 4,
        "joined": 5,
        "hedges": 6,
        "cancelled": 7,
        "absent": 0,
        "mismatches": 0,
        "failed_transfers": 0,
        "transfers": 1,
        "peers": [
            {
                "incarnation": "b" * 16,
                "distance": "rack",
                "latency_ms": 1.25,
                "bytes_s": 200 << 20,
                "inflight_bytes": 0,
                "running": 0,
                "asked": 10,
                "failed": 2,
                "slow": 3,
                "bytes": 100 << 20,
                "suspended_s": 1.5,
                "suspected": False,
                "last_error": "connection [refused]",
            }
        ],
    },
    "replication": {
        "offered_blocks": 40,
        "accepted_blocks": 30,
        "accepted_bytes": 30 << 20,
        "taken_blocks": 20,
        "refused_offers": 1,
        "forwarded_blocks": 10,
        "replicated_blocks": 20,
        "repairs": 0,
        "dropped_wishes": 0,
        "promoted": 0,
        "wanted": 3,
        "repairing": False,
    },
    "cluster": {
        "cluster": "prod",
        "standing": "member",
        "state": "serving",
        "incarnation": "abc123",
        "others": 2,
        "directory": DIRECTORY,
    },
}
NAMES = {"b" * 16: "host-8"}


def shown(stats: dict, tenant: str = "red", width: int = 120) -> str:
    out = io.StringIO()
    show(node_stats(**stats), tenant, NAMES, Console(file=out, width=width, highlight=False))
    return out.getvalue()


def printed(print_it, what, width: int = 80) -> str:
    out = io.StringIO()
    print_it(what, Console(file=out, width=width, highlight=False))
    return out.getvalue()


def line_with(text: str, word: str) -> str:
    return next(line for line in text.splitlines() if word in line)


def test_what_an_operator_sees():
    text = shown(STATS)
    assert text.startswith(
        "node host-7  incarnation abc123, up 1 d 1 h, 1 client on 12 connections\n"
    )
    assert line_with(text, "segment").split()[1:] == ["4", "GiB", "100%"]
    assert "38%" in line_with(text, "in use")
    assert "1,400 block parts" in text
    assert "never evicted" in text
    assert line_with(text, "1,672").split() == [
        "1",
        "MiB",
        "1,400",
        "1,672",
        "1.4",
        "GiB",
        "1.6",
        "GiB",
        "0",
        "B",
    ]
    namespace = line_with(text, "0123456789ab")
    assert "model=llama [8b], tp_size=2, dtype=bf16, and 1 more" in namespace
    assert "7 of 10 blocks asked for" in text
    assert "1,500 blocks stored, 1.5 GiB" in text
    assert line_with(text, "77").split()[:5] == ["77", "running", "1", "2", "0"]
    assert "down" in text
    assert line_with(text, "cluster prod") == "cluster prod  2 other nodes to pull from"
    assert line_with(text, "directory connected").startswith(
        "directory connected, lag 0.2 s, 12 queued"
    )
    peer = line_with(text, "host-8")
    assert "left alone for 1.5 s" in peer
    assert "1.2 ms" in peer
    assert "200 MiB/s" in peer
    assert "connection [refused]" in peer
    assert "6 block parts requested from a second peer, 7 transfers cancelled" in text
    assert "30 total, 4 answered from memory" in line_with(text, "directory lookups")
    assert "40 blocks, 30 accepted, 30 MiB" in text
    assert "20 for replication, 10 offloaded before eviction" in text
    assert "3 blocks now" in line_with(text, "missing replicas")


def test_what_went_over_nixl_and_what_had_to_go_over_tcp():
    nixl = {"pulls": 7, "blocks": 300, "bytes": 3 << 30, "failed_over": 0, "last_error": ""}
    assert "NIXL" not in shown(STATS | {"nixl": None})
    quiet = shown(STATS | {"nixl": nixl})
    assert "7 pulls, 300 blocks, 3 GiB" in line_with(quiet, "pulled by RDMA")
    assert "over TCP" not in quiet
    failed = {"failed_over": 2, "failed_over_blocks": 50, "rested": 4}
    loud = shown(STATS | {"nixl": nixl | failed | {"last_error": "nixl://b:2: it [broke]"}})
    assert "2 pulls, 50 blocks, 4 pulls soon after" in line_with(loud, "continued over TCP")
    assert "it [broke]" in line_with(loud, "last reason")


def test_what_went_over_tcp_since_that_is_faster():
    nixl = {"pulls": 7, "blocks": 300, "bytes": 3 << 30, "slower": 5, "last_error": ""}
    text = shown(STATS | {"nixl": nixl})
    assert "5 pulls" in line_with(text, "sent over TCP")


def test_ways_to_peers_where_there_are_several():
    def way(url: str, **more):
        return {"url": url, "pulls": 3, "bytes": 1 << 20, "rests_s": 0.0, "reason": ""} | more

    rests = way("tcp://10.1.0.2:1", rests_s=1.5, reason="no route [at all]")
    one = {"usual": "tcp", "bytes_s": 1e9, "others": {}, "ways": [way("tcp://10.0.0.2:1")]}
    paths = {"changed_card": 0, "peers": {"tcp://10.0.0.2:1": one}}
    assert "Ways to peers" not in shown(STATS | {"paths": paths})
    two = one | {"ways": [*one["ways"], rests]}
    text = shown(STATS | {"paths": {"peers": {"tcp://10.0.0.2:1": two}}})
    assert "Ways to peers" in text
    assert "1 MiB" in line_with(text, "tcp://10.0.0.2:1")
    assert "rests for 1.5 s" in text
    assert "[at all]" in text
    six = [way("tcp://[fd00::7]:1"), way("tcp://[fd00::8]:1")]
    text = shown(STATS | {"paths": {"peers": {"tcp://[fd00::7]:1": one | {"ways": six}}}})
    assert line_with(text, "[fd00::8]").split()[0] == "tcp://[fd00::8]:1"
    assert line_with(text, "[fd00::7]").count("tcp://[fd00::7]:1") == 2


def test_addresses_of_six_words_are_shown_whole():
    url = "tcp://[fd00::7]:7070"
    worker = STATS["transfer_workers"][0] | {"listening": [url]}
    assert url in shown(STATS | {"transfer_workers": [worker]})
    nodes = [node("host-1", "a", transports=[{"url": url}], labels={"rack": "7"})]
    assert url in printed(show_nodes, CLUSTER | {"nodes": nodes}, width=200)
    link = {
        "node": url,
        "incarnation": "b" * 16,
        "distance": "zone",
        "latency_s": 0.001,
        "bytes_s": 1e9,
        "latency_age_s": 2.0,
        "bytes_age_s": None,
        "inflight_bytes": 0,
        "path": url,
    }
    assert printed(show_nodes, CLUSTER | {"links": [link]}, width=200).count(url) == 2
    peer = STATS["fetch"]["peers"][0] | {"node": url, "asked": 1}
    assert url in shown(STATS | {"fetch": STATS["fetch"] | {"peers": [peer]}})


def test_trouble_is_shown_when_there_is_any():
    quiet = shown(STATS)
    assert "checksum mismatches" not in quiet
    assert "refused, pool full" not in quiet
    loud = shown(STATS | {"counters": {"checksum_mismatches": 3, "refused_full": 4}})
    assert "3 blocks dropped" in loud
    assert "4 puts" in line_with(loud, "refused, pool full")
    assert "2 connections refused" in shown(STATS | {"refused_connections": 2})
    assert "failed" not in line_with(quiet, "directory lookups")
    assert "failed transfers" not in quiet
    remote = STATS["fetch"] | {"failed_transfers": 8, "lookups_failed": 9}
    loud = shown(STATS | {"fetch": remote})
    assert line_with(loud, "failed transfers").split()[-1] == "8"
    assert line_with(loud, "failed lookups").split()[-1] == "9"


def test_peers_without_a_known_name_are_shown_by_incarnation():
    (peer,) = STATS["fetch"]["peers"]
    unknown = peer | {"incarnation": "c" * 16}
    remote = STATS["fetch"] | {"peers": [peer, unknown, peer | {"asked": 0}]}
    lines = shown(STATS | {"fetch": remote}).splitlines()
    start = lines.index(next(line for line in lines if line.startswith("Peers")))
    assert [line.split()[0] for line in lines[start + 2 : start + 4]] == ["c" * 16, "host-8"]
    assert lines[start + 4] == "", "who was not asked anything is not shown"
    remote = STATS["fetch"] | {"peers": [unknown | {"node": "tcp://peer:7070"}]}
    assert "well" not in line_with(shown(STATS | {"fetch": remote}), "tcp://peer:7070")


@pytest.mark.parametrize(
    ("health", "word"),
    [
        ({"suspended_s": 0.0}, "well"),
        ({"suspended_s": 0.0, "suspected": True}, "suspected"),
        ({"suspended_s": 2.0, "suspected": True}, "left alone for 2.0 s"),
    ],
)
def test_the_health_of_a_peer(health, word):
    (peer,) = STATS["fetch"]["peers"]
    text = shown(STATS | {"fetch": STATS["fetch"] | {"peers": [peer | health]}})
    assert word in line_with(text, "host-8")


def test_a_fresh_daemon_has_little_to_show():
    mine = STATS["tenants"]["red"]
    empty = mine | {
        "namespaces": {},
        "hard_pinned_bytes": 0,
        "space": mine["space"] | {"classes": [], "bytes_used": 0},
    }
    alone = {"cluster": STATS["cluster"] | {"others": 0, "directory": None}}
    idle = {"fetch": {}, "replication": {}}
    text = shown(STATS | {"tenants": {"red": empty}} | alone | idle)
    for word in ("Namespaces", "Slots", "Peers", "pinned", "Copies", "nodes", "cluster"):
        assert word not in text
    assert "0 reads found nothing" in text


@pytest.mark.parametrize("width", [40, 80, 300])
def test_any_width_of_terminal(width):
    text = shown(STATS, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "host-7" in text


def test_every_counter_that_is_shown_exists():
    shown_keys = {key for _, entries, _ in _COUNTERS for key, _ in entries}
    assert shown_keys <= set(Counters.__struct_fields__)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1000, "1000 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (150.4 * 1024, "150 KiB"),
        (1 << 20, "1 MiB"),
        (5 << 40, "5 TiB"),
        (3 << 60, "3072 PiB"),
    ],
)
def test_sizes_for_people(nbytes, text):
    assert size_text(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.9, "0 s"), (59.9, "59 s"), (60, "1 min 0 s"), (3725, "1 h 2 min"), (172_800, "2 d 0 h")],
)
def test_times_for_people(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("typed", "seconds", "text"),
    [
        ("0", 0, "0s"),
        ("30s", 30, "30s"),
        ("15m", 900, "15m"),
        ("12h", 43_200, "12h"),
        ("7d", 604_800, "7d"),
        ("36h", 129_600, "36h"),
        ("90s", 90, "90s"),
        ("1.5h", 5_400, "90m"),
        ("0.25s", 0.25, "0.25s"),
        ("3600s", 3_600, "1h"),
    ],
)
def test_times_that_operators_type(typed, seconds, text):
    assert period(typed) == seconds
    assert period_text(seconds) == text


@given(st.integers(1, 10**6), st.sampled_from("smhd"))
def test_a_time_is_shown_as_it_can_be_typed(number, unit):
    seconds = period(f"{number}{unit}")
    assert period(period_text(seconds)) == seconds


@pytest.mark.parametrize(
    "text", ["", "5", "h", "-1h", "1 h", "1w", "1e3s", "1h30m", "nan", "\u0661s"]
)
def test_what_is_no_time(text):
    with pytest.raises(InvalidRequest, match="is no time"):
        period(text)


@pytest.mark.parametrize(
    ("used", "capacity", "text"),
    [
        (0, 64 << 30, "0/64 GiB"),
        (3 << 29, 64 << 30, "1.5/64 GiB"),
        (64 << 30, 64 << 30, "64/64 GiB"),
        (1 << 20, 64 << 30, "0.0/64 GiB"),
        (5, 10, "5/10 B"),
        (1 << 39, 1 << 40, "0.5/1 TiB"),
    ],
)
def test_how_much_of_something(used, capacity, text):
    assert used_text(used, capacity) == text


# ---- the cluster --------------------------------------------------------------------------------------


def node(name: str, letter: str, **changes) -> dict:
    return {
        "node": name,
        "incarnation": letter * 16,
        "state": "serving",
        "transports": [{"url": f"tcp://10.0.0.{ord(letter) - 96}:7070", "metadata": ""}],
        "tiers": [{"name": "dram", "capacity_bytes": 64 << 30, "used_bytes": 3 << 29}],
        "labels": {"zone": "a", "rack": "7"},
        "version": "1.2.3",
        "protocol": 2,
        "drain": None,
    } | changes


DRAIN = {
    "phase": "copying",
    "blocks": 450,
    "blocks_total": 1000,
    "copied": 120,
    "copied_bytes": 3 << 29,
    "failed": 0,
    "left": 0,
    "leases": 0,
}
DIGEST = "0123456789abcdef0123456789abcdef"
ENTRY = {
    "tenant": "red",
    "digest": DIGEST,
    "fields": json.dumps({"model": "llama [8b]", "format_version": 1}),
    "parts": [[1 << 20, "full", 0, 1], [1 << 20, "full", 0, 1]],
    "epoch": 2,
    "fence": 0,
    "settings": DEFAULTS | {"replicas": 3},
}
CLUSTER = {
    "cluster": "prod",
    "node": "host-1",
    "incarnation": "a" * 16,
    "standing": "member",
    "state": "serving",
    "nodes": [node("host-1", "a"), node("host-2", "b")],
    "peers": [],
    "drains": [],
    "namespaces": [ENTRY],
    "directory": DIRECTORY,
    "leases_lost": 0,
    "swept": 0,
}


def test_the_nodes_of_a_cluster_on_a_narrow_terminal():
    text = printed(show_nodes, CLUSTER)
    assert text.startswith("cluster prod, seen by node host-1: 2 nodes, version 1.2.3\n")
    words = line_with(text, "* host-1").split()
    assert words[:4] == ["*", "host-1", "serving", "a" * 8]
    assert "tcp://10.0.0.1:7070" in words
    assert words[-2:] == ["1.5/64", "GiB"]
    assert line_with(text, "  host-2").split()[:3] == ["host-2", "serving", "b" * 8]
    assert "rack=7, zone=a" in text
    assert "lag 0.2 s, 12 queued" in text
    assert text.count("host-2") == 1
    assert max(map(len, text.splitlines())) <= 80


def test_copies_of_what_others_keep_are_part_of_what_is_used() -> None:
    assert "secondary" not in printed(show_nodes, CLUSTER)
    tier = {"name": "dram", "capacity_bytes": 64 << 30, "used_bytes": 0, "secondary_bytes": 5 << 30}
    nodes = [node("host-1", "a", tiers=[tier]), node("host-2", "b")]
    lines = printed(show_nodes, CLUSTER | {"nodes": nodes}, width=200).splitlines()
    head = next(line for line in lines if "secondary" in line)
    first = next(line for line in lines if "host-1 " in line and "tcp" in line)
    second = next(line for line in lines if "host-2 " in line and "tcp" in line)
    end = head.index("of it secondary") + len("of it secondary")
    assert first[:end].endswith("5 GiB") and "5/64 GiB" in first
    assert second[:end].endswith(" 0 B")


def test_what_is_expected_of_pulling_from_others():
    link = {
        "node": "host-2",
        "incarnation": "b" * 16,
        "distance": "zone",
        "latency_s": 0.00125,
        "bytes_s": 200 << 20,
        "latency_age_s": 2.0,
        "bytes_age_s": None,
        "inflight_bytes": 0,
        "path": "nixl://10.0.0.2:7071",
    }
    text = printed(show_nodes, CLUSTER | {"links": [link]}, width=120)
    words = line_with(text, "nixl://10.0.0.2:7071")
    assert "zone" in words
    assert "1.2 ms" in words
    assert "200 MiB/s" in words
    assert "rate assumed" in words
    assert "Pulling from others" not in printed(show_nodes, CLUSTER)


def test_versions_are_shown_where_they_differ():
    nodes = [
        node("host-1", "a"),
        node("host-2", "b", version="1.2.4"),
        node("host-3", "c", version="2.0.0", protocol=3),
    ]
    text = printed(show_nodes, CLUSTER | {"nodes": nodes}, width=120)
    assert "version 1.2.3" not in text.splitlines()[0]
    assert line_with(text, "* host-1").rstrip().endswith("1.2.3")
    assert line_with(text, "host-2").rstrip().endswith("1.2.4")
    assert line_with(text, "host-3").rstrip().endswith("2.0.0, protocol 3")


def test_nodes_that_are_drained():
    draining = node("host-2", "b", state="draining", drain=DRAIN | {"failed": 7})
    waiting = node("host-3", "c", state="draining", drain=DRAIN | {"phase": "waiting", "leases": 1})
    nodes = [node("host-1", "a"), draining, waiting]
    text = printed(
        show_nodes, CLUSTER | {"nodes": nodes, "drains": ["host-1", "host-2", "host-9"]}, width=200
    )
    assert "serving, to drain" in line_with(text, "* host-1")
    assert "draining 45%" in line_with(text, "  host-2")
    assert (
        "host-2 is being drained: 450 of 1,000 blocks looked at, 120 copied, 1.5 GiB, "
        "7 that only it has found no other place\n"
    ) in text
    assert "waiting for 1 lease to end" in line_with(text, "host-3 is being drained")
    assert "`kvpool drain host-9 --cancel`" in line_with(text, "host-9 is drained and not here")
    assert text.count("is drained and not here") == 1


@pytest.mark.parametrize(
    ("standing", "state", "words"),
    [
        ("away", "serving", "etcd does not answer"),
        ("unsure", "serving", "stopped or asleep"),
        ("lost", "serving", "as a new incarnation"),
        ("out", "joining", "its log says why"),
        ("out", "gone", "`kvpool drain host-1 --cancel` brings it back"),
    ],
)
def test_a_node_that_is_no_member_says_so_loudly(standing, state, words):
    known = CLUSTER | {"standing": standing, "state": state}
    text = printed(show_nodes, known, width=400)
    assert text.splitlines()[1].startswith(f"this node is not a member ({standing}): ")
    assert words in text.splitlines()[1]
    text = shown(
        STATS
        | {"node": "host-1", "cluster": STATS["cluster"] | {"standing": standing, "state": state}},
        width=400,
    )
    assert words in line_with(text, "not a member")


def test_a_member_says_nothing_of_its_standing():
    assert "member" not in printed(show_nodes, CLUSTER) + shown(STATS)


def test_the_state_of_the_directory():
    assert "connected" in printed(show_nodes, CLUSTER)
    broken = DIRECTORY | {"connected": False, "failures": 1, "repairing": 300}
    text = printed(show_nodes, CLUSTER | {"directory": broken}, width=200)
    line = line_with(text, "directory does not answer")
    assert "300 to be announced again" in line
    assert "1 failure" in line
    text = printed(show_nodes, CLUSTER | {"directory": None})
    assert "no directory: other nodes are asked one by one" in text


def test_a_node_that_is_alone():
    alone = CLUSTER | {
        "nodes": [node("host-1", "a", labels={}, transports=[])],
        "peers": ["tcp://x:1"],
        "directory": None,
    }
    text = printed(show_nodes, alone)
    assert "labels" not in text
    assert "none" in line_with(text, "* host-1")
    assert "tcp://x:1" in line_with(text, "pulls also from")


@pytest.mark.parametrize("width", [60, 80, 300])
def test_any_width_of_terminal_for_the_cluster(width):
    rows = namespace_rows(CLUSTER, node_stats(**STATS), "red")
    for text in (printed(show_nodes, CLUSTER, width), printed(show_namespaces, rows, width)):
        assert max(map(len, text.splitlines())) <= width


def test_namespaces_of_the_cluster_and_of_this_node():
    other = "f" * 32
    mine = STATS["tenants"]["red"]
    here = mine["namespaces"] | {
        other: {
            "fields": {"model": "new"},
            "epoch": 0,
            "settings": DEFAULTS,
            "blocks": [9],
            "part_bytes": [1024],
        }
    }
    foreign = ENTRY | {"tenant": "blue", "digest": "e" * 32}
    absent = ENTRY | {"digest": "d" * 32, "epoch": 5, "fence": 5}
    known = CLUSTER | {"namespaces": [ENTRY, foreign, absent]}
    stats = STATS | {"tenants": {"red": mine | {"namespaces": here}}}
    rows = {row["digest"]: row for row in namespace_rows(known, node_stats(**stats), "red")}
    assert len(rows) == 4
    assert (rows[DIGEST]["blocks"], rows[DIGEST]["bytes"]) == (700, 1400 << 20)
    assert (rows["e" * 32]["blocks"], rows["e" * 32]["bytes"]) == (None, None)
    assert (rows["e" * 32]["asked"], rows[other]["asked"]) == (None, 0)
    assert (rows["d" * 32]["blocks"], rows["d" * 32]["bytes"]) == (0, 0)
    assert (rows[other]["agreed"], rows[other]["bytes"]) == (False, 9 << 10)
    text = printed(show_namespaces, list(rows.values()), width=120)
    line = line_with(text, DIGEST[:12])
    assert line.split()[0] == "red"
    assert "model=llama [8b]" in line
    assert line.split()[-7:] == ["2", "3", "2", "MiB", "700", "1.4", "GiB"]
    assert "0?" in line_with(text, other[:12]).split()
    assert "?: not agreed with the cluster yet" in text
    assert f"fenced at this epoch: {'d' * 12}. " in text
    assert "format_version" not in text
    assert "SSD" not in text


def test_a_node_that_is_alone_agrees_with_itself_and_says_what_its_disks_hold():
    mine = STATS["tenants"]["red"]
    disk = {"where": "/d", "namespaces": {DIGEST: {"held_bytes": 3 << 30}}}
    spaces = {DIGEST: mine["namespaces"][DIGEST] | {"blocks": [0], "part_bytes": [1024]}}
    tenant = mine | {"namespaces": spaces, "usage": {"ssd": [disk]}}
    known = CLUSTER | {"namespaces": [], "joined": False}
    rows = namespace_rows(known, node_stats(**STATS | {"tenants": {"red": tenant}}), "red")
    assert (rows[0]["agreed"], rows[0]["ssd_bytes"]) == (True, 3 << 30)
    text = printed(show_namespaces, rows, width=120)
    assert "on SSD" in text and "3 GiB" in line_with(text, DIGEST[:12])
    assert "?" not in text and "agreed" not in text


def test_settings_are_shown_where_a_namespace_has_them():
    kept = DEFAULTS | {"write": "through", "ttl_s": 43_200.0}
    rows = namespace_rows(
        CLUSTER | {"namespaces": [ENTRY | {"settings": kept}]}, node_stats(**STATS), "red"
    )
    other = rows[0] | {"digest": "f" * 32, "settings": DEFAULTS}
    text = printed(show_namespaces, [*rows, other], width=200)
    assert f"\n{DIGEST[:12]}  write through, ttl 12h\n" in text
    assert text.count("f" * 12) == 1, "it has no settings"
    assert "Settings" not in printed(show_namespaces, [other])
    coded = rows[0] | {"settings": DEFAULTS | {"ssd_codec": "blosc2"}}
    text = printed(show_namespaces, [coded])
    assert f"\n{DIGEST[:12]}  ssd-codec blosc2" in text
    limited = rows[0] | {"settings": DEFAULTS | {"dram_quota": 0.125, "ssd_quota": 50 << 30}}
    text = printed(show_namespaces, [limited])
    shown_quota = line_with(text, "quota").split()[-1]
    assert shown_quota == "dram=12.5%,ssd=50GiB"
    assert quotas(shown_quota) == {"dram": 0.125, "ssd": 50 << 30}, "it can be typed"
    assert max(map(len, text.splitlines())) <= 80
    foreign = limited | {"tenant": "blue", "blocks": None, "bytes": None, "ssd_bytes": None}
    text = printed(show_namespaces, [limited, foreign])
    assert f"blue    {DIGEST[:12]}  quota dram=12.5%,ssd=50GiB" in text


def test_peers_of_the_configuration_that_do_not_answer():
    silent = {"url": "tcp://x:1", "silent_s": 30.0, "error": ""}
    told = CLUSTER | {"peers": ["tcp://x:1"], "silent_peers": [silent]}
    assert "peer tcp://x:1 has not answered for 30 s; `kvpool doctor`" in printed(show_nodes, told)
    assert "has not answered" not in printed(show_nodes, CLUSTER | {"peers": ["tcp://x:1"]})


def test_quotas_are_sizes_or_shares_by_tier():
    assert quotas("dram=20%,ssd=50GiB") == {"dram": 0.2, "ssd": 50 << 30}
    assert quotas("ssd=100%") == {"ssd": 1.0}
    assert isinstance(quotas("ssd=100%")["ssd"], float), "a whole number is bytes"
    assert quotas("dram=none, ssd=0") == {"dram": 0, "ssd": 0}
    for wrong in ("", "dram", "20%", "dram=", "dram=lots", "gpu=1GiB", "ssd=1,ssd=2", "ssd=120%"):
        with pytest.raises(InvalidRequest, match="quota"):
            quotas(wrong)


def test_no_namespaces():
    nothing = CLUSTER | {"namespaces": []}
    stats = STATS | {"tenants": {"red": STATS["tenants"]["red"] | {"namespaces": {}}}}
    assert "no engine has opened" in printed(
        show_namespaces, namespace_rows(nothing, node_stats(**stats), "red")
    )


FOUND = [
    {
        "key": "00" * 16,
        "namespace": DIGEST,
        "parts": 2,
        "replicas": [
            {"node": "host-1", "incarnation": "a" * 16, "tier": "dram", "parts": 2},
            {"node": "host-2", "incarnation": "b" * 16, "tier": "gpu", "parts": 1},
        ],
    }
]


def test_replicas_of_a_block():
    text = printed(show_replicas, FOUND)
    assert line_with(text, "host-1").split() == [
        "00" * 16,
        DIGEST[:12],
        "host-1",
        "dram",
        "2",
        "of",
        "2",
    ]
    assert line_with(text, "host-2").split()[-4:] == ["gpu", "1", "of", "2"]
    assert printed(show_replicas, []) == ""


def test_what_was_not_found_is_named():
    assert not_found([bytes(16)], FOUND, DIRECTORY) == ""
    others = [bytes([n]) * 16 for n in range(1, 6)]
    text = not_found([bytes(16), *others[:1]], FOUND, DIRECTORY)
    assert text.startswith(f"not found: {'01' * 16} (")
    assert "directory" not in text
    text = not_found(others, FOUND, None)
    assert f"{'03' * 16} and 2 more" in text
    assert "without a directory nodes know only what they hold themselves" in text
    assert "does not answer" in not_found(others, [], DIRECTORY | {"connected": False})


# ---- what operators type -------------------------------------------------------------------------------

digests = st.text("0123456789abcdef", min_size=32, max_size=32)


@given(
    known=st.sets(digests, min_size=1, max_size=6),
    length=st.integers(4, 32),
    upper=st.booleans(),
    data=st.data(),
)
def test_a_unique_beginning_of_a_digest_is_enough(known, length, upper, data):
    digest = data.draw(st.sampled_from(sorted(known)))
    text = digest[:length].upper() if upper else digest[:length]
    alike = [one for one in known if one[:length] == digest[:length]]
    if len(alike) == 1:
        assert full_digest(text, known).hex() == digest
    else:
        with pytest.raises(InvalidRequest, match="give more digits"):
            full_digest(text, known)


def test_beginnings_that_several_have():
    known = [f"abcd{n}" + "0" * 27 for n in range(8)]
    with pytest.raises(InvalidRequest, match=r"^abcd is the beginning of .* and 3 more: give more"):
        full_digest("abcd", known)
    assert full_digest("abcd7", known).hex() == known[7]


def test_whole_digests_need_not_be_known():
    assert full_digest("AB" * 16, []) == b"\xab" * 16


@pytest.mark.parametrize("text", ["", "abc", "xyzw", "0x12", "ab cd", "a" * 33, "٣٣٣٣", "abcd\n"])
def test_what_is_no_digest(text):
    with pytest.raises(InvalidRequest, match=r"4 to 32 hex digits .*kvpool namespaces"):
        full_digest(text, ["a" * 32])


def test_a_digest_that_nobody_knows():
    with pytest.raises(InvalidRequest, match="no namespace of this tenant begins with beef"):
        full_digest("beef", ["a" * 32])


def test_a_tenant_names_its_own_namespaces_only():
    foreign = ENTRY | {"tenant": "blue", "digest": "e" * 32}
    there = ENTRY | {"digest": "d" * 32}
    known = CLUSTER | {"namespaces": [foreign, there]}
    assert known_digests(known, node_stats(**STATS), "red") == {DIGEST, "d" * 32}


@given(st.binary(min_size=16, max_size=16))
def test_block_keys(key):
    assert block_key(key.hex()) == block_key(key.hex().upper()) == key


@pytest.mark.parametrize("text", ["", "00" * 15, "00" * 17, "0g" * 16, " " * 32, "00 " * 10 + "00"])
def test_what_is_no_block_key(text):
    with pytest.raises(InvalidRequest, match="32 hex digits"):
        block_key(text)


# ---- following a drain ---------------------------------------------------------------------------------


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


def draining(**progress) -> dict:
    record = node("host-2", "b", state="draining", drain=DRAIN | progress)
    return CLUSTER | {"nodes": [node("host-1", "a"), record], "drains": ["host-2"]}


SERVING = CLUSTER
LEFT = CLUSTER | {"nodes": [node("host-1", "a")], "drains": ["host-2"]}
MARKED_GONE = LEFT | {"nodes": [node("host-2", "b", state="gone", drain=DRAIN | {"phase": "done"})]}
OURSELVES = {"node": "host-2", "state": "gone"}
AWAY = Unavailable("no answer")


def followed(*looks, timeout_s: float = 60.0) -> tuple[Ended, list[dict], float]:
    """The end of following host-2, all that was shown, and how long it took. The last look lasts."""
    left = list(looks)

    def look():
        found = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(found, Exception):
            raise found
        return found

    time, seen = Time(), []
    start = time.now
    ended = follow(look, "host-2", seen.append, timeout_s, clock=time.clock, sleep=time.sleep)
    return ended, seen, time.now - start


@pytest.mark.parametrize(
    ("looks", "how"),
    [
        ([SERVING, draining(), draining(phase="done"), LEFT], "drained"),
        ([draining(phase="done"), MARKED_GONE], "drained"),
        ([MARKED_GONE], "drained"),
        ([draining(phase="done"), draining(phase="done") | OURSELVES], "drained"),
        ([draining(), ClusterUnavailable("busy"), AWAY, draining(phase="done"), LEFT], "drained"),
        ([SERVING, LEFT], "vanished"),
        ([draining(), draining(phase="waiting"), LEFT], "drained"),
        ([draining(), draining(), LEFT], "vanished"),
        ([draining(), LEFT | OURSELVES], "vanished"),
        ([LEFT], "absent"),
        ([LEFT | OURSELVES], "absent"),
        ([SERVING, draining(), SERVING], "recalled"),
        ([draining(), draining() | {"drains": []}], "recalled"),
        ([SERVING], "late"),
        ([SERVING, draining()], "late"),
    ],
)
def test_the_ways_in_which_a_drain_ends(looks, how):
    ended, _, took = followed(*looks)
    assert ended.how == how
    assert took < 61
    assert (took >= 60) == (how == "late")


def test_progress_is_shown_and_the_last_word_is_kept():
    looks = [
        SERVING,
        draining(blocks=1),
        draining(blocks=2),
        draining(blocks=3, phase="done"),
        LEFT,
    ]
    ended, seen, _ = followed(*looks)
    assert [progress["blocks"] for progress in seen] == [1, 2, 3]
    assert ended.progress == seen[-1]


def test_a_daemon_that_stays_away_ends_the_wait():
    time = Time()

    def look():
        raise AWAY

    with pytest.raises(Unavailable, match="no answer"):
        follow(look, "host-2", print, 1e9, clock=time.clock, sleep=time.sleep)
    assert PATIENCE_S <= time.now - 1000 < PATIENCE_S + 1


@pytest.mark.parametrize(
    ("how", "progress", "good", "words"),
    [
        ("drained", {}, True, "120 blocks that only it held were copied to others, 1.5 GiB"),
        ("drained", {"copied": 1}, True, "1 block that only it held was copied"),
        ("drained", {"copied": 0}, True, "others hold whatever it held"),
        ("drained", {"left": 2}, True, "and 2 blocks stay on its disks for want of time"),
        ("drained", {"failed": 3}, False, "3 blocks that only it holds found no other place"),
        ("vanished", {}, False, "not seen to finish its drain (450 of 1,000 blocks looked at"),
        ("absent", None, True, "It stays out until"),
        ("recalled", {}, False, "was cancelled by another operator"),
        ("late", {}, False, "not drained after 60 s"),
        ("late", None, False, "it continues"),
    ],
)
def test_what_is_said_of_the_end(how, progress, good, words):
    last = None if progress is None else DRAIN | progress
    text, well = verdict("host-2", Ended(how, last), 60.0)
    assert well is good
    assert words in text
    assert "host-2" in text
    assert "\n" not in text
    if not good and how != "recalled":
        assert "`kvpool drain host-2 --cancel`" in text


def test_lines_for_a_log_are_few():
    time, out = Time(), io.StringIO()
    lines = Lines("host-2", Console(file=out, width=20), time.clock)
    for blocks in range(400):
        lines.show(DRAIN | {"blocks": blocks // 2})
        time.sleep(0.1)
    said = out.getvalue().splitlines()
    assert said[0].startswith("host-2: 0 of 1,000 blocks looked at")
    assert 15 <= len(said) <= 20, "40 seconds, a line every two"
    assert len(set(said)) == len(said)


def test_a_bar_on_a_terminal(monkeypatch, capsys):
    looks = iter([draining(), draining(phase="waiting", leases=2), draining(phase="done"), LEFT])
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("kvpool.cli.render.drain.LOOK_S", 0.001)
    text, good = carry_out(SimpleNamespace(cluster=lambda: next(looks)), "host-2", 20.0)
    assert good and "is drained" in text
    shown_there = capsys.readouterr().err
    assert "host-2" in shown_there
    assert "━" in shown_there
    assert "45%" in shown_there


# ---- the commands --------------------------------------------------------------------------------------


def test_version():
    for words in (["version"], ["--version"]):
        assert CliRunner().invoke(verbs.app, words).output == f"{__version__}\n"


COMMANDS = (
    "serve",
    "status",
    "doctor",
    "nodes",
    "locate",
    "drain",
    "namespaces",
    "clear",
    "configure",
    "top",
    "events",
    "lookup",
    "blocks",
    "pin",
    "unpin",
    "evict",
    "warm",
    "move",
    "scrub",
    "tiers",
    "bench local",
    "bench transfer",
    "put",
    "get",
    "ls",
    "rm",
)


def test_a_command_is_in_a_module_of_its_own() -> None:
    found = [(each.name, each.callback) for each in verbs.app.registered_commands]
    for group in verbs.app.registered_groups:
        assert group.typer_instance is not None
        name = group.name or group.typer_instance.info.name
        found.append((name, group.typer_instance.registered_commands[0].callback))
    names = {
        (name or callback.__name__, callback.__module__) for name, callback in found if callback
    }
    assert names == {
        (command, f"kvpool.cli.{cli.MODULES.get(command, command)}") for command in cli.COMMANDS
    }


def test_help_names_the_commands():
    text = CliRunner().invoke(verbs.app, ["--help"]).output
    for command in (*COMMANDS, "version"):
        assert f" {command.split()[0]} " in text


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_has_an_example(command):
    words = [*command.split(), "--help"]
    text = CliRunner().invoke(verbs.app, words, env={"COLUMNS": "100"}).output
    assert f" kvpool {command}" in text
    assert "Options" in text


def test_secrets_are_no_options():
    """Every user of a machine sees the arguments of its processes."""
    for command in COMMANDS:
        words = [*command.split(), "--help"]
        text = CliRunner().invoke(verbs.app, words, env={"COLUMNS": "200"}).output
        flags = {word for word in text.split() if word.startswith("--")}
        assert "--socket" in flags
        # The path of a file, which holds digests; and whether passwords may be sent, not which.
        others = {"--http-tokens", "--plaintext-passwords", "--no-plaintext-passwords"}
        assert not {flag for flag in flags - others if "password" in flag or "token" in flag}
        assert "--cluster-secret" not in flags


@pytest.mark.parametrize(
    "url", ["redis://user:hush@host", "redis://:hush@host:1/2", "rediss+cluster://u:hush@a:1,b:2"]
)
def test_a_password_on_the_command_line_is_refused(monkeypatch, url):
    monkeypatch.setattr("kvpool.daemon.server.server.serve", lambda *_: None)
    result = CliRunner().invoke(verbs.app, ["serve", "--directory", url])
    assert isinstance(result.exception, ConfigError)
    assert "KVPOOL_DIRECTORY_PASSWORD" in str(result.exception)
    assert "hush" not in str(result.exception)


@pytest.mark.parametrize(
    "url", ["redis://host:6379/2", "redis://user@host", "redis+sentinel://a:1,b:2/main"]
)
def test_other_directories_are_taken_from_the_command_line(monkeypatch, url):
    seen = []
    monkeypatch.setattr("kvpool.daemon.server.server.serve", lambda config, *_: seen.append(config))
    result = CliRunner().invoke(verbs.app, ["serve", "--directory", url])
    assert result.exit_code == 0, result.output
    assert [config.directory for config in seen] == [url]


def started(**settings: Any) -> Started:
    config: Any = SimpleNamespace(
        **{"node": "n", "socket": "/s", "join": "", "cluster": "prod", "directory": "", "http": ()}
        | settings
    )
    return Started(config, 32 << 20, ["tcp://a:1", "tcp://b:2"], "a" * 16, 1)


def test_the_first_line_of_a_daemon_ends_with_its_urls(capsys):
    serving._say_ready(started())
    line = f"kvpool {__version__} ready: node n, 32 MiB of DRAM, socket /s"
    assert capsys.readouterr().out == f"{line}, peers at tcp://a:1, tcp://b:2\n"


def test_the_second_line_of_a_daemon_is_its_cluster(capsys):
    hidden = {"join": "etcd://user@e:1", "directory": "redis://:hush@r"}
    serving._say_ready(started(**hidden))
    first, second = capsys.readouterr().out.splitlines()
    assert first.rsplit("peers at ", 1)[1] == "tcp://a:1, tcp://b:2"
    assert second == (
        f"joined cluster prod as incarnation {'a' * 16}, 1 other node to pull from, with a directory"
    )


@pytest.fixture
def daemon(monkeypatch):
    """A client of a daemon that knows CLUSTER and STATS; calls are checked against the real one's."""
    double = create_autospec(OperatorClient, instance=True)
    double.__enter__.return_value = double
    double.cluster.return_value = CLUSTER
    double.stats.return_value = node_stats(**STATS)
    double.clear.return_value = 3
    monkeypatch.setattr(base, "client_of", lambda socket, tenant: double)
    return double


def run(*words: str) -> SimpleNamespace:
    """A command of tenant red: its exit status, what it printed, and its error."""
    result = CliRunner().invoke(verbs.app, [*words, "--tenant", "red"])
    error = result.exception
    if error is not None and not isinstance(error, (SystemExit, KvpoolError)):
        raise error
    return SimpleNamespace(
        status=result.exit_code, out=result.stdout, err=result.stderr, error=error
    )


def test_nodes(daemon):
    done = run("nodes")
    assert (done.status, done.err) == (0, "")
    assert "* host-1" in done.out
    assert json.loads(run("nodes", "--json").out) == CLUSTER


def test_status_names_peers_where_it_may(daemon):
    named = CLUSTER | {"nodes": [node("host-8", "b")]}
    daemon.cluster.return_value = named
    assert "host-8" in run("status").out
    daemon.cluster.side_effect = NotAuthenticated("operators only")
    done = run("status")
    assert done.status == 0
    assert "b" * 16 in done.out
    assert decode(run("status", "--json").out.encode()) == node_stats(**STATS)


def test_quiet_status_says_with_its_exit_status_whether_the_daemon_answers(daemon):
    done = run("status", "--quiet")
    assert (done.status, done.out, done.err) == (0, "", "")
    daemon.stats.side_effect = Unavailable("the daemon does not answer")
    done = run("status", "-q")
    assert done.out == ""
    assert isinstance(done.error, Unavailable)
    assert base.exit_status(done.error) == 3


def test_locate(daemon):
    def answer(message, *, node):
        asked.append((node, message.keys, message.digest))
        return FOUND if bytes(16) in message.keys else []

    asked: list = []
    daemon.ask_node.side_effect = answer
    done = run("locate", "00" * 16)
    assert (done.status, done.err) == (0, "")
    assert "host-2" in done.out
    assert asked == [("host-1", bytes(16), b"")]
    asked.clear()
    done = run("locate", "00" * 16, "FF" * 16, "ff" * 16, "--namespace", "0123")
    assert done.status == 1
    assert done.err.startswith(f"kvpool: not found: {'ff' * 16} (")
    assert "host-2" in done.out
    digest = bytes.fromhex(DIGEST)
    assert asked == [
        ("host-1", bytes(16) + b"\xff" * 16, digest),
        ("host-2", b"\xff" * 16, digest),
    ]
    done = run("locate", "00" * 16, "ff" * 16, "--json")
    assert done.status == 1
    assert json.loads(done.out) == FOUND


def test_locate_goes_on_where_a_namespace_is_not_open_or_nobody_answers(daemon):
    daemon.ask_node.side_effect = [InvalidRequest("it is not open here"), FOUND]
    done = run("locate", "00" * 16, "--namespace", "0123")
    assert (done.status, done.err) == (0, "")
    assert "host-2" in done.out
    daemon.ask_node.side_effect = [ClusterUnavailable("it hangs"), FOUND]
    done = run("locate", "00" * 16)
    assert (done.status, done.err) == (0, "kvpool: host-1: it hangs\n")
    daemon.ask_node.side_effect = [InvalidRequest("too many keys"), InvalidRequest("so many")]
    assert str(run("locate", "00" * 16).error) == "too many keys"


def test_locate_refuses_what_is_no_key_before_it_asks(daemon):
    assert isinstance(run("locate", "abcd").error, InvalidRequest)
    daemon.ask_node.assert_not_called()


def test_namespaces(daemon):
    done = run("namespaces")
    assert done.status == 0
    assert DIGEST[:12] in done.out
    (row,) = json.loads(run("namespaces", "--json").out)
    assert (row["digest"], row["epoch"], row["blocks"]) == (DIGEST, 2, 700)


def test_clear(daemon):
    done = run("clear", "0123", "--yes")
    assert done.status == 0
    assert f"namespace {DIGEST} of tenant red is in epoch 3" in done.out
    assert "continue in the new epoch" in done.out
    daemon.clear.assert_called_with(bytes.fromhex(DIGEST), fence=False)
    assert "until they open it again" in run("clear", "0123", "--fence", "-y").out
    daemon.clear.assert_called_with(bytes.fromhex(DIGEST), fence=True)
    assert isinstance(run("clear", "beef").error, InvalidRequest)
    assert daemon.clear.call_count == 2


NOTHING = dict.fromkeys(
    inspect.signature(OperatorClient.configure).parameters.keys() - {"self", "digest"}
)


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("--replicas 2", {"replicas": 2}),
        ("--write through", {"write": "through"}),
        ("--write none", {"write": "none"}),
        ("--write default", {"write": ""}),
        ("--ttl 12h", {"ttl_s": 43_200.0}),
        ("--ttl 0", {"ttl_s": 0.0}),
        ("--ssd-codec blosc2", {"ssd_codec": "blosc2"}),
        ("--ssd-codec none", {"ssd_codec": ""}),
        ("--write-remote none", {"write_remote": "none"}),
        ("--quota dram=20%,ssd=1GiB", {"dram_quota": 0.2, "ssd_quota": 1 << 30}),
        ("--quota ssd=none", {"ssd_quota": 0}),
        ("--ttl 7d --replicas 1", {"ttl_s": 604_800.0, "replicas": 1}),
    ],
)
def test_configure(daemon, words, change):
    done = run("configure", "0123", *words.split())
    assert (done.status, done.err) == (0, "")
    assert f"changed the settings of namespace {DIGEST} of tenant red" in done.out
    assert ("in the background" in done.out) == ("--replicas 2" in words)
    daemon.configure.assert_called_once_with(bytes.fromhex(DIGEST), **NOTHING | change)


def test_configure_refuses_what_makes_no_sense_before_it_asks(daemon):
    for words, status in (
        ("--replicas 0", 2),
        ("--replicas many", 2),
        ("", 1),
        ("--ttl 5", 1),
        ("--ttl forever", 1),
        ("--quota 20%", 1),
    ):
        done = run("configure", "0123", *words.split())
        assert done.status == status, words
        assert status == 2 or isinstance(done.error, InvalidRequest)
    daemon.configure.assert_not_called()


@pytest.mark.parametrize(
    "words",
    [("clear", "0123", "-y"), ("configure", "0123", "--replicas", "2"), ("drain", "host-2")],
)
@pytest.mark.parametrize("kind", [Unavailable, ClusterUnavailable])
def test_a_change_without_an_answer_is_in_doubt(daemon, words, kind):
    for change in (daemon.clear, daemon.configure, daemon.drain):
        change.side_effect = kind("etcd did not answer")
    error = run(*words).error
    assert type(error) is kind
    assert str(error).startswith("etcd did not answer. The command may still have taken effect")


def test_drain_to_the_end(daemon):
    daemon.cluster.side_effect = [draining(phase="done"), LEFT]
    done = run("drain", "host-2")
    assert done.status == 0
    assert done.out.startswith("host-2 is drained and has left the cluster: 120 blocks")
    assert done.err.startswith("host-2: 450 of 1,000 blocks looked at")
    daemon.drain.assert_called_once_with("host-2")


def test_a_drain_that_leaves_blocks_behind(daemon):
    daemon.cluster.side_effect = [draining(phase="done", failed=3), LEFT]
    done = run("drain", "host-2")
    assert (done.status, done.out) == (1, "")
    assert "3 blocks that only it holds found no other place" in done.err.splitlines()[-1]


def test_a_drain_that_takes_too_long(daemon):
    daemon.cluster.return_value = draining()
    done = run("drain", "host-2", "--timeout", "0")
    assert done.status == 1
    assert "not drained after 0 s" in done.err


def test_a_drain_that_nobody_waits_for(daemon):
    done = run("drain", "host-2", "--no-wait")
    assert (done.status, done.err) == (0, "")
    daemon.drain.assert_called_once_with("host-2")
    daemon.cluster.assert_not_called()


def test_a_drain_is_called_off(daemon):
    daemon.cluster.return_value = draining()
    done = run("drain", "host-2", "--cancel")
    assert done.status == 0
    assert "host-2 is no longer drained" in done.out
    daemon.drain.assert_called_once_with("host-2", wanted=False)
    daemon.cluster.return_value = CLUSTER
    assert "nobody wanted host-2 drained" in run("drain", "host-2", "--cancel").out


def test_an_interrupted_wait_leaves_the_drain_going(daemon):
    daemon.cluster.side_effect = [draining(), KeyboardInterrupt]
    done = run("drain", "host-2")
    assert done.status == base.EXIT_INTERRUPTED
    assert "the drain of host-2 continues" in done.err.splitlines()[-1]
    daemon.drain.assert_called_once_with("host-2")


def test_who_asks_is_read_from_the_environment(monkeypatch):
    seen = {}
    monkeypatch.setattr(
        "kvpool.client.OperatorClient", lambda path, **given: seen.update(given, path=path)
    )
    monkeypatch.setenv("KVPOOL_TOKEN", "mine")
    monkeypatch.setenv("KVPOOL_OPERATOR_TOKEN", "ours")
    base.client_of("/s", "red")
    assert (seen["path"], seen["tenant"]) == ("/s", "red")
    assert (seen["token"], seen["operator_token"], seen["connect"]) == ("mine", "ours", True)
    monkeypatch.delenv("KVPOOL_TOKEN")
    monkeypatch.delenv("KVPOOL_OPERATOR_TOKEN")
    base.client_of(None, "red")
    assert (seen["token"], seen["operator_token"]) == (None, "")


def test_status_without_a_daemon(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "kvpool.cli", "status", "--socket", str(tmp_path / "no.sock")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == base.EXIT_NO_DAEMON
    assert done.stdout == ""
    assert done.stderr.startswith("kvpool: no kvpool daemon answers at")
    assert "kvpool serve" in done.stderr
    assert done.stderr.count("\n") == 1


def test_serve_with_a_wrong_setting(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "kvpool.cli",
            "serve",
            "--policy",
            "astrology",
            "--memory",
            "16MiB",
            "--socket",
            str(tmp_path / "s"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == base.EXIT_ERROR
    assert "astrology" in done.stderr
    assert done.stderr.startswith("kvpool: ")
    assert done.stderr.count("\n") == 1


def test_flags_are_settings(monkeypatch, tmp_path):
    """Each flag of `serve` sets the setting of its name, and wins over the file."""
    file = tmp_path / "kvpool.toml"
    file.write_text('forward = true\nreplicas_max = 2\nlabels = { zone = "z" }\nclients_max = 3')
    pem = tmp_path / "pem"
    pem.touch(0o600)
    seen = {}

    def run(config, *_):
        seen["config"] = config

    monkeypatch.setattr("kvpool.daemon.server.server.serve", run)
    args = (
        f"serve --config {file} --socket /s --memory 1MiB --policy lru"
        " --listen tcp://a:1 --listen tcp://b:2"
        " --advertise tcp://x:1 --advertise tcp://y:2 --rail r0 --rail - --bind-source --pull-over tcp --probe-s 3 --peer tcp://c:3 --transfer-workers 2 --data-dir /d"
        " --node n --cluster k --join etcds://u@e:1 --join-ca /1 --join-cert /2 --join-key /3"
        " --directory rediss://r:1 --directory-ca /4 --directory-cert /5 --directory-key /6"
        " --label zone=a --label rack=7 --no-forward --member-ttl-s 9 --directory-timeout-s 0.25"
        " --replicas-max 4 --namespace-unused-days 9 --replication-bandwidth 1MiB --socket-mode 660 --peers-max 5 --lease-s-max 6 --departures-max 9"
        " --ssd /e=8MiB --ssd /f=1GiB --ssd-write none --ssd-bytes-per-day 1TiB --ssd-flush-s 3"
        " --ssd-drain-s 9 --memory-wait-s 4 --encryption-secret-file /e"
        " --audit-file /a --audit-file-bytes 1MiB --audit-files 2"
        " --object-store s3://b/p --object-bytes-max 1TiB --object-instance-credentials"
        " --no-events --engines-max 3 --device cuda:0=8GiB"
        f" --tls-cert {pem} --tls-key {pem} --tls-ca {pem} --tls-crl {pem} --plaintext --cluster-secret-file /s --operated-by m --operated-by n"
        " --operator-socket /o --plaintext-passwords --no-announce --receipts-bytes 9MiB"
        f" --http 127.0.0.1:7071 --http unix:/h --http-tokens {pem} --http-rate 7"
        f" --router http://r:1 --router-ca {pem} --otlp http://c:4318 --log-level error --log-format json -v"
    )
    result = CliRunner().invoke(verbs.app, args.split())
    assert result.exit_code == 0, result.output
    config = seen["config"]
    assert (config.socket, config.memory, config.policy) == ("/s", 1 << 20, "lru")
    assert (config.operator_socket, config.plaintext_passwords) == ("/o", True)
    assert (config.announce, config.receipts_bytes) == (False, 9 << 20)
    assert config.listen == ("tcp://a:1", "tcp://b:2")
    assert config.advertise == ("tcp://x:1", "tcp://y:2")
    assert config.peers == ("tcp://c:3",)
    assert (config.rails, config.bind_source, config.probe_s) == (("r0", ""), True, 3)
    assert config.pull_over == "tcp"
    assert (config.transfer_workers, config.data_dir, config.node, config.cluster) == (
        2,
        "/d",
        "n",
        "k",
    )
    assert (config.join, config.directory) == ("etcds://u@e:1", "rediss://r:1")
    assert (config.join_ca, config.join_cert, config.join_key) == ("/1", "/2", "/3")
    assert (config.directory_ca, config.directory_cert, config.directory_key) == ("/4", "/5", "/6")
    assert config.labels == {"zone": "a", "rack": "7"}
    assert (config.forward, config.replicas_max, config.replication_bandwidth) == (
        False,
        4,
        1 << 20,
    )
    assert (config.member_ttl_s, config.directory_timeout_s, config.lease_s_max) == (9, 0.25, 6)
    assert config.departures_max == 9
    assert (config.socket_mode, config.clients_max, config.peers_max) == (0o660, 3, 5)
    assert config.ssd == (DiskConfig("/e", 8 << 20), DiskConfig("/f", 1 << 30))
    assert (config.ssd_write, config.ssd_bytes_per_day, config.ssd_flush_s) == ("none", 1 << 40, 3)
    assert (config.ssd_drain_s, config.namespace_unused_days) == (9, 9)
    assert (config.object_store, config.object_bytes_max) == ("s3://b/p", 1 << 40)
    assert config.object_instance_credentials is True
    assert (config.events, config.engines_max) == (False, 3)
    assert config.device == DeviceConfig("cuda:0", 8 << 30)
    assert {config.tls_cert, config.tls_key, config.tls_ca, config.tls_crl} == {str(pem)}
    assert (config.plaintext, config.http) == (True, ("127.0.0.1:7071", "unix:/h"))
    assert (config.http_tokens, config.http_rate) == (str(pem), 7)
    assert (config.cluster_secret_file, config.operated_by) == ("/s", ("m", "n"))
    assert (config.routers, config.otlp) == (("http://r:1",), "http://c:4318")
    assert config.router_ca == str(pem)
    assert (config.log_level, config.log_format) == ("error", "json"), "-v is less than a level"
    secrets = {"cluster_secret", "join_password", "directory_password", "operator_token"}
    secrets |= {"router_token"}
    assert config.encryption_secret_file == "/e"
    audit = (config.audit_file, config.audit_file_bytes, config.audit_files)
    assert audit == ("/a", 1 << 20, 2)
    given = {word[2:].replace("-", "_") for word in args.split() if word.startswith("--")}
    given -= {"config", "peer", "label", "rail", "router", "no_forward", "no_events", "no_announce"}
    given |= {"peers", "labels", "rails", "routers", "forward", "events", "announce"}
    others = {"tenants", "publish_events", "clients_max", "encryption_secret_command"}
    assert given | secrets | others == set(SETTINGS)
    words = ["serve", "--clients-max", "7", "--forward", "--encryption-secret-command", "print it"]
    result = CliRunner().invoke(verbs.app, words)
    assert result.exit_code == 0, result.output
    assert (seen["config"].clients_max, seen["config"].forward) == (7, True)
    assert seen["config"].encryption_secret_command == "print it"
    assert seen["config"].listen == ()
    lists = {"KVPOOL_LISTEN": "tcp://a:1", "KVPOOL_HTTP": "unix:/h", "KVPOOL_LABELS": "zone=a"}
    result = CliRunner().invoke(verbs.app, ["serve", "--node", "n"], env=lists)
    assert result.exit_code == 0, result.output
    assert (seen["config"].listen, seen["config"].http) == (("tcp://a:1",), ("unix:/h",))
    assert seen["config"].labels == {"zone": "a"}, "what is not given does not hide the environment"


def test_errors_are_one_line_and_a_status(monkeypatch, capsys):
    def fail(prog_name):
        raise ConfigError("memory = 'x': give bytes")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1
    assert capsys.readouterr().err == "kvpool: memory = 'x': give bytes\n"


def test_the_entry_point(repo_root: Path):
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())
    assert project["project"]["scripts"]["kvpool"] == "kvpool.cli:main"


def test_the_client_imports_nothing_heavy():
    """An engine's process gets neither torch nor the daemon, an event loop or a terminal library."""
    code = "import sys, kvpool.client; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    for heavy in (
        "torch",
        "vllm",
        "uvloop",
        "asyncio",
        "rich",
        "typer",
        "kvpool.daemon.server.server",
    ):
        assert heavy not in loaded, heavy
    assert not any(name.startswith(("kvpool.transfer", "kvpool.daemon")) for name in loaded)


def test_a_secret_is_created_once_and_rotated(tmp_path):
    file = tmp_path / "cluster.secret"
    created = CliRunner().invoke(verbs.app, ["secret", "create", str(file)])
    assert created.exit_code == 0, created.output
    assert "copy it to every node" in created.output
    first = file.read_text().strip()
    assert len(first) == 64 and first not in created.output
    assert file.stat().st_mode & 0o777 == 0o600
    again = CliRunner().invoke(verbs.app, ["secret", "create", str(file)])
    assert isinstance(again.exception, ConfigError) and "exists already" in str(again.exception)
    rotated = CliRunner().invoke(verbs.app, ["secret", "rotate", str(file), "--keep", "2h"])
    assert rotated.exit_code == 0, rotated.output
    assert "none needs a restart" in rotated.output
    new, old = file.read_text().splitlines()
    assert len(new) == 64 and new != first
    assert old.startswith(f"{first} until 20")
    assert new not in rotated.output and first not in rotated.output


def every_command(command, path=()):
    yield path, command
    for name, one in getattr(command, "commands", {}).items():
        yield from every_command(one, (*path, name))


def test_help_is_whole_at_80_columns():
    for path, _ in every_command(typer.main.get_command(verbs.app)):
        done = CliRunner().invoke(verbs.app, [*path, "--help"], env={"COLUMNS": "80"})
        assert done.exit_code == 0, path
        assert "…" not in done.output and "...\n" not in done.output.partition("\n")[2], path
        assert max(map(len, done.output.splitlines())) <= 80, path
    serve = CliRunner().invoke(verbs.app, ["serve", "--help"], env={"COLUMNS": "80"}).output
    words = " ".join(serve.split())
    for name, each in settings_of(DaemonConfig).items():
        if each.option:
            assert f"{each.option} " in words, name
            assert each.is_switch or f"{each.option} {each.metavar} " in words, name

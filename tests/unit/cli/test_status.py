"""What `kvpool status` shows of a node, and how sizes and times are written."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvpool.cli.naming import period
from kvpool.cli.render.cluster import nodes_view
from kvpool.cli.render.text import duration, period_text, size_text, used_text
from kvpool.errors import InvalidRequest
from tests.support.printed import printed
from tests.unit.cli.answers import CLUSTER, STATS, line_with, node, shown


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
    assert url in printed(nodes_view(CLUSTER | {"nodes": nodes}), width=200)
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
    assert printed(nodes_view(CLUSTER | {"links": [link]}), width=200).count(url) == 2
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

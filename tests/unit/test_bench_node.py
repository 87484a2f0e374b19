"""What `bench/node.py transfer` measures, what it says of that, and how it prints it. No daemon."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvpool.errors import InvalidRequest
from kvpool.telemetry.cluster_stats import PeerWays, WayStats
from tests.support.printed import printed
from tests.support.stats import node_stats

with pytest.MonkeyPatch.context() as path:
    path.syspath_prepend(Path(__file__).parents[2] / "bench")
    import node
    from node_local import AVAILABLE_LOOKS, wait_available
    from node_report import (
        BLOCK_SIZES,
        BLOCKS_MAX,
        Cpu,
        Latency,
        Machine,
        Measured,
        Report,
        Size,
        Ways,
        about_nixl,
        about_others,
        by_transport,
        choose,
        find_node,
        quantile,
        remarks,
        since,
        trouble,
        view,
        why_lacking,
    )

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
BY_NIXL = WayStats("nixl://10.0.0.8:7071", "nixl", 5, 900 * MIB)
BY_TCP = WayStats("tcp://10.0.0.8:7070", "tcp", 1, 100 * MIB)
IDLE_NIXL = WayStats("nixl://10.0.0.8:7071", "nixl")


def ways(*listed: WayStats, **given: Any) -> Ways:
    known: dict[str, Any] = {
        "pull_over": "auto",
        "transfer_workers": 2,
        "nixl_here": True,
        "nixl_there": True,
        "usual": "nixl",
        "nixl_gain": None,
        "ways": list(listed),
        "failed_over": 0,
        "rested": 0,
        "error": "",
    }
    return Ways(**known | given)


# ---- what to measure ---------------------------------------------------------------------------------


def test_all_sizes_where_there_is_room():
    sizes, notes = choose(BLOCK_SIZES, 64 * MIB, {"a": GIB, "b": 256 * MIB})
    assert sizes == [
        Size(4 * KIB, BLOCKS_MAX),
        Size(64 * KIB, 1024),
        Size(MIB, 64),
        Size(4 * MIB, 16),
    ]
    assert notes == []


def test_the_smaller_memory_decides_and_is_named():
    sizes, notes = choose([4 * MIB, MIB, MIB], 64 * MIB, {"a": GIB, "b": 12 * MIB})
    assert sizes == [Size(MIB, 3)], "a quarter of b's, each size once"
    assert notes == [
        "measured with 3 MiB instead of --size: a quarter of this tenant's memory on b, which is 12 MiB",
        "blocks of 4 MiB are left out, being larger than that",
    ]


@pytest.mark.parametrize(
    ("wanted", "total", "memory", "said"),
    [
        ([4 * MIB], 64 * MIB, 12 * MIB, "on b, which is 12 MiB: use smaller ones"),
        ([4 * MIB], MIB, GIB, "more than --size, 1 MiB: give more"),
        ([65 * MIB], GIB, 64 * GIB, "blocks have at most 64 MiB"),
    ],
)
def test_what_cannot_be_measured(wanted, total, memory, said):
    with pytest.raises(InvalidRequest, match=said):
        choose(wanted, total, {"a": 64 * GIB, "b": memory})


def cluster(**given: Any) -> dict[str, Any]:
    nodes = [{"node": name, "state": "serving"} for name in ("a", "b", "c")]
    nodes[2]["state"] = "draining"
    return {"node": "a", "joined": True, "cluster": "prod", "nodes": nodes} | given


@pytest.mark.parametrize(
    ("node", "given", "said"),
    [
        ("a", {}, "a is this node: name another one"),
        ("d", {}, "no node 'd' in cluster prod; a knows of b, c. `kvpool nodes`"),
        ("b", {"joined": False}, "a is in no cluster: start its daemon with --join"),
        ("c", {}, "node c is draining"),
        ("b", {"nodes": cluster()["nodes"][:1]}, "a knows of no others"),
    ],
)
def test_a_node_that_cannot_be_pulled_from(node, given, said):
    with pytest.raises(InvalidRequest, match=said):
        find_node(cluster(**given), node)


def test_a_node_that_can():
    assert find_node(cluster(), "b") == {"node": "b", "state": "serving"}


@pytest.mark.parametrize(("share", "value"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.001, 1)])
def test_quantiles_of_a_hundred(share, value):
    assert quantile(list(range(100, 0, -1)), share) == value
    assert quantile([7.0], share) == 7.0


# ---- by which way ------------------------------------------------------------------------------------


def test_what_ways_have_carried_since():
    before = PeerWays(ways=[WayStats("tcp://b:1", "tcp", 3, 30)])
    after = PeerWays(
        ways=[
            WayStats("nixl://b:2", "nixl", 1, 100, 4.0, "no answer"),
            WayStats("tcp://b:1", "tcp", 5, 70),
            WayStats("tcp://b:3", "tcp"),
        ]
    )
    found = since(before, after)
    assert found == [
        WayStats("nixl://b:2", "nixl", 1, 100, 4.0, "no answer"),
        WayStats("tcp://b:1", "tcp", 2, 40),
        WayStats("tcp://b:3", "tcp"),
    ]
    assert by_transport(found) == {"nixl": 100, "tcp": 40}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (ways(BY_TCP, nixl_here=False, nixl_there=False), "neither node listens at a nixl:// URL"),
        (ways(BY_TCP, nixl_there=False), "b does not listen at a nixl:// URL"),
        (ways(BY_TCP, nixl_here=False), "b has NIXL and this node does not"),
        (ways(BY_NIXL), "all came by NIXL"),
        (ways(IDLE_NIXL, BY_TCP, pull_over="tcp"), "pull_over is tcp"),
        (
            ways(WayStats("nixl://b:2", "nixl", 0, 0, 32.4, "no route to host"), BY_TCP),
            "100% of the bytes came by TCP: NIXL failed and is not tried for another 32 s: no route to host",
        ),
        (
            ways(BY_NIXL, BY_TCP, failed_over=1, rested=3, error="nixl://b:2: no answer"),
            "10% of the bytes came by TCP: NIXL failed in 1 pull, and was given a rest in 3: nixl://b:2: no answer",
        ),
        (
            ways(BY_NIXL, BY_TCP, usual="tcp", nixl_gain=0.834),
            "faster between these two nodes as far as this one has seen (NIXL was 0.83 times as fast)",
        ),
        (ways(BY_NIXL, BY_TCP), "NIXL is used as a rule; 10% of the bytes came by TCP"),
    ],
)
def test_why_nixl_was_or_was_not_used(given, said):
    assert said in about_nixl("b", given)


@pytest.mark.parametrize(
    ("carried", "said"),
    [(100, ""), (119, ""), (121, "other pulls from b went on"), (80, "the rest from nodes that")],
)
def test_bytes_that_are_not_the_measurements(carried, said):
    found = about_others("b", carried * MIB, 100 * MIB)
    assert said in found
    assert bool(said) == bool(found)


def test_remarks_end_with_what_to_compare_with():
    found = remarks("b", ways(BY_NIXL), BY_NIXL.bytes)
    assert [text.partition(",")[0] for text in found] == [
        "all came by NIXL",
        "a card of 100 Gb/s carries 12.5 GB/s. By NIXL",
    ]
    assert "transfer_workers (2 here)" in found[-1]


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ({"counters": {"checksum_mismatches": 2}}, "2 blocks arrived at a with other bytes"),
        (
            {"fetch": {"peers": [{"node": "b", "last_error": "timed out"}]}},
            "did not come from b: timed out",
        ),
        ({"fetch": {"peers": [{"node": "c", "last_error": "timed out"}]}}, "smaller --size"),
    ],
)
def test_why_blocks_did_not_come(after, said):
    before = node_stats(node="a")
    found = why_lacking("b", 3, 64, before, node_stats(node="a", **after))
    assert found.startswith("3 of 64 blocks did not come from b: ")
    assert said in found


# ---- what is printed ---------------------------------------------------------------------------------


def report(*listed: WayStats, mismatches: int = 0) -> Report:
    sizes = [
        Measured(
            nbytes,
            count,
            [0.02, 0.01, 0.03],
            nbytes * count / 0.01,
            Latency(200, 0.00123, 0.01234),
            Cpu(3 * 64 * MIB, 0.1, 0.01),
            {"nixl": 9, "tcp": 1} if nbytes > MIB else {"nixl": 10},
            mismatches,
        )
        for nbytes, count in ((4 * KIB, 4096), (4 * MIB, 16))
    ]
    known = ways(*listed)
    said = remarks("host-8", known, BY_NIXL.bytes)
    return Report("host-7", "host-8", sizes, Machine(12e9, 30e9), known, 1, ["a note"], said)


def test_a_report_fits_80_columns():
    text = printed(
        view(report(BY_NIXL, WayStats("tcp://10.0.0.8:7070", "tcp", 0, 0, 3.0, "x " * 60)))
    )
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith("pulled from host-8 into host-7: ")
    rows = [line.split() for line in text.splitlines()]
    first = ["4", "KiB", "4,096", "1.68", "1.23", "ms", "12.34", "ms", "0.50", "<0.25", "nixl"]
    assert first in rows
    assert next(row for row in rows if row[:2] == ["4", "MiB"])[-4:] == [
        "nixl",
        "90%,",
        "tcp",
        "10%",
    ]
    assert "memcpy 12.00 GB/s, xxh3 of blocks of 1 MiB 30.00 GB/s" in text
    assert "checksum failures: 0" in text
    assert "a note" in text
    assert "nixl://10.0.0.8:7071" in text
    assert "rests for 3.0 s" in text
    assert "- a card of 100 Gb/s" in " ".join(text.split())


def test_damaged_blocks_are_trouble():
    assert trouble(report(BY_NIXL)) == ""
    bad = report(BY_NIXL, mismatches=2)
    assert trouble(bad).startswith("4 blocks arrived at host-7 with other bytes than were sent")
    assert "checksum failures: 4" in printed(view(bad))
    quiet = dataclasses.replace(bad, sizes=[])
    assert trouble(quiet) == ""


# ---- the command -------------------------------------------------------------------------------------


def test_a_wrong_size_is_refused_before_any_daemon_is_asked():
    done = CliRunner().invoke(node.app, ["local", "--block-size", "much"])
    assert isinstance(done.exception, InvalidRequest)
    assert "'much' is no size" in str(done.exception)


@pytest.mark.parametrize(("failures", "looks"), [(0, 0), (3, 3), (10**9, AVAILABLE_LOOKS)])
def test_a_client_that_was_interrupted_is_waited_for_but_not_for_ever(failures, looks):
    slept: list[float] = []

    class Interrupted:
        @property
        def available(self) -> bool:
            return len(slept) >= failures

    client: Any = Interrupted()
    wait_available(client, slept.append)
    assert len(slept) == looks

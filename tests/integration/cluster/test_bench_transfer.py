"""`bench/node.py transfer` against two real nodes: what it measures, which way it names, and that nothing of it stays."""

import json
import re
import signal
from pathlib import Path

import pytest

from kvpool.cli.base import EXIT_ERROR
from tests.integration.cluster.conftest import Seat
from tests.integration.test_cluster_cli import Commands
from tests.support.waiting import PATIENCE_S

ROUNDS = 3
NIXL = ["--listen", "nixl://127.0.0.1:0"]


@pytest.fixture
def node(clean_environ, repo_root: Path, tmp_path: Path) -> Commands:
    environ = clean_environ(tmp_path)
    environ["COLUMNS"] = "80"
    return Commands(environ, [str(repo_root / "bench/node.py")])


def blocks(seat: Seat) -> int:
    return seat.stats.tenants["default"].blocks


def moved(found: dict) -> int:
    """The bytes that a report is about, by its counts."""
    return sum(
        one["block_bytes"] * (ROUNDS * one["blocks"] + one["one_block"]["pulls"])
        for one in found["sizes"]
    )


def test_blocks_come_from_the_other_node_and_none_stays(start_cluster, numbers, node, until):
    a, b = start_cluster(nodes=2).seats()
    mine, theirs = numbers(5), numbers(7)
    a.put(mine)
    b.put(theirs)

    def measured() -> tuple[int, int, dict] | None:
        """The counts before, and the report; None: a busy machine did not answer in time."""
        counts = a.stats.counters.pulled_bytes, b.stats.counters.lent_bytes
        done = node(a.node, "transfer", "b", "--seed", "7", "--json")
        return None if done.status == EXIT_ERROR else (*counts, json.loads(done.out))

    before, lent, found = until(measured)
    assert [(one["block_bytes"], one["blocks"]) for one in found["sizes"]] == [
        (4 << 10, 1024),
        (64 << 10, 64),
        (1 << 20, 4),
        (4 << 20, 1),
    ], "a quarter of 16 MiB"
    assert (found["from_node"], found["to_node"]) == ("b", "a")
    assert found["pulled_bytes"] == moved(found)
    assert a.stats.counters.pulled_bytes - before == moved(found), "by the daemon's own count"
    assert b.stats.counters.lent_bytes - lent >= moved(found)
    for one in found["sizes"]:
        assert set(one["by"]) == {"tcp"}
        assert one["bytes_s"] == pytest.approx(
            one["block_bytes"] * one["blocks"] / min(one["rounds_s"])
        )
        assert 0 < one["one_block"]["p50_s"] <= one["one_block"]["p99_s"]
        assert one["mismatches"] == 0
    assert found["ways"]["ways"][0]["url"] == b.node.url
    assert found["remarks"][0].startswith("neither node listens at a nixl:// URL")
    assert (blocks(a), blocks(b)) == (a.here(mine), b.here(theirs)) == (5, 7)

    kept = [
        entry["settings"]["ttl_s"]
        for entry in a.client.cluster()["namespaces"]
        if "node.py transfer" in entry["fields"]
    ]
    assert kept == [600.0] * 4, "what a killed measurement leaves does not stay either"

    small = ("transfer", "b", "--block-size", "8KiB", "--size", "1MiB")
    done = until(lambda: (run := node(a.node, *small)).status != EXIT_ERROR and run)
    assert (done.status, done.err) == (0, "")
    assert max(map(len, done.out.splitlines())) <= 80
    assert re.search(r"^8 KiB +128 +\d+\.\d\d .* tcp *$", done.out, re.MULTILINE)
    assert (blocks(a), blocks(b)) == (5, 7)


def test_what_cannot_be_measured_says_what_to_do(start_cluster, node, until):
    a, b = start_cluster(nodes=2).seats()

    def said(*words: str) -> str:
        done = node(a.node, "transfer", *words)
        assert (done.status, done.out) == (1, "")
        return done.err

    assert "`bench/node.py local` measures this one" in said("a")
    assert "a knows of b" in said("c")
    assert "--block-size" in said("b", "--block-size", "8MiB")
    assert "give more" in said("b", "--size", "1MiB")
    a.client.drain("b")
    until(lambda: "b" not in a.members)
    assert "a knows of no others" in said("b")
    assert (blocks(a), blocks(b)) == (0, 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing_behind(start_cluster, node, until, number):
    a, b = start_cluster(nodes=2, memory="256MiB").seats()

    def interrupted(seat: Seat, *words: str) -> tuple[int, str] | None:
        """How it ended while a node had its blocks; None: it ended before the interrupt came, or failed on a busy machine."""
        with node.begin(a.node, *words) as process:
            until(lambda: blocks(seat) > 0 or process.poll() is not None)
            process.send_signal(number)
            _, err = process.communicate(timeout=PATIENCE_S)
        return (process.returncode, err) if process.returncode not in {0, EXIT_ERROR} else None

    assert until(lambda: interrupted(b, "transfer", "b")) == (128 + number, "")
    assert (blocks(a), blocks(b)) == (0, 0)
    assert until(lambda: interrupted(a, "local", "--block-size", "1KiB")) == (128 + number, "")
    assert blocks(a) == 0


def test_a_third_node_that_does_not_answer_is_a_note(start_cluster, node):
    environ = {"KVPOOL_MEMBER_TTL_S": "60"}  # it is a member throughout
    a, b, c = start_cluster(nodes=3, environ=environ).seats()
    c.node.signal(signal.SIGSTOP)
    try:
        found = node.json(a.node, "transfer", "b", "--block-size", "64KiB")
    finally:
        c.node.signal(signal.SIGCONT)
    assert moved(found) > 0
    assert re.fullmatch(
        r"blocks of 64 KiB that are left are dropped after 600 s: .*\(c\).*", found["notes"][-1]
    )
    assert (blocks(a), blocks(b), blocks(c)) == (0, 0, 0)


@pytest.mark.parametrize(
    ("pull_over", "remark"),
    [("nixl", "all came by NIXL"), ("tcp", "NIXL is there and was not used: pull_over is tcp")],
)
def test_which_way_was_taken_and_why(start_cluster, node, pull_over, remark):
    pytest.importorskip("nixl_cu12", reason="NIXL is not installed")
    world = start_cluster(nodes=2, flags=NIXL, environ={"KVPOOL_PULL_OVER": pull_over})
    a, b = world.seats()
    words = ("transfer", "b", "--block-size", "64KiB", "--block-size", "1MiB")
    found = node.json(a.node, *words)
    assert [set(one["by"]) for one in found["sizes"]] == [{pull_over}] * 2
    carried = {way["transport"]: way["bytes"] for way in found["ways"]["ways"]}
    other = {"nixl": "tcp", "tcp": "nixl"}[pull_over]
    assert carried == {pull_over: moved(found), other: 0}
    assert a.stats.nixl.bytes == carried["nixl"]
    assert found["remarks"][0].startswith(remark)
    assert (blocks(a), blocks(b)) == (0, 0)


def test_a_node_that_is_alone_is_told_so(daemon, node):
    done = node(daemon, "transfer", "b")
    assert (done.status, done.out) == (1, "")
    assert "is in no cluster: start its daemon with --join" in done.err

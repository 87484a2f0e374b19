"""The command line's verbs, each in a process of its own, against two real nodes."""

import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.router.hashing import HashSpec, chain
from kvpool.types import EngineRecord
from kvpool.wire import operator as operator_wire
from kvpool.wire.operator import ShowSession
from tests.integration.cluster.conftest import NBYTES, PLAIN, block, keys_of
from tests.integration.test_cluster_cli import Commands, hear
from tests.support.waiting import PATIENCE_S
from tests.terminals import Terminal

DIGEST = PLAIN.digest().hex()
ABSENT = "ff" * 16


def hexes(numbers) -> list[str]:
    return [each.hex() for each in keys_of(numbers)]


@pytest.fixture
def kvpool(clean_environ, tmp_path: Path) -> Commands:
    environ = clean_environ(tmp_path)
    environ.pop("COLUMNS", None)
    return Commands(environ)


@pytest.fixture
def pair(start_cluster):
    """Seats at a and b."""
    return start_cluster(nodes=2).seats()


def rows(out: str) -> list[list[str]]:
    return [line.split() for line in out.splitlines()]


# ---- looking ---------------------------------------------------------------------------------------


def test_status_of_any_node_and_what_its_exit_status_says(pair, numbers, kvpool, until):
    a, b = pair
    b.put(numbers(3))
    done = kvpool(a.node, "status", "--node", "b")
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith("node b ") and "3 blocks stored" in done.out
    assert kvpool.json(a.node, "status", "--node", "b")["node"] == "b"
    quiet = kvpool(a.node, "status", "--quiet")
    assert (quiet.status, quiet.out, quiet.err) == (0, "", "")
    a.client.drain("b")
    until(lambda: b.stats.cluster.state == "gone")
    done = kvpool(b.node, "status", "--quiet")
    assert (done.status, done.out, done.err) == (1, "", "")
    done = kvpool(b.node, "status")
    assert done.status == 1
    assert re.fullmatch(r"kvpool: node b does not serve: it is gone, [^\n]+\n", done.err)
    b.node.kill()
    done = kvpool(b.node, "status", "--quiet")
    assert (done.status, done.out) == (3, "")
    assert "kvpool serve" in done.err


def test_the_health_of_all_nodes_in_one_exit_status(pair, kvpool, until):
    a, b = pair
    until(lambda: a.stats.cluster.directory.connected and b.stats.cluster.directory.connected)
    done = kvpool(a.node, "status", "--all", "--expect", "2")
    assert (done.status, done.err) == (0, "")
    assert [line[:3] for line in rows(done.out)[3:]] == [
        ["a", "serving", "well"],
        ["b", "serving", "well"],
    ]
    done = kvpool(a.node, "status", "--all", "--expect", "3", "--quiet")
    assert (done.status, done.out, done.err) == (1, "", "")
    assert kvpool(a.node, "status", "--expect", "3").status == 1
    b.node.signal(signal.SIGSTOP)
    try:
        done = kvpool(a.node, "status", "--all", "--json")
    finally:
        b.node.signal(signal.SIGCONT)
    assert done.status == 1
    assert {each["node"]: each["health"] for each in json.loads(done.out)["nodes"]} == {
        "a": "well",
        "b": "lost",
    }
    assert done.err == "kvpool: 1 of 2 nodes is not well: b is lost\n"
    a.node.kill()
    assert kvpool(a.node, "status", "--all").status == 3


def test_settings_of_running_nodes(pair, kvpool):
    a, b = pair

    def value(seat, name: str):
        items = kvpool.json(a.node, "config", "show", "--node", seat.node.name)["items"]
        return next(each["value"] for each in items if each["name"] == name)

    done = kvpool(a.node, "config", "set", "ssd-flush-s=7", "forward=false")
    assert (done.status, done.err) == (0, "")
    assert "changed ssd_flush_s, forward on a, b" in done.out
    assert [value(seat, "ssd_flush_s") for seat in pair] == [7.0, 7.0]
    assert [value(seat, "forward") for seat in pair] == [False, False]
    assert kvpool(a.node, "config", "set", "replicas_max=2", "--node", "b").status == 0
    assert [value(seat, "replicas_max") for seat in pair] == [8, 2]
    for wrong in ("ssd_flush_s=soon", "memory=1GiB", "nonsense=1", "forward"):
        done = kvpool(a.node, "config", "set", wrong)
        assert (done.status, done.out) == (1, ""), wrong
        assert wrong.partition("=")[0] in done.err
    assert kvpool(a.node, "config", "set", "forward=true", "forward=false").status == 1
    shown = kvpool(a.node, "config", "show").out
    assert re.search(r"^ssd_flush_s +7.0 +can be changed *$", shown, re.MULTILINE)
    assert re.search(r"^ssd_drain_s +600.0 +default, can be changed *$", shown, re.MULTILINE)
    assert re.search(r"^transfer_workers +1 +default *$", shown, re.MULTILINE)
    b.node.signal(signal.SIGSTOP)
    try:
        done = kvpool(a.node, "config", "set", "forward=true")
    finally:
        b.node.signal(signal.SIGCONT)
    assert (done.status, done.err.startswith("kvpool: b: ")) == (1, True)
    assert value(a, "forward") is True


def test_the_hit_rate_of_a_namespace(pair, numbers, kvpool):
    a, _ = pair
    some = numbers(4)
    a.put(some[:3])
    a.client.acquire(a.ns, keys_of(some), wait_s=0.0).release()
    [row] = kvpool.json(a.node, "namespaces")
    assert (row["asked"], row["hits"]) == (4, 3)
    assert rows(kvpool(a.node, "namespaces").out)[1][-1] == "75%"


def test_who_may_not_ask_is_told_so_by_the_exit_status(start_cluster, kvpool):
    world = start_cluster(nodes=1, environ={"KVPOOL_OPERATOR_TOKEN": "o" * 20})
    node = world.node("a")
    for words in (
        ("nodes",),
        ("job", "start", "evict", "--all"),
        ("events",),
        ("job", "list"),
        ("top", "--once"),
    ):
        done = kvpool(node, *words)
        assert (done.status, done.out) == (4, ""), words
        assert re.fullmatch(r"kvpool: [^\n]*KVPOOL_OPERATOR_TOKEN[^\n]*\n", done.err)
    assert kvpool(node, "nodes", KVPOOL_OPERATOR_TOKEN="o" * 20).status == 0


def test_the_longest_prefix_by_node(pair, numbers, kvpool, until, tmp_path):
    a, b = pair
    some = numbers(12)
    a.put(some[:5])
    b.put(some)
    until(lambda: a.announced and b.announced)
    until(lambda: a.holders(some[11]) == {"b"})
    done = kvpool(a.node, "blocks", "lookup", DIGEST[:6], *hexes(some))
    assert (done.status, done.err) == (0, "")
    assert rows(done.out)[1:] == [["b", "12", "12", "12"], ["a", "5", "5", "12"]]
    file = tmp_path / "keys"
    file.write_text("\n".join(hexes(some[:8])) + "\n")
    found = kvpool.json(a.node, "blocks", "lookup", DIGEST, "--keys-file", str(file))
    assert found["keys"] == 8
    assert {row["node"]: row["memory_blocks"] for row in found["items"]} == {"a": 5, "b": 8}
    done = kvpool(a.node, "blocks", "lookup", DIGEST, ABSENT)
    assert (done.status, done.out) == (1, "no node has the first of 1 block\n")
    file.write_text("00\n")
    done = kvpool(a.node, "blocks", "lookup", DIGEST, "--keys-file", str(file))
    assert (done.status, f"{file}, line 1: '00' is no block key" in done.err) == (1, True)


def test_why_a_prompt_is_not_all_there(pair, numbers, kvpool, until):
    a, b = pair
    some = numbers(4)
    b.put(some)
    b.client.remove(b.ns, keys_of(some[2:3]))
    until(lambda: b.announced)
    until(lambda: a.holders(some[0]) == {"b"})
    done = kvpool(a.node, "blocks", "lookup", DIGEST, *hexes(some), "--why")
    assert (done.status, done.err) == (0, "")
    assert "a: block 1 of 4: never stored" in done.out
    text = r"b: block 3 of 4: removed by a client, \d+ s ago from dram, \d+ s after its last use"
    assert re.search(text, done.out), done.out
    told = kvpool.json(a.node, "blocks", "lookup", DIGEST, *hexes(some), "--why")
    assert told["silent"] == {}
    assert told["why"]["b"]["missing"]["key"] == hexes(some)[2]
    b.put(some[2:3])
    until(lambda: b.announced)
    done = kvpool(b.node, "blocks", "lookup", DIGEST, *hexes(some), "--why")
    assert "b: all 4 blocks are there" in done.out
    b.node.signal(signal.SIGSTOP)
    try:
        done = kvpool(a.node, "blocks", "lookup", DIGEST, *hexes(some), "--why")
    finally:
        b.node.signal(signal.SIGCONT)
    assert "kvpool: b: " in done.err


def test_what_more_memory_would_give(pair, numbers, kvpool, until):
    a, b = pair
    assert "no blocks have been asked for yet" in kvpool(a.node, "plan", "memory").out
    once, again = numbers(20), numbers(20)
    a.put(once)
    a.put(again)
    assert a.read(again) == a.read(again) == 20
    assert b.read(numbers(10)) == 0

    def counted():
        found = kvpool.json(a.node, "plan", "memory")
        curve = found["curve"]
        # Nodes answer for the curve first, and for the misses afterwards.
        return curve["asked"] == 50 and curve["hit"] < 1 and found["misses"] and found

    found = until(counted, "reads are counted, some seconds later")
    assert found["nodes"] == 2 and found["unreachable"] == {}
    assert found["misses"] == {"never_stored": {"requests": 1, "blocks": 10}}
    curve = found["curve"]
    assert curve["dram_bytes"] == 2 * (16 << 20)
    assert curve["hit"] == curve["ceiling"] == pytest.approx(0.8)
    assert curve["points"][-1] == {"times": None, "dram_bytes": None, "hit": curve["ceiling"]}
    done = kvpool(a.node, "plan", "memory")
    assert (done.status, done.err) == (0, "")
    assert "hit rate now 80.0%, at most 80.0% with infinite memory" in done.out
    assert ["64", "MiB", "2", "80.0%", "+0.0%"] in rows(done.out)
    assert re.search(r"never stored +1 +10 +100%", done.out)
    b.node.signal(signal.SIGSTOP)
    try:
        done = kvpool(a.node, "plan", "memory")
    finally:
        b.node.signal(signal.SIGCONT)
    assert done.status == 0 and "kvpool: b: " in done.err


def test_blocks_are_listed_page_by_page(pair, numbers, kvpool):
    a, b = pair
    some = numbers(30)
    b.put(some)
    assert kvpool(a.node, "pin", hexes(some)[4], "--kind", "hard", "--node", "b").status == 0
    seen, cursor = [], []
    while True:
        page = kvpool.json(
            a.node, "blocks", "list", DIGEST, "--node", "b", "--limit", "13", *cursor
        )
        seen += page["items"]
        if page["next"] is None:
            break
        cursor = ["--cursor", page["next"]]
    assert sorted(each["key"] for each in seen) == sorted(hexes(some))
    done = kvpool(a.node, "blocks", "list", "--node", "b", "--limit", "40")
    line = next(line for line in done.out.splitlines() if hexes(some)[4] in line)
    assert done.out.splitlines()[0].rstrip() == f"namespace {DIGEST[:12]}"
    assert line.split()[:3] == [hexes(some)[4], "4", "1"]
    assert line.split()[-1] == "hard"
    assert kvpool(a.node, "blocks", "list").out == "no blocks here\n"
    assert "--cursor" in kvpool(a.node, "blocks", "list", "--node", "b", "--limit", "7").out
    done = kvpool(a.node, "blocks", "list", "--tier", "tape")
    assert (done.status, "dram" in done.err) == (1, True)


def test_top_once(pair, numbers, kvpool):
    a, b = pair
    some = numbers(10)
    b.put(some)
    b.read(some)
    done = kvpool(a.node, "top", "--once")
    assert (done.status, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0].endswith("2 nodes, 0 jobs running")
    heads = ["node", "state", "dram", "dram", "used", "put/s", "read/s"]
    assert lines[2].split()[:7] == heads
    for name in "ab":
        (row,) = [line for line in lines if line.startswith(f"{name} ")]
        assert row.split()[1] == "serving" and "/16 MiB" in row and "0 B/s" in row
    found = kvpool.json(a.node, "top", "--once", "--every-s", "0.2")
    by_name = {row["node"]: row for row in found["nodes"]}
    assert by_name["b"]["totals"]["put_bytes"] == 10 * NBYTES
    assert by_name["b"]["totals"]["had_blocks"] == 10
    assert by_name["a"]["totals"]["put_bytes"] == 0
    assert by_name["b"]["rates"]["put_bytes_s"] == 0
    assert by_name["b"]["tiers"]["dram"]["size_bytes"] == 16 << 20


def test_top_goes_on_without_a_node_that_hangs(pair, kvpool):
    a, b = pair
    b.node.signal(signal.SIGSTOP)
    try:
        found = kvpool.json(a.node, "top", "--once", "--every-s", "0.2")
    finally:
        b.node.signal(signal.SIGCONT)
    by_name = {row["node"]: row for row in found["nodes"]}
    assert by_name["a"]["rates"] is not None
    # It is not a member any more when its lease has ended before the second look.
    assert "b" not in by_name or by_name["b"]["error"]


def on_terminal(kvpool: Commands, node, *words: str) -> Terminal:
    command = [*kvpool.command, *words, "--socket", node.socket]
    return Terminal(command, kvpool.environ)


@pytest.mark.parametrize("ending", ["q", "\x03"])
def test_top_is_watched_until_a_key(pair, kvpool, ending):
    screen = on_terminal(kvpool, pair[0].node, "top", "--every-s", "0.2")
    screen.until("q ends")
    screen.until("0 B/s")
    screen.type(ending)
    assert screen.end() == (0 if ending == "q" else 130)
    assert "Traceback" not in screen.said


# ---- evicting --------------------------------------------------------------------------------------


def test_blocks_are_evicted_everywhere_or_on_some_nodes(pair, numbers, kvpool):
    a, b = pair
    some = numbers(20)
    for seat in pair:
        seat.put(some)
    done = kvpool(a.node, "job", "start", "evict", *hexes(some[:3]), "--dry-run")
    assert done.status == 0
    assert done.out.splitlines()[-1].startswith("6 blocks would be evicted, ")
    assert re.match(r"job evict-[0-9a-f]{8} runs on a, b\n", done.err)
    assert (a.here(some), b.here(some)) == (20, 20)
    assert kvpool(a.node, "job", "start", "evict", *hexes(some[:3]), "--node", "b").status == 0
    assert (a.here(some), b.here(some)) == (20, 17)
    done = kvpool(
        a.node, "job", "start", "evict", hexes(some)[15], "--chain", "--namespace", DIGEST[:4]
    )
    assert done.out.splitlines()[-1].startswith("10 blocks evicted, ")
    assert (a.here(some), b.here(some)) == (15, 12)
    assert kvpool(a.node, "pin", *hexes(some[4:6]), "--kind", "hard").status == 0
    found = kvpool.json(a.node, "job", "start", "evict", "--all", "--tier", "dram", "--yes")
    by_node = {view["node"]: view for view in found["nodes"]}
    assert (by_node["a"]["blocks"], by_node["a"]["kept"], by_node["b"]["blocks"]) == (13, 2, 12)
    assert found["failures"] == {}
    assert (a.here(some), b.here(some)) == (2, 0)
    refused = kvpool(a.node, "job", "start", "evict", "--all")
    assert (refused.status, refused.out) == (2, "")
    assert "There is no terminal to ask: repeat with --yes" in refused.err
    done = kvpool(a.node, "job", "start", "evict", "--all", "--yes")
    assert "2 blocks stay, pinned" in done.out
    assert kvpool(a.node, "unpin", *hexes(some[4:6])).out == "2 of 2 blocks unpinned\n"
    done = kvpool(a.node, "pin", ABSENT)
    assert (done.status, done.out) == (1, "0 of 1 block pinned soft\n")
    assert "`kvpool blocks locate KEY`" in done.err
    assert kvpool(a.node, "job", "start", "evict", "--least", "1MiB", "--yes").status == 0
    assert a.here(some) == 0
    a.put(some)
    done = kvpool(a.node, "job", "start", "evict", "--namespace", DIGEST, "--unused-s", "2h", "-y")
    assert done.out.splitlines()[-1] == "0 blocks evicted"
    assert a.here(some) == 20


def test_what_evict_refuses(pair, kvpool):
    a, _ = pair
    for words, hint in (
        ((), "or --all of the tenant"),
        (("--all", ABSENT), "do not combine it with"),
        (("--all", "--unused-s", "2h"), "--all is all of the tenant"),
        (("--namespace", DIGEST, "--chain"), "--chain needs keys"),
        (("--namespace", "beef"), "`kvpool namespaces` shows"),
        (("--unused-s", "5"), "30s, 15m, 12h"),
        (("--least", "many"), "10GiB"),
        (("--least", "1MiB", "--namespace", DIGEST, "-y"), "--least selects by value alone"),
        (("--all", "--node", "z", "-y"), "`kvpool nodes` lists the nodes"),
    ):
        done = kvpool(a.node, "job", "start", "evict", *words)
        assert (done.status, done.out) == (1, ""), words
        assert re.fullmatch(r"kvpool: [^\n]+\n", done.err), words
        assert hint in done.err
    assert kvpool(a.node, "job", "start", "evict", "--no-such-flag").status == 2
    done = kvpool(a.node, "job", "start", "evict", "--all", "--tier", "tape")
    assert (done.status, "'ssd'" in done.err) == (2, True)


def test_a_node_that_does_not_answer_is_named_and_the_others_are_done(pair, numbers, kvpool):
    a, b = pair
    some = numbers(4)
    a.put(some)
    b.node.signal(signal.SIGSTOP)
    try:
        done = kvpool(a.node, "job", "start", "evict", *hexes(some), "--node", "a", "--node", "b")
    finally:
        b.node.signal(signal.SIGCONT)
    assert done.status == 1
    assert re.search(r"^kvpool: b: ", done.err, re.MULTILINE)
    assert done.out.splitlines()[-1].startswith("4 blocks evicted")
    assert a.here(some) == 0


def test_on_a_terminal_it_asks_first(pair, numbers, kvpool):
    a, _ = pair
    some = numbers(6)
    a.put(some)
    screen = on_terminal(kvpool, a.node, "job", "start", "evict", "--namespace", DIGEST)
    screen.until(f"Evict all blocks of namespace {DIGEST[:12]} on a, b? [y/N]")
    screen.type("n\n")
    assert screen.end() == 1
    assert a.here(some) == 6
    screen = on_terminal(kvpool, a.node, "job", "start", "evict", "--namespace", DIGEST)
    screen.until("[y/N]")
    screen.type("y\n")
    screen.until("6 blocks evicted")
    assert screen.end() == 0
    assert a.here(some) == 0
    a.put(some)
    screen = on_terminal(kvpool, a.node, "job", "start", "evict", "--namespace", DIGEST, "--yes")
    screen.until("6 blocks evicted")
    assert screen.end() == 0


@pytest.fixture
def long_job(start_cluster, numbers):
    """A seat at a node that has so much that an eviction takes a while."""
    (seat,) = start_cluster(nodes=1, memory="192MiB").seats()
    some = numbers(5500)
    for at in range(0, len(some), 500):
        seat.put(some[at : at + 500])
    return seat


def test_an_interrupted_wait_leaves_the_job_going(long_job, kvpool, until):
    def interrupted():
        """A job's name and what was said of it, unless the job ended before the interrupt came."""
        with kvpool.begin(
            long_job.node, "job", "start", "evict", "--unused-s", "1h", "--yes"
        ) as process:
            name = re.search(r"job (evict-\w+) runs on a\n", hear(process, "runs on a\n"))[1]
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=PATIENCE_S)
        if process.returncode == 0:
            return None
        assert (process.returncode, out) == (130, "")
        return name, err

    name, err = until(interrupted)
    assert f"job {name} continues: `kvpool job show {name}`" in err
    assert "Traceback" not in err
    (view,) = kvpool.json(long_job.node, "job", "show", name)["jobs"]
    assert view["state"] in {"running", "done"}
    until(lambda: long_job.client.ask_node(operator_wire.Jobs([name]))[0].state == "done")


def test_ctrl_c_on_a_terminal_offers_to_stop_the_job(long_job, kvpool, until):
    def interrupted():
        """The terminal, unless the job ended before the key was read."""
        screen = on_terminal(
            kvpool, long_job.node, "job", "start", "evict", "--unused-s", "1h", "--yes"
        )
        screen.until("evict-")
        screen.type("\x03")
        try:
            screen.until("Stop job evict-")
        except AssertionError:
            assert "blocks evicted" in screen.said, screen.said
            screen.end()
            return None
        screen.type("y\n")
        assert screen.end() == 130
        return screen

    screen = until(interrupted)
    assert re.search(r"job evict-\w+ is stopped on (a|no node: it has ended)", screen.said)
    assert "Traceback" not in screen.said


# ---- jobs ------------------------------------------------------------------------------------------


def test_jobs_are_listed_shown_and_stopped(pair, numbers, kvpool, until):
    a, b = pair
    b.put(numbers(5))
    assert kvpool(a.node, "job", "list").out == "no node remembers a job\n"
    done = kvpool(a.node, "job", "start", "evict", "--all", "--node", "b", "--no-wait", "--yes")
    assert (done.status, done.err) == (0, "")
    name = done.out.strip()
    assert re.fullmatch(r"evict-[0-9a-f]{8}", name)
    until(lambda: a.client.ask_node(operator_wire.Jobs([name]), node="b")[0].state == "done")
    (view,) = kvpool.json(a.node, "job", "show", name)["jobs"]
    assert (view["node"], view["state"], view["blocks"]) == ("b", "done", 5)
    (row,) = rows(kvpool(a.node, "job", "list").out)[1:]
    assert row[:3] == [name, "b", "done"]
    assert kvpool(b.node, "job", "stop", name).out == f"job {name} is not running: it has ended\n"
    for words in (("job", "show", "nobody-s"), ("job", "stop", "nobody-s")):
        done = kvpool(a.node, *words)
        assert (done.status, "`kvpool job list`" in done.err) == (1, True)


def test_a_running_job_is_stopped(long_job, kvpool, until):
    name = kvpool(
        long_job.node, "job", "start", "evict", "--unused-s", "1h", "--no-wait", "-y"
    ).out.strip()
    done = kvpool(long_job.node, "job", "stop", name)
    assert done.status == 0
    assert done.out.startswith(f"job {name} ")
    until(lambda: long_job.client.ask_node(operator_wire.Jobs([name]))[0].state != "running")


def test_blocks_are_brought_and_moved(pair, numbers, kvpool, until):
    a, b = pair
    some = numbers(20)
    b.put(some)
    until(lambda: b.announced)
    done = kvpool(a.node, "job", "start", "warm", DIGEST[:8], *hexes(some[:4]))
    assert done.status == 0, done.err
    assert done.out.splitlines()[-1].startswith("4 blocks brought, ")
    assert a.get(some) == 4
    done = kvpool(
        b.node, "job", "start", "warm", DIGEST[:8], "--from", "b", "--move", "--node", "a"
    )
    assert done.status == 0, done.err
    assert done.out.splitlines()[-1].startswith("16 blocks brought, ")
    assert (a.get(some), b.here(some)) == (20, 0)
    found = kvpool.json(
        a.node, "job", "start", "warm", DIGEST, "--from", "a", "--node", "b", "--dry-run"
    )
    assert (found["nodes"][0]["blocks"], b.here(some)) == (20, 0)
    for words in (
        ("job", "start", "warm", DIGEST),
        ("job", "start", "warm", DIGEST, "--from", "a", "--move", "--node", "a"),
    ):
        assert kvpool(a.node, *words).status == 1


def test_disks_are_scrubbed_on_any_node(start_cluster, numbers, kvpool, until):
    world = start_cluster(nodes=2, ssd="64MiB", environ={"KVPOOL_SSD_WRITE": "through"})
    a, b = world.seats()
    some = numbers(40)
    b.put(some)
    until(lambda: sum(disk.blocks for disk in b.stats.tiers.ssd) == 40)
    (view,) = kvpool.json(a.node, "job", "start", "scrub")["nodes"]
    assert (view["seen"], view["blocks"]) == (0, 0)
    done = kvpool(b.node, "job", "start", "scrub")
    assert (done.status, done.out) == (0, "40 blocks seen, 0 bad and dropped\n")
    (file,) = (Path(b.node.socket).parent / "b-ssd").rglob("segment")
    content = file.read_bytes()
    where = content.index(block(some[7]))
    with file.open("r+b") as opened:
        opened.seek(where + 100)
        opened.write(bytes([content[where + 100] ^ 1]))
        opened.flush()
        os.fsync(opened.fileno())
    done = kvpool(a.node, "job", "start", "scrub", "--node", "b")
    assert (done.status, done.out) == (1, "40 blocks seen, 1 bad and dropped\n")
    done = kvpool(a.node, "job", "start", "scrub", "--node", "b")
    assert (done.status, done.out) == (0, "39 blocks seen, 0 bad and dropped\n")
    assert re.fullmatch(r"scrub-\w{8}\n", kvpool(a.node, "job", "start", "scrub", "--no-wait").out)


# ---- events, measuring, settings -------------------------------------------------------------------


def test_events_of_all_nodes(pair, numbers, kvpool):
    a, b = pair
    some = numbers(1)
    b.put(some)
    assert kvpool(a.node, "pin", *hexes(some), "--node", "b").status == 0
    done = kvpool(a.node, "events")
    assert (done.status, done.err) == (0, "")
    lines = done.out.splitlines()
    assert any(re.fullmatch(r"\d{4}-\S+Z  b  node joined  of=a  .*", line) for line in lines)
    found = kvpool.json(a.node, "events", "--kind", "change")
    assert [(e["node"], e["details"]["what"]) for e in found] == [("b", "pin")]
    assert found[0]["details"]["by"] == f"uid {os.getuid()} on a"
    assert len(kvpool.json(a.node, "events", "--limit", "2")) == 2
    assert {e["node"] for e in kvpool.json(a.node, "events", "--node", "a")} == {"a"}


def test_events_are_followed(pair, numbers, kvpool):
    a, _ = pair
    some = numbers(1)
    a.put(some)
    words = ("events", "--follow", "--json", "--kind", "change")
    with kvpool.begin(a.node, *words, PYTHONUNBUFFERED="1") as process:
        assert kvpool(a.node, "pin", *hexes(some)).status == 0
        line = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_S)
    assert json.loads(line)["details"]["what"] == "pin"
    assert (process.returncode, err) == (130, "")


def test_a_measurement_leaves_nothing_behind(pair, numbers, repo_root):
    a, _ = pair
    some = numbers(5)
    a.put(some)

    def local(*words: str) -> "subprocess.CompletedProcess[str]":
        script = repo_root / "bench" / "node.py"
        command = [sys.executable, str(script), "local", *words, "--socket", a.node.socket]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    found = json.loads(local("--block-size", "16KiB", "--size", "2MiB", "--json").stdout)
    assert [row["what"] for row in found["measured"]] == ["memcpy", "put", "match", "get"]
    assert all(row["blocks"] == 128 and row["seconds"] > 0 for row in found["measured"])
    assert a.stats.tenants["default"].blocks == a.here(some) == 5
    assert local("--size", "1MiB").stdout.startswith("16 blocks of 64 KiB, the best of 3\n")
    done = local("--block-size", "32MiB")
    assert (done.returncode, "--block-size" in done.stderr) == (1, True)


def test_changes_answer_in_json(pair, numbers, kvpool):
    a, _ = pair
    some = numbers(2)
    a.put(some)
    found = kvpool.json(a.node, "pin", *hexes(some))
    assert found == {"kind": "soft", "keys": 2, "found": {"": 2}}
    assert kvpool.json(a.node, "configure", DIGEST, "--ttl", "1h")["namespace"] == DIGEST
    found = kvpool.json(a.node, "clear", DIGEST, "--dry-run")
    assert {each["node"]: each["blocks"] for each in found["nodes"]}["a"] == 2
    assert kvpool(a.node, "clear", DIGEST).status == 2
    assert kvpool.json(a.node, "namespaces")[0]["epoch"] == 0, "neither has changed anything"
    assert kvpool.json(a.node, "clear", DIGEST, "--yes")["epoch"] == 1
    assert kvpool.json(a.node, "drain", "b", "--no-wait")["node"] == "b"
    assert kvpool.json(a.node, "drain", "b", "--cancel")["node"] == "b"


# ---- examples --------------------------------------------------------------------------------------

SESSION = "a session of [agents]"


def test_sessions_are_listed_shown_and_ended(pair, numbers, kvpool, until):
    a, b = pair
    some = numbers(6)
    b.put(some[:4])
    b.client.sessions.turn(b.ns, SESSION, keys_of(some))
    until(lambda: b.client.ask_node(ShowSession(SESSION)))
    done = kvpool(a.node, "sessions", "list")
    assert (done.status, done.out) == (0, "no sessions are known here\n")
    done = kvpool(a.node, "sessions", "list", "--node", "b")
    assert done.status == 0 and SESSION in done.out
    found = kvpool.json(a.node, "sessions", "show", SESSION, "--node", "b")
    (chain,) = found["chains"]
    assert (chain["blocks"], chain["in_memory"], chain["missing"]) == (6, 4, 2)
    done = kvpool(a.node, "sessions", "show", SESSION, "--node", "b")
    assert done.status == 0 and "(main)" in done.out
    assert kvpool(a.node, "sessions", "show", SESSION).status == 1
    assert kvpool(a.node, "sessions", "end", SESSION, "--node", "b").status == 0
    done = kvpool(a.node, "sessions", "end", SESSION, "--node", "b")
    assert done.status == 1 and "no session" in done.err


def test_intents_and_their_answers(pair, numbers, kvpool, until, tmp_path):
    a, b = pair
    some = numbers(6)
    b.put(some)
    on_b = ("--namespace", DIGEST[:6], "--node", "b")
    found = kvpool.json(a.node, "intend", "pin", *hexes(some), *on_b, "--hard", "--dry-run")
    (item,) = found["items"]
    assert (item["node"], item["outcome"], item["blocks"]) == ("b", "accepted", 6)
    assert b.stats.tenants["default"].hard_pinned_bytes == 0
    assert kvpool(a.node, "intend", "pin", *hexes(some), *on_b, "--hard").status == 0
    assert b.stats.tenants["default"].hard_pinned_bytes == 6 * NBYTES
    done = kvpool(a.node, "intend", "drop", *hexes(some), *on_b)
    assert done.status == 1 and "refused" in done.out and "pinned" in done.out
    until(lambda: b.announced)
    until(lambda: a.holders(some[5]) == {"b"})
    prefetch = ("intend", "prefetch", *hexes(some), "--namespace", DIGEST)
    # It looks for them for half a second, in which a busy machine may do nothing.
    done = until(lambda: (now := kvpool(a.node, *prefetch)).status == 0 and now)
    assert "accepted" in done.out
    until(lambda: a.here(some) == 6)
    done = kvpool(a.node, "intend", "keep", "--session", "nobody", "--for", "15m")
    assert done.status == 1 and "missing" in done.out
    done = kvpool(a.node, "intend", "keep", *hexes(some))
    assert done.status == 1 and "--namespace" in done.err


def test_a_prompt_by_its_tokens_where_engines_have_said_how_they_hash(
    pair, numbers, kvpool, tmp_path, until
):
    a, _ = pair
    spec = HashSpec(16, "sha256_cbor", b"begin")
    tokens = [7 * n % 50_000 for n in range(16 * 3 + 5)]
    keys = [each[-16:] for each in chain(spec, tokens)]
    a.client.put(a.ns, keys, [bytes(NBYTES)] * 3)
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(tokens))
    words = ("intend", "expend", "--tokens-file", str(file), "--namespace", DIGEST)
    done = kvpool(a.node, *words)
    assert done.status == 1 and "no ways to hash" in done.err
    record = EngineRecord(
        "http://127.0.0.1:1",
        hash_algorithm=spec.algorithm,
        none_hash=b"begin".hex(),
        block_tokens=16,
    )
    assert a.client.engine.announce(a.ns, record)
    (item,) = until(lambda: (f := kvpool.json(a.node, *words))["items"] and f["items"])
    assert (item["outcome"], item["blocks"]) == ("accepted", 3)


ELSEWHERE = {
    "kvpool serve": "all of these tests begin one",
    "kvpool router": "tests/integration/router",
    "kvpool explain": "tests/integration/router/test_explain.py",
    "kvpool sim": "tests/unit/simulator/test_command.py",
    "kvpool plan": "tests/unit/planner/test_command.py, and below",
    "kvpool certs": "needs no daemon: its own tests",
    "kvpool secret": "needs no daemon: tests/unit/cli/test_commands.py",
    "kvpool token": "needs no daemon: its own tests",
    "kvpool audit": "needs no daemon: tests/unit/daemon/test_audit_file.py",
}
LAST = ("kvpool job start evict", "kvpool clear", "kvpool drain")


def examples(repo_root: Path) -> list[str]:
    """Those in the help of the verbs that ask daemons; what takes things away comes last."""
    found = [
        example
        for verb in runpy.run_path(str(repo_root / "scripts" / "reference.py"))["verbs"]()
        for example in verb.examples
        if " ".join(verb.path.split()[:2]) not in ELSEWHERE
        and "--router" not in example  # there is none here: test_scale_in.py
    ]
    return sorted(
        found, key=lambda text: next((n for n, p in enumerate(LAST) if text.startswith(p)), -1)
    )


def test_the_examples_of_the_help_work(pair, numbers, kvpool, repo_root, tmp_path, until):
    a, b = pair
    some = numbers(3)
    b.put(some)
    until(lambda: b.announced)
    until(lambda: a.holders(some[0]) == {"b"})
    a.client.ask_node(operator_wire.BeginJob("evict-5f21c09a", b'{"kind":"evict","unused_s":9e6}'))
    b.client.pin_blocks(keys_of(some[2:]))  # a change that `kvpool events` has to tell
    for seat in pair:
        seat.client.sessions.turn(seat.ns, "conversation-17", keys_of(some))
        until(lambda seat=seat: seat.client.ask_node(ShowSession("conversation-17")))
    settings = tmp_path / "kvpool.toml"
    settings.write_text('memory = "1GiB"')
    prompt = tmp_path / "prompt.keys"
    prompt.write_text(hexes(some)[0])
    hello = tmp_path / "hello.txt"
    hello.write_text("hello")
    real = {
        "hello.txt": str(hello),
        "host-7": "b",
        "host-8": "a",
        "3fa9": DIGEST[:6],
        "research": "default",
        "00112233445566778899aabbccddeeff": hexes(some)[0],
        "/etc/kvpool/kvpool.toml": str(settings),
        "prompt.keys": str(prompt),
        "/mnt/nvme0/kvpool": str(tmp_path),
    }
    texts = examples(repo_root)
    assert len(texts) > 30
    on_b = ("kvpool pin", "kvpool unpin")  # where the block is
    for text in texts:
        command = text.partition(" > ")[0]
        for name, value in real.items():
            command = command.replace(name, value)
        words = shlex.split(command)[1:]
        if {"check", "demo", "version"} & set(words):
            done = kvpool.alone(*words)
        else:
            node = b.node if text.startswith(on_b) else a.node
            done = kvpool(node, *words)
        # The machine may lack what doctor looks for.
        assert done.status == 0 or "doctor" in words, (text, done.out, done.err)
        assert done.out or "--quiet" in words, text

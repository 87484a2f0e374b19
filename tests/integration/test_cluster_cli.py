"""The operator's commands, each in a process of its own, against daemons on a real etcd and a real Redis."""

import itertools
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvpool import __version__
from kvpool.client import OperatorClient
from kvpool.errors import StaleEpoch
from kvpool.types import NamespaceRecord
from tests.support.local_cluster import UNHURRIED, LocalCluster, LocalNode
from tests.support.servers.etcd import Etcd
from tests.support.servers.redis import Redis
from tests.support.waiting import PATIENCE_S

NBYTES = 16 << 10
RECORD = NamespaceRecord.simple("commands", block_bytes=NBYTES, block_tokens=16)
DIGEST = RECORD.digest().hex()
ABSENT = "ff" * 16
PASSWORD = "hush-hush-4711"


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def keys_of(numbers: range) -> list[bytes]:
    return [key(number) for number in numbers]


def put(client: OperatorClient, numbers: range) -> None:
    blocks = [bytes([number % 251]) * NBYTES for number in numbers]
    assert client.put(client.open(RECORD), keys_of(numbers), blocks) == len(blocks)


class Commands:
    """Runs `kvpool` as an operator would, with nothing of ours in the environment but what is given.

    script: what Python runs, if not the command.
    """

    def __init__(
        self, environ: dict[str, str], script: Sequence[str] = ("-m", "kvpool.cli")
    ) -> None:
        self.environ = environ
        self.command = [sys.executable, "-Walways::ResourceWarning", *script]

    def begin(self, node: LocalNode, *words: str, **environ: str) -> "subprocess.Popen[str]":
        # As from a terminal: what a shell runs in the background ignores it, and so do its children.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return subprocess.Popen(
                [*self.command, *words, "--socket", node.socket],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=self.environ | environ,
            )
        finally:
            signal.signal(signal.SIGINT, before)

    def __call__(self, node: LocalNode, *words: str, **environ: str) -> SimpleNamespace:
        """Its exit status, and what it has said."""
        with self.begin(node, *words, **environ) as process:
            out, err = process.communicate(timeout=PATIENCE_S)
        assert "Warning" not in err
        assert "Traceback" not in err
        return SimpleNamespace(status=process.returncode, out=out, err=err)

    def alone(self, *words: str, **environ: str) -> SimpleNamespace:
        """One that asks no daemon."""
        done = subprocess.run(
            [*self.command, *words],
            env=self.environ | environ,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        return SimpleNamespace(status=done.returncode, out=done.stdout, err=done.stderr)

    def json(self, node: LocalNode, *words: str, **environ: str):
        done = self(node, *words, "--json", **environ)
        assert done.err == "" and done.out, done
        return json.loads(done.out)


@pytest.fixture
def kvpool(clean_environ, folder: Path) -> Commands:
    environ = clean_environ(folder)
    environ.pop("COLUMNS", None)
    return Commands(environ)


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> Iterator[tuple[Etcd, Redis]]:
    folder = tmp_path_factory.mktemp("servers")
    with Etcd(folder / "etcd") as etcd, Redis(folder / "redis") as redis:
        yield etcd, redis


_numbers = itertools.count()


@pytest.fixture
def start_cluster(servers, folder: Path) -> Iterator[Callable[..., LocalCluster]]:
    """Starts clusters of their own name on the file's servers; all end with the test."""
    begun: list[LocalCluster] = []
    etcd, redis = servers

    def begin(**settings) -> LocalCluster:
        given = {"nodes": 2, "memory": "16MiB", "etcd": etcd, "redis": redis}
        name = f"c{next(_numbers)}"
        (folder / name).mkdir()
        environ = {**UNHURRIED, **settings.pop("environ", {})}
        cluster = LocalCluster(folder / name, name=name, environ=environ, **(given | settings))
        begun.append(cluster.__enter__())
        cluster.wait_acquainted()
        return cluster

    yield begin
    for cluster in begun:
        cluster.__exit__(None, None, None)


@pytest.fixture
def cluster(start_cluster) -> LocalCluster:
    """Nodes a and b."""
    return start_cluster(labels={"a": "zone=z1,rack=7", "b": "zone=z2"})


@pytest.fixture
def at_a(cluster) -> Iterator[OperatorClient]:
    with cluster.node("a").client(connect=True) as client:
        yield client


@pytest.fixture
def at_b(cluster) -> Iterator[OperatorClient]:
    with cluster.node("b").client(connect=True) as client:
        yield client


def nodes_by_name(described: dict) -> dict[str, dict]:
    return {record["node"]: record for record in described["nodes"]}


def wait_for_nodes(until, node: LocalNode, names: Iterable[str]) -> None:
    """Until a node sees these and no others. A client asks: a command takes half a second to start."""
    with OperatorClient(node.socket, timeout_s=PATIENCE_S) as client:
        until(
            lambda: sorted(nodes_by_name(client.cluster())) == sorted(names),
            what=f"{node.socket} sees {names}",
        )


# ---- what is shown -------------------------------------------------------------------------------------


def test_nodes_as_each_of_them_sees_them(cluster, kvpool):
    a, b = cluster.nodes
    done = kvpool(a, "nodes")
    assert (done.status, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0] == (f"cluster {cluster.name}, seen by node a: 2 nodes, version {__version__}")
    (row,) = [line for line in lines if line.startswith("* a ")]
    assert "rack=7, zone=z1" in row
    assert a.url in row
    assert "/16 MiB " in row and "tcp://" in row.split()[-1]
    (row,) = [line for line in lines if line.startswith("  b ")]
    assert "zone=z2" in row
    assert b.url in row
    assert lines[-1].startswith("directory connected, lag ")
    assert "* b " in kvpool(b, "nodes").out
    seen = [nodes_by_name(kvpool.json(node, "nodes")) for node in cluster.nodes]
    assert [record["incarnation"] for record in seen[0].values()] == [
        record["incarnation"] for record in seen[1].values()
    ]


def test_where_blocks_are(cluster, at_a, kvpool, until):
    a, b = cluster.nodes
    put(at_a, range(3))
    with b.client(connect=True) as at_b:
        at_b.open(RECORD)
        until(lambda: at_b.locate([key(2)]), what="b is told")
    done = kvpool(
        b, "blocks", "locate", key(0).hex(), key(1).hex().upper(), "--namespace", DIGEST[:5]
    )
    assert (done.status, done.err) == (0, "")
    rows = [line.split() for line in done.out.splitlines()[1:]]
    assert rows == [[key(n).hex(), DIGEST[:12], "a", "dram", "1", "of", "1"] for n in (0, 1)]
    done = kvpool(a, "blocks", "locate", key(0).hex(), ABSENT)
    assert done.status == 1
    assert key(0).hex() in done.out
    assert done.err.startswith(f"kvpool: not found: {ABSENT} (")
    (found,) = json.loads(kvpool(a, "blocks", "locate", key(0).hex(), ABSENT, "--json").out)
    assert [replica["node"] for replica in found["replicas"]] == ["a"]


def test_peers_are_shown_by_name(cluster, at_a, at_b, kvpool, until):
    put(at_a, range(4))
    ns = at_b.open(RECORD)
    until(lambda: at_b.pull(ns, keys_of(range(4)), wait_s=PATIENCE_S) == 4, what="b has pulled")
    text = kvpool(cluster.node("b"), "status").out
    peers = text[text.index("\nPeers") :].splitlines()
    assert peers[3].split()[:3] == ["a", "host", "well"]
    assert "4 blocks pulled" in text
    assert f"cluster {cluster.name}  1 other node to pull from" in text


def test_rows_are_lines_where_there_is_no_terminal(cluster, kvpool):
    """Wide or not, so that they can be filtered; on a terminal nothing is wider than that."""
    long = "label-" + "x" * 50
    c = cluster.add("c", "--label", f"rack={long}", "--label", f"zone={long}")
    row = next(line for line in kvpool(c, "nodes").out.splitlines() if line.startswith("* c "))
    assert row.count(long) == 2
    narrow = kvpool(c, "nodes", COLUMNS="80").out.splitlines()
    assert max(map(len, narrow)) <= 80
    row = next(line for line in narrow if line.startswith("* c "))
    assert row.split()[2] == "serving"


# ---- what is changed -----------------------------------------------------------------------------------


def test_reset_makes_blocks_misses_everywhere(cluster, at_a, at_b, kvpool, until):
    a, b = cluster.nodes
    put(at_a, range(5))
    ns = at_b.open(RECORD)
    until(lambda: at_b.pull(ns, keys_of(range(5)), wait_s=PATIENCE_S) == 5, what="b has pulled")
    done = kvpool(b, "clear", DIGEST[:4], "--yes")
    assert done.status == 0
    assert f"namespace {DIGEST} of tenant default is in epoch 1" in done.out
    for client in (at_a, at_b):
        mine = client.open(RECORD)
        until(lambda c=client, n=mine: c.match(n, keys_of(range(5))) == 0, what="a miss")
        assert client.pull(mine, keys_of(range(5)), wait_s=0.1) == 0
    put(at_a, range(5))
    until(
        lambda: at_b.pull(ns, keys_of(range(5)), wait_s=PATIENCE_S) == 5, what="b goes on by itself"
    )
    (row,) = kvpool.json(a, "namespaces")
    assert (row["epoch"], row["fence"], row["blocks"]) == (1, 0, 5)


def test_a_fence_has_engines_open_a_namespace_again(cluster, at_a, kvpool, until):
    a, b = cluster.nodes
    put(at_a, range(2))
    ns = at_a.open(RECORD)
    # By the other node, where nobody has opened it.
    with b.client() as at_b:
        until(lambda: at_b.cluster()["namespaces"], what="b knows the namespace")
    done = kvpool(b, "clear", DIGEST, "--fence", "--yes")
    assert (done.status, done.err) == (0, "")
    assert "until they open it again" in done.out

    def fenced() -> bool:
        (entry,) = at_a.cluster()["namespaces"]
        return (entry["epoch"], entry["fence"]) == (1, 1)

    until(fenced, what="a hears of it")
    assert f"fenced at this epoch: {DIGEST[:12]}" in kvpool(a, "namespaces").out
    assert at_a.match(ns, keys_of(range(2))) == 0
    with pytest.raises(StaleEpoch):
        at_a.put(ns, keys_of(range(2)), [bytes(NBYTES)] * 2)
    put(at_a, range(2))  # opens it again
    assert at_a.match(ns, keys_of(range(2))) == 2


def test_copies_are_made(cluster, at_a, at_b, kvpool, until):
    a = cluster.node("a")
    put(at_a, range(3))
    at_b.open(RECORD)
    done = kvpool(a, "configure", DIGEST[:6], "--replicas", "2", "--ttl", "1h")
    assert (done.status, done.err) == (0, "")

    def holders() -> list[set[str]]:
        found = at_a.locate(keys_of(range(3)))
        return [{replica.node for replica in block.replicas} for block in found]

    until(lambda: holders() == [{"a", "b"}] * 3, what="two copies of each")
    (row,) = kvpool.json(a, "namespaces")
    assert (row["settings"]["replicas"], row["settings"]["ttl_s"]) == (2, 3600.0)


def test_errors_are_a_line_that_names_the_remedy(start_cluster, kvpool):
    (a,) = start_cluster(nodes=1).nodes
    with a.client(connect=True) as client:
        client.open(RECORD)
        for words, hint in (
            (("clear", "beef"), "no namespace of this tenant begins with beef"),
            (("clear", ABSENT, "-y"), "`kvpool namespaces` lists"),
            (("configure", DIGEST[:4], "--replicas", "1000"), "replicas_max"),
            (("configure", DIGEST[:4], "--write", "later"), "back, through, none"),
            (("blocks", "locate", "abc"), "32 hex digits"),
            (("drain", "nobody"), "`kvpool nodes` lists the nodes"),
            (("status", "--tenant", "nobody"), "check tenant and token"),
        ):
            done = kvpool(a, *words)
            status = 4 if "--tenant" in words else 1
            assert (done.status, done.out) == (status, ""), words
            assert re.fullmatch(r"kvpool: [^\n]+\n", done.err), words
            assert hint in done.err


# ---- draining ------------------------------------------------------------------------------------------


def hear(process: "subprocess.Popen[str]", words: str) -> str:
    """All that it writes to stderr until the words occur in that."""
    assert process.stderr is not None
    deadline = time.monotonic() + PATIENCE_S
    said = ""
    while words not in said:
        left = max(0.0, deadline - time.monotonic())
        readable, _, _ = select.select([process.stderr], [], [], left)
        data = os.read(process.stderr.fileno(), 1 << 16) if readable else b""
        assert data, f"it has not said {words!r}, but {said!r}"
        said += data.decode()
    return said


def test_a_drained_node_has_left_nothing_behind(cluster, at_a, at_b, kvpool, until):
    a, b = cluster.nodes
    put(at_a, range(40))
    at_b.open(RECORD)
    lease = at_a.acquire(at_a.open(RECORD), [key(0)], lease_s=PATIENCE_S)
    assert lease is not None
    with kvpool.begin(b, "drain", "a") as process:
        hear(process, "waiting for 1 lease to end")
        shown = kvpool(b, "nodes").out
        assert re.search(r"^  a +draining 100%", shown, re.MULTILINE)
        assert "a is being drained: 40 of 40 blocks looked at, 40 copied, 640 KiB" in shown
        lease.release()
        at_a.stats()  # carries the release
        out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert out.startswith("a is drained and has left the cluster: 40 blocks that only it held were")
    wait_for_nodes(until, b, "b")
    assert "a is drained and not here" in kvpool(b, "nodes").out
    text = kvpool(a, "nodes").out
    assert "this node is not a member (out): it was drained and has left" in text
    ns = at_b.open(RECORD)
    assert [bool(block) for block in at_b.get(ns, keys_of(range(40)))] == [True] * 40
    assert kvpool(b, "drain", "a").out.startswith("a is not in the cluster")
    done = kvpool(b, "drain", "a", "--cancel")
    assert (done.status, "a is no longer drained" in done.out) == (0, True)
    wait_for_nodes(until, b, "ab")
    assert kvpool.json(b, "nodes")["drains"] == []


def test_a_drain_that_finds_no_place_says_so(start_cluster, kvpool, until):
    (a,) = start_cluster(nodes=1).nodes
    with a.client(connect=True) as client:
        put(client, range(7))
        lease = client.acquire(client.open(RECORD), [key(0)], lease_s=PATIENCE_S)
        assert lease is not None
        with kvpool.begin(a, "drain", "a") as process:
            line = hear(process, "waiting for 1 lease to end")
            assert "7 that only it has found no other place" in line
            lease.release()
            client.stats()
            out, err = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, out) == (1, "")
        assert "7 blocks that only it holds found no other place" in err
        assert "`kvpool drain a --cancel`" in err
        assert kvpool(a, "drain", "a", "--cancel").status == 0
        wait_for_nodes(until, a, "a")
        assert client.match(client.open(RECORD), keys_of(range(7))) == 7


def test_an_interrupted_wait_leaves_the_drain_going(cluster, at_a, kvpool, until):
    b = cluster.node("b")
    put(at_a, range(3))
    lease = at_a.acquire(at_a.open(RECORD), [key(0)], lease_s=PATIENCE_S)
    assert lease is not None
    with kvpool.begin(b, "drain", "a") as process:
        hear(process, "waiting for 1 lease to end")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (130, "")
    assert "the drain of a continues" in err
    described = kvpool.json(b, "nodes")
    assert described["drains"] == ["a"]
    assert nodes_by_name(described)["a"]["state"] == "draining"
    done = kvpool(b, "drain", "a", "--timeout", "0")
    assert done.status == 1
    assert "a is not drained after 0 s (3 of 3 blocks looked at" in done.err
    assert kvpool(b, "drain", "a", "--cancel").status == 0
    with b.client() as at_b:
        until(
            lambda: nodes_by_name(at_b.cluster())["a"]["state"] == "serving",
            what="a serves again",
        )
    assert nodes_by_name(kvpool.json(b, "nodes"))["a"]["drain"] is None
    lease.release()


# ---- faults and secrets --------------------------------------------------------------------------------


def test_a_node_without_etcd_says_what_that_means(folder, servers, kvpool, until):
    _, redis = servers
    with (
        Etcd(folder / "etcd") as etcd,
        LocalCluster(
            folder,
            nodes=1,
            memory="16MiB",
            etcd=etcd,
            redis=redis,
            name="without-etcd",
            environ={"KVPOOL_MEMBER_TTL_S": "1"},
        ) as cluster,
    ):
        (a,) = cluster.nodes
        # With so short a lease, a machine that stands still for a moment is enough.
        until(lambda: "not a member" not in kvpool(a, "nodes").out, what="it is a member")
        etcd.members[0].kill()
        until(
            lambda: (
                "this node is not a member (away): etcd does not answer" in kvpool(a, "nodes").out
            ),
            what="it says so",
        )
        # Each renewal that fails is a moment in which it cannot know.
        until(lambda: "not a member (away)" in kvpool(a, "status").out)


def test_only_operators_are_shown_the_cluster(start_cluster, kvpool):
    token = "a token for operators"
    (a,) = start_cluster(nodes=1, environ={"KVPOOL_OPERATOR_TOKEN": token}).nodes
    for words in (
        ("nodes",),
        ("blocks", "locate", ABSENT),
        ("drain", "a"),
        ("clear", ABSENT, "-y"),
    ):
        done = kvpool(a, *words)
        assert done.status == 4, words
        assert "KVPOOL_OPERATOR_TOKEN" in done.err
        assert token not in done.err
    assert kvpool(a, "nodes", KVPOOL_OPERATOR_TOKEN="another").status == 4
    assert kvpool(a, "nodes", KVPOOL_OPERATOR_TOKEN=token).status == 0
    assert kvpool(a, "status").status == 0, "a tenant may know how it fares"


def test_flags_of_a_cluster_and_where_passwords_stay(folder, servers, start, clean_environ, until):
    etcd, _ = servers
    flags = ("--listen", "tcp://127.0.0.1:0", "--join", etcd.url, "--cluster", "by-flags")
    with Redis(folder / "redis", password=PASSWORD) as redis:
        refused = start(
            *flags,
            "--directory",
            redis.url.replace("://", f"://:{PASSWORD}@"),
            ready=False,
            name="refused",
        )
        assert refused.wait_end() == 1
        assert "KVPOOL_DIRECTORY_PASSWORD" in refused.stderr
        assert PASSWORD not in refused.stderr
        in_a_variable = start(
            *flags,
            "--label",
            "zone=z",
            "--replication-bandwidth",
            "1MiB",
            "-v",
            name="node-1",
            KVPOOL_DIRECTORY=redis.url.replace("://", f"://:{PASSWORD}@"),
            KVPOOL_NODE="node-1",
        )
        beside_it = start(
            *flags,
            "--directory",
            redis.url,
            "--no-forward",
            "-v",
            name="node-2",
            KVPOOL_DIRECTORY_PASSWORD=PASSWORD,
            KVPOOL_NODE="node-2",
        )
        kvpool = Commands(clean_environ(folder))
        wait_for_nodes(until, in_a_variable, ["node-1", "node-2"])
        said = ""
        for node in (in_a_variable, beside_it):
            until(
                lambda n=node: kvpool.json(n, "nodes")["directory"]["connected"],
                what="the directory is connected",
            )
            assert node.ready.rsplit("peers at ", 1)[1].startswith("tcp://127.0.0.1:")
            assert node.process.stdout is not None
            second = node.process.stdout.readline().decode()
            assert second.startswith("joined cluster by-flags as incarnation ")
            said += node.ready + second + kvpool(node, "status", "--json").out
            said += kvpool(node, "nodes", "--json").out + node.stderr
        described = nodes_by_name(kvpool.json(beside_it, "nodes"))
        assert described["node-1"]["labels"] == {"zone": "z"}
        redis.kill()
        until(
            lambda: not kvpool.json(beside_it, "nodes")["directory"]["connected"],
            what="Redis is missed",
        )
        said += in_a_variable.stderr + beside_it.stderr
        assert PASSWORD not in said


def test_a_wrong_password_of_redis_is_not_repeated(folder, servers, start):
    etcd, _ = servers
    with Redis(folder / "redis", password=PASSWORD) as redis:
        daemon = start(
            *("--listen", "tcp://127.0.0.1:0", "--join", etcd.url, "--cluster", "wrong"),
            *("--directory", redis.url),
            ready=False,
            KVPOOL_DIRECTORY_PASSWORD="wrong-wrong-0815",
        )
        assert daemon.wait_end() == 1
        last = daemon.stderr.splitlines()[-1]
        assert last.startswith("kvpool: ")
        assert "Check the directory's user and password" in last
        assert "wrong-wrong-0815" not in daemon.stderr

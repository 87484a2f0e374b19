"""Who may not be part of a cluster is told so in one line, and disturbs nobody who is."""

import json
import os
import socket
import subprocess
import sys
import time
from urllib.parse import urlsplit

import pytest

from kvpool.errors import NotAuthenticated
from kvpool.placement.records import ClusterConfig, encode_record
from kvpool.security.cluster_secrets import ClusterSecrets
from kvpool.transfer.base import Deadline, Identity, Stop, TransferLimits
from kvpool.transfer.connections import Connections
from kvpool.transfer.stream import Stream
from kvpool.wire import peer as peer_wire
from tests.support.local_cluster import SECRET
from tests.support.proxy import Fault, Proxy
from tests.support.servers.etcd import Etcd, free_port
from tests.support.servers.redis import Redis
from tests.support.waiting import PATIENCE_S

OTHER_SECRET = "another secret of enough length"
REFUSED_S = PATIENCE_S

# What a daemon runs in place of `kvpool`: the same, in a world that is not right.
SAME_INCARNATION = """
import kvpool.daemon.server.server
kvpool.daemon.server.server.new_incarnation = lambda: "00000000000000aa"
from kvpool.cli import main
main()
"""
# gRPC counts its deadlines in C, by the machine's clock, which is not ours to move: it keeps the right one.
SKEWED = """
import time, types
import grpc.aio._utils
grpc.aio._utils.time = types.SimpleNamespace(time=time.time)
right = time.time
time.time = lambda: right() + {seconds}
time.time_ns = lambda: int(time.time() * 1e9)
from kvpool.cli import main
main()
"""


def program(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def refusal(node, seconds: float = REFUSED_S) -> str:
    """Start a daemon that is to be turned away, unless it was; the one line it leaves."""
    if node.process is None:
        node.begin()
    assert node.wait_end(seconds) == 1
    lines = [line for line in node.said.splitlines() if line.startswith("kvpool: ")]
    assert "Traceback" not in node.said
    assert len(lines) == 1, node.said
    assert node.said.splitlines()[-1] == lines[0]
    return lines[0]


@pytest.fixture(scope="module")
def world(shared_cluster):
    """One node, which is to be disturbed by nobody."""
    with shared_cluster(nodes=1, memory="32MiB", environ={"KVPOOL_MEMBER_TTL_S": "8"}) as world:
        yield world


def test_a_node_with_another_secret_is_turned_away(world):
    wrong = world.make("b", environ={"KVPOOL_CLUSTER_SECRET": OTHER_SECRET})
    said = refusal(wrong)
    assert "secret differs from that of cluster" in said
    assert OTHER_SECRET not in said
    assert set(world.seat("a").members) == {"a"}


def test_a_node_without_a_secret_is_turned_away_too(world):
    assert "secret" in refusal(world.make("b", environ={"KVPOOL_CLUSTER_SECRET": ""}))


def test_a_living_nodes_name_is_refused_to_another_daemon(world, numbers, until):
    a = world.seat("a")
    some = numbers(5)
    a.put(some)
    before = a.incarnation
    clash = world.make("a")
    clash.socket += ".second"
    clash.log = clash.log.with_suffix(".second")  # not what the first one says meanwhile
    assert "another daemon is node 'a'" in refusal(clash)
    assert a.incarnation == before
    assert a.standing == "member"
    assert a.read(some) == 5


def test_two_daemons_with_one_incarnation_are_never_both_members(world, until):
    first = world.make("b", program=program(SAME_INCARNATION))
    first.start()
    second = world.make("c", program=program(SAME_INCARNATION))
    said = refusal(second)
    assert "incarnation 00000000000000aa of node 'c' is in use by node 'b'" in said
    world.until_all_see([world.seat("a"), world.seat("b")])
    first.stop()


def test_a_node_of_another_cluster_at_the_same_servers_sees_and_gets_nothing(
    world, start_cluster, numbers, until
):
    a = world.seat("a")
    some = numbers(10)
    a.put(some)
    until(lambda: a.announced)
    stranger = start_cluster(nodes=1, environ={"KVPOOL_PEERS": world.node("a").url}).seat("a")
    assert stranger.put(numbers(3)) == 3
    assert stranger.members.keys() == {"a"}
    assert stranger.members["a"]["incarnation"] != a.incarnation
    assert stranger.read(some, wait_s=2) == 0
    peers = stranger.stats.fetch.peers
    assert not any(peer.bytes for peer in peers)


@pytest.mark.parametrize(
    ("identity", "error", "match"),
    [
        ({"cluster": "another"}, NotAuthenticated, "does not belong to cluster 'another'"),
        ({"secrets": ClusterSecrets.of(OTHER_SECRET)}, NotAuthenticated, "secret"),
        ({"secrets": ClusterSecrets.of()}, NotAuthenticated, "secret"),
    ],
)
def test_peers_refuse_who_cannot_prove_to_be_of_their_cluster(world, identity, error, match):
    right = {
        "cluster": world.name,
        "node": "x",
        "incarnation": "0" * 16,
        "secrets": ClusterSecrets.of(SECRET),
    }
    url = world.node("a").url
    connections = Connections(Identity(**(right | identity)), TransferLimits())
    with pytest.raises(error, match=match):
        connections.connect(url, Deadline(PATIENCE_S), Stop())
    connections.close()
    right_one = Connections(Identity(**right), TransferLimits())
    right_one.connect(url, Deadline(PATIENCE_S), Stop()).close()
    right_one.close()


def test_a_node_that_is_too_old_for_its_cluster_is_turned_away(start_cluster):
    world = start_cluster(nodes=1)
    config = json.loads(world.etcd.get(f"/kvpool/{world.name}/config"))
    config["protocol_min"] = 1000
    world.etcd.put(f"/kvpool/{world.name}/config", json.dumps(config).encode())
    said = refusal(world.make("b"))
    assert "requires protocol 1000 or newer" in said
    assert "upgrade this node" in said


def test_records_of_another_cluster_are_not_taken_for_ours(start_cluster):
    world = start_cluster(nodes=0)
    other = encode_record(ClusterConfig(cluster="theirs"))
    world.etcd.put(f"/kvpool/{world.name}/config", other)
    assert "of cluster 'theirs', not of" in refusal(world.make("b"))


@pytest.mark.slow
def test_a_daemon_without_its_etcd_says_so_and_ends_in_time(world):
    absent = f"127.0.0.1:{free_port()}"
    with Proxy(("127.0.0.1", 1)) as proxy:
        proxy.set(Fault(silent=True))
        silent = f"127.0.0.1:{proxy.address[1]}"
        begun = time.monotonic()
        nodes = []
        for name, where in (("d", absent), ("e", silent)):
            node = world.make(name, environ={"KVPOOL_JOIN": f"etcd://{where}"})
            node.begin()
            nodes.append((node, where))
        for node, where in nodes:
            assert where in refusal(node)
        assert time.monotonic() - begun < REFUSED_S


def test_a_full_etcd_takes_no_new_node_and_says_why(start_cluster):
    world = start_cluster(own_servers=True, nodes=1)
    member = world.etcd.post("maintenance/status", {})["header"]["member_id"]
    alarm = {"action": "ACTIVATE", "memberID": member, "alarm": "NOSPACE"}
    world.etcd.post("maintenance/alarm", alarm)
    said = refusal(world.make("b"))
    assert "etcd's database is full" in said
    assert "etcdctl alarm disarm" in said
    a = world.seat("a")
    assert a.standing == "member"
    world.etcd.disarm()
    world.add("c")


@pytest.mark.parametrize("password", ["wrong", ""])
def test_a_wrong_password_for_etcd_is_told(tmp_path, start_cluster, password):
    with Etcd(tmp_path / "etcd") as etcd:
        etcd.enable_auth("kvpool", "right", "/kvpool/")
        url = etcd.url.replace("://", "://kvpool@") if password else etcd.url
        world = start_cluster(nodes=0, etcd_url=lambda _: url)
        said = refusal(world.make("a", environ={"KVPOOL_JOIN_PASSWORD": password}))
        assert "etcd" in said
        assert "password" in said
        if password:
            right = world.make("b", environ={"KVPOOL_JOIN_PASSWORD": "right"})
            right.start()
            right.stop()


@pytest.mark.parametrize("password", ["wrong", ""])
def test_a_wrong_password_for_redis_is_told(tmp_path, start_cluster, password):
    with Redis(tmp_path / "redis", password="right") as redis:
        world = start_cluster(nodes=0, directory=redis.url)
        said = refusal(world.make("a", environ={"KVPOOL_DIRECTORY_PASSWORD": password}))
        assert "password" in said.lower()
        right = world.make("b", environ={"KVPOOL_DIRECTORY_PASSWORD": "right"})
        right.start()
        right.stop()


@pytest.mark.slow
def test_nodes_whose_clocks_are_minutes_off_are_like_any_other(world, numbers, until):
    a = world.seat("a")
    nodes = []
    for name, seconds in (("fast", 600), ("slow", -600)):
        node = world.make(name, program=program(SKEWED.format(seconds=seconds)))
        node.begin()
        nodes.append(node)
    for node in nodes:
        node.wait_ready()
    seats = [a, *(world.seat(node.name) for node in nodes)]
    world.until_all_see(seats)
    parts = [numbers(20) for _ in seats]
    for seat, some in zip(seats, parts, strict=True):
        seat.put(some)
    until(lambda: all(seat.announced for seat in seats))
    for seat in seats:
        assert [seat.read(some) for some in parts] == [20, 20, 20]
    joined = time.monotonic()
    until(lambda: time.monotonic() > joined + 11, "longer than a lease lasts")
    assert {seat.standing for seat in seats} == {"member"}
    assert all(set(seat.members) == {"a", "fast", "slow"} for seat in seats)
    for node in nodes:
        a.client.drain(node.name)
    until(lambda: set(a.members) == {"a"}, "their drains are like any other's")
    for node in nodes:
        node.stop()


def test_only_operators_do_what_concerns_others(start_cluster, numbers):
    token = "an operator's token"
    world = start_cluster(nodes=1, environ={"KVPOOL_OPERATOR_TOKEN": token})
    plain, wrong = world.seat("a"), world.seat("a", operator_token="x" * len(token))
    operator = world.seat("a", operator_token=token)
    some = numbers(3)
    for seat in (plain, wrong):
        assert seat.put(some) in {0, 3}
        assert seat.read(some) == 3
        for refused in (
            lambda c: c.cluster(),
            lambda c: c.locate([bytes(16)]),
            lambda c: c.drain("a"),
            lambda c: c.clear(plain.ns.digest),
            lambda c: c.configure(plain.ns.digest, replicas=2),
        ):
            with pytest.raises(NotAuthenticated, match="operator"):
                refused(seat.client)
    assert set(operator.members) == {"a"}
    assert operator.client.clear(plain.ns.digest) == 1
    assert plain.read(some) == 0


AS_SOMEBODY_ELSE = """
import os, sys
from kvpool.client import OperatorClient
from kvpool.errors import NotAuthenticated
os.setuid(65534)
with OperatorClient(sys.argv[1], timeout_s=60, connect=True) as client:
    client.stats()
    try:
        client.cluster()
    except NotAuthenticated:
        print("refused")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_users_process_is_a_client_and_no_operator(folder, start_cluster):
    folder.chmod(0o711)
    world = start_cluster(nodes=0, environ={"KVPOOL_SOCKET_MODE": "666"})
    node = world.make("a")
    node.socket = str(folder / "a.sock")
    node.start()
    command = [sys.executable, "-c", AS_SOMEBODY_ELSE, node.socket]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == ("refused\n", 0), done.stderr
    node.stop()


def test_peers_of_another_protocol_version_are_refused(world):
    address = urlsplit(world.node("a").url)
    with socket.create_connection((address.hostname, address.port), PATIENCE_S) as sock:
        sock.setblocking(True)
        stream = Stream(sock, Deadline(PATIENCE_S))
        stream.send(peer_wire.PeerHello(2, world.name, "x", bytes(32), oldest=2), 1)
        answer = peer_wire.decode_peer(stream.receive(1 << 16)[1])
    assert answer.code == "protocol"
    assert "speaks protocol 2" in answer.message
    assert "install the same version" in answer.message

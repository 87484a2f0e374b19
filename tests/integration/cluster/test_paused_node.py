"""A node that was stopped for longer than its lease is dead to others, and comes back as a new one."""

import signal
import time

import msgspec
import pytest

from kvpool.placement.records import NodeRecord
from kvpool.security.cluster_secrets import ClusterSecrets
from kvpool.transfer.base import Deadline, Identity, Stop, TransferLimits
from kvpool.transfer.connections import Connections
from kvpool.wire.frame import FRAME_BYTES_MAX, Error
from kvpool.wire.peer import Fetched, decode_peer
from tests.support.fetches import fetch_of
from tests.support.local_cluster import SECRET
from tests.support.proxy import Fault, Proxy
from tests.support.waiting import PATIENCE_S


class Peer:
    """A conversation with a node, as one of its peers has it."""

    def __init__(self, world, node, seat) -> None:
        us = Identity(world.name, "x", "0" * 16, ClusterSecrets.of(SECRET))
        self.connections = Connections(us, TransferLimits())
        self.seat = seat
        self.stream = self.connections.connect(node.url, Deadline(PATIENCE_S), Stop())

    def ask(self, number: int) -> None:
        nbytes = self.seat.record.parts[0].nbytes
        keys = number.to_bytes(16, "big")
        self.stream.deadline = Deadline(PATIENCE_S)
        self.stream.send(fetch_of(self.seat.ns.digest, nbytes, keys, 60.0), 1)

    def hear(self) -> Error | Fetched:
        """The answer; its bytes, if there are any, are left unread with the connection."""
        return decode_peer(self.stream.receive(FRAME_BYTES_MAX)[1])

    def close(self) -> None:
        self.stream.close()
        self.connections.close()


def record_of(world, node: str) -> NodeRecord | None:
    stored = world.etcd.get(f"/kvpool/{world.name}/nodes/{node}")
    return None if stored is None else msgspec.json.decode(stored, type=NodeRecord)


@pytest.mark.slow
def test_a_paused_node_serves_and_publishes_nothing_before_it_is_a_member_again(
    servers, start_cluster, numbers, until
):
    etcd, _ = servers
    host, port = etcd.endpoints[0].split(":")
    with Proxy((host, int(port))) as proxy:
        far = f"etcd://{proxy.address[0]}:{proxy.address[1]}"
        world = start_cluster(
            nodes=2,
            etcd_url=lambda name: far if name == "a" else etcd.url,
            environ={"KVPOOL_MEMBER_TTL_S": "5"},
        )
        a, b = world.seats()
        some = numbers(30)
        a.put(some)
        until(lambda: a.announced)
        before = a.incarnation
        node = world.node("a")
        peer = Peer(world, node, a)
        node.signal(signal.SIGSTOP)
        try:
            until(lambda: "a" not in b.members, "its lease has ended")
            peer.ask(some[0])
            assert b.read(some, wait_s=0.5) == 0
            proxy.set(Fault(delay_s=0.3))  # so that coming back takes seconds
        finally:
            node.signal(signal.SIGCONT)
        refusals = 0
        resumed = time.monotonic()
        while isinstance(answer := peer.hear(), Error):
            assert time.monotonic() < resumed + PATIENCE_S, answer.message
            refusals += 1
            peer.ask(some[0])
        record = record_of(world, "a")
        assert record is not None, "it served a peer while it was no member"
        assert record.incarnation != before, "it served a peer as the one who is dead"
        assert refusals > 0
        peer.close()
        proxy.set()
        until(lambda: b.read(some, wait_s=2) == 30, "its blocks are found again")
        assert a.incarnation == record.incarnation
        replicas = b.client.locate([some[0].to_bytes(16, "big")], digest=b.ns.digest)[0].replicas
        entries = {r.incarnation for r in replicas if r.node == "a"}
        assert entries == {record.incarnation}
        assert a.client.cluster()["leases_lost"] == 1


def test_what_a_paused_nodes_own_clients_have_survives_its_new_incarnation(
    start_cluster, numbers, until
):
    world = start_cluster(nodes=2, environ={"KVPOOL_MEMBER_TTL_S": "4"})
    a, b = world.seats()
    some, later = numbers(20), numbers(20)
    a.put(some)
    lease = a.client.acquire(a.ns, [n.to_bytes(16, "big") for n in some], lease_s=60)
    node = world.node("a")
    node.signal(signal.SIGSTOP)
    until(lambda: "a" not in b.members)
    node.signal(signal.SIGCONT)
    assert a.read(some) == 20
    assert lease.valid
    lease.release()
    assert a.put(later) == 20
    until(lambda: b.read(some, wait_s=1) == 20)
    until(lambda: b.read(later, wait_s=1) == 20)


def test_a_nap_that_is_shorter_than_the_lease_changes_nothing(start_cluster, numbers, until):
    world = start_cluster(nodes=2, environ={"KVPOOL_MEMBER_TTL_S": "30"})
    a, b = world.seats()
    some = numbers(20)
    a.put(some)
    until(lambda: a.announced)
    before = a.incarnation
    node = world.node("a")
    node.signal(signal.SIGSTOP)
    assert b.read(some, wait_s=0.5) == 0
    node.signal(signal.SIGCONT)
    until(lambda: b.read(some, wait_s=1) == 20)
    assert a.incarnation == before
    assert set(b.members) == {"a", "b"}

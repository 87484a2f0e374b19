"""What a node tells of where it is, and how it reaches others by what they tell."""

from __future__ import annotations

import asyncio
import random

import msgspec

from kvpool.config import DaemonConfig
from kvpool.daemon.cluster.host_topology import HostTopology, Nic
from kvpool.daemon.cluster.member import ClusterMember
from kvpool.daemon.core.limits import Limits
from kvpool.daemon.core.node import Node
from kvpool.placement.membership.static import StaticCluster, StaticMembership
from kvpool.placement.nic_pairs import Way
from kvpool.placement.peers import Peers
from kvpool.placement.records import NodeRecord, NodeState, TransportRecord, new_incarnation
from kvpool.storage.eviction import policy_maker
from kvpool.wire import frame
from tests.support.local_node import MemoryOnly

NETS = "10.0.0.0/24", "10.1.0.0/24"
HERE = HostTopology(
    "host-a", 1, {"10.0.0.5": Nic("eth0", NETS[0], 0), "10.1.0.5": Nic("eth1", NETS[1], 1)}
)
LISTEN = ("tcp://10.0.0.5:1", "nixl://10.0.0.5:2", "tcp://10.1.0.5:1", "tcp://0.0.0.0:3")


def make(cluster: StaticCluster, **settings) -> ClusterMember:
    node = Node(
        make_policy=policy_maker("lru"),
        limits=Limits(),
        incarnation=new_incarnation(),
    )
    config = DaemonConfig(socket="/s", node="a", listen=LISTEN, join="etcd://h:1", **settings)
    rng = random.Random(1)
    return ClusterMember(
        config,
        node,
        StaticMembership(cluster),
        None,
        Peers(config.labels, rng),
        lambda: 5.0,
        rng,
        HERE,
    )


def other(*cards: TransportRecord, **more) -> NodeRecord:
    return NodeRecord(
        "b", "ab" * 8, NodeState.SERVING, cards, protocol=frame.PROTOCOL_VERSION, **more
    )


FIRST = TransportRecord("tcp://10.0.0.6:1", numa=0, net=NETS[0])
SECOND = TransportRecord("tcp://10.1.0.6:1", numa=1, net=NETS[1])


def test_a_node_tells_where_it_and_its_cards_are_in_every_life() -> None:
    async def run() -> None:
        labels = {"zone": "z", "rack": "r", "shelf": "7"}
        shown = ("tcp://out:1", "nixl://out:2", "tcp://10.1.0.5:3", "tcp://out:4")
        a = make(
            StaticCluster("kvpool"), labels=labels, advertise=shown, rails=("r0", "", "r1", "")
        )
        await a.start(LISTEN, MemoryOnly(a.node))
        try:
            record = a.record()
            assert (record.labels, record.host, record.numa) == (labels, "host-a", 1)
            assert record.transports == (
                TransportRecord("tcp://out:1", "", 0, "r0", ""),
                TransportRecord("nixl://out:2", "", 0, "", ""),
                TransportRecord("tcp://10.1.0.5:3", "", 1, "r1", NETS[1]),
                TransportRecord("tcp://out:4"),
            )
            before = record.incarnation
            await a.come_back()
            again = a.record()
            assert again.incarnation != before
            assert msgspec.structs.replace(again, incarnation=before) == record
        finally:
            await a.close()

    asyncio.run(run())


def test_ways_follow_what_the_other_node_tells() -> None:
    async def run() -> None:
        for bind_source in (False, True):
            cluster = StaticCluster("kvpool")
            a = make(cluster, bind_source=bind_source)
            await a.start(LISTEN, MemoryOnly(a.node))
            b = StaticMembership(cluster)
            try:
                await b.start()
                await b.join(other(FIRST, SECOND, numa=1, host="host-a"))
                route = a.route(FIRST.url)
                assert route is not None
                near, far = ("?source=10.1.0.5", "?source=10.0.0.5") if bind_source else ("", "")
                best, next_one = Way(SECOND.url + near, 0), Way(FIRST.url + far, 2)
                assert route.ways[:2] == (best, next_one)
                assert a.route(FIRST.url) is route, "worked out once"
                (link,) = a.links()
                assert (link.node, link.distance, link.path) == ("b", "host", FIRST.url)
                # A tier that fills changes no way; memory that is elsewhere does.
                await b.update(other(FIRST, SECOND, numa=1, host="host-a", version="2"))
                assert a.route(FIRST.url) is route
                await b.update(other(FIRST, SECOND, numa=0, host="host-b"))
                changed = a.route(FIRST.url)
                assert changed is not None
                assert [way.rank for way in changed.ways[:2]] == [1, 1]
                assert a.links()[0].distance == "unknown"
                await b.leave()
                assert a.route(FIRST.url) is None
                assert a.links() == []
            finally:
                await b.close()
                await a.close()

    asyncio.run(run())

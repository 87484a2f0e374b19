"""A node follows the others change by change, and knows what it would know if it had only just looked."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.config import DaemonConfig
from kvpool.daemon.cluster.host_topology import HostTopology
from kvpool.daemon.cluster.member import ClusterMember
from kvpool.daemon.core.node import Node
from kvpool.daemon.ops.event_log import membership_news
from kvpool.placement.membership.static import StaticCluster, StaticMembership
from kvpool.placement.peers import Peers
from kvpool.placement.records import (
    NodeRecord,
    NodeState,
    TierRecord,
    TransportRecord,
    View,
    changed_nodes,
)
from kvpool.storage.eviction import policy_maker
from kvpool.types import EngineRecord
from kvpool.wire import frame
from tests.support.local_node import MemoryOnly

OWN = "0" * 16


class Seen(StaticMembership):
    """Its view is what the test says."""

    def show(self, view: View) -> None:
        self.view = view


class Counting(Peers):
    """Counts the calls."""

    calls = 0

    def met(self, *args: Any, **more: Any) -> None:
        self.calls += 1
        super().met(*args, **more)

    def gone(self, incarnation: bytes) -> None:
        self.calls += 1
        super().gone(incarnation)


class Member:
    """A node whose membership is scripted."""

    def __init__(self) -> None:
        node = Node(make_policy=policy_maker("lru"), incarnation=OWN)
        rng = random.Random(1)
        self.peers = Counting({}, rng)
        self.membership = Seen(StaticCluster())
        self.local = MemoryOnly(node)
        config = DaemonConfig(socket="/s", node="own", join="etcd://h:1", peers=("tcp://fixed:1",))
        self.member = ClusterMember(
            *(config, node, self.membership, None, self.peers, lambda: 0.0, rng), HostTopology()
        )

    async def start(self) -> None:
        await self.member.start(["tcp://own:1"], self.local)

    def look(self, view: View) -> None:
        self.membership.show(view)
        self.member._look()


def made(name: str, life: int, state: NodeState, used: int, port: int) -> NodeRecord:
    return NodeRecord(
        name,
        f"{ord(name):02x}{life:014x}",
        state,
        (TransportRecord(f"tcp://{name}:{port}"),) if port else (),
        (TierRecord("dram", 100, used),),
        {"zone": "z"},
        protocol=frame.PROTOCOL_VERSION,
        engines=(EngineRecord(f"http://{name}:{life}"),) if life else (),
    )


records = st.builds(
    made,
    st.sampled_from("abcd"),
    st.integers(0, 2),
    st.sampled_from(NodeState),
    st.integers(0, 1),
    st.integers(0, 2),
)
views = st.lists(records, max_size=4).map(lambda found: {one.node: one for one in found})


def through(steps: list[dict[str, NodeRecord]]) -> list[View]:
    """As the mirror makes them: a record that stays the same is the same object."""
    made: list[View] = [View()]
    for nodes in steps:
        before = made[-1].nodes
        kept = {
            name: one if before.get(name) != one else before[name] for name, one in nodes.items()
        }
        made.append(View(nodes=kept, revision=made[-1].revision + 1))
    return made[1:]


@settings(max_examples=150, deadline=None)
@given(st.lists(views, min_size=1, max_size=8))
def test_change_by_change_it_knows_what_a_newcomer_knows(
    steps: list[dict[str, NodeRecord]],
) -> None:
    async def main() -> None:
        one = Member()
        await one.start()
        try:
            for view in through(steps):
                before = one.member.view
                one.look(view)
                fresh = Member()
                await fresh.start()
                fresh.look(view)
                assert one.member.living == fresh.member.living
                for port in (1, 2):
                    for name in "abcd":
                        url = f"tcp://{name}:{port}"
                        assert one.member.route(url) == fresh.member.route(url)
                here = {record.incarnation_bytes for record in view.nodes.values()}
                was = {record.incarnation_bytes for record in before.nodes.values()}
                was.discard(one.member.own)  # it counts as in the view
                dead = one.member._dead
                assert all(incarnation in dead for incarnation in was - here)
                assert not any(incarnation in dead for incarnation in here)
                assert one.member.own not in dead
                for incarnation in was - here:
                    assert one.peers.get(incarnation) is None
                await fresh.member.close()
        finally:
            await one.member.close()

    asyncio.run(main())


@given(views, views)
def test_news_are_those_of_whoever_compares_everything(
    first: dict[str, NodeRecord], second: dict[str, NodeRecord]
) -> None:
    before, after = through([first, second])
    news = [*membership_news(before, after, changed_nodes(before, after))]
    old = {one.incarnation: one for one in before.nodes.values()}
    new = {one.incarnation: one for one in after.nodes.values()}
    joined = {d["incarnation"] for kind, d in news if kind == "node joined"}
    left = {d["incarnation"] for kind, d in news if kind == "node left"}
    states = {d["of"] for kind, d in news if kind == "node state"}
    assert joined == new.keys() - old.keys()
    assert left == old.keys() - new.keys()
    assert states == {
        new[name].node for name in new.keys() & old.keys() if new[name].state is not old[name].state
    }
    assert len(joined) + len(left) + len(states) == sum(
        kind != "engine announced" for kind, _ in news
    )


def test_a_change_of_one_record_touches_no_other() -> None:
    """With a thousand nodes, too."""

    async def main() -> None:
        one = Member()
        await one.start()
        try:
            nodes = {
                f"n{number}": NodeRecord(
                    f"n{number}",
                    f"{number:016x}",
                    NodeState.SERVING,
                    (TransportRecord(f"tcp://n{number}:1"),),
                    protocol=frame.PROTOCOL_VERSION,
                )
                for number in range(1, 1001)
            }
            one.look(View(nodes=nodes, revision=1))
            living, repairs, calls = one.member.living, one.local.repairs, one.peers.calls
            assert len(living) == 1001
            full = NodeRecord(
                "n7",
                f"{7:016x}",
                NodeState.SERVING,
                (TransportRecord("tcp://n7:1"),),
                (TierRecord("dram", 1, 1),),
                protocol=frame.PROTOCOL_VERSION,
            )
            one.look(View(nodes={**nodes, "n7": full}, revision=2))
            assert one.peers.calls <= calls + 2
            assert one.local.repairs == repairs
            assert one.member.living[bytes.fromhex(full.incarnation)].record is full
            assert living[bytes.fromhex(full.incarnation)].record is nodes["n7"], "as it was held"
            again = one.member.living
            one.look(one.member.view)
            assert one.member.living is again
        finally:
            await one.member.close()

    asyncio.run(main())

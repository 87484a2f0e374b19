"""Namespaces that nobody uses: who notes what, when they are deleted, and what becomes of a node that was away."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Coroutine
from typing import Any, Self

import msgspec
import pytest

from kvpool.config import DaemonConfig
from kvpool.daemon.cluster.host_topology import HostTopology
from kvpool.daemon.cluster.member import ClusterMember
from kvpool.daemon.cluster.unused_namespaces import (
    HOUR_S,
    SPREAD_S,
    WRITTEN_MAX,
    UnusedNamespaces,
    unused,
)
from kvpool.daemon.core.blocks import Holder, NamespaceState
from kvpool.daemon.core.limits import Limits
from kvpool.daemon.core.node import Node
from kvpool.errors import LimitExceeded
from kvpool.placement.membership import admission
from kvpool.placement.membership.admission import GENERATIONS_APART, NOTE_HOURS
from kvpool.placement.membership.static import StaticCluster, StaticMembership
from kvpool.placement.peers import Peers
from kvpool.placement.records import (
    DEFAULT_SETTINGS,
    NamespaceClock,
    NodeRecord,
    SettingsChange,
    View,
    new_incarnation,
)
from kvpool.storage.eviction import policy_maker
from kvpool.types import PartSpec
from kvpool.wire import frame
from tests.contract.suites.membership import entry
from tests.support.local_node import MemoryOnly

DAYS = 2
AFTER_HOURS = 24 * DAYS + NOTE_HOURS


class OneNode:
    """A node of a cluster, whose time is what the test says."""

    def __init__(self, cluster: StaticCluster, name: str, *, days: int = DAYS) -> None:
        self.now = 0.0
        self.node = Node(
            make_policy=policy_maker("lru"), limits=Limits(), incarnation=new_incarnation()
        )
        self.tenant = self.node.add_tenant("red", 0, 4 << 20)
        self.membership = StaticMembership(cluster)
        rng = random.Random(1)
        config = DaemonConfig(socket="/s", node=name, join="etcd://h:1", namespace_unused_days=days)

        def clock() -> float:
            return self.now

        self.member = ClusterMember(
            *(config, self.node, self.membership, None, Peers({}, rng), clock, rng),
            HostTopology(),
        )
        self.local = MemoryOnly(self.node)
        self.unused = UnusedNamespaces(config, self.node, self.membership, clock, rng)

    async def start(self) -> None:
        await self.member.start([f"tcp://{self.member.config.node}:1"], self.local)

    async def step(self, times: int = 1) -> None:
        for _ in range(times):
            await self.unused.step(self.local)

    async def open(
        self, name: str, holder: Holder | None = None, generation: int = -1
    ) -> NamespaceState:
        """As the server does for a client."""
        fields = f'{{"model":"{name}"}}'.encode()
        base = hashlib.sha256(fields).digest()[:16]
        state = self.node.namespaces.open(self.tenant, base, fields, (PartSpec(1024),))
        if holder is not None:
            self.node.namespaces.opened(holder, state)
        known = await self.member.namespaces.register(state, DEFAULT_SETTINGS)
        opened = await self.member.namespaces.opened(known, generation)
        return self.node.namespaces.by_number(self.tenant, opened.number)


def store(node: OneNode, holder: Holder, state: NamespaceState, key: bytes) -> None:
    """A block of it."""
    rows = node.node.grants.grant(holder, state, 0, 1)
    node.node.grants.store(holder, state, 0, rows, [key], b"c" * 16)


class OneCluster:
    """Nodes that share a membership; the hours pass for all of them at once."""

    def __init__(self, *names: str, **changes: Any) -> None:
        self.cluster = StaticCluster()
        self.nodes = {name: OneNode(self.cluster, name, **changes) for name in names}

    async def __aenter__(self) -> Self:
        for node in self.nodes.values():
            await node.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for node in self.nodes.values():
            await node.member.close()

    async def pass_hours(self, hours: int, without: str = "") -> None:
        for _ in range(hours):
            for name, node in self.nodes.items():
                node.now += HOUR_S
                if name != without:
                    await node.step(3)
            for name, node in self.nodes.items():
                node.now += SPREAD_S
                if name != without:
                    await node.step(3)

    @property
    def names(self) -> list[str]:
        return sorted(
            msgspec.json.decode(one.fields)["model"]
            for one in self.cluster.view.namespaces.values()
        )


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


def test_what_a_client_has_open_or_memory_has_blocks_of_is_used() -> None:
    async def main() -> None:
        async with OneCluster("a", "b") as world:
            a, b = world.nodes.values()
            client = a.node.holders.add("red", "engine", "client")
            writer = b.node.holders.add("red", "engine", "writer")
            await a.open("open", client)
            await a.open("unused")
            state = await b.open("stored", writer)
            key = b"k" * 16
            store(b, writer, state, key)
            b.node.holders.died(writer)
            await world.pass_hours(AFTER_HOURS)
            assert world.names == ["open", "stored", "unused"], "not yet"
            await world.pass_hours(3)
            assert world.names == ["open", "stored"]
            assert a.unused.deleted + b.unused.deleted == 1
            assert b.node.leases.match(state, [], [key]) == 1

            a.node.holders.died(client)
            b.node.removal.remove(state, [key])
            await world.pass_hours(AFTER_HOURS + NOTE_HOURS + 3)
            assert world.names == []

    run(main())


def test_uses_are_noted_once_a_day_and_by_one_of_many() -> None:
    async def main() -> None:
        async with OneCluster("a", "b", "c") as world:
            for name, node in world.nodes.items():
                await node.open("m", node.node.holders.add("red", "engine", name))
            before = world.cluster.view.revision
            hours = 10 * NOTE_HOURS
            await world.pass_hours(hours)
            noted = world.cluster.view.revision - before - world.cluster.view.clock.hours
            assert 9 <= noted <= 10
            assert hours - 1 <= world.cluster.view.clock.hours <= hours

    run(main())


def test_a_node_that_was_away_finds_nothing_in_what_was_deleted_meanwhile() -> None:
    """Its client has the weights of then, and does not know which ones others had since."""

    async def main() -> None:
        async with OneCluster("a", "b") as world:
            a, b = world.nodes.values()
            client = b.node.holders.add("red", "engine", "client")
            before = await b.open("m", client)
            await a.open("m")
            key = b"k" * 16
            store(b, client, before, key)
            world.cluster.go_away("b")
            await world.pass_hours(AFTER_HOURS + 3, without="b")
            assert world.names == []
            world.cluster.come_back("b")
            now = b.node.namespaces.by_number(b.tenant, before.number)
            assert now.fenced
            assert b.node.leases.match(now, [], [key]) == 0
            # It opens the namespace again by itself, with its weights' number; then an engine with the latest ones.
            out = await b.open("m", client, before.generation)
            assert out.retired
            for node in (b, a):
                new = await node.open("m")
                assert (new.epoch, new.generation) == (1, GENERATIONS_APART)
                assert node.node.leases.match(new, [], [key]) == 0
            assert world.names == ["m"]

    run(main())


def test_a_node_that_missed_a_registration_and_a_deletion_finds_nothing_either() -> None:
    """The cluster knows the namespace as little as before, but an epoch has ended meanwhile."""

    async def main() -> None:
        async with OneCluster("a", "b") as world:
            a, b = world.nodes.values()
            client = b.node.holders.add("red", "engine", "client")
            first = await b.open("m", client)
            await a.open("other", a.node.holders.add("red", "engine", "client"))
            await world.pass_hours(AFTER_HOURS + 3, without="b")
            assert world.names == ["other"]
            key, other = b"k" * 16, await b.open("other", client)
            known = b.tenant.epochs[first.base][-1]
            for state in (known, other):
                store(b, client, state, key)
            world.cluster.go_away("b")
            await a.open("m")
            await world.pass_hours(AFTER_HOURS + 3, without="b")
            assert world.names == ["other"]
            assert b.node.leases.match(known, [], [key]) == 1
            world.cluster.come_back("b")
            assert known.retired
            assert b.node.leases.match(await b.open("m"), [], [key]) == 0
            assert b.node.leases.match(other, [], [key]) == 1

    run(main())


def test_one_that_is_opened_again_at_the_last_moment_stays() -> None:
    async def main() -> None:
        async with OneCluster("a", "b") as world:
            a, b = world.nodes.values()
            first = await a.open("m")
            await world.pass_hours(AFTER_HOURS - 1)
            again = await b.open("m", b.node.holders.add("red", "engine", "late"))
            await world.pass_hours(AFTER_HOURS)
            assert world.names == ["m"]
            assert (first.epoch, again.epoch) == (0, 0)

    run(main())


@pytest.mark.parametrize("reason", ["never", "a quota"])
def test_nothing_is_deleted(reason: str) -> None:
    async def main() -> None:
        async with OneCluster("a", days=0 if reason == "never" else DAYS) as world:
            (a,) = world.nodes.values()
            state = await a.open("m")
            if reason == "a quota":
                change = SettingsChange(dram_quota=0.5)
                await a.member.namespaces.configure(a.tenant, state.base, change)
            await world.pass_hours(AFTER_HOURS + NOTE_HOURS)
            assert world.names == ["m"]

    run(main())


def test_what_the_leader_uses_itself_stays_whatever_the_records_say() -> None:
    """As after a copy of etcd was brought back, in which the last uses are older than the clock says."""

    async def main() -> None:
        async with OneCluster("a") as world:
            (a,) = world.nodes.values()
            await a.open("m", a.node.holders.add("red", "engine", "client"))
            await world.pass_hours(3)
            clock = NamespaceClock(10 * AFTER_HOURS)
            world.cluster._set(clock=clock)
            a.now += HOUR_S
            await a.unused._delete(a.local)
            assert world.names == ["m"]
            await world.pass_hours(2)
            assert world.names == ["m"]
            assert a.unused.deleted == 0

    run(main())


def test_a_node_without_an_answer_finds_nothing_of_what_it_had_before_a_deletion() -> None:
    """Its disk has blocks of weights that changed while it was off; then the namespace was deleted."""

    async def main() -> None:
        async with OneCluster("a") as world:
            (a,) = world.nodes.values()
            first = await a.open("m")
            await a.member.namespaces.reset(first, 0)
            await world.pass_hours(AFTER_HOURS + 3)
            assert world.names == []
            b = OneNode(world.cluster, "b")
            world.nodes["b"] = b
            await b.start()
            world.cluster.go_away("b")
            restored = await b.member.namespaces.adopt(
                b.tenant, first.base, first.fields, first.parts, 0, 0
            )
            assert restored.epoch == world.cluster.view.clock.first_epoch == 2
            opened = await b.open("m")
            assert (opened, opened.retired) == (restored, False)

    run(main())


def test_what_is_opened_without_an_answer_is_kept_when_it_is_registered() -> None:
    async def main() -> None:
        async with OneCluster("a", "b") as world:
            a, b = world.nodes.values()
            await b.open("another")
            await world.pass_hours(AFTER_HOURS + 3)
            assert world.cluster.view.clock.first_epoch == 1
            world.cluster.go_away("a")
            client = a.node.holders.add("red", "engine", "client")
            state = await a.open("m", client)
            store(a, client, state, b"k" * 16)
            world.cluster.come_back("a")
            await a.member.namespaces.register_late()
            assert world.names == ["m"]
            again = await a.open("m", client, state.generation)
            assert (again, again.retired) == (state, False)
            assert a.node.leases.match(again, [], [b"k" * 16]) == 1

    run(main())


def test_many_at_once_are_deleted_in_steps() -> None:
    async def main() -> None:
        async with OneCluster("a") as world:
            (a,) = world.nodes.values()
            for number in range(3 * WRITTEN_MAX):
                await a.open(f"m{number:04}")
            while world.cluster.view.clock.hours < AFTER_HOURS:
                await world.pass_hours(1)
            a.now += HOUR_S
            await a.step()  # counts the hour
            await a.step()
            assert len(world.names) == 3 * WRITTEN_MAX, "others look first"
            a.now += HOUR_S / 2
            found = [len(world.names)]
            while world.names and len(found) < 9:
                await a.step()
                found.append(len(world.names))
            assert found == [3 * WRITTEN_MAX, 2 * WRITTEN_MAX, WRITTEN_MAX, 0]

    run(main())


def test_a_tenant_may_have_so_many_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "NAMESPACES_PER_TENANT_MAX", 2)

    async def main() -> None:
        async with OneCluster("a", "b") as world:
            a, b = world.nodes.values()
            await a.open("m0")
            await b.open("m1")
            await a.membership.register(entry("22", tenant="other"))
            for node in (a, b):
                with pytest.raises(LimitExceeded, match="namespace_unused_days"):
                    await node.open("m2")
                await node.open("m1")
            await world.pass_hours(AFTER_HOURS + 3)
            await b.open("m2")
            assert world.names == ["m2"]

    run(main())


def test_the_oldest_are_deleted_first() -> None:
    entries = [entry(f"{number:02}", used=used) for number, used in enumerate((30, 0, 90, 10))]
    clock = NamespaceClock(AFTER_HOURS + 30)
    node = NodeRecord("a", new_incarnation(), protocol=frame.PROTOCOL_VERSION)
    view = View({"a": node}, {(one.tenant, one.digest): one for one in entries}, clock)
    assert [one.used for one in unused(view, DAYS)] == [0, 10]
    assert unused(view, 30) == []

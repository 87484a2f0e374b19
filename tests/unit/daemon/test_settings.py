"""Settings of a namespace on a node: who says what they are, and what becomes of it after a restart."""

from __future__ import annotations

import asyncio
import hashlib
import random
from pathlib import Path
from typing import Self

import pytest

from kvpool.config import DaemonConfig
from kvpool.daemon.cluster.host_topology import HostTopology
from kvpool.daemon.cluster.member import ClusterMember
from kvpool.daemon.core.blocks import NamespaceState, Tenant
from kvpool.daemon.core.limits import Limits
from kvpool.daemon.core.node import Node
from kvpool.daemon.core.requests import parse_change, parse_wish
from kvpool.errors import InvalidRequest, LimitExceeded
from kvpool.placement.membership.static import StaticCluster, StaticMembership
from kvpool.placement.peers import Peers
from kvpool.placement.records import (
    DEFAULT_SETTINGS,
    NamespaceSettings,
    SettingsChange,
    new_incarnation,
)
from kvpool.storage.eviction import policy_maker
from kvpool.types import PartSpec, split_keys
from kvpool.wire import client as client_wire
from kvpool.wire import operator as operator_wire
from tests.support.local_node import MemoryOnly

FIELDS = b"{}"
BASE = hashlib.sha256(FIELDS).digest()[:16]
PARTS = (PartSpec(1024),)
ALL = NamespaceSettings(replicas=2, write="through", ttl_s=60.0, ssd_codec="blosc2")
REPLICAS_MAX = 4


class Life:
    """One life of a node, without clients and disks. `shared`: it is a member of a cluster with others."""

    def __init__(
        self,
        cluster: StaticCluster,
        name: str = "n",
        *,
        shared: bool = False,
        replicas_max: int = 4,
    ) -> None:
        self.node = Node(
            make_policy=policy_maker("lru"),
            limits=Limits(),
            incarnation=new_incarnation(),
        )
        self.tenant: Tenant = self.node.add_tenant("red", 0, 4 << 20)
        self.membership = StaticMembership(cluster)
        join = "etcd://h:1" if shared else ""
        config = DaemonConfig(socket="/s", node=name, join=join, replicas_max=replicas_max)
        rng = random.Random(1)
        self.cluster = ClusterMember(
            config,
            self.node,
            self.membership,
            None,
            Peers({}, rng),
            lambda: 0.0,
            rng,
            HostTopology(),
        )
        self.local = MemoryOnly(self.node)

    async def __aenter__(self) -> Self:
        await self.cluster.start([f"tcp://{self.cluster.config.node}:1"], self.local)
        self.local.repairs = 0
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cluster.close()

    async def open(self, wanted: NamespaceSettings = DEFAULT_SETTINGS) -> NamespaceState:
        """As the server does for a client."""
        state = self.node.namespaces.open(self.tenant, BASE, FIELDS, PARTS)
        if self.cluster.config.join:
            return await self.cluster.namespaces.register(state, wanted)
        return await self.cluster.namespaces.fill_in(state, wanted)

    async def configure(self, **changes: object) -> None:
        await self.cluster.namespaces.configure(self.tenant, BASE, SettingsChange(**changes))

    @property
    def settings(self) -> NamespaceSettings:
        return self.tenant.epochs[BASE][-1].settings


# ---- what clients and operators say ---------------------------------------------------------------------


def opening(**wanted: object) -> client_wire.OpenNamespace:
    return client_wire.OpenNamespace(BASE, FIELDS, [], **wanted)


def test_a_client_that_says_nothing_wants_the_defaults() -> None:
    assert parse_wish(opening()) == DEFAULT_SETTINGS
    assert parse_wish(opening(replicas=1)) == DEFAULT_SETTINGS
    every = opening(replicas=2, write="through", ttl_s=60.0, ssd_codec="blosc2")
    assert parse_wish(every) == ALL


@pytest.mark.parametrize(
    "wrong",
    [
        {"replicas": -1},
        {"write": "x"},
        {"ttl_s": -1.0},
        {"ttl_s": float("nan")},
        {"ssd_codec": "x"},
    ],
)
def test_wishes_that_cannot_be(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        parse_wish(opening(**wrong))


def test_changes_are_checked_and_name_something() -> None:
    change = parse_change(operator_wire.Configure(BASE, write="", ttl_s=0.0))
    assert change == SettingsChange(write="", ttl_s=0.0)
    for wrong in (
        operator_wire.Configure(BASE),
        operator_wire.Configure(BASE, 0),
        operator_wire.Configure(BASE, write="x"),
    ):
        with pytest.raises(InvalidRequest):
            parse_change(wrong)


# ---- several nodes ---------------------------------------------------------------------------------------


def test_the_first_node_to_register_decides_and_an_operator_changes_it() -> None:
    async def main() -> None:
        shared = StaticCluster()
        async with Life(shared, "a", shared=True) as a, Life(shared, "b", shared=True) as b:
            await a.open(ALL)
            await b.open(NamespaceSettings(3, "none", 5.0))
            assert a.settings == b.settings == ALL
            await b.configure(write="", replicas=3)
            assert a.settings == b.settings == NamespaceSettings(3, "", 60.0, "blosc2")
            assert a.local.kept == b.local.kept == [], "the cluster remembers it"

    asyncio.run(main())


def test_a_node_keeps_within_its_own_limits() -> None:
    async def main() -> None:
        shared = StaticCluster()
        small = Life(shared, "a", shared=True, replicas_max=2)
        async with small as a, Life(shared, "b", shared=True) as b:
            await b.open(NamespaceSettings(replicas=9))
            await a.open()
            assert (a.settings.replicas, b.settings.replicas) == (2, REPLICAS_MAX)
            with pytest.raises(LimitExceeded, match="replicas_max"):
                await a.configure(replicas=3)
            await b.configure(replicas=3)
            assert (a.settings.replicas, b.settings.replicas) == (2, 3)

    asyncio.run(main())


def test_copies_are_looked_after_when_more_are_wanted_and_not_else() -> None:
    async def main() -> None:
        async with Life(StaticCluster(), shared=True) as life:
            state = await life.open()
            await life.configure(replicas=2)
            assert life.local.repairs == 0, "there are no blocks"
            holder = life.node.holders.add("red", "engine")
            life.node.puts.reserve(holder, state, 0, 1, split_keys(b"k" * 16))
            life.node.puts.commit(holder, 1, bytes(16))
            life.node.settle()
            await life.configure(ttl_s=1.0)
            await life.configure(replicas=1)
            assert life.local.repairs == 0
            await life.configure(replicas=3)
            assert life.local.repairs > 0

    asyncio.run(main())


def test_what_the_membership_could_not_be_told_is_told_later() -> None:
    async def main() -> None:
        shared = StaticCluster()
        async with Life(shared, "a", shared=True) as a:
            shared.go_away()
            await a.open(ALL)
            assert a.settings == ALL, "as wanted, as long as nobody says otherwise"
            shared.come_back()
            await a.cluster.namespaces.register_late()
            (entry,) = shared.view.namespaces.values()
            assert entry.settings == ALL

    asyncio.run(main())


def test_a_new_epoch_has_the_settings_of_the_last_one() -> None:
    async def main() -> None:
        async with Life(StaticCluster(), shared=True) as life:
            await life.open(ALL)
            await life.cluster.namespaces.clear(life.tenant, BASE, fence=False)
            assert life.tenant.epochs[BASE][-1].epoch == 1
            assert life.settings == ALL

    asyncio.run(main())


def test_settings_of_what_nobody_knows_cannot_be_changed() -> None:
    async def main() -> None:
        async with Life(StaticCluster()) as life:
            with pytest.raises(InvalidRequest, match="knows no namespace"):
                await life.configure(replicas=2)

    asyncio.run(main())


# ---- a node that is alone --------------------------------------------------------------------------------


@pytest.mark.parametrize("agreed", [False, True], ids=["opened", "registered"])
def test_alone_each_client_adds_what_nobody_before_has_asked_for(agreed: bool) -> None:
    async def main() -> None:
        async with Life(StaticCluster()) as life:
            await life.open(NamespaceSettings(write="back"))
            if agreed:
                await life.cluster.namespaces.clear(life.tenant, BASE, fence=False)
            await life.open()
            await life.open(NamespaceSettings(3, "none", 5.0))
            await life.open(NamespaceSettings(2, ttl_s=9.0, ssd_codec="blosc2"))
            expected = NamespaceSettings(3, "back", 5.0, "blosc2")
            assert life.settings == expected
            await life.cluster.namespaces.clear(life.tenant, BASE, fence=False)
            assert life.settings == expected

    asyncio.run(main())


def test_alone_too_an_operator_changes_it() -> None:
    async def main() -> None:
        async with Life(StaticCluster()) as life:
            await life.open(ALL)
            await life.configure(write="none", replicas=1)
            expected = NamespaceSettings(1, "none", 60.0, "blosc2")
            assert life.settings == expected
            assert life.local.kept == [expected]
            await life.open(NamespaceSettings(write="through", ttl_s=5.0))
            assert life.settings == expected

    asyncio.run(main())


def test_alone_it_outlives_the_daemon_where_there_is_a_place_for_it(tmp_path: Path) -> None:
    path = tmp_path / "namespaces.json"

    async def live(wanted: NamespaceSettings, expected: NamespaceSettings, ttl_s: float) -> None:
        async with Life(StaticCluster(path=path)) as life:
            await life.open(wanted)
            assert life.settings == expected
            await life.configure(ttl_s=ttl_s)

    asyncio.run(live(NamespaceSettings(write="none"), NamespaceSettings(write="none"), 7.0))
    asyncio.run(live(ALL, NamespaceSettings(2, "none", 7.0, "blosc2"), 8.0))
    asyncio.run(live(DEFAULT_SETTINGS, NamespaceSettings(2, "none", 8.0, "blosc2"), 0.0))


def test_a_wish_that_cannot_be_kept_counts_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        alone = StaticCluster()
        async with Life(alone) as life:
            await life.open()
            await life.cluster.namespaces.clear(life.tenant, BASE, fence=False)
            alone.go_away()  # as a disk that takes no writes
            await life.open(ALL)
            assert life.settings == ALL
        assert "last only until this process ends" in caplog.text

    asyncio.run(main())


def test_alone_it_is_taken_up_from_a_disk() -> None:
    async def main() -> None:
        async with Life(StaticCluster()) as life:
            adopted = await life.cluster.namespaces.adopt(
                life.tenant, BASE, FIELDS, PARTS, 3, 1, ALL
            )
            assert (adopted.epoch, adopted.generation, adopted.settings) == (3, 1, ALL)
            await life.open(NamespaceSettings(write="none"))
            assert life.settings == ALL

    asyncio.run(main())


def test_the_word_of_a_cluster_goes_before_that_of_a_disk() -> None:
    async def main() -> None:
        shared = StaticCluster()
        async with Life(shared, "a", shared=True) as a, Life(shared, "b", shared=True) as b:
            await a.open(ALL)
            await b.cluster.namespaces.adopt(
                b.tenant, BASE, FIELDS, PARTS, 0, 0, NamespaceSettings(1, "none")
            )
            assert b.settings == ALL

    asyncio.run(main())

"""A membership that answers with a refusal is as one that does not answer: the node goes on, whatever it says."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvpool.config import DaemonConfig
from kvpool.daemon.cluster.host_topology import HostTopology
from kvpool.daemon.cluster.member import ClusterMember
from kvpool.daemon.core.blocks import NamespaceState
from kvpool.daemon.core.node import Node
from kvpool.errors import (
    ConfigError,
    InvalidRequest,
    KvpoolError,
    LimitExceeded,
    NamespaceMismatch,
    NotAuthenticated,
    Unavailable,
)
from kvpool.placement.membership.static import StaticCluster, StaticMembership
from kvpool.placement.peers import Peers
from kvpool.placement.records import (
    DEFAULT_SETTINGS,
    NamespaceEntry,
    NamespaceSettings,
    NodeRecord,
    SettingsChange,
    new_incarnation,
)
from kvpool.storage.eviction import policy_maker
from kvpool.types import PartSpec
from tests.contract.suites.membership import until
from tests.support.local_node import MemoryOnly

REFUSALS = [NotAuthenticated, InvalidRequest, LimitExceeded, ConfigError, Unavailable]
refusals = pytest.mark.parametrize("refusal", REFUSALS)
PARTS = (PartSpec(1024),)


class Refuses(StaticMembership):
    """It answers each request with this error, as long as there is one. joins: how often that was asked."""

    refusal: KvpoolError | None = None
    joins = 0
    registered = 0

    def _check(self) -> None:
        if self.refusal is not None:
            raise self.refusal

    async def join(self, record: NodeRecord) -> None:
        self.joins += 1
        self._check()
        await super().join(record)

    async def update(self, record: NodeRecord) -> None:
        self._check()
        await super().update(record)

    async def register(self, entry: NamespaceEntry) -> NamespaceEntry:
        self.registered += 1
        self._check()
        return await super().register(entry)

    async def configure(self, tenant: str, digest: str, change: SettingsChange) -> NamespaceEntry:
        self._check()
        return await super().configure(tenant, digest, change)


class Life:
    def __init__(self, cluster: StaticCluster) -> None:
        self.node = Node(make_policy=policy_maker("lru"), incarnation=new_incarnation())
        self.tenant = self.node.add_tenant("red", 0, 4 << 20)
        self.membership = Refuses(cluster)
        config = DaemonConfig(socket="/s", node="n", join="etcd://h:1")
        rng = random.Random(1)
        self.member = ClusterMember(
            *(config, self.node, self.membership, None, Peers({}, rng), lambda: 0.0, rng),
            HostTopology(),
        )

    def known(self, number: int) -> NamespaceState:
        """A namespace that is open on this node."""
        fields = b'{"model":"%d"}' % number
        base = hashlib.sha256(fields).digest()[:16]
        return self.node.namespaces.open(self.tenant, base, fields, PARTS)


@asynccontextmanager
async def life() -> AsyncIterator[tuple[Life, StaticCluster]]:
    cluster = StaticCluster()
    one = Life(cluster)
    await one.member.start(["tcp://n:1"], MemoryOnly(one.node))
    try:
        yield one, cluster
    finally:
        await one.member.close()


@refusals
def test_a_record_that_is_refused_is_written_later(refusal: type[KvpoolError]) -> None:
    async def main() -> None:
        async with life() as (one, cluster):
            one.membership.refusal = refusal("no")
            one.member.config = DaemonConfig(
                socket="/s", node="n", join="etcd://h:1", labels={"zone": "z"}
            )
            await one.member.tell()
            assert cluster.view.nodes["n"].labels == {}
            one.membership.refusal = None
            await one.member.tell()
            assert cluster.view.nodes["n"].labels == {"zone": "z"}

    asyncio.run(main())


@refusals
def test_joining_again_goes_on_until_it_is_let_in(refusal: type[KvpoolError]) -> None:
    async def main() -> None:
        async with life() as (one, cluster):
            before = one.member.incarnation
            one.membership.refusal = refusal("no")
            cluster.expire("n")
            await until(lambda: one.membership.joins >= 3)
            one.membership.refusal = None
            await until(lambda: "n" in cluster.view.nodes)
            assert cluster.view.nodes["n"].incarnation == one.member.incarnation != before

    asyncio.run(main())


@refusals
def test_namespaces_that_are_refused_are_registered_later(refusal: type[KvpoolError]) -> None:
    async def main() -> None:
        async with life() as (one, cluster):
            namespaces = one.member.namespaces
            one.membership.refusal = refusal("no")
            for number in range(3):
                state = await namespaces.register(one.known(number), DEFAULT_SETTINGS)
                assert state is one.known(number), "engines use it meanwhile"
            asked = one.membership.registered
            await namespaces.register_late()
            assert one.membership.registered == asked + 1, "one request a round is enough"
            one.membership.refusal = None
            await namespaces.register_late()
            assert len(cluster.view.namespaces) == 3

    asyncio.run(main())


def test_a_namespace_that_is_refused_for_ever_holds_up_no_other() -> None:
    class RefusesOne(Refuses):
        async def register(self, entry: NamespaceEntry) -> NamespaceEntry:
            if "0" in entry.fields:
                raise InvalidRequest("too large")
            return await super().register(entry)

    async def main() -> None:
        async with life() as (one, cluster):
            namespaces = one.member.namespaces
            one.membership.refusal = Unavailable("away")
            for number in range(3):
                await namespaces.register(one.known(number), DEFAULT_SETTINGS)
            one.membership.refusal = None
            one.membership.__class__ = RefusesOne
            for _ in range(3):
                await namespaces.register_late()
            assert len(cluster.view.namespaces) == 2

    asyncio.run(main())


def test_a_namespace_with_other_parts_is_still_an_error() -> None:
    async def main() -> None:
        async with life() as (one, _):
            one.membership.refusal = NamespaceMismatch("other parts")
            with pytest.raises(NamespaceMismatch):
                await one.member.namespaces.register(one.known(0), DEFAULT_SETTINGS)

    asyncio.run(main())


@refusals
def test_settings_that_are_refused_hold_on_this_node(refusal: type[KvpoolError]) -> None:
    async def main() -> None:
        async with life() as (one, _):
            namespaces = one.member.namespaces
            state = await namespaces.register(one.known(0), DEFAULT_SETTINGS)
            one.membership.refusal = refusal("no")
            filled = await namespaces.fill_in(state, NamespaceSettings(replicas=2))
            assert filled.settings.replicas == 2

    asyncio.run(main())

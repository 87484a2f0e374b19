"""Every membership passes the same tests: without a server here, on a real etcd in test_membership_etcd."""

import pytest

from kvpool.placement.membership.base import Membership
from kvpool.placement.membership.static import StaticCluster, StaticMembership
from tests.contract.suites.membership import Backend, MembershipContract, Secrets


class StaticBackend:
    def __init__(self) -> None:
        self.cluster = StaticCluster("test")

    def member(self, *, secrets: Secrets = tuple, protocol: int = 1) -> Membership:
        return StaticMembership(self.cluster, secrets=secrets, protocol=protocol)

    async def expire(self, node: str) -> None:
        self.cluster.expire(node)

    async def go_away(self) -> None:
        self.cluster.go_away()

    async def come_back(self) -> None:
        self.cluster.come_back()


class TestStatic(MembershipContract):
    @pytest.fixture
    def backend(self) -> Backend:
        return StaticBackend()

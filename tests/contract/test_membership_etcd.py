"""The membership contract on a real etcd, under uvloop, as in the daemon."""

import asyncio
import itertools
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from kvpool.placement.etcd.settings import EtcdSettings
from kvpool.placement.membership.base import Membership
from kvpool.placement.membership.etcd import EtcdMembership
from tests.contract.suites.membership import Backend, MembershipContract, Secrets
from tests.support.servers.etcd import Etcd
from tests.support.waiting import PATIENCE_S

TTL_S = 8.0  # a machine that stands still for some seconds keeps it up
CALL_S = 8.0
_clusters = itertools.count()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with Etcd(Path(tmp_path_factory.mktemp("etcd"))) as running:
        yield running


class Patient(EtcdMembership):
    """One that a slow machine does not keep from joining and leaving."""

    START_S, LEAVE_S = PATIENCE_S, CALL_S


class EtcdBackend:
    """A cluster of its own name on an etcd that others use too, one after the other."""

    def __init__(self, etcd: Etcd) -> None:
        self.etcd = etcd
        self.cluster = f"c{next(_clusters)}"

    def member(self, *, secrets: Secrets = tuple, protocol: int = 1) -> Membership:
        settings = EtcdSettings.from_url(self.etcd.url, call_s=CALL_S)
        return Patient(settings, self.cluster, secrets=secrets, protocol=protocol, ttl_s=TTL_S)

    async def expire(self, node: str) -> None:
        key = f"/kvpool/{self.cluster}/nodes/{node}"
        await asyncio.to_thread(lambda: self.etcd.revoke(self.etcd.lease_of(key)))

    async def go_away(self) -> None:
        await asyncio.to_thread(self.etcd.members[0].kill)

    async def come_back(self) -> None:
        await asyncio.to_thread(self.etcd.restart, 0)


class TestEtcd(MembershipContract):
    @pytest.fixture
    def backend(self, etcd: Etcd) -> Backend:
        return EtcdBackend(etcd)

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        uvloop.run(main)

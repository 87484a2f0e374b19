"""Both catalogs keep the contract: in this process, and on a real Redis of one server and a Cluster."""

import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest

from kvpool.errors import Unavailable
from kvpool.placement.catalog.base import Catalog
from kvpool.placement.catalog.embedded import EmbeddedCatalog
from kvpool.placement.catalog.redis import RedisCatalog
from kvpool.placement.redis.settings import parse_url
from tests.contract.suites.catalog import KEYS, NAMESPACE, CatalogContract, key_of, location_of
from tests.support.servers.redis import Redis, RedisCluster
from tests.support.waiting import PATIENCE_S

names = itertools.count()


class TestEmbedded(CatalogContract):
    @asynccontextmanager
    async def views(self) -> AsyncIterator[tuple[Catalog, Catalog]]:
        catalog = EmbeddedCatalog(time.monotonic)
        yield catalog, catalog
        await catalog.close()

    async def lose(self, catalog: Catalog) -> None:
        assert isinstance(catalog, EmbeddedCatalog)
        catalog.lose()

    def test_it_is_bounded_and_keeps_what_was_set_last(self) -> None:
        async def test(*_: Catalog) -> None:
            catalog = EmbeddedCatalog(time.monotonic, blocks_max=4)
            for number in (0, 1, 2, 0, 3, 4):
                where = [location_of(number, 1)]
                await catalog.add(NAMESPACE, 0, [key_of(number)], where, 1000.0)
            assert catalog.blocks == 4
            found = await catalog.find(NAMESPACE, 0, [key_of(number) for number in range(5)])
            assert [location is not None for location in found] == [True, False, True, True, True]

        self.run(test)


class OnRedis(CatalogContract):
    """Every test has a cluster's name, so keys, of its own on one server."""

    url = ""
    flush: Callable[[], None]

    @asynccontextmanager
    async def views(self) -> AsyncIterator[tuple[Catalog, Catalog]]:
        cluster = f"contract.{next(names)}"
        one, other = [
            RedisCatalog(
                parse_url(self.url),
                cluster=cluster,
                timeout_s=PATIENCE_S,
                write_timeout_s=PATIENCE_S,
            )
            for _ in range(2)
        ]
        try:
            yield one, other
        finally:
            await one.close()
            await other.close()

    async def lose(self, catalog: Catalog) -> None:
        type(self).flush()


class TestRedis(OnRedis):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with Redis(tmp_path_factory.mktemp("redis")) as server:
            cls.url = server.url
            cls.flush = server.flush
            yield


class TestCluster(OnRedis):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        # No shard is to be away, however long this machine makes it wait.
        folder = tmp_path_factory.mktemp("redis")
        with RedisCluster(folder, node_timeout_ms=120_000) as cluster:
            cls.url = cluster.url
            cls.flush = cluster.flush
            yield


def test_a_redis_that_has_gone_is_no_answer(tmp_path_factory: pytest.TempPathFactory) -> None:
    async def test(one: Catalog, _: Catalog) -> None:
        await one.add(NAMESPACE, 0, KEYS, [location_of(1, 1)] * 6, 1000.0)
        server.kill()
        for call in (
            one.find(NAMESPACE, 0, KEYS),
            one.complete(),
            one.completed(1.0),
            one.drop(NAMESPACE, 0, KEYS[:1], [bytes(16)]),
            one.add(NAMESPACE, 0, KEYS[:1], [location_of(1, 1)], 1000.0),
        ):
            with pytest.raises(Unavailable):
                await call

    with Redis(tmp_path_factory.mktemp("redis")) as server:
        suite = OnRedis()
        suite.url = server.url
        suite.run(test)

"""The directory on a real Redis keeps the contract: one server, behind Sentinels, a Cluster."""

import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvpool.placement.directory.base import Directory
from kvpool.placement.directory.redis import open_directory
from kvpool.placement.redis.settings import parse_url
from tests.contract.suites.directory import DirectoryContract
from tests.support.servers.redis import Redis, RedisCluster, RedisSentinel
from tests.support.waiting import PATIENCE_S

names = itertools.count()


class OnRedis(DirectoryContract):
    """Every test has a cluster's name, so keys, of its own on one server."""

    url = ""
    flush: Callable[[], None]

    @asynccontextmanager
    async def views(self) -> AsyncIterator[tuple[Directory, Directory]]:
        cluster = f"contract.{next(names)}"
        one, other = [
            await open_directory(
                parse_url(self.url),
                cluster=cluster,
                timeout_s=PATIENCE_S,
                publish_timeout_s=PATIENCE_S,
            )
            for _ in range(2)
        ]
        try:
            yield one, other
        finally:
            assert one.stats["corrupt"] == other.stats["corrupt"] == 0
            await one.close()
            await other.close()

    async def lose(self, directory: Directory) -> None:
        type(self).flush()


class TestRedis(OnRedis):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with Redis(folder(tmp_path_factory)) as server:
            cls.url = server.url
            cls.flush = server.flush
            yield


class TestSentinel(OnRedis):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        # Nothing is to fail over here, however long this machine makes the primary wait.
        with RedisSentinel(folder(tmp_path_factory), down_after_ms=120_000) as servers:
            cls.url = servers.url
            cls.flush = servers.primary.flush
            yield


class TestCluster(OnRedis):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        # As behind Sentinels.
        with RedisCluster(folder(tmp_path_factory), node_timeout_ms=120_000) as cluster:
            cls.url = cluster.url
            cls.flush = cluster.flush
            yield


def folder(factory: pytest.TempPathFactory) -> Path:
    return factory.mktemp("redis")

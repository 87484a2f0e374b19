"""What engines' events make of the prefix index: groups, engines that change, the lag."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpool.errors import ConfigError
from kvpool.router.engines.caches import SLICE_BLOCKS, Caches
from kvpool.router.upstream.specs import EngineSpec, spec_of
from kvpool.scheduler.index import PrefixIndex
from tests.support.stub_engine.events import EventPublisher
from tests.support.waiting import until_async

SALT = 0xABCDEF


class World:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = PrefixIndex()
        self.lags: list[float] = []
        self.caches = Caches(
            self.index, clock=time.monotonic, wall=time.time, on_lag=self.lags.append
        )
        self.publisher = EventPublisher(f"ipc://{folder}/e", f"ipc://{folder}/er", "kv")

    def spec(self, **table: Any) -> EngineSpec:
        path = f"ipc://{self.folder}/e"
        given = {"name": "e", "events": path, "replay": f"{path}r", "topic": "kv"}
        return spec_of("http://h:1", announced=None, table={**given, "block_tokens": 16, **table})

    def publish(self, kind: str, group: int, *hashes: int) -> None:
        event = {"type": f"Block{kind}", "block_hashes": list(hashes), "group_idx": group}
        self.publisher.publish([{**event, "medium": "GPU"}])

    def held(self, hashes: Any, salt: int = SALT) -> list[int]:
        keys = {each: each ^ salt for each in hashes}
        return [each for each, key in keys.items() if self.index.match([key], now=0.0).lengths]

    def play(self, test: Callable[[], Any]) -> None:
        async def run() -> None:
            task = asyncio.create_task(self.caches.run())
            try:
                await asyncio.sleep(0)
                await test()
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                self.publisher.close()

        asyncio.run(run())


@pytest.fixture
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("z"))


def test_a_block_is_held_once_all_groups_hold_it(world: World) -> None:
    async def test() -> None:
        world.caches.follow(world.spec(groups=(0, 2)), SALT)
        world.publish("Stored", 0, 1, 2, 3)
        world.publish("Stored", 1, 1, 2, 3, 4)  # a group that does not count
        world.publish("Stored", 2, 2, 3, 4)
        await until_async(lambda: world.held(range(9)) == [2, 3], "both groups hold these")
        world.publish("Removed", 2, 2)
        await until_async(lambda: world.held(range(9)) == [3], "one group has lost it")
        world.publish("Removed", 1, 3)
        world.publish("Stored", 0, 4)
        await until_async(lambda: world.held(range(9)) == [3, 4], "the other one does not matter")
        assert len(world.lags) >= 3
        assert world.caches.stats()["lag_p99_s"] == pytest.approx(max(world.lags))

    world.play(test)


def test_more_than_is_written_at_a_time(world: World) -> None:
    async def test() -> None:
        many = range(1, 3 * SLICE_BLOCKS)
        world.caches.follow(world.spec(), SALT)
        world.publish("Stored", 0, *many)
        await until_async(lambda: len(world.held(many)) == len(many), "all are written")
        world.publisher.publish([{"type": "AllBlocksCleared"}])
        await until_async(lambda: not world.held(many), "all are gone")

    world.play(test)


def test_one_that_cannot_be_followed_keeps_no_other_from_it(world: World, caplog: Any) -> None:
    bad = spec_of(
        "http://h:2",
        announced=None,
        table={"name": "bad", "events": "tcp://127.0.0.1:port", "block_tokens": 16},
    )
    world.caches.follow(bad, SALT)
    world.caches.follow(world.spec(), SALT)

    async def test() -> None:
        world.publish("Stored", 0, 1)
        await until_async(lambda: world.held([1]) == [1], "the other one is followed")
        assert "bad" in caplog.text
        with pytest.raises(ConfigError, match="engine bad"):
            world.caches.follow(bad, SALT)
        world.caches.forget("bad")

    world.play(test)


def test_an_engine_that_is_not_what_it_was(world: World) -> None:
    async def test() -> None:
        world.caches.follow(world.spec(), SALT)
        world.publish("Stored", 0, 1, 2)
        await until_async(lambda: world.held([1, 2]) == [1, 2], "it is followed")
        feed = world.caches.feed("e")
        world.caches.follow(world.spec(role="decode"), SALT)
        assert world.caches.feed("e") is feed  # nothing that matters here
        world.caches.follow(world.spec(), SALT + 1)
        assert world.held([1, 2]) == []
        await until_async(lambda: world.held([1, 2], SALT + 1) == [1, 2], "the events are replayed")
        assert world.held([1, 2]) == []
        # Without hashes nothing is followed; what it is sent may be expected there.
        world.caches.follow(world.spec(block_tokens=0), 0)
        assert world.caches.feed("e") is None
        world.index.expect("gpu:e", [7], [1.0], until=1e12)
        assert world.index.match([7], now=0.0).lengths == {"gpu:e": 1}
        world.caches.forget("e")
        world.caches.forget("e")
        assert world.index.match([7], now=0.0).lengths == {}

    world.play(test)

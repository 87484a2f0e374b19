"""The subscriber against real ZeroMQ publishers, with their gaps, restarts and slow replays."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import resource
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest
import uvloop
import zmq

from kvpool.errors import ConfigError
from kvpool.net import raise_descriptor_limit
from kvpool.placement.kv_events.stream import END, PAYLOAD_BYTES_MAX
from kvpool.placement.kv_events.subscriber import (
    ENGINES_MAX,
    SLICE_BLOCKS,
    EngineFeed,
    EngineSource,
    EventSubscriber,
)
from tests.support.waiting import PATIENCE_S, until_async

Test = Callable[[], Awaitable[None]]


@pytest.fixture(params=["asyncio", "uvloop"])
def play(request: pytest.FixtureRequest) -> Callable[[Test], None]:
    """Run a coroutine on a loop of either kind."""
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def run(test: Test) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(test())

    return run


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("z")


class Impatient(EngineFeed):
    """Pauses as short as a test has time for."""

    CHECK_S, REPLAY_SILENT_S, BACKOFF_S, GONE_S = 0.05, 0.1, 0.01, 0.1


class Patient(EngineFeed):
    """Nothing is asked for again because this machine was slow."""

    CHECK_S = REPLAY_SILENT_S = REPLAY_S = 1000.0


def stored(*hashes: int, **more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": 1,
        "medium": "GPU",
        "group_idx": 0,
        **more,
    }


class Publisher:
    """As an engine has it: publishes on one socket and answers on another, from a thread."""

    def __init__(self, folder: Path, name: str = "e", keeps: int = 1000, topic: str = "kv") -> None:
        self.folder, self.name, self.topic = folder, name, topic.encode()
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=keeps)
        self.seq = 0
        self.asked: list[int] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self._ending = threading.Event()
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.bind(f"ipc://{folder / name}")
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(f"ipc://{folder / name}.replay")
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def source(self, **more: Any) -> EngineSource:
        path = f"ipc://{self.folder / self.name}"
        return EngineSource(
            self.name, path, **{"replay_endpoint": f"{path}.replay", "topic": "kv", **more}
        )

    def publish(self, *happened: Any, lost: bool = False) -> None:
        payload = msgspec.msgpack.encode([time.time(), list(happened), 0])
        self.buffer.append((self.seq, payload))
        if not lost:
            self._pub.send_multipart((self.topic, self.seq.to_bytes(8, "big"), payload))
        self.seq += 1

    def send(self, *frames: bytes) -> None:
        self._pub.send_multipart(frames)

    def _answer(self) -> None:
        while not self._ending.is_set():
            if not self._router.poll(10):
                continue
            client, _, start = self._router.recv_multipart()
            self.asked.append(int.from_bytes(start, "big"))
            while not self.may_answer.wait(0.01):
                if self._ending.is_set():
                    return
            for seq, payload in list(self.buffer):
                if seq >= self.asked[-1]:
                    self._router.send_multipart(
                        (client, b"", self.topic, seq.to_bytes(8, "big"), payload)
                    )
            self._router.send_multipart((client, b"", b"", END, b""))

    def close(self) -> None:
        self._ending.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@asynccontextmanager
async def following(
    *sources: EngineSource, feed: type[EngineFeed] = EngineFeed, **more: Any
) -> AsyncIterator[EventSubscriber]:
    more = {"clock": time.monotonic, "changed": lambda _: None, **more}
    subscriber = EventSubscriber(sources, feed=feed, **more)
    task = asyncio.create_task(subscriber.run())
    try:
        await until_async(lambda: task.done() or len(subscriber.engines) == len(sources), "it runs")
        yield subscriber
        assert not task.done()
    finally:
        task.cancel()
        (ended,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(ended, asyncio.CancelledError), ended
        assert not subscriber.engines


def held(subscriber: EventSubscriber, name: str = "e") -> set[int]:
    keys = [bytes(8) + each.to_bytes(8, "big") for each in range(200)]
    masks = subscriber.engines[name].blocks.masks(keys)
    return {each for each, mask in enumerate(masks) if mask}


async def knows(subscriber: EventSubscriber, *hashes: int, name: str = "e") -> None:
    feed = subscriber.engines[name]
    wanted = set(hashes)
    await until_async(
        lambda: held(subscriber, name) == wanted and not feed.stats()["replaying"],
        f"{name} holds {sorted(wanted)}",
    )


def test_what_was_told_before_is_asked_for(play: Any, folder: Path) -> None:
    async def test() -> None:
        with Publisher(folder) as engine:
            engine.publish(stored(1, 2))
            async with following(engine.source(), feed=Patient) as subscriber:
                await knows(subscriber, 1, 2)
                assert subscriber.engines["e"].blocks.complete
                assert engine.asked == [0]
                engine.publish(stored(3))
                await knows(subscriber, 1, 2, 3)
                engine.publish({"type": "AllBlocksCleared"})
                await knows(subscriber)
                assert engine.asked == [0]

    play(test)


def test_gaps_are_filled(play: Any, folder: Path) -> None:
    async def test() -> None:
        with Publisher(folder) as engine:
            async with following(engine.source(), feed=Patient) as subscriber:
                engine.publish(stored(1))
                await knows(subscriber, 1)
                engine.publish(stored(2), lost=True)
                engine.publish(stored(3))
                await knows(subscriber, 1, 2, 3)
                assert engine.asked[-1] == 0
                assert subscriber.engines["e"].blocks.complete

    play(test)


def test_a_lost_end_is_found(play: Any, folder: Path) -> None:
    async def test() -> None:
        with Publisher(folder) as engine:
            async with following(engine.source(), feed=Impatient) as subscriber:
                engine.publish(stored(1))
                await knows(subscriber, 1)
                engine.publish(stored(2), lost=True)
                await knows(subscriber, 1, 2)

    play(test)


@pytest.mark.parametrize("batches", [0, 1, 5])
def test_a_restarted_engine_begins_anew(play: Any, folder: Path, batches: int) -> None:
    """It had published two batches, and publishes fewer, as many, or more before it is found.

    It is the lost connection that tells.
    """

    async def test() -> None:
        engine = Publisher(folder)
        try:
            async with following(engine.source(), feed=Patient) as subscriber:
                engine.publish(stored(1))
                engine.publish(stored(2))
                await knows(subscriber, 1, 2)
                engine.close()
                engine = Publisher(folder)
                for each in range(batches):
                    engine.publish(stored(10 + each))
                await until_async(
                    lambda: subscriber.engines["e"].connected and engine.asked, "found"
                )
                await knows(subscriber, *range(10, 10 + batches))
                assert subscriber.engines["e"].blocks.complete
                engine.publish(stored(50))
                await knows(subscriber, 50, *range(10, 10 + batches))
        finally:
            engine.close()

    play(test)


def test_an_engine_that_is_gone_holds_nothing(play: Any, folder: Path) -> None:
    async def test() -> None:
        engine = Publisher(folder)
        try:
            async with following(engine.source(), feed=Impatient) as subscriber:
                engine.publish(stored(1))
                await knows(subscriber, 1)
                engine.close()
                await until_async(lambda: not held(subscriber), "it is given up")
                feed = subscriber.engines["e"]
                assert not feed.connected
                assert not feed.blocks.complete
                engine = Publisher(folder)
                engine.publish(stored(5))
                await knows(subscriber, 5)
                assert feed.blocks.complete
        finally:
            engine.close()

    play(test)


def test_a_slow_replay_holds_the_stream_back(play: Any, folder: Path) -> None:
    async def test() -> None:
        with Publisher(folder) as engine:
            engine.may_answer.clear()
            engine.publish(stored(1))
            async with following(engine.source(), feed=Patient) as subscriber:
                await until_async(lambda: engine.asked, "it asks")
                for each in range(2, 50):
                    engine.publish(stored(each))
                feed = subscriber.engines["e"]
                await until_async(lambda: feed.age_s() is not None, "the stream is heard")
                assert held(subscriber) == set()
                engine.may_answer.set()
                await knows(subscriber, *range(1, 50))
                assert feed.blocks.complete
                assert engine.asked == [0]

    play(test)


def test_replays_that_never_come_are_given_up(play: Any, folder: Path) -> None:
    async def test() -> None:
        with Publisher(folder) as engine:
            engine.publish(stored(1))
            source = engine.source(replay_endpoint=f"ipc://{folder / 'nobody'}")
            async with following(source, feed=Impatient) as subscriber:
                feed = subscriber.engines["e"]
                await until_async(lambda: feed.connected, "the stream is there")
                number = 2

                def goes_on() -> bool:
                    nonlocal number
                    number = 3 + number % 100
                    engine.publish(stored(number))
                    return bool(held(subscriber))

                await until_async(goes_on, "it goes by the stream alone")
                assert 1 not in held(subscriber)
                assert not feed.blocks.complete

    play(test)


def test_a_buffer_that_is_too_short_makes_it_incomplete(play: Any, folder: Path) -> None:
    async def test() -> None:
        with Publisher(folder, keeps=2) as engine:
            for each in range(1, 6):
                engine.publish(stored(each))
            async with following(engine.source()) as subscriber:
                await knows(subscriber, 4, 5)
                assert not subscriber.engines["e"].blocks.complete

    play(test)


def test_an_engine_without_replays(play: Any, folder: Path) -> None:
    async def test() -> None:
        with Publisher(folder) as engine:
            engine.publish(stored(1))
            async with following(engine.source(replay_endpoint=None)) as subscriber:
                feed = subscriber.engines["e"]
                await until_async(lambda: feed.connected, "the stream is there")

                def heard() -> set[int]:
                    engine.publish(stored(2))
                    return held(subscriber)

                await until_async(heard, "it is heard")
                assert held(subscriber) == {2}
                assert not feed.blocks.complete
                engine.publish({"type": "AllBlocksCleared"}, stored(7))
                await knows(subscriber, 7)
                assert feed.blocks.complete
                engine.publish(stored(8), lost=True)
                engine.publish(stored(9))
                await knows(subscriber, 9)
                assert not feed.blocks.complete
                assert engine.asked == []

    play(test)


def test_what_is_no_event_is_counted(play: Any, folder: Path) -> None:
    async def test() -> None:
        with Publisher(folder) as engine:
            async with following(engine.source()) as subscriber:
                engine.publish(stored(1))
                await knows(subscriber, 1)
                engine.send(b"kv")
                engine.send(b"kv", b"short", b"")
                engine.publish(stored(2))
                await knows(subscriber, 1, 2)
                assert subscriber.stats()[0]["foreign_messages"] == 2

    play(test)


@pytest.mark.parametrize("limit", [PAYLOAD_BYTES_MAX // 2, 2 * PAYLOAD_BYTES_MAX])
def test_a_batch_that_is_too_large_is_lost(play: Any, folder: Path, limit: int) -> None:
    """It is left aside; or ZeroMQ ends the connection at it, and another one is made."""

    class Feed(Impatient):
        MESSAGE_BYTES_MAX = limit

    async def test() -> None:
        with Publisher(folder, keeps=20) as engine:
            async with following(engine.source(), feed=Feed) as subscriber:
                engine.publish(stored(1))
                await knows(subscriber, 1)
                engine.publish(stored(2, token_ids=bytes(PAYLOAD_BYTES_MAX)))
                number = 3

                def goes_on() -> bool:
                    nonlocal number
                    number = 3 + number % 100
                    engine.publish(stored(number))
                    return 1 not in held(subscriber) and bool(held(subscriber))

                await until_async(goes_on, "the stream goes on")
                assert 2 not in held(subscriber)
                assert not subscriber.engines["e"].blocks.complete

    play(test)


def test_other_topics_are_not_heard(play: Any, folder: Path) -> None:
    async def test() -> None:
        with Publisher(folder) as engine:
            async with following(engine.source()) as subscriber:
                engine.publish(stored(1))
                await knows(subscriber, 1)
                payload = msgspec.msgpack.encode([time.time(), [stored(5)], 0])
                engine.send(b"other", (1).to_bytes(8, "big"), payload)
                engine.publish(stored(2))
                await knows(subscriber, 1, 2)

    play(test)


def test_others_have_their_turn_while_much_is_told(play: Any, folder: Path) -> None:
    async def test() -> None:
        turns = 0
        blocks = 40 * SLICE_BLOCKS
        with Publisher(folder) as engine:
            engine.publish(stored(*range(blocks)))
            async with following(engine.source()) as subscriber:
                feed = subscriber.engines["e"]
                while len(feed.blocks) < blocks:
                    before = len(feed.blocks)
                    await asyncio.sleep(0)
                    turns += 1
                    assert len(feed.blocks) - before <= SLICE_BLOCKS
        assert turns > 10

    play(test)


def test_changes_are_told_of(play: Any, folder: Path) -> None:
    async def test() -> None:
        told: list[str] = []
        with Publisher(folder, "a") as one, Publisher(folder, "b") as other:
            async with following(one.source(), other.source(), changed=told.append) as subscriber:
                one.publish(stored(1))
                other.publish(stored(2))
                await knows(subscriber, 1, name="a")
                await knows(subscriber, 2, name="b")
                assert set(told) == {"a", "b"}
                assert subscriber.engines["a"].blocks.take_changes(9)[1:] == ([1], [1])
                assert subscriber.engines["b"].blocks.take_changes(9)[1:] == ([2], [1])
                told.clear()
                one.publish(stored(3))
                await until_async(lambda: told, "the change is told of")
                assert set(told) == {"a"}

    play(test)


def test_nothing_is_left_open(play: Any, folder: Path) -> None:
    async def test() -> None:
        with Publisher(folder) as engine:

            async def once() -> None:
                async with following(engine.source()) as subscriber:
                    engine.publish(stored(1))
                    await until_async(lambda: len(subscriber.engines["e"].blocks), "it is heard")

            before = len(os.listdir("/proc/self/fd"))
            for _ in range(6):
                await once()
            # The publisher's ends are closed by its own threads, some time after.
            await until_async(lambda: len(os.listdir("/proc/self/fd")) <= before, "all is closed")

    play(test)


@pytest.mark.parametrize(
    "endpoint", ["tcp://*:5557", "127.0.0.1:5557", "inproc://x", "http://a:1", ""]
)
def test_addresses_that_cannot_be_connected_to(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="engine e"):
        EngineSource("e", endpoint)
    with pytest.raises(ConfigError, match="engine e"):
        EngineSource("e", "tcp://127.0.0.1:1", endpoint)


@pytest.mark.parametrize("bad", ["endpoint", "replay_endpoint"])
def test_addresses_that_zeromq_refuses(bad: str) -> None:
    good = {"endpoint": "ipc:///tmp/e", "replay_endpoint": "ipc:///tmp/e"}
    source = EngineSource("e", **{**good, bad: "tcp://127.0.0.1:port"})
    subscriber = EventSubscriber([source], clock=time.monotonic, changed=lambda _: None)
    with pytest.raises(ConfigError, match="engine e"):
        asyncio.run(subscriber.run())


@contextmanager
def no_sockets() -> Iterator[list[int]]:
    """The process may open no more; which kinds were asked for."""
    refused = []

    def refuse(_: Any, kind: int, **more: Any) -> None:
        refused.append(kind)
        raise zmq.ZMQError(errno.EMFILE)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zmq.Context, "socket", refuse)
        yield refused


def test_a_process_without_sockets_tries_again(folder: Path, play: Callable[[Test], None]) -> None:
    async def test() -> None:
        engine = Publisher(folder)
        try:
            async with following(engine.source(), feed=Impatient) as subscriber:
                engine.publish(stored(1))
                await knows(subscriber, 1)
                with no_sockets() as refused:
                    await until_async(
                        lambda: zmq.DEALER in refused, "there is no socket to ask with"
                    )
                    engine.publish(stored(2))
                    await knows(subscriber, 1, 2)
                asked = len(engine.asked)
                await until_async(
                    lambda: len(engine.asked) > asked + 2, "replays are asked for again"
                )
                with no_sockets() as refused:
                    engine.close()
                    await until_async(lambda: refused.count(zmq.SUB) > 1, "nor one to listen with")
                    assert held(subscriber) == set()
                engine = Publisher(folder)
                engine.publish(stored(3))
                await knows(subscriber, 3)
        finally:
            engine.close()

    play(test)


def test_one_that_cannot_be_followed_ends_nothing_where_that_is_told(
    folder: Path, play: Callable[[Test], None]
) -> None:
    async def test() -> None:
        refused: list[str] = []

        def tell(name: str, error: ConfigError) -> None:
            refused.append(name)

        with Publisher(folder) as engine:
            subscriber = EventSubscriber(
                [EngineSource("bad", "tcp://127.0.0.1:port"), engine.source()],
                clock=time.monotonic,
                changed=lambda _: None,
                refused=tell,
            )
            async with asyncio.TaskGroup() as tasks:
                task = tasks.create_task(subscriber.run())
                await until_async(lambda: subscriber.engines, "it runs")
                engine.publish(stored(1))
                await knows(subscriber, 1)
                assert (refused, list(subscriber.engines)) == (["bad"], ["e"])
                task.cancel()

    play(test)


def test_a_stream_that_fails_later_ends_no_other(
    folder: Path, play: Callable[[Test], None]
) -> None:
    fails: list[bool] = []

    class Failing(EngineFeed):
        def _listen(self) -> bool:
            if fails and self.source.name == "bad":
                raise zmq.ZMQError(errno.ENOTSOCK)
            return super()._listen()

    async def test() -> None:
        refused: dict[str, str] = {}
        with Publisher(folder) as engine:
            source = engine.source()
            subscriber = EventSubscriber(
                [dataclasses.replace(source, name="bad"), source],
                clock=time.monotonic,
                changed=lambda _: None,
                refused=lambda name, error: refused.setdefault(name, str(error)),
            )
            subscriber.feed = Failing
            async with asyncio.TaskGroup() as tasks:
                task = tasks.create_task(subscriber.run())
                await until_async(lambda: len(subscriber.engines) == 2, "both are followed")
                fails.append(True)
                engine.publish(stored(1))
                await until_async(lambda: refused, "it is given up")
                assert "bad are not followed any further" in refused["bad"]
                engine.publish(stored(2))
                await knows(subscriber, 1, 2)
                assert list(subscriber.engines) == [source.name]
                subscriber.add(dataclasses.replace(source, name="bad"))
                assert len(subscriber.engines) == 2, "it may come again"
                task.cancel()

    play(test)


def test_many_engines(folder: Path) -> None:
    """More than ZeroMQ has room for, unless it is told."""

    async def test() -> None:
        names = [str(number) for number in range(500)]
        sources = [EngineSource(n, f"ipc://{folder}/x", f"ipc://{folder}/y") for n in names]
        async with following(*sources, engines_max=500) as subscriber:
            assert len(subscriber.engines) == 500

    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_descriptor_limit()
    try:
        asyncio.run(test())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))


def test_an_engine_that_ends_while_it_is_removed_stops_nobody(folder: Path) -> None:
    # In a process of its own: what waits in ZeroMQ for its lock is interrupted by nothing.
    code = """
import asyncio, sys, threading, time, zmq
from kvpool.placement.kv_events.subscriber import EngineSource, EventSubscriber

async def main(endpoint):
    publisher = zmq.Context().socket(zmq.PUB)
    publisher.bind(endpoint)
    disable = zmq.Socket.disable_monitor

    def ends_first(socket):
        publisher.close(linger=0)
        threading.Event().wait(0.2)  # ZeroMQ's own thread notices it
        disable(socket)

    zmq.Socket.disable_monitor = ends_first
    subscriber = EventSubscriber((), clock=time.monotonic, changed=lambda _: None)
    task = asyncio.create_task(subscriber.run())
    await asyncio.sleep(0)
    subscriber.add(EngineSource("e", endpoint))
    while not subscriber.engines["e"].connected:
        await asyncio.sleep(0.001)
    subscriber.remove("e")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

asyncio.run(main(sys.argv[1]))
"""
    subprocess.run(
        [sys.executable, "-c", code, f"ipc://{folder}/e"], check=True, timeout=PATIENCE_S
    )


def test_engines_come_and_go(folder: Path, play: Callable[[Test], None]) -> None:
    async def test() -> None:
        with Publisher(folder, "a") as a, Publisher(folder, "b") as b:
            async with following(a.source()) as subscriber:
                await until_async(
                    lambda: subscriber.engines and subscriber.engines["a"].connected, "a"
                )
                subscriber.add(b.source())
                with pytest.raises(ConfigError, match="same name"):
                    subscriber.add(b.source())
                b.publish(stored(1, 2))
                await until_async(lambda: len(subscriber.engines["b"].blocks) == 2, "b is followed")
                feed = subscriber.engines["a"]
                subscriber.remove("a")
                assert list(subscriber.engines) == ["b"]
                a.publish(stored(3))
                b.publish(stored(4))
                await until_async(lambda: len(subscriber.engines["b"].blocks) == 3, "b goes on")
                assert len(feed.blocks) == 0
                subscriber.add(a.source())
                await until_async(
                    lambda: len(subscriber.engines["a"].blocks) == 1, "a is followed anew"
                )
                with pytest.raises(ConfigError, match="engine bad"):
                    subscriber.add(EngineSource("bad", "tcp://127.0.0.1:port"))
                assert set(subscriber.engines) == {"a", "b"}

    play(test)


def test_limits_of_the_configuration() -> None:
    def make(names: list[str]) -> EventSubscriber:
        sources = [EngineSource(name, "ipc:///tmp/x") for name in names]
        return EventSubscriber(sources, clock=time.monotonic, changed=lambda _: None)

    with pytest.raises(ConfigError, match="same name"):
        make(["a", "a"])
    with pytest.raises(ConfigError, match=f"follows at most {ENGINES_MAX}"):
        make([str(number) for number in range(ENGINES_MAX + 1)])

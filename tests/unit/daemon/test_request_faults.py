"""Unexpected errors in requests: what changes nothing costs a connection, what changes state ends the process."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.client import Client
from kvpool.config import DaemonConfig
from kvpool.daemon.cluster.host_topology import HostTopology
from kvpool.daemon.server.composition import Clocks, Daemon, make_memory_rules
from kvpool.daemon.server.server import close
from kvpool.errors import InternalError, KvpoolError
from kvpool.placement.membership.static import StaticCluster, StaticMembership
from kvpool.storage.dram import DramSegment
from kvpool.telemetry.cluster_stats import PathsStats
from kvpool.types import NamespaceRecord
from kvpool.wire import client as client_wire
from kvpool.wire import frame
from kvpool.wire import operator as operator_wire
from kvpool.wire import peer as peer_wire
from kvpool.wire.faults import LOG_S, Faults
from tests.support.fetches import fetch_of

RECORD = NamespaceRecord.simple("m", block_bytes=4096, block_tokens=16)
KEY = b"k" * 16


class Clock:
    """Seconds; `fails` makes the next look at it a fault in whatever looks."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.fails = False

    def __call__(self) -> float:
        if self.fails:
            self.fails = False
            raise RuntimeError("the clock is broken")
        return self.now


class Raw:
    """A connection of a client, frame by frame."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._requests = 0

    async def ask(self, message: frame.Message) -> Any:
        self._requests += 1
        self._writer.write(frame.encode(message, self._requests))
        length, request = frame.HEADER.unpack(await self._reader.readexactly(frame.HEADER.size))
        assert request == self._requests
        return client_wire.decode_daemon(await self._reader.readexactly(length))

    async def ended(self) -> bool:
        return await self._reader.read() == b""

    def close(self) -> None:
        self._writer.close()


class Served:
    """A daemon's clients and operators, in this process. crashes: what would have ended a daemon's process."""

    def __init__(self, path: Path, clock: Clock, crashes: list[dict[str, Any]]) -> None:
        self.path = path
        self.clock = clock
        self.crashes = crashes
        self.open: list[Raw] = []

    async def connect(self, client: str, *, operator: bool = False) -> Raw:
        path = self.path / ("operators" if operator else "clients")
        raw = Raw(*await asyncio.open_unix_connection(path))
        self.open.append(raw)
        hello = client_wire.Hello(frame.PROTOCOL_VERSION, "default", "i", client)
        assert isinstance(await raw.ask(hello), client_wire.Welcome)
        return raw

    async def opened(self, client: str) -> tuple[Raw, int]:
        raw = await self.connect(client)
        opened = await raw.ask(
            client_wire.OpenNamespace(RECORD.digest(), RECORD.canonical(), [(4096, "full", 0, 1)])
        )
        return raw, opened.number


@asynccontextmanager
async def served(path: Path) -> AsyncIterator[Served]:
    clock, crashes = Clock(), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: crashes.append(context))
    config = DaemonConfig(socket=str(path / "clients"), node="n")
    node = make_memory_rules(config, "ab" * 8)
    segment = DramSegment.create(1 << 20)
    node.add_tenant("default", 0, segment.size)
    transport: Any = SimpleNamespace(
        stats=list, nixl_stats=lambda: None, path_stats=PathsStats, idle=True, path_to=str
    )
    daemon = Daemon(
        *(config, node, StaticMembership(StaticCluster("c")), None, {"default": segment}),
        *(lambda _: transport, HostTopology(), random.Random(1), Clocks(monotonic=clock)),
    )
    listeners = []
    for name, operators in (("clients", False), ("operators", True)):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        listener.bind(str(path / name))
        listener.listen()
        daemon.connections.listen(listener, operators=operators)
        listeners.append(listener)
    there = Served(path, clock, crashes)
    try:
        yield there
    finally:
        for raw in there.open:
            raw.close()
        for listener in listeners:
            daemon.connections.ignore(listener)
            listener.close()
        await close(daemon)
        segment.close()


def run(path: Path, work: Callable[[Served], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with served(path) as there:
            await work(there)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("message", "operator"),
    [
        (client_wire.Stats(), False),
        (operator_wire.Inspect(), True),
        (operator_wire.OnNode("", b"\x91\x65", 0.0), True),  # an Inspect
    ],
    ids=["at once", "later", "in an envelope"],
)
def test_a_fault_in_a_request_that_changes_nothing_ends_its_connection_alone(
    tmp_path: Path, message: frame.Message, operator: bool
) -> None:
    async def ask(there: Served) -> None:
        other, number = await there.opened("other")
        asks = await there.connect("asks", operator=operator)
        there.clock.fails = True
        answer = await asks.ask(message)
        assert answer.code == "internal" and "RuntimeError" in answer.message
        assert await asks.ended()
        assert await other.ask(client_wire.Match(number, KEY, [])) == frame.Done(0)
        told = (await other.ask(client_wire.Stats())).data
        name = b"Stats" if isinstance(message, client_wire.Stats) else b"Inspect"
        assert b'"internal_errors":{"%s":1}' % name in told
        assert not there.crashes

    run(tmp_path, ask)


def test_a_client_goes_on_at_once_over_another_connection(tmp_path: Path) -> None:
    async def ask(there: Served) -> None:
        with Client(str(there.path / "clients")) as client:
            await asyncio.to_thread(client.stats)
            there.clock.fails = True
            with pytest.raises(InternalError):
                await asyncio.to_thread(client.stats)
            stats = await asyncio.to_thread(client.stats)
            assert stats.internal_errors == {"Stats": 1}

    run(tmp_path, ask)


@pytest.mark.parametrize(
    "make",
    [
        lambda number: client_wire.Acquire(number, KEY, [], 1.0),
        lambda number: client_wire.Dropped(number, KEY),
    ],
)
def test_a_fault_in_a_request_that_changes_state_ends_the_process(
    tmp_path: Path, make: Callable[[int], frame.Message]
) -> None:
    async def ask(there: Served) -> None:
        raw, number = await there.opened("a")
        there.clock.fails = True
        with pytest.raises(asyncio.IncompleteReadError):
            await raw.ask(make(number))
        (crash,) = there.crashes
        assert isinstance(crash["exception"], RuntimeError)

    run(tmp_path, ask)


# ---- which requests, and what is said of them ---------------------------------------------------------


def payload(message: frame.Message) -> bytes:
    return frame.encode(message, 1)[frame.HEADER.size :]


@pytest.mark.parametrize(
    "message",
    [
        client_wire.Match(0, KEY, []),
        client_wire.WhyMissing(bytes(16), KEY),
        operator_wire.Events(0, 1),
        operator_wire.OnNode("", payload(operator_wire.Jobs()), 0.0),
        peer_wire.Operate("a", payload(operator_wire.Locate(KEY)), 0.0, "default", "b"),
        peer_wire.Ask("default", bytes(16), [], KEY),
        fetch_of(bytes(16), 1, KEY, 1.0),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_changes_nothing(message: frame.Message) -> None:
    faults = Faults(Clock())
    assert isinstance(faults.answer(message, KeyError("x")), InternalError)
    assert faults.counts.total() == 1


@pytest.mark.parametrize(
    "message",
    [
        client_wire.Reserve(0, [0], [1], KEY, bytes(16)),
        client_wire.Acquire(0, KEY, [], 1.0),
        operator_wire.Evict(KEY),
        operator_wire.OnNode("", payload(operator_wire.Clear(bytes(16))), 0.0),
        peer_wire.Operate("a", payload(operator_wire.PinBlocks(KEY, "soft")), 0.0, "default", "b"),
        peer_wire.SessionEnded("default", "s", "n"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_may_change_state(message: frame.Message) -> None:
    faults = Faults(Clock())
    with pytest.raises(KeyError):
        faults.answer(message, KeyError("x"))
    assert not faults.counts


def test_each_kind_of_request_is_logged_once_a_minute_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    faults = Faults(clock)

    def fail(message: frame.Message) -> None:
        try:
            raise KeyError("where it broke")
        except KeyError as error:
            faults.answer(message, error)

    with caplog.at_level(logging.ERROR, "kvpool.daemon"):
        for _ in range(3):
            fail(client_wire.Stats())
        fail(operator_wire.Jobs())
        clock.now += LOG_S
        fail(client_wire.Stats())
    said = [record.getMessage().split()[1] for record in caplog.records]
    assert said == ["Stats", "Jobs", "Stats"]
    assert all(record.exc_info for record in caplog.records)
    assert faults.counts == {"Stats": 4, "Jobs": 1}


def test_the_error_is_one_of_the_tree() -> None:
    error = Faults(Clock()).answer(client_wire.Stats(), KeyError("x"))
    assert isinstance(error, KvpoolError)
    with pytest.raises(InternalError):
        frame.raise_error(frame.error_message(error))

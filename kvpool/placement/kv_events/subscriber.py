"""Subscribes to engines' KV events, and maintains for each engine its cache's contents: tier `gpu`, as reported.

Each engine has a subscription to its stream and, if it offers replays, occasional requests: after
it was found, after a gap or a lost connection, and every few seconds, so that the end of a stream cannot be
missed. `stream` interprets the messages, `engine_blocks` holds the result; here are the
sockets, the deadlines and the pauses.

Sockets are read without waiting, a bounded number of messages at a time, and the loop sleeps on ZeroMQ's
file descriptors (under uvloop too). After each few hundred blocks
other tasks have their turn, so a busy engine delays nobody. An engine that sends more than is read
fills its own queue, loses batches there, and is asked for a replay.

ZeroMQ reconnects by itself, with growing pauses. Events are not authenticated: subscribe to engines of this
machine or of a trusted network. They are never more than a hint.

Event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, InitVar, dataclass
from types import MappingProxyType
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvpool.errors import ConfigError, KvpoolError, ProtocolError
from kvpool.placement.kv_events.engine_blocks import BLOCKS_MAX, EngineBlocks
from kvpool.placement.kv_events.stream import END, PAYLOAD_BYTES_MAX, Batch, Follower, read_batch
from kvpool.retry import Backoff
from kvpool.waits import wait_for

log = logging.getLogger("kvpool.placement")

ENGINES_MAX = 64
SOCKETS = 6  # of an engine: the stream, both ends of its monitor, a replay; twice the stream while it is renewed
MESSAGES = 64  # read at a time
LINGER_S = 0.005  # messages that come together are read together
SLICE_BLOCKS = 512  # applied at a time: well under a millisecond

BACKOFF_S_MAX = 5.0
RECONNECT_MS, RECONNECT_MS_MAX = 50, 2000
HEARTBEAT_MS, HEARTBEAT_MS_MAX = 2000, 6000

_CONNECTION = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_SCHEMES = ("tcp://", "ipc://")


@dataclass(frozen=True, slots=True)
class EngineSource:
    """Where one engine (one rank of its data parallel group) publishes its events.

    endpoint, replay_endpoint: as ZeroMQ addresses to connect to: `tcp://127.0.0.1:5557`, `ipc:///path`.
    The engine's own setting may say `tcp://*:5557`. Raises `ConfigError`.
    """

    name: str
    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""

    def __post_init__(self) -> None:
        for endpoint in (self.endpoint, self.replay_endpoint):
            if endpoint is None:
                continue
            if not endpoint.startswith(_SCHEMES) or "*" in endpoint:
                raise ConfigError(
                    f"the events of engine {self.name} cannot be read from {endpoint!r}: set an address to connect "
                    "to, such as tcp://127.0.0.1:5557 or ipc:///run/engine/events"
                )


class _Socket:
    """A ZeroMQ socket that is read without waiting."""

    def __init__(self, socket: zmq.Socket[bytes], readable: asyncio.Event) -> None:
        self.socket = socket
        self._readable = readable
        self._loop = asyncio.get_running_loop()
        self._fd: int = socket.FD

    def watch(self) -> None:
        """Set `readable` once there is something to read."""
        self._loop.add_reader(self._fd, self._wake)
        # Other calls take signals off the descriptor too, and a socket that was never read signals nothing.
        if int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._readable.set()

    def _wake(self) -> None:
        # The descriptor stays readable until the socket is read, and would wake the loop again and again.
        self._loop.remove_reader(self._fd)
        self._readable.set()

    def read(self, limit: int) -> list[list[bytes]]:
        """Up to `limit` messages; fewer: there are no more now."""
        messages: list[list[bytes]] = []
        try:
            while len(messages) < limit:
                messages.append(self.socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            pass
        return messages

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        self.socket.close(linger=0)


class _Replay:
    """One request for a replay, on a connection of its own, so that no late answer is mistaken for its."""

    def __init__(self, socket: _Socket, start: int, now: float) -> None:
        self.socket = socket
        self.heard_at = self.asked_at = now
        # With room in its queue from the start, ZeroMQ accepts it before it is connected.
        socket.socket.send_multipart((b"", start.to_bytes(8, "big")), zmq.NOBLOCK)

    def ends_at(self, feed: EngineFeed) -> float:
        return min(self.heard_at + feed.REPLAY_SILENT_S, self.asked_at + feed.REPLAY_S)


@dataclass(eq=False)
class EngineFeed:
    """One engine: its blocks, and the state of its stream. Created by `EventSubscriber`."""

    MESSAGE_BYTES_MAX = 4 * PAYLOAD_BYTES_MAX
    """Larger than any message of an engine. ZeroMQ closes a connection that brings more; it is renewed after `GONE_S`."""
    HWM = 4096
    """Messages that wait in a socket's queue, at most."""
    CHECK_S = 5.0
    """Between two looks whether the end of the stream was lost."""
    REPLAY_SILENT_S, REPLAY_S = 2.0, 30.0
    """How long a replay may be silent, and may take."""
    BACKOFF_S = 0.2
    """Before a replay is asked for again, the first time."""
    GONE_S = 10.0
    """How long an engine may be without a connection before its blocks are forgotten."""

    source: EngineSource
    context: zmq.Context[zmq.Socket[bytes]]
    clock: Callable[[], float]
    changed: Callable[[str], None]
    blocks_max: int

    def __post_init__(self) -> None:
        self.blocks = EngineBlocks(self.blocks_max)
        self.connected = False
        self._follower = Follower(self.blocks, can_replay=self.source.replay_endpoint is not None)
        self._heard_at: float | None = None
        self._readable = asyncio.Event()
        self._replay: _Replay | None = None
        self._backoff = Backoff(self.BACKOFF_S, BACKOFF_S_MAX)
        self._check_at = self.clock() + self.CHECK_S
        self._gone_at: float | None = None
        self._foreign = 0
        if self.source.replay_endpoint is not None:  # would otherwise be tried at the first request
            self._connect(self._open(zmq.DEALER), self.source.replay_endpoint).close(linger=0)
        self._sub, self._monitor = self._subscribe()

    def age_s(self) -> float | None:
        """Seconds since the engine was last heard of, including answers; None: not yet."""
        return None if self._heard_at is None else self.clock() - self._heard_at

    @property
    def told_at(self) -> float:
        """When the engine made the last event in `blocks`, by the engine's wall clock; below 0: never."""
        return self._follower.at

    def stats(self) -> dict[str, Any]:
        return {
            **self._follower.stats(),
            "engine": self.source.name,
            "connected": self.connected,
            "age_s": self.age_s(),
            "blocks": len(self.blocks),
            "complete": self.blocks.complete,
            "refused_blocks": self.blocks.refused,
            "foreign_messages": self._foreign,
        }

    # ---- sockets -------------------------------------------------------------------------------------

    def _open(self, kind: zmq.SocketType) -> zmq.Socket[bytes]:
        """Raises `ConfigError` if this process can have no more of them."""
        try:
            socket = self.context.socket(kind)
        except zmq.ZMQError as error:
            raise self._refusal(error) from None
        socket.set_hwm(self.HWM)
        socket.setsockopt(zmq.MAXMSGSIZE, self.MESSAGE_BYTES_MAX)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS_MAX)
        # A dead machine does not close connections, and a subscriber sends nothing that would fail.
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_MS_MAX)
        return socket

    def _subscribe(self) -> tuple[_Socket, _Socket]:
        """The stream, and its connection monitor. Raises `ConfigError`."""
        sub = self._open(zmq.SUB)
        sub.subscribe(self.source.topic.encode())
        try:
            monitor = sub.get_monitor_socket(_CONNECTION)
        except zmq.ZMQError as error:
            sub.close(linger=0)
            raise self._refusal(error) from None
        try:
            self._connect(sub, self.source.endpoint)
        except ConfigError:
            monitor.close(linger=0)
            raise
        return _Socket(sub, self._readable), _Socket(monitor, self._readable)

    def _unsubscribe(self) -> None:
        # In this order: ZeroMQ reports a lost connection under a lock that `disable_monitor` takes, and waits
        # forever, with the lock, if the monitor that it reports to is closed.
        self._sub.socket.disable_monitor()
        self._monitor.close()
        self._sub.close()

    def _connect(self, socket: zmq.Socket[bytes], endpoint: str) -> zmq.Socket[bytes]:
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise self._refusal(error, endpoint) from None
        return socket

    def _refusal(self, error: zmq.ZMQError, endpoint: str = "") -> ConfigError:
        endpoint = endpoint or self.source.endpoint
        return ConfigError(
            f"the events of engine {self.source.name} cannot be read from {endpoint}: {error}"
        )

    def _subscribe_anew(self) -> None:
        """On other sockets, if there are any."""
        try:
            sub, monitor = self._subscribe()
        except ConfigError as error:
            log.warning("%s", error)
            return  # once more after `GONE_S`
        self._unsubscribe()
        self._sub, self._monitor = sub, monitor

    def _ask(self, start: int, now: float) -> None:
        """Request a replay, or, without a free socket, later."""
        assert self.source.replay_endpoint is not None
        try:
            socket = self._connect(self._open(zmq.DEALER), self.source.replay_endpoint)
        except ConfigError as error:
            if not self._backoff.failures:
                log.warning("%s", error)
            self._backoff.failed(now)
            self._follower.replay_failed()
        else:
            self._replay = _Replay(_Socket(socket, self._readable), start, now)

    def _end_replay(self) -> None:
        if self._replay is not None:
            self._replay.socket.close()
            self._replay = None

    def close(self) -> None:
        """Not before `run` has ended."""
        self._end_replay()
        self._unsubscribe()

    # ---- following -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled. Raises `ConfigError` for a stream that cannot be followed any further."""
        try:
            while True:
                busy = self._listen()
                busy |= self._take_replay()
                await self._work()
                due_at = self._keep_time()
                if busy:
                    await asyncio.sleep(0)
                else:
                    await self._sleep_until(due_at)
        except (KvpoolError, zmq.ZMQError) as error:
            raise ConfigError(
                f"the events of engine {self.source.name} are not followed any further: {error}"
            ) from error

    def _listen(self) -> bool:
        """Process the stream's messages; returns whether there may be more."""
        messages = self._sub.read(MESSAGES)
        # After the messages: if any came over a new connection, the loss of the old one is known by then.
        for frames in self._monitor.read(MESSAGES):
            event = parse_monitor_message(frames)["event"]
            self.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if self.connected:
                self._gone_at = None
                self._backoff.succeeded()
            else:
                self._gone_at = self.clock() + self.GONE_S
                self._follower.disconnected()
        for frames in messages:
            batch = self._read(frames)
            if batch is not None:
                self._follower.heard(batch)
        return len(messages) == MESSAGES

    def _take_replay(self) -> bool:
        """Process a replay's messages; returns whether there may be more."""
        replay = self._replay
        if replay is None:
            return False
        messages = replay.socket.read(MESSAGES)
        if messages:
            replay.heard_at = self.clock()
        for frames in messages:
            batch = self._read(frames[1:])
            if batch is not None:
                self._follower.replayed(batch)
            elif frames[2:3] == [END]:  # not unreadable ones
                self._backoff.succeeded()
                self._follower.replay_ended()
                self._end_replay()
                return True
        return len(messages) == MESSAGES

    def _read(self, frames: list[bytes]) -> Batch | None:
        try:
            batch = read_batch(frames)
        except ProtocolError as error:
            if not self._foreign:
                log.warning(
                    "events of engine %s: %s",
                    self.source.name,
                    error,
                    extra={"engine": self.source.name},
                )
            self._foreign += 1
            return None
        self._heard_at = self.clock()
        return batch

    async def _work(self) -> None:
        """Apply the messages to the blocks, in slices."""
        more = self._follower.work(SLICE_BLOCKS)
        while more:
            await asyncio.sleep(0)
            more = self._follower.work(SLICE_BLOCKS)
        if self.blocks.has_changes:
            self.changed(self.source.name)

    def _keep_time(self) -> float:
        """Do what is due; returns the next due time."""
        now = self.clock()
        follower = self._follower
        if self._gone_at is not None and now >= self._gone_at:
            self._gone_at = now + self.GONE_S
            self._end_replay()
            self._subscribe_anew()
            follower.gone()
        if self._replay is not None and now >= self._replay.ends_at(self):
            self._end_replay()
            self._backoff.failed(now)
            follower.replay_failed()
        if now >= self._check_at:
            self._check_at = now + self.CHECK_S
            if self.connected:
                follower.check()
        due = [self._check_at]
        if self._gone_at is not None:
            due.append(self._gone_at)
        wanted = follower.wanted
        if self._replay is None and wanted is not None and self.connected:
            if self._backoff.due(now):
                self._ask(wanted, now)
            if self._replay is None:
                due.append(self._backoff.retry_at)
        if self._replay is not None:
            due.append(self._replay.ends_at(self))
        return min(due)

    async def _sleep_until(self, at: float) -> None:
        self._readable.clear()
        self._sub.watch()
        self._monitor.watch()
        if self._replay is not None:
            self._replay.socket.watch()
        if await wait_for(self._readable, max(0.0, at - self.clock())):
            await asyncio.sleep(LINGER_S)


@dataclass(eq=False)
class EventSubscriber:
    """Follows the events of several engines. See the module.

    changed: called with an engine's name after a message, while `blocks.take_changes` has
        changes; must be quick.
    clock: seconds, monotonic.
    refused: called with the name of an engine that `run` finds impossible to follow, at once or later, and the
        reason: it is then removed. None: `run` ends instead.
    Raises `ConfigError`.
    """

    sources: InitVar[Iterable[EngineSource]]
    _: KW_ONLY
    clock: Callable[[], float]
    changed: Callable[[str], None]
    blocks_max: int = BLOCKS_MAX
    engines_max: int = ENGINES_MAX
    refused: Callable[[str, ConfigError], None] | None = None
    feed: type[EngineFeed] = EngineFeed

    def __post_init__(self, sources: Iterable[EngineSource]) -> None:
        self._sources: dict[str, EngineSource] = {}
        self._feeds: dict[str, EngineFeed] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None  # while `run` runs
        self._group: asyncio.TaskGroup
        for source in sources:
            self.add(source)

    @property
    def engines(self) -> Mapping[str, EngineFeed]:
        """By name; empty while `run` does not run."""
        return MappingProxyType(self._feeds)

    def add(self, source: EngineSource) -> None:
        """Follow one more engine, from now on. Raises `ConfigError`."""
        if source.name in self._sources:
            raise ConfigError("two engines with KV events have the same name")
        if len(self._sources) >= self.engines_max:
            raise ConfigError(
                f"events of {len(self._sources) + 1} engines: one process follows at most {self.engines_max}"
            )
        if self._context is not None:
            self._begin(self._open(source, self._context))
        self._sources[source.name] = source

    def remove(self, name: str) -> None:
        """Stop following this engine, and forget its blocks."""
        del self._sources[name]
        if self._context is not None:
            self._feeds.pop(name)
            self._running.pop(name).cancel()

    def _open_all(self, context: zmq.Context[zmq.Socket[bytes]]) -> list[EngineFeed]:
        feeds = []
        for source in list(self._sources.values()):
            try:
                feeds.append(self._open(source, context))
            except ConfigError as error:
                if self.refused is None:
                    raise
                del self._sources[source.name]
                self.refused(source.name, error)
        return feeds

    def _open(self, source: EngineSource, context: zmq.Context[zmq.Socket[bytes]]) -> EngineFeed:
        return self.feed(source, context, self.clock, self.changed, self.blocks_max)

    def _begin(self, feed: EngineFeed) -> None:
        """In the task group of `run`."""
        name = feed.source.name
        self._feeds[name] = feed
        self._running[name] = self._group.create_task(self._follow(feed))
        self._running[name].add_done_callback(lambda _: feed.close())

    async def _follow(self, feed: EngineFeed) -> None:
        """One engine's end is no other's."""
        try:
            await feed.run()
        except ConfigError as error:
            if self.refused is None:
                raise
            log.warning("%s", error, extra={"engine": feed.source.name})
            for table in (self._sources, self._feeds, self._running):
                table.pop(feed.source.name)
            self.refused(feed.source.name, error)

    async def run(self) -> None:
        """Follow all of them until cancelled; raises `ConfigError` for one that cannot be followed, without
        `refused`.
        """
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        context.set(zmq.MAX_SOCKETS, SOCKETS * self.engines_max)
        try:
            feeds = self._open_all(context)
            async with asyncio.TaskGroup() as self._group:
                for feed in feeds:
                    self._begin(feed)
                self._context = context
                await asyncio.Event().wait()
        finally:
            self._context = None
            self._feeds.clear()
            self._running.clear()
            await asyncio.sleep(0)  # feeds are closed as their tasks end
            context.destroy(linger=0)

    def stats(self) -> list[dict[str, Any]]:
        return [feed.stats() for feed in self._feeds.values()]

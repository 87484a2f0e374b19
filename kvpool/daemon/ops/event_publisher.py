"""Publishes KV events of this node's memory and disks over ZeroMQ, as vLLM publishes those of an engine's cache.

    [topic, number, msgpack [seconds, [event, ...], null]]

Numbers go up by one. They begin anywhere, above those of the daemon's former life, so that its end is a gap for whoever reads on.
A reader that is too slow loses batches in its queue, and sees a gap. It may ask the other socket for what it has
missed, by the first number: it gets the batches from there on, or, if the oldest of them is gone, all blocks that are
here, under the number of the last batch. A stream begins with `AllBlocksCleared`, and has an empty batch each second in which
nothing happens, so that what was missed is noticed.

Sockets never block, and nobody authenticates: they are bound on this machine only (`kvpool.config`). Event loop only.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from kvpool.config.tables import StreamConfig
from kvpool.daemon.cluster.local_node import Holdings
from kvpool.daemon.core.blocks import NamespaceState
from kvpool.daemon.ops.published_blocks import (
    CLEARED,
    Event,
    PublishedBlocks,
    needed,
    removed,
    stored,
)
from kvpool.decoding import decode_json
from kvpool.errors import ConfigError
from kvpool.retry import Backoff
from kvpool.tasks import Tasks
from kvpool.telemetry.node_stats import EventStreamStats
from kvpool.telemetry.receipts import facts_of

IDLE_S = 1.0
LINGER_S = 0.002  # changes that come together are published together
SLICE_BLOCKS = 512  # looked at before other tasks have their turn: well under a millisecond
BATCH_EVENTS_MAX = 256
QUEUED_BATCHES_MAX = 4096  # for one reader that is slow
KEPT_BATCHES_MAX, KEPT_BYTES_MAX = 10_000, 16 << 20  # to be repeated
REPLAYS_QUEUED_MAX = 64  # questions of one reader that were not looked at yet
REPLAYS_MAX = 4  # readers that get something repeated at a time; others wait
REPLAY_QUESTIONS_MAX = (
    4  # of a reader to which something is being repeated; it has to ask others again
)
REPLAY_QUEUED_MAX = 64  # batches on their way to such a reader
END = (-1).to_bytes(8, "big", signed=True)
_TIERS = ("dram", "ssd")


class Space(msgspec.Struct, frozen=True):
    """What a stream has to know of a namespace. wanted: see `needed`."""

    model: str
    tenant: str
    block_tokens: int
    wanted: int


def space_of(namespace: NamespaceState) -> Space:
    """By what its users have said of it."""
    fields = decode_json(namespace.fields, dict[str, Any], "a namespace's fields")
    _, tokens = facts_of(fields)
    return Space(str(fields.get("model", "")), namespace.tenant.name, tokens, needed(namespace))


class Kept:
    """The last batches, for readers that have missed some. first: the number of the first batch of the stream."""

    def __init__(self, first: int) -> None:
        self._batches: deque[tuple[int, bytes]] = deque()
        self._nbytes = 0
        self.next = first

    def add(self, payload: bytes) -> int:
        """The batch's number."""
        number = self.skip()
        self._batches.append((number, payload))
        self._nbytes += len(payload)
        while len(self._batches) > KEPT_BATCHES_MAX or self._nbytes > KEPT_BYTES_MAX:
            self._nbytes -= len(self._batches.popleft()[1])
        return number

    def skip(self) -> int:
        """The number of a batch that needs not be repeated."""
        number, self.next = self.next, self.next + 1
        return number

    def since(self, number: int) -> list[tuple[int, bytes]] | None:
        """The batches from this number on; None: some of these are gone."""
        if number >= self.next:
            return []
        oldest = self._batches[0][0] if self._batches else self.next
        if number < oldest:
            return None
        return [batch for batch in self._batches if batch[0] >= number]


class Snapshot(msgspec.Struct, frozen=True):
    """All blocks that readers know of as of a batch, by tier, namespace and block tokens. last: the batch's number."""

    last: int
    known: list[tuple[str, NamespaceState, int, list[bytes]]]


class _NotRead(Exception):
    """A reader is gone, or does not read what it has asked for."""


class Stream:
    """One stream: its blocks and its sockets. Closed by `close`."""

    REPLAY_STALLED_S, REPLAY_S = 1.0, 30.0
    """How long the reader of a replay may read nothing, and take in all."""

    def __init__(
        self,
        config: StreamConfig,
        node: str,
        mode: int,
        first: int,
        wall: Callable[[], float],
    ) -> None:
        """mode: permissions of `ipc://` sockets. Raises `ConfigError` if an address cannot be bound."""
        import zmq

        self.name = config.name
        self.config = config
        self.blocks = PublishedBlocks()
        self.spaces: dict[bytes, tuple[NamespaceState, int]] = {}
        self.batches = self.replays = 0
        self.silent = True  # since that was last looked at
        self._wall = wall
        self._topic = (config.topic or f"kv@{node}@{config.model}").encode()
        self._again = zmq.Again
        self._error = zmq.ZMQError
        self._left = zmq.EHOSTUNREACH
        self._noblock = zmq.NOBLOCK
        self._kept = Kept(first)
        self._taken: Snapshot | None = None
        self.stirred = asyncio.Event()
        """Set when questions may have come: whatever is done with a socket may take the news from its descriptor."""
        self._context = zmq.Context()
        self._sockets: list[Any] = []
        try:
            self._publishing = self._bind(zmq.PUB, config.endpoint, QUEUED_BATCHES_MAX, mode)
            self.replaying: Any = None
            if config.replay:
                self.replaying = self._bind(zmq.ROUTER, config.replay, REPLAY_QUEUED_MAX, mode)
                # Else what a reader has no room for is dropped, unnoticed.
                self.replaying.setsockopt(zmq.ROUTER_MANDATORY, 1)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"publish_events.{self.name}: {error}") from None

    def _bind(self, kind: Any, endpoint: str, queued: int, mode: int) -> Any:
        import zmq

        one = self._context.socket(kind)
        self._sockets.append(one)
        one.setsockopt(zmq.SNDHWM, queued)
        one.setsockopt(zmq.RCVHWM, REPLAYS_QUEUED_MAX)
        one.setsockopt(zmq.MAXMSGSIZE, 1 << 10)
        one.setsockopt(zmq.LINGER, 0)
        try:
            one.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"publish_events.{self.name}: {endpoint}: {error}") from None
        if endpoint.startswith("ipc:///"):
            os.chmod(endpoint.removeprefix("ipc://"), mode)
        return one

    def wants(self, space: Space) -> bool:
        return space.model == self.config.model and space.tenant == self.config.tenant

    def publish(self, events: Iterable[Event]) -> None:
        """Encode and send; whoever listens gets it."""
        for payload in self._payloads(events):
            self.batches += 1
            self._send(self._kept.add(payload), payload)

    def idle(self) -> None:
        """Say that there is nothing to say."""
        self._send(self._kept.skip(), msgspec.msgpack.encode((self._wall(), [], None)))

    def _send(self, number: int, payload: bytes) -> None:
        self.silent = False
        self._publishing.send_multipart(
            (self._topic, number.to_bytes(8, "big"), payload), self._noblock
        )

    def _payloads(self, events: Iterable[Event]) -> Iterator[bytes]:
        batch: list[Event] = []
        for event in events:
            batch.append(event)
            if len(batch) >= BATCH_EVENTS_MAX:
                yield msgspec.msgpack.encode((self._wall(), batch, None))
                batch = []
        if batch:
            yield msgspec.msgpack.encode((self._wall(), batch, None))

    def questions(self) -> list[tuple[bytes, int]] | None:
        """Who asks for a replay, and from which number on; of those that have come, some. None: nothing has come.

        Anyone may send anything, without end.
        """
        found: list[tuple[bytes, int]] = []
        for at in range(REPLAYS_QUEUED_MAX):
            try:
                frames = self.replaying.recv_multipart(self._noblock)
            except self._again:
                return found if at else None
            if len(frames) == 3 and len(frames[2]) == 8:
                found.append((frames[0], int.from_bytes(frames[2], "big")))
        return found

    async def replay(self, reader: bytes, number: int) -> bool:
        """Repeat batches to a reader, or tell it all that is here. False: it reads too slowly, or is gone."""
        self.replays += 1
        try:
            async with asyncio.timeout(self.REPLAY_S):
                await self._replay(reader, number)
        except (TimeoutError, _NotRead):
            return False
        return True

    async def _replay(self, reader: bytes, number: int) -> None:
        kept = self._kept.since(number)
        if kept is None:
            taken, kept = self._snapshot()
            if number:
                await self._repeat(reader, taken.last, self._payloads([CLEARED]))
            for tier, namespace, tokens, keys in taken.known:
                before = partial(parent_of, namespace)
                for at in range(0, len(keys), SLICE_BLOCKS):
                    events = stored(tier, keys[at : at + SLICE_BLOCKS], tokens, before)
                    await self._repeat(reader, taken.last, self._payloads(events))
                    await asyncio.sleep(0)
        for at, (one, payload) in enumerate(kept):
            await self._repeat(reader, one, [payload])
            if at % 64 == 63:
                await asyncio.sleep(0)
        await self._send_replay((reader, b"", b"", END, b""))

    def _snapshot(self) -> tuple[Snapshot, list[tuple[int, bytes]]]:
        """All that is here, and the batches that have come since that was taken."""
        since = None if self._taken is None else self._kept.since(self._taken.last + 1)
        if self._taken is None or since is None:
            # All is taken now, and sent in turns: later changes have later numbers, and end namespaces.
            known = [
                (tier, *self.spaces[digest], keys)
                for tier in _TIERS
                for digest, keys in self.blocks.known(tier)
            ]
            self._taken, since = Snapshot(self._kept.next - 1, known), []
        return self._taken, since

    def drop_snapshot(self) -> None:
        """The next replay takes a new one. Until then many cost the time of one."""
        self._taken = None

    async def _repeat(self, reader: bytes, number: int, payloads: Iterable[bytes]) -> None:
        for payload in payloads:
            await self._send_replay((reader, b"", self._topic, number.to_bytes(8, "big"), payload))

    async def _send_replay(self, frames: Sequence[bytes]) -> None:
        """Waits until there is room. Raises `_NotRead`."""
        waited, backoff = 0.0, Backoff(0.001, 0.05)
        while True:
            try:
                self.replaying.send_multipart(frames, self._noblock)
            except self._again:
                if waited >= self.REPLAY_STALLED_S:
                    raise _NotRead from None
            except self._error as error:
                if error.errno != self._left:
                    raise
                raise _NotRead from None
            else:
                return
            finally:
                self.stirred.set()
            pause = backoff.failed(waited)
            await asyncio.sleep(pause)
            waited += pause

    def close(self) -> None:
        for one in self._sockets:
            one.close(linger=0)
        self._sockets.clear()
        self._context.term()


@dataclass(eq=False)
class EventPublisher:
    """All streams of a node. mode: permissions of socket files. held: its tiers, by name, for this reader alone."""

    configs: Sequence[StreamConfig]
    node: str
    mode: int
    held: Mapping[str, Holdings]
    wall: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._spaces: dict[bytes, Space] = {}
        self._awake = asyncio.Event()
        self._tasks = Tasks()
        self.streams: list[Stream] = []

    def begin(self) -> None:
        """Bind all sockets and publish from now on. Raises `ConfigError`."""
        if not self.configs:
            return
        first = int(self.wall() * 1e6)
        for config in self.configs:
            one = Stream(config, self.node, self.mode, first, self.wall)
            self.streams.append(one)
            one.publish([CLEARED])
            if one.replaying is not None:
                self._tasks.begin(self._answer(one))
        for held in self.held.values():
            held.follow_changes(self._awake.set)
        self._tasks.begin(self._run())
        self._tasks.begin(self._beat())

    async def close(self) -> None:
        await self._tasks.end()
        for stream in self.streams:
            stream.close()
        self.streams.clear()

    def stats(self) -> dict[str, EventStreamStats]:
        return {
            stream.name: EventStreamStats(
                blocks=len(stream.blocks), batches=stream.batches, replays=stream.replays
            )
            for stream in self.streams
        }

    async def _run(self) -> None:
        while True:
            await self._awake.wait()
            await asyncio.sleep(LINGER_S)
            self._awake.clear()
            for tier, held in self.held.items():
                looked = 0
                for namespace, keys in held.take_changes():
                    for at in range(0, len(keys), SLICE_BLOCKS):
                        some = keys[at : at + SLICE_BLOCKS]
                        self.look(tier, held, namespace, some)
                        looked += len(some)
                        if looked >= SLICE_BLOCKS:
                            looked = 0
                            await asyncio.sleep(0)

    def look(
        self, tier: str, held: Holdings, namespace: NamespaceState, keys: Sequence[bytes]
    ) -> None:
        """Tell all streams what has become of these blocks."""
        digest = namespace.directory_digest
        space = self._spaces.get(digest)
        if space is None:
            space = self._spaces[digest] = space_of(namespace)
        if not any(stream.wants(space) for stream in self.streams):
            if namespace.retired:
                del self._spaces[digest]
            return
        listed = list(dict.fromkeys(keys))
        _, masks = held.masks(digest, listed)
        wanted = space.wanted
        here = [mask & wanted == wanted for mask in masks] or [False] * len(listed)
        for stream in self.streams:
            if not stream.wants(space):
                continue
            new, gone = stream.blocks.changed(tier, digest, zip(listed, here, strict=True))
            stream.spaces[digest] = namespace, space.block_tokens
            if not stream.blocks.has(digest):
                del stream.spaces[digest]
            before = partial(parent_of, namespace)
            events = [*removed(tier, gone), *stored(tier, new, space.block_tokens, before)]
            stream.publish(events)
        if namespace.retired and not any(here):
            self._spaces.pop(digest, None)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(IDLE_S)
            for stream in self.streams:
                if stream.silent:
                    stream.idle()
                stream.silent = True
                stream.drop_snapshot()

    async def _answer(self, stream: Stream) -> None:
        """Answer requests for replays: those of a reader one after another, and of a few readers at a time."""
        loop = asyncio.get_running_loop()
        descriptor = stream.replaying.FD
        free = asyncio.Semaphore(REPLAYS_MAX)
        asked: dict[bytes, deque[int]] = {}

        async def answer(reader: bytes) -> None:
            try:
                while asked[reader]:
                    if not await stream.replay(reader, asked[reader].popleft()):
                        break
            finally:
                del asked[reader]
                free.release()

        while True:
            # The descriptor tells of changes only: what came before is looked for first.
            stream.stirred.clear()
            loop.add_reader(descriptor, stream.stirred.set)
            try:
                questions = stream.questions()
                if questions is None:
                    await stream.stirred.wait()
            finally:
                loop.remove_reader(descriptor)
            for reader, number in questions or ():
                if reader not in asked:
                    await free.acquire()
                    asked[reader] = deque([number])
                    self._tasks.begin(answer(reader))
                elif len(asked[reader]) < REPLAY_QUESTIONS_MAX:
                    asked[reader].append(number)
            # Others have their turn, however much is asked.
            await asyncio.sleep(0)


def parent_of(namespace: NamespaceState, key: bytes) -> bytes | None:
    """The key before a block in its chain, as far as its tier knows."""
    for table in namespace.tables:
        block = table.blocks.get(key)
        if block is not None:
            return block.parent if block.parent_known and any(block.parent) else None
    return None

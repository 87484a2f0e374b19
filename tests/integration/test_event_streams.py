"""The daemon's streams of KV events, beside what the pool says that it has: a reader that knows only what vLLM publishes."""

import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from kvpool.client import Client, Presence
from kvpool.types import NamespaceRecord
from tests.support.waiting import PATIENCE_S

NBYTES = 64 << 10
MODEL = "of/this stream"
RECORD = NamespaceRecord.simple(MODEL, block_bytes=NBYTES, block_tokens=16)
END = b"\xff" * 8


class Stored(msgspec.Struct, tag="BlockStored"):
    """As vLLM declares it."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    locality: str | None = None


class Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None
    locality: str | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


class Reader:
    """Keeps what a stream tells, and asks for what it has missed."""

    def __init__(self, endpoint: str, replay: str) -> None:
        self._context = zmq.Context()
        self._stream = self._context.socket(zmq.SUB)
        self._stream.subscribe(b"")
        self._stream.connect(endpoint)
        self._replay_at = replay
        self._decoder = msgspec.msgpack.Decoder(Batch)
        self.topics: set[bytes] = set()
        self.media: dict[str, set[int]] = {}
        self.parents: dict[int, int | None] = {}
        self.last = -1
        self.gaps = 0
        self.skip = 0
        self.seconds: list[float] = []

    def read(self) -> None:
        while self._stream.poll(0):
            topic, number, payload = self._stream.recv_multipart()
            self.topics.add(topic)
            self.take(int.from_bytes(number, "big"), payload)

    def take(self, number: int, payload: bytes) -> None:
        if number <= self.last:
            return
        if self.skip:
            self.skip -= 1
            return
        if number > self.last + 1:
            self.gaps += 1
            self.ask()
            if number <= self.last:
                return
        self.apply(payload)
        self.last = number

    def ask(self) -> None:
        """For a replay of all that came after the last batch."""
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(self._replay_at)
            dealer.send_multipart((b"", (self.last + 1).to_bytes(8, "big")))
            while True:
                assert dealer.poll(PATIENCE_S * 1000)
                _, topic, number, payload = dealer.recv_multipart()
                if number == END:
                    return
                self.topics.add(topic)
                self.apply(payload)
                self.last = int.from_bytes(number, "big")

    def apply(self, payload: bytes) -> None:
        batch = self._decoder.decode(payload)
        self.seconds.append(batch.ts)
        for event in batch.events:
            if isinstance(event, Cleared):
                self.media.clear()
                continue
            assert event.medium is not None
            assert event.locality == ("LOCAL" if event.medium == "STORAGE" else None)
            known = self.media.setdefault(event.medium, set())
            if isinstance(event, Removed):
                assert known.issuperset(event.block_hashes)
                known.difference_update(event.block_hashes)
                continue
            assert event.token_ids == []
            assert known.isdisjoint(event.block_hashes)
            known.update(event.block_hashes)
            parent = event.parent_block_hash
            for one in event.block_hashes:
                self.parents[one] = parent
                parent = one

    def close(self) -> None:
        self._stream.close(linger=0)
        self._context.term()


class Pool:
    """A client that puts blocks, and what is where of all that it has ever put."""

    def __init__(self, client: Client, record: NamespaceRecord = RECORD) -> None:
        self.client = client
        self.ns = client.open(record)
        self.ever: list[bytes] = []
        self._rng = np.random.default_rng(1)

    def put(self, count: int) -> list[bytes]:
        """A chain of blocks."""
        keys = [self._rng.bytes(16) for _ in range(count)]
        self.client.put(self.ns, keys, [self._rng.bytes(NBYTES) for _ in keys])
        self.ever += keys
        return keys

    def where(self) -> dict[Presence, set[int]]:
        found = self.client.present(self.ns, self.ever, wait_s=0.0)
        return {
            place: {name(key) for key, at in zip(self.ever, found, strict=True) if at == place}
            for place in Presence
        }


def key(turn: int, number: int) -> bytes:
    return (turn << 64 | number).to_bytes(16, "big")


def name(key: bytes) -> int:
    return int.from_bytes(key[-8:], "big")


class Setting:
    """Where a daemon publishes."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/events"
        self.replay = f"ipc://{folder}/events.replay"

    def config(self, **more: str) -> str:
        given = {"model": MODEL, "endpoint": self.endpoint, "replay": self.replay, **more}
        lines = [f'{key} = "{value}"' for key, value in given.items()]
        return "\n".join(["[publish_events.one]", *lines, ""])


@pytest.fixture
def at(folder: Path) -> Setting:
    return Setting(folder)


@pytest.fixture
def readers(at: Setting) -> Iterator[list[Reader]]:
    """Readers that end with the test; the first is there."""
    found = [Reader(at.endpoint, at.replay)]
    yield found
    for reader in found:
        reader.close()


def agree(reader: Reader, pool: Pool, until, disks: bool = False) -> dict[Presence, set[int]]:
    """Wait until the reader knows of each block what the pool says of it."""
    where: dict[Presence, set[int]] = {}

    def same() -> bool:
        reader.read()
        where.update(pool.where())
        memory = reader.media.get("CPU", set())
        below = reader.media.get("STORAGE", set())
        return memory == where[Presence.MEMORY] and (
            not disks or below - memory == where[Presence.DISK]
        )

    until(same, "the reader and the pool agree")
    return where


def test_a_reader_knows_what_is_in_memory(start, at, readers, until) -> None:
    daemon = start("--memory", "4MiB", "--node", "n1", config=at.config())
    (reader,) = readers
    with daemon.client(connect=True) as client:
        pool = Pool(client)
        first = pool.put(8)
        assert agree(reader, pool, until)[Presence.MEMORY] == {name(key) for key in first}
        assert [reader.parents[name(key)] for key in first] == [
            None,
            *(name(key) for key in first[:-1]),
        ]
        assert client.remove(pool.ns, first[3:5]) == 2
        assert len(agree(reader, pool, until)[Presence.MEMORY]) == 6
        for _ in range(20):
            pool.put(8)
            agree(reader, pool, until)
        assert len(pool.where()[Presence.NOWHERE]) > 80
        client.namespaces.clear(pool.ns)
        assert agree(reader, pool, until)[Presence.MEMORY] == set()
        pool.put(3)
        assert len(agree(reader, pool, until)[Presence.MEMORY]) == 3
        readers.append(Reader(at.endpoint, at.replay))
        late = readers[1]
        late.ask()
        agree(late, pool, until)
        pool.put(2)
        agree(late, pool, until)
    assert reader.topics == late.topics == {f"kv@n1@{MODEL}".encode()}
    assert reader.seconds == sorted(reader.seconds)


def test_a_gap_is_filled(start, at, readers, until) -> None:
    daemon = start(config=at.config(topic="t"))
    (reader,) = readers
    with daemon.client(connect=True) as client:
        pool = Pool(client)
        pool.put(4)
        agree(reader, pool, until)
        gaps = reader.gaps
        reader.skip = 2
        while reader.skip:
            keys = pool.put(2)
            client.remove(pool.ns, keys[:1])
            reader.read()
        agree(reader, pool, until)
        assert reader.gaps == gaps + 1
    assert reader.topics == {b"t"}


def test_disks(start, at, readers, until, folder) -> None:
    disk = folder / "disk"
    args = ("--memory", "4MiB", "--ssd", f"{disk}=32MiB", "--data-dir", str(folder / "data"))
    daemon = start(*args, config=at.config())
    (reader,) = readers
    with daemon.client(connect=True) as client:
        pool = Pool(client)

        def more() -> bool:
            pool.put(16)
            return bool(agree(reader, pool, until, disks=True)[Presence.DISK])

        for _ in range(12):
            more()
        until(more, "blocks are on the disk")  # which is slow on a busy machine
    assert daemon.stop() == 0
    again = start(*args, config=at.config())
    with again.client(connect=True) as client:
        pool.client, pool.ns = client, client.open(RECORD)
        until(lambda: pool.where()[Presence.DISK], "the disk is read")
        pool.put(1)  # its event is the gap
        agree(reader, pool, until, disks=True)


def test_a_killed_daemon(start, at, readers, until) -> None:
    daemon = start(config=at.config())
    (reader,) = readers
    with daemon.client(connect=True) as client:
        pool = Pool(client)
        pool.put(10)
        agree(reader, pool, until)
    daemon.kill()
    again = start(config=at.config())
    with again.client(connect=True) as client:
        pool.client, pool.ns = client, client.open(RECORD)
        pool.put(1)
        found = agree(reader, pool, until)
        assert len(found[Presence.MEMORY]) == 1


def test_other_namespaces_are_not_told(start, at, readers, until) -> None:
    daemon = start(config=at.config())
    (reader,) = readers
    with daemon.client(connect=True) as client:
        other = Pool(client, NamespaceRecord.simple("another", block_bytes=NBYTES, block_tokens=16))
        other.put(5)
        pool = Pool(client)
        pool._rng = np.random.default_rng(2)
        pool.put(5)
        agree(reader, pool, until)
    assert len(reader.parents) == 5


def test_a_reader_that_does_not_read_delays_nobody(start, at, readers, until) -> None:
    """It loses batches, sees a gap, and is told."""
    daemon = start(config=at.config())
    slow = readers[0]
    readers.append(Reader(at.endpoint, at.replay))
    with daemon.client(connect=True) as client:
        pool = Pool(client)
        keys = pool.put(2)
        agree(readers[1], pool, until)
        values = [bytes(NBYTES)] * 2
        for _ in range(3000):
            client.remove(pool.ns, keys)
            client.put(pool.ns, keys, values)
        agree(readers[1], pool, until)
        agree(slow, pool, until)


def test_whoever_asks_for_replays_ends_and_stalls_nothing(start, at, readers, until) -> None:
    """Questions without end, that are none, of readers that do not read or are gone; while namespaces are cleared."""
    daemon = start(config=at.config())
    (reader,) = readers
    context = zmq.Context()
    hostile = [context.socket(zmq.DEALER) for _ in range(3)]
    for one in hostile:
        one.linger, one.rcvhwm = 0, 1
        one.connect(at.replay)
    with daemon.client(connect=True) as client:
        pool = Pool(client)
        pool.put(8)
        agree(reader, pool, until)
        huge = NamespaceRecord({"model": MODEL, "block_tokens": 1 << 64}, RECORD.parts)
        for turn in range(20):
            for one in hostile:
                for number in (bytes(8), b"\xff" * 8, b"", bytes(1000), b"", *[bytes(8)] * 20):
                    try:
                        one.send_multipart((b"", number), zmq.NOBLOCK)
                    except zmq.Again:
                        break
            if turn == 10:
                hostile.pop().close()
            ns = client.open(huge)
            keys = [key(turn, at) for at in range(4)]
            assert client.put_each(ns, keys, [bytes(NBYTES)] * 4).all()
            client.remove(ns, keys)
            client.namespaces.clear(pool.ns)
            pool.put(2)
            reader.read()
            reader.ask()
        agree(reader, pool, until)
    for one in hostile:
        one.close()
    context.term()
    assert daemon.stop() == 0


def test_an_address_in_use(start, at) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        daemon = start(config=at.config(endpoint=endpoint), ready=False)
        assert daemon.wait_end() != 0
    assert f"publish_events.one: {endpoint}: Address already in use" in daemon.stderr

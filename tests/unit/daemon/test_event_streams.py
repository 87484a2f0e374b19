"""What a stream of KV events tells, and what it can repeat."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvpool.config.tables import StreamConfig
from kvpool.daemon.core.blocks import NamespaceState
from kvpool.daemon.ops.event_publisher import (
    END,
    KEPT_BATCHES_MAX,
    KEPT_BYTES_MAX,
    REPLAYS_QUEUED_MAX,
    SLICE_BLOCKS,
    Kept,
    Stream,
    space_of,
)
from kvpool.daemon.ops.published_blocks import (
    EVENT_BLOCKS_MAX,
    PublishedBlocks,
    name_of,
    needed,
    removed,
    stored,
)
from kvpool.daemon.ops.shared_holdings import SharedHoldings
from kvpool.types import PartKind, PartSpec
from tests.support.waiting import PATIENCE_S

A, B = b"a" * 16, b"b" * 16


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def here(*numbers: int) -> list[tuple[bytes, bool]]:
    return [(key(number), True) for number in numbers]


def gone(*numbers: int) -> list[tuple[bytes, bool]]:
    return [(key(number), False) for number in numbers]


def test_each_change_is_told_once() -> None:
    blocks = PublishedBlocks()
    assert blocks.changed("dram", A, here(1, 2)) == (keys(1, 2), [])
    assert blocks.changed("dram", A, here(2, 3)) == (keys(3), [])
    assert blocks.changed("dram", A, gone(4, 2)) == ([], keys(2))
    assert blocks.changed("dram", A, gone(2) + here(2)) == (keys(2), [])
    assert len(blocks) == 3
    assert blocks.changed("ssd", A, here(1)) == (keys(1), [])


def test_a_block_of_two_namespaces_is_there_until_none_has_it() -> None:
    blocks = PublishedBlocks()
    assert blocks.changed("dram", A, here(1)) == (keys(1), [])
    assert blocks.changed("dram", B, here(1, 2)) == (keys(2), [])
    assert sorted(key for _, some in blocks.known("dram") for key in some) == keys(1, 2)
    assert blocks.changed("dram", A, gone(1)) == ([], [])
    assert blocks.changed("dram", B, gone(1)) == ([], keys(1))
    assert blocks.known("dram") == [(B, keys(2))]
    assert blocks.has(B)
    assert not blocks.has(A)


def test_blocks_that_follow_one_another_are_one_event() -> None:
    before = {key(2): key(1), key(3): key(2), key(5): key(4)}
    events = list(stored("dram", keys(1, 2, 3, 5, 6), 16, before.get))
    assert [event["block_hashes"] for event in events] == [[1, 2, 3], [5], [6]]
    assert [event["parent_block_hash"] for event in events] == [None, 4, None]
    assert {event["block_size"] for event in events} == {16}
    assert all("locality" not in event for event in events)
    chain = keys(*range(1, 2 * EVENT_BLOCKS_MAX + 2))
    long = list(stored("ssd", chain, 16, dict(zip(chain[1:], chain, strict=False)).get))
    assert [len(event["block_hashes"]) for event in long] == [EVENT_BLOCKS_MAX] * 2 + [1]
    assert {(event["medium"], event["locality"]) for event in long} == {("STORAGE", "LOCAL")}


def test_removals() -> None:
    (event,) = removed("dram", keys(7, 8))
    assert event == {"type": "BlockRemoved", "block_hashes": [7, 8], "medium": "CPU"}
    assert not list(removed("ssd", []))


def test_a_name_is_the_end_of_the_hash() -> None:
    """As `maybe_convert_block_hash` of vLLM makes it of the whole hash."""
    whole = bytes(range(100, 132))
    assert name_of(whole[-16:]) == int.from_bytes(whole, "big") & ((1 << 64) - 1)


def namespace(*parts: PartSpec, fields: bytes = b"{}") -> NamespaceState:
    class Tenant:
        name = "red"

    return NamespaceState(Tenant(), A, fields, parts, 0)  # type: ignore[arg-type]


def test_windows_are_not_needed() -> None:
    full, window = PartSpec(8), PartSpec(8, PartKind.WINDOW, 2)
    assert needed(namespace(full, window, full)) == 0b101
    assert needed(namespace(full, PartSpec(8, stride=2))) == 0b01
    assert needed(namespace(window, window)) == 0b11


def test_what_a_namespace_says() -> None:
    found = space_of(namespace(PartSpec(8), fields=b'{"model": "m", "hash_tokens": 32}'))
    assert (found.model, found.tenant, found.block_tokens) == ("m", "red", 32)
    assert space_of(namespace(PartSpec(8), fields=b'{"block_tokens": "x"}')).block_tokens == 0


@pytest.mark.parametrize("tokens", [1 << 64, -(1 << 64), 10**30, -1, "true", "16.5"])
def test_block_tokens_that_no_event_can_carry(tokens: object) -> None:
    said = f'{{"block_tokens": {tokens}}}'.encode()
    found = space_of(namespace(PartSpec(8), fields=said))
    assert type(found.block_tokens) is int
    assert found.block_tokens == 0


class Replays:
    """A stream, and readers of its replays."""

    def __init__(self, folder: Path, kind: type[Stream] = Stream) -> None:
        self.at = f"ipc://{folder}/replay"
        config = StreamConfig("one", "m", f"ipc://{folder}/events", self.at)
        self.stream = kind(config, "n", 0o600, 0, lambda: 1.0)
        self._context = zmq.Context()
        self._readers: list[Any] = []

    def fill(self, digest: bytes, *numbers: int) -> None:
        self.stream.blocks.changed("dram", digest, here(*numbers))
        self.stream.spaces[digest] = namespace(PartSpec(8)), 16

    def clear(self, digest: bytes, *numbers: int) -> None:
        self.stream.blocks.changed("dram", digest, gone(*numbers))
        del self.stream.spaces[digest]

    def reader(self) -> Any:
        found = self._context.socket(zmq.DEALER)
        found.linger = 0
        found.rcvhwm = 1
        found.connect(self.at)
        self._readers.append(found)
        return found

    def question(self) -> tuple[bytes, int]:
        """The next that comes."""
        assert self.stream.replaying.poll(PATIENCE_S * 1000)
        (found,) = self.stream.questions() or ()
        return found

    def answer(self, reader: Any) -> set[int]:
        """The blocks that a reader hears of until the end of its answer."""
        blocks: set[int] = set()
        while True:
            assert reader.poll(PATIENCE_S * 1000)
            _, _, number, payload = reader.recv_multipart()
            if number == END:
                return blocks
            for event in msgspec.msgpack.decode(payload)[1]:
                blocks.update(event["block_hashes"])

    def close(self) -> None:
        for reader in self._readers:
            reader.close()
        self._context.term()
        self.stream.close()


@pytest.fixture
def replays(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Replays]:
    found = Replays(tmp_path, getattr(request, "param", Stream))
    yield found
    found.close()


class ImpatientStream(Stream):
    REPLAY_STALLED_S = 0.05


def test_namespaces_that_end_while_they_are_repeated(replays: Replays) -> None:
    """What a replay sends is taken when it begins: of what has gone since, later batches tell."""
    first = range(3 * SLICE_BLOCKS)
    replays.fill(A, *first)
    replays.fill(B, 1_000_000)
    replays.stream.idle()
    reader = replays.reader()
    reader.send_multipart((b"", bytes(8)))
    asked = replays.question()

    async def story() -> None:
        replaying = asyncio.create_task(replays.stream.replay(*asked))
        await asyncio.sleep(0)
        assert not replaying.done()
        replays.clear(B, 1_000_000)
        await replaying

    asyncio.run(story())
    assert replays.answer(reader) == {*first, 1_000_000}


def test_many_replays_take_what_is_here_once(replays: Replays) -> None:
    """And hear of what has changed since."""
    taken: list[str] = []

    class Counted(PublishedBlocks):
        def known(self, tier: str) -> Any:
            taken.append(tier)
            return super().known(tier)

    stream = replays.stream
    stream.blocks = Counted()
    replays.fill(A, *range(5))
    stream.idle()

    def ask() -> set[int]:
        reader = replays.reader()
        reader.send_multipart((b"", bytes(8)))
        assert asyncio.run(stream.replay(*replays.question()))
        return replays.answer(reader)

    assert ask() == set(range(5))
    replays.fill(A, 5)
    stream.publish(stored("dram", keys(5), 16))
    assert ask() == set(range(6))
    assert taken == ["dram", "ssd"]
    stream.drop_snapshot()
    assert ask() == set(range(6))
    assert len(taken) == 4


@pytest.mark.parametrize("replays", [ImpatientStream], indirect=True)
def test_a_reader_that_does_not_read_what_is_repeated(replays: Replays) -> None:
    """Little waits for it, and it is given up; one that is gone at once."""
    for _ in range((KEPT_BYTES_MAX >> 16) - 1):
        replays.stream.publish([{"model": bytes(1 << 16)}])
    reader = replays.reader()
    reader.send_multipart((b"", bytes(8)))
    assert asyncio.run(replays.stream.replay(*replays.question())) is False
    assert asyncio.run(replays.stream.replay(b"nobody", 0)) is False


def test_what_is_no_question_is_passed_over(replays: Replays) -> None:
    """A few at a time, however many there are."""
    reader = replays.reader()
    wrong = (b"what?",), (b"", b"what?"), (b"", bytes(9)), (b"", bytes(8), b"")
    for frames in wrong:
        reader.send_multipart(frames)
    reader.send_multipart((b"", b"\xff" * 8))
    received = 0

    class Endless:
        def recv_multipart(self, _: int) -> list[bytes]:
            nonlocal received
            received += 1
            return [b"reader", b"", b"what?"]

    found: list[tuple[bytes, int]] = []
    while not found:
        assert replays.stream.replaying.poll(PATIENCE_S * 1000)
        found += replays.stream.questions() or []
    ((who, number),) = found
    assert number == (1 << 64) - 1
    assert asyncio.run(replays.stream.replay(who, number))
    assert replays.answer(reader) == set()
    assert replays.stream.questions() is None
    real, replays.stream.replaying = replays.stream.replaying, Endless()
    assert replays.stream.questions() == []
    assert received == REPLAYS_QUEUED_MAX
    replays.stream.replaying = real


def test_the_last_batches_are_kept() -> None:
    kept = Kept(100)
    assert kept.since(100) == []
    assert kept.since(99) is None
    numbers = [kept.add(b"x") for _ in range(3)]
    assert numbers == [100, 101, 102]
    assert kept.skip() == 103
    assert kept.add(b"y") == 104
    assert kept.since(102) == [(102, b"x"), (104, b"y")]
    assert kept.since(0) is None
    assert kept.since(105) == kept.since(1000) == []


def test_no_more_are_kept_than_fit() -> None:
    kept = Kept(0)
    for _ in range(KEPT_BATCHES_MAX + 5):
        kept.add(b"")
    assert kept.since(4) is None
    found = kept.since(5)
    assert found is not None
    assert len(found) == KEPT_BATCHES_MAX
    kept = Kept(0)
    for _ in range(5):
        kept.add(bytes(KEPT_BYTES_MAX // 4))
    assert kept.since(0) is None
    assert len(kept.since(1) or []) == 4


def test_every_reader_has_all_changes(make_pool) -> None:
    """Also those that another one took first."""
    pool = make_pool()
    shared = SharedHoldings(pool.node.inventory)
    told: list[str] = []
    one, other = shared.reader(), shared.reader()
    one.follow_changes(lambda: told.append("one"))
    other.follow_changes(lambda: told.append("other"))
    pool.put([1, 2])
    pool.node.settle()
    assert told == ["one", "other"]
    assert [list(some) for _, some in one.take_changes()] == [keys(1, 2)]
    pool.put([3])
    pool.node.settle()
    assert told == ["one", "other"] * 2
    assert [key for _, some in other.take_changes() for key in some] == keys(1, 2, 3)
    assert [key for _, some in one.take_changes() for key in some] == keys(3)
    assert other.take_changes() == []
    assert other.masks(pool.namespace.directory_digest, keys(1, 9)) == (1, [1, 0])
    assert other.walk(0, 10)[0][0][1] == keys(1, 2, 3)

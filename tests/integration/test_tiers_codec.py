"""Daemons whose namespace has a codec: blocks are smaller on disk, and what is read is what was put."""

import os
import random
from collections.abc import Iterable, Iterator

import numpy as np
import pytest

from kvpool.cli.render.text import size_text
from kvpool.cli.render.tiers import tiers_view
from kvpool.client import OperatorClient
from kvpool.types import NamespaceRecord, PartSpec
from tests.support.jobs import finished
from tests.support.printed import printed
from tests.support.waiting import PATIENCE_S

pytest.importorskip("blosc2")

NBYTES = 64 << 10
RECORD = NamespaceRecord.simple("tiers-codec", block_bytes=NBYTES, block_tokens=16)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def keys_of(numbers: Iterable[int]) -> list[bytes]:
    return [key(number) for number in numbers]


def block(number: int, nbytes: int = NBYTES) -> bytes:
    """KV in bf16, and each fifth block of it noise, which nothing makes smaller."""
    dice = np.random.default_rng(number)
    if number % 5 == 0:
        return dice.bytes(nbytes)
    scales = np.exp(dice.normal(0, 1, 128))
    values = dice.standard_normal((-(-nbytes // 256), 128)) * scales
    halves = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return halves.tobytes()[:nbytes]


def noisy(numbers: Iterable[int]) -> int:
    return sum(number % 5 == 0 for number in numbers)


class Engine:
    """A client of a daemon with one disk, which asks for the codec."""

    def __init__(self, daemon, codec: str = "blosc2", record: NamespaceRecord = RECORD) -> None:
        self.daemon = daemon
        self.client: OperatorClient = daemon.client(connect=True)
        self.ns = self.client.open(record, ssd_codec=codec)

    def put(self, numbers: range) -> None:
        for at in range(numbers.start, numbers.stop, 8):
            some = range(at, min(at + 8, numbers.stop))
            self.client.put(self.ns, keys_of(some), [block(n) for n in some])

    def write(self, numbers: range, until) -> None:
        """Put at the pace of the disk: what memory gives up before its turn has come is not written."""
        for at in range(numbers.start, numbers.stop, 32):
            some = range(at, min(at + 32, numbers.stop))
            goal = self.disk.written_blocks + len(some)
            self.put(some)
            until(lambda goal=goal: self.disk.written_blocks == goal)

    def read(self, numbers: Iterable[int]) -> set[int]:
        """Which of them the disk has; each found one is whole and right."""
        self.client.evict(tier="dram")
        numbers, found = list(numbers), set()
        for at in range(0, len(numbers), 16):
            some = numbers[at : at + 16]
            got = self.client.get(self.ns, keys_of(some), wait_s=PATIENCE_S)
            for n, data in zip(some, got, strict=True):
                if data is not None:
                    assert data == block(n), f"block {n} is wrong"
                    found.add(n)
        return found

    @property
    def disk(self):
        return self.client.stats().tiers.ssd[0]


@pytest.fixture
def begin(start, folder, until) -> Iterator:
    """Starts a daemon on the one disk, with an engine beside it."""
    engines = []

    def one(*args: str, size: str = "64MiB", codec: str = "blosc2") -> Engine:
        disk = f"{folder / 'disk'}={size}"
        daemon = start("--memory", "4MiB", "--ssd", disk, "--ssd-write", "through", *args)
        engine = Engine(daemon, codec)
        engines.append(engine)
        # A node does not wait long for its disk before it is ready.
        until(lambda: engine.disk.state == "serving", "the disk is open")
        return engine

    yield one
    for engine in engines:
        engine.client.close()


def test_what_is_packed_is_read_as_it_was_put_after_a_restart_too(begin, until):
    engine = begin()
    engine.write(range(160), until)
    disk = engine.disk
    assert disk.unpacked_blocks == noisy(range(160))
    assert disk.packed_blocks == 160 - noisy(range(160))
    assert disk.raw_bytes == 160 * NBYTES
    assert disk.used_bytes == disk.stored_bytes == disk.written_bytes
    assert 0.75 < disk.stored_bytes / disk.raw_bytes < 0.85  # a fifth of it is noise
    text = printed(tiers_view(engine.client.stats(), "default"), width=200)
    assert f"in {size_text(disk.stored_bytes)}" in text
    assert engine.read(range(160)) == set(range(160))
    moved = engine.disk.read_bytes
    assert moved == disk.stored_bytes
    engine.daemon.kill()
    again = begin()
    until(lambda: again.disk.state == "serving")
    assert again.disk.blocks == again.disk.restored_blocks == 160
    assert again.disk.stored_bytes == disk.stored_bytes
    assert again.read(range(160)) == set(range(160))
    assert again.disk.mismatches == 0
    assert scrubbed(again.client) == (160, 0)


def test_the_codec_may_be_switched_at_any_time(begin, until):
    """Blocks are read as they were written, whatever is written now."""
    engine = begin(codec="")
    engine.write(range(40), until)
    assert engine.disk.packed_blocks == 0
    engine.client.configure(RECORD.digest(), ssd_codec="blosc2")
    engine.write(range(40, 80), until)
    assert engine.disk.packed_blocks == 40 - noisy(range(40, 80))
    engine.client.configure(RECORD.digest(), ssd_codec="")
    engine.write(range(80, 120), until)
    assert engine.disk.packed_blocks == 40 - noisy(range(40, 80))
    assert engine.read(range(120)) == set(range(120))
    engine.put(range(120))  # all of it is there
    engine.daemon.stop()
    again = begin(codec="")
    until(lambda: again.disk.state == "serving")
    assert again.disk.blocks == 120
    assert again.read(range(120)) == set(range(120))


def test_kills_under_load_lose_nothing_that_was_safe(begin, until):
    safe: set[int] = set()
    at = 0
    for codec in ("blosc2", "", "blosc2"):
        engine = begin(codec=codec)
        until(lambda engine=engine: engine.disk.state == "serving")
        engine.client.configure(RECORD.digest(), ssd_codec=codec)
        assert engine.read(safe) == safe
        engine.write(range(at, at + 40), until)
        safe.update(range(at, at + 40))
        # Some more, of which only the next life can tell whether they were safe.
        engine.put(range(at + 40, at + 72))
        at += 72
        engine.daemon.kill()
    engine = begin()
    until(lambda: engine.disk.state == "serving")
    assert engine.read(range(at)) >= safe
    assert engine.disk.mismatches == 0


def test_a_disk_that_is_full_of_whole_blocks_takes_packed_ones(begin, until):
    engine = begin(size="8MiB", codec="")
    engine.write(range(160), until)
    before = engine.disk.blocks
    assert before < 160
    engine.client.configure(RECORD.digest(), ssd_codec="blosc2")
    engine.write(range(200, 400), until)
    disk = engine.disk
    assert disk.used_bytes <= disk.segment_bytes
    assert disk.blocks > before
    assert len(engine.read(range(200, 400))) > before


def scrubbed(client: OperatorClient) -> tuple[int, int]:
    job = finished(client, kind="scrub")
    return job["seen"], job["blocks"]


def test_flipped_bits_are_misses_and_counted(begin, folder, until):
    engine = begin()
    engine.write(range(120), until)
    dice = random.Random(1)
    with (folder / "disk" / "segment").open("r+b") as file:
        for _ in range(1000):
            at = dice.randrange(engine.disk.segment_bytes)
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1 << dice.randrange(8)]))
        file.flush()
        os.fsync(file.fileno())
    found = engine.read(range(120))  # asserts that what is found is right
    assert 0 < len(found) < 120
    disk = engine.disk
    assert disk.mismatches == 120 - len(found)
    assert 0 < disk.undecoded_blocks < disk.mismatches
    assert disk.blocks == len(found), "what was bad is found no more"
    assert scrubbed(engine.client) == (len(found), 0)


def test_blocks_of_several_parts_some_larger_than_a_staging_buffer(start, folder, until):
    sizes = ((9 << 20) + 4096 + 17, 5000, 70_001)
    record = NamespaceRecord({"model": "parts"}, tuple(PartSpec(size) for size in sizes))
    daemon = start(
        *("--memory", "96MiB", "--ssd", f"{folder / 'd'}=256MiB", "--ssd-write", "through")
    )
    with daemon.client(connect=True) as client:
        ns = client.open(record, ssd_codec="blosc2")
        blocks = [[block(n, size) for n in range(1, 4)] for size in sizes]
        for part, data in enumerate(blocks):
            assert client.put(ns, keys_of(range(1, 4)), data, part=part) == 3
        until(lambda: client.stats().tiers.ssd[0].written_blocks == 9)
        assert client.stats().tiers.ssd[0].packed_blocks >= 6
        client.evict(tier="dram")
        for part, data in enumerate(blocks):
            assert client.get(ns, keys_of(range(1, 4)), part=part, wait_s=PATIENCE_S) == data


def test_a_peer_pulls_what_is_packed_on_our_disk(begin, start, until):
    owner = begin("--listen", "tcp://127.0.0.1:0")
    owner.write(range(40), until)
    owner.client.evict(tier="dram")
    url = owner.daemon.ready.rsplit("peers at ", 1)[1].strip()
    reader = start("--memory", "16MiB", "--peer", url, name="reader")
    with reader.client(connect=True) as client:
        ns = client.open(RECORD)
        assert client.pull(ns, keys_of(range(40)), wait_s=PATIENCE_S) == 40
        assert client.get(ns, keys_of(range(40))) == [block(n) for n in range(40)]

"""Puts into slots: the bytes, their checksums, and nobody who reads on afterwards."""

import mmap
import os
import threading
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings

from kvpool.client.copy_tuner import CopyWays, Way
from kvpool.client.copying import ALONE_BYTES, CopyIn
from kvpool.memory.buffers import Source

SEGMENT_BYTES = 64 << 20
PATIENCE_S = 60.0


class Fixed(CopyWays):
    """One way for all puts; what was measured of it."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way = way
        self.measured: list[tuple[int, int, Way, float]] = []

    def choose(self, block_bytes: int, nbytes: int) -> Way:
        return self.way

    def learn(self, block_bytes: int, nbytes: int, way: Way, seconds: float) -> None:
        self.measured.append((block_bytes, nbytes, way, seconds))


@pytest.fixture(scope="module")
def segment() -> Iterator[tuple[int, Any]]:
    """(memfd, its bytes)"""
    fd = os.memfd_create("segment")
    os.ftruncate(fd, SEGMENT_BYTES)
    yield fd, np.frombuffer(mmap.mmap(fd, SEGMENT_BYTES), np.uint8)
    os.close(fd)


@pytest.fixture(scope="module")
def random_bytes() -> Any:
    return np.random.default_rng(1).integers(0, 256, 24 << 20, dtype=np.uint8)


@pytest.fixture(params=Way, ids=[way.name.lower() for way in Way])
def copy_in(request: pytest.FixtureRequest) -> CopyIn:
    return CopyIn(Fixed(request.param))


@settings(max_examples=25, deadline=None)
@given(
    shape=st.sampled_from(
        [
            (4096, 257),
            (65536, 64),
            (65536, 17),
            (100_000, 30),
            (1 << 20, 9),
            (5 << 20, 3),
            (3 << 20, 1),
        ]
    ),
    form=st.sampled_from(["whole", "list", "pieces"]),
    order=st.sampled_from(["run", "two runs", "shuffled"]),
    data=st.data(),
)
@pytest.mark.parametrize("way", Way)
def test_what_is_put_lies_in_its_slots(way, segment, random_bytes, shape, form, order, data):
    """Whatever the way, the form of the blocks, which of them, and the order of the slots."""
    fd, memory = segment
    nbytes, n = shape
    stride = -(-nbytes // 4096) * 4096
    table = memory[: SEGMENT_BYTES // stride * stride].reshape(-1, stride)
    whole = random_bytes[: n * nbytes].reshape(n, nbytes)
    blocks = {
        "whole": whole,
        "list": list(whole),
        "pieces": [[block[:1000], block[1000:]] for block in whole],
    }[form]
    left_out = data.draw(st.sets(st.integers(0, n - 1), max_size=min(3, n - 1)))
    chosen = np.array([index for index in range(n) if index not in left_out])
    rows = np.arange(len(chosen)) + data.draw(st.integers(0, len(table) - len(chosen) - 1))
    if order == "two runs":
        rows[len(rows) // 2 :] += 1
    elif order == "shuffled":
        np.random.default_rng(data.draw(st.integers(0, 99))).shuffle(rows)
    memory[:] = 0xEE
    copy = CopyIn(Fixed(way))
    found = copy(Source(blocks, n, nbytes), chosen, table, rows, fd)
    assert found == b"".join(xxhash.xxh3_128_digest(whole[index].tobytes()) for index in chosen)
    assert (table[rows, :nbytes] == whole[chosen]).all()
    table[rows, :nbytes] = 0xEE
    assert (memory == 0xEE).all(), "not a byte beside the blocks"


def test_only_large_puts_are_measured(segment, random_bytes):
    fd, memory = segment
    table = memory.reshape(-1, 4096)
    ways, now = Fixed(Way.ALONE), iter(range(1000))
    copy = CopyIn(ways, clock=lambda: 10.0 * next(now))
    n = ALONE_BYTES // 4096
    for count in (n - 1, n):
        source = Source(random_bytes[: 4096 * count], count, 4096)
        copy(source, np.arange(count), table, np.arange(count), fd)
    assert ways.measured == [(4096, ALONE_BYTES, Way.ALONE, 10.0)]


class Failing(Source):
    """Its copies and hashes fail after so many good ones; who is in one is counted."""

    def __init__(self, blocks: Any, n: int, nbytes: int, good: int) -> None:
        super().__init__(blocks, n, nbytes)
        self.good = good
        self.inside = 0
        self.lock = threading.Lock()

    def _enter(self) -> None:
        with self.lock:
            self.inside += 1
            self.good -= 1
            if self.good < 0:
                self.inside -= 1
                raise MemoryError("no memory for a copy")

    def _leave(self) -> None:
        with self.lock:
            self.inside -= 1

    def write(self, *arguments: Any) -> None:
        self._enter()
        super().write(*arguments)
        self._leave()

    def checksums(self, indices: Any) -> bytes:
        self._enter()
        found = super().checksums(indices)
        self._leave()
        return found


@pytest.mark.parametrize("good", range(6))
def test_a_failure_of_either_thread_is_raised_when_nobody_reads_any_more(
    copy_in, segment, random_bytes, good
):
    fd, memory = segment
    table = memory.reshape(-1, 1 << 20)
    source = Failing(random_bytes[: 16 << 20], 16, 1 << 20, good)
    with pytest.raises(MemoryError):
        copy_in(source, np.arange(16), table, np.arange(16), fd)
    assert source.inside == 0
    source.good = 1000
    done = copy_in(source, np.arange(16), table, np.arange(16), fd)
    assert done == source.checksums(range(16)), "the next put is whole"


class Waiting(Source):
    """A source whose first copy waits: `began` is set then, and `go` lets it end."""

    def __init__(self, blocks: Any, n: int, nbytes: int) -> None:
        super().__init__(blocks, n, nbytes)
        self.began, self.go = threading.Event(), threading.Event()

    def write(self, *arguments: Any) -> None:
        self.began.set()
        assert self.go.wait(PATIENCE_S)
        super().write(*arguments)


def test_a_put_does_not_wait_for_another_put(copy_in, segment, random_bytes):
    fd, memory = segment
    table = memory.reshape(-1, 1 << 20)
    slow = Waiting(random_bytes[: 8 << 20], 8, 1 << 20)
    first: list[bytes] = []
    thread = threading.Thread(
        target=lambda: first.append(copy_in(slow, np.arange(8), table, np.arange(8), fd))
    )
    thread.start()
    assert slow.began.wait(PATIENCE_S)
    rows = np.arange(16, 24)
    other = Source(random_bytes[8 << 20 : 16 << 20], 8, 1 << 20)
    found = copy_in(other, np.arange(8), table, rows, fd)
    assert found == other.checksums(range(8))
    slow.go.set()
    thread.join(PATIENCE_S)
    assert first == [slow.checksums(range(8))]
    assert (table[:8].ravel() == random_bytes[: 8 << 20]).all()
    assert (table[16:24].ravel() == random_bytes[8 << 20 : 16 << 20]).all()

"""The SSD store on a disk that fails, stalls, or does things by halves; and in which order it does things."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvpool.errors import ConfigError, SegmentError
from kvpool.storage.ssd.files import LinuxDisk
from kvpool.storage.ssd.index import Outcome
from kvpool.storage.ssd.store import ENTRY, STAGING_BYTES, ReadBatch, SsdStore, WriteBatch
from kvpool.types import BlockStatus
from tests.support.waiting import PATIENCE_S, until

MIB, PAGE = 1 << 20, 4096
SIZE = 16 * MIB


class BadDisk(LinuxDisk):
    """The real one, with something done before each call: `before(name, at)` may raise, or wait.

    short: no read or write does more bytes than that. calls: (name, at, bytes) of what was done.
    """

    def __init__(self) -> None:
        self.before: Callable[[str, int], None] = lambda name, at: None
        self.short = 1 << 30
        self.calls: list[tuple[str, int, int]] = []

    def open(self, path: Path, flags: int) -> int:
        self.before("open_direct" if flags & os.O_DIRECT else "open", 0)
        return super().open(path, flags)

    def pread(self, fd: int, into: np.ndarray, at: int) -> int:
        self.before("pread", at)
        self.calls.append(("pread", at, len(into)))
        return super().pread(fd, into[: self.short], at)

    def pwrite(self, fd: int, data: np.ndarray, at: int) -> int:
        self.before("pwrite", at)
        self.calls.append(("pwrite", at, len(data)))
        return super().pwrite(fd, data[: self.short], at)

    def fdatasync(self, fd: int) -> None:
        self.before("fdatasync", 0)
        self.calls.append(("fdatasync", 0, 0))
        super().fdatasync(fd)

    def fallocate(self, fd: int, nbytes: int) -> None:
        self.before("fallocate", 0)
        super().fallocate(fd, nbytes)

    def drop_pages(self, fd: int, at: int, nbytes: int) -> None:
        self.before("drop_pages", at)
        self.calls.append(("drop_pages", at, nbytes))
        super().drop_pages(fd, at, nbytes)

    def count(self, name: str) -> int:
        return sum(call == name for call, _, _ in self.calls)

    def fail(self, name: str, code: int, ats: set[int] | None = None) -> None:
        """From now on these calls fail; everywhere, or at some places of the file."""

        def before(call: str, at: int) -> None:
            if call == name and (ats is None or at in ats):
                raise OSError(code, os.strerror(code))

        self.before = before

    def heal(self) -> None:
        self.before = lambda name, at: None


class Stall:
    """Holds the first call of one name until it is let go."""

    def __init__(self, disk: BadDisk, name: str, at: int | None = None) -> None:
        self.reached = threading.Event()
        self._go = threading.Event()
        self._name = name
        self._at = at
        disk.before = self._before

    def _before(self, name: str, at: int) -> None:
        if name == self._name and self._at in {None, at} and not self.reached.is_set():
            self.reached.set()
            assert self._go.wait(PATIENCE_S)

    def wait(self) -> None:
        assert self.reached.wait(PATIENCE_S)

    def go(self) -> None:
        self._go.set()


@pytest.fixture
def disk():
    return BadDisk()


@pytest.fixture
def store(tmp_path, disk):
    opened = SsdStore.open(tmp_path, SIZE, threads=2, direct=False, disk=disk)
    opened.add_table(b"t")
    yield opened
    disk.heal()
    opened.close()


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as executor:
        yield executor


def blocks_of(offsets: list[int], nbytes: int, seed: int = 0) -> WriteBatch:
    n = len(offsets)
    source = np.random.default_rng([seed, *offsets]).integers(0, 256, (n, nbytes), np.uint8)
    digests = b"".join(xxhash.xxh3_128_digest(row.data) for row in source)
    zeros = np.zeros((n, 16), np.uint8)
    return WriteBatch(
        table=1,
        nbytes=nbytes,
        offsets=np.array(offsets, np.uint64),
        keys=zeros,
        parents=zeros,
        depths=np.zeros(n, np.uint32),
        pins=np.zeros(n, np.uint8),
        checksums=np.frombuffer(digests, np.uint8).reshape(n, 16),
        source=source,
        rows=np.arange(n),
    )


def read_of(batch: WriteBatch) -> ReadBatch:
    out = np.zeros_like(batch.source)
    return ReadBatch(batch.nbytes, batch.offsets, batch.checksums, out, batch.rows)


def reads_right(store: SsdStore, batch: WriteBatch) -> bool:
    read = read_of(batch)
    return bool(
        (store.read(read) == BlockStatus.PRESENT).all() and (read.destination == batch.source).all()
    )


def listed(store: SsdStore) -> list[int]:
    return np.concatenate([np.zeros(0, ENTRY), *store.entries()])["offset"].tolist()


# ---- errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (errno.ENOSPC, BlockStatus.NO_SPACE),
        (errno.EDQUOT, BlockStatus.NO_SPACE),
        (errno.EIO, BlockStatus.FAILED),
        (errno.EROFS, BlockStatus.NO_SPACE),
        (errno.EFBIG, BlockStatus.NO_SPACE),
        (errno.ENODATA, BlockStatus.FAILED),
    ],
)
def test_a_write_that_fails_in_places(store, disk, code, status):
    offsets = [2 * PAGE * slot for slot in range(6)]  # not neighbours: a call each
    batch = blocks_of(offsets, PAGE)
    disk.fail("pwrite", code, {offsets[1], offsets[4]})
    assert store.write(batch).tolist() == [
        BlockStatus.PRESENT,
        status,
        BlockStatus.PRESENT,
        BlockStatus.PRESENT,
        status,
        BlockStatus.PRESENT,
    ]
    assert listed(store) == [offsets[at] for at in (0, 2, 3, 5)]
    stats = store.stats()
    assert (stats.blocks_written, stats.write_errors) == (4, 2)
    disk.heal()
    assert store.write(batch, store.forget(offsets)).tolist() == [BlockStatus.PRESENT] * 6
    assert reads_right(store, batch)


def test_a_disk_that_takes_nothing(store, disk):
    batch = blocks_of([0, PAGE], PAGE)
    disk.fail("pwrite", errno.EROFS)
    for _ in range(3):
        assert store.write(batch).tolist() == [BlockStatus.NO_SPACE] * 2
    assert listed(store) == [] and disk.count("fdatasync") == 0
    disk.heal()
    assert (store.write(batch) == BlockStatus.PRESENT).all()


def test_a_read_that_fails_in_places(store, disk):
    offsets = [2 * PAGE * slot for slot in range(4)]
    batch = blocks_of(offsets, PAGE)
    store.write(batch)
    disk.fail("pread", errno.EIO, {offsets[2]})
    read = read_of(batch)
    assert store.read(read).tolist() == [
        BlockStatus.PRESENT,
        BlockStatus.PRESENT,
        BlockStatus.FAILED,
        BlockStatus.PRESENT,
    ]
    assert (read.destination[[0, 1, 3]] == batch.source[[0, 1, 3]]).all()
    assert store.stats().read_errors == 1
    disk.heal()
    assert reads_right(store, batch)


def test_a_large_block_that_fails_half_way(store, disk):
    nbytes = STAGING_BYTES + PAGE
    batch = blocks_of([0], nbytes)
    disk.fail("pwrite", errno.EIO, {STAGING_BYTES})
    assert store.write(batch).tolist() == [BlockStatus.FAILED] and listed(store) == []
    disk.heal()
    assert store.write(batch).tolist() == [BlockStatus.PRESENT]
    disk.fail("pread", errno.EIO, {STAGING_BYTES})
    assert store.read(read_of(batch)).tolist() == [BlockStatus.FAILED]
    disk.heal()
    assert reads_right(store, batch)


@pytest.mark.parametrize(
    ("direct", "short"), [("auto", PAGE), ("auto", 3 * PAGE), (False, PAGE), (False, 10_000)]
)
def test_calls_that_do_less_than_asked(tmp_path, disk, direct, short):
    store = SsdStore.open(tmp_path, SIZE, threads=2, direct=direct, disk=disk)
    store.add_table(b"t")
    disk.short = short
    batch = blocks_of([20 * PAGE * slot for slot in range(5)], 20 * PAGE)
    assert (store.write(batch) == BlockStatus.PRESENT).all()
    assert reads_right(store, batch)
    store.close()


def test_calls_that_do_nothing(store, disk):
    batch = blocks_of([0], PAGE)
    disk.short = 0
    assert store.write(batch).tolist() == [BlockStatus.FAILED]
    disk.short = PAGE
    store.write(batch)
    disk.short = 0
    assert store.read(read_of(batch)).tolist() == [BlockStatus.FAILED]


def test_a_sync_that_fails_takes_all_that_was_written_before_it(store, disk, pool):
    """Also a write that had begun, and whose own sync would succeed: its pages may be gone."""
    early, late = blocks_of([0, PAGE], PAGE), blocks_of([8 * PAGE, 16 * PAGE], PAGE)
    stall = Stall(disk, "pwrite", 16 * PAGE)
    begun = pool.submit(store.write, late)
    stall.wait()
    disk.fail("fdatasync", errno.EIO)
    assert store.write(early).tolist() == [BlockStatus.NO_SPACE] * 2
    disk.heal()
    stall.go()
    assert begun.result(PATIENCE_S).tolist() == [BlockStatus.NO_SPACE] * 2
    assert listed(store) == []
    stats = store.stats()
    assert (stats.sync_errors, stats.write_errors) == (1, 4)
    assert (store.write(early) == BlockStatus.PRESENT).all() and (
        store.write(late) == BlockStatus.PRESENT
    ).all()
    assert listed(store) == [0, PAGE, 8 * PAGE, 16 * PAGE]


def commits_give(store: SsdStore, monkeypatch: pytest.MonkeyPatch, outcome: Outcome) -> None:
    """Make the index write nothing, with this outcome."""
    monkeypatch.setattr(store._index, "commit", lambda *_: outcome)


def test_an_index_that_refuses(store, disk, monkeypatch):
    """Old entries that cannot be forgotten keep their slots from being written."""
    old, new = blocks_of([0], PAGE, seed=1), blocks_of([0], PAGE, seed=2)
    store.write(old)
    written = disk.count("pwrite")
    commits_give(store, monkeypatch, Outcome(0, got_through=False, failed=True))
    assert store.write(new, store.forget([0])).tolist() == [BlockStatus.NO_SPACE]
    assert disk.count("pwrite") == written, "nothing was written over what the index still has"
    assert store.stats().index_errors >= 1
    monkeypatch.undo()
    assert listed(store) == [0] and reads_right(store, old)
    assert store.write(new, store.forget([])).tolist() == [BlockStatus.PRESENT], (
        "what was refused is tried again"
    )
    assert listed(store) == [0] and reads_right(store, new)


@pytest.mark.parametrize("full", [True, False])
def test_an_index_that_takes_a_part(store, monkeypatch, full):
    batch = blocks_of([PAGE * slot for slot in range(5)], PAGE)
    commits_give(store, monkeypatch, Outcome(2, full=full, failed=not full))
    written = [BlockStatus.PRESENT] * 2 + [BlockStatus.NO_SPACE] * 3
    assert store.write(batch).tolist() == written


# ---- what cannot be had at all -----------------------------------------------------------------------


def test_file_systems_without_direct_access(tmp_path, disk):
    disk.fail("open_direct", errno.EINVAL)
    store = SsdStore.open(tmp_path, SIZE, threads=1, disk=disk)
    assert not store.direct and not store.stats().direct
    store.close()
    with pytest.raises(ConfigError, match="O_DIRECT"):
        SsdStore.open(tmp_path, SIZE, direct=True, disk=disk)
    # Some take the flag and refuse the reads.
    disk.fail("pread", errno.EINVAL)
    store = SsdStore.open(tmp_path, SIZE, threads=1, disk=disk)
    assert not store.direct
    disk.heal()
    store.add_table(b"t")
    batch = blocks_of([0], PAGE)
    assert (store.write(batch) == BlockStatus.PRESENT).all() and reads_right(store, batch)
    store.close()
    disk.fail("pread", errno.EINVAL)
    with pytest.raises(ConfigError, match="O_DIRECT"):
        SsdStore.open(tmp_path, SIZE, direct=True, disk=disk)


def test_no_room_at_the_start(tmp_path, disk):
    disk.fail("fallocate", errno.ENOSPC)
    with pytest.raises(SegmentError, match="No space left"):
        SsdStore.open(tmp_path, SIZE, disk=disk)
    disk.fail("open_direct", errno.EACCES)
    with pytest.raises(SegmentError, match="Permission"):
        SsdStore.open(tmp_path, SIZE, disk=disk)
    disk.heal()
    SsdStore.open(tmp_path, SIZE, disk=disk).close()


def test_the_page_cache_is_not_filled(tmp_path, disk):
    """Where there is no direct access, pages are given back: after the sync, and after a read."""
    store = SsdStore.open(tmp_path, SIZE, threads=2, direct=False, disk=disk)
    store.add_table(b"t")
    batch = blocks_of([MIB, 5 * MIB], MIB)
    store.write(batch)
    given = [(at, nbytes) for name, at, nbytes in disk.calls if name == "drop_pages"]
    assert sorted(given) == [(MIB, MIB), (5 * MIB, MIB)]
    names = [name for name, _, _ in disk.calls]
    assert names.index("fdatasync") < names.index("drop_pages")
    disk.calls.clear()
    disk.fail("drop_pages", errno.EINVAL)  # a hint: that it fails is no error
    assert reads_right(store, batch)
    store.close()


# ---- order and company ----------------------------------------------------------------------------------


def test_the_old_entry_is_gone_before_the_first_byte_is_written(store, disk):
    store.write(blocks_of([0, PAGE], PAGE, seed=1))
    seen: list[list[int]] = []

    def before(name: str, at: int) -> None:
        if name == "pwrite":
            seen.append(listed(store))

    disk.before = before
    store.write(blocks_of([0], PAGE, seed=2), store.forget([0]))
    assert seen == [[PAGE]]


def test_the_entry_comes_after_the_sync(store, disk):
    seen: list[list[int]] = []
    disk.before = lambda name, at: seen.append(listed(store)) if name == "fdatasync" else None
    store.write(blocks_of([0], PAGE))
    assert seen == [[]] and listed(store) == [0]


def test_many_writes_share_a_sync(store, disk, pool):
    stall = Stall(disk, "fdatasync")
    first = pool.submit(store.write, blocks_of([0], PAGE))
    stall.wait()
    waiting = threading.Semaphore(0)
    disk.before = lambda name, at: waiting.release() if name == "pwrite" else None
    others = [pool.submit(store.write, blocks_of([PAGE * slot], PAGE)) for slot in range(1, 7)]
    for _ in others:
        assert waiting.acquire(timeout=PATIENCE_S)
    until_ready(store, 6)
    stall.go()
    assert all(
        (future.result(PATIENCE_S) == BlockStatus.PRESENT).all() for future in [first, *others]
    )
    assert disk.count("fdatasync") == 2
    assert listed(store) == [PAGE * slot for slot in range(7)]


def until_ready(store: SsdStore, writes: int) -> None:
    """Wait until so many writes have their bytes written and wait for the committer."""
    committer = store._committer
    until(lambda: len(committer._ready) == writes, "they wait for the committer")


def test_neighbours_are_one_call(tmp_path, disk):
    store = SsdStore.open(tmp_path, 64 * MIB, threads=2, disk=disk)
    store.add_table(b"t")
    nbytes = 64 << 10
    slots = np.random.default_rng(1).permutation(256)  # in any order, from rows in any order
    batch = blocks_of([MIB + nbytes * int(slot) for slot in slots], nbytes)
    disk.calls.clear()
    assert (store.write(batch) == BlockStatus.PRESENT).all()
    assert reads_right(store, batch)
    for name in ("pwrite", "pread"):
        done = sorted((at, size) for call, at, size in disk.calls if call == name)
        assert done == [(MIB + at, 4 * MIB) for at in range(0, 16 * MIB, 4 * MIB)]
    store.close()


def test_a_stalled_write_holds_nobody_else(store, disk, pool):
    there = blocks_of([0, PAGE], PAGE)
    store.write(there)
    stall = Stall(disk, "pwrite", 8 * PAGE)
    held = pool.submit(store.write, blocks_of([8 * PAGE], PAGE))
    stall.wait()
    assert reads_right(store, there)
    assert (store.write(blocks_of([PAGE * 30], PAGE)) == BlockStatus.PRESENT).all()
    assert store.forget([0]) > 0
    closing = pool.submit(store.close)
    assert not held.done() and not closing.done()
    stall.go()
    assert (held.result(PATIENCE_S) == BlockStatus.PRESENT).all()
    closing.result(PATIENCE_S)


def test_a_long_read_lets_short_ones_through(tmp_path, disk, pool):
    """With its workers busy in a long batch, a short one waits for a job or two, not for all."""
    store = SsdStore.open(tmp_path, 64 * MIB, threads=1, disk=disk)
    store.add_table(b"t")
    long, short = blocks_of([MIB * slot for slot in range(32)], MIB), blocks_of([40 * MIB], PAGE)
    store.write(long)
    store.write(short)
    disk.calls.clear()
    stall = Stall(disk, "pread")
    reading = pool.submit(reads_right, store, long)
    stall.wait()
    between = pool.submit(reads_right, store, short)
    while len(store._crew._calls) < 2:
        assert not between.done()
    stall.go()
    assert reading.result(PATIENCE_S) and between.result(PATIENCE_S)
    places = [at for name, at, _ in disk.calls if name == "pread"]
    assert len(places) == 9 and places.index(40 * MIB) <= 2
    store.close()


def test_what_is_forgotten_while_it_is_written_leaves_no_entry(store, disk, pool, tmp_path):
    stall = Stall(disk, "pwrite", 0)
    writing = pool.submit(store.write, blocks_of([0, 2 * PAGE, 4 * PAGE], PAGE))
    stall.wait()
    store.pin([4 * PAGE], 7)
    number = store.forget([2 * PAGE])
    stall.go()
    assert writing.result(PATIENCE_S).tolist() == [BlockStatus.PRESENT] * 3
    entries = np.concatenate(list(store.entries()))
    assert entries["offset"].tolist() == [0, 4 * PAGE]
    assert entries["pin"].tolist() == [0, 7]
    again = blocks_of([2 * PAGE], PAGE, seed=9)
    assert (store.write(again, number) == BlockStatus.PRESENT).all() and reads_right(store, again)


def test_a_slot_that_is_being_written_is_not_given_to_another(store, disk, pool):
    stall = Stall(disk, "pwrite", 0)
    writing = pool.submit(store.write, blocks_of([0], PAGE))
    stall.wait()
    with pytest.raises(AssertionError, match="twice"):
        store.write(blocks_of([PAGE, 0], PAGE, seed=2))
    stall.go()
    assert (writing.result(PATIENCE_S) == BlockStatus.PRESENT).all()
    assert listed(store) == [0]


def test_forget_then_close_is_durable(tmp_path):
    store = SsdStore.open(tmp_path, SIZE, threads=1)
    store.add_table(b"t")
    store.write(blocks_of([0, PAGE], PAGE))
    store.forget([0])
    store.pin([PAGE], 2)
    store.close()
    store = SsdStore.open(tmp_path, SIZE, threads=1)
    entries = np.concatenate(list(store.entries()))
    assert (entries["offset"].tolist(), entries["pin"].tolist()) == ([PAGE], [2])
    store.close()


def test_a_scrub_pauses_and_finds(store, disk, tmp_path):
    batch = blocks_of([MIB * slot for slot in range(8)], MIB)
    store.write(batch)
    with (tmp_path / "segment").open("r+b") as file:
        file.seek(3 * MIB + 5)
        file.write(bytes([batch.source[3, 5] ^ 1]))
    pauses: list[int] = []
    check = ReadBatch(batch.nbytes, batch.offsets, batch.checksums)
    statuses = store.scrub(check, lambda: pauses.append(disk.count("pread")))
    assert (
        statuses.tolist()
        == [BlockStatus.PRESENT] * 3 + [BlockStatus.MISMATCH] + [BlockStatus.PRESENT] * 4
    )
    assert len(pauses) > 0 and pauses == sorted(set(pauses)), "a pause between any two requests"

    def enough() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        store.scrub(check, enough)
    assert store.stats().mismatches == 1


def test_a_worker_that_breaks_breaks_its_call(store, disk, monkeypatch):
    broken: list[object] = []
    monkeypatch.setattr(threading, "excepthook", broken.append)
    disk.before = lambda name, at: (_ for _ in ()).throw(ValueError("a bug"))
    with pytest.raises(AssertionError, match="a worker"):
        store.read(ReadBatch(PAGE, np.zeros(1, np.uint64), np.zeros((1, 16), np.uint8)))
    until(lambda: broken, "the worker ends, which nobody else is to hear of")
    disk.heal()
    assert (store.write(blocks_of([0], PAGE)) == BlockStatus.PRESENT).all(), "one worker is left"

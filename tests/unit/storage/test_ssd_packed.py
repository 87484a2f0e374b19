"""Blocks that a codec has made smaller in an SSD store: slots, entries, and what rot does to them."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.errors import InvalidRequest
from kvpool.storage.codecs import BLOSC2, Blosc2
from kvpool.storage.ssd.files import LinuxDisk, staging
from kvpool.storage.ssd.pack import SAMPLE_BYTES, pack
from kvpool.storage.ssd.store import ENTRY, STAGING_BYTES, ReadBatch, SsdStore, WriteBatch
from kvpool.types import BlockStatus

pytest.importorskip("blosc2")
KIB, MIB = 1 << 10, 1 << 20
SIZE = 16 * MIB
PAGE = 4096


def kv(nbytes: int, seed: int, item_bytes: int = 2) -> np.ndarray:
    """Normal values around zero, each channel with a scale of its own: bf16, or float32."""
    dice = np.random.default_rng(seed)
    n = -(-nbytes // (128 * item_bytes))
    values = (dice.standard_normal((n, 128)) * np.exp(dice.normal(0, 1, 128))).astype("<f4")
    if item_bytes == 2:
        return (values.view("<u4") >> 16).astype("<u2").view(np.uint8).reshape(-1)[:nbytes]
    return (values.view("<u4") & 0xFFFF8000).view(np.uint8).reshape(-1)[:nbytes]


def noise(nbytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def flat(nbytes: int, seed: int) -> np.ndarray:
    return np.full(nbytes, seed % 256, np.uint8)


KINDS = {"kv": kv, "noise": noise, "flat": flat}


def rows16(values: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(values), np.uint8).reshape(-1, 16)


def length_of(stored: int, nbytes: int) -> int:
    """Of a slot, by the words of the docs: so many eighths of the block, in whole pages."""
    eighths = (math.ceil(k * nbytes / 8 / PAGE) * PAGE for k in range(1, 9))
    return min(length for length in eighths if length >= stored)


class Held:
    """Blocks of one size in a store, packed as far as that is worth it, one behind the other."""

    def __init__(self, store: SsdStore, blocks: np.ndarray, at: int = 0) -> None:
        self.store = store
        self.blocks = blocks
        self.nbytes = blocks.shape[1]
        n = len(blocks)
        self.sums = rows16([xxhash.xxh3_128_digest(block.tobytes()) for block in blocks])
        packed = pack(blocks, np.arange(n), self.nbytes)
        self.stored = packed.stored.astype(np.int64)
        whole = self.stored == self.nbytes
        lengths = [length_of(int(stored), self.nbytes) for stored in self.stored]
        self.lengths = np.array(lengths, np.int64)
        self.offsets = (at + np.cumsum([0, *lengths])[:-1]).astype(np.uint64)
        self.end = at + int(self.lengths.sum())
        table = store.add_table(b"t")
        for some in (whole, ~whole):
            chosen = np.flatnonzero(some)[::-1]
            if not len(chosen):
                continue
            batch = WriteBatch(
                table=table,
                nbytes=self.nbytes,
                offsets=self.offsets[chosen],
                keys=self.sums[chosen],
                parents=self.sums[chosen],
                depths=np.zeros(len(chosen), np.uint32),
                pins=np.zeros(len(chosen), np.uint8),
                checksums=self.sums[chosen],
                source=blocks if some is whole else packed.rows,
                rows=chosen,
                stored=None if some is whole else packed.stored[chosen],
                codec=0 if some is whole else BLOSC2,
            )
            assert store.write(batch).tolist() == [BlockStatus.PRESENT] * len(chosen)

    def read(self, store: SsdStore | None = None) -> tuple[list[int], np.ndarray]:
        n = len(self.blocks)
        out = np.full((n + 1, self.nbytes + 64), 0xEE, np.uint8)
        rows = np.arange(n)[::-1].copy()
        statuses = (store or self.store).read(self._batch(out, rows))
        assert (out[n] == 0xEE).all() and (out[:, self.nbytes :] == 0xEE).all()
        return statuses.tolist(), out[rows, : self.nbytes]

    def _batch(self, out: np.ndarray | None, rows: np.ndarray | None) -> ReadBatch:
        return ReadBatch(self.nbytes, self.offsets, self.sums, out, rows, self.lengths, Blosc2())

    def scrub(self) -> list[int]:
        return self.store.scrub(self._batch(None, None), lambda: None).tolist()

    def check_right(self, store: SsdStore | None = None) -> None:
        statuses, found = self.read(store)
        assert statuses == [BlockStatus.PRESENT] * len(self.blocks)
        assert (found == self.blocks).all()


def opened(folder: Path, **options: Any) -> SsdStore:
    return SsdStore.open(folder, SIZE, threads=2, **options)


@pytest.fixture
def store(tmp_path):
    one = opened(tmp_path)
    yield one
    one.close()


# ---- round trips ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    one = opened(tmp_path_factory.mktemp("store"))
    yield one
    one.close()


@settings(max_examples=60, deadline=None)
@given(
    nbytes=st.one_of(
        st.integers(1, 40_000), st.sampled_from([1, 4096, 4097, 8192, 65536, 100_000])
    ),
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=6),
    seed=st.integers(0, 1 << 30),
)
def test_what_goes_in_comes_out(shared, nbytes, kinds, seed):
    blocks = np.stack([KINDS[kind](nbytes, seed + n) for n, kind in enumerate(kinds)])
    shared.forget([int(offset) for entries in shared.entries() for offset in entries["offset"]])
    held = Held(shared, blocks)
    held.check_right()
    assert held.scrub() == [BlockStatus.PRESENT] * len(blocks)
    for kind, stored in zip(kinds, held.stored.tolist(), strict=True):
        if kind == "noise" or nbytes <= PAGE:
            assert stored == nbytes
        elif kind == "flat" and nbytes >= 4 * PAGE:
            assert stored < nbytes / 4


def test_the_index_knows_what_lies_where(tmp_path):
    store = opened(tmp_path)
    held = Held(store, np.stack([kv(64 * KIB, 1), noise(64 * KIB, 2), flat(64 * KIB, 3)]))
    assert held.lengths.tolist() == [48 * KIB, 64 * KIB, 8 * KIB]
    stats = store.stats()
    assert (stats.blocks_written, stats.bytes_written) == (3, int(held.stored.sum()))
    held.check_right()
    assert store.stats().bytes_read == int(held.lengths.sum())
    store.close()
    store = opened(tmp_path)
    entries = np.concatenate([np.zeros(0, ENTRY), *store.entries()])
    assert entries["offset"].tolist() == held.offsets.tolist()
    assert entries["stored"].tolist() == held.stored.tolist()
    assert entries["codec"].tolist() == [BLOSC2, 0, BLOSC2]
    assert entries["nbytes"].tolist() == [64 * KIB] * 3
    held.check_right(store)
    store.close()


@pytest.mark.parametrize("direct", ["auto", False])
@pytest.mark.parametrize("nbytes", [MIB, STAGING_BYTES + 12_345, 2 * STAGING_BYTES + 8192])
def test_blocks_about_as_large_as_a_staging_buffer_and_larger(tmp_path, nbytes, direct):
    store = SsdStore.open(tmp_path, 64 * MIB, threads=3, direct=direct)
    held = Held(store, np.stack([kv(nbytes, 1), noise(nbytes, 2), kv(nbytes, 3)]))
    assert (held.stored < nbytes).tolist() == [True, False, True]
    held.check_right()
    assert held.scrub() == [BlockStatus.PRESENT] * 3
    store.close()


def test_many_threads_read_and_write_at_a_time(tmp_path):
    store = SsdStore.open(tmp_path, 64 * MIB, threads=8)
    held = Held(store, np.stack([kv(100_000, seed) for seed in range(200)]))
    held.check_right()
    store.close()


def test_the_end_of_a_slot_holds_nothing_of_other_blocks(tmp_path):
    store = SsdStore.open(tmp_path, SIZE, threads=1)  # one staging buffer, used twice
    first = Held(store, np.stack([noise(64 * KIB, seed) for seed in range(32)]))
    held = Held(store, kv(64 * KIB, 1)[None], at=first.end)
    with (tmp_path / "segment").open("rb") as file:
        file.seek(first.end + int(held.stored[0]))
        assert not any(file.read(int(held.lengths[0] - held.stored[0])))
    store.close()


# ---- packing --------------------------------------------------------------------------------------------


def test_packing_touches_nothing_and_finds_the_size_of_the_elements():
    source = np.stack([kv(SAMPLE_BYTES, seed) for seed in range(4)])
    before = source.copy()
    packed = pack(source, np.array([3, 1]), SAMPLE_BYTES)
    assert (source == before).all() and len(packed.stored) == 2
    for row, (data, stored) in zip((3, 1), zip(*packed, strict=True), strict=True):
        out = np.empty(SAMPLE_BYTES, np.uint8)
        assert Blosc2().decode(data[:stored], out) and (out == source[row]).all()
    for item_bytes in (2, 4):
        some = np.stack([kv(256 * KIB, seed, item_bytes) for seed in range(2)])
        best = Blosc2(item_bytes).encode(some[1], np.empty_like(some[1])).stored
        assert int(pack(some, np.arange(2), 256 * KIB).stored[1]) == best
    wide = np.zeros((2, 3 * PAGE), np.uint8)
    wide[:, : 2 * PAGE] = kv(4 * PAGE, 1).reshape(2, -1)
    assert (pack(wide, np.arange(2), 2 * PAGE).rows.shape) == (2, 2 * PAGE)


def segment_of(store: SsdStore) -> Any:
    """The file of the slots."""
    return store._segment


def slot_of(store: SsdStore, at: int, nbytes: int) -> np.ndarray:
    memory = staging(nbytes, huge=False)
    segment_of(store).read(at, memory)
    return memory


# ---- rot ------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_rot_is_a_mismatch_and_never_a_crash(shared, data):
    """Anything may stand in a slot, behind a right check of the codec too."""
    shared.forget([int(offset) for entries in shared.entries() for offset in entries["offset"]])
    held = Held(shared, np.stack([kv(32 * KIB, 1), kv(32 * KIB, 2)]))
    stored, length = int(held.stored[0]), int(held.lengths[0])
    slot = slot_of(shared, 0, length)
    how = data.draw(st.sampled_from(["flip", "behind", "noise", "zero", "other", "forged"]))
    wrong: bool | None = True
    if how == "flip":
        bit = data.draw(st.integers(0, stored * 8 - 1))
        slot[bit // 8] ^= 1 << bit % 8
    elif how == "behind":
        slot[data.draw(st.integers(stored, length - 1))] ^= 1
        wrong = False
    elif how == "noise":
        slot[:] = noise(length, data.draw(st.integers(0, 99)))
    elif how == "zero":
        slot[:] = 0
    elif how == "other":
        slot[:] = slot_of(shared, int(held.offsets[1]), length)
    else:  # sizes that lie, behind a check that is right
        at = data.draw(st.sampled_from([4, 8, 12]))
        slot[8 + at : 12 + at].view("<u4")[0] = data.draw(st.integers(0, 2**32 - 1))
        said = 8 + int(slot[20:24].view("<u4")[0])
        end = said if said <= length else stored
        check = xxhash.xxh3_64_intdigest(slot[8:end].tobytes())
        slot[:8] = np.frombuffer(check.to_bytes(8, "little"), np.uint8)
        wrong = None
    segment_of(shared).write(0, slot)
    statuses, found = held.read()
    assert (
        statuses[0] in {BlockStatus.PRESENT, BlockStatus.MISMATCH}
        and statuses[1] == BlockStatus.PRESENT
    )
    assert wrong is None or (statuses[0] == BlockStatus.MISMATCH) == wrong
    for at in (0, 1):
        assert statuses[at] == BlockStatus.MISMATCH or (found[at] == held.blocks[at]).all()
    assert held.scrub() == statuses


def test_a_thousand_flipped_bits(tmp_path):
    """Each flipped block reads as a mismatch, and only these; no wrong byte counts as read."""
    store = opened(tmp_path, direct=False)
    nbytes, n = 20_000, 300
    blocks = np.stack([(noise if seed % 4 == 0 else kv)(nbytes, seed) for seed in range(n)])
    held = Held(store, blocks)
    dice = np.random.default_rng(5)
    flips = dice.choice(held.end * 8, 1000, replace=False)
    fd = os.open(tmp_path / "segment", os.O_RDWR)
    for bit in flips.tolist():
        byte = os.pread(fd, 1, bit // 8)[0]
        os.pwrite(fd, bytes([byte ^ 1 << bit % 8]), bit // 8)
    os.close(fd)
    slots = np.searchsorted(held.offsets, flips // 8, side="right") - 1
    inside = flips // 8 - held.offsets[slots].astype(np.int64) < held.stored[slots]
    hurt = set(slots[inside].tolist())
    statuses, found = held.read()
    assert statuses == [
        BlockStatus.MISMATCH if slot in hurt else BlockStatus.PRESENT for slot in range(n)
    ]
    whole = [slot for slot in range(n) if slot not in hurt]
    assert whole and (found[whole] == blocks[whole]).all()
    assert store.stats().mismatches == len(hurt) > 200
    assert any(held.stored[slot] < nbytes for slot in hurt)
    assert held.scrub() == statuses
    store.close()


# ---- errors ---------------------------------------------------------------------------------------------


class FailingDisk(LinuxDisk):
    """Reads of what lies from `bad` on fail."""

    bad = 1 << 60

    def pread(self, fd: int, into: np.ndarray, at: int) -> int:
        if at + into.size > self.bad:
            raise OSError(errno.EIO, "a bad sector")
        return super().pread(fd, into, at)


@pytest.mark.parametrize("nbytes", [64 * KIB, 2 * STAGING_BYTES])
def test_a_read_that_fails(tmp_path, nbytes):
    disk = FailingDisk()
    store = SsdStore.open(tmp_path, 64 * MIB, threads=2, disk=disk)
    held = Held(store, np.stack([kv(nbytes, 1), kv(nbytes, 2)]))
    disk.bad = held.end - PAGE
    statuses, found = held.read()
    # Small neighbours are one request.
    assert statuses[1] == BlockStatus.FAILED and store.stats().mismatches == 0
    assert statuses[0] == BlockStatus.FAILED or (found[0] == held.blocks[0]).all()
    disk.bad = 1 << 60
    held.check_right()
    store.close()


@pytest.mark.parametrize(
    "lengths",
    [[0], [PAGE + 1], [3 * PAGE], [PAGE, PAGE], []],
    ids=["0", "odd", "long", "2", "none"],
)
def test_lengths_that_cannot_be(store, lengths):
    sums = np.zeros((1, 16), np.uint8)
    with pytest.raises(InvalidRequest, match="lengths"):
        store.read(
            ReadBatch(
                2 * PAGE,
                np.zeros(1, np.uint64),
                sums,
                lengths=np.array(lengths, np.int64),
                codec=Blosc2(),
            )
        )


def test_a_packed_slot_ends_within_the_segment(store):
    """A shorter one may lie where a whole one would not fit."""
    last = store.segment_bytes - PAGE
    sums = np.zeros((1, 16), np.uint8)

    def read(offset: int) -> Any:
        offsets = np.array([offset], np.uint64)
        return store.read(
            ReadBatch(2 * PAGE, offsets, sums, lengths=np.array([PAGE]), codec=Blosc2())
        ).tolist()

    assert read(last) == [BlockStatus.MISMATCH]
    with pytest.raises(InvalidRequest, match="within"):
        read(last + PAGE)


@pytest.mark.parametrize(("stored", "nbytes"), [(0, 64 * KIB), (57 * KIB, 64 * KIB), (9, PAGE)])
def test_what_no_shorter_slot_holds_is_not_written_as_packed(store, stored, nbytes):
    table, zeros = store.add_table(b"t"), np.zeros((1, 16), np.uint8)
    batch = WriteBatch(
        table=table,
        nbytes=nbytes,
        offsets=np.zeros(1, np.uint64),
        keys=zeros,
        parents=zeros,
        depths=np.zeros(1, np.uint32),
        pins=np.zeros(1, np.uint8),
        checksums=zeros,
        source=np.zeros((1, nbytes), np.uint8),
        rows=np.zeros(1, np.int64),
        stored=np.array([stored], np.uint32),
        codec=BLOSC2,
    )
    with pytest.raises(InvalidRequest, match="shorter"):
        store.write(batch)

"""The SSD store against plain dictionaries, on a real directory."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpool.errors import (
    AlreadyRunning,
    ConfigError,
    InvalidRequest,
    LimitExceeded,
    SegmentError,
    Unavailable,
)
from kvpool.storage.ssd.store import (
    ENTRY,
    STAGING_BYTES,
    ReadBatch,
    SsdStore,
    WriteBatch,
    slot_bytes,
)
from kvpool.types import BlockStatus

KIB, MIB = 1 << 10, 1 << 20
SIZE = 8 * MIB
PAGE = 4096


def digest(data: np.ndarray) -> bytes:
    return xxhash.xxh3_128_digest(data.tobytes())


def rows16(values: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(values), np.uint8).reshape(-1, 16)


def batch_of(
    table: int,
    offsets: list[int],
    blocks: np.ndarray,
    *,
    rows: list[int] | None = None,
    **fields: Any,
) -> WriteBatch:
    """Blocks that lie in `blocks`, in order or in `rows` of it."""
    n = len(offsets)
    numbers = np.arange(n) if rows is None else np.array(rows, np.int64)
    nbytes = fields.pop("nbytes", blocks.shape[1])
    defaults: dict[str, Any] = {
        "keys": rows16([offset.to_bytes(16, "big") for offset in offsets]),
        "parents": np.zeros((n, 16), np.uint8),
        "depths": np.zeros(n, np.uint32),
        "pins": np.zeros(n, np.uint8),
    }
    if "checksums" not in fields:
        defaults["checksums"] = rows16([digest(blocks[row, :nbytes]) for row in numbers])
    return WriteBatch(
        table=table,
        nbytes=nbytes,
        offsets=np.array(offsets, np.uint64),
        source=blocks,
        rows=numbers,
        **defaults | fields,
    )


def read_back(
    store: SsdStore, batch: WriteBatch, width: int | None = None
) -> tuple[Any, np.ndarray]:
    """Statuses, and rows in reverse order, made straight again."""
    n = len(batch.offsets)
    out = np.full((n + 1, width or batch.nbytes), 0xEE, np.uint8)
    rows = np.arange(n)[::-1].copy()
    statuses = store.read(ReadBatch(batch.nbytes, batch.offsets, batch.checksums, out, rows))
    assert (out[n] == 0xEE).all()
    assert (out[:, batch.nbytes :] == 0xEE).all()
    return statuses.tolist(), out[rows, : batch.nbytes]


def all_entries(store: SsdStore, chunk: int = 1000) -> np.ndarray:
    return np.concatenate([np.zeros(0, ENTRY), *store.entries(chunk)])


def random_blocks(n: int, nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, nbytes), np.uint8)


@pytest.fixture
def store(tmp_path):
    opened = SsdStore.open(tmp_path / "ssd", SIZE, threads=2)
    yield opened
    opened.close()


class Machine(RuleBasedStateMachine):
    """Slots of 16 KiB that hold blocks of any size up to that; the oracle is a dictionary."""

    SLOT = 16 * KIB
    SLOTS = 40

    @initialize(direct=st.booleans())
    def start(self, direct: bool) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvpool-test-"))
        self.direct = "auto" if direct else False
        self.store = SsdStore.open(self.folder, SIZE, direct=self.direct, threads=2)
        self.held: dict[int, dict[str, Any]] = {}
        self.tables = {self.store.add_table(b"first"): b"first"}
        self.ids = set(self.tables)
        self.writes = 0

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)

    @rule(record=st.binary(max_size=300))
    def add_table(self, record: bytes) -> None:
        known = {old: table for table, old in self.tables.items()}.get(record)
        table = self.store.add_table(record)
        if known is None:
            assert table not in self.ids, "an id was used twice"
            self.ids.add(table)
            self.tables[table] = record
        else:
            assert table == known

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def drop_table(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(sorted(self.tables)))
        gone = [offset for offset, block in self.held.items() if block["table"] == table]
        self.store.forget(gone)
        self.store.drop_tables([table])
        del self.tables[table]
        for offset in gone:
            del self.held[offset]

    @precondition(lambda self: self.tables)
    @rule(
        data=st.data(),
        slots=st.sets(st.integers(0, SLOTS - 1), min_size=1, max_size=12),
        nbytes=st.sampled_from([1, 100, 4095, 4096, 5000, 12 * KIB, 16 * KIB]),
        pin=st.integers(0, 3),
        seed=st.integers(0, 1 << 30),
    )
    def write(self, data: Any, slots: set[int], nbytes: int, pin: int, seed: int) -> None:
        table = data.draw(st.sampled_from(sorted(self.tables)))
        offsets = [slot * self.SLOT for slot in slots]
        blocks = random_blocks(len(slots), nbytes, seed)
        n, dice = len(slots), np.random.default_rng(seed)
        batch = batch_of(
            table,
            offsets,
            blocks,
            keys=dice.integers(0, 256, (n, 16), np.uint8),
            parents=dice.integers(0, 256, (n, 16), np.uint8),
            depths=dice.integers(0, 1 << 32, n, np.uint32),
            pins=np.full(n, pin, np.uint8),
        )
        after = self.store.forget([offset for offset in offsets if offset in self.held])
        assert self.store.write(batch, after).tolist() == [BlockStatus.PRESENT] * n
        self.writes += 1
        for at, offset in enumerate(offsets):
            self.held[offset] = {
                "key": batch.keys[at].tobytes(),
                "parent": batch.parents[at].tobytes(),
                "checksum": batch.checksums[at].tobytes(),
                "depth": int(batch.depths[at]),
                "pin": pin,
                "table": table,
                "nbytes": nbytes,
                "bytes": blocks[at].tobytes(),
                "order": self.writes,
            }

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        offsets = data.draw(st.lists(st.integers(0, self.SLOTS - 1), unique=True, max_size=8))
        self.store.forget(np.array([slot * self.SLOT for slot in offsets], np.uint64))
        for slot in offsets:
            self.held.pop(slot * self.SLOT, None)

    @rule(data=st.data(), level=st.integers(0, 255))
    def pin(self, data: st.DataObject, level: int) -> None:
        slots = data.draw(st.lists(st.integers(0, self.SLOTS - 1), unique=True, max_size=8))
        self.store.pin([slot * self.SLOT for slot in slots], level)
        for slot in slots:
            if slot * self.SLOT in self.held:
                self.held[slot * self.SLOT]["pin"] = level

    @rule(chunk=st.sampled_from([1, 3, 10, 50]))
    def reopen(self, chunk: int) -> None:
        self.store.close()
        self.store = SsdStore.open(self.folder, SIZE, direct=self.direct, threads=2)
        entries = all_entries(self.store, chunk)
        assert entries["offset"].tolist() == sorted(self.held)
        for entry in entries:
            want = self.held[int(entry["offset"])]
            for name in ("key", "parent", "checksum"):
                assert entry[name].tobytes() == want[name]
            for name in ("depth", "pin", "table", "nbytes"):
                assert entry[name] == want[name]
            assert entry["stored"] == want["nbytes"] and entry["codec"] == 0
        by_generation = entries[np.argsort(entries["generation"])]["offset"].tolist()
        orders = [self.held[offset]["order"] for offset in by_generation]
        assert orders == sorted(orders)
        assert len(np.unique(entries["generation"])) == len(entries)
        assert self.store.tables() == self.tables

    @invariant()
    def reads(self) -> None:
        by_size: dict[int, list[int]] = {}
        for offset, block in getattr(self, "held", {}).items():
            by_size.setdefault(block["nbytes"], []).append(offset)
        for nbytes, offsets in by_size.items():
            out = np.zeros((len(offsets), nbytes), np.uint8)
            sums = rows16([self.held[offset]["checksum"] for offset in offsets])
            batch = ReadBatch(nbytes, np.array(offsets, np.uint64), sums, out, np.arange(len(out)))
            assert self.store.read(batch).tolist() == [BlockStatus.PRESENT] * len(offsets)
            assert [row.tobytes() for row in out] == [self.held[at]["bytes"] for at in offsets]


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=25, stateful_step_count=15, deadline=None)


# ---- bytes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", ["auto", False])
@pytest.mark.parametrize("nbytes", [1, 4096, 5000, 64 * KIB, 100_000, MIB, STAGING_BYTES + 5000])
@pytest.mark.parametrize("width", ["block", "slot", "wider"])
def test_any_size_in_rows_of_any_width(tmp_path, nbytes, width, direct):
    columns = {"block": nbytes, "slot": slot_bytes(nbytes), "wider": slot_bytes(nbytes) + 64}[width]
    store = SsdStore.open(tmp_path, 40 * MIB, threads=3, direct=direct)
    table = store.add_table(b"t")
    stride = slot_bytes(nbytes)
    offsets = [stride * slot for slot in (3, 0, 1, 5)]
    blocks = random_blocks(6, columns)
    batch = batch_of(table, offsets, blocks, rows=[4, 0, 5, 2], nbytes=nbytes)
    assert store.write(batch).tolist() == [BlockStatus.PRESENT] * 4
    statuses, found = read_back(store, batch, columns)
    assert statuses == [BlockStatus.PRESENT] * 4
    assert (found == blocks[[4, 0, 5, 2], :nbytes]).all()
    stats = store.stats()
    assert (stats.blocks_written, stats.bytes_written) == (4, 4 * nbytes)
    assert (stats.blocks_read, stats.bytes_read) == (4, 4 * nbytes)
    store.close()


def test_rows_of_a_table_that_is_a_view(store):
    """A class of slots seen through a wider table: its rows are not contiguous."""
    table = store.add_table(b"t")
    wide = random_blocks(8, 3 * PAGE)
    batch = batch_of(table, [0, PAGE], wide[:, PAGE : 2 * PAGE], rows=[6, 1])
    assert store.write(batch).tolist() == [BlockStatus.PRESENT] * 2
    out = np.zeros_like(wide)
    view = out[:, PAGE : 2 * PAGE]
    read = ReadBatch(PAGE, batch.offsets, batch.checksums, view, np.array([2, 7]))
    assert store.read(read).tolist() == [BlockStatus.PRESENT] * 2
    assert (view[[2, 7]] == wide[[6, 1], PAGE : 2 * PAGE]).all()
    assert not out[:, :PAGE].any() and not out[:, 2 * PAGE :].any()


def test_the_end_of_a_slot_holds_nothing_of_other_blocks(tmp_path):
    store = SsdStore.open(tmp_path, SIZE, threads=1)  # one staging buffer, used twice
    table = store.add_table(b"t")
    store.write(batch_of(table, [PAGE * n for n in range(64)], np.full((64, PAGE), 0xAB, np.uint8)))
    store.write(batch_of(table, [PAGE * 100], np.full((1, 10), 0xCD, np.uint8)))
    with (tmp_path / "segment").open("rb") as file:
        file.seek(PAGE * 100)
        assert file.read(PAGE) == b"\xcd" * 10 + bytes(PAGE - 10)
    store.close()


def test_a_thousand_flipped_bits(tmp_path):
    """Each flipped block reads as a mismatch, and only these; no wrong byte counts as read."""
    store = SsdStore.open(tmp_path, SIZE, direct=False, threads=2)
    table = store.add_table(b"t")
    nbytes, n = 5000, 600
    offsets = [slot_bytes(nbytes) * slot for slot in range(n)]
    blocks = random_blocks(n, nbytes)
    batch = batch_of(table, offsets, blocks)
    assert (store.write(batch) == BlockStatus.PRESENT).all()
    dice = np.random.default_rng(5)
    flips = dice.choice(n * slot_bytes(nbytes) * 8, 1000, replace=False).tolist()
    fd = os.open(tmp_path / "segment", os.O_RDWR)
    for bit in flips:
        byte = os.pread(fd, 1, bit // 8)[0]
        os.pwrite(fd, bytes([byte ^ 1 << bit % 8]), bit // 8)
    os.close(fd)
    hurt = {
        bit // 8 // slot_bytes(nbytes) for bit in flips if bit // 8 % slot_bytes(nbytes) < nbytes
    }
    statuses, found = read_back(store, batch)
    assert statuses == [
        BlockStatus.MISMATCH if slot in hurt else BlockStatus.PRESENT for slot in range(n)
    ]
    whole = [slot for slot in range(n) if slot not in hurt]
    assert whole and (found[whole] == blocks[whole]).all()
    assert store.stats().mismatches == len(hurt) > 200
    scrubbed = store.scrub(ReadBatch(nbytes, batch.offsets, batch.checksums), lambda: None)
    assert scrubbed.tolist() == statuses
    store.close()


# ---- the directory --------------------------------------------------------------------------------------


def test_one_process_at_a_time(store, tmp_path):
    with pytest.raises(AlreadyRunning, match="another process"):
        SsdStore.open(tmp_path / "ssd", SIZE)
    store.close()
    SsdStore.open(tmp_path / "ssd", SIZE).close()


@pytest.mark.parametrize("size", [4 * MIB, 33 * MIB + 12345, 200 * MIB])
def test_the_disk_space_stays_within_the_size(tmp_path, size):
    """Also when slots are written far apart, which splits the file into the most pieces."""
    store = SsdStore.open(tmp_path, size, threads=2)
    table = store.add_table(b"x" * 60_000)
    every_other = range(0, store.segment_bytes - PAGE, 2 * PAGE)
    offsets = list(every_other)[: min(store.entries_max, 20_000)]
    source = random_blocks(1, PAGE)
    batch = batch_of(table, offsets, source, rows=[0] * len(offsets))
    assert (store.write(batch) == BlockStatus.PRESENT).all()
    store.close()
    places = [tmp_path, *tmp_path.rglob("*")]
    assert sum(place.stat().st_blocks * 512 for place in places) <= size
    assert store.segment_bytes > size - size // 16 - 2 * MIB


def test_wrong_sizes_and_settings(tmp_path):
    with pytest.raises(ConfigError, match="at least"):
        SsdStore.open(tmp_path, MIB)
    with pytest.raises(ConfigError, match="threads"):
        SsdStore.open(tmp_path, SIZE, threads=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(SegmentError):
        SsdStore.open(tmp_path / "file", SIZE)


def test_a_store_that_grows_and_shrinks(tmp_path):
    nbytes = 64 * KIB
    store = SsdStore.open(tmp_path, 32 * MIB, threads=2)
    store_id = store.store_id
    table = store.add_table(b"t")
    n = store.segment_bytes // nbytes
    blocks = random_blocks(n, nbytes)
    assert (
        store.write(batch_of(table, [nbytes * at for at in range(n)], blocks))
        == BlockStatus.PRESENT
    ).all()
    last = int(all_entries(store)["generation"].max())
    store.close()
    for size in (16 * MIB, 64 * MIB, 20 * MIB):
        kept = range(min(n, SsdStore_segment_bytes(tmp_path, size) // nbytes))
        store = SsdStore.open(tmp_path, size, threads=2)
        n = len(kept)
        assert all_entries(store)["offset"].tolist() == [nbytes * at for at in kept]
        batch = batch_of(table, [nbytes * at for at in kept], blocks[:n])
        statuses, found = read_back(store, batch)
        assert statuses == [BlockStatus.PRESENT] * n and (found == blocks[:n]).all()
        assert store.store_id == store_id
        assert store.tables() == {table: b"t"} and not store.stats().index_lost
        again = batch_of(table, [0], blocks[:1])
        store.write(again, store.forget([0]))
        assert all_entries(store)["generation"].max() > last, "the count of writes goes on"
        last = int(all_entries(store)["generation"].max())
        store.close()
        assert sum(place.stat().st_blocks * 512 for place in tmp_path.rglob("*")) <= size


def SsdStore_segment_bytes(folder: Path, size: int) -> int:  # noqa: N802
    """What a store of that size would have, asked of another one."""
    other = SsdStore.open(folder / "other", size, threads=1)
    other.close()
    shutil.rmtree(folder / "other")
    return other.segment_bytes


def test_a_segment_that_is_gone_takes_its_index_along(store, tmp_path):
    table = store.add_table(b"t")
    store.write(batch_of(table, [0], random_blocks(1, PAGE)))
    store.close()
    (tmp_path / "ssd" / "segment").unlink()
    opened = SsdStore.open(tmp_path / "ssd", SIZE, threads=1)
    assert len(all_entries(opened)) == 0
    opened.close()


# ---- limits and misuse ----------------------------------------------------------------------------------


def test_no_more_entries_than_the_index_is_made_for(tmp_path):
    store = SsdStore.open(tmp_path, 64 * MIB, threads=2)
    table = store.add_table(b"t")
    n = store.entries_max + 10
    assert n * PAGE < store.segment_bytes
    source = random_blocks(1, PAGE)
    offsets = [PAGE * slot for slot in range(n)]
    half = n // 2
    first = batch_of(table, offsets[:half], source, rows=[0] * half)
    second = batch_of(table, offsets[half:], source, rows=[0] * (n - half))
    assert (store.write(first) == BlockStatus.PRESENT).all()
    assert (
        store.write(second).tolist()
        == [BlockStatus.PRESENT] * (n - half - 10) + [BlockStatus.NO_SPACE] * 10
    )
    assert store.stats().write_errors == 10
    assert len(all_entries(store)) == store.entries_max
    late = batch_of(table, offsets[-10:], source, rows=[0] * 10)
    assert (store.write(late, store.forget(offsets[:10])) == BlockStatus.PRESENT).all()
    stored = offsets[10 : half + (n - half - 10)] + offsets[-10:]
    assert all_entries(store)["offset"].tolist() == stored
    store.close()


def test_batches_that_would_touch_strangers_bytes(store):
    table = store.add_table(b"t")
    end = store.segment_bytes
    blocks = random_blocks(2, PAGE)
    for offsets in ([1], [end], [end - PAGE + 1]):
        with pytest.raises(InvalidRequest, match="multiples"):
            store.write(batch_of(table, offsets, blocks))
    with pytest.raises(InvalidRequest, match="multiples"):
        store.write(batch_of(table, [end - PAGE], random_blocks(1, PAGE + 1)))
    with pytest.raises(InvalidRequest, match="row numbers"):
        store.write(batch_of(table, [0], blocks, rows=[2], checksums=np.zeros((1, 16), np.uint8)))
    with pytest.raises(InvalidRequest, match="as many row"):
        store.write(
            batch_of(table, [0, PAGE], blocks, rows=[0], checksums=np.zeros((2, 16), np.uint8))
        )
    with pytest.raises(InvalidRequest, match="no table"):
        store.write(batch_of(table + 1, [0], blocks))
    read = ReadBatch(
        PAGE + 1, np.zeros(1, np.uint64), np.zeros((1, 16), np.uint8), blocks, np.zeros(1, np.int64)
    )
    with pytest.raises(InvalidRequest, match="do not fit rows of"):
        store.read(read)
    with pytest.raises(InvalidRequest, match="pin level"):
        store.pin([0], 256)
    assert store.stats().entries == 0
    assert (
        store.write(
            batch_of(
                table,
                [],
                blocks,
                checksums=np.zeros((0, 16), np.uint8),
                keys=np.zeros((0, 16), np.uint8),
            )
        ).tolist()
        == []
    )


def test_a_slot_twice_in_one_batch(store):
    table = store.add_table(b"t")
    with pytest.raises(AssertionError, match="twice"):
        store.write(batch_of(table, [0, 0], random_blocks(2, PAGE)))
    assert (store.write(batch_of(table, [0], random_blocks(1, PAGE))) == BlockStatus.PRESENT).all()


def test_closed(store):
    table = store.add_table(b"t")
    batch = batch_of(table, [0], random_blocks(1, PAGE))
    store.close()
    store.close()
    with pytest.raises(Unavailable):
        store.write(batch)
    with pytest.raises(Unavailable):
        store.read(ReadBatch(PAGE, batch.offsets, batch.checksums))


def test_tables_and_items_have_limits(store):
    with pytest.raises(LimitExceeded):
        store.add_table(bytes(64 * KIB + 1))

    def fill() -> None:
        for number in range(256):
            store.add_table(bytes([number]) * 64 * KIB)

    with pytest.raises(LimitExceeded, match=r"at most \d+ bytes of tables") as refused:
        fill()
    (room,) = re.findall(r"at most (\d+)", str(refused.value))
    held = store.tables()
    assert len(held) == int(room) // (68 * KIB) >= 1
    store.drop_tables(list(held))
    assert store.add_table(b"\0" * 64 * KIB) > max(held)


def test_no_two_tables_have_one_record(store, tmp_path):
    first, second = store.add_table(b"first"), store.add_table(b"second")
    store.renew_table(first, b"second")
    assert store.tables() == {first: b"second", second: b"first"}
    assert (store.add_table(b"first"), store.add_table(b"second")) == (second, first)
    store.close()
    opened = SsdStore.open(tmp_path / "ssd", SIZE, threads=1)
    try:
        assert opened.tables() == {first: b"second", second: b"first"}
    finally:
        opened.close()


def test_a_table_gets_another_record_and_keeps_its_entries(store, tmp_path):
    first, second = store.add_table(b"first"), store.add_table(b"second")
    store.write(batch_of(first, [0], random_blocks(1, PAGE)))
    store.renew_table(first, b"renewed")
    store.renew_table(first, b"renewed")
    with pytest.raises(InvalidRequest, match="no table"):
        store.renew_table(first + second, b"third")
    with pytest.raises(LimitExceeded):
        store.renew_table(first, bytes(64 * KIB + 1))
    assert store.tables() == {first: b"renewed", second: b"second"}
    assert store.add_table(b"renewed") == first
    assert store.add_table(b"first") not in {first, second}
    store.drop_tables([second])
    store.close()
    opened = SsdStore.open(tmp_path / "ssd", SIZE, threads=1)
    assert opened.tables()[first] == b"renewed" and second not in opened.tables()
    assert all_entries(opened)["offset"].tolist() == [0]
    opened.close()


def test_entries_of_a_dropped_table_are_left_out(store, tmp_path):
    kept, dropped = store.add_table(b"kept"), store.add_table(b"dropped")
    store.write(batch_of(kept, [0], random_blocks(1, PAGE)))
    store.write(batch_of(dropped, [PAGE], random_blocks(1, PAGE)))
    store.drop_tables([dropped])
    assert all_entries(store)["offset"].tolist() == [0]
    assert store.stats().entries_dropped == 1
    store.close()
    opened = SsdStore.open(tmp_path / "ssd", SIZE, threads=1)
    assert opened.stats().entries == 1, "it was forgotten too"
    opened.close()


def test_single_entries_can_be_asked_for(store):
    kept, dropped = store.add_table(b"kept"), store.add_table(b"dropped")
    batch = batch_of(kept, [0, PAGE, 3 * PAGE], random_blocks(3, PAGE))
    store.write(batch)
    store.write(batch_of(dropped, [4 * PAGE], random_blocks(1, PAGE)))
    store.drop_tables([dropped])
    found = store.entries_at([3 * PAGE, 2 * PAGE, 0, 4 * PAGE])
    assert found["offset"].tolist() == [3 * PAGE, 0]
    assert found["key"].tolist() == batch.keys[[2, 0]].tolist()
    assert found["parent"].tolist() == batch.parents[[2, 0]].tolist()
    assert len(store.entries_at([])) == 0

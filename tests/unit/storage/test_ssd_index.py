"""The index of the SSD store: its limits hold whatever comes, and damage costs entries, never truth."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import tempfile
from pathlib import Path

import lmdb
import numpy as np
import pytest

from kvpool.errors import ConfigError, LimitExceeded, SegmentError
from kvpool.storage.ssd import index as ssd_index
from kvpool.storage.ssd.index import (
    ENTRY,
    FORGET,
    NO_ENTRIES,
    SsdIndex,
    check_of,
    entries_max_for,
    map_bytes_for,
    open_index,
)
from tests.support import refusing

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PAGE = 4096
SEGMENT = 1 << 40


@pytest.fixture
def memory(tmp_path):
    """A folder whose syncs cost nothing, for tests that commit thousands of times."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else tmp_path) as folder:
        yield Path(folder)


def opened(folder: Path, map_bytes: int = MIB, segment_bytes: int = SEGMENT) -> SsdIndex:
    return open_index(
        folder, map_bytes=map_bytes, segment_bytes=segment_bytes, new_id=b"0123456789abcdef"
    )


def records(slots: np.ndarray, table: int) -> np.ndarray:
    """Entries that differ in every field."""
    entries = np.zeros(len(slots), ENTRY)
    entries["offset"] = slots.astype(np.uint64) * np.uint64(PAGE)
    entries["table"] = table
    entries["nbytes"] = entries["stored"] = 1 + slots % PAGE
    entries["depth"] = slots
    for name in ("key", "parent", "checksum"):
        entries[name] = np.random.default_rng(len(slots)).integers(0, 256, (len(slots), 16))
    return entries


WRITER = """
import sys
from pathlib import Path
import numpy as np
from tests.unit.storage.test_ssd_index import everything, opened, records

index = opened(Path(sys.argv[1]))
table = index.add_table(b"table")
for line in sys.stdin:  # slots to add, as often as there are lines
    slots = np.array(line.split(), np.int64)
    print(index.commit({}, records(slots, table)).failed, len(everything(index)), flush=True)
"""


def everything(index: SsdIndex) -> np.ndarray:
    return np.concatenate([NO_ENTRIES, *index.chunks(1000)])


def test_shares_of_a_store():
    assert map_bytes_for(8 * MIB) == MIB
    assert map_bytes_for(GIB) == 16 * MIB
    assert map_bytes_for(1000 * GIB) == 1000 * GIB // 64
    # Blocks of 64 KiB and more fill the whole disk before they fill the index.
    for size in (GIB, 100 * GIB, 1000 * GIB):
        assert entries_max_for(map_bytes_for(size)) * 64 * KIB > size


@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_map_never_fills(memory, seed, hostile):
    """With all entries, tables and items that it may have, at slots that come and go.

    hostile: three of four neighbours go, so that pages stay as empty as LMDB lets them be, and the new
    ones come elsewhere.
    """
    index = opened(memory / "index")
    index.add_table(bytes(64 * KIB))
    with pytest.raises(LimitExceeded):
        index.add_table(b"\1" * 64 * KIB)
    dice = np.random.default_rng(seed)
    most, slots = index.entries_max, np.arange(index.entries_max * 3)
    live = slots[:0]
    for _ in range(12):
        if hostile:
            gone = np.sort(live)[np.arange(len(live)) % 4 != 0]
        else:
            gone = dice.choice(live, len(live) // 3, replace=False) if len(live) else live
        outcome = index.commit({int(slot) * PAGE: FORGET for slot in gone}, NO_ENTRIES)
        assert outcome.got_through and not outcome.full
        live = np.setdiff1d(live, gone)
        free = np.setdiff1d(slots, live)
        if hostile:
            first = dice.integers(0, len(free) - (most - len(live)) + 1)
            new = free[first : first + most - len(live)]
        else:
            new = dice.permutation(free)[: most - len(live)]
        for part in np.array_split(new, 40):
            outcome = index.commit({}, records(part, 1))
            assert outcome.added == len(part) and not outcome.full
        live = np.concatenate([live, new])
    assert everything(index)["offset"].tolist() == (np.sort(live) * PAGE).tolist()
    index.close()


def test_a_map_that_is_full_all_the_same(memory):
    """Nothing of what was refused is there, all else is, and forgetting makes room again."""
    index = opened(memory / "index")
    index.add_table(b"t")
    index.entries_max = 1 << 30
    slots = np.random.default_rng(3).permutation(20_000)
    stored = 0
    while True:
        batch = records(slots[stored : stored + 12], 1)
        outcome = index.commit({}, batch)
        if outcome.full:
            assert outcome.added == 0
            break
        stored += 12
    assert stored > entries_max_for(MIB)
    assert everything(index)["offset"].tolist() == (np.sort(slots[:stored]) * PAGE).tolist()
    gone = {int(slot) * PAGE: FORGET for slot in slots[:4000]}
    outcome = index.commit(gone, NO_ENTRIES)
    assert outcome.got_through
    assert index.commit({}, records(slots[:500], 1)).added == 500
    expected = np.sort(np.concatenate([slots[:500], slots[4000:stored]])) * PAGE
    assert everything(index)["offset"].tolist() == expected.tolist()
    index.close()


def test_operations_and_entries_that_are_too_many_together(tmp_path):
    index = opened(tmp_path / "index")
    index.add_table(b"t")
    assert index.commit({}, records(np.arange(100), 1)).added == 100
    pins = {slot * PAGE: 3 for slot in range(50, 200)}
    outcome = index.commit(
        {slot * PAGE: FORGET for slot in range(50)} | pins, records(np.arange(300, 350), 1)
    )
    assert (outcome.added, outcome.got_through) == (50, True)
    found = everything(index)
    assert found["offset"].tolist() == [PAGE * slot for slot in (*range(50, 100), *range(300, 350))]
    assert found["pin"].tolist() == [3] * 50 + [0] * 50
    assert index.sound(found).all()
    index.close()


# ---- damage ---------------------------------------------------------------------------------------------


def test_every_flipped_bit_of_a_record_is_seen():
    """The check covers all of a record, itself included."""
    entry = records(np.array([12345]), 7)
    entry["check"] = check_of(entry)
    flipped = np.repeat(entry, ENTRY.itemsize * 8)
    raw = flipped.view(np.uint8).reshape(len(flipped), ENTRY.itemsize)
    for bit in range(len(flipped)):
        raw[bit, bit // 8] ^= 1 << bit % 8
    assert (check_of(flipped) != flipped["check"]).all()
    assert (check_of(entry) == entry["check"]).all()


def filled(folder: Path) -> np.ndarray:
    """An index of 500 entries, closed; what is in it."""
    index = opened(folder)
    index.add_table(b"t")
    index.commit({}, records(np.arange(500), 1))
    found = everything(index)
    index.close()
    return found


def test_records_with_turned_bits_are_left_out(tmp_path):
    """Bits of the file turn inside of records. LMDB notices nothing; the rest is as it was."""
    good = filled(tmp_path / "index")
    path = tmp_path / "index" / "data.mdb"
    data = bytearray(path.read_bytes())
    hurt = []
    for number in range(0, 500, 7):
        keys = good[number]["key"].tobytes()
        assert data.count(keys) >= 1
        at = -1
        while (at := data.find(keys, at + 1)) >= 0:  # pages that are not used any more have copies
            data[at + number % 16] ^= 1 << number % 8
        hurt.append(number)
    path.write_bytes(data)
    index = opened(tmp_path / "index")
    found = everything(index)
    sound = index.sound(found)
    assert np.flatnonzero(~sound).tolist() == hurt
    assert found[sound].tobytes() == np.delete(good, hurt).tobytes()
    index.close()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:100],
        lambda data: data[: 8 * PAGE],  # shorter than what it says is used
        lambda data: bytes(len(data)),
        lambda data: os.urandom(2 * PAGE) + data[2 * PAGE :],
        lambda data: data.replace(b"kvpool", b"kvpOol"),
    ],
    ids=["empty", "tiny", "cut", "zeros", "no meta pages", "no header"],
)  # fmt: skip
def test_a_file_that_is_no_index(tmp_path, damage, caplog):
    filled(tmp_path / "index")
    path = tmp_path / "index" / "data.mdb"
    path.write_bytes(damage(path.read_bytes()))
    with caplog.at_level(logging.WARNING):
        index = opened(tmp_path / "index")
    assert index.lost and "starts empty" in caplog.text
    assert len(everything(index)) == 0
    index.add_table(b"t")
    index.commit({}, records(np.arange(5), 1))
    index.close()
    index = opened(tmp_path / "index")
    assert not index.lost and len(everything(index)) == 5
    index.close()


def test_pages_that_lie_are_found_after_somebody_died_of_them(tmp_path):
    """A page with impossible contents can end the process that reads it: the next one looks first."""
    filled(tmp_path / "index")
    path = tmp_path / "index" / "data.mdb"
    data = bytearray(path.read_bytes())
    for page in range(2, len(data) // PAGE):
        data[page * PAGE + 16 : page * PAGE + 64] = b"\xff" * 48
    path.write_bytes(data)
    (tmp_path / "index" / "loading").touch()
    index = opened(tmp_path / "index")
    assert index.lost and len(everything(index)) == 0
    index.close()
    assert not (tmp_path / "index" / "loading").exists()


def test_an_index_that_was_not_read_to_its_end_is_looked_at_and_kept(tmp_path):
    good = filled(tmp_path / "index")
    (tmp_path / "index" / "loading").touch()
    index = opened(tmp_path / "index")
    assert (tmp_path / "index" / "loading").exists() and not index.lost
    assert everything(index).tobytes() == good.tobytes()
    assert not (tmp_path / "index" / "loading").exists()
    index.close()


def test_damage_that_shows_while_it_is_read(tmp_path, monkeypatch, caplog):
    """What was read stays read; the tables stay; the store goes on with an empty index."""
    filled(tmp_path / "index")
    index = opened(tmp_path / "index")
    chunks = index.chunks(100)
    assert len(next(chunks)) == 100

    def fails(start: bytes, chunk: int) -> None:
        raise lmdb.CorruptedError("mdb_cursor_get")

    monkeypatch.setattr(index, "_chunk", fails)
    assert list(chunks) == []
    monkeypatch.undo()
    assert index.lost and "starts empty" in caplog.text
    assert index.commit({}, records(np.arange(3), 1)).added == 3
    index.close()
    index = opened(tmp_path / "index")
    assert index.tables() == {1: b"t"} and len(everything(index)) == 3
    assert everything(index)["generation"].min() > 500
    index.close()


def test_a_torn_table_is_dropped(tmp_path):
    index = opened(tmp_path / "index")
    index.add_table(b"the one record")
    index.add_table(b"the other one!")
    index.close()
    path = tmp_path / "index" / "data.mdb"
    path.write_bytes(path.read_bytes().replace(b"the one record", b"the one recore"))
    index = opened(tmp_path / "index")
    assert index.tables() == {2: b"the other one!"}
    assert index.add_table(b"the one record") == 3
    index.close()


def test_another_format_is_refused(tmp_path, monkeypatch):
    filled(tmp_path / "index")
    monkeypatch.setattr(ssd_index, "FORMAT", 2)
    with pytest.raises(ConfigError, match="format 1; this version of kvpool supports 2"):
        opened(tmp_path / "index")
    monkeypatch.undo()
    index = opened(tmp_path / "index")
    assert len(everything(index)) == 500
    index.close()


def test_what_is_left_of_a_make_that_was_cut_short(tmp_path):
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "new.mdb").write_bytes(b"half of something")
    index = opened(tmp_path / "index")
    assert not index.lost and len(everything(index)) == 0
    index.close()
    assert [path.name for path in (tmp_path / "index").iterdir()] == ["data.mdb"]


def test_a_smaller_index_keeps_what_fits(tmp_path):
    index = opened(tmp_path / "index", 4 * MIB)
    tables = [index.add_table(bytes([number]) * 60 * KIB) for number in range(6)]
    slots = np.arange(entries_max_for(4 * MIB))
    assert index.commit({}, records(slots, tables[0])).added == len(slots)
    index.close()
    index = opened(tmp_path / "index", MIB, SEGMENT - PAGE)
    assert list(index.tables()) == tables[:2]
    assert everything(index)["depth"].tolist() == list(range(entries_max_for(MIB)))
    assert (tmp_path / "index" / "data.mdb").stat().st_size == MIB
    index.close()


def test_no_room_for_the_index(tmp_path):
    with pytest.raises(SegmentError, match=r"the index .* cannot be opened"):
        opened(tmp_path / "index", 1 << 50)
    assert not (tmp_path / "index" / "data.mdb").exists()


def test_a_transaction_whose_last_page_was_refused_does_not_end_all_later_ones(tmp_path, repo_root):
    """LMDB refuses everything from then on, until its file is opened again."""
    if reason := refusing.unavailable():
        pytest.skip(reason)
    with refusing.Refusing(tmp_path) as kernel:
        writer = subprocess.Popen(
            [*kernel.python, "-c", WRITER, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(repo_root)},
        )
        assert writer.stdin is not None and writer.stdout is not None

        def commit(*slots: int) -> str:
            writer.stdin.write(" ".join(map(str, slots)) + "\n")
            writer.stdin.flush()
            return writer.stdout.readline().strip()

        with writer:
            for number in range(1, 11):  # it depends on the pages which of them is refused first
                assert commit(number) == f"False {number}"
                kernel.error = errno.EROFS
                assert [commit(99), commit(99)] == [f"True {number}"] * 2
                kernel.error = 0
            writer.stdin.close()
        assert len(everything(opened(tmp_path))) == 10

"""Files of a recording: whole lines whatever the disk does, nothing of others is touched."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool import folders
from kvpool.errors import ConfigError
from kvpool.router.records import record_file
from kvpool.router.records.record_file import RecordFile
from kvpool.simulator.recordings import MARKER

BYTES = 100


def line(number: int, size: int = 30) -> bytes:
    begin = MARKER + b'1,"number":%d' % number
    return begin + b" " * (size - len(begin) - 2) + b"}\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


@pytest.fixture
def begin(path: Path) -> Iterator[Callable[..., RecordFile]]:
    opened: list[RecordFile] = []

    def one(files_max: int = 3) -> RecordFile:
        file = RecordFile(path, BYTES, files_max)
        file.open()
        opened.append(file)
        return file

    yield one
    for each in opened:
        each.close()


def there(path: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in sorted(path.parent.iterdir())}


def identity(path: Path) -> tuple[int, ...]:
    found = os.lstat(path)
    return found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns


def test_only_its_owner_can_read_it(begin: Any, path: Path) -> None:
    before = os.umask(0)
    try:
        file = begin()
        for number in range(4):
            assert file.write(line(number))
    finally:
        os.umask(before)
    assert {each.stat().st_mode & 0o777 for each in path.parent.iterdir()} == {0o600}


def test_a_full_file_is_followed_by_another_one(begin: Any, path: Path) -> None:
    file = begin()
    for number in range(11):
        assert file.write(line(number))
    threes = [b"".join(map(line, range(at, min(at + 3, 11)))) for at in (3, 6, 9)]
    names = ("trace.jsonl.2", "trace.jsonl.1", "trace.jsonl")
    assert there(path) == dict(zip(names, threes, strict=True))


def test_one_file_alone(begin: Any, path: Path) -> None:
    file = begin(files_max=1)
    for number in range(7):
        assert file.write(line(number))
    assert there(path) == {"trace.jsonl": line(6)}


def test_a_line_larger_than_a_file_is_not_taken_and_costs_no_other(begin: Any, path: Path) -> None:
    file = begin()
    assert file.write(line(1))
    assert not file.write(line(2, BYTES + 1))
    assert file.write(line(3))
    assert there(path) == {"trace.jsonl": line(1) + line(3)}


def test_an_older_recording_is_kept_and_an_empty_one_is_not(begin: Any, path: Path) -> None:
    for number in range(3):
        file = begin()
        file.write(line(number))
        file.close()
        for _ in range(3):  # starts that record nothing
            begin().close()
    found = there(path)
    kept = {name: data for name, data in found.items() if data}
    assert kept == {"trace.jsonl.1": line(2), "trace.jsonl.2": line(1)}
    assert found.keys() - kept.keys() == {"trace.jsonl"}


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.1", "trace.jsonl.2"])
@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.write_text("a diary\n"),
        lambda path: path.write_text('{"timestamp": 1}\n'),
        lambda path: path.symlink_to("/etc/hostname"),
        lambda path: path.symlink_to("/nowhere"),
        lambda path: path.mkdir(),
        os.mkfifo,
    ],
)
def test_what_is_no_recording_is_left_alone(begin: Any, path: Path, name: str, make: Any) -> None:
    other = path.with_name(name)
    make(other)
    before = identity(other)
    with pytest.raises(ConfigError, match="record: cannot write"):
        begin()
    assert identity(other) == before
    assert list(path.parent.iterdir()) == [other]


def test_a_folder_that_is_missing_is_told(path: Path) -> None:
    file = RecordFile(path.parent / "missing" / "t", BYTES, 3)
    with pytest.raises(ConfigError, match="No such file"):
        file.open()


def test_a_file_put_in_its_way_while_it_runs_is_left_alone(begin: Any, path: Path) -> None:
    file = begin()
    oldest = path.with_name("trace.jsonl.2")
    for number in range(6):
        file.write(line(number))
    oldest.write_text("a diary\n")
    with pytest.raises(FileExistsError, match="no recording"):
        file.write(line(6))
    assert oldest.read_text() == "a diary\n"
    oldest.unlink()
    assert file.write(line(7))
    assert path.read_bytes() == line(7)


def test_two_processes_with_one_file_keep_their_lines_apart(begin: Any, path: Path) -> None:
    """As when a router is replaced by the next one while it still serves."""
    old = begin()
    old.write(line(1))
    new = begin()
    new.write(line(2))
    old.write(line(3))
    assert there(path) == {"trace.jsonl": line(2), "trace.jsonl.1": line(1) + line(3)}
    old.write(line(4))
    with pytest.raises(FileExistsError, match="another process"):
        old.write(line(5))
    for number in (6, 7, 8):
        assert new.write(line(number))
    assert path.read_bytes() == line(8)


def test_a_file_that_was_removed_or_moved_is_made_anew(begin: Any, path: Path) -> None:
    file = begin()
    file.write(line(1))
    path.unlink()
    file.write(line(2))
    assert there(path) == {"trace.jsonl": line(2)}
    path.rename(path.with_name("kept"))
    for number in (3, 4, 5):
        file.write(line(number))
    assert there(path) == {"kept": b"".join(map(line, (2, 3, 4))), "trace.jsonl": line(5)}


class FailingDisk:
    """`os` for a file, of which a write takes so many bytes, and then fails. cuts: whether files can be cut. opens:
    whether there is room for new ones.
    """

    def __init__(self, takes: int, *, cuts: bool = True, opens: bool = True) -> None:
        self.takes = takes
        self.cuts = cuts
        self.opens = opens

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: Path, flags: int, *mode: int) -> int:
        if flags & os.O_CREAT and not self.opens:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.open(path, flags, *mode)

    def write(self, fd: int, data: memoryview) -> int:
        if self.takes == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        took = os.write(fd, data[: self.takes])
        self.takes -= took
        return took

    def ftruncate(self, fd: int, size: int) -> None:
        if not self.cuts:
            raise OSError(errno.EIO, "Input/output error")
        os.ftruncate(fd, size)


def write_to(disk: FailingDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write records to this disk from now on."""
    for module in (record_file, folders):
        monkeypatch.setattr(module, "os", disk)


@pytest.mark.parametrize("cuts", [True, False])
@pytest.mark.parametrize("takes", [0, 1, 29])
def test_nothing_is_left_of_a_line_that_the_disk_did_not_take(
    begin: Any, path: Path, monkeypatch: pytest.MonkeyPatch, takes: int, cuts: bool
) -> None:
    file = begin()
    file.write(line(1))
    write_to(FailingDisk(takes, cuts=cuts), monkeypatch)
    for number in (2, 3):
        with pytest.raises(OSError, match=r"space|error"):
            file.write(line(number))
    monkeypatch.undo()
    assert file.write(line(4))
    assert path.read_bytes() == line(1) + line(4)


def test_a_next_file_that_cannot_be_made_changes_nothing(
    begin: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = begin()
    for number in range(6):
        file.write(line(number))
    before = there(path)

    write_to(FailingDisk(0, opens=False), monkeypatch)
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            file.write(line(9))
    monkeypatch.undo()
    assert there(path) == before
    assert file.write(line(10))
    assert path.read_bytes() == line(10)

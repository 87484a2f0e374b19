"""The audit file: what is in it outlives restarts and rotation, and what was done to it is found."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvpool.cli.verbs import app
from kvpool.daemon.ops import audit_file
from kvpool.daemon.ops.audit_file import (
    LINE_BYTES_MAX,
    AuditFile,
    AuditRecord,
    ChainEnd,
    files_of,
    line_of,
    parse_line,
    verify,
)
from kvpool.errors import ConfigError, ProtocolError
from tests.support.waiting import PATIENCE_S, until

NOON = 1_764_590_400.25  # 2025-12-01T12:00:00.250Z


class PatientFile(AuditFile):
    """Who closes it has let go of it, however long that takes here."""

    RETRY_S = 0.01
    CLOSE_S = PATIENCE_S


class BusyFile(PatientFile):
    QUEUE_MAX = 5


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.log"


@pytest.fixture
def begin(path: Path) -> Iterator[Callable[..., AuditFile]]:
    opened: list[AuditFile] = []

    def one(
        bytes_max: int = 1 << 20, files_max: int = 3, kind: type[AuditFile] = PatientFile
    ) -> AuditFile:
        opened.append(kind(path, bytes_max, files_max))
        return opened[-1]

    yield one
    for each in opened:
        each.close()


def write(audit: AuditFile, *numbers: int, **details: object) -> None:
    before = audit.written
    for number in numbers:
        audit.write(NOON + number, "a", "change", {"what": f"change {number}", **details})
    until(lambda: audit.written == before + len(numbers))


def records_of(path: Path) -> list[AuditRecord]:
    return [record for record, _ in verify(path)]


def whats(path: Path) -> list[str]:
    return [record.details["what"] for record in records_of(path)]


def test_lines_are_as_documented(begin: Callable[..., AuditFile], path: Path) -> None:
    write(begin(), 0, 1)
    assert path.stat().st_mode & 0o777 == 0o600
    previous = "0" * 64
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        found = json.loads(line)
        assert list(found) == ["number", "at", "node", "kind", "details", "previous", "hash"]
        assert (found["number"], found["previous"]) == (number, previous)
        body, _, _ = line.rpartition(b',"hash"')
        assert found["hash"] == hashlib.sha256(body).hexdigest()
        previous = found["hash"]
    assert found["at"] == "2025-12-01T12:00:01.250Z"
    assert (found["node"], found["kind"], found["details"]) == ("a", "change", {"what": "change 1"})


def test_the_chain_goes_on_over_restarts_and_files(
    begin: Callable[..., AuditFile], path: Path
) -> None:
    for life in range(6):
        audit = begin(bytes_max=1000, files_max=4)
        for n in range(4):
            write(audit, 10 * life + n)
        audit.close()
    files = files_of(path)
    assert [file.name for file in files] == [
        "audit.log.3",
        "audit.log.2",
        "audit.log.1",
        "audit.log",
    ]
    assert all(file.stat().st_size <= 1000 + 400 for file in files)
    found = records_of(path)
    assert [record.number for record in found] == list(range(found[0].number, 25))
    assert found[0].number > 1, "the oldest are gone"
    assert found[-1].details == {"what": "change 53"}


def test_one_file_alone(begin: Callable[..., AuditFile], path: Path) -> None:
    audit = begin(bytes_max=500, files_max=1)
    for n in range(10):
        write(audit, n)
    assert files_of(path) == [path]
    assert records_of(path)[-1].number == 10


def test_a_line_that_a_crash_has_cut_off_is_taken_away(
    begin: Callable[..., AuditFile], path: Path
) -> None:
    first = begin()
    write(first, 0, 1)
    first.close()
    whole = path.read_bytes()
    for cut in (1, 30, len(whole.splitlines(keepends=True)[1]) - 1):
        path.write_bytes(whole[:-cut])
        with pytest.raises(ProtocolError, match="line 2: it is incomplete"):
            records_of(path)
        audit = begin()
        write(audit, 7)
        audit.close()
        assert whats(path) == ["change 0", "change 7"]


def test_a_file_that_is_another_ones_is_refused(path: Path) -> None:
    path.write_text("Dec  1 12:00:00 somebody's own log\n")
    with pytest.raises(ConfigError, match="is not one of an audit file"):
        AuditFile(path, 1 << 20, 3)
    with pytest.raises(ConfigError, match="cannot open"):
        AuditFile(path.parent / "none" / "audit.log", 1 << 20, 3)


@pytest.mark.parametrize("text", ['{"important": "settings"}', "line 1\nline 2", "\0" * 200_000])
def test_a_file_that_is_refused_stays_as_it_is(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(ConfigError, match="is not one of an audit file"):
        AuditFile(path, 1 << 20, 3)
    assert path.read_text() == text


def test_two_daemons_do_not_share_a_file(begin: Callable[..., AuditFile], path: Path) -> None:
    first = begin(bytes_max=300)
    write(first, 0)
    for _ in range(2):
        with pytest.raises(ConfigError, match="another daemon writes"):
            AuditFile(path, 1 << 20, 3)
        write(first, 1)  # into the next file
    first.close()
    write(begin(), 2)


def test_fewer_files_than_before(begin: Callable[..., AuditFile], path: Path) -> None:
    many = begin(bytes_max=300, files_max=6)
    for n in range(10):
        write(many, n)
    many.close()
    assert len(files_of(path)) == 5, "a file has two records"
    few = begin(bytes_max=300, files_max=3)
    assert len(files_of(path)) == 3
    for n in range(10, 14):
        write(few, n)
    assert whats(path)[-1] == "change 13"
    assert len(files_of(path)) == 3


def test_a_rotation_that_fails_again_and_again_costs_no_file(
    begin: Callable[..., AuditFile], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = begin(bytes_max=300, files_max=6)
    for n in range(10):
        write(audit, n)
    before = [file.read_bytes() for file in files_of(path)]

    def refuse(_: Path) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(audit_file, "_open", refuse)
        audit.write(NOON, "a", "change", {"what": "while none could be opened"})
        until(lambda: audit.errors >= 5)
        assert [file.read_bytes() for file in files_of(path)] == before
    until(lambda: audit.written == 11)
    assert whats(path)[-1] == "while none could be opened"


@pytest.mark.parametrize("files_max", [1, 3])
def test_a_file_that_is_taken_away_is_begun_anew(
    begin: Callable[..., AuditFile],
    path: Path,
    caplog: pytest.LogCaptureFixture,
    files_max: int,
) -> None:
    audit = begin(files_max=files_max)
    write(audit, 0)
    moved = path.rename(path.with_name("elsewhere"))
    write(audit, 1)
    assert "was moved or removed" in caplog.text
    assert [record.number for record in records_of(path)] == [2]
    assert [record.number for record in records_of(moved)] == [1]
    path.unlink()
    write(audit, 2)
    assert [record.number for record in records_of(path)] == [3]


@pytest.mark.parametrize("value", ["\ud800", object(), b"\xff"])
def test_details_that_no_line_can_have(
    begin: Callable[..., AuditFile], path: Path, value: object
) -> None:
    audit = begin()
    write(audit, 0, odd=value)
    write(audit, 1)
    assert [record.number for record in records_of(path)] == [1, 2]


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda found: [*found[:2], *found[3:]], "line 3: it does not follow record 2"),
        (lambda found: [found[1], found[0], *found[2:]], "line 2: it does not follow record 2"),
        (lambda found: [found[0], found[0], *found[1:]], "line 2: it does not follow record 1"),
        (lambda found: [*found[:3], b"{}\n", *found[3:]], "line 4: the hash does not match"),
        (lambda found: [*found[:3], b"\n", *found[3:]], "line 4: the hash does not match"),
        (
            lambda found: [found[0], found[1].replace(b"change 1", b"change 9"), *found[2:]],
            "line 2: the hash does not match",
        ),
        (lambda found: [forged(found[0], number=1, previous="f" * 64), *found[1:]], "line 1: it"),
        (lambda found: [found[0], forged(found[1], node="b"), *found[2:]], "line 3: it does not"),
    ],
)
def test_what_was_done_to_it_is_found(
    begin: Callable[..., AuditFile],
    path: Path,
    change: Callable[[list[bytes]], list[bytes]],
    reason: str,
) -> None:
    audit = begin()
    write(audit, *range(5))
    audit.close()
    path.write_bytes(b"".join(change(lines(path))))
    with pytest.raises(ProtocolError, match=reason):
        records_of(path)


def forged(line: bytes, **fields: object) -> bytes:
    """Other contents, with a hash that fits."""
    record, _ = parse_line(line.rstrip(b"\n"))
    values = {name: getattr(record, name) for name in record.__struct_fields__}
    return line_of(AuditRecord(**values | fields))[0]


@given(
    st.integers(1, 1 << 60),
    st.text(max_size=30),
    st.dictionaries(st.text(max_size=5), st.text(max_size=30) | st.integers(-9, 9), max_size=3),
)
def test_every_record_is_read_as_it_was_written(
    number: int, text: str, details: dict[str, object]
) -> None:
    record = AuditRecord(number, "2025-12-01T12:00:00.000Z", text, text, details, "0" * 64)
    line, digest = line_of(record)
    assert line.endswith(b"\n") and b"\n" not in line[:-1]
    assert parse_line(line[:-1]) == (record, digest)


def test_a_disk_that_is_full_for_a_while(
    begin: Callable[..., AuditFile],
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    audit = begin()
    write(audit, 0)
    full = True
    real = os.write

    def some(fd: int, data: memoryview) -> int:
        if full:
            if len(data) > 20:
                return real(fd, data[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data)

    def half(fd: int, data: memoryview) -> int:
        if full:
            real(fd, data[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data)

    for writes in (some, half):
        full = True
        monkeypatch.setattr(os, "write", writes)
        before = audit.errors
        written = audit.written
        audit.write(NOON, "a", "change", {"what": "while it was full"})
        until(lambda before=before: audit.errors >= before + 3)
        assert audit.written == written
        full = False
        until(lambda written=written: audit.written == written + 1)
    monkeypatch.undo()
    # It counts what is written before it says so.
    until(lambda: caplog.text.count("is written again") == 2)
    assert whats(path) == ["change 0", "while it was full", "while it was full"]
    assert caplog.text.count("cannot be written") == 2
    assert audit.stats().lost == 0


def test_more_than_may_wait_is_lost_and_counted(
    begin: Callable[..., AuditFile], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = begin(kind=BusyFile)

    def refuse(fd: int, data: memoryview) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "write", refuse)
    audit.write(NOON, "a", "change", {})
    until(lambda: audit.errors > 0)
    for _ in range(10):
        audit.write(NOON, "a", "change", {})
    assert audit.lost == 5
    audit.close()
    assert audit.lost == 11, "a daemon that ends does not wait for a disk"


def test_a_record_that_is_too_long_keeps_its_place(
    begin: Callable[..., AuditFile], path: Path
) -> None:
    audit = begin()
    write(audit, 0, much="x" * LINE_BYTES_MAX)
    write(audit, 1)
    audit.close()
    first, second = records_of(path)
    assert first.details["omitted_bytes"] > LINE_BYTES_MAX
    assert second.details["what"] == "change 1"
    again = begin()
    write(again, 2)
    assert records_of(path)[-1].number == 3


def test_the_command(begin: Callable[..., AuditFile], path: Path) -> None:
    audit = begin(bytes_max=300, files_max=10)
    for n in range(5):
        write(audit, n)

    def run(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["audit", "verify", str(path), *words])
        return done.exit_code, done.output + str(done.exception or "")

    status, said = run()
    assert status == 0
    assert "5 records are whole: from record 1 of 2025-12-01T12:00:00.250Z to record 5" in said
    hashes = [end.hash for _, end in verify(path)]
    assert f"Last hash: {hashes[-1]}" in said
    assert run("--contains", hashes[2])[0] == 0
    path.unlink()
    assert run()[0] == 0, "what is gone from the end breaks no chain"
    status, said = run("--contains", hashes[-1])
    assert status == 1
    assert "records were removed" in said
    path.write_bytes(b"x\n")
    status, said = run()
    assert status == 1
    assert f"{path}, line 1" in said
    for file in files_of(path):
        file.unlink()
    assert "is not there" in run()[1]
    path.touch()
    assert "has no records" in run()[1]
    assert ChainEnd().hash == "0" * 64

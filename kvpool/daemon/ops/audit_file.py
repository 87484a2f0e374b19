"""The audit file: operators' changes and failed logins, one JSON object a line, kept over restarts.

Each line carries the hash of the one before it, and its own, so that a line that was changed, removed or put in
between is found (`verify`). Lines that were cut off at the end are not: their last hash must be kept elsewhere.

    {"number":7,"at":"2026-12-01T12:00:00.123Z","node":"a","kind":"change","details":{...},"previous":"5f…","hash":"91…"}

`hash`: SHA-256 of the line up to `,"hash"`, in hexadecimal digits. The file is rotated: NAME, NAME.1 and so on, older
with larger numbers; the first line of a file continues the last one of the file before.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import queue
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from kvpool.decoding import JsonDecoder
from kvpool.errors import ConfigError, ProtocolError
from kvpool.folders import shift_files, sync_folder, write_all
from kvpool.telemetry.node_stats import AuditStats

LINE_BYTES_MAX = 64 << 10
TAIL_BYTES = 2 * LINE_BYTES_MAX
NO_HASH = "0" * 64

log = logging.getLogger("kvpool.audit")

_HASH = re.compile(rb',"hash":"([0-9a-f]{64})"}')
_BEGIN = b'{"number":'
_HASH_BYTES = len(',"hash":""}') + 64


class AuditRecord(msgspec.Struct, frozen=True):
    """A line of the file, without its hash. number: counts up over all files and restarts. at: UTC."""

    number: int
    at: str
    node: str
    kind: str
    details: Mapping[str, Any]
    previous: str


@dataclass(frozen=True, slots=True)
class ChainEnd:
    """The last line of a chain. lines: how many were seen."""

    number: int = 0
    hash: str = NO_HASH
    lines: int = 0


_decode = JsonDecoder[AuditRecord](AuditRecord, "a line of the audit file")


def line_of(record: AuditRecord) -> tuple[bytes, str]:
    """A record's line, with its end, and its hash."""
    body = msgspec.json.encode(record)[:-1]
    digest = hashlib.sha256(body).hexdigest()
    return body + f',"hash":"{digest}"}}\n'.encode(), digest


def parse_line(line: bytes) -> tuple[AuditRecord, str]:
    """The inverse, without the end. Raises `ProtocolError` for what is no line, or has a wrong hash."""
    body, end = line[:-_HASH_BYTES], _HASH.fullmatch(line[-_HASH_BYTES:])
    digest = hashlib.sha256(body).hexdigest()
    if end is None or end[1].decode() != digest:
        raise ProtocolError("the hash does not match the line")
    return _decode(body + b"}"), digest


def files_of(path: Path) -> list[Path]:
    """The files of a chain that are there, the oldest first."""
    numbered = []
    for each in path.parent.glob(f"{path.name}.*"):
        suffix = each.name.removeprefix(f"{path.name}.")
        if suffix.isdecimal():
            numbered.append((int(suffix), each))
    found = [each for _, each in sorted(numbered, reverse=True)]
    return [*found, path] if path.exists() else found


def verify(path: Path) -> Iterator[tuple[AuditRecord, ChainEnd]]:
    """Each record of all files, the oldest first, with where the chain is then.

    Raises `ProtocolError`, which names the line, and `ConfigError` if a file cannot be read. The first line's
    predecessor may be gone: its file was rotated away.
    """
    end = ChainEnd()
    for file in files_of(path):
        try:
            with file.open("rb") as opened:
                for at, line in enumerate(opened, 1):
                    where = f"{file}, line {at}"
                    if not line.endswith(b"\n"):
                        raise ProtocolError(f"{where}: it is incomplete")
                    try:
                        record, digest = parse_line(line[:-1])
                    except ProtocolError as error:
                        raise ProtocolError(f"{where}: {error}") from None
                    first = not end.lines and record.number > 1
                    if not first and (record.previous, record.number) != (end.hash, end.number + 1):
                        raise ProtocolError(
                            f"{where}: it does not follow record {end.number}: records were removed, or put in between"
                        )
                    end = ChainEnd(record.number, digest, end.lines + 1)
                    yield record, end
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror}") from None


@dataclass(eq=False)
class AuditFile:
    """Appends records. `write` is for the event loop; one thread of its own does the work.

    bytes_max: of a file. files_max: kept, the present one included. The counters are read without a lock.
    Raises `ConfigError` if the file cannot be opened, or its last line is not one of a chain.
    """

    path: Path
    bytes_max: int
    files_max: int

    QUEUE_MAX = 4096
    """Records that wait for the disk."""
    RETRY_S = 1.0
    CLOSE_S = 5.0

    def __post_init__(self) -> None:
        self.written = 0
        self.lost = 0  # the disk did not take them in time
        self.errors = 0
        self._queue: queue.Queue[AuditRecord | None] = queue.Queue(self.QUEUE_MAX)
        self._closing = threading.Event()
        try:
            self._fd = _open(self.path)
            try:
                self._end = _last(self.path)
                self._drop_surplus()
                self._size = os.fstat(self._fd).st_size
            except BaseException:
                os.close(self._fd)
                raise
        except BlockingIOError:
            raise ConfigError(
                f"audit_file: another daemon writes {self.path}: give each its own file"
            ) from None
        except OSError as error:
            raise ConfigError(f"audit_file: cannot open {self.path}: {error.strerror}") from None
        self._thread = threading.Thread(target=self._run, name="kvpool-audit", daemon=True)
        self._thread.start()

    def write(self, at_s: float, node: str, kind: str, details: Mapping[str, Any]) -> None:
        """Queue a record; it is durable a moment later. at_s: seconds since 1970. Never waits."""
        try:
            msgspec.json.encode(details)
        except (TypeError, ValueError) as error:  # what has no place in JSON, or is no text
            details = {"omitted": str(error)[:200]}
        at = datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds")
        record = AuditRecord(0, at.replace("+00:00", "Z"), node, kind, details, "")
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.lost += 1

    def stats(self) -> AuditStats:
        return AuditStats(self.written, self.lost, self.errors)

    def close(self) -> None:
        """Write what is queued, within `CLOSE_S`."""
        self._closing.set()
        try:
            self._queue.put(None, timeout=self.CLOSE_S)
        except queue.Full:
            return
        self._thread.join(self.CLOSE_S)

    def _run(self) -> None:
        while True:
            records = [self._queue.get()]
            while not self._queue.empty():
                records.append(self._queue.get())
            todo = [record for record in records if record is not None]
            if todo:
                self._insist(todo)
            if len(todo) < len(records):
                os.close(self._fd)
                return

    def _insist(self, records: list[AuditRecord]) -> None:
        """Until the disk takes them; while closing, once."""
        failed = False
        while True:
            try:
                self._append(records)
            except OSError as error:
                self.errors += 1
                if not failed:
                    log.warning("the audit file %s cannot be written: %s", self.path, error)
                failed = True
                if self._closing.wait(self.RETRY_S):
                    self.lost += len(records)
                    return
            else:
                if failed:
                    log.warning("the audit file %s is written again", self.path)
                return

    def _append(self, records: list[AuditRecord]) -> None:
        """All of them, durably. Raises OSError: then none of them counts, and the file's end is as before."""
        if not _is(self.path, self._fd):
            log.warning("the audit file %s was moved or removed: a new one is begun", self.path)
            self._use(_open(self.path))
        there = os.fstat(self._fd).st_size
        if there > self._size:  # half of a line, by an attempt that has failed
            os.ftruncate(self._fd, self._size)
        self._size = min(self._size, there)
        if self._size >= self.bytes_max:
            self._rotate()
        end, lines = self._end, []
        for record in records:
            chained = msgspec.structs.replace(record, number=end.number + 1, previous=end.hash)
            line, digest = line_of(chained)
            if len(line) > LINE_BYTES_MAX:
                chained = msgspec.structs.replace(chained, details={"omitted_bytes": len(line)})
                line, digest = line_of(chained)
            lines.append(line)
            end = ChainEnd(chained.number, digest)
        data = b"".join(lines)
        write_all(self._fd, data)
        os.fsync(self._fd)
        self._end = end
        self._size += len(data)
        self.written += len(records)

    def _rotate(self) -> None:
        path = self.path
        # First the new file: if there is none, nothing has changed.
        made = path.with_name(f".{path.name}.new")
        made.unlink(missing_ok=True)
        fd = _open(made)
        try:
            shift_files(path, self.files_max)
            made.replace(path)
        except BaseException:
            os.close(fd)
            raise
        self._use(fd)
        self._drop_surplus()
        sync_folder(path.parent)

    def _use(self, fd: int) -> None:
        os.close(self._fd)
        self._fd, self._size = fd, os.fstat(fd).st_size

    def _drop_surplus(self) -> None:
        """Files beyond those that are kept, the oldest first: fewer are wanted now than before."""
        for file in files_of(self.path):
            suffix = file.name.removeprefix(f"{self.path.name}.")
            if file != self.path and int(suffix) >= self.files_max:
                file.unlink(missing_ok=True)


def _open(path: Path) -> int:
    """Its descriptor, locked against other daemons. Raises `BlockingIOError` if one has it."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _is(path: Path, fd: int) -> bool:
    """Whether the open file is still at this path."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def _last(path: Path) -> ChainEnd:
    """The end of the chain. A last line that a crash has cut off was never durable, and is taken away.

    Raises `ConfigError`.
    """
    for file in reversed(files_of(path)):
        with file.open("r+b" if file == path else "rb") as opened:
            size = opened.seek(0, os.SEEK_END)
            opened.seek(max(0, size - TAIL_BYTES))
            tail = opened.read()
            whole = tail.rfind(b"\n") + 1
            end, rest = None, tail[whole:]
            try:
                if lines := tail[:whole].splitlines():
                    record, digest = parse_line(lines[-1])
                    end = ChainEnd(record.number, digest)
                elif rest and not (rest.startswith(_BEGIN) and len(rest) == size):
                    raise ProtocolError("it has no line")
            except ProtocolError as error:
                raise ConfigError(
                    f"audit_file: the last line of {file} is not one of an audit file ({error}): move the file away, "
                    "or choose another one"
                ) from None
            if rest and file == path:
                opened.truncate(size - len(rest))
        if end is not None:
            return end
    return ChainEnd()

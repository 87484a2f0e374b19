"""Tenants' accounts in periods, in memory and in a file, and what operators are told of them. Event loop only.

Periods end with the minute, as all nodes' do, and when the daemon ends. Those of the last hour are in memory; with a
`data_dir` each is written to the file when it has ended, one JSON object a line (`kvpool.telemetry.receipts.Period`).
So a daemon that is killed loses the period that was open, and the file shows that: the next line has another incarnation.

The order of periods is that of their sequence numbers, which ascend over restarts. Clocks are set back; so no time says
which period is older, or which one is in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import msgspec

from kvpool.daemon.features.accounts import Accounts
from kvpool.daemon.ops.audit_file import files_of
from kvpool.decoding import JsonDecoder
from kvpool.errors import LimitExceeded, ProtocolError
from kvpool.folders import shift_files, sync_folder, write_all
from kvpool.telemetry.receipts import (
    PERIOD_S,
    AccountItem,
    Period,
    PeriodRows,
    ReceiptItem,
    Receipts,
    Row,
    decode_period,
)
from kvpool.wire import operator as operator_wire

FILE = "receipts.jsonl"
FILES = 4
KEPT = 60  # periods in memory
ROWS_OF_TOTAL_MAX = 256  # the same with all periods together
ROWS_ASKED_MAX = 5000  # about 2 KB each at most, and an answer has 16 MiB
RECEIPTS_ASKED_MAX = 1000
LINES_TOGETHER = 20  # read in one go, in a thread beside the event loop
QUERIES_WAITING_MAX = 16
BISECTED_BYTES = 64 << 10

log = logging.getLogger("kvpool.daemon")


class _Head(msgspec.Struct, frozen=True):
    """The fields of a line by which it is chosen."""

    begin_s: float
    sequence: int


_decode_head = JsonDecoder[_Head](_Head, "a line of the receipts' file without its rows")


class ReceiptsFile:
    """The periods that have ended, oldest first, in `FILES` files of equal size. One thread at a time writes; any reads.

    nbytes: of all files. Raises OSError where there is no such folder.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.bytes_max = max(1, nbytes // FILES)
        self._path = folder / FILE
        self._rotating = threading.Lock()
        with contextlib.suppress(FileNotFoundError):
            _drop_torn_line(self._path)
        self.last = max((_last_sequence(file) for file in files_of(self._path)), default=0)

    def write(self, lines: Sequence[bytes]) -> int:
        """Append the first of them, as many as one file takes, durably; how many. Raises OSError: then none."""
        path = self._path
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        with self._rotating:
            size = path.stat().st_size if path.exists() else 0
            changed = size == 0
            if size and size + len(lines[0]) > self.bytes_max:
                shift_files(path, FILES)
                size, changed = 0, True
            fd = os.open(path, flags, 0o600)
        try:
            count, end = 1, size + len(lines[0])
            while count < len(lines) and end + len(lines[count]) <= self.bytes_max:
                end += len(lines[count])
                count += 1
            try:
                write_all(fd, b"".join(lines[:count]))
                os.fsync(fd)
                if changed:
                    sync_folder(path.parent)
            except OSError:
                os.ftruncate(fd, size)
                raise
        finally:
            os.close(fd)
        return count

    def open(self) -> tuple[list[BinaryIO], list[OSError]]:
        """All files, oldest first, as they are now; and why others cannot be read. The caller closes them."""
        opened: list[BinaryIO] = []
        failed: list[OSError] = []
        with self._rotating:
            try:
                found = files_of(self._path)
            except OSError as error:
                return [], [error]
            for file in found:
                try:
                    opened.append(file.open("rb"))
                except OSError as error:
                    failed.append(error)
        return opened, failed


class AccountPeriods:
    """See the module. wall: seconds since 1970. file: None: in memory only."""

    def __init__(
        self, accounts: Accounts, file: ReceiptsFile | None, wall: Callable[[], float]
    ) -> None:
        self._accounts = accounts
        self._file = file
        self._wall = wall
        self._kept: deque[Period] = deque(maxlen=KEPT)
        # Without a file, and where the last periods could not be written, the time goes on from what was said before.
        self._sequence = max(int(wall()), 0 if file is None else file.last) + 1
        self._unwritten: deque[bytes] = deque()
        self._unwritten_bytes = 0
        self._dropped = 0
        self._failed = False
        self._unreadable = False
        self._queue = threading.Lock()  # of what is unwritten; never held while a disk works
        self._writing = threading.Lock()
        self._asking = asyncio.Semaphore(1)
        self._waiting = 0

    async def run(self) -> None:
        """Until cancelled: end periods."""
        while True:
            now = self._wall()
            await asyncio.sleep(PERIOD_S - now % PERIOD_S)
            self.end_period()
            if self._file is not None:
                await asyncio.to_thread(self.write)

    def close(self) -> None:
        """The daemon ends, and with it the open period."""
        self.end_period()
        self.write()

    def end_period(self) -> None:
        """The next one begins."""
        period = self._numbered(self._accounts.cut())
        self._sequence += 1
        self._kept.append(period)
        if self._file is None:
            return
        line = msgspec.json.encode(period) + b"\n"
        with self._queue:
            self._unwritten.append(line)
            self._unwritten_bytes += len(line)
            while self._unwritten_bytes > self._file.bytes_max and len(self._unwritten) > 1:
                self._unwritten_bytes -= len(self._unwritten.popleft())
                self._dropped += 1

    def write(self) -> None:
        """Bring what has ended into the file, if there is one; in any thread. What fails is tried again the next time."""
        file = self._file
        if file is None:
            return
        with self._writing:  # a thread may be at it while the daemon ends
            while lines := self._lines():
                try:
                    count = file.write(lines)
                except OSError as error:
                    if not self._failed:
                        log.warning("the tenants' accounts cannot be written: %s", error)
                    self._failed = True
                    return
                with self._queue:
                    for line in lines[:count]:
                        if self._unwritten and self._unwritten[0] is line:
                            self._unwritten.popleft()
                            self._unwritten_bytes -= len(line)
            with self._queue:
                dropped, self._dropped = self._dropped, 0
            if self._failed:
                log.warning(
                    "the tenants' accounts are written again; the file lacks %d periods", dropped
                )
            self._failed = False

    # ---- for operators -------------------------------------------------------------------------------

    async def accounts(self, m: operator_wire.ListAccounts) -> PeriodRows:
        """Rows of the account, of the file and of memory. Raises `LimitExceeded` while too many others ask."""
        if self._waiting >= QUERIES_WAITING_MAX:
            raise LimitExceeded(
                f"{QUERIES_WAITING_MAX} others are asking for tenants' accounts: ask again later"
            )
        self._waiting += 1
        try:
            async with self._asking:
                return await self._account(m)
        finally:
            self._waiting -= 1

    async def _account(self, m: operator_wire.ListAccounts) -> PeriodRows:
        now = self._numbered(self._accounts.open_period())
        # Its numbers go on changing while a thread is at it.
        open_ = [decode_period(msgspec.json.encode(now))] if now.seconds > 0 else []
        kept = list(self._kept)
        # What is in memory is not taken from the file, into which it may be written meanwhile.
        before = kept[0].sequence if kept else now.sequence
        lines: Iterator[bytes] = iter(self._lines())
        files: list[BinaryIO] = []
        failed: list[OSError] = []
        answer = _Answer(m, now)
        try:
            if self._file is not None and m.from_sequence < before:
                files, failed = await asyncio.to_thread(self._file.open)
                needed = await asyncio.to_thread(_needed, files, m.from_sequence)
                lines = chain(_lines_of(needed, failed), lines)
            periods = chain(_chosen(lines, m, before), kept, open_)
            while await asyncio.to_thread(answer.take, periods, LINES_TOGETHER):
                pass
        finally:
            for file in files:
                file.close()
        if failed and not self._unreadable:
            log.warning("tenants' accounts in the file cannot be read: %s", failed[0])
        self._unreadable = bool(failed)
        return answer.rows(incomplete=bool(failed))

    def receipts(self, m: operator_wire.ListReceipts, node: str) -> Receipts:
        """Receipts of requests on this node, by its name, oldest first."""
        tenants, digest, count = set(m.tenants), m.digest.hex(), max(1, m.count)
        found = self._accounts.receipts(
            lambda receipt: (
                m.since_s <= receipt.begun_s < m.until_s
                and (not tenants or receipt.tenant in tenants)
                and (not digest or receipt.namespace == digest)
                and m.request in receipt.request
            )
        )
        count = min(count, RECEIPTS_ASKED_MAX)
        items = [
            ReceiptItem(
                node=node,
                **{k: v for k, v in msgspec.structs.asdict(each).items() if k != "booked"},
                **msgspec.structs.asdict(each.booked),
            )
            for each in found[-count:]
        ]
        return Receipts(items, len(found) > count)

    def _numbered(self, period: Period) -> Period:
        """With its sequence number."""
        period.sequence = self._sequence
        return period

    def _lines(self) -> list[bytes]:
        with self._queue:
            return list(self._unwritten)


class _Answer:
    """Collects rows until there are enough, or sums them up."""

    def __init__(self, m: operator_wire.ListAccounts, now: Period) -> None:
        """now: the open period."""
        self._m = m
        self._tenants = set(m.tenants)
        self._digest = m.digest.hex()
        self._open = now.sequence
        self._now = now
        self._rows: list[AccountItem] = []
        self._totals: dict[tuple[str, str], Row] = {}
        self._total_rows_of: dict[str, int] = {}
        self._covered: dict[tuple[str, str], tuple[float, float, float, bool, int]] = {}
        self._count = min(max(1, m.count), ROWS_ASKED_MAX)
        self._next: tuple[int, int] | None = None

    def take(self, periods: Iterator[Period], most: int) -> bool:
        """Some of them; whether there may be more."""
        m = self._m
        for _ in range(most):
            period = next(periods, None)
            if period is None:
                return False
            if period.sequence < m.from_sequence or not m.since_s <= period.begin_s < m.until_s:
                continue
            first = m.from_row if period.sequence == m.from_sequence else 0
            for index, row in enumerate(period.rows):
                if index < first or (self._tenants and row.tenant not in self._tenants):
                    continue
                if self._digest and row.namespace != self._digest:
                    continue
                if m.total:
                    self._add(period, row)
                elif len(self._rows) < self._count:
                    is_open = period.sequence == self._open
                    times = period.begin_s, period.end_s, period.seconds, is_open
                    self._rows.append(_item(period, period.number, times, row))
                else:
                    self._next = (period.sequence, index)
                    return False
        return True

    def _add(self, period: Period, row: Row) -> None:
        name = (row.tenant, row.namespace)
        if name not in self._totals and row.namespace:
            count = self._total_rows_of.get(row.tenant, 0)
            if count >= ROWS_OF_TOTAL_MAX or len(self._totals) >= ROWS_ASKED_MAX:
                name = (row.tenant, "")
            else:
                self._total_rows_of[row.tenant] = count + 1
        known = self._totals.get(name)
        if known is None:
            known = self._totals[name] = Row(*name, row.model if name[1] else "")
            self._covered[name] = (period.begin_s, period.end_s, 0.0, False, 0)
        known.booked.add(row.booked)
        begin_s, end_s, seconds, is_open, last = self._covered[name]
        self._covered[name] = (
            *(min(begin_s, period.begin_s), max(end_s, period.end_s)),
            # Several rows of a period may be in one of these.
            seconds + (period.seconds if period.sequence != last else 0.0),
            *(is_open or period.sequence == self._open, period.sequence),
        )

    def rows(self, *, incomplete: bool) -> PeriodRows:
        if self._m.total:
            rows = [
                _item(self._now, 0, self._covered[name][:4], row)
                for name, row in sorted(self._totals.items())
            ]
            return PeriodRows(rows, more=False, incomplete=incomplete)
        more = self._next is not None
        return PeriodRows(self._rows, more, *(self._next or (0, 0)), incomplete=incomplete)


def _item(
    period: Period, number: int, times: tuple[float, float, float, bool], row: Row
) -> AccountItem:
    begin_s, end_s, seconds, is_open = times
    return AccountItem(
        node=period.node,
        incarnation=period.incarnation,
        number=number,
        begin_s=begin_s,
        end_s=end_s,
        seconds=seconds,
        open=is_open,
        tenant=row.tenant,
        namespace=row.namespace,
        model=row.model,
        **msgspec.structs.asdict(row.booked),
    )


def _chosen(lines: Iterator[bytes], m: operator_wire.ListAccounts, before: int) -> Iterator[Period]:
    """Those that may have wanted rows, before a sequence number. What is no line is skipped: somebody has edited it."""
    names = [b'"tenant":' + msgspec.json.encode(tenant) + b"," for tenant in m.tenants]
    digest = b'"namespace":' + msgspec.json.encode(m.digest.hex()) if m.digest else b""
    last = m.from_sequence - 1
    for line in lines:
        head = _head(line)
        # Also those that are there twice: a line was written after it was looked at.
        if head is None or not last < head.sequence < before:
            continue
        last = head.sequence
        if not m.since_s <= head.begin_s < m.until_s or digest not in line:
            continue
        if names and not any(name in line for name in names):
            continue
        with contextlib.suppress(ProtocolError):
            yield decode_period(line)


def _head(line: bytes) -> _Head | None:
    """Without a look at its rows. No text in them can look like this: its quotes are escaped."""
    begin, end = line.find(b',"rows":['), line.rfind(b',"sequence":')
    if not 0 <= begin < end:
        return None
    try:
        return _decode_head(line[:begin] + line[end:])
    except ProtocolError:
        return None


def _needed(files: list[BinaryIO], sequence: int) -> list[BinaryIO]:
    """Without most of what is before this period, whose lines ascend: without whole files, and in the first one left
    from a line on that is not after it.
    """
    try:
        while len(files) > 1 and _begins_by(files[1], 0, sequence):
            files = files[1:]
        for file in files[:1]:
            begin, end = 0, file.seek(0, os.SEEK_END)
            while end - begin > BISECTED_BYTES:
                middle = (begin + end) // 2
                file.seek(middle)
                file.readline()
                line_at = file.tell()
                if line_at < end and _begins_by(file, line_at, sequence):
                    begin = line_at
                else:
                    end = middle
            file.seek(begin)
    except OSError:
        for file in files:
            file.seek(0)  # its lines are tried, and it is told
    return files


def _begins_by(file: BinaryIO, at: int, sequence: int) -> bool:
    """Whether the line there is not after this period. The file is there again afterwards."""
    file.seek(at)
    head = _head(file.readline())
    file.seek(at)
    return head is not None and head.sequence <= sequence


def _lines_of(files: Iterable[BinaryIO], failed: list[OSError]) -> Iterator[bytes]:
    """All lines. What cannot be read goes to `failed`."""
    for file in files:
        try:
            yield from file
        except OSError as error:
            failed.append(error)


def _last_sequence(path: Path) -> int:
    """Of the last line of a file; 0: there is none, or nobody can read it."""
    try:
        with path.open("rb") as opened:
            end = opened.seek(0, os.SEEK_END)
            opened.seek(_after_newline(opened, end - 1))
            head = _head(opened.readline())
    except OSError:
        return 0
    return 0 if head is None else head.sequence


def _drop_torn_line(path: Path) -> None:
    """A last line that a crash has cut off never was one."""
    with path.open("r+b") as opened:
        size = opened.seek(0, os.SEEK_END)
        at = _after_newline(opened, size)
        if at < size:
            opened.truncate(at)


def _after_newline(opened: BinaryIO, end: int) -> int:
    """Where the line begins that goes on at `end`."""
    while end > 0:
        begin = max(0, end - (1 << 16))
        opened.seek(begin)
        found = opened.read(end - begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0

"""Tenants' accounts in periods, in memory and in a file, and what operators are told of them. Event loop only.

Periods end with the minute, as all nodes' do, and when the daemon ends. Those of the last hour are in memory; with a
`data_dir` each is written to the file when it has ended, one JSON object a line (`kvpool.telemetry.receipts.Period`).
So a daemon that is killed loses the period that was open, and the file shows that: the next line has another incarnation.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

import msgspec

from kvpool.daemon.core.accounts import Accounts
from kvpool.daemon.ops.audit_file import files_of
from kvpool.decoding import JsonDecoder
from kvpool.errors import ProtocolError
from kvpool.telemetry.receipts import (
    PERIOD_S,
    Period,
    PeriodRow,
    PeriodRows,
    Receipts,
    Row,
    decode_period,
)
from kvpool.wire import operator as operator_wire

FILE = "receipts.jsonl"
FILES = 4
KEPT = 60  # periods in memory
UNWRITTEN_MAX = 1440  # while the file cannot be written
ROWS_ASKED_MAX = 10_000
RECEIPTS_ASKED_MAX = 1000
LINES_TOGETHER = 200  # read in one go, in a thread beside the event loop

log = logging.getLogger("kvpool.daemon")


class _Span(msgspec.Struct, frozen=True):
    """The fields of a line by which it is chosen."""

    begin_s: float
    end_s: float


_decode_span = JsonDecoder[_Span](_Span, "a line of the receipts' file")


class ReceiptsFile:
    """The periods that have ended, oldest first, in `FILES` files of equal size. One thread at a time writes.

    nbytes: of all files. Raises OSError where there is no such folder.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        self._path = folder / FILE
        self._bytes_max = max(1, nbytes // FILES)
        with contextlib.suppress(FileNotFoundError):
            _drop_torn_line(self._path)

    def write(self, periods: Iterable[Period]) -> None:
        """Append them, durably. Raises OSError; then all of them may be there, or a part that the next call replaces."""
        path = self._path
        if path.exists() and path.stat().st_size >= self._bytes_max:
            for number in range(FILES - 1, 0, -1):
                newer = path.with_name(f"{path.name}.{number - 1}") if number > 1 else path
                if newer.exists():
                    newer.replace(path.with_name(f"{path.name}.{number}"))
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        fd = os.open(path, flags, 0o600)
        try:
            before = os.fstat(fd).st_size
            data = b"".join(msgspec.json.encode(period) + b"\n" for period in periods)
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
                os.fsync(fd)
            except OSError:
                os.ftruncate(fd, before)
                raise
        finally:
            os.close(fd)

    def read(self, since_s: float, until_s: float, after_s: float) -> Iterator[Period]:
        """Periods that began in this time and ended after `after_s`. What is no line is skipped: somebody has edited it."""
        for file in files_of(self._path):
            try:
                if file.stat().st_mtime < max(since_s, after_s) - PERIOD_S:
                    continue
                with file.open("rb") as opened:
                    for line in opened:
                        try:
                            span = _decode_span(line)
                            if since_s <= span.begin_s < until_s and span.end_s > after_s:
                                yield decode_period(line)
                        except ProtocolError:
                            continue
            except FileNotFoundError:
                continue  # it was rotated away


class AccountPeriods:
    """See the module. wall: seconds since 1970. file: None: in memory only."""

    def __init__(
        self, accounts: Accounts, file: ReceiptsFile | None, wall: Callable[[], float]
    ) -> None:
        self._accounts = accounts
        self._file = file
        self._wall = wall
        self._kept: deque[Period] = deque(maxlen=KEPT)
        self._unwritten: deque[Period] = deque(maxlen=UNWRITTEN_MAX)
        self._failed = False
        self._writing = threading.Lock()

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
        period = self._accounts.cut()
        self._kept.append(period)
        if self._file is not None:
            self._unwritten.append(period)

    def write(self) -> None:
        """Bring what has ended into the file, if there is one; in any thread. What fails is tried again the next time."""
        file = self._file
        if file is None:
            return
        with self._writing:  # a thread may be at it while the daemon ends
            periods = list(self._unwritten)
            try:
                file.write(periods)
            except OSError as error:
                if not self._failed:
                    log.warning("the tenants' accounts cannot be written: %s", error)
                self._failed = True
                return
            self._failed = False
            for period in periods:
                if self._unwritten and self._unwritten[0] is period:
                    self._unwritten.popleft()

    # ---- for operators -------------------------------------------------------------------------------

    async def accounts(self, m: operator_wire.ListAccounts) -> PeriodRows:
        """Rows of the account, of the file and of memory."""
        # What is in memory is not taken from the file, into which it may be written meanwhile.
        kept = list(self._kept)
        here = [period for period in kept if _chosen(m, period.begin_s, period.end_s)]
        now = self._accounts.open_period()
        before_s = min([period.begin_s for period in kept], default=now.begin_s)
        open_ = [now] if _chosen(m, now.begin_s, now.end_s) and now.end_s > now.begin_s else []
        # Its numbers go on changing while this waits for the file.
        open_ = [decode_period(msgspec.json.encode(period)) for period in open_]
        answer = _Answer(m, now.number if open_ else -1, now.incarnation)
        if self._file is not None and m.since_s < before_s:
            old = self._file.read(m.since_s, min(m.until_s, before_s), m.after_s)
            while not answer.full and await asyncio.to_thread(answer.take, old, LINES_TOGETHER):
                pass
        answer.take(iter(chain(here, open_)), len(here) + len(open_))
        return answer.rows()

    def receipts(self, m: operator_wire.ListReceipts) -> Receipts:
        """Receipts of requests, oldest first."""
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
        return Receipts(found[-count:], len(found) > count)


class _Answer:
    """Collects rows until there are enough, or sums them up."""

    def __init__(self, m: operator_wire.ListAccounts, open_number: int, incarnation: str) -> None:
        self._m = m
        self._tenants = set(m.tenants)
        self._digest = m.digest.hex()
        self._open = (incarnation, open_number)
        self._rows: list[PeriodRow] = []
        self._totals: dict[tuple[str, str], Row] = {}
        self._covered: dict[tuple[str, str], tuple[float, float, float]] = {}
        self._count = min(max(1, m.count), ROWS_ASKED_MAX)
        self.full = False

    def take(self, periods: Iterator[Period], most: int) -> bool:
        """Some of them; whether there may be more."""
        for _ in range(most):
            if not self._m.total and len(self._rows) >= self._count:
                self.full = next(periods, None) is not None
                return False
            period = next(periods, None)
            if period is None:
                return False
            for row in period.rows:
                if self._tenants and row.tenant not in self._tenants:
                    continue
                if self._digest and row.namespace != self._digest:
                    continue
                self._enter(period, row)
        return True

    def _enter(self, period: Period, row: Row) -> None:
        if not self._m.total:
            is_open = (period.incarnation, period.number) == self._open
            times = period.begin_s, period.end_s, period.seconds, is_open
            self._rows.append(PeriodRow(period.incarnation, period.number, *times, row))
            return
        name = (row.tenant, row.namespace)
        known = self._totals.get(name)
        if known is None:
            known = self._totals[name] = Row(row.tenant, row.namespace, row.model)
            self._covered[name] = (period.begin_s, period.end_s, 0.0)
        known.booked.add(row.booked)
        begin_s, end_s, seconds = self._covered[name]
        self._covered[name] = (
            *(min(begin_s, period.begin_s), max(end_s, period.end_s)),
            seconds + period.seconds,
        )

    def rows(self) -> PeriodRows:
        if self._m.total:
            rows = [
                PeriodRow(self._open[0], 0, *self._covered[name], False, row)
                for name, row in sorted(self._totals.items())
            ]
            return PeriodRows(rows, more=False)
        return PeriodRows(self._rows, self.full)


def _chosen(m: operator_wire.ListAccounts, begin_s: float, end_s: float) -> bool:
    return m.since_s <= begin_s < m.until_s and end_s > m.after_s


def _drop_torn_line(path: Path) -> None:
    """A last line that a crash has cut off never was one."""
    with path.open("r+b") as opened:
        size = opened.seek(0, os.SEEK_END)
        at = size
        while at > 0:
            begin = max(0, at - (1 << 16))
            opened.seek(begin)
            end = opened.read(at - begin).rfind(b"\n")
            if end >= 0:
                at = begin + end + 1
                break
            at = begin
        if at < size:
            opened.truncate(at)

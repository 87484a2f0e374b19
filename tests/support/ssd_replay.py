"""Power cuts for an SSD store: what a process really wrote is recorded, and every prefix of it replayed.

A killed process loses nothing that it wrote, so kills alone prove little. Here `strace` records the
system calls of a load with all their bytes, LMDB's own among them, and a disk is assumed that keeps only
what it was told to sync:

* what was written before a sync of its file began is there once that sync has returned; so is what
  went through a descriptor opened with O_DSYNC, once the write has returned;
* any other write is there, or not, or in part (by sectors), in any order.

Sizes are fixed before the recording begins: the store takes its space when it is made.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvpool.storage.ssd.store import SsdStore
from tests.support.servers.find import find_server
from tests.support.ssd_kills import hear
from tests.support.ssd_load import Findings, inspect

SECTOR = 512
RECORD_S = 300.0
FILES = ("segment", "index/data.mdb")
_CALLS = "openat,close,lseek,write,writev,pwrite64,pwritev,pwritev2,fdatasync,fsync"
_WRITES = {"write", "writev", "pwrite64", "pwritev", "pwritev2"}
_STRING_MAX = 8 << 20  # bytes of one buffer that strace writes out
_UNFINISHED = " <unfinished ...>"
_RESUMED = re.compile(r"<\.\.\. (\w+) resumed>.*= (-?\d+)")
_CALL = re.compile(r"(\w+)\((.*)\)\s+= (-?\d+)")
_CUT_OFF = re.compile(r"(\w+)\((.*)\)\s+= \?")  # by the end of the process
_DATA = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')


@dataclass
class Write:
    """began, ended: line numbers of the trace. synced: it was there when it ended."""

    file: str
    at: int
    data: bytes
    began: int
    ended: int
    synced: bool


@dataclass
class Recording:
    """What a load did to a store, and the store as it was before."""

    base: dict[str, bytes]
    size: int
    nbytes: int
    writes: list[Write]
    syncs: list[tuple[str, int, int]]  # file, began, ended
    said: list[tuple[int, str]]  # began, line

    def cuts(self) -> list[int]:
        """After each event: everything between two of them is the same crash."""
        marks = {mark for write in self.writes for mark in (write.began, write.ended)}
        marks.update(ended for _, _, ended in self.syncs)
        marks.update(began for began, _ in self.said)
        return sorted(marks)

    def durable(self, cut: int) -> dict[int, int]:
        """offset → version of what a user may rely on: `write` has returned."""
        blocks: dict[int, int] = {}
        for began, line in self.said:
            if began <= cut:
                hear(line, blocks)
        return blocks

    def images(self, cut: int, subsets: int, dice: random.Random) -> Iterator[dict[str, bytearray]]:
        """The files as a power cut may leave them: all that was written, only what was synced, and in between."""
        there = {file: bytearray(data) for file, data in self.base.items()}
        unsynced = []
        for write in self.writes:
            if write.began > cut:
                continue
            if self._is_durable(write, cut):
                _apply(there[write.file], write)
            else:
                unsynced.append(write)
        yield _image(there, unsynced)
        if unsynced:
            yield there
        for _ in range(subsets if unsynced else 0):
            some = [write for write in unsynced if dice.random() < 0.5]
            dice.shuffle(some)
            image = _image(there, some)
            # A write that is at work when the power goes may be there in part. So may others, yet to
            # LMDB a meta page is a sector that is written whole or not at all.
            if torn := [write for write in unsynced if not write.synced]:
                _tear(image, dice.choice(torn), dice)
            yield image

    def _is_durable(self, write: Write, cut: int) -> bool:
        if write.synced:
            return write.ended <= cut
        return any(
            file == write.file and began > write.ended and ended <= cut
            for file, began, ended in self.syncs
        )


def _apply(data: bytearray, write: Write) -> None:
    _put(data, write.at, write.data)


def _put(data: bytearray, at: int, piece: bytes) -> None:
    """As a file has it: a write behind its end leaves a hole, which reads as zeros."""
    data.extend(bytes(max(0, at - len(data))))
    data[at : at + len(piece)] = piece


def _image(there: dict[str, bytearray], writes: list[Write]) -> dict[str, bytearray]:
    image = {file: bytearray(data) for file, data in there.items()}
    for write in writes:
        _apply(image[write.file], write)
    return image


def _tear(image: dict[str, bytearray], write: Write, dice: random.Random) -> None:
    for at in range(0, len(write.data), SECTOR):
        if dice.random() < 0.5:
            _put(image[write.file], write.at + at, write.data[at : at + SECTOR])


def inspect_image(
    recording: Recording, image: dict[str, bytearray], cut: int, folder: Path
) -> Findings:
    """Open the store on an image, in `folder`, and read all of it. Asserts that the index was whole."""
    (folder / "index").mkdir(parents=True, exist_ok=True)
    for file, data in image.items():
        (folder / file).write_bytes(data)
    store = SsdStore.open(folder, recording.size, direct=False, threads=1)
    try:
        found = inspect(store, recording.nbytes, recording.durable(cut))
        assert not store.stats().index_lost, "a power cut has damaged the index"
    finally:
        store.close()
    return found


def record(
    folder: Path, size: int, nbytes: int, batches: int, threads: int, *, packed: bool = False
) -> Recording:
    """Run a load on a new store in `folder`, under strace.

    strace may be installed first; raises `ConfigError` where that cannot be.
    """
    strace = find_server("strace")
    store = folder / "store"
    SsdStore.open(store, size, threads=1).close()
    base = {file: (store / file).read_bytes() for file in FILES}
    trace = folder / "trace"
    subprocess.run(
        [
            *(strace, "-f", "-y", "-xx", "-s", str(_STRING_MAX), "-o", str(trace)),
            *("-e", f"trace={_CALLS}", "-e", "signal=none", "--"),
            *(sys.executable, "-m", "tests.support.ssd_load", str(store)),
            *map(str, (size, nbytes, 1, batches, threads, int(packed))),
        ],
        stdout=subprocess.PIPE,
        check=True,
        timeout=RECORD_S,
    )
    recording = Recording(base, size, nbytes, [], [], [])
    parser = _Parser(recording, store)
    with trace.open() as lines:
        parser.parse(lines)
    for file in FILES:  # the model is complete: it ends where the disk has ended
        there = (store / file).read_bytes()
        recording.writes += [
            write
            for write in parser.cut_off
            if write.file == file and there.startswith(write.data, write.at)
        ]
        whole = bytearray(base[file])
        for write in recording.writes:
            if write.file == file:
                _apply(whole, write)
        differs = next(
            (at for at, (x, y) in enumerate(zip(whole, there, strict=False)) if x != y), -1
        )
        assert bytes(whole) == there, (
            f"the record of {file} is not complete: {len(whole)} and {len(there)} bytes, differing from {differs} on"
        )
    return recording


class _Parser:
    """Lines of `strace -f -y -xx`: "PID call(fd<path>, ...) = result", or that in two parts."""

    def __init__(self, recording: Recording, store: Path) -> None:
        self._recording = recording
        self._names = {_hex(str(store.resolve() / file)): file for file in FILES}
        self._begun: dict[str, tuple[int, str]] = {}  # thread → line and text of its call
        self._places: dict[str, int] = {}  # descriptor → where `write` goes on
        self._dsync: set[str] = set()
        self.cut_off: list[
            Write
        ] = []  # the process ended meanwhile: nobody knows whether they were done

    def parse(self, lines: Iterator[str]) -> None:
        number = 0
        for number, line in enumerate(lines, 1):
            thread, text = line.rstrip("\n").split(None, 1)
            if text.endswith(_UNFINISHED):
                self._begun[thread] = (number, text.removesuffix(_UNFINISHED))
            elif match := _RESUMED.match(text):
                began, start = self._begun.pop(thread)
                call, _, rest = start.partition("(")
                self._take(call, rest, int(match[2]), began, number)
            elif match := _CALL.match(text):
                self._take(match[1], match[2], int(match[3]), number, number)
            elif match := _CUT_OFF.match(text):
                self._begun[thread] = (number, f"{match[1]}({match[2]}")
        for began, start in self._begun.values():
            call, _, rest = start.partition("(")
            if call in _WRITES and (file := self._file(rest)):
                data = _data(rest)
                at = self._place(call, rest, rest.partition("<")[0], len(data))
                self.cut_off.append(Write(file, at, data, began, number + 1, synced=False))

    def _take(self, call: str, rest: str, result: int, began: int, ended: int) -> None:
        fd = rest.partition("<")[0]
        file = self._file(rest)
        if call == "openat":
            # The path is an argument here, with the result behind it: found by its name.
            if "O_DSYNC" in rest or "O_SYNC" in rest:
                self._dsync.add(str(result))
        elif call == "close":
            self._dsync.discard(fd)
        elif call == "write" and fd == "1":
            lines = _data(rest).decode().splitlines()
            self._recording.said += [(began, line) for line in lines]
        elif file is None:
            return
        elif call in {"fdatasync", "fsync"}:
            assert result == 0, "a sync failed while it was recorded"
            self._recording.syncs.append((file, began, ended))
        elif call == "lseek":
            self._places[fd] = result
        else:
            data = _data(rest)
            assert result == len(data), f"{call} did {result} of {len(data)} bytes"
            at = self._place(call, rest, fd, len(data))
            self._recording.writes.append(Write(file, at, data, began, ended, fd in self._dsync))

    def _file(self, rest: str) -> str | None:
        return next((file for name, file in self._names.items() if f"<{name}>" in rest), None)

    def _place(self, call: str, rest: str, fd: str, nbytes: int) -> int:
        if call in {"write", "writev"}:
            at = self._places[fd]
            self._places[fd] = at + nbytes
            return at
        arguments = rest.rstrip(")").split(", ")
        return int(arguments[-2 if call == "pwritev2" else -1])


def _hex(text: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in text.encode())


def _data(rest: str) -> bytes:
    return b"".join(bytes.fromhex(piece.replace("\\x", "")) for piece in _DATA.findall(rest))

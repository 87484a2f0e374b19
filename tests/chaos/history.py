"""What happened in a run, as records in a file: one JSON object a line, in any order.

Times are seconds of CLOCK_MONOTONIC, which all processes of a machine share. Each process writes a file of its own,
by `Writer`; `read` joins them. Records are values, and say nothing about right or wrong: the checker does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec


class Record(msgspec.Struct, frozen=True, tag_field="kind", tag=True, kw_only=True):
    """at: when."""

    at: float


class Run(Record, frozen=True):
    """The run began."""

    seed: int
    seconds: float
    nodes: list[str]


class Begin(Record, frozen=True):
    """A client of a node begins an operation on the first blocks of a prompt.

    deadline: by which it was promised an answer.
    """

    operation: str
    client: str
    node: str
    does: str
    deadline: float
    prompt: int
    blocks: int


class End(Record, frozen=True):
    """The operation is over.

    answered: when the pool had answered, before the client looked at what it got.
    blocks: of the prompt's prefix, or as many as were stored. error: what was raised; expected: a `KvpoolError` that
    may be raised while something fails.
    seen: part, index in the prompt and digest of what was read under a lease that held until it was read.
    starved_s: how long the client's thread was ready to run and had no core.
    """

    operation: str
    answered: float
    blocks: int = 0
    error: str = ""
    expected: bool = True
    seen: list[tuple[int, int, str]] = []
    starved_s: float = 0.0


class FaultBegan(Record, frozen=True):
    """Something is broken from now on. what: of `plan.KINDS`, on which target."""

    fault: int
    what: str
    target: str


class FaultEnded(Record, frozen=True):
    """The fault is healed: what was killed serves again, what was cut is joined."""

    fault: int


class Started(Record, frozen=True):
    """A process begins. role: daemon, worker, client, etcd, redis."""

    pid: int
    who: str
    role: str


class Serving(Record, frozen=True):
    """A daemon said that it is ready."""

    pid: int
    who: str


class Ordered(Record, frozen=True):
    """The run is about to send a signal."""

    pid: int
    who: str
    signal: int


class Exited(Record, frozen=True):
    """A process ended. status: as of `subprocess`; negative: by a signal."""

    pid: int
    who: str
    role: str
    status: int


class Starved(Record, frozen=True):
    """How long a process, or all of a node, was ready to run and had no core: the sum since it began."""

    who: str
    total_s: float


class Held(Record, frozen=True):
    """A node said that it holds the first blocks of a prompt whole, in memory; the directory knows."""

    node: str
    prompt: int
    blocks: int


class Measured(Record, frozen=True):
    """What a process, or a node, has. quiet: nobody uses it any more, and it had time to put all away; else it has just
    begun, and nobody has used it yet. amounts: by name.
    """

    who: str
    role: str
    pid: int
    quiet: bool
    amounts: dict[str, int]


class Said(Record, frozen=True):
    """A daemon wrote something that only a defect makes it write."""

    who: str
    line: str


AnyRecord = (
    Run
    | Begin
    | End
    | FaultBegan
    | FaultEnded
    | Started
    | Serving
    | Ordered
    | Exited
    | Starved
    | Held
    | Measured
    | Said
)
Kind = TypeVar("Kind", bound=Record)


class Writer:
    """Appends records to a file, each in one write: what a process wrote before it was killed is there. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._lock = threading.Lock()

    def __call__(self, record: Record) -> None:
        line = msgspec.json.encode(record) + b"\n"
        with self._lock:
            self._file.write(line)

    def close(self) -> None:
        with self._lock:
            self._file.close()


def read(paths: Iterable[Path]) -> list[Record]:
    """All records, by time. A last line that its writer did not end, since it was killed, is left out."""
    decoder = msgspec.json.Decoder(AnyRecord)
    found: list[Record] = []
    for path in paths:
        lines = path.read_bytes().split(b"\n")
        found += [decoder.decode(line) for line in lines[:-1]]
    return sorted(found, key=lambda record: record.at)


def of(kind: type[Kind], records: Iterable[Record]) -> Iterator[Kind]:
    """The records of one kind."""
    return (record for record in records if isinstance(record, kind))

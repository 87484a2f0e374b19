"""Recordings: traces that a router writes of what it serves, `kvpool router --record FILE`.

One JSON object a line, of a request that has ended, in the order of their ends; the form of Mooncake's traces with
more fields (`RecordedRequest`). No I/O but `read_recording`'s.

    {"kvpool_trace":1,"recording":"9f…","timestamp":1250.5,"input_length":130,"output_length":7,"hash_ids":[…],…}

Ids are hashes with a secret that the router made at its start and has never written: equal ones are equal within one
recording, and say nothing elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

import msgspec

from kvpool.decoding import JsonDecoder
from kvpool.errors import InvalidRequest, ProtocolError
from kvpool.plain_text import plain
from kvpool.scheduler.values import Request
from kvpool.simulator.traces import BLOCK_TOKENS, Entry, arrivals, read_trace, step_of

MARKER = b'{"kvpool_trace":'
"""How each line of a recording begins."""
LINE_BYTES_MAX = 64 << 20
ID_MAX = (1 << 63) - 1
TOKENS_MAX = 1 << 40
MS_MAX = 1e15

_Tokens = Annotated[int, msgspec.Meta(ge=0, le=TOKENS_MAX)]
_Ms = Annotated[float, msgspec.Meta(ge=0, le=MS_MAX)]
_BlockId = Annotated[int, msgspec.Meta(ge=0, le=ID_MAX)]
_Name = Annotated[str, msgspec.Meta(max_length=32)]


class RecordedRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of a recording. Lengths and `cached_tokens` are tokens; times are ms.

    recording: an id, the same in all lines of one. timestamp: of its arrival, since the recording began. output_length:
    what was generated until its end. block_tokens: tokens that an id stands for, with all before them. hash_ids: of the
    prompt, one a block begun; what does not fill a block has an id of its own. Empty: it is not known how engines hash.
    tenant, session, agent: ids; empty: it had none. outcome: as in the metric `kvpool_router_requests_total`.
    ttft_ms: None: it had no first token, or the answer was not streamed. cached_tokens: of the prompt, as the engine said
    that computed its beginning; None: it did not.
    """

    version: Literal[1] = msgspec.field(name="kvpool_trace")
    recording: _Name
    timestamp: _Ms
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: tuple[_BlockId, ...]
    block_tokens: _Tokens
    model: str
    outcome: _Name
    duration_ms: _Ms
    ttft_ms: _Ms | None = None
    cached_tokens: _Tokens | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(1 << 31), le=1 << 31)] = 0
    tenant: _Name = ""
    session: _Name = ""
    agent: _Name = ""


_decode = JsonDecoder[RecordedRequest](RecordedRequest, "a line of a recording")


def line_of(request: RecordedRequest) -> bytes:
    """A line, with its end."""
    return msgspec.json.encode(request) + b"\n"


def parse_line(line: bytes) -> RecordedRequest:
    """The inverse. Raises `ProtocolError`."""
    found = _decode(line)
    if found.hash_ids:
        size = found.block_tokens
        blocks = -(-found.input_length // size) if size else 0
        if len(found.hash_ids) != blocks:
            raise ProtocolError(
                f"not a line of a recording: {found.input_length} tokens in blocks of {size} need {blocks} hash_ids, "
                f"and there are {len(found.hash_ids)}"
            )
    return found


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace to simulate. step_s: in what steps it tells times; 0: they are exact.

    without_hashes, without_answer: requests of a recording that are left out, since nothing is known of their blocks, or
    nothing was generated. models: that a recording has; None of other traces.
    """

    entries: list[Entry]
    block_tokens: int = BLOCK_TOKENS
    step_s: float = 0.0
    without_hashes: int = 0
    without_answer: int = 0
    models: tuple[str, ...] = ()

    def requests(self, seed: int, scale: float = 1.0) -> list[Request]:
        """As they are to arrive, see `arrivals`."""
        return arrivals(
            *(self.entries, seed, scale), step_s=self.step_s, block_tokens=self.block_tokens
        )

    @property
    def said(self) -> str:
        """What its reader should know; empty: nothing."""
        parts = []
        if self.without_hashes or self.without_answer:
            parts.append(
                f"left out of {len(self.entries) + self.without_hashes + self.without_answer:,} requests: "
                f"{self.without_hashes:,} without block hashes, {self.without_answer:,} without an answer"
            )
        if len(self.models) > 1:
            names = plain(", ".join(self.models))
            parts.append(f"{len(self.models)} models are simulated as one: {names}")
        return "; ".join(parts)


def first_of(trace: str, limit: int | None) -> Trace:
    """The first requests of a trace file, at most `limit`. Raises `InvalidRequest`."""
    path = Path(trace)
    if not path.is_file():
        raise InvalidRequest(f"there is no trace at {trace}")
    found = load_trace(path)
    return replace(found, entries=found.entries[:limit])


def load_trace(path: Path) -> Trace:
    """A recording, or a trace in Mooncake's format. Raises `InvalidRequest`, with the line that is wrong."""
    with path.open("rb") as file:
        recorded = file.read(len(MARKER)) == MARKER
    if recorded:
        return read_recording(path)
    entries = read_trace(path)
    return Trace(entries, step_s=step_of(entries))


def read_recording(path: Path) -> Trace:
    """All that can be replayed, in the order of arrival. Raises `InvalidRequest`, with the line that is wrong."""
    requests = recorded_requests(path)
    recording, block_tokens = "", 0
    kept: list[RecordedRequest] = []
    without_hashes = without_answer = 0
    for where, request in requests:
        recording = recording or request.recording
        if request.recording != recording:
            raise InvalidRequest(
                f"{where}: it is of another recording, whose times and ids are others: replay one at a time"
            )
        if not request.output_length or not request.input_length:
            without_answer += 1
        elif not request.hash_ids:
            without_hashes += 1
        elif request.block_tokens != (block_tokens or request.block_tokens):
            raise InvalidRequest(
                f"{where}: a prompt in blocks of {request.block_tokens} tokens after those of {block_tokens}: keep the "
                "lines of models that have the same"
            )
        else:
            block_tokens = request.block_tokens
            kept.append(request)
    kept.sort(key=lambda request: request.timestamp)
    models = tuple(sorted({request.model for request in kept}))
    found = Trace(
        [_entry(request) for request in kept],
        *(block_tokens, 0.0, without_hashes, without_answer, models),
    )
    if not kept:
        raise InvalidRequest(f"no request of {path} can be replayed: {found.said or 'it has none'}")
    return found


def recorded_requests(path: Path) -> Iterator[tuple[str, RecordedRequest]]:
    """Each line of a recording, with its place for messages. The end of a line that a crash has cut off is left out.

    Raises `InvalidRequest`, with the line that is wrong.
    """
    with path.open("rb") as file:
        for number, line in enumerate(_lines(file, path), 1):
            where = f"{path}, line {number}"
            try:
                request = parse_line(line)
            except ProtocolError as error:
                if not line.endswith(b"\n"):
                    return
                raise InvalidRequest(f"{where}: {error}") from None
            yield where, request


def _lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    for number, line in enumerate(iter(partial(file.readline, LINE_BYTES_MAX + 1), b""), 1):
        if len(line) > LINE_BYTES_MAX:
            raise InvalidRequest(f"{path}, line {number}: it has more than {LINE_BYTES_MAX} bytes")
        yield line


def _entry(request: RecordedRequest) -> Entry:
    return Entry(
        request.timestamp / 1e3,
        request.input_length,
        request.output_length,
        request.hash_ids,
        session=request.session,
        agent=request.agent,
        tenant=request.tenant,
        priority=request.priority,
    )

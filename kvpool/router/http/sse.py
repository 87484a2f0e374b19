"""Forwards a stream of server-sent events. No I/O.

Only whole events are forwarded, byte for byte: if an engine is cut off in the middle of one, the
client has complete events, and an error can follow. Only the end of a stream is parsed; of the others it is seen that
they are events. What has no data, such as a comment, is no event: it is dropped before the first event.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from kvpool.decoding import JsonDecoder
from kvpool.errors import KvpoolError, ProtocolError

EVENT_BYTES_MAX = 16 << 20
ENDS = (b"\n\n", b"\r\n\r\n")
FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":", b"\n", b"\r\n")
"""An event begins with one of these; `:` is a comment, and an empty line is none."""
_NO_EVENT = re.compile(rb"\n\n(?!\Z|" + b"|".join(map(re.escape, FIELDS)) + b")")
DONE = b"data: [DONE]"
NAMED = b"event:"
LAST_EVENTS = tuple(
    b"event: " + name
    for name in (
        b"message_stop",
        b"response.completed",
        b"response.incomplete",
        b"response.failed",
        b"error",
    )
)
"""Of streams whose events have names, and that do not end with `DONE`: `/v1/messages`, `/v1/responses`."""
DATA = b"data:"
_DATA = re.compile(rb"^data:", re.MULTILINE)
ERROR = b'"error"'
_ERROR = re.compile(
    rb'^(?:data:\s*\{\s*"error"\s*:\s*[{"]|event: (?:error|response\.failed)\b)', re.MULTILINE
)
"""The beginning of a line of an event that is an error. In JSON it is never part of a text."""
_COMMENT = re.compile(rb"^:[^\n]*\n\s*", re.MULTILINE)
USAGE = b'"usage":'
SHOWN_BYTES = 50


class EventTooLong(KvpoolError):
    """An event exceeds the limit."""

    code = "event_too_long"


class NoEvent(KvpoolError):
    """What came is no event."""

    code = "no_event"


class EventStream:
    """One answer. events: forwarded so far. done: whether the engine has marked its end. failed: whether an error was
    one of the events.
    """

    def __init__(self) -> None:
        self.events = 0
        self.done = False
        self.failed = False
        self._rest = bytearray()
        self._last = b""

    @property
    def waiting(self) -> int:
        """Bytes that are not forwarded yet."""
        return len(self._rest)

    def feed(self, data: bytes) -> bytes:
        """Bytes that can be forwarded now: whole events, maybe none, and what comes with events.

        Raises `EventTooLong` and `NoEvent`.
        """
        if self._rest:
            # Only what is new is searched: an event may come in very many pieces.
            seen = max(len(self._rest) - len(ENDS[-1]) + 1, 0)
            self._rest += data
            end = _end(self._rest, seen)
            data = bytes(self._rest[:end])
            del self._rest[:end]
        elif not data.endswith(b"\n\n"):
            end = _end(data, 0)
            self._rest += data[end:]
            data = data[:end]
        if self.waiting > EVENT_BYTES_MAX:
            raise EventTooLong(f"an event has more than {EVENT_BYTES_MAX >> 20} MiB")
        if not data:
            return data
        if (wrong := _no_event(data)) is not None:
            raise NoEvent(f"its stream has what is no event: {data[wrong : wrong + SHOWN_BYTES]!r}")
        if not self.events:
            data = _from_first_event(data)
        self.events += data.count(b"\n" + DATA) + data.startswith(DATA)
        if ERROR in data or NAMED in data:
            self.failed = self.failed or _ERROR.search(data) is not None
        self.done = self.done or _is_last(data)
        self._last = self._last[-EVENT_BYTES_MAX:] + data if self.done else data
        return data

    @property
    def usage(self) -> dict[str, Any]:
        """The engine's token counts in its last events; empty if there are none."""
        for line in reversed(self._last.split(b"\n")):
            if USAGE in line and line.startswith(b"data:"):
                return usage_of(line.removeprefix(b"data:"))
        return {}


def _end(data: bytes | bytearray, start: int) -> int:
    """Behind the last whole event; 0: there is none. It ends at this place or later."""
    return max(at + len(mark) if (at := data.rfind(mark, start)) >= 0 else 0 for mark in ENDS)


def _from_first_event(data: bytes) -> bytes:
    """Return these whole events from the first one with data on, or nothing."""
    found = _DATA.search(data)
    return b"" if found is None else data[_end(data[: found.start()], 0) :].lstrip(b"\r\n")


def _no_event(data: bytes) -> int | None:
    """Where something begins that is no event; None: all of these are events."""
    if not data.startswith(FIELDS):
        return 0
    found = _NO_EVENT.search(data)
    return None if found is None else found.end()


def _is_last(data: bytes) -> bool:
    """Whether the last of these whole events is the last one of an answer."""
    if b"\n:" in data:
        data = _COMMENT.sub(b"", data)
    data = data.rstrip()
    if data.endswith(DONE):
        return True
    if NAMED not in data:
        return False
    last = max(data.rfind(b"\n\n"), data.rfind(b"\n\r\n"))
    return data[max(last, 0) :].lstrip().startswith(LAST_EVENTS)


class Said(msgspec.Struct):
    """The one field of an answer that is parsed."""

    usage: dict[str, Any] | None = None


_decode_said = JsonDecoder[Said](Said, "an answer with its usage")
_decode_any = JsonDecoder[msgspec.Raw](msgspec.Raw, "JSON")


def usage_of(answer: bytes) -> dict[str, Any]:
    """The usage in an answer, or in one event of it; empty if there is none."""
    try:
        return _decode_said(answer).usage or {}
    except ProtocolError:
        return {}


def is_json(answer: bytes) -> bool:
    """Whether an answer is JSON, whatever it says."""
    try:
        _decode_any(answer)
    except ProtocolError:
        return False
    return True


def cached_tokens(usage: dict[str, Any]) -> int | None:
    """How many tokens of the prompt the engine did not compute, if reported."""
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached if isinstance(cached, int) else None


DETAILS = b'_tokens_details"'
_CACHED = re.compile(
    rb'("(?:prompt|input)_tokens_details"\s*:\s*\{[^{}]*?"cached_tokens"\s*:\s*)(\d+)'
)
"""In text that an answer quotes, the quotation marks have a backslash before them: it is never matched."""


def with_cached(data: bytes, most: int) -> bytes:
    """An answer, or whole events of it, whose usage says of no more tokens of the prompt than that they were cached."""

    def less(found: re.Match[bytes]) -> bytes:
        return found[1] + b"%d" % min(int(found[2]), most)

    return _CACHED.sub(less, data)


def error_event(error: bytes, name: str = "") -> bytes:
    """An error as the last event of a stream that had begun. name: of the event, if the stream's have names."""
    named = f"event: {name}\n".encode() if name else b""
    return named + b"data: " + error + b"\n\n"

"""Frames and versions of the protocol, and the answers that every conversation has.

A frame, on the control socket, between the daemon's processes, and ahead of bulk bytes between daemons:

    0        4           8
    +--------+-----------+---------------------------+
    | length | request   | MessagePack of one message|
    +--------+-----------+---------------------------+
      u32 LE   u32 LE      `length` bytes

`request` is chosen by who asks and repeated in the answer; 0 asks for no answer. A message is an array
whose first element is its type number; each number is given once, over all modules of this package. Here are the
answers that all have:

    type  message          direction             answer
    ----  ---------------  --------------------  ----------------
    3     Error            any answer
    4     Done             answer: a count
    21    Bytes            answer: see the question

Block keys, checksums and row numbers are packed into one bytes object each: one object a batch decodes
tens of times faster than one a block. Rows are u32 LE; `NO_ROW` stands for "nothing here".
Times that travel are durations in seconds, never time stamps.
`trace` is the W3C `traceparent` of whoever asks, or empty; what is not valid or not sampled counts as empty.

Versions: each side says in its first message which it speaks best, and the oldest that it speaks. The lower
one of the two best is spoken, and who does not speak that is refused then. From one version to the next a
message may get further fields at its end, with defaults: who is older does not look at them, who is newer
finds the defaults. Nothing else of a message changes, and none is sent to those who are too old to know it.
"""

from __future__ import annotations

import struct
from array import array
from typing import Any

import msgspec

from kvpool.errors import KvpoolError, ProtocolError, from_code

PROTOCOL_VERSION = 7
PROTOCOL_OLDEST = 6
HEADER = struct.Struct("<II")
FRAME_BYTES_MAX = 16 << 20
HELLO_BYTES_MAX = 64 << 10  # what a connection may send before it has introduced itself
KEYS_MAX = 1 << 16  # keys in one request
NO_ROW = 0xFFFFFFFF


class Message(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of all messages: an array on the wire, immutable, owned by whoever decoded it."""


def spoken(version: int, oldest: int) -> int | None:
    """The version that is spoken with somebody who speaks these; None: none is. oldest: 0 for `version`."""
    lower = min(version, PROTOCOL_VERSION)
    return lower if lower >= max(oldest or version, PROTOCOL_OLDEST) else None


def agree(version: int, oldest: int, whose: str) -> int:
    """As `spoken`. Raises `ProtocolError`. whose: "the client", "the peer"."""
    found = spoken(version, oldest)
    if found is None:
        raise ProtocolError(
            f"this side speaks protocol {_range(PROTOCOL_VERSION, PROTOCOL_OLDEST)}, {whose} "
            f"{_range(version, oldest)}: install the same or neighbouring versions of kvpool on both sides"
        )
    return found


def _range(version: int, oldest: int) -> str:
    return f"{oldest} to {version}" if 0 < oldest < version else str(version)


class Error(Message, tag=3):
    """What went wrong, by the code of `kvpool.errors`."""

    code: str
    message: str


class Done(Message, tag=4):
    """It is done; `value`: a count, where there is one."""

    value: int = 0


class Bytes(Message, tag=21):
    """Data that the request gives a meaning."""

    data: bytes


_encoder = msgspec.msgpack.Encoder()


class Decoder:
    """Bytes of one payload to a message of the given union; anything else is a `ProtocolError`."""

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(union)

    def __call__(self, payload: bytes | bytearray | memoryview) -> Any:
        try:
            return self._decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"not a message of this protocol: {error}") from None


def encode(message: Message, request: int) -> bytes:
    """One whole frame."""
    payload = _encoder.encode(message)
    if len(payload) > FRAME_BYTES_MAX:
        raise ProtocolError(
            f"a {type(message).__name__} of {len(payload)} bytes: frames are at most {FRAME_BYTES_MAX}"
        )
    return HEADER.pack(len(payload), request) + payload


def error_message(error: KvpoolError) -> Error:
    """An error as it travels."""
    return Error(error.code, str(error))


def raise_error(error: Error) -> None:
    """Raise what `error_message` has packed."""
    raise from_code(error.code, error.message)


def pack_rows(rows: list[int]) -> bytes:
    """Row numbers as u32 LE. (kvpool runs on little-endian machines only; import of this module checks.)"""
    return array("I", rows).tobytes()


if array("I", [1]).tobytes() != b"\x01\x00\x00\x00":
    raise ImportError("kvpool needs a little-endian machine with 4-byte C ints")


class FrameReader:
    """Cuts a stream into frames. Feed it what arrives; it holds at most one frame that is incomplete.

    Not thread-safe: one reader a connection.
    """

    def __init__(self, limit: int = FRAME_BYTES_MAX) -> None:
        self.limit = limit
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Whole frames as (request, payload). Raises `ProtocolError` for a frame above the limit."""
        pending = self._pending
        if pending:
            pending += data
            if len(pending) >= 8:
                length, _ = HEADER.unpack_from(pending)
                if length <= self.limit and len(pending) < 8 + length:
                    return []  # a long frame in many pieces is joined once, not once a piece
            data = bytes(pending)
            pending.clear()
        frames = []
        at, end = 0, len(data)
        while end - at >= 8:
            length, request = HEADER.unpack_from(data, at)
            if length > self.limit:
                raise ProtocolError(f"a frame of {length} bytes: the limit here is {self.limit}")
            stop = at + 8 + length
            if stop > end:
                break
            frames.append((request, data[at + 8 : stop]))
            at = stop
        if at < end:
            self._pending += data[at:]
        return frames

    @property
    def partial(self) -> bool:
        """Whether the stream stands inside a frame: an end here cuts one off."""
        return bool(self._pending)

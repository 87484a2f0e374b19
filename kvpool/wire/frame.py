"""Frames and versions of the protocol, and the answers common to every conversation.

A frame, on the control socket, between the daemon's processes, and ahead of bulk bytes between daemons:

    0        4           8
    +--------+-----------+---------------------------+
    | length | request   | MessagePack of one message|
    +--------+-----------+---------------------------+
      u32 LE   u32 LE      `length` bytes

The sender chooses `request` and the answer repeats it; 0 requests no answer. A message is an array
whose first element is its type number; each number is unique over all modules of this package. The
common answers:

    type  message          direction             answer
    ----  ---------------  --------------------  ----------------
    3     Error            any answer
    4     Done             answer: a count
    21    Bytes            answer: see the request

Block keys, checksums and row numbers are packed into one bytes object each: one object a batch decodes
tens of times faster than one a block. Rows are u32 LE; `NO_ROW` stands for "nothing here".
Times are sent as durations in seconds, never as time stamps.
`trace` is the W3C `traceparent` of the requester, or empty; invalid or unsampled ones count as empty.

Versions: each side states in its first message the newest and the oldest version that it supports. The lower
of the two newest is used; a side that does not support it refuses.
"""

from __future__ import annotations

import struct
from array import array
from typing import Annotated, Any

import msgspec

from kvpool.decoding import MsgpackDecoder
from kvpool.errors import KvpoolError, ProtocolError, from_code
from kvpool.types import DIGEST_BYTES, PARTS_MAX

PROTOCOL_VERSION = 1
PROTOCOL_OLDEST = 1
HEADER = struct.Struct("<II")
FRAME_BYTES_MAX = 16 << 20
HELLO_BYTES_MAX = 64 << 10  # what a connection may send before its handshake ends
KEYS_MAX = 1 << 16  # keys in one request, in all its namespaces together
NAMESPACES_MAX = 16  # in one request
NO_ROW = 0xFFFFFFFF
NONCE_BYTES = 32
PROOF_BYTES = 32
INTEGER_MAX = (1 << 63) - 1

# Types of fields, with their limits: a decoder refuses what is outside of them.
Integer = Annotated[int, msgspec.Meta(ge=-INTEGER_MAX, le=INTEGER_MAX)]
"""A number that its receiver checks, or only shows: who gets it wrong is told why."""
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
"""How many, how large, or which one. Sums of a few stay below `sys.maxsize`."""
Epoch = Annotated[int, msgspec.Meta(ge=0, le=INTEGER_MAX)]
Generation = Annotated[int, msgspec.Meta(ge=-1, le=INTEGER_MAX)]
"""-1: the current one."""
Integers = Annotated[list[Integer], msgspec.Meta(max_length=PARTS_MAX)]
Part = Annotated[int, msgspec.Meta(ge=0, lt=PARTS_MAX)]
Parts = Annotated[list[Part], msgspec.Meta(max_length=PARTS_MAX)]
Tickets = Annotated[list[Count], msgspec.Meta(max_length=PARTS_MAX)]
"""Reservations: one a part."""
Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
"""Names one namespace."""
AnyDigest = Annotated[bytes, msgspec.Meta(max_length=DIGEST_BYTES)]
"""The same, or empty: the message says for what."""
Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Proof = Annotated[bytes, msgspec.Meta(max_length=PROOF_BYTES)]
"""A shorter one is a wrong one, and counted as a failed login."""


class Message(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of all messages: an array on the wire, immutable, owned by the decoder."""


class ReadOnly(Message):
    """Base of requests that change nothing, or nothing when they fail.

    An unexpected error in answering one ends its connection, and the process goes on (`kvpool.wire.faults`).
    """


def spoken(version: int, oldest: int) -> int | None:
    """Return the version to use with a side that supports `oldest` to `version`, or None if there is none."""
    lower = min(version, PROTOCOL_VERSION)
    return lower if lower >= max(oldest, PROTOCOL_OLDEST) else None


def agree(version: int, oldest: int, whose: str) -> int:
    """Return what `spoken` does. Raises `ProtocolError` if that is None. whose: "the client", "the peer"."""
    found = spoken(version, oldest)
    if found is None:
        raise ProtocolError(
            f"{whose} speaks protocol {version} and none below {oldest}, this side {PROTOCOL_VERSION} and none below "
            f"{PROTOCOL_OLDEST}: install the same version of kvpool on both sides"
        )
    return found


class Error(Message, tag=3):
    """An error, by the code of `kvpool.errors`."""

    code: str
    message: str


class Done(Message, tag=4):
    """Success; `value`: a count, if there is one."""

    value: Integer = 0


class Bytes(Message, tag=21):
    """Data whose meaning depends on the request."""

    data: bytes


_encoder = msgspec.msgpack.Encoder()


class Decoder(MsgpackDecoder[Any]):
    """Bytes of one payload to a message of the given union; anything else is a `ProtocolError`."""

    def __init__(self, union: Any) -> None:
        super().__init__(union, "a message of this protocol")


def encode(message: Message, request: int) -> bytes:
    """One whole frame."""
    payload = _encoder.encode(message)
    if len(payload) > FRAME_BYTES_MAX:
        raise ProtocolError(
            f"a {type(message).__name__} has {len(payload)} bytes; the limit is {FRAME_BYTES_MAX}"
        )
    return HEADER.pack(len(payload), request) + payload


def error_message(error: KvpoolError) -> Error:
    """An error as a message."""
    return Error(error.code, str(error))


def raise_error(error: Error) -> None:
    """Raise the error that `error_message` has packed."""
    raise from_code(error.code, error.message)


def pack_rows(rows: list[int]) -> bytes:
    """Row numbers as u32 LE. (kvpool runs on little-endian machines only; import of this module checks.)"""
    return array("I", rows).tobytes()


if array("I", [1]).tobytes() != b"\x01\x00\x00\x00":
    raise ImportError("kvpool needs a little-endian machine with 4-byte C ints")


class FrameReader:
    """Splits a stream into frames. Feed it received bytes; it holds at most one incomplete frame.

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
                raise ProtocolError(f"a frame has {length} bytes; the limit here is {self.limit}")
            stop = at + 8 + length
            if stop > end:
                break
            frames.append((request, data[at + 8 : stop]))
            at = stop
        if at < end:
            self._pending += data[at:]
        return frames

    @property
    def held(self) -> int:
        """Bytes of an incomplete frame."""
        return len(self._pending)

    @property
    def partial(self) -> bool:
        """Whether the stream is inside a frame: an end here truncates one."""
        return bool(self._pending)

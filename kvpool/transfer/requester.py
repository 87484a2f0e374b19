"""The reader's half of a transfer over a stream: ask, receive into rows, verify."""

from __future__ import annotations

from typing import TypeVar

from xxhash import xxh3_128_digest

from kvpool.errors import Declined, ProtocolError, Unavailable, from_code
from kvpool.transfer.base import Deadline, Outcome, Stop, groups_of
from kvpool.transfer.memory import Memory
from kvpool.transfer.priority import Priority
from kvpool.transfer.stream import Stream
from kvpool.types import CHECKSUM_BYTES, KEY_BYTES, BlockStatus
from kvpool.wire.frame import KEYS_MAX, Bytes, Done, Error, Message
from kvpool.wire.peer import (
    Ask,
    Corrupt,
    Fetch,
    Fetched,
    LongQuestion,
    Question,
    SessionNews,
    decode_peer,
)
from kvpool.wire.worker import PullBlocks

M = TypeVar("M", bound=Message)

# The longest possible answer: a flag, a checksum and a row (over NIXL) for each key, or metadata.
ANSWER_BYTES_MAX = KEYS_MAX * (1 + CHECKSUM_BYTES + 4) + (64 << 10)


def fetch(
    stream: Stream,
    order: PullBlocks,
    first: int,
    end: int,
    memory: Memory,
    outcome: Outcome,
    stop: Stop,
    precedence: Priority,
) -> None:
    """Bring the blocks `first` to `end` of an order here over one connection.

    `outcome` is right for every block at any moment, so also when this raises: the errors of `Stream`,
    the peer's error, or `ProtocolError`. `Refused` leaves the stream usable, all others do not.
    """
    keys = order.keys[first * KEY_BYTES : end * KEY_BYTES]
    answer = exchange(
        stream,
        fetch_message(order, keys, stream.deadline),
        first + 1,
        Fetched,
    )
    indices = _present(answer, end - first)
    whole = len(indices) == end - first
    rows = order.rows[4 * first : 4 * end]
    if not whole:
        rows = b"".join([rows[4 * index : 4 * index + 4] for index in indices])
    wrong = []
    outcome.begin(first, answer.present)
    for low, high in groups_of(order, len(indices)):
        if stop.is_set:
            raise Unavailable("the transfer was cancelled")
        if order.background:
            precedence.give_way(stream.deadline.left())
        part = rows[4 * low : 4 * high]
        try:
            stream.receive_group(memory.spans(order.segment, order.stride, order.nbytes, part))
        except Declined:
            for index in indices[low:high]:
                outcome.status[first + index] = BlockStatus.MISMATCH
            raise
        blocks = memory.blocks(order.segment, order.stride, order.nbytes, part)
        digests = b"".join(map(xxh3_128_digest, blocks))
        expected = answer.checksums[low * CHECKSUM_BYTES : high * CHECKSUM_BYTES]
        if whole and digests == expected:
            outcome.arrived(first + low, digests)
            continue
        for at, index in enumerate(indices[low:high]):
            digest = digests[at * CHECKSUM_BYTES : (at + 1) * CHECKSUM_BYTES]
            if digest == expected[at * CHECKSUM_BYTES : (at + 1) * CHECKSUM_BYTES]:
                outcome.arrived(first + index, digest)
            else:
                outcome.status[first + index] = BlockStatus.MISMATCH
                wrong.append(keys[index * KEY_BYTES : (index + 1) * KEY_BYTES])
    if wrong:
        stream.send(Corrupt(order.tenant, order.digest, order.part, b"".join(wrong)), 0)


def fetch_message(order: PullBlocks, keys: bytes, deadline: Deadline) -> Fetch:
    """The request to an owner for these blocks of an order."""
    return Fetch(
        order.tenant,
        order.digest,
        order.part,
        order.nbytes,
        keys,
        deadline.left(),
        order.background,
        trace=order.trace,
    )


def ask(stream: Stream, question: Question | LongQuestion) -> Done | Bytes:
    """The peer's answer to a request. Raises as `fetch` does."""
    if isinstance(question, (Ask, SessionNews)):
        return exchange(stream, question, 1, Done)
    return exchange(stream, question, 1, Bytes)


class Refused(Exception):
    """The peer answered with an error; the connection is still usable."""

    def __init__(self, error: Error) -> None:
        super().__init__(error.message)
        # Must not be mistaken for an unreachable peer.
        unavailable = error.code == Unavailable.code
        self.error = (
            Declined(error.message) if unavailable else from_code(error.code, error.message)
        )


def exchange(stream: Stream, message: Message, request: int, kind: type[M]) -> M:
    """Send a request and return its answer, of the given kind."""
    stream.send(message, request)
    number, payload = stream.receive(ANSWER_BYTES_MAX)
    answer = decode_peer(payload)
    if number != request:
        raise ProtocolError(f"the peer answered request {number} instead of {request}")
    if isinstance(answer, Error):
        raise Refused(answer)
    if not isinstance(answer, kind):
        raise ProtocolError(
            f"the peer answered a {type(message).__name__} with a {type(answer).__name__}"
        )
    return answer


def _present(answer: Fetched, count: int) -> list[int]:
    """Indices of the blocks that follow."""
    indices = [index for index, there in enumerate(answer.present) if there]
    if len(answer.present) != count or answer.present.count(1) != len(indices):
        raise ProtocolError("a Fetched must match its Fetch: one byte per key, 0 or 1")
    if len(answer.checksums) != CHECKSUM_BYTES * len(indices):
        raise ProtocolError(
            f"a Fetched must have {CHECKSUM_BYTES} bytes of checksum for each block"
        )
    return indices

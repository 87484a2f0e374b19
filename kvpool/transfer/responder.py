"""The owner's half of a transfer, after authentication: requested blocks are lent and sent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Self

from xxhash import xxh3_128_digest

from kvpool.errors import InternalError, KvpoolError, LimitExceeded, ProtocolError, Unavailable
from kvpool.transfer.base import Deadline, LoanRows, Source, TransferLimits, check_loan, groups_of
from kvpool.transfer.memory import Memory
from kvpool.transfer.priority import PIECE_BYTES, Priority
from kvpool.transfer.stream import Closed, Stream
from kvpool.types import KEY_BYTES, PARTS_MAX, split_keys
from kvpool.wire.frame import KEYS_MAX, Message, encode, error_message
from kvpool.wire.peer import (
    Corrupt,
    Discard,
    Fetch,
    Fetched,
    LongQuestion,
    Offer,
    PartKeys,
    Question,
    decode_peer,
)
from kvpool.wire.worker import OpenLoan

CORRUPT_S = 5.0  # to verify blocks that a peer found wrong
AWAIT_S_MAX = 60.0  # whatever waiting time a peer states
AWAIT_LATE_S = 5.0  # for control's answer, beyond that
REQUEST_BYTES_MAX = KEYS_MAX * KEY_BYTES + (64 << 10)


class Budget:
    """Limit of bytes on loan at a time. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self._changed = threading.Condition()

    def take(self, amount: int, deadline: Deadline) -> None:
        """Wait for room. An amount above the limit is admitted alone.

        Raises `LimitExceeded` when the deadline comes first.
        """
        with self._changed:
            while self._taken and self._taken + amount > self._limit:
                try:
                    left = deadline.left()
                except Unavailable:
                    raise LimitExceeded(
                        f"this daemon's limit of {self._limit} bytes on loan is in use"
                    ) from None
                self._changed.wait(left)
            self._taken += amount

    def give(self, amount: int) -> None:
        with self._changed:
            self._taken -= amount
            self._changed.notify_all()


class Budgets(NamedTuple):
    """For urgent and background requests: neither blocks the other's loans."""

    urgent: Budget
    background: Budget

    @classmethod
    def of(cls, limit: int) -> Self:
        """A quarter of the limit is for the background."""
        return cls(Budget(limit - limit // 4), Budget(limit // 4))


@dataclass(eq=False)
class Conversation:
    """One peer's requests, one after the other. Belongs to the thread of its connection."""

    _stream: Stream
    _memory: Memory
    _source: Source
    _limits: TransferLimits
    _budgets: Budgets
    _precedence: Priority

    def __post_init__(self) -> None:
        self._fetched: Fetch | None = None  # the last one, whose blocks it may report as corrupt

    def hear(self) -> tuple[int, Message]:
        """Wait for a request: its number, and what it is. Raises the errors of `Stream`, and `ProtocolError`."""
        stream = self._stream
        # Longer than the peer keeps an idle connection, so that it seldom finds a closed one.
        stream.deadline = Deadline(2 * self._limits.idle_s)
        request, payload = stream.receive(REQUEST_BYTES_MAX)
        if not stream.fresh():
            raise Closed("the peer must authenticate again")
        return request, decode_peer(payload)

    def answer(self, request: int, message: Message) -> None:
        """Answer it. Raises as `hear` does."""
        stream = self._stream
        if isinstance(message, Fetch):
            self._fetched = message
            stream.deadline = Deadline(message.deadline_s)
            self._send_blocks(request, message)
        elif isinstance(message, Question):
            self._answer(request, message)
        elif isinstance(message, LongQuestion):
            self._answer_later(request, message)
        elif isinstance(message, Corrupt):
            self._report(message)
        else:
            raise ProtocolError(f"a {type(message).__name__} is not a request")

    def _answer(self, request: int, question: Question) -> None:
        stream = self._stream
        if isinstance(question, Offer):
            self._check_name(question.node)
        if isinstance(question, (Offer, Discard)):
            stream.deadline = Deadline(question.deadline_s)
        try:
            answer = encode(self._source.asked(question), request)
        except KvpoolError as error:
            self._decline(request, error)
            return
        stream.send_frame(answer)

    def _answer_later(self, request: int, question: LongQuestion) -> None:
        """Answer when there is news. A peer that has gone meanwhile ends the request."""
        stream = self._stream
        self._check_name(question.node)
        stream.deadline = Deadline(min(question.wait_s, AWAIT_S_MAX) + AWAIT_LATE_S)
        try:
            owed = self._source.answer_later(question)
        except KvpoolError as error:
            self._decline(request, error)
            return
        try:
            stream.wait_beside(owed.fileno())
            try:
                answer = encode(owed.result(), request)
            except KvpoolError as error:
                self._decline(request, error)
                return
        finally:
            owed.close()
        stream.send_frame(answer)

    def _decline(self, request: int, error: KvpoolError) -> None:
        """Answer with an error. Raises it if it is an `InternalError`, which ends the connection."""
        self._stream.send(error_message(error), request)
        if isinstance(error, InternalError):
            raise error

    def _check_name(self, node: str) -> None:
        """Raises `ProtocolError` unless this is the node whose connection it is: others rely on the name."""
        if node != self._stream.peer_node:
            raise ProtocolError("a peer asks in the name of another node")

    def _report(self, report: Corrupt) -> None:
        """Verify blocks that the peer was just sent and found wrong; report those that are.

        A peer's report alone drops nothing: its own memory or network card may be faulty.
        """
        sent = self._fetched
        if sent is None or (report.tenant, report.digest) != (sent.tenant, sent.digest):
            raise ProtocolError("a Corrupt does not match the connection's last Fetch")
        found = [part for part in sent.parts if part.part == report.part]
        if not found:
            raise ProtocolError("a Corrupt does not match the connection's last Fetch")
        if len(report.keys) % KEY_BYTES or not set(split_keys(report.keys)).issubset(
            split_keys(found[0].keys)
        ):
            raise ProtocolError("a Corrupt names blocks that were not fetched")
        self._stream.deadline = Deadline(CORRUPT_S)
        reported = PartKeys(report.part, found[0].nbytes, report.keys)
        wanted = OpenLoan(sent.tenant, sent.digest, [reported], CORRUPT_S)
        try:
            lent = self._source.open_loan(wanted)
        except KvpoolError:
            return  # nothing of it is here any more
        try:
            present, (here,) = check_loan(lent, wanted, self._memory)
            blocks = iter(
                self._memory.blocks(lent.segment, here.stride, here.nbytes, here.rows)
                if here.rows
                else []
            )
            checksums = iter(split_keys(lent.checksums))
            broken = [
                key
                for key, there in zip(split_keys(report.keys), present, strict=True)
                if there and xxh3_128_digest(next(blocks)) != next(checksums)
            ]
        finally:
            if lent.token:
                self._source.give_back(lent.token)
        if broken:
            self._source.corrupt(
                Corrupt(report.tenant, report.digest, report.part, b"".join(broken))
            )

    def _send_blocks(self, request: int, fetch: Fetch) -> None:
        """Send the wanted blocks that are present, or the reason why not."""
        try:
            size = self._size(fetch)
            budget = self._budgets.background if fetch.background else self._budgets.urgent
            budget.take(size, self._stream.deadline)
        except LimitExceeded as error:
            self._decline(request, error)
            return
        try:
            if fetch.background:
                self._lend_and_send(request, fetch)
            else:
                with self._precedence.urgent():
                    self._lend_and_send(request, fetch)
        finally:
            budget.give(size)

    def _size(self, fetch: Fetch) -> int:
        parts = fetch.parts
        if (
            not 0 < len(parts) <= PARTS_MAX
            or len({part.part for part in parts}) != len(parts)
            or any(len(part.keys) % KEY_BYTES or part.nbytes <= 0 for part in parts)
        ):
            raise ProtocolError("a Fetch has invalid parts, keys or sizes")
        count = sum(len(part.keys) for part in parts) // KEY_BYTES
        size = sum(len(part.keys) // KEY_BYTES * part.nbytes for part in parts)
        if count > KEYS_MAX or (count > 1 and size > self._limits.fetch_bytes_max):
            raise LimitExceeded(
                f"a Fetch of {count} keys and {size} bytes; the limits are {KEYS_MAX} keys and "
                f"{self._limits.fetch_bytes_max} bytes: run all daemons with the same limits"
            )
        return size

    def _lend_and_send(self, request: int, fetch: Fetch) -> None:
        try:
            wanted = OpenLoan(
                fetch.tenant,
                fetch.digest,
                fetch.parts,
                self._stream.deadline.left(),
                fetch.trace,
            )
            lent = self._source.open_loan(wanted)
        except KvpoolError as error:
            self._decline(request, error)
            return
        try:
            present, found = check_loan(lent, wanted, self._memory)
            header = encode(Fetched(present, lent.checksums), request)
            # The kernel has copied the bytes when this returns, so the slots are free again:
            # sent or not, nothing refers to them any more.
            sendings = self._sendings(memoryview(header), lent.segment, found)
            if fetch.background:
                sendings = _pieces(chain.from_iterable(sendings))
            for buffers in sendings:
                if fetch.background:
                    self._precedence.give_way(self._stream.deadline.left())
                self._stream.send_buffers(buffers)
        finally:
            if lent.token:
                self._source.give_back(lent.token)

    def _sendings(
        self, header: memoryview, segment: int, parts: Sequence[LoanRows]
    ) -> Iterator[list[memoryview]]:
        """The header and the blocks, in order: all at once, or with keys by groups, each with its tag behind it.

        A group's tag is made when the group was sent: then its bytes are in this core's cache, which a tag made
        before would have cost a read from memory, about as much as the sending. It goes with the next group.
        """
        ahead = self._stream.sealed([header])
        for part in parts:
            count = len(part.rows) // 4
            if not self._stream.keyed:
                ahead += self._spans(segment, part, part.rows)
                continue
            for low, high in groups_of(part.nbytes, count):
                spans = self._spans(segment, part, part.rows[4 * low : 4 * high])
                yield [*ahead, *spans]
                ahead = self._stream.tag(spans)
        if ahead:
            yield ahead

    def _spans(self, segment: int, part: LoanRows, rows: bytes) -> list[memoryview]:
        """Return the bytes of these rows."""
        return self._memory.spans(segment, part.stride, part.nbytes, rows) if rows else []


Converse = Callable[[Stream, Memory, Source, TransferLimits, Budgets, Priority], Conversation]
"""A server's conversation with a peer: `Conversation`, or a transport's variant."""


def _pieces(buffers: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """The same bytes in the same order, about `PIECE_BYTES` at a time."""
    piece: list[memoryview] = []
    room = PIECE_BYTES
    for buffer in buffers:
        at = 0
        while at < len(buffer):
            some = buffer[at : at + room]
            piece.append(some)
            at += len(some)
            room -= len(some)
            if not room:
                yield piece
                piece, room = [], PIECE_BYTES
    if piece:
        yield piece

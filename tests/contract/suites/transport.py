"""Requirements of every transport, as tests: for kvpool's and for other distributions'.

    class TestMine(TransportContract):
        def url(self) -> str:
            return "mine://somewhere"

The bytes are compared with those that the test itself wrote into the owner's segment, never with
the transport's or its checksums' answers.
"""

from __future__ import annotations

import mmap
import os
import queue
import random
import threading
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import msgspec
import pytest
from xxhash import xxh3_128_digest

from kvpool.errors import (
    ConfigError,
    Declined,
    InvalidRequest,
    KvpoolError,
    LimitExceeded,
    Unavailable,
)
from kvpool.security.cluster_secrets import ClusterSecrets
from kvpool.security.credentials import Credentials
from kvpool.security.failed_logins import Failures
from kvpool.transfer import transport_for
from kvpool.transfer.base import Identity, Owed, Stop, TransferLimits, Transport
from kvpool.transfer.memory import Memory
from kvpool.transfer.tcp import TcpTransport
from kvpool.types import BlockStatus
from kvpool.wire.frame import NO_ROW, Bytes, Done
from kvpool.wire.peer import (
    Ask,
    Await,
    Corrupt,
    Holds,
    LongQuestion,
    Offer,
    Question,
    SessionEnded,
)
from kvpool.wire.worker import AskPeer, Loan, OpenLoan, PartRows, PullBlocks, Pulled

SEGMENT = 3
DIGEST = b"namespace-digest"
SECRET = "the secret of these tests"


def asking(url: str, keys: bytes) -> AskPeer:
    """An order to ask a peer for its blocks."""
    return AskPeer(url, Ask("default", DIGEST, [], keys), 30.0)


def awaiting(url: str, keys: bytes, wait_s: float = 30.0) -> AskPeer:
    """An order to wait for a peer's commits."""
    known = bytes(len(keys) // 16)
    return AskPeer(url, Await("node", "default", DIGEST, keys, known, wait_s), wait_s + 30.0)


class ScriptedAnswer:
    """An answer given by the test at any time: an `Owed`."""

    def __init__(self, closed: threading.Semaphore) -> None:
        self._fd = os.eventfd(0)
        self._closed = closed
        self._answer: Bytes | KvpoolError = Bytes(b"")

    def fileno(self) -> int:
        return self._fd

    def give(self, answer: Bytes | KvpoolError) -> None:
        self._answer = answer
        os.eventfd_write(self._fd, 1)

    def result(self) -> Bytes:
        if isinstance(self._answer, KvpoolError):
            raise self._answer
        return self._answer

    def close(self) -> None:
        os.close(self._fd)
        self._closed.release()


class ScriptedSource:
    """The rules of an owner, for tests: blocks in a dict, loans counted. Thread-safe."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        self.blocks: dict[bytes, tuple[int, bytes]] = {}  # key: row and checksum
        self.stride = 0
        # The same of the parts that differ from all others.
        self.parts: dict[int, dict[bytes, tuple[int, bytes]]] = {}
        self.strides: dict[int, int] = {}
        self.loans: set[str] = set()
        self.lent = 0
        self.reports: list[Corrupt] = []
        self.offers: list[Offer] = []
        self.news: list[SessionEnded] = []
        self.error: Exception | None = None
        self.faults: list[str] = []  # requests that met an unexpected error
        self.waiting: queue.SimpleQueue[tuple[LongQuestion, ScriptedAnswer]] = queue.SimpleQueue()
        self.closed = threading.Semaphore(0)  # released when nobody waits for one of them any more
        self.hold: threading.Event | None = None  # lend waits for it
        self.entered = threading.Event()  # set when lend is called
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)

    def put(self, key: bytes, row: int, data: bytes) -> None:
        at = row * self.stride
        self.memory[at : at + len(data)] = data
        self.blocks[key] = (row, xxh3_128_digest(data))

    def open_loan(self, request: OpenLoan) -> Loan:
        self.entered.set()
        if self.hold is not None:
            assert self.hold.wait(60)
        if self.error is not None:
            raise self.error
        rows, checksums = array("I"), []
        for part in request.parts:
            blocks = self.parts.get(part.part, self.blocks)
            for at in range(0, len(part.keys), 16):
                found = blocks.get(part.keys[at : at + 16])
                rows.append(NO_ROW if found is None else found[0])
                if found is not None:
                    checksums.append(found[1])
        with self._lock:
            self.lent += 1
            token = str(self.lent)
            self.loans.add(token)
        strides = [self.strides.get(part.part, self.stride) for part in request.parts]
        return Loan(token, SEGMENT, strides, rows.tobytes(), b"".join(checksums))

    def give_back(self, token: str) -> None:
        with self._lock:
            self.loans.remove(token)  # KeyError: returned twice
            self._idle.notify_all()

    def asked(self, question: Question) -> Done | Bytes:
        if self.error is not None:
            raise self.error
        if isinstance(question, SessionEnded):
            self.news.append(question)
            return Done(1)
        keys = [question.keys[at : at + 16] for at in range(0, len(question.keys), 16)]
        if isinstance(question, Offer):
            self.offers.append(question)
        if isinstance(question, (Holds, Offer)):
            return Bytes(bytes(key in self.blocks for key in keys))
        return Done(next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys)))

    def answer_later(self, question: LongQuestion) -> Owed:
        if self.error is not None:
            raise self.error
        owed = ScriptedAnswer(self.closed)
        self.waiting.put((question, owed))
        return owed

    def logins_failed(self, failures: Failures) -> None:
        pass

    def request_failed(self, name: str) -> None:
        with self._lock:
            self.faults.append(name)

    def corrupt(self, report: Corrupt) -> None:
        with self._lock:
            self.reports.append(report)
            self._idle.notify_all()

    def wait_until_returned(self) -> bool:
        """Whether all loans come back. (The puller has its bytes a moment before.)"""
        with self._lock:
            return self._idle.wait_for(lambda: not self.loans, 30)

    def wait_for_report(self) -> bool:
        with self._lock:
            return self._idle.wait_for(lambda: bool(self.reports), 30)


def change_limits(transport: Transport, limits: TransferLimits) -> None:
    """Limits for those who connect to a transport that listens already, from now on."""
    assert isinstance(transport, TcpTransport)
    transport._server._limits = limits


class Side:
    """One daemon's transport, with memory of its own."""

    def __init__(
        self,
        url: str,
        *,
        size: int = 24 << 20,
        secrets: tuple[str, ...] | ClusterSecrets = (SECRET,),
        cluster: str = "test",
        limits: TransferLimits | None = None,
        tls: Credentials | None = None,
        plaintext: bool = False,
        node: str = "node",
    ) -> None:
        self.bytes = mmap.mmap(-1, size)
        memory = Memory()
        memory.attach(SEGMENT, self.bytes)
        self.source = ScriptedSource(self.bytes)
        self.transport: Transport = transport_for(url)(
            memory,
            self.source,
            Identity(
                cluster,
                node,
                "incarnation",
                secrets if isinstance(secrets, ClusterSecrets) else ClusterSecrets.of(*secrets),
                tls,
                plaintext,
            ),
            limits or TransferLimits(),
        )

    def block(self, row: int, stride: int, nbytes: int) -> bytes:
        return self.bytes[row * stride : row * stride + nbytes]


def key_of(number: int) -> bytes:
    """A block key."""
    return number.to_bytes(16, "little")


def order(
    url: str, nbytes: int, keys: list[bytes], rows: list[int], **changes: object
) -> PullBlocks:
    """An order to pull blocks of part 0. changes: see `changed`."""
    part = PartRows(0, nbytes, nbytes, b"".join(keys), array("I", rows).tobytes())
    return changed(PullBlocks(url, "default", DIGEST, SEGMENT, [part], 60.0), **changes)


def changed(order: PullBlocks, **changes: object) -> PullBlocks:
    """With other fields, or other ones of its one `PartRows`."""
    (part,) = order.parts
    of_part = {name: changes.pop(name) for name in part.__struct_fields__ if name in changes}
    parts = [msgspec.structs.replace(part, **of_part)]
    return msgspec.structs.replace(order, parts=parts, **changes)


class PartsPair:
    """An owner of parts of these sizes, of 20 blocks each, and a reader. In both, a part has slots of its own."""

    SIZES = ((4096, 4096), (1000, 1024), (300_001, 300_032))  # nbytes and stride

    def __init__(self, owner: Side, reader: Side, url: str) -> None:
        self.owner, self.reader, self.url = owner, reader, url
        self.data: dict[tuple[int, int], bytes] = {}
        for part, (nbytes, stride) in enumerate(self.SIZES):
            blocks = owner.source.parts[part] = {}
            owner.source.strides[part] = stride
            for number in range(20):
                data = random.Random(100 * part + number).randbytes(nbytes)
                self.data[part, number] = data
                at = self.place(part, number)
                owner.bytes[at : at + nbytes] = data
                blocks[key_of(number)] = (at // stride, xxh3_128_digest(data))

    def place(self, part: int, number: int) -> int:
        """Where a block is in the owner's memory."""
        stride = self.SIZES[part][1]
        return (-(-part * (1 << 20) // stride) + 2 * number) * stride

    def pull(self, wanted: dict[int, list[int]]) -> tuple[Pulled, PullBlocks]:
        parts = []
        for part, numbers in wanted.items():
            nbytes, stride = self.SIZES[part]
            first = -(-(part + 1) * (1 << 20) // stride)
            rows = array("I", [first + 3 * at for at in reversed(range(len(numbers)))])
            keys = b"".join(map(key_of, numbers))
            parts.append(PartRows(part, nbytes, stride, keys, rows.tobytes()))
        order = PullBlocks(self.url, "default", DIGEST, SEGMENT, parts, 60.0)
        self.reader.bytes[:] = b"\xee" * len(self.reader.bytes)
        return self.reader.transport.pull(order, Stop()), order

    def check(
        self,
        order: PullBlocks,
        pulled: Pulled,
        lacking: set[tuple[int, int]],
        why: BlockStatus = BlockStatus.ABSENT,
    ) -> None:
        """All blocks have arrived but these, each in its place; nothing else was written."""
        written = at = 0
        for part in order.parts:
            for index, row in enumerate(array("I", part.rows)):
                number = int.from_bytes(part.keys[16 * index : 16 * index + 16], "little")
                name, checksum = (part.part, number), pulled.checksums[16 * at : 16 * at + 16]
                if name in lacking:
                    assert (pulled.status[at], checksum) == (why, bytes(16)), name
                    written += part.nbytes if why == BlockStatus.MISMATCH else 0
                else:
                    assert pulled.status[at] == BlockStatus.PRESENT, name
                    assert checksum == xxh3_128_digest(self.data[name])
                    got = self.reader.bytes[row * part.stride : row * part.stride + part.nbytes]
                    assert got == self.data[name], name
                    written += part.nbytes
                at += 1
        assert at == len(pulled.status)
        untouched = self.reader.bytes[:].count(0xEE)
        assert untouched >= len(self.reader.bytes) - written


class TransportContract:
    """Inherit, and implement `url`."""

    def url(self) -> str:
        """A URL to listen on, a new one at each call."""
        raise NotImplementedError

    def owner(self, url: str, **side: object) -> Side:
        """The owner of the blocks; overridden if that is another process."""
        return Side(url, **side)  # type: ignore[arg-type]

    @contextmanager
    def sides(self, **side: object) -> Iterator[tuple[Side, Side, str]]:
        """(owner, reader, where the owner is to listen)."""
        wanted = self.url()
        with ExitStack() as stack:
            owner = self.owner(wanted, **side)
            reader = Side(wanted, **side)  # type: ignore[arg-type]
            stack.callback(owner.transport.close)
            stack.callback(reader.transport.close)
            yield owner, reader, wanted

    @contextmanager
    def pair(
        self, nbytes: int = 4096, count: int = 16, **side: object
    ) -> Iterator[tuple[Side, Side, str, list[bytes]]]:
        """(owner, reader, the owner's URL, the blocks' bytes): block i has key i, in row 3 i + 1."""
        with self.sides(**side) as (owner, reader, wanted):
            owner.source.stride = nbytes
            data = [random.Random(number).randbytes(nbytes) for number in range(count)]
            for number in range(count):
                owner.source.put(key_of(number), 3 * number + 1, data[number])
            yield owner, reader, owner.transport.listen(wanted), data

    @pytest.mark.parametrize("nbytes", [1, 100, 4096, 65536, 300_001])
    def test_the_bytes_arrive_where_they_belong(self, nbytes: int) -> None:
        with self.pair(nbytes) as (owner, reader, url, data):
            rows = [40 - number for number in range(16)]
            reader.bytes[:] = b"\xee" * len(reader.bytes)
            pulled = reader.transport.pull(
                order(url, nbytes, [key_of(n) for n in range(16)], rows), Stop()
            )
            assert pulled.error == ""
            assert pulled.status == bytes([BlockStatus.PRESENT]) * 16
            for number, row in enumerate(rows):
                assert reader.block(row, nbytes, nbytes) == data[number]
                assert pulled.checksums[16 * number : 16 * number + 16] == xxh3_128_digest(
                    data[number]
                )
            # and nowhere else
            assert reader.bytes[: 25 * nbytes].count(0xEE) == 25 * nbytes
            assert reader.bytes[41 * nbytes :].count(0xEE) == len(reader.bytes) - 41 * nbytes
            assert owner.source.wait_until_returned()

    def test_a_pull_that_nobody_waits_for(self) -> None:
        with self.pair(300_001, 16) as (owner, reader, url, data):
            keys, rows = [key_of(number) for number in range(16)], list(range(16))
            pulled = reader.transport.pull(order(url, 300_001, keys, rows, background=True), Stop())
            assert (pulled.status, pulled.error) == (bytes([BlockStatus.PRESENT]) * 16, "")
            assert [reader.block(row, 300_001, 300_001) for row in rows] == data
            assert owner.source.wait_until_returned()

    def test_slots_larger_than_their_blocks(self) -> None:
        with self.pair(1000) as (owner, reader, url, data):
            reader.bytes[: 16 * 1024] = b"\xee" * (16 * 1024)
            pulled = reader.transport.pull(
                order(url, 1000, [key_of(n) for n in range(16)], list(range(16)), stride=1024),
                Stop(),
            )
            assert pulled.status == bytes([BlockStatus.PRESENT]) * 16
            for number in range(16):
                assert reader.block(number, 1024, 1024) == data[number] + b"\xee" * 24
            assert owner.source.wait_until_returned()

    def test_neighbouring_rows(self) -> None:
        with self.pair(4096, 64) as (owner, reader, url, data):
            for number in range(64):  # on both sides
                owner.source.put(key_of(number), 5 + number, data[number])
            rows = [*range(10, 40), *range(100, 120), 7, 50, 8, 49, *range(200, 210)]
            keys = [key_of(number) for number in range(64)]
            pulled = reader.transport.pull(order(url, 4096, keys, rows), Stop())
            assert pulled.status == bytes([BlockStatus.PRESENT]) * 64
            assert [reader.block(row, 4096, 4096) for row in rows] == data

    def test_absent_blocks_are_told_apart(self) -> None:
        with self.pair() as (owner, reader, url, data):
            numbers = [900, 3, 901, 902, 5, 6, 903]
            pulled = reader.transport.pull(
                order(url, 4096, [key_of(n) for n in numbers], list(range(7))), Stop()
            )
            assert pulled.error == ""
            assert list(pulled.status) == [
                BlockStatus.ABSENT,
                BlockStatus.PRESENT,
                BlockStatus.ABSENT,
                BlockStatus.ABSENT,
                BlockStatus.PRESENT,
                BlockStatus.PRESENT,
                BlockStatus.ABSENT,
            ]
            assert [reader.block(row, 4096, 4096) for row in (1, 4, 5)] == [
                data[n] for n in (3, 5, 6)
            ]
            assert pulled.checksums[:16] == bytes(16)
            assert owner.source.wait_until_returned()

    def test_nothing_there_and_nothing_wanted(self) -> None:
        with self.pair() as (_, reader, url, _):
            assert (
                reader.transport.pull(order(url, 4096, [key_of(99)], [0]), Stop()).status == b"\0"
            )
            assert reader.transport.pull(order(url, 4096, [], []), Stop()).status == b""

    def test_a_flipped_byte_is_seen_and_reported(self) -> None:
        with self.pair() as (owner, reader, url, data):
            at = (3 * 4 + 1) * 4096 + 1234
            owner.bytes[at] ^= 1
            keys = [key_of(n) for n in range(8)]
            pulled = reader.transport.pull(order(url, 4096, keys, list(range(8))), Stop())
            assert pulled.error == ""
            assert list(pulled.status) == [
                BlockStatus.PRESENT if n != 4 else BlockStatus.MISMATCH for n in range(8)
            ]
            assert pulled.checksums[64:80] == bytes(16)
            assert reader.block(5, 4096, 4096) == data[5]
            assert owner.source.wait_for_report()
            assert [(r.tenant, r.digest, r.keys) for r in owner.source.reports] == [
                ("default", DIGEST, key_of(4))
            ]
            # and the connection goes on
            assert reader.transport.pull(order(url, 4096, keys[:1], [0]), Stop()).status == b"\1"

    def test_a_row_that_holds_another_block_by_now(self) -> None:
        """The rules lend an earlier block's slots: their bytes are another block's, of the same length."""
        with self.pair() as (owner, reader, url, data):
            old = owner.source.blocks[key_of(2)]
            owner.source.put(key_of(77), old[0], data[9])
            keys = [key_of(n) for n in (1, 2, 77, 3)]
            pulled = reader.transport.pull(order(url, 4096, keys, [0, 1, 2, 3]), Stop())
            assert list(pulled.status) == [
                BlockStatus.PRESENT,
                BlockStatus.MISMATCH,
                BlockStatus.PRESENT,
                BlockStatus.PRESENT,
            ]
            assert pulled.checksums[16:32] == bytes(16)
            assert [reader.block(row, 4096, 4096) for row in (0, 2, 3)] == [
                data[n] for n in (1, 9, 3)
            ]
            assert owner.source.wait_for_report()
            del owner.source.blocks[key_of(2)]
            pulled = reader.transport.pull(order(url, 4096, keys, [0, 1, 2, 3]), Stop())
            assert list(pulled.status) == [
                BlockStatus.PRESENT,
                BlockStatus.ABSENT,
                BlockStatus.PRESENT,
                BlockStatus.PRESENT,
            ]
            assert owner.source.wait_until_returned()

    def test_checksums_that_are_off(self) -> None:
        with self.pair() as (owner, reader, url, data):
            for number, checksum in ((1, bytes(16)), (3, xxh3_128_digest(data[4]))):
                owner.source.blocks[key_of(number)] = (3 * number + 1, checksum)
            keys = [key_of(n) for n in range(5)]
            pulled = reader.transport.pull(order(url, 4096, keys, list(range(5))), Stop())
            assert list(pulled.status) == [
                BlockStatus.PRESENT,
                BlockStatus.MISMATCH,
                BlockStatus.PRESENT,
                BlockStatus.MISMATCH,
                BlockStatus.PRESENT,
            ]
            assert [reader.block(n, 4096, 4096) for n in (0, 2, 4)] == [data[n] for n in (0, 2, 4)]
            assert owner.source.wait_until_returned()

    @pytest.mark.parametrize(
        "stride_and_rows", [(4095, 0), (1, 0), (4096, 1 << 20)], ids=["short", "tiny", "outside"]
    )
    def test_a_loan_of_the_wrong_length_or_place(self, stride_and_rows: tuple[int, int]) -> None:
        """The rules' loan does not match the request: no bytes are sent, the loan is returned."""
        with self.pair() as (owner, reader, url, data):
            right = dict(owner.source.blocks)
            owner.source.stride, further = stride_and_rows
            owner.source.blocks = {k: (row + further, c) for k, (row, c) in right.items()}
            pulled = reader.transport.pull(order(url, 4096, [key_of(1)], [0]), Stop())
            assert pulled.status == bytes([BlockStatus.LATE])
            assert pulled.error
            assert owner.source.wait_until_returned()
            owner.source.stride, owner.source.blocks = 4096, right
            assert reader.transport.pull(order(url, 4096, [key_of(1)], [0]), Stop()).status == b"\1"
            assert reader.block(0, 4096, 4096) == data[1]

    def test_ten_thousand_small_blocks(self) -> None:
        with self.pair(4096, 10_000, size=128 << 20) as (owner, reader, url, data):
            rows = list(range(20_000, 30_000))
            random.Random(1).shuffle(rows)
            pulled = reader.transport.pull(
                order(url, 4096, [key_of(n) for n in range(10_000)], rows), Stop()
            )
            assert pulled.status == b"\1" * 10_000
            assert all(reader.block(row, 4096, 4096) == data[n] for n, row in enumerate(rows))
            assert owner.source.wait_until_returned()

    def test_a_large_pull_is_cut_to_the_limits(self) -> None:
        limits = TransferLimits(fetch_bytes_max=3 << 20, inflight_bytes_max=4 << 20)
        with self.pair(1 << 20, 20, limits=limits, size=64 << 20) as (owner, reader, url, data):
            keys = [key_of(n) for n in range(20)]
            pulled = reader.transport.pull(order(url, 1 << 20, keys, list(range(20))), Stop())
            assert pulled.status == b"\1" * 20
            assert [reader.block(n, 1 << 20, 1 << 20) for n in range(20)] == data
            assert owner.source.lent >= 7
            assert owner.source.wait_until_returned()

    @contextmanager
    def parts_pair(self, **side: object) -> Iterator[PartsPair]:
        """An owner of several parts, and a reader."""
        with self.sides(**side) as (owner, reader, wanted):
            yield PartsPair(owner, reader, owner.transport.listen(wanted))

    def test_blocks_of_several_parts(self) -> None:
        with self.parts_pair() as pair:
            wanted = {0: [5, 4, 99, 6], 2: list(range(20)), 1: [98, 0]}
            pulled, order = pair.pull(wanted)
            assert pulled.error == ""
            pair.check(order, pulled, {(0, 99), (1, 98)})
            assert pair.owner.source.wait_until_returned()

    @pytest.mark.parametrize("most", [1, 5000, 40_000, 1 << 20])
    def test_several_parts_are_cut_to_the_limits(self, most: int) -> None:
        with self.parts_pair(limits=TransferLimits(fetch_bytes_max=most)) as pair:
            pulled, order = pair.pull({part: list(range(20)) for part in range(3)})
            pair.check(order, pulled, set())
            assert pair.owner.source.wait_until_returned()

    def test_a_flipped_byte_in_one_of_several_parts(self) -> None:
        with self.parts_pair() as pair:
            pair.owner.bytes[pair.place(1, 7)] ^= 1
            pulled, order = pair.pull({0: [7, 8], 1: [6, 7, 8], 2: [7]})
            assert pulled.error == ""
            pair.check(order, pulled, {(1, 7)}, BlockStatus.MISMATCH)
            assert pair.owner.source.wait_for_report()
            assert [(r.part, r.keys) for r in pair.owner.source.reports] == [(1, key_of(7))]

    def test_nothing_there_of_one_of_several_parts(self) -> None:
        with self.parts_pair() as pair:
            pulled, order = pair.pull({0: [50, 51], 1: [3], 2: [52]})
            pair.check(order, pulled, {(0, 50), (0, 51), (2, 52)})

    def test_a_block_above_the_limits_travels_alone(self) -> None:
        limits = TransferLimits(fetch_bytes_max=4096, inflight_bytes_max=4096)
        with self.pair(65536, 3, limits=limits) as (owner, reader, url, _):
            keys = [key_of(n) for n in range(3)]
            pulled = reader.transport.pull(order(url, 65536, keys, [0, 1, 2]), Stop())
            assert pulled.status == b"\1" * 3
            assert owner.source.lent == 3

    def test_several_pulls_at_once(self) -> None:
        with self.pair(65536, 32) as (owner, reader, url, data):
            results: dict[int, bytes] = {}

            def pull(part: int) -> None:
                keys = [key_of(8 * part + n) for n in range(8)]
                rows = [8 * part + n for n in range(8)]
                results[part] = reader.transport.pull(order(url, 65536, keys, rows), Stop()).status

            threads = [threading.Thread(target=pull, args=(part,)) for part in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert results == dict.fromkeys(range(4), b"\1" * 8)
            assert [reader.block(n, 65536, 65536) for n in range(32)] == data
            assert owner.source.wait_until_returned()

    def test_the_owners_error_is_told(self) -> None:
        with self.pair() as (owner, reader, url, _):
            owner.source.error = InvalidRequest("part 0 has other sizes here")
            pulled = reader.transport.pull(order(url, 4096, [key_of(1)], [0]), Stop())
            assert pulled.status == bytes([BlockStatus.LATE])
            assert "other sizes" in pulled.error
            assert pulled.refused
            with pytest.raises(InvalidRequest, match="other sizes"):
                reader.transport.ask(asking(url, key_of(1)), Stop())
            owner.source.error = None
            assert reader.transport.pull(order(url, 4096, [key_of(1)], [0]), Stop()).status == b"\1"

    def test_asking_for_a_prefix(self) -> None:
        with self.pair() as (_, reader, url, _):
            keys = b"".join(map(key_of, [0, 1, 2, 77, 3]))
            assert reader.transport.ask(asking(url, keys), Stop()) == Done(3)

    def test_an_offer_and_what_was_taken_of_it(self) -> None:
        with self.pair() as (owner, reader, url, _):
            keys = b"".join(map(key_of, [0, 77, 2]))
            offer = Offer(
                *("node", "ab" * 8, "copy", "default", DIGEST, 3, b"{}", [(4096, "full", 0, 1)]),
                *(keys, b"\1", 2, 1, 0.5, 30.0),
            )
            assert reader.transport.ask(AskPeer(url, offer, 30.0), Stop()) == Bytes(b"\1\0\1")
            assert owner.source.offers == [offer]

    def test_news_of_a_session(self) -> None:
        with self.pair() as (owner, reader, url, _):
            news = SessionEnded("default", "chat", "node")
            assert reader.transport.ask(AskPeer(url, news, 30.0), Stop()) == Done(1)
            assert owner.source.news == [news]

    def test_a_question_that_waits_for_its_answer(self) -> None:
        with self.pair() as (owner, reader, url, _):
            wanted = awaiting(url, key_of(3) + key_of(77))
            answers: list[Done | Bytes] = []

            def ask() -> None:
                answers.append(reader.transport.ask(wanted, Stop()))

            thread = threading.Thread(target=ask)
            thread.start()
            question, owed = owner.source.waiting.get(timeout=30)
            assert question == wanted.question
            # Others do not wait for it.
            pulled = reader.transport.pull(order(url, 4096, [key_of(1)], [0]), Stop())
            assert pulled.status == b"\1"
            assert reader.transport.ask(asking(url, key_of(1)), Stop()) == Done(1)
            assert not answers
            owed.give(Bytes(b"\1\0"))
            thread.join()
            assert answers == [Bytes(b"\1\0")]
            assert owner.source.closed.acquire(timeout=30)

    def test_a_question_that_waits_and_is_refused(self) -> None:
        with self.pair() as (owner, reader, url, _):
            owner.source.error = LimitExceeded("too many wait here")
            with pytest.raises(LimitExceeded, match="too many"):
                reader.transport.ask(awaiting(url, key_of(1)), Stop())
            owner.source.error = None
            refused = threading.Thread(
                target=lambda: owner.source.waiting.get(timeout=30)[1].give(
                    InvalidRequest("no such mask")
                )
            )
            refused.start()
            with pytest.raises(InvalidRequest, match="no such mask"):
                reader.transport.ask(awaiting(url, key_of(1)), Stop())
            refused.join()

    def test_a_question_that_nobody_waits_for_any_more_ends_at_its_owner(self) -> None:
        with self.pair() as (owner, reader, url, _):
            stop = Stop()
            calls: list[KvpoolError] = []

            def ask() -> None:
                try:
                    reader.transport.ask(awaiting(url, key_of(1)), stop)
                except KvpoolError as error:
                    calls.append(error)

            thread = threading.Thread(target=ask)
            thread.start()
            owner.source.waiting.get(timeout=30)
            stop.set()
            thread.join()
            assert isinstance(calls[0], Unavailable)
            assert owner.source.closed.acquire(timeout=30)

    def test_nobody_there(self) -> None:
        with self.pair() as (owner, reader, url, _):
            owner.transport.close()
            pulled = reader.transport.pull(order(url, 4096, [key_of(1)], [0]), Stop())
            assert pulled.status == bytes([BlockStatus.LATE])
            assert url in pulled.error
            assert not pulled.refused
            with pytest.raises(Unavailable) as raised:
                reader.transport.ask(asking(url, key_of(1)), Stop())
            assert not isinstance(raised.value, Declined)

    def test_cancelled_before_it_began(self) -> None:
        with self.pair() as (owner, reader, url, _):
            stop = Stop()
            stop.set()
            pulled = reader.transport.pull(order(url, 4096, [key_of(1)], [0]), stop)
            assert pulled.status == bytes([BlockStatus.LATE])
            assert "cancelled" in pulled.error
            assert owner.source.wait_until_returned()

    def test_a_passed_deadline(self) -> None:
        with self.pair() as (owner, reader, url, _):
            for deadline_s in (0.0, -1.0, float("nan"), 1e-9):
                pulled = reader.transport.pull(
                    order(url, 4096, [key_of(1)], [0], deadline_s=deadline_s), Stop()
                )
                assert pulled.status == bytes([BlockStatus.LATE])
                assert pulled.error
            assert owner.source.wait_until_returned()

    @pytest.mark.parametrize(
        "changes",
        [
            {"keys": b"x" * 15},
            {"rows": b""},
            {"rows": array("I", [1 << 20]).tobytes()},
            {"rows": array("I", [NO_ROW]).tobytes()},
            {"segment": SEGMENT + 1},
            {"nbytes": 0},
            {"stride": 4095},
        ],
    )
    def test_an_order_that_cannot_work(self, changes: dict[str, object]) -> None:
        with self.pair() as (_, reader, url, _):
            broken = changed(order(url, 4096, [key_of(1)], [0]), **changes)
            with pytest.raises(InvalidRequest):
                reader.transport.pull(broken, Stop())

    @pytest.mark.parametrize(
        "theirs", [{"secrets": ("another secret",)}, {"secrets": ()}, {"cluster": "other"}]
    )
    def test_strangers_get_nothing(self, theirs: dict[str, object]) -> None:
        wanted = self.url()
        us: dict[str, object] = {"secrets": (SECRET,), "cluster": "test"}
        owner = self.owner(wanted, **us)
        stranger = Side(wanted, **(us | theirs))  # type: ignore[arg-type]
        try:
            owner.source.stride = 4096
            owner.source.put(key_of(1), 1, b"x" * 4096)
            url = owner.transport.listen(wanted)
            pulled = stranger.transport.pull(order(url, 4096, [key_of(1)], [0]), Stop())
            assert pulled.status == bytes([BlockStatus.LATE])
            assert "cluster" in pulled.error
            assert owner.source.lent == 0
        finally:
            owner.transport.close()
            stranger.transport.close()

    def test_any_common_secret_will_do(self) -> None:
        """As while one node after the other is given a new one."""
        wanted = self.url()
        owner = self.owner(wanted, secrets=("a newer secret than that", SECRET))
        reader = Side(wanted, secrets=("a third secret beside it", SECRET))
        try:
            owner.source.stride = 4096
            owner.source.put(key_of(1), 1, b"x" * 4096)
            url = owner.transport.listen(wanted)
            pulled = reader.transport.pull(order(url, 4096, [key_of(1)], [0]), Stop())
            assert (pulled.status, pulled.error) == (b"\1", "")
            assert reader.block(0, 4096, 4096) == b"x" * 4096
        finally:
            owner.transport.close()
            reader.transport.close()

    def test_nobody_is_served_without_a_secret(self) -> None:
        wanted = self.url()
        owner = self.owner(wanted, secrets=())
        try:
            with pytest.raises(ConfigError, match="cluster secret"):
                owner.transport.listen(wanted)
        finally:
            owner.transport.close()

    def test_an_address_is_served_once(self) -> None:
        with self.pair() as (_, reader, url, _), pytest.raises(ConfigError, match="cannot listen"):
            reader.transport.listen(url)

    def test_close_twice(self) -> None:
        with self.pair() as (owner, reader, url, _):
            assert reader.transport.pull(order(url, 4096, [key_of(1)], [0]), Stop()).status == b"\1"
            for side in (owner, reader):
                side.transport.close()
                side.transport.close()

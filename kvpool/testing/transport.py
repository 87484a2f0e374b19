"""What every transport has to do, as tests: for ours and for those of other distributions.

    class TestMine(TransportContract):
        def url(self) -> str:
            return "mine://somewhere"

The bytes are checked against what the test itself wrote into the owner's segment, never against what
the transport or its checksums say.
"""

from __future__ import annotations

import mmap
import random
import threading
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import msgspec
import pytest
from xxhash import xxh3_128_digest

from kvpool.errors import ConfigError, InvalidRequest, KvpoolError, Unavailable
from kvpool.transfer import transport_for
from kvpool.transfer.base import (
    ABSENT,
    ARRIVED,
    MISMATCH,
    MISSING,
    Identity,
    Stop,
    TransferLimits,
    Transport,
)
from kvpool.transfer.memory import Memory
from kvpool.wire import (
    NO_ROW,
    Ask,
    AskPeer,
    Bytes,
    Corrupt,
    Done,
    Lend,
    Lent,
    Offer,
    PullBlocks,
)

SEGMENT = 3
DIGEST = b"namespace-digest"


def asking(url: str, keys: bytes) -> AskPeer:
    return AskPeer(url, Ask("default", DIGEST, [], keys), 30.0)


class ScriptedSource:
    """The rules of an owner, for tests: blocks in a dict, loans counted. Thread-safe."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        self.blocks: dict[bytes, tuple[int, bytes]] = {}  # key: row and checksum
        self.stride = 0
        self.loans: set[str] = set()
        self.lent = 0
        self.reports: list[Corrupt] = []
        self.offers: list[Offer] = []
        self.error: KvpoolError | None = None
        self.hold: threading.Event | None = None  # lend waits for it
        self.entered = threading.Event()  # set when lend is called
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)

    def put(self, key: bytes, row: int, data: bytes) -> None:
        at = row * self.stride
        self.memory[at : at + len(data)] = data
        self.blocks[key] = (row, xxh3_128_digest(data))

    def lend(self, request: Lend) -> Lent:
        self.entered.set()
        if self.hold is not None:
            assert self.hold.wait(60)
        if self.error is not None:
            raise self.error
        rows, checksums = array("I"), []
        for at in range(0, len(request.keys), 16):
            found = self.blocks.get(request.keys[at : at + 16])
            rows.append(NO_ROW if found is None else found[0])
            if found is not None:
                checksums.append(found[1])
        with self._lock:
            self.lent += 1
            token = str(self.lent)
            self.loans.add(token)
        return Lent(token, SEGMENT, self.stride, rows.tobytes(), b"".join(checksums))

    def give_back(self, token: str) -> None:
        with self._lock:
            self.loans.remove(token)  # KeyError: returned twice
            self._idle.notify_all()

    def asked(self, question: Ask | Offer) -> Done | Bytes:
        if self.error is not None:
            raise self.error
        keys = [question.keys[at : at + 16] for at in range(0, len(question.keys), 16)]
        if isinstance(question, Offer):
            self.offers.append(question)
            return Bytes(bytes(key in self.blocks for key in keys))
        return Done(next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys)))

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


class Side:
    """One daemon's worth of transport, with memory of its own."""

    def __init__(
        self,
        url: str,
        *,
        size: int = 64 << 20,
        secret: bytes = b"",
        cluster: str = "test",
        limits: TransferLimits | None = None,
    ) -> None:
        self.bytes = mmap.mmap(-1, size)
        memory = Memory()
        memory.attach(SEGMENT, self.bytes)
        self.source = ScriptedSource(self.bytes)
        self.transport: Transport = transport_for(url)(
            memory,
            self.source,
            Identity(cluster, "node", "incarnation", secret),
            limits or TransferLimits(),
        )

    def block(self, row: int, stride: int, nbytes: int) -> bytes:
        return self.bytes[row * stride : row * stride + nbytes]


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def order(
    url: str, nbytes: int, keys: list[bytes], rows: list[int], **changes: object
) -> PullBlocks:
    fields: dict[str, object] = {
        "url": url,
        "tenant": "default",
        "digest": DIGEST,
        "part": 0,
        "nbytes": nbytes,
        "keys": b"".join(keys),
        "segment": SEGMENT,
        "stride": nbytes,
        "rows": array("I", rows).tobytes(),
        "deadline_s": 60.0,
    }
    return PullBlocks(**(fields | changes))  # type: ignore[arg-type]


class TransportContract:
    """Inherit, and say what to listen on."""

    def url(self) -> str:
        """A URL to listen on, a new one at each call."""
        raise NotImplementedError

    def owner(self, url: str, **side: object) -> Side:
        """Whose blocks are pulled; overridden where that is another process."""
        return Side(url, **side)  # type: ignore[arg-type]

    @contextmanager
    def pair(
        self, nbytes: int = 4096, count: int = 16, **side: object
    ) -> Iterator[tuple[Side, Side, str, list[bytes]]]:
        """(owner, reader, the owner's URL, the blocks' bytes): block i has key i, in row 3 i + 1."""
        wanted = self.url()
        with ExitStack() as stack:
            owner = self.owner(wanted, **side)
            reader = Side(wanted, **side)  # type: ignore[arg-type]
            stack.callback(owner.transport.close)
            stack.callback(reader.transport.close)
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
            assert pulled.status == bytes([ARRIVED]) * 16
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
            assert (pulled.status, pulled.error) == (bytes([ARRIVED]) * 16, "")
            assert [reader.block(row, 300_001, 300_001) for row in rows] == data
            assert owner.source.wait_until_returned()

    def test_slots_larger_than_their_blocks(self) -> None:
        with self.pair(1000) as (owner, reader, url, data):
            reader.bytes[: 16 * 1024] = b"\xee" * (16 * 1024)
            pulled = reader.transport.pull(
                order(url, 1000, [key_of(n) for n in range(16)], list(range(16)), stride=1024),
                Stop(),
            )
            assert pulled.status == bytes([ARRIVED]) * 16
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
            assert pulled.status == bytes([ARRIVED]) * 64
            assert [reader.block(row, 4096, 4096) for row in rows] == data

    def test_absent_blocks_are_told_apart(self) -> None:
        with self.pair() as (owner, reader, url, data):
            numbers = [900, 3, 901, 902, 5, 6, 903]
            pulled = reader.transport.pull(
                order(url, 4096, [key_of(n) for n in numbers], list(range(7))), Stop()
            )
            assert pulled.error == ""
            assert list(pulled.status) == [
                ABSENT,
                ARRIVED,
                ABSENT,
                ABSENT,
                ARRIVED,
                ARRIVED,
                ABSENT,
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
            assert list(pulled.status) == [ARRIVED if n != 4 else MISMATCH for n in range(8)]
            assert pulled.checksums[64:80] == bytes(16)
            assert reader.block(5, 4096, 4096) == data[5]
            assert owner.source.wait_for_report()
            assert [(r.tenant, r.digest, r.keys) for r in owner.source.reports] == [
                ("default", DIGEST, key_of(4))
            ]
            # and the connection goes on
            assert reader.transport.pull(order(url, 4096, keys[:1], [0]), Stop()).status == b"\1"

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
        with self.pair(1 << 20, 20, limits=limits) as (owner, reader, url, data):
            keys = [key_of(n) for n in range(20)]
            pulled = reader.transport.pull(order(url, 1 << 20, keys, list(range(20))), Stop())
            assert pulled.status == b"\1" * 20
            assert [reader.block(n, 1 << 20, 1 << 20) for n in range(20)] == data
            assert owner.source.lent >= 7
            assert owner.source.wait_until_returned()

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
            assert pulled.status == bytes([MISSING])
            assert "other sizes" in pulled.error
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

    def test_nobody_there(self) -> None:
        with self.pair() as (owner, reader, url, _):
            owner.transport.close()
            pulled = reader.transport.pull(order(url, 4096, [key_of(1)], [0]), Stop())
            assert pulled.status == bytes([MISSING])
            assert url in pulled.error
            with pytest.raises(Unavailable):
                reader.transport.ask(asking(url, key_of(1)), Stop())

    def test_cancelled_before_it_began(self) -> None:
        with self.pair() as (owner, reader, url, _):
            stop = Stop()
            stop.set()
            pulled = reader.transport.pull(order(url, 4096, [key_of(1)], [0]), stop)
            assert pulled.status == bytes([MISSING])
            assert "cancelled" in pulled.error
            assert owner.source.wait_until_returned()

    def test_a_passed_deadline(self) -> None:
        with self.pair() as (owner, reader, url, _):
            for deadline_s in (0.0, -1.0, float("nan"), 1e-9):
                pulled = reader.transport.pull(
                    order(url, 4096, [key_of(1)], [0], deadline_s=deadline_s), Stop()
                )
                assert pulled.status == bytes([MISSING])
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
            broken = msgspec.structs.replace(order(url, 4096, [key_of(1)], [0]), **changes)
            with pytest.raises(InvalidRequest):
                reader.transport.pull(broken, Stop())

    @pytest.mark.parametrize(
        "theirs", [{"secret": b"another secret"}, {"secret": b""}, {"cluster": "other"}]
    )
    def test_strangers_get_nothing(self, theirs: dict[str, object]) -> None:
        wanted = self.url()
        us: dict[str, object] = {"secret": b"the secret", "cluster": "test"}
        owner = self.owner(wanted, **us)
        stranger = Side(wanted, **(us | theirs))  # type: ignore[arg-type]
        try:
            owner.source.stride = 4096
            owner.source.put(key_of(1), 1, b"x" * 4096)
            url = owner.transport.listen(wanted)
            pulled = stranger.transport.pull(order(url, 4096, [key_of(1)], [0]), Stop())
            assert pulled.status == bytes([MISSING])
            assert "cluster" in pulled.error
            assert owner.source.lent == 0
        finally:
            owner.transport.close()
            stranger.transport.close()

    def test_with_the_secret(self) -> None:
        with self.pair(secret=b"the secret") as (_, reader, url, data):
            pulled = reader.transport.pull(order(url, 4096, [key_of(1)], [0]), Stop())
            assert pulled.status == b"\1"
            assert reader.block(0, 4096, 4096) == data[1]

    def test_an_address_is_served_once(self) -> None:
        with self.pair() as (_, reader, url, _), pytest.raises(ConfigError, match="cannot listen"):
            reader.transport.listen(url)

    def test_close_twice(self) -> None:
        with self.pair() as (owner, reader, url, _):
            assert reader.transport.pull(order(url, 4096, [key_of(1)], [0]), Stop()).status == b"\1"
            for side in (owner, reader):
                side.transport.close()
                side.transport.close()

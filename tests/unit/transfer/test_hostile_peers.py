"""Whatever a peer says, on either side: an error of ours and nothing else, and not a wrong byte.

Over real sockets, in one thread: what is said fits into the kernel's buffers, and is said before it is heard.
"""

import mmap
import random
import socket
import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings
from xxhash import xxh3_128_digest

from kvpool.errors import KvpoolError, LimitExceeded, ProtocolError, Unavailable
from kvpool.security.cluster_secrets import ClusterSecrets
from kvpool.transfer.base import Deadline, Identity, Outcome, Stop, TransferLimits, cut
from kvpool.transfer.handshake import admit, greet
from kvpool.transfer.memory import Memory
from kvpool.transfer.nixl import check_readable
from kvpool.transfer.priority import Priority
from kvpool.transfer.requester import Refused, ask, fetch
from kvpool.transfer.responder import Budgets, Conversation
from kvpool.transfer.stream import Stream
from kvpool.types import BlockStatus
from kvpool.wire import frame
from kvpool.wire import peer as peer_wire
from kvpool.wire import worker as worker_wire
from tests.contract.suites.transport import DIGEST, SEGMENT, ScriptedSource, key_of, order
from tests.support.fetches import fetch_of
from tests.support.waiting import PATIENCE_S

NBYTES = 64
COUNT = 5
BLOCKS = [random.Random(n).randbytes(NBYTES) for n in range(COUNT)]
KEYS = [key_of(n) for n in range(COUNT)]
ROWS = [9, 2, 5, 6, 0]
UNTOUCHED = b"\xee" * (NBYTES * 16)
US = Identity("test", "node", "incarnation", ClusterSecrets.of("the secret"))
LIMITS = TransferLimits(fetch_bytes_max=4096, inflight_bytes_max=4096)


def heard(said: bytes) -> tuple[Stream, socket.socket]:
    """A stream on which this has been said, and nothing more comes; and the peer's end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    theirs.sendall(said)
    theirs.shutdown(socket.SHUT_WR)
    return Stream(ours, Deadline(PATIENCE_S)), theirs


# ---- what may be said ------------------------------------------------------------------------------------

numbers = st.integers(-(2**63), 2**64 - 1) | st.integers(-2, 2**17)
seconds = st.floats() | st.sampled_from([0.0, -1.0, 0.001, 30.0])
digests = st.just(DIGEST) | st.binary(max_size=20)
packed = st.lists(st.sampled_from([*KEYS, key_of(99)]), max_size=8).map(b"".join)
packed_badly = packed | st.binary(max_size=40)
flags = st.binary(max_size=8) | st.lists(st.integers(0, 1), max_size=8).map(bytes)
texts = st.text(max_size=10) | st.just("default")
parts = st.lists(numbers, max_size=4)
specs = st.lists(st.tuples(numbers, texts, numbers, numbers), max_size=3)

wanted = st.builds(peer_wire.PartKeys, numbers, st.just(NBYTES) | numbers, packed_badly)
fetches = st.builds(
    peer_wire.Fetch,
    *(texts, digests, st.lists(wanted, max_size=3), seconds, st.booleans()),
)
messages: st.SearchStrategy[frame.Message] = st.one_of(
    fetches,
    st.builds(peer_wire.Corrupt, texts, digests, numbers, packed_badly),
    st.builds(peer_wire.Ask, texts, digests, parts, packed_badly),
    st.builds(
        peer_wire.Offer,
        *(texts, texts, texts, texts, digests, numbers, st.binary(max_size=9), specs, packed_badly),
        *(st.binary(max_size=9), numbers, numbers, seconds, seconds),
    ),
    st.builds(peer_wire.Await, texts, texts, digests, packed_badly, flags, seconds),
    st.builds(
        peer_wire.PeerHello, st.just(frame.PROTOCOL_VERSION) | numbers, texts, texts, digests
    ),
    st.builds(peer_wire.PeerChallenge, numbers, texts, texts, st.binary(max_size=40), digests),
    st.builds(peer_wire.PeerProof, st.binary(max_size=40)),
    st.builds(peer_wire.Fetched, flags, packed_badly),
    st.builds(
        peer_wire.Readable, flags, packed_badly, packed_badly, numbers, numbers, texts, numbers
    ),
    st.builds(peer_wire.Describe),
    st.builds(peer_wire.Taken),
    st.builds(frame.Done, numbers),
    st.builds(frame.Bytes, packed_badly),
    st.builds(frame.Error, st.just("limit") | texts, texts),
)
frames = st.builds(frame.encode, messages, st.just(1) | st.integers(0, 2**32 - 1))
nonsense = st.binary(max_size=200) | st.builds(
    lambda length, rest: struct.pack("<II", length, 1) + rest,
    st.sampled_from([0, 1, 200, frame.HELLO_BYTES_MAX + 1, 2**31, 2**32 - 1]),
    st.binary(max_size=60),
)


@st.composite
def damaged(draw: st.DrawFn, right: bytes) -> bytes:
    """What would be right, after a few accidents."""
    data = bytearray(right)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.integers(1, 80)))
        match draw(st.sampled_from(["flip", "drop", "repeat", "insert", "cut"])):
            case "flip" if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "drop":
                del data[at:end]
            case "repeat":
                data[at:at] = data[at:end]
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=20))
            case _:
                del data[at:]
    return bytes(data)


# ---- who reads -------------------------------------------------------------------------------------------

CHECKSUMS = b"".join(map(xxh3_128_digest, BLOCKS))
ANSWER = frame.encode(peer_wire.Fetched(b"\1" * COUNT, CHECKSUMS), 1)


def read(said: bytes) -> tuple[worker_wire.Pulled, bytearray]:
    """What a reader makes of an answer, and its memory."""
    bytes_here = bytearray(UNTOUCHED)
    memory = Memory()
    memory.attach(SEGMENT, bytes_here)
    wanted = order("tcp://x:1", NBYTES, KEYS, ROWS)
    outcome = Outcome(COUNT)
    stream, theirs = heard(said)
    try:
        fetch(stream, wanted, next(cut(wanted, 1 << 30)), memory, outcome, Stop(), Priority())
    except (KvpoolError, Refused):
        pass
    finally:
        stream.close()
        theirs.close()
    return outcome.finish(), bytes_here


@settings(max_examples=200, deadline=None)
@given(
    said=st.one_of(
        damaged(ANSWER + b"".join(BLOCKS)),
        st.builds(lambda framed, rest: framed + rest, frames, st.binary(max_size=400)),
        nonsense,
    )
)
def test_a_reader_believes_no_bytes_that_do_not_match_what_was_said_of_them(said: bytes) -> None:
    pulled, bytes_here = read(said)
    for number, (row, status) in enumerate(zip(ROWS, pulled.status, strict=True)):
        assert status in (
            BlockStatus.ABSENT,
            BlockStatus.PRESENT,
            BlockStatus.MISMATCH,
            BlockStatus.LATE,
        )
        checksum = pulled.checksums[16 * number : 16 * number + 16]
        if status == BlockStatus.PRESENT:
            assert checksum == xxh3_128_digest(bytes_here[row * NBYTES : (row + 1) * NBYTES])
            assert checksum in said
        else:
            assert checksum == bytes(16)
    for row in set(range(16)) - set(ROWS):
        assert bytes_here[row * NBYTES : (row + 1) * NBYTES] == b"\xee" * NBYTES


@settings(max_examples=100, deadline=None)
@given(
    at=st.integers(0, len(ANSWER) + COUNT * NBYTES - 1), bit=st.integers(0, 7), end=st.booleans()
)
def test_one_bit_of_an_answer_is_wrong(at: int, bit: int, end: bool) -> None:
    """And what follows it may not come: every block that arrives is the right one."""
    data = bytearray(ANSWER + b"".join(BLOCKS))
    data[at] ^= 1 << bit
    pulled, bytes_here = read(bytes(data[: at + 1] if end else data))
    for number, (row, status) in enumerate(zip(ROWS, pulled.status, strict=True)):
        if status == BlockStatus.PRESENT:
            assert bytes_here[row * NBYTES : (row + 1) * NBYTES] == BLOCKS[number]
    if at >= len(ANSWER) and not end:
        assert list(pulled.status).count(BlockStatus.MISMATCH) == 1


@settings(max_examples=60, deadline=None)
@given(said=st.one_of(frames, nonsense), offer=st.booleans())
def test_an_answer_to_a_question_is_one_or_an_error(said: bytes, offer: bool) -> None:
    question: peer_wire.Ask | peer_wire.Offer = peer_wire.Ask("default", DIGEST, [], KEYS[0])
    if offer:
        question = peer_wire.Offer(
            *("n", "ab", "copy", "default", DIGEST, 0, b"", [], KEYS[0], b"\1", 1, 0, 0.0, 1.0)
        )
    stream, theirs = heard(said)
    try:
        answer = ask(stream, question)
        assert isinstance(answer, frame.Bytes if offer else frame.Done)
    except (KvpoolError, Refused):
        pass
    finally:
        stream.close()
        theirs.close()


@settings(max_examples=100, deadline=None)
@given(
    flags,
    st.binary(max_size=80) | st.just(CHECKSUMS),
    st.binary(max_size=24) | st.binary(min_size=20, max_size=20),
    numbers | st.just(1 << 20),
    numbers | st.just(NBYTES),
)
def test_what_is_to_be_read_over_nixl_lies_where_addresses_can(
    present: bytes, checksums: bytes, rows: bytes, base: int, stride: int
) -> None:
    answer = peer_wire.Readable(present, checksums, rows, base, stride, "agent", 1)
    try:
        indices = check_readable(answer, COUNT, NBYTES)
    except ProtocolError:
        return
    assert (len(present), len(indices)) == (COUNT, present.count(1))
    assert len(rows) == 4 * len(indices)
    for (row,) in struct.iter_unpack("<I", rows):
        assert 0 < base + row * stride < base + (row + 1) * stride < 1 << 63


# ---- who owns --------------------------------------------------------------------------------------------


class World:
    """An owner's half, with blocks to lend and nothing lent."""

    def __init__(self) -> None:
        mapping = mmap.mmap(-1, 1 << 16)
        self.memory = Memory()
        self.memory.attach(SEGMENT, mapping)
        self.source = ScriptedSource(mapping)
        self.source.stride = NBYTES
        for number, key in enumerate(KEYS):
            self.source.put(key, number, BLOCKS[number])
        self.budgets = Budgets.of(LIMITS.inflight_bytes_max)

    def converse(self, said: bytes) -> tuple[KvpoolError, bytes]:
        """Serve until that is over: why it ended, and what was answered."""
        stream, theirs = heard(said)
        conversation = Conversation(
            stream, self.memory, self.source, LIMITS, self.budgets, Priority()
        )

        def serve() -> None:
            while True:
                conversation.answer(*conversation.hear())

        try:
            with pytest.raises(KvpoolError) as ended:
                serve()
            stream.close()
            return ended.value, everything(theirs)
        finally:
            stream.close()
            theirs.close()

    def check_nothing_is_lent(self) -> None:
        assert self.source.loans == set()
        for budget in self.budgets:
            budget.take(1 << 20, Deadline(0.0))  # above the limit: let in only where nothing is
            budget.give(1 << 20)


def everything(sock: socket.socket) -> bytes:
    said = b""
    try:
        while data := sock.recv(1 << 16):
            said += data
    except ConnectionResetError:
        pass  # closed with something unread
    return said


@settings(max_examples=200, deadline=None)
@given(
    said=st.lists(
        frames
        | st.builds(frame.encode, fetches, st.just(1))
        | damaged(frame.encode(fetch_of(DIGEST, NBYTES, b"".join(KEYS), 30.0), 1)),
        max_size=4,
    ).map(b"".join)
    | nonsense
)
def test_an_owner_lends_for_a_while_and_reports_nothing_that_is_right(said: bytes) -> None:
    world = World()
    world.converse(said)
    world.check_nothing_is_lent()
    assert world.source.reports == []
    assert world.source.memory[: COUNT * NBYTES] == b"".join(BLOCKS)


def bare_fetch(deadline_s: float, nbytes: int = NBYTES) -> bytes:
    return frame.encode(fetch_of(DIGEST, nbytes, b"".join(KEYS), deadline_s), 1)


def test_a_fetch_is_answered_before_its_deadline() -> None:
    world = World()
    _, said = world.converse(bare_fetch(30.0))
    assert said == ANSWER + b"".join(BLOCKS)
    world.check_nothing_is_lent()


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, -1e300, 1e-300])
def test_a_fetch_whose_deadline_has_passed_is_not_answered(deadline_s: float) -> None:
    world = World()
    ended, said = world.converse(bare_fetch(deadline_s))
    assert isinstance(ended, Unavailable)
    assert said == b""
    assert world.source.lent == 0
    world.check_nothing_is_lent()


@pytest.mark.parametrize("stride", [NBYTES - 1, 1, 0])
def test_slots_of_another_length_than_was_asked_for_are_not_sent(stride: int) -> None:
    """The rules lend something else: no other block's bytes go out, and the loan comes back."""
    world = World()
    world.source.stride = stride
    _, said = world.converse(bare_fetch(30.0))
    assert said == b""
    assert world.source.lent == 1
    world.check_nothing_is_lent()


@pytest.mark.parametrize("row", [1 << 16, 2**32 - 2])
def test_slots_outside_of_the_segment_are_not_sent(row: int) -> None:
    world = World()
    world.source.blocks[KEYS[2]] = (row, world.source.blocks[KEYS[2]][1])
    _, said = world.converse(bare_fetch(30.0))
    assert said == b""
    world.check_nothing_is_lent()


def test_a_fetch_of_another_length_than_the_block_has_is_refused_where_it_is_known() -> None:
    world = World()
    world.source.error = LimitExceeded("the rules say so")
    ended, said = world.converse(bare_fetch(30.0, NBYTES * 3))
    assert isinstance(ended, Unavailable), "the connection stood until the peer closed it"
    _, payload = frame.FrameReader().feed(said)[0]
    assert peer_wire.decode_peer(payload) == frame.Error("limit", "the rules say so")
    world.check_nothing_is_lent()


# ---- before anybody is known -----------------------------------------------------------------------------


@pytest.mark.parametrize("introduce", [greet, admit])
@settings(max_examples=100, deadline=None)
@given(said=st.lists(frames, min_size=1, max_size=3).map(b"".join) | nonsense)
def test_nobody_is_believed_who_does_not_know_the_secret(
    introduce: Callable[[Stream, Identity], object], said: bytes
) -> None:
    stream, theirs = heard(said)
    try:
        with pytest.raises(KvpoolError):
            introduce(stream, US)
    finally:
        stream.close()
        theirs.close()


def allocated(work: Callable[[], object]) -> int:
    """The most bytes that Python held at a time for this."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def payload_of(message: int, *fields: object) -> bytes:
    return msgspec.msgpack.encode([message, *fields])


@pytest.mark.parametrize("length", [1 << 21, frame.FRAME_BYTES_MAX, 2**32 - 1])
def test_an_answer_has_a_length_that_an_answer_can_have(length: int) -> None:
    stream, theirs = heard(struct.pack("<II", length, 1) + b"\x95")

    def listen() -> None:
        with pytest.raises(ProtocolError, match="limit here"):
            ask(stream, peer_wire.Ask("default", DIGEST, [], KEYS[0]))

    try:
        assert allocated(listen) < 1 << 20
    finally:
        stream.close()
        theirs.close()


@pytest.mark.parametrize("length", [frame.HELLO_BYTES_MAX, frame.HELLO_BYTES_MAX + 1, 2**32 - 1])
def test_a_stranger_gets_little_memory_for_a_large_word(length: int) -> None:
    stream, theirs = heard(struct.pack("<II", length, 1) + b"\x95")

    def listen() -> None:
        with pytest.raises(KvpoolError):
            admit(stream, US)

    try:
        assert allocated(listen) < 4 * frame.HELLO_BYTES_MAX
    finally:
        stream.close()
        theirs.close()


@pytest.mark.parametrize("tag", [45, 47], ids=["Ask", "Offer"])
def test_a_list_gets_no_memory_before_its_members_are_there(tag: int) -> None:
    """An array of 2**32 - 1 members is said in five bytes."""
    fields = {45: ["t", b"d" * 16, []], 47: ["n", "i", "r", "t", b"d" * 16, 1, b"f", []]}[tag]
    payload = payload_of(tag, *fields)
    assert payload[-1] == 0x90  # the list is said last, and what should follow does not
    payload = payload[:-1] + b"\xdd" + b"\xff" * 4

    def decode() -> None:
        with pytest.raises(ProtocolError):
            peer_wire.decode_peer(payload)

    assert allocated(decode) < 1 << 20


@pytest.mark.parametrize("member", [0, 70_000, [0, "", 0, 0]], ids=["small", "large", "tuple"])
def test_a_stranger_gets_little_memory_for_many_members(member: object) -> None:
    """What is decoded before it is refused is some times as long as what was sent."""
    each = len(msgspec.msgpack.encode(member))
    many = [member] * ((frame.HELLO_BYTES_MAX - 200) // each)
    if isinstance(member, list):
        payload = payload_of(
            47, "n", "i", "r", "t", b"d" * 16, 1, b"f", many, b"k", b"m", 1, 1, 1.0, 1.0
        )
    else:
        payload = payload_of(45, "t", b"d" * 16, many, b"k")
    assert len(payload) <= frame.HELLO_BYTES_MAX

    def decode() -> None:
        with suppress(ProtocolError):  # where a list is limited
            peer_wire.decode_peer(payload)

    assert allocated(decode) < 64 * frame.HELLO_BYTES_MAX

"""TCP against peers that are slow, wrong, hostile or dying: always an answer, never a wrong block."""

import itertools
import logging
import os
import resource
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace

import pytest
from xxhash import xxh3_128_digest

from kvpool.errors import ConfigError, Declined, InternalError, KvpoolError
from kvpool.net import host_and_port
from kvpool.security.cluster_secrets import ClusterSecrets, SecretSource
from kvpool.transfer import tcp
from kvpool.transfer.base import Deadline, Identity, Stop, TransferLimits
from kvpool.transfer.handshake import admit, greet
from kvpool.transfer.priority import Priority
from kvpool.transfer.sealing import TAG_BYTES
from kvpool.transfer.stream import Closed, Stream
from kvpool.types import BlockStatus
from kvpool.wire import client as client_wire
from kvpool.wire import frame
from kvpool.wire import peer as peer_wire
from kvpool.wire import worker as worker_wire
from tests.contract.suites.transport import (
    SECRET,
    PartsPair,
    Side,
    asking,
    awaiting,
    change_limits,
    key_of,
    order,
)
from tests.support.fetches import fetch_of
from tests.support.waiting import PATIENCE_S

URL = "tcp://127.0.0.1:0"
PEER = Identity("test", "scripted", "1", ClusterSecrets.of(SECRET))
NBYTES = 8192
BLOCKS = [bytes([65 + n]) * NBYTES for n in range(4)]
KEYS = [key_of(n) for n in range(4)]
ROWS = [9, 2, 5, 6]
BODY = b"".join(BLOCKS)

Script = Callable[[Stream, int], None]


@contextmanager
def scripted(*scripts: Script, introduce: bool = True) -> Iterator[str]:
    """A peer that runs one script a connection, after the handshake and the first request's arrival.

    A script gets the stream and the request's number. What it leaves open stays open until the end.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    kept: list[socket.socket] = []

    def serve() -> None:
        for script in scripts:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            kept.append(sock)
            request = 0
            stream = Stream(sock, Deadline(PATIENCE_S))
            try:
                if introduce:
                    admit(stream, PEER)
                    request, _ = stream.receive(1 << 20)
                script(stream, request)
            except (OSError, KvpoolError):
                pass  # the reader has left in the middle of the script

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
        for sock in kept:
            sock.close()


@pytest.fixture
def reader() -> Iterator[Side]:
    side = Side(URL)
    yield side
    side.transport.close()


FETCHED = peer_wire.Fetched(b"\1" * 4, b"".join(map(xxh3_128_digest, BLOCKS)))


def sealed(stream: Stream, *parts: bytes) -> bytes:
    """Each with its tag behind it."""
    return b"".join(bytes(each) for part in parts for each in stream.sealed([memoryview(part)]))


def answer(stream: Stream, request: int, body: bytes = BODY) -> bytes:
    return sealed(stream, frame.encode(FETCHED, request), body)


def say_raw(stream: Stream, data: bytes) -> None:
    if data:  # of nothing nothing is ever sent: it would be tried until the stream's deadline
        stream.send_buffers([memoryview(data)])


def say(data: bytes | Callable[[Stream, int], bytes], *, close: bool) -> Script:
    def script(stream: Stream, request: int) -> None:
        say_raw(stream, data if isinstance(data, bytes) else data(stream, request))
        if close:
            stream.shut()

    return script


def pull(reader: Side, url: str, deadline_s: float = 30.0) -> worker_wire.Pulled:
    return reader.transport.pull(
        order(url, NBYTES, KEYS, [0, 2, 4, 6], deadline_s=deadline_s), Stop()
    )


HEADER_END = len(frame.encode(FETCHED, 1)) + TAG_BYTES


def test_the_scripted_peer_is_believed_when_it_is_right(reader: Side) -> None:
    with scripted(say(answer, close=False)) as url:
        pulled = pull(reader, url)
    assert (pulled.status, pulled.error) == (b"\1" * 4, "")
    assert [reader.block(row, NBYTES, NBYTES) for row in (0, 2, 4, 6)] == BLOCKS


@pytest.mark.parametrize("close", [True, False], ids=["closes", "falls silent"])
@pytest.mark.parametrize(
    "after",
    [
        0,
        3,
        8,
        HEADER_END - 1,
        HEADER_END,
        HEADER_END + NBYTES // 2,
        HEADER_END + 2 * NBYTES,
        HEADER_END + 4 * NBYTES - 1,
    ],
)
def test_an_answer_that_breaks_off(reader: Side, after: int, close: bool) -> None:
    script = say(lambda stream, r: answer(stream, r)[:after], close=close)
    with scripted(script, script) as url:
        pulled = pull(reader, url, 30.0 if close else 0.2)
    assert pulled.error
    assert BlockStatus.PRESENT not in pulled.status or after > HEADER_END
    assert BlockStatus.LATE in pulled.status
    for index, row in enumerate((0, 2, 4, 6)):
        if pulled.status[index] == BlockStatus.PRESENT:
            assert reader.block(row, NBYTES, NBYTES) == BLOCKS[index]
        else:
            assert pulled.checksums[16 * index : 16 * index + 16] == bytes(16)


def test_a_slow_drip_does_not_extend_the_deadline(reader: Side) -> None:
    gone = threading.Event()

    def drip(stream: Stream, request: int) -> None:
        data = answer(stream, request)
        for at in range(len(data)):
            if gone.wait(0.01):
                return
            say_raw(stream, data[at : at + 1])

    with scripted(drip) as url:
        pulled = pull(reader, url, 0.3)
        gone.set()
    assert pulled.error
    assert BlockStatus.LATE in pulled.status
    assert pulled.seconds < 30


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4,
        struct.pack("<II", 1 << 31, 1),
        struct.pack("<II", 5, 1) + b"\xc1" * 5,
        frame.encode(frame.Done(1), 1),
        frame.encode(peer_wire.Fetched(b"\1" * 3, b"x" * 48), 1),
        frame.encode(peer_wire.Fetched(b"\1" * 4, b"x" * 48), 1),
        frame.encode(peer_wire.Fetched(b"\1\1\1\2", b"x" * 64), 1),
        frame.encode(peer_wire.Fetched(b"\1" * 4, b"x" * 64), 77) + BODY,
    ],
    ids=["http", "long frame", "no msgpack", "other type", "few", "sums", "flags", "request"],
)
@pytest.mark.parametrize("tagged", [True, False])
def test_nonsense(reader: Side, data: bytes, tagged: bool) -> None:
    with scripted(say(lambda s, _: sealed(s, data) if tagged else data, close=True)) as url:
        pulled = pull(reader, url)
    assert pulled.status == bytes([BlockStatus.LATE]) * 4
    assert pulled.error


def test_wrong_bytes_under_right_checksums(reader: Side) -> None:
    body = BLOCKS[0] + BLOCKS[2] + BLOCKS[1] + BLOCKS[3]
    with scripted(say(lambda stream, r: answer(stream, r, body), close=False)) as url:
        pulled = pull(reader, url)
    assert list(pulled.status) == [
        BlockStatus.PRESENT,
        BlockStatus.MISMATCH,
        BlockStatus.MISMATCH,
        BlockStatus.PRESENT,
    ]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"", ""),
        (b"SSH-2.0-OpenSSH_9.2\r\n", ""),
        (
            frame.encode(peer_wire.PeerChallenge(99, "n", "i", b"n" * 32, b"p" * 32, 99), 1),
            "the peer speaks protocol 99",
        ),
        (
            frame.encode(
                peer_wire.PeerChallenge(frame.PROTOCOL_VERSION, "n", "i", b"n", b"p" * 32), 1
            ),
            "length",
        ),
        (
            frame.encode(
                peer_wire.PeerChallenge(frame.PROTOCOL_VERSION, "n", "i", b"n" * 32, b"p" * 32), 1
            ),
            "did not prove",
        ),
        (frame.encode(frame.Done(), 1), "handshake"),
        (frame.encode(frame.Error("limit", "too many daemons"), 1), "too many daemons"),
    ],
    ids=["silent", "ssh", "version", "nonce", "proof", "type", "error"],
)
def test_a_handshake_that_fails(reader: Side, said: bytes, reason: str) -> None:
    with scripted(say(said, close=False), introduce=False) as url:
        # Who says why is waited for, however long that takes here; who falls silent costs the deadline.
        pulled = pull(reader, url, 30.0 if reason else 0.3)
    assert pulled.status == bytes([BlockStatus.LATE]) * 4
    assert pulled.error
    assert reason in pulled.error


def test_a_connection_that_died_while_idle_is_replaced(reader: Side) -> None:
    """The peer closes after its answer, or at the next request: the pull goes over a new connection."""

    def answer_then_drop_the_next(stream: Stream, request: int) -> None:
        say_raw(stream, answer(stream, request))
        stream.receive(1 << 20)
        stream.shut()

    scripts = [
        say(answer, close=True),
        answer_then_drop_the_next,
        say(answer, close=False),
    ]
    with scripted(*scripts) as url:
        for _ in range(3):
            pulled = pull(reader, url)
            assert (pulled.status, pulled.error) == (b"\1" * 4, "")


def test_a_pull_is_cancelled_while_its_peer_is_silent(reader: Side) -> None:
    asked = threading.Event()
    stop = Stop()
    results: list[worker_wire.Pulled] = []

    def run() -> None:
        results.append(reader.transport.pull(order(url, NBYTES, KEYS, [0, 1, 2, 3]), stop))

    with scripted(lambda stream, request: asked.set()) as url:
        thread = threading.Thread(target=run)
        thread.start()
        assert asked.wait(PATIENCE_S)
        stop.set()
        thread.join()
    assert results[0].status == bytes([BlockStatus.LATE]) * 4
    assert results[0].seconds < 30  # its deadline is 60


# ---- the serving side ---------------------------------------------------------------------------------


@pytest.fixture
def owner() -> Iterator[tuple[Side, tuple[str, int]]]:
    side = Side(
        URL, limits=TransferLimits(connections_max=4, hello_s=300.0, fetch_bytes_max=1 << 20)
    )
    side.source.stride = NBYTES
    for number, block in enumerate(BLOCKS):
        side.source.put(key_of(number), number, block)
    url = side.transport.listen(URL)
    yield side, ("127.0.0.1", int(url.rpartition(":")[2]))
    side.transport.close()


@contextmanager
def impatient(side: Side) -> Iterator[None]:
    """Who comes while this lasts has little time to introduce itself."""
    assert isinstance(side.transport, tcp.TcpTransport)
    limits = side.transport.limits
    change_limits(side.transport, replace(limits, hello_s=0.3))
    try:
        yield
    finally:
        change_limits(side.transport, limits)


def introduced(address: tuple[str, int]) -> tuple[socket.socket, Stream]:
    sock = socket.create_connection(address, 30)
    sock.setblocking(True)
    stream = Stream(sock, Deadline(PATIENCE_S))
    greet(stream, PEER)
    return sock, stream


def fetch(
    deadline_s: float = 30.0, keys: bytes = b"".join(KEYS), nbytes: int = NBYTES
) -> peer_wire.Fetch:
    return fetch_of(b"d" * 16, nbytes, keys, deadline_s)


def closed_by_peer(sock: socket.socket) -> bool:
    sock.settimeout(PATIENCE_S)
    try:
        while sock.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\x00",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        struct.pack("<II", frame.HELLO_BYTES_MAX + 1, 1),
        frame.encode(peer_wire.PeerHello(2, "test", "n", b"n" * 32, 2), 1),
        frame.encode(peer_wire.PeerHello(1, "test", "n", b""), 1),
        frame.encode(peer_wire.PeerHello(1, "other", "n", b"n" * 32), 1),
        frame.encode(fetch(), 1),
        frame.encode(client_wire.Stats(), 1),
    ],
    ids=["silent", "slow", "http", "long", "version", "nonce", "cluster", "early", "foreign"],
)
def test_strangers_are_shown_out(owner: tuple[Side, tuple[str, int]], said: bytes) -> None:
    side, address = owner
    with impatient(side), socket.create_connection(address, 30) as sock:
        sock.sendall(said)
        assert closed_by_peer(sock)
    assert side.source.lent == 0
    sock, stream = introduced(address)  # and others are served
    with sock:
        stream.send(fetch(), 9)
        assert stream.receive(1 << 20)[0] == 9


@pytest.mark.parametrize(
    "message",
    [
        frame.Done(),
        peer_wire.PeerHello(1, "test", "n", b"n" * 32),
        fetch(keys=b"x" * 17),
        fetch(nbytes=0),
        peer_wire.Corrupt("default", b"d" * 16, 0, KEYS[0]),
    ],
    ids=["type", "hello", "keys", "sizes", "slander"],
)
def test_peers_that_break_the_protocol_are_cut(
    owner: tuple[Side, tuple[str, int]], message: frame.Message
) -> None:
    side, address = owner
    sock, stream = introduced(address)
    with sock:
        stream.send(message, 1)
        answer = peer_wire.decode_peer(stream.receive(1 << 20)[1])
        assert isinstance(answer, frame.Error)
        assert answer.code == "protocol"
        assert closed_by_peer(sock)
    assert side.source.reports == []


def test_a_fetch_above_the_limits_is_refused(owner: tuple[Side, tuple[str, int]]) -> None:
    side, address = owner
    sock, stream = introduced(address)
    with sock:
        stream.send(fetch(nbytes=1 << 20), 5)
        request, payload = stream.receive(1 << 20)
        answer = peer_wire.decode_peer(payload)
        assert (request, answer.code) == (5, "limit")
        stream.send(fetch(), 6)  # the connection goes on
        assert stream.receive(1 << 20)[0] == 6
    assert side.source.lent == 1


def test_a_reader_that_does_not_read_is_cut_and_its_loan_returned() -> None:
    side = Side(URL)
    side.source.stride = NBYTES
    side.source.put(KEYS[0], 0, BLOCKS[0])
    address = ("127.0.0.1", int(side.transport.listen(URL).rpartition(":")[2]))
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(address)
        stream = Stream(sock, Deadline(PATIENCE_S))
        greet(stream, PEER)
        stream.send(fetch(2.0, KEYS[0] * 4096), 1)  # 32 MiB: more than the buffers on the way hold
        ended = select.poll()
        ended.register(sock, select.POLLHUP | select.POLLERR)
        assert ended.poll(30_000)
    assert side.source.lent == 1
    assert side.source.wait_until_returned()
    side.transport.close()


def test_a_reader_that_vanishes(owner: tuple[Side, tuple[str, int]]) -> None:
    side, address = owner
    side.source.hold = threading.Event()
    sock, stream = introduced(address)
    stream.send(fetch(), 1)
    assert side.source.entered.wait(PATIENCE_S)
    sock.close()
    side.source.hold.set()
    assert side.source.wait_until_returned()


def test_no_more_connections_than_allowed(owner: tuple[Side, tuple[str, int]]) -> None:
    side, address = owner
    peers = [introduced(address) for _ in range(4)]
    with impatient(side), socket.create_connection(address, 30) as fifth:
        assert closed_by_peer(fifth)
    for sock, stream in peers:
        stream.send(fetch(), 3)
        assert stream.receive(1 << 20)[0] == 3
        sock.close()


@pytest.fixture
def patient() -> Iterator[tuple[Side, tuple[str, int]]]:
    """An owner that lets strangers think for as long as they like; four connections at most."""
    # Who comes waits for as long as it takes the thread of whoever makes way to notice.
    limits = TransferLimits(connections_max=4, hello_s=300.0, leave_s=PATIENCE_S)
    side = Side(URL, limits=limits)
    side.source.stride = NBYTES
    for number, block in enumerate(BLOCKS):
        side.source.put(key_of(number), number, block)
    url = side.transport.listen(URL)
    yield side, ("127.0.0.1", int(url.rpartition(":")[2]))
    side.transport.close()


def served(sock: socket.socket, stream: Stream) -> bool:
    """Whether all blocks come over this connection."""
    stream.send(fetch(), 3)
    request, payload = stream.receive(1 << 20)
    body = bytearray(len(BODY))
    stream.receive_group([memoryview(body)])
    return (request, peer_wire.decode_peer(payload), bytes(body)) == (3, FETCHED, BODY)


def test_strangers_keep_nobody_out(patient: tuple[Side, tuple[str, int]]) -> None:
    """They say nothing, or half of something: who came first goes when somebody else comes."""
    side, address = patient
    hello = frame.encode(peer_wire.PeerHello(frame.PROTOCOL_VERSION, "test", "n", b"n" * 32), 1)
    with ExitStack() as stack:
        known = introduced(address)
        stack.callback(known[0].close)
        for turn in range(20):
            stranger = stack.enter_context(socket.create_connection(address, 30))
            stranger.sendall(hello[:turn])
        for _ in range(3):
            sock, stream = introduced(address)
            stack.callback(sock.close)
            assert served(sock, stream)
        assert served(*known), "it has been let in, so it stays"
        for _ in range(8):
            stack.enter_context(socket.create_connection(address, 30))
        assert served(*known), "four are known: none of them goes for a stranger"
    assert side.source.wait_until_returned()


def test_readers_that_are_idle_keep_no_other_out(patient: tuple[Side, tuple[str, int]]) -> None:
    """More nodes than connections read in turn, and each keeps its connection as long as it may."""
    _, address = patient
    url = f"tcp://127.0.0.1:{address[1]}"
    with ExitStack() as stack:
        readers = [Side(URL, node=f"reader-{number}") for number in range(6)]
        for reader in readers:
            stack.callback(reader.transport.close)
        for _ in range(2):
            for reader in readers:
                pulled = reader.transport.pull(order(url, NBYTES, KEYS, ROWS), Stop())
                assert (pulled.status, pulled.error) == (bytes([BlockStatus.PRESENT]) * 4, "")


def wait_there(side: Side, address: tuple[str, int], stack: ExitStack) -> None:
    """A connection with a request that is not answered."""
    sock, stream = introduced(address)
    stack.callback(sock.close)
    stream.send(peer_wire.Await("scripted", "default", b"d" * 16, KEYS[0], b"\0", PATIENCE_S), 3)
    side.source.waiting.get(timeout=PATIENCE_S)


def test_who_finds_no_place_is_told_so_and_blames_nobody(
    patient: tuple[Side, tuple[str, int]],
) -> None:
    side, address = patient
    url = f"tcp://127.0.0.1:{address[1]}"
    with ExitStack() as stack:
        reader = Side(URL, node="reader")
        stack.callback(reader.transport.close)
        for _ in range(4):
            wait_there(side, address, stack)
        pulled = reader.transport.pull(order(url, NBYTES, KEYS, ROWS), Stop())
        assert pulled.refused, "it is an answer, and says nothing against the peer"
        assert "serves 4 connections" in pulled.error
        asks = peer_wire.Ask("default", b"d" * 16, [0], KEYS[0])
        with pytest.raises(Declined, match="serves 4 connections"):
            reader.transport.ask(worker_wire.AskPeer(url, asks, PATIENCE_S), Stop())


@contextmanager
def told(complained: threading.Event) -> Iterator[None]:
    """Set the event when a transport logs a warning."""

    class Handler(logging.Handler):
        def emit(self, _: logging.LogRecord) -> None:
            complained.set()

    log, handler = logging.getLogger("kvpool.transfer"), Handler(logging.WARNING)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def test_a_pull_goes_on_over_the_connections_that_it_gets(
    patient: tuple[Side, tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    side, address = patient
    url = f"tcp://127.0.0.1:{address[1]}"
    # Nothing is lent before a connection was declined.
    declined = side.source.hold = threading.Event()
    with ExitStack() as stack:
        stack.enter_context(told(declined))
        reader = Side(URL, node="reader", limits=TransferLimits(fetch_bytes_max=NBYTES))
        stack.callback(reader.transport.close)
        for _ in range(3):
            wait_there(side, address, stack)
        assert isinstance(reader.transport, tcp.TcpTransport)
        monkeypatch.setattr(reader.transport.streams, "choose", lambda *_: 2)
        pulled = reader.transport.pull(order(url, NBYTES, KEYS, ROWS), Stop())
        assert (pulled.status, pulled.error) == (bytes([BlockStatus.PRESENT]) * 4, "")
    assert declined.is_set()


def test_the_stranger_who_came_first_goes(patient: tuple[Side, tuple[str, int]]) -> None:
    _, address = patient
    with ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(address, 30)) for _ in range(5)]
        sock, _ = introduced(address)
        stack.callback(sock.close)
        assert closed_by_peer(strangers[0])
        for stranger in strangers[1:]:
            stream = Stream(stranger, Deadline(PATIENCE_S))
            stranger.setblocking(True)
            greet(stream, PEER)  # it has only now made up its mind
            assert served(stranger, stream)


def test_a_reader_without_descriptors_says_so_and_goes_on(
    owner: tuple[Side, tuple[str, int]], reader: Side
) -> None:
    _, address = owner
    url = f"tcp://127.0.0.1:{address[1]}"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    try:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 9, hard)
        )
        with pytest.raises(OSError, match="Too many open files"):
            taken += (os.dup(0) for _ in itertools.count())
        pulled = pull(reader, url)
        assert pulled.status == bytes([BlockStatus.LATE]) * 4
        assert "Too many open files" in pulled.error
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert pull(reader, url).status == b"\1" * 4


def test_more_bytes_than_an_answer_has_are_nobodys(reader: Side) -> None:
    """What follows is not taken for the next answer: the connection is not used again."""
    scripts = [say(lambda s, r: answer(s, r) + answer(s, r), close=False), say(answer, close=False)]
    with scripted(*scripts) as url:
        for _ in range(2):
            pulled = pull(reader, url)
            assert (pulled.status, pulled.error) == (b"\1" * 4, "")
            assert [reader.block(row, NBYTES, NBYTES) for row in (0, 2, 4, 6)] == BLOCKS


def test_listening_to_the_world_takes_a_secret_and_tls_or_trust() -> None:
    """A secret that was made on this machine is known to no other."""
    local = ClusterSecrets(SecretSource("made on this machine", local=True))
    for plaintext in (False, True):
        side = Side(URL, secrets=local, plaintext=plaintext)
        try:
            for url in ("tcp://0.0.0.0:0", "tcp://[::]:0"):
                with pytest.raises(ConfigError, match="no cluster secret is set"):
                    side.transport.listen(url)
            for url in ("tcp://127.0.0.1", "tcp://:1", "tcp://127.0.0.1:99999", "tcp://h:1/x"):
                with pytest.raises(ConfigError):
                    side.transport.listen(url)
            assert side.transport.listen(URL).startswith("tcp://127.0.0.1:")
        finally:
            side.transport.close()
    guarded = Side(URL)
    try:
        with pytest.raises(ConfigError, match=r"(?s)not be encrypted.*kvpool certs.*--plaintext"):
            guarded.transport.listen("tcp://0.0.0.0:0")
    finally:
        guarded.transport.close()
    guarded = Side(URL, plaintext=True)
    try:
        assert guarded.transport.listen("tcp://0.0.0.0:0").startswith("tcp://0.0.0.0:")
    finally:
        guarded.transport.close()


def test_a_name_that_does_not_resolve(reader: Side) -> None:
    pulled = pull(reader, "tcp://no-such-host.invalid:7070", 20.0)
    assert pulled.status == bytes([BlockStatus.LATE]) * 4
    assert "no-such-host.invalid" in pulled.error


def test_a_peers_word_alone_drops_nothing() -> None:
    """A peer calls good blocks and a broken one corrupt: only the broken one is passed on."""
    owner = Side(URL)
    owner.source.stride = NBYTES
    for number, block in enumerate(BLOCKS):
        owner.source.put(KEYS[number], number, block)
    owner.bytes[2 * NBYTES + 17] ^= 1
    port = int(owner.transport.listen(URL).rsplit(":", 1)[1])
    try:
        with socket.create_connection(("127.0.0.1", port)) as sock:
            stream = Stream(sock, Deadline(PATIENCE_S))
            greet(stream, PEER)
            stream.send(fetch_of(b"d" * 16, NBYTES, b"".join(KEYS), 30.0), 1)
            _, payload = stream.receive(1 << 20)
            assert peer_wire.decode_peer(payload).present == b"\1" * 4
            left = 4 * NBYTES
            while left:
                left -= len(sock.recv(left))
            stream.send(peer_wire.Corrupt("default", b"d" * 16, 0, b"".join(KEYS)), 0)
            assert owner.source.wait_for_report()
            assert [report.keys for report in owner.source.reports] == [KEYS[2]]
            assert owner.source.wait_until_returned()
    finally:
        owner.transport.close()


# ---- who goes first ------------------------------------------------------------------------------------


class WatchedPriority(Priority):
    """Counts."""

    urgent_ones = gave_way = 0

    @contextmanager
    def urgent(self) -> Iterator[None]:
        self.urgent_ones += 1
        with super().urgent():
            yield

    def give_way(self, left_s: float) -> None:
        self.gave_way += 1
        super().give_way(left_s)


@pytest.mark.parametrize(
    ("background", "urgent_ones", "gave_way"),
    [(False, 1, 0), (True, 0, 4)],
    ids=["urgent", "background"],
)
def test_both_sides_know_who_goes_first(background: bool, urgent_ones: int, gave_way: int) -> None:
    nbytes = 1 << 20
    owner, reader = Side(URL), Side(URL)
    for side in (owner, reader):
        side.transport.precedence.__class__ = WatchedPriority  # type: ignore[attr-defined]
    try:
        owner.source.stride = nbytes
        for n, key in enumerate(KEYS):
            owner.source.put(key, n, bytes([65 + n]) * nbytes)
        url = owner.transport.listen(URL)
        pulled = reader.transport.pull(
            order(url, nbytes, KEYS, [0, 1, 2, 3], background=background), Stop()
        )
        assert pulled.status == bytes([BlockStatus.PRESENT]) * 4
        assert owner.source.wait_until_returned()
        ways = reader.transport.precedence  # type: ignore[attr-defined]
        assert (ways.urgent_ones, ways.gave_way) == (urgent_ones, gave_way)
        ways = owner.transport.precedence  # type: ignore[attr-defined]
        # The header goes before the first piece, and so makes the last one a piece of its own.
        assert (ways.urgent_ones, ways.gave_way) == (urgent_ones, gave_way + background)
    finally:
        reader.transport.close()
        owner.transport.close()


def test_parts_of_one_pull_are_one_loan() -> None:
    with ExitStack() as stack:
        owner, reader = Side(URL), Side(URL)
        stack.callback(owner.transport.close)
        stack.callback(reader.transport.close)
        pair = PartsPair(owner, reader, owner.transport.listen(URL))
        pulled, wanted = pair.pull({0: [1, 2], 1: [77, 3], 2: list(range(5))})
        pair.check(wanted, pulled, {(1, 77)})
        assert owner.source.lent == 1
        assert owner.source.wait_until_returned()


# ---- bugs in what serves peers ------------------------------------------------------------------------


def test_a_bug_met_in_a_read_ends_its_connection_and_no_other(reader: Side) -> None:
    owner, other = Side(URL, node="owner"), Side(URL)
    with closing(owner.transport), closing(other.transport):
        url = owner.transport.listen(URL)
        owner.source.stride = NBYTES
        owner.source.put(KEYS[0], 0, BLOCKS[0])
        assert other.transport.ask(asking(url, KEYS[0]), Stop()) == frame.Done(1)
        owner.source.error = RuntimeError("a bug")
        for question in (asking, awaiting):
            with pytest.raises(InternalError, match="RuntimeError"):
                reader.transport.ask(question(url, KEYS[0]), Stop())
        pulled = pull(reader, url)
        assert pulled.status == bytes([BlockStatus.LATE]) * len(KEYS)
        assert owner.source.faults == ["Ask", "Await", "Fetch"]
        owner.source.error = None
        assert other.transport.ask(asking(url, KEYS[0]), Stop()) == frame.Done(1)
        assert pull(reader, url).status[0] == BlockStatus.PRESENT


@pytest.mark.parametrize("error", [RuntimeError("a bug"), InternalError("told by the rules")])
def test_the_connection_that_met_a_bug_is_told_and_ended(error: Exception) -> None:
    owner = Side(URL, node="owner")
    with closing(owner.transport):
        address = host_and_port(owner.transport.listen(URL))
        owner.source.error = error
        with closing(Stream(socket.create_connection(address), Deadline(PATIENCE_S))) as stream:
            greet(stream, PEER)
            stream.deadline = Deadline(PATIENCE_S)
            stream.send(peer_wire.Ask("default", bytes(16), [], KEYS[0]), 5)
            number, payload = stream.receive(1 << 20)
            told = peer_wire.decode_peer(payload)
            assert (number, told.code) == (5, "internal")
            with pytest.raises(Closed):
                stream.receive(1 << 20)

"""A real daemon among peers that break off, talk nonsense, or come by the thousand: it goes on serving its own.

What is counted is the daemon's word (slots, leases, loans) and the kernel's (descriptors, threads, memory).
"""

import itertools
import resource
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import psutil
import pytest

from kvpool.client import Client
from kvpool.errors import KvpoolError
from kvpool.security.cluster_secrets import ClusterSecrets, make_default
from kvpool.telemetry.cluster_stats import WorkerStats
from kvpool.transfer.base import Deadline, Identity
from kvpool.transfer.handshake import greet
from kvpool.transfer.stream import Closed, Stream
from kvpool.types import NamespaceRecord
from kvpool.wire import frame
from kvpool.wire import operator as operator_wire
from kvpool.wire import peer as peer_wire
from tests.support.fetches import fetch_of
from tests.support.proxy import Ending, Fault, Proxy, Way
from tests.support.waiting import PATIENCE_S

NBYTES = 32 << 10
COUNT = 12
RECORD = NamespaceRecord.simple("hostile", block_bytes=NBYTES, block_tokens=16)
PEERS_MAX = 64
STRANGERS = PEERS_MAX // 4  # beyond these, while they authenticate
_numbers = itertools.count(1)


def blocks(numbers: range) -> list[bytes]:
    return [np.random.default_rng(number).bytes(NBYTES) for number in numbers]


def keys_of(numbers: range) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in numbers]


class Pair:
    """a owns blocks and b pulls them, through a proxy. Their processes have to live through all of this."""

    def __init__(self, a: Any, b: Any, proxy: Proxy, until: Callable[..., Any]) -> None:
        self.a, self.b, self.proxy, self.until = a, b, proxy, until
        self.at_a: Client = a.client(connect=True)
        self.at_b: Client = b.client(connect=True)
        self.ns_a, self.ns_b = self.at_a.open(RECORD), self.at_b.open(RECORD)
        self.pids = self.processes()

    @property
    def address(self) -> tuple[str, int]:
        """Of a itself, without the proxy."""
        return ("127.0.0.1", int(self.mover_of_a.listening[0].rpartition(":")[2]))

    @property
    def mover_of_a(self) -> WorkerStats:
        return self.at_a.stats().transfer_workers[0]

    def processes(self) -> list[int]:
        return [*self.a.family(), *self.b.family()]

    def put(self, count: int = COUNT) -> range:
        """Blocks that a has, and that nobody has asked for."""
        first = next(_numbers) << 20
        numbers = range(first, first + count)
        assert self.at_a.put(self.ns_a, keys_of(numbers), blocks(numbers)) == count
        return numbers

    def here(self, numbers: range) -> int:
        """How many of the blocks b has, all of them right."""
        got = self.at_b.get(self.ns_b, keys_of(numbers))
        found = [(one, right) for one, right in zip(got, blocks(numbers), strict=True) if one]
        assert all(one == right for one, right in found)
        return len(found)

    def forget(self, numbers: range) -> None:
        self.at_b.remove(self.ns_b, keys_of(numbers))
        self.at_a.remove(self.ns_a, keys_of(numbers))

    def pulls(self, wait_s: float = 10.0) -> bool:
        """Whether new blocks come over, all of them right."""
        numbers = self.put()
        came = self.at_b.pull(self.ns_b, keys_of(numbers), wait_s=wait_s) == COUNT
        came = came and self.here(numbers) == COUNT
        self.forget(numbers)
        return came

    def check_nothing_is_held(self, in_use: int = 0) -> None:
        """Slots at b, leases and loans at a."""
        self.until(lambda: self.mover_of_a.loans == 0, what="the loans are back")
        self.until(lambda: self.at_a.stats().leases == 0)
        self.until(lambda: self.at_b.stats().transfer_workers[0].orders == 0)
        self.until(
            lambda: self.at_b.stats().tenants["default"].space.bytes_used == in_use * NBYTES,
            what="the slots of what did not come are back",
        )

    def check_nobody_died(self) -> None:
        assert self.processes() == self.pids
        for daemon in (self.a, self.b):
            assert "Traceback" not in daemon.stderr
            assert "Exception" not in daemon.stderr

    def close(self) -> None:
        self.at_a.close()
        self.at_b.close()


@pytest.fixture(scope="module")
def world(
    start_one: Callable[..., Any], request: pytest.FixtureRequest
) -> Iterator[tuple[Any, Any, Proxy]]:
    port = [0]
    with ExitStack() as stack:
        proxy = stack.enter_context(Proxy(lambda: ("127.0.0.1", port[0])))
        flags = ("--memory", "32MiB", "--probe-s", "0")
        a = stack.enter_context(
            start_one("--listen", "tcp://127.0.0.1:0", "--peers-max", str(PEERS_MAX), *flags)
        )
        port[0] = int(a.ready.rsplit("peers at ", 1)[1].strip().rpartition(":")[2])
        b = stack.enter_context(start_one("--peer", proxy.url, *flags))
        yield a, b, proxy


@pytest.fixture
def pair(world: tuple[Any, Any, Proxy], until: Callable[..., Any]) -> Iterator[Pair]:
    """Both are well before the test, and have to be afterwards."""
    one = Pair(*world, until)
    until(one.pulls)
    yield one
    one.proxy.set()
    until(one.pulls, "all is well again")
    one.check_nothing_is_held()
    one.check_nobody_died()
    one.close()


# ---- connections that end in the middle ------------------------------------------------------------------

HANDSHAKE = 90  # about so many bytes each way; header and body follow
BODY = NBYTES * COUNT
DOWN = {
    "before the first byte": 0,
    "in a length": 3,
    "in the handshake": HANDSHAKE // 2,
    "near its end": HANDSHAKE,
    "in the answer": HANDSHAKE + 40,
    "in the checksums": HANDSHAKE + 150,
    "in the first block": -BODY + NBYTES // 2,
    "between two blocks": -BODY + NBYTES,
    "in the middle of a vector": -BODY // 2 - 100,
    "before the last byte": -1,
}
UP = {
    "before the hello": 0,
    "in the hello": 30,
    "in the question": HANDSHAKE + 60,
    "in the request": -100,
    "before its last byte": -1,
    "after it": 0x7FFFFFFF,
}


@pytest.mark.parametrize(
    ("way", "offset", "ending"),
    [
        pytest.param(way, offset, ("close", "reset")[index % 2], id=f"{way} {name}")
        for way, places in (("down", DOWN), ("up", UP))
        for index, (name, offset) in enumerate(places.items())
    ],
)
def test_a_pull_whose_connection_ends(pair: Pair, way: Way, offset: int, ending: Ending) -> None:
    """offset: of one whole pull over a new connection; negative: from its end."""
    proxy = pair.proxy
    proxy.cut()
    before = dict(proxy.delivered)
    assert pair.pulls()
    proxy.cut()
    whole = proxy.delivered[way] - before[way]
    at = min(whole, offset if offset >= 0 else whole + offset)
    numbers = pair.put()
    proxy.set(Fault(stop=(way, at), ending=ending))
    said = pair.at_b.pull(pair.ns_b, keys_of(numbers), wait_s=20.0)
    assert proxy.stopped.is_set()
    proxy.set()
    came = pair.here(numbers)
    assert said <= came
    pair.check_nothing_is_held(in_use=came)
    pair.until(lambda: pair.at_b.pull(pair.ns_b, keys_of(numbers), wait_s=5) == COUNT)
    assert pair.here(numbers) == COUNT
    pair.forget(numbers)


# ---- peers that talk nonsense ----------------------------------------------------------------------------


class Peer:
    """A connection to a daemon as one of its peers. Raises what the handshake raises."""

    def __init__(self, address: tuple[str, int]) -> None:
        sock = socket.create_connection(address, 20)
        sock.setblocking(True)
        self.stream = Stream(sock, Deadline(PATIENCE_S))
        try:
            greet(
                self.stream,
                Identity("kvpool", "x", "0" * 16, ClusterSecrets(make_default("kvpool"))),
            )
        except BaseException:
            self.close()
            raise

    def ask(self, message: frame.Message) -> frame.Message | None:
        """What is answered; None where the connection is ended instead. Raises when neither happens."""
        self.stream.deadline = Deadline(PATIENCE_S)
        try:
            self.stream.send(message, 7)
            request, payload = self.stream.receive(frame.FRAME_BYTES_MAX)
        except Closed:
            return None
        assert request in (7, 0)
        answer: frame.Message = peer_wire.decode_peer(payload)
        return answer

    def close(self) -> None:
        self.stream.close()


D = RECORD.digest()
KEY, KEYS = b"k" * 16, b"k" * 16 + b"l" * 16
FIELDS = RECORD.canonical()
SPEC = [(NBYTES, "full", 0, 1)]
BIG = 2**64 - 1


def offer(**changes: Any) -> peer_wire.Offer:
    right: dict[str, Any] = {
        "node": "x",
        "incarnation": "0" * 16,
        "reason": "copy",
        "tenant": "default",
        "digest": D,
        "epoch": 0,
        "fields": FIELDS,
        "parts": SPEC,
        "keys": KEYS,
        "mask": b"\1",
        "replicas": 2,
        "hops": 1,
        "age_s": 0.0,
        "deadline_s": 0.5,
    }
    return peer_wire.Offer(**(right | changes))


def parts(*wanted: tuple[int, int, bytes]) -> peer_wire.Fetch:
    return peer_wire.Fetch("default", D, [peer_wire.PartKeys(*one) for one in wanted], 5.0)


NONSENSE: dict[str, frame.Message] = {
    "ask: a part that is none": peer_wire.Ask("default", D, [1], KEYS),
    "ask: a part far away": peer_wire.Ask("default", D, [BIG], KEYS),
    "ask: a part before the first": peer_wire.Ask("default", D, [-1, -2], KEYS),
    "ask: a part again and again": peer_wire.Ask("default", D, [0] * 1000, KEYS),
    "ask: no keys": peer_wire.Ask("default", D, [], b""),
    "ask: half a key": peer_wire.Ask("default", D, [], KEYS[:-3]),
    "ask: another namespace": peer_wire.Ask("default", b"", [], KEYS),
    "ask: another tenant": peer_wire.Ask("\0\n", D, [], KEYS),
    "fetch: no keys": fetch_of(D, NBYTES, b"", 5.0),
    "fetch: half a key": fetch_of(D, NBYTES, KEYS[:-3], 5.0),
    "fetch: a key twice": fetch_of(D, NBYTES, KEY * 2, 5.0),
    "fetch: a part that is none": fetch_of(D, NBYTES, KEYS, 5.0, 1),
    "fetch: a part before the first": fetch_of(D, NBYTES, KEYS, 5.0, -1),
    "fetch: a part far away": fetch_of(D, NBYTES, KEYS, 5.0, BIG),
    "fetch: shorter": fetch_of(D, NBYTES - 1, KEYS, 5.0),
    "fetch: longer": fetch_of(D, NBYTES + 1, KEYS, 5.0),
    "fetch: longest": fetch_of(D, BIG, KEY, 5.0),
    "fetch: less than nothing": fetch_of(D, -NBYTES, KEYS, 5.0),
    "fetch: too late": fetch_of(D, NBYTES, KEYS, -1.0),
    "fetch: never": fetch_of(D, NBYTES, KEYS, float("nan")),
    "fetch: for ever": fetch_of(D, NBYTES, KEYS, float("inf")),
    "parts: none": parts(),
    "parts: one again": parts((0, NBYTES, KEYS), (0, NBYTES, KEYS)),
    "parts: one that is none": parts((0, NBYTES, KEYS), (1, NBYTES, KEYS)),
    "parts: one far away": parts((0, NBYTES, KEYS), (BIG, NBYTES, KEYS)),
    "parts: nothing of one": parts((0, 0, KEYS), (1, NBYTES, KEYS)),
    "parts: less than nothing of one": parts((0, NBYTES, KEYS), (1, -NBYTES, KEYS)),
    "parts: half a key": parts((0, NBYTES, KEYS[:-3]), (1, NBYTES, KEYS)),
    "parts: no keys": parts((0, NBYTES, b""), (1, NBYTES, b"")),
    "parts: without keys": parts(*[(part, 1, b"") for part in range(4000)]),
    "parts: very many": parts(*[(part, 1, KEYS[:16]) for part in range(10_000)]),
    "corrupt: not fetched": peer_wire.Corrupt("default", D, 0, KEYS),
    "offer: from nobody": offer(),
    "offer: no incarnation": offer(incarnation="no hex"),
    "offer: half a key": offer(keys=KEYS[:-3]),
    "offer: no fields": offer(fields=b"\xc1"),
    "offer: other parts": offer(parts=[(-1, "full", BIG, -7)]),
    "offer: parts that are not there": offer(mask=b"\xff" * 40),
    "offer: of the future": offer(epoch=BIG),
    "offer: never": offer(deadline_s=float("nan"), age_s=float("nan")),
    "offer: for long": offer(deadline_s=float("inf"), replicas=-1, hops=-1),
    "await: no keys": peer_wire.Await("x", "default", D, b"", b"", 0.1),
    "await: masks without keys": peer_wire.Await("x", "default", D, b"", b"\1\1", 0.1),
    "await: half a mask": peer_wire.Await("x", "default", D, KEYS, b"\1\1\1", 0.1),
    "await: half a key": peer_wire.Await("x", "default", D, KEYS[:-3], b"\0\0", 0.1),
    "await: another namespace": peer_wire.Await("x", "default", b"", KEYS, b"\0\0", 0.1),
    "await: never": peer_wire.Await("x", "default", D, KEYS, b"\0\0", float("nan")),
    "await: before": peer_wire.Await("x", "default", D, KEYS, b"\0\0", float("-inf")),
    "hello again": peer_wire.PeerHello(frame.PROTOCOL_VERSION, "kvpool", "x", b"n" * 32),
    "an answer": peer_wire.Fetched(b"\1", bytes(16)),
    "taken": peer_wire.Taken(),
}


@pytest.mark.parametrize("said", NONSENSE)
def test_a_peer_that_talks_nonsense_is_answered_or_shown_out(pair: Pair, said: str) -> None:
    """At once, by an error, an end, or what is true; and it costs nobody else anything."""
    peer = Peer(pair.address)
    try:
        peer.ask(NONSENSE[said])
    finally:
        peer.close()
    pair.check_nobody_died()


def test_no_first_word_ends_the_process_that_hears_it(pair: Pair) -> None:
    """Before anybody is known: a surplus field that is nested too deep, and a name that is no text; many times."""
    hello = peer_wire.PeerHello(frame.PROTOCOL_VERSION, "kvpool", "x", bytes(32))
    right = frame.encode(hello, 1)[frame.HEADER.size :]
    nested = bytes([right[0] + 1]) + right[1:] + b"\x91" * 2000 + b"\xc0"
    for wrong in (nested, right.replace(b"kvpool", b"\xff" * 6)):
        for _ in range(12):
            with socket.create_connection(pair.address, PATIENCE_S) as sock:
                sock.sendall(frame.HEADER.pack(len(wrong), 1) + wrong)
                while sock.recv(4096):
                    pass
    pair.check_nobody_died()


def test_what_operators_ask_comes_in_the_name_of_the_node_that_asks(pair: Pair) -> None:
    """The audit log tells that name: no other one can be put there."""
    request = frame.encode(operator_wire.PinBlocks(KEY, "soft"), 0)[frame.HEADER.size :]
    for name, done in (("x", True), ("a", False), ("", False)):
        peer = Peer(pair.address)
        try:
            answer = peer.ask(peer_wire.Operate(name, request, 0.0, "default", "somebody"))
        finally:
            peer.close()
        assert isinstance(answer, frame.Bytes) is done, (name, answer)
        if not done:
            assert isinstance(answer, frame.Error)
            assert "in the name of another node" in answer.message
    pair.check_nobody_died()


def test_a_key_twice_in_one_pull_is_one_block(pair: Pair) -> None:
    numbers = pair.put()
    twice = [key for key in keys_of(numbers) for _ in range(2)]
    assert pair.at_b.pull(pair.ns_b, twice, wait_s=10) == 2 * COUNT
    assert pair.here(numbers) == COUNT
    pair.check_nothing_is_held(in_use=COUNT)
    pair.forget(numbers)


# ---- ten thousand connections ----------------------------------------------------------------------------


class Use:
    """What the daemon's processes take of the machine, by the kernel's word."""

    def __init__(self, pair: Pair) -> None:
        self._all = [psutil.Process(pid) for pid in pair.a.family()]

    @property
    def fds(self) -> int:
        return sum(process.num_fds() for process in self._all)

    @property
    def threads(self) -> int:
        return sum(process.num_threads() for process in self._all)

    @property
    def private_bytes(self) -> int:
        """Resident, and in no segment."""
        found = [process.memory_info() for process in self._all]
        return sum(info.rss - info.shared for info in found)


ROUND = 1000
ROUNDS = 10
SLACK = 12  # descriptors and threads that come and go by themselves
MEMORY_BYTES_MAX = 32 << 20
HALF_A_HELLO = frame.encode(
    peer_wire.PeerHello(frame.PROTOCOL_VERSION, "kvpool", "x", b"n" * 32), 1
)[:40]


def open_sockets(limit: int) -> int:
    """How many sockets this process may open more, at most `limit`."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(limit, soft - psutil.Process().num_fds() - 64)


@pytest.mark.timeout(900)
def test_ten_thousand_connections_are_tried(pair: Pair) -> None:
    """Silent ones, half a word, nonsense, resets, and peers that stay: never more than may be at a time."""
    use = Use(pair)
    fds, threads, memory = use.fds, use.threads, use.private_bytes
    tried = 0
    each = open_sockets(ROUND)
    while tried < ROUND * ROUNDS:
        with ExitStack() as stack:
            for number in range(each):
                sock = socket.create_connection(pair.address, 20)
                stack.callback(sock.close)
                match number % 4:
                    case 0:
                        sock.sendall(HALF_A_HELLO)
                    case 1:
                        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
                    case 2:
                        sock.setsockopt(
                            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                        )
                        sock.close()
                    case _:
                        pass  # says nothing
            tried += each
            assert use.fds <= fds + PEERS_MAX + STRANGERS + SLACK
            assert use.threads <= threads + PEERS_MAX + STRANGERS + SLACK
            assert use.private_bytes <= memory + MEMORY_BYTES_MAX
            newcomer = Peer(pair.address)
            stack.callback(newcomer.close)
            answer = newcomer.ask(peer_wire.Ask("default", D, [], KEY))
            assert answer == frame.Done(0), "who can say who it is gets in"
            assert pair.pulls(), "over the connection that there was"
            pair.proxy.cut()
            assert pair.pulls(), "and over a new one"
    pair.until(lambda: use.fds <= fds + SLACK, what="the descriptors are back")
    pair.until(lambda: use.threads <= threads + SLACK, what="the threads are back")
    assert use.private_bytes <= memory + MEMORY_BYTES_MAX


def test_peers_that_stay_and_say_nothing_take_nobodys_place(pair: Pair) -> None:
    """As many as may be are known and idle: others are refused, who was there before is served."""
    use = Use(pair)
    fds, threads = use.fds, use.threads
    with ExitStack() as stack:
        known = [Peer(pair.address) for _ in range(PEERS_MAX - 4)]
        for peer in known:
            stack.callback(peer.close)
        refused = 0
        for _ in range(PEERS_MAX):
            try:
                peer = Peer(pair.address)
            except KvpoolError:
                refused += 1
            else:
                stack.callback(peer.close)
        assert refused >= PEERS_MAX - 4
        assert use.fds <= fds + PEERS_MAX + STRANGERS + SLACK
        assert use.threads <= threads + PEERS_MAX + STRANGERS + SLACK
        assert pair.pulls()
        for peer in known[::10]:
            assert peer.ask(peer_wire.Ask("default", D, [], KEY)) == frame.Done(0)
    pair.until(lambda: use.fds <= fds + SLACK)
    pair.until(lambda: use.threads <= threads + SLACK)

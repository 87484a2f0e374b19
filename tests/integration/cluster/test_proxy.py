"""The proxy does what it is asked to, and nothing else: other tests rely on it."""

import contextlib
import socket
import threading
import time

import pytest

from tests.support.proxy import BOTH, Fault, Proxy
from tests.support.waiting import PATIENCE_S

SENT = bytes(range(256)) * 1024


class Echo:
    """Sends back what it gets, until its peer has said all."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.thread = threading.Thread(target=self._accept)
        self.thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            with sock:
                try:
                    while data := sock.recv(1 << 16):
                        sock.sendall(data)
                except OSError:
                    pass

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join()


@pytest.fixture
def proxy():
    echo = Echo()
    with Proxy(echo.listener.getsockname()[:2]) as proxy:
        yield proxy
    echo.close()


@pytest.fixture
def connect(proxy):
    socks = []

    def make():
        socks.append(socket.create_connection(proxy.address, PATIENCE_S))
        return socks[-1]

    yield make
    for sock in socks:
        sock.close()


def send(sock, data: bytes) -> threading.Thread:
    thread = threading.Thread(target=sock.sendall, args=(data,))
    thread.start()
    return thread


def receive(sock, count: int) -> bytes:
    got = b""
    while len(got) < count and (data := sock.recv(1 << 16)):
        got += data
    return got


def silence(sock) -> bool:
    sock.settimeout(0.3)
    try:
        sock.recv(1)
    except TimeoutError:
        return True
    finally:
        sock.settimeout(PATIENCE_S)
    return False


def test_all_bytes_pass_unchanged(proxy, connect, until):
    sock = connect()
    sender = send(sock, SENT)
    assert receive(sock, len(SENT)) == SENT
    sender.join()
    until(lambda: proxy.carried == 2 * len(SENT))  # counted after they were sent


def test_one_byte_is_flipped_at_its_offset(proxy, connect):
    proxy.set(Fault(flip=("down", 100_000)))
    for _ in range(2):
        sock = connect()
        sender = send(sock, SENT)
        got = receive(sock, len(SENT))
        sender.join()
        assert [i for i, (x, y) in enumerate(zip(got, SENT, strict=True)) if x != y] == [100_000]
        sock.close()


def test_bytes_are_flipped_again_and_again(proxy, connect):
    proxy.set(Fault(flip=("up", 1000), flip_every=70_000))
    sock = connect()
    sender = send(sock, SENT)
    got = receive(sock, len(SENT))
    sender.join()
    wrong = [i for i, (x, y) in enumerate(zip(got, SENT, strict=True)) if x != y]
    assert wrong == list(range(1000, len(SENT), 70_000))


@pytest.mark.parametrize("ways", [{"up"}, {"down"}, BOTH])
def test_what_is_held_arrives_when_it_is_let_go(proxy, connect, ways):
    sock = connect()
    sock.sendall(b"before")
    assert receive(sock, 6) == b"before"
    proxy.set(Fault(hold=frozenset(ways)))
    sock.sendall(b"after")
    assert silence(sock)
    proxy.set()
    assert receive(sock, 5) == b"after"


def test_silence_refusal_and_cuts(proxy, connect):
    old = connect()
    old.sendall(b"x")
    assert receive(old, 1) == b"x"
    proxy.set(Fault(silent=True))
    silent = connect()
    silent.sendall(b"hello?")
    assert silence(silent)
    old.sendall(b"y")
    assert receive(old, 1) == b"y", "connections that there were are spared"
    proxy.cut()
    assert receive(old, 1) == b""
    proxy.set(Fault(refuse=True))
    with pytest.raises(ConnectionResetError):
        connect().recv(1)


@pytest.mark.parametrize("named", ["one", "other"])
def test_a_fault_may_be_one_caller_s_alone(named):
    echo = Echo()
    try:
        with (
            Proxy(echo.listener.getsockname()[:2], caller=lambda _: named) as proxy,
            socket.create_connection(proxy.address, PATIENCE_S) as sock,
        ):
            proxy.set_for("one", Fault(hold=BOTH))
            sock.sendall(b"x")
            assert silence(sock) == (named == "one")
            proxy.set_for("one", None)
            if named == "one":
                assert receive(sock, 1) == b"x"
    finally:
        echo.close()


def test_one_way_is_closed_and_the_other_goes_on(proxy, connect):
    proxy.set(Fault(half_close="down"))
    sock = connect()
    assert receive(sock, 1) == b""
    sock.sendall(b"still heard")
    assert proxy.connections == 1


def test_no_more_than_so_much_arrives_in_a_second(proxy, connect, until):
    sock = connect()
    sock.sendall(b"before")
    assert receive(sock, 6) == b"before"
    until(lambda: proxy.carried == 12)  # counted a moment after it has arrived
    proxy.set(Fault(bytes_s=4 * len(SENT)))
    begun, carried = time.monotonic(), proxy.carried
    sender = threading.Thread(target=sock.sendall, args=(SENT,))
    sender.start()
    assert receive(sock, len(SENT)) == SENT
    # There and back again, at once only what a tick lets through.
    assert time.monotonic() - begun > 0.4
    until(lambda: proxy.carried - carried == 2 * len(SENT))
    sender.join()
    proxy.set()
    sock.sendall(b"after")
    assert receive(sock, 5) == b"after"


@pytest.mark.parametrize("ending", ["close", "reset"])
@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("offset", [0, 1, 100_000])
def test_so_many_bytes_arrive_and_then_the_connection_ends(proxy, connect, ending, way, offset):
    proxy.set(Fault(stop=(way, offset), ending=ending))
    for _ in range(2):
        got = b""
        with contextlib.suppress(ConnectionError):
            sock = connect()  # it may have ended already
            with contextlib.suppress(ConnectionError):
                sock.sendall(SENT)
            got = receive(sock, len(SENT))
        assert proxy.stopped.wait(PATIENCE_S)
        assert got == SENT[: len(got)]
        assert len(got) <= offset


def test_so_many_bytes_arrive_and_then_nothing_more(proxy, connect):
    proxy.set(Fault(stop=("down", 6), ending="hold"))
    sock = connect()
    sock.sendall(b"before and after")
    assert receive(sock, 6) == b"before"
    assert proxy.stopped.wait(PATIENCE_S)
    assert silence(sock)
    proxy.set()
    assert not proxy.stopped.is_set()
    assert receive(sock, 10) == b" and after"

"""Who is let in: every pair of secrets and clusters, and proofs that are played back."""

import socket
import threading
from collections.abc import Iterator

import pytest

from kvpool.errors import KvpoolError, NotAuthenticated
from kvpool.transfer.base import Deadline, Identity
from kvpool.transfer.handshake import admit, greet, refuse
from kvpool.transfer.stream import Stream
from kvpool.wire import frame
from kvpool.wire import peer as peer_wire
from tests.support.waiting import PATIENCE_S

SECRET = b"0123456789abcdef"


@pytest.fixture
def ends() -> Iterator[tuple[Stream, Stream]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with ours, theirs:
        for sock in (ours, theirs):
            sock.setblocking(True)
        yield Stream(ours, Deadline(PATIENCE_S)), Stream(theirs, Deadline(PATIENCE_S))


def identity(secret: bytes = SECRET, cluster: str = "c") -> Identity:
    return Identity(cluster, "n", "i", secret)


class Listener(threading.Thread):
    """`admit` in a thread, as the serving side runs it."""

    def __init__(self, stream: Stream, us: Identity) -> None:
        super().__init__()
        self.stream, self.us = stream, us
        self.error: KvpoolError | None = None

    def run(self) -> None:
        try:
            admit(self.stream, self.us)
        except KvpoolError as error:
            self.error = error
            refuse(self.stream, error)


@pytest.mark.parametrize("secret", [SECRET, b""])
def test_equals_are_let_in(ends: tuple[Stream, Stream], secret: bytes) -> None:
    listener = Listener(ends[1], identity(secret))
    listener.start()
    assert greet(ends[0], identity(secret)).node == "n"
    listener.join()
    assert listener.error is None


@pytest.mark.parametrize(
    ("connects", "listens"),
    [
        (identity(b"wrong"), identity()),
        (identity(b""), identity()),
        (identity(), identity(b"")),
        (identity(cluster="d"), identity()),
    ],
)
def test_strangers_are_not(
    ends: tuple[Stream, Stream], connects: Identity, listens: Identity
) -> None:
    listener = Listener(ends[1], listens)
    listener.start()
    with pytest.raises(NotAuthenticated):
        greet(ends[0], connects)
    ends[0].shut()
    listener.join()
    assert listener.error is not None


def test_the_listeners_own_proof_does_not_serve_to_connect(ends: tuple[Stream, Stream]) -> None:
    """Without the secret, all that can be shown is what the listener has just said."""
    listener = Listener(ends[1], identity())
    listener.start()
    ends[0].send(peer_wire.PeerHello(frame.PROTOCOL_VERSION, "c", "n", b"n" * 32), 1)
    challenge = peer_wire.decode_peer(ends[0].receive(1 << 16)[1])
    ends[0].send(peer_wire.PeerProof(challenge.proof), 2)
    answer = peer_wire.decode_peer(ends[0].receive(1 << 16)[1])
    listener.join()
    assert isinstance(listener.error, NotAuthenticated)
    assert answer.code == "not_authenticated"

"""Who is let in: every pair of secrets and clusters, and proofs that are played back."""

import itertools
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.errors import Declined, KvpoolError, NotAuthenticated, ProtocolError
from kvpool.security.cluster_secrets import ClusterSecrets, SecretSource
from kvpool.transfer.base import Deadline, Identity
from kvpool.transfer.handshake import admit, greet, refuse
from kvpool.transfer.stream import Stream
from kvpool.wire import frame
from kvpool.wire import peer as peer_wire
from tests.support.waiting import PATIENCE_S

SECRET = "0123456789abcdef"


@contextmanager
def connected() -> Iterator[tuple[Stream, Stream]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with ours, theirs:
        for sock in (ours, theirs):
            sock.setblocking(True)
        yield Stream(ours, Deadline(PATIENCE_S)), Stream(theirs, Deadline(PATIENCE_S))


@pytest.fixture
def ends() -> Iterator[tuple[Stream, Stream]]:
    with connected() as pair:
        yield pair


def identity(*secrets: str, cluster: str = "c") -> Identity:
    secrets = secrets or (SECRET,)
    found = ClusterSecrets.of(*(each for each in secrets if each))
    return Identity(cluster, "n", "i", found)


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


def test_equals_are_let_in(ends: tuple[Stream, Stream]) -> None:
    listener = Listener(ends[1], identity())
    listener.start()
    assert greet(ends[0], identity()).node == "n"
    listener.join()
    assert listener.error is None


@pytest.mark.parametrize(
    ("connects", "listens"),
    [
        (identity("wrong"), identity()),
        (identity(""), identity()),
        (identity(), identity("")),
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


# ---- several secrets, and keys -------------------------------------------------------------------------------


def meet(ends: tuple[Stream, Stream], connects: Identity, listens: Identity) -> None:
    listener = Listener(ends[1], listens)
    listener.start()
    greet(ends[0], connects)
    listener.join()
    assert listener.error is None


@pytest.mark.parametrize(
    ("connects", "listens"),
    [
        (("new", "old"), ("old",)),
        (("old",), ("new", "old")),
        (("new", "old"), ("new",)),
        (("new",), ("new", "old")),
        (("a", "b", "c", "old"), ("d", "e", "f", "old")),
    ],
)
def test_one_common_secret_is_enough(
    ends: tuple[Stream, Stream], connects: tuple[str, ...], listens: tuple[str, ...]
) -> None:
    meet(ends, identity(*connects), identity(*listens))
    here, there = ends
    here.send(frame.Done(7), 1)
    assert there.receive(1 << 16)[0] == 1
    there.send(frame.Done(8), 2)
    assert here.receive(1 << 16)[0] == 2
    assert here.keyed and there.keyed


def test_more_proofs_than_a_daemon_may_have_are_not_tried(ends: tuple[Stream, Stream]) -> None:
    many = [f"secret number {number}" for number in range(9)]
    listener = Listener(ends[1], identity(*many))
    listener.start()
    with pytest.raises(NotAuthenticated):
        greet(ends[0], identity(many[-1]))
    ends[0].shut()
    listener.join()


REFUSAL = (
    "the peer speaks protocol 2 and none below 2, this side 1 and none below 1: install the same version of kvpool on "
    "both sides"
)


def test_a_peer_of_a_future_protocol_is_refused(ends: tuple[Stream, Stream]) -> None:
    listener = Listener(ends[1], identity())
    listener.start()
    ends[0].send(peer_wire.PeerHello(2, "c", "n", b"n" * 32, oldest=2), 1)
    answer = peer_wire.decode_peer(ends[0].receive(1 << 16)[1])
    listener.join()
    assert answer == frame.Error("protocol", REFUSAL)
    assert isinstance(listener.error, ProtocolError)


def test_a_listener_of_a_future_protocol_is_refused(ends: tuple[Stream, Stream]) -> None:
    future = peer_wire.PeerChallenge(2, "n", "i", b"n" * 32, b"", oldest=2)
    ends[1].send(future, 1)
    with pytest.raises(ProtocolError, match=REFUSAL):
        greet(ends[0], identity())


def test_a_future_version_that_still_speaks_this_protocol_is_a_peer(
    ends: tuple[Stream, Stream],
) -> None:
    listener = Listener(ends[1], identity())
    listener.start()
    ends[0].send(peer_wire.PeerHello(2, "c", "n", b"n" * 32, oldest=1), 1)
    assert isinstance(peer_wire.decode_peer(ends[0].receive(1 << 16)[1]), peer_wire.PeerChallenge)
    ends[0].shut()
    listener.join()


def test_a_relay_cannot_change_the_versions(ends: tuple[Stream, Stream]) -> None:
    """The versions are proved, too."""
    listener = Listener(ends[1], identity())

    class Changed(Stream):
        def send_frame(self, data: bytes) -> None:
            message = peer_wire.decode_peer(data[frame.HEADER.size :])
            if isinstance(message, peer_wire.PeerHello):
                changed = msgspec.structs.replace(message, version=message.version + 1)
                data = frame.encode(changed, 1)
            super().send_frame(data)

    ends[0].__class__ = Changed
    listener.start()
    with pytest.raises(NotAuthenticated):
        greet(ends[0], identity())
    ends[0].shut()
    listener.join()


def test_a_connection_lasts_no_longer_than_its_secret(
    ends: tuple[Stream, Stream], tmp_path: Path
) -> None:
    noon, now = 1_764_590_400.0, [1_764_590_399.0]
    file = tmp_path / "secrets"
    file.write_text(f"a newer secret than that\n{SECRET} until 2025-12-01T12:00:00Z\n")
    file.chmod(0o600)
    secrets = ClusterSecrets(SecretSource(path=str(file)), now=lambda: now[0])
    meet(ends, Identity("c", "n", "i", secrets), identity())
    assert ends[0].fresh() and ends[1].fresh()
    now[0] = noon
    assert not ends[0].fresh()
    assert ends[1].fresh()


class Wire:
    """What two keyed streams send, and the means to change it."""

    def __init__(self, ends: tuple[Stream, Stream]) -> None:
        meet(ends, identity(), identity())
        self.here, self.there = ends
        self.said = bytearray()
        self.here.send_buffers = self._keep  # type: ignore[method-assign]

    def _keep(self, buffers: list[memoryview]) -> None:
        for buffer in buffers:
            self.said += buffer

    def pass_on(self, data: bytes) -> None:
        Stream.send_buffers(self.here, [memoryview(data)])


@given(at=st.integers(0, 10**6), bit=st.integers(0, 7), size=st.integers(0, 200))
def test_a_changed_bit_of_a_frame_is_found(at: int, bit: int, size: int) -> None:
    with connected() as ends:
        wire = Wire(ends)
        wire.here.send(frame.Bytes(b"x" * size), 5)
        changed = bytearray(wire.said)
        at = 4 + at % (len(changed) - 4)  # a longer length waits for bytes that do not come
        changed[at] ^= 1 << bit
        wire.pass_on(bytes(changed))
        with pytest.raises(NotAuthenticated, match="do not match their tag"):
            wire.there.receive(1 << 16)


@pytest.mark.parametrize("order", [(0, 0), (1,), (0, 1, 0)])
def test_frames_cannot_be_repeated_dropped_or_moved(
    ends: tuple[Stream, Stream], order: tuple[int, ...]
) -> None:
    wire = Wire(ends)
    frames = []
    for number in (0, 1):
        wire.here.send(frame.Done(number), number)
        frames.append(bytes(wire.said))
        wire.said.clear()
    for number in order:
        wire.pass_on(frames[number])
    for _ in order[:-1]:
        wire.there.receive(1 << 16)
    with pytest.raises(NotAuthenticated):
        wire.there.receive(1 << 16)


def test_what_is_sent_is_not_taken_back_as_the_others_answer(ends: tuple[Stream, Stream]) -> None:
    wire = Wire(ends)
    wire.here.send(frame.Done(1), 1)
    Stream.send_buffers(wire.there, [memoryview(bytes(wire.said))])
    with pytest.raises(NotAuthenticated):
        wire.here.receive(1 << 16)


@given(
    sizes=st.lists(st.integers(0, 5000), max_size=20),
    cuts=st.lists(st.integers(0, 5000), max_size=20),
    at=st.integers(0, 10**6),
)
def test_groups_of_bulk_bytes(sizes: list[int], cuts: list[int], at: int) -> None:
    """Sent from these buffers and received into others: whole, or refused where a bit was changed."""
    total = sum(sizes)
    data = random.Random(total).randbytes(total)
    parts, done = [], 0
    for size in sizes:
        parts.append(memoryview(data)[done : done + size])
        done += size
    ends_at = sorted({min(cut, total) for cut in cuts} | {0, total})
    for change in (False, True):
        with connected() as ends:
            wire = Wire(ends)
            Wire._keep(wire, wire.here.sealed(parts))
            changed = bytearray(wire.said)
            if change:
                changed[at % len(changed)] ^= 1
            wire.pass_on(bytes(changed))
            into = bytearray(total)
            views = [memoryview(into)[low:high] for low, high in itertools.pairwise(ends_at)]
            if change:
                with pytest.raises(Declined, match="do not match their tag"):
                    wire.there.receive_group(views)
            else:
                wire.there.receive_group(views)
                assert into == data

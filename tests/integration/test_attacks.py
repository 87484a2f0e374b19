"""Attacks that once worked, on real daemons: what they got then, nobody gets now.

Others of the same kind are beside what they concern: test_hostile_clients, test_hostile_peers, test_hostile_events,
test_operator_socket, router/test_announced_engines.
"""

import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_128_digest

from kvpool.client import Client
from kvpool.errors import KvpoolError, NotAuthenticated
from kvpool.security.cluster_secrets import ClusterSecrets, default_path
from kvpool.transfer.base import Deadline, Identity
from kvpool.transfer.handshake import greet
from kvpool.transfer.sealing import TAG_BYTES
from kvpool.transfer.stream import Stream
from kvpool.types import NamespaceRecord
from kvpool.wire import frame
from kvpool.wire import operator as operator_wire
from kvpool.wire import peer as peer_wire
from tests.support.waiting import PATIENCE_S, until

NBYTES = 4096
RECORD = NamespaceRecord.simple("attacked", block_bytes=NBYTES, block_tokens=16)
GENUINE, FORGED = b"genuine KV bytes" * 256, b"FORGED KV BYTES!" * 256
SECRET = "0123456789abcdef0123456789abcdef"
KEY = b"Q" * 16


def address_of(daemon: Any) -> tuple[str, int]:
    """From the line that says it is ready."""
    return "127.0.0.1", int(daemon.ready.rsplit("peers at ", 1)[1].strip().rpartition(":")[2])


@pytest.fixture
def client_of() -> Iterator[Callable[[Any], Client]]:
    with ExitStack() as stack:
        yield lambda daemon: stack.enter_context(daemon.client(connect=True))


@pytest.fixture
def start_node(start: Callable[..., Any]) -> Callable[..., Any]:
    """A daemon that listens."""

    def begin(name: str, *flags: str, **environ: str) -> Any:
        return start("--listen", "tcp://127.0.0.1:0", "--node", name, *flags, name=name, **environ)

    return begin


class Relay:
    """Without the secret: it passes a handshake on, then speaks for each of the two ends to the other."""

    def __init__(self, owner: tuple[str, int]) -> None:
        self._owner = owner
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.introduced = 0
        self.operated: list[frame.Message] = []
        self.lies = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, socket.create_connection(self._owner) as upstream:
            reader, owner = (Stream(each, Deadline(PATIENCE_S)) for each in (sock, upstream))
            try:
                for speaks, hears in ((reader, owner), (owner, reader)) * 2:
                    request, payload = speaks.receive(1 << 20)
                    header = frame.HEADER.pack(len(payload), request)
                    hears.send_buffers([memoryview(header), memoryview(payload)])
                self.introduced += 1
                self._operate(owner)
                self._forge(reader)
            except (KvpoolError, OSError):
                pass  # it was found out, or the test is over

    def _operate(self, owner: Stream) -> None:
        """To the owner, as the reader: what only operators may."""
        order = frame.encode(operator_wire.ListBlocks("dram", "", 10), 0)[frame.HEADER.size :]
        said = frame.encode(peer_wire.Operate("reader", order, 2.0, "default", "a relay"), 9)
        owner.send_buffers([memoryview(said + bytes(TAG_BYTES))])  # and a tag that it cannot know
        self.operated.append(peer_wire.decode_peer(owner.receive(1 << 20)[1]))

    def _forge(self, reader: Stream) -> None:
        """To the reader, as the owner: that all is here, and then other bytes with checksums that fit."""
        while True:
            request, payload = reader.receive(1 << 20)
            reader.receive_into([memoryview(bytearray(TAG_BYTES))])
            message = peer_wire.decode_peer(payload)
            if isinstance(message, peer_wire.Fetch):
                count = sum(len(part.keys) // 16 for part in message.parts)
                checksums = xxh3_128_digest(FORGED) * count
                said = frame.encode(peer_wire.Fetched(b"\1" * count, checksums), request)
                said += bytes(TAG_BYTES) + FORGED * count
            else:
                count = len(getattr(message, "keys", b"")) // 16
                said = frame.encode(frame.Done(count), request)
            reader.send_buffers([memoryview(said + bytes(TAG_BYTES))])
            self.lies += 1

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def relayed(start_node: Callable[..., Any]) -> Iterator[tuple[Any, Any, Relay]]:
    owner = start_node("owner", KVPOOL_CLUSTER_SECRET=SECRET)
    relay = Relay(address_of(owner))
    yield owner, start_node("reader", "--peer", relay.url, KVPOOL_CLUSTER_SECRET=SECRET), relay
    relay.close()


def test_relay_gets_nothing_and_serves_nothing(
    relayed: tuple[Any, Any, Relay], client_of: Callable[[Any], Client]
) -> None:
    """It served forged blocks, and was obeyed as an operator."""
    owner, reader, relay = relayed
    at_owner, at_reader = client_of(owner), client_of(reader)
    assert at_owner.put(at_owner.open(RECORD), [KEY], [GENUINE]) == 1
    ns = at_reader.open(RECORD)

    def tried_all() -> bool:
        at_reader.pull(ns, [KEY], wait_s=2.0)
        assert at_reader.get(ns, [KEY]) == [None]
        return relay.introduced > 0 and relay.lies > 0 and bool(relay.operated)

    until(tried_all, "it passed a handshake on, and spoke for both")
    for answer in relay.operated:
        assert isinstance(answer, frame.Error), answer
        assert answer.code == NotAuthenticated.code
    assert at_owner.get(at_owner.open(RECORD), [KEY]) == [GENUINE]


@contextmanager
def connected(address: tuple[str, int]) -> Iterator[Stream]:
    with socket.create_connection(address, PATIENCE_S) as sock:
        sock.setblocking(True)
        yield Stream(sock, Deadline(PATIENCE_S))


@pytest.mark.parametrize("guess", [(), ("guess guess guess",)])
def test_attack_loop_a_peer_on_loopback_proves_who_it_is_too(
    start_node: Callable[..., Any],
    client_of: Callable[[Any], Client],
    tmp_path: Path,
    guess: tuple[str, ...],
) -> None:
    """Any user of the machine listed another tenant's blocks, fetched them, changed settings and evicted."""
    state = tmp_path / "state"
    daemon = start_node("owner", XDG_STATE_HOME=str(state))
    client = client_of(daemon)
    assert client.put(client.open(RECORD), [KEY], [GENUINE]) == 1
    with connected(address_of(daemon)) as stream, pytest.raises(NotAuthenticated):
        greet(stream, Identity("kvpool", "evil", "x", ClusterSecrets.of(*guess)))
    # As a peer without any secret was let in once: empty proofs.
    with connected(address_of(daemon)) as stream:
        stream.send(peer_wire.PeerHello(frame.PROTOCOL_VERSION, "kvpool", "evil", b"n" * 32), 1)
        challenge = peer_wire.decode_peer(stream.receive(1 << 16)[1])
        assert isinstance(challenge, peer_wire.PeerChallenge)
        stream.send(peer_wire.PeerProof(b""), 2)
        answer = peer_wire.decode_peer(stream.receive(1 << 16)[1])
        assert isinstance(answer, frame.Error)
        assert answer.code == NotAuthenticated.code
    path = default_path("kvpool", {"XDG_STATE_HOME": str(state)})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_daemons_of_one_user_and_machine_are_peers_without_any_setting(
    start_node: Callable[..., Any], client_of: Callable[[Any], Client], tmp_path: Path
) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path / "state")}
    owner = start_node("owner", **environ)
    peer = "tcp://{}:{}".format(*address_of(owner))
    reader = start_node("reader", "--peer", peer, **environ)
    stranger = start_node("stranger", "--peer", peer, XDG_STATE_HOME=str(tmp_path))
    at_owner = client_of(owner)
    assert at_owner.put(at_owner.open(RECORD), [KEY], [GENUINE]) == 1
    for daemon, found in ((reader, GENUINE), (stranger, None)):
        client = client_of(daemon)
        ns = client.open(RECORD)
        client.pull(ns, [KEY], wait_s=PATIENCE_S if found else 5.0)
        assert client.get(ns, [KEY]) == [found]

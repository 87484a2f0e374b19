"""TLS between daemons: who gets in, what is told to whom else, what is framed how; on real sockets."""

import logging
import os
import random
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvpool.errors import ConfigError, KvpoolError, NotAuthenticated, ProtocolError, Unavailable
from kvpool.security.certificate_names import CertificateName
from kvpool.security.cluster_secrets import ClusterSecrets
from kvpool.security.credentials import Contexts, Credentials, TlsFiles
from kvpool.security.file_watch import LOOK_S
from kvpool.transfer import tls
from kvpool.transfer.base import Deadline, Identity
from kvpool.transfer.handshake import admit, greet, refuse
from kvpool.transfer.listener import COMPLAINT_S, Complaints
from kvpool.transfer.stream import Closed, Stream
from kvpool.wire import frame
from kvpool.wire import peer as peer_wire
from tests.support.pki import Pki
from tests.support.waiting import PATIENCE_S, until

SECRET = ClusterSecrets.of("a secret for this file")
A, B = Identity("test", "a", "1", SECRET), Identity("test", "b", "1", SECRET)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki") / "ca")


@pytest.fixture(scope="module")
def a(pki: Pki) -> Credentials:
    return pki.credentials("a")


@pytest.fixture(scope="module")
def b(pki: Pki) -> Credentials:
    return pki.credentials("b")


@contextmanager
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a TCP connection: of who connected, and of who listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname(), 30)
        far, _ = listener.accept()
    with near, far:
        near.setblocking(True)
        yield near, far


def both(*works: Callable[[], object]) -> list[object]:
    """What each of them returns or raises, all at once."""

    def caught(work: Callable[[], object]) -> object:
        try:
            return work()
        except KvpoolError as error:
            return error

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(caught, works))


@contextmanager
def streams(connects: Credentials, listens: Credentials) -> Iterator[tuple[Stream, Stream]]:
    with sockets() as (near, far):
        client = tls.open_stream(near, Deadline(PATIENCE_S), connects, listens=False)
        server = tls.open_stream(far, Deadline(PATIENCE_S), listens, listens=True)
        assert both(client.secure, server.secure) == [None, None]
        yield client, server


def meeting(
    connects: Credentials | None,
    listens: Credentials | None,
    us: Identity = A,
    them: Identity = B,
) -> list[object]:
    """What comes of it at both ends: who connects, who listens."""

    with sockets() as (near, far):

        def connect() -> object:
            stream = tls.open_stream(near, Deadline(PATIENCE_S), connects, listens=False)
            try:
                stream.secure()
                return greet(stream, us).node
            finally:
                stream.close()

        def listen() -> object:
            stream = tls.open_stream(far, Deadline(PATIENCE_S), listens, listens=True)
            try:
                stream.secure()
                return admit(stream, them).node
            except (ProtocolError, NotAuthenticated) as error:
                refuse(stream, error)
                stream.linger()
                raise
            finally:
                stream.close()

        return both(connect, listen)


class Unchecked(Credentials):
    """Those of a peer that does not mind what its own files are."""

    def _load(self):
        return Contexts(
            self._context(ssl.PROTOCOL_TLS_SERVER), self._context(ssl.PROTOCOL_TLS_CLIENT)
        )


def unchecked(files: TlsFiles, cluster: str = "test", *, crl: bool = True) -> Credentials:
    return Unchecked(files if crl else replace(files, crl=""), cluster, "whoever")


# ---- who gets in ---------------------------------------------------------------------------------------


def test_two_nodes_of_a_cluster_know_each_other(a: Credentials, b: Credentials) -> None:
    assert meeting(a, b) == ["b", "a"]
    with streams(a, b) as (client, server):
        assert (client.peer_node, server.peer_node) == ("b", "a")
        assert client.binding == server.binding
        assert len(client.binding) >= 32
        with streams(a, b) as (other, _):
            assert other.binding != client.binding


WRONG = {
    "authority": lambda pki, other: unchecked(replace(other.files("a"), ca=str(pki.ca), crl="")),
    "expired": lambda pki, other: unchecked(pki.expired("a")),
    "not yet": lambda pki, other: unchecked(pki.not_yet("a")),
    "client": lambda pki, other: unchecked(pki.files("a", role="client")),
    "cluster": lambda pki, other: unchecked(pki.of_cluster("theirs", "a")),
}
SAID = {
    "authority": ("unable to get local issuer|self.signed", "unknown ca"),
    "expired": ("certificate has expired", "certificate expired|expired"),
    "not yet": ("not yet valid", "certificate"),
    "client": ("kvpool://test/client/a; a peer must be a node", "kvpool://test/client/a"),
    "cluster": ("kvpool://theirs/node/a; a peer must be a node of cluster 'test'", "theirs"),
}


@pytest.mark.parametrize("what", WRONG)
def test_who_connects_with_a_certificate_that_does_not_do(tmp_path: Path, what: str) -> None:
    """Neither end has anything to do with the other one, and both know why."""
    pki, other = Pki(tmp_path / "ca"), Pki(tmp_path / "other")
    here, there = meeting(WRONG[what](pki, other), pki.credentials("b"))
    assert isinstance(here, NotAuthenticated)
    assert isinstance(there, NotAuthenticated)
    said_there, said_here = SAID[what]
    assert re.search(said_there, str(there)), str(there)
    assert re.search(said_here, str(here)), str(here)


@pytest.mark.parametrize("what", ["authority", "expired", "not yet", "cluster"])
def test_who_listens_with_a_certificate_that_does_not_do(tmp_path: Path, what: str) -> None:
    pki, other = Pki(tmp_path / "ca"), Pki(tmp_path / "other")
    here, there = meeting(pki.credentials("b"), WRONG[what](pki, other), us=B, them=A)
    assert isinstance(here, NotAuthenticated)
    assert isinstance(there, KvpoolError)
    assert re.search(SAID[what][0], str(here)), str(here)


def test_a_revoked_certificate_opens_nothing_in_either_direction(tmp_path: Path) -> None:
    pki = Pki(tmp_path / "ca")
    good, bad = pki.credentials("b"), pki.credentials("a")
    assert meeting(bad, good) == ["b", "a"]
    pki.revoke("a")
    strict = pki.credentials("b")
    here, there = meeting(bad, strict)
    assert "certificate revoked" in str(there)
    assert "revoked" in str(here)
    here, there = meeting(strict, bad, us=B, them=A)
    assert "certificate revoked" in str(here)
    assert meeting(pki.credentials("a"), strict) == ["b", "a"], "a new one is not revoked"


def test_who_shows_no_certificate(pki: Pki, b: Credentials) -> None:
    bare = ssl.create_default_context(cafile=str(pki.ca))
    with sockets() as (near, far):
        server = tls.open_stream(far, Deadline(PATIENCE_S), b, listens=True)

        def connect() -> str:
            try:
                with bare.wrap_socket(near, server_hostname="localhost") as sock:
                    sock.settimeout(PATIENCE_S)
                    return repr(sock.recv(1))
            except OSError as error:
                return str(error)

        def listen() -> None:
            try:
                server.secure()
            finally:
                server.linger()
                server.close()

        said, refused = both(connect, listen)
    assert isinstance(refused, NotAuthenticated)
    assert "showed no certificate" in str(refused)
    assert "CERTIFICATE_REQUIRED" in str(said).upper().replace(" ", "_")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2])
def test_nothing_older_than_tls_1_3(pki: Pki, b: Credentials, version: ssl.TLSVersion) -> None:
    old = ssl.create_default_context(cafile=str(pki.ca))
    old.maximum_version = version
    with sockets() as (near, far):
        server = tls.open_stream(far, Deadline(PATIENCE_S), b, listens=True)

        def connect() -> object:
            with pytest.raises(ssl.SSLError):
                old.wrap_socket(near, server_hostname="localhost")
            return None

        assert isinstance(both(connect, server.secure)[1], KvpoolError)


def test_a_node_that_says_it_is_another(a: Credentials, b: Credentials) -> None:
    here, there = meeting(a, b, us=Identity("test", "c", "1", SECRET))
    for error in (here, there):
        assert isinstance(error, NotAuthenticated)
        assert "claims to be node 'c', but its certificate is for 'a'" in str(error)
    here, _ = meeting(a, b, them=Identity("test", "c", "1", SECRET))
    assert "claims to be node 'c', but its certificate is for 'b'" in str(here)


def test_the_secret_is_asked_for_as_well(a: Credentials, b: Credentials) -> None:
    here, _ = meeting(
        a, b, us=Identity("test", "a", "1", ClusterSecrets.of("another secret of theirs"))
    )
    assert isinstance(here, NotAuthenticated)
    assert "cluster secret" in str(here)


def test_with_tls_and_without_do_not_go_together_and_both_say_so(a: Credentials) -> None:
    here, there = meeting(None, a)
    assert isinstance(here, KvpoolError)
    assert "this daemon accepts only TLS from peers" in str(here)
    assert "this daemon accepts only TLS from peers" in str(there)
    here, there = meeting(a, None)
    assert "the peer speaks no TLS" in str(here)
    assert "the peer uses TLS, and this daemon does not" in str(there)


def test_who_stands_in_the_middle_cannot_pass_a_proof_on(pki: Pki) -> None:
    """Even with copies of both nodes' certificates and keys: each proof is for one connection."""
    a, b = pki.credentials("a"), pki.credentials("b")
    with sockets() as (near, far), sockets() as (out, beyond):
        client = tls.open_stream(near, Deadline(PATIENCE_S), a, listens=False)
        towards_a = tls.open_stream(far, Deadline(PATIENCE_S), b, listens=True)
        towards_b = tls.open_stream(out, Deadline(PATIENCE_S), a, listens=False)
        server = tls.open_stream(beyond, Deadline(PATIENCE_S), b, listens=True)

        def relay() -> None:
            try:
                towards_a.secure()
                towards_b.secure()
                for source, target in [(towards_a, towards_b), (towards_b, towards_a)] * 2:
                    request, payload = source.receive(1 << 16)
                    target.send(peer_wire.decode_peer(payload), request)
            finally:
                far.shutdown(socket.SHUT_RDWR)
                out.shutdown(socket.SHUT_RDWR)

        def connect() -> object:
            try:
                client.secure()
                return greet(client, A)
            finally:
                client.shut()

        def listen() -> object:
            server.secure()
            return admit(server, B)

        here, there, _ = both(connect, listen, relay)
    assert isinstance(here, NotAuthenticated), "b's proof was for another connection"
    assert "did not prove" in str(here)
    assert isinstance(there, KvpoolError)


# ---- hostile ends --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.9\r\n",
        b"\x00" * 64,
        b"\x16\x03\x01\x00\x05hello",
        b"\x16\x03\x01\xff\xff" + b"\x01" * 70_000,
        b"\x16\x03\x03\x00\x04\x01\x00\x00\x00",
        b"\x15\x03\x03\x00\x02\x02\x28",
        b"\x17\x03\x03\x00\x10" + b"x" * 16,
        *(random.Random(seed).randbytes(400) for seed in range(8)),
        *(b"\x16\x03\x01" + random.Random(seed).randbytes(600) for seed in range(8)),
    ],
)
@pytest.mark.parametrize("listens", [True, False])
def test_bytes_that_are_no_handshake(a: Credentials, said: bytes, listens: bool) -> None:
    with sockets() as (near, far):
        stream = tls.open_stream(near, Deadline(PATIENCE_S), a, listens=listens)

        def speak() -> None:
            try:
                far.sendall(said)
                far.shutdown(socket.SHUT_WR)
                while far.recv(65536):
                    pass
            except OSError:
                pass  # shown out in the middle of it

        def secure() -> None:
            try:
                stream.secure()
            finally:
                stream.close()

        error, _ = both(secure, speak)
        assert isinstance(error, KvpoolError)


@pytest.mark.parametrize("sent", [0, 1, 5, 100])
@pytest.mark.parametrize("listens", [True, False])
def test_a_handshake_that_stalls_ends_at_its_deadline(
    a: Credentials, sent: int, listens: bool
) -> None:
    with sockets() as (near, far):
        far.sendall((b"\x16\x03\x01\x01\x00" + bytes(100))[:sent])
        stream = tls.open_stream(near, Deadline(0.1), a, listens=listens)
        with pytest.raises(Unavailable, match=r"did not answer|not finished"):
            stream.secure()


def test_a_handshake_is_ended_by_another_thread(a: Credentials) -> None:
    with sockets() as (near, _):
        stream = tls.open_stream(near, Deadline(60), a, listens=False)
        threading.Timer(0.05, stream.shut).start()
        with pytest.raises(Closed):
            stream.secure()


def test_nothing_is_said_before_the_handshake(a: Credentials) -> None:
    with sockets() as (near, far):
        stream = tls.open_stream(near, Deadline(PATIENCE_S), a, listens=False)
        with pytest.raises(Closed):
            stream.send(frame.Done(), 1)
        with pytest.raises(Closed):
            stream.receive(100)
        far.settimeout(0)
        with pytest.raises(BlockingIOError):
            far.recv(1)


def test_refusals_are_logged_once_a_second_at_most(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    complaints = Complaints(clock)
    for number in range(100):
        complaints.say(NotAuthenticated(f"number {number}"))
    clock.now += COMPLAINT_S
    complaints.say(NotAuthenticated("later"))
    clock.now += COMPLAINT_S
    complaints.say(NotAuthenticated("last"))
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "number 0",
        "later (99 more since the last such line)",
        "last",
    ]


# ---- the stream ----------------------------------------------------------------------------------------


def cut(data: bytes, rng: random.Random, most: int) -> list[memoryview]:
    """The same bytes in buffers of all sizes."""
    views, at = [], 0
    while at < len(data):
        size = rng.randint(0 if rng.random() < 0.1 else 1, most)
        views.append(memoryview(data)[at : at + size])
        at += size
    return views


@pytest.mark.parametrize(
    ("size", "most"), [(1, 1), (40_000, 3), (200_000, 40_000), (9 << 20, 5 << 20)]
)
def test_bytes_arrive_whatever_buffers_they_are_in(
    a: Credentials, b: Credentials, size: int, most: int
) -> None:
    rng = random.Random(size)
    data = rng.randbytes(size)
    out = [memoryview(b""), *cut(data, rng, most), memoryview(b"")]
    into = bytearray(size)
    views, at = [], 0
    while at < size:
        step = rng.randint(1, most)
        views.append(memoryview(into)[at : at + step])
        at += step
    with streams(a, b) as (client, server):
        assert both(lambda: client.send_buffers(out), lambda: server.receive_into(views)) == [
            None,
            None,
        ]
        assert into == data
        assert not server.readable()


def test_frames_and_bulk_are_told_apart(a: Credentials, b: Credentials) -> None:
    bulk = random.Random(1).randbytes(300_000)
    with streams(a, b) as (client, server):
        assert not client.readable(), "no tickets, no anything"
        client.send_buffers(
            [memoryview(frame.encode(frame.Done(), 7)), memoryview(bulk), memoryview(b"z")]
        )
        assert server.receive(100)[0] == 7
        until(server.readable, "decrypted already, or on its way")
        got = bytearray(len(bulk))
        server.receive_into([memoryview(got)])
        assert got == bulk
        until(server.readable, "the last byte")
        last = bytearray(1)
        server.receive_into([memoryview(last)])
        assert last == b"z"
        assert not server.readable()
        client.close()
        with pytest.raises(Closed):
            server.receive(100)


def test_what_is_sent_may_change_afterwards(a: Credentials, b: Credentials) -> None:
    memory = bytearray(b"x" * 100_000)
    with streams(a, b) as (client, server):
        client.send_buffers([memoryview(memory)])
        memory[:] = b"y" * len(memory)
        got = bytearray(len(memory))
        server.receive_into([memoryview(got)])
        assert got == b"x" * len(memory)


def test_a_peer_that_does_not_read_costs_the_deadline(a: Credentials, b: Credentials) -> None:
    with streams(a, b) as (client, _):
        client.deadline = Deadline(0.2)
        with pytest.raises(Unavailable):
            client.send_buffers([memoryview(bytes(64 << 20))])


def test_waiting_for_an_answer_beside_the_peer(a: Credentials, b: Credentials) -> None:
    bell = os.eventfd(0)
    try:
        with streams(a, b) as (client, server):
            os.eventfd_write(bell, 1)
            server.wait_beside(bell)
            os.eventfd_read(bell)
            server.deadline = Deadline(0.1)
            with pytest.raises(Unavailable, match="no answer for the peer"):
                server.wait_beside(bell)
            server.deadline = Deadline(PATIENCE_S)
            # Two in one go: the second one is decrypted, and seen by no system call.
            client.send_buffers([memoryview(frame.encode(frame.Done(), n)) for n in (1, 2)])
            server.receive(100)
            with pytest.raises(Closed, match="disconnected, or sent something"):
                server.wait_beside(bell)
    finally:
        os.close(bell)


def test_a_connection_is_not_used_for_ever(a: Credentials, b: Credentials) -> None:
    with streams(a, b) as (client, server):
        for stream in (client, server):
            assert isinstance(stream, tls.TlsStream)
            stream.CARRIED_BYTES_MAX = 5000
        for _ in range(4):
            assert client.fresh()
            assert server.fresh()
            client.send_buffers([memoryview(bytes(1300))])
            server.receive_into([memoryview(bytearray(1300))])
        assert not client.fresh()
        assert not server.fresh()


def test_a_connection_ends_with_its_certificate(
    a: Credentials, b: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    with streams(a, b) as (client, _):
        assert client.fresh()
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 366 * 86_400)
        assert not client.fresh()


# ---- files that change ---------------------------------------------------------------------------------


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def watched(files: TlsFiles) -> tuple[Credentials, Clock]:
    clock = Clock()
    return Credentials(files, "test", "a", clock), clock


def test_new_files_are_taken_up_and_old_connections_are_not_used_again(tmp_path: Path) -> None:
    pki = Pki(tmp_path / "ca")
    ours, clock = watched(pki.files("a"))
    theirs = pki.credentials("b")
    before = ours.current()
    with streams(ours, theirs) as (client, _):
        pki.files("a")
        assert ours.current() is before, "not looked at more than once a second"
        assert client.fresh()
        clock.now += LOOK_S
        assert ours.current() is not before
        assert not client.fresh()
        after = ours.current()
        clock.now += LOOK_S
        assert ours.current() is after, "nothing has changed since"
    assert meeting(ours, theirs) == ["b", "a"]


@pytest.mark.parametrize("which", ["cert", "key", "ca", "crl"])
@pytest.mark.parametrize("how", ["empty", "nonsense", "gone", "cut"])
def test_a_new_file_that_is_broken_leaves_the_old_one_in_use(
    tmp_path: Path, which: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    pki = Pki(tmp_path / "ca")
    files = pki.files("a")
    ours, clock = watched(files)
    before = ours.current()
    path = Path(getattr(files, which))
    good = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "nonsense": b"x" * 999, "cut": good[: len(good) // 2]}[how])
    clock.now += LOOK_S
    with caplog.at_level(logging.WARNING):
        assert ours.current() is before
        clock.now += LOOK_S
        assert ours.current() is before
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1, "logged once"
    assert path.name in lines[0]
    path.write_bytes(good)
    clock.now += LOOK_S
    assert ours.current() is not before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda pki, files: shutil.copy(pki.files("b").cert, files.cert), "KEY_VALUES_MISMATCH"),
        (lambda pki, files: pki.expired("a"), "certificate has expired"),
        (lambda pki, files: pki.revoke("a"), "certificate revoked"),
        (lambda pki, files: pki.of_cluster("other", "a"), "kvpool://other/node/a"),
    ],
    ids=["half", "expired", "revoked", "cluster"],
)
def test_new_files_that_no_peer_would_believe_are_not_used(
    tmp_path: Path, change, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    pki = Pki(tmp_path / "ca")
    files = pki.files("a")
    ours, clock = watched(files)
    before = ours.current()
    change(pki, files)
    clock.now += LOOK_S
    assert ours.current() is before
    assert said in caplog.text


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda pki: pki.expired("a"), "no peer would accept .*certificate has expired"),
        (lambda pki: pki.files("b"), "is for kvpool://test/node/b, and this daemon is"),
        (lambda pki: pki.files("a", role="client"), "unsuitable certificate purpose"),
        (lambda pki: replace(pki.files("a"), key=pki.files("b").key), "KEY_VALUES_MISMATCH"),
        (lambda pki: replace(pki.files("a"), crl=str(pki.ca)), "no revocation list"),
        (
            lambda pki: replace(pki.files("a"), ca="/nowhere/ca.pem"),
            "/nowhere/ca.pem.*No such file",
        ),
        (lambda pki: replace(pki.files("a"), cert=str(pki.ca), key=pki.folder / "ca.key"), "."),
    ],
    ids=["expired", "other", "client", "key", "crl", "absent", "authority"],
)
def test_files_with_which_no_daemon_starts(tmp_path: Path, make, said: str) -> None:
    pki = Pki(tmp_path / "ca")
    with pytest.raises(ConfigError, match=said):
        Credentials(make(pki), "test", "a")


def test_a_key_with_a_password_is_refused_and_nobody_is_asked(tmp_path: Path) -> None:
    files = Pki(tmp_path / "ca").files("a")
    locked = tmp_path / "locked.key"
    command = ["openssl", "pkcs8", "-topk8", "-in", files.key, "-passout", "pass:hush", "-out"]
    subprocess.run([*command, str(locked)], check=True, timeout=60)
    with pytest.raises(ConfigError, match="must not be encrypted"):
        Credentials(replace(files, key=str(locked)), "test", "a")


@pytest.mark.parametrize(
    ("uri", "name"),
    [
        ("kvpool://c/node/n", CertificateName("c", "node", "n")),
        ("kvpool://c-1.x/client/n_2", CertificateName("c-1.x", "client", "n_2")),
        *(
            (uri, None)
            for uri in (
                "",
                "kvpool://c/node/",
                "kvpool://c/node/n/",
                "kvpool://c/node/n\n",
                "kvpool://c/root/n",
                "kvpool:///node/n",
                "https://c/node/n",
                "kvpool://c/node/n?x",
                "kvpool://u@c/node/n",
                f"kvpool://c/node/{'n' * 64}",
            )
        ),
    ],
)
def test_names_in_certificates(uri: str, name: CertificateName | None) -> None:
    assert CertificateName.parse(uri) == name
    if name is not None:
        assert str(name) == uri

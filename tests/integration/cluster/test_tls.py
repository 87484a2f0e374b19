"""Daemons that speak TLS: they move blocks, and have to do with nobody who is not a node of theirs today."""

import os
import secrets
import shutil
import socket
import ssl
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from kvpool.errors import KvpoolError, NotAuthenticated
from kvpool.security.cluster_secrets import ClusterSecrets
from kvpool.security.credentials import Contexts, Credentials, TlsFiles
from kvpool.transfer.base import Deadline, Identity, Stop, TransferLimits
from kvpool.transfer.connections import Connections
from kvpool.types import Intent, Outcome
from kvpool.wire import operator as operator_wire
from tests.support.local_cluster import SECRET
from tests.support.pki import Pki
from tests.support.servers.certificates import Certificates
from tests.support.servers.etcd import Etcd
from tests.support.servers.redis import Redis
from tests.support.waiting import PATIENCE_S, until

PEERS_MAX = 8


class Machine:
    """A node's own copies of its files, as they are on a machine of its own."""

    def __init__(self, folder: Path, pki: Pki, name: str) -> None:
        folder.mkdir()
        self.folder, self.pki, self.name = folder, pki, name
        self.renew()

    def renew(self) -> TlsFiles:
        """A new certificate, put in place of the old one; what is made is made elsewhere."""
        return self.put(self.pki.files(self.name))

    def put(self, files: TlsFiles) -> TlsFiles:
        self.files = TlsFiles(
            *(str(self.folder / f"{n}.pem") for n in ("cert", "key", "ca", "crl"))
        )
        for source, target in zip(
            (files.key, files.cert, files.ca, files.crl),
            (self.files.key, self.files.cert, self.files.ca, self.files.crl),
            strict=True,
        ):
            fresh = Path(f"{target}.new")
            shutil.copy(source, fresh)
            os.replace(fresh, target)
        return self.files

    def learn_revoked(self) -> None:
        shutil.copy(self.pki.crl, f"{self.files.crl}.new")
        os.replace(f"{self.files.crl}.new", self.files.crl)

    @property
    def environ(self) -> dict[str, str]:
        files = self.files
        return {
            "KVPOOL_TLS_CERT": files.cert,
            "KVPOOL_TLS_KEY": files.key,
            "KVPOOL_TLS_CA": files.ca,
            "KVPOOL_TLS_CRL": files.crl,
            "KVPOOL_PEERS_MAX": str(PEERS_MAX),
        }


class Fleet:
    """A cluster of which each node has its files."""

    def __init__(self, start_cluster, folder: Path) -> None:
        name = f"test-{secrets.token_hex(4)}"
        self.folder = folder
        self.pki = Pki(folder / "ca", name)
        self.world = start_cluster(nodes=0, name=name)
        self.machines: dict[str, Machine] = {}

    def begin(self, name: str, pki: Pki | None = None, **environ: str):
        """Start a node; its seat."""
        self.machines[name] = machine = Machine(self.folder / name, pki or self.pki, name)
        self.world.make(name, environ=machine.environ | environ).start()
        return self.world.seat(name)

    def url(self, name: str) -> str:
        return self.world.node(name).url

    def connect(self, name: str, files: Credentials | None, node: str = "x"):
        """As a peer to a node: raises what a peer would be told."""
        us = Identity(self.world.name, node, "0" * 16, ClusterSecrets.of(SECRET), files)
        connections = Connections(us, TransferLimits())
        try:
            return connections.connect(self.url(name), Deadline(PATIENCE_S), Stop())
        finally:
            connections.close()

    def all_see(self, *seats) -> None:
        self.world.until_all_see(list(seats))


class Unchecked(Credentials):
    """Those of a peer that does not mind what its own files are."""

    def _load(self):
        return Contexts(
            self._context(ssl.PROTOCOL_TLS_SERVER), self._context(ssl.PROTOCOL_TLS_CLIENT)
        )


@pytest.fixture
def fleet(start_cluster, tmp_path):
    return Fleet(start_cluster, tmp_path)


@pytest.fixture(scope="module")
def steady(shared_cluster, request):
    """Two nodes that nobody is to disturb."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-tls-")))
        fleet = Fleet(lambda **settings: stack.enter_context(shared_cluster(**settings)), folder)
        fleet.all_see(fleet.begin("a"), fleet.begin("b"))
        yield fleet


def serial_of(url: str, files: TlsFiles) -> int:
    """Of the certificate that somebody shows who listens there, by its DER: asked for without any code of ours."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(files.ca)
    context.load_cert_chain(files.cert, files.key)
    host, port = url.removeprefix("tcp://").split(":")
    with (
        socket.create_connection((host, int(port)), PATIENCE_S) as sock,
        context.wrap_socket(sock) as secured,
    ):
        shown = secured.getpeercert()
    return int(shown["serialNumber"], 16)


def move(source, target, numbers, count: int = 20) -> None:
    """New blocks of one node arrive at the other."""
    some = numbers(count)
    source.put(some)
    until(lambda: source.announced)
    assert target.read(some) == count


def errors(seat) -> str:
    return " ".join(peer.last_error for peer in seat.stats.fetch.peers)


# ---- what goes well ------------------------------------------------------------------------------------


def test_blocks_move_both_ways_and_nothing_is_said_in_the_clear(steady, numbers, until):
    a, b = steady.world.seat("a"), steady.world.seat("b")
    of_a, of_b = numbers(60), numbers(60)
    a.put(of_a)
    b.put(of_b)
    until(lambda: a.announced and b.announced)
    assert b.read(of_a) == 60
    assert a.read(of_b) == 60
    assert serial_of(steady.url("a"), steady.machines["b"].files)
    with pytest.raises(KvpoolError, match="this daemon accepts only TLS from peers"):
        steady.connect("a", None)


def test_off_loopback_takes_certificates_or_trust(fleet):
    plain = fleet.world.make("p", host="0.0.0.0")
    plain.begin()
    assert plain.wait_end() == 1
    assert "kvpool certs init" in plain.said
    assert "--plaintext" in plain.said
    trusting = fleet.world.make("q", "--plaintext", host="0.0.0.0")
    trusting.environ["KVPOOL_ADVERTISE"] = trusting.url.replace("0.0.0.0", "127.0.0.1")
    trusting.start()
    machine = Machine(fleet.folder / "r", fleet.pki, "r")
    guarded = fleet.world.make("r", environ=machine.environ, host="0.0.0.0")
    guarded.environ["KVPOOL_ADVERTISE"] = guarded.url.replace("0.0.0.0", "127.0.0.1")
    guarded.start()


def test_a_daemon_does_not_start_with_files_that_no_peer_would_believe(fleet):
    machine = Machine(fleet.folder / "a", fleet.pki, "a")
    for files, said in (
        (fleet.pki.expired("a"), "certificate has expired"),
        (fleet.pki.files("other"), f"kvpool://{fleet.world.name}/node/other"),
    ):
        machine.put(files)
        node = fleet.world.make("a", environ=machine.environ)
        node.begin()
        assert node.wait_end() == 1
        assert said in node.said
        assert "Traceback" not in node.said


# ---- who is shown out ----------------------------------------------------------------------------------


def unchecked(files: TlsFiles) -> Credentials:
    return Unchecked(replace(files, crl=""), "whatever", "whoever")


def wrong_files(fleet: Fleet, what: str, folder: Path) -> Credentials:
    pki = fleet.pki
    if what == "authority":
        theirs = Pki(folder / "theirs", fleet.world.name).files("x")
        return unchecked(replace(theirs, ca=str(pki.ca)))
    if what == "expired":
        return unchecked(pki.expired("x"))
    if what == "client":
        return unchecked(pki.files("x", role="client"))
    if what == "revoked":
        files = pki.files("revoked-x")
        pki.revoke("revoked-x")
        fleet.machines["a"].learn_revoked()
        return unchecked(files)
    assert what == "cluster"
    return unchecked(pki.of_cluster("theirs", "x"))


@pytest.mark.parametrize("what", ["authority", "expired", "client", "cluster", "revoked"])
def test_a_peer_with_another_certificate_gets_nothing(steady, numbers, tmp_path, until, what):
    """And those who belong there are not disturbed."""
    before = steady.world.node("a").pids
    theirs = wrong_files(steady, what, tmp_path)
    theirs.cluster = steady.world.name  # it believes in a itself

    def refused() -> str:
        try:
            steady.connect("a", theirs, "revoked-x" if what == "revoked" else "x").close()
        except NotAuthenticated as error:
            return str(error)
        assert what == "revoked", "the list is looked at once a second"
        return ""

    said = until(refused)
    expected = {
        "authority": "unknown ca",
        "expired": "expired",
        "client": "/client/x",
        "cluster": "kvpool://theirs/node/x",
        "revoked": "revoked",
    }
    assert expected[what] in said
    until(lambda: "a peer was refused" in steady.world.node("a").said)
    assert steady.world.node("a").pids == before
    move(steady.world.seat("a"), steady.world.seat("b"), numbers)


def test_a_peer_that_takes_anothers_name_gets_nothing(steady):
    files = unchecked(steady.pki.files("x"))
    files.cluster = steady.world.name
    steady.connect("a", files, "x").close()
    with pytest.raises(NotAuthenticated, match="claims to be node 'b'"):
        steady.connect("a", files, "b")


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00" + b"x" * 600, os.urandom(300)]
)
def test_bytes_that_are_no_tls_disturb_nobody(steady, numbers, said):
    before = steady.world.node("a").pids
    host, port = steady.url("a").removeprefix("tcp://").split(":")
    with ExitStack() as stack:
        for _ in range(3 * PEERS_MAX):
            sock = stack.enter_context(socket.create_connection((host, int(port)), PATIENCE_S))
            try:
                sock.sendall(said)
            except OSError:
                pass  # shown out before it had said all
        move(steady.world.seat("a"), steady.world.seat("b"), numbers)
    assert steady.world.node("a").pids == before


def test_peers_that_stall_in_the_handshake_keep_nobody_out(steady, numbers):
    """More of them than there may be connections: half a hello each, and never another byte."""
    files = steady.machines["b"].files
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(files.ca)
    there = ssl.MemoryBIO()
    half = context.wrap_bio(ssl.MemoryBIO(), there)
    with pytest.raises(ssl.SSLWantReadError):
        half.do_handshake()
    hello = there.read()
    host, port = steady.url("a").removeprefix("tcp://").split(":")
    a, b = steady.world.seat("a"), steady.world.seat("b")
    with ExitStack() as stack:
        for number in range(4 * PEERS_MAX):
            sock = stack.enter_context(socket.create_connection((host, int(port)), PATIENCE_S))
            sock.sendall(hello[: len(hello) // 2] if number % 2 else hello)
            if number % PEERS_MAX == 0:
                move(a, b, numbers)
    assert "Traceback" not in steady.world.node("a").said


def test_nodes_of_two_authorities_miss_each_others_blocks_and_live_on(
    fleet, tmp_path, numbers, until
):
    a, b = fleet.begin("a"), fleet.begin("b")
    c = fleet.begin("c", Pki(tmp_path / "theirs", fleet.world.name))
    fleet.all_see(a, b, c)
    of_a, of_c = numbers(10), numbers(10)
    a.put(of_a)
    c.put(of_c)
    until(lambda: a.announced and c.announced)
    assert c.read(of_a, wait_s=2) == 0
    assert a.read(of_c, wait_s=2) == 0
    until(lambda: "certificate" in errors(a) and "certificate" in errors(c))
    assert b.read(of_a) == 10
    assert {len(fleet.world.node(name).pids) for name in "abc"} == {2}
    assert "Traceback" not in "".join(fleet.world.node(name).said for name in "abc")


# ---- files that change ---------------------------------------------------------------------------------


def test_certificates_are_renewed_while_blocks_move(fleet, numbers, until, load):
    a, b = fleet.begin("a"), fleet.begin("b")
    fleet.all_see(a, b)
    before = {name: fleet.world.node(name).pids for name in "ab"}

    def work(_: int) -> None:
        some = numbers(2)
        a.put(some)
        until(lambda: a.announced)
        # A connection that ends with its certificate may cost a read; the next one finds them.
        until(lambda: b.read(some) == 2)

    with load(work) as going:
        for _ in range(3):
            old = {name: serial_of(fleet.url(name), fleet.machines["b"].files) for name in "ab"}
            for machine in fleet.machines.values():
                machine.renew()
            done = going.done[0]
            until(
                lambda old=old: all(
                    serial_of(fleet.url(name), fleet.machines["b"].files) != old[name]
                    for name in "ab"
                ),
            )
            until(lambda done=done: going.done[0] > done + 5)
    assert not going.failures
    assert {name: fleet.world.node(name).pids for name in "ab"} == before


def test_a_broken_file_leaves_the_old_one_in_use_and_is_logged(fleet, numbers, until):
    a, b = fleet.begin("a"), fleet.begin("b")
    fleet.all_see(a, b)
    move(a, b, numbers)
    Path(fleet.machines["a"].files.cert).write_text("what is this")

    def logged() -> bool:
        move(a, b, numbers)
        return "new TLS files are invalid" in fleet.world.node("a").said

    until(logged)
    move(b, a, numbers)
    fleet.machines["a"].renew()


def test_a_node_that_is_revoked_is_out_at_once_without_a_restart(fleet, numbers, until):
    seats = a, b, c = [fleet.begin(name) for name in "abc"]
    fleet.all_see(*seats)
    of_a, of_c = numbers(200), numbers(200)
    a.put(of_a)
    c.put(of_c)
    until(lambda: a.announced and c.announced)
    assert c.read(of_a[:10]) == 10
    assert a.read(of_c[:10]) == 10
    before = [fleet.world.node(name).pids for name in "abc"]
    fleet.pki.revoke("c")
    for name in "ab":
        fleet.machines[name].learn_revoked()

    used = iter(range(10, 200))

    def out(reader, blocks) -> bool:
        at = next(used)
        return reader.read([blocks[at]], wait_s=1) == 0

    until(lambda: out(c, of_a) and "revoked" in fleet.world.node("a").said)
    until(lambda: out(a, of_c) and "revoked" in errors(a))
    assert c.read(of_a[150:160], wait_s=1) == 0
    assert a.read(of_c[150:160], wait_s=1) == 0
    assert b.read(of_a[150:]) == 50, "who is not revoked is not disturbed"
    assert [fleet.world.node(name).pids for name in "abc"] == before
    fleet.machines["c"].renew()  # its machine is trusted again, with a new certificate
    until(lambda: c.read(of_a[160:], wait_s=5) == 40)


# ---- one authority for all -----------------------------------------------------------------------------


def test_etcd_and_redis_take_the_same_certificates(start_cluster, tmp_path, numbers, until):
    """Servers and nodes show each other what `kvpool certs node` made; clients of theirs what `client` made."""
    name = f"test-{secrets.token_hex(4)}"
    pki = Pki(tmp_path / "ca", name)
    server, client = pki.files("server"), pki.files("tests", role="client")
    shown = Certificates(*map(Path, (pki.ca, server.cert, server.key, client.cert, client.key)))
    with (
        Etcd(tmp_path / "etcd", tls=shown, client_auth=True) as etcd,
        Redis(tmp_path / "redis", tls=shown, client_auth=True) as redis,
    ):
        world = start_cluster(own_servers=True, etcd=etcd, redis=redis, nodes=0, name=name)
        seats = []
        for node in "ab":
            files = (machine := Machine(tmp_path / node, pki, node)).files
            stores = {
                f"KVPOOL_{store}_{what}": path
                for store in ("JOIN", "DIRECTORY")
                for what, path in (("CA", files.ca), ("CERT", files.cert), ("KEY", files.key))
            }
            world.make(node, environ=machine.environ | stores).start()
            seats.append(world.seat(node))
        world.until_all_see(seats)
        move(seats[0], seats[1], numbers)
        world.stop()


def test_operators_act_from_the_nodes_that_may(fleet):
    seats = [fleet.begin("a"), fleet.begin("b", KVPOOL_OPERATED_BY="a"), fleet.begin("c")]
    fleet.all_see(*seats)
    a, b, c = seats
    listing = operator_wire.ListBlocks("dram", "", 5)
    assert a.client.ask_node(listing, node="b").blocks == []
    with pytest.raises(NotAuthenticated, match="takes no operators' requests from node c"):
        c.client.ask_node(listing, node="b")
    assert c.client.ask_node(listing, node="a").blocks == []
    assert b.client.ask_node(listing).blocks == [], "its own are not asked where they come from"
    # What a client wants of another node is an operator's request there.
    want = (b.ns.digest, Intent.DROP, [bytes(16)])
    for intent in Intent:
        for_s = 1.0 if intent is Intent.KEEP else 0.0
        with pytest.raises(NotAuthenticated, match="takes no operators' requests from node c"):
            c.client.intents.declare_on(b.ns.digest, intent, [bytes(16)], node="b", for_s=for_s)
    assert c.client.available, "which says nothing about its own daemon"
    for client, node in ((a.client, "b"), (b.client, "b"), (b.client, ""), (c.client, "a")):
        assert client.intents.declare_on(*want, node=node).outcome is Outcome.MISSING

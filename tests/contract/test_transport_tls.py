"""TCP inside of TLS: the same contract. (Where its connections are cut: `test_transport_cuts`.)"""

import socket
import ssl
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpool.security.credentials import Contexts, Credentials
from kvpool.security.file_watch import LOOK_S
from kvpool.transfer.base import Stop, TransferLimits
from kvpool.types import BlockStatus
from tests.contract.suites.transport import Side, TransportContract, change_limits, key_of, order
from tests.support.pki import Pki
from tests.support.waiting import PATIENCE_S

URL = "tcp://127.0.0.1:0"


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    return Pki(tmp_path_factory.mktemp("pki") / "ca").credentials("node")


class TestTls(TransportContract):
    @pytest.fixture(autouse=True)
    def _with_credentials(self, credentials: Credentials) -> None:
        self.credentials = credentials

    def url(self) -> str:
        return URL

    def pair(  # type: ignore[override]
        self, *args: Any, **side: Any
    ) -> AbstractContextManager[tuple[Side, Side, str, list[bytes]]]:
        return super().pair(*args, **{"tls": self.credentials, **side})


class Unchecked(Credentials):
    """Those of a peer that does not mind what its own files are."""

    def _load(self) -> Contexts:
        return Contexts(
            self._context(ssl.PROTOCOL_TLS_SERVER), self._context(ssl.PROTOCOL_TLS_CLIENT)
        )


def wrong(what: str, folder: Path, pki: Pki) -> Credentials | None:
    """The credentials of an owner that pretends to be node "node"."""
    if what == "none":
        return None
    if what == "authority":
        theirs = Pki(folder / "theirs").files("node")
        return Unchecked(replace(theirs, ca=str(pki.ca), crl=""), "test", "node")
    if what == "revoked":
        files = pki.files("node")
        pki.revoke("node")
    else:
        files = {
            "expired": lambda: pki.expired("node"),
            "client": lambda: pki.files("node", role="client"),
            "cluster": lambda: pki.of_cluster("theirs", "node"),
            "name": lambda: pki.files("other"),
        }[what]()
    return Unchecked(replace(files, crl=""), "test", "node")


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("none", "speaks no TLS"),
        ("authority", "unable to get local issuer certificate"),
        ("expired", "certificate has expired"),
        ("revoked", "certificate revoked"),
        ("client", "certificate"),
        ("cluster", "kvpool://theirs/node/node"),
        ("name", "claims to be node 'node', but its certificate is for 'other'"),
    ],
)
def test_an_owner_that_is_not_who_it_should_be_delivers_nothing(
    tmp_path: Path, what: str, said: str
) -> None:
    """A miss with the reason; and the reader goes on with others."""
    pki = Pki(tmp_path / "ca")
    theirs = wrong(what, tmp_path, pki)
    ours = pki.credentials("node")
    reader = Side(URL, tls=ours)
    owners = [Side(URL, tls=theirs), Side(URL, tls=ours)]
    try:
        bad, good = (owner.transport.listen(URL) for owner in owners)
        for owner in owners:
            owner.source.stride = 1000
            owner.source.put(key_of(1), 1, b"x" * 1000)
        pulled = reader.transport.pull(order(bad, 1000, [key_of(1)], [3]), Stop())
        assert pulled.status == bytes([BlockStatus.LATE])
        assert said in pulled.error
        assert reader.block(3, 1000, 1000) == bytes(1000)
        assert owners[0].source.lent == 0
        pulled = reader.transport.pull(order(good, 1000, [key_of(1)], [3]), Stop())
        assert (pulled.status, pulled.error) == (bytes([BlockStatus.PRESENT]), "")
        assert reader.block(3, 1000, 1000) == b"x" * 1000
    finally:
        for side in (reader, *owners):
            side.transport.close()


def test_peers_that_stall_in_the_handshake_make_way_and_end_at_their_deadline(
    credentials: Credentials,
) -> None:
    # Who comes waits for as long as it takes the thread of whoever makes way to notice.
    limits = TransferLimits(connections_max=4, hello_s=300.0, leave_s=PATIENCE_S)
    owner, reader = Side(URL, tls=credentials, limits=limits), Side(URL, tls=credentials)
    owner.source.stride = 1000
    owner.source.put(key_of(1), 1, b"x" * 1000)
    url = owner.transport.listen(URL)
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    try:
        with ExitStack() as stack:

            def stall() -> list[socket.socket]:
                stalled = [
                    stack.enter_context(socket.create_connection(address, 30)) for _ in range(12)
                ]
                for sock in stalled:
                    with suppress(BrokenPipeError, ConnectionResetError):  # it has made way already
                        sock.sendall(b"\x16\x03\x01\x02\x00\x01")
                return stalled

            stalled = stall()
            pulled = reader.transport.pull(order(url, 1000, [key_of(1)], [3]), Stop())
            assert (pulled.status, pulled.error) == (bytes([BlockStatus.PRESENT]), "")
            # Now for those that come from here on: the reader had as long as it needs.
            change_limits(owner.transport, replace(limits, hello_s=0.5))
            for sock in stalled + stall():
                try:
                    assert not sock.recv(1), "shown out, without a word"
                except ConnectionResetError:
                    pass
    finally:
        owner.transport.close()
        reader.transport.close()


@pytest.mark.parametrize("whose", ["owner", "reader"])
def test_who_is_revoked_is_not_served_over_connections_that_there_are(
    tmp_path: Path, whose: str
) -> None:
    """Whichever end hears of it; the other one still has the old list."""
    pki = Pki(tmp_path / "ca")
    now = [100.0]
    sides = {}
    for name in ("owner", "reader"):
        files = pki.files(name)
        crl = tmp_path / f"{name}-crl.pem"
        crl.write_bytes(pki.crl.read_bytes())
        credentials = Credentials(replace(files, crl=str(crl)), "test", name, lambda: now[0])
        sides[name] = Side(URL, tls=credentials, node=name)
    owner, reader = sides["owner"], sides["reader"]
    try:
        url = owner.transport.listen(URL)
        owner.source.stride = 1000
        owner.source.put(key_of(1), 1, b"x" * 1000)
        wanted = order(url, 1000, [key_of(1)], [3])
        for _ in range(2):
            assert reader.transport.pull(wanted, Stop()).status == bytes([BlockStatus.PRESENT])
        pki.revoke("reader" if whose == "owner" else "owner")
        (tmp_path / f"{whose}-crl.pem").write_bytes(pki.crl.read_bytes())
        assert reader.transport.pull(wanted, Stop()).status == bytes([BlockStatus.PRESENT]), (
            "not yet looked at"
        )
        now[0] += LOOK_S
        lent = owner.source.lent
        pulled = reader.transport.pull(wanted, Stop())
        assert pulled.status == bytes([BlockStatus.LATE])
        assert "revoked" in pulled.error
        assert owner.source.lent == lent
    finally:
        owner.transport.close()
        reader.transport.close()

"""TLS 1.3 over a `Stream`: both sides present a certificate, then everything is encrypted.

OpenSSL works on buffers in memory and never on the socket, which stays with `Stream`: its time-outs in the
kernel, its few large calls, its `shut`. OpenSSL on the socket itself was as fast on loopback (it saves a copy,
and takes three system calls for each record of 16 KiB, where here one moves many), and would need deadlines and
interruption of its own. The cost of TLS: `bench/tls.py`.

Kernel TLS is not used: Python names the option from 3.12 on, it needs the kernel's `tls` module, without which
OpenSSL silently skips it, and OpenSSL would have to own the socket.

`binding` is known only to the ends of a connection: the client's Finished message, a
digest of the whole handshake, certificates included. The cluster secret is proved over it (`handshake`), so that
a man in the middle cannot forward a proof that was made for him.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from typing import cast

from kvpool.errors import KvpoolError, NotAuthenticated, ProtocolError
from kvpool.security.credentials import Contexts, Credentials, node_in
from kvpool.transfer.base import Deadline
from kvpool.transfer.stream import Closed, Stream
from kvpool.wire.frame import HEADER, HELLO_BYTES_MAX

RECORD_BYTES = 16384  # of plain bytes, at most
RECORD_EXTRA = 22  # header, type and tag
FLUSH_BYTES = 1 << 20  # encrypted, then sent by one call
STAGE_BYTES = 256 << 10  # received by one call, then decrypted
SMALL_STAGE_BYTES = 32 << 10  # the same if less is expected
HANDSHAKE_RECORD = 0x16  # the first byte of a TLS peer


def open_stream(
    sock: socket.socket, deadline: Deadline, credentials: Credentials | None, *, listens: bool
) -> Stream:
    """A stream over a socket, with TLS if there are credentials. listens: whether the peer connected."""
    if credentials is None:
        return Stream(sock, deadline)
    return TlsStream(sock, deadline, credentials, listens=listens)


class TlsStream(Stream):
    """See `Stream` and the module. Nothing is sent or received before `secure`."""

    CARRIED_BYTES_MAX = 128 << 30
    """With one key AES-GCM is good for 2**24.5 records (RFC 8446, 5.5); Python cannot request a new key."""

    def __init__(
        self, sock: socket.socket, deadline: Deadline, credentials: Credentials, *, listens: bool
    ) -> None:
        super().__init__(sock, deadline)
        self._credentials = credentials
        self._listens = listens
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls: ssl.SSLObject | None = None
        self._contexts: Contexts | None = None
        self._valid_until = 0.0  # of the peer's certificate, by the machine's clock
        self._carried = 0
        self._small = memoryview(bytearray(SMALL_STAGE_BYTES))
        self._large: memoryview | None = None
        self._speaks_plain = False  # the peer, which must learn why that is refused

    def secure(self) -> None:
        """Perform the handshake, within the deadline.

        Raises `NotAuthenticated` for a peer without an acceptable certificate, or that rejects ours (which the
        connecting side may learn only with the peer's first answer), `ProtocolError` for another protocol.
        """
        contexts = self._credentials.current()
        context = contexts.listens if self._listens else contexts.connects
        tls = context.wrap_bio(self._incoming, self._outgoing, server_side=self._listens)
        try:
            self._shake_hands(tls)
        except ssl.SSLError as error:
            self._tell()
            raise _mapped(error) from None
        # From here on the peer can be sent an error in kvpool's own protocol.
        self._tls, self._contexts = tls, contexts
        certificate = tls.getpeercert()
        self.peer_node = node_in(certificate, self._credentials.cluster)
        assert certificate is not None, "it was verified"
        self._valid_until = ssl.cert_time_to_seconds(str(certificate["notAfter"]))
        self.binding = tls.get_channel_binding("tls-unique") or b""
        assert self.binding, "the handshake has been finished"

    def _shake_hands(self, tls: ssl.SSLObject) -> None:
        first = self._listens
        while True:
            try:
                tls.do_handshake()
                self._flush()
                return
            except ssl.SSLWantReadError:
                self._flush()
            self._wait_for(1)
            got = self._receive_some([self._small])
            if first:
                self._check_speaks_tls(self._small[:got])
                first = False
            self._incoming.write(self._small[:got])

    def _check_speaks_tls(self, said: memoryview) -> None:
        """Raises `ProtocolError` for anything but a handshake; a daemon without TLS can be told so."""
        if said[0] == HANDSHAKE_RECORD:
            return
        if len(said) >= HEADER.size:
            self._speaks_plain = HEADER.unpack_from(said)[0] <= HELLO_BYTES_MAX
        raise ProtocolError(
            "this daemon accepts only TLS from peers: give all daemons of the cluster certificates "
            "(kvpool certs node; tls_cert, tls_key, tls_ca)"
        )

    def _tell(self) -> None:
        """Send TLS's alert for a failed handshake."""
        try:
            self._flush()
        except KvpoolError:
            pass  # the peer has gone; the caller's reason matters

    def send_buffers(self, buffers: list[memoryview]) -> None:
        if self._speaks_plain:
            super().send_buffers(buffers)
            return
        tls = self._secured()
        try:
            for piece in _pieces(buffers):
                at, size = 0, len(piece)
                while at < size:
                    at += tls.write(piece[at:])  # a record
                    if self._outgoing.pending >= FLUSH_BYTES:
                        self._flush()
                self._carried += size
            self._flush()
        except ssl.SSLError as error:
            raise _mapped(error) from None

    def _flush(self) -> None:
        while self._outgoing.pending:
            super().send_buffers([memoryview(self._outgoing.read())])

    def receive_into(self, buffers: list[memoryview]) -> None:
        tls = self._secured()
        wanted = sum(map(len, buffers))
        self._carried += wanted
        for buffer in buffers:
            at, size = 0, len(buffer)
            while at < size:
                try:
                    got = cast(int, tls.read(size - at, buffer[at:]))  # into a buffer: how many
                except ssl.SSLWantReadError:
                    self._refill(wanted)
                    continue
                except ssl.SSLError as error:
                    raise _mapped(error) from None
                if not got:
                    raise Closed("the peer closed the connection in the middle of a message")
                at += got
                wanted -= got

    def _refill(self, wanted: int) -> None:
        """Receive some of the expected bytes: at most this many, encrypted."""
        stage = self._small
        if wanted > SMALL_STAGE_BYTES:
            self._large = stage = self._large or memoryview(bytearray(STAGE_BYTES))
        # All of these are still on their way, except OpenSSL's part of an incomplete record.
        coming = wanted - RECORD_BYTES - RECORD_EXTRA
        self._wait_for(max(1, min(coming, len(stage))))
        self._incoming.write(stage[: self._receive_some([stage])])
        self._flush()  # TLS may have produced an answer

    def _secured(self) -> ssl.SSLObject:
        if self._tls is None:
            raise Closed("there is no TLS on this connection")
        return self._tls

    def wait_beside(self, fd: int) -> None:
        if self._heard():
            raise Closed("the peer disconnected, or sent something, before it was answered")
        super().wait_beside(fd)

    def readable(self) -> bool:
        return self._heard() or super().readable()

    def _heard(self) -> bool:
        """Whether bytes were received that were not read yet."""
        return bool(self._incoming.pending or self._secured().pending())

    def fresh(self) -> bool:
        return (
            self._contexts is self._credentials.current()
            and self._carried < self.CARRIED_BYTES_MAX
            and time.time() < self._valid_until
            and super().fresh()
        )


def _pieces(buffers: list[memoryview]) -> Iterator[memoryview]:
    """The same bytes in the same order, with small buffers merged: each one would become a record."""
    small: list[memoryview] = []
    size = 0
    for buffer in buffers:
        if small and size + len(buffer) > RECORD_BYTES:
            yield memoryview(b"".join(small))
            small, size = [], 0
        if len(buffer) >= RECORD_BYTES:
            yield buffer
        else:
            small.append(buffer)
            size += len(buffer)
    if small:
        yield memoryview(b"".join(small))


def _mapped(error: ssl.SSLError) -> KvpoolError:
    """OpenSSL's error, in kvpool's words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return NotAuthenticated(f"the peer's certificate is refused: {error.verify_message}")
    reason = str(error.reason or error).replace("_", " ").lower()
    if "did not return a certificate" in reason:
        return NotAuthenticated("the peer showed no certificate")
    if "wrong version number" in reason:
        return NotAuthenticated(
            "the peer speaks no TLS: give all daemons of the cluster certificates (kvpool certs node; tls_cert, "
            "tls_key, tls_ca)"
        )
    _, alert, what = reason.partition(" alert ")
    if alert:
        return NotAuthenticated(f"the peer refuses this daemon or its certificate: {what}")
    return ProtocolError(f"the peer's TLS handshake or record is invalid: {reason}")

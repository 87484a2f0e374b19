"""The certificates by which daemons authenticate each other: read from files, and again when these change.

A peer is identified by its certificate, not by its host's name: nodes are reached at addresses that change,
through address translation and by several network cards, and the same address may be another node's tomorrow. So
the checks are that the certificate is of our authority, valid now, not revoked, a node's, and of our cluster; and
that the name in it is the one in the peer's handshake.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from kvpool.errors import ConfigError, NotAuthenticated
from kvpool.security.certificate_names import NODE, CertificateName
from kvpool.security.file_watch import Reloaded

FLIGHTS_MAX = 8  # of a handshake with ourselves, which takes three

log = logging.getLogger("kvpool.transfer")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: our certificate and its chain, its key, the authority of ours and our peers' certificates, and
    the revoked ones (empty: not checked).
    """

    cert: str
    key: str
    ca: str
    crl: str = ""


@dataclass(frozen=True, slots=True)
class Contexts:
    """The TLS contexts of one reading of the files: for inbound and for outbound connections."""

    listens: ssl.SSLContext
    connects: ssl.SSLContext


class Credentials:
    """Our identity in TLS, and the accepted ones. Thread-safe.

    Changed files are read again, without a restart: invalid ones are logged once, and the last valid ones
    stay in use. Raises `ConfigError` if the first ones are invalid.
    """

    def __init__(
        self,
        files: TlsFiles,
        cluster: str,
        node: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cluster = cluster
        self._files = files
        self._node = node
        paths = [path for path in (files.cert, files.key, files.ca, files.crl) if path]
        self._read = Reloaded(paths, self._load, "TLS files", log, clock)

    def current(self) -> Contexts:
        """The contexts for the files as of now, or a moment ago. The same object until they change."""
        return self._read.current()

    def _load(self) -> Contexts:
        """Raises `ConfigError` for files with which no peer could be met."""
        contexts = Contexts(
            self._context(ssl.PROTOCOL_TLS_SERVER), self._context(ssl.PROTOCOL_TLS_CLIENT)
        )
        # Connections are not resumed, and on an idle one there is nothing to read.
        contexts.listens.num_tickets = 0
        try:
            ours = name_in(_shown_to_ourselves(contexts))
        except ssl.SSLCertVerificationError as error:
            raise ConfigError(
                f"no peer would accept {self._files.cert}: {error.verify_message}"
            ) from None
        except (ssl.SSLError, NotAuthenticated) as error:
            raise ConfigError(f"{self._files.cert} cannot be used: {error}") from None
        expected = CertificateName(self.cluster, NODE, self._node)
        if ours != expected:
            raise ConfigError(
                f"{self._files.cert} is for {ours}, and this daemon is {expected}: set cluster and node to match the "
                "certificate, or create another one (kvpool certs node)"
            )
        return contexts

    def _context(self, protocol: int) -> ssl.SSLContext:
        files = self._files
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # see the module
        context.verify_mode = ssl.CERT_REQUIRED
        path = files.cert
        try:
            context.load_cert_chain(files.cert, files.key, password=_no_password)
            path = files.ca
            context.load_verify_locations(path)
            if files.crl:
                path = files.crl
                before = context.cert_store_stats()["crl"]
                context.load_verify_locations(path)
                if context.cert_store_stats()["crl"] == before:
                    raise ConfigError(f"{path} contains no revocation list")
                context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
        except ssl.SSLError as error:
            beside = f" or {files.key}" if path == files.cert else ""
            raise ConfigError(f"{path}{beside} cannot be used: {error.reason or error}") from None
        except OSError as error:
            beside = f" or {files.key}" if path == files.cert else ""
            raise ConfigError(f"{path}{beside} cannot be read: {error.strerror}") from None
        return context


def name_in(certificate: dict[str, Any] | None) -> CertificateName:
    """The identity in a verified certificate. Raises `NotAuthenticated` unless it has exactly one."""
    names = (certificate or {}).get("subjectAltName", ())
    uris = [CertificateName.parse(value) for kind, value in names if kind == "URI"]
    ours = [name for name in uris if name is not None]
    if len(ours) != 1:
        raise NotAuthenticated(
            "the certificate does not name exactly one member of a cluster (kvpool://CLUSTER/node/NAME): create one "
            "with kvpool certs node"
        )
    return ours[0]


def node_in(certificate: dict[str, Any] | None, cluster: str) -> str:
    """The node of our cluster in a verified certificate. Raises `NotAuthenticated` for all others."""
    name = name_in(certificate)
    if (name.cluster, name.role) != (cluster, NODE):
        raise NotAuthenticated(
            f"the peer's certificate is for {name}; a peer must be a node of cluster {cluster!r}"
        )
    return name.name


def _shown_to_ourselves(contexts: Contexts) -> dict[str, Any] | None:
    """A handshake with ourselves, in memory: whether a peer with the same files would accept us; returns our
    certificate.

    Raises `ssl.SSLError`.
    """
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = contexts.connects.wrap_bio(back, there)
    far = contexts.listens.wrap_bio(there, back, server_side=True)
    waiting = [near, far]
    for turn in range(FLIGHTS_MAX):
        end = waiting[turn % 2]
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            pass  # the other side must send
    return far.getpeercert()


def _no_password() -> NoReturn:
    raise ConfigError(
        "the key of a daemon's certificate must not be encrypted: use a key without a password"
    )

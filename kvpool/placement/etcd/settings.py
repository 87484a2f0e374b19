"""Connection settings of an etcd cluster: read from a URL and files, once, at the edge."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kvpool.errors import ConfigError

SCHEMES = {"etcd": False, "etcds": True}  # the scheme, and whether it means TLS
PORT = 2379
ENDPOINTS_MAX = 16
CALL_S = 10.0


@dataclass(frozen=True, slots=True)
class EtcdSettings:
    """endpoints: `host:port` each; all of one cluster, tried in turn.

    tls: verify the servers against `ca` (absent: the public authorities that gRPC brings). cert, key:
        the client certificate, if etcd requires one. user, password: if etcd has authentication enabled.
    try_s: how long one server may take before the next is asked. An election takes etcd 1 to 2 s, and
        requests to the old leader's followers meanwhile are lost; so this is the shorter of the two.
    call_s: how long a call may take, all tries together.
    """

    endpoints: tuple[str, ...]
    tls: bool = False
    user: str = ""
    password: str = field(default="", repr=False)
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    try_s: float = 0.7
    call_s: float = CALL_S

    def __post_init__(self) -> None:
        if not 0 < len(self.endpoints) <= ENDPOINTS_MAX:
            raise ConfigError(f"{len(self.endpoints)} etcd endpoints: give 1 to {ENDPOINTS_MAX}")
        if not self.tls and (self.ca or self.cert or self.key):
            raise ConfigError(
                "certificates are set for etcd, but its URL begins with etcd://, which does not use TLS; write "
                "etcds:// or remove them"
            )
        if (self.cert is None) != (self.key is None):
            raise ConfigError("a client certificate for etcd needs both files: cert and key")
        if bool(self.user) != bool(self.password):
            raise ConfigError(
                "etcd needs both a user in its URL (etcd://USER@HOST) and a password, or neither"
            )

    @classmethod
    def from_url(
        cls,
        url: str,
        *,
        password: str = "",
        ca: Path | None = None,
        cert: Path | None = None,
        key: Path | None = None,
        call_s: float = CALL_S,
    ) -> EtcdSettings:
        """From `etcd://[user@]host[:port][,host[:port]...]`, or `etcds://` for TLS.

        IPv6 addresses need brackets. Passwords are not allowed in the URL, because URLs end up in logs
        and process lists. Raises `ConfigError`.
        """
        scheme, mark, rest = url.partition("://")
        if not mark or scheme not in SCHEMES:
            raise ConfigError("not an etcd URL: write etcd://HOST:PORT,..., or etcds:// with TLS")
        user, _, hosts = rest.rpartition("@")
        if ":" in user:
            raise ConfigError("an etcd URL must not contain a password: use its own setting")
        return cls(
            endpoints=tuple(_endpoint(host) for host in hosts.removesuffix("/").split(",")),
            tls=SCHEMES[scheme],
            user=unquote(user),
            password=password,
            ca=ca,
            cert=cert,
            key=key,
            call_s=call_s,
        )


def _endpoint(text: str) -> str:
    """`host:port`, with etcd's default port if there is none."""
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or parts.path or parts.query or parts.fragment or text.endswith(":") or port == 0:
        raise ConfigError(
            f"{text!r} is not an etcd endpoint: write HOST:PORT, IPv6 addresses in brackets"
        )
    return f"[{host}]:{port or PORT}" if ":" in host else f"{host}:{port or PORT}"

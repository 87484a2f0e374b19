"""Address and credentials of a directory's Redis: URLs, files and passwords, as frozen values."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from enum import Enum
from urllib.parse import SplitResult, unquote, urlsplit

from kvpool.errors import ConfigError

REDIS_PORT = 6379
SENTINEL_PORT = 26379
HOSTS_MAX = 64

FORMS = (
    "redis://[user[:password]@]host[:port][/db], redis+sentinel://host[:port],…/service[/db] "
    "or redis+cluster://host[:port],…; rediss instead of redis for TLS"
)

Address = tuple[str, int]


class RedisKind(Enum):
    """The kind of server at the hosts of a URL."""

    SERVER = "redis"
    SENTINEL = "redis+sentinel"
    CLUSTER = "redis+cluster"


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """One Redis, in one of its three forms. Created by `parse_url`.

    hosts: the server; or sentinels; or some nodes of a cluster. service: the primary's name, of
        sentinels. username, password: of the servers. sentinel_password: of the sentinels.
    tls_ca: PEM file of the servers' authority; empty: the system's. tls_cert, tls_key:
        the client certificate, if required. tls_check_hostname: off for clusters and sentinels whose
        certificates lack the addresses that they announce; the signature is verified nevertheless.
    """

    kind: RedisKind
    hosts: tuple[Address, ...]
    service: str = ""
    db: int = 0
    username: str = ""
    password: str = field(default="", repr=False)
    sentinel_password: str = field(default="", repr=False)
    tls: bool = False
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_check_hostname: bool = True

    @property
    def url(self) -> str:
        """For logs and status: without user and password."""
        scheme = self.kind.value.replace("redis", "rediss", 1) if self.tls else self.kind.value
        path = [self.service] if self.service else []
        path += [str(self.db)] if self.db else []
        return "/".join([f"{scheme}://{','.join(map(show_address, self.hosts))}", *path])

    def tls_context(self) -> ssl.SSLContext | None:
        """Reads the files. Raises `ConfigError` if one of them is invalid."""
        if not self.tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.tls_ca or None)
            if self.tls_cert:
                context.load_cert_chain(self.tls_cert, self.tls_key or None)
        except (OSError, ssl.SSLError) as error:
            files = ", ".join(filter(None, (self.tls_ca, self.tls_cert, self.tls_key)))
            raise ConfigError(
                f"the TLS files of the directory ({files}) cannot be used: {error}. They must be PEM and readable, "
                "and the key must match the certificate"
            ) from None
        context.check_hostname = self.tls_check_hostname
        return context


def parse_url(
    url: str,
    *,
    password: str = "",
    sentinel_password: str = "",
    tls_ca: str = "",
    tls_cert: str = "",
    tls_key: str = "",
    tls_check_hostname: bool = True,
) -> RedisSettings:
    """The settings of a URL.

    password: from a file instead of the URL; not both. Raises `ConfigError`, whose
    message never shows a password.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigError(f"the directory's URL cannot be read; it must be {FORMS}") from None
    scheme = parts.scheme
    tls = scheme.partition("+")[0] == "rediss"
    kinds = {kind.value: kind for kind in RedisKind}
    kind = kinds.get(scheme.replace("rediss", "redis", 1))
    if kind is None or parts.query or parts.fragment:
        raise ConfigError(
            f"the directory's URL is invalid (scheme {scheme!r}, or a query or fragment); it must be {FORMS}"
        )
    if (tls_ca or tls_cert or tls_key) and not tls:
        raise ConfigError(f"TLS files with {kind.value}://, which is not encrypted: write rediss")
    if tls_key and not tls_cert:
        raise ConfigError("a TLS key without its certificate: give both, or neither")
    login, _, hosts = parts.netloc.rpartition("@")
    username, _, from_url = map(unquote, login.partition(":"))
    if from_url and password:
        raise ConfigError("the directory's password is in its URL and in a file: set it only once")
    if username and not (from_url or password):
        raise ConfigError(f"user {username!r} of the directory has no password: set one")
    service, db = _path(kind, parts)
    return RedisSettings(
        kind=kind,
        hosts=_hosts(hosts, SENTINEL_PORT if kind is RedisKind.SENTINEL else REDIS_PORT, kind),
        service=service,
        db=db,
        username=username,
        password=from_url or password,
        sentinel_password=sentinel_password,
        tls=tls,
        tls_ca=tls_ca,
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_check_hostname=tls_check_hostname,
    )


def _hosts(text: str, port: int, kind: RedisKind) -> tuple[Address, ...]:
    hosts = tuple(_host(one, port) for one in text.split(","))
    if len(hosts) > (1 if kind is RedisKind.SERVER else HOSTS_MAX):
        raise ConfigError(
            f"{len(hosts)} hosts: {kind.value}:// takes one, redis+sentinel:// and "
            f"redis+cluster:// at most {HOSTS_MAX}"
        )
    return hosts


def _host(text: str, port: int) -> Address:
    try:
        one = urlsplit(f"//{text}")
        if not one.hostname or one.username is not None:
            raise ValueError(text)
        return one.hostname, port if one.port is None else one.port
    except ValueError:
        raise ConfigError(f"{text!r} is not host[:port], in a URL of the form {FORMS}") from None


def _path(kind: RedisKind, parts: SplitResult) -> tuple[str, int]:
    """(service, database)"""
    words = [unquote(word) for word in parts.path.split("/")[1:] if word]
    service = ""
    if kind is RedisKind.SENTINEL:
        if not words:
            raise ConfigError("redis+sentinel:// needs the name of a service: host,…/NAME")
        service = words.pop(0)
    if not words:
        return service, 0
    if kind is RedisKind.CLUSTER or len(words) > 1 or not words[0].isdecimal():
        # Not shown: in a password, an unescaped slash ends the host.
        raise ConfigError(
            f"the part after the hosts in the directory's URL is invalid; it must be {FORMS}; write a slash in a "
            "password as %2F"
        )
    return service, int(words[0])


def show_address(address: Address) -> str:
    """host:port, as URLs have it."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

"""Host networking: URLs of transports, which addresses are loopback, sockets' paths, and the limit of descriptors.

Only on loopback may anything listen without credentials.
"""

from __future__ import annotations

import ipaddress
import resource
from functools import lru_cache
from urllib.parse import urlsplit

from kvpool.errors import ConfigError

HOSTS_CACHED = 64
"""Names of which it is remembered whether they are this machine's own: each request has one."""


def is_loopback(host: str) -> bool:
    """Whether a name or a numeric address is this machine's own. Other names are not resolved."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("::ffff:")).is_loopback
    except ValueError:
        return False


def scheme_of(url: str) -> str:
    """The scheme before `://`. Raises `ConfigError` if there is none."""
    scheme, separator, rest = url.partition("://")
    if not separator or not scheme or not rest:
        raise ConfigError(
            f"{url!r} is not a transport URL: write, for example, tcp://127.0.0.1:7070"
        )
    return scheme


def host_and_port(url: str) -> tuple[str, int]:
    """Of a URL that has exactly these. Raises `ConfigError` for any other, or a host that cannot be a name."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        (host or "").encode(
            "idna"
        )  # as the resolver does, which raises for an empty or a long label
    except ValueError:
        host = port = None
    if (
        not (host and host.isprintable())
        or port is None
        or parts.path
        or parts.query
        or parts.fragment
        or parts.username
    ):
        raise ConfigError(f"{url!r}: write tcp://HOST:PORT, with [] around an IPv6 address")
    return host, port


@lru_cache(HOSTS_CACHED)
def names_loopback(host: str) -> bool:
    """host: of an HTTP request, maybe with its port; empty: from a client that is no browser, which always sends one."""
    if not host:
        return True
    name, _, port = host.rpartition(":")
    if not port.isdecimal():
        name = host
    return is_loopback(name.removeprefix("[").removesuffix("]"))


def operator_socket_of(socket: str) -> str:
    """The path of the operators' socket of the daemon whose clients connect to this one, unless it is set."""
    return f"{socket}.operator"


def raise_descriptor_limit() -> int:
    """To the hard limit: each client or engine needs some, and soft limits are often low. Returns that limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most

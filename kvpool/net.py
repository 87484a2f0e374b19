"""Host networking: which addresses are loopback, sockets' paths, and the limit of descriptors of a process.

Only on loopback may anything listen without credentials.
"""

from __future__ import annotations

import ipaddress
import resource
from functools import lru_cache

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

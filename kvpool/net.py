"""Host networking: which addresses are loopback, and the limit of descriptors of a process.

Only on loopback may anything listen without credentials.
"""

from __future__ import annotations

import ipaddress
import resource


def is_loopback(host: str) -> bool:
    """Whether a name or a numeric address is this machine's own. Other names are not resolved."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("::ffff:")).is_loopback
    except ValueError:
        return False


def names_loopback(host: str) -> bool:
    """host: of an HTTP request, maybe with its port; empty: from a client that is no browser, which always sends one."""
    if not host:
        return True
    name, _, port = host.rpartition(":")
    if not port.isdecimal():
        name = host
    return is_loopback(name.removeprefix("[").removesuffix("]"))


def raise_descriptor_limit() -> None:
    """To the hard limit: each client or engine needs some, and soft limits are often low."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

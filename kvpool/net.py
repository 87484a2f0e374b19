"""What the host says of networking: which addresses are loopback, and how many descriptors a process may have.

Only on loopback may anything listen without credentials.
"""

from __future__ import annotations

import ipaddress
import resource


def is_loopback(host: str) -> bool:
    """Whether a name or an address in numbers is this machine's own. Other names are not looked up."""
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
    """To what the hard limit allows: each client or engine costs some, and soft limits are often low."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

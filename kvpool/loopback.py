"""What is this machine's own, by its name: only there may anybody listen without credentials."""

from __future__ import annotations

import ipaddress


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

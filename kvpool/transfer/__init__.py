"""How bytes move between daemons: one port (`base`), one file a transport, chosen by URL scheme.

Other distributions add transports by entry points of the group `kvpool.transports`: the name is the scheme, the
value a `base.TransportFactory`. Those of kvpool itself are in a table here: a checkout whose entry points are out
of date has them too, and nobody else can take their names.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import cast

from kvpool.errors import ConfigError
from kvpool.transfer.base import TransportFactory

GROUP = "kvpool.transports"

# Imported on first use: a transfer worker loads only the transports that its URLs name.
TRANSPORTS = {
    "tcp": "kvpool.transfer.tcp:TcpTransport",
    "nixl": "kvpool.transfer.nixl:NixlTransport",
    "inproc": "kvpool.transfer.inproc:InprocTransport",
}


def scheme_of(url: str) -> str:
    """What stands before `://`. Raises `ConfigError` where nothing does."""
    scheme, separator, rest = url.partition("://")
    if not separator or not scheme or not rest:
        raise ConfigError(
            f"{url!r} is not a transport URL: write, for example, tcp://127.0.0.1:7070"
        )
    return scheme


def transport_for(url: str) -> TransportFactory:
    """The class that serves URLs like this one.

    Raises `ConfigError` for a scheme that nothing is installed for, and for what is installed and does not load.
    """
    scheme = scheme_of(url)
    if scheme in TRANSPORTS:
        found = EntryPoint(scheme, TRANSPORTS[scheme], GROUP)
        return cast("TransportFactory", found.load())
    installed = {point.name: point for point in entry_points(group=GROUP)}
    if scheme not in installed:
        names = ", ".join(sorted({*TRANSPORTS, *installed}))
        raise ConfigError(f"{url!r}: there is no transport {scheme!r}; known are {names}")
    point = installed[scheme]
    try:
        return cast("TransportFactory", point.load())
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{url!r}: the transport {scheme!r} ({point.value}) cannot be loaded: {error}"
        ) from error

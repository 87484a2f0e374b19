"""How bytes move between daemons: one port (`base`), one file a transport, chosen by URL scheme.

Other distributions add transports by entry points of the group `kvpool.transports`: the name is the scheme, the
value a `base.TransportFactory`. kvpool's own are in a table here, so that they work in a checkout with outdated
entry points, and cannot be replaced.
"""

from __future__ import annotations

from importlib import import_module
from typing import cast

from kvpool.errors import ConfigError
from kvpool.extras import install
from kvpool.net import scheme_of
from kvpool.transfer.base import TransportFactory

GROUP = "kvpool.transports"

# Imported on first use: a transfer worker loads only the transports that its URLs name.
TRANSPORTS = {
    "tcp": "kvpool.transfer.tcp:TcpTransport",
    "nixl": "kvpool.transfer.nixl:NixlTransport",
    "inproc": "kvpool.transfer.inproc:InprocTransport",
}


def transport_for(url: str) -> TransportFactory:
    """The class that serves URLs like this one.

    Raises `ConfigError` for unknown schemes, and for transports that fail to load.
    """
    scheme = scheme_of(url)
    if scheme in TRANSPORTS:
        module, _, name = TRANSPORTS[scheme].partition(":")
        try:
            return cast("TransportFactory", getattr(import_module(module), name))
        except ModuleNotFoundError as error:
            raise ConfigError(f"{scheme}:// needs {error.name}: {install('cluster')}") from None
    # Imported here: its parsers of e-mail and archives take a third of a transfer worker's start.
    from importlib.metadata import entry_points

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

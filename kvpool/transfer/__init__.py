"""How bytes move between daemons: one port (`base`), one file a transport, chosen by URL scheme."""

from __future__ import annotations

import importlib
from typing import cast

from kvpool.errors import ConfigError
from kvpool.transfer.base import TransportFactory

# Imported on first use: a mover loads only the transports that its URLs name.
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
    """The class that serves URLs like this one. Raises `ConfigError` for an unknown scheme."""
    scheme = scheme_of(url)
    place = TRANSPORTS.get(scheme)
    if place is None:
        raise ConfigError(
            f"{url!r}: no transport is called {scheme!r}; there are {', '.join(sorted(TRANSPORTS))}"
        )
    module, _, name = place.partition(":")
    return cast("TransportFactory", getattr(importlib.import_module(module), name))

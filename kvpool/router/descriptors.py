"""How many requests and connections the process's limit of open files allows. No I/O."""

from __future__ import annotations

import msgspec

from kvpool.router.config import RouterConfig

STRANGERS = 512
"""Connections beside those of requests, at most."""
OF_A_REQUEST = 4
"""Its connection, one that waits with a body, and calls to two engines."""
OF_AN_ENGINE = 8
"""Its probes, KV events and their replay."""
OF_THE_PROCESS = 64


def fitted(config: RouterConfig, descriptors: int) -> RouterConfig:
    """The same with `requests_max` so low that the process never lacks descriptors, if it may have so many.

    Without one an engine could not be asked, which must not look like the engine's failure.
    """
    room = _room(config, descriptors)
    if room >= (OF_A_REQUEST + 1) * STRANGERS:
        fit = (room - STRANGERS) // OF_A_REQUEST
    else:
        fit = room // (OF_A_REQUEST + 1)
    return msgspec.structs.replace(config, requests_max=max(min(config.requests_max, fit), 1))


def connections_max(config: RouterConfig, descriptors: int) -> int:
    """As many as requests can be active and waiting with bodies, and some more. config: a fitted one."""
    left = _room(config, descriptors) - OF_A_REQUEST * config.requests_max
    return 2 * config.requests_max + max(min(STRANGERS, left), 1)


def _room(config: RouterConfig, descriptors: int) -> int:
    """For requests and strangers."""
    return descriptors - OF_THE_PROCESS - OF_AN_ENGINE * len(config.engines)

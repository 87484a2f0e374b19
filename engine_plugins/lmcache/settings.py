"""`adapter_params` of the plugin: read once into a frozen value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpool.engine_plugins.settings import typed_settings
from kvpool.errors import ConfigError
from kvpool.types import DEFAULT_TENANT

WORKERS_MAX = 16
TASKS_MAX = 65_536
WHERE = "adapter_params"


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one adapter. Times are in seconds.

    socket: the daemon's unix socket; None means `KVPOOL_SOCKET`, else the default path.
    tenant, token: who the server is to the pool.
    epoch: part of the namespaces. Give servers a new one when weights change under the same model name.
    lease_s: how long a looked-up object is kept for its load; later it is looked for anew.
    wait_s: the longest that a lookup waits for objects on disks or other nodes; 0: it does not.
    request_timeout_s: deadline of each request to the daemon, on top of such waits.
    workers: threads that store, as many that look up, and as many that load.
    tasks_max: how many tasks of each kind may wait for a thread; the next ones fail at once.
    replicas: how many are wanted of each object, on as many nodes; 0: the namespace's setting.
    """

    socket: str | None = None
    tenant: str = DEFAULT_TENANT
    token: str | None = None
    epoch: str = "0"
    lease_s: float = 10.0
    wait_s: float = 1.0
    request_timeout_s: float = 1.0
    workers: int = 2
    tasks_max: int = 1024
    replicas: int = 0

    def __post_init__(self) -> None:
        for name in ("lease_s", "request_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{_where(name)} must be more than 0 seconds, and finite")
        if not 0 <= self.wait_s < math.inf:
            raise ConfigError(f"{_where('wait_s')} must be at least 0 seconds, and finite")
        for name, most in (("workers", WORKERS_MAX), ("tasks_max", TASKS_MAX)):
            if not 1 <= getattr(self, name) <= most:
                raise ConfigError(f"{_where(name)} must be at least 1 and at most {most}")
        if self.replicas < 0:
            raise ConfigError(f"{_where('replicas')} must be at least 0")

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Settings:
        """Those that LMCache was given. Raises `ConfigError` naming what is wrong."""
        return cls(**typed_settings(cls, params, WHERE))


def _where(name: str) -> str:
    return f"{WHERE}[{name!r}]"

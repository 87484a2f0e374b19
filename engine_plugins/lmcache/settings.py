"""`adapter_params` of the plugin: read once into a frozen value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvpool.errors import ConfigError
from kvpool.types import DEFAULT_TENANT

WORKERS_MAX = 16
TASKS_MAX = 65_536


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
        known = {field.name: field for field in fields(cls)}
        unknown = sorted(set(params) - set(known))
        if unknown:
            raise ConfigError(
                f"adapter_params has no setting {', '.join(map(repr, unknown))}; known settings are "
                f"{', '.join(sorted(known))}"
            )
        return cls(
            **{name: _typed(name, value, known[name].default) for name, value in params.items()}
        )


def _where(name: str) -> str:
    return f"adapter_params[{name!r}]"


def _typed(name: str, value: object, default: object) -> Any:
    """`value` in the type of the setting's default; None only where None is the default."""
    if default is None or isinstance(default, str):
        if isinstance(value, str) or (value is None and default is None):
            return value
        raise ConfigError(f"{_where(name)} must be a string, not {value!r}")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{_where(name)} must be a number, not {value!r}")
    if isinstance(default, int):
        if value != int(value):
            raise ConfigError(f"{_where(name)} must be a whole number, not {value!r}")
        return int(value)
    return float(value)

"""`adapter_params` of the plugin: read once into a frozen value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from kvpool.engine_plugins.settings import PoolSettings

WORKERS_MAX = 16
TASKS_MAX = 65_536


@dataclass(frozen=True)
class Settings(PoolSettings):
    """Of one adapter. Times are in seconds.

    lease_s: how long a looked-up object is kept for its load; later it is looked for anew.
    wait_s: the longest that a lookup waits for objects on disks or other nodes; 0: it does not.
    request_timeout_s: deadline of each request to the daemon, on top of such waits.
    workers: threads that store, as many that look up, and as many that load.
    tasks_max: how many tasks of each kind may wait for a thread; the next ones fail at once.
    replicas: how many are wanted of each object, on as many nodes; 0: the namespace's setting.
    """

    WHERE: ClassVar = "adapter_params"

    lease_s: float = 10.0
    wait_s: float = 1.0
    request_timeout_s: float = 1.0
    workers: int = 2
    tasks_max: int = 1024
    replicas: int = 0

    def __post_init__(self) -> None:
        for name in ("lease_s", "request_timeout_s"):
            self.require(
                name, 0 < getattr(self, name) < math.inf, "more than 0 seconds, and finite"
            )
        self.require("wait_s", 0 <= self.wait_s < math.inf, "at least 0 seconds, and finite")
        for name, most in (("workers", WORKERS_MAX), ("tasks_max", TASKS_MAX)):
            self.require(name, 1 <= getattr(self, name) <= most, f"at least 1 and at most {most}")
        self.require("replicas", self.replicas >= 0, "at least 0")

"""The settings of a tier of vLLM's `TieringOffloadingSpec`: read once into a frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvpool.engine_plugins.settings import ModelSettings

THREADS_MAX = 64
JOBS_MAX = 4096
LOCALITIES = (None, "LOCAL", "REMOTE")


@dataclass(frozen=True)
class TierConfig(ModelSettings):
    """Settings of one engine's tier. Times are in seconds.

    lookup_timeout_s: the longest that a lookup's thread waits for the daemon; its requests wait as long.
    request_timeout_s: the same for stores and loads, without the time for their bytes.
    load_wait_s: how long a load waits for chunks that are on disks or other nodes.
    load_threads, store_threads: how many jobs of each kind are copied at a time.
    jobs_max: how many of each kind wait or are copied; further ones fail at once.
    verify_loads: compare chunks with their checksums as they are loaded; wrong ones are computed.
    accept_weak_hashes: share chunks although they are hashed with xxhash (`namespace.check_hashes`).
    same_adapters: an adapter's name means the same weights in all engines that share chunks.
    fixed_weights: no weights are changed while an engine runs: a reset of its caches changes nothing here.
    locality: of the pool, for vLLM's filters of tiers: `LOCAL` or `REMOTE`.
    """

    WHERE: ClassVar = "secondary_tiers"
    DEFAULT_THREADS: ClassVar[int] = 4

    lookup_timeout_s: float = 0.25
    request_timeout_s: float = 1.0
    load_wait_s: float = 1.0
    load_threads: int = DEFAULT_THREADS
    store_threads: int = DEFAULT_THREADS
    jobs_max: int = 256
    verify_loads: bool = False
    accept_weak_hashes: bool = False
    same_adapters: bool = False
    fixed_weights: bool = False
    locality: str | None = None

    def __post_init__(self) -> None:
        for name in ("lookup_timeout_s", "request_timeout_s"):
            self.require(name, getattr(self, name) > 0, "more than 0 seconds")
        self.require("load_wait_s", self.load_wait_s >= 0, "at least 0 seconds")
        for name in ("load_threads", "store_threads", "jobs_max"):
            most = JOBS_MAX if name == "jobs_max" else THREADS_MAX
            self.require(name, 1 <= getattr(self, name) <= most, f"at least 1 and at most {most}")
        good = self.locality in LOCALITIES
        self.require("locality", good, f"LOCAL or REMOTE, not {self.locality!r}")

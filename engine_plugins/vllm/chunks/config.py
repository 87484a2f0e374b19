"""The settings of a tier of vLLM's `TieringOffloadingSpec`: read once into a frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvpool.engine_plugins.settings import typed_settings
from kvpool.errors import ConfigError
from kvpool.types import DEFAULT_TENANT

WHERE = "secondary_tiers"
THREADS_MAX = 64
JOBS_MAX = 4096
LOCALITIES = (None, "LOCAL", "REMOTE")


@dataclass(frozen=True, slots=True)
class TierConfig:
    """Settings of one engine's tier. Times are in seconds.

    socket, tenant, token, model, epoch, any_version: as in `PluginConfig`.
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

    DEFAULT_THREADS: ClassVar[int] = 4

    socket: str | None = None
    tenant: str = DEFAULT_TENANT
    token: str | None = None
    model: str | None = None
    epoch: str = "0"
    any_version: bool = False
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
            if not getattr(self, name) > 0:
                raise ConfigError(f"{_where(name)} must be more than 0 seconds")
        if not self.load_wait_s >= 0:
            raise ConfigError(f"{_where('load_wait_s')} must be at least 0 seconds")
        for name, most in (
            ("load_threads", THREADS_MAX),
            ("store_threads", THREADS_MAX),
            ("jobs_max", JOBS_MAX),
        ):
            if not 1 <= getattr(self, name) <= most:
                raise ConfigError(f"{_where(name)} must be at least 1 and at most {most}")
        if self.locality not in LOCALITIES:
            raise ConfigError(
                f"{_where('locality')} must be LOCAL or REMOTE, not {self.locality!r}"
            )

    @classmethod
    def from_given(cls, given: Mapping[str, Any]) -> TierConfig:
        """The settings of a tier's entry, without `type` and `module_path`. Raises `ConfigError`."""
        return cls(**typed_settings(cls, given, WHERE))


def _where(name: str) -> str:
    return f"{WHERE}[{name!r}]"

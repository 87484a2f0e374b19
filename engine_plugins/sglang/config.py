"""`--hicache-storage-backend-extra-config` of the plugin: read once into a frozen value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpool.engine_plugins.settings import typed_settings
from kvpool.errors import ConfigError
from kvpool.types import DEFAULT_TENANT

OF_SGLANG = frozenset(
    {
        "backend_name",
        "module_path",
        "class_name",
        "interface_v1",
        # SGLang removes these before, but not in every version.
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "hicache_storage_pass_prefix_keys",
        "tp_lcm_size",
    }
)
TIMEOUT_S_MAX = 60.0
WHERE = "hicache-storage-backend-extra-config"


@dataclass(frozen=True, slots=True)
class BackendConfig:
    """Settings of one engine.

    socket: the daemon's unix socket, in which `{rank}` stands for the number of the tensor-parallel rank, where ranks
        have daemons of their own; None means `KVPOOL_SOCKET`, else the default path.
    tenant, token: who the engine is to the pool.
    model, revision, draft_model: names of the weights in the namespace, for engines that hold the same weights under
        different paths; None means what SGLang was given.
    epoch: part of the namespace. Give engines a new one when their weights change in place.
    any_version: share pages with engines of all versions of SGLang, else with those of the same release.
    timeout_s, timeout_per_ki_token_s: a call of SGLang takes at most so long, and so much longer for each 1,024 tokens
        in it. The defaults are those of SGLang's prefetches (`prefetch_timeout_base`, `prefetch_timeout_per_ki_token`).
    verify: compare pages with their checksums when they are read; wrong ones are misses.
    pages: whether SGLang exchanges pages of its host pool with the plugin (`interface_v1`), or tensors.
    """

    socket: str | None = None
    tenant: str = DEFAULT_TENANT
    token: str | None = None
    model: str | None = None
    revision: str | None = None
    draft_model: str | None = None
    epoch: str = "0"
    any_version: bool = False
    timeout_s: float = 1.0
    timeout_per_ki_token_s: float = 0.25
    verify: bool = False
    pages: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s <= TIMEOUT_S_MAX:
            raise ConfigError(
                f"{_where('timeout_s')} must be more than 0 and at most {TIMEOUT_S_MAX:g} seconds"
            )
        if not 0 <= self.timeout_per_ki_token_s < math.inf:
            raise ConfigError(
                f"{_where('timeout_per_ki_token_s')} must be at least 0 seconds, and finite"
            )

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any] | None) -> BackendConfig:
        """The configuration that an engine was given. Raises `ConfigError` naming what is wrong."""
        given = {name: value for name, value in (extra or {}).items() if name not in OF_SGLANG}
        values = typed_settings(cls, given, WHERE, without=("pages",))
        return cls(**values, pages=bool((extra or {}).get("interface_v1", 0)))

    def limit_s(self, tokens: int) -> float:
        """How long a call about so many tokens may take."""
        return self.timeout_s + self.timeout_per_ki_token_s * tokens / 1024


def _where(name: str) -> str:
    return f"{WHERE}[{name!r}]"

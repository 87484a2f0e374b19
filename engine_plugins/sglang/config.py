"""`--hicache-storage-backend-extra-config` of the plugin: read once into a frozen value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from kvpool.engine_plugins.settings import ModelSettings

OF_SGLANG = frozenset(
    {
        "backend_name",
        "module_path",
        "class_name",
        # SGLang removes these before, but not in every version.
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "hicache_storage_pass_prefix_keys",
        "tp_lcm_size",
    }
)
TIMEOUT_S_MAX = 60.0


@dataclass(frozen=True)
class BackendConfig(ModelSettings):
    """Settings of one engine. `{rank}` in `socket` stands for the number of the tensor-parallel rank.

    revision, draft_model: names of these weights in the namespace, as `model`.
    timeout_s, timeout_per_ki_token_s: a call of SGLang takes at most so long, and so much longer for each 1,024 tokens
        in it. The defaults are those of SGLang's prefetches (`prefetch_timeout_base`, `prefetch_timeout_per_ki_token`).
    verify: compare pages with their checksums when they are read; wrong ones are misses.
    interface_v1: whether SGLang exchanges pages of its host pool with the plugin, or tensors.
    """

    WHERE: ClassVar = "hicache-storage-backend-extra-config"

    revision: str | None = None
    draft_model: str | None = None
    timeout_s: float = 1.0
    timeout_per_ki_token_s: float = 0.25
    verify: bool = False
    interface_v1: bool = False

    def __post_init__(self) -> None:
        most, per_ki_token_s = TIMEOUT_S_MAX, self.timeout_per_ki_token_s
        good = 0 < self.timeout_s <= most
        self.require("timeout_s", good, f"more than 0 and at most {most:g} seconds")
        good = 0 <= per_ki_token_s < math.inf
        self.require("timeout_per_ki_token_s", good, "at least 0 seconds, and finite")

    @classmethod
    def from_given(cls, given: Mapping[str, Any] | None) -> Self:
        own = {name: value for name, value in (given or {}).items() if name not in OF_SGLANG}
        return super().from_given(own | {"interface_v1": bool(own.get("interface_v1"))})

    def limit_s(self, tokens: int) -> float:
        """How long a call about so many tokens may take."""
        return self.timeout_s + self.timeout_per_ki_token_s * tokens / 1024

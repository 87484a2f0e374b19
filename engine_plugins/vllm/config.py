"""`kv_connector_extra_config` of the plugin: read once into a frozen value."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from kvpool.engine_plugins.settings import ModelSettings
from kvpool.types import api_path_of

PIN_SHARE_MAX = 0.1
PULLS_MAX = 16
_URL = re.compile(r"https?://[^\s/?#@]+(/[^\s?#]*)?")
CODEC_VERSION = 1
"""Changes with the bytes that codecs.py makes of the same KV."""

CHANGED_TTL_S = 3600.0
"""Blocks of weights that were changed in place are dropped when they were not used for so long: more sets follow."""


class LoadMode(StrEnum):
    """How blocks are loaded: before the step that needs them, or beside other requests' steps."""

    AUTO = "auto"
    ASYNC = "async"
    SYNC = "sync"


class EngineRole(StrEnum):
    """The role announced to routers. Whether the engine loads and saves is vLLM's `kv_role`."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class Codec(StrEnum):
    """How blocks are kept in the pool: unchanged, or quantised to half the bytes."""

    NONE = "none"
    FP8 = "fp8"
    INT8 = "int8"


@dataclass(frozen=True)
class PluginConfig(ModelSettings):
    """Settings of one engine. Times are in seconds, sizes in bytes. Weights that change in place need a new `epoch`.

    codec: what is lost of blocks to make them smaller; engines share blocks with those of the same.
    layer_pieces: into how many pieces the layers of blocks are cut; 0: as many as there are pipeline stages.
    lease_s: how long slots stay readable after a lookup; a load that ends later is a failed load.
    lookup_timeout_s: the longest that a lookup may hold the scheduler.
    request_timeout_s: deadline of the workers' requests (join, reserve, commit), and of saves whose blocks a step overwrites.
    pull_wait_s: the longest that a request waits for blocks of other nodes; 0: none are asked for.
    pulls_max: how many requests ask for them at a time.
    follows_max: how many wait at a time for a prompt that is being computed elsewhere (`following.py`).
    load_mode: `auto` loads synchronously when a rank's share of the hit is at most `sync_load_bytes`, where
        vLLM makes up for a load that failed: with one cache group of full attention, on an engine that can go
        back (`connector.can_go_back`). `sync` is refused elsewhere.
    min_load_blocks: shorter hits are not worth a load.
    pin_share: the share of the engine's blocks that saves may pin at a time, at most 0.1.
    resave_s: a block that was offered to the pool is not offered again for so long.
    save_generated: whether blocks with generated tokens are saved; else those of prompts only.
    prefill_tokens_per_s: how fast the engine computes prompts; 0: measured, with what depends on their
        length. What computing brings sooner than memory, disks or other nodes is not loaded or waited for.
    url: of the engine's HTTP server as routers reach it, `http://HOST:PORT`; None: they are not told of it.
    engine_role: what they use it for: `both`, `prefill` or `decode`.
    verify_loads: compare blocks with their checksums before they are loaded; wrong ones are computed.
    accept_weak_hashes: share blocks although they are hashed with xxhash (`namespace.check_hashes`).
    attach_device: whether blocks in the daemon's spare device memory are read there, if it is on the engine's
        own device; else they are brought into memory first.
    """

    WHERE: ClassVar = "kv_connector_extra_config"

    codec: Codec = Codec.NONE
    layer_pieces: int = 0
    lease_s: float = 10.0
    lookup_timeout_s: float = 0.05
    request_timeout_s: float = 1.0
    pull_wait_s: float = 1.0
    pulls_max: int = 8
    follows_max: int = 8
    load_mode: LoadMode = LoadMode.AUTO
    sync_load_bytes: int = 32 << 20
    min_load_blocks: int = 1
    pin_share: float = PIN_SHARE_MAX
    resave_s: float = 60.0
    save_generated: bool = True
    prefill_tokens_per_s: float = 0.0
    attach_device: bool = True
    url: str | None = None
    engine_role: EngineRole = EngineRole.BOTH
    accept_weak_hashes: bool = False
    verify_loads: bool = False

    def __post_init__(self) -> None:
        self.require(
            "url",
            self.url is None or _URL.fullmatch(self.url) is not None,
            f"http://HOST:PORT as routers reach this engine's server, not {self.url!r}",
        )
        path = api_path_of(self.url or "")
        self.require("url", not path, f"an address only: leave out {path}")
        for name in ("lease_s", "lookup_timeout_s", "request_timeout_s"):
            self.require(name, getattr(self, name) > 0, "more than 0 seconds")
        for name in ("pull_wait_s", "resave_s"):
            self.require(name, getattr(self, name) >= 0, "at least 0 seconds")
        speed = self.prefill_tokens_per_s
        self.require("prefill_tokens_per_s", 0 <= speed < math.inf, "at least 0, and finite")
        for name in ("pulls_max", "follows_max"):
            good = 1 <= getattr(self, name) <= PULLS_MAX
            self.require(name, good, f"at least 1 and at most {PULLS_MAX}")
        for name in ("sync_load_bytes", "layer_pieces"):
            self.require(name, getattr(self, name) >= 0, "at least 0")
        self.require("min_load_blocks", self.min_load_blocks >= 1, "at least 1")
        self.require(
            "pin_share",
            0 < self.pin_share <= PIN_SHARE_MAX,
            f"more than 0 and at most {PIN_SHARE_MAX}, because the engine's own cache cannot use pinned blocks",
        )

"""SGLang's host pools and its HiCache controller with their real threads, without an engine.

Imported by the conftest, and handed to the tests as its fixture `rig`.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel, get_server_args
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from transformers import PretrainedConfig

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

PAGE = 16
LAYERS = 3
TOKENS = 512
PATIENCE_S = 60.0
GROUPS = ("tp", "pp", "attn_tp", "attn_dp", "attn_cp", "attn_dcp")
ALONE = {f"{group}_{what}": int(what == "size") for group in GROUPS for what in ("rank", "size")}


def publish_arguments(**more: Any) -> None:
    """What an engine's start makes known to the whole process."""
    set_global_server_args_for_scheduler(
        ServerArgs(model_path="dummy", page_size=PAGE, device="cpu", **more)
    )
    # The configuration of a model, of which there are no files: an engine reads it from these.
    get_server_args()._model_config = SimpleNamespace(
        hf_config=PretrainedConfig(num_hidden_layers=LAYERS),
        dtype=torch.bfloat16,
        context_len=TOKENS,
    )


def mha(layout: str, *, heads: int = 2, dim: int = 32, v_dim: int | None = None) -> tuple[Any, Any]:
    """A device pool and its host pool, whose bytes are random."""
    device = MHATokenToKVPool(
        TOKENS // 2,
        page_size=PAGE,
        dtype=torch.bfloat16,
        head_num=heads,
        head_dim=dim,
        v_head_dim=v_dim or dim,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    info = device._mha_buffer_info()
    host = get_mha_host_pool_cls(info)(info, 2.0, 0, PAGE, layout, **_sizes())
    return device, randomised(host)


def mla(layout: str) -> tuple[Any, Any]:
    """The same of a model with multi-head latent attention."""
    device = MLATokenToKVPool(
        TOKENS // 2,
        page_size=PAGE,
        dtype=torch.bfloat16,
        kv_lora_rank=48,
        qk_rope_head_dim=16,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    info = device._mla_buffer_info()
    host = MLATokenToKVPoolHost(info, 2.0, 0, PAGE, layout, target_layer_num=LAYERS, **_sizes())
    return device, randomised(host)


def mamba(slots: int = 24) -> tuple[Any, Any]:
    """The pool of a state-space model's states: no device pool, and a host pool with one state a slot."""
    shapes = {"temporal": (LAYERS, slots, 4, 8), "conv": (LAYERS, slots, 6, 3)}
    info = MambaStateBufferInfo(
        temporal=torch.zeros(shapes["temporal"], dtype=torch.float32),
        conv=(torch.zeros(shapes["conv"], dtype=torch.bfloat16),),
    )
    host = MambaPoolHost(
        info, 2.0, 0, device_capacity=slots, pin_memory=False, device="cpu", layout="page_first"
    )
    for buffer in (host.temporal_buffer, *host.conv_buffer):
        buffer.view(torch.uint8).random_(0, 256)
    return None, host


def state_bytes(host: Any, slot: int) -> bytes:
    """A state, gathered by shape: the oracle."""
    return b"".join(
        buffer[slot].contiguous().view(torch.uint8).numpy().tobytes()
        for buffer in (host.temporal_buffer, *host.conv_buffer)
    )


def _sizes() -> dict[str, Any]:
    return {
        "pin_memory": False,
        "device": "cpu",
        "device_capacity_tokens": TOKENS // 2,
        "start_layer": 0,
        "end_layer": LAYERS,
    }


def buffers_of(host: Any) -> list[torch.Tensor]:
    found = host.kv_buffer
    return list(found) if isinstance(found, (list, tuple)) else [found]


def randomised(host: Any) -> Any:
    for buffer in buffers_of(host):
        buffer.view(torch.uint8).random_(0, 256)
    return host


def page_bytes(host: Any, first: int) -> bytes:
    """What a page holds, gathered by its layout and not by addresses: the oracle."""
    page = first // PAGE
    out = []
    for buffer in buffers_of(host):
        raw = buffer.view(torch.uint8)
        tokens = slice(first, first + PAGE)
        if host.layout == "page_first":
            # [K and V,] tokens, layers, ...; K and V are two buffers where their heads differ.
            found = raw[:, tokens] if raw.ndim == 5 and raw.shape[0] == 2 else raw[tokens]
        elif host.layout == "layer_first":
            found = raw[:, :, tokens] if raw.ndim == 5 and raw.shape[0] == 2 else raw[:, tokens]
        else:  # page_first_direct, page_head: [K and V,] pages, ...
            found = raw[:, page] if raw.shape[0] == 2 else raw[page]
        out.append(found.contiguous().numpy().tobytes())
    return b"".join(out)


class _Allocator:
    def __init__(self, device: Any) -> None:
        self._device = device

    def get_kvcache(self) -> Any:
        return self._device


@contextmanager
def ranks(**which: int) -> Iterator[None]:
    """As one rank of several."""
    for name in ("rank", "size"):
        found = which.get(f"tp_{name}", int(name == "size"))
        which |= {f"attn_tp_{name}": found, f"moe_tp_{name}": found}
    with get_parallel().override(**(ALONE | which)):
        yield


@contextmanager
def controller(
    pools: tuple[Any, Any], config: dict[str, Any], *, model: str = "m", **which: int
) -> Iterator[Any]:
    """SGLang's controller with the backend attached and its storage threads running. which: ranks."""
    device, host = pools
    with ranks(**which):
        found = HiCacheController(
            _Allocator(device), host, PAGE, None, threading.Event(), io_backend="direct"
        )
        found.attach_storage_backend(
            "dynamic",
            prefetch_threshold=PAGE,
            model_name=model,
            storage_backend_extra_config=dict(config),
        )
        try:
            yield found
        finally:
            found.detach_storage_backend()


@contextmanager
def hybrid(
    entries: Sequence[tuple[PoolName, Any, Any]], config: dict[str, Any], **which: int
) -> Iterator[Any]:
    """SGLang's controller of models with several pools. entries: name, device pool and host pool; KV first."""
    group = HostPoolGroup(
        [
            PoolEntry(name, host, device, lambda layer: layer, is_primary_index_anchor=index == 0)
            for index, (name, device, host) in enumerate(entries)
        ]
    )
    with ranks(**which):
        found = HybridCacheController(
            _Allocator(entries[0][1]),
            group,
            PAGE,
            None,
            threading.Event(),
            io_backend="direct",
            storage_backend="dynamic",
            prefetch_threshold=PAGE,
            model_name="m",
            storage_backend_extra_config=dict(config),
        )
        try:
            yield found
        finally:
            found.detach_storage_backend()


def tokens_of(seed: int, pages: int) -> array[int]:
    return array("q", (seed * 1_000_003 + index for index in range(pages * PAGE)))


def hashes_of(tokens: Any) -> list[str]:
    found = get_storage_hash_str(tokens, None, page_size=PAGE)
    assert isinstance(found, list)
    return found


def back_up(
    control: Any, tokens: Any, host: Any, transfers: list[PoolTransfer] | None = None
) -> tuple[torch.Tensor, int]:
    """Store a chain from fresh pages of the host pool, as SGLang does. Their indices, and how many tokens were stored."""
    indices = host.alloc(len(tokens))
    more = {"extra_pools": transfers} if transfers is not None else {}
    control.write_storage(indices, tokens, hash_value=hashes_of(tokens), **more)
    done = control.ack_backup_queue.get(timeout=PATIENCE_S)
    return indices, done.completed_tokens


@dataclass
class Prefetched:
    """hit: tokens that the query found. loaded: that were read. indices: where to. pools: pages read of others."""

    hit: int
    loaded: int
    indices: torch.Tensor
    pools: dict[str, int]


def prefetch(
    control: Any, tokens: Any, host: Any, transfers: list[PoolTransfer] | None = None
) -> Prefetched:
    """Query and read a chain through SGLang's threads, playing its scheduler."""
    if transfers is None:
        control.prefetch("a-request", tokens)
    else:
        control.prefetch(_Handle("a-request"), tokens, extra_pools=transfers)
    operation = control.prefetch_hit_queue.get(timeout=PATIENCE_S)
    hit = operation.storage_hit_count
    if not hit:
        return Prefetched(0, 0, torch.empty(0, dtype=torch.int64), {})
    operation.host_indices = host.alloc(hit)
    control.prefetch_buffer.put(operation)
    loaded, pools = 0, {}
    while True:
        ack = control.ack_prefetch_queue.get(timeout=PATIENCE_S)
        loaded = ack.completed_tokens if ack.completed_tokens is not None else loaded
        pools = ack.pool_hits if ack.pool_hits is not None else pools
        if ack.completed_req:
            return Prefetched(hit, loaded, operation.host_indices, pools)


@dataclass
class _Handle:
    rid: str

"""The namespace of a tier's chunks: rows of vLLM's memory for offloading, as all ranks have filled them.

Nothing here cuts a chunk, so engines share those of the same form only: the same model and weights, vLLM, device, attention,
ranks, cache groups and chunk size. Takes vLLM's objects without importing vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvpool.engine_plugins.facts import digest, fp8_type, plain
from kvpool.engine_plugins.vllm.chunks.config import TierConfig
from kvpool.engine_plugins.vllm.naming.callers import callers
from kvpool.engine_plugins.vllm.naming.namespace import check_hashes, engine_facts
from kvpool.errors import ConfigError
from kvpool.types import NamespaceRecord, PartSpec

FORM = "chunk"
FORM_VERSION = 1


def engine_config(offloading_spec: Any) -> Any:
    """Return the engine's `VllmConfig`. A tier is given excerpts only, in which its weights and hashes are missing.

    The functions that are making the tier have it: call this while they do.
    Raises `ConfigError` if none of them has.
    """
    extra = offloading_spec.extra_config
    for names in callers():
        for one in names.values():
            if type(one).__name__ == "VllmConfig":
                transfer = one.kv_transfer_config
                if transfer is not None and transfer.kv_connector_extra_config is extra:
                    return one
    raise ConfigError(
        "kvpool's tier does not find the configuration of the engine that it belongs to, so it cannot tell which weights its "
        "chunks come from: use the connector KvpoolConnector with this version of vLLM"
    )


def check(vllm_config: Any, config: TierConfig, hash_seed: str | None) -> bool:
    """Return whether block hashes depend on the versions of Python and vLLM, as `check_hashes` does.

    Raises `ConfigError` where other engines could not use the chunks, or could use wrong ones.
    """
    pickled = check_hashes(
        vllm_config.cache_config.prefix_caching_hash_algo,
        hash_seed,
        accept_weak=config.accept_weak_hashes,
        where="the tier's entry in secondary_tiers",
    )
    if vllm_config.lora_config is not None and not config.same_adapters:
        raise ConfigError(
            "vLLM's tiers know LoRA adapters by their names only, so chunks of an adapter could be found by an engine that "
            "has another one of that name. Use the connector KvpoolConnector; or, if a name means the same adapter "
            "in all engines that share the pool, set same_adapters in the tier's entry in secondary_tiers"
        )
    return pickled


def record(
    vllm_config: Any,
    offloading: Any,
    config: TierConfig,
    *,
    row_bytes: int,
    seed: str,
    versions: Mapping[str, str],
    device: Sequence[str],
    fp8: str,
) -> NamespaceRecord:
    """Return the namespace of an engine's chunks, with the weights of its start.

    offloading: vLLM's `OffloadingConfig`. row_bytes: of a chunk in memory, padding included. seed: what the chain of
    hashes starts from. versions: see `facts.versions`. device: its kind, name, and what else its kernels go by. fp8: the type
    in which the platform reads 8-bit floats.
    """
    cache, parallel = offloading.cache, offloading.parallel
    attention = vllm_config.attention_config
    fields: dict[str, Any] = engine_facts(
        vllm_config,
        config,
        seed=seed,
        versions=versions,
        hash_tokens=cache.tokens_per_hash,
        device=device,
        fp8=fp8_type(str(vllm_config.cache_config.cache_dtype), [str(offloading.model.dtype)], fp8),
    )
    fields |= {
        "form": f"{FORM} {FORM_VERSION}",
        "row_bytes": row_bytes,
        "rank_bytes": offloading.worker_kv_bytes_per_block,
        "chunk_blocks": cache.blocks_per_chunk,
        "groups": [
            {
                "group": group.group_id,
                "tokens": group.tokens_per_block,
                "layers": digest(group.layer_names),
            }
            for group in offloading.groups
        ],
        "layout": offloading.kv_cache_layout,
        "canonical": offloading.canonical_layout,
        "replicated": offloading.replicated_layout,
        "offloaded_dtype": offloading.model.dtype,
        "ranks": parallel.world_size,
        "tp": parallel.tp_size,
        "pp": parallel.pp_size,
        "pcp": parallel.pcp_size,
        "dcp": parallel.dcp_size,
        "interleave": vllm_config.parallel_config.cp_kv_cache_interleave_size,
        "attention": plain(attention.backend),
        "attention_of_kinds": plain(attention.backend_per_kind),
        "second_runner": bool(vllm_config.use_v2_model_runner),
    }
    # The end of a chunk's hash names it. There is nothing of blocks between, so a chunk is one of the pool's blocks.
    return NamespaceRecord(fields, tuple(PartSpec(row_bytes) for _ in offloading.groups))

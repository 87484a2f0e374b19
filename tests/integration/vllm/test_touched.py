"""What the plugin touches of vLLM beyond its connector interface: each is there, in an engine that runs.

The same list, with what it is for, is the table "Beyond the interface" in docs/vllm.md. A change of vLLM fails here by name.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVEventsConfig, LoRAConfig, MultiModalConfig, SpeculativeConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorTransferResults,
)
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.model_executor.models.llama4 import Llama4Attention
from vllm.platforms import current_platform
from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import KVConnectorBlockState
from vllm.v1.kv_offload import config as offloading
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from kvpool.engine_plugins.vllm.naming.callers import models_with
from kvpool.errors import ConfigError

TOUCHED = {
    "Request": "request_id block_hashes num_tokens num_prompt_tokens num_computed_tokens num_preemptions status "
    "skip_reading_prefix_cache kv_transfer_params trace_headers lora_request shared_prefix_boundary all_token_ids",
    "RequestStatus": "FINISHED_STOPPED FINISHED_LENGTH_CAPPED",
    "LoRARequest": "lora_int_id lora_name lora_path",
    "BlockPool": "blocks touch unpin_blocks free_blocks evict_blocks get_num_free_blocks cached_block_hash_to_block",
    "KVCacheBlock": "block_id block_hash",
    "SchedulerOutput": "num_scheduled_tokens kv_connector_block_state",
    "KVConnectorBlockState": "get_block_ids boundary_state_offloads",
    "KVConnectorOutput": "kv_connector_worker_meta",
    "KVConnectorTransferResults": "finished_recving failed_recving",
    "KVCacheConfig": "num_blocks kv_cache_groups kv_cache_layout hash_block_size prefix_cacheable_group_ids "
    "needs_kv_cache_zeroing",
    "KVCacheGroupSpec": "layer_names kv_cache_spec host_resident",
    "VllmConfig": "max_concurrent_batches use_v2_model_runner compilation_config model_config cache_config load_config "
    "parallel_config scheduler_config speculative_config kv_events_config kv_transfer_config attention_config lora_config",
    "CompilationConfig": "static_forward_context",
    "ModelConfig": "model revision code_revision dtype quantization quantization_config seed hf_config served_model_name "
    "max_model_len model_class_overrides get_total_num_kv_heads multimodal_config",
    "CacheConfig": "block_size cache_dtype prefix_caching_hash_algo kv_cache_dtype_skip_layers mamba_cache_dtype "
    "mamba_ssm_cache_dtype use_replayssm replayssm_buffer_len use_kda_recoverssm",
    "LoadConfig": "load_format model_loader_extra_config",
    "ParallelConfig": "rank world_size tensor_parallel_size pipeline_parallel_size decode_context_parallel_size "
    "prefill_context_parallel_size cp_kv_cache_interleave_size data_parallel_index",
    "SchedulerConfig": "max_num_batched_tokens",
    "SpeculativeConfig": "method model num_speculative_tokens kv_cache_dtype draft_model_config draft_load_config "
    "use_eagle_block_drop",
    "Llama4Attention": "attn_temperature_tuning",
    "SupportsMultiModal": "_language_model_names _tower_model_names",
    "MultiModalConfig": "mm_processor_kwargs media_io_kwargs video_pruning_rate video_pruning_method "
    "mm_encoder_attn_dtype mm_encoder_fp8_scale_path",
    "KVEventsConfig": "enable_kv_cache_events publisher endpoint replay_endpoint topic",
    "Attention": "get_attn_backend",
    "LinearBase": "input_size input_size_per_partition quant_method cpu_linear",
    "QKVParallelLinear": "total_num_kv_heads",
    "kv_cache_utils": "DEFAULT_NONE_HASH_SEED resolve_none_hash_seed",
    "kv_cache_interface": "FullAttentionSpec MLAAttentionSpec ChunkedLocalAttentionSpec SlidingWindowSpec "
    "SlidingWindowMLASpec UniformTypeKVCacheSpecs",
    "FullAttentionSpec": "block_size dcp_sharded dtype kv_quant_mode num_head_slots state_content_bytes head_size "
    "head_size_v",
    "SlidingWindowSpec": "sliding_window extra_retained_tokens",
    "MambaSpec": "mamba_cache_mode",
    "CacheHitSource": "HOST EXTERNAL_UNSPECIFIED",
    "AttentionConfig": "backend backend_per_kind indexer_kv_dtype use_non_causal",
    "OffloadingConfig": "groups worker_kv_bytes_per_block engine_id model cache parallel replicated_layout canonical_layout "
    "kv_cache_layout",
    "OffloadingGroupConfig": "group_id tokens_per_block layer_names",
    "OffloadingCacheConfig": "tokens_per_hash blocks_per_chunk",
    "OffloadingModelConfig": "dtype",
    "OffloadingParallelConfig": "world_size tp_size pp_size pcp_size dcp_size",
    "ReqContext": "req_id get_state set_state get_offload_key_position _offload_key_positions",
    "AsyncLookupManager": "lookup flush cleanup mark_miss shutdown batch_lookup",
    "LoRAConfig": "enable_tower_connector_lora",
    "Platform": "device_type get_device_name fp8_dtype",
}


@pytest.fixture(scope="module")
def living(kit: Any, llama: Path, daemon: Any) -> Any:
    """Of each name, one that an engine uses, or the class where it uses none."""
    seen: dict[str, Any] = {
        "RequestStatus": RequestStatus,
        "LoRARequest": LoRARequest,
        "KVConnectorBlockState": KVConnectorBlockState,
        "KVConnectorTransferResults": KVConnectorTransferResults(),
        "SpeculativeConfig": SpeculativeConfig,
        "MultiModalConfig": MultiModalConfig,
        "Llama4Attention": SimpleNamespace(
            **dict.fromkeys(Llama4Attention.__init__.__code__.co_names)
        ),
        "SupportsMultiModal": SupportsMultiModal,
        "LoRAConfig": LoRAConfig,
        "KVEventsConfig": KVEventsConfig(),
        "kv_cache_utils": kv_cache_utils,
        "kv_cache_interface": kv_cache_interface,
        "SlidingWindowSpec": kv_cache_interface.SlidingWindowSpec,
        "MambaSpec": kv_cache_interface.MambaSpec,
        "CacheHitSource": CacheHitSource,
        "OffloadingConfig": offloading.OffloadingConfig,
        "OffloadingGroupConfig": offloading.OffloadingGroupConfig,
        "OffloadingCacheConfig": offloading.OffloadingCacheConfig,
        "OffloadingModelConfig": offloading.OffloadingModelConfig,
        "OffloadingParallelConfig": offloading.OffloadingParallelConfig,
        "ReqContext": ReqContext("r"),
        "AsyncLookupManager": AsyncLookupManager,
        "Platform": current_platform,
    }
    with kit.run_engine(llama, daemon) as engine:
        connector = engine.connector
        for name, hook in (
            ("Request", "on_new_request"),
            ("SchedulerOutput", "build_connector_meta"),
            ("KVConnectorOutput", "update_connector_output"),
        ):
            setattr(connector, hook, spy(seen, name, getattr(connector, hook)))
        engine.generate(kit.prompts(51, (100,)), 2)
        engine.drain()
        config = engine.llm.llm_engine.vllm_config
        layers = list(config.compilation_config.static_forward_context.values())
        cache = connector._kv_cache_config
        (group,) = cache.kv_cache_groups
        runner = engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        (model,) = runner_models(runner, layers)
        linear = next(one for one in model.modules() if isinstance(one, LinearBase))
        projection = next(one for one in model.modules() if isinstance(one, QKVParallelLinear))
        seen |= {
            "BlockPool": engine.pool,
            "KVCacheBlock": engine.pool.blocks[1],
            "KVCacheConfig": cache,
            "KVCacheGroupSpec": group,
            "FullAttentionSpec": group.kv_cache_spec,
            "VllmConfig": config,
            "CompilationConfig": config.compilation_config,
            "ModelConfig": config.model_config,
            "CacheConfig": config.cache_config,
            "LoadConfig": config.load_config,
            "ParallelConfig": config.parallel_config,
            "SchedulerConfig": config.scheduler_config,
            "Attention": layers[0],
            "AttentionConfig": config.attention_config,
            "LinearBase": linear,
            "QKVParallelLinear": projection,
        }
        yield seen


def runner_models(runner: Any, layers: list[Any]) -> list[Any]:
    """Return the models that the connector finds, called by this runner as it is when the engine starts."""

    class Caller:
        def __init__(self) -> None:
            self.__dict__ = vars(runner)

        def register_kv_caches(self) -> list[Any]:
            return models_with(layers)

    return Caller().register_kv_caches()


def spy(seen: dict[str, Any], name: str, hook: Any) -> Any:
    """The hook, which keeps the first that it is given."""

    def call(given: Any) -> Any:
        seen.setdefault(name, given)
        return hook(given)

    return call


@pytest.mark.parametrize(
    ("owner", "name"), [(owner, name) for owner, names in TOUCHED.items() for name in names.split()]
)
def test_it_is_there(living: dict[str, Any], owner: str, name: str) -> None:
    one = living[owner]
    fields = (
        {each.name for each in dataclasses.fields(one)}
        if isinstance(one, type) and dataclasses.is_dataclass(one)
        else set()
    )
    known = hasattr(one, name) or name in fields or name in getattr(one, "__struct_fields__", ())
    assert known, f"vLLM's {owner} has no {name} any more"


def test_the_backend_of_a_layer_has_a_name(living: dict[str, Any]) -> None:
    assert living["Attention"].get_attn_backend().get_name() == "CPU_ATTN"


def test_a_linear_layer_computes_by_its_method(living: dict[str, Any]) -> None:
    """The one call into vLLM's model, where weights are hidden."""
    import torch

    layer = living["LinearBase"]
    probe = torch.zeros(2, layer.input_size_per_partition, dtype=torch.float32)
    with torch.inference_mode():
        assert layer.quant_method.apply(layer, probe).shape[0] == 2


@pytest.mark.parametrize(
    ("owner", "name"), [(KVConnectorBase_V1, "bind_gpu_block_pool"), (BlockPool, "unpin_blocks")]
)
def test_a_vllm_without_pins_is_refused_at_its_start(
    kit: Any, llama: Path, daemon: Any, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    monkeypatch.delattr(owner, name)
    with pytest.raises(ConfigError, match=rf"has no {owner.__name__}.{name}"):
        kit.run_engine(llama, daemon).__enter__()


def test_the_manual_has_this_list() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs/vllm.md").read_text()
    table = text.partition("## Beyond the interface")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", table, re.MULTILINE)
    listed = {owner: set(re.findall(r"`(\w+)`", names)) for owner, names in rows}
    assert listed == {owner: set(names.split()) for owner, names in TOUCHED.items()}

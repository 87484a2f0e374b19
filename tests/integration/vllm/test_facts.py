"""Which settings of vLLM keep engines apart: those that change KV, and no others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import config as vllm_config
from vllm.config.quantization import QuantizationConfigArgs
from vllm.engine.arg_utils import EngineArgs

from kvpool.engine_plugins.facts import plain
from kvpool.engine_plugins.vllm.config import PluginConfig
from kvpool.engine_plugins.vllm.naming.namespace import engine_facts

NEW = 16

# Settings that the namespace has, by class: themselves, or by what they lead to.
FACTS = {
    "ModelConfig": "model dtype seed hf_config hf_config_path hf_overrides revision code_revision quantization "
    "quantization_config model_class_overrides multimodal_config "
    # by the model's rotations and temperatures, or by the types of its positions
    "max_model_len "
    # by its configuration, and by the specs of its groups
    "hf_text_config disable_sliding_window "
    # by the temperatures of the loaded model
    "override_generation_config generation_config",
    "CacheConfig": "cache_dtype prefix_caching_hash_algo hash_block_size kv_cache_dtype_skip_layers mamba_cache_dtype "
    "mamba_ssm_cache_dtype use_replayssm replayssm_buffer_len use_kda_recoverssm "
    # by the specs of the groups, and by what ranks report
    "block_size kv_cache_layout sliding_window mamba_block_size mamba_page_size_padded skip_page_size_padded "
    "mamba_cache_mode swa_bounded_replay",
    "SpeculativeConfig": "model method num_speculative_tokens kv_cache_dtype quantization revision code_revision "
    "draft_model_config draft_load_config max_model_len",
    "AttentionConfig": "indexer_kv_dtype use_non_causal "
    # by the backends that ranks report, and by the specs of the groups
    "backend backend_per_kind hisparse_config",
    "LoadConfig": "load_format model_loader_extra_config",
    "MultiModalConfig": "media_io_kwargs mm_processor_kwargs mm_encoder_attn_dtype mm_encoder_fp8_scale_path "
    "video_pruning_rate video_pruning_method",
    "LoRAConfig": "enable_tower_connector_lora",
}

# Those that change no KV, or only the last bits of it, as another kernel does.
NO_FACTS = {
    "ModelConfig": "model_weights runner convert tokenizer tokenizer_mode trust_remote_code is_submodel_config "
    "word_embeddings_untied_by_checkpoint allowed_local_media_path allowed_media_domains tokenizer_revision "
    "spec_target_max_model_len allow_deprecated_quantization enforce_eager return_sampling_mask max_logprobs "
    "logprobs_mode use_fp64_gumbel enable_trace_replay disable_cascade_attn skip_tokenizer_init enable_prompt_embeds "
    "served_model_name config_format hf_token enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend "
    "sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_cumem_allocator model_impl logits_processors "
    "io_processor_plugin renderer_num_workers pooler_config",
    "CacheConfig": "user_specified_block_size prefix_match_unit gpu_memory_utilization is_attention_free "
    "num_gpu_blocks_override enable_prefix_caching prefix_cache_retention_interval "
    "enable_mamba_shared_prefix_checkpoint num_gpu_blocks num_cpu_blocks effective_attention_block_size "
    "kv_cache_size_tokens kv_cache_max_concurrency cache_hit_alignment_tokens kv_sharing_fast_prefill "
    "kv_cache_memory_bytes kv_offloading_size kv_offloading_backend _block_size_resolved",
    "SpeculativeConfig": "enforce_eager draft_tensor_parallel_size tensor_parallel_size moe_backend attention_backend "
    "index_share_for_mtp_iteration disable_padded_drafter_batch disable_eagle_block_drop use_local_argmax_reduction "
    "use_heterogeneous_vocab prompt_lookup_max prompt_lookup_min parallel_drafting target_model_config "
    "target_parallel_config num_speculative_tokens_per_batch_size draft_parallel_config suffix_decoding_max_tree_depth "
    "suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor suffix_decoding_min_token_prob "
    "rejection_sample_method synthetic_acceptance_rates synthetic_acceptance_length enable_adaptive_verification "
    "draft_sample_method dspark_draft_topk",
    "AttentionConfig": "minimax_m3_msa_decode_backend flash_attn_version flash_attn_max_num_splits_for_cuda_graph "
    "tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph use_trtllm_attention disable_flashinfer_q_quantization "
    "mla_prefill_backend use_prefill_query_quantization indexer_sparse_logits sparse_mla_force_mqa "
    "sparse_mla_prefill_workspace_factor flex_attn_block_m flex_attn_block_n flex_attn_q_block_size "
    "flex_attn_kv_block_size",
    "LoadConfig": "download_dir safetensors_load_strategy safetensors_prefetch_num_threads "
    "safetensors_prefetch_block_size device ignore_patterns use_tqdm_on_load "
    "pt_load_map_location",
    "MultiModalConfig": "language_model_only limit_per_prompt enable_mm_embeds mm_device_do_normalize "
    "mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only "
    "mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin "
    "interleave_mm_strings skip_mm_profiling mm_tensor_ipc allow_missing_mm_embeddings mm_ipc_gpu_memory_gb",
    # An adapter's own bytes are in the keys of its blocks.
    "LoRAConfig": "max_lora_rank max_loras fully_sharded_loras max_cpu_loras lora_dtype target_modules default_mm_loras "
    "specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels",
}


@pytest.mark.parametrize("owner", FACTS)
def test_every_setting_is_a_fact_or_said_not_to_be(owner: str) -> None:
    """A setting that a new version of vLLM has is decided on before that version is used."""
    fields = {each.name for each in dataclasses.fields(getattr(vllm_config, owner))}
    facts, others = set(FACTS[owner].split()), set(NO_FACTS[owner].split())
    assert not facts & others
    assert fields == facts | others


def facts_of(model: Path, **options: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "block_size": 32,
        "enforce_eager": True,
        "max_model_len": 1024,
        "dtype": "bfloat16",
    }
    config = EngineArgs(model=str(model), **(defaults | options)).create_engine_config()
    return engine_facts(
        config,
        PluginConfig(),
        seed="0",
        versions={},
        hash_tokens=32,
        device=["cpu"],
    )


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        ({}, {"dtype": "float32"}, True),
        ({}, {"kv_cache_dtype": "fp8"}, True),
        ({}, {"hf_overrides": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}}, True),
        ({}, {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}}, True),
        ({}, {"code_revision": "abc"}, True),
        ({}, {"load_format": "dummy"}, True),
        ({"load_format": "dummy"}, {"load_format": "dummy", "seed": 1}, True),
        ({"quantization": "fp8_per_tensor"}, {"quantization": "fp8_per_block"}, True),
        (
            {"quantization": "fp8_per_tensor"},
            {"quantization": "fp8_per_tensor", "quantization_config": {"ignore": ["*qkv_proj*"]}},
            True,
        ),
        (
            {"quantization": "online", "quantization_config": {"targets": {"*": "fp8_per_tensor"}}},
            {"quantization": "online", "quantization_config": {"targets": {"*": "mxfp4"}}},
            True,
        ),
        (
            {"quantization": "online", "quantization_config": {"linear": "fp8_per_tensor"}},
            {"quantization": "online", "quantization_config": {"linear": "mxfp8"}},
            True,
        ),
        ({"quantization": "fp8_per_tensor"}, {"quantization": "fp8_per_tensor", "quantization_config": {}}, False),
        ({}, {"max_model_len": 4096}, False),
        ({}, {"enforce_eager": False}, False),
        ({}, {"max_num_batched_tokens": 256, "max_num_seqs": 3}, False),
        ({}, {"enable_chunked_prefill": False, "max_num_batched_tokens": 1024}, False),
        ({}, {"served_model_name": "other", "disable_cascade_attn": False}, False),
        ({}, {"gpu_memory_utilization": 0.5}, False),
        (
            {},
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}},
            False,
        ),
    ],
    ids=str,
)  # fmt: skip
def test_settings_keep_engines_apart_that_compute_other_kv(
    llama: Path, one: dict[str, Any], other: dict[str, Any], apart: bool
) -> None:
    assert (facts_of(llama, **one) != facts_of(llama, **other)) is apart


def test_a_quantisation_is_plain_data() -> None:
    """It holds enumerations and shapes of its own, whose text is another one in each process."""
    given = QuantizationConfigArgs(linear="fp8_per_block", ignore=["*qkv_proj*"])
    assert "0x" not in str(plain(given))
    assert plain(given)["ignore"] == ["*qkv_proj*"]
    assert plain(given) != plain(QuantizationConfigArgs(linear="fp8_per_tensor"))


def namespaces_of(
    kit: Any, model: Path, asked: list[list[int]], *engines: dict[str, Any]
) -> tuple[list[Any], list[list[Any]]]:
    """Return what engines that follow each other on one pool are called, and what they answered."""
    names, answers = [], []
    for options in engines:
        extra = options.pop("extra", {})
        daemon = options.pop("daemon", None)
        with kit.run_engine(model, daemon, extra, **options) as engine:
            answers.append(engine.generate(asked, NEW))
            engine.drain()
            space = engine.connector and engine.namespace
            names.append(space and space.record.digest())
    return names, answers


def test_longrope_is_shared_by_engines_with_the_same_factors(
    kit: Any, models: Callable[[str], Path], tmp_path: Path
) -> None:
    """vLLM takes long or short ones for all positions, by the longest prompt that it allows."""
    model, asked = models("longrope"), kit.prompts(71, (700, 333))
    with kit.run_daemon(tmp_path) as daemon:
        names, (own, wrote, other, longer) = namespaces_of(
            kit,
            model,
            asked,
            {"max_model_len": 2048},
            {"max_model_len": 1024, "daemon": daemon},
            {"max_model_len": 2048, "daemon": daemon},
            {"max_model_len": 4096, "daemon": daemon},
        )
    assert names[1] != names[2] == names[3]
    assert [each.tokens for each in wrote] != [each.tokens for each in own], "it matters"
    assert other == own, "nothing is read of the short factors' KV"
    assert [each.tokens for each in longer] == [each.tokens for each in own]
    assert [each.cached for each in longer] == [kit.hit(700), kit.hit(333)]


def test_engines_that_quantise_other_layers_do_not_share(
    kit: Any, llama: Path, tmp_path: Path
) -> None:
    asked = kit.prompts(72, (700, 333))
    whole = {"quantization": "fp8_per_channel", "dtype": "bfloat16"}
    part = {**whole, "quantization_config": {"ignore": ["*qkv_proj*", "*down_proj*"]}}
    with kit.run_daemon(tmp_path) as daemon:
        names, (_, other, again) = namespaces_of(
            kit,
            llama,
            asked,
            {**whole, "daemon": daemon},
            {**part, "daemon": daemon},
            {**whole, "daemon": daemon},
        )
    assert names[0] == names[2] != names[1]
    assert [each.cached for each in other] == [0, 0]
    assert [each.cached for each in again] == [kit.hit(700), kit.hit(333)]

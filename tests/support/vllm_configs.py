"""vLLM's configuration of an engine, made by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvpool.engine_plugins.vllm.config import PluginConfig
from kvpool.engine_plugins.vllm.layout.shards import Cut, Held, Kind
from kvpool.engine_plugins.vllm.naming.namespace import engine_facts
from kvpool.engine_plugins.vllm.plan import RankReport


class HfConfig(SimpleNamespace):
    """A model's configuration, as transformers has it. Its repr is the same in every process, so it may name a test."""

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def engine_config(**changes: Any) -> Any:
    """Return a `VllmConfig`; `changes` as section__name, or as name of what is in no section."""
    sections: dict[str, dict[str, Any]] = {
        "model_config": {
            "model": "tiny",
            "revision": None,
            "code_revision": None,
            "seed": 0,
            "dtype": "bfloat16",
            "quantization": None,
            "quantization_config": None,
            "max_model_len": 1024,
            "model_class_overrides": {},
            "multimodal_config": None,
            "hf_config": HfConfig(layers=2, _name_or_path="/x"),
        },
        "cache_config": {
            "cache_dtype": "auto",
            "block_size": 32,
            "prefix_caching_hash_algo": "sha256",
            "kv_cache_dtype_skip_layers": [],
            "mamba_cache_dtype": "auto",
            "mamba_ssm_cache_dtype": "auto",
            "use_replayssm": False,
            "replayssm_buffer_len": 0,
            "use_kda_recoverssm": False,
        },
        "parallel_config": {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "cp_kv_cache_interleave_size": 1,
        },
        "attention_config": {
            "backend": None,
            "backend_per_kind": {},
            "indexer_kv_dtype": "auto",
            "use_non_causal": False,
        },
        "load_config": {"load_format": "auto", "model_loader_extra_config": {}},
    }
    top: dict[str, Any] = {
        "speculative_config": None,
        "lora_config": None,
        "use_v2_model_runner": False,
    }
    for name, value in changes.items():
        section, _, key = name.partition("__")
        if key:
            assert key in sections[section]
            sections[section][key] = value
        else:
            top[section] = value
    return SimpleNamespace(**{key: SimpleNamespace(**it) for key, it in sections.items()}, **top)


def start(config: Any, plugin: PluginConfig | None = None, **given: Any) -> dict[str, Any]:
    """Return the facts of an engine's start."""
    defaults: dict[str, Any] = {"seed": "none", "versions": {}, "hash_tokens": 32}
    return engine_facts(config, plugin or PluginConfig(), **(defaults | given))


def drafts(method: str, draft: Any = None, **changes: Any) -> Any:
    """Return a `SpeculativeConfig`. draft: the draft model's `ModelConfig`."""
    given: dict[str, Any] = {
        "method": method,
        "model": "d",
        "num_speculative_tokens": 2,
        "kv_cache_dtype": None,
        "draft_model_config": draft,
        "draft_load_config": None,
    }
    return SimpleNamespace(**(given | changes))


def rank_report(rank: int = 0, **changes: Any) -> RankReport:
    """Return the report of a rank of two that has parts of its own, of two layers."""
    given: dict[str, Any] = {
        "device": "cpu",
        "layout": "LBHNC",
        "isa": "x86 vec",
        "groups": [[("l0", 100), ("l1", 28)]],
        "backends": {"l0": "CPU"},
        "held": [Held(Kind.RANKS, Cut(pieces=1), {0: 128}, {0: [("l0", 1, 100)]}, {})],
        "rotations": ["by 10000"],
        "fp8": "torch.float8_e4m3fn",
    }
    return RankReport(rank, **(given | changes))

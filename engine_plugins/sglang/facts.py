"""The facts that must agree for pages to be exchangeable between engines, and the keys of pages.

SGLang's page hashes name tokens (and LoRA, salt, images), never the model, its memory layout or the rank: the
namespace has all of these. Each host pool has one of its own, for each share of it that a rank holds. Takes SGLang's
objects without importing SGLang; settings that a version lacks are not set.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvpool.engine_plugins import checkpoint
from kvpool.engine_plugins.facts import (
    Facts,
    config_digest,
    file_digests,
    length_matters,
    plain,
    versions,
)
from kvpool.engine_plugins.sglang.config import BackendConfig
from kvpool.types import KEY_BYTES, NamespaceRecord, PartSpec

FORM_VERSION = 1
"""Changes with the order of a page's pieces in a block."""
KV = "kv"
DRAFTS = ("draft",)
"""How the names of pools begin that hold a draft model's KV."""
REPLICATED_POOLS = ("MLATokenToKVPoolHost", "DSAIndexerPoolHost", "DeepSeekV4PagedHostPool")
"""Classes of host pools that hold the same on each tensor-parallel rank, where the model's KV is replicated."""

SETTINGS = (
    "quantization_param_path",
    "weight_version",
    "custom_weight_loader",
    "kt_method",
    "kt_weight_path",
    "kt_num_gpu_experts",
    "kt_max_deferred_experts_per_token",
    "flashinfer_mxfp4_moe_precision",
    "enable_w4a4_mxfp4_megamoe",
    "deepep_dispatcher_output_dtype",
    "flashinfer_a2a_dispatch_type",
    "enable_quant_communications",
    "enable_tf32_matmul",
    "prefill_kv_cache_dequant_dtype",
    "qsa_indexer_dtype",
    "enable_deepseek_v4_fp4_indexer",
    "enable_page_major_kv_layout",
    "mamba_ssm_dtype",
    "enable_int8_mamba_checkpoint",
)
"""Arguments of SGLang that make other KV of the same model and tokens, or other bytes of the same KV."""
SOURCES = (
    "model_loader_extra_config",
    "remote_instance_weight_loader_seed_instance_ip",
    "remote_instance_weight_loader_seed_instance_service_port",
    "modelexpress_config",
    "weight_cache_socket",
)
"""Where weights come from if not from the model's path."""
QUANTIZATION = (
    "modelopt_quant",
    "modelopt_checkpoint_restore_path",
    "quantize_and_serve",
    "rl_quant_profile",
)
MEDIA = (
    "mm_process_config",
    "image_processor_backend",
    "disable_fast_image_processor",
    "enable_precise_embedding_interpolation",
)
OF_DRAFTS = (
    "speculative_algorithm",
    "speculative_draft_model_revision",
    "speculative_draft_model_quantization",
    "speculative_draft_kv_cache_dtype",
    "speculative_draft_load_format",
    "speculative_enable_w4a4_mxfp4_megamoe",
)
OF_POOLS = (
    "layout",
    "dtype",
    "page_size",
    "storage_format_tag",
    "start_layer",
    "end_layer",
    "layer_num",
    "target_layer_num",
    "head_num",
    "head_group_num",
    "head_dim",
    "v_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "override_kv_cache_dim",
    "dsa_kv_cache_store_fp8",
    "indexer_dtype",
    "indexer_page_stride_size",
    "num_mamba_layers",
    "conv_dtype",
    "temporal_dtype",
    "conv_state_shapes",
    "temporal_state_shape",
)


def key_of(page_hash: str) -> bytes:
    """A page's key: the last half of its SHA-256, which SGLang writes as hex digits; of other names their own."""
    if len(page_hash) == 64:
        try:
            digest = bytes.fromhex(page_hash)
        except ValueError:
            pass
        else:
            if len(digest) == 32:  # spaces are no digits, and are skipped
                return digest[-KEY_BYTES:]
    return hashlib.sha256(b"name:" + page_hash.encode()).digest()[:KEY_BYTES]


def packed_keys(page_hashes: Iterable[str]) -> bytes:
    """The keys of pages, one after the other."""
    return b"".join(map(key_of, page_hashes))


def is_replicated(storage: Any, pool: Any, name: str) -> bool:
    """Whether all tensor-parallel ranks hold the same bytes in this pool, of which one writes them.

    storage: SGLang's `HiCacheStorageConfig`.
    """
    if not getattr(storage, "is_mla_model", False):
        return False
    return name == KV or any(each.__name__ in REPLICATED_POOLS for each in type(pool).__mro__)


def is_writer(storage: Any) -> bool:
    """Whether this rank is the one that writes pages which all ranks hold."""
    return bool(getattr(storage, "is_storage_writer", storage.tp_rank == 0))


def engine_facts(
    config: BackendConfig, storage: Any, arguments: Any, model_config: Any, version: str
) -> Facts:
    """Return what all host pools of an engine have in common. Reads samples of its weights from their files.

    storage: SGLang's `HiCacheStorageConfig`. arguments: its `ServerArgs`. model_config: its `ModelConfig`.
    Both are None where this process has none.
    """
    path = str(getattr(arguments, "model_path", None) or getattr(storage, "model_name", None))
    revision = getattr(arguments, "revision", None)
    folder = _folder(path, revision)
    weights = _weights(arguments, folder)
    hf_config = getattr(model_config, "hf_config", None)
    # Samples say more than a commit, and are the same for a copy elsewhere.
    commit = None if weights else getattr(hf_config, "_commit_hash", None) or revision
    return Facts(
        engine="sglang",
        versions=versions("sglang", version, pickled=False, any_version=config.any_version),
        model=config.model or path,
        revision=config.revision or commit,
        code_revision=None,  # SGLang takes a model's code from the revision of its weights
        weights=weights,
        config=str(file_digests(folder, ["config.json"]))
        if hf_config is None
        else config_digest(hf_config),
        classes={},
        dtype=str(getattr(model_config, "dtype", None) or getattr(arguments, "dtype", None)),
        quantization=getattr(arguments, "quantization", None),
        quantization_config=_attributes(arguments, QUANTIZATION),
        kv_cache_dtype=str(getattr(arguments, "kv_cache_dtype", None)),
        fp8=None,  # of each pool
        positions=None
        if hf_config is None
        else length_matters(hf_config, int(model_config.context_len)),
        device=[str(getattr(arguments, "device", None))],
        speculative=None,  # of the pools of drafts
        multimodal=_attributes(arguments, MEDIA),
        settings={
            **_attributes(arguments, SETTINGS),
            "source": checkpoint.source(
                getattr(arguments, "load_format", None), _attributes(arguments, SOURCES)
            ),
            "served_as": None if config.model else getattr(storage, "model_name", None),
        },
        tenant=config.tenant,
        epoch=config.epoch,
    )


def record_of(
    facts: Facts,
    config: BackendConfig,
    storage: Any,
    arguments: Any,
    pool: Any,
    name: str,
    *,
    pages: bool,
    pieces: Iterable[int],
) -> NamespaceRecord:
    """Return the namespace of a host pool's pages, as this rank holds them.

    facts: see `engine_facts`. pages: whether blocks are a page's pieces, of these sizes, or the tensor that SGLang makes of
    the page.
    """
    sizes = list(pieces)
    packed_drafts = int(getattr(pool, "layer_num", 0) or 0) != int(
        getattr(pool, "target_layer_num", None) or getattr(pool, "layer_num", 0) or 0
    )
    # A host pool has 8-bit floats as uint8; the engine's own pool says which they are.
    dtype = str(getattr(getattr(pool, "device_pool", pool), "dtype", None))
    facts = replace(facts, fp8=dtype if "float8" in dtype else None)
    if name.startswith(DRAFTS) or packed_drafts:
        facts = replace(facts, speculative=_drafts(config, arguments))
    fields = facts.fields() | {
        "form": FORM_VERSION,
        "interface": "pages" if pages else "tensors",
        "pool": name,
        "pool_class": type(pool).__name__,
        "pool_facts": _attributes(pool, OF_POOLS),
        "pieces": sizes,
        "ranks": ranks_of(storage, replicated=is_replicated(storage, pool, name)),
    }
    return NamespaceRecord(fields, (PartSpec(nbytes=sum(sizes)),))


def _drafts(config: BackendConfig, arguments: Any) -> dict[str, Any]:
    """Return what drafts are made with. Without a path, the target's checkpoint has the draft model."""
    path = getattr(arguments, "speculative_draft_model_path", None)
    revision = getattr(arguments, "speculative_draft_model_revision", None)
    folder = None if path is None else _folder(path, revision)
    return {
        "model": config.draft_model or path,
        "weights": None if folder is None else checkpoint.stored(str(folder)),
        "config": {} if folder is None else file_digests(folder, ["config.json"]),
        **_attributes(arguments, OF_DRAFTS),
    }


def ranks_of(storage: Any, *, replicated: bool) -> dict[str, int]:
    """Which share of the KV a rank holds. Not its data-parallel rank: those hold other requests, not other shares."""
    names = ["pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "dcp_rank", "dcp_size"]
    if not replicated:
        names += ["tp_rank", "tp_size"]
    return {name: int(getattr(storage, name, int(name.endswith("size")))) for name in names}


def _folder(path: str, revision: str | None) -> Path:
    """Return where the files of a model are; the path as it is, where they are not on this machine."""
    try:
        return checkpoint.folder_of(path, revision)
    except (OSError, ValueError):
        return Path(path)


def _weights(arguments: Any, folder: Path) -> Any:
    """Return what tells two sets of weights under one name apart; None if their files are not on this machine."""
    if str(getattr(arguments, "load_format", None)) == "dummy":
        return "dummy"
    return checkpoint.stored(str(folder))


def _attributes(owner: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return those of the attributes that are set, as JSON."""
    found = {name: getattr(owner, name, None) for name in names}
    return {name: plain(value) for name, value in found.items() if value is not None}

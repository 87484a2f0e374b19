"""The facts that must agree for pages to be exchangeable between engines, and the keys of pages.

SGLang's page hashes name tokens (and LoRA, salt, images), never the model, its memory layout or the rank: the
namespace has all of these. Each host pool has one of its own, for each share of it that a rank holds. Takes SGLang's
objects without importing SGLang; attributes that a version lacks are left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from kvpool.engine_plugins.sglang.config import BackendConfig
from kvpool.types import KEY_BYTES, NamespaceRecord, PartSpec

FORM_VERSION = 1
"""Changes with the order of a page's pieces in a block."""
KV = "kv"
DRAFTS = ("draft",)
"""How the names of pools begin that hold a draft model's KV."""
REPLICATED_POOLS = ("MLATokenToKVPoolHost", "DSAIndexerPoolHost", "DeepSeekV4PagedHostPool")
"""Classes of host pools that hold the same on each tensor-parallel rank, where the model's KV is replicated."""

OF_WEIGHTS = (
    "quantization",
    "dtype",
    "kv_cache_dtype",
    "quantization_param_path",
    "json_model_override_args",
    "weight_version",
    "device",
)
"""Of SGLang's arguments: what makes other KV of the same model and tokens, or other bytes of the same KV."""
OF_DRAFTS = (
    "speculative_algorithm",
    "speculative_draft_model_revision",
    "speculative_draft_model_quantization",
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


def record_of(
    config: BackendConfig,
    storage: Any,
    arguments: Any,
    pool: Any,
    name: str,
    *,
    pages: bool,
    pieces: Iterable[int],
    version: str,
) -> NamespaceRecord:
    """The namespace of a host pool's pages, as this rank holds them.

    storage: SGLang's `HiCacheStorageConfig`. arguments: its `ServerArgs`, or None. pages: whether blocks are a page's pieces, of
    these sizes, or the tensor that SGLang makes of it.
    version: SGLang's, whose hashes and layouts are no promise of the next one.
    """
    sizes = list(pieces)
    packed_drafts = int(getattr(pool, "layer_num", 0) or 0) != int(
        getattr(pool, "target_layer_num", None) or getattr(pool, "layer_num", 0) or 0
    )
    fields: dict[str, Any] = {
        "engine": "sglang",
        "engine_version": version,
        "form": FORM_VERSION,
        "interface": "pages" if pages else "tensors",
        "epoch": config.epoch,
        "model": config.model or _path(storage, arguments, "model_path"),
        "revision": config.revision or _plain(getattr(arguments, "revision", None)),
        "served_as": None if config.model else _plain(getattr(storage, "model_name", None)),
        "weights": _attributes(arguments, OF_WEIGHTS),
        "pool": name,
        "pool_class": type(pool).__name__,
        "pool_facts": _attributes(pool, OF_POOLS),
        "pieces": sizes,
        "ranks": ranks_of(storage, replicated=is_replicated(storage, pool, name)),
    }
    if name.startswith(DRAFTS) or packed_drafts:
        fields["draft"] = {
            "model": config.draft_model
            or _plain(getattr(arguments, "speculative_draft_model_path", None)),
            **_attributes(arguments, OF_DRAFTS),
        }
    return NamespaceRecord(fields, (PartSpec(nbytes=sum(sizes)),))


def ranks_of(storage: Any, *, replicated: bool) -> dict[str, int]:
    """Which share of the KV a rank holds. Not its data-parallel rank: those hold other requests, not other shares."""
    names = ["pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "dcp_rank", "dcp_size"]
    if not replicated:
        names += ["tp_rank", "tp_size"]
    return {name: int(getattr(storage, name, int(name.endswith("size")))) for name in names}


def _path(storage: Any, arguments: Any, name: str) -> Any:
    return _plain(getattr(arguments, name, None) or getattr(storage, "model_name", None))


def _attributes(owner: Any, names: Iterable[str]) -> dict[str, Any]:
    found = {name: getattr(owner, name, None) for name in names}
    return {name: _plain(value) for name, value in found.items() if value is not None}


def _plain(value: Any) -> Any:
    """As JSON: dtypes, shapes and the like as their text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in sorted(value.items())}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return str(value)

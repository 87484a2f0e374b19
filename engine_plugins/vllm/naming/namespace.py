"""The facts that must agree for an engine's KV bytes to be exchangeable, and refusals if they cannot.

The engine's block hashes name tokens (and LoRA, salt, images), never the model or its memory
layout; the namespace adds the rest. What is stored is the same whatever the ranks (`shards.py`), so
that the record has nothing of them; part numbers count the parts of one group after the other.
Takes vLLM's objects without importing vLLM, so that it is tested without it.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from kvpool.engine_plugins.checkpoint import source, stored
from kvpool.engine_plugins.facts import (
    Facts,
    config_digest,
    digest,
    file_digests,
    fp8_type,
    length_matters,
    plain,
)
from kvpool.engine_plugins.vllm.config import CODEC_VERSION, Codec, PluginConfig
from kvpool.engine_plugins.vllm.layout.shards import Cut, Held, Kind
from kvpool.engine_plugins.vllm.plan import GroupRule, RankReport
from kvpool.errors import ConfigError
from kvpool.types import NamespaceRecord, PartKind, PartSpec

STABLE = frozenset({"sha256_cbor"})
"""Hashes that depend on their input alone."""
STABLE_BY_VERSION = frozenset({"sha256"})
"""Hashes over a pickle: stable while the Python and the engine's version are."""
SEEDED = {"xxhash_cbor": STABLE, "xxhash": STABLE_BY_VERSION}
"""Hashes that vLLM seeds at random in each process unless PYTHONHASHSEED is set."""

FULL_SPECS = ("FullAttentionSpec", "MLAAttentionSpec", "ChunkedLocalAttentionSpec")
WINDOW_SPECS = ("SlidingWindowSpec", "SlidingWindowMLASpec")
STATE_SPECS = ("MambaSpec",)
STATE_MODE = "align"
UNIFORM_SPEC = "UniformTypeKVCacheSpecs"
FORM_VERSION = 2
"""Changes with how parts are cut, and with the order of what is in them (`shards.py`)."""
OF_RANKS = (
    "num_kv_heads",
    "max_tp_shards",
    "num_head_slots",
    "page_size_padded",
    "block_stride_alignment",
    "block_size",
    "kv_cache_specs",
)
"""Fields of a group's spec that depend on the ranks or on kernels; their `Held` says what matters of them."""
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""What a model's folder says of how pictures and other media become what the model sees."""
PROCESSOR_SETTINGS = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "video_pruning_rate",
    "video_pruning_method",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
)
"""What an engine is told of it. vLLM's hashes of media have what a request says, not what the engine was told."""
DRAFTS_WITHOUT_KV = frozenset({"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"})
"""Methods whose drafts have no layers in the KV cache: engines with them share KV with those that do not draft."""
CACHE_SETTINGS = (
    "kv_cache_dtype_skip_layers",
    "mamba_cache_dtype",
    "mamba_ssm_cache_dtype",
    "use_replayssm",
    "replayssm_buffer_len",
    "use_kda_recoverssm",
)
ATTENTION_SETTINGS = ("indexer_kv_dtype", "use_non_causal")
"""What these settings change is not always seen in the specs of cache groups."""
LAYOUT_VARIABLES = ("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "VLLM_SSM_CONV_STATE_LAYOUT")
"""Variables of vLLM's environment that change where the bytes of a block lie, under the same backend's name."""
PRECISION_VARIABLES = (
    "VLLM_B12X_MOE_FP4_FORCE_A16",
    "VLLM_CPU_INT4_W4A8",
    "VLLM_DEEPEPLL_NVFP4_DISPATCH",
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE",
    "VLLM_FLOAT32_MATMUL_PRECISION",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_HUMMING_USE_F16_ACCUM",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_ROCM_FP8_MFMA_PAGE_ATTN",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION",
    "VLLM_ROCM_USE_AITER_FP4BMM",
    "VLLM_ROCM_USE_AITER_FP8BMM",
    "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4",
    "VLLM_ROCM_USE_AITER_MOE_SITUV2",
    "VLLM_USE_DEEP_GEMM_E8M0",
    "VLLM_XPU_INC_WNA16_BACKEND",
)
"""Those that quantise weights or activations, or lower the precision of what is computed with them."""
HEAD_SPECS = ("FullAttentionSpec", "ChunkedLocalAttentionSpec", "SlidingWindowSpec")
HEAD_DTYPES = ("torch.bfloat16", "torch.float16", "torch.float32")


def check_hashes(
    algorithm: str,
    hash_seed: str | None,
    *,
    accept_weak: bool = False,
    where: str = "kv_connector_extra_config",
) -> bool:
    """Whether block hashes also depend on the Python and engine versions.

    hash_seed: PYTHONHASHSEED of the engine's process. accept_weak: also hashes for which whoever sends prompts can
    make two that are equal, and so have another's prompt answered with the KV of his own. where: that is set.
    Raises `ConfigError` for those otherwise, and where the hashes of two processes would differ for the same tokens:
    their engines would fill the pool and never find anything.
    """
    if algorithm in SEEDED and hash_seed in (None, "random"):
        raise ConfigError(
            f"--prefix-caching-hash-algo {algorithm} uses a random seed in every process, so other engines could not "
            "find this engine's blocks: use sha256_cbor, or set PYTHONHASHSEED to the same number for all engines "
            "that share the pool"
        )
    if algorithm in SEEDED and not accept_weak:
        raise ConfigError(
            f"--prefix-caching-hash-algo {algorithm} is no cryptographic hash: prompts can be made whose blocks have the "
            "hashes of others, and a pool spreads what they are mistaken for. Use sha256_cbor; or, if everybody who "
            f"sends prompts is trusted, set accept_weak_hashes in {where}"
        )
    if algorithm in STABLE or SEEDED.get(algorithm) is STABLE:
        return False
    if algorithm in STABLE_BY_VERSION or algorithm in SEEDED:
        return True
    raise ConfigError(
        f"--prefix-caching-hash-algo {algorithm} may give different block hashes in every process: use sha256_cbor"
    )


def group_rules(kv_cache_config: Any, hash_tokens: int, dcp: int) -> list[GroupRule]:
    """The groups that are stored and what a hit needs of each.

    Raises `ConfigError` for caches that a store of immutable blocks cannot hold.
    """
    rules = []
    for group_id in kv_cache_config.prefix_cacheable_group_ids:
        group = kv_cache_config.kv_cache_groups[group_id]
        spec = group.kv_cache_spec
        inner = {type(one).__name__: one for one in layer_specs(spec)}
        states = not group.host_resident and all(name in STATE_SPECS for name in inner)
        if states:
            _check_states(group_id, inner.values())
        block_tokens = spec.block_size * (dcp if spec.dcp_sharded else 1)
        stride, rest = divmod(block_tokens, hash_tokens)
        if rest:
            raise ConfigError(
                f"cache group {group_id} has {block_tokens} tokens per block, which is not a multiple of the "
                f"{hash_tokens} tokens per block hash"
            )
        if not group.host_resident and all(name in FULL_SPECS for name in inner):
            rules.append(GroupRule(group_id, stride))
        elif not group.host_resident and all(name in WINDOW_SPECS for name in inner):
            # What a window of w tokens reads before the next token: w - 1 tokens.
            tokens = max(
                one.sliding_window - 1 + one.extra_retained_tokens for one in inner.values()
            )
            blocks = max(1, -(-tokens // block_tokens))
            rules.append(GroupRule(group_id, stride, PartKind.WINDOW, blocks))
        elif states:
            rules.append(GroupRule(group_id, stride, PartKind.WINDOW, 1, state=True))
        else:
            raise ConfigError(
                f"cache group {group_id} ({', '.join(sorted(inner))}) cannot be stored: kvpool supports full, MLA, "
                "chunked and sliding-window attention, and states of linear attention. Serve this model without the connector"
            )
    if not rules:
        raise ConfigError("the model has no cache group whose blocks can be stored")
    return rules


def draft_blocks(rules: Sequence[GroupRule], speculative: Any) -> int:
    """Blocks of the chain at the end of a hit that are computed all the same, for the sake of drafts; mostly 0.

    Drafts from the model's own hidden states (EAGLE, MTP) have KV of a token that depends on tokens behind it. At a
    block's end no hash of the block covers these, so that the draft's KV there may be another continuation's. vLLM
    computes that block again for its own cache, too, unless `disable_eagle_block_drop` is set. Where there are states a
    hit ends where one is, and the block before has none: these drafts are wrong at one token, which is verified anyway.
    """
    if speculative is None or not speculative.use_eagle_block_drop():
        return 0
    if any(rule.state for rule in rules):
        return 0
    return math.lcm(*(rule.stride for rule in rules))


def with_earlier_windows(rules: Iterable[GroupRule], blocks: int) -> list[GroupRule]:
    """The rules of hits that may be used without their last `blocks` of the chain."""
    return [
        replace(rule, window_blocks=rule.window_blocks + blocks // rule.stride)
        if rule.kind is PartKind.WINDOW
        else rule
        for rule in rules
    ]


def _check_states(group_id: int, specs: Iterable[Any]) -> None:
    """Raises `ConfigError` where the engine keeps no state: each step then overwrites the one of the step before it."""
    for spec in specs:
        if spec.mamba_cache_mode != STATE_MODE:
            raise ConfigError(
                f"cache group {group_id} holds states in mamba_cache_mode {spec.mamba_cache_mode}: the engine overwrites them "
                "at each step, so that none can be stored. Serve the model with --enable-prefix-caching, which "
                f"makes the mode {STATE_MODE}"
            )


def check_codec(kv_cache_config: Any, rules: Sequence[GroupRule], codec: Codec) -> None:
    """Raises `ConfigError` where the codec has no heads to give scales to."""
    if codec is Codec.NONE:
        return
    for rule in rules:
        for spec in layer_specs(kv_cache_config.kv_cache_groups[rule.group].kv_cache_spec):
            kind = type(spec).__name__
            if kind not in HEAD_SPECS:
                why = f"{kind} has no heads of K and V"
            elif spec.kv_quant_mode or str(spec.dtype) not in HEAD_DTYPES:
                why = f"its KV is quantised already or of a dtype other than floats ({spec.dtype})"
            elif spec.num_head_slots is not None or spec.state_content_bytes is not None:
                why = "its attention backend packs heads together"
            elif spec.head_size != spec.head_size_v:
                why = (
                    f"K and V have heads of different sizes ({spec.head_size}, {spec.head_size_v})"
                )
            else:
                continue
            raise ConfigError(
                f"codec {codec} needs a scale for each head, which cache group {rule.group} does not support: {why}. "
                "Set codec to none"
            )


def layer_specs(spec: Any) -> list[Any]:
    """The specs of a group: one, or one a layer where layers of one kind differ in size."""
    if type(spec).__name__ == UNIFORM_SPEC:
        return list(spec.kv_cache_specs.values())
    return [spec]


def first_parts(cuts: Sequence[Cut]) -> list[int]:
    """The number of each group's first part."""
    return [sum(cut.parts for cut in cuts[:group]) for group in range(len(cuts))]


def part_rules(rules: Sequence[GroupRule], reports: Sequence[RankReport]) -> list[GroupRule]:
    """The rule of the group that each part belongs to."""
    cuts = [held.cut for held in reports[0].held]
    return [rule for rule, cut in zip(rules, cuts, strict=True) for _ in range(cut.parts)]


def rank_bytes(rules: Sequence[GroupRule], reports: Sequence[RankReport]) -> int:
    """The most bytes that a rank has of a block of the chain."""
    return max(
        sum(
            sum(nbytes for _, nbytes in layers) // rule.stride
            for rule, layers in zip(rules, report.groups, strict=True)
        )
        for report in reports
    )


def part_specs(rules: Sequence[GroupRule], reports: Sequence[RankReport]) -> tuple[PartSpec, ...]:
    """Sizes and hit rules of all parts, by part number. `reports` are sorted by rank, complete.

    Raises `ConfigError` where the ranks do not agree.
    """
    sizes = [
        merged.parts[part]
        for merged in map(_together, _by_group(reports))
        for part in range(merged.cut.parts)
    ]
    return tuple(
        PartSpec(
            nbytes=nbytes, kind=rule.kind, window_blocks=rule.window_blocks, stride=rule.stride
        )
        for nbytes, rule in zip(sizes, part_rules(rules, reports), strict=True)
    )


def _by_group(reports: Sequence[RankReport]) -> list[tuple[Held, ...]]:
    """What all ranks hold of each group."""
    return list(zip(*(report.held for report in reports), strict=True))


def _together(ranks: Sequence[Held]) -> Held:
    """What the ranks hold of a group, as one. Raises `ConfigError` where they contradict each other, or lack a part."""
    first = ranks[0]
    for held in ranks:
        if (held.kind, held.cut, held.facts) != (first.kind, first.cut, first.facts):
            raise ConfigError(
                f"the ranks of this engine hold their KV differently ({held.kind} {held.cut} {dict(held.facts)}, and "
                f"{first.kind} {first.cut} {dict(first.facts)}): give all the same attention backend, device and "
                "version of the plugin"
            )
    parts = _union([held.parts for held in ranks])
    layers = _union([held.layers for held in ranks])
    if len(parts) != first.cut.parts:
        raise ConfigError(
            f"of the {first.cut.parts} parts of a block the ranks of this engine hold {sorted(parts)}"
        )
    return replace(first, parts=parts, layers=layers)


def _union(ranks: Sequence[Mapping[int, Any]]) -> dict[int, Any]:
    """What ranks say of the same things, by number. Raises `ConfigError` where they contradict each other."""
    found: dict[int, Any] = {}
    for mine in ranks:
        for number, value in mine.items():
            if found.setdefault(number, value) != value:
                raise ConfigError(
                    f"two ranks of this engine hold the same KV differently: {value}, and {found[number]}"
                )
    return found


def record(
    vllm_config: Any,
    kv_cache_config: Any,
    config: PluginConfig,
    rules: Sequence[GroupRule],
    reports: Sequence[RankReport],
    start: Mapping[str, Any],
) -> NamespaceRecord:
    """Return the namespace of an engine, with the weights of its start. start: see `engine_facts`."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    specs = [kv_cache_config.kv_cache_groups[rule.group].kv_cache_spec for rule in rules]
    # Ranks of other pipeline stages have other layers, so that together they have all rotations.
    rotations = sorted({each for report in reports for each in report.rotations})
    fields = {
        **start,
        "device": sorted({report.device for report in reports}),
        "fp8": fp8_type(
            str(cache.cache_dtype),
            [str(getattr(one, "dtype", "")) for spec in specs for one in layer_specs(spec)],
            reports[0].fp8,
        ),
        "positions": rotations or start["positions"],
        # The engine's own process has it as it was before the model was loaded, unless the only rank is in it.
        "config": reports[0].config or start["config"],
    }
    if config.codec is not Codec.NONE:
        fields["codec"] = {"name": str(config.codec), "version": CODEC_VERSION}
    groups = [_together(ranks) for ranks in _by_group(reports)]
    fields["form"] = FORM_VERSION
    fields["groups"] = [
        {**_group_facts(plain(spec), group), "tokens": rule.stride * fields["hash_tokens"]}
        for rule, spec, group in zip(rules, specs, groups, strict=True)
    ]
    if any(group.kind is Kind.HALVES for group in groups):
        fields["isa"] = sorted({report.isa for report in reports})
    if any(group.kind is Kind.RANKS for group in groups):
        fields |= _rank_facts(parallel, cache, reports)
    return NamespaceRecord(fields=fields, parts=part_specs(rules, reports))


def with_weights(first: NamespaceRecord, weights: str) -> NamespaceRecord:
    """Return the namespace of an engine whose weights were replaced by those of that name; empty: they were not.

    first: its namespace with the weights of its start. Files that are there now say nothing of those that were loaded.
    """
    fields = {**first.fields, "revision": None, "weights": weights}
    return replace(first, fields=fields) if weights else first


class Naming(Protocol):
    """What users of a pool say of their blocks: see `PluginConfig`."""

    @property
    def model(self) -> str | None: ...
    @property
    def tenant(self) -> str: ...
    @property
    def epoch(self) -> str: ...


def engine_facts(
    vllm_config: Any,
    naming: Naming,
    *,
    seed: str,
    versions: Mapping[str, str],
    hash_tokens: int,
    device: Sequence[str] = (),
    fp8: str | None = None,
) -> dict[str, Any]:
    """Return what must agree whatever the form in which KV is stored, as it is at the engine's start.

    Reads samples of the weights from their files: call this once, when these are loaded. seed: what the engine's hash
    chain starts from. versions: see `facts.versions`. device: the ranks'. fp8: see `Facts`.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    attention = vllm_config.attention_config
    facts = Facts(
        engine="vllm",
        versions=versions,
        model=naming.model or model.model,
        **_loaded(model, vllm_config.load_config),
        config=config_digest(model.hf_config),
        classes=model.model_class_overrides,
        kv_cache_dtype=str(cache.cache_dtype),
        fp8=fp8,
        positions=length_matters(model.hf_config, model.max_model_len),
        device=device,
        speculative=_speculative(vllm_config),
        multimodal=_media(vllm_config),
        settings={
            **{name: plain(getattr(cache, name)) for name in CACHE_SETTINGS},
            **{name: plain(getattr(attention, name)) for name in ATTENTION_SETTINGS},
            **{name: _variable(name) for name in (*LAYOUT_VARIABLES, *PRECISION_VARIABLES)},
        },
        tenant=naming.tenant,
        epoch=naming.epoch,
    )
    return {
        **facts.fields(),
        "hash_tokens": hash_tokens,
        "hash_algorithm": cache.prefix_caching_hash_algo,
        "hash_seed": hashlib.sha256(seed.encode()).hexdigest()[:16],
    }


def _rank_facts(parallel: Any, cache: Any, reports: Sequence[RankReport]) -> dict[str, Any]:
    """What has to agree where each rank has parts of its own."""
    layers = [[report.groups, sorted(report.backends.items())] for report in reports]
    return {
        "block_tokens": cache.block_size,
        "layout": sorted({report.layout for report in reports}),
        "isa": sorted({report.isa for report in reports}),
        "layers": digest(layers),
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "dcp": parallel.decode_context_parallel_size,
        "pcp": parallel.prefill_context_parallel_size,
        "ranks": len(reports),
    }


def _group_facts(spec: dict[str, Any], held: Held) -> dict[str, Any]:
    """What has to agree of a group's parts. spec: as the engine has it, on one of its ranks."""
    return {
        **{key: value for key, value in spec.items() if key not in OF_RANKS},
        "kind": str(held.kind),
        "pieces": held.cut.pieces,
        "shards": held.cut.shards,
        "classes": held.cut.classes,
        "layers": digest(held.layers),
        **held.facts,
    }


def isa(device: str) -> str:
    """What CPU kernels may lay out KV by; accelerators' layouts follow from their backend's name.

    CPU attention packs K for the vector or tile unit that it found, so bytes of an AMX machine
    mean something else elsewhere.
    """
    if device != "cpu":
        return ""
    import torch

    tiles = torch.cpu._is_amx_tile_supported()
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}{' AMX' * tiles}"


def _variable(name: str) -> str | None:
    """Return what a variable says, with the digest of the file if it names one."""
    said = os.environ.get(name)
    if said is None or not os.path.isfile(said):  # `Path.is_file` raises for a long value
        return said
    return hashlib.sha256(Path(said).read_bytes()).hexdigest()


def _loaded(model: Any, load: Any) -> dict[str, Any]:
    """Return those of `Facts` that say what was loaded, of a target or a draft model. load: its `LoadConfig`."""
    if str(load.load_format) == "dummy":
        weights: Any = {"dummy": model.seed}
    else:
        weights = stored(model.model)
        if elsewhere := source(load.load_format, load.model_loader_extra_config):
            weights = [elsewhere, weights]
    return {
        # A branch, or none, may be another commit tomorrow.
        "revision": getattr(model.hf_config, "_commit_hash", None) or model.revision,
        "code_revision": model.code_revision,
        "weights": weights,
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "quantization_config": plain(model.quantization_config),
    }


def _speculative(vllm_config: Any) -> Any:
    """Return what drafts are made with, if they have layers in the KV cache: their method may shift what a hash covers."""
    model, speculative = vllm_config.model_config, vllm_config.speculative_config
    if speculative is None or speculative.method in DRAFTS_WITHOUT_KV:
        return None
    draft = speculative.draft_model_config
    facts = {
        "method": str(speculative.method),
        "model": str(speculative.model),
        "tokens": speculative.num_speculative_tokens,
        "kv_cache_dtype": speculative.kv_cache_dtype,
    }
    if draft is None or draft.model == model.model:
        return facts  # the target's checkpoint has it
    return {
        **facts,
        **_loaded(draft, speculative.draft_load_config or vllm_config.load_config),
        "config": file_digests(Path(draft.model), ["config.json"]),
    }


def _media(vllm_config: Any) -> dict[str, Any] | None:
    """Return how media become what the model sees. Of models from a hub the revision says what files have."""
    model, lora = vllm_config.model_config, vllm_config.lora_config
    if model.multimodal_config is None:
        return None
    return {
        "files": file_digests(Path(model.model), PROCESSOR_FILES),
        "encoder_adapters": lora is not None and lora.enable_tower_connector_lora,
        **{name: plain(getattr(model.multimodal_config, name)) for name in PROCESSOR_SETTINGS},
    }

"""The facts that must agree for an engine's KV bytes to be exchangeable, and refusals if they cannot.

The engine's block hashes name tokens (and LoRA, salt, images), never the model or its memory
layout; the namespace adds the rest. What is stored is the same whatever the ranks (`shards.py`), so
that the record has nothing of them; part numbers count the parts of one group after the other. In the
form `ranks` of earlier versions, each rank has a part of each group, `rank * stored groups + group`.
Takes vLLM's objects without importing vLLM, so that it is tested without it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from kvpool.engine_plugins.vllm.config import CODEC_VERSION, Codec, Form, PluginConfig
from kvpool.engine_plugins.vllm.plan import GroupRule, RankReport
from kvpool.engine_plugins.vllm.shards import Cut, Held, Kind
from kvpool.engine_plugins.vllm.weights import stored
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
    if not reports[0].held:
        return list(rules) * len(reports)
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
    if reports[0].held:
        sizes = [
            merged.parts[part]
            for merged in map(_together, _by_group(reports))
            for part in range(merged.cut.parts)
        ]
    else:
        sizes = [
            sum(nbytes for _, nbytes in layers) for report in reports for layers in report.groups
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
    *,
    seed: str,
    versions: Mapping[str, str],
    hash_tokens: int,
    weights: str,
) -> NamespaceRecord:
    """The namespace of an engine.

    weights: which it has instead of those that it began with; empty: these.
    seed: what the engine's hash chain starts from.
    versions: Python's and the engine's where the hash depends on them, else empty.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel, load = vllm_config.parallel_config, vllm_config.load_config
    fields = engine_facts(
        vllm_config,
        config,
        seed=seed,
        versions=versions,
        hash_tokens=hash_tokens,
        device=sorted({report.device for report in reports}),
        weights=weights,
    )
    # The engine's own process has it as it was before the model was loaded, unless the only rank is in it.
    fields["config"] = reports[0].config or fields["config"]
    if config.form is Form.RANKS and not weights:
        fields |= {"revision": model.revision, "weights": _weights_before(model, load)}
        fields["speculative"] = _speculative(vllm_config.speculative_config, draft={})
        fields.pop("multimodal", None)
    if config.codec is not Codec.NONE:
        # Without a codec there is no field: namespaces of before there were codecs stay the same.
        fields["codec"] = {"name": str(config.codec), "version": CODEC_VERSION}
    specs = [plain(kv_cache_config.kv_cache_groups[rule.group].kv_cache_spec) for rule in rules]
    groups = [_together(ranks) for ranks in _by_group(reports)]
    if groups:
        fields["form"] = FORM_VERSION
        fields["groups"] = [
            {**_group_facts(spec, group), "tokens": rule.stride * hash_tokens}
            for rule, spec, group in zip(rules, specs, groups, strict=True)
        ]
        if any(group.kind is Kind.HALVES for group in groups):
            fields["isa"] = sorted({report.isa for report in reports})
    else:
        fields["groups"] = specs
    if not groups or any(group.kind is Kind.RANKS for group in groups):
        fields |= _rank_facts(parallel, cache, reports)
    return NamespaceRecord(fields=fields, parts=part_specs(rules, reports))


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
    device: Sequence[str],
    weights: str,
) -> dict[str, Any]:
    """What has to agree whatever form the KV is stored in; for the arguments see `record`. device: the ranks'."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    speculative = vllm_config.speculative_config
    facts = {
        "engine": "vllm",
        "model": naming.model or model.model,
        "revision": None if weights else _revision(model),
        "weights": weights or _weights(model, vllm_config.load_config),
        "config": config_digest(model),
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "kv_cache_dtype": str(cache.cache_dtype),
        "hash_tokens": hash_tokens,
        "hash_algorithm": cache.prefix_caching_hash_algo,
        "hash_seed": hashlib.sha256(seed.encode()).hexdigest()[:16],
        "versions": dict(versions),
        "device": list(device),
        "speculative": _speculative(speculative, _draft(model, speculative)),
        "tenant": naming.tenant,
        "epoch": naming.epoch,
    }
    if model.multimodal_config is not None:
        facts["multimodal"] = _media(model)
    return facts


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


def plain(value: Any) -> Any:
    """A value of the engine's configuration as JSON, the same in every process.

    Objects that are not data are named by their type: their repr would hold an address.
    """
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = {
            field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
        return {"type": type(value).__name__, **items}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(plain(item), sort_keys=True) for item in value)
    if type(value).__module__ == "torch":
        return str(value)
    return type(value).__name__


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


def digest(value: Any, drop: Sequence[str] = ()) -> str:
    """Of a value of the engine's configuration, without the items of these names."""
    body = plain(value)
    if isinstance(body, dict):
        body = {key: item for key, item in body.items() if key not in drop}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]


def config_digest(model: Any) -> str:
    """Of the configuration that the model came with."""
    return digest(model.hf_config.to_dict(), drop=("_name_or_path", "transformers_version"))


def _weights(model: Any, load: Any) -> Any:
    """What tells two sets of weights under one name apart, as far as it can be seen cheaply."""
    load_format = str(getattr(load.load_format, "value", load.load_format))
    if load_format == "dummy":
        return {"dummy": model.seed}
    return stored(model.model)


def _weights_before(model: Any, load: Any) -> Any:
    """As versions before told them apart: by the names and sizes of files."""
    if str(getattr(load.load_format, "value", load.load_format)) == "dummy":
        return {"dummy": model.seed}
    folder = Path(model.model)
    if not folder.is_dir():
        return None
    files = [path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".pt")]
    return [[path.name, path.stat().st_size] for path in sorted(files)]


def _revision(model: Any) -> str | None:
    """The commit of what was loaded from a hub: a branch, or none, may mean another one tomorrow."""
    return getattr(model.hf_config, "_commit_hash", None) or model.revision


def _speculative(speculative: Any, draft: Mapping[str, Any]) -> Any:
    """Draft layers share the KV cache, and their method may shift what a block hash covers. draft: see `_draft`."""
    if speculative is None:
        return None
    return {
        "method": str(speculative.method),
        "model": str(speculative.model),
        "tokens": speculative.num_speculative_tokens,
        **draft,
    }


def _draft(model: Any, speculative: Any) -> dict[str, Any]:
    """Which draft model's KV is stored beside the target's; empty where the target's checkpoint has it, or there is none."""
    draft = None if speculative is None else speculative.draft_model_config
    if draft is None or draft.model == model.model:
        return {}
    return {
        "revision": _revision(draft),
        "weights": stored(draft.model),
        "config": _files(draft, ["config.json"]),
    }


def _media(model: Any) -> dict[str, Any]:
    """How pictures and other media become what the model sees. Of models from a hub the revision says what files have."""
    settings = {name: plain(getattr(model.multimodal_config, name)) for name in PROCESSOR_SETTINGS}
    return {"files": _files(model, PROCESSOR_FILES), **settings}


def _files(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Digests of those that the model's folder has."""
    files = [Path(model.model) / name for name in names]
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        for file in files
        if file.is_file()
    }

"""What engines must agree on, and what is refused at start-up."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.engine_plugins.facts import plain
from kvpool.engine_plugins.vllm.config import PluginConfig
from kvpool.engine_plugins.vllm.layout.shards import Cut, Held, Kind
from kvpool.engine_plugins.vllm.naming.namespace import (
    DRAFTS_WITHOUT_KV,
    check_hashes,
    draft_blocks,
    first_parts,
    group_rules,
    part_rules,
    part_specs,
    rank_bytes,
    record,
    with_earlier_windows,
    with_weights,
)
from kvpool.engine_plugins.vllm.plan import GroupRule, RankReport
from kvpool.errors import ConfigError
from kvpool.types import PartKind, PartSpec
from tests.support.vllm_configs import HfConfig, drafts, engine_config, rank_report, start


@dataclass
class FullAttentionSpec:
    block_size: int = 32
    dcp_sharded: bool = True
    num_kv_heads: int = 2
    dtype: str = "torch.bfloat16"


@dataclass
class SlidingWindowSpec:
    sliding_window: int
    block_size: int = 32
    dcp_sharded: bool = True
    extra_retained_tokens: int = 0


@dataclass
class MambaSpec:
    mamba_cache_mode: str = "align"
    block_size: int = 32
    dcp_sharded: bool = False


@dataclass
class CrossAttentionSpec:
    block_size: int = 32
    dcp_sharded: bool = True


@dataclass
class UniformTypeKVCacheSpecs:
    kv_cache_specs: dict[str, Any]
    block_size: int = 32
    dcp_sharded: bool = True


def cache(*specs: Any, host_resident: bool = False) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=spec, host_resident=host_resident) for spec in specs]
    return SimpleNamespace(
        kv_cache_groups=groups, prefix_cacheable_group_ids=tuple(range(len(groups)))
    )


# --- hashes


@pytest.mark.parametrize(
    ("algorithm", "seed", "by_version"),
    [
        ("sha256_cbor", None, False),
        ("sha256", None, True),
        ("xxhash", "0", True),
        ("xxhash_cbor", "0", False),
    ],
)
def test_stable_hashes_are_taken(algorithm: str, seed: str | None, by_version: bool) -> None:
    weak = algorithm.startswith("xxhash")
    assert check_hashes(algorithm, seed, accept_weak=weak) is by_version


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_hashes_that_anybody_can_collide_are_refused_unless_accepted(algorithm: str) -> None:
    with pytest.raises(ConfigError, match=r"no cryptographic hash.*accept_weak_hashes"):
        check_hashes(algorithm, "0")


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
@pytest.mark.parametrize("seed", [None, "random"])
def test_hashes_seeded_at_random_are_refused(algorithm: str, seed: str | None) -> None:
    with pytest.raises(ConfigError, match=r"sha256_cbor.*PYTHONHASHSEED"):
        check_hashes(algorithm, seed, accept_weak=True)


def test_unknown_hashes_are_refused() -> None:
    with pytest.raises(ConfigError, match="md5"):
        check_hashes("md5", "0")


# --- groups


def dropping(*, drop: bool = True) -> Any:
    return SimpleNamespace(use_eagle_block_drop=lambda: drop)


def test_a_drafts_last_block_is_computed_again() -> None:
    rules = [GroupRule(0), GroupRule(1, 2), GroupRule(2, 2, PartKind.WINDOW, 3)]
    assert draft_blocks(rules[:1], dropping()) == 1
    assert draft_blocks(rules, dropping()) == 2
    assert draft_blocks(rules, dropping(drop=False)) == draft_blocks(rules, None) == 0
    # A window has to be there at the end of what is left, too.
    assert with_earlier_windows(rules, 2) == [*rules[:2], replace(rules[2], window_blocks=4)]
    assert with_earlier_windows(rules, 0) == rules


def test_a_hit_ends_at_a_state_with_drafts_too() -> None:
    state = GroupRule(1, kind=PartKind.WINDOW, window_blocks=1, state=True)
    assert draft_blocks([GroupRule(0), state], dropping()) == 0


@pytest.mark.parametrize(
    ("window", "blocks"), [(1, 1), (2, 1), (33, 1), (34, 2), (64, 2), (65, 2), (66, 3)]
)
def test_a_window_needs_the_blocks_that_it_reads(window: int, blocks: int) -> None:
    rules = group_rules(cache(FullAttentionSpec(), SlidingWindowSpec(window)), 32, 1)
    assert rules == [
        GroupRule(0),
        GroupRule(1, kind=PartKind.WINDOW, window_blocks=blocks),
    ]


def test_a_stride_is_counted_in_hashes() -> None:
    coarse = FullAttentionSpec(block_size=64)
    assert group_rules(cache(FullAttentionSpec(), coarse), 32, 1)[1].stride == 2
    assert group_rules(cache(FullAttentionSpec()), 32, 2)[0].stride == 2


def test_of_states_a_hit_needs_the_last() -> None:
    rules = group_rules(cache(MambaSpec(), FullAttentionSpec(block_size=16)), 16, 1)
    assert rules == [GroupRule(0, 2, PartKind.WINDOW, 1, state=True), GroupRule(1)]


def test_layers_of_one_kind_in_one_group() -> None:
    uniform = UniformTypeKVCacheSpecs({"a": SlidingWindowSpec(64), "b": SlidingWindowSpec(100)})
    assert group_rules(cache(uniform), 32, 1)[0].window_blocks == 4


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (cache(CrossAttentionSpec()), "CrossAttentionSpec"),
        (cache(FullAttentionSpec(), MambaSpec("none")), "mode none.*--enable-prefix-caching"),
        # Its block is the longest prompt; what is wrong with it is not the size.
        (cache(MambaSpec("none", block_size=1000)), "overwrites"),
        (cache(MambaSpec(), host_resident=True), "cannot be stored"),
        (cache(UniformTypeKVCacheSpecs({"a": MambaSpec(), "b": FullAttentionSpec()})), "MambaSpec"),
        (cache(FullAttentionSpec(), host_resident=True), "cannot be stored"),
        (cache(FullAttentionSpec(block_size=48)), "multiple"),
        (cache(), "no cache group"),
    ],
)
def test_what_cannot_be_stored_is_refused(config: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        group_rules(config, 32, 1)


# --- the record


REPORT = rank_report()


MEDIA: dict[str, Any] = {
    "mm_processor_kwargs": None,
    "media_io_kwargs": {},
    "video_pruning_rate": None,
    "video_pruning_method": "evs",
    "mm_encoder_attn_dtype": None,
    "mm_encoder_fp8_scale_path": None,
}


def digest(
    config: PluginConfig | None = None,
    report: RankReport = REPORT,
    seed: str = "none",
    weights: str = "",
    versions: dict[str, str] | None = None,
    spec: Any = None,
    **changes: Any,
) -> bytes:
    engine, plugin = engine_config(**changes), config or PluginConfig()
    facts = start(engine, plugin, seed=seed, versions=versions or {})
    groups = cache(spec or FullAttentionSpec())
    first = record(engine, groups, plugin, [GroupRule(0)], [report], facts)
    return with_weights(first, weights).digest()


def test_equal_facts_are_one_namespace() -> None:
    assert digest() == digest()


@pytest.mark.parametrize(
    "other",
    [
        {"model_config__model": "other"},
        {"model_config__revision": "abc"},
        {"model_config__dtype": "float16"},
        {"model_config__quantization": "fp8"},
        {"model_config__quantization_config": {"ignore": ["*qkv_proj*"]}},
        {"model_config__code_revision": "abc"},
        {"model_config__model_class_overrides": {"LlamaForCausalLM": "mine:Llama"}},
        {"model_config__hf_config": HfConfig(layers=3)},
        {"cache_config__cache_dtype": "fp8"},
        {"cache_config__block_size": 64},
        {"cache_config__prefix_caching_hash_algo": "sha256_cbor"},
        {"parallel_config__tensor_parallel_size": 2},
        {"parallel_config__pipeline_parallel_size": 2},
        {"parallel_config__decode_context_parallel_size": 2},
        {"parallel_config__prefill_context_parallel_size": 2},
        {"load_config__load_format": "dummy"},
        {"load_config__load_format": "tensorizer"},
        {"speculative_config": drafts("eagle")},
        {"speculative_config": drafts("custom_class")},
        {"model_config__multimodal_config": SimpleNamespace(**MEDIA)},
        {"report": replace(REPORT, config="as loading changed it")},
        {"report": replace(REPORT, rotations=["by 500000"])},
        {"report": replace(REPORT, rotations=[*REPORT.rotations, "by 500000"])},
        {"cache_config__kv_cache_dtype_skip_layers": ["0"]},
        {"cache_config__mamba_ssm_cache_dtype": "float16"},
        {"attention_config__indexer_kv_dtype": "fp8"},
        {"attention_config__use_non_causal": True},
        {"seed": "1"},
        {"config": PluginConfig(epoch="1")},
        {"weights": "other"},
        {"versions": {"python": "3.12"}},
        {"spec": SlidingWindowSpec(64)},
        {"config": PluginConfig(tenant="t")},
        {"report": rank_report(device="cuda")},
        {"report": rank_report(layout="LBNHC")},
        {"report": rank_report(isa="x86 AMX")},
        {"report": rank_report(groups=[[("l0", 128)]])},
        {"report": rank_report(backends={"l0": "OTHER"})},
    ],
    ids=lambda other: next(iter(other)),
)
def test_any_other_fact_is_another_namespace(other: dict[str, Any]) -> None:
    assert digest(**other) != digest()


@pytest.mark.parametrize(
    "same",
    [
        {"model_config__max_model_len": 131072},
        {"model_config__hf_config": HfConfig(layers=2, _name_or_path="/y", max_model_len=4096)},
        {"report": replace(REPORT, fp8="torch.float8_e4m3fnuz")},
        {"load_config__load_format": "safetensors"},
        {"load_config__model_loader_extra_config": {"enable_multithread_load": True}},
        *({"speculative_config": drafts(each)} for each in sorted(DRAFTS_WITHOUT_KV)),
    ],
    ids=str,
)
def test_what_makes_no_other_kv_is_the_same_namespace(same: dict[str, Any]) -> None:
    assert digest(**same) == digest()


@pytest.mark.parametrize(
    "kv",
    [
        {"cache_config__cache_dtype": "fp8"},
        {"cache_config__cache_dtype": "fp8_e4m3"},
        {"spec": FullAttentionSpec(dtype="torch.uint8")},
    ],
    ids=str,
)
def test_8_bit_floats_are_told_apart_as_the_platform_reads_them(kv: dict[str, Any]) -> None:
    """NVIDIA's and AMD's devices are both `cuda`."""
    other = replace(REPORT, fp8="torch.float8_e4m3fnuz")
    assert digest(**kv) != digest(**kv, report=other)


def test_stages_have_the_rotations_of_their_own_layers() -> None:
    def shared(*ranks: Sequence[str]) -> bytes:
        reports = held(2)
        pairs = zip(reports, ranks, strict=True)
        return bytes(
            canonical([replace(one, rotations=list(each)) for one, each in pairs]).digest()
        )

    assert shared(["a"], ["b"]) == shared(["b", "a"], ["a"]) != shared(["a"], ["a"])


@pytest.mark.parametrize(
    ("config", "matters"),
    [
        ({}, False),
        ({"rope_parameters": None}, False),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, False),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4}}, False),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, False),
        ({"rope_parameters": {"full_attention": {"rope_type": "llama3"}}}, False),
        ({"text_config": {"rope_parameters": {"rope_type": "proportional"}}}, False),
        ({"rope_parameters": {"rope_type": "longrope"}}, True),
        ({"rope_scaling": {"type": "su"}}, True),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, True),
        ({"text_config": {"rope_parameters": {"rope_type": "longrope"}}}, True),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2}}, True),
        ({"rope_parameters": {"rope_type": "of a later version"}}, True),
        ({"dual_chunk_attention_config": {"chunk_size": 8192}}, True),
        ({"model_type": "llama4"}, True),
        ({"text_config": {"attn_temperature_tuning": True}}, True),
    ],
    ids=str,
)
def test_without_the_model_the_longest_prompt_counts_where_positions_may_depend_on_it(
    config: dict[str, Any], matters: bool
) -> None:
    unseen = replace(REPORT, rotations=[])
    short, long = (
        digest(
            report=unseen,
            model_config__hf_config=HfConfig(**config),
            model_config__max_model_len=length,
        )
        for length in (1024, 4096)
    )
    assert (short != long) is matters


@pytest.mark.parametrize(
    "variable",
    [
        "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT",
        "VLLM_SSM_CONV_STATE_LAYOUT",
        "VLLM_MARLIN_INPUT_DTYPE",
        "VLLM_HUMMING_INPUT_QUANT_CONFIG",
        "VLLM_ROCM_USE_AITER_MOE_SITUV2",
    ],
)
def test_what_a_variable_changes_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    before = digest()
    monkeypatch.setenv(variable, "1")
    assert digest() != before
    monkeypatch.setenv(variable, '{"dtype": "int8"}' * 1000)
    assert digest() != before


def test_a_variable_may_name_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def named(folder: str, text: str) -> bytes:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "quant.json").write_text(text)
        monkeypatch.setenv(
            "VLLM_HUMMING_ONLINE_QUANT_CONFIG", str(tmp_path / folder / "quant.json")
        )
        return digest()

    first = named("a", '{"dtype": "int4"}')
    assert named("b", '{"dtype": "int4"}') == first != named("c", '{"dtype": "int8"}')


def test_weights_from_elsewhere_are_told_apart_by_where() -> None:
    def loaded(load_format: str, uri: str) -> bytes:
        return digest(
            load_config__load_format=load_format,
            load_config__model_loader_extra_config={"tensorizer_config": {"tensorizer_uri": uri}},
        )

    assert loaded("tensorizer", "s3://a") == loaded("tensorizer", "s3://a")
    assert loaded("tensorizer", "s3://a") != loaded("tensorizer", "s3://b")
    assert loaded("auto", "s3://a") == loaded("safetensors", "s3://b")


def test_files_that_replace_those_of_the_start_name_no_weights(tmp_path: Path) -> None:
    """An engine's reset does not load them."""
    engine = engine_config(model_config__model=str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    facts = start(engine)

    def named(weights: str) -> bytes:
        groups = cache(FullAttentionSpec())
        first = record(engine, groups, PluginConfig(), [GroupRule(0)], [REPORT], facts)
        return bytes(with_weights(first, weights).digest())

    before, changed = named(""), named("w")
    (tmp_path / "model.safetensors").write_bytes(b"WEIGHTS")
    assert (named(""), named("w")) == (before, changed)
    assert before != changed


def with_draft(folder: Path, **changes: Any) -> bytes:
    """Of an engine that drafts by what is in a folder."""
    draft = engine_config(model_config__model=str(folder), **changes).model_config
    return digest(speculative_config=drafts("eagle", draft))


def test_another_draft_at_the_same_place_is_another_namespace(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    first = with_draft(tmp_path)
    assert with_draft(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(b"WEIGHTS")
    second = with_draft(tmp_path)
    (tmp_path / "config.json").write_text('{"eagle_config": {}}')
    assert len({first, second, with_draft(tmp_path)}) == 3


def test_a_draft_in_the_targets_checkpoint_is_known_by_that(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    model = SimpleNamespace(model=str(tmp_path))
    speculative = drafts("mtp", model)
    fields = start(engine_config(model_config__model=str(tmp_path), speculative_config=speculative))
    assert fields["speculative"] == {
        "method": "mtp",
        "model": "d",
        "tokens": 2,
        "kv_cache_dtype": None,
    }


def seeing(folder: Path, **changes: Any) -> bytes:
    """Of an engine whose model sees pictures. changes: of what it was told."""
    config = SimpleNamespace(**{**MEDIA, **changes})
    return digest(
        PluginConfig(model="m"),
        model_config__model=str(folder),
        model_config__multimodal_config=config,
    )


@pytest.mark.parametrize("setting", ["mm_processor_kwargs", "media_io_kwargs"])
def test_pictures_are_prepared_alike_in_a_namespace(tmp_path: Path, setting: str) -> None:
    first = seeing(tmp_path)
    assert seeing(tmp_path) == first != seeing(tmp_path, **{setting: {"size": 1}})
    (tmp_path / "chat_template.json").write_text("{}")
    assert seeing(tmp_path) == first
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert seeing(tmp_path) != first


def test_the_configuration_is_that_of_the_ranks() -> None:
    """Loading a model changes it in their processes, and so in the engine's own where the only rank is in it."""
    report = replace(REPORT, config="changed")
    before = HfConfig(layers=2, rope="yarn")
    assert digest(report=report, model_config__hf_config=before) == digest(report=report)


def test_a_hubs_revision_is_the_commit_that_was_loaded() -> None:
    """Not the branch, which may be another commit tomorrow, nor its absence."""

    def loaded(commit: str, revision: str | None) -> bytes:
        config = HfConfig(layers=2, _commit_hash=commit)
        return digest(model_config__hf_config=config, model_config__revision=revision)

    assert loaded("c1", None) == loaded("c1", "main") == loaded("c1", "c1") != loaded("c2", None)


def test_changed_weights_are_named_by_themselves() -> None:
    """However the engines began."""
    first, second = (
        digest(weights="w", model_config__revision=each) for each in ("one", "another")
    )
    assert first == second
    assert digest(weights="v") != first


def test_a_model_may_be_named() -> None:
    one = digest(PluginConfig(model="m"), model_config__model="/here")
    assert one == digest(PluginConfig(model="m"), model_config__model="/there")


FOUR = Cut(shards=4)


def held(ranks: int, kind: Kind = Kind.CONTENT, cut: Cut = FOUR, **facts: Any) -> list[RankReport]:
    """Reports of ranks that share the shards of two layers."""
    own = cut.parts // ranks
    return [
        RankReport(
            rank,
            "cuda",
            f"layout {ranks}",
            f"isa {ranks}",
            [[("l0", 100), ("l1", 28)]],
            {"l0": f"backend {ranks}"},
            held=[
                Held(
                    kind,
                    cut,
                    dict.fromkeys(range(rank * own, (rank + 1) * own), 32),
                    {0: [("l0", 4, 25), ("l1", 4, 7)]},
                    facts,
                )
            ],
        )
        for rank in range(ranks)
    ]


def canonical(reports: list[RankReport], spec: Any = None, **changes: Any) -> Any:
    engine, groups = engine_config(**changes), cache(spec or FullAttentionSpec())
    return record(engine, groups, PluginConfig(), [GroupRule(0)], reports, start(engine))


def test_engines_of_any_ranks_are_of_one_namespace() -> None:
    found = [
        canonical(
            held(ranks),
            FullAttentionSpec(num_kv_heads=4 // ranks),
            parallel_config__tensor_parallel_size=ranks,
        )
        for ranks in (1, 2, 4)
    ]
    assert found[0] == found[1] == found[2]
    assert found[0].parts == (PartSpec(32),) * 4
    assert not {"tp", "pp", "dcp", "pcp", "ranks", "layout", "layers", "isa"} & set(found[0].fields)


@pytest.mark.parametrize(
    "other",
    [
        {"reports": held(2, Kind.LATENT)},
        {"reports": held(2, cut=Cut(pieces=2, shards=2))},
        {"reports": held(2, cut=Cut(shards=2, classes=2))},
        {"reports": held(2, interleave=2)},
        {"reports": [replace(one, device="xpu") for one in held(2)]},
        {"spec": SlidingWindowSpec(64)},
        {"cache_config__cache_dtype": "fp8"},
    ],
)
def test_what_parts_are_made_of_has_to_agree(other: dict[str, Any]) -> None:
    given = {"reports": held(2), **other}
    reports = given.pop("reports")
    assert canonical(reports, **given).digest() != canonical(held(2)).digest()


def test_packed_keys_are_of_one_kind_of_cpu() -> None:
    halves = [held(ranks, Kind.HALVES) for ranks in (1, 2)]
    assert canonical(halves[0]).digest() != canonical(halves[1]).digest()
    alike = [[replace(one, isa="vec") for one in reports] for reports in halves]
    assert canonical(alike[0]).digest() == canonical(alike[1]).digest()


def test_parts_by_rank_are_of_engines_of_these_ranks() -> None:
    by_rank = held(2, Kind.RANKS, Cut(pieces=2))
    assert canonical(by_rank).fields["tp"] == 1
    other = canonical(by_rank, parallel_config__tensor_parallel_size=2)
    assert other.digest() != canonical(by_rank).digest()


def test_parts_of_groups_follow_one_another() -> None:
    reports = [replace(one, held=one.held * 2, groups=one.groups * 2) for one in held(2)]
    rules = [GroupRule(0), GroupRule(3, kind=PartKind.WINDOW, window_blocks=2)]
    assert [rule.group for rule in part_rules(rules, reports)] == [0] * 4 + [3] * 4
    assert first_parts([one.cut for one in reports[0].held]) == [0, 4]
    assert (
        part_specs(rules, reports) == (PartSpec(32),) * 4 + (PartSpec(32, PartKind.WINDOW, 2),) * 4
    )
    assert rank_bytes(rules, reports) == 256


def test_plain_values_hold_no_addresses() -> None:
    class Mode(enum.IntEnum):
        FAST = 1

    @dataclass
    class Spec:
        mode: Mode
        other: object
        sizes: tuple[int, ...]

    assert plain(Spec(Mode.FAST, object(), (1, 2))) == {
        "type": "Spec",
        "mode": "FAST",
        "other": "object",
        "sizes": [1, 2],
    }

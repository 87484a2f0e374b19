"""What makes pages of SGLang engines exchangeable, and the settings of its backend."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.engine_plugins import sglang
from kvpool.engine_plugins.sglang.config import BackendConfig
from kvpool.engine_plugins.sglang.facts import (
    engine_facts,
    is_writer,
    key_of,
    packed_keys,
    record_of,
)
from kvpool.errors import ConfigError
from kvpool.types import NamespaceRecord
from tests.support.vllm_configs import HfConfig


class MHATokenToKVPoolHost(SimpleNamespace):
    """By the name of SGLang's."""


class MLATokenToKVPoolHost(SimpleNamespace):
    """By the name of SGLang's."""


STORAGE: dict[str, Any] = {
    "tp_rank": 0,
    "tp_size": 2,
    "pp_rank": 0,
    "pp_size": 1,
    "dp_rank": 0,
    "attn_cp_rank": 0,
    "attn_cp_size": 1,
    "is_mla_model": False,
    "model_name": "served",
}
ARGUMENTS: dict[str, Any] = {
    "model_path": "/a/path",
    "revision": None,
    "quantization": None,
    "dtype": "auto",
    "kv_cache_dtype": "auto",
    "weight_version": "default",
    "speculative_draft_model_path": None,
}
POOL: dict[str, Any] = {
    "layout": "page_first",
    "dtype": "torch.uint8",
    "page_size": 16,
    "start_layer": 0,
    "end_layer": 4,
    "layer_num": 4,
    "target_layer_num": 4,
    "head_num": 2,
    "head_dim": 64,
}


MODEL: dict[str, Any] = {"dtype": "bfloat16", "context_len": 4096, "hf_config": HfConfig(layers=2)}


def record(
    *,
    config: dict[str, Any] | None = None,
    storage: dict[str, Any] | None = None,
    arguments: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    pool: dict[str, Any] | None = None,
    name: str = "kv",
    kind: type = MHATokenToKVPoolHost,
    version: str = "0.5.23",
    **more: Any,
) -> NamespaceRecord:
    given: dict[str, Any] = {"pages": True, "pieces": [64, 64], **more}
    settings = BackendConfig.from_given(config or {})
    of_storage = SimpleNamespace(**(STORAGE | (storage or {})))
    of_server = SimpleNamespace(**(ARGUMENTS | (arguments or {})))
    of_model = SimpleNamespace(**(MODEL | (model or {})))
    facts = engine_facts(settings, of_storage, of_server, of_model, version)
    host_pool = kind(**(POOL | (pool or {})))
    return record_of(facts, settings, of_storage, of_server, host_pool, name, **given)


def digest(**given: Any) -> bytes:
    return record(**given).digest()


@pytest.mark.parametrize(
    "other",
    [
        {"config": {"model": "x"}},
        {"config": {"revision": "x"}},
        {"config": {"epoch": "x"}},
        {"storage": {"model_name": "x"}},
        {"storage": {"tp_rank": 1}},
        {"storage": {"tp_size": 4}},
        {"storage": {"pp_rank": 1, "pp_size": 2}},
        {"storage": {"attn_cp_rank": 1, "attn_cp_size": 2}},
        {"storage": {"dcp_rank": 1, "dcp_size": 2}},
        {"arguments": {"model_path": "x"}},
        {"arguments": {"revision": "x"}},
        {"arguments": {"quantization": "fp8"}},
        {"arguments": {"kv_cache_dtype": "fp8_e5m2"}},
        {"arguments": {"weight_version": "2"}},
        {"arguments": {"load_format": "dummy"}},
        {"arguments": {"modelopt_quant": {"algorithm": "fp8"}}},
        {"arguments": {"quantize_and_serve": True}},
        {"arguments": {"quantization_param_path": "scales.json"}},
        {"arguments": {"kt_method": "AMXINT4"}},
        {"arguments": {"mm_process_config": {"image": {"max_pixels": 1}}}},
        {"arguments": {"mamba_ssm_dtype": "float16"}},
        {"arguments": {"kt_num_gpu_experts": 8}},
        {"arguments": {"kt_max_deferred_experts_per_token": 2}},
        {"arguments": {"flashinfer_mxfp4_moe_precision": "bf16"}},
        {"arguments": {"enable_w4a4_mxfp4_megamoe": True}},
        {"arguments": {"load_format": "remote"}},
        {"arguments": {"device": "xpu"}},
        {"config": {"tenant": "t"}},
        {"model": {"dtype": "float16"}},
        {"model": {"hf_config": HfConfig(layers=2, rope_parameters={"rope_theta": 1e6})}},
        {"pool": {"device_pool": SimpleNamespace(dtype="torch.float8_e4m3fn")}},
        {"pool": {"layout": "page_first_direct"}},
        {"pool": {"dtype": "torch.int8"}},
        {"pool": {"page_size": 32}},
        {"pool": {"start_layer": 4, "end_layer": 8}},
        {"pool": {"head_num": 4, "head_dim": 32}},
        {"pool": {"v_head_dim": 32}},
        {"name": "swa"},
        {"kind": MLATokenToKVPoolHost},
        {"pages": False},
        {"pieces": [32, 96]},
        {"version": "0.5.24"},
        {"version": "0.6.23"},
    ],
    ids=str,
)
def test_each_fact_is_a_namespace_of_its_own(other: dict[str, Any]) -> None:
    assert digest(**other) != digest()


def test_what_makes_no_other_bytes_is_the_same_namespace() -> None:
    same: list[dict[str, Any]] = [
        {"storage": {"dp_rank": 1}},
        {"arguments": {"speculative_draft_model_path": "a-draft"}},
        {"arguments": {"port": 1, "speculative_algorithm": "NGRAM", "context_length": 8192}},
        {"model": {"context_len": 8192}},
        {"model": {"hf_config": HfConfig(layers=2, context_len=8192, language_only=True)}},
        {"model": {"hf_config": HfConfig(layers=2, encoder_only=False, language_model_only=True)}},
        {"arguments": {"load_format": "safetensors", "model_loader_extra_config": "{}"}},
        {"version": "0.5.23.post1"},
        {"pool": {"size": 5, "kv_buffer": object()}},
        {"config": {"socket": "/x", "timeout_s": 2}},
    ]
    for other in same:
        assert digest(**other) == digest(), other
    # With a name given, where the weights are and how they are served says nothing.
    named = {"config": {"model": "m"}}
    assert digest(**named, arguments={"model_path": "/b"}, storage={"model_name": "b"}) == digest(
        **named
    )


def test_8_bit_floats_are_told_apart_as_the_engine_reads_them() -> None:
    """Host pools have both as uint8."""
    read = [
        digest(pool={"device_pool": SimpleNamespace(dtype=f"torch.float8_{each}")})
        for each in ("e4m3fn", "e4m3fnuz", "e5m2")
    ]
    assert len(set(read)) == 3


def test_positions_that_may_depend_on_the_longest_prompt_are_told_by_it() -> None:
    long = {"hf_config": HfConfig(rope_parameters={"rope_type": "longrope"})}
    assert digest(model=long) != digest(model=long | {"context_len": 8192})


def test_versions_are_shared_if_the_user_says_so() -> None:
    shared = {"any_version": True}
    assert digest(config=shared) == digest(config=shared, version="0.6.0") != digest()


def test_other_weights_at_the_same_place_are_another_namespace(tmp_path: Path) -> None:
    at: dict[str, Any] = {"arguments": {"model_path": str(tmp_path)}}
    draft: dict[str, Any] = {
        "arguments": {"speculative_draft_model_path": str(tmp_path)},
        "name": "draft",
    }
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before, drafted = digest(**at), digest(**draft)
    assert (digest(**at), digest(**draft)) == (before, drafted)
    (tmp_path / "model.safetensors").write_bytes(b"WEIGHTS")
    assert digest(**at) != before
    assert digest(**draft) != drafted


def test_weights_from_elsewhere_are_told_apart_by_where() -> None:
    def loaded(load_format: str, seed: str) -> bytes:
        name = "remote_instance_weight_loader_seed_instance_ip"
        return digest(arguments={"load_format": load_format, name: seed})

    assert loaded("remote_instance", "::1") != loaded("remote_instance", "::2")
    assert loaded("auto", "::1") == loaded("auto", "::2")


def test_a_copy_of_the_weights_may_be_anywhere_under_one_name(tmp_path: Path) -> None:
    def copy(name: str) -> bytes:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")
        return digest(config={"model": "m"}, arguments={"model_path": str(tmp_path / name)})

    assert copy("here") == copy("there")


def test_a_draft_is_told_where_its_kv_is_stored() -> None:
    draft = {"arguments": {"speculative_draft_model_path": "a-draft"}}
    assert digest(**draft, name="draft") != digest(name="draft")
    packed = {"pool": {"layer_num": 5}}
    assert digest(**draft, **packed) != digest(**packed)
    named = {"config": {"draft_model": "d"}, "name": "draft_swa"}
    assert digest(**named, arguments={"speculative_draft_model_path": "/b"}) == digest(**named)


def test_latent_attention_is_the_same_on_all_ranks() -> None:
    def of(rank: int, size: int, name: str = "kv", kind: type = MLATokenToKVPoolHost) -> bytes:
        storage = {"is_mla_model": True, "tp_rank": rank, "tp_size": size}
        return digest(storage=storage, name=name, kind=kind)

    assert of(0, 2) == of(1, 2) == of(0, 8)
    assert of(0, 2, "mamba", MHATokenToKVPoolHost) != of(1, 2, "mamba", MHATokenToKVPoolHost)
    assert of(0, 2, "draft", MHATokenToKVPoolHost) != of(1, 2, "draft", MHATokenToKVPoolHost)
    assert of(0, 2, "draft") == of(1, 2, "draft")


def test_settings_that_a_version_lacks_are_not_set() -> None:
    storage = SimpleNamespace(tp_rank=1, tp_size=2, model_name=None)
    facts = engine_facts(BackendConfig(), storage, None, None, "0.5.23")
    made = record_of(
        facts, BackendConfig(), storage, None, MHATokenToKVPoolHost(), "kv",
        pages=True, pieces=[8],
    )  # fmt: skip
    assert made.parts[0].nbytes == 8
    assert made.fields["ranks"]["pp_size"] == 1 and made.fields["ranks"]["tp_rank"] == 1
    assert not is_writer(storage) and is_writer(SimpleNamespace(tp_rank=0))
    assert is_writer(SimpleNamespace(tp_rank=1, is_storage_writer=True))


def test_keys_are_the_last_half_of_page_hashes() -> None:
    page_hash = hashlib.sha256(b"page").hexdigest()
    assert key_of(page_hash) == hashlib.sha256(b"page").digest()[16:]
    odd = ["", "a", "g" * 64, " " * 64, "  " * 16 + "ab" * 16, page_hash + ".k"]
    assert len({key_of(each) for each in odd}) == len(odd)
    assert all(len(key_of(each)) == 16 for each in odd)
    assert packed_keys([page_hash, "a"]) == key_of(page_hash) + key_of("a")


def test_settings_are_read_and_wrong_ones_refused() -> None:
    extra = {"backend_name": "kvpool", "interface_v1": 1, "tp_lcm_size": 8, "timeout_s": 2}
    config = BackendConfig.from_given(extra)
    assert config.interface_v1 and config.timeout_s == 2.0
    assert config.limit_s(2048) == 2.5
    assert not BackendConfig.from_given(None).interface_v1
    for wrong in (
        {"sockt": "x"},
        {"socket": 1},
        {"timeout_s": True},
        {"timeout_s": 61},
        {"timeout_per_ki_token_s": -1},
        {"timeout_per_ki_token_s": float("inf")},
        {"verify": "yes"},
        {"epoch": []},
        {"pages": True},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            BackendConfig.from_given(wrong)


def test_the_package_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="KvpoolHicache"):
        _ = sglang.KvpoolHicache

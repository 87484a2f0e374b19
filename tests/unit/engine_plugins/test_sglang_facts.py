"""What makes pages of SGLang engines exchangeable, and the settings of its backend."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.engine_plugins import sglang
from kvpool.engine_plugins.sglang.config import BackendConfig
from kvpool.engine_plugins.sglang.facts import is_writer, key_of, packed_keys, record_of
from kvpool.errors import ConfigError


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


def digest(
    *,
    config: dict[str, Any] | None = None,
    storage: dict[str, Any] | None = None,
    arguments: dict[str, Any] | None = None,
    pool: dict[str, Any] | None = None,
    name: str = "kv",
    kind: type = MHATokenToKVPoolHost,
    **more: Any,
) -> bytes:
    given: dict[str, Any] = {"pages": True, "pieces": [64, 64], "version": "0.5.23"}
    return record_of(
        BackendConfig.from_extra(config or {}),
        SimpleNamespace(**(STORAGE | (storage or {}))),
        SimpleNamespace(**(ARGUMENTS | (arguments or {}))),
        kind(**(POOL | (pool or {}))),
        name,
        **(given | more),
    ).digest()


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
    ],
    ids=str,
)
def test_each_fact_is_a_namespace_of_its_own(other: dict[str, Any]) -> None:
    assert digest(**other) != digest()


def test_what_makes_no_other_bytes_is_the_same_namespace() -> None:
    same: list[dict[str, Any]] = [
        {"storage": {"dp_rank": 1}},
        {"arguments": {"speculative_draft_model_path": "a-draft"}},
        {"arguments": {"port": 1}},
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


def test_versions_without_newer_facts_are_read() -> None:
    storage = SimpleNamespace(tp_rank=1, tp_size=2, model_name=None)
    record = record_of(
        BackendConfig(), storage, None, MHATokenToKVPoolHost(), "kv",
        pages=True, pieces=[8], version="0.5.4",
    )  # fmt: skip
    assert record.parts[0].nbytes == 8
    assert record.fields["ranks"]["pp_size"] == 1 and record.fields["ranks"]["tp_rank"] == 1
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
    config = BackendConfig.from_extra(extra)
    assert config.pages and config.timeout_s == 2.0
    assert config.limit_s(2048) == 2.5
    assert not BackendConfig.from_extra(None).pages
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
            BackendConfig.from_extra(wrong)


def test_the_package_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="KvpoolHicache"):
        _ = sglang.KvpoolHicache

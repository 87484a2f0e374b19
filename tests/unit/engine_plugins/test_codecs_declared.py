"""A codec is part of the namespace, and refused where there are no heads."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.engine_plugins.vllm.config import Codec, PluginConfig
from kvpool.engine_plugins.vllm.metrics import Counters
from kvpool.engine_plugins.vllm.naming import namespace
from kvpool.engine_plugins.vllm.naming.namespace import check_codec, record
from kvpool.engine_plugins.vllm.plan import GroupRule, RankReport
from kvpool.engine_plugins.vllm.worker.half import WorkerHalf
from kvpool.errors import ConfigError
from kvpool.types import NamespaceRecord
from tests.support.vllm_configs import engine_config, rank_report, start

LOSSY = [Codec.FP8, Codec.INT8]


@dataclass
class FullAttentionSpec:
    dtype: str = "torch.bfloat16"
    kv_quant_mode: int = 0
    num_head_slots: int | None = None
    state_content_bytes: int | None = None
    head_size: int = 64
    head_size_v: int = 64


class SlidingWindowSpec(FullAttentionSpec):
    pass


class ChunkedLocalAttentionSpec(FullAttentionSpec):
    pass


class MLAAttentionSpec(FullAttentionSpec):
    pass


class MambaSpec(FullAttentionSpec):
    pass


@dataclass
class UniformTypeKVCacheSpecs:
    kv_cache_specs: dict[str, Any]


def cache(*specs: Any) -> Any:
    return SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs],
        num_blocks=4,
    )


def check(codec: Codec, *specs: Any) -> None:
    check_codec(cache(*specs), [GroupRule(group) for group in range(len(specs))], codec)


@pytest.mark.parametrize("codec", LOSSY)
def test_heads_can_have_scales(codec: Codec) -> None:
    check(codec, FullAttentionSpec(), SlidingWindowSpec(), ChunkedLocalAttentionSpec())
    check(codec, FullAttentionSpec("torch.float16"), FullAttentionSpec("torch.float32"))
    check(codec, UniformTypeKVCacheSpecs({"a": FullAttentionSpec(), "b": SlidingWindowSpec()}))


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (MLAAttentionSpec(), "MLAAttentionSpec has no heads"),
        (MambaSpec(), "MambaSpec has no heads"),
        (FullAttentionSpec("torch.float8_e4m3fn"), "quantised already"),
        (FullAttentionSpec("torch.uint8"), "quantised already"),
        (FullAttentionSpec(kv_quant_mode=1), "quantised already"),
        (FullAttentionSpec(num_head_slots=2), "packs heads"),
        (FullAttentionSpec(state_content_bytes=96), "packs heads"),
        (FullAttentionSpec(head_size_v=32), "different sizes"),
    ],
)
def test_what_has_no_heads_is_refused(codec: Codec, spec: Any, says: str) -> None:
    for specs in ([spec], [FullAttentionSpec(), spec], [UniformTypeKVCacheSpecs({"a": spec})]):
        with pytest.raises(ConfigError, match=f"codec {codec}.*{says}.*Set codec to none"):
            check(codec, *specs)
        check(Codec.NONE, *specs)


def test_groups_that_are_not_stored_do_not_matter() -> None:
    check_codec(cache(MambaSpec(), FullAttentionSpec()), [GroupRule(1)], Codec.INT8)


# --- the namespace


def made(codec: Codec) -> NamespaceRecord:
    engine, groups = engine_config(), cache(FullAttentionSpec())
    # The same sizes, so that nothing but the codec makes a difference.
    reports = [rank_report()]
    return record(engine, groups, PluginConfig(codec=codec), [GroupRule(0)], reports, start(engine))


def test_every_codec_is_another_namespace() -> None:
    assert len({made(codec).digest() for codec in Codec}) == len(Codec) == 3


def test_the_record_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    assert made(Codec.INT8).fields["codec"] == {"name": "int8", "version": 1}
    before = made(Codec.INT8).digest()
    monkeypatch.setattr(namespace, "CODEC_VERSION", 2)
    assert made(Codec.INT8).digest() != before


def test_without_a_codec_the_record_names_none() -> None:
    assert "codec" not in made(Codec.NONE).fields


# --- settings


def test_the_setting() -> None:
    assert PluginConfig().codec is Codec.NONE
    assert PluginConfig.from_given({"codec": "int8"}).codec is Codec.INT8
    with pytest.raises(ConfigError, match=r"'codec'.*'zstd'.*none, fp8, int8"):
        PluginConfig.from_given({"codec": "zstd"})


# --- counters


def test_pages_and_worker_count_in_one_place(pool: Any) -> None:
    counters = Counters()
    half = WorkerHalf(
        pool,
        RankReport(0, "cpu", "L", "", [], {}),
        list,
        block_errors=True,
        record_ready=lambda: None,
        counters=counters,
    )
    counters.add(measured_blocks=2, measured_error=0.5)
    assert half.counters.take() == {"measured_blocks": 2, "measured_error": 0.5}
    half.close()

"""The tier's settings, its jobs, and what its engines must have in common. With vLLM: `tests/integration/vllm/test_tier.py`."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.engine_plugins.vllm.chunks.config import TierConfig
from kvpool.engine_plugins.vllm.chunks.jobs import Jobs
from kvpool.engine_plugins.vllm.chunks.namespace import check, record
from kvpool.engine_plugins.vllm.chunks.namespace import engine_config as engine_config_of
from kvpool.errors import ConfigError
from tests.support.vllm_configs import HfConfig, drafts, engine_config
from tests.support.waiting import until


def test_settings() -> None:
    given = {"socket": "/s", "jobs_max": 3.0, "epoch": 7, "verify_loads": True, "load_wait_s": 0}
    config = TierConfig.from_given(given)
    assert (config.socket, config.jobs_max, config.epoch) == ("/s", 3, "7")
    assert (config.verify_loads, config.load_wait_s) == (True, 0.0)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"sockets": "/s"}, r"secondary_tiers has no setting 'sockets'"),
        ({"lookup_timeout_s": 0}, "more than 0"),
        ({"request_timeout_s": -1}, "more than 0"),
        ({"load_wait_s": -1}, "at least 0"),
        ({"load_threads": 0}, "at least 1"),
        ({"store_threads": 1000}, "at most 64"),
        ({"jobs_max": 0}, "at least 1"),
        ({"jobs_max": 1.5}, "whole number"),
        ({"same_adapters": 1}, "true or false"),
        ({"locality": "NEAR"}, "LOCAL or REMOTE"),
    ],
)
def test_wrong_settings(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        TierConfig.from_given(given)


# --- jobs


def test_jobs_end_with_their_results() -> None:
    jobs = Jobs[int](2, 10, "test")
    assert all(jobs.submit(number, lambda number=number: number * 10) for number in range(5))
    found: list[Any] = []

    def ended() -> bool:
        found.extend(jobs.finished())
        return len(found) == 5

    until(ended, "all have ended")
    assert sorted((number, result) for number, result, _ in found) == [
        (number, number * 10) for number in range(5)
    ]
    assert jobs.finished() == []


def test_of_too_many_jobs_the_last_are_none() -> None:
    go = threading.Event()
    jobs = Jobs[bool](1, 2, "test")
    assert jobs.submit(1, go.wait)
    assert jobs.submit(2, go.wait)
    assert not jobs.submit(3, go.wait)
    go.set()
    jobs.close()
    assert {number for number, _, _ in jobs.finished()} == {1, 2}


def test_draining_gives_up_what_has_not_begun() -> None:
    begun, go = threading.Event(), threading.Event()

    def work() -> str:
        begun.set()
        go.wait()
        return "done"

    jobs = Jobs[str](1, 5, "test")
    assert jobs.submit(1, work)
    assert jobs.submit(2, work)
    begun.wait()
    draining = threading.Thread(target=jobs.drain)
    draining.start()
    assert draining.is_alive()
    go.set()
    draining.join()
    assert [(number, result) for number, result, _ in jobs.finished()] == [(1, "done"), (2, None)]
    assert jobs.submit(3, work)
    jobs.close()


# --- the namespace


def offloading(**changes: Any) -> Any:
    facts: dict[str, Any] = {
        "groups": (SimpleNamespace(group_id=0, tokens_per_block=32, layer_names=("a", "b")),),
        "worker_kv_bytes_per_block": 8192,
        "model": SimpleNamespace(dtype="bfloat16"),
        "replicated_layout": False,
        "canonical_layout": False,
        "kv_cache_layout": "LBHNC",
    }
    cache = {"tokens_per_hash": 32, "blocks_per_chunk": 1}
    parallel = {"world_size": 1, "tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1}
    for name, value in changes.items():
        for section in (cache, parallel):
            if name in section:
                section[name] = value
        if name in facts:
            facts[name] = value
    return SimpleNamespace(
        **facts, cache=SimpleNamespace(**cache), parallel=SimpleNamespace(**parallel)
    )


def name(
    vllm: dict[str, Any] | None = None,
    given: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    **others: Any,
) -> bytes:
    facts: dict[str, Any] = {
        "row_bytes": 8192,
        "seed": "none",
        "versions": {"vllm": "0.32.0"},
        "device": ["cuda", "H200"],
        "fp8": "torch.float8_e4m3fn",
        **others,
    }
    return record(
        engine_config(**(vllm or {})),
        offloading(**(given or {})),
        TierConfig(**(config or {})),
        **facts,
    ).digest()


def test_equal_facts_are_one_namespace() -> None:
    assert name() == name()
    assert name(config={"socket": "/elsewhere", "jobs_max": 3}) == name()


@pytest.mark.parametrize(
    "facts",
    [
        {"vllm": {"model_config__model": "n"}},
        {"vllm": {"model_config__revision": "main"}},
        {"vllm": {"model_config__dtype": "float16"}},
        {"vllm": {"model_config__quantization": "fp8"}},
        {"vllm": {"model_config__quantization_config": {"ignore": ["*qkv_proj*"]}}},
        {"vllm": {"model_config__code_revision": "abc"}},
        {"vllm": {"cache_config__cache_dtype": "fp8"}},
        {"vllm": {"cache_config__prefix_caching_hash_algo": "sha256_cbor"}},
        {"vllm": {"parallel_config__cp_kv_cache_interleave_size": 8}},
        {"vllm": {"attention_config__backend": "FLASHINFER"}},
        {"vllm": {"attention_config__backend_per_kind": {"mla": "FLASHMLA"}}},
        {"vllm": {"use_v2_model_runner": True}},
        {"given": {"tokens_per_hash": 16}},
        {"given": {"blocks_per_chunk": 2}},
        {"given": {"worker_kv_bytes_per_block": 4096}},
        {"given": {"kv_cache_layout": "LBNHC"}},
        {"given": {"canonical_layout": True}},
        {"given": {"replicated_layout": True}},
        {"given": {"world_size": 2}},
        {"given": {"tp_size": 2}},
        {"given": {"pp_size": 2}},
        {"given": {"pcp_size": 2}},
        {"given": {"dcp_size": 2}},
        {
            "given": {
                "groups": (
                    SimpleNamespace(group_id=0, tokens_per_block=32, layer_names=("a", "c")),
                )
            }
        },
        {"config": {"tenant": "other"}},
        {"config": {"epoch": "1"}},
        {"config": {"model": "n"}},
        {"row_bytes": 16384},
        {"seed": "1"},
        {"versions": {"vllm": "0.33.0"}},
        {"device": ["cuda", "H100"]},
    ],
    ids=str,
)
def test_each_fact_is_another_namespace(facts: dict[str, Any]) -> None:
    assert name(**facts) != name()


@pytest.mark.parametrize(
    "setting", [{"rope_type": "longrope"}, {"rope_type": "of a later version"}]
)
def test_the_longest_prompt_counts_where_positions_may_depend_on_it(
    setting: dict[str, Any],
) -> None:
    """A tier does not see the model."""

    def named(length: int, **config: Any) -> bytes:
        model = HfConfig(layers=2, **config)
        return name({"model_config__hf_config": model, "model_config__max_model_len": length})

    assert named(1024) == named(4096)
    assert named(1024, rope_parameters=setting) != named(4096, rope_parameters=setting)


def test_8_bit_floats_are_told_apart_as_the_platform_reads_them() -> None:
    fp8 = {"cache_config__cache_dtype": "fp8"}
    assert name(fp8) != name(fp8, fp8="torch.float8_e4m3fnuz")
    assert name() == name(fp8="torch.float8_e4m3fnuz")


def test_drafts_without_kv_are_no_fact() -> None:
    assert name({"speculative_config": drafts("ngram")}) == name()
    assert name({"speculative_config": drafts("eagle")}) != name()


def test_the_connector_shares_nothing_with_it() -> None:
    """Chunks are not the connector's blocks, though their hashes are the same."""
    made = record(
        engine_config(),
        offloading(),
        TierConfig(),
        row_bytes=8192,
        seed="none",
        versions={},
        device=["cuda"],
        fp8="",
    )
    assert made.fields["form"] == "chunk 1"
    assert [part.nbytes for part in made.parts] == [8192]


def test_what_is_refused() -> None:
    assert check(engine_config(), TierConfig(), None), "hashes of pickles depend on versions"
    stable = engine_config(cache_config__prefix_caching_hash_algo="sha256_cbor")
    assert not check(stable, TierConfig(), None)
    with pytest.raises(ConfigError, match="same_adapters"):
        check(engine_config(lora_config=object()), TierConfig(), None)
    check(engine_config(lora_config=object()), TierConfig(same_adapters=True), None)
    weak = engine_config(cache_config__prefix_caching_hash_algo="xxhash")
    with pytest.raises(ConfigError, match="accept_weak_hashes in the tier's entry"):
        check(weak, TierConfig(), "0")
    check(weak, TierConfig(accept_weak_hashes=True), "0")


def test_the_engine_that_a_tier_belongs_to() -> None:
    """It is found with the functions that are making the tier, though the collector of garbage does not see it."""

    class VllmConfig:
        def __init__(self, extra: dict[str, Any] | None) -> None:
            self.kv_transfer_config = extra and SimpleNamespace(kv_connector_extra_config=extra)

    def made(config: Any, extra: Any) -> Any:
        return inner(VllmConfig(None), VllmConfig(dict(extra)), extra)

    def inner(drafts: Any, other: Any, extra: Any) -> Any:
        return engine_config_of(SimpleNamespace(extra_config=extra))

    extra = {"cpu_bytes_to_use": 1}
    config = VllmConfig(extra)
    gc.freeze()
    try:
        assert made(config, extra) is config
    finally:
        gc.unfreeze()
    with pytest.raises(ConfigError, match="does not find the configuration"):
        made(config, {"cpu_bytes_to_use": 1})

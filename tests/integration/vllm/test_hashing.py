"""The router's block hashes beside vLLM's own, and what an engine tells of itself for it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import KVEventsConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from kvpool.router.hashing import HashSpec, Item, chain, none_hash
from kvpool.router.upstream.specs import spec_of
from kvpool.types import PartKind

TOKENS = [random.Random(3).choice([5, 200, 40_000, 150_000]) + n % 7 for n in range(700)]
ITEMS = [Item("img-a", 3, 20), Item("img-b", 30, 1), Item("img-c", 60, 300), Item("img-a", 400, 9)]


def of_vllm(algorithm: str, block: int, items: list[Item], **more: Any) -> list[bytes]:
    """The hashes that vLLM gives a request."""
    hash_of = get_hash_fn_by_name(algorithm)
    kv_cache_utils.init_none_hash(hash_of)
    features = [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            # Each a string of its own, as they are when they come from another process.
            identifier="".join(item.identifier),
            mm_position=PlaceholderRange(offset=item.offset, length=item.length),
        )
        for item in items
    ]
    request = Request(
        "r",
        list(TOKENS),
        SamplingParams(max_tokens=1),
        None,
        mm_features=features,
        block_hasher=kv_cache_utils.get_request_block_hasher(block, hash_of),
        **more,
    )
    return [bytes(each) for each in request.block_hashes]


@pytest.mark.parametrize("algorithm", ["sha256_cbor", "sha256", "xxhash_cbor", "xxhash"])
@pytest.mark.parametrize("seed", [None, "7"])
@pytest.mark.parametrize("block", [16, 64])
def test_hashes_are_those_of_vllm(
    algorithm: str, seed: str | None, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    elif algorithm.startswith("xxhash"):
        pytest.skip("vLLM seeds it at random")
    begins = none_hash(algorithm) if seed is None else none_hash(algorithm, seed)
    spec = HashSpec(block, algorithm, begins)
    adapter = LoRARequest("adapter", 1, "/adapters/a")
    lora = ("adapter", "/adapters/a")
    assert of_vllm(algorithm, block, []) == chain(spec, TOKENS)
    assert of_vllm(algorithm, block, [], cache_salt="s") == chain(spec, TOKENS, salt="s")
    assert of_vllm(algorithm, block, [], lora_request=adapter) == chain(spec, TOKENS, lora=lora)
    assert of_vllm(algorithm, block, ITEMS) == chain(spec, TOKENS, multimodal=ITEMS)
    everything = of_vllm(algorithm, block, ITEMS, cache_salt="s", lora_request=adapter)
    assert everything == chain(spec, TOKENS, salt="s", lora=lora, multimodal=ITEMS)
    assert (
        len({one[0] for one in (everything, chain(spec, TOKENS), chain(spec, TOKENS, salt="s"))})
        == 3
    )


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_what_an_engine_announces(
    kind: str, kit: Any, models: Any, daemon: Any, tmp_path: Path
) -> None:
    """Its record is enough to know how its blocks are called in its cache, and where its events are."""
    extra = {"url": "http://host-a:8000/", "engine_role": "decode"}
    events = KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=f"ipc://{tmp_path}/e",
        replay_endpoint=f"ipc://{tmp_path}/r",
        topic="kv",
    )
    with kit.run_engine(models(kind), daemon, extra, kv_events_config=events) as engine:
        kit.until(daemon.client.routing.engines, "the engine is announced")
        (record,) = daemon.client.routing.engines()
        spec = spec_of(record["url"], announced=record, table=None)
        assert (spec.url, spec.name, spec.role.name) == (
            "http://host-a:8000",
            "host-a:8000",
            "DECODE",
        )
        assert (spec.events, spec.replay) == (events.endpoint, events.replay_endpoint)
        assert (spec.topic, spec.max_len, spec.step_tokens) == ("kv", 2048, 512)
        groups = engine.scheduler.kv_cache_config.kv_cache_groups
        whole = [
            n for n, g in enumerate(groups) if not getattr(g.kv_cache_spec, "sliding_window", 0)
        ]
        assert spec.groups == tuple(whole)
        ns = engine.namespace
        assert spec.namespace == ns.digest
        # A prefix needs few blocks of windows, however long it is.
        full = [part.nbytes for part in ns.parts if part.kind is PartKind.FULL]
        assert spec.block_bytes == sum(full)
        assert spec.capacity_tokens <= engine.idle_free * kit.BLOCK
        asked = kit.TINY.prompt(90, 300)
        engine.generate([asked], 2)
        assert spec.hashing is not None
        hashes = chain(spec.hashing, asked)
        assert len(hashes) == 300 // kit.BLOCK
        cached = {
            bytes(kv_cache_utils.get_block_hash(each))
            for each in engine.pool.cached_block_hash_to_block._cache
        }
        assert set(hashes) <= cached
        engine.drain()
        found = daemon.client.routing.prefixes(spec.namespace, [each[-16:] for each in hashes])
        assert list(found.values()) == [(len(hashes), len(hashes))]
    kit.until(lambda: not daemon.client.routing.engines(), "it is announced no more")

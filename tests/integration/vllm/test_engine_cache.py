"""What an engine has in its own prefix cache is known on other nodes, and no longer than it has it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVEventsConfig
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id

SHARDS = 2
"""Parts of a block in each group: the tiny models have two KV heads."""


def cached(engine: Any) -> dict[bytes, int]:
    """Our key of each block that the engine has, and how many parts of it."""
    found: dict[bytes, set[int]] = {}
    for each in engine.pool.cached_block_hash_to_block._cache:
        found.setdefault(bytes(get_block_hash(each))[-16:], set()).add(get_group_id(each))
    return {key: SHARDS * len(groups) for key, groups in found.items()}


def in_engines(node: Any, keys: set[bytes]) -> dict[bytes, int]:
    """Blocks that engines have, by the word of a node, and how many parts of each."""
    return {
        bytes.fromhex(row.key): replica.parts
        for row in node.client.locate(sorted(keys))
        for replica in row.replicas
        if (replica.tier, replica.node) == ("gpu", "a")
    }


@pytest.mark.parametrize("model", ["llama", "gemma"])
def test_other_nodes_know_what_is_in_an_engines_prefix_cache(
    kit: Any,
    models: Callable[[str], Path],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    model: str,
) -> None:
    endpoint = f"ipc://{tmp_path_factory.mktemp('z')}/e"
    events = KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=endpoint,
        replay_endpoint=f"{endpoint}.replay",
        topic="kv",
    )
    prompts = [kit.TINY.prompt(seed, length) for seed, length in ((1, 300), (2, 500))]
    with kit.run_cluster(tmp_path, 2) as (a, b):
        with kit.run_engine(models(model), a, kv_events_config=events) as engine:
            # The other node has the namespace open, so that it can be asked about it.
            b.client.open(engine.namespace.record)
            engine.generate(prompts)
            engine.drain()
            has = cached(engine)
            ever = set(has)
            assert len(has) >= 24
            kit.until(lambda: in_engines(b, ever) == has, "b knows all that the engine has")
            (row,) = a.client.stats().tenants["default"].engines.followed
            assert row.complete
            assert row.blocks == sum(has.values()) // SHARDS  # one in each group

            # Its blocks are in the pool still, and in its cache no more.
            engine.forget()
            engine.core.step_fn()  # events are published at a step
            kit.until(lambda: in_engines(b, ever) == {}, "b knows that they are gone")
            kit.until(
                lambda: len(b.client.locate(sorted(ever))) == len(ever),
                "b knows that they are in the pool",
            )

            # What is loaded from the pool is in the cache then.
            assert engine.generate(prompts[:1])[0].cached == kit.hit(300)
            engine.drain()
            has = cached(engine)
            ever |= set(has)
            kit.until(lambda: in_engines(b, ever) == has, "b knows what was loaded")

            # A reset empties it.
            assert engine.llm.reset_prefix_cache(reset_connector=True)
            engine.core.step_fn()  # the namespace stays, so that only the engine's events tell it
            kit.until(lambda: in_engines(b, ever) == {}, "nothing is in the cache")
            engine.generate(prompts[1:])
            engine.drain()
            has = cached(engine)
            ever |= set(has)
            kit.until(lambda: in_engines(b, ever) == has, "b knows what there is after the reset")

        kit.until(lambda: in_engines(b, ever) == {}, "the engine has ended")
        kit.until(
            lambda: a.client.stats().tenants["default"].engines.followed == [],
            "its node follows it no more",
        )

"""Engines that keep their blocks quantised: what they load is near, and nobody else's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvpool.engine_plugins.vllm.config import Codec
from kvpool.engine_plugins.vllm.naming.namespace import check_codec
from kvpool.engine_plugins.vllm.plan import GroupRule
from kvpool.errors import ConfigError

HEADS, SIZE = 2, 64
STEPS = {"int8": 127.0, "fp8": 448.0}
MEAN_LOSS = {"int8": (0.004, 0.012), "fp8": (0.02, 0.03)}

KV = dict[bytes, list[torch.Tensor]]


@pytest.fixture(scope="module")
def asked(kit: Any) -> list[list[int]]:
    return kit.prompts(8)


def paged(kit: Any, engine: Any, group: int = 0) -> list[torch.Tensor]:
    """The KV of the group's layers: (blocks, heads, K/V, anything), in whatever order inside."""
    layers = kit.layers_of(engine.worker._pages[group].parts[0].pages)  # a row is a head's
    return [
        rows.view(torch.bfloat16).view(len(rows) // HEADS, HEADS, 2, -1, SIZE).double()
        for rows, _ in layers
    ]


def cached(kit: Any, engine: Any, only: set[int] | None = None) -> KV:
    """KV of the blocks in the engine's own prefix cache, by block hash."""
    layers = paged(kit, engine)
    return {
        bytes(block.block_hash): [layer[block.block_id].clone() for layer in layers]
        for block in engine.pool.blocks
        if block.block_hash is not None and (only is None or block.block_id in only)
    }


@contextmanager
def loads_noted(kit: Any, engine: Any) -> Iterator[set[int]]:
    """The blocks that were filled from the pool."""
    loaded: set[int] = set()

    def noting(copy: Callable[..., None], group: Any, *arguments: Any) -> None:
        copy(group, *arguments)
        loaded.update(group.block_ids)

    with kit.loads_through(engine, noting):
        yield loaded


def exposed(name: str) -> float:
    """As Prometheus reads it: vLLM's own reader makes whole numbers of counters."""
    samples = [sample for family in REGISTRY.collect() for sample in family.samples]
    (value,) = [each.value for each in samples if each.name == f"vllm:kvpool_{name}_total"]
    return float(value)


def assert_near(loaded: KV, computed: KV, codec: str) -> float:
    """Each element within its head's bound; gives the relative RMS error over all."""
    error = signal = 0.0
    for name, layers in loaded.items():
        for got, was in zip(layers, computed[name], strict=True):
            peak = was.abs().amax((2, 3), keepdim=True)
            step = peak / STEPS[codec]
            bound = step / 2 if codec == "int8" else torch.maximum(was.abs() / 16, step / 1024)
            # Rounded to bfloat16 in the end.
            assert ((got - was).abs() <= bound * 1.001 + was.abs() / 256).all()
            error += float((got - was).square().sum())
            signal += float(was.square().sum())
    return (error / signal) ** 0.5


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_what_is_loaded_is_near_what_was_computed(
    kit: Any, llama: Path, daemon: Any, asked: list[list[int]], codec: str
) -> None:
    before = daemon.counters().committed
    extra = {"codec": codec}
    with kit.run_engine(llama, daemon, extra, dtype="bfloat16") as engine:
        assert [output.cached for output in engine.generate(asked)] == [0, 0, 0]
        engine.assert_nothing_held(daemon)
        blocks = sum((len(each) + kit.NEW - 1) // kit.BLOCK for each in asked)
        assert daemon.counters().committed == before + kit.SHARDS * blocks
        part, other = engine.namespace.parts
        # Of one head in four layers: a byte an element, and a scale for K and V.
        assert part.nbytes == other.nbytes == 4 * (2 * kit.BLOCK * SIZE + 2 * 4)
        assert engine.metric("saved_bytes") == HEADS * blocks * part.nbytes
        assert engine.metric("measured_blocks") == -(-HEADS * blocks // 64)
        mean = exposed("measured_error") / exposed("measured_blocks")
        assert MEAN_LOSS[codec][0] < mean < MEAN_LOSS[codec][1]
        assert engine.metric("nonfinite_blocks") == 0
        computed = cached(kit, engine)
    with (
        kit.run_engine(llama, daemon, extra, dtype="bfloat16") as engine,
        loads_noted(kit, engine) as filled,
    ):
        outputs = engine.generate(asked)
        hits = [kit.hit(len(each)) for each in asked]
        assert [output.cached for output in outputs] == hits
        engine.assert_nothing_held(daemon)
        assert (
            engine.metric("loaded_blocks") == HEADS * len(filled) == HEADS * sum(hits) // kit.BLOCK
        )
        assert engine.metric("loaded_bytes") == HEADS * len(filled) * part.nbytes
        assert engine.metric("failed_loads") == 0
        loaded = cached(kit, engine, filled)
        assert len(loaded) == len(filled)
        loss = assert_near(loaded, computed, codec)
        assert MEAN_LOSS[codec][0] < loss < MEAN_LOSS[codec][1]


def test_nobody_meets_a_copy_of_another_codec(
    kit: Any, llama: Path, daemon: Any, oracle: Callable[..., list[list[int]]]
) -> None:
    """Each in turn stores the prompts, finds its own, and finds nothing of those before it."""
    asked = kit.prompts(9, [333])
    (exact,) = oracle("llama", asked)
    digests = set()
    for codec in ("int8", "none", "fp8"):
        with kit.run_engine(llama, daemon, {"codec": codec}) as engine:
            (first,) = engine.generate(asked)
            assert first.cached == 0, codec
            assert engine.metric("hit_blocks") == 0
            engine.forget()
            (second,) = engine.generate(asked)
            assert second.cached == kit.hit(333)
            engine.assert_nothing_held(daemon)
            digests.add(engine.namespace.digest)
            if codec == "none":
                assert second.tokens == exact
            assert first.tokens == exact
    assert len(digests) == 3


def test_sliding_windows_are_quantised_too(
    kit: Any, gemma: Path, daemon: Any, asked: list[list[int]]
) -> None:
    extra = {"codec": "fp8"}
    with kit.run_engine(gemma, daemon, extra) as engine:
        engine.generate(asked)
        engine.assert_nothing_held(daemon)
    with kit.run_engine(gemma, daemon, extra) as engine:
        outputs = engine.generate(asked)
        blocks = [len(each) // kit.BLOCK for each in asked]
        assert [output.cached for output in outputs] == [kit.BLOCK * each for each in blocks]
        assert engine.metric("loaded_blocks") == kit.SHARDS * (sum(blocks) + len(asked) * 2 * 2)
        engine.assert_nothing_held(daemon)


# --- refusals


def spec(kind: Any = FullAttentionSpec, **changes: Any) -> Any:
    values = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    return kind(**{**values, **changes})


@pytest.mark.parametrize(
    ("refused", "says"),
    [
        (spec(MLAAttentionSpec, num_kv_heads=1, head_size=576), "no heads"),
        (MambaSpec(block_size=32, shapes=((2, 64),), dtypes=(torch.float32,)), "no heads"),
        (spec(dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR), "quantised already"),
        (spec(num_head_slots=2), "packs heads"),
        (spec(head_size_v=32), "different sizes"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_vllms_own_specs_without_heads_are_refused(refused: Any, says: str) -> None:
    good = [spec(), spec(SlidingWindowSpec, sliding_window=64)]
    for specs in ([*good], [*good, refused]):
        groups = [SimpleNamespace(kv_cache_spec=each) for each in specs]
        rules = [GroupRule(group) for group in range(len(groups))]
        if refused in specs:
            with pytest.raises(ConfigError, match=says):
                check_codec(SimpleNamespace(kv_cache_groups=groups), rules, Codec.INT8)
        else:
            check_codec(SimpleNamespace(kv_cache_groups=groups), rules, Codec.INT8)


def test_a_quantised_cache_is_refused_at_start_up(kit: Any, llama: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"codec int8.*quantised already.*Set codec to none"),
        kit.run_engine(llama, str(tmp_path / "nobody"), {"codec": "int8"}, kv_cache_dtype="fp8"),
    ):
        pass

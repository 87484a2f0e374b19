"""Models with linear attention: of their states few are stored, and a hit needs the one at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvpool.errors import ConfigError, LeaseLost
from kvpool.types import PartKind

Oracle = Callable[..., list[list[int]]]

LENGTHS = (700, 390, 256, 129)
# The kernels of gated delta nets for CPUs know this type only.
OPTIONS = {"qwen-next": {"dtype": "bfloat16"}, "nemotron-h": {}}
STATE_GROUPS = {"qwen-next": 3, "nemotron-h": 2}
SHARDS = {"qwen-next": 4, "nemotron-h": 2}
"""Parts of a block of attention: one for each KV head. A state is one part of each rank."""


@dataclass(frozen=True)
class Model:
    """One of the models, the pool that its engines share, and the prompts."""

    kit: Any
    kind: str
    path: Path
    daemon: Any
    asked: list[list[int]]
    block: int
    """Tokens of a block: vLLM makes blocks as large as a state, in steps that depend on the processor."""

    @property
    def hits(self) -> list[int]:
        """The last token is computed, on top of the state before it."""
        return [(len(each) - 1) // self.block * self.block for each in self.asked]

    def engine(self, **options: Any) -> AbstractContextManager[Any]:
        return self.kit.run_engine(self.path, self.daemon, **OPTIONS[self.kind], **options)


@pytest.fixture(scope="module", params=list(OPTIONS))
def model(
    request: pytest.FixtureRequest, kit: Any, models: Callable[[str], Path], daemon: Any
) -> Iterator[Model]:
    """vLLM expects of Mamba 2 kernels that they give a state within what they compute; those for CPUs do not."""
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    spec_of = MambaMixer2.get_kv_cache_spec

    def plain_spec(self: Any, config: Any) -> Any:
        spec = spec_of(self, config)
        return replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MambaMixer2, "get_kv_cache_spec", plain_spec)
        kind = request.param
        with kit.run_engine(models(kind), **OPTIONS[kind]) as engine:
            block = engine.llm.llm_engine.vllm_config.cache_config.block_size
        yield Model(kit, kind, models(kind), daemon, kit.prompts(3, LENGTHS), block)


@pytest.fixture(scope="module")
def answers(model: Model, oracle: Oracle) -> Callable[..., list[list[int]]]:
    """What an engine without a pool says."""
    return partial(oracle, model.kind, **OPTIONS[model.kind])


@pytest.fixture(scope="module")
def saved(model: Model, answers: Oracle) -> list[list[int]]:
    expected = answers(model.asked)
    with model.engine() as engine:
        outputs = engine.generate(model.asked)
        assert [output.tokens for output in outputs] == expected
        engine.assert_nothing_held(model.daemon)
        parts = engine.namespace.parts
        shards, states = SHARDS[model.kind], STATE_GROUPS[model.kind]
        assert sorted((part.kind, part.window_blocks) for part in parts) == [
            *[(PartKind.FULL, 0)] * shards,
            *[(PartKind.WINDOW, 1)] * states,
        ]
        # Of each prompt the state at its last whole block, and no other; and all blocks of the attention.
        blocks = sum((len(each) + model.kit.NEW - 1) // model.block for each in model.asked)
        assert engine.metric("saved_blocks") == shards * blocks + states * len(model.asked)
    return expected


def test_a_fresh_engine_loads_the_last_state(model: Model, saved: list[list[int]]) -> None:
    with model.engine() as engine:
        outputs = engine.generate(model.asked)
        assert [output.cached for output in outputs] == model.hits
        assert [output.tokens for output in outputs] == saved
        loaded = SHARDS[model.kind] * sum(model.hits) // model.block
        assert engine.metric("loaded_blocks") == loaded + STATE_GROUPS[model.kind] * len(saved)
        # What was loaded is not offered again.
        assert engine.metric("saved_blocks") == 0
        engine.assert_nothing_held(model.daemon)


def test_the_oracle_sees_what_is_loaded(model: Model, saved: list[list[int]]) -> None:
    with model.engine() as engine:
        with model.kit.zeroed_store(engine):
            outputs = engine.generate(model.asked)
        assert outputs[0].tokens != saved[0]
        assert outputs[1].tokens != saved[1]


def test_a_failed_load_is_recomputed(
    model: Model, saved: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with model.engine() as engine:
        tries = model.kit.fail_loads(engine, monkeypatch, LeaseLost("made to fail"))
        outputs = engine.generate(model.asked)
        # The store's zeroed slots of the control are still zeros: nothing of them was used.
        assert [output.tokens for output in outputs] == saved
        assert len(tries) == len(model.asked)
        engine.assert_nothing_held(model.daemon)


@pytest.mark.parametrize("where", ["by one engine", "by two"])
def test_a_shared_prefix_is_found_from_the_third_prompt_on(
    model: Model, answers: Oracle, where: str
) -> None:
    """The second one's state is kept where it parts from the first, as the engine's cache or the pool knows it."""
    seed = 70 if where == "by two" else 80
    prompt, block = model.kit.TINY.prompt, model.block
    system = prompt(seed, 5 * block + 7)
    first, second, third = (system + prompt(seed + i, 2 * block) for i in range(1, 4))
    expected = answers([second, third])
    with model.engine() as engine:
        assert engine.generate([first])[0].cached == 0
        if where == "by two":
            engine.forget()
        (output,) = engine.generate([second])
        assert (output.cached, output.tokens) == (0, expected[0])
        engine.drain()
    with model.engine() as engine:
        (output,) = engine.generate([third])
        assert (output.cached, output.tokens) == (5 * block, expected[1])


@pytest.mark.parametrize("model", ["nemotron-h"], indirect=True)
def test_preempted_requests_load_their_states(model: Model, answers: Oracle) -> None:
    """In float32 only: in bfloat16 an engine without a pool, too, says something else once requests were preempted."""
    block = model.block
    asked = [model.kit.TINY.prompt(60 + i, 2 * block + 3) for i in range(8)]
    new = 2 * block
    expected = answers(asked, new)
    with model.engine(max_model_len=6 * block, num_gpu_blocks_override=50) as engine:
        preempted = []
        preempt = engine.scheduler._preempt_request

        def count(*arguments: Any, **options: Any) -> None:
            preempted.append(1)
            preempt(*arguments, **options)

        engine.scheduler._preempt_request = count
        outputs = engine.generate(asked, new)
        assert [output.tokens for output in outputs] == expected
        assert preempted
        assert engine.metric("loads") > 0
        engine.assert_nothing_held(model.daemon)


def test_states_that_are_overwritten_are_refused_at_start(model: Model) -> None:
    with (
        pytest.raises(ConfigError, match=r"mamba_cache_mode none.*--enable-prefix-caching"),
        model.engine(enable_prefix_caching=False),
    ):
        pass

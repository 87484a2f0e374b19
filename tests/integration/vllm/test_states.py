"""Models with linear attention: of their states few are stored, and a hit needs the one at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpool.errors import ConfigError, LeaseLost
from kvpool.types import PartKind

Oracle = Callable[..., list[list[int]]]

LENGTHS = (700, 390, 256, 129)
BLOCKS = {"qwen-next": 128, "nemotron-h": 64}  # vLLM makes blocks as large as a state
# The kernels of gated delta nets for CPUs know this type only.
OPTIONS = {"qwen-next": {"dtype": "bfloat16"}, "nemotron-h": {}}
STATE_GROUPS = {"qwen-next": 3, "nemotron-h": 2}
SHARDS = {"qwen-next": 4, "nemotron-h": 2}
"""Parts of a block of attention: one for each KV head. A state is one part of each rank."""


@pytest.fixture(scope="module", params=list(OPTIONS))
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """A model. vLLM expects of Mamba 2 kernels that they give a state within what they compute; those for CPUs do not."""
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    spec_of = MambaMixer2.get_kv_cache_spec

    def plain_spec(self: Any, config: Any) -> Any:
        spec = spec_of(self, config)
        return replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MambaMixer2, "get_kv_cache_spec", plain_spec)
        yield request.param


@pytest.fixture(scope="module")
def model(models: Callable[[str], Path], kind: str) -> Path:
    return models(kind)


@pytest.fixture(scope="module")
def options(kind: str) -> dict[str, Any]:
    return dict(OPTIONS[kind])


@pytest.fixture(scope="module")
def asked(kit: Any) -> list[list[int]]:
    return kit.prompts(3, LENGTHS)


@pytest.fixture(scope="module")
def block(kind: str) -> int:
    return BLOCKS[kind]


@pytest.fixture(scope="module")
def hits(asked: list[list[int]], block: int) -> list[int]:
    """The last token is computed, on top of the state before it."""
    return [(len(each) - 1) // block * block for each in asked]


@pytest.fixture(scope="module")
def saved(
    kit: Any,
    model: Path,
    kind: str,
    daemon: Any,
    oracle: Oracle,
    asked: list[list[int]],
    block: int,
    options: dict[str, Any],
) -> list[list[int]]:
    expected = oracle(kind, asked, **options)
    with kit.run_engine(model, daemon, **options) as engine:
        outputs = engine.generate(asked)
        assert [output.tokens for output in outputs] == expected
        engine.assert_nothing_held(daemon)
        parts = engine.connector._scheduler._namespace.parts
        states = STATE_GROUPS[kind]
        assert sorted((part.kind, part.window_blocks) for part in parts) == [
            *[(PartKind.FULL, 0)] * SHARDS[kind],
            *[(PartKind.WINDOW, 1)] * states,
        ]
        # Of each prompt the state at its last whole block, and no other; and all blocks of the attention.
        blocks = sum((len(each) + kit.NEW - 1) // block for each in asked)
        assert engine.metric("saved_blocks") == SHARDS[kind] * blocks + states * len(asked)
    return expected


def test_a_fresh_engine_loads_the_last_state(
    kit: Any,
    model: Path,
    kind: str,
    daemon: Any,
    saved: list[list[int]],
    asked: list[list[int]],
    hits: list[int],
    block: int,
    options: dict[str, Any],
) -> None:
    with kit.run_engine(model, daemon, **options) as engine:
        outputs = engine.generate(asked)
        assert [output.cached for output in outputs] == hits
        assert [output.tokens for output in outputs] == saved
        blocks = sum(hits) // block
        assert engine.metric("loaded_blocks") == SHARDS[kind] * blocks + STATE_GROUPS[kind] * len(
            asked
        )
        # What was loaded is not offered again.
        assert engine.metric("saved_blocks") == 0
        engine.assert_nothing_held(daemon)


def test_the_oracle_sees_what_is_loaded(
    kit: Any,
    model: Path,
    daemon: Any,
    saved: list[list[int]],
    asked: list[list[int]],
    options: dict[str, Any],
) -> None:
    with kit.run_engine(model, daemon, **options) as engine:
        with kit.zeroed_store(engine):
            outputs = engine.generate(asked)
        assert outputs[0].tokens != saved[0]
        assert outputs[1].tokens != saved[1]


def test_a_failed_load_is_recomputed(
    kit: Any,
    model: Path,
    daemon: Any,
    saved: list[list[int]],
    asked: list[list[int]],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with kit.run_engine(model, daemon, **options) as engine:
        tries = kit.fail_loads(engine, monkeypatch, LeaseLost("made to fail"))
        outputs = engine.generate(asked)
        # The store's zeroed slots of the control are still zeros: nothing of them was used.
        assert [output.tokens for output in outputs] == saved
        assert len(tries) == len(asked)
        engine.assert_nothing_held(daemon)


@pytest.mark.parametrize("where", ["by one engine", "by two"])
def test_a_shared_prefix_is_found_from_the_third_prompt_on(
    kit: Any,
    model: Path,
    kind: str,
    daemon: Any,
    oracle: Oracle,
    block: int,
    options: dict[str, Any],
    where: str,
) -> None:
    """The second one's state is kept where it parts from the first, as the engine's cache or the pool knows it."""
    seed = 70 if where == "by two" else 80
    system = kit.TINY.prompt(seed, 5 * block + 7)
    first, second, third = (system + kit.TINY.prompt(seed + i, 2 * block) for i in range(1, 4))
    expected = oracle(kind, [second, third], **options)
    with kit.run_engine(model, daemon, **options) as engine:
        assert engine.generate([first])[0].cached == 0
        if where == "by two":
            engine.forget()
        (output,) = engine.generate([second])
        assert (output.cached, output.tokens) == (0, expected[0])
        engine.drain()
    with kit.run_engine(model, daemon, **options) as engine:
        (output,) = engine.generate([third])
        assert (output.cached, output.tokens) == (5 * block, expected[1])


@pytest.mark.parametrize("kind", ["nemotron-h"], indirect=True)
def test_preempted_requests_load_their_states(
    kit: Any,
    model: Path,
    kind: str,
    daemon: Any,
    oracle: Oracle,
    block: int,
    options: dict[str, Any],
) -> None:
    """In float32 only: in bfloat16 an engine without a pool, too, says something else once requests were preempted."""
    asked = [kit.TINY.prompt(60 + i, 2 * block + 3) for i in range(8)]
    new = 2 * block
    limits = {"max_model_len": 6 * block, "num_gpu_blocks_override": 50}
    expected = oracle(kind, asked, new, **options)
    with kit.run_engine(model, daemon, **limits, **options) as engine:
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
        engine.assert_nothing_held(daemon)


def test_states_that_are_overwritten_are_refused_at_start(
    kit: Any, model: Path, daemon: Any, options: dict[str, Any]
) -> None:
    with (
        pytest.raises(ConfigError, match=r"mamba_cache_mode none.*--enable-prefix-caching"),
        kit.run_engine(model, daemon, enable_prefix_caching=False, **options),
    ):
        pass

"""A model with sliding windows: several cache groups, of which a hit needs different blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpool.errors import ConfigError, LeaseLost
from kvpool.types import PartKind

Oracle = Callable[..., list[list[int]]]


@pytest.fixture(scope="module")
def asked(kit: Any) -> list[list[int]]:
    return kit.prompts(2)


@pytest.fixture(scope="module")
def saved(
    kit: Any, gemma: Path, daemon: Any, oracle: Oracle, asked: list[list[int]]
) -> list[list[int]]:
    expected = oracle("gemma", asked)
    with kit.run_engine(gemma, daemon) as engine:
        outputs = engine.generate(asked)
        assert [output.tokens for output in outputs] == expected
        engine.assert_nothing_held(daemon)
        parts = engine.namespace.parts
        assert sorted((part.kind, part.window_blocks) for part in parts) == [
            *[(PartKind.FULL, 0)] * kit.SHARDS,
            *[(PartKind.WINDOW, 2)] * (2 * kit.SHARDS),
        ]
    return expected


def test_a_fresh_engine_loads_windows_and_whole_prefixes(
    kit: Any, gemma: Path, daemon: Any, saved: list[list[int]], asked: list[list[int]]
) -> None:
    with kit.run_engine(gemma, daemon) as engine:
        outputs = engine.generate(asked)
        assert [output.tokens for output in outputs] == saved
        blocks = [len(each) // kit.BLOCK for each in asked]
        assert [output.cached for output in outputs] == [kit.BLOCK * each for each in blocks]
        # All blocks of the full group, and two of each of the two windows.
        assert engine.metric("loaded_blocks") == kit.SHARDS * (sum(blocks) + len(asked) * 2 * 2)
        engine.assert_nothing_held(daemon)


def test_the_oracle_sees_what_is_loaded(
    kit: Any, gemma: Path, daemon: Any, saved: list[list[int]], asked: list[list[int]]
) -> None:
    with kit.run_engine(gemma, daemon) as engine:
        with kit.zeroed_store(engine):
            outputs = engine.generate(asked)
        assert outputs[0].tokens != saved[0]
        assert outputs[1].tokens != saved[1]


def test_a_failed_load_is_recomputed(
    kit: Any,
    gemma: Path,
    daemon: Any,
    saved: list[list[int]],
    asked: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with kit.run_engine(gemma, daemon) as engine:
        tries = kit.fail_loads(engine, monkeypatch, LeaseLost("made to fail"))
        outputs = engine.generate(asked)
        # The store's zeroed slots of the control are still zeros: nothing of them was used.
        assert [output.tokens for output in outputs] == saved
        assert len(tries) == len(asked)
        engine.assert_nothing_held(daemon)


@pytest.mark.parametrize("model", ["gemma", "mistral"])
def test_a_synchronous_load_is_refused_at_start(
    kit: Any, models: Callable[[str], Path], daemon: Any, model: str
) -> None:
    with (
        pytest.raises(ConfigError, match="load_mode sync needs a model with a single cache group"),
        kit.run_engine(models(model), daemon, {"load_mode": "sync"}),
    ):
        pass

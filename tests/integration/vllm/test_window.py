"""A model all of whose layers see a window: one cache group, of which a hit needs the last blocks only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpool.errors import LeaseLost
from kvpool.types import PartKind

Oracle = Callable[..., list[list[int]]]


@pytest.fixture(scope="module")
def asked(kit: Any) -> list[list[int]]:
    return kit.prompts(2)


@pytest.fixture(scope="module")
def mistral(models: Callable[[str], Path]) -> Path:
    return models("mistral")


@pytest.fixture(scope="module")
def saved(
    kit: Any, mistral: Path, daemon: Any, oracle: Oracle, asked: list[list[int]]
) -> list[list[int]]:
    expected = oracle("mistral", asked)
    with kit.run_engine(mistral, daemon) as engine:
        outputs = engine.generate(asked)
        assert [output.tokens for output in outputs] == expected
        engine.assert_nothing_held(daemon)
        parts = engine.namespace.parts
        assert [(part.kind, part.window_blocks) for part in parts] == [(PartKind.WINDOW, 2)] * 2
    return expected


def test_a_fresh_engine_loads_the_window(
    kit: Any, mistral: Path, daemon: Any, saved: list[list[int]], asked: list[list[int]]
) -> None:
    with kit.run_engine(mistral, daemon) as engine:
        outputs = engine.generate(asked)
        assert [output.tokens for output in outputs] == saved
        blocks = [len(each) // kit.BLOCK for each in asked]
        assert [output.cached for output in outputs] == [kit.BLOCK * each for each in blocks]
        assert engine.metric("loaded_blocks") == kit.SHARDS * 2 * len(asked)
        engine.assert_nothing_held(daemon)


def test_a_failed_load_is_computed_from_the_beginning(
    kit: Any,
    mistral: Path,
    daemon: Any,
    saved: list[list[int]],
    asked: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The blocks before the window are nowhere: whoever goes on from the first that failed lacks them."""
    with kit.run_engine(mistral, daemon) as engine:
        tries = kit.fail_loads(engine, monkeypatch, LeaseLost("made to fail"))
        outputs = engine.generate(asked)
        assert [output.tokens for output in outputs] == saved
        assert len(tries) == len(asked)
        monkeypatch.undo()
        engine.forget()
        # Nothing of it went to the pool either.
        assert [output.tokens for output in engine.generate(asked)] == saved
        engine.assert_nothing_held(daemon)

"""One engine saves, a fresh one loads, and both say what an engine without a pool says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Oracle = Callable[..., list[list[int]]]


@pytest.fixture(scope="module")
def asked(kit: Any) -> list[list[int]]:
    return kit.prompts(2)


@pytest.fixture(scope="module")
def saved(
    kit: Any, llama: Path, daemon: Any, oracle: Oracle, asked: list[list[int]]
) -> list[list[int]]:
    """Tokens of an engine without a pool, and an engine's blocks in the pool, checked."""
    expected = oracle("llama", asked)
    with kit.run_engine(llama, daemon) as engine:
        outputs = engine.generate(asked)
        assert [output.tokens for output in outputs] == expected
        assert [output.cached for output in outputs] == [0, 0, 0]
        assert engine.metric("pulls") == engine.metric("pull_wait_seconds") == 0
        engine.assert_nothing_held(daemon)
        blocks = sum((len(each) + kit.NEW - 1) // kit.BLOCK for each in asked)
        assert daemon.counters().committed == kit.SHARDS * blocks
        assert engine.metric("saved_blocks") == kit.SHARDS * blocks
        # Again, from its own prefix cache: nothing is loaded, nothing is stored twice.
        again = engine.generate(asked)
        assert [output.tokens for output in again] == expected
        engine.assert_nothing_held(daemon)
        assert daemon.counters().committed == kit.SHARDS * blocks
        assert daemon.counters().duplicates == 0
    return expected


@pytest.mark.parametrize("mode", ["async", "auto", "sync"])
def test_a_fresh_engine_loads_what_another_saved(
    kit: Any, llama: Path, daemon: Any, saved: list[list[int]], asked: list[list[int]], mode: str
) -> None:
    before = daemon.counters().committed
    with kit.run_engine(llama, daemon, {"load_mode": mode}) as engine:
        if mode == "async":
            # One by one: which loads end in time for one step is chance, and what is computed together with
            # what shows in the last bits.
            outputs = [engine.generate([each])[0] for each in asked]
        else:
            outputs = engine.generate(asked)
        assert [output.tokens for output in outputs] == saved
        hits = [kit.hit(len(each)) for each in asked]
        if mode == "async":
            # A prompt of whole blocks may be loaded whole; its last token is computed again.
            hits = [len(each) // kit.BLOCK * kit.BLOCK for each in asked]
        assert [output.cached for output in outputs] == hits
        blocks = sum(hits) // kit.BLOCK
        engine.assert_nothing_held(daemon)
        assert engine.metric("lookups") == engine.metric("loads") == len(asked)
        assert engine.metric("loaded_blocks") == kit.SHARDS * blocks
        assert engine.metric("failed_loads") == 0
        parts = engine.namespace.parts
        assert engine.metric("loaded_bytes") == blocks * sum(part.nbytes for part in parts)
    assert daemon.counters().committed == before


def test_generated_blocks_are_there_for_the_next_turn(
    kit: Any,
    llama: Path,
    daemon: Any,
    saved: list[list[int]],
    asked: list[list[int]],
) -> None:
    turn = [before + said for before, said in zip(asked, saved, strict=True)]
    longer = [each + kit.TINY.prompt(900 + i, 40) for i, each in enumerate(turn)]
    # Its own first turn, too: KV from a decode step differs in its last bits from that of a prefill.
    with kit.run_engine(llama) as alone:
        alone.generate(asked)
        expected = [output.tokens for output in alone.generate(longer)]
    with kit.run_engine(llama, daemon) as engine:
        outputs = engine.generate(longer)
    assert [output.tokens for output in outputs] == expected
    # All but the last generated token had its KV computed.
    assert [output.cached for output in outputs] == [
        (len(each) - 1) // kit.BLOCK * kit.BLOCK for each in turn
    ]


def test_the_oracle_sees_what_is_loaded(
    kit: Any, llama: Path, daemon: Any, saved: list[list[int]], asked: list[list[int]]
) -> None:
    """The control: with the store overwritten the answers must change."""
    with kit.run_engine(llama, daemon) as engine:
        with kit.zeroed_store(engine):
            outputs = engine.generate(asked)
        assert [output.cached for output in outputs] == [kit.hit(len(each)) for each in asked]
        # The shortest prompt may be insensitive; the long ones are not.
        assert outputs[0].tokens != saved[0]
        assert outputs[1].tokens != saved[1]

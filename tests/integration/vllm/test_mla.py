"""Latent attention (MLA): a block has no heads, and is stored once whatever the ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpool.errors import LeaseLost
from kvpool.types import PartKind

Oracle = Callable[..., list[list[int]]]

BLOCK = 16  # vLLM's kernel for CPUs knows no other
LENGTHS = (400, 333, 321)
NEW = 12
OPTIONS = {"block_size": BLOCK}


@pytest.fixture(scope="module")
def deepseek(models: Callable[[str], Path]) -> Path:
    return models("deepseek")


@pytest.fixture(scope="module")
def asked(kit: Any) -> list[list[int]]:
    return kit.prompts(47, LENGTHS)


def hits(*, sync: bool) -> list[int]:
    """Tokens that the pool gives of each prompt. A synchronous load leaves at least one to be computed."""
    return [(length - sync) // BLOCK * BLOCK for length in LENGTHS]


@pytest.fixture(scope="module")
def saved(
    kit: Any, deepseek: Path, daemon: Any, oracle: Oracle, asked: list[list[int]]
) -> list[list[int]]:
    expected = oracle("deepseek", asked, NEW, **OPTIONS)
    with kit.run_engine(deepseek, daemon, **OPTIONS) as engine:
        outputs = engine.generate(asked, NEW)
        assert [output.tokens for output in outputs] == expected
        engine.assert_nothing_held(daemon)
        (part,) = engine.namespace.parts
        assert part.kind is PartKind.FULL
        # Four layers' latents: 512 floats and 64 of positions a token, the same for all heads.
        assert part.nbytes == 4 * BLOCK * (512 + 64) * 4
    return expected


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_fresh_engine_loads_the_latents(
    kit: Any, deepseek: Path, daemon: Any, saved: list[list[int]], asked: list[list[int]], mode: str
) -> None:
    with kit.run_engine(deepseek, daemon, {"load_mode": mode}, **OPTIONS) as engine:
        outputs = engine.generate(asked, NEW)
        assert [output.cached for output in outputs] == hits(sync=mode == "sync")
        assert [output.tokens for output in outputs] == saved
        assert engine.metric("loaded_blocks") == sum(hits(sync=mode == "sync")) // BLOCK
        # The weights are known, and the same behind a reset.
        engine.drain()
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        outputs = engine.generate(asked, NEW)
        assert [output.cached for output in outputs] == hits(sync=mode == "sync")
        assert engine.metric("new_weights") == 0
        engine.assert_nothing_held(daemon)


def test_a_failed_load_is_recomputed_and_the_oracle_sees_what_is_loaded(
    kit: Any,
    deepseek: Path,
    daemon: Any,
    saved: list[list[int]],
    asked: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with kit.run_engine(deepseek, daemon, **OPTIONS) as engine:
        with monkeypatch.context() as patch:
            tries = kit.fail_loads(engine, patch, LeaseLost("made to fail"))
            outputs = engine.generate(asked, NEW)
            assert [output.tokens for output in outputs] == saved
            assert len(tries) == len(asked)
        with kit.zeroed_store(engine):
            outputs = engine.generate(asked, NEW)
        assert all(output.tokens != answer for output, answer in zip(outputs, saved, strict=True))
        engine.assert_nothing_held(daemon)


@pytest.mark.engines
@pytest.mark.timeout(600)  # the two ranks spin, on cores that others want too
def test_two_ranks_read_what_one_wrote(
    kit: Any, deepseek: Path, tmp_path: Path, asked: list[list[int]]
) -> None:
    """And write no second copy: both have the same latents, of which each writes a half."""
    with kit.run_daemon(tmp_path) as daemon:
        with kit.run_engine(deepseek, daemon, **OPTIONS) as engine:
            answers = [output.tokens for output in engine.generate(asked, NEW)]
            engine.assert_nothing_held(daemon)
            record = engine.namespace.record
        committed = daemon.counters().committed
        two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
        with kit.run_engine(deepseek, daemon, {"load_mode": "async"}, **two, **OPTIONS) as engine:
            assert engine.namespace.record == record
            outputs = engine.generate(asked, NEW)
            assert [output.tokens for output in outputs] == answers
            assert [output.cached for output in outputs] == hits(sync=False)
            engine.assert_nothing_held(daemon)
            assert daemon.counters().committed == committed
            fresh = kit.prompts(48, (200,))
            (output,) = engine.generate(fresh, NEW)
            assert output.cached == 0
            engine.assert_nothing_held(daemon)
            assert daemon.counters().committed - committed == (200 + NEW - 1) // BLOCK
        with kit.run_engine(deepseek, daemon, {"load_mode": "async"}, **OPTIONS) as engine:
            (again,) = engine.generate(fresh, NEW)
            assert (again.tokens, again.cached) == (output.tokens, 200 // BLOCK * BLOCK)

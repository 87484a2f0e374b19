"""Daemons that die, come back, or were never there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Oracle = Callable[..., list[list[int]]]


@pytest.fixture(scope="module")
def asked(kit: Any) -> list[list[int]]:
    return kit.prompts(4)


@pytest.fixture(scope="module")
def expected(oracle: Oracle, asked: list[list[int]]) -> list[list[int]]:
    return oracle("llama", asked)


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("when", ["before the join", "during the copy"])
def test_a_daemon_killed_while_an_engine_loads(
    kit: Any,
    llama: Path,
    tmp_path: Path,
    expected: list[list[int]],
    asked: list[list[int]],
    mode: str,
    when: str,
) -> None:
    """The engine recomputes, or uses bytes that stay whole in its own mapping: right either way."""
    with (
        kit.run_daemon(tmp_path) as daemon,
        kit.run_engine(llama, daemon, {"load_mode": mode}) as engine,
    ):
        engine.generate(asked)
        engine.forget()
        copied = []

        def kill_first(copy: Callable[..., None], *arguments: Any) -> None:
            if not copied:
                daemon.kill()
            copied.append(1)
            copy(*arguments)

        with kit.loads_through(engine, kill_first, joined=when == "during the copy"):
            outputs = engine.generate(asked)
        assert [output.tokens for output in outputs] == expected
        assert copied
        # Lookups of one step were all answered before; only the copy under way has what it needs.
        assert engine.metric("failed_loads") == len(asked) - (when == "during the copy")
        # And goes on without it.
        engine.forget()
        outputs = engine.generate(asked)
        assert [output.tokens for output in outputs] == expected
        assert [output.cached for output in outputs] == [0, 0, 0]
        assert engine.pool.get_num_free_blocks() == engine.idle_free


def test_a_daemon_that_comes_back_is_used_again(
    kit: Any, llama: Path, tmp_path: Path, expected: list[list[int]], asked: list[list[int]]
) -> None:
    with kit.run_daemon(tmp_path) as daemon:
        path = daemon.socket
        with kit.run_engine(llama, path, {"resave_s": 0}) as engine:
            engine.generate(asked)
            engine.drain()
            daemon.kill()
            (tmp_path / "again").mkdir()
            with kit.run_daemon(tmp_path / "again", socket=path) as second:
                engine.forget()
                # Computed and saved into the empty one, then loaded; while the clients' back-off
                # lasts they are misses.
                while not engine.metric("loads"):
                    engine.forget()
                    outputs = engine.generate(asked)
                    assert [output.tokens for output in outputs] == expected
                engine.assert_nothing_held(second)


def test_an_engine_without_a_daemon_just_computes(
    kit: Any, llama: Path, tmp_path: Path, expected: list[list[int]], asked: list[list[int]]
) -> None:
    with kit.run_engine(llama, str(tmp_path / "nobody")) as engine:
        for _ in range(2):
            outputs = engine.generate(asked)
            assert [output.tokens for output in outputs] == expected
        engine.drain()
        assert engine.pool.get_num_free_blocks() == engine.idle_free
        assert engine.metric("loads") == engine.metric("saved_blocks") == 0
        assert engine.metric("failed_saves") > 0

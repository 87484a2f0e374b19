"""Turns of sessions from a real engine, in a pool that is smaller than what they use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Oracle = Callable[..., list[list[int]]]

MEMORY = "8MiB"  # some 64 blocks
BEGUN, LEFT, WENT_ON, OTHER, FILLER = 5, 20, 10, 10, 5  # blocks
FILLERS_MAX = 20
NEW = 8  # tokens of an answer, which fill no block


def test_what_an_edited_history_left_goes_before_another_session(
    kit: Any, llama: Path, tmp_path: Path, oracle: Oracle
) -> None:
    def prompt(seed: int, blocks: int) -> list[int]:
        found: list[int] = kit.TINY.prompt(seed, blocks * kit.BLOCK)
        return found

    begun = prompt(1, BEGUN)
    turns = [begun + prompt(2, LEFT), begun + prompt(3, WENT_ON)]
    other = prompt(4, OTHER)
    fillers = [prompt(100 + number, FILLER) for number in range(FILLERS_MAX)]
    right = oracle("llama", [other, *turns, *fillers], NEW)
    expected = dict(zip(map(tuple, [other, *turns, *fillers]), right, strict=True))

    with (
        kit.run_daemon(tmp_path, memory=MEMORY) as daemon,
        kit.run_engine(llama, daemon) as engine,
    ):

        def ask(asked: list[int], params: dict[str, Any] | None = None) -> int:
            (output,) = engine.generate([asked], NEW, params)
            engine.drain()
            assert output.tokens == expected[tuple(asked)]
            return int(output.cached)

        ask(other, {"kvpool_session": {"id": "other"}})
        ask(turns[0], {"kvpool_session": {"id": "edited"}})
        assert daemon.counters().expended == 0
        ask(turns[1], {"kvpool_session": {"id": "edited"}})
        kit.until(
            lambda: daemon.counters().expended == kit.SHARDS * LEFT, "what the second turn left"
        )
        assert daemon.counters().evicted == 0
        for filler in fillers:
            ask(filler)
            if daemon.counters().evicted >= kit.SHARDS * LEFT // 2:
                break
        counters = daemon.counters()
        assert 0 < counters.evicted == counters.evicted_expendable

        # Both sessions go on from the pool, though the other one is the oldest that there is.
        engine.forget()
        assert ask(other) == OTHER * kit.BLOCK - kit.BLOCK
        assert ask(turns[1]) == (BEGUN + WENT_ON) * kit.BLOCK - kit.BLOCK
        # What does not fit a session costs a count.
        ask(other, {"kvpool_session": {"id": "x" * 1000}})
        assert engine.metric("bad_requests") == 1
        # The end of a session, with what is saved after it was told.
        before = daemon.counters().expended
        ask(other, {"kvpool_session": {"id": "other", "end": True}})
        kit.until(
            lambda: daemon.counters().expended == before + kit.SHARDS * OTHER,
            "the end of a session",
        )
        engine.assert_nothing_held(daemon)

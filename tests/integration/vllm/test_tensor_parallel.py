"""Engines of one rank and of two, each rank in its own process: what one saves, the others load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

NEW = 6  # a step of two processes that wait for one another takes long on two cores
TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),  # the two ranks spin, on cores that others want too
]


def blocks_of(kit: Any, asked: list[list[int]]) -> int:
    return sum((len(each) + NEW - 1) // kit.BLOCK for each in asked)


@pytest.mark.parametrize("writer", [1, 2])
def test_one_rank_and_two_read_what_the_other_wrote(
    kit: Any, llama: Path, tmp_path: Path, writer: int
) -> None:
    """Tokens in float32 are the same: the sums of two ranks differ from those of one in their last bits only."""
    asked = kit.prompts(6, [700, 100])
    blocks = blocks_of(kit, asked)
    hits = [kit.hit(len(each)) for each in asked]
    ranks = {1: {}, 2: TWO}
    with kit.run_daemon(tmp_path) as daemon:
        with kit.run_engine(llama, daemon, **ranks[writer]) as engine:
            outputs = engine.generate(asked, NEW)
            expected = [output.tokens for output in outputs]
            assert [output.cached for output in outputs] == [0, 0]
            engine.assert_nothing_held(daemon)
            assert daemon.counters().committed == kit.SHARDS * blocks
            record = engine.connector._scheduler._namespace.record
        for reader in (3 - writer, writer):
            with kit.run_engine(llama, daemon, **ranks[reader]) as engine:
                assert engine.connector._scheduler._namespace.record == record
                outputs = engine.generate(asked, NEW)
                assert [output.tokens for output in outputs] == expected
                assert [output.cached for output in outputs] == hits
                assert engine.metric("loads") == reader * len(asked)
                assert engine.metric("failed_loads") == 0
                engine.assert_nothing_held(daemon)
                # Nothing was written again, or in another form.
                assert daemon.counters().committed == kit.SHARDS * blocks
                if reader == writer:
                    engine.forget()
                    with kit.zeroed_store(engine):
                        assert [each.tokens for each in engine.generate(asked, NEW)] != expected


@pytest.mark.parametrize("prefill", [1, 2])
def test_prefill_and_decode_of_other_ranks(
    kit: Any, llama: Path, tmp_path: Path, prefill: int
) -> None:
    """On two nodes: blocks are pulled, and followed, by an engine of another number of ranks."""
    pulled, followed = kit.prompts(8, [700, 500])
    ranks = {1: {}, 2: TWO}
    with kit.run_cluster(tmp_path, 2) as (a, b):
        with kit.run_engine(llama, a, **ranks[prefill]) as engine:
            outputs = engine.generate([pulled, followed], NEW)
            expected = [output.tokens for output in outputs]
            engine.drain()
            kit.until(a.settled, "the cluster knows the blocks of a")
        extra = {"pull_wait_s": 30.0}
        with kit.run_engine(llama, b, extra, **ranks[3 - prefill]) as engine:
            (output,) = engine.generate([pulled], NEW)
            assert (output.tokens, output.cached) == (expected[0], kit.hit(len(pulled)))
            hint = {"kvpool": {"follow_s": 30.0, "source": "a"}}
            (output,) = engine.generate([followed], NEW, hint)
            assert (output.tokens, output.cached) == (expected[1], kit.hit(len(followed)))
            assert engine.metric("follows") == 1
            assert engine.metric("failed_loads") == 0
            engine.assert_nothing_held(b)

"""Engines of one rank and of two, each rank in its own process, on two nodes: what one saves, the others load.

A rank takes ten seconds of a core to start, so there is one engine of two, which reads first and writes then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

NEW = 6  # a step of two processes that wait for one another takes long on two cores
LENGTHS = (700, 500, 100)
TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
EXTRA = {"pull_wait_s": 30.0}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),  # the two ranks spin, on cores that others want too
]


def shards(kit: Any, asked: list[list[int]]) -> int:
    """Of all blocks of these prompts and their answers."""
    return int(kit.SHARDS * sum((len(each) + NEW - 1) // kit.BLOCK for each in asked))


def written(kit: Any, engine: Any, node: Any, asked: list[list[int]]) -> list[list[int]]:
    """The answers to prompts that nobody has, once all nodes know that this one has them."""
    before = node.counters().committed
    outputs = engine.generate(asked, NEW)
    assert [output.cached for output in outputs] == [0] * len(asked)
    engine.assert_nothing_held(node)
    assert node.counters().committed - before == shards(kit, asked)
    kit.until(node.settled, "the cluster knows the blocks")
    return [output.tokens for output in outputs]


def read(
    kit: Any,
    engine: Any,
    node: Any,
    source: str,
    asked: list[list[int]],
    expected: list[list[int]],
    ranks: int,
) -> None:
    """What the other node has: pulled, followed, and then read from this one."""
    committed = node.counters().committed
    hint = {"kvpool": {"follow_s": 30.0, "source": source}}
    hits = [kit.hit(len(each)) for each in asked]
    outputs = [
        *engine.generate(asked[:1], NEW),
        *engine.generate(asked[1:2], NEW, hint),
        *engine.generate(asked[2:], NEW),
    ]
    assert [(output.tokens, output.cached) for output in outputs] == list(
        zip(expected, hits, strict=True)
    )
    assert engine.metric("follows") == 1
    assert engine.metric("loads") == ranks * len(asked)
    engine.forget()
    outputs = engine.generate(asked, NEW)
    assert [(output.tokens, output.cached) for output in outputs] == list(
        zip(expected, hits, strict=True)
    )
    assert engine.metric("loads") == 2 * ranks * len(asked)
    assert engine.metric("failed_loads") == 0
    engine.assert_nothing_held(node)
    # All came, or were written, once: nothing was written again, or in another form.
    assert node.counters().committed - committed == shards(kit, asked)


def test_one_rank_and_two_read_what_the_other_wrote(kit: Any, llama: Path, tmp_path: Path) -> None:
    """Tokens in float32 are the same: the sums of two ranks differ from those of one in their last bits only."""
    by_one, by_two = kit.prompts(6, LENGTHS), kit.prompts(8, LENGTHS)
    with kit.run_cluster(tmp_path, 2) as (a, b):
        with kit.run_engine(llama, a) as engine:
            answers = written(kit, engine, a, by_one)
            record = engine.namespace.record
        with kit.run_engine(llama, b, EXTRA, **TWO) as engine:
            assert engine.namespace.record == record
            read(kit, engine, b, "a", by_one, answers, ranks=2)
            answers_of_two = written(kit, engine, b, by_two)
            # Ranks read what ranks wrote.
            engine.forget()
            outputs = engine.generate(by_two, NEW)
            assert [output.tokens for output in outputs] == answers_of_two
            assert [output.cached for output in outputs] == [kit.hit(length) for length in LENGTHS]
            engine.forget()
            with kit.zeroed_store(engine):
                assert [each.tokens for each in engine.generate(by_one, NEW)] != answers
        with kit.run_engine(llama, a, EXTRA) as engine:
            read(kit, engine, a, "b", by_two, answers_of_two, ranks=1)

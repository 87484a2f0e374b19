"""Two ranks, each in its own process, each with its own parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

NEW = 6  # a step of two processes that wait for one another takes long on two cores


@pytest.mark.slow
@pytest.mark.timeout(600)  # the two ranks spin, on cores that others want too
def test_two_ranks_save_and_load(kit: Any, llama: Path, daemon: Any) -> None:
    """Compared with itself: the sums of two ranks round otherwise than those of one."""
    asked = kit.prompts(6, [700, 100])
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with kit.run_engine(llama, daemon, **options) as engine:
        outputs = engine.generate(asked, NEW)
        expected = [output.tokens for output in outputs]
        assert [output.cached for output in outputs] == [0, 0]
        engine.assert_nothing_held(daemon)
        blocks = sum((len(each) + NEW - 1) // kit.BLOCK for each in asked)
        assert daemon.counters().committed == 2 * blocks
    with kit.run_engine(llama, daemon, **options) as engine:
        outputs = engine.generate(asked, NEW)
        assert [output.tokens for output in outputs] == expected
        assert [output.cached for output in outputs] == [kit.hit(len(each)) for each in asked]
        assert engine.metric("loads") == 2 * len(asked)
        engine.assert_nothing_held(daemon)
    # One rank is another namespace.
    with kit.run_engine(llama, daemon) as engine:
        assert engine.generate(asked[:1], 1)[0].cached == 0
